//! What comes back from the past (a database from a backup, a data directory on another machine)
//! forms no second cluster, and is told what to do.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::agents::AgentOptions;
use muster_tests::harness::world::{WorldOptions, path_text};
use muster_tests::harness::{Agent, Host, Network, World, until, until_told};

const LIMIT: Duration = Duration::from_secs(60);

fn copy(from: &Path, to: &Path) -> Result<()> {
    let status =
        Command::new("cp").args(["-a", path_text(from)?, path_text(to)?]).status().context("cp")?;
    ensure!(status.success(), "copying {} failed", from.display());
    Ok(())
}

/// Stops discovery and Postgres in order, keeps a copy of the database, starts both again.
fn back_up(world: &mut World) -> Result<()> {
    world.stop_discovery()?;
    copy(&world.postgres_dir(), &world.path("backup"))?;
    world.start_discovery()
}

/// Makes Postgres recover as from an archive, which ends in a new timeline: what a restore does.
fn recover_as_a_new_timeline(data: &Path) -> Result<()> {
    let settings = data.join("postgresql.auto.conf");
    let text = fs_err::read_to_string(&settings)? + "restore_command = 'false'\n";
    fs_err::write(&settings, text)?;
    let signal = data.join("recovery.signal");
    fs_err::write(&signal, "")?;
    // Postgres runs as whoever owns its data.
    let reference = format!("--reference={}", path_text(data)?);
    let status = Command::new("chown").args([&reference, path_text(&signal)?]).status()?;
    ensure!(status.success(), "chown failed");
    Ok(())
}

/// Puts the kept copy in the place of the database.
fn restore(world: &mut World) -> Result<()> {
    world.stop_discovery()?;
    fs_err::rename(world.postgres_dir(), world.path("postgres-of-today"))?;
    copy(&world.path("backup"), &world.postgres_dir())?;
    world.start_discovery()
}

fn raft_cluster(world: &World, hosts: &[Host]) -> Result<u64> {
    let etcdctl = world.etcdctl("demo", &hosts.iter().collect::<Vec<_>>())?;
    let answer =
        until("the cluster to take a write", LIMIT, || etcdctl.json(&["put", "k", "v"]).ok())?;
    answer["header"]["cluster_id"].as_u64().context("a cluster id")
}

/// After the restore, three hosts that never saw the commit try with the same bundle.
fn nobody_else_forms_it(world: &World, bundle: &Path, identity: u64) -> Result<()> {
    let mut late = world.start_agents(3..6, bundle)?;
    for agent in &mut late {
        let code = agent
            .exit_code(LIMIT)
            .with_context(|| format!("{} still tries:\n{}", agent.host.name, agent.output()))?;
        ensure!(code == 3, "{} ended with {code}:\n{}", agent.host.name, agent.output());
        ensure!(
            !agent.node_dir().join("member").exists(),
            "{} has started a node",
            agent.host.name
        );
    }
    ensure!(raft_cluster(world, &world.network.hosts[..3])? == identity, "another cluster answers");
    Ok(())
}

#[test]
fn a_backup_from_before_the_freeze_forms_no_second_cluster() -> Result<()> {
    let mut world = World::start(Network::loopback(6), WorldOptions::default())?;
    let bundle = world.order("demo", 3)?;
    let mut agents = world.start_agents(0..2, &bundle)?;
    for agent in &mut agents {
        agent.wait_for_output("waiting", LIMIT)?;
    }
    back_up(&mut world)?;
    let mut third = world.agent(2, &bundle);
    third.start()?;
    agents.push(third);
    world.wait_cluster_state("demo", "formed", LIMIT)?;
    let identity = raft_cluster(&world, &world.network.hosts[..3])?;

    restore(&mut world)?;
    // The process's own ledger has the commit that the database has forgotten.
    let said = world.discovery.as_ref().context("discovery runs")?.output();
    ensure!(said.contains("ledger"), "discovery says nothing of what it found:\n{said}");
    nobody_else_forms_it(&world, &bundle, identity)
}

#[test]
fn a_backup_from_the_preparation_forms_no_second_cluster() -> Result<()> {
    let options = WorldOptions {
        serve_args: ["--lease", "20s", "--prepare", "20s", "--sweep", "1s", "--poll", "2s"]
            .map(str::to_owned)
            .to_vec(),
        ..WorldOptions::default()
    };
    let mut world = World::start(Network::loopback(6), options)?;
    let bundle = world.order("demo", 3)?;
    let mut agents: Vec<Agent> = (0..3).map(|i| world.agent(i, &bundle)).collect();
    agents[2].options =
        AgentOptions { env: vec![("MUSTER_CRASH_AT".into(), "ack".into())], ..Default::default() };
    for agent in &mut agents {
        agent.start()?;
    }
    agents[2].exit_code(LIMIT)?;
    world.wait_cluster_state("demo", "preparing", LIMIT)?;
    back_up(&mut world)?;
    agents[2].options = AgentOptions::default();
    agents[2].start()?;
    world.wait_cluster_state("demo", "formed", LIMIT)?;
    let identity = raft_cluster(&world, &world.network.hosts[..3])?;

    restore(&mut world)?;
    nobody_else_forms_it(&world, &bundle, identity)
}

#[test]
fn a_restored_database_whose_ledger_is_gone_freezes_nothing_until_an_owner_decides() -> Result<()> {
    let mut world = World::start(Network::loopback(6), WorldOptions::default())?;
    let bundle = world.order("demo", 3)?;
    back_up(&mut world)?;
    let mut members = world.start_agents(0..3, &bundle)?;
    world.wait_cluster_state("demo", "formed", LIMIT)?;
    let identity = raft_cluster(&world, &world.network.hosts[..3])?;
    for agent in &mut members {
        ensure!(agent.terminate(LIMIT)? == 0, "{} did not end cleanly", agent.host.name);
    }
    world.stop_discovery()?;
    fs_err::rename(world.path("discovery-ledger"), world.path("ledger-of-today"))?;
    fs_err::rename(world.postgres_dir(), world.path("postgres-of-today"))?;
    copy(&world.path("backup"), &world.postgres_dir())?;
    recover_as_a_new_timeline(&world.postgres_dir().join("data"))?;
    world.start_discovery()?;

    // Three hosts that never saw the commit: a full list, and yet nothing may be frozen.
    let mut late = world.start_agents(3..6, &bundle)?;
    let explained = until_told("discovery to say why it waits", LIMIT, || {
        let text = world.admin_command(&["cluster", "explain", "demo"]).ok()?;
        text.contains("db accept").then_some(text)
    })?;
    ensure!(explained.contains("process forget"), "the other way out is not told: {explained}");
    std::thread::sleep(Duration::from_secs(3));
    let shown = world.admin_json(&["cluster", "show", "demo"])?;
    ensure!(shown["state"] == "open", "it went on without an owner: {shown}");

    world.admin_command(&["db", "accept", "--yes"])?;
    for agent in &mut late {
        let code = agent.exit_code(LIMIT)?;
        ensure!(code == 3, "after db accept {} ended with {code}", agent.host.name);
    }

    // The members hold the document that the service has lost, and show it.
    for agent in &mut members {
        agent.start()?;
    }
    world.wait_cluster_state("demo", "formed", LIMIT)?;
    let now = raft_cluster(&world, &world.network.hosts[..3])?;
    ensure!(now == identity, "the Raft cluster was {identity:x} and is {now:x}");
    Ok(())
}

#[test]
fn a_data_directory_copied_to_another_machine_is_refused() -> Result<()> {
    let world = World::start(Network::loopback(2), WorldOptions::default())?;
    let bundle = world.order("demo", 1)?;
    let machine = |name: &str, id: &str| -> Result<AgentOptions> {
        let file = world.path(name);
        fs_err::write(&file, id)?;
        let args = vec!["--machine-id-file".to_owned(), path_text(&file)?.to_owned()];
        Ok(AgentOptions { args, ..AgentOptions::default() })
    };
    let first = machine("machine-1", "11111111111111111111111111111111\n")?;
    let second = machine("machine-2", "22222222222222222222222222222222\n")?;
    let mut original = world.agent_with(0, &bundle, first);
    original.start()?;
    world.wait_cluster_state("demo", "formed", LIMIT)?;
    ensure!(original.terminate(LIMIT)? == 0, "{}", original.output());

    let mut copied = world.agent_with(1, &bundle, second);
    copy(&original.data_dir, &copied.data_dir)?;
    copied.start()?;
    let code = copied.exit_code(LIMIT)?;
    ensure!(code == 3, "the copy ended with {code}: {}", copied.output());
    ensure!(copied.output().contains("machine"), "no reason is told: {}", copied.output());

    original.start()?;
    raft_cluster(&world, &world.network.hosts[..1])?;
    Ok(())
}
