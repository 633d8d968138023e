//! Leases in the simulation. At each tick a member consults the production code's lease clock, and clients
//! keep leases alive. As in the API, a client learns of a renewal only from a member that still leads in
//! the same term. That member must first have set the lease's clock back.

use std::time::Duration;

use bytes::Bytes;
use node_engine::driver::{ClientProposal, Role};
use node_proto::command::{self, LeaseCheckpoint, Operation};
use node_state::lease::{RaftStatus, Renewal, full_ttl_checkpoint};
use node_state::state_machine::{EntryKind, RequestId};

use super::InvariantViolation;
use super::clients::{CLIENT_TIMEOUT, NO_CLIENT, PendingRequest, request_id};
use super::invariants::leases::LEASE_SECOND;
use super::node::{MemberProcess, SimulatedNode};
use super::users::RequestUser;
use super::world::{ScheduledEvent, Simulation, TICK, index_of};

/// A leader's checkpoint entry under way: it records how long leases have left.
#[derive(Debug)]
pub(super) struct PendingCheckpoint {
    request: u64,
    noted: LeaseCheckpoint,
    /// Virtual time after which the member no longer waits for the entry.
    until: u64,
}

/// A lease whose clock a leader has set back, before its client knows.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingRenewal {
    /// Index of the entry that granted the lease.
    pub granted: u64,
    pub lease: i64,
    pub term: u64,
    /// Virtual time at which the leader set the clock back.
    pub at: u64,
    /// Time at which the leader set the clock back, by its own clock.
    pub at_local: Duration,
}

impl MemberProcess {
    fn seat(&self) -> RaftStatus {
        let driver = self.core.driver();
        let status = driver.status();
        let applied_term = driver.positions().0.term;
        RaftStatus { is_leader: status.role == Role::Leader, term: status.term, applied_term }
    }

    fn propose(&mut self, id: u64, data: Bytes) -> bool {
        let proposal = ClientProposal { id: RequestId(id), kind: EntryKind::Normal, data };
        self.mail.propose(proposal).is_ok()
    }

    /// Tells the lessor that its checkpoint entry has ended, if `request` was one.
    pub(super) fn end_checkpoint(&mut self, request: u64) {
        if let Some(noting) = self.pending_checkpoint.take_if(|noting| noting.request == request) {
            self.lessor.finish_checkpoint(&noting.noted);
        }
    }
}

impl Simulation {
    /// Returns the time of a machine's own clock, in the time of leases.
    fn lease_clock(&self, id: u64) -> Duration {
        let tick = self.nodes[index_of(id)].tick;
        let local = self.now * TICK / tick;
        Duration::from_micros(local * (1_000_000 / LEASE_SECOND))
    }

    /// Lets a member consult its lease clock, and schedules the entries that follow.
    pub(super) fn count_leases(&mut self, id: u64) -> Result<(), InvariantViolation> {
        if self.are_faults_over {
            self.invariants
                .leases
                .check_overdue(self.now, self.leadership_since.max(self.options.duration))?;
        }
        let (at, now) = (self.lease_clock(id), self.now);
        let (mut next_id, life) = (self.next_id, self.node(id).life);
        let mut said = Vec::new();
        let Some(live) = self.nodes[index_of(id)].process.as_mut() else { return Ok(()) };
        let seat = live.seat();
        live.lessor.update(seat, live.store.leases(), at);
        for over in live.lessor.expire(at) {
            let request = request_id(next_id, NO_CLIENT);
            next_id += 1;
            said.push((
                request,
                command::encode(request, command::member_caller(), Operation::LeaseExpire(over)),
            ));
        }
        if let Some(late) = live.pending_checkpoint.take_if(|noting| noting.until < now) {
            live.lessor.finish_checkpoint(&late.noted);
        }
        if live.pending_checkpoint.is_none()
            && let Some(noted) = live.lessor.due_checkpoint(at)
        {
            let request = request_id(next_id, NO_CLIENT);
            next_id += 1;
            let operation = Operation::LeaseCheckpoint(noted.clone());
            live.pending_checkpoint =
                Some(PendingCheckpoint { request, noted, until: now + CLIENT_TIMEOUT });
            said.push((request, command::encode(request, command::member_caller(), operation)));
            self.report.leases_noted += 1;
        }
        self.next_id = next_id;
        for (request, data) in said {
            // Another task consults the lease clock, so the proposal reaches the core later. Another member
            // may lead by then.
            let is_late = self.rng.chance(200);
            let delay =
                if is_late { self.rng.range(3_000, 60_000) } else { self.rng.range(20, 3_000) };
            self.schedule(delay, ScheduledEvent::LeaseEntryDue { node: id, life, request, data });
        }
        Ok(())
    }

    /// Proposes an entry that a member's lease clock asked for.
    pub(super) fn clock_says(
        &mut self,
        id: u64,
        life: u64,
        request: u64,
        data: Bytes,
    ) -> Result<(), InvariantViolation> {
        if let Some(wait) = self.paused(id) {
            self.schedule(wait, ScheduledEvent::LeaseEntryDue { node: id, life, request, data });
            return Ok(());
        }
        let Some(live) = self.live(id, life) else { return Ok(()) };
        if !live.propose(request, data) {
            live.end_checkpoint(request);
        }
        self.wake(id)
    }

    /// Lets a client ask a member to keep a lease alive. The member forwards the request to the member that
    /// it believes to lead.
    pub(super) fn ask_to_keep_alive(&mut self, client: usize, asked: u64, lease: i64) {
        let leads = |node: &&SimulatedNode| {
            node.process.is_some() && node.member == self.leaders[index_of(asked)].0
        };
        let node = self.nodes.iter().find(leads).map_or(asked, |node| node.id);
        let id = request_id(self.next_id, node);
        self.next_id += 1;
        let floor = self.invariants.clients.floor();
        let operating = PendingRequest {
            id,
            floor,
            users_floor: 0,
            node,
            read: None,
            renewing: None,
            user: RequestUser::Anonymous,
            must_be_answered: false,
        };
        self.clients[client].operating = Some(operating);
        let patience = self.rng.range(20_000, CLIENT_TIMEOUT / 3);
        self.schedule(patience, ScheduledEvent::ClientTimeout { client, id });
        let (delay, life) = (self.rng.range(50, 3_000), self.node(node).life);
        self.schedule(delay, ScheduledEvent::KeepAlive { node, life, client, id, lease });
    }

    /// Lets a member, asked as the leader, keep a lease alive.
    pub(super) fn keep_alive(
        &mut self,
        (node, life): (u64, u64),
        client: usize,
        id: u64,
        lease: i64,
    ) -> Result<(), InvariantViolation> {
        if let Some(wait) = self.paused(node) {
            self.schedule(wait, ScheduledEvent::KeepAlive { node, life, client, id, lease });
            return Ok(());
        }
        let (at_local, at) = (self.lease_clock(node), self.now);
        let Some(live) = self.live(node, life) else { return Ok(()) };
        let seat = live.seat();
        live.lessor.update(seat, live.store.leases(), at_local);
        let renewed = live.lessor.term().map(|term| (term, live.lessor.renew(lease, at_local)));
        let Some((term, Renewal::Renewed { lease, needs_checkpoint: note })) = renewed else {
            if self.operation(node, id).is_some() {
                self.clients[client].kept_lease = None;
                self.next_operation(client);
            }
            return Ok(());
        };
        let granted = lease.grant_index;
        self.invariants.leases.record_clock_set_back(granted, at);
        let renewing = PendingRenewal { granted, lease: lease.id, term, at, at_local };
        let Some(live) = self.live(node, life) else { return Ok(()) };
        let asked = if note {
            let operation = Operation::LeaseCheckpoint(full_ttl_checkpoint(term, [lease]));
            live.propose(id, command::encode(id, command::member_caller(), operation))
        } else {
            live.mail.read(id).is_ok()
        };
        // The round continues even if its client no longer waits.
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

    /// Completes a renewal, whose quorum round or checkpoint entry has come back.
    pub(super) fn renewed(
        &mut self,
        client: usize,
        node: u64,
        renewing: PendingRenewal,
        by_entry: bool,
    ) {
        let Some(live) = self.nodes[index_of(node)].process.as_mut() else { return };
        let seat = live.seat();
        if by_entry && live.lessor.term() == Some(renewing.term) {
            live.lessor.record_full_ttl(renewing.lease, renewing.at_local);
        }
        let leads = seat.is_leader && seat.term == renewing.term;
        if leads {
            self.report.renewals += 1;
            self.clients[client].kept_lease = Some(renewing.lease);
            self.invariants.leases.record_confirmed_renewal(renewing.granted, renewing.at);
        }
    }
}
