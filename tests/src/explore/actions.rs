//! Actions: everything that can happen next in a state.

use std::fmt;
use std::sync::Arc;

use formation_explored::agent::{Decision, Start, at_start};
use formation_explored::memory::Entry;
use formation_explored::service::{Phase, Seating};
use formation_explored::{Epoch, Hash, KeyId};

use crate::explore::config::Config;
use crate::explore::database::{Database, PROCESSES};
use crate::explore::host_side::directory_of;
use crate::explore::identity::{list, list_of, machine, members_of, name};
use crate::explore::idle;
use crate::explore::processes::{
    Setback, have_swept_since_backup, is_up_to_date, may_be_forgotten,
};
use crate::explore::reduce;
use crate::explore::world::{Mode, World};

/// One atomic step of a host, a process or the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// A host's agent starts, makes its key and record, and redeems its token.
    Join(usize),
    /// An agent polls, or redeems if the database doesn't know it.
    Speak(usize),
    /// A late message arrives from an agent that no longer exists.
    SpeakLate(KeyId),
    /// An agent learns that the service is at this epoch.
    SeeEpoch(usize, Epoch),
    /// An agent looks at a list: it probes, and then signs, refuses, or sends its row of the
    /// matrix.
    Consider(usize, Hash),
    /// As `Consider`, but the agent has waited long enough to report which releases are missing.
    LosePatience(usize, Hash),
    /// An ack arrives at the service.
    DeliverAck(KeyId, Hash),
    /// The acks of all members arrive at the service, in one step.
    DeliverAcks(Hash),
    /// A release arrives at the service.
    DeliverRelease(KeyId),
    /// An agent gets a document.
    SeeDocument(usize, Hash),
    /// An agent takes its next step towards starting its node.
    Act(usize),
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
    Look(usize),
    /// A process looks at its database and counts a sweep.
    Sweep(usize),
    /// The process with this index serves the action, instead of the first one.
    By(usize, Box<Action>),
    /// A lease lapses, possibly without any transaction that notices it.
    Lapse(KeyId),
    /// The frozen list times out.
    TimeOut,
    /// An agent's hold-back ends.
    HoldOver(KeyId),
    /// An operator abandons the cluster.
    Abandon,
    /// The cluster's deadline passes.
    Expire,
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
    Restore(Setback),
    /// A process's ledger is copied.
    SaveLedger(usize),
    /// The copy replaces the ledger while its process is down. If true, the position beside the
    /// ledger is replaced as well.
    PutLedgerBack(usize, bool),
    /// A process is lost for good, with its ledger.
    LoseProcess(usize),
    /// An owner declares that a process won't come back.
    Forget(usize),
    /// An agent is killed and starts again.
    Kill(usize),
    /// A host dies for good.
    Die(usize),
    /// A node's directory is lost, and its host starts again.
    LoseDirectory(usize),
    /// A host is re-imaged: nothing on it survives.
    Remake(usize),
    /// A host's disk is copied to another machine, which then starts.
    Clone(usize, usize),
    /// A process crashes, and may lose what it had not synced.
    Crash(usize),
    /// Without row lock: a process reads the row.
    Read(usize),
    /// Without row lock: a process writes the result of this action on the row it has read.
    Write(usize, Box<Action>),
}

impl Action {
    /// Returns the host that takes the action or that it happens to.
    #[must_use]
    pub fn host(&self) -> Option<usize> {
        match self {
            Action::Join(at)
            | Action::Speak(at)
            | Action::SeeEpoch(at, _)
            | Action::Consider(at, _)
            | Action::LosePatience(at, _)
            | Action::SeeDocument(at, _)
            | Action::Act(at)
            | Action::MakeLog(at)
            | Action::SeeLog(at)
            | Action::Report(at)
            | Action::ShowDocument(at)
            | Action::Kill(at)
            | Action::Die(at)
            | Action::LoseDirectory(at)
            | Action::Remake(at)
            | Action::Clone(at, _) => Some(*at),
            Action::By(_, action) => action.host(),
            _ => None,
        }
    }

    /// Returns whether a process serves the action.
    #[must_use]
    pub fn asks_the_service(&self) -> bool {
        matches!(
            self,
            Action::Join(_)
                | Action::Speak(_)
                | Action::SpeakLate(_)
                | Action::Consider(..)
                | Action::LosePatience(..)
                | Action::DeliverAck(..)
                | Action::DeliverAcks(_)
                | Action::DeliverRelease(_)
                | Action::Report(_)
                | Action::ShowDocument(_)
                | Action::Lapse(_)
                | Action::TimeOut
                | Action::HoldOver(_)
                | Action::Abandon
                | Action::Expire
                | Action::Retire
                | Action::Unretire
                | Action::Accept
        )
    }

    /// Returns whether the action is a fault, which the bounds limit. A lapsed lease isn't a fault
    /// if its host no longer exists.
    #[must_use]
    pub fn is_fault(&self, world: &World) -> bool {
        match self {
            Action::Lapse(key) => !world.is_past(*key),
            Action::By(_, action) => action.is_fault(world),
            Action::TimeOut
            | Action::Abandon
            | Action::Expire
            | Action::Retire
            | Action::Accept
            | Action::Restore(_)
            | Action::PutLedgerBack(..)
            | Action::LoseProcess(_)
            | Action::Forget(_)
            | Action::Kill(_)
            | Action::Die(_)
            | Action::LoseDirectory(_)
            | Action::Remake(_)
            | Action::Clone(..)
            | Action::Crash(_)
            | Action::Cut(..)
            | Action::ClockAhead
            | Action::Read(_) => true,
            _ => false,
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = |host: &usize| char::from(b'A' + u8::try_from(*host).unwrap_or(25));
        match self {
            Action::Join(at) => write!(f, "{} starts, makes its key and redeems", host(at)),
            Action::Speak(at) => write!(f, "{} polls", host(at)),
            Action::SpeakLate(key) => write!(f, "a late message of {} arrives", name(*key)),
            Action::SeeEpoch(at, epoch) => write!(f, "{} sees epoch {epoch}", host(at)),
            Action::Consider(at, h) => write!(f, "{} looks at {}", host(at), list(*h)),
            Action::LosePatience(at, h) => {
                write!(f, "{} has waited for the releases that {} needs", host(at), list(*h))
            }
            Action::DeliverAck(key, h) => write!(f, "{}'s ack of {} arrives", name(*key), list(*h)),
            Action::DeliverAcks(h) => write!(f, "the acks of {} arrive", list(*h)),
            Action::DeliverRelease(key) => write!(f, "{}'s release arrives", name(*key)),
            Action::SeeDocument(at, h) => write!(f, "{} gets the document {}", host(at), list(*h)),
            Action::Act(at) => write!(f, "{} goes on towards its node", host(at)),
            Action::MakeLog(at) => write!(f, "{}'s node makes its log", host(at)),
            Action::SeeLog(at) => write!(f, "{} sees its node's log", host(at)),
            Action::Report(at) => write!(f, "{} reports its Raft cluster", host(at)),
            Action::ShowDocument(at) => write!(f, "{} shows its document", host(at)),
            Action::Publish(at) => write!(f, "process {at} lets the document out"),
            Action::Look(at) => write!(f, "process {at} looks at its database"),
            Action::Sweep(at) => write!(f, "process {at} sweeps"),
            Action::By(at, action) => write!(f, "through process {at}: {action}"),
            Action::Lapse(key) => write!(f, "{}'s lease lapses", name(*key)),
            Action::TimeOut => write!(f, "the frozen list times out"),
            Action::HoldOver(key) => write!(f, "{} is not held back any more", name(*key)),
            Action::Abandon => write!(f, "an operator abandons the cluster"),
            Action::Expire => write!(f, "the deadline passes"),
            Action::Retire => write!(f, "an owner retires the cluster"),
            Action::Unretire => write!(f, "an owner takes the retirement back"),
            Action::Accept => write!(f, "an owner accepts the database"),
            Action::Cut(one, other) => {
                write!(f, "the link between {} and {} goes down", host(one), host(other))
            }
            Action::ClockAhead => write!(f, "the service's clock jumps half an hour ahead"),
            Action::ClockBack => write!(f, "the service's clock is set right"),
            Action::Backup => write!(f, "a backup is taken"),
            Action::Restore(Setback::Dump) => write!(f, "the backup is loaded into a new database"),
            Action::Restore(Setback::InPlace) => {
                write!(f, "the rows are set back to the backup, under the processes")
            }
            Action::SaveLedger(at) => write!(f, "process {at}'s ledger is copied"),
            Action::PutLedgerBack(at, true) => {
                write!(f, "process {at}'s ledger is put back to the copy")
            }
            Action::PutLedgerBack(at, false) => {
                write!(
                    f,
                    "process {at}'s ledger is put back to the copy, the position beside it isn't"
                )
            }
            Action::LoseProcess(at) => write!(f, "process {at} is lost for good, with its ledger"),
            Action::Forget(at) => write!(f, "an owner says that process {at} won't come back"),
            Action::Kill(at) => write!(f, "{}'s agent is killed and starts again", host(at)),
            Action::Die(at) => write!(f, "{} dies for good", host(at)),
            Action::LoseDirectory(at) => {
                write!(f, "{}'s node directory is lost; the host restarts", host(at))
            }
            Action::Remake(at) => write!(f, "{} is made anew: nothing on it survives", host(at)),
            Action::Clone(from, to) => {
                write!(f, "{}'s disk is copied to {}, which starts", host(from), host(to))
            }
            Action::Crash(at) => write!(f, "process {at} crashes"),
            Action::Read(at) => write!(f, "process {at} reads the row, without a lock"),
            Action::Write(at, action) => write!(f, "process {at} writes what it made of: {action}"),
        }
    }
}

/// Returns every action that may happen next; some of them change nothing.
#[must_use]
pub fn enumerate(world: &World, config: &Config) -> Vec<Action> {
    let mut actions = Vec::with_capacity(32);
    if reduce::is_the_end(world, config) || reduce::has_one_majority_at_most(world, config) {
        return actions;
    }
    if reduce::waits_for_a_process(world, config) {
        of_database(world, config, &mut actions);
        return actions;
    }
    if let Some(alone) = world.alone {
        let host = usize::from(alone);
        if world.hosts[host].alive {
            of_host(world, config, host, &mut actions);
        }
        return actions;
    }
    for host in 0..config.hosts {
        // Hosts that haven't joined are interchangeable if they are equal and linked in the same
        // way. Only the first of them acts.
        let like = |other: usize| {
            world.hosts[other] == world.hosts[host]
                && world.hosts[host].journal.is_none()
                && world.links.are_same_with_swapped(host, other)
        };
        if world.hosts[host].alive && !(0..host).any(like) {
            of_host(world, config, host, &mut actions);
        }
    }
    if config.liar {
        return actions;
    }
    of_links(world, config, &mut actions);
    of_service(world, config, &mut actions);
    if reduce::may_serve_differently(world, config) && !world.processes[1].is_gone {
        let asks = |action: &&Action| action.asks_the_service();
        let by_other = |action: &Action| Action::By(1, Box::new(action.clone()));
        let others: Vec<Action> = actions.iter().filter(asks).map(by_other).collect();
        actions.extend(others);
    }
    of_database(world, config, &mut actions);
    if !config.environment.row_lock {
        of_unlocked(world, config, &mut actions);
    }
    actions
}

fn of_host(world: &World, config: &Config, at: usize, actions: &mut Vec<Action>) {
    let host = &world.hosts[at];
    let left = &world.left;
    let untouched = reduce::is_untouched(host, config);
    if left.deaths > 0 && !untouched {
        actions.push(Action::Die(at));
    }
    if left.remakes > 0
        && !untouched
        && usize::from(host.life) + 1 < crate::explore::identity::LIVES
    {
        actions.push(Action::Remake(at));
    }
    let Some(journal) = &host.journal else {
        if host.mode == Mode::Runs && !is_over(world, config) {
            let decision = at_start(&config.rules, None, &machine(at), &directory_of(config, host));
            if decision == Decision::BeginNew {
                actions.push(Action::Join(at));
            }
        }
        return;
    };
    if left.kills > 0 && !matches!(host.mode, Mode::Stopped(_)) {
        actions.push(Action::Kill(at));
    }
    if left.lost_directories > 0 {
        actions.push(Action::LoseDirectory(at));
    }
    if left.clones > 0 {
        let fresh =
            |&to: &usize| to != at && world.hosts[to].alive && world.hosts[to].journal.is_none();
        actions.extend((0..config.hosts).filter(fresh).map(|to| Action::Clone(at, to)));
    }
    match host.mode {
        Mode::Looks | Mode::Marks | Mode::Launches => actions.push(Action::Act(at)),
        Mode::Runs => {}
        Mode::WantsReplacement | Mode::Refuses | Mode::Stopped(_) => return,
    }
    if host.node.is_some() {
        if !host.directory.log {
            actions.push(Action::MakeLog(at));
        } else if journal.start != Start::Ran && host.mode == Mode::Runs {
            actions.push(Action::SeeLog(at));
        } else if config.reports {
            actions.push(Action::Report(at));
        }
    }
    // An agent sees epochs whatever its mode is.
    let latest = if config.liar { config.epochs + 1 } else { world.said.epoch };
    if !idle::releases_nothing(config, journal) {
        actions.extend((journal.released + 2..=latest).map(|epoch| Action::SeeEpoch(at, epoch)));
    }
    if journal.start == Start::NotYet && host.mode == Mode::Runs {
        forming(world, config, at, actions);
    }
    let held = journal.held.as_ref().filter(|held| !idle::is_decided(world, held.h));
    if held.is_some() && !config.liar && world.alone.is_none() {
        actions.push(Action::ShowDocument(at));
    }
}

fn forming(world: &World, config: &Config, at: usize, actions: &mut Vec<Action>) {
    let host = &world.hosts[at];
    let Some(journal) = &host.journal else { return };
    if config.liar {
        let lists = every_list(world, config);
        let mine = |h: &&Hash| members_of(**h).any(|key| key == journal.key);
        for &h in lists.iter().filter(mine) {
            actions.push(Action::Consider(at, h));
            let acked = |key| world.said.acks.contains(&(key, h));
            if members_of(h).all(acked) {
                actions.push(Action::SeeDocument(at, h));
            }
        }
        return;
    }
    let over = is_over(world, config);
    if !over && !idle::says_nothing_new(world, config, at, journal) {
        actions.push(Action::Speak(at));
    }
    for &h in &world.said.proposals {
        if over {
            break;
        }
        if members_of(h).any(|key| key == journal.key)
            && !idle::looks_in_vain(world, config, journal, h)
        {
            actions.push(Action::Consider(at, h));
            if idle::misses_releases(world, config, journal, h) {
                actions.push(Action::LosePatience(at, h));
            }
        }
    }
    for &h in &world.said.documents {
        if members_of(h).any(|key| key == journal.key) {
            actions.push(Action::SeeDocument(at, h));
        }
    }
}

/// Adds the loss of links between hosts that have joined. No host probes any other one (`reduce`).
fn of_links(world: &World, config: &Config, actions: &mut Vec<Action>) {
    if world.left.links == 0 || is_over(world, config) {
        return;
    }
    let may_fail = |&at: &usize| !reduce::is_untouched(&world.hosts[at], config);
    for one in (0..config.hosts).filter(may_fail) {
        let others = (one + 1..config.hosts).filter(may_fail);
        let up = others.filter(|&other| world.links.joins(one, other));
        actions.extend(up.map(|other| Action::Cut(one, other)));
    }
}

/// Returns whether the service has finished for good: it takes no ack any more, and no restore can
/// change that. No property depends on a host that joins, polls or signs after this.
fn is_over(world: &World, config: &Config) -> bool {
    let forming = matches!(world.database.cluster.phase, Phase::Open | Phase::Preparing);
    let may_return = world.left.restores > 0
        || world.left.retirements > 0
        || world.database.cluster.phase == Phase::Retired
        || !reduce::are_ledgers_content(world, config)
        || world.processes.iter().any(|process| process.read.is_some())
        || !config.rules.on(formation_explored::Rule::AbandonBeforeCommit);
    !config.liar && !forming && !may_return
}

/// Returns every list that a lying service can show: all sets of joined hosts, ordered by letter,
/// at every epoch.
fn every_list(world: &World, config: &Config) -> Vec<Hash> {
    if !config.lies.is_empty() {
        let lie = |(epoch, hosts): &(Epoch, Vec<usize>)| {
            let keys: Vec<KeyId> = hosts.iter().map(|&at| world.key(at)).collect();
            list_of(*epoch, &keys)
        };
        return config.lies.iter().map(lie).collect();
    }
    let joined: Vec<KeyId> = world
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
        let keys: Vec<KeyId> = members.map(|place| joined[place]).collect();
        lists.extend((1..=config.epochs).map(|epoch| list_of(epoch, &keys)));
    }
    lists
}

fn of_service(world: &World, config: &Config, actions: &mut Vec<Action>) {
    let cluster = &world.database.cluster;
    if is_over(world, config) {
        return;
    }
    if world.is_ahead {
        actions.push(Action::ClockBack);
    }
    if config.late {
        let past = world.said.past.iter().map(|journal| journal.key);
        let dead = world.hosts.iter().filter(|host| !host.alive);
        let dead = dead.filter_map(|host| host.journal.as_ref().map(|journal| journal.key));
        let unplaced = |key: &KeyId| {
            cluster.agents.get(key).is_none_or(|agent| agent.seating == Seating::Absent)
        };
        actions.extend(past.chain(dead).filter(unplaced).map(Action::SpeakLate));
    }
    of_acks(world, config, actions);
    for (&key, &epoch) in &world.said.releases {
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
            actions.push(Action::DeliverRelease(key));
        }
    }
    let forming = matches!(cluster.phase, Phase::Open | Phase::Preparing);
    if forming {
        for (&key, agent) in &cluster.agents {
            let may_lapse = world.left.pauses > 0 || world.is_past(key);
            if agent.seating != Seating::Absent && agent.lease_until > world.now() && may_lapse {
                actions.push(Action::Lapse(key));
            }
            if agent.held_until > world.now() {
                actions.push(Action::HoldOver(key));
            }
        }
        if world.left.clocks > 0 && !world.is_ahead {
            actions.push(Action::ClockAhead);
        }
        if cluster.phase == Phase::Preparing && world.left.timeouts > 0 {
            actions.push(Action::TimeOut);
        }
        if world.left.ends > 0 {
            actions.extend([Action::Abandon, Action::Expire]);
        }
        if !world.database.settled && world.left.accepts > 0 {
            actions.push(Action::Accept);
        }
    } else if !config.rules.on(formation_explored::Rule::AbandonBeforeCommit) && world.left.ends > 0
    {
        actions.push(Action::Abandon);
    }
    match cluster.phase {
        Phase::Committed | Phase::Formed if world.left.retirements > 0 => {
            actions.push(Action::Retire);
        }
        Phase::Retired => actions.push(Action::Unretire),
        _ => {}
    }
}

/// Adds the arrival of acks for the frozen list.
fn of_acks(world: &World, config: &Config, actions: &mut Vec<Action>) {
    let cluster = &world.database.cluster;
    let Some(frozen) = cluster.frozen.as_ref().filter(|_| cluster.phase == Phase::Preparing) else {
        return;
    };
    let h = frozen.h;
    let is_signed = |key: &KeyId| world.said.acks.contains(&(*key, h));
    if reduce::do_acks_arrive_together(world, config) {
        if members_of(h).all(|key| is_signed(&key)) {
            actions.push(Action::DeliverAcks(h));
        }
        return;
    }
    let waits = |key: &KeyId| is_signed(key) && !frozen.acks.contains_key(key);
    actions.extend(members_of(h).filter(waits).map(|key| Action::DeliverAck(key, h)));
}

fn of_database(world: &World, config: &Config, actions: &mut Vec<Action>) {
    let cluster = &world.database.cluster;
    let decided = matches!(cluster.phase, Phase::Committed | Phase::Formed);
    for at in 0..PROCESSES {
        let process = &world.processes[at];
        // If both processes are in the same state, acting for the first one is enough.
        if at > 0 && reduce::are_processes_alike(world) {
            continue;
        }
        if world.left.forgets > 0 && may_be_forgotten(world, config, at) {
            actions.push(Action::Forget(at));
        }
        if process.is_gone {
            continue;
        }
        if !process.connected {
            actions.push(Action::Look(at));
            continue;
        }
        let whole = |h: Hash| Some(Entry::Commit { h, document: true });
        let inside = |h: &Hash| process.ledger.entry == whole(*h) || !config.environment.ledger;
        // Once no ledger will be read again, its contents don't matter.
        let asked = !config.reduced || !reduce::is_database_final(world, config);
        if asked {
            of_process(world, config, at, actions);
        }
        let out = |h: &Hash| world.said.documents.contains(h) && (inside(h) || !asked);
        let decided_h = cluster.frozen.as_ref().map(|frozen| frozen.h);
        if decided && decided_h.is_some_and(|h| !out(&h)) {
            actions.push(Action::Publish(at));
        }
        if world.left.crashes > 0 {
            actions.push(Action::Crash(at));
        }
    }
    let phase = match cluster.phase {
        Phase::Open => Some(0),
        Phase::Preparing => Some(1),
        Phase::Committed => Some(2),
        _ => None,
    };
    if world.left.restores > 0 {
        if world.backup.is_none() {
            if phase.is_some_and(|phase: usize| config.backup_in[phase]) {
                actions.push(Action::Backup);
            }
        } else {
            // A ledger that was replaced must have been compared since: see `processes`.
            let compared =
                world.processes.iter().all(|process| process.connected || process.is_gone);
            let may = |setback: &&Setback| match setback {
                Setback::Dump => compared,
                Setback::InPlace => {
                    let old = !config.environment.old_backups || have_swept_since_backup(world);
                    compared && old
                }
            };
            actions.extend(config.setbacks.iter().filter(may).map(|&how| Action::Restore(how)));
        }
    }
}

/// Adds what a connected process does by itself, and the faults of its ledger.
fn of_process(world: &World, config: &Config, at: usize, actions: &mut Vec<Action>) {
    let process = &world.processes[at];
    if !config.environment.ledger {
        return;
    }
    if !is_up_to_date(world, config, at) {
        actions.push(Action::Look(at));
    }
    let beat = |backup: &Arc<Database>| world.database.rows[at].beat == backup.rows[at].beat;
    let counts = config.setbacks.contains(&Setback::InPlace) && world.left.restores > 0;
    if counts && world.backup.as_ref().is_some_and(beat) {
        actions.push(Action::Sweep(at));
    }
    // Processes are interchangeable, so the lost one is never the first. Decisions that the first
    // one has not copied would be lost, and no rule could bring them back.
    if world.left.losses > 0 && at > 0 && is_up_to_date(world, config, 0) {
        actions.push(Action::LoseProcess(at));
    }
    if world.left.ledgers == 0 {
        return;
    }
    match &process.saved {
        None if world.processes.iter().all(|process| process.saved.is_none()) => {
            actions.push(Action::SaveLedger(at));
        }
        Some(saved) if saved.entry != process.ledger.entry && is_up_to_date(world, config, at) => {
            actions.extend([true, false].map(|whole| Action::PutLedgerBack(at, whole)));
        }
        _ => {}
    }
}

/// Adds transactions without row lock: each may have read the row long before it writes.
fn of_unlocked(world: &World, config: &Config, actions: &mut Vec<Action>) {
    for at in 0..PROCESSES {
        match &world.processes[at].read {
            None => {
                if world.left.overlaps > 0 {
                    actions.push(Action::Read(at));
                }
            }
            Some(read) => {
                let mut then = world.clone();
                then.database = Arc::clone(read);
                let mut inner = Vec::new();
                of_service(&then, config, &mut inner);
                for host in 0..config.hosts {
                    let speaks = world.hosts[host].alive && world.hosts[host].journal.is_some();
                    inner.extend(speaks.then_some(Action::Speak(host)));
                }
                actions.extend(inner.into_iter().map(|action| Action::Write(at, Box::new(action))));
            }
        }
    }
}
