//! The envelope in which an agent hands its record to one service.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::digest::{Digest, Nonce};
use crate::jws::{Jws, JwsError, Typ};
use crate::key::{PublicKey, SigningKey};
use crate::record::SignedRecord;

/// Payload of a redeem; a JWS by the agent's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Redeem {
    /// SHA-256 of the SPKI of the service that it is meant for: another one can't use it.
    pub service: Digest,
    /// The cluster.
    pub cluster: Uuid,
    /// The statement that the join bundle pins: a service whose chain lacks it gives no seat.
    pub statement: Digest,
    /// The record and its endorsement.
    pub signed: SignedRecord,
    /// How many times the agent has started with this key.
    pub boot: u64,
    /// This run of the agent.
    pub nonce: Nonce,
    /// The highest epoch that it signed or released, 0 if none.
    pub highest_epoch: u64,
}

/// Why an envelope is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RedeemError {
    /// Signature, kind or form.
    #[error("the redeem: {0}")]
    Jws(#[from] JwsError),
    /// Signed by another key than that of the TLS connection.
    #[error("the redeem is signed by another key than that of the TLS connection")]
    OtherTlsKey,
    /// Meant for another service.
    #[error("the redeem is meant for another discovery service")]
    OtherService,
}

impl Redeem {
    /// Signs it.
    pub fn sign(&self, agent: &SigningKey) -> Jws {
        Jws::sign(Typ::Redeem, agent, self)
    }

    /// Opens an envelope: `tls_key` is that of the client's certificate, `service` are the SPKI
    /// hashes that this service shows. What is inside is still to be verified.
    pub fn open(jws: &Jws, tls_key: &PublicKey, service: &[Digest]) -> Result<Self, RedeemError> {
        if *jws.kid() != tls_key.key_id() {
            return Err(RedeemError::OtherTlsKey);
        }
        let redeem: Redeem = jws.verify(Typ::Redeem, tls_key)?;
        if redeem.signed.record.kid() != jws.kid() {
            return Err(RedeemError::OtherTlsKey);
        }
        if !service.contains(&redeem.service) {
            return Err(RedeemError::OtherService);
        }
        Ok(redeem)
    }
}
