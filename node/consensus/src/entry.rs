//! Entries of the replicated log, and their kinds.
//!
//! A process stops at an entry whose kind its build doesn't know. It never skips the entry, because
//! its state would then differ from that of other members.

use bytes::Bytes;

/// Position of an entry in the replicated log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// Raft index; 0 stands before the first entry.
    pub index: u64,
    /// Raft term of the entry at `index`.
    pub term: u64,
}

/// Kind of a log entry. Peer frames and log files use these numbers. No kind is 0, so a missing
/// number is not mistaken for a kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum EntryKind {
    /// A request, for the state machine.
    #[default]
    Normal = 1,
    /// Empty entry with which a leader begins its term. Only this kind has no data.
    NoOp = 2,
    /// A change of the cluster's members. Consensus uses the new members once the entry is applied.
    ConfChange = 3,
}

impl EntryKind {
    /// Returns the kind with this number, or `None` if this build knows no such kind.
    pub fn from_number(number: u32) -> Option<Self> {
        [Self::Normal, Self::NoOp, Self::ConfChange]
            .into_iter()
            .find(|kind| u32::from(kind.number()) == number)
    }

    /// Returns the number of this kind in frames and files.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// Returns whether an entry of this kind may hold `data`.
    pub fn fits(self, data: &[u8]) -> bool {
        data.is_empty() == (self == Self::NoOp)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// Raft index, counted from 1.
    pub index: u64,
    /// Term of the leader that created the entry.
    pub term: u64,
    pub kind: EntryKind,
    /// Data as the proposer gave it; empty for a no-op.
    pub data: Bytes,
}
