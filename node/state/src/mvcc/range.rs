//! Reading of a range at a revision, answered as etcd does.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::sync::RwLock;

use bytes::Bytes;
use node_proto::etcdserverpb::range_request::{SortOrder, SortTarget};
use node_proto::etcdserverpb::{RangeRequest, RangeResponse, ResponseHeader};
use node_proto::mvccpb::KeyValue;

use super::error::{ReadError, StoreError};
use super::event::decode;
use super::index::{Index, WalkOutcome};
use super::record_rows::RowLookup;
use super::revision::{KeyRange, Revision};

/// Maximum number of keys examined under one hold of the index lock.
const KEYS_PER_STEP: usize = 256;
/// Maximum number of keys examined under one hold of the index lock when keys are only counted.
const MAX_COUNTED_KEYS_PER_STEP: usize = 8 * 1024;
/// Bytes of records after which a step of a read ends, before it has examined all its keys.
const BYTES_PER_STEP: usize = 1 << 20;
/// Minimum number of gathered pairs at which a sorted read drops those that can't be in its answer.
const MIN_PAIRS_TO_PRUNE: usize = 64;

/// Memory budget for the answers of one request.
pub struct AnswerBudget<'f> {
    fits: &'f mut dyn FnMut(usize) -> bool,
    used_bytes: usize,
    is_overdrawn: bool,
}

impl<'f> AnswerBudget<'f> {
    /// Makes a budget of which `held` bytes are used. `fits` says whether a total number of bytes
    /// is allowed.
    pub fn new(held: usize, fits: &'f mut dyn FnMut(usize) -> bool) -> Self {
        Self { fits, used_bytes: held, is_overdrawn: false }
    }

    /// Returns the used bytes.
    #[must_use]
    pub fn used_bytes(&self) -> usize {
        self.used_bytes
    }

    /// Whether an answer has exceeded the budget. From then on, no further answer fits.
    #[must_use]
    pub fn is_overdrawn(&self) -> bool {
        self.is_overdrawn
    }

    /// Whether `bytes` more would fit. If not, the budget counts as overdrawn from now on.
    pub(crate) fn fits(&mut self, bytes: usize) -> bool {
        self.is_overdrawn = self.is_overdrawn || !(self.fits)(self.used_bytes + bytes);
        !self.is_overdrawn
    }

    /// Adds the bytes of a gathered answer, which the caller has checked to fit.
    pub(crate) fn charge_range(&mut self, gather: &RangeRead) {
        self.used_bytes += gather.bytes();
    }

    /// Adds the bytes of `kv` and returns it, if it fits.
    pub(crate) fn charge(&mut self, kv: KeyValue) -> Option<KeyValue> {
        let bytes = weight(&kv);
        self.fits(bytes).then(|| {
            self.used_bytes += bytes;
            kv
        })
    }
}

/// Returns the approximate number of bytes that a key-value pair takes in memory.
fn weight(kv: &KeyValue) -> usize {
    size_of::<KeyValue>() + kv.key.len() + kv.value.len()
}

/// Source of a read: a published view, or the batch that is being applied.
pub(crate) struct ReadSource<'a, T> {
    pub(crate) index: &'a RwLock<Index>,
    pub(crate) records: &'a T,
    /// Newest revision in the source.
    pub(crate) revision: i64,
    pub(crate) compact_revision: i64,
}

impl<T: RowLookup> ReadSource<'_, T> {
    /// Reads the record of a revision that the index has returned.
    pub(crate) fn record(&self, at: Revision) -> Result<KeyValue, StoreError> {
        self.records.get(at.to_row(), decode)?.ok_or_else(|| missing_record(at))?
    }

    /// Returns the newest value of `key`, or `None` if the key doesn't exist.
    pub(crate) fn newest(&self, key: &[u8]) -> Result<Option<KeyValue>, StoreError> {
        let at = lock_index(self.index).newest(key).map(|newest| newest.modified);
        at.map(|at| self.record(at)).transpose()
    }

    /// Calls `look` for each key of `range` with its newest value, in key order, until `look`
    /// returns false. Only one value is in memory at a time.
    pub(crate) fn for_each_key(
        &self,
        range: KeyRange,
        look: &mut dyn FnMut(&KeyValue) -> bool,
    ) -> Result<(), ReadError> {
        let mut scan = Scan::new(range);
        while !self.scan(&mut scan, look)? {}
        Ok(())
    }

    /// Runs one bounded step of `scan`: calls `look` for further keys. Returns true once no keys
    /// are left, or `look` has returned false.
    pub(crate) fn scan(
        &self,
        scan: &mut Scan,
        look: &mut dyn FnMut(&KeyValue) -> bool,
    ) -> Result<bool, ReadError> {
        let Scan { range, after, is_walked, found } = scan;
        if found.is_empty() {
            let index = lock_index(self.index);
            // The compaction revision is checked under the same lock as the walk, so that no
            // compaction can drop changes between check and walk.
            if index.compact_revision() > self.revision {
                return Err(ReadError::Superseded);
            }
            let (at, step) = (self.revision, KEYS_PER_STEP);
            match index.walk(range, after.as_deref(), at, step, |_, at| found.push_back(at)) {
                WalkOutcome::Paused(last) => *after = Some(last),
                WalkOutcome::Done => *is_walked = true,
            }
        }
        let mut bytes = 0;
        while bytes < BYTES_PER_STEP
            && let Some(at) = found.pop_front()
        {
            let kv = self.record(at)?;
            bytes += weight(&kv);
            if !look(&kv) {
                return Ok(true);
            }
        }
        Ok(*is_walked && found.is_empty())
    }

    /// Answers `request` without a pause. Returns `None` if the answer doesn't fit into `room`.
    pub(crate) fn range(
        &self,
        request: &RangeRequest,
        room: &mut AnswerBudget<'_>,
    ) -> Result<Option<RangeResponse>, ReadError> {
        let mut gather = RangeRead::new(request, self.revision, self.compact_revision)?;
        loop {
            let step = gather.step(self)?;
            if !room.fits(gather.bytes()) {
                return Ok(None);
            }
            if let RangeStep::Done(response) = step {
                room.charge_range(&gather);
                return Ok(Some(response));
            }
        }
    }
}

pub(crate) fn missing_record(at: Revision) -> StoreError {
    StoreError::Corrupt(format!("the record of revision {}.{} is missing", at.main, at.sub))
}

/// Locks the index for reading. A poisoned lock means that a writer panicked midway, so the index
/// can't be trusted.
pub(crate) fn lock_index(index: &RwLock<Index>) -> std::sync::RwLockReadGuard<'_, Index> {
    index.read().expect("a writer that panicked has stopped the process")
}

/// State of an iteration over all keys of a range with their values, in bounded steps.
pub struct Scan {
    range: KeyRange,
    after: Option<Box<[u8]>>,
    /// Whether the index has been walked to the end of the range.
    is_walked: bool,
    /// Revisions of the records to show next.
    found: VecDeque<Revision>,
}

impl Scan {
    /// Creates a scan that begins at the start of `range`.
    #[must_use]
    pub(crate) fn new(range: KeyRange) -> Self {
        Self { range, after: None, is_walked: false, found: VecDeque::new() }
    }
}

/// Whether a [`RangeRead`] has finished.
pub enum RangeStep {
    /// The range isn't finished. The caller calls again, possibly after other tasks have run.
    Unfinished,
    /// The finished answer. Its header has only the revision.
    Done(RangeResponse),
}

/// State of a range request that is read in bounded steps. So a wide range doesn't delay writes or
/// other reads for long.
pub struct RangeRead {
    request: RangeRequest,
    range: KeyRange,
    /// Revision to read at.
    at: i64,
    /// The store's revision, for the answer's header.
    revision: i64,
    /// Number of records after which reading stops, while keys are still counted; 0 means no limit.
    record_limit: usize,
    after: Option<Box<[u8]>>,
    /// Whether the index has been walked to the end of the range.
    is_walked: bool,
    /// Revisions of the records to read next.
    found: VecDeque<Revision>,
    kvs: Vec<KeyValue>,
    /// Approximate size of `kvs` in bytes.
    bytes: usize,
    /// Number of pairs already handed out by [`Self::take`].
    returned: usize,
    count: i64,
}

impl RangeRead {
    /// Begins to read `request` from a store at `revision`.
    pub(crate) fn new(
        request: &RangeRequest,
        revision: i64,
        compacted: i64,
    ) -> Result<Self, ReadError> {
        let at = if request.revision <= 0 { revision } else { request.revision };
        if at > revision {
            return Err(ReadError::Future);
        }
        if at < compacted {
            return Err(ReadError::Compacted);
        }
        let everything = request.sort_order() != SortOrder::None
            || request.min_mod_revision != 0
            || request.max_mod_revision != 0
            || request.min_create_revision != 0
            || request.max_create_revision != 0;
        // One key more than the limit is read, to know whether there are more keys.
        let wanted = match usize::try_from(request.limit) {
            Ok(limit) if limit > 0 && !everything => limit.saturating_add(1),
            _ => 0,
        };
        Ok(Self {
            range: KeyRange::new(request.key.clone(), request.range_end.clone()),
            request: request.clone(),
            at,
            revision,
            record_limit: wanted,
            after: None,
            is_walked: false,
            found: VecDeque::new(),
            kvs: Vec::new(),
            bytes: 0,
            returned: 0,
            count: 0,
        })
    }

    /// Checks that this read can continue on a newer view, whose compaction revision is
    /// `compacted`.
    pub fn check_not_compacted(&self, compacted: i64) -> Result<(), ReadError> {
        if compacted > self.at { Err(self.compaction_error()) } else { Ok(()) }
    }

    fn compaction_error(&self) -> ReadError {
        if self.request.revision > 0 { ReadError::Compacted } else { ReadError::Superseded }
    }

    /// Takes the pairs that were gathered since the last call. Returns no pairs once the request's
    /// limit is reached: the answer of [`RangeStep::Done`] then has the remaining pairs. Must not
    /// be called for a request that sorts or filters.
    pub fn take(&mut self) -> Vec<KeyValue> {
        if self.is_full() {
            return Vec::new();
        }
        self.returned += self.kvs.len();
        self.bytes = 0;
        std::mem::take(&mut self.kvs)
    }

    /// Returns the approximate number of bytes of the gathered pairs.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn is_full(&self) -> bool {
        self.request.count_only || self.has_reached_limit()
    }

    fn has_reached_limit(&self) -> bool {
        self.record_limit > 0 && self.returned + self.kvs.len() >= self.record_limit
    }

    pub(crate) fn step(
        &mut self,
        source: &ReadSource<'_, impl RowLookup>,
    ) -> Result<RangeStep, ReadError> {
        if self.found.is_empty() {
            self.walk(source)?;
        }
        let mut looked = 0;
        while looked < BYTES_PER_STEP
            && let Some(at) = self.found.pop_front()
        {
            if self.has_reached_limit() {
                self.found.clear();
                break;
            }
            let record = source.record(at)?;
            looked += weight(&record);
            self.keep_pair(record);
        }
        Ok(match self.is_walked && self.found.is_empty() {
            true => RangeStep::Done(self.finish()),
            false => RangeStep::Unfinished,
        })
    }

    /// Finds the next keys in the index, up to the step's limit.
    fn walk<T>(&mut self, source: &ReadSource<'_, T>) -> Result<(), ReadError> {
        let full = self.is_full();
        let at_most = if full { MAX_COUNTED_KEYS_PER_STEP } else { KEYS_PER_STEP };
        let index = lock_index(source.index);
        // The compaction revision is checked under the same lock as the walk, so that no compaction
        // can drop changes between check and walk.
        if index.compact_revision() > self.at {
            return Err(self.compaction_error());
        }
        let walk =
            index.walk(&self.range, self.after.as_deref(), self.at, at_most, |_, revision| {
                self.count += 1;
                if !full {
                    self.found.push_back(revision);
                }
            });
        match walk {
            WalkOutcome::Paused(last) => self.after = Some(last),
            WalkOutcome::Done => self.is_walked = true,
        }
        Ok(())
    }

    fn keep_pair(&mut self, mut kv: KeyValue) {
        if !passes(&kv, &self.request) {
            return;
        }
        if self.request.keys_only && self.request.sort_target() != SortTarget::Value {
            // The key is a slice of the whole record. A copy lets the record's memory be freed.
            kv.key = Bytes::copy_from_slice(&kv.key);
            kv.value.clear();
            // The answer has no lease id, because etcd 3.7 answers keys-only requests from its
            // index, which contains no leases (kvstore_txn.go).
            kv.lease = 0;
        }
        self.bytes += weight(&kv);
        self.kvs.push(kv);
        self.prune_pairs();
    }

    /// Drops pairs that can't be in a sorted answer, because pairs that sort before them already
    /// fill its limit. So a request for the newest of a thousand keys doesn't hold a thousand
    /// pairs.
    fn prune_pairs(&mut self) {
        let limit = usize::try_from(self.request.limit).unwrap_or(0);
        // One pair more than the limit is kept, to know whether there are more pairs.
        let best = limit.saturating_add(1);
        let is_sorted = self.request.sort_order() != SortOrder::None;
        if limit == 0
            || !is_sorted
            || self.kvs.len() < best.saturating_mul(2).max(MIN_PAIRS_TO_PRUNE)
        {
            return;
        }
        if self.request.sort_target() == SortTarget::Key {
            // The pairs are in ascending order of their keys, so a descending answer keeps the last
            // ones.
            match self.request.sort_order() {
                SortOrder::Descend => drop(self.kvs.drain(..self.kvs.len() - best)),
                _ => self.kvs.truncate(best),
            }
        } else {
            sort(&mut self.kvs, &self.request);
            self.kvs.truncate(best);
        }
        self.bytes = self.kvs.iter().map(weight).sum();
    }

    /// Sorts the pairs, then applies the limit. Filters were applied earlier, when the pairs were
    /// read.
    fn finish(&mut self) -> RangeResponse {
        let request = &self.request;
        let mut kvs = std::mem::take(&mut self.kvs);
        sort(&mut kvs, request);
        let mut more = false;
        if let Ok(limit) = usize::try_from(request.limit)
            && limit > 0
            && self.returned + kvs.len() > limit
        {
            kvs.truncate(limit.saturating_sub(self.returned));
            more = true;
        }
        if request.keys_only && request.sort_target() == SortTarget::Value {
            for kv in &mut kvs {
                // Key and value are slices of the whole record. Replacing both slices lets the
                // record's memory be freed.
                kv.key = Bytes::copy_from_slice(&kv.key);
                kv.value = Bytes::new();
            }
        }
        // From now on, `bytes` is the size of the answer alone, without the pairs that were
        // dropped.
        kvs.shrink_to_fit();
        self.bytes = kvs.iter().map(weight).sum();
        RangeResponse {
            header: Some(ResponseHeader { revision: self.revision, ..Default::default() }),
            kvs,
            more,
            count: self.count,
        }
    }
}

/// Whether a pair's revisions lie within the request's minimum and maximum revisions.
fn passes(kv: &KeyValue, request: &RangeRequest) -> bool {
    let within =
        |value: i64, min: i64, max: i64| (max == 0 || value <= max) && (min == 0 || value >= min);
    within(kv.mod_revision, request.min_mod_revision, request.max_mod_revision)
        && within(kv.create_revision, request.min_create_revision, request.max_create_revision)
}

/// Sorts the pairs as requested. The pairs are in key order already, which is what most requests
/// want.
fn sort(kvs: &mut [KeyValue], request: &RangeRequest) {
    let target = request.sort_target();
    let by = |a: &KeyValue, b: &KeyValue| -> Ordering {
        match target {
            SortTarget::Key => a.key.cmp(&b.key),
            SortTarget::Version => a.version.cmp(&b.version),
            SortTarget::Create => a.create_revision.cmp(&b.create_revision),
            SortTarget::Mod => a.mod_revision.cmp(&b.mod_revision),
            SortTarget::Value => a.value.cmp(&b.value),
        }
    };
    match request.sort_order() {
        SortOrder::Descend if target == SortTarget::Key => kvs.reverse(),
        SortOrder::Descend => kvs.sort_by(|a, b| by(b, a)),
        _ if target == SortTarget::Key => {}
        _ => kvs.sort_by(by),
    }
}
