//! The state machine's side: apply, checkpoint, snapshots. No thread of its own.

use std::io::Read;

use node_consensus::Position;

use crate::machine::{Applied, Committed, StateMachine};

/// When the store is made durable, so that the log can drop what came before.
#[derive(Clone, Copy, Debug)]
pub struct CheckpointPolicy {
    /// After this many bytes of entries,
    pub bytes: usize,
    /// or this many entries.
    pub entries: u64,
}

impl Default for CheckpointPolicy {
    fn default() -> Self {
        Self { bytes: 16 * 1024 * 1024, entries: 10_000 }
    }
}

/// The only writer of the state machine.
#[derive(Debug)]
pub struct Applier<M> {
    machine: M,
    policy: CheckpointPolicy,
    bytes: usize,
}

impl<M: StateMachine> Applier<M> {
    /// Takes the machine over.
    pub fn new(machine: M, policy: CheckpointPolicy) -> Self {
        Self { machine, policy, bytes: 0 }
    }

    /// Applies committed entries, in order.
    pub fn apply(&mut self, entries: &[Committed]) -> Result<Applied<M::Outcome>, M::Error> {
        self.bytes += entries.iter().map(|entry| entry.data.len()).sum::<usize>();
        let applied = self.machine.apply(entries)?;
        if let Some(last) = entries.last() {
            let reached = applied.at.index >= last.position.index;
            assert!(reached, "the state machine has skipped entries");
        }
        Ok(applied)
    }

    /// Whether so much has been applied that the store should be made durable.
    pub fn is_checkpoint_due(&self) -> bool {
        let behind = self.machine.applied().index.saturating_sub(self.machine.durable().index);
        behind > 0 && (self.bytes >= self.policy.bytes || behind >= self.policy.entries)
    }

    /// Makes the store durable.
    pub fn checkpoint(&mut self) -> Result<Position, M::Error> {
        self.bytes = 0;
        self.machine.checkpoint()
    }

    /// Replaces the whole state.
    pub fn install_snapshot(&mut self, input: &mut dyn Read) -> Result<Position, M::Error> {
        self.bytes = 0;
        self.machine.install_snapshot(input)
    }

    /// The machine, to read from.
    pub fn machine(&self) -> &M {
        &self.machine
    }
}
