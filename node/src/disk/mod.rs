//! The little that log and store ask of a disk, so that a simulation can be the disk.
//!
//! A real disk loses what was not synced, and may tear it; directories are files too: what was
//! created, renamed or removed survives a crash only after [`Disk::sync_dir`]. An error from a
//! write or a sync is final: the kernel may have marked the pages clean, so that a second sync
//! reports success for data that is gone. Callers stop; they never retry.

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
pub use backend::Backend;
pub use read_only::ReadOnlyDisk;
pub use real::RealDisk;

/// A disk that several owners share.
pub type SharedDisk = Arc<dyn Disk>;

/// How to open a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Open {
    /// It must exist.
    Existing,
    /// It must not exist. Readable and writable by the owner alone.
    New,
    /// Either.
    ExistingOrNew,
}

/// Operations on directories.
pub trait Disk: Debug + Send + Sync + 'static {
    /// Opens a file for reading and writing.
    fn open(&self, path: &Path, how: Open) -> io::Result<Box<dyn DiskFile>>;

    /// Whether a file or directory of this name exists.
    fn exists(&self, path: &Path) -> io::Result<bool>;

    /// Makes a directory (mode 0700). Its parent must exist; it may exist already.
    fn create_dir(&self, path: &Path) -> io::Result<()>;

    /// The names in a directory, sorted.
    fn list(&self, path: &Path) -> io::Result<Vec<String>>;

    /// Renames a file or directory; replaces a file of the new name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Makes durable what was created, renamed or removed in this directory.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;

    /// Bytes that this process may still write on the file system that holds `path`, as far as
    /// that is known; `u64::MAX` where it isn't.
    fn free_bytes(&self, path: &Path) -> io::Result<u64>;

    /// Claims a directory for this process until the lock is dropped. `WouldBlock` if somebody
    /// else holds it.
    fn lock_dir(&self, path: &Path) -> io::Result<DirLock>;
}

/// An open file. All positions are absolute; the file grows as it is written.
pub trait DiskFile: Debug + Send + Sync + 'static {
    /// Reads up to `out.len()` bytes; fewer only at the end of the file.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<usize>;

    /// Writes all of `data`.
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Cuts the file, or extends it by zeros.
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Makes sure that writes below `len` won't lack space, and extends the file by zeros to it.
    fn allocate(&self, len: u64) -> io::Result<()>;

    /// Where, at or after `from`, something may have been written; `None` if nothing was. What
    /// stands before reads as zeros. A disk that keeps no account says `from`.
    fn next_written(&self, from: u64) -> io::Result<Option<u64>> {
        Ok(Some(from))
    }

    /// Its length.
    fn len(&self) -> io::Result<u64>;

    /// Whether it has no bytes.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Makes all written data durable, and what is needed to read it back (fdatasync).
    fn sync_data(&self) -> io::Result<()>;

    /// Makes everything durable and forgets cached pages, so that the next reads see what is on
    /// the medium: a page that a failed sync has left clean in the cache doesn't count.
    fn reread(&self) -> io::Result<()>;
}

/// Holds a directory; see [`Disk::lock_dir`].
#[derive(Debug)]
pub struct DirLock {
    _held: Box<dyn Held>,
}

/// What holding a lock keeps alive.
pub trait Held: Debug + Send + Sync + 'static {}

impl DirLock {
    /// A lock that lasts as long as `held`.
    pub fn new(held: impl Held) -> Self {
        Self { _held: Box::new(held) }
    }
}

/// Fills `out` from `offset`; what lies behind the file's end reads as zeros.
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

/// The directory that `path` stands in.
pub fn parent(path: &Path) -> PathBuf {
    path.parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}
