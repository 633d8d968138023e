//! TLS between two agents: each proves its Ed25519 key, and nothing else is checked.

use std::sync::Arc;

use discovery_types::key::{PublicKey, SigningKey};
use discovery_types::tls::{TlsIdentity, client_key};
use muster_tls::{CertificateRule, PeerCertificate};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{CertificateError, ClientConfig, Error, ServerConfig, SignatureScheme};

use super::ALPN;

/// Why an agent's key can't be used for TLS.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IdentityError {
    /// The TLS library refused the key.
    #[error("can't use the agent's key for TLS")]
    Tls(#[from] Error),
}

/// This agent's key and its self-signed certificate.
#[derive(Debug)]
pub(crate) struct ProbeIdentity {
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
    #[cfg(test)]
    public: PublicKey,
}

impl ProbeIdentity {
    /// Makes a self-signed certificate of the agent's key.
    pub(crate) fn new(key: &SigningKey) -> Self {
        let TlsIdentity { mut chain, key: private } = key.tls_identity();
        let certificate = chain.swap_remove(0);
        Self {
            certificate,
            key: private,
            #[cfg(test)]
            public: *key.public(),
        }
    }

    #[cfg(test)]
    pub(crate) fn public(&self) -> PublicKey {
        self.public
    }

    /// Returns the listener's configuration. It requires a client certificate of any key; the
    /// listener checks the key after the handshake.
    pub(crate) fn server_config(&self) -> Result<Arc<ServerConfig>, IdentityError> {
        let mut config = muster_tls::tls13_server(AnyKeyRule)
            .with_single_cert(vec![self.certificate.clone()], self.key.clone_key())?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        // Disable session resumption, so that each probe proves its key in a full handshake.
        muster_tls::disable_resumption(&mut config);
        Ok(Arc::new(config))
    }

    /// Returns the configuration for probing the one agent that holds the key `expected`.
    pub(crate) fn client_config(
        &self,
        expected: PublicKey,
    ) -> Result<Arc<ClientConfig>, IdentityError> {
        let mut config = muster_tls::tls13_client(ExpectedKeyRule(expected))
            .with_client_auth_cert(vec![self.certificate.clone()], self.key.clone_key())?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.resumption = rustls::client::Resumption::disabled();
        Ok(Arc::new(config))
    }
}

/// Extracts the Ed25519 key from a certificate.
pub(crate) fn key_of(certificate: &CertificateDer<'_>) -> Result<PublicKey, Error> {
    client_key(certificate).map_err(|_| Error::InvalidCertificate(CertificateError::BadEncoding))
}

/// Returns the only signature scheme of agents' keys.
fn only_ed25519() -> Vec<SignatureScheme> {
    vec![SignatureScheme::ED25519]
}

/// Rule that accepts only a certificate with the expected key.
#[derive(Debug)]
struct ExpectedKeyRule(PublicKey);

impl CertificateRule for ExpectedKeyRule {
    fn verify(&self, shown: &PeerCertificate<'_>) -> Result<(), Error> {
        if key_of(shown.end_entity)? == self.0 {
            Ok(())
        } else {
            Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
        }
    }

    fn choose_schemes(&self, _all: Vec<SignatureScheme>) -> Vec<SignatureScheme> {
        only_ed25519()
    }
}

/// Rule that accepts any Ed25519 key whose holder signs the handshake.
#[derive(Debug)]
struct AnyKeyRule;

impl CertificateRule for AnyKeyRule {
    fn verify(&self, shown: &PeerCertificate<'_>) -> Result<(), Error> {
        key_of(shown.end_entity).map(drop)
    }

    fn choose_schemes(&self, _all: Vec<SignatureScheme>) -> Vec<SignatureScheme> {
        only_ed25519()
    }
}
