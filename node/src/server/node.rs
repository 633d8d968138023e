//! A running node: its parts, and how they are started and stopped.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use node_api::{
    clients::{self, ClientLimits, ClientListener, ServingThreads},
    http,
    rpc::{self, RequestIds},
};
use node_engine::{
    driver::{self, Handle, RunningDriver},
    tls::{ClientListenerTls, PeerTls},
    transport::{
        self, ListenAddress, LocalMember, PeerMembership, PeerRecord, Transport, TransportLimits,
        WitnessFile,
    },
};
use node_proto::command::{self, Operation};
use node_state::{
    apply::{KvStateMachine, Outcome},
    identity::{DataDir, MemberId, Tombstone},
    membership::{Censuses, ChangeRules, MemberAttributes, MemberTable, PeerUrl},
    mvcc::Store,
};
use ring::rand::{SecureRandom, SystemRandom};
use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    PeerMessageReceiver, PeerMessageSender, PeerReports, PermanentRefusal, ServerError,
    disk::{self, MemberStorage},
    health_only,
    removed_keys::refuse_removed,
};
use crate::config::{ClusterState, Config, ETCD_VERSION, ListenUrl};
use crate::logging::lines_dropped;

/// Time limit for finishing clients' requests after the stop began.
const DRAIN_CLIENTS: Duration = Duration::from_secs(2);
/// Time limit for closing log and store.
const DRAIN_DISK: Duration = Duration::from_secs(30);
/// Time limit for the graceful close of all peer streams.
const DRAIN_PEERS: Duration = Duration::from_secs(1);
/// Wait before another attempt to publish this member.
const PUBLISH_RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Time limit for one attempt to publish this member. A proposal is lost while there is no stream
/// to the leader yet, so it must be retried. The limit for clients' requests would be too long,
/// because it includes two election timeouts, which can have any length.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(7);
/// Maximum size of a peer frame in addition to one request: headers, and other entries of the
/// batch.
const FRAME_OVERHEAD: usize = 16 << 20;
/// Name of the file with the new addresses of peers that have moved, in the data directory. An
/// agent or an operator writes it: see [`transport::address_hints`].
const ADDRESS_HINTS_FILE: &str = "muster-peer-addresses";

/// A running node. Dropping this value stops the node at once; `stop` stops it gracefully.
pub(super) struct Node {
    local: LocalMember,
    dir: DataDir,
    handle: Handle<Outcome>,
    running: RunningDriver,
    transport: Transport,
    serving_threads: ServingThreads,
    peer_tls: Option<Arc<PeerTls>>,
    client_tls: Option<Arc<ClientListenerTls>>,
    permanent_refusal: watch::Receiver<Option<PermanentRefusal>>,
    members: watch::Receiver<Arc<MemberTable>>,
    ids: RequestIds,
    name: String,
    client_urls: Vec<String>,
    tasks: TaskTracker,
    stopping: CancellationToken,
}

impl Node {
    /// Starts all parts of the node. Call it within a tokio runtime, which then runs the tasks that
    /// all clients share. When it returns, every address is bound. Requests that need a leader wait
    /// or fail until there is one; other requests are served.
    ///
    /// # Errors
    /// Fails if anything is missing or damaged. After a failure no part of the node is left
    /// running.
    pub(super) async fn start(config: &Config) -> Result<Self, ServerError> {
        let (client_tls, peer_tls) = (client_tls(config)?, peer_tls(config)?);
        let sockets = bind_clients(config)?;
        let MemberStorage { dir, local, first_start, mut machine, store_file, log, recovered } =
            disk::open(config, peer_tls.as_ref()).await?;
        let request_ids = RequestIds::new(local.member.0, recovered.boot);
        machine.set_answer_filter(request_ids.own_id_test());
        log_starting(config, local, first_start, &machine);
        let (store, hub) = (machine.store(), machine.hub());
        check_record(&store, &local, peer_tls.as_deref());
        let (outbound, marks) = (Arc::new(PeerMessageSender::default()), open_marks(&dir)?);
        let options = driver_options(config, &recovered, &dir, first_start);
        let snapshot_dir = options.snapshot_dir.clone();
        let (boot, own_urls) = (recovered.boot, config.advertised_peers());
        let sender = Arc::clone(&outbound) as _;
        let parts =
            driver::MemberParts { options, machine, log, recovered, sender, seed: random() };
        let (handle, inbox, running) = driver::start(parts).map_err(ServerError::Driver)?;
        let (told, verdict, censuses) = PeerReports::channels();
        let inbound = PeerMessageReceiver::new(
            inbox.clone(),
            snapshot_dir,
            told,
            Arc::clone(&marks),
            own_urls,
        );
        let options = transport_options(config, local, peer_tls.clone(), marks, &dir);
        let transport = Transport::start(options, Arc::clone(&inbound) as _)?;
        outbound.connect(transport.clone(), inbox);
        let (tasks, stopping) = (TaskTracker::new(), CancellationToken::new());
        let (members, client_bytes) = (store.members(), Arc::default());
        let following = follow_members(store.members(), censuses, local, transport.clone());
        tasks.spawn(stopping.clone().run_until_cancelled_owned(following));
        let refusing = refuse_removed(store.members(), client_tls.clone());
        tasks.spawn(stopping.clone().run_until_cancelled_owned(refusing));
        let services = rpc::ApiParts {
            handle: handle.clone(),
            store,
            store_file,
            hub,
            identity: rpc_identity(&local),
            request_ids,
            limits: rpc_limits(config),
            peers: Some(transport.clone()),
            rules: rpc_rules(config),
            signed_tokens: config.signed_tokens.clone(),
            telemetry: telemetry(peer_tls.as_ref(), client_tls.as_ref(), &client_bytes),
        };
        let (grpc, context) = rpc::router(services, &tasks, &stopping);
        inbound.set_context(&context);
        let routes = routes(config, grpc, context);
        let fronts = start_fronts(config, sockets, client_tls.as_ref(), &routes, client_bytes)?;
        Ok(Self {
            local,
            dir,
            handle,
            running,
            transport,
            serving_threads: fronts,
            peer_tls,
            client_tls,
            permanent_refusal: verdict,
            members,
            // IDs of the node's own requests. They differ from those of clients' requests, because
            // no real boot counter is ever this high.
            ids: RequestIds::new(local.member.0, u64::MAX - boot),
            name: config.name.clone(),
            client_urls: config.advertised_clients(),
            tasks,
            stopping,
        })
    }

    /// Returns once the cluster has committed this member's name and client URLs. From then on this
    /// member serves all requests. Retries without a limit.
    pub(super) async fn wait_until_published(&self) {
        let mut tries = 0_u32;
        loop {
            let id = self.ids.next();
            let said = MemberAttributes {
                name: self.name.clone(),
                client_urls: self.client_urls.clone(),
                incarnation: Some(self.local.incarnation),
                node_key: self.peer_tls.as_ref().and_then(|tls| tls.node_key()),
            };
            let operation = Operation::PublishMember(said.encode(self.local.member));
            let payload = command::encode(id.0, command::member_caller(), operation);
            let proposed = self.handle.propose(payload, id);
            let error = match tokio::time::timeout(PUBLISH_TIMEOUT, proposed).await {
                Ok(Ok(Ok(_))) => return,
                Ok(Ok(Err(refused))) => refused.to_string(),
                Ok(Err(error)) => error.to_string(),
                Err(_) => "no answer in time".to_owned(),
            };
            tries += 1;
            tracing::warn!(
                error, tries, member.id = %self.local.member,
                "failed to publish local member to cluster through raft"
            );
            tokio::time::sleep(PUBLISH_RETRY_INTERVAL).await;
        }
    }

    /// Waits until this member has to stop for good. That is the case once one of these has
    /// happened:
    ///
    /// - The member has applied its own removal, and the other members don't need it any more.
    /// - An authenticated peer reports the removal.
    /// - So many peers refuse its data directory that no quorum is left.
    ///
    /// A removed member's tombstone is on disk when this returns.
    ///
    /// # Errors
    /// Always returns an error: `Removed`, `Disowned`, or the reason why the tombstone can't be
    /// written.
    pub(super) async fn wait_until_removed(&self) -> ServerError {
        let (mut verdict, mut members) = (self.permanent_refusal.clone(), self.members.clone());
        let (mut status, me) = (self.handle.status(), self.local.member);
        let left = async {
            members.wait_for(|table| table.is_removed(me)).await?;
            status.wait_for(|status| status.has_left).await.map(drop)
        };
        let by = tokio::select! {
            Ok(()) = left => "log".to_owned(),
            Ok(verdict) = verdict.wait_for(Option::is_some) => match *verdict {
                Some(PermanentRefusal::Removed(by)) => by.to_string(),
                Some(PermanentRefusal::Disowned(why)) => return ServerError::Disowned(why),
                None => unreachable!("there is one"),
            },
            // The store and the transport were dropped, since the node is stopping.
            else => return std::future::pending().await,
        };
        write_tombstone(&self.dir, &self.local, &by)
    }

    /// Reloads certificates, keys and CAs from their files.
    pub(super) fn reload(&self) {
        if let Some(tls) = &self.peer_tls {
            tls.reload();
        }
        if let Some(tls) = &self.client_tls {
            tls.reload();
        }
    }

    /// Returns this member's identity.
    #[must_use]
    pub(super) fn local(&self) -> LocalMember {
        self.local
    }

    /// Refuses requests that need the peers, because the peers accept nothing from this member any
    /// more.
    pub(super) fn leave(&self) {
        self.handle.leave();
    }

    /// Stops the node gracefully: transfers the leadership, finishes clients' requests, closes log
    /// and store, and closes the peer streams. Each step has a time limit. Acknowledged writes are
    /// durable already.
    pub(super) async fn stop(self) {
        let started = Instant::now();
        self.handle.hand_over().await;
        self.stopping.cancel();
        self.tasks.close();
        let Self { running, transport, serving_threads: fronts, dir, tasks, .. } = self;
        let closing = tokio::task::spawn_blocking(move || {
            fronts.stop(DRAIN_CLIENTS);
            running.stop();
            transport.stop(DRAIN_PEERS);
            // The data directory is dropped last, because this unlocks it for other processes.
            drop(dir);
        });
        if tokio::time::timeout(DRAIN_CLIENTS + DRAIN_PEERS + DRAIN_DISK, closing).await.is_err() {
            tracing::warn!("log and store did not close in time; the next start recovers them");
        }
        let _ = tokio::time::timeout(DRAIN_PEERS, tasks.wait()).await;
        let duration_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        tracing::info!(duration_ms, "stopped");
    }
}

/// Logs problems of this member's own record in the store, and lets the node go on.
///
/// - The record may have another key than this member's certificate. Then no peer accepts the
///   member, but a single-member cluster still serves clients. The operator may be about to put the
///   right certificate back.
/// - The member may have been removed, if the process ended before the tombstone was written.
///   Members that don't know of the removal may still need this one. A member that knows of the
///   removal will report it to this one.
fn check_record(store: &Store, local: &LocalMember, tls: Option<&PeerTls>) {
    let view = store.view();
    if view.members().is_removed(local.member) {
        tracing::warn!(
            "this member was removed, and ended before its tombstone was written: it goes on until a voting member says so, which may need it"
        );
    }
    let bound = view.members().member(local.member).and_then(|own| own.node_key);
    let own = tls.and_then(PeerTls::node_key);
    if let Some(bound) = bound.filter(|bound| own != Some(*bound)) {
        tracing::error!(
            bound.node_key = %bound, own.node_key = own.map(|own| own.to_string()),
            "no peer takes it for this member with the key of --peer-cert-file, which is not the one that the cluster has bound it to: put the certificate of that key back, or replace this member (member remove, then member add)"
        );
    }
}

/// Writes the tombstone. Returns `Removed`, or the error that prevented it.
fn write_tombstone(dir: &DataDir, local: &LocalMember, by: &str) -> ServerError {
    let now = jiff::Timestamp::now().to_string();
    let tombstone =
        Tombstone::new(local.incarnation, local.member, local.cluster, now, by.to_owned());
    match dir.write_tombstone(&tombstone) {
        Ok(()) => ServerError::Removed,
        Err(error) => error.into(),
    }
}

fn log_starting(config: &Config, local: LocalMember, first_start: bool, machine: &KvStateMachine) {
    use node_state::state_machine::StateMachine as _;
    let applied = machine.applied().index;
    tracing::info!(
        cluster.id = %local.cluster, member.id = %local.member, name = config.name,
        incarnation = %local.incarnation, boot = local.boot, first_start, applied, "starting member"
    );
}

pub(super) fn random() -> u64 {
    let mut bytes = [0; 8];
    SystemRandom::new().fill(&mut bytes).expect("the operating system gives random bytes");
    u64::from_le_bytes(bytes)
}

fn peer_tls(config: &Config) -> Result<Option<Arc<PeerTls>>, ServerError> {
    match &config.peer_tls {
        Some(files) => Ok(Some(Arc::new(PeerTls::new(files)?))),
        None => Ok(None),
    }
}

fn client_tls(config: &Config) -> Result<Option<Arc<ClientListenerTls>>, ServerError> {
    let alpn: [&[u8]; 2] = [b"h2", b"http/1.1"];
    match &config.client_tls {
        Some(files) => {
            Ok(Some(Arc::new(ClientListenerTls::new(files, &config.tls_policy, &alpn)?)))
        }
        None => Ok(None),
    }
}

/// Sockets of `--listen-client-urls`, `--listen-client-http-urls` and `--listen-metrics-urls`, each
/// with a flag that is true if its URL is https.
struct ClientSockets {
    clients: Vec<(std::net::TcpListener, bool)>,
    http: Vec<(std::net::TcpListener, bool)>,
    metrics: Vec<(std::net::TcpListener, bool)>,
}

fn bind_clients(config: &Config) -> Result<ClientSockets, ServerError> {
    let bind = |urls: &mut dyn Iterator<Item = &ListenUrl>| {
        urls.map(|url| {
            let address = url.address();
            clients::bind(address)
                .map(|socket| (socket, url.is_https()))
                .map_err(|source| ServerError::Listen { address, source })
        })
        .collect::<Result<Vec<_>, _>>()
    };
    Ok(ClientSockets {
        clients: bind(&mut config.listen_client_urls.iter())?,
        http: bind(&mut config.listen_client_http_urls.iter())?,
        metrics: bind(&mut config.listen_metrics_urls.iter())?,
    })
}

fn largest_request(config: &Config) -> usize {
    rpc::largest_message(config.max_request_bytes as usize)
}

fn routes(config: &Config, grpc: axum::Router, context: Arc<rpc::ApiContext>) -> http::Routes {
    let gateway = config.grpc_gateway.then(|| largest_request(config));
    let browsers =
        http::BrowserRules { origins: config.cors.clone(), hosts: config.host_whitelist.clone() };
    http::Routes::new(grpc, context, gateway, browsers)
}

fn start_fronts(
    config: &Config,
    sockets: ClientSockets,
    tls: Option<&Arc<ClientListenerTls>>,
    routes: &http::Routes,
    bytes: Arc<rpc::ClientBytes>,
) -> Result<ServingThreads, ServerError> {
    let listener = |(socket, https), router, direct| {
        let tls = bool::then(https, || {
            Arc::clone(tls.expect("https without a certificate is refused with the flags"))
        });
        ClientListener { socket, tls, router, direct }
    };
    let together = sockets.http.is_empty();
    let clients = |https| if together { routes.all(https) } else { routes.calls() };
    let mut listeners = Vec::new();
    for socket in sockets.clients {
        let router = clients(socket.1);
        listeners.push(listener(socket, router, Some(routes.direct_calls())));
    }
    for socket in sockets.http {
        let router = routes.pages(socket.1);
        listeners.push(listener(socket, router, None));
    }
    for socket in sockets.metrics {
        // The pages for metrics and health contain no data. So, as in etcd, they accept requests
        // for any host name.
        let router = health_only(routes.pages(true));
        listeners.push(listener(socket, router, None));
    }
    let limits = ClientLimits {
        max_concurrent_streams: config.max_concurrent_streams,
        keepalive_interval: config.keepalive_interval,
        keepalive_timeout: config.keepalive_timeout,
        largest_request: largest_request(config),
    };
    // At most half of the cores are used: the driver's threads need the others.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    ServingThreads::start((cores / 2).clamp(1, 2), &listeners, limits, bytes)
        .map_err(|source| ServerError::System { action: "start the fronts", source })
}

fn driver_options(
    config: &Config,
    recovered: &node_engine::log::RecoveredState,
    dir: &DataDir,
    first_start: bool,
) -> driver::MemberOptions {
    let seat_one = config.initial_cluster.first().is_some_and(|(name, _)| *name == config.name);
    let begins = first_start && config.initial_cluster_state == ClusterState::New;
    let ticks = config.election_timeout.as_millis() / config.heartbeat.as_millis().max(1);
    driver::MemberOptions {
        member: recovered.identity.member,
        tick: config.heartbeat,
        election_ticks: usize::try_from(ticks).unwrap_or(usize::MAX),
        request_timeout: Duration::from_secs(5) + config.election_timeout * 2,
        campaign_when_connected: begins && seat_one && config.hasten_first_election,
        hasten_first_election: config.hasten_first_election,
        snapshot_dir: dir.join("member/snap"),
        catch_up_entries: config.snapshot_catchup_entries,
    }
}

fn telemetry(
    peer_tls: Option<&Arc<PeerTls>>,
    client_tls: Option<&Arc<ClientListenerTls>>,
    client_bytes: &Arc<rpc::ClientBytes>,
) -> rpc::Telemetry {
    rpc::Telemetry {
        log_lines_dropped: Some(lines_dropped),
        peer_tls: peer_tls.cloned(),
        client_tls: client_tls.cloned(),
        client_bytes: Arc::clone(client_bytes),
    }
}

fn rpc_identity(local: &LocalMember) -> rpc::ServerIdentity {
    rpc::ServerIdentity {
        cluster_id: local.cluster.0,
        member_id: local.member.0,
        version: ETCD_VERSION,
    }
}

fn rpc_rules(config: &Config) -> ChangeRules {
    ChangeRules::new(config.strict_reconfig_check, config.max_learners)
}

fn rpc_limits(config: &Config) -> rpc::ApiLimits {
    rpc::ApiLimits {
        max_request_bytes: config.max_request_bytes as usize,
        max_txn_ops: config.max_txn_ops as usize,
        election_timeout: config.election_timeout,
        min_lease_ttl: min_lease_ttl(config),
        bcrypt_cost: config.bcrypt_cost,
        auth_token_ttl: config.auth_token_ttl,
        watch_progress_interval: config.watch_progress_interval,
        compaction_pause: config.compaction_sleep,
        quota: rpc::Quota(config.quota_backend_bytes),
        auto_compaction: config.auto_compaction,
        corrupt_check: match config.corrupt_check_interval {
            Duration::ZERO => rpc::COMPARE_EVERY,
            every => every,
        },
        ..rpc::ApiLimits::default()
    }
}

/// Returns the minimum lease TTL in seconds, as etcd does (`NewServer`): one and a half election
/// timeouts, in whole ticks, rounded up to whole seconds.
fn min_lease_ttl(config: &Config) -> i64 {
    let ticks = config.election_timeout.as_millis() / config.heartbeat.as_millis().max(1);
    let millis = 3 * ticks / 2 * config.heartbeat.as_millis();
    i64::try_from(millis.div_ceil(1_000)).unwrap_or(i64::MAX).max(1)
}

fn transport_options(
    config: &Config,
    local: LocalMember,
    tls: Option<Arc<PeerTls>>,
    marks: Arc<WitnessFile>,
    dir: &DataDir,
) -> transport::TransportOptions {
    let listen = config
        .listen_peer_urls
        .iter()
        .map(|url| ListenAddress { address: url.address(), tls: url.is_https() })
        .collect();
    let limits = TransportLimits {
        frame_bytes: driver::MAX_PROPOSAL_BYTES + FRAME_OVERHEAD,
        ..TransportLimits::default()
    };
    let address_hints = Some(dir.join(ADDRESS_HINTS_FILE));
    transport::TransportOptions { local, listen, tls, witness_file: marks, address_hints, limits }
}

/// Opens the file that records the votes and acknowledgements of the other members.
fn open_marks(dir: &DataDir) -> Result<Arc<WitnessFile>, ServerError> {
    let path = dir.join("member/peers");
    let marks = WitnessFile::open(&path).map_err(|source| ServerError::Marks { path, source })?;
    Ok(Arc::new(marks))
}

/// Passes the current members to the transport, for as long as the node runs.
async fn follow_members(
    mut members: watch::Receiver<Arc<MemberTable>>,
    mut censuses: watch::Receiver<Censuses>,
    local: LocalMember,
    transport: Transport,
) {
    let mut before = None;
    loop {
        let now = membership(&members.borrow_and_update(), &censuses.borrow_and_update(), &local);
        for id in now.reported_by_others.iter().filter(|id| !is_among(before.as_ref(), **id)) {
            tracing::info!(peer.member.id = %id, "peers report a member that is not in this member's table");
        }
        transport.set_membership(now.clone());
        before = Some(now);
        let changed = tokio::select! {
            changed = members.changed() => changed,
            changed = censuses.changed() => changed,
        };
        if changed.is_err() {
            return;
        }
    }
}

fn is_among(membership: Option<&PeerMembership>, id: MemberId) -> bool {
    membership.is_some_and(|known| known.peers.iter().any(|peer| peer.id == id))
}

/// Returns the other members for the transport. Some are in the store, some are known only from
/// peers' member lists, and some were removed.
fn membership(table: &MemberTable, censuses: &Censuses, local: &LocalMember) -> PeerMembership {
    let neighbours = censuses.neighbours(table, local.member);
    let told = neighbours.iter().filter(|one| one.is_from_census).map(|one| one.id).collect();
    let peers = neighbours.into_iter().map(|one| PeerRecord {
        id: one.id,
        urls: one.urls.iter().filter_map(|url| PeerUrl::parse(url).ok()).collect(),
        incarnation: one.incarnation,
        node_key: one.node_key,
    });
    let removed = table.removed().map(|(id, _)| id).collect();
    PeerMembership {
        peers: peers.collect(),
        reported_by_others: told,
        removed,
        removed_keys: table.removed_keys(),
    }
}
