//! Runs the built programs as a user would: real processes, real TLS, real Postgres, real disks.
//!
//! A [`Testbed`] is one discovery service with its admin, on a [`network::Network`] of hosts. A
//! host is a network namespace where the machine allows it, otherwise a loopback address.
//! Everything that a test bed has started is killed by its process id when the test bed is dropped.

pub mod agentless;
pub mod agents;
pub mod browser;
pub mod credentials;
pub mod etcdctl;
pub mod formed_cluster;
pub mod network;
pub mod nodes;
mod postgres_template;
pub mod process;
pub mod programs;
pub mod s3;
pub mod script;
pub mod skip;
pub mod testbed;
pub mod wait;
pub mod writer;

pub use agentless::{AgentlessCluster, AgentlessNode};
pub use agents::AgentProcess;
pub use browser::Browser;
pub use etcdctl::Etcdctl;
pub use formed_cluster::FormedCluster;
pub use network::{Network, TestHost};
pub use nodes::NodeProcess;
pub use process::ChildProcess;
pub use s3::S3Gateway;
pub use script::write_script;
pub use testbed::Testbed;
pub use wait::{poll_slowly, wait_for};
pub use writer::RetryingWriter;
