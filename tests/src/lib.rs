//! Test tools that run the three programs as their users do: the harness, the demo and the
//! end-to-end tests. Also the exploration of the bootstrap protocol, the simulation of the node,
//! and the benchmarks.

pub mod bench;
pub mod bench_discovery;
pub mod bench_replacement;
pub mod campaign;
pub mod client;
pub mod demo;
pub mod fuzz_etcd;
pub mod go_program;
pub mod harness;
pub mod histories;
pub mod mutants;
pub mod stock_etcd;
pub mod upgrade;

pub use muster_simulation::{explore, model, rng, sim};
