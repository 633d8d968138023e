//! Segment files: their names, their creation, and reading records from them.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use node_state::disk::{DiskFile, OpenMode, SharedDisk, read_padded};

use super::codec::{self, RecordDecodeError, SegmentHeader};
use super::frame::{self, BLOCK_BYTES, HEADER_BYTES, RecordHeader, RecordKind};
use super::{Damage, LogError};

#[derive(Clone, Debug)]
pub(super) struct Segment {
    pub number: u64,
    pub path: PathBuf,
    pub file: Arc<dyn DiskFile>,
    pub bytes: u64,
    pub seed: u32,
}

/// A preallocated file that will become a segment.
#[derive(Debug)]
pub(super) struct SpareSegment {
    pub path: PathBuf,
    pub file: Arc<dyn DiskFile>,
    /// Offset below which every block has been written at least once. A sync of such blocks writes
    /// no metadata.
    pub filled: u64,
}

/// A record that matches its checksum.
#[derive(Clone, Debug)]
pub(super) struct LogRecord {
    pub header: RecordHeader,
    pub payload: Bytes,
}

impl LogRecord {
    pub(super) fn padded_bytes(&self) -> u64 {
        frame::padded_bytes(self.payload.len())
    }
}

pub(super) fn segment_path(directory: &Path, number: u64) -> PathBuf {
    directory.join(format!("{number:016x}.wal"))
}

pub(super) fn spare_path(directory: &Path, number: u64) -> PathBuf {
    directory.join(format!("{number:016x}.spare"))
}

/// Returns the number in the name of a segment (extension `wal`) or of a spare segment (extension
/// `spare`).
pub(super) fn parse_segment_number(name: &str, extension: &str) -> Option<u64> {
    let number = name.strip_suffix(extension)?.strip_suffix('.')?;
    let plain = number.len() == 16 && number.bytes().all(|byte| byte.is_ascii_hexdigit());
    if plain { u64::from_str_radix(number, 16).ok() } else { None }
}

/// Creates a file with the space of one segment. Length and space are durable, but the file's name
/// is not.
pub(super) fn make_file(
    disk: &SharedDisk,
    path: &Path,
    bytes: u64,
) -> Result<Arc<dyn DiskFile>, LogError> {
    let file: Arc<dyn DiskFile> =
        disk.open(path, OpenMode::New).map_err(LogError::io("create", path))?.into();
    file.allocate(bytes).map_err(LogError::io("allocate", path))?;
    file.sync_data().map_err(LogError::io("sync", path))?;
    Ok(file)
}

/// Returns the bytes of a segment's first record, and the checksum in them.
pub(super) fn encode_first_record(
    start: &SegmentHeader,
    sequence: u64,
    previous: u32,
) -> (Vec<u8>, u32) {
    let mut buffer = vec![0; HEADER_BYTES];
    codec::encode_segment_header(&mut buffer, start);
    let seed = frame::seed(&start.identity, start.segment);
    let checksum = frame::finish(&mut buffer, seed, sequence, previous, RecordKind::Start);
    (buffer, checksum)
}

impl Segment {
    /// Opens a segment and reads its first record.
    pub(super) fn open(
        disk: &SharedDisk,
        directory: &Path,
        number: u64,
    ) -> Result<(Self, LogRecord, SegmentHeader), LogError> {
        let path = segment_path(directory, number);
        let file: Arc<dyn DiskFile> =
            disk.open(&path, OpenMode::Existing).map_err(LogError::io("open", &path))?.into();
        file.sync_and_drop_cache().map_err(LogError::io("reread", &path))?;
        let len = file.len().map_err(LogError::io("measure", &path))?;
        let broken = || LogError::damaged(&path, 0, Damage::FirstRecord);
        // The checksum depends on the owner's identity, which only the record itself states. So the
        // record is first read without verification.
        let claimed =
            read_unverified_header(file.as_ref(), len).map_err(LogError::io("read", &path))?;
        let claimed = match claimed.ok_or_else(broken)? {
            Ok(claimed) => claimed,
            Err(version) => {
                return Err(LogError::Version { path, version, known: codec::VERSION });
            }
        };
        let seed = frame::seed(&claimed.identity, number);
        let segment = Self { number, path: path.clone(), file, bytes: claimed.segment_bytes, seed };
        let record = segment.read(0, len)?.ok_or_else(broken)?;
        if record.header.kind != RecordKind::Start as u8 || claimed.segment != number {
            return Err(broken());
        }
        if len != claimed.segment_bytes {
            let damage = Damage::Length { found: len, expected: claimed.segment_bytes };
            return Err(LogError::damaged(&path, len.min(claimed.segment_bytes), damage));
        }
        Ok((segment, record, claimed))
    }

    /// Returns the record at `offset`. `None` if there is no valid record, or if it would end after
    /// `end`.
    pub(super) fn read(&self, offset: u64, end: u64) -> Result<Option<LogRecord>, LogError> {
        let Some((header, bytes)) = self.read_unchecked(offset, end)? else { return Ok(None) };
        Ok(frame::is_valid(&header, self.seed, &bytes).then(|| record(header, bytes)))
    }

    /// Returns the header and the bytes of the record at `offset` without verifying its checksum.
    pub(super) fn read_unchecked(
        &self,
        offset: u64,
        end: u64,
    ) -> Result<Option<(RecordHeader, Bytes)>, LogError> {
        read_raw(self.file.as_ref(), offset, end)
            .map_err(LogError::io_at("read", &self.path, offset))
    }

    /// Decodes the items of a record.
    pub(super) fn decode_items(
        &self,
        offset: u64,
        record: &LogRecord,
    ) -> Result<Vec<codec::Item>, LogError> {
        codec::decode(&record.payload).map_err(|error| decode_failure(&self.path, offset, error))
    }

    /// Returns the offset of the first valid record at or after `from` whose sequence number is at
    /// least `sequence`.
    pub(super) fn find_later(&self, from: u64, sequence: u64) -> Result<Option<u64>, LogError> {
        const SEARCH_WINDOW_BYTES: u64 = 256 * BLOCK_BYTES;
        let mut window = Vec::new();
        let mut at = from;
        while let Some(written) = self.next_written(at)? {
            at = at.max(written - written % BLOCK_BYTES);
            let len = SEARCH_WINDOW_BYTES.min(self.bytes - at);
            window.resize(to_usize(len), 0);
            read_padded(self.file.as_ref(), at, &mut window)
                .map_err(LogError::io_at("read", &self.path, at))?;
            for (offset, block) in
                (at..).step_by(to_usize(BLOCK_BYTES)).zip(window.chunks(to_usize(BLOCK_BYTES)))
            {
                let later = frame::parse(block).is_some_and(|header| header.sequence >= sequence);
                if later && self.read(offset, self.bytes)?.is_some() {
                    return Ok(Some(offset));
                }
            }
            at += len;
        }
        Ok(None)
    }

    /// Returns the first offset at or after `from` that may have been written. Skipping unwritten
    /// space saves time, because most of a new segment is still unwritten.
    fn next_written(&self, from: u64) -> Result<Option<u64>, LogError> {
        if from >= self.bytes {
            return Ok(None);
        }
        let found = self.file.next_written(from);
        let found = found.map_err(LogError::io_at("look through", &self.path, from))?;
        Ok(found.filter(|at| *at < self.bytes))
    }
}

pub(super) fn decode_failure(path: &Path, offset: u64, error: RecordDecodeError) -> LogError {
    match error {
        RecordDecodeError::Malformed(what) => {
            LogError::damaged(path, offset, Damage::Contradiction(what))
        }
        RecordDecodeError::Unknown(kind) => {
            LogError::Newer { path: path.to_path_buf(), offset, kind }
        }
        RecordDecodeError::UnknownEntry { index, kind } => {
            LogError::NewerEntry { path: path.to_path_buf(), index, kind }
        }
    }
}

pub(super) fn record(header: RecordHeader, bytes: Bytes) -> LogRecord {
    let payload = bytes.slice(HEADER_BYTES..);
    LogRecord { header, payload }
}

/// Converts a size that is known to fit into memory.
pub(super) fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).expect("segments are far smaller than memory can address")
}

/// Decodes a segment's first record without verifying its checksum. The inner error is the format
/// version, if this build doesn't know it.
fn read_unverified_header(
    file: &dyn DiskFile,
    len: u64,
) -> io::Result<Option<Result<SegmentHeader, u8>>> {
    let Some((header, bytes)) = read_raw(file, 0, len)? else { return Ok(None) };
    let payload = record(header, bytes).payload;
    Ok(match payload.first() {
        Some(&codec::VERSION) => codec::decode_segment_header(&payload).ok().map(Ok),
        Some(version) => Some(Err(*version)),
        None => None,
    })
}

/// Reads the header and payload of a record, without verifying its checksum. `None` if the bytes
/// don't look like a record.
fn read_raw(
    file: &dyn DiskFile,
    offset: u64,
    end: u64,
) -> io::Result<Option<(RecordHeader, Bytes)>> {
    if end.saturating_sub(offset) < BLOCK_BYTES {
        return Ok(None);
    }
    let mut bytes = vec![0; to_usize(BLOCK_BYTES)];
    read_padded(file, offset, &mut bytes)?;
    let Some(header) = frame::parse(&bytes) else { return Ok(None) };
    let payload = usize::try_from(header.length).expect("a 32-bit number");
    if frame::padded_bytes(payload) > end - offset {
        return Ok(None);
    }
    let read = bytes.len();
    bytes.resize(HEADER_BYTES + payload, 0);
    if bytes.len() > read {
        read_padded(file, offset + read as u64, &mut bytes[read..])?;
    }
    Ok(Some((header, bytes.into())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segment_names_parse_back_and_other_names_do_not() {
        let path = segment_path(Path::new("/d"), 0x1f);
        assert_eq!(path, Path::new("/d/000000000000001f.wal"));
        assert_eq!(parse_segment_number("000000000000001f.wal", "wal"), Some(0x1f));
        for other in ["000000000000001f.spare", "1f.wal", "+00000000000001f.wal", "x", ".wal"] {
            assert_eq!(parse_segment_number(other, "wal"), None, "{other}");
        }
    }
}
