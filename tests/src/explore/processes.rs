//! Discovery processes. Each looks at its database, compares it with its own ledger by the
//! production code, and acts on the result.

use std::sync::Arc;

use formation_explored::memory::{
    self, CopyScope, LedgerEntry, LedgerVerdict, RestoreAction, compare, contradicts, plan_restore,
};
use formation_explored::service::{ClusterEnd, ClusterEvent, EndCause, Phase};

use crate::explore::config::ExplorationConfig;
use crate::explore::database::{
    DatabaseState, Ledger, LedgerPosition, PROCESSES, ProcessState, ProcessTableRow,
};
use crate::explore::host_side::document_of;
use crate::explore::properties::{self, PropertyViolation};
use crate::explore::reduce;
use crate::explore::service_side::{serve, transact};
use crate::explore::world::{SystemState, normalise};

/// Way in which a database is set back to its backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestoreMethod {
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
pub(super) fn inspect_database(
    world: &mut SystemState,
    config: &ExplorationConfig,
    at: usize,
) -> Result<(), PropertyViolation> {
    world.processes[at].connected = true;
    if !config.environment.ledger {
        return Ok(());
    }
    if world.database.rows[at].is_forgotten {
        Arc::make_mut(&mut world.database).rows[at].is_forgotten = false;
    }
    let environment = &config.environment;
    let memory = world.processes[at].ledger.memory(environment);
    let fill = match compare(&memory, &world.database.view_for_process(at, &memory, environment)) {
        Ok(fill) => fill,
        Err(_) => {
            begin_generation(world, memory.database.map_or(0, |known| known.generation));
            CopyScope::NewHistory
        }
    };
    copy_decisions(world, config, at, fill);
    // The database may have another history, so check the ledger's entry against its state.
    let lacks = |world: &SystemState| {
        let entry = world.processes[at].ledger.entry;
        let to_do = |entry| {
            plan_restore(entry, Some(&world.database.cluster_state()), false)
                != RestoreAction::Nothing
        };
        entry.is_some_and(to_do)
    };
    if world.database.settled && fill != CopyScope::NewDecisions && lacks(world) {
        let generation = world.database.generation;
        begin_generation(world, generation);
    }
    if !world.database.settled && !world.database.rows[at].has_restored_ledger {
        restore_from_ledger(world, config, at)?;
    }
    record_position(world, config, at);
    if world.database.settled && world.database.cluster.is_unsettled {
        let _ = serve(world, config, ClusterEvent::Tick)?;
    }
    Ok(())
}

/// Lets the process make one periodic sweep: it checks its database, and increments its sweep
/// counter.
///
/// # Errors
/// Fails as [`inspect_database`] does.
pub(super) fn sweep(
    world: &mut SystemState,
    config: &ExplorationConfig,
    at: usize,
) -> Result<(), PropertyViolation> {
    inspect_database(world, config, at)?;
    let database = Arc::make_mut(&mut world.database);
    database.rows[at].sweep_count += 1;
    if let Some(known) = &mut world.processes[at].ledger.position {
        known.sweep_count = database.rows[at].sweep_count;
    }
    Ok(())
}

fn begin_generation(world: &mut SystemState, known: u64) {
    let database = Arc::make_mut(&mut world.database);
    database.generation = database.generation.max(known) + 1;
    database.noted_site = database.site;
    database.settled = false;
    for row in &mut database.rows {
        row.has_restored_ledger = false;
    }
}

fn copy_decisions(world: &mut SystemState, config: &ExplorationConfig, at: usize, fill: CopyScope) {
    if !config.environment.has_complete_ledgers {
        return;
    }
    let process = &mut world.processes[at];
    let copied = process.ledger.position.as_ref().map_or(0, |known| known.copied_decisions.len());
    let from = if fill == CopyScope::NewDecisions { copied } else { 0 };
    for entry in world.database.decisions.iter().skip(from) {
        process.ledger.note(match *entry {
            // A copied decision has no document: a process or agent that holds the document sends
            // it.
            LedgerEntry::Commit { h, .. } => LedgerEntry::Commit { h, document: false },
            end @ LedgerEntry::End(_) => end,
        });
    }
}

/// Records, once the two agree, the ledger's size in the database and the database's position beside
/// the ledger.
fn record_position(world: &mut SystemState, config: &ExplorationConfig, at: usize) {
    let ledger = &mut world.processes[at].ledger;
    let row =
        ProcessTableRow { entries: u64::from(ledger.entry.is_some()), ..world.database.rows[at] };
    if world.database.rows[at] != row {
        Arc::make_mut(&mut world.database).rows[at] = row;
    }
    let database = &world.database;
    let copied = if config.environment.has_complete_ledgers {
        database.decisions.clone()
    } else {
        Vec::new()
    };
    ledger.position = Some(LedgerPosition {
        site: database.site,
        generation: database.generation,
        copied_decisions: copied,
        sweep_count: row.sweep_count,
    });
}

fn restore_from_ledger(
    world: &mut SystemState,
    config: &ExplorationConfig,
    at: usize,
) -> Result<(), PropertyViolation> {
    // Report the change to the row before anything is put back.
    let _ = transact(world, config, ClusterEvent::Tick)?;
    if let Some(entry) = world.processes[at].ledger.entry {
        match plan_restore(entry, Some(&world.database.cluster_state()), false) {
            RestoreAction::Nothing => {}
            RestoreAction::Adopt => {
                let LedgerEntry::Commit { h, .. } = entry else { return Ok(()) };
                let outcome = transact(world, config, ClusterEvent::Adopt(document_of(h)))?;
                if outcome.answer.is_err() && world.database.decided_list().is_none() {
                    close(world, config, EndCause::DatabaseAccepted);
                }
            }
            RestoreAction::Close => close(world, config, EndCause::DatabaseAccepted),
            RestoreAction::End(cause) => close(world, config, cause),
        }
    }
    let database = Arc::make_mut(&mut world.database);
    database.rows[at].has_restored_ledger = true;
    settle_if_complete(database);
    Ok(())
}

fn settle_if_complete(database: &mut DatabaseState) {
    database.settled |= database.rows.iter().all(|row| row.has_restored_ledger || row.is_forgotten);
}

/// An owner declares that process `at` won't come back.
pub(super) fn forget(world: &mut SystemState, at: usize) {
    let database = Arc::make_mut(&mut world.database);
    database.rows[at].is_forgotten = true;
    settle_if_complete(database);
}

/// Returns whether an owner may declare that process `at` won't come back. The database must be
/// waiting for it, another process must answer, and the process must not be running.
#[must_use]
pub(super) fn may_be_forgotten(world: &SystemState, config: &ExplorationConfig, at: usize) -> bool {
    let (process, row) = (&world.processes[at], world.database.rows[at]);
    let is_answered = (0..PROCESSES).any(|other| other != at && world.processes[other].connected);
    let is_waited_for = !(world.database.settled || row.has_restored_ledger || row.is_forgotten);
    is_waited_for && is_answered && (process.is_lost || !config.environment.forgets_stopped_only)
}

/// Loses the process for good, with its ledger.
pub(super) fn lose(process: &mut ProcessState) {
    *process = ProcessState { is_lost: true, ..ProcessState::default() };
}

/// Ends the cluster because a ledger records its end. The state machine has no event for that, so
/// this changes the row directly.
fn close(world: &mut SystemState, config: &ExplorationConfig, cause: EndCause) {
    let now = world.now();
    let database = Arc::make_mut(&mut world.database);
    let cluster = &mut database.cluster;
    cluster.phase = match cause {
        EndCause::Deadline => Phase::Expired,
        EndCause::Retire => Phase::Retired,
        EndCause::Abandon | EndCause::DatabaseAccepted => Phase::Abandoned,
    };
    cluster.ended = Some(ClusterEnd { cause, at: now, by: String::new() });
    cluster.frozen = None;
    normalise(cluster, config);
    database.decisions.push(LedgerEntry::End(cause));
}

/// Returns whether the serving process may make this decision. It may not freeze, commit or end
/// anything while its ledger is behind or contradicts the decision.
#[must_use]
pub(super) fn may_decide(
    world: &SystemState,
    config: &ExplorationConfig,
    decision: memory::ClusterDecision,
) -> bool {
    let ledger = &world.processes[world.serving].ledger;
    let memory = ledger.memory(&config.environment);
    let read = world.database.read(world.serving, &memory, &config.environment);
    let gate = match memory::check_ledger(memory.database.as_ref(), &read) {
        LedgerVerdict::CopyFirst if !config.environment.has_complete_ledgers => {
            LedgerVerdict::Allowed
        }
        gate => gate,
    };
    gate == LedgerVerdict::Allowed && !contradicts(ledger.entry, decision)
}

/// Lets process `at` send the decided document, after writing it to the ledger.
///
/// # Errors
/// Returns a violation of property 1 or 6.
pub(super) fn publish(
    world: &mut SystemState,
    config: &ExplorationConfig,
    at: usize,
) -> Result<(), PropertyViolation> {
    let Some(h) = world.database.decided_list() else { return Ok(()) };
    if config.environment.ledger {
        let ledger = &mut world.processes[at].ledger;
        ledger.note(LedgerEntry::Commit { h, document: true });
        if ledger.entry != Some(LedgerEntry::Commit { h, document: true }) {
            // The ledger holds another document, which this process has sent.
            return inspect_database(world, config, at);
        }
    }
    properties::check_sent_document(world, config, h)?;
    Arc::make_mut(&mut world.sent).documents.insert(h);
    Ok(())
}

/// Replaces the database by the backup.
pub(super) fn restore(world: &mut SystemState, config: &ExplorationConfig, setback: RestoreMethod) {
    let Some(backup) = world.backup.take() else { return };
    let mut database = (*backup).clone();
    Arc::make_mut(&mut world.sent).abandoned = false;
    database.site = match setback {
        RestoreMethod::Dump => world.database.site.max(database.site) + 1,
        RestoreMethod::InPlace => world.database.site,
    };
    for process in &mut world.processes {
        process.connected &=
            setback == RestoreMethod::InPlace || reduce::are_processes_stateless(config);
        process.read = None;
    }
    world.database = Arc::new(database);
}

/// Returns whether nothing would change if process `at` checked its database now.
#[must_use]
pub(super) fn is_up_to_date(world: &SystemState, config: &ExplorationConfig, at: usize) -> bool {
    let (process, database) = (&world.processes[at], &world.database);
    let Some(known) = &process.ledger.position else { return !config.environment.ledger };
    let row = database.rows[at];
    let copied =
        known.copied_decisions == database.decisions || !config.environment.has_complete_ledgers;
    process.connected
        && copied
        && (known.site, known.generation) == (database.site, database.generation)
        && (known.sweep_count, u64::from(process.ledger.entry.is_some()))
            == (row.sweep_count, row.entries)
        && (database.settled || row.has_restored_ledger)
}

/// Returns whether each process has swept since the backup was taken. Only then may it be restored
/// in place.
#[must_use]
pub(super) fn have_swept_since_backup(world: &SystemState) -> bool {
    let Some(backup) = &world.backup else { return false };
    (0..PROCESSES).all(|at| world.database.rows[at].sweep_count > backup.rows[at].sweep_count)
}

/// Crashes the process: it loses what it had not synced.
pub(super) fn crash(world: &mut SystemState, config: &ExplorationConfig, at: usize) {
    let process = &mut world.processes[at];
    if !config.environment.ledger_sync {
        process.ledger.entry = None;
    }
    process.read = None;
}

/// Replaces the ledger by an older copy while its process is down. The position beside it is
/// replaced as well if `with_position` is true.
pub(super) fn put_ledger_copy_back(process: &mut ProcessState, with_position: bool) {
    let Some(saved) = process.saved.take() else { return };
    let known = if with_position { saved.position } else { process.ledger.position.take() };
    process.ledger = Ledger { entry: saved.entry, position: known };
    process.connected = false;
}
