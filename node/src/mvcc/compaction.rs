//! Taking away what a compaction has made unreachable, a bounded number of keys at a time.
//!
//! The request itself only moves the border (see [`super::Batch::compact`]). The work goes along
//! the key index: a step compacts some keys' histories and deletes the records that they drop; the
//! last steps take away the rows in which tombstones lie together ([`super::rows`]). It is safe to
//! stop anywhere: a store that is opened with the work unfinished begins again at the
//! first key, and finds only what is still there.

use std::sync::atomic::Ordering;

use redb::{Durability, ReadableDatabase as _, ReadableTable as _, Table};

use super::error::{ReadError, StoreError};
use super::event::decode;
use super::index::Walk;
use super::range::read;
use super::revision::Revision;
use super::rows::{Tombstones, is_together, records, weight};
use super::store::{File, Store};
use super::tables::{META, RECORDS, write_compacted};

type Rows<'txn> = Table<'txn, u128, &'static [u8]>;

/// What a row of tombstones holds, roughly: so many are a key each in a step's measure.
const TOMBSTONES_PER_ROW: usize = 64;

/// What a compaction turns to next.
#[derive(Debug)]
enum Next {
    /// The keys after this one, or all.
    Keys(Option<Box<[u8]>>),
    /// Rows of many tombstones, from this one on.
    Tombstones(u128),
}

/// How far a compaction has come.
#[derive(Debug)]
pub(crate) struct Cursor {
    revision: i64,
    next: Next,
    /// The compaction before, if all of it is done: the checksum is to be kept.
    previous: Option<i64>,
}

/// The first row that a compaction at `revision` does not reach.
fn first_after(revision: i64) -> u128 {
    Revision { main: revision.saturating_add(1), sub: 0 }.to_row()
}

impl Cursor {
    pub(crate) fn new(revision: i64) -> Self {
        Self { revision, next: Next::Keys(None), previous: None }
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
        let (left, freed) = {
            let mut rows = txn.open_table(RECORDS)?;
            match &cursor.next {
                Next::Keys(after) => {
                    self.compact_keys(&mut rows, cursor.revision, after.as_deref())?
                }
                Next::Tombstones(from) => {
                    self.compact_tombstones(&mut rows, cursor.revision, *from)?
                }
            }
        };
        let finished = left.is_none();
        if finished {
            write_compacted(&mut txn.open_table(META)?, cursor.revision)?;
        }
        txn.commit()?;
        shared.record_bytes.fetch_sub(freed, Ordering::Relaxed);

        let mut next = shared.lock_cursor();
        if let Some(left) = left {
            // A newer compaction starts over; else go on here.
            next.get_or_insert(Cursor { next: left, ..Cursor::new(cursor.revision) });
        }
        let more = next.is_some();
        drop(next);
        if finished {
            shared.compacted.send_replace(cursor.revision);
        }
        Ok(if more { CompactionProgress::More } else { CompactionProgress::Idle })
    }

    /// Forgets changes of some keys, and takes away what lies in a row of its own. What is left to do,
    /// and the bytes that are free now.
    fn compact_keys(
        &self,
        rows: &mut Rows<'_>,
        revision: i64,
        after: Option<&[u8]>,
    ) -> Result<(Option<Next>, i64), StoreError> {
        let shared = &self.shared;
        let mut dropped = Vec::new();
        let walk = {
            let mut index =
                shared.index.write().expect("a writer that panicked has stopped the process");
            index.compact(after, revision, shared.compacted_keys_per_step, &mut dropped)
        };
        shared.operations.compacted.fetch_add(dropped.len() as u64, Ordering::Relaxed);
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
            Walk::Paused(last) => Some(Next::Keys(Some(last))),
            Walk::Done if together.range(..first_after(revision)).next().is_none() => None,
            Walk::Done => Some(Next::Tombstones(0)),
        };
        Ok((next, freed))
    }

    /// Once all keys are compacted: takes away some of the rows of tombstones from `from` on. None of a
    /// request before `revision` is needed any more; of the one at `revision` those stay that are in the index.
    fn compact_tombstones(
        &self,
        rows: &mut Rows<'_>,
        revision: i64,
        from: u128,
    ) -> Result<(Option<Next>, i64), StoreError> {
        let shared = &self.shared;
        let end = first_after(revision);
        let at_most = shared.compacted_keys_per_step.div_ceil(TOMBSTONES_PER_ROW);
        let some: Vec<u128> =
            shared.lock_tombstones().range(from..end).take(at_most).copied().collect();
        let mut freed = 0;
        for &row in &some {
            let Some(before) = rows.get(row)?.map(|row| row.value().to_vec()) else { continue };
            let mut stay = Tombstones::default();
            let index = read(&shared.index);
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
                if is_together(bytes) {
                    together.insert(row);
                }
            }
        }
        let is_more = some.len() == at_most;
        let next = some.last().filter(|_| is_more).map(|last| Next::Tombstones(last + 1));
        Ok((next, freed))
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
        let mut count = 0;
        for row in self.view().records.iter()? {
            let (at, row) = row?;
            for record in records(at.value(), row.value()) {
                record?;
                count += 1;
            }
        }
        Ok(count)
    }
}
