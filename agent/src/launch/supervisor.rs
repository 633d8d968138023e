//! Keeps the node running. It adopts a node that an earlier agent started, or starts one. It
//! restarts a node that died, with growing pauses, and gives up with a reason. It stops the node on
//! request.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::launcher::CANNOT_EXECUTE;
use super::restart_policy::{QUICK_DEATH_TIME, RestartDecision, RestartPolicy, jitter};
use super::running_node::{CommandLine, NodeExit, NodeStartError, RunningNode};
use crate::exit::{ExitError, error_chain};
use crate::observe::node_log::{self, LogPosition};
use crate::state::node_dir::{self, Tombstone};
use crate::state::{Layout, StateError};

/// How long a node may take to stop after SIGTERM before the agent stops waiting for it.
pub const STOP_DEADLINE: Duration = Duration::from_secs(30);
/// How long a node may take to stop if the host has lost its addresses. Then it is killed, because
/// stock etcd waits for unreachable peers to take over its leadership.
const STRANDED_STOP_DEADLINE: Duration = Duration::from_secs(5);
/// Number of log lines quoted in the report of a node's death.
const LAST_LINES: usize = 5;
/// The node's exit code for "do not restart".
const NODE_DO_NOT_RESTART: i32 = 3;

/// Why supervision of the node ended.
#[derive(Debug)]
pub enum SupervisionOutcome {
    /// The agent was told to stop, and the node has stopped.
    Stopped,
    /// The cluster has removed this member for good, and its node wrote this tombstone.
    Removed(Tombstone),
    /// The node logged that its member was removed, but wrote no tombstone. Stock etcd never writes
    /// one.
    RemovalLogged,
    /// The agent must exit with this error.
    Failed(ExitError),
}

/// Receives the node's state changes, for status and journal.
pub trait Observer {
    /// A process of the node is about to be started.
    fn starting(&mut self) {}
    /// The node runs: it was started, or an earlier agent's node was adopted.
    fn running(&mut self, node: &RunningNode);
    /// The node died and will be started again after `pause`.
    fn died(&mut self, reason: &str, pause: Duration);
    /// The agent waits for the node to stop.
    fn stopping(&mut self);
}

/// Supervises the node under `layout`.
pub struct Supervisor<'a> {
    /// Paths in the data directory.
    pub layout: &'a Layout,
    /// The agent's own program with the hidden subcommand `launch-node`.
    pub launcher: CommandLine,
    /// The node's program and its arguments.
    pub node: CommandLine,
    /// How long to wait for the node to stop after SIGTERM.
    pub stop_deadline: Duration,
    /// Tells whether this host has lost an address. If an adopted node listens for peers on lost
    /// addresses only, it is stopped, and started with the present command line.
    pub is_lost: &'a (dyn Fn(IpAddr) -> bool + Sync),
}

impl Supervisor<'_> {
    /// Runs the node until `stop` is cancelled, its member is removed, or it can't run.
    pub async fn run(
        &self,
        stop: &CancellationToken,
        observer: &mut impl Observer,
    ) -> SupervisionOutcome {
        let mut policy = RestartPolicy::default();
        loop {
            if let Some(outcome) = self.check_tombstone() {
                return outcome;
            }
            let began = Instant::now();
            let log_end_at_start = LogPosition::end_of(&self.layout.node_log());
            let died = match self.start_and_wait(stop, observer).await {
                Ok(RunResult::Died(end)) => end,
                Ok(RunResult::Stopped) => {
                    return self.check_tombstone().unwrap_or(SupervisionOutcome::Stopped);
                }
                Err(end) => return SupervisionOutcome::Failed(end),
            };
            if let Some(outcome) = self.check_tombstone() {
                return outcome;
            }
            if node_log::has_removal_error(&self.layout.node_log(), log_end_at_start.as_ref()) {
                return SupervisionOutcome::RemovalLogged;
            }
            let then = policy.decide_after_death(began.elapsed(), jitter());
            let death = self.describe_death(&died, log_end_at_start.as_ref());
            let pause = match self.decide_restart(&died, &death, then) {
                Ok(pause) => pause,
                Err(end) => return SupervisionOutcome::Failed(end),
            };
            observer.died(&death, pause);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = stop.cancelled() => return SupervisionOutcome::Stopped,
            }
        }
    }

    fn check_tombstone(&self) -> Option<SupervisionOutcome> {
        match node_dir::read_tombstone(&self.layout.node()) {
            Ok(tombstone) => tombstone.map(SupervisionOutcome::Removed),
            Err(error) => Some(SupervisionOutcome::Failed(failed(&error))),
        }
    }

    async fn start_and_wait(
        &self,
        stop: &CancellationToken,
        observer: &mut impl Observer,
    ) -> Result<RunResult, ExitError> {
        let adopted =
            RunningNode::adopt(self.layout).await.map_err(|error| start_failed(&error))?;
        let adopted = match adopted {
            Some(node) if self.is_stranded(&node) => {
                tracing::warn!(
                    pid = node.identity.pid,
                    "the node listens on an address that this host has lost: it is restarted"
                );
                observer.stopping();
                self.stop(node).await?;
                None
            }
            adopted => adopted,
        };
        let mut node = match adopted {
            Some(node) => node,
            None => {
                observer.starting();
                let started = RunningNode::start(self.layout, &self.launcher, &self.node).await;
                match started.map_err(|error| start_failed(&error))? {
                    Ok(node) => node,
                    Err(end) => return Ok(RunResult::Died(end)),
                }
            }
        };
        observer.running(&node);
        tokio::select! {
            ended = node.ended() => ended.map(RunResult::Died).map_err(|error| {
                ExitError::Failed(format!("can't wait for the node: {error}"))
            }),
            () = stop.cancelled() => {
                observer.stopping();
                self.stop(node).await
            }
        }
    }

    /// Whether the host has lost all addresses on which the node listens for the other members.
    fn is_stranded(&self, node: &RunningNode) -> bool {
        let addresses = node.peer_listen_addresses();
        !addresses.is_empty() && addresses.into_iter().all(self.is_lost)
    }

    async fn stop(&self, mut node: RunningNode) -> Result<RunResult, ExitError> {
        let pid = node.identity.pid;
        let failed = |error| ExitError::Failed(format!("can't stop the node, pid {pid}: {error}"));
        node.terminate().map_err(failed)?;
        if self.is_stranded(&node)
            && tokio::time::timeout(STRANDED_STOP_DEADLINE, node.ended()).await.is_err()
        {
            tracing::warn!(pid, "the node doesn't stop, and nobody can reach it: it is killed");
            node.kill().map_err(failed)?;
        }
        match tokio::time::timeout(self.stop_deadline, node.ended()).await {
            Ok(ended) => {
                let end = ended.map_err(failed)?;
                tracing::info!(pid, "the node has stopped ({end})");
                Ok(RunResult::Stopped)
            }
            Err(_) => Err(ExitError::Failed(format!(
                "the node, pid {pid}, has not stopped within {} s of SIGTERM; it is left running, \
                 and the next agent adopts it (kill -9 {pid} ends it; its log survives that)",
                self.stop_deadline.as_secs()
            ))),
        }
    }

    /// Describes how the node died. If it exited by itself, its last log lines are included, since
    /// they usually give the reason. A killed node logs no reason. `log_end_at_start` is the end of
    /// the log when the node started.
    fn describe_death(&self, died: &NodeExit, log_end_at_start: Option<&LogPosition>) -> String {
        let last = match died {
            NodeExit::Exited(_) => {
                node_log::death_reason(&self.layout.node_log(), log_end_at_start)
            }
            NodeExit::Killed(_) | NodeExit::CannotExecute | NodeExit::Unknown => None,
        };
        match last {
            Some(words) => format!("{died}; its last words: {words}"),
            None => died.to_string(),
        }
    }

    /// Decides after a death: `Ok` is the pause before the next start, `Err` ends supervision.
    fn decide_restart(
        &self,
        died: &NodeExit,
        death: &str,
        then: RestartDecision,
    ) -> Result<Duration, ExitError> {
        let log = self.layout.node_log();
        let last = node_log::last_lines(&log, LAST_LINES);
        let last: Vec<String> = last.iter().map(|line| node_log::readable_text(line)).collect();
        // The reason and the next step come first, for readers who see only the first line.
        let with_log = |reason: String| {
            let last = if last.is_empty() {
                String::new()
            } else {
                "\n  ".to_owned() + &last.join("\n  ")
            };
            format!(
                "{reason}. Mend that, then start this agent again. The node's log is {}{}{last}",
                log.display(),
                if last.is_empty() { "" } else { ", and ends with:" }
            )
        };
        match (died, then) {
            (NodeExit::Exited(NODE_DO_NOT_RESTART), _) => Err(ExitError::DoNotRestart(with_log(
                format!("the node asks not to be started again ({death})"),
            ))),
            (NodeExit::CannotExecute, _) => Err(ExitError::Failed(format!(
                "{} can't be executed (exit code {CANNOT_EXECUTE}); see --node-binary",
                self.node.path.display()
            ))),
            (_, RestartDecision::GiveUp { quick_deaths }) => {
                Err(ExitError::Failed(with_log(format!(
                    "the node can't run: {death} ({quick_deaths} deaths in a row, each within {} s of \
                 its start)",
                    QUICK_DEATH_TIME.as_secs()
                ))))
            }
            (_, RestartDecision::Restart { after }) => Ok(after),
        }
    }
}

enum RunResult {
    Died(NodeExit),
    Stopped,
}

fn failed(error: &StateError) -> ExitError {
    if error.is_retryable() {
        ExitError::Failed(error_chain(error))
    } else {
        ExitError::DoNotRestart(error_chain(error))
    }
}

fn start_failed(error: &NodeStartError) -> ExitError {
    ExitError::Failed(error_chain(error))
}
