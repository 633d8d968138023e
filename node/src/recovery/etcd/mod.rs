//! Recovery from the directory of an etcd member: inspects it, and makes a new cluster from it.
//!
//! etcd's own `--force-new-cluster` keeps the cluster's id, so two survivors of one cluster would
//! accept each other as members. It also drops the last entries of the log if this member did not
//! know them to be committed. Clients may have got an acknowledgement for any of these entries.
//!
//! etcd's other way, `etcdutl snapshot restore` of the store, makes new ids but ignores the log.
//!
//! Here both ways are combined, on a copy of the directory:
//!
//! 1. The copy's log is changed to say that all of it is committed. An election in which only this
//!    member could vote would have had the same result.
//! 2. etcd applies the log.
//! 3. The store is restored as a new single-member cluster.
//! 4. The copy takes the place of the original in one step.
//!
//! Two things are impossible with etcd. First, most of its tools before 3.6 can't raise revisions
//! above those that the lost members may have shown; this is logged. Only later releases of 3.4 and
//! 3.5 can. Second, etcd has no incarnations, so only the agent's marker in the directory contains
//! an incarnation.

mod copy;
mod inspection;
mod new_cluster;

pub(super) use self::inspection::inspect;
pub use self::new_cluster::{EtcdError, EtcdTools, recover};
