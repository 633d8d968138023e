//! A frozen list of seats, its hash, and the agents' signatures about it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::digest::Digest;
use crate::grant::{GrantError, GrantId, GrantTimeError, TokenKind, VerifiedGrant};
use crate::jws::{Jws, JwsError, JwsType};
use crate::key::{PublicKey, SigningKey};
use crate::record::{RecordError, SignedRecord, VerifiedRecord};
use crate::statement::StatementChain;

/// A proposal: the newest statement, an epoch, and one record per seat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Proposal {
    /// Id of the cluster.
    pub cluster: Uuid,
    /// Hash of the statement that the proposal is made under.
    pub statement: Digest,
    /// Epoch of the proposal, from 1.
    pub epoch: u64,
    /// Records of the seats, seat 1 first.
    pub seats: Vec<SignedRecord>,
    /// Grants that the records name, each once.
    pub grants: Vec<Jws>,
}

/// Reason why a proposal is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProposalError {
    /// The proposal is of another cluster.
    #[error("the proposal is of another cluster")]
    OtherCluster,
    /// The proposal names a statement that isn't in the chain.
    #[error("the proposal stands under a statement that is not in the chain")]
    OtherStatement,
    /// The number of seats differs from the cluster's size, or the epoch is 0.
    #[error("the proposal has {found} seats at epoch {epoch}, the cluster has {size}")]
    Seats {
        /// Number of seats in the proposal.
        found: usize,
        /// Size of the cluster.
        size: u8,
        /// Epoch of the proposal.
        epoch: u64,
    },
    /// A grant that a record names is missing, or there is one too many.
    #[error("the grants are not those that the records name")]
    Grants,
    /// More seats use one token than its grant allows.
    #[error("{seats} seats hang on the token {grant}, which is worth {uses}")]
    Uses {
        /// Id of the grant.
        grant: GrantId,
        /// Number of seats that the grant allows.
        uses: u8,
        /// Number of seats that use the grant.
        seats: usize,
    },
    /// A grant is refused.
    #[error(transparent)]
    Grant(#[from] GrantError),
    /// A record is refused.
    #[error("seat {seat}: {source}")]
    Record {
        /// Number of the seat.
        seat: u8,
        /// Reason why its record is refused.
        source: RecordError,
    },
    /// Two seats share a key or incarnation.
    #[error("seats {0} and {1} have one key or incarnation between them")]
    SameKey(u8, u8),
}

/// A proposal in which every record is valid under the statement that it names.
#[derive(Clone, Debug)]
pub struct VerifiedProposal {
    proposal: Proposal,
    hash: Digest,
    records: Vec<VerifiedRecord>,
    grants: Vec<VerifiedGrant>,
    deadline_seconds: u64,
}

/// Computes `h`, the hash of a proposal: the SHA-256 of "muster-proposal-1", the statement's hash,
/// the epoch (u64, big endian), then seat by seat the hashes of the record's and the endorsement's
/// JWS.
pub(crate) fn hash(
    statement: &Digest,
    epoch: u64,
    seats: impl IntoIterator<Item = [Digest; 2]>,
) -> Digest {
    let mut input = b"muster-proposal-1".to_vec();
    input.extend_from_slice(statement.as_bytes());
    input.extend_from_slice(&epoch.to_be_bytes());
    for [record, endorsement] in seats {
        input.extend_from_slice(record.as_bytes());
        input.extend_from_slice(endorsement.as_bytes());
    }
    Digest::of(&input)
}

impl Proposal {
    /// Computes `h`, the hash of the proposal.
    pub fn hash(&self) -> Digest {
        let seats = self.seats.iter().map(|seat| [seat.record.hash(), seat.endorsement.hash()]);
        hash(&self.statement, self.epoch, seats)
    }
}

impl VerifiedProposal {
    /// Verifies each record and grant under the statement that the proposal names, which must be in
    /// `chain`.
    ///
    /// The protocol judges whether that statement is the newest, and whether names, addresses and
    /// machines differ. An agent answers a forgery and a duplicate differently.
    pub fn verify(proposal: &Proposal, chain: &StatementChain) -> Result<Self, ProposalError> {
        let chain = chain.up_to(&proposal.statement).ok_or(ProposalError::OtherStatement)?;
        let statement = chain.newest();
        if proposal.cluster != statement.cluster {
            return Err(ProposalError::OtherCluster);
        }
        if proposal.seats.len() != usize::from(statement.size) || proposal.epoch == 0 {
            let (found, epoch) = (proposal.seats.len(), proposal.epoch);
            return Err(ProposalError::Seats { found, size: statement.size, epoch });
        }
        if proposal.grants.len() > proposal.seats.len() {
            return Err(ProposalError::Grants);
        }
        let grants = proposal
            .grants
            .iter()
            .map(|grant| VerifiedGrant::verify(grant, &chain))
            .collect::<Result<Vec<_>, _>>()?;
        // A join ticket has another issuer, and gives no right to a seat in a list that forms.
        if grants.iter().any(|grant| grant.kind != TokenKind::Boot) {
            return Err(GrantError::Invalid("it is no boot token's").into());
        }
        let mut records = Vec::with_capacity(proposal.seats.len());
        for (seat, signed) in (1..).zip(&proposal.seats) {
            let record = |source| ProposalError::Record { seat, source };
            let claimed: crate::record::Record =
                signed
                    .record
                    .claims_unverified(JwsType::Record)
                    .map_err(|error| record(RecordError::Record(error)))?;
            let grant =
                grants.iter().find(|g| g.id == claimed.grant).ok_or(ProposalError::Grants)?;
            let verified = VerifiedRecord::verify(signed, grant, &statement.permissions);
            records.push(verified.map_err(record)?);
        }
        let unused = |grant: &VerifiedGrant| records.iter().all(|r| r.grant != grant.id);
        let twice = |i: usize| grants[..i].iter().any(|other| other.id == grants[i].id);
        if grants.iter().any(unused) || (1..grants.len()).any(twice) {
            return Err(ProposalError::Grants);
        }
        for grant in &grants {
            let seats = records.iter().filter(|record| record.grant == grant.id).count();
            if seats > usize::from(grant.uses) {
                return Err(ProposalError::Uses { grant: grant.id, uses: grant.uses, seats });
            }
        }
        check_unique_keys(&records)?;
        Ok(Self {
            proposal: proposal.clone(),
            hash: proposal.hash(),
            records,
            grants,
            deadline_seconds: statement.deadline_seconds,
        })
    }

    /// Returns `h`, the hash of the proposal.
    pub fn hash(&self) -> Digest {
        self.hash
    }

    /// Returns the records, seat 1 first.
    pub fn records(&self) -> &[VerifiedRecord] {
        &self.records
    }

    /// Returns the first seat whose grant gives nobody a seat at `now` (seconds since 1970). Not
    /// part of [`VerifiedProposal::verify`]: a document stays valid for ever.
    pub fn seat_with_time_error(&self, now: u64) -> Option<(u8, GrantTimeError)> {
        (1..).zip(&self.records).find_map(|(seat, record)| {
            let grant = self.grants.iter().find(|grant| grant.id == record.grant)?;
            grant.time_error(now, self.deadline_seconds).map(|why| (seat, why))
        })
    }

    /// Returns the proposal as received.
    pub fn proposal(&self) -> &Proposal {
        &self.proposal
    }

    /// Returns the seat (from 1) of the agent with this key.
    pub fn seat_of(&self, key: &PublicKey) -> Option<u8> {
        (1..).zip(&self.records).find(|(_, r)| r.agent_key == *key).map(|(seat, _)| seat)
    }
}

fn check_unique_keys(records: &[VerifiedRecord]) -> Result<(), ProposalError> {
    for (second, b) in (1..).zip(records) {
        for (first, a) in (1..second).zip(records) {
            let same = a.agent_key == b.agent_key
                || a.node_key() == b.node_key()
                || a.incarnation == b.incarnation;
            if same {
                return Err(ProposalError::SameKey(first, second));
            }
        }
    }
    Ok(())
}

/// Payload of an ack, the consent to one proposal; a JWS by the agent's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Ack {
    /// Cluster of the proposal.
    pub cluster: Uuid,
    /// Epoch of the proposal.
    pub epoch: u64,
    /// Hash of the proposal.
    pub h: Digest,
}

/// Payload of a release, a JWS by the agent's key. The agent promises never to be a member of a
/// list of this epoch or a lower one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Release {
    /// Cluster that the promise is about.
    pub cluster: Uuid,
    /// Highest epoch in which the agent takes no part any more.
    pub epoch: u64,
}

impl Ack {
    /// Signs the ack. **Only after** the bound that it implies is durable.
    pub fn sign(&self, agent: &SigningKey) -> Jws {
        Jws::sign(JwsType::Ack, agent, self)
    }

    /// Verifies an ack by `agent`.
    pub fn verify(jws: &Jws, agent: &PublicKey) -> Result<Self, JwsError> {
        jws.verify(JwsType::Ack, agent)
    }
}

impl Release {
    /// Signs the release. **Only after** the release is durable.
    pub fn sign(&self, agent: &SigningKey) -> Jws {
        Jws::sign(JwsType::Release, agent, self)
    }

    /// Verifies a release by `agent`.
    pub fn verify(jws: &Jws, agent: &PublicKey) -> Result<Self, JwsError> {
        jws.verify(JwsType::Release, agent)
    }
}

#[cfg(test)]
mod tests;
