//! How long things took, in buckets with etcd's bounds: counted where they are done, read by `/metrics`.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// What a disk does: 1 ms to 8.2 s.
static DISK: [u64; 14] = doubling(1_000);
/// A message to a peer and back: 0.1 ms to 3.3 s.
static ROUND_TRIP: [u64; 16] = doubling(100);
/// A checksum of all data: 10 ms to 164 s.
static HASH: [u64; 15] = doubling(10_000);
/// The whole state, to or from a peer: 0.1 s to 51.2 s.
static TRANSFER: [u64; 10] = doubling(100_000);
/// A call: what gRPC's own metrics have, 5 ms to 10 s.
static CALL: [u64; 11] = [
    5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000, 5_000_000,
    10_000_000,
];

/// A request of the API: what etcd has, 1 ms to 0.5 s.
static REQUEST: [u64; 10] = doubling(1_000);
/// The application of one entry, or a range: what etcd has, 0.1 ms to 0.8 s.
static APPLY: [u64; 14] = doubling(100);
/// A snapshot written to the store's disk: what etcd has, 10 ms to 328 s.
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

/// How long something took, each time it was done.
#[derive(Debug)]
pub struct Durations {
    /// Upper bounds in microseconds.
    bounds: &'static [u64],
    /// The last one is of those above all bounds.
    counts: Box<[AtomicU64]>,
    micros: AtomicU64,
}

/// Of what a disk does.
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

    /// Of messages to a peer and back.
    pub(crate) fn of_round_trips() -> Self {
        Self::within(&ROUND_TRIP)
    }

    /// Of checksums of all data.
    pub(crate) fn of_hashes() -> Self {
        Self::within(&HASH)
    }

    /// Of snapshots to and from peers.
    pub(crate) fn of_transfers() -> Self {
        Self::within(&TRANSFER)
    }

    /// Of calls.
    pub(crate) fn of_calls() -> Self {
        Self::within(&CALL)
    }

    /// Of requests of the API.
    pub(crate) fn of_requests() -> Self {
        Self::within(&REQUEST)
    }

    /// Of entries that are applied, and of ranges.
    pub(crate) fn of_applies() -> Self {
        Self::within(&APPLY)
    }

    /// Of snapshots that are written.
    pub(crate) fn of_snapshots() -> Self {
        Self::within(&SNAPSHOT)
    }

    /// Whether nothing was recorded.
    pub(crate) fn is_empty(&self) -> bool {
        self.counts.iter().all(|count| count.load(Relaxed) == 0)
    }

    pub(crate) fn record(&self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = self.bounds.iter().take_while(|bound| micros > **bound).count();
        self.counts[bucket].fetch_add(1, Relaxed);
        self.micros.fetch_add(micros, Relaxed);
    }

    /// Upper bound in seconds and count of each bucket, smallest first; the last one has no bound.
    pub fn buckets(&self) -> Vec<(f64, u64)> {
        let bounds = self.bounds.iter().map(|micros| Duration::from_micros(*micros).as_secs_f64());
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
