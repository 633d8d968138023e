//! The node's configuration: etcd's flags and `ETCD_*` variables, with etcd's rules.
//!
//! `RawFlags` holds a string for each flag, as the user typed it. A `Config` is made from these
//! strings. It has types and defaults, and relations between settings are checked. The command line
//! takes precedence over the environment. If a flag is given twice, the last value counts.
//!
//! `flags::FLAGS` is the one table of all flags. Some flags have no effect, and are accepted only
//! to keep scripts working. The table marks them, and the node logs a remark when one is given.
//!
//! Sources: etcd `server/etcdmain/config.go`, `server/embed/config.go`, `pkg/flags`.

mod auth_token;
mod bootstrap;
mod describe;
mod duration;
mod file;
mod flags;
mod help;
mod raw_flags;
mod resolve;
mod tls;
mod unsupported;
mod urls;
mod validate;

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use node_api::{http::AllowedNames, rpc::AutoCompaction};
use node_engine::tls::{TlsFiles, TlsPolicy};
use node_state::{
    auth::Jwt,
    identity::{DocumentError, MemberDocument},
    membership::{PeerUrl, UrlError},
};

#[cfg(fuzzing)]
pub use self::file::fuzz_file;
pub use self::{
    bootstrap::restored_cluster,
    describe::describe,
    help::{help, version},
    raw_flags::{RawFlags, UsageError},
    urls::ListenUrl,
    validate::ConfigError,
};

/// The etcd release whose behaviour and flags this node implements.
pub const ETCD_VERSION: &str = "3.6.0";

/// The action that the command line asks for.
#[derive(Debug)]
pub enum Invocation {
    /// Print the help and exit.
    Help,
    /// Print the version and exit.
    Version,
    /// Run the node with this configuration, and log the remarks.
    Run(Box<Config>, Vec<Remark>),
}

/// A remark about the configuration, which the node logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remark {
    /// The flag is accepted but has no effect.
    Ignored {
        /// Name of the flag, without dashes.
        flag: &'static str,
        /// Why the flag has no effect.
        because: &'static str,
    },
    /// A flag and its environment variable were both given. The flag takes precedence.
    FlagOverridesVariable {
        /// Name of the variable.
        variable: String,
    },
    /// The variable begins with `ETCD_`, but no flag has that name.
    UnknownVariable { variable: String },
    /// A configuration file was read, so all flags and variables are ignored.
    ConfigFile {
        path: PathBuf,
        /// Flags and variables that were given, but are ignored because a configuration file is
        /// given.
        ignored_settings: Vec<String>,
    },
    /// The member's name was not set, so it is etcd's default name.
    DefaultName,
    /// The quota, in bytes, is larger than etcd recommends.
    LargeQuota(i64),
    /// The allowed request size is larger than a log entry can hold.
    LargeRequests {
        /// Value of `--max-request-bytes`, in bytes.
        given: u64,
        /// Limit that applies instead of `given`, in bytes.
        limit: u32,
    },
    /// Cipher suites that Go supports and this program does not. They are left out.
    CipherSuites(Vec<String>),
    /// A part of the configuration file is ignored.
    FilePartIgnored {
        /// Line number, counting from 1.
        line: usize,
        /// Description of the ignored part of the file.
        text: String,
    },
    /// The bcrypt cost is out of range, so etcd's default is used.
    BcryptCost(u32),
    /// A certificate is configured, but this URL is http. So it is served without TLS.
    Plaintext {
        /// Name of the flag that lists the URL.
        flag: &'static str,
        url: String,
    },
}

/// Reason why a command line can't be executed.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The command line can't be parsed: exit code 2.
    #[error(transparent)]
    Usage(#[from] UsageError),
    /// The settings are invalid or contradict each other: exit code 2. A restart would not help.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// Parses a command line (without the program's name) and an environment.
///
/// # Errors
/// `Usage` if the command line can't be parsed, `Config` if the settings are invalid.
pub fn parse(
    args: impl IntoIterator<Item = String>,
    environment: impl IntoIterator<Item = (String, String)>,
) -> Result<Invocation, CommandError> {
    let mut flags = RawFlags::parse(args)?;
    if flags.help {
        return Ok(Invocation::Help);
    }
    if flags.version {
        return Ok(Invocation::Version);
    }
    let environment: BTreeMap<String, String> = environment.into_iter().collect();
    let mut remarks = match file::config_file_path(&flags, &environment) {
        Some(path) => {
            let ignored_settings = file::ignored_settings(&flags, &environment);
            let mut remarks = vec![Remark::ConfigFile { path: path.clone(), ignored_settings }];
            flags = file::read(&path, &mut remarks)?;
            remarks
        }
        None => flags.add_environment(environment)?,
    };
    remarks.extend(flags.ignored_flag_remarks());
    let config = resolve::resolve(&flags, &mut remarks)?;
    remarks.extend(unsupported::check(&flags, &config).map_err(ConfigError::Relation)?);
    validate::validate(&config, &flags)?;
    remarks.extend(validate::plaintext_remarks(&config));
    remarks.extend(validate::large_quota_remark(&config));
    remarks.extend(resolve::bcrypt_cost(&flags).err().map(Remark::BcryptCost));
    Ok(Invocation::Run(Box::new(config), remarks))
}

/// Whether this member starts a new cluster or joins an existing one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterState {
    /// The member is one of the first members of a new cluster.
    New,
    /// The member was added to an existing cluster, which it now joins.
    Existing,
}

/// Settings of `--force-new-cluster`. That flag makes a cluster of one member from this member's
/// data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForceNewCluster {
    /// Peer URLs that the member has in the new cluster (`--initial-advertise-peer-urls`). If
    /// empty, it keeps its old URLs.
    pub peer_urls: Vec<String>,
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLineFormat {
    /// One JSON object per line.
    Json,
    /// Tab-separated text that is easy to read for people.
    Console,
}

/// Destination of log lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogOutput {
    /// Standard error. The value `default` of etcd's flag also means this.
    Stderr,
    Stdout,
    /// Path of a file to which lines are appended.
    File(PathBuf),
}

/// The resolved configuration of the node. Sizes are in bytes.
#[derive(Clone, Debug)]
pub struct Config {
    /// Name of this member (`--name`).
    pub name: String,
    /// Path of the data directory (`--data-dir`).
    pub data_dir: PathBuf,
    /// URLs on which to listen for peers (`--listen-peer-urls`).
    pub listen_peer_urls: Vec<ListenUrl>,
    /// URLs on which to listen for clients (`--listen-client-urls`).
    pub listen_client_urls: Vec<ListenUrl>,
    /// URLs that serve JSON and status instead of the client URLs (`--listen-client-http-urls`). If
    /// empty, the client URLs serve gRPC and HTTP.
    pub listen_client_http_urls: Vec<ListenUrl>,
    /// Origins of web pages that browsers may allow to call the HTTP API (`--cors`).
    pub cors: AllowedNames,
    /// Host names that an HTTP request without TLS may name (`--host-whitelist`).
    pub host_whitelist: AllowedNames,
    /// Additional URLs that serve `/metrics` and health (`--listen-metrics-urls`).
    pub listen_metrics_urls: Vec<ListenUrl>,
    /// Peer URLs that this member advertises (`--initial-advertise-peer-urls`).
    pub advertise_peer_urls: Vec<PeerUrl>,
    /// Client URLs that this member advertises (`--advertise-client-urls`).
    pub advertise_client_urls: Vec<PeerUrl>,
    /// Name and peer URLs of each first member, in the given order (`--initial-cluster`).
    pub initial_cluster: Vec<(String, Vec<PeerUrl>)>,
    /// Whether this member starts a new cluster or joins an existing one
    /// (`--initial-cluster-state`).
    pub initial_cluster_state: ClusterState,
    /// Token from which the cluster's ids are derived, so that they are unique
    /// (`--initial-cluster-token`).
    pub initial_cluster_token: String,
    /// Whether to refuse changes of members that would endanger the quorum
    /// (`--strict-reconfig-check`).
    pub strict_reconfig_check: bool,
    /// Maximum number of learners in the cluster (`--max-learners`).
    pub max_learners: u64,
    /// Contents of the member document (`--muster-document`).
    pub document: Option<MemberDocument>,
    /// Settings of `--force-new-cluster`; `None` if the flag is not given.
    pub force_new_cluster: Option<ForceNewCluster>,
    /// Interval of the leader's heartbeats (`--heartbeat-interval`).
    pub heartbeat: Duration,
    /// Time without a leader before an election (`--election-timeout`).
    pub election_timeout: Duration,
    /// Whether to shorten the wait for the first election after a start
    /// (`--initial-election-tick-advance`).
    pub hasten_first_election: bool,
    /// Number of entries that the log keeps for slow followers (`--snapshot-catchup-entries`).
    pub snapshot_catchup_entries: u64,
    /// Quota of the store in bytes (`--quota-backend-bytes`). 0 means etcd's default of 2 GiB; a
    /// negative value means no quota.
    pub quota_backend_bytes: i64,
    /// Automatic compaction (`--auto-compaction-mode`, `--auto-compaction-retention`).
    pub auto_compaction: AutoCompaction,
    /// Maximum number of operations in a transaction (`--max-txn-ops`).
    pub max_txn_ops: u32,
    /// Maximum size of a request in bytes (`--max-request-bytes`).
    pub max_request_bytes: u32,
    /// Maximum number of open streams on a client connection (`--max-concurrent-streams`).
    pub max_concurrent_streams: u32,
    /// Whether to serve the API as JSON too (`--enable-grpc-gateway`).
    pub grpc_gateway: bool,
    /// Interval of keep-alive pings to a client (`--grpc-keepalive-interval`).
    pub keepalive_interval: Duration,
    /// Time that a client has to answer a ping (`--grpc-keepalive-timeout`).
    pub keepalive_timeout: Duration,
    /// Interval of progress notifications to a watch that has no events
    /// (`--watch-progress-notify-interval`).
    pub watch_progress_interval: Duration,
    /// Cost of password hashes (`--bcrypt-cost`).
    pub bcrypt_cost: u32,
    /// Keys that sign tokens (`--auth-token`); `None` for simple tokens.
    pub signed_tokens: Option<Arc<Jwt>>,
    /// Lifetime of a simple token after its last use (`--auth-token-ttl`).
    pub auth_token_ttl: Duration,
    /// Pause of a compaction after each batch of keys (`--compaction-sleep-interval`).
    pub compaction_sleep: Duration,
    /// Interval at which the members compare their data (`--corrupt-check-time`); 0 for the default
    /// interval.
    pub corrupt_check_interval: Duration,
    /// TLS files of the client listeners; `None` if all their URLs are http.
    pub client_tls: Option<TlsFiles>,
    /// TLS files for connections between peers. `None` if all peer URLs are http and the set of
    /// files is incomplete.
    pub peer_tls: Option<TlsFiles>,
    /// TLS versions and cipher suites for clients (`--tls-min-version`, `--tls-max-version`,
    /// `--cipher-suites`).
    pub tls_policy: TlsPolicy,
    /// Lowest level that is logged (`--log-level`).
    pub log_level: tracing::Level,
    /// Format of log lines (`--log-format`).
    pub log_format: LogLineFormat,
    /// Destinations of log lines (`--log-outputs`).
    pub log_outputs: Vec<LogOutput>,
}

impl Config {
    /// Returns the peer URLs that this member advertises, as strings.
    #[must_use]
    pub fn advertised_peers(&self) -> Vec<String> {
        self.advertise_peer_urls.iter().map(ToString::to_string).collect()
    }

    /// Returns the client URLs that this member advertises, as strings.
    #[must_use]
    pub fn advertised_clients(&self) -> Vec<String> {
        self.advertise_client_urls.iter().map(ToString::to_string).collect()
    }
}

impl From<DocumentError> for ConfigError {
    fn from(source: DocumentError) -> Self {
        Self::Document(source)
    }
}
