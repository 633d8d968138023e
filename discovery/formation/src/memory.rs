//! What one discovery process remembers of its database, outside of it, and what follows when the
//! two are compared.
//!
//! A database can be set back: a dump loaded into a new database or over the old tables, a copy of
//! its files put in their place, an old primary that still answers. Each of them shows a cluster
//! open that has committed since, and would form it again from other hosts. Nothing inside a
//! database can tell, for all of it is as it was; so each process keeps a *ledger* on its own disk
//! and asks, on each new connection, at each sweep and before each decision, what stands here.
//!
//! * **What no dump carries** ([`Site`]): which server, timeline, database and tables these are.
//!   It is noted in the database too, so that a process whose ledger is empty sees that a dump was
//!   loaded: what is noted in it is of the site where it was taken.
//! * **What only grows** ([`Mark`], [`Known::beat`], [`Known::wal`], [`Known::generation`]): commits
//!   and ends are numbered and chained by hash, each process counts its sweeps, the log has a
//!   position. Less of any of them than is remembered is the past; another hash at a number that
//!   was copied is another history. A row of one's own that isn't there any more is the past as well:
//!   so is noticed what a dump forgot of a process that joined after it.
//! * **What stands in it** ([`Entry`], [`put_back`]): a commit in a ledger that the database lacks.
//!
//! Whoever finds a difference begins a new *generation*: nothing is frozen or decided in it, and no
//! token from before admits anybody, until every known process has put its ledger back or an owner
//! has decided. Ledgers are **complete**: each holds what every other one let out, if only as a
//! cluster's id and hash, so one process that is left knows which clusters must not form again.
//! [`gate`] is why it is so when it matters: who is about to freeze, decide or end anything has
//! copied everything before it that this very transaction can see.
//!
//! A ledger, too, may be put back to an older state. The database says how much was in it and how
//! often its process has swept; one that holds less is filled from the database ([`Fill::All`]), and
//! somebody is told.
//!
//! # What this does not do
//!
//! It can't see a database that was set back together with every ledger, to a moment at which all of
//! this agreed; nor one set back in its own place (its files, or rows in the same tables) to a backup
//! that is younger than this process's last sweep, by a process that has heard of nothing decided
//! since: one that was down, or cut off. It then knows no more than the backup does, and could only
//! wait for every other process to say the same; the exploration finds two clusters there. What is
//! left then are the hosts: see the crate's own essay.

use std::fmt;

use crate::service::{EndCause, Phase};
use crate::values::Hash;

/// What tells one database from another, and no dump carries. Compared, never ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Site {
    /// The server's system identifier.
    pub system: u64,
    /// Of its write-ahead log: a recovery or a promotion begins a new one.
    pub timeline: u32,
    /// The database's object id: another one after DROP and CREATE.
    pub database: u32,
    /// Its core tables' object ids, in a fixed order: others after a dump was loaded over them.
    pub tables: [u32; TABLES],
}

/// How many tables [`Site::tables`] names.
pub const TABLES: usize = 4;

/// A point in a database's history: its newest decision, and the hash that chains all up to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mark {
    /// Counts commits and ends, from 1 on.
    pub number: u64,
    /// Over this decision and the hash before it.
    pub hash: Hash,
}

impl Mark {
    /// Before the first decision.
    pub const START: Mark = Mark { number: 0, hash: Hash([0; 32]) };
}

/// What a process remembers of the database that it last worked with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Known {
    /// Which one.
    pub site: Site,
    /// Its generation then.
    pub generation: u64,
    /// How far its log had come, in bytes.
    pub wal: u64,
    /// Everything up to here is in the ledger.
    pub copied: Mark,
    /// How often this process had swept, as its row said.
    pub beat: u64,
}

/// A ledger, as far as it is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Memory {
    /// `None`: it never saw a database.
    pub known: Option<Known>,
    /// How many commits it holds.
    pub entries: u64,
}

/// What a connection finds, read in one snapshot, [`Memory`] having been read before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Database {
    /// Where it is.
    pub site: Site,
    /// How far its log has come.
    pub wal: u64,
    /// What it says of itself; `None`: it is new.
    pub noted: Option<Noted>,
    /// The number of its newest decision.
    pub newest: u64,
    /// The hash at the number that the ledger has copied; `None`: there is no such decision.
    pub at_copied: Option<Hash>,
    /// The asking process's own row.
    pub own: Option<Own>,
}

/// What stands in a database about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noted {
    /// Where it was when its generation began.
    pub site: Site,
    /// Grows with each change that was found.
    pub generation: u64,
}

/// A process's own row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Own {
    /// How many commits its ledger held.
    pub entries: u64,
    /// How often it had swept.
    pub beat: u64,
}

/// Why a database is not the one that was known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Difference {
    /// New, and this process has worked with one that wasn't.
    Empty,
    /// Another server.
    Server,
    /// A failover, or a recovery.
    Timeline {
        /// As noted.
        was: u32,
        /// As found.
        is: u32,
    },
    /// A dump, loaded into another database or over the tables of this one.
    Loaded,
    /// It has forgotten a change that was found before.
    Generation {
        /// As remembered.
        was: u64,
        /// As found.
        is: u64,
    },
    /// Its log ends before what was seen of it.
    Log,
    /// It lacks decisions that were copied out of it.
    Decisions {
        /// As remembered.
        was: u64,
        /// As found.
        is: u64,
    },
    /// It has come to a number that was copied by other decisions.
    History {
        /// The number.
        at: u64,
    },
    /// It doesn't know this process, which it knew.
    Process,
    /// It has seen fewer sweeps of this process than there were.
    Beat {
        /// As remembered.
        was: u64,
        /// As found.
        is: u64,
    },
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Difference::Empty => {
                f.write_str("it is empty, and this process has worked with one that wasn't")
            }
            Difference::Server => {
                f.write_str("it was moved to another server: the system identifier differs")
            }
            Difference::Timeline { was, is } => {
                write!(f, "a failover or a restore: timeline {is} instead of {was}")
            }
            Difference::Loaded => {
                f.write_str("a dump: it was loaded into another database, or over these tables")
            }
            Difference::Generation { was, is } => {
                write!(f, "a backup: generation {is}, and {was} was seen before")
            }
            Difference::Log => f.write_str("a backup: its log ends before what was seen of it"),
            Difference::Decisions { was, is } => {
                write!(f, "a backup: {is} decisions, and {was} were seen before")
            }
            Difference::History { at } => {
                write!(f, "a backup, from which it went another way: decision {at} is another one")
            }
            Difference::Process => {
                f.write_str("a backup: it doesn't know this process, which joined later")
            }
            Difference::Beat { was, is } => {
                write!(f, "a backup: sweep {is} of this process, and {was} was seen before")
            }
        }
    }
}

/// What a ledger lacks of the database that it was compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fill {
    /// What follows [`Known::copied`], if anything does.
    New,
    /// The database's history is new to it: everything, and its entries are to be compared with what
    /// stands there ([`put_back`]).
    Other,
    /// The ledger is older than the database says that it was: everything, and a person must hear
    /// of it.
    All,
}

/// Is this the database that was last seen?
///
/// # Errors
/// How it differs: a new generation begins, and waits for all ledgers.
pub fn compare(memory: &Memory, database: &Database) -> Result<Fill, Difference> {
    let Some(noted) = &database.noted else {
        return match (memory.known, memory.entries) {
            (None, 0) => Ok(Fill::Other),
            _ => Err(Difference::Empty),
        };
    };
    if let Some(moved) = moved(&noted.site, &database.site) {
        return Err(moved);
    }
    let older = |own: &Own, beat: u64| own.entries > memory.entries || own.beat > beat + 1;
    let Some(known) = &memory.known else {
        let lost = database.own.is_some_and(|own| older(&own, 0));
        return Ok(if lost { Fill::All } else { Fill::Other });
    };
    if noted.generation < known.generation {
        return Err(Difference::Generation { was: known.generation, is: noted.generation });
    }
    // Somebody else has found a change since: what is remembered is of another history, in which
    // this process is waited for.
    let same = noted.generation == known.generation;
    if same && let Some(moved) = moved(&known.site, &database.site) {
        return Err(moved);
    }
    let Some(own) = &database.own else { return Err(Difference::Process) };
    if same {
        if own.beat < known.beat {
            return Err(Difference::Beat { was: known.beat, is: own.beat });
        }
        went_back(known, database.newest, database.at_copied)?;
        if database.wal < known.wal {
            return Err(Difference::Log);
        }
    }
    Ok(match (older(own, known.beat), same) {
        (true, _) => Fill::All,
        (false, true) => Fill::New,
        (false, false) => Fill::Other,
    })
}

/// Does this process live elsewhere too, on a copy of its ledger? `is_ours`: its row was written by
/// this life of it. Every life counts its beginning as a sweep, so that a row of the past knows of no
/// more sweeps than this life does.
#[must_use]
pub fn lives_elsewhere(known: &Known, own: &Own, is_ours: bool) -> bool {
    !is_ours && own.beat > known.beat
}

fn moved(was: &Site, is: &Site) -> Option<Difference> {
    if was.system != is.system {
        return Some(Difference::Server);
    }
    if was.timeline != is.timeline {
        return Some(Difference::Timeline { was: was.timeline, is: is.timeline });
    }
    (was != is).then_some(Difference::Loaded)
}

fn went_back(known: &Known, newest: u64, at_copied: Option<Hash>) -> Result<(), Difference> {
    let copied = known.copied;
    if newest < copied.number {
        return Err(Difference::Decisions { was: copied.number, is: newest });
    }
    if copied.number > 0 && at_copied != Some(copied.hash) {
        return Err(Difference::History { at: copied.number });
    }
    Ok(())
}

/// What a transaction on one cluster reads of the database, under that cluster's lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// Where the connection leads.
    pub site: Site,
    /// The generation.
    pub generation: u64,
    /// The number of the newest decision.
    pub newest: u64,
    /// The hash at the number that the ledger has copied.
    pub at_copied: Option<Hash>,
    /// How often this process has swept, as its row says; `None`: it has none.
    pub beat: Option<u64>,
}

/// Whether a process may freeze, decide or end what it has just read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// It may.
    Open,
    /// Not before it has copied what it lacks, in this very transaction.
    Copy,
    /// Not before it has looked at the database anew: another process has found a change.
    Look,
    /// Not on this connection: it leads to the past.
    Past(Difference),
}

/// May a transaction that has read this freeze, decide or end anything? A pooled connection may
/// lead to a primary that was replaced, or to tables that were set back under it: before anything is
/// copied out of them, only site and beat tell.
#[must_use]
pub fn gate(known: Option<&Known>, read: &Read) -> Gate {
    let Some(known) = known else { return Gate::Look };
    if read.generation < known.generation {
        let (was, is) = (known.generation, read.generation);
        return Gate::Past(Difference::Generation { was, is });
    }
    if read.generation > known.generation {
        return Gate::Look;
    }
    if let Some(moved) = moved(&known.site, &read.site) {
        return Gate::Past(moved);
    }
    match read.beat {
        None => return Gate::Past(Difference::Process),
        Some(is) if is < known.beat => {
            return Gate::Past(Difference::Beat { was: known.beat, is });
        }
        Some(_) => {}
    }
    match went_back(known, read.newest, read.at_copied) {
        Err(difference) => Gate::Past(difference),
        Ok(()) if read.newest > known.copied.number => Gate::Copy,
        Ok(()) => Gate::Open,
    }
}

/// What a ledger holds of one cluster. A commit stands above an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Entry {
    /// It has committed this list.
    Commit {
        /// Its hash.
        h: Hash,
        /// Whether the document is there as well, or only in another process's ledger.
        document: bool,
    },
    /// It ended without one.
    End(EndCause),
}

/// How a cluster stands in a database that is compared with a ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stands {
    /// Its phase; `None`: a draft.
    pub phase: Option<Phase>,
    /// What ended it.
    pub cause: Option<EndCause>,
    /// The list that it has committed.
    pub commit: Option<Hash>,
    /// It is known to have two.
    pub split: bool,
}

/// What has to be done about a ledger's entry before the database is settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PutBack {
    /// Nothing: the database can't contradict it.
    Nothing,
    /// The document goes back.
    Adopt,
    /// It committed a list whose document is elsewhere: it ends as if by `db accept`, so that it
    /// forms no other one, and comes back as soon as somebody shows the document.
    Close,
    /// It ended, and ends again.
    End(EndCause),
}

/// Could the database, as the cluster stands in it, go another way than the ledger says? `None`: it
/// doesn't have the cluster. `refused`: this very entry was tried before, and it isn't tried again
/// as long as the cluster can't form.
#[must_use]
pub fn put_back(entry: Entry, stands: Option<&Stands>, refused: bool) -> PutBack {
    let document = matches!(entry, Entry::Commit { document: true, .. });
    let Some(stands) = stands else {
        return if document && !refused { PutBack::Adopt } else { PutBack::Nothing };
    };
    let forms = matches!(stands.phase, None | Some(Phase::Open | Phase::Preparing));
    match entry {
        Entry::End(cause) if forms => PutBack::End(cause),
        Entry::End(_) => PutBack::Nothing,
        Entry::Commit { h, .. } if stands.commit == Some(h) || stands.split => PutBack::Nothing,
        Entry::Commit { .. } if forms && document => PutBack::Adopt,
        Entry::Commit { .. } if forms => PutBack::Close,
        // Ended here for good, it contradicts nobody; ended by `db accept`, it may come back; and
        // of another list than this one a person must hear.
        Entry::Commit { .. } => {
            let may = stands.commit.is_some() || stands.cause == Some(EndCause::DatabaseAccepted);
            if document && may && !refused { PutBack::Adopt } else { PutBack::Nothing }
        }
    }
}

/// Whether a ledger forbids what a step is about to do to a cluster: freeze a list, decide this one,
/// or end it.
#[must_use]
pub fn contradicts(entry: Option<Entry>, step: Decision) -> bool {
    match (entry, step) {
        (None, _) => false,
        (Some(Entry::Commit { h, .. }), Decision::Commit { h: decided, .. }) => h != decided,
        (Some(Entry::Commit { .. }), Decision::Freeze | Decision::End) => true,
        // Ended by `db accept`, it comes back with a document.
        (Some(Entry::End(cause)), Decision::Commit { adopted, .. }) => {
            !(adopted && cause == EndCause::DatabaseAccepted)
        }
        (Some(Entry::End(_)), step) => step == Decision::Freeze,
    }
}

/// What [`gate`] stands before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// A list is frozen.
    Freeze,
    /// A list is decided.
    Commit {
        /// Its hash.
        h: Hash,
        /// By a document that was shown.
        adopted: bool,
    },
    /// A cluster ends before it committed.
    End,
}

#[cfg(test)]
mod tests;
