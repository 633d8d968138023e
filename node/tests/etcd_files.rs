//! Snapshots that stock etcd's tools save of this node, and stock etcd started from them.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Member, etcdctl, free_ports, skipped};
use node_proto::etcdserverpb::{
    CompactionRequest, DeleteRangeRequest, RangeRequest, RangeResponse, kv_client::KvClient,
};

/// Debian's, 3.4.
const ETCD: &str = "/usr/bin/etcd";

fn has_stock() -> bool {
    let has = Path::new(ETCD).exists() && etcdctl("http://127.0.0.1:1", &["version"]).is_some();
    if !has {
        skipped("Debian's etcd-server and etcd-client are not installed");
    }
    has
}

/// Puts, deletes and a compaction; gives the newest revision.
async fn write_history(member: &Member) -> i64 {
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

async fn everything(member: &Member, revision: i64) -> RangeResponse {
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

/// Debian's etcd on a directory that its etcdctl makes of a snapshot.
fn restored(root: &Path, file: &Path) -> Member {
    let [peer, client] = free_ports();
    let url = format!("http://127.0.0.1:{peer}");
    let mut member = Member::new(root, "stock", peer, client, &format!("stock={url}"));
    member.program = Some(PathBuf::from(ETCD));
    let output = Command::new("etcdctl")
        .env("ETCDCTL_API", "3")
        .args(["snapshot", "restore"])
        .arg(file)
        .arg("--data-dir")
        .arg(&member.data_dir)
        .args(["--name=stock", &format!("--initial-cluster=stock={url}")])
        .arg(format!("--initial-advertise-peer-urls={url}"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    member.start();
    member
}

#[tokio::test]
async fn stock_etcd_starts_from_what_its_own_etcdctl_saved_of_us() {
    if !has_stock() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let mut ours = Member::alone(root.path());
    ours.start();
    ours.ready();
    let revision = write_history(&ours).await;
    let file = root.path().join("saved.db");
    let (saved, said) =
        etcdctl(&ours.client_url, &["snapshot", "save", file.to_str().unwrap()]).unwrap();
    assert!(saved && said.contains("Snapshot saved at"), "{said}");
    let (whole, status) =
        etcdctl("http://127.0.0.1:1", &["snapshot", "status", file.to_str().unwrap()]).unwrap();
    assert!(whole && status.contains(&format!(", {revision}, ")), "{status}");

    let theirs = restored(root.path(), &file);
    let same = async || theirs.get("last").await.ok().flatten();
    let start = std::time::Instant::now();
    while same().await.as_deref() != Some("one") {
        assert!(start.elapsed() < common::PATIENCE, "{}", theirs.log());
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    for at in [revision, revision - 1, revision * 3 / 4, revision / 2 + 1] {
        let (ours, theirs) = (&ours, &theirs);
        assert_eq!(ours.hash(at).await.unwrap(), theirs.hash(at).await.unwrap(), "at {at}");
        assert_eq!(everything(ours, at).await, everything(theirs, at).await, "at {at}");
    }
    // Both go on from the same revision.
    assert_eq!(theirs.put("next", "one").await.unwrap(), revision + 1);
    let log = theirs.log();
    assert!(!log.contains("panic") && !log.contains("fatal"), "{log}");
}
