//! Opens a snapshot and reads all of it: the proof that a cluster can be made from it.
//!
//! The file counts as untrusted. Memory is bounded whatever its size: one page of each level of a
//! tree, and the hashes of [`MAX_COUNTED_KEYS`] keys.

use std::collections::HashSet;
use std::io::{self, Read, Seek, SeekFrom};

use data_encoding::HEXLOWER;
use node_bbolt::{BboltReadError, BboltReader, EntryValue};
use node_proto::mvccpb::KeyValue;
use prost::Message as _;
use ring::digest;

use super::manifest::SnapshotFacts;
use super::progress::BackupProgress;

/// Number of bytes of a SHA-256 hash.
const HASH_BYTES: u64 = 32;
/// Size in bytes of a sector. A database has whole sectors; a snapshot is longer by [`HASH_BYTES`].
const SECTOR_BYTES: u64 = 512;
/// Bytes that are hashed at once.
const BUFFER_BYTES: usize = 256 << 10;
/// Number of records (revisions of keys) for each pass over the snapshot that counts keys. It
/// limits the memory of a pass.
const MAX_COUNTED_KEYS: u64 = 1 << 20;
/// Maximum number of buckets. etcd has about a dozen.
const MAX_BUCKETS: usize = 1000;

/// Bucket of the records: revision → `mvccpb.KeyValue`.
const KEY: &str = "key";
/// Bucket with facts about the store.
const META: &str = "meta";
/// Rows of [`META`] with the revision of the last compaction.
const COMPACTIONS: [&[u8]; 2] = [b"scheduledCompactRev", b"finishedCompactRev"];

/// Why no cluster can be made from a snapshot.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InspectError {
    /// The file can't be read.
    #[error("the snapshot's file can't be read")]
    Io(#[source] io::Error),
    /// The file's length can't be that of a database followed by a hash.
    #[error("the snapshot of {0} bytes has no SHA-256 at its end: it was cut off")]
    NoHash(u64),
    /// The hash at the end doesn't match the file's content.
    #[error(
        "the snapshot's SHA-256 is {found}, and its end says {expected}: it was cut off or changed"
    )]
    WrongHash {
        /// Hash at the end of the file, in hexadecimal.
        expected: String,
        /// Hash of the file's content.
        found: String,
    },
    /// The file is damaged, or isn't a bbolt file.
    #[error("the snapshot's database is damaged")]
    Database(#[source] BboltReadError),
    /// The database isn't etcd's.
    #[error("the snapshot's database has no bucket {0:?}: it isn't etcd's")]
    MissingBucket(&'static str),
    /// A row has a content that etcd never writes.
    #[error("the snapshot's database is damaged: {0}")]
    Row(String),
}

impl From<BboltReadError> for InspectError {
    fn from(error: BboltReadError) -> Self {
        match error {
            BboltReadError::Io(error) => Self::Io(error),
            error => Self::Database(error),
        }
    }
}

/// Reads a whole snapshot file, its hash included.
pub(super) fn inspect(
    mut source: impl Read + Seek,
    progress: &BackupProgress,
) -> Result<SnapshotFacts, InspectError> {
    let (bytes, sha256) = check_hash(&mut source, progress)?;
    let mut reader = BboltReader::open(source)?;
    let RowFacts { hash, newest, compacted, records } = read_rows(&mut reader)?;
    let keys = count_keys(&mut reader, records)?;
    let revision = newest.max(compacted).max(1);
    Ok(SnapshotFacts { bytes, sha256, hash, revision, records, keys })
}

/// Compares the file's content with the hash at its end. Returns the file's size and the hash.
fn check_hash(
    source: &mut (impl Read + Seek),
    progress: &BackupProgress,
) -> Result<(u64, String), InspectError> {
    let bytes = source.seek(SeekFrom::End(0)).map_err(InspectError::Io)?;
    if bytes % SECTOR_BYTES != HASH_BYTES || bytes == HASH_BYTES {
        return Err(InspectError::NoHash(bytes));
    }
    source.seek(SeekFrom::Start(0)).map_err(InspectError::Io)?;
    let mut hash = digest::Context::new(&digest::SHA256);
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut left = bytes - HASH_BYTES;
    while left > 0 {
        let length = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        source.read_exact(&mut buffer[..length]).map_err(InspectError::Io)?;
        hash.update(&buffer[..length]);
        progress.add(length);
        left -= length as u64;
    }
    let mut expected = [0; 32];
    source.read_exact(&mut expected).map_err(InspectError::Io)?;
    let (found, expected) = (HEXLOWER.encode(hash.finish().as_ref()), HEXLOWER.encode(&expected));
    if found != expected {
        return Err(InspectError::WrongHash { expected, found });
    }
    Ok((bytes, found))
}

/// Facts from one pass over all rows of all buckets.
#[derive(Default)]
struct RowFacts {
    /// CRC-32C over the names of all buckets and all their rows.
    hash: u32,
    /// Revision of the last record.
    newest: u64,
    /// Revision of the last compaction.
    compacted: u64,
    records: u64,
}

fn read_rows<R: Read + Seek>(reader: &mut BboltReader<R>) -> Result<RowFacts, InspectError> {
    let mut names: Vec<Vec<u8>> = Vec::new();
    let root = reader.root();
    let mut buckets = reader.entries(&root)?;
    while let Some(entry) = buckets.next()? {
        if names.len() == MAX_BUCKETS {
            return Err(InspectError::Row(format!("there are more than {MAX_BUCKETS} buckets")));
        }
        names.push(entry.key.to_vec());
    }
    if let Some(missing) =
        [KEY, META].into_iter().find(|name| !names.iter().any(|found| found == name.as_bytes()))
    {
        return Err(InspectError::MissingBucket(missing));
    }
    let mut facts = RowFacts::default();
    for name in names {
        facts.hash = crc32c::crc32c_append(facts.hash, &name);
        let Some(bucket) = reader.find_bucket(&name)? else { continue };
        let mut rows = reader.entries(&bucket)?;
        while let Some(row) = rows.next()? {
            let EntryValue::Bytes(value) = row.value else { continue };
            facts.hash = crc32c::crc32c_append(facts.hash, row.key);
            facts.hash = crc32c::crc32c_append(facts.hash, value);
            if name == KEY.as_bytes() {
                facts.newest = facts.newest.max(Record::parse(row.key, value)?.revision);
                facts.records += 1;
            } else if name == META.as_bytes() && COMPACTIONS.contains(&row.key) {
                let (revision, _) = parse_revision(value)
                    .ok_or_else(|| InspectError::Row("a compaction is no revision".to_owned()))?;
                facts.compacted = facts.compacted.max(revision);
            }
        }
    }
    Ok(facts)
}

/// A row of the bucket [`KEY`].
struct Record {
    revision: u64,
    /// The key; `None` for the empty record that `--bump-revision` leaves.
    key: Option<bytes::Bytes>,
    is_tombstone: bool,
}

impl Record {
    fn parse(row: &[u8], value: &[u8]) -> Result<Self, InspectError> {
        let (revision, is_tombstone) = parse_revision(row)
            .ok_or_else(|| InspectError::Row("a record's key is no revision".to_owned()))?;
        if value.is_empty() {
            return Ok(Self { revision, key: None, is_tombstone });
        }
        let damaged = |what: &str| InspectError::Row(format!("the record at {revision} {what}"));
        let kv = KeyValue::decode(value).map_err(|_| damaged("can't be decoded"))?;
        if kv.key.is_empty() {
            return Err(damaged("has no key"));
        }
        if !is_tombstone && u64::try_from(kv.mod_revision) != Ok(revision) {
            return Err(damaged("is of another revision"));
        }
        Ok(Self { revision, key: Some(kv.key), is_tombstone })
    }
}

/// Parses a revision as etcd writes it: main, `_`, sub, and `t` for a tombstone.
fn parse_revision(row: &[u8]) -> Option<(u64, bool)> {
    let (main, rest) = row.split_first_chunk()?;
    let (_sub, mark): (&[u8; 8], _) = rest.strip_prefix(b"_")?.split_first_chunk()?;
    let main = u64::try_from(i64::from_be_bytes(*main)).ok()?;
    match mark {
        [] => Some((main, false)),
        b"t" => Some((main, true)),
        _ => None,
    }
}

/// Counts the keys that exist at the newest revision. Each pass counts only keys whose hash, modulo
/// the number of passes, is the number of the pass.
fn count_keys<R: Read + Seek>(
    reader: &mut BboltReader<R>,
    records: u64,
) -> Result<u64, InspectError> {
    let passes = records / MAX_COUNTED_KEYS + 1;
    let mut keys = 0;
    for pass in 0..passes {
        let mut live = HashSet::new();
        let Some(bucket) = reader.find_bucket(KEY.as_bytes())? else { break };
        let mut rows = reader.entries(&bucket)?;
        while let Some(row) = rows.next()? {
            let EntryValue::Bytes(value) = row.value else { continue };
            let record = Record::parse(row.key, value)?;
            let Some(key) = record.key else { continue };
            let hash = digest::digest(&digest::SHA256, &key);
            let hash = u128::from_le_bytes(*hash.as_ref().first_chunk().expect("32 bytes"));
            if hash % u128::from(passes) != u128::from(pass) {
                continue;
            }
            if record.is_tombstone {
                live.remove(&hash);
            } else {
                live.insert(hash);
            }
        }
        keys += live.len() as u64;
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    /// Snapshots of stock etcd 3.4.23, 3.6.16 and 3.7.3, saved by etcdctl.
    const FILES: [&[u8]; 4] = [
        include_bytes!("../../../node/state/src/etcd_file/fixtures/etcd-3.4.db"),
        include_bytes!("../../../node/state/src/etcd_file/fixtures/etcd-3.6.db"),
        include_bytes!("../../../node/state/src/etcd_file/fixtures/etcd-3.7.db"),
        include_bytes!("../../../node/state/src/etcd_file/fixtures/etcd-3.7-auth-and-leases.db"),
    ];

    fn inspect_bytes(file: &[u8]) -> Result<SnapshotFacts, InspectError> {
        inspect(Cursor::new(file), &BackupProgress::default())
    }

    #[test]
    fn snapshots_of_stock_etcd_are_read_whole() {
        let all = FILES.map(|file| {
            let facts = inspect_bytes(file).unwrap();
            assert_eq!(facts.bytes, file.len() as u64);
            (facts.revision, facts.records, facts.keys, facts.hash)
        });
        // The hash and the number of keys are those that `etcdutl snapshot status` shows.
        assert_eq!(
            all,
            [
                (28, 33, 11, 2_816_394_654),
                (18, 18, 7, 1_196_864_802),
                (28, 33, 11, 3_846_237_629),
                (32, 37, 14, 873_774_481),
            ]
        );
    }

    #[test]
    fn a_cut_off_or_changed_snapshot_is_refused() {
        for file in FILES {
            for length in [0, 32, 512, file.len() / 2, file.len() - 32, file.len() - 1] {
                assert!(inspect_bytes(&file[..length]).is_err(), "{length}");
            }
            let mut changed = file.to_vec();
            changed[file.len() / 2] ^= 1;
            let error = inspect_bytes(&changed).unwrap_err();
            assert!(matches!(error, InspectError::WrongHash { .. }), "{error}");
        }
    }

    /// Appends the matching hash to a database. A node also sends a matching hash if its database
    /// is damaged.
    fn with_hash(mut database: Vec<u8>) -> Vec<u8> {
        let hash = digest::digest(&digest::SHA256, &database);
        database.extend_from_slice(hash.as_ref());
        database
    }

    #[test]
    fn a_damaged_database_with_a_right_hash_is_refused_and_never_panics() {
        let database = &FILES[0][..FILES[0].len() - 32];
        assert!(inspect_bytes(&with_hash(database.to_vec())).is_ok());
        assert!(inspect_bytes(&with_hash(vec![0; 4096])).is_err());
        let facts = inspect_bytes(FILES[0]).unwrap();
        let mut refused = 0;
        for at in (0..database.len()).step_by(97) {
            let mut changed = database.to_vec();
            changed[at] ^= 0xff;
            // A change in a free page or in a value doesn't damage the tree.
            match inspect_bytes(&with_hash(changed)) {
                Ok(changed) => assert!(changed.keys <= facts.records),
                Err(_) => refused += 1,
            }
        }
        assert!(refused > 0);
    }

    #[test]
    fn keys_are_counted_alike_in_one_pass_and_in_many() {
        let facts = inspect_bytes(FILES[2]).unwrap();
        let mut reader = BboltReader::open(Cursor::new(FILES[2])).unwrap();
        let in_passes = count_keys(&mut reader, 5 * MAX_COUNTED_KEYS).unwrap();
        assert_eq!(in_passes, facts.keys);
    }
}
