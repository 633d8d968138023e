//! Entries of the replicated log, and their kinds.

use bytes::Bytes;

/// A place in the replicated log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// Raft index; 0 is "before the first entry".
    pub index: u64,
    /// Raft term of the entry at `index`.
    pub term: u64,
}

/// What an entry is. The numbers are those of peers' frames and of the log's files; 0 is none, so
/// that a kind which was left out is not taken for one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum EntryKind {
    /// A request, for the state machine.
    #[default]
    Normal = 1,
    /// What a leader begins its term with. Empty; the only kind that is.
    NoOp = 2,
    /// A change of the cluster's members. Consensus follows it once it is applied.
    ConfChange = 3,
}

impl EntryKind {
    /// The kind of this number, if this build knows one.
    pub fn of(number: u32) -> Option<Self> {
        [Self::Normal, Self::NoOp, Self::ConfChange]
            .into_iter()
            .find(|kind| u32::from(kind.number()) == number)
    }

    /// What stands for it in frames and files.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// Whether an entry of this kind may hold `data`.
    pub fn fits(self, data: &[u8]) -> bool {
        data.is_empty() == (self == Self::NoOp)
    }
}

/// One entry of the log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// Its place, from 1.
    pub index: u64,
    /// The term of the leader that made it.
    pub term: u64,
    /// What it is.
    pub kind: EntryKind,
    /// The proposer's bytes.
    pub data: Bytes,
}
