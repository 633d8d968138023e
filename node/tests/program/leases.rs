//! Leases on three members: every member answers requests about leases, on behalf of the leader. A
//! new leader continues the leases.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{TestMember, as_refs, etcdctl, eventually, start_three, wait_settled};
use node_proto::etcdserverpb::kv_client::KvClient;
use node_proto::etcdserverpb::lease_client::LeaseClient;
use node_proto::etcdserverpb::{
    LeaseGrantRequest, LeaseKeepAliveRequest, LeaseRevokeRequest, LeaseTimeToLiveRequest,
    LeaseTimeToLiveResponse, PutRequest,
};
use rustix::process::{Pid, Signal, kill_process};
use tonic::Status;
use tonic::transport::Channel;

fn lease_client(member: &TestMember) -> LeaseClient<Channel> {
    LeaseClient::new(member.channel())
}

async fn grant(member: &TestMember, ttl: i64) -> Result<i64, Status> {
    let granted = lease_client(member).lease_grant(LeaseGrantRequest { id: 0, ttl }).await?;
    Ok(granted.into_inner().id)
}

async fn put_with(member: &TestMember, key: &str, lease: i64) {
    let put = PutRequest {
        key: key.to_owned().into(),
        value: "v".into(),
        lease,
        ..PutRequest::default()
    };
    KvClient::new(member.channel()).put(put).await.unwrap();
}

async fn time_to_live(member: &TestMember, id: i64) -> Result<LeaseTimeToLiveResponse, Status> {
    let request = LeaseTimeToLiveRequest { id, keys: true };
    Ok(lease_client(member).lease_time_to_live(request).await?.into_inner())
}

async fn keep_alive(member: &TestMember, id: i64) -> Result<i64, Status> {
    let wish = futures_util::stream::iter([LeaseKeepAliveRequest { id }]);
    let mut answers = lease_client(member).lease_keep_alive(wish).await?.into_inner();
    Ok(answers.message().await?.unwrap().ttl)
}

/// Repeats a request until it succeeds: there is no leader for a while after the old one was lost.
async fn retry<T>(mut ask: impl AsyncFnMut() -> Result<T, Status>) -> T {
    let start = Instant::now();
    loop {
        match ask().await {
            Ok(answer) => return answer,
            Err(error) => assert!(start.elapsed() < crate::common::WAIT_LIMIT, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn every_member_grants_shows_keeps_alive_and_revokes() {
    let root = tempfile::tempdir().unwrap();
    let members = start_three(root.path());
    wait_settled(&as_refs(&members)).await;
    for (n, member) in members.iter().enumerate() {
        let id = grant(member, 500).await.unwrap();
        put_with(&members[(n + 1) % 3], &format!("k{n}"), id).await;
        for other in &members {
            assert_eq!(keep_alive(other, id).await.unwrap(), 500);
            let found = time_to_live(other, id).await.unwrap();
            assert!((400..=501).contains(&found.ttl), "{found:?}");
            assert_eq!((found.granted_ttl, found.keys), (500, vec![format!("k{n}").into()]));
            assert_eq!(keep_alive(other, id + 1_000_000).await.unwrap(), 0);
        }
        lease_client(&members[(n + 2) % 3]).lease_revoke(LeaseRevokeRequest { id }).await.unwrap();
        for other in &members {
            assert_eq!(time_to_live(other, id).await.unwrap().ttl, -1);
            assert_eq!(other.get(&format!("k{n}")).await.unwrap(), None);
        }
    }
}

#[tokio::test]
async fn each_stream_of_one_member_gets_answers_about_its_own_leases() {
    let root = tempfile::tempdir().unwrap();
    let members = start_three(root.path());
    let leader = wait_settled(&as_refs(&members)).await;
    // A follower sends the keep-alives of all its streams to the leader in batches.
    let other = &members[(leader + 1) % 3];
    let mut granted = Vec::new();
    for ttl in 500..530 {
        granted.push((grant(other, ttl).await.unwrap(), ttl));
    }
    let told = granted.iter().map(|(id, _)| keep_alive(other, *id));
    let told = futures_util::future::join_all(told).await;
    for ((_, ttl), told) in granted.into_iter().zip(told) {
        assert_eq!(told.unwrap(), ttl);
    }
}

#[tokio::test]
async fn a_lease_outlives_its_leader_by_no_more_than_its_ttl() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    let leader = wait_settled(&as_refs(&members)).await;
    let (start, ttl) = (Instant::now(), 5);
    let short = grant(&members[leader], ttl).await.unwrap();
    let long = grant(&members[leader], 500).await.unwrap();
    put_with(&members[leader], "short", short).await;
    put_with(&members[leader], "long", long).await;
    members[leader].kill();
    let other = &members[(leader + 1) % 3];
    // Under the new leader, the lease may last its whole TTL again, in addition to the time of the
    // election.
    let found = retry(async || time_to_live(other, short).await).await;
    assert!(found.ttl <= ttl + 1, "{found:?}");
    while retry(async || other.get("short").await).await.is_some() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(start.elapsed() >= Duration::from_secs(5), "it ended early");
    assert_eq!(time_to_live(other, short).await.unwrap().ttl, -1);
    assert_eq!(keep_alive(other, long).await.unwrap(), 500);
    members[leader].start();
    members[leader].wait_ready();
    let back = &members[leader];
    assert_eq!(retry(async || keep_alive(back, long).await).await, 500);
    let url = back.client_url.clone();
    eventually("it has seen that the lease has ended", || {
        etcdctl(&url, &["get", "short", "--consistency=s"])
            .is_none_or(|(_, text)| text.trim().is_empty())
    });
    assert_eq!(back.get("long").await.unwrap().as_deref(), Some("v"));
}

/// etcdctl implements `lock` and `elect` itself, by requests about leases and transactions.
#[test]
fn etcdctls_lock_and_elect_hold_for_as_long_as_they_run() {
    let root = tempfile::tempdir().unwrap();
    let mut member = TestMember::alone(root.path());
    member.start();
    member.wait_ready();
    let url = member.client_url.clone();
    let Some((done, said)) = etcdctl(&url, &["lock", "mine", "echo", "held"]) else { return };
    assert!(done && said.contains("held"), "{said}");
    let held = |prefix: &str| etcdctl(&url, &["get", "--prefix", prefix]).unwrap().1;
    assert_eq!(held("mine/"), "", "it let go of it");
    let elected = |who: &str| {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").args(["--endpoints", &url, "elect", "boss", who]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    let leads = || etcdctl(&url, &["get", "--prefix", "boss/", "--sort-by=CREATE", "--limit=1"]);
    let mut first = elected("first");
    eventually("the first one leads", || leads().unwrap().1.ends_with("first\n"));
    let mut second = elected("second");
    eventually("the second one waits", || held("boss/").contains("second"));
    assert!(leads().unwrap().1.ends_with("first\n"));
    for elected in [&mut first, &mut second] {
        kill_process(Pid::from_child(elected), Signal::INT).unwrap();
        elected.wait().unwrap();
        assert!(!leads().unwrap().1.contains("first"));
    }
    assert_eq!(held("boss/"), "");
}
