//! Invariant: every outcome, every read and every store equals the model's.

use node_proto::command::Caller;
use node_proto::etcdserverpb::{RangeRequest, RangeResponse, ResponseHeader};
use node_state::apply::{ApplyError, Outcome, Response};
use node_state::auth::AuthError;
use node_state::mvcc::{KeyRange, Store, View};

use crate::model::{ModelResult, ReferenceModel, StoreRevisions};
use crate::sim::InvariantViolation;

/// The model, compared with the members' stores.
#[derive(Debug, Default)]
pub struct StoreComparison {
    /// Model that all stores must equal.
    pub model: ReferenceModel,
}

fn answer_violation(what: String) -> InvariantViolation {
    InvariantViolation::new("answers equal the model's", what)
}

fn store_violation(what: String) -> InvariantViolation {
    InvariantViolation::new("stores equal the model", what)
}

/// Returns the revision in an outcome's header, if it has one.
pub fn header_revision(outcome: &Outcome) -> Option<i64> {
    let header: &Option<ResponseHeader> = match outcome.as_ref().ok()? {
        Response::Put(response) => &response.header,
        Response::DeleteRange(response) => &response.header,
        Response::Txn(response) => &response.header,
        Response::Compact(response) => &response.header,
        Response::LeaseGrant(response) => &response.header,
        Response::LeaseRevoke(response) => &response.header,
        Response::Alarm(_)
        | Response::LeasesCheckpointed
        | Response::MemberPublished
        | Response::MembersChanged(_)
        | Response::AuthChanged(_)
        | Response::TokenAssigned { .. }
        | Response::AnswerTooLarge => return None,
    };
    header.as_ref().map(|header| header.revision)
}

impl StoreComparison {
    /// Checks the outcome of a request that a member has applied. If no client waits for the
    /// outcome, it may lack data that the member would have to read.
    pub fn check_outcome(
        &self,
        member: u64,
        request: u64,
        is_awaited: bool,
        outcome: &Outcome,
    ) -> Result<&ModelResult, InvariantViolation> {
        let done = self.model.result_of(request).expect("the model has what is committed first");
        let expected = &done.outcome;
        let same = if is_awaited {
            outcome == expected
        } else {
            outcome.as_ref().err() == expected.as_ref().err()
                && header_revision(outcome) == header_revision(expected)
        };
        if same {
            return Ok(done);
        }
        Err(answer_violation(format!("{member}, request {request}: {outcome:?}, not {expected:?}")))
    }

    /// Checks the result of a range request that a member has read from `view`.
    pub fn check_read(
        &self,
        member: u64,
        view: &View,
        request: &RangeRequest,
        found: &Result<RangeResponse, ApplyError>,
    ) -> Result<(), InvariantViolation> {
        let expected = self.model.range(self.state(member, view)?, request);
        if *found == expected {
            return Ok(());
        }
        Err(answer_violation(format!("{member}, {request:?}: {found:?}, not {expected:?}")))
    }

    /// Checks a member's decision whether a caller may read a range of `view`.
    pub fn check_permission(
        &self,
        member: u64,
        view: &View,
        caller: Option<&Caller>,
        request: &RangeRequest,
        said: Result<(), AuthError>,
    ) -> Result<(), InvariantViolation> {
        let users = self.model.users_at(view.applied().index);
        let expected = users.may_read(caller, &request.key, &request.range_end);
        if said == expected {
            return Ok(());
        }
        let what = format!("{member}, {caller:?}, {request:?}: {said:?}, not {expected:?}");
        Err(InvariantViolation::new("permissions equal the model's", what))
    }

    /// Checks the user that a member names for the token assigned by entry `entry`. The member may
    /// not know a token that was assigned before it started.
    pub fn check_token(
        &self,
        member: u64,
        view: &View,
        entry: u64,
        found: Option<&str>,
    ) -> Result<(), InvariantViolation> {
        let expected = self.model.users_at(view.applied().index).token(entry);
        if found.is_none() || found == expected {
            return Ok(());
        }
        let what =
            format!("{member}: the token of entry {entry} is {found:?}'s, not {expected:?}'s");
        Err(InvariantViolation::new("permissions equal the model's", what))
    }

    /// Returns the state of a view, after checking that it equals the model's at the same entry.
    fn state(&self, member: u64, view: &View) -> Result<StoreRevisions, InvariantViolation> {
        let at = view.applied().index;
        let state =
            StoreRevisions { revision: view.revision(), compacted: view.compact_revision() };
        match self.model.state(at) {
            Some(expected) if expected == state => {
                let differs = self.model.users_at(at).differs(view.auth());
                let what = |what| store_violation(format!("{member} at entry {at}: users: {what}"));
                differs.map_or(Ok(state), |differs| Err(what(differs)))
            }
            expected => {
                Err(store_violation(format!("{member} at entry {at}: {state:?}, not {expected:?}")))
            }
        }
    }

    /// Checks that a member's store equals the model at its newest revision. If `all` is true, it
    /// checks every readable revision.
    pub fn check_contents(
        &self,
        member: u64,
        store: &Store,
        all: bool,
    ) -> Result<(), InvariantViolation> {
        let view = store.view();
        let state = self.state(member, &view)?;
        let first = if all { state.compacted.max(1) } else { state.revision };
        let everything = KeyRange::From(bytes::Bytes::from_static(b"\0"));
        for revision in first..=state.revision {
            let request = RangeRequest {
                key: bytes::Bytes::from_static(b"\0"),
                range_end: bytes::Bytes::from_static(b"\0"),
                revision,
                ..RangeRequest::default()
            };
            let found = store
                .range(&view, &request)
                .map_err(|error| store_violation(format!("{member} at {revision}: {error:?}")))?;
            let expected = self.model.records_in(&everything, revision);
            if found.kvs != expected {
                let found = found.kvs;
                let what = format!("{member} at {revision}: {found:?}, not {expected:?}");
                return Err(store_violation(what));
            }
        }
        Ok(())
    }
}
