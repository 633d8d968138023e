//! A member's agent at work: from the moment its node may start, until the agent stops or the
//! cluster removes the member.
//!
//! `supervise` is the one entry. It takes the statements that a person has brought (`issued`),
//! starts the node by `node_start`, and keeps it running. Beside the node, it runs the agent's
//! other tasks:
//! - reports to discovery (`report`), and checks of discovery's history (`history`);
//! - the search for discovery after it has moved (`service`);
//! - the renewal of certificates (`renewal`), and the replacement of CAs (`authorities`);
//! - the search for members that have moved (`relocation`);
//! - the duties in `steward`.

pub(crate) mod addresses;
mod authorities;
mod history;
mod issued;
pub(crate) mod node_start;
mod relocation;
pub(crate) mod removal;
mod renewal;
pub(crate) mod report;
pub(crate) mod service;
pub(crate) mod supervise;
