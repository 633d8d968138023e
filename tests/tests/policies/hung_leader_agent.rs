//! The leader's agent hangs while its node goes on. The agent of another voter must take over and
//! carry out orders, tickets and replacements by a policy.

use anyhow::{Context, Result, ensure};
use muster_tests::harness::formed_cluster::{AFTER, FormedCluster, LIMIT, REPLACED, peer_url};
use muster_tests::harness::process::{last_lines, send_signal};
use muster_tests::harness::{Network, poll_slowly};
use rustix::process::Signal;

use crate::replacements::policy;

/// Returns the index of the founder whose node is the leader.
pub(crate) fn leader(running: &FormedCluster) -> Result<usize> {
    let etcdctl = running.etcdctl()?;
    poll_slowly("a leader", LIMIT, || etcdctl.leader(&running.founders()))
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
    running.wait_members(2)?;
    // The operator's command waits. Its output names the host whose agent is silent.
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

/// Lets one of five voters die, and the agent beside the leader hang. The other three agents are
/// still those of a quorum. If `begins_first`, the agent beside the leader counts a use of the
/// policy before it hangs.
fn replace_beside_a_hung_agent(begins_first: bool) -> Result<()> {
    let mut running = FormedCluster::start(Network::loopback(6), 5, None)?;
    running.restart_agents(&[AFTER])?;
    let (bundle, _) = policy(&running.testbed, "group", &[])?;
    let mut standby = running.agent(5, &bundle, &[AFTER]);
    standby.start()?;
    standby.wait_for_output("waiting for the cluster to add this host", LIMIT)?;
    let mut dead = running.agents.remove((leader(&running)? + 1) % 5);
    let gone = peer_url(&dead);
    let hung = leader(&running)?;
    let pid = running.agents[hung].process_id().context("an agent")?;
    if !begins_first {
        send_signal(pid, Signal::STOP);
    }
    dead.kill();
    dead.kill_node()?;
    if begins_first {
        let begun = "takes the place of";
        running.agents[hung].wait_for_output(begun, REPLACED)?;
        send_signal(pid, Signal::STOP);
    }
    running.wait_replaced(&standby, &gone)?;
    let others = running.agents.iter().enumerate().filter(|(at, _)| *at != hung);
    let took = others.filter(|(_, agent)| agent.output().contains("takes the leadership over"));
    ensure!(took.count() > 0, "the replacement is done without the agent that hangs");
    ensure!(leader(&running)? != hung, "another agent has taken over for good");
    // The agent that hung changes nothing when it is continued.
    send_signal(pid, Signal::CONT);
    running.wait_intents("replace", "promoted", 1)?;
    poll_slowly("the replacement to end", LIMIT, || {
        running.replacements().ok()?.first()?["ended"].as_str().map(drop)
    })?;
    let used = running.replacements()?;
    ensure!(used.len() == 1 && used[0]["ended"] == "promoted", "{used:?}");
    running.wait_members(5)?;
    Ok(())
}

#[test]
fn a_dead_member_is_replaced_though_the_agent_beside_the_leader_hangs() -> Result<()> {
    replace_beside_a_hung_agent(false)
}

#[test]
fn a_replacement_that_the_leaders_agent_has_begun_goes_on_without_that_agent() -> Result<()> {
    replace_beside_a_hung_agent(true)
}
