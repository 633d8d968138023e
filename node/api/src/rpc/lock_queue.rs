//! The queue for a lock or an election. Each client in it has a key below the queue's name,
//! attached to a lease. The client with the oldest key holds the lock or leads. Each other client
//! waits until the key before its own is deleted (client/v3/concurrency in etcd).

use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use muster_shares::memory::MemoryAccount;
use node_proto::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use node_proto::etcdserverpb::range_request::{SortOrder, SortTarget};
use node_proto::etcdserverpb::request_op::Request as Op;
use node_proto::etcdserverpb::{
    Compare, DeleteRangeRequest, DeleteRangeResponse, LeaseGrantRequest, PutRequest, RangeRequest,
    RangeResponse, RequestOp, ResponseHeader, TxnRequest, TxnResponse,
};
use node_proto::mvccpb::KeyValue;
use node_state::mvcc::KeyRange;
use node_state::mvcc::watch::{Notice, Subscriber, WatchSpec};
use tokio::sync::oneshot;
use tokio_util::task::TaskTracker;
use tonic::Status;

use super::context::{ApiContext, CallContext};
use super::error::Error;
use super::kv::KvService;
use super::lease::LeaseService;
use super::watch::watch_for_refusal;

/// TTL in seconds of the lease that is granted if the client's request names no lease. Nobody
/// renews this lease. The value is etcd's.
const DEFAULT_LEASE_TTL: i64 = 60;
/// Number of attempts to delete an abandoned queue entry. After that, the entry expires with its
/// lease.
const DELETE_ATTEMPTS: usize = 30;
/// Time between attempts to delete an abandoned queue entry.
const DELETE_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// ID of a queue's watch. Each watch has a subscriber of its own, so one ID is enough.
const WATCH_ID: i64 = 0;

/// Error of the Lock and Election services: etcd's text, always with the gRPC code `Unknown`.
/// etcd's own services are clients of its API, and pass on no code.
pub(super) struct LockQueueError(Error);

impl From<Error> for LockQueueError {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl From<LockQueueError> for Status {
    fn from(LockQueueError(error): LockQueueError) -> Self {
        Self::unknown(error.text())
    }
}

/// Operations on queues that the Lock and Election services share.
#[derive(Clone)]
pub(super) struct LockQueues {
    pub(super) context: Arc<ApiContext>,
    kv: Arc<KvService>,
    lease_service: LeaseService,
    tasks: TaskTracker,
}

/// A client's entry in a queue. Dropping a waiting entry deletes its key, because the client has
/// left or receives an error. An entry that needn't wait is kept: its client holds the lock or
/// leads, perhaps since an earlier call.
pub(super) struct QueueEntry {
    queues: LockQueues,
    name: Bytes,
    key: Bytes,
    /// Create revision of the key.
    created: i64,
    /// Revision at which the key was created, or was found to exist.
    entry_revision: i64,
    /// Value of the key, if the key existed already.
    value: Option<Bytes>,
    state: EntryState,
}

/// Whether a queue entry has to wait.
#[derive(Clone, Copy, PartialEq, Eq)]
enum EntryState {
    /// The entry was created, and it isn't known yet whether it is the first of its queue.
    Unknown,
    /// Another entry of the queue is before this one, so this entry's client has to wait.
    Waiting,
    /// The entry is the first of its queue, or existed before this call. Dropping the value doesn't
    /// delete the entry's key.
    Kept,
}

/// Returns the range of the keys of all entries in a queue.
pub(super) fn queue_range(name: &[u8]) -> (Bytes, Bytes) {
    let below = |last: u8| [name, &[last]].concat().into();
    // All keys of the queue begin with the name and `/`. The range ends at the name and the
    // character after `/`.
    (below(b'/'), below(b'/' + 1))
}

/// Returns the key of a lease's entry in a queue.
fn key_of(name: &[u8], lease: i64) -> Bytes {
    let mut key = BytesMut::from(name);
    key.put_u8(b'/');
    // The lease ID is written as Go writes a signed number in hexadecimal, because other clients
    // compute the same key.
    let sign = if lease < 0 { "-" } else { "" };
    key.put_slice(format!("{sign}{:x}", lease.unsigned_abs()).as_bytes());
    key.freeze()
}

fn op(request: Op) -> RequestOp {
    RequestOp { request: Some(request) }
}

fn compare_create_revision(key: &Bytes, revision: i64) -> Compare {
    Compare {
        result: CompareResult::Equal.into(),
        target: CompareTarget::Create.into(),
        key: key.clone(),
        target_union: Some(TargetUnion::CreateRevision(revision)),
        ..Compare::default()
    }
}

/// Makes a transaction that writes `value` to the key, if the key was created at `revision`.
pub(super) fn put_if_created_at(key: Bytes, revision: i64, value: Bytes, lease: i64) -> TxnRequest {
    TxnRequest {
        compare: vec![compare_create_revision(&key, revision)],
        success: vec![op(Op::RequestPut(PutRequest {
            key,
            value,
            lease,
            ..PutRequest::default()
        }))],
        ..TxnRequest::default()
    }
}

/// Makes a watch of everything after a revision.
pub(super) fn watch_after(revision: i64, range: KeyRange) -> WatchSpec {
    WatchSpec {
        range,
        start_revision: revision + 1,
        no_put: false,
        no_delete: false,
        progress_notify: false,
    }
}

/// Makes a transaction that deletes the key, if the key was created at `revision`.
pub(super) fn delete_if_created_at(key: Bytes, revision: i64) -> TxnRequest {
    TxnRequest {
        compare: vec![compare_create_revision(&key, revision)],
        success: vec![op(Op::RequestDeleteRange(DeleteRangeRequest {
            key,
            ..DeleteRangeRequest::default()
        }))],
        ..TxnRequest::default()
    }
}

pub(super) fn revision(of: Option<&ResponseHeader>) -> i64 {
    of.map_or(0, |header| header.revision)
}

impl LockQueues {
    pub(super) fn new(context: Arc<ApiContext>, lease: LeaseService, tasks: TaskTracker) -> Self {
        let kv = Arc::new(KvService(context.clone()));
        Self { context, kv, lease_service: lease, tasks }
    }

    pub(super) async fn txn(
        &self,
        txn: TxnRequest,
        call: &mut CallContext,
    ) -> Result<TxnResponse, Error> {
        self.context.allow(&txn, call).await?;
        self.kv.txn(txn, call).await
    }

    pub(super) async fn delete(
        &self,
        delete: DeleteRangeRequest,
        call: &mut CallContext,
    ) -> Result<DeleteRangeResponse, Error> {
        self.context.allow(&delete, call).await?;
        self.kv.delete(delete, call).await
    }

    /// Returns the client's lease; if it names none, grants a new one.
    pub(super) async fn lease_or_grant(
        &self,
        id: i64,
        call: &mut CallContext,
    ) -> Result<i64, Error> {
        if id != 0 {
            return Ok(id);
        }
        let grant = LeaseGrantRequest { id: 0, ttl: DEFAULT_LEASE_TTL };
        Ok(self.lease_service.grant(grant, call).await?.id)
    }

    /// Reads the first entry of a queue. Its client holds the lock or leads.
    pub(super) async fn read_first_entry(
        &self,
        name: &[u8],
        call: &mut CallContext,
    ) -> Result<RangeResponse, Error> {
        let (key, range_end) = queue_range(name);
        let request = RangeRequest {
            key,
            range_end,
            limit: 1,
            sort_order: SortOrder::Ascend.into(),
            sort_target: SortTarget::Create.into(),
            ..RangeRequest::default()
        };
        self.kv.range(&request, call).await
    }

    /// Appends an entry for the lease to the queue, or returns the lease's existing entry. The
    /// caller must have permission to read all entries; otherwise it couldn't wait for its turn.
    pub(super) async fn enter(
        &self,
        name: &Bytes,
        lease: i64,
        value: Bytes,
        call: &mut CallContext,
    ) -> Result<QueueEntry, Error> {
        let (first, range_end) = queue_range(name);
        let line = RangeRequest { key: first, range_end, ..RangeRequest::default() };
        self.context.allow(&line, call).await?;
        let key = key_of(name, lease);
        let found = RangeRequest { key: key.clone(), ..RangeRequest::default() };
        let entry = TxnRequest {
            failure: vec![op(Op::RequestRange(found))],
            ..put_if_created_at(key.clone(), 0, value, lease)
        };
        // A separate task creates the queue entry. If the client leaves meanwhile, the entry may
        // exist already and must be deleted. `QueueEntry::drop` does that.
        let (told, hears) = oneshot::channel();
        let (line, name, mut call) = (self.clone(), name.clone(), call.another_of_same_call());
        self.tasks.spawn(async move {
            let entered = async {
                let answer = line.txn(entry, &mut call).await?;
                let entered = revision(answer.header.as_ref());
                let (created, value, turn) = match existing_key(answer) {
                    Some(found) => (found.create_revision, Some(found.value), EntryState::Kept),
                    None => (entered, None, EntryState::Unknown),
                };
                let line = line.clone();
                Ok(QueueEntry {
                    queues: line,
                    name,
                    key,
                    created,
                    entry_revision: entered,
                    value,
                    state: turn,
                })
            };
            let stop = line.context.stop.clone();
            let result = stop.run_until_cancelled(entered).await.unwrap_or(Err(Error::Stopped));
            let _ = told.send(result);
        });
        hears.await.unwrap_or(Err(Error::Stopped))
    }

    /// Returns a subscriber with one watch.
    pub(super) fn watch(&self, account: Arc<MemoryAccount>, spec: WatchSpec) -> Subscriber {
        let mut watch = self.context.hub.subscribe_for(account);
        watch.add(WATCH_ID, spec);
        watch
    }

    /// Waits until a key that existed at the revision `seen_at` is deleted. Also returns if a
    /// compaction has possibly hidden the deletion.
    async fn wait_until_deleted(&self, key: Bytes, seen_at: i64) -> Result<(), Error> {
        let only = KeyRange::new(key, Bytes::new());
        let spec = WatchSpec { no_put: true, ..watch_after(seen_at, only) };
        let mut watch = self.watch(MemoryAccount::unbounded(), spec);
        let mut refused = watch_for_refusal(&self.context, false);
        loop {
            let notice = tokio::select! {
                notice = watch.next() => notice?,
                why = &mut refused => return Err(why),
                () = self.context.stop.cancelled() => return Err(Error::Stopped),
            };
            match notice {
                // `Compacted` means that the deletion is possibly among the compacted revisions.
                // After an event or `Compacted`, the caller reads the queue again.
                Notice::Events { .. } | Notice::Compacted { .. } => return Ok(()),
                Notice::Progress { .. } | Notice::WatchProgress { .. } => {}
            }
        }
    }
}

/// Returns the existing key, if the transaction found it instead of creating it.
fn existing_key(mut answer: TxnResponse) -> Option<KeyValue> {
    use node_proto::etcdserverpb::response_op::Response;
    if answer.succeeded {
        return None;
    }
    match answer.responses.pop()?.response? {
        Response::ResponseRange(mut found) => found.kvs.pop(),
        _ => None,
    }
}

impl QueueEntry {
    pub(super) fn key(&self) -> &Bytes {
        &self.key
    }

    pub(super) fn created(&self) -> i64 {
        self.created
    }

    pub(super) fn entry_revision(&self) -> i64 {
        self.entry_revision
    }

    /// Returns the value that the key had, if it existed already.
    pub(super) fn value(&self) -> Option<&Bytes> {
        self.value.as_ref()
    }

    /// Waits until no entry of the queue is before this one.
    ///
    /// Reading this member's own store is enough, since it already has this entry's key. A key that
    /// is deleted and created again gets a higher create revision, so it comes after this entry.
    async fn wait_for_predecessors(&mut self, call: &mut CallContext) -> Result<(), Error> {
        let before = predecessor_request(&self.name, self.created);
        loop {
            let mut found = self.queues.kv.range(&before, call).await?;
            let seen_at = revision(found.header.as_ref());
            let Some(last) = found.kvs.pop() else { return Ok(()) };
            self.state = EntryState::Waiting;
            call.charge(0)?;
            self.queues.wait_until_deleted(last.key, seen_at).await?;
        }
    }

    /// Waits until this entry is the first of its queue, and returns the revision at which that was
    /// seen. Returns `None` if the entry no longer exists.
    pub(super) async fn wait_for_turn(
        &mut self,
        call: &mut CallContext,
    ) -> Result<Option<i64>, Error> {
        self.wait_for_predecessors(call).await?;
        if self.state != EntryState::Waiting {
            self.state = EntryState::Kept;
            return Ok(Some(self.entry_revision));
        }
        // While the queue entry waited, its lease may have expired, which deletes the entry. So the
        // entry's key is read again.
        let own = RangeRequest { key: self.key.clone(), ..RangeRequest::default() };
        let found = self.queues.kv.range(&own, call).await?;
        let is_there = found.kvs.first().is_some_and(|kv| kv.create_revision == self.created);
        self.state = EntryState::Kept;
        Ok(is_there.then(|| revision(found.header.as_ref())))
    }
}

impl Drop for QueueEntry {
    fn drop(&mut self) {
        // When this member stops, the entry stays in its queue. Its client may reconnect to another
        // member with the same lease, and finds the entry there.
        if self.state == EntryState::Kept || self.queues.context.stop.is_cancelled() {
            return;
        }
        let (context, line) = (self.queues.context.clone(), self.queues.clone());
        let give_up = delete_if_created_at(self.key.clone(), self.created);
        // If the entry is the first of its queue, its key isn't deleted: the client holds the lock,
        // and has possibly called again already.
        let unless_first = (self.state == EntryState::Unknown)
            .then(|| predecessor_request(&self.name, self.created));
        self.queues.tasks.spawn(async move {
            let leave = async {
                if let Some(before) = unless_first
                    && line.is_first(&before).await
                {
                    return;
                }
                line.give_up(give_up).await;
            };
            context.stop.run_until_cancelled(leave).await;
        });
    }
}

/// Makes the request for the entry just before the entry that was created at `created`.
fn predecessor_request(name: &[u8], created: i64) -> RangeRequest {
    let (key, range_end) = queue_range(name);
    RangeRequest {
        key,
        range_end,
        limit: 1,
        sort_order: SortOrder::Descend.into(),
        sort_target: SortTarget::Create.into(),
        max_create_revision: created - 1,
        keys_only: true,
        serializable: true,
        ..RangeRequest::default()
    }
}

impl LockQueues {
    /// Whether an entry is the first of its queue: `before`, the request for its predecessor, finds
    /// none. Returns false if that can't be determined.
    async fn is_first(&self, before: &RangeRequest) -> bool {
        let found = self.kv.range(before, &mut CallContext::for_member()).await;
        found.is_ok_and(|found| found.kvs.is_empty())
    }

    /// Deletes an abandoned entry. This member does so in its own name, since the client's token
    /// may be invalid by now.
    async fn give_up(&self, delete: TxnRequest) {
        for _ in 0..DELETE_ATTEMPTS {
            match self.txn(delete.clone(), &mut CallContext::for_member()).await {
                Ok(_) => return,
                Err(error) => {
                    tracing::debug!(text = %error.text(), "a place in line is yet to be given up");
                    tokio::time::sleep(DELETE_RETRY_INTERVAL).await;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_keys_have_the_same_names_as_in_etcd() {
        assert_eq!(key_of(b"a", 0x77), "a/77");
        assert_eq!(key_of(b"", 1), "/1");
        assert_eq!(key_of(b"a/b", i64::MAX), "a/b/7fffffffffffffff");
        assert_eq!(key_of(b"a", -1), "a/-1");
        assert_eq!(key_of(b"a", i64::MIN), "a/-8000000000000000");
        assert_eq!(queue_range(b"a"), (Bytes::from("a/"), Bytes::from("a0")));
    }
}
