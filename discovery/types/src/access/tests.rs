use super::*;

const NOW: u64 = 1_800_000_000;
const ISSUER: &str = "urn:muster:discovery:test";

fn access(service: &SigningKey, client: &SigningKey, change: impl Fn(&mut AccessToken)) -> Jws {
    let mut token = AccessToken {
        iss: ISSUER.into(),
        aud: ISSUER.into(),
        sub: client.key_id(),
        subject: ClientKind::Admin,
        iat: NOW,
        exp: NOW + MAX_ACCESS_SECONDS,
        jti: Nonce::random(),
        cnf: Confirmation { jkt: client.key_id() },
    };
    change(&mut token);
    token.sign(service)
}

#[test]
fn an_assertion_is_valid_for_a_minute() {
    let key = SigningKey::generate();
    let jws = Assertion::sign(&key, ISSUER, NOW);
    let verify = |now| Assertion::verify(&jws, key.public(), ISSUER, now);
    assert_eq!(verify(NOW).unwrap().iss, key.key_id());
    assert!(verify(NOW + 59).is_ok());
    for now in [NOW + 60, NOW - 3, 0] {
        assert!(matches!(verify(now), Err(AccessError::Time { .. })), "{now}");
    }
}

#[test]
fn an_assertion_over_another_connection_is_refused() {
    let (key, thief) = (SigningKey::generate(), SigningKey::generate());
    let jws = Assertion::sign(&key, ISSUER, NOW);
    let refused = Assertion::verify(&jws, thief.public(), ISSUER, NOW);
    assert_eq!(refused, Err(AccessError::OtherTlsKey));
}

#[test]
fn an_assertion_for_another_service_or_subject_is_refused() {
    let (key, other) = (SigningKey::generate(), SigningKey::generate());
    let jws = Assertion::sign(&key, ISSUER, NOW);
    let refused = Assertion::verify(&jws, key.public(), "urn:muster:discovery:other", NOW);
    assert_eq!(refused, Err(AccessError::Jws(JwsError::Parties)));
    let good: Assertion = jws.claims_unverified(JwsType::Assertion).unwrap();
    for bad in [
        Assertion { sub: other.key_id(), ..good.clone() },
        Assertion { iss: other.key_id(), ..good.clone() },
    ] {
        let jws = Jws::sign(JwsType::Assertion, &key, &bad);
        let refused = Assertion::verify(&jws, key.public(), ISSUER, NOW);
        assert_eq!(refused, Err(AccessError::Jws(JwsError::Parties)));
    }
    let eternal = Jws::sign(JwsType::Assertion, &key, &Assertion { exp: NOW + 61, ..good });
    let refused = Assertion::verify(&eternal, key.public(), ISSUER, NOW);
    assert_eq!(refused, Err(AccessError::TooLong(60)));
}

#[test]
fn an_access_token_is_refused_on_a_connection_with_another_key() {
    let (service, client, thief) =
        (SigningKey::generate(), SigningKey::generate(), SigningKey::generate());
    let jws = access(&service, &client, |_| ());
    let keys = [*service.public()];
    let verify = |key: &SigningKey| AccessToken::verify(&jws, &keys, ISSUER, key.public(), NOW);
    assert_eq!(verify(&client).unwrap().sub, client.key_id());
    assert_eq!(verify(&thief), Err(AccessError::OtherTlsKey));
}

#[test]
fn an_access_token_that_the_client_signed_is_refused() {
    let (service, client) = (SigningKey::generate(), SigningKey::generate());
    let jws = access(&client, &client, |_| ());
    let refused = AccessToken::verify(&jws, &[*service.public()], ISSUER, client.public(), NOW);
    assert_eq!(refused, Err(AccessError::Jws(JwsError::UnknownKey(client.key_id()))));
}

#[test]
fn an_assertion_is_no_access_token() {
    let client = SigningKey::generate();
    let jws = Assertion::sign(&client, ISSUER, NOW);
    let refused = AccessToken::verify(&jws, [client.public()], ISSUER, client.public(), NOW);
    assert!(matches!(refused, Err(AccessError::Jws(JwsError::WrongType { .. }))));
}

#[test]
fn each_claim_of_an_access_token_is_checked() {
    let (service, client) = (SigningKey::generate(), SigningKey::generate());
    let other = SigningKey::generate();
    let refused = |change: &dyn Fn(&mut AccessToken)| {
        let jws = access(&service, &client, change);
        AccessToken::verify(&jws, [service.public()], ISSUER, client.public(), NOW).err()
    };
    assert_eq!(refused(&|_| ()), None);
    assert_eq!(refused(&|t| t.iss = "x".into()), Some(AccessError::Jws(JwsError::Parties)));
    assert_eq!(refused(&|t| t.aud = "x".into()), Some(AccessError::Jws(JwsError::Parties)));
    assert_eq!(refused(&|t| t.sub = other.key_id()), Some(AccessError::OtherTlsKey));
    assert_eq!(refused(&|t| t.cnf.jkt = other.key_id()), Some(AccessError::OtherTlsKey));
    assert_eq!(refused(&|t| t.exp += 1), Some(AccessError::TooLong(600)));
    assert!(matches!(
        refused(&|t| (t.iat, t.exp) = (NOW - 600, NOW)),
        Some(AccessError::Time { .. })
    ));
    assert!(matches!(
        refused(&|t| (t.iat, t.exp) = (NOW + 3, NOW + 60)),
        Some(AccessError::Time { .. })
    ));
}

#[test]
fn a_token_that_was_verified_before_is_refused_after_its_end_and_with_another_key() {
    let (service, client, thief) =
        (SigningKey::generate(), SigningKey::generate(), SigningKey::generate());
    let jws = access(&service, &client, |_| ());
    let token =
        AccessToken::verify(&jws, &[*service.public()], ISSUER, client.public(), NOW).unwrap();
    assert_eq!(token.check_again(client.public(), NOW + 1), Ok(()));
    assert_eq!(token.check_again(thief.public(), NOW + 1), Err(AccessError::OtherTlsKey));
    for now in [NOW + MAX_ACCESS_SECONDS, NOW - 3] {
        let refused = token.check_again(client.public(), now);
        assert!(matches!(refused, Err(AccessError::Time { .. })), "{now}");
    }
}
