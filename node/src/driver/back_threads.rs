//! What takes long and is waited for by nobody here: reading old entries for followers that lag, and
//! writing snapshots for those that lag further. Each on a thread of its own, so that a snapshot of
//! gigabytes doesn't hold up a follower that needs a few entries.

use std::sync::mpsc::Receiver;

use node_consensus::Fetch;

use super::fatal::log_failed;
use super::mailbox::{Inlet as _, Mailbox};
use super::run_fetch;
use super::snapshots::{Files, Snapshots};
use crate::log::Reader;
use crate::machine::Snapshot;

/// Fetches that wait. Consensus has fewer under way; only what a lost leadership has left behind
/// could fill this, and then the newest are answered as if they had found nothing.
pub(super) const QUEUED_FETCHES: usize = 64;

/// Snapshots that wait: the driver asks for one at a time.
pub(super) const QUEUED_SNAPSHOTS: usize = 1;

/// Reads old entries until its queue ends.
pub(super) fn fetch(log: &Reader, jobs: &Receiver<Fetch>, mailbox: &Mailbox) {
    for job in jobs {
        mailbox.notice(run_fetch(log, job).unwrap_or_else(|error| log_failed(&error)));
    }
}

/// Writes snapshots until its queue ends.
pub(super) fn write_snapshots<S: Snapshot>(
    jobs: &Receiver<S>,
    snapshots: &Snapshots<Files>,
    mailbox: &Mailbox,
) {
    for snapshot in jobs {
        mailbox.notice(snapshots.build(snapshot));
    }
}
