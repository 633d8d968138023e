//! How this host becomes a member: by forming a cluster with other hosts, or by joining a running
//! one.
//!
//! `bundle` determines the cluster to join. `protocol` owns the state machine and its journal.
//! `bootstrap` forms a cluster, `join` joins one; each ends with a node that may start. `redeem`
//! has the code that `bootstrap` and `join` share.

pub(crate) mod bootstrap;
pub(crate) mod bundle;
pub(crate) mod join;
pub(crate) mod node_key;
pub(crate) mod protocol;
pub(crate) mod redeem;
