//! What is left of a cluster that was lost, and what can be made of it. The node's program looks at
//! its own files; the agent compares what it says.

pub(crate) mod choose;

use std::path::Path;
use std::process::Stdio;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::exit::{End, chain};
use crate::supervisor::environment;

/// `muster-node data status --json`, as far as it matters here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sight {
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

/// What the node's program says of the data at `node`.
pub(crate) fn look(program: &Path, node: &Path) -> Result<Sight, End> {
    ask(program, &["data", "status", "--json"], node)
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

/// Has the node's program make a new cluster of the data at `node`; asked again, it says what it
/// made.
pub(crate) fn make(program: &Path, node: &Path) -> Result<Made, End> {
    ask(program, &["data", "recover", "--i-accept-data-loss", "--json"], node)
}

/// The program's exit code says the same as its answer, which is read where there is one.
fn ask<T: DeserializeOwned>(program: &Path, words: &[&str], node: &Path) -> Result<T, End> {
    let failed = |what: String| {
        End::Failed(format!("{} {} {}: {what}", program.display(), words.join(" "), node.display()))
    };
    let output = std::process::Command::new(program)
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
