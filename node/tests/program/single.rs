//! A cluster of one member: serving, stopping, restarting, and directories that it must refuse.

use std::os::unix::fs::PermissionsExt;

use crate::common::{TestMember, WAIT_LIMIT, etcdctl, eventually};
use node_proto::etcdserverpb::{PutRequest, kv_client::KvClient};
use rustix::process::Signal;

fn new_member() -> (tempfile::TempDir, TestMember) {
    let root = tempfile::tempdir().unwrap();
    let member = TestMember::alone(root.path());
    (root, member)
}

#[tokio::test]
async fn keys_survive_a_graceful_stop_and_a_kill() {
    let (_root, mut member) = new_member();
    member.start();
    member.wait_ready();
    member.put("a", "1").await.unwrap();
    assert_eq!(member.stop(), Some(0));
    member.start();
    member.wait_ready();
    assert_eq!(member.get("a").await.unwrap().as_deref(), Some("1"));
    member.put("b", "2").await.unwrap();
    member.kill();
    member.start();
    member.wait_ready();
    assert_eq!(member.get("a").await.unwrap().as_deref(), Some("1"));
    assert_eq!(member.get("b").await.unwrap().as_deref(), Some("2"));
}

#[tokio::test]
async fn a_restart_ignores_the_flags_for_the_initial_cluster() {
    let (_root, mut member) = new_member();
    member.start();
    member.wait_ready();
    member.put("a", "1").await.unwrap();
    let id = member.status().await.unwrap().header.unwrap();
    member.args.retain(|arg| !arg.starts_with("--initial-cluster"));
    let args = member.args.clone();
    for told in [
        &[][..],
        &["--initial-cluster=other=https://127.0.0.1:1"],
        &["--initial-cluster=one=http://127.0.0.1:1", "--initial-cluster-token=another"],
        &["--initial-cluster-state=existing"],
    ] {
        assert_eq!(member.stop(), Some(0));
        member.args = args.iter().cloned().chain(told.iter().map(ToString::to_string)).collect();
        member.start();
        member.wait_ready();
        assert_eq!(member.get("a").await.unwrap().as_deref(), Some("1"), "{told:?}");
        let now = member.status().await.unwrap().header.unwrap();
        assert_eq!((now.cluster_id, now.member_id), (id.cluster_id, id.member_id), "{told:?}");
    }
}

#[test]
fn a_first_start_that_contradicts_the_initial_cluster_is_a_usage_error() {
    for (told, text) in [
        (
            "--initial-cluster=other=http://127.0.0.1:1",
            "couldn't find local name \\\"one\\\" in the initial cluster configuration",
        ),
        ("--initial-cluster=one=http://127.0.0.1:1", "missing from --initial-advertise-peer-urls"),
    ] {
        let (_root, mut member) = new_member();
        member.args.push(told.to_owned());
        member.start();
        assert_eq!(member.exit_code(), Some(2), "{}", member.log());
        assert!(member.log().contains(text), "{}", member.log());
        assert!(!member.data_dir.join("member").exists(), "nothing was begun");
    }
}

#[tokio::test]
async fn every_acknowledged_write_outlives_a_kill_in_mid_stream() {
    let (_root, mut member) = new_member();
    member.start();
    member.wait_ready();
    let mut acknowledged = 0;
    for _ in 0..3 {
        let channel = member.channel();
        let (told, mut tells) = tokio::sync::watch::channel(acknowledged);
        let mut client = node_proto::etcdserverpb::kv_client::KvClient::new(channel);
        let writes = tokio::spawn(async move {
            let mut last = acknowledged;
            loop {
                let request = node_proto::etcdserverpb::PutRequest {
                    key: format!("k{last}").into(),
                    value: "v".into(),
                    ..Default::default()
                };
                match client.put(request).await {
                    Ok(_) => last += 1,
                    Err(_) => return last,
                }
                told.send_replace(last);
            }
        });
        let some = tells.wait_for(|count| *count > acknowledged + 20);
        drop(tokio::time::timeout(WAIT_LIMIT, some).await.unwrap().unwrap());
        member.kill();
        acknowledged = writes.await.unwrap();
        member.start();
        member.wait_ready();
        for n in 0..acknowledged {
            assert!(member.get(&format!("k{n}")).await.unwrap().is_some(), "k{n} is gone");
        }
    }
}

#[tokio::test]
async fn the_data_directory_is_private_and_held_by_one_process() {
    let (_root, mut member) = new_member();
    member.start();
    member.wait_ready();
    let mode = std::fs::metadata(&member.data_dir).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    let second_root = tempfile::tempdir().unwrap();
    let mut second = TestMember::alone(second_root.path());
    second.args.push(format!("--data-dir={}", member.data_dir.display()));
    second.start();
    assert_eq!(second.exit_code(), Some(1));
    assert!(second.log().contains("in use by another process"), "{}", second.log());
    assert!(member.put("a", "1").await.is_ok(), "the first is not disturbed");
}

#[test]
fn a_damaged_or_foreign_data_directory_ends_the_start_with_exit_code_3() {
    type Damage = fn(&std::path::Path);
    let cases: [(&str, Damage); 9] = [
        ("member/wal is missing, but this member had begun a log there", |dir| {
            std::fs::remove_dir_all(dir.join("member/wal")).unwrap();
        }),
        ("member/wal is missing, but this member had begun a log there", |dir| {
            std::fs::remove_dir_all(dir.join("member")).unwrap();
        }),
        ("member/db cannot be used: store file is corrupt", |dir| {
            let db = std::fs::OpenOptions::new().write(true).open(dir.join("member/db")).unwrap();
            db.set_len(db.metadata().unwrap().len() / 2).unwrap();
        }),
        ("member/db cannot be used: store file is corrupt", |dir| {
            let path = dir.join("member/db");
            let mut bytes = std::fs::read(&path).unwrap();
            bytes.iter_mut().step_by(4096).for_each(|byte| *byte ^= 0x5a);
            std::fs::write(path, bytes).unwrap();
        }),
        ("belongs to incarnation", |dir| {
            std::fs::write(dir.join("muster-incarnation"), "0".repeat(32)).unwrap();
        }),
        ("this member has lost data", |dir| std::fs::remove_file(dir.join("member/db")).unwrap()),
        ("start this member with the muster-node that wrote it", |dir| {
            use std::os::unix::fs::FileExt;
            let path = dir.join("member/wal/0000000000000001.wal");
            let log = std::fs::File::options().write(true).open(path).unwrap();
            // Write a wrong version of the log format. The version is the byte after the header of
            // the first record.
            log.write_all_at(&[200], 28).unwrap();
        }),
        ("there is a log", |dir| std::fs::remove_file(dir.join("muster-boot")).unwrap()),
        ("permanently removed from the cluster", |dir| {
            let tombstone =
                r#"{"version":1,"incarnation":"","member_id":"","cluster_id":"","at":"","by":""}"#;
            std::fs::write(dir.join("muster-tombstone.json"), tombstone).unwrap();
        }),
    ];
    let (_root, mut member) = new_member();
    member.start();
    member.wait_ready();
    assert_eq!(member.stop(), Some(0));
    for (text, damage) in cases {
        let copy = tempfile::tempdir().unwrap();
        let dir = copy.path().join("data");
        copy_dir(&member.data_dir, &dir);
        damage(&dir);
        let mut damaged = TestMember::alone(copy.path());
        damaged.args.push(format!("--data-dir={}", dir.display()));
        damaged.start();
        assert_eq!(damaged.exit_code(), Some(3), "{text}");
        assert!(damaged.log().contains(text), "{text}: {}", damaged.log());
        assert!(!damaged.log().contains("ready to serve"), "{text}");
    }
}

#[tokio::test]
async fn a_crash_between_the_log_and_its_mark_loses_nothing() {
    let (_root, mut member) = new_member();
    member.start();
    member.wait_ready();
    member.put("a", "1").await.unwrap();
    member.kill();
    let mark = member.data_dir.join("muster-log");
    std::fs::remove_file(&mark).unwrap();
    member.start();
    member.wait_ready();
    assert_eq!(member.get("a").await.unwrap().as_deref(), Some("1"));
    assert!(mark.exists(), "what the crash left out is made up for");
}

#[test]
fn a_first_start_interrupted_before_its_log_exists_begins_again() {
    let (_root, mut member) = new_member();
    member.start();
    member.wait_ready();
    member.kill();
    // Make the state that a crash leaves if it comes just before the log gets its final name. The
    // boot counter is written, and the store is unfinished.
    std::fs::remove_dir_all(member.data_dir.join("member/wal")).unwrap();
    std::fs::remove_file(member.data_dir.join("muster-log")).unwrap();
    std::fs::write(member.data_dir.join("member/db"), "unfinished").unwrap();
    member.start();
    member.wait_ready();
}

fn copy_dir(from: &std::path::Path, to: &std::path::Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_dir(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[test]
fn flags_without_effect_are_mentioned_in_the_log() {
    let (_root, mut member) = new_member();
    member.args.push("--experimental-bootstrap-defrag-threshold-megabytes=5".to_owned());
    member.start();
    member.wait_ready();
    let log = member.log();
    assert!(log.contains("this flag has no effect here"), "{log}");
    for line in log.lines() {
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(value["level"].is_string() && value["ts"].is_string() && value["msg"].is_string());
    }
}

#[test]
fn health_and_metrics_have_an_address_of_their_own_that_serves_no_data() {
    let (_root, mut member) = new_member();
    let [port] = crate::common::free_ports();
    member.args.push(format!("--listen-metrics-urls=http://127.0.0.1:{port}"));
    member.start();
    member.wait_ready();
    let get = |path: &str| {
        use std::io::{Read, Write};
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    assert!(get("/health").starts_with("HTTP/1.1 200"));
    assert!(get("/metrics").starts_with("HTTP/1.1 200"));
    assert!(get("/version").starts_with("HTTP/1.1 404"));
}

#[test]
fn a_hangup_signal_does_not_end_the_member() {
    let (_root, mut member) = new_member();
    member.start();
    member.wait_ready();
    member.signal(Signal::HUP);
    let url = member.client_url.clone();
    eventually("it still answers", || etcdctl(&url, &["put", "a", "1"]).is_none_or(|r| r.0));
    assert_eq!(member.stop(), Some(0));
}

#[test]
fn debians_etcdctl_is_served_whether_endpoints_are_urls_or_addresses() {
    let (_root, mut member) = new_member();
    member.start();
    member.wait_ready();
    let url = member.client_url.clone();
    let address = url.strip_prefix("http://").unwrap();
    for endpoint in [url.as_str(), address] {
        for (args, expected) in [
            (&["put", "k", "v"][..], "OK"),
            (&["get", "k"], "k\nv"),
            (&["endpoint", "status"], ", 3.6.0, "),
            (&["endpoint", "health"], "is healthy"),
            (&["member", "list"], ", started, one, http://127.0.0.1:"),
            (&["del", "k"], "1"),
        ] {
            let Some((done, text)) = etcdctl(endpoint, args) else { return };
            assert!(done && text.contains(expected), "{endpoint} {args:?}: {text}");
        }
    }
}

/// Private (anonymous) memory of the process in KiB.
fn anonymous_kib(member: &TestMember) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", member.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Each put is a store transaction of its own. Later transactions must reuse the memory of earlier
/// transactions' pages.
#[tokio::test]
async fn puts_one_after_the_other_take_little_memory() {
    let (_root, mut member) = new_member();
    member.start();
    member.wait_ready();
    let mut kv = KvClient::new(member.channel());
    let before = anonymous_kib(&member);
    for n in 0..6_000 {
        let key = format!("k{:07}", n % 100).into();
        let put = PutRequest { key, value: "sixteen bytes...".into(), ..PutRequest::default() };
        kv.put(put).await.unwrap();
    }
    let taken = anonymous_kib(&member) - before;
    assert!(taken < 14 * 1024, "{taken} KiB for 6,000 puts, of which caches keep less than 5 MiB");
}
