//! What goes into the log and comes out of it.

use std::path::PathBuf;

use node_consensus::{Entry, Guards, HardState, Position, Terms};

/// Whose log it is; fixed when it is made, and a part of every checksum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Raft cluster id.
    pub cluster: u64,
    /// Raft member id.
    pub member: u64,
    /// Random; one life of one data directory.
    pub incarnation: u128,
}

impl Identity {
    /// A short text for messages.
    pub fn brief(&self) -> String {
        format!(
            "cluster {:016x}, member {:016x}, incarnation {:032x}",
            self.cluster, self.member, self.incarnation
        )
    }
}

/// Sizes of the log's files.
#[derive(Clone, Debug)]
pub struct LogOptions {
    /// One segment; a multiple of 4 KiB, at least 32 KiB. An entry has to fit in, with 16 KiB to
    /// spare.
    pub segment_bytes: u64,
    /// Segments kept ready, so that a full disk is noticed before the log needs the space.
    pub spare_segments: usize,
    /// Zeros are written in steps of this.
    pub fill_bytes: u64,
    /// Bytes after which a record is closed, if a segment takes that much. An entry larger than
    /// this gets a record of its own.
    pub max_record_bytes: u64,
    /// Always [`Guards::ALL`] outside tests.
    pub guards: Guards,
}

impl Default for LogOptions {
    fn default() -> Self {
        Self {
            segment_bytes: 64 * 1024 * 1024,
            spare_segments: 2,
            fill_bytes: 1024 * 1024,
            max_record_bytes: 8 * 1024 * 1024,
            guards: Guards::ALL,
        }
    }
}

/// What one round of consensus wants durable, all of it together. Where entries need several
/// records, the term and vote come with the first one and the commit index never runs ahead of
/// them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// The latest, if it changed.
    pub hard_state: Option<HardState>,
    /// The store is about to be replaced by a snapshot of this position.
    pub installing: Option<Position>,
    /// The store holds a snapshot of this position; no entry before or at it is needed.
    pub snapshot: Option<Position>,
    /// Contiguous; they replace what the log holds from the first one's index on.
    pub entries: Vec<Entry>,
}

/// What the log holds when it is opened. All of it is durable.
#[derive(Clone, Debug, Default)]
pub struct Recovered {
    /// Whose it is.
    pub identity: Identity,
    /// How often it has been opened, this time included.
    pub boot: u64,
    /// As last persisted.
    pub hard_state: HardState,
    /// The position before the first entry.
    pub base: Position,
    /// Terms of the entries after `base`.
    pub terms: Terms,
    /// A snapshot was being installed.
    pub installing: Option<Position>,
    /// A torn end was cut: file and offset.
    pub cut: Option<(PathBuf, u64)>,
}

impl Recovered {
    /// The last entry, or the base.
    pub fn last(&self) -> Position {
        self.terms.last().unwrap_or(self.base)
    }
}
