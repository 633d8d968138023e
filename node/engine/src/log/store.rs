//! Consistency of log and store, and the completion of a snapshot's install that a crash
//! interrupted.

use node_consensus::{HardState, Position};

use super::{Batch, Damage, Log, LogError};

/// Relation of a store to the log: see [`Log::check_store`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreConsistency {
    /// The store fits the log.
    Consistent,
    /// The store already holds the snapshot that was being installed.
    Installed,
}

impl Log {
    /// Compares the store's durable position with the log. A store that is ahead of the log, or
    /// contradicts it, means that one of them lost data. This is an error, unless the store holds
    /// the snapshot that was being installed.
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

    /// Completes an install in the log: the store holds a snapshot of `at`, but the process died
    /// before the log recorded that.
    pub fn finish_install(&mut self, at: Position) -> Result<(), LogError> {
        let mut state = self.hard_state();
        if at.term > state.term {
            // This member can't have voted in a term that its log has never seen.
            state.term = at.term;
            state.vote = 0;
        }
        state.commit = state.commit.max(at.index);
        let batch = Batch { hard_state: Some(state), snapshot: Some(at), ..Batch::default() };
        self.write(&[batch])
    }

    /// Returns the hard state as last persisted, with a commit index not behind what the store has
    /// applied.
    pub fn hard_state_with(&self, applied: Position) -> HardState {
        let mut state = self.hard_state();
        state.commit = state.commit.max(applied.index).min(self.last().index);
        state
    }
}
