//! The fault-free run, which checks property 7. From any state the cluster must form if no further
//! fault happens. Otherwise `explain` must give a reason and a way out, and the way out must work.

use formation_explored::agent::{Journal, LaunchState, StartDecision, decide_at_start};
use formation_explored::service::{ClusterEvent, FormationSettings, Phase, Seating, explain};
use formation_explored::{AgentKey, Epoch, Hash, quorum};

use crate::explore::actions::SystemAction;
use crate::explore::apply::apply;
use crate::explore::config::ExplorationConfig;
use crate::explore::database::PROCESSES;
use crate::explore::host_steps::{directory_of, receive_refusal};
use crate::explore::identities::{machine, members_of, name};
use crate::explore::processes::{is_up_to_date, may_be_forgotten};
use crate::explore::properties::{Property, PropertyViolation};
use crate::explore::reductions::is_unknown_to_others;
use crate::explore::service_steps::{deliver_ack, poll_or_redeem, serve};
use crate::explore::state::{AgentMode, HostState, NOW, SystemState, is_from_clock_ahead};

/// Maximum number of rounds of a fault-free run. A run that has not formed the cluster by then is
/// judged by its last state.
const ROUNDS: usize = 80;

/// Plays the fault-free run from `system`.
///
/// # Errors
/// Returns a violation of property 7.
pub(super) fn walk(
    system: &SystemState,
    config: &ExplorationConfig,
) -> Result<(), PropertyViolation> {
    walk_from(system, config)?;
    // The exploration leaves out the deaths of hosts that never joined (`reductions`). So the run
    // is repeated without one such host.
    let is_unknown =
        |host: &&mut std::sync::Arc<HostState>| host.alive && is_unknown_to_others(host, config);
    let mut without_one_host = system.clone();
    if system.faults_left.deaths > 0
        && let Some(host) = without_one_host.hosts.iter_mut().find(is_unknown)
    {
        std::sync::Arc::make_mut(host).alive = false;
        return walk_from(&without_one_host, config);
    }
    Ok(())
}

fn walk_from(system: &SystemState, config: &ExplorationConfig) -> Result<(), PropertyViolation> {
    let mut state = system.clone();
    state.followed_host = None;
    // The service's clock is right during the run. Times that the service stored while the clock
    // was ahead remain.
    state.is_ahead = false;
    // When the run begins, every message under way has arrived or been lost, and every transaction
    // has ended.
    for process in &mut state.processes {
        process.read = None;
    }
    for _ in 0..ROUNDS {
        let mut next = run_round(&state, config)?;
        if next.database.cluster.phase == Phase::Formed {
            return Ok(());
        }
        if next == state {
            next = pass_next_deadline(&state, config)?;
            if next == state {
                break;
            }
        }
        state = next;
    }
    check_final_state(&state, config)
}

/// Lets every process and every host take its next step once, and delivers all releases and acks.
fn run_round(
    from: &SystemState,
    config: &ExplorationConfig,
) -> Result<SystemState, PropertyViolation> {
    let mut system = from.clone();
    for process in 0..PROCESSES {
        if system.processes[process].is_lost {
            if may_be_forgotten(&system, config, process) {
                system = apply(&system, config, &SystemAction::ForgetProcess(process))?;
            }
        } else if !is_up_to_date(&system, config, process) {
            system = apply(&system, config, &SystemAction::InspectDatabase(process))?;
        }
    }
    for host in 0..config.hosts {
        if system.hosts[host].alive {
            system = step_host(system, config, host)?;
        }
    }
    let sent = std::sync::Arc::clone(&system.sent);
    for &key in sent.releases.keys() {
        system = apply(&system, config, &SystemAction::DeliverRelease(key))?;
    }
    for &(key, h) in &sent.acks {
        let decided = decided_list(&system) == Some(h);
        let outcome = deliver_ack(&mut system, config, key, h)?;
        let document = outcome.answer.ok().and_then(|answer| answer.document);
        if decided && document != Some(h) && system.database.cluster.split.is_none() {
            let what = format!("{} asks again with its ack, and gets no document", name(key));
            return Err(PropertyViolation::new(Property::WayOut, what));
        }
    }
    Ok(system)
}

fn decided_list(system: &SystemState) -> Option<Hash> {
    let cluster = &system.database.cluster;
    let decided = matches!(cluster.phase, Phase::Committed | Phase::Formed);
    cluster.frozen.as_ref().filter(|_| decided).map(|frozen| frozen.proposal_hash)
}

fn step_host(
    mut system: SystemState,
    config: &ExplorationConfig,
    at: usize,
) -> Result<SystemState, PropertyViolation> {
    let host = &system.hosts[at];
    let Some(journal) = &host.journal else {
        let directory = directory_of(config, host);
        let begins = decide_at_start(&config.rules, None, &machine(at), &directory)
            == StartDecision::BeginNew;
        let joins = host.mode == AgentMode::Running && begins;
        return if joins { apply(&system, config, &SystemAction::Join(at)) } else { Ok(system) };
    };
    let start = journal.launch_state;
    match host.mode {
        AgentMode::InspectingDirectory | AgentMode::WritingMarker | AgentMode::LaunchingNode => {
            return apply(&system, config, &SystemAction::AdvanceAgent(at));
        }
        AgentMode::Running => {}
        AgentMode::AwaitingReplacement | AgentMode::RefusingDirectory | AgentMode::Stopped(_) => {
            return Ok(system);
        }
    }
    if host.running_list.is_some() {
        if !host.directory.has_log {
            system = apply(&system, config, &SystemAction::MakeLog(at))?;
        } else if start != LaunchState::Ran {
            system = apply(&system, config, &SystemAction::SeeLog(at))?;
        }
        system = apply(&system, config, &SystemAction::ShowDocument(at))?;
        return apply(&system, config, &SystemAction::Report(at));
    }
    if start == LaunchState::NotStarted { poll_and_act(system, config, at) } else { Ok(system) }
}

/// Lets the agent poll once, and act on the answer.
fn poll_and_act(
    mut system: SystemState,
    config: &ExplorationConfig,
    at: usize,
) -> Result<SystemState, PropertyViolation> {
    let Some(journal) = system.hosts[at].journal.clone() else { return Ok(system) };
    if journal.held_document.is_some() {
        system = apply(&system, config, &SystemAction::ShowDocument(at))?;
    }
    let answer = match poll_or_redeem(&mut system, config, &journal)?.answer {
        Ok(answer) => answer,
        Err(refusal) => {
            receive_refusal(&mut system, config, at, &refusal)?;
            return Ok(system);
        }
    };
    if matches!(answer.phase, Phase::Open | Phase::Preparing) {
        system = apply(&system, config, &SystemAction::SeeEpoch(at, answer.epoch))?;
    }
    if let Some(h) = answer.proposal {
        system = apply(&system, config, &SystemAction::ExamineList(at, h))?;
    }
    if let Some(h) = answer.document {
        system = apply(&system, config, &SystemAction::Publish(0))?;
        system = apply(&system, config, &SystemAction::SeeDocument(at, h))?;
    }
    Ok(system)
}

/// Lets the next deadline pass; called when a round changed nothing. A deadline that the service
/// stored while its clock was ahead never passes: the run must succeed without it.
fn pass_next_deadline(
    from: &SystemState,
    config: &ExplorationConfig,
) -> Result<SystemState, PropertyViolation> {
    let cluster = &from.database.cluster;
    for (&key, agent) in &cluster.agents {
        if agent.backoff_until > NOW && !is_from_clock_ahead(agent.backoff_until) {
            return apply(from, config, &SystemAction::EndBackoff(key));
        }
    }
    for (&key, agent) in &cluster.agents {
        let silent = from.is_key_gone(key) || !polls(from, key);
        let ends = agent.lease_until > NOW && !is_from_clock_ahead(agent.lease_until);
        if agent.seating != Seating::Absent && ends && silent {
            return apply(from, config, &SystemAction::Lapse(key));
        }
    }
    let Some(frozen) = &cluster.frozen else { return Ok(from.clone()) };
    let mut next = from.clone();
    for host in 0..config.hosts {
        let runs = next.hosts[host].alive && next.hosts[host].mode == AgentMode::Running;
        let listed = next.hosts[host]
            .journal
            .as_ref()
            .is_some_and(|journal| members_of(frozen.proposal_hash).any(|key| key == journal.key));
        if runs && listed {
            next = apply(
                &next,
                config,
                &SystemAction::ReportMissingReleases(host, frozen.proposal_hash),
            )?;
            if next != *from {
                return Ok(next);
            }
        }
    }
    if cluster.phase == Phase::Preparing && !is_from_clock_ahead(frozen.at) {
        return apply(from, config, &SystemAction::TimeOut);
    }
    Ok(next)
}

fn polls(system: &SystemState, key: AgentKey) -> bool {
    system.hosts.iter().any(|host| {
        host.alive
            && host.mode == AgentMode::Running
            && host.journal.as_ref().is_some_and(|journal| journal.key == key)
    })
}

/// Judges a fault-free run that ended before the cluster formed. There must be a reason and a way
/// out. There must not be a set of hosts that could have formed the cluster.
fn check_final_state(
    system: &SystemState,
    config: &ExplorationConfig,
) -> Result<(), PropertyViolation> {
    let cluster = &system.database.cluster;
    let lines = explain(cluster, &FormationSettings::DEFAULT, NOW);
    let explanations: Vec<String> = lines
        .iter()
        .map(|line| format!("{}; way out: {}", line.explanation, line.remedy))
        .collect();
    let stuck = |what: &str| {
        let what = format!(
            "{what}; the cluster is {} at epoch {}, and explain says: {}",
            cluster.phase.as_str(),
            cluster.epoch,
            explanations.join(" | ")
        );
        Err(PropertyViolation::new(Property::WayOut, what))
    };
    if cluster.split.is_none() && !cluster.is_unsettled && system.database.settled {
        if matches!(cluster.phase, Phase::Open | Phase::Preparing) {
            let able = find_hosts_able_to_form(system, config);
            if !able.is_empty() {
                let names: Vec<String> = able.iter().map(|&at| name(system.key(at))).collect();
                return stuck(&format!("{} could form the cluster, and don't", names.join(", ")));
            }
        }
        if let (Phase::Committed, Some(h)) = (cluster.phase, decided_list(system)) {
            let able = members_of(h).filter(|&key| can_run(system, key, h)).count();
            if able >= quorum(usize::from(config.seats)) {
                return stuck(&format!("{able} members could run the decided list, and don't"));
            }
        }
    }
    if lines.is_empty() || lines.iter().any(|line| line.remedy.is_empty()) {
        return stuck("explain has no reason or no way out");
    }
    let by = String::new();
    let mut after_exit = system.clone();
    let exit = match cluster.phase {
        Phase::Open | Phase::Preparing if cluster.split.is_none() => ClusterEvent::Abandon { by },
        Phase::Committed | Phase::Formed => ClusterEvent::Retire { by },
        _ => return Ok(()),
    };
    if let Err(refusal) = serve(&mut after_exit, config, exit)?.answer {
        return stuck(&format!("the way out is refused ({refusal})"));
    }
    match after_exit.database.cluster.phase {
        Phase::Retired if cluster.split.is_none() => check_unretire(after_exit, system, config),
        _ => Ok(()),
    }
}

/// Checks that taking a retirement back restores the cluster as it was before.
fn check_unretire(
    mut retired: SystemState,
    before: &SystemState,
    config: &ExplorationConfig,
) -> Result<(), PropertyViolation> {
    let outcome = serve(&mut retired, config, ClusterEvent::Unretire { by: String::new() })?;
    let (was, is) = (&before.database.cluster, &retired.database.cluster);
    let is_same = was.phase == is.phase && was.frozen == is.frozen && was.agents == is.agents;
    if outcome.answer.is_ok() && outcome.committed.is_none() && is_same {
        return Ok(());
    }
    let what = format!(
        "a retirement was taken back, and left {} for {}",
        is.phase.as_str(),
        was.phase.as_str()
    );
    Err(PropertyViolation::new(Property::WayOut, what))
}

/// Returns one usable host for each seat, such that these hosts all reach each other. Returns
/// nothing if there is no such set.
fn find_hosts_able_to_form(system: &SystemState, config: &ExplorationConfig) -> Vec<usize> {
    let usable: Vec<usize> =
        (0..config.hosts).filter(|&at| is_usable(system, config, at)).collect();
    let sets = (0_u32..1 << usable.len()).filter(|set| set.count_ones() == u32::from(config.seats));
    let members = |set: u32| {
        let chosen = usable.iter().enumerate().filter(move |(place, _)| set >> place & 1 == 1);
        chosen.map(|(_, &at)| at).collect::<Vec<usize>>()
    };
    let linked = |set: &Vec<usize>| {
        let joined = |&one: &usize| set.iter().all(|&other| system.links.are_connected(one, other));
        set.iter().all(joined)
    };
    sets.map(members).find(linked).unwrap_or_default()
}

/// Returns whether a new list of members could contain this host. The answer comes from the
/// explored state (disks, agents and sent releases), not from the production code.
fn is_usable(system: &SystemState, config: &ExplorationConfig, at: usize) -> bool {
    let host = &system.hosts[at];
    let blank = host.directory.marker.is_none()
        && !host.directory.has_log
        && host.directory.entries.iter().all(|entry| entry == "lost+found");
    // An agent that ended with exit code 1 needs a person. The fault-free run checks whether that
    // was necessary, so its host is treated as usable.
    let ended = matches!(host.mode, AgentMode::Stopped(3) | AgentMode::AwaitingReplacement);
    let may_sign =
        host.journal.as_ref().is_none_or(|journal| may_sign_again(system, config, journal));
    host.alive && blank && !ended && may_sign
}

/// Returns whether the agent holds no commit document, and enough members can still release each
/// list of members that it signed.
fn may_sign_again(system: &SystemState, config: &ExplorationConfig, journal: &Journal) -> bool {
    let released = |key: AgentKey, epoch: Epoch| {
        system.sent.releases.get(&key).is_some_and(|&released| released >= epoch)
    };
    let can_release = |key: AgentKey| {
        system.live_journal(key).is_some_and(|journal| journal.held_document.is_none())
    };
    let can_end = |(&epoch, signed_list): (&Epoch, &formation_explored::agent::SignedList)| {
        let members = signed_list.members.iter().map(|member| member.key);
        members.filter(|&key| released(key, epoch) || can_release(key)).count()
            >= signed_list.releases_needed(&config.rules)
    };
    journal.held_document.is_none() && journal.signed_lists.iter().all(can_end)
}

/// Returns whether the member holds the commit document of the list of members with hash `h`, or
/// may still get it. Returns false if its host is dead, and if its agent has ended, waits for a
/// replacement, or refuses its directory.
fn can_run(system: &SystemState, key: AgentKey, h: Hash) -> bool {
    let has_key = |host: &&std::sync::Arc<HostState>| {
        host.alive && host.journal.as_ref().is_some_and(|journal| journal.key == key)
    };
    let Some(host) = system.hosts.iter().find(has_key) else { return false };
    let Some(journal) = &host.journal else { return false };
    let ended = matches!(
        host.mode,
        AgentMode::Stopped(_) | AgentMode::AwaitingReplacement | AgentMode::RefusingDirectory
    );
    let epoch = crate::explore::identities::epoch_of(h);
    let may_hold = match &journal.held_document {
        Some(held) => held.proposal_hash == h,
        None => epoch > journal.released_epoch && journal.signed_lists.contains_key(&epoch),
    };
    !ended && may_hold
}
