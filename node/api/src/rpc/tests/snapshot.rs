//! Tests of the snapshots that etcd's clients save.

use std::io::Cursor;

use node_proto::etcdserverpb::maintenance_client::MaintenanceClient;
use node_proto::etcdserverpb::{SnapshotRequest, SnapshotResponse};
use node_state::etcd_file::{EtcdFile, EtcdFileError, HashCheck};
use tonic::Streaming;

use super::*;

const VALUE_BYTES: usize = 100_000;
/// Time limit after which a test fails.
const PATIENCE: Duration = Duration::from_secs(30);

/// Starts a node whose data is larger than the queue of responses for a client.
async fn filled() -> ApiTestNode {
    let node = ApiTestNode::start().await;
    for key in 0..30 {
        node.put(&format!("k{key}"), &"v".repeat(VALUE_BYTES)).await;
    }
    node
}

async fn snapshot(node: &ApiTestNode) -> Result<Streaming<SnapshotResponse>, Status> {
    let endpoint = Channel::from_shared(format!("http://{}", node.address)).unwrap();
    // Each client has its own connection, so that a client that doesn't read can't block another.
    let mut client = MaintenanceClient::new(endpoint.connect().await.unwrap());
    Ok(client.snapshot(SnapshotRequest {}).await?.into_inner())
}

/// Receives all remaining responses.
async fn rest(stream: &mut Streaming<SnapshotResponse>) -> Result<Vec<SnapshotResponse>, Status> {
    let mut taken = Vec::new();
    while let Some(response) = stream.message().await? {
        taken.push(response);
    }
    Ok(taken)
}

#[tokio::test]
async fn a_snapshot_is_the_store_as_it_was_at_the_start_with_its_hash() {
    let node = filled().await;
    let mut stream = snapshot(&node).await.unwrap();
    let first = stream.message().await.unwrap().unwrap();
    // A write and a compaction succeed while the snapshot is sent. The snapshot doesn't contain
    // them.
    let revision = node.put("k1", "while it is sent").await;
    node.compact(revision).await.unwrap();
    let mut taken = vec![first];
    taken.extend(rest(&mut stream).await.unwrap());
    let total: usize = taken.iter().map(|response| response.blob.len()).sum();
    let mut sent = 0;
    for response in &taken {
        sent += response.blob.len();
        assert!(!response.blob.is_empty() && response.blob.len() <= 32 * 1024);
        let left = total.saturating_sub(32).saturating_sub(sent);
        assert_eq!((response.remaining_bytes, &response.version[..]), (left as u64, "3.6.0"));
    }
    assert_eq!(taken.last().unwrap().blob.len(), 32);
    assert!(taken.len() > 90);
    let whole: Vec<u8> = taken.iter().flat_map(|response| response.blob.to_vec()).collect();
    let mut file = EtcdFile::open(Cursor::new(whole), HashCheck::Required).unwrap();
    assert_eq!((file.summary().revision, file.summary().compacted), (revision - 1, -1));
    let mut records = 0;
    let import = file.records().unwrap();
    import
        .for_each(|_, _| {
            records += 1;
            Ok::<_, EtcdFileError>(())
        })
        .unwrap();
    assert_eq!(records, 30);
}

#[tokio::test]
async fn the_number_of_concurrent_snapshots_is_limited() {
    let node = filled().await;
    let mut one = snapshot(&node).await.unwrap();
    let two = snapshot(&node).await.unwrap();
    let text = "etcdserver: too many requests".to_owned();
    let refused = code_and_text(snapshot(&node).await.map(drop));
    assert_eq!(refused, (Code::ResourceExhausted, text));
    drop(two);
    let start = std::time::Instant::now();
    while snapshot(&node).await.is_err() {
        assert!(start.elapsed() < PATIENCE, "no place was given back");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(rest(&mut one).await.is_ok());
}

#[tokio::test]
async fn a_stalled_snapshot_ends_and_makes_room_for_another() {
    let node = filled().await;
    let mut idle = [snapshot(&node).await.unwrap(), snapshot(&node).await.unwrap()];
    let start = std::time::Instant::now();
    let mut next = loop {
        match snapshot(&node).await {
            Ok(next) => break next,
            Err(_) => assert!(start.elapsed() < PATIENCE, "no place was given back"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert!(rest(&mut next).await.is_ok());
    // A truncated snapshot ends with an error.
    let late = (Code::Unavailable, "etcdserver: request timed out".to_owned());
    assert_eq!(code_and_text(rest(&mut idle[0]).await.map(drop)), late);
}

#[tokio::test]
async fn a_node_that_stops_ends_its_snapshots() {
    let node = filled().await;
    let mut stream = snapshot(&node).await.unwrap();
    node.stop.cancel();
    let taken = tokio::time::timeout(PATIENCE, rest(&mut stream)).await.unwrap();
    let stopped = (Code::Unavailable, "etcdserver: server stopped".to_owned());
    assert_eq!(code_and_text(taken.map(drop)), stopped);
}
