//! State of the whole explored system: database, processes, hosts, and every message that was ever
//! sent.
//!
//! **Time** is only a set of deadlines, each of which may have passed. The clock never moves;
//! instead, one action makes one lease, list or backoff expire. That allows every real order of
//! events and more, so a property that holds here holds for every clock. The service's clock may be
//! ahead once. A cluster must be able to form without waiting for a deadline that was stored
//! meanwhile. So the fault-free run (property 7) doesn't wait for such deadlines.
//!
//! **Messages** are a growing set: acks and releases may arrive late, twice or never. Anything that
//! the service has ever shown (epochs, lists, documents) may reach an agent at any later time, in
//! any order. That covers every late or lost answer.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use formation_explored::agent::{DirectoryListing, Journal};
use formation_explored::service::{Cluster, Phase};
use formation_explored::{AgentKey, Epoch, Hash, Incarnation, Millis, UnixMicros};

use crate::explore::config::{ExplorationConfig, FaultCounts};
use crate::explore::database::{DatabaseState, Ledger, LedgerPosition, PROCESSES, ProcessState};
use crate::explore::identities::{MAX_HOSTS, host_of, key, statement};
use crate::explore::links::Links;
use crate::explore::reductions;

/// Time that the service's clock shows, unless the clock is ahead.
pub(super) const NOW: UnixMicros = UnixMicros(1_000_000_000_000);
/// How far the service's clock is off when it is ahead: much longer than every lease, list time-out
/// and backoff.
pub(super) const CLOCK_JUMP: Millis = Millis(30 * 60 * 1_000);
/// Distance from `NOW` of the cluster's deadline and of the grant's end. Neither passes by itself,
/// because `NOW` never moves.
pub(super) const DAY: Millis = Millis(24 * 3600 * 1_000);
/// Distance from `NOW` to which `normalise` moves each deadline that has not passed yet. This
/// distance is shorter than every lease, list time-out and backoff.
pub(super) const PENDING_DEADLINE_DISTANCE: Millis = Millis(1_000);
/// Stored time of a deadline that has passed.
pub(super) const PASSED_DEADLINE: UnixMicros = UnixMicros(0);
/// One state of the whole explored system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SystemState {
    pub database: Arc<DatabaseState>,
    /// Backup of the database, if one was taken.
    pub backup: Option<Arc<DatabaseState>>,
    /// The discovery processes; all of them serve requests.
    pub processes: [ProcessState; PROCESSES],
    /// Index of the process that serves the next action: 0, unless the action names the other
    /// process.
    pub serving: usize,
    /// The hosts. The array may be longer than the configured number of hosts; the rest never do
    /// anything.
    pub hosts: [Arc<HostState>; MAX_HOSTS],
    /// Links between hosts that are up or down.
    pub links: Links,
    /// Whether the service's clock is ahead by `CLOCK_JUMP`.
    pub is_ahead: bool,
    /// Messages sent so far.
    pub sent: Arc<SentMessages>,
    /// Faults of each kind that may still happen.
    pub faults_left: FaultCounts,
    /// Number of faults of all kinds that may still happen; 255 means no limit.
    pub total_faults_left: u8,
    /// The only host whose steps are still explored, once hosts can't affect each other or the
    /// service any more (`reductions::are_hosts_independent`). `None` while all hosts are explored.
    pub followed_host: Option<u8>,
}

/// A host and its disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostState {
    /// False once the host has died for good.
    pub alive: bool,
    /// Number of the host's present key, counted from 0; grows when the host is re-imaged.
    pub reimage_count: u8,
    /// Journal of the agent, if the agent has started.
    pub journal: Option<Journal>,
    /// The journal before its last change. If journals aren't synced, a power cut brings this
    /// journal back.
    pub journal_before_change: Option<Option<Box<Journal>>>,
    pub directory: DirectoryListing,
    pub mode: AgentMode,
    /// Hash of the list of members with which the node was started, if the node runs.
    pub running_list: Option<Hash>,
    /// Whether the node's directory was lost while it had a marker or a log. Becomes false when the
    /// host is re-imaged.
    pub data_lost: bool,
}

/// Next action of an agent, or the reason why the agent takes none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AgentMode {
    /// The agent takes part in forming the cluster, or watches its node.
    Running,
    /// The agent is about to examine the node's directory.
    InspectingDirectory,
    /// The agent is about to write the marker.
    WritingMarker,
    /// The agent is about to execute the node.
    LaunchingNode,
    /// The agent asks for a replacement, because data was lost.
    AwaitingReplacement,
    /// The agent has refused to use the node's directory, because of the directory's content.
    RefusingDirectory,
    /// The agent has ended with this exit code.
    Stopped(u8),
}

/// Every message that anybody ever sent. The sets only grow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SentMessages {
    /// Hashes of the lists of members that the service has frozen.
    pub proposals: BTreeSet<Hash>,
    /// Highest epoch that the service has shown while the cluster was forming.
    pub epoch: Epoch,
    /// Signed acks: the key of the agent, and the hash of the list of members.
    pub acks: BTreeSet<(AgentKey, Hash)>,
    /// Highest epoch that each agent has released, by the agent's key. A release covers all lower
    /// epochs.
    pub releases: BTreeMap<AgentKey, Epoch>,
    /// Hashes of the lists of members that some database has committed.
    pub committed: BTreeSet<Hash>,
    /// Commit documents that a process has sent, by the hash of their lists.
    pub documents: BTreeSet<Hash>,
    /// Hash of the list of members with which each node made a log from nothing, by incarnation.
    pub started: BTreeMap<Incarnation, Hash>,
    /// Journals of agents whose hosts were re-imaged, as of their last message.
    pub past: Vec<Journal>,
    /// Whether an operator has abandoned the cluster in the present database.
    pub abandoned: bool,
}

impl SystemState {
    /// Returns the initial state, before any action.
    #[must_use]
    pub fn new(config: &ExplorationConfig) -> SystemState {
        let cluster = Cluster::opened(statement(config.seats), NOW.after(DAY));
        let database = Arc::new(DatabaseState::new(cluster));
        let known = config.environment.ledger.then(|| LedgerPosition {
            identity: database.identity,
            generation: database.generation,
            copied_decisions: Vec::new(),
            sweep_count: 0,
        });
        let ledger = Ledger { entry: None, position: known };
        let process = ProcessState { ledger, connected: true, ..ProcessState::default() };
        let host = |host: usize| {
            let entries =
                if config.lost_and_found { vec!["lost+found".to_owned()] } else { vec![] };
            Arc::new(HostState {
                alive: host < config.hosts,
                reimage_count: 0,
                journal: None,
                journal_before_change: None,
                directory: DirectoryListing { entries, ..DirectoryListing::default() },
                mode: AgentMode::Running,
                running_list: None,
                data_lost: false,
            })
        };
        let mut links = Links::default();
        for host in (0..MAX_HOSTS).filter(|host| config.unreachable >> host & 1 == 1) {
            links.cut_incoming(host);
        }
        SystemState {
            database,
            backup: None,
            processes: std::array::from_fn(|_| process.clone()),
            serving: 0,
            hosts: std::array::from_fn(host),
            links,
            is_ahead: false,
            sent: Arc::new(SentMessages { epoch: 1, ..SentMessages::default() }),
            faults_left: config.faults.at_most(config.max_total_faults),
            total_faults_left: config.max_total_faults,
            followed_host: None,
        }
    }

    /// Returns true if the two states share all parts in memory, because nothing was written since
    /// one was cloned from the other. States without shared parts may still be equal.
    #[must_use]
    pub fn shares_all_with(&self, other: &SystemState) -> bool {
        let same = |one: &Option<Arc<DatabaseState>>, other: &Option<Arc<DatabaseState>>| match (
            one, other,
        ) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (None, None) => true,
            _ => false,
        };
        Arc::ptr_eq(&self.database, &other.database)
            && same(&self.backup, &other.backup)
            && Arc::ptr_eq(&self.sent, &other.sent)
            && self.hosts.iter().zip(&other.hosts).all(|(one, other)| Arc::ptr_eq(one, other))
            && self.processes == other.processes
            && self.links == other.links
            && self.is_ahead == other.is_ahead
            && self.faults_left == other.faults_left
            && self.total_faults_left == other.total_faults_left
    }

    /// Returns the time of the service's clock.
    #[must_use]
    pub fn now(&self) -> UnixMicros {
        if self.is_ahead { NOW.after(CLOCK_JUMP) } else { NOW }
    }

    /// Returns the present key of `host`.
    #[must_use]
    pub fn key(&self, host: usize) -> AgentKey {
        key(host, self.hosts[host].reimage_count)
    }

    /// Returns the journal of `key`, if it is on a living host.
    #[must_use]
    pub fn live_journal(&self, key: AgentKey) -> Option<&Journal> {
        let host = self.hosts.iter().find(|host| {
            host.alive && host.journal.as_ref().is_some_and(|journal| journal.key == key)
        })?;
        host.journal.as_ref()
    }

    /// Returns whether no fault is left that could hit a host between two steps of its agent. Such
    /// faults are a kill, a lost directory, a copied disk, and the cluster's end.
    #[must_use]
    pub fn are_agent_steps_atomic(&self) -> bool {
        let left = &self.faults_left;
        left.kills == 0 && left.lost_directories == 0 && left.clones == 0 && left.cluster_ends == 0
    }

    /// Returns whether the host of `key` is dead or has another key now.
    #[must_use]
    pub fn is_key_gone(&self, key: AgentKey) -> bool {
        let host = &self.hosts[host_of(key)];
        !host.alive || host.journal.as_ref().is_none_or(|journal| journal.key != key)
    }
}

/// Gives the row a normal form, so that states become equal if no rule can tell them apart. Clears
/// the revision, the last error and the name of who ended the cluster. Renumbers the standbys, and
/// maps numbers of failed lists and deadlines to few values.
pub(super) fn normalise(cluster: &mut Cluster, config: &ExplorationConfig) {
    use formation_explored::service::Seating;
    if config.reduced && !config.service_lies {
        reductions::clear_unread_fields(cluster, config);
    }
    cluster.rev = 1;
    cluster.last_error = None;
    if let Some(ended) = &mut cluster.ended {
        ended.by = String::new();
    }
    let order: Vec<AgentKey> = cluster.standbys().into_values().collect();
    for (place, key) in (1..).zip(&order) {
        if let Some(agent) = cluster.agents.get_mut(key) {
            agent.seating = Seating::Standby(place);
        }
    }
    cluster.next_queue_number = order.len() as u64 + 1;
    let forming = matches!(cluster.phase, Phase::Open | Phase::Preparing);
    for agent in cluster.agents.values_mut() {
        let has_lease = agent.seating != Seating::Absent && forming;
        agent.lease_until =
            if has_lease { coarsen_deadline(agent.lease_until) } else { PASSED_DEADLINE };
        agent.backoff_until =
            if forming { coarsen_deadline(agent.backoff_until) } else { PASSED_DEADLINE };
        // The rules distinguish only 0, 1, and 2 or more failed lists.
        agent.failed_lists = agent.failed_lists.min(2);
    }
    if let Some(frozen) = &mut cluster.frozen {
        frozen.at =
            if is_from_clock_ahead(frozen.at) && forming { NOW.after(CLOCK_JUMP) } else { NOW };
        if !forming {
            frozen.probes.clear();
        }
    }
}

/// Maps a stored time to one of three: passed, soon, or stored by a clock that was ahead. No other
/// difference between stored times matters.
fn coarsen_deadline(until: UnixMicros) -> UnixMicros {
    if until <= NOW {
        PASSED_DEADLINE
    } else if until <= NOW.after(CLOCK_JUMP) {
        NOW.after(PENDING_DEADLINE_DISTANCE)
    } else {
        NOW.after(CLOCK_JUMP).after(PENDING_DEADLINE_DISTANCE)
    }
}

/// Returns whether the service stored this time while its clock was ahead. The fault-free run must
/// succeed without waiting for such a deadline.
#[must_use]
pub(super) fn is_from_clock_ahead(stored: UnixMicros) -> bool {
    stored >= NOW.after(CLOCK_JUMP)
}
