//! Steps of the service: transactions, messages that arrive, and deadlines.

use std::sync::Arc;

use formation_explored::agent::Journal;
use formation_explored::service::{
    self, Cluster, ClusterEvent, FormationSettings, Grant, Phase, Poll, Redeem, Refusal,
    StepContext, StepOutcome,
};
use formation_explored::{AgentKey, AgentSession, Epoch, Hash, Release};

use crate::explore::config::ExplorationConfig;
use crate::explore::database::decision;
use crate::explore::identities::{grant, hash_of, host_of};
use crate::explore::processes::{inspect_database, may_decide};
use crate::explore::properties::{self, PropertyViolation};
use crate::explore::state::{DAY, NOW, PASSED_DEADLINE, SystemState, normalise};

/// Runs one transaction of the serving process. The transaction must not freeze a list of members,
/// commit one or end the cluster if [`may_decide`] forbids that. In that case the process examines
/// the database again, and retries once.
pub(super) fn serve(
    system: &mut SystemState,
    config: &ExplorationConfig,
    event: ClusterEvent,
) -> Result<StepOutcome, PropertyViolation> {
    let at = system.serving;
    if !system.processes[at].connected {
        inspect_database(system, config, at)?;
    }
    for _ in 0..2 {
        let (cluster, outcome) = step(system, config, event.clone())?;
        let refused = config.environment.ledger
            && !matches!(event, ClusterEvent::DatabaseAccepted { .. })
            && decision(&outcome).is_some_and(|decision| !may_decide(system, config, decision));
        if !refused {
            save(system, config, cluster, &outcome);
            return Ok(outcome);
        }
        inspect_database(system, config, at)?;
    }
    let answer = Err(Refusal::Unsettled);
    let (changes, alarms) = (Vec::new(), Vec::new());
    Ok(StepOutcome { answer, changed: false, changes, committed: None, alarms })
}

/// Runs one transaction without checking a ledger.
pub(super) fn transact(
    system: &mut SystemState,
    config: &ExplorationConfig,
    event: ClusterEvent,
) -> Result<StepOutcome, PropertyViolation> {
    let (cluster, outcome) = step(system, config, event)?;
    save(system, config, cluster, &outcome);
    Ok(outcome)
}

/// Runs the production code's step on the cluster's row. If the database has changed or settled
/// since the row was stored, the step for that event comes first.
fn step(
    system: &SystemState,
    config: &ExplorationConfig,
    event: ClusterEvent,
) -> Result<(Cluster, StepOutcome), PropertyViolation> {
    let before = &system.database.cluster;
    let mut cluster = before.clone();
    let settings = FormationSettings::DEFAULT;
    let context = StepContext {
        rules: &config.rules,
        settings: &settings,
        is_clock_steady: !system.is_ahead,
        hash: &hash_of,
    };
    let now = system.now();
    let first = match (system.database.settled, cluster.is_unsettled) {
        (false, false) => Some(ClusterEvent::DatabaseChanged),
        (true, true) => Some(ClusterEvent::DatabaseSettled),
        _ => None,
    };
    let notified = first.map(|first| service::step(&mut cluster, &context, now, first));
    let between = cluster.clone();
    let mut outcome = service::step(&mut cluster, &context, now, event);
    properties::check_transaction(&between, &cluster, &outcome, now)?;
    if let Some(mut notified) = notified {
        properties::check_transaction(before, &between, &notified, now)?;
        notified.changes.append(&mut outcome.changes);
        outcome.changes = notified.changes;
    }
    Ok((cluster, outcome))
}

/// Stores the row that a transaction has produced. Then adds to `SentMessages` the epoch and the
/// lists that agents can now learn from the service.
fn save(
    system: &mut SystemState,
    config: &ExplorationConfig,
    mut cluster: Cluster,
    outcome: &StepOutcome,
) {
    normalise(&mut cluster, config);
    let forming = matches!(cluster.phase, Phase::Open | Phase::Preparing);
    let shown: Option<Epoch> = forming.then_some(cluster.epoch);
    let frozen = (cluster.phase == Phase::Preparing)
        .then(|| cluster.frozen.as_ref().map(|frozen| frozen.proposal_hash))
        .flatten();
    if cluster != system.database.cluster {
        let database = Arc::make_mut(&mut system.database);
        database.cluster = cluster;
        database.append_decisions(outcome);
    }
    let sent = &system.sent;
    let has_news = shown.is_some_and(|epoch| epoch > sent.epoch)
        || frozen.is_some_and(|h| !sent.proposals.contains(&h))
        || outcome.committed.is_some_and(|h| !sent.committed.contains(&h));
    if has_news {
        let sent = Arc::make_mut(&mut system.sent);
        sent.epoch = sent.epoch.max(shown.unwrap_or(0));
        sent.proposals.extend(frozen);
        sent.committed.extend(outcome.committed);
    }
}

/// Changes the row as if time had passed. If `process_now` is true, a transaction processes the
/// change at once.
fn change_deadline(
    system: &mut SystemState,
    config: &ExplorationConfig,
    process_now: bool,
    change: impl FnOnce(&mut service::Cluster),
) -> Result<(), PropertyViolation> {
    change(&mut Arc::make_mut(&mut system.database).cluster);
    if process_now {
        let _ = serve(system, config, ClusterEvent::Tick)?;
    }
    Ok(())
}

/// Lets the agent with this journal poll, or redeem its token if the database doesn't know it.
pub(super) fn poll_or_redeem(
    system: &mut SystemState,
    config: &ExplorationConfig,
    journal: &Journal,
) -> Result<StepOutcome, PropertyViolation> {
    let session = AgentSession { boot: journal.boot, nonce: nonce_of(system, journal) };
    let highest_epoch = journal.highest_epoch();
    let known = system.database.cluster.agents.contains_key(&journal.key);
    let event = match (&journal.record, known) {
        (Some(record), false) => ClusterEvent::Redeem(Redeem {
            record: Arc::clone(record),
            session,
            highest_epoch,
            grant: Grant {
                id: grant(),
                uses: u32::from(config.seats),
                expires: NOW.after(DAY),
                revoked: false,
            },
        }),
        _ => ClusterEvent::Poll(Poll { key: journal.key, session, highest_epoch }),
    };
    serve(system, config, event)
}

/// Returns the nonce of a journal's session. If a disk was copied, both hosts have equal journals
/// but different nonces. A host that no longer exists keeps a nonce of its own.
pub(super) fn nonce_of(system: &SystemState, journal: &Journal) -> u128 {
    let at = system.hosts.iter().position(|host| host.journal.as_ref() == Some(journal));
    u128::from(journal.boot) << 32 | at.unwrap_or(host_of(journal.key)) as u128
}

/// Delivers an ack to the service.
pub(super) fn deliver_ack(
    system: &mut SystemState,
    config: &ExplorationConfig,
    key: AgentKey,
    h: Hash,
) -> Result<StepOutcome, PropertyViolation> {
    let epoch = crate::explore::identities::epoch_of(h);
    serve(system, config, ClusterEvent::Ack { key, epoch, h, jws: Arc::from("") })
}

/// Delivers a release to the service.
pub(super) fn deliver_release(
    system: &mut SystemState,
    config: &ExplorationConfig,
    key: AgentKey,
) -> Result<(), PropertyViolation> {
    let Some(&epoch) = system.sent.releases.get(&key) else { return Ok(()) };
    let release = Release { epoch, jws: Arc::from("") };
    let _ = serve(system, config, ClusterEvent::Release { key, release })?;
    Ok(())
}

/// Lets a lease lapse.
pub(super) fn lapse(
    system: &mut SystemState,
    config: &ExplorationConfig,
    key: AgentKey,
) -> Result<(), PropertyViolation> {
    change_deadline(system, config, !config.quiet_lapses, |cluster| {
        if let Some(agent) = cluster.agents.get_mut(&key) {
            agent.lease_until = PASSED_DEADLINE;
        }
    })
}

/// Lets the frozen list of members time out.
pub(super) fn time_out(
    system: &mut SystemState,
    config: &ExplorationConfig,
) -> Result<(), PropertyViolation> {
    change_deadline(system, config, true, |cluster| {
        if let Some(frozen) = &mut cluster.frozen {
            frozen.at = PASSED_DEADLINE;
        }
    })
}

/// Ends an agent's backoff.
pub(super) fn end_backoff(
    system: &mut SystemState,
    config: &ExplorationConfig,
    key: AgentKey,
) -> Result<(), PropertyViolation> {
    change_deadline(system, config, true, |cluster| {
        if let Some(agent) = cluster.agents.get_mut(&key) {
            agent.backoff_until = PASSED_DEADLINE;
        }
    })
}

/// Lets the cluster's deadline pass.
pub(super) fn expire(
    system: &mut SystemState,
    config: &ExplorationConfig,
) -> Result<(), PropertyViolation> {
    change_deadline(system, config, true, |cluster| cluster.deadline = PASSED_DEADLINE)
}

/// Lets an owner accept the database as it is. Before that, the serving process restores its own
/// ledger's entries.
pub(super) fn accept(
    system: &mut SystemState,
    config: &ExplorationConfig,
) -> Result<(), PropertyViolation> {
    inspect_database(system, config, system.serving)?;
    let event = ClusterEvent::DatabaseAccepted { by: String::new() };
    let _ = transact(system, config, event)?;
    let database = Arc::make_mut(&mut system.database);
    database.settled = true;
    database.cluster.is_unsettled = false;
    Ok(())
}
