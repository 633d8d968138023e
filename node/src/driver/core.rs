//! The synchronous driver: events in, effects out. No clock, no thread, no I/O.
//!
//! Persist, then send, is written here and nowhere else: what [`Ready::after_persist`] holds waits
//! in [`Driver::waiting`] until the log has said that its batch is durable.
//!
//! A snapshot that arrives takes three steps, each durable before the next: the log notes that one
//! is being installed, the store replaces its content, the log begins anew after it. Batches that
//! consensus produces meanwhile wait. So a store that is ahead of its log after a crash is either
//! that snapshot, or a log that lost data.

mod forwarding;
mod install;

use std::collections::{BTreeSet, VecDeque};
use std::mem;
use std::path::PathBuf;
use std::sync::Arc;

use node_consensus::{
    Config, ConfigError, Consensus, Entry, Fetch, Guards, HardState, Initial, Members, Message,
    MessageKind, PeerStatus, Position, Ready, Role, Status, StepError,
};

use super::Notice;
use super::forwards::Forwards;
use super::mail::{Proposal, ReadToken};
use super::outgoing::Outgoing;
use super::proposals::Proposals;
use super::reads::Reads;
use crate::log::Batch;
use crate::machine::{AppliedChange, Committed, RequestId};
use crate::witness::Promise;

/// Configurations that snapshots on their way can be of; older ones are not compared. One change is
/// under way at a time, and a snapshot is built within a few.
const REMEMBERED_CONFIGURATIONS: usize = 16;

/// The member table and consensus must never disagree about who votes: whoever counts by the wrong
/// one sees a majority where there is none.
///
/// # Panics
/// If they do. The process ends; nothing that it could do next is safe.
fn compare_members(index: u64, consensus: &Members, table: &Members) {
    assert!(
        consensus == table,
        "after entry {index} consensus counts with {consensus:x?}, and the member table says {table:x?}: this member can't go on; replace it from its peers, and report this"
    );
}

/// What the driver is told beside consensus' own configuration.
#[derive(Clone, Copy, Debug)]
pub struct DriverOptions {
    /// Campaign as soon as a quorum is connected, if nobody has led yet.
    pub campaign_when_connected: bool,
    /// Entries kept behind the store's durable position.
    pub catch_up_entries: u64,
    /// Ticks after which a proposal that found no leader is forgotten, and a read that got no
    /// answer: longer than who asked waits.
    pub proposal_ticks: u64,
    /// Ticks after which an unanswered read is asked again.
    pub read_retry_ticks: u64,
    /// Bytes of entries in the log but not yet applied, after which a leader refuses proposals and
    /// a follower drops appends (the leader sends them again). More than consensus lets a leader
    /// hold uncommitted: those can't be applied, and a follower that dropped appends because of
    /// them would drop for ever what should replace them.
    pub max_backlog_bytes: usize,
}

/// What to do. The order of the fields is no order of execution: nothing in here depends on
/// anything else in here.
#[derive(Debug, Default)]
pub struct Effects {
    /// To the peers.
    pub send: Vec<Message>,
    /// `Snapshot` messages: to the peers, each with the body that was built last.
    pub send_snapshots: Vec<Message>,
    /// Into the log, in order; [`Notice::Persisted`] tells the last number that is durable.
    pub persist: Vec<(u64, Batch)>,
    /// To the state machine, in order.
    pub apply: Vec<Committed>,
    /// To be installed as the whole state, durably, then [`Notice::Installed`].
    pub install: Option<(Position, PathBuf)>,
    /// Snapshot bodies that nobody needs.
    pub discard: Vec<PathBuf>,
    /// A snapshot is wanted; answered by [`Notice::Built`].
    pub build_snapshot: bool,
    /// The body that was built last isn't needed any more.
    pub drop_snapshot: bool,
    /// To be read from the log; answered by [`Notice::Fetched`].
    pub fetches: Vec<Fetch>,
    /// The log may drop entries up to here; answered by [`Notice::Compacted`].
    pub compact: Option<u64>,
    /// Proposals that will never have an effect.
    pub refused: Vec<RequestId>,
    /// Proposals that were lost on the way to a leader, as far as this member can know.
    pub given_up: Vec<RequestId>,
    /// Reads that may go ahead, at this position or later.
    pub reads: Vec<(ReadToken, Position)>,
    /// Reads that were too many.
    pub refused_reads: Vec<ReadToken>,
    /// Messages that were refused.
    pub bad_messages: Vec<StepError>,
}

/// A batch on its way to the disk.
#[derive(Debug)]
struct Waiting {
    batch: u64,
    /// The ready that is durable with it.
    ready: u64,
    after: Vec<Message>,
    since: u64,
}

/// A snapshot on its way into the store.
#[derive(Debug)]
struct Install {
    at: Position,
    body: Option<PathBuf>,
    /// The log knows when this batch is durable.
    intent: u64,
    /// What follows once the store has it.
    held: Vec<(Batch, u64, Vec<Message>)>,
}

/// One member. The production threads and the simulation both run this.
#[derive(Debug)]
pub struct Driver {
    consensus: Consensus,
    options: DriverOptions,
    guards: Guards,
    member: u64,
    /// Who the members have been, from which entry on; the last ones count now.
    configurations: VecDeque<(u64, Arc<Members>)>,
    election_ticks: u64,
    proposals: Proposals,
    forwards: Forwards,
    reads: Reads,
    next_batch: u64,
    waiting: VecDeque<Waiting>,
    lazy_hard_state: Option<HardState>,
    persisted_commit: u64,
    install: Option<Install>,
    /// The batch that makes an installed snapshot part of the log, and its position.
    joining: Option<(u64, Position)>,
    incoming: Option<PathBuf>,
    building: bool,
    outgoing: Option<Outgoing>,
    backlog: VecDeque<(u64, usize)>,
    backlog_bytes: usize,
    applied: Position,
    durable: Position,
    connected: BTreeSet<u64>,
    promised: Promise,
    now: u64,
    effects: Effects,
}

impl Driver {
    /// Starts from what log and store hold.
    ///
    /// # Panics
    ///
    /// If the bounds don't fit each other: see [`DriverOptions::max_backlog_bytes`].
    pub fn new(
        config: &Config,
        options: DriverOptions,
        initial: &Initial,
    ) -> Result<Self, ConfigError> {
        let (uncommitted, backlog) = (config.max_uncommitted_bytes, options.max_backlog_bytes);
        assert!(
            uncommitted < backlog as u64,
            "{uncommitted} bytes may be uncommitted, so {backlog} are no bound on the backlog"
        );
        let mut driver = Self {
            consensus: Consensus::new(config, initial)?,
            options,
            guards: config.guards,
            member: config.member,
            configurations: VecDeque::new(),
            election_ticks: config.election_ticks as u64,
            proposals: Proposals::default(),
            forwards: Forwards::default(),
            reads: Reads::new(options.read_retry_ticks),
            next_batch: 1,
            waiting: VecDeque::new(),
            lazy_hard_state: None,
            persisted_commit: initial.hard_state.commit,
            install: None,
            joining: None,
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
            effects: Effects::default(),
        };
        driver.note_members(initial.applied.index);
        driver.note_backlog(&initial.entries);
        if driver.members().voters == [config.member] {
            driver.consensus.campaign();
        }
        Ok(driver)
    }

    /// One tick of the clock.
    pub fn tick(&mut self) {
        self.now += 1;
        self.consensus.tick();
        let before = self.now.saturating_sub(self.options.proposal_ticks);
        self.proposals.expire(before);
        self.forwards.expire(before);
        self.reads.expire(before);
        self.leave_a_stuck_disk();
        // A pre-vote, or its answer, may have gone to a stream that was not there yet.
        self.campaign_if_connected();
    }

    /// Proposals of this member's own clients.
    pub fn propose(&mut self, proposals: impl IntoIterator<Item = Proposal>) {
        let overloaded = self.backlog_bytes > self.options.max_backlog_bytes;
        for proposal in proposals {
            let id = proposal.id;
            if overloaded || !self.proposals.push_own(proposal, self.now) {
                self.effects.refused.push(id);
            }
        }
    }

    /// Reads that wait for a barrier.
    pub fn read(&mut self, tokens: impl IntoIterator<Item = ReadToken>) {
        for token in tokens {
            if !self.reads.push(token, self.now) {
                self.effects.refused_reads.push(token);
            }
        }
    }

    /// A message from a peer.
    pub fn message(&mut self, message: Message) {
        match message.kind {
            MessageKind::Propose => {
                let is_for_me = message.to == self.member && self.members().contains(message.from);
                if is_for_me && self.may_take_forward(&message) {
                    self.proposals.push_forwarded(message, self.now);
                }
            }
            MessageKind::Append
                if !message.entries.is_empty()
                    && self.backlog_bytes > self.options.max_backlog_bytes => {}
            // Without its body it is nothing.
            MessageKind::Snapshot => {}
            // No member asks for one; a leader that believed it would build snapshots for ever.
            MessageKind::AppendResponse if message.request_snapshot != 0 => {}
            _ => self.step(message),
        }
    }

    fn step(&mut self, message: Message) {
        if let Err(error) = self.consensus.step(message) {
            self.effects.bad_messages.push(error);
        }
    }

    /// What another thread has done, or the transport has seen.
    pub fn notice(&mut self, notice: Notice) {
        match notice {
            Notice::Persisted(batch) => self.persisted(batch),
            Notice::Applied { at, changes, answered } => {
                self.forwards.answered(&answered);
                self.applied(at, changes);
                let given_up = self.forwards.give_up(at.term);
                self.effects.given_up.extend(given_up);
            }
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
            Notice::Installed { at, members } => self.installed(at, &members),
            Notice::Built(snapshot) => {
                self.building = false;
                self.outgoing = snapshot.as_ref().map(|(at, _)| Outgoing::new(at.index));
                if let Some((at, members)) = &snapshot {
                    self.compare_snapshot(at.index, members);
                }
                self.consensus.snapshot_built(snapshot);
            }
            Notice::Fetched { id, entries } => self.consensus.fetched(id, &entries),
            Notice::Snapshot(snapshot) => self.snapshot(snapshot),
            Notice::SnapshotSent { peer, arrived } => {
                if let Some(outgoing) = &mut self.outgoing {
                    outgoing.end(peer);
                }
                self.consensus.report_snapshot(peer, arrived);
            }
            Notice::Unreachable(peer) => self.consensus.report_unreachable(peer),
            Notice::Connected(peer) => {
                self.connected.insert(peer);
                self.repeat_forwards(peer);
                self.campaign_if_connected();
            }
            Notice::Disconnected(peer) => {
                self.connected.remove(&peer);
                self.forwards.interrupt(peer);
            }
            Notice::Campaign => self.consensus.campaign(),
            Notice::Transfer(to) => {
                if let Some(to) = to.or_else(|| self.successor()) {
                    self.consensus.transfer_leader(to);
                }
            }
        }
    }

    /// Everything that follows from the inputs so far.
    pub fn advance(&mut self) -> Effects {
        self.propose_unsent_again();
        self.hand_on_proposals();
        self.reads.ask(&mut self.consensus, self.now);
        self.drain();
        self.drop_snapshot();
        let mut effects = mem::take(&mut self.effects);
        self.reads.release(self.applied, &mut effects.reads);
        effects
    }

    /// A moment's view of consensus.
    pub fn status(&self) -> Status {
        self.consensus.status()
    }

    /// Role, leader and term.
    pub fn leadership(&self) -> (Role, u64, u64) {
        self.consensus.leadership()
    }

    /// The last entry applied, and the last one that the store holds durably.
    pub fn positions(&self) -> (Position, Position) {
        (self.applied, self.durable)
    }

    /// What this process has promised to others: what its messages said once it was durable, and as a
    /// leader its own log.
    pub fn promised(&self) -> Promise {
        let (term, commit) = self.consensus.committed();
        self.promised.with_commit(term, commit)
    }

    /// The term of an entry that is in the log.
    pub fn term_at(&self, index: u64) -> Option<u64> {
        self.consensus.term_at(index)
    }

    /// ReadIndex rounds asked for so far.
    pub fn read_rounds(&self) -> u64 {
        self.reads.asked
    }

    /// Whether the connected peers and this member are a quorum.
    pub fn is_quorum_connected(&self) -> bool {
        let reached = |id: &&u64| **id == self.member || self.connected.contains(id);
        let voters = &self.members().voters;
        voters.iter().filter(reached).count() > voters.len() / 2
    }

    /// Who takes part in consensus.
    pub fn members(&self) -> &Arc<Members> {
        self.consensus.members()
    }

    /// Whether this member was removed, and may end.
    pub fn has_left(&self) -> bool {
        self.consensus.has_left()
    }

    /// Whether this member may be the only one that knows that it was removed: it found that out itself,
    /// as the leader, or is about to once it has applied what it knows to be committed.
    pub fn may_alone_know(&self) -> bool {
        self.leadership().0 == Role::Leader
            || self.applied.index < self.status().commit
            || !self.members().contains(self.member)
    }

    /// From entry `index` on the members are those that consensus has now.
    fn note_members(&mut self, index: u64) {
        if self.configurations.len() == REMEMBERED_CONFIGURATIONS {
            self.configurations.pop_front();
        }
        self.configurations.push_back((index, Arc::clone(self.consensus.members())));
    }

    /// Whether proposals are left that the next round can take at once.
    pub fn has_more(&self) -> bool {
        let (role, leader, _) = self.consensus.leadership();
        role == Role::Leader
            && leader != 0
            && !self.consensus.is_transferring()
            && !self.proposals.is_empty()
    }

    fn drain(&mut self) {
        while self.consensus.has_ready() {
            let ready = self.consensus.ready();
            self.handle(ready);
        }
    }

    fn handle(&mut self, mut ready: Ready) {
        self.effects.fetches.append(&mut ready.fetches);
        if ready.snapshot_wanted.is_some() && !self.building {
            self.building = true;
            self.effects.build_snapshot = true;
        }
        for message in mem::take(&mut ready.messages) {
            self.send(message);
        }
        self.reads.confirmed(&ready.reads);
        let committed = mem::take(&mut ready.committed);
        self.effects.apply.extend(committed.into_iter().map(|entry| Committed {
            position: Position { index: entry.index, term: entry.term },
            kind: entry.kind,
            data: entry.data,
        }));
        self.note_backlog(&ready.persist.entries);
        self.persist(ready);
    }

    /// While another body is being built, that one takes the place of the last.
    fn drop_snapshot(&mut self) {
        let leads = self.consensus.leadership().0 == Role::Leader;
        if !self.building && self.outgoing.as_ref().is_some_and(|body| body.is_over(leads)) {
            self.outgoing = None;
            self.consensus.snapshot_built(None);
            self.effects.drop_snapshot = true;
        }
    }

    fn send(&mut self, message: Message) {
        if let Some(promise) = Promise::of(&message) {
            self.promised = self.promised.and(promise);
        }
        self.record_forward(&message);
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
            self.nothing_to_write(number, after_persist);
            return;
        }
        let batch = Batch {
            hard_state: self.lazy_hard_state.take(),
            entries: persist.entries,
            ..Batch::default()
        };
        self.queue(batch, number, after_persist);
        if !self.guards.persist_before_self_ack() && self.consensus.leadership().0 == Role::Leader {
            self.consensus.persisted(number);
        }
    }

    /// Durable as soon as everything before it is.
    fn nothing_to_write(&mut self, number: u64, after: Vec<Message>) {
        if let Some(install) = &mut self.install {
            install.held.push((Batch::default(), number, after));
        } else if let Some(last) = self.waiting.back_mut() {
            last.ready = number;
            last.after.extend(after);
        } else {
            for message in after {
                self.send(message);
            }
            self.consensus.persisted(number);
        }
    }

    fn queue(&mut self, batch: Batch, ready: u64, after: Vec<Message>) {
        if let Some(install) = &mut self.install {
            install.held.push((batch, ready, after));
            return;
        }
        if let Some(state) = batch.hard_state {
            self.persisted_commit = state.commit;
        }
        let number = self.next_batch;
        self.next_batch += 1;
        self.waiting.push_back(Waiting { batch: number, ready, after, since: self.now });
        self.effects.persist.push((number, batch));
    }

    fn persisted(&mut self, batch: u64) {
        // Tests only: one batch too many.
        let batch = batch + u64::from(!self.guards.count_durable_batches());
        while self.waiting.front().is_some_and(|waiting| waiting.batch <= batch) {
            let Some(waiting) = self.waiting.pop_front() else { return };
            for message in waiting.after {
                self.send(message);
            }
            if waiting.ready > 0 {
                self.consensus.persisted(waiting.ready);
            }
        }
        self.promise_own_log();
        if let Some((number, at)) = self.joining
            && number <= batch
        {
            self.joining = None;
            self.consensus.applied(at.index);
        }
        if let Some(install) = &mut self.install
            && install.intent <= batch
            && let Some(body) = install.body.take()
        {
            self.effects.install = Some((install.at, body));
        }
    }

    /// A leader counts itself towards a quorum as far as its own log is durable. With an entry of its
    /// term its term is, too.
    fn promise_own_log(&mut self) {
        let (role, _, term) = self.consensus.leadership();
        let matched = self.consensus.durable_index();
        if role == Role::Leader && self.consensus.term_at(matched) == Some(term) {
            self.promised =
                self.promised.and(Promise { term, vote: self.member, matched, floor: 0 });
        }
    }

    fn applied(&mut self, at: Position, changes: Vec<AppliedChange>) {
        // With a snapshot on its way into the store, consensus has its members already, which are later.
        let follows = self.install.is_none();
        for AppliedChange { index, change, members } in changes.into_iter().filter(|_| follows) {
            if let Some(change) = change {
                self.consensus.change_members(change);
                self.note_members(index);
            }
            compare_members(index, self.members(), &members);
        }
        self.applied = at;
        while self.backlog.front().is_some_and(|(index, _)| *index <= at.index) {
            self.backlog_bytes -= self.backlog.pop_front().map_or(0, |(_, bytes)| bytes);
        }
        self.consensus.applied(at.index);
    }

    fn note_backlog(&mut self, entries: &[Entry]) {
        let Some(first) = entries.first() else { return };
        while self.backlog.back().is_some_and(|(index, _)| *index >= first.index) {
            self.backlog_bytes -= self.backlog.pop_back().map_or(0, |(_, bytes)| bytes);
        }
        for entry in entries {
            self.backlog.push_back((entry.index, entry.data.len()));
            self.backlog_bytes += entry.data.len();
        }
    }

    fn campaign_if_connected(&mut self) {
        let (role, leader, term) = self.consensus.leadership();
        if self.options.campaign_when_connected
            && term <= 1
            && leader == 0
            && matches!(role, Role::Follower | Role::PreCandidate)
            && self.is_quorum_connected()
        {
            self.consensus.campaign();
        }
    }

    /// Who should lead when this member shouldn't.
    fn successor(&self) -> Option<u64> {
        let peers = self.consensus.status().peers;
        let votes = |peer: &&PeerStatus| self.members().voters.contains(&peer.member);
        let able = peers.iter().filter(votes).filter(|peer| peer.active);
        able.max_by_key(|peer| peer.matched).map(|peer| peer.member)
    }

    /// A leader whose disk has not answered for two election time-outs hands over.
    fn leave_a_stuck_disk(&mut self) {
        let stuck = self
            .waiting
            .front()
            .is_some_and(|oldest| self.now - oldest.since > 2 * self.election_ticks);
        if stuck
            && self.consensus.leadership().0 == Role::Leader
            && !self.consensus.is_transferring()
            && let Some(to) = self.successor()
        {
            self.consensus.transfer_leader(to);
        }
    }
}
