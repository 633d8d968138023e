//! Discovery processes: each looks at its database for itself, compares it with its own ledger by
//! the production code, and does what follows from that.

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

/// How a database is set back to its backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setback {
    /// A dump is loaded into a new database: no connection outlives it, and what no dump carries
    /// is different. A recovery to a point in time, which begins a timeline, looks the same.
    Dump,
    /// The rows are set back under the processes: their connections outlive it, and only what stands
    /// in the rows is different. A copy of the files put back looks the same, to a process that
    /// connects anew and looks.
    InPlace,
}

/// The process looks at its database, as each new connection does: is it the one that it knows? It
/// copies what it lacks, or begins a new generation; and while that isn't settled, puts back what
/// its ledger holds.
///
/// # Errors
/// A property that doesn't hold once something was put back.
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
    // With another history, what the ledger holds is compared with what stands there.
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

/// The process counts a sweep, and looks.
///
/// # Errors
/// As [`look`].
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
            // The document itself comes back from whoever has it.
            Entry::Commit { h, .. } => Entry::Commit { h, document: false },
            end @ Entry::End(_) => end,
        });
    }
}

/// What the database says of the ledger, and the ledger of the database, once they agree.
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
    // The row hears of the change before anything else.
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

/// An owner says that the process won't come back.
pub(super) fn forget(world: &mut World, at: usize) {
    let database = Arc::make_mut(&mut world.database);
    database.rows[at].is_forgotten = true;
    settle_if_complete(database);
}

/// The process is waited for, and an owner may say that it needn't be: of another one than the one
/// that answers, and not of one that runs.
#[must_use]
pub(super) fn may_be_forgotten(world: &World, config: &Config, at: usize) -> bool {
    let (process, row) = (&world.processes[at], world.database.rows[at]);
    let is_answered = (0..PROCESSES).any(|other| other != at && world.processes[other].connected);
    let is_waited_for = !(world.database.settled || row.is_back || row.is_forgotten);
    is_waited_for && is_answered && (process.is_gone || !config.environment.gone_only)
}

/// The process is lost for good, with all that it had.
pub(super) fn lose(process: &mut Process) {
    *process = Process { is_gone: true, ..Process::default() };
}

/// A ledger's word ends the cluster, without the machine: it has no event for that.
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

/// Whether the process that serves may do what a transaction has come to: nothing is frozen, decided
/// or ended by one whose ledger is behind, or says otherwise.
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

/// A process lets the decided document out: ledger first.
///
/// # Errors
/// Property 1 or 6.
pub(super) fn publish(world: &mut World, config: &Config, at: usize) -> Result<(), Violation> {
    let Some(h) = world.database.commit() else { return Ok(()) };
    if config.environment.ledger {
        let ledger = &mut world.processes[at].ledger;
        ledger.note(Entry::Commit { h, document: true });
        if ledger.entry != Some(Entry::Commit { h, document: true }) {
            // It has let another one out.
            return look(world, config, at);
        }
    }
    properties::document_leaves(world, config, h)?;
    Arc::make_mut(&mut world.said).documents.insert(h);
    Ok(())
}

/// The backup is put in the database's place.
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

/// A look would change nothing.
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

/// A backup that is put back is older than a sweep: each process has counted one since.
#[must_use]
pub(super) fn have_swept_since_backup(world: &World) -> bool {
    let Some(backup) = &world.backup else { return false };
    (0..PROCESSES).all(|at| world.database.rows[at].beat > backup.rows[at].beat)
}

/// A process crashes: what it had not synced is lost.
pub(super) fn crash(world: &mut World, config: &Config, at: usize) {
    let process = &mut world.processes[at];
    if !config.environment.ledger_sync {
        process.ledger.entry = None;
    }
    process.read = None;
}

/// An older copy is put in the ledger's place while the process is down; with the position beside
/// it, or without.
pub(super) fn put_ledger_copy_back(process: &mut Process, with_position: bool) {
    let Some(saved) = process.saved.take() else { return };
    let known = if with_position { saved.known } else { process.ledger.known.take() };
    process.ledger = Ledger { entry: saved.entry, known };
    process.connected = false;
}
