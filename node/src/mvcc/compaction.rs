//! Taking away what a compaction has made unreachable, a bounded number of keys at a time.
//!
//! The request itself only moves the border (see [`super::Batch::compact`]). The work goes along
//! the key index: a step compacts some keys' histories and deletes the records that they drop. It
//! is safe to stop anywhere: a store that is opened with the work unfinished begins again at the
//! first key, and finds only what is still there.

use std::sync::atomic::Ordering;

use redb::{Durability, ReadableDatabase as _};

use super::error::{ReadError, StoreError};
use super::index::Walk;
use super::range::read;
use super::store::{File, Store, weight};
use super::tables::{META, RECORDS, write_compacted};

/// How far a compaction has come.
#[derive(Debug)]
pub(crate) struct Cursor {
    revision: i64,
    after: Option<Box<[u8]>>,
    /// The compaction before, if all of it is done: the checksum is to be kept.
    previous: Option<i64>,
}

impl Cursor {
    pub(crate) fn new(revision: i64) -> Self {
        Self { revision, after: None, previous: None }
    }

    pub(crate) fn after_one_of(self, previous: i64) -> Self {
        Self { previous: Some(previous), ..self }
    }
}

/// What a step left to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompactionProgress {
    /// Call again, after a pause if others should get a turn.
    More,
    /// There is nothing to do until the next compaction is asked for.
    Idle,
}

impl Store {
    /// Does a bounded piece of the compaction that is under way, if any. Blocks while a batch is
    /// being written.
    pub fn compact_step(&self) -> Result<CompactionProgress, StoreError> {
        let _alone = self.shared.rows_stay.lock().expect("a panic under it stops the process");
        let _same = self.shared.one_state.lock().expect("a panic under it stops the process");
        self.compact_piece(&self.shared.file())
    }

    fn compact_piece(&self, file: &File) -> Result<CompactionProgress, StoreError> {
        let shared = &self.shared;
        let Some(cursor) = shared.lock_cursor().take() else {
            return Ok(CompactionProgress::Idle);
        };
        if let Some(previous) = cursor.previous {
            self.keep_hash(file, cursor.revision, previous)?;
        }
        // The transaction comes first: whoever opens a batch meanwhile waits for it, so that
        // index and records change together.
        let mut txn = file.db.begin_write()?;
        txn.set_durability(Durability::None)?;
        let mut dropped = Vec::new();
        let walk = {
            let mut index =
                shared.index.write().expect("a writer that panicked has stopped the process");
            let at_most = shared.compacted_keys_per_step;
            index.compact(cursor.after.as_deref(), cursor.revision, at_most, &mut dropped)
        };
        let mut freed = 0;
        {
            let mut records = txn.open_table(RECORDS)?;
            for at in &dropped {
                if let Some(record) = records.remove(at.to_row())? {
                    freed += weight(record.value().len());
                }
            }
        }
        let finished = matches!(walk, Walk::Done);
        if finished {
            write_compacted(&mut txn.open_table(META)?, cursor.revision)?;
        }
        txn.commit()?;
        shared.record_bytes.fetch_sub(freed, Ordering::Relaxed);

        let mut next = shared.lock_cursor();
        if let Walk::Paused(last) = walk {
            // A newer compaction starts over; else go on here.
            next.get_or_insert(Cursor { after: Some(last), ..Cursor::new(cursor.revision) });
        }
        let more = next.is_some();
        drop(next);
        if finished {
            shared.compacted.send_replace(cursor.revision);
        }
        Ok(if more { CompactionProgress::More } else { CompactionProgress::Idle })
    }

    /// Keeps the checksum as of a compaction that has not taken anything away yet.
    fn keep_hash(&self, file: &File, revision: i64, previous: i64) -> Result<(), StoreError> {
        // Not the newest view: that may not be there yet.
        let records = file.db.begin_read()?.open_table(RECORDS)?;
        let nothing = read(&self.shared.index).compacts_to_nothing(revision);
        match self.hash_upto(&records, revision, previous, nothing) {
            Ok(hash) => self.shared.hashes.keep(hash),
            Err(ReadError::Store(error)) => return Err(error),
            // A newer compaction has overtaken this one, and does its work as well.
            Err(ReadError::Compacted | ReadError::Superseded | ReadError::Future) => {}
        }
        Ok(())
    }

    /// Finishes the compaction that is under way.
    pub fn compact_all(&self) -> Result<(), StoreError> {
        while self.compact_step()? == CompactionProgress::More {}
        Ok(())
    }

    /// The same, for who writes to the file already.
    pub(crate) fn compact_in(&self, file: &File) -> Result<(), StoreError> {
        while self.compact_piece(file)? == CompactionProgress::More {}
        Ok(())
    }

    /// Returns once a compaction has been asked for since the last call. For one caller at a time.
    pub async fn compaction_wanted(&self) {
        self.shared.wanted.notified().await;
    }

    /// Records in the file, reachable or not.
    #[cfg(test)]
    pub(crate) fn stored_revisions(&self) -> Result<u64, StoreError> {
        use redb::ReadableTable as _;
        let mut count = 0;
        for row in self.view().records.iter()? {
            row?;
            count += 1;
        }
        Ok(count)
    }
}
