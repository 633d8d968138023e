//! Maintenance of members that run: their quota.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod common;

use common::{Member, all, same_hash, settled, three};
use node_proto::etcdserverpb::kv_client::KvClient;
use node_proto::etcdserverpb::maintenance_client::MaintenanceClient;
use node_proto::etcdserverpb::{AlarmRequest, AlarmType, CompactionRequest};
use tonic::Code;

async fn alarms(member: &Member) -> Vec<(u64, AlarmType)> {
    let answer = MaintenanceClient::new(member.channel()).alarm(AlarmRequest::default()).await;
    answer.unwrap().into_inner().alarms.iter().map(|a| (a.member_id, a.alarm())).collect()
}

#[tokio::test]
async fn one_members_quota_stops_the_writes_of_all_and_a_compaction_makes_room() {
    let root = tempfile::tempdir().unwrap();
    let mut members = three(root.path());
    members[1].args.push("--quota-backend-bytes=100000".to_owned());
    members.iter_mut().for_each(Member::start);
    members.iter_mut().for_each(Member::ready);
    settled(&all(&members)).await;
    let own = members[1].member_id().await;

    let value = "x".repeat(10_000);
    let mut last = 0;
    let refused = loop {
        match members[1].put("k", &value).await {
            Ok(revision) => last = revision,
            Err(status) => break status,
        }
    };
    assert!((5..=11).contains(&last), "nine fit, from revision 2 on: {last}");
    assert_eq!(refused.code(), Code::ResourceExhausted);
    for member in &members {
        assert_eq!(alarms(member).await, [(own, AlarmType::Nospace)]);
        let refused = member.put("k", "small").await.unwrap_err();
        assert_eq!(refused.message(), "etcdserver: mvcc: database space exceeded");
        assert_eq!(member.get("k").await.unwrap().as_deref(), Some(&value[..]));
    }

    let compaction = CompactionRequest { revision: last, physical: true };
    KvClient::new(members[1].channel()).compact(compaction).await.unwrap();
    let lower = AlarmRequest { action: 2, member_id: own, alarm: AlarmType::Nospace.into() };
    MaintenanceClient::new(members[0].channel()).alarm(lower).await.unwrap();
    let revision = members[1].put("k", &value).await.unwrap();
    same_hash(&members, revision).await;
}
