//! Changes of members. The leader judges them, and they go through consensus one at a time.
//!
//! Any member accepts a request and sends it on to the leader. Only the leader knows how far each
//! member's log is. It judges the request on the current configuration, and proposes the change
//! with that configuration's index. If another change comes in between, the leader judges the
//! request again.
//!
//! If a change removes the leader, the leader first transfers its leadership, and its successor
//! makes the change. So no write has to wait for an election.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use node_proto::command::{self, Operation};
use node_proto::musterpb;
use node_state::apply::{ApplyError, MemberChangeAnswer, Response};
use node_state::auth::Caller;
use node_state::identity::MemberId;
use node_state::membership::{
    ChangeDecision, ChangeError, ChangeJudge, ChangeObjection, ChangeRefusal, ChangeRequest,
    MemberChange, MemberTable,
};
use prost::Message as _;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::context::{ApiContext, encode};
use super::error::Error;

/// Wait before a request is sent again after the supposed leader has refused it.
pub(super) const LEADER_POLL_INTERVAL: Duration = Duration::from_millis(20);
const PROMOTE_RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// Maximum time to wait until this member shows a change that the leader has made.
const CATCH_UP_TIMEOUT: Duration = Duration::from_secs(1);

/// Makes a change of members. If another member leads, asks that member to make the change.
pub(super) async fn change_members(
    context: &ApiContext,
    asked: ChangeRequest,
) -> Result<MemberChangeAnswer, Error> {
    let deadline = context.deadline();
    // As in etcd, the member that gets the request checks it first. So an invalid request is
    // refused even without a leader.
    judge(context, |judge| judge.precheck(&asked)).map_err(|refused| refuse(&asked, refused))?;
    loop {
        let known = context.wait_for_leader(deadline).await?;
        let changed = if known == context.identity.member_id {
            change_members_as_leader(context, &asked, deadline).await
        } else {
            forward_change(context, MemberId(known), &asked, deadline).await
        };
        match changed {
            Ok(changed) => {
                wait_until_shown(context, changed.configuration_index).await;
                return Ok(changed);
            }
            Err(Error::NotLeader) if Instant::now() < deadline => {
                wait_for_another_leader(context, known).await;
            }
            Err(Error::NotLeader) => return Err(Error::Timeout),
            Err(error) => return Err(error),
        }
    }
}

/// Waits until this member knows that `known` no longer leads. The wait is short, because `known`
/// possibly was elected and doesn't know it yet.
async fn wait_for_another_leader(context: &ApiContext, known: u64) {
    let mut leader = context.leader.clone();
    let _ = timeout(LEADER_POLL_INTERVAL, leader.wait_for(|leader| *leader != known)).await;
}

fn table(context: &ApiContext) -> Arc<MemberTable> {
    Arc::clone(&context.members.borrow())
}

/// Waits until the list of members that this member has applied includes the change. The time is
/// limited, since a removed member possibly never receives the change.
async fn wait_until_shown(context: &ApiContext, at: u64) {
    let mut members = context.members.clone();
    let shown = members.wait_for(|table| table.configuration_index() >= at);
    let _ = timeout(CATCH_UP_TIMEOUT, shown).await;
}

/// Sends the change to the leader and waits for the answer.
async fn forward_change(
    context: &ApiContext,
    leader: MemberId,
    asked: &ChangeRequest,
    deadline: Instant,
) -> Result<MemberChangeAnswer, Error> {
    let Some(peers) = &context.peers else { return Err(Error::NotLeader) };
    let request = command::MemberChange::from(asked).encode_to_vec();
    let answer = timeout_at(deadline, peers.ask(leader, request.into())).await;
    let answer = match answer.map_err(|_| Error::Timeout)? {
        Ok(answer) => answer,
        Err(error) => {
            // It is unknown whether the change was made, so the client has to read the member list.
            tracing::warn!(%error, leader.id = %leader, "the leader did not answer a change of members");
            return Err(Error::TimeoutConnectionLost);
        }
    };
    let answer = musterpb::MembersChanged::decode(answer).map_err(|_| Error::Timeout)?;
    if answer.refused.is_empty() {
        return Ok(MemberChangeAnswer {
            members: answer.members,
            configuration_index: answer.changed,
        });
    }
    // The leader's build can be newer and refuse for a reason that this member doesn't know. Then
    // it is unknown whether the change was made.
    Err(Error::from_text(&answer.refused, answer.changed).unwrap_or(Error::Timeout))
}

/// Answers another member's request for a change, which it sent because it takes this member for
/// the leader.
pub(super) async fn answer_change(context: &ApiContext, request: Bytes) -> Option<Bytes> {
    let asked = command::MemberChange::decode(request).ok()?;
    let asked = ChangeRequest::try_from(asked).ok()?;
    let answer = match change_members_as_leader(context, &asked, context.deadline()).await {
        Ok(MemberChangeAnswer { members, configuration_index: at }) => {
            musterpb::MembersChanged { members, changed: at, ..Default::default() }
        }
        Err(error) => musterpb::MembersChanged {
            refused: error.text().into_owned(),
            changed: error.configuration().unwrap_or_default(),
            ..Default::default()
        },
    };
    Some(answer.encode_to_vec().into())
}

/// Makes a change as the leader. Returns `NotLeader` if this member isn't the leader, or has
/// transferred its leadership.
async fn change_members_as_leader(
    context: &ApiContext,
    asked: &ChangeRequest,
    deadline: Instant,
) -> Result<MemberChangeAnswer, Error> {
    let one = timeout_at(deadline, context.change_lock.lock());
    let _one = one.await.map_err(|_| Error::Timeout)?;
    loop {
        let entry = match wait_for_ruling(context, asked, deadline).await? {
            ChangeDecision::Propose(entry) => entry,
            ChangeDecision::TransferLeadership => {
                context.handle.hand_over().await;
                // If this member still leads, no other member could take over. Its removal would
                // leave the cluster without a leader.
                return Err(if context.leads() { Error::Unhealthy } else { Error::NotLeader });
            }
        };
        let id = context.request_ids.next();
        let operation = Operation::ChangeMember(*entry);
        let payload = encode(id, Caller::Member, operation, context.limits.max_request_bytes)?;
        let pending = context.metrics.count_pending_write();
        let outcome = context.handle.propose_change(payload, id).await?;
        pending.end();
        match outcome {
            Ok(Response::MembersChanged(changed)) => {
                tracing::info!(change = %asked, changed.configuration_index, "changed the members");
                let promoted = matches!(asked.change, MemberChange::Promote(_));
                context.metrics.promoted.fetch_add(u64::from(promoted), Ordering::Relaxed);
                return Ok(changed);
            }
            Ok(_) => unreachable!("apply answers each operation in kind"),
            Err(ApplyError::Members(ChangeError::Stale { .. })) if Instant::now() < deadline => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns the leader's decision about a change. Waits until `deadline` if no quorum knows of the
/// last change yet. Waits up to one election timeout if a learner hasn't answered the last
/// heartbeats.
async fn wait_for_ruling(
    context: &ApiContext,
    asked: &ChangeRequest,
    deadline: Instant,
) -> Result<ChangeDecision, Error> {
    let mut status = context.status.clone();
    let answered_by = deadline.min(Instant::now() + context.limits.election_timeout);
    loop {
        status.mark_unchanged();
        let ruling = judge(context, |judge| judge.decide(asked));
        let until = match ruling {
            Err(ChangeRefusal::Objection(ChangeObjection::Unsettled)) => deadline,
            Err(ChangeRefusal::Objection(ChangeObjection::LearnerSilent)) => answered_by,
            ruling => return ruling.map_err(|refused| refuse(asked, refused)),
        };
        if Instant::now() >= until {
            return ruling.map_err(|refused| refuse(asked, refused));
        }
        // When a learner answers a heartbeat, or a quorum learns of the last change, the consensus
        // status changes.
        if let Ok(Err(_)) = timeout_at(until, status.changed()).await {
            return Err(Error::Stopped);
        }
    }
}

/// Calls `decide` with a judge of changes that has this member's current state: members,
/// connections and consensus status.
fn judge<T>(context: &ApiContext, decide: impl FnOnce(&ChangeJudge<'_>) -> T) -> T {
    let connected: BTreeMap<MemberId, Duration> = match &context.peers {
        Some(peers) => {
            peers.connected().into_iter().map(|(id, since)| (id, since.elapsed())).collect()
        }
        None => BTreeMap::new(),
    };
    let (table, status) = (table(context), Arc::clone(&context.status.borrow()));
    let judge = ChangeJudge {
        rules: context.rules,
        local: MemberId(context.identity.member_id),
        is_leader: context.leads(),
        table: &table,
        connected: &connected,
        peers: &status.peers,
        settled_index: status.barrier_index,
        last: status.last,
    };
    decide(&judge)
}

fn refuse(asked: &ChangeRequest, refused: ChangeRefusal) -> Error {
    if let ChangeRefusal::Objection(objection) = refused {
        tracing::warn!(reason = %objection, change = %asked, "rejecting a change of members");
    }
    refused.into()
}

/// Promotes members that were added as voters and had to begin as learners, as soon as each is
/// ready. Works while this member leads.
pub(super) async fn promote_when_ready(context: Arc<ApiContext>) {
    let mut members = context.members.clone();
    let mut leader = context.leader.clone();
    loop {
        let ready = members.borrow_and_update().learner_to_promote();
        let leads = *leader.borrow_and_update() == context.identity.member_id;
        match ready {
            Some(id) if leads => {
                let deadline = Instant::now() + CATCH_UP_TIMEOUT;
                let promotion = MemberChange::Promote(id).into();
                if let Err(error) = change_members_as_leader(&context, &promotion, deadline).await {
                    tracing::debug!(error = %error.text(), member.id = %id, "cannot promote yet");
                }
                sleep(PROMOTE_RETRY_INTERVAL).await;
            }
            _ => {
                let changed = tokio::select! {
                    changed = members.changed() => changed,
                    changed = leader.changed() => changed,
                };
                if changed.is_err() {
                    return;
                }
            }
        }
    }
}
