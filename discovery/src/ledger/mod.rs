//! The ledger: a record, kept outside Postgres, of the commits that this process has sent out and
//! of the decisions that it has seen. It protects against a database that was set back to an older
//! state.
//!
//! A database can go back in time: when somebody loads a dump or restores a copy of its files, or
//! when an old primary still answers. Such a database would let a second cluster form under an
//! identity that hosts already run. Nothing in the database shows this, so each process keeps a
//! ledger on a disk of its own. The decisions are pure and are in [`discovery_formation::memory`];
//! this module provides what they need.
//!
//! 1. **A commit document is fsynced in the ledger before it first leaves this process**
//!    ([`Ledger::ensure_commits`]). The entry holds the document, the statements and the wrapped CA
//!    keys: enough to restore the cluster into an empty database. The admin chain is likewise
//!    written before the process acts on it ([`Ledger::ensure_admins`]).
//! 2. **Ledgers are complete** (`copy`). The database numbers commits and ends in the order in
//!    which they become visible (`decisions`, in the migrations). Other processes' decisions are
//!    copied from there, each as a cluster's id and the list's hash. The cost depends on the number
//!    of new decisions. A new connection or a sweep copies a limited number of them. A task of its
//!    own (`background`) fills a ledger that lacks more, in durable batches. Until the ledger is
//!    complete, nothing is frozen, decided or ended here ([`DatabaseWatch::is_complete`]).
//! 3. **Every connection is checked before its first use, and again at each sweep** (`look`): is
//!    this the database that was last seen? Each sweep is counted in this process's row, and then
//!    in the file beside the ledger. Every transaction also reads the generation and the newest
//!    decision's number. A transaction that sees fewer decisions than the ledger, or more, may not
//!    freeze, decide or end anything.
//! 4. **A difference begins a generation**, which is unsettled at first (`generation`). Older
//!    tokens become void, and no list is frozen or committed. Each known process restores the
//!    entries of its ledger that the database lacks (`restore`). The generation is settled when
//!    the last one has done so. An owner can also forget the missing processes or accept the
//!    database as it is. A commit of which the ledger has only the hash can't be restored. Its
//!    cluster is closed until a host, or the process that sent the document out, supplies the
//!    document.
//! 5. **A ledger, like the database, can go back in time.** The database records how many commits
//!    each ledger held and how often its process has swept. A ledger that holds less is filled from
//!    the database, with an alarm. If both went back, they can agree. So the file beside the ledger
//!    also identifies the place where it was written (`position`). A process with a copied ledger
//!    restores what the ledger holds, but counts as missing. A database that differs then waits for
//!    an owner.
//! 6. **Two processes on copies of one ledger** write the same row, each with the id of its own
//!    run. A process that finds the id of another run there at two consecutive sweeps stops and
//!    reports why. If it knows that its ledger is a copy, it stops at the first such sweep.
//!
//! # The file
//!
//! Each entry is one line: 16 hex digits of the SHA-256 of the JSON, a space, the JSON. When a
//! batch of lines is durable, a *seal* line follows it. A line that doesn't match its checksum and
//! has no seal after it is torn, and is cut off. Such a line comes from a power failure during an
//! append, whose pages can reach the disk in any order. Nobody has relied on it. With any other
//! mismatch the service refuses to start. One thread writes and syncs, for all appends that wait at
//! the time. After a failed write or sync nothing more is accepted: what the disk holds is then
//! unknown (ATC'20, "Can applications recover from fsync failures?").
//!
//! # Memory
//!
//! There can be a million clusters, so memory doesn't hold the entries. It holds where the file has
//! each of them (`places`), in about 26 bytes for a cluster. A hash or a document is read from the
//! file when it is needed (`reader`). The index is built anew at each start, from one line at a
//! time, so nothing else on the disk has to match the ledger.
//!
//! # What it does not do
//!
//! Suppose that an older copy replaces the database's files, which Postgres can't notice, and that
//! older copies replace all ledgers, too. The processes then report that the ledgers are copies,
//! but nothing waits for a person. Only the hosts of the clusters that have formed since the copy
//! was made hold the missing decisions. A machine's snapshot sets a file system back as a whole and
//! keeps its files' birth times. The ledgers on it then don't even look like copies.

mod agree;
mod copy;
mod file;
mod generation;
mod index;
mod look;
mod places;
mod position;
mod reader;
mod restore;
mod server;
mod store;
mod watch;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use discovery_formation::memory::{
    HistoryPosition, LedgerEntry, LedgerSummary, RememberedDatabase,
};
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

pub(crate) use copy::copy_decisions;
pub(crate) use file::{LedgerError, NAME as LEDGER_FILE};
pub(crate) use generation::Generation;
pub(crate) use index::{Authority, Commit, DatabasePosition};
pub(crate) use look::Occasion;
pub(crate) use look::{HALF_LOADED, LEDGER_USED_TWICE, LOOK_LIMIT, look_at_database};
pub(crate) use position::NAME as POSITION_FILE;
pub(crate) use server::{current_site, oids};
pub(crate) use watch::DatabaseWatch;

use file::StoredLine;
use index::{CopiedDecisions, Index, LedgerLine};
use places::Place;
use position::StoredPosition;
use reader::LedgerReader;

/// Notification channel that announces new decisions and changes of the admin chain. Each process
/// then copies them into its ledger.
pub(crate) const CHANNEL: &str = "muster_decision";
/// Maximum number of appends that wait for the disk. Further callers wait until there is space.
const QUEUE: usize = 256;

struct Append {
    content: AppendContent,
    done: oneshot::Sender<Result<(), LedgerError>>,
}

enum AppendContent {
    /// Lines of the ledger, which are written and synced together.
    Lines(Vec<LedgerLine>),
    /// The database's position, which is written to the file beside the ledger.
    Position(DatabasePosition),
}

/// Handle to the ledger. Clones share the file, which is closed and unlocked when the last clone is
/// dropped.
///
/// The index in memory has only the places at which the file has the commits. So methods that
/// return a hash or a document read the file, nearly always from the system's page cache. If that
/// fails, the process stops ([`Ledger::failed`]).
#[derive(Clone, Debug)]
pub(crate) struct Ledger {
    process: Uuid,
    shared: Arc<SharedLedger>,
    appends: mpsc::Sender<Append>,
}

/// State that the handles and the thread that writes share.
#[derive(Debug)]
struct SharedLedger {
    index: RwLock<Index>,
    reader: LedgerReader,
    is_copy: AtomicBool,
    failed: tokio::sync::watch::Sender<bool>,
}

impl Ledger {
    /// Opens and locks the ledger in `dir`. Makes the folder and the file if they don't exist.
    pub(crate) fn open(dir: &Path) -> Result<Self, LedgerError> {
        let file::OpenedLedger { file, reader, process, mut index } = file::open(dir)?;
        let is_copy = take_position(&mut index, file.read_position()?);
        let shared = Arc::new(SharedLedger {
            index: RwLock::new(index),
            reader,
            is_copy: AtomicBool::new(is_copy),
            failed: tokio::sync::watch::Sender::new(false),
        });
        let (appends, queue) = mpsc::channel(QUEUE);
        let writer = shared.clone();
        std::thread::Builder::new()
            .name("ledger".into())
            .spawn(move || run_writer(file, queue, &writer))
            .map_err(|source| LedgerError::Io { what: "can't start a thread".into(), source })?;
        Ok(Ledger { process, shared, appends })
    }

    /// Id of this process among those that share a database.
    pub(crate) fn process(&self) -> Uuid {
        self.process
    }

    /// Whether the ledger is a copy of the original files: it was restored from a backup, copied,
    /// or came with a cloned machine. The ledger can then be as old as a restored database.
    pub(crate) fn is_copy(&self) -> bool {
        self.shared.is_copy.load(Ordering::Acquire)
    }

    /// Marks the ledger as the original, no longer as a copy. The caller has made sure that the
    /// database's generation is settled, and that the ledger has all its decisions. The next
    /// position file then records that these files are the originals.
    fn clear_copy_mark(&self) {
        self.shared.is_copy.store(false, Ordering::Release);
    }

    /// Whether the ledger has an entry of the cluster.
    pub(crate) fn contains(&self, cluster: Uuid) -> bool {
        self.read(|index| index.place(cluster)).is_some()
    }

    /// Whether the ledger has no entry.
    pub(crate) fn is_empty(&self) -> bool {
        self.read(Index::is_empty)
    }

    /// Returns the entry of a cluster.
    pub(crate) fn entry(&self, cluster: Uuid) -> Result<Option<LedgerEntry>, LedgerError> {
        let Some(place) = self.read(|index| index.place(cluster)) else { return Ok(None) };
        self.read_file(|reader| reader.entry(cluster, place).map(Some))
    }

    /// Returns a cluster's commit with its document. `None` if the document never left this
    /// process.
    pub(crate) fn commit_with_document(
        &self,
        cluster: Uuid,
    ) -> Result<Option<Commit>, LedgerError> {
        match self.read(|index| index.place(cluster)) {
            Some(Place::Commit(place)) if place.has_document => {
                self.read_file(|reader| reader.commit(cluster, place.offset).map(Some))
            }
            _ => Ok(None),
        }
    }

    /// Returns at most `limit` entries of clusters after `after`, in the order of their ids.
    pub(crate) fn entries(
        &self,
        after: Option<Uuid>,
        limit: usize,
    ) -> Result<Vec<(Uuid, LedgerEntry)>, LedgerError> {
        self.entries_at(self.read(|index| index.places(after, limit)))
    }

    fn entries_at(
        &self,
        places: Vec<(Uuid, Place)>,
    ) -> Result<Vec<(Uuid, LedgerEntry)>, LedgerError> {
        let entry =
            |reader: &LedgerReader, (cluster, place)| Ok((cluster, reader.entry(cluster, place)?));
        self.read_file(|reader| places.into_iter().map(|at| entry(reader, at)).collect())
    }

    /// Whether everything that the ledger held when the generation began was compared with the
    /// database.
    pub(crate) fn is_compared(&self) -> bool {
        self.read(Index::is_compared)
    }

    /// Whether this process has sent out the cluster's commit document, but hasn't found the commit
    /// among the database's decisions yet.
    pub(crate) fn is_unconfirmed(&self, cluster: Uuid) -> bool {
        self.read(|index| index.is_unconfirmed(cluster))
    }

    /// Returns at most `limit` unconfirmed entries of clusters after `after`, in the order of their
    /// ids.
    pub(crate) fn unconfirmed(
        &self,
        after: Option<Uuid>,
        limit: usize,
    ) -> Result<Vec<(Uuid, LedgerEntry)>, LedgerError> {
        self.entries_at(self.read(|index| index.unconfirmed(after, limit)))
    }

    /// Number of commits in the ledger, of this process and of others.
    pub(crate) fn commits(&self) -> usize {
        self.read(Index::commits)
    }

    /// Identity and position of the database, as this process last saw them.
    pub(crate) fn position(&self) -> Option<DatabasePosition> {
        self.read(Index::seen)
    }

    /// Returns a summary of the ledger, to be compared with a database.
    pub(crate) fn memory(&self) -> LedgerSummary {
        self.read(Index::memory)
    }

    /// State of the database when this process last used it. `None` if it has used none yet.
    pub(crate) fn known(&self) -> Option<RememberedDatabase> {
        self.memory().database
    }

    /// Writes commits of different clusters in one append; they are durable when this returns. If
    /// the ledger holds another commit of a cluster, the result is an error for that cluster alone,
    /// and the other commits are written. The results have the order of `commits`. The outer error
    /// means that the disk has failed.
    pub(crate) async fn ensure_commits(
        &self,
        commits: Vec<Commit>,
    ) -> Result<Vec<Result<(), LedgerError>>, LedgerError> {
        let (mut lines, mut results) = (Vec::new(), Vec::new());
        for commit in commits {
            let cluster_id = commit.cluster_id;
            results.push(match self.entry(cluster_id)? {
                Some(LedgerEntry::Commit { h, .. }) if Some(h) != commit.hash() => {
                    Err(LedgerError::Contradiction { cluster_id })
                }
                Some(LedgerEntry::Commit { document: true, .. }) => Ok(()),
                _ => {
                    lines.push(LedgerLine::Commit(Box::new(commit)));
                    Ok(())
                }
            });
        }
        if !lines.is_empty() {
            self.append(lines).await?;
        }
        Ok(results)
    }

    /// Writes a commit; it is durable when this returns. A second, different commit of one cluster
    /// is an error and writes nothing.
    #[cfg(test)]
    pub(crate) async fn ensure_commit(&self, commit: Commit) -> Result<(), LedgerError> {
        self.ensure_commits(vec![commit]).await?.remove(0)
    }

    /// Writes copied decisions; they are durable when this returns.
    async fn append_copied(&self, copied: CopiedDecisions) -> Result<(), LedgerError> {
        self.append(vec![LedgerLine::Copied(copied)]).await
    }

    /// Writes the database's identity and position; they are durable when this returns.
    async fn record_position(&self, seen: DatabasePosition) -> Result<(), LedgerError> {
        if self.position().is_some_and(|old| old.has_same_history(&seen)) {
            return self.send(AppendContent::Position(seen)).await;
        }
        self.append(vec![LedgerLine::Seen(seen)]).await
    }

    /// Elements of the admin chain that this process has seen, in order.
    pub(crate) fn admins(&self) -> Vec<String> {
        self.read(|index| index.admins.clone())
    }

    /// Writes the new elements of the admin chain; they are durable when this returns. Does nothing
    /// if the chain doesn't extend the known elements.
    pub(crate) async fn ensure_admins(&self, elements: &[String]) -> Result<(), LedgerError> {
        let known = self.admins();
        match elements.strip_prefix(&known[..]) {
            None | Some([]) => Ok(()),
            Some(new) => {
                self.append(new.iter().map(|jws| LedgerLine::Admin { jws: jws.clone() }).collect())
                    .await
            }
        }
    }

    /// Returns a channel whose value becomes true when the disk has failed. The process should then
    /// stop.
    pub(crate) fn failed(&self) -> tokio::sync::watch::Receiver<bool> {
        self.shared.failed.subscribe()
    }

    async fn append(&self, lines: Vec<LedgerLine>) -> Result<(), LedgerError> {
        self.send(AppendContent::Lines(lines)).await
    }

    async fn send(&self, what: AppendContent) -> Result<(), LedgerError> {
        let (done, answer) = oneshot::channel();
        self.appends.send(Append { content: what, done }).await.map_err(|_| LedgerError::Failed)?;
        answer.await.map_err(|_| LedgerError::Failed)?
    }

    fn read<T>(&self, with: impl FnOnce(&Index) -> T) -> T {
        with(&self.shared.index.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reads the file. An error stops the process, because what the disk holds is then unknown.
    fn read_file<T>(
        &self,
        with: impl FnOnce(&LedgerReader) -> Result<T, LedgerError>,
    ) -> Result<T, LedgerError> {
        with(&self.shared.reader).inspect_err(|error| self.shared.fail(error))
    }
}

impl SharedLedger {
    /// Reports that the disk has failed, so that the process stops.
    fn fail(&self, error: &LedgerError) {
        tracing::error!(%error, cause = ?error, "the ledger's disk failed; stopping");
        self.failed.send_replace(true);
    }
}

/// Takes the position file's content into the index. Returns whether the ledger is a copy.
fn take_position(index: &mut Index, position: Option<StoredPosition>) -> bool {
    let is_original = position.as_ref().map(|position| position.is_original);
    if let Some(position) = position {
        index.update_position(position.seen);
    }
    // A ledger without commits can still lack a position file. Only with commits does a missing
    // file mean that the ledger is a copy.
    !is_original.unwrap_or(index.commits() == 0)
}

/// Facts about a ledger that this process only reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LedgerFacts {
    /// Number of commits in the ledger.
    pub commits: usize,
    /// Whether the ledger is a copy of the original files.
    pub is_copy: bool,
    /// Whether a running process uses the ledger.
    pub is_in_use: bool,
}

impl LedgerFacts {
    /// Reads the ledger in `dir`, and changes nothing. Returns `None` if `dir` has no ledger yet,
    /// but one could be made there.
    pub(crate) fn read(dir: &Path) -> Result<Option<Self>, LedgerError> {
        let Some(found) = file::inspect(dir)? else { return Ok(None) };
        let file::InspectedLedger { mut index, position, is_locked } = found;
        let is_copy = take_position(&mut index, position);
        Ok(Some(LedgerFacts { commits: index.commits(), is_copy, is_in_use: is_locked }))
    }
}

/// Converts an error of the ledger to an error of the database connection that was being checked.
fn failed(error: LedgerError) -> sqlx::Error {
    sqlx::Error::Io(std::io::Error::other(error))
}

/// Position of the last copied decision in a generation from which nothing was copied yet.
const UNCOPIED: HistoryPosition = HistoryPosition::START;

/// Body of the thread that writes the file. Ends when the last handle is dropped, or when the disk
/// fails.
fn run_writer(
    mut file: file::LedgerFile,
    mut queue: mpsc::Receiver<Append>,
    shared: &SharedLedger,
) {
    while let Some(first) = queue.blocking_recv() {
        let mut batch = vec![first];
        while let Ok(next) = queue.try_recv() {
            batch.push(next);
        }
        let grew = batch.iter().any(|append| matches!(append.content, AppendContent::Lines(_)));
        let (contents, callers): (Vec<_>, Vec<_>) =
            batch.into_iter().map(|append| (append.content, append.done)).unzip();
        if let Err(error) = write_batch(&mut file, contents, shared) {
            shared.fail(&error);
            for done in callers {
                let _ = done.send(Err(LedgerError::Failed));
            }
            return;
        }
        for done in callers {
            let _ = done.send(Ok(()));
        }
        // No caller waits for the seal: it only distinguishes a torn end from a damaged line.
        if grew && let Err(error) = file.seal() {
            return shared.fail(&error);
        }
    }
}

/// Writes the lines and positions that wait. When they are durable, adds them to the index.
fn write_batch(
    file: &mut file::LedgerFile,
    batch: Vec<AppendContent>,
    shared: &SharedLedger,
) -> Result<(), LedgerError> {
    let is_copy = shared.is_copy.load(Ordering::Acquire);
    let mut lines: Vec<&LedgerLine> = Vec::new();
    for content in &batch {
        match content {
            AppendContent::Lines(more) => lines.extend(more),
            AppendContent::Position(seen) => {
                // Two checks of the database can finish in either order, but the position in the
                // file must never go back.
                let index = shared.index.read().unwrap_or_else(PoisonError::into_inner);
                let known = index.seen();
                drop(index);
                file.write_position(&seen.later_of(known.as_ref()), is_copy)?;
            }
        }
    }
    let appended = if lines.is_empty() { Default::default() } else { file.append(&lines)? };
    let mut stored = appended.iter();
    let mut index = shared.index.write().unwrap_or_else(PoisonError::into_inner);
    for content in batch {
        match content {
            AppendContent::Lines(lines) => {
                for (line, (offset, bytes)) in lines.into_iter().zip(&mut stored) {
                    index.apply(StoredLine { line, bytes, offset }, &shared.reader)?;
                }
            }
            AppendContent::Position(seen) => index.update_position(seen),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
