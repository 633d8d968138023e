//! The seam to the transport: what the driver needs from it, and what it gives back.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use node_consensus::{Message, MessageKind};
use thiserror::Error;
use tokio::sync::watch;

use super::NodeStatus;
use super::mailbox::{Inlet, Notice};

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
    /// The body, open at its beginning. The driver removes the file when it has built a newer one;
    /// an open one stays readable.
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

    /// Whether the snapshot that `message` from `from` announces would bring this member on; if not,
    /// there is no need to receive its body.
    pub fn wants_snapshot(&self, from: u64, message: &Message) -> bool {
        let status = self.status.borrow();
        message.kind == MessageKind::Snapshot
            && message.from == from
            && message.term >= status.term
            && message.snapshot.is_some_and(|at| at.index > status.commit)
    }

    /// A whole snapshot, which [`wants_snapshot`](Self::wants_snapshot) has let pass. What is
    /// returned tells true once it is installed, durably, and false if it wasn't needed after all;
    /// it ends without either when the node stops.
    pub fn deliver_snapshot(&self, snapshot: IncomingSnapshot) -> Receiver<bool> {
        self.inlet.snapshot(snapshot)
    }

    /// Something to `peer` was lost, or its connection broke.
    pub fn unreachable(&self, peer: u64) {
        self.inlet.notice(Notice::Unreachable(peer));
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
