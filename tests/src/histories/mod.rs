//! Recording and checking of histories: what clients of the built programs requested and what they
//! were answered.
//!
//! [`record`] lets clients and watchers send requests to a running cluster, while members are
//! killed, stopped and disconnected. It writes down each request with its beginning, its end and
//! its outcome. The rest is pure:
//!
//! - [`serial`] puts all requests in one order, and asks the plain [`model`](crate::model) for the
//!   right answer to each.
//! - [`watches`] compares the events of each watcher with the changes in that order.
//!
//! No search is needed to find the order, since the answer to a write has its revision. Each put
//! has a unique value. So a write whose answer was lost is placed where a watcher saw its value. If
//! no watcher saw the value, the write did not happen. Checking n requests takes O(n log n). No
//! other order would make a wrong answer right.
//!
//! This module doesn't check compactions (no client requests any), membership changes, and changes
//! of users during the requests. The simulation checks those.

mod known_revisions;
pub mod record;
mod requests_by_revision;
pub mod serial;
#[cfg(test)]
mod tests;
pub mod watches;

use node_proto::command::{Caller, Operation};
use node_proto::etcdserverpb::{RangeRequest, ResponseHeader, WatchCreateRequest, WatchResponse};
use node_state::apply;
use node_state::auth::AuthOperation as AuthChange;
use tonic::Code;

/// Monotonic time in nanoseconds since the recording began.
pub type Time = u64;

/// A recorded history of requests and watches.
#[derive(Clone, Debug, Default)]
pub struct RecordedHistory {
    /// Users and roles, which were created before all requests.
    pub users: Vec<AuthChange>,
    /// Requests, in no particular order.
    pub requests: Vec<Request>,
    pub watchers: Vec<Watcher>,
    /// Newest revision after the last request. Every watcher was given time to reach it. Later
    /// revisions come from requests that clients gave up, and are not checked.
    pub last_revision: i64,
}

/// One request of a client.
#[derive(Clone, Debug)]
pub struct Request {
    /// Number of the client.
    pub client: usize,
    /// Number of the member that got the request.
    pub member: usize,
    /// User that the client had authenticated as.
    pub user: Option<String>,
    /// Earliest time at which the request can have been sent.
    pub begin: Time,
    /// The requested write or read.
    pub operation: RequestedOperation,
    /// Outcome of the request.
    pub outcome: RequestOutcome,
}

/// The operation that a client requested.
#[derive(Clone, Debug)]
pub enum RequestedOperation {
    /// A request that goes through the log. Each value is put only once in a history, so that the
    /// value identifies the request. A transaction that deletes keys therefore also puts one.
    Write(Operation),
    /// A read of a range of keys.
    Read(RangeRequest),
}

/// Outcome of a request.
#[derive(Clone, Debug)]
pub enum RequestOutcome {
    /// The request was answered.
    Answered {
        /// Latest time at which the answer can have been received.
        end: Time,
        /// Content of the answer.
        answer: Answer,
    },
    /// The request was not carried out, and never will be.
    Refused {
        /// Latest time at which the refusal can have been received.
        end: Time,
        /// Code of the gRPC status.
        code: Code,
        /// Message of the gRPC status.
        text: String,
    },
    /// The request may have been carried out, or may still be carried out. The client received no
    /// answer, or an error that leaves this open.
    Unknown {
        /// Reason why the outcome is unknown.
        text: String,
    },
}

/// Content of an answer, as the client received it.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// Answer to a write.
    Write(apply::Response),
    /// Answer to a read.
    Read(node_proto::etcdserverpb::RangeResponse),
}

/// A client that watches through one stream at a time, at changing members.
#[derive(Clone, Debug)]
pub struct Watcher {
    /// User that the watcher had authenticated as.
    pub user: Option<String>,
    /// Request that creates the watch. Each stream has a start revision of its own.
    pub request: WatchCreateRequest,
    /// Streams in order of time.
    pub streams: Vec<RecordedStream>,
}

/// One stream of a watcher.
#[derive(Clone, Debug)]
pub struct RecordedStream {
    /// Number of the member that served the stream.
    pub member: usize,
    /// Start revision of the stream's watch: the first revision that the watcher had not received.
    /// 0 stands for the next revision.
    pub start_revision: i64,
    /// All responses, with the times of their arrival.
    pub responses: Vec<(Time, WatchResponse)>,
}

/// A property that every history must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rule {
    /// A refused request was not carried out, and every other request was carried out at most once.
    AtMostOnce,
    /// Every revision was made by a request in the history, or by the expiry of a lease.
    EveryRevisionHasCause,
    /// No two requests made one revision.
    OneRequestPerRevision,
    /// Every answer equals the model's answer at the same revision.
    AnswersMatchModel,
    /// The order of revisions agrees with real time.
    RealTime,
    /// Every refusal has a reason.
    RefusedForAReason,
    /// A lease doesn't expire before its TTL has passed.
    NoEarlyExpiry,
    /// A user without permission is refused, and receives no data.
    Permitted,
    /// A watcher receives every change once and in order.
    WatchInOrder,
    /// A watcher receives all changes of a revision at once.
    WatchWholeRevisions,
    /// A watcher receives no event that an earlier progress notification covered.
    WatchProgress,
    /// Every event equals the model's change.
    WatchEvents,
    /// By the end of the history, a watcher has received all changes.
    WatchEverything,
}

/// A violation of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleViolation {
    /// The rule that was violated.
    pub rule: Rule,
    /// Description of the violation.
    pub description: String,
}

impl RuleViolation {
    pub(crate) fn new(rule: Rule, what: impl Into<String>) -> Self {
        Self { rule, description: what.into() }
    }
}

impl std::fmt::Display for RuleViolation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}: {}", self.rule, self.description)
    }
}

impl std::error::Error for RuleViolation {}

/// Counters that show how much a checked history contains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HistoryReport {
    /// Number of answered requests.
    pub answered: usize,
    /// Number of refused requests.
    pub refused: usize,
    /// Number of requests refused for lack of permission; `refused` includes them.
    pub denied: usize,
    /// Number of requests whose outcome is unknown.
    pub unknown: usize,
    /// Number of writes with an unknown outcome that were carried out; `unknown` includes them.
    pub happened: usize,
    /// Number of different Raft terms in the answers.
    pub terms: usize,
    /// Number of streams that continued an earlier stream's watch.
    pub resumed: usize,
    /// Number of events that watchers received.
    pub events: usize,
}

/// Checks a whole history.
///
/// # Errors
/// Returns the first violation that was found.
pub fn judge(history: &RecordedHistory) -> Result<HistoryReport, RuleViolation> {
    let (model, mut report) = serial::check(history)?;
    for (number, watcher) in history.watchers.iter().enumerate() {
        let event_count =
            watches::check(watcher, &model, history.last_revision).map_err(|violation| {
                let RuleViolation { rule, description: what } = violation;
                let request = &watcher.request;
                RuleViolation::new(rule, format!("watcher {number} of {request:?}: {what}"))
            })?;
        report.events += event_count;
        let created = |stream: &&RecordedStream| {
            stream.responses.iter().any(|(_, response)| response.created)
        };
        report.resumed += watcher.streams.iter().skip(1).filter(created).count();
    }
    Ok(report)
}

impl Request {
    /// Returns the time of the answer or refusal, if there was one.
    fn end(&self) -> Option<Time> {
        match &self.outcome {
            RequestOutcome::Answered { end, .. } | RequestOutcome::Refused { end, .. } => {
                Some(*end)
            }
            RequestOutcome::Unknown { .. } => None,
        }
    }

    /// Returns the answer and its revision, if there was an answer.
    fn answer(&self) -> Option<(&Answer, i64)> {
        match &self.outcome {
            RequestOutcome::Answered { answer, .. } => Some((answer, answer.header()?.revision)),
            RequestOutcome::Refused { .. } | RequestOutcome::Unknown { .. } => None,
        }
    }

    fn is_unknown(&self) -> bool {
        matches!(self.outcome, RequestOutcome::Unknown { .. })
    }

    /// Returns the request's caller for the model. Its revision of users is the maximum, because
    /// users never change after the first request.
    fn caller(&self) -> Option<Caller> {
        caller(self.user.as_deref())
    }
}

fn caller(user: Option<&str>) -> Option<Caller> {
    let user = user?.to_owned();
    Some(Caller { user, revision: u64::MAX, member: false })
}

impl Answer {
    /// Returns the header of the answer. Every answer of the model has a header.
    fn header(&self) -> Option<&ResponseHeader> {
        match self {
            Self::Read(found) => found.header.as_ref(),
            Self::Write(apply::Response::Put(answer)) => answer.header.as_ref(),
            Self::Write(apply::Response::DeleteRange(answer)) => answer.header.as_ref(),
            Self::Write(apply::Response::Txn(answer)) => answer.header.as_ref(),
            Self::Write(apply::Response::LeaseGrant(answer)) => answer.header.as_ref(),
            Self::Write(apply::Response::LeaseRevoke(answer)) => answer.header.as_ref(),
            Self::Write(_) => None,
        }
    }

    /// Returns the answer with only the revision in its header, because the model knows no other
    /// header field.
    fn normalized(&self) -> Self {
        let mut normalized = self.clone();
        let header = match &mut normalized {
            Self::Read(found) => &mut found.header,
            Self::Write(apply::Response::Put(answer)) => &mut answer.header,
            Self::Write(apply::Response::DeleteRange(answer)) => &mut answer.header,
            Self::Write(apply::Response::Txn(answer)) => &mut answer.header,
            Self::Write(apply::Response::LeaseGrant(answer)) => &mut answer.header,
            Self::Write(apply::Response::LeaseRevoke(answer)) => &mut answer.header,
            Self::Write(_) => return normalized,
        };
        if let Some(header) = header {
            *header = ResponseHeader { revision: header.revision, ..ResponseHeader::default() };
        }
        normalized
    }
}
