//! A seeded simulation of replacements by a policy.
//!
//! Agents run the code that decides: [`Reachability`], [`Observations`], [`UseLog`],
//! [`PolicyReplacementFacts`], [`continuation`] and the steps of [`ReplacementFacts`]. Their
//! hosts die, come back, and lose their connections to each other. The simulation also has:
//! - a store with compare-and-swap;
//! - a cluster that judges changes as etcd does;
//! - hosts that wait for a place;
//! - a discovery service that lies about its clock and hands out hosts that are gone;
//! - leaders that change between an agent's decision and its write.
//!
//! After each change, the simulation compares the result with the true history of the hosts, which
//! no agent sees.
//!
//! A test switches off each guard in turn: the simulation then has to find a violation.

mod decisions;
mod histories;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use discovery_types::digest::OperationId;
use discovery_types::grant::{GrantId, ReplacementLimits};
use tokio::time::Instant;

use super::decide::{
    Candidate, Continuation, DeadMemberState, PolicyDecision, PolicyFacts, PolicyReplacementFacts,
    PolicyStanding, VoterFacts, continuation,
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
/// Number of histories in which a switched-off guard has to be noticed.
const HISTORIES_TO_FIND: u64 = 400;
/// Largest difference of an agent's clock from the true time, in seconds.
const MAX_SKEW: u64 = 60;
/// Upper bound, exclusive, of the number of steps between an agent's decision and its write.
const MAX_DELAY: u64 = 4;
/// Time after which a newcomer that doesn't catch up is removed, in seconds.
const STALLED_AFTER: u64 = 300;
const LIMITS: ReplacementLimits =
    ReplacementLimits { after_seconds: 60, at_most: 2, per_seconds: 3_600 };

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
}

/// Groups of guards that are switched off together. A second unreachable voter isn't in sync
/// either, so the guards `OneDead` and `InSync` catch each other's faults.
const GUARDS: [&[Guard]; 10] = [
    &[Guard::Quorum],
    &[Guard::Freshness],
    &[Guard::OneDead, Guard::InSync],
    &[Guard::Patience],
    &[Guard::CompareAndSwap],
    &[Guard::Limit],
    &[Guard::Revocation],
    &[Guard::Expiry],
    &[Guard::Continuation],
    &[Guard::Vacancy],
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
    pending: Option<(u64, Pending)>,
    /// Whether the cluster has refused to add the newcomer of the use under way.
    is_addition_refused: bool,
}

/// A decision that an agent carries out later.
enum Pending {
    Begin { new: PolicyUse, revision: u64, ended: Option<&'static str> },
    Step { operation: OperationId, step: ReplacementStep, configuration: u64 },
    GiveUp { operation: OperationId },
}

/// An observation in the store.
struct StoredObservation {
    number: u64,
    /// Revision that wrote it.
    revision: u64,
    unreachable: Vec<(MemberId, Duration)>,
}

/// True history of one host's connection to another.
#[derive(Clone, Copy, Default)]
struct TruePath {
    /// Time since which the path has been cut; `None` if it isn't cut.
    cut_since: Option<u64>,
    /// End and length of the last cut that has ended.
    last: Option<(u64, u64)>,
}

struct Simulation {
    random: Random,
    off: &'static [Guard],
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
    learner_since: BTreeMap<MemberId, u64>,
    next_host: u64,
    begun: Vec<u64>,
    finished: u64,
    violation: Option<String>,
}

/// Returns when the policy of a history expires: in one of six histories, within that history.
fn expiry_of(seed: u64) -> u64 {
    let mut random = Random(!seed);
    match random.one_in(6) {
        true => BEGINNING + random.below(TICKS * TICK),
        false => u64::MAX,
    }
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
    fn new(seed: u64, off: &'static [Guard]) -> Self {
        let mut random = Random(seed);
        let size = if random.one_in(3) { 5 } else { 3 };
        let mut simulation = Self {
            random,
            off,
            start: Instant::now(),
            now: BEGINNING,
            size,
            policy: GrantId::random(),
            is_revoked: false,
            expires_at: expiry_of(seed),
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
            learner_since: BTreeMap::new(),
            next_host: 1,
            begun: Vec::new(),
            finished: 0,
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

    /// An operator fills a vacant place by hand.
    fn change_by_hand(&mut self) {
        if self.voters().len() < self.size {
            let host = self.add_host();
            self.members.list.push(member(host, false));
            self.configuration += 1;
            self.started.insert(host);
        }
    }

    /// Records the true state of all paths.
    fn note_paths(&mut self) {
        let all: Vec<MemberId> = self.hosts.keys().copied().collect();
        for from in &all {
            for to in &all {
                let is_cut = !self.reaches(*from, *to);
                let now = self.now;
                let path = self.paths.entry((*from, *to)).or_default();
                match (is_cut, path.cut_since) {
                    (true, None) => path.cut_since = Some(now),
                    (false, Some(since)) => {
                        (path.cut_since, path.last) = (None, Some((now, now - since)));
                    }
                    _ => {}
                }
            }
        }
    }

    /// Whether the path was cut for nearly `LIMITS.after_seconds`, until now or a short time ago.
    fn was_cut_for_long(&self, from: MemberId, to: MemberId) -> bool {
        let slack = 3 * TICK;
        let enough = LIMITS.after_seconds - slack;
        let recent = OBSERVATION_LIFETIME.as_secs() + (MAX_DELAY + 3) * TICK;
        let path = self.paths.get(&(from, to)).copied().unwrap_or_default();
        let is_cut = path.cut_since.is_some_and(|since| self.now - since >= enough);
        let was_cut =
            path.last.is_some_and(|(end, length)| self.now - end <= recent && length >= enough);
        is_cut || was_cut
    }

    /// Carries out an agent's pending change, once it is due.
    fn act(&mut self, own: MemberId) {
        let host = self.hosts.get_mut(&own).expect("a host");
        let Some((due, _)) = &host.pending else { return };
        if *due > self.now {
            return;
        }
        let (_, pending) = host.pending.take().expect("just seen");
        if !self.has_quorum(own) {
            return;
        }
        match pending {
            Pending::Begin { new, revision, ended } => self.begin(own, new, revision, ended),
            Pending::GiveUp { operation } => self.give_up(operation),
            Pending::Step { configuration, .. } if configuration != self.configuration => {}
            Pending::Step { operation, step, .. } => self.take(own, operation, step),
        }
    }

    /// Counts a use. `ended` says how the policy had ended when the agent decided, if it had.
    fn begin(&mut self, own: MemberId, new: PolicyUse, revision: u64, ended: Option<&'static str>) {
        if revision != self.uses.1 && !self.is_off(Guard::CompareAndSwap) {
            return;
        }
        let (began_at, dead, fills_vacancy) = (new.began_at, new.member, new.fills_vacancy);
        let running = self.uses.0.under_way().is_some();
        if self.is_off(Guard::CompareAndSwap) && running {
            self.violation = Some("two replacements are under way".to_owned());
            return;
        }
        if self.uses.0.begin(new, began_at).is_err() {
            return;
        }
        self.uses.1 += 1;
        self.begun.push(self.now);
        self.check_beginning(own, dead, fills_vacancy, ended);
    }

    fn check_beginning(
        &mut self,
        own: MemberId,
        dead: MemberId,
        fills_vacancy: bool,
        ended: Option<&'static str>,
    ) {
        let voters = self.voters();
        let mut faults = Vec::new();
        if let Some(how) = ended {
            faults.push(format!("a policy that {how} has begun a replacement"));
        }
        let window = LIMITS.per_seconds - 2 * MAX_SKEW - (MAX_DELAY + 1) * TICK;
        let recent = self.begun.iter().filter(|at| **at + window > self.now).count();
        if recent > usize::from(LIMITS.at_most) {
            faults.push(format!("{recent} replacements have begun within the policy's time"));
        }
        if !fills_vacancy {
            let saw = voters.iter().filter(|from| self.was_cut_for_long(**from, dead)).count();
            if saw < voters.len() / 2 + 1 {
                faults.push(format!("{saw} of {} voters have missed the member", voters.len()));
            }
            // The leader's own connection to the member must have been cut for that time, too.
            if !self.was_cut_for_long(own, dead) {
                faults.push("the leader has not missed the member".to_owned());
            }
        }
        let slack = (MAX_DELAY + 3) * TICK;
        let was_away = |id: &&MemberId| {
            let path = self.paths.get(&(own, **id)).copied().unwrap_or_default();
            path.cut_since.is_some_and(|since| self.now - since > slack)
        };
        let away = voters.iter().filter(|id| **id != dead).filter(was_away).count();
        if away > 0 {
            faults.push(format!("{away} voters that stay were away, too"));
        }
        self.violation = self.violation.take().or_else(|| faults.into_iter().next());
    }

    fn end(&mut self, operation: OperationId, how: &str) {
        let policy_use = self.uses.0.of(&operation).cloned();
        let vacant = policy_use.is_some_and(|each| {
            how != "promoted" && self.removed_by.get(&each.member) == Some(&operation)
        });
        self.uses.0.end(&operation, how, vacant);
        self.uses.1 += 1;
        self.finished += u64::from(how == "promoted");
        for host in self.hosts.values_mut() {
            host.is_addition_refused = false;
        }
        self.waiting.retain(|(waits, _)| *waits != operation);
    }

    fn give_up(&mut self, operation: OperationId) {
        if self.uses.0.of(&operation).is_none_or(|each| each.ended.is_some()) {
            return;
        }
        let host = MemberId(u64::from_be_bytes(operation.0[..8].try_into().expect("8 bytes")));
        if self.members.of_id(host).is_some_and(|found| !found.is_learner) {
            return;
        }
        self.members.list.retain(|each| each.id != host);
        self.configuration += 1;
        self.end(operation, "stalled");
    }

    /// Carries out a step if etcd would allow it.
    fn take(&mut self, own: MemberId, operation: OperationId, step: ReplacementStep) {
        let host = MemberId(u64::from_be_bytes(operation.0[..8].try_into().expect("8 bytes")));
        if self.uses.0.of(&operation).is_none_or(|each| each.ended.is_some()) {
            return;
        }
        let voters = self.voters();
        let connected = voters.iter().filter(|id| self.reaches(own, **id)).count();
        match step {
            ReplacementStep::Add if self.members.of_id(host).is_some() => {}
            ReplacementStep::Add if connected < voters.len() => {
                self.hosts.get_mut(&own).expect("a host").is_addition_refused = true;
            }
            ReplacementStep::Add => {
                self.members.list.push(member(host, true));
                self.configuration += 1;
                self.learner_since.insert(host, self.now);
            }
            ReplacementStep::Promote(id) if self.reaches(own, id) => {
                if let Some(old) = self.uses.0.under_way().map(|each| each.member) {
                    self.check_still_dead(own, old, "replaced");
                }
                if let Some(found) = self.members.list.iter_mut().find(|each| each.id == id) {
                    found.is_learner = false;
                    self.configuration += 1;
                    found.name = format!("db-{id}");
                }
            }
            ReplacementStep::Remove(id) => {
                let stay = voters.iter().filter(|each| **each != id);
                let connected = stay.clone().filter(|each| self.reaches(own, **each)).count();
                if connected <= stay.count() / 2 || self.members.of_id(id).is_none() {
                    return;
                }
                if self.members.of_id(host).is_none_or(|found| found.is_learner) {
                    self.check_still_dead(own, id, "removed");
                }
                self.members.list.retain(|each| each.id != id);
                self.configuration += 1;
                self.removed_by.insert(id, operation);
            }
            ReplacementStep::GiveUp { .. } => self.give_up(operation),
            ReplacementStep::Done(_) => self.end(operation, "promoted"),
            _ => {}
        }
    }

    /// Records a violation if the member `old` came back long before its replacement took this
    /// step, for the leader or for so many voters that no quorum misses it. `lost` says what the
    /// step did to the member, as a word of a sentence. Once the newcomer votes, the old member is
    /// removed in any case.
    fn check_still_dead(&mut self, own: MemberId, old: MemberId, lost: &str) {
        if self.members.of_id(old).is_none() {
            return;
        }
        if !self.was_cut_lately(own, old, (MAX_DELAY + 4) * TICK) {
            self.violation = Some(format!("{old} was {lost} although it had come back"));
        }
        // The leader may see an observation's number as new a lifetime after it was written, and
        // counts it for another lifetime. The observer may have looked some time before.
        let slack = 2 * OBSERVATION_LIFETIME.as_secs() + (MAX_DELAY + 8) * TICK;
        let voters = self.voters();
        let others = voters.iter().filter(|from| **from != old);
        let missing = others.filter(|from| self.was_cut_lately(**from, old, slack)).count();
        if missing < voters.len() / 2 + 1 {
            let of = voters.len();
            self.violation =
                Some(format!("{old} was {lost} although only {missing} of {of} voters missed it"));
        }
    }

    /// Whether the path is cut, or was cut `slack` seconds ago or later.
    fn was_cut_lately(&self, from: MemberId, to: MemberId, slack: u64) -> bool {
        let path = self.paths.get(&(from, to)).copied().unwrap_or_default();
        path.cut_since.is_some() || path.last.is_some_and(|(end, _)| self.now - end <= slack)
    }

    fn start_newcomers(&mut self) {
        let learners: Vec<MemberId> =
            self.members.list.iter().filter(|each| each.is_learner).map(|each| each.id).collect();
        for host in learners {
            if self.is_alive(host) && self.random.one_in(3) {
                self.started.insert(host);
            }
        }
    }

    /// Runs one step of the whole system.
    fn tick(&mut self) {
        self.now += TICK;
        self.disturb();
        self.note_paths();
        self.start_newcomers();
        let able: Vec<MemberId> =
            self.voters().into_iter().filter(|host| self.has_quorum(*host)).collect();
        if self.leader.is_none_or(|leader| !able.contains(&leader)) || self.random.one_in(20) {
            self.leader = self.random.pick(&able);
        }
        self.run_agents();
        let voters = self.voters();
        let extra = usize::from(self.uses.0.under_way().is_some());
        if voters.len() > self.size + extra {
            self.violation.get_or_insert(format!("{} voters of {}", voters.len(), self.size));
        }
        if let Some(idle) = voters.iter().find(|voter| !self.started.contains(*voter)) {
            self.violation.get_or_insert(format!("{idle} votes and has never started"));
        }
    }

    /// Lets each agent look at the voters and make its pending change, and the leader's decide.
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
        }
    }

    /// Runs one history. Returns the violation, if there was one.
    fn run(mut self) -> Result<(u64, u64), String> {
        for tick in 1..=TICKS {
            self.tick();
            if let Some(violation) = self.violation.take() {
                return Err(format!("step {tick}: {violation}"));
            }
        }
        Ok((u64::try_from(self.begun.len()).unwrap_or(0), self.finished))
    }
}
