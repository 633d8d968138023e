//! Reads and writes etcd's snapshot files.
//!
//! Such a file is what `etcdctl snapshot save` writes: the bbolt database of an etcd member,
//! followed by its SHA-256 hash. A member's own `member/snap/db` has the same format without the
//! hash. Our store differs from etcd's only in its container: the records are the same
//! `mvccpb.KeyValue` messages under the same revisions. So `HashKV` is equal on both sides.
//!
//! # Reading a file
//!
//! [`EtcdFile::open`] checks the hash, and reads everything but the keys into a [`FileSummary`].
//! [`EtcdFile::records`] returns a [`RecordReader`], which gives the records one at a time, in the
//! order of their revisions. The caller that makes a store passes both to
//! [`StoreWriter::import`](crate::mvcc::StoreWriter::import):
//!
//! - The file has all records that a compaction has left, including tombstones. As in etcd, it can
//!   still contain records at or below `compacted` that are no longer needed. The new store removes
//!   these records by itself later.
//! - Records are imported unchanged, byte for byte. Leases are imported with their last recorded
//!   remaining time. Users and roles are imported too, so permissions stay the same.
//! - `summary.revision` and `summary.compacted` are those of the store. They may be higher than the
//!   last record's revision, for example after etcd's `--bump-revision`.
//! - The old cluster's members are reported for information only, since a restored cluster has its
//!   own.
//! - Alarms are reported too. As in etcd's restore, a cluster that was full or corrupt keeps its
//!   alarm.
//!
//! The file counts as untrusted. Nothing in it makes the reader panic, or keep more than one page
//! per level of a tree in memory.
//!
//! # Writing a file
//!
//! [`Export`] freezes a store, computes the size of its file, and writes it.

mod error;
mod names;
mod read;
mod status;
mod write;

#[cfg(test)]
mod tests;

pub use error::{EtcdFileError, ExportError};
pub use read::{AuthSummary, EtcdFile, FileMember, FileSummary, HashCheck, RecordReader};
pub use status::FileStatus;
pub use write::Export;
