//! Rows of the record table. A row holds one record, or several tombstones of one request.
//!
//! Revoking a lease, for example, deletes many keys in one request. A row for each tombstone would
//! delay all later writes. Several tombstones per row need about a fiftieth of the rows, and keep
//! their revisions. [`records`] hides the difference from code that reads rows in order.
//!
//! A row of several tombstones is changed only at the end of the compaction that passes its
//! request. Until then it may contain tombstones that the index has dropped already. That is
//! normal: an unfinished compaction leaves such records as well.

use super::error::StoreError;
use super::event::{KEY_TAG, encode_tombstone};
use super::record_rows::RowLookup as _;
use super::revision::Revision;
use super::store::View;

/// Maximum length of a row of several tombstones. Together with redb's overhead, such a row fills a
/// page.
const MAX_TOMBSTONE_ROW_BYTES: usize = 4_000;
/// First byte of a row of several tombstones. No encoded `KeyValue` begins with it.
const TOMBSTONE_ROW_TAG: u8 = 0;
/// Tombstones of one request that are collected for one row.
#[derive(Debug, Default)]
pub(crate) struct TombstoneRow {
    first: Option<Revision>,
    count: usize,
    /// Contents of the row: [`TOMBSTONE_ROW_TAG`], then two values for each tombstone. The first is
    /// its `sub`, minus that of the first tombstone. The second is its record.
    bytes: Vec<u8>,
    /// Offset at which the last record begins.
    last: usize,
    /// Bytes that the tombstones add to the store's size, each counted as if it had a row of its
    /// own.
    weight: i64,
}

impl TombstoneRow {
    /// Whether the row would be too long with one more tombstone, of a key of `length` bytes.
    pub(crate) fn is_full_with(&self, length: usize) -> bool {
        // Overhead of a tombstone: the tag, and two varints of at most 5 bytes.
        self.count > 0 && self.bytes.len() + length + 11 > MAX_TOMBSTONE_ROW_BYTES
    }

    /// Appends a tombstone of the request whose tombstones the row collects. Its revision must be
    /// higher than those of the earlier tombstones.
    pub(crate) fn push(&mut self, at: Revision, key: &[u8]) {
        let first = *self.first.get_or_insert(at);
        debug_assert!(first.main == at.main && first.sub <= at.sub, "{at:?} comes after {first:?}");
        if self.bytes.is_empty() {
            self.bytes.push(TOMBSTONE_ROW_TAG);
        }
        prost::encoding::encode_varint(u64::from(at.sub - first.sub), &mut self.bytes);
        self.last = self.bytes.len();
        encode_tombstone(key, &mut self.bytes);
        self.weight += weight(self.bytes.len() - self.last);
        self.count += 1;
    }

    /// Returns the row and its contents; `None` if there are no tombstones. A single tombstone is
    /// stored as an ordinary record.
    pub(crate) fn row(&self) -> Option<(u128, &[u8])> {
        let bytes = if self.count == 1 { &self.bytes[self.last..] } else { &self.bytes };
        Some((self.first?.to_row(), bytes))
    }

    /// Returns the bytes that the tombstones add to the store's size.
    pub(crate) fn weight(&self) -> i64 {
        self.weight
    }

    /// Empties the row, so that it can collect other tombstones.
    pub(crate) fn clear(&mut self) {
        self.first = None;
        self.count = 0;
        self.weight = 0;
        self.bytes.clear();
    }
}

/// Whether the row holds several tombstones.
pub(crate) fn is_tombstone_row(row: &[u8]) -> bool {
    row.first() == Some(&TOMBSTONE_ROW_TAG)
}

/// Iterates over the records of a row, each with its revision, in order.
pub(crate) fn records(at: u128, row: &[u8]) -> RowRecords<'_> {
    let first = Revision::from_row(at);
    let left = if is_tombstone_row(row) {
        RowRemainder::Tombstones(&row[1..])
    } else {
        RowRemainder::Record(row)
    };
    RowRecords { first, left }
}

/// Part of a row that has not been returned yet.
enum RowRemainder<'row> {
    Record(&'row [u8]),
    Tombstones(&'row [u8]),
    Empty,
}

/// Iterator over the records of a row: see [`records`].
pub(crate) struct RowRecords<'row> {
    first: Revision,
    left: RowRemainder<'row>,
}

impl<'row> Iterator for RowRecords<'row> {
    type Item = Result<(Revision, &'row [u8]), StoreError>;

    fn next(&mut self) -> Option<Self::Item> {
        let rest = match std::mem::replace(&mut self.left, RowRemainder::Empty) {
            RowRemainder::Record(record) => return Some(Ok((self.first, record))),
            RowRemainder::Tombstones(rest) if !rest.is_empty() => rest,
            RowRemainder::Tombstones(_) | RowRemainder::Empty => return None,
        };
        let next = split_tombstone(rest).and_then(|(ahead, record, rest)| {
            Some((self.first.sub.checked_add(ahead)?, record, rest))
        });
        Some(match next {
            Some((sub, record, rest)) => {
                self.left = RowRemainder::Tombstones(rest);
                Ok((Revision { sub, ..self.first }, record))
            }
            None => Err(StoreError::Corrupt(format!(
                "the row of tombstones at {:?} is no such row",
                self.first
            ))),
        })
    }
}

/// Splits the first tombstone off. Returns the difference between its `sub` and that of the row,
/// its record, and the remaining bytes.
fn split_tombstone(bytes: &[u8]) -> Option<(u32, &[u8], &[u8])> {
    let mut rest = bytes;
    let ahead = u32::try_from(prost::encoding::decode_varint(&mut rest).ok()?).ok()?;
    let record = rest;
    rest = rest.strip_prefix(&[KEY_TAG])?;
    let length = usize::try_from(prost::encoding::decode_varint(&mut rest).ok()?).ok()?;
    let after = rest.get(length..)?;
    Some((ahead, &record[..record.len() - after.len()], after))
}

/// Returns the bytes that a record of `length` bytes adds to the store's size. The number doesn't
/// depend on the kind of row, so that all members compute the same size.
pub(crate) fn weight(length: usize) -> i64 {
    i64::try_from(length + size_of::<u128>()).unwrap_or(i64::MAX)
}

/// Passes the record of a revision to `show`, whichever kind of row it is in. Returns `None` if
/// there is no record.
pub(crate) fn read_record<R>(
    view: &View,
    at: Revision,
    show: impl FnOnce(&[u8]) -> R,
) -> Result<Option<R>, StoreError> {
    let mut show = Some(show);
    let mut show_single = |row: &[u8]| {
        let is_single = !is_tombstone_row(row);
        show.take_if(|_| is_single).map(|show| show(row))
    };
    if let Some(shown) = view.get(at.to_row(), &mut show_single)?.flatten() {
        return Ok(Some(shown));
    }
    let Some((first, row)) = view.last_row_upto(at.to_row())? else { return Ok(None) };
    if !is_tombstone_row(&row) || Revision::from_row(first).main != at.main {
        return Ok(None);
    }
    for record in records(first, &row) {
        let (found, record) = record?;
        if found == at {
            return Ok(show.take().map(|show| show(record)));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mvcc::event::decode;

    fn together(keys: &[(u32, &[u8])]) -> (u128, Vec<u8>) {
        let mut tombstones = TombstoneRow::default();
        for (sub, key) in keys {
            tombstones.push(Revision { main: 7, sub: *sub }, key);
        }
        let (row, bytes) = tombstones.row().unwrap();
        (row, bytes.to_vec())
    }

    #[test]
    fn tombstones_of_a_shared_row_read_like_single_records() -> Result<(), StoreError> {
        let long = vec![b'l'; 300];
        let keys: [(u32, &[u8]); 3] = [(3, b"a"), (4, &long), (900, b"z")];
        let (row, bytes) = together(&keys);
        let found = records(row, &bytes).collect::<Result<Vec<_>, _>>()?;
        assert_eq!(found.len(), keys.len());
        for ((at, record), (sub, key)) in found.into_iter().zip(keys) {
            assert_eq!(at, Revision { main: 7, sub });
            let mut alone = Vec::new();
            encode_tombstone(key, &mut alone);
            assert_eq!(record, alone);
        }
        Ok(())
    }

    #[test]
    fn a_single_tombstone_is_an_ordinary_record() -> Result<(), StoreError> {
        let (row, bytes) = together(&[(2, b"key")]);
        assert!(!is_tombstone_row(&bytes));
        assert_eq!(decode(&bytes)?.key, "key");
        let found = records(row, &bytes).collect::<Result<Vec<_>, _>>()?;
        assert_eq!(found, [(Revision { main: 7, sub: 2 }, &bytes[..])]);
        Ok(())
    }

    #[test]
    fn a_tombstone_row_stays_below_the_maximum_length() {
        let mut tombstones = TombstoneRow::default();
        let long = vec![b'l'; MAX_TOMBSTONE_ROW_BYTES];
        assert!(!tombstones.is_full_with(long.len()), "one always fits");
        let mut sub = 0;
        while !tombstones.is_full_with(100) {
            tombstones.push(Revision { main: 7, sub }, &[b'k'; 100]);
            sub += 1;
        }
        let (_, bytes) = tombstones.row().unwrap();
        assert!(
            bytes.len() <= MAX_TOMBSTONE_ROW_BYTES && bytes.len() > MAX_TOMBSTONE_ROW_BYTES - 120
        );
        tombstones.clear();
        assert!(tombstones.row().is_none());
    }

    #[test]
    fn reading_a_truncated_row_ends_with_an_error() {
        let (row, bytes) = together(&[(0, b"one"), (1, b"two")]);
        for end in 2..bytes.len() {
            let found: Vec<_> = records(row, &bytes[..end]).collect();
            let whole = found.iter().filter(|record| record.is_ok()).count();
            assert!(found.len() - whole <= 1 && whole < 2, "{end}: {found:?}");
        }
        let mut far = vec![TOMBSTONE_ROW_TAG];
        prost::encoding::encode_varint(u64::from(u32::MAX), &mut far);
        far.extend_from_slice(&[KEY_TAG, 1, b'k']);
        assert!(records(Revision { main: 7, sub: 1 }.to_row(), &far).all(|found| found.is_err()));
    }
}
