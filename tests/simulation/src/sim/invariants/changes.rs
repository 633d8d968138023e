//! Invariant: one membership change at a time (etcd's issues 7625 and 11284). A leader proposes a
//! change only when a quorum of the members knows that the previous change is committed. Otherwise
//! some members could be two configurations behind, and have a majority of their own there.

use std::collections::{BTreeMap, BTreeSet};

use node_consensus::Entry;

use crate::sim::InvariantViolation;

/// Membership changes proposed so far, and each member's commit index.
#[derive(Debug, Default)]
pub struct MembershipChanges {
    /// Highest commit index that each member has ever known.
    known: BTreeMap<u64, u64>,
    /// Changes that leaders have proposed, as (index, term).
    proposed: BTreeSet<(u64, u64)>,
}

impl MembershipChanges {
    /// Records that a member knows that everything up to `commit` is committed.
    pub fn record_commit(&mut self, member: u64, commit: u64) {
        let known = self.known.entry(member).or_default();
        *known = commit.max(*known);
    }

    /// Checks a change that the leader `member` proposes. `voters` are the voters of the leader's
    /// present configuration. `may_count(index, term)` says whether an earlier change is in the
    /// leader's log and may have changed the members.
    pub fn check_proposal(
        &mut self,
        member: u64,
        voters: &[u64],
        change: &Entry,
        may_count: impl Fn(u64, u64) -> bool,
    ) -> Result<(), InvariantViolation> {
        let earlier = self.proposed.range(..(change.index, 0));
        let last = earlier.rev().find(|(index, term)| may_count(*index, *term)).copied();
        self.proposed.insert((change.index, change.term));
        let Some((last, _)) = last else { return Ok(()) };
        let knows = |voter: &&u64| self.known.get(voter).is_some_and(|commit| *commit >= last);
        let knowing = voters.iter().filter(knows).count();
        if knowing > voters.len() / 2 {
            return Ok(());
        }
        let what = format!(
            "{member} proposes a change at {}, and {knowing} of {voters:?} know of the one at {last}",
            change.index
        );
        Err(InvariantViolation::new("one change at a time", what))
    }
}
