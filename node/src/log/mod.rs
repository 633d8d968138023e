//! The durable log: what this member may never forget.
//!
//! `member/wal/` holds segments, `<id>.wal` with `id` in hex, each of a fixed size, filled with
//! zeros ahead of use and recycled under a new id once compaction has passed it. A flush is one
//! record, padded to 4 KiB: one write and one fdatasync, and no sector that was ever acknowledged
//! is written again.
//!
//! ```text
//! record  = length u32 | kind u8 | 0 0 0 | sequence u64 | previous u32 | crc u32 | payload
//! crc     = CRC-32C over (incarnation, segment id), the header without crc, payload
//! ```
//!
//! Sequences count up by one through all segments, and `previous` is the crc of the record before:
//! stale bytes of a recycled segment never fit, and nobody who can only choose values can forge a
//! record, since the incarnation is random.
//!
//! **Recovery.** A record that doesn't fit is the torn end of the last flush only if nothing valid
//! with a higher sequence follows anywhere: a flush begins only when the one before it is durable.
//! Then it is cut. Anything else is corruption, and refused with file and offset. A flipped bit in
//! the very last record can't be told from a torn write; the store's durable position, which the
//! caller compares, catches what that could hide.
//!
//! **Errors.** After a failed write or sync nothing more is written: the caller must stop the
//! process. What the medium really holds is seen by the next start, which drops cached pages first.
//!
//! **First use.** The directory is made as `member/wal.tmp`, its first record synced, and renamed:
//! where `member/wal` exists, so does the identity in it.

mod compact;
mod index;
mod options;
mod record;
mod recover;
mod segment;
mod write;

#[cfg(test)]
mod tests;

use std::io;
use std::path::PathBuf;

use node_consensus::{Entry, HardState, Position, Terms};
use thiserror::Error;

use crate::disk::{DiskFile, SharedDisk};
use index::Index;
pub use options::LogOptions;
pub use recover::Fit;
use segment::Directory;

/// Flushes begin at multiples of this.
pub(crate) const BLOCK: u64 = 4096;

/// Whose log it is; fixed when it is made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Raft cluster id.
    pub cluster: u64,
    /// Raft member id.
    pub member: u64,
    /// Random; one life of one data directory.
    pub incarnation: u128,
    /// The voters that the cluster was bootstrapped with.
    pub voters: Vec<u64>,
}

/// What one round of consensus wants durable. Applied in the order of the fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// The latest, if it changed.
    pub hard_state: Option<HardState>,
    /// The store is about to be replaced by a snapshot of this position.
    pub installing: Option<Position>,
    /// The store holds a snapshot of this position; no entry before or at it is needed.
    pub snapshot: Option<Position>,
    /// Contiguous; they replace what the log holds from the first one's index on.
    pub entries: Vec<Entry>,
}

/// What the log holds when it is opened.
#[derive(Clone, Debug, Default)]
pub struct Recovered {
    /// Whose it is.
    pub identity: Identity,
    /// How often it has been opened, this time included; durable.
    pub boot: u64,
    /// As last persisted.
    pub hard_state: HardState,
    /// The position before the first entry.
    pub base: Position,
    /// Terms of the entries after `base`.
    pub terms: Terms,
    /// A snapshot was being installed.
    pub installing: Option<Position>,
    /// A torn end was cut: file and offset.
    pub cut: Option<(PathBuf, u64)>,
}

/// Why the log can't be used. All of it is fatal to the process.
#[derive(Debug, Error)]
pub enum LogError {
    /// The disk said no. Nothing is written after that.
    #[error("{action} {path}")]
    Disk {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the disk said.
        source: io::Error,
    },
    /// Bytes that were durable are damaged or gone.
    #[error("{path} is corrupt at offset {offset}: {what}; restore this member from its peers")]
    Corrupt {
        /// Which file.
        path: PathBuf,
        /// Where in it.
        offset: u64,
        /// What doesn't fit.
        what: &'static str,
    },
    /// Made by a later version.
    #[error("{path} has format version {version}, this build reads version {known}")]
    Version {
        /// Which file.
        path: PathBuf,
        /// What it says.
        version: u32,
        /// What this build knows.
        known: u32,
    },
    /// An earlier write failed.
    #[error("the log has failed before and is not written any more")]
    Poisoned,
    /// A batch that can't be: a programming error, or a larger proposal than any bound allows.
    #[error("a batch doesn't fit the log: {what}")]
    Batch {
        /// What is wrong.
        what: &'static str,
    },
    /// Entries that the log no longer has, or never had.
    #[error("entries from {low} are not in the log")]
    NotThere {
        /// First index asked for.
        low: u64,
    },
}

/// The log, open for writing. One owner.
#[derive(Debug)]
pub struct Log {
    directory: Directory,
    options: LogOptions,
    identity: Identity,
    boot: u64,
    hard_state: HardState,
    installing: Option<Position>,
    index: Index,
    /// The segment being written.
    current: Current,
    /// Of the next record.
    sequence: u64,
    /// CRC of the last record.
    previous: u32,
    poisoned: bool,
    written_bytes: u64,
    buffer: Vec<u8>,
}

#[derive(Debug)]
struct Current {
    id: u64,
    file: Box<dyn DiskFile>,
    /// Where the next record goes.
    offset: u64,
    /// Zeros have been written up to here.
    filled: u64,
}

impl Log {
    /// The position before the first entry.
    pub fn base(&self) -> Position {
        self.index.base()
    }

    /// The last entry.
    pub fn last(&self) -> Position {
        self.index.last()
    }

    /// Whose it is.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Bytes written since it was opened, padding included.
    pub fn written_bytes(&self) -> u64 {
        self.written_bytes
    }

    /// Files in use, spares not counted.
    pub fn segments(&self) -> usize {
        self.directory.segments()
    }

    /// The disk it lies on.
    pub fn disk(&self) -> &SharedDisk {
        self.directory.disk()
    }
}
