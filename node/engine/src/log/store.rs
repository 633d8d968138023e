//! Checks that log and store fit each other, and finishes a snapshot install that a crash
//! interrupted.

use node_consensus::{HardState, Position};

use super::{Batch, Damage, Log, LogError};

/// Relation of a store to the log: see [`Log::check_store`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreConsistency {
    /// The store and the log don't contradict each other.
    Consistent,
    /// The store holds a snapshot whose install the log records as begun, but not as finished.
    Installed,
}

impl Log {
    /// Compares the store's durable position with the log. If the store is ahead of the log or
    /// contradicts it, one of them has lost data. That is an error. The exception is a store that
    /// holds the snapshot whose install was under way.
    pub fn check_store(&self, durable: Position) -> Result<StoreConsistency, LogError> {
        let refused = |what| {
            let (path, offset) = self.end();
            Err(LogError::damaged(path, offset, Damage::Store(what)))
        };
        if durable.index < self.base().index {
            return refused("it begins after the store's last entry: the store lost data");
        }
        let installed = self.installing() == Some(durable);
        match self.reader().term(durable.index) {
            Some(term) if term == durable.term => Ok(StoreConsistency::Consistent),
            Some(_) | None if installed => Ok(StoreConsistency::Installed),
            Some(_) => refused("its entry differs from the one that the store has applied"),
            None => refused("it ends before the store's last entry: it lost data"),
        }
    }

    /// Records in the log that the snapshot at position `at` is installed. The previous process had
    /// installed it in the store, but died before the log recorded that.
    pub fn finish_install(&mut self, at: Position) -> Result<(), LogError> {
        let mut state = self.hard_state();
        if at.term > state.term {
            // The snapshot's term is later than the log's. The log has no vote of that term, so
            // this member can't have voted in it.
            state.term = at.term;
            state.vote = 0;
        }
        state.commit = state.commit.max(at.index);
        let batch = Batch { hard_state: Some(state), snapshot: Some(at), ..Batch::default() };
        self.write(&[batch])
    }

    /// Returns the persisted hard state. Its commit index is raised to the position that the store
    /// has applied, because applied entries are committed. It never exceeds the log's last entry.
    pub fn hard_state_with(&self, applied: Position) -> HardState {
        let mut state = self.hard_state();
        state.commit = state.commit.max(applied.index).min(self.last().index);
        state
    }
}
