//! Why the service says no: a stable code, an HTTP status, and a sentence with the way out.

use crate::fitness::{Clash, Unfit};
use crate::service::cluster::{EndCause, Phase};
use crate::values::{Epoch, Hash, KeyId, Micros, Millis};

/// A refusal. `Display` says what and why; [`Refusal::way_out`] says what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The list was decided without this key.
    #[error("the cluster's members are decided, and {key} is not one of them")]
    BootClosed { key: KeyId },
    /// The cluster ended before it was committed, or was retired.
    #[error("the cluster is {}: {by}", phase.as_str())]
    Ended { phase: Phase, cause: Option<EndCause>, by: String },
    /// An ack, nack or row for a proposal that isn't the present one.
    #[error("epoch {sent} is not being prepared: the cluster is {} at epoch {epoch}", phase.as_str())]
    StaleEpoch { sent: Epoch, epoch: Epoch, phase: Phase },
    /// An epoch that no service can have proposed.
    #[error("epoch {sent} is too far above everything that was proposed here: at most {limit}")]
    EpochTooFar { sent: Epoch, limit: Epoch },
    /// An ack for the present epoch over another hash.
    #[error("the ack is over {sent}, the proposal of epoch {epoch} is {h}")]
    OtherProposal { sent: Hash, h: Hash, epoch: Epoch },
    /// Somebody else holds this key.
    #[error("another session holds the key {key} (boot counter {last}, this one sent {sent})")]
    KeyElsewhere { key: KeyId, last: u64, sent: u64 },
    /// Two documents were shown; nothing is done here any more.
    #[error("two valid documents of this cluster exist: {decided} and {other}")]
    Split { decided: Hash, other: Hash },
    /// This database doesn't know the key.
    #[error("the key {key} has not redeemed a token here")]
    UnknownKey { key: KeyId },
    /// The sender is not in the frozen list.
    #[error("{key} has no seat in the proposal of epoch {epoch}")]
    NotSeated { key: KeyId, epoch: Epoch },
    /// The same session sent another record.
    #[error("{key} has redeemed another record in this session")]
    RecordChanged { key: KeyId },
    /// The record asks for another cluster or names another grant.
    #[error("the record is for another cluster or another grant")]
    ForeignRecord,
    /// The grant's time is over.
    #[error("the token expired")]
    GrantExpired { expired: Micros },
    /// The grant was revoked.
    #[error("the token was revoked")]
    GrantRevoked,
    /// The grant has admitted as many keys as it may.
    #[error("the token has admitted {admitted} keys, and no more than {limit} are allowed")]
    TooManyKeys { admitted: usize, limit: usize },
    /// Without the rule that a use is a seat: every use is taken by a key.
    #[error("every use of the token is taken")]
    GrantUsed,
    /// The record can't stand in any list.
    #[error("the record can't be a member's: {0}")]
    Unfit(Unfit),
    /// Another live agent has what this record has.
    #[error("{other} is live and shares with it {clash}")]
    Duplicate { other: KeyId, clash: Clash },
    /// Reports are for members of a decided list.
    #[error("the cluster is {}, not committed", phase.as_str())]
    NotCommitted { phase: Phase },
    /// A cluster that isn't committed is abandoned, not retired.
    #[error("the cluster is {}, not committed: there is nothing to retire", phase.as_str())]
    NothingToRetire { phase: Phase },
    /// The ledgers haven't agreed with this database yet: what looks undecided may be committed.
    #[error("the database was changed, and the ledgers have not been compared with it yet")]
    Unsettled,
    /// A committed cluster can't be given up.
    #[error("the cluster is {}: its members may be running", phase.as_str())]
    AlreadyCommitted { phase: Phase },
    /// A statement that doesn't follow the newest.
    #[error("statement {sent} does not follow statement {newest}")]
    StatementOutOfOrder { sent: u64, newest: u64 },
    /// Size and id are fixed.
    #[error("a next statement can't change the cluster's id or size")]
    StatementFixed,
    /// The document is of another cluster.
    #[error("the document is another cluster's")]
    ForeignDocument,
}

impl Refusal {
    /// The stable code, for programs.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Refusal::BootClosed { .. } => "boot_closed",
            Refusal::Ended { phase, .. } => phase.as_str(),
            Refusal::StaleEpoch { .. } => "stale_epoch",
            Refusal::EpochTooFar { .. } => "epoch_too_far",
            Refusal::OtherProposal { .. } => "other_proposal",
            Refusal::KeyElsewhere { .. } => "key_elsewhere",
            Refusal::Split { .. } => "split",
            Refusal::UnknownKey { .. } => "unknown_key",
            Refusal::NotSeated { .. } => "not_seated",
            Refusal::RecordChanged { .. } => "record_changed",
            Refusal::ForeignRecord => "foreign_record",
            Refusal::GrantExpired { .. } => "grant_expired",
            Refusal::GrantRevoked => "grant_revoked",
            Refusal::TooManyKeys { .. } => "too_many_keys",
            Refusal::GrantUsed => "grant_used",
            Refusal::Unfit(unfit) => unfit.code(),
            Refusal::Duplicate { clash, .. } => clash.code(),
            Refusal::NotCommitted { .. } => "not_committed",
            Refusal::NothingToRetire { .. } => "nothing_to_retire",
            Refusal::Unsettled => "unsettled",
            Refusal::AlreadyCommitted { .. } => "already_committed",
            Refusal::StatementOutOfOrder { .. } => "statement_out_of_order",
            Refusal::StatementFixed => "statement_fixed",
            Refusal::ForeignDocument => "foreign_document",
        }
    }

    /// The HTTP status.
    #[must_use]
    pub fn status(&self) -> u16 {
        match self {
            Refusal::BootClosed { .. } | Refusal::Ended { .. } => 410,
            Refusal::GrantExpired { .. }
            | Refusal::GrantRevoked
            | Refusal::TooManyKeys { .. }
            | Refusal::GrantUsed => 403,
            Refusal::UnknownKey { .. } => 404,
            Refusal::Unfit(_)
            | Refusal::ForeignRecord
            | Refusal::ForeignDocument
            | Refusal::EpochTooFar { .. } => 422,
            Refusal::StaleEpoch { .. }
            | Refusal::OtherProposal { .. }
            | Refusal::KeyElsewhere { .. }
            | Refusal::Split { .. }
            | Refusal::NotSeated { .. }
            | Refusal::RecordChanged { .. }
            | Refusal::Duplicate { .. }
            | Refusal::NotCommitted { .. }
            | Refusal::NothingToRetire { .. }
            | Refusal::Unsettled
            | Refusal::AlreadyCommitted { .. }
            | Refusal::StatementOutOfOrder { .. }
            | Refusal::StatementFixed => 409,
        }
    }

    /// Whether the same agent may get a yes later by carrying on (after a fresh poll).
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Refusal::StaleEpoch { .. }
            | Refusal::UnknownKey { .. }
            | Refusal::NotSeated { .. }
            | Refusal::Duplicate { .. }
            | Refusal::Unsettled
            | Refusal::NotCommitted { .. } => true,
            Refusal::BootClosed { .. }
            | Refusal::Ended { .. }
            | Refusal::EpochTooFar { .. }
            | Refusal::OtherProposal { .. }
            | Refusal::KeyElsewhere { .. }
            | Refusal::Split { .. }
            | Refusal::RecordChanged { .. }
            | Refusal::ForeignRecord
            | Refusal::GrantExpired { .. }
            | Refusal::GrantRevoked
            | Refusal::TooManyKeys { .. }
            | Refusal::GrantUsed
            | Refusal::Unfit(_)
            | Refusal::NothingToRetire { .. }
            | Refusal::AlreadyCommitted { .. }
            | Refusal::StatementOutOfOrder { .. }
            | Refusal::StatementFixed
            | Refusal::ForeignDocument => false,
        }
    }

    /// What to do now: one sentence.
    #[must_use]
    pub fn way_out(&self, lease: Millis) -> String {
        match self {
            Refusal::BootClosed { .. } => {
                "use this host for another cluster: members of one that runs are changed by its own \
                 Cluster API, not here"
                    .into()
            }
            Refusal::Ended { .. } => {
                "create a new cluster and start the agents with a new bundle".into()
            }
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
            Refusal::GrantExpired { .. }
            | Refusal::GrantRevoked
            | Refusal::TooManyKeys { .. }
            | Refusal::GrantUsed => {
                "mint a new one with `muster-discovery token create` and hand out its bundle".into()
            }
            Refusal::Unfit(_) => {
                "start the agent with the address under which the others reach this host".into()
            }
            Refusal::Duplicate { .. } => format!(
                "change it on one of the two, or stop the other one: its place is free {lease} later"
            ),
            Refusal::NotCommitted { .. } => "poll until the cluster is committed".into(),
            Refusal::NothingToRetire { .. } => {
                "have an operator run `muster-discovery cluster abandon`".into()
            }
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
}
