//! Combined state of all records of the log. Writer and recovery both use this module to apply a
//! record to that state.

use std::collections::VecDeque;

use node_consensus::{Entry, HardState, Position, Terms};

use super::codec::{Item, SegmentHeader};

/// Location of a record in the log's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Location {
    pub segment: u64,
    pub offset: u64,
}

/// Consecutive entries that one item of one record holds. Entries that a later item has replaced
/// are not included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EntryRun {
    pub first: u64,
    pub last: u64,
    pub location: Location,
    /// Number of the item within its record.
    pub item: usize,
}

/// Combined content of all records up to some point.
#[derive(Clone, Debug, Default)]
pub(super) struct LogState {
    pub boot: u64,
    pub hard_state: HardState,
    pub base: Position,
    pub installing: Option<Position>,
    terms: Terms,
    /// Last entry of the log while `terms` is empty: either the base, or the last entry of removed
    /// segments.
    floor: Position,
    /// Runs of entries in ascending order of their indexes, without gaps.
    runs: VecDeque<EntryRun>,
}

impl LogState {
    /// Starts from the header of the oldest remaining segment.
    pub(super) fn begin(start: &SegmentHeader) -> Self {
        let mut history = Self::default();
        for item in &start.repeated {
            match item {
                Item::Boot(boot) => history.boot = *boot,
                Item::HardState(state) => history.hard_state = *state,
                Item::Base(at) => history.base = *at,
                Item::Installing(at) => history.installing = Some(*at),
                Item::Entries(_) | Item::Snapshot(_) => {}
            }
        }
        history.floor = start.last;
        history
    }

    /// Returns the items that the first record of a new segment repeats.
    pub(super) fn header_items(&self) -> Vec<Item> {
        let mut items =
            vec![Item::Boot(self.boot), Item::HardState(self.hard_state), Item::Base(self.base)];
        items.extend(self.installing.map(Item::Installing));
        items
    }

    pub(super) fn last(&self) -> Position {
        self.terms.last().unwrap_or(self.floor)
    }

    pub(super) fn terms(&self) -> &Terms {
        &self.terms
    }

    pub(super) fn term(&self, index: u64) -> Option<u64> {
        if index == self.base.index { Some(self.base.term) } else { self.terms.get(index) }
    }

    /// Returns the run of entries that contains entry `index`.
    pub(super) fn run_containing(&self, index: u64) -> Option<EntryRun> {
        if index <= self.base.index {
            return None;
        }
        let after = self.runs.partition_point(|piece| piece.last < index);
        self.runs.get(after).copied().filter(|piece| piece.first <= index)
    }

    /// Returns the number of the oldest segment that still holds an entry after `index`.
    pub(super) fn oldest_segment(&self, index: u64) -> Option<u64> {
        let needed = self.runs.iter().filter(|piece| piece.last > index);
        needed.map(|piece| piece.location.segment).min()
    }

    /// Returns whether the records read so far contain every entry after the base.
    pub(super) fn is_whole(&self) -> bool {
        self.last().index <= self.base.index || self.run_containing(self.base.index + 1).is_some()
    }

    /// Applies item `number` of the record at `location`. Returns an error if the item contradicts
    /// the log.
    pub(super) fn add(
        &mut self,
        item: &Item,
        location: Location,
        number: usize,
    ) -> Result<(), &'static str> {
        match item {
            Item::Boot(boot) if *boot <= self.boot => return Err("the count of boots went back"),
            Item::Boot(boot) => self.boot = *boot,
            Item::HardState(state) if state.term < self.hard_state.term => {
                return Err("the term went back");
            }
            Item::HardState(state) => self.hard_state = *state,
            Item::Entries(entries) => self.add_entries(entries, location, number)?,
            Item::Base(at) => self.compact(*at)?,
            Item::Installing(at) => self.installing = Some(*at),
            Item::Snapshot(at) => self.restore(*at)?,
        }
        Ok(())
    }

    fn add_entries(
        &mut self,
        entries: &[Entry],
        location: Location,
        item: usize,
    ) -> Result<(), &'static str> {
        let (Some(first), Some(last)) = (entries.first(), entries.last()) else {
            return Err("an item of entries has none");
        };
        if first.index > self.last().index + 1 {
            return Err("entries are missing");
        }
        if first.index <= self.base.index {
            return Err("entries that were compacted are written again");
        }
        if self.term(first.index - 1).is_some_and(|before| first.term < before)
            || entries.windows(2).any(|pair| pair[1].term < pair[0].term)
        {
            return Err("the terms of entries go back");
        }
        while self.runs.back().is_some_and(|piece| piece.first >= first.index) {
            self.runs.pop_back();
        }
        if let Some(piece) = self.runs.back_mut() {
            piece.last = piece.last.min(first.index - 1);
        }
        self.runs.push_back(EntryRun { first: first.index, last: last.index, location, item });
        for entry in entries {
            self.terms.push(entry.index, entry.term);
        }
        Ok(())
    }

    fn compact(&mut self, base: Position) -> Result<(), &'static str> {
        if base.index < self.base.index || base.index > self.last().index {
            return Err("the base lies outside the log");
        }
        let had_terms = self.terms.last().is_some();
        self.terms.compact(base.index);
        while self.runs.front().is_some_and(|piece| piece.last <= base.index) {
            self.runs.pop_front();
        }
        // If the log had entries, the new base replaces the floor. Otherwise the floor is the last
        // entry of removed segments, and so the end of the log. The end must not go back, so a base
        // below the floor doesn't replace it.
        if had_terms || base.index >= self.floor.index {
            self.floor = base;
        }
        self.base = base;
        Ok(())
    }

    fn restore(&mut self, at: Position) -> Result<(), &'static str> {
        if at.index < self.base.index {
            return Err("a snapshot is older than the log's base");
        }
        self.terms = Terms::default();
        self.runs.clear();
        self.floor = at;
        self.base = at;
        self.installing = None;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn location(segment: u64) -> Location {
        Location { segment, offset: 0 }
    }

    fn entries(first: u64, terms: &[u64]) -> Item {
        let entry = |(index, term): (u64, &u64)| Entry { index, term: *term, ..Entry::default() };
        Item::Entries((first..).zip(terms).map(entry).collect())
    }

    fn at(index: u64, term: u64) -> Position {
        Position { index, term }
    }

    #[test]
    fn a_later_append_replaces_the_conflicting_suffix() {
        let mut history = LogState::default();
        history.add(&entries(1, &[1, 1, 1, 1]), location(1), 0).unwrap();
        history.add(&entries(3, &[2]), location(2), 0).unwrap();
        assert_eq!(history.last(), at(3, 2));
        let segments: Vec<_> = (0..=4)
            .map(|index| history.run_containing(index).map(|piece| piece.location.segment))
            .collect();
        assert_eq!(segments, [None, Some(1), Some(1), Some(2), None]);
    }

    #[test]
    fn a_base_frees_the_segments_before_it() {
        let mut history = LogState::default();
        history.add(&entries(1, &[1, 1]), location(1), 0).unwrap();
        history.add(&entries(3, &[1, 1]), location(2), 0).unwrap();
        history.add(&Item::Base(at(2, 1)), location(2), 1).unwrap();
        assert_eq!(history.oldest_segment(0), Some(2));
        assert_eq!((history.term(1), history.term(2), history.term(3)), (None, Some(1), Some(1)));
        history.add(&Item::Base(at(4, 1)), location(2), 2).unwrap();
        assert_eq!((history.oldest_segment(0), history.last()), (None, at(4, 1)));
    }

    #[test]
    fn a_snapshot_replaces_everything() {
        let mut history = LogState::default();
        history.add(&entries(1, &[1, 1]), location(1), 0).unwrap();
        history.add(&Item::Installing(at(10, 3)), location(1), 0).unwrap();
        assert_eq!((history.last(), history.installing), (at(2, 1), Some(at(10, 3))));
        history.add(&Item::Snapshot(at(10, 3)), location(1), 0).unwrap();
        assert_eq!((history.last(), history.base), (at(10, 3), at(10, 3)));
        assert_eq!(history.installing, None);
        history.add(&entries(11, &[3]), location(1), 1).unwrap();
        assert_eq!(history.last(), at(11, 3));
    }

    #[test]
    fn items_that_contradict_the_log_are_refused() {
        let mut history = LogState::default();
        history.add(&entries(1, &[2, 2]), location(1), 0).unwrap();
        history.add(&Item::Base(at(1, 2)), location(1), 0).unwrap();
        history.add(&Item::Boot(2), location(1), 0).unwrap();
        let state = HardState { term: 2, vote: 1, commit: 1 };
        history.add(&Item::HardState(state), location(1), 0).unwrap();
        for wrong in [
            entries(4, &[2]),
            entries(1, &[2]),
            entries(3, &[1]),
            Item::Base(at(3, 2)),
            Item::Base(at(0, 0)),
            Item::Boot(2),
            Item::HardState(HardState { term: 1, ..state }),
            Item::Snapshot(at(0, 0)),
        ] {
            assert!(history.add(&wrong, location(1), 0).is_err(), "{wrong:?}");
        }
    }

    fn after_lost_segments(last: Position, base: Position) -> LogState {
        LogState::begin(&SegmentHeader {
            identity: super::super::LogIdentity::default(),
            segment: 4,
            segment_bytes: 0,
            last,
            repeated: vec![Item::Base(base)],
        })
    }

    #[test]
    fn compacting_the_entries_that_replaced_a_lost_tail_does_not_bring_it_back() {
        let mut history = after_lost_segments(at(20, 1), at(10, 1));
        history.add(&entries(11, &[2, 2]), location(4), 0).unwrap();
        history.add(&Item::Base(at(12, 2)), location(4), 1).unwrap();
        assert_eq!(history.last(), at(12, 2));
        assert!(history.is_whole());
    }

    #[test]
    fn a_log_that_lacks_entries_after_its_base_is_not_whole() {
        let mut history = after_lost_segments(at(450, 3), at(50, 1));
        history.add(&entries(451, &[3, 3]), location(4), 0).unwrap();
        assert!(!history.is_whole());
        history.add(&Item::Base(at(450, 3)), location(4), 1).unwrap();
        assert!(history.is_whole());
    }
}
