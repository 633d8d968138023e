//! Files that are there, whole, after a crash: write aside, fsync, rename, fsync the folder.

use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::StateError;

/// Replaces `path` by `bytes`, readable by this user alone, durably: after it returns, a crash
/// finds the new content; before, the old one or the new one, never a mixture.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), StateError> {
    let aside = write_aside(path, bytes, true)?;
    std::fs::rename(&aside, path).map_err(StateError::io("replace", path))?;
    sync_folder_of(path)
}

/// Replaces `path` atomically for readers, without asking the disk to keep it: for what can be
/// worked out again.
pub fn write_volatile(path: &Path, bytes: &[u8]) -> Result<(), StateError> {
    let aside = write_aside(path, bytes, false)?;
    std::fs::rename(&aside, path).map_err(StateError::io("replace", path))
}

fn write_aside(path: &Path, bytes: &[u8], sync: bool) -> Result<PathBuf, StateError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".tmp");
    let aside = path.with_file_name(name);
    let fail = StateError::io("write", &aside);
    let written = (|| {
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&aside)?;
        file.write_all(bytes)?;
        if sync { file.sync_all() } else { Ok(()) }
    })();
    written.map_err(fail)?;
    Ok(aside)
}

/// Makes `path` and what is missing above it, 0700, durably. An existing folder stays as it is.
pub fn create_dir(path: &Path) -> Result<(), StateError> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        create_dir(parent)?;
    }
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => sync_folder_of(path),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(StateError::io("create", path)(error)),
    }
}

/// Makes renames and creations in `path`'s folder durable.
pub fn sync_folder_of(path: &Path) -> Result<(), StateError> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    std::fs::File::open(folder)
        .and_then(|folder| folder.sync_all())
        .map_err(StateError::io("sync", folder))
}

/// The content of `path`, or nothing if there is no such file.
pub fn read(path: &Path) -> Result<Option<Vec<u8>>, StateError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(StateError::io("read", path)(error)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_written_file_is_whole_and_private_and_leaves_nothing_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.json");
        write(&path, b"one").unwrap();
        write(&path, b"two").unwrap();
        assert_eq!(read(&path).unwrap().unwrap(), b"two");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_half_written_file_of_a_crash_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.json");
        write(&path, b"old").unwrap();
        std::fs::write(dir.path().join("journal.json.tmp"), b"ha").unwrap();
        assert_eq!(read(&path).unwrap().unwrap(), b"old");
        write(&path, b"new").unwrap();
        assert_eq!(read(&path).unwrap().unwrap(), b"new");
    }

    #[test]
    fn an_error_names_the_file_and_the_act() {
        let error = write(Path::new("/proc/no-such-folder/file"), b"").unwrap_err();
        assert!(error.to_string().contains("/proc/no-such-folder/file"), "{error}");
    }

    #[test]
    fn folders_are_made_private_with_their_parents() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("a/b/c");
        create_dir(&deep).unwrap();
        create_dir(&deep).unwrap();
        assert_eq!(std::fs::metadata(&deep).unwrap().permissions().mode() & 0o777, 0o700);
    }
}
