//! A Raft key-value node that speaks etcd's v3 API.

pub mod apply;
pub mod auth;
pub mod causes;
pub mod commands;
pub mod config;
pub mod corruption;
pub mod disk;
pub mod driver;
pub mod durations;
pub mod etcd_file;
#[cfg(fuzzing)]
pub mod fuzz;
mod gateway;
mod http;
pub mod identity;
pub mod lease;
pub mod log;
mod log_limit;
pub mod logging;
pub mod machine;
pub mod membership;
pub mod mvcc;
pub mod recovery;
mod rpc;
pub mod server;
mod shares;
mod tls;
mod transport;
pub mod witness;
