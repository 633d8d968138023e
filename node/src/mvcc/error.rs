//! What can go wrong, by what the caller does about it.

use std::io::ErrorKind::{InvalidData, UnexpectedEof};

use node_proto::command::DecodeError;

use crate::machine::EntryKind;

/// A read that can't be answered.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The revision lies before the last compaction: ask for a newer one.
    #[error("revision has been compacted")]
    Compacted,
    /// The revision has not been reached.
    #[error("revision has not been reached")]
    Future,
    /// The view fell behind a compaction while it was read: take the newest view and read again.
    #[error("view is older than the last compaction")]
    Superseded,
    /// The store failed.
    #[error("store failed")]
    Store(#[from] StoreError),
}

/// The store can't go on. The process stops; a restart recovers from log and checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The disk under the file said no. Never to be tried again by this process.
    #[error("the store's disk failed")]
    Disk(#[source] std::io::Error),
    /// The file failed.
    #[error("store file failed")]
    Storage(#[source] Box<redb::Error>),
    /// The file says something that this code never writes.
    #[error("store file is corrupt: {0}; replace this member from its peers")]
    Corrupt(String),
    /// The file was written by a build whose format this one does not know.
    #[error(
        "store file has format {found}, this build knows {known}: start this member with the muster-node that wrote it, or a later one"
    )]
    Format {
        /// In the file.
        found: u32,
        /// In this build.
        known: u32,
    },
    /// A log entry that this build can't apply; to skip it would be to differ from the others.
    #[error(
        "log entry {index} can't be applied: start this member with the muster-node of the members that could, or replace it"
    )]
    Command {
        /// Raft index of the entry.
        index: u64,
        /// What is wrong with it.
        #[source]
        source: DecodeError,
    },
    /// A log entry whose kind is not that of what it carries.
    #[error(
        "log entry {index} is of kind {kind:?}, and carries what another kind does: start this member with the muster-node of the members that could apply it, or replace it"
    )]
    Kind {
        /// Raft index of the entry.
        index: u64,
        /// Its kind.
        kind: EntryKind,
    },
    /// A snapshot stream could not be read or written.
    #[error("snapshot stream failed")]
    Stream(#[source] std::io::Error),
    /// A snapshot stream is damaged or not one.
    #[error("snapshot is corrupt: {0}")]
    Snapshot(String),
}

fn storage(error: redb::Error) -> StoreError {
    match error {
        // The header is not one, or the file ends too early: no disk says that of itself.
        redb::Error::Io(source) if matches!(source.kind(), InvalidData | UnexpectedEof) => {
            StoreError::Corrupt(source.to_string())
        }
        redb::Error::Io(source) => StoreError::Disk(source),
        redb::Error::Corrupted(what) => StoreError::Corrupt(what),
        other => StoreError::Storage(Box::new(other)),
    }
}

impl StoreError {
    /// A restart finds the same. The error says what to do instead.
    #[must_use]
    pub fn is_final(&self) -> bool {
        match self {
            Self::Corrupt(_) | Self::Format { .. } | Self::Command { .. } | Self::Kind { .. } => {
                true
            }
            Self::Storage(error) => matches!(
                **error,
                redb::Error::UpgradeRequired(_)
                    | redb::Error::RepairAborted
                    | redb::Error::TableTypeMismatch { .. }
                    | redb::Error::TableIsMultimap(_)
                    | redb::Error::TableDoesNotExist(_)
                    | redb::Error::TypeDefinitionChanged { .. }
            ),
            // A damaged snapshot was refused whole, and the leader sends another one.
            Self::Disk(_) | Self::Stream(_) | Self::Snapshot(_) => false,
        }
    }
}

macro_rules! from_redb {
    ($($error:ty),*) => {$(
        impl From<$error> for StoreError {
            fn from(error: $error) -> Self {
                storage(error.into())
            }
        }
        impl From<$error> for ReadError {
            fn from(error: $error) -> Self {
                Self::Store(error.into())
            }
        }
    )*};
}

from_redb!(
    redb::StorageError,
    redb::TransactionError,
    redb::TableError,
    redb::CommitError,
    redb::DatabaseError,
    redb::SetDurabilityError
);
