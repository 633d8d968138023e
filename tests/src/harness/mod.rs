//! Runs the built programs as a user would: real processes, real TLS, real Postgres, real disks.
//!
//! A [`world::World`] is one discovery service with its admin, on a [`network::Network`] of hosts.
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

pub use agents::Agent;
pub use etcdctl::Etcdctl;
pub use machines::{Machine, Machines};
pub use network::{Host, Network};
pub use nodes::Node;
pub use process::Process;
pub use wait::{until, until_told};
pub use world::World;
pub use writer::Writer;
