//! The key index, in RAM: for each key, the revisions at which it changed.
//!
//! The index determines how much memory the node needs per key. A key that was written once, or
//! written and deleted, costs one map entry and nothing else. Only a key with a longer history has
//! a list.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Bound;

use super::history::{ChangeStamp, KeyHistory, KeyState};
use super::revision::{KeyRange, Revision};

/// Number of unwanted keys that [`Index::delete_each`] steps over before it searches for the next
/// wanted key.
const MAX_SKIPPED_KEYS: usize = 16;

/// State of a walk over a range.
pub(crate) enum WalkOutcome {
    /// The walk reached the end of the range.
    Done,
    /// The walk stopped after this key, and can continue there.
    Paused(Box<[u8]>),
}

#[derive(Debug, Default)]
pub(crate) struct Index {
    keys: BTreeMap<Box<[u8]>, KeyHistory>,
    /// Compaction revision. Reads at a lower revision can miss changes, because these were dropped.
    compact_revision: i64,
}

impl Index {
    pub(crate) fn new(compacted: i64) -> Self {
        Self { keys: BTreeMap::new(), compact_revision: compacted }
    }

    /// Returns the compaction revision. Reads at a lower revision can't be answered any more.
    pub(crate) fn compact_revision(&self) -> i64 {
        self.compact_revision
    }

    pub(crate) fn set_compact_revision(&mut self, revision: i64) {
        self.compact_revision = revision;
    }

    /// Returns the number of keys with any history, deleted ones included.
    pub(crate) fn len(&self) -> usize {
        self.keys.len()
    }

    /// Returns the revision of `key`'s value as of `revision`, if the key existed then.
    pub(crate) fn get(&self, key: &[u8], revision: i64) -> Option<Revision> {
        self.keys.get(key)?.at(revision)?.put_revision()
    }

    /// Returns the change of `key` that a checksum at `revision` counts: see
    /// [`KeyHistory::counted_at`].
    pub(crate) fn counted_change(&self, key: &[u8], revision: i64) -> Option<Revision> {
        self.keys.get(key)?.counted_at(revision)
    }

    /// Whether no key has a change that a checksum at `revision` counts.
    pub(crate) fn counts_nothing(&self, revision: i64) -> bool {
        !self.keys.values().any(|history| history.counted_at(revision).is_some())
    }

    /// Whether a compaction at `revision` keeps no record of any key. Besides the changes in force
    /// it keeps tombstones at exactly that revision.
    pub(crate) fn compacts_to_nothing(&self, revision: i64) -> bool {
        self.counts_nothing(revision) && !self.keys.values().any(|key| key.is_deleted_at(revision))
    }

    /// Whether the history of `key` contains a change at exactly `at`.
    pub(crate) fn has(&self, key: &[u8], at: Revision) -> bool {
        self.keys.get(key).is_some_and(|history| history.has(at))
    }

    /// Returns the newest state of `key`, if it exists.
    pub(crate) fn newest(&self, key: &[u8]) -> Option<KeyState> {
        self.keys.get(key)?.newest()
    }

    /// Calls `found` for each key of `range` that existed at `revision`, in key order. Begins after
    /// the key `after` if that is given, and examines at most `at_most` keys.
    pub(crate) fn walk(
        &self,
        range: &KeyRange,
        after: Option<&[u8]>,
        revision: i64,
        at_most: usize,
        mut found: impl FnMut(&[u8], Revision),
    ) -> WalkOutcome {
        if let KeyRange::One(key) = range {
            if let Some(at) = self.get(key, revision) {
                found(key, at);
            }
            return WalkOutcome::Done;
        }
        let Some(bounds) = range.bounds(after) else { return WalkOutcome::Done };
        let mut looked = 0;
        for (key, history) in self.keys.range::<[u8], _>(bounds) {
            if let Some(at) = history.at(revision).and_then(ChangeStamp::put_revision) {
                found(key, at);
            }
            looked += 1;
            if looked == at_most {
                return WalkOutcome::Paused(key.clone());
            }
        }
        WalkOutcome::Done
    }

    /// Whether `range` holds more than `count` keys, deleted ones included.
    pub(crate) fn is_wider_than(&self, range: &KeyRange, count: usize) -> bool {
        let Some(bounds) = range.bounds(None) else { return false };
        self.keys.range::<[u8], _>(bounds).nth(count).is_some()
    }

    /// Returns every change of `range`'s keys with a main revision in `from..=to`, in no particular
    /// order.
    pub(crate) fn changes(&self, range: &KeyRange, from: i64, to: i64) -> Vec<Revision> {
        let mut found = Vec::new();
        let mut collect = |history: &KeyHistory| history.changes(from, to, &mut found);
        if let KeyRange::One(key) = range {
            self.keys.get(&key[..]).into_iter().for_each(&mut collect);
        } else if let Some(bounds) = range.bounds(None) {
            self.keys.range::<[u8], _>(bounds).for_each(|(_, history)| collect(history));
        }
        found
    }

    /// Records a put. Returns the key's `create_revision` and `version` after it.
    pub(crate) fn put(&mut self, key: &[u8], at: Revision) -> (i64, i64) {
        // The key is looked up first, so that an update, the common case, allocates no key.
        if let Some(history) = self.keys.get_mut(key) {
            return history.put(at);
        }
        self.keys.insert(key.into(), KeyHistory::of_put(at));
        (at.main, 1)
    }

    /// Records the deletes of `keys`, which are in key order. The first is deleted at the revision
    /// `first`, and each further key at the next sub-revision.
    pub(crate) fn delete_each<'key>(
        &mut self,
        keys: impl IntoIterator<Item = &'key [u8]>,
        first: Revision,
    ) {
        let mut keys = keys.into_iter();
        let (mut wanted, mut at) = (keys.next(), first);
        while let Some(key) = wanted {
            // Most keys of a lease or of a range are neighbours, so iterating is faster than
            // searching.
            let mut passed = 0;
            let from = (Bound::Included(key), Bound::Unbounded);
            for (found, history) in self.keys.range_mut::<[u8], _>(from) {
                if wanted == Some(found) {
                    history.delete(at);
                    (wanted, at.sub, passed) = (keys.next(), at.sub + 1, 0);
                } else if wanted.is_some_and(|key| **found < *key) && passed < MAX_SKIPPED_KEYS {
                    passed += 1;
                } else {
                    break;
                }
            }
            if wanted == Some(key) {
                // This key isn't in the index, so it is skipped.
                (wanted, at.sub) = (keys.next(), at.sub + 1);
            }
        }
    }

    /// Appends one stored record while a store is opened. Records must be given oldest first.
    pub(crate) fn restore(&mut self, key: &[u8], at: Revision, created: i64, version: i64) {
        match self.keys.entry(key.into()) {
            Entry::Occupied(mut entry) => entry.get_mut().restore(at, created, version),
            Entry::Vacant(entry) => {
                entry.insert(KeyHistory::restored(at, created, version));
            }
        }
    }

    /// Compacts up to `at_most` keys after `after`. Appends the revisions that are no longer needed
    /// to `dropped`.
    pub(crate) fn compact(
        &mut self,
        after: Option<&[u8]>,
        revision: i64,
        at_most: usize,
        dropped: &mut Vec<Revision>,
    ) -> WalkOutcome {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut gone: Vec<Box<[u8]>> = Vec::new();
        let mut paused = None;
        for (looked, (key, history)) in
            self.keys.range_mut::<[u8], _>((from, Bound::Unbounded)).enumerate()
        {
            if !history.compact(revision, dropped) {
                gone.push(key.clone());
            }
            if looked + 1 == at_most {
                paused = Some(key.clone());
                break;
            }
        }
        for key in gone {
            self.keys.remove(&key);
        }
        paused.map_or(WalkOutcome::Done, WalkOutcome::Paused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(main: i64) -> Revision {
        Revision { main, sub: 0 }
    }

    fn compact(index: &mut Index, revision: i64) -> Vec<i64> {
        let mut dropped = Vec::new();
        assert!(matches!(index.compact(None, revision, 100, &mut dropped), WalkOutcome::Done));
        dropped.iter().map(|r| r.main).collect()
    }

    /// Makes an index of one key with these changes: put@2, put@3, delete@4, put@6.
    fn two_lives() -> Index {
        let mut index = Index::new(-1);
        assert_eq!(index.put(b"k", at(2)), (2, 1));
        assert_eq!(index.put(b"k", at(3)), (2, 2));
        index.delete_each([&b"k"[..]], at(4));
        assert_eq!(index.put(b"k", at(6)), (6, 1));
        index
    }

    #[test]
    fn a_read_sees_the_change_in_force() {
        let index = two_lives();
        let seen: Vec<_> = (1..8).map(|r| index.get(b"k", r).map(|r| r.main)).collect();
        assert_eq!(seen, [None, Some(2), Some(3), None, None, Some(6), Some(6)]);
    }

    #[test]
    fn compaction_keeps_the_change_in_force_at_its_revision() {
        let mut index = two_lives();
        assert_eq!(compact(&mut index, 3), [2]);
        assert_eq!(index.get(b"k", 3), Some(at(3)));
    }

    #[test]
    fn a_tombstone_survives_only_a_compaction_at_its_own_revision() {
        let mut index = two_lives();
        assert_eq!(compact(&mut index, 4), [2, 3]);
        assert_eq!(compact(&mut index, 5), [4]);
        assert_eq!(compact(&mut index, 9), [0; 0]);
        assert_eq!(index.get(b"k", 9), Some(at(6)));
    }

    #[test]
    fn a_deleted_key_leaves_nothing_after_a_compaction() {
        let mut index = Index::new(-1);
        index.put(b"k", at(2));
        index.delete_each([&b"k"[..]], at(3));
        assert_eq!(compact(&mut index, 4), [2, 3]);
        assert_eq!(index.len(), 0);
    }

    #[test]
    fn changes_include_tombstones() {
        let index = two_lives();
        let range = KeyRange::new(bytes::Bytes::from_static(b"a"), bytes::Bytes::from_static(b"z"));
        let mains: Vec<_> = index.changes(&range, 3, 5).iter().map(|r| r.main).collect();
        assert_eq!(mains, [3, 4]);
    }

    #[test]
    fn adjacent_and_distant_keys_are_deleted_each_at_its_revision() {
        let mut index = Index::new(-1);
        let name = |number: u32| format!("{number:05}").into_bytes();
        let all: Vec<_> = (0..1_000).map(name).collect();
        all.iter().for_each(|key| assert_eq!(index.put(key, at(2)), (2, 1)));
        // Between the keys to delete there are gaps of all widths up to more than
        // `MAX_SKIPPED_KEYS`. Two of the keys to delete don't exist.
        let mut wanted: Vec<_> =
            (0..40).map(|gap| gap * (gap + 1) / 2).chain([997, 998]).map(name).collect();
        wanted.splice(3..3, [b"00003x".to_vec()]);
        wanted.push(b"z".to_vec());
        index.delete_each(wanted.iter().map(|key| &key[..]), Revision { main: 3, sub: 5 });
        for key in all {
            let place = wanted.iter().position(|wanted| *wanted == key);
            let sub = place.map(|place| 5 + u32::try_from(place).unwrap());
            let deletes = index.keys[&key[..]].at(3).filter(|stamp| stamp.put_revision().is_none());
            assert_eq!(deletes.map(|stamp| stamp.revision().sub), sub, "{key:?}");
        }
    }
}
