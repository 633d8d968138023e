//! Enumeration of the actions that may happen next in a state.

use std::sync::Arc;

use formation_explored::agent::{LaunchState, StartDecision, decide_at_start};
use formation_explored::memory::LedgerEntry;
use formation_explored::service::{Phase, Seating};
use formation_explored::{AgentKey, Epoch, Hash};

use crate::explore::actions::SystemAction;
use crate::explore::config::ExplorationConfig;
use crate::explore::database::{DatabaseState, PROCESSES};
use crate::explore::host_steps::directory_of;
use crate::explore::identities::{list_of, machine, members_of};
use crate::explore::no_op;
use crate::explore::processes::{
    RestoreMethod, have_swept_since_backup, is_up_to_date, may_be_forgotten,
};
use crate::explore::reductions;
use crate::explore::state::{AgentMode, SystemState};

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
    // An agent may learn of a newer epoch in every `AgentMode`.
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

/// Adds to `actions` the loss of links between hosts that have joined. Other links don't matter,
/// because nobody probes a host before it has joined (`reductions`).
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

/// Returns every list of members that a lying service can show: all sets of joined hosts, ordered
/// by letter, at every epoch.
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
                // A release of an epoch below the row's epoch changes nothing in the row
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

/// Adds to `actions` the arrival of acks for the frozen list of members.
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
        // If no process will read a ledger again, the contents of ledgers make no difference.
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
            // Every running process must have examined the database before a restore, and again
            // after its ledger was replaced. Otherwise database and ledger would be set back
            // together, which no process can notice (`formation_explored::memory`).
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

/// Adds to `actions` the steps that a connected process takes by itself, and the faults of its
/// ledger.
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

/// Adds to `actions` transactions that don't lock the row. Each may write the row long after it has
/// read it.
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
