//! Encoding of batches into records, and writing records durably.

use std::mem;

use node_consensus::{Entry, HardState, Position};

use super::codec::{self, ENTRY_OVERHEAD, ITEM_OVERHEAD, Item};
use super::frame::{self, BLOCK_BYTES, HEADER_BYTES, RecordKind};
use super::history::Location;
use super::segment::to_usize;
use super::writer::RESERVED_BLOCKS;
use super::{Batch, Log, LogError};

impl Log {
    /// Adds a batch to the pending record. If the batch doesn't fit, the pending record is written
    /// first.
    pub(super) fn append(&mut self, batch: &Batch) -> Result<(), LogError> {
        let largest = self.largest_record() - HEADER_BYTES - ITEM_OVERHEAD - ENTRY_OVERHEAD;
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
        // If the batch needs several records, the first of them gets the term and the vote, but
        // keeps the old commit index.
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

    pub(super) fn append_entries(&mut self, entries: &[Entry]) -> Result<(), LogError> {
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

    /// Returns the number of bytes in the pending record, its header included.
    pub(super) fn used(&self) -> usize {
        self.pending.buffer.len()
    }

    /// Returns the size of the largest record that fits into a new segment.
    pub(super) fn largest_record(&self) -> usize {
        to_usize(self.options.segment_bytes - RESERVED_BLOCKS * BLOCK_BYTES)
    }

    /// Returns the size above which the pending record is written.
    pub(super) fn record_bytes(&self) -> usize {
        to_usize(self.options.max_record_bytes).min(self.largest_record())
    }

    pub(super) fn push(&mut self, item: Item) {
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

    pub(super) fn write_pending(&mut self) -> Result<(), LogError> {
        if self.pending.items.is_empty() {
            return Ok(());
        }
        let frees = |item: &Item| matches!(item, Item::Base(_) | Item::Snapshot(_));
        let frees = self.pending.items.iter().any(frees);
        self.write_record()?;
        if frees { self.drop_unneeded() } else { Ok(()) }
    }

    /// Writes the pending record with one write and one sync. If the pending record has no items,
    /// it seals the record before it.
    pub(super) fn write_record(&mut self) -> Result<(), LogError> {
        let room = frame::padded_bytes(self.used() - HEADER_BYTES);
        // One block must stay free after the record, for the record that marks a full segment.
        if self.offset + room + BLOCK_BYTES > self.active.bytes {
            self.roll()?;
        }
        assert!(self.offset + room + BLOCK_BYTES <= self.active.bytes, "append bounds each record");
        let pending = &mut self.pending;
        let (seed, sequence) = (self.active.seed, self.sequence);
        let checksum =
            frame::finish(&mut pending.buffer, seed, sequence, self.previous, RecordKind::Group);
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
        self.sync_record()?;
        let pending = &mut self.pending;
        let location = Location { segment: self.active.number, offset: self.offset };
        self.sealed = pending.items.is_empty();
        let mut shared = self.reader.shared_mut();
        for (number, item) in pending.items.drain(..).enumerate() {
            shared.history.add(&item, location, number).expect("append has asserted as much");
        }
        drop(shared);
        pending.buffer.clear();
        pending.buffer.resize(HEADER_BYTES, 0);
        self.written_bytes += room;
        self.sequence += 1;
        self.previous = checksum;
        self.offset = end;
        Ok(())
    }

    fn sync_record(&self) -> Result<(), LogError> {
        let (path, file) = (&self.active.path, &self.active.file);
        let mut synced = file.sync_data();
        if synced.is_err() && !self.options.guards.failed_sync_is_final() {
            // Tests only: retries a failed sync. The retry reports success although data is lost.
            synced = file.sync_data();
        }
        synced.map_err(LogError::io_at("sync", path, self.offset))
    }

    /// Seals the last record by an empty one, unless the last record is itself empty.
    pub(super) fn seal(&mut self) -> Result<(), LogError> {
        if self.sealed { Ok(()) } else { self.write_record() }
    }
}

fn encoded_len(entry: &Entry) -> usize {
    entry.data.len() + ENTRY_OVERHEAD
}
