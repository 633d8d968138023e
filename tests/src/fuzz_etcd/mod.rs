//! The same requests to stock etcd and to muster-node, side by side: whole answers, codes and texts
//! must be equal, and what watches are told.
//!
//! Everything is drawn from a seed, and each request goes to both before the next is drawn, so that
//! a difference comes again from the same seed. It ends the run: from there on the two stores may
//! differ for that reason alone.

pub mod members;
mod requests;
mod server;
mod watches;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use self::requests::{Call, Draw, Known};
use self::server::{Answer, Server};
use crate::sim::rng::Rng;

/// What watches are told is compared once nothing has come for so long.
const QUIET: Duration = Duration::from_millis(60);
/// etcd looks after watches of the past ten times a second.
const CAUGHT_UP: Duration = Duration::from_millis(350);
/// What one side has been told and the other has not by then will not come.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest that a request may take.
const CALL_TIME: Duration = Duration::from_secs(20);
/// Requests between two comparisons of what watches were told.
const BETWEEN_SETTLES: u64 = 40;

/// What a run asked, and what came of it.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Requests that both answered alike.
    pub requests: u64,
    /// Of these, refusals.
    pub refused: u64,
    /// What watches were told, comparisons of it.
    pub settles: u64,
    /// Requests whose answers differ, and may: why, and how many.
    pub allowed: BTreeMap<&'static str, u64>,
}

/// A request that the two answered differently.
#[derive(Debug, thiserror::Error)]
#[error(
    "seed {seed}, request {number}: {call}\n  etcd:        {etcd}\n  muster-node: {node}\n\
     again: {again}"
)]
pub struct Difference {
    /// Of the run.
    pub seed: u64,
    /// Counted from 1.
    pub number: u64,
    /// The request.
    pub call: String,
    /// One answer.
    pub etcd: String,
    /// The other.
    pub node: String,
    /// What replays it.
    pub again: String,
}

/// A difference that is meant.
struct Allowed {
    why: &'static str,
    holds: fn(call: &Call, etcd: &Answer) -> bool,
}

const ALLOWED: &[Allowed] = &[Allowed {
    why: "while the CORRUPT alarm is raised, etcd refuses transactions within transactions even if \
          they only read",
    holds: |call, etcd| {
        let asked = format!("{call:?}");
        matches!(call, Call::Txn(_))
            && !asked.contains("RequestPut(")
            && !asked.contains("RequestDeleteRange(")
            && etcd.text == "DataLoss: etcdserver: corrupt cluster"
    },
}];

struct Pair {
    etcd: Server,
    node: Server,
    seed: u64,
    number: u64,
    report: Report,
    /// A watch was created since the last time that all were surely caught up.
    may_be_behind: bool,
}

/// Asks `requests` of both programs, in fresh clusters of one under `dir`.
///
/// # Errors
/// The first [`Difference`] that is not a known one, or that a server could not be run.
pub async fn run(etcd: &Path, node: &Path, dir: &Path, seed: u64, requests: u64) -> Result<Report> {
    let mut pair = Pair {
        etcd: Server::start("etcd", etcd, &dir.join("etcd")).await?,
        node: Server::start("muster-node", node, &dir.join("muster-node")).await?,
        seed,
        number: 0,
        report: Report::default(),
        may_be_behind: false,
    };
    let mut rng = Rng::new(seed);
    let mut known = Known { revision: pair.etcd.revision().await?, ..Known::default() };
    while pair.number < requests {
        pair.number += 1;
        let call = Draw { rng: &mut rng, known: &known }.call();
        let answer = pair.ask(&call).await?;
        learn(&mut known, &call, &answer);
        if pair.number.is_multiple_of(BETWEEN_SETTLES) {
            pair.settle(QUIET).await?;
        }
    }
    pair.settle(CAUGHT_UP).await?;
    Ok(pair.report)
}

/// What the next request may go by.
fn learn(known: &mut Known, call: &Call, answer: &Answer) {
    if let Some(revision) = answer.revision {
        if let Call::Txn(request) = call
            && revision > known.revision
        {
            let asked = format!("{request:?}");
            if asked.contains("RequestDeleteRange(") && asked.contains("RequestPut(") {
                known.remade.insert(revision);
            }
        }
        known.revision = known.revision.max(revision);
        match call {
            Call::Compact(request) => known.compacted = request.revision,
            Call::Alarm { action: 1, .. } => known.has_alarms = true,
            Call::Status => known.has_alarms = answer.text.contains("alarm:"),
            _ => {}
        }
    }
}

impl Pair {
    async fn ask(&mut self, call: &Call) -> Result<Answer> {
        // Whatever ends a watch, or asks how far all are, finds both sides equally far.
        if matches!(call, Call::Compact(_) | Call::CancelWatch(_) | Call::WatchProgress) {
            self.settle(if self.may_be_behind { CAUGHT_UP } else { QUIET }).await?;
            self.may_be_behind = false;
        }
        if matches!(call, Call::Reopen) {
            self.settle(CAUGHT_UP).await?;
        }
        self.may_be_behind |= matches!(call, Call::Watch(_));
        let both = async { tokio::join!(self.etcd.call(call), self.node.call(call)) };
        let both = tokio::time::timeout(CALL_TIME, both).await;
        let (etcd, node) = both.with_context(|| format!("no answer to {call:?}"))?;
        let (etcd, node) = (etcd?, node?);
        if etcd == node {
            self.report.requests += 1;
        } else if let Some(known) = ALLOWED.iter().find(|a| (a.holds)(call, &etcd)) {
            *self.report.allowed.entry(known.why).or_default() += 1;
        } else {
            bail!(self.difference(format!("{call:?}"), etcd.text, node.text));
        }
        if matches!(call, Call::WatchProgress) {
            // Its answer names the revision at which it was given.
            self.settle(QUIET).await?;
        }
        self.report.refused += u64::from(etcd.is_refusal);
        Ok(etcd)
    }

    /// Waits until both sides' watches have been told the same, and nothing more for `quiet`.
    async fn settle(&mut self, quiet: Duration) -> Result<()> {
        let mut last = (self.etcd.watches.told(), self.node.watches.told());
        let mut since = Instant::now();
        loop {
            tokio::time::sleep(Duration::from_millis(10)).await;
            let now = (self.etcd.watches.told(), self.node.watches.told());
            if now != last {
                (last, since) = (now, Instant::now());
            } else if last.0 == last.1 && since.elapsed() >= quiet {
                break;
            } else if since.elapsed() > PATIENCE {
                bail!(self.watch_difference(&last.0, &last.1));
            }
        }
        self.etcd.watches.forget();
        self.node.watches.forget();
        self.report.settles += 1;
        Ok(())
    }

    fn watch_difference(&self, etcd: &watches::Told, node: &watches::Told) -> Difference {
        let nothing = Vec::new();
        let differs = |id: &&i64| etcd.get(*id) != node.get(*id);
        let ids = etcd.keys().chain(node.keys());
        let id = ids.copied().collect::<Vec<_>>().iter().find(differs).copied().unwrap_or(-1);
        let (a, b) = (etcd.get(&id).unwrap_or(&nothing), node.get(&id).unwrap_or(&nothing));
        let same = a.iter().zip(b).take_while(|(a, b)| a == b).count();
        let rest = |list: &[String]| format!("after {same} alike: {:?}", &list[same..]);
        self.difference(format!("what watch {id} was told by then"), rest(a), rest(b))
    }

    fn difference(&self, call: String, etcd: String, node: String) -> Difference {
        let (seed, number) = (self.seed, self.number);
        let again = format!("make fuzz-etcd SEED={seed} N={number}");
        Difference { seed, number, call, etcd, node, again }
    }
}
