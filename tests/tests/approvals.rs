//! Clusters in which an issuer approves each host before it can be a founder, with the built
//! programs. A stranger with a stolen bundle gets no seat in the list.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::agents::AgentOptions;
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{AgentProcess, Network, Testbed, poll_slowly};

const LIMIT: Duration = Duration::from_secs(60);

/// Returns the public key that an agent has logged.
fn logged_key(agent: &AgentProcess) -> Option<String> {
    let output = agent.output();
    let line = output.lines().find(|line| line.contains("a new key was made for this host"))?;
    let rest = &line[line.find("ed25519:")?..];
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == ':' || c == '-' || c == '_';
    Some(rest.chars().take_while(|c| is_part(*c)).collect())
}

fn key_of(agent: &AgentProcess) -> Result<String> {
    poll_slowly("the agent to log its key", LIMIT, || logged_key(agent))
}

/// Approves an agent, as soon as the service knows it.
fn approve(testbed: &Testbed, key: &str) -> Result<()> {
    poll_slowly("the host to be known", LIMIT, || {
        let approved = testbed.admin_output(&["cluster", "approve", "demo", "--agent", key]);
        approved.ok()?.status.success().then_some(())
    })
    .with_context(|| key.to_owned())
}

/// A thief with a copy of the bundle comes first, with as many hosts as the cluster has seats. The
/// issuer compares the keys of the three legitimate hosts, and they form the cluster.
#[test]
fn hosts_with_a_stolen_bundle_get_no_seat_in_the_list() -> Result<()> {
    let testbed = Testbed::start(Network::loopback(6), TestbedOptions::default())?;
    testbed.create_cluster("demo", 3, &["--approve"])?;
    let bundle = testbed.create_token("demo")?;
    let mut strangers = testbed.start_agents(3..6, &bundle)?;
    poll_slowly("the strangers to have all seats", LIMIT, || {
        let shown = testbed.admin_json(&["cluster", "show", "demo"]).ok()?;
        (shown["seated"] == 3).then_some(())
    })?;
    let explained = testbed.admin_command(&["cluster", "explain", "demo"])?;
    ensure!(explained.contains("an issuer has not approved these hosts yet"), "{explained}");
    ensure!(explained.contains("cluster approve demo"), "{explained}");

    let unasked = testbed.admin_output(&["cluster", "approve", "demo"])?;
    let text = String::from_utf8_lossy(&unasked.stderr).into_owned();
    ensure!(unasked.status.code() == Some(2) && text.contains("no terminal to ask on"), "{text}");

    let hosts = testbed.start_agents(0..3, &bundle)?;
    let keys = hosts.iter().map(key_of).collect::<Result<Vec<_>>>()?;
    for key in &keys {
        approve(&testbed, key)?;
    }
    let formed = testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let seats = formed["seats"].as_array().context("seats")?;
    let of_founders: Vec<_> = seats.iter().filter(|seat| seat["seat"].is_number()).collect();
    ensure!(
        of_founders.len() == 3
            && of_founders
                .iter()
                .all(|seat| keys.iter().any(|key| seat["agent_key"] == key.as_str())),
        "{formed}"
    );
    for stranger in &mut strangers {
        let code = stranger.exit_code(LIMIT)?;
        ensure!(code == 3, "a stranger ended with {code}: {}", stranger.output());
    }
    let late = testbed.admin_output(&["cluster", "approve", "demo"])?;
    let text = String::from_utf8_lossy(&late.stderr).into_owned();
    ensure!(late.status.code() == Some(2) && text.contains("its founders are decided"), "{text}");
    Ok(())
}

#[test]
fn a_cluster_without_approvals_refuses_them() -> Result<()> {
    let testbed = Testbed::start(Network::loopback(1), TestbedOptions::default())?;
    testbed.create_cluster("demo", 1, &[])?;
    let key = testbed.admin_command(&["key", "show", path_text(&testbed.admin_key())?])?;
    let refused = testbed.admin_output(&["cluster", "approve", "demo", "--agent", key.trim()])?;
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(refused.status.code() == Some(2) && text.contains("needs no approvals"), "{text}");
    Ok(())
}

/// Approvals and zones in one cluster. The service is killed between two approvals, and the
/// approvals must survive that. The founders must be the approved hosts, one of each zone.
#[test]
fn approvals_and_zones_hold_together_over_a_crash_of_the_service() -> Result<()> {
    let mut testbed = Testbed::start(Network::loopback(5), TestbedOptions::default())?;
    testbed.create_cluster("demo", 3, &["--approve", "--spread", "zone"])?;
    let bundle = testbed.create_token("demo")?;
    // The fourth host is in the zone of the first one. The fourth is approved, and the first isn't.
    // The fifth host is never approved.
    let agents: Vec<AgentProcess> = ["a", "b", "c", "a", "b"]
        .iter()
        .enumerate()
        .map(|(host, zone)| {
            let env = vec![("MUSTER_ZONE".to_owned(), (*zone).to_owned())];
            let options = AgentOptions { env, ..AgentOptions::default() };
            let mut agent = testbed.agent_with(host, &bundle, options);
            agent.start()?;
            Ok(agent)
        })
        .collect::<Result<_>>()?;
    let keys = agents.iter().map(key_of).collect::<Result<Vec<_>>>()?;
    for host in [3, 1] {
        approve(&testbed, &keys[host])?;
    }
    testbed.kill_discovery();
    testbed.start_discovery()?;
    approve(&testbed, &keys[2])?;
    let formed = testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let seats = formed["seats"].as_array().context("seats")?;
    let mut founders: Vec<&str> = seats
        .iter()
        .filter(|seat| seat["seat"].is_number())
        .filter_map(|seat| seat["agent_key"].as_str())
        .collect();
    let mut expected = [&*keys[1], &keys[2], &keys[3]];
    founders.sort_unstable();
    expected.sort_unstable();
    ensure!(founders == expected, "{formed}");
    Ok(())
}
