//! Reading past events from the store, a bounded piece at a time.

use std::sync::Arc;

use super::WatchSpec;
use super::matcher::GroupKey;
use super::picked::Picked;
use crate::mvcc::error::StoreError;
use crate::mvcc::event::{Event, EventBatch};
use crate::mvcc::range::{missing, read};
use crate::mvcc::revision::Revision;
use crate::mvcc::rows;
use crate::mvcc::store::{Store, View};

/// A range of at most so many keys is looked up in the index; a wider one is read by revision.
const NARROW_KEYS: usize = 512;
/// Revisions per piece, in a narrow range: the index is cheap to ask.
const NARROW_REVISIONS: i64 = 64 * 1024;

/// What came of a piece.
pub(super) enum Piece {
    /// Told everything before `next`.
    Read { events: Option<Arc<Picked>>, next: i64 },
    /// The store has nothing from `next` on.
    UpToDate,
    /// The next revision is gone.
    Compacted { compacted: i64 },
}

/// Where a piece ends: at the first revision after so much.
#[derive(Clone, Copy)]
pub(super) struct PieceSize {
    pub(super) records: usize,
    pub(super) bytes: usize,
}

/// What has been read of a piece.
#[derive(Default)]
struct Read {
    events: Vec<Event>,
    bytes: usize,
}

impl Read {
    fn is_full(&self, size: PieceSize) -> bool {
        self.events.len() >= size.records || self.bytes >= size.bytes
    }

    /// The last revision of which something is here, if `at` belongs to a later one.
    fn ends_before(&self, at: Revision) -> Option<i64> {
        let last = self.events.last()?.revision.main;
        (last < at.main).then_some(last)
    }

    fn push(&mut self, event: Event) {
        self.bytes += event.kv.len();
        self.events.push(event);
    }
}

/// Reads what `spec` wants from `next` on in a `view` of `store`, up to the end of the revision in
/// which the piece is full.
pub(super) fn read_piece(
    store: &Store,
    view: &View,
    spec: &WatchSpec,
    next: i64,
    size: PieceSize,
) -> Result<Piece, StoreError> {
    let newest = view.revision();
    // Where the index is ahead of the view, what it still has is in the view as well.
    let (compacted, narrow) = {
        let index = read(&store.shared.index);
        let compacted = index.compacted();
        let narrow = next >= compacted && !index.is_wider_than(&spec.range, NARROW_KEYS);
        let upto = newest.min(next.saturating_add(NARROW_REVISIONS));
        (compacted, narrow.then(|| (index.changes(&spec.range, next, upto), upto)))
    };
    if next < compacted {
        return Ok(Piece::Compacted { compacted });
    }
    if next > newest {
        return Ok(Piece::UpToDate);
    }
    let (events, told) = match narrow {
        Some((changes, upto)) => read_changes(view, changes, upto, size)?,
        None => read_all(view, next, size)?,
    };
    let group = GroupKey::of(spec);
    let batch = Arc::new(EventBatch { revision: told, events });
    let picks = group.picks((0..).zip(&batch.events));
    let events = (!picks.is_empty()).then(|| Arc::new(Picked::new(batch, picks)));
    Ok(Piece::Read { events, next: told + 1 })
}

/// The events of `changes`, and the revision up to which they are complete.
fn read_changes(
    view: &View,
    mut changes: Vec<Revision>,
    upto: i64,
    size: PieceSize,
) -> Result<(Vec<Event>, i64), StoreError> {
    changes.sort_unstable();
    let mut read = Read::default();
    for at in changes {
        if read.is_full(size)
            && let Some(told) = read.ends_before(at)
        {
            return Ok((read.events, told));
        }
        let event = rows::at(&view.records, at, |record| Event::of_record(at, record))?;
        read.push(event.ok_or_else(|| missing(at))??);
    }
    Ok((read.events, upto))
}

/// All events from `next` on, and the revision up to which they are complete.
fn read_all(view: &View, next: i64, size: PieceSize) -> Result<(Vec<Event>, i64), StoreError> {
    let mut read = Read::default();
    for row in view.records.range(Revision { main: next, sub: 0 }.to_row()..)? {
        let (first, row) = row?;
        for record in rows::records(first.value(), row.value()) {
            let (at, record) = record?;
            if read.is_full(size)
                && let Some(told) = read.ends_before(at)
            {
                return Ok((read.events, told));
            }
            read.push(Event::of_record(at, record)?);
        }
    }
    Ok((read.events, view.revision()))
}
