//! Reading of past events from the store in bounded pieces, for watches that catch up.

use std::sync::Arc;

use super::WatchSpec;
use super::matcher::GroupKey;
use super::picked::EventSelection;
use crate::mvcc::error::StoreError;
use crate::mvcc::event::{Event, EventBatch};
use crate::mvcc::range::{lock_index, missing_record};
use crate::mvcc::record_rows::first_row_of;
use crate::mvcc::revision::Revision;
use crate::mvcc::rows;
use crate::mvcc::store::{Store, View};

/// Maximum number of keys of a range whose past changes are looked up in the key index. For a wider
/// range, all records are read in the order of their revisions.
const NARROW_KEYS: usize = 512;
/// Maximum number of revisions that one piece of past events covers, if its range has at most
/// [`NARROW_KEYS`] keys. The number can be large, since index lookups are cheap.
const NARROW_REVISIONS: i64 = 64 * 1024;

/// Result of reading one piece of the past events for a watch.
pub(super) enum CatchUpPiece {
    /// All matching events before revision `next`.
    Read { events: Option<Arc<EventSelection>>, next: i64 },
    /// The store has no revision `next` yet.
    UpToDate,
    /// The revision to read next was compacted.
    Compacted { compacted: i64 },
}

/// Size limits of a piece of past events. A piece that reaches one of them still gets all events of
/// its last revision.
#[derive(Clone, Copy)]
pub(super) struct PieceSize {
    pub(super) records: usize,
    pub(super) bytes: usize,
}

/// Events collected so far for a piece of past events.
#[derive(Default)]
struct CollectedEvents {
    events: Vec<Event>,
    bytes: usize,
}

impl CollectedEvents {
    fn is_full(&self, size: PieceSize) -> bool {
        self.events.len() >= size.records || self.bytes >= size.bytes
    }

    /// Returns the revision of the last collected event, if `at` belongs to a later revision.
    fn ends_before(&self, at: Revision) -> Option<i64> {
        let last = self.events.last()?.revision.main;
        (last < at.main).then_some(last)
    }

    fn push(&mut self, event: Event) {
        self.bytes += event.kv.len();
        self.events.push(event);
    }
}

/// Reads one piece of the past events that `spec` matches, from the revision `next` on. The piece
/// ends with the revision in which it reaches `size`.
pub(super) fn read_piece(
    store: &Store,
    view: &View,
    spec: &WatchSpec,
    next: i64,
    size: PieceSize,
) -> Result<CatchUpPiece, StoreError> {
    let newest = view.revision();
    // The index can be newer than the view. Every change up to `newest` that is still in the index
    // is also in the view.
    let (compacted, narrow) = {
        let index = lock_index(&store.shared.index);
        let compacted = index.compact_revision();
        let narrow = next >= compacted && !index.is_wider_than(&spec.range, NARROW_KEYS);
        let upto = newest.min(next.saturating_add(NARROW_REVISIONS));
        (compacted, narrow.then(|| (index.changes(&spec.range, next, upto), upto)))
    };
    if next < compacted {
        return Ok(CatchUpPiece::Compacted { compacted });
    }
    if next > newest {
        return Ok(CatchUpPiece::UpToDate);
    }
    let (events, told) = match narrow {
        Some((changes, upto)) => read_changes(view, changes, upto, size)?,
        None => read_all(view, next, size)?,
    };
    let group = GroupKey::of(spec);
    let batch = Arc::new(EventBatch { revision: told, events });
    let picks = group.picks((0..).zip(&batch.events));
    let events = (!picks.is_empty()).then(|| Arc::new(EventSelection::new(batch, picks)));
    Ok(CatchUpPiece::Read { events, next: told + 1 })
}

/// Reads the events of `changes` until the piece is full. Also returns the revision up to which the
/// events are complete.
fn read_changes(
    view: &View,
    mut changes: Vec<Revision>,
    upto: i64,
    size: PieceSize,
) -> Result<(Vec<Event>, i64), StoreError> {
    changes.sort_unstable();
    let mut read = CollectedEvents::default();
    for at in changes {
        if read.is_full(size)
            && let Some(told) = read.ends_before(at)
        {
            return Ok((read.events, told));
        }
        let event = rows::read_record(view, at, |record| Event::of_record(at, record))?;
        read.push(event.ok_or_else(|| missing_record(at))??);
    }
    Ok((read.events, upto))
}

/// Reads all events from revision `next` on, until the piece is full. Also returns the revision up
/// to which the events are complete.
fn read_all(view: &View, next: i64, size: PieceSize) -> Result<(Vec<Event>, i64), StoreError> {
    let mut read = CollectedEvents::default();
    for row in view.rows(first_row_of(next)..u128::MAX)? {
        let (first, row) = row?;
        for record in rows::records(first, &row) {
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
