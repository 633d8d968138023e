//! Tests of rows that contain several tombstones: readers see the same records as if each tombstone
//! had a row of its own.

use super::*;
use crate::lease::Lease;
use crate::mvcc::revision::Revision;
use crate::mvcc::rows::is_tombstone_row;

/// Number of keys, more than one row of tombstones can hold.
const KEYS: i64 = 1_000;
/// Revision of the request that deletes all keys.
const REVOKED: i64 = KEYS + 2;

fn key(number: i64) -> Bytes {
    bytes(&format!("/a/key/of/a/lease/{number:06}"))
}

/// Returns a value long enough that a frame of a snapshot ends among the tombstones.
fn value() -> Bytes {
    bytes(&"v".repeat(175))
}

/// Makes a store with a lease of `KEYS` keys. Each key was written at a revision of its own, from 2
/// on. The lease was revoked at `REVOKED`.
fn revoked(disk: &SimulatedDisk) -> StoreWriter {
    let mut writer = open(disk, CompactionMode::Background);
    write(&mut writer, 1, |batch| {
        batch.grant(Lease { id: 7, ttl: 60, remaining_ttl: 0, grant_index: 1 });
    });
    for number in 0..KEYS {
        write(&mut writer, 2 + number.cast_unsigned(), |batch| {
            batch.put(key(number), value(), 7);
        });
    }
    let events = write(&mut writer, 2_000, |batch| assert!(batch.revoke(7)));
    let told: Vec<_> = events.events.iter().map(|event| event.revision).collect();
    let subs = (0..).take(told.len());
    assert_eq!(told, subs.map(|sub| Revision { main: REVOKED, sub }).collect::<Vec<_>>());
    assert_eq!(told.len(), usize::try_from(KEYS).unwrap());
    writer
}

/// Copies a store by a snapshot, which makes one row per tombstone.
fn store_with_single_rows(writer: &StoreWriter, disk: &SimulatedDisk) -> StoreWriter {
    let mut stream = Vec::new();
    writer.store().view().write_snapshot(&mut stream).unwrap();
    let mut other = open(disk, CompactionMode::Background);
    other.install_snapshot(&mut &stream[..]).unwrap();
    other
}

/// Counts the rows of several tombstones, and all other rows.
fn rows(writer: &StoreWriter) -> (usize, usize) {
    let view = writer.store().view();
    let all: Vec<bool> =
        view.all_rows().unwrap().map(|row| is_tombstone_row(&row.unwrap().1)).collect();
    let together = all.iter().filter(|together| **together).count();
    (together, all.len() - together)
}

/// Returns every record, as an export of the store reads it.
fn seen(writer: &StoreWriter) -> Vec<(Revision, Vec<u8>)> {
    let mut seen = Vec::new();
    let frozen = writer.store().freeze().unwrap();
    frozen
        .records(|at, record| {
            seen.push((at, record.to_vec()));
            Ok::<_, StoreError>(())
        })
        .unwrap();
    seen
}

fn hashes(writer: &StoreWriter, revisions: &[i64]) -> Vec<KeyValueHash> {
    let store = writer.store();
    let view = store.view();
    revisions.iter().map(|revision| store.hash_kv(&view, *revision).unwrap()).collect()
}

fn compact(writer: &mut StoreWriter, index: u64, revision: i64) {
    write(writer, index, |batch| batch.compact(revision).unwrap());
    writer.store().compact_all().unwrap();
    // This write publishes a view that includes the compaction.
    put(writer, index + 1, "z", "");
}

#[test]
fn shared_tombstone_rows_are_few_and_read_like_single_rows() {
    let disk = disk(1);
    let writer = revoked(&disk);
    let (together, others) = rows(&writer);
    assert!((2..50).contains(&together), "{together} rows of tombstones");
    assert_eq!(others, usize::try_from(KEYS).unwrap());
    let single = store_with_single_rows(&writer, &super::disk(2));
    assert_eq!(rows(&single), (0, 2 * others));
    assert_eq!(seen(&writer), seen(&single));
    let revisions = [5, REVOKED - 1, REVOKED, 0];
    assert_eq!(hashes(&writer, &revisions), hashes(&single, &revisions));
    let whole = |writer: &StoreWriter| writer.store().view().checksum().unwrap();
    assert_eq!(whole(&writer), whole(&single));
    assert_eq!(writer.store().record_bytes(), single.store().record_bytes());
    let after = |revision| show(&writer.store(), revision).len();
    assert_eq!([after(REVOKED - 1), after(REVOKED)], [others, 0]);
}

#[test]
fn tombstone_rows_are_found_again_after_a_restart() {
    let disk = disk(1);
    let mut writer = revoked(&disk);
    let before = (seen(&writer), hashes(&writer, &[9, 0]), writer.store().record_bytes());
    writer.checkpoint().unwrap();
    disk.crash();
    drop(writer);
    // A limit of 64 keys makes each step delete one row of tombstones.
    let steps = StoreOptions {
        compaction: CompactionMode::Background,
        compacted_keys_per_step: 64,
        ..StoreOptions::default()
    };
    let mut writer = open_with(&disk, steps);
    assert_eq!((seen(&writer), hashes(&writer, &[9, 0]), writer.store().record_bytes()), before);
    assert_eq!(show(&writer.store(), REVOKED), [""; 0]);
    compact(&mut writer, 3_000, REVOKED);
    compact(&mut writer, 3_002, REVOKED + 1);
    assert_eq!(rows(&writer), (0, 2), "nothing is left of them");
    let empty = open(&super::disk(2), CompactionMode::Background).store().record_bytes();
    assert!(writer.store().record_bytes() - empty < 100, "what was freed is counted");
}

#[test]
fn a_compaction_keeps_tombstones_at_its_revision_and_the_next_deletes_them() {
    let mut writer = revoked(&disk(1));
    let mut single = store_with_single_rows(&writer, &disk(2));
    for (index, revision, left) in [(3_000, REVOKED, KEYS), (3_002, REVOKED + 1, 0)] {
        for writer in [&mut writer, &mut single] {
            compact(writer, index, revision);
        }
        assert_eq!(seen(&writer), seen(&single));
        let puts = (i64::try_from(index).unwrap() - 2_998) / 2;
        assert_eq!(seen(&writer).len(), usize::try_from(left + puts).unwrap());
        assert_eq!(hashes(&writer, &[0]), hashes(&single, &[0]));
    }
    let empty = open(&disk(3), CompactionMode::Background).store().record_bytes();
    assert!(writer.store().record_bytes() - empty < 100, "what was freed is counted");
    assert_eq!(writer.store().record_bytes(), single.store().record_bytes());
}

#[test]
fn tombstones_of_keys_recreated_by_the_same_request_are_compacted() {
    let disk = disk(1);
    let mut writer = revoked(&disk);
    for number in 0..KEYS {
        put(&mut writer, 3_000 + number.cast_unsigned(), &format!("k{number:06}"), "old");
    }
    write(&mut writer, 5_000, |batch| {
        assert_eq!(batch.delete(&KeyRange::Between(bytes("k"), bytes("l"))), KEYS);
        for number in (0..KEYS).step_by(2) {
            batch.put(bytes(&format!("k{number:06}")), bytes("new"), 0);
        }
    });
    let mut single = store_with_single_rows(&writer, &super::disk(2));
    let at = writer.store().view().revision();
    for writer in [&mut writer, &mut single] {
        compact(writer, 5_001, at);
    }
    assert_eq!(seen(&writer), seen(&single));
    assert_eq!(seen(&writer).len(), usize::try_from(KEYS).unwrap() + 1);
    let before = (seen(&writer), hashes(&writer, &[0]));
    writer.checkpoint().unwrap();
    drop(writer);
    let writer = open(&disk, CompactionMode::Background);
    assert_eq!((seen(&writer), hashes(&writer, &[0])), before);
}

#[test]
fn a_compaction_of_tombstone_rows_continues_after_a_restart() {
    let disk = disk(1);
    let mut writer = revoked(&disk);
    write(&mut writer, 3_000, |batch| batch.compact(REVOKED).unwrap());
    writer.store().compact_step().unwrap();
    put(&mut writer, 3_001, "z", "");
    // A newer compaction starts from the first key, and also deletes what the older one left.
    write(&mut writer, 3_002, |batch| batch.compact(REVOKED + 1).unwrap());
    writer.store().compact_step().unwrap();
    writer.checkpoint().unwrap();
    disk.crash();
    drop(writer);
    let mut writer = open(&disk, CompactionMode::Background);
    writer.store().compact_all().unwrap();
    put(&mut writer, 3_003, "z", "");
    assert_eq!((rows(&writer), seen(&writer).len()), ((0, 2), 2));
}

#[test]
fn a_record_in_a_tombstone_row_is_found_by_its_revision() {
    let writer = revoked(&disk(1));
    let view = writer.store().view();
    for sub in [0, 1, 500, 999] {
        let record =
            crate::mvcc::rows::read_record(&view, Revision { main: REVOKED, sub }, |record| {
                crate::mvcc::event::decode(record).unwrap().key
            });
        assert_eq!(record.unwrap(), Some(key(sub.into())));
    }
    for (main, sub) in [(REVOKED, 1_000), (REVOKED + 1, 0), (2, 1), (1, 0)] {
        let record = crate::mvcc::rows::read_record(&view, Revision { main, sub }, |_| ());
        assert_eq!(record.unwrap(), None, "{main} {sub}");
    }
}
