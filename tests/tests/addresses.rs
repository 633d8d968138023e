//! Hosts get other addresses, one of them or all at once, as by new DHCP leases. Nobody informs the
//! agents.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::client::tls_from;
use muster_tests::harness::formed_cluster::{FormedCluster, peer_url};
use muster_tests::harness::process::last_lines;
use muster_tests::harness::programs::program_path;
use muster_tests::harness::testbed::path_text;
use muster_tests::harness::{
    AgentProcess, Etcdctl, Network, RetryingWriter, poll_slowly, skip, wait_for,
};
use muster_tests::stock_etcd;
use serde_json::{Value, json};

/// Time limit for members to find each other at other addresses. Agents first wait for some
/// seconds, because an address may come back. Then they wait once more for the same time before
/// they look for their peers.
const LIMIT: Duration = Duration::from_secs(120);
/// Time after which members that have not found each other count as lost. A successful search is
/// quicker.
const LOST_TIME: Duration = Duration::from_secs(25);

/// Forms a cluster of three in namespaces of four hosts. `None` if this machine has no namespaces.
fn form(node: Option<&Path>) -> Result<Option<FormedCluster>> {
    match Network::namespaces(4) {
        Ok(network) => Ok(Some(FormedCluster::start(network, 3, node)?)),
        Err(error) => {
            skip::report_skip(format_args!("no network namespaces here: {error:#}"));
            Ok(None)
        }
    }
}

/// Gives the agents' hosts with these indexes other addresses. The last bytes of the addresses
/// count up from `first`.
fn move_hosts(running: &mut FormedCluster, hosts: std::ops::Range<usize>, first: u8) -> Result<()> {
    for (host, last) in hosts.zip(first..) {
        running.agents[host].host = running.testbed.network.change_address(host, last)?;
    }
    Ok(())
}

/// Waits until clients can write at the members' present addresses, and until the cluster lists
/// these addresses and no other.
fn wait_for_cluster(running: &FormedCluster) -> Result<Etcdctl> {
    let etcdctl = running.etcdctl()?;
    let logs = || {
        let last = running.agents.iter().map(|agent| last_lines(&agent.output(), 25));
        format!("{:?}\n{}", running.members(), last.collect::<Vec<_>>().join("\n\n"))
    };
    poll_slowly("all members to take writes at their new addresses", LIMIT, || {
        let each = running
            .agents
            .iter()
            .map(|agent| etcdctl.with_endpoint(&agent.host).run(&["put", "after", "y"]).ok());
        each.collect::<Option<Vec<_>>>()
    })
    .with_context(logs)?;
    poll_slowly("the cluster to list the new addresses", LIMIT, || {
        let members = running.members().ok()?;
        let are_listed = running.agents.iter().all(|agent| members.contains_key(&peer_url(agent)));
        (members.len() == running.agents.len() && are_listed).then_some(())
    })
    .with_context(logs)?;
    Ok(etcdctl)
}

/// Waits until discovery lists the members' present addresses.
fn wait_for_discovery(running: &FormedCluster) -> Result<()> {
    poll_slowly("discovery to list the new addresses", LIMIT, || {
        let shown = running.testbed.admin_json(&["cluster", "show", "demo"]).ok()?.to_string();
        running.agents.iter().all(|agent| shown.contains(&peer_url(agent))).then_some(())
    })
}

/// All hosts are switched off, get other addresses and are switched on again. Later they get their
/// first addresses back, and another host joins.
#[test]
fn members_that_boot_with_other_addresses_form_their_cluster_again() -> Result<()> {
    let Some(mut running) = form(None)? else { return Ok(()) };
    running.etcdctl()?.run(&["put", "before", "x"])?;
    for first in [101, 11] {
        for agent in &mut running.agents {
            agent.kill();
            agent.kill_node()?;
        }
        move_hosts(&mut running, 0..3, first)?;
        for agent in &mut running.agents {
            agent.start()?;
        }
        let found = wait_for_cluster(&running)?.run(&["get", "before"])?;
        ensure!(found.contains('x'), "{found}");
    }
    wait_for_discovery(&running)?;
    let newcomer = running.newcomer(3, &[])?;
    running.wait_voter(&newcomer, 4)?;
    Ok(())
}

/// All addresses change under running nodes while discovery is down. The members can't find each
/// other until discovery is back. One member is down meanwhile, and comes back last.
#[test]
fn running_members_find_each_other_at_other_addresses_once_discovery_is_back() -> Result<()> {
    let Some(mut running) = form(None)? else { return Ok(()) };
    running.etcdctl()?.run(&["put", "before", "x"])?;
    running.agents[2].kill();
    running.agents[2].kill_node()?;
    running.testbed.stop_discovery()?;
    move_hosts(&mut running, 0..3, 101)?;
    std::thread::sleep(LOST_TIME);
    let first = running.etcdctl()?.with_endpoint(&running.agents[0].host);
    ensure!(first.run(&["put", "k", "v"]).is_err(), "without discovery nobody knows the addresses");
    running.testbed.start_discovery()?;
    let two = running.etcdctl()?.with_endpoint(&running.agents[1].host);
    poll_slowly("two members to be a majority", LIMIT, || two.run(&["put", "k", "v"]).ok())
        .with_context(|| last_lines(&running.agents[1].output(), 40))?;
    running.agents[2].start()?;
    let found = wait_for_cluster(&running)?.run(&["get", "before"])?;
    ensure!(found.contains('x'), "{found}");
    wait_for_discovery(&running)
}

/// Two hosts move one after the other, so that their cluster always has a leader. The third host
/// was off, and comes back at another address. It knows neither of the new addresses, and the
/// others don't know its own.
#[test]
fn a_member_that_was_off_finds_members_that_moved_one_after_the_other() -> Result<()> {
    let Some(mut running) = form(None)? else { return Ok(()) };
    running.etcdctl()?.run(&["put", "before", "x"])?;
    running.agents[2].kill();
    running.agents[2].kill_node()?;
    for (host, last) in [(0, 101), (1, 102)] {
        move_hosts(&mut running, host..host + 1, last)?;
        let moved = peer_url(&running.agents[host]);
        poll_slowly("the cluster to record the move", LIMIT, || {
            running.members().is_ok_and(|members| members.contains_key(&moved)).then_some(())
        })
        .with_context(|| last_lines(&running.agents[host].output(), 40))?;
    }
    move_hosts(&mut running, 2..3, 103)?;
    running.agents[2].start()?;
    let found = wait_for_cluster(&running)?.run(&["get", "before"])?;
    ensure!(found.contains('x'), "{found}");
    Ok(())
}

/// All hosts have moved, and discovery is lost. An operator carries address files from host to
/// host.
#[test]
fn members_find_each_other_by_files_without_discovery() -> Result<()> {
    let Some(mut running) = form(None)? else { return Ok(()) };
    running.etcdctl()?.run(&["put", "before", "x"])?;
    running.testbed.stop_discovery()?;
    move_hosts(&mut running, 0..3, 101)?;
    for agent in &mut running.agents {
        agent.wait_for_output("its agent tells the cluster", LIMIT)?;
    }
    let mut files = Vec::new();
    for (number, agent) in running.agents.iter().enumerate() {
        let file = running.testbed.path(&format!("{number}.address"));
        fs_err::write(&file, run_address(agent, &["show"])?)?;
        files.push(path_text(&file)?.to_owned());
    }
    // All address files may be copied to all hosts: each host ignores its own file.
    let add: Vec<&str> = ["add"].into_iter().chain(files.iter().map(String::as_str)).collect();
    for agent in &running.agents {
        let said = run_address(agent, &add)?;
        ensure!(said.lines().count() == 2, "{said}");
    }
    poll_slowly("the nodes to have a leader", LIMIT, || {
        let are_ready = running
            .agents
            .iter()
            .all(|agent| agent.status().is_ok_and(|status| status["node_health"]["ready"] == true));
        are_ready.then_some(())
    })
    .with_context(|| last_lines(&running.agents[0].output(), 40))?;
    // Start discovery before clients connect: they verify the names in certificates, and only
    // discovery makes certificates for the new addresses.
    running.testbed.start_discovery()?;
    let found = wait_for_cluster(&running)?.run(&["get", "before"])?;
    ensure!(found.contains('x'), "{found}");
    let foreign = running.testbed.path("foreign.address");
    let changed = fs_err::read_to_string(&files[1])?.replacen("\"proof\"", "\"proofs\"", 1);
    fs_err::write(&foreign, changed)?;
    let refused = run_address(&running.agents[0], &["add", path_text(&foreign)?]);
    let refused = format!("{:#}", refused.err().context("a damaged file is taken")?);
    ensure!(refused.contains("address show"), "{refused}");
    Ok(())
}

/// Runs `muster-agent address` on this agent's host, and returns its output.
fn run_address(agent: &AgentProcess, arguments: &[&str]) -> Result<String> {
    let mut command = agent.host.command(program_path("muster-agent")?);
    command.arg("address").args(arguments).arg("--data-dir").arg(&agent.data_dir);
    let output = command.output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// The leader's host gets another address, while clients write to the others.
fn check_one_member(node: Option<&Path>) -> Result<()> {
    let Some(mut running) = form(node)? else { return Ok(()) };
    let etcdctl = running.etcdctl()?;
    let moved = poll_slowly("a leader", LIMIT, || etcdctl.leader(&running.founders()))?;
    running.testbed.network.hub.enter_namespace()?;
    let mut others = etcdctl.endpoints().to_vec();
    others.remove(moved);
    let url = others[0].clone();
    let writer = RetryingWriter::start_with_tls(others, Some(tls_from(etcdctl.credentials())?));
    move_hosts(&mut running, moved..moved + 1, 101)?;
    wait_for_cluster(&running)?;
    writer.stop_and_check(&url)?;
    // Once the cluster has recorded the new address, the agent must not change it again, because an
    // operator may set an earlier address.
    let journal = running.agents[moved].data_dir.join("agent/journal.json");
    wait_for("the agent to journal the recorded address", LIMIT, || {
        let text = fs_err::read_to_string(&journal).ok()?;
        let journal: Value = serde_json::from_str(&text).ok()?;
        (journal["former_peer_urls"] == json!([]) && journal["moved"].is_object()).then_some(())
    })?;
    running.remove(&running.agents[(moved + 1) % 3])?;
    // Repeat the query: a member of etcd 3.4 answers from its own list, which may be older.
    poll_slowly("the cluster to have two members", LIMIT, || {
        running.members().is_ok_and(|members| members.len() == 2).then_some(())
    })
}

#[test]
fn a_leader_follows_its_host_to_another_address() -> Result<()> {
    check_one_member(None)
}

#[test]
fn a_leader_of_etcd_3_4_follows_its_host_to_another_address() -> Result<()> {
    stock_etcd::oldest().map_or(Ok(()), |etcd| check_one_member(Some(&etcd)))
}
