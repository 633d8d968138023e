//! Histograms of durations, with etcd's bucket bounds: recorded where the work is done, read by
//! `/metrics`.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Bucket bounds for operations of a disk: 1 ms to 8.2 s.
static DISK: [u64; 14] = doubling(1_000);
/// Bucket bounds for a round trip to a peer: 0.1 ms to 3.3 s.
static ROUND_TRIP: [u64; 16] = doubling(100);
/// Bucket bounds for a checksum of all data: 10 ms to 164 s.
static HASH: [u64; 15] = doubling(10_000);
/// Bucket bounds for a transfer of the whole state to or from a peer: 0.1 s to 51.2 s.
static TRANSFER: [u64; 10] = doubling(100_000);
/// Bucket bounds for a call, as in gRPC's own metrics: 5 ms to 10 s.
static CALL: [u64; 11] = [
    5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000, 5_000_000,
    10_000_000,
];

/// Bucket bounds for a request of the API, as in etcd: 1 ms to 0.5 s.
static REQUEST: [u64; 10] = doubling(1_000);
/// Bucket bounds for applying one entry or reading one range, as in etcd: 0.1 ms to 0.8 s.
static APPLY: [u64; 14] = doubling(100);
/// Bucket bounds for writing a snapshot to the store's disk, as in etcd: 10 ms to 328 s.
static SNAPSHOT: [u64; 16] = doubling(10_000);

const fn doubling<const N: usize>(first_micros: u64) -> [u64; N] {
    let mut bounds = [first_micros; N];
    let mut n = 1;
    while n < N {
        bounds[n] = 2 * bounds[n - 1];
        n += 1;
    }
    bounds
}

/// Histogram of durations with fixed bucket bounds.
#[derive(Debug)]
pub struct Durations {
    /// Upper bounds of the buckets, in microseconds.
    bounds: &'static [u64],
    /// Count of each bucket; the last bucket is for durations above all bounds.
    counts: Box<[AtomicU64]>,
    micros: AtomicU64,
}

/// Empty histogram with the bounds for operations of a disk.
impl Default for Durations {
    fn default() -> Self {
        Self::within(&DISK)
    }
}

impl Durations {
    fn within(bounds: &'static [u64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds, counts, micros: AtomicU64::new(0) }
    }

    /// Returns an empty histogram for round trips to a peer.
    pub fn of_round_trips() -> Self {
        Self::within(&ROUND_TRIP)
    }

    /// Returns an empty histogram for checksums of all data.
    pub fn of_hashes() -> Self {
        Self::within(&HASH)
    }

    /// Returns an empty histogram for transfers of snapshots to and from peers.
    pub fn of_transfers() -> Self {
        Self::within(&TRANSFER)
    }

    /// Returns an empty histogram for calls.
    pub fn of_calls() -> Self {
        Self::within(&CALL)
    }

    /// Returns an empty histogram for requests of the API.
    pub fn of_requests() -> Self {
        Self::within(&REQUEST)
    }

    /// Returns an empty histogram for applied entries and for ranges.
    pub fn of_applies() -> Self {
        Self::within(&APPLY)
    }

    /// Returns an empty histogram for snapshots that are written.
    pub fn of_snapshots() -> Self {
        Self::within(&SNAPSHOT)
    }

    /// Returns whether nothing has been recorded.
    pub fn is_empty(&self) -> bool {
        self.counts.iter().all(|count| count.load(Relaxed) == 0)
    }

    pub fn record(&self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = self.bounds.iter().take_while(|bound| micros > **bound).count();
        self.counts[bucket].fetch_add(1, Relaxed);
        self.micros.fetch_add(micros, Relaxed);
    }

    /// Returns upper bound (in seconds) and count of each bucket, smallest first. The last bucket
    /// has no bound.
    pub fn buckets(&self) -> Vec<(f64, u64)> {
        let bounds = self.bounds.iter().map(|micros| Duration::from_micros(*micros).as_secs_f64());
        let counts = self.counts.iter().map(|count| count.load(Relaxed));
        bounds.chain([f64::INFINITY]).zip(counts).collect()
    }

    /// Returns the sum of all recorded durations.
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

    #[test]
    fn the_bounds_are_those_of_etcds_dashboards() {
        let bounds = |durations: Durations| {
            let buckets = durations.buckets();
            (buckets[0].0, buckets[1].0, buckets[buckets.len() - 2].0, buckets.len())
        };
        assert_eq!(bounds(Durations::of_round_trips()), (0.0001, 0.0002, 3.2768, 17));
        assert_eq!(bounds(Durations::of_hashes()), (0.01, 0.02, 163.84, 16));
        assert_eq!(bounds(Durations::of_transfers()), (0.1, 0.2, 51.2, 11));
        assert_eq!(bounds(Durations::of_calls()), (0.005, 0.01, 10.0, 12));
    }
}
