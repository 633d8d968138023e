//! Random walks through states that an exhaustive search doesn't reach. They exceed the bounds in
//! two ways: they use more epochs and no reduction. Actions are weighted so that most steps of a
//! walk lead towards a commit. Otherwise most walks would end before one.

use std::time::{Duration, Instant};

use formation_explored::service::Phase;

use crate::explore::actions::SystemAction;
use crate::explore::apply::apply;
use crate::explore::config::ExplorationConfig;
use crate::explore::enumeration::enumerate;
use crate::explore::fault_free_run;
use crate::explore::properties::PropertyViolation;
use crate::explore::search::Counterexample;
use crate::explore::state::SystemState;

/// Maximum number of steps in a walk.
const MAX_STEPS: usize = 400;
/// Number of consecutive drawn actions without effect after which a walk ends.
const MAX_IDLE_DRAWS: usize = 200;
/// Highest epoch up to which a walk is followed.
const EPOCHS: u64 = 12;
/// Possible weights of a fault. Each walk uses one of them. A step of progress weighs 10,000.
const FAULT_WEIGHTS: [u32; 4] = [30, 100, 400, 1_500];

/// Counters of random walks, and the violation they found.
#[derive(Clone, Debug, Default)]
pub struct WalkReport {
    /// Number of walks taken.
    pub walks: usize,
    /// Number of steps in all walks.
    pub steps: usize,
    /// Number of walks in which a list of members was committed.
    pub committed: usize,
    /// Number of walks in which a node started.
    pub started: usize,
    /// Number of walks in which the database was restored after a commit.
    pub restored: usize,
    /// Number of walks that reached a second epoch.
    pub second_epoch: usize,
    /// First violation found. Its path isn't a shortest one.
    pub found: Option<Counterexample>,
}

impl WalkReport {
    /// Adds the counters of `other` to the counters here. If both reports have a violation, this
    /// report's violation is kept.
    pub fn add(&mut self, other: WalkReport) {
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
struct SplitMix64(u64);

impl SplitMix64 {
    fn below(&mut self, bound: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((word ^ word >> 31) % u64::from(bound.max(1))) as u32
    }
}

/// Walks at random from the initial state, repeatedly, on `threads` threads until `time` is over.
/// Each walk ends with the fault-free run.
#[must_use]
pub fn walk_at_random(
    config: &ExplorationConfig,
    seed: u64,
    time: Duration,
    threads: usize,
) -> WalkReport {
    let config = ExplorationConfig { epochs: EPOCHS, reduced: false, ..config.clone() };
    let config = &config;
    std::thread::scope(|scope| {
        let walk = |thread: u64| {
            scope.spawn(move || walk_until_timeout(config, seed ^ thread << 32, time))
        };
        let threads: Vec<_> = (0..threads.max(1) as u64).map(walk).collect();
        let mut all = WalkReport::default();
        for thread in threads {
            all.add(thread.join().expect("a walker's panic is a bug of the explored code"));
        }
        all
    })
}

fn walk_until_timeout(config: &ExplorationConfig, seed: u64, time: Duration) -> WalkReport {
    let began = Instant::now();
    let mut random = SplitMix64(seed);
    let mut walks = WalkReport::default();
    while began.elapsed() < time && walks.found.is_none() {
        walks.walks += 1;
        let mut transcript = Vec::new();
        if let Err(violation) = walk_once(config, &mut random, &mut transcript, &mut walks) {
            walks.found = Some(Counterexample { violation, transcript });
        }
    }
    walks
}

fn walk_once(
    config: &ExplorationConfig,
    random: &mut SplitMix64,
    transcript: &mut Vec<String>,
    walks: &mut WalkReport,
) -> Result<(), PropertyViolation> {
    let mut system = SystemState::new(config);
    let faults = FAULT_WEIGHTS[random.below(FAULT_WEIGHTS.len() as u32) as usize];
    let mut idle = 0;
    let mut restored = false;
    while transcript.len() < MAX_STEPS && idle < MAX_IDLE_DRAWS {
        let actions = enumerate(&system, config);
        let epoch = system.database.cluster.epoch;
        let Some(action) = draw(&system, &actions, faults, random).filter(|_| epoch <= EPOCHS)
        else {
            break;
        };
        let before = transcript.len();
        transcript.push(format!("{:3}. {action}", before + 1));
        let next = apply(&system, config, action)?;
        if next.shares_all_with(&system) || next == system {
            transcript.pop();
            idle += 1;
            continue;
        }
        restored |= matches!(action, SystemAction::Restore(_)) && !system.sent.committed.is_empty();
        idle = 0;
        walks.steps += 1;
        system = next;
    }
    walks.committed += usize::from(!system.sent.committed.is_empty());
    walks.started += usize::from(!system.sent.started.is_empty());
    walks.restored += usize::from(restored);
    walks.second_epoch += usize::from(system.sent.epoch > 1);
    if config.service_lies { Ok(()) } else { fault_free_run::walk(&system, config) }
}

/// Draws one of `actions` by their weights.
fn draw<'a>(
    system: &SystemState,
    actions: &'a [SystemAction],
    faults: u32,
    random: &mut SplitMix64,
) -> Option<&'a SystemAction> {
    let total: u32 = actions.iter().map(|action| weight(system, action, faults)).sum();
    let mut at = random.below(total);
    actions.iter().find(|action| {
        let weight = weight(system, action, faults);
        let here = at < weight;
        at = at.saturating_sub(weight);
        here
    })
}

/// Returns the weight of an action. Progress of the presently frozen list weighs most, and late or
/// useless messages weigh less. Faults weigh `faults`, and ends of the cluster a tenth of that.
fn weight(system: &SystemState, action: &SystemAction, faults: u32) -> u32 {
    let cluster = &system.database.cluster;
    let frozen = cluster.frozen.as_ref().filter(|_| cluster.phase == Phase::Preparing);
    match action {
        SystemAction::Abandon | SystemAction::PassDeadline => faults / 10,
        // A restore after a commit weighs more than other faults, because the rest of the walk
        // depends on it.
        SystemAction::Restore(_) if !system.sent.committed.is_empty() => 3 * faults,
        SystemAction::ReportMissingReleases(..) => faults,
        action if action.is_fault(system) => faults,
        SystemAction::ExamineList(_, h)
            if frozen.is_none_or(|frozen| frozen.proposal_hash != *h) =>
        {
            500
        }
        SystemAction::SeeEpoch(..)
        | SystemAction::Poll(_)
        | SystemAction::Backup
        | SystemAction::DeliverLatePoll(_) => 1_000,
        SystemAction::ShowDocument(_) | SystemAction::Report(_) | SystemAction::Lapse(_) => 1_000,
        SystemAction::ClockBack => 1_000,
        _ => 10_000,
    }
}
