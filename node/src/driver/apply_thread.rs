//! The thread that applies: the only writer of the state machine.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

use node_consensus::Position;

use super::back_threads::remove_quietly;
use super::fatal::{snapshot_failed, store_failed};
use super::handle::Waiters;
use super::log_thread::micros;
use super::mailbox::{Inlet as _, Mailbox, Notice};
use super::{Applier, Metrics};
use crate::machine::{Applied, Committed, StateMachine};

/// The store is made durable at the latest this long after something was applied.
const CHECKPOINT_INTERVAL: Duration = Duration::from_secs(30);

/// Something for the state machine.
pub(super) enum ApplyJob {
    Apply(Vec<Committed>),
    Install(Position, PathBuf),
    Build,
}

pub(super) struct ApplyThread<M: StateMachine> {
    pub applier: Applier<M>,
    pub jobs: Receiver<ApplyJob>,
    pub mailbox: Arc<Mailbox>,
    pub waiters: Arc<Waiters<M::Outcome>>,
    pub metrics: Arc<Metrics>,
    pub to_back: SyncSender<M::Snapshot>,
}

impl<M: StateMachine> ApplyThread<M> {
    pub(super) fn run(mut self) {
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
                let snapshot = self.applier.machine().snapshot();
                if self.to_back.try_send(snapshot).is_err() {
                    // The driver asks again when a peer still needs one.
                    self.mailbox.notice(Notice::Built(None));
                }
            }
        }
    }

    fn apply(&mut self, entries: &[Committed]) {
        let started = Instant::now();
        let Applied { at, outcomes, changes } =
            self.applier.apply(entries).unwrap_or_else(|error| store_failed::<M>(&error));
        self.metrics.applied.fetch_add(entries.len() as u64, Relaxed);
        self.metrics.apply_micros.fetch_add(micros(started), Relaxed);
        self.mailbox.notice(Notice::Applied { at, changes });
        self.waiters.answer(outcomes.into_iter().map(|(id, outcome)| (id, Ok(outcome))));
        if self.applier.is_checkpoint_due() {
            self.checkpoint();
        }
    }

    fn checkpoint(&mut self) {
        let machine = self.applier.machine();
        if machine.durable() == machine.applied() {
            return;
        }
        let started = Instant::now();
        let at = self.applier.checkpoint().unwrap_or_else(|error| store_failed::<M>(&error));
        self.metrics.checkpoint_durations.record(started.elapsed());
        self.mailbox.notice(Notice::Checkpointed(at));
    }

    fn install(&mut self, at: Position, path: &Path) {
        let file = File::open(path).unwrap_or_else(|error| snapshot_failed(&error));
        let installed = self
            .applier
            .install_snapshot(&mut BufReader::new(file))
            .unwrap_or_else(|error| store_failed::<M>(&error));
        assert_eq!(installed, at, "a snapshot's body is of another position than its message");
        remove_quietly(path);
        self.metrics.snapshots_installed.fetch_add(1, Relaxed);
        self.mailbox.snapshot_ended(path, true);
        let members = self.applier.machine().members();
        self.mailbox.notice(Notice::Installed { at, members });
    }
}
