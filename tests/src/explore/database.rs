//! Databases, and what discovery processes remember of them in their ledgers. Uses the types of the
//! production code ([`formation_explored::memory`]), with small numbers in place of large ones.

use std::sync::Arc;

use formation_explored::Hash;
use formation_explored::memory::{self, Entry, Known, Mark, Memory, Noted, Own, Read, Site};
use formation_explored::service::{Change, Cluster, Outcome, Phase};

use crate::explore::config::Environment;

/// Number of discovery processes that share the database.
pub(super) const PROCESSES: usize = 2;

/// Contents and identity of a database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Database {
    /// Row of the cluster, as [`normalise`](crate::explore::world::normalise) leaves it.
    pub cluster: Cluster,
    /// Identity of the database, which no dump carries.
    pub site: u32,
    /// Identity that the database had when its generation began.
    pub noted: u32,
    /// Number of the database's generation; grows each time a process finds a changed database.
    pub generation: u64,
    /// Whether every process has put its ledger back since the last change.
    pub settled: bool,
    /// Commits and ends of the cluster, numbered from 1.
    pub decisions: Vec<Entry>,
    /// Row about each process.
    pub rows: [Row; PROCESSES],
}

/// Row of the database about one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Row {
    /// Number of entries in the process's ledger when it last looked.
    pub entries: u64,
    /// Number of sweeps of the process.
    pub beat: u64,
    /// Whether the process has put its ledger back into this generation.
    pub is_back: bool,
    /// Whether an owner has declared that the process won't come back.
    pub is_forgotten: bool,
}

/// One discovery process, with its disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// The ledger on the process's disk.
    pub ledger: Ledger,
    /// Older copy of the ledger, which may replace it.
    pub saved: Option<Ledger>,
    /// Whether the process has looked at the database that its connections lead to.
    pub connected: bool,
    /// Whether the process is lost for good.
    pub is_gone: bool,
    /// Row that a transaction under way has read; needs `row_lock` switched off.
    pub read: Option<Arc<Database>>,
}

/// A process's ledger and the position beside it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    /// The ledger's entry about the cluster, if it has one.
    pub entry: Option<Entry>,
    /// Position: the database that the process last worked with.
    pub known: Option<Remembered>,
}

/// Position beside a ledger: [`Known`] with the decisions themselves in place of their hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remembered {
    /// Identity of the database.
    pub site: u32,
    /// Generation of the database.
    pub generation: u64,
    /// Decisions of the database up to the last one that was copied.
    pub copied: Vec<Entry>,
    /// Number of sweeps of this process when it last looked.
    pub beat: u64,
}

impl Ledger {
    /// Stores `entry`, unless the ledger holds a stronger one: a commit replaces an end, and a
    /// document replaces a hash.
    pub fn note(&mut self, entry: Entry) {
        let says_more = match (self.entry, entry) {
            (None, _) => true,
            (Some(Entry::End(_)), Entry::Commit { .. }) => true,
            (Some(Entry::Commit { h, document }), Entry::Commit { h: new, document: whole }) => {
                h == new && whole && !document
            }
            (Some(_), _) => false,
        };
        if says_more {
            self.entry = Some(entry);
        }
    }

    /// Returns the ledger as the production code compares it. The WAL position is always 0, because
    /// it proves nothing: a restored database may have written more than the lost one.
    #[must_use]
    pub fn memory(&self, environment: &Environment) -> Memory {
        let known = self.known.as_ref().map(|known| Known {
            site: site(known.site, environment),
            generation: known.generation,
            wal: 0,
            copied: mark(&known.copied),
            beat: known.beat,
        });
        Memory { known, entries: u64::from(self.entry.is_some()) }
    }
}

impl Database {
    /// Returns a new database, which all processes have looked at.
    #[must_use]
    pub fn new(cluster: Cluster) -> Database {
        Database {
            cluster,
            site: 0,
            noted: 0,
            generation: 1,
            settled: true,
            decisions: Vec::new(),
            rows: [Row { is_back: true, ..Row::default() }; PROCESSES],
        }
    }

    /// Returns what process `at`, which remembers `memory`, sees on a new connection. Identities
    /// and counters that the environment lacks look unchanged.
    #[must_use]
    pub fn shown_to(
        &self,
        at: usize,
        memory: &Memory,
        environment: &Environment,
    ) -> memory::Database {
        let row = self.rows[at];
        let beat = memory.known.map_or(0, |known| known.beat);
        let entries = if environment.entries { row.entries } else { memory.entries };
        memory::Database {
            site: site(self.site, environment),
            wal: 0,
            noted: Some(Noted { site: site(self.noted, environment), generation: self.generation }),
            newest: self.decisions.len() as u64,
            at_copied: self.at_copied(memory),
            own: Some(Own { entries, beat: if environment.beats { row.beat } else { beat } }),
        }
    }

    /// Returns what a transaction of process `at` reads for the ledger's gate.
    #[must_use]
    pub fn read(&self, at: usize, memory: &Memory, environment: &Environment) -> Read {
        let shown = self.shown_to(at, memory, environment);
        Read {
            site: shown.site,
            beat: shown.own.map(|own| own.beat),
            generation: self.generation,
            newest: self.decisions.len() as u64,
            at_copied: self.at_copied(memory),
        }
    }

    fn at_copied(&self, memory: &Memory) -> Option<Hash> {
        let number = usize::try_from(memory.known?.copied.number).ok()?;
        self.decisions.get(..number).filter(|decisions| !decisions.is_empty()).map(chain)
    }

    /// Returns the list that was decided, also if the cluster was retired since.
    #[must_use]
    pub fn commit(&self) -> Option<Hash> {
        let kept = matches!(self.cluster.phase, Phase::Committed | Phase::Formed | Phase::Retired);
        self.cluster.frozen.as_ref().filter(|_| kept).map(|frozen| frozen.h)
    }

    /// Returns the state of the cluster in this database.
    #[must_use]
    pub fn stands(&self) -> memory::Stands {
        memory::Stands {
            phase: Some(self.cluster.phase),
            cause: self.cluster.ended.as_ref().map(|ended| ended.cause),
            commit: self.commit(),
            split: self.cluster.split.is_some(),
        }
    }

    /// Appends the decisions of a transaction.
    pub fn note_decisions(&mut self, outcome: &Outcome) {
        if let Some(h) = outcome.committed {
            self.decisions.push(Entry::Commit { h, document: true });
        }
        // A retirement isn't numbered as an end: the commit has a number and stays.
        let is_end = |change: &Change| match change {
            Change::Ended { phase } => *phase != Phase::Retired,
            _ => false,
        };
        let ended = outcome.changes.iter().any(is_end);
        let cause = self.cluster.ended.as_ref().map(|ended| ended.cause);
        if let (true, Some(cause)) = (ended, cause) {
            self.decisions.push(Entry::End(cause));
        }
    }
}

/// Returns the decision that a transaction is about to make, if a ledger could contradict it.
#[must_use]
pub(super) fn decision(outcome: &Outcome) -> Option<memory::Decision> {
    let adopted = || outcome.changes.iter().any(|change| matches!(change, Change::Adopted { .. }));
    if let Some(h) = outcome.committed {
        return Some(memory::Decision::Commit { h, adopted: adopted() });
    }
    outcome.changes.iter().find_map(|change| match change {
        Change::Frozen { .. } => Some(memory::Decision::Freeze),
        Change::Ended { phase } if *phase != Phase::Retired => Some(memory::Decision::End),
        _ => None,
    })
}

fn site(site: u32, environment: &Environment) -> Site {
    let database = if environment.site { site } else { 0 };
    Site { system: 1, timeline: 1, database, tables: [0; memory::TABLES] }
}

fn mark(decisions: &[Entry]) -> Mark {
    if decisions.is_empty() {
        return Mark::START;
    }
    Mark { number: decisions.len() as u64, hash: chain(decisions) }
}

/// Hash chain over decisions, in place of SHA-256 over each decision and the hash before it.
fn chain(decisions: &[Entry]) -> Hash {
    let link = |hash: [u8; 32], entry: &Entry| {
        let said = match entry {
            Entry::Commit { h, .. } => h.0,
            Entry::End(cause) => [*cause as u8 + 1; 32],
        };
        std::array::from_fn(|at| hash[at].wrapping_mul(31).wrapping_add(said[at] ^ 0x5a))
    };
    Hash(decisions.iter().fold([0; 32], link))
}
