//! Replacement policies: a host with a policy's bundle takes the place of a dead member without an
//! operator. Replacements never exceed the limits that the operator signed.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::formed_cluster::{
    AFTER, FormedCluster, LIMIT, REPLACED, ZONE, peer_url,
};
use muster_tests::harness::process::{last_lines, send_signal};
use muster_tests::harness::programs::program_path;
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{AgentProcess, Network, Testbed, poll_slowly, skip, wait_for};
use muster_tests::stock_etcd;
use rustix::process::Signal;
use serde_json::Value;

/// Makes a policy, and returns its bundle and its id.
pub(super) fn policy(testbed: &Testbed, name: &str, more: &[&str]) -> Result<(PathBuf, String)> {
    let file = testbed.path(&format!("{name}.bundle"));
    let create = ["policy", "create", "--cluster", "demo", "--replace-dead", "--out"];
    let made = testbed.admin_json(&[&create[..], &[path_text(&file)?], more].concat())?;
    let id = made["id"].as_str().context("an id")?.to_owned();
    Ok((file, id))
}

/// Forms a cluster of three hosts with the bundle of a replacement policy alone.
fn form_by_policy(
    network: Network,
    at_most: &str,
    node: Option<&Path>,
) -> Result<(FormedCluster, PathBuf, String)> {
    let testbed = Testbed::start(network, TestbedOptions::default())?;
    testbed.create_cluster("demo", 3, &[])?;
    let (bundle, id) = policy(&testbed, "group", &["--at-most", at_most, "--zone", ZONE.1])?;
    let mut running = FormedCluster::with_agents(testbed, node)?;
    for host in 0..3 {
        let mut agent = running.agent(host, &bundle, &[AFTER, ZONE]);
        agent.start()?;
        running.agents.push(agent);
    }
    running.testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    Ok((running, bundle, id))
}

fn check_replacement(network: Network, node: Option<&Path>) -> Result<()> {
    let (mut running, bundle, id) = form_by_policy(network, "2", node)?;
    let mut standby = running.standby(3, &bundle)?;
    let shown = running.testbed.admin_command(&["cluster", "show", "demo"])?;
    ensure!(shown.contains("STANDBY") && shown.contains(&id), "{shown}");
    running.wait_members(3)?;
    // A standby that restarts keeps its place.
    ensure!(standby.terminate(LIMIT)? == 0, "{}", standby.output());
    standby.start()?;
    standby.wait_for_output("waiting for the cluster to add this host", LIMIT)?;
    ensure!(running.intents()?.len() == 1, "{:?}", running.intents());

    let mut dead = running.agents.pop().context("a third agent")?;
    let gone = peer_url(&dead);
    running.etcdctl()?.run(&["put", "before", "the death"])?;
    dead.kill();
    dead.kill_node()?;
    running.wait_replaced(&standby, &gone)?;
    running.wait_intents("replace", "promoted", 1)?;
    let used = running.replacements()?;
    ensure!(used.len() == 1 && used[0]["ended"] == "promoted", "{used:?}");
    ensure!(used[0].get("intent").is_none(), "the newcomer's intent is kept no longer: {used:?}");
    let own = running.etcdctl()?.with_endpoint(&standby.host);
    ensure!(own.run(&["get", "before", "--print-value-only"])?.trim() == "the death");

    // The dead member's host comes back. It must stay a removed member.
    dead.start()?;
    ensure!(dead.exit_code(LIMIT)? == 3, "{}", dead.output());
    running.wait_members(3)?;
    // After `muster-agent reset`, the dead member's host starts as a new host, and waits as a
    // standby.
    let mut command = dead.host.command(program_path("muster-agent")?);
    let reset = command.args(["reset", "--yes", "--data-dir"]).arg(&dead.data_dir).output()?;
    ensure!(reset.status.success(), "{}", String::from_utf8_lossy(&reset.stderr));
    dead.start()?;
    dead.wait_for_output("waiting for the cluster to add this host", LIMIT)?;
    running.wait_members(3)?;
    // The host that took the place restarts, and its member serves again. It needs no help of
    // discovery.
    ensure!(standby.terminate(LIMIT)? == 0, "{}", standby.output());
    standby.start()?;
    poll_slowly("the new member to serve again", LIMIT, || own.run(&["get", "before"]).ok())?;
    Ok(())
}

#[test]
fn a_standby_takes_the_place_of_a_dead_machine() -> Result<()> {
    match Network::namespaces(4) {
        Ok(network) => check_replacement(network, None),
        Err(error) => {
            skip::report_skip(format_args!("no network namespaces here: {error:#}"));
            check_replacement(Network::loopback(4), None)
        }
    }
}

#[test]
fn a_standby_takes_the_place_of_a_dead_member_of_the_newest_etcd() -> Result<()> {
    let Some(etcd) = stock_etcd::newest(Path::new(env!("CARGO_TARGET_TMPDIR"))) else {
        return Ok(());
    };
    check_replacement(Network::loopback(4), Some(&etcd))
}

/// A host that vanishes closes no connection. Stock etcd keeps its own connections to that host
/// until TCP gives up, which takes longer than this test waits.
#[test]
fn a_standby_takes_the_place_of_a_vanished_host_with_the_newest_etcd() -> Result<()> {
    let Some(etcd) = stock_etcd::newest(Path::new(env!("CARGO_TARGET_TMPDIR"))) else {
        return Ok(());
    };
    if !Network::can_be_cut() {
        return Ok(());
    }
    let (mut running, bundle, _) = form_by_policy(Network::namespaces(4)?, "2", Some(&etcd))?;
    let standby = running.standby(3, &bundle)?;
    running.testbed.network.set_link(2, false)?;
    let vanished = running.agents.pop().context("a third agent")?;
    running.wait_replaced(&standby, &peer_url(&vanished))
}

/// Forms a cluster of three by a policy that allows `at_most` replacements.
pub(super) fn form(hosts: u8, at_most: &str) -> Result<(FormedCluster, PathBuf, String)> {
    form_by_policy(Network::loopback(hosts), at_most, None)
}

/// Kills the last founder's agent and node, and returns its peer URL.
pub(super) fn kill_last(running: &mut FormedCluster) -> Result<String> {
    let mut dead = running.agents.pop().context("a founder")?;
    dead.kill();
    dead.kill_node()?;
    Ok(peer_url(&dead))
}

/// Two hosts wait when a member dies: one takes its place, and the other goes on waiting. When
/// another member dies, the policy has reached its limit.
#[test]
fn one_of_two_standbys_takes_the_place_and_the_limit_stops_the_other() -> Result<()> {
    let (mut running, bundle, id) = form(5, "1")?;
    let standbys = [running.standby(3, &bundle)?, running.standby(4, &bundle)?];
    let gone = kill_last(&mut running)?;
    poll_slowly("one standby to take the dead member's place", REPLACED, || {
        let members = running.members().ok()?;
        let come = standbys.iter().filter(|each| running.is_voter(each)).count();
        (members.len() == 3 && !members.contains_key(&gone) && come == 1).then_some(())
    })
    .with_context(|| format!("{:?} {:?}", running.members(), running.waits()))?;
    running.wait_intents("replace", "promoted", 1)?;
    running.wait_reason("all voters can be reached")?;

    let newcomer = standbys.iter().find(|each| running.is_voter(each)).context("a newcomer")?;
    newcomer.kill_node()?;
    let pid = newcomer.process_id().context("an agent")?;
    send_signal(pid, Signal::KILL);
    running.wait_reason("has reached its limit: 1 replacements in 24 h")?;
    let explained = running.testbed.admin_command(&["cluster", "show", "demo"])?;
    ensure!(explained.contains("reached its limit") && explained.contains(&id), "{explained}");
    let reached = |agent: &AgentProcess| {
        agent.status().is_ok_and(|status| status["replacement_limit_reached"] == true)
    };
    wait_for("the leader's agent to raise an alarm", LIMIT, || {
        running.agents.iter().any(reached).then_some(())
    })?;
    ensure!(running.replacements()?.len() == 1, "{:?}", running.replacements());
    running.wait_members(3)?;
    Ok(())
}

/// During an upgrade, an agent of an older version can't confirm the last replacement that a policy
/// allows. The replacement would pause, so it begins once that agent is upgraded.
#[test]
fn the_last_replacement_waits_for_the_upgrade_of_an_older_agent() -> Result<()> {
    const FEATURE: &str = "confirmed-replacements";
    let (mut running, bundle, _) = form(4, "1")?;
    let old = running.agents.get_mut(1).context("a second founder")?;
    let pair = ("MUSTER_AGENT_FEATURES".to_owned(), "0.0.9 statement-2 grant-2".to_owned());
    old.options.env.push(pair);
    old.kill();
    old.start()?;
    let waits_for_old = |text: &str| text.contains(FEATURE) && text.contains("(0.0.9)");
    poll_slowly("another member's agent to see the older version", LIMIT, || {
        let status = running.agents[0].status().ok()?;
        let is_lowest = status["lowest_agent_version"] == "0.0.9";
        (is_lowest && waits_for_old(&status["waiting_features"].to_string())).then_some(())
    })?;
    poll_slowly("the service to show the older version", LIMIT, || {
        let shown = running.testbed.admin_command(&["cluster", "explain", "demo"]).ok()?;
        waits_for_old(&shown).then_some(())
    })?;

    let standby = running.standby(3, &bundle)?;
    let gone = kill_last(&mut running)?;
    running.wait_reason("once these members' agents are upgraded")?;
    ensure!(running.replacements()?.is_empty(), "{:?}", running.replacements());
    let old = running.agents.get_mut(1).context("a second founder")?;
    old.options.env.pop();
    old.kill();
    old.start()?;
    running.wait_replaced(&standby, &gone)?;
    let used = running.replacements()?;
    ensure!(used.len() == 1, "{used:?}");
    Ok(())
}

/// A member that is unreachable for less time than the policy requires stays.
#[test]
fn a_member_that_comes_back_in_time_stays() -> Result<()> {
    let (mut running, bundle, _) = form(4, "2")?;
    // A killed agent and node can restart within 60 s, even on a loaded machine.
    running.restart_agents(&[("MUSTER_UNREACHABLE_AFTER", "60")])?;
    let standby = running.standby(3, &bundle)?;
    let before = running.members()?;
    for _ in 0..2 {
        let flapping = running.agents.last_mut().context("a founder")?;
        flapping.kill();
        flapping.kill_node()?;
        running.wait_reason("has been unreachable for")?;
        let flapping = running.agents.last_mut().context("a founder")?;
        flapping.start()?;
        running.wait_reason("all voters can be reached")?;
    }
    ensure!(running.members()? == before, "{:?}", running.members());
    ensure!(running.replacements()?.is_empty(), "{:?}", running.replacements());
    drop(standby);
    Ok(())
}

/// First only the leader can't reach a member, which must stay. Then no member reaches it, and it
/// must be replaced. Its node keeps running, and ends when it learns of its removal.
#[test]
fn a_member_that_only_the_leader_misses_stays_and_an_isolated_one_is_replaced() -> Result<()> {
    if !Network::can_be_cut() {
        return Ok(());
    }
    let (mut running, bundle, _) = form_by_policy(Network::namespaces(4)?, "2", None)?;
    let standby = running.standby(3, &bundle)?;
    let etcdctl = running.etcdctl()?;
    let leader = poll_slowly("a leader", LIMIT, || etcdctl.leader(&running.founders()))?;
    let missed = (leader + 1) % 3;
    let network = &running.testbed.network;
    network.cut(leader, missed)?;
    network.cut(missed, leader)?;
    running.wait_reason("1 of 3 voters' agents have observed")?;
    std::thread::sleep(Duration::from_secs(10));
    ensure!(running.replacements()?.is_empty(), "{:?}", running.replacements());
    ensure!(!running.is_voter(&standby), "{:?}", running.members());
    network.heal()?;
    running.wait_reason("all voters can be reached")?;

    network.set_link(missed, false)?;
    let mut isolated = running.agents.remove(missed);
    running.wait_replaced(&standby, &peer_url(&isolated))?;
    running.testbed.network.set_link(missed, true)?;
    ensure!(isolated.exit_code(LIMIT)? == 3, "{}", isolated.output());
    running.wait_members(3)?;
    Ok(())
}

/// An operator revokes the policy on a member's host, because discovery can't be trusted any more.
/// Discovery still serves the policy as valid.
#[test]
fn a_policy_that_was_revoked_in_the_cluster_replaces_nobody() -> Result<()> {
    let (mut running, bundle, id) = form(4, "2")?;
    let mut standby = running.standby(3, &bundle)?;
    let status = running.policy_command(&["revoke", &id])?.status()?;
    ensure!(status.success(), "{status}");
    kill_last(&mut running)?;
    let code = standby.exit_code(REPLACED)?;
    ensure!(code == 3 && standby.output().contains("was revoked"), "{code} {}", standby.output());
    ensure!(running.replacements()?.is_empty(), "{:?}", running.replacements());
    let shown = running.testbed.admin_json(&["policy", "show", &id])?;
    ensure!(shown["state"] == "valid", "discovery knows nothing of it: {shown}");
    Ok(())
}

#[test]
fn a_policy_that_was_revoked_at_discovery_ends_in_the_cluster_for_ever() -> Result<()> {
    let (running, bundle, id) = form(5, "2")?;
    let shown = running.testbed.admin_json(&["cluster", "show", "demo"])?;
    let members = shown["present"]["members"].as_array().context("members")?;
    ensure!(members.iter().all(|member| member["zone"] == ZONE.1), "{shown}");
    let mut elsewhere = running.agent(3, &bundle, &[AFTER, ("MUSTER_ZONE", "room-2")]);
    elsewhere.start()?;
    let code = elsewhere.exit_code(LIMIT)?;
    ensure!(code == 3 && elsewhere.output().contains("for the zone"), "{}", elsewhere.output());

    running.testbed.admin_command(&["policy", "revoke", &id, "--yes"])?;
    poll_slowly("the cluster's own store to have the revocation", LIMIT, || {
        let output = running.policy_command(&["list"]).ok()?.output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.contains(&format!("policy {id} is revoked")).then_some(())
    })?;
    let mut late = running.agent(4, &bundle, &[AFTER, ZONE]);
    late.start()?;
    let code = late.exit_code(LIMIT)?;
    ensure!(code == 3 && late.output().contains("was revoked"), "{code} {}", late.output());
    Ok(())
}

/// The agent beside the leader dies after each step of a replacement. The next agent must continue
/// the same replacement, which counts as one use of the policy.
#[test]
fn a_replacement_completes_though_the_leaders_agent_dies_after_each_step() -> Result<()> {
    for step in ["policy-used", "changed"] {
        let (mut running, bundle, _) = form(4, "2")?;
        running.restart_agents(&[AFTER, ZONE, ("MUSTER_CRASH_AT", step)])?;
        let standby = running.standby(3, &bundle)?;
        let gone = kill_last(&mut running)?;
        let is_done = |running: &FormedCluster| {
            let members = running.members().unwrap_or_default();
            members.len() == 3 && !members.contains_key(&gone) && running.is_voter(&standby)
        };
        running.revive_agents_until(step, is_done)?;
        let used = running.replacements()?;
        ensure!(used.len() == 1, "{step}: {used:?}");
    }
    Ok(())
}

/// A use of the policy is counted. Then the leader's agent and the newcomer die, and discovery
/// forgets the newcomer. The next agent must finish the replacement from the cluster's own store.
/// Otherwise the use would never end, and would block all others.
#[test]
fn a_replacement_that_discovery_has_forgotten_comes_to_an_end() -> Result<()> {
    let (mut running, bundle, _) = form(5, "2")?;
    running.restart_agents(&[
        AFTER,
        ("MUSTER_STALLED_AFTER", "3"),
        ("MUSTER_CRASH_AT", "policy-used"),
    ])?;
    let mut first = running.standby(3, &bundle)?;
    let gone = kill_last(&mut running)?;
    let crashed = poll_slowly("the leader's agent to count a use and die", REPLACED, || {
        running.agents.iter_mut().position(|agent| !agent.is_running())
    })?;
    first.kill();
    running.testbed.psql("DELETE FROM intents")?;
    running.agents[crashed].options.env.retain(|(name, _)| name != "MUSTER_CRASH_AT");
    running.agents[crashed].start()?;
    poll_slowly("the forgotten replacement to end", REPLACED, || {
        running.replacements().ok()?.first()?["ended"].as_str().map(drop)
    })
    .with_context(|| {
        let last = running.agents.iter().map(|agent| last_lines(&agent.output(), 25));
        format!("{:?}\n{}", running.replacements(), last.collect::<Vec<_>>().join("\n---\n"))
    })?;
    // Restart the agents without the limit of 3 s for a newcomer's progress. On a slow machine, the
    // next newcomer may need longer.
    running.restart_agents(&[AFTER])?;
    let second = running.standby(4, &bundle)?;
    running.wait_replaced(&second, &gone)
}

/// The first newcomer dies after the dead member was removed for it. The next newcomer fills the
/// place, which is a second use of the policy.
#[test]
fn a_place_that_a_dead_newcomer_left_is_filled_by_the_next_one() -> Result<()> {
    let (mut running, bundle, _) = form(5, "2")?;
    running.restart_agents(&[AFTER, ZONE, ("MUSTER_STALLED_AFTER", "3")])?;
    let mut first = running.agent(3, &bundle, &[AFTER, ZONE, ("MUSTER_CRASH_AT", "added")]);
    first.start()?;
    first.wait_for_output("waiting for the cluster to add this host", LIMIT)?;
    let gone = kill_last(&mut running)?;
    first.exit_code(REPLACED)?;
    running.wait_intents("replace", "stalled", 1)?;
    running.wait_members(2)?;
    // Restart the agents without the limit of 3 s for a newcomer's progress. On a slow machine, the
    // next newcomer may need longer.
    running.restart_agents(&[AFTER, ZONE])?;
    let second = running.standby(4, &bundle)?;
    running.wait_replaced(&second, &gone)?;
    running.wait_intents("replace", "promoted", 1)?;
    let used = running.replacements()?;
    let ended: Vec<&Value> = used.iter().map(|each| &each["ended"]).collect();
    ensure!(ended == ["stalled", "promoted"], "{used:?}");
    Ok(())
}

/// The other members consider a hanging member dead. When its processes resume, it learns that it
/// was removed.
#[test]
fn a_hanging_member_is_replaced_and_ends_when_it_goes_on() -> Result<()> {
    let (mut running, bundle, _) = form(4, "2")?;
    let mut hung = running.agents.pop().context("a third agent")?;
    let (agent, node) =
        (hung.process_id().context("an agent")?, hung.node_pid().context("a node")?);
    for pid in [agent, node] {
        send_signal(pid, Signal::STOP);
    }
    // As in an auto-scaling group, the host that takes the place starts only after the death.
    let mut fresh = running.agent(3, &bundle, &[AFTER, ZONE]);
    fresh.start()?;
    running.wait_replaced(&fresh, &peer_url(&hung))?;
    for pid in [node, agent] {
        send_signal(pid, Signal::CONT);
    }
    ensure!(hung.exit_code(LIMIT)? == 3, "{}", hung.output());
    running.wait_members(3)?;
    Ok(())
}
