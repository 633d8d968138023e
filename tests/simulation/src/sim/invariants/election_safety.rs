//! Invariant: at most one leader is elected in a given term (Raft paper, figure 3). It relies on a
//! second invariant, also checked here: a member votes at most once in a term, whatever happens to
//! its disk and process.

use std::collections::BTreeMap;

use node_consensus::{Message, MessageKind, Role, Status};

use crate::sim::InvariantViolation;

/// Leaders by term, and votes by member and term.
#[derive(Debug, Default)]
pub struct ElectionSafety {
    leaders: BTreeMap<u64, u64>,
    votes: BTreeMap<(u64, u64), u64>,
}

impl ElectionSafety {
    /// Checks a member's state after a step.
    pub fn observe(&mut self, member: u64, status: &Status) -> Result<(), InvariantViolation> {
        if status.role != Role::Leader {
            return Ok(());
        }
        let leader = *self.leaders.entry(status.term).or_insert(member);
        if leader == member {
            return Ok(());
        }
        let term = status.term;
        let what = format!("{leader} and {member} both lead in term {term}");
        Err(InvariantViolation::new("election safety", what))
    }

    /// Returns the number of terms that had a leader.
    pub fn elections(&self) -> u64 {
        self.leaders.len() as u64
    }

    /// Returns the candidate that a member has voted for in `term`.
    pub fn voted(&self, member: u64, term: u64) -> Option<u64> {
        self.votes.get(&(member, term)).copied()
    }

    /// Checks a vote that a member has sent.
    pub fn check_vote(&mut self, message: &Message) -> Result<(), InvariantViolation> {
        let candidate = match message.kind {
            MessageKind::RequestVoteResponse if !message.reject => message.to,
            MessageKind::RequestVote => message.from,
            _ => return Ok(()),
        };
        let (member, term) = (message.from, message.term);
        let before = *self.votes.entry((member, term)).or_insert(candidate);
        if before == candidate {
            return Ok(());
        }
        let what = format!("{member} voted for {before} and {candidate} in term {term}");
        Err(InvariantViolation::new("one vote per term", what))
    }
}
