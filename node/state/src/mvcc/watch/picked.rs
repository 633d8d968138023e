//! Events of a batch for a group of watchers. The events are encoded at most once for the whole
//! group.

use std::sync::{Arc, OnceLock};

use bytes::{BufMut as _, Bytes, BytesMut};
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint};

use crate::mvcc::event::{Event, EventBatch, EventKind};
use crate::mvcc::range::lock_index;
use crate::mvcc::record_rows::RowLookup as _;
use crate::mvcc::store::Store;

/// Field number of `WatchResponse.events`.
const EVENTS_FIELD: u32 = 11;
/// Field numbers of `Event.type`, `.kv` and `.prev_kv`.
const TYPE_FIELD: u32 = 1;
const KV_FIELD: u32 = 2;
const PREV_KV_FIELD: u32 = 3;

/// Events of a batch for all watchers with the same keys and the same filters.
#[derive(Debug)]
pub struct EventSelection {
    batch: Arc<EventBatch>,
    picks: Vec<u32>,
    plain: OnceLock<Vec<Bytes>>,
    with_previous: OnceLock<Vec<Bytes>>,
}

impl EventSelection {
    pub(super) fn new(batch: Arc<EventBatch>, picks: Vec<u32>) -> Self {
        Self { batch, picks, plain: OnceLock::new(), with_previous: OnceLock::new() }
    }

    /// Returns the store's revision after the batch. After these events, a watcher has all events
    /// up to that revision.
    #[must_use]
    pub fn revision(&self) -> i64 {
        self.batch.revision
    }

    /// Returns the approximate number of bytes that the whole batch takes in memory.
    pub(super) fn weight(&self) -> usize {
        self.batch.weight()
    }

    /// Returns the number of events, which is never 0.
    #[must_use]
    pub fn len(&self) -> usize {
        self.picks.len()
    }

    /// Whether there are no events, which never happens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.picks.is_empty()
    }

    /// Returns the events in order.
    pub fn events(&self) -> impl Iterator<Item = &Event> {
        self.picks.iter().filter_map(|pick| self.batch.events.get(usize::try_from(*pick).ok()?))
    }

    /// Returns each event as an encoded field of `WatchResponse`.
    pub fn encoded(&self) -> &[Bytes] {
        self.plain.get_or_init(|| encode_all(self.events().map(|event| (event, None))))
    }

    /// Returns each event, with the key's previous value, as an encoded field of `WatchResponse`. A
    /// previous value is left out if there was none or it was compacted. Reads the store on the
    /// first call.
    pub fn encoded_with_previous(&self, store: &Store) -> &[Bytes] {
        self.with_previous
            .get_or_init(|| encode_all(self.events().map(|event| (event, previous(store, event)))))
    }
}

/// Returns the encoded `KeyValue` that `event` replaced, if it can still be read.
fn previous(store: &Store, event: &Event) -> Option<Vec<u8>> {
    if event.is_create {
        return None;
    }
    let before = event.revision.main - 1;
    let view = store.view();
    let at = {
        let index = lock_index(&store.shared.index);
        if index.compact_revision() > before {
            return None;
        }
        index.get(&event.key, before)?
    };
    match view.get(at.to_row(), <[u8]>::to_vec) {
        Ok(record) => record,
        Err(error) => {
            tracing::error!(error = %error, "a previous value could not be read");
            None
        }
    }
}

/// Encodes all events into one buffer, and returns one slice of it for each event.
fn encode_all<'a>(events: impl Iterator<Item = (&'a Event, Option<Vec<u8>>)>) -> Vec<Bytes> {
    let mut buffer = BytesMut::new();
    let mut ends = Vec::new();
    for (event, previous) in events {
        encode(event, previous.as_deref(), &mut buffer);
        ends.push(buffer.len());
    }
    let buffer = buffer.freeze();
    let mut start = 0;
    let cut = |end| {
        let piece = buffer.slice(start..end);
        start = end;
        piece
    };
    ends.into_iter().map(cut).collect()
}

fn encode(event: &Event, previous: Option<&[u8]>, out: &mut BytesMut) {
    let field = |bytes: &[u8]| 1 + encoded_len_varint(bytes.len() as u64) + bytes.len();
    let dead = event.kind == EventKind::Delete;
    let length = if dead { 2 } else { 0 } + field(&event.kv) + previous.map_or(0, field);
    encode_key(EVENTS_FIELD, WireType::LengthDelimited, out);
    encode_varint(length as u64, out);
    if dead {
        encode_key(TYPE_FIELD, WireType::Varint, out);
        encode_varint(1, out);
    }
    let mut put = |number, bytes: &[u8]| {
        encode_key(number, WireType::LengthDelimited, out);
        encode_varint(bytes.len() as u64, out);
        out.put_slice(bytes);
    };
    put(KV_FIELD, &event.kv);
    if let Some(previous) = previous {
        put(PREV_KV_FIELD, previous);
    }
}
