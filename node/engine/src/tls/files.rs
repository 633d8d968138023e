//! TLS files that may be replaced while in use: certificates, keys, CAs and revocation lists. The
//! files are PEM; revocation lists may also be DER.

use std::{
    fmt,
    io::ErrorKind,
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
    purpose::CertificatePurpose,
    unusable_certificate::{CertificateRole, UnusableCertificate},
};

/// Minimum time between two checks of a file for changes.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Maximum size of one file. Revocation lists may be long.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// First byte of a DER sequence. Certificates and revocation lists begin with it.
const DER_SEQUENCE: u8 = 0x30;

/// Reason why TLS can't be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A PEM file can't be read, or its content isn't of the expected kind.
    #[error("cannot read {what} from {}", path.display())]
    File {
        /// Kind of content that was expected.
        what: &'static str,
        path: PathBuf,
        /// Error of the read or of the PEM parser.
        #[source]
        source: pem::Error,
    },
    /// A file has no content of the expected kind.
    #[error("cannot find {what} in {}", path.display())]
    Empty {
        /// Kind of content that was expected.
        what: &'static str,
        path: PathBuf,
    },
    /// The TLS library refuses a certificate or its key. For example, the two don't match.
    #[error("the certificate {} and its key cannot be used", path.display())]
    Unusable {
        /// File of the certificate.
        path: PathBuf,
        /// Error of the TLS library.
        #[source]
        source: rustls::Error,
    },
    /// The certificate or its key is of an unsupported kind.
    #[error("{} cannot be used", path.display())]
    Flawed {
        /// File of the certificate.
        path: PathBuf,
        /// Description of the flaw, with a command that makes a certificate that works.
        #[source]
        source: UnusableCertificate,
    },
    /// The TLS library refuses the revocation list, so no certificate can be checked against it.
    #[error("the revocation list in {} cannot be used", path.display())]
    Revocations {
        /// File of the revocation list.
        path: PathBuf,
        /// Error of the TLS library.
        #[source]
        source: VerifierBuilderError,
    },
    /// No peer CA is configured. Without one, any host could connect as a peer.
    #[error("peer TLS needs --peer-trusted-ca-file")]
    NoPeerCa,
    /// The configuration allows no protocol version or no cipher suite.
    #[error("the TLS versions and cipher suites leave nothing to offer")]
    Policy(#[source] rustls::Error),
}

impl TlsError {
    /// Whether the system could not read a file. The next read of the same file may succeed, unless
    /// the file is too large.
    fn is_of_system(&self) -> bool {
        matches!(self, Self::File { source: pem::Error::Io(error), .. }
            if error.kind() != ErrorKind::FileTooLarge)
    }
}

/// A value read from files. It is read again when the files change.
pub(super) struct ReloadingValue<T> {
    paths: Vec<PathBuf>,
    load: Box<dyn Fn() -> Result<T, TlsError> + Send + Sync>,
    current: RwLock<Arc<T>>,
    last_check: Mutex<LastCheck>,
}

struct LastCheck {
    at: Instant,
    stamps: Vec<Option<(SystemTime, u64)>>,
    /// Whether the system could not read the files at the last attempt. Then they must be read
    /// again, even if their times and sizes stay the same.
    is_unread: bool,
}

impl<T> fmt::Debug for ReloadingValue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reloading").field("paths", &self.paths).finish_non_exhaustive()
    }
}

impl<T> ReloadingValue<T> {
    fn new(
        paths: Vec<PathBuf>,
        load: impl Fn() -> Result<T, TlsError> + Send + Sync + 'static,
    ) -> Result<Self, TlsError> {
        let stamps = file_stamps(&paths);
        let current = RwLock::new(Arc::new(load()?));
        let looked = Mutex::new(LastCheck { at: Instant::now(), stamps, is_unread: false });
        Ok(Self { paths, load: Box::new(load), current, last_check: looked })
    }

    /// Returns the current value. If the last check for changes is too old, checks the files first.
    pub(super) fn get(&self) -> Arc<T> {
        if let Ok(mut looked) = self.last_check.try_lock()
            && looked.at.elapsed() >= CHECK_INTERVAL
        {
            self.check(&mut looked, false);
        }
        Arc::clone(&self.current.read().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    /// Reads the files again, changed or not. If that fails, the previous value stays in force.
    pub(super) fn reload(&self) {
        // The lock keeps a slow read of older content from replacing the value of a later read.
        let mut looked = self.last_check.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        self.check(&mut looked, true);
    }

    /// Reads the files again if they have changed or if `is_forced`. Also reads them again if the
    /// system could not read them last time, for example because of too many open files.
    fn check(&self, looked: &mut LastCheck, is_forced: bool) {
        looked.at = Instant::now();
        let stamps = file_stamps(&self.paths);
        let is_news = is_forced || stamps != looked.stamps;
        if !is_news && !looked.is_unread {
            return;
        }
        looked.stamps = stamps;
        let read = self.read_again();
        looked.is_unread = read.as_ref().is_err_and(TlsError::is_of_system);
        // While the system keeps failing, only the first failure is logged.
        if let Err(error) = read
            && (is_news || !looked.is_unread)
        {
            self.warn(&error);
        }
    }

    fn read_again(&self) -> Result<(), TlsError> {
        let new = (self.load)()?;
        *self.current.write().unwrap_or_else(std::sync::PoisonError::into_inner) = Arc::new(new);
        tracing::info!(files = ?self.paths, "re-read TLS files");
        Ok(())
    }

    fn warn(&self, error: &TlsError) {
        tracing::warn!(
            files = ?self.paths,
            error = %crate::causes::error_chain(error),
            "TLS files cannot be read; those read before stay in force"
        );
    }
}

fn file_stamps(paths: &[PathBuf]) -> Vec<Option<(SystemTime, u64)>> {
    paths
        .iter()
        .map(|path| {
            let metadata = std::fs::metadata(path).ok()?;
            Some((metadata.modified().ok()?, metadata.len()))
        })
        .collect()
}

/// Loads a certificate chain and its key. Checks that the key belongs to the certificate, and that
/// the certificate fits all of `purposes`.
pub(super) fn load_key(
    cert: &Path,
    key: &Path,
    purposes: &'static [CertificatePurpose],
) -> Result<ReloadingValue<CertifiedKey>, TlsError> {
    let (cert, key) = (cert.to_owned(), key.to_owned());
    ReloadingValue::new(vec![cert.clone(), key.clone()], move || {
        let chain = certificates(&cert, "a certificate")?;
        let what = "a private key";
        let private = PrivateKeyDer::from_pem_slice(&read(&key, what)?)
            .map_err(|source| TlsError::File { what, path: key.clone(), source })?;
        let flaw = chain.first().and_then(|leaf| {
            purposes.iter().find_map(|purpose| {
                UnusableCertificate::find(leaf, CertificateRole::Leaf(*purpose))
            })
        });
        let path = cert.clone();
        match CertifiedKey::from_der(chain, private, &muster_tls::provider()) {
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

/// Loads a CA bundle.
pub(super) fn load_roots(path: &Path) -> Result<ReloadingValue<RootCertStore>, TlsError> {
    let path = path.to_owned();
    ReloadingValue::new(vec![path.clone()], move || {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&path, "a CA certificate")? {
            if let Some(flaw) = UnusableCertificate::find(&certificate, CertificateRole::Ca) {
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

/// Revocation lists from one file.
pub(super) type Crl = Vec<CertificateRevocationListDer<'static>>;

/// Loads revocation lists for certificates issued by `roots`. A file without any list is an error,
/// so that it isn't mistaken for a list that revokes nothing.
pub(super) fn load_crl(
    path: &Path,
    roots: &Arc<ReloadingValue<RootCertStore>>,
) -> Result<ReloadingValue<Crl>, TlsError> {
    let (path, roots) = (path.to_owned(), Arc::clone(roots));
    ReloadingValue::new(vec![path.clone()], move || {
        let lists = revocation_lists(&path)?;
        let provider = muster_tls::provider();
        WebPkiClientVerifier::builder_with_provider(roots.get(), provider)
            .with_crls(lists.iter().cloned())
            .build()
            .map_err(|source| TlsError::Revocations { path: path.clone(), source })?;
        Ok(lists)
    })
}

/// Reads revocation lists: PEM, or a single list in DER, as in etcd.
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

impl ResolvesServerCert for ReloadingValue<CertifiedKey> {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.get())
    }
}

impl ResolvesClientCert for ReloadingValue<CertifiedKey> {
    fn resolve(&self, _: &[&[u8]], schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        let key = self.get();
        key.key.choose_scheme(schemes).is_some().then_some(key)
    }

    fn has_certs(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Barrier,
        atomic::{AtomicBool, Ordering},
    };

    use super::*;

    /// Dates the last check of the value's files back, so that the next `get` checks them again.
    fn make_due(value: &ReloadingValue<String>) {
        let mut looked = value.last_check.lock().unwrap();
        looked.at = looked.at.checked_sub(CHECK_INTERVAL).unwrap();
    }

    /// Checks the value's files again, and returns the value that is current then.
    fn checked(value: &ReloadingValue<String>) -> String {
        make_due(value);
        value.get().to_string()
    }

    fn text_of(path: &Path) -> String {
        std::fs::read_to_string(path).unwrap()
    }

    #[test]
    fn a_file_that_could_not_be_read_is_read_again_although_it_stays_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ca");
        std::fs::write(&path, "old").unwrap();
        let is_readable = Arc::new(AtomicBool::new(true));
        let (file, flag) = (path.clone(), Arc::clone(&is_readable));
        let load = move || match flag.load(Ordering::Relaxed) {
            true => Ok(text_of(&file)),
            false => {
                let source = pem::Error::Io(std::io::Error::other("too many open files"));
                Err(TlsError::File { what: "a CA certificate", path: file.clone(), source })
            }
        };
        let value = ReloadingValue::new(vec![path.clone()], load).unwrap();
        std::fs::write(&path, "another").unwrap();
        is_readable.store(false, Ordering::Relaxed);
        assert_eq!(checked(&value), "old");
        assert_eq!(checked(&value), "old");
        is_readable.store(true, Ordering::Relaxed);
        assert_eq!(checked(&value), "another");
    }

    #[test]
    fn a_slow_read_never_replaces_newer_content() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ca");
        std::fs::write(&path, "old").unwrap();
        // The thread with the slow read meets the test at the barrier twice: when it has read the
        // content, and when it may return that content.
        let (is_slow, barrier) = (Arc::new(AtomicBool::new(false)), Arc::new(Barrier::new(2)));
        let (file, slow, step) = (path.clone(), Arc::clone(&is_slow), Arc::clone(&barrier));
        let load = move || {
            let text = text_of(&file);
            if slow.swap(false, Ordering::Relaxed) {
                step.wait();
                step.wait();
            }
            Ok(text)
        };
        let value = ReloadingValue::new(vec![path.clone()], load).unwrap();
        make_due(&value);
        is_slow.store(true, Ordering::Relaxed);
        std::thread::scope(|scope| {
            scope.spawn(|| value.reload());
            barrier.wait();
            std::fs::write(&path, "another").unwrap();
            // Without the lock, this call would read the newer content now, and the slow read would
            // then replace it by the older one.
            value.get();
            barrier.wait();
        });
        assert_eq!(checked(&value), "another");
    }

    #[test]
    fn only_an_error_that_may_pass_makes_unchanged_files_be_read_again() {
        let error = |kind: ErrorKind| {
            let source = pem::Error::Io(kind.into());
            TlsError::File { what: "a CA certificate", path: PathBuf::from("ca"), source }
        };
        assert!(error(ErrorKind::PermissionDenied).is_of_system());
        assert!(!error(ErrorKind::FileTooLarge).is_of_system());
        let empty = TlsError::Empty { what: "a CA certificate", path: PathBuf::from("ca") };
        assert!(!empty.is_of_system());
    }

    #[test]
    fn a_file_that_changes_while_it_is_read_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ca");
        std::fs::write(&path, "1").unwrap();
        let file = path.clone();
        let load = move || {
            let text = text_of(&file);
            if text.len() < 3 {
                std::fs::write(&file, format!("{text}1")).unwrap();
            }
            Ok(text)
        };
        let value = ReloadingValue::new(vec![path], load).unwrap();
        assert_eq!(checked(&value), "11");
        assert_eq!(checked(&value), "111");
    }
}
