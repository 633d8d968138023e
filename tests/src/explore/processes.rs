//! Discovery processes. Each looks at its database, compares it with its own ledger by the
//! production code, and acts on the result.

use std::sync::Arc;

use formation_explored::memory::{
    self, Entry, Fill, Gate, PutBack, compare, contradicts, put_back,
};
use formation_explored::service::{EndCause, Ended, Event, Phase};

use crate::explore::config::Config;
use crate::explore::database::{Database, Ledger, PROCESSES, Process, Remembered, Row};
use crate::explore::host_side::document_of;
use crate::explore::properties::{self, Violation};
use crate::explore::reduce;
use crate::explore::service_side::{serve, transact};
use crate::explore::world::{World, normalise};

/// Way in which a database is set back to its backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setback {
    /// A dump is loaded into a new database. All connections end, and the database has another
    /// identity. Point-in-time recovery, which begins a new timeline, looks the same.
    Dump,
    /// The rows are set back while the processes run. Connections survive, and only the contents of
    /// the rows change. A restored copy of the database's files looks the same to a process that
    /// reconnects and looks.
    InPlace,
}

/// Lets the process look at its database, as it does on each new connection. If the database isn't
/// the one it knows, it begins a new generation. In either case it copies the decisions that it
/// lacks. While the generation isn't settled, it puts back what its ledger holds.
///
/// # Errors
/// Returns a property that doesn't hold after an entry was put back.
pub(super) fn look(world: &mut World, config: &Config, at: usize) -> Result<(), Violation> {
    world.processes[at].connected = true;
    if !config.environment.ledger {
        return Ok(());
    }
    if world.database.rows[at].is_forgotten {
        Arc::make_mut(&mut world.database).rows[at].is_forgotten = false;
    }
    let environment = &config.environment;
    let memory = world.processes[at].ledger.memory(environment);
    let fill = match compare(&memory, &world.database.shown_to(at, &memory, environment)) {
        Ok(fill) => fill,
        Err(_) => {
            begin_generation(world, memory.known.map_or(0, |known| known.generation));
            Fill::Other
        }
    };
    copy(world, config, at, fill);
    // The database may have another history, so check the ledger's entry against its state.
    let lacks = |world: &World| {
        let entry = world.processes[at].ledger.entry;
        let to_do =
            |entry| put_back(entry, Some(&world.database.stands()), false) != PutBack::Nothing;
        entry.is_some_and(to_do)
    };
    if world.database.settled && fill != Fill::New && lacks(world) {
        let generation = world.database.generation;
        begin_generation(world, generation);
    }
    if !world.database.settled && !world.database.rows[at].is_back {
        put_ledger_back(world, config, at)?;
    }
    remember(world, config, at);
    if world.database.settled && world.database.cluster.unsettled {
        let _ = serve(world, config, Event::Tick)?;
    }
    Ok(())
}

/// Lets the process look at its database, and counts a sweep.
///
/// # Errors
/// Fails as [`look`] does.
pub(super) fn sweep(world: &mut World, config: &Config, at: usize) -> Result<(), Violation> {
    look(world, config, at)?;
    let database = Arc::make_mut(&mut world.database);
    database.rows[at].beat += 1;
    if let Some(known) = &mut world.processes[at].ledger.known {
        known.beat = database.rows[at].beat;
    }
    Ok(())
}

fn begin_generation(world: &mut World, known: u64) {
    let database = Arc::make_mut(&mut world.database);
    database.generation = database.generation.max(known) + 1;
    database.noted = database.site;
    database.settled = false;
    for row in &mut database.rows {
        row.is_back = false;
    }
}

fn copy(world: &mut World, config: &Config, at: usize, fill: Fill) {
    if !config.environment.complete {
        return;
    }
    let process = &mut world.processes[at];
    let copied = process.ledger.known.as_ref().map_or(0, |known| known.copied.len());
    let from = if fill == Fill::New { copied } else { 0 };
    for entry in world.database.decisions.iter().skip(from) {
        process.ledger.note(match *entry {
            // A copied decision has no document: a process or agent that holds the document sends
            // it.
            Entry::Commit { h, .. } => Entry::Commit { h, document: false },
            end @ Entry::End(_) => end,
        });
    }
}

/// Records, once the two agree, the ledger's size in the database and the database's position beside
/// the ledger.
fn remember(world: &mut World, config: &Config, at: usize) {
    let ledger = &mut world.processes[at].ledger;
    let row = Row { entries: u64::from(ledger.entry.is_some()), ..world.database.rows[at] };
    if world.database.rows[at] != row {
        Arc::make_mut(&mut world.database).rows[at] = row;
    }
    let database = &world.database;
    let copied = if config.environment.complete { database.decisions.clone() } else { Vec::new() };
    ledger.known = Some(Remembered {
        site: database.site,
        generation: database.generation,
        copied,
        beat: row.beat,
    });
}

fn put_ledger_back(world: &mut World, config: &Config, at: usize) -> Result<(), Violation> {
    // Report the change to the row before anything is put back.
    let _ = transact(world, config, Event::Tick)?;
    if let Some(entry) = world.processes[at].ledger.entry {
        match put_back(entry, Some(&world.database.stands()), false) {
            PutBack::Nothing => {}
            PutBack::Adopt => {
                let Entry::Commit { h, .. } = entry else { return Ok(()) };
                let outcome = transact(world, config, Event::Adopt(document_of(h)))?;
                if outcome.answer.is_err() && world.database.commit().is_none() {
                    close(world, config, EndCause::DatabaseAccepted);
                }
            }
            PutBack::Close => close(world, config, EndCause::DatabaseAccepted),
            PutBack::End(cause) => close(world, config, cause),
        }
    }
    let database = Arc::make_mut(&mut world.database);
    database.rows[at].is_back = true;
    settle_if_complete(database);
    Ok(())
}

fn settle_if_complete(database: &mut Database) {
    database.settled |= database.rows.iter().all(|row| row.is_back || row.is_forgotten);
}

/// An owner declares that process `at` won't come back.
pub(super) fn forget(world: &mut World, at: usize) {
    let database = Arc::make_mut(&mut world.database);
    database.rows[at].is_forgotten = true;
    settle_if_complete(database);
}

/// Returns whether an owner may declare that process `at` won't come back. The database must be
/// waiting for it, another process must answer, and the process must not be running.
#[must_use]
pub(super) fn may_be_forgotten(world: &World, config: &Config, at: usize) -> bool {
    let (process, row) = (&world.processes[at], world.database.rows[at]);
    let is_answered = (0..PROCESSES).any(|other| other != at && world.processes[other].connected);
    let is_waited_for = !(world.database.settled || row.is_back || row.is_forgotten);
    is_waited_for && is_answered && (process.is_gone || !config.environment.gone_only)
}

/// Loses the process for good, with its ledger.
pub(super) fn lose(process: &mut Process) {
    *process = Process { is_gone: true, ..Process::default() };
}

/// Ends the cluster because a ledger records its end. The state machine has no event for that, so
/// this changes the row directly.
fn close(world: &mut World, config: &Config, cause: EndCause) {
    let now = world.now();
    let database = Arc::make_mut(&mut world.database);
    let cluster = &mut database.cluster;
    cluster.phase = match cause {
        EndCause::Deadline => Phase::Expired,
        EndCause::Retire => Phase::Retired,
        EndCause::Abandon | EndCause::DatabaseAccepted => Phase::Abandoned,
    };
    cluster.ended = Some(Ended { cause, at: now, by: String::new() });
    cluster.frozen = None;
    normalise(cluster, config);
    database.decisions.push(Entry::End(cause));
}

/// Returns whether the serving process may make this decision. It may not freeze, commit or end
/// anything while its ledger is behind or contradicts the decision.
#[must_use]
pub(super) fn may_decide(world: &World, config: &Config, decision: memory::Decision) -> bool {
    let ledger = &world.processes[world.serving].ledger;
    let memory = ledger.memory(&config.environment);
    let read = world.database.read(world.serving, &memory, &config.environment);
    let gate = match memory::gate(memory.known.as_ref(), &read) {
        Gate::Copy if !config.environment.complete => Gate::Open,
        gate => gate,
    };
    gate == Gate::Open && !contradicts(ledger.entry, decision)
}

/// Lets process `at` send the decided document, after writing it to the ledger.
///
/// # Errors
/// Returns a violation of property 1 or 6.
pub(super) fn publish(world: &mut World, config: &Config, at: usize) -> Result<(), Violation> {
    let Some(h) = world.database.commit() else { return Ok(()) };
    if config.environment.ledger {
        let ledger = &mut world.processes[at].ledger;
        ledger.note(Entry::Commit { h, document: true });
        if ledger.entry != Some(Entry::Commit { h, document: true }) {
            // The ledger holds another document, which this process has sent.
            return look(world, config, at);
        }
    }
    properties::document_leaves(world, config, h)?;
    Arc::make_mut(&mut world.said).documents.insert(h);
    Ok(())
}

/// Replaces the database by the backup.
pub(super) fn restore(world: &mut World, config: &Config, setback: Setback) {
    let Some(backup) = world.backup.take() else { return };
    let mut database = (*backup).clone();
    Arc::make_mut(&mut world.said).abandoned = false;
    database.site = match setback {
        Setback::Dump => world.database.site.max(database.site) + 1,
        Setback::InPlace => world.database.site,
    };
    for process in &mut world.processes {
        process.connected &= setback == Setback::InPlace || reduce::remembers_nothing(config);
        process.read = None;
    }
    world.database = Arc::new(database);
}

/// Returns whether a look of process `at` would change nothing.
#[must_use]
pub(super) fn is_up_to_date(world: &World, config: &Config, at: usize) -> bool {
    let (process, database) = (&world.processes[at], &world.database);
    let Some(known) = &process.ledger.known else { return !config.environment.ledger };
    let row = database.rows[at];
    let copied = known.copied == database.decisions || !config.environment.complete;
    process.connected
        && copied
        && (known.site, known.generation) == (database.site, database.generation)
        && (known.beat, u64::from(process.ledger.entry.is_some())) == (row.beat, row.entries)
        && (database.settled || row.is_back)
}

/// Returns whether each process has swept since the backup was taken. Only then may it be restored
/// in place.
#[must_use]
pub(super) fn have_swept_since_backup(world: &World) -> bool {
    let Some(backup) = &world.backup else { return false };
    (0..PROCESSES).all(|at| world.database.rows[at].beat > backup.rows[at].beat)
}

/// Crashes the process: it loses what it had not synced.
pub(super) fn crash(world: &mut World, config: &Config, at: usize) {
    let process = &mut world.processes[at];
    if !config.environment.ledger_sync {
        process.ledger.entry = None;
    }
    process.read = None;
}

/// Replaces the ledger by an older copy while its process is down. The position beside it is
/// replaced as well if `with_position` is true.
pub(super) fn put_ledger_copy_back(process: &mut Process, with_position: bool) {
    let Some(saved) = process.saved.take() else { return };
    let known = if with_position { saved.known } else { process.ledger.known.take() };
    process.ledger = Ledger { entry: saved.entry, known };
    process.connected = false;
}
