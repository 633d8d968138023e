//! The command line of muster-agent.

pub(crate) mod addressing;
mod adopt;
mod backup;
mod member;
pub(crate) mod settings;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use discovery_types::grant::GrantId;
use muster_identity::Cloud;

use crate::host::cloud::METADATA_URL;

pub(crate) use self::adopt::{
    AdoptCommand, CertificatesArguments, EnrolArguments, ReleaseArguments, SurveyArguments,
    TakeOverArguments,
};
pub(crate) use self::backup::{
    BackupBy, BackupChoice, BackupCommand, BackupRecipientArguments, BackupRestoreArguments,
    BackupRetentionArguments, BackupStoreArguments, BackupSubcommand, BackupVerifyArguments,
    SignatureArguments,
};
pub(crate) use self::member::{
    AddArguments, ClusterAccess, MemberCommand, MemberSubcommand, MoveLeaderArguments, PlanCommand,
    PromoteArguments, RemoveArguments, ReplaceArguments, UpdateArguments,
};

/// The data directory unless the command line gives another.
pub(crate) const DEFAULT_DATA_DIR: &str = "/var/lib/muster";

/// All arguments of muster-agent.
#[derive(Debug, Parser)]
#[command(
    name = "muster-agent",
    version,
    about = "Meets its peers through the discovery service, then runs and looks after this host's Raft node.",
    long_about = "One muster-agent runs on each host. Give it the join bundle that an admin made \
        (muster-discovery token create). The agent works out this host's address, meets the other \
        hosts through the discovery service, and checks everything that they signed. It starts the \
        node once all hosts agree on one list of members. From then on the node needs neither \
        discovery nor agent to serve; the agent keeps it running.",
    after_long_help = "FIRST START\n  \
        muster-agent run --data-dir /var/lib/muster --bundle-file /root/bundle\n  \
        ssh admin@… muster-discovery token create --cluster demo | muster-agent run --bundle-file -\n\n\
        INTO A CLUSTER THAT RUNS (a join ticket: token create --kind join)\n  \
        muster-agent run --bundle-file /root/ticket\n\n\
        EVERY LATER START (no bundle, no discovery)\n  \
        muster-agent run\n\n\
        MOVE TO ANOTHER ADDRESS (not needed if the host has lost the old one)\n  \
        muster-agent run --advertise-address 10.1.0.2\n\n\
        WOULD A START WORK? (starts and changes nothing)\n  \
        muster-agent run --check --bundle-file /root/bundle\n\n\
        EXIT CODES\n  \
        0  done    1  failed, may be started again    2  wrong usage\n  \
        3  do not start me again: a person has to decide (RestartPreventExitStatus=3)\n\n\
        UNDER SYSTEMD\n  \
        SIGTERM stops the agent and its node. SIGUSR1 ends the agent alone, and the next one adopts the \
        node: KillMode=process, RestartKillSignal=SIGUSR1."
)]
pub(crate) struct AgentCli {
    /// The subcommand to run.
    #[command(subcommand)]
    pub command: AgentCommand,
}

/// The subcommands of muster-agent.
#[derive(Debug, Subcommand)]
pub(crate) enum AgentCommand {
    /// Join or form the cluster, then run the node and keep it running.
    Run(Box<RunArguments>),
    /// Show what the agent and the node are doing, and why they wait.
    Status(StatusArguments),
    /// Put the old state aside, so that this host can join again as a new member.
    #[command(long_about = "Moves the agent's and the node's state into quarantine-<time> under \
        the data directory; nothing is deleted. Afterwards this host is a new one: it gets a new \
        key and needs a new token. The command is refused while an agent or a node runs. Remove \
        this host's member from a running cluster first: the cluster goes on counting it until \
        then.")]
    Reset(ResetArguments),
    /// Bring a running etcd under management, without an interruption.
    #[command(
        subcommand,
        long_about = "A running etcd cluster (3.4 to 3.7, with TLS) comes under management while it \
            serves: members keep their ids, data and settings. Nothing is stopped before an operator \
            says so for each member.",
        after_long_help = "STEP BY STEP\n  \
            on a host that reaches the cluster, then on an owner's machine:\n    \
            muster-agent adopt survey --endpoints https://10.0.0.1:2379 --cacert ca.crt --cert client.crt \\\n      \
            --key client.key --peer-cacert peer-ca.crt > demo.json\n    \
            muster-discovery cluster adopt demo --survey demo.json\n    \
            muster-discovery token create --cluster demo --uses 1 --name db-1 --out db-1.bundle\n  \
            on the host of each etcd, on all of them at about the same time; stops nothing:\n    \
            muster-agent adopt enrol --bundle-file db-1.bundle --unit etcd.service\n  \
            on one host after the other:\n    \
            muster-agent adopt take-over --agent-unit muster-agent.service\n  \
            once all are taken over, on each host, and then on an owner's machine:\n    \
            muster-agent adopt certificates\n    \
            muster-discovery cluster rotate-ca demo\n  \
            back again, on one host after the other: muster-agent release --help"
    )]
    Adopt(AdoptCommand),
    /// End the agent's management of this host's member; its node continues without an agent.
    #[command(after_long_help = "\
EXAMPLES\n  \
  Under systemd. Writes the unit etcd-plain.service with its files, and lets it run the node:\n    \
    muster-agent release --out /etc/etcd-plain --unit etcd-plain.service \\\n      \
    --agent-unit muster-agent.service\n  \
  Elsewhere. The command says when to stop the agent, and how to start the node:\n    \
    muster-agent release --out /etc/etcd-plain")]
    Release(ReleaseArguments),
    /// Make a new cluster from a surviving data directory when a majority of the members is lost
    /// for good.
    #[command(
        subcommand,
        long_about = "A cluster that lost a majority of its members waits for ever: only a person can \
            say that they will not come back. If so, this command makes a new cluster, with a new \
            id, from the surviving directory whose log ends last. Nothing here starts by itself, and \
            no member of the old cluster can talk to the new one.",
        after_long_help = "STEP BY STEP\n  \
            on each host with a surviving directory, its agent stopped:\n    \
            muster-agent recover examine --json > HOST.json\n  \
            on the host whose log ends last (examine --report shows it), with the others' files:\n    \
            muster-agent recover make --report OTHER.json --key operator.pem --i-accept-data-loss\n    \
            muster-agent run\n  \
            on each other host, one after the other: muster-agent reset --yes, and join again as a \
            learner"
    )]
    Recover(RecoverCommand),
    /// Tell this host's agent where the discovery service is.
    #[command(
        subcommand,
        long_about = "The agent finds a discovery service that has moved by itself, if an owner has \
            announced where it is while one agent of the cluster still reached the service. If none \
            did, hand the announcement to the agent of one host. The other agents get it from the \
            cluster's own store.",
        after_long_help = "STEP BY STEP\n  \
            on an owner's machine:\n    \
            muster-discovery service announce demo --out demo.service\n  \
            on one host of the cluster, as the agent's user:\n    \
            muster-agent context set demo.service"
    )]
    Context(ContextCommand),
    /// Let members find each other after all their hosts have moved, without discovery.
    #[command(
        subcommand,
        after_help = "\
EXAMPLES\n  \
  On each host, then copy the files to the others:\n    \
    muster-agent address show > db-1.address\n  \
  On each host, with the files of the others; works while the agent runs:\n    \
    muster-agent address add db-2.address db-3.address"
    )]
    Address(AddressCommand),
    /// Show and change the cluster's members.
    Member(MemberCommand),
    /// List and revoke the replacement policies in the cluster's own store, without discovery.
    #[command(after_help = "\
EXAMPLES\n  \
  List the policies, and the replacements that were begun by them:\n    \
    muster-agent policy list\n  \
  End one for ever, although discovery can't be reached:\n    \
    muster-agent policy revoke 2zqkq3s5vdyfa6ai")]
    Policy(PolicyCommand),
    /// Save, list, prove and restore backups of the cluster.
    Backup(Box<BackupCommand>),
    /// Replace this process by the node (used by `run`).
    #[command(hide = true)]
    LaunchNode(LaunchNodeArguments),
}

impl AgentCommand {
    /// Returns whether programs read the command's output, so that its errors are JSON, too.
    pub(crate) fn is_for_programs(&self) -> bool {
        match self {
            Self::Run(run) if run.check => run.json,
            Self::Run(run) => run.log_format == AgentLogFormat::Json,
            Self::Status(status) => status.json,
            Self::Reset(reset) => reset.json,
            Self::Adopt(adopt) => adopt.is_for_programs(),
            Self::Release(release) => release.json,
            Self::Recover(RecoverCommand::Examine(examine)) => examine.json,
            Self::Recover(RecoverCommand::Make(make)) => make.json,
            Self::Context(ContextCommand::Set(set)) => set.json,
            Self::Address(AddressCommand::Show(_)) => true,
            Self::Address(AddressCommand::Add(add)) => add.json,
            Self::Member(member) => member.access.json,
            Self::Policy(policy) => policy.access.json,
            Self::Backup(backup) => backup.access.json,
            Self::LaunchNode(_) => false,
        }
    }
}

/// Option for the data directory.
#[derive(Args, Clone, Debug)]
pub(crate) struct DataDir {
    /// The folder with the agent's and the node's state; `run` makes it (0700) if it is missing.
    #[arg(long, value_name = "DIR", env = "MUSTER_DATA_DIR", default_value = DEFAULT_DATA_DIR)]
    pub data_dir: PathBuf,
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum AgentLogFormat {
    /// Text lines for people to read.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// Command-line arguments of `run`.
#[derive(Args, Debug)]
pub(crate) struct RunArguments {
    /// Option for the data directory.
    #[command(flatten)]
    pub data_dir: DataDir,

    /// File with the join bundle, one line (keep it 0600), or - for standard input. A bundle is a
    /// secret, so it is never an argument. The bundle is needed until this host has redeemed it; a
    /// host that already holds a seat or runs its node doesn't read it.
    #[arg(long, value_name = "FILE")]
    pub bundle_file: Option<PathBuf>,

    /// If the cluster has its members already, wait instead of ending with exit code 3. Once the
    /// bundle file holds a join ticket (token create --kind join), join the cluster with that
    /// ticket. Meanwhile discovery shows this host as waiting for a ticket (cluster show). Also
    /// wait for a bundle file that is not there yet, or holds no whole bundle.
    #[arg(long)]
    pub wait_for_ticket: bool,

    /// This member's name: a-z, 0-9 and - (default: the host's name and 4 digits of its key).
    #[arg(long)]
    pub name: Option<String>,

    /// The zone that this host is in, such as a cloud's availability zone: a-z, 0-9 and -. A token
    /// can be bound to one zone, and discovery shows each host's zone.
    #[arg(long, value_name = "NAME", env = "MUSTER_ZONE")]
    pub zone: Option<String>,

    /// Ask the metadata service of this cloud (aws, gcp or azure) for the zone, when the host gets
    /// a place in a cluster.
    #[arg(long, value_name = "CLOUD", env = "MUSTER_ZONE_FROM", conflicts_with = "zone")]
    pub zone_from: Option<Cloud>,

    /// Show discovery an identity document of this cloud's metadata service (aws, gcp or azure),
    /// which says which virtual machine this host is. A token can require one (token create
    /// --require).
    #[arg(long, value_name = "CLOUD", env = "MUSTER_IDENTITY_FROM")]
    pub identity_from: Option<Cloud>,

    /// Audience of the identity document, with --identity-from azure: the application id URI that
    /// the token requires. The host's managed identity must be allowed to use it.
    #[arg(long, value_name = "URI", env = "MUSTER_IDENTITY_AUDIENCE", requires = "identity_from")]
    pub identity_audience: Option<String>,

    /// Address of the cloud's metadata service, for tests.
    #[arg(long, value_name = "URL", env = "MUSTER_METADATA_URL", default_value = METADATA_URL, hide = true)]
    pub metadata_url: String,

    /// Host name or address at which the other members reach this host (default: the source address
    /// of packets to discovery; later: the previous one).
    #[arg(long, value_name = "HOST")]
    pub advertise_address: Option<String>,

    /// The port for the other members (default: 2380).
    #[arg(long, value_name = "PORT")]
    pub peer_port: Option<u16>,

    /// The port for clients (default: 2379).
    #[arg(long, value_name = "PORT")]
    pub client_port: Option<u16>,

    /// Full URL at which the other members reach this member; overrides the advertised address and
    /// the port.
    #[arg(long, value_name = "URL")]
    pub peer_url: Option<String>,

    /// Full URL at which clients reach this member; overrides the advertised address and the port.
    #[arg(long, value_name = "URL")]
    pub client_url: Option<String>,

    /// The address to listen on (default: the advertised address if this host has it, else all
    /// addresses).
    #[arg(long, value_name = "IP")]
    pub listen_address: Option<IpAddr>,

    /// Client address of a member of the cluster that this host joins with a ticket: HOST,
    /// HOST:PORT or a URL; may be repeated. Needed for a cluster that discovery can't find, for
    /// example after a recovery at other addresses. The member that answers still has to prove that
    /// it belongs to the ticket's cluster.
    #[arg(long, value_name = "ADDRESS")]
    pub cluster_address: Vec<String>,

    /// File with an id of this machine, in place of the system's own ids: for containers and
    /// namespaces that share the system's ids. The content must stay with the machine, not with its
    /// disk.
    #[arg(long, value_name = "FILE")]
    pub machine_id_file: Option<PathBuf>,

    /// The node's program (default: muster-node beside this program, else in PATH). Stock etcd
    /// works, too.
    #[arg(long, value_name = "PATH")]
    pub node_binary: Option<PathBuf>,

    /// Serve /metrics (Prometheus) and /livez on this address, as plain HTTP without a password:
    /// outside loopback, let a firewall admit only the monitoring hosts.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics_listen: Option<SocketAddr>,

    /// Options for the store of scheduled backups.
    #[command(flatten, next_help_heading = "Backups")]
    pub backup_store: BackupStoreArguments,
    /// Options for the schedule of backups.
    #[command(flatten, next_help_heading = "Backups")]
    pub backup_schedule: BackupRetentionArguments,
    /// Options for the encryption of backups.
    #[command(flatten, next_help_heading = "Backups")]
    pub backup_recipients: BackupRecipientArguments,

    /// Filter for log lines: a level, or directives as in `info,muster_agent=debug`. The node's
    /// lines have the target `node`.
    #[arg(long, value_name = "FILTER", env = "MUSTER_LOG", default_value = "info")]
    pub log: String,

    /// Format of log lines on standard error.
    #[arg(long, value_enum, env = "MUSTER_LOG_FORMAT", default_value_t)]
    pub log_format: AgentLogFormat,

    /// Check the set-up, then exit. The checks cover the data directory, state, bundle, node,
    /// addresses, discovery and clock. Nothing is started, redeemed or changed. Exit code 0 if a
    /// start would work, 1 if not.
    #[arg(long)]
    pub check: bool,

    /// Print the result of --check as JSON.
    #[arg(long, requires = "check")]
    pub json: bool,

    /// More flags for the node, after --. Flags that determine the member's identity are refused.
    #[arg(last = true, value_name = "NODE FLAGS")]
    pub node_flags: Vec<String>,
}

/// Command-line arguments of `status`.
#[derive(Args, Debug)]
pub(crate) struct StatusArguments {
    /// Option for the data directory.
    #[command(flatten)]
    pub data_dir: DataDir,
    /// Exit with 1 unless the node is ready to serve.
    #[arg(long)]
    pub ready: bool,
    /// Wait until the node is ready to serve; exit with 1 if it isn't in time.
    #[arg(long)]
    pub wait: bool,
    /// Seconds after which --wait gives up.
    #[arg(long, value_name = "SECONDS", default_value_t = 300, requires = "wait")]
    pub timeout: u64,
    /// Print JSON for programs to read.
    #[arg(long)]
    pub json: bool,
}

/// Command-line arguments of `reset`.
#[derive(Args, Debug)]
pub(crate) struct ResetArguments {
    /// Option for the data directory.
    #[command(flatten)]
    pub data_dir: DataDir,
    /// Confirm that this host gives up its place in the cluster.
    #[arg(long)]
    pub yes: bool,
    /// Print JSON for programs to read.
    #[arg(long)]
    pub json: bool,
}

/// The subcommands of `muster-agent context`.
#[derive(Debug, Subcommand)]
pub(crate) enum ContextCommand {
    /// Take the URLs and keys of the service from a signed service statement. Works while the agent
    /// runs.
    Set(ContextSetArguments),
}

/// Arguments of `context set`.
#[derive(Args, Debug)]
pub(crate) struct ContextSetArguments {
    /// File that muster-discovery service announce --out has written, or - for standard input. It
    /// may hold service statements of other clusters, too.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Option for the data directory.
    #[command(flatten)]
    pub data_dir: DataDir,
    /// Print JSON for programs to read.
    #[arg(long)]
    pub json: bool,
}

/// The subcommands of `muster-agent address`.
#[derive(Debug, Subcommand)]
pub(crate) enum AddressCommand {
    /// Print this host's member's address as one signed line of JSON.
    Show(AddressShowArguments),
    /// Give this host's node the other members' addresses from these files.
    Add(AddressAddArguments),
}

/// Arguments of `address show`.
#[derive(Args, Debug)]
pub(crate) struct AddressShowArguments {
    /// Option for the data directory.
    #[command(flatten)]
    pub data_dir: DataDir,
}

/// Arguments of `address add`.
#[derive(Args, Debug)]
pub(crate) struct AddressAddArguments {
    /// Files with the output of `muster-agent address show` on other hosts.
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Option for the data directory.
    #[command(flatten)]
    pub data_dir: DataDir,
    /// Print JSON for programs to read.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `muster-agent policy`.
#[derive(Args, Debug)]
pub(crate) struct PolicyCommand {
    /// Options for reaching the cluster.
    #[command(flatten)]
    pub access: ClusterAccess,
    /// The subcommand to run.
    #[command(subcommand)]
    pub verb: PolicySubcommand,
}

/// The subcommands of `muster-agent policy`.
#[derive(Debug, Subcommand)]
pub(crate) enum PolicySubcommand {
    /// List the policies in the cluster's own store, and the replacements by them.
    List,
    /// Revoke a policy for ever: it replaces no further member, whatever discovery says.
    Revoke {
        /// The policy's id, as `policy list` shows it.
        #[arg(value_name = "ID")]
        id: GrantId,
    },
}

/// The subcommands of `muster-agent recover`.
#[derive(Debug, Subcommand)]
pub(crate) enum RecoverCommand {
    /// Show where each surviving log ends, and what would be lost; changes nothing.
    Examine(ExamineArguments),
    /// Make the new cluster from this host's data; the agent must be stopped.
    Make(MakeArguments),
}

/// Arguments of `recover examine`.
#[derive(Args, Debug)]
pub(crate) struct ExamineArguments {
    /// An agent's data directory; may be repeated if this host can reach several.
    #[arg(long, value_name = "DIR", env = "MUSTER_DATA_DIR", default_value = DEFAULT_DATA_DIR)]
    pub data_dir: Vec<PathBuf>,
    /// File with the output of this command with --json on another host; may be repeated.
    #[arg(long, value_name = "FILE")]
    pub report: Vec<PathBuf>,
    /// The node's program, as for run (default: muster-node beside this program, else in PATH). Not
    /// needed for an etcd's directory, which muster-node examines, too.
    #[arg(long, value_name = "PATH")]
    pub node_binary: Option<PathBuf>,
    /// Print JSON: for programs to read, and for --report of this command on another host.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `recover make`.
#[derive(Args, Debug)]
pub(crate) struct MakeArguments {
    /// Option for the data directory.
    #[command(flatten)]
    pub data_dir: DataDir,
    /// File with the output of `recover examine --json` on another host; give one for every
    /// surviving directory.
    #[arg(long, value_name = "FILE")]
    pub report: Vec<PathBuf>,
    /// The private key of an operator or owner of the cluster; signs the recovery statement.
    #[arg(long, value_name = "FILE")]
    pub key: PathBuf,
    /// Accept that data which only the lost members had is lost.
    #[arg(long)]
    pub i_accept_data_loss: bool,
    /// The sentence that the command otherwise asks you to type.
    #[arg(long, value_name = "SENTENCE")]
    pub yes: Option<String>,
    /// The node's program, as for run (default: muster-node beside this program, else in PATH).
    #[arg(long, value_name = "PATH")]
    pub node_binary: Option<PathBuf>,
    /// If --node-binary is an etcd: that etcd's etcdutl, or etcdctl before 3.5 (default: beside
    /// that etcd, else in PATH).
    #[arg(long, value_name = "PATH", requires = "node_binary")]
    pub etcdutl: Option<PathBuf>,
    /// Print JSON for programs to read.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of the hidden `launch-node`, which the agent passes.
#[derive(Args, Debug)]
pub(crate) struct LaunchNodeArguments {
    /// File to record the node's process in.
    #[arg(long)]
    pub pid_file: PathBuf,
    /// File that stays locked for as long as the node lives.
    #[arg(long)]
    pub lock_file: PathBuf,
    /// File for the node's output.
    #[arg(long)]
    pub log_file: PathBuf,
    /// Program of the node to run.
    pub program: PathBuf,
    /// Arguments of the node's program.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub arguments: Vec<String>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_flags_are_consistent() {
        AgentCli::command().debug_assert();
    }

    #[test]
    fn the_help_of_run_names_the_variable_of_the_log_filter() {
        let mut command = AgentCli::command();
        let run = command.find_subcommand_mut("run").unwrap();
        let help = run.render_long_help().to_string();
        assert!(help.contains("[env: MUSTER_LOG="), "{help}");
    }

    #[test]
    fn members_are_added_with_the_flag_that_run_and_etcdctl_have() {
        let peer_urls = |flag: &str| {
            let args = ["muster-agent", "member", "add", "db-4", flag, "https://10.0.0.4:2380"];
            let cli = AgentCli::try_parse_from(args).unwrap();
            let AgentCommand::Member(member) = cli.command else { panic!("not member") };
            let MemberSubcommand::Add(add) = member.verb else { panic!("not add") };
            add.peer_urls
        };
        assert_eq!(peer_urls("--peer-url"), peer_urls("--peer-urls"));
    }

    #[test]
    fn the_nodes_own_flags_pass_through_the_launcher_untouched() {
        let cli = AgentCli::try_parse_from([
            "muster-agent",
            "launch-node",
            "--pid-file=p",
            "--lock-file=l",
            "--log-file=o",
            "--",
            "/usr/bin/etcd",
            "--name",
            "a",
            "--version",
        ])
        .unwrap();
        let AgentCommand::LaunchNode(launch) = cli.command else { panic!("not launch-node") };
        assert_eq!(launch.program, PathBuf::from("/usr/bin/etcd"));
        assert_eq!(launch.arguments, ["--name", "a", "--version"]);
    }

    #[test]
    fn the_name_of_a_new_member_has_no_comma_equals_sign_or_control_character() {
        for (name, is_one) in [
            ("db-4", true),
            ("db 4", true),
            ("", false),
            ("a,b", false),
            ("a=b", false),
            ("a\x1b[1m", false),
        ] {
            let add = ["muster-agent", "member", "add", name, "--peer-urls", "https://h:1"];
            assert_eq!(AgentCli::try_parse_from(add).is_ok(), is_one, "{name:?}");
            let replace =
                ["muster-agent", "member", "replace", "a", name, "--peer-urls", "https://h:1"];
            assert_eq!(AgentCli::try_parse_from(replace).is_ok(), is_one, "{name:?}");
        }
    }

    #[test]
    fn a_bundle_is_refused_as_an_argument() {
        let typed = ["muster-agent", "run", "muster1 urls=https://x mst_boot_x"];
        assert!(AgentCli::try_parse_from(typed).is_err());
    }
}
