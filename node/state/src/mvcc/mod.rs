//! The store: every revision of every key until compaction, on disk, with an index in RAM.
//!
//! All replicated state is in one file: records by revision, the applied position, members, alarms,
//! leases, users. The key index (`index`) says which revisions belong to a key.
//!
//! A batch of log entries changes only memory: the index, and a *memtable* (`memtable`) that has
//! what the file lacks. The log is durable, so nothing is lost in a crash. A *flush* (`flush`)
//! writes the memtable to the file, all of it in one durable transaction. Afterwards only later
//! entries of the log are still needed.
//!
//! There is one [`StoreWriter`], owned by the code that applies the log, and any number of
//! [`Store`] handles for reading. After each batch the writer publishes a [`View`]: a snapshot of
//! the file and the memtables, with its revision and log position. A read takes the newest view and
//! never waits for a write.
//!
//! The index is not versioned. It is read at the view's revision, behind a short lock, a bounded
//! number of keys at a time. A read that a compaction has overtaken is noticed and refused, never
//! answered wrongly.
//!
//! Requests, limits and error texts are not handled here, but in `apply` and in the crate
//! `node-api`.

mod batch;
mod channels;
mod compaction;
mod defragment;
mod error;
mod event;
mod flush;
mod hash;
mod history;
mod index;
mod length_tracking;
mod load;
mod memtable;
mod operation_counters;
mod range;
mod record_rows;
mod revision;
mod rows;
mod snapshot;
mod store;
mod tables;
pub mod watch;
mod writer;

pub use batch::Batch;
pub use channels::ValueFollower;
pub use compaction::CompactionProgress;
pub use defragment::{DefragmentError, DefragmentSizes, StoreFile};
pub use error::{ReadError, StoreError};
pub use event::{Event, EventBatch, EventKind};
pub use hash::KeyValueHash;
pub use operation_counters::{APPLIED_KINDS, OperationCounters, OperationCounts};
pub use range::{AnswerBudget, RangeRead, RangeStep, Scan};
pub(crate) use revision::EtcdKey;
pub use revision::{KeyRange, Revision};
pub use snapshot::{Contents, inspect_snapshot};
pub use store::{FrozenView, Store, View};
pub use writer::{CompactionMode, StoreOptions, StoreWriter};

#[cfg(test)]
pub(crate) mod tests;
