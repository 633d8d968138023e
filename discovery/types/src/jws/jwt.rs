//! JWTs by the `jsonwebtoken` library, with ring underneath and one algorithm.
//!
//! The library's own cryptography is not wanted in the programs, so it gets our provider: EdDSA
//! over Ed25519, and a refusal for every other algorithm. [`super::Jws`] makes the checks that are
//! stricter than RFC 7515 before anything comes here.

use std::collections::HashSet;
use std::sync::Once;

use jsonwebtoken::crypto::{CryptoProvider, JwtSigner, JwtVerifier, KeyUtils};
use jsonwebtoken::errors::{Error, ErrorKind, new_error};
use jsonwebtoken::signature::{self, Signer, Verifier};
use jsonwebtoken::{
    Algorithm, AlgorithmFamily, DecodingKey, EncodingKey, Header, TokenData, Validation,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{JwsError, JwsType};
use crate::key::{PublicKey, SigningKey};
use crate::strict::Strict;

static PROVIDER: CryptoProvider = CryptoProvider {
    signer_factory: signer,
    verifier_factory: verifier,
    // Only the library's JWK functions need key utilities, and we don't call them.
    key_utils: KeyUtils::new_unimplemented(),
};

/// Issuer, subject and audience that a JWT (RFC 7519) must name. Its times are missing here: the
/// service's clock judges them, and the library knows only this machine's.
#[derive(Clone, Copy, Debug)]
pub struct Parties<'a> {
    /// Required value of `iss`.
    pub issuer: &'a str,
    /// Required value of `sub`; `None` if the caller compares it with the key that the token is
    /// bound to.
    pub subject: Option<&'a str>,
    /// Required value of `aud`.
    pub audience: &'a str,
}

/// Signs `payload`, and returns the compact form.
pub(super) fn encode<T: Serialize>(typ: JwsType, key: &SigningKey, payload: &T) -> String {
    install();
    let mut header = Header::new(Algorithm::EdDSA);
    header.typ = Some(typ.as_str().to_owned());
    header.kid = Some(key.key_id().to_string());
    let secret = EncodingKey::from_ed_der(&key.pkcs8_der());
    jsonwebtoken::encode(&header, payload, &secret)
        .expect("payloads are plain structs, which always encode, and the key is an Ed25519 key")
}

/// Returns the payload of `compact` if `key` signed it and, for a JWT, its claims name these
/// parties.
pub(super) fn decode<T: DeserializeOwned>(
    compact: &str,
    key: &PublicKey,
    parties: Option<Parties<'_>>,
) -> Result<T, JwsError> {
    install();
    let key = DecodingKey::from_ed_der(key.as_bytes());
    let decoded: TokenData<Strict<T>> =
        jsonwebtoken::decode(compact, &key, &validation(parties)).map_err(refusal)?;
    Ok(decoded.claims.0)
}

fn validation(parties: Option<Parties<'_>>) -> Validation {
    let mut validation = Validation::new(Algorithm::EdDSA);
    // The caller judges `exp` by the service's clock.
    validation.leeway = 0;
    validation.validate_exp = false;
    validation.required_spec_claims = HashSet::new();
    validation.validate_aud = parties.is_some();
    if let Some(parties) = parties {
        validation.set_required_spec_claims(&["iss", "sub", "aud", "exp"]);
        validation.set_issuer(&[parties.issuer]);
        validation.set_audience(&[parties.audience]);
        validation.sub = parties.subject.map(str::to_owned);
    }
    validation
}

fn refusal(error: Error) -> JwsError {
    match error.into_kind() {
        ErrorKind::InvalidSignature => JwsError::BadSignature,
        ErrorKind::Json(error) => JwsError::Payload(error.to_string()),
        ErrorKind::InvalidIssuer | ErrorKind::InvalidSubject | ErrorKind::InvalidAudience => {
            JwsError::Parties
        }
        ErrorKind::MissingRequiredClaim(name) => {
            JwsError::Payload(format!("there is no `{name}`, or it is of another type"))
        }
        ErrorKind::InvalidAlgorithm => JwsError::Header("`alg` must be EdDSA".into()),
        _ => JwsError::Malformed,
    }
}

fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        PROVIDER.install_default().expect("nothing else in the process installs a provider");
    });
}

fn signer(algorithm: &Algorithm, key: &EncodingKey) -> Result<Box<dyn JwtSigner>, Error> {
    if *algorithm != Algorithm::EdDSA || key.family() != AlgorithmFamily::Ed {
        return Err(new_error(ErrorKind::InvalidAlgorithm));
    }
    let key = SigningKey::from_pkcs8_der(key.as_bytes())
        .map_err(|_| new_error(ErrorKind::InvalidEddsaKey))?;
    Ok(Box::new(Ed25519Signer(key)))
}

fn verifier(algorithm: &Algorithm, key: &DecodingKey) -> Result<Box<dyn JwtVerifier>, Error> {
    if *algorithm != Algorithm::EdDSA || key.family() != AlgorithmFamily::Ed {
        return Err(new_error(ErrorKind::InvalidAlgorithm));
    }
    let bytes = key.try_get_as_bytes()?.try_into();
    let bytes = bytes.map_err(|_| new_error(ErrorKind::InvalidEddsaKey))?;
    Ok(Box::new(Ed25519Verifier(PublicKey::from_bytes(bytes))))
}

struct Ed25519Signer(SigningKey);

impl Signer<Vec<u8>> for Ed25519Signer {
    fn try_sign(&self, message: &[u8]) -> Result<Vec<u8>, signature::Error> {
        Ok(self.0.sign(message).to_vec())
    }
}

impl JwtSigner for Ed25519Signer {
    fn algorithm(&self) -> Algorithm {
        Algorithm::EdDSA
    }
}

struct Ed25519Verifier(PublicKey);

impl Verifier<Vec<u8>> for Ed25519Verifier {
    fn verify(&self, message: &[u8], signature: &Vec<u8>) -> Result<(), signature::Error> {
        self.0.verify(message, signature).map_err(|_| signature::Error::new())
    }
}

impl JwtVerifier for Ed25519Verifier {
    fn algorithm(&self) -> Algorithm {
        Algorithm::EdDSA
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const PARTIES: Parties<'_> = Parties { issuer: "i", subject: Some("s"), audience: "a" };

    fn claims() -> Value {
        json!({ "iss": "i", "sub": "s", "aud": "a", "exp": 7 })
    }

    #[test]
    fn each_claim_of_a_jwt_is_required_and_compared() {
        let key = SigningKey::generate();
        let read = |claims: &Value| {
            let compact = encode(JwsType::Access, &key, claims);
            decode::<Value>(&compact, key.public(), Some(PARTIES))
        };
        assert_eq!(read(&claims()), Ok(claims()));
        for name in ["iss", "sub", "aud", "exp"] {
            let mut without = claims();
            without.as_object_mut().unwrap().remove(name);
            assert!(matches!(read(&without), Err(JwsError::Payload(_))), "{name}");
            let mut null = claims();
            null[name] = Value::Null;
            assert!(matches!(read(&null), Err(JwsError::Payload(_))), "{name}");
        }
        for name in ["iss", "sub", "aud"] {
            let mut other = claims();
            other[name] = json!("other");
            assert_eq!(read(&other), Err(JwsError::Parties), "{name}");
        }
        for exp in [json!("7"), json!("never"), json!(-1), json!([7])] {
            let mut strange = claims();
            strange["exp"] = exp.clone();
            assert!(matches!(read(&strange), Err(JwsError::Payload(_))), "{exp}");
        }
    }

    #[test]
    fn no_other_algorithm_is_signed_or_verified_with() {
        install();
        for algorithm in [Algorithm::HS256, Algorithm::ES256, Algorithm::RS256, Algorithm::PS256] {
            let secret = EncodingKey::from_secret(b"secret");
            assert!(signer(&algorithm, &secret).is_err());
            assert!(verifier(&algorithm, &DecodingKey::from_secret(b"secret")).is_err());
        }
        assert!(signer(&Algorithm::EdDSA, &EncodingKey::from_secret(b"secret")).is_err());
        assert!(verifier(&Algorithm::EdDSA, &DecodingKey::from_secret(&[1; 32])).is_err());
        assert!(verifier(&Algorithm::EdDSA, &DecodingKey::from_ed_der(&[1; 31])).is_err());
    }
}
