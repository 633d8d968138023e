//! Questions about leases. Only the leader's clock can answer them, so other members send them to
//! the leader.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{join, join_all};
use node_engine::driver::Role;
use node_proto::command::{LeaseCheckpoint, LeaseExpire, Operation};
use node_proto::musterpb::{LeaseAnswer, LeaseQuestion};
use node_state::identity::MemberId;
use node_state::lease::{Lease, Renewal, full_ttl_checkpoint};
use prost::Message as _;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout_at};

use super::context::ApiContext;
use super::error::Error;

/// Interval of checks for expired leases.
const LEASE_EXPIRY_INTERVAL: Duration = Duration::from_millis(100);
/// Answer for a lease that can't be renewed at the moment.
pub(super) const LEASE_BUSY: i64 = -2;
/// Answer for the remaining time of a lease that doesn't exist.
pub(super) const LEASE_UNKNOWN: i64 = -1;

/// Result of asking the leader's clock about leases.
struct LeaseReadings {
    term: u64,
    /// TTL or remaining seconds of each lease in the question.
    seconds: Vec<i64>,
    /// Renewed leases that must be recorded in the log before the answer is sent. The checkpoint
    /// entry says that each has its whole TTL left, counted from `at`.
    to_checkpoint: Vec<Lease>,
    at: Duration,
}

/// Sends a question about leases to the leader. Returns `NotLeader` if the asked member isn't the
/// leader, or gives no valid answer in time.
pub(super) async fn ask_leader_about_leases(
    context: &ApiContext,
    question: LeaseQuestion,
    deadline: Instant,
) -> Result<Vec<i64>, Error> {
    let leader = context.wait_for_leader(deadline).await?;
    if leader == context.identity.member_id {
        return answer_lease_question(context, &question).await;
    }
    let Some(peers) = &context.peers else { return Err(Error::NotLeader) };
    // Wait for two election timeouts only: if the leader is unreachable, it may soon have a
    // successor.
    let patience = deadline.min(Instant::now() + context.limits.election_timeout * 2);
    let asked = peers.ask(MemberId(leader), question.encode_to_vec().into());
    let Ok(Ok(answer)) = timeout_at(patience, asked).await else {
        return Err(Error::NotLeader);
    };
    let answer = LeaseAnswer::decode(answer).map_err(|_| Error::NotLeader)?;
    if !answer.refused.is_empty() {
        return Err(Error::from_text(&answer.refused, 0).unwrap_or(Error::NotLeader));
    }
    if answer.seconds.len() != question.ids.len() {
        return Err(Error::NotLeader);
    }
    Ok(answer.seconds)
}

/// Answers another member's question about leases. Returns `None` if the request is of another
/// kind.
pub(super) async fn answer_leases(context: &ApiContext, request: Bytes) -> Option<Bytes> {
    let question = LeaseQuestion::decode(request).ok()?;
    if question.ids.is_empty() {
        return None;
    }
    let answer = match answer_lease_question(context, &question).await {
        Ok(seconds) => LeaseAnswer { refused: String::new(), seconds },
        Err(error) => LeaseAnswer { refused: error.text().into_owned(), seconds: Vec::new() },
    };
    Some(answer.encode_to_vec().into())
}

/// Answers a question as the leader. Once the answer is determined, waits until a quorum confirms
/// that this member still led at that time.
async fn answer_lease_question(
    context: &ApiContext,
    question: &LeaseQuestion,
) -> Result<Vec<i64>, Error> {
    if !context.leads() {
        return Err(Error::NotLeader);
    }
    let knows_all = {
        let leases = context.leases();
        question.ids.iter().all(|id| leases.has(*id))
    };
    if !knows_all {
        // A lease that is unknown here may have been granted by an entry that this member hasn't
        // applied yet. After the barrier, the entry is applied.
        context.barrier(false).await?;
    }
    let found = look_at_clock(context, question)?;
    if !found.to_checkpoint.is_empty() {
        let said = full_ttl_checkpoint(found.term, found.to_checkpoint.iter().copied());
        match context.propose_as_member(Operation::LeaseCheckpoint(said)).await {
            Ok(_) => {}
            Err(Error::LeaderChanged) => return Err(Error::NotLeader),
            Err(error) => return Err(error),
        }
        let mut lessor = context.clock.lock();
        if lessor.term() == Some(found.term) {
            found.to_checkpoint.iter().for_each(|lease| lessor.record_full_ttl(lease.id, found.at));
        }
    }
    context.barrier(false).await?;
    let still_leads = {
        let status = context.status.borrow();
        status.role == Role::Leader && status.term == found.term
    };
    if still_leads { Ok(found.seconds) } else { Err(Error::NotLeader) }
}

fn look_at_clock(context: &ApiContext, question: &LeaseQuestion) -> Result<LeaseReadings, Error> {
    let (mut lessor, at) = context.clock.read();
    let term = lessor.term().ok_or(Error::NotLeader)?;
    let mut found = LeaseReadings { term, seconds: Vec::new(), to_checkpoint: Vec::new(), at };
    let mut renewed = 0;
    for id in &question.ids {
        found.seconds.push(if question.renew {
            match lessor.renew(*id, at) {
                Renewal::Renewed { lease, needs_checkpoint: note } => {
                    renewed += 1;
                    found.to_checkpoint.extend(note.then_some(lease));
                    lease.ttl
                }
                Renewal::Busy => LEASE_BUSY,
                Renewal::Unknown => 0,
            }
        } else {
            let left = lessor.left(*id, at).map(|left| left.as_secs());
            left.map_or(LEASE_UNKNOWN, |left| i64::try_from(left).unwrap_or(i64::MAX))
        });
    }
    context.metrics.leases_renewed.fetch_add(renewed, Ordering::Relaxed);
    Ok(found)
}

async fn expire(context: &ApiContext, over: LeaseExpire) {
    let id = over.id;
    if let Err(error) = context.propose_as_member(Operation::LeaseExpire(over)).await {
        tracing::debug!(lease.id = id, error = %error.text(), "a lease that is over was not ended yet");
    }
}

async fn propose_checkpoint(context: &ApiContext, noted: Option<LeaseCheckpoint>) {
    let Some(noted) = noted else { return };
    if let Err(error) = context.propose_as_member(Operation::LeaseCheckpoint(noted)).await {
        tracing::debug!(error = %error.text(), "what leases have left was not noted");
    }
}

/// Revokes expired leases and records the remaining time of others, while this member leads. Runs
/// for as long as the node runs.
pub(super) async fn run_lease_clock(context: Arc<ApiContext>) {
    let mut leader = context.leader.clone();
    let mut look = interval(LEASE_EXPIRY_INTERVAL);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let changed = tokio::select! {
            _ = look.tick() => Ok(()),
            changed = leader.changed() => changed,
        };
        if changed.is_err() {
            return;
        }
        let (over, noted) = {
            let (mut lessor, now) = context.clock.read();
            (lessor.expire(now), lessor.due_checkpoint(now))
        };
        if over.is_empty() && noted.is_none() {
            continue;
        }
        context.metrics.leases_expired.fetch_add(over.len() as u64, Ordering::Relaxed);
        let ended = join_all(over.into_iter().map(|over| expire(&context, over)));
        // A change of leader ends the wait. Proposals of this term have no effect under another
        // leader.
        tokio::select! {
            _ = join(ended, propose_checkpoint(&context, noted.clone())) => {}
            changed = leader.changed() => if changed.is_err() { return },
        }
        if let Some(noted) = noted {
            context.clock.lock().finish_checkpoint(&noted);
        }
    }
}
