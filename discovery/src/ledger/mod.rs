//! The ledger: what this process has let out, kept outside Postgres.
//!
//! A database can be set back to a backup, and would then gladly let a second cluster form under
//! an identity that hosts already run. So before a commit document first leaves this process it is
//! fsynced here, and each new database connection is compared with what stands here. One file per
//! process, and not in the key directory, which replicas share.
//!
//! The file is a line per entry: 16 hex digits of the SHA-256 of the JSON, a blank, the JSON. Once
//! a batch of lines is durable, a *seal* follows it. What doesn't match and has no seal after it is
//! a torn end (power lost in the middle of an append, whose pages reach the disk in any order;
//! nobody was told anything that depends on it) and is cut; anything else refuses to start. One thread writes and
//! syncs, for all that waits at once. After a failed write or sync nothing more is taken: what the
//! disk holds is then unknown (ATC'20, "Can applications recover from fsync failures?").

mod file;
mod position;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot, watch};
use uuid::Uuid;

pub use file::LedgerError;

/// Bytes of the database's log after which the position is written down again.
const POSITION_STEP: u64 = 1 << 20;
/// Appends that wait for the disk; further callers wait for a place.
const QUEUE: usize = 256;

/// A commit as the ledger keeps it: enough to put the cluster back into an empty database.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commit {
    /// The cluster.
    pub cluster_id: Uuid,
    /// Lower-case hex of the proposal's hash h.
    pub h: String,
    /// The commit document as it was sent.
    pub document: String,
    /// The statement chain (compact JWS), first to last.
    pub statements: Vec<String>,
    /// The CAs.
    pub peer_ca: Authority,
    /// The CAs.
    pub client_ca: Authority,
}

/// A CA: certificate in DER, key as the KEK wraps it, both in base64.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Authority {
    /// DER, base64.
    pub certificate: String,
    /// Wrapped PKCS#8, base64; `None` for an operator's own CA.
    pub wrapped_key: Option<String>,
}

/// Which database this process last worked with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// `pg_control_system().system_identifier`.
    pub system_identifier: String,
    /// Of the write-ahead log.
    pub timeline: i64,
    /// Position of the write-ahead log, in bytes: never goes back within a timeline.
    pub wal: u64,
    /// Our own number for "this history of this database".
    pub generation: i64,
    /// Processes known to share the database, so that a restored one doesn't forget them.
    pub processes: Vec<Uuid>,
}

/// One line of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
enum Line {
    Header {
        version: u32,
        process: Uuid,
    },
    Commit(Box<Commit>),
    Seen(Seen),
    /// An element of the admin chain; they follow one another from the first on.
    Admin {
        jws: String,
    },
    /// Everything before it was synced before it was written.
    Seal,
}

struct Append {
    what: What,
    done: oneshot::Sender<Result<(), LedgerError>>,
}

enum What {
    /// Lines, all or none of them.
    Lines(Vec<Line>),
    /// How far the database's log has come, beside the ledger.
    Position(Seen),
}

/// What the file holds, for those who only read.
#[derive(Debug, Default)]
struct Index {
    commits: BTreeMap<Uuid, Arc<Commit>>,
    seen: Option<Seen>,
    /// `seen.wal` as the disk has it.
    durable_wal: u64,
    admins: Vec<String>,
}

/// A handle; clones share the file. The file is closed and unlocked when the last one is gone.
#[derive(Clone, Debug)]
pub struct Ledger {
    process: Uuid,
    index: Arc<RwLock<Index>>,
    appends: mpsc::Sender<Append>,
    failed: watch::Receiver<bool>,
}

impl Ledger {
    /// Opens the ledger in `dir`, making both if need be, and locks it.
    pub fn open(dir: &Path) -> Result<Self, LedgerError> {
        let (file, process, lines) = file::open(dir)?;
        let mut index = Index::default();
        for line in lines {
            index.apply(line);
        }
        index.take_position(position::read(dir));
        let index = Arc::new(RwLock::new(index));
        let (appends, queue) = mpsc::channel(QUEUE);
        let (failed_sender, failed) = watch::channel(false);
        let shared = index.clone();
        std::thread::Builder::new()
            .name("ledger".into())
            .spawn(move || write(file, queue, &shared, &failed_sender))
            .map_err(|source| LedgerError::Io { what: "can't start a thread".into(), source })?;
        Ok(Ledger { process, index, appends, failed })
    }

    /// This process's name among those that share a database.
    pub fn process(&self) -> Uuid {
        self.process
    }

    /// The hash that was let out for a cluster, if any was.
    pub fn committed(&self, cluster: Uuid) -> Option<Arc<Commit>> {
        self.read(|index| index.commits.get(&cluster).cloned())
    }

    /// All commits, by cluster.
    pub fn commits(&self) -> Vec<Arc<Commit>> {
        self.read(|index| index.commits.values().cloned().collect())
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.read(|index| index.commits.len())
    }

    /// Whether nothing was ever let out.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The database as last seen.
    pub fn seen(&self) -> Option<Seen> {
        self.read(|index| index.seen.clone())
    }

    /// Returns when the commit is durable. A second, different commit of one cluster is an error,
    /// and writes nothing.
    pub async fn ensure(&self, commit: Commit) -> Result<(), LedgerError> {
        if let Some(known) = self.committed(commit.cluster_id) {
            return match known.h == commit.h {
                true => Ok(()),
                false => Err(LedgerError::Contradiction { cluster_id: commit.cluster_id }),
            };
        }
        self.append(vec![Line::Commit(Box::new(commit))]).await
    }

    /// Notes which database we work with: durable if it differs in more than the position, if that
    /// has moved by `POSITION_STEP`, or when `force` is set.
    pub async fn note(&self, seen: Seen, force: bool) -> Result<(), LedgerError> {
        let same = self.seen().is_some_and(|old| Seen { wal: seen.wal, ..old } == seen);
        if same && !force {
            let ahead = self.advance(seen.wal);
            return if ahead >= POSITION_STEP { self.keep_position().await } else { Ok(()) };
        }
        self.append(vec![Line::Seen(seen)]).await
    }

    /// Makes the position durable: at a clean stop, and whenever it has moved far enough.
    pub async fn keep_position(&self) -> Result<(), LedgerError> {
        let behind = |index: &Index| index.seen.clone().filter(|seen| seen.wal > index.durable_wal);
        match self.read(behind) {
            Some(seen) => self.send(What::Position(seen)).await,
            None => Ok(()),
        }
    }

    /// Elements of the admin chain that this process has acted on, the first one first.
    pub fn admins(&self) -> Vec<String> {
        self.read(|index| index.admins.clone())
    }

    /// Returns when the elements are durable that follow those which are there. A chain that isn't
    /// a continuation of theirs is left alone.
    pub async fn ensure_admins(&self, elements: &[String]) -> Result<(), LedgerError> {
        let known = self.admins();
        match elements.strip_prefix(&known[..]) {
            None | Some([]) => Ok(()),
            Some(new) => {
                self.append(new.iter().map(|jws| Line::Admin { jws: jws.clone() }).collect()).await
            }
        }
    }

    /// Moves the position on, in memory; returns how far that is ahead of the disk.
    fn advance(&self, wal: u64) -> u64 {
        let mut index = self.index.write().unwrap_or_else(PoisonError::into_inner);
        let Some(seen) = &mut index.seen else { return 0 };
        seen.wal = seen.wal.max(wal);
        let now = seen.wal;
        now.saturating_sub(index.durable_wal)
    }

    /// Becomes true when the disk has failed; the process should then stop.
    pub fn failed(&self) -> watch::Receiver<bool> {
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

impl Index {
    fn apply(&mut self, line: Line) {
        match line {
            Line::Header { .. } | Line::Seal => {}
            Line::Admin { jws } => {
                // Two callers may have sent the same one.
                if self.admins.last() != Some(&jws) {
                    self.admins.push(jws);
                }
            }
            Line::Commit(commit) => {
                self.commits.entry(commit.cluster_id).or_insert_with(|| Arc::new(*commit));
            }
            Line::Seen(seen) => {
                self.durable_wal = seen.wal;
                self.seen = Some(seen);
            }
        }
    }

    /// A position that was written beside the ledger counts for the database that it is of.
    fn take_position(&mut self, position: Option<Seen>) {
        let (Some(seen), Some(position)) = (&mut self.seen, position) else { return };
        let same = (&position.system_identifier, position.timeline, position.generation)
            == (&seen.system_identifier, seen.timeline, seen.generation);
        if same {
            seen.wal = seen.wal.max(position.wal);
            self.durable_wal = seen.wal;
        }
    }
}

/// The one writer. Ends with the last handle, or with the disk.
fn write(
    mut file: file::LedgerFile,
    mut queue: mpsc::Receiver<Append>,
    index: &RwLock<Index>,
    failed: &watch::Sender<bool>,
) {
    while let Some(first) = queue.blocking_recv() {
        let mut batch = vec![first];
        while let Ok(next) = queue.try_recv() {
            batch.push(next);
        }
        if let Err(error) = write_batch(&mut file, &batch) {
            tracing::error!(%error, cause = ?error, "the ledger's disk failed; stopping");
            let _ = failed.send(true);
            for append in batch {
                let _ = append.done.send(Err(LedgerError::Failed));
            }
            return;
        }
        let grew = batch.iter().any(|append| matches!(append.what, What::Lines(_)));
        let mut open = index.write().unwrap_or_else(PoisonError::into_inner);
        for Append { what, done } in batch {
            match what {
                What::Lines(lines) => lines.into_iter().for_each(|line| open.apply(line)),
                What::Position(seen) => open.take_position(Some(seen)),
            }
            let _ = done.send(Ok(()));
        }
        drop(open);
        // Nobody waits for the seal: it only tells a torn end from a damaged one.
        if grew && let Err(error) = file.seal() {
            tracing::error!(%error, cause = ?error, "the ledger's disk failed; stopping");
            let _ = failed.send(true);
            return;
        }
    }
}

fn write_batch(file: &mut file::LedgerFile, batch: &[Append]) -> Result<(), LedgerError> {
    let mut lines: Vec<&Line> = Vec::new();
    for append in batch {
        match &append.what {
            What::Lines(more) => lines.extend(more),
            What::Position(seen) => file.write_position(seen)?,
        }
    }
    if lines.is_empty() { Ok(()) } else { file.append(&lines) }
}

#[cfg(test)]
mod tests;
