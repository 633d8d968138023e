//! A Raft key-value node that speaks etcd's v3 API.

pub mod disk;
pub mod driver;
pub mod log;
pub mod machine;
