use data_encoding::BASE64URL_NOPAD;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

#[derive(Debug, PartialEq, serde::Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Payload {
    text: String,
    exp: u64,
}

fn payload() -> Payload {
    Payload { text: "héllo".into(), exp: 7 }
}

/// Returns a JWS with a valid signature over any header and payload.
fn forge(key: &SigningKey, header: &str, payload: &str) -> String {
    let mut text = BASE64URL_NOPAD.encode(header.as_bytes());
    text.push('.');
    text.push_str(&BASE64URL_NOPAD.encode(payload.as_bytes()));
    let signature = BASE64URL_NOPAD.encode(&key.sign(text.as_bytes()));
    format!("{text}.{signature}")
}

fn header(key: &SigningKey) -> Value {
    json!({ "alg": "EdDSA", "typ": "muster-ack+jwt", "kid": key.key_id() })
}

#[test]
fn what_is_signed_verifies_and_keeps_its_bytes() {
    let key = SigningKey::generate();
    let jws = Jws::sign(JwsType::Ack, &key, &payload());
    let again: Jws = jws.as_str().parse().unwrap();
    assert_eq!((again.typ(), again.kid()), (JwsType::Ack, &key.key_id()));
    assert_eq!(again.hash(), Digest::of(jws.as_str().as_bytes()));
    assert_eq!(again.verify(JwsType::Ack, key.public()), Ok(payload()));
}

#[test]
fn a_message_of_another_kind_is_refused() {
    let key = SigningKey::generate();
    let jws = Jws::sign(JwsType::Release, &key, &payload());
    let refused = JwsError::WrongType { expected: JwsType::Ack, found: JwsType::Release };
    assert_eq!(jws.verify::<Payload>(JwsType::Ack, key.public()), Err(refused.clone()));
    assert_eq!(jws.claims_unverified::<Payload>(JwsType::Ack), Err(refused));
}

#[test]
fn a_key_that_is_not_listed_is_refused() {
    let (key, other) = (SigningKey::generate(), SigningKey::generate());
    let jws = Jws::sign(JwsType::Ack, &key, &payload());
    let unknown = Err(JwsError::UnknownKey(key.key_id()));
    assert_eq!(jws.verify::<Payload>(JwsType::Ack, other.public()), unknown);
    assert_eq!(jws.verify_any::<Payload>(JwsType::Ack, [other.public()]), unknown);
    assert_eq!(jws.verify_any(JwsType::Ack, [other.public(), key.public()]), Ok(payload()));
}

#[test]
fn a_foreign_signature_under_a_listed_kid_is_refused() {
    let (key, thief) = (SigningKey::generate(), SigningKey::generate());
    let text = forge(&thief, &header(&key).to_string(), r#"{"text":"x","exp":1}"#);
    let jws: Jws = text.parse().unwrap();
    assert_eq!(jws.verify::<Payload>(JwsType::Ack, key.public()), Err(JwsError::BadSignature));
}

/// Attacks of RFC 8725, section 2: each JWS has a valid signature, but is refused because of its
/// header.
#[test]
fn headers_with_other_or_additional_members_are_refused() {
    let key = SigningKey::generate();
    let kid = key.key_id();
    let with = |member: &str, value: Value| {
        let mut header = header(&key);
        header[member] = value;
        header.to_string()
    };
    let without = |member: &str| {
        let mut header = header(&key);
        header.as_object_mut().unwrap().remove(member);
        header.to_string()
    };
    let headers = [
        with("alg", json!("none")),
        with("alg", json!("None")),
        with("alg", json!("HS256")),
        with("alg", json!("ES256")),
        with("alg", json!("eddsa")),
        with("alg", json!(["EdDSA"])),
        with("alg", Value::Null),
        with("typ", json!("JWT")),
        with("typ", json!("MUSTER-ACK+JWT")),
        with("typ", json!("application/muster-ack+jwt")),
        with("kid", json!("../../etc/passwd")),
        with("kid", json!("https://evil.example/key")),
        with("kid", json!("' OR 1=1 --")),
        with("kid", json!("")),
        with("kid", json!(1)),
        with("crit", json!(["exp"])),
        with("crit", json!([])),
        with("b64", json!(false)),
        with("zip", json!("DEF")),
        with("cty", json!("JWT")),
        with("jku", json!("https://evil.example/jwks")),
        with("jwk", json!({ "kty": "OKP", "crv": "Ed25519", "x": key.public().jwk_x() })),
        with("x5u", json!("https://evil.example/cert")),
        with("x5c", json!(["MII"])),
        without("alg"),
        without("typ"),
        without("kid"),
        format!(r#"{{"alg":"EdDSA","alg":"EdDSA","typ":"muster-ack+jwt","kid":"{kid}"}}"#),
        format!(r#"{{"alg":"EdDSA","typ":"muster-ack+jwt","kid":"{kid}","kid":"{kid}"}}"#),
        format!(r#"{{"alg":"EdDSA","typ":"at+jwt","typ":"muster-ack+jwt","kid":"{kid}"}}"#),
        format!(r#"{{"alg":"EdDSA","typ":"muster-ack+jwt","kid":"{kid}"}} x"#),
        format!(r#"["EdDSA","muster-ack+jwt","{kid}",1]"#),
        format!(r#"["EdDSA","muster-ack+jwt","{kid}"]"#),
        "{}".into(),
        "null".into(),
        "".into(),
    ];
    for header in headers {
        let refused = forge(&key, &header, r#"{"text":"x","exp":1}"#).parse::<Jws>();
        assert!(matches!(refused, Err(JwsError::Header(_))), "{header}: {refused:?}");
    }
}

#[test]
fn payloads_with_unknown_members_are_refused() {
    let key = SigningKey::generate();
    let header = header(&key).to_string();
    for body in [
        r#"{"text":"x","exp":"7"}"#,
        r#"{"text":"x","exp":"never"}"#,
        r#"{"text":"x","exp":7.5}"#,
        r#"{"text":"x","exp":-1}"#,
        r#"{"text":"x","exp":1e3}"#,
        r#"{"text":"x","exp":null}"#,
        r#"{"text":"x","exp":99999999999999999999}"#,
        r#"{"text":"x"}"#,
        r#"{"text":"x","exp":7,"exp":8}"#,
        r#"{"text":"x","exp":7,"admin":true}"#,
        r#"{"text":"x","exp":7}{"text":"y","exp":7}"#,
        "[]",
        r#"["x",7]"#,
        "\u{0}",
    ] {
        let jws: Jws = forge(&key, &header, body).parse().unwrap();
        let refused = jws.verify::<Payload>(JwsType::Ack, key.public());
        assert!(matches!(refused, Err(JwsError::Payload(_))), "{body}: {refused:?}");
    }
}

#[test]
fn only_one_text_of_the_same_bytes_is_accepted() {
    let key = SigningKey::generate();
    let jws = Jws::sign(JwsType::Ack, &key, &payload());
    let parts: Vec<_> = jws.as_str().split('.').collect();
    let (h, p, s) = (parts[0], parts[1], parts[2]);
    for text in [
        format!("{h}=.{p}.{s}"),
        format!("{h}.{p}==.{s}"),
        format!(" {h}.{p}.{s}"),
        format!("{h}.{p}.{s}\n"),
        format!("{h}. {p}.{s}"),
        format!("{h}.{p}"),
        format!("{h}.{p}."),
        format!("{h}..{s}"),
        format!("{h}.{p}.{s}.{s}"),
        format!("{h}.{p}.{}", &s[..40]),
        format!("{h}.{p}.{}+", &s[..s.len() - 1]),
        String::new(),
        "..".into(),
    ] {
        assert!(text.parse::<Jws>().is_err(), "{text:?}");
    }
}

/// Base64url of a signature's 64 bytes leaves four bits unused in the last character. Lenient
/// decoders accept any value of these bits. So another text, with another hash, would have the same
/// signature.
#[test]
fn bits_after_the_signature_are_refused() {
    let key = SigningKey::generate();
    let text = Jws::sign(JwsType::Ack, &key, &payload()).as_str().to_owned();
    let alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let last = alphabet.find(text.chars().next_back().unwrap()).unwrap();
    let other = alphabet.as_bytes()[last | 1] as char;
    let changed = format!("{}{other}", &text[..text.len() - 1]);
    assert_ne!(changed, text);
    assert_eq!(changed.parse::<Jws>(), Err(JwsError::Malformed));
}

#[test]
fn an_overlong_text_is_refused_before_it_is_decoded() {
    let junk = "a".repeat(MAX_JWS + 1);
    assert_eq!(junk.parse::<Jws>(), Err(JwsError::TooLong { limit: MAX_JWS }));
    let key = SigningKey::generate();
    let long = Payload { text: "x".repeat(4096), exp: 1 };
    let jws = Jws::sign(JwsType::Ack, &key, &long);
    let limit = JwsType::Ack.max_bytes();
    assert_eq!(jws.as_str().parse::<Jws>(), Err(JwsError::TooLong { limit }));
}

#[test]
fn debug_shows_no_bearer_token() {
    let key = SigningKey::generate();
    let jws = Jws::sign(JwsType::Access, &key, &payload());
    assert!(!format!("{jws:?}").contains(jws.as_str().rsplit('.').next().unwrap()));
}

proptest! {
    #[test]
    fn any_one_changed_byte_is_noticed(at in 0usize..300, to in "[A-Za-z0-9._-]") {
        let key = SigningKey::from_seed(&[1; 32]);
        let text = Jws::sign(JwsType::Ack, &key, &payload()).as_str().to_owned();
        let at = at % text.len();
        let mut changed = text.clone();
        changed.replace_range(at..=at, &to);
        prop_assume!(changed != text);
        let verified = changed
            .parse::<Jws>()
            .and_then(|jws| jws.verify::<Payload>(JwsType::Ack, key.public()));
        prop_assert!(verified.is_err());
    }

    #[test]
    fn no_text_makes_the_jws_parser_panic(text in "\\PC{0,200}|[A-Za-z0-9_-]{0,80}(\\.[A-Za-z0-9_-]{0,80}){0,3}") {
        prop_assert!(text.parse::<Jws>().is_err());
    }
}
