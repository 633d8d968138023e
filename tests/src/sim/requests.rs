//! What clients ask of members, and what they make of the answers.

use muster_node::driver::{Proposal, ReadToken};
use muster_node::machine::{EntryKind, RequestId};

use super::Violation;
use super::clients::{CLIENT_TIMEOUT, Kind, Operating, put_command, read_key};
use super::world::{Event, World};

impl World {
    pub(super) fn client(&mut self, client: usize) -> Result<(), Violation> {
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
            Kind::Put => {
                let proposal =
                    Proposal { id: RequestId(id), kind: EntryKind::Normal, data: command };
                live.driver.propose([proposal]);
            }
            Kind::Read => live.driver.read([id]),
        }
        if self.paused(node).is_some() {
            return Ok(());
        }
        self.advance(node)
    }

    /// The client has had its answer, or gives up.
    pub(super) fn next_operation(&mut self, client: usize) {
        self.clients[client].operating = None;
        let delay = self.rng.range(500, 30_000);
        self.after(delay, Event::Client { client });
    }

    pub(super) fn operation(&self, node: u64, id: u64) -> Option<(usize, Operating)> {
        self.clients.iter().enumerate().find_map(|(client, state)| {
            let operating = state.operating?;
            (operating.id == id && operating.node == node).then_some((client, operating))
        })
    }

    pub(super) fn end_operation(&mut self, node: u64, id: u64) {
        if let Some((client, _)) = self.operation(node, id) {
            self.next_operation(client);
        }
    }

    pub(super) fn put_done(&mut self, node: u64, id: u64, revision: i64) -> Result<(), Violation> {
        let Some((client, operating)) = self.operation(node, id) else { return Ok(()) };
        self.invariants.clients.put(id, operating.key, operating.floor, revision)?;
        self.invariants.acks.acknowledged(id, revision);
        self.report.puts += 1;
        self.served = self.calm;
        self.next_operation(client);
        Ok(())
    }

    pub(super) fn read_done(&mut self, node: u64, token: ReadToken) -> Result<(), Violation> {
        let Some((client, operating)) = self.operation(node, token) else { return Ok(()) };
        let life = self.node(node).life;
        let Some(live) = self.live(node, life) else { return Ok(()) };
        let found = match read_key(&live.store, operating.key) {
            Ok(found) => found,
            Err(_) if self.node(node).disk.is_off() || self.node(node).disk.has_failed() => {
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
}
