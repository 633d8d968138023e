//! TLS configurations in which the caller's rule decides which certificates are accepted.
//!
//! In a handshake, rustls asks a verifier two questions:
//!
//! 1. Is this certificate accepted? The caller's [`CertificateRule`] answers.
//! 2. Did the certificate's key sign this handshake? This crate answers, in the same way for each
//!    rule. No rule can skip it, so an accepted certificate always comes from the holder of its
//!    key.

use std::{fmt::Debug, sync::Arc};

use rustls::{
    ClientConfig, ConfigBuilder, DigitallySignedStruct, DistinguishedName, Error, ServerConfig,
    SignatureScheme, SupportedProtocolVersion,
    client::{
        WantsClientCert,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{
        CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
    },
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::{
        NoServerSessionStorage, WantsServerCert,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};

const ONLY_TLS13: &[&SupportedProtocolVersion] = &[&rustls::version::TLS13];

/// Certificate that a peer presents in a handshake.
#[derive(Clone, Copy, Debug)]
pub struct PeerCertificate<'a> {
    /// The certificate of the peer itself.
    pub end_entity: &'a CertificateDer<'a>,
    /// Certificates that may form a chain from the peer's certificate to a CA's.
    pub intermediates: &'a [CertificateDer<'a>],
    /// Name or address that the client connects to; `None` for the certificate of a client.
    pub server_name: Option<&'a ServerName<'a>>,
    /// Time of the handshake.
    pub now: UnixTime,
}

/// Rule by which peers are accepted.
pub trait CertificateRule: Debug + Send + Sync + 'static {
    /// Checks a certificate, before the peer has proved that it has the certificate's key.
    ///
    /// # Errors
    /// If the certificate is refused.
    fn verify(&self, shown: &PeerCertificate<'_>) -> Result<(), Error>;

    /// Whether a client without a certificate is refused.
    fn is_mandatory(&self) -> bool {
        true
    }

    /// Chooses the signature schemes that a peer may use, among those of the provider.
    fn choose_schemes(&self, all: Vec<SignatureScheme>) -> Vec<SignatureScheme> {
        all
    }

    /// Returns the error for a handshake whose signature doesn't verify: `error` itself, or an
    /// error with more detail about the certificate.
    fn explain(&self, error: Error, _end_entity: &CertificateDer<'_>) -> Error {
        error
    }
}

/// Returns the crypto provider that all our programs use.
#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Begins the configuration of a client that speaks TLS 1.3 with the servers that `rule` accepts.
#[must_use]
pub fn tls13_client(rule: impl CertificateRule) -> ConfigBuilder<ClientConfig, WantsClientCert> {
    let provider = provider();
    let verifier = RuleVerifier::new(rule, &provider, ONLY_TLS13);
    ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(ONLY_TLS13)
        .expect("ring speaks TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
}

/// Begins the configuration of a server that speaks TLS 1.3 with the clients that `rule` accepts.
#[must_use]
pub fn tls13_server(rule: impl CertificateRule) -> ConfigBuilder<ServerConfig, WantsServerCert> {
    let provider = provider();
    let verifier = RuleVerifier::new(rule, &provider, ONLY_TLS13);
    ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(ONLY_TLS13)
        .expect("ring speaks TLS 1.3")
        .with_client_cert_verifier(Arc::new(verifier))
}

/// Begins the configuration of a server that speaks TLS 1.3 and asks clients for no certificate.
#[must_use]
pub fn tls13_server_without_client_auth() -> ConfigBuilder<ServerConfig, WantsServerCert> {
    ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(ONLY_TLS13)
        .expect("ring speaks TLS 1.3")
        .with_no_client_auth()
}

/// Returns a verifier of clients for a server that the caller configures itself, with any TLS
/// version.
#[must_use]
pub fn client_verifier(
    rule: impl CertificateRule,
    provider: &CryptoProvider,
) -> Arc<dyn ClientCertVerifier> {
    Arc::new(RuleVerifier::new(rule, provider, rustls::ALL_VERSIONS))
}

/// Disables session resumption. A resumed session keeps the previous session's certificate, and no
/// rule is asked again. The session would outlive a revocation, an expiry, a change of CA, and the
/// removal of a key.
pub fn disable_resumption(config: &mut ServerConfig) {
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
}

/// Verifier that asks a rule about the certificate, and checks the handshake's signature itself.
#[derive(Debug)]
struct RuleVerifier<R> {
    rule: R,
    algorithms: WebPkiSupportedAlgorithms,
    speaks_tls12: bool,
}

impl<R: CertificateRule> RuleVerifier<R> {
    fn new(rule: R, provider: &CryptoProvider, versions: &[&SupportedProtocolVersion]) -> Self {
        let algorithms = provider.signature_verification_algorithms;
        Self { rule, algorithms, speaks_tls12: versions.contains(&&rustls::version::TLS12) }
    }
}

/// Signature methods that both verifier traits of rustls require.
macro_rules! handshake_signature_methods {
    () => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            if !self.speaks_tls12 {
                return Err(Error::General("TLS 1.2 is not spoken here".into()));
            }
            verify_tls12_signature(message, certificate, signed, &self.algorithms)
                .map_err(|error| self.rule.explain(error, certificate))
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            verify_tls13_signature(message, certificate, signed, &self.algorithms)
                .map_err(|error| self.rule.explain(error, certificate))
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.rule.choose_schemes(self.algorithms.supported_schemes())
        }
    };
}

impl<R: CertificateRule> ServerCertVerifier for RuleVerifier<R> {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let server_name = Some(server_name);
        self.rule.verify(&PeerCertificate { end_entity, intermediates, server_name, now })?;
        Ok(ServerCertVerified::assertion())
    }

    handshake_signature_methods!();
}

impl<R: CertificateRule> ClientCertVerifier for RuleVerifier<R> {
    // The names of CAs are not sent as a hint, because a client has either one certificate for us
    // or none.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn client_auth_mandatory(&self) -> bool {
        self.rule.is_mandatory()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let server_name = None;
        self.rule.verify(&PeerCertificate { end_entity, intermediates, server_name, now })?;
        Ok(ClientCertVerified::assertion())
    }

    handshake_signature_methods!();
}

#[cfg(test)]
mod tests;
