//! The commit document: a proposal that every one of its seats signed.
//!
//! It is valid by the statement chain, the records and the acks. The service's signature is
//! evidence of who handed it out, checked when it is received and never again: a restart or an
//! adoption must not depend on a key that may be gone by then.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::digest::Digest;
use crate::jws::{Jws, JwsError, Typ};
use crate::key::{KeyId, PublicKey, SigningKey};
use crate::proposal::{Ack, Proposal, ProposalError, VerifiedProposal};
use crate::record::VerifiedRecord;
use crate::statement::StatementChain;

/// Payload of a document; a JWS by the service's signing key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Document {
    /// 1.
    pub version: u32,
    /// The committed proposal.
    pub proposal: Proposal,
    /// Each seat's ack, seat 1 first.
    pub acks: Vec<Jws>,
}

/// Why a document is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DocumentError {
    /// Kind or form, or (where it is checked) the service's signature.
    #[error("the document: {0}")]
    Jws(#[from] JwsError),
    /// Made by a newer version.
    #[error("the document was made by a newer version of Muster")]
    Version,
    /// The proposal in it.
    #[error("the document's list: {0}")]
    Proposal(#[from] ProposalError),
    /// Not one ack per seat.
    #[error("the document has {found} acks for {seats} seats")]
    Acks {
        /// How many.
        found: usize,
        /// How many there should be.
        seats: usize,
    },
    /// An ack's signature, kind or form.
    #[error("the ack of seat {seat}: {source}")]
    Ack {
        /// Whose.
        seat: u8,
        /// Why.
        source: JwsError,
    },
    /// An ack of another proposal.
    #[error("the ack of seat {0} is of another list")]
    OtherAck(u8),
}

/// A valid document.
#[derive(Clone, Debug)]
pub struct VerifiedDocument {
    jws: Jws,
    proposal: VerifiedProposal,
    acks: Vec<Jws>,
}

impl Document {
    /// Signs it, as the service.
    pub fn sign(&self, service: &SigningKey) -> Jws {
        Jws::sign(Typ::Document, service, self)
    }
}

impl VerifiedDocument {
    /// Verifies a document by chain, records and acks. The chain carries the trust: it must come
    /// from [`StatementChain::verify_from_pin`] or [`StatementChain::verify_from_owners`].
    pub fn verify(jws: &Jws, chain: &StatementChain) -> Result<Self, DocumentError> {
        let document: Document = jws.claims_unverified(Typ::Document)?;
        if document.version != 1 {
            return Err(DocumentError::Version);
        }
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

    /// Whether `key` has a seat in it, as the document claims. **Proves nothing**: it spares whoever
    /// isn't in it the signatures.
    pub fn claims_seat(jws: &Jws, key: &KeyId) -> Result<bool, DocumentError> {
        let document: Document = jws.claims_unverified(Typ::Document)?;
        Ok(document.proposal.seats.iter().any(|seat| seat.record.kid() == key))
    }

    /// Also checks the service's signature, against the keys of its JWKS.
    pub fn verify_received(
        jws: &Jws,
        chain: &StatementChain,
        service: &[PublicKey],
    ) -> Result<Self, DocumentError> {
        let _: Document = jws.verify_any(Typ::Document, service)?;
        Self::verify(jws, chain)
    }

    /// The document as received.
    pub fn jws(&self) -> &Jws {
        &self.jws
    }

    /// `h`: what the Raft identity is derived from.
    pub fn hash(&self) -> Digest {
        self.proposal.hash()
    }

    /// The committed proposal.
    pub fn proposal(&self) -> &VerifiedProposal {
        &self.proposal
    }

    /// The seats, seat 1 first.
    pub fn records(&self) -> &[VerifiedRecord] {
        self.proposal.records()
    }

    /// The acks, seat 1 first.
    pub fn acks(&self) -> &[Jws] {
        &self.acks
    }

    /// Epoch of the commit.
    pub fn epoch(&self) -> u64 {
        self.proposal.proposal().epoch
    }
}

#[cfg(test)]
mod tests;
