//! Errors of the log.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Error of the log. All but [`LogError::Compacted`] are fatal to the process.
#[derive(Debug, Error)]
pub enum LogError {
    /// A disk operation failed. This process must never retry it.
    #[error("can't {action} {} at offset {offset}", path.display())]
    Disk {
        /// Operation that failed, as a verb for the message.
        action: &'static str,
        /// File or directory of the operation.
        path: PathBuf,
        /// Offset in the file.
        offset: u64,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Bytes that were durable are damaged or missing.
    #[error("{} is corrupt at offset {offset}: {what}; replace this member from its peers", path.display())]
    Corrupt {
        path: PathBuf,
        /// Offset in the file.
        offset: u64,
        /// Kind of the damage.
        what: Damage,
    },
    /// The file has the format of another version.
    #[error(
        "{} has format version {version}, this build reads version {known}: start this member with the muster-node that wrote it, or a later one",
        path.display()
    )]
    Version {
        path: PathBuf,
        /// Format version of the file.
        version: u8,
        /// Format version that this build reads.
        known: u8,
    },
    /// A record, or an item in it, is of a kind that this build doesn't know.
    #[error(
        "{} holds a record of kind {kind} at offset {offset}, which a later version wrote: start this member with that version, or a later one",
        path.display()
    )]
    Newer {
        path: PathBuf,
        /// Offset in the file.
        offset: u64,
        /// Unknown number of the kind.
        kind: u8,
    },
    /// An entry is of a kind that this build doesn't know. Skipping it would make this member
    /// differ from the others.
    #[error(
        "entry {index} in {} is of kind {kind}, which a later version wrote: start this member with that version, or a later one",
        path.display()
    )]
    NewerEntry {
        path: PathBuf,
        /// Index of the entry.
        index: u64,
        /// Unknown number of the kind.
        kind: u8,
    },
    /// Another process has locked the log.
    #[error("{} is in use by another process", path.display())]
    InUse {
        /// Directory of the log.
        path: PathBuf,
    },
    /// There is already a log.
    #[error("there is a log in {} already", path.display())]
    Exists {
        /// Directory of the log.
        path: PathBuf,
    },
    /// An earlier write failed, so this call did nothing.
    #[error("the log has failed before and is not written any more")]
    Poisoned,
    /// An entry is larger than any limit on proposals allows.
    #[error("entry {index} of {bytes} bytes doesn't fit a segment")]
    EntryTooLarge {
        /// Index of the entry.
        index: u64,
        /// Size of the entry's data.
        bytes: usize,
    },
    /// The log no longer has these entries. A peer that needs them must be sent a snapshot.
    #[error("entries from {low} are not in the log")]
    Compacted {
        /// First index that was requested.
        low: u64,
    },
}

/// Kind of damage to the log.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum Damage {
    /// A record doesn't match its checksum or isn't a record, and a later one proves that it was
    /// whole.
    #[error(
        "the record there is broken, and the one at offset {later} of segment {segment:x} proves that it was whole"
    )]
    Record {
        /// Number of the segment with that later record.
        segment: u64,
        /// Offset of that later record.
        later: u64,
    },
    /// A valid record doesn't continue the one before it.
    #[error("the record there doesn't follow the one before it")]
    Chain,
    /// A named segment has no valid first record.
    #[error("the segment has no valid first record")]
    FirstRecord,
    /// A segment belongs to another log.
    #[error("the segment belongs to another member or incarnation than the first one")]
    Foreign,
    /// A segment is shorter or longer than it was when it was made.
    #[error("the file has {found} bytes instead of {expected}")]
    Length {
        /// Length of the file in bytes.
        found: u64,
        /// Length that the segment was made with.
        expected: u64,
    },
    /// A segment is missing.
    #[error("the segment is missing")]
    Missing,
    /// A valid record contradicts the rest of the log.
    #[error("the record contradicts the log: {0}")]
    Contradiction(&'static str),
    /// A record that was valid when the log was opened no longer is.
    #[error("the record there no longer matches its checksum")]
    Checksum,
    /// Log and store contradict each other.
    #[error("{0}")]
    Store(&'static str),
}

impl LogError {
    /// Returns whether a restart would find the same error. The error then says what to do instead.
    pub fn is_final(&self) -> bool {
        match self {
            Self::Corrupt { .. }
            | Self::Version { .. }
            | Self::Newer { .. }
            | Self::NewerEntry { .. }
            // Occurs only at the start: the store needs entries that the log doesn't have.
            | Self::Compacted { .. } => true,
            Self::Disk { .. }
            | Self::InUse { .. }
            | Self::Exists { .. }
            | Self::Poisoned
            | Self::EntryTooLarge { .. } => false,
        }
    }

    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        Self::io_at(action, path, 0)
    }

    pub(super) fn io_at(
        action: &'static str,
        path: &Path,
        offset: u64,
    ) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_path_buf();
        move |source| Self::Disk { action, path, offset, source }
    }

    pub(super) fn damaged(path: &Path, offset: u64, what: Damage) -> Self {
        Self::Corrupt { path: path.to_path_buf(), offset, what }
    }
}
