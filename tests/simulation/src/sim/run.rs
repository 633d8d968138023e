//! Runs one history, or many on several threads.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::simulation::{Simulation, SimulationReport};
use super::{InvariantViolation, SimulationOptions};

thread_local! {
    /// While a history runs, a panic's text is stored here instead of being printed. The panic
    /// counts as a violation.
    static FOUND: RefCell<Option<Option<String>>> = const { RefCell::new(None) };
}

static HOOK: Once = Once::new();

fn keep_panics() {
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let kept = FOUND.with(|found| {
                let mut found = found.borrow_mut();
                found.as_mut().map(|slot| *slot = Some(info.to_string())).is_some()
            });
            if !kept {
                before(info);
            }
        }));
    });
}

/// Result of one history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryResult {
    /// Seed that replays the history.
    pub seed: u64,
    /// Counters of the history, or the violation.
    pub result: Result<SimulationReport, InvariantViolation>,
}

/// Runs the history of `seed`.
pub fn replay(seed: u64, options: SimulationOptions) -> HistoryResult {
    keep_panics();
    FOUND.with(|found| *found.borrow_mut() = Some(None));
    let ran = catch_unwind(AssertUnwindSafe(|| Simulation::new(seed, options).run()));
    let found = FOUND.with(|found| found.borrow_mut().take()).flatten();
    let result = ran.unwrap_or_else(|_| {
        Err(InvariantViolation::new(
            "no panic",
            found.unwrap_or_else(|| "it says nothing".to_owned()),
        ))
    });
    HistoryResult { seed, result }
}

/// Combined result of many histories.
#[derive(Clone, Debug, Default)]
pub struct Campaign {
    /// Number of histories run.
    pub histories: u64,
    /// Sum of the reports of all histories.
    pub total: SimulationReport,
    /// Failed history with the lowest seed.
    pub failure: Option<HistoryResult>,
}

/// Runs `count` histories, beginning with seed `first`, on `threads` threads, until one fails.
/// Calls `progress` with the number of finished histories.
pub fn campaign(
    first: u64,
    count: u64,
    threads: usize,
    options: SimulationOptions,
    progress: impl Fn(u64) + Sync,
) -> Campaign {
    let (next, done, failed) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let work = || {
        let mut part = Campaign::default();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count || failed.load(Ordering::Relaxed) {
                return part;
            }
            let outcome = replay(first + number, options);
            part.add(outcome);
            if part.failure.is_some() {
                failed.store(true, Ordering::Relaxed);
            }
            progress(done.fetch_add(1, Ordering::Relaxed) + 1);
        }
    };
    let parts: Vec<Campaign> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().map(|thread| thread.join().expect("it catches panics")).collect()
    });
    parts.into_iter().fold(Campaign::default(), Campaign::merge)
}

impl Campaign {
    fn add(&mut self, outcome: HistoryResult) {
        self.histories += 1;
        match &outcome.result {
            Ok(report) => self.total = sum(self.total, *report),
            Err(_) => self.failure = Some(outcome),
        }
    }

    /// Adds the histories of `other` to the histories here.
    #[must_use]
    pub fn merge(mut self, other: Self) -> Self {
        self.histories += other.histories;
        self.total = sum(self.total, other.total);
        let failures = [self.failure.take(), other.failure];
        self.failure = failures.into_iter().flatten().min_by_key(|outcome| outcome.seed);
        self
    }
}

fn sum(a: SimulationReport, b: SimulationReport) -> SimulationReport {
    SimulationReport {
        trace: a.trace ^ b.trace,
        steps: a.steps + b.steps,
        committed: a.committed + b.committed,
        elections: a.elections + b.elections,
        writes: a.writes + b.writes,
        refused: a.refused + b.refused,
        reads: a.reads + b.reads,
        lost_outcomes: a.lost_outcomes + b.lost_outcomes,
        process_ends: a.process_ends + b.process_ends,
        wrong_process_ends: a.wrong_process_ends + b.wrong_process_ends,
        crashes: a.crashes + b.crashes,
        disk_failures: a.disk_failures + b.disk_failures,
        snapshots: a.snapshots + b.snapshots,
        membership_changes: a.membership_changes + b.membership_changes,
        changes_refused: a.changes_refused + b.changes_refused,
        handed_over: a.handed_over + b.handed_over,
        joined: a.joined + b.joined,
        refused_starts: a.refused_starts + b.refused_starts,
        amnesia: a.amnesia + b.amnesia,
        disowned: a.disowned + b.disowned,
        moves: a.moves + b.moves,
        stranded: a.stranded + b.stranded,
        interrupted_installs: a.interrupted_installs + b.interrupted_installs,
        interrupted_checkpoints: a.interrupted_checkpoints + b.interrupted_checkpoints,
        torn: a.torn + b.torn,
        conflicts: a.conflicts + b.conflicts,
        compactions: a.compactions + b.compactions,
        notices: a.notices + b.notices,
        progress_requests: a.progress_requests + b.progress_requests,
        shared_turns: a.shared_turns + b.shared_turns,
        full_queues: a.full_queues + b.full_queues,
        lost_bodies: a.lost_bodies + b.lost_bodies,
        leases_expired: a.leases_expired + b.leases_expired,
        renewals: a.renewals + b.renewals,
        lease_checkpoints: a.lease_checkpoints + b.lease_checkpoints,
        outdated_clocks: a.outdated_clocks + b.outdated_clocks,
        user_changes: a.user_changes + b.user_changes,
        denied: a.denied + b.denied,
        tokens_used: a.tokens_used + b.tokens_used,
        disk_space_warnings: a.disk_space_warnings + b.disk_space_warnings,
        compared: a.compared + b.compared,
        pages: a.pages + b.pages,
        lists: a.lists + b.lists,
        copies_checked: a.copies_checked + b.copies_checked,
        lists_restarted: a.lists_restarted + b.lists_restarted,
        updates: a.updates + b.updates,
        updates_conflicted: a.updates_conflicted + b.updates_conflicted,
        races_won: a.races_won + b.races_won,
        races_lost: a.races_lost + b.races_lost,
        races_compacted: a.races_compacted + b.races_compacted,
    }
}
