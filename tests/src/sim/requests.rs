//! Requests of clients to members, and the handling of the answers.

use muster_node::apply::{ApplyError, Outcome, Response};
use muster_node::driver::{Proposal, ReadToken, Refused};
use muster_node::machine::{EntryKind, RequestId};
use muster_node::mvcc::ReadError;
use node_proto::command;
use node_proto::etcdserverpb::{RangeRequest, RangeResponse};

use super::Violation;
use super::clients::{CLIENT_TIMEOUT, Draw, Kind, NOBODY, Operating, is_of, request_id};
use super::invariants::linearizable::Answered;
use super::invariants::store::header_revision;
use super::users::{ROOT, Token, Who};
use super::world::{Event, World, place};

/// A member's answer to a read.
type Found = Result<RangeResponse, ApplyError>;

impl World {
    pub(super) fn client(&mut self, client: usize) -> Result<(), Violation> {
        if self.clients[client].operating.is_some() {
            return Ok(());
        }
        if self.is_content(client) {
            if self.api_server(client).is_some() {
                // A copy may still have to be listed again.
                self.next_operation(client);
            }
            return Ok(());
        }
        let leader = if self.rng.chance(400) { self.leader(0) } else { None };
        let node = leader.unwrap_or_else(|| self.any_voter());
        if self.node(node).live.is_none() {
            self.next_operation(client);
            return Ok(());
        }
        let id = request_id(self.next_id, node);
        self.next_id += 1;
        let floor = self.invariants.clients.floor();
        let users_floor = self.invariants.clients.users_floor();
        let (kind, who, token) = self.asks(client, node, id);
        let Some(caller) = self.identify(node, &who)? else {
            // The user's token proved invalid; the client's next request doesn't use it.
            self.next_operation(client);
            return Ok(());
        };
        self.clients[client].token = token;
        if let Kind::Read { request, linearizable: false } = &kind {
            let found = self.read(node, &who, request)?;
            let revision = found.map_or(0, |(revision, _)| revision);
            self.trace(&[id, revision.unsigned_abs()]);
            self.next_operation(client);
            return Ok(());
        }
        if let Kind::KeepAlive(lease) = kind {
            self.ask_to_keep_alive(client, node, lease);
            return Ok(());
        }
        let read = match &kind {
            Kind::Read { request, .. } => Some(request.clone()),
            Kind::Write { .. } | Kind::KeepAlive(_) => None,
        };
        let must_end = self.must_end(node, matches!(kind, Kind::Write { .. }));
        self.clients[client].operating =
            Some(Operating { id, floor, users_floor, node, read, renewing: None, who, must_end });
        let patience =
            if must_end { CLIENT_TIMEOUT } else { self.rng.range(50_000, CLIENT_TIMEOUT / 3) };
        self.after(patience, Event::ClientTimeout { client, id });
        let life = self.node(node).life;
        let Some(live) = self.live(node, life) else { return Ok(()) };
        let asked = match kind {
            // As in the API: requests that free space are still accepted when disk space is short.
            Kind::Write { grows: true, .. } if live.writer.is_short() => Err(Refused::Full),
            Kind::Write { operation, .. } => {
                let data = command::encode(id, caller.into(), operation);
                let (id, kind) = (RequestId(id), EntryKind::Normal);
                live.mail.propose(Proposal { id, kind, data })
            }
            Kind::Read { .. } | Kind::KeepAlive(_) => live.mail.read(id),
        };
        if asked.is_err() {
            self.report.full_queues += 1;
            return self.was_refused(node, id);
        }
        self.wake(node)
    }

    /// Draws a client's next request and the user it is made as. Also returns the client's token.
    fn asks(&mut self, client: usize, node: u64, id: u64) -> (Kind, Who, Option<Token>) {
        if let Some(server) = self.api_server(client) {
            return (self.api_server_asks(server, id), Who::Named(ROOT), None);
        }
        let known = self.invariants.clients.floor();
        let mut draw = Draw { rng: &mut self.rng, keys: self.plan.keys, known };
        let kind = match self.clients[client].keeps {
            // A client that keeps a lease alive tends to continue.
            Some(lease) if draw.rng.chance(400) => Kind::KeepAlive(lease),
            _ => draw.kind(id),
        };
        let kind = self.or_of_users(node, id, kind);
        let asked = match &kind {
            Kind::Write { operation, .. } => Some(operation),
            Kind::Read { .. } | Kind::KeepAlive(_) => None,
        };
        let token = self.clients[client].token.take();
        let mut draw = Draw { rng: &mut self.rng, keys: self.plan.keys, known };
        let who = draw.who(asked, token.as_ref());
        (kind, who, token)
    }

    /// Ends a client's request, because it was answered or given up, and schedules the next one.
    pub(super) fn next_operation(&mut self, client: usize) {
        self.clients[client].operating = None;
        let pause = if self.api_server(client).is_some() { 40_000 } else { 15_000 };
        // Let many clients start at once now and then, so that proposals share a batch.
        let delay = if self.rng.chance(300) { 500 } else { self.rng.range(500, pause) };
        self.after(delay, Event::Client { client });
    }

    pub(super) fn operation(&self, node: u64, id: u64) -> Option<(usize, Operating)> {
        self.clients.iter().enumerate().find_map(|(client, state)| {
            let operating = state.operating.as_ref()?;
            (operating.id == id && operating.node == node).then(|| (client, operating.clone()))
        })
    }

    pub(super) fn timed_out(&mut self, client: usize, id: u64) -> Result<(), Violation> {
        let Some(operating) = self.clients[client].operating.as_ref() else { return Ok(()) };
        if operating.id != id {
            return Ok(());
        }
        if operating.must_end {
            let what =
                format!("request {id} on {}: no answer, though all was well", operating.node);
            return Err(Violation::new("every request is answered", what));
        }
        self.next_operation(client);
        Ok(())
    }

    /// Records that a member has installed a snapshot. Outcomes of requests in the snapshot reach
    /// no client, so those needn't be answered.
    pub(super) fn outcomes_lost(&mut self, node: u64) {
        let operating = self.clients.iter_mut().filter_map(|client| client.operating.as_mut());
        for operating in operating.filter(|operating| operating.node == node) {
            operating.must_end &= operating.read.is_some();
        }
    }

    /// Records a member's statement that a proposal will never have an effect.
    pub(super) fn was_refused(&mut self, node: u64, id: u64) -> Result<(), Violation> {
        self.refused.push(id);
        if let Some(live) = self.nodes[place(node)].live.as_mut() {
            live.note_ended(id);
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
            self.clients[client].served += u64::from(operating.must_end);
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
    ) -> Result<(), Violation> {
        if self.change_requests.contains(&id) {
            self.report.membership_changes += u64::from(outcome.is_ok());
            return if is_of(id, node) {
                self.change_done(node, id, Some(outcome))
            } else {
                Ok(())
            };
        }
        if is_of(id, NOBODY) {
            if let Some(live) = self.nodes[place(node)].live.as_mut() {
                live.note_ended(id);
            }
            return Ok(());
        }
        let revision = header_revision(outcome);
        self.trace(&[id, revision.unwrap_or(0).unsigned_abs()]);
        let done = self.invariants.stores.answer(node, id, is_of(id, node), outcome)?;
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
                self.clients[client].token = Some(Token::given(id, *index));
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
            let answered = if changed { Answered::Change } else { Answered::Read };
            self.invariants.clients.answered(id, answered, operating.floor, revision)?;
            self.invariants.acks.acknowledged(id, revision);
        }
        self.report.writes += 1;
        self.ended(node, id);
        Ok(())
    }

    pub(super) fn read_done(&mut self, node: u64, token: ReadToken) -> Result<(), Violation> {
        let Some((client, operating)) = self.operation(node, token) else { return Ok(()) };
        if let Some(renewing) = operating.renewing {
            self.renewed(client, node, renewing, false);
            self.ended(node, token);
            return Ok(());
        }
        let Some(request) = &operating.read else { return Ok(()) };
        let Some(by) = self.users_revision(node) else { return Ok(()) };
        self.invariants.clients.judged(token, operating.users_floor, by)?;
        let found = self.read(node, &operating.who, request)?;
        let revision = found.as_ref().map_or(0, |(revision, _)| *revision);
        self.trace(&[token, revision.unsigned_abs()]);
        if let Some((revision, found)) = found {
            let answered = Answered::Read;
            self.invariants.clients.answered(token, answered, operating.floor, revision)?;
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
        who: &Who,
        request: &RangeRequest,
    ) -> Result<Option<(i64, Found)>, Violation> {
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
                if disk.is_off() || disk.has_failed() {
                    return Ok(None);
                }
                return Err(Violation::new("stores hold the model", format!("{node}: {error:?}")));
            }
        };
        self.invariants.stores.read(node, &view, request, &found)?;
        Ok(Some((view.revision(), found)))
    }
}
