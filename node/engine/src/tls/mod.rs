//! TLS on both listeners and towards peers: reloadable files, and verification of certificates.
//!
//! *Clients*: a server certificate. With `--trusted-ca-file`, every client must present a
//! certificate of that CA, as in etcd.
//!
//! *Peers*: mutual TLS 1.3 under the peer CA. If the cluster's configuration binds a member to a
//! key, that key decides:
//! - A certificate of the right CA with another key is refused.
//! - An expired certificate with the right key raises an alarm, but is not refused. So no cluster
//!   stops working because nobody renewed certificates.
//!
//! Files are checked for changes at handshakes (every 500 ms at most), and read again if they
//! changed. If a file can't be read, its previous content stays in force, and a warning is logged.

mod client;
mod files;
mod policy;
mod purpose;
mod unusable_certificate;
mod verify;

use std::{
    collections::HashSet,
    path::PathBuf,
    sync::{
        Arc, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use node_state::identity::NodeKey;
use rustls::{
    ClientConfig, RootCertStore, ServerConfig, pki_types::CertificateDer,
    server::ParsedCertificate, sign::CertifiedKey,
};

pub use self::{
    client::{ClientFiles, client_config},
    files::TlsError,
    policy::{GoCipherSuite, TlsPolicy, TlsVersion, go_cipher_suite, is_of_tls_1_2},
    unusable_certificate::explain_handshake_error,
};
use self::{
    files::{ReloadingValue, load_crl, load_key, load_roots},
    purpose::CertificatePurpose,
    verify::{ClientNames, ClientRule, InboundPeerRule, OutboundPeerRule},
};
use tokio::sync::watch;
use x509_parser::{certificate::X509Certificate, prelude::FromDer};

use crate::log_limit::LogLimit;

/// ALPN protocol name of peer streams.
pub(crate) const PEER_ALPN: &[u8] = b"muster-peer/1";

/// TLS files and name restrictions of one listener.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificate chain in PEM, leaf first.
    pub cert: PathBuf,
    /// Private key of the leaf in PEM.
    pub key: PathBuf,
    /// CA that must have issued the certificates of connecting clients. If `None`, clients need no
    /// certificate.
    pub trusted_ca: Option<PathBuf>,
    /// List of the certificates that the CA has revoked, in PEM or DER.
    pub crl: Option<PathBuf>,
    /// Allowed common names. If empty, any name is allowed.
    pub allowed_cn: Vec<String>,
    /// Allowed subject alternative names. If empty, any name is allowed.
    pub allowed_hostname: Vec<String>,
    /// Whether a client's certificate authenticates the client as the user in its common name. A
    /// token in a call takes precedence.
    pub names_users: bool,
}

/// TLS of a listener for clients.
#[derive(Debug)]
pub struct ClientListenerTls {
    key: Arc<ReloadingValue<CertifiedKey>>,
    roots: Option<Arc<ReloadingValue<RootCertStore>>>,
    crl: Option<Arc<ReloadingValue<files::Crl>>>,
    config: Arc<ServerConfig>,
    refused_keys: watch::Sender<HashSet<NodeKey>>,
    names_users: bool,
}

impl ClientListenerTls {
    /// Reads the files and builds the server configuration.
    ///
    /// # Errors
    /// If a file can't be read or used.
    pub fn new(files: &TlsFiles, policy: &TlsPolicy, alpn: &[&[u8]]) -> Result<Self, TlsError> {
        let key = Arc::new(load_key(&files.cert, &files.key, &[CertificatePurpose::Server])?);
        let roots = files.trusted_ca.as_deref().map(load_roots).transpose()?.map(Arc::new);
        let crl = match (&files.crl, &roots) {
            (Some(crl), Some(roots)) => Some(Arc::new(load_crl(crl, roots)?)),
            _ => None,
        };
        let builder = ServerConfig::builder_with_provider(policy.provider())
            .with_protocol_versions(&policy.versions())
            .map_err(TlsError::Policy)?;
        let mut config = match &roots {
            None => builder.with_no_client_auth(),
            Some(roots) => {
                let (roots, names) = (Arc::clone(roots), ClientNames::of(files));
                let provider = policy.provider();
                let rule = ClientRule { roots, crl: crl.clone(), names, provider };
                let verifier = muster_tls::client_verifier(rule, &policy.provider());
                builder.with_client_cert_verifier(verifier)
            }
        }
        .with_cert_resolver(Arc::clone(&key) as _);
        config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        muster_tls::disable_resumption(&mut config);
        let refused = watch::Sender::default();
        let names_users = files.names_users && roots.is_some();
        Ok(Self { key, roots, crl, config: Arc::new(config), refused_keys: refused, names_users })
    }

    /// Returns the user named by a client's certificate, if certificates name users on this
    /// listener. If there are several common names, the last one counts, as in etcd. A common name
    /// that can't be read gives the empty user name.
    pub fn user(&self, shown: Option<&[CertificateDer<'_>]>) -> Option<String> {
        let leaf = shown.filter(|_| self.names_users)?.first()?;
        let (_, parsed) = X509Certificate::from_der(leaf).ok()?;
        let name = parsed.subject().iter_common_name().last();
        Some(name.and_then(|name| name.as_str().ok()).unwrap_or_default().to_owned())
    }

    /// Refuses clients whose certificate has one of these keys, and disconnects such clients.
    pub fn set_refused_keys(&self, keys: HashSet<NodeKey>) {
        self.refused_keys.send_if_modified(|known| {
            let changed = *known != keys;
            *known = keys;
            changed
        });
    }

    /// Returns once the key of the presented certificate is refused. Without a certificate, never
    /// returns.
    pub async fn wait_until_refused(&self, shown: Option<&[CertificateDer<'_>]>) {
        let Some(key) = shown.and_then(|chain| chain.first()).and_then(node_key_of) else {
            return std::future::pending().await;
        };
        let mut refused = self.refused_keys.subscribe();
        // The wait ends with an error only if `self` is dropped, but `self` outlives every
        // connection.
        let _ = refused.wait_for(|keys| keys.contains(&key)).await;
    }

    /// Returns when the current server certificate expires, in seconds since 1970.
    #[must_use]
    pub fn expires_at(&self) -> Option<i64> {
        expiry_of(&self.key.get())
    }

    /// Returns the configuration for a TLS acceptor.
    #[must_use]
    pub fn server_config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.config)
    }

    /// Reads every file again, changed or not.
    pub fn reload(&self) {
        self.key.reload();
        if let Some(roots) = &self.roots {
            roots.reload();
        }
        if let Some(crl) = &self.crl {
            crl.reload();
        }
    }
}

/// Node keys that the cluster's configuration binds to members. A certificate with a bound key is
/// accepted even if it has expired or isn't valid yet. `expired` counts the handshakes with such a
/// certificate.
#[derive(Debug, Default)]
pub(crate) struct BoundKeys {
    keys: RwLock<HashSet<NodeKey>>,
    expired: AtomicU64,
    alarms: LogLimit<1>,
}

impl BoundKeys {
    pub(crate) fn contains(&self, key: NodeKey) -> bool {
        self.keys.read().unwrap_or_else(std::sync::PoisonError::into_inner).contains(&key)
    }

    /// Counts one accepted handshake with a certificate outside its validity. Returns `Some(n)` if
    /// it should be logged, where `n` counts the handshakes not logged before it.
    pub(crate) fn count_expired(&self, now: Instant) -> Option<u64> {
        self.expired.fetch_add(1, Ordering::Relaxed);
        self.alarms.pass(0, now)
    }
}

/// TLS between members, in both directions.
#[derive(Debug)]
pub struct PeerTls {
    key: Arc<ReloadingValue<CertifiedKey>>,
    roots: Arc<ReloadingValue<RootCertStore>>,
    crl: Option<Arc<ReloadingValue<files::Crl>>>,
    bound: Arc<BoundKeys>,
    server: Arc<ServerConfig>,
}

impl PeerTls {
    /// Reads the files. A peer CA is required, because without one any host could connect as a
    /// member.
    ///
    /// # Errors
    /// If a file is missing or can't be used.
    pub fn new(files: &TlsFiles) -> Result<Self, TlsError> {
        let key = Arc::new(load_key(
            &files.cert,
            &files.key,
            &[CertificatePurpose::Server, CertificatePurpose::Client],
        )?);
        let ca = files.trusted_ca.as_deref().ok_or(TlsError::NoPeerCa)?;
        let roots = Arc::new(load_roots(ca)?);
        let load_crl = |crl: &PathBuf| load_crl(crl, &roots).map(Arc::new);
        let crl = files.crl.as_ref().map(load_crl).transpose()?;
        let bound = Arc::new(BoundKeys::default());
        let inner = ClientRule {
            roots: Arc::clone(&roots),
            crl: crl.clone(),
            names: ClientNames::of(files),
            provider: muster_tls::provider(),
        };
        // Every peer is this program, so no TLS version older than 1.3 is needed.
        let rule = InboundPeerRule { inner, bound: Arc::clone(&bound) };
        let mut server = muster_tls::tls13_server(rule).with_cert_resolver(Arc::clone(&key) as _);
        server.alpn_protocols = vec![PEER_ALPN.to_vec()];
        muster_tls::disable_resumption(&mut server);
        let server = Arc::new(server);
        Ok(Self { key, roots, crl, bound, server })
    }

    /// Returns when this member's current certificate expires, in seconds since 1970.
    #[must_use]
    pub fn expires_at(&self) -> Option<i64> {
        expiry_of(&self.key.get())
    }

    /// Returns the key by which this member proves its identity.
    #[must_use]
    pub fn node_key(&self) -> Option<NodeKey> {
        self.key.get().cert.first().and_then(node_key_of)
    }

    /// Returns the configuration for a TLS acceptor of peers.
    #[must_use]
    pub(crate) fn server_config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.server)
    }

    /// Returns the configuration for connecting to a peer. With a `bound` key, the peer's
    /// certificate must have that key, and its names don't matter. Without one, the CA must have
    /// issued the certificate, which must name the dialled host.
    #[must_use]
    pub fn client_config(&self, bound: Option<NodeKey>) -> Arc<ClientConfig> {
        let rule = OutboundPeerRule {
            roots: Arc::clone(&self.roots),
            crl: self.crl.clone(),
            expected: bound,
            bound: Arc::clone(&self.bound),
            provider: muster_tls::provider(),
        };
        let mut config =
            muster_tls::tls13_client(rule).with_client_cert_resolver(Arc::clone(&self.key) as _);
        config.alpn_protocols = vec![PEER_ALPN.to_vec()];
        config.resumption = rustls::client::Resumption::disabled();
        Arc::new(config)
    }

    /// Sets the keys to which the cluster's configuration binds its members.
    pub(crate) fn bind(&self, keys: HashSet<NodeKey>) {
        *self.bound.keys.write().unwrap_or_else(std::sync::PoisonError::into_inner) = keys;
    }

    /// Returns how many handshakes were accepted with a bound key although its certificate had
    /// expired.
    #[cfg(test)]
    pub(crate) fn expired_accepted(&self) -> u64 {
        self.bound.expired.load(Ordering::Relaxed)
    }

    /// Reads every file again, changed or not.
    pub fn reload(&self) {
        self.key.reload();
        self.roots.reload();
        if let Some(crl) = &self.crl {
            crl.reload();
        }
    }
}

/// Returns the public key of a certificate, or `None` if the certificate can't be parsed.
#[must_use]
pub fn node_key_of(certificate: &CertificateDer<'_>) -> Option<NodeKey> {
    let parsed = ParsedCertificate::try_from(certificate).ok()?;
    Some(NodeKey::of_spki(&parsed.subject_public_key_info()))
}

fn expiry_of(key: &CertifiedKey) -> Option<i64> {
    let (_, leaf) = X509Certificate::from_der(key.cert.first()?).ok()?;
    Some(leaf.validity().not_after.timestamp())
}

#[cfg(test)]
pub(crate) mod tests;
