//! Counts of what the store was asked for, as etcd counts (server/storage/mvcc/metrics_txn.go).

use std::sync::atomic::{AtomicU64, Ordering};

/// Since the process began; what the log brings again at a start counts as well.
#[derive(Debug, Default)]
pub struct Operations {
    /// Keys written.
    pub puts: AtomicU64,
    /// Deletions of a key or a range.
    pub deletes: AtomicU64,
    /// Ranges read, previous values included.
    pub ranges: AtomicU64,
    /// Requests of more than one of these.
    pub txns: AtomicU64,
}

/// Those of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    pub puts: u64,
    pub deletes: u64,
    pub ranges: u64,
}

impl Operations {
    /// Adds those of one request.
    pub fn add(&self, one: Counted) {
        let Counted { puts, deletes, ranges } = one;
        self.puts.fetch_add(puts, Ordering::Relaxed);
        self.deletes.fetch_add(deletes, Ordering::Relaxed);
        self.ranges.fetch_add(ranges, Ordering::Relaxed);
        self.txns.fetch_add(u64::from(puts + deletes + ranges > 1), Ordering::Relaxed);
    }
}
