//! Transactions: all comparisons are made first, including nested ones. Then the operations of the
//! chosen branches are carried out (server/etcdserver/txn in etcd).

use bytes::Bytes;
use node_proto::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use node_proto::etcdserverpb::request_op::Request;
use node_proto::etcdserverpb::response_op;
use node_proto::etcdserverpb::{
    Compare, DeleteRangeRequest, DeleteRangeResponse, PutRequest, PutResponse, RangeRequest,
    RequestOp, ResponseHeader, ResponseOp, TxnRequest, TxnResponse,
};
use node_proto::mvccpb::KeyValue;

use super::outcome::{ApplyError, ApplyFailure};
use crate::mvcc::{AnswerBudget, Batch, KeyRange, ReadError};

pub(super) fn response_header(revision: i64) -> Option<ResponseHeader> {
    Some(ResponseHeader { revision, ..ResponseHeader::default() })
}

/// Whether no branch of the transaction writes.
#[must_use]
pub fn is_read_only(request: &TxnRequest) -> bool {
    operations(request).all(|operation| match &operation.request {
        Some(Request::RequestPut(_) | Request::RequestDeleteRange(_)) => false,
        Some(Request::RequestTxn(nested)) => is_read_only(nested),
        _ => true,
    })
}

/// Whether every range of a read-only transaction asks for a serializable read, which this member's
/// state can answer without a quorum.
#[must_use]
pub fn is_serializable(request: &TxnRequest) -> bool {
    operations(request).all(|operation| match &operation.request {
        Some(Request::RequestRange(range)) => range.serializable,
        Some(Request::RequestTxn(nested)) => is_serializable(nested),
        _ => true,
    })
}

/// Whether some branch of the transaction puts a key, which the NOSPACE alarm forbids.
pub(super) fn has_puts(request: &TxnRequest) -> bool {
    operations(request).any(|operation| match &operation.request {
        Some(Request::RequestPut(_)) => true,
        Some(Request::RequestTxn(nested)) => has_puts(nested),
        _ => false,
    })
}

fn operations(request: &TxnRequest) -> impl Iterator<Item = &RequestOp> {
    request.success.iter().chain(&request.failure)
}

/// Evaluates the comparisons of a transaction, and appends to `path` which branch they choose. The
/// branches of nested transactions in the chosen branch follow, in order.
fn choose(batch: &Batch<'_>, request: &TxnRequest, path: &mut Vec<bool>) -> Result<(), ReadError> {
    let mut holds = true;
    for compare in &request.compare {
        let mut comparison = Comparison::new(compare);
        batch.for_each_key(comparison.range(), &mut |kv| comparison.compare_key(kv))?;
        if !comparison.is_satisfied() {
            holds = false;
            break;
        }
    }
    path.push(holds);
    for operation in branch_operations(request, holds) {
        if let Some(Request::RequestTxn(nested)) = &operation.request {
            choose(batch, nested, path)?;
        }
    }
    Ok(())
}

pub(super) fn branch_operations(request: &TxnRequest, success: bool) -> &[RequestOp] {
    if success { &request.success } else { &request.failure }
}

/// A comparison that looks at the keys of its range one by one.
pub(super) struct Comparison<'c> {
    compare: &'c Compare,
    /// Whether the comparison holds for the last key that it was given; `None` before the first
    /// key.
    last_result: Option<bool>,
}

impl<'c> Comparison<'c> {
    pub(super) fn new(compare: &'c Compare) -> Self {
        Self { compare, last_result: None }
    }

    pub(super) fn range(&self) -> KeyRange {
        KeyRange::new(self.compare.key.clone(), self.compare.range_end.clone())
    }

    /// Compares one key. Returns whether the comparison needs to look at more keys.
    pub(super) fn compare_key(&mut self, kv: &KeyValue) -> bool {
        *self.last_result.insert(compare_key_value(self.compare, kv))
    }

    pub(super) fn is_satisfied(&self) -> bool {
        self.last_result.unwrap_or_else(|| {
            // A missing key has no value to compare with, not even an empty one.
            let by_value = self.compare.target() == CompareTarget::Value;
            !by_value && compare_key_value(self.compare, &KeyValue::default())
        })
    }
}

fn compare_key_value(compare: &Compare, kv: &KeyValue) -> bool {
    // As in etcd, a comparison with an unknown target counts as a comparison of equal values.
    let Ok(target) = CompareTarget::try_from(compare.target) else {
        return !matches!(
            CompareResult::try_from(compare.result),
            Ok(CompareResult::NotEqual | CompareResult::Greater | CompareResult::Less)
        );
    };
    // A value whose kind does not match the target is compared as the zero value of the target's
    // kind.
    let number = match (target, &compare.target_union) {
        (CompareTarget::Version, Some(TargetUnion::Version(n)))
        | (CompareTarget::Create, Some(TargetUnion::CreateRevision(n)))
        | (CompareTarget::Mod, Some(TargetUnion::ModRevision(n)))
        | (CompareTarget::Lease, Some(TargetUnion::Lease(n))) => *n,
        _ => 0,
    };
    let order = match target {
        CompareTarget::Version => kv.version.cmp(&number),
        CompareTarget::Create => kv.create_revision.cmp(&number),
        CompareTarget::Mod => kv.mod_revision.cmp(&number),
        CompareTarget::Lease => kv.lease.cmp(&number),
        CompareTarget::Value => match &compare.target_union {
            Some(TargetUnion::Value(value)) => kv.value.cmp(value),
            _ => kv.value.cmp(&Bytes::new()),
        },
    };
    match CompareResult::try_from(compare.result) {
        Ok(CompareResult::Equal) => order.is_eq(),
        Ok(CompareResult::NotEqual) => order.is_ne(),
        Ok(CompareResult::Greater) => order.is_gt(),
        Ok(CompareResult::Less) => order.is_lt(),
        Err(_) => true,
    }
}

/// Iterator over the chosen branches of a transaction and its nested ones, in the order in which
/// `choose` appended them.
struct BranchPath<'p>(std::slice::Iter<'p, bool>);

impl BranchPath<'_> {
    fn next(&mut self) -> bool {
        *self.0.next().expect("the path has a branch for each transaction on it")
    }
}

/// Applies a transaction. A refused transaction changes nothing. Reads for the answer are left out
/// if `room` is `None`, because no caller waits, or if `room` has too little space left.
pub(super) fn apply_txn(
    batch: &mut Batch<'_>,
    request: &TxnRequest,
    room: Option<&mut AnswerBudget<'_>>,
) -> Result<TxnResponse, ApplyFailure> {
    let mut path = Vec::new();
    choose(batch, request, &mut path)?;
    check_path(batch, request, &mut BranchPath(path.iter()))?;
    let mut response = apply_branch(batch, request, &mut BranchPath(path.iter()), room)?;
    response.header = response_header(batch.revision());
    Ok(response)
}

/// Checks whether a transaction is allowed to read at revision `at` in a store at `revision`,
/// compacted at `compacted`.
///
/// Elsewhere a negative revision means the newest one. Here it counts as compacted, as in etcd,
/// except for -1 in a store that was never compacted.
pub(super) fn check_revision(at: i64, revision: i64, compacted: i64) -> Result<(), ReadError> {
    if at > revision {
        Err(ReadError::Future)
    } else if at != 0 && at < compacted {
        Err(ReadError::Compacted)
    } else {
        Ok(())
    }
}

/// Checks everything on the chosen path that could be refused, before the first change is made.
fn check_path(
    batch: &Batch<'_>,
    request: &TxnRequest,
    path: &mut BranchPath<'_>,
) -> Result<(), ApplyFailure> {
    let succeeded = path.next();
    for operation in branch_operations(request, succeeded) {
        match &operation.request {
            Some(Request::RequestPut(put)) => check_put(batch, put)?,
            Some(Request::RequestRange(range)) => {
                check_revision(range.revision, batch.revision(), batch.compact_revision())?;
            }
            Some(Request::RequestTxn(nested)) => check_path(batch, nested, path)?,
            Some(Request::RequestDeleteRange(_)) | None => {}
        }
    }
    Ok(())
}

fn apply_branch(
    batch: &mut Batch<'_>,
    request: &TxnRequest,
    path: &mut BranchPath<'_>,
    mut room: Option<&mut AnswerBudget<'_>>,
) -> Result<TxnResponse, ApplyFailure> {
    use response_op::Response;
    let succeeded = path.next();
    let mut responses = Vec::with_capacity(branch_operations(request, succeeded).len());
    for operation in branch_operations(request, succeeded) {
        let response = match &operation.request {
            Some(Request::RequestRange(range)) => match room.as_deref_mut() {
                Some(room) => batch.range(range, room)?.map(Response::ResponseRange),
                // `check_path` has checked that the range can be read.
                None => None,
            },
            Some(Request::RequestPut(put)) => {
                Some(Response::ResponsePut(apply_put(batch, put, room.as_deref_mut())?))
            }
            Some(Request::RequestDeleteRange(delete)) => {
                let response = apply_delete(batch, delete, room.as_deref_mut())?;
                Some(Response::ResponseDeleteRange(response))
            }
            Some(Request::RequestTxn(nested)) => {
                let response = apply_branch(batch, nested, path, room.as_deref_mut())?;
                Some(Response::ResponseTxn(response))
            }
            None => None,
        };
        responses.push(ResponseOp { response });
    }
    // The header of a nested transaction has no revision, as in etcd.
    Ok(TxnResponse { header: response_header(0), succeeded, responses })
}

/// Checks whether a put has to be refused: for a missing lease, or for a missing key with
/// `ignore_value` or `ignore_lease`.
pub(super) fn check_put(batch: &Batch<'_>, put: &PutRequest) -> Result<(), ApplyError> {
    if put.lease != 0 && batch.lease(put.lease).is_none() {
        return Err(ApplyError::LeaseNotFound);
    }
    if (put.ignore_value || put.ignore_lease) && !batch.has(&put.key) {
        return Err(ApplyError::KeyNotFound);
    }
    Ok(())
}

/// Writes a put that passed [`check_put`].
pub(super) fn apply_put(
    batch: &mut Batch<'_>,
    put: &PutRequest,
    room: Option<&mut AnswerBudget<'_>>,
) -> Result<PutResponse, ApplyFailure> {
    let (mut value, mut lease) = (put.value.clone(), put.lease);
    let mut previous = None;
    let room = room.filter(|_| put.prev_kv);
    if room.is_some() || put.ignore_value || put.ignore_lease {
        previous = batch.get(&put.key)?;
    }
    if let Some(kv) = &previous {
        if put.ignore_value {
            value = kv.value.clone();
        }
        if put.ignore_lease {
            lease = kv.lease;
        }
    }
    let revision = batch.put(put.key.clone(), value, lease);
    let prev_kv = room.and_then(|room| room.charge(previous?));
    Ok(PutResponse { header: response_header(revision), prev_kv })
}

pub(super) fn apply_delete(
    batch: &mut Batch<'_>,
    delete: &DeleteRangeRequest,
    room: Option<&mut AnswerBudget<'_>>,
) -> Result<DeleteRangeResponse, ApplyFailure> {
    let mut prev_kvs = Vec::new();
    if delete.prev_kv
        && let Some(room) = room
    {
        let all = RangeRequest {
            key: delete.key.clone(),
            range_end: delete.range_end.clone(),
            ..RangeRequest::default()
        };
        prev_kvs = batch.range(&all, room)?.map(|response| response.kvs).unwrap_or_default();
    }
    let range = KeyRange::new(delete.key.clone(), delete.range_end.clone());
    let deleted = batch.delete(&range);
    Ok(DeleteRangeResponse { header: response_header(batch.revision()), deleted, prev_kvs })
}
