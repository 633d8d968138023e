//! Leases in the simulation: production's clock of the leader, asked at each tick, and clients that keep
//! leases alive. As in the API, who does is told so only by a member that leads, in the same term, after it
//! has counted anew.

use std::time::Duration;

use bytes::Bytes;
use muster_node::driver::{Proposal, Role};
use muster_node::lease::{Renewal, Seat, whole};
use muster_node::machine::{EntryKind, RequestId};
use node_proto::command::{self, LeaseCheckpoint, Operation};

use super::Violation;
use super::clients::{CLIENT_TIMEOUT, NOBODY, Operating, request_id};
use super::invariants::leases::LEASE_SECOND;
use super::node::{Live, Node};
use super::users::Who;
use super::world::{Event, TICK, World, place};

/// An entry of a leader's that says what leases have left, on its way.
#[derive(Debug)]
pub(super) struct Noting {
    request: u64,
    noted: LeaseCheckpoint,
    /// Nobody waits for it after that.
    until: u64,
}

/// A lease that a leader counts anew, of which its client has yet to hear.
#[derive(Clone, Copy, Debug)]
pub(super) struct Renewing {
    /// The entry that granted the lease.
    pub granted: u64,
    pub lease: i64,
    pub term: u64,
    /// When the leader began to.
    pub at: u64,
    /// The same by its own clock.
    pub at_local: Duration,
}

impl Live {
    fn seat(&self) -> Seat {
        let driver = self.core.driver();
        let status = driver.status();
        let applied_term = driver.positions().0.term;
        Seat { leads: status.role == Role::Leader, term: status.term, applied_term }
    }

    fn propose(&mut self, id: u64, data: Bytes) -> bool {
        let proposal = Proposal { id: RequestId(id), kind: EntryKind::Normal, data };
        self.mail.propose(proposal).is_ok()
    }

    /// What became of an entry that noted what leases have left, if it was one.
    pub(super) fn note_ended(&mut self, request: u64) {
        if let Some(noting) = self.noting.take_if(|noting| noting.request == request) {
            self.lessor.notes_done(&noting.noted);
        }
    }
}

impl World {
    /// What a machine's own clock shows, in the time of leases.
    fn lease_clock(&self, id: u64) -> Duration {
        let tick = self.nodes[place(id)].tick;
        let local = self.now * TICK / tick;
        Duration::from_micros(local * (1_000_000 / LEASE_SECOND))
    }

    /// A member looks at its leases.
    pub(super) fn count_leases(&mut self, id: u64) -> Result<(), Violation> {
        if self.calm {
            self.invariants.leases.look(self.now, self.led_since.max(self.options.duration))?;
        }
        let (at, now) = (self.lease_clock(id), self.now);
        let (mut next_id, life) = (self.next_id, self.node(id).life);
        let mut said = Vec::new();
        let Some(live) = self.nodes[place(id)].live.as_mut() else { return Ok(()) };
        let seat = live.seat();
        live.lessor.follow(seat, live.store.leases(), at);
        for over in live.lessor.expire(at) {
            let request = request_id(next_id, NOBODY);
            next_id += 1;
            said.push((
                request,
                command::encode(request, command::member(), Operation::LeaseExpire(over)),
            ));
        }
        if let Some(late) = live.noting.take_if(|noting| noting.until < now) {
            live.lessor.notes_done(&late.noted);
        }
        if live.noting.is_none()
            && let Some(noted) = live.lessor.note(at)
        {
            let request = request_id(next_id, NOBODY);
            next_id += 1;
            let operation = Operation::LeaseCheckpoint(noted.clone());
            live.noting = Some(Noting { request, noted, until: now + CLIENT_TIMEOUT });
            said.push((request, command::encode(request, command::member(), operation)));
            self.report.leases_noted += 1;
        }
        self.next_id = next_id;
        for (request, data) in said {
            // Who looks is a task of its own: by the time that the core hears of it, somebody else may
            // lead.
            let is_late = self.rng.chance(200);
            let delay =
                if is_late { self.rng.range(3_000, 60_000) } else { self.rng.range(20, 3_000) };
            self.after(delay, Event::ClockSays { node: id, life, request, data });
        }
        Ok(())
    }

    /// What a member's look at its leases came to is proposed.
    pub(super) fn clock_says(
        &mut self,
        id: u64,
        life: u64,
        request: u64,
        data: Bytes,
    ) -> Result<(), Violation> {
        if let Some(wait) = self.paused(id) {
            self.after(wait, Event::ClockSays { node: id, life, request, data });
            return Ok(());
        }
        let Some(live) = self.live(id, life) else { return Ok(()) };
        if !live.propose(request, data) {
            live.note_ended(request);
        }
        self.wake(id)
    }

    /// A client asks a member to keep a lease alive, which passes that on to whom it takes for the
    /// leader.
    pub(super) fn ask_to_keep_alive(&mut self, client: usize, asked: u64, lease: i64) {
        let leads =
            |node: &&Node| node.live.is_some() && node.member == self.leaders[place(asked)].0;
        let node = self.nodes.iter().find(leads).map_or(asked, |node| node.id);
        let id = request_id(self.next_id, node);
        self.next_id += 1;
        let floor = self.invariants.clients.floor();
        let operating = Operating {
            id,
            floor,
            users_floor: 0,
            node,
            read: None,
            renewing: None,
            who: Who::Nobody,
            must_end: false,
        };
        self.clients[client].operating = Some(operating);
        let patience = self.rng.range(20_000, CLIENT_TIMEOUT / 3);
        self.after(patience, Event::ClientTimeout { client, id });
        let (delay, life) = (self.rng.range(50, 3_000), self.node(node).life);
        self.after(delay, Event::KeepAlive { node, life, client, id, lease });
    }

    /// A member is asked, as the leader, to keep a lease alive.
    pub(super) fn keep_alive(
        &mut self,
        (node, life): (u64, u64),
        client: usize,
        id: u64,
        lease: i64,
    ) -> Result<(), Violation> {
        if let Some(wait) = self.paused(node) {
            self.after(wait, Event::KeepAlive { node, life, client, id, lease });
            return Ok(());
        }
        let (at_local, at) = (self.lease_clock(node), self.now);
        let Some(live) = self.live(node, life) else { return Ok(()) };
        let seat = live.seat();
        live.lessor.follow(seat, live.store.leases(), at_local);
        let renewed = live.lessor.term().map(|term| (term, live.lessor.renew(lease, at_local)));
        let Some((term, Renewal::Renewed { lease, note })) = renewed else {
            if self.operation(node, id).is_some() {
                self.clients[client].keeps = None;
                self.next_operation(client);
            }
            return Ok(());
        };
        let granted = lease.granted;
        self.invariants.leases.counts(granted, at);
        let renewing = Renewing { granted, lease: lease.id, term, at, at_local };
        let Some(live) = self.live(node, life) else { return Ok(()) };
        let asked = if note {
            let operation = Operation::LeaseCheckpoint(whole(term, [lease]));
            live.propose(id, command::encode(id, command::member(), operation))
        } else {
            live.mail.read(id).is_ok()
        };
        // Whether or not its client still waits.
        let operating = self.clients[client].operating.as_mut();
        if let Some(operating) = operating.filter(|operating| operating.id == id) {
            operating.renewing = Some(renewing);
        }
        if !asked {
            self.report.full_queues += 1;
            return self.was_refused(node, id);
        }
        self.wake(node)
    }

    /// The round, or the entry, that a renewal waits for has come back.
    pub(super) fn renewed(&mut self, client: usize, node: u64, renewing: Renewing, by_entry: bool) {
        let Some(live) = self.nodes[place(node)].live.as_mut() else { return };
        let seat = live.seat();
        if by_entry && live.lessor.term() == Some(renewing.term) {
            live.lessor.renewal_noted(renewing.lease, renewing.at_local);
        }
        let leads = seat.leads && seat.term == renewing.term;
        if leads {
            self.report.renewals += 1;
            self.clients[client].keeps = Some(renewing.lease);
            self.invariants.leases.told(renewing.granted, renewing.at);
        }
    }
}
