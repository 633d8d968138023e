//! A Raft key-value node that speaks etcd's v3 API.

pub mod apply;
pub mod disk;
pub mod driver;
mod http;
pub mod log;
pub mod machine;
pub mod mvcc;
pub mod rpc;
