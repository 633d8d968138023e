//! An etcd that runs already, and comes under this agent's management without an interruption.
//!
//! 1. `adopt survey` asks the cluster who its members are; an owner signs the answer.
//! 2. `adopt enrol` runs beside each etcd until all have come. The commit document then binds each
//!    agent's key to a member. Nothing is stopped.
//! 3. `adopt take-over` stops one etcd and lets its agent start it again, on the operator's word. A
//!    record in the cluster's own store lets no two members be taken over at once.
//! 4. `adopt certificates` lets a member serve certificates of the cluster's own CAs, once all members
//!    trust these.
//!
//! This module does not decide who is a member: the owner's statement and the cluster do.

pub(crate) mod config;
pub(crate) mod process;
pub(crate) mod record;
pub(crate) mod systemd;
