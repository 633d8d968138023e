//! Support for certificates with `anyExtendedKeyUsage`. As in etcd, such a certificate counts as
//! one for clients and for servers (RFC 5280, 4.2.1.12). The TLS library accepts only the specific
//! purposes.

use rustls::{
    CertificateError, Error, RootCertStore,
    crypto::WebPkiSupportedAlgorithms,
    pki_types::{CertificateDer, CertificateRevocationListDer, UnixTime},
};
use webpki::{
    BorrowedCertRevocationList, CertRevocationList, EndEntityCert, ExtendedKeyUsageValidator,
    KeyPurposeIdIter, KeyUsage, RevocationCheckDepth, RevocationOptionsBuilder,
    UnknownStatusPolicy,
};

/// OID of `anyExtendedKeyUsage`: 2.5.29.37.0.
const ANY_OID: [usize; 5] = [2, 5, 29, 37, 0];
/// OID of `clientAuth`: 1.3.6.1.5.5.7.3.2.
const CLIENT_OID: [usize; 9] = [1, 3, 6, 1, 5, 5, 7, 3, 2];
/// OID of `serverAuth`: 1.3.6.1.5.5.7.3.1.
const SERVER_OID: [usize; 9] = [1, 3, 6, 1, 5, 5, 7, 3, 1];

/// Extended key usage that TLS requires of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CertificatePurpose {
    Client,
    Server,
}

/// A presented certificate, with the CAs and revocation lists that it is checked against.
pub(super) struct PresentedCertificate<'a> {
    pub end_entity: &'a CertificateDer<'a>,
    pub intermediates: &'a [CertificateDer<'a>],
    pub roots: &'a RootCertStore,
    pub crls: &'a [CertificateRevocationListDer<'static>],
    pub now: UnixTime,
}

/// Returns whether the purpose of a certificate was the reason for its refusal.
pub(super) fn is_about_purpose(error: &Error) -> bool {
    use CertificateError::{InvalidPurpose, InvalidPurposeContext};
    matches!(error, Error::InvalidCertificate(InvalidPurpose | InvalidPurposeContext { .. }))
}

impl PresentedCertificate<'_> {
    /// Returns whether the certificate is valid for `purpose`, where `anyExtendedKeyUsage` counts
    /// as every purpose. Names are not checked.
    pub(super) fn is_valid_for(
        &self,
        purpose: CertificatePurpose,
        algorithms: &WebPkiSupportedAlgorithms,
    ) -> bool {
        self.verify(purpose, algorithms).is_ok()
    }

    fn verify(
        &self,
        purpose: CertificatePurpose,
        algorithms: &WebPkiSupportedAlgorithms,
    ) -> Result<(), webpki::Error> {
        let mut lists = Vec::new();
        for list in self.crls {
            lists.push(CertRevocationList::from(BorrowedCertRevocationList::from_der(list)?));
        }
        let lists: Vec<&CertRevocationList<'_>> = lists.iter().collect();
        // `revocation` is `None` if there are no revocation lists.
        let revocation = RevocationOptionsBuilder::new(&lists).ok().map(|options| {
            options
                .with_depth(RevocationCheckDepth::EndEntity)
                .with_status_policy(UnknownStatusPolicy::Allow)
                .build()
        });
        EndEntityCert::try_from(self.end_entity)?
            .verify_for_usage(
                algorithms.all,
                &self.roots.roots,
                self.intermediates,
                self.now,
                AnyOrRequiredPurpose(purpose),
                revocation,
                None,
            )
            .map(drop)
    }
}

/// Validator that accepts the required purpose, `anyExtendedKeyUsage`, or a certificate that states
/// no purpose.
struct AnyOrRequiredPurpose(CertificatePurpose);

impl ExtendedKeyUsageValidator for AnyOrRequiredPurpose {
    fn validate(&self, purposes: KeyPurposeIdIter<'_, '_>) -> Result<(), webpki::Error> {
        let (required, error) = match self.0 {
            CertificatePurpose::Client => (CLIENT_OID, KeyUsage::client_auth()),
            CertificatePurpose::Server => (SERVER_OID, KeyUsage::server_auth()),
        };
        let mut named = Vec::new();
        for purpose in purposes {
            named.push(purpose?.to_decoded_oid());
        }
        if named.is_empty() || named.iter().any(|found| *found == ANY_OID || *found == required) {
            return Ok(());
        }
        let missing = webpki::RequiredEkuNotFoundContext { required: error, present: named };
        Err(webpki::Error::RequiredEkuNotFoundContext(missing))
    }
}
