//! Converts the values as typed to a typed configuration.

use std::path::PathBuf;
use std::time::Duration;

use node_engine::{driver::MAX_PROPOSAL_BYTES, tls::TlsPolicy};
use node_etcd_config::integers::{parse_int, parse_uint};
use node_state::identity::MemberDocument;

use super::{
    AllowedNames, AutoCompaction, ClusterState, Config, ConfigError, ForceNewCluster, ListenUrl,
    LogLineFormat, LogOutput, PeerUrl, RawFlags, Remark, UrlError, auth_token, duration,
    raw_flags::parse_bool, tls,
};

pub(super) fn resolve(flags: &RawFlags, remarks: &mut Vec<Remark>) -> Result<Config, ConfigError> {
    let name = flags.value("name").to_owned();
    if name == "default" {
        remarks.push(Remark::DefaultName);
    }
    let listen = |flag| urls(flags, flag, ListenUrl::parse_list);
    let reach = |flag| urls(flags, flag, PeerUrl::parse_list);
    let advertise_peer_urls = reach("initial-advertise-peer-urls")?;
    let initial_cluster = initial_cluster(flags, &name, &advertise_peer_urls)?;
    let force_new_cluster = boolean(flags, "force-new-cluster").then(|| ForceNewCluster {
        peer_urls: match flags.given("initial-advertise-peer-urls") {
            Some(_) => advertise_peer_urls.iter().map(ToString::to_string).collect(),
            None => Vec::new(),
        },
    });
    let mut config = Config {
        data_dir: data_dir(flags, &name),
        listen_peer_urls: listen("listen-peer-urls")?,
        listen_client_urls: listen("listen-client-urls")?,
        listen_client_http_urls: listen("listen-client-http-urls")?,
        cors: AllowedNames::parse(flags.value("cors")),
        host_whitelist: AllowedNames::parse(flags.value("host-whitelist")),
        listen_metrics_urls: listen("listen-metrics-urls")?,
        advertise_peer_urls,
        advertise_client_urls: reach("advertise-client-urls")?,
        initial_cluster,
        initial_cluster_state: match flags.value("initial-cluster-state") {
            "existing" => ClusterState::Existing,
            _ => ClusterState::New,
        },
        initial_cluster_token: flags.value("initial-cluster-token").to_owned(),
        strict_reconfig_check: boolean(flags, "strict-reconfig-check"),
        max_learners: uint(flags, "max-learners"),
        document: member_document(flags)?,
        force_new_cluster,
        heartbeat: Duration::from_millis(uint(flags, "heartbeat-interval")),
        election_timeout: Duration::from_millis(uint(flags, "election-timeout")),
        hasten_first_election: boolean(flags, "initial-election-tick-advance"),
        snapshot_catchup_entries: uint(flags, "snapshot-catchup-entries"),
        quota_backend_bytes: int(flags, "quota-backend-bytes"),
        auto_compaction: auto_compaction(flags)?,
        max_txn_ops: uint32(flags, "max-txn-ops"),
        max_request_bytes: max_request_bytes(flags, remarks),
        max_concurrent_streams: match uint32(flags, "max-concurrent-streams") {
            // As in etcd's gRPC server, 0 means no limit.
            0 => u32::MAX,
            streams => streams,
        },
        grpc_gateway: boolean(flags, "enable-grpc-gateway"),
        keepalive_interval: time(flags, "grpc-keepalive-interval"),
        keepalive_timeout: time(flags, "grpc-keepalive-timeout"),
        watch_progress_interval: time(flags, "watch-progress-notify-interval"),
        bcrypt_cost: bcrypt_cost(flags).unwrap_or(DEFAULT_BCRYPT_COST),
        signed_tokens: auth_token::signed_tokens(flags)?,
        auth_token_ttl: auth_token_ttl(flags),
        compaction_sleep: time(flags, "compaction-sleep-interval"),
        corrupt_check_interval: time(flags, "corrupt-check-time"),
        client_tls: None,
        peer_tls: None,
        tls_policy: TlsPolicy::default(),
        log_level: log_level(flags.value("log-level")),
        log_format: log_format(flags.value("log-format")),
        log_outputs: log_outputs(flags.value("log-outputs")),
        name,
    };
    config.tls_policy = tls::policy(flags, &config, remarks)?;
    config.client_tls = tls::client_files(flags, &config, remarks);
    config.peer_tls = tls::peer_files(flags, &config, remarks);
    Ok(config)
}

/// Returns the value of `--data-dir`. As in etcd, the default is the member's name followed by
/// `.etcd`.
fn data_dir(flags: &RawFlags, name: &str) -> PathBuf {
    match flags.value("data-dir") {
        "" => PathBuf::from(format!("{name}.etcd")),
        dir => PathBuf::from(dir),
    }
}

/// Reads the file of `--muster-document`, if that flag is given.
fn member_document(flags: &RawFlags) -> Result<Option<MemberDocument>, ConfigError> {
    Ok(match flags.value("muster-document") {
        "" => None,
        path => Some(MemberDocument::read(path.as_ref())?),
    })
}

/// Returns the value of `--max-request-bytes`. It is limited to the size of the largest log entry,
/// and a remark reports that.
fn max_request_bytes(flags: &RawFlags, remarks: &mut Vec<Remark>) -> u32 {
    let given = uint(flags, "max-request-bytes");
    let limit = u32::try_from(MAX_PROPOSAL_BYTES).expect("the log's limit is a few megabytes");
    u32::try_from(given).ok().filter(|bytes| *bytes <= limit).unwrap_or_else(|| {
        remarks.push(Remark::LargeRequests { given, limit });
        limit
    })
}

/// Default bcrypt cost of etcd (server/auth/store.go).
const DEFAULT_BCRYPT_COST: u32 = 10;
/// Default lifetime of a simple token in etcd (simple_token.go).
const DEFAULT_TOKEN_TTL: Duration = Duration::from_secs(300);
/// Maximum lifetime of a simple token: 100 years. So adding it to a time can't overflow.
const MAX_TOKEN_SECONDS: u64 = 100 * 366 * 86_400;

/// Returns the value of `--bcrypt-cost`. If bcrypt doesn't allow the value, the error is that
/// value.
pub(super) fn bcrypt_cost(flags: &RawFlags) -> Result<u32, u32> {
    let cost = u32::try_from(uint(flags, "bcrypt-cost")).unwrap_or(u32::MAX);
    if (4..=31).contains(&cost) { Ok(cost) } else { Err(cost) }
}

/// Returns the value of `--auth-token-ttl`; 0 means etcd's default.
fn auth_token_ttl(flags: &RawFlags) -> Duration {
    match uint(flags, "auth-token-ttl") {
        0 => DEFAULT_TOKEN_TTL,
        seconds => Duration::from_secs(seconds.min(MAX_TOKEN_SECONDS)),
    }
}

fn urls<T>(
    flags: &RawFlags,
    flag: &'static str,
    parse: impl Fn(&str) -> Result<Vec<T>, UrlError>,
) -> Result<Vec<T>, ConfigError> {
    // As in etcd, an empty list means the flag's default.
    let text = match flags.value(flag) {
        "" => flags.default_of(flag),
        text => text,
    };
    match text {
        "" => Ok(Vec::new()),
        text => parse(text).map_err(|source| ConfigError::Url { flag, source }),
    }
}

fn initial_cluster(
    flags: &RawFlags,
    name: &str,
    advertised: &[PeerUrl],
) -> Result<Vec<NamedUrls>, ConfigError> {
    match flags.value("initial-cluster") {
        "" => Ok(vec![(name.to_owned(), advertised.to_vec())]),
        text => named_urls(text),
    }
}

/// A member's name and its peer URLs.
pub(super) type NamedUrls = (String, Vec<PeerUrl>);

/// Parses `name=url,name=url,…`. A name with several URLs occurs several times. Members are
/// returned in the order in which their names first occur.
pub(super) fn named_urls(text: &str) -> Result<Vec<NamedUrls>, ConfigError> {
    let mut members: Vec<NamedUrls> = Vec::new();
    // As in etcd, an empty element between two commas is ignored.
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        // As in etcd, an element without `=` is a name without a URL.
        let (name, url) = part.split_once('=').unwrap_or((part, ""));
        if url.is_empty() {
            return Err(ConfigError::EmptyUrl(name.to_owned()));
        }
        let url = PeerUrl::parse(url)
            .map_err(|source| ConfigError::Url { flag: "initial-cluster", source })?;
        match members.iter_mut().find(|(known, _)| known == name) {
            Some((_, urls)) => urls.push(url),
            None => members.push((name.to_owned(), vec![url])),
        }
    }
    Ok(members)
}

/// Returns the settings of automatic compaction, by etcd's rules (`parseCompactionRetention`). In
/// mode `periodic`, a plain number is a number of hours. In mode `revision`, it is a number of
/// revisions, and a duration counts one revision per nanosecond.
fn auto_compaction(flags: &RawFlags) -> Result<AutoCompaction, ConfigError> {
    const HOUR_SECONDS: u64 = 60 * 60;
    let by_time = flags.value("auto-compaction-mode") == "periodic";
    let text = flags.value("auto-compaction-retention");
    let number = text.strip_prefix('+').unwrap_or(text).parse::<u64>().ok();
    let span = match number {
        Some(hours) if by_time => hours.checked_mul(HOUR_SECONDS).map(Duration::from_secs),
        Some(revisions) => Some(Duration::from_nanos(revisions)),
        None if text.is_empty() => Some(Duration::ZERO),
        None => duration::parse(text),
    };
    // The retention must fit into the 64-bit nanoseconds of a Go duration.
    match span.and_then(|span| i64::try_from(span.as_nanos()).ok().map(|nanos| (span, nanos))) {
        Some((_, 0)) => Ok(AutoCompaction::Never),
        Some((span, _)) if by_time => Ok(AutoCompaction::Periodic(span)),
        Some((_, revisions)) => Ok(AutoCompaction::Revisions(revisions)),
        None => Err(ConfigError::Relation(format!(
            "--auto-compaction-retention={text}: give a number (of hours, or with --auto-compaction-mode=revision of revisions), or a time as 10m or 1h30m"
        ))),
    }
}

pub(super) fn boolean(flags: &RawFlags, flag: &str) -> bool {
    parse_bool(flags.value(flag)).expect("its kind was checked")
}

fn int(flags: &RawFlags, flag: &str) -> i64 {
    parse_int(flags.value(flag)).expect("its kind was checked")
}

fn uint(flags: &RawFlags, flag: &str) -> u64 {
    parse_uint(flags.value(flag)).expect("its kind was checked")
}

/// Returns the value of a flag. A value above the largest `u32` becomes the largest `u32`.
fn uint32(flags: &RawFlags, flag: &str) -> u32 {
    u32::try_from(uint(flags, flag)).unwrap_or(u32::MAX)
}

fn time(flags: &RawFlags, flag: &str) -> Duration {
    duration::parse(flags.value(flag)).expect("its kind was checked")
}

pub(super) fn list(text: &str) -> Vec<String> {
    text.split(',').map(str::trim).filter(|s| !s.is_empty()).map(str::to_owned).collect()
}

fn log_level(text: &str) -> tracing::Level {
    match text.to_ascii_lowercase().as_str() {
        "debug" => tracing::Level::DEBUG,
        "info" | "" => tracing::Level::INFO,
        "warn" | "warning" => tracing::Level::WARN,
        _ => tracing::Level::ERROR,
    }
}

fn log_format(text: &str) -> LogLineFormat {
    match text {
        "console" => LogLineFormat::Console,
        _ => LogLineFormat::Json,
    }
}

fn log_outputs(text: &str) -> Vec<LogOutput> {
    let named = if text.is_empty() { "default" } else { text };
    list(named)
        .into_iter()
        .map(|output| match output.as_str() {
            // Under systemd, standard error leads to the journal. So the node needs no connection
            // of its own to the journal.
            "default" | "stderr" | "/dev/stderr" | "systemd/journal" => LogOutput::Stderr,
            "stdout" | "/dev/stdout" => LogOutput::Stdout,
            _ => LogOutput::File(PathBuf::from(output)),
        })
        .collect()
}
