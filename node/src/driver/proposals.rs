//! Proposals that wait for their round: one's own clients', and those that peers passed on.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use node_consensus::{Entry, Message};

use super::MAX_PROPOSAL_BYTES;
use super::mailbox::{MAX_QUEUED_PROPOSAL_BYTES, MAX_QUEUED_PROPOSALS, Proposal};
use crate::machine::RequestId;

/// Bytes and number of proposals in one round. What is left comes with the next.
const ROUND_BYTES: usize = 4 * 1024 * 1024;
const ROUND_PROPOSALS: usize = 4096;

/// How far back a passed-on message may come late and still be taken.
const WINDOW: u64 = 1024;

/// Why a proposal will never have an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There are too many.
    TooMany,
}

#[derive(Debug)]
struct Pending {
    /// None if it came from a peer, who answers its client.
    own: Option<RequestId>,
    data: Bytes,
    hops: u64,
    since: u64,
}

/// A round's worth.
#[derive(Debug, Default)]
pub(super) struct Group {
    pub data: Vec<Bytes>,
    pub own: Vec<RequestId>,
    pub hops: u64,
}

#[derive(Debug, Default)]
pub(super) struct Proposals {
    pending: VecDeque<Pending>,
    bytes: usize,
    seen: BTreeMap<u64, Seen>,
}

impl Proposals {
    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// False if there are too many.
    pub fn push_own(&mut self, proposal: Proposal, now: u64) -> bool {
        self.push(Pending { own: Some(proposal.id), data: proposal.data, hops: 0, since: now })
    }

    /// Takes what a peer passed on, once: a message that the network has doubled is not proposed
    /// twice.
    pub fn push_forwarded(&mut self, message: Message, now: u64) {
        let seen = self.seen.entry(message.from).or_default();
        if !seen.is_new(message.commit, message.index) {
            return;
        }
        let hops = message.log_term;
        // No honest member passes on what it would have refused itself.
        let proper = |entry: &Entry| (1..=MAX_PROPOSAL_BYTES).contains(&entry.data.len());
        for entry in message.entries.into_iter().filter(proper) {
            // What doesn't fit is lost; its client is told that it took too long.
            self.push(Pending { own: None, data: entry.data, hops, since: now });
        }
    }

    fn push(&mut self, pending: Pending) -> bool {
        let bytes = self.bytes + pending.data.len();
        if bytes > MAX_QUEUED_PROPOSAL_BYTES || self.pending.len() >= MAX_QUEUED_PROPOSALS {
            return false;
        }
        self.bytes = bytes;
        self.pending.push_back(pending);
        true
    }

    /// Forgets what came before tick `before`: nobody waits for it any more.
    pub fn expire(&mut self, before: u64) {
        while self.pending.front().is_some_and(|pending| pending.since < before) {
            self.bytes -= self.pending.pop_front().map_or(0, |pending| pending.data.len());
        }
    }

    /// The next round. Followers pass on proposals of one origin at a time, so that hops count.
    pub fn take(&mut self, leads: bool) -> Option<Group> {
        let hops = self.pending.front()?.hops;
        let mut group = Group { hops, ..Group::default() };
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
            group.data.push(pending.data);
        }
        self.bytes -= bytes;
        Some(group)
    }
}

/// Which of one peer's messages have come. Numbers count up within a boot of the sender.
#[derive(Debug, Default)]
struct Seen {
    boot: u64,
    highest: u64,
    /// Those within [`WINDOW`] below `highest`.
    recent: VecDeque<u64>,
}

impl Seen {
    fn is_new(&mut self, boot: u64, number: u64) -> bool {
        if boot < self.boot {
            return false;
        }
        if boot > self.boot {
            *self = Self { boot, ..Self::default() };
        }
        if number + WINDOW <= self.highest || self.recent.contains(&number) {
            return false;
        }
        self.highest = self.highest.max(number);
        self.recent.push_back(number);
        if self.recent.len() as u64 > WINDOW {
            self.recent.pop_front();
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_doubled_message_is_taken_once_and_a_late_one_still_is() {
        let mut seen = Seen::default();
        let taken: Vec<_> = [1, 3, 1, 2, 3].iter().map(|n| seen.is_new(1, *n)).collect();
        assert_eq!(taken, [true, true, false, true, false]);
    }

    #[test]
    fn an_earlier_boot_of_the_sender_is_over() {
        let mut seen = Seen::default();
        assert!(seen.is_new(2, 1));
        assert!(!seen.is_new(1, 9));
        assert!(seen.is_new(3, 1));
    }

    #[test]
    fn more_than_the_bound_is_refused() {
        let mut proposals = Proposals::default();
        let data = Bytes::from(vec![0; MAX_QUEUED_PROPOSAL_BYTES / 2 + 1]);
        assert!(proposals.push_own(Proposal { id: RequestId(1), data: data.clone() }, 0));
        assert!(!proposals.push_own(Proposal { id: RequestId(2), data }, 0));
    }
}
