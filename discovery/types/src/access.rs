//! RFC 7523 assertions and RFC 9068 access tokens.
//!
//! Both are bound to the client's key. An assertion must come over a TLS connection whose client
//! certificate carries the key that signed it. An access token names that key in `cnf.jkt` (RFC
//! 7638 thumbprint), and is refused on a connection with another key.
//!
//! The strict JWS code for all signed messages parses assertions and access tokens. It requires and
//! compares their registered claims (RFC 7519). This module judges their times, by the service's
//! clock.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::digest::Nonce;
use crate::jws::{Jws, JwsError, JwsType, Parties};
use crate::key::{KeyId, PublicKey, SigningKey};

/// Longest lifetime of an assertion, in seconds.
pub const MAX_ASSERTION_SECONDS: u64 = 60;
/// Longest lifetime of an access token, in seconds.
pub const MAX_ACCESS_SECONDS: u64 = 600;
/// `grant_type` of RFC 7523, section 2.1.
pub const JWT_BEARER: &str = "urn:ietf:params:oauth:grant-type:jwt-bearer";

/// Returns the name of a discovery service as issuer and audience. The name is made from the root
/// owner key. So replicas share it, and it stays the same when the service's own keys change.
pub fn issuer(root_owner: &PublicKey) -> String {
    format!("urn:muster:discovery:{}", root_owner.key_id())
}

/// Payload of an assertion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Assertion {
    /// Issuer: the id of the client's key.
    pub iss: KeyId,
    /// Subject: the id of the client's key, equal to `iss`.
    pub sub: KeyId,
    /// Audience: the name of the service, as [`issuer`] makes it.
    pub aud: String,
    /// Time at which the assertion was made, in seconds since 1970.
    pub iat: u64,
    /// Time at which the assertion expires, in seconds since 1970: at most 60 s after `iat`.
    pub exp: u64,
    /// Random id of the assertion: the service accepts each id only once.
    pub jti: Nonce,
}

/// Kind of client that an access token is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ClientKind {
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
    /// Issuer: the name of the service, as [`issuer`] makes it.
    pub iss: String,
    /// Audience: the name of the service, equal to `iss`.
    pub aud: String,
    /// Subject: the id of the client's key.
    pub sub: KeyId,
    /// Kind of client that the token is for.
    pub subject: ClientKind,
    /// Time at which the token was made, in seconds since 1970.
    pub iat: u64,
    /// Time at which the token expires, in seconds since 1970: at most 10 min after `iat`.
    pub exp: u64,
    /// Random id of the token.
    pub jti: Nonce,
    /// Key that the token is bound to.
    pub cnf: Confirmation,
}

/// Reason why an assertion or access token is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AccessError {
    /// The signature, kind or form is wrong, or the signing key isn't known.
    #[error("{0}")]
    Jws(#[from] JwsError),
    /// The assertion or token is not valid any more, or not yet.
    #[error("it is not valid at this time: it ran from {iat} to {exp}, and it is {now}")]
    Time {
        /// Start of the validity, in seconds since 1970.
        iat: u64,
        /// End of the validity, in seconds since 1970.
        exp: u64,
        /// Time by the service's clock, in seconds since 1970.
        now: u64,
    },
    /// The lifetime is longer than allowed; holds the limit in seconds.
    #[error("it claims a life of more than {0} seconds")]
    TooLong(u64),
    /// The assertion or token is bound to another key than that of the TLS connection.
    #[error("it is bound to another key than that of the TLS connection")]
    OtherTlsKey,
}

impl Assertion {
    /// Signs a new assertion at `now` (the service's time, in seconds since 1970).
    pub fn sign(key: &SigningKey, audience: &str, now: u64) -> Jws {
        let assertion = Self {
            iss: key.key_id(),
            sub: key.key_id(),
            aud: audience.to_owned(),
            iat: now,
            exp: now + MAX_ASSERTION_SECONDS,
            jti: Nonce::random(),
        };
        Jws::sign(JwsType::Assertion, key, &assertion)
    }

    /// Verifies an assertion that came over a TLS connection with the client key `tls_key`. The
    /// caller must check that this key belongs to a known admin or agent, and that `jti` wasn't
    /// used before.
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
        let assertion: Self = jws.verify_jwt(JwsType::Assertion, [tls_key], parties)?;
        check_time(assertion.iat, assertion.exp, now, MAX_ASSERTION_SECONDS)?;
        Ok(assertion)
    }
}

impl AccessToken {
    /// Signs the token with a key of the service.
    pub fn sign(&self, service: &SigningKey) -> Jws {
        Jws::sign(JwsType::Access, service, self)
    }

    /// Verifies an access token that came over a TLS connection with the client key `tls_key`. The
    /// token must be signed by one of the keys in `service`, the service's signing keys.
    pub fn verify<'k>(
        jws: &Jws,
        service: impl IntoIterator<Item = &'k PublicKey>,
        issuer: &str,
        tls_key: &PublicKey,
        now: u64,
    ) -> Result<Self, AccessError> {
        let parties = Parties { issuer, subject: None, audience: issuer };
        let token: Self = jws.verify_jwt(JwsType::Access, service, parties)?;
        token.check_again(tls_key, now)?;
        Ok(token)
    }

    /// Checks the key and the times of a token that [`AccessToken::verify`] has verified before.
    pub fn check_again(&self, tls_key: &PublicKey, now: u64) -> Result<(), AccessError> {
        if self.cnf.jkt != tls_key.key_id() || self.sub != self.cnf.jkt {
            return Err(AccessError::OtherTlsKey);
        }
        check_time(self.iat, self.exp, now, MAX_ACCESS_SECONDS)
    }
}

/// Checks lifetime and validity. A token may begin at most two seconds after `now`. The client
/// takes its times from the service's `Date` header, which has whole seconds, so more leeway isn't
/// needed.
fn check_time(iat: u64, exp: u64, now: u64, max_seconds: u64) -> Result<(), AccessError> {
    if exp.saturating_sub(iat) > max_seconds {
        return Err(AccessError::TooLong(max_seconds));
    }
    if now >= exp || now.saturating_add(2) < iat {
        return Err(AccessError::Time { iat, exp, now });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
