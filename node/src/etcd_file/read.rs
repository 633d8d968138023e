//! A file, as what a store can be made of.

use std::io::{Read, Seek, SeekFrom};

use node_bbolt::{Entries, Reader, Value};
use node_proto::authpb;
use node_proto::etcdserverpb::AlarmMember;
use node_proto::leasepb;
use node_proto::mvccpb::KeyValue;
use prost::Message as _;
use serde::{Deserialize, Serialize};

use super::EtcdFileError;
use super::names::{
    ALARM, AUTH, AUTH_ENABLED, AUTH_REVISION, AUTH_ROLES, AUTH_USERS, CLUSTER, CLUSTER_VERSION,
    CONSISTENT_INDEX, FINISHED_COMPACTION, KEY, LEASE, MEMBERS, MEMBERS_REMOVED, META,
    SCHEDULED_COMPACTION, STORAGE_VERSION, TERM,
};
use crate::auth::AuthState;
use crate::lease::{Lease, MAX_TTL};
use crate::machine::Position;
use crate::mvcc::{EtcdKey, Revision};

/// Bytes of a SHA-256.
const HASH_BYTES: u64 = 32;
/// A file with a hash behind it is as much longer than a multiple of this: so etcd tells.
const SECTOR_BYTES: u64 = 512;
/// Rows of `members`, of `alarm`, of users and of roles that are read; no cluster has so many.
const MAX_ROWS: usize = 100_000;
/// Leases that are read: as many as fit into memory with their keys.
const MAX_LEASES: usize = 10_000_000;

/// Whether the hash behind a file counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HashCheck {
    /// It has to be there, and right.
    Required,
    /// Whether it is there or right doesn't matter.
    Skipped,
}

/// Who may do what, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Auth {
    /// Requests were checked.
    pub enabled: bool,
    /// Users.
    pub users: u64,
    /// Roles.
    pub roles: u64,
}

/// A member of the cluster that the file is of, as etcd writes it down.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileMember {
    /// Its id.
    pub id: u64,
    /// Where its peers reached it.
    #[serde(rename = "peerURLs", default)]
    pub peer_urls: Vec<String>,
    /// It had no vote.
    #[serde(rename = "isLearner", default, skip_serializing_if = "std::ops::Not::not")]
    pub is_learner: bool,
    /// Its name; empty if it never started.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Where clients reached it.
    #[serde(rename = "clientURLs", default, skip_serializing_if = "Vec::is_empty")]
    pub client_urls: Vec<String>,
}

/// What a file holds beside its records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// The newest revision.
    pub revision: i64,
    /// The last compaction; -1: none.
    pub compacted: i64,
    /// The last entry that the old cluster had applied; the term is 0 before etcd 3.5.
    pub applied: Position,
    /// The version of the file's layout: none before etcd 3.6.
    pub storage_version: Option<String>,
    /// The old cluster's version.
    pub cluster_version: Option<String>,
    /// The old cluster's members.
    pub members: Vec<FileMember>,
    /// How many were removed from it.
    pub removed: u64,
    /// The alarms that were raised.
    pub alarms: Vec<AlarmMember>,
    /// Leases.
    pub leases: u64,
    /// Users and roles.
    pub auth: Auth,
}

/// A snapshot file that is open.
pub struct EtcdFile<R> {
    reader: Reader<R>,
    summary: Summary,
}

impl<R: Read + Seek> EtcdFile<R> {
    /// Checks the hash behind a file, which takes reading all of it, and reads everything but its
    /// keys.
    pub fn open(mut source: R, check: HashCheck) -> Result<Self, EtcdFileError> {
        if check == HashCheck::Required {
            check_hash(&mut source)?;
        }
        let mut reader = Reader::open(source)?;
        let summary = summary(&mut reader)?;
        Ok(Self { reader, summary })
    }

    /// What it holds beside its records.
    #[must_use]
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// Bytes of the database itself.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.reader.file_bytes()
    }

    /// The records.
    pub fn import(&mut self) -> Result<Import<'_, R>, EtcdFileError> {
        let bucket = self.reader.bucket(KEY.as_bytes())?;
        let bucket = bucket.ok_or(EtcdFileError::NotEtcds(KEY))?;
        let entries = self.reader.entries(&bucket)?;
        Ok(Import { entries, newest: self.summary.revision })
    }

    /// Who may do what.
    pub fn auth(&mut self) -> Result<AuthState, EtcdFileError> {
        let (mut users, mut roles) = (Vec::new(), Vec::new());
        rows(&mut self.reader, AUTH_USERS, |_, value| {
            push(&mut users, authpb::User::decode(value).map_err(|error| error.to_string())?)
        })?;
        rows(&mut self.reader, AUTH_ROLES, |_, value| {
            push(&mut roles, authpb::Role::decode(value).map_err(|error| error.to_string())?)
        })?;
        let mut revision = AuthState::default().revision();
        rows(&mut self.reader, AUTH, |key, value| {
            if key == AUTH_REVISION {
                revision = number(value)?;
            }
            Ok(())
        })?;
        let state = AuthState::from_rows(self.summary.auth.enabled, revision, users, roles);
        state.map_err(|what| damaged(AUTH, what))
    }

    /// The leases; which keys are attached to them, the records say.
    pub fn leases(&mut self) -> Result<Vec<Lease>, EtcdFileError> {
        let mut leases = Vec::new();
        rows(&mut self.reader, LEASE, |key, value| {
            if leases.len() == MAX_LEASES {
                return Err(format!("there are more than {MAX_LEASES} rows"));
            }
            leases.push(lease(key, value)?);
            Ok(())
        })?;
        Ok(leases)
    }
}

/// The records of a file.
pub struct Import<'a, R> {
    entries: Entries<'a, R>,
    /// What the last page says; a damaged tree may have a later one before it.
    newest: i64,
}

impl<R: Read + Seek> Import<'_, R> {
    /// Gives every record, an encoded `KeyValue`, to `take`, in the order of their revisions. After an
    /// error, what was given before must not be used either.
    pub fn each<E: From<EtcdFileError>>(
        mut self,
        mut take: impl FnMut(Revision, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut last = Revision::default();
        while let Some(entry) = self.entries.next().map_err(EtcdFileError::from)? {
            let (at, is_tombstone) =
                EtcdKey::parse(entry.key).ok_or_else(|| damaged(KEY, "a key is no revision"))?;
            // As a revision and as a tombstone of it.
            if at == last {
                return Err(damaged(KEY, format!("{at:?} is there twice")).into());
            }
            if at.main > self.newest {
                let newest = self.newest;
                return Err(
                    damaged(KEY, format!("{at:?} is there, and the last is {newest}")).into()
                );
            }
            last = at;
            let Value::Bytes(record) = entry.value else {
                return Err(damaged(KEY, format!("{at:?} is a bucket")).into());
            };
            // What `--bump-revision` leaves: a revision without a change.
            if record.is_empty() {
                continue;
            }
            let kv = decode(record)?;
            check_record(at, is_tombstone, &kv)
                .map_err(|what| damaged(KEY, format!("{at:?} {what}")))?;
            take(at, record)?;
        }
        Ok(())
    }
}

/// Whether a record is what our store, which takes its word for it, can hold at `at`.
fn check_record(at: Revision, is_tombstone: bool, kv: &KeyValue) -> Result<(), &'static str> {
    if kv.key.is_empty() {
        return Err("has no key");
    }
    if is_tombstone != (kv.create_revision == 0) {
        return Err("is a put by its key and a tombstone by its value, or the other way round");
    }
    let is_put = kv.mod_revision == at.main
        && (1..=kv.mod_revision).contains(&kv.create_revision)
        && kv.version > 0;
    if is_tombstone || is_put { Ok(()) } else { Err("is of another revision") }
}

/// A lease's row, as what our store can hold. etcd never writes one without a TTL.
fn lease(key: &[u8], value: &[u8]) -> Result<Lease, String> {
    let row = leasepb::Lease::decode(value).map_err(|error| error.to_string())?;
    let leasepb::Lease { id, ttl, remaining_ttl: left } = row;
    let proper = id != 0 && key == id.to_be_bytes() && (1..=MAX_TTL).contains(&ttl);
    if !proper || !(0..=ttl).contains(&left) {
        return Err(format!("a lease can't be: {row:?}"));
    }
    Ok(Lease { id, ttl, left, granted: 0 })
}

fn decode(record: &[u8]) -> Result<KeyValue, EtcdFileError> {
    KeyValue::decode(record).map_err(|error| damaged(KEY, error.to_string()))
}

fn damaged(bucket: &'static str, what: impl Into<String>) -> EtcdFileError {
    EtcdFileError::Row { bucket, what: what.into() }
}

/// Compares the file with the hash behind it.
fn check_hash(source: &mut (impl Read + Seek)) -> Result<(), EtcdFileError> {
    let bytes = source.seek(SeekFrom::End(0)).map_err(EtcdFileError::Io)?;
    if bytes % SECTOR_BYTES != HASH_BYTES {
        return Err(EtcdFileError::NoHash);
    }
    source.seek(SeekFrom::Start(0)).map_err(EtcdFileError::Io)?;
    let mut hash = ring::digest::Context::new(&ring::digest::SHA256);
    let mut buffer = vec![0; 256 * 1024];
    let mut left = bytes - HASH_BYTES;
    while left > 0 {
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        source.read_exact(&mut buffer[..most]).map_err(EtcdFileError::Io)?;
        hash.update(&buffer[..most]);
        left -= most as u64;
    }
    let mut expected = [0; 32];
    source.read_exact(&mut expected).map_err(EtcdFileError::Io)?;
    let got = hash.finish().as_ref().try_into().expect("a SHA-256 has 32 bytes");
    if expected == got { Ok(()) } else { Err(EtcdFileError::WrongHash { expected, got }) }
}

/// Shows every row of a bucket; one that is not there has none.
fn rows<R: Read + Seek>(
    reader: &mut Reader<R>,
    bucket: &'static str,
    mut show: impl FnMut(&[u8], &[u8]) -> Result<(), String>,
) -> Result<(), EtcdFileError> {
    let Some(found) = reader.bucket(bucket.as_bytes())? else { return Ok(()) };
    let mut entries = reader.entries(&found)?;
    while let Some(entry) = entries.next()? {
        let Value::Bytes(value) = entry.value else {
            return Err(damaged(bucket, "a row is a bucket"));
        };
        show(entry.key, value).map_err(|what| damaged(bucket, what))?;
    }
    Ok(())
}

fn count<R: Read + Seek>(
    reader: &mut Reader<R>,
    bucket: &'static str,
) -> Result<u64, EtcdFileError> {
    let mut count = 0;
    rows(reader, bucket, |_, _| {
        count += 1;
        Ok(())
    })?;
    Ok(count)
}

fn summary<R: Read + Seek>(reader: &mut Reader<R>) -> Result<Summary, EtcdFileError> {
    let newest = newest_record(reader)?;
    let meta = Meta::read(reader)?;
    let (mut members, mut alarms, mut cluster_version) = (Vec::new(), Vec::new(), None);
    rows(reader, MEMBERS, |_, value| {
        let member = serde_json::from_slice::<FileMember>(value);
        push(&mut members, member.map_err(|error| error.to_string())?)
    })?;
    rows(reader, ALARM, |key, _| {
        push(&mut alarms, AlarmMember::decode(key).map_err(|error| error.to_string())?)
    })?;
    rows(reader, CLUSTER, |key, value| {
        if key == CLUSTER_VERSION {
            cluster_version = Some(text(value)?);
        }
        Ok(())
    })?;
    Ok(Summary {
        revision: newest.max(meta.scheduled).max(meta.finished).max(1),
        compacted: meta.scheduled.max(meta.finished),
        applied: meta.applied,
        storage_version: meta.storage_version,
        cluster_version,
        members,
        removed: count(reader, MEMBERS_REMOVED)?,
        alarms,
        leases: count(reader, LEASE)?,
        auth: auth(reader)?,
    })
}

/// The revision of the last record.
fn newest_record<R: Read + Seek>(reader: &mut Reader<R>) -> Result<i64, EtcdFileError> {
    let bucket = reader.bucket(KEY.as_bytes())?.ok_or(EtcdFileError::NotEtcds(KEY))?;
    let Some(last) = reader.last_key(&bucket)? else { return Ok(0) };
    let (at, _) = EtcdKey::parse(&last).ok_or_else(|| damaged(KEY, "a key is no revision"))?;
    Ok(at.main)
}

/// The rows of `meta` that matter here.
struct Meta {
    applied: Position,
    scheduled: i64,
    finished: i64,
    storage_version: Option<String>,
}

impl Meta {
    fn read<R: Read + Seek>(reader: &mut Reader<R>) -> Result<Self, EtcdFileError> {
        let applied = Position { index: 0, term: 0 };
        let mut meta = Self { applied, scheduled: -1, finished: -1, storage_version: None };
        rows(reader, META, |key, value| {
            match key {
                CONSISTENT_INDEX => meta.applied.index = number(value)?,
                TERM => meta.applied.term = number(value)?,
                SCHEDULED_COMPACTION => meta.scheduled = compaction(value)?,
                FINISHED_COMPACTION => meta.finished = compaction(value)?,
                STORAGE_VERSION => meta.storage_version = Some(text(value)?),
                _ => {}
            }
            Ok(())
        })?;
        Ok(meta)
    }
}

fn auth<R: Read + Seek>(reader: &mut Reader<R>) -> Result<Auth, EtcdFileError> {
    let mut enabled = false;
    rows(reader, AUTH, |key, value| {
        // Anything but what etcd writes to switch it off counts as on.
        enabled |= key == AUTH_ENABLED && value != [0];
        Ok(())
    })?;
    Ok(Auth { enabled, users: count(reader, AUTH_USERS)?, roles: count(reader, AUTH_ROLES)? })
}

fn push<T>(rows: &mut Vec<T>, row: T) -> Result<(), String> {
    if rows.len() == MAX_ROWS {
        return Err(format!("there are more than {MAX_ROWS} rows"));
    }
    rows.push(row);
    Ok(())
}

fn number(value: &[u8]) -> Result<u64, String> {
    let bytes = value.try_into().map_err(|_| "a number has not 8 bytes".to_owned())?;
    Ok(u64::from_be_bytes(bytes))
}

fn compaction(value: &[u8]) -> Result<i64, String> {
    let parsed = EtcdKey::parse(value).ok_or("a compaction is no revision")?;
    Ok(parsed.0.main)
}

fn text(value: &[u8]) -> Result<String, String> {
    String::from_utf8(value.to_vec()).map_err(|error| error.to_string())
}
