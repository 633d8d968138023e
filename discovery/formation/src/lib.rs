//! How a cluster forms: the service's and the agent's state machines, pure.

pub mod agent;
pub mod fitness;
pub mod rules;
pub mod service;
pub mod values;

pub use rules::{Rule, Rules};
pub use values::*;
