//! The service's signing keys, while a process runs.
//!
//! A process reads the files `signing-N.key` again and again. So a key that leaked is worth nothing
//! as soon as an operator has removed its file: access tokens that it signed are refused, also on
//! connections that have shown one before. A new key signs without a restart.
//!
//! A fault of the disk must not take the keys away. A key stays in use while its file can't be read,
//! and all keys stay while the directory can't be read or has no signing key at all.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use discovery_types::key::{KeyId, SigningKey};

use super::{KeyDirectoryError, damaged, decode, versioned_files};

/// How often a running process reads its signing keys again.
pub(crate) const SIGNING_KEYS_INTERVAL: Duration = Duration::from_secs(1);

/// One version of the service's signing key.
#[derive(Debug)]
pub(crate) struct VersionedSigningKey {
    /// The number N in the file name `signing-N.key`.
    pub version: u32,
    pub key: SigningKey,
}

impl VersionedSigningKey {
    fn read(version: u32, path: &Path) -> Result<Self, KeyDirectoryError> {
        let key = SigningKey::from_pkcs8_der(&decode(path)?).map_err(|why| damaged(path, &why))?;
        Ok(VersionedSigningKey { version, key })
    }
}

/// Signing keys of one time, newest first. Never empty.
type KeyList = Arc<Vec<Arc<VersionedSigningKey>>>;

/// Signing keys of a key directory, as they were read last.
#[derive(Debug)]
pub(crate) struct SigningKeys {
    dir: PathBuf,
    current: RwLock<KeyList>,
    /// Problem of the last reading. It is logged once, and not again with each reading.
    last_problem: Mutex<Option<String>>,
}

impl SigningKeys {
    /// Reads the signing keys of a key directory. Fails if one of them can't be read.
    pub(super) fn load(dir: &Path) -> Result<Self, KeyDirectoryError> {
        let (keys, problem) = read(dir, &[])?;
        match problem {
            Some(problem) => Err(problem),
            None => Ok(SigningKeys {
                dir: dir.to_owned(),
                current: RwLock::new(Arc::new(keys)),
                last_problem: Mutex::default(),
            }),
        }
    }

    /// Returns the keys as they were read last, newest first. There is at least one.
    pub(crate) fn current(&self) -> KeyList {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the newest key.
    pub(crate) fn newest(&self) -> Arc<VersionedSigningKey> {
        Arc::clone(&self.current()[0])
    }

    /// Whether one of the keys has this id.
    pub(crate) fn contains(&self, id: &KeyId) -> bool {
        self.current().iter().any(|signing| signing.key.key_id() == *id)
    }

    /// Reads the keys again. What can't be read stays as it was, and the log says so once.
    pub(crate) fn reload(&self) {
        let earlier = self.current();
        let problem = match read(&self.dir, &earlier) {
            Ok((keys, problem)) => {
                let ids = |keys: &[Arc<VersionedSigningKey>]| -> Vec<(u32, KeyId)> {
                    keys.iter().map(|signing| (signing.version, signing.key.key_id())).collect()
                };
                if ids(&keys) != ids(&earlier) {
                    let versions: Vec<u32> = keys.iter().map(|signing| signing.version).collect();
                    tracing::info!(
                        signs = versions[0],
                        ?versions,
                        "the signing keys have changed: access tokens of other keys are refused"
                    );
                    let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
                    *current = Arc::new(keys);
                }
                problem
            }
            Err(problem) => Some(problem),
        };
        let text = problem.as_ref().map(|problem| match std::error::Error::source(problem) {
            Some(source) => format!("{problem}: {source}"),
            None => problem.to_string(),
        });
        let mut last = self.last_problem.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Some(problem), true) = (&text, *last != text) {
            tracing::error!(
                %problem,
                "the signing keys can't be read again: those that this process has stay in use; \
                 restore the files from the copy of the key directory"
            );
        }
        *last = text;
    }
}

/// Reads the signing keys in `dir`, newest first. If a key's file can't be read, returns its key in
/// `earlier`, if there is one, and the problem of one such file. Fails if that leaves no key.
fn read(
    dir: &Path,
    earlier: &[Arc<VersionedSigningKey>],
) -> Result<(Vec<Arc<VersionedSigningKey>>, Option<KeyDirectoryError>), KeyDirectoryError> {
    let (mut keys, mut problem) = (Vec::new(), None);
    for (version, path) in versioned_files(dir, "signing-")? {
        match VersionedSigningKey::read(version, &path) {
            Ok(key) => keys.push(Arc::new(key)),
            Err(error) => {
                keys.extend(earlier.iter().find(|known| known.version == version).cloned());
                problem = Some(error);
            }
        }
    }
    keys.sort_by_key(|key| std::cmp::Reverse(key.version));
    match (keys.is_empty(), problem) {
        (false, problem) => Ok((keys, problem)),
        (true, Some(problem)) => Err(problem),
        (true, None) => Err(damaged(dir, &"there is no signing-N.key")),
    }
}

#[cfg(test)]
mod tests {
    use fs_err as fs;

    use super::super::{KeyDirectory, make_signing_key};
    use super::*;

    fn versions(keys: &SigningKeys) -> Vec<u32> {
        keys.current().iter().map(|signing| signing.version).collect()
    }

    #[test]
    fn a_running_process_follows_the_signing_keys_of_its_directory() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("keys");
        let owner = *SigningKey::from_seed(&[7; 32]).public();
        let urls = vec!["https://muster.example:8443".parse().unwrap()];
        let settings = super::super::ServiceSettings::new(urls, "muster".into());
        KeyDirectory::create(&dir, &settings, &owner).unwrap();
        let keys = KeyDirectory::load(&dir).unwrap().signing_keys;
        let first = keys.newest();
        let (file, hidden) = (dir.join("signing-1.key"), folder.path().join("signing-1.key"));
        fs::rename(&file, &hidden).unwrap();
        keys.reload();
        assert_eq!(versions(&keys), [1], "the only key stays");

        make_signing_key(&dir, 2).unwrap();
        keys.reload();
        assert_eq!(versions(&keys), [2]);
        assert!(!keys.contains(&first.key.key_id()));
        fs::rename(&hidden, &file).unwrap();
        keys.reload();
        assert_eq!(versions(&keys), [2, 1]);
        assert!(keys.contains(&first.key.key_id()));

        fs::write(dir.join("signing-2.key"), "half").unwrap();
        fs::write(dir.join("signing-3.key"), "half").unwrap();
        keys.reload();
        assert_eq!(versions(&keys), [2, 1], "a file that can't be read takes no key away");
        fs::remove_file(&file).unwrap();
        keys.reload();
        assert_eq!(versions(&keys), [2], "a broken file keeps no other key in use");
        fs::rename(&dir, folder.path().join("moved")).unwrap();
        keys.reload();
        assert_eq!(versions(&keys), [2], "the keys of a missing directory stay");
        assert!(keys.last_problem.lock().unwrap().is_some());
        fs::rename(folder.path().join("moved"), &dir).unwrap();
        fs::remove_file(dir.join("signing-2.key")).unwrap();
        fs::remove_file(dir.join("signing-3.key")).unwrap();
        make_signing_key(&dir, 4).unwrap();
        keys.reload();
        assert_eq!(versions(&keys), [4]);
        assert_eq!(*keys.last_problem.lock().unwrap(), None);
    }
}
