//! Requests of clients to members, and the handling of the answers.

use node_engine::driver::{ClientProposal, QueueError, ReadToken};
use node_proto::command;
use node_proto::etcdserverpb::{RangeRequest, RangeResponse};
use node_state::apply::{ApplyError, Outcome, Response};
use node_state::mvcc::ReadError;
use node_state::state_machine::{EntryKind, RequestId};

use super::InvariantViolation;
use super::clients::{
    CLIENT_TIMEOUT, ClientRequest, ClientRequestGenerator, NO_CLIENT, PendingRequest,
    is_awaited_on, request_id,
};
use super::invariants::linearizable::RequestEffect;
use super::invariants::store::header_revision;
use super::users::{AssignedToken, ROOT, RequestUser};
use super::world::{ScheduledEvent, Simulation, index_of};

/// A member's answer to a read.
type ReadResult = Result<RangeResponse, ApplyError>;

impl Simulation {
    /// Draws how long a client waits. A request that must be answered gets the full time limit.
    fn draw_client_timeout(&mut self, must_be_answered: bool) -> u64 {
        if must_be_answered { CLIENT_TIMEOUT } else { self.rng.range(50_000, CLIENT_TIMEOUT / 3) }
    }

    pub(super) fn client(&mut self, client: usize) -> Result<(), InvariantViolation> {
        if self.clients[client].operating.is_some() {
            return Ok(());
        }
        if self.is_client_satisfied(client) {
            if self.api_server(client).is_some() {
                // A copy may still have to be listed again.
                self.next_operation(client);
            }
            return Ok(());
        }
        let leader = if self.rng.chance(400) { self.leader(0) } else { None };
        let node = leader.unwrap_or_else(|| self.any_voter());
        if self.node(node).process.is_none() {
            self.next_operation(client);
            return Ok(());
        }
        let id = request_id(self.next_id, node);
        self.next_id += 1;
        let clients = &self.invariants.clients;
        let (floor, users_floor) = (clients.floor(), clients.users_floor());
        let (kind, who, token) = self.asks(client, node, id);
        let Some(caller) = self.identify(node, &who)? else {
            // The user's token proved invalid; the client's next request doesn't use it.
            self.next_operation(client);
            return Ok(());
        };
        self.clients[client].token = token;
        if let ClientRequest::Read { request, linearizable: false } = &kind {
            let revision = self.read(node, &who, request)?.map_or(0, |(revision, _)| revision);
            self.trace(&[id, revision.unsigned_abs()]);
            self.next_operation(client);
            return Ok(());
        }
        if let ClientRequest::KeepAlive(lease) = kind {
            self.ask_to_keep_alive(client, node, lease);
            return Ok(());
        }
        let read = match &kind {
            ClientRequest::Read { request, .. } => Some(request.clone()),
            ClientRequest::Write { .. } | ClientRequest::KeepAlive(_) => None,
        };
        let must_end = self.must_be_answered(node, matches!(kind, ClientRequest::Write { .. }));
        self.clients[client].operating = Some(PendingRequest {
            id,
            floor,
            users_floor,
            node,
            read,
            renewing: None,
            user: who,
            must_be_answered: must_end,
        });
        let limit = self.draw_client_timeout(must_end);
        self.schedule(limit, ScheduledEvent::ClientTimeout { client, id });
        let life = self.node(node).life;
        let Some(live) = self.live(node, life) else { return Ok(()) };
        let asked = match kind {
            // As in the API: requests that free space are still accepted when disk space is short.
            ClientRequest::Write { grows: true, .. } if live.writer.is_short() => {
                Err(QueueError::Full)
            }
            ClientRequest::Write { operation, .. } => {
                let data = command::encode(id, caller.into(), operation);
                let (id, kind) = (RequestId(id), EntryKind::Normal);
                live.mail.propose(ClientProposal { id, kind, data })
            }
            ClientRequest::Read { .. } | ClientRequest::KeepAlive(_) => live.mail.read(id),
        };
        if asked.is_err() {
            self.report.full_queues += 1;
            return self.was_refused(node, id);
        }
        self.wake(node)
    }

    /// Draws a client's next request and the user it is made as. Also returns the client's token.
    fn asks(
        &mut self,
        client: usize,
        node: u64,
        id: u64,
    ) -> (ClientRequest, RequestUser, Option<AssignedToken>) {
        if let Some(server) = self.api_server(client) {
            return (self.api_server_asks(server, id), RequestUser::Certificate(ROOT), None);
        }
        let known = self.invariants.clients.floor();
        let mut draw = ClientRequestGenerator { rng: &mut self.rng, keys: self.plan.keys, known };
        let kind = match self.clients[client].kept_lease {
            // A client that keeps a lease alive tends to continue.
            Some(lease) if draw.rng.chance(400) => ClientRequest::KeepAlive(lease),
            _ => draw.draw_request(id),
        };
        let kind = self.or_of_users(node, id, kind);
        let asked = match &kind {
            ClientRequest::Write { operation, .. } => Some(operation),
            ClientRequest::Read { .. } | ClientRequest::KeepAlive(_) => None,
        };
        let token = self.clients[client].token.take();
        let mut draw = ClientRequestGenerator { rng: &mut self.rng, keys: self.plan.keys, known };
        let who = draw.who(asked, token.as_ref());
        (kind, who, token)
    }

    /// Ends a client's request, because it was answered or given up, and schedules the next one.
    pub(super) fn next_operation(&mut self, client: usize) {
        self.clients[client].operating = None;
        let pause = if self.api_server(client).is_some() { 40_000 } else { 15_000 };
        // Let many clients start at once now and then, so that proposals share a batch.
        let delay = if self.rng.chance(300) { 500 } else { self.rng.range(500, pause) };
        self.schedule(delay, ScheduledEvent::Client { client });
    }

    pub(super) fn operation(&self, node: u64, id: u64) -> Option<(usize, PendingRequest)> {
        self.clients.iter().enumerate().find_map(|(client, state)| {
            let operating = state.operating.as_ref()?;
            (operating.id == id && operating.node == node).then(|| (client, operating.clone()))
        })
    }

    pub(super) fn timed_out(&mut self, client: usize, id: u64) -> Result<(), InvariantViolation> {
        let Some(operating) = self.clients[client].operating.as_ref() else { return Ok(()) };
        if operating.id != id {
            return Ok(());
        }
        if operating.must_be_answered {
            let what =
                format!("request {id} on {}: no answer, though all was well", operating.node);
            return Err(InvariantViolation::new("every request is answered", what));
        }
        self.next_operation(client);
        Ok(())
    }

    /// Records that a member has installed a snapshot. Outcomes of requests in the snapshot reach
    /// no client, so those needn't be answered.
    pub(super) fn outcomes_lost(&mut self, node: u64) {
        let operating = self.clients.iter_mut().filter_map(|client| client.operating.as_mut());
        for operating in operating.filter(|operating| operating.node == node) {
            operating.must_be_answered &= operating.read.is_some();
        }
    }

    /// Records a member's statement that a proposal will never have an effect.
    pub(super) fn was_refused(&mut self, node: u64, id: u64) -> Result<(), InvariantViolation> {
        self.refused_requests.push(id);
        if let Some(live) = self.nodes[index_of(node)].process.as_mut() {
            live.end_checkpoint(id);
        }
        if self.change_requests.contains(&id) {
            return self.change_done(node, id, None);
        }
        self.report.refused += 1;
        self.ended(node, id);
        Ok(())
    }

    pub(super) fn ended(&mut self, node: u64, id: u64) {
        if let Some((client, operating)) = self.operation(node, id) {
            self.clients[client].served += u64::from(operating.must_be_answered);
            self.next_operation(client);
        }
    }

    /// Checks the outcome of a request that a member has applied, and gives it to the client that
    /// waits for it there.
    pub(super) fn outcome(
        &mut self,
        node: u64,
        id: u64,
        outcome: &Outcome,
    ) -> Result<(), InvariantViolation> {
        if self.change_requests.contains(&id) {
            self.report.membership_changes += u64::from(outcome.is_ok());
            return if is_awaited_on(id, node) {
                self.change_done(node, id, Some(outcome))
            } else {
                Ok(())
            };
        }
        if is_awaited_on(id, NO_CLIENT) {
            if let Some(live) = self.nodes[index_of(node)].process.as_mut() {
                live.end_checkpoint(id);
            }
            return Ok(());
        }
        let revision = header_revision(outcome);
        self.trace(&[id, revision.unwrap_or(0).unsigned_abs()]);
        let done =
            self.invariants.stores.check_outcome(node, id, is_awaited_on(id, node), outcome)?;
        let changed = done.changed;
        let Some((client, operating)) = self.operation(node, id) else { return Ok(()) };
        if let Some(renewing) = operating.renewing {
            if outcome.is_ok() {
                self.renewed(client, node, renewing, true);
            }
            self.ended(node, id);
            return Ok(());
        }
        self.api_server_told(client, outcome);
        match outcome {
            Ok(Response::TokenAssigned { index, .. }) => {
                self.clients[client].token = Some(AssignedToken::new(id, *index));
            }
            Ok(Response::AuthChanged(_)) => {
                self.report.user_changes += 1;
                let revision = self.users_revision(node).unwrap_or_default();
                self.invariants.clients.users_changed(revision);
            }
            Err(ApplyError::Auth(_)) => self.report.denied += 1,
            _ => {}
        }
        if let Some(revision) = revision {
            let answered = if changed { RequestEffect::Change } else { RequestEffect::Read };
            self.invariants.clients.check_answer(id, answered, operating.floor, revision)?;
            self.invariants.acks.record_acknowledged(id, revision);
        }
        self.report.writes += 1;
        self.ended(node, id);
        Ok(())
    }

    pub(super) fn read_done(
        &mut self,
        node: u64,
        token: ReadToken,
    ) -> Result<(), InvariantViolation> {
        let Some((client, operating)) = self.operation(node, token) else { return Ok(()) };
        if let Some(renewing) = operating.renewing {
            self.renewed(client, node, renewing, false);
            self.ended(node, token);
            return Ok(());
        }
        let Some(request) = &operating.read else { return Ok(()) };
        let Some(by) = self.users_revision(node) else { return Ok(()) };
        self.invariants.clients.check_permission_revision(token, operating.users_floor, by)?;
        let found = self.read(node, &operating.user, request)?;
        let revision = found.as_ref().map_or(0, |(revision, _)| *revision);
        self.trace(&[token, revision.unsigned_abs()]);
        if let Some((revision, found)) = found {
            let answered = RequestEffect::Read;
            self.invariants.clients.check_answer(token, answered, operating.floor, revision)?;
            self.report.reads += 1;
            self.api_server_reads(client, &found)?;
        }
        self.ended(node, token);
        Ok(())
    }

    /// Reads a member's store at its present state, and compares the result with the model. Returns
    /// the store's revision and the result. Returns `None` if the disk failed or the user has no
    /// permission.
    fn read(
        &mut self,
        node: u64,
        who: &RequestUser,
        request: &RangeRequest,
    ) -> Result<Option<(i64, ReadResult)>, InvariantViolation> {
        let life = self.node(node).life;
        let Some(live) = self.live(node, life) else { return Ok(None) };
        let view = live.store.view();
        if !self.may_read(node, &view, who, request)? {
            return Ok(None);
        }
        let Some(live) = self.live(node, life) else { return Ok(None) };
        let found = match live.store.range(&view, request) {
            Ok(response) => Ok(response),
            Err(ReadError::Compacted | ReadError::Superseded) => Err(ApplyError::Compacted),
            Err(ReadError::Future) => Err(ApplyError::FutureRevision),
            Err(ReadError::Store(error)) => {
                let disk = &self.node(node).disk;
                if disk.is_power_off() || disk.has_failed() {
                    return Ok(None);
                }
                return Err(InvariantViolation::new(
                    "stores hold the model",
                    format!("{node}: {error:?}"),
                ));
            }
        };
        self.invariants.stores.check_read(node, &view, request, &found)?;
        Ok(Some((view.revision(), found)))
    }
}
