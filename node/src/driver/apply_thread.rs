//! The thread that applies: the only writer of the state machine.

use std::fs::File;
use std::io::{BufReader, BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use node_consensus::Position;

use super::fatal::fatal;
use super::handle::Waiters;
use super::log_thread::micros;
use super::mailbox::{Inlet as _, Mailbox, Notice};
use super::run::remove_quietly;
use super::{Applied, Applier, Metrics};
use crate::machine::{Committed, StateMachine};

/// The store is made durable at the latest this long after something was applied.
const CHECKPOINT_INTERVAL: Duration = Duration::from_secs(30);

/// Something for the state machine.
pub(super) enum ApplyJob {
    Apply(Vec<Committed>),
    Install(Position, PathBuf),
    Build,
}

/// A snapshot that is ready to be sent.
pub(super) struct BuiltFile {
    pub at: Position,
    pub path: PathBuf,
}

pub(super) type BuiltSlot = Arc<Mutex<Option<BuiltFile>>>;

pub(super) struct ApplyThread<M: StateMachine> {
    pub applier: Applier<M>,
    pub jobs: Receiver<ApplyJob>,
    pub mailbox: Arc<Mailbox>,
    pub waiters: Arc<Waiters<M::Outcome>>,
    pub metrics: Arc<Metrics>,
    pub built: BuiltSlot,
    pub snapshot_dir: PathBuf,
}

impl<M: StateMachine> ApplyThread<M> {
    pub fn run(mut self) {
        loop {
            match self.jobs.recv_timeout(CHECKPOINT_INTERVAL) {
                Ok(ApplyJob::Apply(mut entries)) => {
                    let mut next = None;
                    // What has gathered meanwhile goes into the same transaction.
                    for job in self.jobs.try_iter() {
                        match job {
                            ApplyJob::Apply(more) => entries.extend(more),
                            other => {
                                next = Some(other);
                                break;
                            }
                        }
                    }
                    self.apply(&entries);
                    if let Some(job) = next {
                        self.other(job);
                    }
                }
                Ok(job) => self.other(job),
                Err(RecvTimeoutError::Timeout) => self.checkpoint(),
                Err(RecvTimeoutError::Disconnected) => {
                    self.checkpoint();
                    return;
                }
            }
        }
    }

    fn other(&mut self, job: ApplyJob) {
        match job {
            ApplyJob::Apply(entries) => self.apply(&entries),
            ApplyJob::Install(at, path) => self.install(at, &path),
            ApplyJob::Build => {
                let built = self.build();
                if let Err(error) = &built {
                    tracing::error!(%error, "a snapshot couldn't be made");
                }
                self.mailbox.notice(Notice::Built(built.ok()));
            }
        }
    }

    fn apply(&mut self, entries: &[Committed]) {
        let started = Instant::now();
        let Applied { at, outcomes } =
            self.applier.apply(entries).unwrap_or_else(|error| fatal("the store", &error));
        self.metrics.applied.fetch_add(entries.len() as u64, Relaxed);
        self.metrics.apply_micros.fetch_add(micros(started), Relaxed);
        self.mailbox.notice(Notice::Applied(at));
        self.waiters.answer(outcomes.into_iter().map(|(id, outcome)| (id, Ok(outcome))));
        let saved =
            self.applier.checkpoint_if_due().unwrap_or_else(|error| fatal("the store", &error));
        if let Some(at) = saved {
            self.metrics.checkpoints.fetch_add(1, Relaxed);
            self.mailbox.notice(Notice::Checkpointed(at));
        }
    }

    fn checkpoint(&mut self) {
        let machine = self.applier.machine();
        if machine.durable() == machine.applied() {
            return;
        }
        let at = self.applier.checkpoint().unwrap_or_else(|error| fatal("the store", &error));
        self.metrics.checkpoints.fetch_add(1, Relaxed);
        self.mailbox.notice(Notice::Checkpointed(at));
    }

    fn install(&mut self, at: Position, path: &Path) {
        let file = File::open(path).unwrap_or_else(|error| fatal("a received snapshot", &error));
        let installed = self
            .applier
            .install_snapshot(&mut BufReader::new(file))
            .unwrap_or_else(|error| fatal("the store", &error));
        assert_eq!(installed, at, "a snapshot's body is of another position than its message");
        remove_quietly(path);
        self.metrics.snapshots_installed.fetch_add(1, Relaxed);
        self.mailbox.snapshot_ended(path, true);
        self.mailbox.notice(Notice::Installed(at));
    }

    fn build(&mut self) -> Result<Position, Box<dyn std::error::Error>> {
        let index = self.applier.machine().applied().index;
        let path = self.snapshot_dir.join(format!("outgoing-{index:016x}"));
        let mut out = BufWriter::new(File::create(&path)?);
        let at = self.applier.write_snapshot(&mut out)?;
        out.flush()?;
        let mut slot = self.built.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(old) = slot.replace(BuiltFile { at, path })
            && old.at != at
        {
            remove_quietly(&old.path);
        }
        Ok(at)
    }
}
