//! Invariant: only voters count (Raft paper, figure 2, with learners). A leader commits entries
//! that a majority of the *voters* has on disk, and leads by the votes of such a majority. Learners
//! belong to neither majority. A learner becomes a voter only when it lacks few entries.

use std::collections::BTreeMap;

use node_consensus::{Members, Role, Status};

use super::election_safety::ElectionSafety;
use crate::sim::InvariantViolation;

/// Durable and committed indexes, and the leaders checked so far.
#[derive(Debug, Default)]
pub struct QuorumCounts {
    /// Highest index that each member has ever had on disk.
    durable: BTreeMap<u64, u64>,
    /// Highest index that any leader has committed.
    committed: u64,
    /// Term in which each leader was last checked.
    checked_terms: BTreeMap<u64, u64>,
}

fn is_quorum(members: &Members, counts: impl Fn(u64) -> bool) -> bool {
    let voters = &members.voters;
    voters.iter().filter(|voter| counts(**voter)).count() > voters.len() / 2
}

impl QuorumCounts {
    /// Records that a member has its log up to `last` on disk.
    pub fn record_durable(&mut self, member: u64, last: u64) {
        let durable = self.durable.entry(member).or_default();
        *durable = last.max(*durable);
    }

    /// Checks a member's state after a step. In that step the member has used one of
    /// `configurations`.
    pub fn observe(
        &mut self,
        member: u64,
        status: &Status,
        configurations: &[&Members],
        elections: &ElectionSafety,
    ) -> Result<(), InvariantViolation> {
        let leads = status.role == Role::Leader;
        if leads && status.commit > self.committed {
            let has = |id| self.durable.get(&id).is_some_and(|last| *last >= status.commit);
            if !configurations.iter().any(|members| is_quorum(members, has)) {
                let what = format!(
                    "{member} has committed {} with {configurations:?}, on disk are {:?}",
                    status.commit, self.durable
                );
                return Err(InvariantViolation::new("commits are on a quorum's disks", what));
            }
        }
        self.committed = self.committed.max(status.commit);
        if leads && self.checked_terms.insert(member, status.term) != Some(status.term) {
            let votes = |id| id == member || elections.voted(id, status.term) == Some(member);
            if !configurations.iter().any(|members| is_quorum(members, votes)) {
                let term = status.term;
                let what = format!("{member} leads in {term} without one of {configurations:?}");
                return Err(InvariantViolation::new("leaders have a quorum's votes", what));
            }
        }
        Ok(())
    }

    /// Checks that a promoted learner lacks at most `max_lag` entries of the leader's log, which
    /// ends at `last`.
    pub fn check_promotion(
        &self,
        learner: u64,
        last: u64,
        max_lag: u64,
    ) -> Result<(), InvariantViolation> {
        let durable = self.durable.get(&learner).copied().unwrap_or(0);
        if durable > 0 && durable + max_lag >= last {
            return Ok(());
        }
        let what = format!("{learner} has {durable} of {last} entries");
        Err(InvariantViolation::new("promoted learners are in sync", what))
    }
}
