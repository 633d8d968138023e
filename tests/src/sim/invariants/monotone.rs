//! A member's term and commit index never go back while it runs, and its term never falls below
//! what it has shown to others, not by a crash either. Within a term its vote, once given, stays.

use std::collections::BTreeMap;

use node_consensus::{Message, PeerStatus, Status};

use crate::sim::Violation;

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    life: u64,
    term: u64,
    vote: u64,
    commit: u64,
    applied: u64,
    /// The highest term it ever put into a message that claims it.
    shown: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Monotone {
    members: BTreeMap<u64, Seen>,
}

impl Monotone {
    /// A member's state after a step of its `life`.
    pub fn observe(&mut self, member: u64, life: u64, status: &Status) -> Result<(), Violation> {
        let seen = self.members.entry(member).or_default();
        let violated = |what: String| Err(Violation::new("monotone", what));
        if status.term < seen.shown {
            let (now, shown) = (status.term, seen.shown);
            return violated(format!("{member} is in term {now} after it has shown term {shown}"));
        }
        if seen.life == life {
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
            return violated(format!("{member} has committed more than it has"));
        }
        *seen = Seen {
            life,
            term: status.term,
            vote: status.vote,
            commit: status.commit,
            applied: status.applied,
            shown: seen.shown,
        };
        status.peers.iter().try_for_each(|peer| next_above_match(member, peer))
    }

    /// A machine's disk is another one.
    pub fn forget(&mut self, machine: u64) {
        self.members.remove(&machine);
    }

    /// A message has left a member. Pre-votes speak of a term that nobody is in yet.
    pub fn sent(&mut self, machine: u64, message: &Message) {
        use node_consensus::MessageKind::{RequestPreVote, RequestPreVoteResponse};
        if !matches!(message.kind, RequestPreVote | RequestPreVoteResponse) {
            let seen = self.members.entry(machine).or_default();
            seen.shown = seen.shown.max(message.term);
        }
    }
}

/// A leader never means to send again what it knows a peer to have.
fn next_above_match(member: u64, peer: &PeerStatus) -> Result<(), Violation> {
    if peer.next > peer.matched {
        return Ok(());
    }
    let PeerStatus { member: to, matched, next, .. } = peer;
    let what = format!("{member} would send {to} entry {next}, which has {matched}");
    Err(Violation::new("next above match", what))
}
