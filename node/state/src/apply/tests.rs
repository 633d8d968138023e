//! Applies commands to the machine, and checks the answers and the resulting state.

use bytes::Bytes;
use node_proto::command::{
    self, LeaseCheckpoint, LeaseExpire, LeaseLeft, Operation, PublishMember, encode,
};
use node_proto::etcdserverpb::AlarmMember;
use node_proto::etcdserverpb::alarm_request::AlarmAction;
use node_proto::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use node_proto::etcdserverpb::range_request::SortOrder;
use node_proto::etcdserverpb::request_op::Request;
use node_proto::etcdserverpb::response_op;
use node_proto::etcdserverpb::{
    AlarmRequest, AlarmType, CompactionRequest, Compare, DeleteRangeRequest, LeaseGrantRequest,
    LeaseRevokeRequest, PutRequest, RangeRequest, RequestOp, ResponseOp, TxnRequest, TxnResponse,
};

use super::*;
use crate::identity::{MemberId, OperationId};
use crate::membership::{ChangeError, ChangeRequest, Member, MemberChange};
use crate::mvcc::tests::{backend, disk};
use crate::mvcc::{AnswerBudget, CompactionMode, ReadError, Store, StoreError, StoreOptions};
use crate::state_machine::{
    AppliedChange, CommittedEntry, ConfChange, EntryKind, Members, Position, RequestId,
    StateMachine as _,
};

mod leases;
mod members;
mod reads;

const MAX_OPS: usize = 128;

fn read_only(store: &Store, txn: &TxnRequest) -> Result<TxnResponse, ReadError> {
    let (view, mut read) = (store.view(), ReadTxn::new(txn));
    let mut anything = |_| true;
    let mut room = AnswerBudget::new(0, &mut anything);
    loop {
        if let Some(response) = read.step(store, &view, &mut room)? {
            return Ok(response);
        }
    }
}

struct ApplyHarness {
    machine: KvStateMachine,
    index: u64,
}

fn bytes(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

fn member(id: u64) -> Member {
    Member {
        id: MemberId(id),
        name: String::new(),
        peer_urls: vec![format!("http://m{id}:2380")],
        client_urls: Vec::new(),
        is_learner: false,
        incarnation: None,
        node_key: None,
        changed_at: 0,
        vote_when_ready: false,
        operations: Vec::new(),
    }
}

mod auth;

impl ApplyHarness {
    fn new() -> Self {
        let options = StoreOptions {
            compaction: CompactionMode::Inline,
            members: vec![member(7)],
            ..StoreOptions::default()
        };
        Self { machine: KvStateMachine::open(backend(&disk(1)), options).unwrap(), index: 0 }
    }

    fn apply(&mut self, operation: Operation) -> Outcome {
        self.index += 1;
        self.apply_as(EntryKind::Normal, operation).0
    }

    /// Applies an operation on behalf of `caller`.
    fn apply_for(&mut self, caller: Option<command::Caller>, operation: Operation) -> Outcome {
        self.index += 1;
        self.apply_all(EntryKind::Normal, caller, operation).0
    }

    fn apply_as(&mut self, kind: EntryKind, operation: Operation) -> (Outcome, Vec<AppliedChange>) {
        self.apply_all(kind, None, operation)
    }

    fn apply_all(
        &mut self,
        kind: EntryKind,
        caller: Option<command::Caller>,
        operation: Operation,
    ) -> (Outcome, Vec<AppliedChange>) {
        let position = Position { index: self.index, term: 1 };
        let entry = CommittedEntry { position, kind, data: encode(self.index, caller, operation) };
        let mut applied = self.machine.apply(&[entry]).unwrap();
        assert_eq!(applied.position, position);
        let (id, outcome) = applied.outcomes.pop().unwrap();
        assert_eq!(id, RequestId(self.index));
        (outcome, applied.changes)
    }

    fn change(&mut self, change: &MemberChange) -> (Outcome, Vec<AppliedChange>) {
        self.index += 1;
        self.apply_as(EntryKind::ConfChange, Operation::ChangeMember(change.into()))
    }

    /// Applies a change of members that was planned against the configuration of entry `at`.
    fn planned(&mut self, change: &MemberChange, at: u64) -> Outcome {
        self.index += 1;
        let mut change = command::MemberChange::from(change);
        change.planned_at = Some(at);
        self.apply_as(EntryKind::ConfChange, Operation::ChangeMember(change)).0
    }

    fn put(&mut self, key: &str, value: &str) -> Outcome {
        self.apply(Operation::Put(put(key, value)))
    }

    fn txn(&mut self, txn: TxnRequest) -> Result<TxnResponse, ApplyError> {
        check_txn(&txn, MAX_OPS).unwrap();
        match self.apply(Operation::Txn(txn))? {
            Response::Txn(response) => Ok(response),
            other => panic!("{other:?}"),
        }
    }

    fn revision(&self) -> i64 {
        self.machine.store().view().revision()
    }

    fn keys(&self) -> Vec<String> {
        let store = self.machine.store();
        let all = RangeRequest { key: bytes("\0"), range_end: bytes("\0"), ..Default::default() };
        let kvs = store.range(&store.view(), &all).unwrap().kvs;
        let text = |bytes: &Bytes| String::from_utf8(bytes.to_vec()).unwrap();
        kvs.iter().map(|kv| format!("{}={}", text(&kv.key), text(&kv.value))).collect()
    }
}

fn put(key: &str, value: &str) -> PutRequest {
    PutRequest { key: bytes(key), value: bytes(value), ..PutRequest::default() }
}

fn delete(key: &str, range_end: &str) -> DeleteRangeRequest {
    DeleteRangeRequest { key: bytes(key), range_end: bytes(range_end), prev_kv: false }
}

fn op(request: Request) -> RequestOp {
    RequestOp { request: Some(request) }
}

fn op_put(key: &str, value: &str) -> RequestOp {
    op(Request::RequestPut(put(key, value)))
}

fn op_delete(key: &str, range_end: &str) -> RequestOp {
    op(Request::RequestDeleteRange(delete(key, range_end)))
}

fn op_range(key: &str, revision: i64) -> RequestOp {
    op(Request::RequestRange(RangeRequest { key: bytes(key), revision, ..Default::default() }))
}

fn op_txn(compare: Vec<Compare>, success: Vec<RequestOp>, failure: Vec<RequestOp>) -> RequestOp {
    op(Request::RequestTxn(TxnRequest { compare, success, failure }))
}

fn then(success: Vec<RequestOp>) -> TxnRequest {
    TxnRequest { compare: Vec::new(), success, failure: Vec::new() }
}

fn compare(key: &str, result: CompareResult, union: TargetUnion) -> Compare {
    let target = match union {
        TargetUnion::Version(_) => CompareTarget::Version,
        TargetUnion::CreateRevision(_) => CompareTarget::Create,
        TargetUnion::ModRevision(_) => CompareTarget::Mod,
        TargetUnion::Value(_) => CompareTarget::Value,
        TargetUnion::Lease(_) => CompareTarget::Lease,
    };
    Compare {
        result: result.into(),
        target: target.into(),
        key: bytes(key),
        range_end: Bytes::new(),
        target_union: Some(union),
    }
}

#[test]
fn a_put_returns_its_revision_and_the_previous_value_on_request() {
    let mut world = ApplyHarness::new();
    world.put("k", "1").unwrap();
    let request = PutRequest { prev_kv: true, ..put("k", "2") };
    let Response::Put(response) = world.apply(Operation::Put(request)).unwrap() else { panic!() };
    assert_eq!(response.header.unwrap().revision, 3);
    let previous = response.prev_kv.unwrap();
    assert_eq!((previous.mod_revision, &previous.value), (2, &bytes("1")));
}

#[test]
fn ignore_value_keeps_the_value_and_needs_an_existing_key() {
    let mut world = ApplyHarness::new();
    let request = PutRequest { ignore_value: true, ..put("k", "") };
    assert_eq!(world.apply(Operation::Put(request.clone())), Err(ApplyError::KeyNotFound));
    world.put("k", "kept").unwrap();
    let Ok(Response::Put(response)) = world.apply(Operation::Put(request)) else { panic!() };
    assert_eq!(response.prev_kv, None);
    assert_eq!(world.keys(), ["k=kept"]);
    assert_eq!(world.revision(), 3);
}

#[test]
fn an_unknown_lease_is_refused() {
    let mut world = ApplyHarness::new();
    let request = PutRequest { lease: 5, ..put("k", "v") };
    assert_eq!(world.apply(Operation::Put(request)), Err(ApplyError::LeaseNotFound));
    assert_eq!(world.revision(), 1);
}

#[test]
fn deleting_a_range_makes_one_revision() {
    let mut world = ApplyHarness::new();
    for key in ["a", "b", "c"] {
        world.put(key, key).unwrap();
    }
    let request = DeleteRangeRequest { prev_kv: true, ..delete("a", "c") };
    let Ok(Response::DeleteRange(response)) = world.apply(Operation::DeleteRange(request)) else {
        panic!()
    };
    assert_eq!((response.deleted, response.prev_kvs.len()), (2, 2));
    assert_eq!(response.header.unwrap().revision, 5);
    assert_eq!(world.keys(), ["c=c"]);
}

#[test]
fn comparisons_hold_as_in_etcd() {
    use CompareResult::{Equal, Greater, Less, NotEqual};
    use TargetUnion::{CreateRevision, Lease, ModRevision, Value, Version};
    let mut world = ApplyHarness::new();
    world.put("k", "b").unwrap();
    world.put("k", "c").unwrap();
    let table = [
        ("k", Equal, Version(2), true),
        ("k", Greater, Version(1), true),
        ("k", Less, Version(2), false),
        ("k", NotEqual, Version(2), false),
        ("k", Equal, CreateRevision(2), true),
        ("k", Equal, ModRevision(3), true),
        ("k", Greater, ModRevision(3), false),
        ("k", Equal, Value(bytes("c")), true),
        ("k", Greater, Value(bytes("b")), true),
        ("k", Less, Value(bytes("b")), false),
        ("k", Equal, Lease(0), true),
        ("missing", Equal, Version(0), true),
        ("missing", Greater, CreateRevision(0), false),
        ("missing", Equal, Value(bytes("")), false),
        ("missing", NotEqual, Value(bytes("x")), false),
    ];
    for (key, result, union, holds) in table {
        let line = format!("{key} {result:?} {union:?}");
        let txn = TxnRequest { compare: vec![compare(key, result, union)], ..then(Vec::new()) };
        assert_eq!(world.txn(txn).unwrap().succeeded, holds, "{line}");
    }
    assert_eq!(world.revision(), 3, "comparisons alone make no revision");
}

#[test]
fn a_comparison_over_a_range_must_hold_for_every_key() {
    let mut world = ApplyHarness::new();
    world.put("a1", "x").unwrap();
    world.put("a2", "x").unwrap();
    world.put("a2", "x").unwrap();
    let over = |range_end: &str, result, union| Compare {
        range_end: bytes(range_end),
        ..compare("a", result, union)
    };
    let table = [
        (over("b", CompareResult::Greater, TargetUnion::Version(0)), true),
        (over("b", CompareResult::Equal, TargetUnion::Version(1)), false),
        (over("\0", CompareResult::Equal, TargetUnion::Value(bytes("x"))), true),
        // The range has no keys, so the comparison is made with a single missing key.
        (over("a0", CompareResult::Equal, TargetUnion::CreateRevision(0)), true),
        (over("a0", CompareResult::Greater, TargetUnion::CreateRevision(0)), false),
    ];
    for (compare, holds) in table {
        let line = format!("{compare:?}");
        let txn = TxnRequest { compare: vec![compare], ..then(Vec::new()) };
        assert_eq!(world.txn(txn).unwrap().succeeded, holds, "{line}");
    }
}

#[test]
fn all_operations_of_a_transaction_share_a_revision_and_see_each_other() {
    let mut world = ApplyHarness::new();
    world.put("old", "x").unwrap();
    let txn = then(vec![
        op_range("k", 0),
        op_put("k", "1"),
        op_range("k", 0),
        op_range("k", 2),
        op_delete("old", ""),
        op_txn(Vec::new(), vec![op_put("l", "2")], Vec::new()),
    ]);
    let response = world.txn(txn).unwrap();
    assert_eq!(response.header.unwrap().revision, 3);
    let revisions: Vec<(i64, usize)> = response
        .responses
        .iter()
        .map(|response| match response.response.as_ref().unwrap() {
            response_op::Response::ResponseRange(r) => (r.header.unwrap().revision, r.kvs.len()),
            response_op::Response::ResponsePut(r) => (r.header.unwrap().revision, 9),
            response_op::Response::ResponseDeleteRange(r) => (r.header.unwrap().revision, 9),
            response_op::Response::ResponseTxn(r) => (r.header.unwrap().revision, 9),
        })
        .collect();
    assert_eq!(revisions, [(2, 0), (3, 9), (3, 1), (3, 0), (3, 9), (0, 9)]);
    assert_eq!(world.keys(), ["k=1", "l=2"]);
    assert_eq!(world.revision(), 3);
}

#[test]
fn nested_comparisons_are_made_before_any_operation() {
    let mut world = ApplyHarness::new();
    let missing = vec![compare("k", CompareResult::Equal, TargetUnion::Version(0))];
    let nested = op_txn(missing, vec![op_put("then", "")], vec![op_put("else", "")]);
    world.txn(then(vec![op_put("k", ""), nested])).unwrap();
    assert_eq!(world.keys(), ["k=", "then="]);
}

#[test]
fn a_refused_transaction_changes_nothing() {
    let mut world = ApplyHarness::new();
    world.put("k", "1").unwrap();
    let ahead = then(vec![op_put("a", ""), op_range("k", 9)]);
    assert_eq!(world.txn(ahead), Err(ApplyError::FutureRevision));
    let ignores = op(Request::RequestPut(PutRequest { ignore_value: true, ..put("b", "") }));
    let missing = then(vec![op_put("a", ""), op_txn(Vec::new(), vec![ignores], Vec::new())]);
    assert_eq!(world.txn(missing), Err(ApplyError::KeyNotFound));
    assert_eq!(world.keys(), ["k=1"]);
    assert_eq!(world.revision(), 2);
}

#[test]
fn only_the_branch_that_is_taken_can_be_refused() {
    let mut world = ApplyHarness::new();
    let txn = TxnRequest { failure: vec![op_range("k", 9)], ..then(vec![op_put("k", "1")]) };
    assert!(world.txn(txn).unwrap().succeeded);
}

#[test]
fn a_key_may_be_changed_once_per_transaction() {
    let nested = |success, failure| op_txn(Vec::new(), success, failure);
    let p = |key| op_put(key, "");
    let twice: [Vec<RequestOp>; 6] = [
        vec![p("k"), p("k")],
        vec![p("k"), op_delete("k", "")],
        vec![op_delete("a", "z"), p("k")],
        vec![p("k"), nested(vec![p("k")], vec![])],
        vec![nested(vec![p("k")], vec![]), nested(vec![], vec![p("k")])],
        vec![nested(vec![op_delete("j", "l")], vec![]), p("k")],
    ];
    for operations in twice {
        let line = format!("{operations:?}");
        let check = check_txn(&then(operations), MAX_OPS);
        assert_eq!(check, Err(CheckError::DuplicateKey), "{line}");
    }
    let once: [Vec<RequestOp>; 5] = [
        vec![op_delete("a", "\0"), p("k")],
        vec![op_delete("k", ""), op_delete("k", "")],
        vec![p("k"), op_range("k", 0), op_delete("l", "z")],
        vec![nested(vec![p("k")], vec![p("k")])],
        vec![op_delete("a", "k"), p("k")],
    ];
    for operations in once {
        let line = format!("{operations:?}");
        assert_eq!(check_txn(&then(operations), MAX_OPS), Ok(()), "{line}");
    }
}

#[test]
fn nested_transactions_share_the_budget_of_operations() {
    let many = |count: usize| (0..count).map(|n| op_put(&n.to_string(), "")).collect::<Vec<_>>();
    assert_eq!(check_txn(&then(many(128)), MAX_OPS), Ok(()));
    assert_eq!(check_txn(&then(many(129)), MAX_OPS), Err(CheckError::TooManyOps));
    let nest = |inner| then(vec![op_txn(Vec::new(), many(inner), Vec::new())]);
    assert_eq!(check_txn(&nest(127), MAX_OPS), Ok(()));
    assert_eq!(check_txn(&nest(128), MAX_OPS), Err(CheckError::TooManyOps));
}

#[test]
fn requests_with_missing_or_contradictory_fields_are_refused() {
    let range = |key: &str| RangeRequest { key: bytes(key), ..RangeRequest::default() };
    assert_eq!(check_range(&range("")), Err(CheckError::EmptyKey));
    let unsorted = RangeRequest { sort_order: 3, ..range("k") };
    assert_eq!(check_range(&unsorted), Err(CheckError::InvalidSortOption));
    let unsorted = RangeRequest { sort_target: 5, ..range("k") };
    assert_eq!(check_range(&unsorted), Err(CheckError::InvalidSortOption));
    assert_eq!(check_put(&put("", "v")), Err(CheckError::EmptyKey));
    let both = PutRequest { ignore_value: true, ..put("k", "v") };
    assert_eq!(check_put(&both), Err(CheckError::ValueProvided));
    let both = PutRequest { ignore_lease: true, lease: 1, ..put("k", "") };
    assert_eq!(check_put(&both), Err(CheckError::LeaseProvided));
    assert_eq!(check_delete(&delete("", "")), Err(CheckError::EmptyKey));
    let nothing = then(vec![RequestOp { request: None }]);
    assert_eq!(check_txn(&nothing, MAX_OPS), Err(CheckError::EmptyOperation));
}

#[test]
fn the_nospace_alarm_forbids_only_requests_that_grow_the_data() {
    let mut world = ApplyHarness::new();
    world.put("k", "1").unwrap();
    let alarm = |action: AlarmAction| {
        Operation::Alarm(AlarmRequest { action: action.into(), member_id: 7, alarm: 1 })
    };
    world.apply(alarm(AlarmAction::Activate)).unwrap();
    assert_eq!(world.put("l", ""), Err(ApplyError::NoSpace));
    assert_eq!(world.txn(then(vec![op_put("l", "")])), Err(ApplyError::NoSpace));
    world.txn(then(vec![op_delete("x", "")])).unwrap();
    world.apply(Operation::DeleteRange(delete("k", ""))).unwrap();
    let compact = CompactionRequest { revision: 2, physical: false };
    world.apply(Operation::Compact(compact)).unwrap();
    world.apply(alarm(AlarmAction::Deactivate)).unwrap();
    world.put("l", "").unwrap();
}

#[test]
fn only_a_corrupt_alarm_of_the_whole_cluster_forbids_writes() {
    let mut world = ApplyHarness::new();
    world.apply(Operation::MarkCorrupt(7)).unwrap();
    world.put("k", "1").unwrap();
    let raised = world.machine.store().view().alarms().to_vec();
    assert_eq!(raised, [AlarmMember { member_id: 7, alarm: 2 }]);
    assert_eq!(world.apply(Operation::MarkCorrupt(8)), Err(ApplyError::MemberNotFound));
    let alarm = AlarmRequest { action: AlarmAction::Activate.into(), member_id: 0, alarm: 2 };
    world.apply(Operation::Alarm(alarm)).unwrap();
    assert_eq!(world.put("k", ""), Err(ApplyError::Corrupt));
    let outcome = world.apply(Operation::DeleteRange(delete("k", "")));
    assert_eq!(outcome, Err(ApplyError::Corrupt));
}

#[test]
fn members_can_be_changed_under_any_alarm() {
    for alarm in [1, 2] {
        let mut world = ApplyHarness::new();
        let alarm = AlarmRequest { action: AlarmAction::Activate.into(), member_id: 7, alarm };
        world.apply(Operation::Alarm(alarm)).unwrap();
        let (added, _) = world.change(&MemberChange::Add(member(9)));
        assert!(added.is_ok(), "{alarm:?}: {added:?}");
        let (removed, _) = world.change(&MemberChange::Remove(MemberId(7)));
        assert!(removed.is_ok(), "{alarm:?}: {removed:?}");
    }
}

#[test]
fn a_member_publishes_its_name_and_urls() {
    let mut world = ApplyHarness::new();
    let publish = |member_id| {
        let client_urls = vec!["http://10.0.0.1:2379".to_owned()];
        let name = "a".to_owned();
        Operation::PublishMember(PublishMember {
            member_id,
            name,
            client_urls,
            ..Default::default()
        })
    };
    assert_eq!(world.apply(publish(7)), Ok(Response::MemberPublished));
    assert_eq!(world.apply(publish(8)), Err(ApplyError::MemberNotFound));
    let view = world.machine.store().view();
    let names: Vec<_> = view.members().members().map(|member| &member.name[..]).collect();
    assert_eq!(names, ["a"]);
    assert_eq!(world.revision(), 1, "members are not part of the key space");
}

#[test]
fn applied_entries_are_skipped_and_empty_entries_advance_the_index() {
    let mut world = ApplyHarness::new();
    world.put("k", "1").unwrap();
    let entry =
        |index, kind, data| CommittedEntry { position: Position { index, term: 2 }, kind, data };
    let again = entry(1, EntryKind::Normal, encode(1, None, Operation::Put(put("k", "again"))));
    let empty = entry(2, EntryKind::NoOp, Bytes::new());
    let applied = world.machine.apply(&[again, empty]).unwrap();
    assert!(applied.outcomes.is_empty() && applied.changes.is_empty());
    assert_eq!(world.keys(), ["k=1"]);
    assert_eq!(world.machine.applied(), Position { index: 2, term: 2 });
}

#[test]
fn an_entry_of_a_newer_build_stops_the_machine() {
    let mut world = ApplyHarness::new();
    let position = Position { index: 1, term: 1 };
    let kind = EntryKind::Normal;
    let entry = CommittedEntry { position, kind, data: Bytes::from_static(&[2, 0]) };
    let error = world.machine.apply(&[entry]).unwrap_err();
    assert!(matches!(error, StoreError::UndecodableCommand { index: 1, .. }), "{error}");
}

#[test]
fn an_entry_with_the_payload_of_another_kind_stops_the_machine() {
    let mut world = ApplyHarness::new();
    let position = Position { index: 1, term: 1 };
    let (kind, data) = (EntryKind::ConfChange, encode(1, None, Operation::Put(put("k", "v"))));
    let error = world.machine.apply(&[CommittedEntry { position, kind, data }]).unwrap_err();
    assert!(matches!(error, StoreError::EntryKindMismatch { index: 1, .. }), "{error}");
}

#[test]
fn the_nesting_depth_of_a_transaction_is_limited() {
    let nested = |depth: usize| {
        let mut operation = op_put("a", "1");
        for _ in 1..depth {
            operation = op_txn(Vec::new(), vec![operation], Vec::new());
        }
        check_txn(&then(vec![operation]), MAX_OPS)
    };
    assert_eq!(nested(MAX_TXN_DEPTH), Ok(()));
    assert_eq!(nested(MAX_TXN_DEPTH + 1), Err(CheckError::TooManyOps));
}

#[test]
fn only_alarms_of_members_and_of_known_kinds_can_be_raised() {
    let mut world = ApplyHarness::new();
    let mut raise = |member_id, alarm| {
        let action = AlarmAction::Activate.into();
        world.apply(Operation::Alarm(AlarmRequest { action, member_id, alarm }))
    };
    for stranger in 100..110 {
        assert_eq!(raise(stranger, 1), Err(ApplyError::MemberNotFound));
    }
    for kind in [0, 3, 77] {
        let Ok(Response::Alarm(answer)) = raise(7, kind) else { panic!("an answer") };
        assert_eq!(answer.alarms, [], "{kind}");
    }
    raise(7, 1).unwrap();
    raise(0, 1).unwrap();
    assert_eq!(world.machine.store().view().alarms().len(), 2, "0 is the whole cluster");
}

#[test]
fn a_transaction_cannot_read_at_a_negative_revision_of_a_compacted_store() {
    let mut world = ApplyHarness::new();
    world.put("a", "1").unwrap();
    let read = |world: &mut ApplyHarness, revision| {
        let request = then(vec![op_range("a", revision), op_put("b", "1")]);
        let store = world.machine.store();
        let only = read_only(&store, &then(vec![op_range("a", revision)]));
        let refused = matches!(only, Err(crate::mvcc::ReadError::Compacted));
        let outcome = world.txn(request);
        assert_eq!(outcome == Err(ApplyError::Compacted), refused);
        refused
    };
    assert!(!read(&mut world, -1));
    assert!(read(&mut world, -2));
    world.apply(Operation::Compact(CompactionRequest { revision: 2, physical: false })).unwrap();
    assert!(read(&mut world, -1));
    assert!(!read(&mut world, 0));
}

#[test]
fn a_comparison_with_an_unknown_target_is_equal() {
    let mut world = ApplyHarness::new();
    world.put("a", "1").unwrap();
    let mut holds = |result: CompareResult| {
        let target = compare("a", result, TargetUnion::Version(7));
        let request =
            TxnRequest { compare: vec![Compare { target: 99, ..target }], ..Default::default() };
        world.txn(request).unwrap().succeeded
    };
    assert!(holds(CompareResult::Equal));
    assert!(!holds(CompareResult::NotEqual));
    assert!(!holds(CompareResult::Greater));
    assert!(!holds(CompareResult::Less));
}

#[test]
fn an_unknown_lease_is_reported_before_a_missing_key() {
    let mut world = ApplyHarness::new();
    let request = PutRequest { lease: 5, ignore_value: true, ..put("none", "") };
    assert_eq!(world.apply(Operation::Put(request)), Err(ApplyError::LeaseNotFound));
}

#[test]
fn a_key_can_be_put_beside_a_delete_of_all_keys() {
    let mut world = ApplyHarness::new();
    world.put("a", "1").unwrap();
    let answer = world.txn(then(vec![op_put("b", "1"), op_delete("\0", "\0")])).unwrap();
    assert_eq!(answer.responses.len(), 2);
    assert_eq!(world.keys(), [""; 0]);
    world.txn(then(vec![op_delete("\0", "\0"), op_put("b", "2")])).unwrap();
    assert_eq!(world.keys(), ["b=2"]);
}

#[test]
fn reads_for_an_answer_without_a_local_caller_are_skipped() {
    let script = || {
        let range = RangeRequest { key: bytes("\0"), range_end: bytes("\0"), ..Default::default() };
        let put_with_previous = PutRequest { prev_kv: true, ..put("a", "2") };
        let delete_with_previous = DeleteRangeRequest { prev_kv: true, ..delete("b", "") };
        let nested = op_txn(Vec::new(), vec![op(Request::RequestRange(range.clone()))], Vec::new());
        then(vec![
            op(Request::RequestRange(range)),
            op(Request::RequestPut(put_with_previous)),
            op(Request::RequestDeleteRange(delete_with_previous)),
            op(Request::RequestPut(PutRequest { ignore_value: true, ..put("c", "") })),
            nested,
        ])
    };
    let run = |own: bool| {
        let mut world = ApplyHarness::new();
        world.machine.set_answer_filter(move |_| own);
        world.put("a", "1").unwrap();
        world.put("b", "1").unwrap();
        world.put("c", "kept").unwrap();
        let answer = world.txn(script()).unwrap();
        (answer, world.keys(), world.revision())
    };
    let (full, keys, revision) = run(true);
    let (bare, same_keys, same_revision) = run(false);
    assert_eq!(keys, ["a=2", "c=kept"]);
    assert_eq!((keys, revision), (same_keys, same_revision));
    assert_eq!((full.succeeded, full.responses.len()), (bare.succeeded, bare.responses.len()));
    let values = |answer: &TxnResponse| format!("{answer:?}").matches("KeyValue").count();
    assert_eq!((values(&full), values(&bare)), (7, 0));
}

#[test]
fn a_request_without_a_local_caller_is_refused_in_the_same_way() {
    let mut world = ApplyHarness::new();
    world.put("a", "1").unwrap();
    world.machine.set_answer_filter(|_| false);
    let future = world.txn(then(vec![op_put("a", "2"), op_range("a", 99)]));
    assert_eq!(future, Err(ApplyError::FutureRevision));
    assert_eq!(world.keys(), ["a=1"]);
}

#[test]
fn a_comparison_of_a_range_holds_only_if_it_holds_for_every_key() {
    let mut world = ApplyHarness::new();
    for n in 0..600 {
        world.put(&format!("k{n:03}"), "v").unwrap();
    }
    let wide = |value: &str| Compare {
        range_end: bytes("l"),
        ..compare("k", CompareResult::Equal, TargetUnion::Value(bytes(value)))
    };
    let holds = |world: &mut ApplyHarness, compare: Compare| {
        let request = TxnRequest { compare: vec![compare], ..TxnRequest::default() };
        world.txn(request).unwrap().succeeded
    };
    assert!(holds(&mut world, wide("v")));
    assert!(!holds(&mut world, wide("w")));
    world.put("k599", "w").unwrap();
    assert!(!holds(&mut world, wide("v")), "the last one counts as well");
}
