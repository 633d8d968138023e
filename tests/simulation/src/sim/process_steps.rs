//! Steps of members: input arrives, the core takes it in a round, and the results are carried out.
//! Production code ([`node_engine::driver`]) makes all decisions; this module only decides when.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use node_consensus::{FetchRequest, Members};
use node_engine::driver::{
    COMMIT_INDEX_DELAY, DriverMetrics, Message, Notice, READ_HEARTBEAT_DELAY, READ_ROUND_DELAY,
    run_checkpoint, run_fetch,
};
use node_state::identity::MemberId;
use node_state::mvcc::CompactionProgress;
use node_state::state_machine::RequestId;

use super::InvariantViolation;
use super::invariants::log_matching::hash;
use super::node::{ConnectedStream, MemberProcess};
use super::peer_streams::Transfer;
use super::ports::{RoundOutput, TurnOutput};
use super::simulation::{ScheduledEvent, Simulation, index_of};

impl Simulation {
    pub(super) fn running_process(
        &mut self,
        id: u64,
        generation: u64,
    ) -> Option<&mut MemberProcess> {
        let node = self.node(id);
        if node.generation == generation { node.process.as_mut() } else { None }
    }

    /// Returns the member's process, if one runs.
    pub(super) fn current_process(&mut self, id: u64) -> Option<&mut MemberProcess> {
        self.node(id).process.as_mut()
    }

    /// Returns how long the member is still paused, or `None` if it isn't paused. A caller
    /// schedules its event again for the end of the pause.
    pub(super) fn remaining_pause(&mut self, id: u64) -> Option<u64> {
        let now = self.now;
        let until = self.node(id).paused_until;
        (until > now).then(|| until - now)
    }

    pub(super) fn tick(&mut self, id: u64, generation: u64) -> Result<(), InvariantViolation> {
        let wait = self.remaining_pause(id).unwrap_or(0);
        let Some(process) = self.running_process(id, generation) else { return Ok(()) };
        if wait > 0 {
            self.schedule(wait, ScheduledEvent::Tick { node: id, generation });
            return Ok(());
        }
        process.tick_is_due = true;
        self.run_lease_clock(id)?;
        let tick = self.node(id).tick;
        let jitter = self.rng.range(0, tick / 10 + 1);
        self.schedule(tick + jitter, ScheduledEvent::Tick { node: id, generation });
        if self.rng.chance(100) {
            self.maintain_idle_log(id, generation)?;
        }
        self.wake(id)
    }

    /// Lets a member send its commit index, if the time for it has come.
    pub(super) fn send_due_commit_index(
        &mut self,
        id: u64,
        generation: u64,
    ) -> Result<(), InvariantViolation> {
        if let Some(wait) = self.remaining_pause(id) {
            self.schedule(wait, ScheduledEvent::CommitIndexDue { node: id, generation });
            return Ok(());
        }
        let now = self.now;
        let Some(process) = self.running_process(id, generation) else { return Ok(()) };
        // If `commit_index_due` is later or unset, this event was scheduled for an earlier commit
        // index.
        if process.commit_index_due.take_if(|due| *due <= now).is_none() {
            return Ok(());
        }
        process.mail.notice(Notice::SendCommitIndex);
        self.wake(id)
    }

    /// Schedules the sending of the member's commit index if it is unsent, and otherwise clears the
    /// scheduled time. Called each time that the member's core has run.
    fn schedule_commit_index(&mut self, id: u64, generation: u64) {
        let now = self.now;
        let delay = u64::try_from(COMMIT_INDEX_DELAY.as_micros()).unwrap_or(u64::MAX);
        let Some(process) = self.running_process(id, generation) else { return };
        if !process.core.driver().has_unsent_commit() {
            process.commit_index_due = None;
        } else if process.commit_index_due.is_none() {
            process.commit_index_due = Some(now + delay);
            self.schedule(delay, ScheduledEvent::CommitIndexDue { node: id, generation });
        }
    }

    /// Lets a leader send the heartbeats that it holds back for a read round, unless the round was
    /// confirmed meanwhile.
    pub(super) fn send_due_held_heartbeats(
        &mut self,
        id: u64,
        generation: u64,
        round: u64,
    ) -> Result<(), InvariantViolation> {
        if let Some(wait) = self.remaining_pause(id) {
            let again = ScheduledEvent::HeldHeartbeatsDue { node: id, generation, round };
            self.schedule(wait, again);
            return Ok(());
        }
        let Some(process) = self.running_process(id, generation) else { return Ok(()) };
        if process.core.driver().oldest_held_heartbeats() != Some(round) {
            return Ok(());
        }
        process.mail.notice(Notice::SendHeldHeartbeats);
        self.wake(id)
    }

    /// Schedules the sending of heartbeats that the member holds back for a read round. Called each
    /// time that the member's core has run.
    fn schedule_held_heartbeats(&mut self, id: u64, generation: u64) {
        let delay = u64::try_from(READ_HEARTBEAT_DELAY.as_micros()).unwrap_or(u64::MAX);
        let Some(process) = self.running_process(id, generation) else { return };
        let Some(round) = process.core.driver().oldest_held_heartbeats() else { return };
        if round > process.scheduled_heartbeats {
            process.scheduled_heartbeats = round;
            let due = ScheduledEvent::HeldHeartbeatsDue { node: id, generation, round };
            self.schedule(delay, due);
        }
    }

    /// Lets the member start its delayed round of reads, unless it has started meanwhile.
    pub(super) fn start_due_read_round(
        &mut self,
        id: u64,
        generation: u64,
        round: u64,
    ) -> Result<(), InvariantViolation> {
        if let Some(wait) = self.remaining_pause(id) {
            let again = ScheduledEvent::ReadRoundDue { node: id, generation, round };
            self.schedule(wait, again);
            return Ok(());
        }
        let Some(process) = self.running_process(id, generation) else { return Ok(()) };
        process.scheduled_read_round = None;
        if process.core.driver().delayed_read_round() == Some(round) {
            process.mail.notice(Notice::StartReadRound);
        }
        self.wake(id)
    }

    /// Schedules the start of the member's delayed round of reads. Called each time that the
    /// member's core has run.
    fn schedule_read_round(&mut self, id: u64, generation: u64) {
        let delay = u64::try_from(READ_ROUND_DELAY.as_micros()).unwrap_or(u64::MAX);
        let Some(process) = self.running_process(id, generation) else { return };
        let Some(round) = process.core.driver().delayed_read_round() else { return };
        if process.scheduled_read_round != Some(round) {
            process.scheduled_read_round = Some(round);
            let due = ScheduledEvent::ReadRoundDue { node: id, generation, round };
            self.schedule(delay, due);
        }
    }

    pub(super) fn deliver(
        &mut self,
        to: u64,
        generation: u64,
        bytes: Bytes,
        body: Option<Transfer>,
    ) -> Result<(), InvariantViolation> {
        self.add_to_trace(&[to, hash(&bytes)]);
        let message = Message::decode(bytes).map_err(|error| {
            InvariantViolation::new("sent messages can be decoded", error.to_string())
        })?;
        if let Some(transfer) = body {
            return self.receive_snapshot(to, generation, message, transfer);
        }
        if self.running_process(to, generation).is_none() {
            return Ok(());
        }
        self.record_promise(to, &message);
        let Some(process) = self.running_process(to, generation) else { return Ok(()) };
        if process.mail.message(message).is_err() {
            self.report.full_queues += 1;
        }
        self.wake(to)
    }

    pub(super) fn notice(
        &mut self,
        id: u64,
        generation: u64,
        notice: Notice,
    ) -> Result<(), InvariantViolation> {
        let Some(process) = self.running_process(id, generation) else { return Ok(()) };
        process.mail.notice(notice);
        self.wake(id)
    }

    pub(super) fn complete_log_write(
        &mut self,
        id: u64,
        generation: u64,
    ) -> Result<(), InvariantViolation> {
        if let Some(wait) = self.remaining_pause(id) {
            self.schedule(wait, ScheduledEvent::LogDone { node: id, generation });
            return Ok(());
        }
        let Some(process) = self.running_process(id, generation) else { return Ok(()) };
        let Some(group) = process.log_group.take() else { return Ok(()) };
        let written: Vec<_> = group.iter().filter_map(|job| job.batch().cloned()).collect();
        match process.writer.run(group) {
            Ok(notices) => {
                for notice in notices {
                    process.mail.notice(notice);
                }
                self.begin_log_write(id, generation);
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
                let end = self.node(id).process_end(&error);
                self.handle_process_end(id, end)
            }
        }
    }

    /// Lets an idle log prepare for later writes, and check the disk's free space.
    fn maintain_idle_log(&mut self, id: u64, generation: u64) -> Result<(), InvariantViolation> {
        let Some(process) = self.running_process(id, generation) else { return Ok(()) };
        let changed = process.writer.check_space();
        let is_short = changed && process.writer.is_short();
        let done = if process.log_group.is_none() { process.writer.idle() } else { Ok(()) };
        self.report.disk_space_warnings += u64::from(is_short);
        match done {
            Ok(()) => Ok(()),
            Err(error) => {
                let end = self.node(id).process_end(&error);
                self.handle_process_end(id, end)
            }
        }
    }

    pub(super) fn complete_apply_turn(
        &mut self,
        id: u64,
        generation: u64,
    ) -> Result<(), InvariantViolation> {
        if let Some(wait) = self.remaining_pause(id) {
            self.schedule(wait, ScheduledEvent::ApplyDone { node: id, generation });
            return Ok(());
        }
        let idle = self.rng.chance(10);
        let Some(process) = self.running_process(id, generation) else { return Ok(()) };
        let Some(turn) = process.turn.take() else { return Ok(()) };
        // Check all applied entries, even if the checkpoint after them failed, because they may be
        // durable.
        let entries = turn.entries().to_vec();
        let (output, result) = process.run_turn(turn, idle);
        self.begin_apply_turn(id, generation);
        if output.must_write_snapshot {
            let delay = self.rng.range(100, 60_000);
            self.schedule(delay, ScheduledEvent::SnapshotWritten { node: id, generation });
        }
        if output.begun_checkpoint {
            let delay = self.rng.range(100, 60_000);
            self.schedule(delay, ScheduledEvent::CheckpointDone { node: id, generation });
        }
        let end = result.err().map(|error| self.node(id).process_end(&*error));
        for entry in &entries {
            self.invariants.machines.observe(id, entry)?;
            self.apply_to_model(entry)?;
        }
        match end {
            None => self.handle_apply_output(id, generation, output),
            Some(end) => self.handle_process_end(id, end),
        }
    }

    fn handle_apply_output(
        &mut self,
        id: u64,
        generation: u64,
        output: TurnOutput,
    ) -> Result<(), InvariantViolation> {
        for (RequestId(request), outcome) in &output.outcomes {
            self.deliver_outcome(id, *request, outcome)?;
        }
        self.check_member_table(id)?;
        let removed = self.nodes[index_of(id)].store_view().is_some_and(|view| {
            view.members().is_removed(MemberId(self.nodes[index_of(id)].member))
        });
        if removed {
            let delay = self.rng.range(100, 10_000);
            self.schedule(delay, ScheduledEvent::Leave { node: id, generation });
        }
        self.wake_hub(id);
        for body in &output.installed {
            self.report.snapshots += 1;
            self.check_store(id, false)?;
            self.report_transfer(id, body, true);
            self.record_lost_outcomes(id);
        }
        for notice in output.notices {
            let delay = self.rng.range(100, 30_000);
            self.schedule(delay, ScheduledEvent::CompactStep { node: id, generation });
            let Some(process) = self.running_process(id, generation) else { return Ok(()) };
            process.mail.notice(notice);
        }
        self.wake(id)
    }

    /// Reads old entries. The log's writer works at the same time, so the entries may have been
    /// deleted since the core asked for them.
    pub(super) fn fetch_entries(
        &mut self,
        id: u64,
        generation: u64,
        fetch: FetchRequest,
    ) -> Result<(), InvariantViolation> {
        if let Some(wait) = self.remaining_pause(id) {
            self.schedule(wait, ScheduledEvent::Fetch { node: id, generation, fetch });
            return Ok(());
        }
        let Some(process) = self.running_process(id, generation) else { return Ok(()) };
        process.fetches_in_progress -= 1;
        match run_fetch(&process.reader, fetch) {
            Ok(notice) => self.notice(id, generation, notice),
            Err(error) => {
                let end = self.node(id).process_end(&error);
                self.handle_process_end(id, end)
            }
        }
    }

    /// Writes a snapshot while the state machine continues.
    pub(super) fn write_snapshot(
        &mut self,
        id: u64,
        generation: u64,
    ) -> Result<(), InvariantViolation> {
        if let Some(wait) = self.remaining_pause(id) {
            self.schedule(wait, ScheduledEvent::SnapshotWritten { node: id, generation });
            return Ok(());
        }
        let Some(process) = self.running_process(id, generation) else { return Ok(()) };
        let Some(notice) = process.write_snapshot() else { return Ok(()) };
        self.notice(id, generation, notice)
    }

    /// Makes the store durable while the state machine continues.
    pub(super) fn run_checkpoint(
        &mut self,
        id: u64,
        generation: u64,
    ) -> Result<(), InvariantViolation> {
        if let Some(wait) = self.remaining_pause(id) {
            self.schedule(wait, ScheduledEvent::CheckpointDone { node: id, generation });
            return Ok(());
        }
        let Some(process) = self.running_process(id, generation) else { return Ok(()) };
        let Some(work) = process.checkpoint_to_run.take() else { return Ok(()) };
        match run_checkpoint(work, &DriverMetrics::default()) {
            Ok(notice) => self.notice(id, generation, notice),
            Err(error) => {
                let end = self.node(id).process_end(&error);
                self.handle_process_end(id, end)
            }
        }
    }

    /// Takes one step of the store's compaction, if one is under way.
    pub(super) fn compact_step(
        &mut self,
        id: u64,
        generation: u64,
    ) -> Result<(), InvariantViolation> {
        self.check_corruption(id)?;
        let Some(process) = self.running_process(id, generation) else { return Ok(()) };
        let before = *process.store.finished_compactions().borrow();
        match process.store.compact_step() {
            Ok(progress) => {
                let finished = *process.store.finished_compactions().borrow() > before;
                self.report.compactions += u64::from(finished);
                if progress == CompactionProgress::More {
                    let delay = self.rng.range(100, 20_000);
                    self.schedule(delay, ScheduledEvent::CompactStep { node: id, generation });
                }
                Ok(())
            }
            Err(error) => {
                let end = self.node(id).process_end(&error);
                self.handle_process_end(id, end)
            }
        }
    }

    /// Runs a member's core because it has input, in most cases at once. Sometimes the core is
    /// drawn to be busy, so that inputs accumulate for a later round.
    pub(super) fn wake(&mut self, id: u64) -> Result<(), InvariantViolation> {
        // The tick that is scheduled for the end of the pause wakes the member.
        if self.remaining_pause(id).is_some() {
            return Ok(());
        }
        let (generation, bound) = (self.node(id).generation, self.plan.queued_jobs);
        let Some(process) = self.running_process(id, generation) else { return Ok(()) };
        if process.core_is_due || process.is_blocked(bound) {
            return Ok(());
        }
        if self.rng.chance(self.plan.busy_core) {
            let delay = self.rng.range(50, 3_000);
            self.schedule(delay, ScheduledEvent::Core { node: id, generation });
            if let Some(process) = self.running_process(id, generation) {
                process.core_is_due = true;
            }
            return Ok(());
        }
        self.run_rounds(id)
    }

    /// Runs the rounds of a core that was busy until now.
    pub(super) fn run_delayed_core(
        &mut self,
        id: u64,
        generation: u64,
    ) -> Result<(), InvariantViolation> {
        if let Some(wait) = self.remaining_pause(id) {
            self.schedule(wait, ScheduledEvent::Core { node: id, generation });
            return Ok(());
        }
        let bound = self.plan.queued_jobs;
        let Some(process) = self.running_process(id, generation) else { return Ok(()) };
        process.core_is_due = false;
        if process.is_blocked(bound) { Ok(()) } else { self.run_rounds(id) }
    }

    /// Runs rounds of a member's core until it has no more work, then checks the invariants.
    pub(super) fn run_rounds(&mut self, id: u64) -> Result<(), InvariantViolation> {
        let (generation, bound) = (self.node(id).generation, self.plan.queued_jobs);
        let before = self
            .running_process(id, generation)
            .map(|process| Arc::clone(process.core.driver().members()));
        loop {
            let Self { nodes, rng, plan, are_faults_over: faults_over, .. } = self;
            let Some(process) = nodes[index_of(id)].process.as_mut() else { return Ok(()) };
            let output = process.round(rng, plan, *faults_over);
            self.execute_output(id, generation, output)?;
            let Some(process) = self.running_process(id, generation) else { return Ok(()) };
            if process.is_blocked(bound) || !process.has_work() {
                break;
            }
        }
        self.schedule_commit_index(id, generation);
        self.schedule_held_heartbeats(id, generation);
        self.schedule_read_round(id, generation);
        let Some(process) = &self.nodes[index_of(id)].process else { return Ok(()) };
        let driver = process.core.driver();
        let status = driver.status();
        let leadership = &mut self.leaders[index_of(id)];
        if *leadership != (status.leader, status.term) {
            *leadership = (status.leader, status.term);
            self.leadership_since = self.now;
        }
        let invariants = &mut self.invariants;
        invariants.elections.observe(id, &status)?;
        invariants.monotone.observe(id, generation, &status)?;
        let term_at = |index| driver.term_at(index);
        invariants.leaders.observe(id, &status, &invariants.machines, term_at)?;
        let member = self.nodes[index_of(id)].member;
        let configurations = [before.as_deref(), Some(&**driver.members())];
        let configurations: Vec<&Members> = configurations.into_iter().flatten().collect();
        invariants.counts.observe(member, &status, &configurations, &invariants.elections)?;
        let model = &invariants.stores.model.members;
        invariants.removed.observe(member, &status, driver.members(), model)?;
        invariants.changes.record_commit(member, status.commit);
        self.check_members_in_use(id)
    }

    fn execute_output(
        &mut self,
        id: u64,
        generation: u64,
        output: RoundOutput,
    ) -> Result<(), InvariantViolation> {
        self.inject_aimed_power_cut(id, &output);
        self.report.full_queues += output.refused_by_full_queue;
        self.report.lost_bodies += output.missing_bodies;
        for (message, stream) in &output.messages {
            if message.from != self.nodes[index_of(id)].member {
                let what = format!("{id} sends {message:?}");
                return Err(InvariantViolation::new(
                    "a member sends only messages of its own",
                    what,
                ));
            }
            let Some(stream) = *stream else { continue };
            self.invariants.check_message(id, message)?;
            self.send_message(id, message, stream);
        }
        for (message, body) in output.snapshots {
            self.send_snapshot(id, generation, &message, body);
        }
        self.check_proposed_changes(id, &output.changes)?;
        self.begin_log_write(id, generation);
        for fetch in output.fetches {
            let delay = self.rng.range(50, 5_000);
            self.schedule(delay, ScheduledEvent::Fetch { node: id, generation, fetch });
        }
        self.begin_apply_turn(id, generation);
        for body in &output.discarded {
            self.report_transfer(id, body, false);
        }
        for RequestId(request) in output.refused {
            self.record_refusal(id, request)?;
        }
        for RequestId(request) in output.lost {
            self.lose_outcome(id, request);
        }
        for token in output.refused_reads {
            self.complete_request(id, token);
        }
        for token in output.reads {
            self.complete_read(id, token)?;
        }
        Ok(())
    }

    /// Sends a message on the stream to one process of the peer.
    fn send_message(&mut self, from: u64, message: &Message, stream: ConnectedStream) {
        let (to, generation) = (stream.machine, stream.generation);
        let mut bytes = BytesMut::new();
        message.encode(&mut bytes);
        let bytes = bytes.freeze();
        for delay in self.network.delays(&mut self.rng, &self.plan, from, to) {
            self.schedule(
                delay,
                ScheduledEvent::Deliver { to, generation, bytes: bytes.clone(), body: None },
            );
        }
    }

    fn begin_log_write(&mut self, id: u64, generation: u64) {
        let Some(process) = self.running_process(id, generation) else { return };
        let conflicts = std::mem::take(&mut process.log_summary.conflicts);
        let begins = process.begin_log_write();
        let may_tear = process.may_tear_write();
        self.report.conflicts += conflicts;
        if !begins {
            return;
        }
        let slow = !self.are_faults_over && self.rng.chance(self.plan.slow_disk);
        let delay = if slow { self.rng.range(5_000, 300_000) } else { self.rng.range(100, 3_000) };
        self.schedule(delay, ScheduledEvent::LogDone { node: id, generation });
        let cut_chance =
            if may_tear { self.plan.crash_in_write } else { self.plan.crash_in_write / 8 };
        if !self.are_faults_over && self.rng.chance(cut_chance) {
            self.schedule(delay / 2, ScheduledEvent::CutWrite { node: id, generation });
        }
    }

    fn begin_apply_turn(&mut self, id: u64, generation: u64) {
        let Some(process) = self.running_process(id, generation) else { return };
        let jobs = process.begin_apply_turn();
        if jobs > 0 {
            self.report.shared_turns += u64::from(jobs > 1);
            let delay = self.rng.range(50, 3_000);
            self.schedule(delay, ScheduledEvent::ApplyDone { node: id, generation });
        }
    }
}
