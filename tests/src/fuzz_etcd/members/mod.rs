//! Differential fuzzing of membership changes. A cluster of stock etcd and one of muster-node get
//! the same requests.
//!
//! Ids and addresses differ between the two clusters. In comparisons, each member therefore has a
//! number, in the order in which members were added. Both clusters keep a quorum all the time:
//! without one, answers and their timing would be random. After a member has started or stopped,
//! the run waits until both clusters consider it healthy or gone.

mod cluster;
mod requests;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use self::cluster::{Answer, ClusterUnderTest};
use self::requests::{ExpectedCluster, MemberCall, MemberCallGenerator};
use super::Difference;
use crate::rng::Rng;

/// Time after which both clusters know which members are healthy. etcd considers a member healthy
/// after five seconds of connection. It notices the end of a member a little later.
const HEALTH_DELAY: Duration = Duration::from_secs(7);
/// Time after which etcd derives another member id from the same URLs: it hashes them with the time
/// in seconds. Within the same second, a removed member's id would come back.
const NEW_ID_DELAY: Duration = Duration::from_millis(1_100);
/// Time limit of everything that must happen on both sides.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(60);

/// Intended differences: the reason, etcd's answer, and this node's answer.
const ALLOWED_DIFFERENCES: &[(&str, [&str; 2])] = &[(
    "etcd's table names its client's error here, which no status comes of: its code is lost",
    [
        "Unknown: etcdserver: re-configuration failed due to not enough started members",
        "FailedPrecondition: etcdserver: re-configuration failed due to not enough started members",
    ],
)];

/// Counters of a run.
#[derive(Clone, Debug, Default)]
pub struct MembershipFuzzReport {
    /// Number of requests that both clusters answered alike, or with an allowed difference.
    pub requests: u64,
    /// Number of answers with an allowed difference, by its reason.
    pub allowed: BTreeMap<&'static str, u64>,
    /// Number of requests that were refused.
    pub refused: u64,
    /// Number of times that a member was started or stopped.
    pub moves: u64,
}

/// Sends `requests` requests to clusters of `members` members each, in fresh directories under
/// `dir`.
///
/// In a cluster with a single member, no answer depends on timing.
///
/// # Errors
/// Returns the first [`Difference`], or an error if a cluster could not be run.
pub async fn run(
    [etcd, node]: [&Path; 2],
    dir: &Path,
    seed: u64,
    members: usize,
    requests: u64,
) -> Result<MembershipFuzzReport> {
    let dirs = ["etcd", "node"].map(|name| dir.join(name));
    let began = async {
        tokio::join!(
            ClusterUnderTest::start(etcd, &dirs[0], members),
            ClusterUnderTest::start(node, &dirs[1], members)
        )
    };
    let (etcd, node) = timeout(SETTLE_TIMEOUT, began).await.context("the clusters do not begin")?;
    let mut rng = Rng::new(seed);
    let mut run = MembershipFuzzRun {
        clusters: [etcd?, node?],
        known: ExpectedCluster::new(members, rng.chance(500)),
        new_ids_at: Instant::now(),
        healthy_at: Instant::now() + HEALTH_DELAY,
        report: MembershipFuzzReport::default(),
    };
    for number in 1..=requests {
        let call = MemberCallGenerator { rng: &mut rng, known: &run.known }.draw_call();
        let [etcd, node] = run
            .send_both(&call)
            .await
            .with_context(|| format!("seed {seed}, request {number}: {call:?}"))?;
        if let Some((why, _)) =
            ALLOWED_DIFFERENCES.iter().find(|(_, texts)| *texts == [&etcd.text, &node.text])
        {
            *run.report.allowed.entry(why).or_default() += 1;
        } else if etcd.text != node.text {
            let call = format!("{call:?} of a cluster with {:?}", run.known);
            let replay_command = format!("make fuzz-etcd MEMBERS={members} SEED={seed} N={number}");
            bail!(Difference {
                seed,
                number,
                call,
                etcd: etcd.text,
                node: node.text,
                replay_command
            });
        }
        run.report.requests += 1;
        run.report.refused += u64::from(etcd.is_refusal);
        run.record_effect(&call, &etcd)
            .await
            .with_context(|| format!("after request {number}, {call:?}"))?;
    }
    Ok(run.report)
}

struct MembershipFuzzRun {
    clusters: [ClusterUnderTest; 2],
    known: ExpectedCluster,
    /// Earliest time at which etcd derives another member id from the same URLs.
    new_ids_at: Instant,
    /// Time from which all running members are healthy.
    healthy_at: Instant,
    report: MembershipFuzzReport,
}

impl MembershipFuzzRun {
    async fn send_both(&mut self, call: &MemberCall) -> Result<[Answer; 2]> {
        if self.known.running_voters() > 1 {
            sleep_until(self.healthy_at).await;
        }
        if let MemberCall::Add { urls, .. } = call
            && self.known.were_used(urls)
        {
            sleep_until(self.new_ids_at).await;
        }
        let known = &self.known;
        let [etcd, node] = &mut self.clusters;
        let answers = async { tokio::join!(etcd.call(call, known), node.call(call, known)) };
        let (etcd, node) = timeout(SETTLE_TIMEOUT, answers).await.context("no answer")?;
        Ok([etcd?, node?])
    }

    /// Records the effect of a request that both clusters answered alike, and waits until both have
    /// settled.
    async fn record_effect(&mut self, call: &MemberCall, answer: &Answer) -> Result<()> {
        if answer.is_refusal {
            return Ok(());
        }
        let (known, clusters) = (&mut self.known, &mut self.clusters);
        match call {
            MemberCall::Add { urls, is_learner, .. } => {
                known.add(urls, *is_learner);
                self.new_ids_at = Instant::now() + NEW_ID_DELAY;
            }
            MemberCall::Promote { who, .. } => known.promote(*who),
            MemberCall::Update { who, urls, .. } => known.update(*who, urls),
            MemberCall::Remove { who, .. } => {
                let ended_process = known.remove(*who);
                for cluster in clusters.iter_mut().filter(|_| ended_process.is_some()) {
                    let ends = cluster.wait_for_end(ended_process.expect("it ran"));
                    timeout(SETTLE_TIMEOUT, ends)
                        .await
                        .context("the process of the removed member does not end")??;
                }
            }
            MemberCall::List { .. } => return Ok(()),
            MemberCall::Start(member) => {
                (known.members[*member].runs, known.members[*member].has_started) = (true, true);
                self.report.moves += 1;
            }
            MemberCall::Stop(member) => {
                known.members[*member].runs = false;
                self.report.moves += 1;
            }
        }
        for cluster in clusters {
            timeout(SETTLE_TIMEOUT, cluster.settle(known))
                .await
                .context("a cluster does not settle")??;
        }
        if known.running_voters() > 1 {
            self.healthy_at = Instant::now() + HEALTH_DELAY;
        }
        Ok(())
    }
}

/// Calls `poll` repeatedly until it returns a value.
async fn until<T>(mut poll: impl AsyncFnMut() -> Result<Option<T>>) -> Result<T> {
    loop {
        if let Some(found) = poll().await? {
            return Ok(found);
        }
        sleep(Duration::from_millis(50)).await;
    }
}
