//! Runs the built `muster-node` program as an operator would.

pub(crate) mod ca;
pub(crate) mod fault_injector;
pub(crate) mod small;

use std::{
    fs::File,
    hash::{BuildHasher, RandomState},
    io::Write as _,
    net::{Ipv4Addr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Mutex, PoisonError},
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

/// Time limit of each wait. It is long enough for a loaded machine; a test that passes waits much
/// less.
pub(crate) const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// Returns a command that runs the built program in an empty environment. Only `MUTANT` is kept: it
/// selects the bug that `make mutants` has switched on.
pub(crate) fn node_command() -> Command {
    in_empty_environment(Command::new(env!("CARGO_BIN_EXE_muster-node")))
}

/// Seconds after which `timeout` kills a program started by [`node_command_with_timeout`].
const RUN_LIMIT_SECONDS: &str = "60";

/// Returns a command for runs that are expected to end. A program that serves instead is killed, so
/// that its test fails rather than hangs.
pub(crate) fn node_command_with_timeout() -> Command {
    let mut timeout = Command::new("timeout");
    timeout.args(["--signal=KILL", RUN_LIMIT_SECONDS, env!("CARGO_BIN_EXE_muster-node")]);
    in_empty_environment(timeout)
}

/// Returns a command that kills the program at the `step`th call of one of the system calls
/// `calls`. Requires strace.
pub(crate) fn node_command_killed_at(calls: &str, step: usize) -> Command {
    let mut strace = Command::new("strace");
    strace.args(["-f", "-qq", "-o", "/dev/null", "-e", &format!("trace={calls}")]);
    strace.args(["-e", &format!("inject={calls}:signal=KILL:when={step}")]);
    strace.arg(env!("CARGO_BIN_EXE_muster-node"));
    in_empty_environment(strace)
}

fn in_empty_environment(mut command: Command) -> Command {
    command.env_clear().stdin(Stdio::null());
    command.envs(std::env::var_os("MUTANT").map(|id| ("MUTANT", id)));
    command
}

/// Range of the tests' ports: above those of well-known services, and below
/// `net.ipv4.ip_local_port_range`. The kernel gives ports of the latter range to outgoing
/// connections, which could take a member's port before it is started or while it restarts.
const PORTS: std::ops::Range<u16> = 10_000..32_768;

/// Number of ports in a block. One program takes whole blocks.
const BLOCK: u16 = 64;

/// The block of ports that this program hands out now.
struct PortBlocks {
    /// Listeners on the first ports of this program's blocks. While they exist, no other test
    /// program takes these blocks.
    guards: Vec<TcpListener>,
    /// Next port to hand out.
    next: u16,
    /// First port after the block.
    end: u16,
}

impl PortBlocks {
    fn draw(&mut self) -> u16 {
        if self.next == self.end {
            self.take_block();
        }
        self.next += 1;
        self.next - 1
    }

    /// Takes a block of ports that no other test program has. The search begins at a random block.
    fn take_block(&mut self) {
        let blocks = PORTS.len() / usize::from(BLOCK);
        let start = RandomState::new().hash_one(()) as usize % blocks;
        let guard = |n: usize| {
            let number = u16::try_from((start + n) % blocks).expect("there are fewer blocks");
            let first = PORTS.start + number * BLOCK;
            Some((first, TcpListener::bind((Ipv4Addr::LOCALHOST, first)).ok()?))
        };
        let (first, guard) = (0..blocks).find_map(guard).expect("one of so many blocks is free");
        self.guards.push(guard);
        (self.next, self.end) = (first + 1, first + BLOCK);
    }
}

/// Returns free ports. No other test gets them, in this test program or in one that runs at the
/// same time.
pub(crate) fn free_ports<const N: usize>() -> [u16; N] {
    static BLOCKS: Mutex<PortBlocks> =
        Mutex::new(PortBlocks { guards: Vec::new(), next: 0, end: 0 });
    let mut blocks = BLOCKS.lock().unwrap_or_else(PoisonError::into_inner);
    let free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    std::array::from_fn(|_| {
        let mut drawn = std::iter::repeat_with(|| blocks.draw()).take(PORTS.len());
        drawn.find(free).expect("one of so many ports is free")
    })
}

/// Waits until `holds` returns true. Panics with the text `what` after [`WAIT_LIMIT`].
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < WAIT_LIMIT, "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether all threads of process `id` are stopped, by the state in their stat files
/// (proc_pid_stat(5)).
fn is_stopped(id: i32) -> bool {
    let mut threads = std::fs::read_dir(format!("/proc/{id}/task")).unwrap();
    threads.all(|thread| {
        let stat = std::fs::read_to_string(thread.unwrap().path().join("stat"));
        // If the file is missing, the thread has ended since the directory was listed. It counts as
        // stopped.
        stat.map_or(true, |stat| stat.rsplit_once(") ").unwrap().1.starts_with('T'))
    })
}

/// A member: its command line and its process.
pub(crate) struct TestMember {
    pub name: String,
    pub data_dir: PathBuf,
    pub client_url: String,
    pub args: Vec<String>,
    /// Program to run instead of the built `muster-node`.
    pub program: Option<PathBuf>,
    log: PathBuf,
    child: Option<Child>,
    starts: usize,
}

impl TestMember {
    /// Returns a member that isn't started yet, with these ports on 127.0.0.1 and this
    /// `--initial-cluster`.
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

    /// Returns the only member of a cluster, not started yet.
    pub(crate) fn alone(root: &Path) -> Self {
        let [peer, client] = free_ports();
        Self::new(root, "one", peer, client, &format!("one=http://127.0.0.1:{peer}"))
    }

    pub(crate) fn start(&mut self) {
        let log = File::options().create(true).append(true).open(&self.log).unwrap();
        let out = log.try_clone().unwrap();
        let mut command = self.program.as_ref().map_or_else(node_command, Command::new);
        let child = command.args(&self.args).stdin(Stdio::null()).stdout(out).stderr(log).spawn();
        self.child = Some(child.unwrap());
        self.starts += 1;
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until the current process is ready. Every earlier start must have got ready as well.
    pub(crate) fn wait_ready(&mut self) {
        self.wait_ready_after(self.starts - 1);
    }

    /// Waits until the current process is ready. `before` is the number of earlier starts that
    /// became ready, as counted in the log.
    pub(crate) fn wait_ready_after(&mut self, before: usize) {
        let start = Instant::now();
        while self.log().matches("ready to serve client requests").count() <= before {
            if let Some(status) = self.child.as_mut().unwrap().try_wait().unwrap() {
                panic!("{} ended with {status}:\n{}", self.name, self.log());
            }
            assert!(start.elapsed() < WAIT_LIMIT, "never ready:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Sends `signal` to the process. After SIGSTOP it waits until all threads are stopped. The
    /// kernel notifies one thread, which stops the others once it runs; until then they go on.
    pub(crate) fn signal(&self, signal: Signal) {
        let id = i32::try_from(self.id()).unwrap();
        kill_process(Pid::from_raw(id).unwrap(), signal).unwrap();
        if signal == Signal::STOP {
            eventually("every thread stands still", || is_stopped(id));
        }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// Waits until the process ends, and returns its exit code. Returns `None` if a signal ended
    /// it.
    pub(crate) fn exit_code(&mut self) -> Option<i32> {
        let mut child = self.child.take().unwrap();
        let start = Instant::now();
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                return status.code();
            }
            if start.elapsed() > WAIT_LIMIT {
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

    /// Sends an HTTP/1.1 GET, and returns head and body of the response.
    pub(crate) fn http(&self, path: &str) -> String {
        self.request("GET", path, "")
    }

    /// Sends an HTTP/1.1 request, and returns head and body of the response.
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

    /// Whether this member has a peer stream to `peer`, which it opens only after it has verified
    /// that peer.
    pub(crate) fn has_stream_to(&self, peer: u64) -> bool {
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

    /// Reads the value of `key` with `RangeStream`.
    pub(crate) async fn get_by_range_stream(
        &self,
        key: &str,
    ) -> Result<Option<String>, tonic::Status> {
        let request = RangeRequest { key: key.to_owned().into(), ..RangeRequest::default() };
        let mut parts = KvClient::new(self.channel()).range_stream(request).await?.into_inner();
        let mut found = None;
        while let Some(part) = parts.message().await? {
            let kvs = part.range_response.unwrap().kvs;
            found = found.or(kvs.first().map(|kv| String::from_utf8(kv.value.to_vec()).unwrap()));
        }
        Ok(found)
    }

    /// Reads the value of `key` in a read-only transaction.
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

    /// Reads the list of members with a linearizable request.
    pub(crate) async fn members(&self) -> Result<Vec<etcdserverpb::Member>, tonic::Status> {
        let request = MemberListRequest { linearizable: true };
        Ok(self.cluster().member_list(request).await?.into_inner().members)
    }

    pub(crate) async fn member_id(&self) -> u64 {
        self.status().await.unwrap().header.unwrap().member_id
    }

    pub(crate) async fn hash(&self, revision: i64) -> Result<u32, tonic::Status> {
        let request = HashKvRequest { revision };
        Ok(MaintenanceClient::new(self.channel()).hash_kv(request).await?.into_inner().hash)
    }
}

impl Drop for TestMember {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Returns three members on free ports, not started yet.
pub(crate) fn three_members(root: &Path) -> Vec<TestMember> {
    on_ports(root, ["a", "b", "c"], free_ports(), free_ports())
}

/// Returns five members on free ports, not started yet.
pub(crate) fn five_members(root: &Path) -> Vec<TestMember> {
    on_ports(root, ["a", "b", "c", "d", "e"], free_ports(), free_ports())
}

fn on_ports<const N: usize>(
    root: &Path,
    names: [&str; N],
    peers: [u16; N],
    clients: [u16; N],
) -> Vec<TestMember> {
    let initial: Vec<String> =
        (0..N).map(|n| format!("{}=http://127.0.0.1:{}", names[n], peers[n])).collect();
    (0..N)
        .map(|n| TestMember::new(root, names[n], peers[n], clients[n], &initial.join(",")))
        .collect()
}

/// Flag with an election timeout that is longer than any test takes, even on a slow machine. The
/// first member campaigns at its start, and leads until a test transfers the leadership.
pub(crate) const NO_ELECTIONS: &str = "--election-timeout=20000";

/// Starts three members with [`NO_ELECTIONS`]. The first one becomes the leader and remains it.
pub(crate) fn start_three_led_by_first(root: &Path) -> Vec<TestMember> {
    start_led_by_first(three_members(root))
}

/// Starts `members` with [`NO_ELECTIONS`]. The first one becomes the leader and remains it.
pub(crate) fn start_led_by_first(mut members: Vec<TestMember>) -> Vec<TestMember> {
    for (n, member) in members.iter_mut().enumerate() {
        member.args.push(NO_ELECTIONS.to_owned());
        if n > 0 {
            // Starting members campaign in the order of their ids, and the first one's id may be
            // high. So the others must not campaign at their start.
            member.args.push("--initial-election-tick-advance=false".to_owned());
        }
        member.start();
    }
    members.iter_mut().for_each(TestMember::wait_ready);
    members
}

/// Starts three members, and waits until they are ready.
pub(crate) fn start_three(root: &Path) -> Vec<TestMember> {
    let mut members = three_members(root);
    members.iter_mut().for_each(TestMember::start);
    members.iter_mut().for_each(TestMember::wait_ready);
    members
}

pub(crate) fn as_refs(members: &[TestMember]) -> Vec<&TestMember> {
    members.iter().collect()
}

/// Repeats a put until it succeeds: there may be no leader for a while. Returns the put's revision.
pub(crate) async fn put_with_retries(member: &TestMember, key: &str, value: &str) -> i64 {
    let start = Instant::now();
    loop {
        match member.put(key, value).await {
            Ok(revision) => return revision,
            Err(error) => assert!(start.elapsed() < WAIT_LIMIT, "{error}: {}", member.log()),
        }
    }
}

/// Waits until all members have the same hash of their data at `revision`.
pub(crate) async fn wait_same_hash(members: &[TestMember], revision: i64) {
    let start = Instant::now();
    loop {
        let mut hashes = Vec::new();
        for member in members {
            hashes.push(member.hash(revision).await.ok());
        }
        if hashes.iter().all(|hash| hash.is_some() && *hash == hashes[0]) {
            return;
        }
        assert!(start.elapsed() < WAIT_LIMIT, "hashes differ: {hashes:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Repeats `change` while it fails with "unhealthy cluster". A member change requires that the
/// members have been connected for some time.
pub(crate) async fn retry_while_unhealthy<T>(
    mut change: impl AsyncFnMut() -> Result<T, tonic::Status>,
) -> T {
    let start = Instant::now();
    loop {
        match change().await {
            Ok(done) => return done,
            Err(status) if status.message() == "etcdserver: unhealthy cluster" => {}
            Err(status) => panic!("{status}"),
        }
        assert!(start.elapsed() < WAIT_LIMIT, "never healthy");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Returns the index of the leader in `members`, if all of them agree on it.
pub(crate) async fn leader(members: &[&TestMember]) -> Option<usize> {
    let mut seen = Vec::new();
    for member in members {
        let status = member.status().await.ok()?;
        seen.push((status.header?.member_id, status.leader));
    }
    let leader = seen[0].1;
    let agreed = leader != 0 && seen.iter().all(|(_, other)| *other == leader);
    agreed.then(|| seen.iter().position(|(own, _)| *own == leader)).flatten()
}

/// Waits until all members agree on a leader, and returns its index in `members`.
pub(crate) async fn wait_settled(members: &[&TestMember]) -> usize {
    let start = Instant::now();
    loop {
        if let Some(leader) = leader(members).await {
            return leader;
        }
        assert!(start.elapsed() < WAIT_LIMIT, "no leader that all agree on");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Writes an executable script, by a child process. If this process wrote it, a child that another
/// test starts meanwhile would inherit the open descriptor. Until that child executes its own
/// program, executing the script would fail with ETXTBSY.
pub(crate) fn write_script(path: &Path, text: &str) {
    let write = r#"printf %s "$0" >"$1" && chmod 755 "$1""#;
    let status = Command::new("sh").args(["-c", write, text]).arg(path).status().unwrap();
    assert!(status.success(), "writing {}: {status}", path.display());
}

/// Reports that a test was skipped, or fails if this is CI. Writes to standard error directly,
/// because the test runner hides the output of tests that pass.
pub(crate) fn report_skip(why: &str) {
    assert!(std::env::var_os("CI").is_none(), "{why}");
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}

/// Runs Debian's `etcdctl`. Returns whether it succeeded, and its output. Returns `None` if it
/// isn't installed; that is an error under CI.
pub(crate) fn etcdctl(endpoints: &str, args: &[&str]) -> Option<(bool, String)> {
    let output = Command::new("etcdctl")
        .env("ETCDCTL_API", "3")
        // etcdctl's defaults of 5 s and 2 s are too short on a busy machine. Flags in `args` come
        // later, so they take precedence.
        .args(["--command-timeout=60s", "--dial-timeout=10s", "--endpoints", endpoints])
        .args(args)
        .output();
    match output {
        Ok(output) => {
            let text = [output.stdout, output.stderr].concat();
            Some((output.status.success(), String::from_utf8_lossy(&text).into_owned()))
        }
        Err(error) => {
            report_skip(&format!("etcdctl: {error}"));
            None
        }
    }
}

/// Watches `k` from revision `from`, waits until the watch is canceled, and returns its
/// `compact_revision`.
pub(crate) async fn watch_compact_revision(member: &TestMember, from: i64) -> i64 {
    let create = WatchCreateRequest { key: "k".into(), start_revision: from, ..Default::default() };
    let request = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    sender.send(request).await.unwrap();
    let stream = receiver_stream(receiver);
    let mut answers = WatchClient::new(member.channel()).watch(stream).await.unwrap().into_inner();
    loop {
        let answer = answers.message().await.unwrap().unwrap();
        if answer.canceled {
            return answer.compact_revision;
        }
    }
}

fn receiver_stream(
    mut receiver: tokio::sync::mpsc::Receiver<WatchRequest>,
) -> impl futures_util::Stream<Item = WatchRequest> {
    futures_util::stream::poll_fn(move |context| receiver.poll_recv(context))
}
