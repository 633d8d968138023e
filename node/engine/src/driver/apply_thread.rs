//! The apply thread: it waits for jobs, takes all queued ones at once, and runs them.

use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::time::Duration;

use node_state::state_machine::{CheckpointWork, RequestId, StateMachine};

use super::applier::{Applier, ApplierError, ApplyBatch, ApplyJob, ApplySink};
use super::fatal::{exit_on_snapshot_failure, exit_on_store_failure};
use super::mail::Notice;
use super::mailbox::{CoreInbox as _, Mailbox};
use super::snapshot_store::{SnapshotFiles, SnapshotStore};
use super::waiters::Waiters;

/// Time without new entries after which the store is made durable.
const CHECKPOINT_INTERVAL: Duration = Duration::from_secs(30);

/// Runs jobs until the queue is closed.
pub(super) fn apply<M: StateMachine>(
    mut applier: Applier<M>,
    jobs: &Receiver<ApplyJob>,
    mut out: ApplyThreadSink<M>,
) {
    loop {
        let (done, goes_on) = match jobs.recv_timeout(CHECKPOINT_INTERVAL) {
            Ok(first) => (applier.run(ApplyBatch::gather(first, jobs.try_iter()), &mut out), true),
            Err(RecvTimeoutError::Timeout) => {
                applier.begin_checkpoint(&mut out);
                (Ok(()), true)
            }
            Err(RecvTimeoutError::Disconnected) => {
                (applier.checkpoint(&mut out).map_err(ApplierError::Store), false)
            }
        };
        match done {
            Ok(()) if goes_on => {}
            Ok(()) => return,
            Err(ApplierError::Store(error)) => exit_on_store_failure::<M>(&error),
            Err(ApplierError::Body(error)) => exit_on_snapshot_failure(&error),
        }
    }
}

/// Channels of the apply thread to the other threads and to the waiting requests.
pub(super) struct ApplyThreadSink<M: StateMachine> {
    pub mailbox: Arc<Mailbox>,
    pub waiters: Arc<Waiters<M::Outcome>>,
    pub snapshots: Arc<SnapshotStore<SnapshotFiles>>,
    pub to_back: SyncSender<M::Snapshot>,
    pub to_checkpoint: SyncSender<CheckpointWork<M::Error>>,
}

impl<M: StateMachine> ApplySink<M> for ApplyThreadSink<M> {
    fn notice(&mut self, notice: Notice) {
        self.mailbox.notice(notice);
    }

    fn answer(&mut self, outcomes: Vec<(RequestId, M::Outcome)>) {
        self.waiters.proposals.answer(outcomes.into_iter().map(|(id, outcome)| (id, Ok(outcome))));
    }

    fn build(&mut self, snapshot: M::Snapshot) -> bool {
        self.to_back.try_send(snapshot).is_ok()
    }

    fn checkpoint(&mut self, work: CheckpointWork<M::Error>) {
        // The queue refuses the work only if it is full. The checkpoint that waits there will
        // include the same entries.
        let _ = self.to_checkpoint.try_send(work);
    }

    fn open(&mut self, body: &Path) -> io::Result<impl Read> {
        self.snapshots.open(body)
    }

    fn installed(&mut self, body: &Path) {
        self.snapshots.remove(body);
        self.mailbox.snapshot_ended(body, true);
    }
}
