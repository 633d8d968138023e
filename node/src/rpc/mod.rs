//! etcd's v3 API over gRPC, and the HTTP paths beside it on the same port.
//!
//! A method validates its request, calls a handle, and converts the answer: consensus for what
//! changes anything, a read barrier and the store for linearizable reads, the store alone for
//! serializable ones. What this node does not serve yet answers gRPC `Unimplemented`.

mod access;
mod apart;
mod ask;
mod auth;
mod auto_compaction;
mod cluster;
mod codec;
mod context;
mod corruption;
mod deadline;
mod election;
mod error;
mod ids;
mod kv;
mod lease;
mod leases;
mod limit;
mod line;
mod lock;
mod maintenance;
mod metrics;
mod passwords;
mod proposal;
mod range_stream;
mod reconfigure;
mod reflection;
mod snapshot;
mod space;
mod watch;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use node_proto::etcdserverpb as pb;
use node_proto::v3electionpb::election_server::ElectionServer;
use node_proto::v3lockpb::lock_server::LockServer;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::service::Routes;

pub(crate) use access::ClientName;
pub(crate) use apart::apart;
pub(crate) use context::Context;
pub(crate) use corruption::EVERY as COMPARE_EVERY;
pub(crate) use deadline::{Deadline, Malformed, late};
pub(crate) use error::Error;
pub(crate) use ids::RequestIds;
pub(crate) use lease::KEEP_ALIVE_PATH;
pub(crate) use limit::larger_than_max;
pub(crate) use metrics::{Method, Metrics};
pub(crate) use space::Quota;
pub(crate) use watch::PATH as WATCH_PATH;

use self::leases::LeaseClock;
use crate::apply::Outcome;
use crate::auth::Jwt;
use crate::config::AutoCompaction;
use crate::driver::Handle;
use crate::membership::Rules;
use crate::mvcc::watch::WatchHub;
use crate::mvcc::{CompactionProgress, Store, StoreFile};
use crate::tls::{ClientListenerTls, PeerTls};
use crate::transport::Transport;

/// What gRPC adds to a request of the largest size.
const GRPC_OVERHEAD_BYTES: usize = 512 * 1024;

/// Who answers.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    /// The cluster.
    pub cluster_id: u64,
    /// This member.
    pub member_id: u64,
    /// The etcd release that this node claims to be, as `3.6.0`.
    pub version: &'static str,
}

/// What requests may ask for.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    /// `--max-request-bytes`.
    pub max_request_bytes: usize,
    /// `--max-txn-ops`.
    pub max_txn_ops: usize,
    /// `--election-timeout`: a stream that asked for a leader ends after three without one.
    pub election_timeout: Duration,
    /// No lease is granted for less, in seconds.
    pub min_lease_ttl: i64,
    /// `--watch-progress-notify-interval`.
    pub watch_progress_interval: Duration,
    /// `--compaction-sleep-interval`: between two pieces of a compaction.
    pub compaction_pause: Duration,
    /// So long a client may take nothing of a snapshot.
    pub snapshot_patience: Duration,
    /// `--quota-backend-bytes`.
    pub quota: Quota,
    /// From one comparison of the members' data to the next: `--corrupt-check-time`.
    pub corrupt_check: Duration,
    /// Compactions that nobody asks for.
    pub auto_compaction: AutoCompaction,
    /// `--bcrypt-cost`.
    pub bcrypt_cost: u32,
    /// `--auth-token-ttl`: so long after its last use a token proves nothing any more.
    pub auth_token_ttl: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_request_bytes: 1536 * 1024,
            max_txn_ops: 128,
            election_timeout: Duration::from_secs(1),
            min_lease_ttl: 2,
            watch_progress_interval: Duration::from_secs(600),
            compaction_pause: Duration::from_millis(10),
            snapshot_patience: Duration::from_secs(30),
            quota: Quota::default(),
            corrupt_check: COMPARE_EVERY,
            auto_compaction: AutoCompaction::Never,
            bcrypt_cost: 10,
            auth_token_ttl: Duration::from_secs(300),
        }
    }
}

/// Everything that the API is made of.
pub(crate) struct Services {
    /// Consensus.
    pub handle: Handle<Outcome>,
    /// Reads.
    pub store: Store,
    /// Where that lies.
    pub store_file: StoreFile,
    /// Watches.
    pub hub: WatchHub,
    /// Who answers.
    pub identity: Identity,
    /// Names for requests.
    pub request_ids: RequestIds,
    /// What requests may ask for.
    pub limits: Limits,
    /// The other members; `None` where there can be none.
    pub peers: Option<Transport>,
    /// How changes of members are judged.
    pub rules: Rules,
    /// What signs tokens; `None`: they are simple ones.
    pub signed_tokens: Option<Arc<Jwt>>,
    /// What `/metrics` tells beside all that.
    pub telemetry: Telemetry,
}

/// Bytes of gRPC messages, frames included, since the process began.
#[derive(Debug, Default)]
pub(crate) struct ClientBytes {
    pub received: AtomicU64,
    pub sent: AtomicU64,
}

/// Sources of metrics that the API itself doesn't need.
#[derive(Clone, Default)]
pub(crate) struct Telemetry {
    /// This member's certificate towards peers.
    pub peer_tls: Option<Arc<PeerTls>>,
    /// This member's certificate towards clients.
    pub client_tls: Option<Arc<ClientListenerTls>>,
    /// What gRPC clients sent and were sent.
    pub client_bytes: Arc<ClientBytes>,
}

/// The gRPC services in one router, told apart by path, and what they share. Starts the tasks that
/// they need on `tasks`; these end when `stop` is cancelled, and so do open watches.
///
/// Call it within a tokio runtime, once.
pub(crate) fn router(
    services: Services,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> (axum::Router, Arc<Context>) {
    let Services {
        handle,
        store,
        store_file,
        hub,
        identity,
        request_ids,
        limits,
        peers,
        rules,
        signed_tokens,
        telemetry,
    } = services;
    let (health, health_service) = tonic_health::server::health_reporter();
    let context = Arc::new(Context {
        status: handle.status(),
        leader: handle.leader(),
        space: handle.short_of_space(),
        handle,
        members: store.members(),
        alarms: store.alarms(),
        comparing: Arc::new(Semaphore::new(1)),
        hashing: Arc::new(Semaphore::new(maintenance::HASHES)),
        store,
        store_file,
        hub,
        peers,
        rules,
        changing: tokio::sync::Mutex::default(),
        claim: space::Claim::default(),
        clock: LeaseClock::new(limits.election_timeout),
        token_clock: access::TokenClock::new(limits.auth_token_ttl),
        signed_tokens,
        identity,
        request_ids,
        limits,
        metrics: Metrics::default(),
        telemetry,
        stop: stop.clone(),
    });
    spawn_tasks(&context, health, tasks);

    let max = largest_message(context.limits.max_request_bytes);
    let kv = pb::kv_server::KvServer::new(kv::Kv(context.clone()));
    let cluster = pb::cluster_server::ClusterServer::new(cluster::Cluster(context.clone()));
    let maintenance = pb::maintenance_server::MaintenanceServer::new(
        maintenance::Maintenance::new(context.clone()),
    );
    let leases = lease::Lease::new(context.clone(), tasks);
    let line = line::Line::new(context.clone(), leases.clone(), tasks.clone());
    let lease = pb::lease_server::LeaseServer::new(leases);
    let lock = LockServer::new(lock::Lock(line.clone()));
    let election = ElectionServer::new(election::Election(line));
    let auth = pb::auth_server::AuthServer::new(auth::Auth::new(context.clone()));
    let routes = Routes::new(kv.max_decoding_message_size(max))
        .add_service(watch::WatchService::new(context.clone(), max))
        .add_service(cluster.max_decoding_message_size(max))
        .add_service(maintenance.max_decoding_message_size(max))
        .add_service(lease.max_decoding_message_size(max))
        .add_service(auth.max_decoding_message_size(max))
        .add_service(lock.max_decoding_message_size(max))
        .add_service(election.max_decoding_message_size(max))
        .add_service(health_service);
    // Without a fallback of its own: a path that is no method answers as an HTTP server does.
    let grpc = reflection::add(routes).prepare().into_axum_router().reset_fallback();
    (limit::layer(grpc, max), context)
}

/// What a message may take, if requests may take `max_request_bytes`.
#[must_use]
pub(crate) fn largest_message(max_request_bytes: usize) -> usize {
    max_request_bytes + GRPC_OVERHEAD_BYTES
}

fn spawn_tasks(
    context: &Arc<Context>,
    health: tonic_health::server::HealthReporter,
    tasks: &TaskTracker,
) {
    let until_stop = |task: std::pin::Pin<Box<dyn Future<Output = ()> + Send>>| {
        let stop = context.stop.clone();
        tasks.spawn(async move {
            tokio::select! {
                () = task => {}
                () = stop.cancelled() => {}
            }
        });
    };
    until_stop(Box::pin(context.hub.clone().run()));
    until_stop(Box::pin(compact(context.store.clone(), context.limits.compaction_pause)));
    until_stop(Box::pin(space::guard(context.clone())));
    until_stop(Box::pin(reconfigure::promote_when_ready(context.clone())));
    until_stop(Box::pin(leases::count(context.clone())));
    until_stop(Box::pin(corruption::guard(context.clone())));
    until_stop(Box::pin(auto_compaction::run(context.clone())));
    until_stop(Box::pin(access::expire_tokens(context.clone())));
    until_stop(Box::pin(tell_health(context.clone(), health)));
}

/// gRPC health is SERVING from when this member first knows a leader: what etcd's supervisors and
/// load balancers wait for. It ends while its data was found to be wrong.
async fn tell_health(context: Arc<Context>, health: tonic_health::server::HealthReporter) {
    use tonic_health::ServingStatus;
    health.set_service_status("", ServingStatus::NotServing).await;
    let mut leader = context.leader.clone();
    if leader.wait_for(|leader| *leader != 0).await.is_err() {
        return;
    }
    let mut alarms = context.alarms.clone();
    loop {
        let status = match context.is_corrupt() {
            true => ServingStatus::NotServing,
            false => ServingStatus::Serving,
        };
        health.set_service_status("", status).await;
        if alarms.changed().await.is_err() {
            return;
        }
    }
}

/// Takes away what compactions leave, piece by piece, so that writes go on meanwhile.
async fn compact(store: Store, pause: Duration) {
    loop {
        let piece = store.clone();
        match tokio::task::spawn_blocking(move || piece.compact_step()).await {
            Ok(Ok(CompactionProgress::More)) => tokio::time::sleep(pause).await,
            Ok(Ok(CompactionProgress::Idle)) => store.compaction_wanted().await,
            Ok(Err(error)) => {
                let error = &error as &dyn std::error::Error;
                tracing::error!(error, "compaction failed; it goes on at the next start");
                return;
            }
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests;
