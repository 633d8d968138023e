//! Readmissions: an added member proves how it joined to a service that was restored from a backup.
//!
//! The backup can be older than the join. The restored service then knows neither the member's
//! ticket nor its agent's key. The member has three proofs. Only together do they show that this
//! agent belongs to a member:
//!
//! - the ticket's grant, signed by an operator, and the record that the ticket's token endorsed;
//! - the member's certificate, which the cluster's CA issued for the node key in that record. A
//!   ticket's token can endorse a second record, so the token alone proves nothing after the join;
//! - a signature by the node key over the agent's key, since certificates are public.
//!
//! The proofs don't show whether the member was removed since; only the cluster itself knows that.
//! After a recovery, the operator's signature shows it: the recovery statement names the member of
//! whose data the cluster was made.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::digest::MemberId;
use crate::grant::{GrantError, VerifiedGrant};
use crate::jws::{Jws, JwsError, JwsType};
use crate::key::PublicKey;
use crate::leaves::LeafError;
use crate::member_proof::{CertifiedMember, MemberProof, MemberProofError};
use crate::record::{RecordError, VerifiedRecord};
use crate::redeem::Redeem;
use crate::statement::StatementChain;

/// Body of `POST /v1/clusters/{id}/readmit`: how a member joined, for a service that has lost it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReadmitRequest {
    /// Grant of the join ticket.
    pub ticket: Jws,
    /// Redeem envelope with the member's record, signed by its agent.
    pub redeem: Jws,
    /// The member's peer certificate, as a PEM chain with the leaf first. It may have expired.
    pub certificate: String,
    /// ECDSA signature (P-256, SHA-256, in DER) by the node key over cluster and agent key, as
    /// base64url.
    pub signature: String,
    /// Recovery statements from the founded Raft cluster to the present one, which an operator has
    /// made of this member's data. An agent sends them only if the service doesn't readmit it
    /// without them, because services of earlier versions don't know this field.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recoveries: Vec<Jws>,
}

/// A readmission whose signatures are all valid.
#[derive(Clone, Debug)]
pub struct VerifiedReadmission {
    /// Grant of the join ticket.
    pub ticket: VerifiedGrant,
    /// The record, which the ticket's token endorsed.
    pub record: VerifiedRecord,
    /// Id of the member in its Raft cluster, from its certificate.
    pub member: MemberId,
}

/// Reason why a readmission is refused.
#[derive(Debug, thiserror::Error)]
pub enum ReadmissionError {
    /// The grant isn't valid.
    #[error("the ticket: {0}")]
    Grant(#[from] GrantError),
    /// The grant is for a boot token, which can't admit a member to a running cluster.
    #[error("the ticket is none for a running cluster")]
    NoTicket,
    /// The redeem envelope isn't signed by the caller's key.
    #[error("the redeem: {0}")]
    Redeem(#[from] JwsError),
    /// The record isn't valid, or isn't the caller's.
    #[error("the record: {0}")]
    Record(#[from] RecordError),
    /// The record or the redeem names another cluster or agent.
    #[error("the record is of another cluster or agent")]
    OtherRecord,
    /// The certificate and the node key's signature don't prove a member that was added.
    #[error("{0}")]
    Member(#[from] MemberProofError),
}

impl ReadmitRequest {
    /// Verifies all proofs of the agent with the key `agent`, which the TLS connection proves.
    /// Doesn't check whether the ticket has expired: the service checked that when the ticket was
    /// redeemed.
    pub fn verify(
        &self,
        agent: &PublicKey,
        chain: &StatementChain,
    ) -> Result<VerifiedReadmission, ReadmissionError> {
        let newest = chain.newest();
        let ticket = VerifiedGrant::verify_kept(&self.ticket, chain)?;
        if !ticket.admits_newcomers() {
            return Err(ReadmissionError::NoTicket);
        }
        let redeem: Redeem = self.redeem.verify(JwsType::Redeem, agent)?;
        let record = VerifiedRecord::verify(&redeem.signed, &ticket, &newest.permissions)?;
        let is_own = record.agent_key == *agent && record.cluster == newest.cluster;
        if !is_own || redeem.cluster != newest.cluster {
            return Err(ReadmissionError::OtherRecord);
        }
        let proof = MemberProof {
            certificate: self.certificate.clone(),
            signature: self.signature.clone(),
        };
        let proven = proof.verify(agent, newest)?;
        if proven.node_key != *record.node_key() {
            return Err(MemberProofError::Leaf(LeafError::OtherKey("peer")).into());
        }
        let CertifiedMember::Added(member) = proven.member else {
            return Err(MemberProofError::NoMember.into());
        };
        Ok(VerifiedReadmission { ticket, record, member })
    }
}
