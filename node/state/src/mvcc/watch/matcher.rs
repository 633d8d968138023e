//! Finds the watchers of an event.
//!
//! Nearly all watches are of one key or of a prefix, so both are looked up by hash. An event's key
//! is looked up as a whole, and then by its first bytes, once for each length that a watched prefix
//! has. Other ranges are in a separate tree. Watchers of the same keys with the same filters form a
//! group, which is matched once.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;

use bytes::Bytes;

use super::WatchSpec;
use super::ranges::RangeTree;
use crate::mvcc::event::{Event, EventKind};
use crate::mvcc::revision::KeyRange;

/// ID of a watcher, never reused by the process.
pub(super) type WatcherId = u64;

/// Properties that all watchers of a group share.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct GroupKey {
    range: KeyRange,
    no_put: bool,
    no_delete: bool,
}

impl GroupKey {
    pub(super) fn of(spec: &WatchSpec) -> Self {
        Self { range: spec.range.clone(), no_put: spec.no_put, no_delete: spec.no_delete }
    }

    fn passes(&self, kind: EventKind) -> bool {
        match kind {
            EventKind::Put => !self.no_put,
            EventKind::Delete => !self.no_delete,
        }
    }

    /// Returns the positions of those `events` that the group's watchers get.
    pub(super) fn picks<'a>(&self, events: impl Iterator<Item = (u32, &'a Event)>) -> Vec<u32> {
        events
            .filter(|(_, event)| self.passes(event.kind) && self.range.contains(&event.key))
            .map(|(at, _)| at)
            .collect()
    }
}

type GroupId = usize;

#[derive(Debug)]
struct Group {
    key: GroupKey,
    /// This is a set, because a group may have a hundred thousand watchers that leave one by one.
    watchers: BTreeSet<WatcherId>,
}

#[derive(Debug, Default)]
pub(super) struct Matcher {
    groups: Vec<Option<Group>>,
    free: Vec<GroupId>,
    by_key: HashMap<GroupKey, GroupId>,
    single_keys: HashMap<Bytes, Vec<GroupId>>,
    /// Groups that watch a prefix, by the prefix's length, then by the prefix.
    prefixes: BTreeMap<usize, HashMap<Bytes, Vec<GroupId>>>,
    others: RangeTree,
}

/// Returns the prefix whose keys are exactly those of `range`, if there is one. The end of such a
/// range is its start with the last byte raised by one, after trailing 0xff bytes were removed.
fn prefix(range: &KeyRange) -> Option<&Bytes> {
    let KeyRange::Between(start, end) = range else { return None };
    let kept = start.iter().rposition(|byte| *byte != 0xff)?;
    let (last, head) = end.split_last()?;
    let matches = head == &start[..kept] && *last == start[kept] + 1;
    matches.then_some(start)
}

fn forget<K: Hash + Eq>(map: &mut HashMap<K, Vec<GroupId>>, key: &K, id: GroupId) {
    if let Some(ids) = map.get_mut(key) {
        ids.retain(|other| *other != id);
        if ids.is_empty() {
            map.remove(key);
        }
    }
}

impl Matcher {
    pub(super) fn add(&mut self, key: GroupKey, watcher: WatcherId) {
        let id = match self.by_key.get(&key) {
            Some(id) => *id,
            None => self.new_group(key),
        };
        if let Some(group) = &mut self.groups[id] {
            group.watchers.insert(watcher);
        }
    }

    fn new_group(&mut self, key: GroupKey) -> GroupId {
        let group = Some(Group { key: key.clone(), watchers: BTreeSet::new() });
        let id = match self.free.pop() {
            Some(id) => {
                self.groups[id] = group;
                id
            }
            None => {
                self.groups.push(group);
                self.groups.len() - 1
            }
        };
        match &key.range {
            KeyRange::One(one) => self.single_keys.entry(one.clone()).or_default().push(id),
            range => match prefix(range) {
                Some(prefix) => {
                    let of_length = self.prefixes.entry(prefix.len()).or_default();
                    of_length.entry(prefix.clone()).or_default().push(id);
                }
                None => self.others.insert(range, id),
            },
        }
        self.by_key.insert(key, id);
        id
    }

    pub(super) fn remove(&mut self, key: &GroupKey, watcher: WatcherId) {
        let Some(id) = self.by_key.get(key).copied() else { return };
        let Some(group) = &mut self.groups[id] else { return };
        group.watchers.remove(&watcher);
        if !group.watchers.is_empty() {
            return;
        }
        self.groups[id] = None;
        self.free.push(id);
        self.by_key.remove(key);
        match &key.range {
            KeyRange::One(one) => forget(&mut self.single_keys, one, id),
            range => match prefix(range) {
                Some(prefix) => {
                    if let Some(of_length) = self.prefixes.get_mut(&prefix.len()) {
                        forget(of_length, prefix, id);
                        if of_length.is_empty() {
                            self.prefixes.remove(&prefix.len());
                        }
                    }
                }
                None => self.others.remove(range, id),
            },
        }
    }

    /// Removes all groups and watchers.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Returns, for each group that any of `events` matches, its watchers and the events'
    /// positions.
    pub(super) fn pick(&self, events: &[Event]) -> Vec<(&BTreeSet<WatcherId>, Vec<u32>)> {
        let mut picked: BTreeMap<GroupId, Vec<u32>> = BTreeMap::new();
        for (at, event) in (0..).zip(events) {
            let mut offer = |id: &GroupId| {
                if let Some(group) = &self.groups[*id]
                    && group.key.passes(event.kind)
                {
                    picked.entry(*id).or_default().push(at);
                }
            };
            self.single_keys.get(&event.key).into_iter().flatten().for_each(&mut offer);
            for (length, of_length) in &self.prefixes {
                let Some(start) = event.key.get(..*length) else { break };
                of_length.get(start).into_iter().flatten().for_each(&mut offer);
            }
            self.others.for_each_containing(&event.key, &mut |id| offer(&id));
        }
        let with_watchers = |(id, picks): (GroupId, Vec<u32>)| {
            self.groups[id].as_ref().map(|group| (&group.watchers, picks))
        };
        picked.into_iter().filter_map(with_watchers).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mvcc::revision::Revision;

    fn group(key: &'static [u8], end: &'static [u8]) -> GroupKey {
        let range = KeyRange::new(Bytes::from_static(key), Bytes::from_static(end));
        GroupKey { range, no_put: false, no_delete: false }
    }

    fn put(key: &'static [u8]) -> Event {
        Event {
            key: Bytes::from_static(key),
            kind: EventKind::Put,
            revision: Revision { main: 2, sub: 0 },
            is_create: true,
            kv: Bytes::new(),
        }
    }

    fn watchers_of(matcher: &Matcher, key: &'static [u8]) -> Vec<WatcherId> {
        let events = [put(key)];
        let mut told: Vec<_> =
            matcher.pick(&events).into_iter().flat_map(|(w, _)| w.iter().copied()).collect();
        told.sort_unstable();
        told
    }

    #[test]
    fn a_key_a_prefix_and_any_range_are_all_found() {
        let mut matcher = Matcher::default();
        matcher.add(group(b"/a/b", b""), 1);
        matcher.add(group(b"/a/", b"/a0"), 2);
        matcher.add(group(b"/", b"/x"), 3);
        matcher.add(group(b"/a/c", b"\0"), 4);
        matcher.add(group(b"/a", b"/b"), 5);
        assert_eq!(watchers_of(&matcher, b"/a/b"), [1, 2, 3, 5]);
        assert_eq!(watchers_of(&matcher, b"/a/d"), [2, 3, 4, 5]);
        assert_eq!(watchers_of(&matcher, b"/z"), [4]);
        assert_eq!(watchers_of(&matcher, b"/"), [3]);
    }

    #[test]
    fn a_range_whose_start_ends_in_0xff_can_be_a_prefix() {
        let range = KeyRange::new(Bytes::from_static(b"a\xff"), Bytes::from_static(b"b"));
        assert_eq!(prefix(&range), Some(&Bytes::from_static(b"a\xff")));
        assert_eq!(prefix(&group(b"a", b"c").range), None);
    }

    #[test]
    fn a_removed_watcher_is_not_found() {
        let mut matcher = Matcher::default();
        for (key, end) in [(&b"k"[..], &b""[..]), (b"k", b"l"), (b"k", b"z")] {
            matcher.add(group(key, end), 1);
            matcher.add(group(key, end), 2);
            matcher.remove(&group(key, end), 1);
            assert_eq!(watchers_of(&matcher, b"k"), [2]);
            matcher.remove(&group(key, end), 2);
            assert_eq!(watchers_of(&matcher, b"k"), [0; 0]);
        }
        assert!(matcher.prefixes.is_empty() && matcher.single_keys.is_empty());
        matcher.add(group(b"other", b""), 3);
        matcher.add(group(b"k", b""), 1);
        assert_eq!(
            (watchers_of(&matcher, b"k"), watchers_of(&matcher, b"other")),
            (vec![1], vec![3])
        );
    }

    #[test]
    fn the_watchers_of_a_group_are_found_oldest_first() {
        let mut matcher = Matcher::default();
        for watcher in [4, 1, 3, 2, 5] {
            matcher.add(group(b"k", b""), watcher);
        }
        matcher.remove(&group(b"k", b""), 3);
        let events = [put(b"k")];
        let picked = matcher.pick(&events);
        let watchers: Vec<WatcherId> = picked[0].0.iter().copied().collect();
        assert_eq!((picked.len(), &watchers[..]), (1, &[1, 2, 4, 5][..]));
    }

    #[test]
    fn a_filter_excludes_its_kind_of_events() {
        let mut matcher = Matcher::default();
        matcher.add(GroupKey { no_put: true, ..group(b"k", b"") }, 1);
        assert_eq!(watchers_of(&matcher, b"k"), [0; 0]);
    }
}
