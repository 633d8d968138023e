//! Messages between members, and their wire format.
//!
//! The codec uses prost over structures of our own. [`Message::decode`] checks every field before
//! any other code sees it:
//! * Indexes can't overflow when added to.
//! * Entries of an append are contiguous.
//! * Message kinds that only exist inside one process are refused.

use bytes::{Bytes, BytesMut};
use prost::Message as _;
use thiserror::Error;

use crate::{Entry, EntryKind, Members, Position};

/// Exclusive upper bound of every index and term in a message. Real values never come near it; a
/// message with a larger one is refused.
pub const MAX_INDEX: u64 = 1 << 62;

/// Maximum number of entries in one message; a message with more is refused.
pub const MAX_ENTRIES_PER_MESSAGE: usize = 64 * 1024;

/// State that Raft must keep across crashes (Raft paper, figure 2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HardState {
    /// Latest term that this member has seen.
    pub term: u64,
    /// Member that received this member's vote in `term`; 0 if none did.
    pub vote: u64,
    /// Highest index known to be committed.
    pub commit: u64,
}

/// Identity of one linearizable read. It is never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReadContext {
    /// Member that asked for the read.
    pub member: u64,
    /// Boot counter of `member` when it asked.
    pub boot: u64,
    /// Number of the read within one boot, counted from 1.
    pub sequence: u64,
}

impl ReadContext {
    const BYTES: usize = 24;

    /// Returns the bytes that stand for this context in the field [`Message::context`].
    pub fn to_bytes(self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::BYTES);
        for part in [self.member, self.boot, self.sequence] {
            bytes.extend_from_slice(&part.to_be_bytes());
        }
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let part = |at: usize| -> Option<u64> {
            Some(u64::from_be_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
        };
        if bytes.len() != Self::BYTES {
            return None;
        }
        Some(Self { member: part(0)?, boot: part(8)?, sequence: part(16)? })
    }
}

/// Purpose of a message. The numbers are those of the wire format; 9 is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum MessageKind {
    /// Zero value that protobuf requires; never sent.
    Unknown = 0,
    /// Proposed entries, on their way to the leader.
    Propose = 1,
    /// Log entries, on their way to a follower.
    Append = 2,
    /// Answer to an append: the last index durable on the follower, or where its log differs from
    /// the leader's.
    AppendResponse = 3,
    /// A candidate requests a vote.
    RequestVote = 4,
    /// A vote, or the refusal of one.
    RequestVoteResponse = 5,
    /// Position of a snapshot. The body is transferred on a stream of its own.
    Snapshot = 6,
    /// Heartbeat of the leader; may carry a read's context.
    Heartbeat = 7,
    /// Acknowledgement of a heartbeat; returns the heartbeat's context.
    HeartbeatResponse = 8,
    /// The leader tells a follower to campaign at once.
    TimeoutNow = 10,
    /// A follower requests a read index.
    ReadIndex = 11,
    /// The leader returns a read index.
    ReadIndexResponse = 12,
    /// A member asks whether it could win an election (pre-vote).
    RequestPreVote = 13,
    /// Answer to a pre-vote request.
    RequestPreVoteResponse = 14,
}

/// One consensus message. Which fields have a meaning depends on `kind`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub kind: MessageKind,
    /// Member that sends the message; never 0.
    pub from: u64,
    /// Member that receives the message; never 0.
    pub to: u64,
    /// Sender's term. It is 0 for proposals and read requests on their way to the leader.
    pub term: u64,
    /// Term of the entry at `index`. In a `Propose`: how often the proposal has been forwarded.
    pub log_term: u64,
    /// Index of the entry before `entries`, or the acknowledged index. In a `Propose`: the sender's
    /// sequence number.
    pub index: u64,
    /// Sender's commit index. In a `Propose`: the sender's boot counter.
    pub commit: u64,
    /// Term of the entry at `commit`.
    pub commit_term: u64,
    /// Whether the sender refuses the request.
    pub reject: bool,
    /// In a rejected append: index at which the two logs might agree, as the sender estimates.
    pub reject_hint: u64,
    /// Minimum index of the snapshot that a follower requests; 0 if it requests none.
    pub request_snapshot: u64,
    /// Context of a read. In a vote request, marks a leadership transfer.
    pub context: Bytes,
    pub entries: Vec<Entry>,
    /// Position of the snapshot; present in a `Snapshot` only.
    pub snapshot: Option<Position>,
    /// Members of the cluster at the snapshot's position; present in a `Snapshot` only.
    pub members: Option<Members>,
}

impl Message {
    /// Returns a message in which every field but the addresses and the kind is empty.
    pub fn new(kind: MessageKind, from: u64, to: u64) -> Self {
        Self {
            kind,
            from,
            to,
            term: 0,
            log_term: 0,
            index: 0,
            commit: 0,
            commit_term: 0,
            reject: false,
            reject_hint: 0,
            request_snapshot: 0,
            context: Bytes::new(),
            entries: Vec::new(),
            snapshot: None,
            members: None,
        }
    }

    /// Approximate memory that the message occupies, in bytes. Queues limit the sum of these
    /// values.
    pub fn cost(&self) -> usize {
        const FIXED: usize = 160;
        const PER_ENTRY: usize = 48;
        let entries: usize = self.entries.iter().map(|entry| entry.data.len() + PER_ENTRY).sum();
        FIXED + self.context.len() + entries
    }

    /// Appends the message's bytes, unframed, to `out`.
    pub fn encode(&self, out: &mut BytesMut) {
        let wire = WireMessage::from(self);
        out.reserve(wire.encoded_len());
        wire.encode(out).expect("BytesMut grows, so that encoding has no way to fail");
    }

    /// Decodes one message, which must take up all of `bytes`. Its entries share that buffer.
    pub fn decode(bytes: Bytes) -> Result<Self, MessageDecodeError> {
        let wire = WireMessage::decode(bytes)?;
        let message = Self::try_from(wire)?;
        message.validate()?;
        Ok(message)
    }

    fn validate(&self) -> Result<(), MessageDecodeError> {
        use MessageKind::{Append, Propose, ReadIndex, ReadIndexResponse, Snapshot};
        if self.from == 0 || self.to == 0 || self.from == self.to {
            return Err(MessageDecodeError::Address { from: self.from, to: self.to });
        }
        for (field, value) in [
            ("term", self.term),
            ("log_term", self.log_term),
            ("index", self.index),
            ("commit", self.commit),
            ("commit_term", self.commit_term),
            ("reject_hint", self.reject_hint),
            ("request_snapshot", self.request_snapshot),
        ] {
            if value >= MAX_INDEX {
                return Err(MessageDecodeError::TooLarge { field });
            }
        }
        if self.entries.len() > MAX_ENTRIES_PER_MESSAGE {
            return Err(MessageDecodeError::TooLarge { field: "entries" });
        }
        if let Some(odd) = self.entries.iter().find(|entry| !entry.kind.fits(&entry.data)) {
            return Err(MessageDecodeError::EntryData { kind: odd.kind });
        }
        let entries_fit = match self.kind {
            Append => self.entries_follow(),
            // No-op entries are never proposed: a leader itself makes the one that begins its term.
            Propose => {
                !self.entries.is_empty()
                    && self.entries.iter().all(|entry| entry.kind != EntryKind::NoOp)
            }
            ReadIndex | ReadIndexResponse => {
                self.entries.len() == 1 && self.entries[0].data.len() == ReadContext::BYTES
            }
            _ => self.entries.is_empty(),
        };
        if !entries_fit {
            return Err(MessageDecodeError::Entries { kind: self.kind });
        }
        let term_fits = (self.term == 0) == matches!(self.kind, Propose | ReadIndex);
        if !term_fits {
            return Err(MessageDecodeError::Term { kind: self.kind });
        }
        let snapshot_fits = self.snapshot.is_some_and(|at| at.index > 0 && at.term > 0)
            && self.members.as_ref().is_some_and(|members| !members.voters.is_empty());
        if (self.kind == Snapshot) != snapshot_fits
            || self.snapshot.is_some_and(|at| at.index >= MAX_INDEX)
        {
            return Err(MessageDecodeError::Snapshot);
        }
        Ok(())
    }

    /// Returns whether the entries of an append directly follow `index` without a gap. Their terms
    /// must not decrease, and must not exceed the sender's.
    fn entries_follow(&self) -> bool {
        let mut at = Position { index: self.index, term: self.log_term.max(1) };
        for entry in &self.entries {
            if entry.index != at.index + 1 || entry.term < at.term || entry.term > self.term {
                return false;
            }
            at = Position { index: entry.index, term: entry.term };
        }
        true
    }
}

/// Reason why bytes are refused as a message.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum MessageDecodeError {
    /// The bytes are not protobuf, or are truncated.
    #[error("not a consensus message")]
    Malformed(#[from] prost::DecodeError),
    /// The message kind is unknown: the sender runs another version, or the bytes are garbage.
    #[error("unknown message kind {0}")]
    Kind(i32),
    /// An entry of a kind that this build does not know.
    #[error("entry {index} is of kind {kind}, which this build does not know")]
    EntryKind {
        /// Index of the entry whose kind is unknown.
        index: u64,
        /// Number of the entry's kind.
        kind: u32,
    },
    /// An entry has data although its kind has none, or lacks data that its kind needs.
    #[error("the data of a {kind:?} entry doesn't fit")]
    EntryData { kind: EntryKind },
    /// Sender and receiver are the same member, or one of them is 0.
    #[error("a message from {from:016x} to {to:016x}")]
    Address { from: u64, to: u64 },
    /// A number in the message, or its number of entries, exceeds the upper bound.
    #[error("{field} is too large")]
    TooLarge {
        /// Name of the field that exceeds its bound.
        field: &'static str,
    },
    /// The message has entries although its kind has none, lacks entries that its kind needs, or
    /// has entries that don't fit together.
    #[error("entries of a {kind:?} message don't fit")]
    Entries { kind: MessageKind },
    /// The message has a term although its kind has none, or lacks the term that its kind needs.
    #[error("the term of a {kind:?} message doesn't fit")]
    Term { kind: MessageKind },
    /// The position and members of a snapshot are missing or malformed, or are in a message of
    /// another kind.
    #[error("a snapshot's description doesn't fit")]
    Snapshot,
}

#[derive(Clone, PartialEq, prost::Message)]
struct WireMessage {
    #[prost(enumeration = "MessageKind", tag = "1")]
    kind: i32,
    #[prost(fixed64, tag = "2")]
    from: u64,
    #[prost(fixed64, tag = "3")]
    to: u64,
    #[prost(uint64, tag = "4")]
    term: u64,
    #[prost(uint64, tag = "5")]
    log_term: u64,
    #[prost(uint64, tag = "6")]
    index: u64,
    #[prost(message, repeated, tag = "7")]
    entries: Vec<WireEntry>,
    #[prost(uint64, tag = "8")]
    commit: u64,
    #[prost(uint64, tag = "9")]
    commit_term: u64,
    #[prost(bool, tag = "10")]
    reject: bool,
    #[prost(uint64, tag = "11")]
    reject_hint: u64,
    #[prost(uint64, tag = "12")]
    request_snapshot: u64,
    #[prost(bytes = "bytes", tag = "13")]
    context: Bytes,
    #[prost(message, optional, tag = "14")]
    snapshot: Option<WireSnapshot>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct WireEntry {
    #[prost(uint64, tag = "1")]
    index: u64,
    #[prost(uint64, tag = "2")]
    term: u64,
    /// Number of an [`EntryKind`].
    #[prost(uint32, tag = "3")]
    kind: u32,
    #[prost(bytes = "bytes", tag = "4")]
    data: Bytes,
}

#[derive(Clone, PartialEq, prost::Message)]
struct WireSnapshot {
    #[prost(uint64, tag = "1")]
    index: u64,
    #[prost(uint64, tag = "2")]
    term: u64,
    #[prost(fixed64, repeated, tag = "3")]
    voters: Vec<u64>,
    #[prost(fixed64, repeated, tag = "4")]
    learners: Vec<u64>,
}

impl From<&Message> for WireMessage {
    fn from(message: &Message) -> Self {
        let entry = |entry: &Entry| WireEntry {
            index: entry.index,
            term: entry.term,
            kind: entry.kind.number().into(),
            data: entry.data.clone(),
        };
        let members = message.members.clone().unwrap_or_default();
        Self {
            kind: message.kind as i32,
            from: message.from,
            to: message.to,
            term: message.term,
            log_term: message.log_term,
            index: message.index,
            entries: message.entries.iter().map(entry).collect(),
            commit: message.commit,
            commit_term: message.commit_term,
            reject: message.reject,
            reject_hint: message.reject_hint,
            request_snapshot: message.request_snapshot,
            context: message.context.clone(),
            snapshot: message.snapshot.map(|at| WireSnapshot {
                index: at.index,
                term: at.term,
                voters: members.voters,
                learners: members.learners,
            }),
        }
    }
}

impl TryFrom<WireMessage> for Message {
    type Error = MessageDecodeError;

    fn try_from(wire: WireMessage) -> Result<Self, MessageDecodeError> {
        let kind = match MessageKind::try_from(wire.kind) {
            Ok(MessageKind::Unknown) | Err(_) => return Err(MessageDecodeError::Kind(wire.kind)),
            Ok(kind) => kind,
        };
        let entry = |entry: WireEntry| {
            let WireEntry { index, term, kind, data } = entry;
            let known = EntryKind::from_number(kind)
                .ok_or(MessageDecodeError::EntryKind { index, kind })?;
            Ok(Entry { index, term, kind: known, data })
        };
        let entries =
            wire.entries.into_iter().map(entry).collect::<Result<_, MessageDecodeError>>()?;
        let (snapshot, members) = match wire.snapshot {
            None => (None, None),
            Some(found) => (
                Some(Position { index: found.index, term: found.term }),
                Some(Members { voters: found.voters, learners: found.learners }),
            ),
        };
        Ok(Self {
            kind,
            from: wire.from,
            to: wire.to,
            term: wire.term,
            log_term: wire.log_term,
            index: wire.index,
            commit: wire.commit,
            commit_term: wire.commit_term,
            reject: wire.reject,
            reject_hint: wire.reject_hint,
            request_snapshot: wire.request_snapshot,
            context: wire.context,
            entries,
            snapshot,
            members,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn append() -> Message {
        let entry =
            |index, term| Entry { index, term, data: Bytes::from_static(b"x"), ..Entry::default() };
        Message {
            term: 4,
            index: 6,
            log_term: 3,
            commit: 6,
            entries: vec![entry(7, 3), entry(8, 4)],
            ..Message::new(MessageKind::Append, 1, 2)
        }
    }

    fn encoded(message: &Message) -> Bytes {
        let mut out = BytesMut::new();
        message.encode(&mut out);
        out.freeze()
    }

    #[test]
    fn a_message_survives_a_round_trip_through_its_bytes() {
        let message = append();
        assert_eq!(Message::decode(encoded(&message)), Ok(message));
    }

    #[test]
    fn entries_with_a_gap_are_refused() {
        let mut message = append();
        message.entries[1].index = 9;
        let refusal = MessageDecodeError::Entries { kind: MessageKind::Append };
        assert_eq!(Message::decode(encoded(&message)), Err(refusal));
    }

    #[test]
    fn an_index_above_the_maximum_is_refused() {
        let mut message = append();
        message.entries.clear();
        message.index = u64::MAX;
        assert_eq!(
            Message::decode(encoded(&message)),
            Err(MessageDecodeError::TooLarge { field: "index" })
        );
    }

    #[test]
    fn a_snapshot_without_position_is_refused() {
        let mut message = Message::new(MessageKind::Snapshot, 1, 2);
        message.term = 3;
        assert_eq!(Message::decode(encoded(&message)), Err(MessageDecodeError::Snapshot));
    }

    #[test]
    fn each_kind_of_entry_survives_a_round_trip_through_its_bytes() {
        let mut message = append();
        message.entries[0].kind = EntryKind::ConfChange;
        message.entries[1].kind = EntryKind::NoOp;
        message.entries[1].data = Bytes::new();
        assert_eq!(Message::decode(encoded(&message)), Ok(message));
    }

    #[test]
    fn an_entry_of_an_unknown_kind_is_refused_with_its_number() {
        for kind in [0, 4, 7, 256 + 1] {
            let mut wire = WireMessage::from(&append());
            wire.entries[1].kind = kind;
            let bytes = Bytes::from(wire.encode_to_vec());
            assert_eq!(
                Message::decode(bytes),
                Err(MessageDecodeError::EntryKind { index: 8, kind })
            );
        }
        let refusal = MessageDecodeError::EntryKind { index: 8, kind: 7 };
        assert_eq!(refusal.to_string(), "entry 8 is of kind 7, which this build does not know");
    }

    #[test]
    fn an_entry_whose_data_does_not_fit_its_kind_is_refused() {
        for (kind, data) in
            [(EntryKind::Normal, ""), (EntryKind::ConfChange, ""), (EntryKind::NoOp, "something")]
        {
            let mut message = append();
            message.entries[1].kind = kind;
            message.entries[1].data = Bytes::from_static(data.as_bytes());
            let refusal = MessageDecodeError::EntryData { kind };
            assert_eq!(Message::decode(encoded(&message)), Err(refusal));
        }
    }

    #[test]
    fn a_proposal_with_a_no_op_is_refused() {
        let mut message = Message::new(MessageKind::Propose, 1, 2);
        message.entries = vec![Entry { kind: EntryKind::NoOp, ..Entry::default() }];
        let refusal = MessageDecodeError::Entries { kind: MessageKind::Propose };
        assert_eq!(Message::decode(encoded(&message)), Err(refusal));
    }

    #[test]
    fn a_read_context_survives_a_round_trip_through_its_bytes() {
        let context = ReadContext { member: 7, boot: 2, sequence: u64::MAX };
        assert_eq!(ReadContext::from_bytes(&context.to_bytes()), Some(context));
        assert_eq!(ReadContext::from_bytes(&[0; 23]), None);
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Message::decode(Bytes::from(bytes));
        }

        #[test]
        fn a_flipped_bit_never_panics(at in 0_usize..1000, bit in 0_u8..8) {
            let mut bytes = encoded(&append()).to_vec();
            let at = at % bytes.len();
            bytes[at] ^= 1 << bit;
            let _ = Message::decode(Bytes::from(bytes));
        }
    }
}
