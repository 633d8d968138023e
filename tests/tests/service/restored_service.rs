//! A discovery service that is lost with all its data, and restored from backups at its URL or at
//! another one. Clusters go on meanwhile, their agents find it, and hosts join again.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::FormedCluster;
use muster_tests::harness::process::last_lines;
use muster_tests::harness::testbed::path_text;
use muster_tests::harness::{AgentProcess, Network, poll_slowly};

use crate::moved_service::{NEW_PORT, ServiceMoves as _, context_set, wait_follows, wait_lost};

/// Time until each agent has reported to a restored service. If the service's URL has not changed,
/// an agent repeats its report one to two minutes after the last one.
const REPORT_LIMIT: Duration = Duration::from_secs(180);

/// Paths of a backup: of the keys, and of database and ledger.
pub(crate) struct Backups {
    identity: PathBuf,
    keys: PathBuf,
    data: PathBuf,
}

pub(crate) fn back_up(running: &FormedCluster) -> Result<Backups> {
    let testbed = &running.testbed;
    let [identity, keys, data] = ["identity", "keys.age", "backup"].map(|name| testbed.path(name));
    let made = Command::new("age-keygen").args(["-o", path_text(&identity)?]).output()?;
    let text = String::from_utf8_lossy(&made.stderr).into_owned();
    let recipient = text.trim().strip_prefix("Public key: ").with_context(|| text.clone())?;
    let key_dir = testbed.keys_dir();
    testbed.admin_command(&[
        "backup-keys",
        "--keys",
        path_text(&key_dir)?,
        "--recipient",
        recipient,
        "--out",
        path_text(&keys)?,
    ])?;
    testbed.admin_command(&[
        "backup",
        "--managed-postgres",
        path_text(&testbed.postgres_dir())?,
        "--ledger",
        path_text(&testbed.path("discovery-ledger"))?,
        "--out",
        path_text(&data)?,
    ])?;
    Ok(Backups { identity, keys, data })
}

/// Deletes the service with all its data, and restores it from the backups at this port.
pub(crate) fn lose_and_restore(
    running: &mut FormedCluster,
    backups: &Backups,
    port: u16,
) -> Result<()> {
    let testbed = &mut running.testbed;
    testbed.kill_discovery();
    let (keys, postgres) = (testbed.keys_dir(), testbed.postgres_dir());
    let ledger = testbed.path("discovery-ledger");
    for lost in [&keys, &ledger] {
        fs_err::remove_dir_all(lost)?;
    }
    fs_err::rename(&postgres, testbed.path("postgres-of-the-lost-machine"))?;

    let pin = testbed.admin_json(&["context", "show"])?["pins"][0].clone();
    let restored = testbed.admin_json(&[
        "restore-keys",
        "--from",
        path_text(&backups.keys)?,
        "--identity",
        path_text(&backups.identity)?,
        "--keys",
        path_text(&keys)?,
    ])?;
    ensure!(restored["pin"] == pin, "{restored}: the admins know {pin}");
    testbed.admin_command(&[
        "restore",
        "--from",
        path_text(&backups.data)?,
        "--managed-postgres",
        path_text(&postgres)?,
        "--ledger",
        path_text(&ledger)?,
    ])?;
    let old = format!(":{}", running.testbed.options.ports[0]);
    running.use_context(&running.context()?.replace(&old, &format!(":{port}")))?;
    running.testbed.options.ports = vec![port];
    running.testbed.start_discovery()?;
    running.testbed.admin_command(&["db", "accept", "--yes"])?;
    Ok(())
}

/// Waits until discovery shows `count` members, and has heard of each of them since it was
/// restored.
fn wait_heard(running: &FormedCluster, count: usize, later: &AgentProcess) -> Result<()> {
    poll_slowly("discovery to hear of all members", REPORT_LIMIT, || {
        let shown = running.testbed.admin_json(&["cluster", "show", "demo"]).ok()?;
        let members = shown["present"]["members"].as_array()?;
        let all_heard = members.iter().all(|member| member["last_heard_ms"].is_number());
        (members.len() == count && all_heard).then_some(())
    })
    .with_context(|| {
        let explained = running.testbed.admin_command(&["cluster", "explain", "demo"]);
        format!("{explained:?}\n{}", last_lines(&later.output(), 20))
    })
}

#[test]
fn members_that_joined_after_the_backup_are_readmitted() -> Result<()> {
    let mut running = FormedCluster::start(Network::loopback(3), 1, None)?;
    let backups = back_up(&running)?;
    let second = running.newcomer(1, &[])?;
    running.wait_voter(&second, 2)?;
    // Add a third member. The backup knows only one of the three, which is no quorum.
    let third = running.newcomer(2, &[])?;
    running.wait_voter(&third, 3)?;
    // The agents' access tokens stay valid, because the service's signing key is restored, too.
    wait_heard(&running, 3, &third)?;
    poll_slowly("the later members to keep a checkpoint of the history", REPORT_LIMIT, || {
        let keeps = |agent: &&AgentProcess| agent.data_dir.join("agent/checkpoint.jws").exists();
        [&second, &third].iter().all(keeps).then_some(())
    })?;
    let port = running.testbed.options.ports[0];
    lose_and_restore(&mut running, &backups, port)?;
    wait_heard(&running, 3, &third)?;
    for later in [&second, &third] {
        ensure!(later.output().contains("knows it again"), "{}", last_lines(&later.output(), 20));
        // The later members joined after the backup. So their agents remember a longer history than
        // the restored service has, and report that as a fault.
        poll_slowly("the agent to notice the other history", REPORT_LIMIT, || {
            later.status().ok()?["history_fault"].is_string().then_some(())
        })?;
        let fault = later.status()?["history_fault"].clone();
        ensure!(fault.as_str().is_some_and(|text| text.contains("contradiction.json")), "{fault}");
    }
    Ok(())
}

#[test]
fn a_restored_service_at_another_url_is_found_and_learns_what_came_after_its_backup() -> Result<()>
{
    let mut running = FormedCluster::start(Network::loopback(5), 3, None)?;
    let backups = back_up(&running)?;
    // A fourth host joins after the backup, so the restored service has never heard of it.
    let fourth = running.newcomer(3, &[])?;
    running.wait_voter(&fourth, 4)?;
    let identity = running.etcdctl()?.json(&["put", "k", "v"])?["header"]["cluster_id"].clone();

    lose_and_restore(&mut running, &backups, NEW_PORT)?;
    for agent in running.agents.iter().chain([&fourth]) {
        wait_lost(agent)?;
    }
    let file = running.testbed.path("demo.service");
    let sequence = running.announce(&["--out", path_text(&file)?])?;
    let told = context_set(&running.agents[0], &file)?;
    ensure!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
    for agent in running.agents.iter().chain([&fourth]) {
        wait_follows(agent, sequence)?;
    }

    // The restored service must accept a fifth host. It must also list the fourth member, which its
    // backup lacked.
    let fifth = running.newcomer(4, &[])?;
    running.wait_voter(&fifth, 5)?;
    wait_follows(&fifth, sequence)?;
    wait_heard(&running, 5, &fourth)?;
    let now = running.etcdctl()?.json(&["put", "k", "v"])?["header"]["cluster_id"].clone();
    ensure!(now == identity, "the Raft cluster was {identity} and is {now}");
    Ok(())
}
