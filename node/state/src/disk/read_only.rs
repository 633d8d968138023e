//! The host's files, opened for reading only. Opening and reading the log or the store also writes
//! to their files. These writes stay in memory until the file is closed.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{DirLock, Disk, DiskFile, LockGuard, OpenMode, RealDisk};

const PAGE: usize = 4096;

/// A disk that reads the host's files and writes nothing to them.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReadOnlyDisk;

/// A file on the host, overlaid by the pages that were written since it was opened.
#[derive(Debug)]
struct OverlayFile {
    host_file: File,
    overlay: Mutex<Overlay>,
}

#[derive(Debug)]
struct Overlay {
    len: u64,
    pages: BTreeMap<u64, Box<[u8]>>,
}

#[derive(Debug)]
struct NoLock;

impl LockGuard for NoLock {}

fn refuse_write<T>() -> io::Result<T> {
    Err(ErrorKind::ReadOnlyFilesystem.into())
}

impl Disk for ReadOnlyDisk {
    fn open(&self, path: &Path, how: OpenMode) -> io::Result<Box<dyn DiskFile>> {
        if how != OpenMode::Existing {
            return refuse_write();
        }
        let below = File::open(path)?;
        let len = below.metadata()?.len();
        let above = Mutex::new(Overlay { len, pages: BTreeMap::new() });
        Ok(Box::new(OverlayFile { host_file: below, overlay: above }))
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        RealDisk.exists(path)
    }

    fn create_dir(&self, _: &Path) -> io::Result<()> {
        refuse_write()
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        RealDisk.list(path)
    }

    fn rename(&self, _: &Path, _: &Path) -> io::Result<()> {
        refuse_write()
    }

    fn remove(&self, _: &Path) -> io::Result<()> {
        refuse_write()
    }

    fn sync_dir(&self, _: &Path) -> io::Result<()> {
        Ok(())
    }

    fn free_bytes(&self, path: &Path) -> io::Result<u64> {
        RealDisk.free_bytes(path)
    }

    /// Takes no lock, because the caller has locked the whole data directory.
    fn lock_dir(&self, _: &Path) -> io::Result<DirLock> {
        Ok(DirLock::new(NoLock))
    }
}

impl OverlayFile {
    fn lock_overlay(&self) -> MutexGuard<'_, Overlay> {
        self.overlay.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the page at `start` from the host's file, with zeros past the end.
    fn page(&self, start: u64) -> io::Result<Box<[u8]>> {
        let mut page = vec![0; PAGE].into_boxed_slice();
        let mut done = 0;
        while done < PAGE {
            match self.host_file.read_at(&mut page[done..], start + done as u64) {
                Ok(0) => break,
                Ok(read) => done += read,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(page)
    }
}

/// Returns the start of the page that contains `at`, and the offset within it.
fn page_and_offset(at: u64) -> (u64, usize) {
    let within = usize::try_from(at % PAGE as u64).expect("less than a page");
    (at - within as u64, within)
}

impl DiskFile for OverlayFile {
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<usize> {
        let above = self.lock_overlay();
        let left = usize::try_from(above.len.saturating_sub(offset)).unwrap_or(usize::MAX);
        let (start, within) = page_and_offset(offset);
        if above.pages.is_empty() {
            let bytes = left.min(out.len());
            return self.host_file.read_at(&mut out[..bytes], offset);
        }
        let bytes = left.min(out.len()).min(PAGE - within);
        match above.pages.get(&start) {
            Some(page) => out[..bytes].copy_from_slice(&page[within..within + bytes]),
            None => out[..bytes].copy_from_slice(&self.page(start)?[within..within + bytes]),
        }
        Ok(bytes)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut above = self.lock_overlay();
        let mut rest = data;
        let mut at = offset;
        while !rest.is_empty() {
            let (start, within) = page_and_offset(at);
            let (now, later) = rest.split_at(rest.len().min(PAGE - within));
            let page = match above.pages.entry(start) {
                Entry::Occupied(page) => page.into_mut(),
                Entry::Vacant(place) => place.insert(self.page(start)?),
            };
            page[within..within + now.len()].copy_from_slice(now);
            at += now.len() as u64;
            rest = later;
        }
        above.len = above.len.max(at);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut above = self.lock_overlay();
        if len < above.len {
            // Bytes past the new end must read as zeros if the file grows again.
            let (start, within) = page_and_offset(len);
            let mut page = match above.pages.remove(&start) {
                Some(page) => page,
                None => self.page(start)?,
            };
            page[within..].fill(0);
            above.pages.insert(start, page);
            let mut gone = start + PAGE as u64;
            while gone < above.len {
                above.pages.insert(gone, vec![0; PAGE].into_boxed_slice());
                gone += PAGE as u64;
            }
        }
        above.len = len;
        Ok(())
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        let longer = len.max(self.len()?);
        self.set_len(longer)
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.lock_overlay().len)
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn sync_and_drop_cache(&self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::read_padded;

    #[test]
    fn written_data_is_read_back_but_the_hosts_file_is_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let before: Vec<u8> = (0..10_000_u32).map(|n| n.to_le_bytes()[0]).collect();
        std::fs::write(&path, &before).unwrap();
        let file = ReadOnlyDisk.open(&path, OpenMode::Existing).unwrap();
        let mut expected = before.clone();
        for (at, data) in [(4_090, vec![1; 20]), (9_990, vec![2; 300]), (20_000, vec![3; 5_000])] {
            file.write_at(at as u64, &data).unwrap();
            expected.resize(expected.len().max(at + data.len()), 0);
            expected[at..at + data.len()].copy_from_slice(&data);
        }
        let all = |len: usize| {
            let mut out = vec![9; len];
            read_padded(file.as_ref(), 0, &mut out).unwrap();
            out
        };
        assert_eq!(file.len().unwrap(), expected.len() as u64);
        assert!(all(expected.len()) == expected);
        file.set_len(5_000).unwrap();
        file.set_len(12_000).unwrap();
        expected.truncate(5_000);
        expected.resize(12_000, 0);
        assert!(all(12_000) == expected);
        drop(file);
        assert!(std::fs::read(&path).unwrap() == before);
    }

    #[test]
    fn nothing_can_be_created_renamed_or_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        for how in [OpenMode::New, OpenMode::ExistingOrNew] {
            let refused = ReadOnlyDisk.open(&path, how).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::ReadOnlyFilesystem);
        }
        std::fs::write(&path, "kept").unwrap();
        ReadOnlyDisk.remove(&path).unwrap_err();
        ReadOnlyDisk.rename(&path, &dir.path().join("g")).unwrap_err();
        ReadOnlyDisk.create_dir(&dir.path().join("d")).unwrap_err();
        assert_eq!(ReadOnlyDisk.list(dir.path()).unwrap(), ["f"]);
    }
}
