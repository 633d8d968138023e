//! The seam to the transport: what the driver needs from it, and what it gives back.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use node_consensus::{Message, MessageKind};
use thiserror::Error;
use tokio::sync::watch;

use super::mail::Notice;
use super::mailbox::Inlet;
use super::{NodeStatus, ends_at_word_of};
use crate::witness::Promise;

/// Where messages to peers go. One queue per peer, bounded in bytes.
pub trait PeerSender: Send + Sync + 'static {
    /// Queues a message to `message.to`, or says at once why not. Never blocks.
    fn try_send(&self, message: Message) -> Result<(), SendError>;

    /// Starts to send a snapshot, beside the messages and without holding them up. How it ended
    /// is reported by [`PeerInbox::snapshot_sent`], exactly once, also when it can't even start.
    fn send_snapshot(&self, snapshot: OutgoingSnapshot);
}

/// Why a message was dropped. Consensus copes with any loss.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum SendError {
    /// The peer takes it too slowly.
    #[error("the queue to the peer is full")]
    Full,
    /// There is no connection.
    #[error("the peer is not connected")]
    NotConnected,
}

/// A snapshot on its way out.
#[derive(Debug)]
pub struct OutgoingSnapshot {
    /// Goes before the body; `message.to` is the receiver.
    pub message: Message,
    /// The body, open at its beginning. The driver removes the file when all transfers of it have
    /// ended.
    pub body: File,
    /// Its length in bytes.
    pub bytes: u64,
}

/// A snapshot that has arrived whole.
#[derive(Debug)]
pub struct IncomingSnapshot {
    /// What came before the body.
    pub message: Message,
    /// The body, in a file of its own in the directory that
    /// [`Options::snapshot_dir`](super::Options::snapshot_dir) names. The driver removes it.
    pub body: PathBuf,
}

/// The inbound queue is full: drop the message, or wait and try again.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("the inbound queue is full")]
pub struct InboxFull;

/// What the transport tells the driver. Cheap to clone; never blocks.
#[derive(Clone, Debug)]
pub struct PeerInbox {
    pub(super) inlet: Arc<dyn Inlet>,
    pub(super) status: watch::Receiver<Arc<NodeStatus>>,
}

impl PeerInbox {
    /// A message from `from`, which the transport has authenticated. Messages that claim another
    /// sender are dropped.
    pub fn deliver(&self, from: u64, message: Message) -> Result<(), InboxFull> {
        if message.from != from {
            tracing::warn!(
                peer.member.id = %format_args!("{from:x}"),
                claimed = %format_args!("{:x}", message.from),
                "a peer sent a message in another member's name"
            );
            return Ok(());
        }
        self.inlet.message(message)
    }

    /// What this member has promised to others, so far.
    pub fn promised(&self) -> Promise {
        self.status.borrow().promised
    }

    /// How far it knows the log to be committed, and its term.
    pub fn committed(&self) -> (u64, u64) {
        let status = self.status.borrow();
        (status.term, status.commit)
    }

    /// Whether the snapshot that `message` from `from` announces would bring this member on; if not,
    /// there is no need to receive its body.
    pub fn wants_snapshot(&self, from: u64, message: &Message) -> bool {
        let status = self.status.borrow();
        is_wanted(from, message, status.term, status.commit)
    }

    /// Whether this member ends because `by` says that it was removed.
    #[must_use]
    pub fn ends_at_word_of(&self, by: u64) -> bool {
        let status = self.status.borrow();
        ends_at_word_of(by, &status.members, status.may_alone_know)
    }

    /// A whole snapshot, which [`wants_snapshot`](Self::wants_snapshot) has let pass. What is
    /// returned tells true once it is installed, durably, and false if it wasn't needed after all;
    /// it ends without either when the node stops.
    pub fn deliver_snapshot(&self, snapshot: IncomingSnapshot) -> Receiver<bool> {
        self.inlet.snapshot(snapshot)
    }

    /// How [`PeerSender::send_snapshot`] to `peer` ended.
    pub fn snapshot_sent(&self, peer: u64, arrived: bool) {
        self.inlet.notice(Notice::SnapshotSent { peer, arrived });
    }

    /// A stream to or from `peer` stands, after its hello was accepted.
    pub fn connected(&self, peer: u64) {
        self.inlet.notice(Notice::Connected(peer));
    }

    /// No stream to `peer` stands any more.
    pub fn disconnected(&self, peer: u64) {
        self.inlet.notice(Notice::Disconnected(peer));
    }
}

/// Whether the snapshot that `message` from `from` announces would bring a member on that has got to
/// `term` and `commit`.
pub fn is_wanted(from: u64, message: &Message, term: u64, commit: u64) -> bool {
    message.kind == MessageKind::Snapshot
        && message.from == from
        && message.term >= term
        && message.snapshot.is_some_and(|at| at.index > commit)
}

/// An inbox that nobody empties, for tests of what comes before it.
#[cfg(test)]
pub(crate) mod recorded {
    use std::sync::{Mutex, mpsc};

    use node_consensus::Position;

    use super::*;
    use crate::driver::Role;

    /// What has come in.
    #[derive(Debug, Default)]
    pub(crate) struct Recorded {
        pub(crate) messages: Mutex<Vec<Message>>,
        pub(crate) snapshots: Mutex<Vec<PathBuf>>,
    }

    impl Inlet for Recorded {
        fn message(&self, message: Message) -> Result<(), InboxFull> {
            self.messages.lock().unwrap().push(message);
            Ok(())
        }

        fn notice(&self, _: Notice) {}

        fn snapshot(&self, snapshot: IncomingSnapshot) -> Receiver<bool> {
            self.snapshots.lock().unwrap().push(snapshot.body);
            let (installed, receiver) = mpsc::sync_channel(1);
            installed.send(true).unwrap();
            receiver
        }
    }

    /// Member 1, which follows nobody and has an empty log.
    pub(crate) fn status() -> NodeStatus {
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
            settles: None,
            peers: Vec::new(),
            successor: None,
            members: Arc::default(),
            has_left: false,
            may_alone_know: false,
        }
    }

    /// That of [`status`].
    pub(crate) fn inbox() -> (PeerInbox, Arc<Recorded>) {
        inbox_of(status())
    }

    /// That of a member whose status is this.
    pub(crate) fn inbox_of(status: NodeStatus) -> (PeerInbox, Arc<Recorded>) {
        let recorded = Arc::new(Recorded::default());
        let status = watch::channel(Arc::new(status)).1;
        (PeerInbox { inlet: Arc::clone(&recorded) as _, status }, recorded)
    }
}
