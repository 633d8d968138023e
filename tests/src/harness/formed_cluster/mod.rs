//! A formed cluster with its agents, and helpers to change it.

mod replacements;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::agents::{AgentOptions, AgentProcess};
use super::etcdctl::Etcdctl;
use super::network::{Network, TestHost};
use super::process::last_lines;
use super::programs::program_path;
use super::testbed::{Testbed, TestbedOptions, path_text};
use super::wait::poll_slowly;

pub use self::replacements::{AFTER, REPLACED, ZONE};

/// Time limit of each wait for the cluster or its agents.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Pause that is long enough for the election of another leader.
const ELECTION: Duration = Duration::from_secs(2);

/// A formed cluster, its agents, and the arguments of their start.
pub struct FormedCluster {
    /// Declared before `testbed`, so that agents are dropped first. An agent finds its node by a
    /// file in the test bed's folder.
    pub agents: Vec<AgentProcess>,
    pub testbed: Testbed,
    args: Vec<String>,
}

impl FormedCluster {
    pub fn start(network: Network, size: usize, node: Option<&Path>) -> Result<Self> {
        Self::form(Testbed::start(network, TestbedOptions::default())?, size, node)
    }

    /// Forms a cluster in a running test bed.
    pub fn form(testbed: Testbed, size: usize, node: Option<&Path>) -> Result<Self> {
        let bundle = testbed.create_cluster_with_token("demo", size)?;
        let mut running = Self::with_agents(testbed, node)?;
        for host in 0..size {
            let mut agent = running.agent(host, &bundle, &[]);
            agent.start()?;
            running.agents.push(agent);
        }
        running.testbed.wait_cluster_state("demo", "formed", LIMIT)?;
        Ok(running)
    }

    /// Returns a cluster in which no agent has been started. Its agents will run `node`.
    pub fn with_agents(testbed: Testbed, node: Option<&Path>) -> Result<Self> {
        let args = match node {
            Some(node) => vec!["--node-binary".to_owned(), path_text(node)?.to_owned()],
            None => Vec::new(),
        };
        Ok(Self { testbed, agents: Vec::new(), args })
    }

    pub fn agent(&self, host: usize, bundle: &Path, env: &[(&str, &str)]) -> AgentProcess {
        let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let options =
            AgentOptions { args: self.args.clone(), env: env.collect(), ..AgentOptions::default() };
        self.testbed.agent_with(host, bundle, options)
    }

    /// Restarts the founders' agents with this environment; their nodes go on running.
    pub fn restart_agents(&mut self, env: &[(&str, &str)]) -> Result<()> {
        for agent in &mut self.agents {
            agent.kill();
            let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
            agent.options.env = env.collect();
            agent.start()?;
        }
        Ok(())
    }

    /// Waits until `done` is true. Meanwhile each agent that died at `MUSTER_CRASH_AT` is restarted
    /// without that variable. Before the restart its node is killed, and another leader gets time
    /// to be elected.
    pub fn revive_until(&mut self, what: &str, done: impl Fn(&Self) -> bool) -> Result<()> {
        self.revive(what, LIMIT, true, done)
    }

    /// Works as [`FormedCluster::revive_until`], and leaves the nodes running.
    pub fn revive_agents_until(&mut self, what: &str, done: impl Fn(&Self) -> bool) -> Result<()> {
        self.revive(what, 2 * LIMIT, false, done)
    }

    fn revive(
        &mut self,
        what: &str,
        limit: Duration,
        kills_nodes: bool,
        done: impl Fn(&Self) -> bool,
    ) -> Result<()> {
        let revived = poll_slowly(what, limit, || {
            let dead = self.agents.iter_mut().position(|agent| !agent.is_running());
            if let Some(dead) = dead {
                let dead = &mut self.agents[dead];
                if kills_nodes && dead.node_pid().is_some() {
                    dead.kill_node().ok()?;
                }
                std::thread::sleep(ELECTION);
                dead.options.env.retain(|(name, _)| name != "MUSTER_CRASH_AT");
                dead.start().ok()?;
            }
            done(self).then_some(())
        });
        revived.with_context(|| {
            let last = self.agents.iter().map(|agent| last_lines(&agent.output(), 25));
            let last = last.collect::<Vec<_>>().join("\n\n");
            format!("{:?} {:?}\n{last}", self.members(), self.intents())
        })
    }

    /// Creates a join ticket, and returns the path of its bundle.
    pub fn ticket(&self, name: &str, more: &[&str]) -> Result<PathBuf> {
        let file = self.testbed.path(&format!("{name}.ticket"));
        let out = ["token", "create", "--cluster", "demo", "--kind", "join", "--out"];
        self.testbed.admin_command(&[&out[..], &[path_text(&file)?], more].concat())?;
        Ok(file)
    }

    /// Creates a ticket, and starts an agent on `host` with it.
    pub fn newcomer(&self, host: usize, env: &[(&str, &str)]) -> Result<AgentProcess> {
        let ticket = self.ticket(&format!("host-{host}"), &[])?;
        let mut agent = self.agent(host, &ticket, env);
        agent.start()?;
        Ok(agent)
    }

    /// Returns `etcdctl` with the client credentials of an application.
    pub fn etcdctl(&self) -> Result<Etcdctl> {
        self.testbed.etcdctl("demo", &self.founders())
    }

    pub fn founders(&self) -> Vec<&TestHost> {
        self.agents.iter().map(|agent| &agent.host).collect()
    }

    /// Returns name and learner flag of each member, by peer URL.
    pub fn members(&self) -> Result<BTreeMap<String, (String, bool)>> {
        let list = self.etcdctl()?.json(&["member", "list"])?;
        let members = list["members"].as_array().context("a list of members")?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let each = members.iter().map(|member| {
            let learner = member["isLearner"].as_bool().unwrap_or(false);
            (text(&member["peerURLs"][0]), (text(&member["name"]), learner))
        });
        Ok(each.collect())
    }

    /// Waits until the cluster has `count` members. `etcdctl` of etcd 3.4 asks one member for its own
    /// list, which may be older than a change that another member has just confirmed.
    pub fn wait_members(&self, count: usize) -> Result<()> {
        poll_slowly(&format!("{count} members"), LIMIT, || {
            (self.members().ok()?.len() == count).then_some(())
        })
        .with_context(|| format!("{:?}", self.members()))
    }

    pub fn is_voter(&self, agent: &AgentProcess) -> bool {
        let members = self.members().unwrap_or_default();
        members.get(&peer_url(agent)).is_some_and(|(name, learner)| !name.is_empty() && !learner)
    }

    /// Waits until `agent`'s host is a voter, and the cluster has `count` members.
    pub fn wait_voter(&self, agent: &AgentProcess, count: usize) -> Result<()> {
        poll_slowly("the newcomer to vote", LIMIT, || {
            let all = self.members().is_ok_and(|members| members.len() == count);
            (all && self.is_voter(agent)).then_some(())
        })
        .with_context(|| {
            format!(
                "members: {:?}\nintents: {:?}\nthe newcomer:\n{}\na founder:\n{}",
                self.members(),
                self.intents(),
                last_lines(&agent.output(), 25),
                last_lines(&self.agents[0].output(), 25)
            )
        })
    }

    pub fn intents(&self) -> Result<Vec<(String, String)>> {
        let list = self.testbed.admin_json(&["intent", "list", "demo", "--all"])?;
        let intents = list["intents"].as_array().context("a list of intents")?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let each = intents.iter().map(|view| (text(&view["intent"]["verb"]), text(&view["state"])));
        Ok(each.collect())
    }

    pub fn wait_intent(&self, verb: &str, state: &str) -> Result<()> {
        self.wait_intents(verb, state, 1)
    }

    /// Waits until exactly `count` intents of this kind are in this state.
    pub fn wait_intents(&self, verb: &str, state: &str, count: usize) -> Result<()> {
        let wanted = (verb.to_owned(), state.to_owned());
        poll_slowly(&format!("{count} {verb} intents to be {state}"), LIMIT, || {
            let found = self.intents().ok()?.into_iter().filter(|intent| *intent == wanted).count();
            (found == count).then_some(())
        })
        .with_context(|| {
            format!("{:?}\n{}", self.intents(), last_lines(&self.agents[0].output(), 25))
        })
    }

    /// Returns the id of an agent's member in hexadecimal, as commands take it.
    pub fn id(&self, agent: &AgentProcess) -> Result<String> {
        let list = self.etcdctl()?.json(&["member", "list"])?;
        let members = list["members"].as_array().context("a list of members")?;
        let own = members.iter().find(|member| member["peerURLs"][0] == peer_url(agent));
        let id = own.and_then(|member| member["ID"].as_u64()).context("a member")?;
        Ok(format!("{id:x}"))
    }

    /// Returns the name of an agent's member.
    pub fn name(&self, agent: &AgentProcess) -> Result<String> {
        Ok(self.members()?.get(&peer_url(agent)).context("a member")?.0.clone())
    }

    /// Gives an operator's order, and waits until it is carried out. By then discovery also knows
    /// every earlier change.
    pub fn order(&self, order: &[&str]) -> Result<()> {
        let done = self.testbed.admin_command(&[&["intent"], order, &["--wait"]].concat());
        done.map(drop).with_context(|| {
            format!("{:?}\n{}", self.intents(), last_lines(&self.agents[0].output(), 25))
        })
    }

    /// Removes an agent's member by an order.
    pub fn remove(&self, agent: &AgentProcess) -> Result<()> {
        self.order(&["remove", "demo", &self.name(agent)?, "--yes"])
    }

    /// Runs `muster-agent member` on an agent's host, and returns its output whatever its exit
    /// code.
    pub fn run_member(&self, agent: &AgentProcess, args: &[&str]) -> Result<Output> {
        let mut command = agent.host.command(program_path("muster-agent")?);
        command.arg("member").args(args).args(["--json", "--data-dir"]).arg(&agent.data_dir);
        Ok(command.output()?)
    }

    /// Runs `muster-agent member` on an agent's host, and returns its JSON output. Fails if the
    /// command fails.
    pub fn run_member_json(&self, agent: &AgentProcess, args: &[&str]) -> Result<Value> {
        let output = self.run_member(agent, args)?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "member {}: {text}", args.join(" "));
        serde_json::from_slice(&output.stdout).with_context(|| args.join(" "))
    }
}

/// Returns the peer URL of an agent's member.
pub fn peer_url(agent: &AgentProcess) -> String {
    format!("https://{}:2380", agent.host.address)
}
