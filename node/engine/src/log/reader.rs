//! Reading old entries from disk while the writer continues.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use bytes::Bytes;
use node_consensus::{Entry, Position};

use super::codec::Item;
use super::history::{EntryRun, Location, LogState};
use super::segment::{Segment, record};
use super::{Damage, LogError};

/// Bytes that an entry counts towards `max_bytes` in addition to its data.
const ENTRY_COST: u64 = 48;

/// State that the writer shares with readers: where each durable entry is stored. The writer holds
/// the lock only for microseconds after each sync, and never during disk I/O.
#[derive(Debug)]
pub(super) struct SharedLogState {
    /// Whether readers verify checksums. False in tests only, and then recovery doesn't verify
    /// checksums either.
    pub verify: bool,
    pub history: LogState,
    pub segments: BTreeMap<u64, Segment>,
}

/// Reader of durable entries, usable on any thread. Cheap to clone.
#[derive(Clone, Debug)]
pub struct LogReader {
    shared: Arc<RwLock<SharedLogState>>,
}

impl LogReader {
    pub(super) fn new(shared: SharedLogState) -> Self {
        Self { shared: Arc::new(RwLock::new(shared)) }
    }

    pub(super) fn shared(&self) -> RwLockReadGuard<'_, SharedLogState> {
        // A poisoned lock is harmless: the writer panics only on a broken invariant, and a panic
        // ends the process.
        self.shared.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn shared_mut(&self) -> RwLockWriteGuard<'_, SharedLogState> {
        self.shared.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns durable entries from `low` up to but not including `high`. The result is limited to
    /// `max_bytes`, but has at least one entry if there is one. Each call reads whole records, so
    /// only slow followers and the start of the process use it.
    pub fn entries(&self, low: u64, high: u64, max_bytes: u64) -> Result<Vec<Entry>, LogError> {
        let mut entries: Vec<Entry> = Vec::new();
        let mut bytes = 0;
        let mut next = low;
        let mut held: Option<(Location, Vec<Item>)> = None;
        while next < high {
            let Some((piece, segment, verify)) = self.locate(next)? else { break };
            if held.as_ref().is_none_or(|(location, _)| *location != piece.location) {
                match read_record(&segment, piece.location.offset, verify) {
                    Ok(items) => held = Some((piece.location, items)),
                    // The segment may have been recycled since the entry was located. Then locate
                    // the entry again.
                    Err(_) if self.locate(next)?.map(|found| found.0) != Some(piece) => continue,
                    Err(error) => return Err(error),
                }
            }
            let items = held.as_ref().map_or(&[][..], |(_, items)| items);
            let Some(found) = entries_of(items, &piece, next) else {
                let damage = Damage::Contradiction("an entry isn't where it was");
                return Err(LogError::damaged(&segment.path, piece.location.offset, damage));
            };
            for entry in found.iter().take_while(|entry| entry.index < high) {
                bytes += entry.data.len() as u64 + ENTRY_COST;
                if !entries.is_empty() && bytes > max_bytes {
                    return Ok(entries);
                }
                next = entry.index + 1;
                // Copy the data, because a slice would keep the whole record in memory.
                let data = Bytes::copy_from_slice(&entry.data);
                entries.push(Entry { data, ..entry.clone() });
            }
        }
        Ok(entries)
    }

    /// Returns the term of entry `index`. The index of [`Self::base`] has a term, too.
    pub fn term(&self, index: u64) -> Option<u64> {
        self.shared().history.term(index)
    }

    /// Returns the base: the position just before the first entry.
    pub fn base(&self) -> Position {
        self.shared().history.base
    }

    /// Returns the position of the last durable entry. Returns [`Self::base`] if there is none.
    pub fn last(&self) -> Position {
        self.shared().history.last()
    }

    /// Returns where an entry is stored, or `None` if it is not in the log yet.
    fn locate(&self, index: u64) -> Result<Option<(EntryRun, Segment, bool)>, LogError> {
        let shared = self.shared();
        if index <= shared.history.base.index {
            return Err(LogError::Compacted { low: index });
        }
        let piece = shared.history.run_containing(index);
        Ok(piece.map(|piece| {
            let segment = &shared.segments[&piece.location.segment];
            (piece, segment.clone(), shared.verify)
        }))
    }
}

fn read_record(segment: &Segment, offset: u64, verify: bool) -> Result<Vec<Item>, LogError> {
    let found = if verify {
        segment.read(offset, segment.bytes)?
    } else {
        let found = segment.read_unchecked(offset, segment.bytes)?;
        found.map(|(header, bytes)| record(header, bytes))
    };
    match found {
        Some(record) => segment.decode_items(offset, &record),
        None => Err(LogError::damaged(&segment.path, offset, Damage::Checksum)),
    }
}

/// Returns the entries of the run `piece` whose index is at least `from`. `items` are the items of
/// the record that holds the run.
fn entries_of<'a>(items: &'a [Item], piece: &EntryRun, from: u64) -> Option<&'a [Entry]> {
    let Some(Item::Entries(entries)) = items.get(piece.item) else { return None };
    let first = entries.first()?.index;
    let skip = usize::try_from(from.checked_sub(first)?).ok()?;
    let end = usize::try_from(piece.last.checked_sub(first)? + 1).ok()?;
    entries.get(skip..end).filter(|entries| !entries.is_empty())
}
