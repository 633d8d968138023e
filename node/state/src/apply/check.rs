//! Checks of a request that need no store, as etcd makes them (server/etcdserver/api/v3rpc/key.go).

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;
use node_proto::etcdserverpb::request_op::Request;
use node_proto::etcdserverpb::{
    DeleteRangeRequest, PutRequest, RangeRequest, RequestOp, TxnRequest,
    range_request::{SortOrder, SortTarget},
};

use crate::mvcc::KeyRange;

/// Maximum nesting depth of a transaction, including the outermost one. A log entry contains the
/// request, and the decoder of log entries accepts at most 100 nested messages. Each nested
/// transaction takes two of these 100. etcd has no such limit, but no client is known to nest this
/// deep.
pub const MAX_TXN_DEPTH: usize = 16;

/// Why a request is refused before it is proposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckError {
    /// The key is empty.
    #[error("key is not provided")]
    EmptyKey,
    /// `ignore_value` was set together with a value.
    #[error("value is provided")]
    ValueProvided,
    /// `ignore_lease` was set together with a lease.
    #[error("lease is provided")]
    LeaseProvided,
    /// The transaction has more operations than `--max-txn-ops`, or is nested deeper than
    /// [`MAX_TXN_DEPTH`].
    #[error("too many operations in txn request")]
    TooManyOps,
    /// A branch of the transaction puts a key twice, or puts and deletes it.
    #[error("duplicate key given in txn request")]
    DuplicateKey,
    /// An operation of the transaction has no request.
    #[error("key not found")]
    EmptyOperation,
    /// The sort order or sort target is not a known one.
    #[error("invalid sort option")]
    InvalidSortOption,
}

/// Checks a range request: its key, sort order and sort target.
pub fn check_range(request: &RangeRequest) -> Result<(), CheckError> {
    if request.key.is_empty() {
        return Err(CheckError::EmptyKey);
    }
    let known = SortOrder::try_from(request.sort_order).is_ok()
        && SortTarget::try_from(request.sort_target).is_ok();
    if known { Ok(()) } else { Err(CheckError::InvalidSortOption) }
}

/// Checks a put request: its key, and its `ignore_value` and `ignore_lease` flags.
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

/// Checks a delete request: its key must not be empty.
pub fn check_delete(request: &DeleteRangeRequest) -> Result<(), CheckError> {
    if request.key.is_empty() { Err(CheckError::EmptyKey) } else { Ok(()) }
}

/// Checks a transaction and the transactions nested in it. Each level takes the length of its
/// longest list of comparisons or operations from the budget `max_ops`. At most [`MAX_TXN_DEPTH`]
/// levels are allowed.
pub fn check_txn(request: &TxnRequest, max_ops: usize) -> Result<(), CheckError> {
    check_ops(request, max_ops, MAX_TXN_DEPTH)?;
    BranchChanges::collect(&request.success)?;
    BranchChanges::collect(&request.failure)?;
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

/// Keys that one branch of a transaction puts or deletes.
#[derive(Default)]
struct BranchChanges<'a> {
    /// Keys that the branch puts, each with the transaction that contains the put. `None` stands
    /// for the branch's own transaction. Otherwise the value is the number of a nested transaction,
    /// and whether the put is in its success branch.
    puts: HashMap<&'a Bytes, Option<(usize, bool)>>,
    deletes: KeyRangeSet,
}

/// A set of keys, stored as disjoint ranges: a map from the start to the end of each. A lookup
/// takes logarithmic time.
#[derive(Default)]
struct KeyRangeSet(BTreeMap<Bytes, Bytes>);

impl KeyRangeSet {
    fn insert(&mut self, mut start: Bytes, mut end: Bytes) {
        if end <= start {
            return;
        }
        // A range that touches or overlaps the new one is merged into it.
        while let Some((from, to)) = self.0.range::<Bytes, _>(..=&end).next_back() {
            let (from, to) = (from.clone(), to.clone());
            if to < start {
                break;
            }
            self.0.remove(&from);
            start = start.min(from);
            end = end.max(to);
        }
        self.0.insert(start, end);
    }

    fn add_request(&mut self, range: &DeleteRangeRequest) {
        match KeyRange::new(range.key.clone(), range.range_end.clone()) {
            KeyRange::One(key) => {
                let next = [&key[..], &[0]].concat();
                self.insert(key, next.into());
            }
            // In this check etcd takes the range end `\0` literally, not as "all keys from here
            // on". No key lies before `\0`, so the range is empty.
            KeyRange::From(_) => {}
            KeyRange::Between(start, end) => self.insert(start, end),
        }
    }

    fn contains(&self, key: &Bytes) -> bool {
        let below = self.0.range::<Bytes, _>(..=key).next_back();
        below.is_some_and(|(_, end)| key < end)
    }
}

impl<'a> BranchChanges<'a> {
    /// Collects the changes of a branch. Refuses a key that is put twice, or put and deleted. Both
    /// branches of a nested transaction may put the same key, because only one of them is carried
    /// out.
    fn collect(operations: &'a [RequestOp]) -> Result<Self, CheckError> {
        let mut all = Self::default();
        for operation in operations {
            if let Some(Request::RequestDeleteRange(delete)) = &operation.request {
                all.deletes.add_request(delete);
            }
        }
        for (nested, operation) in operations.iter().enumerate() {
            let Some(Request::RequestTxn(txn)) = &operation.request else { continue };
            let success = Self::collect(&txn.success)?;
            let failure = Self::collect(&txn.failure)?;
            all.add_puts(success.puts.into_keys(), Some((nested, true)))?;
            all.add_puts(failure.puts.into_keys(), Some((nested, false)))?;
            for (start, end) in success.deletes.0.into_iter().chain(failure.deletes.0) {
                all.deletes.insert(start, end);
            }
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
            if self.deletes.contains(key) {
                return Err(CheckError::DuplicateKey);
            }
            self.puts.insert(key, by);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_range_set_contains_the_keys_of_all_its_ranges(
            ranges in proptest::collection::vec((0_u8..12, 0_u8..14), 0..8),
        ) {
            let bytes = |n: u8| Bytes::copy_from_slice(&[b'a' + n]);
            let deletes: Vec<DeleteRangeRequest> = ranges
                .iter()
                .map(|(from, to)| DeleteRangeRequest {
                    key: bytes(*from),
                    range_end: match to {
                        12 => Bytes::new(),
                        13 => Bytes::from_static(&[0]),
                        to => bytes(*to),
                    },
                    prev_kv: false,
                })
                .collect();
            let mut all = KeyRangeSet::default();
            deletes.iter().for_each(|delete| all.add_request(delete));
            for key in (0..14).flat_map(|n| [bytes(n), [&bytes(n)[..], &[0]].concat().into()]) {
                let mut each = deletes
                    .iter()
                    .map(|delete| KeyRange::new(delete.key.clone(), delete.range_end.clone()))
                    .filter(|range| !matches!(range, KeyRange::From(_)));
                prop_assert_eq!(all.contains(&key), each.any(|range| range.contains(&key)));
            }
        }
    }

    #[test]
    fn a_wide_transaction_of_deletes_and_puts_is_checked_quickly() {
        // 90,000 deletes and 90,000 puts: comparing them pair by pair would take minutes.
        let key = |n: u32| Bytes::copy_from_slice(&n.to_be_bytes());
        let wide = |operation: &dyn Fn(u32) -> Request| -> Vec<RequestOp> {
            let level = |numbers: std::ops::Range<u32>| TxnRequest {
                success: numbers.map(|n| RequestOp { request: Some(operation(n)) }).collect(),
                ..TxnRequest::default()
            };
            (0..300)
                .map(|n| Request::RequestTxn(level(n * 300..(n + 1) * 300)))
                .map(|txn| RequestOp { request: Some(txn) })
                .collect()
        };
        let delete = |n: u32| {
            let (key, prev_kv) = (key(2 * n), false);
            Request::RequestDeleteRange(DeleteRangeRequest {
                key,
                range_end: Bytes::new(),
                prev_kv,
            })
        };
        let put =
            |n: u32| Request::RequestPut(PutRequest { key: key(2 * n + 1), ..Default::default() });
        let success = [wide(&delete), wide(&put)].concat();
        let request = TxnRequest { success, ..TxnRequest::default() };
        assert_eq!(check_txn(&request, 1000), Ok(()));
    }
}
