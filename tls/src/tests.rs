//! Handshakes in memory, between rules that accept every certificate or refuse some.

use rustls::{
    CertificateError, ClientConnection, Connection, ServerConnection,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
    sign::{CertifiedKey, SingleCertAndKey},
};

use super::*;

/// Rule that accepts one certificate, or every certificate.
#[derive(Debug, Default)]
struct TestRule {
    only: Option<CertificateDer<'static>>,
    is_optional: bool,
    schemes: Option<Vec<SignatureScheme>>,
}

impl CertificateRule for TestRule {
    fn verify(&self, shown: &PeerCertificate<'_>) -> Result<(), Error> {
        if self.only.as_ref().is_some_and(|only| only != shown.end_entity) {
            return Err(CertificateError::ApplicationVerificationFailure.into());
        }
        Ok(())
    }

    fn is_mandatory(&self) -> bool {
        !self.is_optional
    }

    fn choose_schemes(&self, all: Vec<SignatureScheme>) -> Vec<SignatureScheme> {
        self.schemes.clone().unwrap_or(all)
    }

    fn explain(&self, error: Error, _end_entity: &CertificateDer<'_>) -> Error {
        Error::General(format!("explained: {error}"))
    }
}

struct Identity {
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
}

fn identity() -> Identity {
    let pair = rcgen::KeyPair::generate().unwrap();
    let certificate = rcgen::CertificateParams::default().self_signed(&pair).unwrap();
    let key = PrivatePkcs8KeyDer::from(pair.serialize_der()).into();
    Identity { certificate: certificate.der().clone(), key }
}

/// Returns a resolver that presents `certificate` and signs with `key`, even if they don't belong
/// together.
fn resolver(certificate: &Identity, key: &Identity) -> Arc<SingleCertAndKey> {
    let key = provider().key_provider.load_private_key(key.key.clone_key()).unwrap();
    Arc::new(CertifiedKey::new(vec![certificate.certificate.clone()], key).into())
}

fn pass(from: &mut Connection, to: &mut Connection) -> Result<(), Error> {
    let mut bytes = Vec::new();
    while from.wants_write() {
        from.write_tls(&mut bytes).unwrap();
    }
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        to.read_tls(&mut rest).unwrap();
        to.process_new_packets()?;
    }
    Ok(())
}

/// Runs the handshake, and returns the error of the side that refuses the other.
fn run_handshake(client: ClientConfig, server: ServerConfig) -> Result<(), Error> {
    let name = "server.test".try_into().unwrap();
    let mut client = Connection::from(ClientConnection::new(Arc::new(client), name).unwrap());
    let mut server = Connection::from(ServerConnection::new(Arc::new(server)).unwrap());
    for _ in 0..4 {
        pass(&mut client, &mut server)?;
        pass(&mut server, &mut client)?;
    }
    assert!(!client.is_handshaking() && !server.is_handshaking());
    Ok(())
}

#[test]
fn a_certificate_is_refused_unless_the_peer_signs_with_its_key() {
    let (own, other) = (identity(), identity());
    for (client_key, server_key, is_accepted) in
        [(&own, &own, true), (&other, &own, false), (&own, &other, false)]
    {
        let client =
            tls13_client(TestRule::default()).with_client_cert_resolver(resolver(&own, client_key));
        let server =
            tls13_server(TestRule::default()).with_cert_resolver(resolver(&own, server_key));
        match run_handshake(client, server) {
            Ok(()) => assert!(is_accepted),
            Err(error) => {
                assert!(!is_accepted && error.to_string().contains("explained"), "{error}");
            }
        }
    }
}

#[test]
fn the_rule_decides_about_client_and_server_certificates() {
    let (own, other) = (identity(), identity());
    let only = || TestRule { only: Some(own.certificate.clone()), ..TestRule::default() };
    for (client, server, is_accepted) in
        [(&own, &own, true), (&other, &own, false), (&own, &other, false)]
    {
        let client = tls13_client(only()).with_client_cert_resolver(resolver(client, client));
        let server = tls13_server(only()).with_cert_resolver(resolver(server, server));
        let refused = Error::from(CertificateError::ApplicationVerificationFailure);
        let expected = if is_accepted { Ok(()) } else { Err(refused) };
        assert_eq!(run_handshake(client, server), expected);
    }
}

#[test]
fn a_client_without_a_certificate_is_refused_if_the_rule_says_so() {
    let own = identity();
    for is_optional in [true, false] {
        let rule = TestRule { is_optional, ..TestRule::default() };
        let client = tls13_client(TestRule::default()).with_no_client_auth();
        let server = tls13_server(rule).with_cert_resolver(resolver(&own, &own));
        assert_eq!(run_handshake(client, server).is_ok(), is_optional);
    }
}

#[test]
fn a_key_of_another_scheme_than_the_rule_chooses_is_refused() {
    let own = identity();
    let schemes = Some(vec![SignatureScheme::ED25519]);
    let client = tls13_client(TestRule { schemes, ..TestRule::default() }).with_no_client_auth();
    let server = tls13_server(TestRule { is_optional: true, ..TestRule::default() })
        .with_cert_resolver(resolver(&own, &own));
    assert!(run_handshake(client, server).is_err());
}

#[test]
fn an_older_version_is_spoken_only_where_the_caller_configures_it() {
    let own = identity();
    let old = |rule| {
        ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS12])
            .unwrap()
            .with_client_cert_verifier(client_verifier(rule, &provider()))
            .with_cert_resolver(resolver(&own, &own))
    };
    let new = tls13_client(TestRule::default()).with_no_client_auth();
    assert!(run_handshake(new, old(TestRule::default())).is_err());
    for (key, is_accepted) in [(&own, true), (&identity(), false)] {
        let verifier = RuleVerifier::new(TestRule::default(), &provider(), rustls::ALL_VERSIONS);
        let client = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS12])
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_cert_resolver(resolver(&own, key));
        assert_eq!(run_handshake(client, old(TestRule::default())).is_ok(), is_accepted);
    }
}
