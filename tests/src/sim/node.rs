//! A simulated machine: its disk, and the member that runs on it while it is up.

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

/// Duration of an election, in the time of leases.
const ELECTION: Duration = Duration::from_secs(1);

const MEMBER_DIR: &str = "/member";

/// Size of a log segment, in bytes.
pub(super) const SEGMENT_BYTES: u64 = 64 * 1024;

/// A member while its process runs.
pub(super) struct Live {
    pub core: Core,
    /// Queue of input for the core.
    pub mail: Mail,
    pub tick_is_due: bool,
    /// Whether the core is busy until an event that is already scheduled.
    pub core_is_due: bool,
    pub writer: LogWriter,
    pub applier: Applier<Machine>,
    pub store: Store,
    /// Queue of jobs for the log.
    pub log_jobs: VecDeque<LogJob>,
    /// Jobs that the log is writing. It took them when the write began; later jobs wait.
    pub log_group: Option<Vec<LogJob>>,
    /// Queue of jobs for the state machine.
    pub apply_jobs: VecDeque<ApplyJob>,
    /// Jobs that the state machine is working on.
    pub turn: Option<Turn>,
    /// Handle through which clients subscribe to watches.
    pub watches: WatchHub,
    /// Future that delivers events to watches; the simulation polls it.
    pub hub: Hub,
    pub hub_is_due: bool,
    pub written: Written,
    /// Whether the log had a torn end when the process began.
    pub was_torn: bool,
    /// Leader's clock of leases.
    pub lessor: Lessor,
    pub noting: Option<Noting>,
    /// Reader of old log entries.
    pub reader: Reader,
    /// Number of reads of old entries under way.
    pub fetching: usize,
    /// Snapshot that is being written.
    pub writing: Option<Arc<View>>,
    pub snapshots: Snapshots<Memory>,
    /// Files of `snapshots`, kept in memory.
    pub bodies: Memory,
    /// Whether the next snapshot body to be sent is missing.
    pub loses_body: bool,
    /// Connected streams, by peer.
    pub connected: BTreeMap<u64, Link>,
    /// Appearance that this process shows to its peers.
    pub shown: Appearance,
    /// Remembered promises of its peers; may be more than was written.
    pub witness: Witness,
    /// Version of `witness` that was last written.
    pub witness_written: u64,
    /// Member tables that its peers have reported.
    pub censuses: Censuses,
    /// Peers that will never accept this process as its member.
    pub disowned_by: BTreeSet<u64>,
    /// Membership change that this member has under way as leader.
    pub changing: Option<Changing>,
    /// Membership changes that wait for the one under way.
    pub changes: VecDeque<Asked>,
    /// Received snapshots, with the machine and the process that sent each.
    pub transfers: BTreeMap<PathBuf, (u64, u64)>,
}

/// A stream to one process of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Link {
    pub machine: u64,
    pub life: u64,
    /// Virtual time at which the stream connected.
    pub since: u64,
}

/// Small files of a data directory. Each is replaced as a whole, and durable before any peer learns its
/// contents.
#[derive(Clone, Debug)]
pub(super) struct Papers {
    pub incarnation: u128,
    /// Number of process starts so far.
    pub boots: u64,
    /// Whether a log was ever created.
    pub had_log: bool,
    pub tombstone: bool,
    /// Remembered promises of the other members, as last written.
    pub witness: String,
}

impl Papers {
    pub(super) fn new(incarnation: u128) -> Self {
        let witness = Witness::default().encode();
        Self { incarnation, boots: 0, had_log: false, tombstone: false, witness }
    }
}

/// Earlier copy of a machine's disk and files, and an upper bound of what the copied log holds.
pub(super) struct Image {
    pub disk: SimulatedDisk,
    pub papers: Papers,
    pub held: OnDisk,
}

/// Size of a disk sector in bytes; a sector is written completely or not at all.
const SECTOR_BYTES: usize = 512;

/// One machine of the simulation.
pub(super) struct Node {
    pub id: u64,
    /// Id of the machine's member; 0 before the machine knows it.
    pub member: u64,
    /// Address at which peers find the machine.
    pub url: String,
    pub disk: SimulatedDisk,
    pub papers: Papers,
    /// Whether the machine has lost what its member promised. No peer may accept it as that member
    /// again.
    pub is_lost: bool,
    /// Whether its process has ended for good, because its peers refuse it.
    pub is_over: bool,
    /// Number of starts that ended at once because the member was removed.
    pub refused_starts: u64,
    /// Copy of an earlier state of the machine.
    pub image: Option<Image>,
    pub live: Option<Live>,
    /// Number of the present process. Events for an earlier one are dropped.
    pub life: u64,
    pub paused_until: u64,
    /// Virtual microseconds between two ticks of the machine.
    pub tick: u64,
}

/// Reason why a member's step ended its process.
#[derive(Debug)]
pub(super) enum Down {
    /// The machine's power failed.
    Crashed,
    /// The machine's disk failed or was full, as a fault had ordered.
    DiskFailed,
    /// The process can't continue for any other reason, which is a violation.
    Broken(String),
}

/// Returns the store's options. The bounds are small, so that a short history reaches them.
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

/// Returns a number that identifies a process among those of all machines.
pub(super) fn run_of(machine: u64, life: u64) -> u64 {
    machine << 32 | life
}

/// Returns the driver's options, and `config` with this plan's bounds. They are small, so that old
/// entries are fetched from the log and messages are frequent.
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
    /// Creates a machine of member `member`, or of a member that is yet to join if that is 0.
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

    /// Returns whether the cluster began with this machine.
    pub(super) fn is_founder(&self, plan: &Plan) -> bool {
        self.id <= plan.members
    }

    /// Returns whether `url` is an address of this machine.
    pub(super) fn owns(&self, url: &str) -> bool {
        url.starts_with(&format!("http://m{}-", self.id))
    }

    /// Returns the view of the member's store, which has its member table, while its process runs.
    pub(super) fn members(&self) -> Option<Arc<View>> {
        self.live.as_ref().map(|live| live.store.view())
    }

    /// Returns the peers that its process exchanges messages with, and their addresses.
    pub(super) fn neighbours(&self) -> Vec<Neighbour> {
        let Some(live) = &self.live else { return Vec::new() };
        live.censuses.neighbours(live.store.view().members(), MemberId(self.member))
    }

    /// Returns the member that its table has at this address.
    pub(super) fn member_at(&self, url: &str) -> Option<MemberId> {
        let view = self.members()?;
        let mut members = view.members().members();
        members.find(|member| member.peer_urls.iter().any(|at| at == url)).map(|member| member.id)
    }

    /// Returns what the disk tells about the member's past.
    pub(super) fn past(&self) -> Past {
        let exists = Log::exists(&self.disk.shared(), Path::new(MEMBER_DIR));
        Past {
            has_tombstone: self.papers.tombstone,
            has_log: exists.unwrap_or(self.papers.had_log),
            had_log: self.papers.had_log,
        }
    }

    /// Notes the id of the joining member, and returns the number of its process. The member then asks
    /// for the whole state.
    pub(super) fn begin_joining(&mut self, member: u64) -> u64 {
        self.member = member;
        self.papers.boots += 1;
        self.life += 1;
        self.life
    }

    /// Creates store and log from another member's whole state, `body`.
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

    /// Returns how its process presents itself to peers.
    pub(super) fn appearance(&self) -> Appearance {
        self.live.as_ref().map_or_else(|| self.shows_nothing(), |live| live.shown)
    }

    /// Returns how a process with nothing on its disk presents itself.
    fn shows_nothing(&self) -> Appearance {
        Appearance {
            incarnation: Incarnation(self.papers.incarnation.to_be_bytes()),
            boot: self.papers.boots,
            run: run_of(self.id, self.life),
            disk: OnDisk::default(),
        }
    }

    /// Writes what it remembers of its peers' promises, unless that was written already.
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

    /// Creates a file for a new store, and removes one that was left unfinished.
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

    /// Starts the process. The first time it creates log and store, later it uses those on the disk.
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
        // As in production, an outcome is complete only on the member on which a client waits for it.
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

    /// Returns whether its process is installing a snapshot.
    pub(super) fn is_installing(&self) -> bool {
        self.live.as_ref().is_some_and(|live| live.written.installing)
    }

    /// Returns whether its log had a torn end when its process began.
    pub(super) fn was_torn(&self) -> bool {
        self.live.as_ref().is_some_and(|live| live.was_torn)
    }

    /// Decides how far a log write has got when its process ends. It has not begun if `operations` is
    /// `None`. Otherwise power fails after that many disk operations, or the write completes unnoticed.
    pub(super) fn cut_short(&mut self, operations: Option<u64>) {
        let Some(live) = &mut self.live else { return };
        let Some(group) = live.log_group.take() else { return };
        if let Some(operations) = operations {
            self.disk.power_off_after(operations);
            // The restart finds out whether the write completed.
            let _ = live.writer.run(group);
        }
    }

    /// Ends the process and loses everything that was not synced.
    pub(super) fn crash(&mut self) {
        // Crash the disk before dropping the process: destructors must not complete any writes.
        self.disk.crash();
        self.live = None;
        self.life += 1;
    }

    /// Ends the process only: the machine keeps running.
    pub(super) fn kill(&mut self) {
        self.disk.kill();
        self.live = None;
        self.life += 1;
    }
}

impl Live {
    /// Returns whether the core must wait until the log or the state machine takes jobs from its queue.
    pub(super) fn is_blocked(&self, bound: usize) -> bool {
        self.log_jobs.len() >= bound || self.apply_jobs.len() >= bound
    }

    /// Returns whether the core has any work.
    pub(super) fn has_work(&self) -> bool {
        self.tick_is_due || !self.mail.is_empty() || self.core.has_more()
    }

    /// Runs one round of the core.
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

    /// Returns whether the log is writing enough bytes for a power cut to leave a part of them.
    pub(super) fn may_tear(&self) -> bool {
        let batches = self.log_group.iter().flatten().filter_map(LogJob::batch);
        batches.flat_map(|batch| &batch.entries).map(|entry| entry.data.len()).sum::<usize>()
            > 2 * SECTOR_BYTES
    }

    /// Lets the log take all its queued jobs, unless it is still writing. Returns whether it took any.
    pub(super) fn begin_group(&mut self) -> bool {
        if self.log_group.is_some() {
            return false;
        }
        let Some(first) = self.log_jobs.pop_front() else { return false };
        let more = std::iter::from_fn(|| self.log_jobs.pop_front());
        self.log_group = Some(gather(first, more));
        true
    }

    /// Lets the state machine take queued jobs, unless it is busy. Returns how many it took.
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

    /// Runs a turn of the state machine; if `idle`, it then makes the store durable. Returns its
    /// output, and whether the machine can continue.
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

    /// Writes the snapshot that was requested, if there is one.
    pub(super) fn write_snapshot(&mut self) -> Option<Notice> {
        self.writing.take().map(|snapshot| self.snapshots.build(snapshot))
    }
}

/// Returns the violation for a member that stops although its power didn't fail.
pub(super) fn broken(id: u64, why: &str) -> Violation {
    Violation::new("members start and run", format!("member {id}: {why}"))
}
