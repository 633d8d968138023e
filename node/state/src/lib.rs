//! The replicated state of a node: what the log's entries do to it, and how it is stored.
//!
//! Nothing here opens a socket or knows consensus. `node-engine` decides which entries are applied,
//! and `node-api` serves what is stored.

pub mod apply;
pub mod auth;
pub mod corruption;
pub mod disk;
pub mod durations;
pub mod etcd_file;
pub mod identity;
pub mod lease;
pub mod membership;
pub mod mvcc;
pub mod state_machine;

/// Version of the cluster's data and protocol, which etcd calls cluster version and storage
/// version.
pub const CLUSTER_VERSION: &str = "3.6.0";
