//! Checksum of the key space. Members compare their checksums to find a member whose data is
//! corrupt.
//!
//! Meaning and hashed bytes are etcd's (server/storage/mvcc/hash.go). The checksum is a CRC-32C
//! over:
//!
//! - the bucket's name;
//! - the key and value, as etcd stores them, of each record up to the revision.
//!
//! At or below the compaction revision, only the changes still in force count. It doesn't matter
//! whether the other records are already deleted from the file.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard};

use super::error::ReadError;
use super::event::{decode, is_tombstone};
use super::range::lock_index;
use super::record_rows::{Rows, first_row_after};
use super::revision::EtcdKey;
use super::rows::records;
use super::store::{Store, View};

/// Hash of the key space, as `HashKV` reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyValueHash {
    /// CRC-32C of the keys and values of the records, as etcd stores them.
    pub hash: u32,
    /// Compaction revision that the checksum takes into account; -1 if there was no compaction. Of
    /// the changes up to this revision, only those still in force are hashed.
    pub compact_revision: i64,
    /// Highest revision whose records are hashed.
    pub revision: i64,
}

/// Maximum number of compactions whose checksum is kept, as in etcd.
const MAX_COMPACTION_HASHES: usize = 10;

/// Checksums of the store at the revisions of the last compactions, each computed when the
/// compaction began. Members compare them to check that they compacted the same data. As in etcd,
/// the checksums are lost when the process ends.
#[derive(Debug, Default)]
pub(crate) struct CompactionHashes(Mutex<VecDeque<KeyValueHash>>);

impl CompactionHashes {
    fn lock(&self) -> MutexGuard<'_, VecDeque<KeyValueHash>> {
        self.0.lock().expect("nothing panics under this lock")
    }

    pub(crate) fn keep(&self, hash: KeyValueHash) {
        let mut kept = self.lock();
        if kept.len() == MAX_COMPACTION_HASHES {
            kept.pop_front();
        }
        kept.push_back(hash);
    }

    fn get(&self, revision: i64) -> Option<KeyValueHash> {
        self.lock().iter().find(|hash| hash.revision == revision).copied()
    }

    fn all(&self) -> Vec<KeyValueHash> {
        self.lock().iter().copied().collect()
    }

    /// Drops all checksums, because the store was replaced.
    pub(crate) fn clear(&self) {
        self.lock().clear();
    }
}

/// Name of etcd's bucket of records. The checksum begins with it.
const BUCKET: &[u8] = b"key";

impl Store {
    /// Hashes the key space of `view` as of `revision`; 0 means the view's own revision. If
    /// `revision` is that of a recent compaction, returns the checksum from before its deletions.
    /// This reads every record, so call it where blocking is allowed.
    pub fn hash_kv(&self, view: &View, revision: i64) -> Result<KeyValueHash, ReadError> {
        if let Some(kept) = self.shared.hashes.get(revision) {
            return Ok(kept);
        }
        self.hash_view(view, revision)
    }

    /// Hashes the key space as [`Self::hash_kv`] does, for a comparison with other members. Members
    /// can be compared only if `revision` and the view's compaction revision determine the
    /// checksum.
    ///
    /// The two revisions determine it if the compaction at the view's compaction revision is
    /// finished, and no other one has begun. A finished compaction leaves at most one change of
    /// each key up to its revision, and all later changes. Earlier compactions make no difference.
    /// During a compaction, the revisions do not determine the checksum. If a key was deleted and
    /// created again in one revision, the checksum depends on which records are already deleted. So
    /// this function returns [`ReadError::Superseded`] during a compaction.
    pub fn hash_for_comparison(
        &self,
        view: &View,
        revision: i64,
    ) -> Result<KeyValueHash, ReadError> {
        let shared = &self.shared;
        let replaced = shared.replacement_count.load(Ordering::Relaxed);
        let compacted = view.compact_revision();
        if *shared.finished_compaction.borrow() != compacted {
            return Err(ReadError::Superseded);
        }
        let hash = self.hash_view(view, revision)?;
        let is_same_compaction = lock_index(&shared.index).compact_revision() == compacted;
        if !is_same_compaction || shared.replacement_count.load(Ordering::Relaxed) != replaced {
            return Err(ReadError::Superseded);
        }
        Ok(hash)
    }

    /// Returns the checksums kept for the last compactions, oldest first.
    #[must_use]
    pub fn compaction_hashes(&self) -> Vec<KeyValueHash> {
        self.shared.hashes.all()
    }

    fn hash_view(&self, view: &View, revision: i64) -> Result<KeyValueHash, ReadError> {
        let compacted = view.compact_revision();
        if revision > 0 && revision < compacted {
            return Err(ReadError::Compacted);
        }
        if revision > view.revision() {
            return Err(ReadError::Future);
        }
        // A negative revision selects no records.
        let upto = if revision == 0 { view.revision() } else { revision };
        let last = upto.max(-1);
        let nothing = lock_index(&self.shared.index).counts_nothing(last);
        let rows = view.rows(0..first_row_after(last))?;
        let hash = self.hash_upto(rows, last, compacted, nothing)?;
        Ok(KeyValueHash { revision: upto, ..hash })
    }

    /// Hashes the records of `rows`, which are those up to `upto`. Of the records at or below
    /// `compacted`, only those of changes in force at `upto` count.
    ///
    /// `nothing` must be true if no change is in force at `upto`. Then the changes in force at
    /// `compacted` count instead. etcd does this too: it treats an empty list of revisions to keep
    /// like a missing list.
    pub(crate) fn hash_upto(
        &self,
        rows: Rows,
        upto: i64,
        compacted: i64,
        nothing: bool,
    ) -> Result<KeyValueHash, ReadError> {
        let in_force = if nothing { compacted } else { upto };
        let mut hash = crc32c::crc32c(BUCKET);
        for row in rows {
            let (first, row) = row?;
            for record in records(first, &row) {
                let (at, record) = record?;
                let kv = decode(record)?;
                let dead = is_tombstone(&kv);
                if at.main <= compacted {
                    let index = lock_index(&self.shared.index);
                    if index.compact_revision() > upto {
                        return Err(ReadError::Superseded);
                    }
                    if index.counted_change(&kv.key, in_force) != Some(at) {
                        continue;
                    }
                }
                hash = crc32c::crc32c_append(hash, EtcdKey::new(at, dead).bytes());
                hash = crc32c::crc32c_append(hash, record);
            }
        }
        Ok(KeyValueHash { hash, compact_revision: compacted, revision: upto })
    }
}
