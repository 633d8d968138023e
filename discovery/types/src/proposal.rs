//! A frozen list of seats (a "proposal"), its hash, and the agents' acks and releases.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::adoption::Adoption;
use crate::digest::{Digest, MemberId};
use crate::grant::{GrantError, GrantId, GrantTimeError, VerifiedGrant};
use crate::jws::{Jws, JwsError, JwsType};
use crate::key::{PublicKey, SigningKey};
use crate::raft_id;
use crate::record::{Record, RecordError, SignedRecord, VerifiedRecord};
use crate::statement::StatementChain;

/// A proposal: the hash of a statement, an epoch, and one record per seat.
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
    /// Grants that the records name, each of them once.
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
    /// The proposal lacks a grant that a record names, or has a grant that no record names.
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
    /// A grant in the proposal is refused.
    #[error(transparent)]
    Grant(#[from] GrantError),
    /// A record in the proposal is refused.
    #[error("seat {seat}: {source}")]
    Record {
        /// Number of the seat.
        seat: u8,
        /// Reason why the seat's record is refused.
        source: RecordError,
    },
    /// Two seats share a key or incarnation.
    #[error("seats {0} and {1} have one key or incarnation between them")]
    SameKey(u8, u8),
}

/// A proposal (list of members) whose records are all valid under the statement that it names.
#[derive(Clone, Debug)]
pub struct VerifiedProposal {
    proposal: Proposal,
    hash: Digest,
    records: Vec<VerifiedRecord>,
    grants: Vec<VerifiedGrant>,
    deadline_seconds: u64,
    adopted: Option<Adoption>,
}

/// Computes `h`, the hash of a proposal. It is the SHA-256 of "muster-proposal-1", the statement's
/// hash, the epoch (u64, big endian), and two hashes for each seat. These are the hashes of the
/// record's JWS and of the endorsement's JWS.
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
    /// Verifies each record and grant under the statement that the proposal names. That statement
    /// must be in `chain`.
    ///
    /// Other checks belong to the protocol: whether the statement is the newest, and whether names,
    /// addresses and machines differ. They are separate, because an agent answers a duplicate in
    /// another way than a forgery.
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
        // A valid grant may still give no seat in a forming cluster. A join ticket gives none, and
        // a replacement policy only if its signer may also mint boot tokens.
        if grants.iter().any(|grant| !grant.gives_seats()) {
            return Err(GrantError::Invalid("it gives no seat in a list that forms").into());
        }
        let mut records = Vec::with_capacity(proposal.seats.len());
        for (seat, signed) in (1..).zip(&proposal.seats) {
            let record = |source| ProposalError::Record { seat, source };
            let claimed: Record = signed
                .record
                .claims_unverified(JwsType::Record)
                .map_err(|error| record(RecordError::Record(error)))?;
            let grant =
                grants.iter().find(|g| g.id == claimed.grant).ok_or(ProposalError::Grants)?;
            let verified = VerifiedRecord::verify(signed, grant, &statement.permissions);
            let verified = verified.map_err(record)?;
            verified.check_founder(statement).map_err(record)?;
            records.push(verified);
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
            adopted: statement.adopted.clone(),
        })
    }

    /// Returns `h`, the hash of the proposal.
    pub fn hash(&self) -> Digest {
        self.hash
    }

    /// Returns the Raft id that the member with this record gets if the proposal is committed. A
    /// member of an adopted cluster keeps its id.
    pub fn founder_id(&self, record: &Record) -> MemberId {
        let adopted = self.adopted.as_ref().and_then(|adopted| adopted.member_of(record));
        adopted
            .map_or_else(|| raft_id::of_founder(&self.hash, &record.peer_urls), |member| member.id)
    }

    /// Returns the id of the Raft cluster that this proposal makes, or that it takes over.
    pub fn raft_cluster_id(&self) -> u64 {
        let adopted = self.adopted.as_ref().and_then(Adoption::raft_cluster_id);
        let founded = || raft_id::of_cluster(self.records.iter().map(|r| self.founder_id(r)));
        adopted.unwrap_or_else(founded)
    }

    /// Returns the running etcd cluster that the list takes over, if it does.
    pub fn adopted(&self) -> Option<&Adoption> {
        self.adopted.as_ref()
    }

    /// Returns the records, seat 1 first.
    pub fn records(&self) -> &[VerifiedRecord] {
        &self.records
    }

    /// Returns the first seat whose grant can't justify it at `now` (seconds since 1970).
    /// [`VerifiedProposal::verify`] doesn't check this, because a commit document stays valid for
    /// ever.
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

    /// Returns the number of the seat, from 1, of the agent with this key.
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

/// Payload of an ack, which is a JWS by the agent's key. With it, the agent agrees to one proposal.
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

/// Payload of a release, which is a JWS by the agent's key. The agent promises never to be in a
/// list of members of this epoch or of an earlier one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Release {
    /// Cluster for which the agent makes the promise.
    pub cluster: Uuid,
    /// Highest epoch that the promise covers.
    pub epoch: u64,
}

impl Ack {
    /// Signs the ack. **Only after** the agent has durably stored that it signs in this epoch.
    pub fn sign(&self, agent: &SigningKey) -> Jws {
        Jws::sign(JwsType::Ack, agent, self)
    }

    /// Verifies an ack by `agent`.
    pub fn verify(jws: &Jws, agent: &PublicKey) -> Result<Self, JwsError> {
        jws.verify(JwsType::Ack, agent)
    }
}

impl Release {
    /// Signs the release. **Only after** the agent has stored the release durably.
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
