//! Measures how membership changes affect writes.
//!
//! The clusters use plain HTTP. Writers send their puts to followers that stay, so that no writer
//! loses its connection. Changes follow each other at once. Therefore both programs run with
//! `--strict-reconfig-check=false`: otherwise they would require five healthy seconds before each
//! change. The replacement of a dead member uses the programs' defaults.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use node_proto::etcdserverpb::{MemberPromoteRequest, MemberRemoveRequest};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::Code;

use super::cluster::{BenchCluster, MEMBERS, ServerProgram};
use super::replace;
use super::report::{BenchReport, ChangeFigures, Resize};
use super::writer::{MARGIN, PUT_TIME, SteadyWriter, WriteMeasurement};
use crate::client::EtcdClient;

const NOT_STRICT_FLAG: &str = "--strict-reconfig-check=false";
/// Time limit of each change.
pub(super) const CHANGE_TIME_LIMIT: Duration = Duration::from_secs(300);
/// Interval between two attempts of a change that is not possible yet.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// Number of clients that write while the cluster grows and shrinks.
const CLIENTS: usize = 64;
/// Latency above which a write counts as slow.
const SLOW_WRITE: Duration = Duration::from_secs(1);

/// Parameters of the measurement of membership changes.
#[derive(Clone, Debug)]
pub struct ReconfigureParameters {
    /// Number of times that each kind of change is made.
    pub changes: usize,
    /// Amount of data in MiB when a dead member is replaced; 0 skips the replacement.
    pub data_mib: u64,
    /// Path of the `muster-agent` that replaces the member.
    pub agent: PathBuf,
}

pub(super) async fn run(
    parameters: &ReconfigureParameters,
    program: &ServerProgram,
    dir: &Path,
    report: &mut BenchReport,
    say: &dyn Fn(&str),
) -> Result<()> {
    let name = &program.name;
    let dir = dir.join(format!("{name}-reconfigure"));
    if parameters.changes > 0 {
        say(&format!("changing the members of {name} {} times", parameters.changes));
        let mut measurements = ChangeWrites::default();
        for _ in 0..parameters.changes {
            // Use a new cluster in each round, so that no new member receives more than 5,000
            // entries. In etcd 3.7.3 such a member refuses its own publish request with "too many
            // requests" for ever (`publishV3` in its server.go).
            let mut cluster =
                BenchCluster::start(program, &dir, MEMBERS, None, &[NOT_STRICT_FLAG]).await?;
            measurements.measure_round(&mut cluster).await?;
            drop(cluster);
            fs_err::remove_dir_all(&dir)?;
        }
        for (change, measurements) in [
            ("add a learner", measurements.adding),
            ("promote it", measurements.promoting),
            ("remove a follower", measurements.followers),
            ("remove the leader", measurements.leaders),
        ] {
            report.changes.push(ChangeFigures::from_measurements(name, change, &measurements));
        }
        say(&format!("{name} from 3 to 5 to 3 members, {CLIENTS} clients"));
        let mut cluster =
            BenchCluster::start(program, &dir, MEMBERS, None, &[NOT_STRICT_FLAG]).await?;
        report.resizes.push(resize(&mut cluster).await?);
        drop(cluster);
        fs_err::remove_dir_all(&dir)?;
    }
    if parameters.data_mib > 0 {
        say(&format!("replacing a dead member of {name} with {} MiB", parameters.data_mib));
        let cluster = BenchCluster::start(program, &dir, MEMBERS, None, &[]).await?;
        report
            .replacements
            .push(replace::run(cluster, &parameters.agent, parameters.data_mib).await?);
        fs_err::remove_dir_all(&dir)?;
    }
    Ok(())
}

/// Measurements of the writes during each kind of change, one element per round.
#[derive(Default)]
struct ChangeWrites {
    adding: Vec<WriteMeasurement>,
    promoting: Vec<WriteMeasurement>,
    followers: Vec<WriteMeasurement>,
    leaders: Vec<WriteMeasurement>,
}

impl ChangeWrites {
    /// Makes each kind of change once.
    async fn measure_round(&mut self, cluster: &mut BenchCluster) -> Result<()> {
        let leader = cluster.wait_settled().await?;
        let remaining: Vec<usize> = (0..cluster.len()).filter(|n| *n != leader).collect();
        let writer = SteadyWriter::start(cluster, &remaining).await?;
        let id = cluster.join(leader).await?;
        wait_caught_up(cluster, leader).await?;
        self.adding.push(writer.finish().await?);
        let writer = SteadyWriter::start(cluster, &remaining).await?;
        promote(cluster, leader, id).await?;
        self.promoting.push(writer.finish().await?);
        self.followers.push(remove_one(cluster, false).await?);
        // Add a fourth member again, which the removal below needs. This addition isn't measured.
        let leader = cluster.wait_settled().await?;
        let id = cluster.join(leader).await?;
        wait_caught_up(cluster, leader).await?;
        promote(cluster, leader, id).await?;
        self.leaders.push(remove_one(cluster, true).await?);
        Ok(())
    }
}

/// Removes the leader or a follower from a cluster of four. Returns the measurement of the writes
/// during the removal.
async fn remove_one(cluster: &mut BenchCluster, is_leader: bool) -> Result<WriteMeasurement> {
    let leader = cluster.wait_settled().await?;
    let removed = if is_leader { leader } else { (leader + 1) % cluster.len() };
    let remaining: Vec<usize> =
        (0..cluster.len()).filter(|n| *n != removed && *n != leader).collect();
    let id = cluster.id(removed).await?;
    let writer = SteadyWriter::start(cluster, &remaining).await?;
    remove(cluster, remaining[0], id).await?;
    let measurement = writer.finish().await?;
    cluster.kill_and_delete(removed)?;
    Ok(measurement)
}

/// Waits until the newest member has reached the leader's current revision.
pub(super) async fn wait_caught_up(cluster: &mut BenchCluster, leader: usize) -> Result<()> {
    let start = Instant::now();
    let target_revision = revision(cluster, leader).await?;
    while !revision(cluster, cluster.len() - 1).await.is_ok_and(|found| found >= target_revision) {
        if start.elapsed() > CHANGE_TIME_LIMIT {
            bail!("the new member does not catch up");
        }
        cluster.restart_newest_if_ended()?;
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
    Ok(())
}

async fn revision(cluster: &BenchCluster, n: usize) -> Result<i64> {
    let status = cluster.client(n)?.status(PUT_TIME).await?;
    Ok(status.header.context("a header")?.revision)
}

async fn promote(cluster: &BenchCluster, via: usize, id: u64) -> Result<()> {
    let start = Instant::now();
    while let Err(refused) = cluster.api(via)?.member_promote(MemberPromoteRequest { id }).await {
        if start.elapsed() > CHANGE_TIME_LIMIT || !refused.message().contains("in sync with leader")
        {
            return Err(refused).context("promote");
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
    Ok(())
}

/// Removes a member. The leader's answer may be lost with its own removal, so the request is
/// repeated until the answer is "not found".
async fn remove(cluster: &BenchCluster, via: usize, id: u64) -> Result<()> {
    let start = Instant::now();
    let mut lost = false;
    while let Err(refused) = cluster.api(via)?.member_remove(MemberRemoveRequest { id }).await {
        match refused.code() {
            Code::NotFound if lost => return Ok(()),
            Code::Unavailable | Code::DeadlineExceeded if start.elapsed() < CHANGE_TIME_LIMIT => {
                lost = true;
            }
            _ => return Err(refused).context("remove"),
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
    Ok(())
}

/// Adds two members, then removes the newest and the leader. Clients write to two members that
/// stay.
async fn resize(cluster: &mut BenchCluster) -> Result<Resize> {
    let leader = cluster.wait_settled().await?;
    let remaining: Vec<usize> = (0..cluster.len()).filter(|n| *n != leader).collect();
    let clients = remaining.iter().map(|n| cluster.client(*n)).collect::<Result<Vec<_>>>()?;
    let (stop, stopped) = watch::channel(false);
    let mut load = JoinSet::new();
    for n in 0..CLIENTS {
        load.spawn(keep_writing(clients[n % clients.len()].clone(), n, stopped.clone()));
    }
    let start = Instant::now();
    tokio::time::sleep(MARGIN).await;
    for _ in 0..2 {
        let id = cluster.join(remaining[0]).await?;
        wait_caught_up(cluster, remaining[0]).await?;
        promote(cluster, remaining[0], id).await?;
    }
    for removed in [cluster.len() - 1, leader] {
        let id = cluster.id(removed).await?;
        remove(cluster, remaining[0], id).await?;
        tokio::time::sleep(MARGIN).await;
        cluster.kill_and_delete(removed)?;
    }
    let took = start.elapsed();
    let _ = stop.send(true);
    let puts: Vec<(Duration, bool)> = load.join_all().await.into_iter().flatten().collect();
    let done = || puts.iter().filter(|(_, done)| *done).map(|(took, _)| *took);
    Ok(Resize {
        program: cluster.name().to_owned(),
        clients: CLIENTS,
        seconds: took.as_secs_f64(),
        writes: done().count(),
        failed: puts.len() - done().count(),
        slow: done().filter(|took| *took > SLOW_WRITE).count(),
        longest_ms: puts.iter().map(|(took, _)| *took).max().unwrap_or_default().as_secs_f64()
            * 1000.0,
    })
}

async fn keep_writing(
    mut client: EtcdClient,
    number: usize,
    stopped: watch::Receiver<bool>,
) -> Vec<(Duration, bool)> {
    let key = format!("/bench/resize-{number}");
    let mut puts = Vec::new();
    while !*stopped.borrow() {
        let begun = Instant::now();
        let put = client.put(key.as_bytes(), &[b'v'; 256], PUT_TIME).await;
        puts.push((begun.elapsed(), put.is_ok()));
    }
    puts
}
