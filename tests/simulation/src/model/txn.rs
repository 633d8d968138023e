//! Transactions on the model. It evaluates all comparisons first, then checks every operation that
//! could be refused, then makes the changes.

use node_proto::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use node_proto::etcdserverpb::request_op::Request;
use node_proto::etcdserverpb::response_op::Response;
use node_proto::etcdserverpb::{Compare, RequestOp, ResponseOp, TxnRequest, TxnResponse};
use node_proto::mvccpb::KeyValue;
use node_state::apply::ApplyError;
use node_state::mvcc::KeyRange;

use super::{ReferenceModel, StoreRevisions, header};

impl ReferenceModel {
    pub(super) fn txn(&mut self, request: &TxnRequest) -> Result<TxnResponse, ApplyError> {
        let succeeded = request.compare.iter().all(|compare| self.holds(compare));
        let operations = if succeeded { &request.success } else { &request.failure };
        for operation in operations {
            match operation_request(operation) {
                Request::RequestPut(put) => self.check_put(put)?,
                Request::RequestRange(range) => {
                    self.range(self.now, range)?;
                }
                Request::RequestDeleteRange(_) => {}
                Request::RequestTxn(_) => unreachable!("no simulated client nests them"),
            }
        }
        let mut responses = Vec::new();
        for operation in operations {
            let response = match operation_request(operation) {
                Request::RequestPut(put) => Response::ResponsePut(self.put(put)),
                Request::RequestDeleteRange(delete) => {
                    Response::ResponseDeleteRange(self.delete(delete))
                }
                Request::RequestRange(range) => {
                    let state = StoreRevisions { revision: self.revision(), ..self.now };
                    Response::ResponseRange(self.range(state, range)?)
                }
                Request::RequestTxn(_) => unreachable!("refused above"),
            };
            responses.push(ResponseOp { response: Some(response) });
        }
        Ok(TxnResponse { header: header(self.revision()), succeeded, responses })
    }

    /// Evaluates one comparison. A comparison with a range is true if it is true for each key in
    /// the range. If the range has no key, the comparison is evaluated for a key that never
    /// existed, which has no value.
    fn holds(&self, compare: &Compare) -> bool {
        let range = KeyRange::new(compare.key.clone(), compare.range_end.clone());
        let kvs = self.records_in(&range, i64::MAX);
        if kvs.is_empty() {
            return compare.target() != CompareTarget::Value
                && holds_for(compare, &KeyValue::default());
        }
        kvs.iter().all(|kv| holds_for(compare, kv))
    }
}

fn operation_request(operation: &RequestOp) -> &Request {
    operation.request.as_ref().expect("simulated clients ask for something")
}

fn holds_for(compare: &Compare, kv: &KeyValue) -> bool {
    let order = match compare.target_union.as_ref().expect("simulated clients compare") {
        TargetUnion::Version(version) => kv.version.cmp(version),
        TargetUnion::CreateRevision(revision) => kv.create_revision.cmp(revision),
        TargetUnion::ModRevision(revision) => kv.mod_revision.cmp(revision),
        TargetUnion::Value(value) => kv.value.cmp(value),
        TargetUnion::Lease(lease) => kv.lease.cmp(lease),
    };
    match compare.result() {
        CompareResult::Equal => order.is_eq(),
        CompareResult::NotEqual => order.is_ne(),
        CompareResult::Greater => order.is_gt(),
        CompareResult::Less => order.is_lt(),
    }
}
