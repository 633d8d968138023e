//! A newer version of Muster has continued the statement chain in the cluster's store. Agents find
//! the chain there, but can't read it.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use discovery_types::digest::Digest;
use discovery_types::jws::{Jws, JwsType};
use discovery_types::key::SigningKey;
use muster_tests::harness::formed_cluster::{FormedCluster, LIMIT};
use muster_tests::harness::{AgentProcess, Network, poll_slowly, wait_for};
use serde_json::Value;

/// Key of the statement chain in the cluster's store.
const STATEMENTS: &str = "muster/v1/statements";
/// Time for which agents are watched while they must not act. Agents read the chain each second or
/// two.
const OBSERVATION_TIME: Duration = Duration::from_secs(6);
const VERSION_ERROR: &str = "made by a newer Muster (version 3); this program knows 2: upgrade it";

/// Returns a stored chain with one more statement, which the owner has signed. The statement has
/// version 3, and a JSON member that today's programs don't know.
fn with_newer_version(chain: &str, owner: &SigningKey) -> Result<String> {
    let mut chain: Vec<Jws> = serde_json::from_str(chain)?;
    let last = chain.last().context("a statement")?;
    let mut next: Value = last.claims_unverified(JwsType::Statement)?;
    next["version"] = 3.into();
    next["seq"] = (next["seq"].as_u64().context("a number")? + 1).into();
    next["previous"] = Digest::of(last.as_str().as_bytes()).to_string().into();
    next["added_in_version_3"] = "anything".into();
    chain.push(Jws::sign(JwsType::Statement, owner, &next));
    Ok(serde_json::to_string(&chain)?)
}

/// Each agent logs the reason, and a restart changes nothing. No change of members is made until
/// the store holds a chain that the agents can read.
#[test]
fn agents_leave_a_newer_programs_chain_unchanged_and_the_cluster_still_serves() -> Result<()> {
    let mut running = FormedCluster::start(Network::loopback(3), 3, None)?;
    let etcdctl = running.etcdctl()?;
    let stored = || -> Result<String> {
        Ok(etcdctl.run(&["get", STATEMENTS, "--print-value-only"])?.trim().to_owned())
    };
    let readable = wait_for("the chain to be in the cluster", LIMIT, || {
        stored().ok().filter(|text| text.starts_with("[\"ey"))
    })?;
    let owner = SigningKey::from_pem(&fs_err::read_to_string(running.testbed.admin_key())?)?;
    let newer = with_newer_version(&readable, &owner)?;
    etcdctl.run(&["put", STATEMENTS, &newer])?;

    let told = |agents: &[AgentProcess]| {
        agents.iter().any(|agent| agent.output().contains(VERSION_ERROR)).then_some(())
    };
    wait_for("the leader's agent to say why it leaves the chain", LIMIT, || told(&running.agents))?;
    let name = running.name(&running.agents[2])?;
    running.testbed.admin_command(&["intent", "remove", "demo", &name, "--yes"])?;
    poll_slowly("discovery to show why nobody carries the order out", LIMIT, || {
        let list = running.testbed.admin_json(&["intent", "list", "demo"]).ok()?;
        list["intents"][0]["explain"].to_string().contains(VERSION_ERROR).then_some(())
    })
    .with_context(|| format!("{:?}", running.testbed.admin_json(&["intent", "list", "demo"])))?;
    for agent in &mut running.agents {
        agent.kill();
        agent.start()?;
    }
    std::thread::sleep(OBSERVATION_TIME);
    ensure!(stored()? == newer, "the chain was changed");
    running.wait_members(3)?;
    for agent in &mut running.agents {
        ensure!(agent.is_running(), "{}", agent.output());
        let own = etcdctl.with_endpoint(&agent.host);
        own.run(&["put", "k", "v"])?;
        ensure!(own.run(&["get", "k", "--print-value-only"])?.trim() == "v");
    }

    etcdctl.run(&["put", STATEMENTS, &readable])?;
    poll_slowly("the order to be carried out", LIMIT, || {
        (running.members().ok()?.len() == 2).then_some(())
    })
    .with_context(|| running.agents[0].output())
}
