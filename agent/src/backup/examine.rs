//! Proves a stored backup: fetches it, compares it with its manifest, decrypts it, and reads every
//! row.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::sync::Arc;

use serde::Serialize;
use tokio::io::AsyncWriteExt;

use super::chunks::Digester;
use super::encryption::{BackupIdentities, DecryptionError, decrypt};
use super::inspect::{InspectError, inspect};
use super::manifest::{MAX_MANIFEST_BYTES, Manifest, ManifestError, SnapshotFacts};
use super::name::{BackupName, ClusterFolder};
use super::progress::{BackupProgress, BackupStep};
use super::signature::{SignatureError, SignatureFinding, SignaturePolicy};
use super::spool::{NoSpaceError, Spool};
use super::store::{BackupStore, BackupStoreError, next_chunk};

/// Reason why a backup was not proved: either the backup is faulty, or it could not be examined.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExamineError {
    /// The store failed, which says nothing about the backup.
    #[error("the backup can't be fetched")]
    Store(#[source] BackupStoreError),
    /// A file of the backup is missing.
    #[error("the store has no {0}")]
    Missing(String),
    /// The manifest can't be used.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// The manifest isn't signed, or no member of the cluster made its signature.
    #[error(transparent)]
    Signature(#[from] SignatureError),
    /// The stored file has another length or hash than its manifest says.
    #[error("the stored file is damaged: its {what} is {found}, and the manifest says {expected}")]
    Stored {
        /// Name of the property that differs.
        what: &'static str,
        found: String,
        expected: String,
    },
    /// The file can't be decrypted.
    #[error(transparent)]
    Decryption(#[from] DecryptionError),
    /// The snapshot can't be opened.
    #[error(transparent)]
    Snapshot(#[from] InspectError),
    /// The snapshot is not the one that the manifest describes.
    #[error(
        "the snapshot is not the one that its manifest describes: {found:?} in place of {expected:?}"
    )]
    Facts {
        /// Facts counted in the snapshot that was fetched.
        found: Box<SnapshotFacts>,
        /// Facts of the manifest.
        expected: Box<SnapshotFacts>,
    },
    /// The folder for temporary files is too full.
    #[error(transparent)]
    Space(#[from] NoSpaceError),
    /// A temporary file can't be made.
    #[error("no temporary file can be made")]
    SpoolFile(#[source] muster_files::Error),
    /// A temporary file can't be written.
    #[error("the temporary file can't be written")]
    Spool(#[source] io::Error),
}

impl ExamineError {
    /// Whether the backup itself is damaged. Otherwise another try, another key or more space may
    /// help.
    pub(crate) fn is_damage(&self) -> bool {
        match self {
            Self::Missing(_) | Self::Stored { .. } | Self::Facts { .. } => true,
            // A missing signature is no damage: agents of older versions don't sign.
            Self::Signature(error) => !matches!(error, SignatureError::Unsigned),
            Self::Manifest(error) => !matches!(error, ManifestError::Newer(_)),
            Self::Decryption(error) => matches!(error, DecryptionError::Damaged(_)),
            Self::Snapshot(error) => !matches!(error, InspectError::Io(_)),
            Self::Store(_) | Self::Space(_) | Self::SpoolFile(_) | Self::Spool(_) => false,
        }
    }
}

impl From<BackupStoreError> for ExamineError {
    fn from(error: BackupStoreError) -> Self {
        match error {
            BackupStoreError::Missing(file) => Self::Missing(file),
            error => Self::Store(error),
        }
    }
}

/// How far a backup was examined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Proof {
    /// The snapshot was opened, and every row was read.
    Opened,
    /// The stored file is whole. It is encrypted, and no private key was given.
    Whole,
}

/// A backup that was fetched and found to be whole.
pub(crate) struct ExaminedBackup {
    pub manifest: Manifest,
    /// The decrypted snapshot; `None` without a private key.
    pub snapshot: Option<File>,
    /// Result of the verification of the manifest's signature.
    pub signature: SignatureFinding,
}

impl ExaminedBackup {
    pub(crate) fn proof(&self) -> Proof {
        if self.snapshot.is_some() { Proof::Opened } else { Proof::Whole }
    }
}

/// Reads a backup's manifest.
pub(crate) async fn read_manifest(
    store: &BackupStore,
    cluster: &ClusterFolder,
    name: &BackupName,
) -> Result<Manifest, ExamineError> {
    let bytes = store.get_small(cluster, &name.manifest_file(), MAX_MANIFEST_BYTES).await?;
    Ok(Manifest::parse(&bytes, cluster, name)?)
}

/// Store, private keys and temporary folder for examining the backups of one cluster.
pub(crate) struct Examiner {
    pub store: BackupStore,
    pub cluster: ClusterFolder,
    /// Private keys for encrypted backups.
    pub identities: Option<Arc<BackupIdentities>>,
    /// How the signatures of manifests are verified.
    pub signatures: SignaturePolicy,
    pub spool: Spool,
    pub progress: BackupProgress,
}

impl Examiner {
    /// Fetches a backup and proves it, as far as the private keys allow.
    pub(crate) async fn examine(&self, name: &BackupName) -> Result<ExaminedBackup, ExamineError> {
        let manifest = read_manifest(&self.store, &self.cluster, name).await?;
        let signature = self.signatures.check(&manifest)?;
        let mut stored = self.fetch(&manifest).await?;
        let is_encrypted = manifest.stored.encryption.is_some();
        let snapshot = match (is_encrypted, &self.identities) {
            (true, None) => return Ok(ExaminedBackup { manifest, snapshot: None, signature }),
            (true, Some(identities)) => {
                self.spool.ensure_space(manifest.snapshot.bytes)?;
                let mut plain = self.spool.file().map_err(ExamineError::SpoolFile)?;
                self.progress.begin(BackupStep::Decrypting);
                let (identities, progress) = (Arc::clone(identities), self.progress.clone());
                let work = tokio::task::spawn_blocking(move || {
                    decrypt(&mut stored, &mut plain, &identities, &progress).map(|()| plain)
                });
                work.await.map_err(|error| ExamineError::Spool(io::Error::other(error)))??
            }
            (false, _) => stored,
        };
        let progress = self.progress.clone();
        progress.begin(BackupStep::Reading);
        let read = tokio::task::spawn_blocking(move || {
            let mut snapshot = snapshot;
            let facts = inspect(&mut snapshot, &progress)?;
            snapshot.seek(SeekFrom::Start(0)).map_err(InspectError::Io)?;
            Ok::<_, InspectError>((snapshot, facts))
        });
        let read = read.await.map_err(|error| ExamineError::Spool(io::Error::other(error)))?;
        let (snapshot, found) = read?;
        if found != manifest.snapshot {
            let (found, expected) = (Box::new(found), Box::new(manifest.snapshot));
            return Err(ExamineError::Facts { found, expected });
        }
        Ok(ExaminedBackup { manifest, snapshot: Some(snapshot), signature })
    }

    /// Copies the stored file into a temporary one, and compares it with the manifest.
    async fn fetch(&self, manifest: &Manifest) -> Result<File, ExamineError> {
        self.progress.begin(BackupStep::Fetching);
        let expected = &manifest.stored;
        self.spool.ensure_space(expected.bytes)?;
        let mut chunks = self.store.get(&self.cluster, &expected.file).await?;
        let file = self.spool.file().map_err(ExamineError::SpoolFile)?;
        let mut file = tokio::fs::File::from_std(file);
        let mut digester = Digester::default();
        let mut bytes = 0;
        while let Some(chunk) = next_chunk(&mut chunks).await? {
            bytes += chunk.len() as u64;
            if bytes > expected.bytes {
                break;
            }
            file.write_all(&chunk).await.map_err(ExamineError::Spool)?;
            digester.update(&chunk);
            self.progress.add(chunk.len());
        }
        let differs = |what, found: String, expected: String| {
            Err(ExamineError::Stored { what, found, expected })
        };
        if bytes != expected.bytes {
            let more = if bytes > expected.bytes { "more".to_owned() } else { bytes.to_string() };
            return differs("size", more, expected.bytes.to_string());
        }
        let found = digester.finish().sha256;
        if found != expected.sha256 {
            return differs("SHA-256", found, expected.sha256.clone());
        }
        file.flush().await.map_err(ExamineError::Spool)?;
        Ok(file.into_std().await)
    }
}
