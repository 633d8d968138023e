//! What members do: a step of one of them, and what follows from it.

use bytes::{Bytes, BytesMut};
use muster_node::driver::{
    Effects, IncomingSnapshot, LogJob, Message, Notice, run_fetch, run_group,
};
use muster_node::machine::RequestId;
use muster_node::mvcc::CompactionProgress;
use node_consensus::Fetch;

use super::Violation;
use super::invariants::log_matching::hash;
use super::node::{ApplyJob, JobDone, Live};
use super::world::{Event, World};

fn written(job: &LogJob) -> Option<&muster_node::log::Batch> {
    match job {
        LogJob::Write(_, batch) => Some(batch),
        LogJob::Compact(_) => None,
    }
}

impl World {
    pub(super) fn live(&mut self, id: u64, life: u64) -> Option<&mut Live> {
        let node = self.node(id);
        if node.life == life { node.live.as_mut() } else { None }
    }

    /// Whether the member is paused; then the event comes again when it wakes.
    pub(super) fn paused(&mut self, id: u64) -> Option<u64> {
        let now = self.now;
        let until = self.node(id).paused_until;
        (until > now).then(|| until - now)
    }

    pub(super) fn tick(&mut self, id: u64, life: u64) -> Result<(), Violation> {
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

    pub(super) fn deliver(
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

    pub(super) fn notice(&mut self, id: u64, life: u64, notice: Notice) -> Result<(), Violation> {
        let Some(live) = self.live(id, life) else { return Ok(()) };
        live.driver.notice(notice);
        self.advance(id)
    }

    pub(super) fn log_done(&mut self, id: u64, life: u64) -> Result<(), Violation> {
        if let Some(wait) = self.paused(id) {
            self.after(wait, Event::LogDone { node: id, life });
            return Ok(());
        }
        let prepare = self.rng.chance(100);
        let Some(live) = self.live(id, life) else { return Ok(()) };
        let Some(jobs) = live.log_group.take() else { return Ok(()) };
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
                self.begin_group(id, life);
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

    pub(super) fn apply_done(&mut self, id: u64, life: u64) -> Result<(), Violation> {
        if let Some(wait) = self.paused(id) {
            self.after(wait, Event::ApplyDone { node: id, life });
            return Ok(());
        }
        let Some(live) = self.live(id, life) else { return Ok(()) };
        let mut done = JobDone::default();
        let result = live.apply_one(&mut done);
        let writes = live.snapshot.is_some() && !live.snapshot_busy;
        live.snapshot_busy |= writes;
        if live.apply_jobs.is_empty() {
            live.apply_busy = false;
        } else {
            self.after(100, Event::ApplyDone { node: id, life });
        }
        if writes {
            let delay = self.rng.range(100, 60_000);
            self.after(delay, Event::SnapshotWritten { node: id, life });
        }
        let down = result.err().map(|error| self.node(id).down(&*error));
        // Also what was applied before the checkpoint behind it failed: it may be durable.
        for entry in &done.applied {
            self.invariants.machines.observe(id, entry)?;
            self.invariants.stores.model.apply(entry);
        }
        match down {
            None => self.applied(id, life, done),
            Some(down) => self.went_down(id, down),
        }
    }

    /// Old entries are read beside the log's writer, and may be gone by then.
    pub(super) fn fetch(&mut self, id: u64, life: u64, fetch: Fetch) -> Result<(), Violation> {
        if let Some(wait) = self.paused(id) {
            self.after(wait, Event::Fetch { node: id, life, fetch });
            return Ok(());
        }
        let Some(live) = self.live(id, life) else { return Ok(()) };
        match run_fetch(&live.reader, fetch) {
            Ok(notice) => self.notice(id, life, notice),
            Err(error) => {
                let down = self.node(id).down(&error);
                self.went_down(id, down)
            }
        }
    }

    /// A snapshot is written while the machine goes on.
    pub(super) fn snapshot_written(&mut self, id: u64, life: u64) -> Result<(), Violation> {
        if let Some(wait) = self.paused(id) {
            self.after(wait, Event::SnapshotWritten { node: id, life });
            return Ok(());
        }
        let Some(live) = self.live(id, life) else { return Ok(()) };
        match live.write_snapshot() {
            Ok(notice) => self.notice(id, life, notice),
            Err(error) => {
                let down = self.node(id).down(&error);
                self.went_down(id, down)
            }
        }
    }

    pub(super) fn applied(&mut self, id: u64, life: u64, done: JobDone) -> Result<(), Violation> {
        for (RequestId(request), outcome) in &done.outcomes {
            self.outcome(id, *request, outcome)?;
        }
        self.wake_hub(id);
        for notice in done.notices {
            if matches!(notice, Notice::Installed { .. }) {
                self.report.snapshots += 1;
                self.check_store(id, false)?;
            }
            let delay = self.rng.range(100, 30_000);
            self.after(delay, Event::CompactStep { node: id, life });
            let Some(live) = self.live(id, life) else { return Ok(()) };
            live.driver.notice(notice);
        }
        self.advance(id)
    }

    /// A piece of the store's compaction, if one is under way.
    pub(super) fn compact_step(&mut self, id: u64, life: u64) -> Result<(), Violation> {
        let Some(live) = self.live(id, life) else { return Ok(()) };
        let before = *live.store.finished_compactions().borrow();
        match live.store.compact_step() {
            Ok(progress) => {
                let finished = *live.store.finished_compactions().borrow() > before;
                self.report.compactions += u64::from(finished);
                if progress == CompactionProgress::More {
                    let delay = self.rng.range(100, 20_000);
                    self.after(delay, Event::CompactStep { node: id, life });
                }
                Ok(())
            }
            Err(error) => {
                let down = self.node(id).down(&error);
                self.went_down(id, down)
            }
        }
    }

    /// Everything that follows from what a member was given, then the invariants.
    pub(super) fn advance(&mut self, id: u64) -> Result<(), Violation> {
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
        let seat = &mut self.leaders[usize::try_from(id - 1).expect("few")];
        if *seat != (status.leader, status.term) {
            *seat = (status.leader, status.term);
            self.led_since = self.now;
        }
        let invariants = &mut self.invariants;
        invariants.elections.observe(id, &status)?;
        invariants.monotone.observe(id, life, &status)?;
        let term_at = |index| live.driver.term_at(index);
        invariants.leaders.observe(id, &status, &invariants.machines, term_at)
    }

    pub(super) fn execute(
        &mut self,
        id: u64,
        life: u64,
        effects: Effects,
    ) -> Result<(), Violation> {
        self.aim(id, &effects);
        for message in &effects.send {
            if message.from != id {
                let what = format!("{id} sends {message:?}");
                return Err(Violation::new("a member speaks for itself", what));
            }
            self.invariants.sent(message)?;
            let mut bytes = BytesMut::new();
            message.encode(&mut bytes);
            let bytes = bytes.freeze();
            if !self.has_machine(message.to) {
                continue;
            }
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
        self.queue_log(id, life, effects.persist, effects.compact);
        for fetch in effects.fetches {
            let delay = self.rng.range(50, 5_000);
            self.after(delay, Event::Fetch { node: id, life, fetch });
        }
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
        for (RequestId(request), _) in effects.refused {
            self.was_refused(id, request);
        }
        for (token, _) in effects.reads {
            self.read_done(id, token)?;
        }
        Ok(())
    }

    pub(super) fn queue_log(
        &mut self,
        id: u64,
        life: u64,
        persist: Vec<(u64, muster_node::log::Batch)>,
        compact: Option<u64>,
    ) {
        let mut jobs: Vec<_> =
            persist.into_iter().map(|(number, batch)| LogJob::Write(number, batch)).collect();
        jobs.extend(compact.map(LogJob::Compact));
        if jobs.is_empty() {
            return;
        }
        let Some(live) = self.live(id, life) else { return };
        let conflicts = live.note_log(jobs.iter().filter_map(written));
        live.log_jobs.append(&mut jobs);
        self.report.conflicts += conflicts;
        self.begin_group(id, life);
    }

    /// The log takes what waits for it as one group, unless it is still writing the last one.
    fn begin_group(&mut self, id: u64, life: u64) {
        let Some(live) = self.live(id, life) else { return };
        if live.log_group.is_some() || live.log_jobs.is_empty() {
            return;
        }
        live.log_group = Some(std::mem::take(&mut live.log_jobs));
        let slow = !self.calm && self.rng.chance(self.plan.slow_disk);
        let delay = if slow { self.rng.range(5_000, 300_000) } else { self.rng.range(100, 3_000) };
        self.after(delay, Event::LogDone { node: id, life });
        if !self.calm && self.rng.chance(self.plan.crash_in_write) {
            self.after(delay / 2, Event::CutWrite { node: id, life });
        }
    }

    pub(super) fn send_snapshot(&mut self, id: u64, life: u64, message: &Message) {
        let to = message.to;
        if !self.has_machine(to) {
            self.after(1_000, Event::SnapshotReport { node: id, life, peer: to, arrived: false });
            return;
        }
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
}
