//! Input and output types of the log.

use std::path::PathBuf;

use node_consensus::{Entry, Guards, HardState, Position, Terms};

/// Owner of a log. It never changes, and every checksum depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogIdentity {
    pub cluster: u64,
    pub member: u64,
    /// Random number of the data directory. A directory that is wiped and set up again gets another
    /// one.
    pub incarnation: u128,
}

impl LogIdentity {
    /// Returns the identity as a short text for messages.
    pub fn brief(&self) -> String {
        format!(
            "cluster {:016x}, member {:016x}, incarnation {:032x}",
            self.cluster, self.member, self.incarnation
        )
    }
}

/// Sizes of the log's files, and the safety rules in force.
#[derive(Clone, Debug)]
pub struct LogOptions {
    /// Size of one segment in bytes: a multiple of 4 KiB, at least 32 KiB. The largest entry must
    /// fit, with 16 KiB to spare.
    pub segment_bytes: u64,
    /// Number of spare segments that are kept ready. They reveal a full disk before the log needs
    /// the space.
    pub spare_segments: usize,
    /// Number of zero bytes written ahead in one step of [`Log::prepare`](super::Log::prepare).
    pub fill_bytes: u64,
    /// Size above which a pending record is written, if the segment is large enough. A larger entry
    /// gets a record of its own.
    pub max_record_bytes: u64,
    /// Safety rules that the log obeys: always [`Guards::ALL`] outside tests.
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

/// State that one round of consensus makes durable together. If the batch needs several records,
/// the first of them has term and vote. The persisted commit index never exceeds the last persisted
/// entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Latest hard state, if it changed.
    pub hard_state: Option<HardState>,
    /// Position of a snapshot that is about to replace the store.
    pub installing: Option<Position>,
    /// Position of a snapshot that the store now holds. It replaces all entries of the log.
    pub snapshot: Option<Position>,
    /// Contiguous entries. They replace everything in the log from the first one's index on.
    pub entries: Vec<Entry>,
}

/// Content of the log when it was opened. All of it is durable on disk.
#[derive(Clone, Debug, Default)]
pub struct RecoveredState {
    /// Owner of the log.
    pub identity: LogIdentity,
    /// Number of times that the log has been opened, including this one.
    pub boot: u64,
    /// Hard state as it was last persisted.
    pub hard_state: HardState,
    /// Position just before the first entry.
    pub base: Position,
    /// Terms of all entries after `base`.
    pub terms: Terms,
    /// Position of a snapshot whose install the previous process began and did not finish.
    pub installing: Option<Position>,
    /// File and offset at which a torn end was truncated.
    pub truncated_at: Option<(PathBuf, u64)>,
}

impl RecoveredState {
    /// Returns the position of the last entry. Returns `base` if there is none.
    pub fn last(&self) -> Position {
        self.terms.last().unwrap_or(self.base)
    }
}
