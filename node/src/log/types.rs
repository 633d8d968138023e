//! What goes into the log and comes out of it.

use node_consensus::{Entry, HardState, Members, Position, Terms};

/// Whose log it is. Part of every checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The cluster's id.
    pub cluster: u64,
    /// The member's id.
    pub member: u64,
    /// The life of this data directory.
    pub incarnation: [u8; 16],
}

/// Sizes. [`Options::default`] has the product's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Bytes of one segment; a multiple of 4 KiB, at least 16 KiB. One entry has to fit in.
    pub segment_bytes: u64,
    /// Segments kept ready, so that a full disk is noticed before the log needs it.
    pub spares: usize,
    /// Encoded bytes after which a record is closed, at most half a segment. One entry fits in any
    /// case.
    pub record_bytes: usize,
    /// Always [`Guards::ALL`] outside tests.
    pub guards: Guards,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            segment_bytes: 64 * 1024 * 1024,
            spares: 2,
            record_bytes: 8 * 1024 * 1024,
            guards: Guards::ALL,
        }
    }
}

/// Rules that a test may switch off, to see that the tests notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guards {
    /// A flush syncs before it returns.
    pub sync_before_acknowledging: bool,
    /// A record with a wrong checksum isn't part of the log.
    pub cut_torn_tail: bool,
    /// A new log's directory entries are synced before it counts as created.
    pub sync_directories: bool,
}

impl Guards {
    /// Everything on.
    pub const ALL: Self =
        Self { sync_before_acknowledging: true, cut_torn_tail: true, sync_directories: true };
}

/// A snapshot that replaced the log, and who belonged to the cluster there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotMark {
    /// The last entry it covers.
    pub at: Position,
    /// Members as of that entry.
    pub members: Members,
}

/// What one round of consensus wants to be durable, in the order of the fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Replaces the whole log.
    pub snapshot: Option<SnapshotMark>,
    /// Appended; they replace whatever stands at or after the first one's index.
    pub entries: Vec<Entry>,
    /// Replaces the last one. Durable together with `entries`; where these need several records, the
    /// term and vote come with the first one and the commit index never runs ahead of them.
    pub hard_state: Option<HardState>,
}

/// What one flush did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flushed {
    /// Records written, each with a sync; more than one only for very large groups.
    pub records: usize,
    /// Bytes written, padding included.
    pub bytes: u64,
}

/// What a log holds when it is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// How often it has been opened, this time included: 1 at its creation.
    pub boot: u64,
    /// As last persisted.
    pub hard_state: HardState,
    /// The position before the first entry.
    pub base: Position,
    /// Terms of all entries after `base`.
    pub terms: Terms,
    /// The last snapshot that replaced the log, if any ever did.
    pub snapshot: Option<SnapshotMark>,
    /// Bytes of a torn write that were cut off the end; 0 if there were none.
    pub torn_bytes: u64,
}

impl Recovered {
    /// The last entry, or the base.
    pub fn last(&self) -> Position {
        self.terms.last().unwrap_or(self.base)
    }
}
