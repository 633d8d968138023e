//! Invariant: a member's term and commit index never go back while it runs. Its term never falls
//! below a term that it has sent, not even after a crash. Within a term, its vote never changes.

use std::collections::BTreeMap;

use node_consensus::{Message, PeerStatus, Status};

use crate::sim::InvariantViolation;

#[derive(Clone, Copy, Debug, Default)]
struct LastKnownState {
    generation: u64,
    term: u64,
    vote: u64,
    commit: u64,
    applied: u64,
    /// Highest term in any message that the member has sent, except in pre-votes.
    highest_sent_term: u64,
}

/// Last known state of each machine's member.
#[derive(Debug, Default)]
pub struct Monotone {
    members: BTreeMap<u64, LastKnownState>,
}

impl Monotone {
    /// Checks a member's state after a step of its process. `generation` tells the processes of one
    /// member apart.
    pub fn observe(
        &mut self,
        member: u64,
        generation: u64,
        status: &Status,
    ) -> Result<(), InvariantViolation> {
        let seen = self.members.entry(member).or_default();
        let violated = |what: String| Err(InvariantViolation::new("monotone", what));
        if status.term < seen.highest_sent_term {
            let (now, shown) = (status.term, seen.highest_sent_term);
            return violated(format!("{member} is in term {now} after it has shown term {shown}"));
        }
        if seen.generation == generation {
            if status.term < seen.term {
                return violated(format!("{member}'s term fell to {}", status.term));
            }
            if status.commit < seen.commit || status.applied < seen.applied {
                return violated(format!("{member}'s commit or applied index fell"));
            }
            if status.term == seen.term && seen.vote != 0 && status.vote != seen.vote {
                return violated(format!("{member} changed its vote in term {}", status.term));
            }
        }
        if status.commit > status.last {
            return violated(format!("{member} has committed beyond its last entry"));
        }
        *seen = LastKnownState {
            generation,
            term: status.term,
            vote: status.vote,
            commit: status.commit,
            applied: status.applied,
            highest_sent_term: seen.highest_sent_term,
        };
        status.peers.iter().try_for_each(|peer| check_next_above_match(member, peer))
    }

    /// Forgets the state of a machine's member, because the machine's disk was replaced.
    pub fn forget(&mut self, machine: u64) {
        self.members.remove(&machine);
    }

    /// Records the term of a sent message. Pre-votes are left out, because no member has reached
    /// their term yet.
    pub fn record_sent_term(&mut self, machine: u64, message: &Message) {
        use node_consensus::MessageKind::{RequestPreVote, RequestPreVoteResponse};
        if !matches!(message.kind, RequestPreVote | RequestPreVoteResponse) {
            let seen = self.members.entry(machine).or_default();
            seen.highest_sent_term = seen.highest_sent_term.max(message.term);
        }
    }
}

/// Checks a leader's next entry for a peer: the peer must not be known to have that entry already.
fn check_next_above_match(member: u64, peer: &PeerStatus) -> Result<(), InvariantViolation> {
    if peer.next > peer.matched {
        return Ok(());
    }
    let PeerStatus { member: to, matched, next, .. } = peer;
    let what = format!("{member} would send {to} entry {next}, which has {matched}");
    Err(InvariantViolation::new("next above match", what))
}
