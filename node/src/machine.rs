//! The seam between the driver and the replicated state.
//!
//! The driver knows entries as an index, a term, a kind and bytes; the state machine knows what the bytes
//! mean. Whatever the state machine holds (data, applied index, members) changes in one storage
//! transaction per batch, so that no crash can leave one without the other.

use std::io::{Read, Write};

use bytes::Bytes;

pub use node_consensus::{ConfChange, EntryKind, Members, Position};

/// One committed entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Where it stands.
    pub position: Position,
    /// What it is.
    pub kind: EntryKind,
    /// The proposer's bytes, opaque to the driver.
    pub data: Bytes,
}

/// Chosen by the proposer, carried in the entry's bytes, unique for the life of the cluster:
/// how an outcome finds the request that waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// What applying a batch of entries gave.
#[derive(Debug)]
pub struct Applied<O> {
    /// Where the machine stands now.
    pub at: Position,
    /// An outcome for each entry that carries a request, for who waits.
    pub outcomes: Vec<(RequestId, O)>,
    /// What became of each entry of kind [`EntryKind::ConfChange`], in order.
    pub changes: Vec<AppliedChange>,
}

/// What became of one change of members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppliedChange {
    /// The entry that asked for it.
    pub index: u64,
    /// What consensus has to do; nothing if it was refused.
    pub change: Option<ConfChange>,
    /// Who belongs to the cluster after it.
    pub members: Members,
}

/// The state at one position, to be written while the state machine goes on.
pub trait Snapshot: Send + 'static {
    /// Why it can't be written.
    type Error: std::error::Error + Send + Sync + 'static;

    /// The last entry in it.
    fn position(&self) -> Position;

    /// Who belonged to the cluster at that position.
    fn members(&self) -> Members;

    /// Writes it, for a member that is too far behind the log.
    fn write(&self, out: &mut dyn Write) -> Result<(), Self::Error>;
}

/// The replicated state, as the driver sees it.
///
/// Every error is fatal: the process stops, and the restart recovers from log and checkpoint.
pub trait StateMachine: Send + 'static {
    /// What one applied request answers.
    type Outcome: Send + 'static;
    /// Why the state can't go on.
    type Error: std::error::Error + Send + Sync + 'static;
    /// The whole state at one position.
    type Snapshot: Snapshot;

    /// Whether a restart would meet the same error again.
    fn is_final(error: &Self::Error) -> bool;

    /// The last entry applied.
    fn applied(&self) -> Position;

    /// The last entry whose effects survive a crash; the log keeps everything after it.
    fn durable(&self) -> Position;

    /// Who belongs to the cluster at `applied()`.
    fn members(&self) -> Members;

    /// Applies `entries` in order, in one transaction, not yet durable. Entries at or below
    /// `applied()` are skipped.
    fn apply(&mut self, entries: &[Committed]) -> Result<Applied<Self::Outcome>, Self::Error>;

    /// Makes everything applied durable; returns the new `durable()`.
    fn checkpoint(&mut self) -> Result<Position, Self::Error>;

    /// The whole state at `applied()`. Cheap; the writing is what takes long.
    fn snapshot(&self) -> Self::Snapshot;

    /// Replaces the whole state, durably, by what [`Snapshot::write`] wrote.
    fn install_snapshot(&mut self, input: &mut dyn Read) -> Result<Position, Self::Error>;
}
