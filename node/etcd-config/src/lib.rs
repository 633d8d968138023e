//! etcd's configuration file (`--config-file`): the part of YAML that it uses, its numbers, and the
//! flags that the keys of its sections set.
//!
//! The node reads such a file as its own configuration. The agent reads the file of a running etcd,
//! which it will run with flags. Both decide themselves which flags exist, and what to do with an
//! unknown key.

pub mod integers;
pub mod yaml;

/// Sections of the configuration file. For each section: its keys, and the flag that each key sets
/// (`configYAML` in server/embed/config.go).
pub const SECTIONS: &[(&str, &[(&str, &str)])] = &[
    (
        "client-transport-security",
        &[
            ("cert-file", "cert-file"),
            ("key-file", "key-file"),
            ("client-cert-file", "client-cert-file"),
            ("client-key-file", "client-key-file"),
            ("client-cert-auth", "client-cert-auth"),
            ("trusted-ca-file", "trusted-ca-file"),
            ("auto-tls", "auto-tls"),
            ("allowed-hostname", "client-cert-allowed-hostname"),
        ],
    ),
    (
        "peer-transport-security",
        &[
            ("cert-file", "peer-cert-file"),
            ("key-file", "peer-key-file"),
            ("client-cert-file", "peer-client-cert-file"),
            ("client-key-file", "peer-client-key-file"),
            ("client-cert-auth", "peer-client-cert-auth"),
            ("trusted-ca-file", "peer-trusted-ca-file"),
            ("auto-tls", "peer-auto-tls"),
            ("allowed-cn", "peer-cert-allowed-cn"),
            ("allowed-hostname", "peer-cert-allowed-hostname"),
            ("skip-client-san-verification", "peer-skip-client-san-verification"),
        ],
    ),
    (
        "socket-options",
        &[("reuse-port", "socket-reuse-port"), ("reuse-address", "socket-reuse-address")],
    ),
    ("discovery-config", &[("token", "discovery-token")]),
];

/// Top-level keys whose flag has another name than the key: key and flag (`Config` in
/// server/embed/config.go of etcd 3.5 and 3.6).
pub const RENAMED_KEYS: &[(&str, &str)] =
    &[("experimental-snapshot-catch-up-entries", "experimental-snapshot-catchup-entries")];

/// Returns the name of the flag that a key outside the sections sets.
pub fn flag_of_key(key: &str) -> &str {
    let renamed = RENAMED_KEYS.iter().find(|(known, _)| *known == key);
    renamed.map_or(key, |(_, flag)| *flag)
}

/// Section and key of the common names that clients' certificates may have. etcd obeys the key,
/// though no flag sets it. A program that ignored the key would serve more clients than etcd does.
pub const CLIENT_ALLOWED_CN: (&str, &str) = ("client-transport-security", "allowed-cn");

/// Flags for durations, without the prefix `experimental-`. In the file, their value is a number of
/// nanoseconds.
pub const DURATION_FLAGS: &[&str] = &[
    "backend-batch-interval",
    "compact-hash-check-time",
    "compaction-sleep-interval",
    "corrupt-check-time",
    "downgrade-check-time",
    "grpc-keepalive-interval",
    "grpc-keepalive-min-time",
    "grpc-keepalive-timeout",
    "raft-read-timeout",
    "raft-write-timeout",
    "wait-cluster-ready-timeout",
    "warning-apply-duration",
    "warning-unary-request-duration",
    "watch-progress-notify-interval",
];
