//! Why the log can't go on.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Fatal to the process, all but [`LogError::NotThere`].
#[derive(Debug, Error)]
pub enum LogError {
    /// The disk said no. Never to be tried again by this process.
    #[error("can't {action} {} at offset {offset}", path.display())]
    Disk {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Where in it.
        offset: u64,
        /// What the disk said.
        source: io::Error,
    },
    /// Bytes that were durable are damaged or gone.
    #[error("{} is corrupt at offset {offset}: {what}; replace this member from its peers", path.display())]
    Corrupt {
        /// Which file.
        path: PathBuf,
        /// Where in it.
        offset: u64,
        /// What is wrong.
        what: Damage,
    },
    /// Made by a later version.
    #[error(
        "{} has format version {version}, this build reads version {known}: start this member with the muster-node that wrote it, or a later one",
        path.display()
    )]
    Version {
        /// Which file.
        path: PathBuf,
        /// What it says.
        version: u8,
        /// What this build knows.
        known: u8,
    },
    /// A record of a kind that this build doesn't know.
    #[error(
        "{} holds a record of kind {kind} at offset {offset}, which a later version wrote: start this member with that version, or a later one",
        path.display()
    )]
    Newer {
        /// Which file.
        path: PathBuf,
        /// Where in it.
        offset: u64,
        /// The kind.
        kind: u8,
    },
    /// An entry of a kind that this build doesn't know; to skip it would be to differ from the others.
    #[error(
        "entry {index} in {} is of kind {kind}, which a later version wrote: start this member with that version, or a later one",
        path.display()
    )]
    NewerEntry {
        /// Which file.
        path: PathBuf,
        /// Its index.
        index: u64,
        /// Its kind.
        kind: u8,
    },
    /// Another process holds it.
    #[error("{} is in use by another process", path.display())]
    InUse {
        /// The log's directory.
        path: PathBuf,
    },
    /// There is one already.
    #[error("there is a log in {} already", path.display())]
    Exists {
        /// The log's directory.
        path: PathBuf,
    },
    /// An earlier write failed; this call did nothing.
    #[error("the log has failed before and is not written any more")]
    Poisoned,
    /// An entry larger than any bound on proposals allows.
    #[error("entry {index} of {bytes} bytes doesn't fit a segment")]
    EntryTooLarge {
        /// Its index.
        index: u64,
        /// Its size.
        bytes: usize,
    },
    /// Entries that the log no longer has: a peer that needs them needs a snapshot.
    #[error("entries from {low} are not in the log")]
    NotThere {
        /// First index asked for.
        low: u64,
    },
}

/// What is wrong with a file.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum Damage {
    /// A record doesn't match its checksum, or isn't one, and a later one proves that it was whole.
    #[error(
        "the record there is broken, and the one at offset {later} of segment {segment:x} proves that it was whole"
    )]
    Record {
        /// The segment with the proof.
        segment: u64,
        /// Where the proof stands.
        later: u64,
    },
    /// A valid record that doesn't continue the one before it.
    #[error("the record there doesn't follow the one before it")]
    Chain,
    /// A segment that was named has no valid first record.
    #[error("the segment has no valid first record")]
    FirstRecord,
    /// A segment of another log.
    #[error("the segment belongs to another member or incarnation than the first one")]
    Foreign,
    /// A segment is shorter or longer than it was made.
    #[error("the file has {found} bytes instead of {expected}")]
    Length {
        /// Its length.
        found: u64,
        /// What it was made with.
        expected: u64,
    },
    /// A segment that must be there isn't.
    #[error("the segment is missing")]
    Missing,
    /// A valid record that says what can't be.
    #[error("the record contradicts the log: {0}")]
    Contradiction(&'static str),
    /// A record that was valid when the log was opened isn't any more.
    #[error("the record there no longer matches its checksum")]
    Checksum,
    /// Log and store don't fit each other.
    #[error("{0}")]
    Store(&'static str),
}

impl LogError {
    /// A restart finds the same. The error says what to do instead.
    pub fn is_final(&self) -> bool {
        match self {
            Self::Corrupt { .. }
            | Self::Version { .. }
            | Self::Newer { .. }
            | Self::NewerEntry { .. }
            // Only at the start: the store needs entries that the log doesn't have.
            | Self::NotThere { .. } => true,
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
