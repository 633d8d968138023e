//! Steps of hosts: agents, their disks and their nodes.

use std::sync::Arc;

use formation_explored::agent::{
    self, Action as Todo, Agent, Decision, Directory, Event, From, Journal, Listing, Offer, Output,
    ProbeAnswer, Shown, Target, at_start,
};
use formation_explored::service::{Event as ServiceEvent, Phase, Refusal};
use formation_explored::{Document, Epoch, Hash, KeyId, Millis, Permissions};

use crate::explore::config::Config;
use crate::explore::identity::{
    LIVES, host_of, incarnation, machine, proposal_of, record, statement,
};
use crate::explore::properties::{self, Property, Violation};
use crate::explore::service_side::serve;
use crate::explore::world::{AHEAD, Host, Mode, World};

/// Returns the class of `host`'s node directory, as the production code classifies its listing.
#[must_use]
pub(super) fn directory_of(config: &Config, host: &Host) -> Directory {
    agent::classify(&config.rules, &host.directory)
}

fn agent_at(world: &World, at: usize) -> Agent {
    let journal = world.hosts[at].journal.clone().expect("the action is for a host with a journal");
    let nonce = u128::from(journal.boot) << 32 | at as u128;
    Agent::new(journal, nonce)
}

/// Stores the output's journal, then carries out its actions in order. Returns the targets to probe,
/// if there are any.
fn perform(
    world: &mut World,
    config: &Config,
    at: usize,
    output: Output,
) -> Result<Option<Vec<Target>>, Violation> {
    if let Some(journal) = output.durable {
        let host = Arc::make_mut(&mut world.hosts[at]);
        let before = host.journal.replace(*journal);
        if !config.environment.journal_sync {
            host.unsynced = Some(before.map(Box::new));
        }
    }
    let key = world.hosts[at].journal.as_ref().map_or_else(|| world.key(at), |journal| journal.key);
    let mut targets = None;
    for todo in output.then {
        match todo {
            Todo::SignAck { h, .. } => {
                Arc::make_mut(&mut world.said).acks.insert((key, h));
            }
            Todo::SignRelease { epoch } => {
                let said = Arc::make_mut(&mut world.said);
                let known = said.releases.entry(key).or_insert(epoch);
                *known = epoch.max(*known);
            }
            Todo::Nack { epoch, reason } => {
                if !config.liar {
                    let reason = reason.to_string();
                    let _ = serve(world, config, ServiceEvent::Nack { key, epoch, reason })?;
                }
            }
            Todo::SendRow { epoch, row } => {
                if !config.liar {
                    let _ = serve(world, config, ServiceEvent::Probes { key, epoch, row })?;
                }
            }
            Todo::Probe { targets: whom, .. } => targets = Some(whom),
            Todo::LookAtDirectory => set_mode(world, at, Mode::Looks),
            Todo::WriteMarker { .. } => set_mode(world, at, Mode::Marks),
            Todo::Launch(_) => set_mode(world, at, Mode::Launches),
            Todo::ReplacementWanted { .. } => set_mode(world, at, Mode::WantsReplacement),
            Todo::Stop { exit, .. } => set_mode(world, at, Mode::Stopped(exit)),
            // Each of these is an action of its own in the exploration.
            Todo::Redeem | Todo::ShowDocument { .. } | Todo::Report => {}
        }
    }
    Ok(targets)
}

fn set_mode(world: &mut World, at: usize, mode: Mode) {
    if world.hosts[at].mode != mode {
        Arc::make_mut(&mut world.hosts[at]).mode = mode;
    }
}

/// Starts the agent for the first time: makes its key, its record and the session for redeeming.
pub(super) fn join(world: &mut World, config: &Config, at: usize) -> Result<(), Violation> {
    let key = world.key(at);
    let host = Arc::make_mut(&mut world.hosts[at]);
    host.journal = Some(Journal::new(key, incarnation(key), machine(at)));
    let mut agent = agent_at(world, at);
    let output = agent.step(&config.rules, Event::RecordReady(record(key)));
    perform(world, config, at, output)?;
    Ok(())
}

/// Shows `epoch` to the agent, in a present or an older answer of the service.
pub(super) fn see_epoch(
    world: &mut World,
    config: &Config,
    at: usize,
    epoch: Epoch,
) -> Result<(), Violation> {
    let shown = Shown { phase: Phase::Open, epoch, show_document: false };
    let output = agent_at(world, at).step(&config.rules, Event::Shown(shown));
    perform(world, config, at, output)?;
    Ok(())
}

/// Gives the agent the service's refusal of its last request.
pub(super) fn see_refusal(
    world: &mut World,
    config: &Config,
    at: usize,
    refusal: &Refusal,
) -> Result<(), Violation> {
    let event = Event::Refused { code: Some(refusal.code()), retryable: refusal.is_retryable() };
    let output = agent_at(world, at).step(&config.rules, event);
    perform(world, config, at, output)?;
    // The agent has stopped until a person brings another token. The road checks whether that was
    // needed.
    if matches!(refusal, Refusal::GrantUsed) {
        set_mode(world, at, Mode::Stopped(1));
    }
    Ok(())
}

/// Shows the agent a list: it probes the members, and signs, refuses or sends its row of the matrix.
pub(super) fn consider(
    world: &mut World,
    config: &Config,
    at: usize,
    h: Hash,
    impatient: bool,
) -> Result<(), Violation> {
    let mut agent = agent_at(world, at);
    let own = agent.journal.key;
    let offer = Offer {
        proposal: proposal_of(h),
        h,
        permissions: Permissions { allow_even: true, ..Permissions::default() },
        statement: statement(config.seats).hash,
        size: config.seats,
        invalid: std::collections::BTreeMap::new(),
        skew: if world.is_ahead { AHEAD } else { Millis(0) },
        is_behind: world.is_ahead,
        directory: directory_of(config, &world.hosts[at]),
        machine: machine(at),
    };
    let epoch = offer.proposal.epoch;
    // Every answer of the service contains the releases, before the proposal.
    for (&key, &epoch) in &world.said.releases.clone() {
        let output = agent.step(&config.rules, Event::ReleaseSeen { key, epoch });
        perform(world, config, at, output)?;
    }
    let output = agent.step(&config.rules, Event::Offered(Box::new(offer)));
    let targets = perform(world, config, at, output)?;
    for target in targets.unwrap_or_default() {
        let result = probe(world, at, own, &target);
        let event = Event::Probed { epoch, peer: target.key, result };
        let output = agent.step(&config.rules, event);
        perform(world, config, at, output)?;
    }
    if impatient {
        let output = agent.step(&config.rules, Event::Impatient { epoch });
        perform(world, config, at, output)?;
    }
    Ok(())
}

/// Returns the result of a probe, as the target's own production code answers it. If the proposal
/// lists both, the target is assumed to have seen it, because the prober retries until then.
fn probe(
    world: &World,
    prober: usize,
    from: KeyId,
    target: &Target,
) -> Result<ProbeAnswer, String> {
    let closed = || "connection closed".to_owned();
    let at = host_of(target.key);
    let host = &world.hosts[at];
    if !world.links.reaches(prober, at) {
        return Err("unreachable".to_owned());
    }
    let listening = matches!(host.mode, Mode::Runs | Mode::Looks | Mode::Marks);
    if !host.alive || !listening || host.journal.is_none() {
        return Err(closed());
    }
    let peer = agent_at(world, at);
    // If an agent's steps are taken at once, the probe may have arrived before the launch.
    if !peer.listens() && !world.is_hurried() {
        return Err(closed());
    }
    if target.in_proposal {
        let journal = &peer.journal;
        return Ok(ProbeAnswer {
            key: journal.key,
            incarnation: journal.incarnation,
            released: journal.released,
        });
    }
    peer.answer_probe(from).ok_or_else(closed)
}

/// Gives the agent a document.
pub(super) fn see_document(
    world: &mut World,
    config: &Config,
    at: usize,
    h: Hash,
) -> Result<(), Violation> {
    let output = agent_at(world, at).step(
        &config.rules,
        Event::DocumentShown { document: Arc::new(document_of(h)), machine: machine(at) },
    );
    perform(world, config, at, output)?;
    Ok(())
}

/// Returns the document of the list that `h` encodes.
#[must_use]
pub(super) fn document_of(h: Hash) -> Document {
    Document { proposal: proposal_of(h), h, text: Arc::from("") }
}

/// Lets the agent take its pending step: look at the directory, write the marker, or launch the
/// node.
pub(super) fn act(world: &mut World, config: &Config, at: usize) -> Result<(), Violation> {
    match world.hosts[at].mode {
        Mode::Looks => {
            set_mode(world, at, Mode::Runs);
            let directory = directory_of(config, &world.hosts[at]);
            let output = agent_at(world, at).step(&config.rules, Event::Looked(directory));
            perform(world, config, at, output)?;
        }
        Mode::Marks => {
            let host = Arc::make_mut(&mut world.hosts[at]);
            host.mode = Mode::Runs;
            let whose = host.journal.as_ref().map(|journal| journal.incarnation);
            host.directory.marker = whose;
            host.directory.entries.push(agent::MARKER.to_owned());
            let output = agent_at(world, at).step(&config.rules, Event::MarkerWritten);
            perform(world, config, at, output)?;
        }
        Mode::Launches => {
            set_mode(world, at, Mode::Runs);
            execute(world, config, at)?;
        }
        Mode::Runs | Mode::WantsReplacement | Mode::Refuses | Mode::Stopped(_) => {}
    }
    Ok(())
}

fn execute(world: &mut World, config: &Config, at: usize) -> Result<(), Violation> {
    let journal = world.hosts[at].journal.as_ref();
    let held = journal.and_then(|journal| journal.held.as_ref()).map(|held| held.h);
    let Some(h) = held else { return Ok(()) };
    if world.hosts[at].node.is_none() {
        properties::node_executed(world, config, h)?;
        Arc::make_mut(&mut world.hosts[at]).node = Some(h);
    }
    Ok(())
}

/// Lets the node make its log from nothing.
pub(super) fn make_log(world: &mut World, config: &Config, at: usize) -> Result<(), Violation> {
    let host = &world.hosts[at];
    let (Some(h), Some(journal)) = (host.node, &host.journal) else { return Ok(()) };
    let (key, whose) = (journal.key, journal.incarnation);
    properties::log_made(world, host, key)?;
    let host = Arc::make_mut(&mut world.hosts[at]);
    host.directory.log = true;
    host.directory.entries.push(agent::MEMBER.to_owned());
    Arc::make_mut(&mut world.said).started.insert(whose, h);
    properties::no_two_majorities(world, config)
}

/// Tells the agent that its node has a log.
pub(super) fn see_log(world: &mut World, config: &Config, at: usize) -> Result<(), Violation> {
    let output = agent_at(world, at).step(&config.rules, Event::LogSeen);
    perform(world, config, at, output)?;
    Ok(())
}

/// Restarts the agent. Its journal and the node's directory decide how it goes on.
pub(super) fn restart(world: &mut World, config: &Config, at: usize) -> Result<(), Violation> {
    let directory = directory_of(config, &world.hosts[at]);
    let machine = machine(at);
    let lost = world.hosts[at].data_lost;
    let mut decision =
        at_start(&config.rules, world.hosts[at].journal.as_ref(), &machine, &directory);
    let host = Arc::make_mut(&mut world.hosts[at]);
    if decision == Decision::SetAsideAndBeginNew {
        host.journal = None;
        decision = at_start(&config.rules, None, &machine, &directory);
    }
    if let Some(journal) = host.journal.take() {
        let counts = matches!(decision, Decision::GoOn | Decision::GoOnToLaunch);
        host.journal = Some(if counts { journal.rebooted() } else { journal });
    }
    host.mode = match decision {
        Decision::BeginNew | Decision::SetAsideAndBeginNew | Decision::GoOn => Mode::Runs,
        Decision::GoOnToLaunch => Mode::Looks,
        // Adopt a node that has outlived its agent.
        Decision::Start(From::List | From::Log) => {
            if host.node.is_some() {
                Mode::Runs
            } else {
                Mode::Launches
            }
        }
        Decision::ReplacementWanted { ref why } => {
            if !lost {
                let what = format!("a replacement is asked for, and nothing was lost: {why}");
                return Err(Violation::of(Property::AWayOut, what));
            }
            Mode::WantsReplacement
        }
        Decision::Refuse { .. } => Mode::Refuses,
        Decision::Removed => Mode::Stopped(3),
    };
    Ok(())
}

/// Kills and restarts the agent. If journals aren't synced, the power is cut as well.
pub(super) fn kill(world: &mut World, config: &Config, at: usize) -> Result<(), Violation> {
    if let Some(before) = world.hosts[at].unsynced.clone() {
        let host = Arc::make_mut(&mut world.hosts[at]);
        host.unsynced = None;
        host.journal = before.map(|journal| *journal);
        host.node = None;
    }
    restart(world, config, at)
}

/// Replaces the node's file system by an empty one, and restarts the host.
pub(super) fn lose_directory(
    world: &mut World,
    config: &Config,
    at: usize,
) -> Result<(), Violation> {
    let host = Arc::make_mut(&mut world.hosts[at]);
    host.data_lost |= host.directory.log || host.directory.marker.is_some();
    host.node = None;
    host.directory = Listing { entries: vec!["lost+found".to_owned()], ..Listing::default() };
    if host.journal.is_some() && !matches!(host.mode, Mode::Stopped(_)) {
        restart(world, config, at)?;
    }
    Ok(())
}

/// Re-images the host: nothing on it survives, but its messages do.
pub(super) fn remake(world: &mut World, at: usize) {
    let past = world.hosts[at].journal.clone();
    let host = Arc::make_mut(&mut world.hosts[at]);
    host.life = (host.life + 1).min(u8::try_from(LIVES - 1).unwrap_or(u8::MAX));
    host.journal = None;
    host.unsynced = None;
    host.directory = Listing::default();
    host.mode = Mode::Runs;
    host.node = None;
    host.data_lost = false;
    if let Some(journal) = past {
        Arc::make_mut(&mut world.said).past.push(journal);
    }
}

/// Starts host `to` from a copy of `from`'s disk.
pub(super) fn clone_disk(
    world: &mut World,
    config: &Config,
    from: usize,
    to: usize,
) -> Result<(), Violation> {
    let original = Arc::clone(&world.hosts[from]);
    let host = Arc::make_mut(&mut world.hosts[to]);
    host.journal.clone_from(&original.journal);
    host.directory.clone_from(&original.directory);
    restart(world, config, to)
}
