//! Brings a running etcd under this agent's management, without an interruption of the cluster.
//!
//! 1. `adopt survey` asks the cluster who its members are; an owner signs the answer.
//! 2. `adopt enrol` runs beside each etcd until the agents of all members have enrolled. The commit
//!    document then binds each agent's key to a member. Nothing is stopped.
//! 3. `adopt take-over`, run by the operator, stops one etcd, and its agent starts it again. A
//!    record in the cluster's own store prevents two take-overs at once.
//! 4. `adopt certificates` makes a member serve certificates of the cluster's own CAs, once all
//!    members trust these CAs.
//!
//! This module does not decide who is a member: the owner's statement and the cluster do.

pub(crate) mod config;
pub(crate) mod config_file;
pub(crate) mod container;
pub(crate) mod open_files;
pub(crate) mod process;
pub(crate) mod record;
pub(crate) mod systemd;
