//! Tests of flushing: memtables and file together always show the same store, whoever flushes and
//! wherever a flush ends.

use std::sync::atomic::{AtomicBool, Ordering};

use node_proto::etcdserverpb::AlarmMember;

use super::*;
use crate::lease::Lease;
use crate::mvcc::flush::MAX_MEMTABLE_BYTES;
use crate::mvcc::revision::Revision;

fn lease(id: i64, remaining_ttl: i64) -> Lease {
    Lease { id, ttl: 60, remaining_ttl, grant_index: 1 }
}

/// Returns everything that a snapshot of the newest view contains.
fn snapshot(store: &Store) -> Vec<u8> {
    snapshot_of(&store.view())
}

fn snapshot_of(view: &View) -> Vec<u8> {
    let mut out = Vec::new();
    view.write_snapshot(&mut out).unwrap();
    out
}

/// Makes some changes of each kind: puts, single and shared tombstones, leases, alarms.
fn change_everything(writer: &mut StoreWriter, index: u64, round: i64) {
    write(writer, index, |batch| {
        for number in 0..20 {
            batch.put(bytes(&format!("k{number:02}")), bytes(&round.to_string()), 0);
        }
        batch.grant(lease(round, 0));
        batch.set_remaining_ttl(round - 1, 7);
        batch.revoke(round - 2);
    });
    write(writer, index + 1, |batch| {
        batch.delete(&KeyRange::One(bytes("k00")));
        batch.raise_alarm(AlarmMember { member_id: round.cast_unsigned(), alarm: 1 });
    });
    write(writer, index + 2, |batch| {
        batch.delete(&KeyRange::Between(bytes("k10"), bytes("k20")));
    });
}

#[test]
fn a_flush_changes_nothing_that_readers_see() {
    let disk = disk(1);
    let mut writer = open(&disk, CompactionMode::Background);
    let store = writer.store();
    let mut views = Vec::new();
    for round in 1..=6_i64 {
        change_everything(&mut writer, round.cast_unsigned() * 10, round);
        let before = snapshot(&store);
        views.push((store.view(), before.clone()));
        if round % 2 == 0 {
            store.flush().unwrap();
            assert_eq!(writer.durable(), writer.applied());
            views.push((store.view(), before));
        }
    }
    for (view, before) in &views {
        assert_eq!(snapshot_of(view), *before, "a view changed with a later flush");
    }
    let (at, whole) = (writer.applied(), snapshot(&store));
    store.flush().unwrap();
    drop((views, store, writer));
    disk.crash();
    let writer = open(&disk, CompactionMode::Background);
    assert_eq!((writer.applied(), snapshot(&writer.store())), (at, whole));
}

#[test]
fn old_views_stay_readable_after_a_flush_and_a_compaction() {
    let mut writer = open(&disk(1), CompactionMode::Background);
    let store = writer.store();
    change_everything(&mut writer, 10, 1);
    let (view, before) = (store.view(), snapshot(&store));
    change_everything(&mut writer, 20, 2);
    let revision = store.view().revision();
    write(&mut writer, 30, |batch| batch.compact(revision).unwrap());
    store.compact_all().unwrap();
    assert_eq!(snapshot_of(&view), before);
    assert_eq!(*store.finished_compactions().borrow(), revision);
    // Nine keys are left, and the ten tombstones at the compaction revision.
    assert_eq!(store.stored_revisions().unwrap(), 9 + 10);
}

#[test]
fn a_compaction_first_flushes_what_it_deletes() {
    let disk = disk(1);
    let mut writer = open(&disk, CompactionMode::Background);
    for index in 1..=5 {
        put(&mut writer, index, "k", &index.to_string());
    }
    write(&mut writer, 6, |batch| batch.compact(6).unwrap());
    assert_eq!(writer.durable().index, 0);
    writer.store().compact_step().unwrap();
    assert_eq!(writer.durable().index, 6);
    put(&mut writer, 7, "k", "7");
    disk.crash();
    drop(writer);
    let writer = open(&disk, CompactionMode::Background);
    assert_eq!((writer.applied().index, show(&writer.store(), 0)), (6, vec!["k=5@5".to_owned()]));
}

#[test]
fn rows_are_found_in_the_file_and_in_both_memtables() {
    let mut writer = open(&disk(1), CompactionMode::Background);
    let store = writer.store();
    put(&mut writer, 1, "a", "in the file");
    store.flush().unwrap();
    put(&mut writer, 2, "b", "frozen");
    // A flush that has frozen its memtable and not yet written it.
    let (frozen, _) = writer.shared.lock_memory().freeze().unwrap();
    assert!(frozen.bytes() > 0);
    put(&mut writer, 3, "c", "active");
    let expected = ["a=in the file@1", "b=frozen@1", "c=active@1"];
    assert_eq!(show(&store, 0), expected);
    let view = store.view();
    let rows = |range| view.rows(range).unwrap().map(|row| row.unwrap().0).collect::<Vec<_>>();
    let row = |main| Revision { main, sub: 0 }.to_row();
    assert_eq!(rows(0..u128::MAX), [2, 3, 4].map(row));
    assert_eq!(rows(row(3)..row(4)), [row(3)]);
    let empty = row(4)..row(3);
    assert_eq!(rows(empty), [0; 0]);
    let last = |row| view.last_row_upto(row).unwrap().map(|(row, _)| row);
    assert_eq!([2, 3, 4, 5].map(|main| last(row(main))), [2, 3, 4, 4].map(|main| Some(row(main))));
    assert_eq!(last(row(2) - 1), None);
    // The next flush completes the one that was begun, and leaves what came after it.
    assert_eq!(store.flush().unwrap().index, 2);
    assert_eq!(show(&store, 0), expected);
    assert_eq!(store.flush().unwrap().index, 3);
    assert_eq!(show(&store, 0), expected);
    assert_eq!(store.flush().unwrap().index, 3, "there is nothing left to write");
}

#[test]
fn a_power_cut_at_any_step_of_a_flush_leaves_one_of_two_states() {
    let (mut steps, mut lost, mut kept) = (0, 0, 0);
    loop {
        let disk = disk(steps);
        let mut writer = open(&disk, CompactionMode::Background);
        change_everything(&mut writer, 10, 1);
        writer.checkpoint().unwrap();
        let before = (writer.applied(), snapshot(&writer.store()));
        change_everything(&mut writer, 20, 2);
        let after = (writer.applied(), snapshot(&writer.store()));
        disk.power_off_after(steps);
        let done = writer.store().flush();
        let is_off = disk.is_power_off();
        std::mem::forget(writer);
        disk.crash();
        let writer = open(&disk, CompactionMode::Background);
        let found = (writer.applied(), snapshot(&writer.store()));
        assert!(found == after || (found == before && done.is_err()), "step {steps}: {done:?}");
        lost += u64::from(found == before);
        kept += u64::from(found == after);
        if !is_off {
            break;
        }
        steps += 1;
    }
    assert!(steps > 3 && lost > 0 && kept > 0, "{steps} steps: {lost} lost, {kept} kept");
}

#[test]
fn reads_are_right_while_flushes_and_compactions_run() {
    let disk = disk(1);
    let mut writer = open(&disk, CompactionMode::Background);
    let store = writer.store();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let flusher = scope.spawn(|| {
            let mut flushes = 0;
            while !is_done.load(Ordering::Relaxed) || flushes < 3 {
                store.flush().unwrap();
                store.compact_step().unwrap();
                flushes += 1;
            }
        });
        let reader = scope.spawn(|| {
            let mut reads = 0;
            while !is_done.load(Ordering::Relaxed) || reads < 3 {
                let view = store.view();
                match store.range(&view, &everything()) {
                    Ok(answer) => {
                        // Each batch writes the same value to all keys.
                        let values: Vec<_> = answer.kvs.iter().map(|kv| &kv.value).collect();
                        assert!(values.windows(2).all(|pair| pair[0] == pair[1]), "{values:?}");
                    }
                    Err(ReadError::Superseded) => {}
                    Err(error) => panic!("{error}"),
                }
                let mut last = 0;
                for row in view.all_rows().unwrap() {
                    let (number, _) = row.unwrap();
                    assert!(number > last, "rows are in order, and none comes twice");
                    last = number;
                }
                reads += 1;
            }
        });
        let mut index = 0;
        for round in 0..300 {
            index += 1;
            write(&mut writer, index, |batch| {
                for number in 0..10 {
                    batch.put(bytes(&format!("k{number}")), bytes(&round.to_string()), 0);
                }
            });
            if round % 40 == 39 {
                index += 1;
                let revision = writer.store().view().revision();
                write(&mut writer, index, |batch| batch.compact(revision - 5).unwrap());
            }
        }
        is_done.store(true, Ordering::Relaxed);
        flusher.join().unwrap();
        reader.join().unwrap();
    });
    store.compact_all().unwrap();
    let (at, whole) = (writer.applied(), snapshot(&store));
    store.flush().unwrap();
    drop((store, writer));
    disk.crash();
    let writer = open(&disk, CompactionMode::Background);
    assert_eq!((writer.applied(), snapshot(&writer.store())), (at, whole));
}

#[test]
fn a_snapshot_replaces_what_was_not_flushed() {
    let (disk, other) = (disk(1), super::disk(2));
    let mut source = open(&other, CompactionMode::Background);
    change_everything(&mut source, 10, 5);
    let newer = snapshot(&source.store());
    let mut writer = open(&disk, CompactionMode::Background);
    change_everything(&mut writer, 1, 1);
    writer.shared.lock_memory().freeze().unwrap();
    change_everything(&mut writer, 4, 2);
    writer.install_snapshot(&mut &newer[..]).unwrap();
    assert_eq!(snapshot(&writer.store()), newer);
    assert_eq!(writer.durable(), source.applied());
    writer.store().flush().unwrap();
    assert_eq!(snapshot(&writer.store()), newer);
    disk.crash();
    drop(writer);
    assert_eq!(snapshot(&open(&disk, CompactionMode::Background).store()), newer);
}

#[test]
fn a_full_memtable_makes_the_next_batch_flush() {
    let mut writer = open(&disk(1), CompactionMode::Background);
    let value = Bytes::from(vec![b'v'; 1 << 20]);
    let active = |writer: &StoreWriter| writer.shared.lock_memory().tables.active.bytes();
    let mut index = 0;
    while active(&writer) < MAX_MEMTABLE_BYTES {
        index += 1;
        write(&mut writer, index, |batch| {
            batch.put(bytes("k"), value.clone(), 0);
        });
    }
    assert_eq!(writer.durable().index, 0);
    put(&mut writer, index + 1, "k", "v");
    assert_eq!(writer.durable().index, index);
    assert!(active(&writer) < 1_000, "only the last batch is left in memory");
}
