//! What stands in the way of a file, by what the operator does about it.

use crate::mvcc::StoreError;

/// A file that can't be imported.
#[derive(Debug, thiserror::Error)]
pub enum EtcdFileError {
    /// The file itself failed.
    #[error("the snapshot file could not be read")]
    Io(#[source] std::io::Error),
    /// It has no hash.
    #[error(
        "snapshot missing hash but --skip-hash-check=false: a file that `snapshot save` wrote ends in its SHA-256, unless it was cut short; a member's own member/snap/db does not, and needs --skip-hash-check"
    )]
    NoHash,
    /// It has another hash; in etcd's words.
    #[error(
        "expected sha256 {expected:?}, got {got:?}: the file was cut off or changed; save a new snapshot"
    )]
    WrongHash {
        /// Behind the file.
        expected: [u8; 32],
        /// Of the file.
        got: [u8; 32],
    },
    /// It is no bbolt file, or a damaged one.
    #[error("the snapshot file is damaged or not one")]
    Bbolt(#[source] node_bbolt::ReadError),
    /// It is a bbolt file, and not etcd's.
    #[error("the snapshot file is not etcd's: it has no bucket {0:?}")]
    NotEtcds(&'static str),
    /// A row that etcd would not write.
    #[error("the snapshot file is damaged: in bucket {bucket:?}, {what}")]
    Row {
        /// Where it stands.
        bucket: &'static str,
        /// What is wrong with it.
        what: String,
    },
    /// The new store failed.
    #[error("the new store failed")]
    Store(#[from] StoreError),
}

impl From<node_bbolt::ReadError> for EtcdFileError {
    fn from(error: node_bbolt::ReadError) -> Self {
        match error {
            node_bbolt::ReadError::Io(error) => Self::Io(error),
            error => Self::Bbolt(error),
        }
    }
}

/// A store that can't be exported.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The store failed.
    #[error("the store could not be read")]
    Store(#[from] StoreError),
    /// The file could not be written, or can't be one.
    #[error("the snapshot could not be written")]
    Write(#[from] node_bbolt::WriteError),
    /// Nobody wants the file any more.
    #[error("the snapshot is not wanted any more")]
    Unwanted,
}
