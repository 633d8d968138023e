//! Keys that sign or verify. ring loads each key for one algorithm.

use std::fmt;

use data_encoding::BASE64URL_NOPAD;
use jsonwebtoken::crypto::{JwtSigner, JwtVerifier};
use jsonwebtoken::errors::{Error, ErrorKind, new_error};
use jsonwebtoken::{Algorithm, AlgorithmFamily, DecodingKey, EncodingKey, signature};
use ring::hmac;
use ring::rand::SystemRandom;
use ring::signature::{
    self as ring_signature, ED25519_PUBLIC_KEY_LEN, EcdsaKeyPair, EcdsaSigningAlgorithm,
    EcdsaVerificationAlgorithm, Ed25519KeyPair, KeyPair as _, RsaEncoding, RsaKeyPair,
    RsaParameters, UnparsedPublicKey,
};

/// ring's counterpart of an algorithm (RFC 7518 and RFC 8037).
enum RingAlgorithm {
    Hmac(hmac::Algorithm),
    Rsa(&'static dyn RsaEncoding, &'static RsaParameters),
    Ecdsa(&'static EcdsaSigningAlgorithm, &'static EcdsaVerificationAlgorithm),
    Ed25519,
}

impl RingAlgorithm {
    /// Returns ring's counterpart of `algorithm`; fails if keys of `family` aren't for that
    /// algorithm.
    fn of(algorithm: Algorithm, family: AlgorithmFamily) -> Result<Self, Error> {
        use RingAlgorithm::{Ecdsa, Hmac, Rsa};
        use ring_signature as ring;
        if algorithm.family() != family {
            return Err(new_error(ErrorKind::InvalidAlgorithm));
        }
        Ok(match algorithm {
            Algorithm::HS256 => Hmac(hmac::HMAC_SHA256),
            Algorithm::HS384 => Hmac(hmac::HMAC_SHA384),
            Algorithm::HS512 => Hmac(hmac::HMAC_SHA512),
            Algorithm::RS256 => Rsa(&ring::RSA_PKCS1_SHA256, &ring::RSA_PKCS1_2048_8192_SHA256),
            Algorithm::RS384 => Rsa(&ring::RSA_PKCS1_SHA384, &ring::RSA_PKCS1_2048_8192_SHA384),
            Algorithm::RS512 => Rsa(&ring::RSA_PKCS1_SHA512, &ring::RSA_PKCS1_2048_8192_SHA512),
            Algorithm::PS256 => Rsa(&ring::RSA_PSS_SHA256, &ring::RSA_PSS_2048_8192_SHA256),
            Algorithm::PS384 => Rsa(&ring::RSA_PSS_SHA384, &ring::RSA_PSS_2048_8192_SHA384),
            Algorithm::PS512 => Rsa(&ring::RSA_PSS_SHA512, &ring::RSA_PSS_2048_8192_SHA512),
            Algorithm::ES256 => {
                Ecdsa(&ring::ECDSA_P256_SHA256_FIXED_SIGNING, &ring::ECDSA_P256_SHA256_FIXED)
            }
            Algorithm::ES384 => {
                Ecdsa(&ring::ECDSA_P384_SHA384_FIXED_SIGNING, &ring::ECDSA_P384_SHA384_FIXED)
            }
            Algorithm::EdDSA => Self::Ed25519,
            _ => return Err(new_error(ErrorKind::UnsupportedAlgorithm)),
        })
    }
}

enum PrivateKey {
    Hmac(hmac::Key),
    Rsa(Box<RsaKeyPair>, &'static dyn RsaEncoding),
    Ecdsa(Box<EcdsaKeyPair>),
    Ed25519(Box<Ed25519KeyPair>),
}

/// Private or shared key that signs with one algorithm.
pub struct Signer {
    algorithm: Algorithm,
    key: PrivateKey,
}

impl Signer {
    /// Loads a key. The DER of an RSA key may be PKCS #1 or PKCS #8. The DER of an ECDSA or Ed25519
    /// key must be PKCS #8. The key of HMAC may be any bytes.
    ///
    /// # Errors
    /// If the key's kind or size doesn't fit the algorithm.
    pub fn new(algorithm: Algorithm, key: &EncodingKey) -> Result<Self, Error> {
        let bytes = key.as_bytes();
        let loaded = match RingAlgorithm::of(algorithm, key.family())? {
            RingAlgorithm::Hmac(hash) => Ok(PrivateKey::Hmac(hmac::Key::new(hash, bytes))),
            RingAlgorithm::Rsa(padding, _) => RsaKeyPair::from_der(bytes)
                .or_else(|_| RsaKeyPair::from_pkcs8(bytes))
                .map(|key| PrivateKey::Rsa(Box::new(key), padding)),
            RingAlgorithm::Ecdsa(curve, _) => {
                EcdsaKeyPair::from_pkcs8(curve, bytes, &SystemRandom::new())
                    .map(|key| PrivateKey::Ecdsa(Box::new(key)))
            }
            RingAlgorithm::Ed25519 => Ed25519KeyPair::from_pkcs8_maybe_unchecked(bytes)
                .map(|key| PrivateKey::Ed25519(Box::new(key))),
        };
        let key = loaded.map_err(|_| new_error(ErrorKind::InvalidKeyFormat))?;
        Ok(Self { algorithm, key })
    }

    /// Returns the public key in the form that [`Verifier::new`] takes, or `None` for HMAC.
    #[must_use]
    pub fn public_key(&self) -> Option<&[u8]> {
        match &self.key {
            PrivateKey::Hmac(_) => None,
            PrivateKey::Rsa(key, _) => Some(key.public_key().as_ref()),
            PrivateKey::Ecdsa(key) => Some(key.public_key().as_ref()),
            PrivateKey::Ed25519(key) => Some(key.public_key().as_ref()),
        }
    }

    /// Signs a header and a payload, and returns the compact form.
    ///
    /// # Errors
    /// If the signature can't be made, for example because the system gives no random numbers.
    pub fn sign_compact(&self, header: &[u8], payload: &[u8]) -> Result<String, signature::Error> {
        let mut text = BASE64URL_NOPAD.encode(header);
        text.push('.');
        BASE64URL_NOPAD.encode_append(payload, &mut text);
        let signature: Vec<u8> = signature::Signer::try_sign(self, text.as_bytes())?;
        text.push('.');
        BASE64URL_NOPAD.encode_append(&signature, &mut text);
        Ok(text)
    }
}

impl signature::Signer<Vec<u8>> for Signer {
    fn try_sign(&self, message: &[u8]) -> Result<Vec<u8>, signature::Error> {
        let random = SystemRandom::new();
        let failed = |_| signature::Error::new();
        match &self.key {
            PrivateKey::Hmac(key) => Ok(hmac::sign(key, message).as_ref().to_vec()),
            PrivateKey::Rsa(key, padding) => {
                let mut signature = vec![0; key.public().modulus_len()];
                key.sign(*padding, &random, message, &mut signature).map_err(failed)?;
                Ok(signature)
            }
            PrivateKey::Ecdsa(key) => {
                Ok(key.sign(&random, message).map_err(failed)?.as_ref().to_vec())
            }
            PrivateKey::Ed25519(key) => Ok(key.sign(message).as_ref().to_vec()),
        }
    }
}

impl JwtSigner for Signer {
    fn algorithm(&self) -> Algorithm {
        self.algorithm
    }
}

enum PublicKey {
    Hmac(hmac::Key),
    Asymmetric(UnparsedPublicKey<Vec<u8>>),
}

/// Public or shared key that verifies the signatures of one algorithm.
pub struct Verifier {
    algorithm: Algorithm,
    key: PublicKey,
}

impl Verifier {
    /// Loads a key: the bits of a SubjectPublicKeyInfo, or the secret of HMAC. ring parses the key
    /// only when it verifies a signature, and reports a malformed key as a wrong signature.
    ///
    /// # Errors
    /// If the key's kind doesn't fit the algorithm.
    pub fn new(algorithm: Algorithm, key: &DecodingKey) -> Result<Self, Error> {
        let bytes = key.try_get_as_bytes()?;
        let asymmetric: &'static dyn ring_signature::VerificationAlgorithm =
            match RingAlgorithm::of(algorithm, key.family())? {
                RingAlgorithm::Hmac(hash) => {
                    let key = PublicKey::Hmac(hmac::Key::new(hash, bytes));
                    return Ok(Self { algorithm, key });
                }
                RingAlgorithm::Rsa(_, padding) => padding,
                RingAlgorithm::Ecdsa(_, curve) => curve,
                RingAlgorithm::Ed25519 if bytes.len() == ED25519_PUBLIC_KEY_LEN => {
                    &ring_signature::ED25519
                }
                RingAlgorithm::Ed25519 => return Err(new_error(ErrorKind::InvalidEddsaKey)),
            };
        let key = UnparsedPublicKey::new(asymmetric, bytes.to_vec());
        Ok(Self { algorithm, key: PublicKey::Asymmetric(key) })
    }

    /// Whether the holder of the key has signed `message`.
    #[must_use]
    pub fn is_signed(&self, message: &[u8], signature: &[u8]) -> bool {
        match &self.key {
            PublicKey::Hmac(key) => hmac::verify(key, message, signature).is_ok(),
            PublicKey::Asymmetric(key) => key.verify(message, signature).is_ok(),
        }
    }
}

impl signature::Verifier<Vec<u8>> for Verifier {
    fn verify(&self, message: &[u8], signature: &Vec<u8>) -> Result<(), signature::Error> {
        self.is_signed(message, signature).then_some(()).ok_or_else(signature::Error::new)
    }
}

impl JwtVerifier for Verifier {
    fn algorithm(&self) -> Algorithm {
        self.algorithm
    }
}

/// Shows the algorithm, and leaves out the key.
impl fmt::Debug for Signer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Signer").field("algorithm", &self.algorithm).finish_non_exhaustive()
    }
}

/// Shows the algorithm, and leaves out the key, which is a secret for HMAC.
impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verifier").field("algorithm", &self.algorithm).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_of_another_family_is_refused() {
        let families =
            [AlgorithmFamily::Hmac, AlgorithmFamily::Rsa, AlgorithmFamily::Ec, AlgorithmFamily::Ed];
        let private = |family| match family {
            AlgorithmFamily::Hmac => EncodingKey::from_secret(b"secret"),
            AlgorithmFamily::Rsa => EncodingKey::from_rsa_der(b"secret"),
            AlgorithmFamily::Ec => EncodingKey::from_ec_der(b"secret"),
            AlgorithmFamily::Ed => EncodingKey::from_ed_der(b"secret"),
        };
        let public = |family| match family {
            AlgorithmFamily::Hmac => DecodingKey::from_secret(&[1; 32]),
            AlgorithmFamily::Rsa => DecodingKey::from_rsa_der(&[1; 32]),
            AlgorithmFamily::Ec => DecodingKey::from_ec_der(&[1; 32]),
            AlgorithmFamily::Ed => DecodingKey::from_ed_der(&[1; 32]),
        };
        for family in families {
            for algorithm in families.iter().flat_map(AlgorithmFamily::algorithms).copied() {
                let is_of_family = algorithm.family() == family;
                let verifier = Verifier::new(algorithm, &public(family));
                assert_eq!(verifier.is_ok(), is_of_family, "{algorithm:?} {family:?}");
                // HMAC takes any bytes as a key. A private key of another family must be
                // well-formed.
                let is_key = is_of_family && family == AlgorithmFamily::Hmac;
                let signer = Signer::new(algorithm, &private(family));
                assert_eq!(signer.is_ok(), is_key, "{algorithm:?} {family:?}");
            }
        }
    }

    #[test]
    fn an_ed25519_key_has_32_bytes() {
        for (length, is_accepted) in [(31, false), (32, true), (33, false)] {
            let key = DecodingKey::from_ed_der(&vec![1; length]);
            assert_eq!(Verifier::new(Algorithm::EdDSA, &key).is_ok(), is_accepted, "{length}");
        }
    }

    #[test]
    fn debug_output_contains_no_key() {
        let signer = Signer::new(Algorithm::HS256, &EncodingKey::from_secret(b"secret")).unwrap();
        assert_eq!(format!("{signer:?}"), "Signer { algorithm: HS256, .. }");
        let verifier = Verifier::new(Algorithm::HS256, &DecodingKey::from_secret(b"secret"));
        assert_eq!(format!("{:?}", verifier.unwrap()), "Verifier { algorithm: HS256, .. }");
    }
}
