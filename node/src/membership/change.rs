//! Changes of the table, as entries carry them.

use std::fmt;

use super::Member;
use crate::identity::{MemberId, OperationId};

/// A change, as it is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangeRequest {
    /// What is to change.
    pub change: MemberChange,
    /// By this it is carried out at most once.
    pub operation: Option<OperationId>,
    /// The configuration that it was planned on: it is refused on any other.
    pub planned_at: Option<u64>,
}

impl From<MemberChange> for ChangeRequest {
    fn from(change: MemberChange) -> Self {
        Self { change, operation: None, planned_at: None }
    }
}

/// One change of the members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberChange {
    /// A new member, as learner or as voter.
    Add(Member),
    /// A learner gets its vote.
    Promote(MemberId),
    /// A member is one no longer, for ever.
    Remove(MemberId),
    /// A member is reached at these peer URLs from now on.
    Update(MemberId, Vec<String>),
}

/// For log lines: the verb, the member's id in hexadecimal, and where the change says so its URLs.
impl fmt::Display for MemberChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Add(member) => {
                let kind = if member.is_learner { "learner" } else { "voter" };
                write!(f, "add {} as a {kind} at {}", member.id, member.peer_urls.join(","))
            }
            Self::Promote(id) => write!(f, "promote {id}"),
            Self::Remove(id) => write!(f, "remove {id}"),
            Self::Update(id, peer_urls) => write!(f, "update {id} to {}", peer_urls.join(",")),
        }
    }
}

/// For log lines: the change, and the operation id where the client sent one.
impl fmt::Display for ChangeRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.change.fmt(f)?;
        match &self.operation {
            Some(operation) => write!(f, " (operation {operation})"),
            None => Ok(()),
        }
    }
}

/// Why a change was refused; the same on every member. The table is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// There is a member of this id or incarnation.
    #[error("member ID already exists")]
    IdExists,
    /// A member of this id or incarnation was removed.
    #[error("the member was removed, and never comes back")]
    Removed,
    /// Another member is reached there.
    #[error("peer URL already exists")]
    PeerUrlExists,
    /// It is not the incarnation that the member is bound to.
    #[error("the member is bound to another incarnation")]
    OtherIncarnation,
    /// No such member.
    #[error("member not found")]
    NotFound,
    /// It votes already.
    #[error("can only promote a learner member")]
    NotALearner,
    /// Nobody would be left to vote.
    #[error("the last voter can't be removed")]
    LastVoter,
    /// It was planned or judged on another configuration than the present one.
    #[error("the members have changed since this change was planned: they are at {now}")]
    Stale {
        /// The present one.
        now: u64,
    },
    /// It has been carried out before, by its operation's id.
    #[error("this operation was carried out at {at}")]
    CarriedOut {
        /// The configuration that it made.
        at: u64,
    },
    /// It has no id, no URL, or an incarnation or key that is none.
    #[error("no member could be like this")]
    Malformed,
}
