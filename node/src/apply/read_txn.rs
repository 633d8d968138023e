//! Transactions that only read, in bounded steps, so that a wide one holds up neither writes nor other reads.
//!
//! Nothing changes on the way, so that each comparison can be made when its transaction's turn comes.

use std::slice::Iter;

use node_proto::etcdserverpb::request_op::Request;
use node_proto::etcdserverpb::response_op::Response;
use node_proto::etcdserverpb::{Compare, RequestOp, ResponseOp, TxnRequest, TxnResponse};

use super::txn::{Comparison, branch, check_revision, header};
use crate::mvcc::{AnswerRoom, Gather, ReadError, Scan, Step, Store, View};

/// Operations and comparisons of a step.
const ITEMS_PER_STEP: usize = 16;
/// Bytes of answers after which a step ends early.
const BYTES_PER_STEP: usize = 1 << 20;

/// A transaction that [`is_read_only`](super::is_read_only), and how far it has been read.
pub struct ReadTxn<'t> {
    /// Of the transactions around it first, then of the one that is being read.
    levels: Vec<Level<'t>>,
}

/// How far a transaction has been read.
struct Level<'t> {
    txn: &'t TxnRequest,
    compares: Iter<'t, Compare>,
    /// Whether the comparisons hold, once that is known, and what is left to do then.
    chosen: Option<(bool, Iter<'t, RequestOp>)>,
    begun: Option<Begun<'t>>,
    responses: Vec<ResponseOp>,
}

/// What takes more than one step.
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

    /// Goes on with what is begun, or with what comes next.
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

/// What came of one item.
enum Item<'t> {
    Done,
    /// It is wide: enough for this step.
    GoesOn,
    Nested(&'t TxnRequest),
    /// All of them are done: the answer of this level.
    Over(TxnResponse),
}

impl<'t> ReadTxn<'t> {
    /// Nothing of it has been read.
    #[must_use]
    pub fn new(txn: &'t TxnRequest) -> Self {
        Self { levels: vec![Level::new(txn)] }
    }

    /// Reads on, on the same `view` each time; the answer at the end. If `room` is overdrawn, it will
    /// never be whole.
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
