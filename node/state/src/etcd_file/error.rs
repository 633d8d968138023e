//! Errors of reading and writing snapshot files, grouped by what an operator can do about them.

use crate::mvcc::StoreError;

/// Why a file can't be imported.
#[derive(Debug, thiserror::Error)]
pub enum EtcdFileError {
    /// The file can't be read.
    #[error("the snapshot file could not be read")]
    Io(#[source] std::io::Error),
    /// No hash follows the database in the file.
    #[error(
        "snapshot missing hash but --skip-hash-check=false: a file that `snapshot save` wrote ends in its SHA-256, unless it was cut short; a member's own member/snap/db does not, and needs --skip-hash-check"
    )]
    NoHash,
    /// The hash in the file does not match its contents; the text is etcd's.
    #[error(
        "expected sha256 {expected:?}, got {got:?}: the file was cut off or changed; save a new snapshot"
    )]
    WrongHash {
        /// Hash that is stored at the end of the file.
        expected: [u8; 32],
        /// Hash of the file's contents.
        got: [u8; 32],
    },
    /// The file is not a bbolt file, or is damaged.
    #[error("the snapshot file is damaged or not one")]
    Bbolt(#[source] node_bbolt::BboltReadError),
    /// The file is a bbolt file that etcd did not make.
    #[error("the snapshot file is not etcd's: it has no bucket {0:?}")]
    MissingBucket(&'static str),
    /// A row has contents that etcd never writes.
    #[error("the snapshot file is damaged: in bucket {bucket:?}, {what}")]
    DamagedRow {
        /// Bucket that contains the row.
        bucket: &'static str,
        /// Description of the problem.
        what: String,
    },
    /// The new store failed during the import.
    #[error("the new store failed")]
    Store(#[from] StoreError),
}

impl From<node_bbolt::BboltReadError> for EtcdFileError {
    fn from(error: node_bbolt::BboltReadError) -> Self {
        match error {
            node_bbolt::BboltReadError::Io(error) => Self::Io(error),
            error => Self::Bbolt(error),
        }
    }
}

/// Why a store can't be exported.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The store can't be read.
    #[error("the store could not be read")]
    Store(#[from] StoreError),
    /// The file can't be written, or it can't represent the contents of the store.
    #[error("the snapshot could not be written")]
    Write(#[from] node_bbolt::BboltWriteError),
    /// The client no longer needs the file.
    #[error("the snapshot is not wanted any more")]
    Cancelled,
}
