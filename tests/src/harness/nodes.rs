//! Members without agents: a server program on a host, started with etcd's flags as etcd's guides do.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::Signal;

use super::network::Host;
use super::process::{Process, signal};

/// What etcd says once it serves; 3.4's structured log has the second only.
const READY: [&str; 2] = ["ready to serve client requests", "serving client traffic"];

/// Of a log, in what [`last_words`] tells.
const LAST_LINES: usize = 15;

/// One member of a cluster: how it is started, and its process, which ends with it.
#[derive(Debug)]
pub struct Node {
    /// Where it runs.
    pub host: Host,
    /// Its data directory.
    pub data_dir: PathBuf,
    /// Its flags; may be changed between two starts.
    pub flags: Vec<String>,
    /// Extra environment.
    pub env: Vec<(String, String)>,
    program: PathBuf,
    log: PathBuf,
    process: Option<Process>,
    /// How much of the log was written before the last start.
    before: usize,
}

impl Node {
    /// Not yet started. It listens on the host's address, peers on 2380, clients on 2379; its data
    /// and its log lie in `folder` under `name`.
    pub fn new(host: &Host, name: &str, program: &Path, folder: &Path) -> Self {
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
            before: 0,
        }
    }

    /// Starts it, or starts it again.
    pub fn start(&mut self) -> Result<()> {
        self.kill();
        self.before = self.all_output().len();
        let mut command = self.host.command(&self.program);
        command.args(&self.flags).envs(self.env.iter().cloned());
        self.process = Some(Process::spawn(&self.host.name, command, &self.log)?);
        Ok(())
    }

    /// Waits until it serves clients.
    pub fn ready(&mut self, limit: Duration) -> Result<()> {
        let (log, before) = (self.log.clone(), self.before);
        let said = move || {
            let output = fs_err::read(&log).unwrap_or_default();
            let output = String::from_utf8_lossy(&output[before.min(output.len())..]).into_owned();
            READY.iter().any(|text| output.contains(text))
        };
        let process = self.process()?;
        super::until("the node to serve or to end", limit, || {
            (said() || !process.is_running()).then_some(())
        })?;
        anyhow::ensure!(said(), "it ended:\n{}", self.output());
        Ok(())
    }

    /// Whether its process is there.
    pub fn is_running(&mut self) -> bool {
        self.process.as_mut().is_some_and(Process::is_running)
    }

    /// Waits until it ends by itself; its exit code.
    pub fn exit_code(&mut self, limit: Duration) -> Result<i32> {
        self.process()?.exit_code(limit)
    }

    /// SIGTERM, and its exit code.
    pub fn stop(&mut self, limit: Duration) -> Result<i32> {
        self.signal(Signal::TERM)?;
        self.exit_code(limit)
    }

    /// Sends it a signal.
    pub fn signal(&mut self, sent: Signal) -> Result<()> {
        signal(self.process()?.id(), sent);
        Ok(())
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// What it has printed since its last start.
    pub fn output(&self) -> String {
        let output = self.all_output();
        String::from_utf8_lossy(&output[self.before.min(output.len())..]).into_owned()
    }

    fn all_output(&self) -> Vec<u8> {
        fs_err::read(&self.log).unwrap_or_default()
    }

    fn process(&mut self) -> Result<&mut Process> {
        self.process.as_mut().context("the node is not running")
    }
}

/// What each of them printed last: for a test that failed.
pub fn last_words(nodes: &[Node]) -> String {
    let words = nodes.iter().map(|node| {
        let output = node.output();
        let lines: Vec<&str> = output.lines().collect();
        let last = lines[lines.len().saturating_sub(LAST_LINES)..].join("\n");
        format!("== {}\n{last}\n", node.host.name)
    });
    words.collect()
}

/// Where a host's node is reached by other nodes.
pub fn peer_url(host: &Host) -> String {
    format!("http://{}:2380", host.address)
}

/// Where a host's node is reached by clients.
pub fn client_url(host: &Host) -> String {
    format!("http://{}:2379", host.address)
}
