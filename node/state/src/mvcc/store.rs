//! An open store: the state that its users share, its views, and the handle for reading it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock, RwLockReadGuard};

use node_consensus::Guards;
use node_proto::etcdserverpb::{AlarmMember, RangeRequest, RangeResponse};
use node_proto::mvccpb::KeyValue;
use redb::{
    Database, ReadOnlyTable, ReadTransaction, ReadableDatabase as _, ReadableTable as _,
    StorageBackend,
};

use super::channels::{FollowedValue, ValueFollower, Wake};
use super::compaction::CompactionCursor;
use super::error::{ReadError, StoreError};
use super::flush::{BatchEnd, MemoryState};
use super::hash::CompactionHashes;
use super::index::Index;
use super::length_tracking::LengthTrackingBackend;
use super::memtable::Memtables;
use super::operation_counters::{OperationCounters, OperationCounts};
use super::range::{AnswerBudget, RangeRead, RangeStep, ReadSource, Scan};
use super::revision::Revision;
use super::rows::records;
use super::tables::{
    ClusterData, LEASES, META, RECORDS, StoreProgress, decode_lease, read_cluster,
    read_finished_compaction, read_progress,
};
use crate::auth::{AuthState, SimpleTokens};
use crate::lease::{Lease, LeaseCounters, LeaseTable};
use crate::membership::MemberTable;
use crate::state_machine::Position;

/// Size of a page of the store's file.
const PAGE_BYTES: u64 = 4096;

/// The store's file as one flush or compaction step left it.
pub(crate) struct FileView {
    pub(crate) records: ReadOnlyTable<u128, &'static [u8]>,
    pub(crate) txn: ReadTransaction,
    /// The database of this file, which stays open while a view of it exists. So the view remains
    /// readable after a defragmentation replaced the file.
    database: Arc<StoreDatabase>,
    /// Progress of the last flushed batch.
    pub(crate) progress: StoreProgress,
    /// Number of the last flushed batch, counted by this process.
    batch: u64,
}

/// The store as one applied batch left it: the file, and what the memtables have in addition. A
/// request must not keep a view for long. Meanwhile the file can't reuse the view's pages, and the
/// memtables stay in memory.
pub struct View {
    pub(crate) file: Arc<FileView>,
    pub(super) memtables: Memtables,
    pub(crate) cluster: Arc<ClusterData>,
    pub(crate) progress: StoreProgress,
    /// Number of the last batch of the view, counted by this process.
    batch: u64,
}

impl View {
    /// Returns all leases, ordered by ID.
    pub fn leases(&self) -> Result<Vec<Lease>, StoreError> {
        let mut leases = BTreeMap::new();
        for row in self.file.txn.open_table(LEASES)?.iter()? {
            let lease = decode_lease(row?.1.value()).map_err(StoreError::Corrupt)?;
            leases.insert(lease.id, lease);
        }
        for table in self.memtables.iter() {
            table.lease_changes(self.file.batch, self.batch, |id, lease| {
                match lease {
                    Some(lease) => leases.insert(id, lease),
                    None => leases.remove(&id),
                };
            });
        }
        Ok(leases.into_values().collect())
    }

    #[must_use]
    pub fn revision(&self) -> i64 {
        self.progress.revision
    }

    /// Returns the compaction revision, below which reads are refused; -1 before the first
    /// compaction.
    #[must_use]
    pub fn compact_revision(&self) -> i64 {
        self.progress.compact_revision
    }

    /// Returns the position of the last log entry applied to the view.
    #[must_use]
    pub fn applied(&self) -> Position {
        self.progress.applied
    }

    /// Returns the current and removed members of the cluster.
    #[must_use]
    pub fn members(&self) -> &MemberTable {
        &self.cluster.members
    }

    /// Returns the active alarms, ordered by member ID.
    #[must_use]
    pub fn alarms(&self) -> &[AlarmMember] {
        &self.cluster.alarms
    }

    /// Returns users, roles and whether authentication is enabled.
    #[must_use]
    pub fn auth(&self) -> &AuthState {
        &self.cluster.auth
    }
}

/// A view, together with the data outside it that an export of the store as a file needs.
pub struct FrozenView {
    pub view: Arc<View>,
    /// Last compaction whose old revisions are all deleted; -1 if there is none.
    pub finished_compaction: i64,
}

impl FrozenView {
    /// Passes each record, an encoded `KeyValue`, to `show`, in the order of revisions.
    pub fn records<E: From<StoreError>>(
        &self,
        mut show: impl FnMut(Revision, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        for row in self.view.all_rows()? {
            let (first, row) = row?;
            for record in records(first, &row) {
                let (at, record) = record?;
                show(at, record)?;
            }
        }
        Ok(())
    }
}

/// The store's file, opened as a redb database.
pub(crate) struct StoreDatabase {
    pub(crate) db: Database,
    bytes: Arc<AtomicU64>,
}

impl StoreDatabase {
    /// Opens the store in `backend`, or creates a new one there.
    pub(crate) fn open(
        backend: impl StorageBackend,
        cache_bytes: usize,
    ) -> Result<Self, StoreError> {
        let bytes = Arc::new(AtomicU64::new(0));
        let backend = LengthTrackingBackend::new(backend, bytes.clone())?;
        let builder = &mut Database::builder();
        let db = builder.set_cache_size(cache_bytes).create_with_backend(backend)?;
        Ok(Self { db, bytes })
    }
}

pub(crate) struct StoreState {
    /// The store's file. A flush, a step of a compaction, and the publication of a view hold the
    /// read lock. A defragmentation takes the write lock to replace the file.
    ///
    /// Threads that need several of this struct's locks take them in this order: `deletion_lock`,
    /// `state_lock`, `file`, `flush_lock`, `view`, `memory`.
    pub(crate) file: RwLock<Arc<StoreDatabase>>,
    /// Memtables, and how much of the state is in the file.
    pub(super) memory: Mutex<MemoryState>,
    /// Lock held by each flush, and while a snapshot replaces the store's contents.
    pub(super) flush_lock: Mutex<()>,
    /// Lock held by a defragmentation and by each step of a compaction, so that compaction deletes
    /// no records while they are copied.
    pub(crate) deletion_lock: Mutex<()>,
    /// Lock held by each step of a compaction, and while a snapshot replaces the store's contents.
    /// So a step never combines the records of the old contents with the index of the new ones.
    pub(crate) state_lock: Mutex<()>,
    /// Number of times that a snapshot replaced the whole state. The number rises before a reader
    /// can see anything of the new state.
    pub(crate) replacement_count: AtomicU64,
    pub(crate) cache_bytes: usize,
    pub(crate) index: RwLock<Index>,
    pub(crate) leases: RwLock<LeaseTable>,
    /// Row numbers of all rows that hold several tombstones.
    pub(crate) tombstones: Mutex<BTreeSet<u128>>,
    pub(crate) tokens: Mutex<SimpleTokens>,
    pub(super) view: RwLock<Arc<View>>,
    /// Whether authentication is enabled in the newest view. It is copied from the view, so that
    /// requests needn't lock the view.
    pub(super) auth_enabled: AtomicBool,
    /// Revision of the last compaction whose deletions are finished. Requests for a physical
    /// compaction wait for this value.
    pub(crate) finished_compaction: FollowedValue<i64>,
    pub(crate) cursor: Mutex<Option<CompactionCursor>>,
    pub(crate) compacted_keys_per_step: usize,
    pub(crate) guards: Guards,
    pub(crate) hashes: CompactionHashes,
    pub(crate) operations: OperationCounters,
    /// Signal that a compaction was requested.
    pub(crate) compaction_requested: Wake,
    /// Members of the newest view, for tasks that follow changes.
    pub(super) members: FollowedValue<Arc<MemberTable>>,
    /// Alarms of the newest view, for tasks that follow changes.
    pub(super) alarms: FollowedValue<Vec<AlarmMember>>,
    /// Size of all records in bytes.
    pub(crate) record_bytes: AtomicI64,
}

impl StoreState {
    pub(crate) fn view(&self) -> Arc<View> {
        self.view.read().expect("nothing panics while it holds this lock").clone()
    }

    pub(crate) fn file(&self) -> RwLockReadGuard<'_, Arc<StoreDatabase>> {
        self.file.read().expect("nothing panics while it replaces the file")
    }

    pub(super) fn lock_memory(&self) -> MutexGuard<'_, MemoryState> {
        self.memory.lock().expect("nothing panics while it changes the memtables")
    }

    /// Publishes a view of the newest batch. `file` is the store's file, whose lock the caller
    /// holds.
    pub(super) fn publish_view(&self, file: &Arc<StoreDatabase>) -> Result<(), StoreError> {
        let last = {
            // The newest state is read under this lock, so that an older view never replaces a
            // newer one.
            let mut slot = self.view.write().expect("nothing panics under this lock");
            let mut memory = self.lock_memory();
            let is_current = !memory.is_file_changed && Arc::ptr_eq(&slot.file.database, file);
            let file = match is_current {
                true => slot.file.clone(),
                false => Arc::new(FileView::open(file, memory.flushed.batch)?),
            };
            memory.is_file_changed = false;
            let BatchEnd { batch, progress, cluster } = memory.newest.clone();
            let memtables = memory.tables.clone();
            drop(memory);
            self.auth_enabled.store(cluster.auth.is_enabled(), Ordering::Release);
            let view = View { file, memtables, cluster, progress, batch };
            std::mem::replace(&mut *slot, Arc::new(view))
        };
        // The old view is dropped after the lock is released, because ending its read transaction
        // takes another lock.
        drop(last);
        Ok(())
    }

    pub(crate) fn request_compaction(&self, cursor: CompactionCursor) {
        *self.lock_cursor() = Some(cursor);
        self.compaction_requested.notify_one();
    }

    pub(crate) fn lock_cursor(&self) -> MutexGuard<'_, Option<CompactionCursor>> {
        self.cursor.lock().expect("a compaction that panicked has stopped the process")
    }

    pub(crate) fn lock_tombstones(&self) -> MutexGuard<'_, BTreeSet<u128>> {
        self.tombstones.lock().expect("nothing panics under this lock")
    }

    pub(crate) fn source<'a>(&'a self, view: &'a View) -> ReadSource<'a, View> {
        ReadSource {
            index: &self.index,
            records: view,
            revision: view.progress.revision,
            compact_revision: view.progress.compact_revision,
        }
    }
}

/// Handle for reading the store. It is cheap to clone.
#[derive(Clone)]
pub struct Store {
    pub(crate) shared: Arc<StoreState>,
}

impl Store {
    /// Returns the newest view.
    #[must_use]
    pub fn view(&self) -> Arc<View> {
        self.shared.view()
    }

    /// Returns the newest view, with the data outside it that an export of the store needs.
    pub fn freeze(&self) -> Result<FrozenView, StoreError> {
        let view = self.view();
        let finished_compaction = view.file.finished_compaction()?;
        Ok(FrozenView { view, finished_compaction })
    }

    /// Begins to read a range; call [`Self::step_range`] until it is done. On
    /// [`ReadError::Superseded`] take a new view.
    pub fn begin_range(&self, view: &View, request: &RangeRequest) -> Result<RangeRead, ReadError> {
        self.count_range();
        RangeRead::new(request, view.revision(), view.compact_revision())
    }

    /// Continues a range that [`Self::begin_range`] began on the same `view`.
    pub fn step_range(&self, view: &View, gather: &mut RangeRead) -> Result<RangeStep, ReadError> {
        gather.step(&self.shared.source(view))
    }

    /// Reads a whole range without a pause. Use it for short ranges, or where nothing else has to
    /// run.
    pub fn range(&self, view: &View, request: &RangeRequest) -> Result<RangeResponse, ReadError> {
        self.count_range();
        let mut anything = |_| true;
        let mut room = AnswerBudget::new(0, &mut anything);
        let response = self.shared.source(view).range(request, &mut room)?;
        Ok(response.expect("there is room for anything"))
    }

    fn count_range(&self) {
        self.shared.operations.add(OperationCounts { ranges: 1, ..OperationCounts::default() });
    }

    /// Returns the counters of the store's operations.
    #[must_use]
    pub fn operations(&self) -> &OperationCounters {
        &self.shared.operations
    }

    /// Runs one bounded step of `scan`: calls `look` for further keys with their values as of
    /// `view`, in key order. Returns true once no keys are left, or `look` has returned false. Only
    /// one value is in memory at a time. On [`ReadError::Superseded`] take a new view.
    pub fn scan(
        &self,
        view: &View,
        scan: &mut Scan,
        look: &mut dyn FnMut(&KeyValue) -> bool,
    ) -> Result<bool, ReadError> {
        self.shared.source(view).scan(scan, look)
    }

    /// Returns the current and removed members, in a channel that signals changes.
    #[must_use]
    pub fn members(&self) -> ValueFollower<Arc<MemberTable>> {
        self.shared.members.subscribe()
    }

    /// Returns the leases and their attached keys as of the last applied entry, which the newest
    /// view may not include yet. Don't hold the lock for long, because writes wait until it is
    /// released.
    #[must_use]
    pub fn leases(&self) -> &RwLock<LeaseTable> {
        &self.shared.leases
    }

    /// Whether authentication is enabled in the newest view.
    #[must_use]
    pub fn is_auth_enabled(&self) -> bool {
        self.shared.auth_enabled.load(Ordering::Acquire)
    }

    /// Returns the tokens issued by entries that this process has applied. Tokens are left out if
    /// the user was deleted or got another password since.
    #[must_use]
    pub fn tokens(&self) -> &Mutex<SimpleTokens> {
        &self.shared.tokens
    }

    /// Returns the numbers of granted and revoked leases.
    #[must_use]
    pub fn lease_counters(&self) -> LeaseCounters {
        self.shared.leases.read().expect("nothing panics while it holds this lock").counters()
    }

    /// Returns the active alarms, in a channel that signals changes.
    #[must_use]
    pub fn alarms(&self) -> ValueFollower<Vec<AlarmMember>> {
        self.shared.alarms.subscribe()
    }

    /// Returns the length of the store's file in bytes.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.shared.file().bytes.load(Ordering::Relaxed)
    }

    /// Returns the approximate number of bytes of the changes that no flush has begun to write.
    pub(crate) fn unflushed_bytes(&self) -> usize {
        self.shared.lock_memory().tables.active.bytes()
    }

    /// Returns the approximate number of bytes of the whole store: the length of its file, and the
    /// size of the memtables.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        let tables = self.shared.lock_memory().tables.clone();
        let memory: usize = tables.iter().map(|table| table.bytes()).sum();
        self.file_bytes().saturating_add(memory as u64)
    }

    /// Returns the size of all records in bytes: keys, values and metadata.
    #[must_use]
    pub fn record_bytes(&self) -> u64 {
        self.shared.record_bytes.load(Ordering::Relaxed).try_into().unwrap_or(0)
    }

    /// Returns [`Self::record_bytes`], but at least one page. JSON omits a size of 0, and clients
    /// would then take the size for unknown.
    #[must_use]
    pub fn bytes_in_use(&self) -> u64 {
        self.record_bytes().max(PAGE_BYTES)
    }

    /// Returns the number of keys in the index, including deleted ones that are not compacted yet.
    #[must_use]
    pub fn indexed_keys(&self) -> usize {
        super::range::lock_index(&self.shared.index).len()
    }

    /// Returns the last compaction whose old revisions are all deleted, in a channel that signals
    /// changes.
    #[must_use]
    pub fn finished_compactions(&self) -> ValueFollower<i64> {
        self.shared.finished_compaction.subscribe()
    }
}

impl FileView {
    /// Opens a read transaction on `file`, which contains all batches up to the number `batch`.
    pub(super) fn open(file: &Arc<StoreDatabase>, batch: u64) -> Result<Self, StoreError> {
        let txn = file.db.begin_read()?;
        let progress = read_progress(&txn.open_table(META)?)?;
        let records = txn.open_table(RECORDS)?;
        Ok(Self { records, txn, database: file.clone(), progress, batch })
    }

    /// Returns the last compaction whose old revisions are all deleted from the file; -1 if there
    /// is none.
    pub(super) fn finished_compaction(&self) -> Result<i64, StoreError> {
        read_finished_compaction(&self.txn.open_table(META)?)
    }
}

/// Opens a read transaction on `file`, and returns its view, without memtables.
pub(super) fn view_file(file: &Arc<StoreDatabase>) -> Result<View, StoreError> {
    let file = FileView::open(file, 0)?;
    let cluster = Arc::new(read_cluster(&file.txn)?);
    let progress = file.progress;
    Ok(View { file: Arc::new(file), memtables: Memtables::default(), cluster, progress, batch: 0 })
}
