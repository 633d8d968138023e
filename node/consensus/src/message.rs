//! What members say to each other, and its bytes.
//!
//! The codec is prost over structures of our own. [`Message::decode`] bounds and relates every
//! field before anything else looks at it: indexes can't overflow when added to, entries of an
//! append are contiguous, and kinds that only ever pass inside one process are refused.

use bytes::{Bytes, BytesMut};
use prost::Message as _;
use thiserror::Error;

use crate::{Entry, EntryKind, Members, Position};

/// No index or term is ever near this; what claims to be is refused.
pub const MAX_INDEX: u64 = 1 << 62;

/// More entries than this in one message are refused.
pub const MAX_ENTRIES_PER_MESSAGE: usize = 64 * 1024;

/// What Raft must remember across crashes (Raft paper, figure 2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HardState {
    /// Latest term seen.
    pub term: u64,
    /// Whom this member voted for in `term`; 0 is nobody.
    pub vote: u64,
    /// Known to be committed.
    pub commit: u64,
}

/// The name of one read: never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReadContext {
    /// Who asks.
    pub member: u64,
    /// Its boot counter.
    pub boot: u64,
    /// Counts from 1 within one boot.
    pub sequence: u64,
}

impl ReadContext {
    const BYTES: usize = 24;

    pub(crate) fn to_bytes(self) -> Vec<u8> {
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

/// What a message is about. The numbers are the wire's; 9 is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum MessageKind {
    /// Never sent.
    Unknown = 0,
    /// Entries on their way to the leader.
    Propose = 1,
    /// Entries on their way to a follower.
    Append = 2,
    /// How far a follower's durable log reaches, or where it differs.
    AppendResponse = 3,
    /// A candidate asks for a vote.
    RequestVote = 4,
    /// A vote, or a refusal.
    RequestVoteResponse = 5,
    /// A snapshot's position; the body travels beside it.
    Snapshot = 6,
    /// The leader is alive; may carry a read's context.
    Heartbeat = 7,
    /// A follower has heard; returns the context.
    HeartbeatResponse = 8,
    /// The leader asks a follower to campaign at once.
    TimeoutNow = 10,
    /// A follower asks for a read index.
    ReadIndex = 11,
    /// The leader answers with one.
    ReadIndexResponse = 12,
    /// Could I win an election?
    RequestPreVote = 13,
    /// As far as I know, yes or no.
    RequestPreVoteResponse = 14,
}

/// One message. Which fields mean something depends on `kind`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// What it is about.
    pub kind: MessageKind,
    /// Sender; never 0.
    pub from: u64,
    /// Receiver; never 0.
    pub to: u64,
    /// Sender's term; 0 for reads that are on their way to the leader. `Propose`: the only term in
    /// which its receiver may take it, as the leader; 0 if anybody may.
    pub term: u64,
    /// Term of the entry at `index`. `Propose`: how often it was passed on.
    pub log_term: u64,
    /// Entry before `entries`, or acknowledged index. `Propose`: the sender's sequence number.
    pub index: u64,
    /// Commit index. `Propose`: the sender's boot counter.
    pub commit: u64,
    /// Term of the entry at `commit`.
    pub commit_term: u64,
    /// A refusal.
    pub reject: bool,
    /// Where the refused append might meet the log.
    pub reject_hint: u64,
    /// A follower wants a snapshot at least this new.
    pub request_snapshot: u64,
    /// A read's context, or that an election is a transfer.
    pub context: Bytes,
    /// Entries.
    pub entries: Vec<Entry>,
    /// `Snapshot`: its position.
    pub snapshot: Option<Position>,
    /// `Snapshot`: who belonged to the cluster at that position.
    pub members: Option<Members>,
}

impl Message {
    /// A message that says nothing yet.
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

    /// About what it costs to keep in memory: what queues count.
    pub fn cost(&self) -> usize {
        const FIXED: usize = 160;
        const PER_ENTRY: usize = 48;
        let entries: usize = self.entries.iter().map(|entry| entry.data.len() + PER_ENTRY).sum();
        FIXED + self.context.len() + entries
    }

    /// Appends the message's bytes, unframed, to `out`.
    pub fn encode(&self, out: &mut BytesMut) {
        let wire = Wire::from(self);
        out.reserve(wire.encoded_len());
        wire.encode(out).expect("BytesMut grows, so that encoding has no way to fail");
    }

    /// Reads one message, which is all of `bytes`. Entries share the buffer.
    pub fn decode(bytes: Bytes) -> Result<Self, DecodeError> {
        let wire = Wire::decode(bytes)?;
        let message = Self::try_from(wire)?;
        message.validate()?;
        Ok(message)
    }

    fn validate(&self) -> Result<(), DecodeError> {
        use MessageKind::{Append, Propose, ReadIndex, ReadIndexResponse, Snapshot};
        if self.from == 0 || self.to == 0 || self.from == self.to {
            return Err(DecodeError::Address { from: self.from, to: self.to });
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
                return Err(DecodeError::TooLarge { field });
            }
        }
        if self.entries.len() > MAX_ENTRIES_PER_MESSAGE {
            return Err(DecodeError::TooLarge { field: "entries" });
        }
        if let Some(odd) = self.entries.iter().find(|entry| !entry.kind.fits(&entry.data)) {
            return Err(DecodeError::EntryData { kind: odd.kind });
        }
        let entries_fit = match self.kind {
            Append => self.entries_follow(),
            // The first entry of a term is its leader's own.
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
            return Err(DecodeError::Entries { kind: self.kind });
        }
        let term_fits = self.kind == Propose || (self.term == 0) == (self.kind == ReadIndex);
        if !term_fits {
            return Err(DecodeError::Term { kind: self.kind });
        }
        let snapshot_fits = self.snapshot.is_some_and(|at| at.index > 0 && at.term > 0)
            && self.members.as_ref().is_some_and(|members| !members.voters.is_empty());
        if (self.kind == Snapshot) != snapshot_fits
            || self.snapshot.is_some_and(|at| at.index >= MAX_INDEX)
        {
            return Err(DecodeError::Snapshot);
        }
        Ok(())
    }

    /// An append's entries come one after the other, right after `index`, in terms that don't fall
    /// and don't pass the sender's.
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

/// Why bytes are not a message.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum DecodeError {
    /// Not protobuf, or cut short.
    #[error("not a consensus message")]
    Malformed(#[from] prost::DecodeError),
    /// From another version, or junk.
    #[error("unknown message kind {0}")]
    Kind(i32),
    /// An entry of a kind that this build does not know.
    #[error("entry {index} is of kind {kind}, which this build does not know")]
    EntryKind {
        /// Its index.
        index: u64,
        /// The kind.
        kind: u32,
    },
    /// An entry without data whose kind has some, or the other way round.
    #[error("the data of a {kind:?} entry doesn't fit")]
    EntryData {
        /// The entry's kind.
        kind: EntryKind,
    },
    /// Nobody, or oneself.
    #[error("a message from {from:016x} to {to:016x}")]
    Address {
        /// Sender.
        from: u64,
        /// Receiver.
        to: u64,
    },
    /// Past every bound.
    #[error("{field} is too large")]
    TooLarge {
        /// Which field.
        field: &'static str,
    },
    /// Entries where none belong, none where some do, or with gaps.
    #[error("entries of a {kind:?} message don't fit")]
    Entries {
        /// The message's kind.
        kind: MessageKind,
    },
    /// A term where none belongs, or none where one does.
    #[error("the term of a {kind:?} message doesn't fit")]
    Term {
        /// The message's kind.
        kind: MessageKind,
    },
    /// A snapshot without a position, or a position without a snapshot.
    #[error("a snapshot's description doesn't fit")]
    Snapshot,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Wire {
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
    /// An [`EntryKind`].
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

impl From<&Message> for Wire {
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

impl TryFrom<Wire> for Message {
    type Error = DecodeError;

    fn try_from(wire: Wire) -> Result<Self, DecodeError> {
        let kind = match MessageKind::try_from(wire.kind) {
            Ok(MessageKind::Unknown) | Err(_) => return Err(DecodeError::Kind(wire.kind)),
            Ok(kind) => kind,
        };
        let entry = |entry: WireEntry| {
            let WireEntry { index, term, kind, data } = entry;
            let known = EntryKind::of(kind).ok_or(DecodeError::EntryKind { index, kind })?;
            Ok(Entry { index, term, kind: known, data })
        };
        let entries = wire.entries.into_iter().map(entry).collect::<Result<_, DecodeError>>()?;
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
    fn a_message_survives_its_bytes() {
        let message = append();
        assert_eq!(Message::decode(encoded(&message)), Ok(message));
    }

    #[test]
    fn entries_with_a_gap_are_refused() {
        let mut message = append();
        message.entries[1].index = 9;
        let refusal = DecodeError::Entries { kind: MessageKind::Append };
        assert_eq!(Message::decode(encoded(&message)), Err(refusal));
    }

    #[test]
    fn an_index_near_the_end_of_the_number_line_is_refused() {
        let mut message = append();
        message.entries.clear();
        message.index = u64::MAX;
        assert_eq!(
            Message::decode(encoded(&message)),
            Err(DecodeError::TooLarge { field: "index" })
        );
    }

    #[test]
    fn a_snapshot_without_position_is_refused() {
        let mut message = Message::new(MessageKind::Snapshot, 1, 2);
        message.term = 3;
        assert_eq!(Message::decode(encoded(&message)), Err(DecodeError::Snapshot));
    }

    #[test]
    fn each_kind_of_entry_survives_its_bytes() {
        let mut message = append();
        message.entries[0].kind = EntryKind::ConfChange;
        message.entries[1].kind = EntryKind::NoOp;
        message.entries[1].data = Bytes::new();
        assert_eq!(Message::decode(encoded(&message)), Ok(message));
    }

    #[test]
    fn an_entry_of_no_known_kind_is_refused_by_its_number() {
        for kind in [0, 4, 7, 256 + 1] {
            let mut wire = Wire::from(&append());
            wire.entries[1].kind = kind;
            let bytes = Bytes::from(wire.encode_to_vec());
            assert_eq!(Message::decode(bytes), Err(DecodeError::EntryKind { index: 8, kind }));
        }
        let refusal = DecodeError::EntryKind { index: 8, kind: 7 };
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
            let refusal = DecodeError::EntryData { kind };
            assert_eq!(Message::decode(encoded(&message)), Err(refusal));
        }
    }

    #[test]
    fn nobody_proposes_what_a_leader_begins_its_term_with() {
        let mut message = Message::new(MessageKind::Propose, 1, 2);
        message.entries = vec![Entry { kind: EntryKind::NoOp, ..Entry::default() }];
        let refusal = DecodeError::Entries { kind: MessageKind::Propose };
        assert_eq!(Message::decode(encoded(&message)), Err(refusal));
    }

    #[test]
    fn a_read_context_survives_its_bytes() {
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
