//! A member that was removed from its cluster never comes back, whichever program its node runs and
//! however often it is started.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::agents::AgentOptions;
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{AgentProcess, Network, TestHost, Testbed, poll_slowly};
use muster_tests::stock_etcd;

const LIMIT: Duration = Duration::from_secs(60);
/// Number of restarts by a supervisor.
const RESTARTS: usize = 20;

fn form_three_members(testbed: &Testbed, node: Option<&Path>) -> Result<Vec<AgentProcess>> {
    let bundle = testbed.create_cluster_with_token("demo", 3)?;
    let args = match node {
        Some(node) => vec!["--node-binary".to_owned(), path_text(node)?.to_owned()],
        None => Vec::new(),
    };
    let start = |host| {
        let options = AgentOptions { args: args.clone(), ..AgentOptions::default() };
        let mut agent = testbed.agent_with(host, &bundle, options);
        agent.start()?;
        Ok(agent)
    };
    let agents: Result<Vec<AgentProcess>> = (0..3).map(start).collect();
    testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    agents
}

/// Removes the member of `agent` with `etcdctl` through the others, as soon as the cluster allows
/// it.
fn remove(testbed: &Testbed, agent: &AgentProcess, others: &[&TestHost]) -> Result<()> {
    let etcdctl = testbed.etcdctl("demo", others)?;
    let list = etcdctl.json(&["member", "list"])?;
    let url = format!("https://{}:2380", agent.host.address);
    let members = list["members"].as_array().context("a list of members")?;
    let member = members.iter().find(|member| member["peerURLs"][0] == url.as_str());
    let id = member.and_then(|member| member["ID"].as_u64()).context("the member's id")?;
    poll_slowly("the cluster to remove a member", LIMIT, || {
        etcdctl.run(&["member", "remove", &format!("{id:x}")]).ok()
    })?;
    Ok(())
}

fn check_removed_member_stays_out(node: Option<&Path>) -> Result<()> {
    let mut testbed = Testbed::start(Network::loopback(3), TestbedOptions::default())?;
    let mut agents = form_three_members(&testbed, node)?;
    let mut removed = agents.pop().context("a third agent")?;
    let hosts: Vec<&TestHost> = agents.iter().map(|agent| &agent.host).collect();
    remove(&testbed, &removed, &hosts)?;
    let code = removed.exit_code(LIMIT)?;
    ensure!(code == 3, "the agent ended with {code}: {}", removed.output());
    ensure!(removed.output().contains("has been permanently removed"), "{}", removed.output());
    let data = removed.node_dir().join("member");
    ensure!(data.is_dir(), "the data is gone");

    // The agent must know of the removal without discovery.
    let etcdctl = testbed.etcdctl("demo", &hosts)?;
    testbed.kill_discovery();
    let term = || -> Result<u64> {
        let status = etcdctl.with_endpoint(hosts[0]).json(&["endpoint", "status"])?;
        status[0]["Status"]["raftTerm"].as_u64().context("a term")
    };
    let before = term()?;
    for start in 1..=RESTARTS {
        removed.start()?;
        let code = removed.exit_code(LIMIT)?;
        ensure!(code == 3, "start {start} ended with {code}: {}", removed.output());
        ensure!(removed.node_pid().is_none(), "start {start} left a node");
    }
    ensure!(term()? == before, "it disturbed the others");
    let status = removed.status()?;
    let says = status["removed"].as_str().unwrap_or_default();
    ensure!(says.contains("removed from the cluster") && says.contains(" at 2"), "{status}");
    ensure!(etcdctl.json(&["member", "list"])?["members"].as_array().map(Vec::len) == Some(2));
    ensure!(data.is_dir(), "the data is gone");

    // Deleting the node's directory also deletes its tombstone. The agent's journal records the
    // removal, too.
    fs_err::remove_dir_all(removed.node_dir())?;
    removed.start()?;
    ensure!(removed.exit_code(LIMIT)? == 3, "{}", removed.output());
    Ok(())
}

#[test]
fn a_removed_member_doesnt_come_back() -> Result<()> {
    check_removed_member_stays_out(None)
}

#[test]
fn a_removed_member_doesnt_come_back_with_etcd_3_4_as_its_node() -> Result<()> {
    stock_etcd::oldest().map_or(Ok(()), |etcd| check_removed_member_stays_out(Some(&etcd)))
}

#[test]
fn a_removed_member_doesnt_come_back_with_the_newest_etcd_as_its_node() -> Result<()> {
    let work = Path::new(env!("CARGO_TARGET_TMPDIR"));
    stock_etcd::newest(work).map_or(Ok(()), |etcd| check_removed_member_stays_out(Some(&etcd)))
}
