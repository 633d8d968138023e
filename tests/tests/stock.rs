//! Stock etcd under the agent: the oldest that distributions have and the newest, on loopback
//! addresses (where a peer calls from another address than its own) and on hosts of their own.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::agents::AgentOptions;
use muster_tests::harness::world::{WorldOptions, path_text};
use muster_tests::harness::{Agent, Host, Network, World, skip, until, until_told};
use muster_tests::stock::{self, oldest};
use serde_json::Value;

const FORMED: Duration = Duration::from_secs(60);

fn newest() -> Option<PathBuf> {
    stock::newest(Path::new(env!("CARGO_TARGET_TMPDIR")))
}

fn namespaces() -> Option<Network> {
    match Network::namespaces(3) {
        Ok(network) => Some(network),
        Err(error) => {
            skip::skipped(format_args!("no network namespaces here: {error:#}"));
            None
        }
    }
}

fn start(world: &World, etcd: &Path, flags: &[&str]) -> Result<Vec<Agent>> {
    let bundle = world.order("demo", 3)?;
    let mut args = vec!["--node-binary".to_owned(), path_text(etcd)?.to_owned()];
    args.extend(flags.iter().map(|flag| (*flag).to_owned()));
    (0..3)
        .map(|host| {
            let options = AgentOptions { args: args.clone(), ..AgentOptions::default() };
            let mut agent = world.agent_with(host, &bundle, options);
            agent.start()?;
            Ok(agent)
        })
        .collect()
}

fn forms(etcd: &Path, network: Network) -> Result<()> {
    let world = World::start(network, WorldOptions::default())?;
    let agents = start(&world, etcd, &[])?;
    world.wait_cluster_state("demo", "formed", FORMED)?;
    let hosts: Vec<&Host> = agents.iter().map(|agent| &agent.host).collect();
    let etcdctl = world.etcdctl("demo", &hosts)?;
    until("the cluster to take a write", FORMED, || etcdctl.run(&["put", "k", "v"]).ok())?;
    let list = etcdctl.json(&["member", "list"])?;
    let members = list["members"].as_array().context("a list of members")?;
    ensure!(members.len() == 3, "{list}");
    for agent in &agents {
        let output = agent.output();
        ensure!(!output.lines().any(is_rejection), "{output}");
    }
    Ok(())
}

/// A client that ends while its other connections are being made is told of as rejected, too: etcdctl
/// does, and nobody refused it.
fn is_rejection(line: &str) -> bool {
    line.contains("rejected connection") && !line.contains("\"EOF\"")
}

#[test]
fn etcd_3_4_forms_on_loopback() -> Result<()> {
    oldest().map_or(Ok(()), |etcd| forms(&etcd, Network::loopback(3)))
}

#[test]
fn etcd_3_4_forms_on_hosts_of_their_own() -> Result<()> {
    let (Some(etcd), Some(network)) = (oldest(), namespaces()) else { return Ok(()) };
    forms(&etcd, network)
}

#[test]
fn the_newest_etcd_forms_on_loopback() -> Result<()> {
    newest().map_or(Ok(()), |etcd| forms(&etcd, Network::loopback(3)))
}

#[test]
fn the_newest_etcd_forms_on_hosts_of_their_own() -> Result<()> {
    let (Some(etcd), Some(network)) = (newest(), namespaces()) else { return Ok(()) };
    forms(&etcd, network)
}

/// With the check switched on again no two nodes speak to each other, and whoever asks is told so in
/// the nodes' own words.
#[test]
fn nodes_that_find_no_leader_say_why_in_status_and_explain() -> Result<()> {
    let Some(etcd) = newest() else { return Ok(()) };
    let world = World::start(Network::loopback(3), WorldOptions::default())?;
    let agents = start(&world, &etcd, &["--", "--peer-skip-client-san-verification=false"])?;
    until_told("status to say what the node's log says", FORMED, || {
        let status = agents[0].status().ok()?;
        says_why(&status["node_complaint"]).then_some(())
    })?;
    until_told("explain to say what a node's log says", FORMED, || {
        let explained = world.admin_json(&["cluster", "explain", "demo"]).ok()?;
        let waits = explained["explain"].as_array()?;
        let reports = waits.iter().find(|wait| wait["code"] == "nodes_not_reported")?;
        says_why(&reports["last_error"]).then_some(())
    })?;
    Ok(())
}

fn says_why(text: &Value) -> bool {
    text.as_str().is_some_and(|text| {
        ["rejected connection", "bad certificate", "could not connect", "connection refused"]
            .iter()
            .any(|words| text.contains(words))
    })
}
