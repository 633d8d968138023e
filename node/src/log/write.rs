//! Making, flushing, filling ahead, and reading old entries back.

use std::path::Path;

use bytes::Bytes;
use node_consensus::{Entry, Position};
use prost::Message as _;

use super::index::{Extent, Index};
use super::record::{Group, HEADER, Header, Kind, Place, Start, VERSION, WireBatch, encode};
use super::segment::{Directory, NAME, NAME_WHILE_MADE, disk_error, fill};
use super::{Batch, Current, Identity, Log, LogError, LogOptions};
use crate::disk::{Open, SharedDisk, read_padded};

/// Bytes of entries after which one flush makes a second record of the rest. Half of
/// `max_record_bytes`, so that one more entry always fits.
fn split_at(options: &LogOptions) -> usize {
    usize::try_from(options.max_record_bytes / 2).unwrap_or(usize::MAX)
}

impl Log {
    /// Whether `member_dir` holds a log.
    pub fn exists(disk: &SharedDisk, member_dir: &Path) -> Result<bool, LogError> {
        let path = member_dir.join(NAME);
        disk.exists(&path).map_err(disk_error("look at", &path))
    }

    /// Makes an empty log under a temporary name and renames it when it is durable.
    pub fn create(
        disk: &SharedDisk,
        member_dir: &Path,
        identity: &Identity,
        options: &LogOptions,
    ) -> Result<(), LogError> {
        let making = member_dir.join(NAME_WHILE_MADE);
        disk.create_dir(&making).map_err(disk_error("create", &making))?;
        for name in disk.list(&making).map_err(disk_error("list", &making))? {
            let path = making.join(name);
            disk.remove(&path).map_err(disk_error("remove", &path))?;
        }
        let path = making.join(super::segment::live_name(1));
        let file = disk.open(&path, Open::New).map_err(disk_error("create", &path))?;
        fill(&*file, 0, options).map_err(disk_error("fill", &path))?;
        let mut bytes = Vec::new();
        let place =
            Place { segment: 1, incarnation: identity.incarnation, sequence: 1, previous: 0 };
        encode(
            &mut bytes,
            Kind::Start,
            place,
            &start(identity, 0, Default::default(), Position::default(), None),
        );
        file.write_at(0, &bytes).map_err(disk_error("write", &path))?;
        file.sync_data().map_err(disk_error("sync", &path))?;
        disk.sync_dir(&making).map_err(disk_error("sync", &making))?;
        let to = member_dir.join(NAME);
        disk.rename(&making, &to).map_err(disk_error("rename", &making))?;
        disk.sync_dir(member_dir).map_err(disk_error("sync", member_dir))
    }

    /// Makes all batches durable, in order, with one write and one sync (more only if they exceed
    /// one record). After an error nothing is written any more.
    pub fn write(&mut self, batches: &[Batch]) -> Result<(), LogError> {
        if self.poisoned {
            return Err(LogError::Poisoned);
        }
        self.poisoned = true;
        self.write_groups(batches)?;
        self.poisoned = false;
        Ok(())
    }

    fn write_groups(&mut self, batches: &[Batch]) -> Result<(), LogError> {
        let limit = split_at(&self.options);
        let mut group = Vec::new();
        let mut bytes = 0;
        for batch in batches {
            for piece in pieces(batch, limit) {
                let size: usize = piece.entries.iter().map(|entry| entry.data.len() + 32).sum();
                if bytes > 0 && bytes + size > limit {
                    self.flush(std::mem::take(&mut group), 0)?;
                    bytes = 0;
                }
                bytes += size;
                group.push(piece);
            }
        }
        if group.is_empty() { Ok(()) } else { self.flush(group, 0) }
    }

    /// One record, one write, one sync.
    pub(super) fn flush(&mut self, batches: Vec<Batch>, boot: u64) -> Result<(), LogError> {
        let mut index = Trial { last: self.index.last(), index: &self.index, terms: Vec::new() };
        let mut wire = Group { boot, batches: Vec::with_capacity(batches.len()) };
        for batch in &batches {
            let before = index.place(batch)?;
            wire.batches.push(WireBatch::new(batch, before));
        }
        let length = HEADER + wire.encoded_len();
        if length as u64 > self.options.max_record_bytes {
            return Err(LogError::Batch { what: "one record can't hold it" });
        }
        let padded = (length as u64).next_multiple_of(super::BLOCK);
        if self.current.offset + padded > self.options.segment_bytes {
            self.roll()?;
        }
        let place = self.place();
        let crc = encode(&mut self.buffer, Kind::Group, place, &wire);
        let offset = self.current.offset;
        self.write_buffer()?;
        self.previous = crc;
        self.sequence += 1;
        for batch in wire.batches {
            let bytes = u32::try_from(length).expect("bounded by max_record_bytes");
            self.note(batch, place.segment, offset, bytes)
                .map_err(|what| LogError::Batch { what })?;
        }
        Ok(())
    }

    fn place(&self) -> Place {
        Place {
            segment: self.current.id,
            incarnation: self.identity.incarnation,
            sequence: self.sequence,
            previous: self.previous,
        }
    }

    fn write_buffer(&mut self) -> Result<(), LogError> {
        let path = self.directory.path(self.current.id);
        let current = &mut self.current;
        current.file.write_at(current.offset, &self.buffer).map_err(disk_error("write", &path))?;
        current.file.sync_data().map_err(disk_error("sync", &path))?;
        current.offset += self.buffer.len() as u64;
        current.filled = current.filled.max(current.offset);
        self.written_bytes += self.buffer.len() as u64;
        Ok(())
    }

    /// Keeps what a record says.
    pub(super) fn note(
        &mut self,
        batch: WireBatch,
        segment: u64,
        offset: u64,
        bytes: u32,
    ) -> Result<(), &'static str> {
        if let Some(state) = batch.hard_state {
            self.hard_state = state.into();
        }
        if let Some(at) = batch.installing {
            self.installing = Some(at.into());
        }
        if let Some(at) = batch.snapshot {
            self.installing = None;
            self.index.restore(at.into());
        }
        if let (Some(before), Some(last)) = (batch.before, batch.entries.last()) {
            let extent = Extent { last: last.index, segment, offset, bytes };
            let terms = batch.entries.iter().map(|entry| entry.term);
            self.index.append(before.into(), terms, extent)?;
        }
        Ok(())
    }

    /// Goes on in a new segment, whose first record is durable before anything follows it.
    fn roll(&mut self) -> Result<(), LogError> {
        let id = self.current.id + 1;
        let (file, filled) = self.directory.add(id)?;
        self.current = Current { id, file, offset: 0, filled };
        let start =
            start(&self.identity, self.boot, self.hard_state, self.index.last(), self.installing);
        let place = self.place();
        let crc = encode(&mut self.buffer, Kind::Start, place, &start);
        self.write_buffer()?;
        self.previous = crc;
        self.sequence += 1;
        Ok(())
    }

    /// One step of work ahead of need: zeros in the current segment, then spares. Whether there is
    /// more to do. To be called when nothing else waits.
    pub fn prepare(&mut self) -> Result<bool, LogError> {
        if self.poisoned {
            return Err(LogError::Poisoned);
        }
        let ahead = self.current.filled < self.options.segment_bytes
            && self.current.filled < self.current.offset + 8 * self.options.fill_bytes;
        if ahead {
            let path = self.directory.path(self.current.id);
            let filled = fill(&*self.current.file, self.current.filled, &self.options);
            let synced = filled.and_then(|filled| {
                self.current.file.sync_data()?;
                Ok(filled)
            });
            match synced {
                Ok(filled) => self.current.filled = filled,
                Err(error) => {
                    self.poisoned = true;
                    return Err(disk_error("fill", &path)(error));
                }
            }
            return Ok(true);
        }
        let made = self.directory.make_spare(&self.options);
        self.poisoned = made.is_err();
        made
    }

    /// Entries from `low` up to but not including `high`, at least one and otherwise at most
    /// `max_bytes` of them.
    pub fn read(&self, low: u64, high: u64, max_bytes: u64) -> Result<Vec<Entry>, LogError> {
        let mut entries: Vec<Entry> = Vec::new();
        let mut bytes = 0;
        let mut next = low;
        while next < high.min(self.index.last().index + 1) {
            let (first, extent) = self.index.find(next).ok_or(LogError::NotThere { low: next })?;
            for entry in self.read_run(first, extent)? {
                if entry.index != next || next >= high {
                    continue;
                }
                bytes += entry.data.len() as u64;
                if !entries.is_empty() && bytes > max_bytes {
                    return Ok(entries);
                }
                next += 1;
                entries.push(entry);
            }
            if next <= extent.last && next < high {
                return Err(LogError::NotThere { low: next });
            }
        }
        Ok(entries)
    }

    /// The entries of one record that are still those of the log.
    fn read_run(&self, first: u64, extent: Extent) -> Result<Vec<Entry>, LogError> {
        let path = self.directory.path(extent.segment);
        let other;
        let file = if extent.segment == self.current.id {
            &self.current.file
        } else {
            other = self.directory.open(extent.segment)?;
            &other
        };
        let mut bytes = vec![0; extent.bytes as usize];
        read_padded(&**file, extent.offset, &mut bytes).map_err(disk_error("read", &path))?;
        let corrupt = |what| LogError::Corrupt { path: path.clone(), offset: extent.offset, what };
        let head = bytes.first_chunk().expect("an extent is longer than a header");
        let header = Header::parse(head).ok_or_else(|| corrupt("not a record"))?;
        let bytes = Bytes::from(bytes);
        let payload = bytes.slice(HEADER..);
        if header.expected_crc(extent.segment, self.identity.incarnation, &payload) != header.crc
            && self.options.guards.verify_tail()
        {
            return Err(corrupt("its checksum doesn't fit"));
        }
        let group = Group::decode(payload).map_err(|_| corrupt("not readable"))?;
        let mut entries = Vec::new();
        for batch in group.batches {
            for entry in batch.entries {
                let ours = entry.index >= first
                    && entry.index <= extent.last
                    && self.index.term_at(entry.index) == Some(entry.term);
                if ours {
                    entries.push(entry.into());
                }
            }
        }
        Ok(entries)
    }
}

/// A batch in pieces of about `limit` bytes. What isn't entries goes with the first.
fn pieces(batch: &Batch, limit: usize) -> Vec<Batch> {
    let mut pieces = vec![Batch { entries: Vec::new(), ..batch.clone_without_entries() }];
    let mut bytes = 0;
    for entry in &batch.entries {
        let size = entry.data.len() + 32;
        if bytes > 0 && bytes + size > limit {
            pieces.push(Batch::default());
            bytes = 0;
        }
        bytes += size;
        let piece = pieces.last_mut().expect("there is always a first piece");
        piece.entries.push(entry.clone());
    }
    pieces
}

impl Batch {
    fn clone_without_entries(&self) -> Self {
        Self {
            hard_state: self.hard_state,
            installing: self.installing,
            snapshot: self.snapshot,
            entries: Vec::new(),
        }
    }
}

/// Walks through batches ahead of writing them, to know what stands before each run.
struct Trial<'a> {
    index: &'a Index,
    last: Position,
    /// Terms given by the batches so far, by index, or None after a snapshot.
    terms: Vec<(u64, u64)>,
}

impl Trial<'_> {
    fn place(&mut self, batch: &Batch) -> Result<Option<Position>, LogError> {
        if let Some(at) = batch.snapshot {
            self.last = at;
            self.terms = vec![(at.index, at.term)];
        }
        let Some(first) = batch.entries.first() else { return Ok(None) };
        let index = first.index - 1;
        let known = self.terms.iter().rev().find(|(at, _)| *at == index).map(|(_, term)| *term);
        let term = if index == self.last.index {
            self.last.term
        } else {
            known
                .or_else(|| self.index.term_at(index))
                .filter(|_| index < self.last.index)
                .ok_or(LogError::Batch { what: "a gap before its entries" })?
        };
        for (at, entry) in (first.index..).zip(&batch.entries) {
            if entry.index != at {
                return Err(LogError::Batch { what: "a gap between its entries" });
            }
            self.terms.push((entry.index, entry.term));
        }
        let last = batch.entries.last().expect("it has a first");
        self.last = Position { index: last.index, term: last.term };
        Ok(Some(Position { index, term }))
    }
}

pub(super) fn start(
    identity: &Identity,
    boot: u64,
    hard_state: node_consensus::HardState,
    last: Position,
    installing: Option<Position>,
) -> Start {
    Start {
        version: VERSION,
        cluster: identity.cluster,
        member: identity.member,
        incarnation: identity.incarnation.to_be_bytes().to_vec(),
        voters: identity.voters.clone(),
        boot,
        hard_state: hard_state.into(),
        last: last.into(),
        installing: installing.map(Into::into),
    }
}

/// The directory of the log in `member_dir`.
pub(super) fn directory(disk: &SharedDisk, member_dir: &Path) -> Directory {
    Directory::new(disk.clone(), member_dir.join(NAME))
}
