//! Databases, and what discovery processes remember of them outside: the production code's words
//! ([`formation_explored::memory`]), with small numbers in the places of large ones.

use std::sync::Arc;

use formation_explored::Hash;
use formation_explored::memory::{self, Entry, Known, Mark, Memory, Noted, Own, Read, Site};
use formation_explored::service::{Change, Cluster, Outcome, Phase};

use crate::explore::config::Environment;

/// How many discovery processes share the database.
pub(super) const PROCESSES: usize = 2;

/// What a database holds, and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Database {
    /// The row, in the normal form of [`normalise`](crate::explore::world::normalise).
    pub cluster: Cluster,
    /// Which database this is: what no dump carries.
    pub site: u32,
    /// Where it was when its generation began.
    pub noted: u32,
    /// Grows with each change that was found.
    pub generation: u64,
    /// Every process has put its ledger back since the last change.
    pub settled: bool,
    /// Commits and ends, numbered from 1 on.
    pub decisions: Vec<Entry>,
    /// What stands in it about each process.
    pub rows: [Row; PROCESSES],
}

/// A process's row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Row {
    /// What its ledger held when it last looked.
    pub entries: u64,
    /// How often it has swept.
    pub beat: u64,
    /// It has put its ledger back into this generation.
    pub is_back: bool,
    /// An owner has said that it won't come back.
    pub is_forgotten: bool,
}

/// A discovery process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// What is on its disk.
    pub ledger: Ledger,
    /// An older copy of that, which somebody may put back.
    pub saved: Option<Ledger>,
    /// It has looked at the database that its connections lead to.
    pub connected: bool,
    /// It is lost for good.
    pub is_gone: bool,
    /// Without row lock: what a transaction under way has read.
    pub read: Option<Arc<Database>>,
}

/// A process's ledger and the position beside it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    /// What it holds of the cluster.
    pub entry: Option<Entry>,
    /// The database that it last worked with.
    pub known: Option<Remembered>,
}

/// [`Known`], with the decisions themselves in the site of their hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remembered {
    /// Which database.
    pub site: u32,
    /// Its generation.
    pub generation: u64,
    /// Its decisions up to the last one that was copied.
    pub copied: Vec<Entry>,
    /// How often this process had swept.
    pub beat: u64,
}

impl Ledger {
    /// Puts `entry` in, unless what is there says more: a commit stands above an end, a document
    /// above a hash.
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

    /// As it is compared. Logs of a database prove nothing here: a restored one may have come far.
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
    /// A new one, with processes that have all looked at it.
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

    /// What process `at`, which remembers `memory`, finds on a connection. What the environment
    /// lacks looks as if nothing had ever changed.
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

    /// What a transaction of process `at` reads for the gate.
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

    /// The list that has been decided, whatever has become of the cluster since.
    #[must_use]
    pub fn commit(&self) -> Option<Hash> {
        let kept = matches!(self.cluster.phase, Phase::Committed | Phase::Formed | Phase::Retired);
        self.cluster.frozen.as_ref().filter(|_| kept).map(|frozen| frozen.h)
    }

    /// How the cluster stands in it.
    #[must_use]
    pub fn stands(&self) -> memory::Stands {
        memory::Stands {
            phase: Some(self.cluster.phase),
            cause: self.cluster.ended.as_ref().map(|ended| ended.cause),
            commit: self.commit(),
            split: self.cluster.split.is_some(),
        }
    }

    /// Writes down what a transaction has decided.
    pub fn note_decisions(&mut self, outcome: &Outcome) {
        if let Some(h) = outcome.committed {
            self.decisions.push(Entry::Commit { h, document: true });
        }
        // A retirement is no end that is numbered: its commit is, and stays.
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

/// What a transaction is about to decide, if it is anything that a ledger could speak against.
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

/// Stands for SHA-256 over a decision and the hash before it.
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
