//! Proposals that wait until consensus takes them. They come from this member's clients, or were
//! forwarded by peers.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::Bytes;
use node_consensus::{Entry, EntryKind, Message};
use node_state::state_machine::RequestId;

use super::MAX_PROPOSAL_BYTES;
use super::mail::{ClientProposal, MAX_QUEUED_PROPOSAL_BYTES, MAX_QUEUED_PROPOSALS};

/// Maximum bytes of proposals that one round of the core thread takes. Further proposals wait for
/// the next round.
const ROUND_BYTES: usize = 4 * 1024 * 1024;
/// Maximum number of proposals that one round of the core thread takes. Further proposals wait for
/// the next round.
const ROUND_PROPOSALS: usize = 4096;

/// Number of message numbers remembered for each peer that forwards proposals. A message that is
/// older by this many numbers is dropped.
const REMEMBERED_MESSAGES: u64 = 1024;

/// Maximum number of changes of members that wait for an earlier one; more are refused.
const MAX_QUEUED_CHANGES: usize = 64;

#[derive(Debug)]
struct PendingProposal {
    /// Request id of a proposal by this member's client. `None` for a forwarded proposal, because
    /// the member that forwarded it answers the client.
    own: Option<RequestId>,
    /// Member that forwarded the proposal.
    forwarder: Option<u64>,
    kind: EntryKind,
    data: Bytes,
    hops: u64,
    since: u64,
}

/// Proposals that one round of the core thread takes, all of one kind. A change of members always
/// forms a group of its own.
#[derive(Debug, Default)]
pub(super) struct ProposalGroup {
    pub kind: EntryKind,
    pub data: Vec<Bytes>,
    pub own: Vec<RequestId>,
    /// Members that forwarded proposals of this group.
    pub forwarders: BTreeSet<u64>,
    pub hops: u64,
}

#[derive(Debug, Default)]
pub(super) struct ProposalQueue {
    pending: VecDeque<PendingProposal>,
    /// Changes of members that wait. A leader proposes a change only after consensus is done with
    /// the previous one. Other proposals may overtake the changes.
    changes: VecDeque<PendingProposal>,
    /// Total data bytes of `pending` and `changes`.
    bytes: usize,
    received: BTreeMap<u64, ReceivedMessages>,
}

impl ProposalQueue {
    /// Returns whether no proposals wait. Changes of members don't count, because they wait in a
    /// queue of their own.
    pub(super) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Queues a proposal of this member's clients. Returns false if too many wait.
    pub(super) fn push_own(&mut self, proposal: ClientProposal, now: u64) -> bool {
        let ClientProposal { id, kind, data } = proposal;
        self.push(PendingProposal {
            own: Some(id),
            forwarder: None,
            kind,
            data,
            hops: 0,
            since: now,
        })
    }

    /// Queues the proposals in a message that a peer forwarded. A duplicate of an earlier message
    /// is dropped, so that nothing is proposed twice.
    pub(super) fn push_forwarded(&mut self, message: Message, now: u64) {
        let seen = self.received.entry(message.from).or_default();
        if !seen.record_if_new(message.commit, message.index) {
            return;
        }
        let (hops, forwarder) = (message.log_term, Some(message.from));
        // A correct member refuses empty and oversized proposals itself and never forwards them.
        let proper = |entry: &Entry| (1..=MAX_PROPOSAL_BYTES).contains(&entry.data.len());
        for entry in message.entries.into_iter().filter(proper) {
            // If the queue is full, the proposal is lost, and its client's request times out.
            let Entry { kind, data, .. } = entry;
            self.push(PendingProposal { own: None, forwarder, kind, data, hops, since: now });
        }
    }

    fn push(&mut self, pending: PendingProposal) -> bool {
        let bytes = self.bytes + pending.data.len();
        let (queue, most) = match pending.kind {
            EntryKind::ConfChange => (&mut self.changes, MAX_QUEUED_CHANGES),
            EntryKind::Normal | EntryKind::NoOp => (&mut self.pending, MAX_QUEUED_PROPOSALS),
        };
        if bytes > MAX_QUEUED_PROPOSAL_BYTES || queue.len() >= most {
            return false;
        }
        self.bytes = bytes;
        queue.push_back(pending);
        true
    }

    /// Drops proposals queued before tick `before`, because their requests have timed out.
    pub(super) fn expire(&mut self, before: u64) {
        for queue in [&mut self.pending, &mut self.changes] {
            while let Some(late) = queue.pop_front_if(|pending| pending.since < before) {
                self.bytes -= late.data.len();
            }
        }
    }

    /// Takes the next change of members, as a group of its own.
    pub(super) fn take_change(&mut self) -> Option<ProposalGroup> {
        let PendingProposal { own, forwarder, kind, data, hops, .. } = self.changes.pop_front()?;
        self.bytes -= data.len();
        let (own, forwarders) = (own.into_iter().collect(), forwarder.into_iter().collect());
        Some(ProposalGroup { kind, data: vec![data], own, forwarders, hops })
    }

    /// Takes the proposals of the next round. A follower takes only proposals with equal hop
    /// counts, because a forwarded message has one hop count.
    pub(super) fn take(&mut self, leads: bool) -> Option<ProposalGroup> {
        let PendingProposal { hops, kind, .. } = *self.pending.front()?;
        let mut group = ProposalGroup { hops, kind, ..ProposalGroup::default() };
        let mut bytes = 0;
        while let Some(pending) = self.pending.front() {
            let full = group.data.len() >= ROUND_PROPOSALS
                || (!group.data.is_empty() && bytes + pending.data.len() > ROUND_BYTES);
            if full || (!leads && pending.hops != hops) {
                break;
            }
            let Some(pending) = self.pending.pop_front() else { break };
            bytes += pending.data.len();
            group.own.extend(pending.own);
            group.forwarders.extend(pending.forwarder);
            group.data.push(pending.data);
        }
        self.bytes -= bytes;
        Some(group)
    }
}

/// Numbers of the forwarded messages received from one peer. A peer numbers its messages in
/// ascending order during one boot.
#[derive(Debug, Default)]
struct ReceivedMessages {
    boot: u64,
    highest: u64,
    /// Message numbers received last, at most [`REMEMBERED_MESSAGES`] of them.
    recent: VecDeque<u64>,
}

impl ReceivedMessages {
    fn record_if_new(&mut self, boot: u64, number: u64) -> bool {
        if boot < self.boot {
            return false;
        }
        if boot > self.boot {
            *self = Self { boot, ..Self::default() };
        }
        if number + REMEMBERED_MESSAGES <= self.highest || self.recent.contains(&number) {
            return false;
        }
        self.highest = self.highest.max(number);
        self.recent.push_back(number);
        if self.recent.len() as u64 > REMEMBERED_MESSAGES {
            self.recent.pop_front();
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duplicate_message_is_dropped_and_a_late_one_accepted() {
        let mut seen = ReceivedMessages::default();
        let taken: Vec<_> = [1, 3, 1, 2, 3].iter().map(|n| seen.record_if_new(1, *n)).collect();
        assert_eq!(taken, [true, true, false, true, false]);
    }

    #[test]
    fn messages_of_an_earlier_boot_are_dropped() {
        let mut seen = ReceivedMessages::default();
        assert!(seen.record_if_new(2, 1));
        assert!(!seen.record_if_new(1, 9));
        assert!(seen.record_if_new(3, 1));
    }

    #[test]
    fn proposals_beyond_the_byte_limit_are_refused() {
        let mut proposals = ProposalQueue::default();
        let data = Bytes::from(vec![0; MAX_QUEUED_PROPOSAL_BYTES / 2 + 1]);
        assert!(proposals.push_own(proposal(1, EntryKind::Normal, data.clone()), 0));
        assert!(!proposals.push_own(proposal(2, EntryKind::Normal, data), 0));
    }

    #[test]
    fn a_change_of_members_is_proposed_alone_and_delays_no_other_proposal() {
        use EntryKind::{ConfChange, Normal};
        let mut proposals = ProposalQueue::default();
        for (id, kind) in (1..).zip([Normal, ConfChange, ConfChange, Normal]) {
            assert!(proposals.push_own(proposal(id, kind, Bytes::from_static(b"x")), 0));
        }
        let sizes =
            |group: Option<ProposalGroup>| group.map(|group| (group.kind, group.data.len()));
        assert_eq!(sizes(proposals.take(true)), Some((Normal, 2)));
        assert!(proposals.is_empty(), "a change waits until one may be made");
        for _ in 0..2 {
            assert_eq!(sizes(proposals.take_change()), Some((ConfChange, 1)));
        }
        assert_eq!((sizes(proposals.take_change()), proposals.bytes), (None, 0));
    }

    #[test]
    fn changes_that_wait_are_bounded_and_expire() {
        let mut proposals = ProposalQueue::default();
        let change = |id| proposal(id, EntryKind::ConfChange, Bytes::from_static(b"x"));
        for id in 0..MAX_QUEUED_CHANGES as u64 {
            assert!(proposals.push_own(change(id), 3));
        }
        assert!(!proposals.push_own(change(u64::MAX), 3));
        proposals.expire(4);
        assert_eq!((proposals.take_change().is_none(), proposals.bytes), (true, 0));
    }

    fn proposal(id: u64, kind: EntryKind, data: Bytes) -> ClientProposal {
        ClientProposal { id: RequestId(id), kind, data }
    }
}
