//! Examines the data left of a lost cluster, and makes a new cluster from it. The node's program
//! reads its own files; the agent compares the results.

pub(crate) mod choose;

use std::path::{Path, PathBuf};
use std::process::Stdio;

use discovery_types::recovery::NodeIdentity;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::cli::settings;
use crate::exit::{ExitError, error_chain};
use crate::launch::environment;
use crate::launch::node_command::{NodeKind, detect_kind};

/// The program that made a node's directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Maker {
    /// muster-node made the directory.
    MusterNode,
    /// Stock etcd made the directory.
    Etcd,
}

/// The fields of `muster-node data status --json` that the agent uses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DirectoryReport {
    /// The program that made the directory.
    pub maker: Maker,
    /// The directory's state, which determines what a start of the node would do: `whole`,
    /// `in-use`, `unfinished`, `empty`, `removed` or `damaged`.
    pub state: String,
    /// Description of the damage, and the damaged file.
    pub problem: Option<String>,
    /// Raft cluster id, in hexadecimal.
    pub cluster_id: Option<String>,
    /// Member id, in hexadecimal.
    pub member_id: Option<String>,
    /// The member's incarnation, in hexadecimal.
    pub incarnation: Option<String>,
    pub name: Option<String>,
    /// The end of the log, if there is one.
    pub log: Option<LogReport>,
    /// State of the store, if there is one.
    pub store: Option<StoreReport>,
    /// The single-member cluster that a recovery made in this directory, if there was one.
    pub forced: Option<ForcedCluster>,
}

impl DirectoryReport {
    /// Returns whether a new cluster was made in this directory, and its member has not started
    /// since. The recovery must then be completed.
    pub(crate) fn is_recovery_unfinished(&self) -> bool {
        self.forced.as_ref().is_some_and(|forced| !forced.rearmed)
    }
}

/// A new cluster of one member, which a recovery made from the data in a node's directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ForcedCluster {
    /// The member that the data belonged to.
    pub was: MemberIdentity,
    /// The member that the data belongs to now.
    pub is: MemberIdentity,
    /// Index of the last log entry that was kept.
    pub last_index: u64,
    /// Term of the last log entry that was kept.
    pub last_term: u64,
    /// Whether the new cluster's member has been started since the recovery.
    pub rearmed: bool,
}

/// The end of a member's log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LogReport {
    /// Index of the last entry.
    pub last_index: u64,
    /// Term of the last entry.
    pub last_term: u64,
    /// Highest index that is known to be committed.
    pub committed: u64,
}

/// State of a member's store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoreReport {
    /// Index of the last entry that the store on disk has applied.
    pub applied: u64,
    /// Newest revision: for muster-node, with the whole log applied; for stock etcd, that of the
    /// store on disk.
    pub revision: i64,
    /// The cluster's members: for muster-node, with the whole log applied; for stock etcd, those in
    /// the store on disk.
    pub members: Vec<StoredMember>,
}

/// A member according to a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredMember {
    /// Member id, in hexadecimal.
    pub id: String,
    /// The member's name; empty if it never started.
    pub name: String,
    /// Whether the member has no vote.
    pub is_learner: bool,
}

/// The data left on one host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Survivor {
    /// Name of the host with this data.
    pub host: String,
    /// The data directory of the host's agent.
    pub data_dir: String,
    /// State of the node's directory, as muster-node reports it. In JSON the field is called
    /// `sight`, its name in earlier versions, because other versions of the agent read it.
    #[serde(rename = "sight")]
    pub observed: DirectoryReport,
}

/// The programs that examine a directory and make a new cluster from it.
pub(crate) struct RecoveryPrograms {
    /// muster-node, which reads etcd's directories too.
    muster_node: PathBuf,
    /// Two programs for an etcd's directory: the etcd itself, and its tool for restoring
    /// (`etcdutl`, or `etcdctl` before 3.5).
    etcd: Option<(PathBuf, PathBuf)>,
}

impl RecoveryPrograms {
    /// Finds the programs. `node_binary` is the value of `--node-binary`, which means what it means
    /// for `run`. `etcdutl` is used only if `node_binary` is an etcd.
    pub(crate) async fn find(
        node_binary: Option<&Path>,
        etcdutl: Option<&Path>,
    ) -> Result<Self, ExitError> {
        let own = std::env::current_exe().map_err(|error| {
            ExitError::Failed(format!("can't find this program's own file: {error}"))
        })?;
        let path = std::env::var_os("PATH");
        let muster_node = |typed| settings::node_binary(typed, &own, path.as_deref());
        let Some(typed) = node_binary else {
            return Ok(Self { muster_node: muster_node(None)?, etcd: None });
        };
        let node = muster_node(Some(typed))?;
        let kind = detect_kind(&node).await.map_err(ExitError::Usage)?;
        let NodeKind::Etcd { major, minor } = kind else {
            return Ok(Self { muster_node: node, etcd: None });
        };
        let etcdutl = match etcdutl {
            Some(typed) => std::path::absolute(typed)
                .map_err(|error| ExitError::Usage(format!("--etcdutl: {error}")))?,
            None => {
                let name = if (major, minor) < (3, 5) { "etcdctl" } else { "etcdutl" };
                let in_path = path.iter().flat_map(std::env::split_paths).map(|dir| dir.join(name));
                let mut places = std::iter::once(node.with_file_name(name)).chain(in_path);
                places.find(|place| place.is_file()).ok_or_else(|| {
                    ExitError::Usage(format!(
                        "no {name} beside {} or in PATH, which makes a new cluster of its store: say which \
                         with --etcdutl",
                        node.display()
                    ))
                })?
            }
        };
        Ok(Self { muster_node: muster_node(None)?, etcd: Some((node, etcdutl)) })
    }

    /// Returns why these programs can't make a cluster from a directory that `maker` made. `None`
    /// if they can.
    pub(crate) fn objection(&self, maker: Maker) -> Option<String> {
        match (maker, &self.etcd) {
            (Maker::Etcd, None) => {
                Some("an etcd made this data: say --node-binary with that etcd".to_owned())
            }
            (Maker::MusterNode, Some(_)) => {
                Some("muster-node made this data, and --node-binary is an etcd".to_owned())
            }
            _ => None,
        }
    }

    /// Examines the data at `node`.
    pub(crate) fn examine(&self, node: &Path) -> Result<DirectoryReport, ExitError> {
        run_muster_node(&self.muster_node, &["data", "status", "--json"], node)
    }

    /// Makes a new cluster from the data at `node`. A repeated call returns what the first one
    /// made.
    pub(crate) fn make(&self, node: &Path) -> Result<RecoveryResult, ExitError> {
        let mut words = vec!["data", "recover", "--i-accept-data-loss", "--json"];
        let etcd = self.etcd.as_ref();
        let etcd = etcd.map(|(etcd, etcdutl)| (etcd.to_string_lossy(), etcdutl.to_string_lossy()));
        if let Some((etcd, etcdutl)) = &etcd {
            words.extend(["--etcd", &**etcd, "--etcdutl", &**etcdutl]);
        }
        run_muster_node(&self.muster_node, &words, node)
    }
}

/// A member in the output of `muster-node data recover`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemberIdentity {
    /// Raft cluster id, in hexadecimal.
    pub cluster_id: String,
    /// Member id, in hexadecimal.
    pub member_id: String,
    /// The member's incarnation, in hexadecimal.
    pub incarnation: String,
}

/// The output of `muster-node data recover --json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RecoveryResult {
    /// The member that the data belonged to.
    pub was: MemberIdentity,
    /// The new cluster's member.
    pub is: MemberIdentity,
    /// Index of the last log entry that was kept.
    pub last_index: u64,
    /// Term of the last log entry that was kept.
    pub last_term: u64,
}

impl MemberIdentity {
    /// Returns whether `other`, an identity in a recovery statement, is the identity of this
    /// member.
    pub(crate) fn matches(&self, other: &NodeIdentity) -> bool {
        let number = |text: &str| u64::from_str_radix(text, 16).ok();
        other.raft_cluster() == number(&self.cluster_id)
            && number(&other.member_id) == number(&self.member_id)
            && other.incarnation.to_string() == self.incarnation
    }
}

/// Runs muster-node on the directory `node` and parses its JSON output. The exit code is ignored,
/// since the output contains its meaning. `run-tied` ends the child with this process, so a retry
/// after a kill never shares the directory with an old child.
fn run_muster_node<T: DeserializeOwned>(
    program: &Path,
    words: &[&str],
    node: &Path,
) -> Result<T, ExitError> {
    let failed = |what: String| {
        ExitError::Failed(format!(
            "{} {} {}: {what}",
            program.display(),
            words.join(" "),
            node.display()
        ))
    };
    let own = std::process::id().to_string();
    let output = std::process::Command::new(program)
        .args(["data", "run-tied", &own])
        .arg(program)
        .args(words)
        .arg(node)
        .env_clear()
        .envs(environment::node_variables())
        .stdin(Stdio::null())
        .output()
        .map_err(|error| failed(error_chain(&error)))?;
    serde_json::from_slice(&output.stdout).map_err(|_| {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        failed(if said.is_empty() { output.status.to_string() } else { said })
    })
}
