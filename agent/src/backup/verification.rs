//! Verifies stored backups on schedule, as `backup verify` does without a private key. A backup was
//! whole when it was saved, and may have been damaged in its store since.
//!
//! One verification examines the newest backup and an older backup. The older backup is chosen at
//! random, so each gets its turn, and the cost doesn't grow with the number of backups. Memory is
//! bounded as in `examine`; disk space by one backup in the folder of temporary files.

use std::time::Duration;

use jiff::Timestamp;
use rustix::rand::{GetRandomFlags, getrandom};
use tokio::time::Instant;

use super::examine::{ExamineError, Examiner};
use super::listing::BackupListing;
use super::name::{BackupName, ClusterFolder};
use super::progress::BackupProgress;
use super::schedule::{choose_for_verification, is_verification_due, retry_pause};
use super::settings::StoreSettings;
use super::signature::{SignatureFinding, SignaturePolicy};
use super::spool::Spool;
use super::store::{BackupStore, BackupStoreError};
use super::verification_file::VerificationFile;
use crate::exit::error_chain;
use crate::observe::backup::{BackupFailure, VerificationFailureReason, VerificationStatus};
use crate::observe::status::StatusHandle;

/// Time limit of one verification. A backup that is due meanwhile is saved afterwards.
const VERIFICATION_LIMIT: Duration = Duration::from_hours(2);
/// Pause before the backups are listed again after the store had none.
const EMPTY_STORE_PAUSE: Duration = Duration::from_mins(5);

/// Why the stored backups were not found whole.
#[derive(Debug, thiserror::Error)]
enum VerificationError {
    /// A stored backup is damaged.
    #[error("the stored backup {name} is damaged")]
    Damaged {
        name: BackupName,
        #[source]
        source: Box<ExamineError>,
    },
    /// A stored backup can't be examined now. It may be good.
    #[error("the stored backup {name} can't be verified")]
    NotExamined {
        name: BackupName,
        #[source]
        source: Box<ExamineError>,
    },
    /// The store failed, or refused.
    #[error("the store of backups can't be used")]
    Store(#[from] BackupStoreError),
    /// The folder of temporary files can't be used.
    #[error("no temporary file can be made")]
    Spool(#[source] muster_files::Error),
    /// The verification took too long.
    #[error("the stored backups were not verified within {} s", VERIFICATION_LIMIT.as_secs())]
    Slow,
}

/// Verifies stored backups on schedule. The agent's status shows the last result, and which backups
/// are damaged. Whenever the agent starts its node, it makes a new verifier, but keeps the status.
/// A file keeps the last result for the next agent process on this host.
pub(super) struct BackupVerifier {
    /// Interval between two verifications.
    every: Duration,
    board: StatusHandle,
    /// File that keeps the last result across restarts of the agent.
    file: VerificationFile,
    /// Number of attempts without a result since the last result.
    failures: u32,
    /// No attempt is made before this time.
    retry_at: Option<Instant>,
}

impl BackupVerifier {
    pub(super) fn new(every: Duration, board: StatusHandle, file: VerificationFile) -> Self {
        Self { every, board, file, failures: 0, retry_at: None }
    }

    /// Shows the interval between verifications in the status. If this process has no result yet,
    /// also shows the last result of an earlier process.
    pub(super) fn show_last_result(&self) {
        let every_seconds = self.every.as_secs();
        let last = match self.shown() {
            shown if shown == VerificationStatus::default() => self.file.read().unwrap_or_default(),
            shown => shown,
        };
        self.show(|status| *status = VerificationStatus { every_seconds, ..last });
    }

    /// Whether it is time for a verification.
    pub(super) fn is_due(&self, now: Timestamp) -> bool {
        let may_try = self.retry_at.is_none_or(|at| Instant::now() >= at);
        may_try && is_verification_due(self.shown().at, self.every, now)
    }

    /// Whether the status shows a failure.
    pub(super) fn shows_failure(&self) -> bool {
        self.shown().failure.is_some()
    }

    /// Whether the status shows a damaged backup. If so, this agent goes on verifying even if
    /// another agent is responsible. The other agent doesn't know of the damage.
    pub(super) fn has_damage(&self) -> bool {
        !self.shown().damaged.is_empty()
    }

    /// Removes the last attempt's failure from the status, because another member's agent verifies
    /// from now on.
    pub(super) fn withdraw_failure(&mut self) {
        (self.failures, self.retry_at) = (0, None);
        self.show(|status| status.failure = None);
    }

    /// Removes those damaged backups from the status that the store doesn't have any more.
    pub(super) fn note_listing(&self, listing: &BackupListing) {
        if self.clear_damage(|name| !has_backup(listing, name)) {
            self.keep_result();
        }
    }

    /// Verifies backups of the cluster, and shows the result.
    pub(super) async fn run(
        &mut self,
        store: &StoreSettings,
        cluster: &ClusterFolder,
        spool: Result<Spool, muster_files::Error>,
        signatures: SignaturePolicy,
    ) {
        let mut whole = Vec::new();
        let work = self.verify(store, cluster, (spool, signatures), &mut whole);
        let limited = tokio::time::timeout(VERIFICATION_LIMIT, work).await;
        self.clear_damage(|name| whole.contains(name));
        match limited.unwrap_or(Err(VerificationError::Slow)) {
            Ok(()) if whole.is_empty() => self.note_empty_store(),
            Ok(()) => self.note_success(&whole),
            Err(error) => self.note_failure(error),
        }
        self.keep_result();
    }

    /// Examines backups, and adds those that are whole to `whole`. Ends at the first failure.
    async fn verify(
        &self,
        store: &StoreSettings,
        cluster: &ClusterFolder,
        (spool, signatures): (Result<Spool, muster_files::Error>, SignaturePolicy),
        whole: &mut Vec<BackupName>,
    ) -> Result<(), VerificationError> {
        let examiner = Examiner {
            store: BackupStore::open(store).await?,
            cluster: cluster.clone(),
            identities: None,
            signatures,
            spool: spool.map_err(VerificationError::Spool)?,
            progress: BackupProgress::default(),
        };
        let listing = examiner.store.list(cluster).await?;
        let shown = self.shown().damaged;
        let damaged: Vec<BackupName> = shown.iter().filter_map(|name| name.parse().ok()).collect();
        let (random, now) = (random_number(), Timestamp::now());
        for name in choose_for_verification(&listing, &damaged, random, now) {
            match examiner.examine(name).await {
                Ok(examined) => {
                    if examined.signature == SignatureFinding::Unsigned {
                        tracing::warn!("the stored backup {name} is whole, but not signed");
                    }
                    whole.push(name.clone());
                }
                Err(error) => ensure_deleted(&examiner, name, error).await?,
            }
        }
        Ok(())
    }

    /// The store was read, and has nothing to verify: an earlier failure is over.
    fn note_empty_store(&mut self) {
        (self.failures, self.retry_at) =
            (0, Some(Instant::now() + EMPTY_STORE_PAUSE.min(self.every)));
        self.show(|status| {
            status.damaged.clear();
            status.failure = None;
        });
    }

    fn note_success(&mut self, whole: &[BackupName]) {
        (self.failures, self.retry_at) = (0, None);
        let names: Vec<String> = whole.iter().map(ToString::to_string).collect();
        tracing::info!("stored backups were verified and are whole: {}", names.join(", "));
        self.show(|status| {
            status.at = Some(Timestamp::now());
            status.whole = names;
            if status.damaged.is_empty() {
                status.failure = None;
            }
        });
    }

    fn note_failure(&mut self, error: VerificationError) {
        let (text, at) = (error_chain(&error), Timestamp::now());
        let reason = if let VerificationError::Damaged { name, .. } = error {
            tracing::error!(
                "{text}. Look for the newest good one: muster-agent backup verify --all"
            );
            (self.failures, self.retry_at) = (0, None);
            self.show(|status| {
                status.at = Some(at);
                status.whole.clear();
                let name = name.to_string();
                if !status.damaged.contains(&name) {
                    status.damaged.push(name);
                }
            });
            VerificationFailureReason::Damaged
        } else {
            self.failures = self.failures.saturating_add(1);
            let pause = retry_pause(self.failures, self.every);
            self.retry_at = Some(Instant::now() + pause);
            tracing::warn!("the verification failed: {text}; tried again in {} s", pause.as_secs());
            VerificationFailureReason::NotDone
        };
        // One of the store's backups is damaged. An error of the store must not hide that.
        if reason == VerificationFailureReason::NotDone && self.has_damage() {
            return;
        }
        let reason = reason.as_str().to_owned();
        self.show(|status| status.failure = Some(BackupFailure { at, reason, text }));
    }

    /// Writes the shown result to the file. A failure to examine a backup is left out, because the
    /// next agent tries that again at once.
    fn keep_result(&self) {
        let mut last = self.shown();
        if last.damaged.is_empty() {
            last.failure = None;
        }
        if let Err(error) = self.file.write(last) {
            let error = error_chain(&error);
            tracing::warn!("the result of the verification can't be written down: {error}");
        }
    }

    /// Removes backups from the list of damaged ones in the status. While the list isn't empty, the
    /// status shows a failure that names one of them. Returns whether a backup was removed.
    fn clear_damage(&self, is_cleared: impl Fn(&BackupName) -> bool) -> bool {
        let mut is_changed = false;
        self.show(|status| {
            let before = status.damaged.len();
            let stays = |name: BackupName| !is_cleared(&name);
            status.damaged.retain(|name| name.parse::<BackupName>().is_ok_and(stays));
            is_changed = status.damaged.len() < before;
            if !is_changed {
                return;
            }
            let left = status.damaged.first();
            status.failure = left.and_then(|name| {
                let text = format!("the stored backup {name} is damaged");
                status.failure.take().map(|failure| BackupFailure { text, ..failure })
            });
        });
        is_changed
    }

    fn shown(&self) -> VerificationStatus {
        let status = self.board.subscribe();
        let backup = status.borrow().backup.clone();
        backup.and_then(|backup| backup.verification).unwrap_or_default()
    }

    fn show(&self, change: impl FnOnce(&mut VerificationStatus)) {
        self.board.update(|status| {
            let backup = status.backup.get_or_insert_default();
            change(backup.verification.get_or_insert_default());
        });
    }
}

/// Returns `error`, unless an agent has deleted the backup meanwhile.
async fn ensure_deleted(
    examiner: &Examiner,
    name: &BackupName,
    error: ExamineError,
) -> Result<(), VerificationError> {
    if !has_backup(&examiner.store.list(&examiner.cluster).await?, name) {
        return Ok(());
    }
    let (name, source) = (name.clone(), Box::new(error));
    match source.is_damage() {
        true => Err(VerificationError::Damaged { name, source }),
        false => Err(VerificationError::NotExamined { name, source }),
    }
}

/// Whether the store has the backup's manifest.
fn has_backup(listing: &BackupListing, name: &BackupName) -> bool {
    listing.published.contains(name) || listing.incomplete.contains(name)
}

fn random_number() -> u64 {
    let mut random = [0; 8];
    // Without random bytes, the number is 0: the choice of the backup is then predictable.
    let _ = getrandom(&mut random, GetRandomFlags::empty());
    u64::from_le_bytes(random)
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;
    use uuid::Uuid;

    use super::*;
    use crate::backup::chunks::Digester;
    use crate::backup::manifest::Manifest;
    use crate::state::Layout;

    const EVERY: Duration = Duration::from_hours(24);
    const STORED: &[u8] = b"an encrypted snapshot";

    struct TestStore {
        folder: tempfile::TempDir,
        layout: Layout,
        settings: StoreSettings,
        cluster: ClusterFolder,
        verifier: BackupVerifier,
    }

    impl TestStore {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let cluster = ClusterFolder::of_cluster(Uuid::from_u128(7));
            std::fs::create_dir(folder.path().join(cluster.as_str())).unwrap();
            let layout = Layout::new(&folder.path().join("data")).unwrap();
            std::fs::create_dir(layout.root()).unwrap();
            layout.create().unwrap();
            let settings = StoreSettings::Directory(folder.path().to_owned());
            let file = VerificationFile::new(&layout, &settings);
            let verifier = BackupVerifier::new(EVERY, StatusHandle::default(), file);
            Self { folder, layout, settings, cluster, verifier }
        }

        /// Replaces the verifier by a new one that shows its results in `board`, as an agent does
        /// when it starts its node again.
        fn restart_verifier(&mut self, board: StatusHandle) {
            let file = VerificationFile::new(&self.layout, &self.settings);
            self.verifier = BackupVerifier::new(EVERY, board, file);
            self.verifier.show_last_result();
        }

        fn write(&self, file: &str, bytes: &[u8]) {
            let folder = self.folder.path().join(self.cluster.as_str());
            std::fs::write(folder.join(file), bytes).unwrap();
        }

        /// Stores an encrypted backup that was begun this many hours ago.
        fn save(&self, hours_ago: i64) -> BackupName {
            let begun_at = Timestamp::now() - SignedDuration::from_hours(hours_ago);
            let name = BackupName::new(begun_at, 42);
            let mut digester = Digester::default();
            digester.update(STORED);
            let digest = digester.finish();
            let mut manifest = Manifest::fixture(&name, &self.cluster, Some("age1x"));
            (manifest.stored.bytes, manifest.stored.sha256) = (digest.bytes, digest.sha256);
            self.write(&name.data_file(true), STORED);
            self.write(&name.manifest_file(), &manifest.to_bytes());
            name
        }

        async fn run(&mut self) -> VerificationStatus {
            let (settings, cluster) = (self.settings.clone(), self.cluster.clone());
            let signatures = SignaturePolicy::default();
            self.verifier.run(&settings, &cluster, Ok(Spool::system()), signatures).await;
            self.verifier.shown()
        }

        async fn listing(&self) -> BackupListing {
            let store = BackupStore::open(&self.settings).await.unwrap();
            store.list(&self.cluster).await.unwrap()
        }
    }

    /// Shows the backup as damaged, so that the next verification examines it.
    fn show_damage(verifier: &BackupVerifier, name: &BackupName) {
        verifier.show(|status| status.damaged.push(name.to_string()));
    }

    fn reason(status: &VerificationStatus) -> Option<&str> {
        status.failure.as_ref().map(|failure| failure.reason.as_str())
    }

    #[tokio::test]
    async fn whole_backups_are_shown_with_the_time_of_their_verification() {
        let mut store = TestStore::new();
        let (older, newest) = (store.save(5), store.save(1));
        assert!(store.verifier.is_due(Timestamp::now()));
        let status = store.run().await;
        assert_eq!(status.whole, [newest.to_string(), older.to_string()]);
        assert!(status.at.is_some() && status.failure.is_none(), "{status:?}");
        assert!(!store.verifier.is_due(Timestamp::now()));
    }

    #[tokio::test]
    async fn a_store_without_backups_is_no_failure_and_is_read_again_later() {
        let mut store = TestStore::new();
        let status = store.run().await;
        assert_eq!((status.at, status.failure), (None, None));
        assert!(!store.verifier.is_due(Timestamp::now()), "it pauses");
    }

    #[tokio::test]
    async fn a_failure_ends_once_the_store_can_be_read_and_has_no_backup() {
        let mut store = TestStore::new();
        let newer = BackupName::new(Timestamp::now(), 43);
        store.write(&newer.manifest_file(), br#"{"version": 99}"#);
        store.write(&newer.data_file(true), b"x");
        assert_eq!(reason(&store.run().await), Some("not_done"));
        let folder = store.folder.path().join(store.cluster.as_str());
        std::fs::remove_file(folder.join(newer.manifest_file())).unwrap();
        assert_eq!(store.run().await.failure, None);
    }

    #[tokio::test]
    async fn a_damaged_backup_is_shown_until_it_is_whole_or_gone() {
        let mut store = TestStore::new();
        let (damaged, _) = (store.save(5), store.save(1));
        for hours_ago in 6..30 {
            store.save(hours_ago);
        }
        show_damage(&store.verifier, &damaged);
        store.write(&damaged.data_file(true), b"an encrypted snapsh0t");
        let status = store.run().await;
        assert_eq!(reason(&status), Some("damaged"));
        let text = status.failure.unwrap().text;
        assert!(text.contains(&damaged.to_string()) && text.contains("SHA-256"), "{text}");
        assert!(status.at.is_some() && !store.verifier.is_due(Timestamp::now()));
        // Each further verification examines the damaged backup in place of a random one.
        assert_eq!(reason(&store.run().await), Some("damaged"));
        let listing = store.listing().await;
        store.verifier.note_listing(&listing);
        assert!(store.verifier.shows_failure());
        store.write(&damaged.data_file(true), STORED);
        let status = store.run().await;
        assert!(status.failure.is_none() && status.whole.contains(&damaged.to_string()));

        store.write(&damaged.data_file(true), b"short");
        show_damage(&store.verifier, &damaged);
        assert_eq!(reason(&store.run().await), Some("damaged"));
        let folder = store.folder.path().join(store.cluster.as_str());
        std::fs::remove_file(folder.join(damaged.manifest_file())).unwrap();
        let listing = store.listing().await;
        store.verifier.note_listing(&listing);
        assert!(!store.verifier.shows_failure());
    }

    #[tokio::test]
    async fn a_store_that_fails_is_tried_again_and_hides_no_damage() {
        let mut store = TestStore::new();
        store.save(1);
        let newer = BackupName::new(Timestamp::now(), 43);
        store.write(&newer.manifest_file(), br#"{"version": 99}"#);
        store.write(&newer.data_file(true), b"x");
        let status = store.run().await;
        assert_eq!((reason(&status), status.at), (Some("not_done"), None));
        assert!(!store.verifier.is_due(Timestamp::now()), "it pauses");
        let damaged = store.save(2);
        store.write(&damaged.data_file(true), b"short");
        std::fs::remove_file(
            store.folder.path().join(store.cluster.as_str()).join(newer.manifest_file()),
        )
        .unwrap();
        show_damage(&store.verifier, &damaged);
        assert_eq!(reason(&store.run().await), Some("damaged"));
        store.write(&newer.manifest_file(), br#"{"version": 99}"#);
        assert_eq!(reason(&store.run().await), Some("damaged"));
    }

    #[tokio::test]
    async fn another_verifier_of_the_agent_examines_the_damaged_backup_again() {
        let mut store = TestStore::new();
        let (damaged, _) = (store.save(5), store.save(1));
        for hours_ago in 6..30 {
            store.save(hours_ago);
        }
        store.write(&damaged.data_file(true), b"short");
        show_damage(&store.verifier, &damaged);
        assert_eq!(reason(&store.run().await), Some("damaged"));
        // The node was started again.
        let board = store.verifier.board.clone();
        store.restart_verifier(board);
        assert!(store.verifier.has_damage());
        assert_eq!(reason(&store.run().await), Some("damaged"));
        store.write(&damaged.data_file(true), STORED);
        let status = store.run().await;
        assert!(status.failure.is_none() && !store.verifier.has_damage(), "{status:?}");
    }

    #[tokio::test]
    async fn a_restarted_agent_still_shows_a_damaged_backup_until_it_is_whole_or_gone() {
        let mut store = TestStore::new();
        let damaged = store.save(1);
        store.write(&damaged.data_file(true), b"short");
        let before = store.run().await;
        assert_eq!(reason(&before), Some("damaged"));
        store.restart_verifier(StatusHandle::default());
        let every_seconds = EVERY.as_secs();
        assert_eq!(store.verifier.shown(), VerificationStatus { every_seconds, ..before });
        assert!(store.verifier.has_damage() && store.verifier.shows_failure());
        assert!(!store.verifier.is_due(Timestamp::now()), "a restart loop fetches no backups");

        let folder = store.folder.path().join(store.cluster.as_str());
        std::fs::remove_file(folder.join(damaged.manifest_file())).unwrap();
        store.verifier.note_listing(&store.listing().await);
        store.restart_verifier(StatusHandle::default());
        assert!(!store.verifier.shows_failure() && !store.verifier.has_damage());
        let whole = store.save(1);
        assert_eq!(store.run().await.whole, [whole.to_string()]);
        store.restart_verifier(StatusHandle::default());
        assert_eq!(store.verifier.shown().whole, [whole.to_string()]);
    }

    #[tokio::test]
    async fn a_backup_that_could_not_be_examined_is_tried_at_once_after_a_restart() {
        let mut store = TestStore::new();
        let newer = BackupName::new(Timestamp::now(), 43);
        store.write(&newer.manifest_file(), br#"{"version": 99}"#);
        store.write(&newer.data_file(true), b"x");
        assert_eq!(reason(&store.run().await), Some("not_done"));
        store.restart_verifier(StatusHandle::default());
        assert!(!store.verifier.shows_failure());
        assert!(store.verifier.is_due(Timestamp::now()));
    }

    #[tokio::test]
    async fn a_second_damaged_backup_does_not_hide_the_first_one() {
        let mut store = TestStore::new();
        let (first, second) = (store.save(5), store.save(1));
        for damaged in [&first, &second] {
            store.write(&damaged.data_file(true), b"short");
        }
        show_damage(&store.verifier, &first);
        let status = store.run().await;
        assert_eq!(status.damaged, [first.to_string(), second.to_string()]);
        let folder = store.folder.path().join(store.cluster.as_str());
        std::fs::remove_file(folder.join(second.manifest_file())).unwrap();
        store.verifier.note_listing(&store.listing().await);
        let status = store.verifier.shown();
        assert_eq!(reason(&status), Some("damaged"));
        assert_eq!(status.damaged, [first.to_string()]);
        assert!(status.failure.unwrap().text.contains(&first.to_string()));
        std::fs::remove_file(folder.join(first.manifest_file())).unwrap();
        store.verifier.note_listing(&store.listing().await);
        assert!(!store.verifier.shows_failure() && !store.verifier.has_damage());
    }
}
