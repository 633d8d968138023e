//! Where what lies in etcd's database (server/storage/schema, 3.4 to 3.7).

/// Revision → `mvccpb.KeyValue`.
pub(super) const KEY: &str = "key";
/// Fixed rows.
pub(super) const META: &str = "meta";
/// Lease id → `leasepb.Lease`.
pub(super) const LEASE: &str = "lease";
/// `etcdserverpb.AlarmMember` → nothing.
pub(super) const ALARM: &str = "alarm";
/// Fixed rows.
pub(super) const CLUSTER: &str = "cluster";
/// Member id in hex → JSON.
pub(super) const MEMBERS: &str = "members";
/// Member id in hex → a word.
pub(super) const MEMBERS_REMOVED: &str = "members_removed";
/// Fixed rows.
pub(super) const AUTH: &str = "auth";
/// Name → `authpb.User`.
pub(super) const AUTH_USERS: &str = "authUsers";
/// Name → `authpb.Role`.
pub(super) const AUTH_ROLES: &str = "authRoles";

/// In `meta`: the last entry applied (8 bytes, big-endian), and its term since 3.5.
pub(super) const CONSISTENT_INDEX: &[u8] = b"consistent_index";
pub(super) const TERM: &[u8] = b"term";
/// In `meta`, as revisions: the last compaction, and the last whose old revisions are gone.
pub(super) const SCHEDULED_COMPACTION: &[u8] = b"scheduledCompactRev";
pub(super) const FINISHED_COMPACTION: &[u8] = b"finishedCompactRev";
/// In `meta`, since 3.5: who votes, as JSON.
pub(super) const CONF_STATE: &[u8] = b"confState";
/// In `meta`, since 3.6.
pub(super) const STORAGE_VERSION: &[u8] = b"storageVersion";
/// In `cluster`.
pub(super) const CLUSTER_VERSION: &[u8] = b"clusterVersion";
/// In `auth`: one byte, 1 if it is; 8 bytes, big-endian.
pub(super) const AUTH_ENABLED: &[u8] = b"authEnabled";
pub(super) const AUTH_REVISION: &[u8] = b"authRevision";
/// What stands behind a removed member's id.
pub(super) const REMOVED: &[u8] = b"removed";
