//! The two leaf certificates that a member gets with the commit document.

use std::net::IpAddr;

use rustls::pki_types::{CertificateDer, pem::PemObject};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use crate::digest::Digest;
use crate::statement::{Statement, ca_der};
use crate::url::UrlHost;

/// A member's two certificates, each as a PEM chain with the leaf first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Leaves {
    /// Chain of the certificate that the peer CA issued.
    pub peer: String,
    /// Chain of the certificate that the client CA issued.
    pub client: String,
}

/// Reason why a certificate is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LeafError {
    /// The text is not a PEM chain of certificates.
    #[error("the {0} certificate is not a PEM chain of X.509 certificates")]
    Malformed(&'static str),
    /// The certificate is for another key than this member's.
    #[error("the {0} certificate is over another key than this member's")]
    OtherKey(&'static str),
    /// No CA in the statement signed the certificate.
    #[error("the {0} certificate is not signed by a CA that the statement names")]
    OtherCa(&'static str),
}

impl Leaves {
    /// Verifies that both certificates are for `node_key`, and that CAs trusted by the statement
    /// signed them. Dates are not checked, because a host may boot with a wrong clock.
    pub fn verify(&self, node_key: &Digest, statement: &Statement) -> Result<(), LeafError> {
        verify_leaf("peer", &self.peer, node_key, statement.peer_cas())?;
        verify_leaf("client", &self.client, node_key, statement.client_cas())
    }

    /// Whether the statement's issuing CAs signed both certificates.
    pub fn are_by_issuing_cas(&self, statement: &Statement) -> bool {
        is_signed_by(&self.peer, &statement.peer_ca)
            && is_signed_by(&self.client, &statement.client_ca)
    }

    /// Returns the validity of the certificate that ends first; `None` if one can't be parsed.
    pub fn validity(&self) -> Option<Validity> {
        let validities = [Validity::of_pem(&self.peer)?, Validity::of_pem(&self.client)?];
        validities.into_iter().min_by_key(|validity| validity.ends)
    }
}

/// Returns the names and addresses in the first certificate of a PEM chain. Clients compare them
/// with the host that they connect to. The list is empty if the certificate can't be parsed.
pub fn certificate_hosts(pem: &[u8]) -> Vec<UrlHost> {
    let Ok(leaf) = CertificateDer::from_pem_slice(pem) else { return Vec::new() };
    let Ok((_, parsed)) = X509Certificate::from_der(&leaf) else { return Vec::new() };
    let Ok(Some(names)) = parsed.subject_alternative_name() else { return Vec::new() };
    let host = |name: &GeneralName| match name {
        GeneralName::DNSName(name) => Some(UrlHost::Dns((*name).to_owned())),
        GeneralName::IPAddress(octets) => {
            let v4 = <[u8; 4]>::try_from(*octets).map(IpAddr::from);
            v4.or_else(|_| <[u8; 16]>::try_from(*octets).map(IpAddr::from))
                .ok()
                .map(UrlHost::Address)
        }
        _ => None,
    };
    names.value.general_names.iter().filter_map(host).collect()
}

/// Validity of a certificate, in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// Start of the validity (`notBefore`).
    pub begins: i64,
    /// End of the validity (`notAfter`).
    pub ends: i64,
}

impl Validity {
    /// Returns the time at which to renew the certificates: after a third of their validity.
    pub fn renewal_due(&self) -> i64 {
        self.begins + (self.ends - self.begins) / 3
    }

    /// Returns the time after which a missing renewal is reported: after two thirds of the
    /// validity.
    pub fn renewal_overdue(&self) -> i64 {
        self.begins + (self.ends - self.begins) / 3 * 2
    }

    /// Returns the validity of the first certificate of a PEM chain; `None` if it can't be parsed.
    pub fn of_pem(pem: &str) -> Option<Self> {
        let leaf = CertificateDer::from_pem_slice(pem.as_bytes()).ok()?;
        let (_, parsed) = X509Certificate::from_der(&leaf).ok()?;
        let validity = parsed.validity();
        Some(Self { begins: validity.not_before.timestamp(), ends: validity.not_after.timestamp() })
    }
}

/// Verifies the first certificate of a PEM chain: it must be for `key`, and one of the CAs (PEM)
/// must have signed it. `what` is the certificate's name in errors.
pub fn verify_leaf<'a>(
    what: &'static str,
    pem: &str,
    key: &Digest,
    mut cas: impl Iterator<Item = &'a str>,
) -> Result<(), LeafError> {
    let leaf =
        CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|_| LeafError::Malformed(what))?;
    let (_, parsed) = X509Certificate::from_der(&leaf).map_err(|_| LeafError::Malformed(what))?;
    if Digest::of(parsed.tbs_certificate.subject_pki.raw) != *key {
        return Err(LeafError::OtherKey(what));
    }
    match cas.any(|ca| has_signed(ca, &parsed)) {
        true => Ok(()),
        false => Err(LeafError::OtherCa(what)),
    }
}

/// Whether the CA `ca` (PEM) signed the first certificate of a PEM chain.
fn is_signed_by(pem: &str, ca: &str) -> bool {
    let Ok(leaf) = CertificateDer::from_pem_slice(pem.as_bytes()) else { return false };
    X509Certificate::from_der(&leaf).is_ok_and(|(_, parsed)| has_signed(ca, &parsed))
}

/// Whether the CA `ca` (PEM) signed a certificate.
fn has_signed(ca: &str, certificate: &X509Certificate<'_>) -> bool {
    let Some(ca) = ca_der(ca) else { return false };
    let Ok((_, ca)) = X509Certificate::from_der(&ca) else { return false };
    certificate.verify_signature(Some(ca.public_key())).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{ClusterFixture, TestCa};
    use crate::statement::CaPair;

    #[test]
    fn leaves_of_the_right_key_and_cas_are_accepted() {
        let world = ClusterFixture::new(1);
        let leaves = world.leaves(0);
        let record = &world.records[0];
        assert_eq!(leaves.verify(&record.csr.verify().unwrap().node_key, &world.statement), Ok(()));
    }

    #[test]
    fn leaves_of_each_trusted_ca_are_accepted() {
        let world = ClusterFixture::new(1);
        let key = world.records[0].csr.verify().unwrap().node_key;
        let old = world.leaves(0);
        let (peer, client) = (TestCa::new("peers"), TestCa::new("clients"));
        let csr = &world.records[0].csr;
        let new = Leaves {
            peer: peer.issue_for(csr, "10.0.0.1"),
            client: client.issue_for(csr, "10.0.0.1"),
        };
        let mut statement = world.statement.clone();
        assert_eq!(new.verify(&key, &statement), Err(LeafError::OtherCa("peer")));
        statement.also_trusted = Some(CaPair { peer: peer.pem, client: client.pem });
        for leaves in [&old, &new] {
            assert_eq!(leaves.verify(&key, &statement), Ok(()));
        }
        assert!(old.are_by_issuing_cas(&statement) && !new.are_by_issuing_cas(&statement));
        let mixed = Leaves { peer: old.peer.clone(), client: new.client };
        assert_eq!(mixed.verify(&key, &statement), Ok(()));
        assert!(!mixed.are_by_issuing_cas(&statement), "both certificates count");
        assert_eq!(statement.peer_bundle().matches("BEGIN CERTIFICATE").count(), 2);
        assert!(statement.peer_bundle().starts_with(world.statement.peer_ca.trim_end()));
    }

    #[test]
    fn the_hosts_of_a_leaf_are_the_names_and_addresses_in_it() {
        let leaves = ClusterFixture::new(1).leaves(0);
        assert_eq!(
            certificate_hosts(leaves.peer.as_bytes()),
            [UrlHost::Address([10, 0, 0, 1].into())]
        );
        let (ca, csr) = (TestCa::new("peers"), &ClusterFixture::new(1).records[0].csr);
        let named = ca.issue_for(csr, "db-1.example.org");
        assert_eq!(
            certificate_hosts(named.as_bytes()),
            [UrlHost::Dns("db-1.example.org".to_owned())]
        );
        let six = ca.issue_for(csr, "fd00::1");
        assert_eq!(
            certificate_hosts(six.as_bytes()),
            [UrlHost::Address("fd00::1".parse().unwrap())]
        );
        assert_eq!(certificate_hosts(ca.issue(csr).as_bytes()), []);
        assert_eq!(certificate_hosts(b"?"), []);
    }

    #[test]
    fn renewal_is_due_after_a_third_of_the_validity_and_overdue_after_two_thirds() {
        let life = Validity { begins: 1_000, ends: 1_300 };
        assert_eq!((life.renewal_due(), life.renewal_overdue()), (1_100, 1_200));
        let leaves = ClusterFixture::new(1).leaves(0);
        let life = leaves.validity().unwrap();
        assert!(life.begins < life.renewal_due() && life.renewal_overdue() < life.ends);
        assert_eq!(Leaves { client: "?".to_owned(), ..leaves }.validity(), None);
    }

    #[test]
    fn leaves_of_another_ca_or_key_are_refused() {
        let world = ClusterFixture::new(2);
        let key = world.records[0].csr.verify().unwrap().node_key;
        let others = world.leaves(1).verify(&key, &world.statement);
        assert_eq!(others, Err(LeafError::OtherKey("peer")));
        let forged = TestCa::new("muster").issue(&world.records[0].csr);
        let leaves = Leaves { peer: forged, ..world.leaves(0) };
        assert_eq!(leaves.verify(&key, &world.statement), Err(LeafError::OtherCa("peer")));
        let swapped = Leaves { peer: world.leaves(0).client, client: world.leaves(0).peer };
        assert_eq!(swapped.verify(&key, &world.statement), Err(LeafError::OtherCa("peer")));
    }
}
