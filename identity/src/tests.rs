use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

/// Time of the tests, in seconds since 1970.
const NOW: u64 = 1_800_000_000;
/// Audience of the tests' agent.
const BOUND: &str = "muster:cluster:agent";
const SUBSCRIPTION: &str = "0b1f6471-1bf0-4dda-aec3-cb9272f09590";

/// Trusts the fixtures' key for all clouds.
fn keys() -> TrustedKeys {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("aws.pem"), fixtures::CERTIFICATE).unwrap();
    std::fs::write(folder.path().join("gcp.json"), fixtures::jwks()).unwrap();
    std::fs::write(folder.path().join("azure.json"), fixtures::jwks()).unwrap();
    TrustedKeys::load(folder.path()).unwrap()
}

fn required(cloud: Cloud, account: &str) -> Requirement {
    Requirement {
        cloud,
        accounts: vec![account.to_owned()],
        regions: Vec::new(),
        tenant: None,
        audience: None,
        max_age_seconds: None,
    }
}

fn azure_claims() -> Value {
    json!({
        "iss": "https://sts.windows.net/tenant-1/", "tid": "tenant-1", "aud": "api://muster",
        "exp": NOW + 60,
        "xms_mirid": format!("/subscriptions/{SUBSCRIPTION}/resourcegroups/g/providers/\
            Microsoft.Compute/virtualMachines/vm-1"),
    })
}

fn verify(document: &IdentityDocument) -> Result<HostIdentity, IdentityError> {
    document.verify(&keys())
}

fn document(cloud: Cloud, text: &str) -> IdentityDocument {
    IdentityDocument { cloud, text: text.to_owned() }
}

#[test]
fn documents_that_openssl_signed_are_accepted_in_each_encoding() {
    for text in [
        include_str!("tests/attributes.b64"),
        include_str!("tests/stream.b64"),
        include_str!("tests/no-attributes.b64"),
        include_str!("tests/no-certificates.b64"),
    ] {
        let identity = verify(&document(Cloud::Aws, text)).unwrap();
        assert_eq!(identity.account, "123456789012");
        assert_eq!(identity.instance_name(), "aws:i-1234567890abcdef0");
        assert_eq!(identity.region.as_deref(), Some("eu-west-1"));
        assert_eq!(identity.started_at, Some(1_795_105_931));
        assert_eq!((identity.audience, identity.expires_at), (None, None));
    }
}

#[test]
fn other_digests_and_detached_contents_are_refused() {
    for (text, fault) in [
        (include_str!("tests/sha512.b64"), "the digest is not SHA-256"),
        (include_str!("tests/detached.b64"), "the content is detached"),
        ("", "no BER"),
        ("AAAA", "no CMS message"),
        ("MIAG!", "no base64"),
    ] {
        let refused = verify(&document(Cloud::Aws, text));
        assert_eq!(refused, Err(IdentityError::Malformed(fault)));
    }
}

/// A changed byte may pass only in parts that nothing reads. These are the certificates beside the
/// signature, the names of signer and algorithm, and the version.
#[test]
fn a_message_with_a_changed_byte_never_gives_other_facts() {
    let base64: String =
        include_str!("tests/no-certificates.b64").split_ascii_whitespace().collect();
    let bytes = data_encoding::BASE64.decode(base64.as_bytes()).unwrap();
    let keys = keys();
    let facts = document(Cloud::Aws, &base64).verify(&keys).unwrap();
    let mut refused = 0;
    for at in 0..bytes.len() {
        for flip in [1, 0x20, 0x80] {
            let mut changed = bytes.clone();
            changed[at] ^= flip;
            let text = data_encoding::BASE64.encode(&changed);
            match document(Cloud::Aws, &text).verify(&keys) {
                Ok(found) => assert_eq!(found, facts, "byte {at}"),
                Err(_) => refused += 1,
            }
        }
    }
    // Most bytes belong to the content, the signature or the signed attributes. Each change of such
    // a byte must be refused.
    assert!(refused > 3 * bytes.len() * 3 / 4, "{refused} of {}", 3 * bytes.len());
}

/// A signature over attributes covers the content only if they contain the content's type and
/// digest, each once (RFC 5652, section 5.3).
#[test]
fn signed_attributes_without_the_contents_type_and_digest_are_refused() {
    use fixtures::SignedAttribute::{ContentType, MessageDigest};
    let content =
        r#"{"accountId":"1","instanceId":"i-1","region":"r","pendingTime":"2026-01-01T00:00:00Z"}"#;
    let verify = |attributes: &[_]| verify(&fixtures::aws_with_attributes(content, attributes));
    assert_eq!(verify(&[ContentType, MessageDigest]).unwrap().instance, "i-1");
    let lacking =
        IdentityError::Malformed("the signed attributes lack the content's type or digest");
    for attributes in [
        &[][..],
        &[ContentType],
        &[MessageDigest],
        &[ContentType, MessageDigest, MessageDigest],
        &[ContentType, ContentType, MessageDigest],
    ] {
        assert_eq!(verify(attributes), Err(lacking.clone()), "{attributes:?}");
    }
}

#[test]
fn a_gcp_document_names_its_machine_and_its_audience() {
    let document = fixtures::gcp("project-1", "77", BOUND, (NOW - 30, NOW + 3_600));
    let identity = verify(&document).unwrap();
    assert_eq!(identity.instance_name(), "gcp:77");
    assert_eq!(identity.region.as_deref(), Some("europe-west1"));
    let check = |account, bound, now| {
        check_any_requirement(&[required(Cloud::Gcp, account)], &identity, bound, now)
    };
    assert_eq!(check("project-1", BOUND, NOW), Ok(()));
    let other = check("project-1", "muster:cluster:other", NOW).unwrap_err();
    assert!(matches!(other, RequirementFailure::Audience { .. }), "{other}");
    assert!(matches!(check("project-2", BOUND, NOW), Err(RequirementFailure::Account(_))));
    assert_eq!(check("project-1", BOUND, NOW + 3_600 + SKEW_SECONDS - 1), Ok(()));
    assert_eq!(
        check("project-1", BOUND, NOW + 3_600 + SKEW_SECONDS),
        Err(RequirementFailure::Expired)
    );
    assert_eq!(
        check("project-1", BOUND, NOW - 30 - SKEW_SECONDS - 1),
        Err(RequirementFailure::Future)
    );
}

#[test]
fn jwts_of_other_issuers_algorithms_and_keys_are_refused() {
    let signed = fixtures::gcp("p", "1", BOUND, (NOW, NOW + 60)).text;
    let (_, rest) = signed.split_once('.').unwrap();
    let with_header = |header: &Value| {
        let header = data_encoding::BASE64URL_NOPAD.encode(header.to_string().as_bytes());
        verify(&document(Cloud::Gcp, &format!("{header}.{rest}")))
    };
    let malformed = |result: Result<_, IdentityError>| {
        assert!(matches!(result, Err(IdentityError::Malformed(_))), "{result:?}");
    };
    for alg in ["none", "HS256", "RS512", "ES256", "rs256"] {
        malformed(with_header(&json!({ "alg": alg, "kid": "test" })));
    }
    malformed(with_header(&json!({ "alg": "RS256", "kid": "test", "crit": ["b64"] })));
    malformed(with_header(&json!({ "alg": "RS256" })));
    let other_key = with_header(&json!({ "alg": "RS256", "kid": "other" }));
    assert_eq!(other_key, Err(IdentityError::BadSignature(Cloud::Gcp)));
    // The signature covers the header, so an added parameter makes it invalid.
    let longer = with_header(&json!({ "alg": "RS256", "kid": "test", "x": 1 }));
    assert_eq!(longer, Err(IdentityError::BadSignature(Cloud::Gcp)));
    malformed(verify(&document(Cloud::Gcp, "a.b")));
    let claims = json!({
        "iss": "https://accounts.google.com", "aud": BOUND, "exp": NOW + 60,
        "google": { "compute_engine": {
            "project_id": "p", "instance_id": "1", "zone": "z-1-a", "instance_creation_timestamp": 1,
        } },
    });
    assert!(verify(&document(Cloud::Gcp, &fixtures::jwt(&claims))).is_ok());
    let mut of_another_issuer = claims.clone();
    of_another_issuer["iss"] = json!("https://accounts.example.com");
    malformed(verify(&document(Cloud::Gcp, &fixtures::jwt(&of_another_issuer))));
    // The signature must be by the key that the header names, not by any trusted key.
    let of_another_key = fixtures::jwt_of_key("other", &claims);
    let refused = verify(&document(Cloud::Gcp, &of_another_key));
    assert_eq!(refused, Err(IdentityError::BadSignature(Cloud::Gcp)));
    malformed(verify(&document(
        Cloud::Gcp,
        &fixtures::jwt(&json!({ "iss": "accounts.google.com" })),
    )));
    let mut claims = azure_claims();
    claims["iss"] = json!("https://sts.windows.net/tenant-2/");
    malformed(verify(&document(Cloud::Azure, &fixtures::jwt(&claims))));
    // A document of one cloud is refused for another cloud, although all clouds share the tests'
    // key.
    malformed(verify(&document(Cloud::Azure, &signed)));
    malformed(verify(&document(Cloud::Gcp, &fixtures::jwt(&azure_claims()))));
}

#[test]
fn an_azure_document_is_of_a_virtual_machine_in_a_subscription() {
    let identity = verify(&document(Cloud::Azure, &fixtures::jwt(&azure_claims()))).unwrap();
    let machine = "azure:/subscriptions/0b1f6471-1bf0-4dda-aec3-cb9272f09590/resourcegroups/g/\
                   providers/microsoft.compute/virtualmachines/vm-1";
    assert_eq!(identity.instance_name(), machine);
    let needed = Requirement {
        tenant: Some("Tenant-1".to_owned()),
        audience: Some("api://muster".to_owned()),
        ..required(Cloud::Azure, &SUBSCRIPTION.to_uppercase())
    };
    assert_eq!(check_any_requirement(std::slice::from_ref(&needed), &identity, BOUND, NOW), Ok(()));
    let elsewhere = Requirement { tenant: Some("tenant-2".to_owned()), ..needed.clone() };
    assert!(matches!(
        check_any_requirement(&[elsewhere], &identity, BOUND, NOW),
        Err(RequirementFailure::Account(_))
    ));
    let elsewhere = Requirement { audience: Some("api://x".to_owned()), ..needed };
    assert!(matches!(
        check_any_requirement(&[elsewhere], &identity, BOUND, NOW),
        Err(RequirementFailure::Audience { .. })
    ));
    // A user-assigned identity belongs to no machine, so the machine that requested the JWT counts.
    let mut claims = azure_claims();
    claims["xms_mirid"] = json!("/subscriptions/x/providers/Microsoft.ManagedIdentity/id-1");
    assert!(verify(&document(Cloud::Azure, &fixtures::jwt(&claims))).is_err());
    claims["xms_az_rid"] = azure_claims()["xms_mirid"].clone();
    let identity = verify(&document(Cloud::Azure, &fixtures::jwt(&claims))).unwrap();
    assert_eq!(identity.account, SUBSCRIPTION);
}

#[test]
fn age_and_region_of_an_instance_are_limited() {
    let identity = verify(&fixtures::aws("1", "i-1", NOW - 100)).unwrap();
    let base = required(Cloud::Aws, "1");
    let check = |needed: Requirement| check_any_requirement(&[needed], &identity, BOUND, NOW);
    assert_eq!(check(base.clone()), Ok(()));
    assert_eq!(check(Requirement { max_age_seconds: Some(100), ..base.clone() }), Ok(()));
    let old = check(Requirement { max_age_seconds: Some(99), ..base.clone() });
    assert_eq!(old, Err(RequirementFailure::TooOld { age: 100, max_age: 99 }));
    let region = |name: &str| Requirement { regions: vec![name.to_owned()], ..base.clone() };
    assert_eq!(check(region("eu-west-1")), Ok(()));
    assert_eq!(check(region("EU-West-1")), Ok(()), "the case of a region's name means nothing");
    assert_eq!(check(region("eu-west-2")), Err(RequirementFailure::Region("eu-west-1".to_owned())));
    // A host must fulfil one of several requirements. A refusal names the fault of the requirement
    // for the host's own cloud.
    let several = [required(Cloud::Gcp, "1"), region("eu-west-2"), base.clone()];
    assert_eq!(check_any_requirement(&several, &identity, BOUND, NOW), Ok(()));
    let others = [required(Cloud::Aws, "2"), required(Cloud::Gcp, "1")];
    assert!(matches!(
        check_any_requirement(&others, &identity, BOUND, NOW),
        Err(RequirementFailure::Account(_))
    ));
    let other_cloud = check_any_requirement(&others[1..], &identity, BOUND, NOW);
    assert_eq!(other_cloud, Err(RequirementFailure::Cloud(Cloud::Aws)));
    assert_eq!(
        check_any_requirement(&[], &identity, BOUND, NOW),
        Err(RequirementFailure::Cloud(Cloud::Aws))
    );
}

#[test]
fn a_requirement_says_enough_and_nothing_that_its_cloud_cannot_fulfil() {
    let azure = Requirement {
        tenant: Some("t".to_owned()),
        audience: Some("a".to_owned()),
        ..required(Cloud::Azure, "s")
    };
    let aws = required(Cloud::Aws, "1");
    for valid in [&azure, &aws, &required(Cloud::Gcp, "p")] {
        assert_eq!(valid.check(), Ok(()));
    }
    let many = |count| vec!["x".to_owned(); count];
    for (wrong, fault) in [
        (Requirement { accounts: Vec::new(), ..aws.clone() }, InvalidRequirement::Accounts),
        (Requirement { accounts: many(9), ..aws.clone() }, InvalidRequirement::Accounts),
        (Requirement { regions: many(9), ..aws.clone() }, InvalidRequirement::Regions),
        (Requirement { regions: many(1), ..azure.clone() }, InvalidRequirement::Regions),
        (Requirement { tenant: None, ..azure.clone() }, InvalidRequirement::Tenant),
        (Requirement { audience: None, ..azure.clone() }, InvalidRequirement::Tenant),
        (Requirement { audience: Some("a".to_owned()), ..aws.clone() }, InvalidRequirement::Tenant),
        (Requirement { max_age_seconds: Some(0), ..aws.clone() }, InvalidRequirement::Age),
        (Requirement { max_age_seconds: Some(9), ..azure.clone() }, InvalidRequirement::Age),
        (required(Cloud::Aws, ""), InvalidRequirement::Name),
        (required(Cloud::Aws, "a b"), InvalidRequirement::Name),
        (required(Cloud::Aws, "%h"), InvalidRequirement::Name),
        (required(Cloud::Aws, "a\"b"), InvalidRequirement::Name),
        (required(Cloud::Aws, &"x".repeat(129)), InvalidRequirement::Name),
    ] {
        assert_eq!(wrong.check(), Err(fault), "{wrong}");
    }
}

#[test]
fn keys_come_from_a_directory_and_a_broken_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    let error = || TrustedKeys::load(folder.path()).unwrap_err().to_string();
    assert!(error().contains("none of the files"), "{}", error());
    write("gcp.json", &fixtures::jwks());
    let keys = TrustedKeys::load(folder.path()).unwrap();
    assert_eq!(Cloud::ALL.map(|cloud| keys.count(cloud)), [0, 1, 0]);
    let aws = fixtures::aws("1", "i-1", NOW);
    assert_eq!(aws.verify(&keys), Err(IdentityError::NoKeys(Cloud::Aws)));
    for (name, text, fault) in [
        ("azure.json", "{}", "azure.json has no usable keys: it is no JWKS"),
        ("azure.json", r#"{"keys":[{"kty":"EC"}]}"#, "no RSA key is in it"),
        ("azure.json", r#"{"keys":[{"kty":"RSA","kid":"1"}]}"#, "lacks kid, n or e"),
        ("aws.pem", "", "no RSA key is in it"),
        ("aws.pem", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "no cert"),
    ] {
        write(name, text);
        assert!(error().contains(fault), "{}", error());
        std::fs::remove_file(folder.path().join(name)).unwrap();
    }
    std::fs::create_dir(folder.path().join("aws.pem")).unwrap();
    assert!(error().contains("can't read the clouds' keys in"), "{}", error());
}

#[test]
fn a_document_that_is_too_long_is_refused_unread() {
    let long = document(Cloud::Aws, &"A".repeat(MAX_DOCUMENT + 1));
    assert_eq!(verify(&long), Err(IdentityError::TooLong));
    assert!(!format!("{long:?}").contains("AAAA"));
}

proptest! {
    #[test]
    fn any_bytes_are_refused_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let text = data_encoding::BASE64.encode(&bytes);
        for cloud in Cloud::ALL {
            prop_assert!(document(cloud, &text).verify(&keys()).is_err());
        }
    }
}
