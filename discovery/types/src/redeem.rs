//! Redeem envelopes, in which an agent hands its record to one service.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::digest::{Digest, Nonce};
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
    /// Highest epoch that the agent has signed or released, 0 if none.
    pub highest_epoch: u64,
}

/// Reason why a redeem envelope is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RedeemError {
    /// The signature, kind or form is wrong.
    #[error("the redeem: {0}")]
    Jws(#[from] JwsError),
    /// The envelope is signed by another key than that of the TLS connection.
    #[error("the redeem is signed by another key than that of the TLS connection")]
    OtherTlsKey,
    /// The envelope is meant for another service.
    #[error("the redeem is meant for another discovery service")]
    OtherService,
}

impl Redeem {
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
