//! Finds the request that made each revision, from the answers and from the values that watchers
//! saw.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use bytes::Bytes;
use node_proto::command::Operation;
use node_proto::etcdserverpb::request_op::Request as Op;
use node_proto::etcdserverpb::{RequestOp, response_op};
use node_proto::mvccpb::{Event, event::EventType};
use node_state::apply::Response;

use super::{
    Answer, RecordedHistory, RequestOutcome, RequestedOperation, Rule, RuleViolation, Watcher,
};

/// A possible cause of a revision that only deletes keys. Such a revision contains no value that
/// would identify its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Cause {
    /// The request with this number.
    Request(usize),
    /// The expiry of the lease with this id.
    Expiry(i64),
}

/// The requests of a history by revision.
#[derive(Debug)]
pub(super) struct RequestsByRevision {
    /// Request that made the revision, if an answer or a value identifies it.
    pub made_by: BTreeMap<i64, usize>,
    /// Deleted keys of the revisions for which neither an answer nor a value identifies the
    /// request.
    pub deleted: BTreeMap<i64, Vec<Bytes>>,
    /// Requests whose answer has this revision, although they did not make it.
    pub other_requests: BTreeMap<i64, Vec<usize>>,
}

impl RequestsByRevision {
    pub(super) fn from_history(history: &RecordedHistory) -> Result<Self, RuleViolation> {
        let (made_by, deleted, other_requests) =
            (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let mut requests_by_revision = Self { made_by, deleted, other_requests };
        for (number, request) in history.requests.iter().enumerate() {
            let Some((answer, revision)) = request.answer() else { continue };
            if revision > history.last_revision {
                let what =
                    format!("{} is the last revision, and {request:?}", history.last_revision);
                return Err(RuleViolation::new(Rule::RealTime, what));
            }
            if !has_made_revision(answer) {
                requests_by_revision.other_requests.entry(revision).or_default().push(number);
            } else if let Some(other) = requests_by_revision.made_by.insert(revision, number) {
                let other = &history.requests[other];
                let what = format!("{request:?} and {other:?}");
                return Err(RuleViolation::new(Rule::OneRequestPerRevision, what));
            }
        }
        requests_by_revision.identify_by_events(history)?;
        Ok(requests_by_revision)
    }

    /// Identifies revisions from the events of watchers of all keys.
    fn identify_by_events(&mut self, history: &RecordedHistory) -> Result<(), RuleViolation> {
        let mut values: HashMap<&Bytes, usize> = HashMap::new();
        for (number, request) in history.requests.iter().enumerate() {
            if let RequestedOperation::Write(operation) = &request.operation {
                values.extend(put_values(operation).into_iter().map(|value| (value, number)));
            }
        }
        let mut identified = BTreeSet::new();
        for (revision, events) in events_by_revision(history) {
            if self.made_by.contains_key(&revision) {
                continue;
            }
            let put = events.iter().find(|event| event.r#type() == EventType::Put);
            let Some(put) = put.and_then(|event| event.kv.as_ref()) else {
                let keys = events.iter().filter_map(|event| event.kv.as_ref());
                self.deleted.insert(revision, keys.map(|kv| kv.key.clone()).collect());
                continue;
            };
            let Some(number) = values.get(&put.value).copied() else {
                let what = format!("revision {revision} has {put:?}, which nobody put");
                return Err(RuleViolation::new(Rule::EveryRevisionHasCause, what));
            };
            let request = &history.requests[number];
            if !request.is_unknown() || !identified.insert(number) {
                let what = format!("revision {revision} has {put:?}, of {request:?}");
                return Err(RuleViolation::new(Rule::AtMostOnce, what));
            }
            self.made_by.insert(revision, number);
        }
        Ok(())
    }
}

/// Returns the events of each revision, as the first watcher of all keys received them.
fn events_by_revision(history: &RecordedHistory) -> BTreeMap<i64, Vec<&Event>> {
    let mut evidence = BTreeMap::new();
    for watcher in history.watchers.iter().filter(|watcher| watches_all_keys(watcher)) {
        let mut received: BTreeMap<i64, Vec<&Event>> = BTreeMap::new();
        let responses = watcher.streams.iter().flat_map(|stream| &stream.responses);
        for event in responses.flat_map(|(_, response)| &response.events) {
            let revision = event.kv.as_ref().map_or(0, |kv| kv.mod_revision);
            if revision <= history.last_revision {
                received.entry(revision).or_default().push(event);
            }
        }
        for (revision, events) in received {
            evidence.entry(revision).or_insert(events);
        }
    }
    evidence
}

fn watches_all_keys(watcher: &Watcher) -> bool {
    let request = &watcher.request;
    request.key[..] == [0] && request.range_end[..] == [0] && request.filters.is_empty()
}

/// Returns the values that a write can put. For a transaction these are the values of both
/// branches.
fn put_values<'o>(operation: &'o Operation) -> Vec<&'o Bytes> {
    match operation {
        Operation::Put(put) => vec![&put.value],
        Operation::Txn(txn) => {
            let put = |op: &'o RequestOp| match &op.request {
                Some(Op::RequestPut(put)) => Some(&put.value),
                _ => None,
            };
            txn.success.iter().chain(&txn.failure).filter_map(put).collect()
        }
        _ => Vec::new(),
    }
}

/// Whether the answer shows that the request made a revision. The answer to a lease revocation
/// never shows that.
pub(super) fn has_made_revision(answer: &Answer) -> bool {
    let has_changed = |response: &response_op::Response| match response {
        response_op::Response::ResponsePut(_) => true,
        response_op::Response::ResponseDeleteRange(deleted) => deleted.deleted > 0,
        response_op::Response::ResponseRange(_) | response_op::Response::ResponseTxn(_) => false,
    };
    match answer {
        Answer::Write(Response::Put(_)) => true,
        Answer::Write(Response::DeleteRange(deleted)) => deleted.deleted > 0,
        Answer::Write(Response::Txn(txn)) => {
            txn.responses.iter().filter_map(|op| op.response.as_ref()).any(has_changed)
        }
        Answer::Write(_) | Answer::Read(_) => false,
    }
}

/// Assigns a different possible cause to each revision, by bipartite matching (Kuhn 1955). Fails
/// with a revision for which no cause is left.
pub(super) fn assign_causes(candidates: &BTreeMap<i64, Vec<Cause>>) -> Result<(), i64> {
    let mut taken = BTreeMap::new();
    for revision in candidates.keys() {
        if !find_augmenting_path(candidates, *revision, &mut taken, &mut BTreeSet::new()) {
            return Err(*revision);
        }
    }
    Ok(())
}

fn find_augmenting_path(
    candidates: &BTreeMap<i64, Vec<Cause>>,
    revision: i64,
    taken: &mut BTreeMap<Cause, i64>,
    tried: &mut BTreeSet<Cause>,
) -> bool {
    for cause in &candidates[&revision] {
        if tried.insert(*cause) {
            let holder = taken.get(cause).copied();
            if holder.is_none_or(|holder| find_augmenting_path(candidates, holder, taken, tried)) {
                taken.insert(*cause, revision);
                return true;
            }
        }
    }
    false
}

/// Whether this is a delete or a lease revocation with an unknown outcome. Such a request may have
/// made a revision that only deletes keys.
pub(super) fn is_lost_delete(operation: &RequestedOperation, outcome: &RequestOutcome) -> bool {
    matches!(outcome, RequestOutcome::Unknown { .. })
        && matches!(
            operation,
            RequestedOperation::Write(Operation::DeleteRange(_) | Operation::LeaseRevoke(_))
        )
}
