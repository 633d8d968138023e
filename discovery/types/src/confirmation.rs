//! Confirmations of tokens. A change of the database makes earlier tokens void, because it can have
//! lost a revocation. An issuer who knows that a token was not revoked confirms the token, which is
//! then valid again.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::digest::Digest;
use crate::grant::VerifiedGrant;
use crate::jws::{Jws, JwsError, JwsType};
use crate::key::SigningKey;
use crate::statement::StatementChain;

/// Payload of a confirmation, which is a JWS by the key of an admin that may issue such tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GrantConfirmation {
    /// Cluster of the token.
    pub cluster: Uuid,
    /// Hash of the token's signed grant.
    pub grant: Digest,
    /// Time of the change of the database that made the token void, in microseconds since 1970. A
    /// later change makes the token void again.
    pub void_before_us: u64,
}

/// Reason why a confirmation is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfirmationError {
    /// The signature, kind or form is wrong, or the signer may not issue such tokens.
    #[error("the confirmation: {0}")]
    Jws(#[from] JwsError),
    /// The confirmation is for another token.
    #[error("the confirmation is for another token")]
    OtherGrant,
    /// The confirmation doesn't name the last change of the database. Either the database was
    /// changed again after the signature, or it was never changed.
    #[error("the confirmation is for another change of the database than the last one")]
    OtherChange,
}

impl GrantConfirmation {
    /// Signs the confirmation as an admin, who must be allowed to issue the token.
    pub fn sign(&self, issuer: &SigningKey) -> Jws {
        Jws::sign(JwsType::GrantConfirmation, issuer, self)
    }

    /// Verifies that an admin of the cluster's newest statement confirmed `grant`. The confirmation
    /// must name the change of the database at `void_before_us`, which made the token void. The
    /// admin must be allowed to issue tokens of the same kind as this token.
    pub fn verify(
        jws: &Jws,
        chain: &StatementChain,
        grant: &VerifiedGrant,
        void_before_us: u64,
    ) -> Result<Self, ConfirmationError> {
        let issuers = chain.newest().keys_for(grant.kind.action());
        let confirmation: Self = jws.verify_any(JwsType::GrantConfirmation, issuers)?;
        if confirmation.cluster != grant.cluster || confirmation.grant != grant.jws().hash() {
            return Err(ConfirmationError::OtherGrant);
        }
        if confirmation.void_before_us != void_before_us {
            return Err(ConfirmationError::OtherChange);
        }
        Ok(confirmation)
    }
}
