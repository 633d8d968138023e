//! Starts a member's threads. This module also contains the core thread, which owns consensus.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use node_consensus::{Config, FetchRequest, Message, Position, Role, StepError};
use node_state::state_machine::{CheckpointWork, RequestId, Snapshot, StateMachine};
use tokio::sync::watch;

use super::apply_thread::{ApplyThreadSink, apply};
use super::back_threads::{
    QUEUED_CHECKPOINTS, QUEUED_FETCHES, QUEUED_SNAPSHOTS, fetch, run_checkpoints, write_snapshots,
};
use super::driver_core::DriverCore;
use super::driver_options::DriverOptions;
use super::fatal::spawn;
use super::handle::Handle;
use super::log_thread::WalThread;
use super::mail::{Mail, Notice, ReadToken};
use super::mailbox::{CoreInbox as _, Mailbox};
use super::node_status::{NodeStatus, Observations};
use super::peers::{OutgoingSnapshot, PeerInbox, PeerSender, SendError};
use super::round_runner::{EffectSink, RoundRunner};
use super::snapshot_store::{SnapshotFiles, SnapshotStore};
use super::waiters::Waiters;
use super::{
    Applier, ApplyJob, COMMIT_INDEX_DELAY, CheckpointPolicy, DriverMetrics, LogJob, LogWriter,
    MIN_SHARED_READS, MemberOptions, ProposeError, QUEUED_JOBS, READ_HEARTBEAT_DELAY,
    READ_ROUND_DELAY, ReadBarrierError, StartError, recover_initial_state,
};
use crate::log::{Log, RecoveredState};
use crate::log_limit::LogLimit;

/// Components from which a member is started.
pub struct MemberParts<M> {
    pub options: MemberOptions,
    /// State machine with its recovered state.
    pub machine: M,
    /// The log, as [`Log::open`](crate::log::Log::open) returned it.
    pub log: Log,
    /// The state that opening the log recovered.
    pub recovered: RecoveredState,
    /// Queues for messages to peers.
    pub sender: Arc<dyn PeerSender>,
    /// Seed of the random election time-outs. It should differ between members and between starts.
    pub seed: u64,
}

/// A running member. Dropping it stops its threads without a transfer of leadership.
#[derive(Debug)]
pub struct RunningDriver {
    mailbox: Arc<Mailbox>,
    threads: Vec<JoinHandle<()>>,
}

impl RunningDriver {
    /// Stops the threads. First, all queued batches are written, all committed entries are applied,
    /// and the store is made durable. Call [`Handle::hand_over`] before this.
    pub fn stop(mut self) {
        self.join();
    }

    fn join(&mut self) {
        self.mailbox.stop();
        for thread in self.threads.drain(..) {
            // A join can't fail, because a thread that panics aborts the process.
            let _ = thread.join();
        }
    }
}

impl Drop for RunningDriver {
    fn drop(&mut self) {
        self.join();
    }
}

/// Starts the threads, after checking that the log and the store fit each other.
pub fn start<M: StateMachine>(
    mut parts: MemberParts<M>,
) -> Result<(Handle<M::Outcome>, PeerInbox, RunningDriver), StartError> {
    let options = Arc::new(parts.options);
    empty_directory(&options.snapshot_dir).map_err(StartError::Snapshots)?;
    let (applied, members) = (parts.machine.applied(), parts.machine.members());
    let initial = recover_initial_state(&mut parts.log, applied, members)?;
    let mut config = Config::new(options.member, parts.recovered.boot, parts.seed);
    config.election_ticks = options.election_ticks;
    let driver = DriverCore::new(&config, driver_options(&options), &initial)?;

    let mailbox = Arc::new(Mailbox::default());
    let waiters = Arc::new(Waiters::default());
    let metrics = Arc::new(DriverMetrics::default());
    let snapshots = Arc::new(SnapshotStore::new(options.snapshot_dir.clone(), SnapshotFiles));
    let seen = Observations::default();
    let first = NodeStatus::of(&driver, options.member, &seen);
    let (leader_sender, leader) = watch::channel(first.leader);
    let (status_sender, status) = watch::channel(Arc::new(first));
    let (to_log, log_jobs) = sync_channel(QUEUED_JOBS);
    let (to_apply, apply_jobs) = sync_channel(QUEUED_JOBS);
    let (to_fetch, fetches) = sync_channel(QUEUED_FETCHES);
    let reader = parts.log.reader();

    let mut threads = Vec::new();
    let (bodies, inbox) = (Arc::clone(&snapshots), Arc::clone(&mailbox));
    let to_back = start_back_thread(bodies, inbox, &mut threads)?;
    let to_checkpoint = start_checkpoint_thread::<M>(&metrics, &mailbox, &mut threads)?;
    let writer = LogWriter::new(parts.log, Arc::clone(&metrics));
    let (wal, space) = WalThread::new(writer, log_jobs, Arc::clone(&mailbox));
    threads.push(spawn("wal", move || wal.run())?);
    let policy = CheckpointPolicy::default();
    let applier = Applier::new(parts.machine, policy, Arc::clone(&metrics));
    let out = ApplyThreadSink {
        mailbox: Arc::clone(&mailbox),
        waiters: Arc::clone(&waiters),
        snapshots: Arc::clone(&snapshots),
        to_back,
        to_checkpoint,
    };
    threads.push(spawn("apply", move || apply(applier, &apply_jobs, out))?);
    let inbox = Arc::clone(&mailbox);
    threads.push(spawn("fetch", move || fetch(&reader, &fetches, &inbox))?);
    let out: CoreThreadSink<M> = CoreThreadSink {
        mailbox: Arc::clone(&mailbox),
        waiters: Arc::clone(&waiters),
        sender: parts.sender,
        snapshots,
        to_log,
        to_fetch,
        to_apply,
        bad_messages: LogLimit::new(),
    };
    let core = CoreThread {
        core: RoundRunner::new(driver, Arc::clone(&metrics)),
        out,
        options: Arc::clone(&options),
        metrics: Arc::clone(&metrics),
        status: status_sender,
        leader: leader_sender,
        observations: seen,
    };
    // The core thread comes first and so is joined first. The other threads end once it has dropped
    // their queues.
    threads.insert(0, spawn("core", move || core.run())?);

    let inbox = PeerInbox { core_inbox: Arc::clone(&mailbox) as _, status: status.clone() };
    let handle = Handle {
        mailbox: Arc::clone(&mailbox),
        waiters,
        status,
        leader,
        space,
        metrics,
        options,
        next_read: Arc::default(),
    };
    Ok((handle, inbox, RunningDriver { mailbox, threads }))
}

/// Starts the thread that writes snapshots. Returns its queue.
fn start_back_thread<S: Snapshot>(
    bodies: Arc<SnapshotStore<SnapshotFiles>>,
    mailbox: Arc<Mailbox>,
    threads: &mut Vec<JoinHandle<()>>,
) -> Result<SyncSender<S>, StartError> {
    let (queue, wanted) = sync_channel(QUEUED_SNAPSHOTS);
    threads.push(spawn("back", move || write_snapshots(&wanted, &bodies, &mailbox))?);
    Ok(queue)
}

/// Starts the thread that makes the store durable. Returns its queue.
fn start_checkpoint_thread<M: StateMachine>(
    metrics: &Arc<DriverMetrics>,
    mailbox: &Arc<Mailbox>,
    threads: &mut Vec<JoinHandle<()>>,
) -> Result<SyncSender<CheckpointWork<M::Error>>, StartError> {
    let (queue, checkpoints) = sync_channel(QUEUED_CHECKPOINTS);
    let (metrics, mailbox) = (Arc::clone(metrics), Arc::clone(mailbox));
    let run = move || run_checkpoints::<M>(&checkpoints, &metrics, &mailbox);
    threads.push(spawn("checkpoint", run)?);
    Ok(queue)
}

/// Limit on unapplied bytes: see [`DriverOptions::max_backlog_bytes`].
const MAX_BACKLOG_BYTES: usize = 128 * 1024 * 1024;

fn driver_options(options: &MemberOptions) -> DriverOptions {
    let ticks = options.request_timeout.as_nanos() / options.tick.as_nanos().max(1);
    DriverOptions {
        campaign_when_connected: options.campaign_when_connected,
        hasten_first_election: options.hasten_first_election,
        catch_up_entries: options.catch_up_entries,
        proposal_ticks: u64::try_from(ticks).unwrap_or(u64::MAX),
        read_retry_ticks: 2,
        min_shared_reads: MIN_SHARED_READS,
        max_backlog_bytes: MAX_BACKLOG_BYTES,
    }
}

fn empty_directory(path: &Path) -> std::io::Result<()> {
    muster_files::data::make_folder(path)?;
    for entry in path.read_dir()? {
        muster_files::data::remove(&entry?.path())?;
    }
    Ok(())
}

/// Returns the time at which the delay of `round` ends. The earlier time stays if it is of the same
/// round, and otherwise it is `new_due`.
fn due_of(
    round: Option<u64>,
    earlier: Option<(u64, Instant)>,
    new_due: Instant,
) -> Option<(u64, Instant)> {
    let round = round?;
    Some(earlier.filter(|(same, _)| *same == round).unwrap_or((round, new_due)))
}

struct CoreThread<M: StateMachine> {
    core: RoundRunner,
    out: CoreThreadSink<M>,
    options: Arc<MemberOptions>,
    metrics: Arc<DriverMetrics>,
    status: watch::Sender<Arc<NodeStatus>>,
    leader: watch::Sender<u64>,
    observations: Observations,
}

impl<M: StateMachine> CoreThread<M> {
    fn run(mut self) {
        let mut next_tick = Instant::now() + self.options.tick;
        // Time at which peers are sent the commit index, if a peer lacks it.
        let mut commit_index_due: Option<Instant> = None;
        // Number of the oldest read round whose heartbeats are partly held back, and the time at
        // which they are sent.
        let mut heartbeats_due: Option<(u64, Instant)> = None;
        // Number of the last read round, and the time at which the next, delayed one starts.
        let mut read_round_due: Option<(u64, Instant)> = None;
        // This round has no input. It is needed because a single voter has already campaigned,
        // which has effects.
        self.core.round(Mail::default(), false, &mut self.out);
        loop {
            let reads_due = [heartbeats_due, read_round_due].map(|due| due.map(|(_, due)| due));
            let delays = reads_due.into_iter().chain([commit_index_due]);
            let deadline = if self.core.has_more() {
                Instant::now()
            } else {
                delays.flatten().fold(next_tick, Instant::min)
            };
            let mut mail = self.out.mailbox.take(deadline);
            let stop = mail.stop;
            let now = Instant::now();
            let tick = now >= next_tick;
            if tick {
                if now >= next_tick + self.options.tick {
                    self.count_late_heartbeats();
                }
                next_tick = now + self.options.tick;
            }
            if commit_index_due.take_if(|due| *due <= now).is_some() {
                mail.notice(Notice::SendCommitIndex);
            }
            if heartbeats_due.take_if(|(_, due)| *due <= now).is_some() {
                mail.notice(Notice::SendHeldHeartbeats);
            }
            if read_round_due.take_if(|(_, due)| *due <= now).is_some() {
                mail.notice(Notice::StartReadRound);
            }
            self.core.round(mail, tick, &mut self.out);
            let driver = self.core.driver();
            let held = driver.oldest_held_heartbeats();
            heartbeats_due = due_of(held, heartbeats_due, now + READ_HEARTBEAT_DELAY);
            let delayed = driver.delayed_read_round();
            read_round_due = due_of(delayed, read_round_due, now + READ_ROUND_DELAY);
            if !self.core.driver().has_unsent_commit() {
                commit_index_due = None;
            } else if commit_index_due.is_none() {
                commit_index_due = Some(now + COMMIT_INDEX_DELAY);
            }
            self.publish(now);
            if stop {
                self.out.waiters.stop();
                return;
            }
        }
    }

    /// Counts one late heartbeat for each peer, if this member leads. The caller has found that the
    /// tick came a whole tick late.
    fn count_late_heartbeats(&self) {
        let driver = self.core.driver();
        if driver.leadership().0 == Role::Leader {
            let members = driver.members();
            let others = (members.voters.len() + members.learners.len()).saturating_sub(1);
            self.metrics.late_heartbeats.fetch_add(others as u64, Relaxed);
        }
    }

    fn publish(&mut self, now: Instant) {
        let driver = self.core.driver();
        let (role, leader, term) = driver.leadership();
        if self.observations.observe(leader, driver.is_quorum_connected(), now) {
            if leader != 0 {
                self.metrics.leader_changes.fetch_add(1, Relaxed);
                let leader_id = format_args!("{leader:x}");
                tracing::info!(leader.id = %leader_id, term, leads = role == Role::Leader, "leader elected");
            } else {
                tracing::warn!(term, "leader lost");
            }
        }
        let status = NodeStatus::of(driver, self.options.member, &self.observations);
        self.status.send_replace(Arc::new(status));
        self.leader.send_if_modified(|told| std::mem::replace(told, leader) != leader);
    }
}

/// Channels of the core thread to the other threads, to the peers and to waiting requests.
struct CoreThreadSink<M: StateMachine> {
    mailbox: Arc<Mailbox>,
    waiters: Arc<Waiters<M::Outcome>>,
    sender: Arc<dyn PeerSender>,
    snapshots: Arc<SnapshotStore<SnapshotFiles>>,
    to_log: SyncSender<LogJob>,
    to_fetch: SyncSender<FetchRequest>,
    to_apply: SyncSender<ApplyJob>,
    bad_messages: LogLimit<1>,
}

impl<M: StateMachine> EffectSink for CoreThreadSink<M> {
    fn send(&mut self, message: Message) -> Result<(), SendError> {
        self.sender.try_send(message)
    }

    fn send_snapshot(&mut self, message: Message) -> bool {
        let body = self.snapshots.body_of(&message);
        let measured = body.and_then(|body| Some((body.metadata().ok()?.len(), body)));
        let Some((bytes, body)) = measured else { return false };
        self.sender.send_snapshot(OutgoingSnapshot { message, body, bytes });
        true
    }

    fn log(&mut self, job: LogJob) {
        // The send can't fail, because the log thread ends only after the core thread.
        let _ = self.to_log.send(job);
    }

    fn apply(&mut self, job: ApplyJob) {
        let _ = self.to_apply.send(job);
    }

    fn fetch(&mut self, fetch: FetchRequest) -> bool {
        self.to_fetch.try_send(fetch).is_ok()
    }

    fn drop_snapshot(&mut self) {
        self.snapshots.drop_built();
    }

    fn discard(&mut self, body: &Path) {
        self.mailbox.snapshot_ended(body, false);
        self.snapshots.remove(body);
    }

    fn notice(&mut self, notice: Notice) {
        self.mailbox.notice(notice);
    }

    fn bad_message(&mut self, error: &StepError) {
        if let Some(suppressed) = self.bad_messages.pass(0, Instant::now()) {
            tracing::warn!(%error, suppressed, "a peer's message was refused");
        }
    }

    fn refuse_proposals(&mut self, proposals: Vec<RequestId>) {
        let refused = proposals.into_iter();
        self.waiters.proposals.answer(refused.map(|id| (id, Err(ProposeError::TooManyRequests))));
    }

    fn lose_proposals(&mut self, proposals: Vec<RequestId>) {
        let lost = proposals.into_iter();
        self.waiters.proposals.answer(lost.map(|id| (id, Err(ProposeError::TimeoutLeaderFailed))));
    }

    fn release_reads(&mut self, reads: Vec<(ReadToken, Position)>) {
        self.waiters.reads.answer(reads.into_iter().map(|(token, at)| (token, Ok(at))));
    }

    fn refuse_reads(&mut self, reads: Vec<ReadToken>) {
        let refused =
            reads.into_iter().map(|token| (token, Err(ReadBarrierError::TooManyRequests)));
        self.waiters.reads.answer(refused);
    }
}
