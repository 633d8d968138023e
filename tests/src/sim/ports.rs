//! Ports of a member's core and state machine: small queues, and output that is kept until the step
//! ends.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Cursor, Read, Write};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use muster_node::apply::{Machine, Outcome};
use muster_node::driver::{
    ApplyJob, ApplyOutlets, Bodies, LogJob, Mail, Message, Notice, Outlets, Position, ReadToken,
    SendError, Snapshots,
};
use muster_node::log::Batch;
use muster_node::machine::RequestId;
use muster_node::mvcc::View;
use node_consensus::{Entry, EntryKind, Fetch, StepError};

use super::node::Link;
use super::plan::Plan;
use crate::rng::Rng;

/// Snapshot bodies in memory. All clones share the same bodies.
#[derive(Clone, Default)]
pub(super) struct Memory {
    files: Rc<RefCell<BTreeMap<PathBuf, Bytes>>>,
    /// Whether creating the next body fails.
    fails: Rc<Cell<bool>>,
}

impl Memory {
    pub(super) fn put(&self, path: PathBuf, body: Bytes) {
        self.files.borrow_mut().insert(path, body);
    }

    pub(super) fn fail_once(&self) {
        self.fails.set(true);
    }
}

/// A body that is being written to [`Memory`].
pub(super) struct NewBody {
    memory: Memory,
    path: PathBuf,
    bytes: Vec<u8>,
}

impl Write for NewBody {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.memory.put(self.path.clone(), Bytes::copy_from_slice(&self.bytes));
        Ok(())
    }
}

impl Bodies for Memory {
    type New = NewBody;
    type Body = Cursor<Bytes>;

    fn create(&self, path: &Path) -> io::Result<NewBody> {
        if self.fails.take() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.put(path.to_owned(), Bytes::new());
        Ok(NewBody { memory: self.clone(), path: path.to_owned(), bytes: Vec::new() })
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
pub(super) struct Written {
    /// Index of the last entry.
    pub last: u64,
    /// Whether a snapshot is being installed into log and store.
    pub installing: bool,
    pub conflicts: u64,
}

impl Written {
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
pub(super) struct Sent {
    /// Messages, with the stream that accepted each; `None` if no stream did.
    pub messages: Vec<(Message, Option<Link>)>,
    pub snapshots: Vec<(Message, Bytes)>,
    pub fetches: Vec<Fetch>,
    pub discarded: Vec<PathBuf>,
    pub refused: Vec<RequestId>,
    pub reads: Vec<ReadToken>,
    pub refused_reads: Vec<ReadToken>,
    /// Membership changes written to the log.
    pub changes: Vec<Entry>,
    /// Whether a step of a snapshot's installation begins.
    pub installs: bool,
    /// Number of full queues that were met.
    pub full: u64,
    /// Number of snapshots that could not be sent because their body was missing.
    pub bodiless: u64,
}

/// Everything that a core can call in the simulation.
pub(super) struct CorePorts<'a> {
    pub rng: &'a mut Rng,
    pub plan: &'a Plan,
    pub calm: bool,
    pub mail: &'a mut Mail,
    pub log_jobs: &'a mut VecDeque<LogJob>,
    pub apply_jobs: &'a mut VecDeque<ApplyJob>,
    pub written: &'a mut Written,
    pub snapshots: &'a Snapshots<Memory>,
    pub loses_body: &'a mut bool,
    pub connected: &'a BTreeMap<u64, Link>,
    pub fetching: &'a mut usize,
    pub sent: Sent,
}

impl Outlets for CorePorts<'_> {
    fn send(&mut self, message: Message) -> Result<(), SendError> {
        let stream = self.connected.get(&message.to).copied();
        let is_full = stream.is_some() && !self.calm && self.rng.chance(self.plan.full_streams);
        self.sent.full += u64::from(is_full);
        self.sent.messages.push((message, stream.filter(|_| !is_full)));
        match stream {
            None => Err(SendError::NotConnected),
            Some(_) if is_full => Err(SendError::Full),
            Some(_) => Ok(()),
        }
    }

    fn send_snapshot(&mut self, message: Message) -> bool {
        // Lose one body in a process's life, even after the faults have ended.
        let body = self.snapshots.body_of(&message).filter(|_| !std::mem::take(self.loses_body));
        let is_there = body.is_some();
        self.sent.bodiless += u64::from(!is_there);
        self.sent.snapshots.extend(body.map(|body| (message, body.into_inner())));
        is_there
    }

    fn log(&mut self, job: LogJob) {
        if let LogJob::Write(_, batch) = &job {
            self.sent.installs |= batch.installing.is_some() || batch.snapshot.is_some();
            self.written.note(batch);
            let changes = batch.entries.iter().filter(|entry| entry.kind == EntryKind::ConfChange);
            self.sent.changes.extend(changes.cloned());
        }
        self.log_jobs.push_back(job);
    }

    fn apply(&mut self, job: ApplyJob) {
        self.sent.installs |= matches!(job, ApplyJob::Install(..));
        self.apply_jobs.push_back(job);
    }

    fn fetch(&mut self, fetch: Fetch) -> bool {
        if *self.fetching >= self.plan.queued_fetches {
            self.sent.full += 1;
            return false;
        }
        *self.fetching += 1;
        self.sent.fetches.push(fetch);
        true
    }

    fn drop_snapshot(&mut self) {
        self.snapshots.drop_built();
    }

    fn discard(&mut self, body: &Path) {
        self.snapshots.remove(body);
        self.sent.discarded.push(body.to_owned());
    }

    fn notice(&mut self, notice: Notice) {
        self.mail.notice(notice);
    }

    fn bad_message(&mut self, _: &StepError) {}

    fn refuse(&mut self, proposals: Vec<RequestId>) {
        self.sent.refused.extend(proposals);
    }

    fn allow(&mut self, reads: Vec<(ReadToken, Position)>) {
        self.sent.reads.extend(reads.into_iter().map(|(token, _)| token));
    }

    fn refuse_reads(&mut self, reads: Vec<ReadToken>) {
        self.sent.refused_reads.extend(reads);
    }
}

/// Output of a turn of the state machine.
#[derive(Default)]
pub(super) struct Told {
    pub notices: Vec<Notice>,
    pub outcomes: Vec<(RequestId, Outcome)>,
    pub installed: Vec<PathBuf>,
    /// Whether a snapshot must be written now.
    pub writes: bool,
}

/// Everything that the state machine can call in the simulation.
pub(super) struct MachinePorts<'a> {
    pub snapshots: &'a Snapshots<Memory>,
    /// Snapshot that is being written.
    pub writing: &'a mut Option<Arc<View>>,
    pub told: Told,
}

impl ApplyOutlets<Machine> for MachinePorts<'_> {
    fn notice(&mut self, notice: Notice) {
        self.told.notices.push(notice);
    }

    fn answer(&mut self, outcomes: Vec<(RequestId, Outcome)>) {
        self.told.outcomes.extend(outcomes);
    }

    fn build(&mut self, snapshot: Arc<View>) -> bool {
        if self.writing.is_some() {
            return false;
        }
        *self.writing = Some(snapshot);
        self.told.writes = true;
        true
    }

    fn open(&mut self, body: &Path) -> io::Result<impl Read> {
        self.snapshots.open(body)
    }

    fn installed(&mut self, body: &Path) {
        self.snapshots.remove(body);
        self.told.installed.push(body.to_owned());
    }
}
