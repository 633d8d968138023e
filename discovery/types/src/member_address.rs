//! Address statements: an agent signs at which URLs the other members reach its node since it
//! moved.
//!
//! Agents exchange address statements through the service while their cluster has no leader. So
//! members find each other again if all their addresses have changed at once. The cluster then
//! records the addresses itself.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::jws::{Jws, JwsError, JwsType};
use crate::key::{PublicKey, SigningKey};
use crate::member_proof::{MemberProof, MemberProofError, ProvenMember};
use crate::statement::Statement;
use crate::url::NodeUrl;

/// Maximum number of peer URLs in one address statement.
pub const MAX_ADDRESSES: usize = 4;

/// Maximum size of an address statement with its proof, as JSON, in bytes.
pub const MAX_SIGNED_ADDRESS_BYTES: usize = 12 * 1024;

/// Payload of an address statement, which is a JWS by the agent's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemberAddress {
    /// Cluster of the member.
    pub cluster: Uuid,
    /// Key of the member's agent.
    pub agent: PublicKey,
    /// Number of the address statement. Of two statements by the same agent, the one with the
    /// higher number counts.
    pub number: u64,
    /// URLs at which the other members reach the member.
    pub peer_urls: Vec<NodeUrl>,
}

/// An address statement, with the proof that its agent belongs to the member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SignedMemberAddress {
    /// The address statement, signed by the agent's key.
    pub address: Jws,
    /// Proof that the agent belongs to the member.
    pub proof: MemberProof,
}

/// An address statement whose signatures are valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedMemberAddress {
    /// Payload of the address statement, which the agent has signed.
    pub address: MemberAddress,
    /// The member, as its certificate names it, and its node key.
    pub proven: ProvenMember,
}

/// Reason why an address statement is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemberAddressError {
    /// The form or signature is wrong.
    #[error("the address: {0}")]
    Jws(#[from] JwsError),
    /// The address statement is of another cluster.
    #[error("the address is of another cluster")]
    OtherCluster,
    /// The address statement has no URL, or more than [`MAX_ADDRESSES`].
    #[error("the address has {0} URLs; 1 to {MAX_ADDRESSES} are allowed")]
    Count(usize),
    /// The address statement with its proof is larger than [`MAX_SIGNED_ADDRESS_BYTES`].
    #[error("the address with its proof has {0} bytes; {MAX_SIGNED_ADDRESS_BYTES} are allowed")]
    Size(usize),
    /// The agent doesn't belong to a member.
    #[error("the address: {0}")]
    Member(#[from] MemberProofError),
}

impl MemberAddress {
    /// Signs the address statement, as its agent.
    pub fn sign(&self, agent: &SigningKey, proof: MemberProof) -> SignedMemberAddress {
        SignedMemberAddress { address: Jws::sign(JwsType::MemberAddress, agent, self), proof }
    }
}

impl SignedMemberAddress {
    /// Verifies the address statement and its proof against the cluster's newest statement. Doesn't
    /// check whether the member was removed.
    pub fn verify(
        &self,
        statement: &Statement,
    ) -> Result<VerifiedMemberAddress, MemberAddressError> {
        let bytes = self.to_json().len();
        if bytes > MAX_SIGNED_ADDRESS_BYTES {
            return Err(MemberAddressError::Size(bytes));
        }
        let kind = JwsType::MemberAddress;
        let claimed: MemberAddress = self.address.claims_unverified(kind)?;
        let address: MemberAddress = self.address.verify(kind, &claimed.agent)?;
        if address.cluster != statement.cluster {
            return Err(MemberAddressError::OtherCluster);
        }
        let count = address.peer_urls.len();
        if count == 0 || count > MAX_ADDRESSES {
            return Err(MemberAddressError::Count(count));
        }
        let proven = self.proof.verify(&address.agent, statement)?;
        Ok(VerifiedMemberAddress { address, proven })
    }

    /// Returns the address statement with its proof as JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("texts always serialise")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::ClusterFixture;
    use crate::member_proof::CertifiedMember;

    fn address(world: &ClusterFixture, seat: usize) -> MemberAddress {
        MemberAddress {
            cluster: world.statement.cluster,
            agent: *world.agents[seat].public(),
            number: 1,
            peer_urls: vec!["https://10.1.0.1:2380".parse().unwrap()],
        }
    }

    fn sign(world: &ClusterFixture, seat: usize, address: &MemberAddress) -> SignedMemberAddress {
        address.sign(&world.agents[seat], world.member_proof(seat))
    }

    #[test]
    fn a_members_statement_shows_its_addresses_and_its_node_key() {
        let world = ClusterFixture::new(3);
        let address = address(&world, 1);
        let verified = sign(&world, 1, &address).verify(&world.statement).unwrap();
        assert_eq!(verified.address, address);
        assert_eq!(verified.proven.member, CertifiedMember::Founder(2));
        let node_key = world.records[1].csr.verify().unwrap().node_key;
        assert_eq!(verified.proven.node_key, node_key);
    }

    #[test]
    fn statements_of_others_for_others_or_with_too_many_urls_are_refused() {
        let world = ClusterFixture::new(3);
        let own = address(&world, 0);
        let verify = |signed: SignedMemberAddress| signed.verify(&world.statement).unwrap_err();
        let foreign = MemberAddress { cluster: Uuid::now_v7(), ..own.clone() };
        assert_eq!(verify(sign(&world, 0, &foreign)), MemberAddressError::OtherCluster);
        let none = MemberAddress { peer_urls: Vec::new(), ..own.clone() };
        assert_eq!(verify(sign(&world, 0, &none)), MemberAddressError::Count(0));
        let many = MemberAddress { peer_urls: vec![own.peer_urls[0].clone(); 5], ..own.clone() };
        assert_eq!(verify(sign(&world, 0, &many)), MemberAddressError::Count(5));
        let others_proof = own.sign(&world.agents[0], world.member_proof(1));
        assert!(matches!(verify(others_proof), MemberAddressError::Member(_)));
        let others_key = own.sign(&world.agents[1], world.member_proof(0));
        assert!(matches!(verify(others_key), MemberAddressError::Jws(_)));
        let mut large = sign(&world, 0, &own);
        large.proof.certificate.push_str(&" ".repeat(MAX_SIGNED_ADDRESS_BYTES));
        assert!(matches!(verify(large), MemberAddressError::Size(_)));
    }
}
