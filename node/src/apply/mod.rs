//! From committed log entries to changes of the store: deterministic, and its only writer.
//!
//! [`Machine`] is the node's [`StateMachine`](crate::machine::StateMachine). A batch of entries becomes one transaction and one
//! publication of events. What a request may be refused for here is decided by the store alone, so
//! that every member refuses it alike; what can be checked without the store (`rpc` does) never
//! reaches the log.

mod auth;
mod check;
mod lease;
mod machine;
mod outcome;
mod read_txn;
mod txn;

pub use check::{CheckError, MAX_TXN_DEPTH, check_delete, check_put, check_range, check_txn};
pub use machine::Machine;
pub(crate) use machine::{entry_kind, grows};
pub use outcome::{ApplyError, ChangedMembers, Outcome, Response};
pub use read_txn::ReadTxn;
pub use txn::{is_read_only, is_serializable};

#[cfg(test)]
mod tests;
