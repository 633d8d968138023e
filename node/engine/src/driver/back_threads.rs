//! Slow work that nothing in the driver waits for: reading old entries for followers that lag, and
//! writing snapshots for those that lag further. Each has a thread of its own, so that a snapshot
//! of gigabytes doesn't delay a follower that needs a few entries.

use std::sync::mpsc::Receiver;

use node_consensus::FetchRequest;
use node_state::state_machine::Snapshot;

use super::fatal::exit_on_log_failure;
use super::mailbox::{CoreInbox as _, Mailbox};
use super::run_fetch;
use super::snapshot_store::{SnapshotFiles, SnapshotStore};
use crate::log::LogReader;

/// Capacity of the fetch queue. Consensus has fewer fetches under way, so only those of a lost
/// leadership could fill it. Further fetches are then answered without entries.
pub(super) const QUEUED_FETCHES: usize = 64;

/// Capacity of the snapshot queue: the driver requests one at a time.
pub(super) const QUEUED_SNAPSHOTS: usize = 1;

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
