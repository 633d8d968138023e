//! Leases in the simulation. At each tick a member consults the production code's lease clock, and
//! clients keep leases alive. As in the API, a client learns of a renewal only from a member that
//! still leads in the same term. Before that, the member must have reset the lease's timer to the
//! whole TTL.

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
use super::simulation::{ScheduledEvent, Simulation, TICK, index_of};
use super::users::RequestUser;

/// A leader's checkpoint entry that is not applied yet. It records the remaining TTLs of leases.
#[derive(Debug)]
pub(super) struct PendingCheckpoint {
    request: u64,
    checkpoint: LeaseCheckpoint,
    /// Virtual time after which the member no longer waits for the checkpoint entry.
    until: u64,
}

/// Renewal of a lease that isn't acknowledged yet. A leader has reset the lease's timer to the
/// whole TTL.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingRenewal {
    /// Index of the entry that granted the lease.
    pub granted: u64,
    pub lease: i64,
    pub term: u64,
    /// Virtual time at which the leader reset the lease's timer.
    pub at: u64,
    /// Time on the leader's own clock at which it reset the lease's timer.
    pub at_local: Duration,
}

impl MemberProcess {
    fn raft_status(&self) -> RaftStatus {
        let driver = self.core.driver();
        let status = driver.status();
        let applied_term = driver.positions().0.term;
        RaftStatus { is_leader: status.role == Role::Leader, term: status.term, applied_term }
    }

    fn propose(&mut self, id: u64, data: Bytes) -> bool {
        let proposal = ClientProposal { id: RequestId(id), kind: EntryKind::Normal, data };
        self.mail.propose(proposal).is_ok()
    }

    /// Tells the lessor (the lease clock) that a checkpoint entry has ended, if `request` proposed
    /// that entry.
    pub(super) fn end_checkpoint(&mut self, request: u64) {
        if let Some(pending) = self.pending_checkpoint.take_if(|pending| pending.request == request)
        {
            self.lessor.finish_checkpoint(&pending.checkpoint);
        }
    }
}

impl Simulation {
    /// Returns the time on a machine's own clock, scaled so that [`LEASE_SECOND`] becomes one
    /// second.
    fn lease_clock(&self, id: u64) -> Duration {
        let tick = self.nodes[index_of(id)].tick;
        let local = self.now * TICK / tick;
        Duration::from_micros(local * (1_000_000 / LEASE_SECOND))
    }

    /// Lets a member consult its lease clock, and schedules the entries that the clock asks for.
    pub(super) fn run_lease_clock(&mut self, id: u64) -> Result<(), InvariantViolation> {
        if self.are_faults_over {
            self.invariants
                .leases
                .check_overdue(self.now, self.leadership_since.max(self.options.duration))?;
        }
        let (at, now) = (self.lease_clock(id), self.now);
        let (mut next_id, generation) = (self.next_id, self.node(id).generation);
        let mut entries = Vec::new();
        let Some(process) = self.nodes[index_of(id)].process.as_mut() else { return Ok(()) };
        let status = process.raft_status();
        process.lessor.update(status, process.store.leases(), at);
        for expiry in process.lessor.expire(at) {
            let request = request_id(next_id, NO_CLIENT);
            next_id += 1;
            entries.push((
                request,
                command::encode(request, command::member_caller(), Operation::LeaseExpire(expiry)),
            ));
        }
        if let Some(overdue) = process.pending_checkpoint.take_if(|pending| pending.until < now) {
            process.lessor.finish_checkpoint(&overdue.checkpoint);
        }
        if process.pending_checkpoint.is_none()
            && let Some(checkpoint) = process.lessor.due_checkpoint(at)
        {
            let request = request_id(next_id, NO_CLIENT);
            next_id += 1;
            let operation = Operation::LeaseCheckpoint(checkpoint.clone());
            process.pending_checkpoint =
                Some(PendingCheckpoint { request, checkpoint, until: now + CLIENT_TIMEOUT });
            entries.push((request, command::encode(request, command::member_caller(), operation)));
            self.report.lease_checkpoints += 1;
        }
        self.next_id = next_id;
        for (request, data) in entries {
            // In production another task consults the lease clock, so the proposal reaches the core
            // later. Another member may lead by then.
            let is_late = self.rng.chance(200);
            let delay =
                if is_late { self.rng.range(3_000, 60_000) } else { self.rng.range(20, 3_000) };
            self.schedule(
                delay,
                ScheduledEvent::LeaseEntryDue { node: id, generation, request, data },
            );
        }
        Ok(())
    }

    /// Proposes an entry that a member's lease clock asked for.
    pub(super) fn propose_lease_entry(
        &mut self,
        id: u64,
        generation: u64,
        request: u64,
        data: Bytes,
    ) -> Result<(), InvariantViolation> {
        if let Some(wait) = self.remaining_pause(id) {
            self.schedule(
                wait,
                ScheduledEvent::LeaseEntryDue { node: id, generation, request, data },
            );
            return Ok(());
        }
        let Some(process) = self.running_process(id, generation) else { return Ok(()) };
        if !process.propose(request, data) {
            process.end_checkpoint(request);
        }
        self.wake(id)
    }

    /// Lets a client ask a member to keep a lease alive. The asked member forwards the request to
    /// the member that it considers the leader.
    pub(super) fn request_keep_alive(&mut self, client: usize, asked_node: u64, lease: i64) {
        let is_leader = |node: &&SimulatedNode| {
            node.process.is_some() && node.member == self.leaders[index_of(asked_node)].0
        };
        let node = self.nodes.iter().find(is_leader).map_or(asked_node, |node| node.id);
        let id = request_id(self.next_id, node);
        self.next_id += 1;
        let floor = self.invariants.clients.floor();
        let pending = PendingRequest {
            id,
            floor,
            users_floor: 0,
            node,
            read: None,
            renewal: None,
            user: RequestUser::Anonymous,
            must_be_answered: false,
        };
        self.clients[client].pending = Some(pending);
        let timeout = self.rng.range(20_000, CLIENT_TIMEOUT / 3);
        self.schedule(timeout, ScheduledEvent::ClientTimeout { client, id });
        let (delay, generation) = (self.rng.range(50, 3_000), self.node(node).generation);
        self.schedule(delay, ScheduledEvent::KeepAlive { node, generation, client, id, lease });
    }

    /// Lets a member handle a keep-alive that reached it because another member considers it the
    /// leader.
    pub(super) fn keep_alive(
        &mut self,
        (node, generation): (u64, u64),
        client: usize,
        id: u64,
        lease: i64,
    ) -> Result<(), InvariantViolation> {
        if let Some(wait) = self.remaining_pause(node) {
            self.schedule(wait, ScheduledEvent::KeepAlive { node, generation, client, id, lease });
            return Ok(());
        }
        let (at_local, at) = (self.lease_clock(node), self.now);
        let Some(process) = self.running_process(node, generation) else { return Ok(()) };
        let status = process.raft_status();
        process.lessor.update(status, process.store.leases(), at_local);
        let renewed =
            process.lessor.term().map(|term| (term, process.lessor.renew(lease, at_local)));
        let Some((term, Renewal::Renewed { lease, needs_checkpoint })) = renewed else {
            if self.find_request(node, id).is_some() {
                self.clients[client].kept_lease = None;
                self.schedule_next_request(client);
            }
            return Ok(());
        };
        let granted = lease.grant_index;
        self.invariants.leases.record_timer_reset(granted, at);
        let renewal = PendingRenewal { granted, lease: lease.id, term, at, at_local };
        let Some(process) = self.running_process(node, generation) else { return Ok(()) };
        let is_queued = if needs_checkpoint {
            let operation = Operation::LeaseCheckpoint(full_ttl_checkpoint(term, [lease]));
            process.propose(id, command::encode(id, command::member_caller(), operation))
        } else {
            process.mail.read(id).is_ok()
        };
        // If the client no longer waits, no renewal is recorded for it. The renewal's quorum round
        // or checkpoint entry continues all the same.
        let pending = self.clients[client].pending.as_mut();
        if let Some(pending) = pending.filter(|pending| pending.id == id) {
            pending.renewal = Some(renewal);
        }
        if !is_queued {
            self.report.full_queues += 1;
            return self.record_refusal(node, id);
        }
        self.wake(node)
    }

    /// Completes a renewal after its quorum round or its checkpoint entry.
    pub(super) fn complete_renewal(
        &mut self,
        client: usize,
        node: u64,
        renewal: PendingRenewal,
        by_entry: bool,
    ) {
        let Some(process) = self.nodes[index_of(node)].process.as_mut() else { return };
        let status = process.raft_status();
        if by_entry && process.lessor.term() == Some(renewal.term) {
            process.lessor.record_full_ttl(renewal.lease, renewal.at_local);
        }
        let is_leader = status.is_leader && status.term == renewal.term;
        if is_leader {
            self.report.renewals += 1;
            self.clients[client].kept_lease = Some(renewal.lease);
            self.invariants.leases.record_confirmed_renewal(renewal.granted, renewal.at);
        }
    }
}
