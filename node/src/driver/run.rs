//! The start of a member's threads, and the one that owns consensus: core.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use node_consensus::{Config, Fetch, Message, Role};
use tokio::sync::watch;

use super::apply_thread::{ApplyJob, ApplyThread};
use super::back_threads::{
    BuiltSlot, QUEUED_FETCHES, QUEUED_SNAPSHOTS, fetch, remove_quietly, write_snapshots,
};
use super::core::{Driver, DriverOptions, Effects};
use super::fatal::spawn;
use super::handle::{Handle, NodeStatus, Waiters};
use super::log_thread::WalThread;
use super::mailbox::{Inlet as _, Mail, Mailbox, Notice};
use super::peers::{OutgoingSnapshot, PeerInbox, PeerSender};
use super::{Applier, CheckpointPolicy, LogJob, Metrics, Options, ReadError, StartError, recover};
use crate::log::{Log, Recovered};
use crate::log_limit::LogLimit;
use crate::machine::StateMachine;

/// Jobs that wait for the log or the state machine. The driver's bound on bytes that are not
/// applied comes first; if this one is reached, the core waits.
const QUEUED_JOBS: usize = 4096;

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

/// Starts the threads. Before it returns, log and store have been found to fit each other.
pub fn start<M: StateMachine>(
    mut parts: Parts<M>,
) -> Result<(Handle<M::Outcome>, PeerInbox, Running), StartError> {
    let options = Arc::new(parts.options);
    empty_directory(&options.snapshot_dir).map_err(StartError::Snapshots)?;
    let (applied, members) = (parts.machine.applied(), parts.machine.members());
    let initial = recover(&mut parts.log, applied, members)?;
    let mut config = Config::new(options.member, parts.recovered.boot, parts.seed);
    config.election_ticks = options.election_ticks;
    let driver = Driver::new(&config, driver_options(&options), &initial)?;

    let mailbox = Arc::new(Mailbox::default());
    let waiters = Arc::new(Waiters::default());
    let metrics = Arc::new(Metrics::default());
    let built = BuiltSlot::default();
    let (status_sender, status) =
        watch::channel(Arc::new(node_status(&driver, None, None, &options)));
    let (leader_sender, leader) = watch::channel(status.borrow().leader);
    let (to_log, log_jobs) = sync_channel(QUEUED_JOBS);
    let (to_apply, apply_jobs) = sync_channel(QUEUED_JOBS);
    let (to_fetch, fetches) = sync_channel(QUEUED_FETCHES);
    let (to_back, snapshots) = sync_channel(QUEUED_SNAPSHOTS);
    let reader = parts.log.reader();

    let mut threads = Vec::new();
    let (wal, space) =
        WalThread::new(parts.log, log_jobs, Arc::clone(&mailbox), Arc::clone(&metrics));
    threads.push(spawn("wal", move || wal.run())?);
    let apply = ApplyThread {
        applier: Applier::new(parts.machine, CheckpointPolicy::default()),
        jobs: apply_jobs,
        mailbox: Arc::clone(&mailbox),
        waiters: Arc::clone(&waiters),
        metrics: Arc::clone(&metrics),
        to_back,
    };
    threads.push(spawn("apply", move || apply.run())?);
    let (dir, slot, inbox) =
        (options.snapshot_dir.clone(), Arc::clone(&built), Arc::clone(&mailbox));
    threads.push(spawn("back", move || write_snapshots(&dir, &snapshots, &slot, &inbox))?);
    let inbox = Arc::clone(&mailbox);
    threads.push(spawn("fetch", move || fetch(&reader, &fetches, &inbox))?);
    let core: CoreThread<M> = CoreThread {
        driver,
        options: Arc::clone(&options),
        mailbox: Arc::clone(&mailbox),
        waiters: Arc::clone(&waiters),
        metrics: Arc::clone(&metrics),
        sender: parts.sender,
        status: status_sender,
        leader_sender,
        built,
        to_log,
        to_fetch,
        to_apply,
        leader: 0,
        leader_lost: None,
        quorum_connected: None,
        refused_messages: LogLimit::new(),
    };
    // First in, so that it is joined first: the others end when it drops their queues.
    threads.insert(0, spawn("core", move || core.run())?);

    let inbox = PeerInbox { inlet: Arc::clone(&mailbox) as _, status: status.clone() };
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
    Ok((handle, inbox, Running { mailbox, threads }))
}

/// See [`DriverOptions::max_backlog_bytes`].
const MAX_BACKLOG_BYTES: usize = 128 * 1024 * 1024;

fn driver_options(options: &Options) -> DriverOptions {
    let ticks = options.request_timeout.as_nanos() / options.tick.as_nanos().max(1);
    DriverOptions {
        campaign_when_connected: options.campaign_when_connected,
        catch_up_entries: options.catch_up_entries,
        proposal_ticks: u64::try_from(ticks).unwrap_or(u64::MAX),
        read_retry_ticks: 2,
        max_backlog_bytes: MAX_BACKLOG_BYTES,
    }
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
        members: Arc::clone(driver.members()),
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
    leader_sender: watch::Sender<u64>,
    built: BuiltSlot,
    to_log: SyncSender<LogJob>,
    to_fetch: SyncSender<Fetch>,
    to_apply: SyncSender<ApplyJob>,
    leader: u64,
    leader_lost: Option<Instant>,
    quorum_connected: Option<Instant>,
    refused_messages: LogLimit<1>,
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
            let id = fetch.id;
            if self.to_fetch.try_send(fetch).is_err() {
                self.mailbox.notice(Notice::Fetched { id, entries: Vec::new() });
            }
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
        if effects.drop_snapshot {
            let built = self.built.lock().unwrap_or_else(PoisonError::into_inner).take();
            built.into_iter().for_each(|built| remove_quietly(&built.path));
        }
        for path in effects.discard {
            self.mailbox.snapshot_ended(&path, false);
            remove_quietly(&path);
        }
        for error in effects.bad_messages {
            self.metrics.messages_refused.fetch_add(1, Relaxed);
            if let Some(suppressed) = self.refused_messages.pass(0, Instant::now()) {
                tracing::warn!(%error, suppressed, "a peer's message was refused");
            }
        }
        if !effects.refused.is_empty() {
            self.metrics.proposals_refused.fetch_add(effects.refused.len() as u64, Relaxed);
            let refused = effects.refused.into_iter();
            self.waiters.answer(refused.map(|(id, why)| (id, Err(why.into()))));
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
                let leader_id = format_args!("{leader:x}");
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
        let leader = self.leader;
        self.leader_sender.send_if_modified(|told| std::mem::replace(told, leader) != leader);
    }
}
