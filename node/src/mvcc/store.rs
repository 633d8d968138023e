//! What is shared of a store that is open, the views of it, and the handle that reads.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock, RwLockReadGuard};

use node_consensus::Guards;
use node_proto::etcdserverpb::{AlarmMember, RangeRequest, RangeResponse};
use node_proto::mvccpb::KeyValue;
use redb::{
    Database, ReadOnlyTable, ReadTransaction, ReadableDatabase as _, ReadableTable as _,
    StorageBackend,
};
use tokio::sync::{Notify, watch};

use super::compaction::Cursor;
use super::error::{ReadError, StoreError};
use super::hash::Kept;
use super::index::Index;
use super::measured::Measured;
use super::operations::{Counted, Operations};
use super::range::{AnswerRoom, Gather, Scan, Source, Step};
use super::revision::Revision;
use super::rows::records;
use super::tables::{
    Cluster, LEASES, META, Progress, RECORDS, decode_lease, read_cluster, read_compacted,
    read_progress,
};
use crate::auth::{AuthState, Tokens};
use crate::lease::{Lease, LeaseCounters, LeaseTable};
use crate::machine::Position;
use crate::membership::MemberTable;

/// A page of the store's file.
const PAGE_BYTES: u64 = 4096;

type Records = ReadOnlyTable<u128, &'static [u8]>;

/// The store as one applied batch left it. Cheap to hold for a request, not for long: its pages of
/// the file can't be used again meanwhile.
pub struct View {
    pub(crate) records: Records,
    pub(crate) txn: ReadTransaction,
    /// Ends with the last view of it, so that this one can be read even when another has taken its
    /// place.
    pub(crate) _file: Arc<File>,
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) progress: Progress,
}

impl View {
    /// All leases, by name.
    pub fn leases(&self) -> Result<Vec<Lease>, StoreError> {
        let mut leases = Vec::new();
        for row in self.txn.open_table(LEASES)?.iter()? {
            leases.push(decode_lease(row?.1.value()).map_err(StoreError::Corrupt)?);
        }
        Ok(leases)
    }

    /// The newest revision.
    #[must_use]
    pub fn revision(&self) -> i64 {
        self.progress.revision
    }

    /// Reads below this revision are refused; -1 before the first compaction.
    #[must_use]
    pub fn compacted(&self) -> i64 {
        self.progress.compacted
    }

    /// The last log entry in it.
    #[must_use]
    pub fn applied(&self) -> Position {
        self.progress.applied
    }

    /// Who belongs to the cluster.
    #[must_use]
    pub fn members(&self) -> &MemberTable {
        &self.cluster.members
    }

    /// The alarms that are raised, by member.
    #[must_use]
    pub fn alarms(&self) -> &[AlarmMember] {
        &self.cluster.alarms
    }

    /// Who may do what.
    #[must_use]
    pub fn auth(&self) -> &AuthState {
        &self.cluster.auth
    }
}

/// A view, and what has to be known beside it to carry the store elsewhere as a file.
pub struct Frozen {
    /// The store.
    pub view: View,
    /// The last compaction whose old revisions are gone; -1: none.
    pub finished_compaction: i64,
}

impl Frozen {
    /// Shows every record, an encoded `KeyValue`, in the order of revisions.
    pub fn records<E: From<StoreError>>(
        &self,
        mut show: impl FnMut(Revision, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        for row in self.view.records.iter().map_err(StoreError::from)? {
            let (first, row) = row.map_err(StoreError::from)?;
            for record in records(first.value(), row.value()) {
                let (at, record) = record?;
                show(at, record)?;
            }
        }
        Ok(())
    }
}

/// An open file.
pub(crate) struct File {
    pub(crate) db: Database,
    bytes: Arc<AtomicU64>,
}

impl File {
    /// Opens what `backend` holds, or begins a new store there.
    pub(crate) fn open(
        backend: impl StorageBackend,
        cache_bytes: usize,
    ) -> Result<Self, StoreError> {
        let bytes = Arc::new(AtomicU64::new(0));
        let backend = Measured::new(backend, bytes.clone())?;
        let builder = &mut Database::builder();
        let db = builder.set_cache_size(cache_bytes).create_with_backend(backend)?;
        Ok(Self { db, bytes })
    }
}

pub(crate) struct Shared {
    /// Whoever writes holds this from before its transaction until the view is published; to put
    /// another file in its place takes the lock as a whole.
    pub(crate) file: RwLock<Arc<File>>,
    /// Held by a defragmentation and by each step of a compaction.
    pub(crate) rows_stay: Mutex<()>,
    /// Held by each step of a compaction, and while a snapshot takes the place of all that is there: a
    /// step must not go on in the records of the one with the index of the other.
    pub(crate) one_state: Mutex<()>,
    /// Counts the states that replaced all that was there; goes up before anything of the new one shows.
    pub(crate) replaced: AtomicU64,
    pub(crate) cache_bytes: usize,
    pub(crate) index: RwLock<Index>,
    pub(crate) leases: RwLock<LeaseTable>,
    /// The rows that hold tombstones of one request together.
    pub(crate) tombstones: Mutex<BTreeSet<u128>>,
    pub(crate) tokens: Mutex<Tokens>,
    pub(super) view: RwLock<Arc<View>>,
    /// Whether the view says that requests have to say who makes them: so that it costs nothing more to know.
    pub(super) auth_enabled: AtomicBool,
    /// The last finished compaction of this state, for those who wait for a physical one.
    pub(crate) compacted: watch::Sender<i64>,
    pub(crate) cursor: Mutex<Option<Cursor>>,
    pub(crate) compacted_keys_per_step: usize,
    pub(crate) guards: Guards,
    pub(crate) hashes: Kept,
    pub(crate) operations: Operations,
    /// A compaction has been asked for.
    pub(crate) wanted: Notify,
    /// Those of the newest view, for who has to follow them.
    pub(super) members: watch::Sender<Arc<MemberTable>>,
    /// Those that the newest view has.
    pub(super) alarms: watch::Sender<Vec<AlarmMember>>,
    /// Bytes of all records.
    pub(crate) record_bytes: AtomicI64,
}

impl Shared {
    pub(crate) fn view(&self) -> Arc<View> {
        self.view.read().expect("nothing panics while it holds this lock").clone()
    }

    pub(crate) fn file(&self) -> RwLockReadGuard<'_, Arc<File>> {
        self.file.read().expect("nothing panics while it replaces the file")
    }

    /// Shows `view` to whoever reads from now on.
    pub(crate) fn show(&self, view: View) {
        let last = {
            let mut slot = self.view.write().expect("nothing panics under this lock");
            self.auth_enabled.store(view.auth().is_enabled(), Ordering::Release);
            std::mem::replace(&mut *slot, Arc::new(view))
        };
        // Outside the lock: to end a read transaction takes a lock of its own.
        drop(last);
    }

    pub(crate) fn ask_for_compaction(&self, cursor: Cursor) {
        *self.lock_cursor() = Some(cursor);
        self.wanted.notify_one();
    }

    pub(crate) fn lock_cursor(&self) -> MutexGuard<'_, Option<Cursor>> {
        self.cursor.lock().expect("a compaction that panicked has stopped the process")
    }

    pub(crate) fn lock_tombstones(&self) -> MutexGuard<'_, BTreeSet<u128>> {
        self.tombstones.lock().expect("nothing panics under this lock")
    }

    pub(crate) fn source<'a>(&'a self, view: &'a View) -> Source<'a, Records> {
        Source {
            index: &self.index,
            records: &view.records,
            revision: view.progress.revision,
            compacted: view.progress.compacted,
        }
    }
}

/// Reads the store; any number of them.
#[derive(Clone)]
pub struct Store {
    pub(crate) shared: Arc<Shared>,
}

impl Store {
    /// The newest view.
    #[must_use]
    pub fn view(&self) -> Arc<View> {
        self.shared.view()
    }

    /// The store as it is now, to be read as a whole. Its pages of the file can't be used again
    /// meanwhile.
    pub fn freeze(&self) -> Result<Frozen, StoreError> {
        freeze(&self.shared.file())
    }

    /// Begins to read a range; `step` until done. [`ReadError::Superseded`]: take a new view.
    pub fn gather(&self, view: &View, request: &RangeRequest) -> Result<Gather, ReadError> {
        self.count_range();
        Gather::new(request, view.revision(), view.compacted())
    }

    /// Goes on with a range that [`Self::gather`] began on the same `view`.
    pub fn step(&self, view: &View, gather: &mut Gather) -> Result<Step, ReadError> {
        gather.step(&self.shared.source(view))
    }

    /// Reads a whole range in one go: for short ones, and where nothing else has to run.
    pub fn range(&self, view: &View, request: &RangeRequest) -> Result<RangeResponse, ReadError> {
        self.count_range();
        let mut anything = |_| true;
        let mut room = AnswerRoom::new(0, &mut anything);
        let response = self.shared.source(view).range(request, &mut room)?;
        Ok(response.expect("there is room for anything"))
    }

    fn count_range(&self) {
        self.shared.operations.add(Counted { ranges: 1, ..Counted::default() });
    }

    /// What it was asked for.
    #[must_use]
    pub fn operations(&self) -> &Operations {
        &self.shared.operations
    }

    /// Goes on showing every key of a range with its value as of `view`, in key order, until `look` says
    /// no; true at the end. Holds one value at a time. [`ReadError::Superseded`]: take a new view.
    pub fn scan(
        &self,
        view: &View,
        scan: &mut Scan,
        look: &mut dyn FnMut(&KeyValue) -> bool,
    ) -> Result<bool, ReadError> {
        self.shared.source(view).scan(scan, look)
    }

    /// Who belongs to the cluster, and a way to wait for a change.
    #[must_use]
    pub fn members(&self) -> watch::Receiver<Arc<MemberTable>> {
        self.shared.members.subscribe()
    }

    /// Leases and what is attached to them, as far as entries have been applied: of which the newest view
    /// may lack the last. Not to be held for long, since writes wait for it.
    #[must_use]
    pub fn leases(&self) -> &RwLock<LeaseTable> {
        &self.shared.leases
    }

    /// Whether requests have to say who makes them, by the newest view.
    #[must_use]
    pub fn is_auth_enabled(&self) -> bool {
        self.shared.auth_enabled.load(Ordering::Acquire)
    }

    /// The tokens that were given by entries which this process has applied, to users who are as they
    /// were then.
    #[must_use]
    pub fn tokens(&self) -> &Mutex<Tokens> {
        &self.shared.tokens
    }

    /// What has been granted and revoked.
    #[must_use]
    pub fn lease_counters(&self) -> LeaseCounters {
        self.shared.leases.read().expect("nothing panics while it holds this lock").counters()
    }

    /// The alarms that are raised, and a way to wait for a change.
    #[must_use]
    pub fn alarms(&self) -> watch::Receiver<Vec<AlarmMember>> {
        self.shared.alarms.subscribe()
    }

    /// Bytes of the file.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.shared.file().bytes.load(Ordering::Relaxed)
    }

    /// Bytes of all records in it: keys, values and what belongs to them.
    #[must_use]
    pub fn record_bytes(&self) -> u64 {
        self.shared.record_bytes.load(Ordering::Relaxed).try_into().unwrap_or(0)
    }

    /// [`Self::record_bytes`], but at least the page that a store without keys takes: JSON leaves out a size of
    /// 0, and clients would take the size for unknown.
    #[must_use]
    pub fn bytes_in_use(&self) -> u64 {
        self.record_bytes().max(PAGE_BYTES)
    }

    /// Keys in the index, deleted ones that no compaction has reached included.
    #[must_use]
    pub fn indexed_keys(&self) -> usize {
        super::range::read(&self.shared.index).len()
    }

    /// The last compaction whose old revisions are gone; changes as compactions finish.
    #[must_use]
    pub fn finished_compactions(&self) -> watch::Receiver<i64> {
        self.shared.compacted.subscribe()
    }
}

/// Everything of one transaction.
pub(crate) fn freeze(file: &Arc<File>) -> Result<Frozen, StoreError> {
    let txn = file.db.begin_read()?;
    let meta = txn.open_table(META)?;
    let progress = read_progress(&meta)?;
    let finished_compaction = read_compacted(&meta)?;
    let cluster = Arc::new(read_cluster(&txn)?);
    let records = txn.open_table(RECORDS)?;
    let view = View { records, txn, _file: file.clone(), cluster, progress };
    Ok(Frozen { view, finished_compaction })
}
