//! The commands that don't run a member: `data status`, `data recover`, and `snapshot` save, status
//! and restore.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::SystemTime;

use crate::common::{
    TestMember, as_refs, eventually, free_ports, node_command, node_command_killed_at, report_skip,
    small::SmallFilesystem, start_three, three_members, wait_same_hash, wait_settled,
    watch_compact_revision,
};
use serde_json::Value;

fn run(args: &[&str]) -> Output {
    node_command().args(args).output().unwrap()
}

fn text(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&both).into_owned()
}

/// Runs `data status --json` on a directory. Returns the exit code and the output.
fn data_status(dir: &Path) -> (Option<i32>, Value) {
    let output = run(&["data", "status", "--json", dir.to_str().unwrap()]);
    let json = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output.status.code(), json)
}

/// Returns the path of each file and folder below `dir`, with its modification time and content.
fn contents(dir: &Path) -> BTreeMap<PathBuf, (SystemTime, Vec<u8>)> {
    let mut all = BTreeMap::new();
    let mut folders = vec![dir.to_owned()];
    while let Some(folder) = folders.pop() {
        let changed = folder.metadata().unwrap().modified().unwrap();
        all.insert(folder.clone(), (changed, Vec::new()));
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let changed = path.metadata().unwrap().modified().unwrap();
                all.insert(path.clone(), (changed, std::fs::read(&path).unwrap()));
            }
        }
    }
    all
}

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("state/src/etcd_file/fixtures/etcd-3.7.db")
}

#[tokio::test]
async fn data_status_shows_the_end_of_the_log_and_changes_nothing() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    let leader = wait_settled(&as_refs(&members)).await;
    let mut revision = 0;
    for n in 0..50 {
        revision = members[leader].put("k", &n.to_string()).await.unwrap();
    }
    let hash = members[leader].hash(revision).await.unwrap();
    let header = members[leader].status().await.unwrap().header.unwrap();
    let (code, seen) = data_status(&members[leader].data_dir);
    assert_eq!((code, &seen["state"]), (Some(4), &"in-use".into()));
    assert_eq!(seen["cluster_id"], format!("{:x}", header.cluster_id));
    assert!(seen["log"].is_null() && seen["store"].is_null());

    members.iter_mut().for_each(TestMember::kill);
    let dir = &members[leader].data_dir;
    let before = contents(dir);
    let (code, seen) = data_status(dir);
    assert_eq!((code, &seen["state"]), (Some(0), &"whole".into()), "{seen}");
    assert_eq!(seen["member_id"], format!("{:x}", header.member_id));
    assert_eq!(seen["name"], members[leader].name);
    assert_eq!(seen["store"]["revision"], revision);
    assert_eq!(seen["store"]["hash"], hash);
    assert_eq!(seen["store"]["members"].as_array().unwrap().len(), 3);
    assert!(seen["log"]["last_index"].as_u64() >= seen["log"]["committed"].as_u64());
    assert!(seen["store"]["applied"].as_u64() < seen["log"]["last_index"].as_u64(), "{seen}");
    let output = run(&["data", "status", dir.to_str().unwrap()]);
    assert!(
        text(&output).contains(&format!("newest revision      {revision} (")),
        "{}",
        text(&output)
    );
    assert!(contents(dir) == before, "a look has changed something");
    // The members can start, so `data status` has left no lock in their directories.
    members.iter_mut().for_each(TestMember::start);
    members.iter_mut().for_each(TestMember::wait_ready);
}

#[tokio::test]
async fn data_status_names_the_damage_and_its_file() {
    let root = tempfile::tempdir().unwrap();
    let state = |dir: &Path| {
        let (code, seen) = data_status(dir);
        let problem = seen["problem"].as_str().unwrap_or_default().to_owned();
        (code, seen["state"].as_str().unwrap_or_default().to_owned(), problem)
    };
    assert_eq!(state(&root.path().join("none")).0, Some(1));
    assert_eq!(run(&["data", "status"]).status.code(), Some(2));
    let empty = root.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    assert_eq!(state(&empty), (Some(5), "empty".to_owned(), String::new()));

    let mut member = TestMember::alone(root.path());
    member.start();
    member.wait_ready();
    member.put("k", "v").await.unwrap();
    assert_eq!(member.stop(), Some(0));
    let dir = &member.data_dir;
    let segment = dir.join("member/wal/0000000000000001.wal");
    for (file, at, says) in [
        (segment.clone(), 4096 + 30, "is corrupt at offset 4096"),
        (dir.join("member/db"), 100, ""),
        (dir.join("muster-incarnation"), 3, ""),
    ] {
        let whole = std::fs::read(&file).unwrap();
        let mut broken = whole.clone();
        broken[at] ^= 1;
        std::fs::write(&file, broken).unwrap();
        let (code, name, problem) = state(dir);
        assert_eq!((code, name.as_str()), (Some(3), "damaged"), "{}: {problem}", file.display());
        assert!(problem.contains(says), "{problem}");
        std::fs::write(&file, whole).unwrap();
    }
    for file in ["member/db", "member/wal"] {
        let (path, aside) = (dir.join(file), root.path().join("aside"));
        std::fs::rename(&path, &aside).unwrap();
        let (code, name, problem) = state(dir);
        assert_eq!((code, name.as_str()), (Some(3), "damaged"), "{problem}");
        assert!(problem.contains(&path.display().to_string()), "{problem}");
        std::fs::rename(&aside, &path).unwrap();
    }
    assert_eq!(state(dir).0, Some(0));
    let tombstone =
        r#"{"version":1,"incarnation":"","member_id":"1","cluster_id":"1","at":"now","by":"log"}"#;
    std::fs::write(dir.join("muster-tombstone.json"), tombstone).unwrap();
    assert_eq!(state(dir).1, "removed");
    assert_eq!(data_status(dir).0, Some(3));
    std::fs::write(dir.join("muster-tombstone.json"), "?").unwrap();
    assert_eq!(state(dir).1, "damaged");
}

/// Returns three members on free ports, restored from a file and not started yet.
fn restored(root: &Path, file: &Path, more: &[&str]) -> Vec<TestMember> {
    let members = three_members(root);
    for member in &members {
        let output = restore(member, file, more);
        assert!(output.status.success(), "{}", text(&output));
    }
    members
}

fn restore(member: &TestMember, file: &Path, more: &[&str]) -> Output {
    let flag = |name: &str| {
        let prefix = format!("--{name}=");
        member.args.iter().find(|arg| arg.starts_with(&prefix)).unwrap().clone()
    };
    let mut command = node_command();
    command.args(["snapshot", "restore"]).arg(file);
    command.args(["name", "data-dir", "initial-cluster", "initial-advertise-peer-urls"].map(flag));
    command.args(["--initial-cluster-token=anew"]).args(more).output().unwrap()
}

#[tokio::test]
async fn three_members_restored_from_etcds_file_are_one_cluster_with_its_data() {
    let root = tempfile::tempdir().unwrap();
    let status = run(&["snapshot", "status", "--json", fixture().to_str().unwrap()]);
    let status: Value = serde_json::from_slice(&status.stdout).unwrap();
    let revision = status["revision"].as_i64().unwrap();
    let mut members = restored(root.path(), &fixture(), &["--from-etcd"]);
    let (code, seen) = data_status(&members[0].data_dir);
    assert_eq!((code, seen["store"]["revision"].as_i64()), (Some(0), Some(revision)), "{seen}");
    let cluster = seen["cluster_id"].as_str().unwrap().to_owned();
    // Simulates a host on which nobody ran the restore: its member starts with an empty directory
    // and the right flags.
    std::fs::remove_dir_all(&members[2].data_dir).unwrap();
    members[..2].iter_mut().for_each(TestMember::start);
    members[..2].iter_mut().for_each(TestMember::wait_ready);
    members[2].args.push("--initial-cluster-token=anew".to_owned());
    members[2].start();
    members[2].wait_ready();
    wait_settled(&as_refs(&members)).await;
    assert_eq!(
        format!("{:x}", members[0].status().await.unwrap().header.unwrap().cluster_id),
        cluster
    );
    assert_eq!(members[0].hash(revision).await.unwrap(), members[1].hash(revision).await.unwrap());
    assert_eq!(
        i64::from(members[0].hash(revision).await.unwrap()),
        seen["store"]["hash"].as_i64().unwrap()
    );
    let after = members[1].put("new", "one").await.unwrap();
    assert_eq!(after, revision + 1);
    wait_same_hash(&members, after).await;
}

#[tokio::test]
async fn a_restore_with_a_bump_is_ahead_of_all_earlier_revisions() {
    let root = tempfile::tempdir().unwrap();
    let status = run(&["snapshot", "status", "--json", fixture().to_str().unwrap()]);
    let status: Value = serde_json::from_slice(&status.stdout).unwrap();
    let revision = status["revision"].as_i64().unwrap();
    let bump = ["--bump-revision=1000000", "--mark-compacted=true"];
    let mut members = restored(root.path(), &fixture(), &bump);
    members.iter_mut().for_each(TestMember::start);
    members.iter_mut().for_each(TestMember::wait_ready);
    assert_eq!(members[0].put("new", "one").await.unwrap(), revision + 1_000_001);
    wait_same_hash(&members, 0).await;
    let refused = members[0].hash(revision).await.unwrap_err();
    assert!(refused.message().contains("has been compacted"), "{refused}");
    // Watches from a revision of the old cluster, or from one that it may have reached later, are
    // cancelled. Their clients must read again.
    for from in [revision, revision + 1, revision + 999_999] {
        assert_eq!(
            watch_compact_revision(&members[1], from).await,
            revision + 1_000_000,
            "from {from}"
        );
    }
}

#[test]
fn on_a_full_disk_a_restore_makes_nothing_and_leaves_nothing() {
    let root = tempfile::tempdir().unwrap();
    let Some(small) = SmallFilesystem::mount(&root.path().join("small"), 8) else {
        return report_skip("no tmpfs can be mounted");
    };
    let mut member = TestMember::alone(root.path());
    member.data_dir = small.0.join("data");
    member.args.push(format!("--data-dir={}", member.data_dir.display()));
    let dir = format!("--data-dir={}", member.data_dir.display());
    let output = restore(&member, &fixture(), &[&dir]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(text(&output).contains("No space left on device"), "{}", text(&output));
    assert_eq!(std::fs::read_dir(&small.0).unwrap().count(), 0);
}

#[test]
fn without_a_token_flag_the_token_is_derived_from_the_file() {
    let root = tempfile::tempdir().unwrap();
    let made = |file: &Path, more: &[&str]| {
        let dir = tempfile::tempdir_in(root.path()).unwrap();
        let data_dir = format!("--data-dir={}", dir.path().join("new").display());
        let mut restore = node_command();
        restore.args(["snapshot", "restore", "--skip-hash-check", &data_dir]);
        let output = restore.arg(file).args(more).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        data_status(&dir.path().join("new")).1["cluster_id"].clone()
    };
    let once = made(&fixture(), &[]);
    assert_eq!(made(&fixture(), &[]), once);
    // A host without a restored directory would start with the default token, which gives another
    // cluster id.
    assert_ne!(made(&fixture(), &["--initial-cluster-token=etcd-cluster"]), once);
    let other = root.path().join("other.db");
    let mut bytes = std::fs::read(fixture()).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&other, bytes).unwrap();
    assert_ne!(made(&other, &[]), once);
}

/// Starts a proxy to `to` for one connection, and returns its port. The proxy closes the connection
/// after `most` bytes from the server.
fn start_cutting_proxy(to: &str, most: usize) -> u16 {
    use std::io::{Read as _, Write as _};
    use std::net::{Shutdown, TcpListener, TcpStream};
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (port, to) = (listener.local_addr().unwrap().port(), to.to_owned());
    std::thread::spawn(move || {
        let (client, _) = listener.accept().unwrap();
        let server = TcpStream::connect(to).unwrap();
        let (mut from, mut into) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut from, &mut into);
        });
        let (mut from, mut into) = (server, client);
        let (mut left, mut buffer) = (most, [0; 4096]);
        while left > 0 {
            let want = left.min(buffer.len());
            let Ok(read @ 1..) = from.read(&mut buffer[..want]) else { break };
            if into.write_all(&buffer[..read]).is_err() {
                break;
            }
            left -= read;
        }
        let _ = into.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
    });
    port
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_save_whose_connection_breaks_leaves_no_file() {
    let root = tempfile::tempdir().unwrap();
    let mut member = TestMember::alone(root.path());
    member.start();
    member.wait_ready();
    for n in 0..60 {
        member.put(&format!("k{n}"), &"v".repeat(10_000)).await.unwrap();
    }
    let folder = root.path().join("saved");
    std::fs::create_dir(&folder).unwrap();
    let out = folder.join("saved.db");
    let address = member.client_url.strip_prefix("http://").unwrap();
    for most in [0, 30, 3_000, 200_000, 500_000] {
        let url = format!("http://127.0.0.1:{}", start_cutting_proxy(address, most));
        let saved = run(&["snapshot", "save", "--endpoints", &url, out.to_str().unwrap()]);
        assert_eq!(saved.status.code(), Some(1), "{most}: {}", text(&saved));
        assert!(text(&saved).starts_with("Error: "), "{most}: {}", text(&saved));
        let left: Vec<_> = std::fs::read_dir(&folder).unwrap().collect();
        assert!(left.is_empty(), "{most}: {left:?}");
    }
    let url = format!("http://127.0.0.1:{}", start_cutting_proxy(address, usize::MAX));
    let saved = run(&["snapshot", "save", "--endpoints", &url, out.to_str().unwrap()]);
    assert!(saved.status.success(), "{}", text(&saved));
}

#[test]
fn a_restore_with_a_wrong_file_flag_or_directory_creates_nothing() {
    let root = tempfile::tempdir().unwrap();
    let member = TestMember::alone(root.path());
    let whole = std::fs::read(fixture()).unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = root.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let mut flipped = whole.clone();
    flipped[10_000] ^= 1;
    let bare = &whole[..whole.len() - 32];
    for (path, more, code, says) in [
        (root.path().join("none"), "--skip-hash-check=false", 1, "cannot open"),
        (file("cut", &whole[..20_001]), "--skip-hash-check=false", 1, "missing hash"),
        (file("cut2", &whole[..512 * 20 + 32]), "--skip-hash-check=false", 1, "expected sha256"),
        (file("flipped", &flipped), "--skip-hash-check=false", 1, "expected sha256"),
        (file("bare", bare), "--skip-hash-check=false", 1, "missing hash"),
        (file("nothing", b""), "--skip-hash-check", 1, "damaged or not one"),
        (file("text", &[b'x'; 9000]), "--skip-hash-check", 1, "damaged or not one"),
        (fixture(), "--bump-revision=1", 2, "--mark-compacted required"),
        (fixture(), "--mark-compacted", 2, "--mark-compacted required"),
        (fixture(), "--bump-revision=-1", 2, "--mark-compacted required"),
        (fixture(), "--name=other", 2, "couldn't find local name"),
        (fixture(), "--initial-cluster=one=http://h:1,two=http://h:1", 2, "duplicate url"),
        (fixture(), "--initial-advertise-peer-urls=http://h:1", 2, "missing from"),
        (fixture(), "--initial-cluster=one", 2, "empty URL"),
        (fixture(), "--wal-dir=/w", 2, "not supported"),
        (fixture(), "--no-such-flag", 2, "unexpected argument"),
        (root.path().to_owned(), "--skip-hash-check=false", 1, "cannot open"),
    ] {
        let output = restore(&member, &path, &[more]);
        let text = text(&output);
        assert_eq!(output.status.code(), Some(code), "{path:?} {more}: {text}");
        assert!(text.contains(says), "{path:?} {more}: {text}");
        assert!(!member.data_dir.exists(), "{path:?} {more}");
    }
    std::fs::create_dir(&member.data_dir).unwrap();
    std::fs::write(member.data_dir.join("mine"), "kept").unwrap();
    let output = restore(&member, &fixture(), &[]);
    assert!(text(&output).contains("not empty or could not be read"), "{}", text(&output));
    std::fs::remove_file(member.data_dir.join("mine")).unwrap();
    let output = restore(&member, &file("bare", bare), &["--skip-hash-check"]);
    assert!(output.status.success(), "{}", text(&output));
    // A second restore into the same directory is refused.
    let output = restore(&member, &fixture(), &[]);
    assert_eq!(output.status.code(), Some(1));
    let left = std::fs::read_dir(root.path()).unwrap();
    let left: Vec<String> = left.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    assert!(!left.iter().any(|name| name.contains("restoring")), "{left:?}");
}

#[test]
fn a_restore_killed_at_any_step_has_created_nothing_or_everything() {
    let root = tempfile::tempdir().unwrap();
    let member = TestMember::alone(root.path());
    let (mut nothing, mut step) = (0, 0);
    loop {
        step += 1;
        let calls = "fsync,fdatasync,rename,renameat,renameat2,mkdir,ftruncate,fallocate";
        let mut killed = node_command_killed_at(calls, step);
        killed.args(["snapshot", "restore"]).arg(fixture());
        killed.arg("--data-dir").arg(&member.data_dir);
        killed.stderr(Stdio::null()).stdout(Stdio::null());
        let Ok(status) = killed.status() else { return report_skip("no strace") };
        if !member.data_dir.exists() {
            nothing += 1;
            continue;
        }
        assert_eq!(data_status(&member.data_dir).0, Some(0), "step {step}");
        if status.success() {
            break;
        }
        std::fs::remove_dir_all(&member.data_dir).unwrap();
    }
    assert!(nothing > 8, "{nothing}");
    // The killed restores left files behind. The last restore has removed them.
    let left = std::fs::read_dir(root.path()).unwrap();
    let left: Vec<String> = left.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(left, ["one"]);
}

/// A stock etcd process and its client URL. It is killed when this value is dropped.
struct StockEtcd(std::process::Child, String);

impl StockEtcd {
    fn start(root: &Path) -> Option<Self> {
        let [peer, client] = free_ports();
        let url = format!("http://127.0.0.1:{client}");
        let peer = format!("http://127.0.0.1:{peer}");
        let mut etcd = Command::new("etcd");
        etcd.arg("--data-dir").arg(root.join("stock")).args(["--listen-client-urls", &url]);
        etcd.args(["--advertise-client-urls", &url, "--listen-peer-urls", &peer]);
        etcd.args(["--initial-advertise-peer-urls", &peer]);
        etcd.args(["--initial-cluster", &format!("default={peer}")]);
        let child = etcd.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        Some(Self(child.ok()?, url))
    }
}

impl Drop for StockEtcd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn a_snapshot_saved_from_etcd_is_complete_private_and_restorable() {
    let root = tempfile::tempdir().unwrap();
    let Some(stock) = StockEtcd::start(root.path()) else { return report_skip("no etcd") };
    let mut member = TestMember::alone(root.path());
    let ours = std::mem::replace(&mut member.client_url, stock.1.clone());
    eventually("etcd answers", || {
        crate::common::etcdctl(&stock.1, &["put", "k", "v"]).is_none_or(|done| done.0)
    });
    let out = root.path().join("saved.db");
    let saved = run(&["snapshot", "save", "--endpoints", &stock.1, out.to_str().unwrap()]);
    assert_eq!(text(&saved), format!("Snapshot saved at {}\n", out.display()));
    use std::os::unix::fs::PermissionsExt as _;
    assert_eq!(out.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let revision = member.status().await.unwrap().header.unwrap().revision;
    let hash = member.hash(revision).await.unwrap();
    drop(stock);
    member.client_url = ours;
    let output = restore(&member, &out, &[]);
    assert!(output.status.success(), "{}", text(&output));
    member.start();
    member.wait_ready();
    assert_eq!(member.get("k").await.unwrap().as_deref(), Some("v"));
    assert_eq!(member.hash(revision).await.unwrap(), hash);
}

#[test]
fn snapshot_save_without_a_valid_reachable_endpoint_writes_nothing() {
    let root = tempfile::tempdir().unwrap();
    let out = root.path().join("saved.db");
    let [port] = free_ports();
    let nobody = format!("http://127.0.0.1:{port}");
    for (endpoints, code) in
        [(nobody.as_str(), 1), ("http://a,http://b", 2), ("ftp://h:1", 2), ("https://h:1", 2)]
    {
        let saved = run(&["snapshot", "save", "--endpoints", endpoints, out.to_str().unwrap()]);
        assert_eq!(saved.status.code(), Some(code), "{endpoints}: {}", text(&saved));
    }
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn data_recover_makes_a_cluster_of_one_once_and_starts_nothing() {
    let root = tempfile::tempdir().unwrap();
    let mut members = start_three(root.path());
    let leader = wait_settled(&as_refs(&members)).await;
    members[leader].put("k", "v").await.unwrap();
    let dir = members[leader].data_dir.display().to_string();
    let recover = || run(&["data", "recover", &dir, "--i-accept-data-loss", "--json"]);
    assert_eq!(run(&["data", "recover", &dir]).status.code(), Some(2));
    assert_eq!(recover().status.code(), Some(1), "it runs");
    members.iter_mut().for_each(TestMember::kill);
    let made: Value = serde_json::from_slice(&recover().stdout).unwrap();
    let again: Value = serde_json::from_slice(&recover().stdout).unwrap();
    assert_eq!(made, again);
    let (code, seen) = data_status(&members[leader].data_dir);
    assert_eq!((code, &seen["cluster_id"]), (Some(0), &made["is"]["cluster_id"]), "{seen}");
    let survivor = &mut members[leader];
    survivor.start();
    survivor.wait_ready();
    assert_eq!(survivor.get("k").await.unwrap().as_deref(), Some("v"));
    assert_eq!(survivor.members().await.unwrap().len(), 1);
    let nobody = root.path().join("nobody").display().to_string();
    let none = run(&["data", "recover", &nobody, "--i-accept-data-loss"]);
    assert_eq!(none.status.code(), Some(2), "{}", text(&none));
}

/// Puts until `stop` is true. Returns the last revision.
async fn put_until_stopped(client_url: String, stop: tokio::sync::watch::Receiver<bool>) -> i64 {
    use node_proto::etcdserverpb::{PutRequest, kv_client::KvClient};
    let endpoint = tonic::transport::Endpoint::from_shared(client_url).unwrap();
    let mut kv = KvClient::new(endpoint.connect_lazy());
    let mut last = 0;
    for n in 0.. {
        if *stop.borrow() {
            break;
        }
        let key = format!("load/{}", n % 50);
        let request =
            PutRequest { key: key.into(), value: vec![7; 300].into(), ..Default::default() };
        last = kv.put(request).await.unwrap().into_inner().header.unwrap().revision;
    }
    last
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_saved_under_load_becomes_a_cluster_apart_from_the_old_one() {
    let root = tempfile::tempdir().unwrap();
    let mut old = start_three(root.path());
    wait_settled(&as_refs(&old)).await;
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let load = tokio::spawn(put_until_stopped(old[0].client_url.clone(), stopped));
    let mut saved = Vec::new();
    for member in &old {
        let file = root.path().join(format!("{}.db", member.name));
        let (url, path) = (member.client_url.clone(), file.display().to_string());
        let output = tokio::task::spawn_blocking(move || {
            run(&["snapshot", "save", "--endpoints", &url, &path])
        });
        let output = output.await.unwrap();
        assert!(output.status.success(), "{}", text(&output));
        saved.push(file);
    }
    stop.send(true).unwrap();
    let last = load.await.unwrap();
    let status = run(&["snapshot", "status", "--json", saved[1].to_str().unwrap()]);
    let status: Value = serde_json::from_slice(&status.stdout).unwrap();
    let revision = status["revision"].as_i64().unwrap();
    assert!(1 < revision && revision <= last, "{revision} of {last}");
    let hash = old[0].hash(revision).await.unwrap();
    old.iter_mut().for_each(TestMember::kill);

    // The new members use the old members' addresses. Only two of them are started; the third
    // address is used by an old member.
    let mut new: Vec<TestMember> = Vec::new();
    for member in &old {
        let dir = root.path().join(format!("{}-new", member.name));
        let args = member.args.iter().map(|arg| match arg.strip_prefix("--data-dir=") {
            Some(_) => format!("--data-dir={}", dir.display()),
            None => arg.clone(),
        });
        let mut again = TestMember::new(root.path(), &member.name, 1, 1, "");
        (again.args, again.data_dir) = (args.collect(), dir);
        again.client_url = member.client_url.clone();
        let output = restore(&again, &saved[1], &["--bump-revision=1000", "--mark-compacted"]);
        assert!(output.status.success(), "{}", text(&output));
        new.push(again);
    }
    new.pop();
    // The new members append to the log files of the old ones. So the lines that are already there
    // don't count.
    let serves =
        |member: &TestMember| member.log().matches("ready to serve client requests").count();
    let before: Vec<usize> = new.iter().map(serves).collect();
    new.iter_mut().for_each(TestMember::start);
    eventually("the new ones serve", || new.iter().zip(&before).all(|(m, n)| serves(m) > *n));
    old[2].start();
    let refused = |member: &TestMember| {
        let page = member.http("/metrics");
        let lines = page.lines().filter(|line| {
            line.starts_with("muster_peer_streams_refused") && line.contains("cluster_id")
        });
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>()
    };
    eventually("the old one is refused", || new.iter().any(|member| refused(member) > 0.0));
    let ours = new[0].status().await.unwrap().header.unwrap().cluster_id;
    let theirs = data_status(&old[2].data_dir).1["cluster_id"].clone();
    assert_ne!(theirs, format!("{ours:x}"));
    let after = new[0].put("after", "x").await.unwrap();
    assert_eq!(after, revision + 1001);
    assert!(old[2].get("after").await.is_err(), "it has no quorum");
    assert_eq!(new[0].members().await.unwrap().len(), 3);
    wait_same_hash(&new, after).await;
    // `hash` is that of the snapshot's data. The new cluster's data was compacted by
    // `--mark-compacted`, so restore the snapshot once more without that flag and compare.
    let plain = root.path().join("plain");
    std::fs::create_dir(&plain).unwrap();
    let mut alone = TestMember::alone(&plain);
    assert!(restore(&alone, &saved[1], &[]).status.success());
    alone.start();
    alone.wait_ready();
    assert_eq!(alone.hash(revision).await.unwrap(), hash);
}
