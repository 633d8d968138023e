//! Counters of gRPC calls, by method and code.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::Instant;

use tonic::{Code, Status};

use node_state::durations::Durations;

macro_rules! methods {
    ($($name:ident = $service:literal, $method:literal, $kind:literal;)*) => {
        /// Method whose calls are counted.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Method {
            $(#[doc = concat!("`", $service, "/", $method, "`")] $name,)*
        }

        impl Method {
            /// All methods, in the order of the counters.
            pub(crate) const ALL: &[Self] = &[$(Self::$name),*];

            /// Returns the labels of the method's metrics: service, method, type.
            #[must_use]
            pub(crate) fn labels(self) -> (&'static str, &'static str, &'static str) {
                match self { $(Self::$name => ($service, $method, $kind),)* }
            }
        }
    };
}

methods! {
    Range = "etcdserverpb.KV", "Range", "unary";
    RangeStream = "etcdserverpb.KV", "RangeStream", "server_stream";
    Put = "etcdserverpb.KV", "Put", "unary";
    DeleteRange = "etcdserverpb.KV", "DeleteRange", "unary";
    Txn = "etcdserverpb.KV", "Txn", "unary";
    Compact = "etcdserverpb.KV", "Compact", "unary";
    Watch = "etcdserverpb.Watch", "Watch", "bidi_stream";
    LeaseGrant = "etcdserverpb.Lease", "LeaseGrant", "unary";
    LeaseRevoke = "etcdserverpb.Lease", "LeaseRevoke", "unary";
    LeaseKeepAlive = "etcdserverpb.Lease", "LeaseKeepAlive", "bidi_stream";
    LeaseTimeToLive = "etcdserverpb.Lease", "LeaseTimeToLive", "unary";
    LeaseLeases = "etcdserverpb.Lease", "LeaseLeases", "unary";
    MemberAdd = "etcdserverpb.Cluster", "MemberAdd", "unary";
    MemberRemove = "etcdserverpb.Cluster", "MemberRemove", "unary";
    MemberUpdate = "etcdserverpb.Cluster", "MemberUpdate", "unary";
    MemberPromote = "etcdserverpb.Cluster", "MemberPromote", "unary";
    MemberList = "etcdserverpb.Cluster", "MemberList", "unary";
    Status = "etcdserverpb.Maintenance", "Status", "unary";
    Alarm = "etcdserverpb.Maintenance", "Alarm", "unary";
    Defragment = "etcdserverpb.Maintenance", "Defragment", "unary";
    Hash = "etcdserverpb.Maintenance", "Hash", "unary";
    HashKv = "etcdserverpb.Maintenance", "HashKV", "unary";
    Snapshot = "etcdserverpb.Maintenance", "Snapshot", "server_stream";
    MoveLeader = "etcdserverpb.Maintenance", "MoveLeader", "unary";
    Downgrade = "etcdserverpb.Maintenance", "Downgrade", "unary";
    Lock = "v3lockpb.Lock", "Lock", "unary";
    Unlock = "v3lockpb.Lock", "Unlock", "unary";
    Campaign = "v3electionpb.Election", "Campaign", "unary";
    Proclaim = "v3electionpb.Election", "Proclaim", "unary";
    Leader = "v3electionpb.Election", "Leader", "unary";
    Observe = "v3electionpb.Election", "Observe", "server_stream";
    Resign = "v3electionpb.Election", "Resign", "unary";
    AuthEnable = "etcdserverpb.Auth", "AuthEnable", "unary";
    AuthDisable = "etcdserverpb.Auth", "AuthDisable", "unary";
    AuthStatus = "etcdserverpb.Auth", "AuthStatus", "unary";
    Authenticate = "etcdserverpb.Auth", "Authenticate", "unary";
    UserAdd = "etcdserverpb.Auth", "UserAdd", "unary";
    UserGet = "etcdserverpb.Auth", "UserGet", "unary";
    UserList = "etcdserverpb.Auth", "UserList", "unary";
    UserDelete = "etcdserverpb.Auth", "UserDelete", "unary";
    UserChangePassword = "etcdserverpb.Auth", "UserChangePassword", "unary";
    UserGrantRole = "etcdserverpb.Auth", "UserGrantRole", "unary";
    UserRevokeRole = "etcdserverpb.Auth", "UserRevokeRole", "unary";
    RoleAdd = "etcdserverpb.Auth", "RoleAdd", "unary";
    RoleGet = "etcdserverpb.Auth", "RoleGet", "unary";
    RoleList = "etcdserverpb.Auth", "RoleList", "unary";
    RoleDelete = "etcdserverpb.Auth", "RoleDelete", "unary";
    RoleGrantPermission = "etcdserverpb.Auth", "RoleGrantPermission", "unary";
    RoleRevokePermission = "etcdserverpb.Auth", "RoleRevokePermission", "unary";
}

/// Number of gRPC codes, which begin at 0.
const CODES: usize = 17;

/// Counters of one method.
#[derive(Debug)]
pub(crate) struct MethodMetrics {
    /// Number of calls that began.
    pub started: AtomicU64,
    /// Number of calls that ended, by code.
    pub handled: [AtomicU64; CODES],
    /// Duration of each call.
    pub took: Durations,
    /// Durations of failed calls, then of successful ones.
    pub outcomes: [Durations; 2],
    /// Number of messages received on streams.
    streamed_in: AtomicU64,
    /// Number of messages sent on streams.
    streamed_out: AtomicU64,
}

impl MethodMetrics {
    fn new() -> Self {
        let (started, handled) = (AtomicU64::new(0), Default::default());
        Self {
            started,
            handled,
            took: Durations::of_calls(),
            outcomes: [Durations::of_requests(), Durations::of_requests()],
            streamed_in: AtomicU64::new(0),
            streamed_out: AtomicU64::new(0),
        }
    }

    /// Counts messages received on a stream.
    pub(crate) fn count_in(&self, messages: u64) {
        self.streamed_in.fetch_add(messages, Ordering::Relaxed);
    }

    /// Counts messages sent on a stream.
    pub(crate) fn count_out(&self, messages: u64) {
        self.streamed_out.fetch_add(messages, Ordering::Relaxed);
    }

    /// Returns the numbers of received and sent messages. A unary call receives one message, and
    /// sends one if it succeeds.
    pub(crate) fn messages(&self, method: Method) -> (u64, u64) {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let answered = load(&self.handled[Code::Ok as usize]);
        match method.labels().2 {
            "unary" => (load(&self.started), answered),
            "server_stream" => (load(&self.started), load(&self.streamed_out)),
            _ => (load(&self.streamed_in), load(&self.streamed_out)),
        }
    }

    /// Counts the start of a call. The returned time must be passed to [`Self::end`].
    pub(crate) fn begin(&self) -> Instant {
        self.started.fetch_add(1, Ordering::Relaxed);
        Instant::now()
    }

    /// Counts the end of a call that began at `began`.
    pub(crate) fn end(&self, code: Code, began: Instant) {
        self.handled[code as usize].fetch_add(1, Ordering::Relaxed);
        let took = began.elapsed();
        self.took.record(took);
        self.outcomes[usize::from(code == Code::Ok)].record(took);
    }
}

/// Maximum number of client versions that are counted separately. Further versions count as
/// [`OTHER`].
const CLIENT_VERSIONS: usize = 16;
/// Maximum length of a client version in bytes.
const CLIENT_VERSION_BYTES: usize = 32;
/// Label for clients that send no version.
const UNKNOWN: &str = "unknown";
/// Label for clients that send a malformed version, or a new version when [`CLIENT_VERSIONS`]
/// others are counted already.
const OTHER: &str = "other";

/// Counters of calls by the client's API version. Clients may send any text, so the number of
/// counted versions is bounded.
#[derive(Debug, Default)]
pub struct ClientVersions {
    known: [OnceLock<Box<str>>; CLIENT_VERSIONS],
    /// Numbers of unary calls and of streams, for each known version, then [`OTHER`], then
    /// [`UNKNOWN`].
    counts: [[AtomicU64; 2]; CLIENT_VERSIONS + 2],
}

impl ClientVersions {
    /// Counts a call of a client that sent this version.
    pub(crate) fn count(&self, said: Option<&[u8]>, is_stream: bool) {
        let place = said.map_or(CLIENT_VERSIONS + 1, |said| self.version_index(said));
        self.counts[place][usize::from(is_stream)].fetch_add(1, Ordering::Relaxed);
    }

    fn version_index(&self, said: &[u8]) -> usize {
        let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b".-+_".contains(byte);
        let Some(said) = std::str::from_utf8(said).ok().filter(|said| {
            (1..=CLIENT_VERSION_BYTES).contains(&said.len()) && said.as_bytes().iter().all(plain)
        }) else {
            return CLIENT_VERSIONS;
        };
        let is_said = |known: &OnceLock<Box<str>>| &**known.get_or_init(|| said.into()) == said;
        self.known.iter().position(is_said).unwrap_or(CLIENT_VERSIONS)
    }

    /// Returns the type of call, the client version and the number of calls, for each pair of type
    /// and version that has any.
    pub(crate) fn all(&self) -> Vec<(&'static str, &str, u64)> {
        let known = self.known.iter().map_while(|known| known.get().map(|version| &**version));
        let named =
            known.enumerate().chain([(CLIENT_VERSIONS, OTHER), (CLIENT_VERSIONS + 1, UNKNOWN)]);
        let counted = named.flat_map(|(place, version)| {
            let counts = ["unary", "stream"].into_iter().zip(&self.counts[place]);
            counts.map(move |(kind, count)| (kind, version, count.load(Ordering::Relaxed)))
        });
        counted.filter(|(_, _, count)| *count > 0).collect()
    }
}

/// Counters of the whole API.
#[derive(Debug)]
pub struct ApiMetrics {
    calls: Vec<MethodMetrics>,
    /// Calls by the client's API version.
    pub clients: ClientVersions,
    /// Number of writes that wait for their outcome.
    pub pending_writes: AtomicI64,
    /// Number of writes that ended without an outcome.
    pub failed_writes: AtomicU64,
    /// Number of open watch streams.
    pub watch_streams: AtomicI64,
    /// Number of open watches.
    pub watchers: AtomicI64,
    /// Number of events sent to watchers.
    pub events: AtomicU64,
    /// Durations of all defragmentations so far.
    pub defragmentations: Durations,
    /// Whether a defragmentation is running.
    pub defragmenting: AtomicBool,
    /// Durations of sending a snapshot of the store to a client.
    pub snapshots: Durations,
    /// Durations of receiving a snapshot from a peer until it was on disk.
    pub snapshot_saves: Durations,
    /// Durations of the fsync of a snapshot from a peer.
    pub snapshot_syncs: Durations,
    /// Durations of range reads: of failed ones, then of successful ones.
    pub ranges: [Durations; 2],
    /// Durations of hashing the whole store.
    pub hashes: Durations,
    /// Durations of hashing the keys as of a revision.
    pub revision_hashes: Durations,
    /// Number of learners that this member, as leader, has promoted to voters.
    pub promoted: AtomicU64,
    /// Durations of comparisons of the members' data.
    pub comparisons: Durations,
    /// Number of members covered by the last comparison.
    pub compared: AtomicI64,
    /// Number of lease renewals that this member made as leader.
    pub leases_renewed: AtomicU64,
    /// Number of leases that this member's clock found expired.
    pub leases_expired: AtomicU64,
    /// Number of requests for `/health` answered as healthy.
    pub healthy: AtomicU64,
    /// Number of requests for `/health` answered as unhealthy.
    pub unhealthy: AtomicU64,
}

impl Default for ApiMetrics {
    fn default() -> Self {
        Self {
            calls: Method::ALL.iter().map(|_| MethodMetrics::new()).collect(),
            clients: ClientVersions::default(),
            pending_writes: AtomicI64::new(0),
            failed_writes: AtomicU64::new(0),
            watch_streams: AtomicI64::new(0),
            watchers: AtomicI64::new(0),
            events: AtomicU64::new(0),
            defragmentations: Durations::default(),
            defragmenting: AtomicBool::new(false),
            snapshots: Durations::of_snapshots(),
            snapshot_saves: Durations::of_transfers(),
            snapshot_syncs: Durations::default(),
            ranges: [Durations::of_applies(), Durations::of_applies()],
            hashes: Durations::of_hashes(),
            revision_hashes: Durations::of_hashes(),
            promoted: AtomicU64::new(0),
            comparisons: Durations::default(),
            compared: AtomicI64::new(0),
            leases_renewed: AtomicU64::new(0),
            leases_expired: AtomicU64::new(0),
            healthy: AtomicU64::new(0),
            unhealthy: AtomicU64::new(0),
        }
    }
}

impl ApiMetrics {
    /// Returns the counters of `method`.
    #[must_use]
    pub(crate) fn calls(&self, method: Method) -> &MethodMetrics {
        &self.calls[method as usize]
    }

    /// Counts a write as pending until the returned guard is dropped. The write counts as failed
    /// unless [`PendingWrite::end`] is called.
    pub(crate) fn count_pending_write(&self) -> PendingWrite<'_> {
        self.pending_writes.fetch_add(1, Ordering::Relaxed);
        PendingWrite { metrics: self, ended: false }
    }

    /// Counts a call from its start until the returned guard is dropped.
    pub(crate) fn start(&self, method: Method) -> CallGuard<'_> {
        let calls = self.calls(method);
        CallGuard { calls, code: Code::Cancelled, began: calls.begin() }
    }
}

/// Guard that counts a write as waiting for its outcome.
#[derive(Debug)]
pub(crate) struct PendingWrite<'a> {
    metrics: &'a ApiMetrics,
    ended: bool,
}

impl PendingWrite<'_> {
    /// Marks the write as having an outcome.
    pub(crate) fn end(mut self) {
        self.ended = true;
    }
}

impl Drop for PendingWrite<'_> {
    fn drop(&mut self) {
        self.metrics.pending_writes.fetch_sub(1, Ordering::Relaxed);
        if !self.ended {
            self.metrics.failed_writes.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Guard of a running call. If it is dropped before [`Self::end`], the client has cancelled the
/// call.
#[derive(Debug)]
pub(crate) struct CallGuard<'a> {
    calls: &'a MethodMetrics,
    code: Code,
    began: Instant,
}

impl CallGuard<'_> {
    /// Ends the call, with `error` or successfully.
    pub(crate) fn end(mut self, error: Option<&Status>) {
        self.code = error.map_or(Code::Ok, Status::code);
    }
}

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        self.calls.end(self.code, self.began);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limited_number_of_client_versions_is_counted_separately() {
        let clients = ClientVersions::default();
        for said in
            [Some("3.5"), None, Some("3.5"), Some("3.7\n"), Some(""), Some(&*"9".repeat(33))]
        {
            clients.count(said.map(str::as_bytes), false);
        }
        clients.count(Some(b"3.5"), true);
        clients.count(Some(&[0xff]), false);
        let expected =
            [("unary", "3.5", 2), ("stream", "3.5", 1), ("unary", OTHER, 4), ("unary", UNKNOWN, 1)];
        assert_eq!(clients.all(), expected);
        for n in 0..100 {
            clients.count(Some(format!("4.{n}").as_bytes()), false);
        }
        assert_eq!(
            clients.known.iter().filter(|known| known.get().is_some()).count(),
            CLIENT_VERSIONS
        );
        let of =
            |wanted: &str| clients.all().into_iter().find(|(_, version, _)| *version == wanted);
        assert_eq!(of("4.14"), Some(("unary", "4.14", 1)));
        assert_eq!(of(OTHER), Some(("unary", OTHER, 4 + 85)));
    }

    #[test]
    fn a_write_without_an_outcome_counts_as_failed() {
        let metrics = ApiMetrics::default();
        metrics.count_pending_write().end();
        assert_eq!(metrics.failed_writes.load(Ordering::Relaxed), 0);
        drop(metrics.count_pending_write());
        assert_eq!(metrics.failed_writes.load(Ordering::Relaxed), 1);
        assert_eq!(metrics.pending_writes.load(Ordering::Relaxed), 0);
    }
}
