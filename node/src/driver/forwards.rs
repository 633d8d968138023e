//! Proposals of this member's clients that were passed on to a leader and have no outcome yet.
//!
//! The connection to the leader may break while they are under way. Each message has a number, and a
//! leader takes a number once for as long as its process lives. So a message may be sent again to the
//! process that it went to. It is sent with the term in which that process led, and taken by the leader
//! of that term only: a process that was restarted leads in a later term only, and passes on what it
//! takes before. (An earlier build can't read a proposal with a term, and drops it.) To anybody else nothing is sent twice, since the entry may be in the log already:
//! - what has never left this member is proposed anew, to whoever leads next;
//! - what may have arrived is given up once an entry of a later term was applied here. Had the leader
//!   of the earlier term got it through, its outcome would be known by then.

use std::collections::{BTreeMap, VecDeque};

use node_consensus::{Entry, Message};

use super::mail::{MAX_QUEUED_PROPOSAL_BYTES, Proposal};
use super::proposals::WINDOW;
use crate::machine::RequestId;

/// Messages that are kept. A leader would take no more of them late.
const MAX_MESSAGES: usize = WINDOW as usize;

#[derive(Debug, Default)]
pub(super) struct Forwards {
    /// Requests that consensus was given, and whose message has not come out of it yet.
    expected: VecDeque<RequestId>,
    /// By their numbers.
    messages: BTreeMap<u64, Forward>,
    /// Requests without an outcome, and the number of their message.
    open: BTreeMap<RequestId, u64>,
    /// Of the messages.
    bytes: usize,
}

#[derive(Debug)]
struct Forward {
    message: Message,
    /// One for each entry.
    requests: Vec<RequestId>,
    /// How many of them have no outcome yet.
    open: usize,
    /// In which the receiver led.
    term: u64,
    /// The tick at which it was passed on.
    since: u64,
    /// It was handed to an earlier connection to that leader, so that it may have arrived.
    was_sent_before: bool,
    delivery: Delivery,
}

/// How far the last try to send a message has come, as far as this member knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Delivery {
    /// It was handed to the connection, which stands.
    Sent,
    /// It has never left this member: there was no connection.
    Unsent,
    /// It was handed to a connection that has broken since.
    Interrupted,
}

impl Forward {
    /// The last try to send it has failed at once.
    fn fail(&mut self) {
        self.delivery = if self.was_sent_before { Delivery::Interrupted } else { Delivery::Unsent };
    }
}

impl Forwards {
    /// Consensus passes these requests on, in this order.
    pub(super) fn expect(&mut self, requests: Vec<RequestId>) {
        self.expected.extend(requests);
    }

    /// `message`, which carries as many of the expected requests as it has entries, is about to be
    /// sent to the leader of `term`. If too much is kept already, its loss will not be noticed.
    pub(super) fn record(&mut self, message: &Message, term: u64, now: u64) {
        let requests: Vec<_> =
            self.expected.drain(..message.entries.len().min(self.expected.len())).collect();
        let bytes = self.bytes + message.cost();
        if bytes > MAX_QUEUED_PROPOSAL_BYTES || self.messages.len() >= MAX_MESSAGES {
            return;
        }
        self.bytes = bytes;
        self.open.extend(requests.iter().map(|id| (*id, message.index)));
        let forward = Forward {
            message: message.clone(),
            open: requests.len(),
            requests,
            term,
            since: now,
            was_sent_before: false,
            delivery: Delivery::Sent,
        };
        self.messages.insert(message.index, forward);
    }

    /// The message with this number was not taken: there is no connection.
    pub(super) fn not_connected(&mut self, number: u64) {
        if let Some(forward) = self.messages.get_mut(&number) {
            forward.fail();
        }
    }

    /// The message with this number was not taken: the queue is full. Requests that can have no effect
    /// any more because of that.
    pub(super) fn queue_full(&mut self, number: u64) -> Vec<RequestId> {
        let Some(forward) = self.messages.get_mut(&number) else { return Vec::new() };
        forward.fail();
        match forward.delivery {
            Delivery::Unsent => self.take(number),
            Delivery::Sent | Delivery::Interrupted => Vec::new(),
        }
    }

    /// The connection to `peer` has broken.
    pub(super) fn interrupt(&mut self, peer: u64) {
        for forward in self.messages.values_mut().filter(|forward| forward.message.to == peer) {
            if forward.delivery == Delivery::Sent {
                forward.delivery = Delivery::Interrupted;
            }
        }
    }

    /// What has to be sent again now that there is a connection to `leader`, which leads in `term`; in
    /// the order in which it was sent first.
    pub(super) fn repeat(&mut self, leader: u64, term: u64) -> Vec<Message> {
        let mut again = Vec::new();
        for forward in self.messages.values_mut() {
            if forward.message.to != leader || forward.term != term {
                continue;
            }
            forward.was_sent_before |= forward.delivery != Delivery::Unsent;
            forward.delivery = Delivery::Sent;
            // At the other end may be another process of that member by now.
            let term = if forward.was_sent_before { term } else { 0 };
            again.push(Message { term, ..forward.message.clone() });
        }
        again
    }

    /// What has never left this member and was meant for the leader of another term than this one;
    /// with the tick at which it was passed on.
    pub(super) fn take_unsent(&mut self, term: u64) -> Vec<(Proposal, u64)> {
        let is_unsent =
            |forward: &&Forward| forward.delivery == Delivery::Unsent && forward.term != term;
        let numbers: Vec<u64> =
            self.messages.values().filter(is_unsent).map(|forward| forward.message.index).collect();
        let mut proposals = Vec::new();
        for number in numbers {
            let Some(forward) = self.messages.get(&number) else { continue };
            let (entries, since) = (forward.message.entries.clone(), forward.since);
            for (id, Entry { kind, data, .. }) in self.take(number).into_iter().zip(entries) {
                proposals.push((Proposal { id, kind, data }, since));
            }
        }
        proposals
    }

    /// These requests have their outcome.
    pub(super) fn answered(&mut self, requests: &[RequestId]) {
        if self.open.is_empty() {
            return;
        }
        for id in requests {
            let Some(number) = self.open.remove(id) else { continue };
            let Some(forward) = self.messages.get_mut(&number) else { continue };
            forward.open -= 1;
            if forward.open == 0 {
                self.take(number);
            }
        }
    }

    /// An entry of `term` was applied. Requests without an outcome that will have none, as far as this
    /// member can know: their connection broke in an earlier term.
    pub(super) fn give_up(&mut self, term: u64) -> Vec<RequestId> {
        let is_lost =
            |forward: &&Forward| forward.delivery == Delivery::Interrupted && forward.term < term;
        let numbers: Vec<u64> =
            self.messages.values().filter(is_lost).map(|forward| forward.message.index).collect();
        numbers.into_iter().flat_map(|number| self.take(number)).collect()
    }

    /// Forgets what was passed on before tick `before`: no client waits for it any more.
    pub(super) fn expire(&mut self, before: u64) {
        while let Some(oldest) = self.messages.values().next()
            && oldest.since < before
        {
            let number = oldest.message.index;
            self.take(number);
        }
    }

    /// Forgets a message; its requests without an outcome.
    fn take(&mut self, number: u64) -> Vec<RequestId> {
        let Some(forward) = self.messages.remove(&number) else { return Vec::new() };
        self.bytes -= forward.message.cost();
        let requests = forward.requests.into_iter();
        requests.filter(|id| self.open.remove(id).is_some()).collect()
    }
}
