//! What this process has let out and seen decided, kept outside Postgres; and what it does about a
//! database that was set back.
//!
//! A database can go back in time: a dump is loaded, a copy of its files put in place, an old primary
//! still answers. It would then gladly let a second cluster form under an identity that hosts run
//! already. Nothing in it can tell, so each process keeps a ledger on a disk of its own. The
//! decisions are pure and stand in [`discovery_formation::memory`]; here is what they need.
//!
//! 1. **Before a commit document first leaves this process it is fsynced here** ([`Ledger::ensure`]),
//!    whole: document, statements, wrapped CA keys, enough to put the cluster back into an empty
//!    database. Likewise the admin chain, before it is acted on ([`Ledger::ensure_admins`]).
//! 2. **Ledgers are complete** (`copy`). Commits and ends are numbered in the database, in the order
//!    in which they become visible (`decisions`, in the migrations). What other processes decided is
//!    copied from there: a cluster's id and the list's hash, no more. It costs what is new.
//!    A connection, and a sweep, copies a bounded number. A ledger that lacks more is filled by a task
//!    of its own (`background`), a durable batch at a time; until it is complete, nothing is frozen,
//!    decided or ended here ([`DatabaseWatch::is_complete`]).
//! 3. **Every connection is looked at before its first use, and again at each sweep** (`look`): is
//!    this the database that was last seen? Each sweep is counted, in this process's row and then
//!    beside the ledger. Every transaction reads the generation and the number too, and nothing is
//!    frozen, decided or ended by one that sees less than the ledger, or more.
//! 4. **A difference begins a generation**, unsettled (`generation`): tokens from before are void,
//!    lists wait. Each known process puts its ledger back (`put_back`); when the last one has, or an
//!    owner has forgotten those that are missing or accepted the database as it is, it is settled.
//!    A commit of which only the hash is known can't be put back: its cluster is closed, and comes
//!    back when a host, or the process that let it out, shows the document.
//! 5. **A ledger may go back in time as well.** The database says how many commits were in it and
//!    how often its process has swept; one that holds less is filled from the database, aloud.
//!    If the database went back as well, all of it may agree; so the file beside the ledger says
//!    where it was written (`position`). A copy puts back what it holds and doesn't count as *back*:
//!    a database that differs then waits for an owner.
//!
//! 6. **Two processes on copies of one ledger** both write one row, with the number of their life. Who
//!    finds another's number there at two sweeps in a row ends, and says why; one that knows its
//!    ledger for a copy does at the first.
//!
//! # The file
//!
//! A line per entry: 16 hex digits of the SHA-256 of the JSON, a blank, the JSON. Once a batch of
//! lines is durable, a *seal* follows it. What doesn't match and has no seal after it is a torn end
//! (power lost in the middle of an append, whose pages reach the disk in any order; nobody was told
//! anything that depends on it) and is cut; anything else refuses to start. One thread writes and
//! syncs, for all that waits at once. After a failed write or sync nothing more is taken: what the
//! disk holds is then unknown (ATC'20, "Can applications recover from fsync failures?").
//!
//! # What it does not do
//!
//! If a database is set back by copying its files, so that Postgres can't tell, together with every
//! ledger, somebody hears that the ledgers are copies, and nothing waits: only the hosts of the
//! clusters that have formed since know better. A file system that was set back whole, as a machine's
//! snapshot is, brings its files' births along.

mod agree;
mod copy;
mod file;
mod generation;
mod index;
mod look;
mod position;
mod put_back;
mod server;
mod watch;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use discovery_formation::memory::{Entry, Known, Mark, Memory};
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

pub(crate) use copy::{Copying, copy};
pub(crate) use file::{LedgerError, NAME as LEDGER_FILE};
pub(crate) use generation::Generation;
pub(crate) use index::{Authority, Commit, Seen};
pub(crate) use look::Occasion;
pub(crate) use look::{ELSEWHERE, HALF_LOADED, LOOK_LIMIT, look};
pub(crate) use position::NAME as POSITION_FILE;
pub(crate) use server::{oids, server_of, site_now};
pub(crate) use watch::DatabaseWatch;

use index::{Copied, Index, Line};

/// Channel on which decisions and changes of the admin chain are announced: time to copy them.
pub(crate) const CHANNEL: &str = "muster_decision";
/// Appends that wait for the disk; further callers wait for a place.
const QUEUE: usize = 256;

struct Append {
    what: What,
    done: oneshot::Sender<Result<(), LedgerError>>,
}

enum What {
    /// Lines, all or none of them.
    Lines(Vec<Line>),
    /// How far the database has come, beside the ledger.
    Position(Seen),
}

/// A handle; clones share the file. The file is closed and unlocked when the last one is gone.
#[derive(Clone, Debug)]
pub(crate) struct Ledger {
    process: Uuid,
    index: Arc<RwLock<Index>>,
    is_copy: Arc<AtomicBool>,
    appends: mpsc::Sender<Append>,
    failed: tokio::sync::watch::Receiver<bool>,
}

impl Ledger {
    /// Opens the ledger in `dir`, making both if need be, and locks it.
    pub(crate) fn open(dir: &Path) -> Result<Self, LedgerError> {
        let (file, process, lines) = file::open(dir)?;
        let mut index = Index::default();
        for line in lines {
            index.apply(line);
        }
        let position = file.read_position()?;
        let at_home = position.as_ref().map(|position| position.at_home);
        if let Some(position) = position {
            index.take_position(position.seen);
        }
        // One that holds no commit yet may not have come to its first position.
        let is_copy = !at_home.unwrap_or(index.commits() == 0);
        let is_copy = Arc::new(AtomicBool::new(is_copy));
        let index = Arc::new(RwLock::new(index));
        let (appends, queue) = mpsc::channel(QUEUE);
        let (failed_sender, failed) = tokio::sync::watch::channel(false);
        let (shared, shared_copy) = (index.clone(), is_copy.clone());
        std::thread::Builder::new()
            .name("ledger".into())
            .spawn(move || write(file, queue, &(shared, shared_copy), &failed_sender))
            .map_err(|source| LedgerError::Io { what: "can't start a thread".into(), source })?;
        Ok(Ledger { process, index, is_copy, appends, failed })
    }

    /// This process's name among those that share a database.
    pub(crate) fn process(&self) -> Uuid {
        self.process
    }

    /// Whether it is not where it was written: put back from a backup, copied, brought along by a
    /// cloned machine. It then may be as old as a database that was put back as well.
    pub(crate) fn is_copy(&self) -> bool {
        self.is_copy.load(Ordering::Acquire)
    }

    /// It holds all that a settled database does, so it is a whole ledger again; the next position
    /// is written as one of its own.
    fn settle_here(&self) {
        self.is_copy.store(false, Ordering::Release);
    }

    /// What is held of a cluster.
    pub(crate) fn entry(&self, cluster: Uuid) -> Option<Entry> {
        self.read(|index| index.entry(cluster))
    }

    /// A commit that this process let out, whole.
    pub(crate) fn whole(&self, cluster: Uuid) -> Option<Arc<Commit>> {
        self.read(|index| index.whole(cluster))
    }

    /// Clusters after `after` in their order, at most `limit`, with what is held of them.
    pub(crate) fn entries(&self, after: Option<Uuid>, limit: usize) -> Vec<(Uuid, Entry)> {
        self.read(|index| index.entries(after, limit))
    }

    /// Whether all that it held when the database's generation began was compared with the database.
    pub(crate) fn is_compared(&self) -> bool {
        self.read(Index::is_compared)
    }

    /// Whether it has let a commit of the cluster out that no copy of the database has shown yet.
    pub(crate) fn is_unconfirmed(&self, cluster: Uuid) -> bool {
        self.read(|index| index.is_unconfirmed(cluster))
    }

    /// Such clusters after `after` in their order, at most `limit`, with what is held of them.
    pub(crate) fn unconfirmed(&self, after: Option<Uuid>, limit: usize) -> Vec<(Uuid, Entry)> {
        self.read(|index| index.unconfirmed(after, limit))
    }

    /// How many commits it holds, of this process and of others.
    pub(crate) fn commits(&self) -> usize {
        self.read(Index::commits)
    }

    /// The database as last seen.
    pub(crate) fn seen(&self) -> Option<Seen> {
        self.read(Index::seen)
    }

    /// As far as it is compared.
    pub(crate) fn memory(&self) -> Memory {
        self.read(Index::memory)
    }

    /// The same of the database alone.
    pub(crate) fn known(&self) -> Option<Known> {
        self.memory().known
    }

    /// Returns when the commit is durable. A second, different commit of one cluster is an error,
    /// and writes nothing.
    pub(crate) async fn ensure(&self, commit: Commit) -> Result<(), LedgerError> {
        match self.entry(commit.cluster_id) {
            Some(Entry::Commit { h, .. }) if Some(h) != commit.hash() => {
                return Err(LedgerError::Contradiction { cluster_id: commit.cluster_id });
            }
            Some(Entry::Commit { document: true, .. }) => return Ok(()),
            _ => {}
        }
        self.append(vec![Line::Commit(Box::new(commit))]).await
    }

    /// Returns when it is durable that everything up to `copied.to` is here.
    async fn take(&self, copied: Copied) -> Result<(), LedgerError> {
        self.append(vec![Line::Copied(copied)]).await
    }

    /// Returns when it is durable which database we work with, and how far it has come.
    async fn note(&self, seen: Seen) -> Result<(), LedgerError> {
        if self.seen().is_some_and(|old| old.is_of_the_same(&seen)) {
            return self.send(What::Position(seen)).await;
        }
        self.append(vec![Line::Seen(seen)]).await
    }

    /// Elements of the admin chain that this process has seen, the first one first.
    pub(crate) fn admins(&self) -> Vec<String> {
        self.read(|index| index.admins.clone())
    }

    /// Returns when the elements are durable that follow those which are there. A chain that isn't
    /// a continuation of theirs is left alone.
    pub(crate) async fn ensure_admins(&self, elements: &[String]) -> Result<(), LedgerError> {
        let known = self.admins();
        match elements.strip_prefix(&known[..]) {
            None | Some([]) => Ok(()),
            Some(new) => {
                self.append(new.iter().map(|jws| Line::Admin { jws: jws.clone() }).collect()).await
            }
        }
    }

    /// Becomes true when the disk has failed; the process should then stop.
    pub(crate) fn failed(&self) -> tokio::sync::watch::Receiver<bool> {
        self.failed.clone()
    }

    async fn append(&self, lines: Vec<Line>) -> Result<(), LedgerError> {
        self.send(What::Lines(lines)).await
    }

    async fn send(&self, what: What) -> Result<(), LedgerError> {
        let (done, answer) = oneshot::channel();
        self.appends.send(Append { what, done }).await.map_err(|_| LedgerError::Failed)?;
        answer.await.map_err(|_| LedgerError::Failed)?
    }

    fn read<T>(&self, with: impl FnOnce(&Index) -> T) -> T {
        with(&self.index.read().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Nothing was copied yet in this generation.
const UNCOPIED: Mark = Mark::START;

/// The one writer. Ends with the last handle, or with the disk.
fn write(
    mut file: file::LedgerFile,
    mut queue: mpsc::Receiver<Append>,
    (index, is_copy): &(Arc<RwLock<Index>>, Arc<AtomicBool>),
    failed: &tokio::sync::watch::Sender<bool>,
) {
    while let Some(first) = queue.blocking_recv() {
        let mut batch = vec![first];
        while let Ok(next) = queue.try_recv() {
            batch.push(next);
        }
        let is_copy = is_copy.load(Ordering::Acquire);
        if let Err(error) = write_batch(&mut file, &batch, index, is_copy) {
            tracing::error!(%error, cause = ?error, "the ledger's disk failed; stopping");
            let _ = failed.send(true);
            for append in batch {
                let _ = append.done.send(Err(LedgerError::Failed));
            }
            return;
        }
        let grew = batch.iter().any(|append| matches!(append.what, What::Lines(_)));
        let mut open = index.write().unwrap_or_else(PoisonError::into_inner);
        let mut told = Vec::with_capacity(batch.len());
        for Append { what, done } in batch {
            match what {
                What::Lines(lines) => lines.into_iter().for_each(|line| open.apply(line)),
                What::Position(seen) => open.take_position(seen),
            }
            told.push(done);
        }
        drop(open);
        for done in told {
            let _ = done.send(Ok(()));
        }
        // Nobody waits for the seal: it only tells a torn end from a damaged one.
        if grew && let Err(error) = file.seal() {
            tracing::error!(%error, cause = ?error, "the ledger's disk failed; stopping");
            let _ = failed.send(true);
            return;
        }
    }
}

fn write_batch(
    file: &mut file::LedgerFile,
    batch: &[Append],
    index: &RwLock<Index>,
    is_copy: bool,
) -> Result<(), LedgerError> {
    let mut lines: Vec<&Line> = Vec::new();
    for append in batch {
        match &append.what {
            What::Lines(more) => lines.extend(more),
            What::Position(seen) => {
                // Two looks may come in either order; the file never goes back.
                let known = index.read().unwrap_or_else(PoisonError::into_inner).seen();
                file.write_position(&seen.no_less_than(known.as_ref()), is_copy)?;
            }
        }
    }
    if lines.is_empty() { Ok(()) } else { file.append(&lines) }
}

#[cfg(test)]
mod tests;
