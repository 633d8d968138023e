//! Streams a snapshot of a node's store, and counts keys.

use bytes::Bytes;
use node_proto::etcdserverpb::kv_client::KvClient;
use node_proto::etcdserverpb::maintenance_client::MaintenanceClient;
use node_proto::etcdserverpb::{self as pb, RangeRequest, SnapshotRequest};
use tonic::Streaming;

use super::{Answer, ClusterApiClient, ClusterError, RequestKind};

/// Name of the request in errors.
const SNAPSHOT: &str = "snapshot";

/// A snapshot that arrives from a node.
pub(crate) struct SnapshotStream(Streaming<pb::SnapshotResponse>);

impl SnapshotStream {
    /// Returns the next bytes of the snapshot, and `None` at its end. The last 32 bytes are the
    /// SHA-256 of all bytes before them.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, ClusterError> {
        let message = self.0.message().await;
        let message =
            message.map_err(|status| ClusterError::from_status(&status, SNAPSHOT, false))?;
        Ok(message.map(|message| message.blob))
    }
}

impl From<Answer<Streaming<pb::SnapshotResponse>>> for SnapshotStream {
    fn from(answer: Answer<Streaming<pb::SnapshotResponse>>) -> Self {
        Self(answer.message)
    }
}

/// The number of all keys, and the revision at which they were counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyCount {
    pub keys: u64,
    pub revision: u64,
}

impl From<Answer<pb::RangeResponse>> for KeyCount {
    fn from(answer: Answer<pb::RangeResponse>) -> Self {
        let revision = answer.message.header.unwrap_or_default().revision;
        Self {
            keys: u64::try_from(answer.message.count).unwrap_or_default(),
            revision: u64::try_from(revision).unwrap_or_default(),
        }
    }
}

impl ClusterApiClient {
    /// Begins a snapshot of the store of the first member that can be reached.
    pub(crate) async fn snapshot(&self) -> Result<SnapshotStream, ClusterError> {
        self.send_request(RequestKind::Read(SNAPSHOT), async |channel| {
            MaintenanceClient::new(channel).snapshot(SnapshotRequest::default()).await
        })
        .await
    }

    /// Counts all keys linearizably.
    pub(crate) async fn count_keys(&self) -> Result<KeyCount, ClusterError> {
        let request = RangeRequest {
            key: vec![0].into(),
            range_end: vec![0].into(),
            count_only: true,
            ..Default::default()
        };
        self.send_request(RequestKind::Read("range"), async |channel| {
            KvClient::new(channel).range(request.clone()).await
        })
        .await
    }
}
