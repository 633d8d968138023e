//! The `/metrics` page. Values are collected at each request. A metric that means the same as in
//! etcd has etcd's name.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use node_state::durations::Durations;
use node_state::lease::TTL_BUCKETS;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::rpc::ApiContext;

mod calls;
mod network;
mod node;
mod text;

pub(super) async fn metrics(State(context): State<Arc<ApiContext>>) -> Response {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(MetricsCollector(context)));
    let mut body = String::new();
    match encode(&mut body, &registry) {
        Ok(()) => ([(CONTENT_TYPE, text::PROMETHEUS_CONTENT_TYPE)], text::to_prometheus(&body))
            .into_response(),
        Err(_) => axum::http::StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

struct MetricsCollector(Arc<ApiContext>);

impl std::fmt::Debug for MetricsCollector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Scrape")
    }
}

struct MetricWriter<'a>(DescriptorEncoder<'a>);

impl MetricWriter<'_> {
    fn gauge(&mut self, name: &str, help: &str, value: i64) -> std::fmt::Result {
        let gauge = ConstGauge::new(value);
        gauge.encode(self.0.encode_descriptor(name, help, None, gauge.metric_type())?)
    }

    fn seconds(&mut self, name: &str, help: &str, micros: u64) -> std::fmt::Result {
        let counter = ConstCounter::new(std::time::Duration::from_micros(micros).as_secs_f64());
        counter.encode(self.0.encode_descriptor(name, help, None, counter.metric_type())?)
    }

    fn durations(&mut self, name: &str, help: &str, durations: &Durations) -> std::fmt::Result {
        durations.encode(self.0.encode_descriptor(name, help, None, durations.metric_type())?)
    }

    /// Writes a gauge with the value 1, whose information is in its labels.
    fn fact(&mut self, name: &str, help: &str, labels: &[(&str, &str)]) -> std::fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        ConstGauge::new(1_i64).encode(family.encode_family(&labels)?)
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) -> std::fmt::Result {
        let counter = ConstCounter::new(value);
        counter.encode(self.0.encode_descriptor(name, help, None, counter.metric_type())?)
    }
}

/// Converts a value for the metrics library, whose integer gauges are `i64`.
fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

impl Collector for MetricsCollector {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> std::fmt::Result {
        let mut out = MetricWriter(encoder);
        self.consensus(&mut out)?;
        self.log(&mut out)?;
        self.store(&mut out)?;
        self.watches(&mut out)?;
        self.snapshots(&mut out)?;
        self.operations(&mut out)?;
        self.leases(&mut out)?;
        self.calls(&mut out)?;
        self.server(&mut out)?;
        self.network(&mut out)?;
        node::process(&mut out)?;
        node::descriptors(&mut out)
    }
}

impl MetricsCollector {
    fn consensus(&self, out: &mut MetricWriter<'_>) -> std::fmt::Result {
        let status = self.0.status.borrow().clone();
        let driver = self.0.handle.metrics();
        let leads = status.leader == self.0.identity.member_id;
        out.gauge(
            "etcd_server_has_leader",
            "Whether or not a leader exists. 1 is existence, 0 is not",
            i64::from(status.leader != 0),
        )?;
        out.gauge(
            "etcd_server_is_leader",
            "Whether or not this member is a leader. 1 if is, 0 otherwise",
            i64::from(leads),
        )?;
        out.counter(
            "etcd_server_leader_changes_seen",
            "The number of leader changes seen",
            load(&driver.leader_changes),
        )?;
        out.gauge(
            "etcd_server_proposals_committed_total",
            "The total number of consensus proposals committed",
            signed(status.commit),
        )?;
        out.gauge(
            "etcd_server_proposals_applied_total",
            "The total number of consensus proposals applied",
            signed(status.applied.index),
        )?;
        out.gauge(
            "etcd_server_proposals_pending",
            "The current number of pending proposals to commit",
            self.0.metrics.pending_writes.load(Ordering::Relaxed),
        )?;
        out.counter(
            "etcd_server_proposals_failed",
            "The total number of failed proposals seen",
            load(&self.0.metrics.failed_writes),
        )?;
        out.counter(
            "etcd_server_heartbeat_send_failures",
            "Heartbeats that left the leader a beat late, because it was busy",
            load(&driver.late_heartbeats),
        )?;
        out.counter(
            "etcd_server_read_indexes",
            "Rounds of ReadIndex asked for",
            load(&driver.read_rounds),
        )?;
        out.counter(
            "etcd_server_read_indexes_failed",
            "The total number of failed read indexes seen",
            load(&driver.reads_failed),
        )?;
        out.counter(
            "etcd_server_slow_read_indexes",
            "Read indexes that nobody confirmed within the request time-out",
            load(&driver.reads_timed_out),
        )?;
        out.gauge(
            "etcd_server_snapshot_apply_in_progress_total",
            "1 if the server is applying the incoming snapshot. 0 if none",
            i64::from(driver.installing.load(Ordering::Relaxed)),
        )?;
        out.gauge(
            "etcd_server_learner_promote_successes",
            "The total number of successful learner promotions while this member is leader",
            signed(load(&self.0.metrics.promoted)),
        )
    }

    fn log(&self, out: &mut MetricWriter<'_>) -> std::fmt::Result {
        let driver = self.0.handle.metrics();
        out.counter(
            "muster_log_groups",
            "Groups written to the log, each with one sync",
            load(&driver.log_groups),
        )?;
        out.counter("muster_log_entries", "Entries written to the log", load(&driver.log_entries))?;
        out.gauge(
            "etcd_disk_wal_write_bytes_total",
            "Bytes written to the log",
            signed(load(&driver.log_bytes)),
        )?;
        out.durations(
            "etcd_disk_wal_fsync_duration_seconds",
            "Time from the write of a group to the end of its sync",
            &driver.log_durations,
        )?;
        out.gauge(
            "muster_log_reserved_bytes",
            "Bytes that the log can take before it has to make another segment",
            signed(load(&driver.log_bytes_left)),
        )?;
        out.seconds(
            "muster_apply_seconds",
            "Time spent applying entries",
            load(&driver.apply_micros),
        )?;
        out.counter(
            "etcd_server_slow_apply",
            "Turns of applying entries that took longer than 100 ms",
            load(&driver.slow_applies),
        )?;
        out.durations(
            "etcd_disk_backend_commit_duration_seconds",
            "Time that a checkpoint of the store took, its syncs included",
            &driver.checkpoint_durations,
        )?;
        out.durations(
            "etcd_disk_backend_defrag_duration_seconds",
            "Time that a defragmentation of the store took",
            &self.0.metrics.defragmentations,
        )?;
        out.gauge(
            "etcd_disk_defrag_inflight",
            "Whether or not defrag is active on the member. 1 means active, 0 means not",
            i64::from(self.0.metrics.defragmenting.load(Ordering::Relaxed)),
        )
    }

    fn store(&self, out: &mut MetricWriter<'_>) -> std::fmt::Result {
        let store = &self.0.store;
        let view = store.view();
        let metrics = &self.0.metrics;
        out.gauge(
            "etcd_mvcc_db_total_size_in_bytes",
            "Total size of the underlying database physically allocated in bytes",
            signed(store.total_bytes()),
        )?;
        out.gauge(
            "etcd_mvcc_db_total_size_in_use_in_bytes",
            "Total size of the underlying database logically in use in bytes",
            signed(store.bytes_in_use()),
        )?;
        out.gauge(
            "etcd_server_quota_backend_bytes",
            "Current backend storage quota size in bytes",
            self.0.limits.quota.reported_bytes(),
        )?;
        out.gauge(
            "etcd_debugging_mvcc_keys_total",
            "Total number of keys",
            i64::try_from(store.indexed_keys()).unwrap_or(i64::MAX),
        )?;
        out.gauge(
            "etcd_debugging_mvcc_current_revision",
            "The current revision of store",
            view.revision(),
        )?;
        out.gauge(
            "etcd_debugging_mvcc_compact_revision",
            "The revision of the last compaction in store",
            view.compact_revision(),
        )?;
        out.gauge(
            "etcd_debugging_auth_revision",
            "The current revision of auth store",
            signed(view.auth().revision()),
        )?;
        out.durations(
            "etcd_mvcc_hash_duration_seconds",
            "Time that a checksum of all that the store holds took",
            &metrics.hashes,
        )?;
        out.durations(
            "etcd_mvcc_hash_rev_duration_seconds",
            "Time that a checksum of the keys at a revision took",
            &metrics.revision_hashes,
        )
    }

    fn watches(&self, out: &mut MetricWriter<'_>) -> std::fmt::Result {
        let (store, metrics) = (&self.0.store, &self.0.metrics);
        out.gauge(
            "etcd_debugging_mvcc_watch_stream_total",
            "Total number of watch streams",
            metrics.watch_streams.load(Ordering::Relaxed),
        )?;
        out.gauge(
            "etcd_debugging_mvcc_watcher_total",
            "Total number of watchers",
            metrics.watchers.load(Ordering::Relaxed),
        )?;
        let watchers = metrics.watchers.load(Ordering::Relaxed);
        let attached = store.operations().attached_watches.load(Ordering::Relaxed);
        out.gauge(
            "etcd_debugging_mvcc_slow_watcher_total",
            "Total number of watchers that catch up with what has happened",
            (watchers - attached).max(0),
        )?;
        out.gauge(
            "etcd_debugging_mvcc_pending_events_total",
            "Total number of events in queues of watch streams",
            store.operations().pending_events.load(Ordering::Relaxed),
        )?;
        out.counter(
            "etcd_debugging_mvcc_events",
            "Total number of events sent by this member",
            load(&metrics.events),
        )
    }

    fn snapshots(&self, out: &mut MetricWriter<'_>) -> std::fmt::Result {
        let (store, metrics) = (&self.0.store, &self.0.metrics);
        out.counter(
            "etcd_debugging_mvcc_db_compaction_keys",
            "Total number of revisions of keys that compactions took away",
            load(&store.operations().compacted_revisions),
        )?;
        out.durations(
            "etcd_disk_backend_snapshot_duration_seconds",
            "Time that a snapshot for a client took, until all of it was sent",
            &metrics.snapshots,
        )?;
        out.durations(
            "etcd_snap_db_save_total_duration_seconds",
            "Time that writing a peer's whole state to disk took, its transfer included",
            &metrics.snapshot_saves,
        )?;
        out.durations(
            "etcd_snap_db_fsync_duration_seconds",
            "Time that the sync of a peer's whole state took",
            &metrics.snapshot_syncs,
        )?;
        // Metrics of etcd's API v2, which this node doesn't have. Dashboards expect them. They are
        // always 0, as in etcd 3.7.
        out.counter("etcd_debugging_store_expires", "Expired keys of API v2: none", 0)?;
        out.counter("etcd_debugging_store_watch_requests", "Watches of API v2: none", 0)?;
        out.gauge("etcd_debugging_store_watchers", "Active watchers of API v2: none", 0)
    }

    fn operations(&self, out: &mut MetricWriter<'_>) -> std::fmt::Result {
        let asked = self.0.store.operations();
        for (name, what, count) in [
            ("etcd_mvcc_put", "puts", &asked.puts),
            ("etcd_mvcc_delete", "deletes", &asked.deletes),
            ("etcd_mvcc_range", "ranges", &asked.ranges),
            ("etcd_mvcc_txn", "txns", &asked.txns),
        ] {
            out.counter(name, &format!("Total number of {what} seen by this member"), load(count))?;
        }
        Ok(())
    }

    fn leases(&self, out: &mut MetricWriter<'_>) -> std::fmt::Result {
        let counters = self.0.store.lease_counters();
        let metrics = &self.0.metrics;
        for (name, help, count) in [
            (
                "etcd_debugging_lease_granted",
                "The total number of granted leases",
                counters.granted,
            ),
            (
                "etcd_debugging_lease_revoked",
                "The total number of revoked leases",
                counters.revoked,
            ),
            (
                "etcd_debugging_lease_renewed",
                "The number of renewed leases seen by the leader",
                load(&metrics.leases_renewed),
            ),
            (
                "etcd_debugging_server_lease_expired",
                "The total number of expired leases",
                load(&metrics.leases_expired),
            ),
        ] {
            out.counter(name, help, count)?;
        }
        let bounds = (0..TTL_BUCKETS as i32).map(|n| 2_f64.powi(n)).chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(counters.ttls).collect();
        let (name, help) = ("etcd_debugging_lease_ttl_total", "Bucketed histogram of lease TTLs");
        let mut family = out.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        #[allow(clippy::cast_precision_loss, reason = "a metric is as exact as a double")]
        let sum = counters.ttl_sum as f64;
        family.encode_histogram::<NoLabelSet>(sum, counters.granted, &buckets, None)
    }
}

fn load(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}
