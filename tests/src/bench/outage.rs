//! How long nobody can write after the leader's process was killed.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use tokio::sync::mpsc;

use super::cluster::Cluster;

/// A new put is tried at each survivor this often: the resolution of the measurement.
const TRY_EVERY: Duration = Duration::from_millis(10);
/// One try gives up after this long.
const TRY_TIME: Duration = Duration::from_secs(5);
/// No cluster may take this long.
const LIMIT: Duration = Duration::from_secs(30);

/// Kills the leader `times` times; how long each time until a put was acknowledged again.
pub(super) async fn run(cluster: &mut Cluster, times: usize) -> Result<Vec<Duration>> {
    let mut took = Vec::new();
    for _ in 0..times {
        let leader = cluster.settled().await?;
        // So that followers have heard the leader for a while, as in daily life.
        tokio::time::sleep(Duration::from_millis(500)).await;
        took.push(one(cluster, leader).await?);
        cluster.restart(leader)?;
    }
    cluster.settled().await?;
    Ok(took)
}

async fn one(cluster: &mut Cluster, leader: usize) -> Result<Duration> {
    let mut clients = Vec::new();
    for n in (0..cluster.len()).filter(|n| *n != leader) {
        let mut client = cluster.client(n)?;
        // The connection is not what is measured.
        client.status(TRY_TIME).await?;
        clients.push(client);
    }
    cluster.kill(leader)?;
    let killed = Instant::now();
    let (acknowledged, mut first) = mpsc::channel::<Instant>(1);
    let mut every = tokio::time::interval(TRY_EVERY);
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
                        if client.put(b"/bench/outage", b"again", TRY_TIME).await.is_ok() {
                            let _ = acknowledged.try_send(Instant::now());
                        }
                    });
                }
            }
        }
    }
}
