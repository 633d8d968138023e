//! The node's wire types: etcd's v3 API, and the commands in this project's own log entries.
//!
//! The modules are generated from `proto/`. Packages, names and numbers of the first six are
//! etcd's; a method that a server leaves out answers gRPC `Unimplemented`.

/// Generated code: its shape is the generator's.
macro_rules! generated {
    ($package:literal) => {
        tonic::include_proto!($package);
    };
}

/// Keys, values and events.
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

/// Users, roles, permissions.
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

/// The services KV, Watch, Lease, Cluster, Maintenance and Auth.
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

/// Leases, as etcd's file has them.
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

/// The Lock service.
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

/// The Election service.
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

/// This project's own: what log entries hold.
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

/// What clients may ask for, as a serialised `FileDescriptorSet`: [`DESCRIPTORS`] without what only members say.
pub const API: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/api.bin"));

/// Names and numbers of everything above, as a serialised `FileDescriptorSet`.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
