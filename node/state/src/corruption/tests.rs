//! Comparisons of stores that applied different changes, and the messages between members.

use std::collections::{BTreeMap, BTreeSet};

use node_proto::command;
use node_proto::musterpb::{LeaseQuestion, StoreAnswer, StoreClaim, StoreQuestion};
use prost::Message as _;

use super::*;
use crate::disk::simulated::SimulatedDisk;
use crate::identity::MemberId;
use crate::membership::{ChangeRequest, MemberChange};
use crate::mvcc::tests::{backend, disk};
use crate::mvcc::{Batch, CompactionMode, StoreOptions, StoreWriter};
use crate::state_machine::Position;

fn store(seed: u64) -> (SimulatedDisk, StoreWriter) {
    let disk = disk(seed);
    let options =
        StoreOptions { compaction: CompactionMode::Background, ..StoreOptions::default() };
    let writer = StoreWriter::open(backend(&disk), options).unwrap();
    (disk, writer)
}

fn apply(writer: &mut StoreWriter, index: u64, work: impl Fn(&mut Batch<'_>)) {
    let done = writer.batch(Position { index, term: 1 }, |batch| {
        work(batch);
        batch.end_request();
        Ok(())
    });
    done.unwrap();
}

fn put(key: &'static str, value: &'static str) -> impl Fn(&mut Batch<'_>) + Copy {
    move |batch| {
        batch.put(key.into(), value.into(), 0);
    }
}

/// Three members, of which the last may apply other changes than the first two. The first one asks
/// the question.
struct ComparedStores(Vec<(SimulatedDisk, StoreWriter)>);

impl ComparedStores {
    fn new() -> Self {
        Self((1..=3).map(store).collect())
    }

    fn all(&mut self, index: u64, work: impl Fn(&mut Batch<'_>) + Copy) {
        self.last(index, work, work);
    }

    /// Applies `work` on the first two members and `other` on the last one.
    fn last(
        &mut self,
        index: u64,
        work: impl Fn(&mut Batch<'_>) + Copy,
        other: impl Fn(&mut Batch<'_>),
    ) {
        for (_, writer) in &mut self.0[..2] {
            apply(writer, index, work);
        }
        apply(&mut self.0[2].1, index, other);
    }

    fn verdict(&self) -> CorruptionVerdict {
        let store = |n: usize| self.0[n].1.store();
        let question = Question::of(&store(0).view());
        let said: BTreeMap<u64, Vec<Claim>> = (0..self.0.len())
            .map(|n| (n as u64 + 1, make_claims(&store(n), &store(n).view(), question).unwrap()))
            .collect();
        // Claims are the same after encoding and decoding.
        for claims in said.values() {
            let wire =
                StoreAnswer::decode(&encode_claims(claims.clone()).encode_to_vec()[..]).unwrap();
            assert_eq!(decode_claims(wire), *claims);
        }
        judge_claims(&BTreeSet::from([1, 2, 3]), &said)
    }

    #[track_caller]
    fn assert_sound(&self) {
        let all = BTreeSet::from([1, 2, 3]);
        let sound = CorruptionVerdict { compared: all, ..CorruptionVerdict::default() };
        assert_eq!(self.verdict(), sound);
    }

    #[track_caller]
    fn assert_no_difference(&self) {
        let verdict = self.verdict();
        assert_eq!((&verdict.corrupt, verdict.is_undecided), (&[].into(), false), "{verdict:?}");
    }

    #[track_caller]
    fn assert_corrupt(&self, member: u64) {
        let verdict = self.verdict();
        assert_eq!(
            (&verdict.corrupt, verdict.is_undecided),
            (&[member].into(), false),
            "{verdict:?}"
        );
    }
}

#[test]
fn equal_stores_are_sound_at_any_progress_of_their_compactions() {
    let mut cluster = ComparedStores::new();
    cluster.all(1, put("a", "1"));
    cluster.all(2, put("a", "2"));
    cluster.assert_sound();
    cluster.all(3, |batch| batch.compact(3).unwrap());
    for n in [1, 2, 0] {
        cluster.assert_no_difference();
        cluster.0[n].1.store().compact_all().unwrap();
    }
    cluster.assert_sound();
    // The only key is deleted and written again in one revision.
    cluster.all(4, |batch| {
        batch.delete(&crate::mvcc::KeyRange::One("a".into()));
        batch.put("a".into(), "3".into(), 0);
    });
    cluster.all(5, |batch| batch.compact(4).unwrap());
    for n in [0, 2, 1] {
        cluster.assert_no_difference();
        cluster.0[n].1.store().compact_all().unwrap();
    }
    cluster.assert_sound();
}

#[test]
fn a_different_value_key_or_order_is_found() {
    for other in [put("a", "2"), put("b", "1")] {
        let mut cluster = ComparedStores::new();
        cluster.last(1, put("a", "1"), other);
        cluster.assert_corrupt(3);
        // The difference is still found after further entries.
        cluster.all(2, put("c", "1"));
        cluster.assert_corrupt(3);
    }
}

#[test]
fn a_skipped_or_repeated_write_or_compaction_is_found() {
    let write = put("a", "1");
    let nothing = |_: &mut Batch<'_>| {};
    let mut cluster = ComparedStores::new();
    cluster.last(1, write, nothing);
    cluster.assert_corrupt(3);
    cluster.all(2, write);
    cluster.assert_corrupt(3);

    let mut cluster = ComparedStores::new();
    cluster.last(1, write, |batch| {
        write(batch);
        batch.end_request();
        write(batch);
    });
    cluster.assert_corrupt(3);

    let mut cluster = ComparedStores::new();
    cluster.all(1, write);
    cluster.all(2, write);
    cluster.last(3, |batch| batch.compact(2).unwrap(), nothing);
    cluster.assert_corrupt(3);
    // The difference is also found if no other member has applied the same last entry.
    apply(&mut cluster.0[2].1, 4, write);
    cluster.assert_corrupt(3);
}

#[test]
fn a_member_that_is_behind_is_not_compared() {
    let mut cluster = ComparedStores::new();
    cluster.all(1, put("a", "1"));
    for (_, writer) in &mut cluster.0[..2] {
        apply(writer, 2, put("a", "2"));
    }
    let verdict = cluster.verdict();
    assert_eq!((verdict.compared, verdict.corrupt), ([1, 2].into(), [].into()));
}

#[test]
fn the_data_at_past_compactions_is_compared_too() {
    let mut cluster = ComparedStores::new();
    cluster.last(1, put("a", "1"), put("a", "2"));
    cluster.all(2, put("a", "3"));
    cluster.all(3, |batch| batch.compact(3).unwrap());
    for (_, writer) in &cluster.0 {
        writer.store().compact_all().unwrap();
    }
    // All members have compacted the values that differed, so the difference no longer counts.
    cluster.assert_sound();
    // If member 3 can't be compared by newer data, the old difference counts.
    for (_, writer) in &mut cluster.0[..2] {
        apply(writer, 4, put("b", "1"));
        apply(writer, 5, put("b", "2"));
    }
    cluster.assert_corrupt(3);
}

#[test]
fn during_a_compaction_nothing_is_compared_instead_of_a_false_difference() {
    let (_disk, mut writer) = store(1);
    apply(&mut writer, 1, put("a", "1"));
    apply(&mut writer, 2, put("b", "1"));
    apply(&mut writer, 3, |batch| batch.compact(2).unwrap());
    let store = writer.store();
    store.compact_all().unwrap();
    apply(&mut writer, 4, |batch| {
        for key in ["a", "b"] {
            batch.delete(&crate::mvcc::KeyRange::One(key.into()));
        }
    });
    let (before, revision) = (store.view(), store.view().revision());
    let undisturbed = store.hash_for_comparison(&before, revision).unwrap();
    let question = Question::of(&before);
    let compacted = undisturbed.compact_revision;
    let of_it = ClaimSubject::Data { revision, compacted };
    let said = || make_claims(&store, &before, question).unwrap();
    let has_it = || said().iter().any(|claim| claim.subject == of_it);
    assert!(has_it());
    apply(&mut writer, 5, |batch| batch.compact(revision).unwrap());
    assert!(!has_it(), "it has begun");
    store.compact_all().unwrap();
    assert!(!has_it(), "it is over");
    let said = said();
    // By etcd's rules, the hash of a compaction differs from that of the data, so it has its own
    // subject.
    let found = ClaimSubject::Compaction { revision, previous: compacted };
    let found = said.iter().find(|claim| claim.subject == found).unwrap();
    assert_ne!(found.value, ClaimValue::Hash(undisturbed.hash));
}

/// A snapshot contains records that the sender's compaction has yet to remove, and these affect
/// which keys count in the hash. So the receiver must not be compared, even if it had finished the
/// same compaction before.
#[test]
fn a_store_with_a_compaction_under_way_is_not_compared() {
    let mut cluster = ComparedStores::new();
    cluster.all(1, put("a", "1"));
    cluster.all(2, |batch| {
        batch.delete(&crate::mvcc::KeyRange::One("a".into()));
        batch.put("a".into(), "2".into(), 0);
    });
    cluster.all(3, |batch| batch.compact(3).unwrap());
    let mut snapshot = Vec::new();
    cluster.0[0].1.store().view().write_snapshot(&mut snapshot).unwrap();
    for (_, writer) in &cluster.0 {
        writer.store().compact_all().unwrap();
    }
    cluster.assert_sound();
    cluster.0[2].1.install_snapshot(&mut &snapshot[..]).unwrap();
    cluster.assert_no_difference();
    cluster.0[2].1.store().compact_all().unwrap();
    cluster.assert_sound();
}

#[test]
fn a_member_with_an_unreadable_store_is_corrupt_only_if_a_quorum_can_read() {
    let question = Question { index: 7, revision: 5, compacted: -1 };
    let sound =
        Claim { subject: ClaimSubject::Progress(question), value: ClaimValue::Reached(true) };
    let broken = Claim::unreadable(question);
    assert_eq!(decode_claims(encode_claims(vec![sound, broken])), [sound, broken]);
    let judged = |said: [Claim; 3]| {
        let said = (1..).zip(said.map(|claim| vec![claim])).collect();
        judge_claims(&BTreeSet::from([1, 2, 3]), &said)
    };
    assert_eq!(judged([sound, sound, broken]).corrupt, [3].into());
    // One readable store of three is no quorum, so the others are not found corrupt.
    assert_eq!(judged([sound, broken, broken]), CorruptionVerdict::default());
    assert_eq!(judged([broken, broken, broken]), CorruptionVerdict::default());
}

#[test]
fn claims_with_an_unknown_subject_are_ignored() {
    let later = StoreClaim { about: 99, index: 7, revision: 5, ..StoreClaim::default() };
    assert_eq!(decode_claims(StoreAnswer { claims: vec![later, StoreClaim::default()] }), []);
}

#[test]
fn no_request_between_members_is_taken_for_another_kind() {
    let question = Question { index: 1 << 40, revision: 5, compacted: -1 };
    let asked = question.encode().encode_to_vec();
    assert_eq!(Question::decode(StoreQuestion::decode(&asked[..]).unwrap()), Some(question));
    // An older build decodes the question as a change of members that names no change, and refuses
    // it.
    assert_eq!(command::MemberChange::decode(&asked[..]).unwrap().change, None);
    assert!(LeaseQuestion::decode(&asked[..]).unwrap().ids.is_empty());

    let change = ChangeRequest::from(MemberChange::Remove(MemberId(9)));
    let change = command::MemberChange::from(&change);
    let lease = LeaseQuestion { renew: true, ids: vec![1, 2] };
    for other in [change.encode_to_vec(), lease.encode_to_vec()] {
        assert_eq!(Question::decode(StoreQuestion::decode(&other[..]).unwrap()), None);
    }
}
