//! Redeem envelopes, in which an agent hands its record to one service.

use muster_identity::{
    IdentityDocument, IdentityError, RequirementFailure, TrustedKeys, check_any_requirement,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::digest::{Digest, Nonce};
use crate::grant::VerifiedGrant;
use crate::jws::{Jws, JwsError, JwsType};
use crate::key::{PublicKey, SigningKey};
use crate::record::SignedRecord;

/// Payload of a redeem, which is a JWS by the agent's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Redeem {
    /// SHA-256 of the TLS key (SPKI) of the service that the redeem is for. Another service can't
    /// use the redeem.
    pub service: Digest,
    /// Cluster that the agent wants to join.
    pub cluster: Uuid,
    /// Hash of the statement that the join bundle pins. A service whose chain lacks this statement
    /// gives no seat.
    pub statement: Digest,
    /// The record and its endorsement.
    pub signed: SignedRecord,
    /// Number of times that the agent has started with this key.
    pub boot: u64,
    /// Random number of this run of the agent.
    pub nonce: Nonce,
    /// Highest epoch of which the agent has signed a list or a release; 0 if none.
    pub highest_epoch: u64,
    /// Identity document of the host's cloud, if the agent is configured to request one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<IdentityDocument>,
}

/// Reason why a redeem envelope is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RedeemError {
    /// The signature, kind or form is wrong.
    #[error("the redeem: {0}")]
    Jws(#[from] JwsError),
    /// The key that signed the envelope isn't the client's key in the TLS connection.
    #[error("the redeem is signed by another key than that of the TLS connection")]
    OtherTlsKey,
    /// The envelope is meant for another service.
    #[error("the redeem is meant for another discovery service")]
    OtherService,
}

/// Reason why a host doesn't fulfil what its token requires.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostIdentityError {
    /// The redeem contains no identity document.
    #[error("the host sends no identity document of its cloud, which its token requires")]
    Missing,
    /// The identity document is refused.
    #[error("the host's identity document is refused: {0}")]
    Document(#[from] IdentityError),
    /// The host isn't one that the token is for.
    #[error("{0}")]
    Requirement(#[from] RequirementFailure),
}

impl Redeem {
    /// Checks that the host fulfils the grant's requirements at `now`, in seconds since 1970.
    /// Returns the name of its virtual machine, or `None` if the grant requires nothing. The caller
    /// must have verified the envelope, whose signature binds the identity document to the agent.
    pub fn check_identity(
        &self,
        grant: &VerifiedGrant,
        keys: &TrustedKeys,
        now: u64,
    ) -> Result<Option<String>, HostIdentityError> {
        if grant.require.is_empty() {
            return Ok(None);
        }
        let document = self.identity.as_ref().ok_or(HostIdentityError::Missing)?;
        let identity = document.verify(keys)?;
        let audience = muster_identity::audience(&self.cluster, self.signed.record.kid());
        check_any_requirement(&grant.require, &identity, &audience, now)?;
        Ok(Some(identity.instance_name()))
    }

    /// Signs the envelope with the agent's key.
    pub fn sign(&self, agent: &SigningKey) -> Jws {
        Jws::sign(JwsType::Redeem, agent, self)
    }

    /// Opens an envelope and checks its signature. `tls_key` is the key of the client's
    /// certificate, and `service` lists the SPKI hashes of this service's TLS keys. The caller must
    /// still verify the record inside.
    pub fn open(jws: &Jws, tls_key: &PublicKey, service: &[Digest]) -> Result<Self, RedeemError> {
        if *jws.kid() != tls_key.key_id() {
            return Err(RedeemError::OtherTlsKey);
        }
        let redeem: Redeem = jws.verify(JwsType::Redeem, tls_key)?;
        if redeem.signed.record.kid() != jws.kid() {
            return Err(RedeemError::OtherTlsKey);
        }
        if !service.contains(&redeem.service) {
            return Err(RedeemError::OtherService);
        }
        Ok(redeem)
    }
}

#[cfg(test)]
mod tests {
    use muster_identity::{Cloud, MAX_DOCUMENT};

    use super::*;
    use crate::fixtures::ClusterFixture;

    #[test]
    fn the_longest_identity_document_fits_beside_the_longest_record() {
        let world = ClusterFixture::new(1);
        let text = "A".repeat(MAX_DOCUMENT);
        let redeem = Redeem {
            service: Digest([1; 32]),
            cluster: world.statement.cluster,
            statement: world.chain().newest_hash(),
            signed: world.signed(0),
            boot: u64::MAX,
            nonce: Nonce::random(),
            highest_epoch: u64::MAX,
            identity: Some(IdentityDocument { cloud: Cloud::Azure, text }),
        };
        let jws = redeem.sign(&world.agents[0]);
        let rest = redeem.signed.record.as_str().len() + redeem.signed.endorsement.as_str().len();
        let longest = JwsType::Record.max_bytes() + JwsType::Endorsement.max_bytes();
        // Base64 encodes three bytes as four characters.
        let length = jws.as_str().len() + (longest - rest).div_ceil(3) * 4;
        assert!(length <= JwsType::Redeem.max_bytes(), "{length}");
        assert_eq!(jws.to_string().parse::<Jws>().unwrap(), jws);
    }
}
