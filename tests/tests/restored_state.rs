//! Restored state: a database from a backup, a data directory on another machine, or a ledger that
//! two processes use. None may form a second cluster, and each must be refused with advice.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::agents::AgentOptions;
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{AgentProcess, ChildProcess, Network, TestHost, Testbed, poll_slowly};

const LIMIT: Duration = Duration::from_secs(60);

fn copy(from: &Path, to: &Path) -> Result<()> {
    let status =
        Command::new("cp").args(["-a", path_text(from)?, path_text(to)?]).status().context("cp")?;
    ensure!(status.success(), "copying {} failed", from.display());
    Ok(())
}

/// Stops discovery and Postgres in order, copies the database, and starts both again.
fn back_up(testbed: &mut Testbed) -> Result<()> {
    testbed.stop_discovery()?;
    copy(&testbed.postgres_dir(), &testbed.path("backup"))?;
    testbed.start_discovery()
}

/// Makes Postgres run an archive recovery, which ends in a new timeline as after a restore.
fn recover_as_a_new_timeline(data: &Path) -> Result<()> {
    let settings = data.join("postgresql.auto.conf");
    let text = fs_err::read_to_string(&settings)? + "restore_command = 'false'\n";
    fs_err::write(&settings, text)?;
    let signal = data.join("recovery.signal");
    fs_err::write(&signal, "")?;
    // Postgres must be able to delete the file, so give it the owner of the data directory.
    let reference = format!("--reference={}", path_text(data)?);
    let status = Command::new("chown").args([&reference, path_text(&signal)?]).status()?;
    ensure!(status.success(), "chown failed");
    Ok(())
}

/// Replaces the database by the copy that `back_up` made.
fn restore(testbed: &mut Testbed) -> Result<()> {
    testbed.stop_discovery()?;
    fs_err::rename(testbed.postgres_dir(), testbed.path("postgres-of-today"))?;
    copy(&testbed.path("backup"), &testbed.postgres_dir())?;
    testbed.start_discovery()
}

fn raft_cluster(testbed: &Testbed, hosts: &[TestHost]) -> Result<u64> {
    let etcdctl = testbed.etcdctl("demo", &hosts.iter().collect::<Vec<_>>())?;
    let answer = poll_slowly("the cluster to take a write", LIMIT, || {
        etcdctl.json(&["put", "k", "v"]).ok()
    })?;
    answer["header"]["cluster_id"].as_u64().context("a cluster id")
}

/// Checks that three hosts without knowledge of the commit can't form a cluster with the bundle
/// after the restore.
fn check_no_second_cluster(testbed: &Testbed, bundle: &Path, identity: u64) -> Result<()> {
    let mut late = testbed.start_agents(3..6, bundle)?;
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
    ensure!(
        raft_cluster(testbed, &testbed.network.hosts[..3])? == identity,
        "another cluster answers"
    );
    Ok(())
}

#[test]
fn a_backup_from_before_the_freeze_forms_no_second_cluster() -> Result<()> {
    let mut testbed = Testbed::start(Network::loopback(6), TestbedOptions::default())?;
    let bundle = testbed.create_cluster_with_token("demo", 3)?;
    let mut agents = testbed.start_agents(0..2, &bundle)?;
    for agent in &mut agents {
        agent.wait_for_output("waiting", LIMIT)?;
    }
    back_up(&mut testbed)?;
    let mut third = testbed.agent(2, &bundle);
    third.start()?;
    agents.push(third);
    testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let identity = raft_cluster(&testbed, &testbed.network.hosts[..3])?;

    restore(&mut testbed)?;
    // The restored database lacks the commit. Discovery finds it in its own ledger, and says so.
    let said = testbed.discovery.as_ref().context("discovery runs")?.output();
    ensure!(said.contains("ledger"), "discovery says nothing of what it found:\n{said}");
    check_no_second_cluster(&testbed, &bundle, identity)
}

#[test]
fn a_backup_from_the_preparation_forms_no_second_cluster() -> Result<()> {
    let options = TestbedOptions {
        serve_args: ["--lease", "20s", "--prepare", "20s", "--sweep", "1s", "--poll", "2s"]
            .map(str::to_owned)
            .to_vec(),
        ..TestbedOptions::default()
    };
    let mut testbed = Testbed::start(Network::loopback(6), options)?;
    let bundle = testbed.create_cluster_with_token("demo", 3)?;
    let mut agents: Vec<AgentProcess> = (0..3).map(|i| testbed.agent(i, &bundle)).collect();
    agents[2].options =
        AgentOptions { env: vec![("MUSTER_CRASH_AT".into(), "ack".into())], ..Default::default() };
    for agent in &mut agents {
        agent.start()?;
    }
    agents[2].exit_code(LIMIT)?;
    testbed.wait_cluster_state("demo", "preparing", LIMIT)?;
    back_up(&mut testbed)?;
    agents[2].options = AgentOptions::default();
    agents[2].start()?;
    testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let identity = raft_cluster(&testbed, &testbed.network.hosts[..3])?;

    restore(&mut testbed)?;
    check_no_second_cluster(&testbed, &bundle, identity)
}

#[test]
fn a_restored_database_whose_ledger_is_gone_freezes_nothing_until_an_owner_decides() -> Result<()> {
    let mut testbed = Testbed::start(Network::loopback(6), TestbedOptions::default())?;
    let bundle = testbed.create_cluster_with_token("demo", 3)?;
    back_up(&mut testbed)?;
    let mut members = testbed.start_agents(0..3, &bundle)?;
    testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let identity = raft_cluster(&testbed, &testbed.network.hosts[..3])?;
    for agent in &mut members {
        ensure!(agent.terminate(LIMIT)? == 0, "{} did not end cleanly", agent.host.name);
    }
    testbed.stop_discovery()?;
    fs_err::rename(testbed.path("discovery-ledger"), testbed.path("ledger-of-today"))?;
    fs_err::rename(testbed.postgres_dir(), testbed.path("postgres-of-today"))?;
    copy(&testbed.path("backup"), &testbed.postgres_dir())?;
    recover_as_a_new_timeline(&testbed.postgres_dir().join("data"))?;
    testbed.start_discovery()?;

    // Three hosts that never saw the commit take all seats. Discovery must not freeze this list of
    // founders.
    let mut late = testbed.start_agents(3..6, &bundle)?;
    let explained = poll_slowly("discovery to say why it waits", LIMIT, || {
        let text = testbed.admin_command(&["cluster", "explain", "demo"]).ok()?;
        text.contains("db accept").then_some(text)
    })?;
    ensure!(explained.contains("process forget"), "`process forget` is not named: {explained}");
    std::thread::sleep(Duration::from_secs(3));
    let shown = testbed.admin_json(&["cluster", "show", "demo"])?;
    ensure!(shown["state"] == "open", "discovery went on without an owner's decision: {shown}");

    testbed.admin_command(&["db", "accept", "--yes"])?;
    for agent in &mut late {
        let code = agent.exit_code(LIMIT)?;
        ensure!(code == 3, "after db accept {} ended with {code}", agent.host.name);
    }

    // The members have kept the commit document that the service has lost. They send it to the
    // service.
    for agent in &mut members {
        agent.start()?;
    }
    testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let now = raft_cluster(&testbed, &testbed.network.hosts[..3])?;
    ensure!(now == identity, "the Raft cluster was {identity:x} and is {now:x}");
    Ok(())
}

/// Runs one of Postgres' own programs.
fn postgres(program: &str, args: &[&str]) -> Result<()> {
    let output = Command::new(program).args(args).output().context(program.to_owned())?;
    ensure!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Two discovery processes on one Postgres. The second process formed a cluster and was killed.
/// Then the database was restored to an earlier dump.
struct RestoredService {
    members: Vec<AgentProcess>,
    /// Agent of a host that never saw the commit, started with the old bundle.
    late: AgentProcess,
    identity: u64,
    /// Declared last and so dropped last, because agents find the nodes to kill by files in the
    /// test bed's folder.
    testbed: Testbed,
}

const SECOND_PROCESS: &str = "discovery-2";

fn restore_without_forming_process() -> Result<RestoredService> {
    let options = TestbedOptions { ports: vec![8443, 8444], ..TestbedOptions::default() };
    let mut testbed = Testbed::prepare(Network::loopback(4), options)?;
    // This process survives, and owns Postgres. Hosts prefer the first address in their bundle,
    // which is the other process's. So this process delivers no commit document.
    let mut survivor = testbed.spawn_discovery("discovery", 8444, None)?;
    survivor.wait_for_output("listening", LIMIT)?;
    testbed.discovery = Some(survivor);
    testbed.wait_ready()?;
    let mut formed_it = start_second(&testbed, 8443)?;
    let bundle = testbed.create_cluster_with_token("demo", 3)?;
    let (url, dump) = (testbed.database_url()?, testbed.path("dump"));
    let dump = path_text(&dump)?;
    postgres("pg_dump", &["--format=custom", "--file", dump, &url])?;

    let members = testbed.start_agents(0..3, &bundle)?;
    testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let identity = raft_cluster(&testbed, &testbed.network.hosts[..3])?;
    formed_it.kill();
    let ledger = fs_err::read_to_string(testbed.path("discovery-ledger").join("ledger.jsonl"))?;
    ensure!(!ledger.contains(r#""kind":"commit""#), "the survivor has the commit, too: {ledger}");

    let server = url.replace(":///muster?", ":///postgres?");
    for sql in ["DROP DATABASE muster WITH (FORCE)", "CREATE DATABASE muster TEMPLATE template0"] {
        postgres("psql", &["-X", "-q", "-c", sql, &server])?;
    }
    postgres("pg_restore", &["--exit-on-error", "--dbname", &url, dump])?;

    let mut late = testbed.agent(3, &bundle);
    late.start()?;
    let explained = poll_slowly("discovery to say why it waits", LIMIT, || {
        let text = testbed.admin_command(&["cluster", "explain", "demo"]).ok()?;
        text.contains("process forget").then_some(text)
    })?;
    for said in ["a dump", "db accept", "Start them"] {
        ensure!(explained.contains(said), "{said:?} is not said: {explained}");
    }
    Ok(RestoredService { members, late, identity, testbed })
}

fn start_second(testbed: &Testbed, port: u16) -> Result<ChildProcess> {
    let url = testbed.database_url()?;
    let mut process = testbed.spawn_discovery(SECOND_PROCESS, port, Some(&url))?;
    process.wait_for_output("listening", LIMIT)?;
    Ok(process)
}

impl RestoredService {
    /// Checks that the late host is refused and starts no node, and that the cluster is the
    /// original one.
    fn ends_as_one_cluster(mut self) -> Result<()> {
        // Restart the agents, so that they report to the service at once. Running agents report
        // within minutes.
        for agent in &mut self.members {
            ensure!(agent.terminate(LIMIT)? == 0, "{}", agent.output());
            agent.start()?;
        }
        self.testbed.wait_cluster_state("demo", "formed", LIMIT)?;
        let code = self.late.exit_code(LIMIT)?;
        ensure!(code == 3, "the late host ended with {code}:\n{}", self.late.output());
        ensure!(!self.late.node_dir().join("member").exists(), "it has started a node");
        let now = raft_cluster(&self.testbed, &self.testbed.network.hosts[..3])?;
        ensure!(now == self.identity, "the Raft cluster was {:x} and is {now:x}", self.identity);
        for agent in &mut self.members {
            ensure!(agent.is_running(), "{} has ended:\n{}", agent.host.name, agent.output());
        }
        Ok(())
    }
}

#[test]
fn a_service_restored_from_a_dump_waits_for_the_process_that_formed_the_cluster() -> Result<()> {
    let restored = restore_without_forming_process()?;
    let _formed_it = start_second(&restored.testbed, 8443)?;
    restored.ends_as_one_cluster()
}

#[test]
fn a_service_restored_from_a_dump_continues_once_the_missing_process_is_forgotten() -> Result<()> {
    let restored = restore_without_forming_process()?;
    let testbed = &restored.testbed;
    let gone = poll_slowly("one process alone to be missing", LIMIT, || {
        let listed = testbed.admin_json(&["process", "list"]).ok()?;
        let processes = listed["processes"].as_array()?.iter();
        let missing: Vec<_> = processes.filter(|process| process["missing"] == true).collect();
        let [gone] = missing[..] else { return None };
        gone["id"].as_str().map(str::to_owned)
    })?;
    // A process can't be forgotten within a minute after it was seen, or after the dump was loaded.
    // So the test moves both times back in the database.
    testbed.psql(&format!(
        "UPDATE processes SET last_seen_us = last_seen_us - 61000000 WHERE id = '{gone}';
         UPDATE generation SET changed_us = changed_us - 61000000"
    ))?;
    testbed.admin_command(&["process", "forget", &gone, "--yes"])?;
    restored.ends_as_one_cluster()
}

#[test]
fn a_process_on_a_copy_of_another_ledger_ends_and_says_why() -> Result<()> {
    let mut testbed = Testbed::start(Network::loopback(1), TestbedOptions::default())?;
    testbed.create_cluster_with_token("demo", 3)?;
    testbed.stop_discovery()?;
    copy(&testbed.path("discovery-ledger"), &testbed.path(&format!("{SECOND_PROCESS}-ledger")))?;
    testbed.start_discovery()?;
    let mut second = start_second(&testbed, 8444)?;
    let code = second.exit_code(LIMIT)?;
    ensure!(code == 3, "it ended with {code}:\n{}", second.output());
    for said in ["two processes use copies of one ledger", "an empty --ledger of its own"] {
        ensure!(second.output().contains(said), "{said:?} is not said:\n{}", second.output());
    }
    // Wait until the first process has looked at the database several times. It must keep running.
    std::thread::sleep(Duration::from_secs(4));
    let first = testbed.discovery.as_mut().context("discovery runs")?;
    ensure!(first.is_running(), "both ended:\n{}", first.output());
    testbed.wait_cluster_state("demo", "open", LIMIT)?;
    Ok(())
}

#[test]
fn a_data_directory_copied_to_another_machine_is_refused() -> Result<()> {
    let testbed = Testbed::start(Network::loopback(2), TestbedOptions::default())?;
    let bundle = testbed.create_cluster_with_token("demo", 1)?;
    let machine = |name: &str, id: &str| -> Result<AgentOptions> {
        let file = testbed.path(name);
        fs_err::write(&file, id)?;
        let args = vec!["--machine-id-file".to_owned(), path_text(&file)?.to_owned()];
        Ok(AgentOptions { args, ..AgentOptions::default() })
    };
    let first = machine("machine-1", "11111111111111111111111111111111\n")?;
    let second = machine("machine-2", "22222222222222222222222222222222\n")?;
    let mut original = testbed.agent_with(0, &bundle, first);
    original.start()?;
    testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    ensure!(original.terminate(LIMIT)? == 0, "{}", original.output());

    let mut copied = testbed.agent_with(1, &bundle, second);
    copy(&original.data_dir, &copied.data_dir)?;
    copied.start()?;
    let code = copied.exit_code(LIMIT)?;
    ensure!(code == 3, "the copy ended with {code}: {}", copied.output());
    ensure!(copied.output().contains("machine"), "no reason is told: {}", copied.output());

    original.start()?;
    raft_cluster(&testbed, &testbed.network.hosts[..1])?;
    Ok(())
}
