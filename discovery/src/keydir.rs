//! The key directory: the files that identify a discovery service.
//!
//! `init` makes it once, and each start reads it. A running process reads its signing keys again
//! and again ([`SigningKeys`]). The service never writes to it. Replicas share it, and nothing of it
//! is ever in Postgres:
//!
//! | file | holds |
//! |---|---|
//! | `service.json` | URLs, trust domain |
//! | `owner.pub` | public key of the first owner: root of the admin chain |
//! | `tls.key`, `tls.crt` | the listener's key (P-256; agents pin its SPKI) and self-signed certificate |
//! | `signing-N.key` | Ed25519 keys of tokens and documents; the highest N signs |
//! | `kek-N.key` | key-encryption keys; the highest N wraps |
//!
//! The service refuses to start unless its private keys are readable by their owner alone.

mod signing;

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use data_encoding::BASE64;
use discovery_types::digest::Digest;
use discovery_types::key::PublicKey;
use discovery_types::url::ServiceUrl;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, PKCS_ECDSA_P256_SHA256};
use ring::rand::{SecureRandom, SystemRandom};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::kek::{KEK_LEN, Kek};

pub(crate) use signing::{SIGNING_KEYS_INTERVAL, SigningKeys, VersionedSigningKey};

const SETTINGS: &str = "service.json";
const OWNER: &str = "owner.pub";
const TLS_KEY: &str = "tls.key";
const TLS_CERTIFICATE: &str = "tls.crt";
const VERSION: u32 = 1;
/// Maximum size of one file of a key directory, in bytes. The largest, `tls.crt`, has less than 1
/// KiB for each URL.
const MAX_KEY_FILE: u64 = 1 << 16;
/// Maximum number of files in a key directory: a thousand rotations of its keys.
const MAX_KEY_FILES: usize = 1_000;
/// Validity of the listener's certificate. Agents pin the key and check no dates, so the
/// certificate only has to outlive the service.
const TLS_LIFE: Duration = Duration::from_secs(100 * 365 * 86_400);

/// Why a key directory can't be made or read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KeyDirectoryError {
    /// The directory isn't empty. `init` never overwrites a file.
    #[error("{0} isn't empty: `init` makes a new key directory and never writes over an old one")]
    NotEmpty(PathBuf),
    /// `service.json` is missing, so this is no key directory.
    #[error("{0} is no key directory: `muster-discovery init` makes one")]
    NotKeyDirectory(PathBuf),
    /// A file or folder couldn't be read or changed.
    #[error("{what}")]
    Io {
        /// The operation that failed, and on which path.
        what: String,
        #[source]
        source: std::io::Error,
    },
    /// A file or folder can't be written, or another user owns it or may write to it.
    #[error(transparent)]
    Files(#[from] muster_files::Error),
    /// A private key's mode lets other users read it.
    #[error(
        "{path} may be read by others (mode {mode:03o}): chmod 600 it, and think about who has read it"
    )]
    ReadableByOthers {
        /// Path of the key file.
        path: PathBuf,
        /// Permission bits of the key file.
        mode: u32,
    },
    /// A file's content doesn't fit its name.
    #[error("{path} is damaged: {why}")]
    Damaged {
        /// Path of the damaged file or directory.
        path: PathBuf,
        /// Why the content is damaged.
        why: String,
    },
    /// The crypto library or the system's random source failed.
    #[error("can't make keys: {0}")]
    Generate(String),
}

impl KeyDirectoryError {
    /// Whether a retry can't help: only a person can mend this.
    pub(crate) fn is_permanent(&self) -> bool {
        match self {
            KeyDirectoryError::NotEmpty(_)
            | KeyDirectoryError::NotKeyDirectory(_)
            | KeyDirectoryError::ReadableByOthers { .. }
            | KeyDirectoryError::Damaged { .. } => true,
            KeyDirectoryError::Io { source, .. } => {
                matches!(source.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied)
            }
            KeyDirectoryError::Files(error) => error.is_refusal(),
            KeyDirectoryError::Generate(_) => false,
        }
    }
}

/// Settings given to `init`, after validation. Stored as `service.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ServiceSettings {
    version: u32,
    /// URLs at which admins and agents reach the service.
    pub urls: Vec<ServiceUrl>,
    /// Trust domain of the members' SPIFFE names.
    pub trust_domain: String,
}

impl ServiceSettings {
    /// Makes settings with the current format version.
    pub(crate) fn new(urls: Vec<ServiceUrl>, trust_domain: String) -> Self {
        ServiceSettings { version: VERSION, urls, trust_domain }
    }
}

/// A loaded key directory.
#[derive(Debug)]
pub(crate) struct KeyDirectory {
    /// Settings that were given to `init`.
    pub settings: ServiceSettings,
    /// The first owner's public key: root of the admin chain.
    pub owner: PublicKey,
    /// The listener's self-signed certificate.
    pub tls_certificate: CertificateDer<'static>,
    /// The listener's private key.
    pub tls_key: PrivateKeyDer<'static>,
    /// Keys that sign access tokens and documents.
    pub signing_keys: SigningKeys,
    /// Key-encryption keys, which open the clusters' CA keys.
    pub kek: Kek,
}

impl KeyDirectory {
    /// Makes a key directory. Every file is fsynced. `service.json` is written last, because a
    /// directory without it doesn't load.
    pub(crate) fn create(
        dir: &Path,
        settings: &ServiceSettings,
        owner: &PublicKey,
    ) -> Result<(), KeyDirectoryError> {
        make_empty_dir(dir)?;
        let generate = |error: rcgen::Error| KeyDirectoryError::Generate(error.to_string());
        let tls = TlsPair::generate(&settings.urls).map_err(generate)?;
        muster_files::create(&dir.join(TLS_KEY), tls.key.as_bytes(), 0o600)?;
        muster_files::create(&dir.join(TLS_CERTIFICATE), tls.certificate.as_bytes(), 0o644)?;
        make_signing_key(dir, 1)?;
        make_kek(dir, 1)?;
        muster_files::create(&dir.join(OWNER), format!("{owner}\n").as_bytes(), 0o644)?;
        let json = serde_json::to_vec_pretty(settings)
            .map_err(|error| KeyDirectoryError::Generate(error.to_string()))?;
        Ok(muster_files::create(&dir.join(SETTINGS), &json, 0o644)?)
    }

    /// Reads a key directory and checks every file.
    pub(crate) fn load(dir: &Path) -> Result<Self, KeyDirectoryError> {
        let settings_path = dir.join(SETTINGS);
        if std::fs::metadata(&settings_path).is_err_and(|e| e.kind() == ErrorKind::NotFound) {
            return Err(KeyDirectoryError::NotKeyDirectory(dir.to_owned()));
        }
        let settings: ServiceSettings = serde_json::from_slice(&read(&settings_path)?)
            .map_err(|error| damaged(&settings_path, &error))?;
        if settings.version != VERSION {
            return Err(damaged(&settings_path, &format!("version {}", settings.version)));
        }
        let owner_path = dir.join(OWNER);
        let owner = String::from_utf8(read(&owner_path)?)
            .map_err(|error| damaged(&owner_path, &error))?
            .trim()
            .parse()
            .map_err(|error| damaged(&owner_path, &error))?;
        let (certificate_path, key_path) = (dir.join(TLS_CERTIFICATE), dir.join(TLS_KEY));
        let tls_certificate = CertificateDer::from_pem_slice(&read(&certificate_path)?)
            .map_err(|error| damaged(&certificate_path, &error))?;
        discovery_types::tls::spki_hash(&tls_certificate)
            .map_err(|error| damaged(&certificate_path, &error))?;
        let tls_key = PrivateKeyDer::from_pem_slice(&read_secret(&key_path)?)
            .map_err(|error| damaged(&key_path, &error))?;

        let signing_keys = SigningKeys::load(dir)?;
        let mut keks = Vec::new();
        for (version, path) in versioned_files(dir, "kek-")? {
            let bytes = decode(&path)?;
            let bytes: [u8; KEK_LEN] =
                bytes[..].try_into().map_err(|error| damaged(&path, &error))?;
            keks.push((version, Zeroizing::new(bytes)));
        }
        let kek = Kek::new(keks).ok_or_else(|| damaged(dir, &"there is no kek-N.key"))?;
        Ok(KeyDirectory { settings, owner, tls_certificate, tls_key, signing_keys, kek })
    }

    /// Makes the next signing key in `dir`, from which this key directory was loaded. Returns the
    /// new key's version.
    pub(crate) fn add_signing_key(&self, dir: &Path) -> Result<u32, KeyDirectoryError> {
        let version = next_version(dir, self.signer().version)?;
        make_signing_key(dir, version)
    }

    /// Makes the next key-encryption key in `dir`, from which this key directory was loaded.
    /// Returns the new key's version.
    pub(crate) fn add_kek(&self, dir: &Path) -> Result<u32, KeyDirectoryError> {
        let version = next_version(dir, self.kek.newest_version())?;
        make_kek(dir, version)
    }

    /// Copies `dir`, from which this key directory was loaded, to the new folder `copy`. The copy
    /// gets another TLS key.
    pub(crate) fn copy_with_new_tls_key(
        &self,
        dir: &Path,
        copy: &Path,
    ) -> Result<Self, KeyDirectoryError> {
        let (mut files, _) = read_key_files(dir)?;
        let tls = TlsPair::generate(&self.settings.urls)
            .map_err(|error| KeyDirectoryError::Generate(error.to_string()))?;
        files.insert(TLS_KEY.into(), Zeroizing::new(tls.key.as_bytes().to_vec()));
        files.insert(TLS_CERTIFICATE.into(), Zeroizing::new(tls.certificate.into_bytes()));
        KeyDirectory::restore(copy, &files)
    }

    /// Makes a key directory from the files of another one. Every file is fsynced.
    pub(crate) fn restore(dir: &Path, files: &KeyFiles) -> Result<Self, KeyDirectoryError> {
        if let Some(name) = files.keys().find(|name| !is_key_file(name)) {
            return Err(damaged(dir, &format!("`{name}` is no file of a key directory")));
        }
        make_empty_dir(dir)?;
        let (settings, others): (Vec<_>, Vec<_>) =
            files.iter().partition(|(name, _)| *name == SETTINGS);
        // A directory without the settings file doesn't load, so write that file last.
        for (name, content) in others.into_iter().chain(settings) {
            let mode = if is_secret_file(name) { 0o600 } else { 0o644 };
            muster_files::create(&dir.join(name), content, mode)?;
        }
        KeyDirectory::load(dir)
    }

    /// SHA-256 of the listener's SPKI, which clients pin.
    pub(crate) fn pin(&self) -> Digest {
        discovery_types::tls::spki_hash(&self.tls_certificate)
            .expect("the certificate was read when the directory was loaded")
    }

    /// Returns when the listener's certificate expires, in seconds since 1970.
    pub(crate) fn tls_certificate_end(&self) -> i64 {
        let parsed = x509_parser::parse_x509_certificate(&self.tls_certificate);
        let (_, certificate) = parsed.expect("it was read when the directory was loaded");
        certificate.validity().not_after.timestamp()
    }

    /// The newest signing key: all new signatures use it.
    pub(crate) fn signer(&self) -> Arc<VersionedSigningKey> {
        self.signing_keys.newest()
    }
}

/// Contents of a key directory's files, by name.
pub(crate) type KeyFiles = BTreeMap<String, Zeroizing<Vec<u8>>>;

/// Reads the files of a key directory. Also returns the names of other files in it. Doesn't check
/// the contents: [`KeyDirectory::load`] does.
pub(crate) fn read_key_files(dir: &Path) -> Result<(KeyFiles, Vec<String>), KeyDirectoryError> {
    let (mut files, mut others) = (KeyFiles::new(), Vec::new());
    for entry in std::fs::read_dir(dir).map_err(io("read", dir))? {
        let name = entry.map_err(io("read", dir))?.file_name().to_string_lossy().into_owned();
        if files.len() + others.len() == MAX_KEY_FILES {
            return Err(damaged(dir, &format!("it has more than {MAX_KEY_FILES} files")));
        }
        if !is_key_file(&name) {
            others.push(name);
            continue;
        }
        let path = dir.join(&name);
        let content = muster_files::read(&path, MAX_KEY_FILE)?
            .ok_or_else(|| damaged(&path, &"it was removed meanwhile"))?;
        files.insert(name, Zeroizing::new(content));
    }
    others.sort();
    Ok((files, others))
}

/// Whether a file of this name belongs to a key directory.
fn is_key_file(name: &str) -> bool {
    [SETTINGS, OWNER, TLS_KEY, TLS_CERTIFICATE].contains(&name)
        || ["signing-", "kek-"].iter().any(|prefix| key_version(name, prefix).is_some())
}

fn is_secret_file(name: &str) -> bool {
    name.ends_with(".key")
}

/// Parses N in `<prefix>N.key`.
fn key_version(name: &str, prefix: &str) -> Option<u32> {
    name.strip_prefix(prefix)?.strip_suffix(".key")?.parse().ok()
}

fn damaged(path: &Path, why: &impl ToString) -> KeyDirectoryError {
    KeyDirectoryError::Damaged { path: path.to_owned(), why: why.to_string() }
}

fn io(what: &str, path: &Path) -> impl FnOnce(std::io::Error) -> KeyDirectoryError {
    let what = format!("can't {what} {}", path.display());
    move |source| KeyDirectoryError::Io { what, source }
}

fn make_empty_dir(dir: &Path) -> Result<(), KeyDirectoryError> {
    let opened = muster_files::open_own_folder(dir)?;
    let mut entries = std::fs::read_dir(dir).map_err(io("read", dir))?;
    if entries.next().is_some() {
        return Err(KeyDirectoryError::NotEmpty(dir.to_owned()));
    }
    let closed = std::fs::Permissions::from_mode(0o700);
    opened.set_permissions(closed).map_err(io("close", dir))
}

fn read(path: &Path) -> Result<Vec<u8>, KeyDirectoryError> {
    std::fs::read(path).map_err(io("read", path))
}

fn read_secret(path: &Path) -> Result<Zeroizing<Vec<u8>>, KeyDirectoryError> {
    let mode = std::fs::metadata(path).map_err(io("read", path))?.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(KeyDirectoryError::ReadableByOthers { path: path.to_owned(), mode });
    }
    read(path).map(Zeroizing::new)
}

fn decode(path: &Path) -> Result<Zeroizing<Vec<u8>>, KeyDirectoryError> {
    let text = read_secret(path)?;
    let bytes = BASE64.decode(text.trim_ascii()).map_err(|error| damaged(path, &error))?;
    Ok(Zeroizing::new(bytes))
}

/// Finds the files named `<prefix>N.key` in `dir`. Returns each N with its path.
fn versioned_files(dir: &Path, prefix: &str) -> Result<Vec<(u32, PathBuf)>, KeyDirectoryError> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(io("read", dir))? {
        let entry = entry.map_err(io("read", dir))?;
        let name = entry.file_name();
        if let Some(version) = name.to_str().and_then(|name| key_version(name, prefix)) {
            found.push((version, entry.path()));
        }
    }
    Ok(found)
}

/// A new TLS key and its certificate, in PEM.
struct TlsPair {
    key: Zeroizing<String>,
    certificate: String,
}

impl TlsPair {
    fn generate(urls: &[ServiceUrl]) -> Result<Self, rcgen::Error> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let certificate = tls_certificate(&key, urls)?.pem();
        Ok(Self { key: Zeroizing::new(key.serialize_pem()), certificate })
    }
}

fn next_version(dir: &Path, last: u32) -> Result<u32, KeyDirectoryError> {
    last.checked_add(1).ok_or_else(|| damaged(dir, &"no version is left"))
}

/// Makes a signing key in a file of its own. Returns its version.
fn make_signing_key(dir: &Path, version: u32) -> Result<u32, KeyDirectoryError> {
    let key = discovery_types::key::SigningKey::generate().pkcs8_der();
    let text = Zeroizing::new(BASE64.encode(&key));
    muster_files::create(&dir.join(format!("signing-{version}.key")), text.as_bytes(), 0o600)?;
    Ok(version)
}

/// Makes a key-encryption key in a file of its own. Returns its version.
fn make_kek(dir: &Path, version: u32) -> Result<u32, KeyDirectoryError> {
    let mut key = Zeroizing::new([0_u8; KEK_LEN]);
    SystemRandom::new()
        .fill(&mut key[..])
        .map_err(|_| KeyDirectoryError::Generate("the system's random source failed".into()))?;
    let text = Zeroizing::new(BASE64.encode(&key[..]));
    muster_files::create(&dir.join(format!("kek-{version}.key")), text.as_bytes(), 0o600)?;
    Ok(version)
}

/// Makes the self-signed certificate. It contains the hosts of the URLs, for clients that check
/// names.
fn tls_certificate(key: &KeyPair, urls: &[ServiceUrl]) -> Result<rcgen::Certificate, rcgen::Error> {
    let hosts: Vec<String> = urls.iter().filter_map(|url| host(&url.to_string())).collect();
    let mut params = CertificateParams::new(hosts)?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "muster-discovery");
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after = params.not_before + TLS_LIFE;
    params.self_signed(key)
}

fn host(url: &str) -> Option<String> {
    let authority = url.strip_prefix("https://")?.split('/').next()?;
    let host = match authority.strip_prefix('[') {
        Some(rest) => rest.split(']').next()?,
        None => authority.split(':').next()?,
    };
    (!host.is_empty()).then(|| host.to_owned())
}

#[cfg(test)]
mod tests {

    use super::*;

    fn settings() -> ServiceSettings {
        let urls = ["https://[::1]:8443", "https://muster.example:8443"];
        let urls = urls.iter().map(|url| url.parse().unwrap()).collect();
        ServiceSettings::new(urls, "muster".into())
    }

    fn owner() -> PublicKey {
        *discovery_types::key::SigningKey::from_seed(&[7; 32]).public()
    }

    fn made() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("keys");
        KeyDirectory::create(&dir, &settings(), &owner()).unwrap();
        (folder, dir)
    }

    #[test]
    fn a_new_key_directory_loads_and_is_closed_to_other_users() {
        let (_folder, dir) = made();
        let loaded = KeyDirectory::load(&dir).unwrap();
        assert_eq!((loaded.settings, loaded.owner), (settings(), owner()));
        assert_eq!(std::fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
        for secret in ["tls.key", "signing-1.key", "kek-1.key"] {
            let mode = std::fs::metadata(dir.join(secret)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{secret}");
        }
    }

    #[test]
    fn create_refuses_a_directory_that_is_not_empty() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("x"), "").unwrap();
        let refused = KeyDirectory::create(folder.path(), &settings(), &owner());
        assert!(matches!(refused, Err(KeyDirectoryError::NotEmpty(_))), "{refused:?}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_key_that_others_can_read_is_refused() {
        let (_folder, dir) = made();
        let key = dir.join("kek-1.key");
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o640)).unwrap();
        let refused = KeyDirectory::load(&dir);
        assert!(
            matches!(refused, Err(KeyDirectoryError::ReadableByOthers { mode: 0o640, .. })),
            "{refused:?}"
        );
    }

    #[test]
    fn the_newest_signing_key_signs_and_older_ones_stay_known() {
        let (_folder, dir) = made();
        let (_other, other) = made();
        std::fs::copy(other.join("signing-1.key"), dir.join("signing-2.key")).unwrap();
        let loaded = KeyDirectory::load(&dir).unwrap();
        assert_eq!(loaded.signer().version, 2);
        let signing = loaded.signing_keys.current();
        assert_eq!(signing.len(), 2);
        assert_ne!(signing[0].key.key_id(), signing[1].key.key_id());
    }

    #[test]
    fn a_restored_directory_is_the_same_and_as_closed() {
        let (folder, dir) = made();
        std::fs::copy(dir.join("kek-1.key"), dir.join("kek-2.key")).unwrap();
        std::fs::write(dir.join("notes"), "x").unwrap();
        let (files, others) = read_key_files(&dir).unwrap();
        assert_eq!(others, ["notes"]);
        let restored = folder.path().join("restored");
        let loaded = KeyDirectory::restore(&restored, &files).unwrap();
        assert_eq!(loaded.pin(), KeyDirectory::load(&dir).unwrap().pin());
        assert_eq!(read_key_files(&restored).unwrap(), (files.clone(), Vec::new()));
        for name in files.keys() {
            let mode = std::fs::metadata(restored.join(name)).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode, if name.ends_with(".key") { 0o600 } else { 0o644 }, "{name}");
        }
        let again = KeyDirectory::restore(&restored, &files);
        assert!(matches!(again, Err(KeyDirectoryError::NotEmpty(_))), "{again:?}");
    }

    #[test]
    fn files_that_belong_to_no_key_directory_are_not_restored() {
        let (folder, dir) = made();
        let (files, _) = read_key_files(&dir).unwrap();
        for name in ["../x", "x", "/tmp/x", "kek-.key", "kek-1.key/..", "signing-x.key", ""] {
            let mut more = files.clone();
            more.insert(name.into(), Zeroizing::new(b"x".to_vec()));
            let restored = folder.path().join("restored");
            assert!(KeyDirectory::restore(&restored, &more).is_err(), "{name}");
            assert!(!restored.exists(), "{name}");
        }
    }

    #[test]
    fn a_half_made_directory_does_not_load() {
        for missing in ["service.json", "owner.pub", "tls.key", "signing-1.key", "kek-1.key"] {
            let (_folder, dir) = made();
            std::fs::remove_file(dir.join(missing)).unwrap();
            assert!(KeyDirectory::load(&dir).is_err(), "{missing}");
        }
    }
}
