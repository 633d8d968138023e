//! Files with a private key, readable by their owner only.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::pki_types::pem::PemObject;
use zeroize::Zeroizing;

use super::{KeyError, SigningKey};

/// Largest key file that is read, in bytes.
const MAX_KEY_FILE: u64 = 16 * 1024;

/// Reason why a key file could not be read.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// The file can't be opened or read.
    #[error("reading {path}")]
    Io {
        /// Path of the key file.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// Other users may read or change the file. A private key's file must not allow that.
    #[error(
        "{path} is open to others (mode {mode:03o}): chmod 600 it, and think about who may have \
         read it"
    )]
    Open {
        /// Path of the key file.
        path: PathBuf,
        /// Permission bits of the file's mode.
        mode: u32,
    },
    /// The file holds no PEM `PRIVATE KEY`, or a key that isn't Ed25519.
    #[error(
        "{0} is not a PEM file with an unencrypted Ed25519 private key; \
         `muster-discovery key new --out FILE` makes one"
    )]
    NotAKey(PathBuf),
}

impl SigningKey {
    /// Returns the key as PEM (`PRIVATE KEY`, PKCS#8).
    pub fn to_pem(&self) -> Zeroizing<String> {
        let body = Zeroizing::new(data_encoding::BASE64.encode(&self.pkcs8_der()));
        // The DER has 48 bytes. Base64 encodes them as 64 characters, which is exactly one line of
        // PEM.
        Zeroizing::new(format!(
            "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----\n",
            *body
        ))
    }

    /// Reads a private key from PEM text.
    pub fn from_pem(pem: &str) -> Result<Self, KeyError> {
        let der =
            PrivatePkcs8KeyDer::from_pem_slice(pem.as_bytes()).map_err(|_| KeyError::NotEd25519)?;
        Self::from_pkcs8_der(der.secret_pkcs8_der())
    }

    /// Reads a key file. Like ssh, it refuses a file that other users may read.
    pub fn load(path: &Path) -> Result<Self, KeyFileError> {
        let io = |source| KeyFileError::Io { path: path.into(), source };
        let file = muster_files::open_named(path).map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        let mode = metadata.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(KeyFileError::Open { path: path.into(), mode });
        }
        if metadata.len() > MAX_KEY_FILE {
            return Err(KeyFileError::NotAKey(path.into()));
        }
        let text = Zeroizing::new(io::read_to_string(file).map_err(io)?);
        Self::from_pem(&text).map_err(|_| KeyFileError::NotAKey(path.into()))
    }

    /// Writes the key to a new file with mode 0600, and syncs it. Fails if the file exists, because
    /// overwriting would destroy a private key.
    pub fn save(&self, path: &Path) -> Result<(), muster_files::Error> {
        muster_files::create(path, self.to_pem().as_bytes(), 0o600)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_saved_key_is_private_and_loads_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("owner.pem");
        let key = SigningKey::generate();
        key.save(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(SigningKey::load(&path).unwrap().public(), key.public());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_key_is_never_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("owner.pem");
        let first = SigningKey::generate();
        first.save(&path).unwrap();
        let again = SigningKey::generate().save(&path);
        assert!(matches!(again, Err(muster_files::Error::Exists(_))), "{again:?}");
        assert_eq!(SigningKey::load(&path).unwrap().public(), first.public());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_key_that_others_may_read_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("owner.pem");
        SigningKey::generate().save(&path).unwrap();
        for mode in [0o640, 0o604, 0o620] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let refused = SigningKey::load(&path);
            assert!(matches!(refused, Err(KeyFileError::Open { mode: m, .. }) if m == mode));
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o400)).unwrap();
        SigningKey::load(&path).unwrap();
    }

    #[test]
    fn other_files_are_no_keys() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("junk");
        muster_files::replace(&path, "x".repeat(4096).as_bytes()).unwrap();
        assert!(matches!(SigningKey::load(&path), Err(KeyFileError::NotAKey(_))));
    }
}
