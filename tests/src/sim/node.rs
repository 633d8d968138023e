//! One simulated machine: its disk, and the member that runs on it while it is up.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::error::Error;
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use muster_node::apply::Machine;
use muster_node::disk::simulated::SimulatedDisk;
use muster_node::disk::{Backend, DiskFile, Open};
use muster_node::driver::{
    Applier, ApplyJob, CheckpointPolicy, Core, Driver, DriverOptions, LogJob, LogWriter, Mail,
    Metrics, Notice, Snapshots, Turn, TurnError, gather, recover,
};
use muster_node::identity::{Incarnation, MemberId, Past};
use muster_node::lease::Lessor;
use muster_node::log::{Identity, Log, LogOptions, Reader};
use muster_node::machine::{RequestId, StateMachine as _};
use muster_node::membership::{Censuses, Neighbour};
use muster_node::mvcc::watch::{WatchHub, WatchOptions};
use muster_node::mvcc::{Compaction, Options as StoreOptions, Store, StoreError, View};
use muster_node::witness::{Appearance, OnDisk, Witness};
use node_consensus::{Config, Guards};

use super::Violation;
use super::clients::is_of;
use super::leases::Noting;
use super::members::{first_incarnation, first_members, url};
use super::operators::{Asked, Changing};
use super::plan::Plan;
use super::ports::{CorePorts, MachinePorts, Memory, Sent, Told, Written};
use super::streams::Hub;
use crate::rng::Rng;

/// In the time of leases, of which an election takes a second.
const ELECTION: Duration = Duration::from_secs(1);

const MEMBER_DIR: &str = "/member";

/// Of the log.
pub(super) const SEGMENT_BYTES: u64 = 64 * 1024;

/// A member while its process runs.
pub(super) struct Live {
    pub core: Core,
    /// What waits for the core.
    pub mail: Mail,
    pub tick_is_due: bool,
    /// The core is busy; it has an event of its own.
    pub core_is_due: bool,
    pub writer: LogWriter,
    pub applier: Applier<Machine>,
    pub store: Store,
    /// What waits for the log.
    pub log_jobs: VecDeque<LogJob>,
    /// What the log is writing: taken when the write began. What comes meanwhile waits.
    pub log_group: Option<Vec<LogJob>>,
    /// What waits for the machine, and what it is doing.
    pub apply_jobs: VecDeque<ApplyJob>,
    pub turn: Option<Turn>,
    /// Where watches are asked for.
    pub watches: WatchHub,
    /// What tells them, run by hand.
    pub hub: Hub,
    pub hub_is_due: bool,
    pub written: Written,
    /// The log had a torn end.
    pub was_torn: bool,
    /// Its clock of leases, while it leads.
    pub lessor: Lessor,
    pub noting: Option<Noting>,
    /// Reads old entries, so many at the moment.
    pub reader: Reader,
    pub fetching: usize,
    /// The snapshot that is being written.
    pub writing: Option<Arc<View>>,
    pub snapshots: Snapshots<Memory>,
    /// What is behind `snapshots`.
    pub bodies: Memory,
    /// The next body to be sent is gone.
    pub loses_body: bool,
    /// Streams that stand, by peer.
    pub connected: BTreeMap<u64, Link>,
    /// What it shows of itself to others, and what it remembers of them: more than is written.
    pub shown: Appearance,
    pub witness: Witness,
    pub witness_written: u64,
    /// What its peers say of who the members are.
    pub censuses: Censuses,
    /// Peers that will never take this process' member for what it is.
    pub disowned_by: BTreeSet<u64>,
    /// The change of members that it has under way as leader, and those that wait for it.
    pub changing: Option<Changing>,
    pub changes: VecDeque<Asked>,
    /// Snapshots that have arrived: from which machine, and which of its processes.
    pub transfers: BTreeMap<PathBuf, (u64, u64)>,
}

/// A stream to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Link {
    pub machine: u64,
    pub life: u64,
    /// Since when it stands.
    pub since: u64,
}

/// The small files of a data directory: each is replaced whole, and durable before anybody hears of it.
#[derive(Clone, Debug)]
pub(super) struct Papers {
    pub incarnation: u128,
    /// Starts so far.
    pub boots: u64,
    /// A log was begun.
    pub had_log: bool,
    pub tombstone: bool,
    /// What is remembered of the other members, as it was last written.
    pub witness: String,
}

impl Papers {
    pub(super) fn new(incarnation: u128) -> Self {
        let witness = Witness::default().encode();
        Self { incarnation, boots: 0, had_log: false, tombstone: false, witness }
    }
}

/// A copy of a machine, and the most that it may hold.
pub(super) struct Image {
    pub disk: SimulatedDisk,
    pub papers: Papers,
    pub held: OnDisk,
}

/// What a disk writes whole or not at all.
const SECTOR_BYTES: usize = 512;

/// A machine.
pub(super) struct Node {
    pub id: u64,
    /// Which member it is; 0 before it knows.
    pub member: u64,
    /// Where its peers find it.
    pub url: String,
    pub disk: SimulatedDisk,
    pub papers: Papers,
    /// It has forgotten what its member has promised: nobody will take it for that again.
    pub is_lost: bool,
    /// Its process has ended for good, as one that its peers refuse.
    pub is_over: bool,
    /// Times that it was started and ended at once.
    pub refused_starts: u64,
    /// An earlier moment of its disk.
    pub image: Option<Image>,
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
fn store_options(plan: &Plan, guards: Guards) -> StoreOptions {
    StoreOptions {
        cache_bytes: 256 * 1024,
        compaction: Compaction::Background,
        compacted_keys_per_step: 2,
        watch: WatchOptions {
            queued_deliveries: plan.queued_deliveries,
            ring_bytes: plan.watch_bytes,
            feed_bytes: plan.watch_bytes,
            records_per_piece: 3,
            bytes_per_piece: WatchOptions::default().bytes_per_piece,
        },
        members: first_members(plan),
        guards,
    }
}

/// The number that tells a process from all others.
pub(super) fn run_of(machine: u64, life: u64) -> u64 {
    machine << 32 | life
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
        hasten_first_election: plan.hasten_first_election,
        catch_up_entries: plan.catch_up_entries,
        proposal_ticks: 150,
        read_retry_ticks: 2,
        max_backlog_bytes,
    };
    (config, options)
}

fn log_options(guards: Guards) -> LogOptions {
    LogOptions {
        segment_bytes: SEGMENT_BYTES,
        spare_segments: 1,
        fill_bytes: 32 * 1024,
        max_record_bytes: 32 * 1024,
        guards,
    }
}

impl Node {
    /// The machine of a founding member, or of one that is yet to join: 0.
    pub(super) fn new(id: u64, member: u64, seed: u64, tick: u64) -> Self {
        let disk = SimulatedDisk::new(seed);
        Self {
            id,
            member,
            url: url(id, 0),
            disk,
            papers: Papers::new(first_incarnation(id)),
            is_lost: false,
            is_over: false,
            refused_starts: 0,
            image: None,
            live: None,
            life: 0,
            paused_until: 0,
            tick,
        }
    }

    /// Whether it is one of those that the cluster began with.
    pub(super) fn is_founder(&self, plan: &Plan) -> bool {
        self.id <= plan.members
    }

    /// Whether this is an address of this machine.
    pub(super) fn owns(&self, url: &str) -> bool {
        url.starts_with(&format!("http://m{}-", self.id))
    }

    /// The members, as it has them, while it runs.
    pub(super) fn members(&self) -> Option<Arc<View>> {
        self.live.as_ref().map(|live| live.store.view())
    }

    /// Whom it exchanges messages with, and where it looks for them, while it runs.
    pub(super) fn neighbours(&self) -> Vec<Neighbour> {
        let Some(live) = &self.live else { return Vec::new() };
        live.censuses.neighbours(live.store.view().members(), MemberId(self.member))
    }

    /// The member that it knows to be reached there.
    pub(super) fn member_at(&self, url: &str) -> Option<MemberId> {
        let view = self.members()?;
        let mut members = view.members().members();
        members.find(|member| member.peer_urls.iter().any(|at| at == url)).map(|member| member.id)
    }

    /// What its disk says of its past.
    pub(super) fn past(&self) -> Past {
        let exists = Log::exists(&self.disk.shared(), Path::new(MEMBER_DIR));
        Past {
            has_tombstone: self.papers.tombstone,
            has_log: exists.unwrap_or(self.papers.had_log),
            had_log: self.papers.had_log,
        }
    }

    /// It has found out who it is, and asks for the whole state.
    pub(super) fn begin_joining(&mut self, member: u64) -> u64 {
        self.member = member;
        self.papers.boots += 1;
        self.life += 1;
        self.life
    }

    /// The whole state, as another member has it, is what this one begins with.
    pub(super) fn begin_with(
        &mut self,
        plan: &Plan,
        guards: Guards,
        body: &[u8],
    ) -> Result<(), Down> {
        let begun = self.try_begin_with(plan, guards, body);
        begun.map_err(|error| self.down(&*error))?;
        self.papers.had_log = true;
        Ok(())
    }

    fn try_begin_with(
        &self,
        plan: &Plan,
        guards: Guards,
        mut body: &[u8],
    ) -> Result<(), Box<dyn Error>> {
        let file = self.new_store()?;
        let options = StoreOptions { members: Vec::new(), ..store_options(plan, guards) };
        let mut machine = Machine::open(Backend::new(file)?, options)?;
        let at = machine.install_snapshot(&mut body)?;
        let dir = Path::new(MEMBER_DIR);
        let (disk, identity) = (self.disk.shared(), self.identity());
        Ok(Log::create_after(at, &disk, dir, &identity, &log_options(guards))?)
    }

    /// How its process shows itself.
    pub(super) fn appearance(&self) -> Appearance {
        self.live.as_ref().map_or_else(|| self.shows_nothing(), |live| live.shown)
    }

    /// How one does that has nothing on its disk.
    fn shows_nothing(&self) -> Appearance {
        Appearance {
            incarnation: Incarnation(self.papers.incarnation.to_be_bytes()),
            boot: self.papers.boots,
            run: run_of(self.id, self.life),
            disk: OnDisk::default(),
        }
    }

    /// Writes what it remembers of the others, if that is more than it has written.
    pub(super) fn write_witness(&mut self) {
        let Some(live) = &mut self.live else { return };
        if live.witness.version() > live.witness_written {
            live.witness_written = live.witness.version();
            self.papers.witness = live.witness.encode();
        }
    }

    fn identity(&self) -> Identity {
        Identity { cluster: 1, member: self.member, incarnation: self.papers.incarnation }
    }

    /// A file for a store where there is none, or one that was never finished.
    fn new_store(&self) -> Result<Box<dyn DiskFile>, Box<dyn Error>> {
        let (disk, dir) = (self.disk.shared(), Path::new(MEMBER_DIR));
        disk.create_dir(dir)?;
        disk.sync_dir(Path::new("/"))?;
        let path = dir.join("db");
        if disk.exists(&path)? {
            disk.remove(&path)?;
        }
        let file = disk.open(&path, Open::New)?;
        disk.sync_dir(dir)?;
        Ok(file)
    }

    pub(super) fn down(&self, error: &dyn std::error::Error) -> Down {
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
    pub(super) fn boot(&mut self, plan: &Plan, seed: u64, guards: Guards) -> Result<(), Down> {
        self.life += 1;
        self.papers.boots += 1;
        let live = self.try_boot(plan, seed, guards).map_err(|error| self.down(&*error))?;
        self.papers.had_log = true;
        self.live = Some(live);
        Ok(())
    }

    fn try_boot(&self, plan: &Plan, seed: u64, guards: Guards) -> Result<Live, Box<dyn Error>> {
        let disk = self.disk.shared();
        let dir = Path::new(MEMBER_DIR);
        let options = log_options(guards);
        let is_new = !Log::exists(&disk, dir)?;
        let file =
            if is_new { self.new_store()? } else { disk.open(&dir.join("db"), Open::Existing)? };
        let mut machine = Machine::open(Backend::new(file)?, store_options(plan, guards))?;
        let own = self.id;
        machine.answer_only(move |RequestId(request)| is_of(request, own));
        if is_new {
            Log::create(&disk, dir, &self.identity(), &options)?;
        }
        let (mut log, recovered) = Log::open(&disk, dir, &options)?;
        let state = recovered.hard_state;
        let held = OnDisk { term: state.term, vote: state.vote, last: recovered.last().index };
        let witness = Witness::decode(&self.papers.witness)?;
        let initial = recover(&mut log, machine.applied(), machine.members())?;
        let (config, mut driver_options) = driver_options(
            plan,
            Config { guards, ..Config::new(self.member, recovered.boot, seed) },
        );
        driver_options.campaign_when_connected = is_new && own == 1;
        let driver = Driver::new(&config, driver_options, &initial)?;
        let metrics = Arc::<Metrics>::default();
        let (store, watches) = (machine.store(), machine.hub());
        let hub = Box::pin(machine.hub().run());
        let policy = CheckpointPolicy { bytes: usize::MAX, entries: plan.checkpoint_entries };
        let bodies = Memory::default();
        let mut faults = Rng::new(seed);
        if faults.chance(plan.lost_bodies) {
            bodies.fail_once();
        }
        Ok(Live {
            core: Core::new(driver, Arc::clone(&metrics)),
            mail: Mail::new(plan.mail),
            tick_is_due: false,
            core_is_due: false,
            lessor: Lessor::new(ELECTION),
            noting: None,
            reader: log.reader(),
            watches,
            hub,
            hub_is_due: false,
            written: Written { last: log.last().index, ..Written::default() },
            was_torn: recovered.cut.is_some(),
            fetching: 0,
            writing: None,
            snapshots: Snapshots::new("/outgoing".into(), bodies.clone()),
            bodies,
            loses_body: faults.chance(plan.lost_bodies),
            connected: BTreeMap::new(),
            shown: Appearance { disk: held, ..self.shows_nothing() },
            witness_written: witness.version(),
            witness,
            censuses: Censuses::default(),
            disowned_by: BTreeSet::new(),
            changing: None,
            changes: VecDeque::new(),
            transfers: BTreeMap::new(),
            writer: LogWriter::new(log, Arc::clone(&metrics)),
            applier: Applier::new(machine, policy, metrics),
            store,
            log_jobs: VecDeque::new(),
            log_group: None,
            apply_jobs: VecDeque::new(),
            turn: None,
        })
    }

    /// Whether its process is in the middle of taking over a snapshot.
    pub(super) fn is_installing(&self) -> bool {
        self.live.as_ref().is_some_and(|live| live.written.installing)
    }

    /// Whether its log had a torn end when its process began.
    pub(super) fn was_torn(&self) -> bool {
        self.live.as_ref().is_some_and(|live| live.was_torn)
    }

    /// A write of the log that is under way when its process ends has got somewhere: nowhere yet,
    /// to one of its operations on the disk, or to its end, which nobody was told of.
    pub(super) fn cut_short(&mut self, operations: Option<u64>) {
        let Some(live) = &mut self.live else { return };
        let Some(group) = live.log_group.take() else { return };
        if let Some(operations) = operations {
            self.disk.power_off_after(operations);
            // Whether it got to its end is for the restart to find out.
            let _ = live.writer.run(group);
        }
    }

    /// The process is gone and so is what was not synced.
    pub(super) fn crash(&mut self) {
        // The disk first: what is dropped must not end cleanly.
        self.disk.crash();
        self.live = None;
        self.life += 1;
    }

    /// The process is gone, the machine isn't.
    pub(super) fn kill(&mut self) {
        self.disk.kill();
        self.live = None;
        self.life += 1;
    }
}

impl Live {
    /// Whether the core waits for the log or the machine to take what it has for them.
    pub(super) fn is_blocked(&self, bound: usize) -> bool {
        self.log_jobs.len() >= bound || self.apply_jobs.len() >= bound
    }

    /// Whether the core has something to do.
    pub(super) fn has_work(&self) -> bool {
        self.tick_is_due || !self.mail.is_empty() || self.core.has_more()
    }

    /// A round of the core.
    pub(super) fn round(&mut self, rng: &mut Rng, plan: &Plan, calm: bool) -> Sent {
        let (mail, tick) = (self.mail.take(), mem::take(&mut self.tick_is_due));
        let mut ports = CorePorts {
            rng,
            plan,
            calm,
            mail: &mut self.mail,
            log_jobs: &mut self.log_jobs,
            apply_jobs: &mut self.apply_jobs,
            written: &mut self.written,
            snapshots: &self.snapshots,
            loses_body: &mut self.loses_body,
            connected: &self.connected,
            fetching: &mut self.fetching,
            sent: Sent::default(),
        };
        self.core.round(mail, tick, &mut ports);
        ports.sent
    }

    /// Whether the log is writing so much that a power cut may leave a part of it.
    pub(super) fn may_tear(&self) -> bool {
        let batches = self.log_group.iter().flatten().filter_map(LogJob::batch);
        batches.flat_map(|batch| &batch.entries).map(|entry| entry.data.len()).sum::<usize>()
            > 2 * SECTOR_BYTES
    }

    /// The log takes what waits for it, unless it is still writing. Whether it begins to.
    pub(super) fn begin_group(&mut self) -> bool {
        if self.log_group.is_some() {
            return false;
        }
        let Some(first) = self.log_jobs.pop_front() else { return false };
        let more = std::iter::from_fn(|| self.log_jobs.pop_front());
        self.log_group = Some(gather(first, more));
        true
    }

    /// The same of the machine; how many jobs it takes.
    pub(super) fn begin_turn(&mut self) -> usize {
        if self.turn.is_some() {
            return 0;
        }
        let before = self.apply_jobs.len();
        let Some(first) = self.apply_jobs.pop_front() else { return 0 };
        let more = std::iter::from_fn(|| self.apply_jobs.pop_front());
        self.turn = Some(Turn::gather(first, more));
        before - self.apply_jobs.len()
    }

    /// The machine does what it has taken; if `idle`, it makes the store durable. What it told, and
    /// whether it can go on.
    pub(super) fn run_turn(
        &mut self,
        turn: Turn,
        idle: bool,
    ) -> (Told, Result<(), Box<dyn Error>>) {
        let told = Told::default();
        let mut out = MachinePorts { snapshots: &self.snapshots, writing: &mut self.writing, told };
        let mut done = self.applier.run(turn, &mut out);
        if done.is_ok() && idle {
            done = self.applier.checkpoint(&mut out).map_err(TurnError::Store);
        }
        let done = done.map_err(|error: TurnError<StoreError>| -> Box<dyn Error> {
            match error {
                TurnError::Store(error) => error.into(),
                TurnError::Body(error) => error.into(),
            }
        });
        (out.told, done)
    }

    /// The snapshot that was asked for is written.
    pub(super) fn write_snapshot(&mut self) -> Option<Notice> {
        self.writing.take().map(|snapshot| self.snapshots.build(snapshot))
    }
}

/// A member that stops for another reason than its power is a violation by itself.
pub(super) fn broken(id: u64, why: &str) -> Violation {
    Violation::new("members start and run", format!("member {id}: {why}"))
}
