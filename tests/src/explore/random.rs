//! Random walks: what is beyond the reach of an exhaustive search, seen here and there.

use std::time::{Duration, Instant};

use crate::explore::actions::{Action, enumerate};
use crate::explore::apply::apply;
use crate::explore::config::Config;
use crate::explore::properties::Violation;
use crate::explore::road;
use crate::explore::search::Found;
use crate::explore::world::World;

/// A walk ends after this many steps.
const LENGTH: usize = 250;

/// Of the faults that are drawn, one in this many happens: else every walk ends early.
const FAULTS_ONE_IN: usize = 24;

/// What random walks have seen.
#[derive(Clone, Debug, Default)]
pub struct Walks {
    /// How many.
    pub walks: usize,
    /// Steps in all of them.
    pub steps: usize,
    /// A violation, not the shortest.
    pub found: Option<Found>,
}

/// SplitMix64: the walks of one seed are always the same.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((word ^ word >> 31) % bound.max(1) as u64) as usize
    }
}

/// Walks at random from the beginning, again and again, until `time` is over; each walk ends in the
/// fault-free road.
#[must_use]
pub fn walk_at_random(config: &Config, seed: u64, time: Duration) -> Walks {
    let began = Instant::now();
    let mut random = Random(seed);
    let mut walks = Walks::default();
    while began.elapsed() < time && walks.found.is_none() {
        walks.walks += 1;
        let mut transcript = Vec::new();
        if let Err(violation) = one(config, &mut random, &mut transcript, &mut walks.steps) {
            walks.found = Some(Found { violation, transcript });
        }
    }
    walks
}

fn one(
    config: &Config,
    random: &mut Random,
    transcript: &mut Vec<String>,
    steps: &mut usize,
) -> Result<(), Violation> {
    let mut world = World::new(config);
    let mut idle = 0;
    while transcript.len() < LENGTH && idle < 64 {
        let actions = enumerate(&world, config);
        if actions.is_empty() || world.database.cluster.epoch > config.epochs {
            break;
        }
        let action = &actions[random.below(actions.len())];
        if is_fault(action) && random.below(FAULTS_ONE_IN) != 0 {
            continue;
        }
        let before = transcript.len();
        transcript.push(format!("{:3}. {action}", before + 1));
        let next = apply(&world, config, action)?;
        if next == world {
            transcript.pop();
            idle += 1;
            continue;
        }
        idle = 0;
        *steps += 1;
        world = next;
    }
    if config.liar { Ok(()) } else { road::walk(&world, config) }
}

/// Something breaks, or a person gives up.
fn is_fault(action: &Action) -> bool {
    matches!(
        action,
        Action::Lapse(_)
            | Action::TimeOut
            | Action::Abandon
            | Action::Expire
            | Action::Accept
            | Action::Restore
            | Action::Kill(_)
            | Action::Die(_)
            | Action::LoseDirectory(_)
            | Action::Remake(_)
            | Action::Clone(..)
            | Action::Crash(_)
    )
}
