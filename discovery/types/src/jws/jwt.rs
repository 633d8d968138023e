//! Encodes JWTs, and decodes them with the `jsonwebtoken` library, through `muster-jws`. EdDSA is
//! the only algorithm.
//!
//! [`super::Jws`] makes the checks that are stricter than RFC 7515 before it calls this module.

use std::collections::HashSet;

use data_encoding::BASE64URL_NOPAD;
use muster_jws::{Algorithm, DecodingKey, Error, ErrorKind, Header, Validation};
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
    let mut text = String::new();
    append_part(&mut text, &json(&header));
    text.push('.');
    append_part(&mut text, &json(payload));
    // Sign with the loaded key. `muster_jws::encode` would load it anew for each message.
    let signature = key.sign(text.as_bytes());
    text.push('.');
    append_part(&mut text, &signature);
    text
}

fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("headers and payloads are plain structs, which always encode")
}

fn append_part(text: &mut String, bytes: &[u8]) {
    BASE64URL_NOPAD.encode_append(bytes, text);
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
    use muster_jws::EncodingKey;
    use serde_json::{Value, json};

    use super::*;

    const PARTIES: Parties<'_> = Parties { issuer: "i", subject: Some("s"), audience: "a" };

    fn claims() -> Value {
        json!({ "iss": "i", "sub": "s", "aud": "a", "exp": 7 })
    }

    #[test]
    fn a_message_is_signed_as_the_library_signs_it() {
        let key = SigningKey::generate();
        let mut header = Header::new(Algorithm::EdDSA);
        header.typ = Some(JwsType::Access.as_str().to_owned());
        header.kid = Some(key.key_id().to_string());
        let secret = EncodingKey::from_ed_der(&key.pkcs8_der());
        let expected = muster_jws::encode(&header, &claims(), &secret).unwrap();
        assert_eq!(encode(JwsType::Access, &key, &claims()), expected);
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
