//! Tests of alarms, quota, defragmentation, checksums and downgrades over the wire.

use super::*;
use crate::rpc::maintenance::MAX_CONCURRENT_HASHES;

#[tokio::test]
async fn alarms_are_raised_shown_and_lowered() {
    let node = ApiTestNode::start().await;
    let mut maintenance = MaintenanceClient::new(node.channel.clone());
    let request = |action| AlarmRequest { action, member_id: MEMBER, alarm: 1 };
    maintenance.alarm(request(1)).await.unwrap();
    let shown = maintenance.alarm(AlarmRequest::default()).await.unwrap().into_inner();
    assert_eq!((shown.alarms.len(), shown.alarms[0].member_id), (1, MEMBER));
    let text = "etcdserver: mvcc: database space exceeded";
    let refused = code_and_text(node.kv().put(put("k", "v")).await);
    assert_eq!(refused, (Code::ResourceExhausted, text.to_owned()));
    let (status, body) = node.get("/health").await;
    assert_eq!(status, "503 Service Unavailable");
    assert_eq!(body, "{\"health\":\"false\",\"reason\":\"ALARM NOSPACE\"}\n");
    assert_eq!(node.get("/health?exclude=NOSPACE").await.0, "200 OK");
    let lowered = maintenance.alarm(request(2)).await.unwrap().into_inner();
    assert_eq!(lowered.alarms.len(), 1);
    node.put("k", "v").await;
}

#[tokio::test]
async fn an_empty_store_reports_one_page_in_use() {
    let node = ApiTestNode::start().await;
    let mut maintenance = MaintenanceClient::new(node.channel.clone());
    let status = maintenance.status(StatusRequest {}).await.unwrap().into_inner();
    assert_eq!(status.db_size_in_use, 4_096);
    assert!(status.db_size >= status.db_size_in_use, "{status:?}");
    let (_, metrics) = node.http("GET", "/metrics").await;
    assert!(metrics.contains("\netcd_mvcc_db_total_size_in_use_in_bytes 4096\n"), "{metrics}");
}

#[tokio::test]
async fn writes_above_the_quota_are_refused_until_the_alarm_is_disarmed() {
    let limits = ApiLimits { quota: Quota(4_000), ..ApiLimits::default() };
    let node = ApiTestNode::start_with(limits).await;
    let mut maintenance = MaintenanceClient::new(node.channel.clone());
    let value = "x".repeat(1_000);
    let mut refusals = Vec::new();
    while refusals.is_empty() {
        refusals.extend(node.kv().put(put("k", &value)).await.err());
    }
    let text = "etcdserver: mvcc: database space exceeded".to_owned();
    assert_eq!((refusals[0].code(), refusals[0].message()), (Code::ResourceExhausted, &text[..]));
    let status = maintenance.status(StatusRequest {}).await.unwrap().into_inner();
    assert_eq!(status.db_size_quota, 4_000);
    assert!((2_000..=4_096).contains(&status.db_size_in_use), "{}", status.db_size_in_use);
    assert_eq!(status.errors, [format!("memberID:{MEMBER} alarm:NOSPACE ")]);

    // Now the alarm refuses even the smallest write, on every member.
    let revision = status.header.unwrap().revision;
    assert_eq!(
        code_and_text(node.kv().put(put("small", "")).await),
        (Code::ResourceExhausted, text)
    );
    let gone = DeleteRangeRequest { key: "none".into(), ..Default::default() };
    node.kv().delete_range(gone).await.unwrap();
    node.compact(revision).await.unwrap();
    assert!(node.kv().put(put("small", "")).await.is_err(), "nobody has lowered the alarm");
    let lower = AlarmRequest { action: 2, member_id: MEMBER, alarm: 1 };
    maintenance.alarm(lower).await.unwrap();
    node.put("k", &value).await;
    let (_, metrics) = node.http("GET", "/metrics").await;
    assert!(metrics.contains("\netcd_server_quota_backend_bytes 4000\n"), "{metrics}");
}

#[tokio::test]
async fn a_defragmentation_shrinks_the_file_and_answers_as_in_etcd() {
    let node = ApiTestNode::start().await;
    let mut maintenance = MaintenanceClient::new(node.channel.clone());
    let value = "x".repeat(100_000);
    let mut revision = 0;
    for _ in 0..40 {
        revision = node.put("k", &value).await;
    }
    node.compact(revision).await.unwrap();
    let before = maintenance.status(StatusRequest {}).await.unwrap().into_inner().db_size;
    let answer = maintenance.defragment(DefragmentRequest {}).await.unwrap().into_inner();
    assert_eq!(answer, DefragmentResponse { header: None });
    let after = maintenance.status(StatusRequest {}).await.unwrap().into_inner();
    assert!(after.db_size * 4 < before, "{before} to {}", after.db_size);
    assert!(after.db_size >= after.db_size_in_use, "{after:?}");
    assert!(node.put("k", "after").await > revision);
    let (_, metrics) = node.http("GET", "/metrics").await;
    assert!(metrics.contains("etcd_disk_backend_defrag_duration_seconds_count 1"), "{metrics}");
}

#[tokio::test]
async fn a_hash_covers_all_state_and_downgrades_are_refused() {
    let node = ApiTestNode::start().await;
    let mut maintenance = MaintenanceClient::new(node.channel.clone());
    let mut hashes = Vec::new();
    for step in 0..4 {
        match step {
            1 => drop(node.put("k", "v").await),
            2 => {
                let raise = AlarmRequest { action: 1, member_id: MEMBER, alarm: 1 };
                maintenance.alarm(raise).await.unwrap();
            }
            3 => node.compact(2).await.unwrap(),
            _ => {}
        }
        let answer = maintenance.hash(HashRequest {}).await.unwrap().into_inner();
        assert_eq!(answer, maintenance.hash(HashRequest {}).await.unwrap().into_inner());
        assert_eq!(answer.header.unwrap().revision, if step == 0 { 1 } else { 2 });
        hashes.push(answer.hash);
    }
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), 4);

    let mut ask = async |action, version: &str| {
        let request = DowngradeRequest { action, version: version.to_owned() };
        maintenance.downgrade(request).await
    };
    for action in [0, 1] {
        let none = "etcdserver: invalid downgrade target version".to_owned();
        assert_eq!(code_and_text(ask(action, "3.5.0").await), (Code::InvalidArgument, none));
        let wrong = "etcdserver: wrong downgrade target version format".to_owned();
        assert_eq!(code_and_text(ask(action, "3").await), (Code::InvalidArgument, wrong));
    }
    assert_eq!(ask(2, "").await.unwrap().into_inner().version, "3.6");
    assert_eq!(
        code_and_text(ask(3, "").await),
        (Code::Unknown, "etcdserver: unknown method".to_owned())
    );
}

#[tokio::test]
async fn the_number_of_concurrent_whole_store_checksums_is_limited() {
    let node = ApiTestNode::start().await;
    let most = u32::try_from(MAX_CONCURRENT_HASHES).unwrap();
    let all = node.context.hash_permits.clone().acquire_many_owned(most).await.unwrap();
    let [mut first, mut second] = [(); 2].map(|()| MaintenanceClient::new(node.channel.clone()));
    let hash_kv = tokio::spawn(async move { first.hash_kv(HashKvRequest::default()).await });
    let hash = tokio::spawn(async move { second.hash(HashRequest::default()).await });
    for n in 0..10 {
        node.put("k", &n.to_string()).await;
    }
    assert!(!hash_kv.is_finished() && !hash.is_finished(), "others go on, and they wait");
    drop(all);
    let (hash_kv, hash) = (hash_kv.await.unwrap().unwrap(), hash.await.unwrap().unwrap());
    assert!(
        hash_kv.into_inner().hash_revision > 10 && hash.into_inner().header.unwrap().revision > 10
    );
}
