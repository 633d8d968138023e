//! The node's wire types: etcd's v3 API, and the commands in Muster's own log entries.
//!
//! The modules are generated from `proto/`. The first six have etcd's packages, names and field
//! numbers. A method that a server does not implement answers gRPC `Unimplemented`.

/// Includes the generated code of one protobuf package.
macro_rules! generated {
    ($package:literal) => {
        tonic::include_proto!($package);
    };
}

/// etcd's keys, values and events.
#[allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::too_many_lines,
    missing_docs,
    reason = "generated"
)]
pub mod mvccpb {
    generated!("mvccpb");
}

/// etcd's users, roles and permissions.
#[allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::too_many_lines,
    missing_docs,
    reason = "generated"
)]
pub mod authpb {
    generated!("authpb");
}

/// etcd's services KV, Watch, Lease, Cluster, Maintenance and Auth.
#[allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::too_many_lines,
    missing_docs,
    reason = "generated"
)]
pub mod etcdserverpb {
    generated!("etcdserverpb");
}

/// Leases as etcd stores them in its database file.
#[allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::too_many_lines,
    missing_docs,
    reason = "generated"
)]
pub mod leasepb {
    generated!("leasepb");
}

/// Messages and service of etcd's distributed lock.
#[allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::too_many_lines,
    missing_docs,
    reason = "generated"
)]
pub mod v3lockpb {
    generated!("v3lockpb");
}

/// Messages and service of etcd's leader election.
#[allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::too_many_lines,
    missing_docs,
    reason = "generated"
)]
pub mod v3electionpb {
    generated!("v3electionpb");
}

/// Muster's own messages: the contents of log entries.
#[allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::too_many_lines,
    missing_docs,
    reason = "generated"
)]
pub mod musterpb {
    generated!("musterpb");
}

pub mod command;
mod secret;

/// The client API as a serialised `FileDescriptorSet`: [`DESCRIPTORS`] without the messages that
/// only members exchange.
pub const API: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/api.bin"));

/// The descriptors of all packages above, as a serialised `FileDescriptorSet`.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
