//! Attacks on the two JWTs that callers present: the assertion (RFC 7523) and the access token (RFC
//! 9068). Each vector differs from a good JWT in one thing. The attacks are those of RFC 8725,
//! section 2, and of RFC 8032, section 8.4, and whatever a lenient parser would accept.

use data_encoding::{BASE64, BASE64URL, BASE64URL_NOPAD};
use discovery_types::access::{AccessToken, Assertion, ClientKind, JWT_BEARER};
use discovery_types::jws::{Jws, JwsType};
use discovery_types::key::SigningKey;
use discovery_types::problem::{Code, Problem};
use serde_json::{Value, json};

use super::support::{TestInstallation, send_with};
use crate::server::RunningService;

/// Order of the base point of Ed25519, as little-endian bytes (RFC 8032, section 5.1).
const ED25519_ORDER: [u8; 32] = [
    0xed, 0xd3, 0xf5, 0x5c, 0x1a, 0x63, 0x12, 0x58, 0xd6, 0x9c, 0xf7, 0xa2, 0xde, 0xf9, 0xde, 0x14,
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10,
];

/// A changed JWT, and what was changed.
struct Vector {
    change: String,
    jwt: String,
}

/// A good JWT in parts, and the keys that vectors sign with.
struct Template<'a> {
    header: Value,
    claims: Value,
    /// The key that signs the good JWT.
    signer: &'a SigningKey,
    /// A key that the service doesn't know.
    stranger: &'a SigningKey,
}

impl<'a> Template<'a> {
    fn new(typ: JwsType, signer: &'a SigningKey, stranger: &'a SigningKey, claims: Value) -> Self {
        let header = json!({ "alg": "EdDSA", "typ": typ.as_str(), "kid": signer.key_id() });
        Template { header, claims, signer, stranger }
    }

    /// Returns the first two parts of a JWT.
    fn signing_input(&self, header: &str, claims: &str) -> String {
        let [header, claims] = [header, claims].map(|part| BASE64URL_NOPAD.encode(part.as_bytes()));
        format!("{header}.{claims}")
    }

    /// Returns a JWT that is signed by the right key, whatever header and claims say.
    fn signed(&self, header: &str, claims: &str) -> String {
        let input = self.signing_input(header, claims);
        let signature = self.signer.sign(input.as_bytes());
        format!("{input}.{}", BASE64URL_NOPAD.encode(&signature))
    }

    fn good(&self) -> String {
        self.signed(&self.header.to_string(), &self.claims.to_string())
    }

    fn vectors(&self) -> Vec<Vector> {
        let mut vectors = self.header_vectors();
        vectors.extend(self.algorithm_vectors());
        vectors.extend(self.claim_vectors());
        vectors.extend(self.signature_vectors());
        vectors.extend(self.text_vectors());
        vectors
    }

    /// Vectors whose header is changed, with a valid signature by the right key.
    fn header_vectors(&self) -> Vec<Vector> {
        let other = self.stranger.public();
        let jwk = json!({ "kty": "OKP", "crv": "Ed25519", "x": other.jwk_x() });
        let members = [
            ("typ", json!("JWT")),
            ("typ", json!(JwsType::Statement.as_str())),
            ("typ", json!(format!("application/{}", self.header["typ"].as_str().unwrap()))),
            ("typ", Value::Null),
            ("kid", json!(other.key_id())),
            ("kid", json!("")),
            ("kid", json!("../../../dev/null")),
            ("kid", json!("x' UNION SELECT 'key' --")),
            ("kid", json!("https://127.0.0.1/key")),
            ("kid", json!([self.signer.key_id()])),
            ("jwk", jwk),
            ("jku", json!("https://127.0.0.1/jwks")),
            ("x5u", json!("https://127.0.0.1/certificate")),
            ("x5c", json!(["MII"])),
            ("crit", json!(["exp"])),
            ("crit", json!([])),
            ("b64", json!(false)),
            ("zip", json!("DEF")),
            ("cty", json!("JWT")),
        ];
        let mut vectors: Vec<Vector> = members
            .into_iter()
            .map(|(member, value)| {
                let mut header = self.header.clone();
                header[member] = value.clone();
                let jwt = self.signed(&header.to_string(), &self.claims.to_string());
                Vector { change: format!("header: {member} is {value}"), jwt }
            })
            .collect();
        let (typ, kid) = (&self.header["typ"], &self.header["kid"]);
        for header in [
            format!(r#"{{"alg":"EdDSA","alg":"EdDSA","typ":{typ},"kid":{kid}}}"#),
            format!(r#"{{"alg":"EdDSA","typ":{typ},"kid":"x","kid":{kid}}}"#),
            format!(r#"["EdDSA",{typ},{kid}]"#),
            format!("\u{feff}{}", self.header),
            format!("{} ,", self.header),
            "{}".into(),
            String::new(),
        ] {
            let jwt = self.signed(&header, &self.claims.to_string());
            vectors.push(Vector { change: format!("header: {header}"), jwt });
        }
        vectors
    }

    /// Vectors with another algorithm: without a signature, or with one that uses the public key as
    /// a secret.
    fn algorithm_vectors(&self) -> Vec<Vector> {
        let mut vectors = Vec::new();
        let with = |algorithm: Value| {
            let mut header = self.header.clone();
            header["alg"] = algorithm;
            self.signing_input(&header.to_string(), &self.claims.to_string())
        };
        for algorithm in ["none", "None", "NONE", "nOnE", "", "EdDSA"] {
            let change = format!("algorithm {algorithm:?} without a signature");
            vectors.push(Vector { change, jwt: format!("{}.", with(json!(algorithm))) });
        }
        for algorithm in ["none", "RS256", "PS256", "ES256", "ES256K", "eddsa", "Ed448", "HS256"] {
            let input = with(json!(algorithm));
            let signature = BASE64URL_NOPAD.encode(&self.signer.sign(input.as_bytes()));
            let change = format!("algorithm {algorithm:?} with the signature of EdDSA");
            vectors.push(Vector { change, jwt: format!("{input}.{signature}") });
        }
        let public = self.signer.public();
        let pem = format!(
            "-----BEGIN PUBLIC KEY-----\n{}\n-----END PUBLIC KEY-----\n",
            BASE64.encode(&public.spki_der())
        );
        let secrets = [
            ("its bytes", public.as_bytes().to_vec()),
            ("its text", public.to_string().into_bytes()),
            ("its JWK's x", public.jwk_x().into_bytes()),
            ("its DER", public.spki_der()),
            ("its PEM", pem.into_bytes()),
            ("no bytes", Vec::new()),
        ];
        for (name, secret) in secrets {
            let input = with(json!("HS256"));
            let secret = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &secret);
            let tag = ring::hmac::sign(&secret, input.as_bytes());
            let change = format!("HS256 with the public key as secret: {name}");
            vectors.push(Vector {
                change,
                jwt: format!("{input}.{}", BASE64URL_NOPAD.encode(tag.as_ref())),
            });
        }
        vectors
    }

    /// Vectors whose claims are changed, with a valid signature by the right key.
    fn claim_vectors(&self) -> Vec<Vector> {
        let iat = self.claims["iat"].as_u64().unwrap();
        let other = json!(self.stranger.key_id());
        let mut changes = vec![
            ("exp", json!(iat.saturating_sub(1))),
            ("exp", json!(iat + 100_000)),
            ("exp", json!(u64::MAX)),
            ("exp", json!(1e300)),
            ("exp", json!(-1)),
            ("exp", json!((iat + 30).to_string())),
            ("exp", json!([iat + 30])),
            ("iat", json!(iat + 3_600)),
            ("iat", json!(0)),
            ("iat", json!(-1)),
            ("nbf", json!(iat + 3_600)),
            ("roles", json!(["owner"])),
            ("iss", json!("urn:another")),
            ("aud", json!("urn:another")),
            ("aud", json!([self.claims["aud"], "urn:another"])),
            ("sub", other),
            ("sub", json!("' OR '1'='1")),
        ];
        for claim in ["iss", "sub", "aud", "iat", "exp", "jti"] {
            changes.extend([(claim, Value::Null), (claim, json!({})), (claim, json!(""))]);
        }
        let header = self.header.to_string();
        let mut vectors: Vec<Vector> = changes
            .into_iter()
            .map(|(claim, value)| {
                let mut claims = self.claims.clone();
                claims[claim] = value.clone();
                let jwt = self.signed(&header, &claims.to_string());
                Vector { change: format!("claims: {claim} is {value}"), jwt }
            })
            .collect();
        for claim in ["iss", "sub", "aud", "iat", "exp", "jti"] {
            let mut claims = self.claims.clone();
            claims.as_object_mut().unwrap().remove(claim);
            let jwt = self.signed(&header, &claims.to_string());
            vectors.push(Vector { change: format!("claims without {claim}"), jwt });
        }
        let claims = self.claims.to_string();
        let twice = claims.replacen('{', &format!("{{\"exp\":{},", iat + 40), 1);
        let nested = json!(self.good()).to_string();
        for claims in [twice, nested, format!("[{claims}]"), format!("{claims}{claims}"), "".into()]
        {
            let jwt = self.signed(&header, &claims);
            vectors.push(Vector { change: format!("claims: {claims}"), jwt });
        }
        vectors
    }

    /// Vectors of the good header and claims with another signature.
    fn signature_vectors(&self) -> Vec<Vector> {
        let input = self.signing_input(&self.header.to_string(), &self.claims.to_string());
        let good = self.signer.sign(input.as_bytes());
        let mut flipped = [good, good, good];
        flipped[0][0] ^= 1;
        flipped[1][32] ^= 1;
        flipped[2][63] ^= 0x80;
        let mut raised = good;
        add_order(&mut raised);
        // The neutral element as nonce, with a scalar of zero: valid under a public key of small
        // order.
        let mut neutral = [0; 64];
        neutral[0] = 1;
        let signatures: [(&str, Vec<u8>); 11] = [
            ("by another key", self.stranger.sign(input.as_bytes()).to_vec()),
            ("of another text", self.signer.sign(b"another text").to_vec()),
            ("with a changed nonce", flipped[0].to_vec()),
            ("with a changed scalar", flipped[1].to_vec()),
            ("with a changed last bit", flipped[2].to_vec()),
            ("with a scalar raised by the group's order", raised.to_vec()),
            ("of zeros", vec![0; 64]),
            ("of the neutral element", neutral.to_vec()),
            ("without its last byte", good[..63].to_vec()),
            ("with a byte more", [&good[..], &[0]].concat()),
            ("twice", [good, good].concat()),
        ];
        signatures
            .into_iter()
            .map(|(change, signature)| {
                let jwt = format!("{input}.{}", BASE64URL_NOPAD.encode(&signature));
                Vector { change: format!("signature {change}"), jwt }
            })
            .collect()
    }

    /// Vectors with the good JWT's bytes in another encoding.
    fn text_vectors(&self) -> Vec<Vector> {
        let good = self.good();
        let parts: Vec<&str> = good.split('.').collect();
        let signature = BASE64URL_NOPAD.decode(parts[2].as_bytes()).unwrap();
        let padded = BASE64URL.encode(&signature);
        // Base64url encodes 64 bytes in 86 characters. The last character has four unused bits, so
        // another last character can encode the same bytes.
        let last = parts[2].chars().last().unwrap();
        let alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
        let next = alphabet.chars().nth(alphabet.find(last).unwrap() | 1).unwrap();
        let spare_bits = format!("{}{next}", &good[..good.len() - 1]);
        let flattened =
            json!({ "protected": parts[0], "payload": parts[1], "signature": parts[2] });
        [
            ("with padding", format!("{}.{}.{padded}", parts[0], parts[1])),
            ("with spare bits", spare_bits),
            ("without a signature part", format!("{}.{}", parts[0], parts[1])),
            ("with a fourth part", format!("{good}.{}", parts[2])),
            ("with five parts, as a JWE", format!("{good}.{}.{}", parts[1], parts[2])),
            ("with a dot before it", format!(".{good}")),
            ("with a dot after it", format!("{good}.")),
            ("with a comma after it", format!("{good},{good}")),
            ("in the JSON serialization", flattened.to_string()),
            ("in quotes", format!("\"{good}\"")),
            ("with another separator", good.replace('.', "%2E")),
            ("reversed", good.chars().rev().collect()),
            ("overlong", format!("{good}{}", "A".repeat(8_000))),
        ]
        .into_iter()
        .map(|(change, jwt)| Vector { change: format!("text {change}"), jwt })
        .collect()
    }
}

/// Adds the group's order to the scalar of a signature. Many verifiers accept the result.
fn add_order(signature: &mut [u8; 64]) {
    let mut carry = 0;
    for (byte, order) in signature[32..].iter_mut().zip(ED25519_ORDER) {
        let sum = u16::from(*byte) + u16::from(order) + carry;
        (*byte, carry) = (sum as u8, sum >> 8);
    }
}

/// Percent-encodes every byte that isn't a letter or digit.
fn percent_encoded(text: &str) -> String {
    let encoded = |byte: u8| match byte.is_ascii_alphanumeric() {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    text.bytes().map(encoded).collect()
}

async fn send_assertion(
    world: &TestInstallation,
    service: &RunningService,
    jwt: &str,
) -> (u16, String) {
    let [kind, jwt] = [JWT_BEARER, jwt].map(percent_encoded);
    let form = format!("grant_type={kind}&assertion={jwt}");
    let headers = [("content-type", "application/x-www-form-urlencoded")];
    send_with(world, service, Some(&world.owner), "POST", "/v1/token", &headers, form).await
}

async fn send_access_token(
    world: &TestInstallation,
    service: &RunningService,
    jwt: &str,
) -> (u16, String) {
    let bearer = format!("Bearer {jwt}");
    let headers = [("authorization", bearer.as_str())];
    let key = Some(&*world.owner);
    send_with(world, service, key, "GET", "/v1/admins", &headers, String::new()).await
}

fn code(body: &str) -> Option<Code> {
    serde_json::from_str::<Problem>(body).ok().map(|problem| problem.code)
}

#[tokio::test]
async fn every_changed_assertion_is_refused() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let stranger = SigningKey::generate();
    let fresh_claims = || {
        let (issuer, now) = (&service.app().issuer, service.app().clock.seconds());
        let assertion = Assertion::sign(&world.owner, issuer, now);
        assertion.claims_unverified::<Value>(JwsType::Assertion).unwrap()
    };
    let template = Template::new(JwsType::Assertion, &world.owner, &stranger, fresh_claims());
    let vectors = template.vectors();
    for Vector { change, jwt } in &vectors {
        let (status, body) = send_assertion(&world, &service, jwt).await;
        let expected = [(401, Some(Code::AssertionRefused)), (400, Some(Code::InvalidRequest))];
        assert!(expected.contains(&(status, code(&body))), "{change}: {status} {body}");
    }
    println!("{} changed assertions were refused", vectors.len());
    // The service accepts an assertion once, so no vector may have used up the template's
    // assertion.
    assert_eq!(send_assertion(&world, &service, &template.good()).await.0, 200);
    service.stop().await;
}

#[tokio::test]
async fn every_changed_access_token_is_refused() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let stranger = SigningKey::generate();
    let good = service.app().issue_access_token(world.owner.public(), ClientKind::Admin);
    let claims: Value = good.access_token.claims_unverified(JwsType::Access).unwrap();
    let signer = service.app().keys.signer();
    let template = Template::new(JwsType::Access, &signer.key, &stranger, claims);
    let mut vectors = template.vectors();
    for (claim, value) in [
        ("cnf", Value::Null),
        ("cnf", json!({})),
        ("cnf", json!({ "jkt": stranger.key_id() })),
        ("cnf", json!({ "jkt": world.owner.key_id(), "jwk": {} })),
        ("subject", json!("owner")),
        ("subject", json!({ "agent": "x" })),
        ("subject", Value::Null),
    ] {
        let mut claims = template.claims.clone();
        claims[claim] = value.clone();
        let jwt = template.signed(&template.header.to_string(), &claims.to_string());
        vectors.push(Vector { change: format!("claims: {claim} is {value}"), jwt });
    }
    let claims: AccessToken = good.access_token.claims_unverified(JwsType::Access).unwrap();
    let own = Vector {
        change: "signed by the caller".into(),
        jwt: claims.sign(&world.owner).to_string(),
    };
    let assertion: Jws = Assertion::sign(&world.owner, &service.app().issuer, claims.iat);
    vectors.extend([own, Vector { change: "an assertion".into(), jwt: assertion.to_string() }]);
    for Vector { change, jwt } in &vectors {
        let (status, body) = send_access_token(&world, &service, jwt).await;
        let expected = [(401, Some(Code::TokenInvalid)), (401, Some(Code::TokenMissing))];
        assert!(expected.contains(&(status, code(&body))), "{change}: {status} {body}");
    }
    println!("{} changed access tokens were refused", vectors.len());
    assert_eq!(send_access_token(&world, &service, &template.good()).await.0, 200);
    service.stop().await;
}
