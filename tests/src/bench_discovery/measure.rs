//! Measures one kind of operation: CPU time of the service and of Postgres, and wall time.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use futures_util::stream::{FuturesUnordered, StreamExt as _};

use super::service::{BenchService, CpuTimes};
use crate::bench::process::cpu_of;

/// Figures of one kind of operation.
#[derive(Clone, Debug)]
pub struct OperationFigures {
    /// Description of the operation.
    pub name: String,
    /// Number of operations that were measured.
    pub count: usize,
    /// CPU time of the service for one operation.
    pub service: Duration,
    /// CPU time of Postgres for one operation.
    pub postgres: Duration,
    /// CPU time of this process, which plays the clients, for one operation.
    pub clients: Duration,
    /// Operations per second, with the clients on the same machine.
    pub per_second: f64,
    /// Median of the operations' wall times.
    pub median: Duration,
    /// 99th percentile of the operations' wall times.
    pub p99: Duration,
}

/// Runs the operations, at most `concurrency` at a time.
pub(super) async fn measure<F: Future<Output = Result<()>>>(
    service: &BenchService,
    name: &str,
    concurrency: usize,
    operations: impl IntoIterator<Item = F>,
) -> Result<OperationFigures> {
    let mut waiting = operations.into_iter().map(timed);
    let (before, clients_before, began) = (service.cpu()?, own_cpu()?, Instant::now());
    let mut running: FuturesUnordered<_> = waiting.by_ref().take(concurrency).collect();
    let mut times = Vec::new();
    while let Some(time) = running.next().await {
        times.push(time?);
        running.extend(waiting.next());
    }
    let took = began.elapsed();
    let cpu: CpuTimes = service.cpu()?.since(before);
    let clients = own_cpu()?.saturating_sub(clients_before);
    times.sort();
    let at = |percent: usize| times.get((times.len() * percent).div_ceil(100).max(1) - 1);
    let count = times.len();
    Ok(OperationFigures {
        name: name.to_owned(),
        count,
        service: cpu.service.div_f64(count.max(1) as f64),
        postgres: cpu.postgres.div_f64(count.max(1) as f64),
        clients: clients.div_f64(count.max(1) as f64),
        per_second: count as f64 / took.as_secs_f64(),
        median: *at(50).context("no operation was measured")?,
        p99: *at(99).context("no operation was measured")?,
    })
}

/// CPU time of this process so far.
fn own_cpu() -> Result<Duration> {
    cpu_of(&fs_err::read_to_string("/proc/self/stat")?).context("the kernel's /proc/self/stat")
}

async fn timed<F: Future<Output = Result<()>>>(operation: F) -> Result<Duration> {
    let began = Instant::now();
    operation.await?;
    Ok(began.elapsed())
}
