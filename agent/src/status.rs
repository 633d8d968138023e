//! What the agent is doing and why it waits: one value, one owner of the file that shows it.
//!
//! The file is rewritten atomically at each change, so `status` needs no connection and has
//! something to show after the agent's death too; whether an agent is alive is told by the lock on
//! the data directory, not by the file.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// The layout of the file.
pub(crate) const VERSION: u32 = 1;

/// What the agent is at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Phase {
    /// It reads its state.
    #[default]
    Starting,
    /// It can't reach discovery, or discovery can't serve, and tries again.
    Contacting,
    /// It has redeemed and waits for the others: seated, or as a standby.
    Waiting,
    /// A list is proposed: it probes and checks.
    Preparing,
    /// The list is decided; the node is about to start for the first time.
    Launching,
    /// The node runs.
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
    /// As it stands in JSON and metrics.
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

    /// All of them, for metrics.
    pub(crate) const EACH: [Self; 10] = [
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

/// The node's process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeStatus {
    /// Its program.
    pub program: String,
    /// Its pid while it runs.
    pub pid: Option<i32>,
    /// Whether an earlier agent had started the one that runs.
    pub adopted: bool,
    /// How often this agent has started or adopted it.
    pub starts: u64,
    /// How it last died.
    pub last_death: Option<String>,
}

/// A thing that went wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LastError {
    /// When.
    pub at: jiff::Timestamp,
    /// What, with its causes.
    pub text: String,
}

/// The whole of it. Serialises to what `status --json` prints.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Status {
    /// Of the layout.
    pub version: u32,
    /// The agent's pid.
    pub agent_pid: u32,
    /// The agent's version.
    pub agent_version: String,
    /// What it is at.
    pub phase: Phase,
    /// Why it waits or has ended; one sentence.
    pub reason: Option<String>,
    /// What discovery says is missing, line by line.
    pub explain: Vec<String>,
    /// The cluster's id.
    pub cluster_id: Option<String>,
    /// The cluster's name.
    pub cluster_name: Option<String>,
    /// Where discovery says the cluster stands: open, preparing, ….
    pub cluster_phase: Option<String>,
    /// The epoch that is shown, or that was committed.
    pub epoch: Option<u64>,
    /// The hash of the committed proposal, hex.
    pub document: Option<String>,
    /// This host's seat, 1 up; none as a standby.
    pub seat: Option<u8>,
    /// The member's name.
    pub name: Option<String>,
    /// The node's incarnation, hex.
    pub incarnation: Option<String>,
    /// The agent's public key.
    pub key: Option<String>,
    /// How the other members reach this host.
    pub peer_url: Option<String>,
    /// How clients reach it.
    pub client_url: Option<String>,
    /// Where the node answers on this host, for the health check.
    pub client_listen: Option<String>,
    /// The node's process, once there is one.
    pub node: Option<NodeStatus>,
    /// Until when this member's certificates last.
    pub certificates_until: Option<jiff::Timestamp>,
    /// Why they are not renewed, though it is time.
    pub certificates_late: Option<String>,
    /// What went wrong, until it is over.
    pub last_error: Option<LastError>,
    /// When it tries again.
    pub next_retry_at: Option<jiff::Timestamp>,
    /// When this was written.
    pub updated_at: Option<jiff::Timestamp>,
}

/// A handle on the status: cheap to clone, never blocks.
#[derive(Clone, Debug)]
pub(crate) struct Board {
    sender: watch::Sender<Status>,
}

impl Default for Board {
    fn default() -> Self {
        let status = Status {
            version: VERSION,
            agent_pid: std::process::id(),
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            ..Status::default()
        };
        Self { sender: watch::Sender::new(status) }
    }
}

impl Board {
    /// Changes it; readers hear of it only if it is different afterwards.
    pub(crate) fn update(&self, change: impl FnOnce(&mut Status)) {
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

    /// The agent is at `phase` now, for `reason`.
    pub(crate) fn phase(&self, phase: Phase, reason: impl Into<Option<String>>) {
        let reason = reason.into();
        self.update(|status| {
            status.phase = phase;
            status.reason = reason;
        });
    }

    /// Something went wrong; it is tried again at `next_retry_at`, if that is known.
    pub(crate) fn error(&self, text: String, next_retry_at: Option<jiff::Timestamp>) {
        self.update(|status| {
            status.last_error = Some(LastError { at: jiff::Timestamp::now(), text });
            status.next_retry_at = next_retry_at;
        });
    }

    /// What went wrong is over.
    pub(crate) fn healed(&self) {
        self.update(|status| {
            status.last_error = None;
            status.next_retry_at = None;
        });
    }

    /// Follows it.
    pub(crate) fn watch(&self) -> watch::Receiver<Status> {
        self.sender.subscribe()
    }

    /// What it says now.
    #[cfg(test)]
    pub(crate) fn read(&self) -> Status {
        self.sender.borrow().clone()
    }
}

/// Writes the status to `path` at each change until cancelled, and once more then.
pub(crate) async fn keep_file(
    mut status: watch::Receiver<Status>,
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
                let error = crate::exit::chain(&error);
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
    fn only_a_real_change_moves_the_time() {
        let board = Board::default();
        board.phase(Phase::Waiting, "for two more hosts".to_owned());
        let first = board.read();
        board.phase(Phase::Waiting, "for two more hosts".to_owned());
        assert_eq!(board.read(), first);
        board.phase(Phase::Preparing, None);
        assert_eq!(board.read().reason, None);
    }

    #[test]
    fn what_is_over_is_no_error() {
        let board = Board::default();
        board.error("the node died: signal 9".to_owned(), Some(jiff::Timestamp::UNIX_EPOCH));
        board.healed();
        assert_eq!((board.read().last_error, board.read().next_retry_at), (None, None));
    }

    #[test]
    fn phases_have_the_same_names_in_json_and_in_metrics() {
        for phase in Phase::EACH {
            assert_eq!(serde_json::to_value(phase).unwrap(), phase.as_str());
        }
    }

    #[tokio::test]
    async fn the_file_shows_the_last_word() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("status.json");
        let (board, stop) = (Board::default(), CancellationToken::new());
        let keeper = tokio::spawn(keep_file(board.watch(), path.clone(), stop.clone()));
        board.phase(Phase::Ended, "told to".to_owned());
        stop.cancel();
        keeper.await.unwrap();
        let shown: Status = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!((shown.phase, shown.reason.as_deref()), (Phase::Ended, Some("told to")));
    }
}
