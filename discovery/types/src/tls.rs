//! Keys in TLS: the pin of a server, and the self-signed certificate that contains a client's key.
//!
//! A client certificate here only carries a public key. Its names, dates and issuer are never
//! checked. So the certificate isn't stored, but made again at each start. Tokens and records are
//! bound to the key and not to the certificate.

use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::digest::Digest;
use crate::key::{KeyError, PublicKey, SigningKey};

/// Error for bytes that are no X.509 certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an X.509 certificate")]
pub struct NotACertificate;

/// Reason why a certificate doesn't identify a client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientCertificateError {
    /// The bytes are no certificate.
    #[error(transparent)]
    NotACertificate(#[from] NotACertificate),
    /// The key is not an Ed25519 key, as agents and admins have.
    #[error(transparent)]
    Key(#[from] KeyError),
}

/// A certificate with its key, in the types that rustls uses.
#[derive(Debug)]
pub struct TlsIdentity {
    /// Certificate chain, which consists of one self-signed certificate.
    pub chain: Vec<CertificateDer<'static>>,
    /// Private key of the certificate.
    pub key: PrivateKeyDer<'static>,
}

impl SigningKey {
    /// Makes a self-signed certificate of this key, for TLS clients and for probes.
    pub fn tls_identity(&self) -> TlsIdentity {
        let der = PrivatePkcs8KeyDer::from(self.pkcs8_der().to_vec());
        let pair = rcgen::KeyPair::from_pkcs8_der_and_sign_algo(&der, &rcgen::PKCS_ED25519)
            .expect("our own PKCS#8 is an Ed25519 key");
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params
            .distinguished_name
            .push(rcgen::DnType::CommonName, format!("muster:key:{}", self.key_id()));
        let certificate = params.self_signed(&pair).expect("an Ed25519 key signs any certificate");
        TlsIdentity { chain: vec![certificate.into()], key: PrivateKeyDer::from(der) }
    }
}

/// Computes the SHA-256 of a certificate's SubjectPublicKeyInfo. The hash is a server's pin, and
/// the id of a node's key.
pub fn spki_hash(certificate: &[u8]) -> Result<Digest, NotACertificate> {
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|_| NotACertificate)?;
    Ok(Digest::of(parsed.tbs_certificate.subject_pki.raw))
}

/// Returns the key in the client certificate of an agent or admin. Nothing else in the certificate
/// is checked. The signature in the TLS handshake has already proved that the client *has* the
/// private key.
pub fn client_key(certificate: &[u8]) -> Result<PublicKey, ClientCertificateError> {
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|_| NotACertificate)?;
    Ok(PublicKey::from_spki_der(parsed.tbs_certificate.subject_pki.raw)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_certificate_carries_its_key() {
        let key = SigningKey::generate();
        let identity = key.tls_identity();
        assert_eq!(client_key(&identity.chain[0]), Ok(*key.public()));
        assert_eq!(spki_hash(&identity.chain[0]), Ok(Digest::of(&key.public().spki_der())));
    }

    #[test]
    fn other_kinds_of_key_identify_no_client() {
        let pair = rcgen::KeyPair::generate().unwrap();
        let certificate = rcgen::CertificateParams::default().self_signed(&pair).unwrap();
        assert_eq!(client_key(certificate.der()), Err(KeyError::NotEd25519.into()));
        assert_eq!(client_key(b"junk"), Err(NotACertificate.into()));
    }
}
