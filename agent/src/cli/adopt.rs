//! Arguments of `muster-agent adopt` and `muster-agent release`.

use std::path::PathBuf;

use clap::{ArgGroup, Args, Subcommand};

use super::DataDir;

/// Seconds for which a command waits for the members by default.
const DEFAULT_PATIENCE: u64 = 300;

/// The subcommands of `muster-agent adopt`.
#[derive(Debug, Subcommand)]
pub(crate) enum AdoptCommand {
    /// Ask a running etcd cluster for its members, and print what an owner signs
    /// (muster-discovery cluster adopt). Changes nothing.
    Survey(SurveyArguments),
    /// Run beside this host's etcd until the agents of all members have enrolled. Then this host
    /// holds the signed list of members. The etcd runs on as before.
    Enrol(EnrolArguments),
    /// Stop this host's etcd, and let the agent run it from then on. All other members must be
    /// healthy, and none of them may be taken over at the same time. If the command is killed, run
    /// it again.
    TakeOver(TakeOverArguments),
    /// Let this host's etcd serve certificates of the cluster's own CAs, once all members are taken
    /// over and so trust those CAs. Restarts nothing.
    Certificates(CertificatesArguments),
}

impl AdoptCommand {
    pub(super) fn is_for_programs(&self) -> bool {
        match self {
            Self::Survey(_) => true,
            Self::Enrol(enrol) => enrol.json,
            Self::TakeOver(take_over) => take_over.json,
            Self::Certificates(certificates) => certificates.json,
        }
    }
}

/// Arguments of `adopt survey`.
#[derive(Args, Debug)]
pub(crate) struct SurveyArguments {
    /// Client URLs of members: https://HOST:PORT, separated by commas.
    #[arg(long, value_name = "URLS", value_delimiter = ',', required = true)]
    pub endpoints: Vec<String>,
    /// The CA of the certificates that clients and client ports use, PEM: etcd's --trusted-ca-file.
    #[arg(long, value_name = "FILE")]
    pub cacert: PathBuf,
    /// A client's certificate, PEM.
    #[arg(long, value_name = "FILE")]
    pub cert: PathBuf,
    /// The private key of the client's certificate, PEM.
    #[arg(long, value_name = "FILE")]
    pub key: PathBuf,
    /// The CA of the peers' certificates, PEM: etcd's --peer-trusted-ca-file.
    #[arg(long, value_name = "FILE")]
    pub peer_cacert: PathBuf,
}

/// Arguments of `adopt enrol`.
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("etcd").required(true).args(["unit", "pid"]))]
pub(crate) struct EnrolArguments {
    /// Option for the data directory.
    #[command(flatten)]
    pub data_dir: DataDir,
    /// File with this member's join bundle, or - for standard input. Not needed if this host has
    /// redeemed it.
    #[arg(long, value_name = "FILE")]
    pub bundle_file: Option<PathBuf>,
    /// The systemd unit that runs the etcd.
    #[arg(long, value_name = "UNIT")]
    pub unit: Option<String>,
    /// Process id of the etcd, if no systemd unit runs it.
    #[arg(long, value_name = "PID")]
    pub pid: Option<u32>,
    /// A client's certificate, PEM (default: the one that the etcd serves).
    #[arg(long, value_name = "FILE", requires = "key")]
    pub cert: Option<PathBuf>,
    /// The private key of the client's certificate, PEM.
    #[arg(long, value_name = "FILE", requires = "cert")]
    pub key: Option<PathBuf>,
    /// File with an id of this machine, in place of the system's own ids, as for run.
    #[arg(long, value_name = "FILE")]
    pub machine_id_file: Option<PathBuf>,
    /// Only show which settings of the etcd the agent would keep, and check that it can keep them.
    /// Nothing is written or redeemed.
    #[arg(long)]
    pub check: bool,
    /// Print JSON for programs to read.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `adopt take-over`.
#[derive(Args, Debug)]
pub(crate) struct TakeOverArguments {
    /// Option for the data directory.
    #[command(flatten)]
    pub data_dir: DataDir,
    /// The systemd unit of the agent, which this command enables and starts. Without it, the
    /// command says when to start the agent.
    #[arg(long, value_name = "UNIT")]
    pub agent_unit: Option<String>,
    /// Undo an unfinished take-over: the etcd runs again as it did before.
    #[arg(long)]
    pub give_back: bool,
    /// Seconds to wait for members or for a person before giving up.
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_PATIENCE)]
    pub patience: u64,
    /// Print JSON for programs to read.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `adopt certificates`.
#[derive(Args, Debug)]
pub(crate) struct CertificatesArguments {
    /// Option for the data directory.
    #[command(flatten)]
    pub data_dir: DataDir,
    /// Print JSON for programs to read.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `muster-agent release`.
#[derive(Args, Debug)]
pub(crate) struct ReleaseArguments {
    /// Option for the data directory.
    #[command(flatten)]
    pub data_dir: DataDir,
    /// Folder for the node's certificates, keys and unit file; made (0711) if it is missing.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// The systemd unit that will run the node: NAME.service. It is written to /etc/systemd/system,
    /// enabled and started. Without it, the command says how to start the node.
    #[arg(long, value_name = "UNIT", requires = "agent_unit")]
    pub unit: Option<String>,
    /// The systemd unit of the agent, which this command stops and disables. Without it, the
    /// command says when to stop the agent.
    #[arg(long, value_name = "UNIT")]
    pub agent_unit: Option<String>,
    /// Seconds to wait for members or for a person before giving up.
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_PATIENCE)]
    pub patience: u64,
    /// Print JSON for programs to read.
    #[arg(long)]
    pub json: bool,
}
