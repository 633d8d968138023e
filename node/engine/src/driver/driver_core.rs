//! The synchronous driver: events in, effects out. It has no clock, no thread and no I/O.
//!
//! The rule "persist, then send" is implemented in this module and nowhere else. The messages of
//! [`Ready::after_persist`] wait in [`DriverCore::waiting`]. They are sent once the log has
//! reported that their batch is durable.
//!
//! A received snapshot is installed in three steps, each durable before the next:
//! 1. the log notes that an install is under way;
//! 2. the store replaces its content;
//! 3. the log is emptied, and begins after the snapshot.
//!
//! While the install is under way, batches that consensus produces wait until the store has
//! replaced its content. So if a store is ahead of its log after a crash, either the store holds
//! the received snapshot, or the log lost data.

mod elections;
mod install;
mod read_confirmation;

use std::collections::{BTreeSet, VecDeque};
use std::mem;
use std::path::PathBuf;
use std::sync::Arc;

use node_consensus::{
    Config, ConfigError, Consensus, Entry, FetchRequest, Guards, HardState, InitialState, Members,
    Message, MessageKind, Position, Ready, Role, Status, StepError,
};
use node_state::state_machine::{AppliedChange, CommittedEntry, RequestId};

use super::Notice;
use super::driver_options::DriverOptions;
use super::mail::{ClientProposal, ReadToken};
use super::outgoing_snapshot_body::OutgoingSnapshotBody;
use super::proposal_queue::{ProposalGroup, ProposalQueue};
use super::proposed_requests::ProposedRequests;
use super::read_heartbeats::ReadHeartbeats;
use super::read_queue::ReadQueue;
use crate::log::Batch;
use crate::witness::Promise;

/// Number of past configurations that the driver remembers, to check the members in a finished
/// snapshot. A snapshot of an older configuration isn't checked. Only a few changes of members can
/// happen while one snapshot is built.
const REMEMBERED_CONFIGURATIONS: usize = 16;

/// Compares the voters and learners of consensus with those of the member table. If they differ,
/// consensus may count a majority that doesn't exist.
///
/// # Panics
/// If they differ. The process must end, because no further step would be safe.
fn compare_members(index: u64, consensus: &Members, table: &Members) {
    assert!(
        consensus == table,
        "after entry {index} consensus counts with {consensus:x?}, and the member table says {table:x?}: this member can't go on; replace it from its peers, and report this"
    );
}

/// Work that the driver's caller must do. The fields may be executed in any order, because none
/// depends on another.
#[derive(Debug, Default)]
pub struct Effects {
    /// Messages to send to peers at once.
    pub send: Vec<Message>,
    /// `Snapshot` messages to peers. Each must be sent together with the snapshot body that was
    /// built last.
    pub send_snapshots: Vec<Message>,
    /// Numbered batches for the log, in order. [`Notice::Persisted`] reports the highest number
    /// that is durable.
    pub persist: Vec<(u64, Batch)>,
    /// Committed entries for the state machine, in order.
    pub apply: Vec<CommittedEntry>,
    /// Position and file of a snapshot that must replace the store durably. [`Notice::Installed`]
    /// reports the end.
    pub install: Option<(Position, PathBuf)>,
    /// Files of snapshot bodies that are no longer needed.
    pub discard: Vec<PathBuf>,
    /// Whether to build a snapshot; [`Notice::Built`] reports the end.
    pub build_snapshot: bool,
    /// Whether to remove the snapshot body that was built last.
    pub drop_snapshot: bool,
    /// Entries to read from the log; [`Notice::Fetched`] brings them.
    pub fetches: Vec<FetchRequest>,
    /// Last index that the log may drop. [`Notice::Compacted`] reports the position after which the
    /// log then begins.
    pub compact: Option<u64>,
    /// Requests of this member's clients whose proposals were refused, and so will never have an
    /// effect.
    pub refused_proposals: Vec<RequestId>,
    /// Requests of this member's clients that were proposed to a leader whose process has ended. A
    /// few of them may already have an outcome. The others probably never take effect.
    pub lost_proposals: Vec<RequestId>,
    /// Reads that may be answered once the store has applied the given position.
    pub reads: Vec<(ReadToken, Position)>,
    /// Reads that were refused because too many reads wait already.
    pub refused_reads: Vec<ReadToken>,
    /// Reasons for which peers' messages were refused.
    pub bad_messages: Vec<StepError>,
}

/// A batch that is being written to disk.
#[derive(Debug)]
struct UnpersistedBatch {
    batch: u64,
    /// Number of the latest `Ready` that becomes durable together with this batch.
    ready: u64,
    after: Vec<Message>,
    since: u64,
}

/// A snapshot that is being installed in the store.
#[derive(Debug)]
struct SnapshotInstall {
    at: Position,
    body: Option<PathBuf>,
    /// Number of the batch that records the start of the install in the log. The store must not
    /// change before that batch is durable.
    intent: u64,
    /// Batches that the log gets only after the store has installed the snapshot.
    held_batches: Vec<(Batch, u64, Vec<Message>)>,
}

/// Driver of one member. Production threads and the simulation run this same type.
#[derive(Debug)]
pub struct DriverCore {
    consensus: Consensus,
    options: DriverOptions,
    /// Whether this member has been connected to a quorum at any time since its start.
    was_quorum_connected: bool,
    guards: Guards,
    member: u64,
    /// Past and current configurations, oldest first. Each has the index of the entry that started
    /// it.
    configurations: VecDeque<(u64, Arc<Members>)>,
    election_ticks: u64,
    proposals: ProposalQueue,
    proposed: ProposedRequests,
    reads: ReadQueue,
    read_heartbeats: ReadHeartbeats,
    next_batch: u64,
    waiting: VecDeque<UnpersistedBatch>,
    lazy_hard_state: Option<HardState>,
    persisted_commit: u64,
    install: Option<SnapshotInstall>,
    /// Number of the batch that records the finished install in the log, and the snapshot's
    /// position.
    snapshot_batch: Option<(u64, Position)>,
    incoming: Option<PathBuf>,
    building: bool,
    outgoing: Option<OutgoingSnapshotBody>,
    backlog: VecDeque<(u64, usize)>,
    backlog_bytes: usize,
    applied: Position,
    durable: Position,
    connected: BTreeSet<u64>,
    promised: Promise,
    now: u64,
    /// Whether peers must be told the commit index in this round, because no append has carried it
    /// to them in time.
    must_send_commit_index: bool,
    /// Whether a tick came in this round. Its heartbeats go to all members.
    has_ticked: bool,
    effects: Effects,
}

impl DriverCore {
    /// Starts from the state that was recovered from the log and the store.
    ///
    /// # Panics
    ///
    /// If two limits contradict each other: see [`DriverOptions::max_backlog_bytes`].
    pub fn new(
        config: &Config,
        options: DriverOptions,
        initial: &InitialState,
    ) -> Result<Self, ConfigError> {
        let (uncommitted, backlog) = (config.max_uncommitted_bytes, options.max_backlog_bytes);
        assert!(
            uncommitted < backlog as u64,
            "{uncommitted} bytes may be uncommitted, so {backlog} are no bound on the backlog"
        );
        let mut driver = Self {
            consensus: Consensus::new(config, initial)?,
            options,
            was_quorum_connected: false,
            guards: config.guards,
            member: config.member,
            configurations: VecDeque::new(),
            election_ticks: config.election_ticks as u64,
            proposals: ProposalQueue::default(),
            proposed: ProposedRequests::default(),
            reads: ReadQueue::new(options.read_retry_ticks, options.min_shared_reads),
            read_heartbeats: ReadHeartbeats::default(),
            has_ticked: false,
            next_batch: 1,
            waiting: VecDeque::new(),
            lazy_hard_state: None,
            persisted_commit: initial.hard_state.commit,
            install: None,
            snapshot_batch: None,
            incoming: None,
            building: false,
            outgoing: None,
            backlog: VecDeque::new(),
            backlog_bytes: 0,
            applied: initial.applied,
            durable: initial.applied,
            connected: BTreeSet::new(),
            promised: Promise::default(),
            now: 0,
            must_send_commit_index: false,
            effects: Effects::default(),
        };
        driver.record_members(initial.applied.index);
        driver.record_backlog(&initial.entries);
        if driver.members().voters == [config.member] {
            driver.consensus.campaign();
        }
        Ok(driver)
    }

    /// Advances the clock by one tick.
    pub fn tick(&mut self) {
        self.now += 1;
        self.has_ticked = true;
        self.consensus.tick();
        let before = self.now.saturating_sub(self.options.proposal_ticks);
        self.proposals.expire(before);
        self.reads.expire(before);
        self.reads.end_delay();
        self.transfer_from_stuck_disk();
        // With `campaign_when_connected`, the member campaigns again at each tick while there is no
        // leader. A pre-vote request or its answer may have been lost because a stream was not
        // connected yet.
        self.campaign_if_connected();
    }

    /// Queues proposals of this member's own clients, or refuses them under overload.
    pub fn propose(&mut self, proposals: impl IntoIterator<Item = ClientProposal>) {
        let overloaded = self.backlog_bytes > self.options.max_backlog_bytes;
        for proposal in proposals {
            let id = proposal.id;
            if overloaded || !self.proposals.push_own(proposal, self.now) {
                self.effects.refused_proposals.push(id);
            }
        }
    }

    /// Queues reads that wait for a read barrier. Refuses those that exceed the queue's limit.
    pub fn read(&mut self, tokens: impl IntoIterator<Item = ReadToken>) {
        for token in tokens {
            if !self.reads.push(token, self.now) {
                self.effects.refused_reads.push(token);
            }
        }
    }

    /// Handles a message from a peer. Forwarded proposals are queued, messages that can't be used
    /// now are dropped, and all others are passed to consensus.
    pub fn message(&mut self, message: Message) {
        match message.kind {
            MessageKind::Propose => {
                if message.to == self.member && self.members().contains(message.from) {
                    self.proposals.push_forwarded(message, self.now);
                }
            }
            // Too many bytes of entries are not applied yet, so the append is dropped. The leader
            // will send it again.
            MessageKind::Append
                if !message.entries.is_empty()
                    && self.backlog_bytes > self.options.max_backlog_bytes => {}
            // A snapshot that was received with its body arrives as `Notice::Snapshot`. A
            // `Snapshot` message without a body is useless, so it is ignored.
            MessageKind::Snapshot => {}
            // No correct member sets `request_snapshot`, so the message is dropped. A leader that
            // accepted such a message would build snapshots for ever.
            MessageKind::AppendResponse if message.request_snapshot != 0 => {}
            _ => self.step(message),
        }
    }

    fn step(&mut self, message: Message) {
        self.read_heartbeats.record_answer(&message);
        if let Err(error) = self.consensus.step(message) {
            self.effects.bad_messages.push(error);
        }
    }

    /// Handles an event of another thread or of the transport.
    pub fn notice(&mut self, notice: Notice) {
        match notice {
            Notice::Persisted(batch) => self.handle_persisted(batch),
            Notice::Applied { at, changes } => self.handle_applied(at, changes),
            // A checkpoint and the install of a snapshot run on different threads. So the report of
            // the earlier position can arrive last.
            Notice::Checkpointed(at) if at.index <= self.durable.index => {}
            Notice::Checkpointed(at) => {
                self.durable = at;
                let through = at.index.saturating_sub(self.options.catch_up_entries);
                self.effects.compact = Some(through).filter(|through| *through > 0);
            }
            Notice::Compacted(base) => {
                self.consensus.compact(base.index);
                if let Some(outgoing) = &mut self.outgoing {
                    outgoing.compacted(base.index);
                }
            }
            Notice::Installed { at, members } => self.finish_install(at, &members),
            Notice::Built(snapshot) => {
                self.building = false;
                self.outgoing =
                    snapshot.as_ref().map(|(at, _)| OutgoingSnapshotBody::new(at.index));
                if let Some((at, members)) = &snapshot {
                    self.compare_snapshot(at.index, members);
                }
                self.consensus.set_snapshot(snapshot);
            }
            Notice::Fetched { id, entries } => self.consensus.supply_fetched(id, &entries),
            Notice::Snapshot(snapshot) => self.receive_snapshot(snapshot),
            Notice::SnapshotSent { peer, arrived } => {
                if let Some(outgoing) = &mut self.outgoing {
                    outgoing.end(peer);
                }
                self.consensus.report_snapshot(peer, arrived);
            }
            Notice::Unreachable(peer) => {
                self.consensus.report_unreachable(peer);
                self.stop_waiting_for_read_answer(peer);
            }
            Notice::Connected(peer) => {
                self.connected.insert(peer);
                self.hasten_if_connected();
                self.campaign_if_connected();
            }
            Notice::Disconnected(peer) => {
                self.connected.remove(&peer);
                self.stop_waiting_for_read_answer(peer);
            }
            Notice::ProcessEnded(peer) => self.succeed(peer),
            Notice::SendCommitIndex => self.must_send_commit_index = true,
            Notice::SendHeldHeartbeats => self.send_held_heartbeats(),
            Notice::StartReadRound => self.reads.end_delay(),
            Notice::Campaign => self.consensus.campaign(),
            Notice::Transfer(to) => {
                if let Some(to) = to.or_else(|| self.successor()) {
                    self.consensus.transfer_leader(to);
                }
            }
        }
    }

    /// Returns all work that follows from the inputs so far.
    pub fn advance(&mut self) -> Effects {
        self.propose_queued();
        self.reads.start_round(&mut self.consensus, self.now);
        self.handle_all_ready();
        // When a round is confirmed, the next round starts at once. All reads that arrived during
        // the confirmed round share it.
        while self.reads.start_round(&mut self.consensus, self.now) {
            self.handle_all_ready();
        }
        self.send_commit_index();
        self.drop_snapshot();
        self.has_ticked = false;
        let mut effects = mem::take(&mut self.effects);
        self.reads.release(self.applied, &mut effects.reads);
        effects
    }

    /// Sends the commit index to peers that lack it. If [`Notice::SendCommitIndex`] has arrived,
    /// all of them get it now. Otherwise only those peers get it whose own proposals were
    /// committed.
    fn send_commit_index(&mut self) {
        let is_due = mem::take(&mut self.must_send_commit_index);
        if self.consensus.send_commit_index(!is_due) {
            self.handle_all_ready();
        }
    }

    /// Returns whether a peer lacks the commit index. If this stays so for
    /// [`COMMIT_INDEX_DELAY`](super::COMMIT_INDEX_DELAY), the caller passes
    /// [`Notice::SendCommitIndex`].
    pub fn has_unsent_commit(&self) -> bool {
        self.consensus.has_unsent_commit()
    }

    /// Returns the full status of consensus at this moment.
    pub fn status(&self) -> Status {
        self.consensus.status()
    }

    /// Returns role, leader and term.
    pub fn leadership(&self) -> (Role, u64, u64) {
        self.consensus.leadership()
    }

    /// Returns the position of the last applied entry, and that of the last entry that the store
    /// holds durably.
    pub fn positions(&self) -> (Position, Position) {
        (self.applied, self.durable)
    }

    /// Returns all promises that this process has made: those in its messages, and a leader's
    /// durable log, which counts as its own acknowledgement.
    pub fn promised(&self) -> Promise {
        let (term, commit) = self.consensus.term_and_commit();
        self.promised.with_commit(term, commit)
    }

    /// Returns the term of entry `index`, if it is in the log.
    pub fn term_at(&self, index: u64) -> Option<u64> {
        self.consensus.term_at(index)
    }

    /// Returns the number of ReadIndex rounds started so far.
    pub fn read_rounds(&self) -> u64 {
        self.reads.rounds_started
    }

    /// Returns the voters and learners of the current configuration.
    pub fn members(&self) -> &Arc<Members> {
        self.consensus.members()
    }

    /// Returns whether this member was removed, and the cluster no longer needs it.
    pub fn has_left(&self) -> bool {
        self.consensus.has_left()
    }

    /// Returns whether this member may be the only one that knows of its removal. That is possible
    /// if it is no longer in the configuration, or if it leads. It is also possible while committed
    /// entries are not applied yet, because one of them may remove it.
    pub fn may_be_only_one_to_know_removal(&self) -> bool {
        self.leadership().0 == Role::Leader
            || self.applied.index < self.status().commit
            || !self.members().contains(self.member)
    }

    /// Records that consensus has used its current members since the entry at `index`.
    fn record_members(&mut self, index: u64) {
        if self.configurations.len() == REMEMBERED_CONFIGURATIONS {
            self.configurations.pop_front();
        }
        self.configurations.push_back((index, Arc::clone(self.consensus.members())));
    }

    fn propose_queued(&mut self) {
        loop {
            let (role, leader, _) = self.consensus.leadership();
            let leads = role == Role::Leader;
            if leader == 0 || (leads && self.consensus.is_transferring()) {
                return;
            }
            if (!leads || self.consensus.may_change_members())
                && let Some(change) = self.proposals.take_change()
            {
                self.propose_group(change);
                continue;
            }
            let Some(group) = self.proposals.take(leads) else { return };
            self.propose_group(group);
            if leads {
                // A leader proposes one group per round. The next round takes the rest of the
                // queue.
                return;
            }
        }
    }

    fn propose_group(&mut self, group: ProposalGroup) {
        match self.consensus.propose_many(group.kind, group.data, group.hops) {
            Ok(()) => {
                self.proposed.record(&group.own);
                group.forwarders.iter().for_each(|peer| self.consensus.expect_commit_notice(*peer));
            }
            Err(_) => self.effects.refused_proposals.extend(group.own),
        }
    }

    /// Returns whether proposals remain that the next round can take without new input.
    pub fn has_more(&self) -> bool {
        let (role, leader, _) = self.consensus.leadership();
        role == Role::Leader
            && leader != 0
            && !self.consensus.is_transferring()
            && !self.proposals.is_empty()
    }

    fn handle_all_ready(&mut self) {
        while self.consensus.has_ready() {
            let ready = self.consensus.ready();
            self.handle_ready(ready);
        }
    }

    fn handle_ready(&mut self, mut ready: Ready) {
        self.effects.fetches.append(&mut ready.fetches);
        if ready.snapshot_wanted.is_some() && !self.building {
            self.building = true;
            self.effects.build_snapshot = true;
        }
        self.send_ready_messages(&mut ready);
        self.reads.confirm(&ready.reads);
        let committed = mem::take(&mut ready.committed);
        self.effects.apply.extend(committed.into_iter().map(|entry| CommittedEntry {
            position: Position { index: entry.index, term: entry.term },
            kind: entry.kind,
            data: entry.data,
        }));
        self.record_backlog(&ready.persist.entries);
        self.persist(ready);
    }

    /// Removes the snapshot body that was built last, once no peer needs it. While a new body is
    /// being built, nothing is removed, because the new body will replace the old one.
    fn drop_snapshot(&mut self) {
        let leads = self.consensus.leadership().0 == Role::Leader;
        if !self.building && self.outgoing.as_ref().is_some_and(|body| body.is_unneeded(leads)) {
            self.outgoing = None;
            self.consensus.set_snapshot(None);
            self.effects.drop_snapshot = true;
        }
    }

    fn send(&mut self, message: Message) {
        if let Some(promise) = Promise::of(&message) {
            self.promised = self.promised.merge(promise);
        }
        if message.kind == MessageKind::Snapshot {
            if let Some(outgoing) = &mut self.outgoing {
                outgoing.begin(message.to);
            }
            self.effects.send_snapshots.push(message);
        } else {
            self.effects.send.push(message);
        }
    }

    fn persist(&mut self, ready: Ready) {
        let Ready { number, persist, mut after_persist, .. } = ready;
        after_persist.retain(|message| {
            let early = match message.kind {
                MessageKind::RequestVote | MessageKind::RequestVoteResponse => {
                    !self.guards.persist_before_vote()
                }
                MessageKind::AppendResponse => !self.guards.persist_before_ack(),
                _ => false,
            };
            // Tests only: sends the message before the disk holds what the message promises.
            if early {
                self.effects.send.push(message.clone());
            }
            !early
        });
        if let Some(state) = persist.hard_state {
            self.lazy_hard_state = Some(state);
        }
        if let Some(at) = persist.snapshot {
            self.begin_install(at, number, after_persist, persist.entries);
            return;
        }
        if !persist.urgent {
            self.complete_without_write(number, after_persist);
            return;
        }
        let batch = Batch {
            hard_state: self.lazy_hard_state.take(),
            entries: persist.entries,
            ..Batch::default()
        };
        self.queue_batch(batch, number, after_persist);
        // Tests only: the leader counts its own log towards the quorum before that log is durable.
        if !self.guards.persist_before_self_ack() && self.consensus.leadership().0 == Role::Leader {
            self.consensus.report_persisted(number);
        }
    }

    /// Completes a `Ready` that needs no write. The `Ready` counts as durable once all earlier
    /// batches are durable.
    fn complete_without_write(&mut self, number: u64, after: Vec<Message>) {
        if let Some(install) = &mut self.install {
            install.held_batches.push((Batch::default(), number, after));
        } else if let Some(last) = self.waiting.back_mut() {
            last.ready = number;
            last.after.extend(after);
        } else {
            for message in after {
                self.send(message);
            }
            self.consensus.report_persisted(number);
        }
    }

    fn queue_batch(&mut self, batch: Batch, ready: u64, after: Vec<Message>) {
        if let Some(install) = &mut self.install {
            install.held_batches.push((batch, ready, after));
            return;
        }
        if let Some(state) = batch.hard_state {
            self.persisted_commit = state.commit;
        }
        let number = self.next_batch;
        self.next_batch += 1;
        self.waiting.push_back(UnpersistedBatch { batch: number, ready, after, since: self.now });
        self.effects.persist.push((number, batch));
    }

    fn handle_persisted(&mut self, batch: u64) {
        // Tests only: reports one batch too many as durable.
        let batch = batch + u64::from(!self.guards.count_durable_batches());
        while self.waiting.front().is_some_and(|waiting| waiting.batch <= batch) {
            let Some(waiting) = self.waiting.pop_front() else { return };
            for message in waiting.after {
                self.send(message);
            }
            if waiting.ready > 0 {
                self.consensus.report_persisted(waiting.ready);
            }
        }
        self.promise_own_log();
        if let Some((number, at)) = self.snapshot_batch
            && number <= batch
        {
            self.snapshot_batch = None;
            self.consensus.report_applied(at.index);
        }
        if let Some(install) = &mut self.install
            && install.intent <= batch
            && let Some(body) = install.body.take()
        {
            self.effects.install = Some((install.at, body));
        }
    }

    /// Records a leader's durable log as a promise, because the leader counts its own log towards
    /// the quorum. Records nothing before the log has a durable entry of the current term.
    fn promise_own_log(&mut self) {
        let (role, _, term) = self.consensus.leadership();
        let matched = self.consensus.durable_index();
        if role == Role::Leader && self.consensus.term_at(matched) == Some(term) {
            self.promised =
                self.promised.merge(Promise { term, vote: self.member, matched, floor: 0 });
        }
    }

    fn handle_applied(&mut self, at: Position, changes: Vec<AppliedChange>) {
        // While a snapshot is being installed, consensus already uses the snapshot's members.
        // Changes in older entries must not replace them.
        let follows = self.install.is_none();
        for AppliedChange { index, change, members } in changes.into_iter().filter(|_| follows) {
            if let Some(change) = change {
                self.consensus.change_members(change);
                self.record_members(index);
            }
            compare_members(index, self.members(), &members);
        }
        self.applied = at;
        while self.backlog.front().is_some_and(|(index, _)| *index <= at.index) {
            self.backlog_bytes -= self.backlog.pop_front().map_or(0, |(_, bytes)| bytes);
        }
        self.consensus.report_applied(at.index);
        self.effects.lost_proposals.extend(self.proposed.take_lost(at.term));
    }

    fn record_backlog(&mut self, entries: &[Entry]) {
        let Some(first) = entries.first() else { return };
        while self.backlog.back().is_some_and(|(index, _)| *index >= first.index) {
            self.backlog_bytes -= self.backlog.pop_back().map_or(0, |(_, bytes)| bytes);
        }
        for entry in entries {
            self.backlog.push_back((entry.index, entry.data.len()));
            self.backlog_bytes += entry.data.len();
        }
    }
}
