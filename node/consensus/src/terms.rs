//! Terms of all log entries, stored as runs: a few bytes per election, whatever the log's size.

use crate::Position;

/// Terms of a contiguous range of entries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Runs of successive entries with one term, as (index of the first entry, term). Both numbers
    /// ascend.
    runs: Vec<(u64, u64)>,
    /// Index of the last entry that `runs` covers. If `runs` is empty, the value has no meaning.
    last: u64,
}

impl Terms {
    /// Appends the term of entry `index`. It replaces the terms of all entries from that index on.
    pub fn push(&mut self, index: u64, term: u64) {
        while self.runs.last().is_some_and(|run| run.0 >= index) {
            self.runs.pop();
        }
        if self.runs.last().is_none_or(|run| run.1 != term) {
            self.runs.push((index, term));
        }
        self.last = index;
    }

    /// Drops the terms of all entries up to and including `through`.
    pub fn compact(&mut self, through: u64) {
        if self.runs.is_empty() {
            return;
        }
        if through >= self.last {
            self.runs.clear();
            return;
        }
        let keep = self.runs.partition_point(|run| run.0 <= through + 1).saturating_sub(1);
        self.runs.drain(..keep);
        if let Some(first) = self.runs.first_mut()
            && first.0 <= through
        {
            first.0 = through + 1;
        }
    }

    /// Returns the term of entry `index`, or `None` if the range doesn't cover it.
    pub fn get(&self, index: u64) -> Option<u64> {
        if self.runs.is_empty() || index > self.last {
            return None;
        }
        let after = self.runs.partition_point(|run| run.0 <= index);
        (after > 0).then(|| self.runs[after - 1].1)
    }

    /// Returns the position of the last entry in the range, or `None` if the range is empty.
    pub fn last(&self) -> Option<Position> {
        self.runs.last().map(|run| Position { index: self.last, term: run.1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(list: &[(u64, u64)]) -> Terms {
        let mut terms = Terms::default();
        for (index, term) in list {
            terms.push(*index, *term);
        }
        terms
    }

    #[test]
    fn the_term_of_each_entry_is_found() {
        let terms = terms(&[(5, 1), (6, 1), (7, 3), (8, 3)]);
        let found: Vec<_> = (4..=9).map(|index| terms.get(index)).collect();
        assert_eq!(found, [None, Some(1), Some(1), Some(3), Some(3), None]);
    }

    #[test]
    fn a_later_leader_replaces_the_tail() {
        let mut terms = terms(&[(5, 1), (6, 1), (7, 3), (8, 3)]);
        terms.push(6, 4);
        assert_eq!((terms.get(5), terms.get(6), terms.get(7)), (Some(1), Some(4), None));
        assert_eq!(terms.last(), Some(Position { index: 6, term: 4 }));
    }

    #[test]
    fn compaction_keeps_the_terms_of_later_entries() {
        let mut terms = terms(&[(5, 1), (6, 1), (7, 3), (8, 3)]);
        terms.compact(7);
        assert_eq!((terms.get(7), terms.get(8)), (None, Some(3)));
        terms.compact(8);
        assert_eq!(terms.last(), None);
    }
}
