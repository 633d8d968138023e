//! `member`, as typed.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::DEFAULT_DATA_DIR;

/// Shown below the verbs.
const TEACHES: &str = "\
Whatever is done goes through the cluster's own Cluster API (the one that etcdctl speaks), so it works
with muster-node and with stock etcd, on every host of the cluster and without discovery. On a
member's host nothing but the verb is needed: the agent asks its own node. Elsewhere say --endpoints,
and --cacert, --cert and --key (muster-discovery cluster credentials makes them).

A MEMBER is a name or an id, as `member list` shows them.

EXIT CODES
  0  done    1  refused, or not known to be done (the text says which)    2  wrong usage";

/// `member`, as typed.
#[derive(Args, Debug)]
#[command(after_long_help = TEACHES)]
pub(crate) struct MemberCommand {
    /// How to reach the cluster.
    #[command(flatten)]
    pub access: Access,
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// How to reach the cluster, and how to print.
#[derive(Args, Clone, Debug)]
pub(crate) struct Access {
    /// Where this host's agent has its state: its own node is asked, with its certificate.
    #[arg(
        long, value_name = "DIR", env = "MUSTER_DATA_DIR", default_value = DEFAULT_DATA_DIR, global = true
    )]
    pub data_dir: PathBuf,
    /// Ask these members instead of this host's own: https://HOST:PORT, separated by commas.
    #[arg(long, value_name = "URLS", value_delimiter = ',', global = true)]
    pub endpoints: Vec<String>,
    /// The CA that signed the members' certificates, PEM (default: the agent's).
    #[arg(long, value_name = "FILE", requires = "cert", global = true)]
    pub cacert: Option<PathBuf>,
    /// This client's certificate, PEM (default: the agent's).
    #[arg(long, value_name = "FILE", requires = "key", global = true)]
    pub cert: Option<PathBuf>,
    /// Its private key, PEM.
    #[arg(long, value_name = "FILE", requires = "cacert", global = true)]
    pub key: Option<PathBuf>,
    /// For programs: one JSON document on standard output.
    #[arg(long, global = true)]
    pub json: bool,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Who the members are, and how each is.
    List,
    /// Agree on a new member. It starts afterwards, with what this prints.
    Add(Add),
    /// Give a learner its vote.
    Promote(Promote),
    /// Let a member be reached at other peer URLs. It is restarted afterwards, with them.
    Update(Update),
    /// Remove a member for ever. A leader hands over first.
    Remove(Remove),
    /// Make another member the leader, before maintenance of this one.
    MoveLeader(MoveLeader),
}

/// `member add`, as typed.
#[derive(Args, Clone, Debug)]
pub(crate) struct Add {
    /// The new member's name.
    pub name: String,
    /// Where its peers will reach it: https://HOST:PORT, separated by commas.
    #[arg(long, value_name = "URLS", value_delimiter = ',', required = true)]
    pub peer_urls: Vec<String>,
    /// With a vote from the beginning. Without this it is a learner until it is promoted, and costs
    /// the cluster nothing if it never starts.
    #[arg(long)]
    pub voter: bool,
}

/// `member promote`, as typed.
#[derive(Args, Clone, Debug)]
pub(crate) struct Promote {
    /// Its name or id.
    pub member: String,
}

/// `member update`, as typed.
#[derive(Args, Clone, Debug)]
pub(crate) struct Update {
    /// Its name or id.
    pub member: String,
    /// Where its peers will reach it: https://HOST:PORT, separated by commas.
    #[arg(long, value_name = "URLS", value_delimiter = ',', required = true)]
    pub peer_urls: Vec<String>,
}

/// `member remove`, as typed.
#[derive(Args, Clone, Debug)]
pub(crate) struct Remove {
    /// Its name or id.
    pub member: String,
}

/// `member move-leader`, as typed.
#[derive(Args, Clone, Debug)]
pub(crate) struct MoveLeader {
    /// Its name or id (default: the voter that is nearest to the leader's log).
    pub member: Option<String>,
}
