//! Random operations on a disk that fails at random points, compared with a model. After a crash,
//! everything acknowledged must still exist. The recovered state must be one that the model allows.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};

use node_consensus::Guards;
use node_state::disk::simulated::IgnoredSyncs;

use super::*;

#[derive(Clone, Debug)]
enum LogAction {
    Write(Vec<BatchContent>),
    Seal,
    Prepare,
    Compact { back: u64 },
    PowerOff { after: u64 },
    Crash,
    Kill,
}

/// Content of one batch.
#[derive(Clone, Debug)]
enum BatchContent {
    /// Appends entries of these sizes. The first of them replaces the entry that lies `back`
    /// entries before the end.
    Append {
        sizes: Vec<usize>,
        back: u64,
        term_up: u64,
        vote: u64,
    },
    Install {
        ahead: u64,
    },
    Installed {
        ahead: u64,
    },
}

fn batch_content() -> impl Strategy<Value = BatchContent> {
    let size = prop_oneof![8 => 0..200_usize, 1 => 3000..9000_usize];
    let append = (vec(size, 0..12), 0..6_u64, 0..2_u64, 0..4_u64);
    prop_oneof![
        24 => append.prop_map(|(sizes, back, term_up, vote)| BatchContent::Append { sizes, back, term_up, vote }),
        1 => (0..30_u64).prop_map(|ahead| BatchContent::Install { ahead }),
        1 => (0..30_u64).prop_map(|ahead| BatchContent::Installed { ahead }),
    ]
}

fn log_action() -> impl Strategy<Value = LogAction> {
    prop_oneof![
        12 => vec(batch_content(), 1..4).prop_map(LogAction::Write),
        1 => Just(LogAction::Seal),
        2 => Just(LogAction::Prepare),
        3 => (0..40_u64).prop_map(|back| LogAction::Compact { back }),
        4 => (1..12_u64).prop_map(|after| LogAction::PowerOff { after }),
        2 => Just(LogAction::Crash),
        1 => Just(LogAction::Kill),
    ]
}

impl BatchContent {
    fn batch(&self, now: &LogModel) -> Batch {
        match self {
            Self::Append { sizes, back, term_up, vote } => {
                let term = now.last().term.max(now.hard_state.term) + term_up;
                let first = now.last().index.saturating_sub(*back).max(now.base.index) + 1;
                let entry = |(index, bytes): (u64, &usize)| entry(index, term, *bytes);
                Batch {
                    hard_state: (*vote < 3).then(|| hard_state(term, *vote, now.base.index)),
                    ..batch((first..).zip(sizes).map(entry).collect())
                }
            }
            Self::Install { ahead } => {
                let at = at(now.last().index + ahead, now.last().term.max(1));
                Batch { installing: Some(at), ..Batch::default() }
            }
            Self::Installed { ahead } => {
                let at = at(now.last().index + ahead, now.last().term.max(1));
                let state = hard_state(now.hard_state.term.max(at.term), 0, at.index);
                Batch { snapshot: Some(at), hard_state: Some(state), ..Batch::default() }
            }
        }
    }
}

/// Expected content of a log.
#[derive(Clone, Debug, Default, PartialEq)]
struct LogModel {
    base: Position,
    entries: BTreeMap<u64, Entry>,
    hard_state: HardState,
    installing: Option<Position>,
}

impl LogModel {
    fn last(&self) -> Position {
        self.entries.last_key_value().map_or(self.base, |(index, entry)| at(*index, entry.term))
    }

    fn restore(&mut self, at: Position) {
        self.entries.clear();
        self.base = at;
        self.installing = None;
    }

    fn compact(&mut self, through: u64) {
        let term = self.entries[&through].term;
        self.entries = self.entries.split_off(&(through + 1));
        self.base = at(through, term);
    }

    fn push(&mut self, entry: &Entry) {
        self.entries.split_off(&entry.index);
        self.entries.insert(entry.index, entry.clone());
    }

    /// Returns every state that a crash during the write of `batch` may leave. The last state
    /// contains the whole batch.
    fn states(&self, batch: &Batch) -> Vec<Self> {
        let mut now = self.clone();
        let mut states = Vec::new();
        if let Some(at) = batch.installing {
            now.installing = Some(at);
            states.push(now.clone());
        }
        if let Some(at) = batch.snapshot {
            now.restore(at);
            states.push(now.clone());
        }
        if let Some(state) = batch.hard_state {
            now.hard_state =
                HardState { commit: self.hard_state.commit.min(state.commit), ..state };
            states.push(now.clone());
        }
        for entry in &batch.entries {
            now.push(entry);
            states.push(now.clone());
        }
        now.hard_state = batch.hard_state.unwrap_or(self.hard_state);
        states.push(now);
        states
    }
}

struct CrashTest {
    disk: SimulatedDisk,
    options: LogOptions,
    log: Option<Log>,
    /// State of the log after the last successful operation.
    acknowledged: LogModel,
    /// States that the unfinished operations may have left. The last one is the state without a
    /// crash.
    possible: Vec<LogModel>,
    boot: u64,
}

/// Fault that is injected.
#[derive(Clone, Copy)]
enum InjectedFault {
    Nothing,
    Disk(IgnoredSyncs),
    Guards(Guards),
}

impl CrashTest {
    fn new(seed: u64, wrong: InjectedFault) -> Result<Self, String> {
        let disk = disk(seed);
        let mut options = small_segments();
        match wrong {
            InjectedFault::Nothing => {}
            InjectedFault::Disk(lies) => disk.ignore_syncs(lies),
            InjectedFault::Guards(guards) => options.guards = guards,
        }
        Log::create(&disk.shared(), member(), &identity(), &options).unwrap();
        let acknowledged = LogModel::default();
        let mut life =
            Self { disk, options, log: None, acknowledged, possible: Vec::new(), boot: 0 };
        life.reopen()?;
        Ok(life)
    }

    fn current(&self) -> &LogModel {
        self.possible.last().unwrap_or(&self.acknowledged)
    }

    fn act(&mut self, act: &LogAction) -> Result<(), String> {
        let Some(mut log) = self.log.take() else { return Ok(()) };
        let done = match act {
            LogAction::Write(changes) => {
                let mut batches = Vec::new();
                for change in changes {
                    let now = self.current().clone();
                    let batch = change.batch(&now);
                    self.possible.extend(now.states(&batch));
                    batches.push(batch);
                }
                log.write(&batches)
            }
            LogAction::Compact { back } => {
                let now = self.current().clone();
                let through = now.last().index.saturating_sub(*back);
                let mut after = now.clone();
                if through > now.base.index {
                    after.compact(through);
                    self.possible.push(after.clone());
                }
                log.compact(through).map(|base| {
                    self.possible = vec![if base == after.base { after } else { now }];
                })
            }
            LogAction::Seal => log.write(&[Batch::default()]),
            LogAction::Prepare => log.prepare().map(|_| ()),
            LogAction::PowerOff { after } => {
                self.disk.power_off_after(*after);
                Ok(())
            }
            LogAction::Crash => {
                self.disk.crash();
                return self.reopen();
            }
            LogAction::Kill => {
                self.disk.kill();
                return self.reopen();
            }
        };
        match done {
            Ok(()) => {
                self.acknowledge();
                self.log = Some(log);
                Ok(())
            }
            Err(_) if self.disk.is_power_off() => {
                self.disk.crash();
                self.reopen()
            }
            Err(error) => Err(format!("failed with the power on: {error}")),
        }
    }

    fn acknowledge(&mut self) {
        self.acknowledged = self.current().clone();
        self.possible.clear();
    }

    fn reopen(&mut self) -> Result<(), String> {
        self.log = None;
        // The power may also fail while the log is being opened: once after 3 disk operations, once
        // after 9.
        for operations in [3, 9] {
            self.disk.power_off_after(operations);
            if Log::open(&self.disk.shared(), member(), &self.options).is_ok() {
                break;
            }
            self.disk.crash();
        }
        self.disk.crash();
        let opened = Log::open(&self.disk.shared(), member(), &self.options);
        let (log, recovered) = opened.map_err(|error| format!("can't be opened: {error}"))?;
        if recovered.boot <= self.boot {
            return Err(format!("boot {} after {}", recovered.boot, self.boot));
        }
        self.boot = recovered.boot;
        let read = log.read(log.base().index + 1, u64::MAX, u64::MAX);
        let entries = read.map_err(|error| format!("can't be read: {error}"))?;
        let terms_agree =
            entries.iter().all(|entry| recovered.terms.get(entry.index) == Some(entry.term));
        let found = LogModel {
            base: recovered.base,
            entries: entries.into_iter().map(|entry| (entry.index, entry)).collect(),
            hard_state: recovered.hard_state,
            installing: recovered.installing,
        };
        if !terms_agree || found.last() != recovered.last() {
            return Err("terms and entries differ".into());
        }
        if found != self.acknowledged && !self.possible.contains(&found) {
            return Err(format!("found {found:?}\nwhere {:?} was acknowledged", self.acknowledged));
        }
        self.acknowledged = found;
        self.possible.clear();
        self.log = Some(log);
        Ok(())
    }
}

fn run_actions(seed: u64, wrong: InjectedFault, acts: &[LogAction]) -> Result<(), String> {
    let mut life = CrashTest::new(seed, wrong)?;
    for act in acts {
        life.act(act)?;
    }
    life.disk.crash();
    life.reopen()
}

proptest! {
    #![proptest_config(Config { cases: Config::default().cases.max(400), ..Config::default() })]

    #[test]
    fn a_crash_loses_nothing_acknowledged_and_invents_nothing(
        seed in any::<u64>(),
        acts in vec(log_action(), 0..60),
    ) {
        if let Err(wrong) = run_actions(seed, InjectedFault::Nothing, &acts) {
            prop_assert!(false, "{}", wrong);
        }
    }
}

/// Injects the fault `wrong` into random operations. Panics unless at least one run detects the
/// fault.
fn assert_noticed(wrong: InjectedFault) {
    let config =
        Config { cases: 400, failure_persistence: None, max_shrink_iters: 0, ..Config::default() };
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[5; 32]);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let lives = (any::<u64>(), vec(log_action(), 0..60));
    let result = runner
        .run(&lives, |(seed, acts)| run_actions(seed, wrong, &acts).map_err(TestCaseError::fail));
    assert!(matches!(result, Err(TestError::Fail(..))), "{result:?}");
}

#[test]
fn a_missing_sync_is_noticed() {
    assert_noticed(InjectedFault::Disk(IgnoredSyncs { files: true, directories: false }));
}

#[test]
fn a_missing_sync_of_a_directory_is_noticed() {
    assert_noticed(InjectedFault::Disk(IgnoredSyncs { files: false, directories: true }));
}

#[test]
fn a_torn_tail_that_is_kept_is_noticed() {
    assert_noticed(InjectedFault::Guards(Guards::KEEP_TORN_TAIL));
}

#[test]
fn a_crash_at_any_point_of_the_creation_leaves_no_log_or_a_whole_one() {
    let mut whole = 0;
    for seed in 0..10 {
        for operations in 1..40 {
            let disk = disk(seed);
            disk.power_off_after(operations);
            let made =
                Log::create(&disk.shared(), member(), &identity(), &small_segments()).is_ok();
            disk.crash();
            if Log::exists(&disk.shared(), member()).unwrap() {
                let (_, recovered) = open(&disk).unwrap();
                assert_eq!(recovered.last(), at(0, 0));
                whole += 1;
            } else {
                assert!(!made, "a log that was made is there");
                create(&disk);
            }
        }
    }
    assert!(whole > 0 && whole < 390, "{whole} of 390");
}
