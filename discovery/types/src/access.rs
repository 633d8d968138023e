//! RFC 7523 assertions and RFC 9068 access tokens.
//!
//! Both are bound to the client's key: the assertion must come over a TLS connection whose client
//! certificate carries the key that signed it, and the access token names that key in `cnf.jkt`
//! (RFC 7638 thumbprint) and is worth nothing on a connection with another.
//!
//! They are read by the same strict JWS code as everything else, with their registered claims
//! (RFC 7519) required and compared. Their times are judged here, by the service's clock.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::digest::Nonce;
use crate::jws::{Jws, JwsError, Parties, Typ};
use crate::key::{KeyId, PublicKey, SigningKey};

/// Longest life of an assertion.
pub const MAX_ASSERTION_SECONDS: u64 = 60;
/// Longest life of an access token.
pub const MAX_ACCESS_SECONDS: u64 = 600;
/// `grant_type` of RFC 7523, section 2.1.
pub const JWT_BEARER: &str = "urn:ietf:params:oauth:grant-type:jwt-bearer";

/// Name of a discovery service as issuer and audience, from its root owner key: replicas share
/// it, and it outlives the service's own keys.
pub fn issuer(root_owner: &PublicKey) -> String {
    format!("urn:muster:discovery:{}", root_owner.key_id())
}

/// Payload of an assertion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Assertion {
    /// The client: its key's id.
    pub iss: KeyId,
    /// The same.
    pub sub: KeyId,
    /// The service, as [`issuer`] names it.
    pub aud: String,
    /// When it was made, in seconds since 1970.
    pub iat: u64,
    /// Until when, at most 60 s later.
    pub exp: u64,
    /// Its name: the service takes it once.
    pub jti: Nonce,
}

/// Whom an access token is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Subject {
    /// An admin. Roles are not in the token: they are looked up on each request.
    Admin,
    /// An agent of this cluster.
    Agent(Uuid),
}

/// RFC 7800 confirmation: the key that the bearer must have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Confirmation {
    /// RFC 7638 thumbprint of the key in the client's certificate.
    pub jkt: KeyId,
}

/// Payload of an access token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AccessToken {
    /// The service.
    pub iss: String,
    /// The same.
    pub aud: String,
    /// The client: its key's id.
    pub sub: KeyId,
    /// What the client is.
    pub subject: Subject,
    /// When it was made, in seconds since 1970.
    pub iat: u64,
    /// Until when, at most 10 min later.
    pub exp: u64,
    /// Its name.
    pub jti: Nonce,
    /// The key that it is bound to.
    pub cnf: Confirmation,
}

/// Why an assertion or access token is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AccessError {
    /// Signature, kind, form, or a key that isn't known.
    #[error("{0}")]
    Jws(#[from] JwsError),
    /// Not valid any more, or not yet.
    #[error("it is not valid at this time: it ran from {iat} to {exp}, and it is {now}")]
    Time {
        /// From.
        iat: u64,
        /// Until.
        exp: u64,
        /// The service's time.
        now: u64,
    },
    /// It claims a longer life than it may have.
    #[error("it claims a life of more than {0} seconds")]
    TooLong(u64),
    /// Bound to another key than that of the TLS connection.
    #[error("it is bound to another key than that of the TLS connection")]
    OtherTlsKey,
}

impl Assertion {
    /// Signs a new one at `now` (the service's time, seconds since 1970).
    pub fn sign(key: &SigningKey, audience: &str, now: u64) -> Jws {
        let assertion = Self {
            iss: key.key_id(),
            sub: key.key_id(),
            aud: audience.to_owned(),
            iat: now,
            exp: now + MAX_ASSERTION_SECONDS,
            jti: Nonce::random(),
        };
        Jws::sign(Typ::Assertion, key, &assertion)
    }

    /// Verifies one that came over a TLS connection with `tls_key`. Whether that key is a known
    /// admin's or agent's, and whether `jti` was used before, is the caller's to look up.
    pub fn verify(
        jws: &Jws,
        tls_key: &PublicKey,
        audience: &str,
        now: u64,
    ) -> Result<Self, AccessError> {
        if *jws.kid() != tls_key.key_id() {
            return Err(AccessError::OtherTlsKey);
        }
        let id = tls_key.key_id().to_string();
        let parties = Parties { issuer: &id, subject: Some(&id), audience };
        let assertion: Self = jws.verify_jwt(Typ::Assertion, [tls_key], parties)?;
        check_time(assertion.iat, assertion.exp, now, MAX_ASSERTION_SECONDS)?;
        Ok(assertion)
    }
}

impl AccessToken {
    /// Signs one, as the service.
    pub fn sign(&self, service: &SigningKey) -> Jws {
        Jws::sign(Typ::Access, service, self)
    }

    /// Verifies one that came over a TLS connection with `tls_key`; `service` are the signing
    /// keys that may still be in use.
    pub fn verify<'k>(
        jws: &Jws,
        service: impl IntoIterator<Item = &'k PublicKey>,
        issuer: &str,
        tls_key: &PublicKey,
        now: u64,
    ) -> Result<Self, AccessError> {
        let parties = Parties { issuer, subject: None, audience: issuer };
        let token: Self = jws.verify_jwt(Typ::Access, service, parties)?;
        if token.cnf.jkt != tls_key.key_id() || token.sub != token.cnf.jkt {
            return Err(AccessError::OtherTlsKey);
        }
        check_time(token.iat, token.exp, now, MAX_ACCESS_SECONDS)?;
        Ok(token)
    }
}

/// Both times are the service's own or were read from it, so there is next to no leeway: two
/// seconds, for the whole seconds of a `Date` header.
fn check_time(iat: u64, exp: u64, now: u64, most: u64) -> Result<(), AccessError> {
    if exp.saturating_sub(iat) > most {
        return Err(AccessError::TooLong(most));
    }
    if now >= exp || now.saturating_add(2) < iat {
        return Err(AccessError::Time { iat, exp, now });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
