//! The writer: batches become records, records become durable, segments come and go.

use std::fmt;
use std::io::{self, ErrorKind};
use std::mem;
use std::path::{Path, PathBuf};

use node_consensus::{Entry, HardState, Position, Terms};

use super::codec::{self, ENTRY_OVERHEAD, ITEM_OVERHEAD, Item, MAX_MEMBERS, Start};
use super::frame::{self, BLOCK, HEADER, Kind};
use super::history::Place;
use super::reader::{Reader, Shared};
use super::recover::{self, Found};
use super::segment::{
    Segment, Spare, encode_start, in_memory, make_file, number_in, segment_path, spare_path,
};
use super::{Batch, Identity, LogError, LogOptions, Recovered};
use crate::disk::{DirLock, Open, SharedDisk};

/// The directory's name beside the member's other files, and while it is being made.
const NAME: &str = "wal";
const NAME_WHILE_MADE: &str = "wal.tmp";

/// How many steps of zeros are kept ahead of the records.
const FILL_STEPS: u64 = 8;

/// Room in a segment that entries never have: its first record (two blocks at most), its last one,
/// and the header of the one that they stand in.
const RESERVED_BLOCKS: u64 = 4;

/// A segment's first record with all its voters takes two blocks at most.
const _: () = assert!(MAX_MEMBERS * 8 < BLOCK as usize);

/// The log, open for writing. One owner.
pub struct Log {
    disk: SharedDisk,
    directory: PathBuf,
    identity: Identity,
    options: LogOptions,
    _lock: DirLock,
    reader: Reader,
    /// The segment that is being written, also in `reader`.
    active: Segment,
    /// Where the next record goes.
    offset: u64,
    /// Blocks below this have been written before.
    filled: u64,
    /// Of the next record.
    sequence: u64,
    /// Checksum of the last one.
    previous: u32,
    spares: Vec<Spare>,
    next_spare: u64,
    pending: Pending,
    /// The last record is an empty one.
    sealed: bool,
    poisoned: bool,
    /// The last attempt to make a spare found the disk full.
    disk_full: bool,
    written_bytes: u64,
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

/// The record that is being filled.
struct Pending {
    buffer: Vec<u8>,
    items: Vec<Item>,
    /// The log's end once it is written.
    last: Position,
    base: u64,
    hard_state: HardState,
}

impl Log {
    /// Whether `member_dir` holds a log.
    pub fn exists(disk: &SharedDisk, member_dir: &Path) -> Result<bool, LogError> {
        let directory = member_dir.join(NAME);
        disk.exists(&directory).map_err(LogError::io("look for", &directory))
    }

    /// Makes an empty log in `member_dir`, which must exist. When this returns, the log is durable
    /// and has its name; if the process dies earlier, [`exists`](Self::exists) says no.
    pub fn create(
        disk: &SharedDisk,
        member_dir: &Path,
        identity: &Identity,
        options: &LogOptions,
    ) -> Result<(), LogError> {
        validate(options);
        assert!(identity.voters.len() <= MAX_MEMBERS, "{} voters", identity.voters.len());
        let making = member_dir.join(NAME_WHILE_MADE);
        let directory = member_dir.join(NAME);
        disk.create_dir(&making).map_err(LogError::io("create", &making))?;
        let _lock = lock(disk, &making)?;
        if Self::exists(disk, member_dir)? {
            return Err(LogError::Exists { path: directory });
        }
        for name in disk.list(&making).map_err(LogError::io("list", &making))? {
            let path = making.join(name);
            disk.remove(&path).map_err(LogError::io("remove", &path))?;
        }
        let path = segment_path(&making, 1);
        let file = make_file(disk, &path, options.segment_bytes)?;
        let start = Start {
            identity: identity.clone(),
            segment: 1,
            segment_bytes: options.segment_bytes,
            last: Position::default(),
            repeated: Vec::new(),
        };
        let (bytes, _) = encode_start(&start, 1, 0);
        file.write_at(0, &bytes).map_err(LogError::io("write", &path))?;
        file.sync_data().map_err(LogError::io("sync", &path))?;
        sync_dir(disk, &making)?;
        disk.rename(&making, &directory).map_err(LogError::io("rename", &making))?;
        sync_dir(disk, member_dir)
    }

    /// Opens the log in `member_dir`, holds it until dropped, cuts a torn end, counts the boot up,
    /// and says what is there. All of that is durable.
    pub fn open(
        disk: &SharedDisk,
        member_dir: &Path,
        options: &LogOptions,
    ) -> Result<(Self, Recovered), LogError> {
        validate(options);
        let directory = member_dir.join(NAME);
        let held = lock(disk, &directory)?;
        // What a process that was killed has renamed may not be durable yet.
        sync_dir(disk, member_dir)?;
        sync_dir(disk, &directory)?;
        let found = recover::recover(disk, &directory, options)?;
        let cut = (found.torn, found.end);
        let mut log = Self::resume(disk, directory, options, held, found);
        let cut = cut.0.then(|| (log.active.path.clone(), cut.1));
        log.find_spares()?;
        let boot = log.reader.shared().history.boot + 1;
        log.push(Item::Boot(boot));
        log.write_pending()?;
        log.drop_unneeded()?;
        let recovered = Recovered {
            identity: log.identity.clone(),
            boot,
            hard_state: log.hard_state(),
            base: log.base(),
            terms: log.terms(),
            installing: log.installing(),
            cut,
        };
        Ok((log, recovered))
    }

    fn resume(
        disk: &SharedDisk,
        directory: PathBuf,
        options: &LogOptions,
        held: DirLock,
        found: Found,
    ) -> Self {
        let Found { identity, history, segments, end, sequence, previous, .. } = found;
        let active = segments.last_key_value().expect("recovery found one").1.clone();
        let pending = Pending {
            buffer: vec![0; HEADER],
            items: Vec::new(),
            last: history.last(),
            base: history.base.index,
            hard_state: history.hard_state,
        };
        let verify = options.guards.verify_tail();
        Self {
            disk: disk.clone(),
            directory,
            identity,
            options: options.clone(),
            _lock: held,
            reader: Reader::new(Shared { verify, history, segments }),
            active,
            offset: end,
            filled: end,
            sequence,
            previous,
            spares: Vec::new(),
            next_spare: 0,
            pending,
            sealed: false,
            poisoned: false,
            disk_full: false,
            written_bytes: 0,
        }
    }

    /// Makes all batches durable, in order, with one write and one sync (more only if they exceed
    /// one record). Batches that say nothing seal what was written before. After an error nothing
    /// is written any more.
    ///
    /// # Panics
    ///
    /// If a batch contradicts the log: entries with gaps, entries at or below the base, a term
    /// that goes back.
    pub fn write(&mut self, batches: &[Batch]) -> Result<(), LogError> {
        self.guarded(|log| {
            for batch in batches {
                log.append(batch)?;
            }
            let said = !log.pending.items.is_empty();
            if said || batches.is_empty() { log.write_pending() } else { log.seal() }
        })
    }

    /// Forgets entries up to `through`, durably, if that frees a segment; otherwise it isn't worth
    /// a sync. Returns the base. `through` must be durable in the store; whatever lies outside the
    /// log changes nothing.
    pub fn compact(&mut self, through: u64) -> Result<Position, LogError> {
        self.guarded(|log| {
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

    /// One step of work ahead of need: zeros in the current segment, then spares (once the current
    /// segment is no longer almost empty), then a seal. Whether there is more to do. To be called
    /// when nothing else waits. A full disk is no failure here, but see
    /// [`disk_is_full`](Self::disk_is_full).
    pub fn prepare(&mut self) -> Result<bool, LogError> {
        self.guarded(|log| {
            let ahead = log.offset + FILL_STEPS * log.options.fill_bytes;
            if log.filled < ahead.min(log.active.bytes) {
                log.fill(log.filled.max(log.offset))?;
                let (path, file) = (&log.active.path, &log.active.file);
                file.sync_data().map_err(LogError::io_at("sync", path, log.filled))?;
                return Ok(true);
            }
            let early = log.offset < log.active.bytes / 4;
            if !early && log.spares.len() < log.options.spare_segments {
                match log.make_spare() {
                    Ok(spare) => {
                        log.disk_full = false;
                        log.spares.push(spare);
                        return Ok(true);
                    }
                    Err(LogError::Disk { source, .. }) if is_full(&source) => log.disk_full = true,
                    Err(error) => return Err(error),
                }
            }
            log.seal()?;
            Ok(false)
        })
    }

    /// The last step of [`prepare`](Self::prepare) that wanted a spare found no space. The log
    /// itself still has room for [`bytes_left`](Self::bytes_left), so that the node can refuse
    /// writes in good time.
    pub fn disk_is_full(&self) -> bool {
        self.disk_full
    }

    /// Bytes that can be written before another segment has to be made.
    pub fn bytes_left(&self) -> u64 {
        let spare = self.options.segment_bytes - RESERVED_BLOCKS * BLOCK;
        self.active.bytes.saturating_sub(self.offset + BLOCK) + spare * self.spares.len() as u64
    }

    /// Entries from `low` up to but not including `high`; see [`Reader::entries`].
    pub fn read(&self, low: u64, high: u64, max_bytes: u64) -> Result<Vec<Entry>, LogError> {
        self.reader.entries(low, high, max_bytes)
    }

    /// A reader of what is durable, for another thread.
    pub fn reader(&self) -> Reader {
        self.reader.clone()
    }

    /// The position before the first entry.
    pub fn base(&self) -> Position {
        self.reader.base()
    }

    /// The last entry, or the base.
    pub fn last(&self) -> Position {
        self.reader.last()
    }

    /// Terms of the entries after [`Log::base`].
    pub fn terms(&self) -> Terms {
        self.reader.shared().history.terms().clone()
    }

    /// As last persisted.
    pub fn hard_state(&self) -> HardState {
        self.reader.shared().history.hard_state
    }

    /// The snapshot that is being installed.
    pub fn installing(&self) -> Option<Position> {
        self.reader.shared().history.installing
    }

    /// Whose it is.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Bytes of records written since it was opened, padding included.
    pub fn written_bytes(&self) -> u64 {
        self.written_bytes
    }

    /// Files in use, spares not counted.
    pub fn segments(&self) -> usize {
        self.reader.shared().segments.len()
    }

    /// The disk it lies on.
    pub fn disk(&self) -> &SharedDisk {
        &self.disk
    }

    /// The file being written, and where in it.
    pub(super) fn end(&self) -> (&Path, u64) {
        (&self.active.path, self.offset)
    }

    fn guarded<T>(
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

    /// Adds a batch to the record that is being filled, writing it first if it is full.
    fn append(&mut self, batch: &Batch) -> Result<(), LogError> {
        let largest = self.largest_record() - HEADER - ITEM_OVERHEAD - ENTRY_OVERHEAD;
        if let Some(entry) = batch.entries.iter().find(|entry| entry.data.len() > largest) {
            let bytes = entry.data.len();
            return Err(LogError::EntryTooLarge { index: entry.index, bytes });
        }
        let entry_bytes: usize = batch.entries.iter().map(encoded_len).sum();
        let bytes = entry_bytes + 5 * ITEM_OVERHEAD;
        if !self.pending.items.is_empty() && self.used() + bytes > self.record_bytes() {
            self.write_pending()?;
        }
        if let Some(at) = batch.installing {
            self.push(Item::Installing(at));
        }
        if let Some(at) = batch.snapshot {
            self.push(Item::Snapshot(at));
        }
        if let Some(state) = batch.hard_state
            && self.used() + bytes > self.record_bytes()
        {
            let commit = state.commit.min(self.pending.hard_state.commit);
            self.push(Item::HardState(HardState { commit, ..state }));
        }
        self.append_entries(&batch.entries)?;
        if let Some(state) = batch.hard_state {
            self.push(Item::HardState(state));
        }
        Ok(())
    }

    fn append_entries(&mut self, entries: &[Entry]) -> Result<(), LogError> {
        let mut run = Vec::new();
        let mut bytes = ITEM_OVERHEAD;
        for entry in entries {
            let more = encoded_len(entry);
            let alone = run.is_empty() && self.pending.items.is_empty();
            if !alone && self.used() + bytes + more > self.record_bytes() {
                if !run.is_empty() {
                    self.push(Item::Entries(mem::take(&mut run)));
                }
                self.write_pending()?;
                bytes = ITEM_OVERHEAD;
            }
            bytes += more;
            run.push(entry.clone());
        }
        if !run.is_empty() {
            self.push(Item::Entries(run));
        }
        Ok(())
    }

    /// Bytes in the record that is being filled.
    fn used(&self) -> usize {
        self.pending.buffer.len()
    }

    /// What a new segment takes.
    fn largest_record(&self) -> usize {
        in_memory(self.options.segment_bytes - RESERVED_BLOCKS * BLOCK)
    }

    /// Bytes after which a record is closed.
    fn record_bytes(&self) -> usize {
        in_memory(self.options.max_record_bytes).min(self.largest_record())
    }

    fn push(&mut self, item: Item) {
        let pending = &mut self.pending;
        match &item {
            Item::HardState(state) => {
                assert!(state.term >= pending.hard_state.term, "the term goes back");
                pending.hard_state = *state;
            }
            Item::Entries(entries) => {
                let (first, last) = match (entries.first(), entries.last()) {
                    (Some(first), Some(last)) => (first.index, last),
                    _ => unreachable!("runs of entries have some"),
                };
                assert!(first > pending.base, "entry {first} was compacted");
                assert!(first <= pending.last.index + 1, "entries before {first} are missing");
                let gapless = entries.windows(2).all(|pair| pair[0].index + 1 == pair[1].index);
                assert!(gapless, "entries from {first} on have gaps");
                pending.last = Position { index: last.index, term: last.term };
            }
            Item::Base(at) => pending.base = at.index,
            Item::Snapshot(at) => {
                assert!(at.index >= pending.base, "a snapshot older than the log's base");
                pending.base = at.index;
                pending.last = *at;
            }
            Item::Boot(_) | Item::Installing(_) => {}
        }
        codec::encode(&mut pending.buffer, &item);
        pending.items.push(item);
    }

    fn write_pending(&mut self) -> Result<(), LogError> {
        if self.pending.items.is_empty() {
            return Ok(());
        }
        let frees = |item: &Item| matches!(item, Item::Base(_) | Item::Snapshot(_));
        let frees = self.pending.items.iter().any(frees);
        self.write_record()?;
        if frees { self.drop_unneeded() } else { Ok(()) }
    }

    /// One record, one write, one sync; an empty one seals.
    fn write_record(&mut self) -> Result<(), LogError> {
        let room = frame::padded(self.used() - HEADER);
        if self.offset + room + BLOCK > self.active.bytes {
            self.roll()?;
        }
        assert!(self.offset + room + BLOCK <= self.active.bytes, "append bounds each record");
        let pending = &mut self.pending;
        let (seed, sequence) = (self.active.seed, self.sequence);
        let checksum =
            frame::finish(&mut pending.buffer, seed, sequence, self.previous, Kind::Group);
        let (path, file) = (&self.active.path, &self.active.file);
        file.write_at(self.offset, &pending.buffer).map_err(LogError::io_at(
            "write",
            path,
            self.offset,
        ))?;
        let end = self.offset + room;
        if end > self.filled {
            self.fill(end)?;
        }
        let (path, file) = (&self.active.path, &self.active.file);
        file.sync_data().map_err(LogError::io_at("sync", path, self.offset))?;
        let pending = &mut self.pending;
        let place = Place { segment: self.active.number, offset: self.offset };
        self.sealed = pending.items.is_empty();
        let mut shared = self.reader.shared_mut();
        for (number, item) in pending.items.drain(..).enumerate() {
            shared.history.add(&item, place, number).expect("append has asserted as much");
        }
        drop(shared);
        pending.buffer.clear();
        pending.buffer.resize(HEADER, 0);
        self.written_bytes += room;
        self.sequence += 1;
        self.previous = checksum;
        self.offset = end;
        Ok(())
    }

    /// Says that everything written so far was whole, unless the last record already does.
    fn seal(&mut self) -> Result<(), LogError> {
        if self.sealed { Ok(()) } else { self.write_record() }
    }

    /// Writes the next step of zeros, not synced yet.
    fn fill(&mut self, from: u64) -> Result<(), LogError> {
        let to = (from + self.options.fill_bytes).min(self.active.bytes);
        let (path, file) = (&self.active.path, &self.active.file);
        let zeros = vec![0; in_memory(to - from)];
        file.write_at(from, &zeros).map_err(LogError::io_at("fill", path, from))?;
        self.filled = to;
        Ok(())
    }

    /// Goes over to a new segment.
    fn roll(&mut self) -> Result<(), LogError> {
        let spare = match self.spares.pop() {
            Some(spare) => spare,
            None => self.make_spare()?,
        };
        let number = self.active.number + 1;
        let bytes = self.options.segment_bytes;
        let (last, repeated) = {
            let shared = self.reader.shared();
            (shared.history.last(), shared.history.repeated())
        };
        let identity = self.identity.clone();
        let start = Start { identity, segment: number, segment_bytes: bytes, last, repeated };
        let (record, checksum) = encode_start(&start, self.sequence, self.previous);
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

    /// Says in the old segment that the next one exists, so that its loss is noticed.
    fn mark_rolled(&self) -> Result<(), LogError> {
        let (path, file) = (&self.active.path, &self.active.file);
        let mut mark = vec![0; HEADER];
        frame::finish(&mut mark, self.active.seed, self.sequence, self.previous, Kind::Rolled);
        file.write_at(self.offset, &mark).map_err(LogError::io_at("write", path, self.offset))?;
        file.sync_data().map_err(LogError::io_at("sync", path, self.offset))
    }

    fn make_spare(&mut self) -> Result<Spare, LogError> {
        let path = spare_path(&self.directory, self.next_spare);
        self.next_spare += 1;
        match make_file(&self.disk, &path, self.options.segment_bytes) {
            Ok(file) => Ok(Spare { path, file, filled: 0 }),
            Err(error) => {
                // What there is of it takes space that others need.
                let _ = self.disk.remove(&path);
                Err(error)
            }
        }
    }

    /// Takes over what earlier runs have kept ready.
    fn find_spares(&mut self) -> Result<(), LogError> {
        let list = LogError::io("list", &self.directory);
        for name in self.disk.list(&self.directory).map_err(list)? {
            let Some(number) = number_in(&name, "spare") else { continue };
            self.next_spare = self.next_spare.max(number + 1);
            let path = self.directory.join(name);
            let opened = self.disk.open(&path, Open::Existing);
            let file = opened.map_err(LogError::io("open", &path))?;
            let len = file.len().map_err(LogError::io("measure", &path))?;
            if len == self.options.segment_bytes && self.spares.len() < self.options.spare_segments
            {
                // Its length may not be durable yet, as whoever made it may have been killed.
                file.sync_data().map_err(LogError::io("sync", &path))?;
                self.spares.push(Spare { path, file: file.into(), filled: 0 });
            } else {
                self.disk.remove(&path).map_err(LogError::io("remove", &path))?;
            }
        }
        Ok(())
    }

    /// Recycles the segments before the oldest one that still holds an entry, oldest first, each
    /// durably before the next: whatever a crash leaves has no gaps.
    fn drop_unneeded(&mut self) -> Result<(), LogError> {
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
                // No byte of it may change while a crash could bring its old name back.
                self.spares.push(Spare { path, file: segment.file, filled: segment.bytes });
            } else {
                let removed = self.disk.remove(&segment.path);
                removed.map_err(LogError::io("remove", &segment.path))?;
                sync_dir(&self.disk, &self.directory)?;
            }
        }
    }
}

fn encoded_len(entry: &Entry) -> usize {
    entry.data.len() + ENTRY_OVERHEAD
}

fn validate(options: &LogOptions) {
    let bytes = options.segment_bytes;
    assert!(bytes.is_multiple_of(BLOCK) && bytes >= 2 * RESERVED_BLOCKS * BLOCK, "{bytes}");
    let step = options.fill_bytes;
    assert!(step.is_multiple_of(BLOCK) && step > 0, "{step}");
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

fn lock(disk: &SharedDisk, directory: &Path) -> Result<DirLock, LogError> {
    disk.lock_dir(directory).map_err(|error| {
        if error.kind() == ErrorKind::WouldBlock {
            LogError::InUse { path: directory.to_path_buf() }
        } else {
            LogError::io("lock", directory)(error)
        }
    })
}

fn sync_dir(disk: &SharedDisk, directory: &Path) -> Result<(), LogError> {
    disk.sync_dir(directory).map_err(LogError::io("sync", directory))
}
