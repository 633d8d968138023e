//! Advisory lock that admits one agent per data directory. The kernel releases it when its holder
//! dies.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use muster_files::data;
use rustix::fs::{FlockOperation, flock};

use super::StateError;

/// Why a lock was not acquired.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process holds the lock.
    #[error("{} is held by {holder}", path.display())]
    Held {
        path: PathBuf,
        /// The text that the holder wrote into the file.
        holder: String,
    },
    /// The lock file can't be used.
    #[error(transparent)]
    State(#[from] StateError),
}

/// A held lock. It is released when dropped, and when the process ends.
#[derive(Debug)]
pub struct FileLock {
    _file: File,
}

/// Takes the lock at `path` for this process, without waiting. Writes `holder` into the file, so
/// that other processes can report who holds the lock.
pub fn acquire(path: &Path, holder: &str) -> Result<FileLock, LockError> {
    let mut file = open(path).map_err(StateError::from)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            return Err(LockError::Held { path: path.to_owned(), holder: read_holder(&mut file) });
        }
        Err(error) => return Err(StateError::io("lock", path)(error.into()).into()),
    }
    let written = file
        .set_len(0)
        .and_then(|()| file.rewind())
        .and_then(|()| file.write_all(holder.as_bytes()));
    if let Err(error) = written {
        // Ignore this failure: the holder's name is for messages only, and a full disk must not
        // keep a node from starting.
        tracing::warn!(%error, "can't write who holds {}", path.display());
    }
    Ok(FileLock { _file: file })
}

/// Returns the holder of the lock at `path`; `None` if the lock is free or was never taken.
pub fn holder(path: &Path) -> Result<Option<String>, StateError> {
    let Some(mut file) = data::open_for_inspection(path)? else { return Ok(None) };
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(None),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(Some(read_holder(&mut file))),
        Err(error) => Err(StateError::io("lock", path)(error.into())),
    }
}

/// Opens a lock file, creating it if necessary.
pub fn open(path: &Path) -> Result<File, muster_files::Error> {
    data::open(path, data::OpenMode::ReadWriteOrNew)
}

fn read_holder(file: &mut File) -> String {
    /// Number of bytes read, which is more than any holder writes.
    const LIMIT: u64 = 256;
    let mut text = String::new();
    let read =
        file.rewind().and_then(|()| Read::by_ref(file).take(LIMIT).read_to_string(&mut text));
    match read {
        Ok(_) if !text.trim().is_empty() => text.trim().to_owned(),
        _ => "another process".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_holder_is_refused_with_the_name_of_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.lock");
        let first = acquire(&path, "muster-agent, pid 42").unwrap();
        let error = acquire(&path, "me too").unwrap_err();
        assert!(error.to_string().contains("pid 42"), "{error}");
        assert_eq!(holder(&path).unwrap().as_deref(), Some("muster-agent, pid 42"));
        drop(first);
        assert_eq!(holder(&path).unwrap(), None);
        acquire(&path, "me too").unwrap();
    }

    #[test]
    fn a_lock_that_was_never_taken_has_no_holder() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(holder(&dir.path().join("none.lock")).unwrap(), None);
    }
}
