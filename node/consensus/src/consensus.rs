//! The instance: inputs, and the guards around each of them.

mod check;
mod early;
mod leave;

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::Arc;

use bytes::Bytes;
use raft::{RawNode, StateRole};
use slog::{Discard, Logger, o};
use thiserror::Error;

pub use self::check::StepError;
use self::early::Early;
use crate::config::validate;
use crate::convert::{
    change_in, entry_in, entry_out, hard_state_out, members_out, message_in, message_out,
    peer_state_out, role_out,
};
use crate::storage::LogView;
use crate::{
    ConfChange, Config, ConfigError, Entry, EntryKind, Guards, HardState, Initial, Members,
    Message, MessageKind, PeerStatus, Persist, Position, ReadContext, ReadState, Ready, Role,
    Status,
};

/// The library draws its own election time-outs below this. It is so large that a draw never
/// equals one of ours, so that each draw is noticed and replaced: that is what makes a run a
/// function of its seed.
const LIBRARY_MAX_ELECTION_TICKS: usize = 1 << 40;

/// Ticks that a hastened election leaves for a leader's heartbeat to arrive first; etcd's number.
const HASTENED_TICKS: usize = 2;

/// How often a proposal may be passed on before it is dropped.
const MAX_PROPOSAL_HOPS: u64 = 3;

/// Why proposals were not taken. None of them had or will have any effect.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ProposeError {
    /// Nobody to send them to.
    #[error("no leader is known")]
    NoLeader,
    /// The leader is handing over; try again when that has ended.
    #[error("leadership is being transferred")]
    Transferring,
    /// The bound on uncommitted bytes is reached.
    #[error("too many uncommitted proposals")]
    Full,
    /// The last change of members, or what this leader found when its term began, is not applied
    /// yet, by the leader or by a quorum.
    #[error("an earlier change of members is under way")]
    ChangeUnderWay,
}

/// One member's consensus.
pub struct Consensus {
    raw: RawNode<LogView>,
    member: u64,
    boot: u64,
    guards: Guards,
    max_message_bytes: u64,
    seed: u64,
    draws: u64,
    election_ticks: usize,
    timeout: usize,
    reads: u64,
    forwards: u64,
    /// What is said besides what the library says: proposals for the leader above all.
    saying: Vec<Message>,
    persisted_hard_state: HardState,
    /// What the library counts with.
    members: Arc<Members>,
    /// Leaders only: the term, and an entry in it that was appended after every change of members
    /// that this leader has applied. None: it is still to be appended.
    settles: (u64, Option<u64>),
    /// The ready that has to be durable before anything else follows.
    waits_for: Option<u64>,
    /// What that one found to be committed.
    held: Vec<Entry>,
    /// Who was removed since this began. Nobody comes back.
    removed: BTreeSet<u64>,
    /// The last term that it led in.
    led: Option<u64>,
    /// What it knows to be committed from no other leader, as far as it remembers.
    found: u64,
    /// It was removed, and may be the only one that knows.
    stays: bool,
    early: Early,
    /// Ticks since this began.
    ticks: u64,
    /// The tick of each other member's last message.
    heard: BTreeMap<u64, u64>,
}

impl Consensus {
    /// Starts as a follower with what the log and the store hold.
    pub fn new(config: &Config, initial: &Initial) -> Result<Self, ConfigError> {
        validate(config, initial)?;
        let library = raft::Config {
            id: config.member,
            election_tick: config.election_ticks,
            heartbeat_tick: config.heartbeat_ticks,
            applied: initial.applied.index,
            max_size_per_msg: config.max_message_bytes,
            max_inflight_msgs: config.max_inflight_messages,
            check_quorum: true,
            pre_vote: true,
            min_election_tick: config.election_ticks,
            max_election_tick: LIBRARY_MAX_ELECTION_TICKS,
            read_only_option: raft::ReadOnlyOption::Safe,
            max_uncommitted_size: config.max_uncommitted_bytes,
            max_committed_size_per_ready: config.max_committed_bytes,
            ..raft::Config::default()
        };
        let view = LogView::new(initial, config.cache_bytes);
        let logger = Logger::root(Discard, o!());
        let raw = RawNode::new(&library, view, &logger)
            .map_err(|error| ConfigError::Library(error.to_string()))?;
        let persisted_hard_state = hard_state_out(&raw.raft.hard_state());
        let mut consensus = Self {
            raw,
            member: config.member,
            boot: config.boot,
            guards: config.guards,
            max_message_bytes: config.max_message_bytes,
            seed: config.seed,
            draws: 0,
            election_ticks: config.election_ticks,
            timeout: 0,
            reads: 0,
            forwards: 0,
            saying: Vec::new(),
            persisted_hard_state,
            members: Arc::new(initial.members.sorted()),
            settles: (0, None),
            waits_for: None,
            held: Vec::new(),
            removed: BTreeSet::new(),
            led: None,
            found: 0,
            // Removed before this began: told of it, or not.
            stays: !initial.members.contains(config.member),
            early: Early::default(),
            ticks: 0,
            heard: BTreeMap::new(),
        };
        consensus.found = consensus.raw.raft.raft_log.committed;
        consensus.fix_timeout();
        Ok(consensus)
    }

    /// One tick of the clock. None passes while a snapshot is on its way into log and store: who
    /// stands for election then is asked by the library for entries that the snapshot has replaced.
    /// Nor while the log of somebody who would win by its own vote alone is on its way to the disk: the
    /// library takes a leader's log to have been durable when it won.
    pub fn tick(&mut self) {
        self.ticks += 1;
        self.early.tick();
        if self.must_not_stand() {
            return;
        }
        self.raw.tick();
        self.after_input();
    }

    /// One message from a peer. Proposals that a peer passes on are for [`Self::propose_many`].
    pub fn step(&mut self, message: Message) -> Result<(), StepError> {
        let message = self.check(message)?;
        let Some(message) = message else { return Ok(()) };
        if self.members.contains(message.from) {
            self.heard.insert(message.from, self.ticks);
        }
        match message.kind {
            MessageKind::ReadIndex => self.ask_index(message),
            MessageKind::TimeoutNow => self.take_over(message, self.election_ticks),
            MessageKind::RequestPreVote => self.ask_for_vote(message),
            // What the library still refuses (a response of an unknown peer, a message out of place)
            // has no effect, and none is needed.
            _ => {
                let _ = self.raw.step(message_in(message));
            }
        }
        self.after_input();
        Ok(())
    }

    /// Appends `proposals`, all of one kind, in one go if this member leads, else sends them on to
    /// the leader. `hops` is 0 for one's own, else what [`Message::log_term`] said.
    ///
    /// A change of members is proposed alone, and taken only when [`Self::may_change`] says so.
    ///
    /// # Panics
    /// If a change of members is not alone, or for what only a leader itself makes.
    pub fn propose_many(
        &mut self,
        kind: EntryKind,
        proposals: Vec<Bytes>,
        hops: u64,
    ) -> Result<(), ProposeError> {
        let fit = proposals.iter().all(|data| kind.fits(data));
        assert!(fit && kind != EntryKind::NoOp, "no request makes such an entry");
        assert!(kind == EntryKind::Normal || proposals.len() == 1, "changes go one by one");
        if proposals.is_empty() {
            return Ok(());
        }
        if self.raw.raft.state != StateRole::Leader {
            return self.forward(kind, proposals, hops);
        }
        if kind == EntryKind::ConfChange && !self.may_change() {
            // The library would append an empty entry in its place, and say nothing.
            return Err(ProposeError::ChangeUnderWay);
        }
        if self.raw.raft.lead_transferee.is_some() {
            return Err(ProposeError::Transferring);
        }
        if !self.guards.one_change_at_a_time() {
            // Tests only: the library forgets that one is under way.
            self.raw.raft.pending_conf_index = 0;
        }
        let mut message = raft::eraftpb::Message { from: self.member, ..Default::default() };
        message.set_msg_type(raft::eraftpb::MessageType::MsgPropose);
        let entry = |data| entry_in(&Entry { kind, data, ..Entry::default() });
        let entries: Vec<_> = proposals.into_iter().map(entry).collect();
        message.set_entries(entries.into());
        let stepped = self.raw.step(message);
        self.after_input();
        stepped.map_err(|_| ProposeError::Full)
    }

    fn forward(
        &mut self,
        kind: EntryKind,
        proposals: Vec<Bytes>,
        hops: u64,
    ) -> Result<(), ProposeError> {
        let leader = self.raw.raft.leader_id;
        if leader == 0 || leader == self.member || hops >= MAX_PROPOSAL_HOPS {
            return Err(ProposeError::NoLeader);
        }
        let mut bytes = 0;
        let mut entries = Vec::new();
        for data in proposals {
            let full = !entries.is_empty() && bytes + data.len() as u64 > self.max_message_bytes;
            if full || entries.len() == crate::MAX_ENTRIES_PER_MESSAGE {
                self.push_forward(leader, std::mem::take(&mut entries), hops);
                bytes = 0;
            }
            bytes += data.len() as u64;
            entries.push(Entry { kind, data, ..Entry::default() });
        }
        self.push_forward(leader, entries, hops);
        Ok(())
    }

    fn push_forward(&mut self, leader: u64, entries: Vec<Entry>, hops: u64) {
        self.forwards += 1;
        self.saying.push(Message {
            index: self.forwards,
            commit: self.boot,
            log_term: hops + 1,
            entries,
            ..Message::new(MessageKind::Propose, self.member, leader)
        });
    }

    /// Asks for a read index. The answer comes as a [`ReadState`] with this context, or never: ask
    /// again after a while, under the new context that this gives.
    ///
    /// Safe ReadIndex (Raft dissertation 6.4): a leader answers only after a quorum has confirmed
    /// it in a round that began after the question, and only once it has committed an entry in its
    /// own term.
    pub fn read_index(&mut self) -> ReadContext {
        if self.guards.unique_read_context() || self.reads == 0 {
            self.reads += 1;
        }
        let context = ReadContext { member: self.member, boot: self.boot, sequence: self.reads };
        let question = Message::new(MessageKind::ReadIndex, self.member, self.member);
        let asked = Entry { data: context.to_bytes().into(), ..Entry::default() };
        self.ask_index(Message { entries: vec![asked], ..question });
        self.after_input();
        context
    }

    /// Campaigns now, if this member may and there is no leader.
    pub fn campaign(&mut self) {
        if self.raw.raft.promotable() && self.raw.raft.leader_id == 0 && !self.must_not_stand() {
            // The library refuses while a change of members is committed and not applied: it may
            // be the one that takes this member's vote. The election time-out comes again.
            let _ = self.raw.campaign();
            self.after_input();
        }
    }

    /// Shortens the wait for the first election after a start: all but two ticks of the election
    /// time-out's fixed part pass at once, and its random part stays. For a member that knows no leader
    /// though its peers are connected: with a leader, a heartbeat comes within those ticks.
    pub fn hasten_election(&mut self) {
        let raft = &mut self.raw.raft;
        if raft.state == StateRole::Follower && raft.leader_id == 0 {
            let passed = self.election_ticks.saturating_sub(HASTENED_TICKS);
            raft.election_elapsed = raft.election_elapsed.max(passed);
        }
    }

    /// A leader starts handing over to `to`; false if this member doesn't lead, or `to` can't.
    pub fn transfer_leader(&mut self, to: u64) -> bool {
        if self.raw.raft.state != StateRole::Leader
            || to == self.member
            || !self.members.voters.contains(&to)
        {
            return false;
        }
        self.raw.transfer_leader(to);
        self.after_input();
        true
    }

    /// The transport lost something on the way to `peer`, or has no connection.
    pub fn report_unreachable(&mut self, peer: u64) {
        self.raw.report_unreachable(peer);
        self.after_input();
    }

    /// A snapshot's way to `peer` has ended.
    pub fn report_snapshot(&mut self, peer: u64, arrived: bool) {
        let status =
            if arrived { raft::SnapshotStatus::Finish } else { raft::SnapshotStatus::Failure };
        self.raw.report_snapshot(peer, status);
        self.after_input();
    }

    /// A snapshot is there to be sent (or, with `None`, no longer is): its position, and who belonged
    /// to the cluster there.
    pub fn snapshot_built(&mut self, snapshot: Option<(Position, Members)>) {
        self.raw.mut_store().set_snapshot(snapshot);
    }

    /// The state machine has applied a change of members: consensus counts by it from now on. A
    /// leader that is a member no longer leads no longer.
    ///
    /// # Panics
    /// If it would leave nobody to vote, or isn't one step: the state machine refuses such changes.
    pub fn change_members(&mut self, change: ConfChange) {
        let changed = self.raw.apply_conf_change(&change_in(change));
        let state = changed
            .unwrap_or_else(|error| panic!("{change:?} can't follow {:?}: {error}", self.members));
        self.follow(members_out(&state));
        self.note_found();
        let leads = self.raw.raft.state == StateRole::Leader;
        if leads {
            self.settles.1 = None;
        }
        if !self.members.voters.contains(&self.member) {
            self.stays = self.found == self.raw.raft.raft_log.committed;
            if leads {
                self.raw.raft.become_follower(self.raw.raft.term, 0);
            }
        }
        self.after_input();
    }

    /// Counts with `members` from now on.
    fn follow(&mut self, members: Members) {
        let before = mem::replace(&mut self.members, Arc::new(members));
        self.heard.retain(|member, _| self.members.contains(*member));
        let all = before.voters.iter().chain(&before.learners);
        self.removed.extend(all.filter(|member| !self.members.contains(**member)));
        self.removed.retain(|member| !self.members.contains(*member));
    }

    /// Whether a change of members would be taken now: this member leads, and a quorum can't fall
    /// back behind the last change.
    ///
    /// Members count by a change once they have applied it, so that two changes in a row could
    /// leave some of them two configurations behind, with a majority of their own there (etcd
    /// 11284). So a leader follows each change that it has applied by an entry of its own. Whoever
    /// has that entry on disk has there as well, since both came with one message, that the change
    /// is committed; it applies it before it can campaign. When the entry is committed, a quorum is
    /// that far.
    pub fn may_change(&self) -> bool {
        let raft = &self.raw.raft;
        let alone = !raft.has_pending_conf() || !self.guards.one_change_at_a_time();
        raft.state == StateRole::Leader
            && alone
            && (self.is_settled() || !self.guards.changes_settle())
    }

    fn is_settled(&self) -> bool {
        let raft = &self.raw.raft;
        self.settles.0 == raft.term
            && self.settles.1.is_some_and(|index| index <= raft.raft_log.committed)
    }

    /// A leader appends the entry that [`Self::may_change`] waits for, unless it is there or the
    /// leader is about to be none.
    ///
    /// The entry that it begins its term with will do: that comes after every change that it had
    /// applied. One that it found in its log and has yet to apply gets an entry of its own.
    fn settle(&mut self) {
        let raft = &self.raw.raft;
        if raft.state != StateRole::Leader {
            return;
        }
        if self.settles.0 != raft.term {
            self.settles = (raft.term, Some(raft.raft_log.last_index()));
        }
        if self.settles.1.is_some() || raft.lead_transferee.is_some() {
            return;
        }
        let mut message = raft::eraftpb::Message { from: self.member, ..Default::default() };
        message.set_msg_type(raft::eraftpb::MessageType::MsgPropose);
        message.set_entries(vec![raft::eraftpb::Entry::default()].into());
        if self.raw.step(message).is_ok() {
            self.settles.1 = Some(self.raw.raft.raft_log.last_index());
        }
    }

    /// Who takes part, as of the last change that was applied.
    pub fn members(&self) -> &Arc<Members> {
        &self.members
    }

    /// The answer to a [`Fetch`](crate::Fetch); empty if the log no longer has the entries.
    pub fn fetched(&mut self, id: u64, entries: &[Entry]) {
        let Some(context) = self.raw.mut_store().fetched(id, entries) else { return };
        if !entries.is_empty() {
            self.raw.on_entries_fetched(context);
        }
        self.raw.mut_store().forget_fetched();
        self.after_input();
    }

    /// Everything up to and including the ready of this number is durable.
    pub fn persisted(&mut self, number: u64) {
        self.waits_for.take_if(|awaited| *awaited <= number);
        self.raw.on_persist_ready(number);
        self.after_input();
    }

    /// Everything committed up to `index` is applied.
    pub fn applied(&mut self, index: u64) {
        if index > self.raw.raft.raft_log.applied {
            self.raw.advance_apply_to(index);
        }
        let applied = self.raw.raft.raft_log.applied;
        self.raw.mut_store().evict(applied);
        self.take_over_late();
    }

    /// The log drops entries up to `index`, all of them applied; returns the log's new base.
    pub fn compact(&mut self, index: u64) -> Position {
        let index = index.min(self.raw.raft.raft_log.applied);
        if let Some(term) = self.raw.store().term_at(index) {
            self.raw.mut_store().compact(Position { index, term });
        }
        self.raw.store().base()
    }

    /// The term of entry `index`, durable or not.
    pub fn term_at(&self, index: u64) -> Option<u64> {
        self.raw.raft.raft_log.term(index).ok().filter(|term| *term > 0 || index == 0)
    }

    /// Whether there is anything to do.
    pub fn has_ready(&self) -> bool {
        !self.is_silent()
            && (self.raw.has_ready()
                || !self.held.is_empty()
                || !self.saying.is_empty()
                || self.raw.store().has_questions())
    }

    /// Whether everything waits until something is durable here that this member alone may know soon:
    /// - that a change of members is committed. A member that was removed ends for good as soon as it
    ///   hears of it, from its leader or by being refused by anybody. Of two members, the other one
    ///   would need its vote for ever, if a crash took from it that the change is committed;
    /// - the term that the only voter leads in, by nobody's vote but its own. If a crash took it, it
    ///   would lead in that term again, and put other entries where learners have those of before.
    pub fn is_silent(&self) -> bool {
        self.waits_for.is_some()
    }

    /// Whether a change of members, or what was in the log when this leader's term began, is
    /// committed now and wasn't before.
    fn commits_change(&self, state: HardState) -> bool {
        let raft = &self.raw.raft;
        let change = raft.pending_conf_index;
        raft.state == StateRole::Leader
            && self.persisted_hard_state.commit < change
            && change <= state.commit
    }

    /// What to do now.
    pub fn ready(&mut self) -> Ready {
        let mut theirs = self.raw.ready();
        let mut ready = Ready { number: theirs.number(), ..Ready::default() };
        let hard_state = theirs.hs().map(hard_state_out);
        let may_go: Vec<_> = theirs.take_messages().into_iter().filter_map(message_out).collect();
        ready.after_persist =
            theirs.take_persisted_messages().into_iter().filter_map(message_out).collect();
        let changes = hard_state.is_some_and(|state| self.commits_change(state));
        let known = &mut self.persisted_hard_state;
        let new_vote =
            hard_state.is_some_and(|state| (state.term, state.vote) != (known.term, known.vote));
        if new_vote || changes {
            ready.after_persist.extend(may_go);
        } else {
            ready.messages = may_go;
        }
        if let Some(state) = hard_state {
            *known = state;
        }
        let state = *known;
        let committed: Vec<_> =
            theirs.take_committed_entries().into_iter().map(entry_out).collect();
        let learns = committed.iter().any(|entry| entry.kind == EntryKind::ConfChange)
            && self.raw.raft.state != StateRole::Leader;
        ready.committed = mem::take(&mut self.held);
        ready.committed.extend(committed);
        ready.messages.append(&mut self.saying);

        let entries = theirs.entries();
        let metadata = theirs.snapshot().get_metadata();
        if metadata.index > 0 {
            let at = Position { index: metadata.index, term: metadata.term };
            let members = members_out(metadata.get_conf_state());
            ready.persist.snapshot = Some(at);
            self.raw.mut_store().restore(at);
            self.follow(members);
        }
        self.raw.mut_store().append(entries);
        ready.persist.entries = theirs.take_entries().into_iter().map(entry_out).collect();
        ready.persist.hard_state = hard_state.or(learns.then_some(state));
        ready.persist.urgent = new_vote
            || changes
            || learns
            || ready.persist.snapshot.is_some()
            || !ready.persist.entries.is_empty();
        if changes || learns || (new_vote && self.raw.raft.state == StateRole::Leader) {
            self.waits_for = Some(ready.number);
            self.held = mem::take(&mut ready.committed);
        }
        ready.reads = theirs
            .take_read_states()
            .into_iter()
            .filter_map(|state| {
                let context = ReadContext::from_bytes(&state.request_ctx)?;
                Some(ReadState { context, index: state.index })
            })
            .collect();
        self.raw.advance_append_async(theirs);
        ready.fetches = self.raw.mut_store().take_fetches();
        ready.snapshot_wanted = self.raw.mut_store().take_snapshot_wanted();
        ready
    }

    /// A moment's view.
    pub fn status(&self) -> Status {
        let raft = &self.raw.raft;
        let mut peers = Vec::new();
        if raft.state == StateRole::Leader {
            for (id, progress) in raft.prs().iter().filter(|(id, _)| **id != self.member) {
                peers.push(PeerStatus {
                    member: *id,
                    matched: progress.matched,
                    next: progress.next_idx,
                    silent_ticks: self.heard.get(id).map(|heard| self.ticks - heard),
                    state: peer_state_out(progress.state),
                });
            }
            peers.sort_unstable_by_key(|peer| peer.member);
        }
        Status {
            term: raft.term,
            vote: raft.vote,
            leader: raft.leader_id,
            role: role_out(raft.state),
            commit: raft.raft_log.committed,
            applied: raft.raft_log.applied,
            first: raft.raft_log.first_index(),
            last: raft.raft_log.last_index(),
            persisted: raft.raft_log.persisted,
            settles: self.settles.1.filter(|_| self.settles.0 == raft.term),
            peers,
        }
    }

    /// The term, and the last entry known in it to be committed.
    pub fn committed(&self) -> (u64, u64) {
        (self.raw.raft.term, self.raw.raft.raft_log.committed)
    }

    /// The last entry that is durable here.
    pub fn durable_index(&self) -> u64 {
        self.raw.raft.raft_log.persisted
    }

    /// Role, leader and term, without the rest of [`Self::status`].
    pub fn leadership(&self) -> (Role, u64, u64) {
        let raft = &self.raw.raft;
        (role_out(raft.state), raft.leader_id, raft.term)
    }

    /// Whether a transfer of leadership is under way.
    pub fn is_transferring(&self) -> bool {
        self.raw.raft.lead_transferee.is_some()
    }

    /// Whether a snapshot was taken that is not applied yet.
    fn is_restoring(&self) -> bool {
        self.raw.store().base().index > self.raw.raft.raft_log.applied
    }

    /// See [`Self::tick`].
    fn must_not_stand(&self) -> bool {
        let raft = &self.raw.raft;
        let is_alone = self.members.voters == [self.member];
        let writes = raft.raft_log.persisted < raft.raft_log.last_index();
        self.is_restoring() || (is_alone && writes && raft.state != StateRole::Leader)
    }

    fn after_input(&mut self) {
        self.note_found();
        self.fix_timeout();
        self.settle();
        self.answer_early();
        debug_assert!(
            self.raw.raft.prs().iter().all(|(_, peer)| peer.next_idx > peer.matched),
            "what a peer has is not sent to it again"
        );
    }

    /// Replaces the library's draw, if it has drawn, by one that the seed determines.
    fn fix_timeout(&mut self) {
        if self.raw.raft.randomized_election_timeout() == self.timeout {
            return;
        }
        self.draws += 1;
        let drawn = mix(self.seed ^ mix(self.draws));
        let spread = self.election_ticks as u64;
        self.timeout = self.election_ticks
            + usize::try_from(drawn % spread).expect("less than election_ticks, a usize");
        self.raw.raft.set_randomized_election_timeout(self.timeout);
    }
}

/// SplitMix64's output function.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

impl std::fmt::Debug for Consensus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Consensus").field("member", &self.member).finish_non_exhaustive()
    }
}

impl Persist {
    /// Nothing to write.
    pub fn is_empty(&self) -> bool {
        self.hard_state.is_none() && self.entries.is_empty() && self.snapshot.is_none()
    }
}

#[cfg(test)]
mod tests;
