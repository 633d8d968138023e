use std::sync::RwLock;
use std::time::Duration;

use node_proto::command::{LeaseCheckpoint, LeaseExpire, LeaseLeft};

use super::*;

const ELECTION: Duration = Duration::from_secs(1);

fn at(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A member's lease table and clock, with the role of consensus played by the test.
struct LessorHarness {
    table: RwLock<LeaseTable>,
    lessor: Lessor,
    entries: u64,
}

fn leading(term: u64) -> RaftStatus {
    RaftStatus { is_leader: true, term, applied_term: term }
}

impl LessorHarness {
    fn new() -> Self {
        Self { table: RwLock::default(), lessor: Lessor::new(ELECTION), entries: 0 }
    }

    /// Creates the harness of a member that leads in term 1.
    fn leader() -> Self {
        let mut world = Self::new();
        world.follow(leading(1), 0);
        world
    }

    fn follow(&mut self, status: RaftStatus, now: u64) {
        self.lessor.update(status, &self.table, at(now));
    }

    fn grant(&mut self, id: i64, ttl: i64) {
        self.entries += 1;
        let lease = Lease { id, ttl, remaining_ttl: 0, grant_index: self.entries };
        self.table.write().unwrap().grant(lease);
    }

    /// Grants a lease in term 1, and notifies the clock at once.
    fn grant_at(&mut self, id: i64, ttl: i64, now: u64) {
        self.grant(id, ttl);
        self.follow(leading(1), now);
    }

    fn expire(&mut self, now: u64) -> Vec<i64> {
        self.lessor.expire(at(now)).iter().map(|over| over.id).collect()
    }

    fn renew(&mut self, id: i64, now: u64) -> Renewal {
        self.lessor.renew(id, at(now))
    }

    fn left(&self, id: i64, now: u64) -> Option<u64> {
        let left = self.lessor.left(id, at(now))?;
        Some(u64::try_from(left.as_millis()).unwrap())
    }

    /// Makes a checkpoint of the leases that are due, and applies it to the table.
    fn note(&mut self, now: u64) -> Option<Vec<(i64, i64)>> {
        let noted = self.lessor.due_checkpoint(at(now))?;
        for one in &noted.leases {
            self.table.write().unwrap().checkpoint(one.id, one.left);
        }
        self.lessor.finish_checkpoint(&noted);
        Some(noted.leases.iter().map(|one| (one.id, one.left)).collect())
    }
}

#[test]
fn a_lease_expires_at_its_deadline_and_not_before() {
    let mut world = LessorHarness::leader();
    world.grant_at(1, 10, 5_000);
    assert_eq!(world.left(1, 5_000), Some(10_000));
    assert!(world.expire(14_999).is_empty());
    assert_eq!(world.expire(15_000), [1]);
    assert_eq!(world.left(1, 16_000), Some(0));
}

#[test]
fn a_follower_expires_checkpoints_and_renews_nothing() {
    let mut world = LessorHarness::new();
    world.follow(RaftStatus { is_leader: false, term: 1, applied_term: 1 }, 0);
    world.grant(1, 2);
    world.follow(RaftStatus { is_leader: false, term: 1, applied_term: 1 }, 1);
    assert!(world.expire(1_000_000).is_empty() && world.note(1_000_000).is_none());
    assert_eq!(world.renew(1, 0), Renewal::Unknown);
    assert_eq!(world.lessor.term(), None);
}

#[test]
fn a_leader_counts_once_it_has_applied_all_earlier_entries() {
    let mut world = LessorHarness::new();
    world.grant(1, 10);
    world.follow(RaftStatus { is_leader: true, term: 3, applied_term: 2 }, 0);
    assert_eq!((world.lessor.term(), world.left(1, 0)), (None, None));
    world.follow(leading(3), 400);
    assert_eq!(world.left(1, 400), Some(11_000), "all of it, and an election time-out");
    assert!(world.expire(11_399).is_empty());
    assert_eq!(world.expire(11_400), [1]);
}

#[test]
fn a_renewed_lease_has_its_full_ttl_again() {
    let mut world = LessorHarness::leader();
    world.grant_at(1, 10, 0);
    let Renewal::Renewed { lease, needs_checkpoint: false } = world.renew(1, 4_000) else {
        panic!()
    };
    assert_eq!((lease.id, lease.ttl), (1, 10));
    assert!(world.expire(13_999).is_empty());
    assert_eq!(world.expire(14_000), [1]);
    assert_eq!(world.renew(2, 0), Renewal::Unknown);
}

#[test]
fn an_expired_lease_cannot_be_renewed_and_its_expiry_is_repeated() {
    let mut world = LessorHarness::leader();
    world.grant_at(1, 10, 0);
    assert_eq!(world.renew(1, 10_000), Renewal::Busy, "nobody has looked yet");
    assert_eq!(world.expire(10_000), [1]);
    assert_eq!(world.renew(1, 10_001), Renewal::Busy);
    assert!(world.expire(10_999).is_empty(), "it is on its way");
    assert_eq!(world.expire(11_000), [1]);
    world.table.write().unwrap().revoke(1);
    world.follow(leading(1), 11_500);
    assert!(world.expire(20_000).is_empty());
    assert_eq!(world.renew(1, 20_000), Renewal::Unknown);
}

#[test]
fn an_expiry_has_the_term_and_the_grant_of_the_lease() {
    let mut world = LessorHarness::leader();
    world.grant_at(5, 2, 0);
    world.table.write().unwrap().revoke(5);
    world.grant(5, 3);
    world.follow(leading(1), 500);
    assert!(world.expire(3_499).is_empty(), "the second one has its own time");
    assert_eq!(world.lessor.expire(at(3_500)), [LeaseExpire { id: 5, term: 1, granted: 2 }]);
}

#[test]
fn a_lease_with_a_reused_id_has_its_own_deadline() {
    let mut world = LessorHarness::leader();
    world.grant_at(1, 10, 0);
    assert_eq!(world.expire(10_000), [1]);
    world.table.write().unwrap().revoke(1);
    world.grant_at(1, 10, 10_500);
    assert!(world.expire(20_499).is_empty(), "what was to be tried again is gone");
    assert_eq!(world.expire(20_500), [1]);
}

#[test]
fn one_call_expires_a_limited_number_and_the_next_continues() {
    let mut world = LessorHarness::leader();
    (1..=1_200).for_each(|id| world.grant(id, 2));
    world.follow(leading(1), 0);
    let looks: Vec<usize> = (0..4).map(|n| world.expire(2_000 + n).len()).collect();
    assert_eq!(looks, [500, 500, 200, 0]);
}

#[test]
fn a_checkpoint_is_due_when_half_of_the_remaining_time_has_passed() {
    let mut world = LessorHarness::leader();
    world.grant_at(1, 40, 0);
    assert_eq!(world.note(19_999), None);
    assert_eq!(world.note(20_000), Some(vec![(1, 20)]));
    assert_eq!(world.note(29_999), None);
    assert_eq!(world.note(30_001), Some(vec![(1, 10)]), "rounded up: it must not end early");
    let written = world.table.read().unwrap().get(1).unwrap();
    assert_eq!((written.remaining_ttl, written.seconds()), (10, 10));
}

#[test]
fn a_long_lease_is_checkpointed_every_five_minutes_unless_renewed() {
    let mut world = LessorHarness::leader();
    world.grant_at(1, 86_400, 0);
    world.grant_at(2, 60, 0);
    for n in 1..=20 {
        assert!(matches!(
            world.renew(2, n * 20_000),
            Renewal::Renewed { needs_checkpoint: false, .. }
        ));
        world.follow(leading(1), n * 20_000);
        let noted = world.note(n * 20_000);
        assert_eq!(noted, (n == 15).then(|| vec![(1, 86_100)]), "{n}");
    }
}

#[test]
fn a_renewal_postpones_the_checkpoint() {
    let mut world = LessorHarness::leader();
    world.grant_at(1, 40, 0);
    assert!(matches!(world.renew(1, 15_000), Renewal::Renewed { needs_checkpoint: false, .. }));
    assert_eq!(world.note(34_999), None);
    assert_eq!(world.note(35_000), Some(vec![(1, 20)]));
}

#[test]
fn a_new_leader_continues_from_the_last_checkpoint() {
    let mut world = LessorHarness::leader();
    world.grant_at(1, 40, 0);
    world.note(20_000).unwrap();
    world.note(30_000).unwrap();
    // Changes of leader do not give the lease its full TTL again.
    for (term, now) in [(2, 39_000), (3, 41_000)] {
        world.follow(leading(term), now);
        assert_eq!(world.left(1, now), Some(11_000), "term {term}");
    }
    assert_eq!(world.expire(52_000), [1]);
}

#[test]
fn a_renewal_after_a_checkpoint_needs_a_full_ttl_entry_first() {
    let mut world = LessorHarness::leader();
    world.grant_at(1, 40, 0);
    world.note(20_000).unwrap();
    for n in 0..2 {
        let renewal = world.renew(1, 21_000 + n);
        assert!(
            matches!(renewal, Renewal::Renewed { needs_checkpoint: true, .. }),
            "until the log says so"
        );
    }
    let lease = world.table.read().unwrap().get(1).unwrap();
    let LeaseCheckpoint { term, leases } = full_ttl_checkpoint(1, [lease]);
    assert_eq!((term, &leases[..]), (1, &[LeaseLeft { id: 1, left: 0, granted: 1 }][..]));
    world.table.write().unwrap().checkpoint(1, 0);
    world.lessor.record_full_ttl(1, at(21_001));
    assert!(matches!(world.renew(1, 22_000), Renewal::Renewed { needs_checkpoint: false, .. }));
    world.follow(leading(2), 23_000);
    assert_eq!(world.left(1, 23_000), Some(41_000));
}

#[test]
fn a_renewal_after_another_leaders_checkpoint_needs_an_entry_too() {
    let mut world = LessorHarness::leader();
    world.grant_at(1, 40, 0);
    world.note(20_000).unwrap();
    world.follow(leading(2), 21_000);
    assert!(matches!(world.renew(1, 22_000), Renewal::Renewed { needs_checkpoint: true, .. }));
}

#[test]
fn a_checkpoint_of_an_earlier_term_does_not_block_renewals() {
    let mut world = LessorHarness::leader();
    world.grant_at(1, 40, 0);
    let noted = world.lessor.due_checkpoint(at(20_000)).unwrap();
    world.follow(RaftStatus { is_leader: false, term: 2, applied_term: 1 }, 20_100);
    world.lessor.finish_checkpoint(&noted);
    world.follow(leading(3), 21_000);
    assert!(matches!(world.renew(1, 21_001), Renewal::Renewed { needs_checkpoint: false, .. }));
}

#[test]
fn a_lease_cannot_be_renewed_while_its_checkpoint_is_proposed() {
    let mut world = LessorHarness::leader();
    world.grant_at(1, 40, 0);
    let noted = world.lessor.due_checkpoint(at(20_000)).unwrap();
    assert_eq!(world.renew(1, 20_001), Renewal::Busy);
    world.lessor.finish_checkpoint(&noted);
    assert!(matches!(world.renew(1, 20_002), Renewal::Renewed { needs_checkpoint: true, .. }));
    // This checkpoint is later than the renewal at 20,002. So the renewal's full TTL must not
    // cancel it.
    let noted = world.lessor.due_checkpoint(at(41_000)).unwrap();
    world.lessor.finish_checkpoint(&noted);
    world.lessor.record_full_ttl(1, at(20_002));
    assert!(matches!(world.renew(1, 42_000), Renewal::Renewed { needs_checkpoint: true, .. }));
}

#[test]
fn after_too_many_changes_the_clock_reads_all_leases_again() {
    let mut world = LessorHarness::leader();
    world.grant_at(1, 40, 0);
    let noted = world.lessor.due_checkpoint(at(20_000)).unwrap();
    for id in 2..=70_000 {
        world.grant(id, 40);
    }
    world.follow(leading(1), 21_000);
    assert_eq!(world.left(1, 21_000), Some(41_000));
    assert_eq!(world.left(70_000, 21_000), Some(41_000));
    assert_eq!(world.renew(1, 21_000), Renewal::Busy, "it is still being noted");
    world.lessor.finish_checkpoint(&noted);
    assert!(matches!(world.renew(1, 21_000), Renewal::Renewed { needs_checkpoint: true, .. }));
}

#[test]
fn a_key_belongs_to_the_lease_that_it_was_last_put_with() {
    let mut table = LeaseTable::default();
    for id in 1..=2 {
        table.grant(Lease { id, ttl: 9, remaining_ttl: 0, grant_index: 1 });
    }
    let keys = |table: &LeaseTable, id| {
        table.keys(id).map(|key| String::from_utf8(key.to_vec()).unwrap()).collect::<Vec<_>>()
    };
    for (key, id) in [("b", 1), ("a", 1), ("c", 1), ("a", 2), ("c", 0), ("d", 7)] {
        table.attach(key.as_bytes(), id);
    }
    assert_eq!((keys(&table, 1), keys(&table, 2)), (vec!["b".to_owned()], vec!["a".to_owned()]));
    table.attach(b"z", 1);
    table.detach(b"b");
    table.attach(b"y", 1);
    let gone = table.revoke(1).unwrap();
    assert_eq!(gone.iter().map(|key| key[0]).collect::<Vec<_>>(), b"yz");
    assert_eq!(table.revoke(1), None);
    assert_eq!((table.len(), table.has(1), table.has(2)), (1, false, true));
    let counters = table.counters();
    assert_eq!((counters.granted, counters.revoked, counters.ttl_sum), (2, 1, 18));
    assert_eq!(counters.ttls[4], 2, "up to 16 s");
}

#[test]
fn revoking_a_lease_detaches_only_its_own_keys() {
    for own in [1, 12, 13, 500] {
        let mut table = LeaseTable::default();
        for id in 1..=3 {
            table.grant(Lease { id, ttl: 9, remaining_ttl: 0, grant_index: 1 });
        }
        let key = |number: usize| format!("{number:03}").into_bytes();
        (0..100).for_each(|number| table.attach(&key(number), 2));
        (100..100 + own).for_each(|number| table.attach(&key(number), 1));
        assert_eq!(table.revoke(1).unwrap().len(), own);
        assert_eq!(
            (table.attached_key_count(), table.keys(2).count()),
            (100, 100),
            "{own} were its own"
        );
        (0..100).for_each(|number| table.attach(&key(number), 3));
        assert_eq!((table.keys(2).count(), table.keys(3).count()), (0, 100));
    }
}
