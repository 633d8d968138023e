//! Random histories of writes, deletes, compactions, checkpoints, kills, power cuts and snapshots.
//!
//! After each step the store must answer at every readable revision like a model with one map per
//! revision. A second store that applies the same entries, but compacts at another pace, must have
//! equal checksums.

use std::collections::BTreeMap;

use node_proto::mvccpb::KeyValue;
use proptest::prelude::*;

use super::*;
use crate::disk::simulated::{DiskFailure, DiskOperation, Fault};

#[derive(Clone, Debug)]
enum KeyChange {
    Put(u8, u8),
    Delete(u8, u8),
}

#[derive(Clone, Debug)]
enum Op {
    Write(Vec<KeyChange>),
    /// Compacts. The value selects one of the readable revisions, as a fraction of 255.
    Compact(u8),
    Checkpoint,
    /// Kills the process, without a power cut.
    Kill,
    /// Attempts a checkpoint, and then kills the process. The value is the number of syncs that
    /// succeed before one fails. If the checkpoint has no more syncs than that, none fails.
    FailedSync(u8),
    /// Cuts the machine's power.
    Crash,
    /// Moves the state to another machine by a snapshot.
    Snapshot,
    /// Runs one step of the second store's compaction.
    Step,
    /// Flushes the second store.
    Flush,
}

fn change() -> impl Strategy<Value = KeyChange> {
    prop_oneof![
        3 => (0..12_u8, any::<u8>()).prop_map(|(key, value)| KeyChange::Put(key, value)),
        1 => (0..12_u8, 0..4_u8).prop_map(|(from, width)| KeyChange::Delete(from, from + width)),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        12 => prop::collection::vec(change(), 1..5).prop_map(Op::Write),
        2 => any::<u8>().prop_map(Op::Compact),
        2 => Just(Op::Checkpoint),
        1 => Just(Op::Kill),
        2 => (0..4_u8).prop_map(Op::FailedSync),
        1 => Just(Op::Crash),
        1 => Just(Op::Snapshot),
        2 => Just(Op::Step),
        2 => Just(Op::Flush),
    ]
}

fn key(number: u8) -> Bytes {
    bytes(&format!("k{number:02}"))
}

type Map = BTreeMap<Bytes, KeyValue>;

/// Expected contents of the store: the whole map at each revision.
struct StoreModel {
    at: BTreeMap<i64, Map>,
    compacted: i64,
}

impl StoreModel {
    fn revision(&self) -> i64 {
        *self.at.last_key_value().unwrap().0
    }

    fn write(&mut self, changes: &[KeyChange]) {
        let revision = self.revision() + 1;
        let mut map = self.at[&(revision - 1)].clone();
        let mut changed = false;
        for change in changes {
            match change {
                KeyChange::Put(number, value) => {
                    changed = true;
                    let last = map.get(&key(*number));
                    let kv = KeyValue {
                        key: key(*number),
                        value: bytes(&value.to_string()),
                        create_revision: last.map_or(revision, |kv| kv.create_revision),
                        mod_revision: revision,
                        version: last.map_or(0, |kv| kv.version) + 1,
                        lease: 0,
                    };
                    map.insert(kv.key.clone(), kv);
                }
                KeyChange::Delete(from, to) => {
                    let before = map.len();
                    map.retain(|k, _| *k < key(*from) || *k >= key(*to));
                    changed |= map.len() != before;
                }
            }
        }
        if changed {
            self.at.insert(revision, map);
        }
    }
}

/// One entry of the log.
#[derive(Clone, Debug)]
enum ModelEntry {
    Write(Vec<KeyChange>),
    Compact(i64),
}

fn apply(writer: &mut StoreWriter, index: u64, entry: &ModelEntry) {
    write(writer, index, |batch| match entry {
        ModelEntry::Write(changes) => {
            for change in changes {
                match change {
                    KeyChange::Put(number, value) => {
                        batch.put(key(*number), bytes(&value.to_string()), 0);
                    }
                    KeyChange::Delete(from, to) => {
                        batch.delete(&KeyRange::Between(key(*from), key(*to)));
                    }
                }
            }
        }
        ModelEntry::Compact(revision) => batch.compact(*revision).unwrap(),
    });
}

fn replay(writer: &mut StoreWriter, log: &[ModelEntry]) {
    for (index, entry) in (1..).zip(log) {
        if index > writer.applied().index {
            apply(writer, index, entry);
        }
    }
}

fn compare(writer: &StoreWriter, model: &StoreModel) {
    let store = writer.store();
    assert_eq!(store.view().revision(), model.revision());
    for (revision, map) in &model.at {
        let request = RangeRequest { revision: *revision, ..everything() };
        let answer = range(&store, &request);
        if *revision < model.compacted {
            assert!(matches!(answer, Err(ReadError::Compacted)), "{revision} is compacted");
            continue;
        }
        let answer = answer.unwrap();
        let expected: Vec<KeyValue> = map.values().cloned().collect();
        assert_eq!(answer.kvs, expected, "at revision {revision}");
        assert_eq!(answer.count, i64::try_from(map.len()).unwrap());
        let limited = RangeRequest { limit: 3, ..request };
        let part = range(&store, &limited).unwrap();
        assert_eq!(part.kvs, expected[..expected.len().min(3)]);
        assert_eq!((part.more, part.count), (expected.len() > 3, answer.count));
    }
    let beyond = RangeRequest { revision: model.revision() + 1, ..everything() };
    assert!(matches!(range(&store, &beyond), Err(ReadError::Future)));
}

fn compare_hashes(a: &StoreWriter, b: &StoreWriter, model: &StoreModel) {
    let (a, b) = (a.store(), b.store());
    // The compaction revision itself is left out. There, a store returns the checksum that it kept
    // when the compaction's work began. A store that kept no checksum returns another one.
    for revision in model.at.keys().filter(|revision| **revision > model.compacted) {
        let hash = |store: &Store| store.hash_kv(&store.view(), *revision).unwrap();
        assert_eq!(hash(&a), hash(&b), "checksum at {revision}");
    }
}

fn failed_sync(after: u8) -> Fault {
    let (operation, failure) = (DiskOperation::Sync, DiskFailure::Io);
    Fault { operation, after: after.into(), times: 1, failure }
}

/// Opens a store on `other` and installs a snapshot of `store` there.
fn moved_by_snapshot(store: &StoreWriter, other: &SimulatedDisk) -> StoreWriter {
    let mut stream = Vec::new();
    store.store().view().write_snapshot(&mut stream).unwrap();
    let mut moved = open(other, CompactionMode::Inline);
    assert_eq!(moved.install_snapshot(&mut &stream[..]).unwrap(), store.applied());
    assert_eq!(moved.durable(), store.applied());
    moved
}

fn run(ops: Vec<Op>, seed: u64) {
    let mut disk_a = disk(seed);
    let mut a = open(&disk_a, CompactionMode::Inline);
    let mut b = open(&disk(seed + 1), CompactionMode::Background);
    let mut model = StoreModel { at: BTreeMap::from([(1, Map::new())]), compacted: -1 };
    let mut log: Vec<ModelEntry> = Vec::new();
    for op in ops {
        let mut push = |entry: ModelEntry, a: &mut StoreWriter, b: &mut StoreWriter| {
            log.push(entry.clone());
            let index = log.len() as u64;
            apply(a, index, &entry);
            apply(b, index, &entry);
        };
        match op {
            Op::Write(changes) => {
                model.write(&changes);
                push(ModelEntry::Write(changes), &mut a, &mut b);
            }
            Op::Compact(part) => {
                let from = model.compacted.max(0) + 1;
                let span = model.revision() - from;
                if span >= 0 {
                    model.compacted = from + span * i64::from(part) / 255;
                    push(ModelEntry::Compact(model.compacted), &mut a, &mut b);
                }
            }
            Op::Checkpoint => {
                assert_eq!(a.checkpoint().unwrap(), a.applied());
            }
            Op::Kill | Op::FailedSync(_) | Op::Crash => {
                if let Op::FailedSync(after) = op {
                    disk_a.inject(failed_sync(after));
                    let _ = a.checkpoint();
                }
                let durable = a.durable();
                if matches!(op, Op::Crash) {
                    // The disk crashes while the database is open, so that closing it can't write
                    // anything.
                    disk_a.crash();
                } else {
                    disk_a.kill();
                }
                drop(a);
                a = open(&disk_a, CompactionMode::Inline);
                assert!(a.applied() >= durable, "a checkpoint was lost");
                assert_eq!(a.applied(), a.durable());
                replay(&mut a, &log);
            }
            Op::Snapshot => {
                disk_a = disk(seed + 2);
                a = moved_by_snapshot(&a, &disk_a);
            }
            Op::Step => {
                b.store().compact_step().unwrap();
            }
            Op::Flush => {
                assert_eq!(b.store().flush().unwrap(), b.applied());
            }
        }
        compare(&a, &model);
        compare(&b, &model);
        compare_hashes(&a, &b, &model);
    }
    compare(&b, &model);
    b.store().compact_all().unwrap();
    compare(&b, &model);
    compare_hashes(&a, &b, &model);
    let counts = (a.store().stored_revisions().unwrap(), b.store());
    // One more write publishes a view of `b` that includes its last compaction step.
    put(&mut b, log.len() as u64 + 1, "zz", "");
    assert_eq!(counts.0 + 1, counts.1.stored_revisions().unwrap(), "both copies keep as much");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn the_store_answers_as_the_model_does(
        ops in prop::collection::vec(op(), 1..40),
        seed in any::<u32>(),
    ) {
        run(ops, u64::from(seed));
    }
}
