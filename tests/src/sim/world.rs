//! The event loop: one queue of virtual time, one step at a time, invariants after each.

use std::collections::BTreeMap;

use bytes::{Bytes, BytesMut};
use muster_node::driver::{
    Effects, IncomingSnapshot, LogJob, Message, Notice, Proposal, ReadToken, Refusal, run_group,
};
use muster_node::machine::{RequestId, StateMachine as _};

use super::clients::{
    CLIENT_TIMEOUT, Client, Kind, Operating, put_command, put_revision, read_key,
};
use super::invariants::Invariants;
use super::invariants::log_matching::hash;
use super::invariants::progress::stuck;
use super::network::Network;
use super::node::{ApplyJob, Down, JobDone, Live, Node, broken};
use super::plan::Plan;
use super::rng::Rng;
use super::{Options, Violation};

/// Virtual microseconds of one tick.
const TICK: u64 = 10_000;
/// After the faults, this long may pass until all is well.
const CALM: u64 = 20_000_000;

#[derive(Debug)]
enum Event {
    Tick { node: u64, life: u64 },
    Deliver { to: u64, life: u64, bytes: Bytes, body: Option<Bytes> },
    LogDone { node: u64, life: u64 },
    ApplyDone { node: u64, life: u64 },
    SnapshotReport { node: u64, life: u64, peer: u64, arrived: bool },
    Client { client: usize },
    ClientTimeout { client: usize, id: u64 },
    Partition,
    Crash,
    Restart { node: u64 },
    Pause,
    Transfer,
}

fn written(job: &LogJob) -> Option<&muster_node::log::Batch> {
    match job {
        LogJob::Write(_, batch) => Some(batch),
        LogJob::Fetch(_) | LogJob::Compact(_) => None,
    }
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
    /// Snapshots installed.
    pub snapshots: u64,
}

pub(super) struct World {
    options: Options,
    seed: u64,
    plan: Plan,
    rng: Rng,
    now: u64,
    sequence: u64,
    queue: BTreeMap<(u64, u64), Event>,
    nodes: Vec<Node>,
    network: Network,
    clients: Vec<Client>,
    invariants: Invariants,
    next_id: u64,
    bodies: u64,
    refused: Vec<u64>,
    /// Faults have ended.
    calm: bool,
    /// A put that began after that was acknowledged.
    served: bool,
    report: Report,
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
            (self.plan.transfer_every, Event::Transfer),
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

    fn after(&mut self, delay: u64, event: Event) {
        self.sequence += 1;
        self.queue.insert((self.now + delay, self.sequence), event);
    }

    fn fault_after(&mut self, every: u64, event: Event) {
        if every > 0 && !self.calm {
            let delay = self.rng.range(1, 2 * every);
            self.after(delay, event);
        }
    }

    fn node(&mut self, id: u64) -> &mut Node {
        &mut self.nodes[usize::try_from(id - 1).expect("few")]
    }

    fn live(&mut self, id: u64, life: u64) -> Option<&mut Live> {
        let node = self.node(id);
        if node.life == life { node.live.as_mut() } else { None }
    }

    fn trace(&mut self, parts: &[u64]) {
        for part in parts {
            self.report.trace =
                (self.report.trace.rotate_left(5) ^ part).wrapping_mul(0x517c_c1b7_2722_0a95);
        }
    }

    fn step(&mut self) -> Result<(), Violation> {
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
            Event::Partition | Event::Crash | Event::Pause | Event::Transfer if self.calm => Ok(()),
            Event::Partition => {
                if self.rng.chance(400) {
                    self.network.heal();
                } else {
                    self.network.partition(&mut self.rng, self.plan.members);
                }
                self.fault_after(self.plan.partition_every, Event::Partition);
                Ok(())
            }
            Event::Crash => {
                self.crash_one();
                self.fault_after(self.plan.crash_every, Event::Crash);
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

    fn any_member(&mut self) -> u64 {
        self.rng.range(1, self.plan.members + 1)
    }

    /// Whether the member is paused; then the event comes again when it wakes.
    fn paused(&mut self, id: u64) -> Option<u64> {
        let now = self.now;
        let until = self.node(id).paused_until;
        (until > now).then(|| until - now)
    }

    fn tick(&mut self, id: u64, life: u64) -> Result<(), Violation> {
        let wait = self.paused(id).unwrap_or(0);
        let Some(live) = self.live(id, life) else { return Ok(()) };
        if wait > 0 {
            self.after(wait, Event::Tick { node: id, life });
            return Ok(());
        }
        live.driver.tick();
        let tick = self.node(id).tick;
        let jitter = self.rng.range(0, tick / 10 + 1);
        self.after(tick + jitter, Event::Tick { node: id, life });
        self.advance(id)
    }

    fn deliver(
        &mut self,
        to: u64,
        life: u64,
        bytes: Bytes,
        body: Option<Bytes>,
    ) -> Result<(), Violation> {
        if let Some(wait) = self.paused(to) {
            self.after(wait, Event::Deliver { to, life, bytes, body });
            return Ok(());
        }
        self.trace(&[to, hash(&bytes)]);
        self.bodies += 1;
        let name = format!("/incoming/{}", self.bodies);
        let Some(live) = self.live(to, life) else { return Ok(()) };
        let message = Message::decode(bytes)
            .map_err(|error| Violation::new("what is sent can be read", error.to_string()))?;
        match body {
            None => live.driver.message(message),
            Some(body) => {
                live.bodies.insert(name.clone().into(), body.to_vec());
                let snapshot = IncomingSnapshot { message, body: name.into() };
                live.driver.notice(Notice::Snapshot(snapshot));
            }
        }
        self.advance(to)
    }

    fn notice(&mut self, id: u64, life: u64, notice: Notice) -> Result<(), Violation> {
        let Some(live) = self.live(id, life) else { return Ok(()) };
        live.driver.notice(notice);
        self.advance(id)
    }

    fn log_done(&mut self, id: u64, life: u64) -> Result<(), Violation> {
        if let Some(wait) = self.paused(id) {
            self.after(wait, Event::LogDone { node: id, life });
            return Ok(());
        }
        let prepare = self.rng.chance(100);
        let Some(live) = self.live(id, life) else { return Ok(()) };
        live.log_busy = false;
        let jobs = std::mem::take(&mut live.log_jobs);
        let written: Vec<_> = jobs.iter().filter_map(written).cloned().collect();
        let mut done = run_group(&mut live.log, jobs);
        if done.is_ok()
            && prepare
            && let Err(error) = live.log.prepare()
        {
            done = Err(error);
        }
        match done {
            Ok(notices) => {
                for notice in notices {
                    live.driver.notice(notice);
                }
                for batch in written {
                    self.invariants.logs.observe(id, &batch.entries, None)?;
                }
                self.advance(id)
            }
            Err(error) => {
                let down = self.node(id).down(&error);
                self.went_down(id, down)
            }
        }
    }

    fn apply_done(&mut self, id: u64, life: u64) -> Result<(), Violation> {
        if let Some(wait) = self.paused(id) {
            self.after(wait, Event::ApplyDone { node: id, life });
            return Ok(());
        }
        let Some(live) = self.live(id, life) else { return Ok(()) };
        let done = live.apply_one();
        if live.apply_jobs.is_empty() {
            live.apply_busy = false;
        } else {
            self.after(100, Event::ApplyDone { node: id, life });
        }
        match done {
            Ok(done) => self.applied(id, life, done),
            Err(error) => {
                let down = self.node(id).down(&*error);
                self.went_down(id, down)
            }
        }
    }

    fn applied(&mut self, id: u64, life: u64, done: JobDone) -> Result<(), Violation> {
        for entry in &done.applied {
            self.invariants.machines.observe(id, entry)?;
        }
        for (RequestId(request), outcome) in done.outcomes {
            let revision = put_revision(&outcome);
            self.trace(&[request, revision.unwrap_or(0).unsigned_abs()]);
            if let Some(revision) = revision {
                self.put_done(id, request, revision)?;
            }
        }
        for notice in done.notices {
            if matches!(notice, Notice::Installed(_)) {
                self.report.snapshots += 1;
            }
            let Some(live) = self.live(id, life) else { return Ok(()) };
            live.driver.notice(notice);
        }
        self.advance(id)
    }

    fn went_down(&mut self, id: u64, down: Down) -> Result<(), Violation> {
        match down {
            Down::Broken(why) => Err(broken(id, &why)),
            Down::Crashed => {
                self.take_down(id, false);
                Ok(())
            }
        }
    }

    /// Somebody loses power now, or in the middle of one of the next operations of its disk.
    fn crash_one(&mut self) {
        let id = self.any_member();
        let style = self.rng.range(0, 10);
        let operations = self.rng.range(1, 12);
        match style {
            0..3 => self.take_down(id, false),
            3..4 => self.take_down(id, true),
            _ => self.node(id).disk.power_off_after(operations),
        }
    }

    fn take_down(&mut self, id: u64, process_only: bool) {
        self.report.crashes += 1;
        let node = self.node(id);
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

    fn start(&mut self, id: u64) -> Result<(), Violation> {
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

    /// Everything that follows from what a member was given, then the invariants.
    fn advance(&mut self, id: u64) -> Result<(), Violation> {
        let life = self.node(id).life;
        loop {
            let Some(live) = self.live(id, life) else { return Ok(()) };
            let effects = live.driver.advance();
            self.execute(id, life, effects)?;
            let Some(live) = self.live(id, life) else { return Ok(()) };
            if !live.driver.has_more() {
                break;
            }
        }
        let node = &self.nodes[usize::try_from(id - 1).expect("few")];
        let Some(live) = &node.live else { return Ok(()) };
        let status = live.driver.status();
        let invariants = &mut self.invariants;
        invariants.elections.observe(id, &status)?;
        invariants.monotone.observe(id, life, &status)?;
        let term_at = |index| live.driver.term_at(index);
        invariants.leaders.observe(id, &status, &invariants.machines, term_at)
    }

    fn execute(&mut self, id: u64, life: u64, effects: Effects) -> Result<(), Violation> {
        for message in &effects.send {
            if message.from != id {
                let what = format!("{id} sends {message:?}");
                return Err(Violation::new("a member speaks for itself", what));
            }
            self.invariants.sent(message)?;
            let mut bytes = BytesMut::new();
            message.encode(&mut bytes);
            let bytes = bytes.freeze();
            for delay in self.network.delays(&mut self.rng, &self.plan, id, message.to) {
                let life = self.node(message.to).life;
                self.after(
                    delay,
                    Event::Deliver { to: message.to, life, bytes: bytes.clone(), body: None },
                );
            }
        }
        for message in effects.send_snapshots {
            self.send_snapshot(id, life, &message);
        }
        self.queue_log(id, life, effects.persist, effects.fetches, effects.compact);
        let mut jobs = Vec::new();
        if !effects.apply.is_empty() {
            jobs.push(ApplyJob::Apply(effects.apply));
        }
        jobs.extend(effects.install.map(|(at, path)| ApplyJob::Install(at, path)));
        if effects.build_snapshot {
            jobs.push(ApplyJob::Build);
        }
        let delay = self.rng.range(50, 3_000);
        if let Some(live) = self.live(id, life)
            && !jobs.is_empty()
        {
            live.apply_jobs.append(&mut jobs);
            if !live.apply_busy {
                live.apply_busy = true;
                self.after(delay, Event::ApplyDone { node: id, life });
            }
        }
        if let Some(live) = self.live(id, life) {
            for path in effects.discard {
                live.bodies.remove(&path);
            }
        }
        for (RequestId(request), Refusal::TooMany) in effects.refused {
            self.refused.push(request);
            self.end_operation(id, request);
        }
        for (token, _) in effects.reads {
            self.read_done(id, token)?;
        }
        Ok(())
    }

    fn queue_log(
        &mut self,
        id: u64,
        life: u64,
        persist: Vec<(u64, muster_node::log::Batch)>,
        fetches: Vec<node_consensus::Fetch>,
        compact: Option<u64>,
    ) {
        let mut jobs: Vec<_> =
            persist.into_iter().map(|(number, batch)| LogJob::Write(number, batch)).collect();
        jobs.extend(fetches.into_iter().map(LogJob::Fetch));
        jobs.extend(compact.map(LogJob::Compact));
        if jobs.is_empty() {
            return;
        }
        let slow = !self.calm && self.rng.chance(self.plan.slow_disk);
        let delay = if slow { self.rng.range(5_000, 300_000) } else { self.rng.range(80, 1_500) };
        let Some(live) = self.live(id, life) else { return };
        live.log_jobs.append(&mut jobs);
        if !live.log_busy {
            live.log_busy = true;
            self.after(delay, Event::LogDone { node: id, life });
        }
    }

    fn send_snapshot(&mut self, id: u64, life: u64, message: &Message) {
        let to = message.to;
        let delays = self.network.delays(&mut self.rng, &self.plan, id, to);
        let receiver = self.node(to).life;
        let body =
            self.live(id, life).and_then(|live| live.built.as_ref()).and_then(|(at, body)| {
                (message.snapshot == Some(*at)).then(|| Bytes::from(body.clone()))
            });
        let arrived = body.is_some() && !delays.is_empty();
        let mut bytes = BytesMut::new();
        message.encode(&mut bytes);
        let bytes = bytes.freeze();
        let mut last = 1_000;
        for delay in delays {
            last = last.max(delay);
            if body.is_some() {
                let deliver =
                    Event::Deliver { to, life: receiver, bytes: bytes.clone(), body: body.clone() };
                self.after(delay, deliver);
            }
        }
        self.after(last, Event::SnapshotReport { node: id, life, peer: to, arrived });
    }

    fn client(&mut self, client: usize) -> Result<(), Violation> {
        if self.clients[client].operating.is_some() || (self.calm && self.served) {
            return Ok(());
        }
        let node = self.any_member();
        let kind = if self.rng.chance(500) { Kind::Put } else { Kind::Read };
        let key = self.rng.range(0, self.plan.keys);
        if self.node(node).live.is_none() {
            self.next_operation(client);
            return Ok(());
        }
        let id = self.next_id;
        self.next_id += 1;
        let floor = match kind {
            Kind::Put => self.invariants.clients.put_floor(),
            Kind::Read => self.invariants.clients.read_floor(key),
        };
        let command = put_command(id, key, &mut self.rng);
        self.clients[client].operating = Some(Operating { key, id, floor, node });
        self.after(CLIENT_TIMEOUT, Event::ClientTimeout { client, id });
        let life = self.node(node).life;
        let Some(live) = self.live(node, life) else { return Ok(()) };
        match kind {
            Kind::Put => live.driver.propose([Proposal { id: RequestId(id), data: command }]),
            Kind::Read => live.driver.read([id]),
        }
        if self.paused(node).is_some() {
            return Ok(());
        }
        self.advance(node)
    }

    /// The client has had its answer, or gives up.
    fn next_operation(&mut self, client: usize) {
        self.clients[client].operating = None;
        let delay = self.rng.range(500, 30_000);
        self.after(delay, Event::Client { client });
    }

    fn operation(&self, node: u64, id: u64) -> Option<(usize, Operating)> {
        self.clients.iter().enumerate().find_map(|(client, state)| {
            let operating = state.operating?;
            (operating.id == id && operating.node == node).then_some((client, operating))
        })
    }

    fn end_operation(&mut self, node: u64, id: u64) {
        if let Some((client, _)) = self.operation(node, id) {
            self.next_operation(client);
        }
    }

    fn put_done(&mut self, node: u64, id: u64, revision: i64) -> Result<(), Violation> {
        let Some((client, operating)) = self.operation(node, id) else { return Ok(()) };
        self.invariants.clients.put(id, operating.key, operating.floor, revision)?;
        self.invariants.acks.acknowledged(id, revision);
        self.report.puts += 1;
        self.served = self.calm;
        self.next_operation(client);
        Ok(())
    }

    fn read_done(&mut self, node: u64, token: ReadToken) -> Result<(), Violation> {
        let Some((client, operating)) = self.operation(node, token) else { return Ok(()) };
        let life = self.node(node).life;
        let Some(live) = self.live(node, life) else { return Ok(()) };
        let found = match read_key(&live.store, operating.key) {
            Ok(found) => found,
            Err(_) if self.node(node).disk.is_off() => {
                self.next_operation(client);
                return Ok(());
            }
            Err(why) => return Err(Violation::new("values stay as they were put", why)),
        };
        self.trace(&[token, found.map_or(0, |(put, _)| put)]);
        self.invariants.clients.read(operating.key, operating.floor, found)?;
        self.report.reads += 1;
        self.next_operation(client);
        Ok(())
    }

    fn end_faults(&mut self) -> Result<(), Violation> {
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
    fn is_settled(&self) -> bool {
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

    fn describe(&self) -> String {
        let mut text = format!("served {}", self.served);
        for node in &self.nodes {
            let status = node.live.as_ref().map(|live| live.driver.status());
            text = format!("{text}; {}: {status:?}", node.id);
        }
        text
    }

    fn finish(mut self) -> Result<Report, Violation> {
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
