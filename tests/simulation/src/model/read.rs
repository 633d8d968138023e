//! Reads of the model, at its newest revision or at an older one.

use bytes::Bytes;
use node_proto::etcdserverpb::{RangeRequest, RangeResponse};
use node_proto::mvccpb::KeyValue;
use node_state::apply::ApplyError;
use node_state::mvcc::KeyRange;

use super::{ReferenceModel, StoreRevisions, header};

impl ReferenceModel {
    /// Returns the record of `key` at `revision`, or `None` if the key didn't exist then.
    pub fn live_record(&self, key: &[u8], revision: i64) -> Option<&KeyValue> {
        let changes = self.keys.get(key)?;
        let before = changes.partition_point(|change| change.revision.main <= revision);
        let last = changes[..before].last()?;
        last.is_put.then_some(&last.kv)
    }

    /// Returns all records of a range at `revision`, ordered by key.
    pub fn records_in(&self, range: &KeyRange, revision: i64) -> Vec<KeyValue> {
        let from = self.keys.range(range.start().clone()..);
        let keys = from.map(|(key, _)| key).take_while(|key| range.contains(key));
        keys.filter_map(|key| self.live_record(key, revision).cloned()).collect()
    }

    /// Returns the response that a store in `state` must give to a range request.
    pub fn range(
        &self,
        state: StoreRevisions,
        request: &RangeRequest,
    ) -> Result<RangeResponse, ApplyError> {
        let at = if request.revision > 0 { request.revision } else { state.revision };
        if at > state.revision {
            return Err(ApplyError::FutureRevision);
        }
        if at < state.compacted {
            return Err(ApplyError::Compacted);
        }
        let mut kvs =
            self.records_in(&KeyRange::new(request.key.clone(), request.range_end.clone()), at);
        let count = i64::try_from(kvs.len()).expect("few");
        let limit = usize::try_from(request.limit).unwrap_or(0);
        let mut more = false;
        if request.count_only {
            kvs.clear();
        } else if limit > 0 && kvs.len() > limit {
            kvs.truncate(limit);
            more = true;
        }
        if request.keys_only {
            // etcd 3.7 also leaves the lease out of a response with keys only.
            kvs.iter_mut().for_each(|kv| (kv.value, kv.lease) = (Bytes::new(), 0));
        }
        Ok(RangeResponse { header: header(state.revision), kvs, more, count })
    }
}
