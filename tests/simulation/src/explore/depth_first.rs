//! Depth-first search from a frontier. Each thread follows one path to its end and keeps only the
//! states of that path. If another thread has no work left, the thread hands over the remaining
//! actions of its oldest state. All threads share the visited set.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::explore::actions::SystemAction;
use crate::explore::breadth_first::{self, FrontierState, PathStep};
use crate::explore::properties::PropertyViolation;
use crate::explore::search::{
    ExplorationReport, Search, SearchCounters, SearchProgress, resident_bytes,
};
use crate::explore::successors::{FingerprintedState, check_and_enumerate, take_step};

/// Number of new states after which a thread checks its limits and publishes its counts.
const STATES_BETWEEN_CHECKS: usize = 1024;
/// Interval at which a thread without work checks for a job.
const IDLE_PAUSE: Duration = Duration::from_millis(1);
/// Time between two progress reports.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// A state on a path, its actions, and how many of them were taken.
struct Frame {
    state: FingerprintedState,
    actions: Vec<SystemAction>,
    /// Index of the action with which to begin. Frames begin with different actions, so that an
    /// interrupted search has covered more than one corner of the states.
    first: usize,
    /// Number of actions taken so far.
    taken: usize,
}

impl Frame {
    fn next(&mut self) -> Option<u16> {
        let index = (self.first + self.taken) % self.actions.len().max(1);
        let more = self.taken < self.actions.len();
        self.taken += usize::from(more);
        more.then(|| u16::try_from(index).expect("a state has fewer than 65536 actions"))
    }
}

/// A unit of work: a path from the start to a state, and the rest of that state's actions.
struct Job {
    path: Vec<u16>,
    frame: Option<Frame>,
    state: Option<FingerprintedState>,
}

type ViolationPath = (PropertyViolation, Vec<u16>);

struct ParallelSearch<'a> {
    search: &'a Search<'a>,
    jobs: Mutex<VecDeque<Job>>,
    /// Length of `jobs`, readable without the lock.
    waiting: AtomicUsize,
    idle: AtomicUsize,
    states: AtomicUsize,
    longest: AtomicUsize,
    stop: AtomicBool,
    cut_short: Mutex<Option<&'static str>>,
    found: Mutex<Option<ViolationPath>>,
}

/// Explores all states that follow the states of `frontier`.
pub(super) fn explore(
    search: &Search<'_>,
    steps: &[PathStep],
    frontier: Vec<FrontierState>,
    report: &mut ExplorationReport,
    progress: &mut (impl FnMut(SearchProgress) + Send),
) -> Option<ViolationPath> {
    let mut nodes = frontier;
    // Sort by fingerprint, so that the order doesn't depend on which thread found a state first.
    nodes.sort_unstable_by_key(|node| node.state.fingerprint.whole as u64);
    let jobs: VecDeque<Job> = nodes
        .into_iter()
        .map(|node| Job {
            path: breadth_first::path(steps, node.number, None),
            frame: None,
            state: Some(node.state),
        })
        .collect();
    let shared = ParallelSearch {
        search,
        waiting: AtomicUsize::new(jobs.len()),
        jobs: Mutex::new(jobs),
        idle: AtomicUsize::new(0),
        states: AtomicUsize::new(report.states),
        longest: AtomicUsize::new(report.depth),
        stop: AtomicBool::new(false),
        cut_short: Mutex::new(None),
        found: Mutex::new(None),
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..search.limits.threads.max(1)).map(|_| scope.spawn(|| run_jobs(&shared))).collect();
        while !threads.iter().all(|thread| thread.is_finished()) {
            let memory = resident_bytes();
            report.memory = report.memory.max(memory);
            progress(SearchProgress {
                depth: shared.longest.load(Ordering::Relaxed),
                states: shared.states.load(Ordering::Relaxed),
                frontier: shared.waiting.load(Ordering::Relaxed),
                time: search.began.elapsed(),
                memory,
            });
            let until = std::time::Instant::now() + PROGRESS_INTERVAL;
            while std::time::Instant::now() < until
                && !threads.iter().all(|thread| thread.is_finished())
            {
                // Check often whether the threads have ended, so that the search ends soon after
                // them.
                std::thread::sleep(20 * IDLE_PAUSE);
            }
        }
        for thread in threads {
            let counters = thread
                .join()
                .expect("a worker's panic is a bug of the explored code: it ends the search");
            report.states += counters.states;
            report.steps += counters.steps;
            report.states_beyond_bound += counters.states_beyond_bound;
            report.fault_free_runs += counters.fault_free_runs;
        }
    });
    report.longest = shared.longest.into_inner();
    report.cut_short = shared.cut_short.into_inner().unwrap_or_else(PoisonError::into_inner);
    shared.found.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs jobs on one thread until no thread has any left.
fn run_jobs(shared: &ParallelSearch<'_>) -> SearchCounters {
    let mut counters = SearchCounters::default();
    let mut reported = 0;
    loop {
        let job = lock(&shared.jobs).pop_front();
        let Some(job) = job else {
            shared.idle.fetch_add(1, Ordering::SeqCst);
            // Another thread may still hand over a job.
            while shared.waiting.load(Ordering::SeqCst) == 0 {
                let all = shared.idle.load(Ordering::SeqCst) == shared.search.limits.threads.max(1);
                if all || shared.stop.load(Ordering::Relaxed) {
                    shared.states.fetch_add(counters.states - reported, Ordering::Relaxed);
                    return counters;
                }
                std::thread::sleep(IDLE_PAUSE);
            }
            shared.idle.fetch_sub(1, Ordering::SeqCst);
            continue;
        };
        shared.waiting.fetch_sub(1, Ordering::SeqCst);
        if let Err(found) = run_job(shared, job, &mut counters, &mut reported) {
            lock(&shared.found).get_or_insert(found);
            shared.stop.store(true, Ordering::Relaxed);
        }
        if shared.stop.load(Ordering::Relaxed) {
            return counters;
        }
    }
}

/// Follows one job to its end.
fn run_job(
    shared: &ParallelSearch<'_>,
    job: Job,
    counters: &mut SearchCounters,
    reported: &mut usize,
) -> Result<(), ViolationPath> {
    let search = shared.search;
    let mut path = job.path;
    let mut stack: VecDeque<Frame> = VecDeque::new();
    stack.extend(job.frame);
    if let Some(state) = job.state {
        stack.push_back(open_frame(search, state, &path, counters)?);
    }
    // `path` leads to the last state of the stack. The first `base` steps of `path` lead to the
    // first state of the stack.
    let mut base = path.len();
    while let Some(frame) = stack.back_mut() {
        let Some(index) = frame.next() else {
            stack.pop_back();
            path.truncate((base + stack.len()).saturating_sub(1));
            continue;
        };
        let action = &frame.actions[usize::from(index)];
        let next = take_step(search, &frame.state, action, counters);
        path.push(index);
        match next {
            Err(violation) => return Err((violation, path)),
            Ok(None) => {
                path.pop();
            }
            Ok(Some(state)) => {
                let frame = open_frame(search, state, &path, counters)?;
                stack.push_back(frame);
                shared.longest.fetch_max(path.len(), Ordering::Relaxed);
                if counters.states - *reported >= STATES_BETWEEN_CHECKS {
                    let new_states = counters.states - std::mem::replace(reported, counters.states);
                    let states =
                        shared.states.fetch_add(new_states, Ordering::Relaxed) + new_states;
                    if let Some(limit) = search.reached(states) {
                        lock(&shared.cut_short).get_or_insert(limit);
                        shared.stop.store(true, Ordering::Relaxed);
                    }
                }
                if shared.stop.load(Ordering::Relaxed) {
                    return Ok(());
                }
                if shared.waiting.load(Ordering::Relaxed) < search.limits.threads
                    && stack.len() > 2
                    && let Some(frame) = stack.pop_front()
                {
                    share_job(shared, path[..base].to_vec(), frame);
                    base += 1;
                }
            }
        }
    }
    Ok(())
}

fn open_frame(
    search: &Search<'_>,
    state: FingerprintedState,
    path: &[u16],
    counters: &mut SearchCounters,
) -> Result<Frame, ViolationPath> {
    let actions = check_and_enumerate(search, &state, counters)
        .map_err(|violation| (violation, path.to_vec()))?;
    let first = (state.fingerprint.whole >> 64) as usize % actions.len().max(1);
    Ok(Frame { state, actions, first, taken: 0 })
}

/// Puts the rest of a state's actions into the queue, for a thread without work.
fn share_job(shared: &ParallelSearch<'_>, path: Vec<u16>, frame: Frame) {
    if frame.taken < frame.actions.len() {
        lock(&shared.jobs).push_back(Job { path, frame: Some(frame), state: None });
        shared.waiting.fetch_add(1, Ordering::SeqCst);
    }
}
