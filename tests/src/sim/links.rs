//! The streams between members, as the transport tells of them: they come up some time after both
//! ends can hear each other, and break some time after they can't; and the snapshots that travel
//! beside the messages.

use std::path::{Path, PathBuf};

use bytes::{Bytes, BytesMut};
use muster_node::driver::{IncomingSnapshot, Message, Notice, is_wanted};

use super::Violation;
use super::world::{Event, World};

/// A snapshot's way: from whom, which life of it, and the body.
#[derive(Clone, Debug)]
pub(super) struct Transfer {
    pub from: u64,
    pub from_life: u64,
    pub body: Bytes,
}

impl World {
    /// A member looks after its streams.
    pub(super) fn dial(&mut self, id: u64, life: u64) -> Result<(), Violation> {
        if self.live(id, life).is_none() {
            return Ok(());
        }
        let delay = self.rng.range(10_000, 50_000);
        self.after(delay, Event::Dial { node: id, life });
        if self.paused(id).is_some() {
            return Ok(());
        }
        for peer in (1..=self.plan.members).filter(|peer| *peer != id) {
            let cut = self.network.is_cut(id, peer) || self.network.is_cut(peer, id);
            let reached = self.node(peer).live.is_some() && !cut && self.paused(peer).is_none();
            let peer_life = self.node(peer).life;
            if reached {
                self.set_stream(id, peer, Some(peer_life))?;
                self.set_stream(peer, id, Some(life))?;
            } else if self.rng.chance(500) {
                self.set_stream(id, peer, None)?;
            }
        }
        Ok(())
    }

    /// From now on a member has a stream to that process of a peer, or none.
    fn set_stream(&mut self, id: u64, peer: u64, to: Option<u64>) -> Result<(), Violation> {
        let Some(live) = &mut self.node(id).live else { return Ok(()) };
        let before = live.connected.get(&peer).copied();
        if before == to {
            return Ok(());
        }
        if before.is_some() {
            live.connected.remove(&peer);
            live.mail.notice(Notice::Disconnected(peer));
        }
        if let Some(life) = to {
            live.connected.insert(peer, life);
            live.mail.notice(Notice::Connected(peer));
        }
        self.wake(id)
    }

    pub(super) fn send_snapshot(&mut self, id: u64, life: u64, message: &Message, body: Bytes) {
        let to = message.to;
        // Nobody listens at a stranger's.
        let delay = if self.has_machine(to) {
            let delays = self.network.delays(&mut self.rng, &self.plan, id, to);
            delays.first().copied()
        } else {
            None
        };
        let stream = self.live(id, life).and_then(|live| live.connected.get(&to).copied());
        let (Some(delay), Some(stream)) = (delay, stream) else {
            self.after(1_000, Event::SnapshotReport { node: id, life, peer: to, arrived: false });
            return;
        };
        let mut bytes = BytesMut::new();
        message.encode(&mut bytes);
        let transfer = Transfer { from: id, from_life: life, body };
        let event =
            Event::Deliver { to, life: stream, bytes: bytes.freeze(), body: Some(transfer) };
        self.after(delay, event);
    }

    /// A snapshot has arrived whole. Whether it is wanted is asked before its body is received, in
    /// production; a body that isn't was sent in vain.
    pub(super) fn receive_snapshot(
        &mut self,
        to: u64,
        life: u64,
        message: Message,
        transfer: Transfer,
    ) -> Result<(), Violation> {
        self.bodies += 1;
        let path = PathBuf::from(format!("/incoming/{}", self.bodies));
        let Transfer { from, from_life, body } = transfer;
        let failed =
            Event::SnapshotReport { node: from, life: from_life, peer: to, arrived: false };
        let Some(live) = self.live(to, life) else {
            self.after(1_000, failed);
            return Ok(());
        };
        let status = live.core.driver().status();
        if !is_wanted(from, &message, status.term, status.commit) {
            self.after(1_000, failed);
            return Ok(());
        }
        live.bodies.put(path.clone(), body);
        live.transfers.insert(path.clone(), (from, from_life));
        live.mail.notice(Notice::Snapshot(IncomingSnapshot { message, body: path }));
        self.wake(to)
    }

    /// A received snapshot is part of a member's state now, or never will be: its sender is told.
    pub(super) fn transfer_ended(&mut self, id: u64, body: &Path, installed: bool) {
        let Some(live) = &mut self.node(id).live else { return };
        let Some((node, life)) = live.transfers.remove(body) else { return };
        let delay = self.rng.range(200, 2_000);
        let arrived = installed && !self.network.is_cut(id, node);
        self.after(delay, Event::SnapshotReport { node, life, peer: id, arrived });
    }

    /// A process ends; what it was receiving breaks off.
    pub(super) fn break_transfers(&mut self, id: u64) {
        let transfers = self.node(id).live.as_mut().map(|live| std::mem::take(&mut live.transfers));
        for (_, (node, life)) in transfers.into_iter().flatten() {
            let delay = self.rng.range(1_000, 50_000);
            self.after(delay, Event::SnapshotReport { node, life, peer: id, arrived: false });
        }
    }
}
