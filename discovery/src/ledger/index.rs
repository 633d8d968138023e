//! What the ledger's lines say, and what is remembered of them.

use std::collections::{BTreeMap, BTreeSet, btree_map};
use std::ops::Bound;
use std::sync::Arc;

use data_encoding::{BASE64, HEXLOWER};
use discovery_formation::Hash;
use discovery_formation::memory::{Entry, Known, Mark, Memory, Site, TABLES};
use discovery_formation::service::EndCause;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::UNCOPIED;
use super::position::Home;

/// A commit that this process let out: enough to put the cluster back into an empty database.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Commit {
    /// The cluster.
    pub cluster_id: Uuid,
    /// Lower-case hex of the proposal's hash h.
    pub h: String,
    /// The commit document as it was sent.
    pub document: String,
    /// The statement chain (compact JWS), first to last.
    pub statements: Vec<String>,
    /// The CA for peers.
    pub peer_ca: Authority,
    /// The CA for clients.
    pub client_ca: Authority,
}

impl Commit {
    /// h.
    pub(crate) fn hash(&self) -> Option<Hash> {
        hash(&self.h)
    }
}

/// A CA: certificate in DER, key as the KEK wraps it, both in base64.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Authority {
    /// DER, base64.
    pub certificate: String,
    /// Wrapped PKCS#8, base64; `None` for an operator's own CA.
    pub wrapped_key: Option<String>,
}

/// Which database this process last worked with, and how far it had come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Seen {
    /// `pg_control_system().system_identifier`.
    pub system_identifier: u64,
    /// Of the write-ahead log.
    pub timeline: u32,
    /// The database's object id.
    pub database: u32,
    /// Its core tables' object ids.
    pub tables: [u32; TABLES],
    /// Our own number for "this history of this database".
    pub generation: u64,
    /// Position of the write-ahead log, in bytes: never goes back within a timeline.
    pub wal: u64,
    /// Sweeps of this process.
    pub beat: u64,
    /// Processes known to share the database, so that a restored one doesn't forget them.
    pub processes: Vec<Uuid>,
}

impl Seen {
    /// Where it was.
    pub(crate) fn site(&self) -> Site {
        let (database, tables) = (self.database, self.tables);
        Site { system: self.system_identifier, timeline: self.timeline, database, tables }
    }

    /// This position, or what is known of the same history if that is further on.
    pub(super) fn no_less_than(&self, known: Option<&Seen>) -> Seen {
        let mut seen = self.clone();
        if let Some(known) = known.filter(|known| known.history() == self.history()) {
            seen.wal = seen.wal.max(known.wal);
            seen.beat = seen.beat.max(known.beat);
        }
        seen
    }

    /// Whether only the position may differ.
    pub(crate) fn is_of_the_same(&self, other: &Seen) -> bool {
        self.history() == other.history() && self.processes == other.processes
    }

    fn history(&self) -> (Site, u64) {
        (self.site(), self.generation)
    }
}

/// Decisions of the database that are in the ledger from here on, by whomever they were made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Copied {
    /// The database's generation.
    pub(super) generation: u64,
    /// Number of the last one.
    pub(super) to: u64,
    /// Hex of the chain's hash there.
    pub(super) hash: String,
    /// Commits that were new, or that were let out by this process and are confirmed, as [`packed`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) commits: Vec<String>,
    /// Ends that were new, and their causes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) ends: Vec<(Uuid, String)>,
    /// All that the ledger held when the generation began was compared with the database.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) compared: bool,
}

impl Copied {
    /// Nothing new yet.
    pub(super) fn up_to(generation: u64, mark: Mark) -> Self {
        Copied {
            generation,
            to: mark.number,
            hash: HEXLOWER.encode(&mark.hash.0),
            commits: Vec::new(),
            ends: Vec::new(),
            compared: false,
        }
    }
}

/// One line of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Line {
    Header {
        version: u32,
        process: Uuid,
    },
    Commit(Box<Commit>),
    Copied(Copied),
    Seen(Seen),
    /// The same in the file beside the ledger, with where that was written.
    Here {
        seen: Seen,
        home: Option<Home>,
    },
    /// An element of the admin chain; they follow one another from the first on.
    Admin {
        jws: String,
    },
    /// Everything before it was synced before it was written.
    Seal,
}

#[derive(Clone, Debug)]
enum Held {
    Whole(Arc<Commit>, Hash),
    Commit(Hash),
    End(EndCause),
}

impl Held {
    fn entry(&self) -> Entry {
        match self {
            Held::Whole(_, h) => Entry::Commit { h: *h, document: true },
            Held::Commit(h) => Entry::Commit { h: *h, document: false },
            Held::End(cause) => Entry::End(*cause),
        }
    }
}

/// What the file holds, for those who only read.
#[derive(Debug)]
pub(super) struct Index {
    held: BTreeMap<Uuid, Held>,
    commits: usize,
    seen: Option<Seen>,
    copied: Mark,
    /// What was held when the database's generation began was compared with the database.
    compared: bool,
    /// Commits let out in this generation that no copy of the database's decisions has shown yet.
    unconfirmed: BTreeSet<Uuid>,
    pub(super) admins: Vec<String>,
}

impl Default for Index {
    fn default() -> Self {
        let (held, unconfirmed, admins) = (BTreeMap::new(), BTreeSet::new(), Vec::new());
        Index {
            held,
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
    pub(super) fn entry(&self, cluster: Uuid) -> Option<Entry> {
        self.held.get(&cluster).map(Held::entry)
    }

    pub(super) fn whole(&self, cluster: Uuid) -> Option<Arc<Commit>> {
        match self.held.get(&cluster) {
            Some(Held::Whole(commit, _)) => Some(commit.clone()),
            _ => None,
        }
    }

    pub(super) fn entries(&self, after: Option<Uuid>, limit: usize) -> Vec<(Uuid, Entry)> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let range = self.held.range((from, Bound::Unbounded));
        range.take(limit).map(|(cluster, held)| (*cluster, held.entry())).collect()
    }

    pub(super) fn is_compared(&self) -> bool {
        self.compared
    }

    pub(super) fn is_unconfirmed(&self, cluster: Uuid) -> bool {
        self.unconfirmed.contains(&cluster)
    }

    pub(super) fn unconfirmed(&self, after: Option<Uuid>, limit: usize) -> Vec<(Uuid, Entry)> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let range = self.unconfirmed.range((from, Bound::Unbounded)).take(limit);
        range.filter_map(|cluster| Some((*cluster, self.entry(*cluster)?))).collect()
    }

    pub(super) fn commits(&self) -> usize {
        self.commits
    }

    pub(super) fn seen(&self) -> Option<Seen> {
        self.seen.clone()
    }

    pub(super) fn memory(&self) -> Memory {
        let known = self.seen.as_ref().map(|seen| Known {
            site: seen.site(),
            generation: seen.generation,
            wal: seen.wal,
            copied: self.copied,
            beat: seen.beat,
        });
        Memory { known, entries: self.commits as u64 }
    }

    pub(super) fn apply(&mut self, line: Line) {
        match line {
            Line::Header { .. } | Line::Seal | Line::Here { .. } => {}
            Line::Admin { jws } => {
                // Two callers may have sent the same one.
                if self.admins.last() != Some(&jws) {
                    self.admins.push(jws);
                }
            }
            Line::Commit(commit) => {
                if let Some(h) = commit.hash() {
                    let cluster = commit.cluster_id;
                    if !matches!(self.entry(cluster), Some(Entry::Commit { .. })) {
                        self.unconfirmed.insert(cluster);
                    }
                    self.hold(cluster, Held::Whole(Arc::new(*commit), h));
                }
            }
            Line::Copied(copied) => self.take_copied(copied),
            Line::Seen(seen) => {
                if self.seen.as_ref().is_none_or(|old| old.generation != seen.generation) {
                    self.copied = UNCOPIED;
                    self.compared = self.held.is_empty();
                    self.unconfirmed.clear();
                }
                self.seen = Some(seen.no_less_than(self.seen.as_ref()));
            }
        }
    }

    fn take_copied(&mut self, copied: Copied) {
        let same = self.seen.as_ref().is_some_and(|seen| seen.generation == copied.generation);
        for (cluster, h) in copied.commits.iter().filter_map(|text| unpacked(text)) {
            self.hold(cluster, Held::Commit(h));
            if same
                && matches!(self.entry(cluster), Some(Entry::Commit { h: held, .. }) if held == h)
            {
                self.unconfirmed.remove(&cluster);
            }
        }
        self.compared |= same && copied.compared;
        for (cluster, cause) in copied.ends {
            if let Some(cause) = EndCause::parse(&cause) {
                self.hold(cluster, Held::End(cause));
            }
        }
        // Filling an older ledger begins from the first one again.
        if let Some(hash) = hash(&copied.hash)
            && same
            && copied.to > self.copied.number
        {
            self.copied = Mark { number: copied.to, hash };
        }
    }

    /// The first commit of a cluster stays; it gets its document later, and stands above an end.
    fn hold(&mut self, cluster: Uuid, new: Held) {
        match self.held.entry(cluster) {
            btree_map::Entry::Vacant(place) => {
                self.commits += usize::from(!matches!(new, Held::End(_)));
                place.insert(new);
            }
            btree_map::Entry::Occupied(mut place) => match (place.get(), &new) {
                (Held::End(_), Held::Whole(..) | Held::Commit(_)) => {
                    self.commits += 1;
                    place.insert(new);
                }
                (Held::Commit(known), Held::Whole(_, h)) if known == h => {
                    place.insert(new);
                }
                _ => {}
            },
        }
    }

    /// A position that was written beside the ledger counts for the database that it is of.
    pub(super) fn take_position(&mut self, position: Seen) {
        // What goes with it stands in the ledger, and may be newer there.
        let Some(seen) = &mut self.seen else { return };
        *seen = seen.no_less_than(Some(&position));
    }
}

fn hash(hex: &str) -> Option<Hash> {
    HEXLOWER.decode(hex.as_bytes()).ok()?.try_into().ok().map(Hash)
}

/// A commit of another process, in 64 characters.
pub(super) fn packed(cluster: Uuid, h: &Hash) -> String {
    BASE64.encode(&[&cluster.as_bytes()[..], &h.0].concat())
}

fn unpacked(text: &str) -> Option<(Uuid, Hash)> {
    let bytes = BASE64.decode(text.as_bytes()).ok()?;
    let (cluster, h) = bytes.split_at_checked(16)?;
    Some((Uuid::from_slice(cluster).ok()?, Hash(h.try_into().ok()?)))
}
