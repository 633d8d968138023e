//! Consensus between the members of a cluster: the driver, the log on disk, and the streams between
//! members. The driver owns the Raft core.
//!
//! The engine accesses the replicated state only through the trait
//! [`StateMachine`](node_state::state_machine::StateMachine).

pub mod causes;
pub mod driver;
pub mod log;
pub mod log_limit;
pub mod tls;
pub mod transport;
pub mod witness;
