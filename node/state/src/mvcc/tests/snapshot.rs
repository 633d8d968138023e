//! Tests of the snapshot stream: it is installed as a whole or not at all.

use node_proto::etcdserverpb::AlarmMember;

use super::*;
use crate::identity::MemberId;
use crate::membership::MemberChange;

fn filled() -> StoreWriter {
    let options = StoreOptions {
        members: vec![member(7, "seven"), member(8, "eight")],
        ..StoreOptions::default()
    };
    let mut writer = StoreWriter::open(backend(&disk(1)), options).unwrap();
    for index in 1..=30 {
        put(&mut writer, index, &format!("k{}", index % 7), &"x".repeat(20_000));
    }
    write(&mut writer, 31, |batch| {
        batch.raise_alarm(AlarmMember { member_id: 7, alarm: 1 });
        batch.compact(5).unwrap();
        batch.members_mut().apply_change(MemberChange::Remove(MemberId(8)), 31).unwrap();
    });
    writer
}

fn stream(writer: &StoreWriter) -> Vec<u8> {
    let mut stream = Vec::new();
    writer.store().view().write_snapshot(&mut stream).unwrap();
    stream
}

#[test]
fn a_snapshot_has_all_replicated_state_and_survives_a_power_cut() {
    let writer = filled();
    let target = disk(2);
    let mut other = open(&target, CompactionMode::Background);
    // The snapshot doesn't contain the rows of these records, so its installation must delete them.
    write(&mut other, 1, |batch| {
        for key in ["old", "older", "oldest"] {
            batch.put(bytes(key), bytes("gone"), 0);
        }
    });
    other.install_snapshot(&mut &stream(&writer)[..]).unwrap();
    target.crash();
    drop(other);
    let other = open(&target, CompactionMode::Background);
    let (a, b) = (writer.store().view(), other.store().view());
    assert_eq!(a.applied(), b.applied());
    assert_eq!((a.revision(), a.compact_revision()), (b.revision(), b.compact_revision()));
    assert_eq!((a.members(), a.alarms()), (b.members(), b.alarms()));
    let records = |writer: &StoreWriter| writer.store().stored_revisions().unwrap();
    assert_eq!(records(&writer), records(&other));
    assert!(b.members().is_removed(MemberId(8)));
    assert_eq!(show(&writer.store(), 0), show(&other.store(), 0));
    assert_eq!(show(&writer.store(), 10), show(&other.store(), 10));
}

#[test]
fn a_truncated_snapshot_changes_nothing() {
    let stream = stream(&filled());
    for length in [0, 5, 12, 30, 300_000, stream.len() - 1] {
        let mut other = open(&disk(2), CompactionMode::Background);
        put(&mut other, 1, "k", "mine");
        let refused = other.install_snapshot(&mut &stream[..length]).err();
        assert!(matches!(refused, Some(StoreError::Snapshot(_))), "{length}: {refused:?}");
        assert_eq!(show(&other.store(), 0), ["k=mine@1"]);
        put(&mut other, 2, "k", "still");
    }
}

#[test]
fn a_flipped_bit_anywhere_in_a_snapshot_is_found() {
    let stream = stream(&filled());
    for at in (0..stream.len()).step_by(9_973) {
        let mut bad = stream.clone();
        bad[at] ^= 1;
        let mut other = open(&disk(2), CompactionMode::Background);
        assert!(other.install_snapshot(&mut &bad[..]).is_err(), "byte {at}");
        assert_eq!(other.applied().index, 0);
    }
}

#[test]
fn inspecting_a_snapshot_returns_its_position_and_members() {
    let (at, members) = inspect_snapshot(&mut &stream(&filled())[..]).unwrap();
    assert_eq!(at, Position { index: 31, term: 1 });
    assert_eq!(members, crate::state_machine::Members { voters: vec![7], learners: Vec::new() });
}
