//! Faults of the simulation, and their end. Some faults happen at random. Others are aimed at
//! moments and states that lead to rare events.

use node_consensus::{MessageKind, Role};
use node_engine::driver::Notice;
use node_state::disk::simulated::{DiskFailure, DiskOperation, Fault};

use super::InvariantViolation;
use super::api_servers::ApiServer;
use super::network::Network;
use super::node::{MemberProcess, ProcessEnd, SEGMENT_BYTES, SimulatedNode, broken};
use super::ports::RoundOutput;
use super::simulation::{ScheduledEvent, Simulation};
use super::watch_streams::SingleWatchStream;

/// Maximum number of disk operations after which power fails in a checkpoint. Most checkpoints of
/// the simulation's small stores need fewer.
const MAX_CHECKPOINT_OPERATIONS: u64 = 40;

/// Virtual microseconds between two checks whether a member that was cut off may rejoin.
const CHECK_INTERVAL: u64 = 20_000;

/// Maximum virtual microseconds for which a member is cut off.
const MAX_ISOLATION: u64 = 800_000;

/// Upper bound of the free space on a disk that is almost full, in bytes: two segments of the log.
const MAX_LOW_SPACE_BYTES: u64 = 2 * SEGMENT_BYTES;

/// A fault that recurs throughout a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FaultKind {
    /// A partition begins or ends.
    Partition,
    /// A member loses its power or its process.
    Crash,
    /// All members lose power at about the same time.
    PowerCut,
    /// One of the next operations on a disk fails, or finds the disk full.
    Disk,
    /// A member pauses for a while.
    Pause,
    /// A member is asked to transfer its leadership.
    Transfer,
    /// A leader is cut off.
    Depose,
    /// A member is cut off until a peer has compacted entries that the member lacks.
    Isolate,
    /// A disk is almost full for a while.
    LowDiskSpace,
    /// A machine loses what its member has promised to its peers (see `amnesia`).
    Amnesia,
}

impl Simulation {
    pub(super) fn begin_faults(&mut self) {
        for kind in [
            FaultKind::Partition,
            FaultKind::Crash,
            FaultKind::PowerCut,
            FaultKind::Disk,
            FaultKind::Pause,
            FaultKind::Transfer,
            FaultKind::Depose,
            FaultKind::Isolate,
            FaultKind::LowDiskSpace,
            FaultKind::Amnesia,
        ] {
            self.schedule_fault(kind);
        }
    }

    fn schedule_fault(&mut self, kind: FaultKind) {
        let every = match kind {
            FaultKind::Partition => self.plan.partition_every,
            FaultKind::Crash => self.plan.crash_every,
            FaultKind::PowerCut => self.plan.power_cut_every,
            FaultKind::Disk => self.plan.disk_fault_every,
            FaultKind::Pause => self.plan.pause_every,
            FaultKind::Transfer => self.plan.transfer_every,
            FaultKind::Depose => self.plan.depose_every,
            FaultKind::Isolate => self.plan.cut_off_every,
            FaultKind::LowDiskSpace => self.plan.low_space_every,
            FaultKind::Amnesia => self.plan.amnesia_every,
        };
        if every > 0 && !self.are_faults_over {
            let delay = self.rng.range(1, 2 * every);
            self.schedule(delay, ScheduledEvent::Fault(kind));
        }
    }

    pub(super) fn inject_fault(&mut self, kind: FaultKind) -> Result<(), InvariantViolation> {
        if self.are_faults_over {
            return Ok(());
        }
        self.schedule_fault(kind);
        match kind {
            FaultKind::Partition if self.rng.chance(400) => self.network.heal(),
            FaultKind::Partition => self.network.partition(&mut self.rng, self.nodes.len() as u64),
            FaultKind::Crash => self.crash_some_machine(),
            FaultKind::PowerCut => {
                for id in 1..=self.nodes.len() as u64 {
                    let operations = self.rng.range(1, 8);
                    if self.rng.chance(500) {
                        self.end_process(id, false);
                    } else {
                        self.node(id).disk.power_off_after(operations);
                    }
                }
            }
            FaultKind::Disk => self.inject_disk_fault(),
            FaultKind::Pause => {
                // Often the leader is paused. Another member then takes over, while the paused
                // leader still considers itself leader.
                let leader = if self.rng.chance(500) { self.find_leader(0) } else { None };
                let id = leader.unwrap_or_else(|| self.random_machine());
                let until = self.now + self.rng.range(20_000, 500_000);
                self.node(id).paused_until = until;
            }
            FaultKind::Transfer => {
                let id = self.random_machine();
                let generation = self.node(id).generation;
                return self.notice(id, generation, Notice::Transfer(None));
            }
            FaultKind::LowDiskSpace => {
                let (id, bytes) = (self.random_machine(), self.rng.range(0, MAX_LOW_SPACE_BYTES));
                self.node(id).disk.limit_free_bytes(bytes);
                let duration = self.rng.range(50_000, 400_000);
                self.schedule(duration, ScheduledEvent::DiskSpaceReturns { node: id });
            }
            FaultKind::Amnesia => return self.cause_amnesia(),
            // Only one member is cut off at a time: with two of three members cut off, no quorum
            // would be left.
            FaultKind::Depose | FaultKind::Isolate if self.network.has_isolated_machine() => {}
            FaultKind::Depose | FaultKind::Isolate => {
                let was_leader = kind == FaultKind::Depose;
                let id = if was_leader { self.find_leader(0) } else { Some(self.random_machine()) };
                if let Some(id) = id {
                    self.network.cut_off(id);
                    let until = self.now + MAX_ISOLATION;
                    self.schedule(
                        CHECK_INTERVAL,
                        ScheduledEvent::Rejoin { node: id, was_leader, until },
                    );
                }
            }
        }
        Ok(())
    }

    /// Returns a machine whose member leads, other than `excluded`.
    pub(super) fn find_leader(&self, excluded: u64) -> Option<u64> {
        let is_leader = |node: &&SimulatedNode| {
            let role = node.process.as_ref().map(|process| process.core.driver().leadership().0);
            node.id != excluded && role == Some(Role::Leader)
        };
        self.nodes.iter().find(is_leader).map(|node| node.id)
    }

    /// Ends a member's isolation at the time `until`, or earlier. A deposed leader rejoins once
    /// another member leads. Any other member rejoins once a peer has compacted entries that the
    /// member lacks.
    pub(super) fn rejoin(&mut self, id: u64, was_leader: bool, until: u64) {
        let last =
            self.node(id).process.as_ref().map(|process| process.core.driver().status().last);
        let has_compacted = |node: &SimulatedNode| {
            let first = node.process.as_ref().map(|process| process.core.driver().status().first);
            last.zip(first).is_some_and(|(last, first)| last + 1 < first)
        };
        let may_rejoin = if was_leader {
            self.find_leader(id).is_some()
        } else {
            self.nodes.iter().any(|node| node.id != id && has_compacted(node))
        };
        if self.now >= until || may_rejoin || self.are_faults_over {
            self.network.rejoin(id);
        } else {
            self.schedule(CHECK_INTERVAL, ScheduledEvent::Rejoin { node: id, was_leader, until });
        }
    }

    /// Cuts the power if the log is writing.
    pub(super) fn cut_power_during_write(&mut self, id: u64, generation: u64) {
        let writes =
            self.running_process(id, generation).is_some_and(|process| process.log_group.is_some());
        if writes && !self.are_faults_over {
            self.end_process(id, false);
        }
    }

    /// Sometimes cuts the power soon after a member has sent an acknowledgement, or during the
    /// installation of a snapshot.
    pub(super) fn inject_aimed_power_cut(&mut self, id: u64, output: &RoundOutput) {
        if self.are_faults_over {
            return;
        }
        let acks = output
            .messages
            .iter()
            .any(|(message, _)| message.kind == MessageKind::AppendResponse && !message.reject);
        let installs = output.installs;
        let per_mille = if installs {
            self.plan.crash_in_install
        } else if acks {
            self.plan.crash_after_ack
        } else {
            0
        };
        if self.rng.chance(per_mille) {
            let operations = self.rng.range(1, if installs { 10 } else { 4 });
            self.node(id).disk.power_off_after(operations);
        }
    }

    pub(super) fn handle_process_end(
        &mut self,
        id: u64,
        end: ProcessEnd,
    ) -> Result<(), InvariantViolation> {
        match end {
            ProcessEnd::Broken(why) => Err(broken(id, &why)),
            ProcessEnd::Crashed => {
                self.end_process(id, false);
                Ok(())
            }
            ProcessEnd::DiskFailed => {
                self.report.disk_failures += 1;
                // Often only the process ends. The kernel then keeps the data that it considers
                // written.
                let process_only = self.rng.chance(700);
                self.end_process(id, process_only);
                Ok(())
            }
        }
    }

    /// Cuts a machine's power now, or during one of its disk's next operations.
    pub(super) fn crash_some_machine(&mut self) {
        let writes = |node: &&SimulatedNode| {
            node.process.as_ref().is_some_and(MemberProcess::may_tear_write)
        };
        let writing = self.nodes.iter().find(writes).map(|node| node.id);
        let id = match writing {
            Some(id) if self.rng.chance(600) => id,
            _ => self.random_machine(),
        };
        let draw = self.rng.range(0, 10);
        let operations = self.rng.range(1, 12);
        match draw {
            0..5 => self.end_process(id, false),
            5..6 => self.end_process(id, true),
            _ => self.node(id).disk.power_off_after(operations),
        }
    }

    /// Makes one of the next operations of some disk fail, or find the disk full.
    pub(super) fn inject_disk_fault(&mut self) {
        let id = self.random_machine();
        let operations = [
            DiskOperation::Sync,
            DiskOperation::Sync,
            DiskOperation::Write,
            DiskOperation::Resize,
            DiskOperation::SyncDir,
            DiskOperation::Rename,
        ];
        let operation = operations[self.rng.pick(operations.len())];
        let failure = if self.rng.chance(600) { DiskFailure::Io } else { DiskFailure::NoSpace };
        let after = self.rng.range(0, 12);
        self.node(id).disk.inject(Fault { operation, after, times: 1, failure });
    }

    pub(super) fn end_process(&mut self, id: u64, process_only: bool) {
        self.report.crashes += 1;
        self.report.interrupted_installs += u64::from(self.node(id).is_installing());
        // Abort the transfers before the process is dropped, because the process holds their list.
        self.abort_transfers(id);
        let operations =
            if self.rng.chance(100) { None } else { Some(1 + u64::from(self.rng.chance(250))) };
        let is_in_checkpoint = self.node(id).process.as_ref();
        let is_in_checkpoint = is_in_checkpoint.is_some_and(|p| p.checkpoint_to_run.is_some());
        if is_in_checkpoint && self.rng.chance(500) {
            let operations = self.rng.range(0, MAX_CHECKPOINT_OPERATIONS);
            self.report.interrupted_checkpoints += 1;
            self.node(id).interrupt_checkpoint(operations);
        }
        let node = self.node(id);
        node.interrupt_log_write(operations);
        if process_only {
            node.kill()
        } else {
            node.crash()
        }
        for client in 0..self.clients.len() {
            let pending = self.clients[client].pending.as_ref();
            if pending.is_some_and(|pending| pending.node == id) {
                self.schedule_next_request(client);
            }
        }
        self.streams.iter_mut().for_each(|stream| stream.disconnect(id));
        self.servers.iter_mut().for_each(|server| server.disconnect(id));
        let delay = self.rng.range(5_000, 400_000);
        self.schedule(delay, ScheduledEvent::Restart { node: id });
    }

    pub(super) fn end_faults(&mut self) -> Result<(), InvariantViolation> {
        self.are_faults_over = true;
        self.streams.iter_mut().for_each(SingleWatchStream::read_without_delay);
        self.servers.iter_mut().for_each(ApiServer::read_without_delay);
        self.servers.iter_mut().for_each(ApiServer::end_races);
        self.network = Network::default();
        self.plan.loss = 0;
        self.plan.duplication = 0;
        self.plan.late_chance = 0;
        for id in 1..=self.nodes.len() as u64 {
            let now = self.now;
            let node = self.node(id);
            node.paused_until = now;
            let is_running = node.process.is_some();
            if is_running {
                // A power cut that was scheduled for a later operation of the disk happens now
                // instead.
                self.end_process(id, false);
            }
            let disk = &self.node(id).disk;
            disk.limit_free_bytes(u64::MAX);
            disk.crash();
            self.start(id)?;
        }
        Ok(())
    }
}
