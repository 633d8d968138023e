//! Opening the store, publishing views of it, and the handles to read and write it.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock, RwLockReadGuard};

use node_consensus::Guards;
use node_proto::etcdserverpb::{AlarmMember, RangeRequest, RangeResponse};
use node_proto::mvccpb::KeyValue;
use redb::{
    Database, Durability, ReadOnlyTable, ReadTransaction, ReadableDatabase as _,
    ReadableTable as _, StorageBackend,
};
use tokio::sync::{Notify, watch};

use super::batch::Batch;
use super::compaction::Cursor;
use super::error::{ReadError, StoreError};
use super::event::{EventBatch, decode};
use super::hash::Kept;
use super::index::Index;
use super::measured::Measured;
use super::operations::{Counted, Operations};
use super::range::{AnswerRoom, Gather, Scan, Source, Step};
use super::revision::Revision;
use super::rows::{is_together, records};
use super::tables::{
    self, ALARMS, Cluster, FORMAT, FORMATS_BEFORE, LEASES, MEMBERS, META, Progress, RECORDS,
    REMOVED, ROLES, USERS, decode_lease, read_cluster, read_compacted, read_format, read_progress,
    write_auth, write_cluster, write_format, write_progress,
};
use super::watch::WatchOptions;
use crate::auth::{AuthState, Tokens};
use crate::lease::{Lease, LeaseCounters, LeaseTable};
use crate::machine::Position;
use crate::membership::{Member, MemberTable};

/// Who takes away what a compaction has made unreachable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compaction {
    /// [`Store::compact_step`], called by a task of its own: writes go on meanwhile.
    Background,
    /// The batch that holds the compaction: for a simulation, which has one thread.
    Inline,
}

/// How to open a store.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of file pages that may be kept in RAM.
    pub cache_bytes: usize,
    /// Who compacts.
    pub compaction: Compaction,
    /// Keys per step of a compaction.
    pub compacted_keys_per_step: usize,
    /// What watches may take.
    pub watch: WatchOptions,
    /// The members that a new store begins with; ignored when the store exists, which knows them
    /// better. The same on every member of the cluster.
    pub members: Vec<Member>,
    /// [`Guards::ALL`] but in tests.
    pub guards: Guards,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            cache_bytes: 64 * 1024 * 1024,
            compaction: Compaction::Background,
            compacted_keys_per_step: 1_000,
            watch: WatchOptions::default(),
            members: Vec::new(),
            guards: Guards::ALL,
        }
    }
}

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
    view: RwLock<Arc<View>>,
    /// Whether the view says that requests have to say who makes them: so that it costs nothing more to know.
    auth_enabled: AtomicBool,
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
    members: watch::Sender<Arc<MemberTable>>,
    /// Those that the newest view has.
    alarms: watch::Sender<Vec<AlarmMember>>,
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

    fn ask_for_compaction(&self, cursor: Cursor) {
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

/// Writes the store; there is one, and it belongs to whoever applies the log.
pub struct Writer {
    pub(crate) shared: Arc<Shared>,
    pub(crate) progress: Progress,
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) compaction: Compaction,
    durable: Position,
}

impl Writer {
    /// Opens the store on `backend`, or makes a new one there.
    ///
    /// The index is built from the records: about a second per million of them.
    pub fn open(backend: impl StorageBackend, options: Options) -> Result<Self, StoreError> {
        let cache_bytes = options.cache_bytes;
        let file = Arc::new(unless_it_panics(|| File::open(backend, cache_bytes))?);
        let loaded = unless_it_panics(|| {
            prepare(&file.db, options.members)?;
            load(&file)
        });
        let loaded = match loaded {
            Ok(loaded) => loaded,
            Err(error) => {
                // Dropping it would write to a file that may not be what it says.
                std::mem::forget(file);
                return Err(error);
            }
        };
        let Loaded { frozen, contents } = loaded;
        let Indexed { index, leases, tombstones, record_bytes } = contents;
        let Frozen { view, finished_compaction: finished } = frozen;
        let (progress, cluster) = (view.progress, view.cluster.clone());
        let members = watch::Sender::new(cluster.members.clone());
        let alarms = watch::Sender::new(cluster.alarms.clone());
        let unfinished = progress.compacted > finished;
        let shared = Shared {
            file: RwLock::new(file),
            rows_stay: Mutex::default(),
            one_state: Mutex::default(),
            replaced: AtomicU64::new(0),
            cache_bytes,
            index: RwLock::new(index),
            leases: RwLock::new(leases),
            tombstones: Mutex::new(tombstones),
            tokens: Mutex::default(),
            auth_enabled: AtomicBool::new(view.auth().is_enabled()),
            view: RwLock::new(Arc::new(view)),
            compacted: watch::Sender::new(finished),
            cursor: Mutex::new(unfinished.then(|| Cursor::new(progress.compacted))),
            compacted_keys_per_step: options.compacted_keys_per_step,
            guards: options.guards,
            hashes: Kept::default(),
            operations: Operations::default(),
            wanted: Notify::new(),
            members,
            alarms,
            record_bytes: AtomicI64::new(record_bytes),
        };
        let shared = Arc::new(shared);
        let writer = Self {
            shared,
            progress,
            cluster,
            compaction: options.compaction,
            durable: progress.applied,
        };
        if writer.compaction == Compaction::Inline {
            writer.store().compact_all()?;
        }
        Ok(writer)
    }

    /// A handle for readers.
    #[must_use]
    pub fn store(&self) -> Store {
        Store { shared: self.shared.clone() }
    }

    /// The last entry applied.
    #[must_use]
    pub fn applied(&self) -> Position {
        self.progress.applied
    }

    /// The last entry whose effects survive a crash.
    #[must_use]
    pub fn durable(&self) -> Position {
        self.durable
    }

    /// Runs `work` in one transaction that ends at the log position `applied`, publishes the
    /// result and returns it with the events that it caused. Not durable until
    /// [`Self::checkpoint`].
    ///
    /// After an error the writer must not be used again: its index may be ahead of the file.
    pub fn batch<R>(
        &mut self,
        applied: Position,
        work: impl FnOnce(&mut Batch<'_>) -> Result<R, StoreError>,
    ) -> Result<(R, EventBatch), StoreError> {
        let shared = self.shared.clone();
        let file = shared.file();
        let mut txn = file.db.begin_write()?;
        txn.set_durability(Durability::None)?;
        let (result, done) = {
            let mut batch = Batch::new(&txn, &shared, self.progress, self.cluster.clone())?;
            let result = work(&mut batch)?;
            (result, batch.finish())
        };
        let before = self.progress.compacted;
        self.progress = Progress { applied, ..done.progress };
        write_progress(&mut txn.open_table(META)?, self.progress)?;
        if let Some(cluster) = done.cluster {
            write_cluster(&txn, &cluster)?;
            if !Arc::ptr_eq(&cluster.auth, &self.cluster.auth) {
                write_auth(&txn, &cluster.auth)?;
            }
            self.cluster = Arc::new(cluster);
        }
        txn.commit()?;
        if !done.tokens.is_empty() {
            let mut tokens = shared.tokens.lock().expect("nothing panics under this lock");
            done.tokens.into_iter().for_each(|news| news.tell(&mut tokens));
        }
        if self.progress.compacted > before {
            let cursor = Cursor::new(self.progress.compacted);
            // As in etcd: what an interrupted compaction left would count as well.
            let is_whole = *shared.compacted.borrow() == before;
            shared.ask_for_compaction(if is_whole { cursor.after_one_of(before) } else { cursor });
            if self.compaction == Compaction::Inline {
                self.store().compact_in(&file)?;
            }
        }
        self.publish(&file)?;
        Ok((result, done.events))
    }

    /// Makes everything applied durable.
    pub fn checkpoint(&mut self) -> Result<Position, StoreError> {
        if self.durable != self.progress.applied {
            let file = self.shared.file();
            let mut txn = file.db.begin_write()?;
            txn.set_durability(Durability::Immediate)?;
            // Else the next start after a crash would read the whole file.
            txn.set_quick_repair(true);
            txn.commit()?;
            self.durable = self.progress.applied;
        }
        Ok(self.durable)
    }

    /// Takes over what a snapshot brought; the file has it already.
    pub(crate) fn replace(
        &mut self,
        file: &Arc<File>,
        progress: Progress,
        cluster: Cluster,
    ) -> Result<(), StoreError> {
        self.progress = progress;
        self.durable = progress.applied;
        self.cluster = Arc::new(cluster);
        self.shared.replaced.fetch_add(1, Ordering::Relaxed);
        // What the sender's compaction had not reached yet came along, even of one that this store had
        // finished itself.
        self.shared.compacted.send_replace(Progress::START.compacted);
        let Loaded { contents, .. } = load(file)?;
        let Indexed { index, leases, tombstones, record_bytes } = contents;
        *self.shared.lock_tombstones() = tombstones;
        *self.shared.index.write().expect("the writer is the only one to write") = index;
        *self.shared.leases.write().expect("nothing panics while it holds this lock") = leases;
        // Whose tokens should be forgotten is in the entries that it passes over.
        self.shared.tokens.lock().expect("nothing panics under this lock").clear();
        self.shared.record_bytes.store(record_bytes, Ordering::Relaxed);
        self.shared.hashes.clear();
        self.shared.ask_for_compaction(Cursor::new(progress.compacted));
        if self.compaction == Compaction::Inline {
            self.store().compact_in(file)?;
        }
        self.publish(file)
    }

    fn publish(&self, file: &Arc<File>) -> Result<(), StoreError> {
        let txn = file.db.begin_read()?;
        self.shared.show(View {
            records: txn.open_table(RECORDS)?,
            txn,
            _file: file.clone(),
            cluster: self.cluster.clone(),
            progress: self.progress,
        });
        self.shared.members.send_if_modified(|known| {
            let changed = !Arc::ptr_eq(known, &self.cluster.members);
            if changed {
                *known = self.cluster.members.clone();
            }
            changed
        });
        self.shared.alarms.send_if_modified(|known| {
            let changed = *known != self.cluster.alarms;
            if changed {
                known.clone_from(&self.cluster.alarms);
            }
            changed
        });
        Ok(())
    }
}

/// What a file holds, read whole.
struct Loaded {
    frozen: Frozen,
    contents: Indexed,
}

/// What is made of the records, to be kept in RAM.
struct Indexed {
    index: Index,
    leases: LeaseTable,
    tombstones: BTreeSet<u128>,
    record_bytes: i64,
}

fn load(file: &Arc<File>) -> Result<Loaded, StoreError> {
    let frozen = freeze(file)?;
    let contents = index(&frozen.view)?;
    Ok(Loaded { frozen, contents })
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

/// Runs `work`, which reads a file that may be damaged. The library under it takes much of what it
/// reads for granted and panics where that doesn't hold: here, before anything rests on the file,
/// that is damage like any other.
fn unless_it_panics<T>(work: impl FnOnce() -> Result<T, StoreError>) -> Result<T, StoreError> {
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    caught.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(StoreError::Corrupt(text.unwrap_or("it cannot be read").to_owned()))
    })
}

/// Makes the tables of a new file; checks the format of an old one.
fn prepare(db: &Database, members: Vec<Member>) -> Result<(), StoreError> {
    let mut txn = db.begin_write()?;
    txn.set_quick_repair(true);
    let format = read_format(&txn.open_table(META)?)?;
    match format {
        Some(FORMAT) => {
            txn.abort()?;
            return Ok(());
        }
        Some(before) if FORMATS_BEFORE.contains(&before) => {
            txn.open_table(LEASES)?;
            txn.open_table(USERS)?;
            txn.open_table(ROLES)?;
            write_format(&mut txn.open_table(META)?)?;
            txn.commit()?;
            return Ok(());
        }
        Some(found) => return Err(StoreError::Format { found, known: FORMAT }),
        None => {}
    }
    txn.open_table(RECORDS)?;
    txn.open_table(MEMBERS)?;
    txn.open_table(REMOVED)?;
    txn.open_table(ALARMS)?;
    txn.open_table(LEASES)?;
    txn.open_table(USERS)?;
    txn.open_table(ROLES)?;
    {
        let mut meta = txn.open_table(META)?;
        write_format(&mut meta)?;
        write_progress(&mut meta, Progress::START)?;
        tables::write_compacted(&mut meta, Progress::START.compacted)?;
    }
    let members = Arc::new(MemberTable::new(members));
    let cluster = Cluster { members, ..Cluster::default() };
    write_cluster(&txn, &cluster)?;
    txn.commit()?;
    Ok(())
}

fn index(view: &View) -> Result<Indexed, StoreError> {
    let (mut index, mut leases) = (Index::new(view.progress.compacted), LeaseTable::default());
    view.leases()?.into_iter().for_each(|lease| leases.restore(lease));
    let (mut tombstones, mut record_bytes) = (BTreeSet::new(), 0);
    for row in view.records.iter()? {
        let (first, row) = row?;
        let (first, row) = (first.value(), row.value());
        for record in records(first, row) {
            let (at, record) = record?;
            let kv = decode(record)?;
            index.restore(&kv.key, at, kv.create_revision, kv.version);
            leases.attach(&kv.key, kv.lease);
        }
        if is_together(row) {
            tombstones.insert(first);
        }
        record_bytes += weight(row.len());
    }
    Ok(Indexed { index, leases, tombstones, record_bytes })
}

/// What a record of `length` bytes adds to the store.
pub(crate) fn weight(length: usize) -> i64 {
    i64::try_from(length + size_of::<u128>()).unwrap_or(i64::MAX)
}
