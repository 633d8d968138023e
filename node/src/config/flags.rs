//! The table of all flags: name, kind, default, group, help, and whether a flag has an effect.

/// Kind of a flag's value, which is checked when the flag is parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlagKind {
    /// Any text; its meaning is checked later.
    Text,
    /// A boolean as Go's `strconv.ParseBool` reads it; the value may be omitted.
    Bool,
    /// A signed 64-bit integer, in any form that Go reads.
    Int,
    /// An unsigned 64-bit integer, in any form that Go reads.
    Uint,
    /// An unsigned 32-bit integer, in any form that Go reads.
    Uint32,
    /// A duration in Go's syntax, such as `1m30s`.
    Duration,
    /// One of the listed values.
    OneOf(&'static [&'static str]),
    /// One of the listed values, in upper or lower case.
    OneOfAnyCase(&'static [&'static str]),
    /// Any text, which may be omitted.
    OptionalText,
}

/// Whether a flag has an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlagEffect {
    /// The flag has an effect.
    Effective,
    /// The flag has no effect, and is accepted only to keep scripts working. The text gives the
    /// reason.
    Ignored(&'static str),
    /// The flag is refused if it would have an effect in etcd. The text says what to use instead.
    Unsupported(&'static str),
}

/// One row of the flag table.
#[derive(Debug)]
pub(super) struct Flag {
    /// Name of the flag, without dashes.
    pub name: &'static str,
    pub kind: FlagKind,
    pub default: &'static str,
    /// Placeholder of the value in the help; empty for flags without a value.
    pub value: &'static str,
    pub help: &'static str,
    pub group: &'static str,
    pub effect: FlagEffect,
}

const fn flag(
    group: &'static str,
    name: &'static str,
    kind: FlagKind,
    default: &'static str,
    value: &'static str,
    help: &'static str,
) -> Flag {
    Flag { name, kind, default, value, help, group, effect: FlagEffect::Effective }
}

impl Flag {
    const fn ignored(mut self, because: &'static str) -> Self {
        self.effect = FlagEffect::Ignored(because);
        self
    }

    const fn unsupported(mut self, instead: &'static str) -> Self {
        self.effect = FlagEffect::Unsupported(instead);
        self
    }
}

/// Returns the flag called `name`. The name may also have the prefix `experimental-`, which older
/// versions of etcd used.
pub(super) fn find_flag(name: &str) -> Option<&'static Flag> {
    let exact = |name: &str| FLAGS.iter().find(|flag| flag.name == name);
    exact(name).or_else(|| name.strip_prefix("experimental-").and_then(exact))
}

use FlagKind::{Bool, Duration, Int, OneOf, OneOfAnyCase, OptionalText, Text, Uint, Uint32};

/// Advice to a user who gives the flag of one of etcd's discovery services.
const AGENT_ADVICE: &str =
    "muster-agent meets the other members, and starts this program with --initial-cluster";
/// Advice to a user who gives a second certificate for connections to peers.
const ONE_KEY_ADVICE: &str =
    "members know each other by one key: give --peer-cert-file and --peer-key-file";
const NO_V2_API: &str = "there is no v2 API";
const UNUSED_SINCE_ETCD_2: &str = "it has had no effect since etcd 2";

const MEMBER: &str = "Member";
const CLUSTERING: &str = "Clustering";
const SECURITY: &str = "Security";
const AUTH: &str = "Auth";
const PROFILING_AND_MONITORING: &str = "Profiling and monitoring";
const LOGGING: &str = "Logging";
const FEATURES_AND_FINE_TUNING: &str = "Features and fine tuning";

/// All flags, in the order in which the help lists them.
#[rustfmt::skip]
pub(super) static FLAGS: &[Flag] = &[
    flag(MEMBER, "name", Text, "default", "NAME", "Human-readable name for this member."),
    flag(MEMBER, "data-dir", Text, "", "DIR", "Path to the data directory. Default: NAME.etcd"),
    flag(MEMBER, "wal-dir", Text, "", "DIR", "Path to a separate directory for the log.")
        .ignored("the log lies in the data directory"),
    flag(MEMBER, "snapshot-count", Uint, "10000", "N", "Applied entries between two checkpoints of the store.")
        .ignored("the store decides by itself when to write a checkpoint"),
    flag(MEMBER, "heartbeat-interval", Uint, "100", "MS", "Time between heartbeats, in milliseconds."),
    flag(MEMBER, "election-timeout", Uint, "1000", "MS", "Time without a leader before an election, in milliseconds; at least five heartbeats."),
    flag(MEMBER, "initial-election-tick-advance", Bool, "true", "", "Hold the first election after a start early, once a quorum is connected and no leader is heard: members campaign in turn."),
    flag(MEMBER, "listen-peer-urls", Text, "http://localhost:2380", "URLS", "URLs to listen on for peers."),
    flag(MEMBER, "listen-client-urls", Text, "http://localhost:2379", "URLS", "URLs to listen on for clients: gRPC, health and metrics."),
    flag(MEMBER, "listen-client-http-urls", Text, "", "URLS", "URLs to listen on for JSON and status, apart from gRPC."),
    flag(MEMBER, "max-snapshots", Uint, "5", "N", "Number of snapshot files to keep.")
        .ignored("there is at most one snapshot file, and only while it is being sent"),
    flag(MEMBER, "max-wals", Uint, "5", "N", "Number of log files to keep.")
        .ignored("the log keeps what followers may need, and no more"),
    flag(MEMBER, "memory-mlock", Bool, "false", "", "Lock the process's memory into RAM.")
        .ignored("memory is not locked"),
    flag(MEMBER, "quota-backend-bytes", Int, "0", "BYTES", "Refuse writes, with an alarm, once the store holds more; 0: 2 GiB, negative: no limit."),
    flag(MEMBER, "backend-bbolt-freelist-type", Text, "map", "TYPE", "Type of bbolt's freelist.")
        .ignored("the store is not bbolt"),
    flag(MEMBER, "backend-batch-interval", Duration, "0s", "TIME", "Time between two commits of bbolt.")
        .ignored("the store is not bbolt"),
    flag(MEMBER, "backend-batch-limit", Int, "0", "N", "Operations per commit of bbolt.")
        .ignored("the store is not bbolt"),
    flag(MEMBER, "max-txn-ops", Uint, "128", "N", "Operations that one transaction may hold."),
    flag(MEMBER, "max-request-bytes", Uint, "1572864", "BYTES", "Size that one request may have; at most 10485760 counts."),
    flag(MEMBER, "max-concurrent-streams", Uint32, "4294967295", "N", "Streams that one client connection may have open."),
    flag(MEMBER, "grpc-keepalive-min-time", Duration, "5s", "TIME", "Shortest time between two pings of a client.")
        .ignored("clients' pings are always answered"),
    flag(MEMBER, "grpc-keepalive-interval", Duration, "2h0m0s", "TIME", "Time between two pings to a client; 0: none."),
    flag(MEMBER, "grpc-keepalive-timeout", Duration, "20s", "TIME", "Time that a client has to answer a ping; 0: for ever."),
    flag(MEMBER, "socket-reuse-port", Bool, "false", "", "Set SO_REUSEPORT on listening sockets.")
        .ignored("sockets are bound exclusively"),
    flag(MEMBER, "socket-reuse-address", Bool, "false", "", "Set SO_REUSEADDR on listening sockets.")
        .ignored("it is always set"),
    flag(MEMBER, "enable-grpc-gateway", Bool, "true", "", "Serve the API as JSON, too, at /v3/."),
    flag(MEMBER, "raft-read-timeout", Duration, "5s", "TIME", "Read time-out of peer streams.")
        .ignored("silent peer streams are closed after 5 s"),
    flag(MEMBER, "raft-write-timeout", Duration, "5s", "TIME", "Write time-out of peer streams.")
        .ignored("silent peer streams are closed after 5 s"),
    flag(CLUSTERING, "initial-advertise-peer-urls", Text, "http://localhost:2380", "URLS", "This member's peer URLs, at which the other members reach it."),
    flag(CLUSTERING, "initial-cluster", Text, "", "NAME=URL,...", "The first members: name and peer URL of each; used by the first start alone. Default: this member alone."),
    flag(CLUSTERING, "initial-cluster-state", OneOf(&["new", "existing"]), "new", "STATE", "\"new\" to begin a cluster, \"existing\" to join one that has added this member."),
    flag(CLUSTERING, "initial-cluster-token", Text, "etcd-cluster", "TOKEN", "Token that makes the ids of this cluster different from all others'."),
    flag(CLUSTERING, "advertise-client-urls", Text, "http://localhost:2379", "URLS", "This member's client URLs, at which clients reach it."),
    flag(CLUSTERING, "muster-document", Text, "", "FILE", "File that binds each first member to its incarnation and key (JSON; written by muster-agent)."),
    flag(CLUSTERING, "strict-reconfig-check", Bool, "true", "", "Refuse membership changes that would endanger quorum."),
    flag(CLUSTERING, "pre-vote", Bool, "true", "", "Ask before disturbing a cluster with an election.")
        .ignored("pre-vote is always on"),
    flag(CLUSTERING, "auto-compaction-mode", OneOf(&["periodic", "revision"]), "periodic", "MODE", "Compact by time (periodic), or by the number of revisions (revision)."),
    flag(CLUSTERING, "auto-compaction-retention", Text, "0", "N", "History that the leader keeps as it compacts: hours, or a time (10m), or revisions; 0: it compacts nothing."),
    flag(CLUSTERING, "max-learners", Uint, "1", "N", "Learners that may be in the cluster at once."),
    flag(CLUSTERING, "discovery", Text, "", "URL", "Discovery service, protocol v2.")
        .unsupported(AGENT_ADVICE),
    flag(CLUSTERING, "discovery-fallback", OneOf(&["exit", "proxy"]), "exit", "WHAT", "Behaviour if the discovery service fails.")
        .ignored("without discovery there is nothing to fall back from"),
    flag(CLUSTERING, "discovery-proxy", Text, "", "URL", "Proxy towards the discovery service.")
        .ignored("discovery is muster-agent's part"),
    flag(CLUSTERING, "discovery-srv", Text, "", "DOMAIN", "Domain whose SRV records name the members.")
        .unsupported(AGENT_ADVICE),
    flag(CLUSTERING, "discovery-srv-name", Text, "", "SUFFIX", "Suffix of the SRV records' service name.")
        .ignored("SRV records are not read"),
    flag(CLUSTERING, "discovery-token", Text, "", "TOKEN", "Discovery service, protocol v3.")
        .unsupported(AGENT_ADVICE),
    flag(CLUSTERING, "discovery-endpoints", Text, "", "URLS", "Discovery service, protocol v3.")
        .unsupported(AGENT_ADVICE),
    flag(CLUSTERING, "discovery-dial-timeout", Duration, "2s", "VALUE", "Setting of the discovery client.")
        .ignored("discovery is muster-agent's part"),
    flag(CLUSTERING, "discovery-request-timeout", Duration, "5s", "VALUE", "Setting of the discovery client.")
        .ignored("discovery is muster-agent's part"),
    flag(CLUSTERING, "discovery-keepalive-time", Duration, "2s", "VALUE", "Setting of the discovery client.")
        .ignored("discovery is muster-agent's part"),
    flag(CLUSTERING, "discovery-keepalive-timeout", Duration, "6s", "VALUE", "Setting of the discovery client.")
        .ignored("discovery is muster-agent's part"),
    flag(CLUSTERING, "discovery-insecure-transport", Bool, "true", "", "Setting of the discovery client.")
        .ignored("discovery is muster-agent's part"),
    flag(CLUSTERING, "discovery-insecure-skip-tls-verify", Bool, "false", "", "Setting of the discovery client.")
        .ignored("discovery is muster-agent's part"),
    flag(CLUSTERING, "discovery-cert", Text, "", "VALUE", "Setting of the discovery client.")
        .ignored("discovery is muster-agent's part"),
    flag(CLUSTERING, "discovery-key", Text, "", "VALUE", "Setting of the discovery client.")
        .ignored("discovery is muster-agent's part"),
    flag(CLUSTERING, "discovery-cacert", Text, "", "VALUE", "Setting of the discovery client.")
        .ignored("discovery is muster-agent's part"),
    flag(CLUSTERING, "discovery-user", Text, "", "VALUE", "Setting of the discovery client.")
        .ignored("discovery is muster-agent's part"),
    flag(CLUSTERING, "discovery-password", Text, "", "VALUE", "Setting of the discovery client.")
        .ignored("discovery is muster-agent's part"),
    flag(CLUSTERING, "v2-deprecation", Text, "write-only", "PHASE", "Phase of the v2 API's deprecation.")
        .ignored(NO_V2_API),
    flag(SECURITY, "cert-file", Text, "", "FILE", "Certificate of the client listener, PEM."),
    flag(SECURITY, "key-file", Text, "", "FILE", "Private key of the client listener's certificate, PEM."),
    flag(SECURITY, "client-cert-auth", Bool, "false", "", "Require a certificate of the trusted CA from clients."),
    flag(SECURITY, "trusted-ca-file", Text, "", "FILE", "CA of clients' certificates, PEM."),
    flag(SECURITY, "client-cert-file", Text, "", "FILE", "Certificate of the server as a client of itself, PEM.")
        .ignored("this program is no client of its own"),
    flag(SECURITY, "client-key-file", Text, "", "FILE", "Private key of the server's client certificate, PEM.")
        .ignored("this program is no client of its own"),
    flag(SECURITY, "client-crl-file", Text, "", "FILE", "Revocation list (CRL) of clients' certificates, PEM or DER."),
    flag(SECURITY, "client-cert-allowed-hostname", Text, "", "NAMES", "Names that clients' certificates may have."),
    flag(SECURITY, "auto-tls", Bool, "false", "", "Serve clients on a self-signed certificate.")
        .unsupported("give --cert-file and --key-file"),
    flag(SECURITY, "peer-cert-file", Text, "", "FILE", "Certificate towards peers, PEM."),
    flag(SECURITY, "peer-key-file", Text, "", "FILE", "Private key of the certificate towards peers, PEM."),
    flag(SECURITY, "peer-client-cert-auth", Bool, "false", "", "Require a certificate of the trusted peer CA from peers."),
    flag(SECURITY, "peer-trusted-ca-file", Text, "", "FILE", "CA of peers' certificates, PEM."),
    flag(SECURITY, "peer-client-cert-file", Text, "", "FILE", "Another certificate for connections to peers, PEM.")
        .unsupported(ONE_KEY_ADVICE),
    flag(SECURITY, "peer-client-key-file", Text, "", "FILE", "Private key of the other certificate for connections to peers, PEM.")
        .unsupported(ONE_KEY_ADVICE),
    flag(SECURITY, "peer-crl-file", Text, "", "FILE", "Revocation list (CRL) of peers' certificates, PEM or DER."),
    flag(SECURITY, "peer-cert-allowed-cn", Text, "", "NAMES", "Common names that peers' certificates may have."),
    flag(SECURITY, "peer-cert-allowed-hostname", Text, "", "NAMES", "Names that peers' certificates may have."),
    flag(SECURITY, "peer-auto-tls", Bool, "false", "", "Talk to peers on self-signed certificates.")
        .unsupported("give --peer-cert-file, --peer-key-file and --peer-trusted-ca-file"),
    flag(SECURITY, "peer-skip-client-san-verification", Bool, "false", "", "Skip the check of a peer's address against its certificate.")
        .ignored("a peer's address is never taken as its identity"),
    flag(SECURITY, "self-signed-cert-validity", Uint, "1", "YEARS", "Validity of self-signed certificates.")
        .ignored("no certificates are made here"),
    flag(SECURITY, "cipher-suites", Text, "", "NAMES", "TLS 1.2 cipher suites to offer to clients, by Go's names."),
    flag(SECURITY, "tls-min-version", OneOf(&["", "TLS1.2", "TLS1.3"]), "TLS1.2", "VERSION", "Lowest TLS version for clients; peers speak 1.3."),
    flag(SECURITY, "tls-max-version", OneOf(&["", "TLS1.2", "TLS1.3"]), "", "VERSION", "Highest TLS version for clients. Default: the highest known."),
    flag(SECURITY, "cors", Text, "*", "ORIGINS", "Origins whose pages browsers may let call the HTTP API; *: all."),
    flag(SECURITY, "host-whitelist", Text, "*", "HOSTS", "Names by which a server without TLS may be called over HTTP; *: all."),
    flag(AUTH, "auth-token", Text, "simple", "SPEC", "Auth tokens: simple, or jwt,sign-method=RS256,priv-key=FILE,pub-key=FILE,ttl=5m; equal on all members."),
    flag(AUTH, "bcrypt-cost", Uint, "10", "N", "Cost of password hashes, 4 to 31."),
    flag(AUTH, "auth-token-ttl", Uint, "300", "SECONDS", "Lifetime of a simple auth token after its last use."),
    flag(PROFILING_AND_MONITORING, "enable-pprof", Bool, "false", "", "Serve profiles of the Go runtime.")
        .ignored("this is not a Go program"),
    flag(PROFILING_AND_MONITORING, "metrics", Text, "basic", "LEVEL", "Level of detail of /metrics.")
        .ignored("all metrics are always shown"),
    flag(PROFILING_AND_MONITORING, "listen-metrics-urls", Text, "", "URLS", "URLs to serve /metrics and health on, besides the client URLs."),
    flag(PROFILING_AND_MONITORING, "enable-distributed-tracing", Bool, "false", "", "Export traces of requests.")
        .ignored("traces are not exported"),
    flag(PROFILING_AND_MONITORING, "distributed-tracing-address", Text, "localhost:4317", "VALUE", "Setting of the export of traces.")
        .ignored("traces are not exported"),
    flag(PROFILING_AND_MONITORING, "distributed-tracing-service-name", Text, "etcd", "VALUE", "Setting of the export of traces.")
        .ignored("traces are not exported"),
    flag(PROFILING_AND_MONITORING, "distributed-tracing-instance-id", Text, "", "VALUE", "Setting of the export of traces.")
        .ignored("traces are not exported"),
    flag(PROFILING_AND_MONITORING, "distributed-tracing-sampling-rate", Int, "0", "VALUE", "Setting of the export of traces.")
        .ignored("traces are not exported"),
    flag(LOGGING, "logger", OneOf(&["zap"]), "zap", "NAME", "Name of the logger.")
        .ignored("there is one logger"),
    flag(LOGGING, "log-outputs", Text, "default", "OUTPUTS", "Outputs of the log: stderr, stdout or files, separated by commas; default: stderr."),
    flag(LOGGING, "log-level", OneOfAnyCase(&["debug", "info", "warn", "warning", "error", "dpanic", "panic", "fatal", ""]), "info", "LEVEL", "Lowest level that is logged."),
    flag(LOGGING, "log-format", OneOf(&["json", "console", ""]), "json", "FORMAT", "Format of log lines: json (one object per line), or console (for people)."),
    flag(LOGGING, "enable-log-rotation", Bool, "false", "", "Rotate the log files.")
        .ignored("a log rotator does that"),
    flag(LOGGING, "log-rotation-config-json", Text, "", "JSON", "Settings of the log files' rotation.")
        .ignored("a log rotator does that"),
    flag(LOGGING, "warning-apply-duration", Duration, "100ms", "TIME", "Log a warning when applying a request takes longer than this.")
        .ignored("see the metrics of the apply thread"),
    flag(LOGGING, "warning-unary-request-duration", Duration, "300ms", "TIME", "Log a warning when a request takes longer than this.")
        .ignored("slow requests are not logged yet"),
    flag(FEATURES_AND_FINE_TUNING, "feature-gates", Text, "", "NAME=BOOL,...", "Features to turn on or off.")
        .ignored("features have no gates here"),
    flag(FEATURES_AND_FINE_TUNING, "initial-corrupt-check", Bool, "false", "", "Compare the data with the peers' before serving.")
        .ignored("members compare their data all the time, and soon after one has come back"),
    flag(FEATURES_AND_FINE_TUNING, "corrupt-check-time", Duration, "0s", "TIME", "Time between two comparisons of all members' data; 0: 30 s. The comparison can't be turned off."),
    flag(FEATURES_AND_FINE_TUNING, "compact-hash-check-enabled", Bool, "false", "", "Compare hashes of compactions.")
        .ignored("each comparison of the members' data looks at them as well"),
    flag(FEATURES_AND_FINE_TUNING, "compact-hash-check-time", Duration, "1m0s", "TIME", "Time between two comparisons of compactions.")
        .ignored("each comparison of the members' data looks at them as well"),
    flag(FEATURES_AND_FINE_TUNING, "compaction-batch-limit", Int, "1000", "N", "Revisions removed at once by a compaction.")
        .ignored("the store chooses its own steps"),
    flag(FEATURES_AND_FINE_TUNING, "compaction-sleep-interval", Duration, "10ms", "TIME", "Pause of a compaction between two batches."),
    flag(FEATURES_AND_FINE_TUNING, "watch-progress-notify-interval", Duration, "10m0s", "TIME", "Time between two progress notices to a silent watch."),
    flag(FEATURES_AND_FINE_TUNING, "snapshot-catchup-entries", Uint, "5000", "N", "Entries that the log keeps for slow followers."),
    flag(FEATURES_AND_FINE_TUNING, "bootstrap-defrag-threshold-megabytes", Uint, "0", "MB", "Defragment at the start if that frees this much.")
        .ignored("the store reuses its space"),
    flag(FEATURES_AND_FINE_TUNING, "enable-lease-checkpoint", Bool, "false", "", "Checkpoint leases' remaining times.")
        .ignored("the log always notes what leases have left"),
    flag(FEATURES_AND_FINE_TUNING, "enable-lease-checkpoint-persist", Bool, "false", "", "Keep checkpoints of leases.")
        .ignored("the log always notes what leases have left"),
    flag(FEATURES_AND_FINE_TUNING, "txn-mode-write-with-shared-buffer", Bool, "true", "", "Let transactions share a buffer.")
        .ignored("the store is not bbolt"),
    flag(FEATURES_AND_FINE_TUNING, "stop-grpc-service-on-defrag", Bool, "false", "", "Report not serving during defragmentation.")
        .ignored("defragmentation does not block"),
    flag(FEATURES_AND_FINE_TUNING, "downgrade-check-time", Duration, "5s", "TIME", "Time between two checks of the downgrade status.")
        .ignored("there are no downgrades yet"),
    flag(FEATURES_AND_FINE_TUNING, "memory-mlock-limit", Uint, "0", "BYTES", "Limit of locked memory.")
        .ignored("memory is not locked"),
    flag(FEATURES_AND_FINE_TUNING, "set-member-localaddr", Bool, "false", "", "Dial peers from the advertised address.")
        .ignored("the route decides"),
    flag(FEATURES_AND_FINE_TUNING, "unsafe-no-fsync", Bool, "false", "", "Skip fsync: a power failure may lose acknowledged writes.")
        .ignored("every acknowledged write is synced"),
    flag(FEATURES_AND_FINE_TUNING, "force-new-cluster", Bool, "false", "", "After the permanent loss of the other members: make a new cluster of one from this member's data. Acts once."),
    flag(FEATURES_AND_FINE_TUNING, "config-file", Text, "", "FILE", "Take all of the configuration from a file, in YAML or JSON with etcd's names; other flags and variables are ignored then."),
    flag(FEATURES_AND_FINE_TUNING, "enable-v2", Bool, "false", "", "Serve the v2 API.")
        .ignored(NO_V2_API),
    flag(FEATURES_AND_FINE_TUNING, "enable-v2v3", Text, "", "PREFIX", "Serve the v2 API on the v3 store.")
        .ignored(NO_V2_API),
    flag(FEATURES_AND_FINE_TUNING, "proxy", OneOf(&["off", "readonly", "on"]), "off", "MODE", "Be a proxy of the v2 API.")
        .unsupported("etcd's grpc-proxy is a proxy for this program, too"),
    flag(FEATURES_AND_FINE_TUNING, "proxy-failure-wait", Uint, "5000", "MS", "Setting of the v2 proxy.")
        .ignored(NO_V2_API),
    flag(FEATURES_AND_FINE_TUNING, "proxy-refresh-interval", Uint, "30000", "MS", "Setting of the v2 proxy.")
        .ignored(NO_V2_API),
    flag(FEATURES_AND_FINE_TUNING, "proxy-dial-timeout", Uint, "1000", "MS", "Setting of the v2 proxy.")
        .ignored(NO_V2_API),
    flag(FEATURES_AND_FINE_TUNING, "proxy-write-timeout", Uint, "5000", "MS", "Setting of the v2 proxy.")
        .ignored(NO_V2_API),
    flag(FEATURES_AND_FINE_TUNING, "proxy-read-timeout", Uint, "0", "MS", "Setting of the v2 proxy.")
        .ignored(NO_V2_API),
    obsolete_flag("cluster-active-size"),
    obsolete_flag("cluster-remove-delay"),
    obsolete_flag("cluster-sync-interval"),
    obsolete_flag("config"),
    obsolete_flag("force"),
    obsolete_flag("max-result-buffer"),
    obsolete_flag("max-retry-attempts"),
    obsolete_flag("peer-heartbeat-interval"),
    obsolete_flag("peer-election-timeout"),
    obsolete_flag("retry-interval"),
    obsolete_flag("snapshot"),
    obsolete_flag("v"),
    obsolete_flag("vv"),
];

/// Describes a flag of etcd 0.4. Like etcd, this node accepts any value and ignores it.
const fn obsolete_flag(name: &'static str) -> Flag {
    flag(FEATURES_AND_FINE_TUNING, name, OptionalText, "", "", "Flag of etcd 0.4.")
        .ignored(UNUSED_SINCE_ETCD_2)
}

#[cfg(test)]
mod tests {
    use super::super::duration;
    use super::*;

    #[test]
    fn every_flag_is_listed_once_and_has_a_help_text() {
        for (n, flag) in FLAGS.iter().enumerate() {
            assert!(FLAGS[..n].iter().all(|other| other.name != flag.name), "{}", flag.name);
            assert!(!flag.help.is_empty(), "{}", flag.name);
            let is_optional = matches!(flag.kind, Bool | OptionalText);
            assert_eq!(flag.value.is_empty(), is_optional, "{}", flag.name);
        }
    }

    #[test]
    fn every_flag_of_etcd_is_known_and_has_its_default() {
        for line in include_str!("etcd_flags.txt").lines().filter(|line| !line.starts_with('#')) {
            let (name, default) = line.split_once(' ').unwrap_or((line, ""));
            let flag = find_flag(name).unwrap_or_else(|| panic!("{name} is missing"));
            let same = match flag.kind {
                _ if default == "?" => true,
                Duration => duration::parse(default) == duration::parse(flag.default),
                _ => default == flag.default,
            };
            assert!(same, "{name}: {:?} is not {default:?}", flag.default);
        }
    }

    #[test]
    fn every_duration_is_one_in_a_configuration_file_too() {
        let durations = FLAGS.iter().filter(|flag| flag.kind == Duration);
        for flag in durations.filter(|flag| !flag.name.starts_with("discovery-")) {
            assert!(node_etcd_config::DURATION_FLAGS.contains(&flag.name), "{}", flag.name);
        }
    }

    #[test]
    fn every_flag_that_etcd_had_in_3_5_and_3_6_is_known() {
        let lines = include_str!("etcd_flags_before.txt").lines();
        for name in lines.filter(|line| !line.starts_with('#')) {
            assert!(find_flag(name).is_some(), "{name} is missing");
        }
    }
}
