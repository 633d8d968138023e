//! The ledger's lines, and the index that is built from them in memory.

use std::collections::{BTreeMap, BTreeSet, btree_map};
use std::ops::Bound;
use std::sync::Arc;

use data_encoding::{BASE64, HEXLOWER};
use discovery_formation::Hash;
use discovery_formation::memory::{
    CORE_TABLES, DatabaseIdentity, HistoryPosition, LedgerEntry, LedgerSummary, RememberedDatabase,
};
use discovery_formation::service::EndCause;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::UNCOPIED;
use super::position::FileIdentities;

/// A commit whose document left this process. It is enough to restore the cluster into an empty
/// database.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Commit {
    /// Id of the cluster.
    pub cluster_id: Uuid,
    /// Lower-case hex of the proposal's hash h.
    pub h: String,
    /// The signed commit document, as sent.
    pub document: String,
    /// The statement chain (compact JWS), first to last.
    pub statements: Vec<String>,
    /// CA for peer connections.
    pub peer_ca: Authority,
    /// CA for the client port.
    pub client_ca: Authority,
}

impl Commit {
    /// The proposal's hash; `None` if `h` isn't valid hex.
    pub(crate) fn hash(&self) -> Option<Hash> {
        hash(&self.h)
    }
}

/// A CA: certificate in DER and wrapped key, both in base64.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Authority {
    /// Certificate in DER, base64.
    pub certificate: String,
    /// Wrapped PKCS#8 key, base64. `None` for an operator's own CA.
    pub wrapped_key: Option<String>,
}

/// The database that this process last worked with, and the position that it had reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DatabasePosition {
    /// Identifier of the server: `pg_control_system().system_identifier`.
    pub system_identifier: u64,
    /// Timeline of the write-ahead log.
    pub timeline: u32,
    /// Object id of the database.
    pub database: u32,
    /// Object ids of the core tables.
    pub tables: [u32; CORE_TABLES],
    /// Generation of the database. A new generation begins when the database's history changes, for
    /// example by a restore.
    pub generation: u64,
    /// Position of the write-ahead log, in bytes. It never goes back within a timeline.
    pub wal: u64,
    /// Number of sweeps of this process.
    pub beat: u64,
    /// Processes known to share the database. A restored database can lack some of them.
    pub processes: Vec<Uuid>,
}

impl DatabasePosition {
    /// Identity of the database when it was seen.
    pub(crate) fn site(&self) -> DatabaseIdentity {
        let (database, tables) = (self.database, self.tables);
        DatabaseIdentity {
            system: self.system_identifier,
            timeline: self.timeline,
            database,
            tables,
        }
    }

    /// Returns this position. If `known` is of the same history, each of `wal` and `beat` is the
    /// greater value of the two positions.
    pub(super) fn later_of(&self, known: Option<&DatabasePosition>) -> DatabasePosition {
        let mut seen = self.clone();
        if let Some(known) = known.filter(|known| known.history() == self.history()) {
            seen.wal = seen.wal.max(known.wal);
            seen.beat = seen.beat.max(known.beat);
        }
        seen
    }

    /// Whether this position and `other` describe the same history and processes, so that only
    /// `wal` and `beat` can differ.
    pub(crate) fn has_same_history(&self, other: &DatabasePosition) -> bool {
        self.history() == other.history() && self.processes == other.processes
    }

    fn history(&self) -> (DatabaseIdentity, u64) {
        (self.site(), self.generation)
    }
}

/// Decisions copied from the database, whichever process made them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CopiedDecisions {
    /// Generation of the database.
    pub(super) generation: u64,
    /// Number of the last copied decision.
    pub(super) to: u64,
    /// Hash of the decision chain up to the last copied decision, in hex.
    pub(super) hash: String,
    /// New commits, and confirmed commits of this process, each encoded by [`pack_commit`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) commits: Vec<String>,
    /// Clusters that ended by one of the copied decisions, each with the cause.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) ends: Vec<(Uuid, String)>,
    /// Whether everything that the ledger held when the generation began was compared with the
    /// database.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) compared: bool,
}

impl CopiedDecisions {
    /// A copy up to `mark` without new entries.
    pub(super) fn up_to(generation: u64, mark: HistoryPosition) -> Self {
        CopiedDecisions {
            generation,
            to: mark.number,
            hash: HEXLOWER.encode(&mark.hash.0),
            commits: Vec::new(),
            ends: Vec::new(),
            compared: false,
        }
    }
}

/// One line of the ledger, or of the position file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum LedgerLine {
    Header {
        version: u32,
        process: Uuid,
    },
    Commit(Box<Commit>),
    Copied(CopiedDecisions),
    Seen(DatabasePosition),
    /// Content of the position file: the position, and the identity of the files when it was
    /// written.
    Here {
        seen: DatabasePosition,
        home: Option<FileIdentities>,
    },
    /// One element of the admin chain. The lines hold the chain from its first element, in order.
    Admin {
        jws: String,
    },
    /// Seal, which states that all lines before it were durable before it was written.
    Seal,
}

#[derive(Clone, Debug)]
enum IndexEntry {
    CommitWithDocument(Arc<Commit>, Hash),
    CommitHash(Hash),
    End(EndCause),
}

impl IndexEntry {
    fn entry(&self) -> LedgerEntry {
        match self {
            IndexEntry::CommitWithDocument(_, h) => LedgerEntry::Commit { h: *h, document: true },
            IndexEntry::CommitHash(h) => LedgerEntry::Commit { h: *h, document: false },
            IndexEntry::End(cause) => LedgerEntry::End(*cause),
        }
    }
}

/// Index of the ledger in memory.
#[derive(Debug)]
pub(super) struct Index {
    entry_by_cluster: BTreeMap<Uuid, IndexEntry>,
    commits: usize,
    seen: Option<DatabasePosition>,
    copied: HistoryPosition,
    /// Whether everything that the ledger held when the generation began was compared with the
    /// database.
    compared: bool,
    /// Clusters whose commit document left this process in this generation, while no copy of the
    /// database's decisions has contained the commit yet.
    unconfirmed: BTreeSet<Uuid>,
    pub(super) admins: Vec<String>,
}

impl Default for Index {
    fn default() -> Self {
        let (held, unconfirmed, admins) = (BTreeMap::new(), BTreeSet::new(), Vec::new());
        Index {
            entry_by_cluster: held,
            commits: 0,
            seen: None,
            copied: UNCOPIED,
            compared: true,
            unconfirmed,
            admins,
        }
    }
}

impl Index {
    pub(super) fn entry(&self, cluster: Uuid) -> Option<LedgerEntry> {
        self.entry_by_cluster.get(&cluster).map(IndexEntry::entry)
    }

    pub(super) fn commit_with_document(&self, cluster: Uuid) -> Option<Arc<Commit>> {
        match self.entry_by_cluster.get(&cluster) {
            Some(IndexEntry::CommitWithDocument(commit, _)) => Some(commit.clone()),
            _ => None,
        }
    }

    pub(super) fn entries(&self, after: Option<Uuid>, limit: usize) -> Vec<(Uuid, LedgerEntry)> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let range = self.entry_by_cluster.range((from, Bound::Unbounded));
        range.take(limit).map(|(cluster, held)| (*cluster, held.entry())).collect()
    }

    pub(super) fn is_compared(&self) -> bool {
        self.compared
    }

    pub(super) fn is_unconfirmed(&self, cluster: Uuid) -> bool {
        self.unconfirmed.contains(&cluster)
    }

    pub(super) fn unconfirmed(
        &self,
        after: Option<Uuid>,
        limit: usize,
    ) -> Vec<(Uuid, LedgerEntry)> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let range = self.unconfirmed.range((from, Bound::Unbounded)).take(limit);
        range.filter_map(|cluster| Some((*cluster, self.entry(*cluster)?))).collect()
    }

    pub(super) fn commits(&self) -> usize {
        self.commits
    }

    pub(super) fn seen(&self) -> Option<DatabasePosition> {
        self.seen.clone()
    }

    pub(super) fn memory(&self) -> LedgerSummary {
        let known = self.seen.as_ref().map(|seen| RememberedDatabase {
            identity: seen.site(),
            generation: seen.generation,
            wal: seen.wal,
            last_copied: self.copied,
            sweeps: seen.beat,
        });
        LedgerSummary { database: known, entries: self.commits as u64 }
    }

    pub(super) fn apply(&mut self, line: LedgerLine) {
        match line {
            LedgerLine::Header { .. } | LedgerLine::Seal | LedgerLine::Here { .. } => {}
            LedgerLine::Admin { jws } => {
                // Two callers can append the same element.
                if self.admins.last() != Some(&jws) {
                    self.admins.push(jws);
                }
            }
            LedgerLine::Commit(commit) => {
                if let Some(h) = commit.hash() {
                    let cluster = commit.cluster_id;
                    if !matches!(self.entry(cluster), Some(LedgerEntry::Commit { .. })) {
                        self.unconfirmed.insert(cluster);
                    }
                    self.add_entry(cluster, IndexEntry::CommitWithDocument(Arc::new(*commit), h));
                }
            }
            LedgerLine::Copied(copied) => self.apply_copied(copied),
            LedgerLine::Seen(seen) => {
                if self.seen.as_ref().is_none_or(|old| old.generation != seen.generation) {
                    self.copied = UNCOPIED;
                    self.compared = self.entry_by_cluster.is_empty();
                    self.unconfirmed.clear();
                }
                self.seen = Some(seen.later_of(self.seen.as_ref()));
            }
        }
    }

    fn apply_copied(&mut self, copied: CopiedDecisions) {
        let same = self.seen.as_ref().is_some_and(|seen| seen.generation == copied.generation);
        for (cluster, h) in copied.commits.iter().filter_map(|text| unpack_commit(text)) {
            self.add_entry(cluster, IndexEntry::CommitHash(h));
            if same
                && matches!(self.entry(cluster), Some(LedgerEntry::Commit { h: held, .. }) if held == h)
            {
                self.unconfirmed.remove(&cluster);
            }
        }
        self.compared |= same && copied.compared;
        for (cluster, cause) in copied.ends {
            if let Some(cause) = EndCause::parse(&cause) {
                self.add_entry(cluster, IndexEntry::End(cause));
            }
        }
        // Filling a ledger that was set back starts at the first decision again. The mark of the
        // last copied decision must not go back with it.
        if let Some(hash) = hash(&copied.hash)
            && same
            && copied.to > self.copied.number
        {
            self.copied = HistoryPosition { number: copied.to, hash };
        }
    }

    /// Adds an entry. A cluster's first commit stays, and can get its document later. A commit
    /// replaces an end, and every other end replaces an expiry, which an owner may have undone.
    fn add_entry(&mut self, cluster: Uuid, new: IndexEntry) {
        match self.entry_by_cluster.entry(cluster) {
            btree_map::Entry::Vacant(place) => {
                self.commits += usize::from(!matches!(new, IndexEntry::End(_)));
                place.insert(new);
            }
            btree_map::Entry::Occupied(mut place) => match (place.get(), &new) {
                (
                    IndexEntry::End(_),
                    IndexEntry::CommitWithDocument(..) | IndexEntry::CommitHash(_),
                ) => {
                    self.commits += 1;
                    place.insert(new);
                }
                (IndexEntry::End(EndCause::Deadline), IndexEntry::End(_)) => {
                    place.insert(new);
                }
                (IndexEntry::CommitHash(known), IndexEntry::CommitWithDocument(_, h))
                    if known == h =>
                {
                    place.insert(new);
                }
                _ => {}
            },
        }
    }

    /// Takes `wal` and `beat` from the position file, if they are greater and of the same history.
    pub(super) fn update_position(&mut self, position: DatabasePosition) {
        // Keep the ledger's other fields, because they can be newer than those of the file.
        let Some(seen) = &mut self.seen else { return };
        *seen = seen.later_of(Some(&position));
    }
}

fn hash(hex: &str) -> Option<Hash> {
    HEXLOWER.decode(hex.as_bytes()).ok()?.try_into().ok().map(Hash)
}

/// Encodes a cluster's id and its commit's hash in 64 characters of base64.
pub(super) fn pack_commit(cluster: Uuid, h: &Hash) -> String {
    BASE64.encode(&[&cluster.as_bytes()[..], &h.0].concat())
}

fn unpack_commit(text: &str) -> Option<(Uuid, Hash)> {
    let bytes = BASE64.decode(text.as_bytes()).ok()?;
    let (cluster, h) = bytes.split_at_checked(16)?;
    Some((Uuid::from_slice(cluster).ok()?, Hash(h.try_into().ok()?)))
}
