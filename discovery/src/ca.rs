//! The two certificate authorities of a cluster, and the leaf certificates that they sign.
//!
//! All keys here are ECDSA P-256: BoringSSL and grpcio refuse Ed25519 in a TLS server's or CA's
//! certificate. Validity starts at the time that the caller passes (Postgres' clock) minus one
//! hour, for hosts whose clocks are behind.

use std::net::IpAddr;
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256, PublicKey, PublicKeyData, SanType, SerialNumber,
};
use ring::rand::{SecureRandom, SystemRandom};
use rustls::pki_types::{CertificateDer, CertificateSigningRequestDer, PrivatePkcs8KeyDer};
use uuid::Uuid;
use x509_parser::prelude::{FromDer, X509Certificate};
use zeroize::Zeroizing;

use crate::kek::KeyPurpose;

const HOUR: u64 = 3_600;
const DAY: u64 = 24 * HOUR;
/// Validity of a CA. It must outlast all leaves that are issued under the CA.
const CA_LIFE: Duration = Duration::from_secs(20 * 365 * DAY);
/// Validity of a member's certificates.
pub(crate) const MEMBER_LIFE: Duration = Duration::from_secs(365 * DAY);
/// Validity of client certificates for `etcdctl` and applications.
pub(crate) const CREDENTIAL_LIFE: Duration = Duration::from_secs(7 * DAY);

/// Why no certificate was issued.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CaError {
    /// The request isn't PKCS#10, its own signature doesn't verify, or an extension can't be
    /// parsed.
    #[error("the certificate request can't be read, or isn't signed by its own key")]
    Request(#[source] rcgen::Error),
    /// The key in the request isn't ECDSA P-256.
    #[error("the certificate request's key must be ECDSA P-256")]
    KeyType,
    /// The stored CA's key or certificate can't be loaded.
    #[error("the cluster's CA can't be loaded")]
    Authority(#[source] rcgen::Error),
    /// A name or address that a certificate can't contain.
    #[error("`{0}` can't stand in a certificate")]
    Name(String),
    /// The signing library or the system's random source failed.
    #[error("signing failed")]
    Signing(#[source] rcgen::Error),
}

/// A new CA. The certificate is public; the key must be wrapped by the KEK before it is stored.
pub(crate) struct NewCa {
    /// DER of the self-signed certificate.
    pub certificate: Vec<u8>,
    /// PKCS#8 DER of the private key.
    pub key: Zeroizing<Vec<u8>>,
}

/// Makes a new CA for a cluster: its peer CA or its client CA, depending on `purpose`. `now` is in
/// seconds since 1970.
pub(crate) fn make_ca(
    cluster: Uuid,
    name: &str,
    purpose: KeyPurpose,
    now: u64,
) -> Result<NewCa, CaError> {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(CaError::Signing)?;
    let label = match purpose {
        KeyPurpose::PeerCa => "peers",
        KeyPurpose::ClientCa => "clients",
        KeyPurpose::Database => "none",
    };
    let mut params = CertificateParams::default();
    params.distinguished_name = common_name(&format!("muster {label} {name}"));
    params.distinguished_name.push(DnType::OrganizationalUnitName, cluster.to_string());
    // Path length 0: this CA may sign leaves, but no further CAs.
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    set_validity(&mut params, now, CA_LIFE);
    params.serial_number = Some(serial()?);
    let certificate = params.self_signed(&key).map_err(CaError::Signing)?;
    Ok(NewCa { certificate: certificate.der().to_vec(), key: Zeroizing::new(key.serialize_der()) })
}

/// A loaded CA that can sign leaf certificates.
pub(crate) struct IssuingCa {
    issuer: Issuer<'static, KeyPair>,
}

/// The names that a member's leaf certificates contain.
#[derive(Clone, Debug)]
pub(crate) struct MemberLeaf<'a> {
    /// Trust domain of the member's SPIFFE name.
    pub trust_domain: &'a str,
    pub cluster: Uuid,
    /// A founder's seat (1 to `size`), or a newcomer's member id.
    pub member: &'a str,
    /// Hosts of the member's peer URLs, without ports: IP addresses or DNS names.
    pub peer_hosts: &'a [String],
    /// Hosts of the member's client URLs, without ports.
    pub client_hosts: &'a [String],
}

/// The two CAs of a cluster, loaded to sign.
pub(crate) struct ClusterIssuer {
    /// Signs the certificates of peer connections.
    pub peer: IssuingCa,
    /// Signs the certificates of the client port.
    pub client: IssuingCa,
}

impl ClusterIssuer {
    /// Issues a member's two leaves for the key in `csr` (PKCS#10 DER), whose signature is checked,
    /// and returns them as [`ClusterIssuer::issue_for_key`] does. Everything else in `csr` is
    /// ignored.
    pub(crate) fn issue_member(
        &self,
        csr: &[u8],
        leaf: &MemberLeaf<'_>,
        now: u64,
    ) -> Result<(Vec<u8>, Vec<u8>), CaError> {
        self.issue_for_key(&requested_key(csr)?, leaf, now)
    }

    /// Issues a member's two leaves for its key, and returns their DER: the peer leaf, then the
    /// client leaf. The client leaf contains the hosts of both kinds of URL, because the member
    /// serves clients at all of them. The caller has verified that the member has the private key.
    pub(crate) fn issue_for_key(
        &self,
        key: &impl PublicKeyData,
        leaf: &MemberLeaf<'_>,
        now: u64,
    ) -> Result<(Vec<u8>, Vec<u8>), CaError> {
        let mut both = [leaf.peer_hosts, leaf.client_hosts].concat();
        both.sort();
        both.dedup();
        let peer = self.peer.issue_member(key, leaf, leaf.peer_hosts, now)?;
        Ok((peer, self.client.issue_member(key, leaf, &both, now)?))
    }
}

/// Serial number and end of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CertificateFacts {
    /// Bytes of the certificate's serial number, most significant byte first.
    pub serial: Vec<u8>,
    /// End of the validity, in seconds since 1970.
    pub ends_at: i64,
}

impl CertificateFacts {
    /// Reads the serial number and the end of the validity from a certificate's DER. Returns `None`
    /// if the DER can't be parsed.
    pub(crate) fn read(certificate: &[u8]) -> Option<Self> {
        let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
        let ends_at = parsed.validity().not_after.timestamp();
        Some(Self { serial: parsed.raw_serial().to_vec(), ends_at })
    }
}

/// Returns the hosts of normalised URLs (`https://host:port`), sorted and without duplicates.
pub(crate) fn hosts(urls: &[String]) -> Vec<String> {
    let mut hosts: Vec<String> = urls
        .iter()
        .filter_map(|url| url.strip_prefix("https://")?.rsplit_once(':'))
        .map(|(host, _)| host.to_owned())
        .collect();
    hosts.sort();
    hosts.dedup();
    hosts
}

impl IssuingCa {
    /// Loads a CA from its certificate and its unwrapped key.
    pub(crate) fn load(certificate: &[u8], key: &[u8]) -> Result<Self, CaError> {
        let pkcs8 = PrivatePkcs8KeyDer::from(key);
        let key = KeyPair::from_pkcs8_der_and_sign_algo(&pkcs8, &PKCS_ECDSA_P256_SHA256)
            .map_err(CaError::Authority)?;
        let issuer = Issuer::from_ca_cert_der(&CertificateDer::from(certificate), key)
            .map_err(CaError::Authority)?;
        Ok(IssuingCa { issuer })
    }

    /// Returns the DER of a leaf for a member's key.
    fn issue_member(
        &self,
        key: &impl PublicKeyData,
        leaf: &MemberLeaf<'_>,
        hosts: &[String],
        now: u64,
    ) -> Result<Vec<u8>, CaError> {
        let MemberLeaf { trust_domain, cluster, member, .. } = leaf;
        let mut params = leaf_params(&format!("muster:{member}"), now, member_life())?;
        let spiffe = format!("spiffe://{trust_domain}/cluster/{cluster}/member/{member}");
        let uri = spiffe.clone().try_into().map_err(|_| CaError::Name(spiffe))?;
        params.subject_alt_names.push(SanType::URI(uri));
        for host in hosts {
            params.subject_alt_names.push(host_name(host)?);
        }
        params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
        self.sign(key, &params)
    }

    /// Returns the DER of a client certificate for `etcdctl` or an application.
    pub(crate) fn issue_credential(
        &self,
        csr: &[u8],
        name: &str,
        now: u64,
    ) -> Result<Vec<u8>, CaError> {
        self.sign(&requested_key(csr)?, &leaf_params(name, now, CREDENTIAL_LIFE)?)
    }

    fn sign(
        &self,
        key: &impl PublicKeyData,
        params: &CertificateParams,
    ) -> Result<Vec<u8>, CaError> {
        let leaf = params.signed_by(key, &self.issuer).map_err(CaError::Signing)?;
        Ok(leaf.der().to_vec())
    }
}

/// Returns the key in `csr` (PKCS#10 DER), which must have signed `csr`.
fn requested_key(csr: &[u8]) -> Result<PublicKey, CaError> {
    let request =
        CertificateSigningRequestParams::from_der(&CertificateSigningRequestDer::from(csr))
            .map_err(CaError::Request)?;
    match *request.public_key.algorithm() == PKCS_ECDSA_P256_SHA256 {
        true => Ok(request.public_key),
        false => Err(CaError::KeyType),
    }
}

fn leaf_params(name: &str, now: u64, life: Duration) -> Result<CertificateParams, CaError> {
    let mut params = CertificateParams::default();
    params.distinguished_name = common_name(name);
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    params.use_authority_key_identifier_extension = true;
    params.serial_number = Some(serial()?);
    set_validity(&mut params, now, life);
    Ok(params)
}

fn host_name(host: &str) -> Result<SanType, CaError> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    if let Ok(address) = bare.parse::<IpAddr>() {
        return Ok(SanType::IpAddress(address));
    }
    let name = host.to_owned().try_into().map_err(|_| CaError::Name(host.to_owned()))?;
    Ok(SanType::DnsName(name))
}

fn common_name(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    distinguished
}

fn set_validity(params: &mut CertificateParams, now: u64, life: Duration) {
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    let back = Duration::from_secs(HOUR).min(life / 4);
    params.not_before = epoch + Duration::from_secs(now).saturating_sub(back);
    params.not_after = epoch + (Duration::from_secs(now) + life);
}

/// Returns the validity of a member's certificates. Tests shorten it with an environment variable,
/// because they can't wait for a year. A release build doesn't read the variable.
#[cfg(debug_assertions)]
fn member_life() -> Duration {
    let seconds = std::env::var("MUSTER_MEMBER_LIFE").ok().and_then(|text| text.parse().ok());
    seconds.map_or(MEMBER_LIFE, Duration::from_secs)
}

#[cfg(not(debug_assertions))]
fn member_life() -> Duration {
    MEMBER_LIFE
}

/// Returns a serial number of 126 random bits, positive as RFC 5280 demands.
fn serial() -> Result<SerialNumber, CaError> {
    let mut bytes = [0_u8; 16];
    SystemRandom::new()
        .fill(&mut bytes)
        .map_err(|_| CaError::Signing(rcgen::Error::RingUnspecified))?;
    bytes[0] = (bytes[0] & 0x7f) | 0x40;
    Ok(SerialNumber::from_slice(&bytes))
}

#[cfg(test)]
mod tests {
    use x509_parser::prelude::*;

    use super::*;

    const NOW: u64 = 1_800_000_000;

    fn request(key: &KeyPair) -> Vec<u8> {
        let params = CertificateParams::new(vec!["evil.example".to_owned()]).unwrap();
        params.serialize_request(key).unwrap().der().to_vec()
    }

    fn p256() -> KeyPair {
        KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap()
    }

    fn ca(purpose: KeyPurpose) -> (NewCa, IssuingCa) {
        let made = make_ca(Uuid::now_v7(), "demo", purpose, NOW).unwrap();
        let loaded = IssuingCa::load(&made.certificate, &made.key).unwrap();
        (made, loaded)
    }

    #[test]
    fn a_members_leaf_says_who_it_is_and_where_and_verifies_under_its_own_ca_only() {
        let (made, peer_ca) = ca(KeyPurpose::PeerCa);
        let (other, _) = ca(KeyPurpose::ClientCa);
        let cluster = Uuid::now_v7();
        let hosts = ["10.0.0.7".to_owned(), "[fd00::7]".to_owned(), "a.example".to_owned()];
        let (member, clients) = ("3", ["10.0.0.8".to_owned()]);
        let leaf = MemberLeaf {
            trust_domain: "muster",
            cluster,
            member,
            peer_hosts: &hosts,
            client_hosts: &clients,
        };
        let (_, client_ca) = ca(KeyPurpose::ClientCa);
        let both = ClusterIssuer { peer: peer_ca, client: client_ca };
        let (der, client) = both.issue_member(&request(&p256()), &leaf, NOW).unwrap();
        let (_, client) = X509Certificate::from_der(&client).unwrap();
        let names = client.subject_alternative_name().unwrap().unwrap().value.general_names.len();
        assert_eq!(names, 5, "its own name, and the hosts of both kinds of URL");
        let (_, certificate) = X509Certificate::from_der(&der).unwrap();

        assert_eq!(certificate.subject().to_string(), "CN=muster:3");
        assert_eq!(certificate.validity().not_before.timestamp(), (NOW - HOUR) as i64);
        assert_eq!(certificate.validity().not_after.timestamp(), (NOW + 365 * DAY) as i64);
        let names = certificate.subject_alternative_name().unwrap().unwrap();
        let names: Vec<String> = names.value.general_names.iter().map(|n| n.to_string()).collect();
        insta::assert_json_snapshot!(
            names.iter().map(|n| n.replace(&cluster.to_string(), "CLUSTER")).collect::<Vec<_>>()
        );
        let usage = certificate.extended_key_usage().unwrap().unwrap().value;
        assert!(usage.server_auth && usage.client_auth);

        let (_, authority) = X509Certificate::from_der(&made.certificate).unwrap();
        assert!(certificate.verify_signature(Some(authority.public_key())).is_ok());
        let (_, stranger) = X509Certificate::from_der(&other.certificate).unwrap();
        assert!(certificate.verify_signature(Some(stranger.public_key())).is_err());
    }

    #[test]
    fn hosts_are_returned_without_ports_and_without_duplicates() {
        let urls = ["https://10.0.0.1:2380", "https://[fd00::1]:2380", "https://10.0.0.1:2381"];
        assert_eq!(hosts(&urls.map(str::to_owned)), ["10.0.0.1", "[fd00::1]"]);
    }

    #[test]
    fn a_credential_is_for_clients_alone_and_lasts_a_week() {
        let (_, client_ca) = ca(KeyPurpose::ClientCa);
        let der = client_ca.issue_credential(&request(&p256()), "alice", NOW).unwrap();
        let (_, certificate) = X509Certificate::from_der(&der).unwrap();
        assert_eq!(certificate.subject().to_string(), "CN=alice");
        assert_eq!(certificate.validity().not_after.timestamp(), (NOW + 7 * DAY) as i64);
        let usage = certificate.extended_key_usage().unwrap().unwrap().value;
        assert!(usage.client_auth && !usage.server_auth);
        assert!(certificate.subject_alternative_name().unwrap().is_none());
    }

    #[test]
    fn two_leaves_for_one_key_have_different_serials() {
        let (_, authority) = ca(KeyPurpose::ClientCa);
        let csr = request(&p256());
        let serials: Vec<String> = (0..2)
            .map(|_| {
                let der = authority.issue_credential(&csr, "a", NOW).unwrap();
                X509Certificate::from_der(&der).unwrap().1.raw_serial_as_string()
            })
            .collect();
        assert_ne!(serials[0], serials[1]);
    }

    #[test]
    fn a_request_that_is_mangled_or_has_an_ed25519_key_is_refused() {
        let (_, authority) = ca(KeyPurpose::ClientCa);
        let ed25519 = request(&KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap());
        let refused = authority.issue_credential(&ed25519, "a", NOW);
        assert!(matches!(refused, Err(CaError::KeyType)));
        let mut mangled = request(&p256());
        let middle = mangled.len() / 2;
        mangled[middle] ^= 1;
        let refused = authority.issue_credential(&mangled, "a", NOW);
        assert!(matches!(refused, Err(CaError::Request(_))), "{refused:?}");
    }
}
