//! Reading a range at a revision, as etcd answers it.

use std::cmp::Ordering;
use std::sync::RwLock;

use node_proto::etcdserverpb::range_request::{SortOrder, SortTarget};
use node_proto::etcdserverpb::{RangeRequest, RangeResponse, ResponseHeader};
use node_proto::mvccpb::KeyValue;
use redb::ReadableTable;

use super::error::{ReadError, StoreError};
use super::event::decode;
use super::index::{Index, Walk};
use super::revision::{KeyRange, Revision};

/// Keys looked at per hold of the index lock, and records read per step.
const KEYS_PER_STEP: usize = 256;
/// The same when keys are only counted.
const COUNTED_PER_STEP: usize = 8 * 1024;

/// Somewhere to read from: a published view, or the batch that is being applied.
pub(crate) struct Source<'a, T> {
    pub(crate) index: &'a RwLock<Index>,
    pub(crate) records: &'a T,
    /// The newest revision here.
    pub(crate) revision: i64,
    pub(crate) compacted: i64,
}

impl<T: ReadableTable<u128, &'static [u8]>> Source<'_, T> {
    /// One record that the index speaks of.
    pub(crate) fn record(&self, at: Revision) -> Result<KeyValue, StoreError> {
        match self.records.get(at.to_row())? {
            Some(record) => decode(record.value()),
            None => Err(missing(at)),
        }
    }

    /// The newest value of `key`.
    pub(crate) fn newest(&self, key: &[u8]) -> Result<Option<KeyValue>, StoreError> {
        let at = read(self.index).newest(key).map(|newest| newest.modified);
        at.map(|at| self.record(at)).transpose()
    }

    /// Shows every key of `range` with its newest value, in key order, until `look` says no. Holds
    /// one value at a time.
    pub(crate) fn each(
        &self,
        range: &KeyRange,
        look: &mut dyn FnMut(&KeyValue) -> bool,
    ) -> Result<(), ReadError> {
        let mut after: Option<Box<[u8]>> = None;
        let mut found = Vec::new();
        loop {
            found.clear();
            let walk = {
                let index = read(self.index);
                if index.compacted() > self.revision {
                    return Err(ReadError::Superseded);
                }
                let (at, step) = (self.revision, KEYS_PER_STEP);
                index.walk(range, after.as_deref(), at, step, |_, at| found.push(at))
            };
            for at in &found {
                if !look(&self.record(*at)?) {
                    return Ok(());
                }
            }
            match walk {
                Walk::Paused(last) => after = Some(last),
                Walk::Done => return Ok(()),
            }
        }
    }

    /// Answers `request` in one go.
    pub(crate) fn range(&self, request: &RangeRequest) -> Result<RangeResponse, ReadError> {
        let mut gather = Gather::new(request, self.revision, self.compacted)?;
        loop {
            if let Step::Done(response) = gather.step(self)? {
                return Ok(response);
            }
        }
    }
}

pub(crate) fn missing(at: Revision) -> StoreError {
    StoreError::Corrupt(format!("the record of revision {}.{} is missing", at.main, at.sub))
}

/// A read lock on the index. A poisoned lock means that a writer panicked halfway: nothing that
/// the index says can be trusted.
pub(crate) fn read(index: &RwLock<Index>) -> std::sync::RwLockReadGuard<'_, Index> {
    index.read().expect("a writer that panicked has stopped the process")
}

/// Whether a [`Gather`] has come to its end.
pub enum Step {
    /// Call again; another task may run meanwhile.
    Again,
    /// The answer. Its header has the revision only.
    Done(RangeResponse),
}

/// A range read in bounded steps, so that a wide one holds up neither writes nor other reads.
pub struct Gather {
    request: RangeRequest,
    range: KeyRange,
    /// The revision to read at.
    at: i64,
    /// The store's revision, for the header.
    revision: i64,
    /// Stop reading records (not counting keys) after so many; 0: never.
    wanted: usize,
    after: Option<Box<[u8]>>,
    found: Vec<Revision>,
    kvs: Vec<KeyValue>,
    count: i64,
}

impl Gather {
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
        // One more than asked for, to know whether there are more.
        let wanted = match usize::try_from(request.limit) {
            Ok(limit) if limit > 0 && !everything => limit.saturating_add(1),
            _ => 0,
        };
        Ok(Self {
            range: KeyRange::new(request.key.clone(), request.range_end.clone()),
            request: request.clone(),
            at,
            revision,
            wanted,
            after: None,
            found: Vec::new(),
            kvs: Vec::new(),
            count: 0,
        })
    }

    fn is_full(&self) -> bool {
        self.request.count_only || (self.wanted > 0 && self.kvs.len() >= self.wanted)
    }

    pub(crate) fn step<T>(&mut self, source: &Source<'_, T>) -> Result<Step, ReadError>
    where
        T: ReadableTable<u128, &'static [u8]>,
    {
        let full = self.is_full();
        let at_most = if full { COUNTED_PER_STEP } else { KEYS_PER_STEP };
        self.found.clear();
        let walk = {
            let index = read(source.index);
            if index.compacted() > self.at {
                let asked_for = self.request.revision > 0;
                return Err(if asked_for { ReadError::Compacted } else { ReadError::Superseded });
            }
            index.walk(&self.range, self.after.as_deref(), self.at, at_most, |_, revision| {
                self.count += 1;
                if !full {
                    self.found.push(revision);
                }
            })
        };
        for at in &self.found {
            if self.wanted > 0 && self.kvs.len() >= self.wanted {
                break;
            }
            self.kvs.push(source.record(*at)?);
        }
        match walk {
            Walk::Paused(last) => {
                self.after = Some(last);
                Ok(Step::Again)
            }
            Walk::Done => Ok(Step::Done(self.finish())),
        }
    }

    /// Filters, sorts, cuts: in this order.
    fn finish(&mut self) -> RangeResponse {
        let request = &self.request;
        let mut kvs = std::mem::take(&mut self.kvs);
        let within = |value: i64, min: i64, max: i64| {
            (max == 0 || value <= max) && (min == 0 || value >= min)
        };
        kvs.retain(|kv| {
            within(kv.mod_revision, request.min_mod_revision, request.max_mod_revision)
                && within(
                    kv.create_revision,
                    request.min_create_revision,
                    request.max_create_revision,
                )
        });
        sort(&mut kvs, request);
        let mut more = false;
        if let Ok(limit) = usize::try_from(request.limit)
            && limit > 0
            && kvs.len() > limit
        {
            kvs.truncate(limit);
            more = true;
        }
        if request.keys_only {
            for kv in &mut kvs {
                kv.value.clear();
            }
        }
        RangeResponse {
            header: Some(ResponseHeader { revision: self.revision, ..Default::default() }),
            kvs,
            more,
            count: self.count,
        }
    }
}

/// Records come in key order, which is already what most requests want.
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
