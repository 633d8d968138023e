//! Changes to the store within one batch of log entries.

use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, RwLockReadGuard, RwLockWriteGuard};

use bytes::{Bytes, BytesMut};
use node_consensus::Guards;
use node_proto::etcdserverpb::{AlarmMember, RangeRequest, RangeResponse};
use node_proto::mvccpb::KeyValue;
use prost::Message as _;

use super::error::{ReadError, StoreError};
use super::event::{Event, EventBatch, EventKind, encode_deleted, key_of};
use super::history::KeyState;
use super::index::WalkOutcome;
use super::memtable::MemoryChanges;
use super::operation_counters::OperationCounts;
use super::range::{AnswerBudget, ReadSource, lock_index};
use super::record_rows::RowLookup;
use super::revision::{KeyRange, Revision};
use super::rows::{TombstoneRow, is_tombstone_row, weight};
use super::store::{StoreState, View};
use super::tables::{ClusterData, StoreProgress};
use crate::auth::{AuthState, RevokedTokens, SecretHash, SimpleTokens};
use crate::lease::{Lease, LeaseTable};
use crate::membership::MemberTable;

/// Maximum number of keys deleted under one hold of the index's write lock. While the lock is held,
/// readers of the index wait.
const MAX_DELETES_PER_LOCK: usize = 1_000;

/// Result of a finished batch, handed back to the writer.
pub(crate) struct BatchResult {
    pub(crate) progress: StoreProgress,
    /// Members, alarms and users after the batch; `None` if the batch didn't change them.
    pub(crate) cluster: Option<ClusterData>,
    /// New rows and changed leases, for the memtable.
    pub(crate) changes: MemoryChanges,
    pub(crate) events: EventBatch,
    pub(crate) tokens: Vec<TokenChange>,
}

/// Change to the table of auth tokens. The writer makes the change once the batch is in the store.
pub(crate) enum TokenChange {
    Assigned { index: u64, secret: SecretHash, user: Arc<str> },
    Revoked(RevokedTokens),
}

impl TokenChange {
    pub(crate) fn apply_to(self, tokens: &mut SimpleTokens) {
        match self {
            Self::Assigned { index, secret, user } => tokens.assign(index, secret, user),
            Self::Revoked(RevokedTokens::NoUser) => {}
            Self::Revoked(RevokedTokens::User(name)) => tokens.revoke_user(&name),
            Self::Revoked(RevokedTokens::AllUsers) => tokens.clear(),
        }
    }
}

/// Event of an unfinished batch. It has only the place of its encoded `KeyValue` in the batch's
/// buffer, because the buffer can move in memory while it grows.
struct BufferedEvent {
    /// Place of the event's bytes in the buffer.
    bytes: Range<usize>,
    kind: EventKind,
    revision: Revision,
    is_create: bool,
}

/// Rows that the batch can read: its own, and those of the view before it.
struct BatchRows {
    before: Arc<View>,
    /// Encoded `KeyValue`s of all events, and rows of several tombstones. The row of a put is its
    /// event's `KeyValue`.
    buffer: BytesMut,
    /// New rows in ascending order, with the places of their bytes in `buffer`.
    new: Vec<(u128, Range<usize>)>,
}

impl RowLookup for BatchRows {
    fn get<R>(&self, row: u128, show: impl FnOnce(&[u8]) -> R) -> Result<Option<R>, StoreError> {
        match self.new.binary_search_by_key(&row, |(number, _)| *number) {
            Ok(at) => Ok(Some(show(&self.buffer[self.new[at].1.clone()]))),
            Err(_) => self.before.get(row, show),
        }
    }
}

/// Changes of one batch of log entries. Each write request is a group of changes that share a main
/// revision: make the changes, then call [`Batch::end_request`].
pub struct Batch<'a> {
    rows: BatchRows,
    shared: &'a StoreState,
    progress: StoreProgress,
    cluster: Arc<ClusterData>,
    cluster_changed: bool,
    /// Number of changes made by the current request.
    changes: u32,
    /// Operations of the current request, for the metrics.
    operation_counts: Cell<OperationCounts>,
    events: Vec<BufferedEvent>,
    /// Changed leases by id, in the order of the changes; `None` for a revoked lease.
    changed_leases: Vec<(i64, Option<Lease>)>,
    record_bytes: i64,
    tokens: Vec<TokenChange>,
}

/// Divisor of the number of a buffer's used bytes. The quotient is the maximum number of unused
/// bytes with which the memtable keeps the buffer. A buffer with more unused bytes is copied.
const UNUSED_BUFFER_DIVISOR: usize = 8;

/// Makes a batch's buffer immutable, without much unused memory.
fn freeze_buffer(buffer: BytesMut) -> Bytes {
    let unused = buffer.capacity() - buffer.len();
    if unused > buffer.len() / UNUSED_BUFFER_DIVISOR {
        Bytes::copy_from_slice(&buffer)
    } else {
        buffer.freeze()
    }
}

impl<'a> Batch<'a> {
    /// Begins a batch after `before`, which is the view of the previous batch.
    pub(crate) fn new(shared: &'a StoreState, before: Arc<View>) -> Self {
        Self {
            shared,
            progress: before.progress,
            cluster: before.cluster.clone(),
            rows: BatchRows { before, buffer: BytesMut::new(), new: Vec::new() },
            cluster_changed: false,
            changes: 0,
            operation_counts: Cell::default(),
            events: Vec::new(),
            changed_leases: Vec::new(),
            record_bytes: 0,
            tokens: Vec::new(),
        }
    }

    pub(crate) fn finish(self) -> BatchResult {
        assert_eq!(self.changes, 0, "a write request was begun and not ended");
        self.shared.record_bytes.fetch_add(self.record_bytes, Ordering::Relaxed);
        let buffer = freeze_buffer(self.rows.buffer);
        let events = self.events.into_iter().map(|pending| {
            let kv = buffer.slice(pending.bytes);
            Event {
                key: key_of(&kv),
                kind: pending.kind,
                revision: pending.revision,
                is_create: pending.is_create,
                kv,
            }
        });
        let events = EventBatch { events: events.collect(), revision: self.progress.revision };
        let rows = self.rows.new.into_iter().map(|(row, bytes)| (row, buffer.slice(bytes)));
        BatchResult {
            progress: self.progress,
            cluster: self.cluster_changed.then(|| ClusterData::clone(&self.cluster)),
            changes: MemoryChanges { rows: rows.collect(), leases: self.changed_leases },
            events,
            tokens: self.tokens,
        }
    }

    /// Returns the newest revision. If the current request has changed anything, that is the
    /// request's own revision.
    #[must_use]
    pub fn revision(&self) -> i64 {
        self.progress.revision + i64::from(self.changes > 0)
    }

    /// Returns the compaction revision. Reads at a lower revision are refused.
    #[must_use]
    pub fn compact_revision(&self) -> i64 {
        self.progress.compact_revision
    }

    fn source(&self) -> ReadSource<'_, BatchRows> {
        ReadSource {
            index: &self.shared.index,
            records: &self.rows,
            revision: self.revision(),
            compact_revision: self.progress.compact_revision,
        }
    }

    fn count(&self, add: impl FnOnce(&mut OperationCounts)) {
        let mut counted = self.operation_counts.get();
        add(&mut counted);
        self.operation_counts.set(counted);
    }

    /// Reads a range, including the current request's changes. Returns `None` if the answer doesn't
    /// fit into `room`.
    pub fn range(
        &self,
        request: &RangeRequest,
        room: &mut AnswerBudget<'_>,
    ) -> Result<Option<RangeResponse>, ReadError> {
        self.count(|counted| counted.ranges += 1);
        self.source().range(request, room)
    }

    /// Calls `look` for each key of `range` with its newest value, in key order, until `look`
    /// returns false. The current request's changes are included. Only one value is in memory at a
    /// time.
    pub fn for_each_key(
        &self,
        range: KeyRange,
        look: &mut dyn FnMut(&KeyValue) -> bool,
    ) -> Result<(), ReadError> {
        self.source().for_each_key(range, look)
    }

    /// Returns the newest value of `key`, or `None` if the key doesn't exist.
    pub fn get(&self, key: &[u8]) -> Result<Option<KeyValue>, StoreError> {
        self.count(|counted| counted.ranges += 1);
        self.source().newest(key)
    }

    /// Whether `key` exists now.
    #[must_use]
    pub fn has(&self, key: &[u8]) -> bool {
        self.newest(key).is_some()
    }

    fn newest(&self, key: &[u8]) -> Option<KeyState> {
        lock_index(&self.shared.index).newest(key)
    }

    fn next_change(&mut self) -> Revision {
        let at = Revision { main: self.progress.revision + 1, sub: self.changes };
        self.changes += 1;
        at
    }

    /// Writes `key`. Returns the request's main revision.
    pub fn put(&mut self, key: Bytes, value: Bytes, lease: i64) -> i64 {
        self.count(|counted| counted.puts += 1);
        let at = self.next_change();
        let (create_revision, version) =
            self.shared.index.write().expect("the writer is the only one to write").put(&key, at);
        self.leases().attach(&key, lease);
        let kv = KeyValue { key, create_revision, mod_revision: at.main, version, value, lease };
        let buffer = &mut self.rows.buffer;
        let start = buffer.len();
        kv.encode_raw(buffer);
        let bytes = start..buffer.len();
        self.record_bytes += weight(bytes.len());
        self.rows.new.push((at.to_row(), bytes.clone()));
        self.events.push(BufferedEvent {
            bytes,
            kind: EventKind::Put,
            revision: at,
            is_create: version == 1,
        });
        at.main
    }

    /// Deletes every key of `range`, in key order. Returns how many keys were deleted.
    pub fn delete(&mut self, range: &KeyRange) -> i64 {
        self.count(|counted| counted.deletes += 1);
        let mut keys: Vec<Bytes> = Vec::new();
        let now = self.revision();
        let walk = lock_index(&self.shared.index).walk(range, None, now, usize::MAX, |key, _| {
            keys.push(Bytes::copy_from_slice(key));
        });
        debug_assert!(matches!(walk, WalkOutcome::Done), "an unbounded walk ends");
        let deleted = i64::try_from(keys.len()).unwrap_or(i64::MAX);
        {
            let mut leases = self.leases();
            keys.iter().for_each(|key| leases.detach(key));
        }
        self.delete_all(&keys);
        deleted
    }

    /// Locks the table of leases and their attached keys for reading.
    pub(crate) fn lease_table(&self) -> RwLockReadGuard<'a, LeaseTable> {
        self.shared.leases.read().expect("nothing panics while it holds this lock")
    }

    fn leases(&self) -> RwLockWriteGuard<'a, LeaseTable> {
        self.shared.leases.write().expect("nothing panics while it holds this lock")
    }

    /// Returns the lease with this ID, if it exists.
    #[must_use]
    pub fn lease(&self, id: i64) -> Option<Lease> {
        self.lease_table().get(id)
    }

    /// Grants a lease. No lease with its ID may exist yet.
    pub fn grant(&mut self, lease: Lease) {
        self.changed_leases.push((lease.id, Some(lease)));
        self.leases().grant(lease);
    }

    /// Records a lease's remaining time in seconds; 0 means its whole TTL. An unknown lease is
    /// ignored.
    pub fn set_remaining_ttl(&mut self, id: i64, left: i64) {
        let noted = self.leases().checkpoint(id, left);
        if let Some(lease) = noted {
            self.changed_leases.push((id, Some(lease)));
        }
    }

    /// Revokes a lease and deletes the keys attached to it, in key order. Returns whether the lease
    /// existed.
    pub fn revoke(&mut self, id: i64) -> bool {
        let revoked = self.leases().revoke(id);
        let Some(keys) = revoked else { return false };
        self.changed_leases.push((id, None));
        self.delete_all(&keys);
        true
    }

    /// Deletes `keys`, which must exist and be in key order.
    fn delete_all<K: AsRef<[u8]>>(&mut self, keys: &[K]) {
        let mut together = TombstoneRow::default();
        for keys in keys.chunks(MAX_DELETES_PER_LOCK) {
            let first = Revision { main: self.progress.revision + 1, sub: self.changes };
            let mut index = self.shared.index.write().expect("the writer is the only one to write");
            index.delete_each(keys.iter().map(AsRef::as_ref), first);
            drop(index);
            for key in keys {
                let (key, at) = (key.as_ref(), self.next_change());
                if together.is_full_with(key.len()) {
                    self.write_tombstones(&mut together);
                }
                together.push(at, key);
                let start = self.rows.buffer.len();
                encode_deleted(key, at, &mut self.rows.buffer);
                self.events.push(BufferedEvent {
                    bytes: start..self.rows.buffer.len(),
                    kind: EventKind::Delete,
                    revision: at,
                    is_create: false,
                });
            }
        }
        self.write_tombstones(&mut together);
    }

    fn write_tombstones(&mut self, together: &mut TombstoneRow) {
        let Some((row, bytes)) = together.row() else { return };
        let start = self.rows.buffer.len();
        self.rows.buffer.extend_from_slice(bytes);
        self.rows.new.push((row, start..self.rows.buffer.len()));
        self.record_bytes += together.weight();
        if is_tombstone_row(bytes) {
            self.shared.lock_tombstones().insert(row);
        }
        together.clear();
    }

    /// Counts an applied entry and its duration. `kind` is an index into
    /// [`APPLIED_KINDS`](super::APPLIED_KINDS).
    pub(crate) fn record_apply_time(&self, kind: usize, is_done: bool, took: std::time::Duration) {
        self.shared.operations.record_apply_time(kind, is_done, took);
    }

    /// Ends a write request. If it changed anything, its changes become one main revision.
    pub fn end_request(&mut self) {
        self.progress.revision = self.revision();
        self.changes = 0;
        self.shared.operations.add(self.operation_counts.take());
    }

    /// Compacts at `revision`: reads at a lower revision are refused from now on. The records that
    /// become unreachable are deleted later, in steps.
    pub fn compact(&mut self, revision: i64) -> Result<(), ReadError> {
        if revision <= self.progress.compact_revision {
            return Err(ReadError::Compacted);
        }
        if revision > self.progress.revision {
            return Err(ReadError::Future);
        }
        self.progress.compact_revision = revision;
        let mut index = self.shared.index.write().expect("the writer is the only one to write");
        index.set_compact_revision(revision);
        Ok(())
    }

    /// Raises the revision by `by` and compacts there, so that nothing older can be read or
    /// watched. A client that saw a revision which no longer exists here gets the error for a
    /// compacted revision. It must read everything again.
    pub fn bump_revision(&mut self, by: i64) {
        self.progress.revision = self.progress.revision.saturating_add(by);
        self.progress.compact_revision = self.progress.revision;
        let mut index = self.shared.index.write().expect("the writer is the only one to write");
        index.set_compact_revision(self.progress.compact_revision);
    }

    /// Returns the current and removed members of the cluster.
    #[must_use]
    pub fn members(&self) -> &MemberTable {
        &self.cluster.members
    }

    /// Returns the safety rules for changes of members. Tests may switch some of them off.
    pub(crate) fn guards(&self) -> Guards {
        self.shared.guards
    }

    /// Returns the member table, so that it can be changed. The changes are written with the batch.
    pub fn members_mut(&mut self) -> &mut MemberTable {
        Arc::make_mut(&mut self.cluster_mut().members)
    }

    /// Returns the active alarms, ordered by member ID.
    #[must_use]
    pub fn alarms(&self) -> &[AlarmMember] {
        &self.cluster.alarms
    }

    /// Raises an alarm. Raising an active alarm changes nothing.
    pub fn raise_alarm(&mut self, alarm: AlarmMember) {
        let key = |a: &AlarmMember| (a.member_id, a.alarm);
        if let Err(at) = self.cluster.alarms.binary_search_by_key(&key(&alarm), key) {
            self.cluster_mut().alarms.insert(at, alarm);
        }
    }

    /// Disarms an alarm. Returns `false` if it was not active.
    pub fn disarm_alarm(&mut self, alarm: &AlarmMember) -> bool {
        let Some(at) = self.cluster.alarms.iter().position(|a| a == alarm) else { return false };
        self.cluster_mut().alarms.remove(at);
        true
    }

    /// Returns users, roles and whether authentication is enabled.
    #[must_use]
    pub fn auth(&self) -> &AuthState {
        &self.cluster.auth
    }

    /// Replaces users, roles and the switch for authentication.
    pub fn set_auth(&mut self, auth: AuthState) {
        self.cluster_mut().auth = Arc::new(auth);
    }

    /// Assigns a token to `user` once the batch is in the store. `secret` is the hash of the
    /// token's secret; `index` is the log entry that issued the token.
    pub fn assign_token(&mut self, index: u64, secret: SecretHash, user: &str) {
        self.tokens.push(TokenChange::Assigned { index, secret, user: user.into() });
    }

    /// Revokes tokens once the batch is in the store.
    pub fn revoke_tokens(&mut self, revoked: RevokedTokens) {
        self.tokens.push(TokenChange::Revoked(revoked));
    }

    fn cluster_mut(&mut self) -> &mut ClusterData {
        self.cluster_changed = true;
        Arc::make_mut(&mut self.cluster)
    }
}
