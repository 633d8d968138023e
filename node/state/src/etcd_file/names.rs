//! Names of buckets and rows in etcd's database (server/storage/schema, 3.4 to 3.7).

/// Bucket of the records: revision → `mvccpb.KeyValue`.
pub(super) const KEY: &str = "key";
/// Bucket of rows with fixed keys, about the store.
pub(super) const META: &str = "meta";
/// Bucket of the leases: lease id → `leasepb.Lease`.
pub(super) const LEASE: &str = "lease";
/// Bucket of the alarms: `etcdserverpb.AlarmMember` → empty value.
pub(super) const ALARM: &str = "alarm";
/// Bucket of rows with fixed keys, about the cluster.
pub(super) const CLUSTER: &str = "cluster";
/// Bucket of the members: member id in hex → JSON.
pub(super) const MEMBERS: &str = "members";
/// Bucket of the removed members: member id in hex → the word `removed`.
pub(super) const MEMBERS_REMOVED: &str = "members_removed";
/// Bucket of rows with fixed keys, about authentication.
pub(super) const AUTH: &str = "auth";
/// Bucket of the users: name → `authpb.User`.
pub(super) const AUTH_USERS: &str = "authUsers";
/// Bucket of the roles: name → `authpb.Role`.
pub(super) const AUTH_ROLES: &str = "authRoles";

/// Row in `meta`: index of the last applied entry (8 bytes, big-endian).
pub(super) const CONSISTENT_INDEX: &[u8] = b"consistent_index";
/// Row in `meta` since 3.5: term of the last applied entry (8 bytes, big-endian).
pub(super) const TERM: &[u8] = b"term";
/// Row in `meta`: revision of the last compaction.
pub(super) const SCHEDULED_COMPACTION: &[u8] = b"scheduledCompactRev";
/// Row in `meta`: revision of the last compaction whose old records have all been removed.
pub(super) const FINISHED_COMPACTION: &[u8] = b"finishedCompactRev";
/// Row in `meta` since 3.5: the voters and learners, as JSON.
pub(super) const CONF_STATE: &[u8] = b"confState";
/// Row in `meta` since 3.6: version of the database schema.
pub(super) const STORAGE_VERSION: &[u8] = b"storageVersion";
/// Row in `cluster`: version of the cluster.
pub(super) const CLUSTER_VERSION: &[u8] = b"clusterVersion";
/// Row in `auth`: one byte, which is 1 if authentication is enabled.
pub(super) const AUTH_ENABLED: &[u8] = b"authEnabled";
/// Row in `auth`: revision of users and roles (8 bytes, big-endian).
pub(super) const AUTH_REVISION: &[u8] = b"authRevision";
/// Value of a row in `members_removed`.
pub(super) const REMOVED: &[u8] = b"removed";
