//! Stores of backups: a directory, or a bucket of an S3-compatible service. Each cluster has a
//! folder there, with the files of its backups.

mod credentials;
mod directory;
mod s3;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;

use self::directory::DirectoryStore;
use self::s3::S3Store;
use super::chunks::ChunkSource;
use super::listing::BackupListing;
use super::name::ClusterFolder;
use super::settings::StoreSettings;

/// Maximum number of files in a cluster's folder. More files are an error, because a truncated
/// listing would be misread.
const MAX_FILES: usize = 20_000;
/// Maximum number of clusters that are listed.
const MAX_CLUSTERS: usize = 1_000;
/// Name of the file that a check writes to a store.
const PROBE: &str = "muster-probe";
/// Time limit of one small operation, such as a listing or a deletion.
const OPERATION_LIMIT: Duration = Duration::from_mins(2);
/// The longest that a store may take for one part of a large file.
const STALL_LIMIT: Duration = Duration::from_mins(5);

/// Why an operation on a store failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BackupStoreError {
    /// The settings can't be used.
    #[error("{0}")]
    Settings(String),
    /// A folder of the directory is not safe, or can't be used.
    #[error("the backup directory can't be used")]
    Folder(#[source] muster_files::Error),
    /// An operation on a file of the directory failed.
    #[error("can't {action} {}", path.display())]
    File {
        /// Attempted action as a verb: "read", "write", ….
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The S3-compatible store refused, or can't be reached.
    #[error("the store of {place} failed: {text}")]
    Remote {
        /// URL of the bucket and prefix.
        place: String,
        /// The error, without the body of the store's answer: that may repeat the request.
        text: String,
    },
    /// The file to be stored can't be read.
    #[error("the file to be stored can't be read")]
    Source(#[source] io::Error),
    /// The store has no such file.
    #[error("the store has no {0}")]
    Missing(String),
    /// A file or a list is longer than this program reads.
    #[error("{what} is longer than {limit}")]
    TooLong {
        what: String,
        /// Maximum number of bytes or entries.
        limit: u64,
    },
    /// The store took too long.
    #[error("the store did not {action} within {} s", limit.as_secs())]
    Slow {
        /// Attempted action as a verb.
        action: &'static str,
        limit: Duration,
    },
}

impl BackupStoreError {
    /// Whether the store is full.
    pub(crate) fn is_full(&self) -> bool {
        matches!(self, Self::File { source, .. } if super::spool::is_full(source))
    }
}

/// The bytes of a stored file, as they arrive.
pub(super) type StoredBytes = BoxStream<'static, Result<Bytes, BackupStoreError>>;

/// An open store of backups.
#[derive(Debug)]
pub(crate) enum BackupStore {
    /// A directory of this host.
    Directory(DirectoryStore),
    /// A bucket of an S3-compatible store.
    S3(S3Store),
}

impl BackupStore {
    /// Opens a store. Credentials and certificates are read from their files each time, so that new
    /// ones take effect. Sends no request.
    pub(crate) async fn open(settings: &StoreSettings) -> Result<Self, BackupStoreError> {
        let settings = settings.clone();
        let opened = tokio::task::spawn_blocking(move || match settings {
            StoreSettings::Directory(path) => Ok(Self::Directory(DirectoryStore::new(path))),
            StoreSettings::S3(settings) => S3Store::open(&settings).map(Self::S3),
        });
        let failed =
            |error| BackupStoreError::Settings(format!("the store can't be opened: {error}"));
        opened.await.map_err(failed)?
    }

    /// Returns the clusters that have a folder in this store.
    pub(crate) async fn clusters(&self) -> Result<Vec<ClusterFolder>, BackupStoreError> {
        let folders = within("list its clusters", OPERATION_LIMIT, async {
            match self {
                Self::Directory(directory) => directory.folders(MAX_CLUSTERS).await,
                Self::S3(s3) => s3.folders(MAX_CLUSTERS).await,
            }
        });
        let mut clusters: Vec<ClusterFolder> =
            folders.await?.iter().filter_map(|name| name.parse().ok()).collect();
        clusters.sort();
        Ok(clusters)
    }

    /// Lists a cluster's backups.
    pub(crate) async fn list(
        &self,
        cluster: &ClusterFolder,
    ) -> Result<BackupListing, BackupStoreError> {
        let files = within("list its files", OPERATION_LIMIT, async {
            match self {
                Self::Directory(directory) => directory.files(cluster, MAX_FILES).await,
                Self::S3(s3) => s3.files(cluster, MAX_FILES).await,
            }
        });
        Ok(BackupListing::of(files.await?))
    }

    /// Stores a large file. The file appears under its name only once it is whole.
    pub(super) async fn put(
        &self,
        cluster: &ClusterFolder,
        file: &str,
        source: &mut ChunkSource,
    ) -> Result<(), BackupStoreError> {
        match self {
            Self::Directory(directory) => directory.put(cluster, file, source).await,
            Self::S3(s3) => s3.put(cluster, file, source).await,
        }
    }

    /// Stores a small file. The file appears under its name only once it is whole.
    pub(super) async fn put_small(
        &self,
        cluster: &ClusterFolder,
        file: &str,
        bytes: Vec<u8>,
    ) -> Result<(), BackupStoreError> {
        within("take a small file", OPERATION_LIMIT, async {
            match self {
                Self::Directory(directory) => directory.put_small(cluster, file, bytes).await,
                Self::S3(s3) => s3.put_small(cluster, file, bytes).await,
            }
        })
        .await
    }

    /// Returns the size of a stored file in bytes.
    pub(super) async fn size(
        &self,
        cluster: &ClusterFolder,
        file: &str,
    ) -> Result<u64, BackupStoreError> {
        within("tell a file's size", OPERATION_LIMIT, async {
            match self {
                Self::Directory(directory) => directory.size(cluster, file).await,
                Self::S3(s3) => s3.size(cluster, file).await,
            }
        })
        .await
    }

    /// Begins to read a stored file.
    pub(super) async fn get(
        &self,
        cluster: &ClusterFolder,
        file: &str,
    ) -> Result<StoredBytes, BackupStoreError> {
        within("send a file", OPERATION_LIMIT, async {
            match self {
                Self::Directory(directory) => directory.get(cluster, file).await,
                Self::S3(s3) => s3.get(cluster, file).await,
            }
        })
        .await
    }

    /// Reads a small file.
    pub(super) async fn get_small(
        &self,
        cluster: &ClusterFolder,
        file: &str,
        limit: u64,
    ) -> Result<Vec<u8>, BackupStoreError> {
        within("send a small file", OPERATION_LIMIT, async {
            let mut chunks = match self {
                Self::Directory(directory) => directory.get(cluster, file).await?,
                Self::S3(s3) => s3.get(cluster, file).await?,
            };
            let mut bytes = Vec::new();
            while let Some(chunk) = chunks.next().await.transpose()? {
                bytes.extend_from_slice(&chunk);
                if bytes.len() as u64 > limit {
                    return Err(BackupStoreError::TooLong { what: file.to_owned(), limit });
                }
            }
            Ok(bytes)
        })
        .await
    }

    /// Deletes a file. A file that is gone already is no error.
    pub(super) async fn delete(
        &self,
        cluster: &ClusterFolder,
        file: &str,
    ) -> Result<(), BackupStoreError> {
        within("delete a file", OPERATION_LIMIT, async {
            match self {
                Self::Directory(directory) => directory.delete(cluster, file).await,
                Self::S3(s3) => s3.delete(cluster, file).await,
            }
        })
        .await
    }

    /// Checks that a file can be written to this store, and deletes the file. A missing directory
    /// is not made.
    pub(crate) async fn probe(&self) -> Result<(), BackupStoreError> {
        let folder = ClusterFolder::for_check();
        match self {
            Self::Directory(directory) => {
                within("take a file", OPERATION_LIMIT, directory.probe(PROBE)).await
            }
            Self::S3(_) => {
                self.put_small(&folder, PROBE, b"muster-agent run --check\n".to_vec()).await?;
                self.list(&folder).await?;
                self.delete(&folder, PROBE).await
            }
        }
    }
}

/// Returns the next chunk of a stored file.
pub(super) async fn next_chunk(
    chunks: &mut StoredBytes,
) -> Result<Option<Bytes>, BackupStoreError> {
    within("send more of a file", STALL_LIMIT, async { chunks.next().await.transpose() }).await
}

/// Fails an operation that takes longer than `limit`. `action` names it in the error.
async fn within<T>(
    action: &'static str,
    limit: Duration,
    work: impl Future<Output = Result<T, BackupStoreError>>,
) -> Result<T, BackupStoreError> {
    let slow = |_| Err(BackupStoreError::Slow { action, limit });
    tokio::time::timeout(limit, work).await.unwrap_or_else(slow)
}
