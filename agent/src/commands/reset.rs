//! `reset`: moves the old state aside, so that this host can join again as a new member.

use serde::Serialize;

use crate::cli::ResetArguments;
use crate::commands::printer::Printer;
use crate::exit::{ExitError, error_chain};
use crate::state::Layout;
use crate::state::adopted::AdoptedNode;
use crate::state::archive::move_to_quarantine;
use crate::state::lock::{self, LockError};
use crate::state::state_exit_error;

/// The output of `--json`.
#[derive(Serialize)]
struct ResetOutput<'a> {
    quarantine: Option<&'a std::path::Path>,
}

/// Runs the command `reset`.
pub(crate) fn run(typed: &ResetArguments, printer: &mut Printer<'_>) -> Result<(), ExitError> {
    let layout = Layout::new(&typed.data_dir.data_dir)
        .map_err(|error| ExitError::Usage(format!("--data-dir: {error}")))?;
    if !layout.root().is_dir() {
        return Err(ExitError::Failed(format!("{}: no such folder", layout.root().display())));
    }
    let layout = layout.claim().map_err(state_exit_error)?;
    let _lock =
        lock::acquire(&layout.agent_lock(), "muster-agent reset").map_err(|error| match error {
            LockError::Held { .. } => {
                ExitError::Failed(error_chain(&error) + "; stop that agent first")
            }
            LockError::State(error) => state_exit_error(error),
        })?;
    if let Some(holder) = lock::holder(&layout.node_lock()).map_err(state_exit_error)? {
        return Err(ExitError::Failed(format!(
            "a node still runs on this state ({} is held by {holder}): start the agent and stop it \
             with SIGTERM, which stops the node, or stop the process that {} names",
            layout.node_lock().display(),
            layout.pid_file().display()
        )));
    }
    if !typed.yes {
        return Err(ExitError::Usage(format!(
            "this puts the agent's and the node's state in {} aside, and this host becomes a new \
             one: it needs a new token, and a running cluster goes on counting the old member until \
             it is removed there. Nothing was changed; say --yes to do it",
            layout.root().display()
        )));
    }
    let reason = "put aside by muster-agent reset";
    // Leave a released member's data in place: a node without an agent uses it.
    let both: &[&str] =
        if layout.released_file().exists() { &["agent"] } else { &["agent", "node"] };
    let to = move_to_quarantine(&layout, both, reason, jiff::Timestamp::now());
    let to = to.map_err(state_exit_error)?;
    let text = if typed.json {
        serde_json::to_string(&ResetOutput { quarantine: to.as_deref() })
            .map_err(|error| ExitError::Failed(error.to_string()))?
    } else {
        to.as_ref().map_or_else(
            || "There was no state: this host is a new one already.".to_owned(),
            |to| {
                let data = layout.adopted().map(remaining_data).unwrap_or_default();
                format!("The old state lies in {}. This host is a new one now.{data}", to.display())
            },
        )
    };
    printer.line(&text).map_err(|error| ExitError::Failed(error.to_string()))
}

/// Says where an adopted etcd's data stay, because a reset moves only the agent's state.
fn remaining_data(node: &AdoptedNode) -> String {
    let log = node.wal_directory.as_deref();
    let log = log.map(|log| format!(", and its log in {}", log.display())).unwrap_or_default();
    format!(" The etcd's data stay in {}{log}.", node.directory.display())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::DataDir;
    use crate::state::adopted::{self, AdoptionStage};

    fn reset(dir: &std::path::Path, yes: bool) -> (Result<(), ExitError>, String) {
        let typed =
            ResetArguments { data_dir: DataDir { data_dir: dir.to_owned() }, yes, json: true };
        let mut out = Vec::new();
        let result = run(&typed, &mut Printer::new(&mut out));
        (result, String::from_utf8(out).unwrap())
    }

    #[test]
    fn without_yes_nothing_is_changed() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        assert_eq!(reset(dir.path(), false).0.unwrap_err().code(), 2);
        assert!(layout.agent().is_dir());
    }

    #[test]
    fn with_yes_the_agents_and_the_nodes_folders_are_moved() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        std::fs::create_dir_all(layout.node().join("member/wal")).unwrap();
        let (result, out) = reset(dir.path(), true);
        result.unwrap();
        assert!(out.contains("quarantine-"), "{out}");
        assert!(!layout.agent().exists() && !layout.node().exists());
    }

    /// Resets a host whose agent runs this etcd, and returns the output for people.
    fn reset_with_etcd(agent_data: &std::path::Path, etcd: &AdoptedNode) -> String {
        let layout = Layout::new(agent_data).unwrap();
        layout.create().unwrap();
        adopted::write_adopted(&layout, etcd).unwrap();
        let data_dir = DataDir { data_dir: layout.root().to_owned() };
        let mut out = Vec::new();
        let typed = ResetArguments { data_dir, yes: true, json: false };
        run(&typed, &mut Printer::new(&mut out)).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_reset_says_where_an_adopted_etcds_data_and_separate_log_stay() {
        let dir = tempfile::tempdir().unwrap();
        let agent_data = dir.path().join("agent-data");
        let (etcd, wal) = (dir.path().join("etcd"), dir.path().join("wal"));
        let node = AdoptedNode { stage: AdoptionStage::TakenOver, ..adopted::tests::node(&etcd) };
        let out = reset_with_etcd(&agent_data, &node);
        assert!(out.contains(&format!("stay in {}.", etcd.display())), "{out}");
        let version = AdoptedNode::version_for(Some(&wal));
        let node = AdoptedNode { version, wal_directory: Some(wal.clone()), ..node };
        let out = reset_with_etcd(&agent_data, &node);
        let both = format!("stay in {}, and its log in {}.", etcd.display(), wal.display());
        assert!(out.contains(&both), "{out}");
    }

    #[test]
    fn a_reset_is_refused_while_an_agent_or_a_node_runs() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        let node = lock::acquire(&layout.node_lock(), "a node").unwrap();
        assert_eq!(reset(dir.path(), true).0.unwrap_err().code(), 1);
        drop(node);
        let agent = lock::acquire(&layout.agent_lock(), "an agent").unwrap();
        assert_eq!(reset(dir.path(), true).0.unwrap_err().code(), 1);
        drop(agent);
        assert!(layout.agent().is_dir());
        assert!(reset(dir.path(), true).0.is_ok());
    }
}
