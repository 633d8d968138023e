//! Reads and writes single keys in a cluster's own store.

use node_proto::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use node_proto::etcdserverpb::kv_client::KvClient;
use node_proto::etcdserverpb::{
    self as pb, Compare, PutRequest, RangeRequest, RequestOp, TxnRequest, request_op,
};

use super::{Answer, ClusterApiClient, ClusterError, RequestKind};

/// A key's value and revision when it was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StoredValue {
    /// The key's value; `None` if there is no such key.
    pub value: Option<Vec<u8>>,
    /// The revision that wrote the key; 0 if there is no such key.
    mod_revision: i64,
}

impl StoredValue {
    /// Returns the revision that wrote the key; 0 if there is no such key.
    pub(crate) fn revision(&self) -> i64 {
        self.mod_revision
    }
}

impl ClusterApiClient {
    /// Reads a key linearizably.
    pub(crate) async fn read_key(&self, key: &str) -> Result<StoredValue, ClusterError> {
        let request = RangeRequest { key: key.as_bytes().to_vec().into(), ..Default::default() };
        self.send_request(RequestKind::Read("range"), async |channel| {
            KvClient::new(channel).range(request.clone()).await
        })
        .await
    }

    /// Writes a key if it is unchanged since `read`. Returns false if it has changed.
    pub(crate) async fn replace_key_if_unchanged(
        &self,
        key: &str,
        read: &StoredValue,
        value: &[u8],
    ) -> Result<bool, ClusterError> {
        let key = key.as_bytes().to_vec();
        let put = PutRequest {
            key: key.clone().into(),
            value: value.to_vec().into(),
            ..Default::default()
        };
        let unchanged = Compare {
            result: CompareResult::Equal.into(),
            target: CompareTarget::Mod.into(),
            key: key.into(),
            target_union: Some(TargetUnion::ModRevision(read.mod_revision)),
            ..Default::default()
        };
        let request = TxnRequest {
            compare: vec![unchanged],
            success: vec![RequestOp { request: Some(request_op::Request::RequestPut(put)) }],
            ..Default::default()
        };
        self.send_request(RequestKind::Change("put"), async |channel| {
            KvClient::new(channel).txn(request.clone()).await
        })
        .await
    }
}

impl From<Answer<pb::RangeResponse>> for StoredValue {
    fn from(answer: Answer<pb::RangeResponse>) -> Self {
        let found = answer.message.kvs.into_iter().next();
        found.map_or_else(Self::default, |kv| Self {
            value: Some(kv.value.into()),
            mod_revision: kv.mod_revision,
        })
    }
}

impl From<Answer<pb::TxnResponse>> for bool {
    fn from(answer: Answer<pb::TxnResponse>) -> Self {
        answer.message.succeeded
    }
}
