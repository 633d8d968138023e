//! Random requests of the clients. There are few keys, so that clients conflict. Each put has a
//! unique value, which identifies it later.

use std::collections::BTreeMap;

use bytes::Bytes;
use node_proto::command::Operation;
use node_proto::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use node_proto::etcdserverpb::request_op::Request as Op;
use node_proto::etcdserverpb::{
    Compare, DeleteRangeRequest, LeaseGrantRequest, LeaseRevokeRequest, PutRequest, RangeRequest,
    RequestOp, TxnRequest,
};
use node_proto::mvccpb::KeyValue;
use node_state::apply::Response;

use super::super::{Answer, Request, RequestOutcome, RequestedOperation};
use crate::rng::Rng;

/// Prefix of keys that all clients use.
pub(super) const PLAIN_PREFIX: &str = "k/";
/// Prefix of the keys that the limited user may use.
pub(super) const LIMITED_PREFIX: &str = "p/";
/// Prefix of keys with leases. Such a key is deleted only when its lease ends, so the cause of each
/// deletion is known.
pub(super) const LEASED_PREFIX: &str = "l/";
/// Number of keys of each prefix.
const KEYS: u64 = 10;
/// TTL in seconds of a lease that expires during the recording. A lease with `LONG_TTL` doesn't
/// expire before the end.
const SHORT_TTL: i64 = 2;
const LONG_TTL: i64 = 600;
/// Size of each client's range of lease ids.
const LEASE_IDS_PER_CLIENT: i64 = 1_000_000;

/// Returns the end of the range of all keys with this prefix.
pub(super) fn range_end_of_prefix(prefix: &str) -> Bytes {
    Bytes::from([&prefix.as_bytes()[..prefix.len() - 1], b"0"].concat())
}

/// Generator of one client's requests.
pub(super) struct RequestGenerator {
    client: usize,
    /// Whether the client's user may use [`LIMITED_PREFIX`] only. The client also tries other keys.
    is_limited: bool,
    rng: Rng,
    put_count: u64,
    /// Newest revision that the client knows.
    known_revision: i64,
    /// Key-value pairs that the client has read.
    known_records: BTreeMap<Bytes, KeyValue>,
    lease: Option<i64>,
    lease_count: i64,
}

impl RequestGenerator {
    pub(super) fn new(client: usize, is_limited: bool, rng: Rng) -> Self {
        let known_records = BTreeMap::new();
        Self {
            client,
            is_limited,
            rng,
            put_count: 0,
            known_revision: 1,
            known_records,
            lease: None,
            lease_count: 0,
        }
    }

    pub(super) fn next(&mut self) -> RequestedOperation {
        let prefix = self.prefix();
        match self.rng.range(0, 100) {
            0..28 => {
                let key = self.key(prefix);
                let put = self.put(key);
                RequestedOperation::Write(Operation::Put(put))
            }
            28..36 => RequestedOperation::Write(Operation::DeleteRange(self.delete(prefix))),
            36..52 => RequestedOperation::Write(Operation::Txn(self.txn(prefix))),
            52..66 if !self.is_limited => RequestedOperation::Write(self.draw_leased_operation()),
            _ => {
                let mut request = self.range(prefix);
                request.serializable = self.rng.chance(300);
                RequestedOperation::Read(request)
            }
        }
    }

    /// Updates the generator's knowledge from the outcome of a request.
    pub(super) fn observe_outcome(&mut self, request: &Request) {
        if let Some((answer, revision)) = request.answer() {
            self.known_revision = self.known_revision.max(revision);
            if let Answer::Read(found) = answer {
                self.known_records.extend(found.kvs.iter().map(|kv| (kv.key.clone(), kv.clone())));
            }
            if let Answer::Write(Response::LeaseGrant(granted)) = answer {
                self.lease = Some(granted.id);
            }
        }
        // The client stops using a lease once it has revoked the lease, or a put with this lease
        // was refused.
        let may_have_ended = match &request.operation {
            RequestedOperation::Write(Operation::LeaseRevoke(_)) => true,
            RequestedOperation::Write(Operation::Put(put)) => {
                put.lease != 0 && matches!(request.outcome, RequestOutcome::Refused { .. })
            }
            _ => false,
        };
        if may_have_ended {
            self.lease = None;
        }
    }

    fn prefix(&mut self) -> &'static str {
        match (self.is_limited, self.rng.range(0, 100)) {
            (true, 0..80) | (false, 0..30) => LIMITED_PREFIX,
            _ => PLAIN_PREFIX,
        }
    }

    fn key(&mut self, prefix: &str) -> Bytes {
        Bytes::from(format!("{prefix}{}", self.rng.range(0, KEYS)))
    }

    fn number_below(&mut self, bound: u64) -> i64 {
        i64::try_from(self.rng.range(0, bound)).expect("it is small")
    }

    fn put(&mut self, key: Bytes) -> PutRequest {
        self.put_count += 1;
        let value = Bytes::from(format!("{}.{}", self.client, self.put_count));
        PutRequest { key, value, prev_kv: self.rng.chance(500), ..PutRequest::default() }
    }

    fn delete(&mut self, prefix: &str) -> DeleteRangeRequest {
        let key = self.key(prefix);
        let range_end = if self.rng.chance(150) { self.key(prefix) } else { Bytes::new() };
        DeleteRangeRequest { key, range_end, prev_kv: self.rng.chance(500) }
    }

    fn range(&mut self, prefix: &str) -> RangeRequest {
        let everything = Bytes::from_static(b"\0");
        let (key, range_end) = match self.rng.range(0, 100) {
            0..40 => (self.key(prefix), Bytes::new()),
            40..65 => (Bytes::from(prefix.to_owned()), range_end_of_prefix(prefix)),
            65..80 => (Bytes::from(LEASED_PREFIX), range_end_of_prefix(LEASED_PREFIX)),
            80..90 => (self.key(prefix), self.key(prefix)),
            _ => (everything.clone(), everything),
        };
        let mut request = RangeRequest { key, range_end, ..RangeRequest::default() };
        match self.rng.range(0, 100) {
            0..15 => request.revision = (self.known_revision - self.number_below(60)).max(1),
            15..25 => request.limit = 1 + self.number_below(5),
            25..30 => request.count_only = true,
            30..35 => request.keys_only = true,
            _ => {}
        }
        request
    }

    fn draw_leased_operation(&mut self) -> Operation {
        let Some(lease) = self.lease else {
            self.lease_count += 1;
            let client = i64::try_from(self.client).expect("there are few");
            let id = (client + 1) * LEASE_IDS_PER_CLIENT + self.lease_count;
            let ttl = if self.rng.chance(500) { SHORT_TTL } else { LONG_TTL };
            return Operation::LeaseGrant(LeaseGrantRequest { id, ttl });
        };
        if self.rng.chance(200) {
            return Operation::LeaseRevoke(LeaseRevokeRequest { id: lease });
        }
        let key = self.key(LEASED_PREFIX);
        Operation::Put(PutRequest { lease, ..self.put(key) })
    }

    /// Draws a transaction. Each branch that deletes a key also puts one, because the put's value
    /// identifies the transaction.
    fn txn(&mut self, prefix: &'static str) -> TxnRequest {
        let compares = 1 + self.rng.pick(2);
        let compare = (0..compares).map(|_| self.compare(prefix)).collect();
        let only_reads = self.rng.chance(200);
        let success = self.branch(prefix, only_reads);
        let only_reads = only_reads || self.rng.chance(500);
        TxnRequest { compare, success, failure: self.branch(prefix, only_reads) }
    }

    fn branch(&mut self, prefix: &'static str, only_reads: bool) -> Vec<RequestOp> {
        let mut range = self.range(prefix);
        // A read of an old revision would not show the changes that the branch itself makes.
        range.revision = 0;
        let mut ops = vec![Op::RequestRange(range)];
        if !only_reads {
            let (to_put, to_delete) = (self.key(prefix), self.key(prefix));
            let put = self.put(to_put.clone());
            ops.insert(self.rng.pick(2), Op::RequestPut(put));
            if to_delete != to_put && self.rng.chance(500) {
                let prev_kv = self.rng.chance(500);
                let delete = DeleteRangeRequest { key: to_delete, prev_kv, ..Default::default() };
                ops.insert(self.rng.pick(3), Op::RequestDeleteRange(delete));
            }
        }
        ops.into_iter().map(|request| RequestOp { request: Some(request) }).collect()
    }

    fn compare(&mut self, prefix: &str) -> Compare {
        let key = self.key(prefix);
        let record = self.known_records.get(&key).cloned().unwrap_or_default();
        let (target, union) = match self.rng.range(0, 5) {
            0 => (CompareTarget::Version, TargetUnion::Version(self.number_below(4))),
            1 => (CompareTarget::Version, TargetUnion::Version(record.version)),
            2 => (CompareTarget::Create, TargetUnion::CreateRevision(record.create_revision)),
            3 => (CompareTarget::Mod, TargetUnion::ModRevision(record.mod_revision)),
            _ => (CompareTarget::Value, TargetUnion::Value(record.value)),
        };
        let result = match self.rng.range(0, 4) {
            0 | 1 => CompareResult::Equal,
            2 => CompareResult::Greater,
            _ => CompareResult::NotEqual,
        };
        Compare {
            result: result.into(),
            target: target.into(),
            key,
            target_union: Some(union),
            ..Compare::default()
        }
    }
}
