//! Invariant: an entry committed in a term is in the logs of the leaders of all later terms (Raft
//! paper, figure 3).
//!
//! An entry is committed in the term of the leader that commits it, which may be later than the
//! entry's own term. A leader of term 3 whose votes arrived late may lack an entry of term 2 that
//! was committed in term 4.

use std::collections::{BTreeMap, BTreeSet};

use node_consensus::{Role, Status};

use super::state_machine::StateMachineSafety;
use crate::sim::InvariantViolation;

/// Leaders checked so far, and the term in which each entry was committed.
#[derive(Debug, Default)]
pub struct LeaderCompleteness {
    checked: BTreeSet<(u64, u64)>,
    /// Term in which all entries up to an index were committed, by that index. The leader of the
    /// term is the first member to know this.
    committed_in: BTreeMap<u64, u64>,
}

impl LeaderCompleteness {
    /// Checks a member's state after a step. `term_at` returns the term of an entry in the member's
    /// log.
    pub fn observe(
        &mut self,
        member: u64,
        status: &Status,
        committed: &StateMachineSafety,
        term_at: impl Fn(u64) -> Option<u64>,
    ) -> Result<(), InvariantViolation> {
        let known = self.committed_in.last_key_value().map_or(0, |(index, _)| *index);
        if status.commit > known {
            self.committed_in.insert(status.commit, status.term);
        }
        if status.role != Role::Leader || !self.checked.insert((member, status.term)) {
            return Ok(());
        }
        for (index, term) in committed.committed_from(status.first) {
            let committed_in = self.committed_in.range(index..).next().map(|(_, term)| *term);
            let earlier = committed_in.is_some_and(|committed_in| committed_in < status.term);
            if earlier && term_at(index) != Some(term) {
                let now = status.term;
                let what =
                    format!("{member} leads in term {now} without entry {index} of term {term}");
                return Err(InvariantViolation::new("leader completeness", what));
            }
        }
        Ok(())
    }
}
