//! A rolling upgrade of the node program under agents, as in `member wait --help`, while a client
//! writes.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use muster_tests::client::tls_from;
use muster_tests::harness::formed_cluster::{FormedCluster, LIMIT};
use muster_tests::harness::programs::program_path;
use muster_tests::harness::testbed::path_text;
use muster_tests::harness::{Network, RetryingWriter, wait_for};
use muster_tests::stock_etcd;

/// Copies the program to another path. The test only checks that the agent runs that file
/// afterwards.
fn next_version(running: &FormedCluster, node: &Path) -> Result<PathBuf> {
    let next = running.testbed.path("next-node");
    fs_err::copy(node, &next)?;
    Ok(next)
}

/// Upgrades all members to the program `next`. If that is `None`, upgrades them to a copy of
/// `node`.
fn upgrade_all_members(node: &Path, next: Option<&Path>) -> Result<FormedCluster> {
    let mut running = FormedCluster::start(Network::loopback(3), 3, Some(node))?;
    let next = next.map_or_else(|| next_version(&running, node), |next| Ok(next.to_owned()))?;
    // Linux names a running program by its path without symbolic links.
    let next = fs_err::canonicalize(next)?;
    let etcdctl = running.etcdctl()?;
    let urls = etcdctl.endpoints().to_vec();
    let writer =
        RetryingWriter::start_with_tls(urls.clone(), Some(tls_from(etcdctl.credentials())?));
    for number in 0..3 {
        let name = running.name(&running.agents[number])?;
        let other = &running.agents[(number + 1) % 3];
        running.run_member_json(other, &["wait"])?;
        running.run_member_json(other, &["move-leader", "--from", &name])?;
        let agent = &mut running.agents[number];
        ensure!(agent.terminate(LIMIT)? == 0, "{}", agent.output());
        if number == 0 {
            // The first of three members is stopped. So the command must refuse to prepare a second
            // member for a stop.
            let (second, third) = (&running.agents[1], &running.agents[2]);
            let output =
                running.run_member(third, &["move-leader", "--from", &running.name(second)?])?;
            let printed: serde_json::Value = serde_json::from_slice(&output.stderr)
                .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
            ensure!(output.status.code() == Some(1) && printed["kind"] == "refused", "{printed}");
        }
        let agent = &mut running.agents[number];
        agent.options.args = vec!["--node-binary".to_owned(), path_text(&next)?.to_owned()];
        agent.start()?;
        wait_for("the other program to run", LIMIT, || {
            let program = fs_err::read_link(format!("/proc/{}/exe", agent.node_pid()?)).ok()?;
            (program == next).then_some(())
        })?;
    }
    running.run_member_json(&running.agents[0], &["wait"])?;
    writer.stop_and_check(&urls[0])?;
    Ok(running)
}

#[test]
fn the_nodes_program_is_upgraded_member_by_member_under_a_writer() -> Result<()> {
    upgrade_all_members(&program_path("muster-node")?, None).map(drop)
}

#[test]
fn etcd_is_upgraded_member_by_member_under_a_writer() -> Result<()> {
    stock_etcd::oldest().map_or(Ok(()), |etcd| upgrade_all_members(&etcd, None).map(drop))
}

#[test]
fn etcd_is_upgraded_to_the_next_minor_version_under_a_writer() -> Result<()> {
    let work = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (Some(before), Some(newest)) = (stock_etcd::previous(work), stock_etcd::newest(work))
    else {
        return Ok(());
    };
    let running = upgrade_all_members(&before, Some(&newest))?;
    let list = running.run_member_json(&running.agents[0], &["list"])?;
    let newest = stock_etcd::NEWEST_VERSION.trim_start_matches('v');
    let members = list["members"].as_array().context("members")?;
    ensure!(members.iter().all(|member| member["version"] == newest), "{list}");
    Ok(())
}
