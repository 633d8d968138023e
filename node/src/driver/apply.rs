//! The state machine's side: apply, checkpoint, snapshots. No thread of its own.

use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use node_consensus::Position;

use super::{Metrics, Notice, QUEUED_JOBS, SLOW_APPLY};
use crate::machine::{Applied, Committed, RequestId, StateMachine};

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

/// Something for the state machine.
#[derive(Debug)]
pub enum ApplyJob {
    /// To be applied, in order.
    Apply(Vec<Committed>),
    /// A snapshot's position and body, to be installed as the whole state.
    Install(Position, PathBuf),
    /// A snapshot is wanted.
    Build,
}

/// What happens in one turn of the machine: what may share a transaction is applied first, as one
/// batch, and then the job that may not, if one ended the run.
#[derive(Debug)]
pub struct Turn {
    entries: Vec<Committed>,
    then: Option<ApplyJob>,
}

impl Turn {
    /// The first job, and what has gathered behind it as far as it goes into the same transaction.
    /// What comes after the job that ends the run stays where it is.
    pub fn gather(first: ApplyJob, more: impl Iterator<Item = ApplyJob>) -> Self {
        let mut turn = match first {
            ApplyJob::Apply(entries) => Self { entries, then: None },
            other => return Self { entries: Vec::new(), then: Some(other) },
        };
        for job in more.take(QUEUED_JOBS) {
            match job {
                ApplyJob::Apply(more) => turn.entries.extend(more),
                other => {
                    turn.then = Some(other);
                    break;
                }
            }
        }
        turn
    }

    /// What it will apply.
    pub fn entries(&self) -> &[Committed] {
        &self.entries
    }
}

/// Where the machine's doings are told.
pub trait ApplyOutlets<M: StateMachine> {
    /// Into the core's mail.
    fn notice(&mut self, notice: Notice);
    /// To who waits for these requests.
    fn answer(&mut self, outcomes: Vec<(RequestId, M::Outcome)>);
    /// Has a snapshot written; [`Notice::Built`] follows. False if another one waits already.
    fn build(&mut self, snapshot: M::Snapshot) -> bool;
    /// A received body, to be read.
    fn open(&mut self, body: &Path) -> io::Result<impl Read>;
    /// A received body is in the store, durably: nobody needs it any more.
    fn installed(&mut self, body: &Path);
}

/// Why a turn ended early. Either is final.
#[derive(Debug)]
pub enum TurnError<E> {
    /// The state machine can't go on.
    Store(E),
    /// A snapshot's body can't be read.
    Body(io::Error),
}

/// The only writer of the state machine: the apply thread in production, events of the simulation. It
/// looks at the clock for its counters only.
#[derive(Debug)]
pub struct Applier<M> {
    machine: M,
    policy: CheckpointPolicy,
    metrics: Arc<Metrics>,
    /// Of entries, since the last checkpoint.
    bytes: usize,
}

impl<M: StateMachine> Applier<M> {
    /// Takes the machine over.
    pub fn new(machine: M, policy: CheckpointPolicy, metrics: Arc<Metrics>) -> Self {
        Self { machine, policy, metrics, bytes: 0 }
    }

    /// The machine, to read from.
    pub fn machine(&self) -> &M {
        &self.machine
    }

    /// One turn. Who waits is answered before a checkpoint that is due, which may take long.
    pub fn run(
        &mut self,
        turn: Turn,
        out: &mut impl ApplyOutlets<M>,
    ) -> Result<(), TurnError<M::Error>> {
        if !turn.entries.is_empty() {
            self.apply(&turn.entries, out).map_err(TurnError::Store)?;
        }
        match turn.then {
            None => Ok(()),
            Some(ApplyJob::Apply(entries)) => self.apply(&entries, out).map_err(TurnError::Store),
            Some(ApplyJob::Install(at, body)) => self.install(at, &body, out),
            Some(ApplyJob::Build) => {
                if !out.build(self.machine.snapshot()) {
                    // The driver asks again when a peer still needs one.
                    out.notice(Notice::Built(None));
                }
                Ok(())
            }
        }
    }

    fn apply(
        &mut self,
        entries: &[Committed],
        out: &mut impl ApplyOutlets<M>,
    ) -> Result<(), M::Error> {
        let started = Instant::now();
        self.bytes += entries.iter().map(|entry| entry.data.len()).sum::<usize>();
        let Applied { at, outcomes, changes } = self.machine.apply(entries)?;
        if let Some(last) = entries.last() {
            assert!(at.index >= last.position.index, "the state machine has skipped entries");
        }
        self.metrics.applied.fetch_add(entries.len() as u64, Relaxed);
        let took = started.elapsed();
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.metrics.apply_micros.fetch_add(micros, Relaxed);
        self.metrics.slow_applies.fetch_add(u64::from(took > SLOW_APPLY), Relaxed);
        out.notice(Notice::Applied { at, changes });
        out.answer(outcomes);
        let behind = at.index.saturating_sub(self.machine.durable().index);
        if self.bytes >= self.policy.bytes || behind >= self.policy.entries {
            self.checkpoint(out)?;
        }
        Ok(())
    }

    /// Makes the store durable, if it isn't.
    pub fn checkpoint(&mut self, out: &mut impl ApplyOutlets<M>) -> Result<(), M::Error> {
        if self.machine.durable() == self.machine.applied() {
            return Ok(());
        }
        let started = Instant::now();
        self.bytes = 0;
        let at = self.machine.checkpoint()?;
        self.metrics.checkpoint_durations.record(started.elapsed());
        out.notice(Notice::Checkpointed(at));
        Ok(())
    }

    fn install(
        &mut self,
        at: Position,
        body: &Path,
        out: &mut impl ApplyOutlets<M>,
    ) -> Result<(), TurnError<M::Error>> {
        let mut reader = BufReader::new(out.open(body).map_err(TurnError::Body)?);
        self.bytes = 0;
        self.metrics.installing.store(true, Relaxed);
        let installed = self.machine.install_snapshot(&mut reader);
        self.metrics.installing.store(false, Relaxed);
        let installed = installed.map_err(TurnError::Store)?;
        drop(reader);
        assert_eq!(installed, at, "a snapshot's body is of another position than its message");
        self.metrics.snapshots_installed.fetch_add(1, Relaxed);
        out.installed(body);
        out.notice(Notice::Installed { at, members: self.machine.members() });
        Ok(())
    }
}

#[cfg(test)]
mod tests;
