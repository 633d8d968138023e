//! The commit document: a proposal with an ack of every seat.
//!
//! Statement chain, records and acks make a document valid. The service's signature only shows
//! which service handed the document out. That signature is checked when the document is received,
//! and never again. A restart or an adoption must not depend on a service key that may no longer
//! exist.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::digest::{Digest, MemberId};
use crate::jws::{Jws, JwsError, JwsType};
use crate::key::{KeyId, PublicKey, SigningKey};
use crate::proposal::{Ack, Proposal, ProposalError, VerifiedProposal};
use crate::record::{Record, VerifiedRecord};
use crate::statement::StatementChain;

/// Payload of a commit document, which is a JWS by the service's signing key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Document {
    /// Version of the format, always 1.
    pub version: u32,
    /// Proposal that was committed.
    pub proposal: Proposal,
    /// Acks of the seats, seat 1 first.
    pub acks: Vec<Jws>,
}

/// Reason why a commit document is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DocumentError {
    /// The kind or form of the commit document is wrong, or the service's signature of it. Only
    /// [`VerifiedDocument::verify_received`] checks that signature.
    #[error("the document: {0}")]
    Jws(#[from] JwsError),
    /// The proposal in the commit document is not valid.
    #[error("the document's list: {0}")]
    Proposal(#[from] ProposalError),
    /// The number of acks is not the number of seats.
    #[error("the document has {found} acks for {seats} seats")]
    Acks {
        /// Number of acks in the commit document.
        found: usize,
        /// Number of seats in the proposal.
        seats: usize,
    },
    /// The signature, kind or form of an ack is wrong.
    #[error("the ack of seat {seat}: {source}")]
    Ack {
        /// Seat of the refused ack.
        seat: u8,
        /// Reason why the ack is refused.
        source: JwsError,
    },
    /// The ack of this seat belongs to another proposal.
    #[error("the ack of seat {0} is of another list")]
    OtherAck(u8),
}

/// A commit document whose records and acks were verified under a statement chain.
#[derive(Clone, Debug)]
pub struct VerifiedDocument {
    jws: Jws,
    proposal: VerifiedProposal,
    acks: Vec<Jws>,
}

impl Document {
    /// Signs the commit document, as the service.
    pub fn sign(&self, service: &SigningKey) -> Jws {
        Jws::sign(JwsType::Document, service, self)
    }
}

impl VerifiedDocument {
    /// Verifies a commit document's records and acks under a statement chain. The caller must trust
    /// the chain, which has to come from [`StatementChain::verify_from_pin`] or
    /// [`StatementChain::verify_from_owners`].
    pub fn verify(jws: &Jws, chain: &StatementChain) -> Result<Self, DocumentError> {
        let document: Document = jws.claims_unverified(JwsType::Document)?;
        let proposal = VerifiedProposal::verify(&document.proposal, chain)?;
        let (found, seats) = (document.acks.len(), proposal.records().len());
        if found != seats {
            return Err(DocumentError::Acks { found, seats });
        }
        let expected = Ack {
            cluster: document.proposal.cluster,
            epoch: document.proposal.epoch,
            h: proposal.hash(),
        };
        for (seat, (jws, record)) in (1..).zip(document.acks.iter().zip(proposal.records())) {
            let ack = Ack::verify(jws, &record.agent_key)
                .map_err(|source| DocumentError::Ack { seat, source })?;
            if ack != expected {
                return Err(DocumentError::OtherAck(seat));
            }
        }
        Ok(Self { jws: jws.clone(), proposal, acks: document.acks })
    }

    /// Whether the unverified commit document claims that `key` has a seat. **Proves nothing.** It
    /// lets a caller skip the expensive verification for a key without a seat.
    pub fn claims_seat(jws: &Jws, key: &KeyId) -> Result<bool, DocumentError> {
        let document: Document = jws.claims_unverified(JwsType::Document)?;
        Ok(document.proposal.seats.iter().any(|seat| seat.record.kid() == key))
    }

    /// Verifies a commit document that the service has sent. In addition to
    /// [`VerifiedDocument::verify`], this checks the service's signature by the keys of its JWKS.
    pub fn verify_received(
        jws: &Jws,
        chain: &StatementChain,
        service: &[PublicKey],
    ) -> Result<Self, DocumentError> {
        let _: Document = jws.verify_any(JwsType::Document, service)?;
        Self::verify(jws, chain)
    }

    /// Returns the commit document as received.
    pub fn jws(&self) -> &Jws {
        &self.jws
    }

    /// Returns `h`, the hash of the proposal, from which the Raft ids are derived.
    pub fn hash(&self) -> Digest {
        self.proposal.hash()
    }

    /// Returns the proposal that was committed.
    pub fn proposal(&self) -> &VerifiedProposal {
        &self.proposal
    }

    /// Returns the Raft id of the member that founds the cluster with `record`.
    pub fn founder_id(&self, record: &Record) -> MemberId {
        self.proposal.founder_id(record)
    }

    /// Returns the id of the Raft cluster that was founded, or taken over, with this commit
    /// document.
    pub fn raft_cluster_id(&self) -> u64 {
        self.proposal.raft_cluster_id()
    }

    /// Returns the records of the seats, seat 1 first.
    pub fn records(&self) -> &[VerifiedRecord] {
        self.proposal.records()
    }

    /// Returns the acks, seat 1 first.
    pub fn acks(&self) -> &[Jws] {
        &self.acks
    }

    /// Returns the epoch of the committed proposal.
    pub fn epoch(&self) -> u64 {
        self.proposal.proposal().epoch
    }
}

#[cfg(test)]
mod tests;
