//! Defragmentation: replaces the store's file by a smaller one while the store is read and written.
//!
//! redb, the library under the store, reuses freed pages, but its file hardly shrinks by itself. So
//! the contents are copied into a new file, in these steps:
//!
//! 1. All records in the file are copied. This may take long, and writes continue.
//! 2. Once a running flush has ended, a lock keeps flushes out. The records that were flushed
//!    during step 1 are copied, and all tables other than that of the records.
//! 3. The new file is made durable and renamed over the old one. All reads and writes use the new
//!    file from then on.
//!
//! Steps 1 and 2 together miss no record, because each new record has a new revision and is never
//! changed. Only compaction deletes records, and it waits during a defragmentation.
//!
//! After a crash one of the two files has the store's name, and each of them is complete. The old
//! file is never changed, and the log keeps every entry after that file's last checkpoint. The new
//! file contains at least as many entries. A new file that was not renamed is removed at the next
//! start.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use redb::{
    Durability, Key, ReadableDatabase as _, TableDefinition, TableHandle as _, Value,
    WriteTransaction,
};

use super::error::StoreError;
use super::record_rows::first_row_of;
use super::store::{FileView, Store, StoreDatabase, StoreState};
use super::tables::{ALARMS, LEASES, MEMBERS, META, RECORDS, REMOVED, ROLES, USERS};
use crate::disk::{OpenMode, RedbBackend, SharedDisk};

/// Name of the store's file in the member's directory.
const STORE_FILE_NAME: &str = "db";
/// Name of the new file until it replaces the store's file.
const NEW_FILE_NAME: &str = "db.defragmented";
/// Bytes of disk space that a defragmentation leaves free for the log.
const KEEP_FREE_BYTES: u64 = 64 << 20;

/// Location of a store's file.
#[derive(Clone, Debug)]
pub struct StoreFile {
    disk: SharedDisk,
    dir: PathBuf,
}

impl StoreFile {
    /// Names the store's file in the member directory `dir`.
    #[must_use]
    pub fn new(disk: SharedDisk, dir: &Path) -> Self {
        Self { disk, dir: dir.to_owned() }
    }

    /// Returns the path of the store's file.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.dir.join(STORE_FILE_NAME)
    }

    /// Removes the unfinished new file of an interrupted defragmentation.
    pub fn tidy(&self) -> io::Result<()> {
        let left = self.dir.join(NEW_FILE_NAME);
        if self.disk.exists(&left)? { self.disk.remove(&left) } else { Ok(()) }
    }

    fn open_new(&self, how: OpenMode) -> io::Result<RedbBackend> {
        RedbBackend::new(self.disk.open(&self.dir.join(NEW_FILE_NAME), how)?)
    }
}

/// File sizes before and after a defragmentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DefragmentSizes {
    /// Length of the file before the defragmentation, in bytes.
    pub before: u64,
    /// Length of the file after the defragmentation, in bytes.
    pub after: u64,
}

/// Reason why a defragmentation failed.
#[derive(Debug, thiserror::Error)]
pub enum DefragmentError {
    /// The new file beside the old one would fill the disk.
    #[error(
        "the disk has {free} bytes free, and the new file beside the old one may take {wanted}"
    )]
    NoSpace {
        /// Free bytes on the disk.
        free: u64,
        /// Estimated bytes of the new file, plus those that stay free for the log.
        wanted: u64,
    },
    /// A snapshot replaced the store's contents during the defragmentation.
    #[error("the store was replaced by a snapshot meanwhile; try again")]
    Replaced,
    /// The new file could not be created or renamed.
    #[error("the new file could not be made")]
    Disk(#[from] io::Error),
    /// The old file could not be read, or the new one could not be written.
    #[error("the store could not be copied")]
    Store(#[from] StoreError),
    /// The new file was renamed, but the rename may not survive a crash. Neither file may be
    /// written any more, so the process has to end.
    #[error("the new file's name could not be made durable")]
    RenameNotDurable(#[source] io::Error),
}

impl Store {
    /// Copies the store into a file that is as small as its contents, and replaces the old file.
    ///
    /// This takes as long as reading and writing the whole contents. Reads and writes continue
    /// except for an instant at the end; compactions wait. A second defragmentation waits for the
    /// first. Call this function where blocking is allowed.
    pub fn defragment(&self, at: &StoreFile) -> Result<DefragmentSizes, DefragmentError> {
        let shared = &self.shared;
        let _alone = shared.deletion_lock.lock().expect("a panic under it stops the process");
        let before = self.file_bytes();
        self.check_space(at)?;
        at.tidy()?;
        let put = copy(shared, at).and_then(|copy| replace_store_file(shared, at, copy));
        if put.is_err() {
            // If `tidy` fails too, the next start or defragmentation removes the file.
            let _ = at.tidy();
        }
        put.map(|()| DefragmentSizes { before, after: self.file_bytes() })
    }

    fn check_space(&self, at: &StoreFile) -> Result<(), DefragmentError> {
        let free = at.disk.free_bytes(&at.dir)?;
        // Pages that are not full need up to half of the records' size in addition.
        let held = self.record_bytes();
        let wanted = (held + held / 2).saturating_add(KEEP_FREE_BYTES);
        if free < wanted { Err(DefragmentError::NoSpace { free, wanted }) } else { Ok(()) }
    }
}

/// New file with a copy of the records of one view.
pub(super) struct StoreCopy {
    file: StoreDatabase,
    /// Revision of the view whose records were copied.
    revision: i64,
    /// Value of the counter `StoreState::replacement_count` before the copy began.
    replaced: u64,
}

pub(super) fn copy(shared: &StoreState, at: &StoreFile) -> Result<StoreCopy, DefragmentError> {
    let replaced = shared.replacement_count.load(Ordering::Relaxed);
    let view = FileView::open(&shared.file(), 0)?;
    let file = StoreDatabase::open(at.open_new(OpenMode::New)?, shared.cache_bytes)?;
    {
        let txn = begin(&file)?;
        copy_records(&view, 0, &txn)?;
        txn.commit().map_err(StoreError::from)?;
    }
    Ok(StoreCopy { file, revision: view.progress.revision, replaced })
}

pub(super) fn replace_store_file(
    shared: &StoreState,
    at: &StoreFile,
    copy: StoreCopy,
) -> Result<(), DefragmentError> {
    let mut place = shared.file.write().expect("nothing panics while it replaces the file");
    if shared.replacement_count.load(Ordering::Relaxed) != copy.replaced {
        return Err(DefragmentError::Replaced);
    }
    let newest = FileView::open(&place, 0)?;
    {
        let txn = begin(&copy.file)?;
        copy_records(&newest, copy.revision + 1, &txn)?;
        copy_table(&place, META, &txn)?;
        copy_table(&place, MEMBERS, &txn)?;
        copy_table(&place, REMOVED, &txn)?;
        copy_table(&place, ALARMS, &txn)?;
        copy_table(&place, LEASES, &txn)?;
        copy_table(&place, USERS, &txn)?;
        copy_table(&place, ROLES, &txn)?;
        txn.commit().map_err(StoreError::from)?;
    }
    assert_eq!(tables(&place)?, tables(&copy.file)?, "a table that isn't copied would be gone");
    // Closing the file truncates the space that redb allocated and doesn't need.
    drop(copy.file);
    let file = Arc::new(StoreDatabase::open(at.open_new(OpenMode::Existing)?, shared.cache_bytes)?);
    // A file that can't be read must not replace the old one.
    FileView::open(&file, 0)?;
    at.disk.rename(&at.dir.join(NEW_FILE_NAME), &at.path())?;
    at.disk.sync_dir(&at.dir).map_err(DefragmentError::RenameNotDurable)?;
    let old = std::mem::replace(&mut *place, file.clone());
    shared.publish_view(&file)?;
    drop(place);
    // Closing the old file may take a while. It happens after the lock is released, so that no read
    // or write waits for it.
    drop(old);
    Ok(())
}

fn tables(file: &StoreDatabase) -> Result<BTreeSet<String>, StoreError> {
    let txn = file.db.begin_read()?;
    Ok(txn.list_tables()?.map(|table| table.name().to_owned()).collect())
}

fn begin(file: &StoreDatabase) -> Result<WriteTransaction, StoreError> {
    let mut txn = file.db.begin_write()?;
    txn.set_durability(Durability::Immediate)?;
    // After a crash, redb reads the whole file at the next start, unless the last durable commit
    // had quick repair enabled.
    txn.set_quick_repair(true);
    Ok(txn)
}

/// Copies the records of `view` whose main revision is `from` or higher.
fn copy_records(view: &FileView, from: i64, to: &WriteTransaction) -> Result<(), StoreError> {
    let mut records = to.open_table(RECORDS)?;
    for row in view.rows(first_row_of(from)..u128::MAX)? {
        let (number, row) = row?;
        records.insert(number, &row[..])?;
    }
    Ok(())
}

fn copy_table<K: Key + 'static, V: Value + 'static>(
    from: &StoreDatabase,
    table: TableDefinition<'static, K, V>,
    to: &WriteTransaction,
) -> Result<(), StoreError> {
    let mut rows = to.open_table(table)?;
    for row in from.db.begin_read()?.open_table(table)?.range::<K::SelfType<'_>>(..)? {
        let (key, value) = row?;
        rows.insert(key.value(), value.value())?;
    }
    Ok(())
}
