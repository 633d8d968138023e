//! Heartbeats with which a leader confirms that it still leads before reads are answered.
//!
//! Consensus addresses such a heartbeat to every other member, but the answers of a quorum suffice.
//! So this module lets only as many pass as a quorum needs, to the voters that answered most
//! quickly, and holds back the others. They are sent if no quorum has answered in time, or if a
//! connection is lost. Holding back a message is always safe in Raft, because any message may be
//! lost. The heartbeats of a tick always pass, because followers need them as a sign of life, and
//! they show which voter answers most quickly.

use std::collections::{BTreeSet, VecDeque};

use bytes::Bytes;
use node_consensus::{Members, Message, MessageKind};

/// Maximum number of read contexts whose heartbeats are held back. Heartbeats of further contexts
/// pass.
const MAX_HELD_CONTEXTS: usize = 64;

/// Heartbeats of one read context that were not sent yet.
#[derive(Debug)]
struct HeldHeartbeats {
    number: u64,
    context: Bytes,
    messages: Vec<Message>,
}

#[derive(Debug, Default)]
pub(super) struct ReadHeartbeats {
    /// Voters, beginning with the one that answered most quickly. A voter that never answered isn't
    /// in the list, and comes after these.
    fastest: Vec<u64>,
    /// Latest context that was answered, and the number of its answers so far.
    answered: (Bytes, usize),
    held: VecDeque<HeldHeartbeats>,
    last_number: u64,
}

impl ReadHeartbeats {
    /// Returns `message` if it must be sent now, and otherwise holds it back. `sender` is this
    /// member, and `connected` has the members to or from which it has a stream.
    pub(super) fn pass(
        &mut self,
        message: Message,
        sender: u64,
        members: &Members,
        connected: &BTreeSet<u64>,
    ) -> Option<Message> {
        let confirms_read = message.kind == MessageKind::Heartbeat && !message.context.is_empty();
        if !confirms_read || self.is_needed(message.to, sender, &members.voters, connected) {
            return Some(message);
        }
        let is_full = self.held.len() == MAX_HELD_CONTEXTS;
        match self.held.back_mut() {
            Some(held) if held.context == message.context => held.messages.push(message),
            _ if is_full => return Some(message),
            _ => {
                self.last_number += 1;
                let (number, context) = (self.last_number, message.context.clone());
                self.held.push_back(HeldHeartbeats { number, context, messages: vec![message] });
            }
        }
        None
    }

    /// Returns whether the answer of `peer` belongs to the quorum that is expected to answer first.
    fn is_needed(&self, peer: u64, sender: u64, voters: &[u64], connected: &BTreeSet<u64>) -> bool {
        if !voters.contains(&sender) {
            // The sender's own vote doesn't count, which is rare enough to ask everybody.
            return true;
        }
        let rank = |voter: u64| {
            let place = self.fastest.iter().position(|fast| *fast == voter);
            (!connected.contains(&voter), place.unwrap_or(usize::MAX), voter)
        };
        let others = voters.iter().filter(|voter| **voter != sender);
        let before = others.filter(|voter| rank(**voter) < rank(peer)).count();
        voters.contains(&peer) && before < voters.len() / 2
    }

    /// Records that `message` answers a heartbeat that carried a read's context. Other messages are
    /// ignored.
    pub(super) fn record_answer(&mut self, message: &Message) {
        if message.kind != MessageKind::HeartbeatResponse || message.context.is_empty() {
            return;
        }
        if self.answered.0 != message.context {
            self.answered = (message.context.clone(), 0);
        }
        let place = self.answered.1;
        self.answered.1 += 1;
        if self.fastest.get(place) != Some(&message.from) {
            self.fastest.retain(|peer| *peer != message.from);
            self.fastest.insert(place.min(self.fastest.len()), message.from);
        }
    }

    /// Drops the heartbeats of this context and of earlier ones, because a quorum has answered.
    pub(super) fn confirm(&mut self, context: &[u8]) {
        if let Some(at) = self.held.iter().position(|held| held.context == context) {
            self.held.drain(..=at);
        }
    }

    /// Records that `peer` might not get messages: from now on other voters are asked first.
    pub(super) fn record_loss(&mut self, peer: u64) {
        self.fastest.retain(|fast| *fast != peer);
    }

    /// Returns all heartbeats that were held back, to be sent now.
    pub(super) fn take_held(&mut self) -> Vec<Message> {
        self.held.drain(..).flat_map(|held| held.messages).collect()
    }

    /// Drops heartbeats of earlier terms. `term` is `None` if this member doesn't lead.
    pub(super) fn keep_term(&mut self, term: Option<u64>) {
        self.held.retain(|held| held.messages.first().map(|message| message.term) == term);
    }

    /// Returns a number for the oldest context whose heartbeats are held back. Later contexts have
    /// greater numbers.
    pub(super) fn oldest_held(&self) -> Option<u64> {
        self.held.front().map(|held| held.number)
    }
}
