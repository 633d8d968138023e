//! Encodes and decodes JWTs with the `jsonwebtoken` library, through `muster-jws`. EdDSA is the
//! only algorithm.
//!
//! [`super::Jws`] makes the checks that are stricter than RFC 7515 before it calls this module.

use std::collections::HashSet;

use muster_jws::{Algorithm, DecodingKey, EncodingKey, Error, ErrorKind, Header, Validation};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{JwsError, JwsType};
use crate::key::{PublicKey, SigningKey};
use crate::strict::Strict;

/// Issuer, subject and audience that a JWT (RFC 7519) must name. Times are not compared here,
/// because the service's clock judges them and the library knows only the local clock.
#[derive(Clone, Copy, Debug)]
pub struct Parties<'a> {
    /// Required value of `iss`.
    pub issuer: &'a str,
    /// Required value of `sub`. With `None`, the caller must itself compare `sub` with the key that
    /// the token is bound to.
    pub subject: Option<&'a str>,
    /// Required value of `aud`.
    pub audience: &'a str,
}

/// Signs `payload`, and returns the compact form.
pub(super) fn encode<T: Serialize>(typ: JwsType, key: &SigningKey, payload: &T) -> String {
    let mut header = Header::new(Algorithm::EdDSA);
    header.typ = Some(typ.as_str().to_owned());
    header.kid = Some(key.key_id().to_string());
    let secret = EncodingKey::from_ed_der(&key.pkcs8_der());
    muster_jws::encode(&header, payload, &secret)
        .expect("payloads are plain structs, which always encode, and the key is an Ed25519 key")
}

/// Returns the payload of `compact` if `key` signed it. With `parties`, the payload's claims must
/// also name these parties.
pub(super) fn decode<T: DeserializeOwned>(
    compact: &str,
    key: &PublicKey,
    parties: Option<Parties<'_>>,
) -> Result<T, JwsError> {
    let key = DecodingKey::from_ed_der(key.as_bytes());
    let claims: Strict<T> =
        muster_jws::decode(compact, &key, &validation(parties)).map_err(refusal)?;
    Ok(claims.0)
}

fn validation(parties: Option<Parties<'_>>) -> Validation {
    let mut validation = Validation::new(Algorithm::EdDSA);
    // Don't check `exp` here: the caller judges it by the service's clock.
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

#[cfg(test)]
mod tests {
    use data_encoding::BASE64URL_NOPAD;
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
    fn a_jwt_with_another_algorithm_is_refused() {
        let key = SigningKey::generate();
        let secret = EncodingKey::from_secret(key.public().as_bytes());
        let refused = Err(JwsError::Header("`alg` must be EdDSA".into()));
        for algorithm in [Algorithm::HS256, Algorithm::HS384, Algorithm::HS512] {
            let compact = muster_jws::encode(&Header::new(algorithm), &claims(), &secret).unwrap();
            assert_eq!(decode::<Value>(&compact, key.public(), None), refused, "{algorithm:?}");
        }
        for algorithm in [Algorithm::RS256, Algorithm::PS256, Algorithm::ES256, Algorithm::HS256] {
            let part = |part: String| BASE64URL_NOPAD.encode(part.as_bytes());
            let header = part(json!({ "alg": algorithm }).to_string());
            let signed = format!("{header}.{}", part(claims().to_string()));
            let compact =
                format!("{signed}.{}", BASE64URL_NOPAD.encode(&key.sign(signed.as_bytes())));
            assert_eq!(decode::<Value>(&compact, key.public(), None), refused, "{algorithm:?}");
        }
    }
}
