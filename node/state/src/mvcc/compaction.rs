//! Deletion of the records that a compaction has made unreachable, a bounded number of keys at a
//! time.
//!
//! The compaction request itself only raises the compaction revision (see
//! [`super::Batch::compact`]). The deletion then walks the key index. Each step compacts the
//! histories of some keys and deletes the records that these histories drop. The last steps delete
//! the rows that hold several tombstones ([`super::rows`]).
//!
//! All records that a compaction deletes are in the file: its first step flushes the memtables,
//! unless a flush since the request has done so.
//!
//! The work may stop anywhere. A store that is opened with the work unfinished begins again at the
//! first key. The repeated deletion finds only the records that are still in the file.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use redb::{Durability, ReadableTable as _, Table};

use super::error::{ReadError, StoreError};
use super::event::decode;
use super::index::WalkOutcome;
use super::range::lock_index;
use super::record_rows::first_row_after;
use super::revision::Revision;
use super::rows::{TombstoneRow, is_tombstone_row, records, weight};
use super::store::{FileView, Store, StoreDatabase};
use super::tables::{META, RECORDS, write_finished_compaction};

type Rows<'txn> = Table<'txn, u128, &'static [u8]>;

/// Approximate number of tombstones in a row that holds several. The maximum number of such rows
/// per step is the maximum number of keys per step, divided by this number.
const TOMBSTONES_PER_ROW: usize = 64;

/// Next part of a compaction's work.
#[derive(Debug)]
enum CompactionStage {
    /// Compact the histories of the keys after this key; `None` stands for all keys.
    Keys(Option<Box<[u8]>>),
    /// Delete tombstones from the rows that hold several, beginning with this row.
    Tombstones(u128),
}

/// Progress of a compaction.
#[derive(Debug)]
pub(crate) struct CompactionCursor {
    revision: i64,
    stage: CompactionStage,
    /// Revision of the previous compaction, if it had finished when this compaction was requested.
    /// Only the first step of this compaction has it. Before that step deletes anything, it keeps
    /// the checksum of the store at this compaction's revision.
    previous: Option<i64>,
}

impl CompactionCursor {
    pub(crate) fn new(revision: i64) -> Self {
        Self { revision, stage: CompactionStage::Keys(None), previous: None }
    }

    pub(crate) fn after_finished(self, previous: i64) -> Self {
        Self { previous: Some(previous), ..self }
    }
}

/// Whether a compaction has work left after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompactionProgress {
    /// Work is left. The caller calls again, after a pause if other tasks should run.
    More,
    /// Nothing is left until the next compaction is requested.
    Idle,
}

impl Store {
    /// Runs one bounded step of the current compaction, if there is one. Blocks while the memtables
    /// are being flushed.
    pub fn compact_step(&self) -> Result<CompactionProgress, StoreError> {
        let _alone = self.shared.deletion_lock.lock().expect("a panic under it stops the process");
        let _same = self.shared.state_lock.lock().expect("a panic under it stops the process");
        self.compact_piece(&self.shared.file())
    }

    fn compact_piece(&self, file: &Arc<StoreDatabase>) -> Result<CompactionProgress, StoreError> {
        let shared = &self.shared;
        let Some(cursor) = shared.lock_cursor().take() else {
            return Ok(CompactionProgress::Idle);
        };
        let flushed = shared.lock_memory().flushed.progress;
        if flushed.compact_revision < cursor.revision {
            self.flush_to(file)?;
        }
        if let Some(previous) = cursor.previous {
            self.keep_hash(file, cursor.revision, previous)?;
        }
        let mut txn = file.db.begin_write()?;
        txn.set_durability(Durability::None)?;
        let (left, freed) = {
            let mut rows = txn.open_table(RECORDS)?;
            match &cursor.stage {
                CompactionStage::Keys(after) => {
                    self.compact_keys(&mut rows, cursor.revision, after.as_deref())?
                }
                CompactionStage::Tombstones(from) => {
                    self.compact_tombstones(&mut rows, cursor.revision, *from)?
                }
            }
        };
        let finished = left.is_none();
        if finished {
            write_finished_compaction(&mut txn.open_table(META)?, cursor.revision)?;
        }
        txn.commit()?;
        shared.record_bytes.fetch_sub(freed, Ordering::Relaxed);
        shared.lock_memory().is_file_changed = true;

        let mut next = shared.lock_cursor();
        if let Some(left) = left {
            // A newer compaction that was requested during this step starts from the first key.
            // Without one, the current compaction continues.
            next.get_or_insert(CompactionCursor {
                stage: left,
                ..CompactionCursor::new(cursor.revision)
            });
        }
        let more = next.is_some();
        drop(next);
        if finished {
            // The file can reuse the pages of deleted records once no view contains them.
            shared.publish_view(file)?;
            shared.finished_compaction.send_replace(cursor.revision);
        }
        Ok(if more { CompactionProgress::More } else { CompactionProgress::Idle })
    }

    /// Compacts the histories of some keys, and deletes the dropped records that have a row of
    /// their own. Returns the next stage of the work and the number of freed bytes.
    fn compact_keys(
        &self,
        rows: &mut Rows<'_>,
        revision: i64,
        after: Option<&[u8]>,
    ) -> Result<(Option<CompactionStage>, i64), StoreError> {
        let shared = &self.shared;
        let mut dropped = Vec::new();
        let walk = {
            let mut index =
                shared.index.write().expect("a writer that panicked has stopped the process");
            index.compact(after, revision, shared.compacted_keys_per_step, &mut dropped)
        };
        shared.operations.compacted_revisions.fetch_add(dropped.len() as u64, Ordering::Relaxed);
        let mut freed = 0;
        let together = shared.lock_tombstones();
        for row in dropped.into_iter().map(Revision::to_row) {
            if together.contains(&row) {
                continue;
            }
            if let Some(record) = rows.remove(row)? {
                freed += weight(record.value().len());
            }
        }
        let next = match walk {
            WalkOutcome::Paused(last) => Some(CompactionStage::Keys(Some(last))),
            WalkOutcome::Done if together.range(..first_row_after(revision)).next().is_none() => {
                None
            }
            WalkOutcome::Done => Some(CompactionStage::Tombstones(0)),
        };
        Ok((next, freed))
    }

    /// Deletes tombstones from some rows that hold several, beginning with the row `from`. To be
    /// called once all keys are compacted. Tombstones below `revision` are all deleted. Tombstones
    /// at `revision` stay if the index still has them.
    fn compact_tombstones(
        &self,
        rows: &mut Rows<'_>,
        revision: i64,
        from: u128,
    ) -> Result<(Option<CompactionStage>, i64), StoreError> {
        let shared = &self.shared;
        let end = first_row_after(revision);
        let at_most = shared.compacted_keys_per_step.div_ceil(TOMBSTONES_PER_ROW);
        let some: Vec<u128> =
            shared.lock_tombstones().range(from..end).take(at_most).copied().collect();
        let mut freed = 0;
        for &row in &some {
            let Some(before) = rows.get(row)?.map(|row| row.value().to_vec()) else { continue };
            let mut stay = TombstoneRow::default();
            let index = lock_index(&shared.index);
            for record in records(row, &before) {
                let (at, record) = record?;
                freed += weight(record.len());
                if at.main == revision {
                    let key = decode(record)?.key;
                    if index.has(&key, at) {
                        stay.push(at, &key);
                    }
                }
            }
            drop(index);
            rows.remove(row)?;
            let mut together = shared.lock_tombstones();
            together.remove(&row);
            if let Some((row, bytes)) = stay.row() {
                rows.insert(row, bytes)?;
                freed -= stay.weight();
                if is_tombstone_row(bytes) {
                    together.insert(row);
                }
            }
        }
        let is_more = some.len() == at_most;
        let next =
            some.last().filter(|_| is_more).map(|last| CompactionStage::Tombstones(last + 1));
        Ok((next, freed))
    }

    /// Computes and keeps the checksum of the store at the revision of a compaction. The compaction
    /// must not have deleted anything yet.
    fn keep_hash(
        &self,
        file: &Arc<StoreDatabase>,
        revision: i64,
        previous: i64,
    ) -> Result<(), StoreError> {
        let rows = FileView::open(file, 0)?.rows(0..first_row_after(revision))?;
        let nothing = lock_index(&self.shared.index).compacts_to_nothing(revision);
        match self.hash_upto(rows, revision, previous, nothing) {
            Ok(hash) => self.shared.hashes.keep(hash),
            Err(ReadError::Store(error)) => return Err(error),
            // A newer compaction was requested and will do the work of this one as well. So no
            // checksum is kept for this one.
            Err(ReadError::Compacted | ReadError::Superseded | ReadError::Future) => {}
        }
        Ok(())
    }

    /// Runs the current compaction to its end.
    pub fn compact_all(&self) -> Result<(), StoreError> {
        while self.compact_step()? == CompactionProgress::More {}
        Ok(())
    }

    /// Runs the current compaction to its end on `file`, for a caller that holds the store's file
    /// lock.
    pub(crate) fn compact_in(&self, file: &Arc<StoreDatabase>) -> Result<(), StoreError> {
        while self.compact_piece(file)? == CompactionProgress::More {}
        Ok(())
    }

    /// Waits until a compaction was requested since the last call. Only one task may wait at a
    /// time.
    pub async fn wait_for_compaction_request(&self) {
        self.shared.compaction_requested.notified().await;
    }

    /// Returns the number of records in the store, unreachable ones included.
    #[cfg(test)]
    pub(crate) fn stored_revisions(&self) -> Result<u64, StoreError> {
        let mut count = 0;
        for row in self.view().all_rows()? {
            let (at, row) = row?;
            for record in records(at, &row) {
                record?;
                count += 1;
            }
        }
        Ok(count)
    }
}
