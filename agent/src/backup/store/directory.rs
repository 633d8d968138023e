//! A directory of this host, which may be a network file system.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use futures_util::StreamExt;

use super::{BackupStoreError, STALL_LIMIT, StoredBytes, within};
use crate::backup::chunks::ChunkSource;
use crate::backup::name::{BackupFile, ClusterFolder};

/// Bytes that are read at once.
const BUFFER_BYTES: usize = 256 << 10;
/// Mode of the files: a snapshot holds all data of its cluster.
const PRIVATE: u32 = 0o600;

/// A store in a directory. Files are written under another name, synced, and renamed.
#[derive(Clone, Debug)]
pub(crate) struct DirectoryStore {
    root: PathBuf,
}

impl DirectoryStore {
    pub(super) fn new(root: PathBuf) -> Self {
        Self { root }
    }

    fn folder(&self, cluster: &ClusterFolder) -> PathBuf {
        self.root.join(cluster.as_str())
    }

    /// Returns the names of all entries of the directory. Fails if there are more than `limit`.
    pub(super) async fn folders(&self, limit: usize) -> Result<Vec<String>, BackupStoreError> {
        let root = self.root.clone();
        blocking(move || names(&root, limit)).await
    }

    /// Returns the names of a cluster's files; none if the folder is missing. Fails if there are
    /// more than `limit`.
    pub(super) async fn files(
        &self,
        cluster: &ClusterFolder,
        limit: usize,
    ) -> Result<Vec<String>, BackupStoreError> {
        let folder = self.folder(cluster);
        blocking(move || names(&folder, limit)).await
    }

    /// Makes the directory and the cluster's folder in it (0700), if they are missing.
    async fn make_folder(&self, cluster: &ClusterFolder) -> Result<PathBuf, BackupStoreError> {
        let (root, folder) = (self.root.clone(), self.folder(cluster));
        blocking(move || {
            // An existing directory keeps its mode, which is its owner's decision.
            if !root.exists() {
                muster_files::open_own_folder(&root).map_err(BackupStoreError::Folder)?;
            }
            muster_files::data::make_folder(&folder).map_err(BackupStoreError::Folder)?;
            muster_files::sync(&root).map_err(BackupStoreError::Folder)?;
            Ok(folder)
        })
        .await
    }

    pub(super) async fn put(
        &self,
        cluster: &ClusterFolder,
        file: &str,
        source: &mut ChunkSource,
    ) -> Result<(), BackupStoreError> {
        let folder = self.make_folder(cluster).await?;
        let part = folder.join(BackupFile::unfinished(file));
        let written = self.write(&part, &folder.join(file), source).await;
        if written.is_err() {
            // If this removal fails, the agent removes the file after a later backup.
            let _ = tokio::fs::remove_file(&part).await;
        }
        written
    }

    async fn write(
        &self,
        part: &Path,
        to: &Path,
        source: &mut ChunkSource,
    ) -> Result<(), BackupStoreError> {
        let (at, to) = (part.to_owned(), to.to_owned());
        let mut open = within("make a file", STALL_LIMIT, blocking(move || create(&at))).await?;
        while let Some(chunk) = source.next().await.map_err(BackupStoreError::Source)? {
            let at = part.to_owned();
            let work = blocking(move || {
                open.write_all(&chunk).map_err(failed("write", &at))?;
                Ok(open)
            });
            open = within("write a file", STALL_LIMIT, work).await?;
        }
        let at = part.to_owned();
        let work = blocking(move || {
            open.sync_all().map_err(failed("write", &at))?;
            muster_files::rename(&at, &to).map_err(BackupStoreError::Folder)
        });
        within("sync a file", STALL_LIMIT, work).await
    }

    pub(super) async fn put_small(
        &self,
        cluster: &ClusterFolder,
        file: &str,
        bytes: Vec<u8>,
    ) -> Result<(), BackupStoreError> {
        let folder = self.make_folder(cluster).await?;
        let (part, to) = (folder.join(BackupFile::unfinished(file)), folder.join(file));
        blocking(move || {
            let mut open = create(&part)?;
            open.write_all(&bytes).map_err(failed("write", &part))?;
            open.sync_all().map_err(failed("write", &part))?;
            muster_files::rename(&part, &to).map_err(BackupStoreError::Folder)
        })
        .await
    }

    /// Writes a file into the directory, and deletes it. If the directory is missing, checks only
    /// that it could be made.
    pub(super) async fn probe(&self, file: &str) -> Result<(), BackupStoreError> {
        let (root, path) = (self.root.clone(), self.root.join(file));
        blocking(move || {
            if !root.exists() {
                let found = muster_files::inspect_own_folder(&root);
                return found.map(drop).map_err(BackupStoreError::Folder);
            }
            let mut open = create(&path)?;
            open.write_all(b"muster-agent run --check\n").map_err(failed("write", &path))?;
            open.sync_all().map_err(failed("write", &path))?;
            std::fs::remove_file(&path).map_err(failed("remove", &path))
        })
        .await
    }

    pub(super) async fn size(
        &self,
        cluster: &ClusterFolder,
        file: &str,
    ) -> Result<u64, BackupStoreError> {
        let path = self.folder(cluster).join(file);
        blocking(move || Ok(path.metadata().map_err(failed("read", &path))?.len())).await
    }

    pub(super) async fn get(
        &self,
        cluster: &ClusterFolder,
        file: &str,
    ) -> Result<StoredBytes, BackupStoreError> {
        let path = self.folder(cluster).join(file);
        let at = path.clone();
        let open = blocking(move || {
            muster_files::open_named(&at).map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => BackupStoreError::Missing(at.display().to_string()),
                _ => failed("read", &at)(error),
            })
        });
        let chunks = futures_util::stream::try_unfold(open.await?, move |mut open| {
            let path = path.clone();
            blocking(move || {
                let mut chunk = vec![0; BUFFER_BYTES];
                let read = open.read(&mut chunk).map_err(failed("read", &path))?;
                chunk.truncate(read);
                Ok((read > 0).then(|| (Bytes::from(chunk), open)))
            })
        });
        Ok(chunks.boxed())
    }

    pub(super) async fn delete(
        &self,
        cluster: &ClusterFolder,
        file: &str,
    ) -> Result<(), BackupStoreError> {
        let path = self.folder(cluster).join(file);
        blocking(move || match std::fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(failed("remove", &path)),
        })
        .await
    }
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> BackupStoreError + use<> {
    let path = path.to_owned();
    move |source| BackupStoreError::File { action, path, source }
}

fn create(path: &Path) -> Result<File, BackupStoreError> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(PRIVATE);
    muster_files::open(path, &mut options).map_err(BackupStoreError::Folder)
}

/// Returns the names in a folder; none if the folder is missing.
fn names(folder: &Path, limit: usize) -> Result<Vec<String>, BackupStoreError> {
    let mut names = Vec::new();
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(names),
        entries => entries.map_err(failed("read", folder))?,
    };
    for entry in entries {
        let entry = entry.map_err(failed("read", folder))?;
        if names.len() == limit {
            let what = folder.display().to_string();
            return Err(BackupStoreError::TooLong { what, limit: limit as u64 });
        }
        names.extend(entry.file_name().into_string());
    }
    Ok(names)
}

/// Runs work on a thread for blocking work: files of a network file system may block for long.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, BackupStoreError> + Send + 'static,
) -> Result<T, BackupStoreError> {
    let panicked =
        |error: tokio::task::JoinError| BackupStoreError::Source(io::Error::other(error));
    tokio::task::spawn_blocking(work).await.map_err(panicked)?
}
