//! Saves backups on schedule, in one task beside the running node.
//!
//! Each agent reads the store from time to time, and shows the newest backup in its status. The
//! responsible agent saves a backup when one is due. After a failure it retries, with growing
//! pauses.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use jiff::Timestamp;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::examine::read_manifest;
use super::manifest::Manifest;
use super::name::{BackupName, ClusterFolder};
use super::progress::BackupProgress;
use super::save::{BackupRound, FailureReason, SaveError};
use super::schedule::{due_at, newest, retry_pause};
use super::settings::BackupSettings;
use super::signature::{BackupSigner, SignaturePolicy, SignatureTrust};
use super::store::BackupStore;
use super::verification::BackupVerifier;
use super::verification_file::VerificationFile;
use crate::cli::BackupBy;
use crate::cluster::ClusterApiClient;
use crate::endpoint::ClientEndpoint;
use crate::exit::error_chain;
use crate::observe::backup::{BackupFailure, BackupStatus, NewestBackup, RunningBackup};
use crate::observe::status::StatusHandle;
use crate::retry::jittered;
use crate::state::Layout;

/// How often the node is asked whether it leads.
const PASS_INTERVAL: Duration = Duration::from_secs(10);
/// How often the stored backups are listed while no backup is due.
const LOOK_INTERVAL: Duration = Duration::from_mins(5);
/// How often the progress of saving a backup is shown.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(2);

/// The task that saves backups on schedule.
pub(crate) struct BackupKeeper {
    settings: BackupSettings,
    layout: Layout,
    /// Address on which the node serves clients.
    listen: SocketAddr,
    cluster: ClusterFolder,
    cluster_name: String,
    board: StatusHandle,
    /// When the next backup is due, according to the last listing of the store.
    due_at: Timestamp,
    /// When the stored backups were last listed.
    looked_at: Option<Instant>,
    /// Number of failures since the last success.
    failures: u32,
    /// No attempt is made before this time.
    retry_at: Option<Instant>,
    /// Verifies stored backups; `None` without `--backup-verify-every`.
    verifier: Option<BackupVerifier>,
}

impl BackupKeeper {
    pub(crate) fn new(
        settings: BackupSettings,
        layout: Layout,
        listen: SocketAddr,
        (cluster, cluster_name): (Uuid, String),
        board: StatusHandle,
    ) -> Self {
        let verifier = settings.verify_every.map(|every| {
            let file = VerificationFile::new(&layout, &settings.store);
            BackupVerifier::new(every, board.clone(), file)
        });
        Self {
            settings,
            layout,
            listen,
            cluster: ClusterFolder::of_cluster(cluster),
            cluster_name,
            board,
            due_at: Timestamp::MIN,
            looked_at: None,
            failures: 0,
            retry_at: None,
            verifier,
        }
    }

    /// Runs a task, and saves backups beside it if there is a keeper.
    pub(crate) async fn run_beside(
        task: impl Future<Output = Infallible>,
        keeper: Option<Self>,
    ) -> Infallible {
        let Some(keeper) = keeper else { return task.await };
        tokio::select! {
            never = task => never,
            never = keeper.run() => never,
        }
    }

    /// Saves backups until the future is dropped.
    async fn run(mut self) -> Infallible {
        for warning in self.settings.warnings() {
            tracing::warn!("{warning}");
        }
        let every_seconds = self.settings.every.as_secs();
        tracing::info!(
            "backups go to {} every {every_seconds} s, saved by {}",
            self.settings.store,
            self.settings.by.as_str()
        );
        let reasons = FailureReason::ALL.map(|reason| (reason.as_str().to_owned(), 0));
        self.show(|status| {
            status.store = self.settings.store.to_string();
            status.every_seconds = every_seconds;
            for (reason, count) in reasons {
                status.failures.entry(reason).or_insert(count);
            }
        });
        if let Some(verifier) = &self.verifier {
            verifier.show_last_result();
        }
        let pause = PASS_INTERVAL.min(self.settings.every / 4);
        loop {
            if let Err(error) = self.pass().await {
                self.note_failure(&error);
            }
            self.verify_if_due().await;
            sleep(jittered(pause)).await;
        }
    }

    /// Lists the stored backups if it is time. Saves a backup if one is due and this agent is
    /// responsible.
    async fn pass(&mut self) -> Result<(), SaveError> {
        if self.retry_at.is_some_and(|at| Instant::now() < at) {
            return Ok(());
        }
        let node = self.node();
        let is_due = Timestamp::now() >= self.due_at;
        let is_responsible = is_due && self.is_responsible(node.as_ref()).await;
        let look_interval = LOOK_INTERVAL.min(self.settings.every);
        let is_time = self.looked_at.is_none_or(|at| at.elapsed() >= look_interval);
        if !is_responsible && !is_time {
            return Ok(());
        }
        let store = BackupStore::open(&self.settings.store).await?;
        self.look(&store).await?;
        let Some(node) = node.filter(|_| is_responsible && Timestamp::now() >= self.due_at) else {
            // The store was read, so its last failure is over. But while a backup is due, the
            // failed attempts to save it still count.
            if !is_due {
                self.failures = 0;
            }
            return Ok(());
        };
        self.save(&node, &store).await
    }

    /// Returns a client of this host's own node, with the certificates that are on disk now.
    fn node(&self) -> Option<ClusterApiClient> {
        let endpoint = ClientEndpoint::own_node(&self.layout.tls(), self.listen);
        let endpoint = endpoint.inspect_err(|error| tracing::debug!("{}", error_chain(error)));
        endpoint.ok().map(|endpoint| ClusterApiClient::new(vec![endpoint]))
    }

    async fn is_responsible(&self, node: Option<&ClusterApiClient>) -> bool {
        self.ask_if_responsible(node).await == Some(true)
    }

    /// Returns whether this agent has to save and verify the backups; `None` if the node can't be
    /// asked.
    async fn ask_if_responsible(&self, node: Option<&ClusterApiClient>) -> Option<bool> {
        match node?.status().await {
            Ok(status) => Some(
                self.settings.by == BackupBy::ThisHost || status.leader == Some(status.member_id),
            ),
            Err(error) => {
                tracing::debug!(error = error_chain(&error), "the node can't be asked");
                None
            }
        }
    }

    /// Verifies stored backups if a verification is due, and this agent is responsible or has found
    /// damage.
    async fn verify_if_due(&mut self) {
        let Some(verifier) = &self.verifier else { return };
        let is_due = verifier.is_due(Timestamp::now());
        if !is_due && !verifier.shows_failure() {
            return;
        }
        let is_responsible = self.ask_if_responsible(self.node().as_ref()).await;
        let Some(verifier) = &mut self.verifier else { return };
        let has_damage = verifier.has_damage();
        match is_responsible {
            Some(is_responsible) if is_due && (is_responsible || has_damage) => {
                let spool = self.settings.open_spool(&self.layout);
                let signatures = SignaturePolicy {
                    trust: SignatureTrust::of_agent(&self.layout, &self.cluster),
                    // Unsigned backups of older versions stay in the store until they are too old.
                    allows_unsigned: true,
                };
                verifier.run(&self.settings.store, &self.cluster, spool, signatures).await;
            }
            Some(false) if verifier.shows_failure() && !has_damage => verifier.withdraw_failure(),
            _ => {}
        }
    }

    /// Lists the backups in the store, and computes when the next one is due.
    async fn look(&mut self, store: &BackupStore) -> Result<(), SaveError> {
        let listing = store.list(&self.cluster).await?;
        if let Some(verifier) = &self.verifier {
            verifier.note_listing(&listing);
        }
        let now = Timestamp::now();
        self.looked_at = Some(Instant::now());
        self.due_at = due_at(&listing.published, self.settings.every, now);
        let found = newest(&listing.published, now);
        let shown = self.board.subscribe().borrow().backup.clone().unwrap_or_default();
        let known =
            shown.newest.filter(|known| found.is_some_and(|at| at.to_string() == known.name));
        let newest = match (found, known) {
            (Some(_), Some(known)) => Some(known),
            (Some(name), None) => Some(self.describe(store, name).await),
            (None, _) => None,
        };
        self.show(|status| {
            status.newest = newest;
            status.seen_at = Some(now);
        });
        Ok(())
    }

    /// Describes a backup for the status. The size is 0 if the manifest can't be read.
    async fn describe(&self, store: &BackupStore, name: &BackupName) -> NewestBackup {
        let bytes = match read_manifest(store, &self.cluster, name).await {
            Ok(manifest) => manifest.stored.bytes,
            Err(error) => {
                tracing::warn!(
                    "the newest backup {name} has no usable manifest: {}",
                    error_chain(&error)
                );
                0
            }
        };
        let (at, revision) = (name.begun_at(), name.revision());
        NewestBackup { name: name.to_string(), at, bytes, revision }
    }

    async fn save(
        &mut self,
        node: &ClusterApiClient,
        store: &BackupStore,
    ) -> Result<(), SaveError> {
        let began = Instant::now();
        let signer = BackupSigner::read(&self.layout);
        if signer.is_none() {
            tracing::warn!("the backup is not signed: this agent can't prove its member");
        }
        let round = BackupRound {
            signer,
            cluster: self.cluster.clone(),
            cluster_name: Some(self.cluster_name.clone()),
            recipients: self.settings.recipients.clone(),
            spool: self.settings.open_spool(&self.layout).map_err(SaveError::SpoolFile)?,
            progress: BackupProgress::default(),
        };
        let saved = {
            let every = self.settings.every;
            let is_wanted = |listing: &super::listing::BackupListing| {
                let now = Timestamp::now();
                due_at(&listing.published, every, now) <= now
            };
            let work = round.save(node, store, is_wanted);
            self.show_progress(&round.progress, work).await
        };
        self.show(|status| status.running = None);
        let Some(manifest) = saved? else {
            tracing::info!("another member's agent has published a backup: this one is dropped");
            return self.look(store).await;
        };
        self.note_success(&manifest, began.elapsed());
        self.look(store).await?;
        self.delete_old(&round, store, &manifest).await;
        Ok(())
    }

    /// Deletes old backups. If that fails, the next round tries it again.
    async fn delete_old(&self, round: &BackupRound, store: &BackupStore, saved: &Manifest) {
        let Ok(name) = saved.name.parse::<BackupName>() else { return };
        match round.delete_old(store, &self.settings.retention, &name).await {
            Ok(deleted) if deleted.is_empty() => {}
            Ok(deleted) => {
                let names: Vec<String> = deleted.iter().map(ToString::to_string).collect();
                tracing::info!("old backups were deleted: {}", names.join(", "));
            }
            Err(error) => {
                let text = format!("old backups can't be deleted: {}", error_chain(&error));
                tracing::warn!("{text}");
                self.show_failure(FailureReason::Store, text);
            }
        }
    }

    /// Shows the progress of saving a backup until that ends.
    async fn show_progress<T>(
        &self,
        progress: &BackupProgress,
        round: impl Future<Output = T>,
    ) -> T {
        let since = Timestamp::now();
        let mut round = std::pin::pin!(round);
        loop {
            let (step, bytes) = progress.now();
            let step = step.as_str().to_owned();
            self.show(|status| status.running = Some(RunningBackup { since, step, bytes }));
            tokio::select! {
                ended = &mut round => return ended,
                () = sleep(PROGRESS_INTERVAL) => {}
            }
        }
    }

    fn note_success(&mut self, manifest: &Manifest, duration: Duration) {
        (self.failures, self.retry_at) = (0, None);
        let duration_ms = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        tracing::info!(
            duration_ms,
            "the backup {} is published: revision {}, {} keys, {} bytes{}",
            manifest.name,
            manifest.snapshot.revision,
            manifest.snapshot.keys,
            manifest.stored.bytes,
            if manifest.stored.encryption.is_some() { ", encrypted" } else { "" }
        );
        self.show(|status| {
            status.published += 1;
            status.last_duration_ms = Some(duration_ms);
        });
    }

    fn note_failure(&mut self, error: &SaveError) {
        self.failures = self.failures.saturating_add(1);
        let pause = retry_pause(self.failures, self.settings.every);
        self.retry_at = Some(Instant::now() + pause);
        let (reason, text) = (error.reason(), error_chain(error));
        let next = format!("tried again in {} s", pause.as_secs());
        match reason {
            FailureReason::Unreadable => {
                tracing::error!(reason = reason.as_str(), "the backup failed: {text}; {next}");
            }
            _ => tracing::warn!(reason = reason.as_str(), "the backup failed: {text}; {next}"),
        }
        self.show_failure(reason, text);
    }

    fn show_failure(&self, reason: FailureReason, text: String) {
        self.show(|status| {
            status.running = None;
            *status.failures.entry(reason.as_str().to_owned()).or_default() += 1;
            let reason = reason.as_str().to_owned();
            status.last_failure = Some(BackupFailure { at: Timestamp::now(), reason, text });
        });
    }

    fn show(&self, change: impl FnOnce(&mut BackupStatus)) {
        self.board.update(|status| change(status.backup.get_or_insert_default()));
    }
}
