//! Tests of leases over the wire, with the leader's lease clock.

use node_proto::etcdserverpb::lease_client::LeaseClient;
use node_proto::etcdserverpb::{
    LeaseGrantRequest, LeaseKeepAliveRequest, LeaseLeasesRequest, LeaseRevokeRequest,
    LeaseTimeToLiveRequest, LeaseTimeToLiveResponse,
};

use super::*;

fn leases(node: &ApiTestNode) -> LeaseClient<Channel> {
    LeaseClient::new(node.channel.clone())
}

async fn grant(node: &ApiTestNode, id: i64, ttl: i64) -> Result<(i64, i64), Status> {
    let granted = leases(node).lease_grant(LeaseGrantRequest { id, ttl }).await?.into_inner();
    assert_eq!(granted.header.unwrap().member_id, MEMBER);
    Ok((granted.id, granted.ttl))
}

async fn left(node: &ApiTestNode, id: i64) -> LeaseTimeToLiveResponse {
    let request = LeaseTimeToLiveRequest { id, keys: true };
    leases(node).lease_time_to_live(request).await.unwrap().into_inner()
}

async fn keep_alive(node: &ApiTestNode, ids: &[i64]) -> Vec<(i64, i64)> {
    let wishes: Vec<_> = ids.iter().map(|&id| LeaseKeepAliveRequest { id }).collect();
    let wishes = futures_util::stream::iter(wishes);
    let mut answers = leases(node).lease_keep_alive(wishes).await.unwrap().into_inner();
    let mut told = Vec::new();
    while let Some(answer) = answers.message().await.unwrap() {
        assert!(answer.header.is_some());
        told.push((answer.id, answer.ttl));
    }
    told
}

#[tokio::test]
async fn a_lease_behaves_as_in_etcd() {
    let node = ApiTestNode::start().await;
    assert_eq!(grant(&node, 5, 1_000).await.unwrap(), (5, 1_000));
    for ttl in [0, -5, 1, i64::MIN] {
        let (id, ttl) = grant(&node, 0, ttl).await.unwrap();
        assert!(id > 0);
        assert_eq!(ttl, 2, "the shortest");
    }
    let text = "etcdserver: lease already exists".to_owned();
    assert_eq!(code_and_text(grant(&node, 5, 9).await), (Code::FailedPrecondition, text));
    let text = "etcdserver: too large lease TTL".to_owned();
    assert_eq!(code_and_text(grant(&node, 6, 9_000_000_001).await), (Code::OutOfRange, text));
    for key in ["b", "a"] {
        node.kv().put(PutRequest { lease: 5, ..put(key, "v") }).await.unwrap();
    }
    let found = left(&node, 5).await;
    assert_eq!((found.id, found.granted_ttl), (5, 1_000));
    // A lease that was granted before the leader's lease clock started gets an election timeout in
    // addition to its TTL.
    assert!((1..=1_001).contains(&found.ttl));
    assert_eq!(found.keys, [bytes("a"), bytes("b")]);
    let unasked = LeaseTimeToLiveRequest { id: 5, keys: false };
    let found = leases(&node).lease_time_to_live(unasked).await.unwrap().into_inner();
    assert_eq!((found.granted_ttl, found.keys.len()), (1_000, 0));
    let kept = node.kv().range(range("a")).await.unwrap().into_inner();
    assert_eq!(kept.kvs[0].lease, 5);
    let keys = RangeRequest { keys_only: true, ..range("a") };
    let keys = node.kv().range(keys).await.unwrap().into_inner();
    assert_eq!(keys.kvs[0].lease, 0, "as etcd 3.7 has it");
    let all = leases(&node).lease_leases(LeaseLeasesRequest {}).await.unwrap().into_inner();
    assert!(all.leases.iter().any(|lease| lease.id == 5));
    leases(&node).lease_revoke(LeaseRevokeRequest { id: 5 }).await.unwrap();
    assert!(node.kv().range(range("a")).await.unwrap().into_inner().kvs.is_empty());
    let text = "etcdserver: requested lease not found".to_owned();
    let revoked = leases(&node).lease_revoke(LeaseRevokeRequest { id: 5 }).await;
    assert_eq!(code_and_text(revoked), (Code::NotFound, text));
    let found = left(&node, 5).await;
    assert_eq!((found.id, found.ttl, found.granted_ttl, found.keys.len()), (5, -1, 0, 0));
}

#[tokio::test]
async fn one_stream_renews_many_leases_and_is_answered_in_order() {
    let node = ApiTestNode::start().await;
    for id in 1..=600 {
        grant(&node, id, 1_000 + id).await.unwrap();
    }
    let ids: Vec<i64> = (1..=601).rev().chain([7, 7]).collect();
    let ttl = |id| if id == 601 { 0 } else { 1_000 + id };
    let expected: Vec<(i64, i64)> = ids.iter().map(|&id| (id, ttl(id))).collect();
    assert_eq!(keep_alive(&node, &ids).await, expected);
    assert!(keep_alive(&node, &[]).await.is_empty());
    let metrics = node.get("/metrics").await.1;
    assert!(metrics.contains("\netcd_debugging_lease_renewed_total 602\n"), "{metrics}");
    assert!(metrics.contains("\netcd_debugging_lease_granted_total 600\n"));
}

#[tokio::test]
async fn a_renewal_of_a_lease_under_checkpoint_waits_and_succeeds() {
    let node = ApiTestNode::start().await;
    for (id, ttl) in [(1, 2_000), (2, 400), (3, 3_000)] {
        grant(&node, id, ttl).await.unwrap();
    }
    // After 250 s, only lease 2, the shortest, is due for a record of its remaining time.
    let noted = {
        let (mut lessor, now) = node.context.clock.read();
        lessor.due_checkpoint(now + Duration::from_secs(250)).unwrap()
    };
    assert_eq!(noted.leases.iter().map(|one| one.id).collect::<Vec<_>>(), [2]);
    let asked = keep_alive(&node, &[1, 2, 3, 4]);
    let done = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        node.context.clock.read().0.finish_checkpoint(&noted);
    };
    let (answered, ()) = tokio::join!(asked, done);
    assert_eq!(answered, [(1, 2_000), (2, 400), (3, 3_000), (4, 0)]);
}

#[tokio::test]
async fn a_lease_without_renewals_is_revoked_with_its_keys() {
    let node = ApiTestNode::start().await;
    let (kept, _) = grant(&node, 0, 1_000).await.unwrap();
    let put = async |key, lease| node.kv().put(PutRequest { lease, ..put(key, "v") }).await;
    put("kept", kept).await.unwrap();
    let (mut granted, mut ttl) = (0, 2);
    let id = loop {
        let (id, _) = grant(&node, 0, ttl).await.unwrap();
        granted += 1;
        if put("gone", id).await.is_ok() {
            break id;
        }
        // On a slow machine the lease expired before the put, so the TTL is doubled.
        ttl *= 2;
    };
    while left(&node, id).await.ttl != -1 {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(node.kv().range(range("gone")).await.unwrap().into_inner().kvs.is_empty());
    assert_eq!(node.kv().range(range("kept")).await.unwrap().into_inner().kvs.len(), 1);
    assert_eq!(keep_alive(&node, &[id, kept]).await, [(id, 0), (kept, 1_000)]);
    let metrics = node.get("/metrics").await.1;
    assert!(
        metrics.contains(&format!("\netcd_debugging_server_lease_expired_total {granted}\n")),
        "{metrics}"
    );
}
