//! Tests of locks and elections over the wire.

use node_proto::etcdserverpb::lease_client::LeaseClient;
use node_proto::etcdserverpb::{LeaseGrantRequest, LeaseRevokeRequest, LeaseTimeToLiveRequest};
use node_proto::v3electionpb::election_client::ElectionClient;
use node_proto::v3electionpb::{
    CampaignRequest, LeaderKey, LeaderRequest, LeaderResponse, ProclaimRequest, ResignRequest,
};
use node_proto::v3lockpb::lock_client::LockClient;
use node_proto::v3lockpb::{LockRequest, LockResponse, UnlockRequest};
use tokio::task::JoinHandle;

use super::*;

pub(super) async fn with_leases(leases: &[i64]) -> ApiTestNode {
    let node = ApiTestNode::start().await;
    for id in leases {
        let grant = LeaseGrantRequest { id: *id, ttl: 1_000 };
        LeaseClient::new(node.channel.clone()).lease_grant(grant).await.unwrap();
    }
    node
}

fn locks(node: &ApiTestNode) -> LockClient<Channel> {
    LockClient::new(node.channel.clone())
}

pub(super) fn elections(node: &ApiTestNode) -> ElectionClient<Channel> {
    ElectionClient::new(node.channel.clone())
}

pub(super) async fn lock(
    node: &ApiTestNode,
    name: &str,
    lease: i64,
) -> Result<LockResponse, Status> {
    let request = LockRequest { name: bytes(name), lease };
    Ok(locks(node).lock(request).await?.into_inner())
}

/// Requests a lock in the background. Returns once the request's entry is in the queue.
pub(super) async fn waits(
    node: &ApiTestNode,
    name: &str,
    lease: i64,
) -> JoinHandle<Result<LockResponse, Status>> {
    let (mut client, key) = (locks(node), format!("{name}/{lease:x}"));
    let request = LockRequest { name: bytes(name), lease };
    let waiting = tokio::spawn(async move { Ok(client.lock(request).await?.into_inner()) });
    until(node, &key, true).await;
    waiting
}

/// Waits until a key exists, or until it doesn't exist if `there` is false.
async fn until(node: &ApiTestNode, key: &str, there: bool) {
    let seen = async {
        while node.kv().range(range(key)).await.unwrap().into_inner().kvs.is_empty() == there {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon(seen).await;
}

fn unknown(text: &str) -> (Code, String) {
    (Code::Unknown, text.to_owned())
}

async fn unlock(node: &ApiTestNode, key: &str) -> i64 {
    let request = UnlockRequest { key: bytes(key) };
    locks(node).unlock(request).await.unwrap().into_inner().header.unwrap().revision
}

#[tokio::test]
async fn one_lease_at_a_time_holds_a_lock_in_the_order_of_arrival() {
    let node = with_leases(&[0x5, 0xfe, 0x7]).await;
    let first = lock(&node, "a", 5).await.unwrap();
    let header = first.header.unwrap();
    assert_eq!((&first.key[..], header.revision, header.member_id), (&b"a/5"[..], 2, MEMBER));
    assert_eq!(lock(&node, "a", 5).await.unwrap().key, "a/5", "it has it already");
    assert_eq!(lock(&node, "b", 0xfe).await.unwrap().key, "b/fe", "another lock");
    let second = waits(&node, "a", 0xfe).await;
    let third = waits(&node, "a", 7).await;
    // These keys resemble keys of the queue, but don't belong to the queue.
    for other in ["a", "a0", "a/", "/"] {
        node.put(other, "v").await;
        unlock(&node, other).await;
    }
    assert!(!second.is_finished() && !third.is_finished());
    let unlocked = unlock(&node, "a/5").await;
    let second = second.await.unwrap().unwrap();
    assert_eq!((&second.key[..], second.header.unwrap().revision), (&b"a/fe"[..], unlocked));
    assert!(!third.is_finished());
    unlock(&node, "a/fe").await;
    assert_eq!(third.await.unwrap().unwrap().key, "a/7");
    let metrics = node.get("/metrics").await.1;
    let counted = "\ngrpc_server_handled_total{grpc_code=\"OK\",grpc_method=\"Lock\",grpc_service=\"v3lockpb.Lock\",grpc_type=\"unary\"} 5\n";
    assert!(metrics.contains(counted), "{metrics}");
}

#[tokio::test]
async fn a_client_that_stops_waiting_leaves_the_queue_and_keeps_its_lease() {
    let node = with_leases(&[1, 2, 3]).await;
    lock(&node, "a", 1).await.unwrap();
    let second = waits(&node, "a", 2).await;
    let third = waits(&node, "a", 3).await;
    second.abort();
    until(&node, "a/2", false).await;
    assert!(!third.is_finished());
    unlock(&node, "a/1").await;
    assert_eq!(third.await.unwrap().unwrap().key, "a/3");
    assert_eq!(lock(&node, "b", 2).await.unwrap().key, "b/2");
}

#[tokio::test]
async fn a_client_that_leaves_at_any_moment_leaves_no_queue_entry() {
    let node = with_leases(&[1]).await;
    lock(&node, "a", 1).await.unwrap();
    let leases: Vec<i64> = (2..60).collect();
    for id in &leases {
        let grant = LeaseGrantRequest { id: *id, ttl: 1_000 };
        LeaseClient::new(node.channel.clone()).lease_grant(grant).await.unwrap();
    }
    for (lease, patience) in leases.iter().zip((0..).step_by(100)) {
        let waiting = lock(&node, "a", *lease);
        let left = tokio::time::timeout(Duration::from_micros(patience), waiting).await;
        assert!(left.is_err(), "somebody has it");
    }
    let places = async || {
        let (key, range_end) = crate::rpc::lock_queue::queue_range(b"a");
        let line = RangeRequest { key, range_end, ..RangeRequest::default() };
        node.kv().range(line).await.unwrap().into_inner().kvs.len()
    };
    let alone = async {
        while places().await > 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon(alone).await;
}

#[tokio::test]
async fn a_waiting_lock_request_fails_if_its_lease_has_ended() {
    let node = with_leases(&[1, 2]).await;
    lock(&node, "a", 1).await.unwrap();
    let second = waits(&node, "a", 2).await;
    let mut leases = LeaseClient::new(node.channel.clone());
    leases.lease_revoke(LeaseRevokeRequest { id: 2 }).await.unwrap();
    leases.lease_revoke(LeaseRevokeRequest { id: 1 }).await.unwrap();
    assert_eq!(code_and_text(second.await.unwrap()), unknown("mutex: session is expired"));
}

#[tokio::test]
async fn a_lock_request_without_a_lease_gets_one_and_errors_have_etcds_texts() {
    let node = with_leases(&[1]).await;
    let own = lock(&node, "a", 0).await.unwrap().key;
    let id = std::str::from_utf8(&own).unwrap().strip_prefix("a/").unwrap();
    let id = i64::from_str_radix(id, 16).unwrap();
    let mut leases = LeaseClient::new(node.channel.clone());
    let left = leases.lease_time_to_live(LeaseTimeToLiveRequest { id, keys: true }).await.unwrap();
    let left = left.into_inner();
    assert_eq!((left.granted_ttl, left.keys), (60, vec![own]));
    let no_lease = unknown("etcdserver: requested lease not found");
    assert_eq!(code_and_text(lock(&node, "a", 9).await), no_lease);
    assert_eq!(code_and_text(lock(&node, "a", -1).await), no_lease);
    let no_key = unknown("etcdserver: key is not provided");
    assert_eq!(code_and_text(locks(&node).unlock(UnlockRequest::default()).await), no_key);
    let no_leader = unknown("\"leader\" field must be provided");
    assert_eq!(
        code_and_text(elections(&node).proclaim(ProclaimRequest::default()).await),
        no_leader
    );
    assert_eq!(code_and_text(elections(&node).resign(ResignRequest::default()).await), no_leader);
    let nobody = LeaderRequest { name: bytes("e") };
    let told = code_and_text(elections(&node).leader(nobody).await);
    assert_eq!(told, unknown("election: no leader"));
}

async fn campaign(node: &ApiTestNode, lease: i64, value: &str) -> Result<(LeaderKey, i64), Status> {
    let request = CampaignRequest { name: bytes("e"), lease, value: bytes(value) };
    let won = elections(node).campaign(request).await?.into_inner();
    Ok((won.leader.unwrap(), won.header.unwrap().revision))
}

async fn proclaim(node: &ApiTestNode, leader: &LeaderKey, value: &str) -> Result<i64, Status> {
    let request = ProclaimRequest { leader: Some(leader.clone()), value: bytes(value) };
    Ok(elections(node).proclaim(request).await?.into_inner().header.unwrap().revision)
}

fn seen(answer: &LeaderResponse) -> (&[u8], &[u8]) {
    let kv = answer.kv.as_ref().unwrap();
    (&kv.key, &kv.value)
}

#[tokio::test]
async fn an_election_is_won_proclaimed_observed_and_resigned() {
    let node = with_leases(&[1, 2]).await;
    let all = LeaderRequest { name: bytes("e") };
    let mut observed = elections(&node).observe(all.clone()).await.unwrap().into_inner();
    let (first, revision) = campaign(&node, 1, "one").await.unwrap();
    let key = LeaderKey { name: bytes("e"), key: bytes("e/1"), rev: 2, lease: 1 };
    assert_eq!((&first, revision), (&key, 2));
    let answer = observed.message().await.unwrap().unwrap();
    assert_eq!((seen(&answer), answer.header.unwrap().revision), ((&b"e/1"[..], &b"one"[..]), 2));
    let (mut client, other) = (elections(&node), bytes("two"));
    let waiting = tokio::spawn(async move {
        client.campaign(CampaignRequest { name: bytes("e"), lease: 2, value: other }).await
    });
    until(&node, "e/2", true).await;
    assert_eq!(proclaim(&node, &first, "still one").await.unwrap(), 4);
    // The leader campaigns again with the same lease. It still leads, and its value changes.
    assert_eq!(campaign(&node, 1, "again").await.unwrap(), (key, 4));
    for value in [&b"still one"[..], b"again"] {
        assert_eq!(seen(&observed.message().await.unwrap().unwrap()), (&b"e/1"[..], value));
    }
    let leader = elections(&node).leader(all).await.unwrap().into_inner();
    assert_eq!(seen(&leader), (&b"e/1"[..], &b"again"[..]));
    assert!(!waiting.is_finished());
    let resign = ResignRequest { leader: Some(first.clone()) };
    elections(&node).resign(resign.clone()).await.unwrap();
    let second = waiting.await.unwrap().unwrap().into_inner().leader.unwrap();
    assert_eq!((&second.key[..], second.rev, second.lease), (&b"e/2"[..], 3, 2));
    assert_eq!(seen(&observed.message().await.unwrap().unwrap()), (&b"e/2"[..], &b"two"[..]));
    // A former leader can't proclaim, and can't delete the key of the current leader.
    let not_leader = unknown("election: not leader");
    assert_eq!(code_and_text(proclaim(&node, &first, "late").await), not_leader);
    elections(&node).resign(resign).await.unwrap();
    let impostor = LeaderKey { key: second.key.clone(), ..first };
    assert_eq!(code_and_text(proclaim(&node, &impostor, "late").await), not_leader);
    elections(&node).resign(ResignRequest { leader: Some(impostor) }).await.unwrap();
    proclaim(&node, &second, "mine").await.unwrap();
    assert_eq!(seen(&observed.message().await.unwrap().unwrap()), (&b"e/2"[..], &b"mine"[..]));
}

/// A cancelled campaign of the current leader must not delete its entry.
#[tokio::test]
async fn a_cancelled_campaign_of_the_leader_keeps_its_entry() {
    let node = with_leases(&[1]).await;
    let (leader, _) = campaign(&node, 1, "value").await.unwrap();
    for micros in (0..200).map(|n| n * 10) {
        let (mut client, value) = (elections(&node), bytes(&micros.to_string()));
        let request = CampaignRequest { name: bytes("e"), lease: 1, value };
        let again = tokio::spawn(async move { client.campaign(request).await });
        tokio::time::sleep(Duration::from_micros(micros)).await;
        again.abort();
    }
    let found = node.kv().range(range("e/1")).await.unwrap().into_inner().kvs;
    assert_eq!(found.first().map(|kv| kv.create_revision), Some(leader.rev));
}

#[tokio::test]
async fn a_candidate_whose_lease_has_ended_does_not_win() {
    let node = with_leases(&[1, 2]).await;
    let (first, _) = campaign(&node, 1, "one").await.unwrap();
    let mut client = elections(&node);
    let request = CampaignRequest { name: bytes("e"), lease: 2, value: bytes("two") };
    let waiting = tokio::spawn(async move { client.campaign(request).await });
    until(&node, "e/2", true).await;
    let mut leases = LeaseClient::new(node.channel.clone());
    leases.lease_revoke(LeaseRevokeRequest { id: 2 }).await.unwrap();
    elections(&node).resign(ResignRequest { leader: Some(first) }).await.unwrap();
    assert_eq!(code_and_text(waiting.await.unwrap()), unknown("election: not leader"));
}

#[tokio::test]
async fn a_candidate_whose_campaign_fails_leaves_the_queue() {
    let node = with_leases(&[1]).await;
    // Another client has put the candidate's key without a lease. So the key outlives the lease
    // that is revoked below.
    node.put("e/1", "other").await;
    let mut leases = LeaseClient::new(node.channel.clone());
    leases.lease_revoke(LeaseRevokeRequest { id: 1 }).await.unwrap();
    let refused = campaign(&node, 1, "mine").await;
    assert_eq!(code_and_text(refused), unknown("etcdserver: requested lease not found"));
    let found = node.kv().range(range("e/1")).await.unwrap().into_inner().kvs;
    assert_eq!(found, Vec::new());
}

#[tokio::test]
async fn an_observer_gets_the_current_leader_after_a_compaction() {
    let node = with_leases(&[1, 2]).await;
    let mut observed = elections(&node).observe(LeaderRequest { name: bytes("e") }).await.unwrap();
    let (first, _) = campaign(&node, 1, "one").await.unwrap();
    assert_eq!(seen(&observed.get_mut().message().await.unwrap().unwrap()).1, b"one");
    elections(&node).resign(ResignRequest { leader: Some(first) }).await.unwrap();
    let (_, revision) = campaign(&node, 2, "two").await.unwrap();
    node.compact(revision).await.unwrap();
    assert_eq!(seen(&observed.get_mut().message().await.unwrap().unwrap()).1, b"two");
}
