//! The consensus instance: its inputs, its output, and the guards around the library's own code.

mod campaign;
mod check;
mod commit_notices;
mod deferred_requests;
mod leave;

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::Arc;

use bytes::Bytes;
use raft::{RawNode, StateRole};
use slog::{Discard, Logger, o};
use thiserror::Error;

use self::campaign::Succession;
pub use self::campaign::Turn;
pub use self::check::StepError;
use self::commit_notices::SentCommits;
use self::deferred_requests::DeferredRequests;
use crate::config::validate;
use crate::convert::{
    change_to_raft, entry_from_raft, entry_to_raft, hard_state_from_raft, members_from_raft,
    message_from_raft, message_to_raft, peer_state_from_raft, role_from_raft,
};
use crate::storage::LogView;
use crate::{
    ConfChange, Config, ConfigError, Entry, EntryKind, Guards, HardState, InitialState, Members,
    Message, MessageKind, PeerStatus, PersistRequest, Position, ReadContext, ReadState, Ready,
    Role, Status,
};

/// Exclusive upper bound of the election time-outs that the library draws. It is so large that a
/// time-out drawn by the library practically never equals one drawn from our seed. So
/// `replace_drawn_timeout` notices and replaces each time-out of the library, and a run depends on
/// its seed alone.
const LIBRARY_MAX_ELECTION_TICKS: usize = 1 << 40;

/// Maximum number of times a proposal is forwarded before it is dropped.
const MAX_PROPOSAL_HOPS: u64 = 3;

/// Reason why proposals were not accepted. None of the refused proposals has an effect, now or
/// later.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ProposeError {
    /// This member knows no leader, or the proposals were already forwarded as often as allowed.
    #[error("no leader is known")]
    NoLeader,
    /// The leader is transferring its leadership; try again once that has ended.
    #[error("leadership is being transferred")]
    Transferring,
    /// The limit on uncommitted bytes is reached.
    #[error("too many uncommitted proposals")]
    Full,
    /// The leader has not applied an earlier change of members yet, or no quorum durably knows yet
    /// that it is committed. Entries that the leader found in its log when its term began are
    /// treated as such a change.
    #[error("an earlier change of members is under way")]
    ChangeUnderWay,
}

/// Consensus state of one member.
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
    /// Messages that this crate makes in addition to the library's: above all, proposals for the
    /// leader.
    own_messages: Vec<Message>,
    persisted_hard_state: HardState,
    /// Members by which the library counts majorities.
    members: Arc<Members>,
    /// Leaders only: the term, and the index of the barrier entry of that term (see
    /// [`Self::may_change_members`]). The barrier comes after all changes of members that the
    /// leader has applied. `None` means that the entry is still to be appended.
    barrier_entry: (u64, Option<u64>),
    /// Number of the [`Ready`] that must be durable before [`Self::ready`] yields anything else.
    awaited_ready: Option<u64>,
    /// Committed entries of the awaited [`Ready`], withheld until that `Ready` is durable.
    withheld_entries: Vec<Entry>,
    /// Members removed since this instance started. No removed member comes back.
    removed: BTreeSet<u64>,
    /// Last term in which this member was the leader.
    last_led_term: Option<u64>,
    /// Highest index that this member itself, as leader, found to be committed. After a start this
    /// is the recovered commit index, whichever member found it.
    own_commit: u64,
    /// Whether this member was removed but keeps running, because perhaps no other member knows of
    /// the removal.
    stays_after_removal: bool,
    deferred: DeferredRequests,
    sent_commits: SentCommits,
    /// Set while this member waits for its turn to campaign.
    succession: Option<Succession>,
    /// Ticks since this instance started.
    ticks: u64,
    /// Tick of the last message from each other member.
    last_message_ticks: BTreeMap<u64, u64>,
}

impl Consensus {
    /// Starts as a follower, from the recovered state of the log and the store.
    pub fn new(config: &Config, initial: &InitialState) -> Result<Self, ConfigError> {
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
            skip_bcast_commit: true,
            ..raft::Config::default()
        };
        let view = LogView::new(initial, config.cache_bytes);
        let logger = Logger::root(Discard, o!());
        let raw = RawNode::new(&library, view, &logger)
            .map_err(|error| ConfigError::Library(error.to_string()))?;
        let persisted_hard_state = hard_state_from_raft(&raw.raft.hard_state());
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
            own_messages: Vec::new(),
            persisted_hard_state,
            members: Arc::new(initial.members.sorted()),
            barrier_entry: (0, None),
            awaited_ready: None,
            withheld_entries: Vec::new(),
            removed: BTreeSet::new(),
            last_led_term: None,
            own_commit: 0,
            // A member that was removed before this start stays for now. It no longer knows whether
            // another leader has confirmed the removal.
            stays_after_removal: !initial.members.contains(config.member),
            deferred: DeferredRequests::default(),
            sent_commits: SentCommits::default(),
            succession: None,
            ticks: 0,
            last_message_ticks: BTreeMap::new(),
        };
        consensus.own_commit = consensus.raw.raft.raft_log.committed;
        consensus.replace_drawn_timeout();
        Ok(consensus)
    }

    /// Advances the clock by one tick. The library gets no tick while this member must not
    /// campaign:
    ///
    /// * while a snapshot is being installed in log and store. As a candidate, this member would be
    ///   asked by the library for entries that the snapshot has replaced;
    /// * while this member is the only voter and its log is being written. The only voter wins by
    ///   its own vote alone, and the library assumes that a leader's log was durable when it won.
    pub fn tick(&mut self) {
        self.ticks += 1;
        self.deferred.tick();
        if self.must_not_campaign() {
            return;
        }
        self.raw.tick();
        self.after_input();
        self.tick_succession();
    }

    /// Handles one message from a peer. Proposals that a peer forwards go to [`Self::propose_many`]
    /// instead.
    pub fn step(&mut self, message: Message) -> Result<(), StepError> {
        let message = self.check(message)?;
        let Some(message) = message else { return Ok(()) };
        if self.members.contains(message.from) {
            self.last_message_ticks.insert(message.from, self.ticks);
        }
        match message.kind {
            MessageKind::ReadIndex => self.request_read_index(message),
            MessageKind::TimeoutNow => self.take_over(message, self.election_ticks),
            MessageKind::RequestPreVote => self.handle_pre_vote_request(message),
            // A message that the library still refuses (a response of an unknown peer, a message
            // out of place) has no effect. So its error is ignored.
            _ => {
                let _ = self.raw.step(message_to_raft(message));
            }
        }
        self.after_input();
        Ok(())
    }

    /// Appends `proposals`, all of one kind, in one batch if this member is the leader. Otherwise
    /// forwards them to the leader. `hops` is 0 for this member's own proposals; for forwarded ones
    /// it is their [`Message::log_term`].
    ///
    /// A change of members is proposed alone, and is accepted only while
    /// [`Self::may_change_members`] is true.
    ///
    /// # Panics
    /// If a change of members is not alone, if `kind` is [`EntryKind::NoOp`], or if a proposal is
    /// empty. Only a leader itself makes no-ops, and only no-ops are empty.
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
        if kind == EntryKind::ConfChange && !self.may_change_members() {
            // Refuse the change here, because the library would silently append an empty entry in
            // its place.
            return Err(ProposeError::ChangeUnderWay);
        }
        if self.raw.raft.lead_transferee.is_some() {
            return Err(ProposeError::Transferring);
        }
        if !self.guards.one_change_at_a_time() {
            // Tests only: makes the library forget that a change is under way.
            self.raw.raft.pending_conf_index = 0;
        }
        let mut message = raft::eraftpb::Message { from: self.member, ..Default::default() };
        message.set_msg_type(raft::eraftpb::MessageType::MsgPropose);
        let entry = |data| entry_to_raft(&Entry { kind, data, ..Entry::default() });
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
        self.own_messages.push(Message {
            index: self.forwards,
            commit: self.boot,
            log_term: hops + 1,
            entries,
            ..Message::new(MessageKind::Propose, self.member, leader)
        });
    }

    /// Requests a read index and returns the request's context. The answer is a [`ReadState`] with
    /// this context. If no answer comes, the caller requests again, and gets a new context.
    ///
    /// Safe ReadIndex (Raft dissertation 6.4): a leader answers only after a quorum has confirmed
    /// its leadership in a round that began after the request. It must also have committed an entry
    /// in its own term.
    pub fn read_index(&mut self) -> ReadContext {
        if self.guards.unique_read_context() || self.reads == 0 {
            self.reads += 1;
        }
        let context = ReadContext { member: self.member, boot: self.boot, sequence: self.reads };
        let request = Message::new(MessageKind::ReadIndex, self.member, self.member);
        let entry = Entry { data: context.to_bytes().into(), ..Entry::default() };
        self.request_read_index(Message { entries: vec![entry], ..request });
        self.after_input();
        context
    }

    /// Starts a transfer of leadership to `to`. Returns false if this member isn't the leader, or
    /// if `to` is not another voter.
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

    /// Reports that a message to `peer` was lost, or that there is no connection to it.
    pub fn report_unreachable(&mut self, peer: u64) {
        self.raw.report_unreachable(peer);
        self.after_input();
    }

    /// Reports the end of a snapshot's transfer to `peer`.
    pub fn report_snapshot(&mut self, peer: u64, arrived: bool) {
        let status =
            if arrived { raft::SnapshotStatus::Finish } else { raft::SnapshotStatus::Failure };
        self.raw.report_snapshot(peer, status);
        self.after_input();
    }

    /// Announces the snapshot that can be sent to peers: its position, and the members at that
    /// position. `None` withdraws it.
    pub fn set_snapshot(&mut self, snapshot: Option<(Position, Members)>) {
        self.raw.mut_store().set_snapshot(snapshot);
    }

    /// Applies a change of members that the state machine has applied. From now on, majorities are
    /// counted by the new members. A leader that is no longer a voter steps down.
    ///
    /// # Panics
    /// If no voter would be left, or if the change takes more than one step. The state machine
    /// refuses such changes.
    pub fn change_members(&mut self, change: ConfChange) {
        let changed = self.raw.apply_conf_change(&change_to_raft(change));
        let state = changed
            .unwrap_or_else(|error| panic!("{change:?} can't follow {:?}: {error}", self.members));
        self.replace_members(members_from_raft(&state));
        self.record_own_commit();
        let leads = self.raw.raft.state == StateRole::Leader;
        // An earlier barrier entry no longer counts: the barrier must come after this change.
        if leads {
            self.barrier_entry.1 = None;
        }
        if !self.members.voters.contains(&self.member) {
            self.stays_after_removal = self.own_commit == self.raw.raft.raft_log.committed;
            // In the library, a leader that is no longer a voter stays leader. It must step down.
            if leads {
                self.raw.raft.become_follower(self.raw.raft.term, 0);
            }
        }
        self.after_input();
    }

    /// Replaces the current members, and records which members were removed.
    fn replace_members(&mut self, members: Members) {
        let before = mem::replace(&mut self.members, Arc::new(members));
        self.last_message_ticks.retain(|member, _| self.members.contains(*member));
        self.sent_commits.retain(|member| self.members.contains(member));
        let all = before.voters.iter().chain(&before.learners);
        self.removed.extend(all.filter(|member| !self.members.contains(**member)));
        self.removed.retain(|member| !self.members.contains(*member));
    }

    /// Returns whether a change of members would be accepted now. This member must be the leader,
    /// and a quorum must durably know that the previous change is committed.
    ///
    /// A member uses a new configuration once it has applied the change. After two quick changes,
    /// some members could be two configurations behind, and form a majority of their own (etcd
    /// issue 11284). So a leader appends a barrier entry after each change that it has applied. The
    /// message with the barrier also carries a commit index that covers the change. So a member
    /// with the barrier on disk also knows durably that the change is committed. Such a member
    /// applies the change before it can campaign. Once the barrier is committed, a quorum of the
    /// members has it on disk.
    pub fn may_change_members(&self) -> bool {
        let raft = &self.raw.raft;
        let alone = !raft.has_pending_conf() || !self.guards.one_change_at_a_time();
        raft.state == StateRole::Leader
            && alone
            && (self.is_barrier_committed() || !self.guards.change_barrier())
    }

    fn is_barrier_committed(&self) -> bool {
        let raft = &self.raw.raft;
        self.barrier_entry.0 == raft.term
            && self.barrier_entry.1.is_some_and(|index| index <= raft.raft_log.committed)
    }

    /// Appends the leader's entry that [`Self::may_change_members`] waits for. Does nothing if that
    /// entry exists, or during a transfer of leadership.
    ///
    /// The no-op that begins the leader's term also serves as this entry, because it follows every
    /// change that was applied by then. A change that the leader found in its log and has yet to
    /// apply needs a later entry.
    fn append_barrier(&mut self) {
        let raft = &self.raw.raft;
        if raft.state != StateRole::Leader {
            return;
        }
        if self.barrier_entry.0 != raft.term {
            self.barrier_entry = (raft.term, Some(raft.raft_log.last_index()));
        }
        if self.barrier_entry.1.is_some() || raft.lead_transferee.is_some() {
            return;
        }
        let mut message = raft::eraftpb::Message { from: self.member, ..Default::default() };
        message.set_msg_type(raft::eraftpb::MessageType::MsgPropose);
        message.set_entries(vec![raft::eraftpb::Entry::default()].into());
        if self.raw.step(message).is_ok() {
            self.barrier_entry.1 = Some(self.raw.raft.raft_log.last_index());
        }
    }

    /// Returns the members as of the last applied change.
    pub fn members(&self) -> &Arc<Members> {
        &self.members
    }

    /// Takes the entries for fetch request `id` ([`FetchRequest`](crate::FetchRequest)); `entries`
    /// is empty if the log no longer has them.
    pub fn supply_fetched(&mut self, id: u64, entries: &[Entry]) {
        let Some(context) = self.raw.mut_store().store_fetched(id, entries) else { return };
        if !entries.is_empty() {
            self.raw.on_entries_fetched(context);
        }
        self.raw.mut_store().clear_fetched();
        self.after_input();
    }

    /// Reports that all readies up to and including `number` are durable.
    pub fn report_persisted(&mut self, number: u64) {
        self.awaited_ready.take_if(|awaited| *awaited <= number);
        self.raw.on_persist_ready(number);
        self.after_input();
    }

    /// Reports that all entries up to and including `index` are applied.
    pub fn report_applied(&mut self, index: u64) {
        if index > self.raw.raft.raft_log.applied {
            self.raw.advance_apply_to(index);
        }
        let applied = self.raw.raft.raft_log.applied;
        self.raw.mut_store().evict(applied);
        self.retry_takeover();
    }

    /// Forgets applied entries up to `index`, which the log drops. Returns the log's new base.
    pub fn compact(&mut self, index: u64) -> Position {
        let index = index.min(self.raw.raft.raft_log.applied);
        if let Some(term) = self.raw.store().term_at(index) {
            self.raw.mut_store().compact(Position { index, term });
        }
        self.raw.store().base()
    }

    /// Returns the term of entry `index`, durable or not.
    pub fn term_at(&self, index: u64) -> Option<u64> {
        self.raw.raft.raft_log.term(index).ok().filter(|term| *term > 0 || index == 0)
    }

    /// Returns whether [`Self::ready`] has work for the caller.
    pub fn has_ready(&self) -> bool {
        !self.awaits_durability()
            && (self.raw.has_ready()
                || !self.withheld_entries.is_empty()
                || !self.own_messages.is_empty()
                || self.raw.store().has_pending_requests())
    }

    /// Returns whether this member withholds all output until a write is durable. No other member
    /// may learn of the write's contents before that. There are two cases:
    ///
    /// - A change of members is committed. A removed member ends for good as soon as its leader or
    ///   a refusal informs it of the removal. Suppose one of two members is removed, and a crash
    ///   makes the other forget that the change is committed. The other would then need the removed
    ///   member's vote for ever.
    /// - The only voter began a new term, elected by its own vote. If a crash made it forget that
    ///   term, it would lead in the same term again. It would then write other entries at indexes
    ///   where learners have the earlier ones.
    pub fn awaits_durability(&self) -> bool {
        self.awaited_ready.is_some()
    }

    /// Returns whether `state` newly commits the leader's pending change of members. All entries
    /// that the leader found in its log when its term began count as such a change.
    fn commits_change(&self, state: HardState) -> bool {
        let raft = &self.raw.raft;
        let change = raft.pending_conf_index;
        raft.state == StateRole::Leader
            && self.persisted_hard_state.commit < change
            && change <= state.commit
    }

    /// Returns the next round of work for the caller.
    pub fn ready(&mut self) -> Ready {
        let mut theirs = self.raw.ready();
        let mut ready = Ready { number: theirs.number(), ..Ready::default() };
        let hard_state = theirs.hs().map(hard_state_from_raft);
        let may_go: Vec<_> =
            theirs.take_messages().into_iter().filter_map(message_from_raft).collect();
        ready.after_persist =
            theirs.take_persisted_messages().into_iter().filter_map(message_from_raft).collect();
        may_go.iter().chain(&ready.after_persist).for_each(|sent| self.sent_commits.record(sent));
        let changes = hard_state.is_some_and(|state| self.commits_change(state));
        let known = &mut self.persisted_hard_state;
        let new_vote =
            hard_state.is_some_and(|state| (state.term, state.vote) != (known.term, known.vote));
        if new_vote || changes {
            // These messages may depend on the hard state of this round, so they wait until that
            // state is durable.
            ready.after_persist.extend(may_go);
        } else {
            ready.messages = may_go;
        }
        if let Some(state) = hard_state {
            *known = state;
        }
        let state = *known;
        let committed: Vec<_> =
            theirs.take_committed_entries().into_iter().map(entry_from_raft).collect();
        let learns = committed.iter().any(|entry| entry.kind == EntryKind::ConfChange)
            && self.raw.raft.state != StateRole::Leader;
        ready.committed = mem::take(&mut self.withheld_entries);
        ready.committed.extend(committed);
        ready.messages.append(&mut self.own_messages);

        let entries = theirs.entries();
        let metadata = theirs.snapshot().get_metadata();
        if metadata.index > 0 {
            let at = Position { index: metadata.index, term: metadata.term };
            let members = members_from_raft(metadata.get_conf_state());
            ready.persist.snapshot = Some(at);
            self.raw.mut_store().restore(at);
            self.replace_members(members);
        }
        self.raw.mut_store().append(entries);
        ready.persist.entries = theirs.take_entries().into_iter().map(entry_from_raft).collect();
        // A follower applies a change of members only once the commit index is durable. So the hard
        // state is written again, even if it hasn't changed in this round.
        ready.persist.hard_state = hard_state.or(learns.then_some(state));
        ready.persist.urgent = new_vote
            || changes
            || learns
            || ready.persist.snapshot.is_some()
            || !ready.persist.entries.is_empty();
        // Until this round is durable, [`Self::ready`] yields nothing else: see
        // `awaits_durability`.
        if changes || learns || (new_vote && self.raw.raft.state == StateRole::Leader) {
            self.awaited_ready = Some(ready.number);
            self.withheld_entries = mem::take(&mut ready.committed);
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

    /// Returns the instance's full status at this moment.
    pub fn status(&self) -> Status {
        let raft = &self.raw.raft;
        let mut peers = Vec::new();
        if raft.state == StateRole::Leader {
            for (id, progress) in raft.prs().iter().filter(|(id, _)| **id != self.member) {
                peers.push(PeerStatus {
                    member: *id,
                    matched: progress.matched,
                    next: progress.next_idx,
                    silent_ticks: self.last_message_ticks.get(id).map(|heard| self.ticks - heard),
                    state: peer_state_from_raft(progress.state),
                });
            }
            peers.sort_unstable_by_key(|peer| peer.member);
        }
        Status {
            term: raft.term,
            vote: raft.vote,
            leader: raft.leader_id,
            role: role_from_raft(raft.state),
            commit: raft.raft_log.committed,
            applied: raft.raft_log.applied,
            first: raft.raft_log.first_index(),
            last: raft.raft_log.last_index(),
            persisted: raft.raft_log.persisted,
            barrier_index: self.barrier_entry.1.filter(|_| self.barrier_entry.0 == raft.term),
            peers,
        }
    }

    /// Returns the current term, and the highest index that is known to be committed.
    pub fn term_and_commit(&self) -> (u64, u64) {
        (self.raw.raft.term, self.raw.raft.raft_log.committed)
    }

    /// Returns the last index that is durable on this member.
    pub fn durable_index(&self) -> u64 {
        self.raw.raft.raft_log.persisted
    }

    /// Returns role, leader and term. This is cheaper than [`Self::status`].
    pub fn leadership(&self) -> (Role, u64, u64) {
        let raft = &self.raw.raft;
        (role_from_raft(raft.state), raft.leader_id, raft.term)
    }

    /// Returns whether a transfer of leadership is under way.
    pub fn is_transferring(&self) -> bool {
        self.raw.raft.lead_transferee.is_some()
    }

    /// Returns whether a snapshot was accepted that is not applied yet.
    fn is_restoring(&self) -> bool {
        self.raw.store().base().index > self.raw.raft.raft_log.applied
    }

    fn after_input(&mut self) {
        self.record_own_commit();
        self.replace_drawn_timeout();
        self.append_barrier();
        self.handle_deferred_reads();
        debug_assert!(
            self.raw.raft.prs().iter().all(|(_, peer)| peer.next_idx > peer.matched),
            "what a peer has is not sent to it again"
        );
    }

    /// Replaces the election time-out that the library drew, if it is new, by one that the seed
    /// determines.
    fn replace_drawn_timeout(&mut self) {
        if self.raw.raft.randomized_election_timeout() == self.timeout {
            return;
        }
        self.draws += 1;
        let drawn = splitmix64(self.seed ^ splitmix64(self.draws));
        let spread = self.election_ticks as u64;
        self.timeout = self.election_ticks
            + usize::try_from(drawn % spread).expect("less than election_ticks, a usize");
        self.raw.raft.set_randomized_election_timeout(self.timeout);
    }
}

/// Returns `value` scrambled by the output function of SplitMix64.
fn splitmix64(value: u64) -> u64 {
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

impl PersistRequest {
    /// Returns whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.hard_state.is_none() && self.entries.is_empty() && self.snapshot.is_none()
    }
}

#[cfg(test)]
mod tests;
