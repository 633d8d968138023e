//! Where in the files each entry stands.

use std::collections::BTreeMap;

use node_consensus::{Position, Terms};

/// A run of entries in one record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub last: u64,
    pub segment: u64,
    pub offset: u64,
    pub bytes: u32,
}

/// What the log holds, without the entries themselves.
#[derive(Clone, Debug, Default)]
pub(super) struct Index {
    base: Position,
    terms: Terms,
    /// By first index. Runs never overlap.
    extents: BTreeMap<u64, Extent>,
}

impl Index {
    pub fn new(base: Position) -> Self {
        Self { base, ..Self::default() }
    }

    pub fn base(&self) -> Position {
        self.base
    }

    pub fn last(&self) -> Position {
        self.terms.last().unwrap_or(self.base)
    }

    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    pub fn term_at(&self, index: u64) -> Option<u64> {
        if index == self.base.index { Some(self.base.term) } else { self.terms.get(index) }
    }

    /// A snapshot replaces everything.
    pub fn restore(&mut self, at: Position) {
        *self = Self::new(at);
    }

    /// A run of entries with `terms`, right after `before`.
    pub fn append(
        &mut self,
        before: Position,
        terms: impl Iterator<Item = u64>,
        extent: Extent,
    ) -> Result<(), &'static str> {
        let first = before.index + 1;
        if before.index < self.base.index {
            // The segments before have been dropped, and with them what this run replaced.
            self.restore(before);
        } else if self.term_at(before.index) != Some(before.term) {
            return Err("entries that don't follow what is before them");
        }
        self.truncate(first);
        for (index, term) in (first..).zip(terms) {
            self.terms.push(index, term);
        }
        self.extents.insert(first, extent);
        Ok(())
    }

    fn truncate(&mut self, from: u64) {
        self.terms.truncate(from);
        self.extents.split_off(&from);
        if let Some((_, extent)) = self.extents.iter_mut().next_back() {
            extent.last = extent.last.min(from - 1);
        }
    }

    /// The run that holds `index`.
    pub fn find(&self, index: u64) -> Option<(u64, Extent)> {
        let (first, extent) = self.extents.range(..=index).next_back()?;
        (index <= extent.last).then_some((*first, *extent))
    }

    /// Whether a segment holds an entry that is still needed after compaction through `through`.
    pub fn is_needed(&self, segment: u64, through: u64) -> bool {
        self.extents.range(..).any(|(_, extent)| extent.segment == segment && extent.last > through)
    }

    /// A segment is gone, and all before it.
    pub fn drop_through(&mut self, segment: u64) {
        let kept = self.extents.iter().find(|(_, extent)| extent.segment > segment);
        let first = kept.map_or(self.last().index + 1, |(first, _)| *first);
        let index = first - 1;
        let term = self.term_at(index).expect("the entry before the first kept one was in the log");
        self.extents = self.extents.split_off(&first);
        self.terms.compact(index);
        self.base = Position { index, term };
    }
}
