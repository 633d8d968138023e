//! Apply, checkpoints and snapshots: the part of the driver that owns the state machine. This
//! module starts no thread.

use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use node_consensus::Position;
use node_state::state_machine::{
    ApplyResult, CheckpointWork, CommittedEntry, RequestId, StateMachine,
};

use super::{DriverMetrics, Notice, QUEUED_JOBS, SLOW_APPLY};

/// Policy that decides when to make the store durable. Before that, the store has the changes of
/// the newest entries only in memory, and a restart applies these entries again. Afterwards the log
/// can drop them.
#[derive(Clone, Copy, Debug)]
pub struct CheckpointPolicy {
    /// Number of bytes after which a checkpoint is due: those of the applied entries, or those of
    /// their changes, whichever is more. A small entry that deletes many keys makes many changes.
    pub bytes: usize,
    /// Number of applied entries after which a checkpoint is due.
    pub entries: u64,
}

impl Default for CheckpointPolicy {
    /// Returns the policy of production. A larger checkpoint would take fewer bytes of the disk in
    /// all, but delay the log's syncs for longer at a time.
    fn default() -> Self {
        Self { bytes: 4 * 1024 * 1024, entries: 100_000 }
    }
}

/// Job for the state machine.
#[derive(Debug)]
pub enum ApplyJob {
    /// Apply these committed entries, in order.
    Apply(Vec<CommittedEntry>),
    /// Install a snapshot as the whole state, given its position and the file of its body.
    Install(Position, PathBuf),
    /// Build a snapshot of the current state.
    Build,
}

/// Work of one call of [`Applier::run`]. First, `entries` are applied as one batch. Then
/// `final_job` is run, if there is one: a job that can't share the batch's transaction.
#[derive(Debug)]
pub struct ApplyBatch {
    entries: Vec<CommittedEntry>,
    final_job: Option<ApplyJob>,
}

impl ApplyBatch {
    /// Collects the work of one call of [`Applier::run`] from the first job and the queued ones.
    /// The first job that isn't `Apply` becomes the final job. Later jobs stay in `more`.
    pub fn gather(first: ApplyJob, more: impl Iterator<Item = ApplyJob>) -> Self {
        let mut turn = match first {
            ApplyJob::Apply(entries) => Self { entries, final_job: None },
            other => return Self { entries: Vec::new(), final_job: Some(other) },
        };
        for job in more.take(QUEUED_JOBS) {
            match job {
                ApplyJob::Apply(more) => turn.entries.extend(more),
                other => {
                    turn.final_job = Some(other);
                    break;
                }
            }
        }
        turn
    }

    /// Returns the committed entries that will be applied as one batch.
    pub fn entries(&self) -> &[CommittedEntry] {
        &self.entries
    }
}

/// Destinations of the applier's results.
pub trait ApplySink<M: StateMachine> {
    /// Sends a notice to the core thread.
    fn notice(&mut self, notice: Notice);
    /// Sends the outcomes to the requests that wait for them.
    fn answer(&mut self, outcomes: Vec<(RequestId, M::Outcome)>);
    /// Starts to write a snapshot; [`Notice::Built`] reports the end. Returns false if another
    /// snapshot already waits to be written.
    fn build(&mut self, snapshot: M::Snapshot) -> bool;
    /// Runs the checkpoint on another thread; [`Notice::Checkpointed`] reports the end. If another
    /// checkpoint waits to be run, this one is dropped, since the other one will include its
    /// entries.
    fn checkpoint(&mut self, work: CheckpointWork<M::Error>);
    /// Opens the body of a received snapshot for reading.
    fn open(&mut self, body: &Path) -> io::Result<impl Read>;
    /// Reports that the store has durably installed the received snapshot `body`. The file is no
    /// longer needed.
    fn installed(&mut self, body: &Path);
}

/// Runs a checkpoint, and returns the notice of its end for the core thread.
pub fn run_checkpoint<E>(work: CheckpointWork<E>, metrics: &DriverMetrics) -> Result<Notice, E> {
    let started = Instant::now();
    let at = work()?;
    metrics.checkpoint_durations.record(started.elapsed());
    Ok(Notice::Checkpointed(at))
}

/// Reason why the applier failed. The driver can't continue after any of these errors.
#[derive(Debug)]
pub enum ApplierError<E> {
    /// The state machine failed.
    Store(E),
    /// The body of a received snapshot can't be read.
    Body(io::Error),
}

/// The only writer of the state machine. It runs on the apply thread in production, and on
/// simulated events in the simulation. It reads the clock only for its counters.
#[derive(Debug)]
pub struct Applier<M> {
    machine: M,
    policy: CheckpointPolicy,
    metrics: Arc<DriverMetrics>,
    /// Bytes of entries, or of their changes, applied since the last checkpoint was begun.
    bytes: usize,
    /// Position of the last entry applied when the last checkpoint was begun.
    checkpoint_begun: Position,
}

impl<M: StateMachine> Applier<M> {
    /// Takes ownership of the state machine.
    pub fn new(machine: M, policy: CheckpointPolicy, metrics: Arc<DriverMetrics>) -> Self {
        let checkpoint_begun = machine.durable();
        Self { machine, policy, metrics, bytes: 0, checkpoint_begun }
    }

    /// Returns the state machine, read-only.
    pub fn machine(&self) -> &M {
        &self.machine
    }

    /// Applies the entries of `turn`, and runs its final job.
    pub fn run(
        &mut self,
        turn: ApplyBatch,
        out: &mut impl ApplySink<M>,
    ) -> Result<(), ApplierError<M::Error>> {
        if !turn.entries.is_empty() {
            self.apply(&turn.entries, out).map_err(ApplierError::Store)?;
        }
        match turn.final_job {
            None => Ok(()),
            Some(ApplyJob::Apply(entries)) => {
                self.apply(&entries, out).map_err(ApplierError::Store)
            }
            Some(ApplyJob::Install(at, body)) => self.install(at, &body, out),
            Some(ApplyJob::Build) => {
                if !out.build(self.machine.snapshot()) {
                    // No snapshot is built for this request. The driver requests another one if a
                    // peer still needs it.
                    out.notice(Notice::Built(None));
                }
                Ok(())
            }
        }
    }

    fn apply(
        &mut self,
        entries: &[CommittedEntry],
        out: &mut impl ApplySink<M>,
    ) -> Result<(), M::Error> {
        let started = Instant::now();
        let unflushed = self.machine.unflushed_bytes();
        let ApplyResult { position: at, outcomes, changes } = self.machine.apply(entries)?;
        // If a flush began meanwhile, the count began again at 0.
        let changed = self.machine.unflushed_bytes().saturating_sub(unflushed);
        self.bytes += changed.max(entries.iter().map(|entry| entry.data.len()).sum());
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
        let entries = at.index.saturating_sub(self.checkpoint_begun.index);
        if self.bytes >= self.policy.bytes || entries >= self.policy.entries {
            self.begin_checkpoint(out);
        }
        Ok(())
    }

    /// Has the store made durable on another thread, unless everything applied is already durable.
    pub fn begin_checkpoint(&mut self, out: &mut impl ApplySink<M>) {
        if let Some(work) = self.take_checkpoint() {
            out.checkpoint(work);
        }
    }

    /// Makes the store durable before it returns, unless everything applied is already durable.
    pub fn checkpoint(&mut self, out: &mut impl ApplySink<M>) -> Result<(), M::Error> {
        let Some(work) = self.take_checkpoint() else { return Ok(()) };
        out.notice(run_checkpoint(work, &self.metrics)?);
        Ok(())
    }

    fn take_checkpoint(&mut self) -> Option<CheckpointWork<M::Error>> {
        if self.machine.durable() == self.machine.applied() {
            return None;
        }
        self.bytes = 0;
        self.checkpoint_begun = self.machine.applied();
        Some(self.machine.checkpoint())
    }

    fn install(
        &mut self,
        at: Position,
        body: &Path,
        out: &mut impl ApplySink<M>,
    ) -> Result<(), ApplierError<M::Error>> {
        let mut reader = BufReader::new(out.open(body).map_err(ApplierError::Body)?);
        self.bytes = 0;
        self.checkpoint_begun = at;
        self.metrics.installing.store(true, Relaxed);
        let installed = self.machine.install_snapshot(&mut reader);
        self.metrics.installing.store(false, Relaxed);
        let installed = installed.map_err(ApplierError::Store)?;
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
