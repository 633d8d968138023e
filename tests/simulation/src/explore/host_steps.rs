//! Steps of hosts: agents, their disks and their nodes.

use std::sync::Arc;

use formation_explored::agent::{
    self, Agent, AgentAction as Todo, AgentEvent, AgentOutput, ClusterStatus, DirectoryKind,
    DirectoryListing, ExaminedProposal, Journal, ProbeAnswer, ProbeTarget, StartDecision,
    StartSource, decide_at_start,
};
use formation_explored::service::{ClusterEvent as ServiceEvent, Phase, Refusal};
use formation_explored::{AgentKey, CommitDocument, Epoch, Hash, Millis, Permissions};

use crate::explore::config::ExplorationConfig;
use crate::explore::identities::{
    MAX_KEYS_PER_HOST, host_of, incarnation, machine, proposal_of, record, statement,
};
use crate::explore::properties::{self, Property, PropertyViolation};
use crate::explore::service_steps::serve;
use crate::explore::state::{AgentMode, CLOCK_JUMP, HostState, SystemState};

/// Returns the class of `host`'s node directory, as the production code classifies its listing.
#[must_use]
pub(super) fn directory_of(config: &ExplorationConfig, host: &HostState) -> DirectoryKind {
    agent::classify(&config.rules, &host.directory)
}

fn agent_at(system: &SystemState, at: usize) -> Agent {
    let journal =
        system.hosts[at].journal.clone().expect("the action is for a host with a journal");
    let nonce = u128::from(journal.boot) << 32 | at as u128;
    Agent::new(journal, nonce)
}

/// Stores the output's journal, then carries out its actions in order. Returns the targets to
/// probe, if there are any.
fn perform_output(
    system: &mut SystemState,
    config: &ExplorationConfig,
    at: usize,
    output: AgentOutput,
) -> Result<Option<Vec<ProbeTarget>>, PropertyViolation> {
    if let Some(journal) = output.journal {
        let host = Arc::make_mut(&mut system.hosts[at]);
        let before = host.journal.replace(*journal);
        if !config.environment.journal_sync {
            host.journal_before_change = Some(before.map(Box::new));
        }
    }
    let key =
        system.hosts[at].journal.as_ref().map_or_else(|| system.key(at), |journal| journal.key);
    let mut targets = None;
    for todo in output.actions {
        match todo {
            Todo::SignAck { h, .. } => {
                Arc::make_mut(&mut system.sent).acks.insert((key, h));
            }
            Todo::SignRelease { epoch } => {
                let sent = Arc::make_mut(&mut system.sent);
                let known = sent.releases.entry(key).or_insert(epoch);
                *known = epoch.max(*known);
            }
            Todo::Nack { epoch, reason } => {
                if !config.service_lies {
                    let reason = reason.to_string();
                    let _ = serve(system, config, ServiceEvent::Nack { key, epoch, reason })?;
                }
            }
            Todo::SendProbeResults { epoch, row } => {
                if !config.service_lies {
                    let _ = serve(system, config, ServiceEvent::Probes { key, epoch, row })?;
                }
            }
            Todo::Probe { targets: to_probe, .. } => targets = Some(to_probe),
            Todo::ExamineDirectory => set_mode(system, at, AgentMode::InspectingDirectory),
            Todo::WriteMarker { .. } => set_mode(system, at, AgentMode::WritingMarker),
            Todo::Launch(_) => set_mode(system, at, AgentMode::LaunchingNode),
            Todo::RequestReplacement { .. } => set_mode(system, at, AgentMode::AwaitingReplacement),
            Todo::Stop { exit, .. } => set_mode(system, at, AgentMode::Stopped(exit)),
            // Nothing happens here: redeeming, sending the document and reporting are separate
            // `SystemAction`s of the exploration.
            Todo::Redeem | Todo::SendDocument { .. } | Todo::Report => {}
        }
    }
    Ok(targets)
}

fn set_mode(system: &mut SystemState, at: usize, mode: AgentMode) {
    if system.hosts[at].mode != mode {
        Arc::make_mut(&mut system.hosts[at]).mode = mode;
    }
}

/// Starts the agent for the first time: makes its key, its record and the session for redeeming.
pub(super) fn join(
    system: &mut SystemState,
    config: &ExplorationConfig,
    at: usize,
) -> Result<(), PropertyViolation> {
    let key = system.key(at);
    let host = Arc::make_mut(&mut system.hosts[at]);
    host.journal = Some(Journal::new(key, incarnation(key), machine(at)));
    let mut agent = agent_at(system, at);
    let output = agent.step(&config.rules, AgentEvent::RecordReady(record(key)));
    perform_output(system, config, at, output)?;
    Ok(())
}

/// Lets the agent receive `epoch` in a present or an older answer of the service.
pub(super) fn receive_epoch(
    system: &mut SystemState,
    config: &ExplorationConfig,
    at: usize,
    epoch: Epoch,
) -> Result<(), PropertyViolation> {
    let status = ClusterStatus { phase: Phase::Open, epoch, wants_document: false };
    let output = agent_at(system, at).step(&config.rules, AgentEvent::StatusReceived(status));
    perform_output(system, config, at, output)?;
    Ok(())
}

/// Lets the agent receive the service's refusal of its last request.
pub(super) fn receive_refusal(
    system: &mut SystemState,
    config: &ExplorationConfig,
    at: usize,
    refusal: &Refusal,
) -> Result<(), PropertyViolation> {
    let event = AgentEvent::RequestRefused {
        code: Some(refusal.code()),
        retryable: refusal.is_retryable(),
    };
    let output = agent_at(system, at).step(&config.rules, event);
    perform_output(system, config, at, output)?;
    // The agent stops until a person brings another token. The fault-free run checks whether
    // another token was really needed.
    if matches!(refusal, Refusal::GrantUsed) {
        set_mode(system, at, AgentMode::Stopped(1));
    }
    Ok(())
}

/// Shows the agent a list of members. The agent probes the members. Then it signs or refuses the
/// list, or sends its row of the matrix (which members it reaches).
pub(super) fn examine_list(
    system: &mut SystemState,
    config: &ExplorationConfig,
    at: usize,
    h: Hash,
    has_timed_out: bool,
) -> Result<(), PropertyViolation> {
    let mut agent = agent_at(system, at);
    let own = agent.journal.key;
    let examined = ExaminedProposal {
        proposal: proposal_of(h),
        proposal_hash: h,
        permissions: Permissions { allow_even: true, ..Permissions::default() },
        spreads_zones: false,
        statement: statement(config.seats).hash,
        size: config.seats,
        invalid_records: std::collections::BTreeMap::new(),
        skew: if system.is_ahead { CLOCK_JUMP } else { Millis(0) },
        is_behind: system.is_ahead,
        directory: directory_of(config, &system.hosts[at]),
        machine: machine(at),
    };
    let epoch = examined.proposal.epoch;
    // Every answer of the service contains the releases, and the agent reads them before the
    // proposal.
    for (&key, &epoch) in &system.sent.releases.clone() {
        let output = agent.step(&config.rules, AgentEvent::ReleaseSeen { key, epoch });
        perform_output(system, config, at, output)?;
    }
    let output = agent.step(&config.rules, AgentEvent::ProposalReceived(Box::new(examined)));
    let targets = perform_output(system, config, at, output)?;
    for target in targets.unwrap_or_default() {
        let result = probe(system, at, own, &target);
        let event = AgentEvent::ProbeEnded { epoch, peer: target.key, result };
        let output = agent.step(&config.rules, event);
        perform_output(system, config, at, output)?;
    }
    if has_timed_out {
        let output = agent.step(&config.rules, AgentEvent::ReleaseTimeout { epoch });
        perform_output(system, config, at, output)?;
    }
    Ok(())
}

/// Returns the result of a probe, as the target's own production code answers it. If the proposal
/// lists both hosts, the target is assumed to have seen the proposal: the prober would retry until
/// then.
fn probe(
    system: &SystemState,
    prober: usize,
    from: AgentKey,
    target: &ProbeTarget,
) -> Result<ProbeAnswer, String> {
    let closed = || "connection closed".to_owned();
    let at = host_of(target.key);
    let host = &system.hosts[at];
    if !system.links.reaches(prober, at) {
        return Err("unreachable".to_owned());
    }
    let listening = matches!(
        host.mode,
        AgentMode::Running | AgentMode::InspectingDirectory | AgentMode::WritingMarker
    );
    if !host.alive || !listening || host.journal.is_none() {
        return Err(closed());
    }
    let peer = agent_at(system, at);
    // An agent that takes all its steps in one action skips the state before its launch, in which
    // it still listens for probes. So the probe counts as having arrived in that state.
    if !peer.is_listening() && !system.are_agent_steps_atomic() {
        return Err(closed());
    }
    if target.is_in_proposal {
        let journal = &peer.journal;
        return Ok(ProbeAnswer {
            key: journal.key,
            incarnation: journal.incarnation,
            released_epoch: journal.released_epoch,
        });
    }
    peer.answer_probe(from).ok_or_else(closed)
}

/// Lets the agent receive a commit document.
pub(super) fn receive_document(
    system: &mut SystemState,
    config: &ExplorationConfig,
    at: usize,
    h: Hash,
) -> Result<(), PropertyViolation> {
    let output = agent_at(system, at).step(
        &config.rules,
        AgentEvent::DocumentReceived { document: Arc::new(document_of(h)), machine: machine(at) },
    );
    perform_output(system, config, at, output)?;
    Ok(())
}

/// Returns the commit document of the list of members that `h` encodes.
#[must_use]
pub(super) fn document_of(h: Hash) -> CommitDocument {
    CommitDocument { proposal: proposal_of(h), proposal_hash: h, text: Arc::from("") }
}

/// Lets the agent take its pending step: examine the directory, write the marker, or launch the
/// node.
pub(super) fn advance_agent(
    system: &mut SystemState,
    config: &ExplorationConfig,
    at: usize,
) -> Result<(), PropertyViolation> {
    match system.hosts[at].mode {
        AgentMode::InspectingDirectory => {
            set_mode(system, at, AgentMode::Running);
            let directory = directory_of(config, &system.hosts[at]);
            let output =
                agent_at(system, at).step(&config.rules, AgentEvent::DirectoryExamined(directory));
            perform_output(system, config, at, output)?;
        }
        AgentMode::WritingMarker => {
            let host = Arc::make_mut(&mut system.hosts[at]);
            host.mode = AgentMode::Running;
            let whose = host.journal.as_ref().map(|journal| journal.incarnation);
            host.directory.marker = whose;
            host.directory.entries.push(agent::MARKER.to_owned());
            let output = agent_at(system, at).step(&config.rules, AgentEvent::MarkerWritten);
            perform_output(system, config, at, output)?;
        }
        AgentMode::LaunchingNode => {
            set_mode(system, at, AgentMode::Running);
            execute(system, config, at)?;
        }
        AgentMode::Running
        | AgentMode::AwaitingReplacement
        | AgentMode::RefusingDirectory
        | AgentMode::Stopped(_) => {}
    }
    Ok(())
}

fn execute(
    system: &mut SystemState,
    config: &ExplorationConfig,
    at: usize,
) -> Result<(), PropertyViolation> {
    let journal = system.hosts[at].journal.as_ref();
    let held =
        journal.and_then(|journal| journal.held_document.as_ref()).map(|held| held.proposal_hash);
    let Some(h) = held else { return Ok(()) };
    if system.hosts[at].running_list.is_none() {
        properties::check_executed_node(system, config, h)?;
        Arc::make_mut(&mut system.hosts[at]).running_list = Some(h);
    }
    Ok(())
}

/// Lets the node make its log from nothing.
pub(super) fn make_log(
    system: &mut SystemState,
    config: &ExplorationConfig,
    at: usize,
) -> Result<(), PropertyViolation> {
    let host = &system.hosts[at];
    let (Some(h), Some(journal)) = (host.running_list, &host.journal) else { return Ok(()) };
    let (key, whose) = (journal.key, journal.incarnation);
    properties::check_new_log(system, host, key)?;
    let host = Arc::make_mut(&mut system.hosts[at]);
    host.directory.has_log = true;
    host.directory.entries.push(agent::MEMBER_FOLDER.to_owned());
    Arc::make_mut(&mut system.sent).started.insert(whose, h);
    properties::check_majorities(system, config)
}

/// Tells the agent that its node has a log.
pub(super) fn notice_node_log(
    system: &mut SystemState,
    config: &ExplorationConfig,
    at: usize,
) -> Result<(), PropertyViolation> {
    let output = agent_at(system, at).step(&config.rules, AgentEvent::LogSeen);
    perform_output(system, config, at, output)?;
    Ok(())
}

/// Restarts the agent. Its journal and the node's directory decide how it goes on.
pub(super) fn restart(
    system: &mut SystemState,
    config: &ExplorationConfig,
    at: usize,
) -> Result<(), PropertyViolation> {
    let directory = directory_of(config, &system.hosts[at]);
    let machine = machine(at);
    let was_data_lost = system.hosts[at].data_lost;
    let mut decision =
        decide_at_start(&config.rules, system.hosts[at].journal.as_ref(), &machine, &directory);
    let host = Arc::make_mut(&mut system.hosts[at]);
    if decision == StartDecision::SetAsideAndBeginNew {
        host.journal = None;
        decision = decide_at_start(&config.rules, None, &machine, &directory);
    }
    if let Some(journal) = host.journal.take() {
        let resumes = matches!(decision, StartDecision::Resume | StartDecision::ResumeToLaunch);
        host.journal = Some(if resumes { journal.with_next_boot() } else { journal });
    }
    host.mode = match decision {
        StartDecision::BeginNew | StartDecision::SetAsideAndBeginNew | StartDecision::Resume => {
            AgentMode::Running
        }
        StartDecision::ResumeToLaunch => AgentMode::InspectingDirectory,
        // The node may have outlived its agent. In that case, the new agent adopts the running node
        // instead of starting one.
        StartDecision::StartNode(StartSource::List | StartSource::Log) => {
            if host.running_list.is_some() { AgentMode::Running } else { AgentMode::LaunchingNode }
        }
        StartDecision::RequestReplacement { ref why } => {
            if !was_data_lost {
                let what = format!("a replacement is asked for, and nothing was lost: {why}");
                return Err(PropertyViolation::new(Property::WayOut, what));
            }
            AgentMode::AwaitingReplacement
        }
        StartDecision::Refuse { .. } => AgentMode::RefusingDirectory,
        StartDecision::Removed => AgentMode::Stopped(3),
    };
    Ok(())
}

/// Kills and restarts the agent. If journals aren't synced, the host also loses power.
pub(super) fn kill(
    system: &mut SystemState,
    config: &ExplorationConfig,
    at: usize,
) -> Result<(), PropertyViolation> {
    if let Some(before) = system.hosts[at].journal_before_change.clone() {
        let host = Arc::make_mut(&mut system.hosts[at]);
        host.journal_before_change = None;
        host.journal = before.map(|journal| *journal);
        host.running_list = None;
    }
    restart(system, config, at)
}

/// Replaces the node's file system by an empty one, and restarts the host.
pub(super) fn lose_directory(
    system: &mut SystemState,
    config: &ExplorationConfig,
    at: usize,
) -> Result<(), PropertyViolation> {
    let host = Arc::make_mut(&mut system.hosts[at]);
    host.data_lost |= host.directory.has_log || host.directory.marker.is_some();
    host.running_list = None;
    host.directory =
        DirectoryListing { entries: vec!["lost+found".to_owned()], ..DirectoryListing::default() };
    if host.journal.is_some() && !matches!(host.mode, AgentMode::Stopped(_)) {
        restart(system, config, at)?;
    }
    Ok(())
}

/// Re-images the host. Nothing on the host survives, but the messages that it sent may still
/// arrive.
pub(super) fn reimage(system: &mut SystemState, at: usize) {
    let past = system.hosts[at].journal.clone();
    let host = Arc::make_mut(&mut system.hosts[at]);
    host.reimage_count =
        (host.reimage_count + 1).min(u8::try_from(MAX_KEYS_PER_HOST - 1).unwrap_or(u8::MAX));
    host.journal = None;
    host.journal_before_change = None;
    host.directory = DirectoryListing::default();
    host.mode = AgentMode::Running;
    host.running_list = None;
    host.data_lost = false;
    if let Some(journal) = past {
        Arc::make_mut(&mut system.sent).past.push(journal);
    }
}

/// Starts host `to` from a copy of `from`'s disk.
pub(super) fn clone_disk(
    system: &mut SystemState,
    config: &ExplorationConfig,
    from: usize,
    to: usize,
) -> Result<(), PropertyViolation> {
    let original = Arc::clone(&system.hosts[from]);
    let host = Arc::make_mut(&mut system.hosts[to]);
    host.journal.clone_from(&original.journal);
    host.directory.clone_from(&original.directory);
    restart(system, config, to)
}
