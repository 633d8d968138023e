//! What the node is told: etcd's flags and `ETCD_*` variables, by etcd's rules.
//!
//! First what was typed (`LowArgs`: strings by flag, each with where it came from), then what it
//! resolves to (`Config`: types, defaults filled in, relations checked). The command line beats the
//! environment; of a flag given twice the last one counts. `flags::FLAGS` is the one table of all
//! flags; a flag that is accepted for the sake of scripts but changes nothing is marked there, and the
//! node says so in its log when it is given.
//!
//! Sources: etcd `server/etcdmain/config.go`, `server/embed/config.go`, `pkg/flags`.

mod auth_token;
mod bootstrap;
mod duration;
mod file;
mod flags;
mod help;
mod low;
mod numbers;
mod resolve;
mod tls;
mod unsupported;
mod urls;
mod validate;
mod yaml;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

#[cfg(fuzzing)]
pub use self::file::fuzz_file;
pub use self::{
    bootstrap::restored_cluster,
    help::{help, version},
    low::{LowArgs, UsageError},
    urls::{ListenUrl, PeerUrl, UrlError},
    validate::ConfigError,
};
use crate::{
    auth::Jwt,
    identity::{DocumentError, MemberDocument},
    tls::{TlsFiles, TlsPolicy},
};

/// The etcd release whose behaviour and flags this node claims.
pub const ETCD_VERSION: &str = "3.6.0";
/// The version of the cluster's data and protocol: what etcd calls cluster and storage version.
pub const CLUSTER_VERSION: &str = "3.6.0";

/// What the command line asks for.
#[derive(Debug)]
pub enum Command {
    /// Print the help and end.
    Help,
    /// Print the version and end.
    Version,
    /// Run the node.
    Run(Box<Config>, Vec<Remark>),
}

/// Something about the flags that the log should say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remark {
    /// The flag was given, is accepted, and changes nothing here.
    Ignored {
        /// Its name, without dashes.
        flag: &'static str,
        /// Why not.
        because: &'static str,
    },
    /// Both were given: the flag counts.
    Shadowed {
        /// The variable.
        variable: String,
    },
    /// A variable with etcd's prefix that no flag belongs to.
    UnknownVariable {
        /// The variable.
        variable: String,
    },
    /// A file was read in place of flags and variables.
    ConfigFile {
        /// Which.
        path: PathBuf,
        /// The flags and variables that were given and don't count.
        left_out: Vec<String>,
    },
    /// The name was left at its default.
    DefaultName,
    /// The quota is larger than etcd suggests.
    LargeQuota(i64),
    /// Larger requests are allowed than an entry of the log can hold.
    LargeRequests {
        /// `--max-request-bytes`, in bytes.
        given: u64,
        /// The limit that counts, in bytes.
        limit: u32,
    },
    /// Cipher suites that Go has and we have not.
    CipherSuites(Vec<String>),
    /// The configuration file says something that does not count.
    InFile {
        /// From 1.
        line: usize,
        /// What does not count.
        text: String,
    },
    /// There is no such cost of a password hash: etcd's default counts.
    BcryptCost(u32),
    /// A certificate was given, but this URL is http: it is served in plain, to everybody.
    Plaintext {
        /// The flag that has the URL.
        flag: &'static str,
        /// The URL.
        url: String,
    },
}

/// Why there is nothing to run.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The command line can't be understood: exit code 2.
    #[error(transparent)]
    Usage(#[from] UsageError),
    /// It can be understood, but not followed: exit code 2 too, since no restart helps.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// Reads a command line (without the program's name) and an environment.
///
/// # Errors
/// `Usage` if it can't be understood, `Config` if it can't be followed.
pub fn parse(
    args: impl IntoIterator<Item = String>,
    environment: impl IntoIterator<Item = (String, String)>,
) -> Result<Command, CommandError> {
    let mut low = LowArgs::parse(args)?;
    if low.help {
        return Ok(Command::Help);
    }
    if low.version {
        return Ok(Command::Version);
    }
    let environment: BTreeMap<String, String> = environment.into_iter().collect();
    let mut remarks = match file::named(&low, &environment) {
        Some(path) => {
            let left_out = file::left_out(&low, &environment);
            let mut remarks = vec![Remark::ConfigFile { path: path.clone(), left_out }];
            low = file::read(&path, &mut remarks)?;
            remarks
        }
        None => low.add_environment(environment)?,
    };
    remarks.extend(low.ignored());
    let config = resolve::resolve(&low, &mut remarks)?;
    remarks.extend(unsupported::check(&low, &config).map_err(ConfigError::Relation)?);
    validate::validate(&config, &low)?;
    remarks.extend(validate::plaintext(&config));
    remarks.extend(validate::large_quota(&config));
    remarks.extend(resolve::bcrypt_cost(&low).err().map(Remark::BcryptCost));
    Ok(Command::Run(Box::new(config), remarks))
}

/// What the leader compacts without being asked: `--auto-compaction-mode`, `--auto-compaction-retention`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AutoCompaction {
    /// Nothing.
    Never,
    /// What is older; never zero.
    Periodic(Duration),
    /// All but so many revisions; above zero.
    Revisions(i64),
}

/// Whether this member begins a cluster or joins one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterState {
    /// It is among the first members.
    New,
    /// The cluster has added it already.
    Existing,
}

/// A cluster of one is to be made of what this member has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Force {
    /// Where that one is reached: `--initial-advertise-peer-urls`, if given; none: where it was.
    pub peer_urls: Vec<String>,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// One JSON object per line.
    Json,
    /// For people.
    Console,
}

/// Where log lines go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogOutput {
    /// Standard error, also etcd's `default`.
    Stderr,
    /// Standard output.
    Stdout,
    /// A file, appended to.
    File(PathBuf),
}

/// Who is on a list, of names between commas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Listed {
    /// Everybody: `*`, or nobody was named.
    #[default]
    All,
    /// These.
    Only(BTreeSet<String>),
}

impl Listed {
    /// As etcd's flags have them.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let names: BTreeSet<String> = text
            .split(',')
            .map(|name| name.trim().to_owned())
            .filter(|name| !name.is_empty())
            .collect();
        if names.is_empty() || names.contains("*") { Self::All } else { Self::Only(names) }
    }

    /// Whether this one is on it.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        match self {
            Self::All => true,
            Self::Only(names) => names.contains(name),
        }
    }
}

/// What the node runs by. Durations are what their names say; sizes are bytes.
#[derive(Clone, Debug)]
pub struct Config {
    /// `--name`
    pub name: String,
    /// `--data-dir`
    pub data_dir: PathBuf,
    /// `--listen-peer-urls`
    pub listen_peer_urls: Vec<ListenUrl>,
    /// `--listen-client-urls`
    pub listen_client_urls: Vec<ListenUrl>,
    /// `--listen-client-http-urls`: JSON and status apart from gRPC; empty: together
    pub listen_client_http_urls: Vec<ListenUrl>,
    /// `--cors`: whose pages may call over HTTP
    pub cors: Listed,
    /// `--host-whitelist`: by which names a server without TLS may be called over HTTP
    pub host_whitelist: Listed,
    /// `--listen-metrics-urls`: `/metrics` and health, besides the client URLs
    pub listen_metrics_urls: Vec<ListenUrl>,
    /// `--initial-advertise-peer-urls`
    pub advertise_peer_urls: Vec<PeerUrl>,
    /// `--advertise-client-urls`
    pub advertise_client_urls: Vec<PeerUrl>,
    /// `--initial-cluster`, in the order given: name and peer URLs
    pub initial_cluster: Vec<(String, Vec<PeerUrl>)>,
    /// `--initial-cluster-state`
    pub initial_cluster_state: ClusterState,
    /// `--initial-cluster-token`
    pub initial_cluster_token: String,
    /// `--strict-reconfig-check`
    pub strict_reconfig_check: bool,
    /// `--max-learners`
    pub max_learners: u64,
    /// `--muster-document`, read
    pub document: Option<MemberDocument>,
    /// `--force-new-cluster`
    pub force_new_cluster: Option<Force>,
    /// `--heartbeat-interval`
    pub heartbeat: Duration,
    /// `--election-timeout`
    pub election: Duration,
    /// `--initial-election-tick-advance`
    pub hasten_first_election: bool,
    /// `--snapshot-catchup-entries`
    pub snapshot_catchup_entries: u64,
    /// `--quota-backend-bytes`; 0: etcd's default of 2 GiB; negative: none
    pub quota_backend_bytes: i64,
    /// `--auto-compaction-mode`, `--auto-compaction-retention`
    pub auto_compaction: AutoCompaction,
    /// `--max-txn-ops`
    pub max_txn_ops: u32,
    /// `--max-request-bytes`
    pub max_request_bytes: u32,
    /// `--max-concurrent-streams`
    pub max_concurrent_streams: u32,
    /// `--enable-grpc-gateway`
    pub grpc_gateway: bool,
    /// `--grpc-keepalive-interval`
    pub keepalive_interval: Duration,
    /// `--grpc-keepalive-timeout`
    pub keepalive_timeout: Duration,
    /// `--watch-progress-notify-interval`
    pub watch_progress_interval: Duration,
    /// `--bcrypt-cost`
    pub bcrypt_cost: u32,
    /// `--auth-token`: what signs tokens, if they aren't simple ones
    pub signed_tokens: Option<Arc<Jwt>>,
    /// `--auth-token-ttl`, of simple tokens
    pub auth_token_ttl: Duration,
    /// `--compaction-sleep-interval`
    pub compaction_sleep: Duration,
    /// `--corrupt-check-time`; 0: as often as members compare their data if nothing is said
    pub corrupt_check: Duration,
    /// TLS of the client listener, if its URLs are https
    pub client_tls: Option<TlsFiles>,
    /// TLS between peers, if their URLs are https
    pub peer_tls: Option<TlsFiles>,
    /// `--tls-min-version`, `--tls-max-version`, `--cipher-suites`
    pub tls_policy: TlsPolicy,
    /// `--log-level`
    pub log_level: tracing::Level,
    /// `--log-format`
    pub log_format: LogFormat,
    /// `--log-outputs`
    pub log_outputs: Vec<LogOutput>,
}

impl Config {
    /// The peer URLs that this member advertises, as text.
    #[must_use]
    pub fn advertised_peers(&self) -> Vec<String> {
        self.advertise_peer_urls.iter().map(ToString::to_string).collect()
    }

    /// The client URLs that this member advertises, as text.
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
