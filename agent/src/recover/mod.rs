//! What is left of a cluster that was lost, and what can be made of it. The node's program looks at
//! its own files; the agent compares what it says.

pub(crate) mod choose;

use std::path::{Path, PathBuf};
use std::process::Stdio;

use discovery_types::recovery::NodeIdentity;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::exit::{End, chain};
use crate::node_command::{NodeKind, kind_of};
use crate::settings;
use crate::supervisor::environment;

/// Which program made a node's directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Maker {
    /// Our own.
    MusterNode,
    /// An etcd.
    Etcd,
}

/// `muster-node data status --json`, as far as it matters here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sight {
    /// Who made it.
    pub maker: Maker,
    /// What would become of a start: `whole`, `in-use`, `unfinished`, `empty`, `removed`, `damaged`.
    pub state: String,
    /// What is wrong, and where.
    pub problem: Option<String>,
    /// Hex.
    pub cluster_id: Option<String>,
    /// Hex.
    pub member_id: Option<String>,
    /// Hex.
    pub incarnation: Option<String>,
    /// The member's name.
    pub name: Option<String>,
    /// How far the log goes.
    pub log: Option<LogSight>,
    /// What the store is, with all of the log applied.
    pub store: Option<StoreSight>,
    /// The new cluster that was made here, if one was.
    pub forced: Option<ForcedSight>,
}

impl Sight {
    /// A new cluster was made here, and its member not started since: what was begun is to be ended.
    pub(crate) fn is_made(&self) -> bool {
        self.forced.as_ref().is_some_and(|forced| !forced.rearmed)
    }
}

/// A new cluster of one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ForcedSight {
    /// Who the data was.
    pub was: Bearer,
    /// Who it is.
    pub is: Bearer,
    /// The last entry that was kept.
    pub last_index: u64,
    /// Its term.
    pub last_term: u64,
    /// Its member was started since.
    pub rearmed: bool,
}

/// The log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LogSight {
    /// The last entry.
    pub last_index: u64,
    /// Its term.
    pub last_term: u64,
    /// The entry up to which it is known to be committed.
    pub committed: u64,
}

/// The store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoreSight {
    /// The last entry that is in an etcd's store, which shows no later one's effect; of our own the
    /// rest of the log is shown as well.
    pub applied: u64,
    /// The newest revision.
    pub revision: i64,
    /// Who belongs to the cluster.
    pub members: Vec<MemberSight>,
}

/// One member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemberSight {
    /// Hex.
    pub id: String,
    /// Its name; empty if it never started.
    pub name: String,
    /// It has no vote.
    pub is_learner: bool,
}

/// What one host has left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Survivor {
    /// The host.
    pub host: String,
    /// Its agent's data directory.
    pub data_dir: String,
    /// What the node says of its own.
    pub sight: Sight,
}

/// What is run to look, and to make.
pub(crate) struct Programs {
    /// Our own node's, which reads etcd's directories, too.
    muster_node: PathBuf,
    /// For an etcd's directory: the etcd, and its tool that restores.
    etcd: Option<(PathBuf, PathBuf)>,
}

impl Programs {
    /// `node_binary` is what `run` is given; `etcdutl` counts if that is an etcd.
    pub(crate) fn find(node_binary: Option<&Path>, etcdutl: Option<&Path>) -> Result<Self, End> {
        let own = std::env::current_exe()
            .map_err(|error| End::Failed(format!("can't find this program's own file: {error}")))?;
        let path = std::env::var_os("PATH");
        let muster_node = |typed| settings::node_binary(typed, &own, path.as_deref());
        let Some(typed) = node_binary else {
            return Ok(Self { muster_node: muster_node(None)?, etcd: None });
        };
        let node = muster_node(Some(typed))?;
        let kind = crate::on_runtime(async { kind_of(&node).await.map_err(End::Usage) })?;
        let NodeKind::Etcd { major, minor } = kind else {
            return Ok(Self { muster_node: node, etcd: None });
        };
        let etcdutl = match etcdutl {
            Some(typed) => std::path::absolute(typed)
                .map_err(|error| End::Usage(format!("--etcdutl: {error}")))?,
            None => {
                let name = if (major, minor) < (3, 5) { "etcdctl" } else { "etcdutl" };
                let in_path = path.iter().flat_map(std::env::split_paths).map(|dir| dir.join(name));
                let mut places = std::iter::once(node.with_file_name(name)).chain(in_path);
                places.find(|place| place.is_file()).ok_or_else(|| {
                    End::Usage(format!(
                        "no {name} beside {} or in PATH, which makes a new cluster of its store: say which \
                         with --etcdutl",
                        node.display()
                    ))
                })?
            }
        };
        Ok(Self { muster_node: muster_node(None)?, etcd: Some((node, etcdutl)) })
    }

    /// Why these can't make a cluster of what `maker` made.
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

    /// What there is to say of the data at `node`.
    pub(crate) fn look(&self, node: &Path) -> Result<Sight, End> {
        ask(&self.muster_node, &["data", "status", "--json"], node)
    }

    /// Makes a new cluster of the data at `node`; asked again, it says what was made.
    pub(crate) fn make(&self, node: &Path) -> Result<Made, End> {
        let mut words = vec!["data", "recover", "--i-accept-data-loss", "--json"];
        let etcd = self.etcd.as_ref();
        let etcd = etcd.map(|(etcd, etcdutl)| (etcd.to_string_lossy(), etcdutl.to_string_lossy()));
        if let Some((etcd, etcdutl)) = &etcd {
            words.extend(["--etcd", &**etcd, "--etcdutl", &**etcdutl]);
        }
        ask(&self.muster_node, &words, node)
    }
}

/// A member, as `muster-node data recover` names one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Bearer {
    /// Hex.
    pub cluster_id: String,
    /// Hex.
    pub member_id: String,
    /// Hex.
    pub incarnation: String,
}

/// What `muster-node data recover --json` says that it made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Made {
    /// The old member.
    pub was: Bearer,
    /// The new one.
    pub is: Bearer,
    /// The last entry that was kept.
    pub last_index: u64,
    /// Its term.
    pub last_term: u64,
}

impl Bearer {
    /// Whether a statement names this one.
    pub(crate) fn is(&self, other: &NodeIdentity) -> bool {
        let number = |text: &str| u64::from_str_radix(text, 16).ok();
        other.raft_cluster() == number(&self.cluster_id)
            && number(&other.member_id) == number(&self.member_id)
            && other.incarnation.to_string() == self.incarnation
    }
}

/// The program's exit code says the same as its answer, which is read where there is one. It ends with
/// this process, so that whoever tries again after a kill is alone with the directory.
fn ask<T: DeserializeOwned>(program: &Path, words: &[&str], node: &Path) -> Result<T, End> {
    let failed = |what: String| {
        End::Failed(format!("{} {} {}: {what}", program.display(), words.join(" "), node.display()))
    };
    let own = std::process::id().to_string();
    let output = std::process::Command::new(program)
        .args(["data", "run-tied", &own])
        .arg(program)
        .args(words)
        .arg(node)
        .env_clear()
        .envs(environment::for_node())
        .stdin(Stdio::null())
        .output()
        .map_err(|error| failed(chain(&error)))?;
    serde_json::from_slice(&output.stdout).map_err(|_| {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        failed(if said.is_empty() { output.status.to_string() } else { said })
    })
}
