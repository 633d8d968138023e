//! Metrics for Prometheus on three members: every metric that etcd's dashboards and alerts use.

use std::collections::BTreeMap;

use crate::common::{TestMember, etcdctl, eventually, free_ports, start_three};
use node_proto::etcdserverpb::MemberAddRequest;

/// Metrics that the alerts and the dashboard of etcd's mixin use (contrib/mixin in etcd's
/// repository). kube-prometheus uses the same metrics. `up` is missing, because Prometheus itself
/// makes it.
const DASHBOARD_METRICS: &[&str] = &[
    "etcd_disk_backend_commit_duration_seconds_bucket",
    "etcd_disk_wal_fsync_duration_seconds_bucket",
    "etcd_mvcc_db_total_size_in_bytes",
    "etcd_mvcc_db_total_size_in_use_in_bytes",
    "etcd_network_client_grpc_received_bytes_total",
    "etcd_network_client_grpc_sent_bytes_total",
    "etcd_network_peer_received_bytes_total",
    "etcd_network_peer_round_trip_time_seconds_bucket",
    "etcd_network_peer_sent_bytes_total",
    "etcd_network_peer_sent_failures_total",
    "etcd_server_has_leader",
    "etcd_server_leader_changes_seen_total",
    "etcd_server_proposals_applied_total",
    "etcd_server_proposals_committed_total",
    "etcd_server_proposals_failed_total",
    "etcd_server_proposals_pending",
    "etcd_server_quota_backend_bytes",
    "grpc_server_handled_total",
    "grpc_server_handling_seconds_bucket",
    "grpc_server_started_total",
    "process_resident_memory_bytes",
];

/// Further metrics that older dashboards use, or that the list at etcd.io (Metrics) contains.
const OTHER_METRICS: &[&str] = &[
    "etcd_cluster_version",
    "etcd_debugging_mvcc_keys_total",
    "etcd_debugging_mvcc_events_total",
    "etcd_debugging_mvcc_watch_stream_total",
    "etcd_debugging_mvcc_watcher_total",
    "etcd_debugging_server_lease_expired_total",
    "etcd_disk_backend_defrag_duration_seconds_bucket",
    "etcd_disk_defrag_inflight",
    "etcd_disk_wal_write_bytes_total",
    "etcd_mvcc_delete_total",
    "etcd_mvcc_hash_duration_seconds_bucket",
    "etcd_mvcc_hash_rev_duration_seconds_bucket",
    "etcd_mvcc_put_total",
    "etcd_mvcc_range_total",
    "etcd_mvcc_txn_total",
    "etcd_network_active_peers",
    "etcd_network_disconnected_peers_total",
    "etcd_network_known_peers",
    "etcd_network_peer_received_failures_total",
    "etcd_network_snapshot_receive_failures",
    "etcd_network_snapshot_receive_inflights_total",
    "etcd_network_snapshot_receive_success",
    "etcd_network_snapshot_receive_total_duration_seconds_bucket",
    "etcd_network_snapshot_send_failures",
    "etcd_network_snapshot_send_inflights_total",
    "etcd_network_snapshot_send_success",
    "etcd_network_snapshot_send_total_duration_seconds_bucket",
    "etcd_server_client_requests_total",
    "etcd_server_health_failures",
    "etcd_server_health_success",
    "etcd_server_heartbeat_send_failures_total",
    "etcd_server_id",
    "etcd_server_is_leader",
    "etcd_server_is_learner",
    "etcd_server_learner_promote_successes",
    "etcd_server_read_indexes_failed_total",
    "etcd_server_slow_apply_total",
    "etcd_server_slow_read_indexes_total",
    "etcd_server_snapshot_apply_in_progress_total",
    "etcd_server_version",
    "os_fd_limit",
    "os_fd_used",
    "process_cpu_seconds_total",
    "process_max_fds",
    "process_open_fds",
    "process_start_time_seconds",
    "process_virtual_memory_bytes",
];

/// Result of one scrape: samples by name and labels, and the type of each metric family.
struct Scrape {
    samples: BTreeMap<String, f64>,
    types: BTreeMap<String, String>,
}

impl Scrape {
    fn of(member: &TestMember) -> Self {
        let answer = member.http("/metrics");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.contains("text/plain; version=0.0.4"), "{head}");
        let (mut samples, mut types) = (BTreeMap::new(), BTreeMap::new());
        for line in body.lines() {
            if let Some(described) = line.strip_prefix("# TYPE ") {
                let (name, kind) = described.split_once(' ').unwrap();
                let known = types.insert(name.to_owned(), kind.to_owned());
                assert_eq!(known, None, "{name} is described twice");
            } else if let Some((sample, value)) = line.rsplit_once(' ')
                && !line.starts_with('#')
            {
                let known = samples.insert(sample.to_owned(), value.parse().unwrap());
                assert_eq!(known, None, "{sample} is there twice");
            }
        }
        Self { samples, types }
    }

    fn named(&self, name: &str) -> impl Iterator<Item = (&str, f64)> {
        let is_named = move |sample: &str| sample.split('{').next() == Some(name);
        let samples = self.samples.iter().map(|(sample, value)| (sample.as_str(), *value));
        samples.filter(move |(sample, _)| is_named(sample))
    }

    /// Returns the value of the only sample with this name and these labels.
    fn value(&self, name: &str, labels: &[String]) -> f64 {
        let mut found = self
            .named(name)
            .filter(|(sample, _)| labels.iter().all(|label| sample.contains(label)));
        let (sample, value) = found.next().unwrap_or_else(|| panic!("no {name} with {labels:?}"));
        assert_eq!(found.next(), None, "beside {sample}");
        value
    }
}

#[tokio::test]
async fn every_metric_that_etcds_dashboard_and_alerts_use_exists() {
    let root = tempfile::tempdir().unwrap();
    let members = start_three(root.path());
    let mut ids = Vec::new();
    for (n, member) in members.iter().enumerate() {
        member.put(&format!("k{n}"), "v").await.unwrap();
        member.get("k0").await.unwrap();
        ids.push(member.member_id().await);
    }
    for (n, member) in members.iter().enumerate() {
        // The metric has a value after a while, because members measure the round trip to each peer
        // once a second.
        let others = || ids.iter().enumerate().filter(|(other, _)| *other != n).map(|(_, id)| id);
        for other in others() {
            eventually("a peer answers", || {
                let count = "etcd_network_peer_round_trip_time_seconds_count";
                Scrape::of(member).value(count, &[format!("To=\"{other:x}\"")]) > 0.0
            });
        }
        let scrape = Scrape::of(member);
        for name in DASHBOARD_METRICS.iter().chain(OTHER_METRICS) {
            assert!(scrape.named(name).next().is_some(), "no {name}");
            let family = name.strip_suffix("_bucket").unwrap_or(name);
            assert!(scrape.types.contains_key(family), "no type of {name}");
        }
        for other in others() {
            let to = [format!("To=\"{other:x}\"")];
            assert!(scrape.value("etcd_network_peer_sent_bytes_total", &to) > 0.0);
            let remote = [format!("Remote=\"{other:x}\"")];
            assert!(scrape.value("etcd_network_active_peers", &remote) > 0.0);
        }
        // Two followers send each other nothing but the heartbeats of their streams. So the number
        // for one peer may still be zero, and only the sum over all peers is checked.
        let received = scrape.named("etcd_network_peer_received_bytes_total");
        assert!(received.map(|(_, bytes)| bytes).sum::<f64>() > 0.0);
        for method in ["Put", "Range", "Status"] {
            let method = format!("grpc_method=\"{method}\"");
            let ok = "grpc_code=\"OK\"".to_owned();
            for (counter, labels) in [
                ("started_total", vec![method.clone()]),
                ("handled_total", vec![method.clone(), ok]),
                ("handling_seconds_count", vec![method.clone()]),
            ] {
                let counted = scrape.value(&format!("grpc_server_{counter}"), &labels);
                assert!((counted - 1.0).abs() < f64::EPSILON, "{counter} {labels:?}: {counted}");
            }
        }
        assert_eq!(scrape.named("grpc_server_handling_seconds_bucket").count(), 3 * 12);
        for name in ["received", "sent"] {
            let name = format!("etcd_network_client_grpc_{name}_bytes_total");
            assert!(scrape.value(&name, &[]) > 0.0, "{name}");
        }
        assert_eq!(scrape.named("etcd_network_known_peers").count(), 3);
        assert_eq!(scrape.types["grpc_server_handled_total"], "counter");
        assert_eq!(scrape.types["etcd_network_peer_round_trip_time_seconds"], "histogram");
        assert_eq!(scrape.types["etcd_debugging_mvcc_keys_total"], "gauge");
    }
}

/// Number of gRPC's codes, which Go's interceptor shows for each method from the start.
const CODES: usize = 17;

#[test]
fn a_new_member_shows_a_zero_for_each_code_of_each_method_as_etcd_does() {
    let root = tempfile::tempdir().unwrap();
    let mut member = TestMember::alone(root.path());
    member.start();
    member.wait_ready();
    let scrape = Scrape::of(&member);
    let methods: Vec<&str> = scrape
        .named("grpc_server_started_total")
        .map(|(sample, _)| sample.split_once('{').unwrap().1)
        .collect();
    assert!(methods.len() > 40, "{methods:?}");
    let handled: Vec<(&str, f64)> = scrape.named("grpc_server_handled_total").collect();
    assert_eq!(handled.len(), methods.len() * CODES);
    for method in methods {
        let codes: Vec<f64> = handled
            .iter()
            .filter(|(sample, _)| sample.ends_with(&format!(",{method}")))
            .map(|(_, count)| *count)
            .collect();
        assert_eq!(codes, [0.0; CODES], "{method}");
    }
}

#[tokio::test]
async fn calls_are_counted_by_the_version_that_clients_state() {
    let root = tempfile::tempdir().unwrap();
    let mut member = TestMember::alone(root.path());
    member.start();
    member.wait_ready();
    member.put("a", "1").await.unwrap();
    let requests = "etcd_server_client_requests_total";
    let said_nothing = ["type=\"unary\"".to_owned(), "=\"unknown\"".to_owned()];
    let counted = Scrape::of(&member).value(requests, &said_nothing);
    assert!((counted - 1.0).abs() < f64::EPSILON, "{counted}");
    if etcdctl(&member.client_url, &["put", "b", "2"]).is_none() {
        return;
    }
    let scrape = Scrape::of(&member);
    assert_eq!(scrape.named(requests).count(), 2);
    let (said, _) = scrape.named(requests).find(|(said, _)| !said.contains("unknown")).unwrap();
    assert!(said.contains("client_api_version=\"3."), "{said}");
}

#[tokio::test]
async fn a_state_that_a_new_member_fetches_is_counted_at_its_source() {
    let root = tempfile::tempdir().unwrap();
    let [peer, client, new_peer, new_client] = free_ports();
    let first = format!("one=http://127.0.0.1:{peer}");
    let mut member = TestMember::new(root.path(), "one", peer, client, &first);
    member.start();
    member.wait_ready();
    member.put("a", "1").await.unwrap();
    let url = format!("http://127.0.0.1:{new_peer}");
    let request = MemberAddRequest { peer_ur_ls: vec![url.clone()], is_learner: true };
    let added = member.cluster().member_add(request).await.unwrap().into_inner();
    let to = [format!("To=\"{:x}\"", added.member.unwrap().id)];
    let all = format!("{first},two={url}");
    let mut new = TestMember::new(root.path(), "two", new_peer, new_client, &all);
    new.args.push("--initial-cluster-state=existing".to_owned());
    new.start();
    eventually("it has been sent the state", || {
        let scrape = Scrape::of(&member);
        let sent = scrape.named("etcd_network_snapshot_send_success");
        sent.into_iter().any(|(sample, count)| sample.contains(&to[0]) && count > 0.0)
    });
    let scrape = Scrape::of(&member);
    let took = "etcd_network_snapshot_send_total_duration_seconds_count";
    let sent = scrape.value("etcd_network_snapshot_send_success", &to);
    assert!((scrape.value(took, &to) - sent).abs() < f64::EPSILON, "each was timed");
    assert!(scrape.value("etcd_network_snapshot_send_failures", &to).abs() < f64::EPSILON);
}

/// Metric families of etcd 3.7, with their types.
const ETCD_FAMILIES: &str = include_str!("data/etcd-3.7-metrics.txt");
/// Document that explains why some of etcd's families are missing.
const DIFFERENCES: &str = include_str!("../../../docs/differences.md");

/// Returns the names in the first column of the document's table of metrics. A name that ends with
/// `*` is a prefix.
fn explained_names() -> Vec<&'static str> {
    let (_, section) = DIFFERENCES.split_once("## Metrics").unwrap();
    section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect()
}

#[test]
fn every_family_of_stock_etcd_is_here_with_its_type_or_its_absence_is_explained() {
    let root = tempfile::tempdir().unwrap();
    let mut member = TestMember::alone(root.path());
    member.start();
    member.wait_ready();
    let scrape = Scrape::of(&member);
    let explained = explained_names();
    let is_explained = |name: &str| {
        explained.iter().any(|pattern| match pattern.strip_suffix('*') {
            Some(prefix) => name.starts_with(prefix),
            None => name == *pattern,
        })
    };
    for (name, kind) in ETCD_FAMILIES.lines().map(|line| line.split_once(' ').unwrap()) {
        match scrape.types.get(name) {
            Some(ours) => {
                assert_eq!(ours, kind, "the type of {name}");
                assert!(
                    !is_explained(name),
                    "{name} is here, and docs/differences.md says it isn't"
                );
            }
            None => {
                assert!(is_explained(name), "{name} is neither here nor in docs/differences.md")
            }
        }
    }
}

#[tokio::test]
async fn requests_messages_and_applied_entries_are_counted_as_by_etcd() {
    let root = tempfile::tempdir().unwrap();
    let mut member = TestMember::alone(root.path());
    member.start();
    member.wait_ready();
    for _ in 0..3 {
        member.put("a", "1").await.unwrap();
    }
    member.get("a").await.unwrap();
    let scrape = Scrape::of(&member);
    let value = |name: &str, labels: &[&str]| {
        let labels: Vec<String> = labels.iter().map(ToString::to_string).collect();
        scrape.value(name, &labels)
    };
    let put = ["grpc_method=\"Put\"", "grpc_service=\"etcdserverpb.KV\"", "grpc_type=\"unary\""];
    assert_eq!(value("grpc_server_msg_received_total", &put), 3.0);
    assert_eq!(value("grpc_server_msg_sent_total", &put), 3.0);
    let labels = ["success=\"true\"", "type=\"Put\""];
    assert_eq!(value("etcd_server_request_duration_seconds_count", &labels), 3.0);
    let labels = ["op=\"Put\"", "success=\"true\"", "version=\"v3\""];
    assert_eq!(value("etcd_server_apply_duration_seconds_count", &labels), 3.0);
    assert_eq!(value("etcd_server_range_duration_seconds_count", &["success=\"true\""]), 1.0);
    assert_eq!(value("etcd_cluster_version", &["cluster_version=\"3.6\""]), 1.0);
    assert_eq!(value("etcd_server_feature_enabled", &["name=\"FastLeaseKeepAlive\""]), 1.0);
    assert_eq!(value("etcd_debugging_mvcc_pending_events_total", &[]), 0.0);
}
