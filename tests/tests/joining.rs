//! Joining a cluster that runs, by ticket, end to end: whoever is killed, whenever, the host is a
//! member once, or isn't and knows why.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::agents::AgentOptions;
use muster_tests::harness::process::tail;
use muster_tests::harness::world::{WorldOptions, path_text};
use muster_tests::harness::{Agent, Host, Network, World, skip, until, until_told};
use muster_tests::stock;
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);

/// A cluster that runs, its agents, and what they are started with.
struct Running {
    /// Before the world, which is dropped after them: an agent finds its node by a file in there.
    agents: Vec<Agent>,
    world: World,
    args: Vec<String>,
}

impl Running {
    fn start(network: Network, size: usize, node: Option<&Path>) -> Result<Self> {
        let world = World::start(network, WorldOptions::default())?;
        let args = match node {
            Some(node) => vec!["--node-binary".to_owned(), path_text(node)?.to_owned()],
            None => Vec::new(),
        };
        let bundle = world.order("demo", size)?;
        let mut running = Self { world, agents: Vec::new(), args };
        for host in 0..size {
            let mut agent = running.agent(host, &bundle, &[]);
            agent.start()?;
            running.agents.push(agent);
        }
        running.world.wait_cluster_state("demo", "formed", LIMIT)?;
        Ok(running)
    }

    fn agent(&self, host: usize, bundle: &Path, env: &[(&str, &str)]) -> Agent {
        let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let options =
            AgentOptions { args: self.args.clone(), env: env.collect(), ..AgentOptions::default() };
        self.world.agent_with(host, bundle, options)
    }

    /// Starts the founders' agents again, beside their nodes, in another environment.
    fn restart_agents(&mut self, env: (&str, &str)) -> Result<()> {
        for agent in &mut self.agents {
            agent.kill();
            agent.options.env = vec![(env.0.to_owned(), env.1.to_owned())];
            agent.start()?;
        }
        Ok(())
    }

    /// A join ticket; the file with its bundle.
    fn ticket(&self, name: &str, more: &[&str]) -> Result<PathBuf> {
        let file = self.world.path(&format!("{name}.ticket"));
        let out = ["token", "create", "--cluster", "demo", "--kind", "join", "--out"];
        self.world.admin_command(&[&out[..], &[path_text(&file)?], more].concat())?;
        Ok(file)
    }

    /// A host that joins, or tries to.
    fn newcomer(&self, host: usize, env: &[(&str, &str)]) -> Result<Agent> {
        let ticket = self.ticket(&format!("host-{host}"), &[])?;
        let mut agent = self.agent(host, &ticket, env);
        agent.start()?;
        Ok(agent)
    }

    fn founders(&self) -> Vec<&Host> {
        self.agents.iter().map(|agent| &agent.host).collect()
    }

    /// Members by peer URL: name, and whether it is a learner.
    fn members(&self) -> Result<BTreeMap<String, (String, bool)>> {
        let list = self.world.etcdctl("demo", &self.founders())?.json(&["member", "list"])?;
        let members = list["members"].as_array().context("a list of members")?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let each = members.iter().map(|member| {
            let learner = member["isLearner"].as_bool().unwrap_or(false);
            (text(&member["peerURLs"][0]), (text(&member["name"]), learner))
        });
        Ok(each.collect())
    }

    fn votes(&self, agent: &Agent) -> bool {
        let members = self.members().unwrap_or_default();
        members.get(&peer_url(agent)).is_some_and(|(name, learner)| !name.is_empty() && !learner)
    }

    /// Waits until `agent`'s host is a voter, and the cluster has `count` members.
    fn wait_voter(&self, agent: &Agent, count: usize) -> Result<()> {
        until_told("the newcomer to vote", LIMIT, || {
            let all = self.members().is_ok_and(|members| members.len() == count);
            (all && self.votes(agent)).then_some(())
        })
        .with_context(|| {
            format!(
                "members: {:?}\nintents: {:?}\nthe newcomer:\n{}\na founder:\n{}",
                self.members(),
                self.intents(),
                tail(&agent.output(), 25),
                tail(&self.agents[0].output(), 25)
            )
        })
    }

    fn intents(&self) -> Result<Vec<(String, String)>> {
        let list = self.world.admin_json(&["intent", "list", "demo", "--all"])?;
        let intents = list["intents"].as_array().context("a list of intents")?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let each = intents.iter().map(|view| (text(&view["intent"]["verb"]), text(&view["state"])));
        Ok(each.collect())
    }

    fn wait_intent(&self, verb: &str, state: &str) -> Result<()> {
        until_told(&format!("a {verb} to be {state}"), LIMIT, || {
            let intents = self.intents().ok()?;
            intents.contains(&(verb.to_owned(), state.to_owned())).then_some(())
        })
        .with_context(|| format!("{:?}\n{}", self.intents(), tail(&self.agents[0].output(), 25)))
    }

    /// By an operator's order, as soon as discovery knows the member.
    fn remove(&self, agent: &Agent) -> Result<()> {
        let name = self.members()?.get(&peer_url(agent)).context("a member")?.0.clone();
        let mut said = String::new();
        until_told("the order to be carried out", LIMIT, || {
            let order = ["intent", "remove", "demo", &name, "--wait"];
            let output = self.world.admin_output(&order).ok()?;
            said = String::from_utf8_lossy(&output.stderr).into_owned();
            output.status.success().then_some(())
        })
        .with_context(|| format!("{said}\n{:?}", self.intents()))
    }
}

fn peer_url(agent: &Agent) -> String {
    format!("https://{}:2380", agent.host.address)
}

fn joins_and_leaves(network: Network, node: Option<&Path>) -> Result<()> {
    let running = Running::start(network, 3, node)?;
    let mut newcomer = running.newcomer(3, &[])?;
    running.wait_voter(&newcomer, 4)?;
    running.wait_intent("join", "promoted")?;
    let etcdctl = running.world.etcdctl("demo", &running.founders())?;
    etcdctl.run(&["put", "k", "v"])?;
    let own = etcdctl.only(&newcomer.host);
    ensure!(own.run(&["get", "k", "--print-value-only"])?.trim() == "v");
    // Who may sign what, where discovery can't withhold it.
    let statements = etcdctl.run(&["get", "muster/v1/statements", "--print-value-only"])?;
    ensure!(statements.starts_with("[\"ey"), "{statements}");

    // It restarts without anybody's help, as any member does.
    ensure!(newcomer.terminate(LIMIT)? == 0, "{}", newcomer.output());
    newcomer.start()?;
    until("the newcomer to serve again", LIMIT, || own.run(&["get", "k"]).ok())?;

    running.remove(&newcomer)?;
    let code = newcomer.exit_code(LIMIT)?;
    ensure!(code == 3, "the removed host's agent ended with {code}: {}", newcomer.output());
    ensure!(running.members()?.len() == 3);
    // Neither by itself nor with another ticket, over its tombstone.
    newcomer.start()?;
    ensure!(newcomer.exit_code(LIMIT)? == 3, "{}", newcomer.output());
    let mut again = running.agent(3, &running.ticket("again", &[])?, &[]);
    again.start()?;
    ensure!(again.exit_code(LIMIT)? == 3, "{}", again.output());
    ensure!(running.members()?.len() == 3);
    Ok(())
}

#[test]
fn a_fourth_host_joins_and_is_removed_for_good() -> Result<()> {
    joins_and_leaves(Network::loopback(4), None)
}

#[test]
fn a_fourth_host_joins_from_a_machine_of_its_own() -> Result<()> {
    match Network::namespaces(4) {
        Ok(network) => joins_and_leaves(network, None),
        Err(error) => {
            skip::skipped(format_args!("no network namespaces here: {error:#}"));
            Ok(())
        }
    }
}

#[test]
fn a_fourth_host_joins_etcd_3_4() -> Result<()> {
    let Some(etcd) = stock::oldest() else { return Ok(()) };
    joins_and_leaves(Network::loopback(4), Some(&etcd))
}

#[test]
fn a_fourth_host_joins_the_newest_etcd() -> Result<()> {
    let Some(etcd) = stock::newest(Path::new(env!("CARGO_TARGET_TMPDIR"))) else { return Ok(()) };
    joins_and_leaves(Network::loopback(4), Some(&etcd))
}

#[test]
fn discovery_and_postgres_killed_in_the_middle_cost_time_and_nothing_else() -> Result<()> {
    let mut running = Running::start(Network::loopback(4), 3, None)?;
    // Nobody is there to act: the newcomer redeems its ticket and waits.
    running.agents.iter_mut().for_each(Agent::kill);
    let mut newcomer = running.newcomer(3, &[])?;
    newcomer.wait_for_output("waiting for the cluster to add this host", LIMIT)?;
    running.world.kill_discovery();
    for agent in &mut running.agents {
        agent.start()?;
    }
    newcomer.wait_for_output("waiting for discovery", LIMIT)?;
    running.world.start_discovery()?;
    running.wait_voter(&newcomer, 4)
}

#[test]
fn a_ticket_is_one_hosts_and_a_wiped_host_is_another_one() -> Result<()> {
    let running = Running::start(Network::loopback(3), 1, None)?;
    let ticket = running.ticket("one", &[])?;
    let mut first = running.agent(1, &ticket, &[]);
    first.start()?;
    running.wait_voter(&first, 2)?;
    let mut second = running.agent(2, &ticket, &[]);
    second.start()?;
    ensure!(second.exit_code(LIMIT)? == 3, "{}", second.output());
    ensure!(second.output().contains("redeemed by another key"), "{}", second.output());

    // The node's disk is lost: its agent asks for a person, and begins nothing.
    first.terminate(LIMIT)?;
    fs_err::rename(first.node_dir(), first.data_dir.join("lost"))?;
    first.start()?;
    until("a replacement to be asked for", LIMIT, || {
        first.status().ok().filter(|status| status["phase"] == "replacement_wanted")
    })?;
    first.terminate(LIMIT)?;
    // All of it is lost: it comes back under its old name and address, with the bundle that it had.
    fs_err::remove_dir_all(&first.data_dir)?;
    first.start()?;
    ensure!(first.exit_code(LIMIT)? == 3, "{}", first.output());
    Ok(())
}

#[test]
fn a_newcomer_that_makes_no_progress_is_taken_out_again() -> Result<()> {
    let mut running = Running::start(Network::loopback(4), 3, None)?;
    running.restart_agents(("MUSTER_STALLED_AFTER", "3"))?;
    let mut newcomer = running.newcomer(3, &[("MUSTER_CRASH_AT", "added")])?;
    newcomer.exit_code(LIMIT)?;
    running.wait_intent("join", "stalled")?;
    ensure!(running.members()?.len() == 3, "{:?}", running.members());
    newcomer.options.env.clear();
    newcomer.start()?;
    ensure!(newcomer.exit_code(LIMIT)? == 3, "{}", newcomer.output());
    let said = newcomer.output();
    ensure!(said.contains("was taken out of the cluster again"), "{said}");
    Ok(())
}

#[test]
fn a_newcomer_comes_in_anothers_place() -> Result<()> {
    let mut running = Running::start(Network::loopback(4), 3, None)?;
    let dead = running.agents.pop().context("a third agent")?;
    let name = running.members()?.get(&peer_url(&dead)).context("a member")?.0.clone();
    drop(dead);
    let ticket = until("discovery to know the members", LIMIT, || {
        running.ticket("replacement", &["--replace", &name]).ok()
    })?;
    let mut newcomer = running.agent(3, &ticket, &[]);
    newcomer.start()?;
    running.wait_voter(&newcomer, 3)?;
    running.wait_intent("replace", "promoted")
}
