//! Temporary files without a name: a killed process leaves none behind.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::rand::{GetRandomFlags, getrandom};

/// Free space that a spool file leaves for the node, which shares the disk by default.
const RESERVED_BYTES: u64 = 512 << 20;

/// A folder for temporary files.
#[derive(Clone, Debug)]
pub(crate) struct Spool {
    folder: PathBuf,
}

/// Too little space is left for a file.
#[derive(Debug, thiserror::Error)]
#[error(
    "{}: {free} bytes are free, and {needed} are needed ({RESERVED_BYTES} stay free for the node): free space, or \
     name another folder with --backup-spool", folder.display()
)]
pub(crate) struct NoSpaceError {
    folder: PathBuf,
    free: u64,
    needed: u64,
}

impl Spool {
    /// Opens a folder, and makes it (0700) if it is missing. Its parent must exist.
    pub(crate) fn open(folder: &Path) -> Result<Self, muster_files::Error> {
        muster_files::data::make_folder(folder)?;
        Ok(Self { folder: folder.to_owned() })
    }

    /// Uses the system's folder for temporary files.
    pub(crate) fn system() -> Self {
        Self { folder: std::env::temp_dir() }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Makes a file that only this process can open. Its space is freed when it is closed.
    pub(super) fn file(&self) -> Result<File, muster_files::Error> {
        let mut random = [0; 8];
        getrandom(&mut random, GetRandomFlags::empty())
            .map_err(|error| muster_files::Error::io("make", &self.folder)(error.into()))?;
        let name = format!("muster-spool-{:016x}", u64::from_le_bytes(random));
        let path = self.folder.join(name);
        let file = muster_files::data::recreate(&path)?;
        muster_files::data::remove(&path)?;
        Ok(file)
    }

    /// Checks that a file of `bytes` leaves enough space.
    pub(super) fn ensure_space(&self, bytes: u64) -> Result<(), NoSpaceError> {
        // If the file system doesn't report its free space, a full disk shows only when writing
        // fails.
        let Ok(system) = rustix::fs::statvfs(&self.folder) else { return Ok(()) };
        let free = system.f_bavail.saturating_mul(system.f_frsize);
        let needed = bytes.saturating_add(RESERVED_BYTES);
        if free >= needed {
            return Ok(());
        }
        Err(NoSpaceError { folder: self.folder.clone(), free, needed })
    }
}

/// Whether an error says that a disk or a quota is full.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
    )
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, SeekFrom, Write};

    use super::*;

    #[test]
    fn a_spool_file_has_no_name_and_keeps_its_content() {
        let dir = tempfile::tempdir().unwrap();
        let spool = Spool::open(&dir.path().join("spool")).unwrap();
        let mut file = spool.file().unwrap();
        file.write_all(b"content").unwrap();
        assert_eq!(std::fs::read_dir(spool.folder()).unwrap().count(), 0);
        file.seek(SeekFrom::Start(0)).unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "content");
    }

    #[test]
    fn a_file_that_would_fill_the_disk_is_refused() {
        let spool = Spool { folder: std::env::temp_dir() };
        assert!(spool.ensure_space(u64::MAX).unwrap_err().to_string().contains("--backup-spool"));
    }
}
