//! State of the whole explored system: database, processes, hosts, and every message that was ever
//! sent.
//!
//! **Time** is only a set of deadlines, each of which may have passed. The clock stands still, and
//! one action makes one lease, list or hold-back expire. That allows every real order of events and
//! more, so a property that holds here holds for every clock. The service's clock may be ahead once.
//! Whatever is stored in the meantime gets times that nobody should wait for, and the road (property
//! 7) waits for none of them.
//!
//! **Messages** are a growing set: acks and releases may arrive late, twice or never. Anything that
//! the service has ever shown (epochs, lists, documents) may reach an agent at any later time, in
//! any order. That covers every late or lost answer.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use formation_explored::agent::{Journal, Listing};
use formation_explored::service::{Cluster, Phase};
use formation_explored::{Epoch, Hash, Incarnation, KeyId, Micros, Millis};

use crate::explore::config::{Config, Faults};
use crate::explore::database::{Database, Ledger, PROCESSES, Process, Remembered};
use crate::explore::identity::{HOSTS, host_of, key, statement};
use crate::explore::links::Links;
use crate::explore::reduce;

/// Time of the service's clock, unless it is ahead.
pub(super) const NOW: Micros = Micros(1_000_000_000_000);
/// How far the service's clock is off when it is ahead: much longer than every lease, list time-out
/// and hold-back.
pub(super) const AHEAD: Millis = Millis(30 * 60 * 1_000);
/// Distance of a deadline or grant that passes only if an action makes it pass.
pub(super) const DAY: Millis = Millis(24 * 3600 * 1_000);
/// Distance of any deadline that has not passed: shorter than every lease, list time-out and
/// hold-back.
pub(super) const SOON: Millis = Millis(1_000);
/// Stored time of a deadline that has passed.
pub(super) const PASSED: Micros = Micros(0);
/// One state of the whole explored system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    pub database: Arc<Database>,
    /// Backup of the database, if one was taken.
    pub backup: Option<Arc<Database>>,
    /// The discovery processes; all of them serve requests.
    pub processes: [Process; PROCESSES],
    /// Index of the process that serves the next action: 0, unless the action names the other one.
    pub serving: usize,
    /// The hosts. Those beyond the configuration's number never do anything.
    pub hosts: [Arc<Host>; HOSTS],
    /// Links between hosts that are up or down.
    pub links: Links,
    /// Whether the service's clock is `AHEAD`.
    pub is_ahead: bool,
    /// Messages sent so far.
    pub said: Arc<Said>,
    /// Faults of each kind that may still happen.
    pub left: Faults,
    /// Number of faults of all kinds that may still happen; 255 means no limit.
    pub together: u8,
    /// The only host that is still followed, once the service can change nothing any more
    /// (`reduce`).
    pub alone: Option<u8>,
}

/// A host and its disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// False once the host has died for good.
    pub alive: bool,
    /// Number of the host's present key, counted from 0; grows when the host is re-imaged.
    pub life: u8,
    /// Journal of the agent, if the agent has started.
    pub journal: Option<Journal>,
    /// The journal before its last change. A power cut leaves this one if nothing is synced.
    pub unsynced: Option<Option<Box<Journal>>>,
    pub directory: Listing,
    pub mode: Mode,
    /// List that the node was started with, if the node runs.
    pub node: Option<Hash>,
    /// Whether a directory with a marker or a log was lost since the host was last re-imaged.
    pub data_lost: bool,
}

/// Next step of an agent, or the reason why it takes none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mode {
    /// Takes part in forming the cluster, or watches its node.
    Runs,
    /// Is about to look at the node's directory.
    Looks,
    /// Is about to write the marker.
    Marks,
    /// Is about to execute the node.
    Launches,
    /// Asks for a replacement, because data was lost.
    WantsReplacement,
    /// Has refused to touch the directory.
    Refuses,
    /// Has ended with this exit code.
    Stopped(u8),
}

/// Every message that anybody ever sent. The sets only grow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// Lists that the service has frozen.
    pub proposals: BTreeSet<Hash>,
    /// Highest epoch that the service has shown while forming.
    pub epoch: Epoch,
    /// Signed acks, by key and list.
    pub acks: BTreeSet<(KeyId, Hash)>,
    /// Highest epoch that each key has released; it includes every lower one.
    pub releases: BTreeMap<KeyId, Epoch>,
    /// Lists that some database has committed.
    pub committed: BTreeSet<Hash>,
    /// Documents that a process has sent.
    pub documents: BTreeSet<Hash>,
    /// The list of each node that made a log from nothing, by incarnation.
    pub started: BTreeMap<Incarnation, Hash>,
    /// Journals of agents whose hosts were re-imaged, as of their last message.
    pub past: Vec<Journal>,
    /// Whether an operator has abandoned the cluster in the present database.
    pub abandoned: bool,
}

impl World {
    /// Returns the initial state, before any action.
    #[must_use]
    pub fn new(config: &Config) -> World {
        let cluster = Cluster::opened(statement(config.seats), NOW.after(DAY));
        let database = Arc::new(Database::new(cluster));
        let known = config.environment.ledger.then(|| Remembered {
            site: database.site,
            generation: database.generation,
            copied: Vec::new(),
            beat: 0,
        });
        let ledger = Ledger { entry: None, known };
        let process = Process { ledger, connected: true, ..Process::default() };
        let host = |host: usize| {
            let entries =
                if config.lost_and_found { vec!["lost+found".to_owned()] } else { vec![] };
            Arc::new(Host {
                alive: host < config.hosts,
                life: 0,
                journal: None,
                unsynced: None,
                directory: Listing { entries, ..Listing::default() },
                mode: Mode::Runs,
                node: None,
                data_lost: false,
            })
        };
        let mut links = Links::default();
        for host in (0..HOSTS).filter(|host| config.unreachable >> host & 1 == 1) {
            links.hide(host);
        }
        World {
            database,
            backup: None,
            processes: std::array::from_fn(|_| process.clone()),
            serving: 0,
            hosts: std::array::from_fn(host),
            links,
            is_ahead: false,
            said: Arc::new(Said { epoch: 1, ..Said::default() }),
            left: config.faults.at_most(config.together),
            together: config.together,
            alone: None,
        }
    }

    /// Returns true if the two worlds share all parts, because nothing was written since one was
    /// cloned from the other. False doesn't mean that they differ.
    #[must_use]
    pub fn shares_all_with(&self, other: &World) -> bool {
        let same = |one: &Option<Arc<Database>>, other: &Option<Arc<Database>>| match (one, other) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (None, None) => true,
            _ => false,
        };
        Arc::ptr_eq(&self.database, &other.database)
            && same(&self.backup, &other.backup)
            && Arc::ptr_eq(&self.said, &other.said)
            && self.hosts.iter().zip(&other.hosts).all(|(one, other)| Arc::ptr_eq(one, other))
            && self.processes == other.processes
            && self.links == other.links
            && self.is_ahead == other.is_ahead
            && self.left == other.left
            && self.together == other.together
    }

    /// Returns the time of the service's clock.
    #[must_use]
    pub fn now(&self) -> Micros {
        if self.is_ahead { NOW.after(AHEAD) } else { NOW }
    }

    /// Returns the present key of `host`.
    #[must_use]
    pub fn key(&self, host: usize) -> KeyId {
        key(host, self.hosts[host].life)
    }

    /// Returns the journal of `key`, if it is on a living host.
    #[must_use]
    pub fn live_journal(&self, key: KeyId) -> Option<&Journal> {
        let host = self.hosts.iter().find(|host| {
            host.alive && host.journal.as_ref().is_some_and(|journal| journal.key == key)
        })?;
        host.journal.as_ref()
    }

    /// Returns whether no fault is left that could hit a host between two steps of its agent: a
    /// kill, a lost directory, a copied disk or the cluster's end.
    #[must_use]
    pub fn is_hurried(&self) -> bool {
        let left = &self.left;
        left.kills == 0 && left.lost_directories == 0 && left.clones == 0 && left.ends == 0
    }

    /// Returns whether the host of `key` is dead or has another key now.
    #[must_use]
    pub fn is_past(&self, key: KeyId) -> bool {
        let host = &self.hosts[host_of(key)];
        !host.alive || host.journal.as_ref().is_none_or(|journal| journal.key != key)
    }
}

/// Clears what no rule reads, so that states which differ only in that become equal: revision, last
/// error, and how far off a deadline is.
pub(super) fn normalise(cluster: &mut Cluster, config: &Config) {
    use formation_explored::service::Seating;
    if config.reduced && !config.liar {
        reduce::row(cluster, config);
    }
    cluster.rev = 1;
    cluster.last_error = None;
    if let Some(ended) = &mut cluster.ended {
        ended.by = String::new();
    }
    let order: Vec<KeyId> = cluster.standbys().into_values().collect();
    for (place, key) in (1..).zip(&order) {
        if let Some(agent) = cluster.agents.get_mut(key) {
            agent.seating = Seating::Standby(place);
        }
    }
    cluster.next_place = order.len() as u64 + 1;
    let forming = matches!(cluster.phase, Phase::Open | Phase::Preparing);
    for agent in cluster.agents.values_mut() {
        let has_lease = agent.seating != Seating::Absent && forming;
        agent.lease_until = if has_lease { nearest(agent.lease_until) } else { PASSED };
        agent.held_until = if forming { nearest(agent.held_until) } else { PASSED };
        // Rules distinguish no more than 0, 1 and 2 counts.
        agent.counts = agent.counts.min(2);
    }
    if let Some(frozen) = &mut cluster.frozen {
        frozen.at = if is_far(frozen.at) && forming { NOW.after(AHEAD) } else { NOW };
        if !forming {
            frozen.probes.clear();
        }
    }
}

/// Maps a stored time to one of three: passed, soon, or stored by a clock that was ahead. Nothing
/// else about a time to come matters.
fn nearest(until: Micros) -> Micros {
    if until <= NOW {
        PASSED
    } else if until <= NOW.after(AHEAD) {
        NOW.after(SOON)
    } else {
        NOW.after(AHEAD).after(SOON)
    }
}

/// Returns whether `stored` was stored by a clock that was ahead. Nobody should have to wait for
/// such a time.
#[must_use]
pub(super) fn is_far(stored: Micros) -> bool {
    stored >= NOW.after(AHEAD)
}
