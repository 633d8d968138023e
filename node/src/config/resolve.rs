//! From what was typed to what it means.

use std::path::PathBuf;
use std::time::Duration;

use super::{
    AutoCompaction, ClusterState, Config, ConfigError, Force, Listed, ListenUrl, LogFormat,
    LogOutput, LowArgs, PeerUrl, Remark, UrlError, auth_token, duration, low::parse_bool,
};
use crate::{
    identity::MemberDocument,
    tls::{TlsFiles, TlsPolicy, TlsVersion, cipher_suite},
};

pub(super) fn resolve(low: &LowArgs, remarks: &mut Vec<Remark>) -> Result<Config, ConfigError> {
    let name = low.value("name").to_owned();
    if name == "default" {
        remarks.push(Remark::DefaultName);
    }
    let listen = |flag| urls(low, flag, ListenUrl::parse_list);
    let reach = |flag| urls(low, flag, PeerUrl::parse_list);
    let advertise_peer_urls = reach("initial-advertise-peer-urls")?;
    let initial_cluster = initial_cluster(low, &name, &advertise_peer_urls)?;
    let data_dir = match low.value("data-dir") {
        "" => PathBuf::from(format!("{name}.etcd")),
        dir => PathBuf::from(dir),
    };
    let document = match low.value("muster-document") {
        "" => None,
        path => Some(MemberDocument::read(path.as_ref())?),
    };
    let force_new_cluster = boolean(low, "force-new-cluster").then(|| Force {
        peer_urls: match low.given("initial-advertise-peer-urls") {
            Some(_) => advertise_peer_urls.iter().map(ToString::to_string).collect(),
            None => Vec::new(),
        },
    });
    Ok(Config {
        data_dir,
        listen_peer_urls: listen("listen-peer-urls")?,
        listen_client_urls: listen("listen-client-urls")?,
        listen_client_http_urls: listen("listen-client-http-urls")?,
        cors: Listed::parse(low.value("cors")),
        host_whitelist: Listed::parse(low.value("host-whitelist")),
        listen_metrics_urls: listen("listen-metrics-urls")?,
        advertise_peer_urls,
        advertise_client_urls: reach("advertise-client-urls")?,
        initial_cluster,
        initial_cluster_state: match low.value("initial-cluster-state") {
            "existing" => ClusterState::Existing,
            _ => ClusterState::New,
        },
        initial_cluster_token: low.value("initial-cluster-token").to_owned(),
        strict_reconfig_check: boolean(low, "strict-reconfig-check"),
        max_learners: uint(low, "max-learners"),
        document,
        force_new_cluster,
        heartbeat: Duration::from_millis(uint(low, "heartbeat-interval")),
        election: Duration::from_millis(uint(low, "election-timeout")),
        snapshot_catchup_entries: uint(low, "snapshot-catchup-entries"),
        quota_backend_bytes: int(low, "quota-backend-bytes"),
        auto_compaction: auto_compaction(low)?,
        max_txn_ops: uint32(low, "max-txn-ops"),
        max_request_bytes: uint32(low, "max-request-bytes"),
        max_concurrent_streams: uint32(low, "max-concurrent-streams"),
        grpc_gateway: boolean(low, "enable-grpc-gateway"),
        keepalive_interval: time(low, "grpc-keepalive-interval"),
        keepalive_timeout: time(low, "grpc-keepalive-timeout"),
        watch_progress_interval: time(low, "watch-progress-notify-interval"),
        bcrypt_cost: bcrypt_cost(low).unwrap_or(DEFAULT_BCRYPT_COST),
        signed_tokens: auth_token::signed_tokens(low)?,
        auth_token_ttl: auth_token_ttl(low),
        compaction_sleep: time(low, "compaction-sleep-interval"),
        corrupt_check: time(low, "corrupt-check-time"),
        client_tls: tls_files(low, ""),
        peer_tls: tls_files(low, "peer-"),
        tls_policy: tls_policy(low)?,
        log_level: log_level(low.value("log-level")),
        log_format: log_format(low.value("log-format")),
        log_outputs: log_outputs(low.value("log-outputs")),
        name,
    })
}

/// etcd's (server/auth/store.go), and that of a token (simple_token.go).
const DEFAULT_BCRYPT_COST: u32 = 10;
const DEFAULT_TOKEN_TTL: Duration = Duration::from_secs(300);
/// A century: a clock can be added to it.
const MAX_TOKEN_SECONDS: u64 = 100 * 366 * 86_400;

/// `--bcrypt-cost`; an error if bcrypt has none like that.
pub(super) fn bcrypt_cost(low: &LowArgs) -> Result<u32, u32> {
    let cost = u32::try_from(uint(low, "bcrypt-cost")).unwrap_or(u32::MAX);
    if (4..=31).contains(&cost) { Ok(cost) } else { Err(cost) }
}

/// `--auth-token-ttl`
fn auth_token_ttl(low: &LowArgs) -> Duration {
    match uint(low, "auth-token-ttl") {
        0 => DEFAULT_TOKEN_TTL,
        seconds => Duration::from_secs(seconds.min(MAX_TOKEN_SECONDS)),
    }
}

fn urls<T>(
    low: &LowArgs,
    flag: &'static str,
    parse: impl Fn(&str) -> Result<Vec<T>, UrlError>,
) -> Result<Vec<T>, ConfigError> {
    match low.value(flag) {
        "" => Ok(Vec::new()),
        text => parse(text).map_err(|source| ConfigError::Url { flag, source }),
    }
}

fn initial_cluster(
    low: &LowArgs,
    name: &str,
    advertised: &[PeerUrl],
) -> Result<Vec<NamedUrls>, ConfigError> {
    match low.value("initial-cluster") {
        "" => Ok(vec![(name.to_owned(), advertised.to_vec())]),
        text => named_urls(text),
    }
}

/// A member's name, and where its peers reach it.
pub(super) type NamedUrls = (String, Vec<PeerUrl>);

/// `name=url,name=url,…`, the URLs of one name gathered, in the order in which names first appear.
pub(super) fn named_urls(text: &str) -> Result<Vec<NamedUrls>, ConfigError> {
    let mut members: Vec<NamedUrls> = Vec::new();
    for part in text.split(',') {
        let part = part.trim();
        // As etcd's parser: a part without "=" is a name without a URL.
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

/// By etcd's rules (`parseCompactionRetention`): a bare number counts hours, or revisions; a duration that
/// is given for revisions counts as many as it has nanoseconds.
fn auto_compaction(low: &LowArgs) -> Result<AutoCompaction, ConfigError> {
    const HOUR_SECONDS: u64 = 60 * 60;
    let by_time = low.value("auto-compaction-mode") == "periodic";
    let text = low.value("auto-compaction-retention");
    let number = text.strip_prefix('+').unwrap_or(text).parse::<u64>().ok();
    let span = match number {
        Some(hours) if by_time => hours.checked_mul(HOUR_SECONDS).map(Duration::from_secs),
        Some(revisions) => Some(Duration::from_nanos(revisions)),
        None if text.is_empty() => Some(Duration::ZERO),
        None => duration::parse(text),
    };
    // What Go's durations hold, and more revisions than there ever will be.
    match span.and_then(|span| i64::try_from(span.as_nanos()).ok().map(|nanos| (span, nanos))) {
        Some((_, 0)) => Ok(AutoCompaction::Never),
        Some((span, _)) if by_time => Ok(AutoCompaction::Periodic(span)),
        Some((_, revisions)) => Ok(AutoCompaction::Revisions(revisions)),
        None => Err(ConfigError::Relation(format!(
            "--auto-compaction-retention={text}: give a number (of hours, or with --auto-compaction-mode=revision of revisions), or a time as 10m or 1h30m"
        ))),
    }
}

fn boolean(low: &LowArgs, flag: &str) -> bool {
    parse_bool(low.value(flag)).expect("its kind was checked")
}

fn int(low: &LowArgs, flag: &str) -> i64 {
    low.value(flag).parse().expect("its kind was checked")
}

fn uint(low: &LowArgs, flag: &str) -> u64 {
    low.value(flag).parse().expect("its kind was checked")
}

fn uint32(low: &LowArgs, flag: &str) -> u32 {
    low.value(flag).parse().expect("its kind was checked")
}

fn time(low: &LowArgs, flag: &str) -> Duration {
    duration::parse(low.value(flag)).expect("its kind was checked")
}

fn list(text: &str) -> Vec<String> {
    text.split(',').map(str::trim).filter(|s| !s.is_empty()).map(str::to_owned).collect()
}

fn tls_files(low: &LowArgs, prefix: &str) -> Option<TlsFiles> {
    let value = |name: &str| low.value(&format!("{prefix}{name}"));
    let path = |name| Some(value(name)).filter(|v| !v.is_empty()).map(PathBuf::from);
    let (cert, key) = (path("cert-file")?, path("key-file")?);
    let client = prefix.is_empty();
    Some(TlsFiles {
        cert,
        key,
        trusted_ca: path("trusted-ca-file"),
        crl: path(if client { "client-crl-file" } else { "crl-file" }),
        allowed_cn: if client { Vec::new() } else { list(value("cert-allowed-cn")) },
        allowed_hostname: list(value(if client {
            "client-cert-allowed-hostname"
        } else {
            "cert-allowed-hostname"
        })),
        names_users: client && boolean(low, "client-cert-auth"),
    })
}

fn tls_policy(low: &LowArgs) -> Result<TlsPolicy, ConfigError> {
    let version = |text| match text {
        "TLS1.2" => TlsVersion::V12,
        _ => TlsVersion::V13,
    };
    let names = list(low.value("cipher-suites"));
    let cipher_suites = names
        .iter()
        .map(|name| cipher_suite(name).ok_or_else(|| ConfigError::CipherSuite(name.clone())))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(TlsPolicy {
        min: version(low.value("tls-min-version")),
        max: version(low.value("tls-max-version")),
        cipher_suites,
    })
}

fn log_level(text: &str) -> tracing::Level {
    match text {
        "debug" => tracing::Level::DEBUG,
        "info" => tracing::Level::INFO,
        "warn" => tracing::Level::WARN,
        _ => tracing::Level::ERROR,
    }
}

fn log_format(text: &str) -> LogFormat {
    match text {
        "console" => LogFormat::Console,
        _ => LogFormat::Json,
    }
}

fn log_outputs(text: &str) -> Vec<LogOutput> {
    list(text)
        .into_iter()
        .map(|output| match output.as_str() {
            "default" | "stderr" | "/dev/stderr" => LogOutput::Stderr,
            "stdout" | "/dev/stdout" => LogOutput::Stdout,
            _ => LogOutput::File(PathBuf::from(output)),
        })
        .collect()
}
