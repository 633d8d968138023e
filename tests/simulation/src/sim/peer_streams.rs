//! Streams between members, as the transport reports them, and the snapshots that are sent beside
//! the messages. A stream connects some time after its two ends can reach each other. It breaks
//! some time after they can no longer reach each other.

use std::path::{Path, PathBuf};

use bytes::{Bytes, BytesMut};
use node_engine::driver::{
    IncomingSnapshot, Message, Notice, accepts_removal_report, is_snapshot_wanted,
};
use node_engine::witness::{ClaimRejection, Promise};
use node_state::identity::MemberId;
use node_state::membership::{Census, Neighbour};
use node_state::mvcc::View;

use super::InvariantViolation;
use super::node::{ConnectedStream, process_run};
use super::simulation::{ScheduledEvent, Simulation, index_of};

/// A snapshot under way: its body, and the machine and process that sent it.
#[derive(Clone, Debug)]
pub(super) struct Transfer {
    pub from: u64,
    pub from_generation: u64,
    pub body: Bytes,
}

/// Reason why a member refuses a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamRefusalReason {
    /// The other process's member was removed.
    Removed,
    /// The other process claims to be a member, but has lost what that member promised.
    Disowned,
    /// The other process's member isn't known, or an earlier process of that member still runs. The
    /// other process may try again.
    Unknown,
}

impl Simulation {
    /// Maintains a member's streams: ends obsolete ones and tries to connect missing ones.
    pub(super) fn maintain_streams(
        &mut self,
        id: u64,
        generation: u64,
    ) -> Result<(), InvariantViolation> {
        let Some(process) = self.running_process(id, generation) else { return Ok(()) };
        let streams = process.connected.clone();
        let delay = self.rng.range(10_000, 50_000);
        self.schedule(delay, ScheduledEvent::MaintainStreams { node: id, generation });
        if self.remaining_pause(id).is_some() {
            return Ok(());
        }
        self.maintain_witness(id)?;
        let own = self.node(id).member;
        let neighbours = self.nodes[index_of(id)].neighbours();
        for peer in streams.keys().filter(|peer| neighbours.iter().all(|one| one.id.0 != **peer)) {
            self.set_stream(id, *peer, None)?;
        }
        for peer in neighbours {
            let target = self
                .nodes
                .iter()
                .find(|node| node.process.is_some() && peer.urls.contains(&node.url));
            let target = target.filter(|target| {
                !self.network.is_cut(id, target.id) && !self.network.is_cut(target.id, id)
            });
            let is_paused = target.is_some_and(|target| target.paused_until > self.now);
            let is_connected = streams.get(&peer.id.0).is_some_and(|stream| {
                target.is_some_and(|target| {
                    (target.id, target.generation) == (stream.machine, stream.generation)
                })
            });
            if is_paused && is_connected {
                // The paused peer's kernel accepts the messages, and the peer reads them after the
                // pause.
                continue;
            }
            let target = target.map(|node| node.id).filter(|_| !is_paused);
            if let Some(target) = target {
                self.connect_stream(id, target, peer.id.0)?;
                let (here, other) = (&self.nodes[index_of(id)], &self.nodes[index_of(target)]);
                let has_own_address =
                    |one: &Neighbour| one.id.0 == own && one.urls.contains(&here.url);
                if other.neighbours().iter().any(has_own_address) {
                    self.connect_stream(target, id, own)?;
                }
            } else if self.rng.chance(500) {
                self.set_stream(id, peer.id.0, None)?;
            }
        }
        self.publish_and_promote(id, generation)
    }

    /// Connects a process to the machine `target`, on which it expects member `peer`.
    fn connect_stream(
        &mut self,
        id: u64,
        target: u64,
        peer: u64,
    ) -> Result<(), InvariantViolation> {
        let (generation, other) = (self.node(id).generation, &self.nodes[index_of(target)]);
        if other.member != peer || self.nodes[index_of(id)].process.is_none() {
            return self.set_stream(id, peer, None);
        }
        let stream =
            ConnectedStream { machine: target, generation: other.generation, since: self.now };
        // A refusal by `target` counts only if this process would accept a stream from `target`.
        if self.admit_stream(id, target).is_err() {
            return self.set_stream(id, peer, None);
        }
        match self.admit_stream(target, id) {
            Ok(()) => {
                self.set_stream(id, peer, Some(stream))?;
                self.send_reports(id, target);
                self.check_no_quorum_after_amnesia(id)
            }
            Err(reason) => {
                self.set_stream(id, peer, None)?;
                let table = self.nodes[index_of(id)].store_view();
                let is_own = |view: &View| view.members().member(MemberId(peer)).is_some();
                // A refusal counts only if this process's own member table contains the peer.
                match reason {
                    _ if !table.is_some_and(|view| is_own(&view)) => {}
                    StreamRefusalReason::Removed if !self.would_accept_removal_report(id, peer) => {
                    }
                    StreamRefusalReason::Removed => {
                        let delay = self.rng.range(100, 20_000);
                        self.schedule(
                            delay,
                            ScheduledEvent::RemovalReported { node: id, generation },
                        );
                    }
                    StreamRefusalReason::Disowned => {
                        self.check_refusal_is_justified(id, peer)?;
                        return self.record_permanent_refusal(id, generation, peer);
                    }
                    StreamRefusalReason::Unknown => {}
                }
                Ok(())
            }
        }
    }

    /// Returns whether member `id` ends because `peer` reports its removal, by the rule of the
    /// production code.
    fn would_accept_removal_report(&self, id: u64, peer: u64) -> bool {
        self.nodes[index_of(id)].process.as_ref().is_none_or(|process| {
            let driver = process.core.driver();
            accepts_removal_report(peer, driver.members(), driver.may_be_only_one_to_know_removal())
        })
    }

    /// Returns whether the process on machine `at` accepts a stream from machine `id`. The process
    /// decides by its member table, and by the promises of peers that it remembers.
    pub(super) fn admit_stream(&mut self, at: u64, id: u64) -> Result<(), StreamRefusalReason> {
        let guards = self.options.guards;
        let from = &self.nodes[index_of(id)];
        let (member, claim) = (MemberId(from.member), from.process_claim());
        let Some(process) = &self.nodes[index_of(at)].process else {
            return Err(StreamRefusalReason::Unknown);
        };
        let view = process.store.view();
        if view.members().is_removed(member) {
            return Err(StreamRefusalReason::Removed);
        }
        let neighbours = self.nodes[index_of(at)].neighbours();
        let record =
            neighbours.iter().find(|one| one.id == member).ok_or(StreamRefusalReason::Unknown)?;
        let is_bound = record.incarnation.is_none_or(|bound| bound == claim.incarnation);
        if !is_bound && guards.same_incarnation() {
            return Err(StreamRefusalReason::Disowned);
        }
        // When another process wants to replace a member's connected process, production sees from
        // its answers that the connected process is alive. Here the simulation looks at the process
        // itself.
        let before = process.connected.get(&member.0).filter(|stream| {
            let before = &self.nodes[index_of(stream.machine)];
            stream.machine != id
                && before.generation == stream.generation
                && before.process.is_some()
        });
        let is_beside = before.is_some();
        let node = self.node(at);
        let Some(process) = &mut node.process else { return Err(StreamRefusalReason::Unknown) };
        let admitted = match process.witness.is_new(member, &claim) {
            Ok(true) if is_beside => return Err(StreamRefusalReason::Unknown),
            _ => process.witness.admit(member, &claim),
        };
        node.write_witness();
        match admitted {
            Ok(()) => Ok(()),
            Err(ClaimRejection::Incarnation) if !guards.same_incarnation() => Ok(()),
            Err(ClaimRejection::Boot | ClaimRejection::Amnesia) if !guards.refuse_old_images() => {
                Ok(())
            }
            Err(_) => Err(StreamRefusalReason::Disowned),
        }
    }

    /// Sends a peer the remembered promises of all members, this member's own promises, and its
    /// member table.
    fn send_reports(&mut self, id: u64, target: u64) {
        let node = &self.nodes[index_of(id)];
        let Some(process) = &node.process else { return };
        let promised = process.core.driver().promised();
        let by = MemberId(node.member);
        let report = process.witness.report(by, &process.claim, promised);
        let own_urls = vec![node.url.clone()];
        let census = Census { own_urls, ..Census::from(process.store.view().members()) };
        let neighbours = self.nodes[index_of(target)].neighbours();
        let uses_censuses = self.options.censuses;
        let Some(process) = &mut self.node(target).process else { return };
        let is_peer = |member, _| neighbours.iter().any(|one| one.id == member);
        process
            .witness
            .merge_report(&report, is_peer)
            .expect("a member can read what another one tells");
        if uses_censuses {
            process.censuses.record(by, census);
        }
    }

    /// Records the promise in a message that has arrived. A vote is written to disk before it may
    /// be counted.
    pub(super) fn record_promise(&mut self, to: u64, message: &Message) {
        let Some(promise) = Promise::of(message) else { return };
        let node = self.node(to);
        let Some(process) = &mut node.process else { return };
        let status = process.core.driver().status();
        let promise = promise.with_commit(status.term, status.commit);
        process.witness.record_promise(MemberId(message.from), promise);
        if process.witness.urgent() > process.witness_written {
            node.write_witness();
        }
    }

    /// Writes remembered promises now and then. Ends streams to processes that turned out to be
    /// copies of a member.
    fn maintain_witness(&mut self, id: u64) -> Result<(), InvariantViolation> {
        let guards = self.options.guards;
        let writes = self.rng.chance(100);
        let node = self.node(id);
        let Some(process) = &mut node.process else { return Ok(()) };
        let view = process.store.view();
        process.witness.forget(|member| view.members().is_removed(member));
        let is_recognised_copy = |(peer, stream): &(&u64, &ConnectedStream)| {
            process
                .witness
                .is_refused_now(MemberId(**peer), process_run(stream.machine, stream.generation))
        };
        let recognised_copies: Vec<u64> =
            process.connected.iter().filter(is_recognised_copy).map(|(peer, _)| *peer).collect();
        if writes {
            node.write_witness();
        }
        if guards.same_incarnation() && guards.refuse_old_images() {
            for peer in recognised_copies {
                self.set_stream(id, peer, None)?;
            }
        }
        Ok(())
    }

    /// Checks a process that has lost its member's promises: no quorum may accept it as that
    /// member.
    fn check_no_quorum_after_amnesia(&self, id: u64) -> Result<(), InvariantViolation> {
        let node = &self.nodes[index_of(id)];
        let Some(process) = node.process.as_ref().filter(|_| node.has_lost_promises) else {
            return Ok(());
        };
        let voters = self.latest_table().voters_and_learners().voters;
        let accepting = voters.iter().filter(|voter| process.connected.contains_key(voter)).count();
        if !voters.contains(&node.member) || accepting < voters.len() / 2 {
            return Ok(());
        }
        let what = format!("{accepting} of {voters:?} take {id} for {}", node.member);
        Err(InvariantViolation::new("members without their promises never act", what))
    }

    /// Checks that a peer refuses a process as its member only if that member has lost its promises
    /// on some machine.
    fn check_refusal_is_justified(&self, id: u64, by: u64) -> Result<(), InvariantViolation> {
        let member = self.nodes[index_of(id)].member;
        if self.nodes.iter().any(|node| node.member == member && node.has_lost_promises) {
            return Ok(());
        }
        let what = format!("{by} doesn't take {id} for {member}");
        Err(InvariantViolation::new("intact members are accepted as themselves", what))
    }

    /// Records that a peer will never accept this process as its member. The process ends once too
    /// few peers for a quorum are left.
    fn record_permanent_refusal(
        &mut self,
        id: u64,
        generation: u64,
        by: u64,
    ) -> Result<(), InvariantViolation> {
        let Some(process) = self.running_process(id, generation) else { return Ok(()) };
        process.disowned_by.insert(by);
        let view = process.store.view();
        let peers = view.members().members().count() - 1;
        let quorum = peers.div_ceil(2) + 1;
        if process.disowned_by.len() >= quorum.min(peers) {
            self.report.disowned += 1;
            let node = self.node(id);
            (node.has_lost_promises, node.has_ended_for_good) = (true, true);
            self.end_process(id, true);
        }
        Ok(())
    }

    /// Connects a member's stream to a peer's process, or disconnects it.
    pub(super) fn set_stream(
        &mut self,
        id: u64,
        peer: u64,
        new_stream: Option<ConnectedStream>,
    ) -> Result<(), InvariantViolation> {
        let Some(process) = &self.node(id).process else { return Ok(()) };
        let before = process.connected.get(&peer).map(|stream| (stream.machine, stream.generation));
        if before == new_stream.map(|stream| (stream.machine, stream.generation)) {
            return Ok(());
        }
        let reports_end =
            new_stream.is_none() && before.is_some_and(|process| self.reports_process_end(process));
        let Some(process) = &mut self.node(id).process else { return Ok(()) };
        if before.is_some() {
            process.connected.remove(&peer);
            process.mail.notice(Notice::Disconnected(peer));
        }
        if reports_end {
            process.mail.notice(Notice::ProcessEnded(peer));
        }
        if let Some(stream) = new_stream {
            process.connected.insert(peer, stream);
            process.mail.notice(Notice::Connected(peer));
        }
        self.wake(id)
    }

    /// Draws whether the loss of a stream to this process (machine and generation) is reported as
    /// the end of the process.
    fn reports_process_end(&mut self, (machine, generation): (u64, u64)) -> bool {
        let wrong_chance = self.plan.wrong_process_ends;
        if wrong_chance == 0 {
            return false;
        }
        let has_ended = self.running_process(machine, generation).is_none();
        let reports = self.report_rng.chance(if has_ended { 800 } else { wrong_chance });
        self.report.process_ends += u64::from(reports && has_ended);
        self.report.wrong_process_ends += u64::from(reports && !has_ended);
        reports
    }

    pub(super) fn send_snapshot(
        &mut self,
        id: u64,
        generation: u64,
        message: &Message,
        body: Bytes,
    ) {
        let to = message.to;
        let stream = self
            .running_process(id, generation)
            .and_then(|process| process.connected.get(&to).copied());
        let delay = stream.and_then(|stream| {
            self.network.delays(&mut self.rng, &self.plan, id, stream.machine).first().copied()
        });
        let (Some(delay), Some(stream)) = (delay, stream) else {
            self.schedule(
                1_000,
                ScheduledEvent::SnapshotReport { node: id, generation, peer: to, arrived: false },
            );
            return;
        };
        let mut bytes = BytesMut::new();
        message.encode(&mut bytes);
        let transfer = Transfer { from: id, from_generation: generation, body };
        let (to, generation, body) = (stream.machine, stream.generation, Some(transfer));
        let event = ScheduledEvent::Deliver { to, generation, bytes: bytes.freeze(), body };
        self.schedule(delay, event);
    }

    /// Receives a snapshot with its body. Production first asks whether the snapshot is wanted. The
    /// simulation always sends the body, even if the snapshot isn't wanted.
    pub(super) fn receive_snapshot(
        &mut self,
        to: u64,
        generation: u64,
        message: Message,
        transfer: Transfer,
    ) -> Result<(), InvariantViolation> {
        self.bodies += 1;
        let path = PathBuf::from(format!("/incoming/{}", self.bodies));
        let Transfer { from, from_generation, body } = transfer;
        let peer = self.node(to).member;
        let failed = ScheduledEvent::SnapshotReport {
            node: from,
            generation: from_generation,
            peer,
            arrived: false,
        };
        let Some(process) = self.running_process(to, generation) else {
            self.schedule(1_000, failed);
            return Ok(());
        };
        let status = process.core.driver().status();
        if !is_snapshot_wanted(message.from, &message, status.term, status.commit) {
            self.schedule(1_000, failed);
            return Ok(());
        }
        process.bodies.put(path.clone(), body);
        process.transfers.insert(path.clone(), (from, from_generation));
        process.mail.notice(Notice::Snapshot(IncomingSnapshot { message, body: path }));
        self.wake(to)
    }

    /// Reports to the sender whether a received snapshot was installed.
    pub(super) fn report_transfer(&mut self, id: u64, body: &Path, installed: bool) {
        let Some(process) = &mut self.node(id).process else { return };
        let Some((node, generation)) = process.transfers.remove(body) else { return };
        let delay = self.rng.range(200, 2_000);
        let arrived = installed && !self.network.is_cut(id, node);
        let peer = self.node(id).member;
        self.schedule(delay, ScheduledEvent::SnapshotReport { node, generation, peer, arrived });
    }

    /// Breaks off all snapshot transfers to a process, because the process ends.
    pub(super) fn abort_transfers(&mut self, id: u64) {
        let transfers =
            self.node(id).process.as_mut().map(|process| std::mem::take(&mut process.transfers));
        for (_, (node, generation)) in transfers.into_iter().flatten() {
            let delay = self.rng.range(1_000, 50_000);
            let peer = self.node(id).member;
            self.schedule(
                delay,
                ScheduledEvent::SnapshotReport { node, generation, peer, arrived: false },
            );
        }
    }
}
