//! Tests of defragmentation: the new file has the same contents, even if the store is used
//! meanwhile.

use std::sync::Arc;

use node_proto::etcdserverpb::AlarmMember;

use super::*;
use crate::mvcc::{DefragmentError, StoreFile, defragment};

fn store_file(disk: &SimulatedDisk) -> StoreFile {
    StoreFile::new(disk.shared(), Path::new(DIR))
}

const TIMES: u64 = 4;

/// Makes a compacted store of `keys` keys with values of 8 KB, each written four times. One more
/// write follows at index 10,000. That write publishes a view in which the compacted revisions are
/// gone.
fn filled(disk: &SimulatedDisk, keys: u64) -> StoreWriter {
    let mut writer = open(disk, CompactionMode::Background);
    let value = "v".repeat(8_000);
    for n in 0..TIMES * keys {
        put(&mut writer, n + 1, &format!("key-{:05}", n % keys), &value);
    }
    compacted(&mut writer, 9_999);
    writer.checkpoint().unwrap();
    writer
}

/// Compacts at the newest revision, and then writes the key `last`.
fn compacted(writer: &mut StoreWriter, index: u64) {
    let revision = writer.store().view().revision();
    write(writer, index, |batch| batch.compact(revision).unwrap());
    writer.store().compact_all().unwrap();
    put(writer, index + 1, "last", "x");
}

fn everything(store: &Store) -> (Position, Vec<u8>) {
    let view = store.view();
    let mut out = Vec::new();
    view.write_snapshot(&mut out).unwrap();
    (view.applied(), out)
}

#[test]
fn defragmentation_shrinks_the_file_and_keeps_its_contents() {
    let disk = disk(1);
    let mut writer = filled(&disk, 200);
    let (store, before) = (writer.store(), everything(&writer.store()));
    let (old, file) = (store.view(), Arc::downgrade(&store.shared.file()));
    let done = store.defragment(&store_file(&disk)).unwrap();
    assert!(done.after * 2 < done.before, "{done:?}");
    assert!(done.after < store.record_bytes() * 3 / 2, "{done:?}");
    assert_eq!(store.file_bytes(), done.after);
    assert_eq!(everything(&store), before);
    // The earlier view remains readable, and writes go to the new file.
    assert_eq!(store.hash_kv(&old, 0).unwrap(), store.hash_kv(&store.view(), 0).unwrap());
    assert!(file.upgrade().is_some());
    drop(old);
    assert!(file.upgrade().is_none(), "the old file's space is not given back");
    put(&mut writer, 10_001, "after", "x");
    writer.checkpoint().unwrap();
    let after = everything(&store);
    drop((writer, store));
    disk.crash();
    store_file(&disk).tidy().unwrap();
    assert_eq!(everything(&open(&disk, CompactionMode::Background).store()), after);
}

#[test]
fn concurrent_writes_and_compactions_are_in_the_new_file() {
    let disk = disk(2);
    let mut writer = filled(&disk, 100);
    let store = writer.store();
    let mut index = 20_000;
    std::thread::scope(|scope| {
        let defragmented = scope.spawn(|| store.defragment(&store_file(&disk)).unwrap());
        while !defragmented.is_finished() || index < 20_300 {
            index += 1;
            put(&mut writer, index, &format!("key-{:05}", index % 100), "meanwhile");
            if index % 100 == 0 {
                index += 1;
                let revision = store.view().revision();
                write(&mut writer, index, |batch| batch.compact(revision).unwrap());
                store.compact_step().unwrap();
            }
        }
        defragmented.join().unwrap();
    });
    put(&mut writer, index + 1, "key-00000", "meanwhile");
    compacted(&mut writer, index + 2);
    writer.checkpoint().unwrap();
    // The 102 records are one for each of the 100 keys, the key `last`, and an older record of
    // `last`.
    assert_eq!(store.stored_revisions().unwrap(), 102);
    let (after, hash) = (everything(&store), store.hash_kv(&store.view(), 0).unwrap());
    drop((writer, store));
    disk.crash();
    let store = open(&disk, CompactionMode::Background).store();
    assert_eq!(everything(&store), after);
    assert_eq!(store.hash_kv(&store.view(), 0).unwrap(), hash);
}

#[test]
fn writes_between_copy_and_replacement_are_in_the_new_file() {
    let disk = disk(7);
    let mut writer = filled(&disk, 20);
    let (store, shared) = (writer.store(), writer.shared.clone());
    let copied = defragment::copy(&shared, &store_file(&disk)).unwrap();
    put(&mut writer, 10_001, "key-00001", "between");
    write(&mut writer, 10_002, |batch| {
        batch.raise_alarm(AlarmMember { member_id: 7, alarm: 1 });
        batch.members_mut();
    });
    let expected = everything(&store);
    store.flush().unwrap();
    put(&mut writer, 10_003, "key-00002", "only in the memtable");
    let with_memtable = everything(&store);
    defragment::replace_store_file(&shared, &store_file(&disk), copied).unwrap();
    assert_eq!(everything(&store), with_memtable);
    drop((writer, store, shared));
    disk.crash();
    assert_eq!(everything(&open(&disk, CompactionMode::Background).store()), expected);
}

#[test]
fn a_power_cut_at_any_step_leaves_the_store_complete() {
    let (mut steps, mut replaced) = (0, 0);
    loop {
        let disk = disk(3);
        let writer = filled(&disk, 20);
        let before = everything(&writer.store());
        disk.power_off_after(steps);
        let done = writer.store().defragment(&store_file(&disk));
        let is_off = disk.is_power_off();
        std::mem::forget(writer);
        disk.crash();
        store_file(&disk).tidy().unwrap();
        assert_eq!(disk.list(Path::new(DIR)).unwrap(), ["db"], "step {steps}");
        let reopened = open(&disk, CompactionMode::Background);
        assert_eq!(everything(&reopened.store()), before, "step {steps}");
        replaced += u64::from(done.is_ok());
        if !is_off {
            break;
        }
        steps += 1;
    }
    assert!(steps > 10 && replaced > 0, "{steps} steps, {replaced} done");
}

#[test]
fn without_room_for_a_second_file_defragmentation_is_refused() {
    let disk = disk(4);
    let mut writer = filled(&disk, 20);
    disk.limit_free_bytes(1 << 20);
    let refused = writer.store().defragment(&store_file(&disk));
    assert!(matches!(refused, Err(DefragmentError::NoSpace { .. })), "{refused:?}");
    assert_eq!(disk.list(Path::new(DIR)).unwrap(), ["db"]);
    disk.limit_free_bytes(u64::MAX);
    put(&mut writer, 10_001, "k", "v");
    writer.store().defragment(&store_file(&disk)).unwrap();
}

#[test]
fn a_copy_made_before_a_snapshot_was_installed_is_discarded() {
    let (disk, other) = (disk(5), disk(6));
    let mut writer = filled(&disk, 20);
    let (_, newer) = everything(&filled(&other, 50).store());
    let (shared, file) = (writer.shared.clone(), store_file(&disk));
    let copied = defragment::copy(&shared, &file).unwrap();
    writer.install_snapshot(&mut &newer[..]).unwrap();
    let refused = defragment::replace_store_file(&shared, &file, copied);
    assert!(matches!(refused, Err(DefragmentError::Replaced)), "{refused:?}");
    assert_eq!(everything(&writer.store()).1, newer);
    writer.store().defragment(&file).unwrap();
    assert_eq!(everything(&writer.store()).1, newer);
}
