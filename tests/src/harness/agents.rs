//! An agent on a host, and the node that it runs.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::network::Host;
use super::process::{Process, exists, signal};
use super::programs::program;
use super::wait::until;
use super::world::path_text;
use rustix::process::Signal;

/// How long a launcher may take from the marker to its process id.
const LAUNCH_LIMIT: Duration = Duration::from_millis(500);

/// How an agent is started beyond the defaults.
#[derive(Clone, Debug, Default)]
pub struct AgentOptions {
    /// Extra arguments of `muster-agent run`.
    pub args: Vec<String>,
    /// Extra environment.
    pub env: Vec<(String, String)>,
    /// What runs the agent, with its arguments; nothing for the agent itself.
    pub through: Vec<String>,
}

/// One agent. Dropping it kills the agent and its node.
#[derive(Debug)]
pub struct Agent {
    /// Where it runs.
    pub host: Host,
    /// Its data directory.
    pub data_dir: PathBuf,
    /// Its options; may be changed between two starts.
    pub options: AgentOptions,
    bundle: PathBuf,
    log: PathBuf,
    process: Option<Process>,
    kept: bool,
}

impl Agent {
    /// An agent that is not yet started.
    pub fn new(
        host: Host,
        data_dir: PathBuf,
        bundle: PathBuf,
        log: PathBuf,
        options: AgentOptions,
    ) -> Self {
        Self { host, data_dir, options, bundle, log, process: None, kept: false }
    }

    /// Starts (or starts again) the agent; its node, if one runs, is left alone.
    pub fn start(&mut self) -> Result<()> {
        // All loopback hosts route to discovery from 127.0.0.1.
        let address = self.host.is_loopback().then(|| self.host.address.to_string());
        self.start_at(address)
    }

    /// The same, and it isn't told where it is.
    pub fn start_untold(&mut self) -> Result<()> {
        self.start_at(None)
    }

    fn start_at(&mut self, address: Option<String>) -> Result<()> {
        self.process = None;
        let agent = program("muster-agent")?;
        let mut command = match self.options.through.split_first() {
            Some((first, arguments)) => {
                let mut command = self.host.command(first);
                command.args(arguments).arg(agent);
                command
            }
            None => self.host.command(agent),
        };
        command
            .args(["run", "--data-dir", path_text(&self.data_dir)?])
            .args(["--bundle-file", path_text(&self.bundle)?]);
        if let Some(address) = address {
            command.args(["--advertise-address", &address]);
        }
        // Last: what comes after `--` is the node's.
        command.args(&self.options.args).envs(self.options.env.iter().cloned());
        self.process = Some(Process::spawn(&self.host.name, command, &self.log)?);
        Ok(())
    }

    /// `kill -9` of the agent alone.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// SIGTERM to the agent, which ends its node and then itself.
    pub fn terminate(&mut self, limit: Duration) -> Result<i32> {
        let process = self.process.as_mut().context("the agent is not running")?;
        let status = process.terminate(limit)?;
        Ok(status.code().unwrap_or(-1))
    }

    /// Waits until the agent ends by itself; its exit code.
    pub fn exit_code(&mut self, limit: Duration) -> Result<i32> {
        self.process.as_mut().context("the agent is not running")?.exit_code(limit)
    }

    /// The agent's own process id.
    pub fn process_id(&self) -> Option<u32> {
        self.process.as_ref().map(Process::id)
    }

    /// Whether the agent's process is there.
    pub fn is_running(&mut self) -> bool {
        self.process.as_mut().is_some_and(Process::is_running)
    }

    /// Waits until the agent prints `text`.
    pub fn wait_for_output(&mut self, text: &str, limit: Duration) -> Result<()> {
        self.process.as_mut().context("the agent is not running")?.wait_for_output(text, limit)
    }

    /// All that the agent has printed, over all its starts.
    pub fn output(&self) -> String {
        fs_err::read(&self.log)
            .map(|b| String::from_utf8_lossy(&b).into_owned())
            .unwrap_or_default()
    }

    /// What `muster-agent status --json` says.
    pub fn status(&self) -> Result<Value> {
        let mut command = self.host.command(program("muster-agent")?);
        command.args(["status", "--json", "--data-dir", path_text(&self.data_dir)?]);
        let output = command.output()?;
        serde_json::from_slice(&output.stdout).with_context(|| {
            format!("status printed no JSON: {}", String::from_utf8_lossy(&output.stderr))
        })
    }

    /// The node's process id, if one runs: what the launcher wrote down.
    pub fn node_pid(&self) -> Option<u32> {
        let text = fs_err::read_to_string(self.data_dir.join("agent/node.pid")).ok()?;
        let value: Value = serde_json::from_str(&text).ok()?;
        let pid = u32::try_from(value["pid"].as_u64()?).ok()?;
        exists(pid).then_some(pid)
    }

    /// `kill -9` of the node alone; the agent starts it again.
    pub fn kill_node(&self) -> Result<()> {
        let pid = self.node_pid().context("no node runs")?;
        signal(pid, Signal::KILL);
        until("the killed node to be gone", Duration::from_secs(60), || {
            (!exists(pid)).then_some(())
        })
    }

    /// Waits until the node runs under another process id than `old`.
    pub fn wait_new_node(&self, old: u32, limit: Duration) -> Result<u32> {
        until("the agent to start the node again", limit, || {
            self.node_pid().filter(|pid| *pid != old)
        })
    }

    /// The node's data directory.
    pub fn node_dir(&self) -> PathBuf {
        self.data_dir.join("node")
    }

    /// Where the agent's output goes.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Leaves agent and node running.
    pub fn keep(mut self) {
        self.kept = true;
        if let Some(process) = self.process.take() {
            std::mem::forget(process);
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        // The agent first, or it would start the node again.
        self.process = None;
        // A launcher may be on its way: it says who it is before it becomes the node.
        let launched = self.node_dir().join("muster-incarnation").exists();
        let patience = if launched { LAUNCH_LIMIT } else { Duration::ZERO };
        if let Ok(pid) = until("the node's process id", patience, || self.node_pid()) {
            signal(pid, Signal::KILL);
        }
    }
}
