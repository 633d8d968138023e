//! The storage backend of `redb` on a [`DiskFile`].

use std::io;

use super::DiskFile;

/// Size of a page of `redb` in bytes, its default. The file grows and shrinks by whole pages.
const PAGE_BYTES: u64 = 4096;

/// The store's file on a [`Disk`](super::Disk). It needs no lock of its own, because the lock of
/// the data directory keeps other processes out.
#[derive(Debug)]
pub struct RedbBackend(Box<dyn DiskFile>);

impl RedbBackend {
    /// Opens the store on `file`, reading it from the medium instead of the page cache. The
    /// previous process may have ended because a sync failed. Then the page cache still contains
    /// data that never reached the medium.
    pub fn new(file: Box<dyn DiskFile>) -> io::Result<Self> {
        file.sync_and_drop_cache()?;
        Ok(Self(file))
    }
}

impl redb::StorageBackend for RedbBackend {
    /// Returns the length, rounded down to whole pages. After a power cut while the file grew, the
    /// file may end within a page. No commit uses that page, but `redb` would report such a length
    /// as damage.
    fn len(&self) -> io::Result<u64> {
        let len = self.0.len()?;
        Ok(len - len % PAGE_BYTES)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < out.len() {
            let read = self.0.read_at(offset + done as u64, &mut out[done..])?;
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            done += read;
        }
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_at(offset, data)
    }
}

#[cfg(test)]
mod tests {
    use redb::{Database, ReadableDatabase, TableDefinition};

    use std::path::Path;

    use super::*;
    use crate::disk::simulated::{DiskFailure, DiskOperation, Fault, SimulatedDisk};
    use crate::disk::{Disk, OpenMode, RealDisk};

    #[test]
    fn data_read_after_a_failed_sync_survives_a_power_cut() {
        const PAGES: usize = 8;
        let mut differ = 0;
        for seed in 0..20 {
            let disk = SimulatedDisk::new(seed);
            let path = Path::new("db");
            let open = |how| disk.open(path, how).unwrap();
            let file = open(OpenMode::New);
            file.write_at(0, &[1; PAGES * 512]).unwrap();
            file.sync_data().unwrap();
            disk.sync_dir(Path::new("")).unwrap();
            file.write_at(0, &[2; PAGES * 512]).unwrap();
            let (operation, failure) = (DiskOperation::Sync, DiskFailure::Io);
            disk.inject(Fault { operation, after: 0, times: 1, failure });
            file.sync_data().unwrap_err();
            disk.kill();

            let read = |backend: &RedbBackend| {
                let mut out = [0; PAGES * 512];
                redb::StorageBackend::read(backend, 0, &mut out).unwrap();
                out
            };
            let shown = read(&RedbBackend::new(open(OpenMode::Existing)).unwrap());
            disk.crash();
            assert!(
                shown == read(&RedbBackend::new(open(OpenMode::Existing)).unwrap()),
                "seed {seed}"
            );
            differ += usize::from(shown.contains(&1));
        }
        assert!(differ > 0, "in no history did the failed sync lose anything");
    }

    #[test]
    fn a_file_with_a_partial_last_page_opens_after_a_power_cut() {
        const TABLE: TableDefinition<u64, u64> = TableDefinition::new("t");
        let disk = SimulatedDisk::new(1);
        let file = || disk.open(Path::new("db"), OpenMode::ExistingOrNew).unwrap();
        let open = || Database::builder().create_with_backend(RedbBackend::new(file()).unwrap());
        let database = open().unwrap();
        let write = database.begin_write().unwrap();
        write.open_table(TABLE).unwrap().insert(1, 2).unwrap();
        write.commit().unwrap();
        disk.sync_dir(Path::new("")).unwrap();
        disk.kill();
        drop(database);
        let grown = file();
        let committed = grown.len().unwrap();
        for more in [1, 1000, PAGE_BYTES - 1, PAGE_BYTES + 1] {
            grown.set_len(committed + more).unwrap();
            let database = open().unwrap_or_else(|error| panic!("{more} bytes more: {error}"));
            let read = database.begin_read().unwrap();
            let found = read.open_table(TABLE).unwrap().get(1).unwrap().map(|value| value.value());
            assert_eq!(found, Some(2));
        }
    }

    #[test]
    fn a_database_on_the_backend_reopens_with_its_committed_data() {
        const TABLE: TableDefinition<u64, u64> = TableDefinition::new("t");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("db");
        let open =
            || RedbBackend::new(RealDisk.open(&path, OpenMode::ExistingOrNew).unwrap()).unwrap();
        let database = Database::builder().create_with_backend(open()).unwrap();
        let write = database.begin_write().unwrap();
        write.open_table(TABLE).unwrap().insert(1, 2).unwrap();
        write.commit().unwrap();
        drop(database);
        let database = Database::builder().create_with_backend(open()).unwrap();
        let read = database.begin_read().unwrap();
        let found = read.open_table(TABLE).unwrap().get(1).unwrap().map(|value| value.value());
        assert_eq!(found, Some(2));
    }
}
