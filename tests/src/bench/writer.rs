//! A steady writer, and what it saw.
//!
//! It begins a new put every few milliseconds, whether or not the earlier ones have been answered: the
//! longest time between two acknowledgements is how long nobody could write, the longest that one put
//! took is what a client noticed.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tokio::sync::{oneshot, watch};
use tokio::task::{JoinHandle, JoinSet};

use super::cluster::Cluster;
use super::reconfigure::LIMIT;
use crate::client::Client;

/// A put begins this often: the resolution of the measurement.
const WRITE_EVERY: Duration = Duration::from_millis(5);
/// A put that takes longer has failed.
pub(super) const PUT_TIME: Duration = Duration::from_secs(5);
/// What is watched before and after each change.
pub(super) const MARGIN: Duration = Duration::from_millis(500);

/// What was seen during one change.
#[derive(Clone, Debug)]
pub(super) struct Writes {
    /// The longest time without an acknowledged write.
    pub gap: Duration,
    /// The longest that one write waited for its answer, whatever that was.
    pub wait: Duration,
    /// Writes that were refused or not answered in time.
    pub failed: usize,
}

/// One put.
#[derive(Clone, Copy, Debug)]
struct Put {
    begun: Instant,
    ended: Instant,
    is_acknowledged: bool,
}

/// The steady writer.
pub(super) struct Writer {
    stop: oneshot::Sender<()>,
    /// When the latest put that was acknowledged had begun.
    acknowledged: watch::Receiver<Instant>,
    task: JoinHandle<Vec<Put>>,
}

impl Writer {
    /// Begins to write, at these members in turn, and waits until that has been watched for a while.
    pub(super) async fn start(cluster: &Cluster, members: &[usize]) -> Result<Self> {
        let mut clients = Vec::new();
        for n in members {
            let mut client = cluster.client(*n)?;
            // The connection is not what is measured.
            client.status(PUT_TIME).await?;
            clients.push(client);
        }
        let (stop, stopped) = oneshot::channel();
        let (latest, acknowledged) = watch::channel(Instant::now());
        let task = tokio::spawn(write(clients, stopped, latest));
        tokio::time::sleep(MARGIN).await;
        Ok(Self { stop, acknowledged, task })
    }

    /// Watches a while longer, at least until a write that began after that is acknowledged, and
    /// ends: a gap is not cut short because its change is done.
    pub(super) async fn ended(mut self) -> Result<Writes> {
        tokio::time::sleep(MARGIN).await;
        let now = Instant::now();
        let again = self.acknowledged.wait_for(|begun| *begun > now);
        tokio::time::timeout(LIMIT, again).await.context("nobody can write any more")??;
        let _ = self.stop.send(());
        seen(&self.task.await?)
    }
}

fn seen(puts: &[Put]) -> Result<Writes> {
    let good = puts.iter().filter(|put| put.is_acknowledged);
    let mut acknowledged: Vec<Instant> = good.map(|put| put.ended).collect();
    ensure!(acknowledged.len() > 1, "no writes were acknowledged");
    acknowledged.sort_unstable();
    let gaps = acknowledged.windows(2).map(|two| two[1] - two[0]);
    Ok(Writes {
        gap: gaps.max().unwrap_or_default(),
        wait: puts.iter().map(|put| put.ended - put.begun).max().unwrap_or_default(),
        failed: puts.len() - acknowledged.len(),
    })
}

async fn write(
    clients: Vec<Client>,
    mut stopped: oneshot::Receiver<()>,
    latest: watch::Sender<Instant>,
) -> Vec<Put> {
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

async fn put(mut client: Client, latest: watch::Sender<Instant>) -> Put {
    let begun = Instant::now();
    let is_acknowledged = client.put(b"/bench/steady", b"on", PUT_TIME).await.is_ok();
    let ended = Instant::now();
    if is_acknowledged {
        latest.send_modify(|last| *last = begun.max(*last));
    }
    Put { begun, ended, is_acknowledged }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gap_is_between_answers_and_a_refusal_ends_none() {
        let start = Instant::now();
        let put = |begun, ended, is_acknowledged| {
            let at = |ms| start + Duration::from_millis(ms);
            Put { begun: at(begun), ended: at(ended), is_acknowledged }
        };
        let puts = [put(0, 10, true), put(5, 205, false), put(10, 310, true), put(300, 312, true)];
        let seen = seen(&puts).unwrap();
        assert_eq!(seen.gap, Duration::from_millis(300));
        assert_eq!(seen.wait, Duration::from_millis(300));
        assert_eq!(seen.failed, 1);
        assert!(super::seen(&puts[..2]).is_err());
    }
}
