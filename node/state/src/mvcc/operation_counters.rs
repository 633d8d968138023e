//! Counters of the store's operations, counted as etcd does (server/storage/mvcc/metrics_txn.go).

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use crate::durations::Durations;

/// Kinds of entries whose application is timed, by etcd's names.
pub const APPLIED_KINDS: [&str; 11] = [
    "Put",
    "DeleteRange",
    "Txn",
    "Compaction",
    "Alarm",
    "LeaseGrant",
    "LeaseRevoke",
    "LeaseCheckpoint",
    "Auth",
    "ClusterMemberAttrSet",
    "ConfChange",
];

/// Counters since the process began. Entries that are applied again at a start count as well.
#[derive(Debug)]
pub struct OperationCounters {
    /// Number of keys written.
    pub puts: AtomicU64,
    /// Number of delete operations, each of a key or a range.
    pub deletes: AtomicU64,
    /// Number of ranges read, including reads of previous values.
    pub ranges: AtomicU64,
    /// Number of requests with more than one put, delete or range.
    pub txns: AtomicU64,
    /// Number of revisions of keys that compactions deleted.
    pub compacted_revisions: AtomicU64,
    /// For each kind, indexed as in [`APPLIED_KINDS`]: first the durations of refused entries, then
    /// those of successful entries.
    pub applied: [[Durations; 2]; APPLIED_KINDS.len()],
    /// Number of watches that get events as they happen, not from the store.
    pub attached_watches: AtomicI64,
    /// Number of events in the queues of watch streams.
    pub pending_events: Arc<AtomicI64>,
}

impl Default for OperationCounters {
    fn default() -> Self {
        let durations = || [Durations::of_applies(), Durations::of_applies()];
        Self {
            puts: AtomicU64::new(0),
            deletes: AtomicU64::new(0),
            ranges: AtomicU64::new(0),
            txns: AtomicU64::new(0),
            compacted_revisions: AtomicU64::new(0),
            applied: std::array::from_fn(|_| durations()),
            attached_watches: AtomicI64::new(0),
            pending_events: Arc::default(),
        }
    }
}

/// Guard that counts a queue's events as pending until it is dropped.
#[derive(Debug)]
pub(super) struct PendingEventsGuard {
    all: Arc<AtomicI64>,
    events: i64,
}

impl PendingEventsGuard {
    pub(super) fn new(all: &Arc<AtomicI64>, events: usize) -> Self {
        let events = i64::try_from(events).unwrap_or(i64::MAX);
        all.fetch_add(events, Ordering::Relaxed);
        Self { all: Arc::clone(all), events }
    }
}

impl Drop for PendingEventsGuard {
    fn drop(&mut self) {
        self.all.fetch_sub(self.events, Ordering::Relaxed);
    }
}

/// Numbers of operations of one request, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperationCounts {
    pub puts: u64,
    pub deletes: u64,
    pub ranges: u64,
}

impl OperationCounters {
    /// Records the duration of applying an entry of `kind`, an index into [`APPLIED_KINDS`].
    pub fn record_apply_time(&self, kind: usize, is_done: bool, took: Duration) {
        self.applied[kind][usize::from(is_done)].record(took);
    }

    /// Adds the operations of one request. More than one operation counts as a transaction.
    pub fn add(&self, one: OperationCounts) {
        let OperationCounts { puts, deletes, ranges } = one;
        self.puts.fetch_add(puts, Ordering::Relaxed);
        self.deletes.fetch_add(deletes, Ordering::Relaxed);
        self.ranges.fetch_add(ranges, Ordering::Relaxed);
        self.txns.fetch_add(u64::from(puts + deletes + ranges > 1), Ordering::Relaxed);
    }
}
