//! The replicated log on disk: what this member promised, and what it would be wrong to forget.
//!
//! One thread owns [`Log`] and does nothing else: it takes everything that is queued, gives each
//! batch to [`Log::append`], calls [`Log::flush`] once, and reports what is durable. Another thread
//! may read old entries through a [`Reader`] meanwhile.
//!
//! # What is on disk
//!
//! A directory (`member/wal`) of segments of one size, named by their number. A segment is a chain
//! of *records*; each begins on a 4 KiB boundary and carries its length, a sequence number, the
//! checksum of the record before it, and its own checksum. The first record of a segment says whose
//! log this is and repeats everything that earlier segments may be the only ones to know (term,
//! vote, commit, base, boots), so that they can go. All other records are groups: hard state and
//! entries of any number of batches.
//!
//! # Why each rule
//!
//! * **One flush is one write of one record, then one `fdatasync`.** The next record is written only
//!   when this one is durable. So whatever comes after a damaged record proves that the record was
//!   once whole: that is corruption. If nothing valid comes after it, it is the tail of a write that
//!   the crash cut off, nobody was told of it, and it is cut.
//! * **Records are padded to 4 KiB**, so that no sector that holds acknowledged bytes is ever
//!   written again: a torn write can only harm its own record.
//! * **Checksums are seeded with cluster, member, incarnation and segment number**: what a recycled
//!   segment still holds of its former life, or a segment copied from another member, never
//!   validates; and nobody who can only choose an entry's bytes can make them look like a record.
//! * **Segments get their space before their name.** A segment is allocated whole, its first record
//!   is written and synced under a spare's name, and only then is it renamed and the directory
//!   synced. So a named segment that is short or has no first record is damage. The log as a whole
//!   comes to be in the same way: `wal.tmp` is renamed to `wal` when everything in it is durable.
//!   Whoever sees `member/wal` sees a log that works.
//! * **Zeros are written ahead of the records** of a segment's first life, in large steps: a sync of
//!   blocks that were written before has no metadata to write. A recycled segment needs none.
//! * **The last record is sealed** by an empty one when nothing follows for a while ([`Log::seal`])
//!   and each opening writes one too; from then on damage to it is told from a torn tail.
//! * **A failed write or sync is final.** The kernel may have dropped the pages and call the next
//!   sync a success. The log refuses everything from then on, and the process has to abort; the
//!   restart reads what the medium holds, past the page cache ([`DiskFile::reread`]).
//!
//! # What the caller owes
//!
//! 1. Nothing that depends on a batch leaves before the [`Log::flush`] after it has returned `Ok`.
//! 2. After any error but [`ReadError::Compacted`] and [`ReadError::Unavailable`]: stop the process.
//!    [`LogError::is_damage`] says that a restart won't help.
//! 3. A snapshot goes into the store first, durably, and then into the log ([`Batch::snapshot`]).
//!    If after a restart the store is ahead of [`Recovered::last`], a batch with that snapshot is
//!    appended before anything else.
//! 4. [`Log::compact`] only up to what the store holds durably.
//!
//! # What it does not do
//!
//! It keeps no recent entries in memory: consensus does. It doesn't know that its whole directory
//! was replaced by an older copy: peers do.

mod error;
mod types;

use std::path::Path;

pub use error::{Damage, LogError, ReadError};
use node_consensus::{Entry, Position};
pub use types::{Batch, Flushed, Guards, Identity, Options, Recovered, SnapshotMark};

#[cfg(doc)]
use crate::disk::DiskFile;
use crate::disk::{Disk, SharedDisk};

/// Whether a log is there. `directory` is the log's own (`member/wal`).
pub fn exists(disk: &dyn Disk, directory: &Path) -> Result<bool, LogError> {
    disk.exists(directory).map_err(LogError::io("look for", directory))
}

/// The writer's end. See the module's documentation.
#[derive(Debug)]
pub struct Log {}

impl Log {
    /// Makes a new log and opens it. The parent of `directory` must exist. When this returns, the
    /// log is durable and has its name; if the process dies earlier, [`exists`] says no.
    pub fn create(
        disk: &SharedDisk,
        directory: &Path,
        identity: Identity,
        options: Options,
    ) -> Result<(Self, Recovered), LogError> {
        let _ = (disk, directory, identity, options);
        unimplemented!("in the next commit")
    }

    /// Opens a log, holds its directory until dropped, and tells what it holds. `identity` must be
    /// what it was created with. Everything told is durable, and so is the new count of boots.
    pub fn open(
        disk: &SharedDisk,
        directory: &Path,
        identity: Identity,
        options: Options,
    ) -> Result<(Self, Recovered), LogError> {
        let _ = (disk, directory, identity, options);
        unimplemented!("in the next commit")
    }

    /// The identity in an existing log, without opening it.
    pub fn identity(disk: &SharedDisk, directory: &Path) -> Result<Identity, LogError> {
        let _ = (disk, directory);
        unimplemented!("in the next commit")
    }

    /// Queues a batch for the next flush. Nothing is written yet, unless more is queued than one
    /// record takes.
    ///
    /// # Panics
    ///
    /// If the batch contradicts the log: entries with gaps, entries at or below the base.
    pub fn append(&mut self, batch: Batch) -> Result<(), LogError> {
        let _ = batch;
        unimplemented!("in the next commit")
    }

    /// Makes everything appended durable.
    pub fn flush(&mut self) -> Result<Flushed, LogError> {
        unimplemented!("in the next commit")
    }

    /// Says that everything flushed so far was whole, in a record of its own, unless the last one
    /// already does. To be called when nothing has come for a second or so, and before a clean end.
    pub fn seal(&mut self) -> Result<(), LogError> {
        unimplemented!("in the next commit")
    }

    /// Forgets entries up to `through`, durably, and recycles the segments that nobody needs any
    /// more. Does nothing if `through` is at or below the base or not in the log. Returns the base.
    pub fn compact(&mut self, through: u64) -> Result<Position, LogError> {
        let _ = through;
        unimplemented!("in the next commit")
    }

    /// Makes the next spare segment, if one is missing: to be called when there is nothing else to
    /// do. `Ok(false)`: the disk is full. The log still has room for
    /// [`bytes_left`](Self::bytes_left), so that the node can refuse writes in good time.
    pub fn reserve(&mut self) -> Result<bool, LogError> {
        unimplemented!("in the next commit")
    }

    /// Bytes that can be appended before a segment has to be made.
    pub fn bytes_left(&self) -> u64 {
        unimplemented!("in the next commit")
    }

    /// A reader of what is durable.
    pub fn reader(&self) -> Reader {
        unimplemented!("in the next commit")
    }
}

/// Reads durable entries from disk, from any thread. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Reader {}

impl Reader {
    /// Entries from `low` up to, not including, `high`: as many as fit `max_bytes`, and at least
    /// one. Costs reads of whole records: for slow followers and for the start, not for the hot
    /// path.
    pub fn entries(&self, low: u64, high: u64, max_bytes: u64) -> Result<Vec<Entry>, ReadError> {
        let _ = (low, high, max_bytes);
        unimplemented!("in the next commit")
    }

    /// The term of an entry, or of the base.
    pub fn term(&self, index: u64) -> Option<u64> {
        let _ = index;
        unimplemented!("in the next commit")
    }

    /// The position before the first entry.
    pub fn base(&self) -> Position {
        unimplemented!("in the next commit")
    }

    /// The last durable entry, or the base.
    pub fn last(&self) -> Position {
        unimplemented!("in the next commit")
    }
}
