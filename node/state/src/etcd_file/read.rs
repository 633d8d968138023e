//! Reads an etcd file, so that a store can be made from it.

use std::io::{Read, Seek, SeekFrom};

use node_bbolt::{BboltReader, BucketEntries, EntryValue};
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
use crate::mvcc::{EtcdKey, Revision};
use crate::state_machine::Position;

/// Number of bytes of a SHA-256 hash.
const HASH_BYTES: u64 = 32;
/// The size of a database is a multiple of this. If a file is 32 bytes longer than such a multiple,
/// etcd takes it for a file with a hash.
const SECTOR_BYTES: u64 = 512;
/// Maximum number of rows that are read from each of the buckets of members, alarms, users and
/// roles. No real cluster has this many.
const MAX_ROWS: usize = 100_000;
/// Maximum number of leases that are read, so that they fit into memory with their keys.
const MAX_LEASES: usize = 10_000_000;

/// Whether the hash at the end of a file is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HashCheck {
    /// The hash must be present and right.
    Required,
    /// The hash may be missing or wrong.
    Skipped,
}

/// Summary of the authentication data in a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AuthSummary {
    /// Whether authentication was enabled.
    pub enabled: bool,
    pub users: u64,
    pub roles: u64,
}

/// A member of the file's cluster, as etcd stores it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileMember {
    /// Id of the member.
    pub id: u64,
    /// URLs under which peers reached the member.
    #[serde(rename = "peerURLs", default)]
    pub peer_urls: Vec<String>,
    /// Whether the member was a learner, which had no vote.
    #[serde(rename = "isLearner", default, skip_serializing_if = "std::ops::Not::not")]
    pub is_learner: bool,
    /// Name of the member; empty if it never started.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// URLs under which clients reached the member.
    #[serde(rename = "clientURLs", default, skip_serializing_if = "Vec::is_empty")]
    pub client_urls: Vec<String>,
}

/// Contents of a file except its records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSummary {
    /// Newest revision of the store.
    pub revision: i64,
    /// Revision of the last compaction; -1 for none.
    pub compacted: i64,
    /// Position of the last entry that the old member had applied; the term is 0 before etcd 3.5.
    pub applied: Position,
    /// Version of the database schema; `None` before etcd 3.6.
    pub storage_version: Option<String>,
    /// Version of the old cluster.
    pub cluster_version: Option<String>,
    /// Members of the old cluster.
    pub members: Vec<FileMember>,
    /// Number of members that were removed from the old cluster.
    pub removed: u64,
    /// Alarms that were raised.
    pub alarms: Vec<AlarmMember>,
    /// Number of leases in the file.
    pub leases: u64,
    /// Summary of users and roles.
    pub auth: AuthSummary,
}

/// An open snapshot file of etcd.
pub struct EtcdFile<R> {
    reader: BboltReader<R>,
    summary: FileSummary,
}

impl<R: Read + Seek> EtcdFile<R> {
    /// Opens a file and reads everything but its records. To check the hash, the whole file is
    /// read.
    pub fn open(mut source: R, check: HashCheck) -> Result<Self, EtcdFileError> {
        if check == HashCheck::Required {
            check_hash(&mut source)?;
        }
        let mut reader = BboltReader::open(source)?;
        let summary = summary(&mut reader)?;
        Ok(Self { reader, summary })
    }

    /// Returns the contents of the file except its records.
    #[must_use]
    pub fn summary(&self) -> &FileSummary {
        &self.summary
    }

    /// Returns the size of the database in bytes, without the hash.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.reader.file_bytes()
    }

    /// Begins to read the records.
    pub fn records(&mut self) -> Result<RecordReader<'_, R>, EtcdFileError> {
        let bucket = self.reader.find_bucket(KEY.as_bytes())?;
        let bucket = bucket.ok_or(EtcdFileError::MissingBucket(KEY))?;
        let entries = self.reader.entries(&bucket)?;
        Ok(RecordReader { entries, newest: self.summary.revision })
    }

    /// Reads the users, roles and authentication state.
    pub fn auth(&mut self) -> Result<AuthState, EtcdFileError> {
        let (mut users, mut roles) = (Vec::new(), Vec::new());
        for_each_row(&mut self.reader, AUTH_USERS, |_, value| {
            push(&mut users, authpb::User::decode(value).map_err(|error| error.to_string())?)
        })?;
        for_each_row(&mut self.reader, AUTH_ROLES, |_, value| {
            push(&mut roles, authpb::Role::decode(value).map_err(|error| error.to_string())?)
        })?;
        let mut revision = AuthState::default().revision();
        for_each_row(&mut self.reader, AUTH, |key, value| {
            if key == AUTH_REVISION {
                revision = decode_number(value)?;
            }
            Ok(())
        })?;
        let state = AuthState::from_rows(self.summary.auth.enabled, revision, users, roles);
        state.map_err(|what| damaged(AUTH, what))
    }

    /// Reads the leases. The keys attached to a lease are known from the records.
    pub fn leases(&mut self) -> Result<Vec<Lease>, EtcdFileError> {
        let mut leases = Vec::new();
        for_each_row(&mut self.reader, LEASE, |key, value| {
            if leases.len() == MAX_LEASES {
                return Err(format!("there are more than {MAX_LEASES} rows"));
            }
            leases.push(decode_lease(key, value)?);
            Ok(())
        })?;
        Ok(leases)
    }
}

/// Reader of the records in a file.
pub struct RecordReader<'a, R> {
    entries: BucketEntries<'a, R>,
    /// Newest revision in the tree's last page. In a damaged tree, an earlier page may contain a
    /// higher revision.
    newest: i64,
}

impl<R: Read + Seek> RecordReader<'_, R> {
    /// Passes each record, an encoded `KeyValue`, to `take`, in the order of revisions. After an
    /// error, the records that were passed before must not be used either.
    pub fn for_each<E: From<EtcdFileError>>(
        mut self,
        mut take: impl FnMut(Revision, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut last = Revision::default();
        while let Some(entry) = self.entries.next().map_err(EtcdFileError::from)? {
            let (at, is_tombstone) =
                EtcdKey::parse(entry.key).ok_or_else(|| damaged(KEY, "a key is no revision"))?;
            // A revision may occur only once: as a put or as a tombstone.
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
            let EntryValue::Bytes(record) = entry.value else {
                return Err(damaged(KEY, format!("{at:?} is a bucket")).into());
            };
            // etcd's `--bump-revision` leaves a revision with an empty record. It is no change of a
            // key, so it is left out.
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

/// Checks that a record can be stored at revision `at`, since our store relies on its fields.
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

/// Decodes and checks the row of a lease. etcd never writes a lease without a TTL.
fn decode_lease(key: &[u8], value: &[u8]) -> Result<Lease, String> {
    let row = leasepb::Lease::decode(value).map_err(|error| error.to_string())?;
    let leasepb::Lease { id, ttl, remaining_ttl: left } = row;
    let proper = id != 0 && key == id.to_be_bytes() && (1..=MAX_TTL).contains(&ttl);
    if !proper || !(0..=ttl).contains(&left) {
        return Err(format!("a lease can't be: {row:?}"));
    }
    Ok(Lease { id, ttl, remaining_ttl: left, grant_index: 0 })
}

fn decode(record: &[u8]) -> Result<KeyValue, EtcdFileError> {
    KeyValue::decode(record).map_err(|error| damaged(KEY, error.to_string()))
}

fn damaged(bucket: &'static str, what: impl Into<String>) -> EtcdFileError {
    EtcdFileError::DamagedRow { bucket, what: what.into() }
}

/// Compares the contents of the file with the hash at its end.
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

/// Passes each row of a bucket to `show`. A missing bucket has no rows.
fn for_each_row<R: Read + Seek>(
    reader: &mut BboltReader<R>,
    bucket: &'static str,
    mut show: impl FnMut(&[u8], &[u8]) -> Result<(), String>,
) -> Result<(), EtcdFileError> {
    let Some(found) = reader.find_bucket(bucket.as_bytes())? else { return Ok(()) };
    let mut entries = reader.entries(&found)?;
    while let Some(entry) = entries.next()? {
        let EntryValue::Bytes(value) = entry.value else {
            return Err(damaged(bucket, "a row is a bucket"));
        };
        show(entry.key, value).map_err(|what| damaged(bucket, what))?;
    }
    Ok(())
}

fn count_rows<R: Read + Seek>(
    reader: &mut BboltReader<R>,
    bucket: &'static str,
) -> Result<u64, EtcdFileError> {
    let mut count = 0;
    for_each_row(reader, bucket, |_, _| {
        count += 1;
        Ok(())
    })?;
    Ok(count)
}

fn summary<R: Read + Seek>(reader: &mut BboltReader<R>) -> Result<FileSummary, EtcdFileError> {
    let newest = newest_record(reader)?;
    let meta = MetaBucket::read(reader)?;
    let (mut members, mut alarms, mut cluster_version) = (Vec::new(), Vec::new(), None);
    for_each_row(reader, MEMBERS, |_, value| {
        let member = serde_json::from_slice::<FileMember>(value);
        push(&mut members, member.map_err(|error| error.to_string())?)
    })?;
    for_each_row(reader, ALARM, |key, _| {
        push(&mut alarms, AlarmMember::decode(key).map_err(|error| error.to_string())?)
    })?;
    for_each_row(reader, CLUSTER, |key, value| {
        if key == CLUSTER_VERSION {
            cluster_version = Some(decode_text(value)?);
        }
        Ok(())
    })?;
    Ok(FileSummary {
        revision: newest.max(meta.scheduled).max(meta.finished).max(1),
        compacted: meta.scheduled.max(meta.finished),
        applied: meta.applied,
        storage_version: meta.storage_version,
        cluster_version,
        members,
        removed: count_rows(reader, MEMBERS_REMOVED)?,
        alarms,
        leases: count_rows(reader, LEASE)?,
        auth: auth(reader)?,
    })
}

/// Returns the revision of the last record, or 0 if there is none.
fn newest_record<R: Read + Seek>(reader: &mut BboltReader<R>) -> Result<i64, EtcdFileError> {
    let bucket = reader.find_bucket(KEY.as_bytes())?.ok_or(EtcdFileError::MissingBucket(KEY))?;
    let Some(last) = reader.last_key(&bucket)? else { return Ok(0) };
    let (at, _) = EtcdKey::parse(&last).ok_or_else(|| damaged(KEY, "a key is no revision"))?;
    Ok(at.main)
}

/// The rows of the bucket `meta` that are used here.
struct MetaBucket {
    applied: Position,
    scheduled: i64,
    finished: i64,
    storage_version: Option<String>,
}

impl MetaBucket {
    fn read<R: Read + Seek>(reader: &mut BboltReader<R>) -> Result<Self, EtcdFileError> {
        let applied = Position { index: 0, term: 0 };
        let mut meta = Self { applied, scheduled: -1, finished: -1, storage_version: None };
        for_each_row(reader, META, |key, value| {
            match key {
                CONSISTENT_INDEX => meta.applied.index = decode_number(value)?,
                TERM => meta.applied.term = decode_number(value)?,
                SCHEDULED_COMPACTION => meta.scheduled = decode_compaction(value)?,
                FINISHED_COMPACTION => meta.finished = decode_compaction(value)?,
                STORAGE_VERSION => meta.storage_version = Some(decode_text(value)?),
                _ => {}
            }
            Ok(())
        })?;
        Ok(meta)
    }
}

fn auth<R: Read + Seek>(reader: &mut BboltReader<R>) -> Result<AuthSummary, EtcdFileError> {
    let mut enabled = false;
    for_each_row(reader, AUTH, |key, value| {
        // Any value except the one that etcd writes to disable authentication counts as enabled.
        enabled |= key == AUTH_ENABLED && value != [0];
        Ok(())
    })?;
    Ok(AuthSummary {
        enabled,
        users: count_rows(reader, AUTH_USERS)?,
        roles: count_rows(reader, AUTH_ROLES)?,
    })
}

fn push<T>(rows: &mut Vec<T>, row: T) -> Result<(), String> {
    if rows.len() == MAX_ROWS {
        return Err(format!("there are more than {MAX_ROWS} rows"));
    }
    rows.push(row);
    Ok(())
}

fn decode_number(value: &[u8]) -> Result<u64, String> {
    let bytes = value.try_into().map_err(|_| "a number has not 8 bytes".to_owned())?;
    Ok(u64::from_be_bytes(bytes))
}

fn decode_compaction(value: &[u8]) -> Result<i64, String> {
    let parsed = EtcdKey::parse(value).ok_or("a compaction is no revision")?;
    Ok(parsed.0.main)
}

fn decode_text(value: &[u8]) -> Result<String, String> {
    String::from_utf8(value.to_vec()).map_err(|error| error.to_string())
}
