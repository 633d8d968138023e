//! Agreement between the members of a cluster: the driver that owns consensus, the log on disk, and
//! the streams between members.
//!
//! The engine knows the state only as a [`StateMachine`](node_state::state_machine::StateMachine).

pub mod causes;
pub mod driver;
pub mod log;
pub mod log_limit;
pub mod tls;
pub mod transport;
pub mod witness;
