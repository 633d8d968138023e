//! Loading of a store's file when it is opened: checks tables and format, and builds the state that
//! is kept in RAM.

use std::collections::BTreeSet;
use std::sync::Arc;

use redb::Database;

use super::error::StoreError;
use super::event::decode;
use super::index::Index;
use super::rows::{is_tombstone_row, records, weight};
use super::store::{StoreDatabase, View, view_file};
use super::tables::{
    self, ALARMS, ClusterData, FORMAT, LEASES, MEMBERS, META, RECORDS, REMOVED, ROLES,
    StoreProgress, UPGRADABLE_FORMATS, USERS, read_format, write_cluster, write_format,
    write_progress,
};
use crate::lease::LeaseTable;
use crate::membership::{Member, MemberTable};

/// Contents of a file after it was read as a whole.
pub(super) struct LoadedStore {
    pub(super) view: View,
    pub(super) contents: DerivedState,
}

/// Data derived from the records and leases, to be kept in RAM.
pub(super) struct DerivedState {
    pub(super) index: Index,
    pub(super) leases: LeaseTable,
    pub(super) tombstones: BTreeSet<u128>,
    pub(super) record_bytes: i64,
}

pub(super) fn load(file: &Arc<StoreDatabase>) -> Result<LoadedStore, StoreError> {
    let view = view_file(file)?;
    let contents = index(&view)?;
    Ok(LoadedStore { view, contents })
}

/// Runs `work`, which reads a file that may be damaged. redb panics if some of what it reads is
/// wrong. Nothing else uses the file yet, so such a panic is reported as damage.
pub(super) fn catch_panic<T>(
    work: impl FnOnce() -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    caught.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(StoreError::Corrupt(text.unwrap_or("it cannot be read").to_owned()))
    })
}

/// Creates the tables of a new file, upgrades an older format, and refuses an unknown one.
pub(super) fn prepare(db: &Database, members: Vec<Member>) -> Result<(), StoreError> {
    let mut txn = db.begin_write()?;
    txn.set_quick_repair(true);
    let format = read_format(&txn.open_table(META)?)?;
    match format {
        Some(FORMAT) => {
            txn.abort()?;
            return Ok(());
        }
        Some(before) if UPGRADABLE_FORMATS.contains(&before) => {
            txn.open_table(LEASES)?;
            txn.open_table(USERS)?;
            txn.open_table(ROLES)?;
            write_format(&mut txn.open_table(META)?)?;
            txn.commit()?;
            return Ok(());
        }
        Some(found) => return Err(StoreError::Format { found, known: FORMAT }),
        None => {}
    }
    txn.open_table(RECORDS)?;
    txn.open_table(MEMBERS)?;
    txn.open_table(REMOVED)?;
    txn.open_table(ALARMS)?;
    txn.open_table(LEASES)?;
    txn.open_table(USERS)?;
    txn.open_table(ROLES)?;
    {
        let mut meta = txn.open_table(META)?;
        write_format(&mut meta)?;
        write_progress(&mut meta, StoreProgress::START)?;
        tables::write_finished_compaction(&mut meta, StoreProgress::START.compact_revision)?;
    }
    let members = Arc::new(MemberTable::new(members));
    let cluster = ClusterData { members, ..ClusterData::default() };
    write_cluster(&txn, &cluster)?;
    txn.commit()?;
    Ok(())
}

fn index(view: &View) -> Result<DerivedState, StoreError> {
    let (mut index, mut leases) =
        (Index::new(view.progress.compact_revision), LeaseTable::default());
    view.leases()?.into_iter().for_each(|lease| leases.restore(lease));
    let (mut tombstones, mut record_bytes) = (BTreeSet::new(), 0);
    for row in view.all_rows()? {
        let (first, row) = row?;
        for record in records(first, &row) {
            let (at, record) = record?;
            record_bytes += weight(record.len());
            let kv = decode(record)?;
            index.restore(&kv.key, at, kv.create_revision, kv.version);
            leases.attach(&kv.key, kv.lease);
        }
        if is_tombstone_row(&row) {
            tombstones.insert(first);
        }
    }
    Ok(DerivedState { index, leases, tombstones, record_bytes })
}
