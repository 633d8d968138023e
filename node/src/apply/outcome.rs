//! What an applied request answers.

use node_proto::etcdserverpb::{
    AlarmResponse, CompactionResponse, DeleteRangeResponse, LeaseGrantResponse,
    LeaseRevokeResponse, Member, PutResponse, ResponseHeader, TxnResponse,
};

use crate::auth::AuthError;
use crate::membership::ChangeError;
use crate::mvcc::{ReadError, StoreError};

/// The answer, or why the request changed nothing.
pub type Outcome = Result<Response, ApplyError>;

/// Headers have the revision only; who answers fills in the rest.
#[derive(Clone, Debug, PartialEq)]
pub enum Response {
    /// Of a put.
    Put(PutResponse),
    /// Of a delete.
    DeleteRange(DeleteRangeResponse),
    /// Of a transaction.
    Txn(TxnResponse),
    /// Of a compaction; the old revisions may still be in the file.
    Compact(CompactionResponse),
    /// Of a change of alarms.
    Alarm(AlarmResponse),
    /// Of a lease that was granted.
    LeaseGrant(LeaseGrantResponse),
    /// Of a lease that was revoked, by a client or by the leader's clock.
    LeaseRevoke(LeaseRevokeResponse),
    /// What leases have left is noted.
    LeasesNoted,
    /// A member's name and URLs are published.
    Published,
    /// A change of members.
    MembersChanged(ChangedMembers),
    /// A change of users or roles.
    AuthChanged(Option<ResponseHeader>),
    /// Who said a password has a token.
    TokenAssigned {
        /// As of the entry.
        header: Option<ResponseHeader>,
        /// The entry, which is part of the token.
        index: u64,
    },
    /// Of a request that was carried out, and that read more than there is room for.
    TooLarge,
}

/// What a change of members came to.
#[derive(Clone, Debug, PartialEq)]
pub struct ChangedMembers {
    /// All of them after it.
    pub members: Vec<Member>,
    /// The configuration that they are, by the entry that made it.
    pub at: u64,
}

/// Why a committed request changed nothing; the same on every member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    /// `ignore_value` or `ignore_lease` on a key that isn't there.
    #[error("key not found")]
    KeyNotFound,
    /// The put's lease isn't there.
    #[error("requested lease not found")]
    LeaseNotFound,
    /// The name is taken.
    #[error("lease already exists")]
    LeaseExists,
    /// More than [`MAX_TTL`](crate::lease::MAX_TTL).
    #[error("too large lease TTL")]
    LeaseTtlTooLarge,
    /// What a leader's clock said counts in its own term only.
    #[error("leader changed")]
    LeaderChanged,
    /// A revision before the last compaction.
    #[error("required revision has been compacted")]
    Compacted,
    /// A revision that has not been reached.
    #[error("required revision is a future revision")]
    FutureRevision,
    /// The NOSPACE alarm is raised.
    #[error("database space exceeded")]
    NoSpace,
    /// The CORRUPT alarm is raised.
    #[error("corrupt cluster")]
    Corrupt,
    /// A member that is not in the cluster.
    #[error("member not found")]
    MemberNotFound,
    /// A change of members that can't be.
    #[error(transparent)]
    Members(ChangeError),
    /// Who asked for it may not, or a change of users that can't be.
    #[error(transparent)]
    Auth(#[from] AuthError),
}

impl From<ChangeError> for ApplyError {
    fn from(error: ChangeError) -> Self {
        match error {
            ChangeError::NotFound => Self::MemberNotFound,
            other => Self::Members(other),
        }
    }
}

/// Refused, or broken for good.
#[derive(Debug)]
pub(super) enum Failure {
    Refused(ApplyError),
    Fatal(StoreError),
}

impl From<ApplyError> for Failure {
    fn from(error: ApplyError) -> Self {
        Self::Refused(error)
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Fatal(error)
    }
}

impl From<ReadError> for Failure {
    fn from(error: ReadError) -> Self {
        match error {
            // The batch is its own view: nothing can overtake it.
            ReadError::Compacted | ReadError::Superseded => Self::Refused(ApplyError::Compacted),
            ReadError::Future => Self::Refused(ApplyError::FutureRevision),
            ReadError::Store(error) => Self::Fatal(error),
        }
    }
}
