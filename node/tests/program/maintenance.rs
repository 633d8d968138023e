//! Maintenance of running members: space quota, defragmentation and automatic compaction.

use std::time::{Duration, Instant};

use crate::common::{
    TestMember, WAIT_LIMIT, as_refs, etcdctl, fault_injector::FaultInjector, put_with_retries,
    report_skip, start_three, three_members, wait_same_hash, wait_settled,
};
use node_proto::etcdserverpb::kv_client::KvClient;
use node_proto::etcdserverpb::maintenance_client::MaintenanceClient;
use node_proto::etcdserverpb::{
    AlarmRequest, AlarmType, CompactionRequest, DefragmentRequest, RangeRequest,
};
use tonic::Code;

async fn alarms(member: &TestMember) -> Vec<(u64, AlarmType)> {
    let answer = MaintenanceClient::new(member.channel()).alarm(AlarmRequest::default()).await;
    answer.unwrap().into_inner().alarms.iter().map(|a| (a.member_id, a.alarm())).collect()
}

#[tokio::test]
async fn one_members_quota_stops_the_writes_of_all_and_a_compaction_makes_room() {
    let root = tempfile::tempdir().unwrap();
    let mut members = three_members(root.path());
    members[1].args.push("--quota-backend-bytes=100000".to_owned());
    members.iter_mut().for_each(TestMember::start);
    members.iter_mut().for_each(TestMember::wait_ready);
    wait_settled(&as_refs(&members)).await;
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
    wait_same_hash(&members, revision).await;
}

/// Writes and compacts, so that the file is much larger than its data. Returns the last revision.
async fn write_and_compact(member: &TestMember) -> i64 {
    let value = "x".repeat(100_000);
    let mut revision = 0;
    for n in 0..60 {
        revision = member.put(&format!("k{}", n % 3), &value).await.unwrap();
    }
    let compaction = CompactionRequest { revision, physical: true };
    KvClient::new(member.channel()).compact(compaction).await.unwrap();
    // The last request is a put. For the compaction's own revision, the node caches the hash and
    // loses it in a restart; later comparisons must not use that hash.
    member.put("k0", "small").await.unwrap()
}

async fn defragment(member: &TestMember) -> Result<(), tonic::Status> {
    let mut client = MaintenanceClient::new(member.channel());
    client.defragment(DefragmentRequest {}).await.map(|_| ())
}

fn store_bytes(member: &TestMember) -> u64 {
    std::fs::metadata(member.data_dir.join("member/db")).unwrap().len()
}

#[tokio::test]
async fn etcdctl_defrag_shrinks_each_members_file_while_writes_go_on() {
    let root = tempfile::tempdir().unwrap();
    let members = start_three(root.path());
    wait_settled(&as_refs(&members)).await;
    let revision = write_and_compact(&members[0]).await;
    wait_same_hash(&members, revision).await;
    let before: Vec<u64> = members.iter().map(store_bytes).collect();
    let endpoint = members[0].client_url.clone();
    let defragmenting =
        tokio::task::spawn_blocking(move || etcdctl(&endpoint, &["defrag", "--cluster"]));
    let mut written = 0;
    while !defragmenting.is_finished() || written < 20 {
        written += 1;
        members[written % 3].put("meanwhile", &written.to_string()).await.unwrap();
    }
    let Some((done, said)) = defragmenting.await.unwrap() else { return };
    assert!(done, "{said}");
    for (member, before) in members.iter().zip(before) {
        let line = format!("Finished defragmenting etcd member[{}]", member.client_url);
        assert!(said.contains(&line), "{said}");
        assert!(store_bytes(member) * 2 < before, "{before} to {}", store_bytes(member));
    }
    let revision = members[0].put("after", "x").await.unwrap();
    wait_same_hash(&members, revision).await;
}

#[tokio::test]
async fn a_member_killed_at_any_step_of_a_defragmentation_keeps_all_data() {
    let root = tempfile::tempdir().unwrap();
    let mut member = TestMember::alone(root.path());
    member.start();
    member.wait_ready();
    let revision = write_and_compact(&member).await;
    let hash = member.hash(revision).await.unwrap();
    let mut killed = 0;
    for step in 1.. {
        // These system calls change files. strace counts them in all threads. The node's log makes
        // none of them, because nothing is written to the log here.
        let calls = "fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,ftruncate";
        let what = format!("signal=KILL:when={step}");
        let Some(injector) = FaultInjector::attach(member.id(), calls, &what) else {
            return report_skip("strace cannot be used");
        };
        let done = defragment(&member).await;
        drop(injector);
        if done.is_ok() {
            break;
        }
        assert_eq!(member.exit_code(), None, "step {step}: it was killed");
        killed += 1;
        member.start();
        member.wait_ready();
        assert_eq!(member.hash(revision).await.unwrap(), hash, "step {step}");
        assert!(!member.data_dir.join("member/db.defragmented").exists(), "step {step}");
    }
    assert!(killed >= 4, "only {killed} steps");
    assert!(store_bytes(&member) < 2_000_000, "{}", store_bytes(&member));
    member.put("after", "x").await.unwrap();
}

/// Waits until `revision` is compacted.
async fn wait_until_compacted(member: &TestMember, revision: i64) {
    let start = Instant::now();
    loop {
        let read = RangeRequest { key: "k".into(), revision, ..RangeRequest::default() };
        match KvClient::new(member.channel()).range(read).await {
            Err(status) if status.code() == Code::OutOfRange => return,
            // Any other answer is not final: there may be no leader for a while, for example.
            answer => assert!(start.elapsed() < WAIT_LIMIT, "{answer:?}: {}", member.log()),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn each_leader_compacts_revisions_older_than_the_period() {
    let root = tempfile::tempdir().unwrap();
    let mut members = three_members(root.path());
    for member in &mut members {
        member.args.push("--auto-compaction-retention=1s".to_owned());
        member.start();
    }
    members.iter_mut().for_each(TestMember::wait_ready);
    let leader = wait_settled(&as_refs(&members)).await;
    let first = put_with_retries(&members[leader], "k", "1").await;
    let second = put_with_retries(&members[leader], "k", "2").await;
    wait_until_compacted(&members[(leader + 1) % 3], first).await;
    members[leader].kill();
    members.remove(leader);
    put_with_retries(&members[0], "k", "3").await;
    wait_until_compacted(&members[1], second).await;
    assert_eq!(members[0].get("k").await.unwrap().as_deref(), Some("3"));
}
