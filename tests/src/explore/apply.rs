//! Application of one action to a state.

use std::sync::Arc;

use formation_explored::agent::{Journal, LaunchState};
use formation_explored::service::{ClusterEvent, Refusal};

use crate::explore::actions::SystemAction;
use crate::explore::config::ExplorationConfig;
use crate::explore::host_side as hosts;
use crate::explore::identity::members_of;
use crate::explore::processes;
use crate::explore::properties::PropertyViolation;
use crate::explore::reduce;
use crate::explore::service_side as service;
use crate::explore::world::{AgentMode, SystemState};

/// Returns the state after `action`; an equal one if the action changes nothing.
///
/// # Errors
/// Returns the property that no longer holds.
pub fn apply(
    world: &SystemState,
    config: &ExplorationConfig,
    action: &SystemAction,
) -> Result<SystemState, PropertyViolation> {
    let mut next = world.clone();
    if let SystemAction::ServedBy(at, action) = action {
        let through = SystemState { serving: *at, ..world.clone() };
        return apply(&through, config, action).map(|next| SystemState { serving: 0, ..next });
    }
    if reduce::are_hosts_independent(world, config) {
        next.followed_host = action.host().and_then(|at| u8::try_from(at).ok());
        // None of these faults can happen any more, so how many are left makes no difference.
        let left = &mut next.faults_left;
        (left.pauses, left.timeouts, left.cluster_ends, left.accepts) = (0, 0, 0, 0);
        (left.links, left.clock_jumps, next.is_ahead) = (0, 0, false);
    }
    apply_in_place(&mut next, config, action)?;
    if action.is_fault(world) && next.total_faults_left != u8::MAX {
        next.total_faults_left = next.total_faults_left.saturating_sub(1);
        next.faults_left = next.faults_left.at_most(next.total_faults_left);
    }
    if reduce::may_publish_at_once(&next, config) {
        processes::publish(&mut next, config, 0)?;
    }
    if next.are_agent_steps_atomic() {
        take_pending_steps(&mut next, config)?;
    }
    Ok(next)
}

/// Takes all steps of each agent towards its node at once. No fault is left that could happen
/// between them, and no other host can observe the states between.
fn take_pending_steps(
    world: &mut SystemState,
    config: &ExplorationConfig,
) -> Result<(), PropertyViolation> {
    for at in 0..config.hosts {
        while world.hosts[at].alive {
            let host = &world.hosts[at];
            match host.mode {
                AgentMode::InspectingDirectory
                | AgentMode::WritingMarker
                | AgentMode::LaunchingNode => hosts::advance_agent(world, config, at)?,
                AgentMode::Running if host.running_list.is_some() && !host.directory.has_log => {
                    hosts::make_log(world, config, at)?;
                }
                AgentMode::Running if host.running_list.is_some() && !has_ran(world, at) => {
                    hosts::see_log(world, config, at)?;
                }
                _ => break,
            }
        }
    }
    Ok(())
}

fn has_ran(world: &SystemState, at: usize) -> bool {
    journal_of(world, at).is_none_or(|journal| journal.launch_state == LaunchState::Ran)
}

fn apply_in_place(
    world: &mut SystemState,
    config: &ExplorationConfig,
    action: &SystemAction,
) -> Result<(), PropertyViolation> {
    match action {
        SystemAction::Join(at) => {
            hosts::join(world, config, *at)?;
            if !config.service_lies && world.processes.iter().any(|process| process.connected) {
                poll_or_redeem(world, config, *at)?;
            }
        }
        SystemAction::Poll(at) => poll_or_redeem(world, config, *at)?,
        SystemAction::DeliverLatePoll(key) => {
            let past = world.sent.past.iter().find(|journal| journal.key == *key).cloned();
            let dead = || world.hosts.iter().filter_map(|host| host.journal.as_ref());
            let journal = past.or_else(|| dead().find(|journal| journal.key == *key).cloned());
            if let Some(journal) = journal {
                let _ = service::poll_or_redeem(world, config, &journal)?;
            }
        }
        SystemAction::SeeEpoch(at, epoch) => hosts::see_epoch(world, config, *at, *epoch)?,
        SystemAction::ExamineList(at, h) => hosts::examine_list(world, config, *at, *h, false)?,
        SystemAction::ReportMissingReleases(at, h) => {
            hosts::examine_list(world, config, *at, *h, true)?
        }
        SystemAction::DeliverAck(key, h) => {
            let _ = service::deliver_ack(world, config, *key, *h)?;
        }
        SystemAction::DeliverAcks(h) => {
            for key in members_of(*h) {
                let _ = service::deliver_ack(world, config, key, *h)?;
            }
        }
        SystemAction::DeliverRelease(key) => service::deliver_release(world, config, *key)?,
        SystemAction::SeeDocument(at, h) => hosts::see_document(world, config, *at, *h)?,
        SystemAction::AdvanceAgent(at) => hosts::advance_agent(world, config, *at)?,
        SystemAction::MakeLog(at) => hosts::make_log(world, config, *at)?,
        SystemAction::SeeLog(at) => hosts::see_log(world, config, *at)?,
        SystemAction::Report(at) => {
            if let Some(key) = journal_of(world, *at).map(|journal| journal.key) {
                // The production code also derives the Raft cluster id from the list.
                let raft_cluster = world.hosts[*at].running_list.map_or(0, fold_hash);
                let _ = service::serve(world, config, ClusterEvent::Report { key, raft_cluster })?;
            }
        }
        SystemAction::ShowDocument(at) => {
            let held = journal_of(world, *at).and_then(|journal| journal.held_document.clone());
            if let Some(held) = held {
                let _ = service::serve(world, config, ClusterEvent::Adopt((*held).clone()))?;
            }
        }
        SystemAction::Publish(at) => processes::publish(world, config, *at)?,
        SystemAction::InspectDatabase(at) => processes::inspect_database(world, config, *at)?,
        SystemAction::Sweep(at) => processes::sweep(world, config, *at)?,
        SystemAction::SaveLedger(at) => {
            let process = &mut world.processes[*at];
            process.saved = Some(process.ledger.clone());
        }
        SystemAction::WriteUnlocked(at, inner) => {
            let Some(read) = world.processes[*at].read.take() else { return Ok(()) };
            world.database = read;
            apply_in_place(world, config, inner)?;
        }
        other => apply_fault(world, config, other)?,
    }
    Ok(())
}

/// Applies a fault, an operator's action or a passing deadline, within the bounds.
fn apply_fault(
    world: &mut SystemState,
    config: &ExplorationConfig,
    action: &SystemAction,
) -> Result<(), PropertyViolation> {
    match action {
        SystemAction::Lapse(key) => {
            if !world.is_key_gone(*key) {
                use_up_fault(&mut world.faults_left.pauses);
            }
            service::lapse(world, config, *key)?;
        }
        SystemAction::TimeOut => {
            use_up_fault(&mut world.faults_left.timeouts);
            service::time_out(world, config)?;
        }
        SystemAction::EndHoldBack(key) => service::end_hold_back(world, config, *key)?,
        SystemAction::Abandon => {
            world.faults_left.cluster_ends -= 1;
            let by = String::new();
            let outcome = service::serve(world, config, ClusterEvent::Abandon { by })?;
            if outcome.answer.is_ok() {
                Arc::make_mut(&mut world.sent).abandoned = true;
            }
        }
        SystemAction::Retire => {
            world.faults_left.retirements -= 1;
            let by = String::new();
            let _ = service::serve(world, config, ClusterEvent::Retire { by })?;
        }
        SystemAction::Unretire => {
            let by = String::new();
            let _ = service::serve(world, config, ClusterEvent::Unretire { by })?;
        }
        SystemAction::PassDeadline => {
            world.faults_left.cluster_ends -= 1;
            service::expire(world, config)?;
        }
        SystemAction::Accept => {
            world.faults_left.accepts -= 1;
            service::accept(world, config)?;
        }
        SystemAction::ClockAhead => {
            world.faults_left.clock_jumps -= 1;
            world.is_ahead = true;
        }
        SystemAction::ClockBack => world.is_ahead = false,
        SystemAction::Backup => world.backup = Some(reduce::backup(&world.database, config)),
        SystemAction::Restore(how) => {
            world.faults_left.restores -= 1;
            processes::restore(world, config, *how);
        }
        SystemAction::PutLedgerBack(at, with_position) => {
            world.faults_left.ledger_rollbacks -= 1;
            processes::put_ledger_copy_back(&mut world.processes[*at], *with_position);
        }
        SystemAction::LoseProcess(at) => {
            world.faults_left.losses -= 1;
            processes::lose(&mut world.processes[*at]);
        }
        SystemAction::ForgetProcess(at) => {
            use_up_fault(&mut world.faults_left.forgets);
            processes::forget(world, *at);
        }
        SystemAction::Crash(at) => {
            world.faults_left.crashes -= 1;
            processes::crash(world, config, *at);
        }
        SystemAction::ReadUnlocked(at) => {
            world.faults_left.overlaps -= 1;
            world.processes[*at].read = Some(Arc::clone(&world.database));
        }
        other => apply_host_fault(world, config, other)?,
    }
    Ok(())
}

/// Applies a fault of a host or of a link between hosts.
fn apply_host_fault(
    world: &mut SystemState,
    config: &ExplorationConfig,
    action: &SystemAction,
) -> Result<(), PropertyViolation> {
    match action {
        SystemAction::Cut(one, other) => {
            use_up_fault(&mut world.faults_left.links);
            world.links.cut(*one, *other);
        }
        SystemAction::Kill(at) => {
            world.faults_left.kills -= 1;
            hosts::kill(world, config, *at)?;
        }
        SystemAction::Die(at) => {
            world.faults_left.deaths -= 1;
            let host = Arc::make_mut(&mut world.hosts[*at]);
            host.alive = false;
            host.running_list = None;
        }
        SystemAction::LoseDirectory(at) => {
            world.faults_left.lost_directories -= 1;
            hosts::lose_directory(world, config, *at)?;
        }
        SystemAction::ReimageHost(at) => {
            world.faults_left.reimages -= 1;
            hosts::reimage(world, *at);
        }
        SystemAction::Clone(from, to) => {
            world.faults_left.clones -= 1;
            hosts::clone_disk(world, config, *from, *to)?;
        }
        _ => {}
    }
    Ok(())
}

/// Uses up one fault of a kind; `u8::MAX` means unlimited and stays.
fn use_up_fault(left: &mut u8) {
    if *left != u8::MAX {
        *left = left.saturating_sub(1);
    }
}

fn journal_of(world: &SystemState, at: usize) -> Option<&Journal> {
    world.hosts[at].journal.as_ref()
}

/// Lets a host's agent poll or redeem. Of all refusals, the agent receives only `KeyElsewhere`
/// here. It may receive any other one arbitrarily late, so those are left out.
fn poll_or_redeem(
    world: &mut SystemState,
    config: &ExplorationConfig,
    at: usize,
) -> Result<(), PropertyViolation> {
    let Some(journal) = journal_of(world, at).cloned() else { return Ok(()) };
    let outcome = service::poll_or_redeem(world, config, &journal)?;
    if let Err(refusal @ Refusal::KeyElsewhere { .. }) = &outcome.answer {
        hosts::see_refusal(world, config, at, refusal)?;
    }
    Ok(())
}

fn fold_hash(h: formation_explored::Hash) -> u64 {
    h.0.iter().fold(0, |sum, &byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)))
}
