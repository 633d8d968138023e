//! A simulated machine: its disk, and the member that runs on it while it is up.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::error::Error;
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use node_consensus::{Config, Guards};
use node_engine::driver::{
    Applier, ApplierError, ApplyBatch, ApplyJob, CheckpointPolicy, DriverCore, DriverMetrics,
    DriverOptions, LogJob, LogWriter, Mail, Notice, RoundRunner, SnapshotStore, collect_log_jobs,
    recover_initial_state,
};
use node_engine::log::{Log, LogIdentity, LogOptions, LogReader};
use node_engine::witness::{DiskState, ProcessClaim, Witness};
use node_state::apply::KvStateMachine;
use node_state::disk::simulated::SimulatedDisk;
use node_state::disk::{DiskFile, OpenMode, RedbBackend};
use node_state::identity::{Incarnation, MemberId, StartEvidence};
use node_state::lease::Lessor;
use node_state::membership::{Censuses, Neighbour};
use node_state::mvcc::watch::{WatchHub, WatchOptions};
use node_state::mvcc::{CompactionMode, Store, StoreError, StoreOptions, View};
use node_state::state_machine::{CheckpointWork, RequestId, StateMachine as _};

use super::InvariantViolation;
use super::clients::is_awaited_on;
use super::leases::PendingCheckpoint;
use super::members::{first_incarnation, first_members, url};
use super::operators::{OperatorChange, PendingChange};
use super::plan::HistoryPlan;
use super::ports::{CorePorts, LogSummary, MachinePorts, MemoryBodies, RoundOutput, TurnOutput};
use super::watch_streams::HubFuture;
use crate::rng::Rng;

/// Duration of an election, as measured by the clock for leases.
const ELECTION_TIME: Duration = Duration::from_secs(1);

const MEMBER_DIR: &str = "/member";

/// Size of a log segment, in bytes.
pub(super) const SEGMENT_BYTES: u64 = 64 * 1024;

/// A member while its process runs.
pub(super) struct MemberProcess {
    pub core: RoundRunner,
    /// Queue of input for the member's core (its consensus).
    pub mail: Mail,
    pub tick_is_due: bool,
    /// Time at which the member sends its commit index to peers, if a peer lacks it.
    pub commit_index_due: Option<u64>,
    /// Number of the latest read round for which the sending of held-back heartbeats was
    /// scheduled.
    pub scheduled_heartbeats: u64,
    /// Number of the latest read round after which the start of a delayed one was scheduled.
    pub scheduled_read_round: Option<u64>,
    /// Whether an event that will run the busy core is already scheduled.
    pub core_is_due: bool,
    pub writer: LogWriter,
    pub applier: Applier<KvStateMachine>,
    pub store: Store,
    /// Queue of jobs for the log.
    pub log_jobs: VecDeque<LogJob>,
    /// Jobs that the log is writing. The log took them when the write began; later jobs wait.
    pub log_group: Option<Vec<LogJob>>,
    /// Queue of jobs for the state machine.
    pub apply_jobs: VecDeque<ApplyJob>,
    /// Jobs that the state machine took together (its turn), and is working on.
    pub turn: Option<ApplyBatch>,
    /// Handle through which clients subscribe to watches.
    pub watches: WatchHub,
    /// Future that delivers events to watches; the simulation polls it.
    pub hub: HubFuture,
    pub hub_is_due: bool,
    pub log_summary: LogSummary,
    /// Whether the log had a torn end when the process began.
    pub was_torn: bool,
    /// Clock by which a leader ends leases.
    pub lessor: Lessor,
    pub pending_checkpoint: Option<PendingCheckpoint>,
    /// Reader of old log entries.
    pub reader: LogReader,
    /// Number of reads of old log entries that are under way.
    pub fetches_in_progress: usize,
    /// Snapshot that is requested, and not written yet.
    pub snapshot_to_write: Option<Arc<View>>,
    /// Checkpoint that was begun, and has not run yet.
    pub checkpoint_to_run: Option<CheckpointWork<StoreError>>,
    pub snapshots: SnapshotStore<MemoryBodies>,
    /// Bodies of the snapshots in `snapshots`, kept in memory.
    pub bodies: MemoryBodies,
    /// Whether the body of the next snapshot will be missing when the snapshot is sent.
    pub drops_next_body: bool,
    /// Connected streams, by peer.
    pub connected: BTreeMap<u64, ConnectedStream>,
    /// Incarnation, boot counter, random number and disk state that this process presents to its
    /// peers.
    pub claim: ProcessClaim,
    /// Promises of peers that this process remembers. The newest of these promises are possibly not
    /// written to disk yet.
    pub witness: Witness,
    /// Version of `witness` (the remembered promises) that was last written to disk.
    pub witness_written: u64,
    /// Member tables that the member's peers have reported.
    pub censuses: Censuses,
    /// Peers that will never accept this process as the member that it claims to be.
    pub disowned_by: BTreeSet<u64>,
    /// Membership change that this member has under way as leader.
    pub pending_change: Option<PendingChange>,
    /// Membership changes that wait for the one under way.
    pub changes: VecDeque<OperatorChange>,
    /// Received snapshots, with the machine and the process that sent each.
    pub transfers: BTreeMap<PathBuf, (u64, u64)>,
}

/// A stream to one process of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConnectedStream {
    pub machine: u64,
    pub generation: u64,
    /// Virtual time at which the stream connected.
    pub since: u64,
}

/// Small files of a data directory. A file is replaced as a whole, and becomes durable before any
/// peer learns its contents.
#[derive(Clone, Debug)]
pub(super) struct SmallFiles {
    pub incarnation: u128,
    /// Number of process starts so far.
    pub boots: u64,
    /// Whether a log was ever created.
    pub had_log: bool,
    pub tombstone: bool,
    /// Remembered promises of the other members, as last written.
    pub witness: String,
}

impl SmallFiles {
    pub(super) fn new(incarnation: u128) -> Self {
        let witness = Witness::default().encode();
        Self { incarnation, boots: 0, had_log: false, tombstone: false, witness }
    }
}

/// Earlier copy of a machine's disk and files, and an upper bound of what the copied log holds.
pub(super) struct DiskImage {
    pub disk: SimulatedDisk,
    pub files: SmallFiles,
    pub on_disk: DiskState,
}

/// Size of a disk sector in bytes; a sector is written completely or not at all.
const SECTOR_BYTES: usize = 512;

/// One machine of the simulation.
pub(super) struct SimulatedNode {
    pub id: u64,
    /// Id of the machine's member; 0 before the machine knows it.
    pub member: u64,
    /// Address at which peers find the machine.
    pub url: String,
    pub disk: SimulatedDisk,
    pub files: SmallFiles,
    /// Whether the machine has lost what its member promised. After that, no peer may accept the
    /// machine as this member.
    pub has_lost_promises: bool,
    /// Whether the machine's process has ended for good, because its peers refuse it.
    pub has_ended_for_good: bool,
    /// Number of starts that ended at once because the member was removed.
    pub refused_starts: u64,
    /// Earlier copy of the machine's disk and files, which may be put back.
    pub image: Option<DiskImage>,
    pub process: Option<MemberProcess>,
    /// Number of the present process. Events for an earlier process are dropped.
    pub generation: u64,
    pub paused_until: u64,
    /// Virtual microseconds between two ticks of the machine.
    pub tick: u64,
}

/// Reason why a member's step ended its process.
#[derive(Debug)]
pub(super) enum ProcessEnd {
    /// The machine's power failed.
    Crashed,
    /// The machine's disk failed or was full, as a fault had ordered.
    DiskFailed,
    /// The process can't continue, and neither power nor disk is the reason. This violates an
    /// invariant.
    Broken(String),
}

/// Returns the store's options. The bounds are small, so that a short history reaches them.
fn store_options(plan: &HistoryPlan, guards: Guards) -> StoreOptions {
    StoreOptions {
        cache_bytes: 256 * 1024,
        compaction: CompactionMode::Background,
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
pub(super) fn process_run(machine: u64, generation: u64) -> u64 {
    machine << 32 | generation
}

/// Returns the driver's options, and `config` with this plan's bounds. The bounds are small, so
/// that old entries are fetched from the log and messages are frequent.
fn driver_options(plan: &HistoryPlan, mut config: Config) -> (Config, DriverOptions) {
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
        // Few clients read at the same time, so that production's minimum would never be reached.
        min_shared_reads: 2,
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

impl SimulatedNode {
    /// Creates a machine for member `member`. 0 stands for a member that is yet to join.
    pub(super) fn new(id: u64, member: u64, seed: u64, tick: u64) -> Self {
        let disk = SimulatedDisk::new(seed);
        Self {
            id,
            member,
            url: url(id, 0),
            disk,
            files: SmallFiles::new(first_incarnation(id)),
            has_lost_promises: false,
            has_ended_for_good: false,
            refused_starts: 0,
            image: None,
            process: None,
            generation: 0,
            paused_until: 0,
            tick,
        }
    }

    /// Returns whether the cluster began with this machine.
    pub(super) fn is_founder(&self, plan: &HistoryPlan) -> bool {
        self.id <= plan.members
    }

    /// Returns whether `url` is an address of this machine.
    pub(super) fn has_address(&self, url: &str) -> bool {
        url.starts_with(&format!("http://m{}-", self.id))
    }

    /// Returns a view of the member's store, which includes the member table. Returns `None` if no
    /// process runs.
    pub(super) fn store_view(&self) -> Option<Arc<View>> {
        self.process.as_ref().map(|process| process.store.view())
    }

    /// Returns the peers with which the machine's process exchanges messages, and their addresses.
    pub(super) fn neighbours(&self) -> Vec<Neighbour> {
        let Some(process) = &self.process else { return Vec::new() };
        process.censuses.neighbours(process.store.view().members(), MemberId(self.member))
    }

    /// Returns the member at this address in the machine's member table.
    pub(super) fn member_at(&self, url: &str) -> Option<MemberId> {
        let view = self.store_view()?;
        let mut members = view.members().members();
        members.find(|member| member.peer_urls.iter().any(|at| at == url)).map(|member| member.id)
    }

    /// Returns the evidence on the disk about the member's past.
    pub(super) fn start_evidence(&self) -> StartEvidence {
        let exists = Log::exists(&self.disk.shared(), Path::new(MEMBER_DIR));
        StartEvidence {
            has_tombstone: self.files.tombstone,
            has_log: exists.unwrap_or(self.files.had_log),
            has_log_mark: self.files.had_log,
        }
    }

    /// Notes the id of the joining member, and returns the number of its process. The member then
    /// asks for the whole state.
    pub(super) fn begin_joining(&mut self, member: u64) -> u64 {
        self.member = member;
        self.files.boots += 1;
        self.generation += 1;
        self.generation
    }

    /// Creates store and log from another member's whole state, `body`.
    pub(super) fn create_from_snapshot(
        &mut self,
        plan: &HistoryPlan,
        guards: Guards,
        body: &[u8],
    ) -> Result<(), ProcessEnd> {
        let created = self.try_create_from_snapshot(plan, guards, body);
        created.map_err(|error| self.process_end(&*error))?;
        self.files.had_log = true;
        Ok(())
    }

    fn try_create_from_snapshot(
        &self,
        plan: &HistoryPlan,
        guards: Guards,
        mut body: &[u8],
    ) -> Result<(), Box<dyn Error>> {
        let file = self.new_store()?;
        let options = StoreOptions { members: Vec::new(), ..store_options(plan, guards) };
        let mut machine = KvStateMachine::open(RedbBackend::new(file)?, options)?;
        let at = machine.install_snapshot(&mut body)?;
        let dir = Path::new(MEMBER_DIR);
        let (disk, identity) = (self.disk.shared(), self.identity());
        Ok(Log::create_after(at, &disk, dir, &identity, &log_options(guards))?)
    }

    /// Returns the claim that the machine's process presents to its peers.
    pub(super) fn process_claim(&self) -> ProcessClaim {
        self.process.as_ref().map_or_else(|| self.empty_disk_claim(), |process| process.claim)
    }

    /// Returns the claim of a process with nothing on its disk.
    fn empty_disk_claim(&self) -> ProcessClaim {
        ProcessClaim {
            incarnation: Incarnation(self.files.incarnation.to_be_bytes()),
            boot: self.files.boots,
            run: process_run(self.id, self.generation),
            disk: DiskState::default(),
        }
    }

    /// Writes the remembered promises of peers, unless they were written already.
    pub(super) fn write_witness(&mut self) {
        let Some(process) = &mut self.process else { return };
        if process.witness.version() > process.witness_written {
            process.witness_written = process.witness.version();
            self.files.witness = process.witness.encode();
        }
    }

    fn identity(&self) -> LogIdentity {
        LogIdentity { cluster: 1, member: self.member, incarnation: self.files.incarnation }
    }

    /// Creates a file for a new store, and removes an unfinished file from an earlier attempt.
    fn new_store(&self) -> Result<Box<dyn DiskFile>, Box<dyn Error>> {
        let (disk, dir) = (self.disk.shared(), Path::new(MEMBER_DIR));
        disk.create_dir(dir)?;
        disk.sync_dir(Path::new("/"))?;
        let path = dir.join("db");
        if disk.exists(&path)? {
            disk.remove(&path)?;
        }
        let file = disk.open(&path, OpenMode::New)?;
        disk.sync_dir(dir)?;
        Ok(file)
    }

    /// Opens the file of the member's store.
    fn open_store(&self) -> Result<Box<dyn DiskFile>, Box<dyn Error>> {
        let path = Path::new(MEMBER_DIR).join("db");
        Ok(self.disk.shared().open(&path, OpenMode::Existing)?)
    }

    pub(super) fn process_end(&self, error: &dyn std::error::Error) -> ProcessEnd {
        if self.disk.is_power_off() {
            return ProcessEnd::Crashed;
        }
        if self.disk.has_failed() {
            return ProcessEnd::DiskFailed;
        }
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            text = format!("{text}: {cause}");
            source = cause.source();
        }
        ProcessEnd::Broken(text)
    }

    /// Starts the process. The first start creates log and store. Later starts use the log and
    /// store that are on the disk.
    pub(super) fn boot(
        &mut self,
        plan: &HistoryPlan,
        seed: u64,
        guards: Guards,
    ) -> Result<(), ProcessEnd> {
        self.generation += 1;
        self.files.boots += 1;
        let process =
            self.try_boot(plan, seed, guards).map_err(|error| self.process_end(&*error))?;
        self.files.had_log = true;
        self.process = Some(process);
        Ok(())
    }

    fn try_boot(
        &self,
        plan: &HistoryPlan,
        seed: u64,
        guards: Guards,
    ) -> Result<MemberProcess, Box<dyn Error>> {
        let disk = self.disk.shared();
        let dir = Path::new(MEMBER_DIR);
        let options = log_options(guards);
        let is_new = !Log::exists(&disk, dir)?;
        let file = if is_new { self.new_store()? } else { self.open_store()? };
        let mut machine =
            KvStateMachine::open(RedbBackend::new(file)?, store_options(plan, guards))?;
        let machine_id = self.id;
        // As in production, only the member on which a client waits for an outcome produces the
        // complete outcome.
        machine.set_answer_filter(move |RequestId(request)| is_awaited_on(request, machine_id));
        if is_new {
            Log::create(&disk, dir, &self.identity(), &options)?;
        }
        let (mut log, recovered) = Log::open(&disk, dir, &options)?;
        let state = recovered.hard_state;
        let disk_state =
            DiskState { term: state.term, vote: state.vote, last: recovered.last().index };
        let witness = Witness::decode(&self.files.witness)?;
        let initial = recover_initial_state(&mut log, machine.applied(), machine.members())?;
        let config = Config { guards, ..Config::new(self.member, recovered.boot, seed) };
        let (config, mut driver_options) = driver_options(plan, config);
        driver_options.campaign_when_connected = is_new && machine_id == 1;
        let driver = DriverCore::new(&config, driver_options, &initial)?;
        let metrics = Arc::<DriverMetrics>::default();
        let (store, watches) = (machine.store(), machine.hub());
        let hub = Box::pin(machine.hub().run());
        let policy = CheckpointPolicy { bytes: usize::MAX, entries: plan.checkpoint_entries };
        let bodies = MemoryBodies::default();
        let mut faults = Rng::new(seed);
        if faults.chance(plan.lost_bodies) {
            bodies.fail_once();
        }
        Ok(MemberProcess {
            core: RoundRunner::new(driver, Arc::clone(&metrics)),
            mail: Mail::new(plan.mail),
            tick_is_due: false,
            commit_index_due: None,
            scheduled_heartbeats: 0,
            scheduled_read_round: None,
            core_is_due: false,
            lessor: Lessor::new(ELECTION_TIME),
            pending_checkpoint: None,
            reader: log.reader(),
            watches,
            hub,
            hub_is_due: false,
            log_summary: LogSummary { last: log.last().index, ..LogSummary::default() },
            was_torn: recovered.truncated_at.is_some(),
            fetches_in_progress: 0,
            snapshot_to_write: None,
            checkpoint_to_run: None,
            snapshots: SnapshotStore::new("/outgoing".into(), bodies.clone()),
            bodies,
            drops_next_body: faults.chance(plan.lost_bodies),
            connected: BTreeMap::new(),
            claim: ProcessClaim { disk: disk_state, ..self.empty_disk_claim() },
            witness_written: witness.version(),
            witness,
            censuses: Censuses::default(),
            disowned_by: BTreeSet::new(),
            pending_change: None,
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

    /// Returns whether the machine's process is installing a snapshot.
    pub(super) fn is_installing(&self) -> bool {
        self.process.as_ref().is_some_and(|process| process.log_summary.installing)
    }

    /// Returns whether the log had a torn end when the machine's process began.
    pub(super) fn was_torn(&self) -> bool {
        self.process.as_ref().is_some_and(|process| process.was_torn)
    }

    /// Decides how far a log write has got when its process ends. If `operations` is `None`, the
    /// write has not begun. Otherwise power fails after that many disk operations. A write with
    /// fewer operations completes, but the process doesn't report that.
    pub(super) fn interrupt_log_write(&mut self, operations: Option<u64>) {
        let Some(process) = &mut self.process else { return };
        let Some(group) = process.log_group.take() else { return };
        if let Some(operations) = operations {
            self.disk.power_off_after(operations);
            // The restart finds out whether the write completed.
            let _ = process.writer.run(group);
        }
    }

    /// Lets power fail in a checkpoint that has begun, after `operations` disk operations. A
    /// checkpoint with fewer operations completes, but the process doesn't report that.
    pub(super) fn interrupt_checkpoint(&mut self, operations: u64) {
        let Some(process) = &mut self.process else { return };
        let Some(work) = process.checkpoint_to_run.take() else { return };
        self.disk.power_off_after(operations);
        // The restart finds out whether the checkpoint completed.
        let _ = work();
    }

    /// Ends the process and loses everything that was not synced.
    pub(super) fn crash(&mut self) {
        // Crash the disk before dropping the process: destructors must not complete any writes.
        self.disk.crash();
        self.process = None;
        self.generation += 1;
    }

    /// Ends the process only: the machine keeps running.
    pub(super) fn kill(&mut self) {
        self.disk.kill();
        self.process = None;
        self.generation += 1;
    }
}

impl MemberProcess {
    /// Returns whether the core must wait until the log or the state machine takes jobs from its
    /// queue.
    pub(super) fn is_blocked(&self, bound: usize) -> bool {
        self.log_jobs.len() >= bound || self.apply_jobs.len() >= bound
    }

    /// Returns whether the core has any work.
    pub(super) fn has_work(&self) -> bool {
        self.tick_is_due || !self.mail.is_empty() || self.core.has_more()
    }

    /// Runs one round of the core.
    pub(super) fn round(&mut self, rng: &mut Rng, plan: &HistoryPlan, calm: bool) -> RoundOutput {
        let (mail, tick) = (self.mail.take(), mem::take(&mut self.tick_is_due));
        let mut ports = CorePorts {
            rng,
            plan,
            are_faults_over: calm,
            mail: &mut self.mail,
            log_jobs: &mut self.log_jobs,
            apply_jobs: &mut self.apply_jobs,
            log_summary: &mut self.log_summary,
            snapshots: &self.snapshots,
            drops_next_body: &mut self.drops_next_body,
            connected: &self.connected,
            fetches_in_progress: &mut self.fetches_in_progress,
            output: RoundOutput::default(),
        };
        self.core.round(mail, tick, &mut ports);
        ports.output
    }

    /// Returns whether the log is writing enough bytes for a power cut to leave a part of them.
    pub(super) fn may_tear_write(&self) -> bool {
        let batches = self.log_group.iter().flatten().filter_map(LogJob::batch);
        batches.flat_map(|batch| &batch.entries).map(|entry| entry.data.len()).sum::<usize>()
            > 2 * SECTOR_BYTES
    }

    /// Lets the log take all its queued jobs, unless it is still writing. Returns whether the log
    /// took any.
    pub(super) fn begin_log_write(&mut self) -> bool {
        if self.log_group.is_some() {
            return false;
        }
        let Some(first) = self.log_jobs.pop_front() else { return false };
        let more = std::iter::from_fn(|| self.log_jobs.pop_front());
        self.log_group = Some(collect_log_jobs(first, more));
        true
    }

    /// Lets the state machine take queued jobs for a turn, in which it works on them together. Does
    /// nothing while a turn is under way. Returns the number of jobs taken.
    pub(super) fn begin_apply_turn(&mut self) -> usize {
        if self.turn.is_some() {
            return 0;
        }
        let before = self.apply_jobs.len();
        let Some(first) = self.apply_jobs.pop_front() else { return 0 };
        let more = std::iter::from_fn(|| self.apply_jobs.pop_front());
        self.turn = Some(ApplyBatch::gather(first, more));
        before - self.apply_jobs.len()
    }

    /// Lets the state machine work on the jobs that it has taken for this turn. If `idle`, the
    /// state machine then makes the store durable. Returns its output, and whether it can continue.
    pub(super) fn run_turn(
        &mut self,
        turn: ApplyBatch,
        idle: bool,
    ) -> (TurnOutput, Result<(), Box<dyn Error>>) {
        let output = TurnOutput::default();
        let mut out = MachinePorts {
            snapshots: &self.snapshots,
            snapshot_to_write: &mut self.snapshot_to_write,
            checkpoint_to_run: &mut self.checkpoint_to_run,
            output,
        };
        let mut done = self.applier.run(turn, &mut out);
        if done.is_ok() && idle {
            done = self.applier.checkpoint(&mut out).map_err(ApplierError::Store);
        }
        let done = done.map_err(|error: ApplierError<StoreError>| -> Box<dyn Error> {
            match error {
                ApplierError::Store(error) => error.into(),
                ApplierError::Body(error) => error.into(),
            }
        });
        (out.output, done)
    }

    /// Writes the snapshot that was requested, if there is one.
    pub(super) fn write_snapshot(&mut self) -> Option<Notice> {
        self.snapshot_to_write.take().map(|snapshot| self.snapshots.build(snapshot))
    }
}

/// Returns the violation for a member that stops although its power didn't fail.
pub(super) fn broken(id: u64, why: &str) -> InvariantViolation {
    InvariantViolation::new("members start and run", format!("member {id}: {why}"))
}
