//! Breadth-first search: it visits all states of one depth before the next depth.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::explore::properties::Violation;
use crate::explore::search::{Progress, Report, Search, Tally, resident};
use crate::explore::successors::{State, arrive, take};
use crate::explore::world::World;

/// Number of states that a thread takes at a time.
const CHUNK: usize = 64;

/// Step by which a state was reached: the number of its parent, and the index among the parent's
/// actions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    parent: u32,
    action: u16,
}

/// A state of the frontier.
pub(super) struct Node {
    /// Number of the state: its index in the list of steps.
    pub number: u32,
    pub state: State,
}

/// A violation, the number of the state it was found in, and the index of the action that led to
/// it. There is no action if the road from the state violates a property.
type Spotted = (Violation, u32, Option<u16>);

/// Result of the breadth-first search.
pub(super) struct Breadth {
    /// Coverage of the search so far.
    pub report: Report,
    /// Step by which each state was reached.
    pub steps: Vec<Step>,
    /// States whose successors have not been explored.
    pub frontier: Vec<Node>,
    /// A violation with a shortest path.
    pub found: Option<Spotted>,
}

/// Returns the action indices that lead from the start to state `number`, followed by `last`.
#[must_use]
pub(super) fn path(steps: &[Step], number: u32, last: Option<u16>) -> Vec<u16> {
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
    start: World,
    progress: &mut impl FnMut(Progress),
) -> Breadth {
    let start = State::of(start, search);
    search.visited.insert(start.print.whole);
    let steps = vec![Step { parent: 0, action: 0 }];
    let frontier = vec![Node { number: 0, state: start }];
    let mut breadth = Breadth { report: Report::default(), steps, frontier, found: None };
    let mut tally = Tally { states: 1, ..Tally::default() };
    while !breadth.frontier.is_empty() && breadth.frontier.len() <= search.limits.frontier {
        let memory = resident();
        breadth.report.memory = breadth.report.memory.max(memory);
        progress(Progress {
            depth: breadth.report.depth,
            states: tally.states,
            frontier: breadth.frontier.len(),
            time: search.began.elapsed(),
            memory,
        });
        one_depth(search, &mut breadth, &mut tally);
        if breadth.found.is_some() {
            break;
        }
        breadth.report.depth += usize::from(!breadth.frontier.is_empty());
        breadth.report.cut_short = search.reached(tally.states);
        if breadth.report.cut_short.is_some() {
            break;
        }
    }
    let report = &mut breadth.report;
    report.longest = report.depth;
    (report.states, report.steps) = (tally.states, tally.steps);
    (report.beyond, report.roads) = (tally.beyond, tally.roads);
    breadth
}

fn one_depth(search: &Search<'_>, breadth: &mut Breadth, tally: &mut Tally) {
    let harvests = expand(search, &breadth.frontier, tally.states);
    breadth.frontier.clear();
    for harvest in harvests {
        tally.add(harvest.tally);
        // Taking the smallest state number makes the result independent of how the threads ran.
        if let Some(candidate) = harvest.found
            && breadth.found.as_ref().is_none_or(|known| candidate.1 < known.1)
        {
            breadth.found = Some(candidate);
        }
        for (step, state) in harvest.fresh {
            let number =
                u32::try_from(breadth.steps.len()).expect("the frontier is bounded far below");
            breadth.steps.push(step);
            breadth.frontier.push(Node { number, state });
        }
    }
}

/// States, counts and violation that one thread found at one depth.
#[derive(Default)]
struct Harvest {
    fresh: Vec<(Step, State)>,
    tally: Tally,
    found: Option<Spotted>,
}

/// Expands every state of the frontier, on several threads if the frontier is large.
fn expand(search: &Search<'_>, frontier: &[Node], states: usize) -> Vec<Harvest> {
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let fresh = AtomicUsize::new(states);
    let work = || {
        let mut harvest = Harvest::default();
        loop {
            let from = next.fetch_add(CHUNK, Ordering::Relaxed);
            if from >= frontier.len()
                || stop.load(Ordering::Relaxed)
                || search.reached(fresh.load(Ordering::Relaxed)).is_some()
            {
                return harvest;
            }
            let before = harvest.fresh.len();
            for node in &frontier[from..frontier.len().min(from + CHUNK)] {
                if let Err((violation, action)) = expand_one(search, node, &mut harvest) {
                    harvest.found = Some((violation, node.number, action));
                    stop.store(true, Ordering::Relaxed);
                    return harvest;
                }
            }
            fresh.fetch_add(harvest.fresh.len() - before, Ordering::Relaxed);
        }
    };
    if search.limits.threads < 2 || frontier.len() < 4 * CHUNK {
        return vec![work()];
    }
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..search.limits.threads).map(|_| scope.spawn(work)).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Harvest>| {
            thread
                .join()
                .expect("a worker's panic is a bug of the explored code: it ends the search")
        };
        threads.into_iter().map(join).collect()
    })
}

fn expand_one(
    search: &Search<'_>,
    node: &Node,
    harvest: &mut Harvest,
) -> Result<(), (Violation, Option<u16>)> {
    let state = &node.state;
    let actions =
        arrive(search, state, &mut harvest.tally).map_err(|violation| (violation, None))?;
    for (place, action) in (0..).zip(&actions) {
        let next = take(search, state, action, &mut harvest.tally)
            .map_err(|violation| (violation, Some(place)))?;
        if let Some(next) = next {
            harvest.fresh.push((Step { parent: node.number, action: place }, next));
        }
    }
    Ok(())
}
