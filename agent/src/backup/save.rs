//! One round: a snapshot of the node becomes a backup in the store.

use std::fs::File;
use std::io;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt;

use super::chunks::ChunkSource;
use super::encryption::BackupRecipient;
use super::inspect::{InspectError, inspect};
use super::listing::BackupListing;
use super::manifest::{
    BackupMember, Encryption, MAX_MANIFEST_BYTES, Manifest, SnapshotFacts, StoredFile,
};
use super::name::{BackupName, ClusterFolder};
use super::progress::{BackupProgress, BackupStep};
use super::retention::{self, RetentionPolicy};
use super::signature::BackupSigner;
use super::spool::{NoSpaceError, Spool, is_full};
use super::store::{BackupStore, BackupStoreError};
use crate::cluster::{ClusterApiClient, ClusterError, NodeStatus};
use crate::crash::{self, Failpoint};
use crate::exit::error_chain;

/// Time limit for saving one backup. It is shorter than the age at which the files of interrupted
/// attempts are removed.
const ROUND_LIMIT: Duration = Duration::from_hours(12);
/// The longest that a node may take for the next bytes of a snapshot. The node reads a large store
/// before it sends the first byte.
const NODE_STALL_LIMIT: Duration = Duration::from_mins(5);
/// Number of received bytes after which the free space is looked at again.
const SPACE_CHECK_BYTES: u64 = 64 << 20;

/// Reason of a failure, as a label of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FailureReason {
    /// The node refuses, has no quorum, or can't be reached.
    Node,
    /// A disk or the store is full.
    Space,
    /// The snapshot can't be opened, or is older than the node reported.
    Unreadable,
    /// The store refuses, or can't be reached.
    Store,
    /// The agent's own files can't be used.
    Files,
    /// Saving the backup took too long.
    Time,
}

impl FailureReason {
    /// All reasons, for metrics.
    pub(crate) const ALL: [Self; 6] =
        [Self::Node, Self::Space, Self::Unreadable, Self::Store, Self::Files, Self::Time];

    /// Returns the name of the reason in JSON and metrics.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Space => "space",
            Self::Unreadable => "unreadable",
            Self::Store => "store",
            Self::Files => "files",
            Self::Time => "time",
        }
    }
}

/// Why no backup was saved.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SaveError {
    /// The node can't be asked, or refuses.
    #[error("the node gives no snapshot")]
    Node(#[from] ClusterError),
    /// The node went silent.
    #[error("the node sent no more of the snapshot within {} s", NODE_STALL_LIMIT.as_secs())]
    Stall,
    /// The folder for temporary files is too full.
    #[error(transparent)]
    Space(#[from] NoSpaceError),
    /// A temporary file can't be made.
    #[error("no temporary file can be made")]
    SpoolFile(#[source] muster_files::Error),
    /// A temporary file can't be written.
    #[error("the temporary file can't be written")]
    Spool(#[source] io::Error),
    /// The snapshot can't be opened: the node's database may be damaged.
    #[error(
        "the snapshot of this node can't be read, so it is not stored: docs/cluster-backups.md"
    )]
    Unreadable(#[from] InspectError),
    /// The snapshot ends at an older revision than the node reported before.
    #[error(
        "the snapshot ends at revision {found}, and the node had {expected} before: it is not stored"
    )]
    Outdated {
        /// Newest revision in the snapshot.
        found: u64,
        /// Revision that the node had before the snapshot began.
        expected: u64,
    },
    /// The store failed, or refused.
    #[error("the store of backups can't be used")]
    Store(#[from] BackupStoreError),
    /// The store has another number of bytes than were sent.
    #[error("the store has {found} bytes of {expected} that were sent: the backup does not count")]
    StoredSize {
        /// Size in the store.
        found: u64,
        /// Number of bytes that were sent.
        expected: u64,
    },
    /// Saving the backup took too long.
    #[error("the backup was not done within {} s", ROUND_LIMIT.as_secs())]
    Slow,
}

impl SaveError {
    /// Returns the reason for the metric.
    pub(crate) fn reason(&self) -> FailureReason {
        match self {
            Self::Node(_) | Self::Stall => FailureReason::Node,
            Self::Space(_) => FailureReason::Space,
            Self::Spool(error) if is_full(error) => FailureReason::Space,
            Self::Unreadable(InspectError::Io(_)) | Self::Spool(_) | Self::SpoolFile(_) => {
                FailureReason::Files
            }
            Self::Unreadable(_) | Self::Outdated { .. } => FailureReason::Unreadable,
            Self::Store(error) if error.is_full() => FailureReason::Space,
            Self::Store(_) | Self::StoredSize { .. } => FailureReason::Store,
            Self::Slow => FailureReason::Time,
        }
    }
}

/// Settings for saving the backups of one cluster.
#[derive(Clone)]
pub(crate) struct BackupRound {
    pub cluster: ClusterFolder,
    /// The cluster's name at discovery, if it is known there.
    pub cluster_name: Option<String>,
    pub recipients: Vec<BackupRecipient>,
    /// Signs the manifest. `None` on a host without an agent.
    pub signer: Option<BackupSigner>,
    pub spool: Spool,
    pub progress: BackupProgress,
}

impl BackupRound {
    /// Saves a backup, and returns its manifest. Calls `is_wanted` once the snapshot was received,
    /// and returns `None` if the result is false. Another member's agent may have published a
    /// backup meanwhile.
    pub(crate) async fn save(
        &self,
        node: &ClusterApiClient,
        store: &BackupStore,
        is_wanted: impl Fn(&BackupListing) -> bool,
    ) -> Result<Option<Manifest>, SaveError> {
        let work = self.save_within_limit(node, store, is_wanted);
        tokio::time::timeout(ROUND_LIMIT, work).await.unwrap_or(Err(SaveError::Slow))
    }

    async fn save_within_limit(
        &self,
        node: &ClusterApiClient,
        store: &BackupStore,
        is_wanted: impl Fn(&BackupListing) -> bool,
    ) -> Result<Option<Manifest>, SaveError> {
        self.progress.begin(BackupStep::Preparing);
        let begun_at = Timestamp::now();
        // Read linearizably, because a node without a quorum may hold old data.
        let members = node.list_members().await?;
        let status = node.status().await?;
        let (file, facts) = self.receive_and_inspect(node, &status).await?;
        if !is_wanted(&store.list(&self.cluster).await?) {
            return Ok(None);
        }
        let name = BackupName::new(begun_at, facts.revision);
        let stored = self.store_snapshot(store, file, &name).await?;
        crash::at(Failpoint::BackupStored);
        let member = members.of_id(status.member_id);
        let manifest = Manifest {
            version: Manifest::VERSION,
            name: name.to_string(),
            cluster: self.cluster.to_string(),
            cluster_name: self.cluster_name.clone(),
            raft_cluster_id: format!("{:016x}", status.cluster_id),
            member: BackupMember {
                id: status.member_id.to_string(),
                name: member.map(|member| member.name.clone()).unwrap_or_default(),
            },
            node_version: status.version,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            begun_at: name.begun_at(),
            stored_at: Timestamp::now(),
            snapshot: facts,
            stored,
            signature: None,
        };
        let manifest = match &self.signer {
            Some(signer) => signer.sign(manifest),
            None => manifest,
        };
        store.put_small(&self.cluster, &name.manifest_file(), manifest.to_bytes()).await?;
        Ok(Some(manifest))
    }

    /// Streams the node's snapshot into a temporary file, and reads all of it.
    async fn receive_and_inspect(
        &self,
        node: &ClusterApiClient,
        status: &NodeStatus,
    ) -> Result<(File, SnapshotFacts), SaveError> {
        self.spool.ensure_space(status.database_bytes)?;
        let file = self.receive(node).await?;
        self.progress.begin(BackupStep::Reading);
        let progress = self.progress.clone();
        let read = tokio::task::spawn_blocking(move || {
            let mut file = file;
            inspect(&mut file, &progress).map(|facts| (file, facts))
        });
        let (file, facts) =
            read.await.map_err(|error| SaveError::Spool(io::Error::other(error)))??;
        if facts.revision < status.revision {
            return Err(SaveError::Outdated { found: facts.revision, expected: status.revision });
        }
        Ok((file, facts))
    }

    async fn receive(&self, node: &ClusterApiClient) -> Result<File, SaveError> {
        let file = self.spool.file().map_err(SaveError::SpoolFile)?;
        let mut file = tokio::fs::File::from_std(file);
        self.progress.begin(BackupStep::Receiving);
        let mut snapshot = node.snapshot().await?;
        let mut unchecked = 0;
        loop {
            let next = tokio::time::timeout(NODE_STALL_LIMIT, snapshot.next()).await;
            let Some(bytes) = next.map_err(|_| SaveError::Stall)?? else { break };
            file.write_all(&bytes).await.map_err(SaveError::Spool)?;
            self.progress.add(bytes.len());
            unchecked += bytes.len() as u64;
            if unchecked >= SPACE_CHECK_BYTES {
                unchecked = 0;
                self.spool.ensure_space(0)?;
            }
        }
        file.flush().await.map_err(SaveError::Spool)?;
        Ok(file.into_std().await)
    }

    /// Stores the snapshot, and compares its size in the store with the number of bytes that were
    /// sent.
    async fn store_snapshot(
        &self,
        store: &BackupStore,
        file: File,
        name: &BackupName,
    ) -> Result<StoredFile, SaveError> {
        self.progress.begin(BackupStep::Storing);
        let is_encrypted = !self.recipients.is_empty();
        let data = name.data_file(is_encrypted);
        let mut source = ChunkSource::of_file(file, self.recipients.clone(), self.progress.clone());
        store.put(&self.cluster, &data, &mut source).await?;
        let unread =
            || BackupStoreError::Source(io::Error::other("the file was not read to its end"));
        let digest = source.digest().ok_or_else(unread)?.clone();
        let found = store.size(&self.cluster, &data).await?;
        if found != digest.bytes {
            return Err(SaveError::StoredSize { found, expected: digest.bytes });
        }
        Ok(StoredFile {
            file: data,
            bytes: digest.bytes,
            sha256: digest.sha256,
            encryption: is_encrypted.then_some(Encryption::Age),
            recipients: self.recipients.iter().map(ToString::to_string).collect(),
        })
    }

    /// Deletes the files of interrupted attempts, and the backups that are no longer kept, after
    /// the backup `saved` was published. Returns the deleted backups.
    pub(crate) async fn delete_old(
        &self,
        store: &BackupStore,
        policy: &RetentionPolicy,
        saved: &BackupName,
    ) -> Result<Vec<BackupName>, BackupStoreError> {
        let listing = store.list(&self.cluster).await?;
        let plan = retention::plan(&listing, policy, saved, Timestamp::now());
        let mut deleted = Vec::new();
        for name in plan.backups {
            match self.delete(store, &name).await? {
                Ok(()) => deleted.push(name),
                Err(why) => tracing::warn!("the old backup {name} stays: {why}"),
            }
        }
        for file in plan.leftovers {
            store.delete(&self.cluster, &file).await?;
            tracing::info!("{file}, which an interrupted backup has left, was removed");
        }
        Ok(deleted)
    }

    /// Deletes a backup if its manifest names this cluster; the inner error says why the backup
    /// stays. Deletes the manifest first: after a crash in between, the snapshot is only a
    /// leftover.
    async fn delete(
        &self,
        store: &BackupStore,
        name: &BackupName,
    ) -> Result<Result<(), String>, BackupStoreError> {
        let file = name.manifest_file();
        let bytes = match store.get_small(&self.cluster, &file, MAX_MANIFEST_BYTES).await {
            Ok(bytes) => bytes,
            Err(error @ BackupStoreError::TooLong { .. }) => return Ok(Err(error_chain(&error))),
            // Another agent has deleted the backup just now.
            Err(BackupStoreError::Missing(_)) => return Ok(Ok(())),
            Err(error) => return Err(error),
        };
        let manifest = match Manifest::parse(&bytes, &self.cluster, name) {
            Ok(manifest) => manifest,
            Err(error) => return Ok(Err(error_chain(&error))),
        };
        store.delete(&self.cluster, &file).await?;
        store.delete(&self.cluster, &manifest.stored.file).await?;
        Ok(Ok(()))
    }
}
