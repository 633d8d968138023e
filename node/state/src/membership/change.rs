//! Changes of the member table, as log entries contain them.

use std::fmt;

use super::Member;
use crate::identity::{MemberId, OperationId};

/// A requested change of the members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangeRequest {
    /// The change to be made.
    pub change: MemberChange,
    /// Operation id, by which the change is carried out at most once.
    pub operation: Option<OperationId>,
    /// Configuration on which the change was planned, as in
    /// [`MemberTable::configuration_index`](super::MemberTable::configuration_index). On any other
    /// configuration, the change is refused.
    pub planned_at: Option<u64>,
}

impl From<MemberChange> for ChangeRequest {
    fn from(change: MemberChange) -> Self {
        Self { change, operation: None, planned_at: None }
    }
}

/// A change of one member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberChange {
    /// Adds a new member, as a learner or as a voter.
    Add(Member),
    /// Gives a learner its vote.
    Promote(MemberId),
    /// Removes a member for ever.
    Remove(MemberId),
    /// Replaces the peer URLs of a member.
    Update(MemberId, Vec<String>),
}

/// Formats the change for log lines: the verb, the member's id in hexadecimal, and the URLs, if the
/// change has any.
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

/// Formats the request for log lines: the change, and the operation id if the client sent one.
impl fmt::Display for ChangeRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.change.fmt(f)?;
        match &self.operation {
            Some(operation) => write!(f, " (operation {operation})"),
            None => Ok(()),
        }
    }
}

/// Why a change was refused. Every member gets the same error, and the table is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// A member with this id or incarnation exists already.
    #[error("member ID already exists")]
    IdExists,
    /// A member with this id, incarnation or key was removed.
    #[error("the member was removed, and never comes back")]
    Removed,
    /// Another member has this peer URL.
    #[error("peer URL already exists")]
    PeerUrlExists,
    /// The member is bound to another incarnation, or the published incarnation belongs to another
    /// member or to a removed one.
    #[error("the member is bound to another incarnation")]
    OtherIncarnation,
    /// There is no member with this id.
    #[error("member not found")]
    NotFound,
    /// The member to be promoted is a voter already.
    #[error("can only promote a learner member")]
    NotALearner,
    /// The change would remove the last voter.
    #[error("the last voter can't be removed")]
    LastVoter,
    /// The change was planned or judged on a configuration that is no longer the current one.
    #[error("the members have changed since this change was planned: they are at {now}")]
    Stale {
        /// Index of the entry that made the current configuration.
        now: u64,
    },
    /// The operation was carried out before.
    #[error("this operation was carried out at {at}")]
    CarriedOut {
        /// Index of the entry that carried out the operation.
        at: u64,
    },
    /// The member has no id or no URL, or a malformed incarnation or key.
    #[error("no member could be like this")]
    Malformed,
}
