//! The node's command line, and the files that the node reads. Both are made from the commit
//! document and the journal.

use std::fmt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use discovery_types::api::{InitialMember, NodeProgram};
use discovery_types::document::VerifiedDocument;
use discovery_types::leaves::Leaves;
use discovery_types::record::{Record, VerifiedRecord};
use discovery_types::statement::Statement;
use discovery_types::url::NodeUrl;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use serde::Serialize;

use super::environment;
use super::running_node::CommandLine;
use crate::exit::ExitError;
use crate::state::addresses::Addresses;
use crate::state::adopted::{self, AdoptedNode, ServedFiles};
use crate::state::{self, Layout, StateError, state_exit_error};

/// How long a node's program may take to print its version.
const VERSION_DEADLINE: Duration = Duration::from_secs(10);
/// Prefix of the line in the output of `--version` that identifies muster-node.
const MUSTER_NODE_LINE: &str = "Muster Node:";
/// Prefix of the line with etcd's version, which muster-node prints too.
const ETCD_LINE: &str = "etcd Version: ";

/// Node flags that the agent sets itself, because identity, transport security or supervision
/// depend on them.
const RESERVED_FLAGS: &[&str] = &[
    "name",
    "data-dir",
    "wal-dir",
    "listen-peer-urls",
    "listen-client-urls",
    "initial-advertise-peer-urls",
    "advertise-client-urls",
    "initial-cluster",
    "initial-cluster-state",
    "initial-cluster-token",
    "force-new-cluster",
    "cert-file",
    "key-file",
    "client-cert-auth",
    "trusted-ca-file",
    "peer-cert-file",
    "peer-key-file",
    "peer-client-cert-auth",
    "peer-trusted-ca-file",
    "auto-tls",
    "peer-auto-tls",
    "muster-document",
    "config-file",
];
/// Prefix of the flags for etcd's own discovery services, which Muster doesn't use. etcd refuses
/// them together with `--initial-cluster`, which the agent sets.
const DISCOVERY_FLAGS: &str = "discovery";

/// Whether the agent sets this flag of the node itself. The name is without dashes.
pub(crate) fn is_set_by_agent(flag: &str) -> bool {
    RESERVED_FLAGS.contains(&flag) || flag.starts_with(DISCOVERY_FLAGS)
}

/// Kind of a node's program, found by its `--version` output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NodeKind {
    /// The program is muster-node.
    Muster,
    /// The program is stock etcd, of this version.
    Etcd {
        /// Major version: 3 for etcd 3.6.
        major: u32,
        /// Minor version: 6 for etcd 3.6.
        minor: u32,
    },
}

impl fmt::Display for NodeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Muster => f.write_str("muster-node"),
            Self::Etcd { major, minor } => write!(f, "etcd {major}.{minor}"),
        }
    }
}

impl NodeKind {
    /// Parses the output of `--version`. muster-node prints etcd's line too, for tools that look
    /// for it.
    fn from_version(text: &str) -> Option<Self> {
        if text.lines().any(|line| line.starts_with(MUSTER_NODE_LINE)) {
            return Some(Self::Muster);
        }
        let mut parts = text.lines().next()?.strip_prefix(ETCD_LINE)?.split('.');
        let (major, minor) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        Some(Self::Etcd { major, minor })
    }

    /// Returns the flag that turns off etcd's check of a peer's source address against its
    /// certificate. On one machine or behind NAT, a peer may connect from an address that its
    /// certificate doesn't contain. The check adds nothing, since only peers have certificates of
    /// the peers' own CA. etcd 3.6 dropped the flag's `experimental` prefix.
    fn flag_for_any_source(self) -> Option<&'static str> {
        match self {
            Self::Muster => None,
            Self::Etcd { major, minor } if (major, minor) < (3, 6) => {
                Some("--experimental-peer-skip-client-san-verification")
            }
            Self::Etcd { .. } => Some("--peer-skip-client-san-verification"),
        }
    }
}

/// Everything from which the node's command line and files are made.
pub(crate) struct NodeCommand<'a> {
    /// Paths in the data directory.
    pub layout: &'a Layout,
    /// The commit document, with which the cluster was founded.
    pub document: &'a VerifiedDocument,
    /// The record that this host signed about itself.
    pub record: &'a Record,
    /// How this member came to its cluster.
    pub origin: Origin<'a>,
    /// The newest statement, which contains the CA certificates.
    pub statement: &'a Statement,
    pub leaves: &'a Leaves,
    /// The member's URLs and listen addresses.
    pub addresses: &'a Addresses,
}

/// How a member came to its cluster.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Origin<'a> {
    /// The member is a founder, with this seat in the commit document.
    Founder(u8),
    /// The member was added to a running cluster, which had these members at that time.
    Newcomer(&'a [InitialMember]),
}

#[derive(Serialize)]
struct MemberDocument<'a> {
    version: u32,
    document: String,
    cluster_name: String,
    #[serde(rename = "self")]
    own: OwnSeat,
    members: Vec<DocumentMember<'a>>,
}

#[derive(Serialize)]
struct OwnSeat {
    seat: u8,
}

#[derive(Serialize)]
struct DocumentMember<'a> {
    seat: u8,
    name: String,
    peer_urls: &'a [NodeUrl],
    client_urls: &'a [NodeUrl],
    incarnation: String,
    node_key: String,
}

impl NodeCommand<'_> {
    /// Writes certificates and a founder's member list. Their content follows from the journal.
    /// Each start compares the files with the journal, and rewrites a file that a crash has
    /// damaged.
    pub(crate) fn write_files(&self) -> Result<(), ExitError> {
        write_certificates(self.layout, self.leaves, self.statement)?;
        let Origin::Founder(seat) = self.origin else { return Ok(()) };
        let member_document = MemberDocument {
            version: 1,
            document: self.document.hash().to_string(),
            cluster_name: self.statement.name.to_string(),
            own: OwnSeat { seat },
            members: (1..).zip(self.document.records()).map(document_member).collect(),
        };
        let json =
            serde_json::to_vec_pretty(&member_document).expect("plain structs always serialise");
        write_if_changed(&self.layout.member_document(), &json).map_err(state_exit_error)
    }

    /// Returns the node's complete command line.
    pub(crate) fn command_line(&self, path: &Path, kind: NodeKind, more: &[String]) -> CommandLine {
        if let Some(adopted) = self.layout.adopted() {
            return self.adopted_command_line(adopted, path, kind, more);
        }
        let record = self.record;
        let tls = self.layout.tls();
        let text = |path: &Path| path.display().to_string();
        let file = |name: &str| text(&tls.join(name));
        let mut arguments = Vec::new();
        let mut flag = |name: &str, value: String| {
            arguments.push(format!("--{name}"));
            arguments.push(value);
        };
        flag("name", record.name.to_string());
        flag("data-dir", text(&self.layout.node()));
        flag("listen-peer-urls", format!("https://{}", self.addresses.listen.peer));
        flag("listen-client-urls", format!("https://{}", self.addresses.listen.client));
        flag("initial-advertise-peer-urls", self.addresses.peer_url.to_string());
        flag("advertise-client-urls", self.addresses.client_url.to_string());
        flag("initial-cluster", self.initial_cluster());
        flag("initial-cluster-state", self.origin.state().to_owned());
        flag("initial-cluster-token", self.document.hash().to_string());
        flag("cert-file", file("client.crt"));
        flag("key-file", file("node.key"));
        flag("trusted-ca-file", file("client-ca.crt"));
        flag("peer-cert-file", file("peer.crt"));
        flag("peer-key-file", file("node.key"));
        flag("peer-trusted-ca-file", file("peer-ca.crt"));
        if kind == NodeKind::Muster && matches!(self.origin, Origin::Founder(_)) {
            flag("muster-document", text(&self.layout.member_document()));
        }
        arguments.extend(kind.flag_for_any_source().map(str::to_owned));
        arguments.push("--client-cert-auth".to_owned());
        arguments.push("--peer-client-cert-auth".to_owned());
        arguments.extend(more.iter().cloned());
        CommandLine { path: path.to_owned(), arguments }
    }

    /// Returns the command line of an adopted etcd: its own settings, and the files of the agent's
    /// `tls` directory. As long as etcd has data, it ignores `--initial-cluster`. Without data it
    /// can't start, because the agent's `--initial-cluster` names only this member.
    fn adopted_command_line(
        &self,
        adopted: &AdoptedNode,
        path: &Path,
        kind: NodeKind,
        more: &[String],
    ) -> CommandLine {
        let text = |path: &Path| path.display().to_string();
        let (served, tls) = (ServedFiles::of(self.layout), self.layout.tls());
        let Addresses { peer_url, client_url, listen } = self.addresses;
        let has_moved = !self.record.peer_urls.contains(peer_url);
        let (listen_peers, listen_clients, clients) = match has_moved {
            true => (
                format!("https://{}", listen.peer),
                format!("https://{}", listen.client),
                client_url.to_string(),
            ),
            false => {
                let clients = self.record.client_urls.iter().map(NodeUrl::to_string);
                let clients = clients.collect::<Vec<_>>().join(",");
                (adopted.listen_peer_urls.clone(), adopted.listen_client_urls.clone(), clients)
            }
        };
        let flags = [
            ("name", adopted.etcd_name.clone()),
            ("data-dir", text(&adopted.directory)),
            ("listen-peer-urls", listen_peers),
            ("listen-client-urls", listen_clients),
            ("initial-advertise-peer-urls", peer_url.to_string()),
            ("advertise-client-urls", clients),
            ("initial-cluster", format!("{}={peer_url}", adopted.etcd_name)),
            ("initial-cluster-state", "existing".to_owned()),
            ("cert-file", text(&served.cert)),
            ("key-file", text(&served.key)),
            ("trusted-ca-file", text(&tls.join("client-ca.crt"))),
            ("client-cert-auth", adopted.client_cert_auth.to_string()),
            ("peer-cert-file", text(&served.peer_cert)),
            ("peer-key-file", text(&served.peer_key)),
            ("peer-trusted-ca-file", text(&tls.join("peer-ca.crt"))),
            ("peer-client-cert-auth", adopted.peer_client_cert_auth.to_string()),
        ];
        let wal = adopted.wal_directory.iter().map(|path| ("wal-dir", text(path)));
        let mut arguments: Vec<String> =
            flags.into_iter().chain(wal).map(|(name, value)| format!("--{name}={value}")).collect();
        arguments.extend(kind.flag_for_any_source().map(str::to_owned));
        arguments.extend(adopted.flags.iter().chain(more).cloned());
        CommandLine { path: path.to_owned(), arguments }
    }

    /// Returns `name=url` for each peer URL, separated by commas; founders in seat order.
    fn initial_cluster(&self) -> String {
        let pairs: Vec<String> = match self.origin {
            Origin::Founder(_) => {
                let records = self.document.records().iter();
                let urls = records.flat_map(|record| {
                    record.peer_urls.iter().map(|url| format!("{}={url}", record.name))
                });
                urls.collect()
            }
            Origin::Newcomer(members) => members
                .iter()
                .map(|member| format!("{}={}", member.name, member.peer_url))
                .collect(),
        };
        pairs.join(",")
    }
}

impl Origin<'_> {
    /// Returns the value of etcd's flag `--initial-cluster-state`.
    fn state(self) -> &'static str {
        match self {
            Self::Founder(_) => "new",
            Self::Newcomer(_) => "existing",
        }
    }
}

/// Writes certificates where the node and this agent read them. Node and agent load new
/// certificates without a restart.
pub(crate) fn write_certificates(
    layout: &Layout,
    leaves: &Leaves,
    statement: &Statement,
) -> Result<(), ExitError> {
    let tls = layout.tls();
    for (name, text) in [
        ("peer-ca.crt", &statement.peer_bundle()),
        ("client-ca.crt", &statement.client_bundle()),
        ("peer.crt", &leaves.peer),
        ("client.crt", &leaves.client),
    ] {
        write_if_changed(&tls.join(name), text.as_bytes()).map_err(state_exit_error)?;
    }
    if serves_own_certificates(layout) == Some(true) {
        ServedFiles::of(layout).write_own(layout, leaves).map_err(state_exit_error)?;
    }
    Ok(())
}

/// Whether an adopted etcd serves certificates of the cluster's own CAs. `None` if the node began
/// under an agent.
pub(crate) fn serves_own_certificates(layout: &Layout) -> Option<bool> {
    // Read the file about the etcd again, because `muster-agent adopt certificates` changes it
    // while the agent runs.
    let adopted = layout.adopted()?;
    let newest = adopted::read_adopted(layout).ok().flatten();
    Some(newest.as_ref().unwrap_or(adopted).has_new_certificates)
}

fn document_member((seat, record): (u8, &VerifiedRecord)) -> DocumentMember<'_> {
    DocumentMember {
        seat,
        name: record.name.to_string(),
        peer_urls: &record.peer_urls,
        client_urls: &record.client_urls,
        incarnation: record.incarnation.to_string(),
        node_key: record.node_key().to_string(),
    }
}

/// Writes a file only if its content differs. So a start with everything in place needs no disk
/// space.
fn write_if_changed(path: &Path, bytes: &[u8]) -> Result<(), StateError> {
    if state::read(path)?.as_deref() == Some(bytes) {
        return Ok(());
    }
    Ok(muster_files::data::replace_volatile(path, bytes)?)
}

impl NodeKind {
    /// Returns the name of this kind of program in discovery's API.
    pub(crate) fn program(self) -> NodeProgram {
        match self {
            Self::Muster => NodeProgram::MusterNode,
            Self::Etcd { .. } => NodeProgram::Etcd,
        }
    }
}

/// The kind of the node's program, as a shared future; or the text of the error.
pub(crate) type NodeKindFuture = Shared<BoxFuture<'static, Result<NodeKind, String>>>;

/// Runs `--version` in the background, so that no launch waits for it.
pub(crate) fn detect_kind_in_background(program: &Path) -> NodeKindFuture {
    let program = program.to_owned();
    let asked = tokio::spawn(async move { detect_kind(&program).await });
    let answer = async move { asked.await.unwrap_or_else(|error| Err(error.to_string())) };
    answer.boxed().shared()
}

/// Runs the program with `--version` and returns its kind.
pub(crate) async fn detect_kind(program: &Path) -> Result<NodeKind, String> {
    let asked = tokio::process::Command::new(program)
        .arg("--version")
        .env_clear()
        .envs(environment::node_variables())
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .output();
    let failed =
        |what: String| format!("{} --version: {what}; see --node-binary", program.display());
    let output = tokio::time::timeout(VERSION_DEADLINE, asked)
        .await
        .map_err(|_| failed(format!("no answer within {} s", VERSION_DEADLINE.as_secs())))?
        .map_err(|error| failed(error.to_string()))?;
    NodeKind::from_version(&String::from_utf8_lossy(&output.stdout))
        .ok_or_else(|| failed("it is neither muster-node nor etcd".to_owned()))
}

#[cfg(test)]
mod tests {
    use discovery_types::fixtures::ClusterFixture;

    use super::*;
    use crate::state::addresses::ListenAddresses;

    #[test]
    fn muster_node_is_recognised_by_its_own_line_and_etcd_by_its_first_line() {
        let own = NodeKind::from_version("etcd Version: 3.6.5\nMuster Node: 0.1.0\n");
        assert_eq!(own, Some(NodeKind::Muster));
        let etcd = NodeKind::from_version("etcd Version: 3.4.23\nGit SHA: x\n");
        assert_eq!(etcd, Some(NodeKind::Etcd { major: 3, minor: 4 }));
        let next = NodeKind::from_version("etcd Version: 3.7.0-alpha.0\n");
        assert_eq!(next, Some(NodeKind::Etcd { major: 3, minor: 7 }));
        for other in ["", "bash 5\n", "etcd Version: \n", "etcd Version: 4\n"] {
            assert_eq!(NodeKind::from_version(other), None, "{other:?}");
        }
    }

    #[test]
    fn each_etcd_version_gets_its_own_flag_against_the_address_check() {
        let flag = |major, minor| NodeKind::Etcd { major, minor }.flag_for_any_source();
        let experimental = Some("--experimental-peer-skip-client-san-verification");
        let plain = Some("--peer-skip-client-san-verification");
        assert_eq!([flag(3, 4), flag(3, 5), flag(3, 6)], [experimental, experimental, plain]);
        assert_eq!([flag(3, 10), flag(4, 0)], [plain, plain]);
        assert_eq!(NodeKind::Muster.flag_for_any_source(), None);
    }

    /// The member in seat 2 of three, with a data directory.
    struct SecondMember {
        at: Addresses,
        world: ClusterFixture,
        document: VerifiedDocument,
        leaves: Leaves,
        layout: Layout,
        _folder: tempfile::TempDir,
    }

    impl SecondMember {
        fn new() -> Self {
            let (world, folder) = (ClusterFixture::new(3), tempfile::tempdir().unwrap());
            let jws = world.document(7).sign(&world.service);
            let document = VerifiedDocument::verify(&jws, &world.chain()).unwrap();
            let layout = Layout::new(folder.path()).unwrap();
            layout.create().unwrap();
            let address = |port| ([10, 0, 0, 2], port).into();
            let at = Addresses {
                peer_url: world.records[1].peer_urls[0].clone(),
                client_url: world.records[1].client_urls[0].clone(),
                listen: ListenAddresses { peer: address(2380), client: address(2379) },
            };
            Self { at, leaves: world.leaves(1), world, document, layout, _folder: folder }
        }

        fn command(&self) -> NodeCommand<'_> {
            NodeCommand {
                layout: &self.layout,
                document: &self.document,
                statement: &self.world.statement,
                leaves: &self.leaves,
                record: &self.world.records[1],
                origin: Origin::Founder(2),
                addresses: &self.at,
            }
        }
    }

    #[test]
    fn the_command_line_lists_all_members_and_requires_client_certificates() {
        let second = SecondMember::new();
        let etcd = NodeKind::Etcd { major: 3, minor: 6 };
        let program = second.command().command_line(Path::new("/etcd"), etcd, &[]);
        let arguments = program.arguments;
        let value = |flag: &str| {
            let at = arguments.iter().position(|argument| argument == flag).unwrap();
            arguments[at + 1].as_str()
        };
        assert_eq!(value("--name"), "db-2");
        assert_eq!(value("--initial-advertise-peer-urls"), "https://10.0.0.2:2380");
        let all = [1, 2, 3].map(|seat| format!("db-{seat}=https://10.0.0.{seat}:2380"));
        assert_eq!(value("--initial-cluster"), all.join(","));
        for flag in ["--client-cert-auth", "--peer-client-cert-auth"] {
            assert!(arguments.iter().any(|argument| argument == flag), "{flag}");
        }
    }

    #[test]
    fn a_newcomers_command_line_lists_the_current_members_and_founds_no_cluster() {
        let second = SecondMember::new();
        let member = |name: &str, url: &str| InitialMember {
            name: name.to_owned(),
            peer_url: url.parse().unwrap(),
        };
        let members =
            [member("x", "https://10.0.0.9:2380"), member("db-2", "https://10.0.0.2:2380")];
        let command = NodeCommand { origin: Origin::Newcomer(&members), ..second.command() };
        command.write_files().unwrap();
        assert!(!second.layout.member_document().exists(), "it is in no document");
        let arguments = command.command_line(Path::new("/node"), NodeKind::Muster, &[]).arguments;
        let value = |flag: &str| {
            let at = arguments.iter().position(|argument| argument == flag)?;
            Some(arguments[at + 1].as_str())
        };
        assert_eq!(value("--initial-cluster-state"), Some("existing"));
        let all = "x=https://10.0.0.9:2380,db-2=https://10.0.0.2:2380";
        assert_eq!(value("--initial-cluster"), Some(all));
        assert_eq!(value("--muster-document"), None);
    }

    #[test]
    fn each_certificate_is_written_to_its_own_file() {
        let second = SecondMember::new();
        second.command().write_files().unwrap();
        for (name, expected) in [
            ("peer.crt", &second.leaves.peer),
            ("client.crt", &second.leaves.client),
            ("peer-ca.crt", &second.world.statement.peer_ca),
            ("client-ca.crt", &second.world.statement.client_ca),
        ] {
            let written = std::fs::read_to_string(second.layout.tls().join(name)).unwrap();
            assert_eq!(written, *expected, "{name}");
        }
    }
}
