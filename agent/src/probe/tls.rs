//! TLS between two agents: each proves its Ed25519 key, and nothing else is checked.

use std::sync::Arc;

use discovery_types::key::{PublicKey, SigningKey};
use discovery_types::tls::{TlsIdentity, client_key};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig,
    SignatureScheme,
};

use super::ALPN;

/// Why an agent's key can't be used for TLS.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IdentityError {
    /// The TLS library refused it.
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
    provider: Arc<CryptoProvider>,
}

impl ProbeIdentity {
    /// Makes a self-signed certificate of the agent's key.
    pub(crate) fn new(key: &SigningKey) -> Self {
        let TlsIdentity { mut chain, key: private } = key.tls_identity();
        let certificate = chain.swap_remove(0);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        Self {
            certificate,
            key: private,
            #[cfg(test)]
            public: *key.public(),
            provider,
        }
    }

    #[cfg(test)]
    pub(crate) fn public(&self) -> PublicKey {
        self.public
    }

    /// Returns the listener's configuration. It requires a client certificate of any key; the
    /// listener checks the key after the handshake.
    pub(crate) fn server_config(&self) -> Result<Arc<ServerConfig>, IdentityError> {
        let mut config = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(Arc::new(AnyKeyVerifier {
                provider: Arc::clone(&self.provider),
            }))
            .with_single_cert(vec![self.certificate.clone()], self.key.clone_key())?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        // Without session tickets, each probe proves its key in a full handshake.
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }

    /// Returns the configuration for probing the one agent that holds the key `expected`.
    pub(crate) fn client_config(
        &self,
        expected: PublicKey,
    ) -> Result<Arc<ClientConfig>, IdentityError> {
        let verifier = ExpectedKeyVerifier { expected, provider: Arc::clone(&self.provider) };
        let mut config = ClientConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
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

fn verify_signature(
    provider: &CryptoProvider,
    message: &[u8],
    certificate: &CertificateDer<'_>,
    signature: &DigitallySignedStruct,
) -> Result<HandshakeSignatureValid, Error> {
    let algorithms = &provider.signature_verification_algorithms;
    verify_tls13_signature(message, certificate, signature, algorithms)
}

fn no_tls12() -> Result<HandshakeSignatureValid, Error> {
    Err(Error::General("probes speak TLS 1.3 only".to_owned()))
}

/// Verifier that accepts only a certificate with the expected key.
#[derive(Debug)]
struct ExpectedKeyVerifier {
    expected: PublicKey,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for ExpectedKeyVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if key_of(end_entity)? == self.expected {
            Ok(ServerCertVerified::assertion())
        } else {
            Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
        }
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        no_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_signature(&self.provider, message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

/// Verifier that accepts any Ed25519 key whose holder signs the handshake.
#[derive(Debug)]
struct AnyKeyVerifier {
    provider: Arc<CryptoProvider>,
}

impl ClientCertVerifier for AnyKeyVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        key_of(end_entity).map(|_| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        no_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_signature(&self.provider, message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}
