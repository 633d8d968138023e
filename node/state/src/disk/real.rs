//! The disk of the host, with its real files and directories.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::Path;

use muster_files::data;
use rustix::fs::{
    Advice, FallocateFlags, FlockOperation, SeekFrom, fadvise, fallocate, fdatasync, flock, seek,
    statvfs,
};

use super::{DirLock, Disk, DiskFile, LockGuard, OpenMode};

/// The host's file system. Other users can have write access to the data directory, so files are
/// opened, created, renamed and removed through [`data`], which guards against that.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealDisk;

#[derive(Debug)]
struct RealFile(File);

#[derive(Debug)]
struct Flock(#[expect(dead_code, reason = "dropping it releases the lock")] File);

impl LockGuard for Flock {}

impl Disk for RealDisk {
    fn open(&self, path: &Path, how: OpenMode) -> io::Result<Box<dyn DiskFile>> {
        let how = match how {
            OpenMode::Existing => data::OpenMode::ReadWrite,
            OpenMode::New => data::OpenMode::New,
            OpenMode::ExistingOrNew => data::OpenMode::ReadWriteOrNew,
        };
        Ok(Box::new(RealFile(data::open(path, how)?)))
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        path.try_exists()
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        Ok(data::make_folder(path)?)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in path.read_dir()? {
            // A name that is not UTF-8 is left out, because the node creates no such file.
            names.extend(entry?.file_name().into_string());
        }
        names.sort_unstable();
        Ok(names)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        Ok(data::rename_volatile(from, to)?)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        Ok(data::remove(path)?)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        Ok(data::sync(path)?)
    }

    fn free_bytes(&self, path: &Path) -> io::Result<u64> {
        let space = statvfs(path)?;
        Ok(space.f_bavail.saturating_mul(space.f_frsize))
    }

    fn lock_dir(&self, path: &Path) -> io::Result<DirLock> {
        let directory = data::open_folder(path)?;
        flock(&directory, FlockOperation::NonBlockingLockExclusive)?;
        Ok(DirLock::new(Flock(directory)))
    }
}

impl DiskFile for RealFile {
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.0.read_at(out, offset) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_all_at(data, offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        match fallocate(&self.0, FallocateFlags::empty(), 0, len) {
            // If the file system can't reserve space, the file is only extended. A full disk is
            // then reported by a later write.
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {
                self.0.set_len(len.max(self.len()?))
            }
            other => Ok(other?),
        }
    }

    fn next_written(&self, from: u64) -> io::Result<Option<u64>> {
        match seek(&self.0, SeekFrom::Data(from)) {
            Ok(at) => Ok(Some(at)),
            Err(rustix::io::Errno::NXIO) => Ok(None),
            // Some file systems do not record holes, so any byte was possibly written.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => Ok(Some(from)),
            Err(error) => Err(error.into()),
        }
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(fdatasync(&self.0)?)
    }

    fn sync_and_drop_cache(&self) -> io::Result<()> {
        self.0.sync_all()?;
        match fadvise(&self.0, 0, None, Advice::DontNeed) {
            // These errors mean that the file system has no page cache to drop.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) | Ok(()) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_can_be_locked_once_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let held = RealDisk.lock_dir(dir.path()).unwrap();
        let refused = RealDisk.lock_dir(dir.path()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::WouldBlock);
        drop(held);
        RealDisk.lock_dir(dir.path()).unwrap();
    }

    #[test]
    fn a_file_reads_back_its_written_data_up_to_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let file = RealDisk.open(&path, OpenMode::New).unwrap();
        file.write_at(3, b"abc").unwrap();
        file.sync_data().unwrap();
        file.sync_and_drop_cache().unwrap();
        let mut out = [9; 8];
        assert_eq!(file.read_at(2, &mut out).unwrap(), 4);
        assert_eq!(&out[..4], b"\0abc");
        assert_eq!(
            RealDisk.open(&path, OpenMode::New).unwrap_err().kind(),
            ErrorKind::AlreadyExists
        );
        assert_eq!(RealDisk.list(dir.path()).unwrap(), ["f"]);
    }

    #[test]
    fn written_data_is_found_after_allocated_space() {
        let dir = tempfile::tempdir().unwrap();
        let file = RealDisk.open(&dir.path().join("f"), OpenMode::New).unwrap();
        file.allocate(1 << 20).unwrap();
        file.write_at(3 << 18, b"abc").unwrap();
        file.sync_data().unwrap();
        let found = file.next_written(4096).unwrap().expect("something was written");
        assert!((4096..=3 << 18).contains(&found), "{found}");
        // No file system reports data at this offset, because nothing was written there or later.
        assert_eq!(file.next_written(1 << 20).unwrap(), None);
    }
}
