//! A running node: a child of this agent, or a process that an earlier agent started.

use std::io;
use std::net::IpAddr;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use discovery_types::url::{NodeUrl, UrlHost};
use rustix::process::Signal;
use tokio::process::{Child, Command};

use super::environment;
use super::launcher::{ALREADY_RUNNING, CANNOT_EXECUTE};
use super::process::{OpenProcess, ProcessIdentity};
use crate::state::{self, Layout, StateError, lock};

/// How long a launcher may take to write its pid file before the agent reports it as stuck.
const LAUNCHER_DEADLINE: Duration = Duration::from_secs(10);
/// How often the agent reads the pid file while it waits for the launcher to write it.
const PID_FILE_CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// Flag of the node's listen addresses for the other members.
const PEER_LISTEN_FLAG: &str = "--listen-peer-urls";

/// A program to start.
#[derive(Clone, Debug)]
pub struct CommandLine {
    pub path: PathBuf,
    /// All of the program's arguments.
    pub arguments: Vec<String>,
}

/// Why the node could not be started or adopted.
#[derive(Debug, thiserror::Error)]
pub enum NodeStartError {
    /// Reading or locking a file failed.
    #[error(transparent)]
    State(#[from] StateError),
    /// The operating system refused to start a process.
    #[error("can't start the node's launcher")]
    Launcher(#[source] io::Error),
    /// The launcher neither wrote its pid file nor exited in time.
    #[error(
        "the node's launcher has not written {} within {} s: the disk hangs",
        .0.display(),
        LAUNCHER_DEADLINE.as_secs()
    )]
    Stuck(PathBuf),
    /// The lock is held, but no process that matches the pid file was found.
    #[error(
        "{} is locked, but no process that the pid file names runs; find out who holds it \
         (fuser {})",
        .0.display(),
        .0.display()
    )]
    LockHolderUnknown(PathBuf),
}

/// How a node ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeExit {
    /// The node exited with this exit code.
    Exited(i32),
    /// A signal with this number ended the node.
    Killed(i32),
    /// The node was another agent's child, so its exit status can't be read.
    Unknown,
    /// The node's program could not be executed.
    CannotExecute,
}

impl std::fmt::Display for NodeExit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "exit code {code}"),
            Self::Killed(signal) => write!(f, "signal {signal}"),
            Self::Unknown => f.write_str("exit code unknown: an earlier agent had started it"),
            Self::CannotExecute => f.write_str("its program can't be executed"),
        }
    }
}

/// A node's running process.
#[derive(Debug)]
pub struct RunningNode {
    pub identity: ProcessIdentity,
    process: OpenProcess,
    child: Option<Child>,
}

impl RunningNode {
    /// Returns the node that runs under `layout`, if there is one.
    pub async fn adopt(layout: &Layout) -> Result<Option<Self>, NodeStartError> {
        let deadline = tokio::time::Instant::now() + LAUNCHER_DEADLINE;
        loop {
            if lock::holder(&layout.node_lock())?.is_none() {
                return Ok(None);
            }
            if let Some((identity, process)) = open_from_pid_file(layout)? {
                return Ok(Some(Self { identity, process, child: None }));
            }
            // The launcher holds the lock but has no pid file yet, or the node has ended but not
            // yet released the lock. Neither state lasts long.
            if tokio::time::Instant::now() > deadline {
                return Err(NodeStartError::LockHolderUnknown(layout.node_lock()));
            }
            tokio::time::sleep(PID_FILE_CHECK_INTERVAL).await;
        }
    }

    /// Starts the node, or adopts it if it runs already. The inner `Err(NodeExit)` means that the
    /// process died before it became the node.
    pub async fn start(
        layout: &Layout,
        launcher: &CommandLine,
        node: &CommandLine,
    ) -> Result<Result<Self, NodeExit>, NodeStartError> {
        let mut child = Command::new(&launcher.path)
            .args(&launcher.arguments)
            .arg("--pid-file")
            .arg(layout.pid_file())
            .arg("--lock-file")
            .arg(layout.node_lock())
            .arg("--log-file")
            .arg(layout.node_log())
            .arg("--")
            .arg(&node.path)
            .args(&node.arguments)
            .env_clear()
            .envs(environment::node_variables())
            .stdin(Stdio::null())
            .kill_on_drop(false)
            .spawn()
            .map_err(NodeStartError::Launcher)?;
        let deadline = tokio::time::Instant::now() + LAUNCHER_DEADLINE;
        loop {
            if let Some(status) = child.try_wait().map_err(NodeStartError::Launcher)? {
                if status.code() == Some(i32::from(ALREADY_RUNNING))
                    && let Some(running) = Self::adopt(layout).await?
                {
                    return Ok(Ok(running));
                }
                return Ok(Err(exit_from_status(status)));
            }
            if let Some((identity, process)) = open_from_pid_file(layout)?
                && child.id().and_then(|pid| i32::try_from(pid).ok()) == Some(identity.pid)
            {
                return Ok(Ok(Self { identity, process, child: Some(child) }));
            }
            if tokio::time::Instant::now() > deadline {
                // The launcher has not executed the node's program yet, so killing it loses
                // nothing.
                child.start_kill().map_err(NodeStartError::Launcher)?;
                return Err(NodeStartError::Stuck(layout.pid_file()));
            }
            tokio::time::sleep(PID_FILE_CHECK_INTERVAL).await;
        }
    }

    /// Returns whether an earlier agent started this node.
    pub fn is_adopted(&self) -> bool {
        self.child.is_none()
    }

    /// Returns the addresses on which the node listens for the other members, according to its
    /// command line. Empty if that can't be read.
    pub fn peer_listen_addresses(&self) -> Vec<IpAddr> {
        let path = format!("/proc/{}/cmdline", self.identity.pid);
        let Ok(bytes) = std::fs::read(path) else { return Vec::new() };
        let words: Vec<_> = bytes.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
        let values = words.windows(2).filter(|pair| pair[0] == PEER_LISTEN_FLAG);
        let urls = values.filter_map(|pair| pair[1].parse::<NodeUrl>().ok());
        let address = |url: NodeUrl| match url.host() {
            UrlHost::Address(address) => Some(*address),
            UrlHost::Dns(_) => None,
        };
        urls.filter_map(address).collect()
    }

    /// Waits until the node has ended. The future may be dropped, and the method called again.
    pub async fn ended(&mut self) -> io::Result<NodeExit> {
        match &mut self.child {
            Some(child) => Ok(exit_from_status(child.wait().await?)),
            None => self.process.ended().await.map(|()| NodeExit::Unknown),
        }
    }

    /// Sends SIGKILL to the node. No data is lost, because the node's log is durable.
    pub fn kill(&self) -> io::Result<()> {
        self.process.signal(Signal::KILL)
    }

    /// Sends SIGTERM to the node.
    pub fn terminate(&self) -> io::Result<()> {
        self.process.signal(Signal::TERM)
    }
}

fn open_from_pid_file(
    layout: &Layout,
) -> Result<Option<(ProcessIdentity, OpenProcess)>, StateError> {
    let Some(bytes) = state::read(&layout.pid_file())? else { return Ok(None) };
    let Some(identity) = ProcessIdentity::from_text(&String::from_utf8_lossy(&bytes)) else {
        return Ok(None);
    };
    let opened = identity.open().map_err(StateError::io("open the process of", &layout.pid_file()));
    Ok(opened?.map(|process| (identity, process)))
}

fn exit_from_status(status: ExitStatus) -> NodeExit {
    match (status.code(), status.signal()) {
        (Some(code), _) if code == i32::from(CANNOT_EXECUTE) => NodeExit::CannotExecute,
        (Some(code), _) => NodeExit::Exited(code),
        (None, Some(signal)) => NodeExit::Killed(signal),
        (None, None) => NodeExit::Unknown,
    }
}
