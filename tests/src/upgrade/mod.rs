//! `make test-upgrade`: a cluster and its service go from an older version to this one and back,
//! while a client writes.
//!
//! The older programs are those of another commit, built by `scripts/test-upgrade`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use serde_json::Value;

use crate::client::tls_from;
use crate::harness::agents::AgentOptions;
use crate::harness::testbed::{TestbedOptions, path_text};
use crate::harness::{AgentProcess, Etcdctl, Network, RetryingWriter, Testbed, poll_slowly};

/// Time limit of each step.
const LIMIT: Duration = Duration::from_secs(120);
/// Name of the cluster.
const CLUSTER: &str = "demo";
/// Number of founders, each on a host of its own. One more host joins later.
const FOUNDERS: usize = 3;

/// Arguments of the program.
#[derive(Debug, Parser)]
#[command(
    about = "A cluster goes from an older version to this one and back, while a client writes"
)]
pub struct UpgradeOptions {
    /// Folder with muster-discovery, muster-agent and muster-node of the older version
    #[arg(long)]
    pub old: PathBuf,
}

/// Runs all steps, and prints each one.
///
/// # Errors
/// If a step fails, or an acknowledged write is lost.
pub fn run(options: &UpgradeOptions) -> Result<()> {
    let mut upgrade = Upgrade::form(&options.old)?;
    let tls = tls_from(upgrade.etcdctl.credentials())?;
    let writer = RetryingWriter::start_with_tls(upgrade.etcdctl.endpoints().to_vec(), Some(tls));
    upgrade.check_hosts_change_version()?;
    upgrade.check_service_rollback()?;
    writer.stop_and_check(&upgrade.etcdctl.endpoints()[0])?;
    say("every acknowledged write is there");
    Ok(())
}

#[allow(clippy::print_stderr, reason = "progress of a program that takes minutes")]
fn say(step: &str) {
    eprintln!("upgrade: {step}");
}

/// A cluster on hosts, each of which runs the older version or this one.
struct Upgrade {
    old: PathBuf,
    /// Declared before `testbed`, so that agents are dropped first. An agent finds the node to kill
    /// by a file in the test bed's folder.
    agents: Vec<AgentProcess>,
    testbed: Testbed,
    etcdctl: Etcdctl,
}

impl Upgrade {
    /// Forms a cluster with the older programs alone.
    fn form(old: &Path) -> Result<Self> {
        say("the older version forms a cluster of three");
        let programs = Some(old.to_path_buf());
        let options = TestbedOptions { programs: programs.clone(), ..TestbedOptions::default() };
        let testbed = Testbed::start(Network::loopback(4), options)?;
        let bundle = testbed.create_cluster_with_token(CLUSTER, FOUNDERS)?;
        let mut agents = Vec::new();
        for host in 0..FOUNDERS {
            let options = AgentOptions { programs: programs.clone(), ..AgentOptions::default() };
            let mut agent = testbed.agent_with(host, &bundle, options);
            agent.start()?;
            agents.push(agent);
        }
        testbed.wait_cluster_state(CLUSTER, "formed", LIMIT)?;
        let hosts: Vec<_> = agents.iter().map(|agent| &agent.host).collect();
        let etcdctl = testbed.etcdctl(CLUSTER, &hosts)?;
        Ok(Self { old: old.to_path_buf(), testbed, agents, etcdctl })
    }

    /// Upgrades the service, then one host after the other. A host goes back to the older version
    /// and forward again, and the mixed cluster takes another member.
    fn check_hosts_change_version(&mut self) -> Result<()> {
        self.restart_service(None)?;
        say("this version's service, and the older version's agents");
        self.wait_healthy()?;
        for host in 0..FOUNDERS {
            self.restart_host(host, None)?;
            match host {
                0 => {
                    let old = Some(self.old.clone());
                    self.restart_host(host, old)?;
                    self.restart_host(host, None)?;
                }
                1 => self.join_fourth_host()?,
                _ => {}
            }
        }
        self.wait_features()
    }

    /// Waits until each agent knows that no feature waits for an older agent any more.
    fn wait_features(&self) -> Result<()> {
        let is_done = |agent: &AgentProcess| {
            agent.status().is_ok_and(|status| {
                let waiting = status["waiting_features"].as_array().map(Vec::len);
                status["lowest_agent_version"].is_string() && waiting == Some(0)
            })
        };
        poll_slowly("all agents to have the features of this version", LIMIT, || {
            self.agents.iter().all(is_done).then_some(())
        })
    }

    /// Starts the older service on the database that this version has migrated. It must serve, or
    /// refuse to start and leave the database as it is.
    fn check_service_rollback(&mut self) -> Result<()> {
        self.testbed.stop_discovery()?;
        self.testbed.options.programs = Some(self.old.clone());
        // The older service gets a log of its own, in which its error can be found.
        let port = self.testbed.options.ports[0];
        let mut service = self.testbed.spawn_discovery("older-service", port, None)?;
        match service.wait_for_output("listening", LIMIT) {
            Ok(()) => {
                say("the older service serves on this version's database");
                service.terminate(LIMIT)?;
            }
            Err(_) => {
                let (code, text) = (service.exit_code(LIMIT)?, service.output());
                let reason = text.lines().last().unwrap_or_default();
                ensure!(reason.contains("schema"), "the older service says no reason: {text}");
                say(&format!("the older service ends with {code}: {reason}"));
            }
        }
        self.testbed.options.programs = None;
        self.testbed.start_discovery()?;
        self.wait_healthy()
    }

    /// Restarts the service with the programs in this folder. `None` means the programs of this
    /// version.
    fn restart_service(&mut self, programs: Option<PathBuf>) -> Result<()> {
        self.testbed.stop_discovery()?;
        self.testbed.options.programs = programs;
        self.testbed.start_discovery()
    }

    /// Ends a host's agent and node, and starts them with the programs in this folder.
    fn restart_host(&mut self, host: usize, programs: Option<PathBuf>) -> Result<()> {
        let version = if programs.is_some() { "the older version" } else { "this version" };
        say(&format!("host {}: {version}", host + 1));
        let agent = &mut self.agents[host];
        agent.terminate(LIMIT)?;
        agent.options.programs = programs;
        agent.start()?;
        self.wait_healthy().with_context(|| self.agents[host].output())
    }

    /// A host with this version joins while another host still runs the older one.
    fn join_fourth_host(&mut self) -> Result<()> {
        say("host 4: this version joins the mixed cluster");
        let ticket = self.testbed.path("ticket");
        let out = path_text(&ticket)?;
        let create = ["token", "create", "--cluster", CLUSTER, "--kind", "join", "--out", out];
        self.testbed.admin_command(&create)?;
        let mut agent = self.testbed.agent(FOUNDERS, &ticket);
        agent.start()?;
        self.agents.push(agent);
        poll_slowly("the fourth host to vote", LIMIT, || {
            let list = self.etcdctl.json(&["member", "list"]).ok()?;
            let members = list["members"].as_array()?;
            let votes = |member: &Value| {
                member["isLearner"] != true
                    && member["name"].as_str().is_some_and(|name| !name.is_empty())
            };
            (members.len() == FOUNDERS + 1 && members.iter().all(votes)).then_some(())
        })
        .with_context(|| self.agents[FOUNDERS].output())
    }

    /// Waits until the founders' nodes answer linearizable reads, and the service's directory of
    /// the cluster lists all members.
    fn wait_healthy(&self) -> Result<()> {
        poll_slowly("the members to be healthy", LIMIT, || {
            let health = self.etcdctl.output(&["endpoint", "health"]).ok()?;
            health.status.success().then_some(())
        })?;
        let count = self.agents.len();
        poll_slowly("the service to know the members", LIMIT, || {
            let shown = self.testbed.admin_json(&["cluster", "show", CLUSTER]).ok()?;
            let members = shown["directory"]["membership"]["members"].as_array()?;
            (members.len() == count).then_some(())
        })
        .with_context(|| format!("{:?}", self.testbed.admin_json(&["cluster", "show", CLUSTER])))
    }
}
