//! Encoding of a record's payload: a sequence of items, each a tag and fixed fields.
//!
//! The decoder must expect arbitrary bytes, because a 32-bit checksum doesn't exclude them. So it
//! is written by hand, and checks each length against the remaining bytes before it allocates or
//! adds anything.

use bytes::Bytes;
use node_consensus::{Entry, EntryKind, HardState, MAX_INDEX, Position};

use super::LogIdentity;

/// Version of the segment format. Segments of other versions are refused.
pub(super) const VERSION: u8 = 2;
/// Bytes that an entry takes besides its data.
pub(super) const ENTRY_OVERHEAD: usize = 13;
/// Maximum bytes of an item without the entries in it.
pub(super) const ITEM_OVERHEAD: usize = 32;

const BOOT: u8 = 1;
const HARD_STATE: u8 = 2;
const ENTRIES: u8 = 3;
const BASE: u8 = 4;
const SNAPSHOT: u8 = 5;
const INSTALLING: u8 = 6;

/// One item of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Item {
    /// Number of times that the log has been opened.
    Boot(u64),
    /// Hard state, which replaces the previous one.
    HardState(HardState),
    /// Contiguous entries, never empty. They replace all log entries from their first index on.
    Entries(Vec<Entry>),
    /// The log begins after this position.
    Base(Position),
    /// A snapshot of this position is about to replace the store.
    Installing(Position),
    /// A snapshot of this position has replaced the store, and so replaces the log.
    Snapshot(Position),
}

/// Content of a segment's first record, including the items that it repeats from earlier segments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SegmentHeader {
    pub identity: LogIdentity,
    pub segment: u64,
    pub segment_bytes: u64,
    /// Position of the last log entry at the time when the segment was started.
    pub last: Position,
    pub repeated: Vec<Item>,
}

/// Reason why bytes can't be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RecordDecodeError {
    /// The bytes contradict themselves.
    Malformed(&'static str),
    /// A tag or format version that this build doesn't know.
    Unknown(u8),
    /// An entry of a kind that this build doesn't know.
    UnknownEntry { index: u64, kind: u8 },
}

pub(super) fn encode_segment_header(out: &mut Vec<u8>, start: &SegmentHeader) {
    out.push(VERSION);
    for part in [start.identity.cluster, start.identity.member] {
        out.extend_from_slice(&part.to_le_bytes());
    }
    out.extend_from_slice(&start.identity.incarnation.to_be_bytes());
    for part in [start.segment, start.segment_bytes, start.last.index, start.last.term] {
        out.extend_from_slice(&part.to_le_bytes());
    }
    for item in &start.repeated {
        encode(out, item);
    }
}

pub(super) fn encode(out: &mut Vec<u8>, item: &Item) {
    match item {
        Item::Boot(count) => put_words(out, BOOT, &[*count]),
        Item::HardState(state) => {
            put_words(out, HARD_STATE, &[state.term, state.vote, state.commit])
        }
        Item::Base(at) => put_words(out, BASE, &[at.index, at.term]),
        Item::Installing(at) => put_words(out, INSTALLING, &[at.index, at.term]),
        Item::Snapshot(at) => put_words(out, SNAPSHOT, &[at.index, at.term]),
        Item::Entries(entries) => {
            let first = entries.first().expect("an item of entries has some").index;
            put_words(out, ENTRIES, &[first]);
            put_count(out, entries.len());
            for entry in entries {
                out.extend_from_slice(&entry.term.to_le_bytes());
                out.push(entry.kind.number());
                put_count(out, entry.data.len());
                out.extend_from_slice(&entry.data);
            }
        }
    }
}

fn put_words(out: &mut Vec<u8>, tag: u8, words: &[u64]) {
    out.push(tag);
    for word in words {
        out.extend_from_slice(&word.to_le_bytes());
    }
}

fn put_count(out: &mut Vec<u8>, count: usize) {
    let count = u32::try_from(count).expect("fits a segment, and that is far smaller");
    out.extend_from_slice(&count.to_le_bytes());
}

pub(super) fn decode_segment_header(payload: &Bytes) -> Result<SegmentHeader, RecordDecodeError> {
    let mut input = Input { rest: payload.clone() };
    match input.byte()? {
        VERSION => {}
        other => return Err(RecordDecodeError::Unknown(other)),
    }
    let (cluster, member) = (input.word()?, input.word()?);
    let incarnation = input.take(16)?;
    let incarnation = u128::from_be_bytes(incarnation.as_ref().try_into().expect("sixteen bytes"));
    let identity = LogIdentity { cluster, member, incarnation };
    let (segment, segment_bytes) = (input.word()?, input.word()?);
    let last = input.position()?;
    Ok(SegmentHeader { identity, segment, segment_bytes, last, repeated: input.items()? })
}

pub(super) fn decode(payload: &Bytes) -> Result<Vec<Item>, RecordDecodeError> {
    Input { rest: payload.clone() }.items()
}

struct Input {
    rest: Bytes,
}

impl Input {
    fn take(&mut self, bytes: usize) -> Result<Bytes, RecordDecodeError> {
        if bytes > self.rest.len() {
            return Err(RecordDecodeError::Malformed("it ends too early"));
        }
        Ok(self.rest.split_to(bytes))
    }

    fn byte(&mut self) -> Result<u8, RecordDecodeError> {
        Ok(self.take(1)?[0])
    }

    fn word(&mut self) -> Result<u64, RecordDecodeError> {
        let bytes = self.take(8)?;
        Ok(u64::from_le_bytes(bytes.as_ref().try_into().expect("eight bytes")))
    }

    /// Reads a count of elements that take at least `least` bytes each.
    fn count(&mut self, least: usize) -> Result<usize, RecordDecodeError> {
        let bytes = self.take(4)?;
        let count = u32::from_le_bytes(bytes.as_ref().try_into().expect("four bytes"));
        let count = usize::try_from(count).expect("a 32-bit number");
        if count > self.rest.len() / least {
            return Err(RecordDecodeError::Malformed("it counts more than it holds"));
        }
        Ok(count)
    }

    /// Reads an index or term.
    fn number(&mut self) -> Result<u64, RecordDecodeError> {
        match self.word()? {
            number if number < MAX_INDEX => Ok(number),
            _ => Err(RecordDecodeError::Malformed("no index or term is that large")),
        }
    }

    fn position(&mut self) -> Result<Position, RecordDecodeError> {
        Ok(Position { index: self.number()?, term: self.number()? })
    }

    fn entries(&mut self) -> Result<Vec<Entry>, RecordDecodeError> {
        let first = self.number()?;
        let count = self.count(ENTRY_OVERHEAD)?;
        if first == 0 || count == 0 {
            return Err(RecordDecodeError::Malformed(
                "entries begin with 1, and there is one at least",
            ));
        }
        let mut entries = Vec::with_capacity(count);
        for index in (first..).take(count) {
            let term = self.number()?;
            let kind = self.byte()?;
            let known = EntryKind::from_number(kind.into());
            let kind = known.ok_or(RecordDecodeError::UnknownEntry { index, kind })?;
            let length = self.count(1)?;
            let data = self.take(length)?;
            if !kind.fits(&data) {
                return Err(RecordDecodeError::Malformed("an entry's data doesn't fit its kind"));
            }
            entries.push(Entry { index, term, kind, data });
        }
        Ok(entries)
    }

    fn item(&mut self) -> Result<Item, RecordDecodeError> {
        Ok(match self.byte()? {
            BOOT => Item::Boot(self.number()?),
            HARD_STATE => Item::HardState(HardState {
                term: self.number()?,
                vote: self.word()?,
                commit: self.number()?,
            }),
            ENTRIES => Item::Entries(self.entries()?),
            BASE => Item::Base(self.position()?),
            INSTALLING => Item::Installing(self.position()?),
            SNAPSHOT => Item::Snapshot(self.position()?),
            other => return Err(RecordDecodeError::Unknown(other)),
        })
    }

    fn items(&mut self) -> Result<Vec<Item>, RecordDecodeError> {
        let mut items = Vec::new();
        while !self.rest.is_empty() {
            items.push(self.item()?);
        }
        Ok(items)
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn entry() -> impl Strategy<Value = Entry> {
        let kinds = prop_oneof![Just(EntryKind::Normal), Just(EntryKind::ConfChange)];
        let said = (0..MAX_INDEX, kinds, vec(any::<u8>(), 1..40));
        prop_oneof![
            said.prop_map(|(term, kind, data)| Entry { index: 0, term, kind, data: data.into() }),
            (0..MAX_INDEX).prop_map(|term| Entry {
                term,
                kind: EntryKind::NoOp,
                ..Entry::default()
            }),
        ]
    }

    fn item() -> impl Strategy<Value = Item> {
        let number = 0..MAX_INDEX;
        let position = (number.clone(), number.clone());
        let at = position.prop_map(|(index, term)| Position { index, term });
        prop_oneof![
            number.clone().prop_map(Item::Boot),
            (number.clone(), any::<u64>(), number.clone()).prop_map(|(term, vote, commit)| {
                Item::HardState(HardState { term, vote, commit })
            }),
            (1..1_000_000_u64, vec(entry(), 1..9)).prop_map(|(first, list)| {
                let numbered = |(index, entry)| Entry { index, ..entry };
                Item::Entries((first..).zip(list).map(numbered).collect())
            }),
            at.clone().prop_map(Item::Base),
            at.clone().prop_map(Item::Installing),
            at.prop_map(Item::Snapshot),
        ]
    }

    fn start(repeated: Vec<Item>) -> SegmentHeader {
        SegmentHeader {
            identity: LogIdentity { cluster: 1, member: 2, incarnation: 7 },
            segment: 3,
            segment_bytes: 65536,
            last: Position { index: 5, term: 6 },
            repeated,
        }
    }

    proptest! {
        #[test]
        fn items_read_back_as_written(items in vec(item(), 0..6)) {
            let mut bytes = Vec::new();
            encode_segment_header(&mut bytes, &start(items.clone()));
            prop_assert_eq!(decode_segment_header(&bytes.into()), Ok(start(items)));
        }

        #[test]
        fn random_bytes_never_panic(bytes in vec(any::<u8>(), 0..300), tag in 0..8_u8) {
            let _ = decode_segment_header(&bytes.clone().into());
            let mut tagged = vec![tag];
            tagged.extend(bytes);
            let _ = decode(&tagged.into());
        }

        #[test]
        fn truncated_bytes_are_refused_unless_cut_between_items(
            items in vec(item(), 1..4),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut bytes = Vec::new();
            let mut ends = vec![0];
            for item in &items {
                encode(&mut bytes, item);
                ends.push(bytes.len());
            }
            let cut = cut.index(bytes.len());
            bytes.truncate(cut);
            let whole = ends.iter().position(|end| *end == cut);
            prop_assert_eq!(decode(&bytes.into()).ok().map(|items| items.len()), whole);
        }
    }

    #[test]
    fn counts_are_checked_before_anything_is_allocated() {
        let mut bytes = vec![ENTRIES];
        bytes.extend_from_slice(&1_u64.to_le_bytes());
        bytes.extend_from_slice(&u32::MAX.to_le_bytes());
        let refused = Err(RecordDecodeError::Malformed("it counts more than it holds"));
        assert_eq!(decode(&bytes.into()), refused);
    }

    #[test]
    fn an_unknown_tag_or_format_version_is_named() {
        assert_eq!(decode(&Bytes::from_static(&[200])), Err(RecordDecodeError::Unknown(200)));
        assert_eq!(
            decode_segment_header(&Bytes::from_static(&[9])),
            Err(RecordDecodeError::Unknown(9))
        );
    }

    #[test]
    fn an_unknown_kind_of_entry_is_named() {
        let mut bytes = Vec::new();
        let entry = Entry { index: 7, term: 1, data: Bytes::from_static(b"x"), ..Entry::default() };
        encode(&mut bytes, &Item::Entries(vec![entry]));
        let kind_at = 1 + 8 + 4 + 8;
        assert_eq!(bytes[kind_at], EntryKind::Normal.number());
        bytes[kind_at] = 9;
        let refused = Err(RecordDecodeError::UnknownEntry { index: 7, kind: 9 });
        assert_eq!(decode(&bytes.clone().into()), refused);
        bytes[kind_at] = EntryKind::NoOp.number();
        let refused = Err(RecordDecodeError::Malformed("an entry's data doesn't fit its kind"));
        assert_eq!(decode(&bytes.into()), refused);
    }
}
