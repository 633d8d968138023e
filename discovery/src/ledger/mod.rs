//! The ledger: what this process has let out, kept outside Postgres.
//!
//! A database can be set back to a backup, and would then gladly let a second cluster form under
//! an identity that hosts already run. So before a commit document first leaves this process it is
//! fsynced here, and each new database connection is compared with what stands here. One file per
//! process, and not in the key directory, which replicas share.
//!
//! The file is a line per entry: 16 hex digits of the SHA-256 of the JSON, a blank, the JSON. A
//! torn last line (power lost in the middle of an append, so that nobody was told anything that
//! depends on it) is cut; anything else that doesn't match refuses to start. One thread writes and
//! syncs, for all that waits at once. After a failed write or sync nothing more is taken: what the
//! disk holds is then unknown (ATC'20, "Can applications recover from fsync failures?").

mod file;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot, watch};
use uuid::Uuid;

pub use file::LedgerError;

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
    Header { version: u32, process: Uuid },
    Commit(Box<Commit>),
    Seen(Seen),
}

struct Append {
    line: Line,
    done: oneshot::Sender<Result<(), LedgerError>>,
}

/// What the file holds, for those who only read.
#[derive(Debug, Default)]
struct Index {
    commits: BTreeMap<Uuid, Arc<Commit>>,
    seen: Option<Seen>,
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
        self.append(Line::Commit(Box::new(commit))).await
    }

    /// Notes which database we work with; writes only what differs in more than the position, or
    /// when `force` is set.
    pub async fn note(&self, seen: Seen, force: bool) -> Result<(), LedgerError> {
        let same = self.seen().is_some_and(|old| Seen { wal: seen.wal, ..old } == seen);
        if same && !force {
            let mut index = self.index.write().unwrap_or_else(PoisonError::into_inner);
            index.apply(Line::Seen(seen));
            return Ok(());
        }
        self.append(Line::Seen(seen)).await
    }

    /// Becomes true when the disk has failed; the process should then stop.
    pub fn failed(&self) -> watch::Receiver<bool> {
        self.failed.clone()
    }

    async fn append(&self, line: Line) -> Result<(), LedgerError> {
        let (done, answer) = oneshot::channel();
        self.appends.send(Append { line, done }).await.map_err(|_| LedgerError::Failed)?;
        answer.await.map_err(|_| LedgerError::Failed)?
    }

    fn read<T>(&self, with: impl FnOnce(&Index) -> T) -> T {
        with(&self.index.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Index {
    fn apply(&mut self, line: Line) {
        match line {
            Line::Header { .. } => {}
            Line::Commit(commit) => {
                self.commits.entry(commit.cluster_id).or_insert_with(|| Arc::new(*commit));
            }
            Line::Seen(seen) => self.seen = Some(seen),
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
        let lines: Vec<&Line> = batch.iter().map(|append| &append.line).collect();
        if let Err(error) = file.append(&lines) {
            tracing::error!(%error, cause = ?error, "the ledger's disk failed; stopping");
            let _ = failed.send(true);
            for append in batch {
                let _ = append.done.send(Err(LedgerError::Failed));
            }
            return;
        }
        let mut index = index.write().unwrap_or_else(PoisonError::into_inner);
        for Append { line, done } in batch {
            index.apply(line);
            let _ = done.send(Ok(()));
        }
    }
}

#[cfg(test)]
mod tests;
