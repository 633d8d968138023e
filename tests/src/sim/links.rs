//! Streams between members, as the transport reports them, and the snapshots sent beside the messages. A
//! stream connects some time after both ends can reach each other. It breaks some time after they can't.

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
use super::node::{ConnectedStream, run_of};
use super::world::{ScheduledEvent, Simulation, index_of};

/// A snapshot under way: its body, and the machine and process that sent it.
#[derive(Clone, Debug)]
pub(super) struct Transfer {
    pub from: u64,
    pub from_life: u64,
    pub body: Bytes,
}

/// Reason why a member refuses a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamRefusalReason {
    /// The other member was removed.
    Removed,
    /// The other process isn't the member that it claims to be: it has lost what that member promised.
    Disowned,
    /// The other member isn't known, or its earlier process still lives. It may try again.
    Unknown,
}

impl Simulation {
    /// Maintains a member's streams: ends obsolete ones and tries to connect missing ones.
    pub(super) fn dial(&mut self, id: u64, life: u64) -> Result<(), InvariantViolation> {
        let Some(live) = self.live(id, life) else { return Ok(()) };
        let links = live.connected.clone();
        let delay = self.rng.range(10_000, 50_000);
        self.schedule(delay, ScheduledEvent::MaintainStreams { node: id, life });
        if self.paused(id).is_some() {
            return Ok(());
        }
        self.look_after_witness(id)?;
        let own = self.node(id).member;
        let neighbours = self.nodes[index_of(id)].neighbours();
        for peer in links.keys().filter(|peer| neighbours.iter().all(|one| one.id.0 != **peer)) {
            self.set_stream(id, *peer, None)?;
        }
        for peer in neighbours {
            let there = self
                .nodes
                .iter()
                .find(|node| node.process.is_some() && peer.urls.contains(&node.url));
            let there = there.filter(|there| {
                !self.network.is_cut(id, there.id) && !self.network.is_cut(there.id, id)
            });
            let is_paused = there.is_some_and(|there| there.paused_until > self.now);
            let stands = links.get(&peer.id.0).is_some_and(|link| {
                there.is_some_and(|there| (there.id, there.life) == (link.machine, link.life))
            });
            if is_paused && stands {
                // The peer's kernel accepts what is sent, and the peer reads it after its pause.
                continue;
            }
            let there = there.map(|node| node.id).filter(|_| !is_paused);
            if let Some(there) = there {
                self.meet(id, there, peer.id.0)?;
                let (here, other) = (&self.nodes[index_of(id)], &self.nodes[index_of(there)]);
                let at_home = |one: &Neighbour| one.id.0 == own && one.urls.contains(&here.url);
                if other.neighbours().iter().any(at_home) {
                    self.meet(there, id, own)?;
                }
            } else if self.rng.chance(500) {
                self.set_stream(id, peer.id.0, None)?;
            }
        }
        self.housekeeping(id, life)
    }

    /// Connects a process to the machine `there`, which it takes for `peer`.
    fn meet(&mut self, id: u64, there: u64, peer: u64) -> Result<(), InvariantViolation> {
        let (life, other) = (self.node(id).life, &self.nodes[index_of(there)]);
        if other.member != peer || self.nodes[index_of(id)].process.is_none() {
            return self.set_stream(id, peer, None);
        }
        let link = ConnectedStream { machine: there, life: other.life, since: self.now };
        // A refusal counts only if this process would accept a stream from the other one.
        if self.admits(id, there).is_err() {
            return self.set_stream(id, peer, None);
        }
        match self.admits(there, id) {
            Ok(()) => {
                self.set_stream(id, peer, Some(link))?;
                self.tell(id, there);
                self.check_forgotten(id)
            }
            Err(refused) => {
                self.set_stream(id, peer, None)?;
                let table = self.nodes[index_of(id)].store_view();
                let is_own = |view: &View| view.members().member(MemberId(peer)).is_some();
                // A process that only other members name as a member can't decide this.
                match refused {
                    _ if !table.is_some_and(|view| is_own(&view)) => {}
                    StreamRefusalReason::Removed if !self.ends_at_word_of(id, peer) => {}
                    StreamRefusalReason::Removed => {
                        let delay = self.rng.range(100, 20_000);
                        self.schedule(delay, ScheduledEvent::RemovalReported { node: id, life });
                    }
                    StreamRefusalReason::Disowned => {
                        self.check_is_lost(id, peer)?;
                        return self.disowned(id, life, peer);
                    }
                    StreamRefusalReason::Unknown => {}
                }
                Ok(())
            }
        }
    }

    /// Returns whether a member ends when `peer` says that it was removed, by the production rule.
    fn ends_at_word_of(&self, id: u64, peer: u64) -> bool {
        self.nodes[index_of(id)].process.as_ref().is_none_or(|live| {
            let driver = live.core.driver();
            accepts_removal_report(peer, driver.members(), driver.may_be_only_one_to_know_removal())
        })
    }

    /// Returns whether the process on `at` accepts a stream from machine `id`. It decides by its member
    /// table and by what it remembers of its peers' promises.
    pub(super) fn admits(&mut self, at: u64, id: u64) -> Result<(), StreamRefusalReason> {
        let guards = self.options.guards;
        let from = &self.nodes[index_of(id)];
        let (member, shown) = (MemberId(from.member), from.appearance());
        let Some(live) = &self.nodes[index_of(at)].process else {
            return Err(StreamRefusalReason::Unknown);
        };
        let view = live.store.view();
        if view.members().is_removed(member) {
            return Err(StreamRefusalReason::Removed);
        }
        let neighbours = self.nodes[index_of(at)].neighbours();
        let record =
            neighbours.iter().find(|one| one.id == member).ok_or(StreamRefusalReason::Unknown)?;
        let is_bound = record.incarnation.is_none_or(|bound| bound == shown.incarnation);
        if !is_bound && guards.same_incarnation() {
            return Err(StreamRefusalReason::Disowned);
        }
        // In production, the answers of a process show whether it is alive when another one wants to
        // replace it.
        let before = live.connected.get(&member.0).filter(|link| {
            let before = &self.nodes[index_of(link.machine)];
            link.machine != id && before.life == link.life && before.process.is_some()
        });
        let is_beside = before.is_some();
        let node = self.node(at);
        let Some(live) = &mut node.process else { return Err(StreamRefusalReason::Unknown) };
        let admitted = match live.witness.is_new(member, &shown) {
            Ok(true) if is_beside => return Err(StreamRefusalReason::Unknown),
            _ => live.witness.admit(member, &shown),
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

    /// Sends a peer this process's knowledge: what it remembers of all promises, what it has promised
    /// itself, and its member table.
    fn tell(&mut self, id: u64, there: u64) {
        let node = &self.nodes[index_of(id)];
        let Some(live) = &node.process else { return };
        let promised = live.core.driver().promised();
        let by = MemberId(node.member);
        let report = live.witness.report(by, &live.appearance, promised);
        let own_urls = vec![node.url.clone()];
        let census = Census { own_urls, ..Census::from(live.store.view().members()) };
        let neighbours = self.nodes[index_of(there)].neighbours();
        let counts = self.options.censuses;
        let Some(live) = &mut self.node(there).process else { return };
        let is_peer = |member, _| neighbours.iter().any(|one| one.id == member);
        live.witness
            .merge_report(&report, is_peer)
            .expect("a member can read what another one tells");
        if counts {
            live.censuses.record(by, census);
        }
    }

    /// Records what an arrived message promises. A vote is written before it may count.
    pub(super) fn note_promise(&mut self, to: u64, message: &Message) {
        let Some(promise) = Promise::of(message) else { return };
        let node = self.node(to);
        let Some(live) = &mut node.process else { return };
        let status = live.core.driver().status();
        let promise = promise.with_commit(status.term, status.commit);
        live.witness.record_promise(MemberId(message.from), promise);
        if live.witness.urgent() > live.witness_written {
            node.write_witness();
        }
    }

    /// Writes remembered promises now and then, and ends streams to processes that have since been
    /// recognised as copies.
    fn look_after_witness(&mut self, id: u64) -> Result<(), InvariantViolation> {
        let guards = self.options.guards;
        let writes = self.rng.chance(100);
        let node = self.node(id);
        let Some(live) = &mut node.process else { return Ok(()) };
        let view = live.store.view();
        live.witness.forget(|member| view.members().is_removed(member));
        let is_found_out = |(peer, link): &(&u64, &ConnectedStream)| {
            live.witness.is_refused_now(MemberId(**peer), run_of(link.machine, link.life))
        };
        let found_out: Vec<u64> =
            live.connected.iter().filter(is_found_out).map(|(peer, _)| *peer).collect();
        if writes {
            node.write_witness();
        }
        if guards.same_incarnation() && guards.refuse_old_images() {
            for peer in found_out {
                self.set_stream(id, peer, None)?;
            }
        }
        Ok(())
    }

    /// Checks that a process which has lost its member's promises has no quorum that accepts it as that
    /// member.
    fn check_forgotten(&self, id: u64) -> Result<(), InvariantViolation> {
        let node = &self.nodes[index_of(id)];
        let Some(live) = node.process.as_ref().filter(|_| node.has_lost_promises) else {
            return Ok(());
        };
        let voters = self.table().voters_and_learners().voters;
        let taken = voters.iter().filter(|voter| live.connected.contains_key(voter)).count();
        if !voters.contains(&node.member) || taken < voters.len() / 2 {
            return Ok(());
        }
        let what = format!("{taken} of {voters:?} take {id} for {}", node.member);
        Err(InvariantViolation::new("who has forgotten doesn't act", what))
    }

    /// Checks that a peer refuses a process as its member only if that member has lost its promises on
    /// some machine.
    fn check_is_lost(&self, id: u64, by: u64) -> Result<(), InvariantViolation> {
        let member = self.nodes[index_of(id)].member;
        if self.nodes.iter().any(|node| node.member == member && node.has_lost_promises) {
            return Ok(());
        }
        let what = format!("{by} doesn't take {id} for {member}");
        Err(InvariantViolation::new("who is well is taken for what it is", what))
    }

    /// Records that a peer will never accept this process as its member. The process ends once too few
    /// peers for a quorum are left.
    fn disowned(&mut self, id: u64, life: u64, by: u64) -> Result<(), InvariantViolation> {
        let Some(live) = self.live(id, life) else { return Ok(()) };
        live.disowned_by.insert(by);
        let view = live.store.view();
        let peers = view.members().members().count() - 1;
        let quorum = peers.div_ceil(2) + 1;
        if live.disowned_by.len() >= quorum.min(peers) {
            self.report.disowned += 1;
            let node = self.node(id);
            (node.has_lost_promises, node.has_ended_for_good) = (true, true);
            self.take_down(id, true);
        }
        Ok(())
    }

    /// Sets the stream of a member to a peer: to this process of it, or to none.
    pub(super) fn set_stream(
        &mut self,
        id: u64,
        peer: u64,
        to: Option<ConnectedStream>,
    ) -> Result<(), InvariantViolation> {
        let Some(live) = &mut self.node(id).process else { return Ok(()) };
        let before = live.connected.get(&peer).map(|link| (link.machine, link.life));
        if before == to.map(|link| (link.machine, link.life)) {
            return Ok(());
        }
        if before.is_some() {
            live.connected.remove(&peer);
            live.mail.notice(Notice::Disconnected(peer));
        }
        if let Some(link) = to {
            live.connected.insert(peer, link);
            live.mail.notice(Notice::Connected(peer));
        }
        self.wake(id)
    }

    pub(super) fn send_snapshot(&mut self, id: u64, life: u64, message: &Message, body: Bytes) {
        let to = message.to;
        let stream = self.live(id, life).and_then(|live| live.connected.get(&to).copied());
        let delay = stream.and_then(|link| {
            self.network.delays(&mut self.rng, &self.plan, id, link.machine).first().copied()
        });
        let (Some(delay), Some(link)) = (delay, stream) else {
            self.schedule(
                1_000,
                ScheduledEvent::SnapshotReport { node: id, life, peer: to, arrived: false },
            );
            return;
        };
        let mut bytes = BytesMut::new();
        message.encode(&mut bytes);
        let transfer = Transfer { from: id, from_life: life, body };
        let (to, life, body) = (link.machine, link.life, Some(transfer));
        let event = ScheduledEvent::Deliver { to, life, bytes: bytes.freeze(), body };
        self.schedule(delay, event);
    }

    /// Receives a snapshot with its body. Production asks whether the snapshot is wanted before it
    /// receives the body. Here the body has been sent in vain if it isn't.
    pub(super) fn receive_snapshot(
        &mut self,
        to: u64,
        life: u64,
        message: Message,
        transfer: Transfer,
    ) -> Result<(), InvariantViolation> {
        self.bodies += 1;
        let path = PathBuf::from(format!("/incoming/{}", self.bodies));
        let Transfer { from, from_life, body } = transfer;
        let peer = self.node(to).member;
        let failed =
            ScheduledEvent::SnapshotReport { node: from, life: from_life, peer, arrived: false };
        let Some(live) = self.live(to, life) else {
            self.schedule(1_000, failed);
            return Ok(());
        };
        let status = live.core.driver().status();
        if !is_snapshot_wanted(message.from, &message, status.term, status.commit) {
            self.schedule(1_000, failed);
            return Ok(());
        }
        live.bodies.put(path.clone(), body);
        live.transfers.insert(path.clone(), (from, from_life));
        live.mail.notice(Notice::Snapshot(IncomingSnapshot { message, body: path }));
        self.wake(to)
    }

    /// Reports to the sender whether a received snapshot was installed.
    pub(super) fn transfer_ended(&mut self, id: u64, body: &Path, installed: bool) {
        let Some(live) = &mut self.node(id).process else { return };
        let Some((node, life)) = live.transfers.remove(body) else { return };
        let delay = self.rng.range(200, 2_000);
        let arrived = installed && !self.network.is_cut(id, node);
        let peer = self.node(id).member;
        self.schedule(delay, ScheduledEvent::SnapshotReport { node, life, peer, arrived });
    }

    /// Breaks off all snapshots that a process was receiving, because it ends.
    pub(super) fn break_transfers(&mut self, id: u64) {
        let transfers =
            self.node(id).process.as_mut().map(|live| std::mem::take(&mut live.transfers));
        for (_, (node, life)) in transfers.into_iter().flatten() {
            let delay = self.rng.range(1_000, 50_000);
            let peer = self.node(id).member;
            self.schedule(
                delay,
                ScheduledEvent::SnapshotReport { node, life, peer, arrived: false },
            );
        }
    }
}
