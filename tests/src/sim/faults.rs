//! Faults of the simulation, and their end. Some happen at random, and some aim at the moments and
//! states in which rare things happen.

use muster_node::disk::simulated::{Failure, Fault, Operation};
use muster_node::driver::Notice;
use node_consensus::{MessageKind, Role};

use super::Violation;
use super::api_servers::ApiServer;
use super::network::Network;
use super::node::{Down, Live, Node, SEGMENT_BYTES, broken};
use super::ports::Sent;
use super::streams::Stream;
use super::world::{Event, World};

/// Virtual microseconds between two checks whether a member that was cut off has been left behind.
const LOOK: u64 = 20_000;

/// Maximum virtual microseconds for which a member is cut off.
const LONGEST_CUT: u64 = 800_000;

/// Upper bound of the free space on a disk that is almost full, in bytes: two segments of the log.
const LITTLE_SPACE: u64 = 2 * SEGMENT_BYTES;

/// A fault that recurs throughout a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    /// A partition, or the end of one.
    Partition,
    /// A member loses its power or its process.
    Crash,
    /// All members lose power at about the same time.
    PowerCut,
    /// One of a disk's next operations fails or finds the disk full.
    Disk,
    /// A member pauses for a while.
    Pause,
    /// A member is asked to transfer its leadership.
    Transfer,
    /// A leader is cut off.
    Depose,
    /// A member is cut off until the log has gone on without it.
    CutOff,
    /// A disk is almost full for a while.
    LittleSpace,
    /// A machine loses what its member has promised.
    Amnesia,
}

impl World {
    pub(super) fn begin_faults(&mut self) {
        for trouble in [
            Trouble::Partition,
            Trouble::Crash,
            Trouble::PowerCut,
            Trouble::Disk,
            Trouble::Pause,
            Trouble::Transfer,
            Trouble::Depose,
            Trouble::CutOff,
            Trouble::LittleSpace,
            Trouble::Amnesia,
        ] {
            self.next_trouble(trouble);
        }
    }

    fn next_trouble(&mut self, trouble: Trouble) {
        let every = match trouble {
            Trouble::Partition => self.plan.partition_every,
            Trouble::Crash => self.plan.crash_every,
            Trouble::PowerCut => self.plan.power_cut_every,
            Trouble::Disk => self.plan.disk_fault_every,
            Trouble::Pause => self.plan.pause_every,
            Trouble::Transfer => self.plan.transfer_every,
            Trouble::Depose => self.plan.depose_every,
            Trouble::CutOff => self.plan.cut_off_every,
            Trouble::LittleSpace => self.plan.little_space_every,
            Trouble::Amnesia => self.plan.amnesia_every,
        };
        if every > 0 && !self.calm {
            let delay = self.rng.range(1, 2 * every);
            self.after(delay, Event::Trouble(trouble));
        }
    }

    pub(super) fn trouble(&mut self, trouble: Trouble) -> Result<(), Violation> {
        if self.calm {
            return Ok(());
        }
        self.next_trouble(trouble);
        match trouble {
            Trouble::Partition if self.rng.chance(400) => self.network.heal(),
            Trouble::Partition => self.network.partition(&mut self.rng, self.nodes.len() as u64),
            Trouble::Crash => self.crash_one(),
            Trouble::PowerCut => {
                for id in 1..=self.nodes.len() as u64 {
                    let operations = self.rng.range(1, 8);
                    if self.rng.chance(500) {
                        self.take_down(id, false);
                    } else {
                        self.node(id).disk.power_off_after(operations);
                    }
                }
            }
            Trouble::Disk => self.fail_a_disk(),
            Trouble::Pause => {
                // Often pick the leader: another member then takes over while the paused one still
                // considers itself leader.
                let leader = if self.rng.chance(500) { self.leader(0) } else { None };
                let id = leader.unwrap_or_else(|| self.any_machine());
                let until = self.now + self.rng.range(20_000, 500_000);
                self.node(id).paused_until = until;
            }
            Trouble::Transfer => {
                let id = self.any_machine();
                let life = self.node(id).life;
                return self.notice(id, life, Notice::Transfer(None));
            }
            Trouble::LittleSpace => {
                let (id, bytes) = (self.any_machine(), self.rng.range(0, LITTLE_SPACE));
                self.node(id).disk.leave_free(bytes);
                let long = self.rng.range(50_000, 400_000);
                self.after(long, Event::SpaceBack { node: id });
            }
            Trouble::Amnesia => return self.forget_something(),
            // Only one member is cut off at a time: without two of three there would be no quorum.
            Trouble::Depose | Trouble::CutOff if self.network.is_anybody_alone() => {}
            Trouble::Depose | Trouble::CutOff => {
                let deposed = trouble == Trouble::Depose;
                let id = if deposed { self.leader(0) } else { Some(self.any_machine()) };
                if let Some(id) = id {
                    self.network.cut_off(id);
                    let until = self.now + LONGEST_CUT;
                    self.after(LOOK, Event::Rejoin { node: id, deposed, until });
                }
            }
        }
        Ok(())
    }

    /// Returns a machine whose member leads, other than `not`.
    pub(super) fn leader(&self, not: u64) -> Option<u64> {
        let leads = |node: &&Node| {
            let role = node.live.as_ref().map(|live| live.core.driver().leadership().0);
            node.id != not && role == Some(Role::Leader)
        };
        self.nodes.iter().find(leads).map(|node| node.id)
    }

    /// Ends a member's isolation: at `until`, or earlier. A deposed leader rejoins once another
    /// member leads, any other member once the log has gone on without it.
    pub(super) fn rejoin(&mut self, id: u64, deposed: bool, until: u64) {
        let last = self.node(id).live.as_ref().map(|live| live.core.driver().status().last);
        let has_compacted = |node: &Node| {
            let first = node.live.as_ref().map(|live| live.core.driver().status().first);
            last.zip(first).is_some_and(|(last, first)| last + 1 < first)
        };
        let enough = if deposed {
            self.leader(id).is_some()
        } else {
            self.nodes.iter().any(|node| node.id != id && has_compacted(node))
        };
        if self.now >= until || enough || self.calm {
            self.network.rejoin(id);
        } else {
            self.after(LOOK, Event::Rejoin { node: id, deposed, until });
        }
    }

    /// Cuts the power if the log is writing.
    pub(super) fn cut_a_write(&mut self, id: u64, life: u64) {
        let writes = self.live(id, life).is_some_and(|live| live.log_group.is_some());
        if writes && !self.calm {
            self.take_down(id, false);
        }
    }

    /// May cut the power soon after a member has sent an acknowledgement, or during a snapshot's
    /// installation.
    pub(super) fn aim(&mut self, id: u64, sent: &Sent) {
        if self.calm {
            return;
        }
        let acks = sent
            .messages
            .iter()
            .any(|(message, _)| message.kind == MessageKind::AppendResponse && !message.reject);
        let installs = sent.installs;
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

    pub(super) fn went_down(&mut self, id: u64, down: Down) -> Result<(), Violation> {
        match down {
            Down::Broken(why) => Err(broken(id, &why)),
            Down::Crashed => {
                self.take_down(id, false);
                Ok(())
            }
            Down::DiskFailed => {
                self.report.disk_failures += 1;
                // Only the process ends: the kernel keeps what it takes for written.
                let process_only = self.rng.chance(700);
                self.take_down(id, process_only);
                Ok(())
            }
        }
    }

    /// Cuts a machine's power now, or during one of its disk's next operations.
    pub(super) fn crash_one(&mut self) {
        let writes = |node: &&Node| node.live.as_ref().is_some_and(Live::may_tear);
        let writing = self.nodes.iter().find(writes).map(|node| node.id);
        let id = match writing {
            Some(id) if self.rng.chance(600) => id,
            _ => self.any_machine(),
        };
        let style = self.rng.range(0, 10);
        let operations = self.rng.range(1, 12);
        match style {
            0..5 => self.take_down(id, false),
            5..6 => self.take_down(id, true),
            _ => self.node(id).disk.power_off_after(operations),
        }
    }

    /// Makes one of the next operations of some disk fail, or find the disk full.
    pub(super) fn fail_a_disk(&mut self) {
        let id = self.any_machine();
        let operations = [
            Operation::Sync,
            Operation::Sync,
            Operation::Write,
            Operation::Resize,
            Operation::SyncDir,
            Operation::Rename,
        ];
        let operation = operations[self.rng.pick(operations.len())];
        let failure = if self.rng.chance(600) { Failure::Io } else { Failure::NoSpace };
        let after = self.rng.range(0, 12);
        self.node(id).disk.inject(Fault { operation, after, times: 1, failure });
    }

    pub(super) fn take_down(&mut self, id: u64, process_only: bool) {
        self.report.crashes += 1;
        self.report.interrupted_installs += u64::from(self.node(id).is_installing());
        // Before the process is dropped, because it holds the list of transfers.
        self.break_transfers(id);
        let operations =
            if self.rng.chance(100) { None } else { Some(1 + u64::from(self.rng.chance(250))) };
        let node = self.node(id);
        node.cut_short(operations);
        if process_only {
            node.kill()
        } else {
            node.crash()
        }
        for client in 0..self.clients.len() {
            let operating = self.clients[client].operating.as_ref();
            if operating.is_some_and(|operating| operating.node == id) {
                self.next_operation(client);
            }
        }
        self.streams.iter_mut().for_each(|stream| stream.disconnect(id));
        self.servers.iter_mut().for_each(|server| server.disconnect(id));
        let delay = self.rng.range(5_000, 400_000);
        self.after(delay, Event::Restart { node: id });
    }

    pub(super) fn end_faults(&mut self) -> Result<(), Violation> {
        self.calm = true;
        self.streams.iter_mut().for_each(Stream::hurry);
        self.servers.iter_mut().for_each(ApiServer::hurry);
        self.network = Network::default();
        self.plan.loss = 0;
        self.plan.duplication = 0;
        self.plan.late = 0;
        for id in 1..=self.nodes.len() as u64 {
            let now = self.now;
            let node = self.node(id);
            node.paused_until = now;
            let armed = node.live.is_some();
            if armed {
                // A power cut that was scheduled on the disk happens now instead.
                self.take_down(id, false);
            }
            let disk = &self.node(id).disk;
            disk.leave_free(u64::MAX);
            disk.crash();
            self.start(id)?;
        }
        Ok(())
    }
}
