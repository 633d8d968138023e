//! Management of segment files: writing zeros ahead, making spare segments, starting the next
//! segment, and recycling old ones.

use std::path::Path;

use node_state::disk::{OpenMode, SharedDisk};

use super::codec::SegmentHeader;
use super::frame::{self, BLOCK_BYTES, HEADER_BYTES, RecordKind};
use super::segment::{
    Segment, SpareSegment, encode_first_record, make_file, parse_segment_number, segment_path,
    spare_path, to_usize,
};
use super::{Log, LogError};

/// Size of one write of zeros. The page cache may keep the data of one write as one unit, a folio.
/// Each later sync of a block in a folio processes the whole folio, so one write must not be large.
const ZERO_WRITE_BYTES: u64 = 4 * BLOCK_BYTES;

impl Log {
    /// Writes the next `fill_bytes` zeros from offset `from` on, or fewer at the segment's end.
    /// Doesn't sync.
    pub(super) fn fill(&mut self, from: u64) -> Result<(), LogError> {
        let to = (from + self.options.fill_bytes).min(self.active.bytes);
        let (path, file) = (&self.active.path, &self.active.file);
        let zeros = [0; ZERO_WRITE_BYTES as usize];
        let mut at = from;
        while at < to {
            let piece = to_usize(ZERO_WRITE_BYTES.min(to - at));
            file.write_at(at, &zeros[..piece]).map_err(LogError::io_at("fill", path, at))?;
            at += piece as u64;
        }
        self.filled = to;
        Ok(())
    }

    /// Switches to a new segment.
    pub(super) fn roll(&mut self) -> Result<(), LogError> {
        let spare = match self.spares.pop() {
            Some(spare) => spare,
            None => self.make_spare()?,
        };
        let number = self.active.number + 1;
        let bytes = self.options.segment_bytes;
        let (last, repeated) = {
            let shared = self.reader.shared();
            (shared.history.last(), shared.history.header_items())
        };
        let identity = self.identity;
        let start =
            SegmentHeader { identity, segment: number, segment_bytes: bytes, last, repeated };
        let (record, checksum) = encode_first_record(&start, self.sequence, self.previous);
        // The first record must be durable before the rename. A file with a segment's name but no
        // first record counts as damaged.
        spare.file.write_at(0, &record).map_err(LogError::io("write", &spare.path))?;
        spare.file.sync_data().map_err(LogError::io("sync", &spare.path))?;
        let path = segment_path(&self.directory, number);
        self.disk.rename(&spare.path, &path).map_err(LogError::io("rename", &spare.path))?;
        sync_dir(&self.disk, &self.directory)?;
        self.mark_rolled()?;
        let seed = frame::seed(&self.identity, number);
        self.active = Segment { number, path, file: spare.file, bytes, seed };
        self.reader.shared_mut().segments.insert(number, self.active.clone());
        self.offset = record.len() as u64;
        self.filled = spare.filled.max(self.offset);
        self.sequence += 1;
        self.previous = checksum;
        Ok(())
    }

    /// Writes the record that proves that the next segment exists, so that a loss of that segment
    /// would be noticed. The next segment's name must already be durable.
    pub(super) fn mark_rolled(&self) -> Result<(), LogError> {
        let (path, file) = (&self.active.path, &self.active.file);
        let mut mark = vec![0; HEADER_BYTES];
        frame::finish(
            &mut mark,
            self.active.seed,
            self.sequence,
            self.previous,
            RecordKind::Rolled,
        );
        file.write_at(self.offset, &mark).map_err(LogError::io_at("write", path, self.offset))?;
        file.sync_data().map_err(LogError::io_at("sync", path, self.offset))
    }

    pub(super) fn make_spare(&mut self) -> Result<SpareSegment, LogError> {
        let path = spare_path(&self.directory, self.next_spare);
        self.next_spare += 1;
        match make_file(&self.disk, &path, self.options.segment_bytes) {
            Ok(file) => Ok(SpareSegment { path, file, filled: 0 }),
            Err(error) => {
                // An incomplete spare segment is useless and takes up space, so it is removed.
                let _ = self.disk.remove(&path);
                Err(error)
            }
        }
    }

    /// Takes over the spare segments that an earlier process left.
    pub(super) fn find_spares(&mut self) -> Result<(), LogError> {
        let list = LogError::io("list", &self.directory);
        for name in self.disk.list(&self.directory).map_err(list)? {
            let Some(number) = parse_segment_number(&name, "spare") else { continue };
            self.next_spare = self.next_spare.max(number + 1);
            let path = self.directory.join(name);
            let opened = self.disk.open(&path, OpenMode::Existing);
            let file = opened.map_err(LogError::io("open", &path))?;
            let len = file.len().map_err(LogError::io("measure", &path))?;
            if len == self.options.segment_bytes && self.spares.len() < self.options.spare_segments
            {
                // The process that created the spare segment may have been killed before its length
                // was durable. So the file is synced before it is used.
                file.sync_data().map_err(LogError::io("sync", &path))?;
                self.spares.push(SpareSegment { path, file: file.into(), filled: 0 });
            } else {
                self.disk.remove(&path).map_err(LogError::io("remove", &path))?;
            }
        }
        Ok(())
    }

    /// Recycles all segments before the oldest one that still holds a needed entry. Each rename is
    /// durable before the next one, oldest segment first. So a crash leaves no gap in the numbers.
    pub(super) fn drop_unneeded(&mut self) -> Result<(), LogError> {
        let oldest = self.reader.shared().history.oldest_segment(0);
        let keep = oldest.unwrap_or(self.active.number);
        loop {
            let first = self.reader.shared().segments.first_key_value().map(|(number, _)| *number);
            let Some(first) = first.filter(|number| *number < keep) else { return Ok(()) };
            let Some(segment) = self.reader.shared_mut().segments.remove(&first) else {
                return Ok(());
            };
            let reuse = self.spares.len() < self.options.spare_segments
                && segment.bytes == self.options.segment_bytes;
            if reuse {
                let path = spare_path(&self.directory, self.next_spare);
                self.next_spare += 1;
                let renamed = self.disk.rename(&segment.path, &path);
                renamed.map_err(LogError::io("rename", &segment.path))?;
                sync_dir(&self.disk, &self.directory)?;
                // The file must not be overwritten before the rename is durable. Otherwise a crash
                // could restore the segment's old name with new content.
                self.spares.push(SpareSegment { path, file: segment.file, filled: segment.bytes });
            } else {
                let removed = self.disk.remove(&segment.path);
                removed.map_err(LogError::io("remove", &segment.path))?;
                sync_dir(&self.disk, &self.directory)?;
            }
        }
    }
}

pub(super) fn sync_dir(disk: &SharedDisk, directory: &Path) -> Result<(), LogError> {
    disk.sync_dir(directory).map_err(LogError::io("sync", directory))
}
