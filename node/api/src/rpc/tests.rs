//! Tests of the API over the wire. The member is a single voter with real files and a client port
//! on loopback. Independent gRPC and HTTP clients use it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use node_engine::driver::{self, Message, OutgoingSnapshot, PeerSender, SendError};
use node_engine::log::{self, Log, LogOptions};
use node_proto::etcdserverpb::kv_client::KvClient;
use node_proto::etcdserverpb::maintenance_client::MaintenanceClient;
use node_proto::etcdserverpb::request_op::Request as Op;
use node_proto::etcdserverpb::watch_client::WatchClient;
use node_proto::etcdserverpb::watch_request::RequestUnion;
use node_proto::etcdserverpb::{
    AlarmRequest, CompactionRequest, DefragmentRequest, DefragmentResponse, DeleteRangeRequest,
    DowngradeRequest, HashKvRequest, HashRequest, MemberListRequest, PutRequest, RangeRequest,
    RequestOp, StatusRequest, TxnRequest, WatchCancelRequest, WatchCreateRequest,
    WatchProgressRequest, WatchRequest, WatchResponse, cluster_client,
};
use node_state::apply::KvStateMachine;
use node_state::disk::{OpenMode, RealDisk, RedbBackend, SharedDisk};
use node_state::identity::{Incarnation, MemberId, NodeKey};
use node_state::membership::Member;
use node_state::mvcc;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use super::*;
use crate::clients::{ClientLimits, ClientListener, ServingThreads, bind};

mod auth;
mod corruption;
mod direct;
mod gateway;
mod gzip;
mod lease_clock;
mod lock_queue;
mod maintenance;
mod range_stream;
mod reflection;
mod refusals;
mod snapshot;
mod unread;
mod watches;

const MEMBER: u64 = 7;

struct UnconnectedSender;

impl PeerSender for UnconnectedSender {
    fn try_send(&self, _: Message) -> Result<(), SendError> {
        Err(SendError::NotConnected)
    }

    fn send_snapshot(&self, _: OutgoingSnapshot) {}
}

/// Starts two listeners for clients. The first one answers common KV calls without its router, the
/// second one answers all calls with it.
fn start_fronts(routes: &crate::http::Routes) -> (ServingThreads, [SocketAddr; 2]) {
    let limits = ClientLimits {
        max_concurrent_streams: 1_000,
        keepalive_interval: Duration::ZERO,
        keepalive_timeout: Duration::ZERO,
        largest_request: 2 << 20,
    };
    let listeners = [Some(routes.direct_calls()), None].map(|direct| {
        let socket = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        ClientListener { socket, tls: None, router: routes.all(false), direct }
    });
    let addresses = listeners.each_ref().map(|one| one.socket.local_addr().unwrap());
    (ServingThreads::start(1, &listeners, limits, Arc::default()).unwrap(), addresses)
}

/// A member that is the only one of its cluster.
struct ApiTestNode {
    address: SocketAddr,
    /// Address of a second listener, whose router answers every request. The first listener answers
    /// common KV calls without its router.
    routed_address: SocketAddr,
    channel: Channel,
    leader: tokio::sync::watch::Receiver<u64>,
    context: Arc<ApiContext>,
    _fronts: ServingThreads,
    _running: driver::RunningDriver,
    stop: CancellationToken,
    _dir: tempfile::TempDir,
}

impl ApiTestNode {
    async fn start() -> Self {
        Self::start_with(ApiLimits::default()).await
    }

    async fn start_with(limits: ApiLimits) -> Self {
        Self::start_signing(limits, None).await
    }

    /// Starts a member with `signed_tokens` as the key for tokens; `None` means simple tokens.
    async fn start_signing(limits: ApiLimits, signed_tokens: Option<Arc<Jwt>>) -> Self {
        let limits = ApiLimits {
            watch_progress_interval: Duration::from_millis(200),
            snapshot_stall_timeout: Duration::from_millis(500),
            bcrypt_cost: 4,
            ..limits
        };
        let dir = tempfile::tempdir().unwrap();
        let disk: SharedDisk = Arc::new(RealDisk);
        let identity = log::LogIdentity { cluster: 9, member: MEMBER, incarnation: 5 };
        let small = LogOptions { segment_bytes: 32 << 20, spare_segments: 0, ..Default::default() };
        Log::create(&disk, dir.path(), &identity, &small).unwrap();
        let (log, recovered) = Log::open(&disk, dir.path(), &small).unwrap();
        let file = disk.open(&dir.path().join("db"), OpenMode::New).unwrap();
        let member = Member {
            id: MemberId(MEMBER),
            name: "one".to_owned(),
            peer_urls: vec!["http://one:2380".to_owned()],
            client_urls: Vec::new(),
            is_learner: false,
            incarnation: Some(Incarnation([1; 16])),
            node_key: Some(NodeKey([1; 32])),
            changed_at: 0,
            vote_when_ready: false,
            operations: Vec::new(),
        };
        let store = mvcc::StoreOptions { members: vec![member], ..mvcc::StoreOptions::default() };
        let machine = KvStateMachine::open(RedbBackend::new(file).unwrap(), store).unwrap();
        let (store, hub) = (machine.store(), machine.hub());
        let mut options = driver::MemberOptions::new(MEMBER, dir.path().join("snapshots"));
        options.campaign_when_connected = true;
        let sender = Arc::new(UnconnectedSender);
        let parts = driver::MemberParts { options, machine, log, recovered, sender, seed: 1 };
        let (handle, _, running) = driver::start(parts).unwrap();
        let stop = CancellationToken::new();
        let leader = handle.leader();
        let services = ApiParts {
            handle,
            store,
            store_file: mvcc::StoreFile::new(disk.clone(), dir.path()),
            hub,
            identity: ServerIdentity { cluster_id: 9, member_id: MEMBER, version: "3.6.0" },
            request_ids: RequestIds::new(MEMBER, 1),
            limits,
            peers: None,
            rules: ChangeRules::new(true, 1),
            signed_tokens,
            telemetry: Telemetry::default(),
        };
        let (grpc, context) = router(services, &TaskTracker::new(), &stop);
        let browsers = crate::http::BrowserRules::default();
        let routes = crate::http::Routes::new(grpc, context.clone(), Some(2 << 20), browsers);
        let (fronts, [address, routed_address]) = start_fronts(&routes);
        let endpoint = Channel::from_shared(format!("http://{address}")).unwrap();
        let channel = endpoint.connect().await.unwrap();
        let (_fronts, _running, _dir) = (fronts, running, dir);
        Self { address, routed_address, channel, leader, context, _fronts, _running, stop, _dir }
    }

    fn kv(&self) -> KvClient<Channel> {
        KvClient::new(self.channel.clone())
    }

    async fn put(&self, key: &str, value: &str) -> i64 {
        let response = self.kv().put(put(key, value)).await.unwrap().into_inner();
        response.header.unwrap().revision
    }

    async fn compact(&self, revision: i64) -> Result<(), Status> {
        let request = CompactionRequest { revision, physical: true };
        self.kv().compact(request).await.map(|_| ())
    }

    /// Returns the status line and the body of a plain HTTP/1.1 request's answer.
    async fn http(&self, method: &str, path: &str) -> (String, String) {
        let mut stream = tokio::net::TcpStream::connect(self.address).await.unwrap();
        let head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.lines().next().unwrap().strip_prefix("HTTP/1.1 ").unwrap();
        (status.to_owned(), body.to_owned())
    }

    async fn get(&self, path: &str) -> (String, String) {
        self.http("GET", path).await
    }
}

/// Awaits `what`, with a time limit that makes the test fail.
async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), what).await.expect("it does not come")
}

fn bytes(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

fn put(key: &str, value: &str) -> PutRequest {
    PutRequest { key: bytes(key), value: bytes(value), ..PutRequest::default() }
}

fn range(key: &str) -> RangeRequest {
    RangeRequest { key: bytes(key), ..RangeRequest::default() }
}

fn code_and_text(status: Result<impl std::fmt::Debug, Status>) -> (Code, String) {
    let status = status.expect_err("a refusal");
    (status.code(), status.message().to_owned())
}

#[tokio::test]
async fn a_write_is_read_back_with_a_full_header() {
    let node = ApiTestNode::start().await;
    assert_eq!(node.put("k", "v").await, 2);
    for serializable in [false, true] {
        let request = RangeRequest { serializable, ..range("k") };
        let response = node.kv().range(request).await.unwrap().into_inner();
        let header = response.header.unwrap();
        assert_eq!((header.cluster_id, header.member_id, header.revision), (9, MEMBER, 2));
        assert!(header.raft_term > 0);
        assert_eq!(response.kvs[0].value, bytes("v"));
    }
}

#[tokio::test]
async fn refusals_have_etcds_codes_and_texts() {
    let node = ApiTestNode::start().await;
    node.put("k", "v").await;
    let mut kv = node.kv();
    let empty = code_and_text(kv.put(put("", "v")).await);
    assert_eq!(empty, (Code::InvalidArgument, "etcdserver: key is not provided".to_owned()));
    let lease = code_and_text(kv.put(PutRequest { lease: 5, ..put("k", "v") }).await);
    assert_eq!(lease, (Code::NotFound, "etcdserver: requested lease not found".to_owned()));
    let future = code_and_text(kv.range(RangeRequest { revision: 99, ..range("k") }).await);
    let text = "etcdserver: mvcc: required revision is a future revision";
    assert_eq!(future, (Code::OutOfRange, text.to_owned()));
    let op = RequestOp { request: Some(Op::RequestPut(put("k", "v"))) };
    let twice = TxnRequest { success: vec![op.clone(), op], ..TxnRequest::default() };
    let text = "etcdserver: duplicate key given in txn request";
    assert_eq!(code_and_text(kv.txn(twice).await), (Code::InvalidArgument, text.to_owned()));
    let ahead = code_and_text(node.compact(99).await);
    assert_eq!(ahead.0, Code::OutOfRange);
}

/// Makes a put inside `depth` nested transactions.
fn nested(depth: usize) -> TxnRequest {
    let mut inner = Op::RequestPut(put("nested", "v"));
    for _ in 1..depth {
        let success = vec![RequestOp { request: Some(inner) }];
        inner = Op::RequestTxn(TxnRequest { success, ..TxnRequest::default() });
    }
    TxnRequest { success: vec![RequestOp { request: Some(inner) }], ..TxnRequest::default() }
}

#[tokio::test]
async fn too_deeply_nested_transactions_are_refused_without_stopping_the_member() {
    let node = ApiTestNode::start().await;
    for depth in [1, 10, 16] {
        let answer = node.kv().txn(nested(depth)).await.unwrap().into_inner();
        assert!(answer.succeeded, "{depth}");
    }
    let text = "etcdserver: too many operations in txn request";
    let refused = code_and_text(node.kv().txn(nested(17)).await);
    assert_eq!(refused, (Code::InvalidArgument, text.to_owned()));
    for depth in 45..=55 {
        node.kv().txn(nested(depth)).await.unwrap_err();
    }
    assert_eq!(node.put("k", "v").await, 5);
}

#[tokio::test]
async fn requests_that_are_too_large_are_refused_by_size() {
    let node = ApiTestNode::start().await;
    let large = |size| PutRequest { value: Bytes::from(vec![0; size]), ..put("k", "") };
    let mut kv = node.kv();
    kv.put(large(1_500_000)).await.unwrap();
    let text = "etcdserver: request is too large";
    assert_eq!(
        code_and_text(kv.put(large(1_600_000)).await),
        (Code::InvalidArgument, text.to_owned())
    );
    let (code, text) = code_and_text(kv.put(large(2_200_000)).await);
    assert_eq!(code, Code::ResourceExhausted);
    assert_eq!(text, "grpc: received message larger than max (2200008 vs. 2097152)");
}

#[tokio::test]
async fn a_physical_compaction_answers_after_old_revisions_are_deleted() {
    let node = ApiTestNode::start().await;
    for _ in 0..5 {
        node.put("k", "v").await;
    }
    node.compact(4).await.unwrap();
    let text = "etcdserver: mvcc: required revision has been compacted";
    assert_eq!(code_and_text(node.compact(4).await), (Code::OutOfRange, text.to_owned()));
    let old = RangeRequest { revision: 3, ..range("k") };
    assert_eq!(code_and_text(node.kv().range(old).await), (Code::OutOfRange, text.to_owned()));
    let mut maintenance = MaintenanceClient::new(node.channel.clone());
    let hash = maintenance.hash_kv(HashKvRequest { revision: 0 }).await.unwrap().into_inner();
    assert_eq!((hash.compact_revision, hash.hash_revision), (4, 6));
}

#[tokio::test]
async fn the_status_and_the_member_list_describe_this_member() {
    let node = ApiTestNode::start().await;
    node.put("k", "v").await;
    let mut maintenance = MaintenanceClient::new(node.channel.clone());
    let status = maintenance.status(StatusRequest {}).await.unwrap().into_inner();
    assert_eq!((&status.version[..], status.leader), ("3.6.0", MEMBER));
    assert!(status.db_size > 0 && status.raft_applied_index > 0 && status.errors.is_empty());
    let mut cluster = cluster_client::ClusterClient::new(node.channel.clone());
    let list = MemberListRequest { linearizable: true };
    let list = cluster.member_list(list).await.unwrap().into_inner();
    assert_eq!((&list.members[0].name[..], list.header.unwrap().revision), ("one", 0));
}

#[tokio::test]
async fn operations_are_counted_as_etcd_counts_them() {
    let node = ApiTestNode::start().await;
    node.put("a", "1").await;
    node.kv().range(range("a")).await.unwrap();
    let gone = DeleteRangeRequest { key: "b".into(), ..Default::default() };
    node.kv().delete_range(gone.clone()).await.unwrap();
    let write = Some(Op::RequestPut(put("c", "2")));
    let (read, delete) = (Some(Op::RequestRange(range("a"))), Some(Op::RequestDeleteRange(gone)));
    let success = [write, read.clone(), delete].map(|request| RequestOp { request });
    let txn = TxnRequest { success: success.into(), ..Default::default() };
    node.kv().txn(txn).await.unwrap();
    let success = [read.clone(), read].map(|request| RequestOp { request });
    let txn = TxnRequest { success: success.into(), ..Default::default() };
    node.kv().txn(txn).await.unwrap();
    let (_, metrics) = node.http("GET", "/metrics").await;
    for (name, count) in [("put", 2), ("delete", 2), ("range", 4), ("txn", 2)] {
        let line = format!("\netcd_mvcc_{name}_total {count}\n");
        assert!(metrics.contains(&line), "{line}{metrics}");
    }
}

/// Makes a stream of requests that stays open until the sender is dropped.
fn request_stream(
    receiver: mpsc::Receiver<WatchRequest>,
) -> impl futures_util::Stream<Item = WatchRequest> {
    futures_util::stream::unfold(receiver, async |mut receiver| {
        let request = receiver.recv().await?;
        Some((request, receiver))
    })
}

struct WatchClientStream {
    requests: mpsc::Sender<WatchRequest>,
    responses: Streaming<WatchResponse>,
}

impl WatchClientStream {
    async fn open(node: &ApiTestNode) -> Self {
        let (requests, receiver) = mpsc::channel(16);
        let mut client = WatchClient::new(node.channel.clone());
        let responses = client.watch(request_stream(receiver)).await.unwrap().into_inner();
        Self { requests, responses }
    }

    async fn ask(&self, request: RequestUnion) {
        let request = WatchRequest { request_union: Some(request) };
        self.requests.send(request).await.unwrap();
    }

    async fn create(&mut self, request: WatchCreateRequest) -> WatchResponse {
        self.ask(RequestUnion::CreateRequest(request)).await;
        let response = self.next().await;
        assert!(response.created);
        response
    }

    async fn next(&mut self) -> WatchResponse {
        let wait = tokio::time::timeout(Duration::from_secs(30), self.responses.message());
        wait.await.expect("a response").unwrap().unwrap()
    }

    async fn events(&mut self) -> WatchResponse {
        loop {
            let response = self.next().await;
            if !response.events.is_empty() {
                return response;
            }
        }
    }
}

fn watch(key: &str) -> WatchCreateRequest {
    WatchCreateRequest { key: bytes(key), ..WatchCreateRequest::default() }
}

#[tokio::test]
async fn http_paths_answer_as_in_etcd() {
    let node = ApiTestNode::start().await;
    node.put("k", "v").await;
    let version = r#"{"etcdserver":"3.6.0","etcdcluster":"3.6.0","storage":"3.6.0"}"#;
    let healthy = r#"{"health":"true","reason":""}"#;
    let ready = "[+]data_corruption ok\n[+]serializable_read ok\n[+]linearizable_read ok\n\
                 [+]non_learner ok\nok\n";
    let excluded = "[+]data_corruption ok\n[+]serializable_read ok\n[+]non_learner ok\nok\n";
    let table = [
        ("/version", version),
        ("/health", healthy),
        ("/health?serializable=true", healthy),
        ("/livez", "ok\n"),
        ("/livez?verbose", "[+]serializable_read ok\nok\n"),
        ("/livez/serializable_read", "ok\n"),
        ("/readyz", "ok\n"),
        ("/readyz?verbose", ready),
        ("/readyz?verbose&exclude=linearizable%5Fread&exclude=nosuch", excluded),
        ("/readyz/non_learner", "ok\n"),
    ];
    for (path, body) in table {
        assert_eq!(node.get(path).await, ("200 OK".to_owned(), body.to_owned()), "{path}");
    }
    for path in ["/nosuch", "/livez/nosuch", "/v2/keys"] {
        assert_eq!(node.get(path).await.0, "404 Not Found", "{path}");
    }
    for path in ["/health", "/livez", "/readyz/non_learner", "/version"] {
        for method in ["POST", "HEAD"] {
            assert_eq!(
                node.http(method, path).await.0,
                "405 Method Not Allowed",
                "{method} {path}"
            );
        }
    }
    assert_eq!(node.http("HEAD", "/metrics").await.0, "200 OK");
}

#[tokio::test]
async fn metrics_have_etcds_names() {
    let node = ApiTestNode::start().await;
    node.put("k", "v").await;
    code_and_text(node.kv().put(put("", "v")).await);
    let (status, body) = node.get("/metrics").await;
    assert_eq!(status, "200 OK");
    let put = r#"grpc_method="Put",grpc_service="etcdserverpb.KV",grpc_type="unary"} 1"#;
    for line in [
        "etcd_server_has_leader 1",
        "etcd_server_is_leader 1",
        "etcd_server_proposals_pending 0",
        "etcd_server_id{server_id=\"7\"} 1",
        "etcd_server_version{server_version=\"3.6.0\"} 1",
        "etcd_cluster_version{cluster_version=\"3.6\"} 1",
        &format!(r#"grpc_server_handled_total{{grpc_code="OK",{put}"#),
        &format!(r#"grpc_server_handled_total{{grpc_code="InvalidArgument",{put}"#),
    ] {
        assert!(body.lines().any(|found| found == line), "{line} in {body}");
    }
    for name in [
        "etcd_server_proposals_committed_total ",
        "etcd_server_proposals_applied_total ",
        "etcd_server_leader_changes_seen_total ",
        "etcd_mvcc_db_total_size_in_bytes ",
        "etcd_disk_wal_fsync_duration_seconds_sum ",
        "process_start_time_seconds ",
        "etcd_disk_wal_fsync_duration_seconds_count ",
        "etcd_disk_wal_fsync_duration_seconds_bucket{le=\"8.192\"} ",
        "etcd_disk_wal_fsync_duration_seconds_bucket{le=\"+Inf\"} ",
        "process_open_fds ",
        "process_max_fds ",
        "process_resident_memory_bytes ",
    ] {
        let line = body.lines().find_map(|line| line.strip_prefix(name));
        assert!(line.is_some_and(|value| value.parse::<f64>().unwrap() > 0.0), "{name}");
    }
    // The counter is of the whole process, so tests that run in parallel may have increased it.
    let dropped =
        body.lines().find_map(|line| line.strip_prefix("muster_log_lines_dropped_total "));
    assert!(dropped.is_some_and(|value| value.parse::<u64>().is_ok()), "{dropped:?}");
}

#[tokio::test]
async fn histograms_have_etcds_buckets() {
    let node = ApiTestNode::start().await;
    node.put("k", "v").await;
    let (_, body) = node.get("/metrics").await;
    let expected = [
        "0.001", "0.002", "0.004", "0.008", "0.016", "0.032", "0.064", "0.128", "0.256", "0.512",
        "1.024", "2.048", "4.096", "8.192", "+Inf",
    ];
    for name in ["wal_fsync", "backend_commit"] {
        let start = format!("etcd_disk_{name}_duration_seconds_bucket{{le=\"");
        let bounds: Vec<&str> =
            body.lines().filter_map(|line| line.strip_prefix(&start)?.split('"').next()).collect();
        assert_eq!(bounds, expected, "{name}");
    }
}

/// Returns the node's status from gRPC's health service.
async fn health(node: &ApiTestNode) -> i32 {
    use tonic_health::pb::HealthCheckRequest;
    use tonic_health::pb::health_client::HealthClient;
    let mut health = HealthClient::new(node.channel.clone());
    let check = health.check(HealthCheckRequest { service: String::new() }).await.unwrap();
    check.into_inner().status
}

#[tokio::test]
async fn grpc_health_serves_and_an_unknown_service_is_unimplemented() {
    let node = ApiTestNode::start().await;
    node.put("k", "v").await;
    assert_eq!(health(&node).await, 1);
    let mut grpc = tonic::client::Grpc::new(node.channel.clone());
    grpc.ready().await.unwrap();
    let codec = tonic_prost::ProstCodec::<StatusRequest, StatusRequest>::default();
    let path = http::uri::PathAndQuery::from_static("/nosuch.Service/Method");
    let answer = grpc.unary(tonic::Request::new(StatusRequest {}), path, codec).await;
    assert_eq!(
        code_and_text(answer),
        (Code::Unimplemented, "unknown service nosuch.Service".to_owned())
    );
}

#[tokio::test]
async fn writes_do_not_wake_a_task_that_waits_for_the_loss_of_the_leader() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let node = ApiTestNode::start().await;
    node.put("k", "v").await;
    let wakes = Arc::new(AtomicUsize::new(0));
    let (counter, leader) = (wakes.clone(), node.leader.clone());
    let mut lost = Box::pin(watch::wait_for_leader_loss(leader, Duration::from_secs(3)));
    let waiting = tokio::spawn(std::future::poll_fn(move |context| {
        counter.fetch_add(1, Ordering::Relaxed);
        lost.as_mut().poll(context)
    }));
    for _ in 0..50 {
        node.put("k", "v").await;
    }
    assert_eq!(wakes.load(Ordering::Relaxed), 1, "once, to begin with");
    assert!(!waiting.is_finished());
    waiting.abort();
}
