//! A change of a running cluster (an "intent"), as the service hands it to the cluster's agents.
//!
//! The service itself adds only two numbers to an intent: the configuration that the change was
//! planned on, and the time of expiry. Everything else that matters was signed by others. An agent
//! trusts what [`VerifiedIntent::verify`] has derived from the statement chain:
//!
//! * A person with the right role wants this change.
//! * The newcomer holds the ticket and the keys.
//! * The change has this operation id.
//!
//! The [`OperationId`] is a hash over the signed bytes. So the service gains nothing if it hands an
//! intent out twice, or with another id. `muster-node` commits the id with the change, and refuses
//! a second change with the same id. Stock etcd knows no ids.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::digest::{Digest, MemberId, OperationId};
use crate::grant::{GrantError, ISSUER_SKEW_SECONDS, MAX_JOIN_SECONDS, TokenKind, VerifiedGrant};
use crate::jws::{Jws, JwsError, JwsType};
use crate::order::{OrderError, OrderedChange, VerifiedOrder};
use crate::record::{RecordError, VerifiedRecord};
use crate::redeem::Redeem;
use crate::statement::StatementChain;
use crate::url::NodeUrl;

/// Time in seconds in which a newcomer may be added after it redeemed its ticket: 15 minutes.
pub const MAX_INTENT_SECONDS: u64 = MAX_JOIN_SECONDS;

/// Kind of a change of members.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Verb {
    /// Adds one member to the cluster.
    Join,
    /// Adds one member, and removes another one.
    Replace,
    /// Removes one member from the cluster.
    Remove,
    /// Changes the peer URLs of a member.
    Update,
}

impl Verb {
    /// Every verb, in the order of declaration.
    pub const ALL: [Verb; 4] = [Verb::Join, Verb::Replace, Verb::Remove, Verb::Update];

    /// Returns the verb's name in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Verb::Join => "join",
            Verb::Replace => "replace",
            Verb::Remove => "remove",
            Verb::Update => "update",
        }
    }
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A step of an intent: one call of etcd's membership API. Each step has its own operation id, so
/// a cluster of `muster-node` executes each call at most once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IntentStep {
    /// MemberAdd, which adds the newcomer as a learner.
    Add,
    /// MemberPromote, which makes the newcomer a voter.
    Promote,
    /// MemberRemove for the member that the intent removes or replaces.
    Remove,
    /// MemberUpdate, which changes a member's peer URLs.
    Update,
    /// MemberRemove for a learner that didn't catch up.
    RemoveLearner,
}

impl IntentStep {
    fn as_str(self) -> &'static str {
        match self {
            IntentStep::Add => "step add",
            IntentStep::Promote => "step promote",
            IntentStep::Remove => "step remove",
            IntentStep::Update => "step update",
            IntentStep::RemoveLearner => "step take out",
        }
    }
}

impl OperationId {
    /// Derives the operation id of the change that a grant or an order asks for.
    pub fn of(authority: &Jws, verb: Verb) -> Self {
        Self::derive(authority, verb.as_str())
    }

    /// Derives the operation id of a replacement under a replacement policy. Many newcomers may use
    /// the policy, and `record` is the hash of this newcomer's record.
    pub fn of_newcomer(policy: &Jws, record: &Digest) -> Self {
        Self::derive_for_newcomer(policy, record, Verb::Replace.as_str())
    }

    /// Derives the operation id of one step of a change. The node gets it in the call that makes
    /// the step.
    pub fn of_step(authority: &Jws, step: IntentStep) -> Self {
        Self::derive(authority, step.as_str())
    }

    fn derive(authority: &Jws, what: &str) -> Self {
        let hash = authority.hash();
        Self::of_parts(&[b"muster-operation-1", hash.as_bytes(), what.as_bytes()])
    }

    fn derive_for_newcomer(policy: &Jws, record: &Digest, what: &str) -> Self {
        let hash = policy.hash();
        let parts =
            [b"muster-operation-2", &hash.as_bytes()[..], record.as_bytes(), what.as_bytes()];
        Self::of_parts(&parts)
    }

    fn of_parts(parts: &[&[u8]]) -> Self {
        let digest = Digest::of_parts(parts);
        let mut id = [0; 16];
        id.copy_from_slice(&digest.as_bytes()[..16]);
        Self(id)
    }
}

/// A change of members, as the service hands it out. **Only a claim** until
/// [`VerifiedIntent::verify`] succeeds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Intent {
    /// Id of the cluster.
    pub cluster: Uuid,
    /// Kind of the change.
    pub verb: Verb,
    /// Operation id of the change.
    pub operation: OperationId,
    /// Signed request for the change: the grant of a join ticket, a replacement policy, or an
    /// order.
    pub authority: Jws,
    /// Redeem envelope of the newcomer, if the change comes from a ticket or a policy.
    pub redeem: Option<Jws>,
    /// Raft index of the configuration that the change was planned on, if known. An order names
    /// this index itself, and is stale in any other configuration. For a newcomer, the service
    /// gives the latest index that it knows. An agent whose node has an older configuration waits.
    pub planned_at: Option<u64>,
    /// Time until which the change may be begun, in seconds since 1970 by the service's clock. A
    /// change that has begun is completed even after that.
    pub expires_at: u64,
}

/// Reason why an intent is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IntentError {
    /// The intent and the statement chain belong to different clusters.
    #[error("the intent is for another cluster")]
    OtherCluster,
    /// The grant of the ticket is refused.
    #[error("the intent's ticket: {0}")]
    Grant(#[from] GrantError),
    /// The order is refused.
    #[error("the intent: {0}")]
    Order(#[from] OrderError),
    /// The newcomer's redeem envelope is refused.
    #[error("the newcomer's redeem: {0}")]
    Redeem(JwsError),
    /// The newcomer's record is refused.
    #[error("the newcomer: {0}")]
    Record(#[from] RecordError),
    /// The intent has neither a ticket's grant nor an order, or its parts don't fit together.
    #[error("the intent's parts don't belong together: {0}")]
    Mismatch(&'static str),
    /// The operation id doesn't match the signed bytes.
    #[error("the intent's operation id doesn't match the signed bytes")]
    OtherOperation,
    /// The intent expires later than its ticket or order allows.
    #[error("the intent is said to live longer than its ticket or order allows")]
    TooLong,
}

/// Reason why an intent must not be begun at this time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IntentTimeError {
    /// The ticket or order has a signing time in the future.
    #[error("it was signed in the future: a clock is wrong")]
    NotYet,
    /// The intent has expired.
    #[error("its time is over: it was to be begun within 15 minutes")]
    Over,
    /// By this host's clock the intent has expired, but by the service's clock it hasn't.
    #[error(
        "this host's clock is {seconds} s ahead of the discovery service's, so that its time would be \
         over: set whichever of the two clocks is wrong"
    )]
    ClockAhead {
        /// Difference between the two clocks, in seconds.
        seconds: u64,
    },
}

/// Change that a verified intent asks for.
#[derive(Clone, Debug)]
pub enum IntentChange {
    /// Add this record's member as a learner, and make it a voter after it has caught up.
    Add {
        /// Record of the newcomer.
        record: Box<VerifiedRecord>,
        /// Member that the newcomer replaces, if any.
        replaces: Option<MemberId>,
    },
    /// Remove a member from the cluster.
    Remove {
        /// Id of the member.
        member: MemberId,
    },
    /// Change a member's peer URLs.
    Update {
        /// Id of the member.
        member: MemberId,
        /// New peer URLs of the member.
        peer_urls: Vec<NodeUrl>,
    },
}

/// An intent whose signatures are all verified, and whose signers had the necessary rights.
#[derive(Clone, Debug)]
pub struct VerifiedIntent {
    intent: Intent,
    change: IntentChange,
    issued_at: u64,
    /// Replacement policy by which the newcomer wants a place, if it has no ticket of its own.
    policy: Option<Box<VerifiedGrant>>,
}

impl VerifiedIntent {
    /// Verifies an intent under a statement chain. Each part vouches for the next: chain → ticket
    /// or order (with its signer's role) → token key → agent key → record. Each part must belong to
    /// the chain's cluster, and the operation id must match.
    ///
    /// The caller must trust the chain, which has to come from [`StatementChain::verify_from_pin`]
    /// or [`StatementChain::verify_from_owners`]. The time is not checked: see
    /// [`VerifiedIntent::time_error`].
    pub fn verify(intent: &Intent, chain: &StatementChain) -> Result<Self, IntentError> {
        if intent.cluster != chain.newest().cluster {
            return Err(IntentError::OtherCluster);
        }
        let mut policy = None;
        let mut operation = None;
        let (verb, change, issued_at, latest) = match (intent.authority.typ(), &intent.redeem) {
            (JwsType::Grant, Some(redeem)) => {
                let grant = verify_ticket(&intent.authority, chain)?;
                let record = Box::new(verify_newcomer(redeem, &grant, chain)?);
                let verb = verb_of(&grant);
                operation = Some(operation_of(&grant, &record.hash()));
                policy = (grant.kind == TokenKind::Heal).then(|| Box::new(grant.clone()));
                let latest = grant.expires_at.saturating_add(MAX_INTENT_SECONDS);
                (
                    verb,
                    IntentChange::Add { record, replaces: grant.replaces },
                    grant.issued_at,
                    latest,
                )
            }
            (JwsType::Order, None) => {
                let order = VerifiedOrder::verify(&intent.authority, chain)?;
                if order.planned_at != intent.planned_at {
                    return Err(IntentError::Mismatch("the order was given on another plan"));
                }
                let (verb, change) = match order.change.clone() {
                    OrderedChange::Remove { member } => {
                        (Verb::Remove, IntentChange::Remove { member })
                    }
                    OrderedChange::Update { member, peer_urls } => {
                        (Verb::Update, IntentChange::Update { member, peer_urls })
                    }
                };
                (verb, change, order.issued_at, order.expires_at)
            }
            (JwsType::Grant, None) => {
                return Err(IntentError::Mismatch("a ticket, and nobody who redeemed it"));
            }
            _ => return Err(IntentError::Mismatch("neither a ticket nor an order alone")),
        };
        if intent.verb != verb {
            return Err(IntentError::Mismatch("another change was signed"));
        }
        let operation = operation.unwrap_or_else(|| OperationId::of(&intent.authority, verb));
        if intent.operation != operation {
            return Err(IntentError::OtherOperation);
        }
        if intent.expires_at > latest {
            return Err(IntentError::TooLong);
        }
        Ok(Self { intent: intent.clone(), change, issued_at, policy })
    }

    /// Returns the replacement policy by which the newcomer wants a place. `None` if a ticket or an
    /// order asks for the change.
    pub fn policy(&self) -> Option<&VerifiedGrant> {
        self.policy.as_deref()
    }

    /// Returns the intent with `member` as the member that the newcomer replaces. Applies only to a
    /// newcomer under a policy: the policy names no member, and the cluster's agents decide which
    /// one is dead. Any other intent stays as it is.
    pub fn with_replaced_member(mut self, member: MemberId) -> Self {
        if let IntentChange::Add { replaces, .. } = &mut self.change
            && self.policy.is_some()
        {
            *replaces = Some(member);
        }
        self
    }

    /// Returns the reason why the intent must not be begun now, if there is one. `service` is the
    /// service's time and `own` this host's time, in seconds since 1970. This host's time also
    /// counts, because a service whose clock was set back could otherwise make an expired intent
    /// valid again.
    pub fn time_error(&self, service: u64, own: u64) -> Option<IntentTimeError> {
        let ends = self.intent.expires_at;
        if self.issued_at > service.saturating_add(ISSUER_SKEW_SECONDS) {
            Some(IntentTimeError::NotYet)
        } else if service >= ends {
            Some(IntentTimeError::Over)
        } else if own >= ends.saturating_add(ISSUER_SKEW_SECONDS) {
            Some(IntentTimeError::ClockAhead { seconds: own - service })
        } else {
            None
        }
    }

    /// Returns the change that the intent asks for.
    pub fn change(&self) -> &IntentChange {
        &self.change
    }

    /// Returns the operation id of one step of the intent, for the request to the node.
    pub fn step_operation(&self, step: IntentStep) -> OperationId {
        match (&self.policy, &self.change) {
            (Some(policy), IntentChange::Add { record, .. }) => {
                OperationId::derive_for_newcomer(policy.jws(), &record.hash(), step.as_str())
            }
            _ => OperationId::of_step(&self.intent.authority, step),
        }
    }

    /// Returns the member that the intent removes from the cluster, if any.
    pub fn leaving_member(&self) -> Option<MemberId> {
        match &self.change {
            IntentChange::Add { replaces, .. } => *replaces,
            IntentChange::Remove { member } => Some(*member),
            IntentChange::Update { .. } => None,
        }
    }
}

impl std::ops::Deref for VerifiedIntent {
    type Target = Intent;

    fn deref(&self) -> &Intent {
        &self.intent
    }
}

/// Returns the verb for this ticket: `Replace` if it is a replacement policy or names a member to
/// replace, otherwise `Join`.
pub fn verb_of(ticket: &VerifiedGrant) -> Verb {
    match (ticket.kind, ticket.replaces) {
        (TokenKind::Heal, _) | (_, Some(_)) => Verb::Replace,
        (TokenKind::Boot | TokenKind::Join, None) => Verb::Join,
    }
}

/// Returns the operation id of the change that makes a newcomer a member. A join ticket admits one
/// newcomer, so its hash identifies the change. Many newcomers may use one policy. For a policy,
/// the id therefore also covers `record`, the hash of the newcomer's record.
pub fn operation_of(ticket: &VerifiedGrant, record: &Digest) -> OperationId {
    match ticket.kind {
        TokenKind::Heal => OperationId::of_newcomer(ticket.jws(), record),
        TokenKind::Boot | TokenKind::Join => OperationId::of(ticket.jws(), verb_of(ticket)),
    }
}

/// Verifies the grant of a join ticket or of a replacement policy.
fn verify_ticket(grant: &Jws, chain: &StatementChain) -> Result<VerifiedGrant, IntentError> {
    let grant = VerifiedGrant::verify(grant, chain)?;
    match grant.admits_newcomers() {
        true => Ok(grant),
        false => Err(IntentError::Mismatch("a boot token is no join ticket")),
    }
}

/// Verifies the redeem of a ticket, and returns the newcomer's record. The redeem's service key is
/// not checked here: the service itself checks it in [`Redeem::open`].
fn verify_newcomer(
    redeem: &Jws,
    ticket: &VerifiedGrant,
    chain: &StatementChain,
) -> Result<VerifiedRecord, IntentError> {
    let newest = chain.newest();
    let claimed: Redeem = redeem.claims_unverified(JwsType::Redeem).map_err(IntentError::Redeem)?;
    let record = VerifiedRecord::verify(&claimed.signed, ticket, &newest.permissions)?;
    let redeem: Redeem =
        redeem.verify(JwsType::Redeem, &record.agent_key).map_err(IntentError::Redeem)?;
    if redeem.cluster != newest.cluster {
        return Err(IntentError::Mismatch("the redeem is of another cluster"));
    }
    if chain.position(&redeem.statement).is_none() {
        return Err(IntentError::Mismatch("the redeem is under a statement of another chain"));
    }
    Ok(record)
}

#[cfg(test)]
mod tests;
