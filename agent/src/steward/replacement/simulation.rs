//! A seeded simulation of replacements by a policy.
//!
//! Agents run the code that decides: [`Reachability`], [`Observations`], [`UseLog`],
//! [`PolicyReplacementFacts`], [`continuation`], [`leaves_vacancy`] and the steps of
//! [`ReplacementFacts`]. Their hosts die, come back, and lose their connections to each other. The
//! simulation also has:
//! - a store with compare-and-swap;
//! - a cluster that judges changes as `muster-node` or as stock etcd does;
//! - hosts that wait for a place;
//! - a discovery service that lies about its clock, hands out hosts that are gone, and hands out
//!   replacements that have ended;
//! - agents that hang, and leaders that change, between an agent's decision and its write.
//!
//! After each change, the simulation compares the result with the true history of the hosts, which
//! no agent sees ([`invariants`]).
//!
//! A test switches off each guard in turn: the simulation then has to find a violation of a certain
//! invariant.

mod cluster;
mod decisions;
mod histories;
mod invariants;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use discovery_types::digest::OperationId;
use discovery_types::grant::{GrantId, ReplacementLimits};
use tokio::time::Instant;

use self::invariants::{Invariant, TruePath};
use super::STEP_LIFETIME;
use super::decide::{
    Candidate, Continuation, PolicyDecision, PolicyFacts, PolicyReplacementFacts, PolicyStanding,
    VoterFacts, continuation, leaves_vacancy,
};
use super::observations::{OBSERVATION_LIFETIME, Observations};
use super::uses::{PolicyUse, UseLog};
use super::voters::Reachability;
use crate::cluster::{ClusterMember, MemberId, MemberList, RemovalOrigin};
use crate::plan::{
    MemberState, ObservedCluster, ObservedMember, ReplacementFacts, ReplacementStep,
};

/// Number of seconds between two steps of the simulation.
const TICK: u64 = 5;
/// True time at which a history begins, in seconds.
const BEGINNING: u64 = 100_000;
/// Number of steps in one history.
const TICKS: u64 = 1_200;
/// Number of histories in a run that expects no violation. `POLICY_HISTORIES` overrides it, and
/// `POLICY_FROM` is the first seed.
const HISTORIES: u64 = 300;
/// Number of histories of which at least one has to notice that a guard is switched off.
const HISTORIES_TO_FIND: u64 = 400;
/// Largest difference of an agent's clock from the true time, in seconds.
const MAX_SKEW: u64 = 60;
/// Upper bound, exclusive, of the number of steps between an agent's decision and its write, unless
/// the agent hangs.
const MAX_DELAY: u64 = 4;
/// Upper bound, exclusive, of the number of steps between the decision and the write of an agent
/// that hangs.
const MAX_HANG: u64 = 120;
/// Time after which a newcomer that doesn't catch up is removed, in seconds.
const STALLED_AFTER: u64 = 300;
const LIMITS: ReplacementLimits =
    ReplacementLimits { after_seconds: 60, at_most: 2, per_seconds: 3_600 };

/// The program whose rules for changes of members the simulated cluster has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NodeKind {
    /// Carries out each operation id once, and refuses a change that was planned for another
    /// configuration.
    Muster,
    /// Knows neither operation ids nor configurations.
    StockEtcd,
}

/// A guard that a test switches off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Guard {
    /// A quorum of the voters' agents has to observe the dead member.
    Quorum,
    /// An observation counts only while it is new.
    Freshness,
    /// Exactly one voter is unreachable.
    OneDead,
    /// The member has been unreachable for `LIMITS.after_seconds`.
    Patience,
    /// All other voters are in sync.
    InSync,
    /// The use is written only if nobody else has written meanwhile.
    CompareAndSwap,
    /// The policy's uses are counted.
    Limit,
    /// A revoked policy begins nothing.
    Revocation,
    /// An expired policy begins nothing.
    Expiry,
    /// A replacement is given up when its member comes back.
    Continuation,
    /// A replacement goes on only while a quorum of the voters' agents misses its member.
    Agreement,
    /// A vacant place is filled only if the cluster lacks a voter.
    Vacancy,
    /// Only a newcomer that has started is promoted.
    Start,
    /// A step is taken only within [`STEP_LIFETIME`] after its decision.
    StepAge,
    /// A replacement that has ended takes no step, although discovery hands it out again.
    EndedUse,
    /// An agent finds out who removed the dead member before it ends the replacement.
    FindRemover,
}

/// Groups of guards that are switched off together, and for each group an invariant that is then
/// violated. A second unreachable voter isn't in sync either, so the guards `OneDead` and `InSync`
/// catch each other's faults.
const GUARDS: [(&[Guard], Invariant); 16] = [
    (&[Guard::Quorum], Invariant::Agreement),
    (&[Guard::Freshness], Invariant::Agreement),
    (&[Guard::OneDead, Guard::InSync], Invariant::OthersReachable),
    (&[Guard::Patience], Invariant::Agreement),
    (&[Guard::CompareAndSwap], Invariant::OneAtATime),
    (&[Guard::Limit], Invariant::Limit),
    (&[Guard::Revocation], Invariant::PolicyInForce),
    (&[Guard::Expiry], Invariant::PolicyInForce),
    (&[Guard::Continuation], Invariant::StillDead),
    (&[Guard::Vacancy], Invariant::Size),
    (&[Guard::Vacancy], Invariant::OneNewcomerForOneDeath),
    (&[Guard::Start], Invariant::StartedBeforeVote),
    (&[Guard::Start], Invariant::NoFewerStartedVoters),
    (&[Guard::StepAge], Invariant::StillDead),
    (&[Guard::EndedUse], Invariant::NoStepAfterEnd),
    (&[Guard::FindRemover], Invariant::VacancyIsNoted),
];

/// A pseudorandom generator (splitmix64, Steele and others, 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn one_in(&mut self, chances: u64) -> bool {
        self.below(chances) == 0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        let count = u64::try_from(from.len()).unwrap_or(0);
        let at = if count == 0 { return None } else { self.below(count) };
        from.get(usize::try_from(at).unwrap_or(0)).copied()
    }
}

/// A host, with its agent and its node.
struct SimulatedHost {
    is_alive: bool,
    /// Difference of the agent's clock from the true time, in seconds.
    skew: i64,
    reach: Reachability,
    observations: Observations,
    /// Change that the agent has decided on and not yet made.
    pending: Option<PendingChange>,
    /// Whether the cluster has refused to add the newcomer of the use under way.
    is_addition_refused: bool,
    /// Operation of a replacement, and whether it has removed the dead member, as far as the agent
    /// knows.
    removal_origin: Option<(OperationId, RemovalOrigin)>,
}

/// A decision that an agent carries out later.
struct PendingChange {
    decided_at: u64,
    /// When the agent carries the decision out.
    due: u64,
    /// Number of changes of members before the decision.
    configuration: u64,
    decision: Decision,
}

enum Decision {
    Begin { new: PolicyUse, revision: u64, ended: Option<&'static str> },
    Step(StepDecision),
    GiveUp { operation: OperationId },
}

struct StepDecision {
    operation: OperationId,
    step: ReplacementStep,
    /// Whether the newcomer voted when this was decided.
    newcomer_votes: bool,
    /// Whether the use had ended when this was decided.
    is_after_end: bool,
}

/// An observation in the store.
struct StoredObservation {
    number: u64,
    /// Revision of the store at which the observation was written.
    revision: u64,
    unreachable: Vec<(MemberId, Duration)>,
}

/// Voter that took a dead member's place.
#[derive(Clone, Copy)]
struct Successor {
    voter: MemberId,
    /// Whether an operator added the voter. If the cluster loses a voter later, the place counts as
    /// vacant again.
    is_added_by_hand: bool,
}

struct Simulation {
    random: Random,
    node: NodeKind,
    off: &'static [Guard],
    /// The only invariant that is checked; `None` for all.
    watched: Option<Invariant>,
    /// Average number of steps between two changes of the leader.
    leader_changes_one_in: u64,
    /// Whether agents hang between a decision and its write.
    agents_hang: bool,
    start: Instant,
    now: u64,
    size: usize,
    policy: GrantId,
    is_revoked: bool,
    /// When the policy expires, by the true time.
    expires_at: u64,
    hosts: BTreeMap<MemberId, SimulatedHost>,
    cut: BTreeSet<(MemberId, MemberId)>,
    paths: BTreeMap<(MemberId, MemberId), TruePath>,
    members: MemberList,
    /// Number of changes of members so far. `muster-node` refuses a step that was planned at
    /// another configuration.
    configuration: u64,
    started: BTreeSet<MemberId>,
    leader: Option<MemberId>,
    uses: (UseLog, u64),
    writes: u64,
    stored: BTreeMap<MemberId, StoredObservation>,
    /// Hosts that wait, with their operations, in the order in which discovery hands them out.
    waiting: Vec<(OperationId, MemberId)>,
    removed_by: BTreeMap<MemberId, OperationId>,
    /// For each member, the operation that last announced its removal in the store. Agents announce
    /// removals only with stock etcd.
    announced: BTreeMap<MemberId, OperationId>,
    learner_since: BTreeMap<MemberId, u64>,
    /// Newcomers that were members and were removed.
    removed_newcomers: BTreeSet<MemberId>,
    next_host: u64,
    begun: Vec<u64>,
    finished: u64,
    /// Number of decisions and changes so far, without decisions to wait.
    events: u64,
    /// Voter that took each dead member's place.
    successors: BTreeMap<MemberId, Successor>,
    /// Number of started voters that the cluster has to have, apart from a member that is being
    /// replaced.
    least_started: usize,
    violation: Option<(Invariant, String)>,
}

/// Returns when the policy of a history expires. That is before the history's end in one of six
/// histories, and never in the others.
fn expiry_of(seed: u64) -> u64 {
    let mut random = Random(!seed);
    match random.one_in(6) {
        true => BEGINNING + random.below(TICKS * TICK),
        false => u64::MAX,
    }
}

fn host_of(operation: OperationId) -> MemberId {
    MemberId(u64::from_be_bytes(operation.0[..8].try_into().expect("8 bytes")))
}

fn operation_of(host: MemberId) -> OperationId {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&host.0.to_be_bytes());
    OperationId(id)
}

fn url_of(host: MemberId) -> String {
    format!("https://{host}:2380")
}

fn member(host: MemberId, is_learner: bool) -> ClusterMember {
    ClusterMember {
        id: host,
        name: if is_learner { String::new() } else { format!("db-{host}") },
        peer_urls: vec![url_of(host)],
        is_learner,
        ..ClusterMember::default()
    }
}

impl Simulation {
    /// Makes the simulation of a history. Every other history has stock etcd, and in every eighth
    /// one the leader changes at each step.
    fn new(seed: u64, off: &'static [Guard]) -> Self {
        let mut random = Random(seed);
        let size = if random.one_in(3) { 5 } else { 3 };
        let node = if seed.is_multiple_of(2) { NodeKind::Muster } else { NodeKind::StockEtcd };
        let simulation = Self::with(random, size, node, off);
        let leader_changes_one_in = if (seed / 2).is_multiple_of(4) { 1 } else { 20 };
        let expires_at = expiry_of(seed);
        Self { leader_changes_one_in, agents_hang: true, expires_at, ..simulation }
    }

    fn with(random: Random, size: usize, node: NodeKind, off: &'static [Guard]) -> Self {
        let mut simulation = Self {
            random,
            node,
            off,
            watched: None,
            leader_changes_one_in: 20,
            agents_hang: false,
            start: Instant::now(),
            now: BEGINNING,
            size,
            policy: GrantId::random(),
            is_revoked: false,
            expires_at: u64::MAX,
            hosts: BTreeMap::new(),
            cut: BTreeSet::new(),
            paths: BTreeMap::new(),
            members: MemberList::default(),
            configuration: 0,
            started: BTreeSet::new(),
            leader: None,
            uses: (UseLog::default(), 0),
            writes: 0,
            stored: BTreeMap::new(),
            waiting: Vec::new(),
            removed_by: BTreeMap::new(),
            announced: BTreeMap::new(),
            learner_since: BTreeMap::new(),
            removed_newcomers: BTreeSet::new(),
            next_host: 1,
            begun: Vec::new(),
            finished: 0,
            events: 0,
            successors: BTreeMap::new(),
            least_started: 0,
            violation: None,
        };
        for _ in 0..size {
            let host = simulation.add_host();
            simulation.members.list.push(member(host, false));
            simulation.started.insert(host);
        }
        simulation
    }

    fn add_host(&mut self) -> MemberId {
        let id = MemberId(self.next_host);
        self.next_host += 1;
        let skew = self.random.below(2 * MAX_SKEW + 1) as i64 - MAX_SKEW as i64;
        self.hosts.insert(
            id,
            SimulatedHost {
                is_alive: true,
                skew,
                reach: Reachability::default(),
                observations: Observations::default(),
                pending: None,
                is_addition_refused: false,
                removal_origin: None,
            },
        );
        id
    }

    fn instant(&self) -> Instant {
        self.start + Duration::from_secs(self.now)
    }

    fn is_off(&self, guard: Guard) -> bool {
        self.off.contains(&guard)
    }

    fn voters(&self) -> Vec<MemberId> {
        self.members.list.iter().filter(|each| !each.is_learner).map(|each| each.id).collect()
    }

    fn is_alive(&self, host: MemberId) -> bool {
        self.hosts.get(&host).is_some_and(|host| host.is_alive)
    }

    fn reaches(&self, from: MemberId, to: MemberId) -> bool {
        let pair = (from.min(to), from.max(to));
        self.is_alive(from) && self.is_alive(to) && (from == to || !self.cut.contains(&pair))
    }

    /// Whether the host reaches a quorum of the voters, so that it can lead and use the store.
    fn has_quorum(&self, host: MemberId) -> bool {
        let voters = self.voters();
        let reached = voters.iter().filter(|to| self.reaches(host, **to)).count();
        voters.contains(&host) && reached > voters.len() / 2
    }

    /// Lets hosts die and come back, and paths break and heal.
    fn disturb(&mut self) {
        let all: Vec<MemberId> = self.hosts.keys().copied().collect();
        let voters = self.voters();
        if self.random.one_in(60)
            && let Some(host) = self.random.pick(&voters)
        {
            self.hosts.get_mut(&host).expect("a host").is_alive = false;
        }
        let dead: Vec<MemberId> =
            all.iter().copied().filter(|host| !self.is_alive(*host)).collect();
        if self.random.one_in(80)
            && let Some(host) = self.random.pick(&dead)
        {
            let host = self.hosts.get_mut(&host).expect("a host");
            // A restarted agent remembers nothing.
            (host.is_alive, host.reach) = (true, Reachability::default());
            (host.observations, host.pending) = (Observations::default(), None);
            (host.is_addition_refused, host.removal_origin) = (false, None);
        }
        if self.random.one_in(40)
            && let (Some(one), Some(other)) = (self.random.pick(&voters), self.random.pick(&voters))
            && one != other
        {
            self.cut.insert((one.min(other), one.max(other)));
        }
        if self.random.one_in(30) {
            let cut: Vec<_> = self.cut.iter().copied().collect();
            if let Some(path) = self.random.pick(&cut) {
                self.cut.remove(&path);
            }
        }
        // Newcomers come and go. Discovery hands out those that are gone, too.
        if self.random.one_in(40) && self.waiting.len() < 3 {
            let host = self.add_host();
            self.waiting.push((operation_of(host), host));
        }
        if self.random.one_in(200)
            && let Some((_, host)) = self.random.pick(&self.waiting.clone())
        {
            self.hosts.get_mut(&host).expect("a host").is_alive = false;
        }
        if self.random.one_in(1_000) {
            self.is_revoked = true;
        }
        if self.random.one_in(100) {
            self.change_by_hand();
        }
    }

    fn start_newcomers(&mut self) {
        let learners: Vec<MemberId> =
            self.members.list.iter().filter(|each| each.is_learner).map(|each| each.id).collect();
        for host in learners {
            let is_new = !self.removed_newcomers.contains(&host);
            if is_new && self.is_alive(host) && self.random.one_in(3) {
                self.started.insert(host);
            }
        }
    }

    /// Returns the voters that can lead.
    fn electable(&self) -> Vec<MemberId> {
        self.voters().into_iter().filter(|host| self.has_quorum(*host)).collect()
    }

    /// Runs one step of the whole system.
    fn tick(&mut self) {
        self.now += TICK;
        self.disturb();
        self.note_paths();
        self.start_newcomers();
        let able = self.electable();
        if self.leader.is_none_or(|leader| !able.contains(&leader))
            || self.random.one_in(self.leader_changes_one_in)
        {
            self.leader = self.random.pick(&able);
        }
        self.run_agents();
        self.check_members();
    }

    /// Lets each agent look at the voters and make its pending change. Then lets the leader's agent
    /// decide.
    fn run_agents(&mut self) {
        for host in self.voters() {
            if self.is_alive(host) {
                self.look(host);
                self.observe(host);
                self.act(host);
            }
        }
        if let Some(leader) = self.leader {
            self.decide(leader);
        }
    }

    /// Lets time pass without disturbances: paths, leader and newcomers stay as they are.
    fn run_quietly(&mut self, ticks: u64) {
        for _ in 0..ticks {
            self.now += TICK;
            self.note_paths();
            self.run_agents();
            self.check_members();
        }
    }

    /// Runs one history. Returns how many replacements have begun, and how many have finished.
    /// Returns the violation as an error, if there was one.
    fn run(mut self) -> Result<(u64, u64), String> {
        for tick in 1..=TICKS {
            self.tick();
            if let Some((invariant, violation)) = self.violation.take() {
                return Err(format!("step {tick}, {:?}, {invariant:?}: {violation}", self.node));
            }
        }
        Ok((u64::try_from(self.begun.len()).unwrap_or(0), self.finished))
    }
}
