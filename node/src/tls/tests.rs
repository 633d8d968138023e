//! Real handshakes over memory, with certificates made on the spot.

use std::{path::Path, sync::Arc};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationList,
    CertificateRevocationListParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber, date_time_ymd,
};
use rustls::{
    ClientConnection, ServerConnection,
    pki_types::{ServerName, pem::PemObject},
};

use super::*;

struct Ca {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Ca {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().unwrap();
        // No two of one name: by it a certificate finds its CA's list.
        let name = key.public_key_pem();
        params.distinguished_name.push(DnType::OrganizationalUnitName, name);
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    fn leaf(&self, name: &str, expired: bool) -> Leaf {
        self.leaf_of(name, expired, KeyPair::generate().unwrap())
    }

    fn leaf_of(&self, name: &str, expired: bool, key: KeyPair) -> Leaf {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.serial_number = Some(SerialNumber::from(name.len() as u64));
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        if expired {
            params.not_before = date_time_ymd(2020, 1, 1);
            params.not_after = date_time_ymd(2021, 1, 1);
        }
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        Leaf {
            node_key: node_key_of(certificate.der()).unwrap(),
            pem: certificate.pem(),
            key: key.serialize_pem(),
        }
    }

    fn crl(&self, serial: u64) -> String {
        self.revocations(serial).pem().unwrap()
    }

    fn revocations(&self, serial: u64) -> CertificateRevocationList {
        CertificateRevocationListParams {
            this_update: date_time_ymd(2024, 1, 1),
            next_update: date_time_ymd(2060, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: vec![RevokedCertParams {
                serial_number: SerialNumber::from(serial),
                revocation_time: date_time_ymd(2024, 1, 1),
                reason_code: None,
                invalidity_date: None,
            }],
            key_identifier_method: KeyIdMethod::Sha256,
        }
        .signed_by(&self.issuer)
        .unwrap()
    }
}

struct Leaf {
    pem: String,
    key: String,
    node_key: NodeKey,
}

fn files(dir: &Path, name: &str, leaf: &Leaf, ca: &Ca) -> TlsFiles {
    let write = |suffix: &str, text: &str| {
        let path = dir.join(format!("{name}.{suffix}"));
        std::fs::write(&path, text).unwrap();
        path
    };
    TlsFiles {
        cert: write("crt", &leaf.pem),
        key: write("key", &leaf.key),
        trusted_ca: Some(write("ca", &ca.pem)),
        ..TlsFiles::default()
    }
}

fn peer(dir: &Path, name: &str, leaf: &Leaf, ca: &Ca) -> PeerTls {
    PeerTls::new(&files(dir, name, leaf, ca)).unwrap()
}

/// TLS of a member on loopback, the only one of its CA.
pub(crate) fn on_loopback(dir: &Path) -> Arc<PeerTls> {
    let ca = Ca::new();
    Arc::new(peer(dir, "member", &ca.leaf("127.0.0.1", false), &ca))
}

fn from_pem<T: PemObject>(text: &str) -> T {
    T::from_pem_slice(text.as_bytes()).unwrap()
}

/// Shakes hands in memory; the error of whichever side refuses first.
fn handshake(
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    name: &str,
) -> Result<(Option<NodeKey>, Option<NodeKey>), rustls::Error> {
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let mut client = ClientConnection::new(client, name).unwrap();
    let mut server = ServerConnection::new(server).unwrap();
    for _ in 0..10 {
        let mut wire = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut wire).unwrap();
        }
        server.read_tls(&mut wire.as_slice()).unwrap();
        server.process_new_packets()?;
        let mut wire = Vec::new();
        while server.wants_write() {
            server.write_tls(&mut wire).unwrap();
        }
        client.read_tls(&mut wire.as_slice()).unwrap();
        client.process_new_packets()?;
    }
    assert!(!client.is_handshaking() && !server.is_handshaking());
    let key = |certs: Option<&[CertificateDer<'static>]>| certs.and_then(|c| node_key_of(&c[0]));
    Ok((key(client.peer_certificates()), key(server.peer_certificates())))
}

#[test]
fn two_members_of_one_ca_learn_each_others_keys() {
    let (dir, ca) = (tempfile::tempdir().unwrap(), Ca::new());
    let (a, b) = (ca.leaf("a.test", false), ca.leaf("b.test", false));
    let (tls_a, tls_b) = (peer(dir.path(), "a", &a, &ca), peer(dir.path(), "b", &b, &ca));
    let keys = handshake(tls_a.client_config(None).unwrap(), tls_b.server_config(), "b.test");
    assert_eq!(keys, Ok((Some(b.node_key), Some(a.node_key))));
}

#[test]
fn without_a_binding_the_name_must_fit() {
    let (dir, ca) = (tempfile::tempdir().unwrap(), Ca::new());
    let (a, b) = (ca.leaf("a.test", false), ca.leaf("b.test", false));
    let (tls_a, tls_b) = (peer(dir.path(), "a", &a, &ca), peer(dir.path(), "b", &b, &ca));
    let client = tls_a.client_config(None).unwrap();
    assert!(handshake(client, tls_b.server_config(), "other.test").is_err());
}

#[test]
fn with_a_binding_the_key_decides_and_the_name_does_not_matter() {
    let (dir, ca) = (tempfile::tempdir().unwrap(), Ca::new());
    let (a, b) = (ca.leaf("a.test", false), ca.leaf("b.test", false));
    let (tls_a, tls_b) = (peer(dir.path(), "a", &a, &ca), peer(dir.path(), "b", &b, &ca));
    let right = tls_a.client_config(Some(b.node_key)).unwrap();
    assert!(handshake(right, tls_b.server_config(), "other.test").is_ok());
    let wrong = tls_a.client_config(Some(a.node_key)).unwrap();
    assert!(handshake(wrong, tls_b.server_config(), "b.test").is_err());
}

#[test]
fn a_bound_key_under_another_ca_is_refused() {
    let (dir, ca, other) = (tempfile::tempdir().unwrap(), Ca::new(), Ca::new());
    let (a, b) = (ca.leaf("a.test", false), other.leaf("b.test", false));
    let (tls_a, tls_b) = (peer(dir.path(), "a", &a, &ca), peer(dir.path(), "b", &b, &other));
    let client = tls_a.client_config(Some(b.node_key)).unwrap();
    assert!(handshake(client, tls_b.server_config(), "b.test").is_err());
    let client = tls_b.client_config(Some(a.node_key)).unwrap();
    assert!(handshake(client, tls_a.server_config(), "a.test").is_err());
}

#[test]
fn an_expired_certificate_of_a_bound_key_is_an_alarm_in_both_directions() {
    let (dir, ca) = (tempfile::tempdir().unwrap(), Ca::new());
    let (a, old) = (ca.leaf("a.test", false), ca.leaf("old.test", true));
    let (tls_a, tls_old) = (peer(dir.path(), "a", &a, &ca), peer(dir.path(), "o", &old, &ca));
    tls_a.bind(HashSet::from([old.node_key]));
    let client = tls_a.client_config(Some(old.node_key)).unwrap();
    assert!(handshake(client, tls_old.server_config(), "old.test").is_ok());
    assert_eq!(tls_a.expired_accepted(), 1);
    let client = tls_old.client_config(None).unwrap();
    assert!(handshake(client, tls_a.server_config(), "a.test").is_ok());
    assert_eq!(tls_a.expired_accepted(), 2);
}

#[test]
fn an_expired_certificate_of_no_bound_key_is_refused_in_both_directions() {
    let (dir, ca) = (tempfile::tempdir().unwrap(), Ca::new());
    let (a, old) = (ca.leaf("a.test", false), ca.leaf("old.test", true));
    let (tls_a, tls_old) = (peer(dir.path(), "a", &a, &ca), peer(dir.path(), "o", &old, &ca));
    let client = tls_a.client_config(None).unwrap();
    assert!(handshake(client, tls_old.server_config(), "old.test").is_err());
    let client = tls_old.client_config(None).unwrap();
    assert!(handshake(client, tls_a.server_config(), "a.test").is_err());
    assert_eq!(tls_a.expired_accepted(), 0);
}

#[test]
fn an_expired_certificate_of_a_bound_key_must_still_be_the_cas() {
    let (dir, ca, other) = (tempfile::tempdir().unwrap(), Ca::new(), Ca::new());
    let (a, old) = (ca.leaf("a.test", false), other.leaf("old.test", true));
    let (tls_a, tls_old) = (peer(dir.path(), "a", &a, &ca), peer(dir.path(), "o", &old, &other));
    tls_a.bind(HashSet::from([old.node_key]));
    let client = tls_a.client_config(Some(old.node_key)).unwrap();
    assert!(handshake(client, tls_old.server_config(), "old.test").is_err());
    assert_eq!(tls_a.expired_accepted(), 0);
}

#[test]
fn a_revoked_peer_is_refused() {
    let (dir, ca) = (tempfile::tempdir().unwrap(), Ca::new());
    let (a, b) = (ca.leaf("a.test", false), ca.leaf("revoked.test", false));
    let crl = dir.path().join("crl");
    std::fs::write(&crl, ca.crl("revoked.test".len() as u64)).unwrap();
    let with_crl = TlsFiles { crl: Some(crl), ..files(dir.path(), "a", &a, &ca) };
    let tls_a = PeerTls::new(&with_crl).unwrap();
    let tls_b = peer(dir.path(), "b", &b, &ca);
    let client = tls_b.client_config(None).unwrap();
    assert!(handshake(client, tls_a.server_config(), "a.test").is_err());
    let client = tls_a.client_config(None).unwrap();
    assert!(handshake(client, tls_b.server_config(), "revoked.test").is_err());
}

#[test]
fn a_revocation_list_in_der_counts_as_in_etcd() {
    let (dir, ca) = (tempfile::tempdir().unwrap(), Ca::new());
    let (a, b) = (ca.leaf("a.test", false), ca.leaf("revoked.test", false));
    let crl = dir.path().join("crl");
    std::fs::write(&crl, ca.revocations("revoked.test".len() as u64).der()).unwrap();
    let with_crl = TlsFiles { crl: Some(crl), ..files(dir.path(), "a", &a, &ca) };
    let tls_a = PeerTls::new(&with_crl).unwrap();
    let tls_b = peer(dir.path(), "b", &b, &ca);
    let client = tls_b.client_config(None).unwrap();
    assert!(handshake(client, tls_a.server_config(), "a.test").is_err());
    let clients = ClientListenerTls::new(&with_crl, &TlsPolicy::default(), &[]).unwrap();
    let client = tls_b.client_config(None).unwrap();
    assert!(handshake(client, clients.server_config(), "a.test").is_err());
}

#[test]
fn a_file_may_have_the_lists_of_several_cas() {
    let (dir, ca, other) = (tempfile::tempdir().unwrap(), Ca::new(), Ca::new());
    let (crl, trusted) = (dir.path().join("crl"), dir.path().join("both"));
    let serial = "revoked.test".len() as u64;
    std::fs::write(&crl, ca.crl(serial) + &other.crl(serial)).unwrap();
    std::fs::write(&trusted, ca.pem.clone() + &other.pem).unwrap();
    let a = files(dir.path(), "a", &ca.leaf("a.test", false), &ca);
    let with_crl = TlsFiles { crl: Some(crl), trusted_ca: Some(trusted), ..a };
    let tls_a = PeerTls::new(&with_crl).unwrap();
    for issuer in [&ca, &other] {
        for (name, is_refused) in [("b.test", false), ("revoked.test", true)] {
            let tls_b = peer(dir.path(), "b", &issuer.leaf(name, false), &ca);
            let client = tls_b.client_config(None).unwrap();
            assert_eq!(handshake(client, tls_a.server_config(), "a.test").is_err(), is_refused);
        }
    }
}

#[test]
fn a_file_without_a_revocation_list_is_no_list_of_nobody() {
    let (dir, ca) = (tempfile::tempdir().unwrap(), Ca::new());
    let a = ca.leaf("a.test", false);
    let crl = dir.path().join("crl");
    let with_crl = TlsFiles { crl: Some(crl.clone()), ..files(dir.path(), "a", &a, &ca) };
    let not_a_list = "-----BEGIN X509 CRL-----\nMAA=\n-----END X509 CRL-----\n";
    for content in ["", "junk", &ca.pem, not_a_list] {
        std::fs::write(&crl, content).unwrap();
        let error = PeerTls::new(&with_crl).unwrap_err();
        assert!(error.to_string().contains("revocation list"), "{error}");
        let error = ClientListenerTls::new(&with_crl, &TlsPolicy::default(), &[]).unwrap_err();
        assert!(error.to_string().contains("revocation list"), "{error}");
    }
}

#[test]
fn a_revocation_list_that_breaks_leaves_the_old_one_in_force() {
    let (dir, ca) = (tempfile::tempdir().unwrap(), Ca::new());
    let (a, b) = (ca.leaf("a.test", false), ca.leaf("revoked.test", false));
    let crl = dir.path().join("crl");
    std::fs::write(&crl, ca.crl("revoked.test".len() as u64)).unwrap();
    let with_crl = TlsFiles { crl: Some(crl.clone()), ..files(dir.path(), "a", &a, &ca) };
    let tls_a = PeerTls::new(&with_crl).unwrap();
    std::fs::write(&crl, "").unwrap();
    tls_a.reload();
    let client = peer(dir.path(), "b", &b, &ca).client_config(None).unwrap();
    assert!(handshake(client, tls_a.server_config(), "a.test").is_err());
}

#[test]
fn peers_speak_tls_1_3_and_nothing_older() {
    let (dir, ca) = (tempfile::tempdir().unwrap(), Ca::new());
    let (a, b) = (ca.leaf("a.test", false), ca.leaf("b.test", false));
    let tls_a = peer(dir.path(), "a", &a, &ca);
    let mut roots = RootCertStore::empty();
    roots.add(from_pem(&ca.pem)).unwrap();
    let provider = || Arc::new(rustls::crypto::ring::default_provider());
    let old = |versions: &[&'static rustls::SupportedProtocolVersion]| {
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(versions)
            .unwrap()
            .with_root_certificates(roots.clone())
            .with_client_auth_cert(vec![from_pem(&b.pem)], from_pem(&b.key))
            .unwrap();
        config.alpn_protocols = vec![PEER_ALPN.to_vec()];
        Arc::new(config)
    };
    let only_1_2 = old(&[&rustls::version::TLS12]);
    assert!(handshake(only_1_2, tls_a.server_config(), "a.test").is_err());
    assert!(handshake(old(&[&rustls::version::TLS13]), tls_a.server_config(), "a.test").is_ok());
    let mut server = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS12])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![from_pem(&b.pem)], from_pem(&b.key))
        .unwrap();
    server.alpn_protocols = vec![PEER_ALPN.to_vec()];
    let client = tls_a.client_config(None).unwrap();
    assert!(handshake(client, Arc::new(server), "b.test").is_err());
}

#[test]
fn clients_need_an_allowed_name_where_names_are_given() {
    let (dir, ca) = (tempfile::tempdir().unwrap(), Ca::new());
    let (a, b) = (ca.leaf("a.test", false), ca.leaf("b.test", false));
    let tls_b = peer(dir.path(), "b", &b, &ca);
    for (common, host, accepted) in [
        (vec!["b.test"], vec![], true),
        (vec!["c.test"], vec![], false),
        (vec![], vec!["b.test"], true),
        (vec![], vec!["c.test"], false),
    ] {
        let named = TlsFiles {
            allowed_cn: common.iter().map(ToString::to_string).collect(),
            allowed_hostname: host.iter().map(ToString::to_string).collect(),
            ..files(dir.path(), "a", &a, &ca)
        };
        let tls_a = PeerTls::new(&named).unwrap();
        let client = tls_b.client_config(None).unwrap();
        assert_eq!(handshake(client, tls_a.server_config(), "a.test").is_ok(), accepted);
    }
}

#[test]
fn a_client_without_a_certificate_is_refused_once_there_is_a_trusted_ca() {
    let (dir, ca) = (tempfile::tempdir().unwrap(), Ca::new());
    let server = ca.leaf("s.test", false);
    let mut roots = RootCertStore::empty();
    roots.add(from_pem(&ca.pem)).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let client = Arc::new(client);
    let mutual = files(dir.path(), "s", &server, &ca);
    let open = TlsFiles { trusted_ca: None, ..mutual.clone() };
    for (files, accepted) in [(mutual, false), (open, true)] {
        let tls = ClientListenerTls::new(&files, &TlsPolicy::default(), &[]).unwrap();
        let result = handshake(Arc::clone(&client), tls.server_config(), "s.test");
        assert_eq!(result.is_ok(), accepted);
    }
}

#[test]
fn a_replaced_certificate_is_served_without_a_restart() {
    let (dir, ca) = (tempfile::tempdir().unwrap(), Ca::new());
    let (a, b, next) =
        (ca.leaf("a.test", false), ca.leaf("b.test", false), ca.leaf("b.test", false));
    let (tls_a, tls_b) = (peer(dir.path(), "a", &a, &ca), peer(dir.path(), "b", &b, &ca));
    files(dir.path(), "b", &next, &ca);
    tls_b.reload();
    let keys = handshake(tls_a.client_config(None).unwrap(), tls_b.server_config(), "b.test");
    assert_eq!(keys.unwrap().0, Some(next.node_key));
}

#[test]
fn files_that_cannot_be_read_any_more_leave_the_old_ones_in_force() {
    let (dir, ca) = (tempfile::tempdir().unwrap(), Ca::new());
    let (a, b) = (ca.leaf("a.test", false), ca.leaf("b.test", false));
    let (tls_a, tls_b) = (peer(dir.path(), "a", &a, &ca), peer(dir.path(), "b", &b, &ca));
    for name in ["b.crt", "b.key", "b.ca"] {
        std::fs::write(dir.path().join(name), "junk").unwrap();
    }
    tls_b.reload();
    assert!(handshake(tls_a.client_config(None).unwrap(), tls_b.server_config(), "b.test").is_ok());
}

#[test]
fn a_certificate_without_its_key_is_refused_at_the_start() {
    let (dir, ca) = (tempfile::tempdir().unwrap(), Ca::new());
    let (a, b) = (ca.leaf("a.test", false), ca.leaf("b.test", false));
    let mixed = Leaf { key: b.key, ..a };
    let files = files(dir.path(), "x", &mixed, &ca);
    let error = PeerTls::new(&files).unwrap_err();
    assert!(matches!(error, TlsError::Unusable { .. }), "{error}");
    let empty = TlsFiles { trusted_ca: None, ..files };
    assert!(PeerTls::new(&empty).is_err());
}

#[test]
fn a_client_that_is_revoked_between_two_connections_cannot_come_back_on_its_old_session() {
    let (dir, ca) = (tempfile::tempdir().unwrap(), Ca::new());
    let (server, client) = (ca.leaf("s.test", false), ca.leaf("client.test", false));
    let crl = dir.path().join("crl");
    std::fs::write(&crl, ca.crl(999)).unwrap();
    let with_crl = TlsFiles { crl: Some(crl.clone()), ..files(dir.path(), "s", &server, &ca) };
    let mut roots = RootCertStore::empty();
    roots.add(from_pem(&ca.pem)).unwrap();
    for version in [&rustls::version::TLS13, &rustls::version::TLS12] {
        let tls = ClientListenerTls::new(&with_crl, &TlsPolicy::default(), &[]).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        // Keeps what it needs to resume, as every client library does.
        let resuming = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[version])
            .unwrap()
            .with_root_certificates(roots.clone())
            .with_client_auth_cert(vec![from_pem(&client.pem)], from_pem(&client.key))
            .unwrap();
        let resuming = Arc::new(resuming);
        for _ in 0..2 {
            assert!(handshake(Arc::clone(&resuming), tls.server_config(), "s.test").is_ok());
        }
        std::fs::write(&crl, ca.crl("client.test".len() as u64)).unwrap();
        tls.reload();
        assert!(handshake(resuming, tls.server_config(), "s.test").is_err());
        std::fs::write(&crl, ca.crl(999)).unwrap();
    }
}

#[test]
fn the_alarm_about_an_expired_certificate_is_told_once_and_counted_each_time() {
    let bound = BoundKeys::default();
    let now = std::time::Instant::now();
    let told: Vec<_> = (0..100).filter_map(|_| bound.count_expired(now)).collect();
    assert_eq!((told, bound.expired.load(Ordering::Relaxed)), (vec![0], 100));
}

#[test]
fn the_expiry_of_the_certificate_in_force_is_known() {
    let ca = Ca::new();
    let leaf = ca.leaf("a", true);
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    for (name, text) in [("crt", &leaf.pem), ("key", &leaf.key), ("ca", &ca.pem)] {
        std::fs::write(path(name), text).unwrap();
    }
    let files = TlsFiles {
        cert: path("crt"),
        key: path("key"),
        trusted_ca: Some(path("ca")),
        ..TlsFiles::default()
    };
    // 2021-01-01
    let expected = Some(1_609_459_200);
    let policy = TlsPolicy::default();
    assert_eq!(PeerTls::new(&files).unwrap().expires_at(), expected);
    assert_eq!(ClientListenerTls::new(&files, &policy, &[]).unwrap().expires_at(), expected);
}

#[test]
fn a_certificate_names_a_user_where_it_is_to_and_by_the_last_of_its_names() {
    let (dir, ca) = (tempfile::tempdir().unwrap(), Ca::new());
    // By its number, since one name of a kind is all that is kept otherwise.
    let again = || DnType::CustomDnType(vec![2, 5, 4, 3]);
    let organisation = || DnType::OrganizationName;
    let mutual =
        TlsFiles { names_users: true, ..files(dir.path(), "s", &ca.leaf("s.test", false), &ca) };
    let user = |files: &TlsFiles, shown: Option<&[CertificateDer<'_>]>| {
        ClientListenerTls::new(files, &TlsPolicy::default(), &[]).unwrap().user(shown)
    };
    for (names, named) in [
        (vec![(DnType::CommonName, "some")], "some"),
        (vec![(DnType::CommonName, "muster:1"), (organisation(), "root")], "muster:1"),
        (vec![(DnType::CommonName, "some"), (again(), "other")], "other"),
        (vec![(organisation(), "root")], ""),
    ] {
        let mut params = CertificateParams::new(vec!["c.test".to_owned()]).unwrap();
        params.distinguished_name = DistinguishedName::new();
        for (kind, name) in names {
            params.distinguished_name.push(kind, name);
        }
        let leaf = params.signed_by(&KeyPair::generate().unwrap(), &ca.issuer).unwrap();
        let chain = [leaf.der().clone(), from_pem(&ca.pem)];
        assert_eq!(user(&mutual, Some(&chain)).as_deref(), Some(named));
        assert_eq!(user(&mutual, None), None);
        let unasked = TlsFiles { names_users: false, ..mutual.clone() };
        let unproved = TlsFiles { trusted_ca: None, ..mutual.clone() };
        assert_eq!((user(&unasked, Some(&chain)), user(&unproved, Some(&chain))), (None, None));
    }
}
