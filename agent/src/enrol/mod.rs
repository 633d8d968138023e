//! How this host becomes a member: by forming a cluster with other hosts, or by joining a running
//! one.
//!
//! `bundle` says which cluster. `protocol` owns the state machine and its journal. `bootstrap` and
//! `join` are the two ways; each ends with a node that may start. `redeem` is the part that both have
//! in common.

pub(crate) mod bootstrap;
pub(crate) mod bundle;
pub(crate) mod join;
pub(crate) mod node_key;
pub(crate) mod protocol;
mod redeem;
