//! A checksum of the key space that members compare to find a copy that went wrong.
//!
//! The meaning, and the bytes that are hashed, are etcd's (server/storage/mvcc/hash.go): CRC-32C
//! over the bucket's name, then for each record up to the revision its key and value as etcd
//! stores them; of what a compaction has passed, only what is still in force counts, whether or
//! not the rest is already gone from the file.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard};

use redb::ReadableTable;

use super::error::ReadError;
use super::event::{decode, is_tombstone};
use super::range::read;
use super::revision::{EtcdKey, Revision};
use super::rows::records;
use super::store::{Store, View};

/// The answer to `HashKV`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyValueHash {
    /// CRC-32C.
    pub hash: u32,
    /// The compaction that it takes into account; -1: none.
    pub compact_revision: i64,
    /// The revision up to which records count.
    pub revision: i64,
}

/// Checksums of compactions that are kept, as in etcd.
const MAX_KEPT: usize = 10;

/// The checksums as they were when the last compactions began: what members compare to find out
/// whether they compacted the same. Gone with the process, as in etcd.
#[derive(Debug, Default)]
pub(crate) struct Kept(Mutex<VecDeque<KeyValueHash>>);

impl Kept {
    fn lock(&self) -> MutexGuard<'_, VecDeque<KeyValueHash>> {
        self.0.lock().expect("nothing panics under this lock")
    }

    pub(crate) fn keep(&self, hash: KeyValueHash) {
        let mut kept = self.lock();
        if kept.len() == MAX_KEPT {
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

    /// The store was replaced.
    pub(crate) fn clear(&self) {
        self.lock().clear();
    }
}

/// etcd hashes the name of its bucket first.
const BUCKET: &[u8] = b"key";

impl Store {
    /// Hashes the key space of `view` as of `revision` (0: the view's own; one that a recent
    /// compaction was of: as it was before that). Reads every record: call it where it may block.
    pub fn hash_kv(&self, view: &View, revision: i64) -> Result<KeyValueHash, ReadError> {
        if let Some(kept) = self.shared.hashes.get(revision) {
            return Ok(kept);
        }
        self.hash_view(view, revision)
    }

    /// The same for a comparison with other members, for which `revision` and the view's compaction must
    /// say it all. They do while that compaction is done as a whole and no other has begun: it leaves at most
    /// one change of each key up to its revision, whatever was compacted before, and all that came after.
    /// While it is under way they don't: where a key was deleted and made again in one revision, what is
    /// taken away decides what counts.
    pub fn hash_undisturbed(&self, view: &View, revision: i64) -> Result<KeyValueHash, ReadError> {
        let shared = &self.shared;
        let replaced = shared.replaced.load(Ordering::Relaxed);
        let compacted = view.compacted();
        if *shared.compacted.borrow() != compacted {
            return Err(ReadError::Superseded);
        }
        let hash = self.hash_view(view, revision)?;
        let is_same_compaction = read(&shared.index).compacted() == compacted;
        if !is_same_compaction || shared.replaced.load(Ordering::Relaxed) != replaced {
            return Err(ReadError::Superseded);
        }
        Ok(hash)
    }

    /// What the last compactions met, oldest first.
    #[must_use]
    pub fn kept_hashes(&self) -> Vec<KeyValueHash> {
        self.shared.hashes.all()
    }

    fn hash_view(&self, view: &View, revision: i64) -> Result<KeyValueHash, ReadError> {
        let compacted = view.compacted();
        if revision > 0 && revision < compacted {
            return Err(ReadError::Compacted);
        }
        if revision > view.revision() {
            return Err(ReadError::Future);
        }
        // Nothing was there at a negative revision.
        let upto = if revision == 0 { view.revision() } else { revision };
        let last = upto.max(-1);
        let nothing = read(&self.shared.index).counts_nothing(last);
        let hash = self.hash_upto(&view.records, last, compacted, nothing)?;
        Ok(KeyValueHash { revision: upto, ..hash })
    }

    /// Hashes the records up to `upto`; of those up to `compacted`, what is in force at `upto`. If
    /// what is to be kept is `nothing`, what the compaction left, as in etcd: it takes an empty list
    /// for none.
    pub(crate) fn hash_upto(
        &self,
        rows: &impl ReadableTable<u128, &'static [u8]>,
        upto: i64,
        compacted: i64,
        nothing: bool,
    ) -> Result<KeyValueHash, ReadError> {
        let end = Revision { main: upto + 1, sub: 0 }.to_row();
        let in_force = if nothing { compacted } else { upto };
        let mut hash = crc32c::crc32c(BUCKET);
        for row in rows.range(..end).map_err(ReadError::from)? {
            let (first, row) = row.map_err(ReadError::from)?;
            for record in records(first.value(), row.value()) {
                let (at, record) = record?;
                let kv = decode(record)?;
                let dead = is_tombstone(&kv);
                if at.main <= compacted {
                    let index = read(&self.shared.index);
                    if index.compacted() > upto {
                        return Err(ReadError::Superseded);
                    }
                    if index.counted(&kv.key, in_force) != Some(at) {
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
