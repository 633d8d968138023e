//! Somebody has stolen the bundle of a replacement policy, and perhaps a client certificate, too.
//! The tests show what that person can't do, and what it takes to undo what they can do.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use muster_tests::harness::agents::AgentOptions;
use muster_tests::harness::formed_cluster::{
    AFTER, FormedCluster, LIMIT, REPLACED, ZONE, peer_url,
};
use muster_tests::harness::{AgentProcess, poll_slowly, wait_for};
use serde_json::{Value, json};

use crate::hung_leader_agent::leader;
use crate::replacements::{form, kill_last};

/// Key of the policies' uses in the cluster's own store.
const USES: &str = "muster/v1/replacements";

/// The thief's hosts take the dead member's place and end at once, until the policy has no uses
/// left. The remaining members go on serving, and one raises an alarm. An operator's ticket fills
/// the place.
#[test]
fn hosts_that_never_start_use_up_the_policy_and_a_ticket_fills_the_place() -> Result<()> {
    let (mut running, bundle, id) = form(7, "2")?;
    running.restart_agents(&[AFTER, ZONE, ("MUSTER_STALLED_AFTER", "3")])?;
    kill_last(&mut running)?;
    for host in [3, 4] {
        let mut thief = running.agent(host, &bundle, &[AFTER, ZONE, ("MUSTER_CRASH_AT", "added")]);
        thief.start()?;
        thief.exit_code(REPLACED)?;
        running.wait_intents("replace", "stalled", host - 2)?;
        running.wait_members(2)?;
        running.etcdctl()?.run(&["put", "still", "served"])?;
    }
    let used = running.replacements()?;
    let stalled = used.iter().filter(|each| each["ended"] == "stalled");
    ensure!(stalled.count() == 2 && used.len() == 2, "{used:?}");

    let honest = running.standby(5, &bundle)?;
    running.wait_reason("has reached its limit: 2 replacements in 24 h")?;
    let reached = |agent: &AgentProcess| {
        agent.status().is_ok_and(|status| status["replacement_limit_reached"] == true)
    };
    wait_for("the leader's agent to raise an alarm", LIMIT, || {
        running.agents.iter().any(reached).then_some(())
    })?;
    ensure!(!running.is_voter(&honest), "{:?}", running.members());
    running.testbed.admin_command(&["policy", "revoke", &id, "--yes"])?;
    // Restart the agents without the limit of 3 s for a newcomer's progress. A newcomer with a
    // ticket may need longer.
    running.restart_agents(&[AFTER, ZONE])?;
    let newcomer = running.newcomer(6, &[])?;
    running.wait_voter(&newcomer, 3)
}

/// Returns a use under way, as a writer to the store can forge it: `thief` takes the place of
/// `victim`.
fn forged_use(
    running: &FormedCluster,
    policy: &str,
    victim: &AgentProcess,
    more: Value,
) -> Result<Value> {
    let list = running.testbed.admin_json(&["intent", "list", "demo"])?;
    let operation = &list["intents"][0]["intent"]["operation"];
    ensure!(operation.is_string(), "{list}");
    let status = running.etcdctl()?.json(&["endpoint", "status"])?;
    let raft_cluster =
        status[0]["Status"]["header"]["cluster_id"].as_u64().context("a cluster id")?;
    let mut forged = json!({
        "policy": policy,
        "operation": operation,
        "member": running.id(victim)?,
        "member_name": running.name(victim)?,
        "newcomer": "thief",
        "voters": 3,
        "raft_cluster": format!("{raft_cluster:016x}"),
        "began_at": SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs(),
    });
    let fields = more.as_object().context("fields")?.clone();
    forged.as_object_mut().context("fields")?.extend(fields);
    Ok(json!({ "version": 1, "uses": [forged] }))
}

/// A writer to the store says that a replacement of a living member is under way, or that the
/// thief's host fills a vacant place. The agents give the replacement up.
#[test]
fn a_forged_use_replaces_no_living_member() -> Result<()> {
    for (names_leader, more) in
        [(true, json!({})), (false, json!({})), (false, json!({ "fills_vacancy": true }))]
    {
        let (running, bundle, id) = form(4, "2")?;
        let mut thief = running.standby(3, &bundle)?;
        let before = running.members()?;
        let leader = leader(&running)?;
        let victim = if names_leader { leader } else { (leader + 1) % 3 };
        let forged = forged_use(&running, &id, &running.agents[victim], more.clone())?;
        running.etcdctl()?.run(&["put", USES, &forged.to_string()])?;
        let code = thief.exit_code(REPLACED)?;
        ensure!(code == 3, "{names_leader} {more}: {code} {}", thief.output());
        ensure!(running.members()? == before, "{more}: {:?}", running.members());
        let used = running.replacements()?;
        ensure!(used.len() == 1 && used[0]["ended"].is_string(), "{more}: {used:?}");
    }
    Ok(())
}

/// While the store has a count of uses that no agent can read, nobody is replaced: a person has to
/// look. Observations that somebody overwrites only delay a replacement.
#[test]
fn junk_in_the_store_stops_replacements_until_a_person_deletes_it() -> Result<()> {
    let (mut running, bundle, _) = form(4, "2")?;
    let standby = running.standby(3, &bundle)?;
    let etcdctl = running.etcdctl()?;
    for agent in &running.agents {
        let key = format!("muster/v1/observations/{}", running.id(agent)?);
        etcdctl.run(&["put", &key, "junk"])?;
    }
    etcdctl.run(&["put", USES, "junk"])?;
    let before = running.members()?;
    let gone = kill_last(&mut running)?;
    running.wait_reason("the count of replacements in the cluster's store can't be read")?;
    ensure!(running.members()? == before, "{:?}", running.members());
    running.etcdctl()?.run(&["del", USES])?;
    running.wait_replaced(&standby, &gone)
}

/// Two agents with the bundle wait on one machine, at one address. The first to be chosen becomes a
/// member. The other one is refused when the next member dies.
#[test]
fn of_two_standbys_at_one_address_one_becomes_a_member() -> Result<()> {
    let (mut running, bundle, _) = form(4, "2")?;
    let host = running.testbed.network.hosts[3].clone();
    let mut standbys = Vec::new();
    for number in 1..=2 {
        let (folder, log) = (format!("standby-{number}"), format!("standby-{number}.log"));
        let env = [AFTER, ZONE].map(|(name, value)| (name.to_owned(), value.to_owned()));
        let options = AgentOptions { env: env.to_vec(), ..AgentOptions::default() };
        let (data, log) = (running.testbed.path(&folder), running.testbed.path(&log));
        let mut agent = AgentProcess::new(host.clone(), data, bundle.clone(), log, options);
        agent.start()?;
        agent.wait_for_output("waiting for the cluster to add this host", LIMIT)?;
        standbys.push(agent);
    }
    let gone = kill_last(&mut running)?;
    running.wait_replaced(&standbys[0], &gone)?;
    running.wait_intents("replace", "promoted", 1)?;
    let waits = standbys.iter().position(|agent| agent.node_pid().is_none());
    let mut other = standbys.remove(waits.context("one that runs no node")?);

    let mut next = running.agents.pop().context("a founder")?;
    let dead = peer_url(&next);
    next.kill();
    next.kill_node()?;
    let code = other.exit_code(REPLACED)?;
    ensure!(code == 3 && other.output().contains("already"), "{code} {}", other.output());
    ensure!(running.members()?.contains_key(&dead), "nobody takes the second place");
    poll_slowly("the refusal to be known", LIMIT, || {
        let refused = running.intents().ok()?.iter().any(|(_, state)| state == "refused");
        refused.then_some(())
    })
}
