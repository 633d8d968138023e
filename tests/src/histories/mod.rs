//! Histories of the built programs: what clients asked for and what they were told, judged afterwards.
//!
//! [`record`] has clients and watchers ask the members of a running cluster, while somebody else kills,
//! stops and cuts off those members, and writes down each request with its beginning, its end and what
//! came of it. The rest is pure. [`serial`] puts all requests in one order and asks the plain
//! [`model`](crate::model) what each should have been answered; [`watches`] compares what each watcher
//! was told with the changes of that order.
//!
//! The order needn't be searched for, since a write's answer has its revision. A write whose answer was
//! lost stands where a watcher saw its value, which nobody else writes; one that nobody saw has not
//! happened. So a history of n requests takes O(n log n), and every wrong answer is one that no other
//! order would make right.
//!
//! What is not judged: compactions (nobody asks for any), changes of members, and of users while
//! requests are on their way. The simulation does those.

mod known;
mod placing;
pub mod record;
pub mod serial;
#[cfg(test)]
mod tests;
pub mod watches;

use muster_node::apply;
use muster_node::auth::Change as AuthChange;
use node_proto::command::{Caller, Operation};
use node_proto::etcdserverpb::{RangeRequest, ResponseHeader, WatchCreateRequest, WatchResponse};
use tonic::Code;

/// Monotonic nanoseconds since the recording began.
pub type Time = u64;

/// All that was asked and told.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// Users and roles, as they were made before anything else.
    pub users: Vec<AuthChange>,
    /// Requests, in no particular order.
    pub requests: Vec<Request>,
    /// Watchers.
    pub watchers: Vec<Watcher>,
    /// The newest revision once all requests were over: the history ends there. Every watcher was given
    /// the time to reach it. What comes after it, of requests that were given up, is not judged.
    pub last: i64,
}

/// One request of a client.
#[derive(Clone, Debug)]
pub struct Request {
    /// Which client.
    pub client: usize,
    /// Which member was asked.
    pub member: usize,
    /// As which user.
    pub user: Option<String>,
    /// Not sent before.
    pub begin: Time,
    /// What for.
    pub asked: Asked,
    /// What was told.
    pub came: Came,
}

/// What a request is about.
#[derive(Clone, Debug)]
pub enum Asked {
    /// What goes through the log. Each value that is put is put once in a history, and a transaction
    /// that deletes something also puts something: so it is known again.
    Write(Operation),
    /// What is read.
    Read(RangeRequest),
}

/// What came of a request.
#[derive(Clone, Debug)]
pub enum Came {
    /// An answer.
    Answered {
        /// Not received after.
        end: Time,
        /// What it says.
        answer: Answer,
    },
    /// It was not carried out and never will be.
    Refused {
        /// Not received after.
        end: Time,
        /// gRPC's code.
        code: Code,
        /// The server's words.
        text: String,
    },
    /// It may have been carried out, or may yet be: no answer came, or one that says so.
    Unknown {
        /// Why.
        text: String,
    },
}

/// An answer as it came.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// Of a write.
    Written(apply::Response),
    /// Of a read.
    Found(node_proto::etcdserverpb::RangeResponse),
}

/// One that watches, now at this member and then at that one.
#[derive(Clone, Debug)]
pub struct Watcher {
    /// As which user.
    pub user: Option<String>,
    /// What for; where it begins is said by each stream.
    pub wants: WatchCreateRequest,
    /// One after the other.
    pub streams: Vec<Stream>,
}

/// One stream of a watcher.
#[derive(Clone, Debug)]
pub struct Stream {
    /// At which member.
    pub member: usize,
    /// The first revision that it asked for: the first that it was not told of. 0: whichever is next.
    pub start_revision: i64,
    /// All that came, and when.
    pub heard: Vec<(Time, WatchResponse)>,
}

/// What must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rule {
    /// What was refused has not happened, and what happened once was asked for once.
    HappenedAsAsked,
    /// Every revision was made by somebody's request.
    NothingFromNowhere,
    /// Two requests don't share a revision.
    OneRequestPerRevision,
    /// Every answer is the model's, at its revision.
    AnswersAreTheModels,
    /// The order agrees with real time.
    RealTime,
    /// Nothing is refused without a reason.
    RefusedForAReason,
    /// A lease doesn't end before its time.
    LeasesLast,
    /// Who may not is refused, and told nothing.
    Permitted,
    /// A watcher is told each change once, in order, and none is left out.
    WatchInOrder,
    /// All changes of a revision come at once.
    WatchWholeRevisions,
    /// Nothing is told after a notice that it was all told.
    WatchProgress,
    /// An event is what the model says that happened.
    WatchEvents,
    /// In the end a watcher has been told everything.
    WatchEverything,
}

/// A broken promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which one.
    pub rule: Rule,
    /// By what.
    pub what: String,
}

impl Violation {
    pub(crate) fn new(rule: Rule, what: impl Into<String>) -> Self {
        Self { rule, what: what.into() }
    }
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}: {}", self.rule, self.what)
    }
}

impl std::error::Error for Violation {}

/// What a history was, for who wants to know that it was worth judging.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Requests that were answered.
    pub answered: usize,
    /// Refused ones.
    pub refused: usize,
    /// Of those, who may not.
    pub denied: usize,
    /// Those whose outcome nobody was told.
    pub unknown: usize,
    /// Of those, writes that have happened nevertheless.
    pub happened: usize,
    /// Terms that answers came from.
    pub terms: usize,
    /// Streams on which a watcher went on.
    pub resumed: usize,
    /// Events that watchers were told.
    pub events: usize,
}

/// Judges all of it.
///
/// # Errors
/// The first broken promise that was found.
pub fn judge(history: &History) -> Result<Report, Violation> {
    let (model, mut report) = serial::check(history)?;
    for (number, watcher) in history.watchers.iter().enumerate() {
        let told = watches::check(watcher, &model, history.last).map_err(|violation| {
            let Violation { rule, what } = violation;
            let wants = &watcher.wants;
            Violation::new(rule, format!("watcher {number} of {wants:?}: {what}"))
        })?;
        report.events += told;
        let created = |stream: &&Stream| stream.heard.iter().any(|(_, told)| told.created);
        report.resumed += watcher.streams.iter().skip(1).filter(created).count();
    }
    Ok(report)
}

impl Request {
    /// When its outcome was told.
    fn end(&self) -> Option<Time> {
        match &self.came {
            Came::Answered { end, .. } | Came::Refused { end, .. } => Some(*end),
            Came::Unknown { .. } => None,
        }
    }

    /// What it was answered, and at which revision.
    fn answer(&self) -> Option<(&Answer, i64)> {
        match &self.came {
            Came::Answered { answer, .. } => Some((answer, answer.header()?.revision)),
            Came::Refused { .. } | Came::Unknown { .. } => None,
        }
    }

    fn is_unknown(&self) -> bool {
        matches!(self.came, Came::Unknown { .. })
    }

    /// Who asks. Users are made before all else, so that whoever asks knows their newest revision.
    fn caller(&self) -> Option<Caller> {
        caller(self.user.as_deref())
    }
}

fn caller(user: Option<&str>) -> Option<Caller> {
    let user = user?.to_owned();
    Some(Caller { user, revision: u64::MAX, member: false })
}

impl Answer {
    /// Its header; an answer without one is not the model's.
    fn header(&self) -> Option<&ResponseHeader> {
        match self {
            Self::Found(found) => found.header.as_ref(),
            Self::Written(apply::Response::Put(answer)) => answer.header.as_ref(),
            Self::Written(apply::Response::DeleteRange(answer)) => answer.header.as_ref(),
            Self::Written(apply::Response::Txn(answer)) => answer.header.as_ref(),
            Self::Written(apply::Response::LeaseGrant(answer)) => answer.header.as_ref(),
            Self::Written(apply::Response::LeaseRevoke(answer)) => answer.header.as_ref(),
            Self::Written(_) => None,
        }
    }

    /// The same with nothing in the header but the revision, which is all that a model knows.
    fn plain(&self) -> Self {
        let mut plain = self.clone();
        let header = match &mut plain {
            Self::Found(found) => &mut found.header,
            Self::Written(apply::Response::Put(answer)) => &mut answer.header,
            Self::Written(apply::Response::DeleteRange(answer)) => &mut answer.header,
            Self::Written(apply::Response::Txn(answer)) => &mut answer.header,
            Self::Written(apply::Response::LeaseGrant(answer)) => &mut answer.header,
            Self::Written(apply::Response::LeaseRevoke(answer)) => &mut answer.header,
            Self::Written(_) => return plain,
        };
        if let Some(header) = header {
            *header = ResponseHeader { revision: header.revision, ..ResponseHeader::default() };
        }
        plain
    }
}
