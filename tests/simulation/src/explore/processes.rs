//! Discovery processes. Each reads its database, lets the production code compare it with the
//! process's ledger, and acts on the result.

use std::sync::Arc;

use formation_explored::memory::{
    self, CopyScope, LedgerEntry, LedgerVerdict, RestoreAction, compare, contradicts, plan_restore,
};
use formation_explored::service::{ClusterEnd, ClusterEvent, EndCause, Phase};

use crate::explore::config::ExplorationConfig;
use crate::explore::database::{
    DatabaseState, Ledger, LedgerPosition, PROCESSES, ProcessState, ProcessTableRow,
};
use crate::explore::host_steps::document_of;
use crate::explore::properties::{self, PropertyViolation};
use crate::explore::reductions;
use crate::explore::service_steps::{serve, transact};
use crate::explore::state::{SystemState, normalise};

/// Way in which a database is set back to its backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestoreMethod {
    /// A dump is loaded into a new database. All connections end, and the database has another
    /// identity. Point-in-time recovery, which begins a new timeline, looks the same.
    Dump,
    /// The rows are set back while the processes run. Connections survive, and only the contents of
    /// the rows change. A restored copy of the database's files looks the same to a process that
    /// connects to it again.
    InPlace,
}

/// Lets the process examine its database, as it does on each new connection. If the database isn't
/// the one that the process remembers, the process begins a new generation. In either case it
/// copies the decisions that its ledger lacks. While the generation isn't settled, it restores its
/// ledger's entries in the database.
///
/// # Errors
/// Returns a property that doesn't hold after an entry was restored.
pub(super) fn inspect_database(
    system: &mut SystemState,
    config: &ExplorationConfig,
    at: usize,
) -> Result<(), PropertyViolation> {
    system.processes[at].connected = true;
    if !config.environment.ledger {
        return Ok(());
    }
    if system.database.rows[at].is_forgotten {
        Arc::make_mut(&mut system.database).rows[at].is_forgotten = false;
    }
    let environment = &config.environment;
    let summary = system.processes[at].ledger.summary(environment);
    let scope = match compare(&summary, &system.database.observe(at, &summary, environment)) {
        Ok(scope) => scope,
        Err(_) => {
            begin_generation(system, summary.database.map_or(0, |known| known.generation));
            CopyScope::NewHistory
        }
    };
    copy_decisions(system, config, at, scope);
    // The database may have another history than the ledger, so the ledger's entry is checked
    // against the cluster's state in the database.
    let is_restore_needed = |system: &SystemState| {
        let entry = system.processes[at].ledger.entry;
        let needs_restore = |entry| {
            plan_restore(entry, Some(&system.database.cluster_state()), false)
                != RestoreAction::Nothing
        };
        entry.is_some_and(needs_restore)
    };
    if system.database.settled && scope != CopyScope::NewDecisions && is_restore_needed(system) {
        let generation = system.database.generation;
        begin_generation(system, generation);
    }
    if !system.database.settled && !system.database.rows[at].has_restored_ledger {
        restore_from_ledger(system, config, at)?;
    }
    record_position(system, config, at);
    if system.database.settled && system.database.cluster.is_unsettled {
        let _ = serve(system, config, ClusterEvent::Tick)?;
    }
    Ok(())
}

/// Lets the process make one periodic sweep: it checks its database, and increments its sweep
/// counter.
///
/// # Errors
/// Fails as [`inspect_database`] does.
pub(super) fn sweep(
    system: &mut SystemState,
    config: &ExplorationConfig,
    at: usize,
) -> Result<(), PropertyViolation> {
    inspect_database(system, config, at)?;
    let database = Arc::make_mut(&mut system.database);
    database.rows[at].sweep_count += 1;
    if let Some(known) = &mut system.processes[at].ledger.position {
        known.sweep_count = database.rows[at].sweep_count;
    }
    Ok(())
}

fn begin_generation(system: &mut SystemState, known: u64) {
    let database = Arc::make_mut(&mut system.database);
    database.generation = database.generation.max(known) + 1;
    database.recorded_identity = database.identity;
    database.settled = false;
    for row in &mut database.rows {
        row.has_restored_ledger = false;
    }
}

fn copy_decisions(
    system: &mut SystemState,
    config: &ExplorationConfig,
    at: usize,
    scope: CopyScope,
) {
    if !config.environment.has_complete_ledgers {
        return;
    }
    let process = &mut system.processes[at];
    let copied = process.ledger.position.as_ref().map_or(0, |known| known.copied_decisions.len());
    let from = if scope == CopyScope::NewDecisions { copied } else { 0 };
    for entry in system.database.decisions.iter().skip(from) {
        process.ledger.record(match *entry {
            // The ledger gets the decision without the commit document. A process or agent that
            // holds the document sends it later.
            LedgerEntry::Commit { h, .. } => LedgerEntry::Commit { h, document: false },
            end @ LedgerEntry::End(_) => end,
        });
    }
}

/// Checks whether ledger and database agree. If they do, records the ledger's size in the database,
/// and the database's position beside the ledger.
fn record_position(system: &mut SystemState, config: &ExplorationConfig, at: usize) {
    let ledger = &mut system.processes[at].ledger;
    let row =
        ProcessTableRow { entries: u64::from(ledger.entry.is_some()), ..system.database.rows[at] };
    if system.database.rows[at] != row {
        Arc::make_mut(&mut system.database).rows[at] = row;
    }
    let database = &system.database;
    let copied = if config.environment.has_complete_ledgers {
        database.decisions.clone()
    } else {
        Vec::new()
    };
    ledger.position = Some(LedgerPosition {
        identity: database.identity,
        generation: database.generation,
        copied_decisions: copied,
        sweep_count: row.sweep_count,
    });
}

fn restore_from_ledger(
    system: &mut SystemState,
    config: &ExplorationConfig,
    at: usize,
) -> Result<(), PropertyViolation> {
    // This transaction tells the cluster's row that the database has changed, before any entry is
    // restored.
    let _ = transact(system, config, ClusterEvent::Tick)?;
    if let Some(entry) = system.processes[at].ledger.entry {
        match plan_restore(entry, Some(&system.database.cluster_state()), false) {
            RestoreAction::Nothing => {}
            RestoreAction::Adopt => {
                let LedgerEntry::Commit { h, .. } = entry else { return Ok(()) };
                let outcome = transact(system, config, ClusterEvent::Adopt(document_of(h)))?;
                if outcome.answer.is_err() && system.database.decided_list().is_none() {
                    close(system, config, EndCause::DatabaseAccepted);
                }
            }
            RestoreAction::Close => close(system, config, EndCause::DatabaseAccepted),
            RestoreAction::End(cause) => close(system, config, cause),
        }
    }
    let database = Arc::make_mut(&mut system.database);
    database.rows[at].has_restored_ledger = true;
    settle_if_complete(database);
    Ok(())
}

fn settle_if_complete(database: &mut DatabaseState) {
    database.settled |= database.rows.iter().all(|row| row.has_restored_ledger || row.is_forgotten);
}

/// Lets an owner declare that process `at` won't come back.
pub(super) fn forget(system: &mut SystemState, at: usize) {
    let database = Arc::make_mut(&mut system.database);
    database.rows[at].is_forgotten = true;
    settle_if_complete(database);
}

/// Returns whether an owner may declare that process `at` won't come back. The database must be
/// waiting for this process, another process must answer, and this process must not be running.
#[must_use]
pub(super) fn may_be_forgotten(
    system: &SystemState,
    config: &ExplorationConfig,
    at: usize,
) -> bool {
    let (process, row) = (&system.processes[at], system.database.rows[at]);
    let is_answered = (0..PROCESSES).any(|other| other != at && system.processes[other].connected);
    let is_waited_for = !(system.database.settled || row.has_restored_ledger || row.is_forgotten);
    is_waited_for && is_answered && (process.is_lost || !config.environment.forgets_stopped_only)
}

/// Loses the process for good, with its ledger.
pub(super) fn lose(process: &mut ProcessState) {
    *process = ProcessState { is_lost: true, ..ProcessState::default() };
}

/// Ends the cluster because a ledger records its end. The state machine has no event for that, so
/// this changes the row directly.
fn close(system: &mut SystemState, config: &ExplorationConfig, cause: EndCause) {
    let now = system.now();
    let database = Arc::make_mut(&mut system.database);
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

/// Returns whether the serving process may make this decision: to freeze a list of members, to
/// commit one, or to end the cluster. It may not if its ledger contradicts the decision. Nor may it
/// while it still has to compare its ledger with the database, or to copy decisions from there.
#[must_use]
pub(super) fn may_decide(
    system: &SystemState,
    config: &ExplorationConfig,
    decision: memory::ClusterDecision,
) -> bool {
    let ledger = &system.processes[system.serving].ledger;
    let summary = ledger.summary(&config.environment);
    let read = system.database.read(system.serving, &summary, &config.environment);
    let gate = match memory::check_ledger(summary.database.as_ref(), &read) {
        LedgerVerdict::CopyFirst if !config.environment.has_complete_ledgers => {
            LedgerVerdict::Allowed
        }
        gate => gate,
    };
    gate == LedgerVerdict::Allowed && !contradicts(ledger.entry, decision)
}

/// Lets process `at` send the decided list's commit document, after writing the document to the
/// ledger.
///
/// # Errors
/// Returns a violation of property 1 or 6.
pub(super) fn publish(
    system: &mut SystemState,
    config: &ExplorationConfig,
    at: usize,
) -> Result<(), PropertyViolation> {
    let Some(h) = system.database.decided_list() else { return Ok(()) };
    if config.environment.ledger {
        let ledger = &mut system.processes[at].ledger;
        ledger.record(LedgerEntry::Commit { h, document: true });
        if ledger.entry != Some(LedgerEntry::Commit { h, document: true }) {
            // The ledger holds the commit of another list of members. So the process sends nothing,
            // and examines its database instead.
            return inspect_database(system, config, at);
        }
    }
    properties::check_sent_document(system, config, h)?;
    Arc::make_mut(&mut system.sent).documents.insert(h);
    Ok(())
}

/// Replaces the database by the backup.
pub(super) fn restore(system: &mut SystemState, config: &ExplorationConfig, method: RestoreMethod) {
    let Some(backup) = system.backup.take() else { return };
    let mut database = (*backup).clone();
    Arc::make_mut(&mut system.sent).abandoned = false;
    database.identity = match method {
        RestoreMethod::Dump => system.database.identity.max(database.identity) + 1,
        RestoreMethod::InPlace => system.database.identity,
    };
    for process in &mut system.processes {
        process.connected &=
            method == RestoreMethod::InPlace || reductions::are_processes_stateless(config);
        process.read = None;
    }
    system.database = Arc::new(database);
}

/// Returns whether nothing would change if `process` examined its database now.
#[must_use]
pub(super) fn is_up_to_date(
    system: &SystemState,
    config: &ExplorationConfig,
    process: usize,
) -> bool {
    let row = system.database.rows[process];
    let (process, database) = (&system.processes[process], &system.database);
    let Some(known) = &process.ledger.position else { return !config.environment.ledger };
    let copied =
        known.copied_decisions == database.decisions || !config.environment.has_complete_ledgers;
    process.connected
        && copied
        && (known.identity, known.generation) == (database.identity, database.generation)
        && (known.sweep_count, u64::from(process.ledger.entry.is_some()))
            == (row.sweep_count, row.entries)
        && (database.settled || row.has_restored_ledger)
}

/// Returns whether each process has swept since the backup was taken. Only such a backup may be
/// restored in place.
#[must_use]
pub(super) fn have_swept_since_backup(system: &SystemState) -> bool {
    let Some(backup) = &system.backup else { return false };
    (0..PROCESSES).all(|at| system.database.rows[at].sweep_count > backup.rows[at].sweep_count)
}

/// Crashes the process: it loses its unsynced writes.
pub(super) fn crash(system: &mut SystemState, config: &ExplorationConfig, at: usize) {
    let process = &mut system.processes[at];
    if !config.environment.ledger_sync {
        process.ledger.entry = None;
    }
    process.read = None;
}

/// Replaces the ledger by an older copy while its process is down. The position beside it is also
/// replaced if `with_position` is true.
pub(super) fn restore_ledger_copy(process: &mut ProcessState, with_position: bool) {
    let Some(saved) = process.saved.take() else { return };
    let known = if with_position { saved.position } else { process.ledger.position.take() };
    process.ledger = Ledger { entry: saved.entry, position: known };
    process.connected = false;
}
