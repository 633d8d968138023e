//! A member's agent at work: from the moment its node may start, until the agent stops or the
//! cluster removes the member.
//!
//! `supervise` is the one entry. It runs the node and, beside it, the reports to discovery, the
//! renewal of certificates, and the duties in `steward`.

pub(crate) mod addresses;
pub(crate) mod removal;
pub(crate) mod renewal;
pub(crate) mod report;
pub(crate) mod supervise;
