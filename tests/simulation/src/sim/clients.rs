//! Clients of the simulation. Each client has one request at a time, to any member. The request
//! changes keys, compacts, or reads at the newest or an old revision, with or without a barrier.

use bytes::Bytes;
use node_proto::command::Operation;
use node_proto::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use node_proto::etcdserverpb::request_op::Request;
use node_proto::etcdserverpb::{
    CompactionRequest, Compare, DeleteRangeRequest, LeaseGrantRequest, LeaseRevokeRequest,
    PutRequest, RangeRequest, RequestOp, TxnRequest,
};

use super::leases::PendingRenewal;
use super::users::{AssignedToken, RequestUser};
use crate::rng::Rng;

/// Virtual microseconds after which a client gives up a request. The request's outcome is then
/// unknown.
pub(super) const CLIENT_TIMEOUT: u64 = 1_200_000;

/// Modulus of request ids. An id modulo this number is the machine on which a client waits for the
/// outcome.
const REQUEST_ID_MODULUS: u64 = 64;

/// Machine number in the ids of those requests for whose outcome no client waits.
pub(super) const NO_CLIENT: u64 = 0;

/// A client's request to a member.
#[derive(Clone, Debug)]
pub(super) enum ClientRequest {
    /// Operation to be proposed. `grows` says whether the operation adds data.
    Write { operation: Operation, grows: bool },
    /// Id of a lease to be kept alive.
    KeepAlive(i64),
    /// Range to be read, after a barrier if `linearizable`.
    Read { request: RangeRequest, linearizable: bool },
}

/// A request that isn't answered yet.
#[derive(Clone, Debug)]
pub(super) struct PendingRequest {
    /// Request id of a write, or token of a read; never used twice.
    pub id: u64,
    /// Highest revision that any client knew when the request began.
    pub floor: i64,
    /// Newest revision of users and roles that any client knew when the request began.
    pub users_floor: u64,
    pub node: u64,
    /// Range to be read, if the request is a read.
    pub read: Option<RangeRequest>,
    /// Renewal of a lease, if the request is a keep-alive that a leader has begun to carry out.
    pub renewal: Option<PendingRenewal>,
    /// User that the request is made as.
    pub user: RequestUser,
    /// Whether the request must be answered, because the cluster was steady when it began.
    pub must_be_answered: bool,
}

#[derive(Debug, Default)]
pub(super) struct SimulatedClient {
    pub pending: Option<PendingRequest>,
    /// Lease whose keep-alive was last acknowledged to the client.
    pub kept_lease: Option<i64>,
    /// Token that the client has received for a password.
    pub token: Option<AssignedToken>,
    /// Number of the client's requests that had to be answered, and were answered.
    pub served: u64,
}

pub(super) fn request_id(number: u64, node: u64) -> u64 {
    number * REQUEST_ID_MODULUS + node
}

/// Returns whether a client on machine `node` waits for the outcome of this request.
pub(super) fn is_awaited_on(request: u64, node: u64) -> bool {
    request % REQUEST_ID_MODULUS == node
}

fn key(number: u64) -> Bytes {
    Bytes::from(format!("key-{number}"))
}

/// Random source of clients' requests.
pub(super) struct ClientRequestGenerator<'a> {
    pub rng: &'a mut Rng,
    pub keys: u64,
    /// Highest revision that a client knows.
    pub known: i64,
}

impl ClientRequestGenerator<'_> {
    pub(super) fn draw_request(&mut self, id: u64) -> ClientRequest {
        let operation = match self.rng.range(0, 100) {
            0..34 => {
                let key = self.key();
                Operation::Put(self.put(id, key))
            }
            34..41 => Operation::DeleteRange(self.delete()),
            41..53 => Operation::Txn(self.txn(id)),
            53..57 => {
                let revision = (self.known - self.number_below(12)).max(1);
                Operation::Compact(CompactionRequest { revision, physical: false })
            }
            57..60 => Operation::LeaseGrant(LeaseGrantRequest {
                id: self.lease(),
                ttl: self.number_below(5) + 1,
            }),
            60 => Operation::LeaseRevoke(LeaseRevokeRequest { id: self.lease() }),
            61..67 => return ClientRequest::KeepAlive(self.lease()),
            draw => {
                let request = self.range();
                return ClientRequest::Read { request, linearizable: draw < 90 };
            }
        };
        let grows =
            matches!(operation, Operation::Put(_) | Operation::Txn(_) | Operation::LeaseGrant(_));
        ClientRequest::Write { operation, grows }
    }

    fn number_below(&mut self, bound: u64) -> i64 {
        i64::try_from(self.rng.range(0, bound)).expect("small")
    }

    fn key(&mut self) -> Bytes {
        key(self.rng.range(0, self.keys))
    }

    /// Draws a range: one key, several keys, all keys of a prefix, or all keys from one on.
    pub(super) fn keys(&mut self) -> (Bytes, Bytes) {
        let (from, to) = (self.rng.range(0, self.keys), self.rng.range(0, self.keys + 1));
        match self.rng.range(0, 6) {
            0..2 => (key(from), Bytes::new()),
            2 => (key(from.min(to)), key(from.max(to))),
            3 => (key(from), Bytes::from_static(b"\0")),
            4 => (Bytes::from_static(b"key-"), Bytes::from_static(b"key.")),
            _ => (Bytes::from_static(b"\0"), Bytes::from_static(b"\0")),
        }
    }

    /// Draws one of few lease ids, so that some are granted again after they have ended.
    fn lease(&mut self) -> i64 {
        self.number_below(4) + 1
    }

    /// Draws a put whose value identifies it. Some values are longer than a sector, so that their
    /// write can be torn.
    fn put(&mut self, id: u64, key: Bytes) -> PutRequest {
        let prev_kv = self.rng.chance(200);
        let lease = if self.rng.chance(250) { self.lease() } else { 0 };
        if self.rng.chance(120) {
            return PutRequest { key, prev_kv, lease, ignore_value: true, ..PutRequest::default() };
        }
        let mut value = id.to_be_bytes().to_vec();
        let filler = match self.rng.range(0, 10) {
            0..5 => self.rng.range(0, 60),
            5..9 => self.rng.range(400, 1500),
            _ => self.rng.range(1500, 6000),
        };
        let fill = u8::try_from(id % 250).expect("below 250") + 1;
        value.resize(8 + usize::try_from(filler).expect("small"), fill);
        let ignore_lease = lease == 0 && self.rng.chance(80);
        PutRequest {
            key,
            value: value.into(),
            lease,
            prev_kv,
            ignore_lease,
            ..PutRequest::default()
        }
    }

    fn delete(&mut self) -> DeleteRangeRequest {
        let (key, range_end) = self.keys();
        DeleteRangeRequest { key, range_end, prev_kv: self.rng.chance(300) }
    }

    fn range(&mut self) -> RangeRequest {
        let (key, range_end) = self.keys();
        let revision =
            if self.rng.chance(250) { self.known + 1 - self.number_below(15) } else { 0 };
        RangeRequest {
            key,
            range_end,
            revision: revision.max(0),
            limit: if self.rng.chance(150) { self.number_below(4) } else { 0 },
            keys_only: self.rng.chance(80),
            count_only: self.rng.chance(80),
            ..RangeRequest::default()
        }
    }

    fn txn(&mut self, id: u64) -> TxnRequest {
        let compare = (0..self.rng.range(0, 3)).map(|_| self.compare()).collect();
        TxnRequest { compare, success: self.branch(id), failure: self.branch(id) }
    }

    fn compare(&mut self) -> Compare {
        let (key, range_end) = self.keys();
        let results = [
            CompareResult::Equal,
            CompareResult::NotEqual,
            CompareResult::Greater,
            CompareResult::Less,
        ];
        let near = (self.known - self.number_below(8)).max(0);
        let (target, union) = match self.rng.range(0, 5) {
            4 => (CompareTarget::Lease, TargetUnion::Lease(self.number_below(3))),
            0 => (CompareTarget::Version, TargetUnion::Version(self.number_below(4))),
            1 => (CompareTarget::Create, TargetUnion::CreateRevision(near)),
            2 => (CompareTarget::Mod, TargetUnion::ModRevision(near)),
            _ => {
                let some = self.rng.range(0, 500).to_be_bytes().to_vec();
                (CompareTarget::Value, TargetUnion::Value(some.into()))
            }
        };
        Compare {
            result: results[self.rng.pick(results.len())] as i32,
            target: target as i32,
            key,
            range_end,
            target_union: Some(union),
        }
    }

    /// Draws a transaction's branch: puts of different keys or one delete, and possibly a read. A
    /// branch never has both a put and a delete, because a request that changes a key twice is
    /// refused before it is proposed.
    fn branch(&mut self, id: u64) -> Vec<RequestOp> {
        let mut operations = Vec::new();
        if self.rng.chance(200) {
            operations.push(Request::RequestDeleteRange(self.delete()));
        } else {
            let first = self.rng.range(0, self.keys);
            for number in first..self.keys.min(first + self.rng.range(0, 4)) {
                let put = self.put(id, key(number));
                operations.push(Request::RequestPut(put));
            }
        }
        if self.rng.chance(300) {
            let at = self.rng.pick(operations.len() + 1);
            let range = self.range();
            operations.insert(at, Request::RequestRange(range));
        }
        operations.into_iter().map(|request| RequestOp { request: Some(request) }).collect()
    }
}
