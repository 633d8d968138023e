//! Steps of the service: transactions, messages that arrive, and deadlines.

use std::sync::Arc;

use formation_explored::agent::Journal;
use formation_explored::service::{
    self, Cluster, Context, Event, Grant, Outcome, Phase, Poll, Redeem, Refusal, Settings,
};
use formation_explored::{Epoch, Hash, KeyId, Release, Session};

use crate::explore::config::Config;
use crate::explore::database::decision;
use crate::explore::identity::{grant, hash_of, host_of};
use crate::explore::processes::{look, may_decide};
use crate::explore::properties::{self, Violation};
use crate::explore::world::{DAY, NOW, PASSED, World, normalise};

/// Runs one transaction of the serving process. It freezes, commits or ends nothing while the ledger
/// is behind the database or contradicts the decision. In that case the process looks at the
/// database again, and retries once.
pub(super) fn serve(
    world: &mut World,
    config: &Config,
    event: Event,
) -> Result<Outcome, Violation> {
    let at = world.serving;
    if !world.processes[at].connected {
        look(world, config, at)?;
    }
    for _ in 0..2 {
        let (cluster, outcome) = step(world, config, event.clone())?;
        let refused = config.environment.ledger
            && !matches!(event, Event::DatabaseAccepted { .. })
            && decision(&outcome).is_some_and(|decision| !may_decide(world, config, decision));
        if !refused {
            save(world, config, cluster, &outcome);
            return Ok(outcome);
        }
        look(world, config, at)?;
    }
    let answer = Err(Refusal::Unsettled);
    let (changes, alarms) = (Vec::new(), Vec::new());
    Ok(Outcome { answer, changed: false, changes, committed: None, alarms })
}

/// Runs one transaction without checking a ledger.
pub(super) fn transact(
    world: &mut World,
    config: &Config,
    event: Event,
) -> Result<Outcome, Violation> {
    let (cluster, outcome) = step(world, config, event)?;
    save(world, config, cluster, &outcome);
    Ok(outcome)
}

/// Runs the production code's step on the row. If the database has changed or settled, the row
/// processes that event first.
fn step(world: &World, config: &Config, event: Event) -> Result<(Cluster, Outcome), Violation> {
    let before = &world.database.cluster;
    let mut cluster = before.clone();
    let settings = Settings::DEFAULT;
    let context = Context {
        rules: &config.rules,
        settings: &settings,
        steady: !world.is_ahead,
        hash: &hash_of,
    };
    let now = world.now();
    let first = match (world.database.settled, cluster.unsettled) {
        (false, false) => Some(Event::DatabaseChanged),
        (true, true) => Some(Event::DatabaseSettled),
        _ => None,
    };
    let heard = first.map(|first| service::step(&mut cluster, &context, now, first));
    let between = cluster.clone();
    let mut outcome = service::step(&mut cluster, &context, now, event);
    properties::after_transaction(&between, &cluster, &outcome, now)?;
    if let Some(mut heard) = heard {
        properties::after_transaction(before, &between, &heard, now)?;
        heard.changes.append(&mut outcome.changes);
        outcome.changes = heard.changes;
    }
    Ok((cluster, outcome))
}

/// Stores the row that a transaction has produced, and adds what anyone can now know to `Said`.
fn save(world: &mut World, config: &Config, mut cluster: Cluster, outcome: &Outcome) {
    normalise(&mut cluster, config);
    let forming = matches!(cluster.phase, Phase::Open | Phase::Preparing);
    let shown: Option<Epoch> = forming.then_some(cluster.epoch);
    let frozen = (cluster.phase == Phase::Preparing)
        .then(|| cluster.frozen.as_ref().map(|frozen| frozen.h))
        .flatten();
    if cluster != world.database.cluster {
        let database = Arc::make_mut(&mut world.database);
        database.cluster = cluster;
        database.note_decisions(outcome);
    }
    let said = &world.said;
    let news = shown.is_some_and(|epoch| epoch > said.epoch)
        || frozen.is_some_and(|h| !said.proposals.contains(&h))
        || outcome.committed.is_some_and(|h| !said.committed.contains(&h));
    if news {
        let said = Arc::make_mut(&mut world.said);
        said.epoch = said.epoch.max(shown.unwrap_or(0));
        said.proposals.extend(frozen);
        said.committed.extend(outcome.committed);
    }
}

/// Changes the row as passing time does. If `look` is true, a transaction then processes it.
fn let_pass(
    world: &mut World,
    config: &Config,
    look: bool,
    change: impl FnOnce(&mut service::Cluster),
) -> Result<(), Violation> {
    change(&mut Arc::make_mut(&mut world.database).cluster);
    if look {
        let _ = serve(world, config, Event::Tick)?;
    }
    Ok(())
}

/// Lets the agent with this journal poll, or redeem its token if the database doesn't know it.
pub(super) fn speak(
    world: &mut World,
    config: &Config,
    journal: &Journal,
) -> Result<Outcome, Violation> {
    let session = Session { boot: journal.boot, nonce: nonce_of(world, journal) };
    let highest_epoch = journal.highest_epoch();
    let known = world.database.cluster.agents.contains_key(&journal.key);
    let event = match (&journal.record, known) {
        (Some(record), false) => Event::Redeem(Redeem {
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
        _ => Event::Poll(Poll { key: journal.key, session, highest_epoch }),
    };
    serve(world, config, event)
}

/// Returns the nonce of a journal's session. Two hosts with equal journals, one of them a copy, have
/// different nonces. A host that no longer exists has its own one.
pub(super) fn nonce_of(world: &World, journal: &Journal) -> u128 {
    let at = world.hosts.iter().position(|host| host.journal.as_ref() == Some(journal));
    u128::from(journal.boot) << 32 | at.unwrap_or(host_of(journal.key)) as u128
}

/// Delivers an ack to the service.
pub(super) fn deliver_ack(
    world: &mut World,
    config: &Config,
    key: KeyId,
    h: Hash,
) -> Result<Outcome, Violation> {
    let epoch = crate::explore::identity::epoch_of(h);
    serve(world, config, Event::Ack { key, epoch, h, jws: Arc::from("") })
}

/// Delivers a release to the service.
pub(super) fn deliver_release(
    world: &mut World,
    config: &Config,
    key: KeyId,
) -> Result<(), Violation> {
    let Some(&epoch) = world.said.releases.get(&key) else { return Ok(()) };
    let release = Release { epoch, jws: Arc::from("") };
    let _ = serve(world, config, Event::Release { key, release })?;
    Ok(())
}

/// Lets a lease lapse.
pub(super) fn lapse(world: &mut World, config: &Config, key: KeyId) -> Result<(), Violation> {
    let_pass(world, config, !config.quiet_lapses, |cluster| {
        if let Some(agent) = cluster.agents.get_mut(&key) {
            agent.lease_until = PASSED;
        }
    })
}

/// Lets the frozen list time out.
pub(super) fn time_out(world: &mut World, config: &Config) -> Result<(), Violation> {
    let_pass(world, config, true, |cluster| {
        if let Some(frozen) = &mut cluster.frozen {
            frozen.at = PASSED;
        }
    })
}

/// Ends an agent's hold-back.
pub(super) fn hold_over(world: &mut World, config: &Config, key: KeyId) -> Result<(), Violation> {
    let_pass(world, config, true, |cluster| {
        if let Some(agent) = cluster.agents.get_mut(&key) {
            agent.held_until = PASSED;
        }
    })
}

/// Lets the cluster's deadline pass.
pub(super) fn expire(world: &mut World, config: &Config) -> Result<(), Violation> {
    let_pass(world, config, true, |cluster| cluster.deadline = PASSED)
}

/// Accepts the database as it is. The serving process puts its own ledger back first.
pub(super) fn accept(world: &mut World, config: &Config) -> Result<(), Violation> {
    look(world, config, world.serving)?;
    let event = Event::DatabaseAccepted { by: String::new() };
    let _ = transact(world, config, event)?;
    let database = Arc::make_mut(&mut world.database);
    database.settled = true;
    database.cluster.unsettled = false;
    Ok(())
}
