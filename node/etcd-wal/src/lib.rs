//! Reads from etcd's write-ahead log what a recovery needs: the ids of cluster and member, the last
//! entry, and the commit index.
//!
//! The log is a series of files named `SEQUENCE-INDEX.wal`. A record consists of a length, a
//! protobuf message and padding. The low 56 bits of the length are the size of the message. If its
//! highest bit is set, three more bits are the number of padding bytes. A length of 0 ends a file.
//!
//! Each record's CRC-32C continues from that of the record before. Each file begins with the CRC of
//! the file before, the metadata and the hard state. So older files may be deleted. (Source:
//! `server/storage/wal` of etcd 3.4 to 3.7.)

use std::fs::File;
use std::io::{self, BufReader, Read as _};
use std::path::{Path, PathBuf};

use node_consensus::Position;
use prost::Message;

/// Number of bytes of a record's length field.
const FRAME_BYTES: u64 = 8;
/// Number of bytes that a disk writes atomically. A record that contains a sector of nothing but
/// zeros counts as incompletely written.
const SECTOR_BYTES: usize = 512;
/// Record type of the metadata: cluster id and member id.
const METADATA: i64 = 1;
/// Record type of a log entry.
const ENTRY: i64 = 2;
/// Record type of the hard state: term, vote and commit index.
const STATE: i64 = 3;
/// Record type of the checksum at the start of a file.
const CRC: i64 = 4;
/// Record type of a snapshot's index and term.
const SNAPSHOT: i64 = 5;
/// Entry type of a membership change.
const CONF_CHANGE: i32 = 1;
/// Type of a membership change that removes a member.
const REMOVE_NODE: i32 = 1;

#[derive(Clone, PartialEq, Message)]
struct WalRecord {
    #[prost(int64, optional, tag = "1")]
    kind: Option<i64>,
    #[prost(uint32, optional, tag = "2")]
    crc: Option<u32>,
    #[prost(bytes = "vec", optional, tag = "3")]
    data: Option<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
struct WalMetadata {
    #[prost(uint64, optional, tag = "1")]
    member: Option<u64>,
    #[prost(uint64, optional, tag = "2")]
    cluster: Option<u64>,
}

#[derive(Clone, PartialEq, Message)]
struct WalEntry {
    #[prost(int32, optional, tag = "1")]
    kind: Option<i32>,
    #[prost(uint64, optional, tag = "2")]
    term: Option<u64>,
    #[prost(uint64, optional, tag = "3")]
    index: Option<u64>,
    #[prost(bytes = "vec", optional, tag = "4")]
    data: Option<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
struct WalConfChange {
    #[prost(int32, optional, tag = "2")]
    kind: Option<i32>,
    #[prost(uint64, optional, tag = "3")]
    member: Option<u64>,
}

/// Raft's hard state, as etcd writes it.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct HardState {
    #[prost(uint64, optional, tag = "1")]
    pub term: Option<u64>,
    #[prost(uint64, optional, tag = "2")]
    pub vote: Option<u64>,
    #[prost(uint64, optional, tag = "3")]
    pub commit: Option<u64>,
}

#[derive(Clone, PartialEq, Message)]
struct SnapshotMark {
    #[prost(uint64, optional, tag = "1")]
    index: Option<u64>,
    #[prost(uint64, optional, tag = "2")]
    term: Option<u64>,
}

/// Why an etcd log can't be used.
#[derive(Debug, thiserror::Error)]
pub enum WalError {
    /// An operation on the disk failed.
    #[error("cannot {action} {}", path.display())]
    Disk {
        /// Operation that was attempted.
        action: &'static str,
        /// Path of the file or folder on which the operation failed.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A file of the log has a content that etcd never writes.
    #[error("{} is corrupt at offset {offset}: {what}", path.display())]
    Corrupt {
        /// Path of the damaged file.
        path: PathBuf,
        /// Offset of the record in the file.
        offset: u64,
        /// Description of the problem.
        what: &'static str,
    },
    /// The folder of the log, or a file or record of the log, is missing.
    #[error("{}: {what}", path.display())]
    Missing {
        /// Path of the log's folder.
        path: PathBuf,
        /// Description of what is missing.
        what: &'static str,
    },
}

/// End of the log in its files: the place at which the next record is written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogTail {
    /// Name of the log's last file.
    pub file: String,
    /// Number of bytes written in the log's last file.
    pub offset: u64,
    crc: u32,
    /// Whether an incompletely written record follows the last complete record.
    pub torn: bool,
}

/// Contents of an etcd log, as far as a recovery needs them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EtcdLog {
    /// Id of the cluster to which the log belongs.
    pub cluster: u64,
    /// Id of the member to which the log belongs.
    pub member: u64,
    /// Raft's hard state, as last written.
    pub state: HardState,
    /// Index just before the log's first entry.
    pub base: u64,
    /// Position of the last entry, or of a later snapshot; `None` if the log has neither.
    pub last: Option<Position>,
    /// First position of each term in the log, in order.
    pub terms: Vec<Position>,
    /// Entries in the log that remove a member, as (index of the entry, id of the member).
    pub removals: Vec<(u64, u64)>,
    /// Place in the log's files at which the next record is written.
    pub tail: LogTail,
}

impl EtcdLog {
    /// Reads the log in `folder`, without writing anything.
    pub fn read(folder: &Path) -> Result<Self, WalError> {
        let files = log_file_names(folder)?;
        let mut log = Self::default();
        let mut whose = false;
        for (n, name) in files.iter().enumerate() {
            let path = folder.join(name);
            let disk = |source| WalError::Disk { action: "read", path: path.clone(), source };
            let file = File::open(&path).map_err(disk)?;
            let bytes = file.metadata().map_err(disk)?.len();
            log.tail = LogTail { file: name.clone(), crc: log.tail.crc, ..LogTail::default() };
            let reader = BufReader::new(file);
            let last = n + 1 == files.len();
            let mut file = WalFile { path: &path, reader, bytes, last };
            while let Some(record) = file.next(&mut log.tail)? {
                let data = record.data.as_deref().unwrap_or_default();
                let taken = log.apply_record(record.kind.unwrap_or_default(), data);
                let what = "a record is not what it says";
                whose |= taken.map_err(|_| file.corrupt(log.tail.offset, what))?;
            }
        }
        if !whose {
            let what = "the log has no metadata record";
            return Err(WalError::Missing { path: folder.to_owned(), what });
        }
        Ok(log)
    }

    /// Applies one record to this state. Returns whether the record is the metadata.
    fn apply_record(&mut self, kind: i64, data: &[u8]) -> Result<bool, prost::DecodeError> {
        match kind {
            METADATA => {
                let metadata = WalMetadata::decode(data)?;
                self.cluster = metadata.cluster.unwrap_or_default();
                self.member = metadata.member.unwrap_or_default();
                return Ok(true);
            }
            ENTRY => self.apply_entry(&WalEntry::decode(data)?)?,
            STATE => self.state = HardState::decode(data)?,
            SNAPSHOT => {
                let mark = SnapshotMark::decode(data)?;
                let index = mark.index.unwrap_or_default();
                // If the snapshot's index is higher than the last entry's, the snapshot came from
                // the leader and has replaced all entries.
                if self.last.is_none_or(|last| last.index < index) {
                    let last = Position { index, term: mark.term.unwrap_or_default() };
                    self.last = Some(last);
                    self.base = index;
                    self.terms = vec![last];
                    self.removals.clear();
                }
            }
            _ => {}
        }
        Ok(false)
    }

    fn apply_entry(&mut self, entry: &WalEntry) -> Result<(), prost::DecodeError> {
        let (index, term) = (entry.index.unwrap_or_default(), entry.term.unwrap_or_default());
        if self.last.is_none() {
            self.base = index.saturating_sub(1);
        }
        // An entry replaces all earlier ones with the same or a higher index.
        self.removals.retain(|(at, _)| *at < index);
        self.terms.truncate(self.terms.partition_point(|first| first.index < index));
        if self.terms.last().is_none_or(|first| first.term != term) {
            self.terms.push(Position { index, term });
        }
        self.last = Some(Position { index, term });
        if entry.kind == Some(CONF_CHANGE) {
            let change = WalConfChange::decode(entry.data.as_deref().unwrap_or_default())?;
            if change.kind == Some(REMOVE_NODE) {
                self.removals.push((index, change.member.unwrap_or_default()));
            }
        }
        Ok(())
    }

    /// Returns the position of the last entry. Its index is 0 if the log has no entry.
    pub fn last_position(&self) -> Position {
        self.last.unwrap_or(Position { index: 0, term: 0 })
    }

    /// Returns the term of the entry or snapshot at `index`, or 0 if the log does not show it.
    pub fn term_at(&self, index: u64) -> u64 {
        let until = self.terms.partition_point(|first| first.index <= index);
        self.terms[..until].last().map_or(0, |first| first.term)
    }

    /// Returns the index of the first entry that removes this member, if there is one.
    pub fn own_removal(&self) -> Option<u64> {
        let own = self.removals.iter().find(|(_, member)| *member == self.member);
        own.map(|(index, _)| *index)
    }

    /// Appends a hard state to a copy of this log in `folder`. An incompletely written record at
    /// the end is overwritten.
    pub fn append_state(&self, folder: &Path, state: HardState) -> Result<(), WalError> {
        let path = folder.join(&self.tail.file);
        let disk = |source| WalError::Disk { action: "write", path: path.clone(), source };
        let data = state.encode_to_vec();
        let crc = crc32c::crc32c_append(self.tail.crc, &data);
        let record = WalRecord { kind: Some(STATE), crc: Some(crc), data: Some(data) };
        let file = File::options().write(true).open(&path).map_err(disk)?;
        let frame = frame(&record.encode_to_vec());
        file.set_len(self.tail.offset).map_err(disk)?;
        std::os::unix::fs::FileExt::write_all_at(&file, &frame, self.tail.offset).map_err(disk)?;
        file.sync_all().map_err(disk)
    }
}

/// Encodes a record with its length and padding.
fn frame(record: &[u8]) -> Vec<u8> {
    let padding = record.len().next_multiple_of(8) - record.len();
    let mut length = record.len() as u64;
    if padding > 0 {
        length |= (0x80 | padding as u64) << 56;
    }
    let mut frame = length.to_le_bytes().to_vec();
    frame.extend_from_slice(record);
    frame.resize(frame.len() + padding, 0);
    frame
}

/// Returns the names of the log files in order, and fails if one is missing.
fn log_file_names(folder: &Path) -> Result<Vec<String>, WalError> {
    let disk = |source| WalError::Disk { action: "read", path: folder.to_owned(), source };
    let missing = |what| WalError::Missing { path: folder.to_owned(), what };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(disk)? {
        let name = entry.map_err(disk)?.file_name().to_string_lossy().into_owned();
        if let Some(sequence) = sequence(&name) {
            names.push((sequence, name));
        }
    }
    names.sort_unstable();
    if names.is_empty() {
        return Err(missing("there is no log file"));
    }
    if names.windows(2).any(|pair| pair[0].0 + 1 != pair[1].0) {
        return Err(missing("a file is missing between two others"));
    }
    Ok(names.into_iter().map(|(_, name)| name).collect())
}

fn sequence(name: &str) -> Option<u64> {
    let (sequence, index) = name.strip_suffix(".wal")?.split_once('-')?;
    let number =
        |text: &str| (text.len() == 16).then(|| u64::from_str_radix(text, 16).ok()).flatten();
    number(index)?;
    number(sequence)
}

/// One file of the log, while it is read.
struct WalFile<'a> {
    path: &'a Path,
    reader: BufReader<File>,
    bytes: u64,
    /// Whether this file is the last one of the log, in which the last record may be incomplete.
    last: bool,
}

impl WalFile<'_> {
    fn corrupt(&self, offset: u64, what: &'static str) -> WalError {
        WalError::Corrupt { path: self.path.to_owned(), offset, what }
    }

    /// Reads the next record and moves `tail` to the end of the record. Returns `None` at the end
    /// of the file.
    fn next(&mut self, tail: &mut LogTail) -> Result<Option<WalRecord>, WalError> {
        let left = self.bytes.saturating_sub(tail.offset);
        if left == 0 {
            return Ok(None);
        }
        if left < FRAME_BYTES {
            return self.handle_torn_record(tail);
        }
        let mut frame = [0; 8];
        self.read(&mut frame)?;
        let frame = u64::from_le_bytes(frame);
        if frame == 0 {
            return Ok(None);
        }
        let bytes = frame & !(0xff << 56);
        let padding = if frame >> 63 == 1 { frame >> 56 & 7 } else { 0 };
        let whole = bytes + padding;
        if whole > left - FRAME_BYTES {
            return self.handle_torn_record(tail);
        }
        let mut data = vec![0; usize::try_from(whole).unwrap_or(usize::MAX)];
        self.read(&mut data)?;
        let torn = self.last && is_torn(&data, tail.offset + FRAME_BYTES);
        let record = WalRecord::decode(&data[..usize::try_from(bytes).unwrap_or(usize::MAX)]);
        let record = match record {
            Ok(record) => record,
            Err(_) if torn => return self.handle_torn_record(tail),
            Err(_) => return Err(self.corrupt(tail.offset, "a record can't be decoded")),
        };
        let said = record.crc.unwrap_or_default();
        let crc = if record.kind == Some(CRC) {
            // The first file of the log may have lost its predecessors. Then there is no earlier
            // CRC to compare with, and `tail.crc` is 0.
            if tail.crc != 0 && said != tail.crc {
                return Err(
                    self.corrupt(tail.offset, "it doesn't go on where the file before ends")
                );
            }
            said
        } else {
            crc32c::crc32c_append(tail.crc, record.data.as_deref().unwrap_or_default())
        };
        if crc != said {
            if torn {
                return self.handle_torn_record(tail);
            }
            return Err(self.corrupt(tail.offset, "a record's CRC does not match"));
        }
        tail.crc = crc;
        tail.offset += FRAME_BYTES + whole;
        Ok(Some(record))
    }

    /// Handles an incompletely written record. In the last file it ends the log, because etcd never
    /// acknowledged it. In an earlier file it is an error.
    fn handle_torn_record(&self, tail: &mut LogTail) -> Result<Option<WalRecord>, WalError> {
        if !self.last {
            return Err(self.corrupt(tail.offset, "a record is cut off"));
        }
        tail.torn = true;
        Ok(None)
    }

    fn read(&mut self, into: &mut [u8]) -> Result<(), WalError> {
        self.reader.read_exact(into).map_err(|source| WalError::Disk {
            action: "read",
            path: self.path.to_owned(),
            source,
        })
    }
}

/// Returns whether a sector of the record is all zeros. `offset` is the position of `data` in the
/// file.
fn is_torn(data: &[u8], offset: u64) -> bool {
    let first = SECTOR_BYTES - usize::try_from(offset % SECTOR_BYTES as u64).unwrap_or(0);
    let (head, rest) = data.split_at(first.min(data.len()));
    let empty = |chunk: &[u8]| !chunk.is_empty() && chunk.iter().all(|byte| *byte == 0);
    empty(head) || rest.chunks(SECTOR_BYTES).any(empty)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Log files in etcd's format, written by the test.
    struct WalBuilder {
        folder: tempfile::TempDir,
        name: String,
        bytes: Vec<u8>,
        crc: u32,
    }

    impl WalBuilder {
        fn new() -> Self {
            let mut log = Self {
                folder: tempfile::tempdir().unwrap(),
                name: format!("{:016x}-{:016x}.wal", 0, 0),
                bytes: Vec::new(),
                crc: 0,
            };
            log.begin();
            log.put(SNAPSHOT, &SnapshotMark { index: Some(0), term: Some(0) });
            log
        }

        fn begin(&mut self) {
            let record = WalRecord { kind: Some(CRC), crc: Some(self.crc), data: None };
            self.bytes.extend(frame(&record.encode_to_vec()));
            self.put(METADATA, &WalMetadata { member: Some(7), cluster: Some(9) });
        }

        fn put(&mut self, kind: i64, data: &impl Message) {
            let data = data.encode_to_vec();
            self.crc = crc32c::crc32c_append(self.crc, &data);
            let record = WalRecord { kind: Some(kind), crc: Some(self.crc), data: Some(data) };
            self.bytes.extend(frame(&record.encode_to_vec()));
        }

        fn entry(&mut self, index: u64, term: u64, data: Vec<u8>) {
            let (index, term, kind) = (Some(index), Some(term), Some(0));
            self.put(ENTRY, &WalEntry { kind, term, index, data: Some(data) });
        }

        fn removal(&mut self, index: u64, member: u64) {
            let change = WalConfChange { kind: Some(REMOVE_NODE), member: Some(member) };
            let data = Some(change.encode_to_vec());
            let (index, term, kind) = (Some(index), Some(2), Some(CONF_CHANGE));
            self.put(ENTRY, &WalEntry { kind, term, index, data });
        }

        fn cut(&mut self, index: u64) {
            std::fs::write(self.folder.path().join(&self.name), &self.bytes).unwrap();
            self.bytes.clear();
            self.name = format!("{:016x}-{index:016x}.wal", 1);
            self.begin();
        }

        fn read_with(&self, more: &[u8]) -> Result<EtcdLog, WalError> {
            let all = [&self.bytes[..], more].concat();
            std::fs::write(self.folder.path().join(&self.name), all).unwrap();
            EtcdLog::read(self.folder.path())
        }

        fn read(&self) -> EtcdLog {
            self.read_with(&[0; 4096]).unwrap()
        }
    }

    fn state(term: u64, commit: u64) -> HardState {
        HardState { term: Some(term), vote: Some(7), commit: Some(commit) }
    }

    #[test]
    fn ids_and_last_entry_are_read_across_all_files_of_a_log() {
        let mut written = WalBuilder::new();
        written.put(STATE, &state(2, 1));
        written.entry(1, 2, vec![1; 700]);
        written.entry(2, 2, Vec::new());
        written.cut(3);
        written.put(STATE, &state(3, 2));
        written.entry(3, 3, vec![3]);
        let log = written.read();
        assert_eq!((log.cluster, log.member, log.base), (9, 7, 0));
        assert_eq!(log.last_position(), Position { index: 3, term: 3 });
        assert_eq!(log.state, state(3, 2));
        assert!(!log.tail.torn);
        // Delete the older file, as etcd does with files that it no longer needs.
        std::fs::remove_file(written.folder.path().join(format!("{:016x}-{:016x}.wal", 0, 0)))
            .unwrap();
        let log = written.read();
        assert_eq!((log.cluster, log.base, log.last_position().index), (9, 2, 3));
    }

    #[test]
    fn an_entry_replaces_later_entries_and_a_snapshot_earlier_ones() {
        let mut written = WalBuilder::new();
        written.entry(1, 2, Vec::new());
        written.removal(2, 7);
        written.removal(3, 8);
        assert_eq!(written.read().own_removal(), Some(2));
        written.entry(2, 3, Vec::new());
        let log = written.read();
        assert_eq!(
            (log.last_position(), log.own_removal()),
            (Position { index: 2, term: 3 }, None)
        );
        written.put(SNAPSHOT, &SnapshotMark { index: Some(2), term: Some(3) });
        assert_eq!(written.read().base, 0, "its own, of what it had");
        written.put(SNAPSHOT, &SnapshotMark { index: Some(50), term: Some(4) });
        let log = written.read();
        assert_eq!((log.last_position(), log.base), (Position { index: 50, term: 4 }, 50));
    }

    #[test]
    fn the_term_of_each_entry_in_the_log_is_known() {
        let mut written = WalBuilder::new();
        written.entry(1, 2, Vec::new());
        written.entry(2, 2, Vec::new());
        written.entry(3, 3, Vec::new());
        let log = written.read();
        assert_eq!([1, 2, 3].map(|index| log.term_at(index)), [2, 2, 3]);
        written.entry(2, 4, Vec::new());
        let log = written.read();
        assert_eq!([1, 2].map(|index| log.term_at(index)), [2, 4]);
        written.put(SNAPSHOT, &SnapshotMark { index: Some(50), term: Some(5) });
        let log = written.read();
        assert_eq!([2, 50].map(|index| log.term_at(index)), [0, 5]);
    }

    #[test]
    fn a_snapshot_that_replaces_the_log_takes_its_removals_away() {
        let mut written = WalBuilder::new();
        written.entry(1, 2, Vec::new());
        written.removal(2, 7);
        written.put(SNAPSHOT, &SnapshotMark { index: Some(1), term: Some(2) });
        assert_eq!(written.read().own_removal(), Some(2), "the member's own snapshot");
        written.put(SNAPSHOT, &SnapshotMark { index: Some(50), term: Some(4) });
        written.put(STATE, &state(4, 50));
        assert_eq!(written.read().own_removal(), None);
    }

    #[test]
    fn a_torn_record_ends_the_log_and_other_damage_is_an_error() {
        let mut written = WalBuilder::new();
        written.entry(1, 2, vec![1; 10]);
        let end = written.bytes.len();
        written.entry(2, 2, vec![2; 3000]);
        let whole = written.bytes.clone();
        for cut in end + 1..whole.len() {
            // After its first `cut` bytes, the file either ends or continues with the zeros that
            // etcd preallocates.
            for room in [0, 8192] {
                written.bytes = whole[..cut].to_vec();
                let found = written.read_with(&vec![0; room]);
                let torn = |log: &EtcdLog| {
                    (log.last_position().index, log.tail.offset as usize) == (1, end)
                };
                match found {
                    // Only padding is missing. It consists of zeros, so the preallocated zeros
                    // complete the record.
                    Ok(log) if room > 0 && whole.len() - cut < 8 && !log.tail.torn => {}
                    Ok(log) => assert!(torn(&log), "{cut} of {}", whole.len()),
                    // The missing part is too short to contain a whole sector of zeros. Like etcd,
                    // the reader takes the record for damaged, and not for incomplete.
                    Err(WalError::Corrupt { .. }) => {
                        assert!(room > 0 && whole.len() - cut < 2 * SECTOR_BYTES, "{cut}");
                    }
                    Err(error) => panic!("{error}"),
                }
            }
        }
        // The test changes bytes of the entry only, because no checksum covers a record's type.
        for byte in [end + 40, whole.len() - 10] {
            written.bytes = whole.clone();
            written.bytes[byte] ^= 1;
            let error = written.read_with(&[0; 512]).unwrap_err();
            assert!(error.to_string().contains(&format!("offset {end}")), "{error}");
        }
        written.bytes = whole[..end + 600].to_vec();
        written.cut(2);
        assert!(matches!(written.read_with(&[]), Err(WalError::Corrupt { .. })), "more follows");
    }

    #[test]
    fn a_missing_file_is_an_error_and_a_foreign_file_is_ignored() {
        let empty = tempfile::tempdir().unwrap();
        assert!(matches!(EtcdLog::read(empty.path()), Err(WalError::Missing { .. })));
        let mut written = WalBuilder::new();
        written.cut(1);
        std::fs::write(written.folder.path().join("0.tmp"), "room").unwrap();
        assert_eq!(written.read().cluster, 9);
        written.name = format!("{:016x}-{:016x}.wal", 3, 9);
        assert!(matches!(written.read_with(&[]), Err(WalError::Missing { .. })));
    }

    #[test]
    fn a_hard_state_is_appended_where_the_log_ends() {
        let mut written = WalBuilder::new();
        written.put(STATE, &state(2, 1));
        written.entry(1, 2, vec![1; 100]);
        let end = written.bytes.len();
        written.entry(2, 2, vec![2; 3000]);
        written.bytes.truncate(end + 700);
        let log = written.read_with(&[0; 64]).unwrap();
        assert!(log.tail.torn);
        log.append_state(written.folder.path(), state(2, 9)).unwrap();
        let after = EtcdLog::read(written.folder.path()).unwrap();
        assert_eq!(
            (after.state, after.last_position().index, after.tail.torn),
            (state(2, 9), 1, false)
        );
    }
}
