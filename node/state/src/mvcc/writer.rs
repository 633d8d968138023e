//! The handle for writing: opens a store, applies batches, publishes views.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use node_consensus::Guards;
use redb::StorageBackend;

use super::batch::Batch;
use super::channels::{FollowedValue, Wake};
use super::compaction::CompactionCursor;
use super::error::StoreError;
use super::event::EventBatch;
use super::flush::{MAX_MEMTABLE_BYTES, MemoryState};
use super::hash::CompactionHashes;
use super::load::{DerivedState, LoadedStore, catch_panic, load, prepare};
use super::operation_counters::OperationCounters;
use super::store::{Store, StoreDatabase, StoreState};
use super::tables::{ClusterData, StoreProgress};
use super::watch::WatchOptions;
use crate::membership::Member;
use crate::state_machine::Position;

/// Selects when a compaction deletes the records that it makes unreachable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompactionMode {
    /// The records are deleted in steps by another task, which calls [`Store::compact_step`].
    /// Writes continue meanwhile.
    Background,
    /// The batch that contains the compaction deletes the records. This mode is for the simulation,
    /// which has one thread.
    Inline,
}

/// Settings for opening a store.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Bytes of file pages that may be kept in RAM.
    pub cache_bytes: usize,
    /// Selects when compactions delete records.
    pub compaction: CompactionMode,
    /// Maximum number of keys per step of a compaction.
    pub compacted_keys_per_step: usize,
    /// Limits on the memory of watches, and on the work that they do at a time.
    pub watch: WatchOptions,
    /// Initial members of a new store, the same on every member of the cluster. Ignored if the
    /// store exists, since its own member table may have changed since.
    pub members: Vec<Member>,
    /// Safety rules for changes of members: [`Guards::ALL`] except in tests.
    pub guards: Guards,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            cache_bytes: 16 * 1024 * 1024,
            compaction: CompactionMode::Background,
            compacted_keys_per_step: 1_000,
            watch: WatchOptions::default(),
            members: Vec::new(),
            guards: Guards::ALL,
        }
    }
}

/// The one handle that writes the store. It belongs to the code that applies the log.
pub struct StoreWriter {
    pub(crate) shared: Arc<StoreState>,
    pub(crate) compaction: CompactionMode,
}

impl StoreWriter {
    /// Opens the store on `backend`, or creates a new one there.
    ///
    /// The index is built from the records, which takes about a second per million of them.
    pub fn open(backend: impl StorageBackend, options: StoreOptions) -> Result<Self, StoreError> {
        let cache_bytes = options.cache_bytes;
        let file = Arc::new(catch_panic(|| StoreDatabase::open(backend, cache_bytes))?);
        let loaded = catch_panic(|| {
            prepare(&file.db, options.members)?;
            load(&file)
        });
        let loaded = match loaded {
            Ok(loaded) => loaded,
            Err(error) => {
                // The handle is leaked, because dropping it would write to the file. The file may
                // be damaged or of another format, and must not be changed.
                std::mem::forget(file);
                return Err(error);
            }
        };
        let LoadedStore { view, contents } = loaded;
        let DerivedState { index, leases, tombstones, record_bytes } = contents;
        let finished = view.file.finished_compaction()?;
        let (progress, cluster) = (view.progress, view.cluster.clone());
        let members = FollowedValue::new(cluster.members.clone());
        let alarms = FollowedValue::new(cluster.alarms.clone());
        let unfinished = progress.compact_revision > finished;
        let shared = StoreState {
            file: RwLock::new(file),
            memory: Mutex::new(MemoryState::new(progress, cluster)),
            flush_lock: Mutex::default(),
            deletion_lock: Mutex::default(),
            state_lock: Mutex::default(),
            replacement_count: AtomicU64::new(0),
            cache_bytes,
            index: RwLock::new(index),
            leases: RwLock::new(leases),
            tombstones: Mutex::new(tombstones),
            tokens: Mutex::default(),
            auth_enabled: AtomicBool::new(view.auth().is_enabled()),
            view: RwLock::new(Arc::new(view)),
            finished_compaction: FollowedValue::new(finished),
            cursor: Mutex::new(
                unfinished.then(|| CompactionCursor::new(progress.compact_revision)),
            ),
            compacted_keys_per_step: options.compacted_keys_per_step,
            guards: options.guards,
            hashes: CompactionHashes::default(),
            operations: OperationCounters::default(),
            compaction_requested: Wake::new(),
            members,
            alarms,
            record_bytes: AtomicI64::new(record_bytes),
        };
        let writer = Self { shared: Arc::new(shared), compaction: options.compaction };
        if writer.compaction == CompactionMode::Inline {
            writer.store().compact_all()?;
        }
        Ok(writer)
    }

    /// Returns a handle for reading.
    #[must_use]
    pub fn store(&self) -> Store {
        Store { shared: self.shared.clone() }
    }

    /// Returns the position of the last applied entry.
    #[must_use]
    pub fn applied(&self) -> Position {
        self.shared.lock_memory().newest.progress.applied
    }

    /// Returns the position of the last entry whose effects survive a crash.
    #[must_use]
    pub fn durable(&self) -> Position {
        self.shared.lock_memory().flushed.progress.applied
    }

    /// Runs `work`, whose changes belong to the log entries up to the position `applied`, and
    /// publishes the new view. Returns the result of `work` and the events that it caused. The
    /// changes are not durable until the next [`Store::flush`].
    ///
    /// After an error the writer must not be used again: its index may be ahead of the memtable.
    pub fn batch<R>(
        &mut self,
        applied: Position,
        work: impl FnOnce(&mut Batch<'_>) -> Result<R, StoreError>,
    ) -> Result<(R, EventBatch), StoreError> {
        let shared = self.shared.clone();
        if shared.lock_memory().tables.active.bytes() >= MAX_MEMTABLE_BYTES {
            self.store().flush()?;
        }
        let before = shared.view();
        let compacted = before.progress.compact_revision;
        let mut batch = Batch::new(&shared, before);
        let result = work(&mut batch)?;
        let done = batch.finish();
        let progress = StoreProgress { applied, ..done.progress };
        shared.lock_memory().append(progress, done.cluster, done.changes);
        if !done.tokens.is_empty() {
            let mut tokens = shared.tokens.lock().expect("nothing panics under this lock");
            done.tokens.into_iter().for_each(|news| news.apply_to(&mut tokens));
        }
        let file = shared.file();
        if progress.compact_revision > compacted {
            let cursor = CompactionCursor::new(progress.compact_revision);
            // As in etcd, the checksum is kept only if the previous compaction has finished.
            // Otherwise the checksum would include records that the previous compaction has yet to
            // delete.
            let is_whole = *shared.finished_compaction.borrow() == compacted;
            shared.request_compaction(if is_whole {
                cursor.after_finished(compacted)
            } else {
                cursor
            });
            if self.compaction == CompactionMode::Inline {
                self.store().compact_in(&file)?;
            }
        }
        self.publish(&file)?;
        Ok((result, done.events))
    }

    /// Makes everything applied so far durable. Returns the last durable position.
    pub fn checkpoint(&mut self) -> Result<Position, StoreError> {
        self.store().flush()
    }

    /// Loads the in-memory state after a snapshot has replaced the contents of the file. The caller
    /// holds the lock of flushes.
    pub(crate) fn replace(
        &mut self,
        file: &Arc<StoreDatabase>,
        progress: StoreProgress,
        cluster: ClusterData,
    ) -> Result<(), StoreError> {
        self.shared.replacement_count.fetch_add(1, Ordering::Relaxed);
        // The snapshot contains records that the sender's compaction had not deleted yet. So this
        // store begins that compaction again, even if it had finished the same compaction before.
        self.shared.finished_compaction.send_replace(StoreProgress::START.compact_revision);
        let LoadedStore { contents, .. } = load(file)?;
        let DerivedState { index, leases, tombstones, record_bytes } = contents;
        self.shared.lock_memory().replace(progress, cluster);
        *self.shared.lock_tombstones() = tombstones;
        *self.shared.index.write().expect("the writer is the only one to write") = index;
        *self.shared.leases.write().expect("nothing panics while it holds this lock") = leases;
        // All tokens are dropped, because the snapshot skips entries that would have revoked some
        // of them.
        self.shared.tokens.lock().expect("nothing panics under this lock").clear();
        self.shared.record_bytes.store(record_bytes, Ordering::Relaxed);
        self.shared.hashes.clear();
        self.shared.request_compaction(CompactionCursor::new(progress.compact_revision));
        if self.compaction == CompactionMode::Inline {
            self.store().compact_in(file)?;
        }
        self.publish(file)
    }

    fn publish(&self, file: &Arc<StoreDatabase>) -> Result<(), StoreError> {
        self.shared.publish_view(file)?;
        let cluster = self.shared.lock_memory().newest.cluster.clone();
        self.shared.members.send_if_modified(|known| {
            let changed = !Arc::ptr_eq(known, &cluster.members);
            if changed {
                *known = cluster.members.clone();
            }
            changed
        });
        self.shared.alarms.send_if_modified(|known| {
            let changed = *known != cluster.alarms;
            if changed {
                known.clone_from(&cluster.alarms);
            }
            changed
        });
        Ok(())
    }
}
