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
use super::simulation::{ScheduledEvent, Simulation, index_of};
use super::users::{AssignedToken, ROOT, RequestUser};

/// A member's answer to a read.
type ReadResult = Result<RangeResponse, ApplyError>;

impl Simulation {
    /// Draws how long a client waits. A request that must be answered gets the full time limit.
    fn draw_client_timeout(&mut self, must_be_answered: bool) -> u64 {
        if must_be_answered { CLIENT_TIMEOUT } else { self.rng.range(50_000, CLIENT_TIMEOUT / 3) }
    }

    /// Draws the member that gets a client's next request: often the leader, else any voter.
    fn draw_request_target(&mut self) -> u64 {
        let leader = if self.rng.chance(400) { self.find_leader(0) } else { None };
        leader.unwrap_or_else(|| self.random_voter())
    }

    pub(super) fn start_client_request(&mut self, client: usize) -> Result<(), InvariantViolation> {
        if self.clients[client].pending.is_some() {
            return Ok(());
        }
        if self.is_client_satisfied(client) {
            if self.api_server_index(client).is_some() {
                // An API server may later have to list the prefix of one of its copies
                // (`PrefixCopy`) again, so its requests go on.
                self.schedule_next_request(client);
            }
            return Ok(());
        }
        let node = self.draw_request_target();
        if self.node(node).process.is_none() {
            self.schedule_next_request(client);
            return Ok(());
        }
        let id = request_id(self.next_id, node);
        self.next_id += 1;
        let floor = self.invariants.clients.floor();
        let users_floor = self.invariants.clients.users_floor();
        let (kind, user, token) = self.draw_client_request(client, node, id);
        let Some(caller) = self.identify_caller(node, &user)? else {
            // The member found the user's token invalid. The client's next request doesn't use that
            // token.
            self.schedule_next_request(client);
            return Ok(());
        };
        self.clients[client].token = token;
        if let ClientRequest::Read { request, linearizable: false } = &kind {
            let answer = self.read_and_check(node, &user, request)?;
            let revision = answer.map_or(0, |(revision, _)| revision);
            self.add_to_trace(&[id, revision.unsigned_abs()]);
            self.schedule_next_request(client);
            return Ok(());
        }
        if let ClientRequest::KeepAlive(lease) = kind {
            self.request_keep_alive(client, node, lease);
            return Ok(());
        }
        let read = match &kind {
            ClientRequest::Read { request, .. } => Some(request.clone()),
            ClientRequest::Write { .. } | ClientRequest::KeepAlive(_) => None,
        };
        let is_write = matches!(kind, ClientRequest::Write { .. });
        let must_be_answered = self.must_be_answered(node, is_write);
        self.clients[client].pending = Some(PendingRequest {
            id,
            floor,
            users_floor,
            node,
            read,
            renewal: None,
            user,
            must_be_answered,
        });
        let limit = self.draw_client_timeout(must_be_answered);
        self.schedule(limit, ScheduledEvent::ClientTimeout { client, id });
        let Some(process) = self.current_process(node) else { return Ok(()) };
        let queued = match kind {
            // As in the API, only requests that add data are refused when disk space is short.
            ClientRequest::Write { grows: true, .. } if process.writer.is_short() => {
                Err(QueueError::Full)
            }
            ClientRequest::Write { operation, .. } => {
                let data = command::encode(id, caller.into(), operation);
                let (id, kind) = (RequestId(id), EntryKind::Normal);
                process.mail.propose(ClientProposal { id, kind, data })
            }
            ClientRequest::Read { .. } | ClientRequest::KeepAlive(_) => process.mail.read(id),
        };
        if queued.is_err() {
            self.report.full_queues += 1;
            return self.record_refusal(node, id);
        }
        self.wake(node)
    }

    /// Draws a client's next request and the user it is made as. Also returns the client's token.
    fn draw_client_request(
        &mut self,
        client: usize,
        node: u64,
        id: u64,
    ) -> (ClientRequest, RequestUser, Option<AssignedToken>) {
        if let Some(server) = self.api_server_index(client) {
            return (
                self.draw_api_server_request(server, id),
                RequestUser::Certificate(ROOT),
                None,
            );
        }
        let known = self.invariants.clients.floor();
        let mut draw = ClientRequestGenerator { rng: &mut self.rng, keys: self.plan.keys, known };
        let kind = match self.clients[client].kept_lease {
            // A client that has kept a lease alive often renews the same lease with its next
            // request.
            Some(lease) if draw.rng.chance(400) => ClientRequest::KeepAlive(lease),
            _ => draw.draw_request(id),
        };
        let kind = self.replace_by_user_change(node, id, kind);
        let operation = match &kind {
            ClientRequest::Write { operation, .. } => Some(operation),
            ClientRequest::Read { .. } | ClientRequest::KeepAlive(_) => None,
        };
        let token = self.clients[client].token.take();
        let mut draw = ClientRequestGenerator { rng: &mut self.rng, keys: self.plan.keys, known };
        let user = draw.draw_user(operation, token.as_ref());
        (kind, user, token)
    }

    /// Ends a client's request, because it was answered or given up, and schedules the next one.
    pub(super) fn schedule_next_request(&mut self, client: usize) {
        self.clients[client].pending = None;
        let pause = if self.api_server_index(client).is_some() { 40_000 } else { 15_000 };
        // Let many clients start at once now and then, so that proposals share a batch.
        let delay = if self.rng.chance(300) { 500 } else { self.rng.range(500, pause) };
        self.schedule(delay, ScheduledEvent::Client { client });
    }

    pub(super) fn find_request(&self, node: u64, id: u64) -> Option<(usize, PendingRequest)> {
        self.clients.iter().enumerate().find_map(|(client, state)| {
            let pending = state.pending.as_ref()?;
            (pending.id == id && pending.node == node).then(|| (client, pending.clone()))
        })
    }

    pub(super) fn handle_client_timeout(
        &mut self,
        client: usize,
        id: u64,
    ) -> Result<(), InvariantViolation> {
        let Some(pending) = self.clients[client].pending.as_ref() else { return Ok(()) };
        if pending.id != id {
            return Ok(());
        }
        if pending.must_be_answered {
            let what = format!(
                "request {id} on {}: no answer, although no fault was active",
                pending.node
            );
            return Err(InvariantViolation::new("every request is answered", what));
        }
        self.schedule_next_request(client);
        Ok(())
    }

    /// Records that a member has installed a snapshot. The member doesn't learn the outcomes of
    /// requests in the snapshot, so its clients' writes needn't be answered.
    pub(super) fn record_lost_outcomes(&mut self, node: u64) {
        let pending = self.clients.iter_mut().filter_map(|client| client.pending.as_mut());
        for pending in pending.filter(|pending| pending.node == node) {
            pending.must_be_answered &= pending.read.is_some();
        }
    }

    /// Records that a member has refused a proposal, which therefore will never have an effect.
    pub(super) fn record_refusal(&mut self, node: u64, id: u64) -> Result<(), InvariantViolation> {
        self.refused_requests.push(id);
        if let Some(process) = self.nodes[index_of(node)].process.as_mut() {
            process.end_checkpoint(id);
        }
        if self.change_requests.contains(&id) {
            return self.finish_change(node, id, None);
        }
        self.report.refused += 1;
        self.complete_request(node, id);
        Ok(())
    }

    /// Gives up a request whose outcome no client will learn, because the leader that proposed it
    /// has failed.
    pub(super) fn lose_outcome(&mut self, node: u64, id: u64) {
        if let Some((client, _)) = self.find_request(node, id) {
            self.report.lost_outcomes += 1;
            self.schedule_next_request(client);
        }
    }

    pub(super) fn complete_request(&mut self, node: u64, id: u64) {
        if let Some((client, pending)) = self.find_request(node, id) {
            self.clients[client].served += u64::from(pending.must_be_answered);
            self.schedule_next_request(client);
        }
    }

    /// Checks the outcome of a request that a member has applied. Gives the outcome to the client
    /// that waits for it on this member.
    pub(super) fn deliver_outcome(
        &mut self,
        node: u64,
        id: u64,
        outcome: &Outcome,
    ) -> Result<(), InvariantViolation> {
        if self.change_requests.contains(&id) {
            self.report.membership_changes += u64::from(outcome.is_ok());
            return if is_awaited_on(id, node) {
                self.finish_change(node, id, Some(outcome))
            } else {
                Ok(())
            };
        }
        if is_awaited_on(id, NO_CLIENT) {
            if let Some(process) = self.nodes[index_of(node)].process.as_mut() {
                process.end_checkpoint(id);
            }
            return Ok(());
        }
        let revision = header_revision(outcome);
        self.add_to_trace(&[id, revision.unwrap_or(0).unsigned_abs()]);
        let result =
            self.invariants.stores.check_outcome(node, id, is_awaited_on(id, node), outcome)?;
        let has_changed = result.changed;
        let Some((client, pending)) = self.find_request(node, id) else { return Ok(()) };
        if let Some(renewal) = pending.renewal {
            if outcome.is_ok() {
                self.complete_renewal(client, node, renewal, true);
            }
            self.complete_request(node, id);
            return Ok(());
        }
        self.deliver_api_server_outcome(client, outcome);
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
            let effect = if has_changed { RequestEffect::Change } else { RequestEffect::Read };
            self.invariants.clients.check_answer(id, effect, pending.floor, revision)?;
            self.invariants.acks.record_acknowledged(id, revision);
        }
        self.report.writes += 1;
        self.complete_request(node, id);
        Ok(())
    }

    pub(super) fn complete_read(
        &mut self,
        node: u64,
        token: ReadToken,
    ) -> Result<(), InvariantViolation> {
        let Some((client, pending)) = self.find_request(node, token) else { return Ok(()) };
        if let Some(renewal) = pending.renewal {
            self.complete_renewal(client, node, renewal, false);
            self.complete_request(node, token);
            return Ok(());
        }
        let Some(request) = &pending.read else { return Ok(()) };
        let Some(users_revision) = self.users_revision(node) else { return Ok(()) };
        self.invariants.clients.check_permission_revision(
            token,
            pending.users_floor,
            users_revision,
        )?;
        let found = self.read_and_check(node, &pending.user, request)?;
        let revision = found.as_ref().map_or(0, |(revision, _)| *revision);
        self.add_to_trace(&[token, revision.unsigned_abs()]);
        if let Some((revision, found)) = found {
            let effect = RequestEffect::Read;
            self.invariants.clients.check_answer(token, effect, pending.floor, revision)?;
            self.report.reads += 1;
            self.deliver_api_server_read(client, &found)?;
        }
        self.complete_request(node, token);
        Ok(())
    }

    /// Reads a member's store at its present state, and compares the result with the model. Returns
    /// the store's revision and the result. Returns `None` if the disk failed or the user has no
    /// permission.
    fn read_and_check(
        &mut self,
        node: u64,
        user: &RequestUser,
        request: &RangeRequest,
    ) -> Result<Option<(i64, ReadResult)>, InvariantViolation> {
        let Some(process) = self.current_process(node) else { return Ok(None) };
        let view = process.store.view();
        if !self.is_read_permitted(node, &view, user, request)? {
            return Ok(None);
        }
        let Some(process) = self.current_process(node) else { return Ok(None) };
        let found = match process.store.range(&view, request) {
            Ok(response) => Ok(response),
            Err(ReadError::Compacted | ReadError::Superseded) => Err(ApplyError::Compacted),
            Err(ReadError::Future) => Err(ApplyError::FutureRevision),
            Err(ReadError::Store(error)) => {
                let disk = &self.node(node).disk;
                if disk.is_power_off() || disk.has_failed() {
                    return Ok(None);
                }
                return Err(InvariantViolation::new(
                    "stores equal the model",
                    format!("{node}: {error:?}"),
                ));
            }
        };
        self.invariants.stores.check_read(node, &view, request, &found)?;
        Ok(Some((view.revision(), found)))
    }
}
