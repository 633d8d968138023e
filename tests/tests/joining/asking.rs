//! `muster-agent member` on a host whose own node can't answer: the others that its agent knows are asked.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::process::tail;
use muster_tests::harness::{Agent, Network, until};
use muster_tests::stock;
use serde_json::Value;

use crate::running::{LIMIT, Running, peer_url};

/// What `member list` on `host` says of the member of `other`.
fn seen(running: &Running, host: &Agent, other: &Agent) -> Result<Value> {
    let list = running.member_done(host, &["list"])?;
    let rows = list["members"].as_array().context("members")?;
    let row = rows.iter().find(|row| row["peer_urls"][0] == peer_url(other).as_str());
    row.cloned().with_context(|| format!("{list}"))
}

fn others_are_asked(node: Option<&Path>) -> Result<()> {
    let mut running = Running::start(Network::loopback(4), 3, node)?;
    // It is added, and dies; there is no agent that would promote it when it comes back.
    let mut newcomer = running.newcomer(3, &[("MUSTER_CRASH_AT", "admit")])?;
    newcomer.exit_code(LIMIT)?;
    running.agents.iter_mut().for_each(Agent::kill);
    newcomer.options.env.clear();
    newcomer.start()?;
    until("the learner to be in sync", LIMIT, || {
        let row = seen(&running, &newcomer, &newcomer).ok()?;
        (row["is_learner"] == true && row["behind"] == 0).then_some(())
    })
    .with_context(|| tail(&newcomer.output(), 25))?;
    let name = newcomer.status()?["name"].as_str().context("a name")?.to_owned();
    running.member_done(&newcomer, &["promote", &name])?;
    running.wait_voter(&newcomer, 4)?;

    // A node that is down answers nobody.
    let down = &running.agents[0];
    down.kill_node()?;
    let silent = seen(&running, down, down)?;
    ensure!(silent["silent"].is_string(), "{silent}");
    running.member_done(down, &["remove", &name])?;
    ensure!(running.members()?.len() == 3, "{:?}", running.members());
    Ok(())
}

#[test]
fn a_learners_host_and_one_whose_node_is_down_ask_the_others() -> Result<()> {
    others_are_asked(None)
}

#[test]
fn so_they_do_where_etcd_runs() -> Result<()> {
    stock::oldest().map_or(Ok(()), |etcd| others_are_asked(Some(&etcd)))
}
