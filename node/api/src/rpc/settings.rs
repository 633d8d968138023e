//! Settings and identity of the API, which the node passes at its start.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use node_engine::tls::{ClientListenerTls, PeerTls};

use super::auto_compaction::AutoCompaction;
use super::corruption::COMPARISON_INTERVAL;
use super::quota::Quota;

/// Identity of the answering member.
#[derive(Clone, Debug)]
pub struct ServerIdentity {
    pub cluster_id: u64,
    /// ID of this member.
    pub member_id: u64,
    /// Release of etcd that this node presents itself as, such as `3.6.0`.
    pub version: &'static str,
}

/// Limits and settings of the API.
#[derive(Clone, Debug)]
pub struct ApiLimits {
    /// Maximum size of a request: `--max-request-bytes`.
    pub max_request_bytes: usize,
    /// Maximum number of operations in a transaction: `--max-txn-ops`.
    pub max_txn_ops: usize,
    /// `--election-timeout`. A stream that requires a leader ends after three such timeouts without
    /// a leader.
    pub election_timeout: Duration,
    /// Minimum TTL of a lease, in seconds. A smaller requested TTL is raised to it.
    pub min_lease_ttl: i64,
    /// Interval of progress notifications: `--watch-progress-notify-interval`.
    pub watch_progress_interval: Duration,
    /// Pause between two steps of a compaction: `--compaction-sleep-interval`.
    pub compaction_pause: Duration,
    /// Maximum time that a client may stall while it reads a snapshot.
    pub snapshot_stall_timeout: Duration,
    /// Quota of the store's size: `--quota-backend-bytes`.
    pub quota: Quota,
    /// Interval of comparisons of the members' data: `--corrupt-check-time`.
    pub corrupt_check: Duration,
    /// Rule of automatic compactions.
    pub auto_compaction: AutoCompaction,
    /// Cost of password hashes: `--bcrypt-cost`.
    pub bcrypt_cost: u32,
    /// Time after its last use at which a simple token expires: `--auth-token-ttl`.
    pub auth_token_ttl: Duration,
}

impl Default for ApiLimits {
    fn default() -> Self {
        Self {
            max_request_bytes: 1536 * 1024,
            max_txn_ops: 128,
            election_timeout: Duration::from_secs(1),
            min_lease_ttl: 2,
            watch_progress_interval: Duration::from_secs(600),
            compaction_pause: Duration::from_millis(10),
            snapshot_stall_timeout: Duration::from_secs(30),
            quota: Quota::default(),
            corrupt_check: COMPARISON_INTERVAL,
            auto_compaction: AutoCompaction::Never,
            bcrypt_cost: 10,
            auth_token_ttl: Duration::from_secs(300),
        }
    }
}

/// Numbers of bytes in gRPC messages, with their frames, since the process began.
#[derive(Debug, Default)]
pub struct ClientBytes {
    pub received: AtomicU64,
    pub sent: AtomicU64,
}

/// Sources of metrics that the API uses for `/metrics` alone.
#[derive(Clone, Default)]
pub struct Telemetry {
    /// TLS settings for peers, with this member's certificate.
    pub peer_tls: Option<Arc<PeerTls>>,
    /// TLS settings for clients, with this member's certificate.
    pub client_tls: Option<Arc<ClientListenerTls>>,
    /// Bytes received from gRPC clients and sent to them.
    pub client_bytes: Arc<ClientBytes>,
    /// Function that returns the number of lines that the process's log has dropped; `None` without
    /// a log.
    pub log_lines_dropped: Option<fn() -> u64>,
}
