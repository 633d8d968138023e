//! Arguments of `muster-agent member`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use discovery_types::text::printable;

use super::DEFAULT_DATA_DIR;
use crate::cluster::MemberId;
use crate::plan::Wanted;

/// Text below the list of subcommands in the help.
const TEACHES: &str = "\
Whatever is done goes through the cluster's own Cluster API (the one that etcdctl speaks), so it works
with muster-node and with stock etcd, on every host of the cluster and without discovery. On a
member's host nothing but the verb is needed: the agent asks its own node. Elsewhere say --endpoints,
and --cacert, --cert and --key (muster-discovery cluster credentials makes them).

A MEMBER is a name, an id or a peer URL, as `member list` shows them. `member plan` says beforehand what a
change would do; what a change may cost, it says itself, on standard error.

EXIT CODES
  0  done    1  refused, or not known to be done (the text says which)    2  wrong usage

FOR PROGRAMS (--json)
  An error is one JSON document on standard error, with error, exit_code and kind:
    refused      the cluster said no; nothing has changed
    stale        the members are others than when it was planned; nothing has changed
    carried_out  the cluster had done it before
    unreachable  nobody could serve it; nothing has changed
    unknown      the answer was lost: it may have been done, the list of members shows whether
    failed, usage, do_not_restart    the rest of codes 1, 2 and 3";

/// Arguments of `muster-agent member`.
#[derive(Args, Debug)]
#[command(after_long_help = TEACHES)]
pub(crate) struct MemberCommand {
    /// Options for reaching the cluster.
    #[command(flatten)]
    pub access: Access,
    /// The subcommand to run.
    #[command(subcommand)]
    pub verb: Verb,
}

/// Options for reaching the cluster, and for printing.
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

/// The subcommands of `muster-agent member`.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Who the members are, and how each is.
    List,
    /// What a change would do to quorum and failure tolerance, and whether it would be refused.
    /// Changes nothing; exits 1 if the cluster would refuse it.
    #[command(subcommand)]
    Plan(Plan),
    /// Agree on a new member. It starts afterwards, with what this prints.
    #[command(after_long_help = ADDING)]
    Add(Add),
    /// Give a learner its vote, as soon as it is in sync.
    Promote(Promote),
    /// Let a member be reached at other peer URLs. It is restarted afterwards, with them.
    #[command(after_long_help = MOVING)]
    Update(Update),
    /// Remove a member for ever. A leader hands over first.
    Remove(Remove),
    /// Put a new member in the place of another: add, wait for it, promote, remove.
    #[command(after_long_help = REPLACING)]
    Replace(Replace),
    /// Make another member the leader, before maintenance of this one.
    MoveLeader(MoveLeader),
    /// Wait until every member answers and is in sync: the gate between two restarts.
    #[command(after_long_help = ROLLING)]
    Wait(Wait),
}

/// The subcommands of `muster-agent member plan`.
#[derive(Debug, Subcommand)]
pub(crate) enum Plan {
    /// What `member add` would do.
    Add(Add),
    /// What `member promote` would do.
    Promote(Promote),
    /// What `member update` would do.
    Update(Update),
    /// What `member remove` would do.
    Remove(Remove),
    /// What `member replace` would do.
    Replace(Replace),
}

const ADDING: &str = "\
The new member begins as a learner: until it is promoted it has no vote, and costs the cluster
nothing if it never starts. From three members to five, twice:

  muster-agent member add db-4 --peer-urls https://10.0.0.4:2380
  (on db-4, with what that printed)   muster-node --data-dir ... --listen-peer-urls ...
  muster-agent member promote db-4";

const MOVING: &str = "\
One member at a time, for all of them if need be:

  muster-agent member update db-2 --peer-urls https://10.1.0.2:2380
  (on db-2)   stop the agent, and: muster-agent run --advertise-address 10.1.0.2
              (a node without agent: its new --initial-advertise-peer-urls, --listen-peer-urls)
  muster-agent member wait";

const REPLACING: &str = "\
The new member comes first, as a learner, so that at no time there are fewer copies than before. A
failed one goes first where the cluster takes nobody in before that (one of three), and where the
new one is to have its URL. Run it again after whatever happened: it reads the list of members and
goes on where it stopped. If something else has removed the old member meanwhile, it is refused. The new member is started by you, with what this prints.

  muster-agent member plan replace db-2 db-4 --peer-urls https://10.0.0.4:2380
  muster-agent member replace db-2 db-4 --peer-urls https://10.0.0.4:2380";

const ROLLING: &str = "\
A rolling restart or upgrade, member by member. Each step fails where going on would stop the
cluster, so that they can stand in a script with set -e:

  muster-agent member move-leader --from db-1     # refused if the cluster can't spare db-1 now
  (on db-1)   replace the program, restart it     # an agent: run it again with --node-binary
  muster-agent member wait                        # all answer, in sync, for five seconds";

/// Option of every subcommand that changes members.
#[derive(Args, Clone, Debug)]
pub(crate) struct Planned {
    /// Only if the members are still as `member plan` found them: its configuration index.
    /// (muster-node refuses a stale one; stock etcd can't.)
    #[arg(long, value_name = "INDEX")]
    pub plan_at: Option<u64>,
}

/// Option of every subcommand that waits.
#[derive(Args, Clone, Debug)]
pub(crate) struct Patience {
    /// How long to wait without any progress.
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub patience: u64,
}

/// Parses a name that `--initial-cluster` can contain and a terminal can show.
fn member_name(typed: &str) -> Result<String, String> {
    let is_odd = |c: char| c == ',' || c == '=';
    if typed.is_empty() || typed.contains(is_odd) || printable(typed) != typed {
        return Err("a name has no comma, no equals sign and no control character".to_owned());
    }
    Ok(typed.to_owned())
}

/// Arguments of `member add`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Add {
    /// The new member's name.
    #[arg(value_parser = member_name)]
    pub name: String,
    /// Where its peers will reach it: https://HOST:PORT, separated by commas.
    #[arg(long, alias = "peer-url", value_name = "URLS", value_delimiter = ',', required = true)]
    pub peer_urls: Vec<String>,
    /// With a vote from the beginning. Until it starts it counts as a member that has failed.
    #[arg(long)]
    pub voter: bool,
    /// The configuration index that the change was planned at.
    #[command(flatten)]
    pub planned: Planned,
}

/// Arguments of `member promote`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Promote {
    /// Its name, id or peer URL.
    pub member: String,
    /// The configuration index that the change was planned at.
    #[command(flatten)]
    pub planned: Planned,
    /// How long to wait for the learner to be in sync.
    #[command(flatten)]
    pub patience: Patience,
    /// Fail at once if it is not in sync.
    #[arg(long)]
    pub no_wait: bool,
}

/// Arguments of `member update`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Update {
    /// Its name, id or peer URL.
    pub member: String,
    /// Where its peers will reach it: https://HOST:PORT, separated by commas.
    #[arg(long, alias = "peer-url", value_name = "URLS", value_delimiter = ',', required = true)]
    pub peer_urls: Vec<String>,
    /// The configuration index that the change was planned at.
    #[command(flatten)]
    pub planned: Planned,
}

/// Arguments of `member remove`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Remove {
    /// Its name, id or peer URL.
    pub member: String,
    /// The configuration index that the change was planned at.
    #[command(flatten)]
    pub planned: Planned,
}

/// Arguments of `member replace`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Replace {
    /// Who goes: its name or id. An id, once it is gone.
    pub old: String,
    /// The new member's name.
    #[arg(value_parser = member_name)]
    pub name: String,
    /// Where the new member's peers will reach it: https://HOST:PORT, separated by commas.
    #[arg(long, alias = "peer-url", value_name = "URLS", value_delimiter = ',', required = true)]
    pub peer_urls: Vec<String>,
    /// The configuration index that the replacement was planned at.
    #[command(flatten)]
    pub planned: Planned,
    /// How long to wait for the new member.
    #[command(flatten)]
    pub patience: Patience,
}

impl Add {
    /// Returns the change that these arguments ask for.
    pub(crate) fn wanted(&self) -> Wanted {
        let Self { name, peer_urls, voter, .. } = self;
        Wanted::Add { name: name.clone(), peer_urls: peer_urls.clone(), is_voter: *voter }
    }
}

impl Replace {
    /// Returns the change that these arguments ask for; `old` is the member to remove.
    pub(crate) fn wanted(&self, old: MemberId) -> Wanted {
        Wanted::Replace { old, name: self.name.clone(), peer_urls: self.peer_urls.clone() }
    }
}

/// Arguments of `member move-leader`.
#[derive(Args, Clone, Debug)]
pub(crate) struct MoveLeader {
    /// Who is to lead: its name or id (default: the voter whose log is the longest).
    pub member: Option<String>,
    /// Before maintenance of this member: only if it leads, and refused if the cluster can't spare it.
    #[arg(long, value_name = "MEMBER")]
    pub from: Option<String>,
}

/// Arguments of `member wait`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Wait {
    /// How long to wait for the members.
    #[command(flatten)]
    pub patience: Patience,
}
