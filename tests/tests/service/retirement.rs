//! Retires a running cluster, and undoes the retirement.

use anyhow::{Result, ensure};
use muster_tests::harness::{FormedCluster, Network};

#[test]
fn a_running_cluster_is_retired_only_by_force_and_can_be_unretired() -> Result<()> {
    let running = FormedCluster::start(Network::loopback(4), 3, None)?;
    let testbed = &running.testbed;
    let retire = |more: &[&str]| -> Result<(Option<i32>, String)> {
        let output = testbed.admin_output(&[&["cluster", "retire", "demo"], more].concat())?;
        Ok((output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned()))
    };
    // The members still send reports, so `--force` is required. There is no terminal to type the
    // cluster's name, so `--yes` is given too.
    let (code, printed) = retire(&["--yes"])?;
    ensure!(
        code == Some(1) && printed.contains("--force") && printed.contains("last heard"),
        "{printed}"
    );
    let (code, printed) = retire(&["--force"])?;
    ensure!(code == Some(2) && printed.contains("--yes"), "{printed}");
    let state = || -> Result<String> {
        let list = testbed.admin_json(&["cluster", "list", "--all"])?;
        Ok(list["clusters"][0]["state"].as_str().unwrap_or_default().to_owned())
    };
    ensure!(state()? == "formed");
    let document =
        |what: &str| testbed.admin_json(&["cluster", "show", "demo"]).map(|v| v[what].clone());
    let before = document("document")?;
    let etcdctl = running.etcdctl()?;

    let (code, printed) = retire(&["--force", "--yes"])?;
    ensure!(code == Some(0) && printed.contains("cluster unretire"), "{printed}");
    ensure!(state()? == "retired");
    etcdctl.run(&["put", "nodes", "run"])?;

    testbed.admin_command(&["cluster", "unretire", "demo"])?;
    ensure!(state()? == "formed");
    ensure!(document("document")? == before);
    // The agents work with the service again, without help: a host can join with a ticket.
    let newcomer = running.newcomer(3, &[])?;
    running.wait_voter(&newcomer, 4)?;
    Ok(())
}
