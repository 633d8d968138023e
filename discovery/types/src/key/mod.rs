//! Ed25519 keys, and their ids and text forms.

mod file;
mod paper;

use std::fmt;
use std::str::FromStr;

use data_encoding::BASE64URL_NOPAD;
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};
use secrecy::{ExposeSecret, SecretBox};

pub use file::KeyFileError;
pub use paper::{PAPER_PREFIX, PaperKeyError};

use crate::digest::{Digest, random};
use crate::text::wire_text;

/// Prefix of a public key's text. It shows a reader that the base64 text after it is a key.
const PUBLIC_PREFIX: &str = "ed25519:";
/// DER before the 32 bytes of an Ed25519 SubjectPublicKeyInfo (RFC 8410, section 4).
const SPKI_PREFIX: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 3, 0x21, 0];
/// DER before the 32 bytes of an Ed25519 private key (RFC 8410, section 7).
const PKCS8_PREFIX: [u8; 16] =
    [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];

/// Reason why a text or DER value isn't an accepted Ed25519 key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The text is not `ed25519:` and 43 characters.
    #[error("a public key reads `ed25519:` and 43 characters of base64url")]
    PublicText,
    /// The key is of another type than Ed25519, or the DER is no SubjectPublicKeyInfo.
    #[error("the key is not an Ed25519 key")]
    NotEd25519,
    /// The point isn't encoded as RFC 8032 requires, or is one of the eight points of small order.
    /// Anybody can make valid signatures for a point of small order, without a private key.
    #[error("the key is not a proper Ed25519 key: make a new one")]
    Weak,
    /// The text is not 43 characters of base64url.
    #[error("a key id has 43 characters of base64url")]
    KeyId,
}

/// Error for an invalid signature. It gives no reason, so that an attacker learns nothing from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the signature is not valid")]
pub struct BadSignature;

/// An Ed25519 public key, written `ed25519:` and base64url.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PublicKey([u8; 32]);

/// Id of a key: the RFC 7638 thumbprint (base64url of SHA-256) of its RFC 8037 JWK.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyId([u8; 32]);

impl PublicKey {
    /// Makes a key from the 32 bytes of RFC 8032, without a check. Use it only for a key that was
    /// checked before. For bytes from outside, use [`PublicKey::try_from`].
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Returns the 32 bytes of RFC 8032.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Reads a key from a DER SubjectPublicKeyInfo.
    pub fn from_spki_der(der: &[u8]) -> Result<Self, KeyError> {
        let raw = der.strip_prefix(&SPKI_PREFIX).ok_or(KeyError::NotEd25519)?;
        let raw: [u8; 32] = raw.try_into().map_err(|_| KeyError::NotEd25519)?;
        raw.try_into()
    }

    /// Returns the DER SubjectPublicKeyInfo.
    pub fn spki_der(&self) -> Vec<u8> {
        [&SPKI_PREFIX[..], &self.0].concat()
    }

    /// Returns the field `x` of the key's RFC 8037 JWK.
    pub fn jwk_x(&self) -> String {
        BASE64URL_NOPAD.encode(&self.0)
    }

    /// Returns the key's id, its JWK thumbprint.
    pub fn key_id(&self) -> KeyId {
        // RFC 7638 hashes only the required fields of a JWK, in lexicographic order, without white
        // space.
        let jwk = format!(r#"{{"crv":"Ed25519","kty":"OKP","x":"{}"}}"#, self.jwk_x());
        KeyId(Digest::of(jwk.as_bytes()).0)
    }

    /// Verifies `signature` over `message`.
    pub fn verify(&self, message: &[u8], signature: &[u8]) -> Result<(), BadSignature> {
        UnparsedPublicKey::new(&ED25519, &self.0)
            .verify(message, signature)
            .map_err(|_| BadSignature)
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PUBLIC_PREFIX}{}", self.jwk_x())
    }
}

impl FromStr for PublicKey {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        let text = text.strip_prefix(PUBLIC_PREFIX).ok_or(KeyError::PublicText)?;
        decode32(text).ok_or(KeyError::PublicText)?.try_into()
    }
}

/// The y coordinates of the eight points of small order, little endian, without the sign bit of x.
/// They are 0, 1, −1 and two coordinates of order eight. A signature by such a key can verify over
/// any message.
const SMALL_ORDER: [[u8; 32]; 5] = [
    [0; 32],
    {
        let mut one = [0; 32];
        one[0] = 1;
        one
    },
    {
        let mut minus_one = PRIME;
        minus_one[0] -= 1;
        minus_one
    },
    [
        0x26, 0xe8, 0x95, 0x8f, 0xc2, 0xb2, 0x27, 0xb0, 0x45, 0xc3, 0xf4, 0x89, 0xf2, 0xef, 0x98,
        0xf0, 0xd5, 0xdf, 0xac, 0x05, 0xd3, 0xc6, 0x33, 0x39, 0xb1, 0x38, 0x02, 0x88, 0x6d, 0x53,
        0xfc, 0x05,
    ],
    [
        0xc7, 0x17, 0x6a, 0x70, 0x3d, 0x4d, 0xd8, 0x4f, 0xba, 0x3c, 0x0b, 0x76, 0x0d, 0x10, 0x67,
        0x0f, 0x2a, 0x20, 0x53, 0xfa, 0x2c, 0x39, 0xcc, 0xc6, 0x4e, 0xc7, 0xfd, 0x77, 0x92, 0xac,
        0x03, 0x7a,
    ],
];

/// 2^255 − 19, little endian.
const PRIME: [u8; 32] = {
    let mut prime = [0xff; 32];
    prime[0] = 0xed;
    prime[31] = 0x7f;
    prime
};

impl TryFrom<[u8; 32]> for PublicKey {
    type Error = KeyError;

    /// Accepts only the canonical encoding of a point (RFC 8032, section 5.1.3). Otherwise one key
    /// could have two texts, and so two ids. Points of small order are refused, too.
    fn try_from(bytes: [u8; 32]) -> Result<Self, KeyError> {
        let mut y = bytes;
        y[31] &= 0x7f;
        let canonical = y.iter().rev().lt(PRIME.iter().rev());
        if !canonical || SMALL_ORDER.contains(&y) {
            return Err(KeyError::Weak);
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&BASE64URL_NOPAD.encode(&self.0))
    }
}

impl FromStr for KeyId {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        decode32(text).map(Self).ok_or(KeyError::KeyId)
    }
}

wire_text!(PublicKey, "^ed25519:[A-Za-z0-9_-]{43}$");
wire_text!(KeyId, "^[A-Za-z0-9_-]{43}$");

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

fn decode32(text: &str) -> Option<[u8; 32]> {
    BASE64URL_NOPAD.decode(text.as_bytes()).ok()?.try_into().ok()
}

/// An Ed25519 private key.
pub struct SigningKey {
    pair: Ed25519KeyPair,
    seed: SecretBox<[u8; 32]>,
    public: PublicKey,
}

impl SigningKey {
    /// Generates a new random key.
    pub fn generate() -> Self {
        let mut seed = random();
        let key = Self::from_seed(&seed);
        zeroize::Zeroize::zeroize(&mut seed);
        key
    }

    /// Makes the key of a 32-byte seed (RFC 8032's private key).
    pub fn from_seed(seed: &[u8; 32]) -> Self {
        let pair = Ed25519KeyPair::from_seed_unchecked(seed).expect("a seed has 32 bytes");
        let mut public = [0; 32];
        public.copy_from_slice(pair.public_key().as_ref());
        Self { pair, seed: SecretBox::new(Box::new(*seed)), public: PublicKey(public) }
    }

    /// Reads DER PKCS#8, version 1, as `openssl genpkey -algorithm ed25519` writes it.
    pub fn from_pkcs8_der(der: &[u8]) -> Result<Self, KeyError> {
        let seed = der.strip_prefix(&PKCS8_PREFIX).ok_or(KeyError::NotEd25519)?;
        Ok(Self::from_seed(seed.try_into().map_err(|_| KeyError::NotEd25519)?))
    }

    /// Returns DER PKCS#8, version 1.
    pub fn pkcs8_der(&self) -> zeroize::Zeroizing<Vec<u8>> {
        zeroize::Zeroizing::new([&PKCS8_PREFIX[..], self.seed.expose_secret()].concat())
    }

    /// Returns the seed, from which a token's text is made. Other code must not use it.
    pub fn seed(&self) -> &SecretBox<[u8; 32]> {
        &self.seed
    }

    /// Returns the public key of this private key.
    pub fn public(&self) -> &PublicKey {
        &self.public
    }

    /// Returns the id of the public key.
    pub fn key_id(&self) -> KeyId {
        self.public.key_id()
    }

    /// Signs `message` with Ed25519.
    pub fn sign(&self, message: &[u8]) -> [u8; 64] {
        let mut signature = [0; 64];
        signature.copy_from_slice(self.pair.sign(message).as_ref());
        signature
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SigningKey({})", self.public.key_id())
    }
}

#[cfg(test)]
mod tests {
    use data_encoding::HEXLOWER;

    use super::*;

    /// Test vectors of RFC 8037, appendices A.1 and A.3.
    #[test]
    fn key_id_is_the_thumbprint_of_rfc_8037() {
        let seed = HEXLOWER
            .decode(b"9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
            .unwrap();
        let key = SigningKey::from_seed(&seed.try_into().unwrap());
        assert_eq!(key.public().jwk_x(), "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo");
        assert_eq!(key.key_id().to_string(), "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k");
    }

    #[test]
    fn keys_survive_text_and_der() {
        let key = SigningKey::generate();
        assert_eq!(key.public().to_string().parse(), Ok(*key.public()));
        assert_eq!(PublicKey::from_spki_der(&key.public().spki_der()), Ok(*key.public()));
        let again = SigningKey::from_pkcs8_der(&key.pkcs8_der()).unwrap();
        assert_eq!(again.public(), key.public());
        assert_eq!(key.key_id().to_string().parse(), Ok(key.key_id()));
    }

    /// The key is the neutral element. With R as the neutral element and S as zero, one signature
    /// verifies over every message.
    #[test]
    fn a_key_that_verifies_every_message_is_refused() {
        let mut neutral = [0; 32];
        neutral[0] = 1;
        let signature = [&neutral[..], &[0; 32]].concat();
        assert_eq!(PublicKey::from_bytes(neutral).verify(b"anything", &signature), Ok(()));
        for mut point in SMALL_ORDER {
            for sign in [0, 0x80] {
                point[31] = point[31] & 0x7f | sign;
                assert_eq!(PublicKey::try_from(point), Err(KeyError::Weak));
                let text = format!("{PUBLIC_PREFIX}{}", BASE64URL_NOPAD.encode(&point));
                assert_eq!(text.parse::<PublicKey>(), Err(KeyError::Weak));
                let der = [&SPKI_PREFIX[..], &point].concat();
                assert_eq!(PublicKey::from_spki_der(&der), Err(KeyError::Weak));
            }
        }
    }

    #[test]
    fn only_one_encoding_of_a_point_is_accepted() {
        // y = 3 and y = p + 3 encode the same point.
        let (mut once, mut again) = ([0; 32], PRIME);
        once[0] = 3;
        again[0] += 3;
        assert!(PublicKey::try_from(once).is_ok());
        assert_eq!(PublicKey::try_from(again), Err(KeyError::Weak));
        assert_eq!(PublicKey::try_from(PRIME), Err(KeyError::Weak));
        assert_eq!(PublicKey::try_from([0xff; 32]), Err(KeyError::Weak));
    }

    #[test]
    fn a_signature_is_valid_for_one_message_and_one_key_only() {
        let (key, other) = (SigningKey::generate(), SigningKey::generate());
        let signature = key.sign(b"message");
        assert_eq!(key.public().verify(b"message", &signature), Ok(()));
        assert_eq!(key.public().verify(b"massage", &signature), Err(BadSignature));
        assert_eq!(other.public().verify(b"message", &signature), Err(BadSignature));
        assert_eq!(key.public().verify(b"message", &signature[..63]), Err(BadSignature));
    }

    #[test]
    fn debug_shows_no_secret() {
        let key = SigningKey::from_seed(&[7; 32]);
        let shown = format!("{key:?}");
        assert_eq!(shown, format!("SigningKey({})", key.key_id()));
    }
}
