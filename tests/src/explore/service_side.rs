//! What happens at the service: transactions, processes, the database.

use std::sync::Arc;

use formation_explored::agent::Journal;
use formation_explored::service::{
    self, Context, Event, Grant, Outcome, Phase, Poll, Redeem, Settings,
};
use formation_explored::{Epoch, Hash, KeyId, Millis, Release, Session};

use crate::explore::config::Config;
use crate::explore::host_side::document_of;
use crate::explore::identity::{grant, hash_of, host_of};
use crate::explore::properties::{self, Violation};
use crate::explore::world::{Database, NOW, PASSED, PROCESSES, World, normalise};

/// One transaction: the production code's step on the row, and what everybody can know from it.
pub fn serve(world: &mut World, config: &Config, event: Event) -> Result<Outcome, Violation> {
    let before = Arc::clone(&world.database);
    let mut cluster = before.cluster.clone();
    let settings = Settings::DEFAULT;
    let context =
        Context { rules: &config.rules, settings: &settings, steady: true, hash: &hash_of };
    let outcome = service::step(&mut cluster, &context, NOW, event);
    properties::after_transaction(&before.cluster, &cluster, &outcome)?;
    normalise(&mut cluster, config);
    let forming = matches!(cluster.phase, Phase::Open | Phase::Preparing);
    let shown: Option<Epoch> = forming.then_some(cluster.epoch);
    let frozen = (cluster.phase == Phase::Preparing)
        .then(|| cluster.frozen.as_ref().map(|frozen| frozen.h))
        .flatten();
    if cluster != before.cluster {
        world.database = Arc::new(Database { cluster, compared: before.compared });
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
    Ok(outcome)
}

/// Changes the row as time does, then looks at it unless nobody does yet.
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

/// The agent with this journal polls, or redeems if it isn't known.
pub fn speak(world: &mut World, config: &Config, journal: &Journal) -> Result<Outcome, Violation> {
    let session = Session { boot: journal.boot, nonce: nonce_of(world, journal) };
    let highest_epoch = journal.highest_epoch();
    let holds = journal.held.as_ref().map(|held| held.h);
    let known = world.database.cluster.agents.contains_key(&journal.key);
    let event = match (&journal.record, known) {
        (Some(record), false) => Event::Redeem(Redeem {
            record: Arc::clone(record),
            session,
            highest_epoch,
            holds,
            grant: Grant {
                id: grant(),
                uses: u32::from(config.seats),
                expires: NOW.after(Millis(1)),
                revoked: false,
            },
        }),
        _ => Event::Poll(Poll { key: journal.key, session, highest_epoch, holds }),
    };
    serve(world, config, event)
}

/// Two hosts with one journal (a copy) have two nonces; a host that is no more had its own.
pub fn nonce_of(world: &World, journal: &Journal) -> u128 {
    let at = world.hosts.iter().position(|host| host.journal.as_ref() == Some(journal));
    u128::from(journal.boot) << 32 | at.unwrap_or(host_of(journal.key)) as u128
}

/// An ack arrives.
pub fn deliver_ack(
    world: &mut World,
    config: &Config,
    key: KeyId,
    h: Hash,
) -> Result<Outcome, Violation> {
    let epoch = crate::explore::identity::epoch_of(h);
    serve(world, config, Event::Ack { key, epoch, h, jws: Arc::from("") })
}

/// A release arrives.
pub fn deliver_release(world: &mut World, config: &Config, key: KeyId) -> Result<(), Violation> {
    let Some(&epoch) = world.said.releases.get(&key) else { return Ok(()) };
    let release = Release { epoch, jws: Arc::from("") };
    let _ = serve(world, config, Event::Release { key, release })?;
    Ok(())
}

/// A lease has lapsed.
pub fn lapse(world: &mut World, config: &Config, key: KeyId) -> Result<(), Violation> {
    let_pass(world, config, !config.quiet_lapses, |cluster| {
        if let Some(agent) = cluster.agents.get_mut(&key) {
            agent.lease_until = PASSED;
        }
    })
}

/// The frozen list's time is over.
pub fn time_out(world: &mut World, config: &Config) -> Result<(), Violation> {
    let_pass(world, config, true, |cluster| {
        if let Some(frozen) = &mut cluster.frozen {
            frozen.at = PASSED;
        }
    })
}

/// A hold-back is over.
pub fn hold_over(world: &mut World, config: &Config, key: KeyId) -> Result<(), Violation> {
    let_pass(world, config, true, |cluster| {
        if let Some(agent) = cluster.agents.get_mut(&key) {
            agent.held_until = PASSED;
        }
    })
}

/// The deadline passes.
pub fn expire(world: &mut World, config: &Config) -> Result<(), Violation> {
    let_pass(world, config, true, |cluster| cluster.deadline = PASSED)
}

/// A process lets the decided document out: ledger first.
pub fn publish(world: &mut World, config: &Config, at: usize) -> Result<(), Violation> {
    let frozen = world.database.cluster.frozen.as_ref();
    let Some(h) = frozen.map(|frozen| frozen.h) else { return Ok(()) };
    properties::document_leaves(world, config, h)?;
    if config.environment.ledger {
        world.processes[at].ledger.insert(h);
    }
    Arc::make_mut(&mut world.said).documents.insert(h);
    Ok(())
}

/// The backup is put in the database's place.
pub fn restore(world: &mut World, config: &Config) {
    let Some(backup) = world.backup.take() else { return };
    let mut database = (*backup).clone();
    Arc::make_mut(&mut world.said).abandoned = false;
    if config.environment.ledger {
        database.compared = [false; PROCESSES];
        for process in &mut world.processes {
            process.connected = false;
        }
    }
    for process in &mut world.processes {
        process.read = None;
    }
    world.database = Arc::new(database);
}

/// A process finds another database than it knew: it says so, puts back what its ledger has, and
/// settles once every process has.
pub fn connect(world: &mut World, config: &Config, at: usize) -> Result<(), Violation> {
    if world.database.compared == [false; PROCESSES] {
        let _ = serve(world, config, Event::DatabaseChanged)?;
    }
    let ledger: Vec<Hash> = world.processes[at].ledger.iter().copied().collect();
    for h in ledger {
        let _ = serve(world, config, Event::Adopt(document_of(h)))?;
    }
    world.processes[at].connected = true;
    Arc::make_mut(&mut world.database).compared[at] = true;
    if world.database.compared == [true; PROCESSES] {
        let _ = serve(world, config, Event::DatabaseSettled)?;
    }
    Ok(())
}

/// A process crashes: what it had not synced is lost.
pub fn crash(world: &mut World, config: &Config, at: usize) {
    if !config.environment.ledger_sync {
        world.processes[at].ledger.clear();
    }
    world.processes[at].read = None;
}
