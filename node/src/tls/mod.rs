//! TLS on both listeners and towards peers: files that may change, and who is believed.
//!
//! *Clients*: a server certificate; with `--trusted-ca-file`, every client must show a certificate of
//! that CA, as in etcd. *Peers*: mutual TLS 1.3 under the peer CA. Where the cluster's configuration binds
//! a member to a key, that key decides: a certificate of the right CA with another key is refused,
//! and a certificate of the right key that has expired is an alarm, not a refusal, so that no cluster
//! dies because nobody renewed.
//!
//! Files are looked at again at each handshake and re-read when they changed; what can't be read
//! leaves what was read before in force, and says so.

mod client;
mod files;
mod policy;
mod purpose;
mod unusable;
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

use rustls::{
    ClientConfig, RootCertStore, ServerConfig, SupportedProtocolVersion,
    client::danger::ServerCertVerifier,
    pki_types::CertificateDer,
    server::{ParsedCertificate, danger::ClientCertVerifier},
    sign::CertifiedKey,
};

pub(crate) use self::{
    client::{ClientFiles, client_config},
    files::TlsError,
    policy::{GoCipherSuite, TlsPolicy, TlsVersion, go_cipher_suite, is_of_tls_1_2},
    unusable::in_words,
};
use self::{
    files::{Reloading, load_crl, load_key, load_roots},
    purpose::Purpose,
    verify::{ClientNames, InboundPeer, NamedClients, OutboundPeer},
};
use tokio::sync::watch;
use x509_parser::{certificate::X509Certificate, prelude::FromDer};

use crate::{identity::NodeKey, log_limit::LogLimit};

/// ALPN of peer streams.
pub(crate) const PEER_ALPN: &[u8] = b"muster-peer/1";
/// Both ends are this program: nothing older has a place between them.
const PEER_VERSIONS: &[&SupportedProtocolVersion] = &[&rustls::version::TLS13];

/// What one listener was given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// Its certificate chain, PEM, leaf first.
    pub cert: PathBuf,
    /// The leaf's private key, PEM.
    pub key: PathBuf,
    /// The CA that those who connect must have a certificate of; none: they need none.
    pub trusted_ca: Option<PathBuf>,
    /// Certificates of that CA that no longer count, PEM or DER.
    pub crl: Option<PathBuf>,
    /// If not empty, the common name must be one of these.
    pub allowed_cn: Vec<String>,
    /// If not empty, a subject alternative name must be one of these.
    pub allowed_hostname: Vec<String>,
    /// Whoever connects is the user whom the common name names, unless they show a token.
    pub names_users: bool,
}

/// TLS of a listener for clients.
#[derive(Debug)]
pub(crate) struct ClientListenerTls {
    key: Arc<Reloading<CertifiedKey>>,
    roots: Option<Arc<Reloading<RootCertStore>>>,
    crl: Option<Arc<Reloading<files::Crl>>>,
    config: Arc<ServerConfig>,
    refused: watch::Sender<HashSet<NodeKey>>,
    names_users: bool,
}

impl ClientListenerTls {
    /// Reads the files and settles what is offered.
    ///
    /// # Errors
    /// If a file can't be read or used.
    pub(crate) fn new(
        files: &TlsFiles,
        policy: &TlsPolicy,
        alpn: &[&[u8]],
    ) -> Result<Self, TlsError> {
        let key = Arc::new(load_key(&files.cert, &files.key, &[Purpose::Server])?);
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
            Some(roots) => builder.with_client_cert_verifier(Arc::new(NamedClients::new(
                Arc::clone(roots),
                crl.clone(),
                ClientNames::of(files),
                policy.provider(),
            ))
                as Arc<dyn ClientCertVerifier>),
        }
        .with_cert_resolver(Arc::clone(&key) as _);
        config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        never_resume(&mut config);
        let refused = watch::Sender::default();
        let names_users = files.names_users && roots.is_some();
        Ok(Self { key, roots, crl, config: Arc::new(config), refused, names_users })
    }

    /// Whom the certificate of a connection names, if certificates name users here. Of several common
    /// names it is the last one, as in etcd; one that can't be read is nobody's.
    pub(crate) fn user(&self, shown: Option<&[CertificateDer<'_>]>) -> Option<String> {
        let leaf = shown.filter(|_| self.names_users)?.first()?;
        let (_, parsed) = X509Certificate::from_der(leaf).ok()?;
        let name = parsed.subject().iter_common_name().last();
        Some(name.and_then(|name| name.as_str().ok()).unwrap_or_default().to_owned())
    }

    /// Whoever shows one of these keys is let in no longer, and put out.
    pub(crate) fn refuse(&self, keys: HashSet<NodeKey>) {
        self.refused.send_if_modified(|known| {
            let changed = *known != keys;
            *known = keys;
            changed
        });
    }

    /// Returns once whoever showed these certificates is refused.
    pub(crate) async fn refused(&self, shown: Option<&[CertificateDer<'_>]>) {
        let Some(key) = shown.and_then(|chain| chain.first()).and_then(node_key_of) else {
            return std::future::pending().await;
        };
        let mut refused = self.refused.subscribe();
        // What it waits for ends with this, which outlives every connection.
        let _ = refused.wait_for(|keys| keys.contains(&key)).await;
    }

    /// When the server's certificate in force expires, in seconds since 1970.
    #[must_use]
    pub(crate) fn expires_at(&self) -> Option<i64> {
        expiry_of(&self.key.get())
    }

    /// What an acceptor needs.
    #[must_use]
    pub(crate) fn server_config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.config)
    }

    /// Re-reads every file now, changed or not.
    pub(crate) fn reload(&self) {
        self.key.reload();
        if let Some(roots) = &self.roots {
            roots.reload();
        }
        if let Some(crl) = &self.crl {
            crl.reload();
        }
    }
}

/// A resumed session takes over the certificate of the one before and asks no verifier: it would
/// outlive a revocation, an expiry, another CA, and a key that was unbound since.
fn never_resume(config: &mut ServerConfig) {
    config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
}

/// Keys for which an expired certificate is still taken, and how often that happened.
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

    /// Counts one more; `Some(n)` if it is to be told of, `n` having been left untold before it.
    pub(crate) fn count_expired(&self, now: Instant) -> Option<u64> {
        self.expired.fetch_add(1, Ordering::Relaxed);
        self.alarms.pass(0, now)
    }
}

/// TLS between members, in both directions.
#[derive(Debug)]
pub(crate) struct PeerTls {
    key: Arc<Reloading<CertifiedKey>>,
    roots: Arc<Reloading<RootCertStore>>,
    crl: Option<Arc<Reloading<files::Crl>>>,
    bound: Arc<BoundKeys>,
    server: Arc<ServerConfig>,
}

impl PeerTls {
    /// Reads the files. A peer CA is required: nothing else would tell a member from a stranger.
    ///
    /// # Errors
    /// If a file is missing or can't be used.
    pub(crate) fn new(files: &TlsFiles) -> Result<Self, TlsError> {
        let key = Arc::new(load_key(&files.cert, &files.key, &[Purpose::Server, Purpose::Client])?);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let ca = files.trusted_ca.as_deref().ok_or(TlsError::NoPeerCa)?;
        let roots = Arc::new(load_roots(ca)?);
        let load_crl = |crl: &PathBuf| load_crl(crl, &roots).map(Arc::new);
        let crl = files.crl.as_ref().map(load_crl).transpose()?;
        let bound = Arc::new(BoundKeys::default());
        let verifier = InboundPeer::new(
            NamedClients::new(
                Arc::clone(&roots),
                crl.clone(),
                ClientNames::of(files),
                Arc::clone(&provider),
            ),
            Arc::clone(&bound),
        );
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(PEER_VERSIONS)
            .map_err(TlsError::Policy)?
            .with_client_cert_verifier(Arc::new(verifier) as Arc<dyn ClientCertVerifier>)
            .with_cert_resolver(Arc::clone(&key) as _);
        server.alpn_protocols = vec![PEER_ALPN.to_vec()];
        never_resume(&mut server);
        let server = Arc::new(server);
        Ok(Self { key, roots, crl, bound, server })
    }

    /// When this member's certificate in force expires, in seconds since 1970.
    #[must_use]
    pub(crate) fn expires_at(&self) -> Option<i64> {
        expiry_of(&self.key.get())
    }

    /// The key that this member proves itself by.
    #[must_use]
    pub(crate) fn node_key(&self) -> Option<NodeKey> {
        self.key.get().cert.first().and_then(node_key_of)
    }

    /// What an acceptor of peers needs.
    #[must_use]
    pub(crate) fn server_config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.server)
    }

    /// What dialling a peer needs: with `bound`, its key must be that one and names don't matter;
    /// without, its certificate must be the CA's and name the dialled host.
    ///
    /// # Errors
    /// If the library has nothing to offer.
    pub(crate) fn client_config(
        &self,
        bound: Option<NodeKey>,
    ) -> Result<Arc<ClientConfig>, TlsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = OutboundPeer::new(
            Arc::clone(&self.roots),
            self.crl.clone(),
            bound,
            Arc::clone(&self.bound),
            Arc::clone(&provider),
        );
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(PEER_VERSIONS)
            .map_err(TlsError::Policy)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier) as Arc<dyn ServerCertVerifier>)
            .with_client_cert_resolver(Arc::clone(&self.key) as _);
        config.alpn_protocols = vec![PEER_ALPN.to_vec()];
        config.resumption = rustls::client::Resumption::disabled();
        Ok(Arc::new(config))
    }

    /// Sets the keys that the cluster's configuration binds its members to.
    pub(crate) fn bind(&self, keys: HashSet<NodeKey>) {
        *self.bound.keys.write().unwrap_or_else(std::sync::PoisonError::into_inner) = keys;
    }

    /// How many handshakes were accepted on a bound key although its certificate has expired.
    #[cfg(test)]
    pub(crate) fn expired_accepted(&self) -> u64 {
        self.bound.expired.load(Ordering::Relaxed)
    }

    /// Re-reads every file now, changed or not.
    pub(crate) fn reload(&self) {
        self.key.reload();
        self.roots.reload();
        if let Some(crl) = &self.crl {
            crl.reload();
        }
    }
}

/// The key that a certificate certifies; `None` if it can't be parsed.
#[must_use]
pub(crate) fn node_key_of(certificate: &CertificateDer<'_>) -> Option<NodeKey> {
    let parsed = ParsedCertificate::try_from(certificate).ok()?;
    Some(NodeKey::of_spki(&parsed.subject_public_key_info()))
}

fn expiry_of(key: &CertifiedKey) -> Option<i64> {
    let (_, leaf) = X509Certificate::from_der(key.cert.first()?).ok()?;
    Some(leaf.validity().not_after.timestamp())
}

#[cfg(test)]
pub(crate) mod tests;
