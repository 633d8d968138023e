//! Steps of members: input arrives, the core takes it in a round, and the results are carried out.
//! Production code ([`node_engine::driver`]) makes all decisions; this module only decides when.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use node_consensus::{FetchRequest, Members};
use node_engine::driver::{Message, Notice, run_fetch};
use node_state::identity::MemberId;
use node_state::mvcc::CompactionProgress;
use node_state::state_machine::RequestId;

use super::InvariantViolation;
use super::invariants::log_matching::hash;
use super::links::Transfer;
use super::node::{ConnectedStream, MemberProcess};
use super::ports::{RoundOutput, TurnOutput};
use super::world::{ScheduledEvent, Simulation, index_of};

impl Simulation {
    pub(super) fn live(&mut self, id: u64, life: u64) -> Option<&mut MemberProcess> {
        let node = self.node(id);
        if node.life == life { node.process.as_mut() } else { None }
    }

    /// Returns how long the member is still paused, if it is. The caller then schedules the event
    /// again for that time.
    pub(super) fn paused(&mut self, id: u64) -> Option<u64> {
        let now = self.now;
        let until = self.node(id).paused_until;
        (until > now).then(|| until - now)
    }

    pub(super) fn tick(&mut self, id: u64, life: u64) -> Result<(), InvariantViolation> {
        let wait = self.paused(id).unwrap_or(0);
        let Some(live) = self.live(id, life) else { return Ok(()) };
        if wait > 0 {
            self.schedule(wait, ScheduledEvent::Tick { node: id, life });
            return Ok(());
        }
        live.tick_is_due = true;
        self.count_leases(id)?;
        let tick = self.node(id).tick;
        let jitter = self.rng.range(0, tick / 10 + 1);
        self.schedule(tick + jitter, ScheduledEvent::Tick { node: id, life });
        if self.rng.chance(100) {
            self.idle_log(id, life)?;
        }
        self.wake(id)
    }

    pub(super) fn deliver(
        &mut self,
        to: u64,
        life: u64,
        bytes: Bytes,
        body: Option<Transfer>,
    ) -> Result<(), InvariantViolation> {
        self.trace(&[to, hash(&bytes)]);
        let message = Message::decode(bytes).map_err(|error| {
            InvariantViolation::new("what is sent can be read", error.to_string())
        })?;
        if let Some(transfer) = body {
            return self.receive_snapshot(to, life, message, transfer);
        }
        if self.live(to, life).is_none() {
            return Ok(());
        }
        self.note_promise(to, &message);
        let Some(live) = self.live(to, life) else { return Ok(()) };
        if live.mail.message(message).is_err() {
            self.report.full_queues += 1;
        }
        self.wake(to)
    }

    pub(super) fn notice(
        &mut self,
        id: u64,
        life: u64,
        notice: Notice,
    ) -> Result<(), InvariantViolation> {
        let Some(live) = self.live(id, life) else { return Ok(()) };
        live.mail.notice(notice);
        self.wake(id)
    }

    pub(super) fn log_done(&mut self, id: u64, life: u64) -> Result<(), InvariantViolation> {
        if let Some(wait) = self.paused(id) {
            self.schedule(wait, ScheduledEvent::LogDone { node: id, life });
            return Ok(());
        }
        let Some(live) = self.live(id, life) else { return Ok(()) };
        let Some(group) = live.log_group.take() else { return Ok(()) };
        let written: Vec<_> = group.iter().filter_map(|job| job.batch().cloned()).collect();
        match live.writer.run(group) {
            Ok(notices) => {
                for notice in notices {
                    live.mail.notice(notice);
                }
                self.begin_group(id, life);
                let member = self.node(id).member;
                for batch in written {
                    self.invariants.logs.observe(id, &batch.entries, None)?;
                    let last = batch.entries.last().map(|entry| entry.index);
                    let last = last.max(batch.snapshot.map(|at| at.index));
                    self.invariants.counts.record_durable(member, last.unwrap_or(0));
                }
                self.wake(id)
            }
            Err(error) => {
                let down = self.node(id).process_end(&error);
                self.went_down(id, down)
            }
        }
    }

    /// Lets an idle log prepare for later writes, and check the disk's free space.
    fn idle_log(&mut self, id: u64, life: u64) -> Result<(), InvariantViolation> {
        let Some(live) = self.live(id, life) else { return Ok(()) };
        let changed = live.writer.check_space();
        let short = changed && live.writer.is_short();
        let done = if live.log_group.is_none() { live.writer.idle() } else { Ok(()) };
        self.report.short_of_space += u64::from(short);
        match done {
            Ok(()) => Ok(()),
            Err(error) => {
                let down = self.node(id).process_end(&error);
                self.went_down(id, down)
            }
        }
    }

    pub(super) fn apply_done(&mut self, id: u64, life: u64) -> Result<(), InvariantViolation> {
        if let Some(wait) = self.paused(id) {
            self.schedule(wait, ScheduledEvent::ApplyDone { node: id, life });
            return Ok(());
        }
        let idle = self.rng.chance(10);
        let Some(live) = self.live(id, life) else { return Ok(()) };
        let Some(turn) = live.turn.take() else { return Ok(()) };
        // Check all entries, even if a checkpoint failed after they were applied: they may be
        // durable.
        let entries = turn.entries().to_vec();
        let (told, result) = live.run_turn(turn, idle);
        self.begin_turn(id, life);
        if told.must_write_snapshot {
            let delay = self.rng.range(100, 60_000);
            self.schedule(delay, ScheduledEvent::SnapshotWritten { node: id, life });
        }
        let down = result.err().map(|error| self.node(id).process_end(&*error));
        for entry in &entries {
            self.invariants.machines.observe(id, entry)?;
            self.applied_by_the_model(entry)?;
        }
        match down {
            None => self.applied(id, life, told),
            Some(down) => self.went_down(id, down),
        }
    }

    fn applied(&mut self, id: u64, life: u64, told: TurnOutput) -> Result<(), InvariantViolation> {
        for (RequestId(request), outcome) in &told.outcomes {
            self.outcome(id, *request, outcome)?;
        }
        self.note_members(id)?;
        let removed = self.nodes[index_of(id)].store_view().is_some_and(|view| {
            view.members().is_removed(MemberId(self.nodes[index_of(id)].member))
        });
        if removed {
            let delay = self.rng.range(100, 10_000);
            self.schedule(delay, ScheduledEvent::Leave { node: id, life });
        }
        self.wake_hub(id);
        for body in &told.installed {
            self.report.snapshots += 1;
            self.check_store(id, false)?;
            self.transfer_ended(id, body, true);
            self.outcomes_lost(id);
        }
        for notice in told.notices {
            let delay = self.rng.range(100, 30_000);
            self.schedule(delay, ScheduledEvent::CompactStep { node: id, life });
            let Some(live) = self.live(id, life) else { return Ok(()) };
            live.mail.notice(notice);
        }
        self.wake(id)
    }

    /// Reads old entries. The log's writer works at the same time, so they may be gone by then.
    pub(super) fn fetch(
        &mut self,
        id: u64,
        life: u64,
        fetch: FetchRequest,
    ) -> Result<(), InvariantViolation> {
        if let Some(wait) = self.paused(id) {
            self.schedule(wait, ScheduledEvent::Fetch { node: id, life, fetch });
            return Ok(());
        }
        let Some(live) = self.live(id, life) else { return Ok(()) };
        live.fetching -= 1;
        match run_fetch(&live.reader, fetch) {
            Ok(notice) => self.notice(id, life, notice),
            Err(error) => {
                let down = self.node(id).process_end(&error);
                self.went_down(id, down)
            }
        }
    }

    /// Writes a snapshot while the state machine continues.
    pub(super) fn snapshot_written(
        &mut self,
        id: u64,
        life: u64,
    ) -> Result<(), InvariantViolation> {
        if let Some(wait) = self.paused(id) {
            self.schedule(wait, ScheduledEvent::SnapshotWritten { node: id, life });
            return Ok(());
        }
        let Some(live) = self.live(id, life) else { return Ok(()) };
        let Some(notice) = live.write_snapshot() else { return Ok(()) };
        self.notice(id, life, notice)
    }

    /// Takes one step of the store's compaction, if one is under way.
    pub(super) fn compact_step(&mut self, id: u64, life: u64) -> Result<(), InvariantViolation> {
        self.check_corruption(id)?;
        let Some(live) = self.live(id, life) else { return Ok(()) };
        let before = *live.store.finished_compactions().borrow();
        match live.store.compact_step() {
            Ok(progress) => {
                let finished = *live.store.finished_compactions().borrow() > before;
                self.report.compactions += u64::from(finished);
                if progress == CompactionProgress::More {
                    let delay = self.rng.range(100, 20_000);
                    self.schedule(delay, ScheduledEvent::CompactStep { node: id, life });
                }
                Ok(())
            }
            Err(error) => {
                let down = self.node(id).process_end(&error);
                self.went_down(id, down)
            }
        }
    }

    /// Runs a member's core because it has input, most often at once. If the core is busy, inputs
    /// gather and share a later round.
    pub(super) fn wake(&mut self, id: u64) -> Result<(), InvariantViolation> {
        // The tick that is scheduled for the end of the pause wakes the member.
        if self.paused(id).is_some() {
            return Ok(());
        }
        let (life, bound) = (self.node(id).life, self.plan.queued_jobs);
        let Some(live) = self.live(id, life) else { return Ok(()) };
        if live.core_is_due || live.is_blocked(bound) {
            return Ok(());
        }
        if self.rng.chance(self.plan.busy_core) {
            let delay = self.rng.range(50, 3_000);
            self.schedule(delay, ScheduledEvent::Core { node: id, life });
            if let Some(live) = self.live(id, life) {
                live.core_is_due = true;
            }
            return Ok(());
        }
        self.rounds(id)
    }

    /// Runs the rounds of a core that was busy until now.
    pub(super) fn core(&mut self, id: u64, life: u64) -> Result<(), InvariantViolation> {
        if let Some(wait) = self.paused(id) {
            self.schedule(wait, ScheduledEvent::Core { node: id, life });
            return Ok(());
        }
        let bound = self.plan.queued_jobs;
        let Some(live) = self.live(id, life) else { return Ok(()) };
        live.core_is_due = false;
        if live.is_blocked(bound) { Ok(()) } else { self.rounds(id) }
    }

    /// Runs rounds of a member's core until it has no more work, then checks the invariants.
    pub(super) fn rounds(&mut self, id: u64) -> Result<(), InvariantViolation> {
        let (life, bound) = (self.node(id).life, self.plan.queued_jobs);
        let before = self.live(id, life).map(|live| Arc::clone(live.core.driver().members()));
        loop {
            let Self { nodes, rng, plan, are_faults_over: calm, .. } = self;
            let Some(live) = nodes[index_of(id)].process.as_mut() else { return Ok(()) };
            let sent = live.round(rng, plan, *calm);
            self.carry_out(id, life, sent)?;
            let Some(live) = self.live(id, life) else { return Ok(()) };
            if live.is_blocked(bound) || !live.has_work() {
                break;
            }
        }
        let Some(live) = &self.nodes[index_of(id)].process else { return Ok(()) };
        let driver = live.core.driver();
        let status = driver.status();
        let seat = &mut self.leaders[index_of(id)];
        if *seat != (status.leader, status.term) {
            *seat = (status.leader, status.term);
            self.leadership_since = self.now;
        }
        let invariants = &mut self.invariants;
        invariants.elections.observe(id, &status)?;
        invariants.monotone.observe(id, life, &status)?;
        let term_at = |index| driver.term_at(index);
        invariants.leaders.observe(id, &status, &invariants.machines, term_at)?;
        let member = self.nodes[index_of(id)].member;
        let configurations = [before.as_deref(), Some(&**driver.members())];
        let configurations: Vec<&Members> = configurations.into_iter().flatten().collect();
        invariants.counts.observe(member, &status, &configurations, &invariants.elections)?;
        let model = &invariants.stores.model.members;
        invariants.removed.observe(member, &status, driver.members(), model)?;
        invariants.changes.record_commit(member, status.commit);
        self.compare_members(id)
    }

    fn carry_out(
        &mut self,
        id: u64,
        life: u64,
        sent: RoundOutput,
    ) -> Result<(), InvariantViolation> {
        self.aim(id, &sent);
        self.report.full_queues += sent.full;
        self.report.lost_bodies += sent.missing_bodies;
        for (message, stream) in &sent.messages {
            if message.from != self.nodes[index_of(id)].member {
                let what = format!("{id} sends {message:?}");
                return Err(InvariantViolation::new("a member speaks for itself", what));
            }
            let Some(link) = *stream else { continue };
            self.invariants.check_message(id, message)?;
            self.send(id, message, link);
        }
        for (message, body) in sent.snapshots {
            self.send_snapshot(id, life, &message, body);
        }
        self.check_changes(id, &sent.changes)?;
        self.begin_group(id, life);
        for fetch in sent.fetches {
            let delay = self.rng.range(50, 5_000);
            self.schedule(delay, ScheduledEvent::Fetch { node: id, life, fetch });
        }
        self.begin_turn(id, life);
        for body in &sent.discarded {
            self.transfer_ended(id, body, false);
        }
        for RequestId(request) in sent.refused {
            self.was_refused(id, request)?;
        }
        for token in sent.refused_reads {
            self.ended(id, token);
        }
        for token in sent.reads {
            self.read_done(id, token)?;
        }
        Ok(())
    }

    /// Sends a message on the stream to one process of the peer.
    fn send(&mut self, from: u64, message: &Message, link: ConnectedStream) {
        let (to, life) = (link.machine, link.life);
        let mut bytes = BytesMut::new();
        message.encode(&mut bytes);
        let bytes = bytes.freeze();
        for delay in self.network.delays(&mut self.rng, &self.plan, from, to) {
            self.schedule(
                delay,
                ScheduledEvent::Deliver { to, life, bytes: bytes.clone(), body: None },
            );
        }
    }

    fn begin_group(&mut self, id: u64, life: u64) {
        let Some(live) = self.live(id, life) else { return };
        let conflicts = std::mem::take(&mut live.log_summary.conflicts);
        let begins = live.begin_group();
        let may_tear = live.may_tear();
        self.report.conflicts += conflicts;
        if !begins {
            return;
        }
        let slow = !self.are_faults_over && self.rng.chance(self.plan.slow_disk);
        let delay = if slow { self.rng.range(5_000, 300_000) } else { self.rng.range(100, 3_000) };
        self.schedule(delay, ScheduledEvent::LogDone { node: id, life });
        let cut = if may_tear { self.plan.crash_in_write } else { self.plan.crash_in_write / 8 };
        if !self.are_faults_over && self.rng.chance(cut) {
            self.schedule(delay / 2, ScheduledEvent::CutWrite { node: id, life });
        }
    }

    fn begin_turn(&mut self, id: u64, life: u64) {
        let Some(live) = self.live(id, life) else { return };
        let jobs = live.begin_turn();
        if jobs > 0 {
            self.report.shared_turns += u64::from(jobs > 1);
            let delay = self.rng.range(50, 3_000);
            self.schedule(delay, ScheduledEvent::ApplyDone { node: id, life });
        }
    }
}
