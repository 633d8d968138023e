//! TLS connections to a pinned key.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, DigitallySignedStruct, OtherError, SignatureScheme};

use crate::digest::Digest;
use crate::key::SigningKey;
use crate::tls::spki_hash;

/// The server showed another key than the pinned ones.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the server's key has the hash {found}, which is not pinned")]
pub struct PinMismatch {
    /// SHA-256 of the shown key (SPKI).
    pub found: Digest,
}

/// Verifier that checks the server's key, and nothing else of its certificate. A host may boot
/// before it knows the time, and the name proves nothing that the key doesn't.
#[derive(Debug)]
struct PinnedServerVerifier {
    pins: Vec<Digest>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for PinnedServerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let found = spki_hash(end_entity)
            .map_err(|_| rustls::Error::InvalidCertificate(CertificateError::BadEncoding))?;
        if self.pins.contains(&found) {
            return Ok(ServerCertVerified::assertion());
        }
        let mismatch = OtherError(Arc::new(PinMismatch { found }));
        Err(rustls::Error::InvalidCertificate(CertificateError::Other(mismatch)))
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.2 is not spoken here".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Returns the configuration for TLS 1.3 to a server whose key has one of `pins`, with a client
/// certificate over `key`.
pub fn client_tls_config(pins: &[Digest], key: Option<&SigningKey>) -> rustls::ClientConfig {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = PinnedServerVerifier { pins: pins.to_vec(), provider: provider.clone() };
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("ring speaks TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    match key {
        None => builder.with_no_client_auth(),
        Some(key) => {
            let identity = key.tls_identity();
            builder
                .with_client_auth_cert(identity.chain, identity.key)
                .expect("our own certificate is over our own key")
        }
    }
}
