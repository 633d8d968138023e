//! Moves members to new addresses one after another, while the data stays readable and writable.
//! The agents get their address as a flag, as an operator would set it.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::agents::AgentOptions;
use muster_tests::harness::process::last_lines;
use muster_tests::harness::programs::program_path;
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{AgentProcess, Network, TestHost, Testbed, poll_slowly};
use muster_tests::stock_etcd;

const LIMIT: Duration = Duration::from_secs(60);
const SIZE: usize = 3;

/// Runs `muster-agent member` on this agent's host, and returns its output.
fn member(agent: &AgentProcess, arguments: &[&str]) -> Result<String> {
    let mut command = agent.host.command(program_path("muster-agent")?);
    command.arg("member").args(arguments).args(["--data-dir", path_text(&agent.data_dir)?]);
    let output = command.output()?;
    let (out, error) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(
        output.status.success(),
        "member {arguments:?}: {error}\n{}",
        last_lines(&agent.output(), 25)
    );
    Ok(out.into_owned())
}

fn move_all_members(
    testbed: &Testbed,
    agents: &mut [AgentProcess],
    homes: &[TestHost],
) -> Result<()> {
    let founders: Vec<&TestHost> = homes[..SIZE].iter().collect();
    testbed.etcdctl("demo", &founders)?.run(&["put", "before", "x"])?;
    for at in 0..SIZE {
        let home = homes[SIZE + at].clone();
        let name = agents[at].status()?["name"].as_str().context("a name")?.to_owned();
        let url = format!("https://{}:2380", home.address);
        member(&agents[(at + 1) % SIZE], &["update", &name, "--peer-urls", &url])?;
        agents[at].terminate(LIMIT)?;
        agents[at].host = home;
        agents[at].start()?;
        // Waits until all members answer at their addresses, with certificates that clients accept
        // there.
        member(&agents[(at + 1) % SIZE], &["wait", "--patience", "90"])?;
    }
    let moved: Vec<&TestHost> = homes[SIZE..].iter().collect();
    for host in &moved {
        let found = testbed.etcdctl("demo", &[host])?.run(&["get", "before"])?;
        ensure!(found.contains('x'), "{}: {found}", host.address);
    }
    // A member keeps its new address if its agent restarts without the flag for the address.
    let agent = &mut agents[0];
    agent.terminate(LIMIT)?;
    agent.start_without_address()?;
    poll_slowly("the restarted member to serve at its new address", LIMIT, || {
        let own = testbed.etcdctl("demo", &moved[..1]).ok()?;
        own.run(&["put", "after", "x"]).ok()
    })
    .with_context(|| last_lines(&agents[0].output(), 25))?;
    Ok(())
}

fn all_machines_get_new_addresses(node: Option<&std::path::Path>) -> Result<()> {
    let network = Network::loopback(2 * u8::try_from(SIZE)?);
    let homes = network.hosts.clone();
    let testbed = Testbed::start(network, TestbedOptions::default())?;
    let bundle = testbed.create_cluster_with_token("demo", SIZE)?;
    let args = match node {
        Some(node) => vec!["--node-binary".to_owned(), path_text(node)?.to_owned()],
        None => Vec::new(),
    };
    let mut agents = Vec::new();
    for host in 0..SIZE {
        let options = AgentOptions { args: args.clone(), ..AgentOptions::default() };
        let mut agent = testbed.agent_with(host, &bundle, options);
        agent.start()?;
        agents.push(agent);
    }
    testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let moved = move_all_members(&testbed, &mut agents, &homes);
    moved.with_context(|| last_lines(&agents[0].output(), 40))
}

#[test]
fn all_machines_get_new_addresses_one_by_one() -> Result<()> {
    all_machines_get_new_addresses(None)
}

#[test]
fn all_machines_of_a_stock_etcd_get_new_addresses_one_by_one() -> Result<()> {
    let Some(etcd) = stock_etcd::oldest() else { return Ok(()) };
    all_machines_get_new_addresses(Some(&etcd))
}
