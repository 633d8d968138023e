//! Operations that the owner of the log calls. The modules `open`, `append`, `rotate` and `recover`
//! implement them.

use std::fmt;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use node_consensus::{Entry, HardState, Position, Terms};
use node_state::disk::{DirLock, SharedDisk};

use super::codec::Item;
use super::frame::BLOCK_BYTES;
use super::reader::LogReader;
use super::segment::{Segment, SpareSegment};
use super::{Batch, LogError, LogIdentity, LogOptions};

/// Distance that the zeros are kept ahead of the last record, as a number of steps of
/// [`LogOptions::fill_bytes`].
const FILL_STEPS: u64 = 8;

/// Blocks of a segment that entries can't use. The segment's first record takes up to two, and its
/// last record takes one. The header of the record with the entries needs the fourth.
pub(super) const RESERVED_BLOCKS: u64 = 4;

/// The log, open for writing. It has one owner.
pub struct Log {
    pub(super) disk: SharedDisk,
    pub(super) directory: PathBuf,
    pub(super) identity: LogIdentity,
    pub(super) options: LogOptions,
    pub(super) _lock: DirLock,
    pub(super) reader: LogReader,
    /// Segment that is being written. The state shared with `reader` also contains it.
    pub(super) active: Segment,
    /// Offset of the next record.
    pub(super) offset: u64,
    /// Offset in the active segment below which every block has been written at least once.
    pub(super) filled: u64,
    /// Sequence number of the next record.
    pub(super) sequence: u64,
    /// Checksum of the last record.
    pub(super) previous: u32,
    pub(super) spares: Vec<SpareSegment>,
    pub(super) next_spare: u64,
    pub(super) pending: PendingRecord,
    /// Whether the last record is an empty one, which seals the record before it.
    pub(super) sealed: bool,
    pub(super) poisoned: bool,
    /// Whether the last attempt to make a spare segment found the disk full.
    pub(super) disk_full: bool,
    pub(super) short_of_space: bool,
    pub(super) written_bytes: u64,
}

impl fmt::Debug for Log {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Log")
            .field("directory", &self.directory)
            .field("sequence", &self.sequence)
            .field("poisoned", &self.poisoned)
            .finish_non_exhaustive()
    }
}

/// Record that collects batches until it is written.
pub(super) struct PendingRecord {
    pub(super) buffer: Vec<u8>,
    pub(super) items: Vec<Item>,
    /// Position of the last log entry once this record is written.
    pub(super) last: Position,
    pub(super) base: u64,
    pub(super) hard_state: HardState,
}

impl Log {
    /// Makes all batches durable, in order, with one write and one sync (more only if they exceed
    /// one record). An empty batch seals the record before it. After an error nothing is written
    /// any more.
    ///
    /// # Panics
    ///
    /// If a batch contradicts the log: entries with gaps, entries at or below the base, a term
    /// that goes back.
    pub fn write(&mut self, batches: &[Batch]) -> Result<(), LogError> {
        self.run_unless_poisoned(|log| {
            for batch in batches {
                log.append(batch)?;
            }
            let said = !log.pending.items.is_empty();
            if said || batches.is_empty() { log.write_pending() } else { log.seal() }
        })
    }

    /// Durably removes the entries up to `through` if that frees a segment. Otherwise nothing is
    /// removed, because the sync would gain nothing. Returns the position just before the first
    /// remaining entry.
    ///
    /// The store must hold the entries up to `through` durably. If `through` lies outside the log,
    /// nothing changes.
    pub fn compact(&mut self, through: u64) -> Result<Position, LogError> {
        self.run_unless_poisoned(|log| {
            let frees = |log: &Self| {
                let shared = log.reader.shared();
                let oldest = shared.history.oldest_segment(through);
                let keep = oldest.unwrap_or(log.active.number);
                shared.segments.first_key_value().is_some_and(|(first, _)| *first < keep)
            };
            if let Some(term) = log.reader.term(through)
                && through > log.pending.base
                && frees(log)
            {
                log.push(Item::Base(Position { index: through, term }));
                log.write_pending()?;
            }
            Ok(log.base())
        })
    }

    /// Does one step of preparation, and returns whether more steps remain. The caller runs this
    /// when no other work waits. First, zeros are written ahead of the records; then spare segments
    /// are made; last, the final record is sealed. A full disk is no error here, but see
    /// [`is_short_of_space`](Self::is_short_of_space).
    pub fn prepare(&mut self) -> Result<bool, LogError> {
        self.run_unless_poisoned(|log| {
            let ahead = log.offset + FILL_STEPS * log.options.fill_bytes;
            if log.filled < ahead.min(log.active.bytes) {
                log.fill(log.filled.max(log.offset))?;
                let (path, file) = (&log.active.path, &log.active.file);
                file.sync_data().map_err(LogError::io_at("sync", path, log.filled))?;
                return Ok(true);
            }
            if log.wants_spare() && log.try_spare()? {
                return Ok(true);
            }
            log.seal()?;
            Ok(false)
        })
    }

    /// Makes a spare segment if there is none and half of the current segment is used. After an
    /// attempt that found the disk full, only [`prepare`](Self::prepare) tries again. Under load
    /// the caller has no time for `prepare`. The early attempt reveals a full disk while the log
    /// still has room.
    pub fn keep_spare(&mut self) -> Result<(), LogError> {
        self.run_unless_poisoned(|log| {
            let late = log.offset > log.active.bytes / 2 && log.spares.is_empty();
            if late && !log.disk_full {
                log.try_spare()?;
            }
            Ok(())
        })
    }

    fn wants_spare(&self) -> bool {
        let early = self.offset < self.active.bytes / 4;
        !early && self.spares.len() < self.options.spare_segments
    }

    /// Tries to make a spare segment. Returns false if the disk is full, which isn't an error here.
    fn try_spare(&mut self) -> Result<bool, LogError> {
        match self.make_spare() {
            Ok(spare) => {
                self.disk_full = false;
                self.spares.push(spare);
                Ok(true)
            }
            Err(LogError::Disk { source, .. }) if is_full(&source) => {
                self.disk_full = true;
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Returns whether requests that make the data grow should be refused. That is so if the last
    /// attempt to make a spare segment found the disk full. It is also so if the disk has less free
    /// space than one segment.
    ///
    /// The log itself can still write [`bytes_before_new_segment`](Self::bytes_before_new_segment).
    /// After a shortage, the disk must have room for one and a half segments before this returns
    /// false again.
    pub fn is_short_of_space(&mut self) -> bool {
        let segment = self.options.segment_bytes;
        let least = if self.short_of_space { segment + segment / 2 } else { segment };
        // On a file system that doesn't report its free space, only a failed write reveals a full
        // disk.
        let free = self.disk.free_bytes(&self.directory).unwrap_or(u64::MAX);
        self.short_of_space = self.disk_full || free < least;
        self.short_of_space
    }

    /// Returns how many bytes can be written before a new segment file must be created. Spare
    /// segments count as room.
    pub fn bytes_before_new_segment(&self) -> u64 {
        let spare = self.options.segment_bytes - RESERVED_BLOCKS * BLOCK_BYTES;
        self.active.bytes.saturating_sub(self.offset + BLOCK_BYTES)
            + spare * self.spares.len() as u64
    }

    /// Returns entries from `low` up to but not including `high`; see [`LogReader::entries`].
    pub fn read(&self, low: u64, high: u64, max_bytes: u64) -> Result<Vec<Entry>, LogError> {
        self.reader.entries(low, high, max_bytes)
    }

    /// Returns a reader of durable entries, for another thread.
    pub fn reader(&self) -> LogReader {
        self.reader.clone()
    }

    /// Returns the base: the position just before the first entry.
    pub fn base(&self) -> Position {
        self.reader.base()
    }

    /// Returns the position of the last entry. Returns [`Self::base`] if there is none.
    pub fn last(&self) -> Position {
        self.reader.last()
    }

    /// Returns the terms of all entries after [`Log::base`].
    pub fn terms(&self) -> Terms {
        self.reader.shared().history.terms().clone()
    }

    /// Returns the hard state as last persisted.
    pub fn hard_state(&self) -> HardState {
        self.reader.shared().history.hard_state
    }

    /// Returns the position of the snapshot that is being installed, if any.
    pub fn installing(&self) -> Option<Position> {
        self.reader.shared().history.installing
    }

    /// Returns the identity of the member that the log belongs to.
    pub fn identity(&self) -> &LogIdentity {
        &self.identity
    }

    /// Returns how many bytes of records were written since the log was opened, padding included.
    pub fn written_bytes(&self) -> u64 {
        self.written_bytes
    }

    /// Returns the number of segments in use, without spare segments.
    pub fn segment_count(&self) -> usize {
        self.reader.shared().segments.len()
    }

    /// Returns the disk that holds the log.
    pub fn disk(&self) -> &SharedDisk {
        &self.disk
    }

    /// Returns the file that is being written, and the offset at which the next record will begin.
    pub(super) fn end(&self) -> (&Path, u64) {
        (&self.active.path, self.offset)
    }

    fn run_unless_poisoned<T>(
        &mut self,
        act: impl FnOnce(&mut Self) -> Result<T, LogError>,
    ) -> Result<T, LogError> {
        if self.poisoned {
            return Err(LogError::Poisoned);
        }
        let done = act(self);
        self.poisoned = done.is_err();
        done
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge
    )
}
