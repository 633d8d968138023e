//! Runs the built program, as an operator would.

#![allow(dead_code, reason = "each test program uses a part of this")]
#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

pub(crate) mod ca;
pub(crate) mod saboteur;
pub(crate) mod small;

use std::{
    fs::File,
    hash::{BuildHasher, RandomState},
    io::Write as _,
    net::{Ipv4Addr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        LazyLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use node_proto::etcdserverpb::{
    self, HashKvRequest, MemberListRequest, PutRequest, RangeRequest, RequestOp, StatusRequest,
    StatusResponse, TxnRequest, WatchCreateRequest, WatchRequest, cluster_client::ClusterClient,
    kv_client::KvClient, maintenance_client::MaintenanceClient, request_op, response_op,
    watch_client::WatchClient, watch_request::RequestUnion,
};
use rustix::process::{Pid, Signal, kill_process};
use tonic::transport::{Channel, Endpoint};

/// Long enough for a loaded machine; nothing waits this long when all is well.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A command for the built program, in an environment without anything but the bug that `make
/// mutants` has switched on.
pub(crate) fn node() -> Command {
    bare(Command::new(env!("CARGO_BIN_EXE_muster-node")))
}

/// Seconds after which [`node_that_ends`] is killed.
const LONGEST_RUN: &str = "60";

/// The program, expected to end by itself. One that serves instead is killed, so that its test fails and
/// does not wait.
pub(crate) fn node_that_ends() -> Command {
    let mut timeout = Command::new("timeout");
    timeout.args(["--signal=KILL", LONGEST_RUN, env!("CARGO_BIN_EXE_muster-node")]);
    bare(timeout)
}

/// The program, killed as it makes the `step`th of these system calls; it takes strace.
pub(crate) fn node_killed_at(calls: &str, step: usize) -> Command {
    let mut strace = Command::new("strace");
    strace.args(["-f", "-qq", "-o", "/dev/null", "-e", &format!("trace={calls}")]);
    strace.args(["-e", &format!("inject={calls}:signal=KILL:when={step}")]);
    strace.arg(env!("CARGO_BIN_EXE_muster-node"));
    bare(strace)
}

fn bare(mut command: Command) -> Command {
    command.env_clear().stdin(Stdio::null());
    command.envs(std::env::var_os("MUTANT").map(|id| ("MUTANT", id)));
    command
}

/// Above what well-known services listen on, and below what the kernel gives to outgoing connections
/// (`net.ipv4.ip_local_port_range`): one of those could take a port from a member that is not
/// started yet, or is being started again.
const PORTS: std::ops::Range<u16> = 10_000..32_768;

/// Ports that are free, and that no other test of this program gets. Programs that run at the same
/// time begin at different places.
pub(crate) fn free_ports<const N: usize>() -> [u16; N] {
    static DRAWN: LazyLock<AtomicUsize> =
        LazyLock::new(|| AtomicUsize::new(RandomState::new().hash_one(()) as usize % PORTS.len()));
    let draw = || {
        let drawn = DRAWN.fetch_add(1, Ordering::Relaxed);
        PORTS.start + u16::try_from(drawn % PORTS.len()).expect("there are fewer ports")
    };
    let free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    std::array::from_fn(|_| {
        let found = std::iter::repeat_with(draw).take(PORTS.len()).find(free);
        found.expect("one of so many ports is free")
    })
}

/// Waits until `holds`.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether all threads of a process have stopped. See proc_pid_stat(5).
fn stands_still(id: i32) -> bool {
    let mut threads = std::fs::read_dir(format!("/proc/{id}/task")).unwrap();
    threads.all(|thread| {
        let stat = std::fs::read_to_string(thread.unwrap().path().join("stat"));
        // One that has ended meanwhile does nothing more either.
        stat.map_or(true, |stat| stat.rsplit_once(") ").unwrap().1.starts_with('T'))
    })
}

/// One member: what it was started with, and its process.
pub(crate) struct Member {
    pub name: String,
    pub data_dir: PathBuf,
    pub client_url: String,
    pub args: Vec<String>,
    /// What runs in the built program's place.
    pub program: Option<PathBuf>,
    log: PathBuf,
    child: Option<Child>,
    starts: usize,
}

impl Member {
    /// Not yet started; `initial_cluster` and ports are given.
    pub(crate) fn new(
        root: &Path,
        name: &str,
        peer: u16,
        client: u16,
        initial_cluster: &str,
    ) -> Self {
        let peer_url = format!("http://127.0.0.1:{peer}");
        let client_url = format!("http://127.0.0.1:{client}");
        let data_dir = root.join(name);
        let args = vec![
            format!("--name={name}"),
            format!("--data-dir={}", data_dir.display()),
            format!("--listen-peer-urls={peer_url}"),
            format!("--initial-advertise-peer-urls={peer_url}"),
            format!("--listen-client-urls={client_url}"),
            format!("--advertise-client-urls={client_url}"),
            format!("--initial-cluster={initial_cluster}"),
        ];
        let log = root.join(format!("{name}.log"));
        Self {
            name: name.to_owned(),
            data_dir,
            client_url,
            args,
            program: None,
            log,
            child: None,
            starts: 0,
        }
    }

    /// A cluster of one.
    pub(crate) fn alone(root: &Path) -> Self {
        let [peer, client] = free_ports();
        Self::new(root, "one", peer, client, &format!("one=http://127.0.0.1:{peer}"))
    }

    pub(crate) fn start(&mut self) {
        let log = File::options().create(true).append(true).open(&self.log).unwrap();
        let out = log.try_clone().unwrap();
        let mut command = self.program.as_ref().map_or_else(node, Command::new);
        let child = command.args(&self.args).stdin(Stdio::null()).stdout(out).stderr(log).spawn();
        self.child = Some(child.unwrap());
        self.starts += 1;
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until this start has said that it serves, as all before it have.
    pub(crate) fn ready(&mut self) {
        self.ready_again(self.starts - 1);
    }

    /// Waits until this start has said that it serves, as so many before it have.
    pub(crate) fn ready_again(&mut self, before: usize) {
        let start = Instant::now();
        while self.log().matches("ready to serve client requests").count() <= before {
            if let Some(status) = self.child.as_mut().unwrap().try_wait().unwrap() {
                panic!("{} ended with {status}:\n{}", self.name, self.log());
            }
            assert!(start.elapsed() < PATIENCE, "never ready:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Sends it. Who is stopped does nothing more once this returns: the kernel tells one thread,
    /// which tells the others when it gets to run, and until then they go on.
    pub(crate) fn signal(&self, signal: Signal) {
        let id = i32::try_from(self.id()).unwrap();
        kill_process(Pid::from_raw(id).unwrap(), signal).unwrap();
        if signal == Signal::STOP {
            eventually("every thread stands still", || stands_still(id));
        }
    }

    /// Its process.
    pub(crate) fn id(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// The exit code, once it has ended by itself.
    pub(crate) fn exit_code(&mut self) -> Option<i32> {
        let mut child = self.child.take().unwrap();
        let start = Instant::now();
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                return status.code();
            }
            if start.elapsed() > PATIENCE {
                child.kill().unwrap();
                panic!("{} does not end:\n{}", self.name, self.log());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn kill(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    pub(crate) fn stop(&mut self) -> Option<i32> {
        self.signal(Signal::TERM);
        self.exit_code()
    }

    pub(crate) fn channel(&self) -> Channel {
        Endpoint::from_shared(self.client_url.clone())
            .unwrap()
            .connect_timeout(Duration::from_secs(1))
            .connect_lazy()
    }

    /// The answer to a plain HTTP/1.1 GET, head and body.
    pub(crate) fn http(&self, path: &str) -> String {
        self.request("GET", path, "")
    }

    /// The whole answer, head and body.
    pub(crate) fn request(&self, verb: &str, path: &str, body: &str) -> String {
        use std::io::{Read as _, Write as _};
        let address = self.client_url.strip_prefix("http://").unwrap();
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        let head = format!("{verb} {path} HTTP/1.1\r\nHost: h\r\nConnection: close");
        write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Whether it has a stream to `peer`, which has taken it for itself then.
    pub(crate) fn reaches(&self, peer: u64) -> bool {
        let link = format!("Remote=\"{peer:x}\"}} 1");
        let active = |line: &str| line.starts_with("etcd_network_active_peers{");
        self.http("/metrics").lines().any(|line| active(line) && line.ends_with(&link))
    }

    pub(crate) async fn put(&self, key: &str, value: &str) -> Result<i64, tonic::Status> {
        let request = PutRequest {
            key: key.to_owned().into(),
            value: value.to_owned().into(),
            ..PutRequest::default()
        };
        let answer = KvClient::new(self.channel()).put(request).await?;
        Ok(answer.into_inner().header.unwrap().revision)
    }

    pub(crate) async fn get(&self, key: &str) -> Result<Option<String>, tonic::Status> {
        let request = RangeRequest { key: key.to_owned().into(), ..RangeRequest::default() };
        let answer = KvClient::new(self.channel()).range(request).await?.into_inner();
        Ok(answer.kvs.first().map(|kv| String::from_utf8(kv.value.to_vec()).unwrap()))
    }

    /// The same as a range in parts.
    pub(crate) async fn get_in_parts(&self, key: &str) -> Result<Option<String>, tonic::Status> {
        let request = RangeRequest { key: key.to_owned().into(), ..RangeRequest::default() };
        let mut parts = KvClient::new(self.channel()).range_stream(request).await?.into_inner();
        let mut found = None;
        while let Some(part) = parts.message().await? {
            let kvs = part.range_response.unwrap().kvs;
            found = found.or(kvs.first().map(|kv| String::from_utf8(kv.value.to_vec()).unwrap()));
        }
        Ok(found)
    }

    /// The same in a transaction that only reads.
    pub(crate) async fn get_in_txn(&self, key: &str) -> Result<Option<String>, tonic::Status> {
        let range = RangeRequest { key: key.to_owned().into(), ..RangeRequest::default() };
        let request = Some(request_op::Request::RequestRange(range));
        let success = vec![RequestOp { request }];
        let request = TxnRequest { success, ..TxnRequest::default() };
        let answer = KvClient::new(self.channel()).txn(request).await?.into_inner();
        let Some(response_op::Response::ResponseRange(range)) = &answer.responses[0].response
        else {
            panic!("{answer:?}");
        };
        Ok(range.kvs.first().map(|kv| String::from_utf8(kv.value.to_vec()).unwrap()))
    }

    pub(crate) async fn status(&self) -> Result<StatusResponse, tonic::Status> {
        let call = MaintenanceClient::new(self.channel()).status(StatusRequest {}).await?;
        Ok(call.into_inner())
    }

    pub(crate) fn cluster(&self) -> ClusterClient<Channel> {
        ClusterClient::new(self.channel())
    }

    /// The cluster's members, as this one knows them for certain.
    pub(crate) async fn members(&self) -> Result<Vec<etcdserverpb::Member>, tonic::Status> {
        let request = MemberListRequest { linearizable: true };
        Ok(self.cluster().member_list(request).await?.into_inner().members)
    }

    /// Its own id.
    pub(crate) async fn member_id(&self) -> u64 {
        self.status().await.unwrap().header.unwrap().member_id
    }

    pub(crate) async fn hash(&self, revision: i64) -> Result<u32, tonic::Status> {
        let request = HashKvRequest { revision };
        Ok(MaintenanceClient::new(self.channel()).hash_kv(request).await?.into_inner().hash)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Three members on free ports, not started.
pub(crate) fn three(root: &Path) -> Vec<Member> {
    on_ports(root, ["a", "b", "c"], free_ports(), free_ports())
}

/// Five members on free ports, not started.
pub(crate) fn five(root: &Path) -> Vec<Member> {
    on_ports(root, ["a", "b", "c", "d", "e"], free_ports(), free_ports())
}

fn on_ports<const N: usize>(
    root: &Path,
    names: [&str; N],
    peers: [u16; N],
    clients: [u16; N],
) -> Vec<Member> {
    let initial: Vec<String> =
        (0..N).map(|n| format!("{}=http://127.0.0.1:{}", names[n], peers[n])).collect();
    (0..N).map(|n| Member::new(root, names[n], peers[n], clients[n], &initial.join(","))).collect()
}

/// With this no election time-out comes before a test has ended, however slow the machine: who leads
/// is the first member, which campaigns of itself, or whom it is handed over to.
pub(crate) const NO_ELECTIONS: &str = "--election-timeout=20000";

/// Three members that serve, of which the first leads and goes on.
pub(crate) fn led_by_the_first(root: &Path) -> Vec<Member> {
    led_by_the_first_of(three(root))
}

/// These members, of which the first leads and goes on.
pub(crate) fn led_by_the_first_of(mut members: Vec<Member>) -> Vec<Member> {
    for member in &mut members {
        member.args.push(NO_ELECTIONS.to_owned());
        member.start();
    }
    members.iter_mut().for_each(Member::ready);
    members
}

/// Three members that serve.
pub(crate) fn started(root: &Path) -> Vec<Member> {
    let mut members = three(root);
    members.iter_mut().for_each(Member::start);
    members.iter_mut().for_each(Member::ready);
    members
}

pub(crate) fn all(members: &[Member]) -> Vec<&Member> {
    members.iter().collect()
}

/// Puts until it is acknowledged: for when a leader has just been lost.
pub(crate) async fn put_again(member: &Member, key: &str, value: &str) -> i64 {
    let start = Instant::now();
    loop {
        match member.put(key, value).await {
            Ok(revision) => return revision,
            Err(error) => assert!(start.elapsed() < PATIENCE, "{error}: {}", member.log()),
        }
    }
}

/// Waits until all have the same data.
pub(crate) async fn same_hash(members: &[Member], revision: i64) {
    let start = Instant::now();
    loop {
        let mut hashes = Vec::new();
        for member in members {
            hashes.push(member.hash(revision).await.ok());
        }
        if hashes.iter().all(|hash| hash.is_some() && *hash == hashes[0]) {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "hashes differ: {hashes:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Tries until the members have been connected for as long as a change asks for.
pub(crate) async fn healthy<T>(mut change: impl AsyncFnMut() -> Result<T, tonic::Status>) -> T {
    let start = Instant::now();
    loop {
        match change().await {
            Ok(done) => return done,
            Err(status) if status.message() == "etcdserver: unhealthy cluster" => {}
            Err(status) => panic!("{status}"),
        }
        assert!(start.elapsed() < PATIENCE, "never healthy");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Which member leads, as the members that run agree.
pub(crate) async fn leader(members: &[&Member]) -> Option<usize> {
    let mut seen = Vec::new();
    for member in members {
        let status = member.status().await.ok()?;
        seen.push((status.header?.member_id, status.leader));
    }
    let leader = seen[0].1;
    let agreed = leader != 0 && seen.iter().all(|(_, other)| *other == leader);
    agreed.then(|| seen.iter().position(|(own, _)| *own == leader)).flatten()
}

/// Waits for `leader`.
pub(crate) async fn settled(members: &[&Member]) -> usize {
    let start = Instant::now();
    loop {
        if let Some(leader) = leader(members).await {
            return leader;
        }
        assert!(start.elapsed() < PATIENCE, "no leader that all agree on");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Says that a test was skipped, straight to standard error: the test runner keeps what a test that
/// passes has printed. Under CI that is a failure.
pub(crate) fn skipped(why: &str) {
    assert!(std::env::var_os("CI").is_none(), "{why}");
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}

/// Debian's etcdctl; `None` with a line that says so where it isn't, but never under CI.
pub(crate) fn etcdctl(endpoints: &str, args: &[&str]) -> Option<(bool, String)> {
    let output = Command::new("etcdctl")
        .env("ETCDCTL_API", "3")
        // Its own five and two seconds are too few for a busy machine; what `args` say comes later.
        .args(["--command-timeout=60s", "--dial-timeout=10s", "--endpoints", endpoints])
        .args(args)
        .output();
    match output {
        Ok(output) => {
            let text = [output.stdout, output.stderr].concat();
            Some((output.status.success(), String::from_utf8_lossy(&text).into_owned()))
        }
        Err(error) => {
            skipped(&format!("etcdctl: {error}"));
            None
        }
    }
}

/// The revision below which a watch is told that nothing is left, if it is.
pub(crate) async fn compacted_for(member: &Member, from: i64) -> i64 {
    let create = WatchCreateRequest { key: "k".into(), start_revision: from, ..Default::default() };
    let request = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    sender.send(request).await.unwrap();
    let stream = tokio_stream(receiver);
    let mut answers = WatchClient::new(member.channel()).watch(stream).await.unwrap().into_inner();
    loop {
        let answer = answers.message().await.unwrap().unwrap();
        if answer.canceled {
            return answer.compact_revision;
        }
    }
}

fn tokio_stream(
    mut receiver: tokio::sync::mpsc::Receiver<WatchRequest>,
) -> impl futures_util::Stream<Item = WatchRequest> {
    futures_util::stream::poll_fn(move |context| receiver.poll_recv(context))
}
