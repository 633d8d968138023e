//! Some events of a batch, encoded at most once for however many watchers want them.

use std::sync::{Arc, OnceLock};

use bytes::{BufMut as _, Bytes, BytesMut};
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint};

use crate::mvcc::event::{Event, EventBatch, EventKind};
use crate::mvcc::range::read;
use crate::mvcc::store::Store;

/// `WatchResponse.events`.
const EVENTS_FIELD: u32 = 11;
/// `Event.type`, `.kv` and `.prev_kv`.
const TYPE_FIELD: u32 = 1;
const KV_FIELD: u32 = 2;
const PREV_KV_FIELD: u32 = 3;

/// The events of a batch that one kind of watcher (same keys, same filters) is told.
#[derive(Debug)]
pub struct Picked {
    batch: Arc<EventBatch>,
    picks: Vec<u32>,
    plain: OnceLock<Vec<Bytes>>,
    with_previous: OnceLock<Vec<Bytes>>,
}

impl Picked {
    pub(super) fn new(batch: Arc<EventBatch>, picks: Vec<u32>) -> Self {
        Self { batch, picks, plain: OnceLock::new(), with_previous: OnceLock::new() }
    }

    /// The store's revision after the batch: everything up to it that the watcher wants has been
    /// told with this.
    #[must_use]
    pub fn revision(&self) -> i64 {
        self.batch.revision
    }

    /// What it keeps in memory, roughly.
    pub(super) fn weight(&self) -> usize {
        self.batch.weight()
    }

    /// How many events.
    #[must_use]
    pub fn len(&self) -> usize {
        self.picks.len()
    }

    /// Whether there are none; there always are some.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.picks.is_empty()
    }

    /// The events, in order.
    pub fn events(&self) -> impl Iterator<Item = &Event> {
        self.picks.iter().filter_map(|pick| self.batch.events.get(usize::try_from(*pick).ok()?))
    }

    /// Each event as an encoded field of `WatchResponse`.
    pub fn encoded(&self) -> &[Bytes] {
        self.plain.get_or_init(|| encode_all(self.events().map(|event| (event, None))))
    }

    /// The same, each with the value that the key had before, if it had one and it can still be
    /// read. Reads the store the first time.
    pub fn encoded_with_previous(&self, store: &Store) -> &[Bytes] {
        self.with_previous
            .get_or_init(|| encode_all(self.events().map(|event| (event, previous(store, event)))))
    }
}

/// The encoded `KeyValue` that `event` replaced.
fn previous(store: &Store, event: &Event) -> Option<Vec<u8>> {
    if event.is_create {
        return None;
    }
    let before = event.revision.main - 1;
    let view = store.view();
    let at = {
        let index = read(&store.shared.index);
        if index.compacted() > before {
            return None;
        }
        index.get(&event.key, before)?
    };
    match view.records.get(at.to_row()) {
        Ok(record) => record.map(|record| record.value().to_vec()),
        Err(error) => {
            tracing::error!(error = %error, "a previous value could not be read");
            None
        }
    }
}

/// One buffer for all, cut into one piece per event.
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
