//! Tokens that require an identity document of the host's virtual machine, from the first seat to
//! the replacement of a dead member.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use muster_identity::fixtures;
use muster_tests::harness::formed_cluster::{AFTER, FormedCluster, LIMIT, peer_url};
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{AgentProcess, Network, Testbed};

use crate::metadata;
use crate::replacements::policy;

/// Cloud account to which the policy's hosts must belong.
const ACCOUNT: &str = "123456789012";

/// Makes an agent whose simulated cloud gives it an identity document of this instance.
fn agent_on(
    running: &FormedCluster,
    host: usize,
    bundle: &Path,
    instance: &str,
) -> Result<AgentProcess> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let metadata = metadata::serve(fixtures::aws(ACCOUNT, instance, now - 60).text)?;
    let cloud = [AFTER, ("MUSTER_IDENTITY_FROM", "aws"), ("MUSTER_METADATA_URL", &*metadata)];
    Ok(running.agent(host, bundle, &cloud))
}

/// A cluster forms and replaces a dead member by a policy that requires machines of one account.
/// Hosts with the same bundle but without a document, or with a member's document, must be refused.
#[test]
fn a_policys_bundle_requires_a_machine_of_the_account() -> Result<()> {
    let keys = tempfile::tempdir()?;
    fs_err::write(keys.path().join("aws.pem"), fixtures::CERTIFICATE)?;
    let mut options = TestbedOptions::default();
    let folder = path_text(keys.path())?.to_owned();
    options.serve_args.extend(["--identity-keys".to_owned(), folder]);
    let testbed = Testbed::start(Network::loopback(7), options)?;
    testbed.create_cluster("demo", 3, &[])?;
    let required = format!("aws:account={ACCOUNT},max-age=1h");
    let (bundle, id) = policy(&testbed, "group", &["--require", &required])?;
    let mut running = FormedCluster::with_agents(testbed, None)?;

    let mut thief = running.agent(5, &bundle, &[AFTER]);
    thief.start()?;
    let code = thief.exit_code(LIMIT)?;
    ensure!(code == 3, "{code}: {}", thief.output());
    ensure!(thief.output().contains("--identity-from"), "{}", thief.output());

    for (host, instance) in ["i-1", "i-2", "i-3"].into_iter().enumerate() {
        let mut agent = agent_on(&running, host, &bundle, instance)?;
        agent.start()?;
        running.agents.push(agent);
    }
    running.testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let shown = running.testbed.admin_json(&["token", "show", &id])?;
    let hosts = shown["redemptions"].as_array().context("redemptions")?;
    let has_instance = |name: &str| hosts.iter().any(|host| host["instance"] == name);
    ensure!(hosts.len() == 3 && has_instance("aws:i-1") && has_instance("aws:i-3"), "{shown}");

    // A thief has the bundle, and the identity document of a member's virtual machine.
    let mut copy = agent_on(&running, 6, &bundle, "i-2")?;
    copy.start()?;
    let code = copy.exit_code(LIMIT)?;
    ensure!(code == 3, "{code}: {}", copy.output());
    ensure!(copy.output().contains("aws:i-2 is member"), "{}", copy.output());

    let mut dead = running.agents.pop().context("a third agent")?;
    let gone = peer_url(&dead);
    dead.kill();
    dead.kill_node()?;
    let mut fresh = agent_on(&running, 4, &bundle, "i-4")?;
    fresh.start()?;
    running.wait_replaced(&fresh, &gone)?;
    Ok(())
}
