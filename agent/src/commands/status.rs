//! `status`: shows the state of the agent and the node, from the files, the locks and the node
//! itself.

use std::io::Write;
use std::time::Duration;

use discovery_types::text::printable;
use serde::Serialize;
use tokio::time::{Instant, sleep};

use crate::cli;
use crate::cluster::{ClusterError, NodeStatus, node_status};
use crate::commands::member::{self, PeerReport};
use crate::commands::printer::Printer;
use crate::endpoint::ClientEndpoint;
use crate::exit::{ExitError, error_chain};
use crate::launch::process::ProcessIdentity;
use crate::observe::health::Health;
use crate::observe::node_log;
use crate::observe::status::AgentStatus;
use crate::operate::removal;
use crate::state::{self, Layout, StateError, lock};

/// How often --wait checks whether the node is ready.
const READY_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// The output of `--json`: the status that the agent wrote last, and facts that this command has
/// found itself.
#[derive(Debug, Serialize)]
pub(crate) struct StatusReport {
    /// Whether an agent holds the lock on the data directory.
    pub agent_running: bool,
    /// The node's pid, if a node runs.
    pub node_pid: Option<i32>,
    /// The node's answer to the health check; absent if there was none.
    pub node_health: Option<Health>,
    /// Why the health check failed.
    pub node_health_error: Option<String>,
    /// State of the members, as far as they answer this host. They are asked only if this host's
    /// node answers, but isn't ready.
    #[serde(flatten)]
    pub peers: PeerReport,
    /// The last warning or error in the node's log, while the node runs and isn't ready.
    pub node_complaint: Option<String>,
    /// The tombstone as a sentence, if the cluster has removed this member.
    pub removed: Option<String>,
    /// The status that the agent wrote last.
    #[serde(flatten)]
    pub status: Option<AgentStatus>,
}

/// Runs the command `status`.
pub(crate) async fn run(
    typed: &cli::StatusArguments,
    printer: &mut Printer<'_>,
) -> Result<(), ExitError> {
    let layout = Layout::new_read_only(&typed.data_dir.data_dir)
        .map_err(|error| ExitError::Usage(format!("--data-dir: {error}")))?;
    let limit = Duration::from_secs(if typed.wait { typed.timeout } else { 0 });
    let report = wait_ready(&layout, limit).await?;
    let text = if typed.json {
        serde_json::to_string_pretty(&report)
            .map_err(|error| ExitError::Failed(error.to_string()))?
    } else {
        format_text(&report)
    };
    printer.line(&text).map_err(|error| ExitError::Failed(error.to_string()))?;
    match report.why_not_ready() {
        Some(why) if typed.ready || typed.wait => {
            Err(ExitError::Failed(format!("not ready: {why}")))
        }
        _ => Ok(()),
    }
}

/// Checks until the node is ready, its member was removed, or `limit` has passed. Returns the last
/// report. Prints to standard error what it waits for.
async fn wait_ready(layout: &Layout, limit: Duration) -> Result<StatusReport, ExitError> {
    let start = Instant::now();
    let mut said = None;
    loop {
        let left = limit.saturating_sub(start.elapsed());
        let why = if layout.root().is_dir() {
            let report = make_report(layout)
                .await
                .map_err(|error| ExitError::Failed(error_chain(&error)))?;
            let why = report.why_not_ready();
            if why.is_none() || report.removed.is_some() || left.is_zero() {
                return Ok(report);
            }
            why
        } else {
            let root = layout.root().display();
            let why = format!("{root}: no such folder; say where the state lies with --data-dir");
            if left.is_zero() {
                return Err(ExitError::Failed(why));
            }
            Some(why)
        };
        if said != why {
            let line = why.as_deref().map(printable).unwrap_or_default();
            // If standard error is closed, the exit code still tells the result.
            let _ = writeln!(std::io::stderr(), "waiting: {line}");
            said = why;
        }
        sleep(READY_CHECK_INTERVAL.min(left)).await;
    }
}

impl StatusReport {
    /// Returns why the node doesn't serve, or `None` if it does.
    fn why_not_ready(&self) -> Option<String> {
        if let Some(removed) = &self.removed {
            return Some(removed.clone());
        }
        match (&self.node_health, self.node_pid) {
            (Some(health), _) if health.ready => None,
            (Some(health), _) => Some(health.says.replace('\n', "; ")),
            (None, Some(_)) => Some(self.node_health_error.clone().unwrap_or_default()),
            (None, None) => {
                let doing = self.status.as_ref();
                let doing =
                    doing.map(|s| format_phase(s.phase.as_str(), first_line(s.reason.as_deref())));
                let doing = doing.map(|text| format!("; its agent: {text}")).unwrap_or_default();
                Some(format!("the node doesn't run{doing}"))
            }
        }
    }
}

fn first_line(text: Option<&str>) -> Option<&str> {
    text.and_then(|text| text.lines().next())
}

async fn make_report(layout: &Layout) -> Result<StatusReport, StateError> {
    let status: Option<AgentStatus> =
        state::read(&layout.status())?.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let tombstone = removal::recorded_removal(layout)?;
    let node_pid = running_node_pid(layout)?;
    let endpoint = status.as_ref().and_then(|status| status.own_node(&layout.tls()));
    let mut peers = PeerReport::default();
    let (node_health, node_health_error) = match (node_pid, endpoint) {
        (Some(_), Some(Ok(endpoint))) => {
            let own = node_status(&endpoint).await;
            let health = ask_health(&endpoint, &own).await;
            // If the node doesn't answer a status request, it can't list the peers either.
            if own.is_ok() && !health.as_ref().is_ok_and(|health| health.ready) {
                peers = member::report_peers(&endpoint).await;
            }
            health.map_or_else(|why| (None, Some(why)), |health| (Some(health), None))
        }
        (Some(_), Some(Err(error))) => (None, Some(error_chain(&error))),
        (Some(_), None) | (None, _) => (None, None),
    };
    let ready = node_health.as_ref().is_some_and(|health| health.ready);
    let node_complaint = match node_pid {
        Some(_) if !ready => node_log::last_warning(&layout.node_log()),
        _ => None,
    };
    Ok(StatusReport {
        peers,
        node_complaint,
        agent_running: lock::holder(&layout.agent_lock())?.is_some(),
        node_pid,
        node_health,
        node_health_error,
        removed: tombstone.map(|tombstone| tombstone.sentence()),
        status,
    })
}

/// Returns the node's health. A node without a leader answers a health check only after waiting for
/// one. So its status is checked for a leader first.
async fn ask_health(
    endpoint: &ClientEndpoint,
    own: &Result<NodeStatus, ClusterError>,
) -> Result<Health, String> {
    match own {
        Ok(NodeStatus { leader: None, raft_term, .. }) => {
            Ok(Health { ready: false, says: format!("no leader is known, in term {raft_term}") })
        }
        Err(ClusterError::Unreachable(why)) => {
            Err(format!("the node doesn't answer: {}", why.join("; ")))
        }
        _ => endpoint.check_health().await.map_err(|error| error_chain(&error)),
    }
}

fn running_node_pid(layout: &Layout) -> Result<Option<i32>, StateError> {
    if lock::holder(&layout.node_lock())?.is_none() {
        return Ok(None);
    }
    let text = state::read(&layout.pid_file())?.unwrap_or_default();
    let identity = ProcessIdentity::from_text(&String::from_utf8_lossy(&text));
    // The lock is held, so the pid file was written since the machine booted. So a process with
    // this pid and this start time is the node.
    Ok(identity.filter(|node| matches!(node.has_start_ticks(), Ok(true))).map(|node| node.pid))
}

fn format_text(report: &StatusReport) -> String {
    let mut lines = Vec::new();
    let mut line = |label: &str, value: Option<String>| {
        if let Some(value) = value {
            lines.push(format!("{label:<10} {}", printable(&value)));
        }
    };
    let status = report.status.as_ref();
    line("agent", Some(agent_line(report)));
    let reason = status.and_then(|s| s.reason.as_deref());
    line("doing", status.map(|s| format_phase(s.phase.as_str(), first_line(reason))));
    // The reason may quote lines of the node's log. Print each of them on a line of its own.
    for quoted in reason.into_iter().flat_map(|reason| reason.lines().skip(1)) {
        line("", Some(quoted.trim().to_owned()));
    }
    line("removed", report.removed.clone());
    line("cluster", status.and_then(cluster_line));
    line("member", status.and_then(member_line));
    line("node", Some(node_line(report)));
    line("health", health_line(report));
    line("quorum", report.peers.no_quorum.clone());
    for silent in &report.peers.silent {
        line("silent", Some(silent.clone()));
    }
    let leader = report.peers.leader.as_ref();
    line("leader", leader.map(|leader| format!("{leader}, as a member that answers says")));
    line("node says", report.node_complaint.clone());
    for explain in status.map(|s| s.explain.as_slice()).unwrap_or_default() {
        line("missing", Some(explain.clone()));
    }
    line("discovery", status.and_then(discovery_line));
    line("history", status.and_then(|status| status.history_fault.clone()));
    line("late", status.and_then(|s| s.certificates_late.clone()));
    line("address", status.and_then(|s| s.unrecorded_address.clone()));
    line("replacement", status.and_then(|s| s.replacement.clone()));
    line("agents", status.and_then(versions_line));
    for feature in status.map(|s| s.waiting_features.as_slice()).unwrap_or_default() {
        line("feature", Some(feature.clone()));
    }
    let backup = status.and_then(|status| status.backup.as_ref());
    for text in backup.map(|backup| backup.to_lines(jiff::Timestamp::now())).unwrap_or_default() {
        line("backup", Some(text));
    }
    line("restart", status.and_then(|s| s.restart_wanted.clone()));
    line(
        "error",
        status.and_then(|s| {
            s.last_error.as_ref().map(|error| format!("{} ({})", error.text, error.at))
        }),
    );
    line("retry", status.and_then(|s| s.next_retry_at.map(|at| at.to_string())));
    lines.join("\n")
}

fn format_phase(what: &str, why: Option<&str>) -> String {
    let what = what.replace('_', " ");
    why.map_or_else(|| what.clone(), |why| format!("{what}: {why}"))
}

fn agent_line(report: &StatusReport) -> String {
    match (&report.status, report.agent_running) {
        (Some(status), true) => {
            format!("running, pid {}, version {}", status.agent_pid, status.agent_version)
        }
        (None, true) => "running".to_owned(),
        (Some(AgentStatus { updated_at: Some(at), .. }), false) => {
            format!("not running; what follows was last written at {at}")
        }
        (_, false) => "not running".to_owned(),
    }
}

fn cluster_line(status: &AgentStatus) -> Option<String> {
    let id = status.cluster_id.as_deref()?;
    let mut text = match &status.cluster_name {
        Some(name) => format!("{name} ({id})"),
        None => id.to_owned(),
    };
    if let Some(phase) = &status.cluster_phase {
        text += &format!(", {phase}");
    }
    if let Some(epoch) = status.epoch {
        text += &format!(", epoch {epoch}");
    }
    Some(text)
}

/// Describes where a service statement says that discovery is, and the present outage of discovery.
/// `None` if there is neither a service statement nor an outage.
fn discovery_line(status: &AgentStatus) -> Option<String> {
    let place = status.discovery_urls.as_ref().zip(status.service_statement);
    let place = place.map(|(urls, number)| format!("{urls}, by service statement {number}"));
    let outage = status.discovery_unreachable.as_ref();
    let outage = outage.map(|lost| format!("unreachable since {}: {}", lost.since, lost.error));
    match (place, outage) {
        (Some(place), Some(outage)) => Some(format!("{outage} ({place})")),
        (place, outage) => place.or(outage),
    }
}

/// Returns the lowest version of the members' agents, unless it is this agent's version.
fn versions_line(status: &AgentStatus) -> Option<String> {
    let lowest = status.lowest_agent_version.as_ref();
    let lowest = lowest.filter(|lowest| **lowest != status.agent_version)?;
    Some(format!("the lowest version of the members' agents is {lowest}"))
}

fn member_line(status: &AgentStatus) -> Option<String> {
    let name = status.name.as_deref()?;
    let seat = status.seat.map_or_else(|| "no seat".to_owned(), |seat| format!("seat {seat}"));
    let url = |url: &Option<String>| url.clone().unwrap_or_else(|| "?".to_owned());
    Some(format!(
        "{name}, {seat}, peers {}, clients {}",
        url(&status.peer_url),
        url(&status.client_url)
    ))
}

fn node_line(report: &StatusReport) -> String {
    let node = report.status.as_ref().and_then(|status| status.node.as_ref());
    let program = node.map_or("", |node| node.program.as_str());
    let mut text = match report.node_pid {
        Some(pid) => format!("running, pid {pid}  {program}"),
        None => format!("not running  {program}"),
    };
    if let Some(death) = node.and_then(|node| node.last_death.as_deref()) {
        text += &format!(" (last death: {death})");
    }
    text.trim_end().to_owned()
}

fn health_line(report: &StatusReport) -> Option<String> {
    let said = report.node_health.as_ref().map(|health| {
        let word = if health.ready { "ready" } else { "not ready" };
        format!("{word}: {}", health.says.replace('\n', "; "))
    });
    said.or_else(|| report.node_health_error.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::status::{DiscoveryOutage, NodeProcessStatus, Phase, StatusHandle};

    async fn status(dir: &std::path::Path) -> String {
        let layout = Layout::new(dir).unwrap();
        format_text(&make_report(&layout).await.unwrap())
    }

    #[tokio::test]
    async fn a_fresh_folder_has_a_status_too() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(status(dir.path()).await, "agent      not running\nnode       not running");
    }

    #[tokio::test]
    async fn the_last_status_of_a_dead_agent_is_shown_with_its_time() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        let board = StatusHandle::default();
        board.set_phase(Phase::Waiting, "for seat 3".to_owned());
        board.update(|status| {
            status.cluster_id = Some("c1".to_owned());
            status.explain = vec!["seat 3 is free".to_owned()];
            status.node = Some(NodeProcessStatus::default());
        });
        let written = AgentStatus { updated_at: Some(jiff::Timestamp::UNIX_EPOCH), ..board.read() };
        std::fs::write(layout.status(), serde_json::to_vec(&written).unwrap()).unwrap();
        insta::assert_snapshot!(status(dir.path()).await, @r"
        agent      not running; what follows was last written at 1970-01-01T00:00:00Z
        doing      waiting: for seat 3
        cluster    c1
        node       not running
        missing    seat 3 is free
        ");
    }

    /// The node has died again and again, so the reason quotes its log, after the advice on the
    /// next step.
    #[tokio::test]
    async fn the_reason_and_the_next_step_come_before_quoted_lines_of_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        let board = StatusHandle::default();
        let reason = "the node died 8 times: give it more memory, then restart the agent\n  \
                      {\"level\":\"fatal\"}\n  {\"level\":\"info\"}";
        board.set_phase(Phase::Ended, reason.to_owned());
        let written = AgentStatus { updated_at: Some(jiff::Timestamp::UNIX_EPOCH), ..board.read() };
        std::fs::write(layout.status(), serde_json::to_vec(&written).unwrap()).unwrap();
        insta::assert_snapshot!(status(dir.path()).await, @r#"
        agent      not running; what follows was last written at 1970-01-01T00:00:00Z
        doing      ended: the node died 8 times: give it more memory, then restart the agent
                   {"level":"fatal"}
                   {"level":"info"}
        node       not running
        "#);
    }

    #[tokio::test]
    async fn features_that_wait_are_shown_with_the_agents_and_the_lowest_version() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        let board = StatusHandle::default();
        let show = async |board: &StatusHandle| {
            let shown = board.read();
            std::fs::write(layout.status(), serde_json::to_vec(&shown).unwrap()).unwrap();
            status(dir.path()).await
        };
        board.update(|status| status.lowest_agent_version = Some(status.agent_version.clone()));
        assert!(!show(&board).await.contains("agents"), "all agents have this version");
        board.update(|status| {
            status.lowest_agent_version = Some("0.0.9".to_owned());
            status.waiting_features = vec!["grant-2 waits for db-2 (0.0.9)".to_owned()];
        });
        let shown = show(&board).await;
        let lines = "agents     the lowest version of the members' agents is 0.0.9\n\
                     feature    grant-2 waits for db-2 (0.0.9)";
        assert!(shown.contains(lines), "{shown}");
    }

    #[tokio::test]
    async fn an_outage_of_discovery_is_shown_with_its_beginning_and_its_error() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        let board = StatusHandle::default();
        let show = async |change: &dyn Fn(&mut AgentStatus)| {
            board.update(change);
            let text = serde_json::to_vec(&board.read()).unwrap();
            std::fs::write(layout.status(), text).unwrap();
            let shown = status(dir.path()).await;
            shown.lines().find_map(|line| line.strip_prefix("discovery  ")).map(str::to_owned)
        };
        assert_eq!(show(&|_| {}).await, None);
        let outage =
            || DiscoveryOutage { since: jiff::Timestamp::UNIX_EPOCH, error: "refused".to_owned() };
        let lost = show(&|status| status.discovery_unreachable = Some(outage())).await.unwrap();
        assert_eq!(lost, "unreachable since 1970-01-01T00:00:00Z: refused");
        let both = show(&|status| {
            status.service_statement = Some(7);
            status.discovery_urls = Some("https://b:1".to_owned());
        });
        let place = "https://b:1, by service statement 7";
        assert_eq!(both.await, Some(format!("{lost} ({place})")));
        let moved = show(&|status| status.discovery_unreachable = None).await;
        assert_eq!(moved.as_deref(), Some(place));
    }

    #[tokio::test]
    async fn the_reason_why_a_newcomer_under_a_policy_waits_is_shown() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        let board = StatusHandle::default();
        let show = async |why: Option<&str>| {
            board.update(|status| status.replacement = why.map(str::to_owned));
            let text = serde_json::to_vec(&board.read()).unwrap();
            std::fs::write(layout.status(), text).unwrap();
            let shown = status(dir.path()).await;
            shown.lines().find_map(|line| line.strip_prefix("replacement ")).map(str::to_owned)
        };
        assert_eq!(show(None).await, None);
        let why = "no quorum of agents has seen it";
        assert_eq!(show(Some(why)).await.as_deref(), Some(why));
    }

    #[tokio::test]
    async fn an_agent_that_holds_its_lock_is_shown_as_running() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        let _lock = lock::acquire(&layout.agent_lock(), "an agent").unwrap();
        assert!(status(dir.path()).await.starts_with("agent      running"));
    }

    #[tokio::test]
    async fn the_status_of_a_removed_member_shows_the_removal() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        std::fs::create_dir_all(layout.node()).unwrap();
        std::fs::write(
            layout.node().join(discovery_formation::agent::TOMBSTONE),
            r#"{"version":1,"at":"2026-01-02T03:04:05Z","by":"ada"}"#,
        )
        .unwrap();
        assert!(status(dir.path()).await.contains("removed from the cluster at 2026-01-02"));
    }
}
