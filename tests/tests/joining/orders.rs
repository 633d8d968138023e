//! Orders: a signed order of an operator is carried out once. An order of a revoked operator is not
//! carried out.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::client::tls_from;
use muster_tests::harness::formed_cluster::{FormedCluster, LIMIT, peer_url};
use muster_tests::harness::process::last_lines;
use muster_tests::harness::programs::program_path;
use muster_tests::harness::testbed::path_text;
use muster_tests::harness::{
    AgentProcess, ChildProcess, Network, RetryingWriter, Testbed, poll_slowly, wait_for,
};
use muster_tests::stock_etcd;
use serde_json::{Value, json};

/// Time for which agents are watched while they must not act. Agents poll for intents twice a
/// second.
const OBSERVATION_TIME: Duration = Duration::from_secs(3);

/// Discovery accepts a membership that a quorum of the last known voters reports. If these are two
/// voters, both must report it.
#[test]
fn a_cluster_of_two_shrinks_to_one_and_discovery_learns_of_it() -> Result<()> {
    let running = FormedCluster::start(Network::loopback(3), 1, None)?;
    let mut newcomer = running.newcomer(1, &[])?;
    running.wait_intent("join", "promoted")?;
    running.remove(&newcomer)?;
    ensure!(newcomer.exit_code(LIMIT)? == 3, "{}", newcomer.output());
    let name = running.name(&running.agents[0])?;
    poll_slowly("discovery to list only the last member", LIMIT, || {
        let shown = running.testbed.admin_json(&["cluster", "show", "demo"]).ok()?;
        let members = shown["directory"]["membership"]["members"].as_array()?;
        (members.len() == 1 && members[0]["name"] == name.as_str()).then_some(())
    })
    .with_context(|| newcomer.output())?;
    // The one remaining member is a quorum by itself. Add another host and remove it in the same
    // way.
    let mut third = running.newcomer(2, &[])?;
    running.wait_intents("join", "promoted", 2)?;
    running.remove(&third)?;
    ensure!(third.exit_code(LIMIT)? == 3, "{}", third.output());
    Ok(())
}

/// No agent runs when the order is given. Until the end, the waiting command says what the intent
/// waits for, each state once.
#[test]
fn a_command_that_waits_for_an_intent_says_how_far_the_intent_is() -> Result<()> {
    let mut running = FormedCluster::start(Network::loopback(3), 3, None)?;
    let name = running.name(&running.agents[2])?;
    running.agents.iter_mut().for_each(AgentProcess::kill);
    let order = ["intent", "remove", "demo", &name, "--yes"];
    let made = running.testbed.admin_json(&order)?;
    let id = made["intent"]["operation"].as_str().context("an id")?.to_owned();
    let mut command = running.testbed.network.hub.command(program_path("muster-discovery")?);
    command
        .args(["intent", "show", "demo", &id, "--wait"])
        .env("MUSTER_ADMIN_HOME", running.testbed.admin_home())
        .env("MUSTER_ADMIN_KEY", running.testbed.admin_key());
    let mut waiting =
        ChildProcess::spawn("waiting", command, &running.testbed.path("waiting.log"))?;
    let task = format!("open: member {name} (");
    waiting.wait_for_output(&task, LIMIT)?;
    std::thread::sleep(OBSERVATION_TIME);
    ensure!(waiting.is_running(), "{}", waiting.output());
    running.agents.iter_mut().try_for_each(AgentProcess::start)?;
    ensure!(waiting.exit_code(LIMIT)? == 0, "{}", waiting.output());
    let printed = waiting.output();
    let mut notes: Vec<&str> = printed.lines().filter(|line| line.starts_with("open: ")).collect();
    let count = notes.len();
    notes.dedup();
    ensure!(count == notes.len() && printed.contains("removed"), "{printed}");
    ensure!(running.agents[2].exit_code(LIMIT)? == 3, "{}", running.agents[2].output());
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let status = Command::new("cp").args(["-a", path_text(from)?, path_text(to)?]).status()?;
    ensure!(status.success(), "copying {}", from.display());
    Ok(())
}

/// Folders of discovery's state: the database and the ledger.
const STATE_FOLDERS: [&str; 2] = ["pg", "discovery-ledger"];

fn back_up_state(testbed: &mut Testbed) -> Result<()> {
    testbed.stop_discovery()?;
    for part in STATE_FOLDERS {
        copy(&testbed.path(part), &testbed.path(&format!("{part}.kept")))?;
    }
    testbed.start_discovery()
}

fn restore_state(testbed: &mut Testbed) -> Result<()> {
    testbed.stop_discovery()?;
    for part in STATE_FOLDERS {
        fs_err::remove_dir_all(testbed.path(part))?;
        fs_err::rename(testbed.path(&format!("{part}.kept")), testbed.path(part))?;
    }
    testbed.start_discovery()
}

/// Discovery is restored to a state before the revocation of an operator, so it accepts her orders
/// again. The statement chain in the cluster's own store shows that she was revoked.
#[test]
fn a_revoked_operators_order_is_refused_after_a_restore_of_discovery() -> Result<()> {
    let testbed = Testbed::start(Network::loopback(3), Default::default())?;
    let key = testbed.path("eve.pem");
    testbed.admin_command(&["key", "new", "--out", path_text(&key)?])?;
    let public = fs_err::read_to_string(key.with_extension("pub"))?;
    testbed.admin_command(&["admin", "add", "eve", public.trim(), "--role", "operator"])?;
    let mut running = FormedCluster::form(testbed, 3, None)?;
    let etcdctl = running.etcdctl()?;
    let statements = || etcdctl.run(&["get", "muster/v1/statements", "--print-value-only"]);
    let first = wait_for("the chain to be in the cluster", LIMIT, || {
        statements().ok().filter(|text| text.starts_with("[\"ey"))
    })?;
    back_up_state(&mut running.testbed)?;

    running.testbed.admin_command(&["admin", "revoke", "eve", "--yes"])?;
    running.testbed.admin_command(&["cluster", "restate", "demo"])?;
    wait_for("the cluster to have the longer chain", LIMIT, || {
        statements().ok().filter(|text| text.len() > first.len())
    })?;
    for agent in &mut running.agents {
        agent.wait_for_output("made a new statement", LIMIT)?;
    }
    let name = running.name(&running.agents[2])?;
    // Stop the agents, because running agents would give the restored service the statement that it
    // lacks.
    for agent in &mut running.agents {
        agent.kill();
    }
    restore_state(&mut running.testbed)?;
    let order = || -> Result<()> {
        let order = ["intent", "remove", "demo", &name, "--yes", "--key", path_text(&key)?];
        let output = running.testbed.admin_output(&order)?;
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "the restored service refuses her order: {printed}");
        Ok(())
    };
    order()?;
    // Restarted agents know only what is on their disks.
    for agent in &mut running.agents {
        agent.start()?;
    }
    let refused = || running.agents.iter().any(|agent| agent.output().contains("that is refused"));
    wait_for("an agent to refuse her order", LIMIT, || refused().then_some(()))?;
    // Discovery shows the order as refused, with the reason, because an agent has reported that.
    let ended = poll_slowly("her order to end", LIMIT, || {
        let list = running.testbed.admin_json(&["intent", "list", "demo", "--all"]).ok()?;
        let order = list["intents"].as_array()?.last()?.clone();
        (order["state"] == "refused").then_some(order)
    })?;
    let missing = ended["explain"][0]["missing"].to_string();
    ensure!(missing.contains("newest statement"), "{missing}");
    std::thread::sleep(OBSERVATION_TIME);
    running.wait_members(3)?;
    // An operator who was not revoked can still give orders.
    ensure!(running.members()?.contains_key(&peer_url(&running.agents[2])));
    running.remove(&running.agents[2])?;
    running.wait_members(2)?;
    Ok(())
}

/// Moves a member to another address by an order. The member's peers must reach it there, and so
/// must clients, which verify the member's certificate.
fn check_move_by_order(node: Option<&Path>) -> Result<()> {
    let mut running = FormedCluster::start(Network::loopback(4), 3, node)?;
    let etcdctl = running.etcdctl()?;
    let writer = RetryingWriter::start_with_tls(
        etcdctl.endpoints()[1..].to_vec(),
        Some(tls_from(etcdctl.credentials())?),
    );
    let name = running.name(&running.agents[0])?;
    let elsewhere = running.testbed.network.hosts[3].clone();
    let url = format!("https://{}:2380", elsewhere.address);
    running.order(&["update", "demo", &name, "--peer-url", &url])?;
    let moved = &mut running.agents[0];
    ensure!(moved.terminate(LIMIT)? == 0, "{}", moved.output());
    moved.host = elsewhere;
    moved.start()?;
    let own = running.etcdctl()?.with_endpoint(&running.agents[0].host);
    poll_slowly("the member to serve at its new address", LIMIT, || {
        own.run(&["put", "k", "v"]).ok()
    })
    .with_context(|| last_lines(&running.agents[0].output(), 25))?;
    let client = format!("https://{}:2379", running.agents[0].host.address);
    poll_slowly("the cluster to list the new address", LIMIT, || {
        let list = own.json(&["member", "list"]).ok()?;
        let is_it = |member: &&Value| member["peerURLs"] == json!([url]);
        let found = list["members"].as_array()?.iter().find(is_it)?;
        (found["clientURLs"] == json!([client]) && found["name"] == name.as_str()).then_some(())
    })?;
    writer.stop_and_check(&client)?;
    poll_slowly("the moved node to be ready for its agent", LIMIT, || {
        (running.agents[0].status().ok()?["node_health"]["ready"] == true).then_some(())
    })?;
    // Stop another member, so that the moved member is needed for the quorum. Then check that the
    // moved member's agent restarts without flags for the address.
    running.agents[1].terminate(LIMIT)?;
    poll_slowly("a write without the stopped member", LIMIT, || own.run(&["put", "k", "w"]).ok())?;
    running.agents[0].terminate(LIMIT)?;
    running.agents[0].start_without_address()?;
    poll_slowly("the member to serve again", LIMIT, || own.run(&["put", "k", "x"]).ok())
        .with_context(|| last_lines(&running.agents[0].output(), 25))?;
    running.agents[1].start()?;
    Ok(())
}

#[test]
fn a_member_moves_by_order_and_serves_at_its_new_address() -> Result<()> {
    check_move_by_order(None)
}

#[test]
fn a_member_that_runs_etcd_3_4_moves_by_order() -> Result<()> {
    stock_etcd::oldest().map_or(Ok(()), |etcd| check_move_by_order(Some(&etcd)))
}

#[test]
fn a_member_that_runs_the_newest_etcd_moves_by_order() -> Result<()> {
    let work = Path::new(env!("CARGO_TARGET_TMPDIR"));
    stock_etcd::newest(work).map_or(Ok(()), |etcd| check_move_by_order(Some(&etcd)))
}
