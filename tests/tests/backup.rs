//! Backs up the running discovery service, and restores it after everything but the keys was lost.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{Network, Testbed, poll_slowly, wait_for};

const LIMIT: Duration = Duration::from_secs(60);

fn raft_cluster(testbed: &Testbed) -> Result<u64> {
    let etcdctl = testbed.etcdctl("demo", &testbed.network.hosts.iter().collect::<Vec<_>>())?;
    let answer =
        wait_for("the cluster to take a write", LIMIT, || etcdctl.json(&["put", "k", "v"]).ok())?;
    answer["header"]["cluster_id"].as_u64().context("a cluster id")
}

fn mode(path: &Path) -> Result<u32> {
    Ok(fs_err::metadata(path)?.permissions().mode() & 0o777)
}

#[test]
fn a_service_that_lost_all_but_its_keys_is_restored_and_touches_no_cluster() -> Result<()> {
    let mut testbed = Testbed::start(Network::loopback(3), TestbedOptions::default())?;
    let bundle = testbed.create_cluster_with_token("demo", 3)?;
    let mut members = testbed.start_agents(0..3, &bundle)?;
    testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let identity = raft_cluster(&testbed)?;
    // The cluster `later` is still forming when the backup is made.
    testbed.create_cluster("later", 1, &[])?;

    let (postgres, ledger) = (testbed.postgres_dir(), testbed.path("discovery-ledger"));
    let backup = testbed.path("backup");
    let back_up = ["backup", "--managed-postgres", path_text(&postgres)?, "--ledger"];
    let back_up = [&back_up[..], &[path_text(&ledger)?, "--out", path_text(&backup)?]].concat();
    let listed = testbed.admin_json(&back_up)?;
    ensure!(mode(&backup)? == 0o700, "others may enter {}", backup.display());
    for name in ["database.dump", "ledger.jsonl", "ledger.position", "backup.json"] {
        let found = mode(&backup.join(name))?;
        ensure!(found == 0o600, "{name} has mode {found:o}");
    }
    ensure!(listed["files"]["database.dump"]["bytes"].as_u64() > Some(0), "{listed}");
    let again = testbed.admin_output(&back_up)?;
    ensure!(again.status.code() == Some(2), "a second backup into one folder: {again:?}");

    // The service stops, and everything but its keys is lost.
    testbed.stop_discovery()?;
    let stopped = testbed.path("backup-2");
    let without = [&back_up[..6], &[path_text(&stopped)?]].concat();
    let refused = testbed.admin_output(&without)?;
    ensure!(refused.status.code() == Some(2), "of a service that is stopped: {refused:?}");
    fs_err::remove_dir_all(&ledger)?;
    fs_err::rename(&postgres, testbed.path("postgres-of-today"))?;

    let restore = ["restore", "--from", path_text(&backup)?, "--managed-postgres"];
    let restore =
        [&restore[..], &[path_text(&postgres)?, "--ledger", path_text(&ledger)?]].concat();
    testbed.admin_command(&restore)?;
    let again = testbed.admin_output(&restore)?;
    ensure!(again.status.code() == Some(2), "it was restored over itself: {again:?}");
    testbed.start_discovery()?;

    // The service detects the restored database, and decides nothing until an owner has accepted
    // it.
    let explained = poll_slowly("discovery to say why it waits", LIMIT, || {
        let text = testbed.admin_command(&["cluster", "explain", "later"]).ok()?;
        text.contains("db accept").then_some(text)
    })?;
    ensure!(explained.contains("the database changed"), "{explained}");
    let shown = testbed.admin_json(&["cluster", "show", "demo"])?;
    ensure!(shown["state"] == "formed", "{shown}");
    testbed.admin_command(&["db", "accept", "--yes"])?;
    testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let now = raft_cluster(&testbed)?;
    ensure!(now == identity, "the Raft cluster was {identity:x} and is {now:x}");
    for agent in &mut members {
        ensure!(agent.is_running(), "{} has ended:\n{}", agent.host.name, agent.output());
    }
    Ok(())
}
