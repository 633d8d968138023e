//! Read-only transactions, carried out in bounded steps so that a wide one delays neither writes
//! nor other reads.
//!
//! All steps read one unchanging view. So each comparison can be made when its transaction's turn
//! comes, instead of all of them first.

use std::slice::Iter;

use node_proto::etcdserverpb::request_op::Request;
use node_proto::etcdserverpb::response_op::Response;
use node_proto::etcdserverpb::{Compare, RequestOp, ResponseOp, TxnRequest, TxnResponse};

use super::txn::{Comparison, branch, check_revision, header};
use crate::mvcc::{AnswerRoom, Gather, ReadError, Scan, Step, Store, View};

/// Maximum number of operations and comparisons in a step.
const ITEMS_PER_STEP: usize = 16;
/// Number of bytes of answers after which a step ends early.
const BYTES_PER_STEP: usize = 1 << 20;

/// A transaction that [`is_read_only`](super::is_read_only), and the progress of reading it.
pub struct ReadTxn<'t> {
    /// Stack of the transactions being read, from the outermost to the innermost.
    levels: Vec<Level<'t>>,
}

/// One transaction of the stack, and the progress of reading it.
struct Level<'t> {
    txn: &'t TxnRequest,
    compares: Iter<'t, Compare>,
    /// Result of the comparisons, once known, and the operations that are left in the chosen
    /// branch.
    chosen: Option<(bool, Iter<'t, RequestOp>)>,
    begun: Option<Begun<'t>>,
    responses: Vec<ResponseOp>,
}

/// A comparison or range that takes more than one step.
enum Begun<'t> {
    Comparison(Comparison<'t>, Scan),
    Range(Gather),
}

impl<'t> Level<'t> {
    fn new(txn: &'t TxnRequest) -> Self {
        let compares = txn.compare.iter();
        Self { txn, compares, chosen: None, begun: None, responses: Vec::new() }
    }

    fn choose(&mut self, holds: bool) {
        self.chosen = Some((holds, branch(self.txn, holds).iter()));
    }

    fn answer(&mut self, response: Option<Response>) {
        self.responses.push(ResponseOp { response });
    }

    /// Continues the item that was begun, or begins the next one.
    fn item(
        &mut self,
        store: &Store,
        view: &View,
        room: &mut AnswerRoom<'_>,
    ) -> Result<Item<'t>, ReadError> {
        match self.begun.take() {
            Some(Begun::Comparison(comparison, scan)) => {
                self.compare(store, view, comparison, scan)
            }
            Some(Begun::Range(gather)) => self.range(store, view, gather, room),
            None => self.begin(store, view, room),
        }
    }

    fn begin(
        &mut self,
        store: &Store,
        view: &View,
        room: &mut AnswerRoom<'_>,
    ) -> Result<Item<'t>, ReadError> {
        let Some((succeeded, operations)) = &mut self.chosen else {
            let Some(compare) = self.compares.next() else {
                self.choose(true);
                return Ok(Item::Done);
            };
            let comparison = Comparison::new(compare);
            let scan = Scan::new(comparison.range());
            return self.compare(store, view, comparison, scan);
        };
        let Some(operation) = operations.next() else {
            let (succeeded, responses) = (*succeeded, std::mem::take(&mut self.responses));
            return Ok(Item::Over(TxnResponse { header: header(0), succeeded, responses }));
        };
        match &operation.request {
            Some(Request::RequestRange(range)) => {
                check_revision(range.revision, view.revision(), view.compacted())?;
                let gather = store.gather(view, range)?;
                self.range(store, view, gather, room)
            }
            Some(Request::RequestTxn(nested)) => Ok(Item::Nested(nested)),
            Some(Request::RequestPut(_) | Request::RequestDeleteRange(_)) | None => {
                self.answer(None);
                Ok(Item::Done)
            }
        }
    }

    fn compare(
        &mut self,
        store: &Store,
        view: &View,
        mut comparison: Comparison<'t>,
        mut scan: Scan,
    ) -> Result<Item<'t>, ReadError> {
        if !store.scan(view, &mut scan, &mut |kv| comparison.look(kv))? {
            self.begun = Some(Begun::Comparison(comparison, scan));
            return Ok(Item::GoesOn);
        }
        if !comparison.holds() {
            self.choose(false);
        }
        Ok(Item::Done)
    }

    fn range(
        &mut self,
        store: &Store,
        view: &View,
        mut gather: Gather,
        room: &mut AnswerRoom<'_>,
    ) -> Result<Item<'t>, ReadError> {
        let step = store.step(view, &mut gather)?;
        if !room.fits(gather.bytes()) {
            return Ok(Item::Done);
        }
        Ok(match step {
            Step::Again => {
                self.begun = Some(Begun::Range(gather));
                Item::GoesOn
            }
            Step::Done(response) => {
                room.take_gathered(&gather);
                self.answer(Some(Response::ResponseRange(response)));
                Item::Done
            }
        })
    }
}

/// Result of working on one comparison or operation.
enum Item<'t> {
    Done,
    /// The item is wide and is not finished: the step ends here.
    GoesOn,
    Nested(&'t TxnRequest),
    /// All operations of this level are done; the answer of the level.
    Over(TxnResponse),
}

impl<'t> ReadTxn<'t> {
    /// Creates the read of `txn`, with nothing read yet.
    #[must_use]
    pub fn new(txn: &'t TxnRequest) -> Self {
        Self { levels: vec![Level::new(txn)] }
    }

    /// Carries out the next step. Returns the answer after the last step, `None` before. Each call
    /// must get the same `view`. Once `room` is overdrawn, no complete answer will come.
    pub fn step(
        &mut self,
        store: &Store,
        view: &View,
        room: &mut AnswerRoom<'_>,
    ) -> Result<Option<TxnResponse>, ReadError> {
        let enough = room.held() + BYTES_PER_STEP;
        for _ in 0..ITEMS_PER_STEP {
            let Some(level) = self.levels.last_mut() else { break };
            match level.item(store, view, room)? {
                Item::Done => {}
                Item::GoesOn => break,
                Item::Nested(txn) => self.levels.push(Level::new(txn)),
                Item::Over(mut response) => {
                    self.levels.pop();
                    let Some(around) = self.levels.last_mut() else {
                        response.header = header(view.revision());
                        return Ok(Some(response));
                    };
                    around.answer(Some(Response::ResponseTxn(response)));
                }
            }
            if room.is_overdrawn() || room.held() >= enough {
                break;
            }
        }
        Ok(None)
    }
}
