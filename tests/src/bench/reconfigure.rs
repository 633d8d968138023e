//! What changes of members cost those who write meanwhile.
//!
//! Plain HTTP. Writers write at followers that stay, so that what they see is the cluster's doing and
//! not the end of their own connection. Changes are made one right after the other: both programs are
//! told not to insist on five healthy seconds before each (`--strict-reconfig-check=false`). A dead
//! member is replaced with their own defaults.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use node_proto::etcdserverpb::{MemberPromoteRequest, MemberRemoveRequest};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::Code;

use super::cluster::{Cluster, MEMBERS, Program};
use super::replace;
use super::report::{Changes, Report, Resize};
use super::writer::{MARGIN, PUT_TIME, Writer, Writes};
use crate::client::Client;

const NOT_STRICT: &str = "--strict-reconfig-check=false";
/// No change may take this long.
pub(super) const LIMIT: Duration = Duration::from_secs(300);
/// How often a change that is not possible yet is tried again.
const TRY_AGAIN: Duration = Duration::from_millis(20);
/// Clients that write while the cluster grows and shrinks.
const CLIENTS: usize = 64;
/// A write that takes longer is a slow one.
const SLOW: Duration = Duration::from_secs(1);

/// What to measure.
#[derive(Clone, Debug)]
pub struct Reconfigure {
    /// How often each change is made.
    pub changes: usize,
    /// How much data there is when a dead member is replaced; 0: none is.
    pub data_mib: u64,
    /// The `muster-agent` that replaces it.
    pub agent: PathBuf,
}

pub(super) async fn run(
    wanted: &Reconfigure,
    program: &Program,
    dir: &Path,
    report: &mut Report,
    say: &dyn Fn(&str),
) -> Result<()> {
    let name = &program.name;
    let dir = dir.join(format!("{name}-reconfigure"));
    if wanted.changes > 0 {
        say(&format!("changing the members of {name} {} times", wanted.changes));
        let mut seen = Seen::default();
        for _ in 0..wanted.changes {
            // Another cluster each time: a newcomer of etcd 3.7.3 that is sent more than 5,000 entries
            // tells itself "too many requests" for ever (its server.go, `publishV3`).
            let mut cluster = Cluster::start(program, &dir, MEMBERS, None, &[NOT_STRICT]).await?;
            seen.round(&mut cluster).await?;
            drop(cluster);
            fs_err::remove_dir_all(&dir)?;
        }
        for (change, seen) in [
            ("add a learner", seen.adding),
            ("promote it", seen.promoting),
            ("remove a follower", seen.followers),
            ("remove the leader", seen.leaders),
        ] {
            report.changes.push(Changes::of(name, change, &seen));
        }
        say(&format!("{name} from 3 to 5 to 3 members, {CLIENTS} clients"));
        let mut cluster = Cluster::start(program, &dir, MEMBERS, None, &[NOT_STRICT]).await?;
        report.resizes.push(resize(&mut cluster).await?);
        drop(cluster);
        fs_err::remove_dir_all(&dir)?;
    }
    if wanted.data_mib > 0 {
        say(&format!("replacing a dead member of {name} with {} MiB", wanted.data_mib));
        let cluster = Cluster::start(program, &dir, MEMBERS, None, &[]).await?;
        report.replacements.push(replace::run(cluster, &wanted.agent, wanted.data_mib).await?);
        fs_err::remove_dir_all(&dir)?;
    }
    Ok(())
}

/// What was seen of each kind of change, each time.
#[derive(Default)]
struct Seen {
    adding: Vec<Writes>,
    promoting: Vec<Writes>,
    followers: Vec<Writes>,
    leaders: Vec<Writes>,
}

impl Seen {
    /// Each kind of change once.
    async fn round(&mut self, cluster: &mut Cluster) -> Result<()> {
        let leader = cluster.settled().await?;
        let stay: Vec<usize> = (0..cluster.len()).filter(|n| *n != leader).collect();
        let writer = Writer::start(cluster, &stay).await?;
        let id = cluster.join(leader).await?;
        caught_up(cluster, leader).await?;
        self.adding.push(writer.ended().await?);
        let writer = Writer::start(cluster, &stay).await?;
        promote(cluster, leader, id).await?;
        self.promoting.push(writer.ended().await?);
        self.followers.push(remove_one(cluster, false).await?);
        // The same again, to have one that can go; that was watched already.
        let leader = cluster.settled().await?;
        let id = cluster.join(leader).await?;
        caught_up(cluster, leader).await?;
        promote(cluster, leader, id).await?;
        self.leaders.push(remove_one(cluster, true).await?);
        Ok(())
    }
}

/// Removes one of four: the leader, or one that follows it.
async fn remove_one(cluster: &mut Cluster, is_leader: bool) -> Result<Writes> {
    let leader = cluster.settled().await?;
    let goes = if is_leader { leader } else { (leader + 1) % cluster.len() };
    let stay: Vec<usize> = (0..cluster.len()).filter(|n| *n != goes && *n != leader).collect();
    let id = cluster.id(goes).await?;
    let writer = Writer::start(cluster, &stay).await?;
    remove(cluster, stay[0], id).await?;
    let seen = writer.ended().await?;
    cluster.forget(goes)?;
    Ok(seen)
}

/// Waits until the newest member has what the leader has.
pub(super) async fn caught_up(cluster: &mut Cluster, leader: usize) -> Result<()> {
    let start = Instant::now();
    let wanted = revision(cluster, leader).await?;
    while !revision(cluster, cluster.len() - 1).await.is_ok_and(|found| found >= wanted) {
        if start.elapsed() > LIMIT {
            bail!("the new member does not catch up");
        }
        cluster.keep_newest_up()?;
        tokio::time::sleep(TRY_AGAIN).await;
    }
    Ok(())
}

async fn revision(cluster: &Cluster, n: usize) -> Result<i64> {
    let status = cluster.client(n)?.status(PUT_TIME).await?;
    Ok(status.header.context("a header")?.revision)
}

async fn promote(cluster: &Cluster, asked: usize, id: u64) -> Result<()> {
    let start = Instant::now();
    while let Err(refused) = cluster.api(asked)?.member_promote(MemberPromoteRequest { id }).await {
        if start.elapsed() > LIMIT || !refused.message().contains("in sync with leader") {
            return Err(refused).context("promote");
        }
        tokio::time::sleep(TRY_AGAIN).await;
    }
    Ok(())
}

/// Who is asked to remove the leader may lose the answer with it: it is asked again then.
async fn remove(cluster: &Cluster, asked: usize, id: u64) -> Result<()> {
    let start = Instant::now();
    let mut lost = false;
    while let Err(refused) = cluster.api(asked)?.member_remove(MemberRemoveRequest { id }).await {
        match refused.code() {
            Code::NotFound if lost => return Ok(()),
            Code::Unavailable | Code::DeadlineExceeded if start.elapsed() < LIMIT => lost = true,
            _ => return Err(refused).context("remove"),
        }
        tokio::time::sleep(TRY_AGAIN).await;
    }
    Ok(())
}

/// Two come, then the newest and the leader go, while clients write at two that stay.
async fn resize(cluster: &mut Cluster) -> Result<Resize> {
    let leader = cluster.settled().await?;
    let stay: Vec<usize> = (0..cluster.len()).filter(|n| *n != leader).collect();
    let clients = stay.iter().map(|n| cluster.client(*n)).collect::<Result<Vec<_>>>()?;
    let (stop, stopped) = watch::channel(false);
    let mut load = JoinSet::new();
    for n in 0..CLIENTS {
        load.spawn(keep_writing(clients[n % clients.len()].clone(), n, stopped.clone()));
    }
    let start = Instant::now();
    tokio::time::sleep(MARGIN).await;
    for _ in 0..2 {
        let id = cluster.join(stay[0]).await?;
        caught_up(cluster, stay[0]).await?;
        promote(cluster, stay[0], id).await?;
    }
    for goes in [cluster.len() - 1, leader] {
        let id = cluster.id(goes).await?;
        remove(cluster, stay[0], id).await?;
        tokio::time::sleep(MARGIN).await;
        cluster.forget(goes)?;
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
        slow: done().filter(|took| *took > SLOW).count(),
        longest_ms: puts.iter().map(|(took, _)| *took).max().unwrap_or_default().as_secs_f64()
            * 1000.0,
    })
}

async fn keep_writing(
    mut client: Client,
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
