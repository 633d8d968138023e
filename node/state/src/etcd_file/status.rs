//! Status of a snapshot file, as `etcdutl snapshot status` shows it
//! (etcdutl/snapshot/v3_snapshot.go, `Status`).

use std::collections::BTreeSet;
use std::io::{Read, Seek};

use node_bbolt::{BboltReader, EntryValue};
use node_proto::mvccpb::KeyValue;
use prost::Message as _;
use serde::Serialize;

use super::EtcdFileError;
use super::names::{KEY, META, STORAGE_VERSION};
use crate::mvcc::EtcdKey;

/// Status of a snapshot file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FileStatus {
    /// CRC-32C over the names of all buckets, and the keys and values of all their rows.
    pub hash: u32,
    /// Newest revision in the file.
    pub revision: i64,
    /// Number of keys that exist at the newest revision.
    #[serde(rename = "totalKey")]
    pub total_keys: u64,
    /// Size of the database in bytes.
    #[serde(rename = "totalSize")]
    pub total_size: u64,
    /// Version of the database schema; empty before etcd 3.6.
    pub version: String,
}

impl FileStatus {
    /// Reads a whole file and returns its status.
    pub fn read(source: impl Read + Seek) -> Result<Self, EtcdFileError> {
        let mut reader = BboltReader::open(source)?;
        let mut status = Self { total_size: reader.file_bytes(), ..Self::default() };
        let mut names: Vec<Vec<u8>> = Vec::new();
        let root = reader.root();
        let mut buckets = reader.entries(&root)?;
        while let Some(entry) = buckets.next()? {
            names.push(entry.key.to_vec());
        }
        let mut keys = BTreeSet::new();
        for name in names {
            status.hash = crc32c::crc32c_append(status.hash, &name);
            let Some(bucket) = reader.find_bucket(&name)? else { continue };
            let mut rows = reader.entries(&bucket)?;
            while let Some(row) = rows.next()? {
                let EntryValue::Bytes(value) = row.value else { continue };
                status.hash = crc32c::crc32c_append(status.hash, row.key);
                status.hash = crc32c::crc32c_append(status.hash, value);
                if name == KEY.as_bytes() {
                    status.revision = apply_record(row.key, value, &mut keys)?;
                } else if name == META.as_bytes() && row.key == STORAGE_VERSION {
                    status.version = String::from_utf8_lossy(value).into_owned();
                }
            }
        }
        status.total_keys = keys.len() as u64;
        Ok(status)
    }
}

/// Applies a record to the set of existing keys, and returns its revision.
fn apply_record(
    at: &[u8],
    record: &[u8],
    keys: &mut BTreeSet<bytes::Bytes>,
) -> Result<i64, EtcdFileError> {
    let damaged = |what: String| EtcdFileError::DamagedRow { bucket: KEY, what };
    let parsed = EtcdKey::parse(at).ok_or_else(|| damaged("a key is no revision".to_owned()))?;
    let (revision, is_tombstone) = parsed;
    let kv = KeyValue::decode(record).map_err(|error| damaged(error.to_string()))?;
    if is_tombstone {
        keys.remove(&kv.key);
    } else {
        keys.insert(kv.key);
    }
    Ok(revision.main)
}
