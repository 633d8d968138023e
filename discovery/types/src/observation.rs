//! Observations: an agent signs which voters of its cluster its node can't reach.
//!
//! Agents write them to the cluster's own store while a newcomer waits for the place of a dead
//! member. A member is replaced only if a quorum of the voters' agents has observed that it is
//! unreachable.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::digest::{Digest, MemberId};
use crate::jws::{Jws, JwsError, JwsType};
use crate::key::{PublicKey, SigningKey};
use crate::member_proof::{MemberProof, MemberProofError, ProvenMember};
use crate::statement::Statement;

/// Payload of an observation, which is a JWS by the agent's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Observation {
    /// Cluster of the members.
    pub cluster: Uuid,
    /// Key of the observing member's agent.
    pub agent: PublicKey,
    /// Member that the agent belongs to.
    pub observer: MemberId,
    /// Number of the observation. A later observation of the same agent has a higher number.
    pub number: u64,
    /// Voters that can't be reached from the observer's host.
    pub unreachable: Vec<UnreachableMember>,
}

/// A member that can't be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnreachableMember {
    /// Id of the member.
    pub member: MemberId,
    /// Time for which it has been unreachable without a break, in seconds by the observer's
    /// monotonic clock.
    pub for_seconds: u64,
}

/// An observation, together with the proof that its agent belongs to a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SignedObservation {
    /// The observation, signed by the agent's key.
    pub observation: Jws,
    /// Proof that the agent belongs to the member.
    pub proof: MemberProof,
}

/// Reason why an observation is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ObservationError {
    /// The form or signature is wrong.
    #[error("the observation: {0}")]
    Jws(#[from] JwsError),
    /// The observation is of another cluster.
    #[error("the observation is of another cluster")]
    OtherCluster,
    /// The agent doesn't belong to a member.
    #[error("the observation: {0}")]
    Member(#[from] MemberProofError),
}

impl Observation {
    /// Signs the observation, as its agent.
    pub fn sign(&self, agent: &SigningKey, proof: MemberProof) -> SignedObservation {
        SignedObservation { observation: Jws::sign(JwsType::Observation, agent, self), proof }
    }
}

impl SignedObservation {
    /// Verifies the observation and the proof of its agent, for the cluster with this newest
    /// statement. The caller has to compare the proven member with the observer.
    pub fn verify(
        &self,
        statement: &Statement,
    ) -> Result<(Observation, ProvenMember), ObservationError> {
        let claimed: Observation = self.observation.claims_unverified(JwsType::Observation)?;
        let observation: Observation =
            self.observation.verify(JwsType::Observation, &claimed.agent)?;
        if observation.cluster != statement.cluster {
            return Err(ObservationError::OtherCluster);
        }
        let proven = self.proof.verify(&observation.agent, statement)?;
        Ok((observation, proven))
    }

    /// Returns the hash of the signed observation.
    pub fn hash(&self) -> Digest {
        self.observation.hash()
    }
}
