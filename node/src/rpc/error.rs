//! The table of codes and texts.
//!
//! etcd's clients tell errors apart by their text, so that each must be etcd's to the byte
//! (api/v3rpc/rpctypes in etcd). Codes are those of etcd 3.6.

use std::borrow::Cow;

use tonic::{Code, Status};

use crate::apply::{ApplyError, CheckError};
use crate::auth::AuthError;
use crate::driver::{ProposeError, ReadError as BarrierError, TransferError};
use crate::membership::{ChangeError, Objection, Refused};
use crate::mvcc::{ReadError, StoreError};

macro_rules! table {
    ($($(#[$doc:meta])* $name:ident: $code:ident $text:literal,)*) => {
        /// An error that a client is told.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Error {
            $($(#[$doc])* $name,)*
            /// A change of members with an operation id that one was carried out with, at this
            /// configuration.
            CarriedOut(u64),
            /// A change of members that was planned on another configuration than this, which is.
            Stale(u64),
        }

        impl Error {
            /// All of them.
            pub(crate) const ALL: &[Self] =
                &[$(Self::$name,)* Self::CarriedOut(0), Self::Stale(0)];

            /// The gRPC code.
            #[must_use]
            pub(crate) fn code(self) -> Code {
                match self {
                    $(Self::$name => Code::$code,)*
                    // Two that etcd has no use for: a client knows them by these.
                    Self::CarriedOut(_) => Code::AlreadyExists,
                    Self::Stale(_) => Code::Aborted,
                }
            }

            /// The text, as clients compare it.
            #[must_use]
            pub(crate) fn text(self) -> Cow<'static, str> {
                match self {
                    $(Self::$name => Cow::Borrowed($text),)*
                    Self::CarriedOut(at) => Cow::Owned(format!(
                        "muster: this operation was carried out, at configuration {at}"
                    )),
                    Self::Stale(now) => Cow::Owned(format!(
                        "muster: the members have changed since this was planned: the configuration is {now} now"
                    )),
                }
            }
        }
    };
}

table! {
    /// A request without a key.
    EmptyKey: InvalidArgument "etcdserver: key is not provided",
    /// `ignore_value` or `ignore_lease` on a missing key, or an operation that is none.
    KeyNotFound: InvalidArgument "etcdserver: key not found",
    /// `ignore_value` with a value.
    ValueProvided: InvalidArgument "etcdserver: value is provided",
    /// `ignore_lease` with a lease.
    LeaseProvided: InvalidArgument "etcdserver: lease is provided",
    /// More than `--max-txn-ops`.
    TooManyOps: InvalidArgument "etcdserver: too many operations in txn request",
    /// A key changed twice in one transaction.
    DuplicateKey: InvalidArgument "etcdserver: duplicate key given in txn request",
    /// An unknown order or target.
    InvalidSortOption: InvalidArgument "etcdserver: invalid sort option",
    /// Before the last compaction.
    Compacted: OutOfRange "etcdserver: mvcc: required revision has been compacted",
    /// After the newest revision.
    FutureRevision: OutOfRange "etcdserver: mvcc: required revision is a future revision",
    /// The NOSPACE alarm is raised.
    NoSpace: ResourceExhausted "etcdserver: mvcc: database space exceeded",
    /// No such lease.
    LeaseNotFound: NotFound "etcdserver: requested lease not found",
    /// The lease's name is taken.
    LeaseExists: FailedPrecondition "etcdserver: lease already exists",
    /// A TTL of more than 285 years.
    LeaseTtlTooLarge: OutOfRange "etcdserver: too large lease TTL",
    /// No such member.
    MemberNotFound: NotFound "etcdserver: member not found",
    /// An id that is taken.
    MemberExists: FailedPrecondition "etcdserver: member ID already exist",
    /// A peer URL that is taken.
    PeerUrlExists: FailedPrecondition "etcdserver: Peer URLs already exists",
    /// Only learners are promoted.
    NotALearner: FailedPrecondition "etcdserver: can only promote a learner member",
    /// A learner that is too far behind, or doesn't answer.
    LearnerNotReady: FailedPrecondition
        "etcdserver: can only promote a learner member which is in sync with leader",
    /// As many learners as there may be.
    TooManyLearners: FailedPrecondition "etcdserver: too many learner members in cluster",
    /// A change that would leave no quorum of started members.
    NotEnoughStarted: FailedPrecondition
        "etcdserver: re-configuration failed due to not enough started members",
    /// What came with a change of members is not what it is called.
    BadExtras: InvalidArgument
        "muster: muster-operation and muster-incarnation take 32, muster-node-key 64 lower-case hex digits, muster-planned-at a number, each once",
    /// A new member's URLs are none.
    BadMemberUrls: InvalidArgument "etcdserver: given member URLs are invalid",
    /// A change of members now could cost the quorum.
    Unhealthy: Unavailable "etcdserver: unhealthy cluster",
    /// More than `--max-request-bytes`.
    RequestTooLarge: InvalidArgument "etcdserver: request is too large",
    /// A queue is full.
    TooManyRequests: ResourceExhausted "etcdserver: too many requests",
    /// Answers that were not read take all the room that their client's answers have. Not etcd's:
    /// its server holds any number of them.
    TooMuchUnread: ResourceExhausted
        "muster: answers wait to be read; read them first, or ask for less at a time",
    /// The same, and it has been carried out.
    AnswerDropped: ResourceExhausted
        "muster: carried out, but there is no room for the answer; ask for less at a time",
    /// Nobody leads.
    NoLeader: Unavailable "etcdserver: no leader",
    /// Only the leader can answer.
    NotLeader: FailedPrecondition "etcdserver: not leader",
    /// Another one leads since, or nobody.
    LeaderChanged: Unavailable "etcdserver: leader changed",
    /// Can't lead.
    BadLeaderTransferee: FailedPrecondition "etcdserver: bad leader transferee",
    /// Going down.
    Stopped: Unavailable "etcdserver: server stopped",
    /// Too late.
    Timeout: Unavailable "etcdserver: request timed out",
    /// Too late, and a leader was lost.
    TimeoutLeaderFailed: Unavailable
        "etcdserver: request timed out, possibly due to previous leader failure",
    /// Too late, and no quorum was connected.
    TimeoutConnectionLost: Unavailable
        "etcdserver: request timed out, possibly due to connection lost",
    /// The CORRUPT alarm is raised.
    Corrupt: DataLoss "etcdserver: corrupt cluster",
    /// A learner serves few things.
    NotSupportedForLearner: FailedPrecondition "etcdserver: rpc not supported for learner",
    /// The lease ended while its client waited for a lock.
    SessionExpired: Unknown "mutex: session is expired",
    /// Who says something as the leader of an election is not in line any more.
    NotElected: Unknown "election: not leader",
    /// Nobody stands for election.
    NobodyElected: Unknown "election: no leader",
    /// Whose place in line it is was not said.
    NoLeaderKey: Unknown "\"leader\" field must be provided",
    /// Authentication can't be enabled: nobody could switch it off.
    NoRootUser: FailedPrecondition "etcdserver: root user does not exist",
    /// The same.
    NoRootRole: FailedPrecondition "etcdserver: root user does not have root role",
    /// Nobody says who asks, or a user has no name.
    UserEmpty: InvalidArgument "etcdserver: user name is empty",
    /// The user's name is taken.
    UserExists: FailedPrecondition "etcdserver: user name already exists",
    /// No such user.
    UserNotFound: FailedPrecondition "etcdserver: user name not found",
    /// A role without a name.
    RoleEmpty: InvalidArgument "etcdserver: role name is empty",
    /// The role's name is taken.
    RoleExists: FailedPrecondition "etcdserver: role name already exists",
    /// No such role.
    RoleNotFound: FailedPrecondition "etcdserver: role name not found",
    /// A permission to be granted that is none.
    PermissionNotGiven: InvalidArgument "etcdserver: permission not given",
    /// The user does not have the role.
    RoleNotGranted: FailedPrecondition "etcdserver: role is not granted to the user",
    /// The role does not have the permission.
    PermissionNotGranted: FailedPrecondition
        "etcdserver: permission is not granted to the role",
    /// What would take from `root` what it needs, or permit a range that can't be.
    InvalidAuthManagement: InvalidArgument "etcdserver: invalid auth management",
    /// A user who may not.
    PermissionDenied: PermissionDenied "etcdserver: permission denied",
    /// Users and roles have changed since it was found out who asks.
    AuthOldRevision: InvalidArgument "etcdserver: revision of auth store is old",
    /// Nobody has to say who they are.
    AuthNotEnabled: FailedPrecondition "etcdserver: authentication is not enabled",
    /// A wrong name or password.
    AuthFailed: InvalidArgument
        "etcdserver: authentication failed, invalid user ID or password",
    /// A password of a user who has none. etcd has no code for it.
    NoPasswordUser: Unknown
        "auth: authentication failed, password was given for no password user",
    /// What bcrypt would not read to its end. Nor for this.
    PasswordTooLong: Unknown "bcrypt: password length exceeds 72 bytes",
    /// A range in parts comes in the order of its keys.
    StreamSorted: Unimplemented "RangeStream does not support custom sort orders",
    /// And with all of them.
    StreamFiltered: Unimplemented "RangeStream does not support revision filters",
    /// This member has only the public key of signed tokens. etcd has no code for it.
    VerifyOnly: Unknown "auth: token signing attempted with verify-only key",
    /// A token that proves nothing.
    InvalidAuthToken: Unauthenticated "etcdserver: invalid auth token",
    /// A name that an etcd's file has no room for, and so no snapshot. Not etcd's: it ends.
    NameTooLong: InvalidArgument "muster: the name of a user or role is longer than 32768 bytes",
    /// More users and roles than every member can keep in memory. Not etcd's: it takes any number.
    NoRoomForAuth: ResourceExhausted
        "muster: users and roles take all the room that they have; delete some that nobody needs",
    /// An action that is none.
    UnknownMethod: Unknown "etcdserver: unknown method",
    /// A version that is none.
    WrongDowngradeVersion: InvalidArgument
        "etcdserver: wrong downgrade target version format",
    /// A version that this one can't be brought down to.
    InvalidDowngradeTarget: InvalidArgument "etcdserver: invalid downgrade target version",
    /// The store's file is as it was.
    NotDefragmented: Unavailable
        "muster: the store was not defragmented, and is as it was; the member's log says why",
    /// The store failed: this process is about to stop.
    StoreFailed: Internal "etcdserver: store failed",
}

/// With what a client is told of members: which configuration they are.
pub(super) const CONFIGURATION: &str = "muster-configuration";

impl Error {
    /// The one with this text, if there is one; `at` is the configuration that it tells of, if it
    /// does. So one member tells another what to tell a client.
    #[must_use]
    pub(super) fn passed_on(text: &str, at: u64) -> Option<Self> {
        let told = Self::ALL.iter().map(|error| match error {
            Self::CarriedOut(_) => Self::CarriedOut(at),
            Self::Stale(_) => Self::Stale(at),
            other => *other,
        });
        told.into_iter().find(|error| error.text() == text)
    }

    /// The configuration that it tells of.
    #[must_use]
    pub(super) fn configuration(self) -> Option<u64> {
        match self {
            Self::CarriedOut(at) | Self::Stale(at) => Some(at),
            _ => None,
        }
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let mut status = Self::new(error.code(), error.text());
        if let Some(at) = error.configuration() {
            status.metadata_mut().insert(CONFIGURATION, at.into());
        }
        status
    }
}

impl From<CheckError> for Error {
    fn from(error: CheckError) -> Self {
        match error {
            CheckError::EmptyKey => Self::EmptyKey,
            CheckError::ValueProvided => Self::ValueProvided,
            CheckError::LeaseProvided => Self::LeaseProvided,
            CheckError::TooManyOps => Self::TooManyOps,
            CheckError::DuplicateKey => Self::DuplicateKey,
            CheckError::EmptyOperation => Self::KeyNotFound,
            CheckError::InvalidSortOption => Self::InvalidSortOption,
        }
    }
}

impl From<ApplyError> for Error {
    fn from(error: ApplyError) -> Self {
        match error {
            ApplyError::KeyNotFound => Self::KeyNotFound,
            ApplyError::LeaseNotFound => Self::LeaseNotFound,
            ApplyError::LeaseExists => Self::LeaseExists,
            ApplyError::LeaseTtlTooLarge => Self::LeaseTtlTooLarge,
            ApplyError::LeaderChanged => Self::LeaderChanged,
            ApplyError::Compacted => Self::Compacted,
            ApplyError::FutureRevision => Self::FutureRevision,
            ApplyError::NoSpace => Self::NoSpace,
            ApplyError::Corrupt => Self::Corrupt,
            ApplyError::MemberNotFound => Self::MemberNotFound,
            ApplyError::Members(error) => error.into(),
            ApplyError::Auth(error) => error.into(),
        }
    }
}

impl From<AuthError> for Error {
    fn from(error: AuthError) -> Self {
        match error {
            AuthError::NoRootUser => Self::NoRootUser,
            AuthError::NoRootRole => Self::NoRootRole,
            AuthError::UserEmpty => Self::UserEmpty,
            AuthError::UserExists => Self::UserExists,
            AuthError::UserNotFound => Self::UserNotFound,
            AuthError::RoleEmpty => Self::RoleEmpty,
            AuthError::RoleExists => Self::RoleExists,
            AuthError::RoleNotFound => Self::RoleNotFound,
            AuthError::PermissionNotGiven => Self::PermissionNotGiven,
            AuthError::RoleNotGranted => Self::RoleNotGranted,
            AuthError::PermissionNotGranted => Self::PermissionNotGranted,
            AuthError::InvalidManagement => Self::InvalidAuthManagement,
            AuthError::Denied => Self::PermissionDenied,
            AuthError::OldRevision => Self::AuthOldRevision,
            AuthError::NotEnabled => Self::AuthNotEnabled,
            AuthError::Failed => Self::AuthFailed,
            AuthError::NoRoom => Self::NoRoomForAuth,
        }
    }
}

impl From<ChangeError> for Error {
    fn from(error: ChangeError) -> Self {
        match error {
            // To who adds a member, one that was removed is as much in the way as one that is there.
            ChangeError::IdExists | ChangeError::Removed | ChangeError::OtherIncarnation => {
                Self::MemberExists
            }
            ChangeError::PeerUrlExists => Self::PeerUrlExists,
            ChangeError::NotFound => Self::MemberNotFound,
            ChangeError::NotALearner => Self::NotALearner,
            ChangeError::LastVoter => Self::NotEnoughStarted,
            ChangeError::Stale { now } => Self::Stale(now),
            ChangeError::CarriedOut { at } => Self::CarriedOut(at),
            ChangeError::Malformed => Self::BadMemberUrls,
        }
    }
}

impl From<Objection> for Error {
    fn from(objection: Objection) -> Self {
        match objection {
            Objection::NotEnoughStarted => Self::NotEnoughStarted,
            Objection::Unhealthy | Objection::Unsettled => Self::Unhealthy,
            Objection::LearnerNotReady | Objection::LearnerSilent => Self::LearnerNotReady,
            Objection::TooManyLearners => Self::TooManyLearners,
        }
    }
}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::NotLeader => Self::NotLeader,
            Refused::Objection(objection) => objection.into(),
            Refused::Change(error) => error.into(),
        }
    }
}

impl From<ProposeError> for Error {
    fn from(error: ProposeError) -> Self {
        match error {
            ProposeError::TooManyRequests => Self::TooManyRequests,
            ProposeError::TooLarge => Self::RequestTooLarge,
            ProposeError::NoLeader => Self::NoLeader,
            ProposeError::Timeout => Self::Timeout,
            ProposeError::TimeoutLeaderFailed => Self::TimeoutLeaderFailed,
            ProposeError::TimeoutConnectionLost => Self::TimeoutConnectionLost,
            ProposeError::Stopped => Self::Stopped,
        }
    }
}

impl From<BarrierError> for Error {
    fn from(error: BarrierError) -> Self {
        match error {
            BarrierError::TooManyRequests => Self::TooManyRequests,
            BarrierError::NoLeader => Self::NoLeader,
            BarrierError::Timeout => Self::Timeout,
            BarrierError::Stopped => Self::Stopped,
        }
    }
}

impl From<TransferError> for Error {
    fn from(error: TransferError) -> Self {
        match error {
            TransferError::NotLeader => Self::NotLeader,
            TransferError::BadTransferee => Self::BadLeaderTransferee,
            TransferError::Timeout => Self::Timeout,
            TransferError::Stopped => Self::Stopped,
        }
    }
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        tracing::error!(error = &error as &dyn std::error::Error, "a read of the store failed");
        Self::StoreFailed
    }
}

impl From<ReadError> for Error {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Compacted | ReadError::Superseded => Self::Compacted,
            ReadError::Future => Self::FutureRevision,
            ReadError::Store(error) => error.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_member_refuses_another_tells_in_the_same_words() {
        for error in Error::ALL.iter().copied().chain([Error::CarriedOut(17), Error::Stale(18)]) {
            let at = error.configuration().unwrap_or_default();
            assert_eq!(Error::passed_on(&error.text(), at), Some(error));
        }
    }

    #[test]
    fn codes_and_texts_are_etcds() {
        let table: String = Error::ALL
            .iter()
            .map(|error| format!("{:?} | {}\n", error.code(), error.text()))
            .collect();
        insta::assert_snapshot!(table);
    }
}
