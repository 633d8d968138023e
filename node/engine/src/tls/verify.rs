//! Verifiers of the certificates of clients and peers.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use node_state::identity::NodeKey;
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore,
    SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::{
        ParsedCertificate, WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};
use x509_parser::{certificate::X509Certificate, prelude::FromDer};

use super::{
    BoundKeys, TlsFiles,
    files::{Crl, ReloadingValue},
    node_key_of,
    purpose::{CertificatePurpose, PresentedCertificate, is_about_purpose},
    unusable_certificate::explain,
};

/// Names that a client's certificate must have, in addition to being issued by the CA.
#[derive(Clone, Debug, Default)]
pub(super) struct ClientNames {
    common: Vec<String>,
    hosts: Vec<String>,
}

impl ClientNames {
    pub(super) fn of(files: &TlsFiles) -> Self {
        Self { common: files.allowed_cn.clone(), hosts: files.allowed_hostname.clone() }
    }

    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        let refused =
            || Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure);
        if !self.common.is_empty() {
            let (_, parsed) = X509Certificate::from_der(certificate).map_err(|_| refused())?;
            let known = parsed
                .subject()
                .iter_common_name()
                .filter_map(|name| name.as_str().ok())
                .any(|name| self.common.iter().any(|allowed| allowed == name));
            if !known {
                return Err(refused());
            }
        }
        if !self.hosts.is_empty() {
            let parsed = ParsedCertificate::try_from(certificate)?;
            let known = self.hosts.iter().any(|host| {
                ServerName::try_from(host.as_str())
                    .is_ok_and(|name| rustls::client::verify_server_name(&parsed, &name).is_ok())
            });
            if !known {
                return Err(refused());
            }
        }
        Ok(())
    }
}

/// Verifier of clients: their certificate must be issued by the CA, not be revoked, and have an
/// allowed name.
#[derive(Debug)]
pub(super) struct ClientVerifier {
    roots: Arc<ReloadingValue<RootCertStore>>,
    crl: Option<Arc<ReloadingValue<Crl>>>,
    names: ClientNames,
    provider: Arc<CryptoProvider>,
}

impl ClientVerifier {
    pub(super) fn new(
        roots: Arc<ReloadingValue<RootCertStore>>,
        crl: Option<Arc<ReloadingValue<Crl>>>,
        names: ClientNames,
        provider: Arc<CryptoProvider>,
    ) -> Self {
        Self { roots, crl, names, provider }
    }

    /// Returns a verifier for the current content of the files.
    fn inner(&self) -> Result<Arc<dyn ClientCertVerifier>, Error> {
        let mut builder = WebPkiClientVerifier::builder_with_provider(
            self.roots.get(),
            Arc::clone(&self.provider),
        );
        if let Some(crl) = &self.crl {
            builder = builder
                .with_crls(crl.get().iter().cloned())
                .only_check_end_entity_revocation()
                .allow_unknown_revocation_status();
        }
        builder.build().map_err(|e| Error::General(e.to_string()))
    }
}

impl ClientCertVerifier for ClientVerifier {
    // The CA's names are not sent as a hint, because a client has either one certificate for us or
    // none.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = match self.inner()?.verify_client_cert(end_entity, intermediates, now) {
            Err(error) if is_about_purpose(&error) => {
                let (roots, crls) = (self.roots.get(), self.crl.as_ref().map(|crl| crl.get()));
                let crls = crls.as_deref().map_or(&[][..], Vec::as_slice);
                let shown =
                    PresentedCertificate { end_entity, intermediates, roots: &roots, crls, now };
                let algorithms = &self.provider.signature_verification_algorithms;
                let is_for_any = shown.is_valid_for(CertificatePurpose::Client, algorithms);
                if is_for_any { Ok(ClientCertVerified::assertion()) } else { Err(error) }
            }
            verified => verified,
        };
        let verified = verified.map_err(|error| match is_about_time(&error) {
            true => error,
            false => explain(error, end_entity, CertificatePurpose::Client),
        })?;
        self.names.check(end_entity)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        let verified = verify_tls12_signature(message, cert, dss, algorithms);
        verified.map_err(|error| explain(error, cert, CertificatePurpose::Client))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        let verified = verify_tls13_signature(message, cert, dss, algorithms);
        verified.map_err(|error| explain(error, cert, CertificatePurpose::Client))
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Verifier of peers that connect to this member. Peers are verified as clients of the peer CA, but
/// a bound key's certificate may be expired. Which member may use which key is checked with the
/// hello, which names the member.
#[derive(Debug)]
pub(super) struct InboundPeerVerifier {
    inner: ClientVerifier,
    bound: Arc<BoundKeys>,
}

impl InboundPeerVerifier {
    pub(super) fn new(inner: ClientVerifier, bound: Arc<BoundKeys>) -> Self {
        Self { inner, bound }
    }
}

impl ClientCertVerifier for InboundPeerVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verify = |now| self.inner.verify_client_cert(end_entity, intermediates, now);
        match verify(now) {
            Err(error) if is_about_time(&error) && is_bound(&self.bound, end_entity) => {
                verify_at_expiry(end_entity, error, verify)?;
                alarm(&self.bound, end_entity);
                Ok(ClientCertVerified::assertion())
            }
            result => result,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

/// Verifier of a peer that this member connects to.
#[derive(Debug)]
pub(super) struct OutboundPeerVerifier {
    roots: Arc<ReloadingValue<RootCertStore>>,
    crl: Option<Arc<ReloadingValue<Crl>>>,
    expected: Option<NodeKey>,
    bound: Arc<BoundKeys>,
    provider: Arc<CryptoProvider>,
}

impl OutboundPeerVerifier {
    pub(super) fn new(
        roots: Arc<ReloadingValue<RootCertStore>>,
        crl: Option<Arc<ReloadingValue<Crl>>>,
        expected: Option<NodeKey>,
        bound: Arc<BoundKeys>,
        provider: Arc<CryptoProvider>,
    ) -> Self {
        Self { roots, crl, expected, bound, provider }
    }

    fn inner(&self) -> Result<Arc<WebPkiServerVerifier>, Error> {
        let mut builder = WebPkiServerVerifier::builder_with_provider(
            self.roots.get(),
            Arc::clone(&self.provider),
        );
        if let Some(crl) = &self.crl {
            builder = builder
                .with_crls(crl.get().iter().cloned())
                .only_check_end_entity_revocation()
                .allow_unknown_revocation_status();
        }
        builder.build().map_err(|e| Error::General(e.to_string()))
    }
}

impl ServerCertVerifier for OutboundPeerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let inner = self.inner()?;
        let (roots, crls) = (self.roots.get(), self.crl.as_ref().map(|crl| crl.get()));
        let crls = crls.as_deref().map_or(&[][..], Vec::as_slice);
        let algorithms = &self.provider.signature_verification_algorithms;
        let verify = |now| {
            let error =
                match inner.verify_server_cert(end_entity, intermediates, server_name, ocsp, now) {
                    Err(error) => error,
                    verified => return verified,
                };
            let shown =
                PresentedCertificate { end_entity, intermediates, roots: &roots, crls, now };
            if is_about_purpose(&error)
                && shown.is_valid_for(CertificatePurpose::Server, algorithms)
            {
                let parsed = ParsedCertificate::try_from(end_entity)?;
                rustls::client::verify_server_name(&parsed, server_name)?;
                return Ok(ServerCertVerified::assertion());
            }
            if is_about_time(&error) || is_about_name(&error) {
                return Err(error);
            }
            Err(explain(error, end_entity, CertificatePurpose::Server))
        };
        let Some(expected) = self.expected else {
            return verify(now);
        };
        if node_key_of(end_entity) != Some(expected) {
            return Err(CertificateError::ApplicationVerificationFailure.into());
        }
        // The library checks the name last, so an error about the name means that everything else
        // is right. Names don't matter here: addresses may change, but the bound key does not.
        let verify = |now| match verify(now) {
            Err(error) if is_about_name(&error) => Ok(ServerCertVerified::assertion()),
            result => result,
        };
        match verify(now) {
            Err(error) if is_about_time(&error) => {
                verify_at_expiry(end_entity, error, verify)?;
                alarm(&self.bound, end_entity);
                Ok(ServerCertVerified::assertion())
            }
            result => result,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        let verified = verify_tls12_signature(message, cert, dss, algorithms);
        verified.map_err(|error| explain(error, cert, CertificatePurpose::Server))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        let verified = verify_tls13_signature(message, cert, dss, algorithms);
        verified.map_err(|error| explain(error, cert, CertificatePurpose::Server))
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

fn is_about_name(error: &Error) -> bool {
    use CertificateError::{NotValidForName, NotValidForNameContext};
    matches!(error, Error::InvalidCertificate(NotValidForName | NotValidForNameContext { .. }))
}

fn is_about_time(error: &Error) -> bool {
    matches!(
        error,
        Error::InvalidCertificate(
            CertificateError::Expired
                | CertificateError::ExpiredContext { .. }
                | CertificateError::NotValidYet
                | CertificateError::NotValidYetContext { .. }
        )
    )
}

fn is_bound(bound: &BoundKeys, certificate: &CertificateDer<'_>) -> bool {
    node_key_of(certificate).is_some_and(|key| bound.contains(key))
}

/// Verifies again at the last moment at which the certificate itself was valid. Everything but the
/// current date must be right. A CA that had expired even then is accepted, because that is also
/// only a matter of time.
fn verify_at_expiry<T>(
    certificate: &CertificateDer<'_>,
    error: Error,
    verify: impl Fn(UnixTime) -> Result<T, Error>,
) -> Result<(), Error> {
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|_| error.clone())?;
    let end = u64::try_from(parsed.validity().not_after.timestamp()).map_err(|_| error)?;
    match verify(UnixTime::since_unix_epoch(Duration::from_secs(end))) {
        Err(error) if !is_about_time(&error) => Err(error),
        _ => Ok(()),
    }
}

fn alarm(bound: &BoundKeys, certificate: &CertificateDer<'_>) {
    let Some(untold) = bound.count_expired(Instant::now()) else { return };
    tracing::error!(
        node_key = node_key_of(certificate).map(tracing::field::display),
        untold,
        "a peer's certificate is outside its validity; its key is bound to the member, so the peer is accepted: renew it"
    );
}
