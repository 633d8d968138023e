//! The bootstrap end to end. A process is killed at each step in turn, and the same bundle must
//! still form one cluster, and no second one.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::agents::AgentOptions;
use muster_tests::harness::process::{is_alive, send_signal};
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{AgentProcess, Network, TestHost, Testbed, poll_slowly, wait_for};
use rustix::process::Signal;

const FORMATION_LIMIT: Duration = Duration::from_secs(60);

fn testbed(hosts: u8) -> Result<Testbed> {
    Testbed::start(Network::loopback(hosts), TestbedOptions::default())
}

fn crashing_at(step: &str) -> AgentOptions {
    AgentOptions {
        env: vec![("MUSTER_CRASH_AT".to_owned(), step.to_owned())],
        ..AgentOptions::default()
    }
}

/// Checks that `cluster` accepts a write, and lists three started members with different names.
fn check_three_members<'a>(
    testbed: &Testbed,
    cluster: &str,
    agents: impl IntoIterator<Item = &'a AgentProcess>,
) -> Result<()> {
    let hosts: Vec<&TestHost> = agents.into_iter().map(|agent| &agent.host).collect();
    let etcdctl = testbed.etcdctl(cluster, &hosts)?;
    poll_slowly("the cluster to take a write", FORMATION_LIMIT, || {
        etcdctl.output(&["put", "k", "v"]).ok().filter(|o| o.status.success())
    })?;
    let list = poll_slowly("all members to have started", FORMATION_LIMIT, || {
        let list = etcdctl.json(&["member", "list"]).ok()?;
        let members = list["members"].as_array()?;
        members.iter().all(|m| m["name"].is_string()).then_some(list)
    })?;
    let members = list["members"].as_array().context("a list of members")?;
    let names: BTreeSet<&str> = members.iter().filter_map(|m| m["name"].as_str()).collect();
    ensure!(members.len() == 3 && names.len() == 3, "members: {list}");
    Ok(())
}

/// Restarts agents that have ended until the cluster is formed, as an init system would.
fn keep_running(
    testbed: &Testbed,
    cluster: &str,
    agents: &mut [AgentProcess],
) -> Result<serde_json::Value> {
    poll_slowly(&format!("{cluster} to form under a supervisor"), FORMATION_LIMIT, || {
        for agent in agents.iter_mut().filter(|a| a.process_id().is_some()) {
            if !agent.is_running() {
                agent.start().ok()?;
            }
        }
        let shown = testbed.admin_json(&["cluster", "show", cluster]).ok()?;
        (shown["state"] == "formed").then_some(shown)
    })
    .with_context(|| testbed.admin_command(&["cluster", "explain", cluster]).unwrap_or_default())
    .with_context(|| {
        agents
            .iter()
            .map(|a| muster_tests::harness::process::last_lines(&a.output(), 12))
            .collect::<Vec<_>>()
            .join("\n--\n")
    })
}

#[test]
fn three_hosts_become_one_cluster() -> Result<()> {
    let testbed = testbed(3)?;
    let bundle = testbed.create_cluster_with_token("demo", 3)?;
    let agents = testbed.start_agents(0..3, &bundle)?;
    testbed.wait_cluster_state("demo", "formed", FORMATION_LIMIT)?;
    check_three_members(&testbed, "demo", &agents)
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
    let testbed = testbed(3)?;
    for step in steps {
        let cluster = format!("at-{step}");
        let bundle = testbed.create_cluster_with_token(&cluster, 3)?;
        let mut agents = fresh_agents(&testbed, &cluster, 3, &bundle);
        agents[0].options = crashing_at(step);
        for agent in &mut agents {
            agent.start()?;
        }
        let code =
            agents[0].exit_code(FORMATION_LIMIT).with_context(|| format!("crash at {step}"))?;
        // The launcher is the process that starts the node. The agent survives a kill of the
        // launcher, starts it again, and gives up after several attempts.
        let expected = if step == "launcher" { 1 } else { 128 + 9 };
        ensure!(code == expected, "killed at {step}, the agent ended with {code}");
        agents[0].options = AgentOptions::default();
        agents[0].start()?;
        keep_running(&testbed, &cluster, &mut agents)
            .with_context(|| format!("killed at {step}"))?;
        check_three_members(&testbed, &cluster, &agents)
            .with_context(|| format!("killed at {step}"))?;
    }
    Ok(())
}

/// Steps of the service at which a process is killed.
const SERVICE_STEPS: [&str; 11] = [
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

#[test]
fn discovery_killed_at_any_step_forms_the_same_cluster() -> Result<()> {
    for step in SERVICE_STEPS {
        let mut testbed = Testbed::prepare(Network::loopback(3), TestbedOptions::default())?;
        testbed.options.serve_env = vec![("MUSTER_CRASH_AT".to_owned(), step.to_owned())];
        testbed.start_discovery()?;
        let bundle = testbed.create_cluster_with_token("demo", 3)?;
        let mut agents = testbed.start_agents(0..3, &bundle)?;
        let process = testbed.discovery.as_mut().context("discovery runs")?;
        let code =
            process.exit_code(FORMATION_LIMIT).with_context(|| format!("crash at {step}"))?;
        ensure!(code == 128 + 9, "killed at {step}, discovery ended with {code}");
        testbed.options.serve_env.clear();
        testbed.start_discovery()?;
        wait_three_members(&testbed, &mut agents).with_context(|| format!("killed at {step}"))?;
    }
    Ok(())
}

#[test]
fn postgres_killed_at_any_step_forms_the_same_cluster() -> Result<()> {
    for step in SERVICE_STEPS {
        let mut testbed = Testbed::prepare(Network::loopback(3), TestbedOptions::default())?;
        let pid_file = testbed.postgres_dir().join("data/postmaster.pid");
        testbed.options.serve_env = vec![
            ("MUSTER_CRASH_AT".to_owned(), step.to_owned()),
            ("MUSTER_CRASH_PID_FILE".to_owned(), path_text(&pid_file)?.to_owned()),
        ];
        testbed.start_discovery()?;
        let bundle = testbed.create_cluster_with_token("demo", 3)?;
        let mut agents = testbed.start_agents(0..3, &bundle)?;
        let process = testbed.discovery.as_mut().context("discovery runs")?;
        process
            .wait_for_output("killing, as the environment asks", FORMATION_LIMIT)
            .with_context(|| format!("kill at {step}"))?;
        wait_three_members(&testbed, &mut agents)
            .with_context(|| format!("Postgres killed at {step}"))?;
    }
    Ok(())
}

/// Waits until the agents have formed `demo`, and checks that it has three members.
fn wait_three_members(testbed: &Testbed, agents: &mut [AgentProcess]) -> Result<()> {
    keep_running(testbed, "demo", agents)?;
    check_three_members(testbed, "demo", &*agents)
}

#[test]
fn a_cluster_forms_although_postgres_is_killed_before_and_after_the_commit() -> Result<()> {
    let testbed = testbed(3)?;
    let bundle = testbed.create_cluster_with_token("demo", 3)?;
    let mut agents =
        vec![testbed.agent(0, &bundle), testbed.agent(1, &bundle), testbed.agent(2, &bundle)];
    agents[0].start()?;
    agents[0].wait_for_output("waiting", FORMATION_LIMIT)?;
    kill_postgres(&testbed)?;
    agents[1].start()?;
    agents[2].start()?;
    testbed
        .wait_cluster_state("demo", "committed", FORMATION_LIMIT)
        .or_else(|_| testbed.wait_cluster_state("demo", "formed", FORMATION_LIMIT))?;
    kill_postgres(&testbed)?;
    keep_running(&testbed, "demo", &mut agents)?;
    check_three_members(&testbed, "demo", &agents)
}

#[test]
fn of_four_hosts_three_become_members_and_the_standby_ends() -> Result<()> {
    let testbed = testbed(4)?;
    let bundle = testbed.create_cluster_with_token("demo", 3)?;
    let mut agents = testbed.start_agents(0..4, &bundle)?;
    testbed.wait_cluster_state("demo", "formed", FORMATION_LIMIT)?;
    let standby = wait_for("the standby to be sent away", FORMATION_LIMIT, || {
        agents.iter_mut().position(|a| !a.is_running())
    })?;
    let code = agents[standby].exit_code(FORMATION_LIMIT)?;
    ensure!(code == 3, "the standby ended with {code}: {}", agents[standby].output());
    let others = agents.iter().enumerate().filter(|(i, _)| *i != standby).map(|(_, a)| a);
    check_three_members(&testbed, "demo", others)
}

#[test]
fn the_seat_of_a_host_that_dies_goes_to_the_standby() -> Result<()> {
    let testbed = testbed(4)?;
    let bundle = testbed.create_cluster_with_token("demo", 3)?;
    let mut dying = testbed.agent(0, &bundle);
    dying.start()?;
    dying.wait_for_output("waiting", FORMATION_LIMIT)?;
    dying.kill();
    let agents = testbed.start_agents(1..4, &bundle)?;
    testbed.wait_cluster_state("demo", "formed", FORMATION_LIMIT)?;
    check_three_members(&testbed, "demo", &agents)?;
    dying.start()?;
    let code = dying.exit_code(FORMATION_LIMIT)?;
    ensure!(code == 3, "the late host ended with {code}");
    Ok(())
}

#[test]
fn a_host_that_nobody_can_reach_loses_its_seat_to_the_standby() -> Result<()> {
    let testbed = testbed(4)?;
    let bundle = testbed.create_cluster_with_token("demo", 3)?;
    // The agent listens on another address than it advertises, as if a firewall dropped its
    // connections.
    let elsewhere = testbed.network.hosts[3].address;
    let mut unreachable = testbed.agent_with(
        0,
        &bundle,
        AgentOptions {
            args: vec!["--listen-address".to_owned(), loopback_beside(elsewhere)],
            ..AgentOptions::default()
        },
    );
    unreachable.start()?;
    unreachable.wait_for_output("waiting", FORMATION_LIMIT)?;
    let agents = testbed.start_agents(1..4, &bundle)?;
    testbed.wait_cluster_state("demo", "formed", Duration::from_secs(90))?;
    check_three_members(&testbed, "demo", &agents)
}

#[test]
fn two_discovery_processes_on_one_postgres_serve_one_formation() -> Result<()> {
    let options = TestbedOptions { ports: vec![8443, 8444], ..TestbedOptions::default() };
    let testbed = Testbed::start(Network::loopback(3), options)?;
    let url = testbed.database_url()?;
    let mut other = testbed.spawn_discovery("discovery-2", 8444, Some(&url))?;
    other.wait_for_output("listening", FORMATION_LIMIT)?;
    let bundle = testbed.create_cluster_with_token("demo", 3)?;
    let text = fs_err::read_to_string(&bundle)?;
    ensure!(text.contains(":8444"), "the bundle names both: {text}");
    let agents = testbed.start_agents(0..3, &bundle)?;
    testbed.wait_cluster_state("demo", "formed", FORMATION_LIMIT)?;
    check_three_members(&testbed, "demo", &agents)
}

#[test]
fn a_restarted_agent_adopts_the_running_node() -> Result<()> {
    let testbed = testbed(1)?;
    let bundle = testbed.create_cluster_with_token("solo", 1)?;
    let mut agents = testbed.start_agents(0..1, &bundle)?;
    testbed.wait_cluster_state("solo", "formed", FORMATION_LIMIT)?;
    let node = agents[0].node_pid().context("the node runs")?;
    agents[0].kill();
    std::thread::sleep(Duration::from_millis(300));
    ensure!(is_alive(node), "the node died with its agent");
    agents[0].start()?;
    agents[0].wait_for_output("adopt", FORMATION_LIMIT)?;
    ensure!(agents[0].node_pid() == Some(node), "the agent replaced a running node");
    // systemd sends SIGUSR1 when it restarts the agent's unit. The signal ends the agent and leaves
    // the node running.
    send_signal(agents[0].process_id().context("the agent runs")?, Signal::USR1);
    let code = agents[0].exit_code(FORMATION_LIMIT)?;
    ensure!(code == 0 && is_alive(node), "the agent ended with {code}");
    agents[0].start()?;
    poll_slowly("the next agent to supervise the node", FORMATION_LIMIT, || {
        // Compare the process id: the status file may still be from the agent's previous process.
        let status = agents[0].status().ok()?;
        let is_new = status["agent_pid"] == agents[0].process_id()?;
        (is_new && status["phase"] == "running").then_some(())
    })?;
    ensure!(agents[0].node_pid() == Some(node), "the agent replaced a running node");
    let code = agents[0].terminate(FORMATION_LIMIT)?;
    ensure!(code == 0, "the agent ended with {code}");
    ensure!(!is_alive(node), "the adopted node outlived a clean stop");
    Ok(())
}

#[test]
fn a_formed_cluster_restarts_without_discovery() -> Result<()> {
    let mut testbed = testbed(3)?;
    let bundle = testbed.create_cluster_with_token("demo", 3)?;
    let mut agents = testbed.start_agents(0..3, &bundle)?;
    testbed.wait_cluster_state("demo", "formed", FORMATION_LIMIT)?;
    let hosts: Vec<TestHost> = testbed.network.hosts.clone();
    let etcdctl = testbed.etcdctl("demo", &hosts.iter().collect::<Vec<_>>())?;
    etcdctl.run(&["put", "before", "the night"])?;
    testbed.kill_discovery();
    for agent in &mut agents {
        ensure!(agent.terminate(FORMATION_LIMIT)? == 0, "{}", agent.output());
    }
    for agent in &mut agents {
        agent.start()?;
    }
    let read = poll_slowly("the cluster to come back without discovery", FORMATION_LIMIT, || {
        etcdctl.run(&["get", "before", "--print-value-only"]).ok()
    })?;
    ensure!(read.trim() == "the night", "read {read:?}");
    Ok(())
}

fn fresh_agents(
    testbed: &Testbed,
    cluster: &str,
    count: usize,
    bundle: &Path,
) -> Vec<AgentProcess> {
    (0..count)
        .map(|i| {
            let mut agent = testbed.agent(i, bundle);
            agent.data_dir = testbed.path(&format!("{cluster}-{i}"));
            agent
        })
        .collect()
}

fn kill_postgres(testbed: &Testbed) -> Result<()> {
    let pid = testbed.postmaster_pid()?;
    send_signal(pid, Signal::KILL);
    wait_for("Postgres to be gone", Duration::from_secs(60), || (!is_alive(pid)).then_some(()))?;
    testbed.wait_ready()
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

/// One agent has signed the list of the expired cluster. It must get its seat again with the state
/// and the bundle that it has.
#[test]
fn agents_of_an_expired_cluster_form_it_after_an_owner_reopened_it() -> Result<()> {
    let options = TestbedOptions {
        serve_args: ["--sweep", "1s"].map(str::to_owned).to_vec(),
        ..TestbedOptions::default()
    };
    let testbed = Testbed::start(Network::loopback(3), options)?;
    let bundle = testbed.create_cluster_with_token("demo", 3)?;
    let mut agents: Vec<AgentProcess> = (0..3).map(|i| testbed.agent(i, &bundle)).collect();
    // The third agent dies when it has to sign, so that the cluster can't form before its deadline.
    agents[2].options = crashing_at("ack");
    for agent in &mut agents {
        agent.start()?;
    }
    agents[2].exit_code(FORMATION_LIMIT)?;
    testbed.psql("UPDATE clusters SET deadline_us = now_us() - 1, next_deadline_us = 1")?;
    for agent in &mut agents[..2] {
        let code = agent.exit_code(FORMATION_LIMIT)?;
        let output = agent.output();
        ensure!(code == 3 && output.contains("cluster reopen"), "exit code {code}: {output}");
    }
    let explained = testbed.admin_command(&["cluster", "explain", "demo"])?;
    ensure!(explained.contains("cluster reopen demo"), "{explained}");

    testbed.admin_command(&["cluster", "reopen", "demo"])?;
    let again = testbed.admin_output(&["cluster", "reopen", "demo"])?;
    ensure!(again.status.code() == Some(2), "an open cluster is not expired: {again:?}");
    agents[2].options = AgentOptions::default();
    for agent in &mut agents {
        agent.start()?;
    }
    testbed.wait_cluster_state("demo", "formed", FORMATION_LIMIT)?;
    check_three_members(&testbed, "demo", &agents)
}

/// `cluster wait` says what is missing, and its exit code says whether the cluster has formed.
#[test]
fn cluster_wait_ends_when_the_cluster_has_formed_or_never_will() -> Result<()> {
    let testbed = Testbed::start(Network::loopback(1), TestbedOptions::default())?;
    let bundle = testbed.create_cluster_with_token("demo", 1)?;
    let early = testbed.admin_output(&["cluster", "wait", "demo", "--timeout", "2s"])?;
    let text = String::from_utf8_lossy(&early.stderr).into_owned();
    ensure!(early.status.code() == Some(1), "{early:?}");
    ensure!(text.contains("open: ") && text.contains("after 2s, open: "), "{text}");
    let _agents = testbed.start_agents(0..1, &bundle)?;
    let formed = testbed.admin_json(&["cluster", "wait", "demo", "--timeout", "2m"])?;
    ensure!(formed["state"] == "formed", "{formed}");
    testbed.create_cluster("given-up", 1, &[])?;
    testbed.admin_command(&["cluster", "abandon", "given-up", "--yes"])?;
    let ended = testbed.admin_output(&["cluster", "wait", "given-up"])?;
    let text = String::from_utf8_lossy(&ended.stderr).into_owned();
    ensure!(ended.status.code() == Some(1) && text.contains("it is abandoned"), "{text}");
    Ok(())
}
