//! Runs `muster-agent member` on a host whose own node can't answer. The command asks the other
//! members that the agent knows.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::formed_cluster::{FormedCluster, LIMIT, peer_url};
use muster_tests::harness::process::last_lines;
use muster_tests::harness::programs::program_path;
use muster_tests::harness::{AgentProcess, Network, wait_for};
use muster_tests::stock_etcd;
use serde_json::Value;

/// Returns the row of `other`'s member in the output of `member list` on `host`.
fn member_row(running: &FormedCluster, host: &AgentProcess, other: &AgentProcess) -> Result<Value> {
    let list = running.run_member_json(host, &["list"])?;
    let rows = list["members"].as_array().context("members")?;
    let row = rows.iter().find(|row| row["peer_urls"][0] == peer_url(other).as_str());
    row.cloned().with_context(|| format!("{list}"))
}

fn check_others_are_asked(node: Option<&Path>) -> Result<()> {
    let mut running = FormedCluster::start(Network::loopback(4), 3, node)?;
    // The newcomer dies after it was added. All other agents are killed, so none promotes the
    // newcomer after its restart.
    let mut newcomer = running.newcomer(3, &[("MUSTER_CRASH_AT", "admit")])?;
    newcomer.exit_code(LIMIT)?;
    running.agents.iter_mut().for_each(AgentProcess::kill);
    newcomer.options.env.clear();
    newcomer.start()?;
    wait_for("the learner to be in sync", LIMIT, || {
        let row = member_row(&running, &newcomer, &newcomer).ok()?;
        (row["is_learner"] == true && row["behind"] == 0).then_some(())
    })
    .with_context(|| last_lines(&newcomer.output(), 25))?;
    let name = newcomer.status()?["name"].as_str().context("a name")?.to_owned();
    running.run_member_json(&newcomer, &["promote", &name])?;
    running.wait_voter(&newcomer, 4)?;

    // The node on this host is down, so the command must ask another node.
    let down = &running.agents[0];
    down.kill_node()?;
    let silent = member_row(&running, down, down)?;
    ensure!(silent["silent"].is_string(), "{silent}");
    running.run_member_json(down, &["remove", &name])?;
    running.wait_members(3)?;
    Ok(())
}

#[test]
fn member_commands_ask_other_members_on_a_learner_and_beside_a_dead_node() -> Result<()> {
    check_others_are_asked(None)
}

#[test]
fn member_commands_ask_other_members_where_etcd_runs() -> Result<()> {
    stock_etcd::oldest().map_or(Ok(()), |etcd| check_others_are_asked(Some(&etcd)))
}

/// When the host joined, the founder was the only other member. The founder has been removed since.
#[test]
fn a_host_whose_node_is_down_finds_the_members_that_came_after_it() -> Result<()> {
    let running = FormedCluster::start(Network::loopback(4), 1, None)?;
    let mut first = running.newcomer(1, &[])?;
    running.wait_voter(&first, 2)?;
    let second = running.newcomer(2, &[])?;
    running.wait_voter(&second, 3)?;
    let third = running.newcomer(3, &[])?;
    running.wait_voter(&third, 4)?;
    running.wait_intents("join", "promoted", 3)?;
    let founder = peer_url(&running.agents[0]);
    running.remove(&running.agents[0])?;
    let known = first.data_dir.join("agent/known-members.json");
    wait_for("the first newcomer's agent to write the member list", LIMIT, || {
        let text = fs_err::read_to_string(&known).ok()?;
        (text.contains(&peer_url(&third)) && !text.contains(&founder)).then_some(())
    })?;
    first.kill();
    first.kill_node()?;
    let list = running.run_member_json(&first, &["list"])?;
    ensure!(list["members"].as_array().map(Vec::len) == Some(3), "{list}");
    Ok(())
}

/// Runs `muster-agent status` on an agent's host. Returns the exit code and all output.
fn status(agent: &AgentProcess, args: &[&str]) -> Result<(Option<i32>, String)> {
    let mut command = agent.host.command(program_path("muster-agent")?);
    let output =
        command.arg("status").args(args).arg("--data-dir").arg(&agent.data_dir).output()?;
    let text = [output.stdout, output.stderr].concat();
    Ok((output.status.code(), String::from_utf8_lossy(&text).into_owned()))
}

#[test]
fn commands_on_a_host_that_is_no_member_yet_say_so_or_wait() -> Result<()> {
    let mut running = FormedCluster::start(Network::loopback(4), 3, None)?;
    running.agents.iter_mut().for_each(AgentProcess::kill);
    let mut newcomer = running.newcomer(3, &[])?;
    newcomer.wait_for_output("waiting for the cluster to add this host", LIMIT)?;
    let waited = running.run_member(&newcomer, &["wait", "--patience", "1"])?;
    let printed = String::from_utf8_lossy(&waited.stderr).into_owned();
    ensure!(waited.status.code() == Some(1), "{printed}");
    ensure!(printed.contains("this host is no member of a cluster yet"), "{printed}");
    ensure!(status(&newcomer, &[])?.0 == Some(0), "a status without a question");
    let (code, printed) = status(&newcomer, &["--ready"])?;
    ensure!(code == Some(1) && printed.contains("not ready: the node doesn't run"), "{printed}");
    for agent in &mut running.agents {
        agent.start()?;
    }
    let (code, printed) = status(&newcomer, &["--wait", "--timeout", "60"])?;
    ensure!(code == Some(0), "{printed}");
    let (code, printed) = status(&newcomer, &["--ready"])?;
    ensure!(code == Some(0), "{printed}");
    running.wait_voter(&newcomer, 4)?;
    running.run_member_json(&newcomer, &["wait"]).map(drop)
}
