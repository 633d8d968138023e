//! Implementations of the interfaces through which a member's core and state machine act. Queues
//! are small, and output is kept until the step ends.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Cursor, Read, Write};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use node_consensus::{Entry, EntryKind, FetchRequest, StepError};
use node_engine::driver::{
    ApplyJob, ApplySink, EffectSink, LogJob, Mail, Message, Notice, Position, ReadToken, SendError,
    SnapshotStorage, SnapshotStore,
};
use node_engine::log::Batch;
use node_state::apply::{KvStateMachine, Outcome};
use node_state::mvcc::{StoreError, View};
use node_state::state_machine::{CheckpointWork, RequestId};

use super::node::ConnectedStream;
use super::plan::HistoryPlan;
use crate::rng::Rng;

/// Snapshot bodies in memory. All clones share the same bodies.
#[derive(Clone, Default)]
pub(super) struct MemoryBodies {
    files: Rc<RefCell<BTreeMap<PathBuf, Bytes>>>,
    /// Whether creating the next snapshot body fails.
    fails: Rc<Cell<bool>>,
}

impl MemoryBodies {
    pub(super) fn put(&self, path: PathBuf, body: Bytes) {
        self.files.borrow_mut().insert(path, body);
    }

    pub(super) fn fail_once(&self) {
        self.fails.set(true);
    }
}

/// A snapshot body that is being written to [`MemoryBodies`].
pub(super) struct BodyWriter {
    memory: MemoryBodies,
    path: PathBuf,
    bytes: Vec<u8>,
}

impl Write for BodyWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.memory.put(self.path.clone(), Bytes::copy_from_slice(&self.bytes));
        Ok(())
    }
}

impl SnapshotStorage for MemoryBodies {
    type New = BodyWriter;
    type Body = Cursor<Bytes>;

    fn create(&self, path: &Path) -> io::Result<BodyWriter> {
        if self.fails.take() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.put(path.to_owned(), Bytes::new());
        Ok(BodyWriter { memory: self.clone(), path: path.to_owned(), bytes: Vec::new() })
    }

    fn open(&self, path: &Path) -> io::Result<Cursor<Bytes>> {
        let files = self.files.borrow();
        files.get(path).cloned().map(Cursor::new).ok_or(io::ErrorKind::NotFound.into())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.files.borrow_mut().remove(path).map(|_| ()).ok_or(io::ErrorKind::NotFound.into())
    }
}

/// State of a member's log, derived from the batches written to it.
#[derive(Debug, Default)]
pub(super) struct LogSummary {
    /// Index of the last entry.
    pub last: u64,
    /// Whether a snapshot is being installed into log and store.
    pub installing: bool,
    pub conflicts: u64,
}

impl LogSummary {
    fn note(&mut self, batch: &Batch) {
        self.installing |= batch.installing.is_some();
        if let Some(at) = batch.snapshot {
            (self.installing, self.last) = (false, at.index);
        }
        if let (Some(first), Some(last)) = (batch.entries.first(), batch.entries.last()) {
            self.conflicts += u64::from(first.index <= self.last);
            self.last = last.index;
        }
    }
}

/// Output of a round of the core, to be carried out afterwards.
#[derive(Default)]
pub(super) struct RoundOutput {
    /// Messages, with the stream that accepted each; `None` if no stream did.
    pub messages: Vec<(Message, Option<ConnectedStream>)>,
    pub snapshots: Vec<(Message, Bytes)>,
    pub fetches: Vec<FetchRequest>,
    pub discarded: Vec<PathBuf>,
    pub refused: Vec<RequestId>,
    pub lost: Vec<RequestId>,
    pub reads: Vec<ReadToken>,
    pub refused_reads: Vec<ReadToken>,
    /// Membership changes written to the log.
    pub changes: Vec<Entry>,
    /// Whether a step of a snapshot's installation begins.
    pub installs: bool,
    /// Number of messages and fetches that were refused because a queue was full.
    pub refused_by_full_queue: u64,
    /// Number of snapshots that could not be sent because their body was missing.
    pub missing_bodies: u64,
}

/// Everything that a core can call in the simulation.
pub(super) struct CorePorts<'a> {
    pub rng: &'a mut Rng,
    pub plan: &'a HistoryPlan,
    pub are_faults_over: bool,
    pub mail: &'a mut Mail,
    pub log_jobs: &'a mut VecDeque<LogJob>,
    pub apply_jobs: &'a mut VecDeque<ApplyJob>,
    pub log_summary: &'a mut LogSummary,
    pub snapshots: &'a SnapshotStore<MemoryBodies>,
    pub drops_next_body: &'a mut bool,
    pub connected: &'a BTreeMap<u64, ConnectedStream>,
    pub fetches_in_progress: &'a mut usize,
    pub output: RoundOutput,
}

impl EffectSink for CorePorts<'_> {
    fn send(&mut self, message: Message) -> Result<(), SendError> {
        let stream = self.connected.get(&message.to).copied();
        let is_full =
            stream.is_some() && !self.are_faults_over && self.rng.chance(self.plan.full_streams);
        self.output.refused_by_full_queue += u64::from(is_full);
        self.output.messages.push((message, stream.filter(|_| !is_full)));
        match stream {
            None => Err(SendError::NotConnected),
            Some(_) if is_full => Err(SendError::Full),
            Some(_) => Ok(()),
        }
    }

    fn send_snapshot(&mut self, message: Message) -> bool {
        // If `drops_next_body` is set, the body of one snapshot is lost, even after the faults have
        // ended.
        let body =
            self.snapshots.body_of(&message).filter(|_| !std::mem::take(self.drops_next_body));
        let is_there = body.is_some();
        self.output.missing_bodies += u64::from(!is_there);
        self.output.snapshots.extend(body.map(|body| (message, body.into_inner())));
        is_there
    }

    fn log(&mut self, job: LogJob) {
        if let LogJob::Write(_, batch) = &job {
            self.output.installs |= batch.installing.is_some() || batch.snapshot.is_some();
            self.log_summary.note(batch);
            let changes = batch.entries.iter().filter(|entry| entry.kind == EntryKind::ConfChange);
            self.output.changes.extend(changes.cloned());
        }
        self.log_jobs.push_back(job);
    }

    fn apply(&mut self, job: ApplyJob) {
        self.output.installs |= matches!(job, ApplyJob::Install(..));
        self.apply_jobs.push_back(job);
    }

    fn fetch(&mut self, fetch: FetchRequest) -> bool {
        if *self.fetches_in_progress >= self.plan.queued_fetches {
            self.output.refused_by_full_queue += 1;
            return false;
        }
        *self.fetches_in_progress += 1;
        self.output.fetches.push(fetch);
        true
    }

    fn drop_snapshot(&mut self) {
        self.snapshots.drop_built();
    }

    fn discard(&mut self, body: &Path) {
        self.snapshots.remove(body);
        self.output.discarded.push(body.to_owned());
    }

    fn notice(&mut self, notice: Notice) {
        self.mail.notice(notice);
    }

    fn bad_message(&mut self, _: &StepError) {}

    fn refuse_proposals(&mut self, proposals: Vec<RequestId>) {
        self.output.refused.extend(proposals);
    }

    fn lose_proposals(&mut self, proposals: Vec<RequestId>) {
        self.output.lost.extend(proposals);
    }

    fn release_reads(&mut self, reads: Vec<(ReadToken, Position)>) {
        self.output.reads.extend(reads.into_iter().map(|(token, _)| token));
    }

    fn refuse_reads(&mut self, reads: Vec<ReadToken>) {
        self.output.refused_reads.extend(reads);
    }
}

/// Output of a member's state machine after a turn, in which it has worked on several jobs
/// together.
#[derive(Default)]
pub(super) struct TurnOutput {
    pub notices: Vec<Notice>,
    pub outcomes: Vec<(RequestId, Outcome)>,
    pub installed: Vec<PathBuf>,
    /// Whether a snapshot must be written now.
    pub must_write_snapshot: bool,
    /// Whether a checkpoint was begun.
    pub begun_checkpoint: bool,
}

/// Everything that the state machine can call in the simulation.
pub(super) struct MachinePorts<'a> {
    pub snapshots: &'a SnapshotStore<MemoryBodies>,
    /// Snapshot that is requested, and not written yet.
    pub snapshot_to_write: &'a mut Option<Arc<View>>,
    /// Checkpoint that was begun, and has not run yet.
    pub checkpoint_to_run: &'a mut Option<CheckpointWork<StoreError>>,
    pub output: TurnOutput,
}

impl ApplySink<KvStateMachine> for MachinePorts<'_> {
    fn notice(&mut self, notice: Notice) {
        self.output.notices.push(notice);
    }

    fn answer(&mut self, outcomes: Vec<(RequestId, Outcome)>) {
        self.output.outcomes.extend(outcomes);
    }

    fn build(&mut self, snapshot: Arc<View>) -> bool {
        if self.snapshot_to_write.is_some() {
            return false;
        }
        *self.snapshot_to_write = Some(snapshot);
        self.output.must_write_snapshot = true;
        true
    }

    fn checkpoint(&mut self, work: CheckpointWork<StoreError>) {
        if self.checkpoint_to_run.is_none() {
            *self.checkpoint_to_run = Some(work);
            self.output.begun_checkpoint = true;
        }
    }

    fn open(&mut self, body: &Path) -> io::Result<impl Read> {
        self.snapshots.open(body)
    }

    fn installed(&mut self, body: &Path) {
        self.snapshots.remove(body);
        self.output.installed.push(body.to_owned());
    }
}
