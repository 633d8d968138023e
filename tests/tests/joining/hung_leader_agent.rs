//! The leader's agent hangs while its node goes on. The agent of another voter must take over and
//! carry out orders.

use anyhow::{Context, Result, ensure};
use muster_tests::harness::process::{last_lines, send_signal};
use muster_tests::harness::{Network, wait_for};
use rustix::process::Signal;

use crate::running_cluster::{FormedCluster, LIMIT};

/// Returns the index of the founder whose node is the leader.
fn leader(running: &FormedCluster) -> Result<usize> {
    let etcdctl = running.etcdctl()?;
    wait_for("a leader", LIMIT, || etcdctl.leader(&running.founders()))
}

#[test]
fn an_order_to_remove_the_host_whose_agent_hangs_beside_the_leader_is_carried_out() -> Result<()> {
    let mut running = FormedCluster::start(Network::loopback(3), 3, None)?;
    let hung = leader(&running)?;
    let name = running.name(&running.agents[hung])?;
    let pid = running.agents[hung].process_id().context("an agent")?;
    send_signal(pid, Signal::STOP);
    let order = ["intent", "remove", "demo", &name, "--yes", "--wait"];
    let output = running.testbed.admin_output(&order)?;
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{printed}\n{:?}", running.intents());
    ensure!(running.members()?.len() == 2, "{:?}", running.members());
    // The output of the operator's waiting command names the host with the silent agent.
    ensure!(printed.contains(&format!("beside the cluster's leader, {name} (")), "{printed}");
    let others = running.agents.iter().enumerate().filter(|(at, _)| *at != hung);
    let took = others.filter(|(_, agent)| agent.output().contains("takes the leadership over"));
    ensure!(took.count() == 1, "one of the others takes over, once");
    // The hanging agent's host is removed. When the agent resumes, it learns of that and ends.
    send_signal(pid, Signal::CONT);
    let removed = &mut running.agents[hung];
    let code = removed.exit_code(LIMIT)?;
    ensure!(code == 3, "the agent ended with {code}: {}", last_lines(&removed.output(), 25));
    Ok(())
}

#[test]
fn a_host_joins_though_the_agent_beside_the_leader_hangs() -> Result<()> {
    let running = FormedCluster::start(Network::loopback(4), 3, None)?;
    let hung = leader(&running)?;
    let pid = running.agents[hung].process_id().context("an agent")?;
    send_signal(pid, Signal::STOP);
    let newcomer = running.newcomer(3, &[])?;
    running.wait_voter(&newcomer, 4)?;
    send_signal(pid, Signal::CONT);
    running.wait_intent("join", "promoted")
}
