//! Entry point of the exploration. The search is breadth first while the frontier is small, so that
//! the first violation found has a shortest path. Then it continues depth first, which needs hardly
//! more memory than the visited set.

use std::time::{Duration, Instant};

use crate::explore::breadth_first::{self, BreadthFirstResult};
use crate::explore::config::ExplorationConfig;
use crate::explore::depth_first;
use crate::explore::properties::PropertyViolation;
use crate::explore::state::SystemState;
use crate::explore::trace::transcript;
use crate::explore::visited::VisitedSet;

/// Limits at which an exploration stops before it is complete.
#[derive(Clone, Copy, Debug)]
pub struct SearchLimits {
    /// Maximum wall-clock time of the search.
    pub time: Duration,
    /// Maximum resident memory of the process, in bytes.
    pub memory: u64,
    /// Maximum number of visited states.
    pub states: usize,
    /// Number of threads that search.
    pub threads: usize,
    /// Maximum number of states in a breadth-first frontier. With more, the search continues depth
    /// first.
    pub frontier: usize,
}

impl Default for SearchLimits {
    fn default() -> SearchLimits {
        SearchLimits {
            time: Duration::from_secs(2 * 3600),
            memory: 8 << 30,
            states: usize::MAX,
            threads: 2,
            frontier: 200_000,
        }
    }
}

/// Coverage of an exploration, and the violation that it found.
#[derive(Clone, Debug, Default)]
pub struct ExplorationReport {
    /// Number of visited states; states that differ only by a permutation of hosts count once.
    pub states: usize,
    /// Number of steps taken between states.
    pub steps: usize,
    /// Number of states beyond the epoch bound. They were checked, but their successors weren't
    /// explored.
    pub states_beyond_bound: usize,
    /// Number of fault-free runs.
    pub fault_free_runs: usize,
    /// Number of steps from the start within which every state was visited.
    pub depth: usize,
    /// Length of the longest path that was followed. It equals `depth` if the search was breadth
    /// first only.
    pub longest: usize,
    /// Duration of the exploration.
    pub time: Duration,
    /// Largest resident memory, in bytes.
    pub memory: u64,
    /// Limit that stopped the search early, if one did.
    pub cut_short: Option<&'static str>,
    /// Violation and a path to it. The path is a shortest one if `depth` equals `longest`.
    pub found: Option<Counterexample>,
}

/// A violation and the path that leads to it.
#[derive(Clone, Debug)]
pub struct Counterexample {
    /// Property that doesn't hold.
    pub violation: PropertyViolation,
    /// Description of each step of the path.
    pub transcript: Vec<String>,
}

impl ExplorationReport {
    /// Returns whether all states within the bounds were visited and no violation was found.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.cut_short.is_none() && self.found.is_none()
    }
}

/// Progress of a search that is still running.
#[derive(Clone, Copy, Debug)]
pub struct SearchProgress {
    /// Present depth of the breadth-first search; during the depth-first one, the length of the
    /// longest path.
    pub depth: usize,
    /// Number of states visited so far.
    pub states: usize,
    /// Number of states in the breadth-first frontier; during the depth-first search, the number of
    /// jobs in the queue.
    pub frontier: usize,
    /// Time since the search began.
    pub time: Duration,
    /// Resident memory, in bytes.
    pub memory: u64,
}

/// Counters of both searches.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SearchCounters {
    /// Number of states visited for the first time.
    pub states: usize,
    /// Number of steps taken.
    pub steps: usize,
    /// Number of states beyond the epoch bound.
    pub states_beyond_bound: usize,
    /// Number of fault-free runs.
    pub fault_free_runs: usize,
}

impl SearchCounters {
    /// Adds the counters of `other` to the counters here.
    pub(super) fn add(&mut self, other: SearchCounters) {
        self.states += other.states;
        self.steps += other.steps;
        self.states_beyond_bound += other.states_beyond_bound;
        self.fault_free_runs += other.fault_free_runs;
    }
}

/// A search under way, shared by all threads.
pub(super) struct Search<'a> {
    /// Configuration that is explored.
    pub config: &'a ExplorationConfig,
    pub limits: &'a SearchLimits,
    pub began: Instant,
    /// Fingerprints of all visited states.
    pub visited: VisitedSet,
}

impl Search<'_> {
    /// Returns the name of a limit that the search has reached, if there is one.
    #[must_use]
    pub(super) fn reached(&self, states: usize) -> Option<&'static str> {
        if self.began.elapsed() >= self.limits.time {
            Some("time")
        } else if resident_bytes() >= self.limits.memory {
            Some("memory")
        } else if states >= self.limits.states {
            Some("states")
        } else {
            None
        }
    }
}

/// Explores all states that can follow `start` within the configuration's bounds.
pub fn explore(
    config: &ExplorationConfig,
    start: SystemState,
    limits: &SearchLimits,
    mut progress: impl FnMut(SearchProgress) + Send,
) -> ExplorationReport {
    let search = Search { config, limits, began: Instant::now(), visited: VisitedSet::default() };
    let BreadthFirstResult { mut report, steps, frontier, found } =
        breadth_first::explore(&search, start.clone(), &mut progress);
    let mut found = found.map(|(violation, number, action)| {
        let path = breadth_first::path(&steps, number, action);
        (violation, path)
    });
    if found.is_none() && report.cut_short.is_none() && !frontier.is_empty() {
        found = depth_first::explore(&search, &steps, frontier, &mut report, &mut progress);
    }
    report.found = found.map(|(violation, path)| Counterexample {
        violation,
        transcript: transcript(config, &start, &path),
    });
    report.memory = report.memory.max(resident_bytes());
    report.time = search.began.elapsed();
    report
}

/// Returns the resident memory of this process in bytes, or 0 if the system doesn't report it.
#[must_use]
pub(super) fn resident_bytes() -> u64 {
    let pages = fs_err::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|text| text.split_whitespace().nth(1)?.parse::<u64>().ok());
    pages.unwrap_or(0) * 4096
}
