//! Errors of the store, divided by the caller's reaction to them.

use std::io::ErrorKind::{InvalidData, UnexpectedEof};

use node_proto::command::CommandDecodeError;

use crate::state_machine::EntryKind;

/// Error of a read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The revision is below the last compaction. The client should ask for a newer one.
    #[error("revision has been compacted")]
    Compacted,
    /// The revision is higher than the newest one.
    #[error("revision has not been reached")]
    Future,
    /// The view became older than a compaction during the read. The caller reads again with the
    /// newest view.
    #[error("view is older than the last compaction")]
    Superseded,
    /// The store itself failed.
    #[error("store failed")]
    Store(#[from] StoreError),
}

/// Fatal error of the store. The process stops, and a restart recovers from the log and the
/// checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// An I/O error of the disk. This process must never retry the operation.
    #[error("the store's disk failed")]
    Disk(#[source] std::io::Error),
    /// An error of redb other than an I/O error or damage.
    #[error("store file failed")]
    Storage(#[source] Box<redb::Error>),
    /// The file contains something that this program never writes.
    #[error("store file is corrupt: {0}; replace this member from its peers")]
    Corrupt(String),
    /// The file was written by a build whose format this build does not know.
    #[error(
        "store file has format {found}, this build knows {known}: start this member with the muster-node that wrote it, or a later one"
    )]
    Format {
        /// Format number found in the file.
        found: u32,
        /// Format that this build writes.
        known: u32,
    },
    /// The entry's command can't be decoded by this build. Skipping it would make this member's
    /// data differ from the others'.
    #[error(
        "log entry {index} can't be applied: start this member with the muster-node of the members that could, or replace it"
    )]
    UndecodableCommand {
        /// Raft index of the entry.
        index: u64,
        /// Reason why decoding failed.
        #[source]
        source: CommandDecodeError,
    },
    /// The entry's header states another kind than its payload has.
    #[error(
        "log entry {index} is of kind {kind:?}, and carries what another kind does: start this member with the muster-node of the members that could apply it, or replace it"
    )]
    EntryKindMismatch {
        /// Raft index of the entry.
        index: u64,
        /// Kind in the entry's header.
        kind: EntryKind,
    },
    /// Reading or writing a snapshot stream failed.
    #[error("snapshot stream failed")]
    Stream(#[source] std::io::Error),
    /// The snapshot stream is damaged, or is no snapshot.
    #[error("snapshot is corrupt: {0}")]
    Snapshot(String),
}

fn storage(error: redb::Error) -> StoreError {
    match error {
        // For a bad header, and for a file that ends too early, redb reports these two kinds of I/O
        // error. Both mean damage, and no disk error has these kinds.
        redb::Error::Io(source) if matches!(source.kind(), InvalidData | UnexpectedEof) => {
            StoreError::Corrupt(source.to_string())
        }
        redb::Error::Io(source) => StoreError::Disk(source),
        redb::Error::Corrupted(what) => StoreError::Corrupt(what),
        other => StoreError::Storage(Box::new(other)),
    }
}

impl StoreError {
    /// Whether a restart would fail in the same way. The error's text says what to do instead.
    #[must_use]
    pub fn is_final(&self) -> bool {
        match self {
            Self::Corrupt(_)
            | Self::Format { .. }
            | Self::UndecodableCommand { .. }
            | Self::EntryKindMismatch { .. } => true,
            Self::Storage(error) => matches!(
                **error,
                redb::Error::UpgradeRequired(_)
                    | redb::Error::RepairAborted
                    | redb::Error::TableTypeMismatch { .. }
                    | redb::Error::TableIsMultimap(_)
                    | redb::Error::TableDoesNotExist(_)
                    | redb::Error::TypeDefinitionChanged { .. }
            ),
            // A damaged snapshot is refused as a whole, and the leader sends another one.
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
