//! Measures how long no write succeeds after the leader is killed, and after all members start
//! again.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use tokio::sync::mpsc;

use super::cluster::BenchCluster;
use crate::client::EtcdClient;

/// Interval between two puts at each survivor, and so the resolution of the measurement.
const PUT_INTERVAL: Duration = Duration::from_millis(10);
/// Time limit of one put.
const PUT_TIME_LIMIT: Duration = Duration::from_secs(5);
/// Maximum time without writes; a longer one is an error.
const LIMIT: Duration = Duration::from_secs(30);

/// Kills the leader `times` times. Returns how long it took each time until a put was acknowledged
/// again.
pub(super) async fn kill_leader(cluster: &mut BenchCluster, times: usize) -> Result<Vec<Duration>> {
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

/// Kills all members and starts them again, `times` times. Returns how long it took each time from
/// the starts until a put was acknowledged.
pub(super) async fn restart_all(cluster: &mut BenchCluster, times: usize) -> Result<Vec<Duration>> {
    let mut took = Vec::new();
    for _ in 0..times {
        cluster.wait_settled().await?;
        let all: Vec<usize> = (0..cluster.len()).collect();
        all.iter().try_for_each(|n| cluster.kill(*n))?;
        let started = Instant::now();
        all.iter().try_for_each(|n| cluster.restart(*n))?;
        let clients: Result<Vec<_>> = all.iter().map(|n| cluster.client(*n)).collect();
        took.push(wait_for_write(&clients?, started).await?);
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
    wait_for_write(&clients, Instant::now()).await
}

/// Returns the time from `start` until a put was acknowledged. Each client begins a put at each
/// [`PUT_INTERVAL`].
async fn wait_for_write(clients: &[EtcdClient], start: Instant) -> Result<Duration> {
    let (acknowledged, mut first) = mpsc::channel::<Instant>(1);
    let mut every = tokio::time::interval(PUT_INTERVAL);
    let mut tries = tokio::task::JoinSet::new();
    loop {
        tokio::select! {
            Some(at) = first.recv() => return Ok(at - start),
            _ = every.tick() => {
                if start.elapsed() > LIMIT {
                    bail!("no write was possible within {LIMIT:?}");
                }
                for client in clients {
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
