//! Tests of single behaviours of the store.

use node_proto::etcdserverpb::range_request::{SortOrder, SortTarget};

use super::*;
use crate::disk::simulated::SimulatedDisk;
use crate::identity::MemberId;
use crate::membership::MemberChange;

fn fresh() -> (SimulatedDisk, StoreWriter) {
    let disk = disk(1);
    let writer = open(&disk, CompactionMode::Background);
    (disk, writer)
}

#[test]
fn an_empty_store_is_at_revision_one_and_was_never_compacted() {
    let (_, writer) = fresh();
    let view = writer.store().view();
    assert_eq!((view.revision(), view.compact_revision(), view.applied().index), (1, -1, 0));
}

#[test]
fn a_delete_without_matching_keys_makes_no_revision() {
    let (_, mut writer) = fresh();
    let events = write(&mut writer, 1, |batch| {
        assert_eq!(batch.delete(&KeyRange::One(bytes("k"))), 0);
    });
    assert!(events.events.is_empty());
    assert_eq!(writer.store().view().revision(), 1);
    assert_eq!(writer.applied().index, 1);
}

#[test]
fn a_view_does_not_change_with_later_writes() {
    let (_, mut writer) = fresh();
    put(&mut writer, 1, "k", "1");
    let store = writer.store();
    let view = store.view();
    put(&mut writer, 2, "k", "2");
    put(&mut writer, 3, "l", "3");
    let seen = store.range(&view, &everything()).unwrap();
    assert_eq!(seen.kvs.len(), 1);
    assert_eq!(seen.kvs[0].value, bytes("1"));
    assert_eq!(show(&store, 0), ["k=2@2", "l=3@1"]);
}

#[test]
fn a_read_of_a_view_older_than_a_compaction_is_refused() {
    let (_, mut writer) = fresh();
    put(&mut writer, 1, "k", "1");
    let store = writer.store();
    let view = store.view();
    put(&mut writer, 2, "k", "2");
    write(&mut writer, 3, |batch| batch.compact(3).unwrap());
    store.compact_all().unwrap();
    let answer = store.range(&view, &everything());
    assert!(matches!(answer, Err(ReadError::Superseded)), "{answer:?}");
    let asked = RangeRequest { revision: 2, ..everything() };
    let answer = store.range(&view, &asked);
    assert!(matches!(answer, Err(ReadError::Compacted)), "{answer:?}");
}

#[test]
fn a_compaction_deletes_unreachable_records() {
    let (_, mut writer) = fresh();
    for index in 1..=50 {
        put(&mut writer, index, "k", "v");
    }
    let before = writer.store().record_bytes();
    write(&mut writer, 51, |batch| batch.compact(51).unwrap());
    writer.store().compact_all().unwrap();
    put(&mut writer, 52, "l", "v");
    assert_eq!(writer.store().stored_revisions().unwrap(), 2);
    assert!(writer.store().record_bytes() < before / 10);
}

#[test]
fn a_compaction_interrupted_by_a_restart_is_finished_afterwards() {
    let (disk, mut writer) = fresh();
    for index in 1..=20 {
        put(&mut writer, index, "k", "v");
    }
    write(&mut writer, 21, |batch| batch.compact(15).unwrap());
    writer.checkpoint().unwrap();
    disk.crash();
    drop(writer);
    let mut writer = open(&disk, CompactionMode::Background);
    let store = writer.store();
    assert_eq!(*store.finished_compactions().borrow(), -1);
    store.compact_all().unwrap();
    assert_eq!(*store.finished_compactions().borrow(), 15);
    put(&mut writer, 22, "l", "v");
    assert_eq!(store.stored_revisions().unwrap(), 8);
}

/// Makes a store with ten keys of two revisions each, whose compactions process two keys per step.
fn of_small_steps() -> StoreWriter {
    let options = StoreOptions { compacted_keys_per_step: 2, ..StoreOptions::default() };
    let mut writer = open_with(&disk(1), options);
    for index in 1..=20 {
        put(&mut writer, index, &format!("k{}", index % 10), "v");
    }
    writer
}

#[test]
fn a_compaction_of_many_steps_is_finished_after_the_last() {
    let mut writer = of_small_steps();
    write(&mut writer, 21, |batch| batch.compact(21).unwrap());
    let store = writer.store();
    let finished = store.finished_compactions();
    for left in (11..=19).rev().step_by(2).take(4) {
        assert_eq!(store.compact_step().unwrap(), CompactionProgress::More);
        assert_eq!(*finished.borrow(), -1);
        put(&mut writer, 100 - left, "k0", "v");
    }
    store.compact_all().unwrap();
    assert_eq!(*finished.borrow(), 21);
    put(&mut writer, 101, "k0", "v");
    // The 15 records are one for each of the 10 keys, and the 5 puts after the compaction.
    assert_eq!(store.stored_revisions().unwrap(), 10 + 5);
}

#[test]
fn a_compaction_requested_during_a_step_replaces_the_running_one() {
    let mut writer = of_small_steps();
    write(&mut writer, 21, |batch| batch.compact(5).unwrap());
    let store = writer.store();
    let step = std::thread::scope(|scope| {
        let no_flush = store.shared.flush_lock.lock().unwrap();
        let step = scope.spawn(|| store.compact_step().unwrap());
        // The compaction step takes the older compaction, then waits for its flush.
        while store.shared.lock_cursor().is_some() {
            std::thread::yield_now();
        }
        write(&mut writer, 22, |batch| batch.compact(21).unwrap());
        drop(no_flush);
        step.join().unwrap()
    });
    assert_eq!(step, CompactionProgress::More);
    store.compact_all().unwrap();
    assert_eq!(*store.finished_compactions().borrow(), 21);
    put(&mut writer, 23, "l", "v");
    assert_eq!(store.stored_revisions().unwrap(), 10 + 1);
}

#[test]
fn the_checksum_from_before_a_compaction_is_kept() {
    let mut writer = of_small_steps();
    let store = writer.store();
    let hash = |revision| store.hash_kv(&store.view(), revision);
    let before = hash(15).unwrap();
    write(&mut writer, 21, |batch| batch.compact(15).unwrap());
    store.compact_all().unwrap();
    assert_eq!(hash(15).unwrap(), before);
    assert!(matches!(hash(14), Err(ReadError::Compacted)));
    let second = hash(18).unwrap();
    assert_eq!(second.compact_revision, 15);
    write(&mut writer, 22, |batch| batch.compact(18).unwrap());
    store.compact_all().unwrap();
    assert_eq!((hash(15).unwrap(), hash(18).unwrap()), (before, second));
    // Nothing existed before the first revision.
    let nothing = hash(-7).unwrap();
    assert_eq!((nothing.revision, nothing.compact_revision), (-7, 18));
}

#[test]
fn compacting_twice_or_ahead_is_refused() {
    let (_, mut writer) = fresh();
    put(&mut writer, 1, "k", "1");
    put(&mut writer, 2, "k", "2");
    write(&mut writer, 3, |batch| {
        assert!(matches!(batch.compact(4), Err(ReadError::Future)));
        batch.compact(2).unwrap();
        assert!(matches!(batch.compact(2), Err(ReadError::Compacted)));
    });
}

#[test]
fn a_power_cut_without_a_checkpoint_reverts_the_store_consistently() {
    for seed in 0..50 {
        let disk = disk(seed);
        let mut writer = open(&disk, CompactionMode::Background);
        put(&mut writer, 1, "k", "1");
        writer.checkpoint().unwrap();
        for index in 2..10 {
            put(&mut writer, index, "k", &index.to_string());
        }
        disk.crash();
        drop(writer);
        let writer = open(&disk, CompactionMode::Background);
        // A crash may undo entries, but the records and the log position are undone together.
        let version = writer.applied().index;
        assert_eq!(show(&writer.store(), 0), [format!("k={version}@{version}")]);
        assert_eq!(writer.store().view().revision(), 1 + i64::try_from(version).unwrap());
    }
}

#[test]
fn a_wide_range_is_read_in_steps_with_the_same_answer() {
    let (_, mut writer) = fresh();
    write(&mut writer, 1, |batch| {
        for number in 0..1_000 {
            batch.put(bytes(&format!("{number:04}")), bytes("v"), 0);
        }
    });
    let store = writer.store();
    let view = store.view();
    let request = RangeRequest { limit: 700, ..everything() };
    let mut gather = store.begin_range(&view, &request).unwrap();
    let mut steps = 1;
    let response = loop {
        match store.step_range(&view, &mut gather).unwrap() {
            RangeStep::Unfinished => steps += 1,
            RangeStep::Done(response) => break response,
        }
    };
    assert!(steps > 1);
    assert_eq!((response.kvs.len(), response.count, response.more), (700, 1_000, true));
    assert!(response.kvs.is_sorted_by_key(|kv| kv.key.clone()));
}

#[test]
fn a_sorted_range_with_a_limit_is_the_start_of_the_whole_range() {
    let (_, mut writer) = fresh();
    // Many keys have equal values and versions, and neither follows the order of the keys.
    for number in 0..700_u64 {
        put(
            &mut writer,
            number + 1,
            &format!("{:03}", number * 7 % 300),
            &format!("{}", number * 13 % 5),
        );
    }
    let store = writer.store();
    let view = store.view();
    let targets = [
        SortTarget::Key,
        SortTarget::Version,
        SortTarget::Create,
        SortTarget::Mod,
        SortTarget::Value,
    ];
    for (target, order) in
        targets.iter().flat_map(|t| [(t, SortOrder::Ascend), (t, SortOrder::Descend)])
    {
        for min_mod_revision in [0, 500] {
            let all = RangeRequest {
                sort_order: order.into(),
                sort_target: (*target).into(),
                min_mod_revision,
                ..everything()
            };
            let whole = store.range(&view, &all).unwrap();
            for limit in [1, 2, 31, 32, 33, 63, 64, 150, 299, 300, 301] {
                let mut gather =
                    store.begin_range(&view, &RangeRequest { limit, ..all.clone() }).unwrap();
                let some = loop {
                    if let RangeStep::Done(response) = store.step_range(&view, &mut gather).unwrap()
                    {
                        break response;
                    }
                };
                let first = whole.kvs.len().min(usize::try_from(limit).unwrap());
                assert_eq!(some.kvs, whole.kvs[..first], "{target:?} {order:?} {limit}");
                assert_eq!((some.more, some.count), (first < whole.kvs.len(), whole.count));
            }
        }
    }
}

#[test]
fn unwanted_pairs_of_a_sorted_range_are_dropped_early() {
    let (_, mut writer) = fresh();
    let value = "v".repeat(1_000);
    for number in 0..1_000_u64 {
        put(&mut writer, number + 1, &format!("{number:04}"), &value);
    }
    let store = writer.store();
    let view = store.view();
    let newest = RangeRequest {
        limit: 1,
        sort_order: SortOrder::Descend.into(),
        sort_target: SortTarget::Create.into(),
        ..everything()
    };
    let filtered = RangeRequest { max_create_revision: 5, ..everything() };
    for request in [newest, filtered] {
        let mut gather = store.begin_range(&view, &request).unwrap();
        while let RangeStep::Unfinished = store.step_range(&view, &mut gather).unwrap() {
            assert!(gather.bytes() < 100 * 1_200, "{}", gather.bytes());
        }
    }
}

#[test]
fn a_file_of_another_format_is_refused() {
    let (disk, writer) = fresh();
    drop(writer);
    let db = redb::Database::builder().create_with_backend(backend(&disk)).unwrap();
    let txn = db.begin_write().unwrap();
    txn.open_table(tables::META).unwrap().insert("format", &7_u32.to_le_bytes()[..]).unwrap();
    txn.commit().unwrap();
    drop(db);
    let refused = StoreWriter::open(backend(&disk), StoreOptions::default()).err().unwrap();
    assert!(matches!(refused, StoreError::Format { found: 7, known: tables::FORMAT }), "{refused}");
}

#[test]
fn the_initial_members_of_a_store_survive_a_restart() {
    let disk = disk(1);
    let options =
        StoreOptions { members: vec![member(9, "m9"), member(3, "m3")], ..StoreOptions::default() };
    drop(StoreWriter::open(backend(&disk), options).unwrap());
    let writer = open(&disk, CompactionMode::Background);
    let view = writer.store().view();
    let all: Vec<_> = view.members().members().collect();
    assert_eq!(all, [&member(3, "m3"), &member(9, "m9")]);
}

#[test]
fn members_and_the_applied_index_change_together() {
    let disk = disk(1);
    let options =
        StoreOptions { members: vec![member(3, "m3"), member(9, "m9")], ..StoreOptions::default() };
    let mut writer = StoreWriter::open(backend(&disk), options).unwrap();
    let mut told = writer.store().members();
    write(&mut writer, 1, |batch| {
        batch.members_mut().apply_change(MemberChange::Remove(MemberId(9)), 1).unwrap();
    });
    assert!(told.has_changed().unwrap() && told.borrow_and_update().is_removed(MemberId(9)));
    write(&mut writer, 2, |_| ());
    assert!(!told.has_changed().unwrap(), "nothing of theirs changed");
    disk.crash();
    drop(writer);
    let mut writer = open(&disk, CompactionMode::Background);
    let found = |writer: &StoreWriter| {
        let view = writer.store().view();
        (view.applied().index, view.members().is_removed(MemberId(9)))
    };
    assert_eq!(found(&writer), (0, false), "neither was durable");
    write(&mut writer, 1, |batch| {
        batch.members_mut().apply_change(MemberChange::Remove(MemberId(9)), 1).unwrap();
    });
    writer.checkpoint().unwrap();
    disk.crash();
    drop(writer);
    assert_eq!(found(&open(&disk, CompactionMode::Background)), (1, true));
}

#[test]
fn a_checkpoint_on_a_failed_disk_is_an_error() {
    let (disk, mut writer) = fresh();
    put(&mut writer, 1, "k", "1");
    disk.power_off_after(0);
    assert!(writer.checkpoint().is_err());
}

/// The expected checksums are those of etcd 3.7.3.
#[test]
fn a_checksum_without_keys_in_force_covers_the_compacted_state() {
    let (_, mut writer) = fresh();
    let store = writer.store();
    let hash = |revision| store.hash_kv(&store.view(), revision).unwrap().hash;
    put(&mut writer, 1, "k1", "v1");
    put(&mut writer, 2, "k2", "v2");
    put(&mut writer, 3, "k1", "v1b");
    write(&mut writer, 4, |batch| batch.compact(3).unwrap());
    for (index, key) in [(5, "k1"), (6, "k2")] {
        write(&mut writer, index, |batch| {
            batch.delete(&KeyRange::One(bytes(key)));
        });
    }
    for _ in 0..2 {
        // The checksum is the same before and after the old revisions are deleted.
        assert_eq!((hash(5), hash(6)), (2_858_533_391, 3_486_611_356));
        store.compact_all().unwrap();
    }
}

/// The expected checksums are those of etcd 3.7.3. If one revision deletes a key and creates it
/// again, etcd's set of revisions to keep lacks that key. So the set is empty here.
#[test]
fn a_key_deleted_and_recreated_in_one_revision_is_not_counted_at_it() {
    let (_, mut writer) = fresh();
    let store = writer.store();
    let hash = |revision| store.hash_kv(&store.view(), revision).unwrap().hash;
    put(&mut writer, 1, "k1", "v1");
    put(&mut writer, 2, "k2", "v2");
    put(&mut writer, 3, "k1", "v1b");
    write(&mut writer, 4, |batch| batch.compact(4).unwrap());
    write(&mut writer, 5, |batch| {
        batch.delete(&KeyRange::new(bytes("\0"), bytes("\0")));
        batch.put(bytes("k1"), bytes("v1c"), 0);
    });
    put(&mut writer, 6, "k2", "v2b");
    for _ in 0..2 {
        assert_eq!((hash(5), hash(6)), (2_568_465_537, 2_890_909_842));
        store.compact_all().unwrap();
    }
}

/// The expected checksums are those of etcd 3.7.3. Its compaction keeps the tombstones of the
/// compaction revision. A checksum at that revision doesn't count them.
#[test]
fn a_compaction_after_all_keys_were_deleted_has_etcds_checksum() {
    let (_, mut writer) = fresh();
    let store = writer.store();
    let hash = |revision| store.hash_kv(&store.view(), revision).unwrap().hash;
    put(&mut writer, 1, "k1", "v1");
    put(&mut writer, 2, "k3", "v3");
    write(&mut writer, 3, |batch| batch.compact(3).unwrap());
    store.compact_all().unwrap();
    put(&mut writer, 4, "k2", "v2");
    write(&mut writer, 5, |batch| {
        batch.delete(&KeyRange::new(bytes("\0"), bytes("\0")));
    });
    put(&mut writer, 6, "k1", "v1b");
    assert_eq!(hash(5), 2_530_476_820);
    write(&mut writer, 7, |batch| batch.compact(5).unwrap());
    store.compact_all().unwrap();
    assert_eq!((hash(5), hash(0)), (2_955_948_626, 3_508_175_076));
}

/// The hashed bytes are etcd's. The expected checksums are those that `etcdctl endpoint hashkv`
/// printed for etcd 3.4.23 after the same requests.
#[test]
fn checksums_are_etcds() {
    let (_, mut writer) = fresh();
    let store = writer.store();
    let hash = |revision| store.hash_kv(&store.view(), revision).unwrap().hash;
    assert_eq!(hash(0), 1_084_519_789);
    put(&mut writer, 1, "k1", "v1");
    put(&mut writer, 2, "k2", "v2");
    put(&mut writer, 3, "k1", "v1b");
    assert_eq!(hash(0), 2_700_853_424);
    write(&mut writer, 4, |batch| {
        batch.delete(&KeyRange::One(bytes("k2")));
    });
    assert_eq!(hash(0), 4_055_734_131);
    assert_eq!(hash(3), 1_282_520_646);
    write(&mut writer, 5, |batch| {
        batch.put(bytes("k3"), bytes("v3"), 0);
        batch.put(bytes("k4"), bytes("v4"), 0);
    });
    assert_eq!(hash(0), 2_051_207_081);
    write(&mut writer, 6, |batch| batch.compact(4).unwrap());
    for _ in 0..2 {
        // The checksum is the same before and after the old revisions are deleted.
        assert_eq!(hash(0), 3_077_559_169);
        assert_eq!(hash(5), 2_732_621_360);
        store.compact_all().unwrap();
    }
}

/// Each flush copies the pages that it changes. The old pages must be reused by later flushes, or
/// many small flushes would make the file grow.
#[test]
fn small_flushes_do_not_grow_the_file() {
    let (_, mut writer) = fresh();
    let mut sizes = Vec::new();
    for index in 1..=4_000 {
        put(&mut writer, index, &format!("k{}", index % 100), "value");
        if index % 10 == 0 {
            writer.checkpoint().unwrap();
        }
        if index % 1_000 == 0 {
            sizes.push(writer.store().file_bytes());
        }
    }
    let records = writer.store().record_bytes();
    assert!(sizes[3] < 8 * records + (4 << 20), "{sizes:?} for {records}");
}

#[test]
fn a_batch_looks_up_a_lease_while_others_read_the_leases() {
    let (_, mut writer) = fresh();
    let store = writer.store();
    let (sender, done) = std::sync::mpsc::channel();
    let was_done = std::thread::scope(|scope| {
        let leases = store.leases().read().unwrap();
        let reader = scope.spawn(|| {
            write(&mut writer, 1, |batch| {
                assert_eq!(batch.lease(7), None);
                sender.send(()).unwrap();
            });
        });
        let was_done = done.recv_timeout(std::time::Duration::from_secs(10)).is_ok();
        drop(leases);
        reader.join().unwrap();
        was_done
    });
    assert!(was_done, "it waits for the readers to finish");
}

#[test]
fn leases_and_attached_keys_survive_restarts_and_snapshots() {
    use crate::lease::Lease;
    let lease = |id, left| Lease { id, ttl: 60, remaining_ttl: left, grant_index: 1 };
    let disk = disk(1);
    let mut writer = open(&disk, CompactionMode::Inline);
    write(&mut writer, 1, |batch| (1..=3).for_each(|id| batch.grant(lease(id, 0))));
    let puts = [("a", 1), ("b", 1), ("c", 2), ("b", 2), ("d", 3), ("e", 1), ("e", 0), ("f", 1)];
    for (index, (key, id)) in (2..).zip(puts) {
        write(&mut writer, index, |batch| {
            batch.put(bytes(key), bytes("v"), id);
        });
    }
    write(&mut writer, 10, |batch| {
        assert_eq!(batch.delete(&KeyRange::One(bytes("f"))), 1);
        assert!(batch.revoke(3) && !batch.revoke(3));
        batch.set_remaining_ttl(2, 9);
    });
    let check = |writer: &StoreWriter| {
        let store = writer.store();
        let leases = store.leases().read().unwrap();
        let keys = |id| leases.keys(id).map(|key| key[0]).collect::<Vec<_>>();
        assert_eq!(leases.iter().collect::<Vec<_>>(), [lease(1, 0), lease(2, 9)]);
        assert_eq!((keys(1), keys(2)), (b"a".to_vec(), b"bc".to_vec()));
        assert_eq!(store.view().leases().unwrap(), [lease(1, 0), lease(2, 9)]);
    };
    check(&writer);
    let mut stream = Vec::new();
    writer.store().view().write_snapshot(&mut stream).unwrap();
    writer.checkpoint().unwrap();
    drop(writer);
    check(&open(&disk, CompactionMode::Inline));
    let mut other = open(&super::disk(2), CompactionMode::Inline);
    write(&mut other, 1, |batch| batch.grant(lease(77, 0)));
    other.install_snapshot(&mut &stream[..]).unwrap();
    check(&other);
}
