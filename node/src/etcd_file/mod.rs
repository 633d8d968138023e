//! etcd's snapshot files: our store as one, and one as our store.
//!
//! Such a file is what `etcdctl snapshot save` writes: the bbolt database of an etcd member, with its
//! SHA-256 behind it. A member's own `member/snap/db` is the same without the hash. Ours differs from
//! etcd's in its container alone: records are the same `mvccpb.KeyValue`s under the same revisions, so
//! that `HashKV` is equal on both sides.
//!
//! # Reading one
//!
//! [`EtcdFile::open`] checks the hash and reads everything but the keys into [`Summary`].
//! [`EtcdFile::import`] then gives an [`Import`], from which records come one at a time, in the order of
//! their revisions. Whoever makes a store of them hands both to
//! [`Writer::import`](crate::mvcc::Writer::import):
//!
//! - all revisions are there that a compaction has left, tombstones too; those at or below
//!   `compacted` that nothing needs any more may still be among them, as in etcd, and the store takes
//!   them away by itself once it runs;
//! - bytes come as they are in the file, and so do leases, with what they had left when that was last
//!   noted; and users and roles, so that who could read what still can, and nobody else;
//! - `summary.revision` and `summary.compacted` are the store's, and may be higher than the last
//!   record's, for example after etcd's `--bump-revision`;
//! - the old cluster's members are told for information: a restored cluster has its own;
//! - alarms are told too; etcd's restore keeps them, so that a full or corrupt cluster stays one.
//!
//! The file is read as one that anybody may have made: nothing in it makes the reader panic, or hold
//! more than a page of each level of a tree.
//!
//! # Writing one
//!
//! [`Export`] freezes a store, finds out the size of its file, and writes it. See there.
//!
mod error;
mod names;
mod read;
mod status;
mod write;

#[cfg(test)]
mod tests;

pub use error::{EtcdFileError, ExportError};
pub use read::{Auth, EtcdFile, FileMember, HashCheck, Import, Summary};
pub use status::FileStatus;
pub use write::Export;
