//! Databases, and what discovery processes remember of them in their ledgers. Uses the types of the
//! production code ([`formation_explored::memory`]), with small numbers in place of large ones.

use std::sync::Arc;

use formation_explored::Hash;
use formation_explored::memory::{
    self, DatabaseFacts, DatabaseIdentity, HistoryPosition, LedgerEntry, LedgerSummary, ProcessRow,
    RememberedDatabase, StoredGeneration,
};
use formation_explored::service::{Cluster, ClusterChange, EndCause, Phase, StepOutcome};

use crate::explore::config::Environment;

/// Number of discovery processes that share the database.
pub(super) const PROCESSES: usize = 2;

/// Contents and identity of a database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatabaseState {
    /// Row of the cluster, as [`normalise`](crate::explore::state::normalise) leaves it.
    pub cluster: Cluster,
    /// Identity of the database, which no dump carries.
    pub identity: u32,
    /// Identity that the database had when its generation (its history as the processes agree on
    /// it) began.
    pub recorded_identity: u32,
    /// Number of the database's generation; grows each time a process finds a changed database.
    pub generation: u64,
    /// Whether every process has restored its ledger's entries in the database since the database
    /// last changed.
    pub settled: bool,
    /// Decisions about the cluster in their order, numbered from 1: commits and ends.
    pub decisions: Vec<LedgerEntry>,
    /// Row of each process in the table of processes.
    pub rows: [ProcessTableRow; PROCESSES],
}

/// One process's row in the database.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessTableRow {
    /// Number of entries in the process's ledger when the process last examined the database.
    pub entries: u64,
    /// Number of the process's periodic sweeps.
    pub sweep_count: u64,
    /// Whether the process has restored its ledger's entries in this generation of the database.
    pub has_restored_ledger: bool,
    /// Whether an owner has declared that the process won't come back.
    pub is_forgotten: bool,
}

/// One discovery process, with its disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessState {
    /// The ledger on the process's disk.
    pub ledger: Ledger,
    /// Older copy of the ledger, which may later replace it.
    pub saved: Option<Ledger>,
    /// Whether the process has examined the database to which its present connections lead.
    pub connected: bool,
    /// Whether the process is lost for good.
    pub is_lost: bool,
    /// Database state that an unfinished transaction has read; needs `row_lock` switched off.
    pub read: Option<Arc<DatabaseState>>,
}

/// A process's ledger and the position beside it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    /// The ledger's entry about the cluster, if it has one.
    pub entry: Option<LedgerEntry>,
    /// Database that the process last worked with, and the decisions copied from it.
    pub position: Option<LedgerPosition>,
}

/// Position beside a ledger: the values that the process remembers of its database. It corresponds
/// to [`RememberedDatabase`], but has the decisions themselves instead of their hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LedgerPosition {
    /// Identity of the database.
    pub identity: u32,
    /// Generation of the database when the process last worked with it.
    pub generation: u64,
    /// Decisions of the database up to the last one that was copied.
    pub copied_decisions: Vec<LedgerEntry>,
    /// Number of periodic sweeps that this process had made when it last examined the database.
    pub sweep_count: u64,
}

impl Ledger {
    /// Stores `entry`, unless the ledger holds a stronger one. A commit is stronger than an end,
    /// and any other end is stronger than an expiry. A commit with its commit document is stronger
    /// than the same commit without it.
    pub fn record(&mut self, entry: LedgerEntry) {
        let is_stronger = match (self.entry, entry) {
            (None, _) => true,
            (Some(LedgerEntry::End(_)), LedgerEntry::Commit { .. })
            | (Some(LedgerEntry::End(EndCause::Deadline)), LedgerEntry::End(_)) => true,
            (
                Some(LedgerEntry::Commit { h, document }),
                LedgerEntry::Commit { h: new, document: whole },
            ) => h == new && whole && !document,
            (Some(_), _) => false,
        };
        if is_stronger {
            self.entry = Some(entry);
        }
    }

    /// Returns the summary of the ledger that the production code compares with a database. The WAL
    /// position is always 0, because it proves nothing: a restored database may have written more
    /// than the lost one.
    #[must_use]
    pub fn summary(&self, environment: &Environment) -> LedgerSummary {
        let known = self.position.as_ref().map(|known| RememberedDatabase {
            identity: database_identity(known.identity, environment),
            generation: known.generation,
            wal: 0,
            last_copied: position_after(&known.copied_decisions),
            sweeps: known.sweep_count,
        });
        LedgerSummary { database: known, entries: u64::from(self.entry.is_some()) }
    }
}

impl DatabaseState {
    /// Returns a new database that all processes have already examined.
    #[must_use]
    pub fn new(cluster: Cluster) -> DatabaseState {
        DatabaseState {
            cluster,
            identity: 0,
            recorded_identity: 0,
            generation: 1,
            settled: true,
            decisions: Vec::new(),
            rows: [ProcessTableRow { has_restored_ledger: true, ..ProcessTableRow::default() };
                PROCESSES],
        }
    }

    /// Returns what the process with index `at` sees on a new connection. `summary` is what the
    /// process remembers. If `environment` has no database identity, all databases look like the
    /// same one. If `environment` lacks a counter (sweeps, ledger entries), the result has the
    /// value that `summary` remembers.
    #[must_use]
    pub fn observe(
        &self,
        at: usize,
        summary: &LedgerSummary,
        environment: &Environment,
    ) -> memory::ObservedDatabase {
        let row = self.rows[at];
        let sweeps = summary.database.map_or(0, |known| known.sweeps);
        let entries = if environment.has_entry_counts { row.entries } else { summary.entries };
        memory::ObservedDatabase {
            identity: database_identity(self.identity, environment),
            wal: 0,
            stored: Some(StoredGeneration {
                identity: database_identity(self.recorded_identity, environment),
                generation: self.generation,
            }),
            newest: self.decisions.len() as u64,
            hash_at_last_copied: self.hash_at_position(summary),
            process_row: Some(ProcessRow {
                entries,
                sweeps: if environment.has_sweep_counters { row.sweep_count } else { sweeps },
            }),
        }
    }

    /// Returns what a transaction of the process with index `at` reads, in order to check a
    /// decision against the ledger.
    #[must_use]
    pub fn read(
        &self,
        at: usize,
        summary: &LedgerSummary,
        environment: &Environment,
    ) -> DatabaseFacts {
        let observed = self.observe(at, summary, environment);
        DatabaseFacts {
            identity: observed.identity,
            sweeps: observed.process_row.map(|own| own.sweeps),
            generation: self.generation,
            newest: self.decisions.len() as u64,
            hash_at_last_copied: self.hash_at_position(summary),
        }
    }

    fn hash_at_position(&self, summary: &LedgerSummary) -> Option<Hash> {
        let number = usize::try_from(summary.database?.last_copied.number).ok()?;
        self.decisions.get(..number).filter(|decisions| !decisions.is_empty()).map(chain)
    }

    /// Returns the decided list of members, even if the cluster was retired since.
    #[must_use]
    pub fn decided_list(&self) -> Option<Hash> {
        let kept = matches!(self.cluster.phase, Phase::Committed | Phase::Formed | Phase::Retired);
        self.cluster.frozen.as_ref().filter(|_| kept).map(|frozen| frozen.proposal_hash)
    }

    /// Returns the state of the cluster in this database.
    #[must_use]
    pub fn cluster_state(&self) -> memory::ClusterInDatabase {
        memory::ClusterInDatabase {
            phase: Some(self.cluster.phase),
            cause: self.cluster.ended.as_ref().map(|ended| ended.cause),
            commit: self.decided_list(),
            is_split: self.cluster.split.is_some(),
        }
    }

    /// Appends the decisions of a transaction.
    pub fn append_decisions(&mut self, outcome: &StepOutcome) {
        if let Some(h) = outcome.committed {
            self.decisions.push(LedgerEntry::Commit { h, document: true });
        }
        // A retirement isn't appended as an end, because the commit remains the last decision.
        let is_end = |change: &ClusterChange| match change {
            ClusterChange::Ended { phase } => *phase != Phase::Retired,
            _ => false,
        };
        let ended = outcome.changes.iter().any(is_end);
        let cause = self.cluster.ended.as_ref().map(|ended| ended.cause);
        if let (true, Some(cause)) = (ended, cause) {
            self.decisions.push(LedgerEntry::End(cause));
        }
    }
}

/// Returns the decision that a transaction is about to make, if a ledger could contradict it.
#[must_use]
pub(super) fn decision(outcome: &StepOutcome) -> Option<memory::ClusterDecision> {
    let adopted =
        || outcome.changes.iter().any(|change| matches!(change, ClusterChange::Adopted { .. }));
    if let Some(h) = outcome.committed {
        return Some(memory::ClusterDecision::Commit { h, adopted: adopted() });
    }
    outcome.changes.iter().find_map(|change| match change {
        ClusterChange::Frozen { .. } => Some(memory::ClusterDecision::Freeze),
        ClusterChange::Ended { phase } if *phase != Phase::Retired => {
            Some(memory::ClusterDecision::End)
        }
        _ => None,
    })
}

fn database_identity(identity: u32, environment: &Environment) -> DatabaseIdentity {
    let database = if environment.has_database_identity { identity } else { 0 };
    DatabaseIdentity { system: 1, timeline: 1, database, tables: [0; memory::CORE_TABLES] }
}

fn position_after(decisions: &[LedgerEntry]) -> HistoryPosition {
    if decisions.is_empty() {
        return HistoryPosition::START;
    }
    HistoryPosition { number: decisions.len() as u64, hash: chain(decisions) }
}

/// Hash chain over decisions, in place of SHA-256 over each decision and the hash before it.
fn chain(decisions: &[LedgerEntry]) -> Hash {
    let link = |hash: [u8; 32], entry: &LedgerEntry| {
        let decision_hash = match entry {
            LedgerEntry::Commit { h, .. } => h.0,
            LedgerEntry::End(cause) => [*cause as u8 + 1; 32],
        };
        std::array::from_fn(|at| hash[at].wrapping_mul(31).wrapping_add(decision_hash[at] ^ 0x5a))
    };
    Hash(decisions.iter().fold([0; 32], link))
}
