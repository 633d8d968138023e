//! Actions: everything that can happen next in a state.

use std::fmt;
use std::sync::Arc;

use formation_explored::agent::{LaunchState, StartDecision, decide_at_start};
use formation_explored::memory::LedgerEntry;
use formation_explored::service::{Phase, Seating};
use formation_explored::{AgentKey, Epoch, Hash};

use crate::explore::config::ExplorationConfig;
use crate::explore::database::{DatabaseState, PROCESSES};
use crate::explore::host_steps::directory_of;
use crate::explore::identities::{format_list, list_of, machine, members_of, name};
use crate::explore::no_op;
use crate::explore::processes::{
    RestoreMethod, have_swept_since_backup, is_up_to_date, may_be_forgotten,
};
use crate::explore::reductions;
use crate::explore::state::{AgentMode, SystemState};

/// One atomic step of a host, a process or the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SystemAction {
    /// A host's agent starts, makes its key and record, and redeems its token.
    Join(usize),
    /// An agent polls, or redeems its token if the database doesn't know the agent.
    Poll(usize),
    /// A late message arrives from an agent that no longer exists.
    DeliverLatePoll(AgentKey),
    /// An agent learns that the service is at this epoch.
    SeeEpoch(usize, Epoch),
    /// An agent examines a list: it probes the members. Then it signs or refuses the list, or sends
    /// its row of the matrix (which members it reaches).
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
    /// The process with this index serves the action, instead of process 0.
    ServedBy(usize, Box<SystemAction>),
    /// A lease lapses, possibly without any transaction that notices it.
    Lapse(AgentKey),
    /// The frozen list times out.
    TimeOut,
    /// An agent's backoff ends.
    EndBackoff(AgentKey),
    /// An operator abandons the cluster.
    Abandon,
    /// The cluster's deadline passes.
    PassDeadline,
    /// An owner retires the cluster.
    Retire,
    /// An owner takes the retirement back.
    Unretire,
    /// An owner reopens the expired cluster.
    Reopen,
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
    /// The backup of the database is restored by this method.
    Restore(RestoreMethod),
    /// A process's ledger is copied.
    SaveLedger(usize),
    /// A process is stopped, and the copy replaces its ledger. If the flag is true, the position
    /// beside the ledger is also replaced by the copied position.
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
    /// A process reads the cluster's row without locking it.
    ReadUnlocked(usize),
    /// A process writes the result of this action, computed from the row that it read without a
    /// lock.
    WriteUnlocked(usize, Box<SystemAction>),
}

impl SystemAction {
    /// Returns the host that takes the action, or to which the action happens.
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
                | SystemAction::EndBackoff(_)
                | SystemAction::Abandon
                | SystemAction::PassDeadline
                | SystemAction::Retire
                | SystemAction::Unretire
                | SystemAction::Reopen
                | SystemAction::Accept
        )
    }

    /// Returns whether the action is a fault, so that the bounds limit it. The lapse of a lease
    /// isn't a fault if the host with that key no longer exists.
    #[must_use]
    pub fn is_fault(&self, system: &SystemState) -> bool {
        match self {
            SystemAction::Lapse(key) => !system.is_key_gone(*key),
            SystemAction::ServedBy(_, action) => action.is_fault(system),
            SystemAction::TimeOut
            | SystemAction::Abandon
            | SystemAction::PassDeadline
            | SystemAction::Retire
            | SystemAction::Reopen
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
            SystemAction::EndBackoff(key) => write!(f, "{} leaves its backoff", name(*key)),
            SystemAction::Abandon => write!(f, "an operator abandons the cluster"),
            SystemAction::PassDeadline => write!(f, "the deadline passes"),
            SystemAction::Retire => write!(f, "an owner retires the cluster"),
            SystemAction::Unretire => write!(f, "an owner takes the retirement back"),
            SystemAction::Reopen => write!(f, "an owner reopens the expired cluster"),
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
                write!(f, "{} is re-imaged: nothing on it survives", host(at))
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
pub fn enumerate(system: &SystemState, config: &ExplorationConfig) -> Vec<SystemAction> {
    let mut actions = Vec::with_capacity(32);
    if reductions::is_terminal(system, config)
        || reductions::has_one_majority_at_most(system, config)
    {
        return actions;
    }
    if reductions::is_no_process_connected(system, config) {
        add_database_actions(system, config, &mut actions);
        return actions;
    }
    if let Some(followed) = system.followed_host {
        let host = usize::from(followed);
        if system.hosts[host].alive {
            add_host_actions(system, config, host, &mut actions);
        }
        return actions;
    }
    for host in 0..config.hosts {
        // Hosts that haven't joined are interchangeable if they are equal and linked in the same
        // way. Of such hosts, only the first one acts.
        let is_equal = |other: usize| {
            system.hosts[other] == system.hosts[host]
                && system.hosts[host].journal.is_none()
                && system.links.are_unchanged_by_swap(host, other)
        };
        if system.hosts[host].alive && !(0..host).any(is_equal) {
            add_host_actions(system, config, host, &mut actions);
        }
    }
    if config.service_lies {
        return actions;
    }
    add_link_faults(system, config, &mut actions);
    add_service_actions(system, config, &mut actions);
    if reductions::is_serving_process_relevant(system, config) && !system.processes[1].is_lost {
        let is_request = |action: &&SystemAction| action.is_service_request();
        let by_other = |action: &SystemAction| SystemAction::ServedBy(1, Box::new(action.clone()));
        let others: Vec<SystemAction> = actions.iter().filter(is_request).map(by_other).collect();
        actions.extend(others);
    }
    add_database_actions(system, config, &mut actions);
    if !config.environment.row_lock {
        add_unlocked_transactions(system, config, &mut actions);
    }
    actions
}

fn add_host_actions(
    system: &SystemState,
    config: &ExplorationConfig,
    at: usize,
    actions: &mut Vec<SystemAction>,
) {
    let host = &system.hosts[at];
    let left = &system.faults_left;
    let is_unknown = reductions::is_unknown_to_others(host, config);
    if left.deaths > 0 && !is_unknown {
        actions.push(SystemAction::Die(at));
    }
    if left.reimages > 0
        && !is_unknown
        && usize::from(host.reimage_count) + 1 < crate::explore::identities::MAX_KEYS_PER_HOST
    {
        actions.push(SystemAction::ReimageHost(at));
    }
    let Some(journal) = &host.journal else {
        if host.mode == AgentMode::Running && !has_service_finished(system, config) {
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
        let can_receive =
            |&to: &usize| to != at && system.hosts[to].alive && system.hosts[to].journal.is_none();
        actions.extend((0..config.hosts).filter(can_receive).map(|to| SystemAction::Clone(at, to)));
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
    // An agent may learn of a newer epoch in every mode.
    let latest = if config.service_lies { config.epochs + 1 } else { system.sent.epoch };
    if !no_op::has_stopped_releasing(config, journal) {
        actions.extend(
            (journal.released_epoch + 2..=latest).map(|epoch| SystemAction::SeeEpoch(at, epoch)),
        );
    }
    if journal.launch_state == LaunchState::NotStarted && host.mode == AgentMode::Running {
        add_forming_actions(system, config, at, actions);
    }
    let held = journal
        .held_document
        .as_ref()
        .filter(|held| !no_op::is_decided(system, held.proposal_hash));
    if held.is_some() && !config.service_lies && system.followed_host.is_none() {
        actions.push(SystemAction::ShowDocument(at));
    }
}

fn add_forming_actions(
    system: &SystemState,
    config: &ExplorationConfig,
    at: usize,
    actions: &mut Vec<SystemAction>,
) {
    let host = &system.hosts[at];
    let Some(journal) = &host.journal else { return };
    if config.service_lies {
        let lists = possible_false_lists(system, config);
        let mine = |h: &&Hash| members_of(**h).any(|key| key == journal.key);
        for &h in lists.iter().filter(mine) {
            actions.push(SystemAction::ExamineList(at, h));
            let acked = |key| system.sent.acks.contains(&(key, h));
            if members_of(h).all(acked) {
                actions.push(SystemAction::SeeDocument(at, h));
            }
        }
        return;
    }
    let has_finished = has_service_finished(system, config);
    if !has_finished && !no_op::would_poll_change_nothing(system, config, at, journal) {
        actions.push(SystemAction::Poll(at));
    }
    for &h in &system.sent.proposals {
        if has_finished {
            break;
        }
        if members_of(h).any(|key| key == journal.key)
            && !no_op::is_list_ignored(system, config, journal, h)
        {
            actions.push(SystemAction::ExamineList(at, h));
            if no_op::is_missing_releases(system, config, journal, h) {
                actions.push(SystemAction::ReportMissingReleases(at, h));
            }
        }
    }
    for &h in &system.sent.documents {
        if members_of(h).any(|key| key == journal.key) {
            actions.push(SystemAction::SeeDocument(at, h));
        }
    }
}

/// Adds the loss of links between hosts that have joined. Other links don't matter, because nobody
/// probes a host before it has joined (`reductions`).
fn add_link_faults(
    system: &SystemState,
    config: &ExplorationConfig,
    actions: &mut Vec<SystemAction>,
) {
    if system.faults_left.links == 0 || has_service_finished(system, config) {
        return;
    }
    let may_fail = |&at: &usize| !reductions::is_unknown_to_others(&system.hosts[at], config);
    for one in (0..config.hosts).filter(may_fail) {
        let others = (one + 1..config.hosts).filter(may_fail);
        let up = others.filter(|&other| system.links.are_connected(one, other));
        actions.extend(up.map(|other| SystemAction::Cut(one, other)));
    }
}

/// Returns whether the service has finished for good: it takes no ack any more, and no restore can
/// change that. No property depends on a host that joins, polls or signs after this.
fn has_service_finished(system: &SystemState, config: &ExplorationConfig) -> bool {
    let forming = matches!(system.database.cluster.phase, Phase::Open | Phase::Preparing);
    let may_return = system.faults_left.restores > 0
        || system.faults_left.retirements > 0
        || system.faults_left.reopenings > 0
        || system.database.cluster.phase == Phase::Retired
        || !reductions::are_ledgers_consistent(system, config)
        || system.processes.iter().any(|process| process.read.is_some())
        || !config.rules.is_on(formation_explored::Rule::AbandonBeforeCommit);
    !config.service_lies && !forming && !may_return
}

/// Returns every list that a lying service can show: all sets of joined hosts, ordered by letter,
/// at every epoch.
fn possible_false_lists(system: &SystemState, config: &ExplorationConfig) -> Vec<Hash> {
    if !config.false_lists.is_empty() {
        let lie = |(epoch, hosts): &(Epoch, Vec<usize>)| {
            let keys: Vec<AgentKey> = hosts.iter().map(|&at| system.key(at)).collect();
            list_of(*epoch, &keys)
        };
        return config.false_lists.iter().map(lie).collect();
    }
    let joined: Vec<AgentKey> = system
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
    system: &SystemState,
    config: &ExplorationConfig,
    actions: &mut Vec<SystemAction>,
) {
    let cluster = &system.database.cluster;
    if has_service_finished(system, config) {
        return;
    }
    if system.is_ahead {
        actions.push(SystemAction::ClockBack);
    }
    if config.has_late_messages {
        let past = system.sent.past.iter().map(|journal| journal.key);
        let dead = system.hosts.iter().filter(|host| !host.alive);
        let dead = dead.filter_map(|host| host.journal.as_ref().map(|journal| journal.key));
        let is_unseated = |key: &AgentKey| {
            cluster.agents.get(key).is_none_or(|agent| agent.seating == Seating::Absent)
        };
        actions.extend(past.chain(dead).filter(is_unseated).map(SystemAction::DeliverLatePoll));
    }
    add_ack_deliveries(system, config, actions);
    for (&key, &epoch) in &system.sent.releases {
        let known = cluster.agents.get(&key);
        let new = |agent: &formation_explored::service::Applicant| {
            if config.reduced {
                // A release below the row's epoch changes nothing in the row
                // (`reductions::clear_unread_fields`).
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
            let may_lapse = system.faults_left.pauses > 0 || system.is_key_gone(key);
            if agent.seating != Seating::Absent && agent.lease_until > system.now() && may_lapse {
                actions.push(SystemAction::Lapse(key));
            }
            if agent.backoff_until > system.now() {
                actions.push(SystemAction::EndBackoff(key));
            }
        }
        if system.faults_left.clock_jumps > 0 && !system.is_ahead {
            actions.push(SystemAction::ClockAhead);
        }
        if cluster.phase == Phase::Preparing && system.faults_left.timeouts > 0 {
            actions.push(SystemAction::TimeOut);
        }
        if system.faults_left.cluster_ends > 0 {
            actions.extend([SystemAction::Abandon, SystemAction::PassDeadline]);
        }
        if !system.database.settled && system.faults_left.accepts > 0 {
            actions.push(SystemAction::Accept);
        }
    } else if !config.rules.is_on(formation_explored::Rule::AbandonBeforeCommit)
        && system.faults_left.cluster_ends > 0
    {
        actions.push(SystemAction::Abandon);
    }
    match cluster.phase {
        Phase::Committed | Phase::Formed if system.faults_left.retirements > 0 => {
            actions.push(SystemAction::Retire);
        }
        Phase::Retired => actions.push(SystemAction::Unretire),
        Phase::Expired if system.faults_left.reopenings > 0 => {
            actions.push(SystemAction::Reopen);
        }
        _ => {}
    }
}

/// Adds the arrival of acks for the frozen list.
fn add_ack_deliveries(
    system: &SystemState,
    config: &ExplorationConfig,
    actions: &mut Vec<SystemAction>,
) {
    let cluster = &system.database.cluster;
    let Some(frozen) = cluster.frozen.as_ref().filter(|_| cluster.phase == Phase::Preparing) else {
        return;
    };
    let h = frozen.proposal_hash;
    let is_signed = |key: &AgentKey| system.sent.acks.contains(&(*key, h));
    if reductions::do_acks_arrive_together(system, config) {
        if members_of(h).all(|key| is_signed(&key)) {
            actions.push(SystemAction::DeliverAcks(h));
        }
        return;
    }
    let is_undelivered = |key: &AgentKey| is_signed(key) && !frozen.acks.contains_key(key);
    actions
        .extend(members_of(h).filter(is_undelivered).map(|key| SystemAction::DeliverAck(key, h)));
}

fn add_database_actions(
    system: &SystemState,
    config: &ExplorationConfig,
    actions: &mut Vec<SystemAction>,
) {
    let cluster = &system.database.cluster;
    let decided = matches!(cluster.phase, Phase::Committed | Phase::Formed);
    for at in 0..PROCESSES {
        let process = &system.processes[at];
        // If both processes are in the same state, only the first one acts.
        if at > 0 && reductions::are_processes_alike(system) {
            continue;
        }
        if system.faults_left.forgets > 0 && may_be_forgotten(system, config, at) {
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
        let is_in_ledger =
            |h: &Hash| process.ledger.entry == whole(*h) || !config.environment.ledger;
        // Once no ledger will be read again, its contents don't matter.
        let are_ledgers_read = !config.reduced || !reductions::is_database_final(system, config);
        if are_ledgers_read {
            add_process_actions(system, config, at, actions);
        }
        let is_sent =
            |h: &Hash| system.sent.documents.contains(h) && (is_in_ledger(h) || !are_ledgers_read);
        let decided_h = cluster.frozen.as_ref().map(|frozen| frozen.proposal_hash);
        if decided && decided_h.is_some_and(|h| !is_sent(&h)) {
            actions.push(SystemAction::Publish(at));
        }
        if system.faults_left.crashes > 0 {
            actions.push(SystemAction::Crash(at));
        }
    }
    let phase = match cluster.phase {
        Phase::Open => Some(0),
        Phase::Preparing => Some(1),
        Phase::Committed => Some(2),
        _ => None,
    };
    if system.faults_left.restores > 0 {
        if system.backup.is_none() {
            if phase.is_some_and(|phase: usize| config.backup_in[phase]) {
                actions.push(SystemAction::Backup);
            }
        } else {
            // Each running process must have examined its database since its ledger was replaced:
            // see `processes`.
            let compared =
                system.processes.iter().all(|process| process.connected || process.is_lost);
            let may = |setback: &&RestoreMethod| match setback {
                RestoreMethod::Dump => compared,
                RestoreMethod::InPlace => {
                    let old = !config.environment.old_backups || have_swept_since_backup(system);
                    compared && old
                }
            };
            actions.extend(
                config.restore_methods.iter().filter(may).map(|&how| SystemAction::Restore(how)),
            );
        }
    }
}

/// Adds the steps that a connected process takes by itself, and the faults of its ledger.
fn add_process_actions(
    system: &SystemState,
    config: &ExplorationConfig,
    at: usize,
    actions: &mut Vec<SystemAction>,
) {
    let process = &system.processes[at];
    if !config.environment.ledger {
        return;
    }
    if !is_up_to_date(system, config, at) {
        actions.push(SystemAction::InspectDatabase(at));
    }
    let is_unswept = |backup: &Arc<DatabaseState>| {
        system.database.rows[at].sweep_count == backup.rows[at].sweep_count
    };
    let may_sweep =
        config.restore_methods.contains(&RestoreMethod::InPlace) && system.faults_left.restores > 0;
    if may_sweep && system.backup.as_ref().is_some_and(is_unswept) {
        actions.push(SystemAction::Sweep(at));
    }
    // Processes are interchangeable, so process 0 is never lost. Process 0 must have copied all
    // decisions before another process is lost. Otherwise some decisions would be gone, and no rule
    // could bring them back.
    if system.faults_left.losses > 0 && at > 0 && is_up_to_date(system, config, 0) {
        actions.push(SystemAction::LoseProcess(at));
    }
    if system.faults_left.ledger_rollbacks == 0 {
        return;
    }
    match &process.saved {
        None if system.processes.iter().all(|process| process.saved.is_none()) => {
            actions.push(SystemAction::SaveLedger(at));
        }
        Some(saved) if saved.entry != process.ledger.entry && is_up_to_date(system, config, at) => {
            actions.extend([true, false].map(|whole| SystemAction::PutLedgerBack(at, whole)));
        }
        _ => {}
    }
}

/// Adds transactions that don't lock the row: each may write long after it has read the row.
fn add_unlocked_transactions(
    system: &SystemState,
    config: &ExplorationConfig,
    actions: &mut Vec<SystemAction>,
) {
    for at in 0..PROCESSES {
        match &system.processes[at].read {
            None => {
                if system.faults_left.overlaps > 0 {
                    actions.push(SystemAction::ReadUnlocked(at));
                }
            }
            Some(read) => {
                let mut read_state = system.clone();
                read_state.database = Arc::clone(read);
                let mut inner = Vec::new();
                add_service_actions(&read_state, config, &mut inner);
                for host in 0..config.hosts {
                    let may_poll = system.hosts[host].alive && system.hosts[host].journal.is_some();
                    inner.extend(may_poll.then_some(SystemAction::Poll(host)));
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
