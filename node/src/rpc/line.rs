//! Standing in line for a lock or an election: a key below the name for each who does, on a lease.
//! Whose key was made first has what the line is for, and the next one waits until that key is gone
//! (client/v3/concurrency in etcd).

use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use node_proto::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use node_proto::etcdserverpb::range_request::{SortOrder, SortTarget};
use node_proto::etcdserverpb::request_op::Request as Op;
use node_proto::etcdserverpb::{
    Compare, DeleteRangeRequest, DeleteRangeResponse, LeaseGrantRequest, PutRequest, RangeRequest,
    RangeResponse, RequestOp, ResponseHeader, TxnRequest, TxnResponse,
};
use node_proto::mvccpb::KeyValue;
use tokio::sync::oneshot;
use tokio_util::task::TaskTracker;
use tonic::Status;

use super::context::{Context, Held};
use super::error::Error;
use super::kv::Kv;
use super::lease::Lease;
use super::watch::until_refused;
use crate::mvcc::KeyRange;
use crate::mvcc::watch::{Notice, Subscriber, WatchSpec};
use crate::shares::Account;

/// Who names no lease is given one of so many seconds, which nobody keeps alive (etcd's).
const OWN_LEASE_TTL: i64 = 60;
/// A place that is given up while nobody leads is tried again so many times, and then left to its lease.
const GIVE_UP_TRIES: usize = 30;
/// Between two of these.
const GIVE_UP_AGAIN: Duration = Duration::from_secs(1);
/// The only watch of its stream.
const WATCH: i64 = 0;

/// A refusal of these services: etcd's text, and gRPC `Unknown` whatever it is, since etcd's own are
/// clients of it and pass on no code.
pub(super) struct Refusal(Error);

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl From<Refusal> for Status {
    fn from(Refusal(error): Refusal) -> Self {
        Self::unknown(error.text())
    }
}

/// What both services are made of.
#[derive(Clone)]
pub(super) struct Line {
    pub(super) context: Arc<Context>,
    kv: Arc<Kv>,
    lease: Lease,
    tasks: TaskTracker,
}

/// A key in line. Given up when it is dropped while it waits: the client is gone, or is told that it
/// failed. Who need not wait has what the line is for, perhaps since an earlier call, and keeps it.
pub(super) struct Place {
    line: Line,
    name: Bytes,
    key: Bytes,
    /// The revision that made it.
    created: i64,
    /// The revision at which it was made, or found.
    entered: i64,
    /// What it held, if it was found.
    value: Option<Bytes>,
    turn: Turn,
}

/// Whether a place has to wait.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// It was made, and nobody has looked yet who is before it.
    Unknown,
    /// Somebody is.
    Waits,
    /// Nobody is, or its turn has come.
    Here,
}

/// The keys of everybody who stands in line.
pub(super) fn everybody(name: &[u8]) -> (Bytes, Bytes) {
    let below = |last: u8| [name, &[last]].concat().into();
    // The character after the separator ends the prefix.
    (below(b'/'), below(b'/' + 1))
}

/// One place of the line of this name.
fn key_of(name: &[u8], lease: i64) -> Bytes {
    let mut key = BytesMut::from(name);
    key.put_u8(b'/');
    // As Go prints a signed number in hexadecimal digits.
    let sign = if lease < 0 { "-" } else { "" };
    key.put_slice(format!("{sign}{:x}", lease.unsigned_abs()).as_bytes());
    key.freeze()
}

fn op(request: Op) -> RequestOp {
    RequestOp { request: Some(request) }
}

fn created(key: &Bytes, revision: i64) -> Compare {
    Compare {
        result: CompareResult::Equal.into(),
        target: CompareTarget::Create.into(),
        key: key.clone(),
        target_union: Some(TargetUnion::CreateRevision(revision)),
        ..Compare::default()
    }
}

/// A key with what it is said to hold, for as long as it is the one that was made then.
pub(super) fn put_if_still(key: Bytes, revision: i64, value: Bytes, lease: i64) -> TxnRequest {
    TxnRequest {
        compare: vec![created(&key, revision)],
        success: vec![op(Op::RequestPut(PutRequest {
            key,
            value,
            lease,
            ..PutRequest::default()
        }))],
        ..TxnRequest::default()
    }
}

/// To watch what happens after a revision.
pub(super) fn whatever_after(revision: i64, range: KeyRange) -> WatchSpec {
    WatchSpec {
        range,
        start_revision: revision + 1,
        no_put: false,
        no_delete: false,
        progress_notify: false,
    }
}

/// Deletes a key, if it is the one that was made then.
pub(super) fn delete_if_still(key: Bytes, revision: i64) -> TxnRequest {
    TxnRequest {
        compare: vec![created(&key, revision)],
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

impl Line {
    pub(super) fn new(context: Arc<Context>, lease: Lease, tasks: TaskTracker) -> Self {
        let kv = Arc::new(Kv(context.clone()));
        Self { context, kv, lease, tasks }
    }

    pub(super) async fn txn(&self, txn: TxnRequest, held: &mut Held) -> Result<TxnResponse, Error> {
        self.context.allow(&txn, held).await?;
        self.kv.txn(txn, held).await
    }

    pub(super) async fn delete(
        &self,
        delete: DeleteRangeRequest,
        held: &mut Held,
    ) -> Result<DeleteRangeResponse, Error> {
        self.context.allow(&delete, held).await?;
        self.kv.delete(delete, held).await
    }

    /// The lease to stand on: the one that is named, or one of its own.
    pub(super) async fn lease(&self, id: i64, held: &mut Held) -> Result<i64, Error> {
        if id != 0 {
            return Ok(id);
        }
        let grant = LeaseGrantRequest { id: 0, ttl: OWN_LEASE_TTL };
        Ok(self.lease.grant(grant, held).await?.id)
    }

    /// Who has what the line is for.
    pub(super) async fn first(&self, name: &[u8], held: &mut Held) -> Result<RangeResponse, Error> {
        let (key, range_end) = everybody(name);
        let request = RangeRequest {
            key,
            range_end,
            limit: 1,
            sort_order: SortOrder::Ascend.into(),
            sort_target: SortTarget::Create.into(),
            ..RangeRequest::default()
        };
        self.kv.range(&request, held).await
    }

    /// A place at the end of the line, or the one that this lease has. Who may not see everybody in it
    /// gets none: nobody could wait for a turn then.
    pub(super) async fn enter(
        &self,
        name: &Bytes,
        lease: i64,
        value: Bytes,
        held: &mut Held,
    ) -> Result<Place, Error> {
        let (first, range_end) = everybody(name);
        let line = RangeRequest { key: first, range_end, ..RangeRequest::default() };
        self.context.allow(&line, held).await?;
        let key = key_of(name, lease);
        let found = RangeRequest { key: key.clone(), ..RangeRequest::default() };
        let entry = TxnRequest {
            failure: vec![op(Op::RequestRange(found))],
            ..put_if_still(key.clone(), 0, value, lease)
        };
        // Who leaves meanwhile may have a place already, which somebody has to give up.
        let (told, hears) = oneshot::channel();
        let (line, name, mut held) = (self.clone(), name.clone(), held.again());
        self.tasks.spawn(async move {
            let entered = async {
                let answer = line.txn(entry, &mut held).await?;
                let entered = revision(answer.header.as_ref());
                let (created, value, turn) = match here(answer) {
                    Some(found) => (found.create_revision, Some(found.value), Turn::Here),
                    None => (entered, None, Turn::Unknown),
                };
                let line = line.clone();
                Ok(Place { line, name, key, created, entered, value, turn })
            };
            let stop = line.context.stop.clone();
            let result = stop.run_until_cancelled(entered).await.unwrap_or(Err(Error::Stopped));
            let _ = told.send(result);
        });
        hears.await.unwrap_or(Err(Error::Stopped))
    }

    /// A stream of one watch.
    pub(super) fn watch(&self, account: Arc<Account>, spec: WatchSpec) -> Subscriber {
        let mut watch = self.context.hub.subscribe_for(account);
        watch.add(WATCH, spec);
        watch
    }

    /// Waits until a key that was there at a revision is not.
    async fn gone(&self, key: Bytes, seen_at: i64) -> Result<(), Error> {
        let only = KeyRange::new(key, Bytes::new());
        let spec = WatchSpec { no_put: true, ..whatever_after(seen_at, only) };
        let mut watch = self.watch(Account::unbounded(), spec);
        let mut refused = until_refused(&self.context, false);
        loop {
            let notice = tokio::select! {
                notice = watch.next() => notice?,
                why = &mut refused => return Err(why),
                () = self.context.stop.cancelled() => return Err(Error::Stopped),
            };
            match notice {
                // What has been compacted since has to be looked at anew.
                Notice::Events { .. } | Notice::Compacted { .. } => return Ok(()),
                Notice::Progress { .. } | Notice::WatchProgress { .. } => {}
            }
        }
    }
}

/// The key, where a transaction found it instead of making it.
fn here(mut answer: TxnResponse) -> Option<KeyValue> {
    use node_proto::etcdserverpb::response_op::Response;
    if answer.succeeded {
        return None;
    }
    match answer.responses.pop()?.response? {
        Response::ResponseRange(mut found) => found.kvs.pop(),
        _ => None,
    }
}

impl Place {
    pub(super) fn key(&self) -> &Bytes {
        &self.key
    }

    pub(super) fn created(&self) -> i64 {
        self.created
    }

    pub(super) fn entered(&self) -> i64 {
        self.entered
    }

    /// What it held before, if it was there.
    pub(super) fn value(&self) -> Option<&Bytes> {
        self.value.as_ref()
    }

    /// Waits until nobody is before it.
    ///
    /// This member's own store will do: it has the key, and who is not in line there any more never
    /// comes before that again.
    async fn come_up(&mut self, held: &mut Held) -> Result<(), Error> {
        let before = before(&self.name, self.created);
        loop {
            let mut found = self.line.kv.range(&before, held).await?;
            let seen_at = revision(found.header.as_ref());
            let Some(last) = found.kvs.pop() else { return Ok(()) };
            self.turn = Turn::Waits;
            held.hold(0)?;
            self.line.gone(last.key, seen_at).await?;
        }
    }

    /// Waits for its turn: the revision at which it was seen to have it, `None` if it is not there any
    /// more.
    pub(super) async fn turn(&mut self, held: &mut Held) -> Result<Option<i64>, Error> {
        self.come_up(held).await?;
        if self.turn != Turn::Waits {
            self.turn = Turn::Here;
            return Ok(Some(self.entered));
        }
        // Its lease may have ended meanwhile.
        let own = RangeRequest { key: self.key.clone(), ..RangeRequest::default() };
        let found = self.line.kv.range(&own, held).await?;
        let is_there = found.kvs.first().is_some_and(|kv| kv.create_revision == self.created);
        self.turn = Turn::Here;
        Ok(is_there.then(|| revision(found.header.as_ref())))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // A client of a member that goes down comes again elsewhere, with the same lease, and has its
        // place still.
        if self.turn == Turn::Here || self.line.context.stop.is_cancelled() {
            return;
        }
        let (context, line) = (self.line.context.clone(), self.line.clone());
        let give_up = delete_if_still(self.key.clone(), self.created);
        // Whoever is first has it, and may be asking again by now.
        let unless_first = (self.turn == Turn::Unknown).then(|| before(&self.name, self.created));
        self.line.tasks.spawn(async move {
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

/// Who is the last before the one who came at `created`.
fn before(name: &[u8], created: i64) -> RangeRequest {
    let (key, range_end) = everybody(name);
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

impl Line {
    /// Whether nobody is before; not, if that can't be said.
    async fn is_first(&self, before: &RangeRequest) -> bool {
        let found = self.kv.range(before, &mut Held::by_member()).await;
        found.is_ok_and(|found| found.kvs.is_empty())
    }

    /// By this member, which made it: whoever asked for it may have no token any more.
    async fn give_up(&self, delete: TxnRequest) {
        for _ in 0..GIVE_UP_TRIES {
            match self.txn(delete.clone(), &mut Held::by_member()).await {
                Ok(_) => return,
                Err(error) => {
                    tracing::debug!(text = %error.text(), "a place in line is yet to be given up");
                    tokio::time::sleep(GIVE_UP_AGAIN).await;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_named_as_etcds() {
        assert_eq!(key_of(b"a", 0x77), "a/77");
        assert_eq!(key_of(b"", 1), "/1");
        assert_eq!(key_of(b"a/b", i64::MAX), "a/b/7fffffffffffffff");
        assert_eq!(key_of(b"a", -1), "a/-1");
        assert_eq!(key_of(b"a", i64::MIN), "a/-8000000000000000");
        assert_eq!(everybody(b"a"), (Bytes::from("a/"), Bytes::from("a0")));
    }
}
