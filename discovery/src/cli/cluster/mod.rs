//! `cluster`: creates, shows and ends clusters, and explains what they wait for.

mod adopt;
mod approve;
mod create;
mod credentials;
mod export;
mod retire;
mod rotate_ca;
pub(super) mod show;
mod wait;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::Subcommand;
use discovery_types::api::{BadClusterState, ClusterState, ClusterStates};
use discovery_types::key::PublicKey;
use discovery_types::name::Name;
use discovery_types::statement::{Permissions, Spread};
use ipnet::IpNet;

use super::confirm::IrreversibleAct;
use super::printer::Printer;
use super::session::AdminSession;
use super::token::parse_block;
use super::{CliError, RemoteArgs};
use crate::server::parse_duration;

#[derive(Debug, clap::Args)]
pub(super) struct ClusterArgs {
    #[command(flatten)]
    pub(super) remote: RemoteArgs,
    #[command(subcommand)]
    command: ClusterCommand,
}

#[derive(Debug, Subcommand)]
enum ClusterCommand {
    /// Create a cluster, and sign its first statement on this machine
    #[command(after_help = "\
Examples:
  muster-discovery cluster create demo --size 3
  muster-discovery cluster create try --size 1 --allow-loopback

Then make a bundle for its hosts: muster-discovery token create --cluster demo --out demo.bundle")]
    Create(CreateArgs),
    /// Bring a running etcd cluster under management: sign its membership on this machine
    #[command(after_help = "\
Example:
  muster-discovery cluster adopt demo --survey demo.json

FILE is what `muster-agent adopt survey` printed on a host that reaches the cluster. The command shows the
members, and asks for the cluster's name. Compare ids and URLs with `etcdctl member list`: by its signature
the owner says that these are the cluster's members. Nothing is stopped. Then make a bundle for each member:
  muster-discovery token create --cluster demo --uses 1 --name MEMBER --out MEMBER.bundle")]
    Adopt(adopt::AdoptArgs),
    /// Sign a cluster's next statement, with the present admins or with more permissions
    #[command(after_help = "\
Examples:
  muster-discovery cluster restate demo
  muster-discovery cluster restate --all

Needed after `admin add` and `admin revoke`, so that the cluster knows its admins. Id, name, size and
CAs stay; what was allowed stays allowed.")]
    Restate(RestateArgs),
    /// Replace the CAs of a running cluster, one step at a time
    #[command(after_help = "\
Examples:
  muster-discovery cluster rotate-ca demo
  muster-discovery cluster rotate-ca demo --step 2 --yes
  muster-discovery cluster rotate-ca demo --cancel

Run it three times:
  1. Members trust new CAs. The old ones still issue.
  2. The new CAs issue. Run `cluster credentials --renew` for each client before, and again after it.
  3. The old CAs are dropped.
Before steps 2 and 3 the command waits until all members have followed the last one. muster-node follows by
itself; stock etcd has to be restarted after steps 1 and 3.

With --step, the command does nothing if that step is done already, and refuses if another step is next. So a
script can repeat it. After step 3, only --step 1 --again begins another replacement.

A repeated --cancel changes nothing. To drop the new CAs once step 2 is undone: --cancel --step 1.")]
    RotateCa(rotate_ca::RotateCaArgs),
    /// List the clusters and their states, the newest first
    #[command(after_help = "\
Examples:
  muster-discovery cluster list
  muster-discovery cluster list --all --name demo
  muster-discovery cluster list --state open,preparing --older-than 10m
  muster-discovery cluster list --state retired --newer-than 7d --limit 100

Without --all or --state, clusters that have ended are left out.")]
    List(ListArgs),
    /// Show a cluster's seats, probes and timeline
    // People often type `status`. Without the alias clap would suggest `restate`.
    #[command(alias = "status")]
    Show {
        /// Name or id of the cluster
        cluster: String,
    },
    /// Explain what a cluster waits for, and what to do about it
    Explain {
        /// Name or id of the cluster
        cluster: String,
    },
    /// Wait until a cluster has formed, and say meanwhile what it waits for
    #[command(after_help = "\
Example:
  muster-discovery cluster wait demo --timeout 5m && muster-discovery cluster credentials demo --out demo

Exits with 0 once a majority of the members runs, and with 1 if the cluster ends before, or if the time is
over. While the service can't be reached, it is asked again.")]
    Wait {
        /// Name or id of the cluster
        cluster: String,
        /// Time after which the command gives up
        #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "10m")]
        timeout: Duration,
    },
    /// Approve hosts that may found a cluster (cluster create --approve)
    #[command(after_help = "\
Examples:
  muster-discovery cluster approve demo
  muster-discovery cluster approve demo --agent ed25519:9a… --agent ed25519:77…

Shows the hosts that wait with their keys, and asks for each. Compare the key with the one in the log of
`muster-agent run` on that host, or on its console: only that tells your host from one with a stolen
bundle. With --agent you name the keys that you have compared. The founders' agents check that an issuer
has signed each one's approval before they sign the list.")]
    Approve {
        /// Name or id of the cluster
        cluster: String,
        /// Public key of an agent to approve, without a question; may be repeated
        #[arg(long, value_name = "PUBLIC_KEY")]
        agent: Vec<PublicKey>,
    },
    /// Abandon a cluster that has not committed
    Abandon {
        /// Name or id of the cluster
        cluster: String,
        /// Reason, shown to the hosts that are turned away
        #[arg(long, value_name = "TEXT", default_value = "abandoned by an admin")]
        reason: String,
        /// Skip the confirmation prompt
        #[arg(long)]
        yes: bool,
    },
    /// Retire a cluster that has committed: discovery forgets it, its nodes are not touched
    #[command(after_help = "\
Example:
  muster-discovery cluster retire demo --reason 'moved to eu-2'

Shows the members and asks for the cluster's name. Discovery turns the cluster's agents away from now
on, and its name is free again. Nodes that run go on running: stop them first, or say --force. For a
week `cluster unretire` takes it back.")]
    Retire {
        /// Name or id of the cluster
        cluster: String,
        /// Reason, recorded in the signed request
        #[arg(long, value_name = "TEXT", default_value = "retired by an owner")]
        reason: String,
        /// Retire the cluster although members still report
        #[arg(long)]
        force: bool,
        /// Skip the confirmation prompt
        #[arg(long)]
        yes: bool,
    },
    /// Undo a cluster's retirement, within a week
    #[command(after_help = "\
Example:
  muster-discovery cluster unretire demo

The cluster goes on as it was: with its members, its document and its certificates. Agents that run
find it again within two minutes. If another cluster took the name meanwhile, name the retired one by
its id (`cluster list --all`); it comes back under its name with a part of its id.")]
    Unretire {
        /// Name or id of the cluster
        cluster: String,
    },
    /// Reopen a cluster that expired within the last week, so that it can still form
    #[command(after_help = "\
Example:
  muster-discovery cluster reopen demo

The cluster is open again and has as much time to form as it had at first (cluster create --deadline).
Its tokens stay good until their own ends. Start the agents again that have given up. If another
cluster took the name meanwhile, name the expired one by its id (`cluster list --all`); it comes back
under its name with a part of its id.")]
    Reopen {
        /// Name or id of the cluster
        cluster: String,
    },
    /// Export what `ca issue` needs to make a member's certificates without the service
    #[command(after_help = "\
Example:
  muster-discovery cluster export demo --out demo.export

FILE (mode 0600) holds the cluster's statements, its commit document, and the keys of both its CAs,
encrypted: they open with the service's key directory alone. Keep it with a copy of that directory's
backup, and not on a member. It stays good for the cluster's life.")]
    Export {
        /// Name or id of the cluster
        cluster: String,
        /// New file to write the export to
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
    },
    /// Get a client certificate for etcdctl and applications
    #[command(after_help = "\
Examples:
  muster-discovery cluster credentials demo --out demo-credentials
  eval \"$(muster-discovery cluster credentials demo --out demo-credentials --renew)\"
  etcdctl member list

DIR gets client.crt, client.key and ca.crt (mode 0600). The key is made here. The certificate lasts a
week; --renew replaces it. If a member came from an address that its token wasn't bound to (token
create --cidr), or that isn't in --cidr here, the command asks first.")]
    Credentials {
        /// Name or id of the cluster
        cluster: String,
        /// Folder for the certificates and the key
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Replace an existing certificate; its key stays
        #[arg(long)]
        renew: bool,
        /// Addresses expected of the members; may be repeated [default: what their tokens are bound
        /// to]
        #[arg(long, value_name = "CIDR", value_parser = parse_block)]
        cidr: Vec<IpNet>,
        /// Skip the prompt about members that came from unexpected addresses
        #[arg(long)]
        yes: bool,
    },
}

#[derive(Debug, clap::Args)]
struct ListArgs {
    /// List abandoned, expired and retired clusters, too
    #[arg(long, conflicts_with = "state")]
    all: bool,
    /// List only clusters in these states: draft, open, preparing, committed, formed, abandoned,
    /// expired, retired
    #[arg(long, value_name = "STATE", value_delimiter = ',', value_parser = parse_state)]
    state: Vec<ClusterState>,
    /// List only clusters of this name
    #[arg(long, value_name = "NAME")]
    name: Option<Name>,
    /// List only clusters that were created within this time
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    newer_than: Option<Duration>,
    /// List only clusters that were created before this time
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    older_than: Option<Duration>,
    /// List at most this many clusters [default: all]
    #[arg(long, value_name = "N")]
    limit: Option<NonZeroUsize>,
}

fn parse_state(text: &str) -> Result<ClusterState, BadClusterState> {
    Ok(ClusterStates::try_from(text.to_owned())?.as_slice()[0])
}

#[derive(Debug, clap::Args)]
struct CreateArgs {
    /// Name of the cluster: letters, digits and hyphens
    name: Name,
    /// Number of members that form the cluster
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=9))]
    size: u8,
    #[command(flatten)]
    allow: AllowArgs,
    /// Spread the members over zones (muster-agent run --zone): no zone gets a majority of the
    /// seats, and later members keep to it
    #[arg(long, value_name = "zone")]
    spread: Option<Spread>,
    /// Require an issuer's approval of each founder's key (cluster approve)
    #[arg(long)]
    approve: bool,
    /// Time that the cluster may take to form
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = parse_duration)]
    deadline: Duration,
}

#[derive(Debug, clap::Args)]
struct RestateArgs {
    /// Name or id of the cluster
    #[arg(required_unless_present = "all")]
    cluster: Option<String>,
    /// Restate every cluster that hasn't ended, and print a line for each
    #[arg(long, conflicts_with = "cluster")]
    all: bool,
    #[command(flatten)]
    allow: AllowArgs,
    /// Time that the cluster may take to form, from its opening on [default: as it was]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    deadline: Option<Duration>,
}

#[derive(Clone, Copy, Debug, clap::Args)]
#[group(skip)]
struct AllowArgs {
    /// Let members have loopback addresses (for trying things out on one machine)
    #[arg(long)]
    allow_loopback: bool,
    /// Let two members be on one machine (which then fails as one)
    #[arg(long)]
    allow_shared_host: bool,
    /// Let the size be even (N members tolerate no more failures than N-1)
    #[arg(long)]
    allow_even: bool,
    /// Let members have ports below 1024
    #[arg(long)]
    allow_low_ports: bool,
}

impl AllowArgs {
    /// Returns the permissions in `base` together with these options.
    fn added_to(self, base: Permissions) -> Permissions {
        Permissions {
            loopback: base.loopback || self.allow_loopback,
            shared_host: base.shared_host || self.allow_shared_host,
            even_size: base.even_size || self.allow_even,
            low_ports: base.low_ports || self.allow_low_ports,
        }
    }
}

pub(super) async fn run(args: ClusterArgs, printer: &mut Printer) -> Result<(), CliError> {
    let session = AdminSession::open(&args.remote)?;
    match args.command {
        ClusterCommand::Create(args) => create::create(&session, &args, printer).await,
        ClusterCommand::Adopt(args) => adopt::adopt(&session, &args, printer).await,
        ClusterCommand::Restate(args) => create::restate(&session, &args, printer).await,
        ClusterCommand::RotateCa(args) => rotate_ca::rotate(&session, &args, printer).await,
        ClusterCommand::List(args) => show::list(&session, &args, printer).await,
        ClusterCommand::Show { cluster } => show::show(&session, &cluster, printer).await,
        ClusterCommand::Explain { cluster } => show::explain(&session, &cluster, printer).await,
        ClusterCommand::Wait { cluster, timeout } => {
            wait::wait(&session, &cluster, timeout, printer).await
        }
        ClusterCommand::Approve { cluster, agent } => {
            approve::approve(&session, &cluster, &agent, printer).await
        }
        ClusterCommand::Abandon { cluster, reason, yes } => {
            let cluster = session.cluster(&cluster).await?;
            let ends = format!(
                "Cluster {} ({}) is {} with {} of {} seats taken: it will never form.",
                cluster.name, cluster.cluster, cluster.state, cluster.seated, cluster.size
            );
            IrreversibleAct { consequences: vec![ends], name: cluster.name.as_str() }
                .confirm(yes, printer)?;
            let after = session.client.abandon(cluster.cluster, &reason).await?;
            show::print_summary(printer, &after)
        }
        ClusterCommand::Retire { cluster, reason, force, yes } => {
            let wanted = retire::RetireArguments { reason, force, yes };
            retire::retire(&session, &cluster, wanted, printer).await
        }
        ClusterCommand::Unretire { cluster } => retire::unretire(&session, &cluster, printer).await,
        ClusterCommand::Reopen { cluster } => retire::reopen(&session, &cluster, printer).await,
        ClusterCommand::Export { cluster, out } => {
            export::export(&session, &cluster, &out, printer).await
        }
        ClusterCommand::Credentials { cluster, out, renew, cidr, yes } => {
            let wanted =
                credentials::CredentialsArguments { out: &out, renew, expected: &cidr, yes };
            credentials::credentials(&session, &cluster, &wanted, printer).await
        }
    }
}
