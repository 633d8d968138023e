//! A key that signs identity documents as the clouds do, for tests.

use data_encoding::{BASE64, BASE64URL_NOPAD};
use muster_jws::{Algorithm, EncodingKey, Signer};
use serde_json::{Value, json};
use x509_parser::pem::Pem;

use crate::{Cloud, IdentityDocument};

/// Certificate of the key, in PEM: the content of a file `aws.pem`.
pub const CERTIFICATE: &str = include_str!("fixtures/certificate.pem");
/// Private key, in PEM.
const KEY: &str = include_str!("fixtures/key.pem");
/// Id of the key in [`jwks`].
const KID: &str = "test";

fn signer() -> Signer {
    let (_, pem) = x509_parser::pem::parse_x509_pem(KEY.as_bytes()).expect("the fixture is PEM");
    Signer::new(Algorithm::RS256, &EncodingKey::from_rsa_der(&pem.contents))
        .expect("the fixture is an RSA key")
}

/// Returns a JWKS with the key.
#[must_use]
pub fn jwks() -> String {
    let pem = Pem::iter_from_buffer(CERTIFICATE.as_bytes()).next();
    let pem = pem.expect("there is a certificate").expect("it is PEM");
    let certificate = pem.parse_x509().expect("it is a certificate");
    let key = certificate.public_key().parsed().expect("it has a key");
    let x509_parser::public_key::PublicKey::RSA(key) = key else { panic!("the key is not RSA") };
    // In DER, a zero byte comes before the modulus. It isn't a part of the number.
    let modulus = key.modulus.strip_prefix(&[0]).unwrap_or(key.modulus);
    let (n, e) = (BASE64URL_NOPAD.encode(modulus), BASE64URL_NOPAD.encode(key.exponent));
    json!({ "keys": [
        { "kty": "EC", "kid": "other", "crv": "P-256" },
        { "kty": "RSA", "kid": KID, "use": "sig", "alg": "RS256", "n": n, "e": e },
    ] })
    .to_string()
}

/// Signs a JWT with these claims.
#[must_use]
pub fn jwt(claims: &Value) -> String {
    jwt_of_key(KID, claims)
}

/// Signs a JWT with these claims, whose header names the key `kid`.
#[must_use]
pub fn jwt_of_key(kid: &str, claims: &Value) -> String {
    let header = json!({ "alg": "RS256", "kid": kid, "typ": "JWT" }).to_string();
    signer().sign_compact(header.as_bytes(), claims.to_string().as_bytes()).expect("ring signs")
}

/// Makes a document of a GCP virtual machine. `started` and the end of its validity are in seconds
/// since 1970.
#[must_use]
pub fn gcp(
    project: &str,
    instance: &str,
    audience: &str,
    (started, ends): (u64, u64),
) -> IdentityDocument {
    let text = jwt(&json!({
        "iss": "https://accounts.google.com", "aud": audience, "sub": "1", "azp": "1",
        "iat": started, "exp": ends,
        "google": { "compute_engine": {
            "project_id": project, "project_number": 1, "instance_id": instance,
            "instance_name": "vm", "zone": "europe-west1-b",
            "instance_creation_timestamp": started,
        } },
    }));
    IdentityDocument { cloud: Cloud::Gcp, text }
}

/// Makes a document of an AWS instance that was started at `started`, in seconds since 1970. It has
/// no signed attributes.
#[must_use]
pub fn aws(account: &str, instance: &str, started: u64) -> IdentityDocument {
    let started = i64::try_from(started).unwrap_or(i64::MAX);
    let started = jiff::Timestamp::from_second(started).expect("the time is valid");
    let content = json!({
        "accountId": account, "instanceId": instance, "region": "eu-west-1",
        "availabilityZone": "eu-west-1a", "pendingTime": started.to_string(),
        "architecture": "x86_64", "version": "2017-09-30",
    });
    let message = cms(content.to_string().as_bytes(), None);
    IdentityDocument { cloud: Cloud::Aws, text: BASE64.encode(&message) }
}

/// Signed attribute of a CMS message (RFC 5652, section 11).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignedAttribute {
    /// Type of the content.
    ContentType,
    /// SHA-256 of the content.
    MessageDigest,
}

/// Makes a document with this content, in which the signature covers these attributes instead of
/// the content.
#[must_use]
pub fn aws_with_attributes(content: &str, attributes: &[SignedAttribute]) -> IdentityDocument {
    let attribute = |kind: &SignedAttribute| {
        let (tail, value) = match kind {
            SignedAttribute::ContentType => (3, object_id(&[1, 7, 1])),
            SignedAttribute::MessageDigest => {
                let hash = ring::digest::digest(&ring::digest::SHA256, content.as_bytes());
                (4, definite(4, hash.as_ref()))
            }
        };
        definite(0x30, &[object_id(&[1, 9, tail]), definite(0x31, &value)].concat())
    };
    let attributes: Vec<u8> = attributes.iter().flat_map(attribute).collect();
    let message = cms(content.as_bytes(), Some(&attributes));
    IdentityDocument { cloud: Cloud::Aws, text: BASE64.encode(&message) }
}

/// Encodes an element with a definite length.
fn definite(tag: u8, contents: &[u8]) -> Vec<u8> {
    let length = u16::try_from(contents.len()).expect("the fixture is short").to_be_bytes();
    [&[tag, 0x82], &length[..], contents].concat()
}

/// Encodes an element with an indefinite length.
fn indefinite(tag: u8, contents: &[u8]) -> Vec<u8> {
    [&[tag, 0x80], contents, &[0, 0]].concat()
}

/// Encodes an object identifier below 1.2.840.113549 (RSA Data Security), with the last bytes
/// `tail`.
fn object_id(tail: &[u8]) -> Vec<u8> {
    definite(6, &[&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d][..], tail].concat())
}

/// Encodes a signed message in BER, with indefinite lengths. The signature covers `attributes` if
/// they are given, otherwise the content.
fn cms(content: &[u8], attributes: Option<&[u8]>) -> Vec<u8> {
    let message = attributes.map_or_else(|| content.to_vec(), |set| definite(0x31, set));
    let signature = muster_jws::signature::Signer::<Vec<u8>>::try_sign(&signer(), &message)
        .expect("ring signs");
    let sha256 = definite(0x30, &definite(6, &[0x60, 0x86, 0x48, 1, 0x65, 3, 4, 2, 1]));
    let rsa = definite(0x30, &object_id(&[1, 1, 1]));
    let (first, second) = content.split_at(content.len() / 2);
    let pieces = [definite(4, first), definite(4, second)].concat();
    let octets = indefinite(0x24, &pieces);
    let encapsulated =
        indefinite(0x30, &[object_id(&[1, 7, 1]), indefinite(0xa0, &octets)].concat());
    let name = definite(0x30, &[definite(0x30, &[]), definite(2, &[1])].concat());
    let attributes = attributes.map(|set| definite(0xa0, set)).unwrap_or_default();
    let signature = definite(4, &signature);
    let signer = [definite(2, &[1]), name, sha256.clone(), attributes, rsa, signature].concat();
    let signers = definite(0x31, &definite(0x30, &signer));
    let signed = [definite(2, &[1]), definite(0x31, &sha256), encapsulated, signers].concat();
    let signed = indefinite(0xa0, &indefinite(0x30, &signed));
    indefinite(0x30, &[object_id(&[1, 7, 2]), signed].concat())
}
