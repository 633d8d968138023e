//! Measures the replacement of a dead member by a new one, which has to receive the cluster's data.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tokio::process::Command;
use tokio::task::JoinSet;

use super::cluster::BenchCluster;
use super::reconfigure::{CHANGE_TIME_LIMIT, wait_caught_up};
use super::report::Replacement;

const MIB: u64 = 1 << 20;
/// Number of clients that fill the cluster with data at the same time, in puts of
/// `FILL_VALUE_BYTES` each.
const FILL_CLIENTS: u64 = 16;
const FILL_VALUE_BYTES: u64 = 64 << 10;
/// Interval at which the member list is polled. The new member is started as soon as it is listed.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Fills the cluster, kills a follower, deletes its data, and replaces it with `muster-agent member
/// replace`. That command uses the Cluster API, which both programs have.
pub(super) async fn run(
    mut cluster: BenchCluster,
    agent: &Path,
    data_mib: u64,
) -> Result<Replacement> {
    let leader = cluster.wait_settled().await?;
    fill(&cluster, leader, data_mib).await?;
    let leader = cluster.wait_settled().await?;
    let before = cluster.peak_bytes(leader)?;
    let dead = (leader + 1) % cluster.len();
    let id = cluster.id(dead).await?;
    cluster.kill_and_delete(dead)?;
    let leader = if dead < leader { leader - 1 } else { leader };
    let address = cluster.next_address()?;
    let start = Instant::now();
    let patience = CHANGE_TIME_LIMIT.as_secs().to_string();
    let mut command = Command::new(agent)
        .args(["member", "replace", &format!("{id:016x}"), &address.name])
        .args(["--peer-urls", &address.peer_url, "--endpoints", &cluster.endpoints()])
        .args(["--patience", &patience])
        .stdout(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("start {}", agent.display()))?;
    while !cluster.lists(leader, &address).await? {
        if let Some(status) = command.try_wait()? {
            bail!("member replace ended with {status} before it added anybody");
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    cluster.start_joiner(address)?;
    let status = tokio::time::timeout(CHANGE_TIME_LIMIT, command.wait())
        .await
        .context("member replace")??;
    if !status.success() {
        bail!("member replace ended with {status}");
    }
    wait_caught_up(&mut cluster, leader).await?;
    Ok(Replacement {
        program: cluster.name().to_owned(),
        data_mib,
        seconds: start.elapsed().as_secs_f64(),
        leader_peak_mib: (before / MIB, cluster.peak_bytes(leader)? / MIB),
        joiner_peak_mib: cluster.peak_bytes(cluster.len() - 1)? / MIB,
    })
}

async fn fill(cluster: &BenchCluster, leader: usize, data_mib: u64) -> Result<()> {
    let mut fillers = JoinSet::new();
    for n in 0..FILL_CLIENTS {
        let mut client = cluster.client(leader)?;
        fillers.spawn(async move {
            let value = vec![b'v'; usize::try_from(FILL_VALUE_BYTES)?];
            for part in
                (n..data_mib * MIB / FILL_VALUE_BYTES).step_by(usize::try_from(FILL_CLIENTS)?)
            {
                let key = format!("/bench/fill-{part:08}");
                client.put(key.as_bytes(), &value, CHANGE_TIME_LIMIT).await?;
            }
            anyhow::Ok(())
        });
    }
    fillers.join_all().await.into_iter().collect()
}
