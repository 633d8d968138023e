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

pub use actions::{Action, enumerate};
pub use apply::apply;
pub use config::{Config, Environment, Faults};
pub use identity::{HOSTS, key};
pub use ladder::ladder;
pub use processes::Setback;
pub use properties::{Property, Violation};
pub use random::{Walks, walk_at_random};
pub use regressions::{Case, Switch, cases, named};
pub use search::{Found, Limits, Progress, Report, explore};
pub use world::World;
