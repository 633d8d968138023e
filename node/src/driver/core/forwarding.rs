//! Proposals on their way into the log: a leader appends them, everybody else passes them on.

use node_consensus::{Message, MessageKind, Role};

use super::Driver;
use crate::driver::SendError;
use crate::driver::proposals::Group;
use crate::machine::RequestId;

impl Driver {
    pub(super) fn hand_on_proposals(&mut self) {
        loop {
            let (role, leader, _) = self.consensus.leadership();
            let leads = role == Role::Leader;
            if leader == 0 || (leads && self.consensus.is_transferring()) {
                return;
            }
            if (!leads || self.consensus.may_change())
                && let Some(change) = self.proposals.take_change()
            {
                self.hand_on(change);
                continue;
            }
            let Some(group) = self.proposals.take(leads) else { return };
            self.hand_on(group);
            if leads {
                // One proposal per round: what is left over comes with the next.
                return;
            }
        }
    }

    fn hand_on(&mut self, group: Group) {
        let is_own_passed_on = group.hops == 0 && self.consensus.leadership().0 != Role::Leader;
        if self.consensus.propose_many(group.kind, group.data, group.hops).is_err() {
            self.effects.refused.extend(group.own);
        } else if is_own_passed_on {
            self.forwards.expect(group.own);
        }
    }

    /// Whether this process is the one that a repeated proposal went to before, if it is repeated. A
    /// process that was restarted has forgotten which numbers it took, and leads in a later term only.
    pub(super) fn may_take_forward(&self, message: &Message) -> bool {
        let (role, _, term) = self.consensus.leadership();
        message.term == 0 || (role == Role::Leader && message.term == term)
    }

    /// `message` is about to be sent: if it carries proposals of this member's clients, its loss
    /// would leave them waiting.
    pub(super) fn record_forward(&mut self, message: &Message) {
        if message.kind == MessageKind::Propose && message.log_term == FIRST_HOP {
            let (_, _, term) = self.consensus.leadership();
            self.forwards.record(message, term, self.now);
        }
    }

    /// The connection to `peer` stands again: if it leads, what it may not have received is sent
    /// again, before anything newer.
    pub(super) fn repeat_forwards(&mut self, peer: u64) {
        let (_, leader, term) = self.consensus.leadership();
        if leader == peer {
            let again = self.forwards.repeat(leader, term);
            self.effects.send.extend(again);
        }
    }

    /// What never left this member for an earlier leader goes to the present one.
    pub(super) fn propose_unsent_again(&mut self) {
        let (_, leader, term) = self.consensus.leadership();
        if leader == 0 {
            return;
        }
        for (proposal, since) in self.forwards.take_unsent(term) {
            let id = proposal.id;
            if !self.proposals.push_own(proposal, since) {
                self.effects.refused.push(id);
            }
        }
    }

    /// A message of kind [`MessageKind::Propose`] with this number was not taken. Requests that can
    /// have no effect any more because of that.
    pub(in crate::driver) fn forward_failed(
        &mut self,
        number: u64,
        why: SendError,
    ) -> Vec<RequestId> {
        match why {
            SendError::NotConnected => {
                self.forwards.not_connected(number);
                Vec::new()
            }
            SendError::Full => self.forwards.queue_full(number),
        }
    }
}

/// [`Message::log_term`] of a proposal that comes from the sender's own client.
const FIRST_HOP: u64 = 1;
