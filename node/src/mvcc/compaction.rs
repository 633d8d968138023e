//! Taking away what a compaction has made unreachable, a bounded number of keys at a time.
//!
//! The request itself only moves the border (see [`super::Batch::compact`]). The work goes along
//! the key index: a step compacts some keys' histories and deletes the records that they drop. It
//! is safe to stop anywhere: a store that is opened with the work unfinished begins again at the
//! first key, and finds only what is still there.

use std::sync::atomic::Ordering;

use redb::Durability;

use super::error::StoreError;
use super::index::Walk;
use super::store::{Store, weight};
use super::tables::{META, RECORDS, write_compacted};

/// Keys per hold of the index lock, and so per step.
const KEYS_PER_STEP: usize = 1_000;

/// How far a compaction has come.
#[derive(Debug)]
pub(crate) struct Cursor {
    revision: i64,
    after: Option<Box<[u8]>>,
}

impl Cursor {
    pub(crate) fn new(revision: i64) -> Self {
        Self { revision, after: None }
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
        let shared = &self.shared;
        let Some(cursor) = shared.lock_cursor().take() else {
            return Ok(CompactionProgress::Idle);
        };
        // The transaction comes first: whoever opens a batch meanwhile waits for it, so that
        // index and records change together.
        let mut txn = shared.db.begin_write()?;
        txn.set_durability(Durability::None)?;
        let mut dropped = Vec::new();
        let walk = {
            let mut index =
                shared.index.write().expect("a writer that panicked has stopped the process");
            index.compact(cursor.after.as_deref(), cursor.revision, KEYS_PER_STEP, &mut dropped)
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
            next.get_or_insert(Cursor { revision: cursor.revision, after: Some(last) });
        }
        let more = next.is_some();
        drop(next);
        if finished {
            shared.compacted.send_replace(cursor.revision);
        }
        Ok(if more { CompactionProgress::More } else { CompactionProgress::Idle })
    }

    /// Finishes the compaction that is under way.
    pub fn compact_all(&self) -> Result<(), StoreError> {
        while self.compact_step()? == CompactionProgress::More {}
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
