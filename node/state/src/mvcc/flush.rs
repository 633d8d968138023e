//! Flushing: writes the memtables to the store's file.
//!
//! A flush writes everything that all batches so far have changed, together with the log position
//! that they reached, in one durable transaction. After a crash, the file is as the last flush left
//! it, and the log has all later entries. Any thread may flush; batches and reads continue
//! meanwhile.

use std::sync::Arc;

use redb::{Durability, WriteTransaction};

use super::error::StoreError;
use super::memtable::{MemoryChanges, Memtable, Memtables};
use super::store::{Store, StoreDatabase};
use super::tables::{
    ClusterData, LEASES, META, RECORDS, StoreProgress, encode_lease, write_auth, write_cluster,
    write_progress,
};
use crate::state_machine::Position;

/// Size of the active memtable from which a batch waits for a flush. Flushes begin much earlier.
/// The limit bounds the memory of a store whose disk is slower than its writers: the active and the
/// frozen memtable each have at most this size, and the changes of one batch in addition.
pub(super) const MAX_MEMTABLE_BYTES: usize = 32 * 1024 * 1024;

/// The replicated state after a batch, except for records and leases.
#[derive(Clone, Debug)]
pub(super) struct BatchEnd {
    /// Number of the batch: 1 for the first one after the store was opened.
    pub(super) batch: u64,
    pub(super) progress: StoreProgress,
    pub(super) cluster: Arc<ClusterData>,
}

/// The memtables, with the state that belongs to them.
#[derive(Debug)]
pub(crate) struct MemoryState {
    pub(super) tables: Memtables,
    /// State after the newest batch.
    pub(super) newest: BatchEnd,
    /// State that the file contains.
    pub(super) flushed: BatchEnd,
    /// State that the flush in progress writes, if there is one. It is the end of the frozen
    /// memtable.
    flushing: Option<BatchEnd>,
    /// Whether the file has changed since the newest view opened it.
    pub(super) is_file_changed: bool,
}

impl MemoryState {
    /// Makes the state of a store whose contents are all in its file.
    pub(super) fn new(progress: StoreProgress, cluster: Arc<ClusterData>) -> Self {
        let newest = BatchEnd { batch: 0, progress, cluster };
        Self {
            tables: Memtables::default(),
            flushed: newest.clone(),
            newest,
            flushing: None,
            is_file_changed: false,
        }
    }

    /// Appends the changes of a batch. `cluster` is `None` if the batch didn't change it.
    pub(super) fn append(
        &mut self,
        progress: StoreProgress,
        cluster: Option<ClusterData>,
        changes: MemoryChanges,
    ) {
        self.newest.batch += 1;
        self.newest.progress = progress;
        if let Some(cluster) = cluster {
            self.newest.cluster = Arc::new(cluster);
        }
        self.tables.active.append(self.newest.batch, changes);
    }

    /// Replaces all state, after a snapshot has replaced the contents of the file. A flush that was
    /// interrupted by an error must not continue then, so its memtable is dropped.
    pub(super) fn replace(&mut self, progress: StoreProgress, cluster: ClusterData) {
        let batch = self.newest.batch + 1;
        self.newest = BatchEnd { batch, progress, cluster: Arc::new(cluster) };
        self.flushed = self.newest.clone();
        self.flushing = None;
        self.tables = Memtables::default();
        self.is_file_changed = true;
    }

    /// Freezes the active memtable for a flush. Returns it and the state at its end; `None` if the
    /// file contains everything already.
    pub(super) fn freeze(&mut self) -> Option<(Arc<Memtable>, BatchEnd)> {
        if self.flushing.is_none() {
            if self.flushed.batch == self.newest.batch {
                return None;
            }
            self.tables.frozen = Some(std::mem::take(&mut self.tables.active));
            self.flushing = Some(self.newest.clone());
        }
        self.tables.frozen.clone().zip(self.flushing.clone())
    }

    /// Drops the frozen memtable, whose contents are now in the file.
    fn end_flush(&mut self, end: BatchEnd) {
        self.tables.frozen = None;
        self.flushing = None;
        self.flushed = end;
        self.is_file_changed = true;
    }
}

impl Store {
    /// Makes everything durable that all batches so far have changed. Returns the log position that
    /// they reached. Call it where blocking is allowed.
    ///
    /// After an error the store must not be used again.
    pub fn flush(&self) -> Result<Position, StoreError> {
        self.flush_to(&self.shared.file())
    }

    /// Flushes to `file`, for a caller that holds the store's file lock.
    pub(super) fn flush_to(&self, file: &Arc<StoreDatabase>) -> Result<Position, StoreError> {
        let shared = &self.shared;
        let _alone = shared.flush_lock.lock().expect("a panic under it stops the process");
        let (frozen, flushed) = {
            let mut memory = shared.lock_memory();
            (memory.freeze(), memory.flushed.clone())
        };
        let Some((table, end)) = frozen else { return Ok(flushed.progress.applied) };
        let mut txn = file.db.begin_write()?;
        txn.set_durability(Durability::Immediate)?;
        // After a crash, redb reads the whole file at the next start, unless the last durable
        // commit had quick repair enabled.
        txn.set_quick_repair(true);
        write_memtable(&table, &txn)?;
        write_progress(&mut txn.open_table(META)?, end.progress)?;
        if !Arc::ptr_eq(&end.cluster, &flushed.cluster) {
            write_cluster(&txn, &end.cluster)?;
            if !Arc::ptr_eq(&end.cluster.auth, &flushed.cluster.auth) {
                write_auth(&txn, &end.cluster.auth)?;
            }
        }
        txn.commit()?;
        let position = end.progress.applied;
        shared.lock_memory().end_flush(end);
        // Without a new view, the frozen memtable would stay in memory until the next batch.
        shared.publish_view(file)?;
        Ok(position)
    }
}

/// Maximum number of rows that a flush copies from its memtable at a time.
const ROWS_PER_STEP: usize = 1_024;

fn write_memtable(table: &Memtable, txn: &WriteTransaction) -> Result<(), StoreError> {
    let mut records = txn.open_table(RECORDS)?;
    let (mut next, mut rows) = (0, Vec::new());
    loop {
        table.first_between(next, u128::MAX, ROWS_PER_STEP, &mut rows);
        let Some((last, _)) = rows.last() else { break };
        next = last + 1;
        for (number, row) in rows.drain(..) {
            records.insert(number, &row[..])?;
        }
    }
    let mut changed = std::collections::BTreeMap::new();
    table.lease_changes(0, u64::MAX, |id, lease| {
        changed.insert(id, lease);
    });
    if changed.is_empty() {
        return Ok(());
    }
    let mut leases = txn.open_table(LEASES)?;
    for (id, lease) in changed {
        match lease {
            Some(lease) => drop(leases.insert(id, &encode_lease(lease)[..])?),
            None => drop(leases.remove(id)?),
        }
    }
    Ok(())
}
