//! Counters of the driver, written by its threads and read by `/metrics`.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// All but [`Metrics::log_bytes_left`] only ever rise.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Proposals taken from the mailbox.
    pub proposals: AtomicU64,
    /// Proposals refused because the leader's bound on uncommitted bytes was reached.
    pub proposals_refused: AtomicU64,
    /// ReadIndex rounds asked for.
    pub read_rounds: AtomicU64,
    /// Reads answered.
    pub reads: AtomicU64,
    /// Messages taken from peers.
    pub messages_received: AtomicU64,
    /// Messages from peers that were refused as impossible.
    pub messages_refused: AtomicU64,
    /// Messages handed to the transport.
    pub messages_sent: AtomicU64,
    /// Messages that the transport had no room or connection for.
    pub messages_dropped: AtomicU64,
    /// Times this member saw a leader come up.
    pub leader_changes: AtomicU64,
    /// Groups written to the log, each with one sync.
    pub log_groups: AtomicU64,
    /// Entries written to the log.
    pub log_entries: AtomicU64,
    /// Bytes written to the log, padding included.
    pub log_bytes: AtomicU64,
    /// From the write of each group to the end of its sync.
    pub log_durations: Durations,
    /// Bytes that the log can take before it has to make another segment, as last looked at.
    pub log_bytes_left: AtomicU64,
    /// Entries applied.
    pub applied: AtomicU64,
    /// Microseconds spent applying.
    pub apply_micros: AtomicU64,
    /// Of each checkpoint of the store.
    pub checkpoint_durations: Durations,
    /// Snapshots sent.
    pub snapshots_sent: AtomicU64,
    /// Snapshots installed.
    pub snapshots_installed: AtomicU64,
}

/// Upper bounds in milliseconds of the buckets that etcd gives to what a disk does: 2^0 to 2^13.
const BUCKETS: usize = 14;

/// How long something took, each time it was done.
#[derive(Debug, Default)]
pub struct Durations {
    /// The last one is of those above all bounds.
    counts: [AtomicU64; BUCKETS + 1],
    micros: AtomicU64,
}

impl Durations {
    pub(crate) fn record(&self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = (0..BUCKETS).find(|bucket| micros <= 1000 << bucket).unwrap_or(BUCKETS);
        self.counts[bucket].fetch_add(1, Relaxed);
        self.micros.fetch_add(micros, Relaxed);
    }

    /// Upper bound in seconds and count of each bucket, smallest first; the last one has no bound.
    pub fn buckets(&self) -> Vec<(f64, u64)> {
        let bounds = (0..BUCKETS).map(|bucket| f64::from(1 << bucket) / 1000.0);
        let counts = self.counts.iter().map(|count| count.load(Relaxed));
        bounds.chain([f64::INFINITY]).zip(counts).collect()
    }

    /// All of them together.
    pub fn sum(&self) -> Duration {
        Duration::from_micros(self.micros.load(Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_counts_in_the_smallest_bucket_that_holds_it() {
        let durations = Durations::default();
        for micros in [0, 1_000, 1_001, 8_192_000, 8_192_001] {
            durations.record(Duration::from_micros(micros));
        }
        let buckets = durations.buckets();
        let filled: Vec<_> = buckets.iter().copied().filter(|(_, count)| *count > 0).collect();
        assert_eq!(filled, [(0.001, 2), (0.002, 1), (8.192, 1), (f64::INFINITY, 1)]);
        assert_eq!(buckets.len(), 15);
        assert_eq!(durations.sum(), Duration::from_micros(16_386_002));
    }
}
