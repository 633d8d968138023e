//! Changes as watchers get them: encoded once and shared by all watchers.

use bytes::{Buf as _, BufMut, Bytes};
use node_proto::mvccpb::KeyValue;
use prost::Message as _;
use prost::encoding::encode_varint;

use super::error::StoreError;
use super::revision::Revision;

/// Kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// The key was written.
    Put,
    /// The key was deleted.
    Delete,
}

/// One change of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub key: Bytes,
    /// Whether the key was written or deleted.
    pub kind: EventKind,
    /// Revision of the change.
    pub revision: Revision,
    /// Whether this put created the key, so that there is no previous value.
    pub is_create: bool,
    /// Encoded `mvccpb.KeyValue` of the event.
    pub kv: Bytes,
}

impl Event {
    /// Makes the event from a stored record.
    pub(crate) fn of_record(revision: Revision, record: &[u8]) -> Result<Self, StoreError> {
        let kv = decode(record)?;
        let dead = is_tombstone(&kv);
        Ok(Self {
            key: kv.key.clone(),
            kind: if dead { EventKind::Delete } else { EventKind::Put },
            revision,
            is_create: !dead && kv.version == 1,
            kv: if dead {
                let mut event = Vec::new();
                encode_deleted(&kv.key, revision, &mut event);
                event.into()
            } else {
                Bytes::copy_from_slice(record)
            },
        })
    }
}

/// Changes of one applied batch, in order.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct EventBatch {
    /// The store's revision after the batch.
    pub revision: i64,
    /// Events ordered by revision. Events of one main revision have the order of the request's
    /// operations.
    pub events: Vec<Event>,
}

impl EventBatch {
    /// Returns the approximate number of bytes that the batch takes in memory.
    #[must_use]
    pub fn weight(&self) -> usize {
        self.events.iter().map(|event| event.kv.len() + size_of::<Event>()).sum()
    }
}

/// Decodes a stored record: a `KeyValue`, encoded as etcd stores it. A tombstone has only a key.
pub(crate) fn decode(record: &[u8]) -> Result<KeyValue, StoreError> {
    KeyValue::decode(Bytes::copy_from_slice(record))
        .map_err(|error| StoreError::Corrupt(format!("a record is no KeyValue: {error}")))
}

pub(crate) fn is_tombstone(kv: &KeyValue) -> bool {
    kv.create_revision == 0
}

/// First byte of an encoded `KeyValue` whose key isn't empty: the protobuf tag of the field `key`.
pub(crate) const KEY_TAG: u8 = 0x0a;
/// Protobuf tag of the field `mod_revision`.
const MOD_REVISION_TAG: u8 = 0x18;

/// Encodes the record of a delete: a `KeyValue` with only the key.
pub(crate) fn encode_tombstone(key: &[u8], into: &mut impl BufMut) {
    into.put_u8(KEY_TAG);
    encode_varint(key.len() as u64, into);
    into.put_slice(key);
}

/// Encodes the `KeyValue` that watchers get for a delete: the key, and the delete's main revision.
pub(crate) fn encode_deleted(key: &[u8], at: Revision, into: &mut impl BufMut) {
    encode_tombstone(key, into);
    into.put_u8(MOD_REVISION_TAG);
    encode_varint(at.main.cast_unsigned(), into);
}

/// Returns the key at the start of an encoded `KeyValue`, as a slice of the same memory.
pub(crate) fn key_of(kv: &Bytes) -> Bytes {
    let mut rest = kv.clone();
    rest.advance(1);
    let Ok(length) = prost::decode_length_delimiter(&mut rest) else { return Bytes::new() };
    rest.truncate(length);
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_is_found_in_an_encoded_record() {
        for length in [1, 127, 128, 5_000] {
            let key = Bytes::from(vec![b'k'; length]);
            let record: Bytes = KeyValue { key: key.clone(), version: 3, ..Default::default() }
                .encode_to_vec()
                .into();
            assert_eq!(key_of(&record), key);
        }
    }

    #[test]
    fn tombstones_encoded_by_hand_equal_the_librarys_encoding() {
        for (length, main) in [(1, 2), (127, 300), (128, i64::MAX), (5_000, 1 << 40)] {
            let key = Bytes::from(vec![b'k'; length]);
            let (mut record, mut event) = (Vec::new(), Vec::new());
            encode_tombstone(&key, &mut record);
            encode_deleted(&key, Revision { main, sub: 3 }, &mut event);
            let tombstone = KeyValue { key, ..KeyValue::default() };
            assert_eq!(record, tombstone.encode_to_vec());
            assert_eq!(event, KeyValue { mod_revision: main, ..tombstone }.encode_to_vec());
        }
    }

    #[test]
    fn a_tombstone_becomes_a_delete_with_its_revision() -> Result<(), StoreError> {
        let at = Revision { main: 9, sub: 1 };
        let mut record = Vec::new();
        encode_tombstone(b"k", &mut record);
        let event = Event::of_record(at, &record)?;
        assert_eq!(event.kind, EventKind::Delete);
        assert_eq!(decode(&event.kv)?.mod_revision, 9);
        Ok(())
    }
}
