//! Application of one action to a state.

use std::sync::Arc;

use formation_explored::agent::{Journal, LaunchState};
use formation_explored::service::{ClusterEvent, Refusal};

use crate::explore::actions::SystemAction;
use crate::explore::config::ExplorationConfig;
use crate::explore::host_steps as hosts;
use crate::explore::identities::members_of;
use crate::explore::processes;
use crate::explore::properties::PropertyViolation;
use crate::explore::reductions;
use crate::explore::service_steps as service;
use crate::explore::state::{AgentMode, DAY, NOW, SystemState};

/// Returns the state after `action`. It equals `system` if the action changes nothing.
///
/// # Errors
/// Returns the property that no longer holds.
pub fn apply(
    system: &SystemState,
    config: &ExplorationConfig,
    action: &SystemAction,
) -> Result<SystemState, PropertyViolation> {
    let mut next = system.clone();
    if let SystemAction::ServedBy(at, action) = action {
        let served = SystemState { serving: *at, ..system.clone() };
        return apply(&served, config, action).map(|next| SystemState { serving: 0, ..next });
    }
    if reductions::are_hosts_independent(system, config) {
        next.followed_host = action.host().and_then(|at| u8::try_from(at).ok());
        // Faults of the kinds below can't happen any more in such a state. Their remaining numbers
        // are set to 0, so that states which differ only in these numbers are merged.
        let left = &mut next.faults_left;
        (left.pauses, left.timeouts, left.cluster_ends, left.accepts) = (0, 0, 0, 0);
        (left.links, left.clock_jumps, next.is_ahead) = (0, 0, false);
    }
    apply_in_place(&mut next, config, action)?;
    if action.is_fault(system) && next.total_faults_left != u8::MAX {
        next.total_faults_left = next.total_faults_left.saturating_sub(1);
        next.faults_left = next.faults_left.at_most(next.total_faults_left);
    }
    if reductions::may_publish_at_once(&next, config) {
        processes::publish(&mut next, config, 0)?;
    }
    if next.are_agent_steps_atomic() {
        take_pending_steps(&mut next, config)?;
    }
    Ok(next)
}

/// Takes all pending steps of each agent towards starting its node, in one action. The states
/// between these steps make no difference: no fault is left that could happen in them, and no other
/// host can observe them.
fn take_pending_steps(
    system: &mut SystemState,
    config: &ExplorationConfig,
) -> Result<(), PropertyViolation> {
    for at in 0..config.hosts {
        while system.hosts[at].alive {
            let host = &system.hosts[at];
            match host.mode {
                AgentMode::InspectingDirectory
                | AgentMode::WritingMarker
                | AgentMode::LaunchingNode => hosts::advance_agent(system, config, at)?,
                AgentMode::Running if host.running_list.is_some() && !host.directory.has_log => {
                    hosts::make_log(system, config, at)?;
                }
                AgentMode::Running if host.running_list.is_some() && !has_run(system, at) => {
                    hosts::notice_node_log(system, config, at)?;
                }
                _ => break,
            }
        }
    }
    Ok(())
}

fn has_run(system: &SystemState, at: usize) -> bool {
    journal_of(system, at).is_none_or(|journal| journal.launch_state == LaunchState::Ran)
}

fn apply_in_place(
    system: &mut SystemState,
    config: &ExplorationConfig,
    action: &SystemAction,
) -> Result<(), PropertyViolation> {
    match action {
        SystemAction::Join(at) => {
            hosts::join(system, config, *at)?;
            if !config.service_lies && system.processes.iter().any(|process| process.connected) {
                poll_or_redeem(system, config, *at)?;
            }
        }
        SystemAction::Poll(at) => poll_or_redeem(system, config, *at)?,
        SystemAction::DeliverLatePoll(key) => {
            let past = system.sent.past.iter().find(|journal| journal.key == *key).cloned();
            let dead = || system.hosts.iter().filter_map(|host| host.journal.as_ref());
            let journal = past.or_else(|| dead().find(|journal| journal.key == *key).cloned());
            if let Some(journal) = journal {
                let _ = service::poll_or_redeem(system, config, &journal)?;
            }
        }
        SystemAction::SeeEpoch(at, epoch) => hosts::receive_epoch(system, config, *at, *epoch)?,
        SystemAction::ExamineList(at, h) => hosts::examine_list(system, config, *at, *h, false)?,
        SystemAction::ReportMissingReleases(at, h) => {
            hosts::examine_list(system, config, *at, *h, true)?
        }
        SystemAction::DeliverAck(key, h) => {
            let _ = service::deliver_ack(system, config, *key, *h)?;
        }
        SystemAction::DeliverAcks(h) => {
            for key in members_of(*h) {
                let _ = service::deliver_ack(system, config, key, *h)?;
            }
        }
        SystemAction::DeliverRelease(key) => service::deliver_release(system, config, *key)?,
        SystemAction::SeeDocument(at, h) => hosts::receive_document(system, config, *at, *h)?,
        SystemAction::AdvanceAgent(at) => hosts::advance_agent(system, config, *at)?,
        SystemAction::MakeLog(at) => hosts::make_log(system, config, *at)?,
        SystemAction::SeeLog(at) => hosts::notice_node_log(system, config, *at)?,
        SystemAction::Report(at) => {
            if let Some(key) = journal_of(system, *at).map(|journal| journal.key) {
                // The production code also derives the Raft cluster id from the list.
                let raft_cluster = system.hosts[*at].running_list.map_or(0, fold_hash);
                let _ = service::serve(system, config, ClusterEvent::Report { key, raft_cluster })?;
            }
        }
        SystemAction::ShowDocument(at) => {
            let held = journal_of(system, *at).and_then(|journal| journal.held_document.clone());
            if let Some(held) = held {
                let _ = service::serve(system, config, ClusterEvent::Adopt((*held).clone()))?;
            }
        }
        SystemAction::Publish(at) => processes::publish(system, config, *at)?,
        SystemAction::InspectDatabase(at) => processes::inspect_database(system, config, *at)?,
        SystemAction::Sweep(at) => processes::sweep(system, config, *at)?,
        SystemAction::SaveLedger(at) => {
            let process = &mut system.processes[*at];
            process.saved = Some(process.ledger.clone());
        }
        SystemAction::WriteUnlocked(at, inner) => {
            let Some(read) = system.processes[*at].read.take() else { return Ok(()) };
            system.database = read;
            apply_in_place(system, config, inner)?;
        }
        other => apply_fault(system, config, other)?,
    }
    Ok(())
}

/// Applies an action that ends the cluster or undoes its end. Counts the action against its bound,
/// if it has one.
fn apply_end(
    system: &mut SystemState,
    config: &ExplorationConfig,
    action: &SystemAction,
) -> Result<(), PropertyViolation> {
    match action {
        SystemAction::Abandon => {
            system.faults_left.cluster_ends -= 1;
            let by = String::new();
            let outcome = service::serve(system, config, ClusterEvent::Abandon { by })?;
            if outcome.answer.is_ok() {
                Arc::make_mut(&mut system.sent).abandoned = true;
            }
        }
        SystemAction::Retire => {
            system.faults_left.retirements -= 1;
            let by = String::new();
            let _ = service::serve(system, config, ClusterEvent::Retire { by })?;
        }
        SystemAction::Unretire => {
            let by = String::new();
            let _ = service::serve(system, config, ClusterEvent::Unretire { by })?;
        }
        SystemAction::Reopen => {
            system.faults_left.reopenings -= 1;
            let (by, deadline) = (String::new(), NOW.after(DAY));
            let _ = service::serve(system, config, ClusterEvent::Reopen { by, deadline })?;
        }
        SystemAction::PassDeadline => {
            system.faults_left.cluster_ends -= 1;
            service::expire(system, config)?;
        }
        SystemAction::Accept => {
            system.faults_left.accepts -= 1;
            service::accept(system, config)?;
        }
        _ => {}
    }
    Ok(())
}

/// Applies a fault, an operator's action or a passing deadline, within the bounds.
fn apply_fault(
    system: &mut SystemState,
    config: &ExplorationConfig,
    action: &SystemAction,
) -> Result<(), PropertyViolation> {
    match action {
        SystemAction::Lapse(key) => {
            if !system.is_key_gone(*key) {
                use_up_fault(&mut system.faults_left.pauses);
            }
            service::lapse(system, config, *key)?;
        }
        SystemAction::TimeOut => {
            use_up_fault(&mut system.faults_left.timeouts);
            service::time_out(system, config)?;
        }
        SystemAction::EndBackoff(key) => service::end_backoff(system, config, *key)?,
        SystemAction::Abandon
        | SystemAction::Retire
        | SystemAction::Unretire
        | SystemAction::Reopen
        | SystemAction::PassDeadline
        | SystemAction::Accept => apply_end(system, config, action)?,
        SystemAction::ClockAhead => {
            system.faults_left.clock_jumps -= 1;
            system.is_ahead = true;
        }
        SystemAction::ClockBack => system.is_ahead = false,
        SystemAction::Backup => system.backup = Some(reductions::backup(&system.database, config)),
        SystemAction::Restore(how) => {
            system.faults_left.restores -= 1;
            processes::restore(system, config, *how);
        }
        SystemAction::PutLedgerBack(at, with_position) => {
            system.faults_left.ledger_rollbacks -= 1;
            processes::restore_ledger_copy(&mut system.processes[*at], *with_position);
        }
        SystemAction::LoseProcess(at) => {
            system.faults_left.losses -= 1;
            processes::lose(&mut system.processes[*at]);
        }
        SystemAction::ForgetProcess(at) => {
            use_up_fault(&mut system.faults_left.forgets);
            processes::forget(system, *at);
        }
        SystemAction::Crash(at) => {
            system.faults_left.crashes -= 1;
            processes::crash(system, config, *at);
        }
        SystemAction::ReadUnlocked(at) => {
            system.faults_left.overlaps -= 1;
            system.processes[*at].read = Some(Arc::clone(&system.database));
        }
        other => apply_host_fault(system, config, other)?,
    }
    Ok(())
}

/// Applies a fault of a host or of a link between hosts.
fn apply_host_fault(
    system: &mut SystemState,
    config: &ExplorationConfig,
    action: &SystemAction,
) -> Result<(), PropertyViolation> {
    match action {
        SystemAction::Cut(one, other) => {
            use_up_fault(&mut system.faults_left.links);
            system.links.cut(*one, *other);
        }
        SystemAction::Kill(at) => {
            system.faults_left.kills -= 1;
            hosts::kill(system, config, *at)?;
        }
        SystemAction::Die(at) => {
            system.faults_left.deaths -= 1;
            let host = Arc::make_mut(&mut system.hosts[*at]);
            host.alive = false;
            host.running_list = None;
        }
        SystemAction::LoseDirectory(at) => {
            system.faults_left.lost_directories -= 1;
            hosts::lose_directory(system, config, *at)?;
        }
        SystemAction::ReimageHost(at) => {
            system.faults_left.reimages -= 1;
            hosts::reimage(system, *at);
        }
        SystemAction::Clone(from, to) => {
            system.faults_left.clones -= 1;
            hosts::clone_disk(system, config, *from, *to)?;
        }
        _ => {}
    }
    Ok(())
}

/// Decrements the number of faults that are left of one kind. `u8::MAX` means unlimited, and is not
/// decremented.
fn use_up_fault(left: &mut u8) {
    if *left != u8::MAX {
        *left = left.saturating_sub(1);
    }
}

fn journal_of(system: &SystemState, at: usize) -> Option<&Journal> {
    system.hosts[at].journal.as_ref()
}

/// Lets a host's agent poll, or redeem its token. `KeyElsewhere` is the only refusal that the agent
/// receives here. All other refusals may arrive arbitrarily late, so the exploration leaves them
/// out.
fn poll_or_redeem(
    system: &mut SystemState,
    config: &ExplorationConfig,
    at: usize,
) -> Result<(), PropertyViolation> {
    let Some(journal) = journal_of(system, at).cloned() else { return Ok(()) };
    let outcome = service::poll_or_redeem(system, config, &journal)?;
    if let Err(refusal @ Refusal::KeyElsewhere { .. }) = &outcome.answer {
        hosts::receive_refusal(system, config, at, refusal)?;
    }
    Ok(())
}

fn fold_hash(h: formation_explored::Hash) -> u64 {
    h.0.iter().fold(0, |sum, &byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)))
}
