//! The store: every revision of every key until compaction, on disk, with an index in RAM.
//!
//! One redb table holds the records by revision; the key index (`index`) says which revisions
//! belong to a key. Whatever is replicated lies in one file and changes in one transaction per
//! batch of log entries: records, the applied position, members, alarms. These commits are not
//! durable, since the log is; a *checkpoint* makes everything so far durable at once, and the log
//! is needed only from there on.
//!
//! There is one [`Writer`], owned by whoever applies the log, and any number of [`Store`] handles
//! that read. After each batch the writer publishes a [`View`]: a snapshot of the file, with the
//! revision and the position that it stands for. A read takes the newest view and never waits for
//! a write; the index, which is not versioned, is read behind a short lock, a bounded number of
//! keys at a time, at the view's revision. What a compaction takes away meanwhile is noticed and
//! refused, never answered wrongly.
//!
//! The store does not know requests, limits or error texts: `apply` and `rpc` do.

mod batch;
mod compaction;
mod defragment;
mod error;
mod event;
mod hash;
mod history;
mod index;
mod load;
mod measured;
mod operations;
mod range;
mod revision;
mod rows;
mod snapshot;
mod store;
mod tables;
pub mod watch;
mod writer;

pub use batch::Batch;
pub use compaction::CompactionProgress;
pub use defragment::{DefragmentError, Defragmented, StoreFile};
pub use error::{ReadError, StoreError};
pub use event::{Event, EventBatch, EventKind};
pub use hash::KeyValueHash;
pub use operations::{APPLIED, Counted, Operations};
pub use range::{AnswerRoom, Gather, Scan, Step};
pub(crate) use revision::EtcdKey;
pub use revision::{KeyRange, Revision};
pub use snapshot::{Contents, inspect_snapshot};
pub use store::{Frozen, Store, View};
pub use writer::{Compaction, Options, Writer};

#[cfg(test)]
pub(crate) mod tests;
