//! Arguments of `muster-agent member`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use discovery_types::text::printable;

use super::DEFAULT_DATA_DIR;
use crate::cluster::MemberId;
use crate::plan::RequestedChange;

/// Text below the list of subcommands in the help.
const MEMBER_HELP: &str = "\
Every command uses the cluster's own Cluster API, as etcdctl does. It works with muster-node and with
stock etcd, on every host of the cluster and without discovery. On a member's host only the verb is
needed: the agent asks its own node. Elsewhere give --endpoints, --cacert, --cert and --key
(muster-discovery cluster credentials makes the three files).

A MEMBER is a name, an id or a peer URL, as `member list` shows them. `member plan` shows beforehand
what a change would do. A change prints its own risks on standard error.

EXIT CODES
  0  done    1  refused, or not known to be done (the text says which)    2  wrong usage

FOR PROGRAMS (--json)
  An error is one JSON document on standard error, with error, exit_code and kind:
    refused      the cluster refused the request; nothing has changed
    stale        the members are others than when the change was planned; nothing has changed
    carried_out  the cluster had made the change before
    unreachable  no member could serve the request; nothing has changed
    unknown      the answer was lost: the list of members shows whether the change was made
    failed, usage, do_not_restart    the rest of codes 1, 2 and 3";

/// Arguments of `muster-agent member`.
#[derive(Args, Debug)]
#[command(after_long_help = MEMBER_HELP)]
pub(crate) struct MemberCommand {
    /// Options for reaching the cluster.
    #[command(flatten)]
    pub access: ClusterAccess,
    /// The subcommand to run.
    #[command(subcommand)]
    pub verb: MemberSubcommand,
}

/// Options for reaching the cluster, and for printing.
#[derive(Args, Clone, Debug)]
pub(crate) struct ClusterAccess {
    /// Data directory of this host's agent. The command asks the agent's node, with the agent's
    /// certificate.
    #[arg(
        long, value_name = "DIR", env = "MUSTER_DATA_DIR", default_value = DEFAULT_DATA_DIR, global = true
    )]
    pub data_dir: PathBuf,
    /// Client URLs of the members to ask instead of this host's own: https://HOST:PORT, separated
    /// by commas.
    #[arg(long, value_name = "URLS", value_delimiter = ',', global = true)]
    pub endpoints: Vec<String>,
    /// The CA that signed the members' certificates, PEM (default: the agent's).
    #[arg(long, value_name = "FILE", requires = "cert", global = true)]
    pub cacert: Option<PathBuf>,
    /// This client's certificate, PEM (default: the agent's).
    #[arg(long, value_name = "FILE", requires = "key", global = true)]
    pub cert: Option<PathBuf>,
    /// The private key of this client's certificate, PEM (default: the agent's).
    #[arg(long, value_name = "FILE", requires = "cacert", global = true)]
    pub key: Option<PathBuf>,
    /// Print one JSON document on standard output, for programs to read.
    #[arg(long, global = true)]
    pub json: bool,
}

/// The subcommands of `muster-agent member`.
#[derive(Debug, Subcommand)]
pub(crate) enum MemberSubcommand {
    /// List the members and the state of each.
    List,
    /// Show what a change would do to quorum and failure tolerance, and whether it would be
    /// refused. Changes nothing; exits 1 if the cluster would refuse the change.
    #[command(subcommand)]
    Plan(PlanCommand),
    /// Add a new member to the cluster. Start it afterwards, with the flags that this command
    /// prints.
    #[command(after_long_help = ADD_HELP)]
    Add(AddArguments),
    /// Promote a learner to a voter, as soon as it is in sync.
    Promote(PromoteArguments),
    /// Change a member's peer URLs. Restart the member with the new URLs afterwards.
    #[command(after_long_help = UPDATE_HELP)]
    Update(UpdateArguments),
    /// Remove a member for ever; a leader transfers its leadership first.
    Remove(RemoveArguments),
    /// Replace a member by a new one: add, wait until it is in sync, promote, remove.
    #[command(after_long_help = REPLACE_HELP)]
    Replace(ReplaceArguments),
    /// Transfer the leadership to another member, before maintenance of the leader.
    MoveLeader(MoveLeaderArguments),
    /// Wait until every member answers and is in sync, for example between two restarts.
    #[command(after_long_help = WAIT_HELP)]
    Wait(WaitArguments),
}

/// The subcommands of `muster-agent member plan`.
#[derive(Debug, Subcommand)]
pub(crate) enum PlanCommand {
    /// Show what `member add` would do.
    Add(AddArguments),
    /// Show what `member promote` would do.
    Promote(PromoteArguments),
    /// Show what `member update` would do.
    Update(UpdateArguments),
    /// Show what `member remove` would do.
    Remove(RemoveArguments),
    /// Show what `member replace` would do.
    Replace(ReplaceArguments),
}

const ADD_HELP: &str = "\
The new member begins as a learner: until it is promoted it has no vote, and costs the cluster
nothing if it never starts. To go from three members to five, do this twice:

  muster-agent member add db-4 --peer-urls https://10.0.0.4:2380
  (on db-4, with the printed flags)   muster-node --data-dir ... --listen-peer-urls ...
  muster-agent member promote db-4";

const UPDATE_HELP: &str = "\
Update one member at a time, all of them if need be:

  muster-agent member update db-2 --peer-urls https://10.1.0.2:2380
  (on db-2)   stop the agent, and: muster-agent run --advertise-address 10.1.0.2
              (a node without agent: its new --initial-advertise-peer-urls, --listen-peer-urls)
  muster-agent member wait";

const REPLACE_HELP: &str = "\
The new member is added first, as a learner, so that at no time there are fewer copies than before.
A failed member is removed first if the cluster admits no new one before that (one of three), or if
the new one is to have its URL. Run the command again after any failure: it reads the list of members
and goes on where it stopped. It is refused if something else has removed the old member meanwhile.
Start the new member yourself, with the flags that this prints.

  muster-agent member plan replace db-2 db-4 --peer-urls https://10.0.0.4:2380
  muster-agent member replace db-2 db-4 --peer-urls https://10.0.0.4:2380";

const WAIT_HELP: &str = "\
Restart or upgrade the cluster member by member. Each step fails if going on would stop the cluster,
so that the steps can stand in a script with set -e:

  muster-agent member move-leader --from db-1     # refused if the cluster can't spare db-1 now
  (on db-1)   replace the program; stop the agent, and start it again
  muster-agent member wait                        # all answer, in sync, for five seconds

A restart of the agent's unit (systemctl restart) isn't enough: it keeps the node that runs.";

/// Option of every subcommand that changes members.
#[derive(Args, Clone, Debug)]
pub(crate) struct PlanAtOption {
    /// Configuration index that `member plan` printed: refuse the change if the members have
    /// changed since. (muster-node refuses a stale index; stock etcd can't.)
    #[arg(long, value_name = "INDEX")]
    pub plan_at: Option<u64>,
}

/// Option of every subcommand that waits.
#[derive(Args, Clone, Debug)]
pub(crate) struct PatienceOption {
    /// Seconds without any progress after which the command gives up.
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
pub(crate) struct AddArguments {
    /// The new member's name.
    #[arg(value_parser = member_name)]
    pub name: String,
    /// Peer URLs at which the other members will reach the new one: https://HOST:PORT, separated by
    /// commas.
    #[arg(long, alias = "peer-url", value_name = "URLS", value_delimiter = ',', required = true)]
    pub peer_urls: Vec<String>,
    /// Add the member as a voter at once. Until it starts it counts as a member that has failed.
    #[arg(long)]
    pub voter: bool,
    /// The configuration index that the change was planned at.
    #[command(flatten)]
    pub planned: PlanAtOption,
}

/// Arguments of `member promote`.
#[derive(Args, Clone, Debug)]
pub(crate) struct PromoteArguments {
    /// Name, id or peer URL of the learner.
    pub member: String,
    /// The configuration index that the change was planned at.
    #[command(flatten)]
    pub planned: PlanAtOption,
    /// How long to wait for the learner to be in sync.
    #[command(flatten)]
    pub patience: PatienceOption,
    /// Fail at once if the learner is not in sync.
    #[arg(long)]
    pub no_wait: bool,
}

/// Arguments of `member update`.
#[derive(Args, Clone, Debug)]
pub(crate) struct UpdateArguments {
    /// Name, id or peer URL of the member.
    pub member: String,
    /// Peer URLs at which the other members will reach this one: https://HOST:PORT, separated by
    /// commas.
    #[arg(long, alias = "peer-url", value_name = "URLS", value_delimiter = ',', required = true)]
    pub peer_urls: Vec<String>,
    /// The configuration index that the change was planned at.
    #[command(flatten)]
    pub planned: PlanAtOption,
}

/// Arguments of `member remove`.
#[derive(Args, Clone, Debug)]
pub(crate) struct RemoveArguments {
    /// Name, id or peer URL of the member.
    pub member: String,
    /// The configuration index that the change was planned at.
    #[command(flatten)]
    pub planned: PlanAtOption,
}

/// Arguments of `member replace`.
#[derive(Args, Clone, Debug)]
pub(crate) struct ReplaceArguments {
    /// Name or id of the member to remove. If it has been removed already, its id.
    pub old: String,
    /// The new member's name.
    #[arg(value_parser = member_name)]
    pub name: String,
    /// Peer URLs at which the other members will reach the new one: https://HOST:PORT, separated by
    /// commas.
    #[arg(long, alias = "peer-url", value_name = "URLS", value_delimiter = ',', required = true)]
    pub peer_urls: Vec<String>,
    /// The configuration index that the replacement was planned at.
    #[command(flatten)]
    pub planned: PlanAtOption,
    /// How long to wait for the new member.
    #[command(flatten)]
    pub patience: PatienceOption,
}

impl AddArguments {
    /// Returns the change that these arguments ask for.
    pub(crate) fn requested_change(&self) -> RequestedChange {
        let Self { name, peer_urls, voter, .. } = self;
        RequestedChange::Add { name: name.clone(), peer_urls: peer_urls.clone(), is_voter: *voter }
    }
}

impl ReplaceArguments {
    /// Returns the change that these arguments ask for; `old` is the member to remove.
    pub(crate) fn requested_change(&self, old: MemberId) -> RequestedChange {
        RequestedChange::Replace { old, name: self.name.clone(), peer_urls: self.peer_urls.clone() }
    }
}

/// Arguments of `member move-leader`.
#[derive(Args, Clone, Debug)]
pub(crate) struct MoveLeaderArguments {
    /// Name or id of the new leader (default: the voter with the highest applied index).
    pub member: Option<String>,
    /// Name or id of a member to be stopped: moves the leadership only if that member leads;
    /// refused if the cluster can't spare it.
    #[arg(long, value_name = "MEMBER")]
    pub from: Option<String>,
}

/// Arguments of `member wait`.
#[derive(Args, Clone, Debug)]
pub(crate) struct WaitArguments {
    /// How long to wait for the members.
    #[command(flatten)]
    pub patience: PatienceOption,
}
