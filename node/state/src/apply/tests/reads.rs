//! Read-only transactions, answered from a view.

use super::*;

#[test]
fn a_read_only_transaction_is_answered_from_a_view() {
    let mut world = ApplyHarness::new();
    world.put("k", "1").unwrap();
    let nested = op_txn(Vec::new(), vec![op_range("k", 0)], vec![op_range("x", 0)]);
    let txn = TxnRequest {
        compare: vec![compare("k", CompareResult::Equal, TargetUnion::Version(1))],
        success: vec![op_range("k", 0), nested],
        failure: Vec::new(),
    };
    assert!(is_read_only(&txn) && !is_serializable(&txn));
    assert!(!is_read_only(&then(vec![op_txn(Vec::new(), Vec::new(), vec![op_put("k", "")])])));
    let store = world.machine.store();
    let response = read_only(&store, &txn).unwrap();
    assert!(response.succeeded);
    assert_eq!(response.header.unwrap().revision, 2);
    assert_eq!(response.responses.len(), 2);
}

#[test]
fn a_wide_read_only_transaction_is_read_in_steps() {
    const KEYS: usize = 1_000;
    let mut world = ApplyHarness::new();
    for key in 0..KEYS {
        world.put(&format!("k{key:03}"), "v").unwrap();
    }
    let last = || {
        op(Request::RequestRange(RangeRequest {
            key: bytes("k"),
            range_end: bytes("l"),
            limit: 1,
            sort_order: SortOrder::Descend.into(),
            ..RangeRequest::default()
        }))
    };
    let each = Compare {
        range_end: bytes("l"),
        ..compare("k", CompareResult::Equal, TargetUnion::Version(1))
    };
    let nested = op_txn(vec![each.clone()], vec![last()], Vec::new());
    let txn = TxnRequest {
        compare: vec![each],
        success: vec![last(), nested, op_range("k000", 0)],
        failure: Vec::new(),
    };
    let store = world.machine.store();
    let (view, mut read, mut steps) = (store.view(), ReadTxn::new(&txn), 1);
    let mut anything = |_| true;
    let mut room = AnswerBudget::new(0, &mut anything);
    let response = loop {
        if let Some(response) = read.step(&store, &view, &mut room).unwrap() {
            break response;
        }
        steps += 1;
    };
    // No single step reads all keys of any of the four ranges.
    assert!(steps > 4, "{steps}");
    let found = |response: &ResponseOp| match response.response.as_ref().unwrap() {
        response_op::Response::ResponseRange(range) => (range.kvs[0].key.clone(), range.count),
        other => panic!("{other:?}"),
    };
    let keys = i64::try_from(KEYS).unwrap();
    assert!(response.succeeded);
    assert_eq!(found(&response.responses[0]), (bytes("k999"), keys));
    let Some(response_op::Response::ResponseTxn(nested)) = &response.responses[1].response else {
        panic!("{response:?}");
    };
    assert_eq!((nested.succeeded, found(&nested.responses[0])), (true, (bytes("k999"), keys)));
    assert_eq!(found(&response.responses[2]), (bytes("k000"), 1));
    assert!(room.used_bytes() < KEYS, "three pairs, and not what was looked at for them");
}
