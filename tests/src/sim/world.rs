//! The event loop: one queue of virtual time, one step at a time, faults and their end. What members
//! do is in `work`, what clients do in `requests`.

use std::collections::BTreeMap;

use bytes::Bytes;
use muster_node::disk::simulated::{Failure, Fault, Operation};
use muster_node::driver::Notice;
use muster_node::machine::StateMachine as _;
use node_consensus::Fetch;

use super::clients::Client;
use super::invariants::Invariants;
use super::invariants::progress::stuck;
use super::network::Network;
use super::node::{Down, Node, broken};
use super::plan::Plan;
use super::rng::Rng;
use super::{Options, Violation};

/// Virtual microseconds of one tick.
const TICK: u64 = 10_000;
/// After the faults, this long may pass until all is well.
const CALM: u64 = 20_000_000;

#[derive(Debug)]
pub(super) enum Event {
    Tick { node: u64, life: u64 },
    Deliver { to: u64, life: u64, bytes: Bytes, body: Option<Bytes> },
    LogDone { node: u64, life: u64 },
    ApplyDone { node: u64, life: u64 },
    Fetch { node: u64, life: u64, fetch: Fetch },
    SnapshotWritten { node: u64, life: u64 },
    SnapshotReport { node: u64, life: u64, peer: u64, arrived: bool },
    Client { client: usize },
    ClientTimeout { client: usize, id: u64 },
    Partition,
    Crash,
    DiskFault,
    Restart { node: u64 },
    Pause,
    Transfer,
    ChangeMembers,
}

/// What a history that held had in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Of everything that happened, in order.
    pub trace: u64,
    /// Steps taken.
    pub steps: u64,
    /// Entries committed.
    pub committed: u64,
    /// Puts acknowledged.
    pub puts: u64,
    /// Reads answered.
    pub reads: u64,
    /// Crashes and kills.
    pub crashes: u64,
    /// Members that ended because their disk said no.
    pub disk_failures: u64,
    /// Snapshots installed.
    pub snapshots: u64,
    /// Changes of the members, each counted by every member that applied it.
    pub membership_changes: u64,
}

pub(super) struct World {
    pub(super) options: Options,
    pub(super) seed: u64,
    pub(super) plan: Plan,
    pub(super) rng: Rng,
    pub(super) now: u64,
    pub(super) sequence: u64,
    pub(super) queue: BTreeMap<(u64, u64), Event>,
    pub(super) nodes: Vec<Node>,
    pub(super) network: Network,
    pub(super) clients: Vec<Client>,
    pub(super) invariants: Invariants,
    pub(super) next_id: u64,
    pub(super) bodies: u64,
    pub(super) refused: Vec<u64>,
    /// Faults have ended.
    pub(super) calm: bool,
    /// A put that began after that was acknowledged.
    pub(super) served: bool,
    pub(super) report: Report,
}

impl World {
    pub fn new(seed: u64, options: Options) -> Self {
        let mut rng = Rng::new(seed);
        let plan = Plan::new(&mut rng, options.members);
        let nodes = (1..=plan.members)
            .map(|id| {
                let drift = if plan.drift > 0 { rng.range(0, plan.drift) } else { 0 };
                let tick = TICK * (1000 + drift) / (1000 + plan.drift / 2);
                Node::new(id, rng.next(), tick)
            })
            .collect();
        let clients = (0..plan.clients).map(|_| Client::default()).collect();
        Self {
            options,
            seed,
            plan,
            rng,
            now: 0,
            sequence: 0,
            queue: BTreeMap::new(),
            nodes,
            network: Network::default(),
            clients,
            invariants: Invariants::default(),
            next_id: 1,
            bodies: 0,
            refused: Vec::new(),
            calm: false,
            served: false,
            report: Report::default(),
        }
    }

    /// Runs the history to its end.
    pub fn run(mut self) -> Result<Report, Violation> {
        for id in 1..=self.plan.members {
            self.start(id)?;
        }
        for client in 0..self.clients.len() {
            let after = self.rng.range(1, 200_000);
            self.after(after, Event::Client { client });
        }
        for (every, event) in [
            (self.plan.partition_every, Event::Partition),
            (self.plan.crash_every, Event::Crash),
            (self.plan.pause_every, Event::Pause),
            (self.plan.disk_fault_every, Event::DiskFault),
            (self.plan.transfer_every, Event::Transfer),
            (self.plan.membership_every, Event::ChangeMembers),
        ] {
            self.fault_after(every, event);
        }
        while self.now < self.options.duration {
            self.step()?;
        }
        self.end_faults()?;
        let deadline = self.now + CALM;
        while !self.is_settled() {
            if self.now > deadline {
                return Err(stuck(self.describe()));
            }
            self.step()?;
        }
        self.finish()
    }

    pub(super) fn after(&mut self, delay: u64, event: Event) {
        self.sequence += 1;
        self.queue.insert((self.now + delay, self.sequence), event);
    }

    pub(super) fn fault_after(&mut self, every: u64, event: Event) {
        if every > 0 && !self.calm {
            let delay = self.rng.range(1, 2 * every);
            self.after(delay, event);
        }
    }

    pub(super) fn node(&mut self, id: u64) -> &mut Node {
        &mut self.nodes[usize::try_from(id - 1).expect("few")]
    }

    pub(super) fn trace(&mut self, parts: &[u64]) {
        for part in parts {
            self.report.trace =
                (self.report.trace.rotate_left(5) ^ part).wrapping_mul(0x517c_c1b7_2722_0a95);
        }
    }

    pub(super) fn step(&mut self) -> Result<(), Violation> {
        let Some(((at, _), event)) = self.queue.pop_first() else {
            return Err(stuck("nothing is left to happen".to_owned()));
        };
        self.now = at;
        self.report.steps += 1;
        self.trace(&[at]);
        match event {
            Event::Tick { node, life } => self.tick(node, life),
            Event::Deliver { to, life, bytes, body } => self.deliver(to, life, bytes, body),
            Event::LogDone { node, life } => self.log_done(node, life),
            Event::ApplyDone { node, life } => self.apply_done(node, life),
            Event::Fetch { node, life, fetch } => self.fetch(node, life, fetch),
            Event::SnapshotWritten { node, life } => self.snapshot_written(node, life),
            Event::SnapshotReport { node, life, peer, arrived } => {
                self.notice(node, life, Notice::SnapshotSent { peer, arrived })
            }
            Event::Client { client } => self.client(client),
            Event::ClientTimeout { client, id } => {
                if self.clients[client].operating.is_some_and(|operating| operating.id == id) {
                    self.next_operation(client);
                }
                Ok(())
            }
            Event::Restart { node } => self.start(node),
            Event::Partition
            | Event::Crash
            | Event::DiskFault
            | Event::Pause
            | Event::Transfer
            | Event::ChangeMembers
                if self.calm =>
            {
                Ok(())
            }
            Event::Partition => {
                if self.rng.chance(400) {
                    self.network.heal();
                } else {
                    self.network.partition(&mut self.rng, self.plan.members);
                }
                self.fault_after(self.plan.partition_every, Event::Partition);
                Ok(())
            }
            Event::ChangeMembers => {
                self.fault_after(self.plan.membership_every, Event::ChangeMembers);
                self.change_members()
            }
            Event::Crash => {
                self.crash_one();
                self.fault_after(self.plan.crash_every, Event::Crash);
                Ok(())
            }
            Event::DiskFault => {
                self.fail_a_disk();
                self.fault_after(self.plan.disk_fault_every, Event::DiskFault);
                Ok(())
            }
            Event::Pause => {
                let (id, long) = (self.any_member(), self.rng.range(20_000, 500_000));
                let until = self.now + long;
                self.node(id).paused_until = until;
                self.fault_after(self.plan.pause_every, Event::Pause);
                Ok(())
            }
            Event::Transfer => {
                let id = self.any_member();
                let life = self.node(id).life;
                self.fault_after(self.plan.transfer_every, Event::Transfer);
                self.notice(id, life, Notice::Transfer(None))
            }
        }
    }

    pub(super) fn any_member(&mut self) -> u64 {
        self.rng.range(1, self.plan.members + 1)
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
                // The process ends; the kernel keeps what it believes to be on the medium.
                let process_only = self.rng.chance(700);
                self.take_down(id, process_only);
                Ok(())
            }
        }
    }

    /// Somebody loses power now, or in the middle of one of the next operations of its disk.
    pub(super) fn crash_one(&mut self) {
        let id = self.any_member();
        let style = self.rng.range(0, 10);
        let operations = self.rng.range(1, 12);
        match style {
            0..3 => self.take_down(id, false),
            3..4 => self.take_down(id, true),
            _ => self.node(id).disk.power_off_after(operations),
        }
    }

    /// One of the next operations of somebody's disk fails, or finds it full.
    pub(super) fn fail_a_disk(&mut self) {
        let id = self.any_member();
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
        let operations = if self.rng.chance(300) { None } else { Some(self.rng.range(1, 6)) };
        let node = self.node(id);
        node.cut_short(operations);
        if process_only {
            node.kill()
        } else {
            node.crash()
        }
        for client in 0..self.clients.len() {
            if self.clients[client].operating.is_some_and(|operating| operating.node == id) {
                self.next_operation(client);
            }
        }
        let delay = self.rng.range(5_000, 400_000);
        self.after(delay, Event::Restart { node: id });
    }

    pub(super) fn start(&mut self, id: u64) -> Result<(), Violation> {
        if self.node(id).live.is_some() {
            return Ok(());
        }
        let (plan, guards) = (self.plan.clone(), self.options.guards);
        let seed = self.seed ^ (id << 32);
        let node = self.node(id);
        let life = node.life + 1;
        if let Err(down) = node.boot(&plan, seed ^ life, guards) {
            return self.went_down(id, down);
        }
        let life = self.node(id).life;
        let delay = self.rng.range(1, TICK);
        self.after(delay, Event::Tick { node: id, life });
        self.advance(id)
    }

    pub(super) fn end_faults(&mut self) -> Result<(), Violation> {
        self.calm = true;
        self.network.heal();
        self.plan.loss = 0;
        self.plan.duplication = 0;
        self.plan.late = 0;
        for id in 1..=self.plan.members {
            let now = self.now;
            let node = self.node(id);
            node.paused_until = now;
            let armed = node.live.is_some();
            if armed {
                // A power cut that is still to come comes now.
                self.take_down(id, false);
            }
            self.node(id).disk.crash();
            self.start(id)?;
        }
        Ok(())
    }

    /// All members run, agree and have nothing left to do, and the cluster has served.
    pub(super) fn is_settled(&self) -> bool {
        let idle = self.clients.iter().all(|client| client.operating.is_none());
        let mut positions = self.nodes.iter().map(|node| {
            let live = node.live.as_ref()?;
            let status = live.driver.status();
            let applied = live.applier.machine().applied();
            let even = status.leader != 0 && status.commit == status.last;
            even.then_some((status.leader, status.last, applied))
        });
        let first = positions.next().flatten();
        let together = first.is_some_and(|(_, last, applied)| applied.index == last);
        self.served && idle && together && positions.all(|position| position == first)
    }

    pub(super) fn describe(&self) -> String {
        let mut text = format!("served {}", self.served);
        for node in &self.nodes {
            let status = node.live.as_ref().map(|live| live.driver.status());
            text = format!("{text}; {}: {status:?}", node.id);
        }
        text
    }

    pub(super) fn finish(mut self) -> Result<Report, Violation> {
        let mut hashes = Vec::new();
        for node in &self.nodes {
            let Some(live) = &node.live else { continue };
            let view = live.store.view();
            let hash = live
                .store
                .hash_kv(&view, 0)
                .map_err(|error| broken(node.id, &format!("hashing failed: {error:?}")))?;
            hashes.push((node.id, hash.hash, view.revision()));
        }
        if let Some(odd) = hashes.iter().find(|(_, hash, _)| *hash != hashes[0].1) {
            let what = format!("{} holds other data than {}", odd.0, hashes[0].0);
            return Err(Violation::new("equal stores", what));
        }
        self.equal_members()?;
        self.invariants.acks.check(&self.invariants.machines, hashes[0].2)?;
        if let Some(id) = self.refused.iter().find(|id| self.invariants.machines.has_request(**id))
        {
            let what = format!("put {id} was refused for good and is committed");
            return Err(Violation::new("a refusal is final", what));
        }
        self.trace(&[u64::from(hashes[0].1)]);
        self.report.committed = self.invariants.machines.last();
        Ok(self.report)
    }
}
