//! The replicated state of a node: the effects of the log's entries, and the storage of the state.
//!
//! Nothing here opens a socket or knows consensus. `node-engine` decides which entries are applied,
//! and `node-api` serves the stored data.

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
