//! Tests in which a new member fetches the whole state while something fails. A connection breaks
//! or stalls, the disk is full, or the member gets a signal to stop. Each run ends with a clear
//! message and exit code, and the next start joins.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use crate::common::{
    TestMember, eventually, free_ports, report_skip, small::SmallFilesystem, wait_same_hash,
};
use node_proto::etcdserverpb::MemberAddRequest;

/// Number of values in the store. Their total size is much larger than the number of bytes that a
/// limited connection forwards.
const VALUES: usize = 12;
const VALUE_BYTES: usize = 1 << 20;
/// Number of bytes that the relay forwards on a limited connection.
const RELAYED_BYTES_LIMIT: u64 = 4 << 20;

/// A proxy in front of a member's peer port. It forwards a limited number of bytes to the dialling
/// side, and then breaks or stalls the connection.
#[derive(Clone)]
struct Relay {
    passes: Arc<AtomicU64>,
    breaks: Arc<AtomicBool>,
    /// Number of connections that have reached the limit on forwarded bytes.
    ended: Arc<AtomicU64>,
}

impl Relay {
    fn start(port: u16, to: u16) -> Self {
        let relay = Self {
            passes: Arc::new(AtomicU64::new(u64::MAX)),
            breaks: Arc::default(),
            ended: Arc::default(),
        };
        let (listener, told) = (TcpListener::bind(("127.0.0.1", port)).unwrap(), relay.clone());
        std::thread::spawn(move || {
            for dialled in listener.incoming() {
                let Ok(up) = TcpStream::connect(("127.0.0.1", to)) else { continue };
                let (dialled, told) = (dialled.unwrap(), told.clone());
                let (mut from, mut out) = (dialled.try_clone().unwrap(), up.try_clone().unwrap());
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut out);
                    let _ = out.shutdown(Shutdown::Both);
                });
                std::thread::spawn(move || told.pass_on(up, dialled));
            }
        });
        relay
    }

    fn pass_on(&self, mut from: TcpStream, mut to: TcpStream) {
        let (mut passed, mut buffer) = (0, vec![0; 64 << 10]);
        while let Ok(read @ 1..) = from.read(&mut buffer) {
            passed += read as u64;
            if passed > self.passes.load(SeqCst) {
                self.ended.fetch_add(1, SeqCst);
                if !self.breaks.load(SeqCst) {
                    // Forward nothing more, and wait until the dialling side closes the stalled
                    // connection.
                    let _ = to.read(&mut [0]);
                }
                break;
            }
            if to.write_all(&buffer[..read]).is_err() {
                break;
            }
        }
        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
    }

    fn limit_connections(&self, bytes: u64, then_breaks: bool) {
        self.breaks.store(then_breaks, SeqCst);
        self.passes.store(bytes, SeqCst);
    }
}

struct RelayedCluster {
    members: Vec<TestMember>,
    relay: Relay,
    initial: String,
    revision: i64,
}

/// Starts a cluster of one member with some data, whose advertised peer URL is the relay's.
async fn cluster(root: &Path) -> RelayedCluster {
    let [listens, advertises, client] = free_ports();
    let initial = format!("one=http://127.0.0.1:{advertises}");
    let mut member = TestMember::new(root, "one", listens, client, &initial);
    for arg in &mut member.args {
        if arg.starts_with("--initial-advertise-peer-urls") {
            *arg = format!("--initial-advertise-peer-urls=http://127.0.0.1:{advertises}");
        }
    }
    let relay = Relay::start(advertises, listens);
    member.start();
    member.wait_ready();
    let mut revision = 0;
    for n in 0..VALUES {
        revision = member.put(&format!("k{n}"), &"v".repeat(VALUE_BYTES)).await.unwrap();
    }
    RelayedCluster { members: vec![member], relay, initial, revision }
}

impl RelayedCluster {
    /// Adds a member to the cluster, and returns it not started yet, with its data in `root`.
    async fn newcomer(&self, root: &Path) -> TestMember {
        let [peer, client] = free_ports();
        let url = format!("http://127.0.0.1:{peer}");
        let request = MemberAddRequest { peer_ur_ls: vec![url.clone()], is_learner: false };
        self.members[0].cluster().member_add(request).await.unwrap();
        let initial = format!("{},two={url}", self.initial);
        let mut new = TestMember::new(root, "two", peer, client, &initial);
        new.args.push("--initial-cluster-state=existing".to_owned());
        new
    }

    /// Asserts that `new`, whose earlier attempt to join failed, joins now.
    async fn check_joins(&mut self, mut new: TestMember) {
        assert!(!new.data_dir.join("member/wal").exists(), "it has begun nothing: {}", new.log());
        self.relay.limit_connections(u64::MAX, false);
        new.start();
        new.wait_ready_after(0);
        assert!(!new.data_dir.join("member/snap/joining").exists());
        self.members.push(new);
        wait_same_hash(&self.members, self.revision).await;
    }
}

#[tokio::test]
async fn an_interrupted_state_transfer_is_an_error_and_the_next_start_repeats_it() {
    let root = tempfile::tempdir().unwrap();
    let mut cluster = cluster(root.path()).await;
    let mut new = cluster.newcomer(root.path()).await;
    cluster.relay.limit_connections(RELAYED_BYTES_LIMIT, true);
    new.start();
    assert_eq!(new.exit_code(), Some(1), "{}", new.log());
    let why = "cannot fetch the cluster's state from any member: ";
    assert!(new.log().contains(why), "{}", new.log());
    assert!(!new.data_dir.join("member/snap/joining").exists(), "it takes no space");
    cluster.check_joins(new).await;
}

#[tokio::test]
async fn a_newcomer_that_is_stopped_while_it_fetches_the_state_exits_at_once_with_0() {
    let root = tempfile::tempdir().unwrap();
    let mut cluster = cluster(root.path()).await;
    let mut new = cluster.newcomer(root.path()).await;
    cluster.relay.limit_connections(RELAYED_BYTES_LIMIT, false);
    new.start();
    let ended = Arc::clone(&cluster.relay.ended);
    eventually("the stream stalls", || ended.load(SeqCst) > 0);
    let start = Instant::now();
    assert_eq!(new.stop(), Some(0), "{}", new.log());
    // The signal must interrupt the stalled transfer. The transfer's own time limit is thirty
    // seconds.
    assert!(start.elapsed() < Duration::from_secs(15), "it took {:?}", start.elapsed());
    cluster.check_joins(new).await;
}

#[tokio::test]
async fn a_join_with_a_full_disk_fails_and_succeeds_once_there_is_space() {
    let root = tempfile::tempdir().unwrap();
    let Some(small) = SmallFilesystem::mount(&root.path().join("small"), 400) else {
        return report_skip("no tmpfs can be mounted");
    };
    let mut cluster = cluster(root.path()).await;
    let mut new = cluster.newcomer(&small.0).await;
    let filler = small.fill_up_to(64 << 20);
    new.start();
    assert_eq!(new.exit_code(), Some(1), "{}", new.log());
    assert!(new.log().contains("is full"), "{}", new.log());
    std::fs::remove_file(filler).unwrap();
    cluster.check_joins(new).await;
    let _ = cluster.members.pop().unwrap().stop();
}
