//! The interface between the driver and the transport.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use node_consensus::{Message, MessageKind};
use thiserror::Error;
use tokio::sync::watch;

use super::mail::Notice;
use super::mailbox::CoreInbox;
use super::{NodeStatus, accepts_removal_report};
use crate::witness::Promise;

/// Sender of messages to peers. It has one queue per peer, bounded in bytes.
pub trait PeerSender: Send + Sync + 'static {
    /// Queues a message for the peer `message.to`, or returns at once why the message was dropped.
    /// Never blocks.
    fn try_send(&self, message: Message) -> Result<(), SendError>;

    /// Starts to send a snapshot without delaying other messages. [`PeerInbox::snapshot_sent`]
    /// reports the end exactly once, even if the transfer can't start.
    fn send_snapshot(&self, snapshot: OutgoingSnapshot);
}

/// Reason why a message was dropped. Consensus tolerates any loss.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum SendError {
    /// The peer receives too slowly, so its queue is full.
    #[error("the queue to the peer is full")]
    Full,
    /// No stream to the peer is connected.
    #[error("the peer is not connected")]
    NotConnected,
}

/// A snapshot to be sent.
#[derive(Debug)]
pub struct OutgoingSnapshot {
    /// Message that announces the snapshot, and is sent before the body. Its field `to` names the
    /// receiver.
    pub message: Message,
    /// File of the snapshot's body, open at its beginning. The driver removes the file when all
    /// transfers of it have ended.
    pub body: File,
    /// Length of the snapshot's body in bytes.
    pub bytes: u64,
}

/// A snapshot that was received completely.
#[derive(Debug)]
pub struct IncomingSnapshot {
    /// Message that announced the snapshot, received before the body.
    pub message: Message,
    /// File that holds only this snapshot's body, in the directory
    /// [`MemberOptions::snapshot_dir`](super::MemberOptions::snapshot_dir). The driver removes the
    /// file.
    pub body: PathBuf,
}

/// Error: the inbound queue is full. The caller drops the message, or waits and tries again.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("the inbound queue is full")]
pub struct InboxFull;

/// Interface by which the transport reports to the driver. Cheap to clone; never blocks.
#[derive(Clone, Debug)]
pub struct PeerInbox {
    pub(super) core_inbox: Arc<dyn CoreInbox>,
    pub(super) status: watch::Receiver<Arc<NodeStatus>>,
}

impl PeerInbox {
    /// Delivers a message from the peer `from`, whose identity the transport has verified. A
    /// message with another sender in its `from` field is dropped.
    pub fn deliver(&self, from: u64, message: Message) -> Result<(), InboxFull> {
        if message.from != from {
            tracing::warn!(
                peer.member.id = %format_args!("{from:x}"),
                claimed = %format_args!("{:x}", message.from),
                "a peer sent a message in another member's name"
            );
            return Ok(());
        }
        self.core_inbox.message(message)
    }

    /// Returns everything that this member has promised to its peers by votes and acknowledgements.
    pub fn promised(&self) -> Promise {
        self.status.borrow().promised
    }

    /// Returns the current term, and the highest index that this member knows to be committed.
    pub fn term_and_commit(&self) -> (u64, u64) {
        let status = self.status.borrow();
        (status.term, status.commit)
    }

    /// Returns whether the snapshot announced by `message` from `from` would advance this member.
    /// If it would not, the transport need not receive the body.
    pub fn wants_snapshot(&self, from: u64, message: &Message) -> bool {
        let status = self.status.borrow();
        is_snapshot_wanted(from, message, status.term, status.commit)
    }

    /// Returns whether this member, if it was removed, may end when the peer `by` reports the
    /// removal.
    #[must_use]
    pub fn accepts_removal_report(&self, by: u64) -> bool {
        let status = self.status.borrow();
        accepts_removal_report(by, &status.members, status.may_be_only_one_to_know_removal)
    }

    /// Delivers a complete snapshot that [`wants_snapshot`](Self::wants_snapshot) accepted. The
    /// returned channel yields true once the snapshot is durably installed, and false if it was
    /// discarded. If the node stops, the channel closes without a value.
    pub fn deliver_snapshot(&self, snapshot: IncomingSnapshot) -> Receiver<bool> {
        self.core_inbox.snapshot(snapshot)
    }

    /// Reports whether the transfer to `peer`, started by [`PeerSender::send_snapshot`], arrived
    /// completely.
    pub fn snapshot_sent(&self, peer: u64, arrived: bool) {
        self.core_inbox.notice(Notice::SnapshotSent { peer, arrived });
    }

    /// Reports that a stream to or from `peer` is connected, after its hello was accepted.
    pub fn connected(&self, peer: u64) {
        self.core_inbox.notice(Notice::Connected(peer));
    }

    /// Reports that no stream to or from `peer` is connected any more.
    pub fn disconnected(&self, peer: u64) {
        self.core_inbox.notice(Notice::Disconnected(peer));
    }

    /// Reports that the process of `peer` has ended, after its last stream did. The report may be
    /// wrong: it then delays a few requests, at most.
    pub fn process_ended(&self, peer: u64) {
        self.core_inbox.notice(Notice::ProcessEnded(peer));
    }
}

/// Returns whether the snapshot announced by `message` from `from` would advance a member whose
/// term is `term` and whose commit index is `commit`.
pub fn is_snapshot_wanted(from: u64, message: &Message, term: u64, commit: u64) -> bool {
    message.kind == MessageKind::Snapshot
        && message.from == from
        && message.term >= term
        && message.snapshot.is_some_and(|at| at.index > commit)
}

/// Inbox that records what the transport delivers, for tests of the transport.
#[cfg(any(test, feature = "testing"))]
pub mod test_inbox {
    use std::sync::{Mutex, mpsc};

    use node_consensus::Position;

    use super::*;
    use crate::driver::Role;

    /// Messages and snapshot files delivered so far.
    #[derive(Debug, Default)]
    pub struct RecordingInbox {
        pub messages: Mutex<Vec<Message>>,
        pub snapshots: Mutex<Vec<PathBuf>>,
    }

    impl CoreInbox for RecordingInbox {
        fn message(&self, message: Message) -> Result<(), InboxFull> {
            self.messages.lock().expect("no test panicked while it held the lock").push(message);
            Ok(())
        }

        fn notice(&self, _: Notice) {}

        fn snapshot(&self, snapshot: IncomingSnapshot) -> Receiver<bool> {
            self.snapshots
                .lock()
                .expect("no test panicked while it held the lock")
                .push(snapshot.body);
            let (installed, receiver) = mpsc::sync_channel(1);
            installed.send(true).expect("the channel has room for it");
            receiver
        }
    }

    /// Returns the status of a member 1 that has an empty log and no leader.
    pub fn status() -> NodeStatus {
        NodeStatus {
            member: 1,
            leader: 0,
            term: 0,
            role: Role::Follower,
            commit: 0,
            applied: Position::default(),
            durable: Position::default(),
            first: 1,
            last: 0,
            quorum_connected: None,
            leader_lost: None,
            promised: Promise::default(),
            barrier_index: None,
            peers: Vec::new(),
            successor: None,
            members: Arc::default(),
            has_left: false,
            may_be_only_one_to_know_removal: false,
        }
    }

    /// Returns an inbox of a member whose status is that of [`status`].
    pub fn inbox() -> (PeerInbox, Arc<RecordingInbox>) {
        inbox_of(status())
    }

    /// Returns an inbox of a member with the given status.
    pub fn inbox_of(status: NodeStatus) -> (PeerInbox, Arc<RecordingInbox>) {
        let recorded = Arc::new(RecordingInbox::default());
        let status = watch::channel(Arc::new(status)).1;
        (PeerInbox { core_inbox: Arc::clone(&recorded) as _, status }, recorded)
    }
}
