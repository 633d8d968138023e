//! Actions: everything that can happen next in a state.

use std::fmt;
use std::sync::Arc;

use formation_explored::agent::{LaunchState, StartDecision, decide_at_start};
use formation_explored::memory::LedgerEntry;
use formation_explored::service::{Phase, Seating};
use formation_explored::{AgentKey, Epoch, Hash};

use crate::explore::config::ExplorationConfig;
use crate::explore::database::{DatabaseState, PROCESSES};
use crate::explore::host_side::directory_of;
use crate::explore::identity::{format_list, list_of, machine, members_of, name};
use crate::explore::idle;
use crate::explore::processes::{
    RestoreMethod, have_swept_since_backup, is_up_to_date, may_be_forgotten,
};
use crate::explore::reduce;
use crate::explore::world::{AgentMode, SystemState};

/// One atomic step of a host, a process or the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SystemAction {
    /// A host's agent starts, makes its key and record, and redeems its token.
    Join(usize),
    /// An agent polls, or redeems if the database doesn't know it.
    Poll(usize),
    /// A late message arrives from an agent that no longer exists.
    DeliverLatePoll(AgentKey),
    /// An agent learns that the service is at this epoch.
    SeeEpoch(usize, Epoch),
    /// An agent looks at a list: it probes, and then signs, refuses, or sends its row of the
    /// matrix.
    ExamineList(usize, Hash),
    /// As `ExamineList`, but the agent has waited long enough to report which releases are missing.
    ReportMissingReleases(usize, Hash),
    /// An ack arrives at the service.
    DeliverAck(AgentKey, Hash),
    /// The acks of all members arrive at the service, in one step.
    DeliverAcks(Hash),
    /// A release arrives at the service.
    DeliverRelease(AgentKey),
    /// An agent gets a document.
    SeeDocument(usize, Hash),
    /// An agent takes its next step towards starting its node.
    AdvanceAgent(usize),
    /// A node makes its log.
    MakeLog(usize),
    /// An agent sees its node's log.
    SeeLog(usize),
    /// A member reports its Raft cluster.
    Report(usize),
    /// An agent shows the service the document that it holds.
    ShowDocument(usize),
    /// A process writes the document to its ledger and then sends it.
    Publish(usize),
    /// A process compares its database with its ledger, and puts back what is missing.
    InspectDatabase(usize),
    /// A process makes one of its periodic sweeps: it compares its database with its ledger, and
    /// increments its sweep counter.
    Sweep(usize),
    /// The process with this index serves the action, instead of the first one.
    ServedBy(usize, Box<SystemAction>),
    /// A lease lapses, possibly without any transaction that notices it.
    Lapse(AgentKey),
    /// The frozen list times out.
    TimeOut,
    /// An agent's hold-back ends.
    EndHoldBack(AgentKey),
    /// An operator abandons the cluster.
    Abandon,
    /// The cluster's deadline passes.
    PassDeadline,
    /// An owner retires the cluster.
    Retire,
    /// An owner takes the retirement back.
    Unretire,
    /// An owner accepts the changed database.
    Accept,
    /// The link between two hosts goes down.
    Cut(usize, usize),
    /// The service's clock jumps ahead.
    ClockAhead,
    /// The service's clock is set right.
    ClockBack,
    /// A backup of the database is taken.
    Backup,
    /// The backup is restored in this way.
    Restore(RestoreMethod),
    /// A process's ledger is copied.
    SaveLedger(usize),
    /// The copy replaces the ledger while its process is down. If true, the position beside the
    /// ledger is replaced as well.
    PutLedgerBack(usize, bool),
    /// A process is lost for good, with its ledger.
    LoseProcess(usize),
    /// An owner declares that a process won't come back.
    ForgetProcess(usize),
    /// An agent is killed and starts again.
    Kill(usize),
    /// A host dies for good.
    Die(usize),
    /// A node's directory is lost, and its host starts again.
    LoseDirectory(usize),
    /// A host is re-imaged: nothing on it survives.
    ReimageHost(usize),
    /// A host's disk is copied to another machine, which then starts.
    Clone(usize, usize),
    /// A process crashes, and may lose what it had not synced.
    Crash(usize),
    /// Without row lock: a process reads the row.
    ReadUnlocked(usize),
    /// Without row lock: a process writes the result of this action on the row it has read.
    WriteUnlocked(usize, Box<SystemAction>),
}

impl SystemAction {
    /// Returns the host that takes the action or that it happens to.
    #[must_use]
    pub fn host(&self) -> Option<usize> {
        match self {
            SystemAction::Join(at)
            | SystemAction::Poll(at)
            | SystemAction::SeeEpoch(at, _)
            | SystemAction::ExamineList(at, _)
            | SystemAction::ReportMissingReleases(at, _)
            | SystemAction::SeeDocument(at, _)
            | SystemAction::AdvanceAgent(at)
            | SystemAction::MakeLog(at)
            | SystemAction::SeeLog(at)
            | SystemAction::Report(at)
            | SystemAction::ShowDocument(at)
            | SystemAction::Kill(at)
            | SystemAction::Die(at)
            | SystemAction::LoseDirectory(at)
            | SystemAction::ReimageHost(at)
            | SystemAction::Clone(at, _) => Some(*at),
            SystemAction::ServedBy(_, action) => action.host(),
            _ => None,
        }
    }

    /// Returns whether a process serves the action.
    #[must_use]
    pub fn is_service_request(&self) -> bool {
        matches!(
            self,
            SystemAction::Join(_)
                | SystemAction::Poll(_)
                | SystemAction::DeliverLatePoll(_)
                | SystemAction::ExamineList(..)
                | SystemAction::ReportMissingReleases(..)
                | SystemAction::DeliverAck(..)
                | SystemAction::DeliverAcks(_)
                | SystemAction::DeliverRelease(_)
                | SystemAction::Report(_)
                | SystemAction::ShowDocument(_)
                | SystemAction::Lapse(_)
                | SystemAction::TimeOut
                | SystemAction::EndHoldBack(_)
                | SystemAction::Abandon
                | SystemAction::PassDeadline
                | SystemAction::Retire
                | SystemAction::Unretire
                | SystemAction::Accept
        )
    }

    /// Returns whether the action is a fault, which the bounds limit. A lapsed lease isn't a fault
    /// if its host no longer exists.
    #[must_use]
    pub fn is_fault(&self, world: &SystemState) -> bool {
        match self {
            SystemAction::Lapse(key) => !world.is_key_gone(*key),
            SystemAction::ServedBy(_, action) => action.is_fault(world),
            SystemAction::TimeOut
            | SystemAction::Abandon
            | SystemAction::PassDeadline
            | SystemAction::Retire
            | SystemAction::Accept
            | SystemAction::Restore(_)
            | SystemAction::PutLedgerBack(..)
            | SystemAction::LoseProcess(_)
            | SystemAction::ForgetProcess(_)
            | SystemAction::Kill(_)
            | SystemAction::Die(_)
            | SystemAction::LoseDirectory(_)
            | SystemAction::ReimageHost(_)
            | SystemAction::Clone(..)
            | SystemAction::Crash(_)
            | SystemAction::Cut(..)
            | SystemAction::ClockAhead
            | SystemAction::ReadUnlocked(_) => true,
            _ => false,
        }
    }
}

impl fmt::Display for SystemAction {
    #[allow(clippy::too_many_lines, reason = "a table: one text for each action")]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = |host: &usize| char::from(b'A' + u8::try_from(*host).unwrap_or(25));
        match self {
            SystemAction::Join(at) => write!(f, "{} starts, makes its key and redeems", host(at)),
            SystemAction::Poll(at) => write!(f, "{} polls", host(at)),
            SystemAction::DeliverLatePoll(key) => {
                write!(f, "a late message of {} arrives", name(*key))
            }
            SystemAction::SeeEpoch(at, epoch) => write!(f, "{} sees epoch {epoch}", host(at)),
            SystemAction::ExamineList(at, h) => {
                write!(f, "{} looks at {}", host(at), format_list(*h))
            }
            SystemAction::ReportMissingReleases(at, h) => {
                write!(f, "{} has waited for the releases that {} needs", host(at), format_list(*h))
            }
            SystemAction::DeliverAck(key, h) => {
                write!(f, "{}'s ack of {} arrives", name(*key), format_list(*h))
            }
            SystemAction::DeliverAcks(h) => write!(f, "the acks of {} arrive", format_list(*h)),
            SystemAction::DeliverRelease(key) => write!(f, "{}'s release arrives", name(*key)),
            SystemAction::SeeDocument(at, h) => {
                write!(f, "{} gets the document {}", host(at), format_list(*h))
            }
            SystemAction::AdvanceAgent(at) => write!(f, "{} goes on towards its node", host(at)),
            SystemAction::MakeLog(at) => write!(f, "{}'s node makes its log", host(at)),
            SystemAction::SeeLog(at) => write!(f, "{} sees its node's log", host(at)),
            SystemAction::Report(at) => write!(f, "{} reports its Raft cluster", host(at)),
            SystemAction::ShowDocument(at) => write!(f, "{} shows its document", host(at)),
            SystemAction::Publish(at) => write!(f, "process {at} lets the document out"),
            SystemAction::InspectDatabase(at) => write!(f, "process {at} looks at its database"),
            SystemAction::Sweep(at) => write!(f, "process {at} sweeps"),
            SystemAction::ServedBy(at, action) => write!(f, "through process {at}: {action}"),
            SystemAction::Lapse(key) => write!(f, "{}'s lease lapses", name(*key)),
            SystemAction::TimeOut => write!(f, "the frozen list times out"),
            SystemAction::EndHoldBack(key) => write!(f, "{} is not held back any more", name(*key)),
            SystemAction::Abandon => write!(f, "an operator abandons the cluster"),
            SystemAction::PassDeadline => write!(f, "the deadline passes"),
            SystemAction::Retire => write!(f, "an owner retires the cluster"),
            SystemAction::Unretire => write!(f, "an owner takes the retirement back"),
            SystemAction::Accept => write!(f, "an owner accepts the database"),
            SystemAction::Cut(one, other) => {
                write!(f, "the link between {} and {} goes down", host(one), host(other))
            }
            SystemAction::ClockAhead => write!(f, "the service's clock jumps half an hour ahead"),
            SystemAction::ClockBack => write!(f, "the service's clock is set right"),
            SystemAction::Backup => write!(f, "a backup is taken"),
            SystemAction::Restore(RestoreMethod::Dump) => {
                write!(f, "the backup is loaded into a new database")
            }
            SystemAction::Restore(RestoreMethod::InPlace) => {
                write!(f, "the rows are set back to the backup, under the processes")
            }
            SystemAction::SaveLedger(at) => write!(f, "process {at}'s ledger is copied"),
            SystemAction::PutLedgerBack(at, true) => {
                write!(f, "process {at}'s ledger is put back to the copy")
            }
            SystemAction::PutLedgerBack(at, false) => {
                write!(
                    f,
                    "process {at}'s ledger is put back to the copy, the position beside it isn't"
                )
            }
            SystemAction::LoseProcess(at) => {
                write!(f, "process {at} is lost for good, with its ledger")
            }
            SystemAction::ForgetProcess(at) => {
                write!(f, "an owner says that process {at} won't come back")
            }
            SystemAction::Kill(at) => write!(f, "{}'s agent is killed and starts again", host(at)),
            SystemAction::Die(at) => write!(f, "{} dies for good", host(at)),
            SystemAction::LoseDirectory(at) => {
                write!(f, "{}'s node directory is lost; the host restarts", host(at))
            }
            SystemAction::ReimageHost(at) => {
                write!(f, "{} is made anew: nothing on it survives", host(at))
            }
            SystemAction::Clone(from, to) => {
                write!(f, "{}'s disk is copied to {}, which starts", host(from), host(to))
            }
            SystemAction::Crash(at) => write!(f, "process {at} crashes"),
            SystemAction::ReadUnlocked(at) => {
                write!(f, "process {at} reads the row, without a lock")
            }
            SystemAction::WriteUnlocked(at, action) => {
                write!(f, "process {at} writes what it made of: {action}")
            }
        }
    }
}

/// Returns every action that may happen next; some of them change nothing.
#[must_use]
pub fn enumerate(world: &SystemState, config: &ExplorationConfig) -> Vec<SystemAction> {
    let mut actions = Vec::with_capacity(32);
    if reduce::is_terminal(world, config) || reduce::has_one_majority_at_most(world, config) {
        return actions;
    }
    if reduce::waits_for_a_process(world, config) {
        add_database_actions(world, config, &mut actions);
        return actions;
    }
    if let Some(alone) = world.followed_host {
        let host = usize::from(alone);
        if world.hosts[host].alive {
            add_host_actions(world, config, host, &mut actions);
        }
        return actions;
    }
    for host in 0..config.hosts {
        // Hosts that haven't joined are interchangeable if they are equal and linked in the same
        // way. Only the first of them acts.
        let like = |other: usize| {
            world.hosts[other] == world.hosts[host]
                && world.hosts[host].journal.is_none()
                && world.links.are_unchanged_by_swap(host, other)
        };
        if world.hosts[host].alive && !(0..host).any(like) {
            add_host_actions(world, config, host, &mut actions);
        }
    }
    if config.service_lies {
        return actions;
    }
    add_link_faults(world, config, &mut actions);
    add_service_actions(world, config, &mut actions);
    if reduce::is_serving_process_relevant(world, config) && !world.processes[1].is_lost {
        let asks = |action: &&SystemAction| action.is_service_request();
        let by_other = |action: &SystemAction| SystemAction::ServedBy(1, Box::new(action.clone()));
        let others: Vec<SystemAction> = actions.iter().filter(asks).map(by_other).collect();
        actions.extend(others);
    }
    add_database_actions(world, config, &mut actions);
    if !config.environment.row_lock {
        add_unlocked_transactions(world, config, &mut actions);
    }
    actions
}

fn add_host_actions(
    world: &SystemState,
    config: &ExplorationConfig,
    at: usize,
    actions: &mut Vec<SystemAction>,
) {
    let host = &world.hosts[at];
    let left = &world.faults_left;
    let untouched = reduce::is_unknown_to_others(host, config);
    if left.deaths > 0 && !untouched {
        actions.push(SystemAction::Die(at));
    }
    if left.reimages > 0
        && !untouched
        && usize::from(host.life) + 1 < crate::explore::identity::MAX_LIVES
    {
        actions.push(SystemAction::ReimageHost(at));
    }
    let Some(journal) = &host.journal else {
        if host.mode == AgentMode::Running && !has_service_finished(world, config) {
            let decision =
                decide_at_start(&config.rules, None, &machine(at), &directory_of(config, host));
            if decision == StartDecision::BeginNew {
                actions.push(SystemAction::Join(at));
            }
        }
        return;
    };
    if left.kills > 0 && !matches!(host.mode, AgentMode::Stopped(_)) {
        actions.push(SystemAction::Kill(at));
    }
    if left.lost_directories > 0 {
        actions.push(SystemAction::LoseDirectory(at));
    }
    if left.clones > 0 {
        let fresh =
            |&to: &usize| to != at && world.hosts[to].alive && world.hosts[to].journal.is_none();
        actions.extend((0..config.hosts).filter(fresh).map(|to| SystemAction::Clone(at, to)));
    }
    match host.mode {
        AgentMode::InspectingDirectory | AgentMode::WritingMarker | AgentMode::LaunchingNode => {
            actions.push(SystemAction::AdvanceAgent(at))
        }
        AgentMode::Running => {}
        AgentMode::AwaitingReplacement | AgentMode::RefusingDirectory | AgentMode::Stopped(_) => {
            return;
        }
    }
    if host.running_list.is_some() {
        if !host.directory.has_log {
            actions.push(SystemAction::MakeLog(at));
        } else if journal.launch_state != LaunchState::Ran && host.mode == AgentMode::Running {
            actions.push(SystemAction::SeeLog(at));
        } else if config.reports {
            actions.push(SystemAction::Report(at));
        }
    }
    // An agent sees epochs whatever its mode is.
    let latest = if config.service_lies { config.epochs + 1 } else { world.sent.epoch };
    if !idle::is_past_releasing(config, journal) {
        actions.extend(
            (journal.released_epoch + 2..=latest).map(|epoch| SystemAction::SeeEpoch(at, epoch)),
        );
    }
    if journal.launch_state == LaunchState::NotStarted && host.mode == AgentMode::Running {
        add_forming_actions(world, config, at, actions);
    }
    let held =
        journal.held_document.as_ref().filter(|held| !idle::is_decided(world, held.proposal_hash));
    if held.is_some() && !config.service_lies && world.followed_host.is_none() {
        actions.push(SystemAction::ShowDocument(at));
    }
}

fn add_forming_actions(
    world: &SystemState,
    config: &ExplorationConfig,
    at: usize,
    actions: &mut Vec<SystemAction>,
) {
    let host = &world.hosts[at];
    let Some(journal) = &host.journal else { return };
    if config.service_lies {
        let lists = possible_false_lists(world, config);
        let mine = |h: &&Hash| members_of(**h).any(|key| key == journal.key);
        for &h in lists.iter().filter(mine) {
            actions.push(SystemAction::ExamineList(at, h));
            let acked = |key| world.sent.acks.contains(&(key, h));
            if members_of(h).all(acked) {
                actions.push(SystemAction::SeeDocument(at, h));
            }
        }
        return;
    }
    let over = has_service_finished(world, config);
    if !over && !idle::has_no_news(world, config, at, journal) {
        actions.push(SystemAction::Poll(at));
    }
    for &h in &world.sent.proposals {
        if over {
            break;
        }
        if members_of(h).any(|key| key == journal.key)
            && !idle::is_list_ignored(world, config, journal, h)
        {
            actions.push(SystemAction::ExamineList(at, h));
            if idle::is_missing_releases(world, config, journal, h) {
                actions.push(SystemAction::ReportMissingReleases(at, h));
            }
        }
    }
    for &h in &world.sent.documents {
        if members_of(h).any(|key| key == journal.key) {
            actions.push(SystemAction::SeeDocument(at, h));
        }
    }
}

/// Adds the loss of links between hosts that have joined. No host probes any other one (`reduce`).
fn add_link_faults(
    world: &SystemState,
    config: &ExplorationConfig,
    actions: &mut Vec<SystemAction>,
) {
    if world.faults_left.links == 0 || has_service_finished(world, config) {
        return;
    }
    let may_fail = |&at: &usize| !reduce::is_unknown_to_others(&world.hosts[at], config);
    for one in (0..config.hosts).filter(may_fail) {
        let others = (one + 1..config.hosts).filter(may_fail);
        let up = others.filter(|&other| world.links.are_connected(one, other));
        actions.extend(up.map(|other| SystemAction::Cut(one, other)));
    }
}

/// Returns whether the service has finished for good: it takes no ack any more, and no restore can
/// change that. No property depends on a host that joins, polls or signs after this.
fn has_service_finished(world: &SystemState, config: &ExplorationConfig) -> bool {
    let forming = matches!(world.database.cluster.phase, Phase::Open | Phase::Preparing);
    let may_return = world.faults_left.restores > 0
        || world.faults_left.retirements > 0
        || world.database.cluster.phase == Phase::Retired
        || !reduce::are_ledgers_consistent(world, config)
        || world.processes.iter().any(|process| process.read.is_some())
        || !config.rules.is_on(formation_explored::Rule::AbandonBeforeCommit);
    !config.service_lies && !forming && !may_return
}

/// Returns every list that a lying service can show: all sets of joined hosts, ordered by letter,
/// at every epoch.
fn possible_false_lists(world: &SystemState, config: &ExplorationConfig) -> Vec<Hash> {
    if !config.false_lists.is_empty() {
        let lie = |(epoch, hosts): &(Epoch, Vec<usize>)| {
            let keys: Vec<AgentKey> = hosts.iter().map(|&at| world.key(at)).collect();
            list_of(*epoch, &keys)
        };
        return config.false_lists.iter().map(lie).collect();
    }
    let joined: Vec<AgentKey> = world
        .hosts
        .iter()
        .filter_map(|host| host.journal.as_ref().map(|journal| journal.key))
        .collect();
    let mut lists = Vec::new();
    for chosen in 0_u32..1 << joined.len() {
        if chosen.count_ones() != u32::from(config.seats) {
            continue;
        }
        let members = (0..joined.len()).filter(|place| chosen >> place & 1 == 1);
        let keys: Vec<AgentKey> = members.map(|place| joined[place]).collect();
        lists.extend((1..=config.epochs).map(|epoch| list_of(epoch, &keys)));
    }
    lists
}

fn add_service_actions(
    world: &SystemState,
    config: &ExplorationConfig,
    actions: &mut Vec<SystemAction>,
) {
    let cluster = &world.database.cluster;
    if has_service_finished(world, config) {
        return;
    }
    if world.is_ahead {
        actions.push(SystemAction::ClockBack);
    }
    if config.has_late_messages {
        let past = world.sent.past.iter().map(|journal| journal.key);
        let dead = world.hosts.iter().filter(|host| !host.alive);
        let dead = dead.filter_map(|host| host.journal.as_ref().map(|journal| journal.key));
        let unplaced = |key: &AgentKey| {
            cluster.agents.get(key).is_none_or(|agent| agent.seating == Seating::Absent)
        };
        actions.extend(past.chain(dead).filter(unplaced).map(SystemAction::DeliverLatePoll));
    }
    add_ack_deliveries(world, config, actions);
    for (&key, &epoch) in &world.sent.releases {
        let known = cluster.agents.get(&key);
        let new = |agent: &formation_explored::service::Applicant| {
            if config.reduced {
                // A release below the row's epoch changes nothing in the row (`reduce::row`).
                epoch >= cluster.epoch && agent.highest_epoch < epoch
            } else {
                agent.release.as_ref().is_none_or(|release| release.epoch < epoch)
            }
        };
        if known.is_some_and(new) && matches!(cluster.phase, Phase::Open | Phase::Preparing) {
            actions.push(SystemAction::DeliverRelease(key));
        }
    }
    let forming = matches!(cluster.phase, Phase::Open | Phase::Preparing);
    if forming {
        for (&key, agent) in &cluster.agents {
            let may_lapse = world.faults_left.pauses > 0 || world.is_key_gone(key);
            if agent.seating != Seating::Absent && agent.lease_until > world.now() && may_lapse {
                actions.push(SystemAction::Lapse(key));
            }
            if agent.held_back_until > world.now() {
                actions.push(SystemAction::EndHoldBack(key));
            }
        }
        if world.faults_left.clock_jumps > 0 && !world.is_ahead {
            actions.push(SystemAction::ClockAhead);
        }
        if cluster.phase == Phase::Preparing && world.faults_left.timeouts > 0 {
            actions.push(SystemAction::TimeOut);
        }
        if world.faults_left.cluster_ends > 0 {
            actions.extend([SystemAction::Abandon, SystemAction::PassDeadline]);
        }
        if !world.database.settled && world.faults_left.accepts > 0 {
            actions.push(SystemAction::Accept);
        }
    } else if !config.rules.is_on(formation_explored::Rule::AbandonBeforeCommit)
        && world.faults_left.cluster_ends > 0
    {
        actions.push(SystemAction::Abandon);
    }
    match cluster.phase {
        Phase::Committed | Phase::Formed if world.faults_left.retirements > 0 => {
            actions.push(SystemAction::Retire);
        }
        Phase::Retired => actions.push(SystemAction::Unretire),
        _ => {}
    }
}

/// Adds the arrival of acks for the frozen list.
fn add_ack_deliveries(
    world: &SystemState,
    config: &ExplorationConfig,
    actions: &mut Vec<SystemAction>,
) {
    let cluster = &world.database.cluster;
    let Some(frozen) = cluster.frozen.as_ref().filter(|_| cluster.phase == Phase::Preparing) else {
        return;
    };
    let h = frozen.proposal_hash;
    let is_signed = |key: &AgentKey| world.sent.acks.contains(&(*key, h));
    if reduce::do_acks_arrive_together(world, config) {
        if members_of(h).all(|key| is_signed(&key)) {
            actions.push(SystemAction::DeliverAcks(h));
        }
        return;
    }
    let waits = |key: &AgentKey| is_signed(key) && !frozen.acks.contains_key(key);
    actions.extend(members_of(h).filter(waits).map(|key| SystemAction::DeliverAck(key, h)));
}

fn add_database_actions(
    world: &SystemState,
    config: &ExplorationConfig,
    actions: &mut Vec<SystemAction>,
) {
    let cluster = &world.database.cluster;
    let decided = matches!(cluster.phase, Phase::Committed | Phase::Formed);
    for at in 0..PROCESSES {
        let process = &world.processes[at];
        // If both processes are in the same state, acting for the first one is enough.
        if at > 0 && reduce::are_processes_alike(world) {
            continue;
        }
        if world.faults_left.forgets > 0 && may_be_forgotten(world, config, at) {
            actions.push(SystemAction::ForgetProcess(at));
        }
        if process.is_lost {
            continue;
        }
        if !process.connected {
            actions.push(SystemAction::InspectDatabase(at));
            continue;
        }
        let whole = |h: Hash| Some(LedgerEntry::Commit { h, document: true });
        let inside = |h: &Hash| process.ledger.entry == whole(*h) || !config.environment.ledger;
        // Once no ledger will be read again, its contents don't matter.
        let asked = !config.reduced || !reduce::is_database_final(world, config);
        if asked {
            add_process_actions(world, config, at, actions);
        }
        let out = |h: &Hash| world.sent.documents.contains(h) && (inside(h) || !asked);
        let decided_h = cluster.frozen.as_ref().map(|frozen| frozen.proposal_hash);
        if decided && decided_h.is_some_and(|h| !out(&h)) {
            actions.push(SystemAction::Publish(at));
        }
        if world.faults_left.crashes > 0 {
            actions.push(SystemAction::Crash(at));
        }
    }
    let phase = match cluster.phase {
        Phase::Open => Some(0),
        Phase::Preparing => Some(1),
        Phase::Committed => Some(2),
        _ => None,
    };
    if world.faults_left.restores > 0 {
        if world.backup.is_none() {
            if phase.is_some_and(|phase: usize| config.backup_in[phase]) {
                actions.push(SystemAction::Backup);
            }
        } else {
            // A ledger that was replaced must have been compared since: see `processes`.
            let compared =
                world.processes.iter().all(|process| process.connected || process.is_lost);
            let may = |setback: &&RestoreMethod| match setback {
                RestoreMethod::Dump => compared,
                RestoreMethod::InPlace => {
                    let old = !config.environment.old_backups || have_swept_since_backup(world);
                    compared && old
                }
            };
            actions.extend(
                config.restore_methods.iter().filter(may).map(|&how| SystemAction::Restore(how)),
            );
        }
    }
}

/// Adds what a connected process does by itself, and the faults of its ledger.
fn add_process_actions(
    world: &SystemState,
    config: &ExplorationConfig,
    at: usize,
    actions: &mut Vec<SystemAction>,
) {
    let process = &world.processes[at];
    if !config.environment.ledger {
        return;
    }
    if !is_up_to_date(world, config, at) {
        actions.push(SystemAction::InspectDatabase(at));
    }
    let beat = |backup: &Arc<DatabaseState>| {
        world.database.rows[at].sweep_count == backup.rows[at].sweep_count
    };
    let counts =
        config.restore_methods.contains(&RestoreMethod::InPlace) && world.faults_left.restores > 0;
    if counts && world.backup.as_ref().is_some_and(beat) {
        actions.push(SystemAction::Sweep(at));
    }
    // Processes are interchangeable, so the lost one is never the first. Decisions that the first
    // one has not copied would be lost, and no rule could bring them back.
    if world.faults_left.losses > 0 && at > 0 && is_up_to_date(world, config, 0) {
        actions.push(SystemAction::LoseProcess(at));
    }
    if world.faults_left.ledger_rollbacks == 0 {
        return;
    }
    match &process.saved {
        None if world.processes.iter().all(|process| process.saved.is_none()) => {
            actions.push(SystemAction::SaveLedger(at));
        }
        Some(saved) if saved.entry != process.ledger.entry && is_up_to_date(world, config, at) => {
            actions.extend([true, false].map(|whole| SystemAction::PutLedgerBack(at, whole)));
        }
        _ => {}
    }
}

/// Adds transactions without row lock: each may have read the row long before it writes.
fn add_unlocked_transactions(
    world: &SystemState,
    config: &ExplorationConfig,
    actions: &mut Vec<SystemAction>,
) {
    for at in 0..PROCESSES {
        match &world.processes[at].read {
            None => {
                if world.faults_left.overlaps > 0 {
                    actions.push(SystemAction::ReadUnlocked(at));
                }
            }
            Some(read) => {
                let mut then = world.clone();
                then.database = Arc::clone(read);
                let mut inner = Vec::new();
                add_service_actions(&then, config, &mut inner);
                for host in 0..config.hosts {
                    let speaks = world.hosts[host].alive && world.hosts[host].journal.is_some();
                    inner.extend(speaks.then_some(SystemAction::Poll(host)));
                }
                actions.extend(
                    inner
                        .into_iter()
                        .map(|action| SystemAction::WriteUnlocked(at, Box::new(action))),
                );
            }
        }
    }
}
