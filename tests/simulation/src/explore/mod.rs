//! Exploration of the bootstrap protocol. It runs the production code of both state machines in
//! every interleaving within bounds, and checks seven properties after every step.

mod actions;
mod apply;
mod breadth_first;
mod config;
mod database;
mod depth_first;
mod enumeration;
mod fault_free_run;
mod fingerprint;
mod host_steps;
mod identities;
mod ladder;
mod links;
mod no_op;
mod processes;
mod properties;
mod random;
mod reductions;
mod regressions;
mod search;
mod service_steps;
mod state;
mod successors;
mod trace;
mod visited;

pub use actions::SystemAction;
pub use apply::apply;
pub use config::{Environment, ExplorationConfig, FaultCounts};
pub use enumeration::enumerate;
pub use identities::{MAX_HOSTS, key};
pub use ladder::ladder;
pub use processes::RestoreMethod;
pub use properties::{Property, PropertyViolation};
pub use random::{WalkReport, walk_at_random};
pub use regressions::{RegressionCase, Safeguard, find_case, regression_cases};
pub use search::{Counterexample, ExplorationReport, SearchLimits, SearchProgress, explore};
pub use state::SystemState;
