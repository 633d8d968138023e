//! Raft paper, figure 3: an entry committed in a term is in the logs of the leaders of all later
//! terms.

use node_consensus::{Role, Status};

use super::state_machine::StateMachineSafety;
use crate::sim::Violation;

/// See the module.
#[derive(Debug, Default)]
pub struct LeaderCompleteness {
    checked: std::collections::BTreeSet<(u64, u64)>,
}

impl LeaderCompleteness {
    /// A member's state after a step; `term_at` reads its log.
    pub fn observe(
        &mut self,
        member: u64,
        status: &Status,
        committed: &StateMachineSafety,
        term_at: impl Fn(u64) -> Option<u64>,
    ) -> Result<(), Violation> {
        if status.role != Role::Leader || !self.checked.insert((member, status.term)) {
            return Ok(());
        }
        for (index, term) in committed.from(status.first) {
            // What was committed in this very term came from this leader.
            if term < status.term && term_at(index) != Some(term) {
                let now = status.term;
                let what =
                    format!("{member} leads in term {now} without entry {index} of term {term}");
                return Err(Violation::new("leader completeness", what));
            }
        }
        Ok(())
    }
}
