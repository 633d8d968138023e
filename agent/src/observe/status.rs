//! The agent's state and what it waits for: one value, and one task that writes it to a file.
//!
//! The file is rewritten atomically at each change. So `status` needs no connection, and can show
//! the last state after the agent's death too. The lock on the data directory, not this file, shows
//! whether an agent runs.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::backup::BackupStatus;
use crate::endpoint::{ClientEndpoint, EndpointError};

/// Version of the file's format.
pub(crate) const VERSION: u32 = 1;

/// Phase of the agent's work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Phase {
    /// The agent reads its state.
    #[default]
    Starting,
    /// Discovery is unreachable or can't serve; the agent tries again.
    Contacting,
    /// The agent has redeemed its token and waits for other hosts, in a seat or as a standby.
    Waiting,
    /// A list of members is proposed; the agent probes those members and checks the list.
    Preparing,
    /// The list of members is committed; the node is about to start for the first time.
    Launching,
    /// The node's process runs.
    Running,
    /// The node died and is about to be started again.
    Restarting,
    /// The node's data is lost: a person has to replace this member.
    ReplacementWanted,
    /// The agent was told to stop, and waits for the node.
    Stopping,
    /// The agent has ended; `reason` says how.
    Ended,
}

impl Phase {
    /// Returns the phase's name in JSON and metrics.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Contacting => "contacting",
            Self::Waiting => "waiting",
            Self::Preparing => "preparing",
            Self::Launching => "launching",
            Self::Running => "running",
            Self::Restarting => "restarting",
            Self::ReplacementWanted => "replacement_wanted",
            Self::Stopping => "stopping",
            Self::Ended => "ended",
        }
    }

    /// All phases, for metrics.
    pub(crate) const ALL: [Self; 10] = [
        Self::Starting,
        Self::Contacting,
        Self::Waiting,
        Self::Preparing,
        Self::Launching,
        Self::Running,
        Self::Restarting,
        Self::ReplacementWanted,
        Self::Stopping,
        Self::Ended,
    ];
}

/// State of the node's process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeProcessStatus {
    /// Path of the node's program.
    pub program: String,
    /// Process id while the node runs.
    pub pid: Option<i32>,
    /// Whether an earlier agent started the running node.
    pub adopted: bool,
    /// Number of times that this agent has started or adopted the node.
    pub starts: u64,
    /// How the node last died.
    pub last_death: Option<String>,
}

/// An error, and when it occurred.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LastError {
    pub at: jiff::Timestamp,
    /// Text of the error, with its causes.
    pub text: String,
}

/// An outage of discovery, as this agent sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DiscoveryOutage {
    /// When a request first got no answer.
    pub since: jiff::Timestamp,
    /// Error of the last request, with its causes.
    pub error: String,
}

/// The agent's complete status. `status --json` prints its JSON form.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AgentStatus {
    /// Version of the format of the status file.
    pub version: u32,
    pub agent_pid: u32,
    pub agent_version: String,
    pub phase: Phase,
    /// Why the agent waits or has ended; one sentence.
    pub reason: Option<String>,
    /// Discovery's lines on what the cluster still lacks.
    pub explain: Vec<String>,
    /// The cluster's id at discovery.
    pub cluster_id: Option<String>,
    pub cluster_name: Option<String>,
    /// The cluster's state according to discovery: open, preparing, ….
    pub cluster_phase: Option<String>,
    /// Epoch of the proposal that discovery shows, or of the commit.
    pub epoch: Option<u64>,
    /// Hash of the committed proposal, in hexadecimal.
    pub document: Option<String>,
    /// This host's seat, from 1; `None` for a standby.
    pub seat: Option<u8>,
    pub name: Option<String>,
    /// The node's incarnation, in hexadecimal.
    pub incarnation: Option<String>,
    /// The agent's public key.
    pub key: Option<String>,
    /// URL at which the other members reach this host.
    pub peer_url: Option<String>,
    /// URL at which clients reach this host.
    pub client_url: Option<String>,
    /// Address on which the node serves clients, for the health check.
    pub client_listen: Option<String>,
    /// The node's process, once there is one.
    pub node: Option<NodeProcessStatus>,
    /// When this member's certificates expire.
    pub certificates_until: Option<jiff::Timestamp>,
    /// Why the certificates are not renewed although it is time.
    pub certificates_late: Option<String>,
    /// Why the node has to be restarted, if it has to.
    #[serde(default)]
    pub restart_wanted: Option<String>,
    /// Text that names this member's address, while its cluster has recorded another one.
    #[serde(default)]
    pub unrecorded_address: Option<String>,
    /// The outage of discovery, if the agent can't reach discovery.
    pub discovery_unreachable: Option<DiscoveryOutage>,
    /// Contradiction in discovery's history of this cluster, if the agent has found one.
    #[serde(default)]
    pub history_fault: Option<String>,
    /// Number of the service statement that the agent follows; `None` if it follows the bundle.
    pub service_statement: Option<u64>,
    /// URLs of discovery in the service statement, separated by commas.
    pub discovery_urls: Option<String>,
    /// Number of other voters that this host can't reach, while a replacement policy is in force.
    #[serde(default)]
    pub unreachable_voters: u32,
    /// Reason why a newcomer under a replacement policy waits, as the leader's agent sees it.
    #[serde(default)]
    pub replacement: Option<String>,
    /// Whether a replacement policy has reached its limit while a member is dead.
    #[serde(default)]
    pub replacement_limit_reached: bool,
    /// Lowest version of the members' agents. `None` if it isn't known, or if an agent publishes
    /// none.
    #[serde(default)]
    pub lowest_agent_version: Option<String>,
    /// Features that aren't used yet, because a member's agent lacks them. Each line names the
    /// members.
    #[serde(default)]
    pub waiting_features: Vec<String>,
    /// Scheduled backups, if this agent has any.
    #[serde(default)]
    pub backup: Option<BackupStatus>,
    /// The last error, until it is resolved.
    pub last_error: Option<LastError>,
    /// When the agent tries again.
    pub next_retry_at: Option<jiff::Timestamp>,
    /// When this status was last changed.
    pub updated_at: Option<jiff::Timestamp>,
}

impl AgentStatus {
    /// Returns the client port of this host's own node; `tls` is the directory with its
    /// certificates. `None` if the node has no listen address yet.
    pub(crate) fn own_node(&self, tls: &Path) -> Option<Result<ClientEndpoint, EndpointError>> {
        let listen = self.client_listen.as_deref()?.parse().ok()?;
        Some(ClientEndpoint::own_node(tls, listen))
    }
}

/// A handle on the status. Cloning is cheap, and no call blocks.
#[derive(Clone, Debug)]
pub(crate) struct StatusHandle {
    sender: watch::Sender<AgentStatus>,
}

impl Default for StatusHandle {
    fn default() -> Self {
        let status = AgentStatus {
            version: VERSION,
            agent_pid: std::process::id(),
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            ..AgentStatus::default()
        };
        Self { sender: watch::Sender::new(status) }
    }
}

impl StatusHandle {
    /// Changes the status. Readers are notified only if it differs afterwards.
    pub(crate) fn update(&self, change: impl FnOnce(&mut AgentStatus)) {
        self.sender.send_if_modified(|status| {
            let before = status.clone();
            change(status);
            let changed = *status != before;
            if changed {
                status.updated_at = Some(jiff::Timestamp::now());
            }
            changed
        });
    }

    /// Sets the phase and its reason.
    pub(crate) fn set_phase(&self, phase: Phase, reason: impl Into<Option<String>>) {
        let reason = reason.into();
        self.update(|status| {
            status.phase = phase;
            status.reason = reason;
        });
    }

    /// Records an error. `next_retry_at` is when the agent tries again, if known.
    pub(crate) fn set_error(&self, text: String, next_retry_at: Option<jiff::Timestamp>) {
        self.update(|status| {
            status.last_error = Some(LastError { at: jiff::Timestamp::now(), text });
            status.next_retry_at = next_retry_at;
        });
    }

    /// Clears the last error once it is resolved.
    pub(crate) fn clear_error(&self) {
        self.update(|status| {
            status.last_error = None;
            status.next_retry_at = None;
        });
    }

    /// Subscribes to changes of the status.
    pub(crate) fn subscribe(&self) -> watch::Receiver<AgentStatus> {
        self.sender.subscribe()
    }

    /// Returns a copy of the current status.
    #[cfg(test)]
    pub(crate) fn read(&self) -> AgentStatus {
        self.sender.borrow().clone()
    }
}

/// Writes the status to `path` at each change. When cancelled, writes it once more and ends.
pub(crate) async fn write_until_stopped(
    mut status: watch::Receiver<AgentStatus>,
    path: PathBuf,
    stop: CancellationToken,
) {
    let mut failing = false;
    loop {
        let stopped = stop.is_cancelled();
        let now = status.borrow_and_update().clone();
        let to = path.clone();
        let written = tokio::task::spawn_blocking(move || {
            let text = serde_json::to_vec_pretty(&now).expect("a status always serialises");
            muster_files::data::replace_volatile(&to, &text)
        });
        match written.await {
            Ok(Err(error)) if !failing => {
                failing = true;
                let error = crate::exit::error_chain(&error);
                tracing::warn!(%error, "can't show the status; everything else goes on");
            }
            Ok(Ok(())) => failing = false,
            Ok(Err(_)) | Err(_) => {}
        }
        if stopped {
            return;
        }
        tokio::select! {
            changed = status.changed() => if changed.is_err() { return },
            () = stop.cancelled() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_update_that_changes_nothing_keeps_the_time_of_the_last_change() {
        let board = StatusHandle::default();
        board.set_phase(Phase::Waiting, "for two more hosts".to_owned());
        let first = board.read();
        board.set_phase(Phase::Waiting, "for two more hosts".to_owned());
        assert_eq!(board.read(), first);
        board.set_phase(Phase::Preparing, None);
        assert_eq!(board.read().reason, None);
    }

    #[test]
    fn a_resolved_error_is_cleared() {
        let board = StatusHandle::default();
        board.set_error("the node died: signal 9".to_owned(), Some(jiff::Timestamp::UNIX_EPOCH));
        board.clear_error();
        assert_eq!((board.read().last_error, board.read().next_retry_at), (None, None));
    }

    #[test]
    fn phases_have_the_same_names_in_json_and_in_metrics() {
        for phase in Phase::ALL {
            assert_eq!(serde_json::to_value(phase).unwrap(), phase.as_str());
        }
    }

    #[tokio::test]
    async fn the_status_file_contains_the_last_status() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("status.json");
        let (board, stop) = (StatusHandle::default(), CancellationToken::new());
        let keeper =
            tokio::spawn(write_until_stopped(board.subscribe(), path.clone(), stop.clone()));
        board.set_phase(Phase::Ended, "told to".to_owned());
        stop.cancel();
        keeper.await.unwrap();
        let shown: AgentStatus = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!((shown.phase, shown.reason.as_deref()), (Phase::Ended, Some("told to")));
    }
}
