//! etcd's v3 API over gRPC, and the HTTP paths on the same port.
//!
//! A method validates its request, calls a handle, and converts the answer:
//!
//! - A change goes through consensus.
//! - A linearizable read uses a read barrier, then the store.
//! - A serializable read uses the store alone.
//!
//! Unsupported methods return gRPC `Unimplemented`.

mod access;
mod auth;
mod auto_compaction;
mod blocking;
mod cluster;
mod codec;
mod context;
mod corruption;
mod deadline;
mod election;
mod error;
mod kv;
mod lease;
mod lease_clock;
mod lease_questions;
mod lock;
mod lock_queue;
mod maintenance;
mod member_requests;
mod metrics;
mod passwords;
mod proposal;
mod quota;
mod range_stream;
mod reconfigure;
mod reflection;
mod request_ids;
mod required_access;
mod settings;
mod snapshot;
mod space_guard;
mod status_texts;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use node_proto::etcdserverpb as pb;
use node_proto::v3electionpb::election_server::ElectionServer;
use node_proto::v3lockpb::lock_server::LockServer;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::service::Routes;

pub(crate) use access::CertificateUser;
pub use auto_compaction::AutoCompaction;
pub(crate) use blocking::run_blocking;
pub use context::ApiContext;
pub(crate) use context::answer_share;
pub use corruption::COMPARISON_INTERVAL as COMPARE_EVERY;
pub(crate) use deadline::{Deadline, MalformedTimeout, deadline_exceeded};
pub(crate) use error::Error;
pub use kv::DirectKv;
pub(crate) use kv::{DirectRequest, MESSAGE_HEADER_BYTES};
pub(crate) use lease::KEEP_ALIVE_PATH;
pub use member_requests::answer_member;
pub use metrics::ApiMetrics;
pub(crate) use metrics::Method;
use node_engine::driver::Handle;
use node_engine::transport::Transport;
use node_state::apply::Outcome;
use node_state::auth::Jwt;
use node_state::membership::ChangeRules;
use node_state::mvcc::watch::WatchHub;
use node_state::mvcc::{CompactionProgress, Store, StoreFile};
pub use quota::Quota;
pub use request_ids::RequestIds;
pub use settings::{ApiLimits, ClientBytes, ServerIdentity, Telemetry};
pub(crate) use status_texts::larger_than_max;
pub(crate) use watch::PATH as WATCH_PATH;

use self::lease_clock::LeaseClock;

/// Bytes that a gRPC message may have in addition to a request of the largest size.
const GRPC_OVERHEAD_BYTES: usize = 512 * 1024;

/// Parts from which the API is built.
pub struct ApiParts {
    /// Handle for proposals and read barriers.
    pub handle: Handle<Outcome>,
    /// Store that serves all reads.
    pub store: Store,
    /// Location of the store's file.
    pub store_file: StoreFile,
    /// Hub where watch streams subscribe.
    pub hub: WatchHub,
    /// Identity of the answering member.
    pub identity: ServerIdentity,
    /// Generator of request IDs.
    pub request_ids: RequestIds,
    /// Limits and settings of the API.
    pub limits: ApiLimits,
    /// Connections to the other members; `None` if there can't be any.
    pub peers: Option<Transport>,
    /// Rules by which changes of members are judged.
    pub rules: ChangeRules,
    /// Key that signs tokens; `None` if tokens are simple ones.
    pub signed_tokens: Option<Arc<Jwt>>,
    /// Further sources of metrics for `/metrics`.
    pub telemetry: Telemetry,
}

/// Makes a router for all gRPC services, distinguished by path, and the context that they share.
/// Starts their background tasks on `tasks`. Cancelling `stop` ends these tasks and the open
/// watches.
///
/// Call it once, within a tokio runtime.
pub fn router(
    services: ApiParts,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> (axum::Router, Arc<ApiContext>) {
    let ApiParts {
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
    let access = access::Authoriser::new(store.clone(), limits.auth_token_ttl, signed_tokens);
    let context = Arc::new(ApiContext {
        clock: LeaseClock::new(limits.election_timeout, handle.status(), store.clone()),
        access: Arc::new(access),
        status: handle.status(),
        leader: handle.leader(),
        disk_low: handle.short_of_space(),
        handle,
        members: store.members(),
        alarms: store.alarms(),
        comparison_permit: Arc::new(Semaphore::new(1)),
        hash_permits: Arc::new(Semaphore::new(maintenance::MAX_CONCURRENT_HASHES)),
        store,
        store_file,
        hub,
        peers,
        rules,
        change_lock: tokio::sync::Mutex::default(),
        nospace_claim: quota::NospaceClaim::default(),
        identity,
        request_ids,
        limits,
        metrics: ApiMetrics::default(),
        telemetry,
        stop: stop.clone(),
    });
    spawn_tasks(&context, health, tasks);

    let max = largest_message(context.limits.max_request_bytes);
    let kv = pb::kv_server::KvServer::new(kv::KvService(context.clone()));
    let cluster = pb::cluster_server::ClusterServer::new(cluster::ClusterService(context.clone()));
    let maintenance = pb::maintenance_server::MaintenanceServer::new(
        maintenance::MaintenanceService::new(context.clone()),
    );
    let leases = lease::LeaseService::new(context.clone(), tasks);
    let line = lock_queue::LockQueues::new(context.clone(), leases.clone(), tasks.clone());
    let lease = pb::lease_server::LeaseServer::new(leases);
    let lock = LockServer::new(lock::LockService(line.clone()));
    let election = ElectionServer::new(election::ElectionService(line));
    let auth = pb::auth_server::AuthServer::new(auth::AuthService::new(context.clone()));
    let routes = Routes::new(kv.max_decoding_message_size(max))
        .add_service(watch::WatchService::new(context.clone(), max))
        .add_service(cluster.max_decoding_message_size(max))
        .add_service(maintenance.max_decoding_message_size(max))
        .add_service(lease.max_decoding_message_size(max))
        .add_service(auth.max_decoding_message_size(max))
        .add_service(lock.max_decoding_message_size(max))
        .add_service(election.max_decoding_message_size(max))
        .add_service(health_service);
    // tonic's fallback answers an unknown path with a gRPC status. Without it, the answer is HTTP's
    // 404.
    let grpc = reflection::add(routes).prepare().into_axum_router().reset_fallback();
    (status_texts::layer(grpc, max), context)
}

/// Returns the maximum size of a gRPC message if requests may have `max_request_bytes`.
#[must_use]
pub fn largest_message(max_request_bytes: usize) -> usize {
    max_request_bytes + GRPC_OVERHEAD_BYTES
}

fn spawn_tasks(
    context: &Arc<ApiContext>,
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
    until_stop(Box::pin(space_guard::run_space_guard(context.clone())));
    until_stop(Box::pin(reconfigure::promote_when_ready(context.clone())));
    until_stop(Box::pin(lease_questions::run_lease_clock(context.clone())));
    until_stop(Box::pin(corruption::run_comparisons(context.clone())));
    until_stop(Box::pin(auto_compaction::run(context.clone())));
    until_stop(Box::pin(access::expire_tokens(context.access.clone())));
    until_stop(Box::pin(report_health(context.clone(), health)));
}

/// Sets gRPC's health status to SERVING once this member first knows a leader. etcd's supervisors
/// and load balancers wait for that. The status is NOT_SERVING while this member's data is known to
/// be corrupt.
async fn report_health(context: Arc<ApiContext>, health: tonic_health::server::HealthReporter) {
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

/// Deletes the revisions that compactions make unreachable. Works in steps, so that writes continue
/// meanwhile.
async fn compact(store: Store, pause: Duration) {
    loop {
        let piece = store.clone();
        match tokio::task::spawn_blocking(move || piece.compact_step()).await {
            Ok(Ok(CompactionProgress::More)) => tokio::time::sleep(pause).await,
            Ok(Ok(CompactionProgress::Idle)) => store.wait_for_compaction_request().await,
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
