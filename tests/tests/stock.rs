//! Stock etcd under the agent, in its newest version and in the oldest version that distributions
//! have. etcd runs on loopback addresses and on separate hosts. On loopback, a peer connects from
//! another address than its own.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::agents::AgentOptions;
use muster_tests::harness::nodes::{client_url, peer_url};
use muster_tests::harness::programs::program_path;
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{
    AgentProcess, Network, NodeProcess, TestHost, Testbed, poll_slowly, skip,
};
use muster_tests::stock_etcd::{self, oldest};
use serde_json::Value;

const FORMATION_LIMIT: Duration = Duration::from_secs(60);

fn newest() -> Option<PathBuf> {
    stock_etcd::newest(Path::new(env!("CARGO_TARGET_TMPDIR")))
}

fn namespaces() -> Option<Network> {
    match Network::namespaces(3) {
        Ok(network) => Some(network),
        Err(error) => {
            skip::report_skip(format_args!("no network namespaces here: {error:#}"));
            None
        }
    }
}

fn start(testbed: &Testbed, etcd: &Path, flags: &[&str]) -> Result<Vec<AgentProcess>> {
    let bundle = testbed.create_cluster_with_token("demo", 3)?;
    let mut args = vec!["--node-binary".to_owned(), path_text(etcd)?.to_owned()];
    args.extend(flags.iter().map(|flag| (*flag).to_owned()));
    (0..3)
        .map(|host| {
            let options = AgentOptions { args: args.clone(), ..AgentOptions::default() };
            let mut agent = testbed.agent_with(host, &bundle, options);
            agent.start()?;
            Ok(agent)
        })
        .collect()
}

fn check_forming(etcd: &Path, network: Network) -> Result<()> {
    let testbed = Testbed::start(network, TestbedOptions::default())?;
    let agents = start(&testbed, etcd, &[])?;
    testbed.wait_cluster_state("demo", "formed", FORMATION_LIMIT)?;
    let hosts: Vec<&TestHost> = agents.iter().map(|agent| &agent.host).collect();
    let etcdctl = testbed.etcdctl("demo", &hosts)?;
    poll_slowly("the cluster to take a write", FORMATION_LIMIT, || {
        etcdctl.run(&["put", "k", "v"]).ok()
    })?;
    let list = etcdctl.json(&["member", "list"])?;
    let members = list["members"].as_array().context("a list of members")?;
    ensure!(members.len() == 3, "{list}");
    for agent in &agents {
        let output = agent.output();
        ensure!(!output.lines().any(is_rejection), "{output}");
    }
    Ok(())
}

/// Whether the log line reports a rejected connection. If a client such as etcdctl closes a
/// connection too early, etcd logs the error EOF or reset. Such a line is no rejection.
fn is_rejection(line: &str) -> bool {
    let ended = line.contains("\"EOF\"") || line.contains("connection reset by peer");
    line.contains("rejected connection") && !ended
}

#[test]
fn etcd_3_4_forms_a_cluster_on_loopback() -> Result<()> {
    oldest().map_or(Ok(()), |etcd| check_forming(&etcd, Network::loopback(3)))
}

#[test]
fn etcd_3_4_forms_a_cluster_on_separate_hosts() -> Result<()> {
    let (Some(etcd), Some(network)) = (oldest(), namespaces()) else { return Ok(()) };
    check_forming(&etcd, network)
}

#[test]
fn the_newest_etcd_forms_a_cluster_on_loopback() -> Result<()> {
    newest().map_or(Ok(()), |etcd| check_forming(&etcd, Network::loopback(3)))
}

#[test]
fn the_newest_etcd_forms_a_cluster_on_separate_hosts() -> Result<()> {
    let (Some(etcd), Some(network)) = (newest(), namespaces()) else { return Ok(()) };
    check_forming(&etcd, network)
}

/// With the SAN verification on, no two nodes can connect. `status` and `cluster explain` must show
/// the errors in the nodes' logs.
#[test]
fn status_and_explain_show_why_nodes_find_no_leader() -> Result<()> {
    let Some(etcd) = newest() else { return Ok(()) };
    let testbed = Testbed::start(Network::loopback(3), TestbedOptions::default())?;
    let agents = start(&testbed, &etcd, &["--", "--peer-skip-client-san-verification=false"])?;
    poll_slowly("status to say what the node's log says", FORMATION_LIMIT, || {
        let status = agents[0].status().ok()?;
        says_why(&status["node_complaint"]).then_some(())
    })?;
    poll_slowly("explain to say what a node's log says", FORMATION_LIMIT, || {
        let explained = testbed.admin_json(&["cluster", "explain", "demo"]).ok()?;
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

/// Runs a command that must succeed, and returns its output.
fn run_tool(host: &TestHost, path: &Path, args: &[&str]) -> Result<String> {
    let output = host.command(path).env("ETCDCTL_API", "3").args(args).output()?;
    let printed = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{} {}: {printed}", path.display(), args.join(" "));
    Ok(String::from_utf8(output.stdout)?)
}

#[test]
fn the_newest_etcds_tool_reads_and_restores_a_nodes_snapshot() -> Result<()> {
    let work = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (Some(etcd), Some(etcdutl)) = (newest(), stock_etcd::newest_etcdutl(work)) else {
        return Ok(());
    };
    let (network, folder) = (Network::loopback(2), tempfile::tempdir()?);
    let [first, second] = [0, 1].map(|n| network.hosts[n].clone());
    let node = program_path("muster-node")?;
    let cluster_flags = |host: &TestHost| {
        ["--name=one".to_owned(), format!("--initial-cluster=one={}", peer_url(host))]
    };
    let mut ours = NodeProcess::new(&first, "ours", &node, folder.path());
    ours.flags.extend(cluster_flags(&first));
    ours.start()?;
    ours.wait_ready(FORMATION_LIMIT)?;
    let etcdctl = |host: &TestHost, args: &[&str]| {
        let url = client_url(host);
        run_tool(host, Path::new("etcdctl"), &[&["--endpoints", &url], args].concat())
    };
    for n in 0..40 {
        let (key, value) = (format!("k{}", n % 7), "v".repeat(n * 311 % 9_000));
        etcdctl(&first, &["put", &key, &value])?;
    }
    etcdctl(&first, &["del", "k3"])?;
    let file = folder.path().join("saved.db");
    let file = path_text(&file)?;
    run_tool(&first, &node, &["snapshot", "save", "--endpoints", &client_url(&first), file])?;
    let own: Value =
        serde_json::from_str(&run_tool(&first, &node, &["snapshot", "status", "--json", file])?)?;
    let theirs: Value = serde_json::from_str(&run_tool(
        &first,
        &etcdutl,
        &["snapshot", "status", "-w", "json", file],
    )?)?;
    ensure!(own == theirs, "{own} is not {theirs}");

    let mut etcd = NodeProcess::new(&second, "theirs", &etcd, folder.path());
    etcd.flags.extend(cluster_flags(&second));
    let known = |flag: &&String| {
        ["--name=", "--data-dir=", "--initial-"].iter().any(|known| flag.starts_with(known))
    };
    let flags: Vec<&str> = etcd.flags.iter().filter(known).map(String::as_str).collect();
    run_tool(&second, &etcdutl, &[&["snapshot", "restore", file], &flags[..]].concat())?;
    etcd.start()?;
    etcd.wait_ready(FORMATION_LIMIT)?;
    let revision = own["revision"].as_i64().context("a revision")?;
    for at in [revision, revision - 1, revision / 2] {
        let hash = |host: &TestHost| -> Result<Value> {
            let rev = format!("--rev={at}");
            let printed = etcdctl(host, &["endpoint", "hashkv", &rev, "-w", "json"])?;
            Ok(serde_json::from_str::<Value>(&printed)?[0]["HashKV"]["hash"].clone())
        };
        let (ours, theirs) = (hash(&first)?, hash(&second)?);
        ensure!(ours.is_u64() && ours == theirs, "at {at}: {ours} is not {theirs}");
    }
    let keys = |host: &TestHost| -> Result<Value> {
        let printed = etcdctl(host, &["get", "", "--prefix", "-w", "json"])?;
        Ok(serde_json::from_str::<Value>(&printed)?["kvs"].clone())
    };
    let (ours, theirs) = (keys(&first)?, keys(&second)?);
    ensure!(ours.is_array() && ours == theirs, "{ours} is not {theirs}");
    Ok(())
}
