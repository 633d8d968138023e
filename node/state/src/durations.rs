//! Histograms of durations, with etcd's bucket bounds. The code that does the timed work records
//! the durations, and `/metrics` shows the histograms.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};

/// Bucket bounds for a call in seconds, as in gRPC's own metrics.
const CALL_BUCKETS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Histogram of durations in seconds.
#[derive(Debug)]
pub struct Durations {
    histogram: Histogram,
    /// Number of recorded durations. It is counted here because the histogram has no method that
    /// returns it.
    count: AtomicU64,
}

/// Empty histogram with the bounds for operations of a disk: 1 ms to 8.2 s.
impl Default for Durations {
    fn default() -> Self {
        Self::doubling(0.001, 14)
    }
}

impl Durations {
    fn within(bounds: impl IntoIterator<Item = f64>) -> Self {
        Self { histogram: Histogram::new(bounds), count: AtomicU64::new(0) }
    }

    fn doubling(first: f64, buckets: u16) -> Self {
        Self::within(exponential_buckets(first, 2.0, buckets))
    }

    /// Returns an empty histogram for round trips to a peer: 0.1 ms to 3.3 s.
    pub fn of_round_trips() -> Self {
        Self::doubling(0.0001, 16)
    }

    /// Returns an empty histogram for checksums of all data: 10 ms to 164 s.
    pub fn of_hashes() -> Self {
        Self::doubling(0.01, 15)
    }

    /// Returns an empty histogram for transfers of the whole state to and from peers: 0.1 s to
    /// 51.2 s.
    pub fn of_transfers() -> Self {
        Self::doubling(0.1, 10)
    }

    /// Returns an empty histogram for calls: 5 ms to 10 s.
    pub fn of_calls() -> Self {
        Self::within(CALL_BUCKETS)
    }

    /// Returns an empty histogram for requests of the API: 1 ms to 0.5 s.
    pub fn of_requests() -> Self {
        Self::doubling(0.001, 10)
    }

    /// Returns an empty histogram for applied entries and for ranges: 0.1 ms to 0.8 s.
    pub fn of_applies() -> Self {
        Self::doubling(0.0001, 14)
    }

    /// Returns an empty histogram for snapshots that are written to the store's disk: 10 ms to
    /// 328 s.
    pub fn of_snapshots() -> Self {
        Self::doubling(0.01, 16)
    }

    /// Returns whether nothing has been recorded.
    pub fn is_empty(&self) -> bool {
        self.count() == 0
    }

    /// Returns how many durations have been recorded.
    pub fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    pub fn record(&self, took: Duration) {
        self.histogram.observe(took.as_secs_f64());
        self.count.fetch_add(1, Relaxed);
    }
}

impl EncodeMetric for Durations {
    fn encode(&self, encoder: MetricEncoder<'_>) -> std::fmt::Result {
        self.histogram.encode(encoder)
    }

    fn metric_type(&self) -> MetricType {
        self.histogram.metric_type()
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;

    use super::*;

    /// Returns the lines that `/metrics` shows, without the metric's name.
    fn lines(durations: Durations) -> Vec<String> {
        let (mut registry, mut text) = (Registry::default(), String::new());
        registry.register("took", "Time taken", durations);
        encode(&mut text, &registry).unwrap();
        text.lines().filter_map(|line| Some(line.strip_prefix("took_")?.to_owned())).collect()
    }

    #[test]
    fn a_duration_counts_in_the_smallest_bucket_that_includes_it() {
        let durations = Durations::default();
        assert!(durations.is_empty());
        for micros in [0, 1_000, 1_001, 8_192_000, 8_192_001] {
            durations.record(Duration::from_micros(micros));
        }
        assert!(!durations.is_empty());
        let lines = lines(durations);
        // The histogram adds durations up as floating-point numbers, so their sum may be slightly
        // off.
        let sum: f64 = lines[0].strip_prefix("sum ").unwrap().parse().unwrap();
        assert!((sum - 16.386_002).abs() < 1e-9, "{sum}");
        assert_eq!(lines[1], "count 5");
        assert_eq!(lines[2], "bucket{le=\"0.001\"} 2");
        assert_eq!(lines[3], "bucket{le=\"0.002\"} 3");
        assert_eq!(lines[14], "bucket{le=\"4.096\"} 3");
        assert_eq!(lines[15], "bucket{le=\"8.192\"} 4");
        assert_eq!(lines[16..], ["bucket{le=\"+Inf\"} 5"]);
    }

    #[test]
    fn the_bucket_bounds_are_etcds() {
        let bounds = |durations: Durations| {
            let lines = lines(durations);
            let bound = |line: &str| line.split('"').nth(1).unwrap().to_owned();
            let count = lines.len() - 2;
            (bound(&lines[2]), bound(&lines[3]), bound(&lines[count]), count)
        };
        let expected = |first: &str, second: &str, last: &str, count| {
            (first.to_owned(), second.to_owned(), last.to_owned(), count)
        };
        assert_eq!(bounds(Durations::of_round_trips()), expected("0.0001", "0.0002", "3.2768", 17));
        assert_eq!(bounds(Durations::of_hashes()), expected("0.01", "0.02", "163.84", 16));
        assert_eq!(bounds(Durations::of_transfers()), expected("0.1", "0.2", "51.2", 11));
        assert_eq!(bounds(Durations::of_calls()), expected("0.005", "0.01", "10.0", 12));
    }
}
