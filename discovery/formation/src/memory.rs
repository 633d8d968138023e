//! Memory of the database: each discovery process keeps one on its own disk, and compares it with
//! the database.
//!
//! A database can be set back in time by a dump that is loaded into a new database or over the old
//! tables. A copy of its files, or an old primary that still answers, has the same effect. Such a
//! database shows a committed cluster as open, and would form it again from other hosts. Its tables
//! don't reveal that, because they are consistent. So each process keeps a *ledger* on its own
//! disk. The process compares its ledger with the database on each new connection, at each sweep
//! and before each decision:
//!
//! * **Identity that no dump carries** ([`DatabaseIdentity`]): server, timeline, database and
//!   tables. The database also stores its identity. So a process with an empty ledger notices a
//!   loaded dump, too: the stored identity comes from the dumped database.
//! * **Values that only grow** ([`HistoryPosition`], [`RememberedDatabase::sweeps`],
//!   [`RememberedDatabase::wal`], [`RememberedDatabase::generation`]). Commits and ends are
//!   numbered and chained by hash, each process counts its sweeps, and the write-ahead log has a
//!   position. A lower value than the remembered one shows that the database was set back. Another
//!   hash at a number that was copied shows another history. A missing row of this process shows
//!   that the dump is older than the row.
//! * **Entries** ([`LedgerEntry`], [`plan_restore`]): a commit or an end in a ledger that the
//!   database lacks.
//!
//! The process that finds a difference begins a new *generation*. Until the generation is settled,
//! nothing is frozen or decided. Tokens from before the generation admit nobody. The generation is
//! settled once every known process has restored its ledger's entries in the database, or an owner
//! has accepted the database. Ledgers are **complete**: each holds every decision that any process
//! has published, at least as a cluster's id and the decided list's hash. So a single remaining
//! process knows which clusters must not form again. [`check_ledger`] ensures that: before a
//! process freezes, decides or ends anything, it copies all earlier decisions that its transaction
//! can see.
//!
//! A ledger may be set back to an older state, too. The database records how many entries each
//! ledger had, and how often its process has swept. A ledger that holds less than that is filled
//! from the database ([`CopyScope::IncompleteLedger`]), and an operator is informed.
//!
//! # What this does not do
//!
//! Two cases go unnoticed:
//!
//! * A database was set back together with every ledger, to a moment at which all of them agreed.
//! * A database was set back in place (its files, or rows in the same tables) while a process was
//!   down or cut off. The backup is younger than that process's last sweep, so the process's ledger
//!   holds no decision that the backup lacks. Only waiting for all other processes could prevent
//!   this case. The exploration shows that two clusters can then form.
//!
//! In these cases only the rules of the hosts prevent a second cluster: see the crate's own
//! documentation.

use std::fmt;

use crate::service::{EndCause, Phase};
use crate::values::Hash;

/// Identity of one database, made of values that no dump carries. Two identities are equal or
/// differ; no identity is older than another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DatabaseIdentity {
    /// Postgres system identifier of the server.
    pub system: u64,
    /// Timeline of the write-ahead log: a recovery or a promotion begins a new one.
    pub timeline: u32,
    /// Object id of the database: it changes with DROP and CREATE.
    pub database: u32,
    /// Object ids of the core tables, in a fixed order: they change if a dump is loaded over them.
    pub tables: [u32; CORE_TABLES],
}

/// Number of tables that [`DatabaseIdentity::tables`] names.
pub const CORE_TABLES: usize = 4;

/// Position in a database's history: the number of the newest decision, and a hash over all
/// decisions up to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HistoryPosition {
    /// Number of the decision: commits and ends are counted from 1 on.
    pub number: u64,
    /// Hash over this decision and the hash before it.
    pub hash: Hash,
}

impl HistoryPosition {
    /// Position before the first decision.
    pub const START: HistoryPosition = HistoryPosition { number: 0, hash: Hash([0; 32]) };
}

/// Values that a process remembers of the database it last worked with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RememberedDatabase {
    /// Identity of the database.
    pub identity: DatabaseIdentity,
    /// Generation of the database (its history as the processes agree on it) when this process last
    /// saw it.
    pub generation: u64,
    /// Position in the write-ahead log, in bytes, when this process last saw the database.
    pub wal: u64,
    /// Position of the newest decision in the ledger, which holds every earlier decision as well.
    pub last_copied: HistoryPosition,
    /// Number of periodic sweeps that this process has made, according to its row in the database.
    pub sweeps: u64,
}

/// The part of a ledger that is compared with a database.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LedgerSummary {
    /// Database that the process last worked with; `None` if it never saw one.
    pub database: Option<RememberedDatabase>,
    /// Number of commits in the ledger.
    pub entries: u64,
}

/// State of the database behind a connection, read in one snapshot. The [`LedgerSummary`] that it
/// is compared with must be read earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObservedDatabase {
    /// Identity of the database that the connection leads to.
    pub identity: DatabaseIdentity,
    /// Current position in the write-ahead log, in bytes.
    pub wal: u64,
    /// Identity and generation that the database has stored; `None` if the database is new.
    pub stored: Option<StoredGeneration>,
    /// Number of the newest decision in the database.
    pub newest: u64,
    /// Hash of the decision that the ledger copied last; `None` if the database lacks that
    /// decision.
    pub hash_at_last_copied: Option<Hash>,
    /// Row of the process that made the connection; `None` if the database has no such row.
    pub process_row: Option<ProcessRow>,
}

/// Identity and generation that a database has stored about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredGeneration {
    /// Identity that the database had when its current generation (its history as the processes
    /// agree on it) began.
    pub identity: DatabaseIdentity,
    /// Number of the generation. A process that finds a difference from its ledger begins the next
    /// one.
    pub generation: u64,
}

/// Row of a process in the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessRow {
    /// Number of commits that the process's ledger held.
    pub entries: u64,
    /// Number of periodic sweeps that the process had made.
    pub sweeps: u64,
}

/// Evidence that a database is not the one that a process has worked with, or was set back to an
/// older state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DatabaseDifference {
    /// The database is empty, but this process has worked with a database that had content.
    Empty,
    /// The database is on another server.
    Server,
    /// The timeline of the write-ahead log differs, after a failover or a recovery.
    Timeline {
        /// Timeline of the database that was known before.
        was: u32,
        /// Timeline that was found now.
        is: u32,
    },
    /// A dump was loaded into another database, or over the tables of this one.
    DumpLoaded,
    /// The database lacks a generation that a process had begun.
    Generation {
        /// Generation that this process remembers.
        was: u64,
        /// Generation that the database has now.
        is: u64,
    },
    /// The write-ahead log ends before a position that this process has seen.
    WalPosition,
    /// The database lacks decisions that this process had copied from it into its ledger.
    Decisions {
        /// Number of decisions that this process remembers.
        was: u64,
        /// Number of decisions that were found now.
        is: u64,
    },
    /// A decision in the database differs from the decision of the same number that was copied into
    /// the ledger.
    History {
        /// Number of the decision that differs.
        at: u64,
    },
    /// The database has no row of this process, although it had one before.
    MissingProcess,
    /// The database shows fewer periodic sweeps of this process than the process has made.
    Sweeps {
        /// Number of sweeps that this process remembers.
        was: u64,
        /// Number of sweeps that the database shows now.
        is: u64,
    },
}

impl fmt::Display for DatabaseDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DatabaseDifference::Empty => {
                f.write_str("it is empty, and this process has worked with one that wasn't")
            }
            DatabaseDifference::Server => {
                f.write_str("it was moved to another server: the system identifier differs")
            }
            DatabaseDifference::Timeline { was, is } => {
                write!(f, "a failover or a restore: timeline {is} instead of {was}")
            }
            DatabaseDifference::DumpLoaded => {
                f.write_str("a dump: it was loaded into another database, or over these tables")
            }
            DatabaseDifference::Generation { was, is } => {
                write!(f, "a backup: generation {is}, and {was} was seen before")
            }
            DatabaseDifference::WalPosition => {
                f.write_str("a backup: its log ends before what was seen of it")
            }
            DatabaseDifference::Decisions { was, is } => {
                write!(f, "a backup: {is} decisions, and {was} were seen before")
            }
            DatabaseDifference::History { at } => {
                write!(f, "a backup, from which it went another way: decision {at} is another one")
            }
            DatabaseDifference::MissingProcess => {
                f.write_str("a backup: it doesn't know this process, which joined later")
            }
            DatabaseDifference::Sweeps { was, is } => {
                write!(f, "a backup: sweep {is} of this process, and {was} was seen before")
            }
        }
    }
}

/// Decisions that a ledger has to copy from the database with which it was compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CopyScope {
    /// Decisions after [`RememberedDatabase::last_copied`], if there are any.
    NewDecisions,
    /// All decisions, because the ledger has copied none of this history yet. The ledger's entries
    /// also have to be compared with the database ([`plan_restore`]).
    NewHistory,
    /// All decisions, because the ledger has fewer entries or sweeps than the database has recorded
    /// for it. So the ledger was set back to an older state, and an operator must be informed.
    IncompleteLedger,
}

/// Checks whether `database` is the one that the process last saw. Returns which decisions the
/// ledger has to copy from it.
///
/// # Errors
/// The difference from the remembered database. The caller then begins a new generation, in which
/// no list is frozen before all ledgers agree with the database.
pub fn compare(
    memory: &LedgerSummary,
    database: &ObservedDatabase,
) -> Result<CopyScope, DatabaseDifference> {
    let Some(stored) = &database.stored else {
        return match (memory.database, memory.entries) {
            (None, 0) => Ok(CopyScope::NewHistory),
            _ => Err(DatabaseDifference::Empty),
        };
    };
    if let Some(moved) = identity_difference(&stored.identity, &database.identity) {
        return Err(moved);
    }
    let older =
        |own: &ProcessRow, sweeps: u64| own.entries > memory.entries || own.sweeps > sweeps + 1;
    let Some(known) = &memory.database else {
        let lost = database.process_row.is_some_and(|own| older(&own, 0));
        return Ok(if lost { CopyScope::IncompleteLedger } else { CopyScope::NewHistory });
    };
    if stored.generation < known.generation {
        return Err(DatabaseDifference::Generation {
            was: known.generation,
            is: stored.generation,
        });
    }
    // A higher generation means that another process has found a change of the database. The values
    // that this process remembers then belong to an earlier history, so they aren't compared. The
    // new generation isn't settled before this process has restored its ledger's entries.
    let same = stored.generation == known.generation;
    if same && let Some(moved) = identity_difference(&known.identity, &database.identity) {
        return Err(moved);
    }
    let Some(own) = &database.process_row else { return Err(DatabaseDifference::MissingProcess) };
    if same {
        if own.sweeps < known.sweeps {
            return Err(DatabaseDifference::Sweeps { was: known.sweeps, is: own.sweeps });
        }
        check_history(known, database.newest, database.hash_at_last_copied)?;
        if database.wal < known.wal {
            return Err(DatabaseDifference::WalPosition);
        }
    }
    Ok(match (older(own, known.sweeps), same) {
        (true, _) => CopyScope::IncompleteLedger,
        (false, true) => CopyScope::NewDecisions,
        (false, false) => CopyScope::NewHistory,
    })
}

/// Returns whether another process with this process's id is running, on a copy of this ledger. Two
/// facts show that: another run was the last to write the process's row (`is_ours` is false), and
/// the row counts more sweeps than this run has made.
///
/// In a database that was set back, the row can also be from an earlier run. But such a row counts
/// no more sweeps than this run has made, because each run counts its start as a sweep.
#[must_use]
pub fn is_running_elsewhere(known: &RememberedDatabase, own: &ProcessRow, is_ours: bool) -> bool {
    !is_ours && own.sweeps > known.sweeps
}

fn identity_difference(
    was: &DatabaseIdentity,
    is: &DatabaseIdentity,
) -> Option<DatabaseDifference> {
    if was.system != is.system {
        return Some(DatabaseDifference::Server);
    }
    if was.timeline != is.timeline {
        return Some(DatabaseDifference::Timeline { was: was.timeline, is: is.timeline });
    }
    (was != is).then_some(DatabaseDifference::DumpLoaded)
}

fn check_history(
    known: &RememberedDatabase,
    newest: u64,
    at_copied: Option<Hash>,
) -> Result<(), DatabaseDifference> {
    let copied = known.last_copied;
    if newest < copied.number {
        return Err(DatabaseDifference::Decisions { was: copied.number, is: newest });
    }
    if copied.number > 0 && at_copied != Some(copied.hash) {
        return Err(DatabaseDifference::History { at: copied.number });
    }
    Ok(())
}

/// Facts about the database that a transaction on one cluster reads, under that cluster's lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatabaseFacts {
    /// Identity of the database that the connection leads to.
    pub identity: DatabaseIdentity,
    pub generation: u64,
    /// Number of the newest decision in the database.
    pub newest: u64,
    /// Hash of the decision that the ledger copied last; `None` if the database lacks that
    /// decision.
    pub hash_at_last_copied: Option<Hash>,
    /// Number of periodic sweeps in this process's row; `None` if the process has no row.
    pub sweeps: Option<u64>,
}

/// Whether a transaction may freeze, decide or end a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LedgerVerdict {
    /// The transaction may go on.
    Allowed,
    /// The process must first copy into its ledger the decisions that the ledger lacks, in this
    /// very transaction.
    CopyFirst,
    /// The process must first compare the database with its ledger: another process has found a
    /// change, or this process has not compared them yet.
    CompareFirst,
    /// The connection can't be used: it leads to an older state of the database.
    OlderDatabase(DatabaseDifference),
}

/// Decides whether a transaction may freeze, decide or end anything, given the facts that it has
/// `read`. A pooled connection may lead to a replaced primary, or to tables that were set back. If
/// no decision was copied from such tables, only the database's identity and the sweep counter show
/// that they were replaced.
#[must_use]
pub fn check_ledger(known: Option<&RememberedDatabase>, read: &DatabaseFacts) -> LedgerVerdict {
    let Some(known) = known else { return LedgerVerdict::CompareFirst };
    if read.generation < known.generation {
        let (was, is) = (known.generation, read.generation);
        return LedgerVerdict::OlderDatabase(DatabaseDifference::Generation { was, is });
    }
    if read.generation > known.generation {
        return LedgerVerdict::CompareFirst;
    }
    if let Some(moved) = identity_difference(&known.identity, &read.identity) {
        return LedgerVerdict::OlderDatabase(moved);
    }
    match read.sweeps {
        None => return LedgerVerdict::OlderDatabase(DatabaseDifference::MissingProcess),
        Some(is) if is < known.sweeps => {
            return LedgerVerdict::OlderDatabase(DatabaseDifference::Sweeps {
                was: known.sweeps,
                is,
            });
        }
        Some(_) => {}
    }
    match check_history(known, read.newest, read.hash_at_last_copied) {
        Err(difference) => LedgerVerdict::OlderDatabase(difference),
        Ok(()) if read.newest > known.last_copied.number => LedgerVerdict::CopyFirst,
        Ok(()) => LedgerVerdict::Allowed,
    }
}

/// Decision about one cluster, as a ledger holds it. A commit takes precedence over an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LedgerEntry {
    /// The cluster has committed a list of members.
    Commit {
        /// Hash of the committed list.
        h: Hash,
        /// Whether this ledger holds the commit document. Otherwise only another process's ledger
        /// does.
        document: bool,
    },
    /// The cluster ended without a commit.
    End(EndCause),
}

/// State of a cluster in a database that is compared with a ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterInDatabase {
    /// Phase of the cluster; `None` for a draft, which has no statement yet.
    pub phase: Option<Phase>,
    /// Reason for which the cluster ended, if it has.
    pub cause: Option<EndCause>,
    /// Hash of the list that the cluster has committed, if any.
    pub commit: Option<Hash>,
    /// Whether the cluster has a second valid commit document, with another list of members than
    /// the first.
    pub is_split: bool,
}

/// Action that restores one entry of a ledger in the database, before lists may be frozen again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RestoreAction {
    /// Nothing is done: the database can't contradict the entry.
    Nothing,
    /// The ledger's commit document is stored in the database again.
    Adopt,
    /// The cluster is ended as `db accept` ends one, so that it forms no other list of members. It
    /// has committed a list whose commit document isn't in this ledger. As soon as an agent or
    /// another ledger supplies that document, the cluster comes back.
    Close,
    /// The cluster is ended again, for this reason.
    End(EndCause),
}

/// Decides how to restore `entry` in the database, if the database could otherwise contradict it.
/// `stands` is the cluster's state in the database; `None` if the database lacks the cluster.
/// `refused` is true if the database has refused the entry before. Such an entry is tried again
/// only if the cluster could still form.
#[must_use]
pub fn plan_restore(
    entry: LedgerEntry,
    stands: Option<&ClusterInDatabase>,
    refused: bool,
) -> RestoreAction {
    let document = matches!(entry, LedgerEntry::Commit { document: true, .. });
    let Some(stands) = stands else {
        return if document && !refused { RestoreAction::Adopt } else { RestoreAction::Nothing };
    };
    let forms = matches!(stands.phase, None | Some(Phase::Open | Phase::Preparing));
    match entry {
        // An expiry needs no restoring, because the database contains the cluster's deadline. If an
        // owner has reopened the cluster, the database has a later deadline, and the cluster may
        // form until then.
        LedgerEntry::End(EndCause::Deadline) => RestoreAction::Nothing,
        LedgerEntry::End(cause) if forms => RestoreAction::End(cause),
        LedgerEntry::End(_) => RestoreAction::Nothing,
        LedgerEntry::Commit { h, .. } if stands.commit == Some(h) || stands.is_split => {
            RestoreAction::Nothing
        }
        LedgerEntry::Commit { .. } if forms && document => RestoreAction::Adopt,
        LedgerEntry::Commit { .. } if forms => RestoreAction::Close,
        // Adopt the commit document in two cases. A cluster that `db accept` has ended comes back.
        // A cluster that committed another list has split, and adopting raises the alarm. A cluster
        // that has ended for any other reason stays ended, which contradicts no ledger.
        LedgerEntry::Commit { .. } => {
            let may = stands.commit.is_some() || stands.cause == Some(EndCause::DatabaseAccepted);
            if document && may && !refused { RestoreAction::Adopt } else { RestoreAction::Nothing }
        }
    }
}

/// Whether a ledger's entry for a cluster forbids `step`, which is about to freeze a list of
/// members, decide a list, or end the cluster.
#[must_use]
pub fn contradicts(entry: Option<LedgerEntry>, step: ClusterDecision) -> bool {
    match (entry, step) {
        // An entry about an expiry forbids nothing. The expired cluster had decided nothing, and an
        // owner may have reopened it.
        (None | Some(LedgerEntry::End(EndCause::Deadline)), _) => false,
        (Some(LedgerEntry::Commit { h, .. }), ClusterDecision::Commit { h: decided, .. }) => {
            h != decided
        }
        (Some(LedgerEntry::Commit { .. }), ClusterDecision::Freeze | ClusterDecision::End) => true,
        // A commit contradicts the end of a cluster, with one exception: a commit document brings
        // back a cluster that `db accept` has ended.
        (Some(LedgerEntry::End(cause)), ClusterDecision::Commit { adopted, .. }) => {
            !(adopted && cause == EndCause::DatabaseAccepted)
        }
        (Some(LedgerEntry::End(_)), step) => step == ClusterDecision::Freeze,
    }
}

/// Step of a transaction that [`check_ledger`] has to allow first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterDecision {
    /// The service freezes a list of members.
    Freeze,
    /// The service decides a list of members.
    Commit {
        /// Hash of the decided list.
        h: Hash,
        /// Whether a host's commit document proves the decision, rather than acks in the database.
        adopted: bool,
    },
    /// A cluster ends before it committed.
    End,
}

#[cfg(test)]
mod tests;
