//! The load: a number of clients, each with one put in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::cluster::BenchCluster;
use crate::client::EtcdClient;

/// Time limit of one put; a run with a slower one fails.
const PUT_TIME: Duration = Duration::from_secs(10);
/// Maximum number of connections that the clients of one load share.
const CONNECTIONS: usize = 32;
/// Number of different keys that the puts write.
const KEYS: u64 = 100_000;
/// Duration of an unmeasured load, which opens connections and fills caches.
const WARM_UP: Duration = Duration::from_millis(500);

/// Parameters of one load.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    pub clients: usize,
    pub time: Duration,
    pub puts: u64,
    pub value_bytes: usize,
    pub spread: bool,
    pub seed: u64,
}

/// Result of one load.
#[derive(Clone, Debug)]
pub(super) struct LoadResult {
    pub took: Duration,
    pub cpu: Duration,
    /// Latency of each put in microseconds, sorted.
    pub micros: Vec<u32>,
}

impl LoadResult {
    pub(super) fn puts_per_second(&self) -> f64 {
        self.micros.len() as f64 / self.took.as_secs_f64()
    }

    pub(super) fn cpu_seconds_per_100k(&self) -> f64 {
        self.cpu.as_secs_f64() / self.micros.len() as f64 * 100_000.0
    }

    /// Returns a percentile of the latency in milliseconds.
    pub(super) fn percentile(&self, percent: usize) -> f64 {
        let at = (self.micros.len() * percent / 100).min(self.micros.len() - 1);
        f64::from(self.micros[at]) / 1000.0
    }
}

/// Runs `load` on the cluster's leader, or on all members in turn.
pub(super) async fn run(cluster: &BenchCluster, load: &Load) -> Result<LoadResult> {
    let leader = cluster.leader().await?;
    let connections = load.clients.min(CONNECTIONS);
    let clients = (0..connections)
        .map(|n| cluster.client(if load.spread { n % cluster.len() } else { leader }))
        .collect::<Result<Vec<_>>>()?;
    drive(&clients, &Load { time: WARM_UP, ..*load }).await?;
    let before = cluster.cpu()?;
    let (took, mut micros) = drive(&clients, load).await?;
    let cpu = cluster.cpu()?.checked_sub(before).context("CPU time only grows")?;
    if micros.is_empty() {
        bail!("not one put was acknowledged");
    }
    micros.sort_unstable();
    Ok(LoadResult { took, cpu, micros })
}

async fn drive(connections: &[EtcdClient], load: &Load) -> Result<(Duration, Vec<u32>)> {
    let left = Arc::new(AtomicU64::new(load.puts));
    let start = Instant::now();
    let end = start + load.time;
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..load.clients {
        let client = connections[n % connections.len()].clone();
        tasks.spawn(run_client(client, Arc::clone(&left), end, *load, n as u64));
    }
    let mut micros = Vec::new();
    while let Some(done) = tasks.join_next().await {
        micros.append(&mut done??);
    }
    Ok((start.elapsed(), micros))
}

async fn run_client(
    mut client: EtcdClient,
    left: Arc<AtomicU64>,
    end: Instant,
    load: Load,
    number: u64,
) -> Result<Vec<u32>> {
    let mut micros = Vec::new();
    let mut random = load.seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let value = vec![b'v'; load.value_bytes];
    let take = |n: u64| n.checked_sub(1);
    while Instant::now() < end
        && left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(number | 1);
        let key = format!("/bench/key-{:08}", (random >> 33) % KEYS);
        let started = Instant::now();
        client.put(key.as_bytes(), &value, PUT_TIME).await?;
        micros.push(u32::try_from(started.elapsed().as_micros()).unwrap_or(u32::MAX));
    }
    Ok(micros)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_figures_are_computed_from_counts_and_times() {
        let round = LoadResult {
            took: Duration::from_secs(2),
            cpu: Duration::from_secs(1),
            micros: (1..=1000).map(|n| n * 1000).collect(),
        };
        assert_eq!(round.puts_per_second(), 500.0);
        assert_eq!(round.cpu_seconds_per_100k(), 100.0);
        assert_eq!((round.percentile(50), round.percentile(99)), (501.0, 991.0));
    }
}
