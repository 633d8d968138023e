//! A Raft key-value node that speaks etcd's v3 API.

pub mod config;
pub mod disk;
pub mod driver;
pub mod identity;
pub mod log;
pub mod machine;
pub mod server;
pub mod tls;
pub mod transport;
