//! Leases are granted, revoked and expired, and checkpoints record their remaining time.

use super::*;

fn granted(world: &mut ApplyHarness, id: i64, ttl: i64) -> Outcome {
    world.apply(Operation::LeaseGrant(LeaseGrantRequest { id, ttl }))
}

fn with_lease(key: &str, lease: i64) -> PutRequest {
    PutRequest { lease, ..put(key, "v") }
}

fn attached(world: &ApplyHarness, id: i64) -> Vec<String> {
    let store = world.machine.store();
    let leases = store.leases().read().unwrap();
    leases.keys(id).map(|key| String::from_utf8(key.to_vec()).unwrap()).collect()
}

#[test]
fn a_lease_is_granted_once_and_with_a_limited_ttl() {
    let mut world = ApplyHarness::new();
    let Ok(Response::LeaseGrant(response)) = granted(&mut world, 5, 60) else { panic!() };
    assert_eq!((response.id, response.ttl, response.error.as_str()), (5, 60, ""));
    assert_eq!(response.header.unwrap().revision, 1, "it makes no revision");
    assert_eq!(granted(&mut world, 5, 60), Err(ApplyError::LeaseExists));
    assert_eq!(granted(&mut world, 6, 9_000_000_001), Err(ApplyError::LeaseTtlTooLarge));
    assert!(granted(&mut world, 6, 9_000_000_000).is_ok());
    assert!(granted(&mut world, -7, 1).is_ok());
    let leases = world.machine.store().view().leases().unwrap();
    assert_eq!(leases.iter().map(|lease| lease.id).collect::<Vec<_>>(), [-7, 5, 6]);
}

#[test]
fn revoking_a_lease_deletes_its_keys_in_their_order_in_one_revision() {
    let mut world = ApplyHarness::new();
    granted(&mut world, 5, 60).unwrap();
    granted(&mut world, 6, 60).unwrap();
    for (key, lease) in [("c", 5), ("a", 5), ("other", 6), ("b", 5), ("free", 0), ("moved", 5)] {
        world.apply(Operation::Put(with_lease(key, lease))).unwrap();
    }
    // A key that is overwritten without the lease, deleted, or put with another lease is no longer
    // attached to it.
    world.apply(Operation::Put(with_lease("moved", 6))).unwrap();
    world.apply(Operation::DeleteRange(delete("b", ""))).unwrap();
    assert_eq!(attached(&world, 5), ["a", "c"]);
    assert_eq!(attached(&world, 6), ["moved", "other"]);
    let revision = world.revision();
    let revoke = Operation::LeaseRevoke(LeaseRevokeRequest { id: 5 });
    let Ok(Response::LeaseRevoke(response)) = world.apply(revoke.clone()) else { panic!() };
    assert_eq!(response.header.unwrap().revision, revision + 1);
    assert_eq!(world.keys(), ["free=v", "moved=v", "other=v"]);
    assert_eq!(world.apply(revoke), Err(ApplyError::LeaseNotFound));
    assert_eq!(world.revision(), revision + 1);
    let gone = world.apply(Operation::Put(with_lease("k", 5)));
    assert_eq!(gone, Err(ApplyError::LeaseNotFound));
}

#[test]
fn ignore_lease_keeps_the_lease() {
    let mut world = ApplyHarness::new();
    granted(&mut world, 5, 60).unwrap();
    world.apply(Operation::Put(with_lease("k", 5))).unwrap();
    let keeps = PutRequest { ignore_lease: true, ..put("k", "new") };
    world.apply(Operation::Put(keeps.clone())).unwrap();
    assert_eq!(
        (attached(&world, 5), world.keys()),
        (vec!["k".to_owned()], vec!["k=new".to_owned()])
    );
    let compare = compare("k", CompareResult::Equal, TargetUnion::Lease(5));
    let txn = TxnRequest { compare: vec![compare], ..then(vec![op_put("k", "free")]) };
    assert!(world.txn(txn).unwrap().succeeded);
    assert!(attached(&world, 5).is_empty());
    world.apply(Operation::DeleteRange(delete("k", ""))).unwrap();
    assert_eq!(world.apply(Operation::Put(keeps)), Err(ApplyError::KeyNotFound));
}

#[test]
fn entries_of_a_lease_clock_are_valid_only_for_their_term_and_grant() {
    let mut world = ApplyHarness::new();
    granted(&mut world, 5, 60).unwrap();
    world.apply(Operation::Put(with_lease("k", 5))).unwrap();
    let expire = |term, granted| Operation::LeaseExpire(LeaseExpire { id: 5, term, granted });
    let note = |term, granted, left| {
        let leases = vec![LeaseLeft { id: 5, left, granted }];
        Operation::LeaseCheckpoint(LeaseCheckpoint { term, leases })
    };
    let left =
        |world: &ApplyHarness| world.machine.store().view().leases().unwrap()[0].remaining_ttl;
    // All entries have term 1, and the entry with index 1 granted the lease. A checkpoint of
    // another term is refused. A checkpoint that names another grant changes nothing.
    assert_eq!(world.apply(note(2, 1, 9)), Err(ApplyError::LeaderChanged));
    assert_eq!(world.apply(note(1, 2, 9)), Ok(Response::LeasesCheckpointed));
    assert_eq!(left(&world), 0);
    assert_eq!(world.apply(note(1, 1, 9)), Ok(Response::LeasesCheckpointed));
    assert_eq!(left(&world), 9);
    assert_eq!(world.apply(note(1, 1, 0)), Ok(Response::LeasesCheckpointed));
    assert_eq!(left(&world), 0);
    assert_eq!(world.apply(expire(2, 1)), Err(ApplyError::LeaderChanged));
    assert_eq!(world.apply(expire(0, 1)), Err(ApplyError::LeaderChanged));
    assert_eq!(world.apply(expire(1, 2)), Err(ApplyError::LeaseNotFound));
    assert_eq!(world.keys(), ["k=v"]);
    assert!(matches!(world.apply(expire(1, 1)), Ok(Response::LeaseRevoke(_))));
    assert!(world.keys().is_empty());
}

#[test]
fn a_checkpoint_applies_to_each_lease_with_the_named_grant() {
    let mut world = ApplyHarness::new();
    for id in 5..=8 {
        granted(&mut world, id, 60).unwrap();
    }
    let left = |(id, left, granted)| LeaseLeft { id, left, granted };
    // The checkpoint names another grant of lease 7 than the table, and lease 9 does not exist.
    let leases = [(5, 9, 1), (7, 8, 2), (9, 7, 5), (8, 6, 4)].map(left).to_vec();
    let noted = Operation::LeaseCheckpoint(LeaseCheckpoint { term: 1, leases });
    assert_eq!(world.apply(noted), Ok(Response::LeasesCheckpointed));
    let leases = world.machine.store().view().leases().unwrap();
    assert_eq!(leases.iter().map(|lease| lease.remaining_ttl).collect::<Vec<_>>(), [9, 0, 0, 6]);
}

#[test]
fn alarms_refuse_leases_as_etcd_does() {
    let mut world = ApplyHarness::new();
    granted(&mut world, 5, 60).unwrap();
    let alarm = |action: AlarmAction, alarm: AlarmType| {
        Operation::Alarm(AlarmRequest { action: action.into(), member_id: 0, alarm: alarm.into() })
    };
    world.apply(alarm(AlarmAction::Activate, AlarmType::Nospace)).unwrap();
    assert_eq!(granted(&mut world, 6, 60), Err(ApplyError::NoSpace));
    let revoke = |id| Operation::LeaseRevoke(LeaseRevokeRequest { id });
    assert!(world.apply(revoke(5)).is_ok(), "it makes room");
    world.apply(alarm(AlarmAction::Deactivate, AlarmType::Nospace)).unwrap();
    granted(&mut world, 5, 60).unwrap();
    world.apply(alarm(AlarmAction::Activate, AlarmType::Corrupt)).unwrap();
    assert_eq!(granted(&mut world, 6, 60), Err(ApplyError::Corrupt));
    assert_eq!(world.apply(revoke(5)), Err(ApplyError::Corrupt));
}
