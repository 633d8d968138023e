//! Errors of the log.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Error of the log. All but [`LogError::Compacted`] are fatal to the process.
#[derive(Debug, Error)]
pub enum LogError {
    /// A disk operation failed. The process must end, because a retry could report success for lost
    /// data.
    #[error("can't {action} {} at offset {offset}", path.display())]
    Disk {
        /// Failed operation, as a verb for the error text.
        action: &'static str,
        /// File or directory of the operation.
        path: PathBuf,
        /// Offset in the file.
        offset: u64,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Bytes that must have been durable are damaged or missing.
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
        /// Number of the unknown kind.
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
        /// Number of the unknown kind.
        kind: u8,
    },
    /// Another process has locked the log.
    #[error("{} is in use by another process", path.display())]
    InUse {
        /// Directory of the locked log.
        path: PathBuf,
    },
    /// There is already a log.
    #[error("there is a log in {} already", path.display())]
    Exists {
        /// Directory of the existing log.
        path: PathBuf,
    },
    /// An earlier operation failed, so the log refuses all later ones.
    #[error("the log has failed before and is not written any more")]
    Poisoned,
    /// An entry is too large for a segment. Limits on proposals prevent this.
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
    /// A record is invalid, but a valid later record proves that it was once complete.
    #[error(
        "the record there is broken, and the one at offset {later} of segment {segment:x} proves that it was whole"
    )]
    Record {
        /// Number of the segment with the later record.
        segment: u64,
        /// Offset of the later record in its segment.
        later: u64,
    },
    /// A valid record is not the successor of the record before it.
    #[error("the record there doesn't follow the one before it")]
    Chain,
    /// A file with a segment's name has no valid first record.
    #[error("the segment has no valid first record")]
    FirstRecord,
    /// A segment belongs to another member or incarnation than the first segment.
    #[error("the segment belongs to another member or incarnation than the first one")]
    Foreign,
    /// The file of a segment doesn't have the length with which it was created.
    #[error("the file has {found} bytes instead of {expected}")]
    Length {
        /// Length of the file in bytes.
        found: u64,
        /// Length with which the segment was created.
        expected: u64,
    },
    /// A segment is missing.
    #[error("the segment is missing")]
    Missing,
    /// A valid record contradicts the rest of the log.
    #[error("the record contradicts the log: {0}")]
    Contradiction(&'static str),
    /// A record that was valid when the log was opened no longer matches its checksum.
    #[error("the record there no longer matches its checksum")]
    Checksum,
    /// Log and store contradict each other.
    #[error("{0}")]
    Store(&'static str),
}

impl LogError {
    /// Returns whether a restart would find the same error. The text of such an error says what to
    /// do.
    pub fn is_final(&self) -> bool {
        match self {
            Self::Corrupt { .. }
            | Self::Version { .. }
            | Self::Newer { .. }
            | Self::NewerEntry { .. }
            // `Compacted` ends the process only at the start, when the store needs entries that the
            // log no longer has.
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
