//! Random walks through states that an exhaustive search doesn't reach. They exceed the bounds in
//! two ways: they use more epochs and no reduction. Actions are weighted so that most steps of a
//! walk are progress. Otherwise most walks would end before anything is committed.

use std::time::{Duration, Instant};

use formation_explored::service::Phase;

use crate::explore::actions::{Action, enumerate};
use crate::explore::apply::apply;
use crate::explore::config::Config;
use crate::explore::properties::Violation;
use crate::explore::road;
use crate::explore::search::Found;
use crate::explore::world::World;

/// Maximum number of steps in a walk.
const LENGTH: usize = 400;
/// Number of consecutive drawn actions without effect after which a walk ends.
const IDLE: usize = 200;
/// Highest epoch up to which a walk is followed.
const EPOCHS: u64 = 12;
/// Weights of a fault, of which each walk uses one; a step of progress weighs 10,000.
const FAULTS: [u32; 4] = [30, 100, 400, 1_500];

/// Counters of random walks, and the violation they found.
#[derive(Clone, Debug, Default)]
pub struct Walks {
    /// Number of walks taken.
    pub walks: usize,
    /// Number of steps in all walks.
    pub steps: usize,
    /// Number of walks in which a list was committed.
    pub committed: usize,
    /// Number of walks in which a node started.
    pub started: usize,
    /// Number of walks in which the database was restored after a commit.
    pub restored: usize,
    /// Number of walks that reached a second epoch.
    pub second_epoch: usize,
    /// First violation found. Its path isn't a shortest one.
    pub found: Option<Found>,
}

impl Walks {
    /// Adds the counts of `other`. The first violation is kept.
    pub fn add(&mut self, other: Walks) {
        self.walks += other.walks;
        self.steps += other.steps;
        self.committed += other.committed;
        self.started += other.started;
        self.restored += other.restored;
        self.second_epoch += other.second_epoch;
        self.found = self.found.take().or(other.found);
    }
}

/// SplitMix64 generator: the same seed always gives the same walks.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((word ^ word >> 31) % u64::from(bound.max(1))) as u32
    }
}

/// Walks at random from the initial state, repeatedly, on `threads` threads until `time` is over.
/// Each walk ends with the fault-free road.
#[must_use]
pub fn walk_at_random(config: &Config, seed: u64, time: Duration, threads: usize) -> Walks {
    let config = Config { epochs: EPOCHS, reduced: false, ..config.clone() };
    let config = &config;
    std::thread::scope(|scope| {
        let walk = |thread: u64| scope.spawn(move || some(config, seed ^ thread << 32, time));
        let threads: Vec<_> = (0..threads.max(1) as u64).map(walk).collect();
        let mut all = Walks::default();
        for thread in threads {
            all.add(thread.join().expect("a walker's panic is a bug of the explored code"));
        }
        all
    })
}

fn some(config: &Config, seed: u64, time: Duration) -> Walks {
    let began = Instant::now();
    let mut random = Random(seed);
    let mut walks = Walks::default();
    while began.elapsed() < time && walks.found.is_none() {
        walks.walks += 1;
        let mut transcript = Vec::new();
        if let Err(violation) = one(config, &mut random, &mut transcript, &mut walks) {
            walks.found = Some(Found { violation, transcript });
        }
    }
    walks
}

fn one(
    config: &Config,
    random: &mut Random,
    transcript: &mut Vec<String>,
    walks: &mut Walks,
) -> Result<(), Violation> {
    let mut world = World::new(config);
    let faults = FAULTS[random.below(FAULTS.len() as u32) as usize];
    let mut idle = 0;
    let mut restored = false;
    while transcript.len() < LENGTH && idle < IDLE {
        let actions = enumerate(&world, config);
        let epoch = world.database.cluster.epoch;
        let Some(action) = draw(&world, &actions, faults, random).filter(|_| epoch <= EPOCHS)
        else {
            break;
        };
        let before = transcript.len();
        transcript.push(format!("{:3}. {action}", before + 1));
        let next = apply(&world, config, action)?;
        if next.shares_all_with(&world) || next == world {
            transcript.pop();
            idle += 1;
            continue;
        }
        restored |= matches!(action, Action::Restore(_)) && !world.said.committed.is_empty();
        idle = 0;
        walks.steps += 1;
        world = next;
    }
    walks.committed += usize::from(!world.said.committed.is_empty());
    walks.started += usize::from(!world.said.started.is_empty());
    walks.restored += usize::from(restored);
    walks.second_epoch += usize::from(world.said.epoch > 1);
    if config.liar { Ok(()) } else { road::walk(&world, config) }
}

/// Draws one of `actions` by their weights.
fn draw<'a>(
    world: &World,
    actions: &'a [Action],
    faults: u32,
    random: &mut Random,
) -> Option<&'a Action> {
    let total: u32 = actions.iter().map(|action| weight(world, action, faults)).sum();
    let mut at = random.below(total);
    actions.iter().find(|action| {
        let weight = weight(world, action, faults);
        let here = at < weight;
        at = at.saturating_sub(weight);
        here
    })
}

/// Returns the weight of an action. Progress of the presently frozen list weighs most, and late or
/// useless messages less. Faults have the weight of this walk, and ends of the cluster a tenth of
/// it.
fn weight(world: &World, action: &Action, faults: u32) -> u32 {
    let cluster = &world.database.cluster;
    let frozen = cluster.frozen.as_ref().filter(|_| cluster.phase == Phase::Preparing);
    match action {
        Action::Abandon | Action::Expire => faults / 10,
        // The rest of the walk depends on a restore after a commit.
        Action::Restore(_) if !world.said.committed.is_empty() => 3 * faults,
        Action::LosePatience(..) => faults,
        action if action.is_fault(world) => faults,
        Action::Consider(_, h) if frozen.is_none_or(|frozen| frozen.h != *h) => 500,
        Action::SeeEpoch(..) | Action::Speak(_) | Action::Backup | Action::SpeakLate(_) => 1_000,
        Action::ShowDocument(_) | Action::Report(_) | Action::Lapse(_) => 1_000,
        Action::ClockBack => 1_000,
        _ => 10_000,
    }
}
