//! An agent process on a host, and the node that it supervises.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::network::TestHost;
use super::process::{ChildProcess, is_alive, send_signal};
use super::programs::program_in;
use super::testbed::path_text;
use super::wait::wait_for;
use rustix::process::Signal;

/// Maximum time from the agent's incarnation marker until its launcher has written the process id
/// file.
const LAUNCH_LIMIT: Duration = Duration::from_millis(500);

/// Options of an agent's start, beyond the defaults.
#[derive(Clone, Debug, Default)]
pub struct AgentOptions {
    /// Extra arguments of `muster-agent run`.
    pub args: Vec<String>,
    /// Extra environment variables of the agent.
    pub env: Vec<(String, String)>,
    /// Program that runs the agent, such as `strace`, with its arguments. If this is empty, the
    /// agent runs directly.
    pub wrapper: Vec<String>,
    /// Folder of the programs of agent and node; `None` for those that were built with the test.
    pub programs: Option<PathBuf>,
}

/// An agent on a host. Dropping it kills the agent and its node.
#[derive(Debug)]
pub struct AgentProcess {
    /// Host that the agent runs on.
    pub host: TestHost,
    /// Data directory of the agent.
    pub data_dir: PathBuf,
    /// Options of the next start; a test may change them between two starts.
    pub options: AgentOptions,
    bundle: PathBuf,
    log: PathBuf,
    process: Option<ChildProcess>,
    is_kept: bool,
}

impl AgentProcess {
    /// Returns an agent that is not started yet.
    pub fn new(
        host: TestHost,
        data_dir: PathBuf,
        bundle: PathBuf,
        log: PathBuf,
        options: AgentOptions,
    ) -> Self {
        Self { host, data_dir, options, bundle, log, process: None, is_kept: false }
    }

    /// Starts or restarts the agent; a running node is left alone.
    pub fn start(&mut self) -> Result<()> {
        // On loopback, give the agent its address by a flag. The agent can't find it, because it
        // connects to discovery from 127.0.0.1.
        let address = self.host.is_loopback().then(|| self.host.address.to_string());
        self.start_at(address)
    }

    /// Starts the agent as `start` does, but without `--advertise-address`.
    pub fn start_without_address(&mut self) -> Result<()> {
        self.start_at(None)
    }

    fn start_at(&mut self, address: Option<String>) -> Result<()> {
        self.process = None;
        let agent = program_in(self.options.programs.as_deref(), "muster-agent")?;
        let mut command = match self.options.wrapper.split_first() {
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
        // The options come last, because arguments after `--` are passed to the node.
        command.args(&self.options.args).envs(self.options.env.iter().cloned());
        self.process = Some(ChildProcess::spawn(&self.host.name, command, &self.log)?);
        Ok(())
    }

    /// Kills the agent with SIGKILL. The node runs on.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Sends SIGTERM to the agent, which first ends its node. Returns the exit code, or -1 if a
    /// signal ended the agent.
    pub fn terminate(&mut self, limit: Duration) -> Result<i32> {
        let process = self.process.as_mut().context("the agent is not running")?;
        let status = process.terminate(limit)?;
        Ok(status.code().unwrap_or(-1))
    }

    /// Waits until the agent ends by itself, and returns its exit code.
    pub fn exit_code(&mut self, limit: Duration) -> Result<i32> {
        self.process.as_mut().context("the agent is not running")?.exit_code(limit)
    }

    /// Returns the agent's own process id.
    pub fn process_id(&self) -> Option<u32> {
        self.process.as_ref().map(ChildProcess::id)
    }

    /// Whether the agent's process runs.
    pub fn is_running(&mut self) -> bool {
        self.process.as_mut().is_some_and(ChildProcess::is_running)
    }

    /// Waits until the agent prints `text`.
    pub fn wait_for_output(&mut self, text: &str, limit: Duration) -> Result<()> {
        self.process.as_mut().context("the agent is not running")?.wait_for_output(text, limit)
    }

    /// Returns the agent's output over all its starts.
    pub fn output(&self) -> String {
        fs_err::read(&self.log)
            .map(|b| String::from_utf8_lossy(&b).into_owned())
            .unwrap_or_default()
    }

    /// Returns the output of `muster-agent status --json`.
    pub fn status(&self) -> Result<Value> {
        let mut command =
            self.host.command(program_in(self.options.programs.as_deref(), "muster-agent")?);
        command.args(["status", "--json", "--data-dir", path_text(&self.data_dir)?]);
        let output = command.output()?;
        serde_json::from_slice(&output.stdout).with_context(|| {
            format!("status printed no JSON: {}", String::from_utf8_lossy(&output.stderr))
        })
    }

    /// Returns the node's process id from the file of the launcher, if that process exists.
    pub fn node_pid(&self) -> Option<u32> {
        let text = fs_err::read_to_string(self.data_dir.join("agent/node.pid")).ok()?;
        let value: Value = serde_json::from_str(&text).ok()?;
        let pid = u32::try_from(value["pid"].as_u64()?).ok()?;
        is_alive(pid).then_some(pid)
    }

    /// Kills the node with SIGKILL. The agent runs on, and will restart it.
    pub fn kill_node(&self) -> Result<()> {
        let pid = self.node_pid().context("no node runs")?;
        send_signal(pid, Signal::KILL);
        wait_for("the killed node to be gone", Duration::from_secs(60), || {
            (!is_alive(pid)).then_some(())
        })
    }

    /// Waits until a new node process runs, whose id isn't `old`. Returns the new id.
    pub fn wait_new_node(&self, old: u32, limit: Duration) -> Result<u32> {
        wait_for("the agent to start the node again", limit, || {
            self.node_pid().filter(|pid| *pid != old)
        })
    }

    /// Returns the node's data directory.
    pub fn node_dir(&self) -> PathBuf {
        self.data_dir.join("node")
    }

    /// Returns the file with the agent's output.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Consumes this value without killing the agent and its node, which go on running.
    pub fn leave_running(mut self) {
        self.is_kept = true;
        if let Some(process) = self.process.take() {
            std::mem::forget(process);
        }
    }
}

impl Drop for AgentProcess {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        // Kill the agent first, otherwise it would restart the node.
        self.process = None;
        // A launcher may be about to become the node. The agent creates the file
        // `muster-incarnation` before it starts the launcher, which writes its process id shortly
        // afterwards.
        let is_launching = self.node_dir().join("muster-incarnation").exists();
        let limit = if is_launching { LAUNCH_LIMIT } else { Duration::ZERO };
        if let Ok(pid) = wait_for("the node's process id", limit, || self.node_pid()) {
            send_signal(pid, Signal::KILL);
        }
    }
}
