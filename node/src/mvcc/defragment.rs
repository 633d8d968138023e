//! A smaller file in the store's place, while the store is read and written.
//!
//! The library under the store uses pages again that became free, but its file shrinks little by
//! itself. So everything is copied into a new file: first all records of one view, however long that
//! takes, while others go on writing; then, with writers held off, what they added since, which is
//! little, and all that isn't records. That is made durable, renamed over the old file, and from
//! then on read and written. Records have new revisions and are never changed, and compaction, which
//! alone takes some away, waits meanwhile: so a view's records and those after it are all.
//!
//! A crash leaves one of the two files under the store's name, each whole: the old one is not
//! changed by any of this, and the log keeps what came after its last checkpoint; the new one has
//! more. A new file that didn't get its name is removed at the next start.

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
use super::revision::Revision;
use super::store::{File, Shared, Store, View, freeze};
use super::tables::{ALARMS, LEASES, MEMBERS, META, RECORDS, REMOVED, ROLES, USERS};
use crate::disk::{Backend, Open, SharedDisk};

/// The store's file in the member's directory.
const NAME: &str = "db";
/// The one that is to take its place.
const NEW: &str = "db.defragmented";
/// Stays free on the disk, for the log.
const KEEP_FREE_BYTES: u64 = 64 << 20;

/// Where a store lies.
#[derive(Clone, Debug)]
pub struct StoreFile {
    disk: SharedDisk,
    dir: PathBuf,
}

impl StoreFile {
    /// In a member's directory.
    #[must_use]
    pub fn new(disk: SharedDisk, dir: &Path) -> Self {
        Self { disk, dir: dir.to_owned() }
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.dir.join(NAME)
    }

    /// Removes what a defragmentation that was cut short has left.
    pub fn tidy(&self) -> io::Result<()> {
        let left = self.dir.join(NEW);
        if self.disk.exists(&left)? { self.disk.remove(&left) } else { Ok(()) }
    }

    fn open_new(&self, how: Open) -> io::Result<Backend> {
        Backend::new(self.disk.open(&self.dir.join(NEW), how)?)
    }
}

/// What a defragmentation came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Defragmented {
    /// Length of the file before, bytes.
    pub before: u64,
    /// And after.
    pub after: u64,
}

/// Why the file is as it was.
#[derive(Debug, thiserror::Error)]
pub enum DefragmentError {
    /// The new file beside the old one would fill the disk up.
    #[error(
        "the disk has {free} bytes free, and the new file beside the old one may take {wanted}"
    )]
    NoSpace {
        /// On the disk, bytes.
        free: u64,
        /// The new file, and what stays free for the log.
        wanted: u64,
    },
    /// A snapshot has replaced the store meanwhile.
    #[error("the store was replaced by a snapshot meanwhile; try again")]
    Replaced,
    /// The new file could not be made.
    #[error("the new file could not be made")]
    Disk(#[from] io::Error),
    /// The same, or the old one could not be read.
    #[error("the store could not be copied")]
    Store(#[from] StoreError),
    /// The new file has its name, and that may not survive a crash: neither of the two may be
    /// written any more. The process has to end.
    #[error("the new file's name could not be made durable")]
    Unsettled(#[source] io::Error),
}

impl Store {
    /// Makes the file as small as what it holds. Takes as long as reading and writing all of it; reads
    /// and writes go on but for an instant at the end, compactions wait. One at a time: a second one waits.
    /// Call it where it may block.
    ///
    /// # Errors
    /// The store is as it was, and goes on, unless the error is [`DefragmentError::Unsettled`].
    pub fn defragment(&self, at: &StoreFile) -> Result<Defragmented, DefragmentError> {
        let shared = &self.shared;
        let _alone = shared.rows_stay.lock().expect("a panic under it stops the process");
        let before = self.file_bytes();
        self.check_space(at)?;
        at.tidy()?;
        let put = copy(shared, at).and_then(|copy| take_its_place(shared, at, copy));
        if put.is_err() {
            // If that fails too, the next start or defragmentation does it.
            let _ = at.tidy();
        }
        put.map(|()| Defragmented { before, after: self.file_bytes() })
    }

    fn check_space(&self, at: &StoreFile) -> Result<(), DefragmentError> {
        let free = at.disk.free_bytes(&at.dir)?;
        // Half as much again as the records, for pages that are not full.
        let held = self.record_bytes();
        let wanted = (held + held / 2).saturating_add(KEEP_FREE_BYTES);
        if free < wanted { Err(DefragmentError::NoSpace { free, wanted }) } else { Ok(()) }
    }
}

/// A new file with the records of one view.
pub(super) struct Copy {
    file: File,
    /// The view's.
    revision: i64,
    /// Which of the states that replaced all others it is of.
    replaced: u64,
}

pub(super) fn copy(shared: &Shared, at: &StoreFile) -> Result<Copy, DefragmentError> {
    let replaced = shared.replaced.load(Ordering::Relaxed);
    let view = freeze(&shared.file())?.view;
    let file = File::open(at.open_new(Open::New)?, shared.cache_bytes)?;
    {
        let txn = begin(&file)?;
        copy_records(&view, 0, &txn)?;
        txn.commit().map_err(StoreError::from)?;
    }
    Ok(Copy { file, revision: view.revision(), replaced })
}

pub(super) fn take_its_place(
    shared: &Shared,
    at: &StoreFile,
    copy: Copy,
) -> Result<(), DefragmentError> {
    let mut place = shared.file.write().expect("nothing panics while it replaces the file");
    if shared.replaced.load(Ordering::Relaxed) != copy.replaced {
        return Err(DefragmentError::Replaced);
    }
    let newest = freeze(&place)?.view;
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
    // To close it cuts off what it grew by and doesn't need.
    drop(copy.file);
    let file = Arc::new(File::open(at.open_new(Open::Existing)?, shared.cache_bytes)?);
    let View { records, txn, .. } = freeze(&file)?.view;
    at.disk.rename(&at.dir.join(NEW), &at.path())?;
    at.disk.sync_dir(&at.dir).map_err(DefragmentError::Unsettled)?;
    let old = std::mem::replace(&mut *place, file.clone());
    let shown = shared.view();
    shared.show(View {
        records,
        txn,
        _file: file,
        cluster: shown.cluster.clone(),
        progress: shown.progress,
    });
    drop(place);
    // To close it may take a while, and nobody has to wait for that.
    drop(old);
    Ok(())
}

fn tables(file: &File) -> Result<BTreeSet<String>, StoreError> {
    let txn = file.db.begin_read()?;
    Ok(txn.list_tables()?.map(|table| table.name().to_owned()).collect())
}

fn begin(file: &File) -> Result<WriteTransaction, StoreError> {
    let mut txn = file.db.begin_write()?;
    txn.set_durability(Durability::Immediate)?;
    // Else the next start after a crash would read the whole file.
    txn.set_quick_repair(true);
    Ok(txn)
}

/// The records of `view` from the revision `from` on.
fn copy_records(view: &View, from: i64, to: &WriteTransaction) -> Result<(), StoreError> {
    let mut records = to.open_table(RECORDS)?;
    for row in view.records.range(Revision { main: from, sub: 0 }.to_row()..)? {
        let (at, record) = row?;
        records.insert(at.value(), record.value())?;
    }
    Ok(())
}

fn copy_table<K: Key + 'static, V: Value + 'static>(
    from: &File,
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
