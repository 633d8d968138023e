//! Kills agents, discovery and Postgres at each step of a join.

use anyhow::{Context, Result, ensure};
use muster_tests::harness::formed_cluster::{FormedCluster, LIMIT};
use muster_tests::harness::process::send_signal;
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{AgentProcess, Network, Testbed, poll_slowly, wait_for};
use rustix::process::Signal;

#[test]
fn a_newcomer_killed_at_any_step_becomes_a_member_once() -> Result<()> {
    let steps = ["key", "redeem", "added", "admit", "marker", "launching", "exec", "ran"];
    let running = FormedCluster::start(Network::loopback(11), 3, None)?;
    for (host, step) in (3..).zip(steps) {
        let mut newcomer = running.newcomer(host, &[("MUSTER_CRASH_AT", step)])?;
        let code = newcomer.exit_code(LIMIT).with_context(|| format!("crash at {step}"))?;
        ensure!(code == 128 + 9, "killed at {step}, the agent ended with {code}");
        newcomer.options.env.clear();
        newcomer.start()?;
        running
            .wait_intents("join", "promoted", host - 2)
            .with_context(|| format!("killed at {step}"))?;
        running.wait_voter(&newcomer, 4)?;
        running.remove(&newcomer).with_context(|| format!("killed at {step}"))?;
        ensure!(newcomer.exit_code(LIMIT)? == 3, "{}", newcomer.output());
        running.wait_members(3)?;
    }
    Ok(())
}

/// The leader's agent dies after it has made a change and before it has reported the change. Its
/// node is killed too. The next leader's agent makes the next change, and dies in the same way.
#[test]
fn leaders_that_die_after_each_change_of_a_join_leave_no_phantom() -> Result<()> {
    let mut running = FormedCluster::start(Network::loopback(4), 3, None)?;
    running.restart_agents(&[("MUSTER_CRASH_AT", "changed")])?;
    let newcomer = running.newcomer(3, &[])?;
    let promoted = [("join".to_owned(), "promoted".to_owned())];
    running.revive_until("the join to be told as done", |running| {
        running.intents().is_ok_and(|intents| intents == promoted)
    })?;
    running.wait_voter(&newcomer, 4)
}

/// Discovery doesn't accept a newcomer's own report that it has joined. That holds even if the
/// newcomer became leader before any other member has reported the join.
#[test]
fn other_members_report_the_promotion_of_a_newcomer_that_already_leads() -> Result<()> {
    let mut running = FormedCluster::start(Network::loopback(4), 3, None)?;
    let mut newcomer = running.newcomer(3, &[("MUSTER_CRASH_AT", "added")])?;
    newcomer.exit_code(LIMIT)?;
    running.wait_intent("join", "added")?;
    running.agents.iter_mut().for_each(AgentProcess::kill);
    newcomer.options.env.clear();
    newcomer.start()?;
    let etcdctl = running.etcdctl()?;
    let id = running.id(&newcomer)?;
    poll_slowly("the newcomer to be promoted by hand", LIMIT, || {
        etcdctl.run(&["member", "promote", &id]).ok()
    })?;
    poll_slowly("the newcomer to lead", LIMIT, || {
        let founders = running.founders();
        let leader = etcdctl.with_endpoint(founders[etcdctl.leader(&founders)?]);
        leader.run(&["move-leader", &id]).ok()
    })?;
    for agent in &mut running.agents {
        agent.start()?;
    }
    running.wait_intent("join", "promoted")
}

#[test]
fn leaders_that_die_while_a_newcomer_stalls_leave_no_phantom() -> Result<()> {
    let mut running = FormedCluster::start(Network::loopback(4), 3, None)?;
    running.restart_agents(&[("MUSTER_CRASH_AT", "changed"), ("MUSTER_STALLED_AFTER", "3")])?;
    let mut newcomer = running.newcomer(3, &[("MUSTER_CRASH_AT", "added")])?;
    let stalled = [("join".to_owned(), "stalled".to_owned())];
    running.revive_until("the join to be told as stalled", |running| {
        running.intents().is_ok_and(|intents| intents == stalled)
    })?;
    newcomer.exit_code(LIMIT)?;
    running.wait_members(3)?;
    Ok(())
}

#[test]
fn a_join_completes_after_discovery_and_postgres_were_killed() -> Result<()> {
    let mut running = FormedCluster::start(Network::loopback(4), 3, None)?;
    // No member's agent runs, so none acts on the join yet. The newcomer redeems its ticket and
    // waits.
    running.agents.iter_mut().for_each(AgentProcess::kill);
    let mut newcomer = running.newcomer(3, &[])?;
    newcomer.wait_for_output("waiting for the cluster to add this host", LIMIT)?;
    running.testbed.kill_discovery();
    for agent in &mut running.agents {
        agent.start()?;
    }
    newcomer.wait_for_output("waiting for discovery", LIMIT)?;
    running.testbed.start_discovery()?;
    running.wait_voter(&newcomer, 4)
}

/// Restarts discovery. It dies at the crash point, if one is given.
fn restart_discovery(running: &mut FormedCluster, crash_at: Option<&str>) -> Result<()> {
    running.testbed.kill_discovery();
    let env = crash_at.map(|point| ("MUSTER_CRASH_AT".to_owned(), point.to_owned()));
    running.testbed.options.serve_env = env.into_iter().collect();
    running.testbed.start_discovery()
}

/// Waits until discovery has killed itself, as `MUSTER_CRASH_AT` demands.
fn wait_dead(running: &mut FormedCluster) -> Result<()> {
    let process = running.testbed.discovery.as_mut().context("discovery runs")?;
    let code = process.exit_code(LIMIT)?;
    ensure!(code == 128 + 9, "discovery ended with {code}:\n{}", process.output());
    Ok(())
}

/// Waits until discovery dies as it stores the state `stored` of the join, restarts it, and waits
/// until the join is in this state.
fn die_and_come_back(running: &mut FormedCluster, stored: &str) -> Result<()> {
    wait_dead(running).with_context(|| format!("as a join becomes {stored}"))?;
    restart_discovery(running, None)?;
    running.wait_intent("join", stored)
}

/// Checks that a join completes although discovery dies `when` ("before" or "after") it stores each
/// state of the join.
fn check_discovery_dies_at_each_state(when: &str) -> Result<()> {
    let mut running = FormedCluster::start(Network::loopback(4), 3, None)?;
    // The newcomer redeems its ticket while no member's agent can act on it.
    running.agents.iter_mut().for_each(AgentProcess::kill);
    restart_discovery(&mut running, Some(&format!("{when}-open")))?;
    let mut newcomer = running.newcomer(3, &[])?;
    die_and_come_back(&mut running, "open")?;
    // The newcomer dies as soon as it knows that it was added, so it is not promoted yet.
    newcomer.kill();
    newcomer.options.env = vec![("MUSTER_CRASH_AT".to_owned(), "admit".to_owned())];
    newcomer.start()?;
    poll_slowly("the newcomer to have asked again", LIMIT, || {
        let status = newcomer.status().ok()?;
        let own = newcomer.process_id().map(u64::from);
        (status["agent_pid"].as_u64() == own && status["phase"] == "waiting").then_some(())
    })?;
    restart_discovery(&mut running, Some(&format!("{when}-added")))?;
    for agent in &mut running.agents {
        agent.start()?;
    }
    die_and_come_back(&mut running, "added")?;
    newcomer.exit_code(LIMIT)?;
    newcomer.options.env.clear();
    // The newcomer starts again and is promoted. Discovery dies as it stores that state.
    restart_discovery(&mut running, Some(&format!("{when}-promoted")))?;
    newcomer.start()?;
    die_and_come_back(&mut running, "promoted")?;
    running.wait_voter(&newcomer, 4)
}

#[test]
fn a_join_completes_although_discovery_dies_before_storing_each_step() -> Result<()> {
    check_discovery_dies_at_each_state("before")
}

#[test]
fn a_join_completes_although_discovery_dies_after_storing_each_step() -> Result<()> {
    check_discovery_dies_at_each_state("after")
}

#[test]
fn a_join_completes_although_postgres_is_killed_at_each_step() -> Result<()> {
    let mut testbed = Testbed::prepare(Network::loopback(5), TestbedOptions::default())?;
    let pid_file = testbed.postgres_dir().join("data/postmaster.pid");
    // At the join's first step, discovery itself kills Postgres, in the transaction that stores the
    // step.
    testbed.options.serve_env = vec![
        ("MUSTER_CRASH_AT".to_owned(), "before-open".to_owned()),
        ("MUSTER_CRASH_PID_FILE".to_owned(), path_text(&pid_file)?.to_owned()),
    ];
    testbed.start_discovery()?;
    let running = FormedCluster::form(testbed, 3, None)?;
    let first = running.newcomer(3, &[])?;
    running.wait_voter(&first, 4)?;
    let printed = running.testbed.discovery.as_ref().context("discovery runs")?.output();
    ensure!(printed.contains("killing, as the environment asks"), "{printed}");
    // During a second join, the test kills Postgres three times. Timing decides at which steps.
    let second = running.newcomer(4, &[])?;
    for _ in 0..3 {
        let pid = wait_for("Postgres to run", LIMIT, || running.testbed.postmaster_pid().ok())?;
        send_signal(pid, Signal::KILL);
        running.testbed.wait_ready()?;
    }
    running.wait_voter(&second, 5)?;
    running.wait_intents("join", "promoted", 2)
}
