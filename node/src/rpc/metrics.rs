//! Counters of calls, by method and code.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use tonic::{Code, Status};

use crate::driver::Durations;

macro_rules! methods {
    ($($name:ident = $service:literal, $method:literal, $kind:literal;)*) => {
        /// The methods that are counted.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Method {
            $(#[doc = concat!("`", $service, "/", $method, "`")] $name,)*
        }

        impl Method {
            /// All of them, in the order of the counters.
            pub(crate) const ALL: &[Self] = &[$(Self::$name),*];

            /// As metrics name it: service, method, type.
            #[must_use]
            pub(crate) fn labels(self) -> (&'static str, &'static str, &'static str) {
                match self { $(Self::$name => ($service, $method, $kind),)* }
            }
        }
    };
}

methods! {
    Range = "etcdserverpb.KV", "Range", "unary";
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

/// gRPC has 17 codes, from 0.
const CODES: usize = 17;

/// One method's counters.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    /// Begun.
    pub started: AtomicU64,
    /// Ended, by code.
    pub handled: [AtomicU64; CODES],
}

/// The API's counters.
#[derive(Debug)]
pub(crate) struct Metrics {
    calls: Vec<Calls>,
    /// Writes that wait for their outcome.
    pub pending: AtomicI64,
    /// Open watch streams.
    pub watch_streams: AtomicI64,
    /// Open watches.
    pub watchers: AtomicI64,
    /// Events told.
    pub events: AtomicU64,
    /// Of each defragmentation.
    pub defragmentations: Durations,
    /// Of each comparison of the members' data.
    pub comparisons: Durations,
    /// Members that the last one could compare.
    pub compared: AtomicI64,
    /// Leases that this member kept alive as the leader.
    pub leases_renewed: AtomicU64,
    /// Leases that its clock found over.
    pub leases_expired: AtomicU64,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            calls: Method::ALL.iter().map(|_| Calls::default()).collect(),
            pending: AtomicI64::new(0),
            watch_streams: AtomicI64::new(0),
            watchers: AtomicI64::new(0),
            events: AtomicU64::new(0),
            defragmentations: Durations::default(),
            comparisons: Durations::default(),
            compared: AtomicI64::new(0),
            leases_renewed: AtomicU64::new(0),
            leases_expired: AtomicU64::new(0),
        }
    }
}

impl Metrics {
    /// The counters of `method`.
    #[must_use]
    pub(crate) fn calls(&self, method: Method) -> &Calls {
        &self.calls[method as usize]
    }

    /// Counts a write for as long as the answer is kept.
    pub(crate) fn pending(&self) -> Pending<'_> {
        self.pending.fetch_add(1, Ordering::Relaxed);
        Pending(&self.pending)
    }

    /// Counts a call from its start to its end.
    pub(crate) fn start(&self, method: Method) -> Call<'_> {
        let calls = self.calls(method);
        calls.started.fetch_add(1, Ordering::Relaxed);
        Call { calls, code: Code::Cancelled }
    }
}

/// A write that waits for its outcome.
#[derive(Debug)]
pub(crate) struct Pending<'a>(&'a AtomicI64);

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A call that is under way; one that is dropped unended was cancelled by its client.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    calls: &'a Calls,
    code: Code,
}

impl Call<'_> {
    /// Ends the call: with `error`, or well.
    pub(crate) fn end(mut self, error: Option<&Status>) {
        self.code = error.map_or(Code::Ok, Status::code);
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.calls.handled[self.code as usize].fetch_add(1, Ordering::Relaxed);
    }
}
