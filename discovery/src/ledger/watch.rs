//! State of the database and the ledger as this run of the process knows it, without a query. A run
//! lasts from one start of a process to its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};

use tokio::sync::{Notify, watch};
use uuid::Uuid;

use super::generation::Generation;
use crate::metrics::ServiceMetrics;

/// State of the database, for code that must not query it: `/readyz`, `explain`, metrics.
#[derive(Debug)]
pub(crate) struct DatabaseWatch {
    /// The generation as last read. `None` before the first connection.
    pub generation: watch::Sender<Option<Generation>>,
    /// Wakes the task that restores the ledger's entries in the database.
    pub restore_needed: Notify,
    /// Wakes the task that fills the ledger. A check of the database (`look`) does so if the ledger
    /// lacks more than the check may read.
    pub fill_needed: Notify,
    /// Held while the ledger is filled or new decisions are copied, so that only one of these runs.
    pub fill_lock: tokio::sync::Mutex<()>,
    /// Progress of the copy of the database's decisions.
    pub progress: CopyProgress,
    /// Generation of the database for which the ledger is complete; 0 if there is none.
    complete_generation: AtomicI64,
    /// Settled generation with which this process has compared the ledger. 0 means none.
    compared_generation: AtomicI64,
    /// Whether the next check must compare all entries of the ledger, even those that the ledger
    /// records as compared.
    doubts_all: AtomicBool,
    /// Whether the alarm for an old ledger was raised: the ledger holds less than the database
    /// recorded of it.
    pub(super) has_alarmed_older: AtomicBool,
    /// Whether the alarm for a copied ledger was raised: its files aren't the original ones.
    pub(super) has_alarmed_copy: AtomicBool,
    /// Id of this run of the process; each start makes a new one.
    pub(super) run_id: Uuid,
    /// Whether this run's id (`run_id`) was written to the database.
    pub(super) has_stored_run_id: AtomicBool,
    /// Number of consecutive sweeps at which the database had the id of another run of this
    /// process.
    other_run_sweeps: AtomicU32,
    /// Whether the database refused the last write, although it answers.
    refuses_writes: AtomicBool,
    /// Becomes true when two processes use copies of one ledger. This process must then stop.
    pub must_stop: watch::Sender<bool>,
    /// Metrics, for counting alarms.
    pub metrics: Arc<ServiceMetrics>,
    /// Lets a test keep the ledger incomplete, whatever a check of the database finds.
    #[cfg(test)]
    is_held_incomplete: AtomicBool,
}

/// Number of consecutive sweeps that must find another run of this process before this run stops. A
/// single sweep isn't enough: a killed process's last query can run after its successor has
/// started.
const MAX_OTHER_RUN_SWEEPS: u32 = 2;

impl DatabaseWatch {
    /// A watch for a database that this process has not seen yet.
    pub(crate) fn new(metrics: Arc<ServiceMetrics>) -> Self {
        DatabaseWatch {
            generation: watch::channel(None).0,
            restore_needed: Notify::new(),
            fill_needed: Notify::new(),
            fill_lock: tokio::sync::Mutex::default(),
            progress: CopyProgress::default(),
            complete_generation: AtomicI64::new(0),
            compared_generation: AtomicI64::new(0),
            doubts_all: AtomicBool::new(false),
            has_alarmed_older: AtomicBool::new(false),
            has_alarmed_copy: AtomicBool::new(false),
            run_id: Uuid::now_v7(),
            has_stored_run_id: AtomicBool::new(false),
            other_run_sweeps: AtomicU32::new(0),
            refuses_writes: AtomicBool::new(false),
            must_stop: watch::channel(false).0,
            metrics,
            #[cfg(test)]
            is_held_incomplete: AtomicBool::new(false),
        }
    }

    /// Records whether this sweep found another run of this process. Returns whether this process
    /// must stop. A process whose ledger is a copy stops at the first such sweep.
    pub(super) fn note_other_run(&self, elsewhere: bool) -> bool {
        if !elsewhere {
            self.other_run_sweeps.store(0, Ordering::Relaxed);
            return false;
        }
        let met = self.other_run_sweeps.fetch_add(1, Ordering::Relaxed) + 1;
        let ends = met >= MAX_OTHER_RUN_SWEEPS || self.has_alarmed_copy.load(Ordering::Relaxed);
        if ends {
            self.metrics.count_alarm("ledger_used_twice");
            self.must_stop.send_replace(true);
        }
        ends
    }

    /// Records whether the database refused a write, although it answers.
    pub(crate) fn note_write(&self, refused: bool) {
        self.refuses_writes.store(refused, Ordering::Relaxed);
    }

    /// Whether the database refused the last write, although it answers. Each sweep writes.
    pub(crate) fn refuses_writes(&self) -> bool {
        self.refuses_writes.load(Ordering::Relaxed)
    }

    /// Makes the next check of the database (`look`) compare the whole ledger, because a
    /// transaction found a contradiction.
    pub(crate) fn require_full_comparison(&self) {
        self.doubts_all.store(true, Ordering::Relaxed);
        self.compared_generation.store(0, Ordering::Relaxed);
    }

    pub(super) fn doubts_all(&self) -> bool {
        self.doubts_all.load(Ordering::Relaxed)
    }

    pub(super) fn clear_doubts(&self) {
        self.doubts_all.store(false, Ordering::Relaxed);
    }

    /// Whether the ledger must be compared with this settled generation.
    pub(super) fn has_to_compare(&self, generation: i64) -> bool {
        self.compared_generation.load(Ordering::Relaxed) != generation
    }

    /// Whether the ledger is complete in `generation`, according to the last check of the database
    /// (`look`). In a settled generation, the ledger must also have been compared with the
    /// database. Unless it is complete, this process may not freeze, decide or end anything.
    pub(crate) fn is_complete(&self, generation: u64) -> bool {
        self.complete_generation.load(Ordering::Acquire).unsigned_abs() == generation
    }

    /// Marks the ledger as incomplete.
    pub(crate) fn set_incomplete(&self) {
        self.complete_generation.store(0, Ordering::Release);
    }

    /// Marks the ledger as incomplete, and keeps it so while `is_held` is true. After a call with
    /// `false`, the next check of the database decides again.
    #[cfg(test)]
    pub(crate) fn hold_incomplete(&self, is_held: bool) {
        self.is_held_incomplete.store(is_held, Ordering::Release);
        if is_held {
            self.set_incomplete();
        }
    }

    /// Marks the ledger as complete in `generation`, and as compared with it if that is settled.
    pub(super) fn set_complete(&self, generation: &Generation) {
        #[cfg(test)]
        if self.is_held_incomplete.load(Ordering::Acquire) {
            return;
        }
        if generation.settled {
            self.compared_generation.store(generation.number, Ordering::Relaxed);
        }
        self.complete_generation.store(generation.number, Ordering::Release);
    }

    /// Explains why nothing is decided in `generation` although it is settled: the ledger is being
    /// filled or compared. Returns `None` if the ledger is complete.
    pub(crate) fn explain_incomplete(&self, generation: i64) -> Option<String> {
        if self.is_complete(generation.unsigned_abs()) {
            return None;
        }
        let (copied, newest) = self.progress.copied_and_newest();
        Some(format!(
            "this process's ledger is being filled from the database and compared with it ({copied} \
             of {newest} decisions copied): nothing is frozen, committed or ended here until that is \
             done. It goes on by itself"
        ))
    }
}

/// Progress of a copy of the database's decisions, readable at any time.
#[derive(Debug, Default)]
pub(crate) struct CopyProgress {
    copied: AtomicU64,
    newest: AtomicU64,
}

impl CopyProgress {
    /// Sets the number of the newest decision in the database.
    pub(super) fn set_newest(&self, newest: u64) {
        self.newest.store(newest, Ordering::Relaxed);
    }

    /// Sets the number of the last copied decision.
    pub(super) fn set_copied(&self, to: u64) {
        self.copied.store(to, Ordering::Relaxed);
    }

    /// Returns the number of the last copied decision, and that of the newest decision in the
    /// database.
    pub(crate) fn copied_and_newest(&self) -> (u64, u64) {
        (self.copied.load(Ordering::Relaxed), self.newest.load(Ordering::Relaxed))
    }
}

/// Publishes the generation. If it is new and waits for this process, wakes the task that restores
/// the ledger's entries.
pub(super) fn publish(watch: &DatabaseWatch, own: Uuid, generation: Generation) {
    let waited_for = !generation.settled && generation.missing.contains(&own);
    let news = watch.generation.send_if_modified(|known| {
        let changed = known.as_ref() != Some(&generation);
        if changed {
            if let Some(text) = generation.explain() {
                tracing::error!(generation = generation.number, "{text}");
            } else if known.as_ref().is_some_and(|known| !known.settled) {
                tracing::info!(generation = generation.number, "the database is settled");
            }
            *known = Some(generation);
        }
        changed
    });
    if news && waited_for {
        watch.restore_needed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unsettled(missing: Vec<Uuid>) -> Generation {
        Generation { number: 2, settled: false, reason: "a backup".into(), changed_us: 0, missing }
    }

    async fn is_woken(watch: &DatabaseWatch) -> bool {
        let wait = std::time::Duration::ZERO;
        tokio::time::timeout(wait, watch.restore_needed.notified()).await.is_ok()
    }

    #[tokio::test]
    async fn restoring_is_woken_only_by_news_that_this_process_is_missing() {
        let watch = DatabaseWatch::new(Arc::default());
        let (own, other) = (Uuid::now_v7(), Uuid::now_v7());
        publish(&watch, own, unsettled(vec![own, other]));
        assert!(is_woken(&watch).await);
        publish(&watch, own, unsettled(vec![own, other]));
        assert!(!is_woken(&watch).await, "nothing new");
        publish(&watch, own, unsettled(vec![other]));
        assert!(!is_woken(&watch).await, "others are waited for");
        publish(&watch, own, unsettled(vec![own]));
        assert!(is_woken(&watch).await, "set back once more");
    }

    #[test]
    fn another_run_seen_twice_in_a_row_or_once_with_a_copied_ledger_stops_this_one() {
        let watch = DatabaseWatch::new(Arc::default());
        assert!(!watch.note_other_run(true), "what a killed process had asked for");
        assert!(!watch.note_other_run(false));
        assert!(!watch.note_other_run(true) && watch.note_other_run(true));
        assert!(*watch.must_stop.borrow());
        let watch = DatabaseWatch::new(Arc::default());
        watch.has_alarmed_copy.store(true, Ordering::Relaxed);
        assert!(watch.note_other_run(true));
    }
}
