//! Breadth-first search: it visits all states of one depth before the next depth.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::explore::properties::PropertyViolation;
use crate::explore::search::{
    ExplorationReport, Search, SearchCounters, SearchProgress, resident_bytes,
};
use crate::explore::state::SystemState;
use crate::explore::successors::{FingerprintedState, check_and_enumerate, take_step};

/// Number of states that a thread takes at a time.
const STATES_PER_CHUNK: usize = 64;

/// Step by which a state was reached: the number of its parent state, and the action's index among
/// the actions of the parent.
#[derive(Clone, Copy, Debug)]
pub(super) struct PathStep {
    parent: u32,
    action: u16,
}

/// A state of the frontier.
pub(super) struct FrontierState {
    /// Number of the state: its index in the list of steps.
    pub number: u32,
    pub state: FingerprintedState,
}

/// A violation, the number of the state in which it was found, and the index of the action that
/// caused it. There is no action if the fault-free run from the state violates a property.
type FoundViolation = (PropertyViolation, u32, Option<u16>);

/// Result of the breadth-first search.
pub(super) struct BreadthFirstResult {
    /// Coverage of the search so far.
    pub report: ExplorationReport,
    /// Step by which each state was reached.
    pub steps: Vec<PathStep>,
    /// States whose successors have not been explored.
    pub frontier: Vec<FrontierState>,
    /// A violation with a shortest path.
    pub found: Option<FoundViolation>,
}

/// Returns the action indices that lead from the start to state `number`, followed by `last`.
#[must_use]
pub(super) fn path(steps: &[PathStep], number: u32, last: Option<u16>) -> Vec<u16> {
    let mut path: Vec<u16> = last.into_iter().collect();
    let mut at = number;
    while at != 0 {
        let step = steps[at as usize];
        path.push(step.action);
        at = step.parent;
    }
    path.reverse();
    path
}

/// Explores until everything was visited, a limit is reached, or the frontier is too large.
pub(super) fn explore(
    search: &Search<'_>,
    start: SystemState,
    progress: &mut impl FnMut(SearchProgress),
) -> BreadthFirstResult {
    let start = FingerprintedState::new(start, search);
    search.visited.insert(start.fingerprint.whole);
    let steps = vec![PathStep { parent: 0, action: 0 }];
    let frontier = vec![FrontierState { number: 0, state: start }];
    let mut breadth =
        BreadthFirstResult { report: ExplorationReport::default(), steps, frontier, found: None };
    let mut counters = SearchCounters { states: 1, ..SearchCounters::default() };
    while !breadth.frontier.is_empty() && breadth.frontier.len() <= search.limits.frontier {
        let memory = resident_bytes();
        breadth.report.memory = breadth.report.memory.max(memory);
        progress(SearchProgress {
            depth: breadth.report.depth,
            states: counters.states,
            frontier: breadth.frontier.len(),
            time: search.began.elapsed(),
            memory,
        });
        explore_depth(search, &mut breadth, &mut counters);
        if breadth.found.is_some() {
            break;
        }
        breadth.report.depth += usize::from(!breadth.frontier.is_empty());
        breadth.report.cut_short = search.reached(counters.states);
        if breadth.report.cut_short.is_some() {
            break;
        }
    }
    let report = &mut breadth.report;
    report.longest = report.depth;
    (report.states, report.steps) = (counters.states, counters.steps);
    (report.states_beyond_bound, report.fault_free_runs) =
        (counters.states_beyond_bound, counters.fault_free_runs);
    breadth
}

fn explore_depth(
    search: &Search<'_>,
    breadth: &mut BreadthFirstResult,
    counters: &mut SearchCounters,
) {
    let results = expand(search, &breadth.frontier, counters.states);
    breadth.frontier.clear();
    for result in results {
        counters.add(result.counters);
        // Of several violations, the one with the smallest state number is kept. So the result
        // doesn't depend on the order in which threads ran.
        if let Some(candidate) = result.found
            && breadth.found.as_ref().is_none_or(|known| candidate.1 < known.1)
        {
            breadth.found = Some(candidate);
        }
        for (step, state) in result.new_states {
            let number =
                u32::try_from(breadth.steps.len()).expect("the frontier is bounded far below");
            breadth.steps.push(step);
            breadth.frontier.push(FrontierState { number, state });
        }
    }
}

/// States, counts and violation that one thread found at one depth.
#[derive(Default)]
struct ThreadResult {
    new_states: Vec<(PathStep, FingerprintedState)>,
    counters: SearchCounters,
    found: Option<FoundViolation>,
}

/// Expands every state of the frontier, on several threads if the frontier is large.
fn expand(search: &Search<'_>, frontier: &[FrontierState], states: usize) -> Vec<ThreadResult> {
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let new_states = AtomicUsize::new(states);
    let work = || {
        let mut result = ThreadResult::default();
        loop {
            let from = next.fetch_add(STATES_PER_CHUNK, Ordering::Relaxed);
            if from >= frontier.len()
                || stop.load(Ordering::Relaxed)
                || search.reached(new_states.load(Ordering::Relaxed)).is_some()
            {
                return result;
            }
            let before = result.new_states.len();
            for node in &frontier[from..frontier.len().min(from + STATES_PER_CHUNK)] {
                if let Err((violation, action)) = expand_one(search, node, &mut result) {
                    result.found = Some((violation, node.number, action));
                    stop.store(true, Ordering::Relaxed);
                    return result;
                }
            }
            new_states.fetch_add(result.new_states.len() - before, Ordering::Relaxed);
        }
    };
    if search.limits.threads < 2 || frontier.len() < 4 * STATES_PER_CHUNK {
        return vec![work()];
    }
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..search.limits.threads).map(|_| scope.spawn(work)).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, ThreadResult>| {
            thread
                .join()
                .expect("a worker's panic is a bug of the explored code: it ends the search")
        };
        threads.into_iter().map(join).collect()
    })
}

fn expand_one(
    search: &Search<'_>,
    node: &FrontierState,
    result: &mut ThreadResult,
) -> Result<(), (PropertyViolation, Option<u16>)> {
    let state = &node.state;
    let actions = check_and_enumerate(search, state, &mut result.counters)
        .map_err(|violation| (violation, None))?;
    for (index, action) in (0..).zip(&actions) {
        let next = take_step(search, state, action, &mut result.counters)
            .map_err(|violation| (violation, Some(index)))?;
        if let Some(next) = next {
            result.new_states.push((PathStep { parent: node.number, action: index }, next));
        }
    }
    Ok(())
}
