//! The threads around the driver: core, wal, apply.

use std::fs::File;
use std::io::{BufReader, BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use node_consensus::{Config, Message, Position, Role};
use tokio::sync::watch;

use super::core::{Driver, DriverOptions, Effects};
use super::handle::{Handle, NodeStatus, Waiters};
use super::mailbox::{Inlet as _, Mail, Mailbox, Notice};
use super::peers::{OutgoingSnapshot, PeerInbox, PeerSender};
use super::{
    Applied, Applier, CheckpointPolicy, LogJob, Metrics, Options, ProposeError, ReadError,
    StartError, recover, run_group,
};
use crate::log::{Log, Recovered};
use crate::machine::{Committed, StateMachine};

/// Jobs that wait for the log or the state machine. The driver's bound on bytes that are not
/// applied comes first; if this one is reached, the core waits.
const QUEUED_JOBS: usize = 4096;

/// The store is made durable at the latest this long after something was applied.
const CHECKPOINT_INTERVAL: Duration = Duration::from_secs(30);

/// With no more work for the log this long, it prepares for later.
const LOG_IDLE: Duration = Duration::from_millis(20);

/// What a member is made of.
pub struct Parts<M> {
    /// How it behaves.
    pub options: Options,
    /// Its state.
    pub machine: M,
    /// Its log, just opened.
    pub log: Log,
    /// What opening it gave.
    pub recovered: Recovered,
    /// Its way to the peers.
    pub sender: Arc<dyn PeerSender>,
    /// Where election time-outs come from: anything that differs between members and starts.
    pub seed: u64,
}

/// A running member. Dropping it stops its threads without handing over.
#[derive(Debug)]
pub struct Running {
    mailbox: Arc<Mailbox>,
    threads: Vec<JoinHandle<()>>,
}

impl Running {
    /// Stops the threads: everything queued for the log is written, everything committed is
    /// applied, the store is made durable. [`Handle::hand_over`] comes first.
    pub fn stop(mut self) {
        self.join();
    }

    fn join(&mut self) {
        self.mailbox.stop();
        for thread in self.threads.drain(..) {
            // A thread that panicked has aborted the process.
            let _ = thread.join();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.join();
    }
}

enum ApplyJob {
    Apply(Vec<Committed>),
    Install(Position, PathBuf),
    Build,
}

/// A snapshot that is ready to be sent.
struct BuiltFile {
    at: Position,
    path: PathBuf,
}

type BuiltSlot = Arc<Mutex<Option<BuiltFile>>>;

/// Starts the threads. Before it returns, log and store have been found to fit each other.
pub fn start<M: StateMachine>(
    mut parts: Parts<M>,
) -> Result<(Handle<M::Outcome>, PeerInbox, Running), StartError> {
    let options = Arc::new(parts.options);
    empty_directory(&options.snapshot_dir).map_err(StartError::Snapshots)?;
    let initial = recover(&mut parts.log, parts.machine.applied(), &options.voters)?;
    let mut config = Config::new(options.member, parts.recovered.boot, parts.seed);
    config.election_ticks = options.election_ticks;
    let ticks = options.request_timeout.as_nanos() / options.tick.as_nanos().max(1);
    let driver_options = DriverOptions {
        campaign_when_connected: options.campaign_when_connected,
        catch_up_entries: options.catch_up_entries,
        proposal_ticks: u64::try_from(ticks).unwrap_or(u64::MAX),
        read_retry_ticks: 2,
    };
    let driver = Driver::new(&config, driver_options, &initial)?;

    let mailbox = Arc::new(Mailbox::default());
    let waiters = Arc::new(Waiters::default());
    let metrics = Arc::new(Metrics::default());
    let built = BuiltSlot::default();
    let (status_sender, status) =
        watch::channel(Arc::new(node_status(&driver, None, None, &options)));
    let (to_log, log_jobs) = sync_channel(QUEUED_JOBS);
    let (to_apply, apply_jobs) = sync_channel(QUEUED_JOBS);

    let mut threads = Vec::new();
    let wal = WalThread {
        log: parts.log,
        jobs: log_jobs,
        mailbox: Arc::clone(&mailbox),
        metrics: Arc::clone(&metrics),
    };
    threads.push(spawn("wal", move || wal.run())?);
    let apply = ApplyThread {
        applier: Applier::new(parts.machine, CheckpointPolicy::default()),
        jobs: apply_jobs,
        mailbox: Arc::clone(&mailbox),
        waiters: Arc::clone(&waiters),
        metrics: Arc::clone(&metrics),
        built: Arc::clone(&built),
        snapshot_dir: options.snapshot_dir.clone(),
    };
    threads.push(spawn("apply", move || apply.run())?);
    let core: CoreThread<M> = CoreThread {
        driver,
        options: Arc::clone(&options),
        mailbox: Arc::clone(&mailbox),
        waiters: Arc::clone(&waiters),
        metrics: Arc::clone(&metrics),
        sender: parts.sender,
        status: status_sender,
        built,
        to_log,
        to_apply,
        leader: 0,
        leader_lost: None,
        quorum_connected: None,
    };
    // First in, so that it is joined first: the others end when it drops their queues.
    threads.insert(0, spawn("core", move || core.run())?);

    let inbox = PeerInbox { inlet: Arc::clone(&mailbox) as _, status: status.clone() };
    let handle = Handle {
        mailbox: Arc::clone(&mailbox),
        waiters,
        status,
        metrics,
        options,
        next_read: Arc::default(),
    };
    Ok((handle, inbox, Running { mailbox, threads }))
}

/// A panic in one of the threads is a broken invariant: the process stops, and the restart
/// recovers from the log.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!(fatal = true, "a thread of the driver panicked; aborting");
            std::process::abort();
        }
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, StartError> {
    let body = || {
        let _guard = AbortOnPanic;
        body();
    };
    Builder::new().name(name.to_owned()).spawn(body).map_err(StartError::Thread)
}

/// Log or store has failed. Nothing may depend on it any more, and a retry could report success
/// for data that is gone.
fn fatal(what: &str, error: &dyn std::error::Error) -> ! {
    let cause = error.source().map(ToString::to_string);
    tracing::error!(fatal = true, %error, cause, "{what} failed; aborting");
    std::process::abort();
}

fn empty_directory(path: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(path)?;
    for entry in path.read_dir()? {
        std::fs::remove_file(entry?.path())?;
    }
    Ok(())
}

fn node_status(
    driver: &Driver,
    leader_lost: Option<Instant>,
    quorum_connected: Option<Instant>,
    options: &Options,
) -> NodeStatus {
    let status = driver.status();
    let (applied, durable) = driver.positions();
    NodeStatus {
        member: options.member,
        leader: status.leader,
        term: status.term,
        role: status.role,
        commit: status.commit,
        applied,
        durable,
        first: status.first,
        last: status.last,
        quorum_connected,
        leader_lost,
        peers: status.peers,
    }
}

struct CoreThread<M: StateMachine> {
    driver: Driver,
    options: Arc<Options>,
    mailbox: Arc<Mailbox>,
    waiters: Arc<Waiters<M::Outcome>>,
    metrics: Arc<Metrics>,
    sender: Arc<dyn PeerSender>,
    status: watch::Sender<Arc<NodeStatus>>,
    built: BuiltSlot,
    to_log: SyncSender<LogJob>,
    to_apply: SyncSender<ApplyJob>,
    leader: u64,
    leader_lost: Option<Instant>,
    quorum_connected: Option<Instant>,
}

impl<M: StateMachine> CoreThread<M> {
    fn run(mut self) {
        let mut next_tick = Instant::now() + self.options.tick;
        // A single voter has campaigned already.
        let effects = self.driver.advance();
        self.execute(effects);
        loop {
            let deadline = if self.driver.has_more() { Instant::now() } else { next_tick };
            let mail = self.mailbox.take(deadline);
            let stop = mail.stop;
            self.feed(mail);
            let now = Instant::now();
            if now >= next_tick {
                // After a pause one tick is due, not as many as were missed: nobody was there to
                // hear a leader.
                self.driver.tick();
                next_tick = now + self.options.tick;
            }
            let effects = self.driver.advance();
            self.execute(effects);
            self.publish(now);
            if stop {
                self.waiters.stop();
                return;
            }
        }
    }

    fn feed(&mut self, mail: Mail) {
        self.metrics.messages_received.fetch_add(mail.messages.len() as u64, Relaxed);
        self.metrics.proposals.fetch_add(mail.proposals.len() as u64, Relaxed);
        for notice in mail.notices {
            self.driver.notice(notice);
        }
        for message in mail.messages {
            self.driver.message(message);
        }
        self.driver.propose(mail.proposals);
        self.driver.read(mail.reads);
    }

    fn execute(&mut self, effects: Effects) {
        self.send(effects.send);
        for message in effects.send_snapshots {
            self.send_snapshot(message);
        }
        for (number, batch) in effects.persist {
            self.log_job(LogJob::Write(number, batch));
        }
        for fetch in effects.fetches {
            self.log_job(LogJob::Fetch(fetch));
        }
        if let Some(through) = effects.compact {
            self.log_job(LogJob::Compact(through));
        }
        if !effects.apply.is_empty() {
            self.apply_job(ApplyJob::Apply(effects.apply));
        }
        if let Some((at, body)) = effects.install {
            self.apply_job(ApplyJob::Install(at, body));
        }
        if effects.build_snapshot {
            self.apply_job(ApplyJob::Build);
        }
        for path in effects.discard {
            self.mailbox.snapshot_ended(&path, false);
            remove_quietly(&path);
        }
        for error in effects.bad_messages {
            self.metrics.messages_refused.fetch_add(1, Relaxed);
            tracing::warn!(%error, "a peer's message was refused");
        }
        if !effects.refused.is_empty() {
            self.metrics.proposals_refused.fetch_add(effects.refused.len() as u64, Relaxed);
            let refused = effects.refused.into_iter();
            self.waiters.answer(refused.map(|(id, _)| (id, Err(ProposeError::TooManyRequests))));
        }
        if !effects.reads.is_empty() {
            self.metrics.reads.fetch_add(effects.reads.len() as u64, Relaxed);
            let reads = effects.reads.into_iter();
            self.waiters.answer_reads(reads.map(|(token, at)| (token, Ok(at))));
        }
        let refused = effects.refused_reads.into_iter();
        self.waiters.answer_reads(refused.map(|token| (token, Err(ReadError::TooManyRequests))));
        self.metrics.read_rounds.store(self.driver.read_rounds(), Relaxed);
    }

    fn send(&mut self, messages: Vec<Message>) {
        let mut lost = Vec::new();
        for message in messages {
            let to = message.to;
            match self.sender.try_send(message) {
                Ok(()) => {
                    self.metrics.messages_sent.fetch_add(1, Relaxed);
                }
                Err(_) => {
                    self.metrics.messages_dropped.fetch_add(1, Relaxed);
                    if !lost.contains(&to) {
                        lost.push(to);
                    }
                }
            }
        }
        for peer in lost {
            self.mailbox.notice(Notice::Unreachable(peer));
        }
    }

    fn send_snapshot(&mut self, message: Message) {
        let peer = message.to;
        let built = self.built.lock().unwrap_or_else(PoisonError::into_inner);
        let body = built
            .as_ref()
            .filter(|built| message.snapshot == Some(built.at))
            .and_then(|built| File::open(&built.path).ok());
        let measured = body.and_then(|body| Some((body.metadata().ok()?.len(), body)));
        match measured {
            Some((bytes, body)) => {
                self.metrics.snapshots_sent.fetch_add(1, Relaxed);
                self.sender.send_snapshot(OutgoingSnapshot { message, body, bytes });
            }
            None => self.mailbox.notice(Notice::SnapshotSent { peer, arrived: false }),
        }
    }

    fn log_job(&self, job: LogJob) {
        // The thread ends only after this one.
        let _ = self.to_log.send(job);
    }

    fn apply_job(&self, job: ApplyJob) {
        let _ = self.to_apply.send(job);
    }

    fn publish(&mut self, now: Instant) {
        let (role, leader, term) = self.driver.leadership();
        if leader != self.leader {
            if self.leader != 0 {
                self.leader_lost = Some(now);
            }
            if leader != 0 {
                self.metrics.leader_changes.fetch_add(1, Relaxed);
                let leader_id = format_args!("{leader:016x}");
                tracing::info!(leader.id = %leader_id, term, leads = role == Role::Leader, "leader elected");
            } else {
                tracing::warn!(term, "leader lost");
            }
            self.leader = leader;
        }
        self.quorum_connected = match (self.driver.is_quorum_connected(), self.quorum_connected) {
            (true, since) => since.or(Some(now)),
            (false, _) => None,
        };
        let (lost, connected) = (self.leader_lost, self.quorum_connected);
        self.status.send_replace(Arc::new(node_status(
            &self.driver,
            lost,
            connected,
            &self.options,
        )));
    }
}

struct WalThread {
    log: Log,
    jobs: Receiver<LogJob>,
    mailbox: Arc<Mailbox>,
    metrics: Arc<Metrics>,
}

impl WalThread {
    fn run(mut self) {
        let mut idle_work = true;
        loop {
            let first = if idle_work {
                match self.jobs.recv_timeout(LOG_IDLE) {
                    Ok(job) => job,
                    Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {
                        idle_work =
                            self.log.prepare().unwrap_or_else(|error| fatal("the log", &error));
                        continue;
                    }
                    Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => break,
                }
            } else {
                match self.jobs.recv() {
                    Ok(job) => job,
                    Err(_) => break,
                }
            };
            idle_work = true;
            let mut group = vec![first];
            group.extend(self.jobs.try_iter());
            self.group(group);
        }
        // A record after the last one, so that damage to it can be told from a torn end.
        if let Err(error) = self.log.write(&[crate::log::Batch::default()]) {
            fatal("the log", &error);
        }
    }
}

impl WalThread {
    fn group(&mut self, group: Vec<LogJob>) {
        let entries: usize = group
            .iter()
            .map(|job| if let LogJob::Write(_, batch) = job { batch.entries.len() } else { 0 })
            .sum();
        let (started, bytes) = (Instant::now(), self.log.written_bytes());
        let notices =
            run_group(&mut self.log, group).unwrap_or_else(|error| fatal("the log", &error));
        self.metrics.log_groups.fetch_add(1, Relaxed);
        self.metrics.log_entries.fetch_add(entries as u64, Relaxed);
        self.metrics.log_bytes.fetch_add(self.log.written_bytes() - bytes, Relaxed);
        self.metrics.log_micros.fetch_add(micros(started), Relaxed);
        for notice in notices {
            self.mailbox.notice(notice);
        }
    }
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}

struct ApplyThread<M: StateMachine> {
    applier: Applier<M>,
    jobs: Receiver<ApplyJob>,
    mailbox: Arc<Mailbox>,
    waiters: Arc<Waiters<M::Outcome>>,
    metrics: Arc<Metrics>,
    built: BuiltSlot,
    snapshot_dir: PathBuf,
}

impl<M: StateMachine> ApplyThread<M> {
    fn run(mut self) {
        loop {
            match self.jobs.recv_timeout(CHECKPOINT_INTERVAL) {
                Ok(ApplyJob::Apply(mut entries)) => {
                    let mut next = None;
                    // What has gathered meanwhile goes into the same transaction.
                    for job in self.jobs.try_iter() {
                        match job {
                            ApplyJob::Apply(more) => entries.extend(more),
                            other => {
                                next = Some(other);
                                break;
                            }
                        }
                    }
                    self.apply(&entries);
                    if let Some(job) = next {
                        self.other(job);
                    }
                }
                Ok(job) => self.other(job),
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => self.checkpoint(),
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => {
                    self.checkpoint();
                    return;
                }
            }
        }
    }

    fn other(&mut self, job: ApplyJob) {
        match job {
            ApplyJob::Apply(entries) => self.apply(&entries),
            ApplyJob::Install(at, path) => self.install(at, &path),
            ApplyJob::Build => {
                let built = self.build();
                if let Err(error) = &built {
                    tracing::error!(%error, "a snapshot couldn't be made");
                }
                self.mailbox.notice(Notice::Built(built.ok()));
            }
        }
    }

    fn apply(&mut self, entries: &[Committed]) {
        let started = Instant::now();
        let Applied { at, outcomes } =
            self.applier.apply(entries).unwrap_or_else(|error| fatal("the store", &error));
        self.metrics.applied.fetch_add(entries.len() as u64, Relaxed);
        self.metrics.apply_micros.fetch_add(micros(started), Relaxed);
        self.mailbox.notice(Notice::Applied(at));
        self.waiters.answer(outcomes.into_iter().map(|(id, outcome)| (id, Ok(outcome))));
        let saved =
            self.applier.checkpoint_if_due().unwrap_or_else(|error| fatal("the store", &error));
        if let Some(at) = saved {
            self.metrics.checkpoints.fetch_add(1, Relaxed);
            self.mailbox.notice(Notice::Checkpointed(at));
        }
    }

    fn checkpoint(&mut self) {
        let machine = self.applier.machine();
        if machine.durable() == machine.applied() {
            return;
        }
        let at = self.applier.checkpoint().unwrap_or_else(|error| fatal("the store", &error));
        self.metrics.checkpoints.fetch_add(1, Relaxed);
        self.mailbox.notice(Notice::Checkpointed(at));
    }

    fn install(&mut self, at: Position, path: &Path) {
        let file = File::open(path).unwrap_or_else(|error| fatal("a received snapshot", &error));
        let installed = self
            .applier
            .install_snapshot(&mut BufReader::new(file))
            .unwrap_or_else(|error| fatal("the store", &error));
        assert_eq!(installed, at, "a snapshot's body is of another position than its message");
        remove_quietly(path);
        self.metrics.snapshots_installed.fetch_add(1, Relaxed);
        self.mailbox.snapshot_ended(path, true);
        self.mailbox.notice(Notice::Installed(at));
    }

    fn build(&mut self) -> Result<Position, Box<dyn std::error::Error>> {
        let index = self.applier.machine().applied().index;
        let path = self.snapshot_dir.join(format!("outgoing-{index:016x}"));
        let mut out = BufWriter::new(File::create(&path)?);
        let at = self.applier.write_snapshot(&mut out)?;
        out.flush()?;
        let mut slot = self.built.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(old) = slot.replace(BuiltFile { at, path })
            && old.at != at
        {
            remove_quietly(&old.path);
        }
        Ok(at)
    }
}

/// A file that stays costs space only until the next start.
fn remove_quietly(path: &Path) {
    if let Err(error) = std::fs::remove_file(path) {
        tracing::warn!(path = %path.display(), %error, "a snapshot's file couldn't be removed");
    }
}
