//! Keys in TLS: the pin of a server, and the self-signed certificate that carries a client's key.
//!
//! A client certificate here is only an envelope for a public key. Its names, dates and issuer are
//! never looked at, so nothing about it has to be kept: it is made anew at each start, and what is
//! bound to is the key inside it.

use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::digest::Digest;
use crate::key::{KeyError, PublicKey, SigningKey};

/// Bytes that are no X.509 certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an X.509 certificate")]
pub struct NotACertificate;

/// Why a client's certificate names no client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientCertificateError {
    /// Not a certificate at all.
    #[error(transparent)]
    NotACertificate(#[from] NotACertificate),
    /// Agents' and admins' keys are Ed25519.
    #[error(transparent)]
    Key(#[from] KeyError),
}

/// A certificate with its key, as rustls wants them.
#[derive(Debug)]
pub struct TlsIdentity {
    /// The chain: here, one self-signed certificate.
    pub chain: Vec<CertificateDer<'static>>,
    /// Its private key.
    pub key: PrivateKeyDer<'static>,
}

impl SigningKey {
    /// A self-signed certificate over this key, for the client's side of TLS and for probes.
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

/// SHA-256 of a certificate's SubjectPublicKeyInfo: what a pin is, and how a node key is named.
pub fn spki_hash(certificate: &[u8]) -> Result<Digest, NotACertificate> {
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|_| NotACertificate)?;
    Ok(Digest::of(parsed.tbs_certificate.subject_pki.raw))
}

/// The key of an agent's or admin's client certificate. Looks at nothing else in it: whether the
/// other side *has* the key was shown by the handshake's signature.
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
    fn other_kinds_of_key_name_no_client() {
        let pair = rcgen::KeyPair::generate().unwrap();
        let certificate = rcgen::CertificateParams::default().self_signed(&pair).unwrap();
        assert_eq!(client_key(certificate.der()), Err(KeyError::NotEd25519.into()));
        assert_eq!(client_key(b"junk"), Err(NotACertificate.into()));
    }
}
