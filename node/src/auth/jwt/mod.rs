//! Signed tokens (RFC 7519): what they say is believed because whoever has the key has signed it.
//!
//! A member signs one for who has said a password, with etcd's claims: `username`, `revision` (of users and
//! roles) and `exp`. Members share the key; one that has its public half alone can check and not sign.
//! Nothing is remembered of a token, so that nothing ends it but its time and the next change of users and
//! roles.
//!
//! The key decides the one algorithm that is taken, never the token: what names another, or none, is
//! refused before its signature is looked at. A token that was signed somewhere else counts alike, with or
//! without `exp`, as in etcd (server/auth/jwt.go).

mod keys;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use data_encoding::BASE64URL_NOPAD;
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use zeroize::Zeroizing;

pub use self::keys::{JwtError, Method};
use self::keys::{Signer, Verifier};

/// Bytes of a token; nobody could send a longer one in a header.
const MAX_TOKEN_BYTES: usize = 16 << 10;

/// What `--auth-token=jwt,…` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JwtOptions {
    /// `sign-method`
    pub method: Method,
    /// `pub-key`
    pub public_key: Option<PathBuf>,
    /// `priv-key`
    pub private_key: Option<PathBuf>,
    /// `ttl`
    pub ttl: Duration,
}

/// Signs and checks tokens.
pub struct Jwt {
    method: Method,
    ttl: Duration,
    signer: Option<Signer>,
    verifier: Verifier,
}

/// Not the keys.
impl fmt::Debug for Jwt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Jwt").field("method", &self.method).finish_non_exhaustive()
    }
}

/// What a token says, once its signature was checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Claims {
    /// Whose it is.
    pub user: String,
    /// By which revision of users and roles.
    pub revision: u64,
    /// From when on it counts, and until when, as seconds since 1970.
    not_before: Option<f64>,
    until: Option<f64>,
}

impl Claims {
    /// Whether the token counts at `now`, in seconds since 1970.
    #[must_use]
    pub fn hold_at(&self, now: i64) -> bool {
        #[allow(clippy::cast_precision_loss, reason = "seconds since 1970 are far below 2^53")]
        let now = now as f64;
        self.until.is_none_or(|until| now < until.trunc())
            && self.not_before.is_none_or(|from| now >= from.trunc())
    }
}

/// Why a token says nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// Not three parts of unpadded base64url, or too long.
    #[error("it is no JWT")]
    Malformed,
    /// Another algorithm than the key's, or something that must be understood and isn't.
    #[error("its header asks for what is not done here")]
    Header,
    /// Nobody who has the key has signed this.
    #[error("its signature is wrong")]
    Signature,
    /// Signed, but a claim is missing or of another type.
    #[error("its claims can't be read")]
    Claims,
}

#[derive(Deserialize)]
struct Header {
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

/// A number: one that is there and null is none.
fn number<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
    f64::deserialize(from).map(Some)
}

impl Jwt {
    /// Reads the keys.
    ///
    /// # Errors
    /// If there is none, one can't be read, one is of another kind than the method, or the two don't
    /// belong together.
    pub fn load(options: &JwtOptions) -> Result<Self, JwtError> {
        let (signer, verifier) = keys::load(options)?;
        Ok(Self { method: options.method, ttl: options.ttl, signer, verifier })
    }

    /// A token for `user`; `None` where there is only a public key.
    #[must_use]
    pub fn sign(&self, user: &str, revision: u64, now: i64) -> Option<Zeroizing<String>> {
        let signer = self.signer.as_ref()?;
        let until = now.saturating_add(i64::try_from(self.ttl.as_secs()).unwrap_or(i64::MAX));
        let header = serde_json::json!({ "alg": self.method.name(), "typ": "JWT" });
        let payload = serde_json::json!({ "username": user, "revision": revision, "exp": until });
        let encode = |part: &serde_json::Value| BASE64URL_NOPAD.encode(part.to_string().as_bytes());
        let mut token = Zeroizing::new(format!("{}.{}", encode(&header), encode(&payload)));
        let signature = signer.sign(token.as_bytes())?;
        token.push('.');
        token.push_str(&BASE64URL_NOPAD.encode(&signature));
        Some(token)
    }

    /// What `token` says, whenever it counts.
    ///
    /// # Errors
    /// If it was not signed with the key, or doesn't say who its user is.
    pub fn read(&self, token: &str) -> Result<Claims, TokenError> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(TokenError::Malformed);
        }
        let (signed, signature) = token.rsplit_once('.').ok_or(TokenError::Malformed)?;
        let (header, payload) = signed.split_once('.').ok_or(TokenError::Malformed)?;
        let decode =
            |part: &str| BASE64URL_NOPAD.decode(part.as_bytes()).map_err(|_| TokenError::Malformed);
        let (header, payload, signature) = (decode(header)?, decode(payload)?, decode(signature)?);
        let header: Header = serde_json::from_slice(&header).map_err(|_| TokenError::Malformed)?;
        if header.alg != self.method.name() || header.crit.is_some() {
            return Err(TokenError::Header);
        }
        if !self.verifier.verify(signed.as_bytes(), &signature) {
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
        Ok(Claims { user, revision, not_before, until })
    }
}

#[cfg(test)]
mod tests;
