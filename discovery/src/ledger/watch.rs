//! What this life of the process knows of the database and of itself, without asking.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};

use tokio::sync::{Notify, watch};
use uuid::Uuid;

use super::generation::Generation;
use crate::metrics::Metrics;

/// What is known of the database, for those who must not ask it: `/readyz`, `explain`, metrics.
#[derive(Debug)]
pub(crate) struct DatabaseWatch {
    /// The generation as last read; `None` before the first connection.
    pub generation: watch::Sender<Option<Generation>>,
    /// Wakes whoever puts the ledger back.
    pub changed: Notify,
    /// Wakes whoever fills the ledger: it lacks more than a look may read.
    pub behind: Notify,
    /// Held by whoever copies without a limit: one at a time.
    pub filling: tokio::sync::Mutex<()>,
    /// How far the copy of the database's decisions has come.
    pub progress: Progress,
    /// The generation in which the ledger is complete, as this life has found; 0: none.
    complete: AtomicI64,
    /// The settled generation that the ledger was compared with, in this life.
    compared: AtomicI64,
    /// The whole ledger has to be compared, whatever it says of earlier comparisons.
    doubts_all: AtomicBool,
    /// The ledger was found to be older than the database says that it was: told once.
    pub(super) set_back: AtomicBool,
    /// It was found not to be where it was written: told once.
    pub(super) copied: AtomicBool,
    /// This life of the process.
    pub(super) life: Uuid,
    /// It stands in the database.
    pub(super) began: AtomicBool,
    /// At how many sweeps in a row another life of this process was met.
    met: AtomicU32,
    /// Two processes use copies of one ledger: this one has to end.
    pub elsewhere: watch::Sender<bool>,
    /// Where alarms are counted.
    pub metrics: Arc<Metrics>,
}

/// At so many sweeps in a row another life is met before this one ends: what a killed process had
/// asked for may be done after its successor began, once.
const MET: u32 = 2;

impl DatabaseWatch {
    /// Of a database that was never seen.
    pub(crate) fn new(metrics: Arc<Metrics>) -> Self {
        DatabaseWatch {
            generation: watch::channel(None).0,
            changed: Notify::new(),
            behind: Notify::new(),
            filling: tokio::sync::Mutex::default(),
            progress: Progress::default(),
            complete: AtomicI64::new(0),
            compared: AtomicI64::new(0),
            doubts_all: AtomicBool::new(false),
            set_back: AtomicBool::new(false),
            copied: AtomicBool::new(false),
            life: Uuid::now_v7(),
            began: AtomicBool::new(false),
            met: AtomicU32::new(0),
            elsewhere: watch::channel(false).0,
            metrics,
        }
    }

    /// Whether another life was met at this sweep, and so often that this one has to end. One whose
    /// ledger is a copy ends first.
    pub(super) fn meets(&self, elsewhere: bool) -> bool {
        if !elsewhere {
            self.met.store(0, Ordering::Relaxed);
            return false;
        }
        let met = self.met.fetch_add(1, Ordering::Relaxed) + 1;
        let ends = met >= MET || self.copied.load(Ordering::Relaxed);
        if ends {
            self.metrics.alarm("ledger_used_twice");
            self.elsewhere.send_replace(true);
        }
        ends
    }

    /// A transaction contradicts the ledger: the next look compares all of it, whatever was compared.
    pub(crate) fn compare_again(&self) {
        self.doubts_all.store(true, Ordering::Relaxed);
        self.compared.store(0, Ordering::Relaxed);
    }

    pub(super) fn doubts_all(&self) -> bool {
        self.doubts_all.load(Ordering::Relaxed)
    }

    pub(super) fn doubts_no_more(&self) {
        self.doubts_all.store(false, Ordering::Relaxed);
    }

    /// Whether the ledger is to be compared with this settled generation.
    pub(super) fn has_to_compare(&self, generation: i64) -> bool {
        self.compared.load(Ordering::Relaxed) != generation
    }

    /// Whether the ledger holds all that the database held when this process last looked, and was
    /// compared with it. Nothing is frozen, decided or ended in a generation in which it doesn't.
    pub(crate) fn is_complete(&self, generation: u64) -> bool {
        self.complete.load(Ordering::Acquire).unsigned_abs() == generation
    }

    /// The ledger was found to lack what it should hold.
    pub(crate) fn set_incomplete(&self) {
        self.complete.store(0, Ordering::Release);
    }

    /// The ledger is complete in `generation`, and was compared with it if that is settled.
    pub(super) fn set_complete(&self, generation: &Generation) {
        if generation.settled {
            self.compared.store(generation.number, Ordering::Relaxed);
        }
        self.complete.store(generation.number, Ordering::Release);
    }

    /// Why nothing is decided in `generation` although the database is settled: the ledger is being
    /// filled or compared. `None`: it is complete.
    pub(crate) fn explain_incomplete(&self, generation: i64) -> Option<String> {
        if self.is_complete(generation.unsigned_abs()) {
            return None;
        }
        let (copied, newest) = self.progress.now();
        Some(format!(
            "this process's ledger is being filled from the database and compared with it ({copied} \
             of {newest} decisions copied): nothing is frozen, committed or ended here until that is \
             done. It goes on by itself"
        ))
    }
}

/// How far a copy of the database's decisions has come, for those who only look.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    copied: AtomicU64,
    newest: AtomicU64,
}

impl Progress {
    /// The database has this many decisions.
    pub(super) fn begin(&self, newest: u64) {
        self.newest.store(newest, Ordering::Relaxed);
    }

    /// Everything up to this one is copied.
    pub(super) fn has_copied(&self, to: u64) {
        self.copied.store(to, Ordering::Relaxed);
    }

    /// Number of the last decision copied, and of the newest one.
    pub(crate) fn now(&self) -> (u64, u64) {
        (self.copied.load(Ordering::Relaxed), self.newest.load(Ordering::Relaxed))
    }
}

/// Makes it known; wakes whoever puts the ledger back if there is news and we are waited for.
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
        watch.changed.notify_one();
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
        tokio::time::timeout(wait, watch.changed.notified()).await.is_ok()
    }

    #[tokio::test]
    async fn only_news_that_this_process_is_waited_for_wake_whoever_puts_the_ledger_back() {
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
    fn who_meets_another_life_twice_in_a_row_ends_and_with_a_copied_ledger_at_once() {
        let watch = DatabaseWatch::new(Arc::default());
        assert!(!watch.meets(true), "what a killed process had asked for");
        assert!(!watch.meets(false));
        assert!(!watch.meets(true) && watch.meets(true));
        assert!(*watch.elsewhere.borrow());
        let watch = DatabaseWatch::new(Arc::default());
        watch.copied.store(true, Ordering::Relaxed);
        assert!(watch.meets(true));
    }
}
