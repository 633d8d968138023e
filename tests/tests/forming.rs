//! The bootstrap, end to end: whoever is killed, whenever, the same cluster forms, once, with the
//! same bundle.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::agents::AgentOptions;
use muster_tests::harness::process::{exists, signal};
use muster_tests::harness::world::WorldOptions;
use muster_tests::harness::{Agent, Host, Network, World, until, until_told};
use rustix::process::Signal;

const FORMED: Duration = Duration::from_secs(60);

fn world(hosts: u8) -> Result<World> {
    World::start(Network::loopback(hosts), WorldOptions::default())
}

fn crashing_at(step: &str) -> AgentOptions {
    AgentOptions {
        env: vec![("MUSTER_CRASH_AT".to_owned(), step.to_owned())],
        ..AgentOptions::default()
    }
}

/// The members as the cluster itself lists them, and that it takes a write.
fn member_names(world: &World, cluster: &str, agents: &[&Agent]) -> Result<Vec<String>> {
    let hosts: Vec<&Host> = agents.iter().map(|a| &a.host).collect();
    let etcdctl = world.etcdctl(cluster, &hosts)?;
    until("the cluster to take a write", FORMED, || {
        etcdctl.output(&["put", "k", "v"]).ok().filter(|o| o.status.success())
    })?;
    let list = etcdctl.json(&["member", "list"])?;
    let members = list["members"].as_array().context("a list of members")?;
    Ok(members.iter().map(|m| m["name"].as_str().unwrap_or_default().to_owned()).collect())
}

/// Starts the agents again and again until the cluster is formed: what an init system does.
fn keep_running(world: &World, cluster: &str, agents: &mut [Agent]) -> Result<serde_json::Value> {
    until_told(&format!("{cluster} to form under a supervisor"), FORMED, || {
        for agent in agents.iter_mut().filter(|a| a.process_id().is_some()) {
            if !agent.is_running() {
                agent.start().ok()?;
            }
        }
        let shown = world.admin_json(&["cluster", "show", cluster]).ok()?;
        (shown["state"] == "formed").then_some(shown)
    })
    .with_context(|| world.admin_command(&["cluster", "explain", cluster]).unwrap_or_default())
    .with_context(|| {
        agents
            .iter()
            .map(|a| muster_tests::harness::process::tail(&a.output(), 12))
            .collect::<Vec<_>>()
            .join("\n--\n")
    })
}

#[test]
fn three_hosts_become_one_cluster() -> Result<()> {
    let world = world(3)?;
    world.create_cluster("demo", 3, &[])?;
    let bundle = world.create_token("demo")?;
    let agents = world.start_agents(3, &bundle)?;
    world.wait_cluster_state("demo", "formed", FORMED)?;
    let names = member_names(&world, "demo", &agents.iter().collect::<Vec<_>>())?;
    ensure!(names.len() == 3, "members: {names:?}");
    Ok(())
}

#[test]
fn an_agent_killed_at_any_step_converges_to_the_same_seat() -> Result<()> {
    let steps = [
        "key",
        "redeem",
        "ack",
        "ack-sent",
        "hold",
        "marker",
        "launching",
        "launcher",
        "exec",
        "ran",
    ];
    let world = world(3)?;
    for step in steps {
        let cluster = format!("at-{step}");
        world.create_cluster(&cluster, 3, &[])?;
        let bundle = world.create_token(&cluster)?;
        let mut agents = fresh_agents(&world, &cluster, 3, &bundle);
        agents[0].options = crashing_at(step);
        for agent in &mut agents {
            agent.start()?;
        }
        let code = agents[0].exit_code(FORMED).with_context(|| format!("crash at {step}"))?;
        // The launcher is a process of its own: it dies each time, and the agent gives up.
        let expected = if step == "launcher" { 1 } else { 128 + 9 };
        ensure!(code == expected, "killed at {step}, the agent ended with {code}");
        agents[0].options = AgentOptions::default();
        agents[0].start()?;
        keep_running(&world, &cluster, &mut agents).with_context(|| format!("killed at {step}"))?;
        let names = member_names(&world, &cluster, &agents.iter().collect::<Vec<_>>())?;
        ensure!(names.len() == 3, "killed at {step}, members: {names:?}");
    }
    Ok(())
}

#[test]
fn discovery_killed_at_any_step_forms_the_same_cluster() -> Result<()> {
    let steps = [
        "before-seated",
        "after-seated",
        "before-frozen",
        "after-frozen",
        "before-acked",
        "after-acked",
        "before-commit",
        "after-commit",
        "before-ledger",
        "after-ledger",
        "after-reported",
    ];
    for step in steps {
        let mut world = World::prepare(Network::loopback(3), WorldOptions::default())?;
        world.options.serve_env = vec![("MUSTER_CRASH_AT".to_owned(), step.to_owned())];
        world.start_discovery()?;
        world.create_cluster("demo", 3, &[])?;
        let bundle = world.create_token("demo")?;
        let mut agents = world.start_agents(3, &bundle)?;
        let process = world.discovery.as_mut().context("discovery runs")?;
        let code = process.exit_code(FORMED).with_context(|| format!("crash at {step}"))?;
        ensure!(code == 128 + 9, "killed at {step}, discovery ended with {code}");
        world.options.serve_env.clear();
        world.start_discovery()?;
        keep_running(&world, "demo", &mut agents).with_context(|| format!("killed at {step}"))?;
        let names = member_names(&world, "demo", &agents.iter().collect::<Vec<_>>())?;
        ensure!(names.len() == 3, "killed at {step}, members: {names:?}");
    }
    Ok(())
}

#[test]
fn postgres_killed_while_agents_wait_and_after_the_commit() -> Result<()> {
    let world = world(3)?;
    world.create_cluster("demo", 3, &[])?;
    let bundle = world.create_token("demo")?;
    let mut agents =
        vec![world.agent(0, &bundle), world.agent(1, &bundle), world.agent(2, &bundle)];
    agents[0].start()?;
    agents[0].wait_for_output("waiting", FORMED)?;
    kill_postgres(&world)?;
    agents[1].start()?;
    agents[2].start()?;
    world
        .wait_cluster_state("demo", "committed", FORMED)
        .or_else(|_| world.wait_cluster_state("demo", "formed", FORMED))?;
    kill_postgres(&world)?;
    keep_running(&world, "demo", &mut agents)?;
    let names = member_names(&world, "demo", &agents.iter().collect::<Vec<_>>())?;
    ensure!(names.len() == 3, "members: {names:?}");
    Ok(())
}

#[test]
fn of_four_hosts_three_are_members_and_one_is_told_why_not() -> Result<()> {
    let world = world(4)?;
    world.create_cluster("demo", 3, &[])?;
    let bundle = world.create_token("demo")?;
    let mut agents = world.start_agents(4, &bundle)?;
    world.wait_cluster_state("demo", "formed", FORMED)?;
    let standby = until("the standby to be sent away", FORMED, || {
        agents.iter_mut().position(|a| !a.is_running())
    })?;
    let code = agents[standby].exit_code(FORMED)?;
    ensure!(code == 3, "the standby ended with {code}: {}", agents[standby].output());
    let others: Vec<&Agent> =
        agents.iter().enumerate().filter(|(i, _)| *i != standby).map(|(_, a)| a).collect();
    let names = member_names(&world, "demo", &others)?;
    ensure!(names.len() == 3, "members: {names:?}");
    Ok(())
}

#[test]
fn the_seat_of_a_host_that_dies_goes_to_the_standby() -> Result<()> {
    let world = world(4)?;
    world.create_cluster("demo", 3, &[])?;
    let bundle = world.create_token("demo")?;
    let mut dying = world.agent(0, &bundle);
    dying.start()?;
    dying.wait_for_output("waiting", FORMED)?;
    dying.kill();
    let mut agents = Vec::new();
    for index in 1..4 {
        let mut agent = world.agent(index, &bundle);
        agent.start()?;
        agents.push(agent);
    }
    world.wait_cluster_state("demo", "formed", FORMED)?;
    let names = member_names(&world, "demo", &agents.iter().collect::<Vec<_>>())?;
    ensure!(names.len() == 3, "members: {names:?}");
    dying.start()?;
    let code = dying.exit_code(FORMED)?;
    ensure!(code == 3, "the late host ended with {code}");
    Ok(())
}

#[test]
fn a_host_that_nobody_can_reach_loses_its_seat_to_the_standby() -> Result<()> {
    let world = world(4)?;
    world.create_cluster("demo", 3, &[])?;
    let bundle = world.create_token("demo")?;
    // It listens where it says it does not: as behind a firewall that lets nothing in.
    let elsewhere = world.network.hosts[3].address;
    let mut unreachable = world.agent_with(
        0,
        &bundle,
        AgentOptions {
            args: vec!["--listen-address".to_owned(), loopback_beside(elsewhere)],
            ..AgentOptions::default()
        },
    );
    unreachable.start()?;
    unreachable.wait_for_output("waiting", FORMED)?;
    let mut agents = Vec::new();
    for index in 1..4 {
        let mut agent = world.agent(index, &bundle);
        agent.start()?;
        agents.push(agent);
    }
    world.wait_cluster_state("demo", "formed", Duration::from_secs(90))?;
    let names = member_names(&world, "demo", &agents.iter().collect::<Vec<_>>())?;
    ensure!(names.len() == 3, "members: {names:?}");
    Ok(())
}

#[test]
fn two_discovery_processes_on_one_postgres_serve_one_formation() -> Result<()> {
    let options = WorldOptions { ports: vec![8443, 8444], ..WorldOptions::default() };
    let world = World::start(Network::loopback(3), options)?;
    let url = world.database_url()?;
    let mut other = world.spawn_discovery("discovery-2", 8444, Some(&url))?;
    other.wait_for_output("listening", FORMED)?;
    world.create_cluster("demo", 3, &[])?;
    let bundle = world.create_token("demo")?;
    let text = fs_err::read_to_string(&bundle)?;
    ensure!(text.contains(":8444"), "the bundle names both: {text}");
    let agents = world.start_agents(3, &bundle)?;
    world.wait_cluster_state("demo", "formed", FORMED)?;
    let names = member_names(&world, "demo", &agents.iter().collect::<Vec<_>>())?;
    ensure!(names.len() == 3, "members: {names:?}");
    Ok(())
}

#[test]
fn an_agent_restarted_adopts_the_running_node() -> Result<()> {
    let world = world(1)?;
    world.create_cluster("solo", 1, &[])?;
    let bundle = world.create_token("solo")?;
    let mut agents = world.start_agents(1, &bundle)?;
    world.wait_cluster_state("solo", "formed", FORMED)?;
    let node = agents[0].node_pid().context("the node runs")?;
    agents[0].kill();
    std::thread::sleep(Duration::from_millis(300));
    ensure!(exists(node), "the node died with its agent");
    agents[0].start()?;
    agents[0].wait_for_output("adopt", FORMED)?;
    ensure!(agents[0].node_pid() == Some(node), "the agent replaced a running node");
    let code = agents[0].terminate(FORMED)?;
    ensure!(code == 0, "the agent ended with {code}");
    ensure!(!exists(node), "the adopted node outlived a clean stop");
    Ok(())
}

#[test]
fn a_formed_cluster_restarts_without_discovery() -> Result<()> {
    let mut world = world(3)?;
    world.create_cluster("demo", 3, &[])?;
    let bundle = world.create_token("demo")?;
    let mut agents = world.start_agents(3, &bundle)?;
    world.wait_cluster_state("demo", "formed", FORMED)?;
    let hosts: Vec<Host> = world.network.hosts.clone();
    let etcdctl = world.etcdctl("demo", &hosts.iter().collect::<Vec<_>>())?;
    etcdctl.run(&["put", "before", "the night"])?;
    world.kill_discovery();
    for agent in &mut agents {
        ensure!(agent.terminate(FORMED)? == 0, "{}", agent.output());
    }
    for agent in &mut agents {
        agent.start()?;
    }
    let read = until("the cluster to come back without discovery", FORMED, || {
        etcdctl.run(&["get", "before", "--print-value-only"]).ok()
    })?;
    ensure!(read.trim() == "the night", "read {read:?}");
    Ok(())
}

fn fresh_agents(world: &World, cluster: &str, count: usize, bundle: &Path) -> Vec<Agent> {
    (0..count)
        .map(|i| {
            let mut agent = world.agent(i, bundle);
            agent.data_dir = world.path(&format!("{cluster}-{i}"));
            agent
        })
        .collect()
}

fn kill_postgres(world: &World) -> Result<()> {
    let pid = world.postmaster_pid()?;
    signal(pid, Signal::KILL);
    until("Postgres to be gone", Duration::from_secs(10), || (!exists(pid)).then_some(()))?;
    world.wait_ready()
}

fn loopback_beside(address: std::net::IpAddr) -> String {
    match address {
        std::net::IpAddr::V4(v4) => {
            let [a, b, c, d] = v4.octets();
            format!("{a}.{b}.{c}.{}", d + 100)
        }
        std::net::IpAddr::V6(_) => "::1".to_owned(),
    }
}
