//! A cluster of nodes without agents on loopback hosts, changed with `muster-agent member`.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::network::Network;
use super::nodes::{NodeProcess, client_url, peer_url};
use super::programs::program_path;
use super::wait::poll_slowly;

/// Time limit of each wait for a node or for the cluster.
const LIMIT: Duration = Duration::from_secs(60);

/// A node together with its name and URLs.
#[derive(Debug)]
pub struct AgentlessNode {
    /// Member name of the node.
    pub name: String,
    /// Peer URL of the node.
    pub peer_url: String,
    /// Client URL of the node.
    pub client_url: String,
    node: NodeProcess,
    is_running: bool,
}

impl AgentlessNode {
    /// Starts the node with its current flags and environment.
    pub fn start(&mut self) -> Result<()> {
        self.is_running = true;
        self.node.start()
    }

    /// Kills the node with SIGKILL.
    pub fn kill(&mut self) {
        self.is_running = false;
        self.node.kill();
    }

    /// Sends SIGTERM, and waits for the end of the process.
    pub fn stop(&mut self) -> Result<()> {
        self.is_running = false;
        self.node.stop(LIMIT).map(drop)
    }

    /// Waits until the node's process ends without a signal from the test. Returns the exit code.
    pub fn exit_code(&mut self) -> Result<i32> {
        self.is_running = false;
        self.node.exit_code(LIMIT)
    }

    /// Sets the peer URL for the next start.
    pub fn move_to(&mut self, url: &str) {
        let listen = "--listen-peer-urls=";
        self.node.flags.retain(|flag| !flag.starts_with(listen));
        self.node.flags.push(format!("{listen}{url}"));
        let advertise = "ETCD_INITIAL_ADVERTISE_PEER_URLS";
        self.node.env.retain(|(name, _)| name != advertise);
        self.node.env.push((advertise.to_owned(), url.to_owned()));
        url.clone_into(&mut self.peer_url);
    }
}

/// A cluster of nodes without agents. More nodes can be added on hosts that aren't used yet.
#[derive(Debug)]
pub struct AgentlessCluster {
    /// All nodes that were ever created. The index of a node is its number.
    pub all: Vec<AgentlessNode>,
    program: PathBuf,
    network: Network,
    folder: tempfile::TempDir,
}

impl AgentlessCluster {
    /// Starts a cluster of three nodes, with hosts for `room` nodes in total.
    pub fn start_three(program: &Path, room: u8) -> Result<Self> {
        let network = Network::loopback(room);
        let folder = tempfile::Builder::new().prefix("muster-machines-").tempdir()?;
        let mut machines = Self { all: Vec::new(), program: program.to_owned(), network, folder };
        for _ in 0..3 {
            machines.add_machine();
        }
        let initial: Vec<String> =
            machines.all.iter().map(|one| format!("{}={}", one.name, one.peer_url)).collect();
        for one in &mut machines.all {
            one.node.env = [
                ("ETCD_NAME", one.name.clone()),
                ("ETCD_INITIAL_CLUSTER", initial.join(",")),
                ("ETCD_INITIAL_ADVERTISE_PEER_URLS", one.peer_url.clone()),
                ("ETCD_INITIAL_CLUSTER_STATE", "new".to_owned()),
            ]
            .map(|(name, value)| (name.to_owned(), value))
            .to_vec();
            one.start()?;
        }
        // Each change of members requires that all members have been connected for some time.
        // `member wait` waits until they have.
        poll_slowly("three members to form", LIMIT, || {
            machines.run_member_command(&["list"]).ok()
        })?;
        machines.run_member_command(&["wait", "--patience", "90"])?;
        Ok(machines)
    }

    /// Creates a further node that is neither configured nor started, and returns its number.
    pub fn add_machine(&mut self) -> usize {
        let number = self.all.len();
        let name = format!("n{}", number + 1);
        let host = &self.network.hosts[number];
        let mut node = NodeProcess::new(host, &name, &self.program, self.folder.path());
        // Pass the peer URL in the environment, as the output of `member add` tells an operator to
        // do.
        node.flags.retain(|flag| !flag.starts_with("--initial-advertise-peer-urls"));
        let (peer_url, client_url) = (peer_url(host), client_url(host));
        self.all.push(AgentlessNode { name, peer_url, client_url, node, is_running: false });
        number
    }

    /// Starts node `number` with the environment that `member add --json` printed.
    pub fn join(&mut self, number: usize, printed: &Value) -> Result<()> {
        let environment =
            printed["environment"].as_object().context("the newcomer's environment variables")?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let one = &mut self.all[number];
        one.node.env =
            environment.iter().map(|(name, value)| (name.clone(), text(value))).collect();
        one.start()
    }

    /// Starts node `number`, whose member was added before. Its environment follows from the
    /// cluster's list of members.
    pub fn join_by_list(&mut self, number: usize) -> Result<()> {
        let list = self.list_members()?;
        let members = list["members"].as_array().context("members")?;
        let (name, url) = (self.all[number].name.clone(), self.all[number].peer_url.clone());
        let initial: Vec<String> = members
            .iter()
            .map(|member| {
                let at = member["peer_urls"][0].as_str().unwrap_or_default();
                let member_name =
                    if at == url { &name } else { member["name"].as_str().unwrap_or_default() };
                format!("{member_name}={at}")
            })
            .collect();
        let environment = serde_json::json!({ "environment": {
            "ETCD_NAME": name,
            "ETCD_INITIAL_CLUSTER": initial.join(","),
            "ETCD_INITIAL_ADVERTISE_PEER_URLS": url,
            "ETCD_INITIAL_CLUSTER_STATE": "existing",
        }});
        self.join(number, &environment)
    }

    /// Returns the client URLs of the running nodes, separated by commas.
    pub fn endpoints(&self) -> String {
        let running = self.all.iter().filter(|one| one.is_running);
        running.map(|one| one.client_url.clone()).collect::<Vec<_>>().join(",")
    }

    /// Returns a command `muster-agent member`, not started yet, with the endpoints of all running
    /// nodes.
    pub fn member(&self, args: &[&str]) -> Result<Command> {
        self.member_at(&self.endpoints(), args)
    }

    /// Returns a command `muster-agent member`, not started yet, for these endpoints.
    pub fn member_at(&self, endpoints: &str, args: &[&str]) -> Result<Command> {
        let mut command = Command::new(program_path("muster-agent")?);
        command
            .arg("member")
            .args(args)
            .args(["--json", "--endpoints", endpoints])
            .arg("--data-dir")
            .arg(self.folder.path().join("no-agent"));
        Ok(command)
    }

    /// Runs `muster-agent member`, and returns its output whatever its exit code.
    pub fn output(&self, args: &[&str]) -> Result<Output> {
        Ok(self.member(args)?.output()?)
    }

    /// Runs `muster-agent member`, and returns its JSON output. Fails if the command fails.
    pub fn run_member_command(&self, args: &[&str]) -> Result<Value> {
        let output = self.output(args)?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "member {}: {text}", args.join(" "));
        serde_json::from_slice(&output.stdout).with_context(|| args.join(" "))
    }

    /// Returns the output of `muster-agent member list`. Retries while the cluster has no leader,
    /// which may happen at any time on a loaded machine.
    pub fn list_members(&self) -> Result<Value> {
        poll_slowly("the member list", LIMIT, || self.run_member_command(&["list"]).ok())
    }

    /// Runs `muster-agent member`, expects exit code `code`, and returns its standard error.
    pub fn expect_refusal(&self, args: &[&str], code: i32) -> Result<String> {
        let output = self.output(args)?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(code), "{:?}: {text}", output.status);
        Ok(text)
    }

    /// Waits until the cluster's voters are exactly the members `names`, which must be sorted.
    pub fn wait_voters(&self, names: &[&str]) -> Result<()> {
        poll_slowly(&format!("{names:?} to be the voters"), LIMIT, || {
            let list = self.run_member_command(&["list"]).ok()?;
            let voters = list["members"].as_array()?.iter();
            let mut voters: Vec<&str> = voters
                .filter(|member| member["is_learner"] == false)
                .filter_map(|member| member["name"].as_str())
                .collect();
            voters.sort_unstable();
            (voters == names).then_some(())
        })
    }
}
