//! Exploration of the bootstrap protocol. It runs the production code of both state machines in
//! every interleaving within bounds, and checks seven properties after every step.

mod actions;
mod apply;
mod breadth;
mod config;
mod database;
mod depth;
mod fingerprint;
mod host_side;
mod identity;
mod idle;
mod ladder;
mod links;
mod processes;
mod properties;
mod random;
mod reduce;
mod regressions;
mod road;
mod search;
mod service_side;
mod successors;
mod trace;
mod visited;
mod world;

pub use actions::{SystemAction, enumerate};
pub use apply::apply;
pub use config::{Environment, ExplorationConfig, FaultCounts};
pub use identity::{MAX_HOSTS, key};
pub use ladder::ladder;
pub use processes::RestoreMethod;
pub use properties::{Property, PropertyViolation};
pub use random::{WalkReport, walk_at_random};
pub use regressions::{RegressionCase, Safeguard, find_case, regression_cases};
pub use search::{Counterexample, ExplorationReport, SearchLimits, SearchProgress, explore};
pub use world::SystemState;
