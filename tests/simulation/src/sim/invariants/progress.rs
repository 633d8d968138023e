//! Invariant (liveness): once the faults have ended, the members elect a leader, catch up and
//! serve.

use crate::sim::InvariantViolation;

/// Returns the violation for a cluster that made no progress in time.
pub fn stuck(what: String) -> InvariantViolation {
    InvariantViolation::new("progress after the faults", what)
}
