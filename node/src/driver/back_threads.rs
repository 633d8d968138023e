//! What takes long and is waited for by nobody here: reading old entries for followers that lag, and
//! writing snapshots for those that lag further. Each on a thread of its own, so that a snapshot of
//! gigabytes doesn't hold up a follower that needs a few entries.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};

use node_consensus::{Fetch, Position};

use super::fatal::log_failed;
use super::mailbox::{Inlet as _, Mailbox, Notice};
use super::run_fetch;
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

/// A snapshot that is ready to be sent.
pub(super) struct BuiltFile {
    pub at: Position,
    pub path: PathBuf,
}

pub(super) type BuiltSlot = Arc<Mutex<Option<BuiltFile>>>;

/// Writes snapshots into `dir` until its queue ends.
pub(super) fn write_snapshots<S: Snapshot>(
    dir: &Path,
    jobs: &Receiver<S>,
    slot: &BuiltSlot,
    mailbox: &Mailbox,
) {
    for snapshot in jobs {
        let (at, members) = (snapshot.position(), snapshot.members());
        let path = dir.join(format!("outgoing-{:016x}", at.index));
        let written = write(&snapshot, &path);
        // It holds on to a part of the store.
        drop(snapshot);
        if let Err(error) = &written {
            let error = &**error;
            tracing::error!(error, index = at.index, "a snapshot couldn't be made");
            // Half of one takes space for nothing.
            remove_quietly(&path);
        } else {
            let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(old) = slot.replace(BuiltFile { at, path })
                && old.at != at
            {
                remove_quietly(&old.path);
            }
        }
        mailbox.notice(Notice::Built(written.ok().map(|()| (at, members))));
    }
}

fn write<S: Snapshot>(snapshot: &S, path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let mut out = BufWriter::new(File::create(path)?);
    snapshot.write(&mut out)?;
    Ok(out.flush()?)
}

/// A file that stays costs space only until the next start.
pub(super) fn remove_quietly(path: &Path) {
    if let Err(error) = std::fs::remove_file(path) {
        tracing::warn!(path = %path.display(), %error, "a snapshot's file couldn't be removed");
    }
}
