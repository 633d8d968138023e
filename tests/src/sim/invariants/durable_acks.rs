//! What was acknowledged to a client is committed, and stays so through everything.

use super::state_machine::StateMachineSafety;
use crate::sim::Violation;

/// See the module.
#[derive(Debug, Default)]
pub struct DurableAcks {
    acknowledged: Vec<(u64, i64)>,
}

impl DurableAcks {
    /// A client was told that its put is done, at this revision.
    pub fn acknowledged(&mut self, put: u64, revision: i64) {
        self.acknowledged.push((put, revision));
    }

    /// How many puts were acknowledged.
    pub fn count(&self) -> usize {
        self.acknowledged.len()
    }

    /// After the faults: every acknowledged put is committed, and no store is behind it.
    pub fn check(
        &self,
        committed: &StateMachineSafety,
        store_revision: i64,
    ) -> Result<(), Violation> {
        for (put, revision) in &self.acknowledged {
            if !committed.has_request(*put) || *revision > store_revision {
                let what = format!("put {put} was acknowledged at revision {revision} and is gone");
                return Err(Violation::new("acknowledged writes survive", what));
            }
        }
        Ok(())
    }
}
