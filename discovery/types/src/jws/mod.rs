//! Compact JWS (RFC 7515) with EdDSA (RFC 8037) and no other algorithm, read strictly.
//!
//! The rules follow RFC 8725: one algorithm, and an explicit `typ` per kind of message. Nothing in
//! a header is ever used as a path, a URL or a key. A header has exactly `alg`, `typ` and `kid`.
//! With anything else (`crit`, `jku`, `jwk`, `x5u`, a member twice) the whole message is refused. A
//! payload is read into a struct that denies unknown and duplicate members.
//!
//! Some kinds of payload have a version. It is read before anything else in the payload, so that a
//! newer one is refused by its version and not by the first member that is unknown here.
//!
//! Behind these rules, `muster-jws` makes and checks signatures and claims.

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

/// Longest JWS of any kind, in bytes; a longer one is not even parsed.
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
    /// A signed message of another kind than the one expected here.
    #[error("expected a {expected}, got a {found}")]
    WrongType {
        /// Kind of message that is expected here.
        expected: JwsType,
        /// Kind of message that was found.
        found: JwsType,
    },
    /// The message is signed by a key that may not sign it.
    #[error("signed by key {0}, which may not sign this")]
    UnknownKey(KeyId),
    /// The signature does not verify.
    #[error("the signature is not valid")]
    BadSignature,
    /// The JWT names another issuer, subject or audience than expected.
    #[error("its issuer, subject or audience is not the one expected")]
    Parties,
    /// A newer program made the message, and this one can't read it.
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
    /// Algorithm of the signature, read so that no other one passes.
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

    /// Returns the kind of message that the header claims.
    pub fn typ(&self) -> JwsType {
        self.typ
    }

    /// Returns the id of the key that the header claims, to be looked up in a list of allowed keys.
    pub fn kid(&self) -> &KeyId {
        &self.kid
    }

    /// Returns the bytes as received.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns the SHA-256 of the received bytes: the message's identity.
    pub fn hash(&self) -> Digest {
        Digest::of(self.text.as_bytes())
    }

    /// Checks kind, key and signature, then reads the payload.
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

    /// Works as [`Jws::verify_any`], for a JWT. Its `iss`, `sub` and `aud` must be those of
    /// `parties`, and there must be an `exp`, which the caller judges.
    pub fn verify_jwt<'k, T: DeserializeOwned>(
        &self,
        typ: JwsType,
        allowed: impl IntoIterator<Item = &'k PublicKey>,
        parties: Parties<'_>,
    ) -> Result<T, JwsError> {
        self.verify_by(typ, allowed, Some(parties))
    }

    /// Whether one of `allowed` has signed `text` as a message of kind `typ`. The payload may be of a
    /// newer version, and longer than this program reads.
    pub fn is_signed<'k>(
        text: &str,
        typ: JwsType,
        allowed: impl IntoIterator<Item = &'k PublicKey>,
    ) -> bool {
        let Ok(jws) = Self::parse(text, |_| MAX_JWS) else { return false };
        matches!(
            jws.verify_any::<IgnoredAny>(typ, allowed),
            Ok(IgnoredAny) | Err(JwsError::Newer { .. })
        )
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
            // The payload is read only after the signature has been found valid.
            Ok(_) | Err(JwsError::Payload(_)) => self.check_version(&self.payload()?).and(read),
            Err(_) => read,
        }
    }

    /// Returns the payload as claimed, for looking up what it must be verified with. **Proves
    /// nothing.**
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

    /// Refuses a payload of a version that this program doesn't know. A payload in which no version
    /// is found passes: whoever reads all of it will refuse it.
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

/// Returns the version error among `error` and its causes, if the reason is that a newer program
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
    /// Parses a text of at most [`MAX_JWS`] bytes, and of at most `limit` for its kind.
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

/// Shows kind and hash only: an access token is a JWS too, and must not end in a log.
impl fmt::Debug for Jws {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Jws({}, {})", self.typ, self.hash())
    }
}

wire_text!(Jws, r"^[\w-]+\.[\w-]+\.[\w-]+$");

#[cfg(test)]
mod tests;
