//! Test tools that call code directly, instead of running the built programs. They are the
//! simulation of the node, the exploration of the bootstrap protocol, and the reference model of
//! the store.

pub mod explore;
pub mod model;
pub mod rng;
pub mod sim;
