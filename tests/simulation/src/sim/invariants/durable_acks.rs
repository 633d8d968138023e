//! Invariant: a write that was acknowledged to a client is committed, and is never lost.

use super::state_machine::StateMachineSafety;
use crate::sim::InvariantViolation;

/// Acknowledged puts and their revisions.
#[derive(Debug, Default)]
pub struct DurableAcks {
    acknowledged: Vec<(u64, i64)>,
}

impl DurableAcks {
    /// Records that a client's put was answered with this revision.
    pub fn record_acknowledged(&mut self, put: u64, revision: i64) {
        self.acknowledged.push((put, revision));
    }

    /// Returns the number of acknowledged puts.
    pub fn count(&self) -> usize {
        self.acknowledged.len()
    }

    /// Checks after the faults that every acknowledged put is committed and that the stores have
    /// reached its revision.
    pub fn check(
        &self,
        committed: &StateMachineSafety,
        store_revision: i64,
    ) -> Result<(), InvariantViolation> {
        for (put, revision) in &self.acknowledged {
            if !committed.has_request(*put) || *revision > store_revision {
                let what = format!("put {put} was acknowledged at revision {revision} and is gone");
                return Err(InvariantViolation::new("acknowledged writes survive", what));
            }
        }
        Ok(())
    }
}
