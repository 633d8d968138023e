//! One state of everything: database, processes, hosts, and every message that was ever sent.
//!
//! **Time** is nothing but a set of deadlines, each of which may have passed: the clock stands
//! still, and an action makes one lease, list or hold-back be over. That allows every real order of
//! events and more, so whatever holds here holds for every clock. Once the service's clock may be
//! ahead: whatever is stored then is stored with times that nobody should wait for, and the road
//! (property 7) waits for none of them.
//!
//! **Messages** are a growing set: acks and releases may arrive late, twice or never. What the
//! service has ever shown (epochs, lists, documents) may reach an agent at any later time, in any
//! order, which covers every late or lost answer.

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

/// The time that it is, unless the clock is ahead.
pub(super) const NOW: Micros = Micros(1_000_000_000_000);
/// How far a clock that is ahead is ahead: far above every lease, list and hold-back.
pub(super) const AHEAD: Millis = Millis(30 * 60 * 1_000);
/// A deadline or a grant that passes only if somebody lets it.
pub(super) const DAY: Millis = Millis(24 * 3600 * 1_000);
/// A deadline that has not passed is this far off: within every period.
pub(super) const SOON: Millis = Millis(1_000);
/// A deadline that has passed.
pub(super) const PASSED: Micros = Micros(0);
/// Everything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    /// The database.
    pub database: Arc<Database>,
    /// A backup of it, once taken.
    pub backup: Option<Arc<Database>>,
    /// The discovery processes. All of them serve.
    pub processes: [Process; PROCESSES],
    /// Which of them serves what happens next; the first, unless an action says so.
    pub serving: usize,
    /// The hosts; those beyond the configuration's number never do anything.
    pub hosts: [Arc<Host>; HOSTS],
    /// Which of them reach each other.
    pub links: Links,
    /// The service's clock is `AHEAD`.
    pub is_ahead: bool,
    /// What has been said.
    pub said: Arc<Said>,
    /// What may still go wrong.
    pub left: Faults,
    /// How much of it together; 255 for no bound.
    pub together: u8,
    /// The service's part is over, and this host alone is followed from here (`reduce`).
    pub alone: Option<u8>,
}

/// A host and its disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Not dead for good.
    pub alive: bool,
    /// Which key it has now, counted from 0.
    pub life: u8,
    /// The agent's journal.
    pub journal: Option<Journal>,
    /// The journal before the last change: what a power cut leaves if nothing is synced.
    pub unsynced: Option<Option<Box<Journal>>>,
    /// The node's directory.
    pub directory: Listing,
    /// What its agent does.
    pub mode: Mode,
    /// The node, if it runs: the list that it was started with.
    pub node: Option<Hash>,
    /// A directory with marker or log in it was lost in this life.
    pub data_lost: bool,
}

/// What an agent does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mode {
    /// Forming, or watching its node.
    Runs,
    /// About to look at the node's directory.
    Looks,
    /// About to write the marker.
    Marks,
    /// About to execute the node.
    Launches,
    /// Asks for a replacement.
    WantsReplacement,
    /// Has refused to touch the directory.
    Refuses,
    /// Has ended with this exit code.
    Stopped(u8),
}

/// Everything that was said, by anybody to anybody. It only grows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// Lists that the service has frozen.
    pub proposals: BTreeSet<Hash>,
    /// The highest epoch that it has shown while forming.
    pub epoch: Epoch,
    /// Signed acks.
    pub acks: BTreeSet<(KeyId, Hash)>,
    /// Signed releases: the highest of each key says it all.
    pub releases: BTreeMap<KeyId, Epoch>,
    /// Lists that some database has committed.
    pub committed: BTreeSet<Hash>,
    /// Documents that left a process.
    pub documents: BTreeSet<Hash>,
    /// Nodes that made a log from nothing: incarnation → the list.
    pub started: BTreeMap<Incarnation, Hash>,
    /// Agents of the past: those of hosts that were made anew, as they last spoke.
    pub past: Vec<Journal>,
    /// An operator has given up the cluster in the present database.
    pub abandoned: bool,
}

impl World {
    /// Before anything has happened.
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

    /// Whether the two are the same because nothing was written since one was copied from the
    /// other. False says nothing.
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

    /// What the service's clock says.
    #[must_use]
    pub fn now(&self) -> Micros {
        if self.is_ahead { NOW.after(AHEAD) } else { NOW }
    }

    /// The key that `host` has now.
    #[must_use]
    pub fn key(&self, host: usize) -> KeyId {
        key(host, self.hosts[host].life)
    }

    /// The journal of `key`, if it is still on a host that lives.
    #[must_use]
    pub fn live_journal(&self, key: KeyId) -> Option<&Journal> {
        let host = self.hosts.iter().find(|host| {
            host.alive && host.journal.as_ref().is_some_and(|journal| journal.key == key)
        })?;
        host.journal.as_ref()
    }

    /// Whether no fault is left that could strike a host between two of its agent's steps: kills,
    /// lost directories, copies.
    #[must_use]
    pub fn is_hurried(&self) -> bool {
        let left = &self.left;
        left.kills == 0 && left.lost_directories == 0 && left.clones == 0 && left.ends == 0
    }

    /// Whether the key's own host has ceased to be it.
    #[must_use]
    pub fn is_past(&self, key: KeyId) -> bool {
        let host = &self.hosts[host_of(key)];
        !host.alive || host.journal.as_ref().is_none_or(|journal| journal.key != key)
    }
}

/// Forgets what no rule looks at, so that states that differ in nothing else are one: revision, last
/// error, how far off a deadline is.
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
        // One count and two differ; more don't.
        agent.counts = agent.counts.min(2);
    }
    if let Some(frozen) = &mut cluster.frozen {
        frozen.at = if is_far(frozen.at) && forming { NOW.after(AHEAD) } else { NOW };
        if !forming {
            frozen.probes.clear();
        }
    }
}

/// Of a time to come only this matters: whether it was stored by a clock that was ahead.
fn nearest(until: Micros) -> Micros {
    if until <= NOW {
        PASSED
    } else if until <= NOW.after(AHEAD) {
        NOW.after(SOON)
    } else {
        NOW.after(AHEAD).after(SOON)
    }
}

/// Stored by a clock that was ahead: nobody should have to wait for it.
#[must_use]
pub(super) fn is_far(stored: Micros) -> bool {
    stored >= NOW.after(AHEAD)
}
