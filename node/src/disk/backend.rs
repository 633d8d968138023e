//! `redb`'s storage on a [`DiskFile`].

use std::io;

use super::DiskFile;

/// One file of a [`Disk`](super::Disk) as the store's storage. The directory's lock is what keeps
/// a second process out, so that the file needs none.
#[derive(Debug)]
pub struct Backend(Box<dyn DiskFile>);

impl Backend {
    /// Takes the file over.
    pub fn new(file: Box<dyn DiskFile>) -> Self {
        Self(file)
    }
}

impl redb::StorageBackend for Backend {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
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

    use super::*;
    use crate::disk::{Disk, Open, RealDisk};

    #[test]
    fn a_store_on_it_reopens_with_what_was_committed() {
        const TABLE: TableDefinition<u64, u64> = TableDefinition::new("t");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("db");
        let open = || Backend::new(RealDisk.open(&path, Open::ExistingOrNew).unwrap());
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
