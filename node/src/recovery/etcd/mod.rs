//! What is left of a cluster of etcds: a look at a member's directory, and a new cluster made of it.
//!
//! etcd's own way out, `--force-new-cluster`, keeps the cluster's id, so that two of its survivors take
//! each other for their own; and it drops the entries of the log's end that this member didn't know
//! to be committed, of which each may have been acknowledged. Its other way, `etcdutl snapshot restore`
//! of the store, makes new ids, and doesn't know the log at all. Here the two are put one behind the
//! other, on a copy: its log is first told that all of it is committed, which is what an election would
//! have done in which only this member could vote; etcd applies that; and its store is restored as a
//! new cluster of one. The copy takes the place of the original in one step.
//!
//! What etcd can't do is told to whoever asks for it: before 3.6 (and the later 3.4 and 3.5) its tool
//! can't make revisions higher than those that the lost members may have shown; and etcd knows no
//! incarnations, so that the marker in the directory is the agent's word alone.

mod copy;
mod look;
mod make;
mod wal;

pub(super) use self::look::see;
pub use self::{
    make::{EtcdError, EtcdTools, recover},
    wal::WalError,
};
