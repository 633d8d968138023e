//! What a request can be refused for without looking at the store, as etcd checks it
//! (server/etcdserver/api/v3rpc/key.go).

use std::collections::HashMap;

use bytes::Bytes;
use node_proto::etcdserverpb::request_op::Request;
use node_proto::etcdserverpb::{
    DeleteRangeRequest, PutRequest, RangeRequest, RequestOp, TxnRequest,
    range_request::{SortOrder, SortTarget},
};

use crate::mvcc::KeyRange;

/// How deep transactions may be nested, the outermost included. A log entry is read again, by every
/// member, with a decoder that follows a hundred messages into each other; each level is two of
/// them. etcd knows no such bound, and nobody nests this deep.
pub const MAX_TXN_DEPTH: usize = 16;

/// Why a request is refused before it is proposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckError {
    /// No key.
    #[error("key is not provided")]
    EmptyKey,
    /// `ignore_value` with a value.
    #[error("value is provided")]
    ValueProvided,
    /// `ignore_lease` with a lease.
    #[error("lease is provided")]
    LeaseProvided,
    /// More operations than `--max-txn-ops`, or nested deeper than [`MAX_TXN_DEPTH`].
    #[error("too many operations in txn request")]
    TooManyOps,
    /// A key is changed twice.
    #[error("duplicate key given in txn request")]
    DuplicateKey,
    /// An operation that is none.
    #[error("key not found")]
    EmptyOperation,
    /// No such order or target.
    #[error("invalid sort option")]
    InvalidSortOption,
}

/// Checks a range.
pub fn check_range(request: &RangeRequest) -> Result<(), CheckError> {
    if request.key.is_empty() {
        return Err(CheckError::EmptyKey);
    }
    let known = SortOrder::try_from(request.sort_order).is_ok()
        && SortTarget::try_from(request.sort_target).is_ok();
    if known { Ok(()) } else { Err(CheckError::InvalidSortOption) }
}

/// Checks a put.
pub fn check_put(request: &PutRequest) -> Result<(), CheckError> {
    if request.key.is_empty() {
        Err(CheckError::EmptyKey)
    } else if request.ignore_value && !request.value.is_empty() {
        Err(CheckError::ValueProvided)
    } else if request.ignore_lease && request.lease != 0 {
        Err(CheckError::LeaseProvided)
    } else {
        Ok(())
    }
}

/// Checks a delete.
pub fn check_delete(request: &DeleteRangeRequest) -> Result<(), CheckError> {
    if request.key.is_empty() { Err(CheckError::EmptyKey) } else { Ok(()) }
}

/// Checks a transaction, nested ones included: `max_ops` is the budget, of which each level takes
/// its widest list, and [`MAX_TXN_DEPTH`] the number of levels.
pub fn check_txn(request: &TxnRequest, max_ops: usize) -> Result<(), CheckError> {
    check_ops(request, max_ops, MAX_TXN_DEPTH)?;
    Changes::of(&request.success)?;
    Changes::of(&request.failure)?;
    Ok(())
}

fn check_ops(request: &TxnRequest, max_ops: usize, max_depth: usize) -> Result<(), CheckError> {
    let depth_left = max_depth.checked_sub(1).ok_or(CheckError::TooManyOps)?;
    let widest = request.compare.len().max(request.success.len()).max(request.failure.len());
    let left = max_ops.checked_sub(widest).ok_or(CheckError::TooManyOps)?;
    if request.compare.iter().any(|compare| compare.key.is_empty()) {
        return Err(CheckError::EmptyKey);
    }
    for operation in request.success.iter().chain(&request.failure) {
        match &operation.request {
            Some(Request::RequestRange(range)) => check_range(range)?,
            Some(Request::RequestPut(put)) => check_put(put)?,
            Some(Request::RequestDeleteRange(delete)) => check_delete(delete)?,
            Some(Request::RequestTxn(txn)) => check_ops(txn, left, depth_left)?,
            None => return Err(CheckError::EmptyOperation),
        }
    }
    Ok(())
}

/// What a branch may change.
#[derive(Default)]
struct Changes<'a> {
    /// Each key that is put, and which nested branch puts it: (nested transaction, branch).
    puts: HashMap<&'a Bytes, Option<(usize, bool)>>,
    deletes: Vec<KeyRange>,
}

impl<'a> Changes<'a> {
    /// Collects a branch's changes, and refuses a key that is put twice, or put and deleted. The
    /// two branches of a nested transaction exclude each other, so that both may put a key.
    fn of(operations: &'a [RequestOp]) -> Result<Self, CheckError> {
        let mut all = Self::default();
        for operation in operations {
            if let Some(Request::RequestDeleteRange(delete)) = &operation.request {
                all.deletes.push(KeyRange::new(delete.key.clone(), delete.range_end.clone()));
            }
        }
        for (nested, operation) in operations.iter().enumerate() {
            let Some(Request::RequestTxn(txn)) = &operation.request else { continue };
            let success = Self::of(&txn.success)?;
            let failure = Self::of(&txn.failure)?;
            all.add_puts(success.puts.into_keys(), Some((nested, true)))?;
            all.add_puts(failure.puts.into_keys(), Some((nested, false)))?;
            all.deletes.extend(success.deletes);
            all.deletes.extend(failure.deletes);
        }
        let own = operations.iter().filter_map(|operation| match &operation.request {
            Some(Request::RequestPut(put)) => Some(&put.key),
            _ => None,
        });
        all.add_puts(own, None)?;
        Ok(all)
    }

    fn add_puts(
        &mut self,
        keys: impl Iterator<Item = &'a Bytes>,
        by: Option<(usize, bool)>,
    ) -> Result<(), CheckError> {
        for key in keys {
            let excluded = |other: Option<(usize, bool)>| match (other, by) {
                (Some((a, in_success)), Some((b, success))) => a == b && in_success != success,
                _ => false,
            };
            if let Some(other) = self.puts.get(key)
                && !excluded(*other)
            {
                return Err(CheckError::DuplicateKey);
            }
            if self.deletes.iter().any(|range| range.contains(key)) {
                return Err(CheckError::DuplicateKey);
            }
            self.puts.insert(key, by);
        }
        Ok(())
    }
}
