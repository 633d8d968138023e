//! Checks all requests in the order of their revisions, in which every answer must be right.
//!
//! A change is placed at its revision. A request that changes nothing is placed after the change
//! with the revision of its answer.
//!
//! This order must agree with real time. If some client or watcher knows revision R when a request
//! begins, the request must be answered at R or later. If the request makes a revision itself, that
//! revision must be later than R. Only serializable reads may return older data.
//!
//! So a lost write, a stale read, and a value that no client wrote are all detected. Either the
//! answer differs from the model's, or its revision contradicts real time.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use node_proto::command::{self, AuthChange, Caller, Operation};
use node_proto::etcdserverpb::request_op::Request as Op;
use node_proto::etcdserverpb::{LeaseRevokeRequest, RequestOp};
use node_state::apply::{ApplyError, Outcome};
use node_state::auth::AuthError;
use node_state::mvcc::KeyRange;
use node_state::state_machine::{CommittedEntry, EntryKind, Position};
use tonic::Code;

use super::known_revisions::KnownRevisions;
use super::requests_by_revision::{Cause, RequestsByRevision, assign_causes, is_lost_delete};
use super::{
    Answer, HistoryReport, RecordedHistory, Request, RequestOutcome, RequestedOperation, Rule,
    RuleViolation, Time,
};
use crate::model::{ReferenceModel, StoreRevisions};

/// Replays all requests in order. Returns the model after the last one.
///
/// # Errors
/// Returns the first violation that was found.
pub fn check(history: &RecordedHistory) -> Result<(ReferenceModel, HistoryReport), RuleViolation> {
    let requests_by_revision = RequestsByRevision::from_history(history)?;
    let mut replay = Replay {
        history,
        known_revisions: KnownRevisions::from_history(history),
        model: ReferenceModel::default(),
        applied_entries: 0,
        leases: leases(history),
        effective_revocations: BTreeSet::new(),
    };
    for change in &history.users {
        let change = Some(change.clone());
        let applied = replay.apply(None, Operation::ChangeAuth(AuthChange { change }));
        applied.expect("a recording creates users in an order that the model accepts");
    }
    let happened = replay.run(&requests_by_revision)?;
    for request in &history.requests {
        replay.check_real_time(request)?;
        replay.check_refusal(request)?;
    }
    let mut report = HistoryReport { happened, ..HistoryReport::default() };
    let mut terms = BTreeSet::new();
    for request in &history.requests {
        match &request.outcome {
            RequestOutcome::Answered { answer, .. } => {
                report.answered += 1;
                terms.extend(answer.header().map(|header| header.raft_term));
            }
            RequestOutcome::Refused { code, .. } => {
                report.refused += 1;
                report.denied += usize::from(*code == Code::PermissionDenied);
            }
            RequestOutcome::Unknown { .. } => report.unknown += 1,
        }
    }
    report.terms = terms.len();
    Ok((replay.model, report))
}

/// Times of a lease and its revocations, as its client's requests show them.
#[derive(Debug)]
struct ClientLease {
    /// Time at which the client knew that the lease was granted.
    granted: Time,
    /// Time before which the lease must not expire.
    expires_at: Time,
    /// Numbers of the requests that revoke the lease.
    revocations: Vec<usize>,
}

/// Returns the leases whose grant was answered. Clients use only such leases.
fn leases(history: &RecordedHistory) -> BTreeMap<i64, ClientLease> {
    let mut leases = BTreeMap::new();
    for request in &history.requests {
        if let RequestOutcome::Answered { end, answer: Answer::Write(answer) } = &request.outcome
            && let node_state::apply::Response::LeaseGrant(answer) = answer
        {
            let seconds = u64::try_from(answer.ttl).unwrap_or(0);
            let expires_at = request.begin.saturating_add(seconds.saturating_mul(1_000_000_000));
            leases.insert(
                answer.id,
                ClientLease { granted: *end, expires_at, revocations: Vec::new() },
            );
        }
    }
    for (number, request) in history.requests.iter().enumerate() {
        if let RequestedOperation::Write(Operation::LeaseRevoke(operation)) = &request.operation
            && let Some(lease) = leases.get_mut(&operation.id)
        {
            lease.revocations.push(number);
        }
    }
    leases
}

struct Replay<'h> {
    history: &'h RecordedHistory,
    known_revisions: KnownRevisions,
    model: ReferenceModel,
    /// Number of entries applied to the model.
    applied_entries: u64,
    leases: BTreeMap<i64, ClientLease>,
    /// Numbers of the answered revocations that made a revision.
    effective_revocations: BTreeSet<usize>,
}

impl Replay<'_> {
    /// Replays all revisions. Returns how many writes with an unknown outcome have happened.
    fn run(&mut self, requests_by_revision: &RequestsByRevision) -> Result<usize, RuleViolation> {
        let lost: Vec<usize> = (0..self.history.requests.len())
            .filter(|number| {
                let request = &self.history.requests[*number];
                is_lost_delete(&request.operation, &request.outcome)
            })
            .collect();
        let (mut happened, mut candidates) = (0, BTreeMap::new());
        for revision in 1..=self.history.last_revision {
            if let Some(number) = requests_by_revision.made_by.get(&revision) {
                happened += usize::from(self.history.requests[*number].is_unknown());
                self.replay_change(*number, revision)?;
            } else if revision > 1 {
                let keys = requests_by_revision.deleted.get(&revision).map(Vec::as_slice);
                match self.find_revocation(requests_by_revision, revision) {
                    Some(number) => self.replay_change(number, revision)?,
                    None => {
                        let causes = self.apply_lost_delete(keys, &lost, revision)?;
                        candidates.insert(revision, causes);
                        happened += 1;
                    }
                }
            }
            let mut others =
                requests_by_revision.other_requests.get(&revision).cloned().unwrap_or_default();
            others.sort_by_key(|number| rank(&self.history.requests[*number]));
            for number in others {
                self.replay_other(number, revision)?;
            }
        }
        assign_causes(&candidates).map_err(|revision| {
            let what = format!("too few lost deletes for revision {revision}: {candidates:?}");
            RuleViolation::new(Rule::AtMostOnce, what)
        })?;
        Ok(happened)
    }

    /// Returns the answered revocation that made this revision, if no other request made it.
    fn find_revocation(
        &mut self,
        requests_by_revision: &RequestsByRevision,
        revision: i64,
    ) -> Option<usize> {
        let others = requests_by_revision.other_requests.get(&revision)?;
        let number = others.iter().copied().find(|number| {
            let operation = &self.history.requests[*number].operation;
            matches!(operation, RequestedOperation::Write(Operation::LeaseRevoke(operation))
                if !self.attached_keys(operation.id).is_empty())
        })?;
        self.effective_revocations.insert(number);
        Some(number)
    }

    /// Applies the request that made this revision, and compares its answer with the model's.
    fn replay_change(&mut self, number: usize, revision: i64) -> Result<(), RuleViolation> {
        let request = &self.history.requests[number];
        let RequestedOperation::Write(operation) = &request.operation else {
            unreachable!("a read makes no revision")
        };
        let outcome = self.apply(request.caller(), operation.clone());
        if let (None, Err(ApplyError::Auth(why))) = (request.answer(), &outcome) {
            return Err(not_permitted(request, *why));
        }
        if request.answer().is_some() {
            self.compare_answer(request, &outcome)?;
        } else if self.known_revisions.highest_before(request.begin) >= revision {
            let what = format!("known before it was asked for, {revision} is of {request:?}");
            return Err(RuleViolation::new(Rule::RealTime, what));
        }
        self.check_revision(revision, request)
    }

    /// Compares the answer of a request with the model's. The answer has this revision, which
    /// another request made.
    fn replay_other(&mut self, number: usize, revision: i64) -> Result<(), RuleViolation> {
        if self.effective_revocations.contains(&number) {
            return Ok(());
        }
        let request = &self.history.requests[number];
        match &request.operation {
            RequestedOperation::Write(operation) => {
                let outcome = self.apply(request.caller(), as_granted(operation, request));
                self.compare_answer(request, &outcome)?;
            }
            RequestedOperation::Read(range) => {
                let caller = request.caller();
                let permission =
                    self.model.users.may_read(caller.as_ref(), &range.key, &range.range_end);
                permission.map_err(|why| not_permitted(request, why))?;
                let state = StoreRevisions { revision, compacted: -1 };
                let expected = self.model.range(state, range).map(Answer::Read);
                let found = request.answer().map(|(answer, _)| answer.normalized());
                if expected.as_ref().ok() != found.as_ref() {
                    let what = format!("{request:?}: not {expected:?}");
                    return Err(RuleViolation::new(Rule::AnswersMatchModel, what));
                }
            }
        }
        self.check_revision(revision, request)
    }

    /// Returns the possible causes of the deletion of these keys, and applies one of them to the
    /// model. Every possible cause would change the model alike.
    fn apply_lost_delete(
        &mut self,
        keys: Option<&[Bytes]>,
        lost: &[usize],
        revision: i64,
    ) -> Result<Vec<Cause>, RuleViolation> {
        let candidates = keys.map_or_else(Vec::new, |keys| self.matching_causes(keys, lost));
        let in_time = candidates
            .iter()
            .filter(|(_, begin)| self.known_revisions.highest_before(*begin) < revision);
        let causes: Vec<Cause> = in_time.map(|(cause, _)| *cause).collect();
        let Some(cause) = causes.first() else {
            return Err(self.no_cause_violation(
                keys,
                candidates.first().map(|(cause, _)| *cause),
                revision,
            ));
        };
        let (caller, operation) = match cause {
            Cause::Request(number) => {
                let request = &self.history.requests[*number];
                let RequestedOperation::Write(operation) = &request.operation else {
                    unreachable!("a read deletes nothing")
                };
                (request.caller(), operation.clone())
            }
            Cause::Expiry(id) => {
                (command::member_caller(), Operation::LeaseRevoke(LeaseRevokeRequest { id: *id }))
            }
        };
        let outcome = self.apply(caller, operation);
        if self.model.newest_revision() != revision {
            let what = format!("revision {revision} would be of {causes:?}: {outcome:?}");
            return Err(RuleViolation::new(Rule::EveryRevisionHasCause, what));
        }
        Ok(causes)
    }

    /// Returns the causes that would delete exactly these keys now, each with the earliest time at
    /// which it can begin.
    fn matching_causes(&self, keys: &[Bytes], lost: &[usize]) -> Vec<(Cause, Time)> {
        let requests = lost.iter().map(|number| {
            let request = &self.history.requests[*number];
            let deletes = match &request.operation {
                RequestedOperation::Write(Operation::DeleteRange(operation)) => {
                    let range = KeyRange::new(operation.key.clone(), operation.range_end.clone());
                    self.model.records_in(&range, i64::MAX).into_iter().map(|kv| kv.key).collect()
                }
                RequestedOperation::Write(Operation::LeaseRevoke(operation)) => {
                    self.attached_keys(operation.id)
                }
                _ => Vec::new(),
            };
            (Cause::Request(*number), deletes, request.begin)
        });
        let expiries = self
            .leases
            .iter()
            .map(|(id, lease)| (Cause::Expiry(*id), self.attached_keys(*id), lease.expires_at));
        let candidates = requests.chain(expiries).filter(|(_, deletes, _)| deletes == keys);
        candidates.map(|(cause, _, begin)| (cause, begin)).collect()
    }

    /// Returns the violation for deleted keys without a cause. `too_late` is a cause that would
    /// delete these keys, but began later.
    fn no_cause_violation(
        &self,
        keys: Option<&[Bytes]>,
        too_late: Option<Cause>,
        revision: i64,
    ) -> RuleViolation {
        match too_late {
            None => {
                let what = match keys {
                    Some(keys) => format!("nobody asked for revision {revision}: {keys:?} deleted"),
                    None => format!("nobody asked for revision {revision}, and nobody saw it"),
                };
                RuleViolation::new(Rule::EveryRevisionHasCause, what)
            }
            Some(Cause::Expiry(id)) => {
                let what = format!("at {revision} lease {id} was over: {:?}", self.leases[&id]);
                RuleViolation::new(Rule::NoEarlyExpiry, what)
            }
            Some(Cause::Request(number)) => {
                let request = &self.history.requests[number];
                let what = format!("known before it was asked for, {revision} is of {request:?}");
                RuleViolation::new(Rule::RealTime, what)
            }
        }
    }

    fn attached_keys(&self, lease: i64) -> Vec<Bytes> {
        if !self.model.leases.all.contains_key(&lease) {
            return Vec::new();
        }
        let everything = KeyRange::From(Bytes::from_static(b"\0"));
        let all = self.model.records_in(&everything, i64::MAX).into_iter();
        all.filter(|kv| kv.lease == lease).map(|kv| kv.key).collect()
    }

    fn apply(&mut self, caller: Option<Caller>, operation: Operation) -> Outcome {
        self.applied_entries += 1;
        let id = self.applied_entries;
        let position = Position { index: id, term: 1 };
        let data = command::encode(id, caller, operation);
        self.model.apply(&CommittedEntry { position, kind: EntryKind::Normal, data });
        self.model.result_of(id).expect("it was applied").outcome.clone()
    }

    fn compare_answer(&self, request: &Request, outcome: &Outcome) -> Result<(), RuleViolation> {
        let found = request.answer().map(|(answer, _)| answer.normalized());
        match outcome {
            Ok(expected) if found == Some(Answer::Write(expected.clone())) => Ok(()),
            Err(ApplyError::Auth(why)) => Err(not_permitted(request, *why)),
            expected => {
                let what = format!("{request:?}: not {expected:?}");
                Err(RuleViolation::new(Rule::AnswersMatchModel, what))
            }
        }
    }

    /// Checks that the model has reached the revision of the answer.
    fn check_revision(&self, revision: i64, request: &Request) -> Result<(), RuleViolation> {
        let newest = self.model.newest_revision();
        if newest == revision {
            return Ok(());
        }
        let what = format!("{request:?}: the model stands at {newest}, not at {revision}");
        Err(RuleViolation::new(Rule::AnswersMatchModel, what))
    }

    fn check_real_time(&self, request: &Request) -> Result<(), RuleViolation> {
        let Some((_, revision)) = request.answer() else { return Ok(()) };
        let known_revision = self.known_revisions.highest_before(request.begin);
        let least = match &request.operation {
            RequestedOperation::Read(range) if range.serializable => return Ok(()),
            RequestedOperation::Read(_) => known_revision,
            RequestedOperation::Write(_) => {
                let (answer, _) = request.answer().expect("it was answered");
                known_revision + i64::from(super::requests_by_revision::has_made_revision(answer))
            }
        };
        if revision >= least {
            return Ok(());
        }
        let what = format!("{known_revision} was known before {request:?} began");
        Err(RuleViolation::new(Rule::RealTime, what))
    }

    /// Checks that a refusal has a reason.
    fn check_refusal(&self, request: &Request) -> Result<(), RuleViolation> {
        let RequestOutcome::Refused { end, code, text } = &request.outcome else { return Ok(()) };
        let permitted = self.check_permission(request);
        let has_reason = match code {
            Code::PermissionDenied => permitted.is_err(),
            // A member that has just started or lags behind may not know the token yet.
            Code::Unauthenticated => request.user.is_some(),
            Code::NotFound => self.may_lack_its_lease(request, *end),
            // A member that lags behind may not have reached the requested revision yet.
            Code::OutOfRange => match &request.operation {
                RequestedOperation::Read(range) => {
                    range.serializable
                        || range.revision > self.known_revisions.highest_before(request.begin)
                }
                RequestedOperation::Write(_) => false,
            },
            // A member refuses a request when its queue is full, which can happen to any request.
            Code::ResourceExhausted => true,
            _ => false,
        };
        if has_reason {
            return Ok(());
        }
        Err(RuleViolation::new(Rule::RefusedForAReason, format!("{text:?}: {request:?}")))
    }

    fn check_permission(&self, request: &Request) -> Result<(), AuthError> {
        let caller = request.caller();
        match &request.operation {
            RequestedOperation::Write(operation) => self.model.permit(caller.as_ref(), operation),
            RequestedOperation::Read(range) => {
                self.model.users.may_read(caller.as_ref(), &range.key, &range.range_end)
            }
        }
    }

    /// Whether it is possible that a lease in the request didn't exist when the member handled the
    /// request.
    fn may_lack_its_lease(&self, request: &Request, end: Time) -> bool {
        let RequestedOperation::Write(operation) = &request.operation else { return false };
        named_leases(operation).into_iter().any(|id| {
            let Some(lease) = self.leases.get(&id) else { return true };
            let revoked = lease.revocations.iter().map(|number| &self.history.requests[*number]);
            let mut revoked = revoked.filter(|revoke| !std::ptr::eq(*revoke, request));
            lease.granted > request.begin
                || lease.expires_at < end
                || revoked.any(|revoke| revoke.begin < end)
        })
    }
}

/// Returns the place of a request among all requests at one revision. Leases are granted before
/// they are used, and revoked afterwards.
fn rank(request: &Request) -> u8 {
    match &request.operation {
        RequestedOperation::Write(Operation::LeaseGrant(_)) => 0,
        RequestedOperation::Write(Operation::LeaseRevoke(_)) => 2,
        _ => 1,
    }
}

/// Returns the operation with the TTL that the member granted, which may be longer than requested
/// but never shorter.
fn as_granted(operation: &Operation, request: &Request) -> Operation {
    let mut operation = operation.clone();
    if let Operation::LeaseGrant(grant) = &mut operation
        && let Some((Answer::Write(node_state::apply::Response::LeaseGrant(answer)), _)) =
            request.answer()
    {
        grant.ttl = grant.ttl.max(answer.ttl);
    }
    operation
}

fn not_permitted(request: &Request, why: AuthError) -> RuleViolation {
    RuleViolation::new(Rule::Permitted, format!("{request:?}: not {why:?}"))
}

fn named_leases(operation: &Operation) -> Vec<i64> {
    let lease_of = |op: &RequestOp| match &op.request {
        Some(Op::RequestPut(put)) => put.lease,
        _ => 0,
    };
    let all = match operation {
        Operation::Put(put) => vec![put.lease],
        Operation::Txn(txn) => txn.success.iter().chain(&txn.failure).map(lease_of).collect(),
        Operation::LeaseRevoke(revoke) => vec![revoke.id],
        _ => Vec::new(),
    };
    all.into_iter().filter(|id| *id != 0).collect()
}
