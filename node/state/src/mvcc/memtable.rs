//! Memtables: changes of applied batches that the store's file doesn't contain yet.
//!
//! As in a log-structured merge tree, there are at most two. Batches append to the *active* one. A
//! flush freezes it, and writes it to the file in one durable transaction while batches append to a
//! new one. The log keeps the entries of both until the flush has ended.
//!
//! Each new record has a higher revision than all earlier ones. So a memtable is a sorted list, to
//! which rows are only appended, and readers share it: a view ignores the rows after its own
//! revision, and those that its file already contains.

use std::sync::{Arc, RwLock, RwLockReadGuard};

use bytes::Bytes;

use crate::lease::Lease;

/// Row of the record table: its number, and its contents.
pub(crate) type MemoryRow = (u128, Bytes);

/// A lease that was granted, changed or revoked.
#[derive(Clone, Copy, Debug)]
struct LeaseChange {
    /// Index of the last log entry of the batch that made the change.
    applied: u64,
    id: i64,
    /// The lease after the change; `None` if it was revoked.
    lease: Option<Lease>,
}

/// Changes of one batch, to be appended to the active memtable.
#[derive(Debug, Default)]
pub(crate) struct MemoryChanges {
    /// New rows, in ascending order, all after those of earlier batches.
    pub(crate) rows: Vec<MemoryRow>,
    /// Changed leases by id, in the order of the changes; `None` for a revoked lease.
    pub(crate) leases: Vec<(i64, Option<Lease>)>,
}

#[derive(Debug, Default)]
struct MemtableContents {
    rows: Vec<MemoryRow>,
    leases: Vec<LeaseChange>,
    /// Approximate number of bytes that rows and leases take in memory.
    bytes: usize,
}

/// Rows and leases that were changed since the previous memtable was frozen.
#[derive(Debug, Default)]
pub(crate) struct Memtable(RwLock<MemtableContents>);

impl Memtable {
    fn lock(&self) -> RwLockReadGuard<'_, MemtableContents> {
        self.0.read().expect("nothing panics while it appends to a memtable")
    }

    /// Appends the changes of a batch whose last log entry has the index `applied`.
    pub(super) fn append(&self, applied: u64, changes: MemoryChanges) {
        let MemoryChanges { rows, leases } = changes;
        let row_bytes = |(_, row): &MemoryRow| size_of::<MemoryRow>() + row.len();
        let bytes =
            rows.iter().map(row_bytes).sum::<usize>() + leases.len() * size_of::<LeaseChange>();
        let mut contents = self.0.write().expect("nothing panics while it appends to a memtable");
        debug_assert!(rows.is_sorted_by(|a, b| a.0 < b.0), "rows are appended in order");
        debug_assert!(
            rows.first().is_none_or(|new| contents.rows.last().is_none_or(|last| last.0 < new.0)),
            "each row comes after all earlier ones"
        );
        contents.rows.extend(rows);
        let changes = leases.into_iter().map(|(id, lease)| LeaseChange { applied, id, lease });
        contents.leases.extend(changes);
        contents.bytes += bytes;
    }

    /// Returns the approximate number of bytes that the memtable's contents take in memory.
    pub(super) fn bytes(&self) -> usize {
        self.lock().bytes
    }

    /// Passes the contents of `row` to `show`. Returns `None` if this memtable doesn't have the
    /// row.
    pub(super) fn get<R>(&self, row: u128, show: impl FnOnce(&[u8]) -> R) -> Option<R> {
        let contents = self.lock();
        let at = contents.rows.binary_search_by_key(&row, |(number, _)| *number).ok()?;
        Some(show(&contents.rows[at].1))
    }

    /// Returns the last row whose number is at least `from` and at most `upto`.
    pub(super) fn last_between(&self, from: u128, upto: u128) -> Option<MemoryRow> {
        let contents = self.lock();
        let end = contents.rows.partition_point(|(number, _)| *number <= upto);
        contents.rows[..end].last().filter(|(number, _)| *number >= from).cloned()
    }

    /// Appends to `found` the first rows whose numbers are at least `from` and less than `end`, at
    /// most `at_most` of them.
    pub(super) fn first_between(
        &self,
        from: u128,
        end: u128,
        at_most: usize,
        found: &mut impl Extend<MemoryRow>,
    ) {
        let contents = self.lock();
        let start = contents.rows.partition_point(|(number, _)| *number < from);
        let rows = contents.rows[start..].iter().take_while(|(number, _)| *number < end);
        found.extend(rows.take(at_most).cloned());
    }

    /// Passes the changes of leases by the log entries after `from` and up to `upto` to `show`, in
    /// order. Each change is a lease's id and the lease, or `None` if it was revoked.
    pub(super) fn lease_changes(
        &self,
        from: u64,
        upto: u64,
        mut show: impl FnMut(i64, Option<Lease>),
    ) {
        let contents = self.lock();
        let start = contents.leases.partition_point(|change| change.applied <= from);
        let changes = contents.leases[start..].iter().take_while(|change| change.applied <= upto);
        changes.for_each(|change| show(change.id, change.lease));
    }
}

/// The memtables at one moment: the frozen one, if a flush is writing it, and the active one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Memtables {
    pub(super) frozen: Option<Arc<Memtable>>,
    pub(super) active: Arc<Memtable>,
}

impl Memtables {
    /// Iterates over the memtables, oldest first.
    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = &Arc<Memtable>> {
        self.frozen.iter().chain([&self.active])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(number: u128) -> MemoryRow {
        (number, Bytes::from(vec![b'r'; usize::try_from(number).unwrap()]))
    }

    fn changes(rows: &[u128]) -> MemoryChanges {
        MemoryChanges { rows: rows.iter().copied().map(row).collect(), leases: Vec::new() }
    }

    #[test]
    fn rows_are_found_by_number_and_in_ranges() {
        let table = Memtable::default();
        table.append(1, changes(&[3, 5]));
        table.append(2, changes(&[8]));
        let length = |number| table.get(number, <[u8]>::len);
        assert_eq!([3, 4, 5, 8, 9].map(length), [Some(3), None, Some(5), Some(8), None]);
        let last = |from, upto| table.last_between(from, upto).map(|(number, _)| number);
        assert_eq!(last(0, 2), None);
        assert_eq!((last(0, 7), last(0, 8), last(0, 99)), (Some(5), Some(8), Some(8)));
        assert_eq!((last(6, 7), last(5, 7)), (None, Some(5)));
        let first = |from, end, at_most| {
            let mut found = Vec::new();
            table.first_between(from, end, at_most, &mut found);
            found.into_iter().map(|(number, _)| number).collect::<Vec<_>>()
        };
        assert_eq!(first(0, 99, 99), [3, 5, 8]);
        assert_eq!(first(4, 8, 99), [5]);
        assert_eq!(first(0, 99, 2), [3, 5]);
    }

    #[test]
    fn lease_changes_are_bounded_by_log_entries() {
        let table = Memtable::default();
        let lease = |id| Lease { id, ttl: 60, remaining_ttl: 0, grant_index: 1 };
        let grant = |id| MemoryChanges { rows: Vec::new(), leases: vec![(id, Some(lease(id)))] };
        table.append(4, grant(1));
        table.append(6, MemoryChanges { rows: Vec::new(), leases: vec![(1, None)] });
        table.append(9, grant(2));
        let seen = |from, upto| {
            let mut seen = Vec::new();
            table.lease_changes(from, upto, |id, lease| seen.push((id, lease.is_some())));
            seen
        };
        assert_eq!(seen(0, 9), [(1, true), (1, false), (2, true)]);
        assert_eq!(seen(4, 8), [(1, false)]);
        assert_eq!(seen(9, 99), []);
    }

    #[test]
    fn a_memtable_counts_its_bytes() {
        let table = Memtable::default();
        assert_eq!(table.bytes(), 0);
        table.append(1, changes(&[100, 200]));
        let once = table.bytes();
        assert!((300..500).contains(&once), "{once}");
        table.append(2, MemoryChanges { rows: Vec::new(), leases: vec![(1, None)] });
        assert!(table.bytes() > once);
    }
}
