//! Clusters whose hosts an issuer approves before they can be founders, with the built programs: a
//! stranger with a stolen bundle gets no seat in the list.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::testbed::TestbedOptions;
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

/// A thief with a copy of the bundle comes first, with as many hosts as the cluster has seats. The
/// issuer compares the keys of the three right hosts, and they form the cluster.
#[test]
fn hosts_with_a_stolen_bundle_get_no_seat_in_the_list() -> Result<()> {
    let testbed = Testbed::start(Network::loopback(6), TestbedOptions::default())?;
    testbed.create_cluster("demo", 3, &["--approve"])?;
    let bundle = testbed.create_token("demo")?;
    let strangers = testbed.start_agents(3..6, &bundle)?;
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
        poll_slowly("the host to be known", LIMIT, || {
            let approved = testbed.admin_output(&["cluster", "approve", "demo", "--agent", key]);
            approved.ok()?.status.success().then_some(())
        })
        .with_context(|| format!("{key} among {keys:?}"))?;
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
    for stranger in &strangers {
        ensure!(
            stranger.output().contains("has its members") || stranger.output().contains("standby")
        );
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
    let key = format!("ed25519:{}", "A".repeat(43));
    let refused = testbed.admin_output(&["cluster", "approve", "demo", "--agent", &key])?;
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(refused.status.code() == Some(2), "{text}");
    Ok(())
}
