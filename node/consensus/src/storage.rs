//! The library's view of the log: the terms of all entries, and the entries of the recent past.
//!
//! Entries that are not applied yet are always in memory. Applied ones are too, up to a limit in
//! bytes. A slow peer that needs older entries causes a [`FetchRequest`]. The library repeats its
//! request once those entries are fetched.

use std::cell::RefCell;
use std::collections::VecDeque;

use bytes::Bytes;
use raft::eraftpb::{Entry as RaftEntry, Snapshot};
use raft::{GetEntriesContext, RaftState, Storage, StorageError};

use crate::convert::{entry_to_raft, hard_state_to_raft, members_to_raft, snapshot_to_raft};
use crate::{Entry, FetchRequest, InitialState, Members, Position, Terms};

/// Maximum number of fetches at a time; further slow peers wait for their turn.
const MAX_FETCHES: usize = 8;

/// Number of append messages that the entries of one fetch should fill.
const MESSAGES_PER_FETCH: u64 = 4;

pub(crate) struct LogView {
    initial: RaftState,
    base: Position,
    terms: Terms,
    cache: VecDeque<RaftEntry>,
    cache_bytes: usize,
    cache_limit: usize,
    /// Requests that the library has made. It calls methods with `&self`, so they are in a
    /// `RefCell`.
    requests: RefCell<LibraryRequests>,
}

#[derive(Default)]
struct LibraryRequests {
    fetches: Vec<(FetchRequest, GetEntriesContext)>,
    /// Position in `fetches` of the first fetch that the caller has not taken yet.
    next_untaken: usize,
    next_fetch: u64,
    fetched: Vec<RaftEntry>,
    snapshot: Option<(Position, Members)>,
    snapshot_wanted: Option<u64>,
}

/// Estimated bytes that the allocator adds to those requested for one entry.
const ALLOCATION_BYTES: usize = 64;

/// Maximum size of data that is copied when an entry is cached. The data is a slice of a message or
/// record, and would otherwise keep the whole message or record in memory.
const MAX_COPIED_BYTES: usize = 16 * 1024;

/// Returns the memory that a cached entry occupies, in bytes.
fn cost(entry: &RaftEntry) -> usize {
    entry.data.len() + entry.context.len() + size_of::<RaftEntry>() + ALLOCATION_BYTES
}

/// Returns a copy of `entry` for the cache. Small data is copied, because a slice would keep its
/// whole message or record in memory.
fn copy_for_cache(entry: &RaftEntry) -> RaftEntry {
    let mut kept = entry.clone();
    for part in [&mut kept.data, &mut kept.context] {
        if part.len() <= MAX_COPIED_BYTES {
            *part = Bytes::copy_from_slice(part);
        }
    }
    kept
}

impl LogView {
    pub(crate) fn new(initial: &InitialState, cache_limit: usize) -> Self {
        // A new commit index is not written at once, so the store's applied index may be higher.
        // The library panics if the commit index lies outside the log.
        let mut hard_state = initial.hard_state;
        hard_state.commit = hard_state.commit.max(initial.applied.index);
        hard_state.commit =
            hard_state.commit.min(initial.terms.last().unwrap_or(initial.base).index);
        let cache: VecDeque<_> =
            initial.entries.iter().map(|entry| copy_for_cache(&entry_to_raft(entry))).collect();
        Self {
            initial: RaftState::new(
                hard_state_to_raft(&hard_state),
                members_to_raft(&initial.members),
            ),
            base: initial.base,
            terms: initial.terms.clone(),
            cache_bytes: cache.iter().map(cost).sum(),
            cache,
            cache_limit,
            requests: RefCell::default(),
        }
    }

    pub(crate) fn base(&self) -> Position {
        self.base
    }

    pub(crate) fn last(&self) -> Position {
        self.terms.last().unwrap_or(self.base)
    }

    pub(crate) fn term_at(&self, index: u64) -> Option<u64> {
        if index == self.base.index { Some(self.base.term) } else { self.terms.get(index) }
    }

    pub(crate) fn append(&mut self, entries: &[RaftEntry]) {
        let Some(first) = entries.first() else { return };
        assert!(first.index > self.base.index, "a compacted entry can't change");
        while self.cache.back().is_some_and(|entry| entry.index >= first.index) {
            self.cache_bytes -= self.cache.pop_back().as_ref().map_or(0, cost);
        }
        // Clear the cache if the new entries don't directly follow it, because lookups rely on
        // indexes without gaps.
        if self.cache.back().is_some_and(|entry| entry.index + 1 != first.index) {
            self.cache.clear();
            self.cache_bytes = 0;
        }
        for entry in entries {
            self.terms.push(entry.index, entry.term);
            self.cache_bytes += cost(entry);
            self.cache.push_back(copy_for_cache(entry));
        }
    }

    /// Drops applied entries (up to `applied`) from the cache, oldest first, until the rest fits
    /// the limit.
    pub(crate) fn evict(&mut self, applied: u64) {
        while self.cache_bytes > self.cache_limit
            && self.cache.front().is_some_and(|entry| entry.index <= applied)
        {
            self.cache_bytes -= self.cache.pop_front().as_ref().map_or(0, cost);
        }
    }

    /// Drops entries up to `through`, because the log no longer has them.
    pub(crate) fn compact(&mut self, through: Position) {
        if through.index <= self.base.index {
            return;
        }
        self.terms.compact(through.index);
        while self.cache.front().is_some_and(|entry| entry.index <= through.index) {
            self.cache_bytes -= self.cache.pop_front().as_ref().map_or(0, cost);
        }
        self.base = through;
    }

    /// Discards all entries and fetches, because a snapshot at `at` replaces the log.
    pub(crate) fn restore(&mut self, at: Position) {
        self.base = at;
        self.terms = Terms::default();
        self.cache.clear();
        self.cache_bytes = 0;
        let requests = self.requests.get_mut();
        requests.fetches.clear();
        requests.next_untaken = 0;
        requests.fetched.clear();
    }

    /// Returns the fetches made since the last call.
    pub(crate) fn take_fetches(&mut self) -> Vec<FetchRequest> {
        let requests = self.requests.get_mut();
        let new =
            requests.fetches[requests.next_untaken..].iter().map(|(fetch, _)| *fetch).collect();
        requests.next_untaken = requests.fetches.len();
        new
    }

    pub(crate) fn has_pending_requests(&self) -> bool {
        let requests = self.requests.borrow();
        requests.next_untaken < requests.fetches.len() || requests.snapshot_wanted.is_some()
    }

    /// Stores the entries that fetch `id` has read. Returns the context with which the library
    /// repeats its request for them.
    pub(crate) fn store_fetched(
        &mut self,
        id: u64,
        entries: &[Entry],
    ) -> Option<GetEntriesContext> {
        let requests = self.requests.get_mut();
        let at = requests.fetches.iter().position(|(fetch, _)| fetch.id == id)?;
        let (_, context) = requests.fetches.remove(at);
        requests.next_untaken -= 1;
        requests.fetched = entries.iter().map(entry_to_raft).collect();
        Some(context)
    }

    pub(crate) fn clear_fetched(&mut self) {
        self.requests.get_mut().fetched.clear();
    }

    pub(crate) fn take_snapshot_wanted(&mut self) -> Option<u64> {
        self.requests.get_mut().snapshot_wanted.take()
    }

    pub(crate) fn set_snapshot(&mut self, snapshot: Option<(Position, Members)>) {
        self.requests.get_mut().snapshot = snapshot;
    }

    fn cached_entries(&self, low: u64, high: u64, max_bytes: u64) -> Option<Vec<RaftEntry>> {
        let first = self.cache.front()?.index;
        let skip = usize::try_from(low.checked_sub(first)?).ok()?;
        Some(take_within_limit(self.cache.iter().skip(skip), high, max_bytes))
    }

    /// Returns fetched entries from index `low` on. Returns `None` if `low` is not among them, or
    /// if the log has replaced any of them.
    fn fetched_entries(&self, low: u64, high: u64, max_bytes: u64) -> Option<Vec<RaftEntry>> {
        let requests = self.requests.borrow();
        let first = requests.fetched.first()?;
        let current = |entry: &RaftEntry| self.terms.get(entry.index) == Some(entry.term);
        let skip = usize::try_from(low.checked_sub(first.index)?).ok()?;
        if skip >= requests.fetched.len() || !requests.fetched.iter().all(current) {
            return None;
        }
        Some(take_within_limit(requests.fetched.iter().skip(skip), high, max_bytes))
    }
}

fn take_within_limit<'a>(
    entries: impl Iterator<Item = &'a RaftEntry>,
    high: u64,
    max_bytes: u64,
) -> Vec<RaftEntry> {
    let mut bytes = 0;
    let mut taken = Vec::new();
    for entry in entries.take_while(|entry| entry.index < high) {
        bytes += cost(entry) as u64;
        if !taken.is_empty() && bytes > max_bytes {
            break;
        }
        taken.push(entry.clone());
    }
    taken
}

impl Storage for LogView {
    fn initial_state(&self) -> raft::Result<RaftState> {
        Ok(self.initial.clone())
    }

    fn entries(
        &self,
        low: u64,
        high: u64,
        max_size: impl Into<Option<u64>>,
        context: GetEntriesContext,
    ) -> raft::Result<Vec<RaftEntry>> {
        let max_bytes = max_size.into().unwrap_or(u64::MAX);
        if low <= self.base.index {
            return Err(StorageError::Compacted.into());
        }
        if let Some(entries) = self.cached_entries(low, high, max_bytes) {
            return Ok(entries);
        }
        if !context.can_async() {
            return Err(StorageError::Unavailable.into());
        }
        if let Some(entries) = self.fetched_entries(low, high, max_bytes) {
            return Ok(entries);
        }
        let mut requests = self.requests.borrow_mut();
        let waiting = requests.fetches.iter().any(|(fetch, _)| fetch.low == low);
        if !waiting && requests.fetches.len() < MAX_FETCHES {
            requests.next_fetch += 1;
            let max_bytes = max_bytes.saturating_mul(MESSAGES_PER_FETCH);
            let fetch = FetchRequest { id: requests.next_fetch, low, high, max_bytes };
            requests.fetches.push((fetch, context));
        }
        Err(StorageError::LogTemporarilyUnavailable.into())
    }

    fn term(&self, index: u64) -> raft::Result<u64> {
        if index < self.base.index {
            return Err(StorageError::Compacted.into());
        }
        self.term_at(index).ok_or_else(|| StorageError::Unavailable.into())
    }

    fn first_index(&self) -> raft::Result<u64> {
        Ok(self.base.index + 1)
    }

    fn last_index(&self) -> raft::Result<u64> {
        Ok(self.last().index)
    }

    fn snapshot(&self, request_index: u64, to: u64) -> raft::Result<Snapshot> {
        let mut requests = self.requests.borrow_mut();
        match &requests.snapshot {
            Some((at, members)) if at.index >= request_index && at.index >= self.base.index => {
                Ok(snapshot_to_raft(*at, members))
            }
            _ => {
                requests.snapshot_wanted = Some(to);
                Err(StorageError::SnapshotTemporarilyUnavailable.into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EntryKind;
    use crate::convert::entry_from_raft;

    /// Returns an entry as it comes from a peer: its few bytes are a slice of a larger buffer.
    fn entry_in_large_buffer(index: u64) -> (Entry, Bytes) {
        let buffer = Bytes::from(vec![7; 8192]);
        (Entry { index, term: 1, kind: EntryKind::Normal, data: buffer.slice(100..116) }, buffer)
    }

    fn entry(index: u64, term: u64) -> RaftEntry {
        let data = Bytes::from_static(b"x");
        entry_to_raft(&Entry { index, term, kind: EntryKind::Normal, data })
    }

    #[test]
    fn fetched_entries_that_the_log_has_replaced_since_are_not_sent() {
        let mut view = LogView::new(&InitialState::default(), 0);
        view.append(&[entry(1, 1), entry(2, 1), entry(3, 1)]);
        view.evict(3);
        let ask = |view: &LogView| view.entries(1, 4, None, GetEntriesContext::empty(true));
        assert!(ask(&view).is_err());
        let fetch = view.take_fetches()[0];
        let old: Vec<Entry> = (1..=3).map(|index| entry_from_raft(entry(index, 1))).collect();
        view.append(&[entry(2, 2), entry(3, 2)]);
        view.evict(3);
        assert!(view.store_fetched(fetch.id, &old).is_some());
        assert!(ask(&view).is_err());
        let fetch = view.take_fetches()[0];
        let new = [(1, 1), (2, 2), (3, 2)].map(|(index, term)| entry_from_raft(entry(index, term)));
        assert!(view.store_fetched(fetch.id, &new).is_some());
        assert_eq!(ask(&view).unwrap().len(), 3);
    }

    #[test]
    fn a_cached_entry_keeps_only_its_own_bytes_in_memory() {
        let (first, buffer) = entry_in_large_buffer(1);
        let mut initial = InitialState { entries: vec![first], ..InitialState::default() };
        initial.terms.push(1, 1);
        let mut view = LogView::new(&initial, 1 << 20);
        drop(initial);
        let (second, other) = entry_in_large_buffer(2);
        view.append(&[entry_to_raft(&second)]);
        drop(second);
        assert!(buffer.is_unique() && other.is_unique());
        assert_eq!(view.cached_entries(1, 3, u64::MAX).unwrap()[1].data[..], [7; 16]);
    }

    #[test]
    fn the_cache_is_limited_by_the_memory_of_its_entries() {
        let mut view = LogView::new(&InitialState::default(), 100_000);
        for index in 1..=10_000 {
            view.append(&[entry_to_raft(&entry_in_large_buffer(index).0)]);
            view.evict(index);
        }
        // Each entry needs memory for itself, for its 16 bytes of data, and 64 bytes for the
        // allocator.
        assert!(view.cache.len() * (size_of::<RaftEntry>() + 16 + 64) <= 100_000);
        assert!(view.cache.len() > 100);
    }
}
