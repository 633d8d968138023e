//! One simulated machine: its disk, and the member that runs on it while it is up.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use muster_node::apply::{Machine, Outcome};
use muster_node::disk::simulated::SimulatedDisk;
use muster_node::disk::{Backend, Open};
use muster_node::driver::{
    Applier, CheckpointPolicy, Driver, DriverOptions, LogJob, Notice, Position, recover, run_group,
};
use muster_node::log::{Batch, Identity, Log, LogOptions, Reader};
use muster_node::machine::{Applied, Committed, RequestId, Snapshot as _, StateMachine as _};
use muster_node::mvcc::watch::{WatchHub, WatchOptions};
use muster_node::mvcc::{Compaction, Options as StoreOptions, Store, StoreError, View};
use node_consensus::{Config, Guards};

use super::Violation;
use super::clients::is_of;
use super::members::first_members;
use super::plan::Plan;
use super::streams::Hub;

const MEMBER_DIR: &str = "/member";

/// Something for the state machine.
#[derive(Debug)]
pub(super) enum ApplyJob {
    Apply(Vec<Committed>),
    Install(Position, PathBuf),
    Build,
}

/// A member while its process runs.
pub(super) struct Live {
    pub driver: Driver,
    pub log: Log,
    pub applier: Applier<Machine>,
    pub store: Store,
    /// What waits for the log.
    pub log_jobs: Vec<LogJob>,
    /// What the log is writing: taken when the write began. What comes meanwhile waits.
    pub log_group: Option<Vec<LogJob>>,
    pub apply_jobs: Vec<ApplyJob>,
    pub apply_busy: bool,
    /// Where watches are asked for.
    pub watches: WatchHub,
    /// What tells them, run by hand.
    pub hub: Hub,
    pub hub_is_due: bool,
    /// The last entry given to the log.
    pub log_last: u64,
    /// A snapshot is on its way into log and store.
    pub installing: bool,
    /// The log had a torn end.
    pub was_torn: bool,
    /// Reads old entries.
    pub reader: Reader,
    /// A snapshot that is being written.
    pub snapshot: Option<Arc<View>>,
    pub snapshot_busy: bool,
    /// The snapshot that was built last.
    pub built: Option<(Position, Vec<u8>)>,
    /// Snapshots that have arrived.
    pub bodies: BTreeMap<PathBuf, Vec<u8>>,
}

/// A machine.
pub(super) struct Node {
    pub id: u64,
    pub disk: SimulatedDisk,
    pub live: Option<Live>,
    /// Counts processes, so that what was meant for an earlier one is dropped.
    pub life: u64,
    pub paused_until: u64,
    /// Virtual microseconds between its ticks.
    pub tick: u64,
}

/// Why a member's step ended it.
#[derive(Debug)]
pub(super) enum Down {
    /// Its power failed.
    Crashed,
    /// Its disk failed, or was full, as ordered.
    DiskFailed,
    /// It can't go on for another reason.
    Broken(String),
}

/// The store's options: small bounds, so that a short history reaches them.
fn store_options(plan: &Plan) -> StoreOptions {
    StoreOptions {
        cache_bytes: 256 * 1024,
        compaction: Compaction::Background,
        compacted_keys_per_step: 2,
        watch: WatchOptions {
            queued_deliveries: plan.queued_deliveries,
            ring_bytes: plan.watch_bytes,
            feed_bytes: plan.watch_bytes,
            records_per_piece: 3,
        },
        members: first_members(plan.members),
    }
}

/// The options of the driver, and `config` with this plan's bounds: small, so that old entries are
/// fetched from the log and messages are many.
fn driver_options(plan: &Plan, mut config: Config) -> (Config, DriverOptions) {
    config.cache_bytes = 8 * 1024;
    config.max_message_bytes = 4 * 1024;
    config.max_inflight_messages = 8;
    let mut max_backlog_bytes = 128 << 20;
    if plan.uncommitted_bytes > 0 {
        config.max_uncommitted_bytes = plan.uncommitted_bytes;
        max_backlog_bytes = 60_000;
    }
    let options = DriverOptions {
        campaign_when_connected: false,
        catch_up_entries: plan.catch_up_entries,
        proposal_ticks: 150,
        read_retry_ticks: 2,
        max_backlog_bytes,
    };
    (config, options)
}

impl Node {
    pub fn new(id: u64, seed: u64, tick: u64) -> Self {
        let disk = SimulatedDisk::new(seed);
        Self { id, disk, live: None, life: 0, paused_until: 0, tick }
    }

    pub fn down(&self, error: &dyn std::error::Error) -> Down {
        if self.disk.is_off() {
            return Down::Crashed;
        }
        if self.disk.has_failed() {
            return Down::DiskFailed;
        }
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            text = format!("{text}: {cause}");
            source = cause.source();
        }
        Down::Broken(text)
    }

    /// Starts the process: from nothing the first time, else from what the disk holds.
    pub fn boot(&mut self, plan: &Plan, seed: u64, guards: Guards) -> Result<(), Down> {
        self.life += 1;
        let live = self.try_boot(plan, seed, guards).map_err(|error| self.down(&*error))?;
        self.live = Some(live);
        Ok(())
    }

    fn try_boot(
        &self,
        plan: &Plan,
        seed: u64,
        guards: Guards,
    ) -> Result<Live, Box<dyn std::error::Error>> {
        let disk = self.disk.shared();
        let dir = Path::new(MEMBER_DIR);
        let options = LogOptions {
            segment_bytes: 64 * 1024,
            spare_segments: 1,
            fill_bytes: 32 * 1024,
            max_record_bytes: 32 * 1024,
            guards,
        };
        disk.create_dir(dir)?;
        disk.sync_dir(Path::new("/"))?;
        let file = disk.open(&dir.join("db"), Open::ExistingOrNew)?;
        disk.sync_dir(dir)?;
        let mut machine = Machine::open(Backend::new(file)?, store_options(plan))?;
        let own = self.id;
        machine.answer_only(move |RequestId(request)| is_of(request, own));
        if !Log::exists(&disk, dir)? {
            let incarnation = u128::from(self.id) << 64 | 0xfeed;
            let identity = Identity { cluster: 1, member: self.id, incarnation };
            Log::create(&disk, dir, &identity, &options)?;
        }
        let (mut log, recovered) = Log::open(&disk, dir, &options)?;
        let initial = recover(&mut log, machine.applied(), machine.members())?;
        let (config, driver_options) =
            driver_options(plan, Config { guards, ..Config::new(self.id, recovered.boot, seed) });
        let driver = Driver::new(&config, driver_options, &initial)?;
        let (store, watches) = (machine.store(), machine.hub());
        let hub = Box::pin(machine.hub().run());
        let policy = CheckpointPolicy { bytes: usize::MAX, entries: plan.checkpoint_entries };
        Ok(Live {
            driver,
            reader: log.reader(),
            watches,
            hub,
            hub_is_due: false,
            log_last: log.last().index,
            installing: false,
            was_torn: recovered.cut.is_some(),
            snapshot: None,
            snapshot_busy: false,
            log,
            applier: Applier::new(machine, policy),
            store,
            log_jobs: Vec::new(),
            log_group: None,
            apply_jobs: Vec::new(),
            apply_busy: false,
            built: None,
            bodies: BTreeMap::new(),
        })
    }

    /// Whether its process is in the middle of taking over a snapshot.
    pub fn is_installing(&self) -> bool {
        self.live.as_ref().is_some_and(|live| live.installing)
    }

    /// Whether its log had a torn end when its process began.
    pub fn was_torn(&self) -> bool {
        self.live.as_ref().is_some_and(|live| live.was_torn)
    }

    /// A write of the log that is under way when its process ends has got somewhere: nowhere yet,
    /// to one of its operations on the disk, or to its end, which nobody was told of.
    pub fn cut_short(&mut self, operations: Option<u64>) {
        let Some(live) = &mut self.live else { return };
        let Some(group) = live.log_group.take() else { return };
        if let Some(operations) = operations {
            self.disk.power_off_after(operations);
            // Whether it got to its end is for the restart to find out.
            let _ = run_group(&mut live.log, group);
        }
    }

    /// The process is gone and so is what was not synced.
    pub fn crash(&mut self) {
        // The disk first: what is dropped must not end cleanly.
        self.disk.crash();
        self.live = None;
        self.life += 1;
    }

    /// The process is gone, the machine isn't.
    pub fn kill(&mut self) {
        self.disk.kill();
        self.live = None;
        self.life += 1;
    }
}

/// What one job of the state machine gave.
#[derive(Default)]
pub(super) struct JobDone {
    pub notices: Vec<Notice>,
    pub outcomes: Vec<(RequestId, Outcome)>,
    pub applied: Vec<Committed>,
}

impl Live {
    /// Looks at what goes into the log: entries that replace others, snapshots that come in.
    pub fn note_log<'a>(&mut self, batches: impl Iterator<Item = &'a Batch>) -> u64 {
        let mut conflicts = 0;
        for batch in batches {
            self.installing |= batch.installing.is_some();
            if let Some(at) = batch.snapshot {
                (self.installing, self.log_last) = (false, at.index);
            }
            if let (Some(first), Some(last)) = (batch.entries.first(), batch.entries.last()) {
                conflicts += u64::from(first.index <= self.log_last);
                self.log_last = last.index;
            }
        }
        conflicts
    }

    /// One job, as the apply thread does it.
    pub fn apply_one(&mut self, done: &mut JobDone) -> Result<(), Box<dyn std::error::Error>> {
        if self.apply_jobs.is_empty() {
            return Ok(());
        }
        match self.apply_jobs.remove(0) {
            ApplyJob::Apply(entries) => {
                let Applied { at, outcomes, changes } = self.applier.apply(&entries)?;
                done.applied = entries;
                done.outcomes = outcomes;
                done.notices.push(Notice::Applied { at, changes });
                if self.applier.is_checkpoint_due() {
                    done.notices.push(Notice::Checkpointed(self.applier.checkpoint()?));
                }
            }
            ApplyJob::Install(at, path) => {
                let body = self.bodies.remove(&path).expect("it was put there");
                let installed = self.applier.install_snapshot(&mut body.as_slice())?;
                assert_eq!(installed, at, "a body of another position");
                let members = self.applier.machine().members();
                done.notices.push(Notice::Installed { at, members });
            }
            ApplyJob::Build => self.snapshot = Some(self.applier.machine().snapshot()),
        }
        Ok(())
    }
}

impl Live {
    /// The snapshot that was asked for, as the thread behind the apply thread writes it.
    pub fn write_snapshot(&mut self) -> Result<Notice, StoreError> {
        self.snapshot_busy = false;
        let Some(snapshot) = self.snapshot.take() else { return Ok(Notice::Built(None)) };
        let mut body = Vec::new();
        snapshot.write(&mut body)?;
        let at = snapshot.position();
        self.built = Some((at, body));
        Ok(Notice::Built(Some((at, snapshot.members()))))
    }
}

/// A member that stops for another reason than its power is a violation by itself.
pub(super) fn broken(id: u64, why: &str) -> Violation {
    Violation::new("members start and run", format!("member {id}: {why}"))
}
