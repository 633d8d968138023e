//! Writes a store as a snapshot file of etcd.

use std::io::{self, Write};

use node_bbolt::{BboltWriteError, Builder, Layout};
use node_proto::leasepb;
use node_proto::mvccpb::KeyValue;
use prost::Message as _;

use super::ExportError;
use super::names::{
    ALARM, AUTH, AUTH_ENABLED, AUTH_REVISION, AUTH_ROLES, AUTH_USERS, CLUSTER, CONF_STATE,
    CONSISTENT_INDEX, FINISHED_COMPACTION, KEY, LEASE, MEMBERS, MEMBERS_REMOVED, META, REMOVED,
    SCHEDULED_COMPACTION, STORAGE_VERSION, TERM,
};
use super::read::FileMember;
use crate::CLUSTER_VERSION;
use crate::auth::AuthState;
use crate::lease::Lease;
use crate::membership::MemberTable;
use crate::mvcc::{EtcdKey, FrozenView, Revision, Store, StoreError, View};

/// A store that is to be written as a file, in the state that it had when this `Export` was
/// created.
///
/// All records are read twice: once to find the size of the file, and once to write it. The work
/// needs memory for one page of each level of a tree, and no temporary file. While an `Export`
/// exists, the store can't reuse pages that it frees.
///
/// The bucket `cluster` gets no `clusterVersion`. etcd determines the cluster version by itself,
/// and etcd 3.4 refuses a version that is newer than its own.
pub struct Export {
    frozen: FrozenView,
    layout: Layout,
}

impl Export {
    /// Freezes the current state of the store and computes the size of its file. Stops with
    /// [`ExportError::Cancelled`] once `is_wanted` returns false.
    pub fn new(store: &Store, is_wanted: &dyn Fn() -> bool) -> Result<Self, ExportError> {
        let frozen = store.freeze()?;
        let layout = node_bbolt::measure(|builder| write_buckets(&frozen, is_wanted, builder))?;
        Ok(Self { frozen, layout })
    }

    /// Returns the size of the file in bytes, without the hash.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.layout.bytes()
    }

    /// Returns the newest revision in the file.
    #[must_use]
    pub fn revision(&self) -> i64 {
        self.frozen.view.revision()
    }

    /// Returns the version of the database schema, as etcd names it.
    #[must_use]
    pub fn storage_version(&self) -> &'static str {
        CLUSTER_VERSION
    }

    /// Writes the file, followed by its SHA-256 hash.
    pub fn write(&self, out: &mut dyn Write) -> Result<(), ExportError> {
        let mut hashed =
            HashingWriter { out, hash: ring::digest::Context::new(&ring::digest::SHA256) };
        node_bbolt::write(self.layout, &mut hashed, |builder| {
            write_buckets(&self.frozen, &|| true, builder)
        })?;
        let HashingWriter { out, hash } = hashed;
        let failed = |error| ExportError::Write(BboltWriteError::Io(error));
        out.write_all(hash.finish().as_ref()).map_err(failed)?;
        out.flush().map_err(failed)
    }
}

struct HashingWriter<'a> {
    out: &'a mut dyn Write,
    hash: ring::digest::Context,
}

impl Write for HashingWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.hash.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Adds all buckets, in the order of their names. These are the buckets that etcd creates at its
/// first start.
fn write_buckets(
    frozen: &FrozenView,
    is_wanted: &dyn Fn() -> bool,
    builder: &mut Builder<'_>,
) -> Result<(), ExportError> {
    let view = &frozen.view;
    builder.begin_bucket(ALARM.as_bytes())?;
    let mut alarms: Vec<_> = view.alarms().iter().map(|alarm| alarm.encode_to_vec()).collect();
    alarms.sort_unstable();
    for alarm in alarms {
        builder.put(&alarm, b"")?;
    }
    auth(view.auth(), builder)?;
    builder.begin_bucket(CLUSTER.as_bytes())?;
    builder.begin_bucket(KEY.as_bytes())?;
    frozen.records(|at, record| {
        if !is_wanted() {
            return Err(ExportError::Cancelled);
        }
        let key = EtcdKey::new(at, is_tombstone(record)?);
        Ok::<_, ExportError>(builder.put(key.bytes(), record)?)
    })?;
    builder.begin_bucket(LEASE.as_bytes())?;
    leases(view, builder)?;
    members(view.members(), builder)?;
    meta(frozen, builder)
}

/// Adds the buckets of users, roles and authentication state.
fn auth(auth: &AuthState, builder: &mut Builder<'_>) -> Result<(), ExportError> {
    builder.begin_bucket(AUTH.as_bytes())?;
    if auth.is_enabled() {
        builder.put(AUTH_ENABLED, &[1])?;
    }
    builder.put(AUTH_REVISION, &auth.revision().to_be_bytes())?;
    builder.begin_bucket(AUTH_ROLES.as_bytes())?;
    for (name, role) in auth.role_rows() {
        builder.put(name.as_bytes(), &role.encode_to_vec())?;
    }
    builder.begin_bucket(AUTH_USERS.as_bytes())?;
    for (name, user) in auth.user_rows() {
        builder.put(name.as_bytes(), &user.encode_to_vec())?;
    }
    Ok(())
}

/// Adds the leases in the order of their big-endian ids, in which negative ids come last.
fn leases(view: &View, builder: &mut Builder<'_>) -> Result<(), ExportError> {
    let mut leases = view.leases()?;
    leases.sort_unstable_by_key(|lease| lease.id.cast_unsigned());
    for Lease { id, ttl, remaining_ttl: left, .. } in leases {
        let row = leasepb::Lease { id, ttl, remaining_ttl: left };
        builder.put(&id.to_be_bytes(), &row.encode_to_vec())?;
    }
    Ok(())
}

fn is_tombstone(record: &[u8]) -> Result<bool, StoreError> {
    let kv = KeyValue::decode(record);
    let kv =
        kv.map_err(|error| StoreError::Corrupt(format!("a record is no KeyValue: {error}")))?;
    Ok(kv.create_revision == 0)
}

fn members(table: &MemberTable, builder: &mut Builder<'_>) -> Result<(), ExportError> {
    // The hex digits have a fixed length, so they sort in the order of the ids.
    builder.begin_bucket(MEMBERS.as_bytes())?;
    for member in table.members() {
        let row = FileMember {
            id: member.id.0,
            peer_urls: member.peer_urls.clone(),
            is_learner: member.is_learner,
            name: member.name.clone(),
            client_urls: member.client_urls.clone(),
        };
        builder.put(hex(row.id).as_bytes(), &json(&row))?;
    }
    builder.begin_bucket(MEMBERS_REMOVED.as_bytes())?;
    for (id, _) in table.removed() {
        builder.put(hex(id.0).as_bytes(), REMOVED)?;
    }
    Ok(())
}

fn hex(id: u64) -> String {
    format!("{id:016x}")
}

fn json(row: &impl serde::Serialize) -> Vec<u8> {
    serde_json::to_vec(row).expect("numbers and text are JSON")
}

/// `raftpb.ConfState` in the JSON that Go writes for it.
#[derive(serde::Serialize)]
struct ConfState {
    voters: Vec<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    learners: Vec<u64>,
    auto_leave: bool,
}

/// Adds the rows of the bucket `meta`, in the order of their names.
fn meta(frozen: &FrozenView, builder: &mut Builder<'_>) -> Result<(), ExportError> {
    let view = &frozen.view;
    let ids = view.members().voters_and_learners();
    let conf = ConfState { voters: ids.voters, learners: ids.learners, auto_leave: false };
    builder.begin_bucket(META.as_bytes())?;
    builder.put(CONF_STATE, &json(&conf))?;
    builder.put(CONSISTENT_INDEX, &view.applied().index.to_be_bytes())?;
    compaction(FINISHED_COMPACTION, frozen.finished_compaction, builder)?;
    compaction(SCHEDULED_COMPACTION, view.compact_revision(), builder)?;
    builder.put(STORAGE_VERSION, CLUSTER_VERSION.as_bytes())?;
    builder.put(TERM, &view.applied().term.to_be_bytes())?;
    Ok(())
}

fn compaction(row: &[u8], revision: i64, builder: &mut Builder<'_>) -> Result<(), ExportError> {
    if revision > 0 {
        let at = Revision { main: revision, sub: 0 };
        builder.put(row, EtcdKey::new(at, false).bytes())?;
    }
    Ok(())
}
