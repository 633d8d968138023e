//! Why the log can't go on.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::Identity;

/// Fatal to the process, all of them.
#[derive(Debug, Error)]
pub enum LogError {
    /// The disk refused. Never to be tried again by this process.
    #[error("can't {action} {} at byte {offset}", file.display())]
    Io {
        /// What was attempted.
        action: &'static str,
        /// On which file or directory.
        file: PathBuf,
        /// Where in it.
        offset: u64,
        /// What the system said.
        source: io::Error,
    },
    /// An earlier call failed; this one did nothing.
    #[error("the log failed before and takes nothing any more")]
    Poisoned,
    /// What was once durable isn't what it was.
    #[error("{} is damaged at byte {offset}: {damage}", file.display())]
    Damaged {
        /// In which file.
        file: PathBuf,
        /// Where.
        offset: u64,
        /// What is wrong.
        damage: Damage,
    },
    /// It is somebody else's.
    #[error("{} belongs to {found}, not to {expected}", file.display())]
    Identity {
        /// The segment that says so.
        file: PathBuf,
        /// Who opens it.
        expected: Identity,
        /// Whose it is.
        found: Identity,
    },
    /// Another process holds it.
    #[error("{} is in use by another process", directory.display())]
    InUse {
        /// The log's directory.
        directory: PathBuf,
    },
    /// There is none to open.
    #[error("there is no log in {}", directory.display())]
    NotFound {
        /// The log's directory.
        directory: PathBuf,
    },
    /// There is one already.
    #[error("there is a log in {} already", directory.display())]
    Exists {
        /// The log's directory.
        directory: PathBuf,
    },
    /// Too large for a segment.
    #[error("entry {index} of {bytes} bytes doesn't fit a segment")]
    EntryTooLarge {
        /// Its index.
        index: u64,
        /// Its size.
        bytes: usize,
    },
}

/// What is wrong with a file.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum Damage {
    /// A record doesn't match its checksum, or isn't one, and a later one proves that it was whole.
    #[error(
        "the record there is broken, and a later one at byte {later} of segment {segment} proves that it was whole"
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
    /// A segment is shorter or longer than it was made.
    #[error("the file has {found} bytes instead of {expected}")]
    Length {
        /// Its length.
        found: u64,
        /// What it was made with.
        expected: u64,
    },
    /// A segment that must be there isn't.
    #[error("segment {segment} is missing")]
    Missing {
        /// Its number.
        segment: u64,
    },
    /// A valid record that says what can't be.
    #[error("a record contradicts the log: {0}")]
    Contradiction(&'static str),
    /// A valid record of a format or kind that this build doesn't know.
    #[error("a newer version wrote this (kind {kind})")]
    Unknown {
        /// The kind or version.
        kind: u8,
    },
    /// A record that was valid when the log was opened isn't any more.
    #[error("the record there no longer matches its checksum")]
    Checksum,
}

impl LogError {
    /// A restart finds the same: quarantine the directory and replace the member.
    pub fn is_damage(&self) -> bool {
        match self {
            Self::Damaged { .. } | Self::Identity { .. } => true,
            Self::Io { .. }
            | Self::Poisoned
            | Self::InUse { .. }
            | Self::NotFound { .. }
            | Self::Exists { .. }
            | Self::EntryTooLarge { .. } => false,
        }
    }

    pub(super) fn io(action: &'static str, file: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        Self::io_at(action, file, 0)
    }

    pub(super) fn io_at(
        action: &'static str,
        file: &Path,
        offset: u64,
    ) -> impl FnOnce(io::Error) -> Self + use<> {
        let file = file.to_path_buf();
        move |source| Self::Io { action, file, offset, source }
    }

    pub(super) fn damaged(file: &Path, offset: u64, damage: Damage) -> Self {
        Self::Damaged { file: file.to_path_buf(), offset, damage }
    }
}

/// Why entries can't be read.
#[derive(Debug, Error)]
pub enum ReadError {
    /// They are gone: send a snapshot.
    #[error("the log begins after entry {base}")]
    Compacted {
        /// The index before the first entry.
        base: u64,
    },
    /// They aren't there, or not durable yet.
    #[error("the log ends with entry {last}")]
    Unavailable {
        /// The last durable index.
        last: u64,
    },
    /// Fatal to the process.
    #[error("old entries can't be read")]
    Log(#[from] LogError),
}

impl std::fmt::Display for Identity {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            out,
            "member {:016x} of cluster {:016x}, incarnation {:032x}",
            self.member,
            self.cluster,
            u128::from_be_bytes(self.incarnation)
        )
    }
}
