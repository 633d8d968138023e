//! Application of one action to a state.

use std::sync::Arc;

use formation_explored::agent::{Journal, Start};
use formation_explored::service::{Event, Refusal};

use crate::explore::actions::Action;
use crate::explore::config::Config;
use crate::explore::host_side as hosts;
use crate::explore::identity::members_of;
use crate::explore::processes;
use crate::explore::properties::Violation;
use crate::explore::reduce;
use crate::explore::service_side as service;
use crate::explore::world::{Mode, World};

/// Returns the state after `action`; an equal one if the action changes nothing.
///
/// # Errors
/// Returns the property that no longer holds.
pub fn apply(world: &World, config: &Config, action: &Action) -> Result<World, Violation> {
    let mut next = world.clone();
    if let Action::By(at, action) = action {
        let through = World { serving: *at, ..world.clone() };
        return apply(&through, config, action).map(|next| World { serving: 0, ..next });
    }
    if reduce::are_strangers(world, config) {
        next.alone = action.host().and_then(|at| u8::try_from(at).ok());
        // None of these faults can happen any more, so how many are left makes no difference.
        let left = &mut next.left;
        (left.pauses, left.timeouts, left.ends, left.accepts) = (0, 0, 0, 0);
        (left.links, left.clocks, next.is_ahead) = (0, 0, false);
    }
    apply_to(&mut next, config, action)?;
    if action.is_fault(world) && next.together != u8::MAX {
        next.together = next.together.saturating_sub(1);
        next.left = next.left.at_most(next.together);
    }
    if reduce::is_as_good_as_out(&next, config) {
        processes::publish(&mut next, config, 0)?;
    }
    if next.is_hurried() {
        hurry(&mut next, config)?;
    }
    Ok(next)
}

/// Takes all steps of each agent towards its node at once. No fault is left that could happen
/// between them, and no other host can observe the states between.
fn hurry(world: &mut World, config: &Config) -> Result<(), Violation> {
    for at in 0..config.hosts {
        while world.hosts[at].alive {
            let host = &world.hosts[at];
            match host.mode {
                Mode::Looks | Mode::Marks | Mode::Launches => hosts::act(world, config, at)?,
                Mode::Runs if host.node.is_some() && !host.directory.log => {
                    hosts::make_log(world, config, at)?;
                }
                Mode::Runs if host.node.is_some() && !has_ran(world, at) => {
                    hosts::see_log(world, config, at)?;
                }
                _ => break,
            }
        }
    }
    Ok(())
}

fn has_ran(world: &World, at: usize) -> bool {
    journal_of(world, at).is_none_or(|journal| journal.start == Start::Ran)
}

fn apply_to(world: &mut World, config: &Config, action: &Action) -> Result<(), Violation> {
    match action {
        Action::Join(at) => {
            hosts::join(world, config, *at)?;
            if !config.liar && world.processes.iter().any(|process| process.connected) {
                speak(world, config, *at)?;
            }
        }
        Action::Speak(at) => speak(world, config, *at)?,
        Action::SpeakLate(key) => {
            let past = world.said.past.iter().find(|journal| journal.key == *key).cloned();
            let dead = || world.hosts.iter().filter_map(|host| host.journal.as_ref());
            let journal = past.or_else(|| dead().find(|journal| journal.key == *key).cloned());
            if let Some(journal) = journal {
                let _ = service::speak(world, config, &journal)?;
            }
        }
        Action::SeeEpoch(at, epoch) => hosts::see_epoch(world, config, *at, *epoch)?,
        Action::Consider(at, h) => hosts::consider(world, config, *at, *h, false)?,
        Action::LosePatience(at, h) => hosts::consider(world, config, *at, *h, true)?,
        Action::DeliverAck(key, h) => {
            let _ = service::deliver_ack(world, config, *key, *h)?;
        }
        Action::DeliverAcks(h) => {
            for key in members_of(*h) {
                let _ = service::deliver_ack(world, config, key, *h)?;
            }
        }
        Action::DeliverRelease(key) => service::deliver_release(world, config, *key)?,
        Action::SeeDocument(at, h) => hosts::see_document(world, config, *at, *h)?,
        Action::Act(at) => hosts::act(world, config, *at)?,
        Action::MakeLog(at) => hosts::make_log(world, config, *at)?,
        Action::SeeLog(at) => hosts::see_log(world, config, *at)?,
        Action::Report(at) => {
            if let Some(key) = journal_of(world, *at).map(|journal| journal.key) {
                // The production code also derives the Raft cluster id from the list.
                let raft_cluster = world.hosts[*at].node.map_or(0, fold);
                let _ = service::serve(world, config, Event::Report { key, raft_cluster })?;
            }
        }
        Action::ShowDocument(at) => {
            let held = journal_of(world, *at).and_then(|journal| journal.held.clone());
            if let Some(held) = held {
                let _ = service::serve(world, config, Event::Adopt((*held).clone()))?;
            }
        }
        Action::Publish(at) => processes::publish(world, config, *at)?,
        Action::Look(at) => processes::look(world, config, *at)?,
        Action::Sweep(at) => processes::sweep(world, config, *at)?,
        Action::SaveLedger(at) => {
            let process = &mut world.processes[*at];
            process.saved = Some(process.ledger.clone());
        }
        Action::Write(at, inner) => {
            let Some(read) = world.processes[*at].read.take() else { return Ok(()) };
            world.database = read;
            apply_to(world, config, inner)?;
        }
        other => fault(world, config, other)?,
    }
    Ok(())
}

/// Applies a fault, an operator's action or a passing deadline, within the bounds.
fn fault(world: &mut World, config: &Config, action: &Action) -> Result<(), Violation> {
    match action {
        Action::Lapse(key) => {
            if !world.is_past(*key) {
                spend(&mut world.left.pauses);
            }
            service::lapse(world, config, *key)?;
        }
        Action::TimeOut => {
            spend(&mut world.left.timeouts);
            service::time_out(world, config)?;
        }
        Action::HoldOver(key) => service::hold_over(world, config, *key)?,
        Action::Abandon => {
            world.left.ends -= 1;
            let by = String::new();
            let outcome = service::serve(world, config, Event::Abandon { by })?;
            if outcome.answer.is_ok() {
                Arc::make_mut(&mut world.said).abandoned = true;
            }
        }
        Action::Retire => {
            world.left.retirements -= 1;
            let by = String::new();
            let _ = service::serve(world, config, Event::Retire { by })?;
        }
        Action::Unretire => {
            let by = String::new();
            let _ = service::serve(world, config, Event::Unretire { by })?;
        }
        Action::Expire => {
            world.left.ends -= 1;
            service::expire(world, config)?;
        }
        Action::Accept => {
            world.left.accepts -= 1;
            service::accept(world, config)?;
        }
        Action::ClockAhead => {
            world.left.clocks -= 1;
            world.is_ahead = true;
        }
        Action::ClockBack => world.is_ahead = false,
        Action::Backup => world.backup = Some(reduce::backup(&world.database, config)),
        Action::Restore(how) => {
            world.left.restores -= 1;
            processes::restore(world, config, *how);
        }
        Action::PutLedgerBack(at, with_position) => {
            world.left.ledgers -= 1;
            processes::put_ledger_copy_back(&mut world.processes[*at], *with_position);
        }
        Action::LoseProcess(at) => {
            world.left.losses -= 1;
            processes::lose(&mut world.processes[*at]);
        }
        Action::Forget(at) => {
            spend(&mut world.left.forgets);
            processes::forget(world, *at);
        }
        Action::Crash(at) => {
            world.left.crashes -= 1;
            processes::crash(world, config, *at);
        }
        Action::Read(at) => {
            world.left.overlaps -= 1;
            world.processes[*at].read = Some(Arc::clone(&world.database));
        }
        other => of_host(world, config, other)?,
    }
    Ok(())
}

/// Applies a fault of a host or of a link between hosts.
fn of_host(world: &mut World, config: &Config, action: &Action) -> Result<(), Violation> {
    match action {
        Action::Cut(one, other) => {
            spend(&mut world.left.links);
            world.links.cut(*one, *other);
        }
        Action::Kill(at) => {
            world.left.kills -= 1;
            hosts::kill(world, config, *at)?;
        }
        Action::Die(at) => {
            world.left.deaths -= 1;
            let host = Arc::make_mut(&mut world.hosts[*at]);
            host.alive = false;
            host.node = None;
        }
        Action::LoseDirectory(at) => {
            world.left.lost_directories -= 1;
            hosts::lose_directory(world, config, *at)?;
        }
        Action::Remake(at) => {
            world.left.remakes -= 1;
            hosts::remake(world, *at);
        }
        Action::Clone(from, to) => {
            world.left.clones -= 1;
            hosts::clone_disk(world, config, *from, *to)?;
        }
        _ => {}
    }
    Ok(())
}

/// Uses up one fault of a kind; `u8::MAX` means unlimited and stays.
fn spend(left: &mut u8) {
    if *left != u8::MAX {
        *left = left.saturating_sub(1);
    }
}

fn journal_of(world: &World, at: usize) -> Option<&Journal> {
    world.hosts[at].journal.as_ref()
}

/// Lets a host's agent poll or redeem. Of all refusals, the agent receives only `KeyElsewhere`
/// here. It may receive any other one arbitrarily late, so those are left out.
fn speak(world: &mut World, config: &Config, at: usize) -> Result<(), Violation> {
    let Some(journal) = journal_of(world, at).cloned() else { return Ok(()) };
    let outcome = service::speak(world, config, &journal)?;
    if let Err(refusal @ Refusal::KeyElsewhere { .. }) = &outcome.answer {
        hosts::see_refusal(world, config, at, refusal)?;
    }
    Ok(())
}

fn fold(h: formation_explored::Hash) -> u64 {
    h.0.iter().fold(0, |sum, &byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)))
}
