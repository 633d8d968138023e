//! Differential fuzzing: stock etcd and muster-node get the same requests. Complete answers, codes,
//! texts and watch events must be equal.
//!
//! Everything is drawn from a seed. Each request goes to both servers before the next one is drawn,
//! so the same seed repeats a difference. The first difference ends the run, because it may be the
//! cause of all later ones.
//!
//! A run has one of three subjects:
//! - Keys, watches and leases.
//! - The same requests by users with different permissions, and requests about users and roles.
//! - Locks and elections, where callers keep waiting in a queue while others make requests.

mod concurrency;
pub mod members;
mod pending_calls;
mod requests;
mod server;
mod users;
mod watches;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::ValueEnum as _;

use self::concurrency::{ConcurrencyCallGenerator, QueueState};
use self::requests::{CallGenerator, CallWithToken, EtcdCall, KEYS, ServerState, TokenChoice};
use self::server::{Answer, ServerUnderTest};
use self::users::{AuthCall, ExpectedUsers, UserCallGenerator};
use crate::rng::Rng;

/// Time without new events after which watches are compared.
const QUIET_TIME: Duration = Duration::from_millis(60);
/// Time in which a watch of old revisions catches up: etcd serves those ten times a second.
const CATCH_UP_TIME: Duration = Duration::from_millis(350);
/// How long the run waits for an event or answer that only one side has received so far. After
/// that, it counts as missing on the other side.
const DELIVERY_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit of a request.
const CALL_TIME: Duration = Duration::from_secs(20);
/// Number of requests between two comparisons of watches.
const REQUESTS_PER_COMPARISON: u64 = 40;

/// Interval between two checks of the state of both sides.
const POLL_INTERVAL: Duration = Duration::from_millis(3);
/// Time within which an election's observer stream reports a change.
const OBSERVER_DELAY: Duration = Duration::from_millis(30);
/// Time for which both servers can still delete the key of a caller that has disconnected. A key
/// that is left afterwards is treated as permanent.
const LEAVE_DELAY: Duration = Duration::from_secs(1);

/// Part of the API that a fuzzing run tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum FuzzSubject {
    /// Keys, transactions, watches, leases.
    Keys,
    /// Requests about keys by several users, and about users, roles and permissions.
    Users,
    /// Locks and elections, with callers waiting in a queue.
    #[value(name = "lines")]
    Queues,
}

/// Counters of a run.
#[derive(Clone, Debug, Default)]
pub struct FuzzReport {
    /// Number of requests that both servers answered alike.
    pub requests: u64,
    /// Number of requests that were refused.
    pub refused: u64,
    /// Number of comparisons of watches or queues.
    pub settles: u64,
    /// Number of requests whose answers differ for an allowed reason, by that reason.
    pub allowed: BTreeMap<&'static str, u64>,
}

/// A request that the two servers answered differently.
#[derive(Debug, thiserror::Error)]
#[error(
    "seed {seed}, request {number}: {call}\n  etcd:        {etcd}\n  muster-node: {node}\n\
     again: {replay_command}"
)]
pub struct Difference {
    /// Seed of the run.
    pub seed: u64,
    /// Number of the request, counted from 1.
    pub number: u64,
    /// The request and its caller.
    pub call: String,
    /// Answer of stock etcd.
    pub etcd: String,
    /// The answer of muster-node.
    pub node: String,
    /// Command that replays the difference.
    pub replay_command: String,
}

/// An intended difference between the two servers.
struct AllowedDifference {
    why: &'static str,
    holds: fn(call: &EtcdCall, etcd: &Answer, node: &Answer) -> bool,
}

const ALLOWED_DIFFERENCES: &[AllowedDifference] = &[
    AllowedDifference {
        why: "while the CORRUPT alarm is raised, etcd refuses transactions within transactions even if \
              they only read",
        holds: |call, etcd, _| {
            let text = format!("{call:?}");
            matches!(call, EtcdCall::Txn(_))
                && !text.contains("RequestPut(")
                && !text.contains("RequestDeleteRange(")
                && error_text(etcd) == CORRUPT
        },
    },
    AllowedDifference {
        why: "etcd reveals a raised alarm to callers without permission; muster-node checks the permission first",
        holds: |_, etcd, node| {
            [CORRUPT, NO_SPACE].contains(&error_text(etcd))
                && NOT_ALLOWED.contains(&error_text(node))
        },
    },
    AllowedDifference {
        why: "etcd accepts an empty transaction from an unauthenticated caller; muster-node refuses the caller",
        holds: |call, etcd, node| {
            let text = format!("{call:?}");
            let operations = ["Compare {", "RequestRange(", "RequestPut(", "RequestDeleteRange("];
            matches!(call, EtcdCall::Txn(_))
                && operations.iter().all(|operation| !text.contains(operation))
                && !etcd.is_refusal
                && error_text(node) == EMPTY_USER_ERROR
        },
    },
    AllowedDifference {
        why: "etcd hashes a password before it checks the permission; muster-node checks the permission first",
        holds: |_, etcd, node| {
            etcd.text == "Unknown: bcrypt: password length exceeds 72 bytes"
                && NOT_ALLOWED.contains(&error_text(node))
        },
    },
    AllowedDifference {
        why: "etcd treats an empty user name as that of an unauthenticated caller",
        holds: |call, etcd, node| {
            matches!(call, EtcdCall::Auth(AuthCall::UserGet("")))
                && etcd.text == "FailedPrecondition: etcdserver: user name not found"
                && error_text(node) == EMPTY_USER_ERROR
        },
    },
];

const CORRUPT: &str = "etcdserver: corrupt cluster";
const NO_SPACE: &str = "etcdserver: mvcc: database space exceeded";
const EMPTY_USER_ERROR: &str = "etcdserver: user name is empty";
const NOT_ALLOWED: &[&str] =
    &[EMPTY_USER_ERROR, "etcdserver: permission denied", "etcdserver: invalid auth token"];

/// Returns the text of a refusal without its code. For locks and elections the code is always
/// Unknown.
fn error_text(answer: &Answer) -> &str {
    answer.text.split_once(": ").map_or(answer.text.as_str(), |(_, text)| text)
}

struct ServerPair {
    etcd: ServerUnderTest,
    node: ServerUnderTest,
    seed: u64,
    number: u64,
    subject: FuzzSubject,
    report: FuzzReport,
    /// Whether a watch was created since all watches were last known to have caught up.
    may_be_behind: bool,
    users: ExpectedUsers,
    queues: QueueState,
}

/// Sends `requests` requests about `subject` to both programs, stock etcd first. Each program runs
/// as a fresh single-member cluster under `dir`.
///
/// # Errors
/// Returns the first [`Difference`] that isn't allowed, or an error if a server could not be run.
pub async fn run(
    [etcd, node]: [&Path; 2],
    dir: &Path,
    subject: FuzzSubject,
    seed: u64,
    requests: u64,
) -> Result<FuzzReport> {
    let mut pair = ServerPair {
        etcd: ServerUnderTest::start("etcd", etcd, &dir.join("etcd")).await?,
        node: ServerUnderTest::start("muster-node", node, &dir.join("muster-node")).await?,
        seed,
        number: 0,
        subject,
        report: FuzzReport::default(),
        may_be_behind: false,
        users: ExpectedUsers::default(),
        queues: QueueState::default(),
    };
    let mut rng = Rng::new(seed);
    let mut known = ServerState { revision: pair.etcd.revision().await?, ..ServerState::default() };
    while pair.number < requests {
        pair.number += 1;
        let call_with_token = pair.draw(&mut rng, &known);
        let answer = pair.send_both(&call_with_token).await?;
        record_effect(&mut known, &call_with_token.call, &answer);
        if !answer.is_refusal {
            pair.users.record_effect(&call_with_token.call, &answer);
        }
        if subject == FuzzSubject::Queues {
            pair.queues.record_effect(&call_with_token.call);
            known.revision = pair.settle_queues(&call_with_token.call).await?;
        } else if pair.number.is_multiple_of(REQUESTS_PER_COMPARISON) {
            pair.settle(QUIET_TIME).await?;
        }
    }
    pair.settle(CATCH_UP_TIME).await?;
    Ok(pair.report)
}

/// Records what later requests depend on: revisions, compactions and alarms.
fn record_effect(known: &mut ServerState, call: &EtcdCall, answer: &Answer) {
    if let Some(revision) = answer.revision {
        if let EtcdCall::Txn(request) = call
            && revision > known.revision
        {
            let text = format!("{request:?}");
            if text.contains("RequestDeleteRange(") && text.contains("RequestPut(") {
                known.delete_and_put_revisions.insert(revision);
            }
        }
        known.revision = known.revision.max(revision);
        match call {
            EtcdCall::Compact(request) => known.compacted = request.revision,
            EtcdCall::Alarm { action: 1, .. } => known.has_alarms = true,
            EtcdCall::Status => known.has_alarms = answer.text.contains("alarm:"),
            _ => {}
        }
    }
}

impl ServerPair {
    fn draw(&self, rng: &mut Rng, known: &ServerState) -> CallWithToken {
        match self.subject {
            FuzzSubject::Keys => CallWithToken {
                token: TokenChoice::NoToken,
                call: CallGenerator { rng, known, keys: KEYS, is_ordered: false }.draw_call(),
            },
            FuzzSubject::Users => UserCallGenerator { rng, known, users: &self.users }.draw(),
            FuzzSubject::Queues => {
                ConcurrencyCallGenerator { rng, queues: &self.queues, revision: known.revision }
                    .draw()
            }
        }
    }

    async fn send_both(&mut self, call_with_token: &CallWithToken) -> Result<Answer> {
        let call = &call_with_token.call;
        // Before a watch is canceled, its events compacted or its progress requested, both sides
        // must have sent the same events.
        if matches!(call, EtcdCall::Compact(_) | EtcdCall::CancelWatch(_) | EtcdCall::WatchProgress)
        {
            self.settle(if self.may_be_behind { CATCH_UP_TIME } else { QUIET_TIME }).await?;
            self.may_be_behind = false;
        }
        if matches!(call, EtcdCall::Reopen) {
            self.settle(CATCH_UP_TIME).await?;
        }
        self.may_be_behind |= matches!(call, EtcdCall::Watch(_));
        let both = async {
            tokio::join!(self.etcd.call(call_with_token), self.node.call(call_with_token))
        };
        let both = tokio::time::timeout(CALL_TIME, both).await;
        let (etcd, node) = both.with_context(|| format!("no answer to {call_with_token:?}"))?;
        let (etcd, node) = (etcd?, node?);
        if etcd == node {
            self.report.requests += 1;
        } else if let Some(known) =
            ALLOWED_DIFFERENCES.iter().find(|a| (a.holds)(call, &etcd, &node))
        {
            *self.report.allowed.entry(known.why).or_default() += 1;
        } else {
            bail!(self.difference(format!("{call_with_token:?}"), etcd.text, node.text));
        }
        if matches!(call, EtcdCall::WatchProgress) {
            // The answer to a progress request names the revision at that moment. So watches must
            // settle before the next request changes it.
            self.settle(QUIET_TIME).await?;
        }
        self.report.refused += u64::from(etcd.is_refusal);
        Ok(etcd)
    }

    /// Waits until the watches of both sides have received equal events, and no more arrive for
    /// `quiet`.
    async fn settle(&mut self, quiet: Duration) -> Result<()> {
        let mut last = (self.etcd.watches.events(), self.node.watches.events());
        let mut since = Instant::now();
        loop {
            tokio::time::sleep(Duration::from_millis(10)).await;
            let now = (self.etcd.watches.events(), self.node.watches.events());
            if now != last {
                (last, since) = (now, Instant::now());
            } else if last.0 == last.1 && since.elapsed() >= quiet {
                break;
            } else if since.elapsed() > DELIVERY_TIMEOUT {
                bail!(self.watch_difference(&last.0, &last.1));
            }
        }
        self.etcd.watches.clear_events();
        self.node.watches.clear_events();
        self.report.settles += 1;
        Ok(())
    }

    /// Waits until both sides agree. Both must have the same keys and must have sent the same
    /// answers. Every call that needn't wait must have been answered. Returns the revision of that
    /// state.
    async fn settle_queues(&mut self, call: &EtcdCall) -> Result<i64> {
        // The keys show which callers have an answer. But they don't show whether an observer will
        // still get an answer. They don't show either whether a new call has arrived, if it shares
        // the key of another call.
        let hidden = self.queues.has_observers() || matches!(call, EtcdCall::Begin(..));
        let started = Instant::now();
        let mut last = None;
        let mut since = started;
        loop {
            let keys = async { tokio::join!(self.etcd.keys(), self.node.keys()) };
            let (etcd, node) = tokio::time::timeout(CALL_TIME, keys).await?;
            let mut etcd = (etcd?, self.etcd.pending_calls.answers_and_ended());
            let node = (node?, self.node.pending_calls.answers_and_ended());
            let late = self.queues.replace_late_grants(&etcd.0.1, &mut etcd.1.0, &node.1.0);
            let ended = &etcd.1.1;
            let settled = etcd == node && self.queues.is_settled(&etcd.0.1, ended);
            let quiet = match self.queues.is_leaving(&etcd.0.1) {
                true => LEAVE_DELAY,
                false if hidden => OBSERVER_DELAY,
                false => Duration::ZERO,
            };
            if last.as_ref() != Some(&etcd) {
                since = Instant::now();
            }
            if settled && since.elapsed() >= quiet {
                if late > 0 {
                    *self.report.allowed.entry(concurrency::GRANTED_TOO_LATE).or_default() += late;
                }
                self.queues.remove_ended(ended);
                self.queues.record_keys(&etcd.0.1);
                self.etcd.pending_calls.clear_answers();
                self.node.pending_calls.clear_answers();
                self.report.settles += 1;
                return Ok(etcd.0.0);
            }
            if started.elapsed() > DELIVERY_TIMEOUT {
                let call = format!("what came of {call:?}, while there are {:?}", self.queues);
                bail!(self.difference(call, format!("{etcd:?}"), format!("{node:?}")));
            }
            last = Some(etcd);
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    fn watch_difference(
        &self,
        etcd: &watches::EventsByWatch,
        node: &watches::EventsByWatch,
    ) -> Difference {
        let nothing = Vec::new();
        let differs = |id: &&i64| etcd.get(*id) != node.get(*id);
        let ids = etcd.keys().chain(node.keys());
        let id = ids.copied().collect::<Vec<_>>().iter().find(differs).copied().unwrap_or(-1);
        let (a, b) = (etcd.get(&id).unwrap_or(&nothing), node.get(&id).unwrap_or(&nothing));
        let same = a.iter().zip(b).take_while(|(a, b)| a == b).count();
        let rest = |list: &[String]| format!("after {same} alike: {:?}", &list[same..]);
        self.difference(format!("events of watch {id} up to then"), rest(a), rest(b))
    }

    fn difference(&self, call: String, etcd: String, node: String) -> Difference {
        let (seed, number) = (self.seed, self.number);
        let about = self.subject.to_possible_value().expect("each subject can be chosen");
        let about = about.get_name();
        let replay_command = format!("make fuzz-etcd ABOUT={about} SEED={seed} N={number}");
        Difference { seed, number, call, etcd, node, replay_command }
    }
}
