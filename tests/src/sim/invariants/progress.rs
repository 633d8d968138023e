//! Liveness: once the faults have ended, the members elect a leader, catch up and serve.

use crate::sim::Violation;

/// It took too long.
pub fn stuck(what: String) -> Violation {
    Violation::new("progress after the faults", what)
}
