//! The ledger's lines, and the index that is built from them in memory.

use std::collections::BTreeSet;
use std::ops::Bound;

use data_encoding::{BASE64, HEXLOWER};
use discovery_formation::Hash;
use discovery_formation::memory::{
    CORE_TABLES, DatabaseIdentity, HistoryPosition, LedgerSummary, RememberedDatabase,
};
use discovery_formation::service::EndCause;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::UNCOPIED;
use super::file::{JSON_START, LedgerError, StoredLine};
use super::places::{CommitPlace, HashCheck, Place, PlaceMap};
use super::position::FileIdentities;
use super::reader::{LedgerReader, line_start};

/// A commit whose document this process has sent out. It is enough to restore the cluster into an
/// empty database.
///
/// A commit's hash is read from the file without the rest of the line, so `cluster_id` and `h` must
/// stay the first fields ([`line_start`]).
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
        parse_hash(&self.h)
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

    /// Returns this position. If `known` belongs to the same history, the result has the greater
    /// `wal` and the greater `beat` of the two positions.
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
    /// Commits that this copy has found: new ones, and ones that this process had sent out before.
    /// Each is encoded by [`pack_commit`].
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
    /// Makes the ledger's line which says that all decisions up to `mark` were copied from the
    /// database. It lists no commits and no ended clusters yet; callers may add them.
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

/// Index of the ledger in memory. There can be a million entries, so it holds only the places in
/// the file at which they are.
#[derive(Debug)]
pub(super) struct Index {
    /// Place of each cluster's commit or end.
    places: PlaceMap,
    /// Number of clusters in `places` that have a commit. The others ended without one.
    commits: usize,
    seen: Option<DatabasePosition>,
    copied: HistoryPosition,
    /// Whether everything that the ledger held when the generation began was compared with the
    /// database.
    compared: bool,
    /// Clusters with an unconfirmed commit: this process has sent out the commit document in this
    /// generation, but hasn't found the commit among the database's decisions yet.
    unconfirmed: BTreeSet<Uuid>,
    pub(super) admins: Vec<String>,
}

impl Default for Index {
    fn default() -> Self {
        Index {
            places: PlaceMap::default(),
            commits: 0,
            seen: None,
            copied: UNCOPIED,
            compared: true,
            unconfirmed: BTreeSet::new(),
            admins: Vec::new(),
        }
    }
}

impl Index {
    pub(super) fn place(&self, cluster: Uuid) -> Option<Place> {
        self.places.get(cluster)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    pub(super) fn places(&self, after: Option<Uuid>, limit: usize) -> Vec<(Uuid, Place)> {
        self.places.after(after).take(limit).collect()
    }

    pub(super) fn is_compared(&self) -> bool {
        self.compared
    }

    pub(super) fn is_unconfirmed(&self, cluster: Uuid) -> bool {
        self.unconfirmed.contains(&cluster)
    }

    pub(super) fn unconfirmed(&self, after: Option<Uuid>, limit: usize) -> Vec<(Uuid, Place)> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let range = self.unconfirmed.range((from, Bound::Unbounded)).take(limit);
        range.filter_map(|cluster| Some((*cluster, self.place(*cluster)?))).collect()
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

    /// Adds a line, which is durable in the file that `reader` reads.
    ///
    /// # Errors
    /// The file can't be read, or the line isn't encoded as this program encodes lines.
    pub(super) fn apply(
        &mut self,
        stored: StoredLine<'_>,
        reader: &LedgerReader,
    ) -> Result<(), LedgerError> {
        match stored.line {
            LedgerLine::Header { .. } | LedgerLine::Seal | LedgerLine::Here { .. } => {}
            LedgerLine::Admin { jws } => {
                // Two tasks can append the same element to the file, but the index holds it once.
                if self.admins.last() != Some(&jws) {
                    self.admins.push(jws);
                }
            }
            LedgerLine::Commit(commit) => {
                let (cluster, offset) = (commit.cluster_id, stored.offset);
                let Some(h) = commit.hash() else { return Ok(()) };
                let start = format!("{}{}", line_start(cluster), commit.h);
                if !stored.bytes[JSON_START..].starts_with(start.as_bytes()) {
                    return Err(reader.damaged(offset));
                }
                let place = CommitPlace { has_document: true, offset, check: HashCheck::of(&h) };
                if self.add_commit(cluster, h, place, reader)?.is_first {
                    self.unconfirmed.insert(cluster);
                }
            }
            LedgerLine::Copied(copied) => {
                self.apply_copied(copied, (stored.bytes, stored.offset), reader)?;
            }
            LedgerLine::Seen(seen) => {
                if self.seen.as_ref().is_none_or(|old| old.generation != seen.generation) {
                    self.copied = UNCOPIED;
                    self.compared = self.places.is_empty();
                    self.unconfirmed.clear();
                }
                self.seen = Some(seen.later_of(self.seen.as_ref()));
            }
        }
        Ok(())
    }

    fn apply_copied(
        &mut self,
        copied: CopiedDecisions,
        (bytes, offset): (&[u8], u64),
        reader: &LedgerReader,
    ) -> Result<(), LedgerError> {
        let same = self.seen.as_ref().is_some_and(|seen| seen.generation == copied.generation);
        let mut searched = 0;
        for text in &copied.commits {
            let Some((cluster, h)) = unpack_commit(text) else { continue };
            let found = find(&bytes[searched..], text.as_bytes());
            let start = searched + found.ok_or_else(|| reader.damaged(offset))?;
            searched = start + PACKED_LEN;
            let offset = offset + start as u64;
            let place = CommitPlace { has_document: false, offset, check: HashCheck::of(&h) };
            if self.add_commit(cluster, h, place, reader)?.is_same_hash && same {
                self.unconfirmed.remove(&cluster);
            }
        }
        self.compared |= same && copied.compared;
        for (cluster, cause) in copied.ends {
            if let Some(cause) = EndCause::parse(&cause) {
                self.add_end(cluster, cause);
            }
        }
        // Filling a ledger that was set back to an older state starts at the first decision again.
        // The mark of the last copied decision must not become lower meanwhile.
        if let Some(hash) = parse_hash(&copied.hash)
            && same
            && copied.to > self.copied.number
        {
            self.copied = HistoryPosition { number: copied.to, hash };
        }
        Ok(())
    }

    /// Adds a cluster's commit. It replaces a stored end of the cluster, but never an earlier
    /// commit. An earlier commit without a document gets its document from an added commit with the
    /// same hash.
    fn add_commit(
        &mut self,
        cluster: Uuid,
        h: Hash,
        place: CommitPlace,
        reader: &LedgerReader,
    ) -> Result<AddedCommit, LedgerError> {
        let Some(Place::Commit(known)) = self.places.get(cluster) else {
            self.places.insert(cluster, Place::Commit(place));
            self.commits += 1;
            return Ok(AddedCommit { is_first: true, is_same_hash: true });
        };
        let is_same_hash = reader.hash(cluster, known)? == h;
        if is_same_hash && place.has_document && !known.has_document {
            self.places.insert(cluster, Place::Commit(place));
        }
        Ok(AddedCommit { is_first: false, is_same_hash })
    }

    /// Adds a cluster's end, unless the cluster has a commit. The first end stays. Only an expiry
    /// is replaced, because an owner may have undone it.
    fn add_end(&mut self, cluster: Uuid, cause: EndCause) {
        match self.places.get(cluster) {
            None | Some(Place::End(EndCause::Deadline)) => {
                self.places.insert(cluster, Place::End(cause));
            }
            Some(Place::End(_) | Place::Commit(_)) => {}
        }
    }

    /// Takes `wal` and `beat` from `position`, which the position file holds, if they are greater
    /// and of the same history.
    pub(super) fn update_position(&mut self, position: DatabasePosition) {
        // Keep the other fields of the ledger's own position, because they can be newer than those
        // in the position file.
        let Some(seen) = &mut self.seen else { return };
        *seen = seen.later_of(Some(&position));
    }
}

/// Result of adding a commit to the index.
struct AddedCommit {
    /// Whether the cluster had no commit before.
    is_first: bool,
    /// Whether the added commit and the cluster's first commit have the same hash.
    is_same_hash: bool,
}

/// Returns the position of `text` in `bytes`.
fn find(bytes: &[u8], text: &[u8]) -> Option<usize> {
    bytes.windows(text.len()).position(|window| window == text)
}

/// Parses a hash in lower-case hex.
pub(super) fn parse_hash(hex: &str) -> Option<Hash> {
    HEXLOWER.decode(hex.as_bytes()).ok()?.try_into().ok().map(Hash)
}

/// Number of characters of a commit that [`pack_commit`] has encoded.
pub(super) const PACKED_LEN: usize = 64;

/// Encodes a cluster's id and its commit's hash in [`PACKED_LEN`] characters of base64.
pub(super) fn pack_commit(cluster: Uuid, h: &Hash) -> String {
    BASE64.encode(&[&cluster.as_bytes()[..], &h.0].concat())
}

pub(super) fn unpack_commit(text: &str) -> Option<(Uuid, Hash)> {
    let bytes = BASE64.decode(text.as_bytes()).ok()?;
    let (cluster, h) = bytes.split_at_checked(16)?;
    Some((Uuid::from_slice(cluster).ok()?, Hash(h.try_into().ok()?)))
}
