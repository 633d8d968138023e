//! A full disk refuses writes until there is space again. A failed sync ends the process, and no
//! write is acknowledged after it. The log names the problem in both cases.

use std::time::{Duration, Instant};

use crate::common::{
    TestMember, WAIT_LIMIT, eventually, fault_injector::FaultInjector, report_skip,
    small::SmallFilesystem,
};
use node_proto::etcdserverpb::kv_client::KvClient;
use node_proto::etcdserverpb::maintenance_client::MaintenanceClient;
use node_proto::etcdserverpb::{
    AlarmRequest, AlarmType, CompactionRequest, DeleteRangeRequest, PutRequest,
};
use tonic::Code;

async fn put(member: &TestMember, key: String, bytes: usize) -> Result<(), tonic::Status> {
    let request =
        PutRequest { key: key.into(), value: vec![7; bytes].into(), ..Default::default() };
    KvClient::new(member.channel()).put(request).await.map(|_| ())
}

#[tokio::test]
async fn with_a_full_disk_growing_writes_are_refused_until_there_is_space() {
    let root = tempfile::tempdir().unwrap();
    let Some(small) = SmallFilesystem::mount(&root.path().join("small"), 400) else {
        return report_skip("no tmpfs can be mounted");
    };
    let mut member = TestMember::alone(root.path());
    member.args.push(format!("--data-dir={}", small.0.join("data").display()));
    member.start();
    member.wait_ready();
    put(&member, "before".to_owned(), 10).await.unwrap();
    let filler = small.fill_up_to(40 << 20);

    let start = Instant::now();
    let refused = loop {
        match put(&member, "grows".to_owned(), 1000).await {
            Ok(()) => assert!(start.elapsed() < WAIT_LIMIT, "never refused"),
            Err(status) => break status,
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert_eq!(refused.message(), "etcdserver: mvcc: database space exceeded");
    eventually("it says so", || member.log().contains("the disk is almost full"));

    // Reads, deletions and compactions still work while the disk is full. The alarm names the
    // member that lacks space.
    assert!(member.get("before").await.unwrap().is_some());
    let mut kv = KvClient::new(member.channel());
    let gone = DeleteRangeRequest { key: "grows".into(), ..Default::default() };
    let revision = kv.delete_range(gone).await.unwrap().into_inner().header.unwrap().revision;
    kv.compact(CompactionRequest { revision, physical: true }).await.unwrap();
    let own = member.status().await.unwrap().header.unwrap().member_id;
    let start = Instant::now();
    while alarms(&member).await != [(own, AlarmType::Nospace)] {
        assert!(start.elapsed() < WAIT_LIMIT, "no alarm");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    std::fs::remove_file(&filler).unwrap();
    let start = Instant::now();
    while put(&member, "after".to_owned(), 10).await.is_err() {
        assert!(start.elapsed() < WAIT_LIMIT, "never taken again");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(alarms(&member).await, []);
    assert_eq!(member.stop(), Some(0));
}

async fn alarms(member: &TestMember) -> Vec<(u64, AlarmType)> {
    let answer = MaintenanceClient::new(member.channel()).alarm(AlarmRequest::default()).await;
    answer.unwrap().into_inner().alarms.iter().map(|a| (a.member_id, a.alarm())).collect()
}

#[tokio::test]
async fn a_failed_sync_ends_the_process_and_loses_nothing_acknowledged() {
    for (errno, advice) in [("EIO", "the disk failed"), ("ENOSPC", "the disk is full")] {
        let root = tempfile::tempdir().unwrap();
        let mut member = TestMember::alone(root.path());
        member.start();
        member.wait_ready();
        member.put("told", "1").await.unwrap();
        let error = format!("error={errno}");
        let Some(injector) = FaultInjector::attach(member.id(), "fdatasync", &error) else {
            return report_skip("strace cannot be used");
        };
        assert!(member.put("untold", "2").await.is_err(), "acknowledged after {errno}");
        assert_eq!(member.exit_code(), Some(1), "{}", member.log());
        drop(injector);
        let log = member.log();
        let last = log.lines().find(|line| line.contains("stopping at once")).unwrap();
        assert!(last.contains("can't sync") && last.contains(advice), "{last}");
        assert_eq!(log.matches("stopping at once").count(), 1, "one failure, told once: {log}");

        member.start();
        member.wait_ready();
        assert_eq!(member.get("told").await.unwrap().as_deref(), Some("1"));
        eventually("it takes writes", || member.log().contains("ready to serve"));
        member.put("again", "3").await.unwrap();
    }
}

#[tokio::test]
async fn an_emptied_store_file_is_noticed() {
    let root = tempfile::tempdir().unwrap();
    let mut member = TestMember::alone(root.path());
    member.start();
    member.wait_ready();
    put(&member, "k".to_owned(), 10).await.unwrap();
    assert_eq!(member.stop(), Some(0));
    let store = member.data_dir.join("member/db");
    std::fs::File::options().write(true).open(&store).unwrap().set_len(0).unwrap();
    let looked = crate::common::node_command()
        .args(["data", "status"])
        .arg(&member.data_dir)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&looked.stdout).into_owned();
    assert!(said.contains("damaged") && said.contains("is missing or empty"), "{said}");
    member.start();
    assert_eq!(member.exit_code(), Some(3));
    assert!(member.log().contains("its cluster must remove it and add a new one"));
    assert_eq!(std::fs::metadata(&store).unwrap().len(), 0, "nothing was made anew");
}
