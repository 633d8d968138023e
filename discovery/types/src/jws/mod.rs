//! Compact JWS (RFC 7515) with EdDSA (RFC 8037) as the only algorithm, parsed strictly.
//!
//! The rules follow RFC 8725: one algorithm, and an explicit `typ` per kind of message. No value
//! from a header is ever used as a path, a URL or a key. A header has exactly `alg`, `typ` and
//! `kid`. A header with anything else makes the whole message invalid: `crit`, `jku`, `jwk`, `x5u`,
//! or a duplicate name. A payload is parsed into a struct that denies unknown and duplicate fields.
//!
//! Some kinds of payload have a version. The version is parsed before the rest of the payload. So a
//! newer payload is refused because of its version, and not because of its first unknown field.
//!
//! After these checks, `muster-jws` verifies signatures and claims.

mod jwt;
mod typ;

use std::fmt;
use std::str::FromStr;

use muster_jws::CompactParts;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};

pub use jwt::Parties;
pub use typ::JwsType;

use crate::digest::Digest;
use crate::key::{KeyId, PublicKey, SigningKey};
use crate::strict;
use crate::text::wire_text;

/// Longest JWS of any kind, in bytes. A longer text is refused before it is parsed.
pub const MAX_JWS: usize = 96 * 1024;

/// Reason why a JWS was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JwsError {
    /// The message is longer than its kind may be.
    #[error("the signed message is longer than {limit} bytes")]
    TooLong {
        /// The limit in bytes.
        limit: usize,
    },
    /// The text is not three parts of unpadded base64url.
    #[error("not a compact JWS: three parts of unpadded base64url, joined by dots")]
    Malformed,
    /// The header is not exactly `alg`, `typ`, `kid`.
    #[error("the header is refused: {0}")]
    Header(String),
    /// The message is of another kind than the caller expects.
    #[error("expected a {expected}, got a {found}")]
    WrongType {
        /// Kind of message that is expected here.
        expected: JwsType,
        /// Kind of message that was found.
        found: JwsType,
    },
    /// No key with this id may sign the message.
    #[error("signed by key {0}, which may not sign this")]
    UnknownKey(KeyId),
    /// The signature does not verify.
    #[error("the signature is not valid")]
    BadSignature,
    /// The JWT names another issuer, subject or audience than expected.
    #[error("its issuer, subject or audience is not the one expected")]
    Parties,
    /// A newer program made the message. This program can't read its version.
    #[error("made by a newer Muster (version {found}); this program knows {known}: upgrade it")]
    Newer {
        /// Version of the payload.
        found: u32,
        /// Newest version that this program reads.
        known: u32,
    },
    /// The payload doesn't have the form of its kind.
    #[error("the payload is refused: {0}")]
    Payload(String),
}

/// A compact JWS of strictly checked syntax. **Not verified** until [`Jws::verify`] succeeds.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Jws {
    text: String,
    typ: JwsType,
    kid: KeyId,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct JoseHeader {
    /// Algorithm of the signature. It isn't used, but parsing it refuses any other algorithm.
    #[serde(rename = "alg")]
    _algorithm: Algorithm,
    typ: JwsType,
    kid: KeyId,
}

#[derive(Deserialize)]
enum Algorithm {
    #[serde(rename = "EdDSA")]
    EdDsa,
}

impl Jws {
    /// Signs `payload` as a message of kind `typ`.
    pub fn sign<T: Serialize>(typ: JwsType, key: &SigningKey, payload: &T) -> Self {
        Self { text: jwt::encode(typ, key, payload), typ, kid: key.key_id() }
    }

    /// Returns the kind of message that the unverified header claims.
    pub fn typ(&self) -> JwsType {
        self.typ
    }

    /// Returns the key id that the unverified header claims. Use it to look up the key among the
    /// allowed ones.
    pub fn kid(&self) -> &KeyId {
        &self.kid
    }

    /// Returns the bytes as received.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns the SHA-256 of the received bytes, which identifies the message.
    pub fn hash(&self) -> Digest {
        Digest::of(self.text.as_bytes())
    }

    /// Verifies kind, key and signature, and then parses the payload.
    pub fn verify<T: DeserializeOwned>(
        &self,
        typ: JwsType,
        key: &PublicKey,
    ) -> Result<T, JwsError> {
        self.verify_by(typ, [key], None)
    }

    /// Works as [`Jws::verify`], with the key looked up among `allowed` by the header's `kid`.
    pub fn verify_any<'k, T: DeserializeOwned>(
        &self,
        typ: JwsType,
        allowed: impl IntoIterator<Item = &'k PublicKey>,
    ) -> Result<T, JwsError> {
        self.verify_by(typ, allowed, None)
    }

    /// Verifies a JWT as [`Jws::verify_any`] does. Its `iss`, `sub` and `aud` must be those of
    /// `parties`. It must have an `exp`, which the caller has to check.
    pub fn verify_jwt<'k, T: DeserializeOwned>(
        &self,
        typ: JwsType,
        allowed: impl IntoIterator<Item = &'k PublicKey>,
        parties: Parties<'_>,
    ) -> Result<T, JwsError> {
        self.verify_by(typ, allowed, Some(parties))
    }

    /// Verifies a text as [`Jws::verify_any`] does, and parses only those fields of the payload
    /// that `T` has. The payload may have a newer version, or be longer, than this program
    /// otherwise accepts.
    pub fn verify_any_version<'k, T: DeserializeOwned>(
        text: &str,
        typ: JwsType,
        allowed: impl IntoIterator<Item = &'k PublicKey>,
    ) -> Option<T> {
        let jws = Self::parse(text, |_| MAX_JWS).ok()?;
        match jws.verify_any::<IgnoredAny>(typ, allowed) {
            Ok(IgnoredAny) | Err(JwsError::Newer { .. }) => {
                strict::from_slice(&jws.payload().ok()?).ok()
            }
            Err(_) => None,
        }
    }

    fn verify_by<'k, T: DeserializeOwned>(
        &self,
        typ: JwsType,
        allowed: impl IntoIterator<Item = &'k PublicKey>,
        parties: Option<Parties<'_>>,
    ) -> Result<T, JwsError> {
        self.expect(typ)?;
        let key = allowed
            .into_iter()
            .find(|key| key.key_id() == self.kid)
            .ok_or(JwsError::UnknownKey(self.kid))?;
        let read = jwt::decode(&self.text, key, parties);
        match read {
            // The payload is parsed only after the signature was verified. So the signature is
            // valid if the payload was parsed, and also if only the payload's form is wrong.
            Ok(_) | Err(JwsError::Payload(_)) => self.check_version(&self.payload()?).and(read),
            Err(_) => read,
        }
    }

    /// Returns the payload without verifying it. Use it to look up the keys for the verification.
    /// **Proves nothing.**
    pub fn claims_unverified<T: DeserializeOwned>(&self, typ: JwsType) -> Result<T, JwsError> {
        self.expect(typ)?;
        let payload = self.payload()?;
        self.check_version(&payload)?;
        strict::from_slice(&payload).map_err(|error| JwsError::Payload(error.to_string()))
    }

    fn payload(&self) -> Result<Vec<u8>, JwsError> {
        let parts = CompactParts::split(&self.text).ok_or(JwsError::Malformed)?;
        parts.payload().ok_or(JwsError::Malformed)
    }

    /// Refuses a payload of a version that this program doesn't know. A payload without a readable
    /// version passes here, because parsing the whole payload will refuse it.
    fn check_version(&self, payload: &[u8]) -> Result<(), JwsError> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let Some(known) = self.typ.version() else { return Ok(()) };
        match strict::from_slice(payload) {
            Ok(Versioned { version: 0 }) => Err(JwsError::Payload("its version is 0".into())),
            Ok(Versioned { version: found }) if found > known => {
                Err(JwsError::Newer { found, known })
            }
            Ok(_) | Err(_) => Ok(()),
        }
    }

    fn expect(&self, typ: JwsType) -> Result<(), JwsError> {
        if self.typ == typ {
            Ok(())
        } else {
            Err(JwsError::WrongType { expected: typ, found: self.typ })
        }
    }
}

/// Returns the [`JwsError::Newer`] among `error` and its causes. There is one if a newer program
/// made a signed message.
pub fn newer_version<'e>(error: &'e (dyn std::error::Error + 'static)) -> Option<&'e JwsError> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(newer @ JwsError::Newer { .. }) = error.downcast_ref() {
            return Some(newer);
        }
        next = error.source();
    }
    None
}

impl FromStr for Jws {
    type Err = JwsError;

    fn from_str(text: &str) -> Result<Self, JwsError> {
        Self::parse(text, JwsType::max_bytes)
    }
}

impl Jws {
    /// Parses a text of at most [`MAX_JWS`] bytes. `limit` gives the maximum length for the kind of
    /// message.
    fn parse(text: &str, limit: impl Fn(JwsType) -> usize) -> Result<Self, JwsError> {
        if text.len() > MAX_JWS {
            return Err(JwsError::TooLong { limit: MAX_JWS });
        }
        let parts = CompactParts::split(text).ok_or(JwsError::Malformed)?;
        let header = parts.header().ok_or(JwsError::Malformed)?;
        let header: JoseHeader =
            strict::from_slice(&header).map_err(|error| JwsError::Header(error.to_string()))?;
        let limit = limit(header.typ);
        if text.len() > limit {
            return Err(JwsError::TooLong { limit });
        }
        let is_filled = parts.payload().is_some_and(|payload| !payload.is_empty());
        if !is_filled || parts.signature().is_none_or(|signature| signature.len() != 64) {
            return Err(JwsError::Malformed);
        }
        Ok(Self { text: text.to_owned(), typ: header.typ, kid: header.kid })
    }
}

impl fmt::Display for Jws {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Shows only kind and hash: an access token is also a JWS, and must not appear in a log.
impl fmt::Debug for Jws {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Jws({}, {})", self.typ, self.hash())
    }
}

wire_text!(Jws, r"^[\w-]+\.[\w-]+\.[\w-]+$");

#[cfg(test)]
mod tests;
