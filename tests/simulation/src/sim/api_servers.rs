//! Clients that use the store as Kubernetes' API servers do; two or more of them share the same
//! keys.
//!
//! - Each API server keeps [copies](super::prefix_copy) of two prefixes, and watches them on one
//!   stream.
//! - An API server changes a key only if the store's record equals the record in its copy.
//!   Otherwise it retries with the record that the store returned.
//! - It attaches several keys to each of its leases.
//! - The API servers race to write the key that decides who compacts. The winner compacts at the
//!   revision that it saw in its previous race.

use bytes::Bytes;
use node_proto::command::Operation;
use node_proto::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use node_proto::etcdserverpb::request_op::Request;
use node_proto::etcdserverpb::response_op::Response as Answer;
use node_proto::etcdserverpb::{
    CompactionRequest, Compare, DeleteRangeRequest, LeaseGrantRequest, PutRequest, RangeRequest,
    RangeResponse, RequestOp, TxnRequest, TxnResponse, WatchResponse,
};
use node_proto::mvccpb::KeyValue;
use node_state::apply::{ApplyError, Outcome, Response};
use node_state::mvcc::watch::{EventSelection, Notice, Subscriber};
use prost::Message as _;

use super::InvariantViolation;
use super::clients::ClientRequest;
use super::plan::HistoryPlan;
use super::prefix_copy::{CopyState, PrefixCopy};
use super::simulation::{ScheduledEvent, Simulation, SimulationReport, index_of};
use super::watch_streams::{MAX_EMPTY_POLLS, MAX_POLLS_PER_TURN, poll_once};
use crate::rng::Rng;

const PODS: &str = "/registry/pods/";
/// Prefix of keys that are attached to leases.
const EVENTS: &str = "/registry/events/";
const PREFIXES: [&str; 2] = [PODS, EVENTS];

/// Key that the API servers race for. Its version counts the wins, and its value is a revision.
const COMPACT_KEY: &[u8] = b"compact_rev_key";

/// Number of keys that share a lease before another lease is granted.
const KEYS_PER_LEASE: u64 = 4;

/// Request that an API server waits for.
#[derive(Debug, Default)]
enum Task {
    #[default]
    Nothing,
    /// Request for the next page of a list. The value is the index in [`ApiServer::copies`] of the
    /// copy of a prefix that needs the page.
    Page(usize),
    /// Request for the store's newest revision. The value is the index in [`ApiServer::copies`] of
    /// the copy of a prefix that must reach this revision.
    Newest(usize),
    Grant(i64),
    Change {
        copy: usize,
        key: Bytes,
    },
    Race,
    Compact,
}

/// A client that behaves as one of Kubernetes' API servers.
#[derive(Default)]
pub(super) struct ApiServer {
    copies: Vec<PrefixCopy>,
    stream: Option<Subscriber>,
    /// Machine that the stream is connected to.
    node: u64,
    next_watch: i64,
    /// Whether the API server reads its stream rarely, and little at a time.
    is_slow: bool,
    task: Task,
    /// Change to be retried. The parts are the index of the prefix's copy in `copies`, the key, and
    /// the record that the store has.
    retry: Option<(usize, Bytes, Option<KeyValue>)>,
    /// Lease for new keys, and the number of keys that may still be attached to it.
    lease: Option<(i64, u64)>,
    /// Virtual time of the API server's next race for the right to compact.
    next_race_at: u64,
    /// Version that [`COMPACT_KEY`] had after the API server's last race for the right to compact.
    race_key_version: i64,
    /// Revision of the store at the API server's last race for the right to compact.
    last_race_revision: i64,
    /// Revision to compact at; set after the API server has won a race for the right to compact.
    compact_at: Option<i64>,
}

fn put(key: Bytes, value: Vec<u8>, lease: i64) -> Request {
    let value = value.into();
    Request::RequestPut(PutRequest { key, value, lease, ..PutRequest::default() })
}

fn get(key: Bytes) -> Request {
    Request::RequestRange(RangeRequest { key, ..RangeRequest::default() })
}

/// Returns a transaction that runs `then` if `key` satisfies `union`, and reads the key otherwise.
fn conditional_txn(
    key: &Bytes,
    target: CompareTarget,
    union: TargetUnion,
    then: Request,
) -> ClientRequest {
    let compare = Compare {
        result: CompareResult::Equal.into(),
        target: target.into(),
        key: key.clone(),
        target_union: Some(union),
        ..Compare::default()
    };
    let one = |request| vec![RequestOp { request: Some(request) }];
    let failure = one(get(key.clone()));
    let operation =
        Operation::Txn(TxnRequest { compare: vec![compare], success: one(then), failure });
    ClientRequest::Write { operation, grows: true }
}

/// Returns the record that a transaction read because its comparison didn't hold.
fn conflicting_record(txn: &TxnResponse) -> Option<KeyValue> {
    match txn.responses.first()?.response.as_ref()? {
        Answer::ResponseRange(range) => range.kvs.first().cloned(),
        _ => None,
    }
}

impl ApiServer {
    pub(super) fn new(rng: &mut Rng, plan: &HistoryPlan) -> Self {
        Self {
            copies: PREFIXES.into_iter().map(PrefixCopy::new).collect(),
            is_slow: rng.chance(300),
            next_race_at: rng.range(0, plan.compact_every),
            ..Self::default()
        }
    }

    /// Drops the stream if it is connected to this machine, whose member is gone.
    pub(super) fn disconnect(&mut self, node: u64) {
        if self.node == node {
            self.stream = None;
        }
    }

    /// Makes the API server read everything available from now on.
    pub(super) fn read_without_delay(&mut self) {
        self.is_slow = false;
    }

    /// Ends the races to compact. After the faults, an API server whose list takes longer than two
    /// races would otherwise begin the list again for ever.
    pub(super) fn end_races(&mut self) {
        self.next_race_at = u64::MAX;
    }

    /// Restarts the API server's process, which forgets its copies.
    fn restart(&mut self) {
        let copies = PREFIXES.into_iter().map(PrefixCopy::new).collect();
        let (next_watch, is_slow, next_race_at) =
            (self.next_watch, self.is_slow, self.next_race_at);
        *self = Self { copies, next_watch, is_slow, next_race_at, ..Self::default() };
    }

    pub(super) fn is_listing(&self) -> bool {
        !self.copies.iter().all(PrefixCopy::is_listed)
    }

    /// Returns whether the API server's copies have reached this revision.
    pub(super) fn is_at(&self, revision: i64) -> bool {
        self.copies.iter().all(|copy| copy.is_at(revision))
    }

    /// Draws the next request of the API server.
    fn draw_request(
        &mut self,
        rng: &mut Rng,
        plan: &HistoryPlan,
        now: u64,
        id: u64,
    ) -> ClientRequest {
        if let Some(revision) = self.compact_at.take() {
            self.task = Task::Compact;
            let operation = Operation::Compact(CompactionRequest { revision, physical: false });
            return ClientRequest::Write { operation, grows: false };
        }
        if now >= self.next_race_at {
            self.next_race_at = now + plan.compact_every;
            self.task = Task::Race;
            let key = Bytes::from_static(COMPACT_KEY);
            let then = put(key.clone(), self.last_race_revision.to_string().into(), 0);
            let union = TargetUnion::Version(self.race_key_version);
            return conditional_txn(&key, CompareTarget::Version, union, then);
        }
        let unlisted = self.copies.iter().position(|copy| !copy.is_listed());
        if let Some(copy) = unlisted
            && rng.chance(800)
        {
            self.task = Task::Page(copy);
            let request = self.copies[copy].page(plan.page_keys);
            return ClientRequest::Read { request, linearizable: true };
        }
        if let Some((copy, key, found)) = self.retry.take() {
            return self.draw_change(rng, id, (copy, key), found);
        }
        let copy = rng.pick(self.copies.len());
        if rng.chance(100) {
            self.task = Task::Newest(copy);
            let request = RangeRequest { revision: 0, ..self.copies[copy].page(1) };
            return ClientRequest::Read { request, linearizable: true };
        }
        let key = self.copies[copy].key(rng.range(0, plan.keys_per_prefix));
        let record = self.copies[copy].get(&key).cloned();
        self.draw_change(rng, id, (copy, key), record)
    }

    /// Draws a change of a key. `record` is the key's record, as far as the API server knows it.
    fn draw_change(
        &mut self,
        rng: &mut Rng,
        id: u64,
        (copy, key): (usize, Bytes),
        record: Option<KeyValue>,
    ) -> ClientRequest {
        let mut lease = 0;
        if PREFIXES[copy] == EVENTS {
            let Some((granted, left @ 1..)) = self.lease else {
                let id = i64::try_from(id).expect("few");
                self.task = Task::Grant(id);
                let ttl = 1 + i64::try_from(rng.range(0, 3)).expect("small");
                let operation = Operation::LeaseGrant(LeaseGrantRequest { id, ttl });
                return ClientRequest::Write { operation, grows: true };
            };
            lease = granted;
            self.lease = Some((granted, left - 1));
        }
        let revision = record.as_ref().map_or(0, |kv| kv.mod_revision);
        let then = if record.is_some() && rng.chance(200) {
            let key = key.clone();
            Request::RequestDeleteRange(DeleteRangeRequest { key, ..DeleteRangeRequest::default() })
        } else {
            let mut value = id.to_be_bytes().to_vec();
            value.resize(8 + rng.pick(200), 1);
            put(key.clone(), value, lease)
        };
        let request =
            conditional_txn(&key, CompareTarget::Mod, TargetUnion::ModRevision(revision), then);
        self.task = Task::Change { copy, key };
        request
    }

    /// Handles the outcome of the API server's last request.
    fn handle_outcome(&mut self, outcome: &Outcome, report: &mut SimulationReport) {
        match (std::mem::take(&mut self.task), outcome) {
            (Task::Grant(lease), Ok(_)) => self.lease = Some((lease, KEYS_PER_LEASE)),
            (Task::Change { .. }, Err(ApplyError::LeaseNotFound)) => self.lease = None,
            (Task::Change { copy, key }, Ok(Response::Txn(txn))) => {
                report.updates += u64::from(txn.succeeded);
                report.updates_conflicted += u64::from(!txn.succeeded);
                self.retry = (!txn.succeeded).then(|| (copy, key, conflicting_record(txn)));
            }
            (Task::Race, Ok(Response::Txn(txn))) => {
                report.races_won += u64::from(txn.succeeded);
                report.races_lost += u64::from(!txn.succeeded);
                self.compact_at =
                    Some(self.last_race_revision).filter(|revision| txn.succeeded && *revision > 0);
                let found = || conflicting_record(txn).map_or(0, |kv| kv.version);
                self.race_key_version =
                    if txn.succeeded { self.race_key_version + 1 } else { found() };
                self.last_race_revision = txn.header.as_ref().map_or(0, |header| header.revision);
            }
            (Task::Compact, Ok(_)) => report.races_compacted += 1,
            _ => {}
        }
    }

    fn connect(&mut self, stream: Subscriber, node: u64) {
        self.stream = Some(stream);
        self.node = node;
        self.copies.iter_mut().for_each(|copy| copy.watch = None);
    }

    /// Starts a watch for each prefix whose copy is completely listed, from the copy's revision on.
    /// Ends the watches of all other copies.
    fn watch(&mut self) {
        let Some(stream) = &mut self.stream else { return };
        for copy in &mut self.copies {
            match copy.watch {
                Some(id) if !copy.is_listed() => {
                    poll_once(stream.remove(id));
                    copy.watch = None;
                }
                None if copy.is_listed() => {
                    self.next_watch += 1;
                    stream.add(self.next_watch, copy.spec());
                    copy.watch = Some(self.next_watch);
                }
                _ => {}
            }
        }
    }

    fn copy_of_watch(&mut self, id: i64) -> Option<&mut PrefixCopy> {
        self.copies.iter_mut().find(|copy| copy.watch == Some(id))
    }
}

impl std::fmt::Debug for ApiServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(&self.copies).finish()
    }
}

/// Decodes events, with previous values, as they are sent to clients.
fn decode(
    selection: &EventSelection,
    store: &node_state::mvcc::Store,
) -> Result<WatchResponse, InvariantViolation> {
    let bytes = selection.encoded_with_previous(store).concat();
    let response = WatchResponse::decode(&bytes[..]);
    response.map_err(|error| {
        InvariantViolation::new("copies", format!("events can't be read: {error}"))
    })
}

impl Simulation {
    /// Returns the index in `servers` of the API server with this client number. Returns `None` for
    /// a client of another kind.
    pub(super) fn api_server_index(&self, client: usize) -> Option<usize> {
        client.checked_sub(self.plan.clients)
    }

    pub(super) fn draw_api_server_request(&mut self, server: usize, id: u64) -> ClientRequest {
        let Self { servers, rng, plan, now, .. } = self;
        servers[server].draw_request(rng, plan, *now, id)
    }

    pub(super) fn deliver_api_server_outcome(&mut self, client: usize, outcome: &Outcome) {
        if let Some(server) = self.api_server_index(client) {
            self.servers[server].handle_outcome(outcome, &mut self.report);
        }
    }

    /// Takes the answer to an API server's read.
    pub(super) fn deliver_api_server_read(
        &mut self,
        client: usize,
        found: &Result<RangeResponse, ApplyError>,
    ) -> Result<(), InvariantViolation> {
        let Some(server) = self.api_server_index(client) else { return Ok(()) };
        let server = &mut self.servers[server];
        let revision = found.as_ref().ok().and_then(|found| found.header.as_ref());
        match std::mem::take(&mut server.task) {
            Task::Page(copy) => {
                let model = &self.invariants.stores.model;
                let state = server.copies[copy].take_page(model, found)?;
                self.report.pages += 1;
                self.report.lists += u64::from(state == CopyState::Checked);
                self.report.count_copy_state(state);
            }
            Task::Newest(copy) => {
                server.copies[copy].wanted_revision = revision.map_or(0, |header| header.revision);
            }
            _ => {}
        }
        Ok(())
    }

    /// Lets an API server poll its watch stream several times, and schedules when it polls again.
    pub(super) fn run_api_server_stream(
        &mut self,
        number: usize,
    ) -> Result<(), InvariantViolation> {
        let max_delay = if self.servers[number].is_slow { 200_000 } else { 12_000 };
        let delay = self.rng.range(400, max_delay);
        self.schedule(delay, ScheduledEvent::ApiServer { server: number });
        // After the faults no API server restarts. One that restarted every second would list for
        // ever.
        if !self.are_faults_over && self.rng.chance(20) {
            self.servers[number].stream = None;
            if self.rng.chance(400) {
                self.servers[number].restart();
            }
        }
        if self.servers[number].stream.is_none() {
            let node = self.random_voter();
            let Some(process) = &self.nodes[index_of(node)].process else { return Ok(()) };
            let stream = process.watches.subscribe();
            self.servers[number].connect(stream, node);
        }
        let Self { servers, rng, report, .. } = self;
        let server = &mut servers[number];
        server.watch();
        let is_behind = server.copies.iter().any(|copy| !copy.is_at(copy.wanted_revision));
        let Some(stream) = &mut server.stream else { return Ok(()) };
        if rng.chance(if is_behind { 700 } else { 80 }) {
            report.progress_requests += u64::from(poll_once(stream.request_progress()).is_some());
        }
        if rng.chance(80) {
            poll_once(stream.request_periodic_progress());
        }
        let max_polls = if server.is_slow { 2 } else { MAX_POLLS_PER_TURN };
        let node = server.node;
        let mut empty_polls = 0;
        for _ in 0..max_polls {
            let Some(stream) = &mut self.servers[number].stream else { break };
            match poll_once(stream.next()) {
                Some(Ok(notice)) => self.handle_api_server_notice(number, notice)?,
                // The member's store can't be read any more, so the member's process will end in a
                // moment.
                Some(Err(_)) => self.servers[number].stream = None,
                None => empty_polls += 1,
            }
            if empty_polls == MAX_EMPTY_POLLS {
                break;
            }
        }
        self.wake_hub(node);
        Ok(())
    }

    fn handle_api_server_notice(
        &mut self,
        number: usize,
        notice: Notice,
    ) -> Result<(), InvariantViolation> {
        let Self { servers, nodes, invariants, report, .. } = self;
        let (server, model) = (&mut servers[number], &invariants.stores.model);
        report.notices += 1;
        match notice {
            Notice::Events { watch_id, selection, .. } => {
                let node = &nodes[index_of(server.node)];
                let Some(process) = &node.process else { return Ok(()) };
                let response = decode(&selection, &process.store)?;
                let is_readable = !node.disk.is_power_off() && !node.disk.has_failed();
                let Some(copy) = server.copy_of_watch(watch_id) else { return Ok(()) };
                report.count_copy_state(copy.take_events(model, response.events, is_readable)?);
            }
            Notice::Progress { revision } => {
                for copy in server.copies.iter_mut().filter(|copy| copy.watch.is_some()) {
                    report.count_copy_state(copy.take_progress(model, revision)?);
                }
            }
            Notice::WatchProgress { watch_id, revision } => {
                let Some(copy) = server.copy_of_watch(watch_id) else { return Ok(()) };
                report.count_copy_state(copy.take_progress(model, revision)?);
            }
            Notice::Compacted { watch_id, compact_revision } => {
                let Some(copy) = server.copy_of_watch(watch_id) else { return Ok(()) };
                report.count_copy_state(copy.take_compaction(compact_revision)?);
            }
        }
        server.watch();
        Ok(())
    }
}
