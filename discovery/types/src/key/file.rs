//! Private files: written whole or not at all, readable by their owner only.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::pki_types::pem::PemObject;
use zeroize::Zeroizing;

use super::{KeyError, SigningKey};

/// Largest key file that is read.
const MAX_KEY_FILE: u64 = 16 * 1024;

/// Why a key file could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// The system refused.
    #[error("{action} {path}")]
    Io {
        /// `reading` or `writing`.
        action: &'static str,
        /// Which file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A file is already there, and a private key is never overwritten.
    #[error("{0} exists already: choose another name, or move it away first")]
    Exists(PathBuf),
    /// Others may read or change the file, as nobody's private key may be.
    #[error(
        "{path} is open to others (mode {mode:03o}): chmod 600 it, and think about who may have \
         read it"
    )]
    Open {
        /// Which file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// The file holds no PEM `PRIVATE KEY`, or of another kind.
    #[error(
        "{0} is not a PEM file with an unencrypted Ed25519 private key; \
         `muster-discovery key new --out FILE` makes one"
    )]
    NotAKey(PathBuf),
}

impl SigningKey {
    /// The key as PEM (`PRIVATE KEY`, PKCS#8).
    pub fn to_pem(&self) -> Zeroizing<String> {
        let body = Zeroizing::new(data_encoding::BASE64.encode(&self.pkcs8_der()));
        // 48 bytes are 64 characters: exactly one line of PEM.
        Zeroizing::new(format!(
            "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----\n",
            *body
        ))
    }

    /// Reads PEM.
    pub fn from_pem(pem: &str) -> Result<Self, KeyError> {
        let der =
            PrivatePkcs8KeyDer::from_pem_slice(pem.as_bytes()).map_err(|_| KeyError::NotEd25519)?;
        Self::from_pkcs8_der(der.secret_pkcs8_der())
    }

    /// Reads a key file. One that others may read is refused, as ssh does.
    pub fn load(path: &Path) -> Result<Self, KeyFileError> {
        let io = |source| KeyFileError::Io { action: "reading", path: path.into(), source };
        let file = File::open(path).map_err(io)?;
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

    /// Writes the key to a new file (0600), durable when this returns. An existing file is an
    /// error: a private key that is overwritten is gone.
    pub fn save(&self, path: &Path) -> Result<(), KeyFileError> {
        write_new(path, self.to_pem().as_bytes())
    }
}

/// Writes a new file (0600): written, fsynced, named, folder fsynced. An existing one is an error.
pub fn write_new(path: &Path, content: &[u8]) -> Result<(), KeyFileError> {
    let io = |source: io::Error| match source.kind() {
        io::ErrorKind::AlreadyExists => KeyFileError::Exists(path.into()),
        _ => KeyFileError::Io { action: "writing", path: path.into(), source },
    };
    let temporary = write_temporary(path, content).map_err(io)?;
    // A link fails where a rename would silently replace.
    let linked = std::fs::hard_link(&temporary, path);
    std::fs::remove_file(&temporary).map_err(io)?;
    linked.map_err(io)?;
    sync_folder(path).map_err(io)
}

/// Writes a file (0600), replacing an older one in one step: written, fsynced, renamed, folder
/// fsynced.
pub fn write_private(path: &Path, content: &[u8]) -> Result<(), KeyFileError> {
    let io = |source| KeyFileError::Io { action: "writing", path: path.into(), source };
    let temporary = write_temporary(path, content).map_err(io)?;
    std::fs::rename(&temporary, path).map_err(io)?;
    sync_folder(path).map_err(io)
}

fn write_temporary(path: &Path, content: &[u8]) -> io::Result<PathBuf> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let mut temporary = std::ffi::OsString::from(".");
    temporary.push(name);
    temporary.push(format!(".{}", crate::digest::Nonce::random()));
    let temporary = path.with_file_name(temporary);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    let written = file.write_all(content).and_then(|()| file.sync_all());
    if let Err(error) = written {
        let _ = std::fs::remove_file(&temporary);
        return Err(error);
    }
    Ok(temporary)
}

fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    File::open(folder)?.sync_all()
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
        assert!(matches!(again, Err(KeyFileError::Exists(_))), "{again:?}");
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
        write_private(&path, "x".repeat(4096).as_bytes()).unwrap();
        assert!(matches!(SigningKey::load(&path), Err(KeyFileError::NotAKey(_))));
    }
}
