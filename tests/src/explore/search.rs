//! The exploration: breadth first as long as the frontier is small, so that the first violation
//! found has a shortest trace; from there depth first, so that memory is hardly more than the
//! visited set.

use std::time::{Duration, Instant};

use crate::explore::breadth::{self, Breadth};
use crate::explore::config::Config;
use crate::explore::depth;
use crate::explore::properties::Violation;
use crate::explore::trace::transcript;
use crate::explore::visited::Visited;
use crate::explore::world::World;

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
    /// States of one depth; beyond that the search goes on depth first.
    pub frontier: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            time: Duration::from_secs(2 * 3600),
            memory: 8 << 30,
            states: usize::MAX,
            threads: 2,
            frontier: 200_000,
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
    /// Every state that can be reached in this many steps was seen.
    pub depth: usize,
    /// The longest path that was followed; as `depth` if all of it was breadth first.
    pub longest: usize,
    /// How long it took.
    pub time: Duration,
    /// The most memory that was resident, in bytes.
    pub memory: u64,
    /// Why it stopped before everything within the bounds was seen.
    pub cut_short: Option<&'static str>,
    /// A violation and a way to it, the shortest one if `depth` is `longest`.
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
    /// The present depth; the length of the longest path once it goes depth first.
    pub depth: usize,
    /// States so far.
    pub states: usize,
    /// States that wait: of this depth, or of the last one that was seen whole.
    pub frontier: usize,
    /// Since the start.
    pub time: Duration,
    /// Resident bytes.
    pub memory: u64,
}

/// What both searches count.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    /// States that were new.
    pub states: usize,
    /// Steps.
    pub steps: usize,
    /// States beyond the epoch bound.
    pub beyond: usize,
    /// Roads.
    pub roads: usize,
}

impl Tally {
    /// Both together.
    pub(super) fn add(&mut self, other: Tally) {
        self.states += other.states;
        self.steps += other.steps;
        self.beyond += other.beyond;
        self.roads += other.roads;
    }
}

/// One search under way: what all threads share.
pub(super) struct Search<'a> {
    /// The bounds.
    pub config: &'a Config,
    /// Its limits.
    pub limits: &'a Limits,
    /// When it began.
    pub began: Instant,
    /// What was seen.
    pub visited: Visited,
}

impl Search<'_> {
    /// The limit that is reached, if one is.
    #[must_use]
    pub(super) fn reached(&self, states: usize) -> Option<&'static str> {
        if self.began.elapsed() >= self.limits.time {
            Some("time")
        } else if resident() >= self.limits.memory {
            Some("memory")
        } else if states >= self.limits.states {
            Some("states")
        } else {
            None
        }
    }
}

/// Explores everything that can follow `start` within the configuration's bounds.
pub fn explore(
    config: &Config,
    start: World,
    limits: &Limits,
    mut progress: impl FnMut(Progress) + Send,
) -> Report {
    let search = Search { config, limits, began: Instant::now(), visited: Visited::default() };
    let Breadth { mut report, steps, frontier, found } =
        breadth::explore(&search, start.clone(), &mut progress);
    let mut found = found.map(|(violation, number, action)| {
        let path = breadth::path(&steps, number, action);
        (violation, path)
    });
    if found.is_none() && report.cut_short.is_none() && !frontier.is_empty() {
        found = depth::explore(&search, &steps, frontier, &mut report, &mut progress);
    }
    report.found = found.map(|(violation, path)| Found {
        violation,
        transcript: transcript(config, &start, &path),
    });
    report.memory = report.memory.max(resident());
    report.time = search.began.elapsed();
    report
}

/// Resident memory of this process, in bytes; 0 where the system doesn't say.
#[must_use]
pub(super) fn resident() -> u64 {
    let pages = fs_err::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|text| text.split_whitespace().nth(1)?.parse::<u64>().ok());
    pages.unwrap_or(0) * 4096
}
