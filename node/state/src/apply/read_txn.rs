//! Read-only transactions, carried out in bounded steps so that a wide transaction delays neither
//! writes nor other reads.
//!
//! All steps read the same view, and no operation changes it. So the order of comparisons and
//! operations doesn't matter. The comparisons of a nested transaction are made when the read
//! reaches that transaction, after earlier operations.

use std::slice::Iter;

use node_proto::etcdserverpb::request_op::Request;
use node_proto::etcdserverpb::response_op::Response;
use node_proto::etcdserverpb::{Compare, RequestOp, ResponseOp, TxnRequest, TxnResponse};

use super::txn::{Comparison, branch_operations, check_revision, response_header};
use crate::mvcc::{AnswerBudget, RangeRead, RangeStep, ReadError, Scan, Store, View};

/// Maximum number of operations and comparisons in one step of a read-only transaction.
const ITEMS_PER_STEP: usize = 16;
/// Number of bytes of answers after which a step of a read-only transaction ends early.
const BYTES_PER_STEP: usize = 1 << 20;

/// Read-only transaction ([`is_read_only`](super::is_read_only)) and the state of its read.
pub struct ReadTxn<'t> {
    /// Stack of the transactions being read, from the outermost to the innermost.
    levels: Vec<TxnLevel<'t>>,
}

/// One transaction of the stack, and the state of its read.
struct TxnLevel<'t> {
    txn: &'t TxnRequest,
    compares: Iter<'t, Compare>,
    /// Result of the comparisons, once known, and the operations that are left in the chosen
    /// branch.
    chosen: Option<(bool, Iter<'t, RequestOp>)>,
    pending: Option<PendingItem<'t>>,
    responses: Vec<ResponseOp>,
}

/// A comparison or range that takes more than one step.
enum PendingItem<'t> {
    Comparison(Comparison<'t>, Scan),
    Range(RangeRead),
}

impl<'t> TxnLevel<'t> {
    fn new(txn: &'t TxnRequest) -> Self {
        let compares = txn.compare.iter();
        Self { txn, compares, chosen: None, pending: None, responses: Vec::new() }
    }

    fn choose(&mut self, holds: bool) {
        self.chosen = Some((holds, branch_operations(self.txn, holds).iter()));
    }

    fn push_response(&mut self, response: Option<Response>) {
        self.responses.push(ResponseOp { response });
    }

    /// Continues the comparison or operation that is in progress, or begins the next one.
    fn continue_or_begin(
        &mut self,
        store: &Store,
        view: &View,
        room: &mut AnswerBudget<'_>,
    ) -> Result<ItemProgress<'t>, ReadError> {
        match self.pending.take() {
            Some(PendingItem::Comparison(comparison, scan)) => {
                self.continue_comparison(store, view, comparison, scan)
            }
            Some(PendingItem::Range(gather)) => self.continue_range(store, view, gather, room),
            None => self.begin_next(store, view, room),
        }
    }

    fn begin_next(
        &mut self,
        store: &Store,
        view: &View,
        room: &mut AnswerBudget<'_>,
    ) -> Result<ItemProgress<'t>, ReadError> {
        let Some((succeeded, operations)) = &mut self.chosen else {
            let Some(compare) = self.compares.next() else {
                self.choose(true);
                return Ok(ItemProgress::Done);
            };
            let comparison = Comparison::new(compare);
            let scan = Scan::new(comparison.range());
            return self.continue_comparison(store, view, comparison, scan);
        };
        let Some(operation) = operations.next() else {
            let (succeeded, responses) = (*succeeded, std::mem::take(&mut self.responses));
            return Ok(ItemProgress::LevelDone(TxnResponse {
                header: response_header(0),
                succeeded,
                responses,
            }));
        };
        match &operation.request {
            Some(Request::RequestRange(range)) => {
                check_revision(range.revision, view.revision(), view.compact_revision())?;
                let gather = store.begin_range(view, range)?;
                self.continue_range(store, view, gather, room)
            }
            Some(Request::RequestTxn(nested)) => Ok(ItemProgress::Nested(nested)),
            Some(Request::RequestPut(_) | Request::RequestDeleteRange(_)) | None => {
                self.push_response(None);
                Ok(ItemProgress::Done)
            }
        }
    }

    fn continue_comparison(
        &mut self,
        store: &Store,
        view: &View,
        mut comparison: Comparison<'t>,
        mut scan: Scan,
    ) -> Result<ItemProgress<'t>, ReadError> {
        if !store.scan(view, &mut scan, &mut |kv| comparison.compare_key(kv))? {
            self.pending = Some(PendingItem::Comparison(comparison, scan));
            return Ok(ItemProgress::Unfinished);
        }
        if !comparison.is_satisfied() {
            self.choose(false);
        }
        Ok(ItemProgress::Done)
    }

    fn continue_range(
        &mut self,
        store: &Store,
        view: &View,
        mut gather: RangeRead,
        room: &mut AnswerBudget<'_>,
    ) -> Result<ItemProgress<'t>, ReadError> {
        let step = store.step_range(view, &mut gather)?;
        if !room.fits(gather.bytes()) {
            return Ok(ItemProgress::Done);
        }
        Ok(match step {
            RangeStep::Unfinished => {
                self.pending = Some(PendingItem::Range(gather));
                ItemProgress::Unfinished
            }
            RangeStep::Done(response) => {
                room.charge_range(&gather);
                self.push_response(Some(Response::ResponseRange(response)));
                ItemProgress::Done
            }
        })
    }
}

/// Result of working on one comparison or operation.
enum ItemProgress<'t> {
    Done,
    /// The comparison or operation is wide and is not finished: the step ends here.
    Unfinished,
    Nested(&'t TxnRequest),
    /// All operations of the innermost transaction are done. The value is its answer.
    LevelDone(TxnResponse),
}

impl<'t> ReadTxn<'t> {
    /// Creates the read of `txn`, with nothing read yet.
    #[must_use]
    pub fn new(txn: &'t TxnRequest) -> Self {
        Self { levels: vec![TxnLevel::new(txn)] }
    }

    /// Carries out the next step. Returns the answer after the last step, and `None` after each
    /// earlier step. Each call must get the same `view`. If part of the answer doesn't fit into
    /// `room`, the read never returns a complete answer.
    pub fn step(
        &mut self,
        store: &Store,
        view: &View,
        room: &mut AnswerBudget<'_>,
    ) -> Result<Option<TxnResponse>, ReadError> {
        let enough = room.used_bytes() + BYTES_PER_STEP;
        for _ in 0..ITEMS_PER_STEP {
            let Some(level) = self.levels.last_mut() else { break };
            match level.continue_or_begin(store, view, room)? {
                ItemProgress::Done => {}
                ItemProgress::Unfinished => break,
                ItemProgress::Nested(txn) => self.levels.push(TxnLevel::new(txn)),
                ItemProgress::LevelDone(mut response) => {
                    self.levels.pop();
                    let Some(around) = self.levels.last_mut() else {
                        response.header = response_header(view.revision());
                        return Ok(Some(response));
                    };
                    around.push_response(Some(Response::ResponseTxn(response)));
                }
            }
            if room.is_overdrawn() || room.used_bytes() >= enough {
                break;
            }
        }
        Ok(None)
    }
}
