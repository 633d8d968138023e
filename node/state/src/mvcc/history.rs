//! Changes of one key as the index keeps them: 40 bytes, and a list of older changes.
//!
//! A tombstone ends one life of a key (etcd's "generation"); lives are not stored as such. The
//! create revision and the number of puts are kept only for the newest life. For older changes,
//! these two numbers are only in the records.

use super::revision::Revision;

/// State of an existing key that a write needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyState {
    pub(crate) modified: Revision,
    pub(crate) created: i64,
    pub(crate) version: i64,
}

/// One change of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChangeStamp {
    main: i64,
    sub: u32,
    /// Whether the change is a tombstone, i.e. deleted the key.
    is_tombstone: bool,
}

impl ChangeStamp {
    pub(super) fn revision(self) -> Revision {
        Revision { main: self.main, sub: self.sub }
    }

    pub(super) fn put_revision(self) -> Option<Revision> {
        (!self.is_tombstone).then(|| self.revision())
    }
}

/// Newest change of a key. Revisions are stored as separate fields; otherwise this type would need
/// more than 32 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NewestChange {
    /// A put. `created` is the revision that created the key, and `version` counts the puts since
    /// then.
    Put { main: i64, sub: u32, created: i64, version: i64 },
    /// A tombstone, with the put before it. Keeping that put here saves a list of older changes.
    /// Allocating such lists would take most of the time when many keys are deleted at once.
    Tombstone { main: i64, sub: u32, put_main: i64, put_sub: u32 },
    /// A tombstone whose earlier changes were all compacted.
    LoneTombstone { main: i64, sub: u32 },
}

impl NewestChange {
    /// Makes a put, or a tombstone if `created` is 0.
    fn of(Revision { main, sub }: Revision, created: i64, version: i64) -> Self {
        match created {
            0 => Self::LoneTombstone { main, sub },
            _ => Self::Put { main, sub, created, version },
        }
    }

    fn stamp(self) -> ChangeStamp {
        match self {
            Self::Put { main, sub, .. } => ChangeStamp { main, sub, is_tombstone: false },
            Self::Tombstone { main, sub, .. } | Self::LoneTombstone { main, sub } => {
                ChangeStamp { main, sub, is_tombstone: true }
            }
        }
    }

    /// Returns the put that this tombstone ended, if it is known.
    fn ended_put(self) -> Option<ChangeStamp> {
        match self {
            Self::Tombstone { put_main, put_sub, .. } => {
                Some(ChangeStamp { main: put_main, sub: put_sub, is_tombstone: false })
            }
            Self::Put { .. } | Self::LoneTombstone { .. } => None,
        }
    }
}

/// Changes before the newest one, oldest first. Many keys have just one such older change. It is
/// stored without a list.
#[derive(Debug, PartialEq, Eq)]
enum OlderChanges {
    One(ChangeStamp),
    More(Vec<ChangeStamp>),
}

impl OlderChanges {
    fn all(&self) -> &[ChangeStamp] {
        match self {
            Self::One(stamp) => std::slice::from_ref(stamp),
            Self::More(stamps) => stamps,
        }
    }

    fn push(&mut self, stamp: ChangeStamp) {
        match self {
            Self::One(first) => {
                let mut stamps = Vec::with_capacity(4);
                stamps.extend([*first, stamp]);
                *self = Self::More(stamps);
            }
            Self::More(stamps) => stamps.push(stamp),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct KeyHistory {
    newest_change: NewestChange,
    older: Option<Box<OlderChanges>>,
}

impl KeyHistory {
    /// Makes the history of a key that is written for the first time.
    pub(super) fn of_put(at: Revision) -> Self {
        Self::restored(at, at.main, 1)
    }

    /// Makes the history of a key from its oldest record; `created` 0 means a tombstone.
    pub(super) fn restored(at: Revision, created: i64, version: i64) -> Self {
        Self { newest_change: NewestChange::of(at, created, version), older: None }
    }

    /// Returns all changes before the newest one, oldest first. If the newest change is a
    /// tombstone, the put that it ended is left out, too.
    fn older(&self) -> &[ChangeStamp] {
        self.older.as_ref().map_or(&[], |older| older.all())
    }

    /// Returns all changes, oldest first.
    fn all(&self) -> impl DoubleEndedIterator<Item = ChangeStamp> {
        self.older()
            .iter()
            .copied()
            .chain(self.newest_change.ended_put())
            .chain([self.newest_change.stamp()])
    }

    /// Returns the change in force at `revision`, if there is one.
    pub(super) fn at(&self, revision: i64) -> Option<ChangeStamp> {
        let reached = |stamp: &ChangeStamp| stamp.main <= revision;
        Some(self.newest_change.stamp())
            .filter(reached)
            .or(self.newest_change.ended_put().filter(reached))
            .or_else(|| {
                let older = self.older();
                let after = older.partition_point(reached);
                after.checked_sub(1).map(|last| older[last])
            })
    }

    /// Returns the change that a checksum at `revision` counts: the put in force. If the same
    /// revision also deleted the key before that put, no change counts. etcd's `keyIndex.keep` has
    /// the same result, because it looks only at the generation that the delete ended.
    pub(super) fn counted_at(&self, revision: i64) -> Option<Revision> {
        let in_force = self.at(revision)?.put_revision()?;
        let before = self.all().rev().skip_while(|stamp| stamp.main > revision);
        let dies =
            before.take_while(|stamp| stamp.main == revision).any(|stamp| stamp.is_tombstone);
        (!dies).then_some(in_force)
    }

    /// Returns the newest state of the key, if it exists.
    pub(super) fn newest(&self) -> Option<KeyState> {
        match self.newest_change {
            NewestChange::Put { main, sub, created, version } => {
                Some(KeyState { modified: Revision { main, sub }, created, version })
            }
            NewestChange::Tombstone { .. } | NewestChange::LoneTombstone { .. } => None,
        }
    }

    /// Whether the history contains a change at exactly `at`.
    pub(super) fn has(&self, at: Revision) -> bool {
        self.all().any(|stamp| stamp.revision() == at)
    }

    /// Whether the request with this main revision deleted the key.
    pub(super) fn is_deleted_at(&self, revision: i64) -> bool {
        self.all().any(|stamp| stamp.main == revision && stamp.is_tombstone)
    }

    /// Appends the changes with a main revision in `from..=to` to `found`.
    pub(super) fn changes(&self, from: i64, to: i64, found: &mut Vec<Revision>) {
        let older = self.older();
        let first = older.partition_point(|stamp| stamp.main < from);
        let now = self.newest_change.ended_put().into_iter().chain([self.newest_change.stamp()]);
        let all = older[first..].iter().copied().chain(now);
        let wanted = all.filter(|stamp| stamp.main >= from && stamp.main <= to);
        found.extend(wanted.map(ChangeStamp::revision));
    }

    /// Records a put. Returns the key's `create_revision` and `version` after it.
    pub(super) fn put(&mut self, at: Revision) -> (i64, i64) {
        let (created, version) = match self.newest_change {
            NewestChange::Put { created, version, .. } => (created, version + 1),
            NewestChange::Tombstone { .. } | NewestChange::LoneTombstone { .. } => (at.main, 1),
        };
        self.restore(at, created, version);
        (created, version)
    }

    pub(super) fn delete(&mut self, at: Revision) {
        self.restore(at, 0, 0);
    }

    /// Appends the next stored record while a store is loaded; `created` 0 means a tombstone.
    pub(super) fn restore(&mut self, at: Revision, created: i64, version: i64) {
        let now = NewestChange::of(at, created, version);
        let last = std::mem::replace(&mut self.newest_change, now);
        match (now, last) {
            (
                NewestChange::LoneTombstone { main, sub },
                NewestChange::Put { main: put_main, sub: put_sub, .. },
            ) => {
                self.newest_change = NewestChange::Tombstone { main, sub, put_main, put_sub };
            }
            _ => {
                last.ended_put().into_iter().for_each(|ended| self.push_older(ended));
                self.push_older(last.stamp());
            }
        }
    }

    fn push_older(&mut self, stamp: ChangeStamp) {
        match &mut self.older {
            Some(older) => older.push(stamp),
            None => self.older = Some(Box::new(OlderChanges::One(stamp))),
        }
    }

    /// Drops the changes that no read at `revision` or later can see. Returns `false` if no change
    /// is left.
    ///
    /// The change in force at `revision` stays, unless it is a tombstone from an earlier revision.
    /// A tombstone at exactly `revision` stays, so that a watch from there still gets the delete
    /// (etcd #19179).
    pub(super) fn compact(&mut self, revision: i64, dropped: &mut Vec<Revision>) -> bool {
        let stays = |stamp: ChangeStamp| !stamp.is_tombstone || stamp.main == revision;
        let (newest, ended) = (self.newest_change.stamp(), self.newest_change.ended_put());
        if newest.main <= revision {
            dropped.extend(self.older().iter().copied().chain(ended).map(ChangeStamp::revision));
            self.older = None;
            if ended.is_some() {
                self.newest_change =
                    NewestChange::LoneTombstone { main: newest.main, sub: newest.sub };
            }
            if !stays(newest) {
                dropped.push(newest.revision());
                return false;
            }
            return true;
        }
        let older = self.older();
        let in_force = older.partition_point(|stamp| stamp.main <= revision);
        let is_older = ended.is_none_or(|ended| ended.main > revision);
        let Some(last) = in_force.checked_sub(1) else { return true };
        let last_stays = is_older && stays(older[last]);
        let (goes, left) = older.split_at(if last_stays { last } else { in_force });
        if goes.is_empty() {
            return true;
        }
        dropped.extend(goes.iter().map(|stamp| stamp.revision()));
        self.older = match left {
            [] => None,
            [one] => Some(Box::new(OlderChanges::One(*one))),
            more => Some(Box::new(OlderChanges::More(more.to_vec()))),
        };
        true
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_key_history_takes_at_most_40_bytes() {
        assert!(size_of::<KeyHistory>() <= 40);
    }

    /// Simple model of a history: all changes in order, each with the `create_revision` and
    /// `version` of its put.
    #[derive(Debug, Default)]
    struct ModelHistory(Vec<(ChangeStamp, i64, i64)>);

    impl ModelHistory {
        fn at(&self, revision: i64) -> Option<ChangeStamp> {
            self.0.iter().rev().map(|(stamp, ..)| *stamp).find(|stamp| stamp.main <= revision)
        }

        fn changes(&self, from: i64, to: i64) -> Vec<Revision> {
            let all = self.0.iter().map(|(stamp, ..)| *stamp);
            all.filter(|s| s.main >= from && s.main <= to).map(ChangeStamp::revision).collect()
        }

        /// Removes the changes before the one in force at `revision`. Removes that change too if it
        /// is a tombstone from an earlier revision.
        fn compact(&mut self, revision: i64) -> Vec<Revision> {
            let in_force = self.at(revision);
            let goes = |stamp: ChangeStamp| {
                stamp.main <= revision
                    && (Some(stamp) != in_force || (stamp.is_tombstone && stamp.main < revision))
            };
            let gone = self.0.iter().map(|(stamp, ..)| *stamp).filter(|stamp| goes(*stamp));
            let gone = gone.map(ChangeStamp::revision).collect();
            self.0.retain(|(stamp, ..)| !goes(*stamp));
            gone
        }
    }

    proptest! {
        /// Each step is a triple. The first number is added to the revision (0: the same request
        /// continues). The second number selects a put, a delete of an existing key, a reload from
        /// the records, or a compaction. The third number is the distance of the compaction from
        /// the current revision.
        #[test]
        fn a_history_equals_its_model(steps in prop::collection::vec((0..3_i64, 0..6_u8, 0..6_i64), 1..40)) {
            let (mut plain, mut history) = (ModelHistory::default(), None::<KeyHistory>);
            let mut at = Revision { main: 2, sub: 0 };
            for (ahead, what, back) in steps {
                at = match ahead {
                    0 => Revision { sub: at.sub + 1, ..at },
                    _ => Revision { main: at.main + ahead, sub: 0 },
                };
                match what {
                    0..=2 => {
                        let there = plain.0.last().filter(|(stamp, ..)| !stamp.is_tombstone);
                        let told = there.map_or((at.main, 1), |(_, created, version)| (*created, version + 1));
                        plain.0.push((ChangeStamp { main: at.main, sub: at.sub, is_tombstone: false }, told.0, told.1));
                        let found = match &mut history {
                            Some(history) => history.put(at),
                            none => {
                                *none = Some(KeyHistory::of_put(at));
                                (at.main, 1)
                            }
                        };
                        prop_assert_eq!(found, told);
                    }
                    3 if plain.0.last().is_some_and(|(stamp, ..)| !stamp.is_tombstone) => {
                        plain.0.push((ChangeStamp { main: at.main, sub: at.sub, is_tombstone: true }, 0, 0));
                        history.as_mut().unwrap().delete(at);
                    }
                    4 => {
                        history = None;
                        for (stamp, created, version) in &plain.0 {
                            match &mut history {
                                Some(history) => history.restore(stamp.revision(), *created, *version),
                                none => *none = Some(KeyHistory::restored(stamp.revision(), *created, *version)),
                            }
                        }
                    }
                    _ => {
                        let mut dropped = Vec::new();
                        let is_left = history.as_mut().is_some_and(|h| h.compact(at.main - back, &mut dropped));
                        prop_assert_eq!(dropped, plain.compact(at.main - back));
                        prop_assert_eq!(is_left, !plain.0.is_empty());
                        history = history.filter(|_| is_left);
                    }
                }
                for revision in 0..=at.main + 1 {
                    prop_assert_eq!(history.as_ref().and_then(|h| h.at(revision)), plain.at(revision));
                    let mut found = Vec::new();
                    history.iter().for_each(|h| h.changes(revision, revision + 2, &mut found));
                    prop_assert_eq!(found, plain.changes(revision, revision + 2));
                    let dies = plain.0.iter().any(|(stamp, ..)| stamp.is_tombstone && stamp.main == revision);
                    prop_assert_eq!(history.as_ref().is_some_and(|h| h.is_deleted_at(revision)), dies);
                    let counted = plain.at(revision).and_then(ChangeStamp::put_revision).filter(|_| !dies);
                    prop_assert_eq!(history.as_ref().and_then(|h| h.counted_at(revision)), counted);
                }
                let newest = plain.0.last().filter(|(stamp, ..)| !stamp.is_tombstone).map(|(stamp, created, version)| {
                    KeyState { modified: stamp.revision(), created: *created, version: *version }
                });
                prop_assert_eq!(history.as_ref().and_then(KeyHistory::newest), newest);
            }
        }
    }
}
