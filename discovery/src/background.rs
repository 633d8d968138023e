//! Background tasks of a process. They listen for other processes' notifications, sweep the
//! clusters, and fill the ledger. They also restore the ledger's commits in a database that has
//! lost them. Each task retries after an error, with a growing pause.

use std::time::{Duration, Instant};

use sqlx::postgres::PgListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::app::App;
use crate::host_identity::KEYS_INTERVAL;
use crate::keydir::SIGNING_KEYS_INTERVAL;
use crate::ledger;
use crate::refusals::REFUSALS_INTERVAL;
use crate::store::cluster::CHANNEL;
use crate::store::counts::SilentMembersCount;

/// How often the log reports progress while the ledger is filled.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Minimum time between two counts of the clusters.
const COUNT_INTERVAL: Duration = Duration::from_secs(60);

/// Spawns all background tasks on `tracker`. Cancelling `stop` ends them.
pub(crate) fn start(app: &App, sweep: Duration, tracker: &TaskTracker, stop: &CancellationToken) {
    tracker.spawn(run_until_stopped(stop.clone(), listen(app.clone())));
    tracker.spawn(run_until_stopped(stop.clone(), sweep_periodically(app.clone(), sweep)));
    tracker.spawn(run_until_stopped(stop.clone(), write_refusals_periodically(app.clone())));
    if let Some(every) = muster_notify::keep_alive_interval() {
        tracker.spawn(run_until_stopped(stop.clone(), keep_alive(every)));
    }
    tracker.spawn(run_until_stopped(stop.clone(), reload_identity_keys(app.clone())));
    tracker.spawn(run_until_stopped(stop.clone(), reload_signing_keys(app.clone())));
    tracker.spawn(run_until_stopped(stop.clone(), fill_ledger_when_behind(app.clone())));
    tracker.spawn(run_until_stopped(stop.clone(), restore_when_changed(app.clone())));
    tracker.spawn(run_until_stopped(stop.clone(), settle_clusters_when_settled(app.clone())));
}

async fn run_until_stopped(stop: CancellationToken, task: impl Future<Output = ()>) {
    let _ = stop.run_until_cancelled(task).await;
}

/// Listens for other processes' changes, which arrive as Postgres notifications. A lost connection
/// can lose notifications. So every waiting request is woken after a connection was lost.
async fn listen(app: App) {
    let mut pause = FIRST_PAUSE;
    loop {
        if let Err(error) = listen_once(&app, &mut pause).await {
            tracing::debug!(%error, "can't listen to the database");
        }
        app.notifier.wake_all();
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

async fn listen_once(app: &App, pause: &mut Duration) -> Result<(), sqlx::Error> {
    let mut listener = PgListener::connect_with(app.store.pool()).await?;
    listener.listen_all([CHANNEL, ledger::CHANNEL]).await?;
    *pause = FIRST_PAUSE;
    // Copy the decisions that were made before LISTEN: Postgres sent this connection no
    // notifications of them.
    copy(app).await;
    app.notifier.wake_all();
    loop {
        match listener.try_recv().await? {
            Some(hint) if hint.channel() == ledger::CHANNEL => {
                // One copy takes all new decisions, so the ledger can already hold the decision
                // that a later notification announces. Skip such a notification.
                let known = app.store.ledger().known().map_or(0, |known| known.last_copied.number);
                if hint.payload().parse().is_ok_and(|number: u64| number <= known) {
                    continue;
                }
                copy(app).await;
            }
            Some(hint) => match hint.payload().parse() {
                Ok(cluster) => app.notifier.wake(cluster),
                Err(_) => tracing::debug!("a hint that names no cluster"),
            },
            // The connection was lost, and perhaps notifications with it.
            None => {
                copy(app).await;
                app.notifier.wake_all();
            }
        }
    }
}

/// Copies other processes' decisions into this ledger. After an error the next sweep copies them,
/// and so does any transaction that decides something.
async fn copy(app: &App) {
    if let Err(error) = app.copy_new_decisions().await {
        tracing::debug!(%error, "can't copy what was decided");
    }
}

async fn sweep_periodically(app: App, every: Duration) {
    let mut last_count: Option<Instant> = None;
    let mut silent_count = SilentMembersCount::default();
    loop {
        match app.sweep().await {
            Ok(()) => {
                app.metrics.database_up.set(1);
                app.store.watch().note_write(false);
            }
            Err(error) => {
                app.metrics.database_up.set(0);
                if error.is_without_writes() {
                    app.store.watch().note_write(true);
                }
                tracing::warn!(%error, "can't look after the clusters");
            }
        }
        app.request_limit.forget_quiet();
        app.connection_limit.forget_quiet();
        if last_count.is_none_or(|last| last.elapsed() >= COUNT_INTERVAL) {
            last_count = Some(Instant::now());
            update_counts(&app, &mut silent_count).await;
        }
        tokio::time::sleep(every).await;
    }
}

/// Counts clusters and silent members for the metrics. After an error, the metrics keep their
/// values.
async fn update_counts(app: &App, silent_count: &mut SilentMembersCount) {
    if let Err(error) = app.count_clusters().await {
        tracing::debug!(%error, "can't count the clusters");
    }
    if let Err(error) = app.count_silent_members(silent_count).await {
        tracing::debug!(%error, "can't count the silent members");
    }
}

async fn write_refusals_periodically(app: App) {
    loop {
        tokio::time::sleep(REFUSALS_INTERVAL).await;
        app.write_refusals().await;
        app.throttle_log.log_rest();
    }
}

/// Tells the service manager that this process's runtime still works (`WatchdogSec=`).
async fn keep_alive(every: Duration) {
    loop {
        if let Err(error) = muster_notify::notify(muster_notify::State::Watchdog) {
            tracing::debug!(%error, "can't notify the service manager");
        }
        tokio::time::sleep(every).await;
    }
}

/// Reads the files with the clouds' keys periodically, because operators change them.
async fn reload_identity_keys(app: App) {
    loop {
        tokio::time::sleep(KEYS_INTERVAL).await;
        let app = app.clone();
        // Read the keys in a task of its own. If reading panics, only that task ends, and the keys
        // are read again after the next pause.
        let read = tokio::task::spawn_blocking(move || app.identity_keys.reload(&app.metrics));
        let _ = read.await;
    }
}

/// Reads the signing keys periodically, so that a removed key counts no longer.
async fn reload_signing_keys(app: App) {
    loop {
        tokio::time::sleep(SIGNING_KEYS_INTERVAL).await;
        let keys = app.keys.clone();
        // Read the keys in a task of its own, for the reason given in `reload_identity_keys`.
        let read = tokio::task::spawn_blocking(move || keys.signing_keys.reload());
        let _ = read.await;
    }
}

/// Fills the ledger in batches when it lacks more decisions than one check of the database (`look`)
/// may copy. Logs the progress.
async fn fill_ledger_when_behind(app: App) {
    let mut pause = FIRST_PAUSE;
    loop {
        app.store.watch().fill_needed.notified().await;
        if !is_complete(&app) {
            tracing::warn!(
                "this process's ledger is being filled from the database: until that is done, nothing \
                 is frozen, committed or ended here"
            );
        }
        let started = Instant::now();
        match log_progress_until_done(&app, app.store.fill_ledger()).await {
            Ok(()) => {
                pause = FIRST_PAUSE;
                tracing::info!(
                    commits = app.store.ledger().commits(),
                    duration_ms = started.elapsed().as_millis(),
                    "this process's ledger is complete"
                );
                copy(&app).await;
                if let Err(error) = app.settle_clusters().await {
                    tracing::warn!(%error, "can't tell the clusters that the database is settled");
                }
                app.notifier.wake_all();
            }
            Err(error) => {
                tracing::warn!(%error, "can't fill the ledger yet");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
                app.store.watch().fill_needed.notify_one();
            }
        }
    }
}

fn is_complete(app: &App) -> bool {
    let watch = app.store.watch();
    let number = watch.generation.borrow().as_ref().map(|generation| generation.number);
    number.is_some_and(|number| watch.is_complete(number.unsigned_abs()))
}

async fn log_progress_until_done<T>(app: &App, work: impl Future<Output = T>) -> T {
    let mut work = std::pin::pin!(work);
    loop {
        tokio::select! {
            done = &mut work => return done,
            () = tokio::time::sleep(PROGRESS_INTERVAL) => {
                let (copied, newest) = app.store.watch().progress.copied_and_newest();
                tracing::info!(copied, newest, "filling this process's ledger");
            }
        }
    }
}

/// Restores the ledger's commits in the database as soon as a check finds that the database has
/// changed.
async fn restore_when_changed(app: App) {
    let mut pause = FIRST_PAUSE;
    loop {
        match app.restore_ledger().await {
            Ok(_) => {
                pause = FIRST_PAUSE;
                app.store.watch().restore_needed.notified().await;
                // Pause, so that frequent changes of the database don't cause too many restores.
                tokio::time::sleep(FIRST_PAUSE).await;
            }
            Err(error) => {
                tracing::warn!(%error, "can't put the ledger back yet");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
}

/// Tells the forming clusters that the database is settled, as soon as this process or another one
/// has settled the database's generation. The mark `unsettled` in the clusters' rows is cleared.
async fn settle_clusters_when_settled(app: App) {
    let mut generation = app.store.watch().generation.subscribe();
    while generation.changed().await.is_ok() {
        let settled = generation.borrow_and_update().as_ref().is_some_and(|known| known.settled);
        if settled && let Err(error) = app.settle_clusters().await {
            tracing::warn!(%error, "can't tell the clusters that the database is settled");
        }
        app.notifier.wake_all();
    }
}
