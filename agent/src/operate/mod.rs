//! A member's agent at work: from the moment its node may start, until the agent stops or the
//! cluster removes the member.
//!
//! `supervise` is the one entry. It starts the node by `node_start` and keeps it running. Meanwhile
//! it runs the reports to discovery, the search for a discovery that has moved, the renewal of
//! certificates, the search for members that have moved, and the duties in `steward`.

pub(crate) mod addresses;
mod authorities;
mod history;
pub(crate) mod node_start;
mod relocation;
pub(crate) mod removal;
mod renewal;
mod report;
pub(crate) mod service;
pub(crate) mod supervise;
