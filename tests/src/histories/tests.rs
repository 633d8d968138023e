//! Tests that each rule detects its violation, and that correct histories pass.

mod watches;

use bytes::Bytes;
use node_proto::authpb::{Permission, permission};
use node_proto::command::{self, AuthChange, Operation};
use node_proto::etcdserverpb::compare::{CompareTarget, TargetUnion};
use node_proto::etcdserverpb::request_op::Request as Op;
use node_proto::etcdserverpb::watch_create_request::FilterType;
use node_proto::etcdserverpb::{
    AuthEnableRequest, AuthRoleAddRequest, AuthRoleGrantPermissionRequest,
    AuthUserGrantRoleRequest, Compare, DeleteRangeRequest, LeaseGrantRequest, LeaseRevokeRequest,
    PutRequest, RangeRequest, RequestOp, ResponseHeader, TxnRequest, WatchCreateRequest,
    WatchResponse,
};
use node_proto::mvccpb::{Event, event::EventType};
use node_state::apply::{Outcome, Response};
use node_state::auth::{AuthOperation, Password};
use node_state::mvcc::Revision;
use node_state::state_machine::{CommittedEntry, EntryKind, Position};
use tonic::Code;

use super::{
    Answer, HistoryReport, RecordedHistory, RecordedStream, Request, RequestOutcome,
    RequestedOperation, Rule, RuleViolation, Time, Watcher, caller, judge,
};
use crate::model::{KeyChange, ReferenceModel, StoreRevisions};

const SECOND: Time = 1_000_000_000;

/// Changes a correct history into a wrong one.
type HistoryMutation = fn(&mut RecordedHistory);

/// Builds a correct history, whose requests follow one another on the model.
#[derive(Default)]
struct HistoryBuilder {
    history: RecordedHistory,
    model: ReferenceModel,
    entries: u64,
    now: Time,
    user: Option<&'static str>,
}

impl HistoryBuilder {
    /// Adds a request and the model's answer. Returns the number of the request.
    fn add_answered(&mut self, operation: impl Into<RequestedOperation>) -> usize {
        let operation = operation.into();
        let answer = match &operation {
            RequestedOperation::Write(operation) => {
                let outcome = self.apply(operation.clone());
                Answer::Write(outcome.expect("the model carries the request out"))
            }
            RequestedOperation::Read(request) => {
                let state =
                    StoreRevisions { revision: self.model.newest_revision(), compacted: -1 };
                Answer::Read(self.model.range(state, request).expect("the model has this range"))
            }
        };
        let end = self.now + 2;
        self.add_request(operation, RequestOutcome::Answered { end, answer })
    }

    /// Adds a write that is carried out, but whose outcome is unknown.
    fn add_applied_unknown(&mut self, operation: Operation) -> usize {
        self.apply(operation.clone()).expect("the model carries the request out");
        self.add_unapplied_unknown(operation)
    }

    /// Adds a write that is not carried out, and whose outcome is unknown.
    fn add_unapplied_unknown(&mut self, operation: Operation) -> usize {
        self.add_request(
            RequestedOperation::Write(operation),
            RequestOutcome::Unknown { text: "no answer".to_owned() },
        )
    }

    fn add_refused(&mut self, operation: impl Into<RequestedOperation>, code: Code) -> usize {
        let outcome = RequestOutcome::Refused { end: self.now + 2, code, text: "no".to_owned() };
        self.add_request(operation.into(), outcome)
    }

    fn add_request(&mut self, operation: RequestedOperation, outcome: RequestOutcome) -> usize {
        let begin = self.now + 1;
        self.now += 3;
        let user = self.user.map(str::to_owned);
        self.history.requests.push(Request {
            client: 0,
            member: 0,
            user,
            begin,
            operation,
            outcome,
        });
        self.history.requests.len() - 1
    }

    fn apply(&mut self, operation: Operation) -> Outcome {
        self.entries += 1;
        let position = Position { index: self.entries, term: 1 };
        let data = command::encode(self.entries, caller(self.user), operation);
        self.model.apply(&CommittedEntry { position, kind: EntryKind::Normal, data });
        self.model.result_of(self.entries).expect("it was applied").outcome.clone()
    }

    /// Creates one user for each of these prefixes, with the prefix as name, and `root`. Enables
    /// auth.
    fn users(&mut self, prefixes: &[&'static str]) {
        let mut changes = Vec::new();
        for name in prefixes.iter().chain(&["root"]).map(|name| (*name).to_owned()) {
            let password = Password { name: name.clone(), ..Password::default() };
            changes.push(AuthOperation::UserAdd(password));
            changes.push(AuthOperation::RoleAdd(AuthRoleAddRequest { name: name.clone() }));
            let (user, role) = (name.clone(), name.clone());
            changes.push(AuthOperation::UserGrantRole(AuthUserGrantRoleRequest { user, role }));
            let perm = Some(Permission {
                perm_type: permission::Type::Readwrite.into(),
                key: Bytes::from(format!("{name}/")),
                range_end: Bytes::from(format!("{name}0")),
            });
            let grant = AuthRoleGrantPermissionRequest { name, perm };
            changes.push(AuthOperation::RoleGrantPermission(grant));
        }
        changes.push(AuthOperation::Enable(AuthEnableRequest {}));
        for change in &changes {
            let change = Some(change.clone());
            self.apply(Operation::ChangeAuth(AuthChange { change }))
                .expect("the changes are in a valid order");
        }
        self.history.users = changes;
    }

    /// Adds a watcher of all revisions. It watches the first half at one member, and the second
    /// half at another member.
    fn add_watcher(&mut self, user: Option<&str>, request: WatchCreateRequest) {
        let at = self.now;
        let last = self.model.newest_revision();
        let middle = last / 2;
        let mut streams = Vec::new();
        for (member, from, to) in [(0, 1, middle), (1, middle + 1, last)] {
            let mut responses =
                vec![(at, WatchResponse { created: true, ..response(to, Vec::new()) })];
            for revision in from..=to {
                let events = self.events(&request, revision);
                if !events.is_empty() {
                    responses.push((at, response(revision, events)));
                }
            }
            responses.push((at, response(to, Vec::new())));
            streams.push(RecordedStream { member, start_revision: from, responses });
        }
        let user = user.map(str::to_owned);
        self.history.watchers.push(Watcher { user, request, streams });
    }

    fn events(&self, request: &WatchCreateRequest, revision: i64) -> Vec<Event> {
        let changes = self.model.changes_after(Revision { main: revision - 1, sub: u32::MAX });
        let now = changes.iter().take_while(|change| change.revision.main == revision);
        let is_wanted = |change: &&KeyChange| {
            let filter = if change.is_put { FilterType::Noput } else { FilterType::Nodelete };
            let is_everything = request.range_end[..] == [0];
            (is_everything || change.kv.key == request.key)
                && !request.filters.contains(&filter.into())
        };
        now.filter(is_wanted).map(|change| self.event(change, request.prev_kv)).collect()
    }

    fn event(&self, change: &KeyChange, prev_kv: bool) -> Event {
        let kind = if change.is_put { EventType::Put } else { EventType::Delete };
        let before =
            self.model.live_record(&change.kv.key, change.revision.main - 1).filter(|_| prev_kv);
        Event { r#type: kind.into(), kv: Some(change.kv.clone()), prev_kv: before.cloned() }
    }

    /// Adds a watcher of all keys, and returns the history.
    fn finish(mut self) -> RecordedHistory {
        let user = self.history.users.first().map(|_| "root");
        self.add_watcher(user, WatchCreateRequest { prev_kv: true, ..everything() });
        self.history.last_revision = self.model.newest_revision();
        self.history
    }
}

impl From<Operation> for RequestedOperation {
    fn from(operation: Operation) -> Self {
        Self::Write(operation)
    }
}

impl From<RangeRequest> for RequestedOperation {
    fn from(request: RangeRequest) -> Self {
        Self::Read(request)
    }
}

fn response(revision: i64, events: Vec<Event>) -> WatchResponse {
    let header = Some(ResponseHeader { revision, ..ResponseHeader::default() });
    WatchResponse { header, events, ..WatchResponse::default() }
}

fn everything() -> WatchCreateRequest {
    let zero = Bytes::from_static(b"\0");
    WatchCreateRequest { key: zero.clone(), range_end: zero, ..WatchCreateRequest::default() }
}

fn put(key: &'static str, value: &'static str) -> Operation {
    put_with(key, value, 0)
}

fn put_with(key: &'static str, value: &'static str, lease: i64) -> Operation {
    let (key, value) = (key.into(), value.into());
    Operation::Put(PutRequest { key, value, lease, prev_kv: true, ..PutRequest::default() })
}

fn delete(key: &'static str) -> Operation {
    let key = key.into();
    Operation::DeleteRange(DeleteRangeRequest { key, prev_kv: true, ..Default::default() })
}

fn grant(id: i64, ttl: i64) -> Operation {
    Operation::LeaseGrant(LeaseGrantRequest { id, ttl })
}

fn revoke(id: i64) -> Operation {
    Operation::LeaseRevoke(LeaseRevokeRequest { id })
}

fn read(key: &'static str) -> RangeRequest {
    RangeRequest { key: key.into(), ..RangeRequest::default() }
}

/// Returns a transaction that puts two keys if `key` has this version, and otherwise reads `key`.
fn txn(key: &'static str, version: i64, values: [&'static str; 2]) -> Operation {
    let compare = vec![Compare {
        target: CompareTarget::Version.into(),
        key: key.into(),
        target_union: Some(TargetUnion::Version(version)),
        ..Compare::default()
    }];
    let put = |key: &'static str, value: &'static str| {
        let request = PutRequest { key: key.into(), value: value.into(), ..PutRequest::default() };
        RequestOp { request: Some(Op::RequestPut(request)) }
    };
    let success = vec![put(key, values[0]), put("other", values[1])];
    let failure = vec![RequestOp { request: Some(Op::RequestRange(read(key))) }];
    Operation::Txn(TxnRequest { compare, success, failure })
}

fn violated_rule(history: &RecordedHistory) -> Rule {
    let RuleViolation { rule, .. } = judge(history).expect_err("it is wrong");
    rule
}

/// Returns the header of an answered write.
fn header(history: &mut RecordedHistory, request: usize) -> &mut ResponseHeader {
    let RequestOutcome::Answered { answer: Answer::Write(answer), .. } =
        &mut history.requests[request].outcome
    else {
        panic!("a write that was answered")
    };
    let header = match answer {
        Response::Put(answer) => &mut answer.header,
        Response::LeaseRevoke(answer) => &mut answer.header,
        _ => panic!("a put or a lease's end"),
    };
    header.as_mut().expect("it has one")
}

fn found(
    history: &mut RecordedHistory,
    request: usize,
) -> &mut node_proto::etcdserverpb::RangeResponse {
    match &mut history.requests[request].outcome {
        RequestOutcome::Answered { answer: Answer::Read(found), .. } => found,
        other => panic!("{other:?} of a read"),
    }
}

#[test]
fn a_correct_history_passes() {
    let mut builder = HistoryBuilder::default();
    builder.add_answered(put("a", "1"));
    builder.add_answered(read("a"));
    builder.add_answered(txn("a", 1, ["2", "3"]));
    builder.add_answered(txn("a", 1, ["4", "5"]));
    builder.add_answered(delete("nothing"));
    builder.add_answered(grant(7, 600));
    builder.add_answered(grant(8, 600));
    builder.add_answered(revoke(8));
    builder.add_answered(put_with("b", "6", 7));
    builder.add_unapplied_unknown(put("a", "7"));
    builder.add_applied_unknown(put("a", "8"));
    builder.add_applied_unknown(delete("a"));
    builder.add_answered(revoke(7));
    builder.add_refused(put_with("b", "9", 7), Code::NotFound);
    builder.add_answered(RangeRequest { revision: 3, range_end: "c".into(), ..read("a") });
    let no_puts = vec![FilterType::Noput.into()];
    builder.add_watcher(None, WatchCreateRequest { filters: no_puts, ..everything() });
    builder
        .add_watcher(None, WatchCreateRequest { key: "a".into(), ..WatchCreateRequest::default() });
    let report = judge(&builder.finish()).expect("it is right");
    let (answered, refused, unknown, happened) = (11, 1, 3, 2);
    // One watcher receives all 7 changes, another receives only the 2 deletes, and a third receives
    // only the 4 changes of "a".
    let (terms, resumed, events) = (1, 3, 7 + 2 + 4);
    let expected =
        HistoryReport { answered, refused, denied: 0, unknown, happened, terms, resumed, events };
    assert_eq!(report, expected);
}

/// Returns a history with puts, reads, and a transaction that changes two keys.
fn sample_history() -> RecordedHistory {
    let mut builder = HistoryBuilder::default();
    builder.add_answered(put("a", "1"));
    builder.add_answered(put("b", "2"));
    builder.add_answered(read("a"));
    builder.add_answered(put("a", "3"));
    builder.add_answered(read("a"));
    builder.add_answered(txn("a", 2, ["4", "5"]));
    builder.add_answered(put("c", "6"));
    builder.finish()
}

const FIRST_READ: usize = 2;
const SECOND_PUT: usize = 3;
const SECOND_READ: usize = 4;
const TXN: usize = 5;
const LAST_PUT: usize = 6;

#[test]
fn the_sample_history_passes() {
    judge(&sample_history()).expect("the sample is correct");
}

#[test]
fn a_lost_write_is_found() {
    // A deposed leader acknowledged the put of "a". The next leader gave the same revision to the
    // put of "b".
    let mut builder = HistoryBuilder::default();
    let lost = builder.add_answered(put("a", "1"));
    let mut other = HistoryBuilder { now: builder.now, ..HistoryBuilder::default() };
    other.add_answered(put("b", "2"));
    let mut history = other.finish();
    history.requests.push(builder.history.requests[lost].clone());
    assert_eq!(violated_rule(&history), Rule::OneRequestPerRevision);
    // The history now ends at revision 3, which no request in it made.
    let mut builder = HistoryBuilder::default();
    builder.add_answered(put("a", "1"));
    let mut history = builder.finish();
    history.watchers.clear();
    history.last_revision = 3;
    assert_eq!(violated_rule(&history), Rule::EveryRevisionHasCause);
}

#[test]
fn a_stale_read_is_found_unless_it_is_serializable_or_concurrent() {
    let mut history = sample_history();
    let stale_outcome = history.requests[FIRST_READ].outcome.clone();
    let RequestOutcome::Answered { answer, .. } = stale_outcome else {
        panic!("the first read was answered")
    };
    let second = &mut history.requests[SECOND_READ];
    let RequestOutcome::Answered { answer: second_answer, .. } = &mut second.outcome else {
        panic!("the second read was answered")
    };
    *second_answer = answer;
    assert_eq!(violated_rule(&history), Rule::RealTime);
    let RequestedOperation::Read(request) = &mut history.requests[SECOND_READ].operation else {
        panic!("a read")
    };
    request.serializable = true;
    judge(&history).expect("a serializable read may be stale");
    // The read now begins before the change was known, so its answer may lack the change.
    let RequestedOperation::Read(request) = &mut history.requests[SECOND_READ].operation else {
        panic!("a read")
    };
    request.serializable = false;
    history.requests[SECOND_READ].begin = history.requests[SECOND_PUT].begin;
    judge(&history).expect("a concurrent read may lack the change");
}

#[test]
fn a_read_older_than_what_a_watcher_had_received_is_found() {
    let mut history = sample_history();
    let began = history.requests[FIRST_READ].begin;
    for (at, response) in &mut history.watchers[0].streams[0].responses {
        let header = response.header.as_ref().expect("it has one");
        // Move the responses at revision 3 to before the read, which is answered at revision 3 too.
        *at = if header.revision == 3 { began - 1 } else { *at };
    }
    judge(&history).expect("the watcher knew no newer revision than the read");
    let (at, _) = &mut history.watchers[0].streams[1].responses[1];
    *at = began - 1;
    assert_eq!(violated_rule(&history), Rule::RealTime);
}

#[test]
fn a_write_ordered_before_one_that_had_ended_is_found() {
    let mut builder = HistoryBuilder::default();
    builder.add_answered(put("a", "1"));
    builder.add_answered(put("b", "2"));
    let mut history = builder.finish();
    history.requests.swap(0, 1);
    let (first, second) = (history.requests[0].begin, history.requests[1].begin);
    history.requests[0].begin = second;
    history.requests[1].begin = first;
    let ends = [1, 0].map(|request| history.requests[request].end().expect("it was answered"));
    for (request, at) in history.requests.iter_mut().zip(ends) {
        let RequestOutcome::Answered { end, .. } = &mut request.outcome else {
            panic!("it was answered")
        };
        *end = at;
    }
    assert_eq!(violated_rule(&history), Rule::RealTime);
}

#[test]
fn an_answer_that_differs_from_the_models_is_found() {
    let wrong: [HistoryMutation; 8] = [
        |history| found(history, FIRST_READ).kvs[0].value = "0".into(),
        |history| found(history, FIRST_READ).kvs[0].version = 2,
        |history| found(history, FIRST_READ).kvs[0].lease = 1,
        |history| found(history, FIRST_READ).kvs[0].create_revision = 1,
        |history| found(history, FIRST_READ).kvs.clear(),
        |history| found(history, FIRST_READ).count = 2,
        |history| found(history, FIRST_READ).more = true,
        |history| {
            let RequestOutcome::Answered { answer: Answer::Write(Response::Put(answer)), .. } =
                &mut history.requests[SECOND_PUT].outcome
            else {
                panic!("an answered put")
            };
            answer.prev_kv.as_mut().expect("there was one").value = "0".into();
        },
    ];
    for change in wrong {
        let mut history = sample_history();
        change(&mut history);
        assert_eq!(violated_rule(&history), Rule::AnswersMatchModel);
    }
}

#[test]
fn a_transaction_that_took_the_wrong_branch_is_found() {
    let mut history = sample_history();
    let RequestedOperation::Write(Operation::Txn(operation)) = &mut history.requests[TXN].operation
    else {
        panic!("a transaction")
    };
    operation.compare[0].target_union = Some(TargetUnion::Version(3));
    assert_eq!(violated_rule(&history), Rule::AnswersMatchModel);
}

#[test]
fn a_revision_that_no_request_made_is_found() {
    let mut history = sample_history();
    header(&mut history, LAST_PUT).revision += 1;
    history.last_revision += 1;
    assert_eq!(violated_rule(&history), Rule::AtMostOnce, "its value stands at another revision");
    history.watchers.clear();
    assert_eq!(violated_rule(&history), Rule::EveryRevisionHasCause);
    let mut history = sample_history();
    history.requests.remove(LAST_PUT);
    assert_eq!(violated_rule(&history), Rule::EveryRevisionHasCause, "nobody put that value");
    let mut history = sample_history();
    header(&mut history, LAST_PUT).revision += 1;
    assert_eq!(violated_rule(&history), Rule::RealTime, "it is newer than the newest");
}

#[test]
fn a_refused_request_that_was_carried_out_is_found() {
    let mut history = sample_history();
    let (end, code, text) = (u64::MAX, Code::PermissionDenied, "no".to_owned());
    history.requests[LAST_PUT].outcome = RequestOutcome::Refused { end, code, text };
    assert_eq!(violated_rule(&history), Rule::AtMostOnce);
}

#[test]
fn a_write_without_an_answer_is_placed_where_its_value_was_seen() {
    let unknown = || RequestOutcome::Unknown { text: String::new() };
    let mut history = sample_history();
    history.requests[LAST_PUT].outcome = unknown();
    history.requests[TXN].outcome = unknown();
    assert_eq!(judge(&history).expect("both writes can be placed").happened, 2);
    // A write must not happen before its request was sent.
    history.requests[TXN].outcome = sample_history().requests[TXN].outcome.clone();
    history.requests[SECOND_PUT].outcome = unknown();
    history.requests[SECOND_PUT].begin = history.requests[LAST_PUT].begin;
    assert_eq!(violated_rule(&history), Rule::RealTime);
}

#[test]
fn a_request_carried_out_twice_is_found() {
    let mut builder = HistoryBuilder::default();
    builder.add_applied_unknown(put("a", "1"));
    builder.add_applied_unknown(put("a", "1"));
    let mut history = builder.finish();
    history.requests.pop();
    assert_eq!(violated_rule(&history), Rule::AtMostOnce);
}

#[test]
fn each_delete_without_a_known_cause_needs_its_own_lost_request() {
    let mut builder = HistoryBuilder::default();
    for (value, again) in [("1", "2"), ("3", "4")] {
        builder.add_answered(put("a", value));
        builder.add_answered(put("b", again));
        // The first delete removes only "a". The second delete removes only "b" then, but would
        // remove both keys if it were applied first.
        builder.add_applied_unknown(delete("a"));
        let both =
            DeleteRangeRequest { key: "a".into(), range_end: "c".into(), ..Default::default() };
        builder.add_applied_unknown(Operation::DeleteRange(both));
    }
    let mut history = builder.finish();
    judge(&history).expect("four requests for four deletes");
    history.requests.retain({
        let mut left = 3;
        move |request| {
            !request.is_unknown() || {
                left -= 1;
                left >= 0
            }
        }
    });
    assert_eq!(violated_rule(&history), Rule::AtMostOnce, "three requests for four deletes");
}

#[test]
fn a_delete_that_no_request_made_is_found() {
    let mut builder = HistoryBuilder::default();
    builder.add_answered(put("a", "1"));
    builder.add_applied_unknown(delete("a"));
    let mut history = builder.finish();
    let operation = history.requests.pop().expect("it is the last");
    assert_eq!(violated_rule(&history), Rule::EveryRevisionHasCause);
    let (end, code, text) = (operation.begin, Code::NotFound, String::new());
    history
        .requests
        .push(Request { outcome: RequestOutcome::Refused { end, code, text }, ..operation });
    assert_eq!(violated_rule(&history), Rule::EveryRevisionHasCause, "it was refused");
}

/// Returns a history with a key whose lease is revoked, and a later read of the key.
fn history_with_lease() -> RecordedHistory {
    let mut builder = HistoryBuilder::default();
    builder.add_answered(grant(7, 600));
    builder.add_answered(put_with("a", "1", 7));
    builder.add_answered(revoke(7));
    builder.add_answered(read("a"));
    builder.finish()
}

#[test]
fn a_key_that_outlives_its_lease_is_found() {
    let mut history = history_with_lease();
    judge(&history).expect("it is right");
    let mut alive = HistoryBuilder::default();
    alive.add_answered(grant(7, 600));
    alive.add_answered(put_with("a", "1", 7));
    alive.add_answered(read("a"));
    let mut kept = alive.finish();
    let revived = found(&mut kept, 2).kvs.clone();
    *found(&mut history, 3) = node_proto::etcdserverpb::RangeResponse {
        kvs: revived,
        count: 1,
        ..found(&mut history, 3).clone()
    };
    assert_eq!(violated_rule(&history), Rule::AnswersMatchModel);
}

#[test]
fn a_put_with_a_lease_that_has_ended_is_found() {
    let mut builder = HistoryBuilder::default();
    builder.add_answered(grant(7, 600));
    builder.add_answered(revoke(7));
    builder.add_answered(put("a", "1"));
    let mut history = builder.finish();
    let RequestedOperation::Write(Operation::Put(operation)) = &mut history.requests[2].operation
    else {
        panic!("a put")
    };
    operation.lease = 7;
    assert_eq!(violated_rule(&history), Rule::AnswersMatchModel);
}

#[test]
fn a_lease_that_expires_before_its_ttl_is_found() {
    for (slept, expected) in [(11 * SECOND, None), (9 * SECOND, Some(Rule::NoEarlyExpiry))] {
        let mut builder = HistoryBuilder::default();
        builder.add_answered(grant(7, 10));
        builder.add_answered(put_with("a", "1", 7));
        builder.now += slept;
        // A leader ends an expired lease by its own clock, without a request by a client.
        builder.apply(revoke(7)).expect("the lease exists");
        builder.add_answered(read("a"));
        let found = judge(&builder.finish()).err().map(|violation| violation.rule);
        assert_eq!(found, expected, "after {slept}");
    }
}

#[test]
fn a_refusal_without_a_reason_is_found() {
    let refused = |code: Code, operation: RequestedOperation| {
        let mut builder = HistoryBuilder::default();
        builder.add_answered(grant(7, 600));
        builder.add_answered(put_with("a", "1", 7));
        builder.add_refused(operation, code);
        judge(&builder.finish()).err().map(|violation| violation.rule)
    };
    let old = RangeRequest { revision: 2, ..read("a") };
    let future = RangeRequest { revision: 3, ..read("a") };
    let lagging = RangeRequest { serializable: true, ..old.clone() };
    for (code, operation, is_right) in [
        (Code::NotFound, put_with("a", "2", 7).into(), false),
        (Code::NotFound, put_with("a", "2", 8).into(), true),
        (Code::NotFound, revoke(7).into(), false),
        (Code::PermissionDenied, read("a").into(), false),
        (Code::Unauthenticated, read("a").into(), false),
        (Code::OutOfRange, old.into(), false),
        (Code::OutOfRange, future.into(), true),
        (Code::OutOfRange, lagging.into(), true),
        (Code::FailedPrecondition, put("a", "2").into(), false),
        (Code::ResourceExhausted, put("a", "2").into(), true),
    ] {
        let expected = (!is_right).then_some(Rule::RefusedForAReason);
        assert_eq!(refused(code, operation), expected, "{code:?}");
    }
}

#[test]
fn a_user_without_permission_is_refused_and_receives_no_data() {
    let new_builder = || {
        let mut builder = HistoryBuilder::default();
        builder.users(&["a", "b"]);
        builder.user = Some("a");
        builder.add_answered(put("a/1", "1"));
        builder.add_answered(read("a/1"));
        builder.add_refused(put("b/1", "2"), Code::PermissionDenied);
        builder.add_refused(read("b/1"), Code::PermissionDenied);
        builder
    };
    judge(&new_builder().finish()).expect("all is right");
    let mut refused = new_builder();
    refused.add_refused(put("a/1", "3"), Code::PermissionDenied);
    assert_eq!(violated_rule(&refused.finish()), Rule::RefusedForAReason);
    // Pretend that user "b" made the write or the read of user "a".
    for request in 0..2 {
        let mut history = new_builder().finish();
        history.requests[request].user = Some("b".to_owned());
        assert_eq!(violated_rule(&history), Rule::Permitted);
    }
    let mut history = new_builder().finish();
    history.requests[0].outcome = RequestOutcome::Unknown { text: String::new() };
    judge(&history).expect("the answer to a write may be lost");
    history.requests[0].user = Some("b".to_owned());
    assert_eq!(violated_rule(&history), Rule::Permitted);
    let mut watching = new_builder();
    watching.add_watcher(Some("b"), everything());
    assert_eq!(violated_rule(&watching.finish()), Rule::Permitted);
}

#[test]
fn a_long_history_is_judged_quickly() {
    // A check that takes quadratic time would need minutes for this history.
    let mut builder = HistoryBuilder::default();
    for number in 0..30_000 {
        let key = Bytes::from(format!("key-{}", number % 1_000));
        let value = Bytes::from(format!("{number}"));
        let request = PutRequest { key: key.clone(), value, prev_kv: true, ..Default::default() };
        if number % 7 == 0 {
            builder.add_applied_unknown(Operation::Put(request));
        } else {
            builder.add_answered(Operation::Put(request));
        }
        builder.add_answered(RangeRequest { key, ..RangeRequest::default() });
        if number % 50 == 0 {
            builder.add_unapplied_unknown(delete("nothing"));
        }
    }
    let report = judge(&builder.finish()).expect("it is right");
    assert_eq!(report.happened, 30_000_usize.div_ceil(7));
}
