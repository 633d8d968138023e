//! What waits for the core: bounded, and taken whole. No lock, no thread.
//!
//! Batching is the main lever on throughput, so that the core takes everything that has gathered
//! while it was busy. Proposals, reads and peer messages are counted, and who comes too late is
//! refused; notices come from the other threads and are bounded by what those were given to do.

use std::mem;

use bytes::Bytes;
use node_consensus::{Entry, EntryKind, Members, Message, Position};

use super::peers::IncomingSnapshot;
use crate::machine::{AppliedChange, RequestId};

/// Proposals that wait for the core; more are refused as "too many requests".
pub const MAX_QUEUED_PROPOSAL_BYTES: usize = 32 * 1024 * 1024;
/// The same in number.
pub const MAX_QUEUED_PROPOSALS: usize = 16 * 1024;
/// Peer messages that wait for the core; more are refused, which to Raft is a lost message.
pub const MAX_QUEUED_MESSAGE_BYTES: usize = 64 * 1024 * 1024;
/// Reads that wait for one barrier; more are refused as "too many requests".
pub const MAX_QUEUED_READS: usize = 64 * 1024;

/// One proposal.
#[derive(Clone, Debug)]
pub struct Proposal {
    /// How its outcome finds who waits.
    pub id: RequestId,
    /// What entry it becomes; not a leader's own kind.
    pub kind: EntryKind,
    /// What is proposed.
    pub data: Bytes,
}

/// Who waits for a read barrier.
pub type ReadToken = u64;

/// What other threads have done, or the transport has seen.
#[derive(Debug)]
pub enum Notice {
    /// The log is durable up to this batch.
    Persisted(u64),
    /// Applied up to here.
    Applied {
        /// Where the state machine stands.
        at: Position,
        /// What became of changes of members, in order.
        changes: Vec<AppliedChange>,
    },
    /// The store is durable up to here.
    Checkpointed(Position),
    /// The log begins after this position now.
    Compacted(Position),
    /// The store holds the snapshot.
    Installed {
        /// Its position.
        at: Position,
        /// Who belongs to the cluster there, by the store.
        members: Members,
    },
    /// A snapshot file is there to be sent, with who belonged to the cluster at its position; or it
    /// couldn't be made.
    Built(Option<(Position, Members)>),
    /// What a fetch asked for.
    Fetched {
        /// Which fetch.
        id: u64,
        /// The entries, in order.
        entries: Vec<Entry>,
    },
    /// A snapshot arrived.
    Snapshot(IncomingSnapshot),
    /// A snapshot's way to a peer ended.
    SnapshotSent {
        /// To whom.
        peer: u64,
        /// Whether all of it arrived.
        arrived: bool,
    },
    /// Something to this peer was lost.
    Unreachable(u64),
    /// A stream stands.
    Connected(u64),
    /// None does.
    Disconnected(u64),
    /// Campaign now.
    Campaign,
    /// Hand over to this member, or to any that can.
    Transfer(Option<u64>),
}

/// A queue is full, or the core has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// There are too many before it.
    Full,
    /// Nobody will ever take it.
    Stopped,
}

/// How much may wait. The defaults are the product's.
#[derive(Clone, Copy, Debug)]
pub struct MailBounds {
    /// See [`MAX_QUEUED_PROPOSAL_BYTES`].
    pub proposal_bytes: usize,
    /// See [`MAX_QUEUED_PROPOSALS`].
    pub proposals: usize,
    /// See [`MAX_QUEUED_MESSAGE_BYTES`].
    pub message_bytes: usize,
    /// See [`MAX_QUEUED_READS`].
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

/// Everything that waits for the core.
#[derive(Debug, Default)]
pub struct Mail {
    pub(super) proposals: Vec<Proposal>,
    pub(super) reads: Vec<ReadToken>,
    pub(super) messages: Vec<Message>,
    pub(super) notices: Vec<Notice>,
    pub(super) stop: bool,
    proposal_bytes: usize,
    message_bytes: usize,
    bounds: MailBounds,
}

impl Mail {
    /// Nothing yet.
    pub fn new(bounds: MailBounds) -> Self {
        Self { bounds, ..Self::default() }
    }

    /// A proposal of this member's clients.
    pub fn propose(&mut self, proposal: Proposal) -> Result<(), Refused> {
        if self.stop {
            return Err(Refused::Stopped);
        }
        let bytes = self.proposal_bytes + proposal.data.len();
        if bytes > self.bounds.proposal_bytes || self.proposals.len() >= self.bounds.proposals {
            return Err(Refused::Full);
        }
        self.proposal_bytes = bytes;
        self.proposals.push(proposal);
        Ok(())
    }

    /// A read that waits for a barrier.
    pub fn read(&mut self, token: ReadToken) -> Result<(), Refused> {
        if self.stop {
            return Err(Refused::Stopped);
        }
        if self.reads.len() >= self.bounds.reads {
            return Err(Refused::Full);
        }
        self.reads.push(token);
        Ok(())
    }

    /// A message from a peer. Also while the node stops: hand-over and last acknowledgements.
    pub fn message(&mut self, message: Message) -> Result<(), Refused> {
        let bytes = self.message_bytes + message.cost();
        if bytes > self.bounds.message_bytes {
            return Err(Refused::Full);
        }
        self.message_bytes = bytes;
        self.messages.push(message);
        Ok(())
    }

    /// What another thread has done, or the transport has seen.
    pub fn notice(&mut self, notice: Notice) {
        self.notices.push(notice);
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.proposals.is_empty()
            && self.reads.is_empty()
            && self.messages.is_empty()
            && self.notices.is_empty()
            && !self.stop
    }

    /// Everything that is there. A stop stays.
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

    fn proposal(bytes: usize) -> Proposal {
        let data = Bytes::from(vec![7; bytes]);
        Proposal { id: RequestId(1), kind: EntryKind::Normal, data }
    }

    #[test]
    fn proposals_are_bounded_in_bytes_and_in_number_until_they_are_taken() {
        let mut mail = Mail::new(BOUNDS);
        assert_eq!(mail.propose(proposal(11)), Err(Refused::Full));
        mail.propose(proposal(8)).unwrap();
        assert_eq!(mail.propose(proposal(3)), Err(Refused::Full));
        mail.propose(proposal(1)).unwrap();
        mail.propose(proposal(1)).unwrap();
        assert_eq!(mail.propose(proposal(0)), Err(Refused::Full), "three are enough");
        assert_eq!(mail.take().proposals.len(), 3);
        mail.propose(proposal(10)).unwrap();
        assert_eq!(mail.propose(proposal(1)), Err(Refused::Full), "the bounds stay");
    }

    #[test]
    fn reads_are_bounded() {
        let mut mail = Mail::new(BOUNDS);
        assert_eq!((mail.read(1), mail.read(2)), (Ok(()), Ok(())));
        assert_eq!(mail.read(3), Err(Refused::Full));
        assert_eq!(mail.take().reads, [1, 2]);
        assert_eq!(mail.read(4), Ok(()));
    }

    #[test]
    fn messages_are_bounded_by_what_they_cost_and_notices_are_not() {
        let mut mail = Mail::new(BOUNDS);
        let message = || Message::new(node_consensus::MessageKind::Heartbeat, 2, 1);
        let fit = BOUNDS.message_bytes / message().cost();
        for _ in 0..fit {
            mail.message(message()).unwrap();
        }
        assert_eq!(mail.message(message()), Err(Refused::Full));
        for batch in 0..1_000 {
            mail.notice(Notice::Persisted(batch));
        }
        let taken = mail.take();
        assert_eq!((taken.messages.len(), taken.notices.len()), (fit, 1_000));
        assert!(mail.is_empty());
        mail.message(message()).unwrap();
    }

    #[test]
    fn a_stop_refuses_clients_for_good_and_nothing_that_others_have_done() {
        let mut mail = Mail::new(BOUNDS);
        mail.stop = true;
        assert!(!mail.is_empty() && mail.take().stop && mail.stop);
        assert_eq!(mail.propose(proposal(1)), Err(Refused::Stopped));
        assert_eq!(mail.read(1), Err(Refused::Stopped));
        mail.notice(Notice::Persisted(1));
        assert_eq!(mail.take().notices.len(), 1);
    }
}
