//! Answers to applied requests, and the errors of refused ones.

use node_proto::etcdserverpb::{
    AlarmResponse, CompactionResponse, DeleteRangeResponse, LeaseGrantResponse,
    LeaseRevokeResponse, Member, PutResponse, ResponseHeader, TxnResponse,
};

use crate::auth::AuthError;
use crate::membership::ChangeError;
use crate::mvcc::{ReadError, StoreError};

/// Answer to a request, or the reason why the request changed nothing.
pub type Outcome = Result<Response, ApplyError>;

/// Answer to an applied request. Headers contain the revision only; the RPC layer fills in the
/// rest.
#[derive(Clone, Debug, PartialEq)]
pub enum Response {
    /// Answer to a put.
    Put(PutResponse),
    /// Answer to a delete.
    DeleteRange(DeleteRangeResponse),
    /// Answer to a transaction.
    Txn(TxnResponse),
    /// Answer to a compaction. The compacted revisions are possibly still in the file.
    Compact(CompactionResponse),
    /// Answer to an alarm request.
    Alarm(AlarmResponse),
    /// Answer to the grant of a lease.
    LeaseGrant(LeaseGrantResponse),
    /// Answer to the revocation of a lease, by a client or by the leader's clock.
    LeaseRevoke(LeaseRevokeResponse),
    /// Answer to a checkpoint of leases' remaining times.
    LeasesCheckpointed,
    /// A member's name and URLs have been published.
    MemberPublished,
    /// Members after a change of members.
    MembersChanged(MemberChangeAnswer),
    /// Header of the answer to a change of users or roles.
    AuthChanged(Option<ResponseHeader>),
    /// A user who authenticated with a password got a token.
    TokenAssigned {
        /// Header with the store's revision when the log entry was applied.
        header: Option<ResponseHeader>,
        /// Index of the entry, which is part of the token.
        index: u64,
    },
    /// The request was carried out, but its answer was dropped: the answers of a batch of entries
    /// may together have only a limited size.
    AnswerTooLarge,
}

/// Result of a change of members.
#[derive(Clone, Debug, PartialEq)]
pub struct MemberChangeAnswer {
    /// All members after the change.
    pub members: Vec<Member>,
    /// Index of the entry that made this configuration.
    pub configuration_index: u64,
}

/// Why a committed request changed nothing. Every member gets the same error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    /// `ignore_value` or `ignore_lease` was set for a key that does not exist.
    #[error("key not found")]
    KeyNotFound,
    /// The lease of a put, or the lease to be revoked, does not exist.
    #[error("requested lease not found")]
    LeaseNotFound,
    /// A lease with the requested id exists already.
    #[error("lease already exists")]
    LeaseExists,
    /// The requested TTL is more than [`MAX_TTL`](crate::lease::MAX_TTL).
    #[error("too large lease TTL")]
    LeaseTtlTooLarge,
    /// The entry comes from a leader's lease clock and was applied in a later term. Such an entry
    /// is valid only in that leader's own term.
    #[error("leader changed")]
    LeaderChanged,
    /// The requested revision is older than the last compaction.
    #[error("required revision has been compacted")]
    Compacted,
    /// The requested revision has not been reached yet.
    #[error("required revision is a future revision")]
    FutureRevision,
    /// The NOSPACE alarm is raised.
    #[error("database space exceeded")]
    NoSpace,
    /// The CORRUPT alarm is raised.
    #[error("corrupt cluster")]
    Corrupt,
    /// The request names a member that is not in the cluster.
    #[error("member not found")]
    MemberNotFound,
    /// The change of members is not allowed.
    #[error(transparent)]
    Members(ChangeError),
    /// The caller has no permission, or the change of users or roles is not allowed.
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

/// A refusal of one request, or a failure of the store that ends the process.
#[derive(Debug)]
pub(super) enum ApplyFailure {
    Refused(ApplyError),
    Fatal(StoreError),
}

impl From<ApplyError> for ApplyFailure {
    fn from(error: ApplyError) -> Self {
        Self::Refused(error)
    }
}

impl From<StoreError> for ApplyFailure {
    fn from(error: StoreError) -> Self {
        Self::Fatal(error)
    }
}

impl From<ReadError> for ApplyFailure {
    fn from(error: ReadError) -> Self {
        match error {
            // A batch reads the newest state, and no compaction runs while it reads. So
            // `Superseded` means the same as `Compacted` here: an earlier compaction removed the
            // requested revision.
            ReadError::Compacted | ReadError::Superseded => Self::Refused(ApplyError::Compacted),
            ReadError::Future => Self::Refused(ApplyError::FutureRevision),
            ReadError::Store(error) => Self::Fatal(error),
        }
    }
}
