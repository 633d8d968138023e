//! Rules for the certificates of clients and peers.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use muster_tls::{CertificateRule, PeerCertificate};
use node_state::identity::NodeKey;
use rustls::{
    CertificateError, Error, RootCertStore,
    client::{WebPkiServerVerifier, danger::ServerCertVerifier as _},
    crypto::CryptoProvider,
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::{ParsedCertificate, WebPkiClientVerifier, danger::ClientCertVerifier},
};
use x509_parser::{certificate::X509Certificate, prelude::FromDer};

use super::{
    BoundKeys, TlsFiles,
    files::{Crl, ReloadingValue},
    node_key_of,
    purpose::{CertificatePurpose, PresentedCertificate, is_about_purpose},
    unusable_certificate::explain,
};

/// Names that a client's certificate must have: one of `common` and one of `hosts`. An empty list
/// allows any name.
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

/// Rule for clients' certificates: the CA must have issued the certificate, it must not be revoked,
/// and its name must be allowed.
#[derive(Debug)]
pub(super) struct ClientRule {
    pub(super) roots: Arc<ReloadingValue<RootCertStore>>,
    pub(super) crl: Option<Arc<ReloadingValue<Crl>>>,
    pub(super) names: ClientNames,
    pub(super) provider: Arc<CryptoProvider>,
}

impl ClientRule {
    /// Returns a verifier that uses the current content of the files.
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

impl CertificateRule for ClientRule {
    fn verify(&self, shown: &PeerCertificate<'_>) -> Result<(), Error> {
        let &PeerCertificate { end_entity, intermediates, now, .. } = shown;
        let verified = match self.inner()?.verify_client_cert(end_entity, intermediates, now) {
            Err(error) if is_about_purpose(&error) => {
                let (roots, crls) = (self.roots.get(), self.crl.as_ref().map(|crl| crl.get()));
                let crls = crls.as_deref().map_or(&[][..], Vec::as_slice);
                let shown =
                    PresentedCertificate { end_entity, intermediates, roots: &roots, crls, now };
                let algorithms = &self.provider.signature_verification_algorithms;
                let is_for_any = shown.is_valid_for(CertificatePurpose::Client, algorithms);
                if is_for_any { Ok(()) } else { Err(error) }
            }
            verified => verified.map(drop),
        };
        verified.map_err(|error| match is_about_time(&error) {
            true => error,
            false => explain(error, end_entity, CertificatePurpose::Client),
        })?;
        self.names.check(end_entity)
    }

    fn explain(&self, error: Error, end_entity: &CertificateDer<'_>) -> Error {
        explain(error, end_entity, CertificatePurpose::Client)
    }
}

/// Rule for peers that connect to this member. Their certificates are verified as client
/// certificates of the peer CA, except that a certificate with a bound key may be expired. This
/// rule doesn't check that the key belongs to the right member. The check of the hello does,
/// because only the hello names the member.
#[derive(Debug)]
pub(super) struct InboundPeerRule {
    pub(super) inner: ClientRule,
    pub(super) bound: Arc<BoundKeys>,
}

impl CertificateRule for InboundPeerRule {
    fn verify(&self, shown: &PeerCertificate<'_>) -> Result<(), Error> {
        let verify = |now| self.inner.verify(&PeerCertificate { now, ..*shown });
        match verify(shown.now) {
            Err(error) if is_about_time(&error) && is_bound(&self.bound, shown.end_entity) => {
                verify_at_expiry(shown.end_entity, error, verify)?;
                count_and_log_expired(&self.bound, shown.end_entity);
                Ok(())
            }
            result => result,
        }
    }

    fn explain(&self, error: Error, end_entity: &CertificateDer<'_>) -> Error {
        self.inner.explain(error, end_entity)
    }
}

/// Rule for the certificate of a peer that this member connects to.
#[derive(Debug)]
pub(super) struct OutboundPeerRule {
    pub(super) roots: Arc<ReloadingValue<RootCertStore>>,
    pub(super) crl: Option<Arc<ReloadingValue<Crl>>>,
    pub(super) expected: Option<NodeKey>,
    pub(super) bound: Arc<BoundKeys>,
    pub(super) provider: Arc<CryptoProvider>,
}

impl OutboundPeerRule {
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

impl CertificateRule for OutboundPeerRule {
    fn verify(&self, shown: &PeerCertificate<'_>) -> Result<(), Error> {
        let &PeerCertificate { end_entity, intermediates, now, .. } = shown;
        // This rule verifies servers' certificates. The TLS library passes the dialled name with
        // each of them, so a missing name is an error.
        let server_name =
            shown.server_name.ok_or(CertificateError::ApplicationVerificationFailure)?;
        let inner = self.inner()?;
        let (roots, crls) = (self.roots.get(), self.crl.as_ref().map(|crl| crl.get()));
        let crls = crls.as_deref().map_or(&[][..], Vec::as_slice);
        let algorithms = &self.provider.signature_verification_algorithms;
        let verify = |now| {
            let error =
                match inner.verify_server_cert(end_entity, intermediates, server_name, &[], now) {
                    Err(error) => error,
                    Ok(_) => return Ok(()),
                };
            let shown =
                PresentedCertificate { end_entity, intermediates, roots: &roots, crls, now };
            if is_about_purpose(&error)
                && shown.is_valid_for(CertificatePurpose::Server, algorithms)
            {
                let parsed = ParsedCertificate::try_from(end_entity)?;
                return rustls::client::verify_server_name(&parsed, server_name);
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
        // is valid. The name doesn't matter here, because the bound key identifies the peer.
        let verify = |now| match verify(now) {
            Err(error) if is_about_name(&error) => Ok(()),
            result => result,
        };
        match verify(now) {
            Err(error) if is_about_time(&error) => {
                verify_at_expiry(end_entity, error, verify)?;
                count_and_log_expired(&self.bound, end_entity);
                Ok(())
            }
            result => result,
        }
    }

    fn explain(&self, error: Error, end_entity: &CertificateDer<'_>) -> Error {
        explain(error, end_entity, CertificatePurpose::Server)
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

/// Verifies a certificate that has expired, or isn't valid yet, as of the last moment of its
/// validity. Everything else about it must be valid. An error about the dates of its CA is ignored
/// as well.
fn verify_at_expiry(
    certificate: &CertificateDer<'_>,
    error: Error,
    verify: impl Fn(UnixTime) -> Result<(), Error>,
) -> Result<(), Error> {
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|_| error.clone())?;
    let end = u64::try_from(parsed.validity().not_after.timestamp()).map_err(|_| error)?;
    match verify(UnixTime::since_unix_epoch(Duration::from_secs(end))) {
        Err(error) if !is_about_time(&error) => Err(error),
        _ => Ok(()),
    }
}

fn count_and_log_expired(bound: &BoundKeys, certificate: &CertificateDer<'_>) {
    let Some(untold) = bound.count_expired(Instant::now()) else { return };
    tracing::error!(
        node_key = node_key_of(certificate).map(tracing::field::display),
        untold,
        "a peer's certificate is outside its validity; its key is bound to the member, so the peer is accepted: renew it"
    );
}
