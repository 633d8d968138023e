//! Signed tokens (JWT, RFC 7519). The signature proves that the token comes from a holder of the
//! key.
//!
//! A member signs a token for a user who has authenticated with a password. It has etcd's claims:
//! `username`, `revision` (of users and roles) and `exp`. Members share the key. A member that has
//! only the public key can verify tokens but not sign them. Members keep no record of signed
//! tokens, so a token ends only when it expires or when users or roles change.
//!
//! Only the configured algorithm is accepted; a token can't choose another one. A token whose
//! header names another algorithm, or none, is refused before its signature is checked. Tokens that
//! were signed elsewhere with the key are accepted too, with or without `exp`, as in etcd
//! (server/auth/jwt.go).

mod keys;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use muster_jws::{Algorithm, CompactParts, Signer, Verifier};
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use zeroize::Zeroizing;

pub use self::keys::JwtError;

/// Maximum length of a token in bytes. A longer one would not fit a request header.
const MAX_TOKEN_BYTES: usize = 16 << 10;

/// Parsed settings of `--auth-token=jwt,…`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JwtOptions {
    /// Algorithm that signs tokens (`sign-method`).
    pub method: Algorithm,
    /// File with the public key (`pub-key`).
    pub public_key: Option<PathBuf>,
    /// File with the private key (`priv-key`).
    pub private_key: Option<PathBuf>,
    /// Lifetime of a token (`ttl`).
    pub ttl: Duration,
}

/// Signs and verifies tokens, with the keys of `--auth-token`.
pub struct Jwt {
    method: Algorithm,
    ttl: Duration,
    signer: Option<Signer>,
    verifier: Verifier,
}

/// Shows the method, and leaves out the keys.
impl fmt::Debug for Jwt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Jwt").field("method", &self.method).finish_non_exhaustive()
    }
}

/// Claims of a token whose signature was verified.
#[derive(Clone, Debug, PartialEq)]
pub struct Claims {
    /// Name of the user that the token identifies.
    pub user: String,
    /// Revision of users and roles when the token was signed.
    pub revision: u64,
    /// Times between which the token is valid, in seconds since 1970; `None` for no limit.
    not_before: Option<f64>,
    expires_at: Option<f64>,
}

impl Claims {
    /// Whether the token is valid at `now`, in seconds since 1970.
    #[must_use]
    pub fn are_valid_at(&self, now: i64) -> bool {
        #[allow(clippy::cast_precision_loss, reason = "seconds since 1970 are far below 2^53")]
        let now = now as f64;
        self.expires_at.is_none_or(|until| now < until.trunc())
            && self.not_before.is_none_or(|from| now >= from.trunc())
    }
}

/// Why a token is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// The token is too long, or does not consist of three parts of unpadded base64url.
    #[error("it is no JWT")]
    Malformed,
    /// The header names another algorithm than the key's, or has a `crit` field. The extensions
    /// that such a field requires are not supported here.
    #[error("its header names another algorithm or an unsupported extension")]
    Header,
    /// The signature was not made with the key.
    #[error("its signature is wrong")]
    Signature,
    /// The token is signed, but a claim is missing or has the wrong type.
    #[error("its claims can't be read")]
    Claims,
}

#[derive(Deserialize)]
struct JwtHeader {
    alg: String,
    crit: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Payload {
    username: String,
    revision: f64,
    #[serde(default, deserialize_with = "number")]
    exp: Option<f64>,
    #[serde(default, deserialize_with = "number")]
    nbf: Option<f64>,
}

/// Deserialises an optional number. The field may be missing, but `null` is an error.
fn number<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
    f64::deserialize(from).map(Some)
}

impl Jwt {
    /// Loads the keys from their files.
    ///
    /// # Errors
    /// Fails if there is no key, or if a file can't be read. Also fails if a key does not fit the
    /// method, or if the two keys are not a pair.
    pub fn load(options: &JwtOptions) -> Result<Self, JwtError> {
        let (signer, verifier) = keys::load(options)?;
        Ok(Self { method: options.method, ttl: options.ttl, signer, verifier })
    }

    /// Returns a signed token for `user`, or `None` if there is no private key. `now` is in seconds
    /// since 1970.
    #[must_use]
    pub fn sign(&self, user: &str, revision: u64, now: i64) -> Option<Zeroizing<String>> {
        let signer = self.signer.as_ref()?;
        let until = now.saturating_add(i64::try_from(self.ttl.as_secs()).unwrap_or(i64::MAX));
        // The JSON fields and their order are those of etcd's tokens.
        let header = serde_json::json!({ "alg": self.method, "typ": "JWT" }).to_string();
        let payload = serde_json::json!({ "exp": until, "revision": revision, "username": user });
        let token = signer.sign_compact(header.as_bytes(), payload.to_string().as_bytes());
        // Signing fails only if the system can't provide random numbers.
        token.ok().map(Zeroizing::new)
    }

    /// Verifies the signature of `token` and returns its claims, without checking its validity
    /// period.
    ///
    /// # Errors
    /// Fails if the token was not signed with the key, or does not name its user.
    pub fn verify(&self, token: &str) -> Result<Claims, TokenError> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(TokenError::Malformed);
        }
        let parts = CompactParts::split(token).ok_or(TokenError::Malformed)?;
        let (Some(header), Some(payload), Some(signature)) =
            (parts.header(), parts.payload(), parts.signature())
        else {
            return Err(TokenError::Malformed);
        };
        let header: JwtHeader =
            serde_json::from_slice(&header).map_err(|_| TokenError::Malformed)?;
        if header.alg.parse() != Ok(self.method) || header.crit.is_some() {
            return Err(TokenError::Header);
        }
        if !self.verifier.is_signed(parts.signed(), &signature) {
            return Err(TokenError::Signature);
        }
        let payload: Payload = serde_json::from_slice(&payload).map_err(|_| TokenError::Claims)?;
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "what is no revision becomes the nearest number that could be one"
        )]
        let revision = payload.revision as u64;
        let (user, not_before, until) = (payload.username, payload.nbf, payload.exp);
        Ok(Claims { user, revision, not_before, expires_at: until })
    }
}

#[cfg(test)]
mod tests;
