//! Reductions: which states and steps the exploration merges, and why it loses nothing by that.
//!
//! Each function here says what it leaves out, and why that is sound. Two states may be merged if
//! each step from one has an equivalent step from the other, and every property judges both alike.
//!
//! All reductions depend on [`ExplorationConfig::reduced`]. `tests/explore_reduction.rs` explores
//! small configurations, and every regression with its rule switched off, once with reductions and
//! once without. If an argument relies on a rule or on a guarantee of the environment, the function
//! checks that this rule or guarantee is on. If the service lies, hardly anything is left out,
//! because any list may then be shown at any time.

use std::sync::Arc;

use formation_explored::agent::{DirectoryKind, Journal, SignedList};
use formation_explored::memory::{LedgerEntry, compare};
use formation_explored::service::{
    Cluster, ClusterEvent, EndCause, FormationSettings, Phase, Seating, StepContext, step,
};
use formation_explored::{AgentKey, Epoch, Hash, Rule, quorum};

use crate::explore::config::ExplorationConfig;
use crate::explore::database::{DatabaseState, PROCESSES};
use crate::explore::host_steps::directory_of;
use crate::explore::identities::{epoch_of, hash_of, incarnation, members_of};
use crate::explore::processes::RestoreMethod;
use crate::explore::state::{AgentMode, HostState, NOW, SystemState, normalise};

/// Clears the fields of the cluster's row that no later step reads.
///
/// - Values of `floor` and `highest_epoch` below the row's `epoch` make no difference. A list is
///   frozen at `epoch` or above, and `epoch` never falls.
/// - A stored release has already raised these two fields, and nothing else reads it. Agents learn
///   of releases from `SentMessages`.
/// - From the commit or the end on, only the row's list and its seated members are read. Numbers of
///   failed lists, standbys and acks are never read again.
/// - Only a list's time-out reads which hosts have reached each other, also in the fault-free run
///   (property 7).
pub(super) fn clear_unread_fields(cluster: &mut Cluster, config: &ExplorationConfig) {
    let forming = matches!(cluster.phase, Phase::Open | Phase::Preparing);
    let epoch = cluster.epoch;
    if cluster.floor < epoch {
        cluster.floor = 0;
    }
    let listed: Vec<AgentKey> = match &mut cluster.frozen {
        Some(frozen) if !forming => {
            frozen.acks.clear();
            members_of(frozen.proposal_hash).collect()
        }
        Some(frozen) if config.faults.timeouts == 0 && config.fault_free_interval == 0 => {
            frozen.probes.clear();
            Vec::new()
        }
        _ => Vec::new(),
    };
    for (key, agent) in &mut cluster.agents {
        agent.release = None;
        if agent.highest_epoch < epoch || !forming {
            agent.highest_epoch = 0;
        }
        if !forming {
            agent.failed_lists = 0;
            if !listed.contains(key) {
                agent.seating = Seating::Absent;
            }
        }
    }
}

/// Returns a backup in the form that a restore will give it.
///
/// After a restore, the first step of any process tells the row that its database has changed. This
/// step discards a frozen list. So acks and probes for that list make no difference between two
/// backups.
///
/// This needs `Environment::has_database_identity`: without a database's identity nobody may notice
/// the restore. Without reduction, with restores in place, or with faults of the clock, the
/// function returns the backup unchanged. In the last case the result would depend on whether the
/// clock is still ahead at the restore.
#[must_use]
pub(super) fn backup(
    database: &Arc<DatabaseState>,
    config: &ExplorationConfig,
) -> Arc<DatabaseState> {
    let is_noticed = config.environment.ledger
        && config.environment.has_database_identity
        && !config.restore_methods.contains(&RestoreMethod::InPlace);
    if !config.reduced || !is_noticed || config.faults.clock_jumps > 0 {
        return Arc::clone(database);
    }
    let mut cluster = database.cluster.clone();
    let settings = FormationSettings::DEFAULT;
    let context = StepContext {
        rules: &config.rules,
        settings: &settings,
        is_clock_steady: true,
        hash: &hash_of,
    };
    let _ = step(&mut cluster, &context, NOW, ClusterEvent::DatabaseChanged);
    normalise(&mut cluster, config);
    Arc::new(DatabaseState { cluster, ..(**database).clone() })
}

/// Returns whether processes keep nothing between two transactions, because they have no ledgers.
/// All processes are then alike, and a new connection is like an old one. So a restore leaves the
/// processes connected.
#[must_use]
pub(super) fn are_processes_stateless(config: &ExplorationConfig) -> bool {
    config.reduced && !config.environment.ledger && config.environment.row_lock
}

/// Returns whether the acks of a list of members arrive in one step, once all its members have
/// signed.
///
/// Before the last ack arrives, only the list's time-out reads the earlier acks: it counts the
/// members that have not answered. So an earlier arrival makes no difference if no time-out is
/// left. The fault-free run (property 7) delivers every signed ack before it waits for anything.
///
/// Two guarantees are needed:
/// - Leases are judged before the ack (`Rule::LapseFirst`). Otherwise the first ack of the step
///   would make expired leases lapse. So the case would be lost in which the last ack commits
///   the list although leases have expired.
/// - Transactions lock the row. Without the lock, each ack may be applied separately to a row that
///   was read long ago.
#[must_use]
pub(super) fn do_acks_arrive_together(system: &SystemState, config: &ExplorationConfig) -> bool {
    config.reduced
        && !config.service_lies
        && config.environment.row_lock
        && config.rules.is_on(Rule::LapseFirst)
        && system.faults_left.timeouts == 0
}

/// Returns whether no process is connected, as after a restore. Until a process connects, only
/// actions of the database and its processes are explored. Steps of hosts don't read or write the
/// database, and no process serves their messages. So it is enough to explore the steps of hosts
/// before the restore.
#[must_use]
pub(super) fn is_no_process_connected(system: &SystemState, config: &ExplorationConfig) -> bool {
    config.reduced
        && !config.service_lies
        && !system.processes.iter().any(|process| process.connected)
}

/// Returns whether no other host can know of `host`, because it has no key and no data yet.
///
/// For such a host two kinds of fault are left out:
/// - Its death and its re-imaging. To all others, a host that never joins is the same as a dead
///   one. A host that joins later is the same as a re-imaged one.
/// - The loss of its links. Links carry only probes, and nobody probes a host before it has joined.
///   Its links may go down as soon as it has joined.
///
/// The fault-free run (property 7) does need hosts that could still join, so it is repeated without
/// one of them.
#[must_use]
pub(super) fn is_unknown_to_others(host: &HostState, config: &ExplorationConfig) -> bool {
    let blank = || directory_of(config, host) == DirectoryKind::Blank;
    config.reduced && host.journal.is_none() && host.mode == AgentMode::Running && blank()
}

/// Returns whether the database's present state is final: no restore is left, the ledgers are
/// consistent with the database, and no transaction is under way.
#[must_use]
pub(super) fn is_database_final(system: &SystemState, config: &ExplorationConfig) -> bool {
    system.faults_left.restores == 0
        && system.faults_left.overlaps == 0
        && system.faults_left.crashes == 0
        && are_ledgers_consistent(system, config)
        && system.processes.iter().all(|process| process.read.is_none())
}

/// Returns whether all processes are connected and no ledger can object to a decision of the
/// database. If a database or ledger was set back, two more conditions must hold: the database is
/// settled, and no process finds a difference.
#[must_use]
pub(super) fn are_ledgers_consistent(system: &SystemState, config: &ExplorationConfig) -> bool {
    let database = &system.database;
    if !config.environment.ledger || !has_been_set_back(system, config) {
        return system.processes.iter().all(|process| process.connected);
    }
    let is_content = |at: usize| {
        let process = &system.processes[at];
        let summary = process.ledger.summary(&config.environment);
        let agrees = match process.ledger.entry {
            None => true,
            Some(LedgerEntry::Commit { h, .. }) => database.decided_list() == Some(h),
            Some(LedgerEntry::End(EndCause::Deadline)) => true,
            Some(LedgerEntry::End(_)) => database.cluster.phase.has_ended(),
        };
        let same = compare(&summary, &database.observe(at, &summary, &config.environment));
        process.connected && agrees && same.is_ok()
    };
    database.settled && !database.cluster.is_unsettled && (0..PROCESSES).all(is_content)
}

/// Returns whether a database or a ledger was replaced by an older copy.
fn has_been_set_back(system: &SystemState, config: &ExplorationConfig) -> bool {
    let (left, all) = (&system.faults_left, &config.faults.at_most(config.max_total_faults));
    left.restores < all.restores || left.ledger_rollbacks < all.ledger_rollbacks
}

/// Returns whether it matters which process serves a request. It matters only if a database or a
/// ledger was replaced by an older copy, and the ledgers aren't consistent again yet. Before that,
/// all processes read the same row, and none decides what another has decided. Sending a commit
/// document and copying decisions are separate steps of each process.
#[must_use]
pub(super) fn is_serving_process_relevant(
    system: &SystemState,
    config: &ExplorationConfig,
) -> bool {
    let can_be_set_back = config.faults.restores > 0 || config.faults.ledger_rollbacks > 0;
    let matters = !config.reduced
        || (has_been_set_back(system, config) && !are_ledgers_consistent(system, config));
    config.environment.ledger && can_be_set_back && matters && !are_processes_alike(system)
}

/// Returns whether both processes are in the same state. Their rows must be equal as well, in the
/// database and in the backup.
#[must_use]
pub(super) fn are_processes_alike(system: &SystemState) -> bool {
    let rows = |database: &Arc<DatabaseState>| database.rows[0] == database.rows[1];
    system.processes[0] == system.processes[1]
        && rows(&system.database)
        && system.backup.as_ref().is_none_or(rows)
}

/// Returns whether the decided list's commit document may be treated as sent.
///
/// The database is final, so the document can be sent at any time from now on. Sending it undoes
/// nothing, and agents may receive it as late as they like. Without ledgers the same holds even if
/// the database is not final, because no process remembers what it has sent.
#[must_use]
pub(super) fn may_publish_at_once(system: &SystemState, config: &ExplorationConfig) -> bool {
    let cluster = &system.database.cluster;
    config.reduced
        && !config.service_lies
        && matches!(cluster.phase, Phase::Committed | Phase::Formed)
        && cluster.split.is_none()
        && (is_database_final(system, config) || are_processes_stateless(config))
        && cluster
            .frozen
            .as_ref()
            .is_some_and(|frozen| !system.sent.documents.contains(&frozen.proposal_hash))
}

/// Returns whether hosts can no longer affect each other or the service.
///
/// One commit document was sent, no other one exists, and nobody holds or runs another list.
/// Nothing that a host does can reach the database or another host. All properties of a step then
/// concern one host's own past. So each host is followed alone, with all faults that are left.
///
/// States in which two hosts have both taken further steps are left out. Only the fault-free run
/// (property 7) involves two hosts at once. It is played from the state in which the other hosts
/// have taken no further step.
#[must_use]
pub(super) fn are_hosts_independent(system: &SystemState, config: &ExplorationConfig) -> bool {
    let cluster = &system.database.cluster;
    let Some(frozen) = &cluster.frozen else { return false };
    let only = |h: &Hash| *h == frozen.proposal_hash;
    let host_agrees = |host: &Arc<HostState>| {
        let held = host.journal.as_ref().and_then(|journal| journal.held_document.as_ref());
        held.is_none_or(|held| only(&held.proposal_hash))
            && host.running_list.as_ref().is_none_or(only)
    };
    config.reduced
        && !config.service_lies
        && !config.reports
        && config.faults.clones == 0
        && config.environment.journal_sync
        && config.rules.is_on(Rule::AbandonBeforeCommit)
        && cluster.phase == Phase::Committed
        && cluster.split.is_none()
        && is_database_final(system, config)
        && system.sent.documents.len() == 1
        && system.sent.documents.contains(&frozen.proposal_hash)
        && system.sent.committed.contains(&frozen.proposal_hash)
        && system.sent.started.values().all(only)
        && system.hosts.iter().all(host_agrees)
}

/// Returns whether the cluster has ended for good. That is so if no commit document was ever sent
/// and nobody holds one: then nobody will start a node or sign.
#[must_use]
pub(super) fn is_terminal(system: &SystemState, config: &ExplorationConfig) -> bool {
    let holds = |host: &Arc<HostState>| {
        host.running_list.is_some()
            || host.journal.as_ref().is_some_and(|journal| journal.held_document.is_some())
    };
    config.reduced
        && !config.service_lies
        && system.database.cluster.phase.has_ended()
        && system.faults_left.reopenings == 0
        && is_database_final(system, config)
        && system.sent.documents.is_empty()
        && !system.hosts.iter().any(holds)
}

/// Returns whether at most one list of members can still get a majority, in an exploration that
/// checks only property 3.
///
/// No restore is left, so the present database decides at most one list from now on. No list that
/// an earlier database decided may still be able to reach a majority.
///
/// A list's possible supporters are the members that have started with the list, or can still do
/// so. A member can still start if it holds the list's commit document, or if it signed the list
/// and has not released it. The set of supporters never grows: journals lose nothing, and members
/// that die or are re-imaged leave the set.
#[must_use]
pub(super) fn has_one_majority_at_most(system: &SystemState, config: &ExplorationConfig) -> bool {
    let applies = config.reduced
        && config.majorities_only
        && !config.service_lies
        && config.environment.row_lock
        && config.environment.journal_sync
        && config.faults.clones == 0
        && config.rules.is_on(Rule::AbandonBeforeCommit)
        && config.rules.is_on(Rule::HoldAboveReleased)
        && config.rules.is_on(Rule::HoldWhatWasSigned);
    let mut earlier =
        system.sent.committed.iter().filter(|&&h| system.database.decided_list() != Some(h));
    applies && system.faults_left.restores == 0 && !earlier.any(|&h| can_reach_majority(system, h))
}

fn can_reach_majority(system: &SystemState, h: Hash) -> bool {
    let epoch = epoch_of(h);
    let starts = |key: &AgentKey| {
        let journal = system.live_journal(*key);
        system.sent.started.get(&incarnation(*key)) == Some(&h)
            || journal.is_some_and(|journal| {
                let holds =
                    journal.held_document.as_ref().is_some_and(|held| held.proposal_hash == h);
                let signed = journal
                    .signed_lists
                    .get(&epoch)
                    .is_some_and(|signed_list| signed_list.proposal_hash == h);
                holds || (signed && epoch > journal.released_epoch)
            })
    };
    let size = members_of(h).count();
    members_of(h).filter(starts).count() >= quorum(size)
}

/// The parts of the messages and journals that can still make a difference; computed once for each
/// state.
pub(super) struct Relevance<'a> {
    /// Lowest epoch of the present database, the backup and all transactions under way. No list
    /// below it will ever be frozen, acked or refused at the service again.
    lowest: Epoch,
    /// Whether journals never forget: they are synced, and no disk is copied.
    are_journals_durable: bool,
    /// Whether a process may still read its ledger.
    pub are_ledgers_read: bool,
    /// Whether boot counters matter. They only tell the holders of one key apart, and without
    /// copied disks each key has one holder.
    pub are_boots_relevant: bool,
    /// Whether dead hosts' disks are left out of the fingerprint, because nothing ever reads them.
    pub ignores_dead_hosts: bool,
    /// Whether late messages of agents that no longer exist may still arrive.
    pub late: bool,
    /// Frozen lists of members that can still be signed or frozen again.
    proposals: Vec<Hash>,
    config: &'a ExplorationConfig,
}

impl<'a> Relevance<'a> {
    /// Computes which parts of `system` can still make a difference.
    #[must_use]
    pub(super) fn new(system: &SystemState, config: &'a ExplorationConfig) -> Relevance<'a> {
        let reads = system.processes.iter().filter_map(|process| process.read.as_ref());
        let databases = [Some(&system.database), system.backup.as_ref()].into_iter().flatten();
        let lowest = databases.chain(reads).map(|database| database.cluster.epoch).min();
        let on = config.reduced && !config.service_lies;
        let mut relevance = Relevance {
            lowest: lowest.filter(|_| on).unwrap_or(0),
            are_journals_durable: config.environment.journal_sync && config.faults.clones == 0,
            are_ledgers_read: !(on && is_database_final(system, config)),
            are_boots_relevant: !config.reduced || config.faults.clones > 0,
            ignores_dead_hosts: config.reduced,
            late: config.has_late_messages || !config.reduced,
            proposals: Vec::new(),
            config,
        };
        let alive = |h: &&Hash| relevance.is_proposal_alive(system, **h);
        relevance.proposals = system.sent.proposals.iter().filter(alive).copied().collect();
        relevance
    }

    /// Returns whether some agent may still sign the list of members with hash `h`, or the service
    /// may still process a message about it.
    ///
    /// An agent that has signed or released the list's epoch signs no other list of that epoch
    /// (rule S5 of the formation, `agent/sign.rs`). At most, it sends its old ack again.
    ///
    /// From the list, an agent may also learn that its epoch has begun. That needs no list:
    /// whatever epoch the service has shown may reach the agent at any time.
    fn is_proposal_alive(&self, system: &SystemState, h: Hash) -> bool {
        let epoch = epoch_of(h);
        if epoch >= self.lowest
            || !self.are_journals_durable
            || !self.config.rules.is_on(Rule::OneListPerEpoch)
        {
            return true;
        }
        let may_sign = |journal: &Journal| {
            members_of(h).any(|key| key == journal.key)
                && journal.held_document.is_none()
                && journal.highest_epoch() < epoch
        };
        let hosts = system.hosts.iter().filter(|host| host.alive);
        hosts.filter_map(|host| host.journal.as_ref()).any(may_sign)
    }

    /// Returns the class of `host`'s directory, as the production code classifies it.
    #[must_use]
    pub(super) fn directory(&self, host: &HostState) -> DirectoryKind {
        directory_of(self.config, host)
    }

    /// Returns the frozen lists of members that can still make a difference. An agent can still
    /// sign such a list, or the service can still freeze it again or refuse messages about it.
    #[must_use]
    pub(super) fn proposals(&self) -> &[Hash] {
        &self.proposals
    }

    /// Returns whether the service could still take an ack of the list of members with hash `h`.
    /// That is ruled out if the list's epoch is below `lowest`.
    #[must_use]
    pub(super) fn is_ack_alive(&self, h: Hash) -> bool {
        epoch_of(h) >= self.lowest
    }

    /// Returns whether a signed list of members can still restrict its signer, or let the signer
    /// hold the list's commit document.
    ///
    /// Once the signer has released the list, it can't hold the list's document
    /// (`HoldAboveReleased`). Once enough members have released the list, it no longer keeps the
    /// signer from signing another one (rule S6 of the formation, `agent/sign.rs`). Releases are
    /// never taken back.
    #[must_use]
    pub(super) fn is_bound_alive(
        &self,
        system: &SystemState,
        journal: &Journal,
        epoch: Epoch,
        signed_list: &SignedList,
    ) -> bool {
        let reducible = self.lowest > 0
            && self.are_journals_durable
            && self.config.rules.is_on(Rule::HoldAboveReleased)
            && epoch <= journal.released_epoch;
        if !reducible {
            return true;
        }
        let released = |key: AgentKey| system.sent.releases.get(&key).is_some_and(|&r| r >= epoch);
        let count = signed_list.members.iter().filter(|member| released(member.key)).count();
        count < signed_list.releases_needed(&self.config.rules)
    }
}
