//! Reading of records by row, wherever the row is: in the store's file or in a memtable.

use std::collections::VecDeque;
use std::ops::{Deref, Range};
use std::sync::Arc;

use redb::AccessGuard;

use super::error::StoreError;
use super::memtable::{MemoryRow, Memtable};
use super::revision::Revision;
use super::store::{FileView, View};

/// Maximum number of rows that an iteration takes from a memtable under one hold of its lock.
const ROWS_PER_LOCK: usize = 256;

/// Returns the first row of the revisions after `revision`.
pub(crate) fn first_row_after(revision: i64) -> u128 {
    Revision { main: revision.saturating_add(1), sub: 0 }.to_row()
}

/// Returns the first row of `revision`.
pub(crate) fn first_row_of(revision: i64) -> u128 {
    Revision { main: revision, sub: 0 }.to_row()
}

/// Source of single rows.
pub(crate) trait RowLookup {
    /// Passes the contents of `row` to `show`. Returns `None` if there is no such row.
    fn get<R>(&self, row: u128, show: impl FnOnce(&[u8]) -> R) -> Result<Option<R>, StoreError>;
}

impl RowLookup for FileView {
    fn get<R>(&self, row: u128, show: impl FnOnce(&[u8]) -> R) -> Result<Option<R>, StoreError> {
        Ok(self.records.get(row)?.map(|found| show(found.value())))
    }
}

impl RowLookup for View {
    fn get<R>(&self, row: u128, show: impl FnOnce(&[u8]) -> R) -> Result<Option<R>, StoreError> {
        if row < self.file.end_row() {
            return self.file.get(row, show);
        }
        // A row is in one memtable at most, but `show` can be passed on only once.
        let mut show = Some(show);
        for table in self.memtables.iter().rev() {
            let shown = table.get(row, |bytes| show.take().map(|show| show(bytes)));
            if let Some(shown) = shown {
                return Ok(shown);
            }
        }
        Ok(None)
    }
}

/// Contents of a row.
pub(crate) enum RowBytes {
    File(AccessGuard<'static, &'static [u8]>),
    Memory(bytes::Bytes),
}

impl Deref for RowBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::File(guard) => guard.value(),
            Self::Memory(bytes) => bytes,
        }
    }
}

impl FileView {
    /// Returns the first row number after the rows of the file's newest revision. Rows of later
    /// revisions are only in memtables.
    pub(crate) fn end_row(&self) -> u128 {
        first_row_after(self.progress.revision)
    }

    /// Iterates over the rows of the file whose numbers are in `range`, in order.
    pub(crate) fn rows(&self, range: Range<u128>) -> Result<Rows, StoreError> {
        let file = (range.start < range.end).then(|| self.records.range(range)).transpose()?;
        Ok(Rows { file, memory: MemoryRows::default() })
    }
}

impl View {
    /// Iterates over the rows whose numbers are in `range`, in order.
    pub(crate) fn rows(&self, range: Range<u128>) -> Result<Rows, StoreError> {
        let (in_file, end) = (self.file.end_row(), first_row_after(self.progress.revision));
        let memory = MemoryRows {
            tables: self.memtables.iter().cloned().collect(),
            next: range.start.max(in_file),
            end: range.end.min(end),
            taken: VecDeque::new(),
        };
        Ok(Rows { memory, ..self.file.rows(range.start..range.end.min(in_file))? })
    }

    /// Iterates over all rows, in order.
    pub(crate) fn all_rows(&self) -> Result<Rows, StoreError> {
        self.rows(0..u128::MAX)
    }

    /// Returns the last row whose number is at most `upto`.
    pub(crate) fn last_row_upto(&self, upto: u128) -> Result<Option<(u128, RowBytes)>, StoreError> {
        let in_file = self.file.end_row();
        if upto >= in_file {
            let last = |table: &Arc<Memtable>| table.last_between(in_file, upto);
            if let Some((number, row)) = self.memtables.iter().rev().find_map(last) {
                return Ok(Some((number, RowBytes::Memory(row))));
            }
        }
        let Some(last) = self.file.records.range(..=upto)?.next_back() else { return Ok(None) };
        let (number, row) = last?;
        Ok(Some((number.value(), RowBytes::File(row))))
    }
}

/// Iterator over rows in ascending order: those of the file, then those of the memtables.
pub(crate) struct Rows {
    file: Option<redb::Range<'static, u128, &'static [u8]>>,
    memory: MemoryRows,
}

impl Iterator for Rows {
    type Item = Result<(u128, RowBytes), StoreError>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.file.as_mut().and_then(Iterator::next) {
            Some(Ok((number, row))) => return Some(Ok((number.value(), RowBytes::File(row)))),
            Some(Err(error)) => return Some(Err(error.into())),
            None => self.file = None,
        }
        let (number, row) = self.memory.next()?;
        Some(Ok((number, RowBytes::Memory(row))))
    }
}

/// Iterator over the rows of memtables, in ascending order.
#[derive(Default)]
struct MemoryRows {
    /// Memtables that are not read to their end yet, oldest first.
    tables: VecDeque<Arc<Memtable>>,
    /// First row to take from the memtables.
    next: u128,
    /// First row that doesn't belong to the iteration.
    end: u128,
    /// Rows taken from the first memtable and not returned yet.
    taken: VecDeque<MemoryRow>,
}

impl Iterator for MemoryRows {
    type Item = MemoryRow;

    fn next(&mut self) -> Option<MemoryRow> {
        while self.taken.is_empty() {
            let table = self.tables.front()?;
            table.first_between(self.next, self.end, ROWS_PER_LOCK, &mut self.taken);
            match self.taken.back() {
                Some((last, _)) => self.next = last + 1,
                None => drop(self.tables.pop_front()),
            }
        }
        self.taken.pop_front()
    }
}
