//! The fault-free road, which checks property 7. From any state, without further faults, the
//! cluster must form. Otherwise `explain` must give a reason and a way out, and the way out must
//! work.

use formation_explored::agent::{Journal, LaunchState, StartDecision, decide_at_start};
use formation_explored::service::{ClusterEvent, FormationSettings, Phase, Seating, explain};
use formation_explored::{AgentKey, Epoch, Hash, quorum};

use crate::explore::actions::SystemAction;
use crate::explore::apply::apply;
use crate::explore::config::ExplorationConfig;
use crate::explore::database::PROCESSES;
use crate::explore::host_side::{directory_of, see_refusal};
use crate::explore::identity::{machine, members_of, name};
use crate::explore::processes::{is_up_to_date, may_be_forgotten};
use crate::explore::properties::{Property, PropertyViolation};
use crate::explore::reduce::is_unknown_to_others;
use crate::explore::service_side::{deliver_ack, poll_or_redeem, serve};
use crate::explore::world::{AgentMode, HostState, NOW, SystemState, is_from_clock_ahead};

/// Maximum number of rounds on a road; one that takes more never ends.
const ROUNDS: usize = 80;

/// Walks the fault-free road from `world`.
///
/// # Errors
/// Returns a violation of property 7.
pub(super) fn walk(
    world: &SystemState,
    config: &ExplorationConfig,
) -> Result<(), PropertyViolation> {
    walk_from(world, config)?;
    // The exploration leaves out the deaths of hosts that never joined (`reduce`), so try the road
    // without one of them.
    let untouched =
        |host: &&mut std::sync::Arc<HostState>| host.alive && is_unknown_to_others(host, config);
    let mut without = world.clone();
    if world.faults_left.deaths > 0
        && let Some(host) = without.hosts.iter_mut().find(untouched)
    {
        std::sync::Arc::make_mut(host).alive = false;
        return walk_from(&without, config);
    }
    Ok(())
}

fn walk_from(world: &SystemState, config: &ExplorationConfig) -> Result<(), PropertyViolation> {
    let mut at = world.clone();
    at.followed_host = None;
    // The clock is right again, but what was stored before remains.
    at.is_ahead = false;
    // On the road, every message under way has arrived or been lost, and every transaction has
    // ended.
    for process in &mut at.processes {
        process.read = None;
    }
    for _ in 0..ROUNDS {
        let mut next = round(&at, config)?;
        if next.database.cluster.phase == Phase::Formed {
            return Ok(());
        }
        if next == at {
            next = pass_time(&at, config)?;
            if next == at {
                break;
            }
        }
        at = next;
    }
    judge_end(&at, config)
}

/// Lets every process and every host take its next step once, and delivers all releases and acks.
fn round(from: &SystemState, config: &ExplorationConfig) -> Result<SystemState, PropertyViolation> {
    let mut world = from.clone();
    for process in 0..PROCESSES {
        if world.processes[process].is_lost {
            if may_be_forgotten(&world, config, process) {
                world = apply(&world, config, &SystemAction::ForgetProcess(process))?;
            }
        } else if !is_up_to_date(&world, config, process) {
            world = apply(&world, config, &SystemAction::InspectDatabase(process))?;
        }
    }
    for host in 0..config.hosts {
        if world.hosts[host].alive {
            world = step_host(world, config, host)?;
        }
    }
    let said = std::sync::Arc::clone(&world.sent);
    for &key in said.releases.keys() {
        world = apply(&world, config, &SystemAction::DeliverRelease(key))?;
    }
    for &(key, h) in &said.acks {
        let decided = decided(&world) == Some(h);
        let outcome = deliver_ack(&mut world, config, key, h)?;
        let document = outcome.answer.ok().and_then(|answer| answer.document);
        if decided && document != Some(h) && world.database.cluster.split.is_none() {
            let what = format!("{} asks again with its ack, and gets no document", name(key));
            return Err(PropertyViolation::of(Property::WayOut, what));
        }
    }
    Ok(world)
}

fn decided(world: &SystemState) -> Option<Hash> {
    let cluster = &world.database.cluster;
    let decided = matches!(cluster.phase, Phase::Committed | Phase::Formed);
    cluster.frozen.as_ref().filter(|_| decided).map(|frozen| frozen.proposal_hash)
}

fn step_host(
    mut world: SystemState,
    config: &ExplorationConfig,
    at: usize,
) -> Result<SystemState, PropertyViolation> {
    let host = &world.hosts[at];
    let Some(journal) = &host.journal else {
        let directory = directory_of(config, host);
        let begins = decide_at_start(&config.rules, None, &machine(at), &directory)
            == StartDecision::BeginNew;
        let joins = host.mode == AgentMode::Running && begins;
        return if joins { apply(&world, config, &SystemAction::Join(at)) } else { Ok(world) };
    };
    let start = journal.launch_state;
    match host.mode {
        AgentMode::InspectingDirectory | AgentMode::WritingMarker | AgentMode::LaunchingNode => {
            return apply(&world, config, &SystemAction::AdvanceAgent(at));
        }
        AgentMode::Running => {}
        AgentMode::AwaitingReplacement | AgentMode::RefusingDirectory | AgentMode::Stopped(_) => {
            return Ok(world);
        }
    }
    if host.running_list.is_some() {
        if !host.directory.has_log {
            world = apply(&world, config, &SystemAction::MakeLog(at))?;
        } else if start != LaunchState::Ran {
            world = apply(&world, config, &SystemAction::SeeLog(at))?;
        }
        world = apply(&world, config, &SystemAction::ShowDocument(at))?;
        return apply(&world, config, &SystemAction::Report(at));
    }
    if start == LaunchState::NotStarted { poll_service(world, config, at) } else { Ok(world) }
}

/// Lets the agent poll once, and act on the answer.
fn poll_service(
    mut world: SystemState,
    config: &ExplorationConfig,
    at: usize,
) -> Result<SystemState, PropertyViolation> {
    let Some(journal) = world.hosts[at].journal.clone() else { return Ok(world) };
    if journal.held_document.is_some() {
        world = apply(&world, config, &SystemAction::ShowDocument(at))?;
    }
    let answer = match poll_or_redeem(&mut world, config, &journal)?.answer {
        Ok(answer) => answer,
        Err(refusal) => {
            see_refusal(&mut world, config, at, &refusal)?;
            return Ok(world);
        }
    };
    if matches!(answer.phase, Phase::Open | Phase::Preparing) {
        world = apply(&world, config, &SystemAction::SeeEpoch(at, answer.epoch))?;
    }
    if let Some(h) = answer.proposal {
        world = apply(&world, config, &SystemAction::ExamineList(at, h))?;
    }
    if let Some(h) = answer.document {
        world = apply(&world, config, &SystemAction::Publish(0))?;
        world = apply(&world, config, &SystemAction::SeeDocument(at, h))?;
    }
    Ok(world)
}

/// Lets the next deadline pass, once no step is possible otherwise. Deadlines stored by a clock
/// that was ahead are skipped, because nobody should have to wait for them.
fn pass_time(
    from: &SystemState,
    config: &ExplorationConfig,
) -> Result<SystemState, PropertyViolation> {
    let cluster = &from.database.cluster;
    for (&key, agent) in &cluster.agents {
        if agent.held_back_until > NOW && !is_from_clock_ahead(agent.held_back_until) {
            return apply(from, config, &SystemAction::EndHoldBack(key));
        }
    }
    for (&key, agent) in &cluster.agents {
        let silent = from.is_key_gone(key) || !speaks(from, key);
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

fn speaks(world: &SystemState, key: AgentKey) -> bool {
    world.hosts.iter().any(|host| {
        host.alive
            && host.mode == AgentMode::Running
            && host.journal.as_ref().is_some_and(|journal| journal.key == key)
    })
}

/// Judges a road that ended before the cluster formed. There must be a reason and a way out. There
/// must not be a set of hosts that could have formed the cluster.
fn judge_end(world: &SystemState, config: &ExplorationConfig) -> Result<(), PropertyViolation> {
    let cluster = &world.database.cluster;
    let lines = explain(cluster, &FormationSettings::DEFAULT, NOW);
    let said: Vec<String> = lines
        .iter()
        .map(|line| format!("{}; way out: {}", line.explanation, line.remedy))
        .collect();
    let stuck = |what: &str| {
        let what = format!(
            "{what}; the cluster is {} at epoch {}, and explain says: {}",
            cluster.phase.as_str(),
            cluster.epoch,
            said.join(" | ")
        );
        Err(PropertyViolation::of(Property::WayOut, what))
    };
    if cluster.split.is_none() && !cluster.is_unsettled && world.database.settled {
        if matches!(cluster.phase, Phase::Open | Phase::Preparing) {
            let able = find_able_hosts(world, config);
            if !able.is_empty() {
                let names: Vec<String> = able.iter().map(|&at| name(world.key(at))).collect();
                return stuck(&format!("{} could form the cluster, and don't", names.join(", ")));
            }
        }
        if let (Phase::Committed, Some(h)) = (cluster.phase, decided(world)) {
            let able = members_of(h).filter(|&key| can_run(world, key, h)).count();
            if able >= quorum(usize::from(config.seats)) {
                return stuck(&format!("{able} members could run the decided list, and don't"));
            }
        }
    }
    if lines.is_empty() || lines.iter().any(|line| line.remedy.is_empty()) {
        return stuck("explain has no reason or no way out");
    }
    let by = String::new();
    let mut then = world.clone();
    let exit = match cluster.phase {
        Phase::Open | Phase::Preparing if cluster.split.is_none() => ClusterEvent::Abandon { by },
        Phase::Committed | Phase::Formed => ClusterEvent::Retire { by },
        _ => return Ok(()),
    };
    if let Err(refusal) = serve(&mut then, config, exit)?.answer {
        return stuck(&format!("the way out is refused ({refusal})"));
    }
    match then.database.cluster.phase {
        Phase::Retired if cluster.split.is_none() => check_unretire(then, world, config),
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
    Err(PropertyViolation::of(Property::WayOut, what))
}

/// Returns one usable host for each seat, all of which reach each other; empty if there is no such
/// set.
fn find_able_hosts(world: &SystemState, config: &ExplorationConfig) -> Vec<usize> {
    let usable: Vec<usize> = (0..config.hosts).filter(|&at| is_usable(world, config, at)).collect();
    let sets = (0_u32..1 << usable.len()).filter(|set| set.count_ones() == u32::from(config.seats));
    let members = |set: u32| {
        let chosen = usable.iter().enumerate().filter(move |(place, _)| set >> place & 1 == 1);
        chosen.map(|(_, &at)| at).collect::<Vec<usize>>()
    };
    let linked = |set: &Vec<usize>| {
        let joined = |&one: &usize| set.iter().all(|&other| world.links.are_connected(one, other));
        set.iter().all(joined)
    };
    sets.map(members).find(linked).unwrap_or_default()
}

/// Returns whether a new list could contain this host. It looks at the host's disk, not at the
/// production code's view of it.
fn is_usable(world: &SystemState, config: &ExplorationConfig, at: usize) -> bool {
    let host = &world.hosts[at];
    let blank = host.directory.marker.is_none()
        && !host.directory.has_log
        && host.directory.entries.iter().all(|entry| entry == "lost+found");
    // Exit code 1 means that a person must act. The road checks whether that was needed, so it
    // counts as usable.
    let ended = matches!(host.mode, AgentMode::Stopped(3) | AgentMode::AwaitingReplacement);
    let may_sign =
        host.journal.as_ref().is_none_or(|journal| may_sign_again(world, config, journal));
    host.alive && blank && !ended && may_sign
}

/// Returns whether the agent holds no document, and enough members can still release each list that
/// it signed.
fn may_sign_again(world: &SystemState, config: &ExplorationConfig, journal: &Journal) -> bool {
    let released = |key: AgentKey, epoch: Epoch| {
        world.sent.releases.get(&key).is_some_and(|&released| released >= epoch)
    };
    let can_release = |key: AgentKey| {
        world.live_journal(key).is_some_and(|journal| journal.held_document.is_none())
    };
    let can_end = |(&epoch, bound): (&Epoch, &formation_explored::agent::SignedList)| {
        let members = bound.members.iter().map(|member| member.key);
        members.filter(|&key| released(key, epoch) || can_release(key)).count()
            >= bound.releases_needed(&config.rules)
    };
    journal.held_document.is_none() && journal.signed_lists.iter().all(can_end)
}

/// Returns whether the member is on a living host and its node runs, or may still be started with
/// list `h`.
fn can_run(world: &SystemState, key: AgentKey, h: Hash) -> bool {
    let has_key = |host: &&std::sync::Arc<HostState>| {
        host.alive && host.journal.as_ref().is_some_and(|journal| journal.key == key)
    };
    let Some(host) = world.hosts.iter().find(has_key) else { return false };
    let Some(journal) = &host.journal else { return false };
    let ended = matches!(
        host.mode,
        AgentMode::Stopped(_) | AgentMode::AwaitingReplacement | AgentMode::RefusingDirectory
    );
    let epoch = crate::explore::identity::epoch_of(h);
    let may_hold = match &journal.held_document {
        Some(held) => held.proposal_hash == h,
        None => epoch > journal.released_epoch && journal.signed_lists.contains_key(&epoch),
    };
    !ended && may_hold
}
