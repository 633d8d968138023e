//! Runs the built programs as a user would: real processes, real TLS, real Postgres, real disks.
//!
//! A [`world::Testbed`] is one discovery service with its admin, on a [`network::Network`] of hosts.
//! A host is a network namespace where the machine allows it, otherwise a loopback address.
//! Everything a world starts is killed by its process id when the world is dropped.

pub mod agents;
pub mod credentials;
pub mod etcdctl;
pub mod machines;
pub mod network;
pub mod nodes;
pub mod process;
pub mod programs;
pub mod skip;
pub mod wait;
pub mod world;
pub mod writer;

pub use agents::AgentProcess;
pub use etcdctl::Etcdctl;
pub use machines::{AgentlessCluster, AgentlessNode};
pub use network::{Network, TestHost};
pub use nodes::NodeProcess;
pub use process::ChildProcess;
pub use wait::{poll_slowly, wait_for};
pub use world::Testbed;
pub use writer::RetryingWriter;
