//! A steady writer, which measures outages during membership changes.
//!
//! It begins a new put every few milliseconds, whether or not earlier ones have been answered. The
//! longest time between two acknowledgements is how long no client could write. The longest latency
//! of one put is what a client noticed.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tokio::sync::{oneshot, watch};
use tokio::task::{JoinHandle, JoinSet};

use super::cluster::BenchCluster;
use super::reconfigure::CHANGE_TIME_LIMIT;
use crate::client::EtcdClient;

/// Interval between two puts, and so the resolution of the measurement.
const WRITE_EVERY: Duration = Duration::from_millis(5);
/// Time limit of a put; a slower one counts as failed.
pub(super) const PUT_TIME: Duration = Duration::from_secs(5);
/// Time of measurement before and after each change.
pub(super) const MARGIN: Duration = Duration::from_millis(500);

/// Measurement of the writes during one change.
#[derive(Clone, Debug)]
pub(super) struct WriteMeasurement {
    /// Longest time without an acknowledged write.
    pub gap: Duration,
    /// Longest latency of one write, whatever its result.
    pub wait: Duration,
    /// Number of writes that failed or got no answer in time.
    pub failed: usize,
}

#[derive(Clone, Copy, Debug)]
struct PutRecord {
    begun: Instant,
    ended: Instant,
    is_acknowledged: bool,
}

/// A task that writes steadily until it is stopped.
pub(super) struct SteadyWriter {
    stop: oneshot::Sender<()>,
    /// Time at which the newest acknowledged put was started.
    acknowledged: watch::Receiver<Instant>,
    task: JoinHandle<Vec<PutRecord>>,
}

impl SteadyWriter {
    /// Begins to write at `members` in turn. Returns after [`MARGIN`], before which no change must
    /// begin.
    pub(super) async fn start(cluster: &BenchCluster, members: &[usize]) -> Result<Self> {
        let mut clients = Vec::new();
        for n in members {
            let mut client = cluster.client(*n)?;
            // Connect first, since the connection is not part of the measurement.
            client.status(PUT_TIME).await?;
            clients.push(client);
        }
        let (stop, stopped) = oneshot::channel();
        let (latest, acknowledged) = watch::channel(Instant::now());
        let task = tokio::spawn(write(clients, stopped, latest));
        tokio::time::sleep(MARGIN).await;
        Ok(Self { stop, acknowledged, task })
    }

    /// Keeps writing for `MARGIN`, and then until one more write has begun and is acknowledged. So
    /// a gap in the acknowledgements is measured to its end, even if it outlasts the measured
    /// change.
    pub(super) async fn finish(mut self) -> Result<WriteMeasurement> {
        tokio::time::sleep(MARGIN).await;
        let now = Instant::now();
        let again = self.acknowledged.wait_for(|begun| *begun > now);
        tokio::time::timeout(CHANGE_TIME_LIMIT, again)
            .await
            .context("nobody can write any more")??;
        let _ = self.stop.send(());
        summarize(&self.task.await?)
    }
}

fn summarize(puts: &[PutRecord]) -> Result<WriteMeasurement> {
    let good = puts.iter().filter(|put| put.is_acknowledged);
    let mut acknowledged: Vec<Instant> = good.map(|put| put.ended).collect();
    ensure!(acknowledged.len() > 1, "no writes were acknowledged");
    acknowledged.sort_unstable();
    let gaps = acknowledged.windows(2).map(|two| two[1] - two[0]);
    Ok(WriteMeasurement {
        gap: gaps.max().unwrap_or_default(),
        wait: puts.iter().map(|put| put.ended - put.begun).max().unwrap_or_default(),
        failed: puts.len() - acknowledged.len(),
    })
}

async fn write(
    clients: Vec<EtcdClient>,
    mut stopped: oneshot::Receiver<()>,
    latest: watch::Sender<Instant>,
) -> Vec<PutRecord> {
    let mut every = tokio::time::interval(WRITE_EVERY);
    let mut puts = JoinSet::new();
    for client in clients.iter().cycle() {
        tokio::select! {
            _ = &mut stopped => break,
            _ = every.tick() => {
                puts.spawn(put(client.clone(), latest.clone()));
            }
        }
    }
    puts.join_all().await
}

async fn put(mut client: EtcdClient, latest: watch::Sender<Instant>) -> PutRecord {
    let begun = Instant::now();
    let is_acknowledged = client.put(b"/bench/steady", b"on", PUT_TIME).await.is_ok();
    let ended = Instant::now();
    if is_acknowledged {
        latest.send_modify(|last| *last = begun.max(*last));
    }
    PutRecord { begun, ended, is_acknowledged }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_ends_at_an_acknowledgement_and_not_at_a_refusal() {
        let start = Instant::now();
        let put = |begun, ended, is_acknowledged| {
            let at = |ms| start + Duration::from_millis(ms);
            PutRecord { begun: at(begun), ended: at(ended), is_acknowledged }
        };
        let puts = [put(0, 10, true), put(5, 205, false), put(10, 310, true), put(300, 312, true)];
        let measurement = summarize(&puts).unwrap();
        assert_eq!(measurement.gap, Duration::from_millis(300));
        assert_eq!(measurement.wait, Duration::from_millis(300));
        assert_eq!(measurement.failed, 1);
        assert!(super::summarize(&puts[..2]).is_err());
    }
}
