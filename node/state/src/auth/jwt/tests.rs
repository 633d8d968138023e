//! Tests with keys that OpenSSL made for these tests alone, and with tokens that etcd's JWT library
//! signed with them.

use std::path::Path;

use data_encoding::{BASE64, BASE64URL_NOPAD};
use serde_json::{Value, json};

use super::*;

/// Expiry time of the tokens in `etcd-tokens.txt`: the year 2100.
const UNTIL: i64 = 4_102_444_800;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/auth/jwt/fixtures").join(name)
}

fn options(method: Algorithm, private: &str, public: &str) -> JwtOptions {
    let file = |name: &str| (!name.is_empty()).then(|| fixture(name));
    let (private_key, public_key) = (file(private), file(public));
    JwtOptions { method, public_key, private_key, ttl: Duration::from_secs(300) }
}

fn load(method: Algorithm, private: &str, public: &str) -> Result<Jwt, String> {
    Jwt::load(&options(method, private, public)).map_err(|error| error.to_string())
}

/// Returns the file names of the method's private key, and of its public key if it has one.
fn files(method: Algorithm) -> (&'static str, &'static str) {
    match method {
        Algorithm::HS256 | Algorithm::HS384 | Algorithm::HS512 => ("hmac.key", ""),
        Algorithm::ES256 => ("p256.pem", "p256-pub.pem"),
        Algorithm::ES384 => ("p384.pem", "p384-pub.pem"),
        Algorithm::EdDSA => ("ed.pem", "ed-pub.pem"),
        _ => ("rsa.pem", "rsa-pub.pem"),
    }
}

/// Signs a token with these parts, using the HMAC key.
fn signed(header: &Value, payload: &Value) -> String {
    let key =
        ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &std::fs::read(fixture("hmac.key")).unwrap());
    let part = |part: &Value| BASE64URL_NOPAD.encode(part.to_string().as_bytes());
    let text = format!("{}.{}", part(header), part(payload));
    let tag = ring::hmac::sign(&key, text.as_bytes());
    format!("{text}.{}", BASE64URL_NOPAD.encode(tag.as_ref()))
}

#[test]
fn tokens_signed_by_etcds_library_are_verified_with_either_key() {
    let tokens = std::fs::read_to_string(fixture("etcd-tokens.txt")).unwrap();
    assert_eq!(tokens.lines().count(), 12);
    for line in tokens.lines() {
        let (name, token) = line.split_once(' ').unwrap();
        let method = name.parse().unwrap();
        let (private, public) = files(method);
        let mut readers =
            vec![load(method, private, "").unwrap(), load(method, private, public).unwrap()];
        if !public.is_empty() {
            let checks = load(method, "", public).unwrap();
            assert_eq!(checks.sign("alice", 7, 0), None, "{name}");
            readers.push(checks);
        }
        for jwt in readers {
            let claims = jwt.verify(token).unwrap();
            assert_eq!((claims.user.as_str(), claims.revision), ("alice", 7), "{name}");
            assert!(claims.are_valid_at(UNTIL - 1) && !claims.are_valid_at(UNTIL), "{name}");
            // PSS and ECDSA signatures are randomised, so they can't be compared with the fixture.
            if !name.starts_with("PS") && !name.starts_with("ES") {
                let own = jwt.sign("alice", 7, UNTIL - 300);
                assert!(own.is_none_or(|own| own.as_str() == token), "{name}");
            }
            let own = jwt.sign("bob", 9, 1_000);
            if let Some(own) = own {
                let claims = jwt.verify(&own).unwrap();
                assert_eq!((claims.user.as_str(), claims.revision), ("bob", 9), "{name}");
                assert!(claims.are_valid_at(1_299) && !claims.are_valid_at(1_300), "{name}");
            }
            let (head, rest) = token.split_at(token.len() - 8);
            let other = if rest.starts_with('A') { 'B' } else { 'A' };
            let changed = format!("{head}{other}{}", &rest[1..]);
            assert_eq!(jwt.verify(&changed), Err(TokenError::Signature), "{name}");
        }
    }
}

#[test]
fn keys_are_read_in_every_format_that_etcd_accepts() {
    for (method, private, public) in [
        (Algorithm::RS256, "rsa-pkcs8.pem", "rsa-pub-pkcs1.pem"),
        (Algorithm::PS384, "rsa.pem", "rsa-cert.pem"),
        (Algorithm::ES256, "p256-pkcs8.pem", "p256-pub.pem"),
    ] {
        let jwt = load(method, private, public).unwrap();
        let token = jwt.sign("a", 1, 0).unwrap();
        assert!(load(method, "", public).unwrap().verify(&token).is_ok(), "{private} {public}");
    }
}

#[test]
fn unusable_keys_are_refused_with_advice() {
    for (method, private, public, text) in [
        (
            Algorithm::RS256,
            "",
            "",
            "RS256 needs priv-key=FILE to sign tokens, or at least pub-key=FILE",
        ),
        (Algorithm::HS256, "", "", "HS256 needs priv-key=FILE, whose bytes are the key"),
        (Algorithm::HS256, "", "rsa-pub.pem", "HS256 needs priv-key=FILE"),
        (
            Algorithm::RS256,
            "p256.pem",
            "",
            "give an RSA key of 2048 to 8192 bits in PEM, not encrypted",
        ),
        (Algorithm::RS256, "rsa-pub.pem", "", "holds no key that RS256 can use"),
        (Algorithm::RS256, "", "rsa.pem", "pub-key "),
        (Algorithm::RS256, "hmac.key", "", "holds no key"),
        (Algorithm::ES256, "p384.pem", "", "give a P-256 key in PEM"),
        (Algorithm::ES384, "", "p256-pub.pem", "give a P-384 key in PEM"),
        (Algorithm::ES256, "", "rsa-cert.pem", "holds no key that ES256"),
        (Algorithm::EdDSA, "rsa-pkcs8.pem", "", "give an Ed25519 key in PEM"),
        (Algorithm::EdDSA, "", "p256-pub.pem", "holds no key that EdDSA"),
        (Algorithm::ES256, "none.pem", "", "cannot read priv-key "),
        (Algorithm::ES256, "p256.pem", "none.pem", "cannot read pub-key "),
        (Algorithm::ES256, "p256.pem", "p256-other.pem", "don't belong together"),
    ] {
        let error = load(method, private, public).unwrap_err();
        assert!(error.contains(text), "{text} in {error}");
        assert!(error.starts_with("--auth-token: "), "{error}");
    }
}

#[test]
fn an_empty_key_file_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for method in
        [Algorithm::HS256, Algorithm::HS384, Algorithm::HS512, Algorithm::RS256, Algorithm::EdDSA]
    {
        let private_key = Some(file.path().to_owned());
        let loaded = Jwt::load(&JwtOptions { private_key, ..options(method, "", "") });
        assert!(loaded.is_err(), "{method:?}");
    }
}

#[test]
fn an_rsa_key_of_unsupported_size_is_refused() {
    for (bits, is_taken) in
        [(1024, false), (2040, false), (2048, true), (8192, true), (8200, false)]
    {
        // A modulus of `bits` bits, and the exponent 65537. The key is never used to sign.
        let modulus = [&[0][..], &vec![0xff; bits / 8]].concat();
        let integer = |bytes: &[u8]| der(0x02, bytes);
        let numbers = [integer(&modulus), integer(&[1, 0, 1])].concat();
        let pem = format!(
            "-----BEGIN RSA PUBLIC KEY-----\n{}\n-----END RSA PUBLIC KEY-----\n",
            BASE64.encode(&der(0x30, &numbers))
        );
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), pem).unwrap();
        let public_key = Some(file.path().to_owned());
        let loaded = Jwt::load(&JwtOptions { public_key, ..options(Algorithm::RS256, "", "") });
        assert_eq!(loaded.is_ok(), is_taken, "{bits}");
    }
}

/// Encodes one DER value, with a two-byte length.
fn der(tag: u8, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(value.len()).unwrap().to_be_bytes();
    [&[tag, 0x82], &length[..], value].concat()
}

#[test]
fn a_key_file_above_the_size_limit_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for (more, is_taken) in [(0, true), (1, false)] {
        std::fs::write(file.path(), vec![7; (64 << 10) + more]).unwrap();
        let private_key = Some(file.path().to_owned());
        let loaded = Jwt::load(&JwtOptions { private_key, ..options(Algorithm::HS256, "", "") });
        assert_eq!(loaded.is_ok(), is_taken, "{more}");
    }
}

#[test]
fn the_settings_and_not_the_token_choose_the_algorithm() {
    let payload = json!({ "username": "root", "revision": 9, "exp": UNTIL });
    let part = |part: &Value| BASE64URL_NOPAD.encode(part.to_string().as_bytes());
    let rsa = load(Algorithm::RS256, "", "rsa-pub.pem").unwrap();
    // The public key is no secret: if it were accepted as an HMAC key, anybody could sign.
    let public = std::fs::read(fixture("rsa-pub.pem")).unwrap();
    for alg in ["HS256", "RS256", "hs256", "none", "None", ""] {
        let text = format!("{}.{}", part(&json!({ "alg": alg })), part(&payload));
        let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &public);
        let tag = BASE64URL_NOPAD.encode(ring::hmac::sign(&key, text.as_bytes()).as_ref());
        for signature in [tag.as_str(), ""] {
            let token = format!("{text}.{signature}");
            let expected = if alg == "RS256" { TokenError::Signature } else { TokenError::Header };
            assert_eq!(rsa.verify(&token), Err(expected), "{alg} {signature}");
        }
    }
    let tokens = std::fs::read_to_string(fixture("etcd-tokens.txt")).unwrap();
    let of = |name: &str| tokens.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim();
    assert_eq!(rsa.verify(of("PS256 ")), Err(TokenError::Header));
    assert!(rsa.verify(of("RS256 ")).is_ok());
    let other = load(Algorithm::HS384, "hmac.key", "").unwrap();
    assert_eq!(other.verify(of("HS256 ")), Err(TokenError::Header));
}

#[test]
fn a_malformed_token_is_refused() {
    let jwt = load(Algorithm::HS256, "hmac.key", "").unwrap();
    let good = jwt.sign("a", 1, 0).unwrap();
    let parts: Vec<&str> = good.split('.').collect();
    let (first, second, third) = (parts[0], parts[1], parts[2]);
    for token in [
        String::new(),
        ".".to_owned(),
        "..".to_owned(),
        format!("{first}.{second}"),
        format!("{first}.{second}.{third}.x"),
        format!("{first}.{second}.{third}="),
        format!("{first}.{second}.{third} "),
        format!("é.{second}.{third}"),
        "a".repeat(MAX_TOKEN_BYTES + 1),
        "abcdefghijklmnop.7".to_owned(),
    ] {
        assert_eq!(jwt.verify(&token), Err(TokenError::Malformed), "{token}");
    }
    // A token just below the maximum length is read, and refused only for its contents.
    assert!(jwt.verify(&format!("{first}.{}.{third}", "A".repeat(MAX_TOKEN_BYTES - 100))).is_err());
}

#[test]
fn claims_are_read_as_etcd_reads_them() {
    let jwt = load(Algorithm::HS256, "hmac.key", "").unwrap();
    let header = json!({ "alg": "HS256", "typ": "JWT" });
    let read = |payload: &Value| jwt.verify(&signed(&header, payload));
    let claims = read(&json!({ "username": "a", "revision": 3 })).unwrap();
    assert!(claims.are_valid_at(i64::MAX), "without a time it counts for ever");
    let claims = read(&json!({ "username": "a", "revision": 3, "exp": 10.9, "nbf": 5 })).unwrap();
    assert_eq!([4, 5, 9, 10].map(|now| claims.are_valid_at(now)), [false, true, true, false]);
    let odd = [(json!(-1), 0), (json!(7.9), 7), (json!(1e300), u64::MAX)];
    for (revision, is) in odd {
        assert_eq!(read(&json!({ "username": "a", "revision": revision })).unwrap().revision, is);
    }
    for payload in [
        json!({}),
        json!([]),
        json!({ "username": "a" }),
        json!({ "revision": 1 }),
        json!({ "username": 1, "revision": 1 }),
        json!({ "username": null, "revision": 1 }),
        json!({ "username": "a", "revision": "1" }),
        json!({ "username": "a", "revision": null }),
        json!({ "username": "a", "revision": 1, "exp": "never" }),
        json!({ "username": "a", "revision": 1, "exp": null }),
        json!({ "username": "a", "revision": 1, "nbf": [] }),
    ] {
        assert_eq!(read(&payload), Err(TokenError::Claims), "{payload}");
    }
    let payload = json!({ "username": "a", "revision": 1 });
    for header in [json!({ "alg": "HS256", "crit": ["exp"] }), json!({ "alg": "HS512" })] {
        assert_eq!(jwt.verify(&signed(&header, &payload)), Err(TokenError::Header), "{header}");
    }
    assert_eq!(jwt.verify(&signed(&json!({}), &payload)), Err(TokenError::Malformed));
}

#[test]
fn the_debug_output_shows_no_key() {
    let jwt = load(Algorithm::HS256, "hmac.key", "").unwrap();
    assert_eq!(format!("{jwt:?}"), "Jwt { method: HS256, .. }");
}
