//! Recovery of a log: reads all segments, and decides whether the log's end is clean, torn or
//! damaged.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use node_state::disk::SharedDisk;

use super::codec::{self, SegmentHeader};
use super::frame::{self, RecordKind};
use super::history::{Location, LogState};
use super::segment::{self, LogRecord, Segment, parse_segment_number, segment_path};
use super::{Damage, LogError, LogIdentity, LogOptions};

/// A recovered log, and the place at which writing continues.
#[derive(Debug)]
pub(super) struct RecoveredLog {
    pub identity: LogIdentity,
    pub history: LogState,
    pub segments: BTreeMap<u64, Segment>,
    /// Offset in the last segment at which the valid records end.
    pub end: u64,
    pub sequence: u64,
    pub previous: u32,
    /// Whether an incomplete record follows the last valid one. It was never acknowledged.
    pub torn: bool,
}

/// Returns the numbers of all segments, which must have no gaps.
pub(super) fn list_segments(
    disk: &SharedDisk,
    directory: &Path,
) -> Result<BTreeSet<u64>, LogError> {
    let names = disk.list(directory).map_err(LogError::io("list", directory))?;
    let numbers: BTreeSet<_> =
        names.iter().filter_map(|name| parse_segment_number(name, "wal")).collect();
    let first = numbers.first().copied().unwrap_or(1);
    let last = numbers.last().copied().unwrap_or(first);
    match (first..=last).find(|number| !numbers.contains(number)) {
        Some(segment) => {
            Err(LogError::damaged(&segment_path(directory, segment), 0, Damage::Missing))
        }
        None => Ok(numbers),
    }
}

/// Reads all segments, and finds the end of the log.
pub(super) fn recover(
    disk: &SharedDisk,
    directory: &Path,
    options: &LogOptions,
) -> Result<RecoveredLog, LogError> {
    let numbers = list_segments(disk, directory)?;
    let first = *numbers.first().expect("no segments at all is a gap");
    let (segment, record, start) = Segment::open(disk, directory, first)?;
    let identity = start.identity;
    let mut walk = LogScan {
        options,
        history: LogState::begin(&start),
        sequence: record.header.sequence + 1,
        previous: record.header.checksum,
        offset: record.padded_bytes(),
        torn: false,
    };
    let mut segments = BTreeMap::new();
    let mut current = segment;
    for number in numbers.into_iter().skip(1) {
        let end = walk.read_segment(&current)?;
        let (next, record, start) = Segment::open(disk, directory, number)?;
        if start.identity != identity {
            return Err(LogError::damaged(&next.path, 0, Damage::Foreign));
        }
        walk.enter_segment(&current, end, &next, &record, &start)?;
        segments.insert(current.number, current);
        current = next;
    }
    walk.read_last_segment(&current, directory)?;
    if !walk.history.is_whole() {
        let damage = Damage::Contradiction("entries after the base are missing");
        return Err(LogError::damaged(&segment_path(directory, first), 0, damage));
    }
    segments.insert(current.number, current);
    let LogScan { history, sequence, previous, offset: end, torn, .. } = walk;
    Ok(RecoveredLog { identity, history, segments, end, sequence, previous, torn })
}

/// Reason why reading a segment has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SegmentEnd {
    /// The last record says that the log continues in the next segment.
    Rolled,
    /// The valid records end here, and the last one doesn't say that the log continues.
    Open,
}

struct LogScan<'a> {
    options: &'a LogOptions,
    history: LogState,
    /// Sequence number of the next record.
    sequence: u64,
    /// Checksum of the last record.
    previous: u32,
    /// Offset at which the next record is expected in the current segment.
    offset: u64,
    torn: bool,
}

impl LogScan<'_> {
    /// Reads the records of a segment, except for its first record.
    fn read_segment(&mut self, segment: &Segment) -> Result<SegmentEnd, LogError> {
        while let Some(record) = self.next(segment)? {
            let here = |damage| LogError::damaged(&segment.path, self.offset, damage);
            let header = record.header;
            if header.sequence != self.sequence || header.previous != self.previous {
                return Err(here(Damage::Chain));
            }
            match header.kind {
                kind if kind == RecordKind::Rolled as u8 => return Ok(SegmentEnd::Rolled),
                kind if kind == RecordKind::Group as u8 => {}
                kind => {
                    let (path, offset) = (segment.path.clone(), self.offset);
                    return Err(LogError::Newer { path, offset, kind });
                }
            }
            let location = Location { segment: segment.number, offset: self.offset };
            for (number, item) in segment.decode_items(self.offset, &record)?.iter().enumerate() {
                let added = self.history.add(item, location, number);
                added.map_err(|what| here(Damage::Contradiction(what)))?;
            }
            self.sequence += 1;
            self.previous = header.checksum;
            self.offset += record.padded_bytes();
        }
        Ok(SegmentEnd::Open)
    }

    fn next(&self, segment: &Segment) -> Result<Option<LogRecord>, LogError> {
        if self.options.guards.verify_tail() {
            return segment.read(self.offset, segment.bytes);
        }
        // Tests only: accepts any record that claims to be the next one, without verifying its
        // checksum.
        let found = segment.read_unchecked(self.offset, segment.bytes)?;
        Ok(found.map(|(header, bytes)| segment::record(header, bytes)).filter(|record| {
            record.header.sequence == self.sequence
                && record.header.previous == self.previous
                && codec::decode(&record.payload).is_ok()
        }))
    }

    /// Continues with the next segment. Its first record proves where the previous segment ended.
    fn enter_segment(
        &mut self,
        from: &Segment,
        end: SegmentEnd,
        to: &Segment,
        record: &LogRecord,
        start: &SegmentHeader,
    ) -> Result<(), LogError> {
        let header = record.header;
        if end == SegmentEnd::Open && header.sequence > self.sequence {
            let damage = Damage::Record { segment: to.number, later: 0 };
            return Err(LogError::damaged(&from.path, self.offset, damage));
        }
        if header.sequence != self.sequence || header.previous != self.previous {
            return Err(LogError::damaged(&to.path, 0, Damage::Chain));
        }
        if start.last != self.history.last() {
            let damage = Damage::Contradiction("it begins after another entry than the last");
            return Err(LogError::damaged(&to.path, 0, damage));
        }
        self.sequence += 1;
        self.previous = header.checksum;
        self.offset = record.padded_bytes();
        Ok(())
    }

    /// Reads the last segment, and decides whether its end is clean or torn. Damage is an error.
    fn read_last_segment(&mut self, segment: &Segment, directory: &Path) -> Result<(), LogError> {
        if self.read_segment(segment)? == SegmentEnd::Rolled {
            let path = segment_path(directory, segment.number + 1);
            return Err(LogError::damaged(&path, 0, Damage::Missing));
        }
        let after = self.offset + frame::BLOCK_BYTES;
        if let Some(later) = segment.find_later(after, self.sequence)? {
            let damage = Damage::Record { segment: segment.number, later };
            return Err(LogError::damaged(&segment.path, self.offset, damage));
        }
        let found = segment.read_unchecked(self.offset, segment.bytes)?;
        self.torn = found.is_some_and(|(header, _)| header.sequence == self.sequence);
        Ok(())
    }
}
