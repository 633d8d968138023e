//! Tables of the store's file, and the encoding of their rows.

use std::sync::Arc;

use node_proto::authpb;
use node_proto::etcdserverpb::AlarmMember;
use node_proto::musterpb;
use prost::Message as _;
use redb::{ReadableTable, Table, TableDefinition};

use super::error::StoreError;
use crate::auth::AuthState;
use crate::identity::MemberId;
use crate::lease::Lease;
use crate::membership::{Member, MemberTable, RemovedMember};
use crate::state_machine::Position;

/// Format version of the file. Other versions are refused, except those of [`UPGRADABLE_FORMATS`].
pub(crate) const FORMAT: u32 = 5;
/// Older formats, which are upgraded to [`FORMAT`] when a file is opened:
///
/// - Format 2 has no table of leases, and none of users and roles.
/// - Format 3 has no tables of users and roles.
/// - None of the three has rows of several tombstones.
pub(crate) const UPGRADABLE_FORMATS: [u32; 3] = [2, 3, 4];

/// Table of records. The key is a revision, packed into one number. The value is an encoded
/// `KeyValue`, or several tombstones, the first of which has that revision: see [`super::rows`].
pub(crate) const RECORDS: TableDefinition<'static, u128, &'static [u8]> =
    TableDefinition::new("records");
/// Table of single values, by row name: `PROGRESS`, `FINISHED_COMPACTION_ROW`, `VERSION` and
/// `AUTH`.
pub(crate) const META: TableDefinition<'static, &'static str, &'static [u8]> =
    TableDefinition::new("meta");
/// Member id → encoded `Member`.
pub(crate) const MEMBERS: TableDefinition<'static, u64, &'static [u8]> =
    TableDefinition::new("members");
/// Member id → encoded `RemovedMember`. A member never leaves this table again.
pub(crate) const REMOVED: TableDefinition<'static, u64, &'static [u8]> =
    TableDefinition::new("removed");
/// (Member id, alarm type) → nothing.
pub(crate) const ALARMS: TableDefinition<'static, (u64, i32), ()> = TableDefinition::new("alarms");

/// Lease id → encoded `Lease`. The keys attached to a lease are not stored here: each record names
/// its lease.
pub(crate) const LEASES: TableDefinition<'static, i64, &'static [u8]> =
    TableDefinition::new("leases");

/// Name → encoded `authpb.User`.
pub(crate) const USERS: TableDefinition<'static, &'static str, &'static [u8]> =
    TableDefinition::new("users");
/// Name → encoded `authpb.Role`.
pub(crate) const ROLES: TableDefinition<'static, &'static str, &'static [u8]> =
    TableDefinition::new("roles");

/// Name of the row with [`StoreProgress`], which each batch rewrites.
const PROGRESS: &str = "progress";
/// Name of the row with the revision of the newest finished compaction. A finished compaction has
/// deleted all revisions that it drops.
const FINISHED_COMPACTION_ROW: &str = "compacted";
/// Name of the row with the file's format version.
const VERSION: &str = "format";
/// Name of the row with the switch for authentication (1 byte) and the revision of users and roles
/// (8 bytes). The row is missing before the first change of users or roles.
const AUTH: &str = "auth";

/// Log position, newest revision and compaction revision of the file. They share one row, so that
/// they can't contradict each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StoreProgress {
    pub(crate) applied: Position,
    /// Newest revision; 1 in an empty store, as in etcd.
    pub(crate) revision: i64,
    /// Compaction revision, below which reads are refused; -1 before the first compaction.
    pub(crate) compact_revision: i64,
}

impl StoreProgress {
    pub(crate) const START: Self =
        Self { applied: Position { index: 0, term: 0 }, revision: 1, compact_revision: -1 };

    pub(crate) fn encode(self) -> [u8; 32] {
        let mut row = [0; 32];
        row[..8].copy_from_slice(&self.applied.index.to_le_bytes());
        row[8..16].copy_from_slice(&self.applied.term.to_le_bytes());
        row[16..24].copy_from_slice(&self.revision.to_le_bytes());
        row[24..].copy_from_slice(&self.compact_revision.to_le_bytes());
        row
    }

    pub(crate) fn decode(row: &[u8]) -> Result<Self, StoreError> {
        let corrupt = || StoreError::Corrupt("progress row has a wrong length".to_owned());
        let (words, rest) = row.as_chunks::<8>();
        let [index, term, revision, compacted] = words else { return Err(corrupt()) };
        if !rest.is_empty() {
            return Err(corrupt());
        }
        Ok(Self {
            applied: Position {
                index: u64::from_le_bytes(*index),
                term: u64::from_le_bytes(*term),
            },
            revision: i64::from_le_bytes(*revision),
            compact_revision: i64::from_le_bytes(*compacted),
        })
    }
}

/// Replicated state that is small enough to be kept in RAM as a whole.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ClusterData {
    /// Current and removed members of the cluster.
    pub(crate) members: Arc<MemberTable>,
    /// Active alarms, ordered by member, then type.
    pub(crate) alarms: Vec<AlarmMember>,
    /// Users, roles and whether authentication is enabled.
    pub(crate) auth: Arc<AuthState>,
}

type MetaTable<'txn> = Table<'txn, &'static str, &'static [u8]>;

pub(crate) fn write_format(meta: &mut MetaTable<'_>) -> Result<(), StoreError> {
    meta.insert(VERSION, &FORMAT.to_le_bytes()[..])?;
    Ok(())
}

/// Reads the file's format; `None` in a new file.
pub(crate) fn read_format(
    meta: &impl ReadableTable<&'static str, &'static [u8]>,
) -> Result<Option<u32>, StoreError> {
    let Some(row) = meta.get(VERSION)? else { return Ok(None) };
    let bytes = row.value().try_into();
    let bytes = bytes.map_err(|_| StoreError::Corrupt("format row is not 4 bytes".to_owned()))?;
    Ok(Some(u32::from_le_bytes(bytes)))
}

pub(crate) fn write_progress(
    meta: &mut MetaTable<'_>,
    progress: StoreProgress,
) -> Result<(), StoreError> {
    meta.insert(PROGRESS, &progress.encode()[..])?;
    Ok(())
}

pub(crate) fn read_progress(
    meta: &impl ReadableTable<&'static str, &'static [u8]>,
) -> Result<StoreProgress, StoreError> {
    match meta.get(PROGRESS)? {
        Some(row) => StoreProgress::decode(row.value()),
        None => Err(StoreError::Corrupt("progress row is missing".to_owned())),
    }
}

pub(crate) fn write_finished_compaction(
    meta: &mut MetaTable<'_>,
    revision: i64,
) -> Result<(), StoreError> {
    meta.insert(FINISHED_COMPACTION_ROW, &revision.to_le_bytes()[..])?;
    Ok(())
}

pub(crate) fn read_finished_compaction(
    meta: &impl ReadableTable<&'static str, &'static [u8]>,
) -> Result<i64, StoreError> {
    let Some(row) = meta.get(FINISHED_COMPACTION_ROW)? else {
        return Ok(StoreProgress::START.compact_revision);
    };
    let bytes = row.value().try_into();
    let bytes =
        bytes.map_err(|_| StoreError::Corrupt("compacted row is not 8 bytes".to_owned()))?;
    Ok(i64::from_le_bytes(bytes))
}

/// Rewrites members, removed members and alarms as a whole: they are few and change rarely.
pub(crate) fn write_cluster(
    txn: &redb::WriteTransaction,
    cluster: &ClusterData,
) -> Result<(), StoreError> {
    let mut members = txn.open_table(MEMBERS)?;
    members.retain(|_, _| false)?;
    for member in cluster.members.members() {
        members.insert(member.id.0, &musterpb::Member::from(member).encode_to_vec()[..])?;
    }
    let mut removed = txn.open_table(REMOVED)?;
    removed.retain(|_, _| false)?;
    for (id, member) in cluster.members.removed() {
        removed.insert(id.0, &member.encode(id).encode_to_vec()[..])?;
    }
    let mut alarms = txn.open_table(ALARMS)?;
    alarms.retain(|_, ()| false)?;
    for alarm in &cluster.alarms {
        alarms.insert((alarm.member_id, alarm.alarm), ())?;
    }
    Ok(())
}

/// Rewrites users and roles as a whole: they change rarely.
pub(crate) fn write_auth(txn: &redb::WriteTransaction, auth: &AuthState) -> Result<(), StoreError> {
    let mut users = txn.open_table(USERS)?;
    users.retain(|_, _| false)?;
    for (name, user) in auth.user_rows() {
        users.insert(name, &user.encode_to_vec()[..])?;
    }
    let mut roles = txn.open_table(ROLES)?;
    roles.retain(|_, _| false)?;
    for (name, role) in auth.role_rows() {
        roles.insert(name, &role.encode_to_vec()[..])?;
    }
    txn.open_table(META)?.insert(AUTH, &encode_auth(auth)[..])?;
    Ok(())
}

fn read_auth(txn: &redb::ReadTransaction) -> Result<AuthState, StoreError> {
    let (mut users, mut roles) = (Vec::new(), Vec::new());
    for row in txn.open_table(USERS)?.iter()? {
        users.push(decode_user(row?.1.value()).map_err(StoreError::Corrupt)?);
    }
    for row in txn.open_table(ROLES)?.iter()? {
        roles.push(decode_role(row?.1.value()).map_err(StoreError::Corrupt)?);
    }
    let (enabled, revision) = match txn.open_table(META)?.get(AUTH)? {
        Some(row) => decode_auth(row.value()).map_err(StoreError::Corrupt)?,
        None => (false, AuthState::default().revision()),
    };
    AuthState::from_rows(enabled, revision, users, roles).map_err(StoreError::Corrupt)
}

/// Encodes the switch for authentication, and the revision of users and roles.
pub(crate) fn encode_auth(auth: &AuthState) -> [u8; 9] {
    let mut row = [0; 9];
    row[0] = u8::from(auth.is_enabled());
    row[1..].copy_from_slice(&auth.revision().to_le_bytes());
    row
}

/// Decodes what [`encode_auth`] wrote.
pub(crate) fn decode_auth(row: &[u8]) -> Result<(bool, u64), String> {
    match row.split_first_chunk::<1>() {
        Some(([enabled @ 0..=1], revision)) => {
            let revision = revision.try_into().map_err(|_| "the auth row has a wrong length")?;
            Ok((*enabled == 1, u64::from_le_bytes(revision)))
        }
        _ => Err("the auth row does not say whether users count".to_owned()),
    }
}

/// Decodes a user from a row of the table, or from a frame of a snapshot.
pub(crate) fn decode_user(row: &[u8]) -> Result<authpb::User, String> {
    authpb::User::decode(row).map_err(|error| format!("a user's row: {error}"))
}

/// Decodes a role from a row of the table, or from a frame of a snapshot.
pub(crate) fn decode_role(row: &[u8]) -> Result<authpb::Role, String> {
    authpb::Role::decode(row).map_err(|error| format!("a role's row: {error}"))
}

pub(crate) fn read_cluster(txn: &redb::ReadTransaction) -> Result<ClusterData, StoreError> {
    let mut alarms = Vec::new();
    let (mut members, mut removed) = (Vec::new(), Vec::new());
    for row in txn.open_table(MEMBERS)?.iter()? {
        members.push(decode_member(row?.1.value()).map_err(StoreError::Corrupt)?);
    }
    for row in txn.open_table(REMOVED)?.iter()? {
        removed.push(decode_removed(row?.1.value()).map_err(StoreError::Corrupt)?);
    }
    for row in txn.open_table(ALARMS)?.iter()? {
        let (member_id, alarm) = row?.0.value();
        alarms.push(AlarmMember { member_id, alarm });
    }
    let members = Arc::new(MemberTable::from_parts(members, removed));
    Ok(ClusterData { members, alarms, auth: Arc::new(read_auth(txn)?) })
}

/// Encodes a lease for a row of the table, or for a frame of a snapshot.
pub(crate) fn encode_lease(lease: Lease) -> Vec<u8> {
    musterpb::Lease::from(lease).encode_to_vec()
}

/// Decodes and checks what [`encode_lease`] wrote.
pub(crate) fn decode_lease(row: &[u8]) -> Result<Lease, String> {
    let lease = musterpb::Lease::decode(row).map_err(|error| format!("a lease's row: {error}"))?;
    let lease = Lease::from(lease);
    let proper = lease.id != 0 && lease.ttl > 0 && (0..=lease.ttl).contains(&lease.remaining_ttl);
    if proper { Ok(lease) } else { Err(format!("a lease's row can't be: {lease:?}")) }
}

/// Decodes a member from a row of the table, or from a frame of a snapshot.
pub(crate) fn decode_member(row: &[u8]) -> Result<Member, String> {
    let what = |error: &dyn std::error::Error| format!("a member's row: {error}");
    let member = musterpb::Member::decode(row).map_err(|error| what(&error))?;
    member.try_into().map_err(|error| what(&error))
}

/// Decodes a removed member from a row of the table, or from a frame of a snapshot.
pub(crate) fn decode_removed(row: &[u8]) -> Result<(MemberId, RemovedMember), String> {
    let what = |error: &dyn std::error::Error| format!("a removed member's row: {error}");
    let member = musterpb::RemovedMember::decode(row).map_err(|error| what(&error))?;
    RemovedMember::decode(&member).map_err(|error| what(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_survives_encoding_and_decoding() -> Result<(), StoreError> {
        let progress = StoreProgress {
            applied: Position { index: 7, term: 3 },
            revision: 11,
            compact_revision: -1,
        };
        assert_eq!(StoreProgress::decode(&progress.encode())?, progress);
        Ok(())
    }

    #[test]
    fn a_progress_row_of_wrong_length_is_refused() {
        assert!(StoreProgress::decode(&[0; 31]).is_err());
        assert!(StoreProgress::decode(&[0; 33]).is_err());
    }
}
