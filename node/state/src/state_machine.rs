//! The interface between the driver and the replicated state.
//!
//! To the driver, an entry is an index, a term, a kind and bytes; only the state machine knows the
//! meaning of the bytes. Each batch changes all parts of the state (data, applied index, members)
//! in one storage transaction. So a crash can't leave one part changed and another not.

use std::io::{Read, Write};

use bytes::Bytes;

pub use node_consensus::{ConfChange, EntryKind, Members, Position};

/// A committed log entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommittedEntry {
    /// Index and term of the entry.
    pub position: Position,
    pub kind: EntryKind,
    /// Bytes of the entry, as its proposer encoded them. The driver doesn't interpret them.
    pub data: Bytes,
}

/// Id of a request, unique for the life of the cluster. The proposer chooses it and puts it into
/// the entry's bytes. When the entry is applied, the outcome is matched to the waiting request by
/// this id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Result of applying a batch of entries.
#[derive(Debug)]
pub struct ApplyResult<O> {
    /// Position of the last applied entry.
    pub position: Position,
    /// Request id and outcome of each entry that carries a request.
    pub outcomes: Vec<(RequestId, O)>,
    /// Result of each entry of kind [`EntryKind::ConfChange`], in log order.
    pub changes: Vec<AppliedChange>,
}

/// Result of a change of members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppliedChange {
    /// Index of the entry that asked for the change.
    pub index: u64,
    /// Change that consensus has to make. `None` if the requested change was refused, or if it
    /// doesn't affect consensus.
    pub change: Option<ConfChange>,
    /// Voters and learners of the cluster after the entry.
    pub members: Members,
}

/// The whole state at one position, which can be written while the state machine goes on.
pub trait Snapshot: Send + 'static {
    /// Why the snapshot can't be written.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Returns the position of the last entry that the snapshot includes.
    fn position(&self) -> Position;

    /// Returns the voters and learners at the snapshot's position.
    fn members(&self) -> Members;

    /// Writes the snapshot, to be sent to a member that is too far behind the log.
    fn write(&self, out: &mut dyn Write) -> Result<(), Self::Error>;
}

/// Work that makes all applied entries durable: those that are applied when it runs. It returns the
/// position of the last of them. It may run on any thread, while the state machine applies further
/// entries.
pub type CheckpointWork<E> = Box<dyn FnOnce() -> Result<Position, E> + Send>;

/// The replicated state, as the driver uses it.
///
/// Every error is fatal: the process stops. When it restarts, it recovers from the log and the last
/// checkpoint.
pub trait StateMachine: Send + 'static {
    /// Result of one applied request.
    type Outcome: Send + 'static;
    /// Why the state machine can't continue.
    type Error: std::error::Error + Send + Sync + 'static;
    /// Snapshot of the whole state at one position.
    type Snapshot: Snapshot;

    /// Whether the error would occur again after a restart.
    fn is_final(error: &Self::Error) -> bool;

    /// Returns the position of the last applied entry.
    fn applied(&self) -> Position;

    /// Returns the position of the last entry whose effects survive a crash. The log keeps all
    /// later entries.
    fn durable(&self) -> Position;

    /// Returns the voters and learners at `applied()`.
    fn members(&self) -> Members;

    /// Applies `entries` in order, as one batch. The changes are not durable until the next
    /// [`Self::checkpoint`] has run. Entries at or below `applied()` are skipped.
    fn apply(
        &mut self,
        entries: &[CommittedEntry],
    ) -> Result<ApplyResult<Self::Outcome>, Self::Error>;

    /// Returns the approximate number of bytes that changes take in memory until the next
    /// checkpoint writes them. While a checkpoint runs, its own changes don't count.
    fn unflushed_bytes(&self) -> usize;

    /// Returns work that makes the applied entries durable.
    fn checkpoint(&self) -> CheckpointWork<Self::Error>;

    /// Returns a snapshot of the whole state at `applied()`. This is cheap; writing the snapshot
    /// takes long.
    fn snapshot(&self) -> Self::Snapshot;

    /// Replaces the whole state, durably, by a snapshot that [`Snapshot::write`] wrote.
    fn install_snapshot(&mut self, input: &mut dyn Read) -> Result<Position, Self::Error>;
}
