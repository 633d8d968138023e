//! Dropping segments that nobody needs any more.

use node_consensus::Position;

use super::{Log, LogError};

impl Log {
    /// Drops whole segments from the front that hold no entry after `through`, which the store
    /// must hold durably; returns the log's new base, at or before `through`.
    pub fn compact(&mut self, through: u64) -> Result<Position, LogError> {
        if self.poisoned {
            return Err(LogError::Poisoned);
        }
        while let Some(first) = self.directory.live.first().copied() {
            if first == self.current.id || self.index.is_needed(first, through) {
                break;
            }
            self.poisoned = true;
            self.directory.retire_first(&self.options)?;
            self.poisoned = false;
            self.index.drop_through(first);
        }
        Ok(self.index.base())
    }

    /// The store holds a snapshot of `at`, which was being installed when the process died; the
    /// log catches up with it.
    pub fn finish_install(&mut self, at: Position) -> Result<(), LogError> {
        let mut hard_state = self.hard_state;
        if at.term > hard_state.term {
            // This member can't have voted in a term that its log has never seen.
            hard_state.term = at.term;
            hard_state.vote = 0;
        }
        hard_state.commit = hard_state.commit.max(at.index);
        self.write(&[super::Batch {
            hard_state: Some(hard_state),
            snapshot: Some(at),
            ..super::Batch::default()
        }])
    }

    /// As last persisted.
    pub fn hard_state(&self) -> node_consensus::HardState {
        self.hard_state
    }

    /// Terms of the entries after [`Log::base`].
    pub fn terms(&self) -> &node_consensus::Terms {
        self.index.terms()
    }
}
