//! Members that are spread over zones: while the cluster forms, when hosts join, and when a dead
//! member is replaced by a policy.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::formed_cluster::{AFTER, FormedCluster, LIMIT, peer_url};
use muster_tests::harness::testbed::TestbedOptions;
use muster_tests::harness::{AgentProcess, Network, Testbed, poll_slowly};

use crate::metadata;
use crate::replacements::policy;

/// Starts an agent that reports this zone.
fn start_in(
    running: &FormedCluster,
    host: usize,
    bundle: &Path,
    zone: &str,
) -> Result<AgentProcess> {
    let mut agent = running.agent(host, bundle, &[AFTER, ("MUSTER_ZONE", zone)]);
    agent.start()?;
    Ok(agent)
}

/// Three members get three zones. A fourth host of the first zone waits, and `explain` says why.
/// Join tickets let a zone have as many members as the grown cluster allows, and no more.
#[test]
fn no_zone_gets_a_majority_while_forming_and_when_hosts_join() -> Result<()> {
    let testbed = Testbed::start(Network::loopback(6), TestbedOptions::default())?;
    testbed.create_cluster("demo", 3, &["--spread", "zone"])?;
    let (bundle, _) = policy(&testbed, "group", &[])?;
    let mut running = FormedCluster::with_agents(testbed, None)?;

    let mut nowhere = running.agent(5, &bundle, &[]);
    nowhere.start()?;
    nowhere
        .wait_for_output("says no zone, and the cluster was created with --spread zone", LIMIT)?;
    nowhere.kill();

    running.agents.push(start_in(&running, 0, &bundle, "a")?);
    running.agents.push(start_in(&running, 1, &bundle, "b")?);
    poll_slowly("two seats", LIMIT, || {
        let shown = running.testbed.admin_json(&["cluster", "show", "demo"]).ok()?;
        (shown["seated"] == 2).then_some(())
    })?;
    let crowded = start_in(&running, 3, &bundle, "a")?;
    poll_slowly("explain to name the zones", LIMIT, || {
        let text = running.testbed.admin_command(&["cluster", "explain", "demo"]).ok()?;
        let parts = ["their zones have all the seats", "a has 1 of 1", "--zone ZONE"];
        parts.iter().all(|part| text.contains(part)).then_some(())
    })
    .with_context(|| {
        format!("{:?}", running.testbed.admin_command(&["cluster", "explain", "demo"]))
    })?;
    running.agents.push(start_in(&running, 2, &bundle, "c")?);
    running.testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    drop(crowded);

    // A grown cluster of four may have two members in one zone. A cluster of five may not have
    // three.
    for (host, zone) in [(3, "a"), (4, "a")] {
        let ticket = running.ticket(&format!("ticket-{host}"), &[])?;
        let mut agent = running.agent(host, &ticket, &[("MUSTER_ZONE", zone)]);
        // Delete the data directory of the host's earlier agent, which waited while the cluster
        // formed.
        let _ = fs_err::remove_dir_all(&agent.data_dir);
        agent.start()?;
        if host == 3 {
            running.wait_voter(&agent, 4)?;
            running.agents.push(agent);
        } else {
            let code = agent.exit_code(LIMIT)?;
            ensure!(code == 3, "{code}: {}", agent.output());
            let text = "is in the zone a, which may have 2 of 5 members and has them";
            ensure!(agent.output().contains(text), "{}", agent.output());
        }
    }
    Ok(())
}

/// Of two standbys, only the one whose zone has room takes a dead member's place.
#[test]
fn a_standby_in_a_crowded_zone_lets_another_one_pass() -> Result<()> {
    let testbed = Testbed::start(Network::loopback(5), TestbedOptions::default())?;
    testbed.create_cluster("demo", 3, &["--spread", "zone"])?;
    let (bundle, _) = policy(&testbed, "group", &[])?;
    let mut running = FormedCluster::with_agents(testbed, None)?;
    for (host, zone) in [(0, "a"), (1, "b"), (2, "c")] {
        running.agents.push(start_in(&running, host, &bundle, zone)?);
    }
    running.testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let mut crowded = start_in(&running, 3, &bundle, "a")?;
    crowded.wait_for_output("waiting for the cluster to add this host", LIMIT)?;
    let mut dead = running.agents.pop().context("a third agent")?;
    let gone = peer_url(&dead);
    dead.kill();
    dead.kill_node()?;
    running.wait_reason("the zone a, which may have 1 of 3 members and has them")?;
    // The last host learns its zone from its cloud's metadata service.
    let metadata = metadata::serve("projects/1/zones/d".to_owned())?;
    let cloud = [AFTER, ("MUSTER_ZONE_FROM", "gcp"), ("MUSTER_METADATA_URL", &*metadata)];
    let mut fits = running.agent(4, &bundle, &cloud);
    fits.start()?;
    running.wait_replaced(&fits, &gone)?;
    ensure!(!running.is_voter(&crowded), "{:?}", running.members());
    ensure!(fits.output().contains("the cloud has named this host's zone"), "{}", fits.output());
    let shown = running.testbed.admin_json(&["cluster", "show", "demo"])?;
    let members = shown["present"]["members"].as_array().context("members")?;
    ensure!(members.iter().any(|member| member["zone"] == "d"), "{shown}");
    Ok(())
}
