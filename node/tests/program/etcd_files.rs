//! Snapshots in both directions: stock etcd starts from a snapshot of this node, and this node from
//! one of stock etcd.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{TestMember, etcdctl, free_ports, report_skip};
use node_proto::etcdserverpb::{
    CompactionRequest, DeleteRangeRequest, RangeRequest, RangeResponse, kv_client::KvClient,
};

/// Path of Debian's etcd, version 3.4.
const ETCD: &str = "/usr/bin/etcd";

fn has_stock() -> bool {
    let has = Path::new(ETCD).exists() && etcdctl("http://127.0.0.1:1", &["version"]).is_some();
    if !has {
        report_skip("Debian's etcd-server and etcd-client are not installed");
    }
    has
}

/// Writes puts, deletions and a compaction. Returns the newest revision.
async fn write_history(member: &TestMember) -> i64 {
    let mut kv = KvClient::new(member.channel());
    let mut revision = 0;
    for n in 0..300_usize {
        let value = "v".repeat(n * 7919 % 12_000);
        revision = member.put(&format!("k{}", n * 31 % 90), &value).await.unwrap();
        if n % 10 == 0 {
            let (from, to) = (format!("k{}", n % 80), format!("k{}", n % 80 + 3));
            let request = DeleteRangeRequest {
                key: from.into(),
                range_end: to.into(),
                ..DeleteRangeRequest::default()
            };
            kv.delete_range(request).await.unwrap();
        }
    }
    let request = CompactionRequest { revision: revision / 2, physical: true };
    kv.compact(request).await.unwrap();
    member.put("last", "one").await.unwrap()
}

async fn full_range(member: &TestMember, revision: i64) -> RangeResponse {
    let all = b"\0".as_slice();
    let request = RangeRequest {
        key: all.into(),
        range_end: all.into(),
        revision,
        ..RangeRequest::default()
    };
    let mut kv = KvClient::new(member.channel()).max_decoding_message_size(64 << 20);
    let answer = kv.range(request).await.unwrap().into_inner();
    RangeResponse { header: None, ..answer }
}

/// Returns a member that runs Debian's etcd. It isn't started yet, and has no data directory.
fn stock_member(root: &Path) -> TestMember {
    let [peer, client] = free_ports();
    let initial = format!("stock=http://127.0.0.1:{peer}");
    let mut member = TestMember::new(root, "stock", peer, client, &initial);
    member.program = Some(PathBuf::from(ETCD));
    member
}

/// Creates `member`'s data directory from a snapshot with `tool snapshot restore`, and starts the
/// member.
fn start_from(file: &Path, mut tool: Command, member: &mut TestMember) {
    let is_for_both = |flag: &&String| {
        ["--name=", "--data-dir=", "--initial-"].iter().any(|known| flag.starts_with(known))
    };
    tool.env("ETCDCTL_API", "3").args(["snapshot", "restore"]).arg(file);
    let output = tool.args(member.args.iter().filter(is_for_both)).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    member.start();
}

fn save(from: &TestMember, file: &Path) {
    let (saved, said) =
        etcdctl(&from.client_url, &["snapshot", "save", file.to_str().unwrap()]).unwrap();
    assert!(saved && said.contains("Snapshot saved at"), "{said}");
}

/// Waits until `member` serves the last key that [`write_history`] wrote.
async fn wait_until_serving(member: &TestMember) {
    let start = std::time::Instant::now();
    while member.get("last").await.ok().flatten().as_deref() != Some("one") {
        assert!(start.elapsed() < crate::common::WAIT_LIMIT, "{}", member.log());
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

/// Asserts that both stores have equal hashes and ranges at several revisions, and that the next
/// put gets the same revision.
async fn assert_same(one: &TestMember, other: &TestMember, revision: i64) {
    for at in [revision, revision - 1, revision * 3 / 4, revision / 2 + 1] {
        assert_eq!(one.hash(at).await.unwrap(), other.hash(at).await.unwrap(), "at {at}");
        assert_eq!(full_range(one, at).await, full_range(other, at).await, "at {at}");
    }
    assert_eq!(other.put("next", "one").await.unwrap(), revision + 1);
}

#[tokio::test]
async fn stock_etcd_starts_from_a_snapshot_that_etcdctl_saved_from_this_node() {
    if !has_stock() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let mut ours = TestMember::alone(root.path());
    ours.start();
    ours.wait_ready();
    let revision = write_history(&ours).await;
    let file = root.path().join("saved.db");
    save(&ours, &file);
    let (whole, status) =
        etcdctl("http://127.0.0.1:1", &["snapshot", "status", file.to_str().unwrap()]).unwrap();
    assert!(whole && status.contains(&format!(", {revision}, ")), "{status}");
    let mut theirs = stock_member(root.path());
    start_from(&file, Command::new("etcdctl"), &mut theirs);
    wait_until_serving(&theirs).await;
    assert_same(&ours, &theirs, revision).await;
    let log = theirs.log();
    assert!(!log.contains("panic") && !log.contains("fatal"), "{log}");
}

#[tokio::test]
async fn this_node_starts_from_a_snapshot_of_etcd_and_etcd_from_one_of_it() {
    if !has_stock() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let mut theirs = stock_member(root.path());
    theirs.start();
    crate::common::put_with_retries(&theirs, "first", "one").await;
    let revision = write_history(&theirs).await;
    let file = root.path().join("saved.db");
    save(&theirs, &file);
    let mut ours = TestMember::alone(root.path());
    start_from(&file, crate::common::node_command(), &mut ours);
    wait_until_serving(&ours).await;
    assert_same(&theirs, &ours, revision).await;

    let back = root.path().join("back.db");
    save(&ours, &back);
    let elsewhere = root.path().join("back");
    std::fs::create_dir(&elsewhere).unwrap();
    let mut again = stock_member(&elsewhere);
    start_from(&back, Command::new("etcdctl"), &mut again);
    wait_until_serving(&again).await;
    assert_same(&ours, &again, revision + 1).await;
}
