//! Tests of the requests that a CORRUPT alarm stops.

use node_proto::etcdserverpb::lease_client::LeaseClient;
use node_proto::etcdserverpb::{LeaseGrantRequest, SnapshotRequest};
use node_proto::musterpb::StoreAnswer;
use node_proto::v3electionpb::{LeaderRequest, LeaderResponse};
use node_state::corruption::{Claim, Question, decode_claims};
use node_state::identity::MemberId;
use prost::Message as _;

use super::*;

async fn observe(node: &ApiTestNode) -> Result<tonic::Response<Streaming<LeaderResponse>>, Status> {
    lock_queue::elections(node).observe(LeaderRequest::default()).await
}

#[tokio::test]
async fn a_member_with_corrupt_data_serves_no_data() {
    let node = lock_queue::with_leases(&[5, 6]).await;
    node.put("k", "v").await;
    let mut maintenance = MaintenanceClient::new(node.channel.clone());
    let request = |action, member_id| AlarmRequest { action, member_id, alarm: 2 };
    let mut watching = WatchClientStream::open(&node).await;
    watching.create(watch("k")).await;
    lock_queue::lock(&node, "l", 5).await.unwrap();
    let waiting = lock_queue::waits(&node, "l", 6).await;
    let mut observing = observe(&node).await.unwrap().into_inner();

    // An alarm of the whole cluster stops writes on each member, as in etcd. Reads continue.
    maintenance.alarm(request(1, 0)).await.unwrap();
    let corrupt = (Code::DataLoss, "etcdserver: corrupt cluster".to_owned());
    assert_eq!(code_and_text(node.kv().put(put("k", "v")).await), corrupt);
    node.kv().range(range("k")).await.unwrap();
    assert!(node.get("/readyz").await.1.contains("[-]data_corruption failed"));
    maintenance.alarm(request(2, 0)).await.unwrap();
    node.put("k", "v").await;

    maintenance.alarm(request(1, MEMBER)).await.unwrap();
    let end = async {
        loop {
            match watching.responses.message().await {
                Ok(Some(_)) => {}
                ended => break ended,
            }
        }
    };
    assert_eq!(code_and_text(soon(end).await), corrupt);
    // Lock and Election clients get each error with the code `Unknown` (see `LockQueueError`).
    let unknown = (Code::Unknown, corrupt.1.clone());
    assert_eq!(code_and_text(soon(waiting).await.unwrap()), unknown);
    assert_eq!(code_and_text(soon(observing.message()).await), corrupt);
    for serializable in [false, true] {
        let read = RangeRequest { serializable, ..range("k") };
        assert_eq!(code_and_text(node.kv().range(read).await), corrupt);
    }
    assert_eq!(code_and_text(node.kv().put(put("k", "v")).await), corrupt);
    assert_eq!(code_and_text(node.kv().txn(TxnRequest::default()).await), corrupt);
    assert_eq!(code_and_text(node.compact(2).await), corrupt);
    let mut lease = LeaseClient::new(node.channel.clone());
    assert_eq!(
        code_and_text(lease.lease_grant(LeaseGrantRequest { ttl: 60, id: 0 }).await),
        corrupt
    );
    assert_eq!(code_and_text(lock_queue::lock(&node, "other", 5).await), corrupt);
    assert_eq!(code_and_text(observe(&node).await.map(drop)), corrupt);
    let mut client = WatchClient::new(node.channel.clone());
    let asked = futures_util::stream::pending::<WatchRequest>();
    assert_eq!(code_and_text(client.watch(asked).await.map(drop)), corrupt);
    let saved = maintenance.snapshot(SnapshotRequest {}).await;
    assert_eq!(code_and_text(saved.map(drop)), corrupt);

    // Status, health and member methods continue, so that an operator can see and repair the
    // problem.
    let status = maintenance.status(StatusRequest {}).await.unwrap().into_inner();
    assert_eq!(status.errors, [format!("memberID:{MEMBER} alarm:CORRUPT ")]);
    let mut cluster = cluster_client::ClusterClient::new(node.channel.clone());
    cluster.member_list(MemberListRequest { linearizable: true }).await.unwrap();
    let reason = "{\"health\":\"false\",\"reason\":\"ALARM CORRUPT\"}\n";
    assert_eq!(node.get("/health").await.1, reason);
    assert!(node.get("/readyz").await.1.contains("[-]data_corruption failed"));
    assert_eq!(node.get("/livez").await.0, "200 OK", "a restart would not help");
    let metric = format!("\nmuster_alarm{{alarm=\"CORRUPT\",member_id=\"{MEMBER:x}\"}} 1\n");
    assert!(node.get("/metrics").await.1.contains(&metric));
    while health(&node).await != 2 {
        tokio::task::yield_now().await;
    }
    maintenance.alarm(request(2, MEMBER)).await.unwrap();
    node.put("k", "v").await;
    while health(&node).await != 1 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn only_a_question_of_the_leader_causes_a_read_of_the_store() {
    let node = ApiTestNode::start().await;
    node.put("k", "v").await;
    let question = Question::of(&node.context.store.view()).encode().encode_to_vec();
    let asked_by = async |from: u64| -> Vec<Claim> {
        let request = Bytes::from(question.clone());
        let answer = answer_member(&node.context, MemberId(from), request).await.unwrap();
        decode_claims(StoreAnswer::decode(answer).unwrap())
    };
    assert!(!asked_by(MEMBER).await.is_empty());
    // The node waits a limited time for the other member to become leader. tokio's clock is paused,
    // so that this time passes at once.
    tokio::time::pause();
    assert_eq!(asked_by(MEMBER + 1).await, []);
}
