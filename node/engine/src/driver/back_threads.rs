//! Three threads for slow work that no other thread waits for. The fetch thread reads old entries
//! for followers that lag. The back thread writes snapshots for followers that need more than the
//! log still has. A snapshot of gigabytes thus doesn't delay a follower that needs only a few
//! entries. The checkpoint thread makes the store durable.

use std::sync::mpsc::Receiver;

use node_consensus::FetchRequest;
use node_state::state_machine::{CheckpointWork, Snapshot, StateMachine};

use super::applier::run_checkpoint;
use super::fatal::{exit_on_log_failure, exit_on_store_failure};
use super::mailbox::{CoreInbox as _, Mailbox};
use super::snapshot_store::{SnapshotFiles, SnapshotStore};
use super::{DriverMetrics, run_fetch};
use crate::log::LogReader;

/// Capacity of the fetch queue. Consensus never has that many fetches under way. Only fetches left
/// over from a lost leadership could fill the queue. If it is full, a fetch is answered without
/// entries.
pub(super) const QUEUED_FETCHES: usize = 64;

/// Capacity of the snapshot queue. The driver requests only one snapshot at a time.
pub(super) const QUEUED_SNAPSHOTS: usize = 1;

/// Capacity of the checkpoint queue. A checkpoint includes everything applied when it begins. So
/// while one waits behind the running one, no further one is needed.
pub(super) const QUEUED_CHECKPOINTS: usize = 1;

/// Runs checkpoints until the queue is closed.
pub(super) fn run_checkpoints<M: StateMachine>(
    jobs: &Receiver<CheckpointWork<M::Error>>,
    metrics: &DriverMetrics,
    mailbox: &Mailbox,
) {
    for work in jobs {
        let done = run_checkpoint(work, metrics);
        mailbox.notice(done.unwrap_or_else(|error| exit_on_store_failure::<M>(&error)));
    }
}

/// Reads old entries until the queue is closed.
pub(super) fn fetch(log: &LogReader, jobs: &Receiver<FetchRequest>, mailbox: &Mailbox) {
    for job in jobs {
        mailbox.notice(run_fetch(log, job).unwrap_or_else(|error| exit_on_log_failure(&error)));
    }
}

/// Writes snapshots until the queue is closed.
pub(super) fn write_snapshots<S: Snapshot>(
    jobs: &Receiver<S>,
    snapshots: &SnapshotStore<SnapshotFiles>,
    mailbox: &Mailbox,
) {
    for snapshot in jobs {
        mailbox.notice(snapshots.build(snapshot));
    }
}
