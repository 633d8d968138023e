//! Applies committed log entries to the store: deterministically, and as the store's only writer.
//!
//! [`KvStateMachine`] is the node's [`StateMachine`](crate::state_machine::StateMachine). A batch
//! of entries becomes one transaction and one publication of events. Refusals at this stage depend
//! only on the store, so every member refuses the same requests.
//!
//! Checks that need no store are in the module `check`. The API calls them for clients' requests,
//! and the node for proposals that a peer forwards. A request that fails them never reaches the
//! log.

mod auth;
mod check;
mod lease;
mod machine;
mod outcome;
mod read_txn;
mod txn;

pub use check::{CheckError, MAX_TXN_DEPTH, check_delete, check_put, check_range, check_txn};
pub use machine::KvStateMachine;
pub use machine::{entry_kind, may_grow_data};
pub use outcome::{ApplyError, MemberChangeAnswer, Outcome, Response};
pub use read_txn::ReadTxn;
pub use txn::{is_read_only, is_serializable};

#[cfg(test)]
mod tests;
