//! Requests drawn from a seed: few keys and many unusual values.
//!
//! Requests that are not drawn:
//! - Alarm kinds and alarm actions that etcd doesn't know: they make etcd panic.
//! - Alarms of members outside the cluster: etcd keeps any number of them, and this node refuses
//!   them.
//! - A member's CORRUPT alarm: in etcd it stops all writes, here only that member stops serving.
//! - Transactions nested deeper than this node's bound.
//! - More than twelve keys: etcd's sort then leaves equal keys in any order.
//! - A compaction at a revision that may have deleted a key and created it again. etcd then removes
//!   the new record while its index still names it. Checksums lack it, and reading the key ends the
//!   server.
//! - A put that keeps a key's value or lease, in a transaction that also deletes to the end of the
//!   key space. etcd doesn't notice that the two may affect one key, and ends if that key is gone.

use std::collections::BTreeSet;

use bytes::Bytes;
use node_proto::etcdserverpb::compare::TargetUnion;
use node_proto::etcdserverpb::request_op::Request;
use node_proto::etcdserverpb::{
    CompactionRequest, Compare, DeleteRangeRequest, LeaseGrantRequest, LeaseTimeToLiveRequest,
    PutRequest, RangeRequest, RequestOp, TxnRequest, WatchCreateRequest,
};

use super::concurrency::ConcurrencyCall;
use super::users::AuthCall;
use crate::rng::Rng;

/// Member that a request names. Each server gives its members other ids, so the id is filled in
/// later.
#[derive(Clone, Copy, Debug)]
pub(super) enum MemberChoice {
    Own,
    Zero,
    Unknown,
}

/// Token that a request carries.
#[derive(Clone, Copy, Debug)]
pub(super) enum TokenChoice {
    NoToken,
    /// The last token stored in this slot, whether it is still valid or not.
    Stored(usize),
    /// A token that was never issued.
    Invalid,
}

/// A request and its caller's token.
#[derive(Clone, Debug)]
pub(super) struct CallWithToken {
    pub(super) token: TokenChoice,
    pub(super) call: EtcdCall,
}

/// One request, as both servers receive it.
#[derive(Clone, Debug)]
pub(super) enum EtcdCall {
    Range(RangeRequest),
    Put(PutRequest),
    Delete(DeleteRangeRequest),
    Txn(TxnRequest),
    Compact(CompactionRequest),
    HashKv(i64),
    Status,
    Alarm {
        action: i32,
        who: MemberChoice,
        alarm: i32,
    },
    MoveLeader(MemberChoice),
    Defragment,
    /// A request to downgrade: action, and a version that no cluster can be downgraded to.
    Downgrade(i32, &'static str),
    LeaseGrant(LeaseGrantRequest),
    LeaseRevoke(i64),
    LeaseKeepAlive(i64),
    LeaseTimeToLive(LeaseTimeToLiveRequest),
    LeaseLeases,
    Watch(Box<WatchCreateRequest>),
    CancelWatch(i64),
    WatchProgress,
    /// Replaces the watch stream by a new one.
    Reopen,
    Auth(AuthCall),
    Concurrency(ConcurrencyCall),
    /// A call with this number that may wait long; its answers are compared as they arrive.
    Begin(u64, ConcurrencyCall),
    /// Opens a stream with this number, which observes all leaders of an election from now on.
    Observe(u64, &'static str),
    /// Drops the client of the call or stream with this number.
    Abandon(u64),
}

/// State of the servers that the next request depends on.
#[derive(Clone, Debug, Default)]
pub(super) struct ServerState {
    pub(super) revision: i64,
    pub(super) compacted: i64,
    pub(super) has_alarms: bool,
    /// Revisions of transactions that both delete and put.
    pub(super) delete_and_put_revisions: BTreeSet<i64>,
}

/// Number of the CORRUPT alarm.
const CORRUPT: i32 = 2;

impl MemberChoice {
    fn from_alarm(alarm: i32) -> Self {
        if alarm == CORRUPT { Self::Zero } else { Self::Own }
    }
}

/// Keys that requests use.
pub(super) const KEYS: &[&str] =
    &["a", "aa", "ab", "b", "b\0", "c", "d", "da", "e", "f", "\0", "z"];

pub(super) struct CallGenerator<'r> {
    pub(super) rng: &'r mut Rng,
    pub(super) known: &'r ServerState,
    pub(super) keys: &'static [&'static str],
    /// Whether to draw only ranges that don't end before they begin.
    pub(super) is_ordered: bool,
}

impl CallGenerator<'_> {
    pub(super) fn draw_call(&mut self) -> EtcdCall {
        if self.known.has_alarms && self.rng.chance(250) {
            let alarm = self.one_of(&[0, 1, CORRUPT]);
            return EtcdCall::Alarm { action: 2, who: MemberChoice::from_alarm(alarm), alarm };
        }
        match self.rng.range(0, 1000) {
            0..20 => EtcdCall::LeaseGrant(self.grant()),
            20..30 => EtcdCall::LeaseRevoke(self.lease()),
            30..40 => EtcdCall::LeaseKeepAlive(self.lease()),
            40..55 => EtcdCall::LeaseTimeToLive(LeaseTimeToLiveRequest {
                id: self.lease(),
                keys: self.rng.chance(700),
            }),
            55..60 => EtcdCall::LeaseLeases,
            60..300 => EtcdCall::Range(self.range()),
            300..480 => EtcdCall::Put(self.put()),
            480..560 => EtcdCall::Delete(self.delete()),
            560..820 => EtcdCall::Txn(self.top_level_txn()),
            820..850 => EtcdCall::Compact(self.compact()),
            850..890 => EtcdCall::HashKv(self.revision()),
            890..900 => EtcdCall::Status,
            900..912 => {
                let (action, alarm) = (self.one_of(&[0, 0, 1, 2]), self.one_of(&[0, 1, CORRUPT]));
                let of_nobody = self.rng.chance(300);
                let who =
                    if of_nobody { MemberChoice::Zero } else { MemberChoice::from_alarm(alarm) };
                EtcdCall::Alarm { action, who, alarm }
            }
            912..920 => EtcdCall::MoveLeader(self.one_of(&[
                MemberChoice::Own,
                MemberChoice::Zero,
                MemberChoice::Unknown,
            ])),
            920..960 => EtcdCall::Watch(Box::new(self.watch())),
            960..980 => EtcdCall::CancelWatch(self.watch_id()),
            980..993 => EtcdCall::WatchProgress,
            993..995 => EtcdCall::Defragment,
            995..997 => EtcdCall::Downgrade(
                self.one_of(&[0, 1, 3]),
                self.one_of(&["", "3", "3.a", "99.9", "99.9.9", "99.9.9-rc.1", "99.9.9.9"]),
            ),
            _ => EtcdCall::Reopen,
        }
    }

    fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.rng.pick(of.len())]
    }

    fn key(&mut self) -> Bytes {
        if self.rng.chance(15) { Bytes::new() } else { self.one_of(self.keys).into() }
    }

    /// Draws the end of a range that begins at `key`.
    fn range_end(&mut self, key: &Bytes) -> Bytes {
        let ends = ["", "", "", "\0", "\0", "b", "c", "e", "zz", "a"];
        let end = Bytes::from(self.one_of(&ends));
        let is_before = end > "\0" && end <= key;
        if self.is_ordered && is_before { Bytes::new() } else { end }
    }

    fn revision(&mut self) -> i64 {
        let &ServerState { revision, compacted, .. } = self.known;
        match self.rng.range(0, 10) {
            0..4 => 0,
            4 => revision,
            5 => revision + self.one_of(&[1, 2, 1000]),
            6 => compacted + self.one_of(&[-1, 0, 1]),
            7 => self.one_of(&[-1, -2, i64::MIN, i64::MAX]),
            _ => revision - i64::try_from(self.rng.range(0, 30)).unwrap_or(0),
        }
    }

    fn draw_revision_bound(&mut self) -> i64 {
        if self.rng.chance(900) { 0 } else { self.revision() }
    }

    fn range(&mut self) -> RangeRequest {
        let key = self.key();
        RangeRequest {
            range_end: self.range_end(&key),
            key,
            limit: self.one_of(&[0, 0, 0, 1, 2, 5, -1]),
            revision: self.revision(),
            sort_order: self.one_of(&[0, 0, 0, 1, 2, 2, 3]),
            sort_target: self.one_of(&[0, 0, 1, 2, 3, 4, 5]),
            serializable: self.rng.chance(300),
            keys_only: self.rng.chance(200),
            count_only: self.rng.chance(150),
            min_mod_revision: self.draw_revision_bound(),
            max_mod_revision: self.draw_revision_bound(),
            min_create_revision: self.draw_revision_bound(),
            max_create_revision: self.draw_revision_bound(),
        }
    }

    fn value(&mut self) -> Bytes {
        match self.rng.range(0, 4) {
            0 => Bytes::new(),
            1 => Bytes::from_static(b"same"),
            _ => self.rng.range(0, 1000).to_string().into(),
        }
    }

    fn put(&mut self) -> PutRequest {
        PutRequest {
            key: self.key(),
            value: self.value(),
            lease: if self.rng.chance(250) { self.lease() } else { 0 },
            prev_kv: self.rng.chance(300),
            ignore_value: self.rng.chance(60),
            ignore_lease: self.rng.chance(60),
        }
    }

    fn lease(&mut self) -> i64 {
        self.one_of(&[1, 2, 3, 3, -4, i64::MAX, 77, 0])
    }

    /// Draws a lease grant. No lease ends during a run, because it would end at different times on
    /// the two servers.
    fn grant(&mut self) -> LeaseGrantRequest {
        let id = self.one_of(&[1, 2, 3, -4, i64::MAX]);
        let ttls = [100_000, 100_000, 100_000, 9_000_000_000, 9_000_000_001, i64::MAX];
        LeaseGrantRequest { id, ttl: self.one_of(&ttls) }
    }

    fn delete(&mut self) -> DeleteRangeRequest {
        let key = self.key();
        DeleteRangeRequest { range_end: self.range_end(&key), key, prev_kv: self.rng.chance(400) }
    }

    fn compare(&mut self) -> Compare {
        let number = self.one_of(&[0, 1, 2, self.known.revision]);
        let result = self.one_of(&[0, 0, 1, 2, 3, 9]);
        let target = self.one_of(&[0, 1, 2, 3, 3, 4, 9]);
        let key = self.key();
        Compare {
            result,
            target,
            range_end: if self.rng.chance(700) { Bytes::new() } else { self.range_end(&key) },
            key,
            target_union: match self.rng.range(0, 6) {
                0 => None,
                1 => Some(TargetUnion::Version(number)),
                2 => Some(TargetUnion::CreateRevision(number)),
                3 => Some(TargetUnion::ModRevision(number)),
                4 => Some(TargetUnion::Lease(self.lease())),
                _ => Some(TargetUnion::Value(self.value())),
            },
        }
    }

    fn operation(&mut self, depth: u32) -> RequestOp {
        let request = match self.rng.range(0, 100) {
            0..35 => Some(Request::RequestRange(self.range())),
            35..65 => Some(Request::RequestPut(self.put())),
            65..85 => Some(Request::RequestDeleteRange(self.delete())),
            85..99 if depth < 3 => Some(Request::RequestTxn(self.txn(depth + 1))),
            85..99 => Some(Request::RequestRange(RangeRequest {
                key: Bytes::from_static(b"a"),
                ..RangeRequest::default()
            })),
            _ => None,
        };
        RequestOp { request }
    }

    fn top_level_txn(&mut self) -> TxnRequest {
        let mut txn = self.txn(0);
        if deletes_to_the_end(&txn) {
            keep_nothing(&mut txn);
        }
        txn
    }

    fn txn(&mut self, depth: u32) -> TxnRequest {
        let compares = self.rng.range(0, 3);
        let (success, failure) = (self.rng.range(0, 4), self.rng.range(0, 3));
        TxnRequest {
            compare: (0..compares).map(|_| self.compare()).collect(),
            success: (0..success).map(|_| self.operation(depth)).collect(),
            failure: (0..failure).map(|_| self.operation(depth)).collect(),
        }
    }

    fn compact(&mut self) -> CompactionRequest {
        let mut revision = match self.rng.range(0, 4) {
            0 => self.revision(),
            _ => self.known.revision - i64::try_from(self.rng.range(0, 12)).unwrap_or(0),
        };
        while self.known.delete_and_put_revisions.contains(&revision) {
            revision -= 1;
        }
        // The compaction is physical, so it has finished when it is answered. With any other
        // compaction, a later checksum might be computed before the compaction has finished.
        CompactionRequest { revision, physical: true }
    }

    fn watch_id(&mut self) -> i64 {
        self.one_of(&[0, 1, 2, 3, 7, -1])
    }

    fn watch(&mut self) -> WatchCreateRequest {
        let key = self.key();
        WatchCreateRequest {
            range_end: self.range_end(&key),
            key,
            start_revision: self.revision(),
            progress_notify: self.rng.chance(200),
            filters: match self.rng.range(0, 8) {
                0 => vec![0],
                1 => vec![1],
                2 => vec![0, 1],
                3 => vec![5],
                _ => Vec::new(),
            },
            prev_kv: self.rng.chance(400),
            watch_id: if self.rng.chance(700) { 0 } else { self.watch_id() },
            fragment: self.rng.chance(200),
        }
    }
}

fn deletes_to_the_end(txn: &TxnRequest) -> bool {
    txn.success.iter().chain(&txn.failure).any(|operation| match &operation.request {
        Some(Request::RequestDeleteRange(delete)) => delete.range_end == "\0",
        Some(Request::RequestTxn(inner)) => deletes_to_the_end(inner),
        Some(Request::RequestRange(_) | Request::RequestPut(_)) | None => false,
    })
}

/// Makes every put of `txn` set its value and lease itself.
fn keep_nothing(txn: &mut TxnRequest) {
    for operation in txn.success.iter_mut().chain(&mut txn.failure) {
        match &mut operation.request {
            Some(Request::RequestPut(put)) => (put.ignore_value, put.ignore_lease) = (false, false),
            Some(Request::RequestTxn(inner)) => keep_nothing(inner),
            Some(Request::RequestRange(_) | Request::RequestDeleteRange(_)) | None => {}
        }
    }
}
