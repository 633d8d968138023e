//! `/metrics` for Prometheus and `/livez`, on an optional plain HTTP listener.
//!
//! The listener serves one request per connection, bounded in size and time. Every other path or
//! method gets a 404.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

use crate::launch::process;
use crate::observe::backup::{
    BackupFailure, BackupStatus, VerificationFailureReason, VerificationStatus,
};
use crate::observe::status::{AgentStatus, Phase};

/// Maximum number of requests served at one time; further connections are closed.
const MAX_CONNECTIONS: usize = 8;
/// Maximum length in bytes of a request's head.
const HEAD_LIMIT: usize = 8 * 1024;
/// The longest that a request may take.
const DEADLINE: Duration = Duration::from_secs(5);

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PhaseLabel {
    phase: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct VersionLabel {
    version: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct InfoLabels {
    version: &'static str,
    cluster: String,
    cluster_id: String,
    member: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ReasonLabel {
    reason: String,
}

/// Returns Prometheus' standard process metrics (`process_…`).
fn process_registry() -> Registry {
    let mut registry = Registry::default();
    let pid = rustix::process::getpid().as_raw_nonzero().get();
    if let Ok(started_at) = process::started_at(pid) {
        let started: Gauge<f64, AtomicU64> = Gauge::default();
        started.set(started_at);
        let help = "Start time of the process since unix epoch in seconds";
        registry.register("process_start_time_seconds", help, started);
    }
    registry
}

/// Returns the text of the metrics for `status`.
pub(crate) fn render(status: &AgentStatus) -> String {
    let mut registry = Registry::with_prefix("muster_agent");
    let build = Family::<VersionLabel, Gauge>::default();
    build.get_or_create(&VersionLabel { version: env!("CARGO_PKG_VERSION") }).set(1);
    registry.register("build_info", "The agent's version", build);
    registry.register("info", "Version, cluster and member of this agent", member_info(status));
    let phases = Family::<PhaseLabel, Gauge>::default();
    for phase in Phase::ALL {
        let label = PhaseLabel { phase: phase.as_str() };
        phases.get_or_create(&label).set(i64::from(phase == status.phase));
    }
    registry.register("phase", "What the agent is at: 1 for one of them", phases);
    let node = status.node.clone().unwrap_or_default();
    let mut gauge = |name, help, value: i64| {
        let gauge: Gauge = Gauge::default();
        gauge.set(value);
        registry.register(name, help, gauge);
    };
    gauge("node_up", "Whether the node's process runs", i64::from(node.pid.is_some()));
    let starts = i64::try_from(node.starts).unwrap_or(i64::MAX);
    gauge("node_starts", "Starts and adoptions of the node by this agent", starts);
    let late = i64::from(status.certificates_late.is_some());
    gauge("certificates_late", "Whether the certificates should have been renewed", late);
    gauge("seat", "This host's seat, 0 for none", i64::from(status.seat.unwrap_or(0)));
    let unreachable = i64::from(status.unreachable_voters);
    let help = "Other voters that this host can't reach, while a replacement policy is in force";
    gauge("unreachable_voters", help, unreachable);
    let help = "Whether a member is dead and its replacement policy has reached its limit";
    gauge("replacement_limit_reached", help, i64::from(status.replacement_limit_reached));
    let help = "Whether discovery's history of this cluster contradicts what this agent remembers";
    gauge("discovery_history_contradicted", help, i64::from(status.history_fault.is_some()));
    let failed_at = status.last_error.as_ref().map_or(0.0, |error| seconds(error.at));
    let last_error: Gauge<f64, AtomicU64> = Gauge::default();
    last_error.set(failed_at);
    let help = "When something last went wrong, Unix time, 0 for never";
    registry.register("last_error_timestamp_seconds", help, last_error);
    let unreachable: Gauge<f64, AtomicU64> = Gauge::default();
    unreachable.set(status.discovery_unreachable.as_ref().map_or(0.0, |lost| seconds(lost.since)));
    let help = "Since when discovery can't be reached, Unix time, 0 while it can";
    registry.register("discovery_unreachable_since_timestamp_seconds", help, unreachable);
    let until: Gauge<f64, AtomicU64> = Gauge::default();
    until.set(status.certificates_until.map_or(0.0, seconds));
    let help = "Until when this member's certificates last, Unix time, 0 without any";
    registry.register("certificates_end_timestamp_seconds", help, until);
    if let Some(backup) = &status.backup {
        register_backup(&mut registry, backup);
    }
    let mut text = String::new();
    encode_registry(&mut text, &registry)
        .and_then(|()| encode_registry(&mut text, &process_registry()))
        .and_then(|()| encode_eof(&mut text))
        .expect("a string takes everything");
    text
}

/// Returns a gauge with the value 1, whose labels name the cluster and the member. A label is empty
/// until the agent knows its value.
fn member_info(status: &AgentStatus) -> Family<InfoLabels, Gauge> {
    let info = Family::<InfoLabels, Gauge>::default();
    let labels = InfoLabels {
        version: env!("CARGO_PKG_VERSION"),
        cluster: status.cluster_name.clone().unwrap_or_default(),
        cluster_id: status.cluster_id.clone().unwrap_or_default(),
        member: status.name.clone().unwrap_or_default(),
    };
    info.get_or_create(&labels).set(1);
    info
}

/// Registers the metrics of scheduled backups. An agent without them has none of these metrics.
fn register_backup(registry: &mut Registry, backup: &BackupStatus) {
    let mut gauge = |name, help, value: f64| {
        let gauge: Gauge<f64, AtomicU64> = Gauge::default();
        gauge.set(value);
        registry.register(name, help, gauge);
    };
    let newest = backup.newest.as_ref();
    let help = "When the newest backup in the store was begun, Unix time, 0 for none";
    gauge("backup_newest_timestamp_seconds", help, newest.map_or(0.0, |newest| seconds(newest.at)));
    let help = "Size of the newest backup in the store";
    gauge("backup_newest_bytes", help, newest.map_or(0.0, |newest| newest.bytes as f64));
    let help = "When this agent last read the store, Unix time, 0 for never";
    gauge("backup_store_read_timestamp_seconds", help, backup.seen_at.map_or(0.0, seconds));
    let help = "Time from one backup to the next, as it was set";
    gauge("backup_interval_seconds", help, backup.every_seconds as f64);
    let help = "How long the last backup took that this agent published, 0 for none";
    gauge("backup_duration_seconds", help, backup.last_duration_ms.unwrap_or(0) as f64 / 1000.0);
    let running = backup.running.as_ref();
    let help = "Whether this agent saves a backup now";
    gauge("backup_running", help, f64::from(u8::from(running.is_some())));
    let help = "Bytes of the running backup's current step, 0 without one";
    gauge("backup_running_bytes", help, running.map_or(0.0, |running| running.bytes as f64));
    let failed_at = backup.last_failure.as_ref().map_or(0.0, |failure| seconds(failure.at));
    let help = "When a backup last failed at this agent, Unix time, 0 for never";
    gauge("backup_last_failure_timestamp_seconds", help, failed_at);
    let failures = Family::<ReasonLabel, Counter>::default();
    for (reason, count) in &backup.failures {
        failures.get_or_create(&ReasonLabel { reason: reason.clone() }).inc_by(*count);
    }
    registry.register("backup_failures", "Backups that failed at this agent", failures);
    let published: Counter = Counter::default();
    published.inc_by(backup.published);
    registry.register("backup_published", "Backups that this agent published", published);
    if let Some(verification) = &backup.verification {
        register_verification(registry, verification);
    }
}

/// Registers the metrics of the scheduled verification of stored backups.
fn register_verification(registry: &mut Registry, verification: &VerificationStatus) {
    let mut gauge = |name, help, value: f64| {
        let gauge: Gauge<f64, AtomicU64> = Gauge::default();
        gauge.set(value);
        registry.register(name, help, gauge);
    };
    let help = "Time from one verification of stored backups to the next, as it was set";
    gauge("backup_verification_interval_seconds", help, verification.every_seconds as f64);
    let help = "When this agent last verified stored backups, Unix time, 0 for never";
    let at = verification.at.map_or(0.0, seconds);
    gauge("backup_verification_timestamp_seconds", help, at);
    let failed = Family::<ReasonLabel, Gauge>::default();
    for reason in VerificationFailureReason::ALL.map(VerificationFailureReason::as_str) {
        let is_reason = |failure: &BackupFailure| failure.reason == reason;
        let value = i64::from(verification.failure.as_ref().is_some_and(is_reason));
        failed.get_or_create(&ReasonLabel { reason: reason.to_owned() }).set(value);
    }
    let help = "Whether this agent's last verification of stored backups failed";
    registry.register("backup_verification_failed", help, failed);
}

fn seconds(at: jiff::Timestamp) -> f64 {
    at.as_duration().as_secs_f64()
}

pub(crate) async fn bind(at: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(at).await
}

/// Serves requests until cancelled.
pub(crate) async fn serve(
    listener: TcpListener,
    status: watch::Receiver<AgentStatus>,
    stop: CancellationToken,
) {
    let routes = TowerToHyperService::new(routes(status));
    let mut http = auto::Builder::new(TokioExecutor::new()).http1_only();
    http.http1().keep_alive(false).max_buf_size(HEAD_LIMIT);
    let free = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(_) => {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            },
            () = stop.cancelled() => return,
        };
        let Ok(permit) = Arc::clone(&free).try_acquire_owned() else { continue };
        let answer = http.serve_connection(TokioIo::new(stream), routes.clone()).into_owned();
        tokio::spawn(async move {
            // A client that disconnects or is too slow is no error of the agent's.
            let _ = tokio::time::timeout(DEADLINE, answer).await;
            drop(permit);
        });
    }
}

fn routes(status: watch::Receiver<AgentStatus>) -> Router {
    let metrics = move || {
        let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        std::future::ready(([(CONTENT_TYPE, kind)], render(&status.borrow())))
    };
    let not_found = (StatusCode::NOT_FOUND, "/metrics or /livez\n");
    Router::new()
        .route("/metrics", get(metrics))
        .route("/livez", get("ok\n"))
        .fallback(not_found)
        .method_not_allowed_fallback(not_found)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;
    use crate::observe::backup::NewestBackup;
    use crate::observe::status::{DiscoveryOutage, NodeProcessStatus, StatusHandle};

    #[test]
    fn metrics_show_when_certificates_end_and_whether_they_are_late() {
        let board = StatusHandle::default();
        assert!(render(&board.read()).contains("muster_agent_certificates_late 0"));
        board.update(|status| {
            status.certificates_until = Some(jiff::Timestamp::from_second(1_700_000_000).unwrap());
            status.certificates_late = Some("the service is away".to_owned());
        });
        let text = render(&board.read());
        assert!(text.contains("muster_agent_certificates_late 1"), "{text}");
        let until = "muster_agent_certificates_end_timestamp_seconds 1700000000";
        assert!(text.contains(until), "{text}");
    }

    #[test]
    fn metrics_name_the_cluster_and_the_member_once_they_are_known() {
        let board = StatusHandle::default();
        let version = env!("CARGO_PKG_VERSION");
        let info = |cluster: &str, id: &str, member: &str| {
            let of = format!("cluster=\"{cluster}\",cluster_id=\"{id}\",member=\"{member}\"");
            format!("\nmuster_agent_info{{version=\"{version}\",{of}}} 1\n")
        };
        assert!(render(&board.read()).contains(&info("", "", "")));
        board.update(|status| {
            status.cluster_name = Some("demo".to_owned());
            status.cluster_id = Some("0198".to_owned());
            status.name = Some("db-1".to_owned());
        });
        let text = render(&board.read());
        assert!(text.contains(&info("demo", "0198", "db-1")), "{text}");
        assert_eq!(text.matches("muster_agent_info{").count(), 1);
    }

    #[test]
    fn metrics_show_when_this_process_started() {
        let text = render(&StatusHandle::default().read());
        let name = "\nprocess_start_time_seconds ";
        let (_, rest) = text.split_once(name).unwrap();
        let shown: f64 = rest.lines().next().unwrap().parse().unwrap();
        let pid = i32::try_from(std::process::id()).unwrap();
        assert_eq!(shown, process::started_at(pid).unwrap());
        assert!(text.ends_with("# EOF\n") && text.matches("# EOF").count() == 1, "{text}");
    }

    #[test]
    fn metrics_show_since_when_discovery_is_unreachable() {
        let board = StatusHandle::default();
        let name = "muster_agent_discovery_unreachable_since_timestamp_seconds";
        assert!(render(&board.read()).contains(&format!("{name} 0")));
        let since = jiff::Timestamp::from_second(1_700_000_000).unwrap();
        board.update(|status| {
            let error = "refused".to_owned();
            status.discovery_unreachable = Some(DiscoveryOutage { since, error });
        });
        let text = render(&board.read());
        assert!(text.contains(&format!("{name} 1700000000")), "{text}");
    }

    #[test]
    fn exactly_one_phase_is_set_and_the_nodes_starts_are_shown() {
        let board = StatusHandle::default();
        board.set_phase(Phase::Running, None);
        board.update(|status| {
            status.node =
                Some(NodeProcessStatus { pid: Some(7), starts: 3, ..NodeProcessStatus::default() });
        });
        let text = render(&board.read());
        assert!(text.contains("muster_agent_phase{phase=\"running\"} 1"), "{text}");
        assert_eq!(text.lines().filter(|l| l.contains("phase=") && l.ends_with(" 1")).count(), 1);
        assert!(text.contains("muster_agent_node_up 1"), "{text}");
        assert!(text.contains("muster_agent_node_starts 3"), "{text}");
    }

    #[test]
    fn metrics_show_backups_only_if_there_is_a_schedule() {
        let board = StatusHandle::default();
        assert!(!render(&board.read()).contains("backup"));
        board.update(|status| {
            let failures = [("node".to_owned(), 0), ("store".to_owned(), 2)];
            status.backup = Some(BackupStatus {
                every_seconds: 21_600,
                newest: Some(NewestBackup {
                    name: "N".to_owned(),
                    at: jiff::Timestamp::from_second(1_700_000_000).unwrap(),
                    bytes: 4096,
                    revision: 7,
                }),
                failures: failures.into(),
                ..BackupStatus::default()
            });
        });
        let text = render(&board.read());
        for line in [
            "muster_agent_backup_newest_timestamp_seconds 1700000000.0",
            "muster_agent_backup_newest_bytes 4096.0",
            "muster_agent_backup_interval_seconds 21600.0",
            "muster_agent_backup_running 0.0",
            "muster_agent_backup_failures_total{reason=\"node\"} 0",
            "muster_agent_backup_failures_total{reason=\"store\"} 2",
            "muster_agent_backup_published_total 0",
        ] {
            assert!(text.contains(&format!("\n{line}\n")), "{line}: {text}");
        }
    }

    #[test]
    fn metrics_show_the_result_of_a_verification_only_if_there_is_a_schedule_for_it() {
        let board = StatusHandle::default();
        board.update(|status| status.backup = Some(BackupStatus::default()));
        assert!(!render(&board.read()).contains("verification"));
        let at = jiff::Timestamp::from_second(1_700_000_000).unwrap();
        let failure = BackupFailure { at, reason: "damaged".to_owned(), text: String::new() };
        let verification = VerificationStatus {
            every_seconds: 86_400,
            at: Some(at),
            whole: Vec::new(),
            damaged: Vec::new(),
            failure: Some(failure),
        };
        board.update(|status| {
            status.backup.get_or_insert_default().verification = Some(verification);
        });
        let text = render(&board.read());
        for line in [
            "muster_agent_backup_verification_interval_seconds 86400.0",
            "muster_agent_backup_verification_timestamp_seconds 1700000000.0",
            "muster_agent_backup_verification_failed{reason=\"damaged\"} 1",
            "muster_agent_backup_verification_failed{reason=\"not_done\"} 0",
        ] {
            assert!(text.contains(&format!("\n{line}\n")), "{line}: {text}");
        }
    }

    async fn ask(at: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(at).await.unwrap();
        let request = format!("{request} HTTP/1.1\r\nHost: x\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn the_listener_serves_metrics_and_nothing_else() {
        let listener = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let at = listener.local_addr().unwrap();
        let (board, stop) = (StatusHandle::default(), CancellationToken::new());
        let serving = tokio::spawn(serve(listener, board.subscribe(), stop.clone()));
        assert!(ask(at, "GET /metrics").await.starts_with("HTTP/1.1 200"));
        assert!(ask(at, "GET /livez").await.ends_with("ok\n"));
        assert!(ask(at, "GET /etc/passwd").await.starts_with("HTTP/1.1 404"));
        assert!(ask(at, "POST /metrics").await.starts_with("HTTP/1.1 404"));
        let long = format!("GET /metrics?{}", "x".repeat(HEAD_LIMIT));
        assert!(!ask(at, &long).await.starts_with("HTTP/1.1 200"));
        stop.cancel();
        serving.await.unwrap();
    }
}
