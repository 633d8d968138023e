//! Reasons why the service refuses a request: a sentence with the remedy for people, and a code for
//! programs.

use crate::fitness::{RecordConflict, RecordFault, ZoneFault};
use crate::service::cluster::{EndCause, Phase};
use crate::values::{AgentKey, Epoch, Hash, Millis, UnixMicros};

/// Milliseconds of a day.
const DAY_MS: u64 = 24 * 3_600_000;

/// Refusal of a request. `Display` says what and why; [`Refusal::remedy`] says what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The list of members was decided without this key.
    #[error("the cluster's members are decided, and {key} is not one of them")]
    BootClosed { key: AgentKey },
    /// The cluster ended before it was committed, or was retired.
    #[error("the cluster is {}: {by}", phase.as_str())]
    Ended { phase: Phase, cause: Option<EndCause>, by: String },
    /// An ack, a nack or a row of the probe matrix names a proposal that isn't the present one.
    #[error("epoch {sent} is not being prepared: the cluster is {} at epoch {epoch}", phase.as_str())]
    StaleEpoch { sent: Epoch, epoch: Epoch, phase: Phase },
    /// The agent names an epoch that no service can have proposed.
    #[error("epoch {sent} is too far above everything that was proposed here: at most {limit}")]
    EpochTooFar { sent: Epoch, limit: Epoch },
    /// An ack for the present epoch signs another hash than the proposal's.
    #[error("the ack is over {sent}, the proposal of epoch {epoch} is {h}")]
    OtherProposal { sent: Hash, h: Hash, epoch: Epoch },
    /// Another session holds this key.
    #[error("another session holds the key {key} (boot counter {last}, this one sent {sent})")]
    KeyElsewhere { key: AgentKey, last: u64, sent: u64 },
    /// Two valid commit documents were received, so only ticks, a retirement and events of the
    /// database are applied.
    #[error("two valid documents of this cluster exist: {decided} and {other}")]
    Split { decided: Hash, other: Hash },
    /// This database doesn't know the key.
    #[error("the key {key} has not redeemed a token here")]
    UnknownKey { key: AgentKey },
    /// The sender is not in the frozen list of members.
    #[error("{key} has no seat in the proposal of epoch {epoch}")]
    NotSeated { key: AgentKey, epoch: Epoch },
    /// The agent has redeemed another record in this session already.
    #[error("{key} has redeemed another record in this session")]
    RecordChanged { key: AgentKey },
    /// The record asks for another cluster or names another grant.
    #[error("the record is for another cluster or another grant")]
    ForeignRecord,
    /// The grant has expired.
    #[error("the token expired")]
    GrantExpired { expired: UnixMicros },
    /// The grant was revoked.
    #[error("the token was revoked")]
    GrantRevoked,
    /// The grant has admitted as many keys as it may.
    #[error("the token has admitted {admitted} keys, and no more than {limit} are allowed")]
    TooManyKeys { admitted: usize, limit: usize },
    /// Every use of the grant is taken by a key. This happens only with `Rule::UseIsASeat` off.
    #[error("every use of the token is taken")]
    GrantUsed,
    /// No list of members can contain the record.
    #[error("the record can't be a member's: {0}")]
    Unfit(RecordFault),
    /// The record has no zone, and the members are spread over zones.
    #[error("the record can't be a member's: it {0}")]
    NoZone(ZoneFault),
    /// The record shares a value that must be unique, such as a name or URL, with another live
    /// agent's record.
    #[error("{other} is live and shares with it {clash}")]
    Duplicate { other: AgentKey, clash: RecordConflict },
    /// The cluster isn't committed yet: only members of a decided list may report.
    #[error("the cluster is {}, not committed", phase.as_str())]
    NotCommitted { phase: Phase },
    /// The cluster isn't committed: it can be abandoned, but not retired.
    #[error("the cluster is {}, not committed: there is nothing to retire", phase.as_str())]
    NothingToRetire { phase: Phase },
    /// A cluster that was never committed can't be retired, so nothing can be taken back.
    #[error("the cluster is {}: it is not retired", phase.as_str())]
    NothingToUnretire { phase: Phase },
    /// The time to take a retirement back is over.
    #[error("a retirement can be taken back for {} days, and they are over", within.0 / DAY_MS)]
    UnretireTooLate { within: Millis },
    /// The cluster formed in time, so it can't be reopened.
    #[error("the cluster is {}: it has not expired", phase.as_str())]
    NothingToReopen { phase: Phase },
    /// The time to reopen an expired cluster is over.
    #[error("an expired cluster can be reopened for {} days, and they are over", within.0 / DAY_MS)]
    ReopenTooLate { within: Millis },
    /// The ledgers haven't been compared with this database yet. A cluster that looks undecided may
    /// be committed.
    #[error("the database was changed, and the ledgers have not been compared with it yet")]
    Unsettled,
    /// A committed cluster can't be abandoned.
    #[error("the cluster is {}: its members may be running", phase.as_str())]
    AlreadyCommitted { phase: Phase },
    /// The statement doesn't follow the newest one.
    #[error("statement {sent} does not follow statement {newest}")]
    StatementOutOfOrder { sent: u64, newest: u64 },
    /// The statement changes the cluster's size or id, which are fixed.
    #[error("a next statement can't change the cluster's id or size")]
    StatementFixed,
    /// The commit document is of another cluster.
    #[error("the document is another cluster's")]
    ForeignDocument,
}

/// Meaning of a refusal for a program. The service's machine, the API (each code is one of its
/// problem codes) and the agent's machine use the same codes. So the exploration passes the same
/// codes on as production does. Refusals share a code if the agent's next step is the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RefusalCode {
    /// The list of members was decided without the agent that sent the request.
    BootClosed,
    /// The cluster was given up before the commit.
    Abandoned,
    /// The deadline passed before the commit.
    Expired,
    /// The cluster was ended by its owner after the commit.
    Retired,
    /// The message is not about the present proposal.
    StaleEpoch,
    /// Two sessions hold one agent key.
    KeyElsewhere,
    /// The cluster has two valid commit documents.
    Split,
    /// The ledgers haven't been compared with this database yet.
    DatabaseChanged,
    /// The key has not redeemed here.
    UnknownKey,
    /// The request conflicts with another record, agent or statement.
    Conflict,
    /// No list of members of the cluster can contain the record.
    RecordRefused,
    /// The grant isn't stored here. Only the service around the state machine, which looks grants
    /// up, uses this code.
    GrantUnknown,
    /// The grant has expired.
    GrantExpired,
    /// The grant was revoked.
    GrantRevoked,
    /// The grant is for another address, name or zone. Only the service around the state machine,
    /// which knows these, uses this code.
    GrantBinding,
    /// The grant has admitted as many keys as it may.
    GrantExhausted,
    /// The signed message can't be an honest agent's.
    VoteRefused,
    /// The request doesn't fit the cluster's phase.
    WrongState,
    /// The cluster is committed: only an owner's retirement ends it.
    Committed,
    /// The statement doesn't fit the cluster.
    StatementRefused,
    /// The commit document doesn't fit the cluster.
    DocumentRefused,
}

impl RefusalCode {
    /// Every code, in the order of declaration.
    pub const EACH: [RefusalCode; 21] = [
        RefusalCode::BootClosed,
        RefusalCode::Abandoned,
        RefusalCode::Expired,
        RefusalCode::Retired,
        RefusalCode::StaleEpoch,
        RefusalCode::KeyElsewhere,
        RefusalCode::Split,
        RefusalCode::DatabaseChanged,
        RefusalCode::UnknownKey,
        RefusalCode::Conflict,
        RefusalCode::RecordRefused,
        RefusalCode::GrantUnknown,
        RefusalCode::GrantExpired,
        RefusalCode::GrantRevoked,
        RefusalCode::GrantBinding,
        RefusalCode::GrantExhausted,
        RefusalCode::VoteRefused,
        RefusalCode::WrongState,
        RefusalCode::Committed,
        RefusalCode::StatementRefused,
        RefusalCode::DocumentRefused,
    ];
}

impl Refusal {
    /// Returns the code of this refusal for programs.
    #[must_use]
    pub fn code(&self) -> RefusalCode {
        match self {
            Refusal::BootClosed { .. } => RefusalCode::BootClosed,
            Refusal::Ended { phase, .. } => match phase {
                Phase::Expired => RefusalCode::Expired,
                Phase::Retired => RefusalCode::Retired,
                Phase::Open
                | Phase::Preparing
                | Phase::Committed
                | Phase::Formed
                | Phase::Abandoned => RefusalCode::Abandoned,
            },
            Refusal::StaleEpoch { .. }
            | Refusal::OtherProposal { .. }
            | Refusal::NotSeated { .. } => RefusalCode::StaleEpoch,
            Refusal::KeyElsewhere { .. } => RefusalCode::KeyElsewhere,
            Refusal::Split { .. } => RefusalCode::Split,
            Refusal::Unsettled => RefusalCode::DatabaseChanged,
            Refusal::UnknownKey { .. } => RefusalCode::UnknownKey,
            Refusal::RecordChanged { .. }
            | Refusal::Duplicate { .. }
            | Refusal::StatementOutOfOrder { .. } => RefusalCode::Conflict,
            Refusal::ForeignRecord | Refusal::Unfit(_) | Refusal::NoZone(_) => {
                RefusalCode::RecordRefused
            }
            Refusal::GrantExpired { .. } => RefusalCode::GrantExpired,
            Refusal::GrantRevoked => RefusalCode::GrantRevoked,
            Refusal::TooManyKeys { .. } | Refusal::GrantUsed => RefusalCode::GrantExhausted,
            Refusal::EpochTooFar { .. } => RefusalCode::VoteRefused,
            Refusal::NotCommitted { .. }
            | Refusal::NothingToRetire { .. }
            | Refusal::NothingToUnretire { .. }
            | Refusal::UnretireTooLate { .. }
            | Refusal::NothingToReopen { .. }
            | Refusal::ReopenTooLate { .. } => RefusalCode::WrongState,
            Refusal::AlreadyCommitted { .. } => RefusalCode::Committed,
            Refusal::StatementFixed => RefusalCode::StatementRefused,
            Refusal::ForeignDocument => RefusalCode::DocumentRefused,
        }
    }

    /// Whether the agent may still succeed if it polls again and follows the answer.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Refusal::StaleEpoch { .. }
            | Refusal::OtherProposal { .. }
            | Refusal::UnknownKey { .. }
            | Refusal::NotSeated { .. }
            | Refusal::Duplicate { .. }
            | Refusal::Unsettled
            | Refusal::NotCommitted { .. } => true,
            Refusal::BootClosed { .. }
            | Refusal::Ended { .. }
            | Refusal::EpochTooFar { .. }
            | Refusal::KeyElsewhere { .. }
            | Refusal::Split { .. }
            | Refusal::RecordChanged { .. }
            | Refusal::ForeignRecord
            | Refusal::GrantExpired { .. }
            | Refusal::GrantRevoked
            | Refusal::TooManyKeys { .. }
            | Refusal::GrantUsed
            | Refusal::Unfit(_)
            | Refusal::NoZone(_)
            | Refusal::NothingToRetire { .. }
            | Refusal::NothingToUnretire { .. }
            | Refusal::UnretireTooLate { .. }
            | Refusal::NothingToReopen { .. }
            | Refusal::ReopenTooLate { .. }
            | Refusal::AlreadyCommitted { .. }
            | Refusal::StatementOutOfOrder { .. }
            | Refusal::StatementFixed
            | Refusal::ForeignDocument => false,
        }
    }

    /// Returns advice in one sentence. `lease` is how long a stopped agent keeps its place.
    #[must_use]
    pub fn remedy(&self, lease: Millis) -> String {
        match self {
            Refusal::BootClosed { .. } => {
                "use this host for another cluster: members of one that runs are changed by its own \
                 Cluster API, not here"
                    .into()
            }
            Refusal::Ended { .. } => self.remedy_of_an_end().into(),
            Refusal::StaleEpoch { .. } | Refusal::OtherProposal { .. } => {
                "poll for the present proposal".into()
            }
            Refusal::EpochTooFar { .. } => {
                "find out who changed this host's agent; `muster-agent reset` begins anew".into()
            }
            Refusal::KeyElsewhere { .. } => {
                "stop one of the two copies of this host; a cloned host needs `muster-agent reset`"
                    .into()
            }
            Refusal::Split { .. } => {
                "run no second cluster: look which list's members hold data, then have an owner run \
                 `muster-discovery cluster retire`"
                    .into()
            }
            Refusal::UnknownKey { .. } => "redeem the token again".into(),
            Refusal::NotSeated { .. } => "poll: a seat is given when one is free".into(),
            Refusal::RecordChanged { .. } => "restart the agent to replace its record".into(),
            Refusal::ForeignRecord | Refusal::ForeignDocument => {
                "check which cluster the bundle is for".into()
            }
            Refusal::GrantExpired { .. } => {
                "mint a new one with `muster-discovery token create` and hand out its bundle; if this \
                 one can't be so old, compare the clocks of the service's Postgres, of the admin's \
                 machine and of this host"
                    .into()
            }
            Refusal::GrantRevoked
            | Refusal::TooManyKeys { .. }
            | Refusal::GrantUsed => {
                "mint a new one with `muster-discovery token create` and hand out its bundle".into()
            }
            Refusal::Unfit(_) => {
                "start the agent with the address under which the others reach this host".into()
            }
            Refusal::NoZone(_) => "start the agent with `--zone ZONE`".into(),
            Refusal::Duplicate { .. } => format!(
                "change it on one of the two, or stop the other one: its place is free {lease} later"
            ),
            Refusal::NotCommitted { .. } => "poll until the cluster is committed".into(),
            Refusal::NothingToRetire { .. }
            | Refusal::NothingToUnretire { .. }
            | Refusal::NothingToReopen { .. }
            | Refusal::ReopenTooLate { .. }
            | Refusal::UnretireTooLate { .. } => self.remedy_of_an_end().into(),
            Refusal::Unsettled => {
                "start every discovery process, or have an owner run `muster-discovery db accept`, \
                 which abandons every cluster that isn't committed"
                    .into()
            }
            Refusal::AlreadyCommitted { .. } => {
                "have an owner run `muster-discovery cluster retire`".into()
            }
            Refusal::StatementOutOfOrder { .. } | Refusal::StatementFixed => {
                "fetch the newest statement and restate from it".into()
            }
        }
    }

    /// Returns the remedy for a request that doesn't fit the cluster's phase. For instance, the
    /// cluster has ended, or there is no end to undo.
    fn remedy_of_an_end(&self) -> &'static str {
        match self {
            Refusal::Ended { phase: Phase::Expired, .. } => {
                "have an owner run `muster-discovery cluster reopen` and start the agents again; after \
                 a week only a new cluster and new bundles help"
            }
            Refusal::NothingToRetire { .. } => {
                "have an operator run `muster-discovery cluster abandon`"
            }
            Refusal::NothingToUnretire { .. } | Refusal::NothingToReopen { .. } => {
                "look at `muster-discovery cluster show`"
            }
            Refusal::UnretireTooLate { .. } => "move the data to a new cluster with a snapshot",
            _ => "create a new cluster and start the agents with a new bundle",
        }
    }
}
