//! Counts of what the store was asked for, as etcd counts (server/storage/mvcc/metrics_txn.go).

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use crate::durations::Durations;

/// The kinds of entries whose application is timed, as etcd names them.
pub const APPLIED: [&str; 11] = [
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

/// Since the process began; what the log brings again at a start counts as well.
#[derive(Debug)]
pub struct Operations {
    /// Keys written.
    pub puts: AtomicU64,
    /// Deletions of a key or a range.
    pub deletes: AtomicU64,
    /// Ranges read, previous values included.
    pub ranges: AtomicU64,
    /// Requests of more than one of these.
    pub txns: AtomicU64,
    /// Revisions of keys that compactions took away.
    pub compacted: AtomicU64,
    /// By kind, as in [`APPLIED`]: entries that were refused, and that were carried out.
    pub applied: [[Durations; 2]; APPLIED.len()],
    /// Watches that get events as they happen.
    pub attached_watches: AtomicI64,
    /// Events in queues of watch streams.
    pub pending_events: Arc<AtomicI64>,
}

impl Default for Operations {
    fn default() -> Self {
        let durations = || [Durations::of_applies(), Durations::of_applies()];
        Self {
            puts: AtomicU64::new(0),
            deletes: AtomicU64::new(0),
            ranges: AtomicU64::new(0),
            txns: AtomicU64::new(0),
            compacted: AtomicU64::new(0),
            applied: std::array::from_fn(|_| durations()),
            attached_watches: AtomicI64::new(0),
            pending_events: Arc::default(),
        }
    }
}

/// Events in a queue, counted as pending until this is dropped.
#[derive(Debug)]
pub(super) struct PendingEvents {
    all: Arc<AtomicI64>,
    events: i64,
}

impl PendingEvents {
    pub(super) fn new(all: &Arc<AtomicI64>, events: usize) -> Self {
        let events = i64::try_from(events).unwrap_or(i64::MAX);
        all.fetch_add(events, Ordering::Relaxed);
        Self { all: Arc::clone(all), events }
    }
}

impl Drop for PendingEvents {
    fn drop(&mut self) {
        self.all.fetch_sub(self.events, Ordering::Relaxed);
    }
}

/// Those of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    pub puts: u64,
    pub deletes: u64,
    pub ranges: u64,
}

impl Operations {
    /// Counts an entry of `kind`, an index into [`APPLIED`].
    pub fn time(&self, kind: usize, is_done: bool, took: Duration) {
        self.applied[kind][usize::from(is_done)].record(took);
    }

    /// Adds those of one request.
    pub fn add(&self, one: Counted) {
        let Counted { puts, deletes, ranges } = one;
        self.puts.fetch_add(puts, Ordering::Relaxed);
        self.deletes.fetch_add(deletes, Ordering::Relaxed);
        self.ranges.fetch_add(ranges, Ordering::Relaxed);
        self.txns.fetch_add(u64::from(puts + deletes + ranges > 1), Ordering::Relaxed);
    }
}
