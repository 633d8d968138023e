//! Certificates, keys, CAs and revocation lists in files that may be replaced while in use: PEM, and
//! lists in DER as well.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, RwLock},
    time::{Duration, Instant, SystemTime},
};

use rustls::{
    RootCertStore, SignatureScheme,
    client::ResolvesClientCert,
    pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, pem, pem::PemObject},
    server::{ClientHello, ResolvesServerCert, VerifierBuilderError, WebPkiClientVerifier},
    sign::CertifiedKey,
};

use super::{
    purpose::Purpose,
    unusable::{Role, Unusable},
};

/// Handshakes within this time of the last look don't look again.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// The most that one file may hold: lists of revoked certificates may be long.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// What DER of a signed thing begins with.
const DER_SEQUENCE: u8 = 0x30;

/// Why TLS can't be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A PEM file can't be read or holds something else.
    #[error("cannot read {what} from {}", path.display())]
    File {
        /// What was looked for.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: pem::Error,
    },
    /// A file holds nothing of the kind that it was named for.
    #[error("cannot find {what} in {}", path.display())]
    Empty {
        /// What was looked for.
        what: &'static str,
        /// Where.
        path: PathBuf,
    },
    /// Certificate and key don't belong together, or are of a kind that can't be used.
    #[error("the certificate {} and its key cannot be used", path.display())]
    Unusable {
        /// The certificate.
        path: PathBuf,
        /// Why.
        #[source]
        source: rustls::Error,
    },
    /// Certificate or key are of a kind that can't be used.
    #[error("{} cannot be used", path.display())]
    Flawed {
        /// The file.
        path: PathBuf,
        /// What is wrong, and how to make one that works.
        #[source]
        source: Unusable,
    },
    /// Nobody could be checked against it.
    #[error("the revocation list in {} cannot be used", path.display())]
    Revocations {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: VerifierBuilderError,
    },
    /// Peers can't be told from strangers.
    #[error("peer TLS needs --peer-trusted-ca-file")]
    NoPeerCa,
    /// No protocol version or cipher suite is left.
    #[error("the TLS versions and cipher suites leave nothing to offer")]
    Policy(#[source] rustls::Error),
}

/// Something read from files, re-read when they change.
pub(super) struct Reloading<T> {
    paths: Vec<PathBuf>,
    load: Box<dyn Fn() -> Result<T, TlsError> + Send + Sync>,
    current: RwLock<Arc<T>>,
    looked: Mutex<Looked>,
}

struct Looked {
    at: Instant,
    stamps: Vec<Option<(SystemTime, u64)>>,
}

impl<T> fmt::Debug for Reloading<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reloading").field("paths", &self.paths).finish_non_exhaustive()
    }
}

impl<T> Reloading<T> {
    fn new(
        paths: Vec<PathBuf>,
        load: impl Fn() -> Result<T, TlsError> + Send + Sync + 'static,
    ) -> Result<Self, TlsError> {
        let stamps = stamps(&paths);
        let current = RwLock::new(Arc::new(load()?));
        let looked = Mutex::new(Looked { at: Instant::now(), stamps });
        Ok(Self { paths, load: Box::new(load), current, looked })
    }

    /// What the files say now.
    pub(super) fn get(&self) -> Arc<T> {
        if let Ok(mut looked) = self.looked.try_lock()
            && looked.at.elapsed() >= LOOK_EVERY
        {
            looked.at = Instant::now();
            let stamps = stamps(&self.paths);
            if stamps != looked.stamps {
                looked.stamps = stamps;
                self.reload();
            }
        }
        Arc::clone(&self.current.read().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    /// Reads the files now; what can't be read changes nothing.
    pub(super) fn reload(&self) {
        match (self.load)() {
            Ok(new) => {
                *self.current.write().unwrap_or_else(std::sync::PoisonError::into_inner) =
                    Arc::new(new);
                tracing::info!(files = ?self.paths, "re-read TLS files");
            }
            Err(error) => tracing::warn!(
                files = ?self.paths,
                error = %crate::causes::chain(&error),
                "TLS files cannot be read; those read before stay in force"
            ),
        }
    }
}

fn stamps(paths: &[PathBuf]) -> Vec<Option<(SystemTime, u64)>> {
    paths
        .iter()
        .map(|path| {
            let metadata = std::fs::metadata(path).ok()?;
            Some((metadata.modified().ok()?, metadata.len()))
        })
        .collect()
}

/// A certificate chain and its key, checked to belong together, for all of `purposes`.
pub(super) fn load_key(
    cert: &Path,
    key: &Path,
    purposes: &'static [Purpose],
) -> Result<Reloading<CertifiedKey>, TlsError> {
    let (cert, key) = (cert.to_owned(), key.to_owned());
    Reloading::new(vec![cert.clone(), key.clone()], move || {
        let chain = certificates(&cert, "a certificate")?;
        let what = "a private key";
        let private = PrivateKeyDer::from_pem_slice(&read(&key, what)?)
            .map_err(|source| TlsError::File { what, path: key.clone(), source })?;
        let flaw = chain.first().and_then(|leaf| {
            purposes.iter().find_map(|purpose| Unusable::find(leaf, Role::Leaf(*purpose)))
        });
        let path = cert.clone();
        match CertifiedKey::from_der(chain, private, &rustls::crypto::ring::default_provider()) {
            Ok(key) => {
                if let Some(flaw) = flaw {
                    tracing::warn!(
                        path = %path.display(),
                        "muster-node refuses a certificate like this one where it is shown to it, as other strict programs do: {flaw}"
                    );
                }
                Ok(key)
            }
            Err(source) => Err(match flaw {
                Some(source) => TlsError::Flawed { path, source },
                None => TlsError::Unusable { path, source },
            }),
        }
    })
}

/// A CA bundle.
pub(super) fn load_roots(path: &Path) -> Result<Reloading<RootCertStore>, TlsError> {
    let path = path.to_owned();
    Reloading::new(vec![path.clone()], move || {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&path, "a CA certificate")? {
            if let Some(flaw) = Unusable::find(&certificate, Role::Ca) {
                tracing::warn!(
                    path = %path.display(),
                    "nobody with a certificate of this CA is let in: {flaw}"
                );
            }
            roots
                .add(certificate)
                .map_err(|source| TlsError::Unusable { path: path.clone(), source })?;
        }
        Ok(roots)
    })
}

/// A list of revoked certificates.
pub(super) type Crl = Vec<CertificateRevocationListDer<'static>>;

/// Lists for those who are checked against `roots`. A file in which none is found is an error, lest
/// it be taken for a list of nobody.
pub(super) fn load_crl(
    path: &Path,
    roots: &Arc<Reloading<RootCertStore>>,
) -> Result<Reloading<Crl>, TlsError> {
    let (path, roots) = (path.to_owned(), Arc::clone(roots));
    Reloading::new(vec![path.clone()], move || {
        let lists = revocation_lists(&path)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        WebPkiClientVerifier::builder_with_provider(roots.get(), provider)
            .with_crls(lists.iter().cloned())
            .build()
            .map_err(|source| TlsError::Revocations { path: path.clone(), source })?;
        Ok(lists)
    })
}

/// PEM, or one list in DER as etcd has it.
fn revocation_lists(path: &Path) -> Result<Crl, TlsError> {
    let what = "a revocation list";
    let failed = |source| TlsError::File { what, path: path.to_owned(), source };
    let content = read(path, what)?;
    let mut found = CertificateRevocationListDer::pem_slice_iter(&content)
        .collect::<Result<Vec<_>, _>>()
        .map_err(failed)?;
    if found.is_empty() && content.first() == Some(&DER_SEQUENCE) {
        found.push(CertificateRevocationListDer::from(content));
    }
    if found.is_empty() { Err(TlsError::Empty { what, path: path.to_owned() }) } else { Ok(found) }
}

fn read(path: &Path, what: &'static str) -> Result<Vec<u8>, TlsError> {
    muster_files::read_named(path, MAX_FILE_BYTES).map_err(|error| {
        let source = pem::Error::Io(error);
        TlsError::File { what, path: path.to_owned(), source }
    })
}

fn certificates(path: &Path, what: &'static str) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found = CertificateDer::pem_slice_iter(&read(path, what)?)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|source| TlsError::File { what, path: path.to_owned(), source })?;
    if found.is_empty() {
        return Err(TlsError::Empty { what, path: path.to_owned() });
    }
    Ok(found)
}

impl ResolvesServerCert for Reloading<CertifiedKey> {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.get())
    }
}

impl ResolvesClientCert for Reloading<CertifiedKey> {
    fn resolve(&self, _: &[&[u8]], schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        let key = self.get();
        key.key.choose_scheme(schemes).is_some().then_some(key)
    }

    fn has_certs(&self) -> bool {
        true
    }
}
