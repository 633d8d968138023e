//! The disk operations that log and store use, as traits, so that a simulation can take the disk's
//! place.
//!
//! After a crash, data that was not synced is lost or half written. That includes directories: a
//! created, renamed or removed name survives a crash only after [`Disk::sync_dir`].
//!
//! An error from a write or a sync is final, and callers stop without a retry. The kernel has
//! possibly marked the pages clean, so a second sync would report success for data that is lost.

mod advice;
mod backend;
mod read_only;
mod real;
pub mod simulated;

use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use advice::advice;
pub use backend::RedbBackend;
pub use read_only::ReadOnlyDisk;
pub use real::RealDisk;

/// A disk with several owners.
pub type SharedDisk = Arc<dyn Disk>;

/// Whether a file to be opened must exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// The file must exist.
    Existing,
    /// The file must not exist. It is created readable and writable by its owner alone.
    New,
    /// The file is created if it does not exist.
    ExistingOrNew,
}

/// Operations on files and directories by path.
pub trait Disk: Debug + Send + Sync + 'static {
    /// Opens a file for reading and writing.
    fn open(&self, path: &Path, how: OpenMode) -> io::Result<Box<dyn DiskFile>>;

    /// Whether a file or directory of this name exists.
    fn exists(&self, path: &Path) -> io::Result<bool>;

    /// Creates a directory (mode 0700). Its parent must exist. It is no error if the directory
    /// exists.
    fn create_dir(&self, path: &Path) -> io::Result<()>;

    /// Returns the names in a directory, sorted.
    fn list(&self, path: &Path) -> io::Result<Vec<String>>;

    /// Renames a file or directory. A file with the new name is replaced.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes the file at `path`.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Makes the names that were created, renamed or removed in this directory durable.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;

    /// Returns the number of bytes that this process may still write to the file system of `path`,
    /// or `u64::MAX` if that is unknown.
    fn free_bytes(&self, path: &Path) -> io::Result<u64>;

    /// Locks a directory for this process until the lock is dropped. Fails with `WouldBlock` if
    /// another process holds the lock.
    fn lock_dir(&self, path: &Path) -> io::Result<DirLock>;
}

/// An open file. Offsets count from the start of the file. A write past the end makes the file
/// longer.
pub trait DiskFile: Debug + Send + Sync + 'static {
    /// Reads up to `out.len()` bytes; fewer only at the end of the file.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<usize>;

    /// Writes all of `data` at `offset`.
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Truncates the file, or extends it with zeros.
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Reserves space for the first `len` bytes, and extends the file with zeros to that length.
    fn allocate(&self, len: u64) -> io::Result<()>;

    /// Returns the first offset, at or after `from`, that was possibly written; `None` if there is
    /// none. Bytes before that offset read as zeros. A disk that does not record this returns
    /// `from`.
    fn next_written(&self, from: u64) -> io::Result<Option<u64>> {
        Ok(Some(from))
    }

    /// Returns the length in bytes.
    fn len(&self) -> io::Result<u64>;

    /// Whether the length is 0.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Makes all written data durable, with the metadata that is needed to read it back
    /// (fdatasync).
    fn sync_data(&self) -> io::Result<()>;

    /// Makes everything durable and drops cached pages, so that later reads come from the medium.
    /// The cache can hold pages that a failed sync has marked clean.
    fn sync_and_drop_cache(&self) -> io::Result<()>;
}

/// Lock of a directory, released on drop; see [`Disk::lock_dir`].
#[derive(Debug)]
pub struct DirLock {
    _held: Box<dyn LockGuard>,
}

/// An object that holds a lock until it is dropped.
pub trait LockGuard: Debug + Send + Sync + 'static {}

impl DirLock {
    /// Creates a lock that is held until `held` is dropped.
    pub fn new(held: impl LockGuard) -> Self {
        Self { _held: Box::new(held) }
    }
}

/// Fills `out` with the bytes at `offset`; bytes past the end of the file read as zeros.
pub fn read_padded(file: &dyn DiskFile, offset: u64, out: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < out.len() {
        let read = file.read_at(offset + done as u64, &mut out[done..])?;
        if read == 0 {
            out[done..].fill(0);
            break;
        }
        done += read;
    }
    Ok(())
}

/// Returns the directory that contains `path`.
pub fn parent(path: &Path) -> PathBuf {
    path.parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}
