//! Inputs that wait for the core thread. Their number is bounded, and the core takes all of them at
//! once. This module has no lock and no thread.
//!
//! Throughput depends mostly on batching. So the core takes all inputs that were queued while it
//! was busy. Proposals, reads and peer messages are counted, and refused above a limit. The number
//! of notices is bounded by the work that was given to the threads that report them.

use std::mem;

use bytes::Bytes;
use node_consensus::{Entry, EntryKind, Members, Message, Position};
use node_state::state_machine::{AppliedChange, RequestId};

use super::peers::IncomingSnapshot;

/// Maximum bytes of proposals that wait for the core thread. Further proposals fail with "too many
/// requests".
pub const MAX_QUEUED_PROPOSAL_BYTES: usize = 32 * 1024 * 1024;
/// Maximum number of proposals that wait for the core thread. Further proposals fail with "too many
/// requests".
pub const MAX_QUEUED_PROPOSALS: usize = 16 * 1024;
/// Maximum bytes of peer messages that wait for the core thread. Further messages are dropped,
/// which Raft tolerates.
pub const MAX_QUEUED_MESSAGE_BYTES: usize = 64 * 1024 * 1024;
/// Maximum number of reads that wait for a read barrier. Further reads fail with "too many
/// requests".
pub const MAX_QUEUED_READS: usize = 64 * 1024;

/// One proposal of this member's clients.
#[derive(Clone, Debug)]
pub struct ClientProposal {
    /// Request id, by which the outcome reaches the waiting request.
    pub id: RequestId,
    /// Kind of the entry that is proposed. It is never the no-op, which only a new leader appends.
    pub kind: EntryKind,
    pub data: Bytes,
}

/// Number of a request that waits for a read barrier.
pub type ReadToken = u64;

/// Event that another thread or the transport reports to the core thread.
#[derive(Debug)]
pub enum Notice {
    /// The log is durable up to and including the batch with this number.
    Persisted(u64),
    /// The state machine has applied entries.
    Applied {
        /// Position of the last entry applied.
        at: Position,
        /// Applied changes of members, in order.
        changes: Vec<AppliedChange>,
    },
    /// The store is durable up to and including this position.
    Checkpointed(Position),
    /// The log now begins after this position.
    Compacted(Position),
    /// The store has installed a snapshot durably.
    Installed {
        /// Position of the snapshot.
        at: Position,
        /// Voters and learners at the snapshot's position, as the store has them.
        members: Members,
    },
    /// Position and members of the snapshot body that was built; `None` if the build failed.
    Built(Option<(Position, Members)>),
    /// The log entries that a fetch request of consensus asked for were read.
    Fetched {
        /// Number of the fetch request.
        id: u64,
        /// Entries in order; empty if the log no longer has them.
        entries: Vec<Entry>,
    },
    /// A snapshot from a peer was received completely.
    Snapshot(IncomingSnapshot),
    /// The transfer of a snapshot to a peer ended.
    SnapshotSent {
        /// Peer that was sent the snapshot.
        peer: u64,
        /// Whether the peer received the whole snapshot.
        arrived: bool,
    },
    /// A message to this peer was lost.
    Unreachable(u64),
    /// A stream to or from this peer was established.
    Connected(u64),
    /// The last stream to or from this peer ended.
    Disconnected(u64),
    /// The process of this peer has ended. The peer, or its host, may start again.
    ProcessEnded(u64),
    /// No append has carried the new commit index to some peers for
    /// [`COMMIT_INDEX_DELAY`](super::COMMIT_INDEX_DELAY).
    SendCommitIndex,
    /// No quorum has answered the heartbeats for a read for
    /// [`READ_HEARTBEAT_DELAY`](super::READ_HEARTBEAT_DELAY).
    SendHeldHeartbeats,
    /// The next round of reads has been delayed for
    /// [`READ_ROUND_DELAY`](super::READ_ROUND_DELAY).
    StartReadRound,
    /// This member should campaign now.
    Campaign,
    /// This leader should transfer leadership: to the given member, or to the best successor if
    /// none is given.
    Transfer(Option<u64>),
}

/// Reason why an input for the core thread was not queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueError {
    /// The queue has reached its limit.
    Full,
    /// The core thread has stopped, and takes no more requests.
    Stopped,
}

/// Limits on the inputs that wait for the core thread. The default values are those used in
/// production.
#[derive(Clone, Copy, Debug)]
pub struct MailBounds {
    /// Maximum bytes of waiting proposals: see [`MAX_QUEUED_PROPOSAL_BYTES`].
    pub proposal_bytes: usize,
    /// Maximum number of waiting proposals: see [`MAX_QUEUED_PROPOSALS`].
    pub proposals: usize,
    /// Maximum bytes of waiting peer messages: see [`MAX_QUEUED_MESSAGE_BYTES`].
    pub message_bytes: usize,
    /// Maximum number of waiting reads: see [`MAX_QUEUED_READS`].
    pub reads: usize,
}

impl Default for MailBounds {
    fn default() -> Self {
        Self {
            proposal_bytes: MAX_QUEUED_PROPOSAL_BYTES,
            proposals: MAX_QUEUED_PROPOSALS,
            message_bytes: MAX_QUEUED_MESSAGE_BYTES,
            reads: MAX_QUEUED_READS,
        }
    }
}

/// All inputs that wait for the core thread.
#[derive(Debug, Default)]
pub struct Mail {
    pub(super) proposals: Vec<ClientProposal>,
    pub(super) reads: Vec<ReadToken>,
    pub(super) messages: Vec<Message>,
    pub(super) notices: Vec<Notice>,
    pub(super) stop: bool,
    proposal_bytes: usize,
    message_bytes: usize,
    bounds: MailBounds,
}

impl Mail {
    /// Returns an empty `Mail` whose inputs are limited by `bounds`.
    pub fn new(bounds: MailBounds) -> Self {
        Self { bounds, ..Self::default() }
    }

    /// Queues a proposal of this member's clients.
    pub fn propose(&mut self, proposal: ClientProposal) -> Result<(), QueueError> {
        if self.stop {
            return Err(QueueError::Stopped);
        }
        let bytes = self.proposal_bytes + proposal.data.len();
        if bytes > self.bounds.proposal_bytes || self.proposals.len() >= self.bounds.proposals {
            return Err(QueueError::Full);
        }
        self.proposal_bytes = bytes;
        self.proposals.push(proposal);
        Ok(())
    }

    /// Queues a read that waits for a read barrier.
    pub fn read(&mut self, token: ReadToken) -> Result<(), QueueError> {
        if self.stop {
            return Err(QueueError::Stopped);
        }
        if self.reads.len() >= self.bounds.reads {
            return Err(QueueError::Full);
        }
        self.reads.push(token);
        Ok(())
    }

    /// Queues a message from a peer. Messages are accepted even while the node stops. They carry
    /// the leadership transfer and the last acknowledgements.
    pub fn message(&mut self, message: Message) -> Result<(), QueueError> {
        let bytes = self.message_bytes + message.cost();
        if bytes > self.bounds.message_bytes {
            return Err(QueueError::Full);
        }
        self.message_bytes = bytes;
        self.messages.push(message);
        Ok(())
    }

    /// Queues an event of another thread or of the transport.
    pub fn notice(&mut self, notice: Notice) {
        self.notices.push(notice);
    }

    /// Returns whether no input waits for the core thread.
    pub fn is_empty(&self) -> bool {
        self.proposals.is_empty()
            && self.reads.is_empty()
            && self.messages.is_empty()
            && self.notices.is_empty()
            && !self.stop
    }

    /// Takes all queued inputs, and leaves none. The flag `stop` stays set, so the inputs that are
    /// taken later have it, too.
    pub fn take(&mut self) -> Self {
        let (bounds, stop) = (self.bounds, self.stop);
        mem::replace(self, Self { bounds, stop, ..Self::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: MailBounds =
        MailBounds { proposal_bytes: 10, proposals: 3, message_bytes: 1_000, reads: 2 };

    fn proposal(bytes: usize) -> ClientProposal {
        let data = Bytes::from(vec![7; bytes]);
        ClientProposal { id: RequestId(1), kind: EntryKind::Normal, data }
    }

    #[test]
    fn proposals_are_bounded_in_bytes_and_in_number_until_they_are_taken() {
        let mut mail = Mail::new(BOUNDS);
        assert_eq!(mail.propose(proposal(11)), Err(QueueError::Full));
        mail.propose(proposal(8)).unwrap();
        assert_eq!(mail.propose(proposal(3)), Err(QueueError::Full));
        mail.propose(proposal(1)).unwrap();
        mail.propose(proposal(1)).unwrap();
        assert_eq!(mail.propose(proposal(0)), Err(QueueError::Full), "three are enough");
        assert_eq!(mail.take().proposals.len(), 3);
        mail.propose(proposal(10)).unwrap();
        assert_eq!(mail.propose(proposal(1)), Err(QueueError::Full), "the bounds stay");
    }

    #[test]
    fn reads_are_bounded() {
        let mut mail = Mail::new(BOUNDS);
        assert_eq!((mail.read(1), mail.read(2)), (Ok(()), Ok(())));
        assert_eq!(mail.read(3), Err(QueueError::Full));
        assert_eq!(mail.take().reads, [1, 2]);
        assert_eq!(mail.read(4), Ok(()));
    }

    #[test]
    fn messages_are_bounded_by_their_cost_and_notices_are_unbounded() {
        let mut mail = Mail::new(BOUNDS);
        let message = || Message::new(node_consensus::MessageKind::Heartbeat, 2, 1);
        let fit = BOUNDS.message_bytes / message().cost();
        for _ in 0..fit {
            mail.message(message()).unwrap();
        }
        assert_eq!(mail.message(message()), Err(QueueError::Full));
        for batch in 0..1_000 {
            mail.notice(Notice::Persisted(batch));
        }
        let taken = mail.take();
        assert_eq!((taken.messages.len(), taken.notices.len()), (fit, 1_000));
        assert!(mail.is_empty());
        mail.message(message()).unwrap();
    }

    #[test]
    fn after_a_stop_clients_are_refused_but_notices_are_accepted() {
        let mut mail = Mail::new(BOUNDS);
        mail.stop = true;
        assert!(!mail.is_empty() && mail.take().stop && mail.stop);
        assert_eq!(mail.propose(proposal(1)), Err(QueueError::Stopped));
        assert_eq!(mail.read(1), Err(QueueError::Stopped));
        mail.notice(Notice::Persisted(1));
        assert_eq!(mail.take().notices.len(), 1);
    }
}
