//! Table of the gRPC codes and texts of errors.
//!
//! etcd's clients distinguish errors by their text. So each text must be etcd's to the byte
//! (api/v3rpc/rpctypes in etcd). Codes are those of etcd 3.6. The agent distinguishes refusals of
//! `Member*` calls by a code of ours, whose meaning never changes.

use std::borrow::Cow;

use tonic::metadata::MetadataValue;
use tonic::{Code, Status};

use node_engine::driver::{ProposeError, ReadBarrierError as BarrierError, TransferError};
use node_state::apply::{ApplyError, CheckError};
use node_state::auth::AuthError;
use node_state::membership::{ChangeError, ChangeObjection, ChangeRefusal};
use node_state::mvcc::{ReadError, StoreError};

macro_rules! table {
    ($($(#[$doc:meta])* $name:ident: $code:ident $text:literal $(=> $refusal:literal)?,)*) => {
        /// Error that a client receives.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Error {
            $($(#[$doc])* $name,)*
            /// A member change whose operation ID was used before. The argument is the
            /// configuration index of the earlier change.
            CarriedOut(u64),
            /// A member change that was planned against another configuration. The argument is the
            /// index of the current one.
            Stale(u64),
        }

        impl Error {
            /// All errors, with a sample argument where there is one.
            pub(crate) const ALL: &[Self] =
                &[$(Self::$name,)* Self::CarriedOut(0), Self::Stale(0)];

            /// Returns the gRPC code.
            #[must_use]
            pub(crate) fn code(self) -> Code {
                match self {
                    $(Self::$name => Code::$code,)*
                    // etcd uses neither `AlreadyExists` nor `Aborted` for its own errors. So
                    // clients recognise these two errors by the code.
                    Self::CarriedOut(_) => Code::AlreadyExists,
                    Self::Stale(_) => Code::Aborted,
                }
            }

            /// Returns the machine-readable code. An error has one if it can refuse a call that
            /// changes or lists the members. A call refused in this way has changed nothing. Other
            /// calls that fail with the error send the code too.
            #[must_use]
            pub(crate) fn refusal(self) -> Option<&'static str> {
                let refusal: &[&str] = match self {
                    $(Self::$name => &[$($refusal)?],)*
                    Self::CarriedOut(_) => &["carried-out"],
                    Self::Stale(_) => &["stale-plan"],
                };
                refusal.first().copied()
            }

            /// Returns the text that clients compare.
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
    /// The request has no key.
    EmptyKey: InvalidArgument "etcdserver: key is not provided",
    /// `ignore_value` or `ignore_lease` is set for a missing key, or an operation of a transaction
    /// is empty.
    KeyNotFound: InvalidArgument "etcdserver: key not found",
    /// `ignore_value` is set, and a value is given.
    ValueProvided: InvalidArgument "etcdserver: value is provided",
    /// `ignore_lease` is set, and a lease is given.
    LeaseProvided: InvalidArgument "etcdserver: lease is provided",
    /// The transaction has more operations than `--max-txn-ops` allows.
    TooManyOps: InvalidArgument "etcdserver: too many operations in txn request",
    /// One transaction changes a key twice.
    DuplicateKey: InvalidArgument "etcdserver: duplicate key given in txn request",
    /// The sort order or the sort target is unknown.
    InvalidSortOption: InvalidArgument "etcdserver: invalid sort option",
    /// The revision is below the last compaction.
    Compacted: OutOfRange "etcdserver: mvcc: required revision has been compacted",
    /// The revision is higher than the newest one.
    FutureRevision: OutOfRange "etcdserver: mvcc: required revision is a future revision",
    /// The NOSPACE alarm is active, the quota is exceeded, or this member's disk is almost full.
    NoSpace: ResourceExhausted "etcdserver: mvcc: database space exceeded",
    /// The lease does not exist.
    LeaseNotFound: NotFound "etcdserver: requested lease not found",
    /// A lease with the requested ID exists already.
    LeaseExists: FailedPrecondition "etcdserver: lease already exists",
    /// The TTL is more than 285 years.
    LeaseTtlTooLarge: OutOfRange "etcdserver: too large lease TTL",
    /// The member does not exist.
    MemberNotFound: NotFound "etcdserver: member not found" => "member-not-found",
    /// The member's ID is in use, or belonged to a removed member.
    MemberExists: FailedPrecondition "etcdserver: member ID already exist" => "member-exists",
    /// Another member has one of the peer URLs.
    PeerUrlExists: FailedPrecondition "etcdserver: Peer URLs already exists" => "peer-url-exists",
    /// The member to promote is not a learner.
    NotALearner: FailedPrecondition "etcdserver: can only promote a learner member"
        => "not-a-learner",
    /// The learner to promote is too far behind, or does not respond.
    LearnerNotReady: FailedPrecondition
        "etcdserver: can only promote a learner member which is in sync with leader"
        => "learner-not-ready",
    /// The cluster has the maximum number of learners already.
    TooManyLearners: FailedPrecondition "etcdserver: too many learner members in cluster"
        => "too-many-learners",
    /// The change would leave no quorum of started members.
    NotEnoughStarted: FailedPrecondition
        "etcdserver: re-configuration failed due to not enough started members"
        => "not-enough-started",
    /// Metadata of a member change, such as `muster-operation`, is malformed or repeated.
    BadExtras: InvalidArgument
        "muster: muster-operation and muster-incarnation take 32, muster-node-key 64 lower-case hex digits, muster-planned-at a number, each once"
        => "bad-metadata",
    /// The member's peer URLs are missing or invalid.
    BadMemberUrls: InvalidArgument "etcdserver: given member URLs are invalid" => "bad-peer-urls",
    /// The cluster's current health would let the change cost the quorum.
    Unhealthy: Unavailable "etcdserver: unhealthy cluster" => "unhealthy-cluster",
    /// The request is larger than `--max-request-bytes`.
    RequestTooLarge: InvalidArgument "etcdserver: request is too large" => "request-too-large",
    /// A queue of requests is full.
    TooManyRequests: ResourceExhausted "etcdserver: too many requests" => "too-many-requests",
    /// The client's unread answers use all memory that its connection may take. etcd has no such
    /// limit.
    TooMuchUnread: ResourceExhausted
        "muster: answers wait to be read; read them first, or ask for less at a time"
        => "answers-unread",
    /// The request was carried out, but the client's unread answers leave no memory for its answer.
    AnswerDropped: ResourceExhausted
        "muster: carried out, but there is no room for the answer; ask for less at a time",
    /// The cluster has no leader.
    NoLeader: Unavailable "etcdserver: no leader",
    /// This member is not the leader, and only the leader can answer.
    NotLeader: FailedPrecondition "etcdserver: not leader",
    /// The leader changed, or was lost, after the request began.
    LeaderChanged: Unavailable "etcdserver: leader changed",
    /// The member that should become leader can't be one.
    BadLeaderTransferee: FailedPrecondition "etcdserver: bad leader transferee",
    /// This member is shutting down.
    Stopped: Unavailable "etcdserver: server stopped",
    /// The request was not answered in time.
    Timeout: Unavailable "etcdserver: request timed out",
    /// The request was not answered in time, and the leader was lost meanwhile.
    TimeoutLeaderFailed: Unavailable
        "etcdserver: request timed out, possibly due to previous leader failure",
    /// The request was not answered in time, and no quorum was connected.
    TimeoutConnectionLost: Unavailable
        "etcdserver: request timed out, possibly due to connection lost",
    /// The CORRUPT alarm is active.
    Corrupt: DataLoss "etcdserver: corrupt cluster",
    /// A learner doesn't serve this method.
    NotSupportedForLearner: FailedPrecondition "etcdserver: rpc not supported for learner"
        => "not-for-learners",
    /// The lease ended while its client waited for a lock.
    SessionExpired: Unknown "mutex: session is expired",
    /// The caller's key in an election no longer exists, so the caller isn't the leader.
    NotElected: Unknown "election: not leader",
    /// The election has no candidate.
    NobodyElected: Unknown "election: no leader",
    /// The request has no `leader` field, which names the caller's key in the election.
    NoLeaderKey: Unknown "\"leader\" field must be provided",
    /// Authentication can't be enabled without a user `root`, since nobody could disable it.
    NoRootUser: FailedPrecondition "etcdserver: root user does not exist",
    /// Authentication can't be enabled while the user `root` lacks the role `root`, since nobody
    /// could disable it.
    NoRootRole: FailedPrecondition "etcdserver: root user does not have root role",
    /// The user name is empty, or the request needs a user and names none.
    UserEmpty: InvalidArgument "etcdserver: user name is empty" => "user-empty",
    /// A user with this name exists already.
    UserExists: FailedPrecondition "etcdserver: user name already exists",
    /// The user does not exist.
    UserNotFound: FailedPrecondition "etcdserver: user name not found" => "user-not-found",
    /// The role name is empty.
    RoleEmpty: InvalidArgument "etcdserver: role name is empty",
    /// A role with this name exists already.
    RoleExists: FailedPrecondition "etcdserver: role name already exists",
    /// The role does not exist.
    RoleNotFound: FailedPrecondition "etcdserver: role name not found",
    /// The request to grant a permission contains none.
    PermissionNotGiven: InvalidArgument "etcdserver: permission not given",
    /// The user does not have the role.
    RoleNotGranted: FailedPrecondition "etcdserver: role is not granted to the user",
    /// The role does not have the permission.
    PermissionNotGranted: FailedPrecondition
        "etcdserver: permission is not granted to the role",
    /// The change would take required rights from `root`, or grants a permission for an invalid
    /// range.
    InvalidAuthManagement: InvalidArgument "etcdserver: invalid auth management",
    /// The user does not have the permission for the request.
    PermissionDenied: PermissionDenied "etcdserver: permission denied" => "permission-denied",
    /// Users or roles have changed since the caller was identified.
    AuthOldRevision: InvalidArgument "etcdserver: revision of auth store is old"
        => "old-auth-revision",
    /// Authentication is disabled, so no token is issued.
    AuthNotEnabled: FailedPrecondition "etcdserver: authentication is not enabled",
    /// The user name or the password is wrong.
    AuthFailed: InvalidArgument
        "etcdserver: authentication failed, invalid user ID or password",
    /// A password was given for a user without one. etcd has no gRPC code for this.
    NoPasswordUser: Unknown
        "auth: authentication failed, password was given for no password user",
    /// The password is longer than bcrypt can read. etcd has no gRPC code for this.
    PasswordTooLong: Unknown "bcrypt: password length exceeds 72 bytes",
    /// `RangeStream` supports key order only.
    StreamSorted: Unimplemented "RangeStream does not support custom sort orders",
    /// `RangeStream` supports no filters by revision.
    StreamFiltered: Unimplemented "RangeStream does not support revision filters",
    /// This member has only the public key for signed tokens, so it can't issue one. etcd has no
    /// gRPC code for this.
    VerifyOnly: Unknown "auth: token signing attempted with verify-only key",
    /// The token is unknown, expired or invalid.
    InvalidAuthToken: Unauthenticated "etcdserver: invalid auth token" => "invalid-auth-token",
    /// The name is too long for a key in an etcd file, so no snapshot could contain it. etcd panics
    /// instead of refusing the name.
    NameTooLong: InvalidArgument "muster: the name of a user or role is longer than 32768 bytes",
    /// The change would exceed the memory limit for users and roles. etcd has no such limit.
    NoRoomForAuth: ResourceExhausted
        "muster: users and roles take all the room that they have; delete some that nobody needs",
    /// The action of the request is unknown.
    UnknownMethod: Unknown "etcdserver: unknown method",
    /// The target version of a downgrade is malformed.
    WrongDowngradeVersion: InvalidArgument
        "etcdserver: wrong downgrade target version format",
    /// A downgrade to this version isn't possible.
    InvalidDowngradeTarget: InvalidArgument "etcdserver: invalid downgrade target version",
    /// Defragmentation failed, and left the store's file unchanged.
    NotDefragmented: Unavailable
        "muster: the store was not defragmented, and is as it was; the member's log says why",
    /// The store failed, and this process is about to stop.
    StoreFailed: Internal "etcdserver: store failed",
}

/// Name of the metadata with the machine-readable code of a refusal.
const REFUSAL_METADATA: &str = "muster-refusal";

/// Name of the metadata with the log index of the member configuration that an answer of the
/// Cluster service shows.
pub(super) const CONFIGURATION_METADATA: &str = "muster-configuration";

impl Error {
    /// Returns the error with this text, if there is one. `at` is the index of a configuration, for
    /// errors that name one. A member uses this to pass on another member's error to a client.
    #[must_use]
    pub(super) fn from_text(text: &str, at: u64) -> Option<Self> {
        let told = Self::ALL.iter().map(|error| match error {
            Self::CarriedOut(_) => Self::CarriedOut(at),
            Self::Stale(_) => Self::Stale(at),
            other => *other,
        });
        told.into_iter().find(|error| error.text() == text)
    }

    /// Returns the index of the configuration that the error names, if any.
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
            status.metadata_mut().insert(CONFIGURATION_METADATA, at.into());
        }
        if let Some(refusal) = error.refusal() {
            status.metadata_mut().insert(REFUSAL_METADATA, MetadataValue::from_static(refusal));
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
            AuthError::TooLarge => Self::NoRoomForAuth,
        }
    }
}

impl From<ChangeError> for Error {
    fn from(error: ChangeError) -> Self {
        match error {
            // A client that adds a member gets the same error for a removed member as for an
            // existing one.
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

impl From<ChangeObjection> for Error {
    fn from(objection: ChangeObjection) -> Self {
        match objection {
            ChangeObjection::NotEnoughStarted => Self::NotEnoughStarted,
            ChangeObjection::Unhealthy | ChangeObjection::Unsettled => Self::Unhealthy,
            ChangeObjection::LearnerNotReady | ChangeObjection::LearnerSilent => {
                Self::LearnerNotReady
            }
            ChangeObjection::TooManyLearners => Self::TooManyLearners,
        }
    }
}

impl From<ChangeRefusal> for Error {
    fn from(refused: ChangeRefusal) -> Self {
        match refused {
            ChangeRefusal::NotLeader => Self::NotLeader,
            ChangeRefusal::Objection(objection) => objection.into(),
            ChangeRefusal::Change(error) => error.into(),
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
    fn an_error_survives_its_text_and_configuration_index() {
        for error in Error::ALL.iter().copied().chain([Error::CarriedOut(17), Error::Stale(18)]) {
            let at = error.configuration().unwrap_or_default();
            assert_eq!(Error::from_text(&error.text(), at), Some(error));
        }
    }

    #[test]
    fn each_refusal_of_a_change_of_members_has_a_code() {
        let changes = [
            ChangeError::IdExists,
            ChangeError::Removed,
            ChangeError::PeerUrlExists,
            ChangeError::OtherIncarnation,
            ChangeError::NotFound,
            ChangeError::NotALearner,
            ChangeError::LastVoter,
            ChangeError::Stale { now: 17 },
            ChangeError::CarriedOut { at: 17 },
            ChangeError::Malformed,
        ];
        let objections = [
            ChangeObjection::NotEnoughStarted,
            ChangeObjection::Unhealthy,
            ChangeObjection::LearnerNotReady,
            ChangeObjection::LearnerSilent,
            ChangeObjection::Unsettled,
            ChangeObjection::TooManyLearners,
        ];
        let users = [
            AuthError::UserEmpty,
            AuthError::UserNotFound,
            AuthError::Denied,
            AuthError::OldRevision,
        ];
        let proposals = [ProposeError::TooManyRequests, ProposeError::TooLarge];
        let changes = changes.map(|error| Error::from(ChangeRefusal::Change(error)));
        let objections = objections.map(|error| Error::from(ChangeRefusal::Objection(error)));
        let users = users.map(Error::from);
        let proposals = proposals.map(Error::from);
        let barriers = [BarrierError::TooManyRequests].map(Error::from);
        let metadata = [Error::BadExtras, Error::BadMemberUrls, Error::InvalidAuthToken];
        let calls = [Error::NotSupportedForLearner, Error::TooMuchUnread];
        let errors: [&[Error]; 7] =
            [&changes, &objections, &users, &proposals, &barriers, &metadata, &calls];
        for error in errors.concat() {
            let status = Status::from(error);
            let sent = status.metadata().get(REFUSAL_METADATA).and_then(|code| code.to_str().ok());
            assert!(sent.is_some() && sent == error.refusal(), "{error:?}");
        }
    }

    /// A call that may have changed the members must not look refused.
    #[test]
    fn an_error_whose_outcome_is_unknown_has_no_code() {
        for error in [
            ProposeError::Timeout,
            ProposeError::TimeoutLeaderFailed,
            ProposeError::TimeoutConnectionLost,
            ProposeError::NoLeader,
            ProposeError::Stopped,
        ] {
            let error = Error::from(error);
            assert_eq!(error.refusal(), None, "{error:?}");
            assert!(!Status::from(error).metadata().contains_key(REFUSAL_METADATA), "{error:?}");
        }
        for error in [Error::LeaderChanged, Error::StoreFailed] {
            assert_eq!(error.refusal(), None, "{error:?}");
        }
    }

    #[test]
    fn codes_of_refusals_keep_their_meaning() {
        let coded = Error::ALL.iter().filter_map(|error| Some((error.refusal()?, error.text())));
        let table: String = coded.map(|(code, text)| format!("{code} | {text}\n")).collect();
        insta::assert_snapshot!(table);
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
