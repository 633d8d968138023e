//! The load: a number of clients, each with one request in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use node_proto::etcdserverpb::RangeRequest;

use super::cluster::BenchCluster;
use crate::client::EtcdClient;

/// Time limit of one request; a run with a slower one fails.
const REQUEST_TIME: Duration = Duration::from_secs(10);
/// Maximum number of connections that the clients of one load share.
const CONNECTIONS: usize = 32;
/// Number of different keys that the puts write.
const KEYS: u64 = 100_000;
/// Number of keys that exist before ranges are measured. Each range reads one of them.
const RANGE_KEYS: u64 = 1_000;
/// Duration of an unmeasured load, which opens connections and fills caches.
const WARM_UP: Duration = Duration::from_millis(500);

/// Kind of request that the clients of a load send again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// A put of one key.
    Put,
    /// A serializable range of one key.
    SerializableRange,
    /// A linearizable range of one key.
    LinearizableRange,
}

impl Work {
    /// All kinds of work, with their names in tables and on the command line.
    pub const NAMES: [(&str, Self); 3] = [
        ("put", Self::Put),
        ("serializable", Self::SerializableRange),
        ("linearizable", Self::LinearizableRange),
    ];

    /// Returns the name of the work.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, work)| *work == self).map_or("", |(name, _)| name)
    }
}

/// Parameters of one load.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    pub work: Work,
    pub clients: usize,
    pub time: Duration,
    pub requests: u64,
    pub value_bytes: usize,
    pub spread: bool,
    pub seed: u64,
}

/// Result of one load.
#[derive(Clone, Debug)]
pub(super) struct LoadResult {
    pub took: Duration,
    pub cpu: Duration,
    /// Number of context switches of the servers' threads.
    pub switches: u64,
    /// Latency of each request in microseconds, sorted.
    pub micros: Vec<u32>,
}

impl LoadResult {
    pub(super) fn per_second(&self) -> f64 {
        self.micros.len() as f64 / self.took.as_secs_f64()
    }

    pub(super) fn switches_per_request(&self) -> f64 {
        self.switches as f64 / self.micros.len() as f64
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
    if load.work != Work::Put {
        write_range_keys(&clients[0], load.value_bytes).await?;
    }
    drive(&clients, &Load { time: WARM_UP, ..*load }).await?;
    let (cpu, switches) = (cluster.cpu()?, cluster.context_switches()?);
    let (took, mut micros) = drive(&clients, load).await?;
    let cpu = cluster.cpu()?.checked_sub(cpu).context("CPU time only grows")?;
    let switches = cluster.context_switches()?.saturating_sub(switches);
    if micros.is_empty() {
        bail!("not one request was answered");
    }
    micros.sort_unstable();
    Ok(LoadResult { took, cpu, switches, micros })
}

fn range_key(number: u64) -> Vec<u8> {
    format!("/bench/range-{:08}", number % RANGE_KEYS).into_bytes()
}

async fn write_range_keys(client: &EtcdClient, value_bytes: usize) -> Result<()> {
    let value = vec![b'v'; value_bytes];
    let mut client = client.clone();
    for number in 0..RANGE_KEYS {
        client.put(&range_key(number), &value, REQUEST_TIME).await?;
    }
    Ok(())
}

async fn drive(connections: &[EtcdClient], load: &Load) -> Result<(Duration, Vec<u32>)> {
    let left = Arc::new(AtomicU64::new(load.requests));
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
        let number = random >> 33;
        let started = Instant::now();
        match load.work {
            Work::Put => {
                let key = format!("/bench/key-{:08}", number % KEYS);
                client.put(key.as_bytes(), &value, REQUEST_TIME).await?;
            }
            Work::SerializableRange | Work::LinearizableRange => {
                let serializable = load.work == Work::SerializableRange;
                let key = range_key(number).into();
                let request = RangeRequest { key, serializable, ..RangeRequest::default() };
                let answer = client.range(request, REQUEST_TIME).await?;
                ensure!(answer.kvs.len() == 1, "a range found {} keys", answer.kvs.len());
            }
        }
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
            switches: 3_000,
            micros: (1..=1000).map(|n| n * 1000).collect(),
        };
        assert_eq!((round.per_second(), round.switches_per_request()), (500.0, 3.0));
        assert_eq!(round.cpu_seconds_per_100k(), 100.0);
        assert_eq!((round.percentile(50), round.percentile(99)), (501.0, 991.0));
    }
}
