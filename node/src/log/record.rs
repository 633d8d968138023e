//! Records and their payloads.

use bytes::Bytes;
use node_consensus::{Entry, HardState, MAX_INDEX, Position};

use super::{BLOCK, Batch, Identity};

/// Bytes before the payload.
pub(super) const HEADER: usize = 24;
const CRC_AT: usize = 20;

/// The format that this build writes.
pub(super) const VERSION: u32 = 1;

/// What a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// First in each segment; its crc leaves the incarnation out, since it is what says it.
    Start = 1,
    /// What consensus wants durable.
    Group = 2,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    pub length: u32,
    pub kind: Kind,
    pub sequence: u64,
    pub previous: u32,
    pub crc: u32,
}

impl Header {
    /// None where no record begins.
    pub fn parse(bytes: &[u8; HEADER]) -> Option<Self> {
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let kind = match bytes[4] {
            1 => Kind::Start,
            2 => Kind::Group,
            _ => return None,
        };
        if bytes[5..8] != [0; 3] {
            return None;
        }
        Some(Self {
            length: word(0),
            kind,
            sequence: u64::from(word(8)) | u64::from(word(12)) << 32,
            previous: word(16),
            crc: word(CRC_AT),
        })
    }

    fn bytes(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&self.length.to_le_bytes());
        bytes[4] = self.kind as u8;
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.previous.to_le_bytes());
        bytes[CRC_AT..].copy_from_slice(&self.crc.to_le_bytes());
        bytes
    }

    /// The crc that this header and `payload` must have in segment `segment`.
    pub fn expected_crc(&self, segment: u64, incarnation: u128, payload: &[u8]) -> u32 {
        let incarnation = if self.kind == Kind::Start { 0 } else { incarnation };
        let crc = crc32c::crc32c(&incarnation.to_le_bytes());
        let crc = crc32c::crc32c_append(crc, &segment.to_le_bytes());
        let crc = crc32c::crc32c_append(crc, &self.bytes()[..CRC_AT]);
        crc32c::crc32c_append(crc, payload)
    }

    /// Header, payload and padding: where the next record begins.
    pub fn end(&self, offset: u64) -> u64 {
        (offset + HEADER as u64 + u64::from(self.length)).next_multiple_of(BLOCK)
    }
}

/// Where and after what a record stands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub segment: u64,
    pub incarnation: u128,
    pub sequence: u64,
    pub previous: u32,
}

/// Fills `out` with one padded record whose payload is `message`; returns its crc.
pub(super) fn encode(
    out: &mut Vec<u8>,
    kind: Kind,
    place: Place,
    message: &impl prost::Message,
) -> u32 {
    out.clear();
    out.resize(HEADER, 0);
    message.encode(out).expect("a Vec grows, so that encoding has no way to fail");
    let mut header = Header {
        length: u32::try_from(out.len() - HEADER).expect("bounded by max_record_bytes"),
        kind,
        sequence: place.sequence,
        previous: place.previous,
        crc: 0,
    };
    header.crc = header.expected_crc(place.segment, place.incarnation, &out[HEADER..]);
    out[..HEADER].copy_from_slice(&header.bytes());
    let block = usize::try_from(BLOCK).expect("4096");
    out.resize(out.len().next_multiple_of(block), 0);
    header.crc
}

/// First in each segment: enough to start from it alone.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Start {
    #[prost(uint32, tag = "1")]
    pub version: u32,
    #[prost(fixed64, tag = "2")]
    pub cluster: u64,
    #[prost(fixed64, tag = "3")]
    pub member: u64,
    #[prost(bytes = "vec", tag = "4")]
    pub incarnation: Vec<u8>,
    #[prost(fixed64, repeated, tag = "5")]
    pub voters: Vec<u64>,
    #[prost(uint64, tag = "6")]
    pub boot: u64,
    #[prost(message, required, tag = "7")]
    pub hard_state: WireHardState,
    /// The last entry when the segment began.
    #[prost(message, required, tag = "8")]
    pub last: WirePosition,
    #[prost(message, optional, tag = "9")]
    pub installing: Option<WirePosition>,
}

impl Start {
    pub fn identity(&self) -> Option<Identity> {
        let incarnation = u128::from_be_bytes(self.incarnation.as_slice().try_into().ok()?);
        Some(Identity {
            cluster: self.cluster,
            member: self.member,
            incarnation,
            voters: self.voters.clone(),
        })
    }
}

/// One flush.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Group {
    /// Set by the first record after each opening.
    #[prost(uint64, tag = "1")]
    pub boot: u64,
    #[prost(message, repeated, tag = "2")]
    pub batches: Vec<WireBatch>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct WireBatch {
    #[prost(message, optional, tag = "1")]
    pub hard_state: Option<WireHardState>,
    #[prost(message, optional, tag = "2")]
    pub installing: Option<WirePosition>,
    #[prost(message, optional, tag = "3")]
    pub snapshot: Option<WirePosition>,
    /// The entry before the first of `entries`.
    #[prost(message, optional, tag = "4")]
    pub before: Option<WirePosition>,
    #[prost(message, repeated, tag = "5")]
    pub entries: Vec<WireEntry>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(super) struct WirePosition {
    #[prost(uint64, tag = "1")]
    pub index: u64,
    #[prost(uint64, tag = "2")]
    pub term: u64,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(super) struct WireHardState {
    #[prost(uint64, tag = "1")]
    pub term: u64,
    #[prost(fixed64, tag = "2")]
    pub vote: u64,
    #[prost(uint64, tag = "3")]
    pub commit: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct WireEntry {
    #[prost(uint64, tag = "1")]
    pub index: u64,
    #[prost(uint64, tag = "2")]
    pub term: u64,
    /// 0 is an ordinary entry; configuration changes get numbers of their own.
    #[prost(uint32, tag = "3")]
    pub kind: u32,
    #[prost(bytes = "bytes", tag = "4")]
    pub data: Bytes,
}

impl From<Position> for WirePosition {
    fn from(at: Position) -> Self {
        Self { index: at.index, term: at.term }
    }
}

impl From<WirePosition> for Position {
    fn from(at: WirePosition) -> Self {
        Self { index: at.index, term: at.term }
    }
}

impl From<HardState> for WireHardState {
    fn from(state: HardState) -> Self {
        Self { term: state.term, vote: state.vote, commit: state.commit }
    }
}

impl From<WireHardState> for HardState {
    fn from(state: WireHardState) -> Self {
        Self { term: state.term, vote: state.vote, commit: state.commit }
    }
}

impl WireBatch {
    pub fn new(batch: &Batch, before: Option<Position>) -> Self {
        let entry = |entry: &Entry| WireEntry {
            index: entry.index,
            term: entry.term,
            kind: 0,
            data: entry.data.clone(),
        };
        Self {
            hard_state: batch.hard_state.map(Into::into),
            installing: batch.installing.map(Into::into),
            snapshot: batch.snapshot.map(Into::into),
            before: before.map(Into::into),
            entries: batch.entries.iter().map(entry).collect(),
        }
    }

    /// What of it can't be; a record with a good crc should have nothing of the kind.
    pub fn flaw(&self) -> Option<&'static str> {
        let mut at = match (self.before, self.entries.first()) {
            (None, None) => return None,
            (Some(before), Some(_)) => Position::from(before),
            _ => return Some("entries without their place"),
        };
        if at.index >= MAX_INDEX {
            return Some("an index that is too large");
        }
        for entry in &self.entries {
            if entry.kind != 0 {
                return Some("an entry of a kind that this build doesn't know");
            }
            if entry.index != at.index + 1 || entry.term < at.term {
                return Some("entries out of order");
            }
            at = Position { index: entry.index, term: entry.term };
        }
        None
    }
}

impl From<WireEntry> for Entry {
    fn from(entry: WireEntry) -> Self {
        Self { index: entry.index, term: entry.term, data: entry.data }
    }
}
