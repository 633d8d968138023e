//! Breadth first over all interleavings, so that the first violation found has a shortest trace.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::explore::actions::enumerate;
use crate::explore::apply::apply;
use crate::explore::config::Config;
use crate::explore::fingerprint::fingerprint;
use crate::explore::properties::Violation;
use crate::explore::road;
use crate::explore::visited::Visited;
use crate::explore::world::World;

/// How many states a thread takes at a time.
const CHUNK: usize = 256;

/// When to stop short of everything.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Wall time.
    pub time: Duration,
    /// Resident memory of the process, in bytes.
    pub memory: u64,
    /// States.
    pub states: usize,
    /// Threads.
    pub threads: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            time: Duration::from_secs(2 * 3600),
            memory: 8 << 30,
            states: u32::MAX as usize,
            threads: 2,
        }
    }
}

/// What was covered, and what was found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Different states, up to which host is which.
    pub states: usize,
    /// Steps taken between them.
    pub steps: usize,
    /// States beyond the epoch bound: looked at, not followed.
    pub beyond: usize,
    /// Fault-free roads walked.
    pub roads: usize,
    /// The longest shortest path.
    pub depth: usize,
    /// How long it took.
    pub time: Duration,
    /// The most memory that was resident, in bytes.
    pub memory: u64,
    /// Why it stopped before everything within the bounds was seen.
    pub cut_short: Option<&'static str>,
    /// A violation and the shortest way to it.
    pub found: Option<Found>,
}

/// A violation and how to get there.
#[derive(Clone, Debug)]
pub struct Found {
    /// What does not hold.
    pub violation: Violation,
    /// The steps, in words.
    pub transcript: Vec<String>,
}

impl Report {
    /// Everything within the bounds was seen.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.cut_short.is_none() && self.found.is_none()
    }
}

/// Progress of a long search.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// The present depth.
    pub depth: usize,
    /// States so far.
    pub states: usize,
    /// States of this depth.
    pub frontier: usize,
    /// Since the start.
    pub time: Duration,
    /// Resident bytes.
    pub memory: u64,
}

/// How a state was reached: its parent's number and which of the parent's actions.
#[derive(Clone, Copy)]
struct Step {
    parent: u32,
    action: u16,
}

struct Node {
    number: u32,
    world: World,
}

/// What one thread found at one depth.
#[derive(Default)]
struct Harvest {
    fresh: Vec<(Step, World)>,
    steps: usize,
    beyond: usize,
    roads: usize,
    /// The violation, the state that it was found in, and the action, if one led out of it.
    found: Option<(Violation, u32, Option<u16>)>,
}

/// Explores everything that can follow `start` within the configuration's bounds.
pub fn explore(
    config: &Config,
    start: World,
    limits: &Limits,
    mut progress: impl FnMut(Progress),
) -> Report {
    let began = Instant::now();
    let visited = Visited::default();
    visited.insert(fingerprint(&start, config.hosts));
    let mut steps: Vec<Step> = vec![Step { parent: 0, action: 0 }];
    let mut frontier = vec![Node { number: 0, world: start.clone() }];
    let mut report = Report::default();
    let stop = AtomicBool::new(false);
    while !frontier.is_empty() {
        let memory = resident();
        report.memory = report.memory.max(memory);
        progress(Progress {
            depth: report.depth,
            states: steps.len(),
            frontier: frontier.len(),
            time: began.elapsed(),
            memory,
        });
        let deadline = began + limits.time;
        let harvests = expand(config, &frontier, &visited, limits, deadline, &stop);
        drop(frontier);
        frontier = Vec::new();
        let mut found: Option<(Violation, u32, Option<u16>)> = None;
        for harvest in harvests {
            report.steps += harvest.steps;
            report.beyond += harvest.beyond;
            report.roads += harvest.roads;
            // The smallest number makes the answer the same however the threads ran.
            if let Some(candidate) = harvest.found
                && found.as_ref().is_none_or(|known| candidate.1 < known.1)
            {
                found = Some(candidate);
            }
            for (step, world) in harvest.fresh {
                let number = u32::try_from(steps.len()).expect("the limit of states is below 2^32");
                steps.push(step);
                frontier.push(Node { number, world });
            }
        }
        if let Some((violation, number, action)) = found {
            let transcript = transcript(config, &start, &steps, number, action);
            report.found = Some(Found { violation, transcript });
            break;
        }
        report.depth += usize::from(!frontier.is_empty());
        report.cut_short = if began.elapsed() >= limits.time {
            Some("time")
        } else if resident() >= limits.memory {
            Some("memory")
        } else if steps.len() >= limits.states {
            Some("states")
        } else {
            None
        };
        if report.cut_short.is_some() {
            break;
        }
    }
    report.states = steps.len();
    report.memory = report.memory.max(resident());
    report.time = began.elapsed();
    report
}

/// Every successor of every state of the frontier.
fn expand(
    config: &Config,
    frontier: &[Node],
    visited: &Visited,
    limits: &Limits,
    deadline: Instant,
    stop: &AtomicBool,
) -> Vec<Harvest> {
    let next = AtomicUsize::new(0);
    let fresh = AtomicUsize::new(0);
    let work = || {
        let mut harvest = Harvest::default();
        loop {
            let from = next.fetch_add(CHUNK, Ordering::Relaxed);
            // Memory is looked at once in a while: a depth can be larger than all before it.
            let late = Instant::now() >= deadline || resident() >= limits.memory;
            let full = fresh.load(Ordering::Relaxed) >= limits.states;
            if from >= frontier.len() || stop.load(Ordering::Relaxed) || late || full {
                return harvest;
            }
            for node in &frontier[from..frontier.len().min(from + CHUNK)] {
                let before = harvest.fresh.len();
                if let Err((violation, action)) = expand_one(config, node, visited, &mut harvest) {
                    harvest.found = Some((violation, node.number, action));
                    stop.store(true, Ordering::Relaxed);
                    return harvest;
                }
                fresh.fetch_add(harvest.fresh.len() - before, Ordering::Relaxed);
            }
        }
    };
    if limits.threads < 2 || frontier.len() < 2 * CHUNK {
        return vec![work()];
    }
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..limits.threads).map(|_| scope.spawn(work)).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Harvest>| {
            thread
                .join()
                .expect("a worker's panic is a bug of the explored code: it ends the search")
        };
        threads.into_iter().map(join).collect()
    })
}

fn expand_one(
    config: &Config,
    node: &Node,
    visited: &Visited,
    harvest: &mut Harvest,
) -> Result<(), (Violation, Option<u16>)> {
    let world = &node.world;
    if config.roads > 0 && !config.liar && u64::from(node.number) % config.roads == 0 {
        harvest.roads += 1;
        road::walk(world, config).map_err(|violation| (violation, None))?;
    }
    if world.database.cluster.epoch > config.epochs {
        harvest.beyond += 1;
        return Ok(());
    }
    for (place, action) in enumerate(world, config).iter().enumerate() {
        let place = u16::try_from(place).expect("a state has fewer than 65536 actions");
        let next = apply(world, config, action).map_err(|violation| (violation, Some(place)))?;
        if next == *world {
            continue;
        }
        harvest.steps += 1;
        if visited.insert(fingerprint(&next, config.hosts)) {
            harvest.fresh.push((Step { parent: node.number, action: place }, next));
        }
    }
    Ok(())
}

/// The steps from `start` to state `number`, and the last one, in words.
fn transcript(
    config: &Config,
    start: &World,
    steps: &[Step],
    number: u32,
    last: Option<u16>,
) -> Vec<String> {
    let mut path: Vec<u16> = last.into_iter().collect();
    let mut at = number;
    while at != 0 {
        let step = steps[at as usize];
        path.push(step.action);
        at = step.parent;
    }
    path.reverse();
    let mut world = start.clone();
    let mut lines = Vec::with_capacity(path.len() + 1);
    for place in path {
        let actions = enumerate(&world, config);
        let action = &actions[usize::from(place)];
        let line = format!("{:3}. {action}", lines.len() + 1);
        match apply(&world, config, action) {
            Ok(next) => {
                lines.push(format!("{line}{}", shows(&world, &next)));
                world = next;
            }
            Err(violation) => {
                lines.push(line);
                lines.push(format!("     VIOLATED {violation}"));
                return lines;
            }
        }
    }
    if let Err(violation) = road::walk(&world, config) {
        lines.push(format!("     and on the road from there: VIOLATED {violation}"));
    }
    lines
}

/// What of the service's state the step has changed, for a reader.
fn shows(before: &World, after: &World) -> String {
    let state = |world: &World| {
        let cluster = &world.database.cluster;
        format!("{} e{}", cluster.phase.as_str(), cluster.epoch)
    };
    let (was, is) = (state(before), state(after));
    if was == is { String::new() } else { format!("   [{was} → {is}]") }
}

/// Resident memory of this process, in bytes; 0 where the system doesn't say.
#[must_use]
pub fn resident() -> u64 {
    let pages = fs_err::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|text| text.split_whitespace().nth(1)?.parse::<u64>().ok());
    pages.unwrap_or(0) * 4096
}
