//! Measures how long no write succeeds after the leader is killed.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use tokio::sync::mpsc;

use super::cluster::BenchCluster;

/// Interval between two puts at each survivor, and so the resolution of the measurement.
const PUT_INTERVAL: Duration = Duration::from_millis(10);
/// Time limit of one put.
const PUT_TIME_LIMIT: Duration = Duration::from_secs(5);
/// Maximum time without writes; a longer one is an error.
const LIMIT: Duration = Duration::from_secs(30);

/// Kills the leader `times` times. Returns how long it took each time until a put was acknowledged
/// again.
pub(super) async fn run(cluster: &mut BenchCluster, times: usize) -> Result<Vec<Duration>> {
    let mut took = Vec::new();
    for _ in 0..times {
        let leader = cluster.wait_settled().await?;
        // Let followers receive heartbeats for a while, as in a cluster that has run for long.
        tokio::time::sleep(Duration::from_millis(500)).await;
        took.push(measure_outage(cluster, leader).await?);
        cluster.restart(leader)?;
    }
    cluster.wait_settled().await?;
    Ok(took)
}

async fn measure_outage(cluster: &mut BenchCluster, leader: usize) -> Result<Duration> {
    let mut clients = Vec::new();
    for n in (0..cluster.len()).filter(|n| *n != leader) {
        let mut client = cluster.client(n)?;
        // Connect first, since the connection is not part of the measurement.
        client.status(PUT_TIME_LIMIT).await?;
        clients.push(client);
    }
    cluster.kill(leader)?;
    let killed = Instant::now();
    let (acknowledged, mut first) = mpsc::channel::<Instant>(1);
    let mut every = tokio::time::interval(PUT_INTERVAL);
    let mut tries = tokio::task::JoinSet::new();
    loop {
        tokio::select! {
            Some(at) = first.recv() => return Ok(at - killed),
            _ = every.tick() => {
                if killed.elapsed() > LIMIT {
                    bail!("no write was possible within {LIMIT:?}");
                }
                for client in &clients {
                    let (mut client, acknowledged) = (client.clone(), acknowledged.clone());
                    tries.spawn(async move {
                        if client.put(b"/bench/outage", b"again", PUT_TIME_LIMIT).await.is_ok() {
                            let _ = acknowledged.try_send(Instant::now());
                        }
                    });
                }
            }
        }
    }
}
