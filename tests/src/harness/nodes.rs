//! Members without agents: a server program on a host, started with etcd's flags as in etcd's
//! guides.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::Signal;

use super::network::TestHost;
use super::process::{ChildProcess, send_signal};

/// Log messages with which a server reports that it serves clients. etcd 3.4's structured log has
/// only "serving client traffic".
const READY_MESSAGES: [&str; 2] = ["ready to serve client requests", "serving client traffic"];

/// Number of lines of each log in the result of [`last_log_lines`].
const LAST_LINES: usize = 15;

/// Command line and process of a member. The process is killed when this value is dropped.
#[derive(Debug)]
pub struct NodeProcess {
    /// Host that the node runs on.
    pub host: TestHost,
    /// Data directory of the node.
    pub data_dir: PathBuf,
    /// Flags of the next start; a test may change them between two starts.
    pub flags: Vec<String>,
    /// Extra environment variables of the node.
    pub env: Vec<(String, String)>,
    program: PathBuf,
    log: PathBuf,
    process: Option<ChildProcess>,
    /// Length of the log file when the node was last started.
    log_start: usize,
}

impl NodeProcess {
    /// Returns a node that is not started yet. It listens on the host's address, for peers on port
    /// 2380 and for clients on port 2379. Its data directory `name` and log `name.log` are in
    /// `folder`.
    pub fn new(host: &TestHost, name: &str, program: &Path, folder: &Path) -> Self {
        let (peer, client) = (peer_url(host), client_url(host));
        let data_dir = folder.join(name);
        let flags = vec![
            format!("--data-dir={}", data_dir.display()),
            format!("--listen-peer-urls={peer}"),
            format!("--initial-advertise-peer-urls={peer}"),
            format!("--listen-client-urls={client}"),
            format!("--advertise-client-urls={client}"),
        ];
        Self {
            host: host.clone(),
            data_dir,
            flags,
            env: Vec::new(),
            program: program.to_owned(),
            log: folder.join(format!("{name}.log")),
            process: None,
            log_start: 0,
        }
    }

    /// Starts the node. If the node runs, kills it first.
    pub fn start(&mut self) -> Result<()> {
        self.kill();
        self.log_start = self.all_output().len();
        let mut command = self.host.command(&self.program);
        command.args(&self.flags).envs(self.env.iter().cloned());
        self.process = Some(ChildProcess::spawn(&self.host.name, command, &self.log)?);
        Ok(())
    }

    /// Waits until the node serves clients. Fails if the process ends before that.
    pub fn wait_ready(&mut self, limit: Duration) -> Result<()> {
        let (log, before) = (self.log.clone(), self.log_start);
        let is_ready = move || {
            let output = fs_err::read(&log).unwrap_or_default();
            let output = String::from_utf8_lossy(&output[before.min(output.len())..]).into_owned();
            READY_MESSAGES.iter().any(|text| output.contains(text))
        };
        let process = self.process()?;
        super::wait_for("the node to serve or to end", limit, || {
            (is_ready() || !process.is_running()).then_some(())
        })?;
        anyhow::ensure!(is_ready(), "it ended:\n{}", self.output());
        Ok(())
    }

    /// Returns the id of the node's process.
    pub fn id(&mut self) -> Result<u32> {
        Ok(self.process()?.id())
    }

    /// Whether the node's process runs.
    pub fn is_running(&mut self) -> bool {
        self.process.as_mut().is_some_and(ChildProcess::is_running)
    }

    /// Waits until the node ends by itself, and returns its exit code.
    pub fn exit_code(&mut self, limit: Duration) -> Result<i32> {
        self.process()?.exit_code(limit)
    }

    /// Sends SIGTERM, waits for the end, and returns the exit code.
    pub fn stop(&mut self, limit: Duration) -> Result<i32> {
        self.signal(Signal::TERM)?;
        self.exit_code(limit)
    }

    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        send_signal(self.process()?.id(), signal);
        Ok(())
    }

    /// Kills the node with SIGKILL.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Returns the node's output since its last start.
    pub fn output(&self) -> String {
        let output = self.all_output();
        String::from_utf8_lossy(&output[self.log_start.min(output.len())..]).into_owned()
    }

    fn all_output(&self) -> Vec<u8> {
        fs_err::read(&self.log).unwrap_or_default()
    }

    fn process(&mut self) -> Result<&mut ChildProcess> {
        self.process.as_mut().context("the node is not running")
    }
}

/// Returns the last lines of each node's log, for the message of a failed test.
pub fn last_log_lines(nodes: &[NodeProcess]) -> String {
    let last_lines_of_nodes = nodes.iter().map(|node| {
        let output = node.output();
        let lines: Vec<&str> = output.lines().collect();
        let last = lines[lines.len().saturating_sub(LAST_LINES)..].join("\n");
        format!("== {}\n{last}\n", node.host.name)
    });
    last_lines_of_nodes.collect()
}

/// Returns the URL at which other nodes reach the host's node.
pub fn peer_url(host: &TestHost) -> String {
    format!("http://{}", host.at_port(2380))
}

/// Returns the URL at which clients reach the host's node.
pub fn client_url(host: &TestHost) -> String {
    format!("http://{}", host.at_port(2379))
}
