//! Fingerprint of a state in 128 bits. States that differ only by a permutation of hosts have equal
//! fingerprints.
//!
//! Hosts are ordered independently of their names. They are sorted by their own state and by what
//! others store about them. Among hosts that are still alike, the order with the smallest
//! fingerprint is used. Sets are summed over their members' fingerprints, so they need no order.

use formation_explored::agent::{DirectoryKind, Journal, LaunchState};
use formation_explored::memory::LedgerEntry;
use formation_explored::service::{Applicant, Cluster, EndCause, Phase, ProbeOutcome, Seating};
use formation_explored::{AgentKey, Hash, Incarnation};

use crate::explore::config::ExplorationConfig;
use crate::explore::database::{DatabaseState, Ledger};
use crate::explore::identities::{MAX_HOSTS, epoch_of, host_of, members_of, reimage_count_of};
use crate::explore::reductions::Relevance;
use crate::explore::state::{AgentMode, HostState, NOW, SystemState, is_from_clock_ahead};

/// State of a hash function, in two 64-bit halves. Each half multiplies its input and folds the
/// product.
#[derive(Clone, Copy)]
struct FingerprintHasher {
    one: u64,
    two: u64,
}

const ODD: [u64; 3] = [0x9e37_79b9_7f4a_7c15, 0xd6e8_feb8_6659_fd93, 0xa076_1d64_78bd_642f];

fn fold(a: u64, b: u64) -> u64 {
    let wide = u128::from(a) * u128::from(b);
    (wide >> 64) as u64 ^ wide as u64
}

impl FingerprintHasher {
    fn new(kind: u64) -> FingerprintHasher {
        let mut hasher = FingerprintHasher { one: ODD[0], two: ODD[1] };
        hasher.add_word(kind);
        hasher
    }

    fn add_word(&mut self, word: u64) {
        self.one = fold(self.one ^ word, ODD[1]).wrapping_add(ODD[2]);
        self.two = fold(self.two.rotate_left(23) ^ word.wrapping_mul(ODD[2]), ODD[0])
            ^ self.two.rotate_left(41);
    }

    fn flag(&mut self, flag: bool) {
        self.add_word(u64::from(flag));
    }

    fn sum(&mut self, parts: impl Iterator<Item = u128>) {
        let sum = parts.fold(0_u128, u128::wrapping_add);
        self.add_word(sum as u64);
        self.add_word((sum >> 64) as u64);
    }

    fn finish(self) -> u128 {
        let one = fold(self.one ^ ODD[2], ODD[0]) ^ self.two;
        let two = fold(self.two ^ ODD[1], ODD[2]).wrapping_add(self.one);
        u128::from(one) << 64 | u128::from(two)
    }
}

/// Index of each host in the order that doesn't depend on names.
type HostOrder = [u8; MAX_HOSTS];

/// Fingerprint of a state, with and without the numbers of faults left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fingerprint {
    /// Fingerprint of the whole state. Two states with the same value count as one.
    pub whole: u128,
    /// Fingerprint without the numbers of faults left. A fault that doesn't change this value had
    /// no effect, so the state after the fault needn't be explored.
    pub without_faults: u128,
}

/// Computes the fingerprint of a state.
#[must_use]
pub(super) fn fingerprint(system: &SystemState, config: &ExplorationConfig) -> Fingerprint {
    let without_faults = match system.followed_host {
        Some(at) => fingerprint_one_host(system, config, usize::from(at)),
        None => fingerprint_all_hosts(system, config),
    };
    Fingerprint { whole: add_faults_left(system, without_faults), without_faults }
}

fn fingerprint_all_hosts(system: &SystemState, config: &ExplorationConfig) -> u128 {
    let relevance = Relevance::new(system, config);
    let hosts = config.hosts;
    let unplaced: HostOrder = [255; MAX_HOSTS];
    let hash = |at: usize, known: &HostOrder| {
        hash_host(&OrderedView { system, relevance: &relevance, places: known }, at)
    };
    let mut hashes: Vec<(u128, usize)> = (0..hosts).map(|at| (hash(at, &unplaced), at)).collect();
    hashes.sort_unstable();
    // Second pass: two hosts that are still alike may relate differently to the hosts that the
    // first pass has told apart.
    let mut known = unplaced;
    for (place, &(hash, at)) in hashes.iter().enumerate() {
        let is_unique = hashes.iter().filter(|(other, _)| *other == hash).count() == 1;
        if is_unique {
            known[at] = u8::try_from(place).unwrap_or(254);
        }
    }
    if known[..hosts].contains(&255) {
        for (first, at) in &mut hashes {
            let second = if known[*at] == 255 { hash(*at, &known) } else { 0 };
            *first = (*first & !0xffff_ffff) | (second & 0xffff_ffff);
        }
        hashes.sort_unstable();
    }
    smallest_fingerprint(system, &relevance, &hashes)
}

/// Returns the fingerprint of the only host that is still followed: its own state, and the messages
/// that it may still see.
fn fingerprint_one_host(system: &SystemState, config: &ExplorationConfig, at: usize) -> u128 {
    let relevance = Relevance::new(system, config);
    // The names of the other hosts don't matter, only that they differ. Number them in the order of
    // the member list that the cluster has decided.
    let mut places: HostOrder = [255; MAX_HOSTS];
    places[at] = 0;
    let mut next = 1;
    for key in system.sent.documents.iter().flat_map(|&h| members_of(h)) {
        if places[host_of(key)] == 255 {
            places[host_of(key)] = next;
            next += 1;
        }
    }
    let view = OrderedView { system, relevance: &relevance, places: &places };
    let mut hasher = FingerprintHasher::new(9);
    view.host(&mut hasher, &system.hosts[at]);
    hasher.sum(system.sent.documents.iter().map(|&h| u128::from(list_number(h, &places))));
    let own = system.hosts[at].journal.as_ref().map(|journal| journal.incarnation);
    hasher.flag(own.is_some_and(|own| system.sent.started.contains_key(&own)));
    hasher.add_word(system.sent.epoch);
    hasher.flag(system.sent.abandoned);
    hasher.finish()
}

fn add_faults_left(system: &SystemState, without: u128) -> u128 {
    let mut hasher = FingerprintHasher::new(10);
    hasher.add_word(without as u64);
    hasher.add_word((without >> 64) as u64);
    let left = &system.faults_left;
    for count in [
        left.restores,
        left.lost_directories,
        left.reimages,
        left.deaths,
        left.kills,
        left.clones,
        left.pauses,
        left.timeouts,
        left.cluster_ends,
        left.retirements,
        left.reopenings,
        left.accepts,
        left.overlaps,
        left.crashes,
        left.ledger_rollbacks,
        left.losses,
        left.forgets,
        left.links,
        left.clock_jumps,
        system.total_faults_left,
    ] {
        hasher.add_word(u64::from(count));
    }
    hasher.finish()
}

/// Returns the smallest fingerprint over the orders of hosts that look alike. It tries up to 24
/// orders. If there are more, it uses the first order: some symmetric states then count twice, and
/// nothing else is lost.
fn smallest_fingerprint(
    system: &SystemState,
    relevance: &Relevance<'_>,
    hashes: &[(u128, usize)],
) -> u128 {
    let mut best = u128::MAX;
    let mut orders = vec![hashes.iter().map(|&(_, at)| at).collect::<Vec<usize>>()];
    let mut from = 0;
    while from < hashes.len() {
        let alike = hashes[from..].iter().take_while(|(hash, _)| *hash == hashes[from].0).count();
        let are_interchangeable =
            hashes[from..from + alike].iter().all(|&(_, at)| is_interchangeable(system, at));
        let permutations: usize = (1..=alike).product();
        if alike > 1 && !are_interchangeable && orders.len() * permutations <= 24 {
            orders = orders.iter().flat_map(|order| permuted(order, from, alike)).collect();
        }
        from += alike;
    }
    for order in orders {
        let mut places: HostOrder = [0; MAX_HOSTS];
        for (place, &at) in order.iter().enumerate() {
            places[at] = u8::try_from(place).unwrap_or(254);
        }
        best = best.min(OrderedView { system, relevance, places: &places }.whole(&order));
    }
    best
}

/// Returns whether the host has never joined and its links are all up. Such hosts are
/// interchangeable.
fn is_interchangeable(system: &SystemState, at: usize) -> bool {
    let host = &system.hosts[at];
    host.journal.is_none() && host.reimage_count == 0 && system.links.are_all_up_at(at)
}

fn permuted(order: &[usize], from: usize, count: usize) -> Vec<Vec<usize>> {
    if count <= 1 {
        return vec![order.to_vec()];
    }
    let swapped = |with: usize| {
        let mut order = order.to_vec();
        order.swap(from, from + with);
        permuted(&order, from + 1, count - 1)
    };
    (0..count).flat_map(swapped).collect()
}

/// View of a state with its hosts in some order. It leaves out what can make no difference any
/// more.
#[derive(Clone, Copy)]
struct OrderedView<'a> {
    system: &'a SystemState,
    relevance: &'a Relevance<'a>,
    places: &'a HostOrder,
}

/// Returns a hash of a host's state and of what others store about it, without its name.
fn hash_host(view: &OrderedView<'_>, at: usize) -> u128 {
    let system = view.system;
    let mut hasher = FingerprintHasher::new(1);
    let mut own = *view.places;
    own[at] = 254;
    let own = &own;
    let view = OrderedView { places: own, ..*view };
    view.host(&mut hasher, &system.hosts[at]);
    let mine = |key: &AgentKey| host_of(*key) == at;
    view.links(&mut hasher, |from, to| from == at || to == at);
    for database in [Some(&system.database), system.backup.as_ref()].into_iter().flatten() {
        let cluster = &database.cluster;
        let agents = cluster.agents.iter().filter(|(key, _)| mine(key));
        hasher.sum(agents.map(|(key, each)| view.agent(*key, each)));
        if let Some(frozen) = &cluster.frozen {
            hasher.add_word(list_number(frozen.proposal_hash, own));
            hasher.add_word(frozen.acks.keys().filter(|key| mine(key)).count() as u64);
            let red = frozen.probes.values().filter(|row| {
                row.iter().any(|(peer, probe)| mine(peer) && *probe != ProbeOutcome::Reached)
            });
            hasher.add_word(red.count() as u64);
            hasher.add_word(frozen.probes.keys().filter(|key| mine(key)).count() as u64);
        }
    }
    let acks = view.acks().filter(|(key, _)| mine(key));
    hasher.sum(acks.map(|(key, h)| hash_pair(key, list_number(h, own), own)));
    let releases = system.sent.releases.iter().filter(|(key, _)| mine(key));
    hasher.sum(releases.map(|(key, &e)| hash_pair(*key, e, own)));
    hasher.sum(view.relevance.proposals().iter().map(|h| u128::from(list_number(*h, own))));
    hasher.finish()
}

impl OrderedView<'_> {
    fn whole(&self, order: &[usize]) -> u128 {
        let (system, places) = (self.system, self.places);
        let mut hasher = FingerprintHasher::new(2);
        self.database(&mut hasher, &system.database);
        match &system.backup {
            None => hasher.add_word(0),
            Some(backup) => self.database(&mut hasher, backup),
        }
        if self.relevance.are_ledgers_read {
            self.processes(&mut hasher);
        }
        for &at in order {
            self.host(&mut hasher, &system.hosts[at]);
        }
        self.links(&mut hasher, |_, _| true);
        hasher.flag(system.is_ahead);
        let sent = &system.sent;
        hasher.add_word(sent.epoch);
        hasher.flag(sent.abandoned);
        hasher.sum(self.relevance.proposals().iter().map(|h| u128::from(list_number(*h, places))));
        for set in [&sent.committed, &sent.documents] {
            hasher.sum(set.iter().map(|h| u128::from(list_number(*h, places))));
        }
        hasher.sum(self.acks().map(|(key, h)| hash_pair(key, list_number(h, places), places)));
        hasher.sum(sent.releases.iter().map(|(key, &epoch)| hash_pair(*key, epoch, places)));
        hasher.sum(sent.started.iter().map(|(incarnation, h)| {
            let whose = (incarnation.0 >> 8) as usize;
            let mut hasher = FingerprintHasher::new(4);
            hasher.add_word(u64::from(places[whose]));
            hasher.add_word((incarnation.0 & 0xff) as u64);
            hasher.add_word(list_number(*h, places));
            hasher.finish()
        }));
        if self.relevance.late {
            hasher.sum(sent.past.iter().map(|past| self.hash_late_message(past)));
        }
        hasher.finish()
    }

    /// Adds to the hash the links that are down, as far as `which` selects them.
    fn links(&self, hasher: &mut FingerprintHasher, which: impl Fn(usize, usize) -> bool) {
        let name = |host: usize| u64::from(self.places[host]);
        let down = self.system.links.down().filter(|&(from, to)| which(from, to));
        hasher.sum(down.map(|(from, to)| {
            let mut hasher = FingerprintHasher::new(11);
            hasher.add_word(name(from) << 8 | name(to));
            hasher.finish()
        }));
    }

    /// Adds the databases and the states of both processes to the hash. The states are summed, so
    /// the processes' indexes make no difference.
    fn processes(&self, hasher: &mut FingerprintHasher) {
        let (system, places) = (self.system, self.places);
        for database in [Some(&system.database), system.backup.as_ref()].into_iter().flatten() {
            hasher.add_word(
                u64::from(database.identity) << 32 | u64::from(database.recorded_identity),
            );
            hasher.add_word(database.generation);
            hasher.flag(database.settled);
            decisions(hasher, &database.decisions, places);
        }
        hasher.sum(system.processes.iter().enumerate().map(|(at, process)| {
            let mut hasher = FingerprintHasher::new(3);
            hasher.flag(process.connected);
            hasher.flag(process.is_lost);
            for database in [Some(&system.database), system.backup.as_ref()].into_iter().flatten() {
                let row = database.rows[at];
                hasher.add_word(row.entries);
                hasher.add_word(row.sweep_count);
                hasher.flag(row.has_restored_ledger);
                hasher.flag(row.is_forgotten);
            }
            ledger(&mut hasher, &process.ledger, places);
            if system.faults_left.ledger_rollbacks > 0 {
                hasher.flag(process.saved.is_some());
                process.saved.iter().for_each(|saved| ledger(&mut hasher, saved, places));
            }
            match &process.read {
                None => hasher.add_word(0),
                Some(read) => self.database(&mut hasher, read),
            }
            hasher.finish()
        }));
    }

    /// Returns the acks that the service may still take.
    fn acks(&self) -> impl Iterator<Item = (AgentKey, Hash)> {
        self.system.sent.acks.iter().copied().filter(|(_, h)| self.relevance.is_ack_alive(*h))
    }

    /// Hashes the last message of an agent that no longer exists.
    fn hash_late_message(&self, journal: &Journal) -> u128 {
        let mut hasher = FingerprintHasher::new(5);
        hasher.add_word(key_number(journal.key, self.places));
        hasher.flag(journal.record.is_some());
        hasher.add_word(journal.highest_epoch());
        if self.relevance.are_boots_relevant {
            hasher.add_word(journal.boot);
        }
        hasher.finish()
    }
}

fn ledger(hasher: &mut FingerprintHasher, ledger: &Ledger, places: &HostOrder) {
    decisions(hasher, ledger.entry.as_slice(), places);
    let Some(known) = &ledger.position else { return hasher.add_word(0) };
    hasher.add_word(u64::from(known.identity) + 1);
    hasher.add_word(known.generation);
    hasher.add_word(known.sweep_count);
    decisions(hasher, &known.copied_decisions, places);
}

fn decisions(hasher: &mut FingerprintHasher, decisions: &[LedgerEntry], places: &HostOrder) {
    hasher.add_word(decisions.len() as u64);
    for decision in decisions {
        hasher.add_word(match decision {
            LedgerEntry::Commit { h, document } => list_number(*h, places) ^ u64::from(*document),
            LedgerEntry::End(cause) => end_number(*cause),
        });
    }
}

fn end_number(cause: EndCause) -> u64 {
    match cause {
        EndCause::Abandon => 1,
        EndCause::DatabaseAccepted => 2,
        EndCause::Deadline => 3,
        EndCause::Retire => 4,
    }
}

fn key_number(key: AgentKey, places: &HostOrder) -> u64 {
    u64::from(places[host_of(key)]) << 8 | u64::from(reimage_count_of(key))
}

/// Folds a list of members into 64 bits: its epoch, and the host and re-image count of each seat.
fn list_number(h: Hash, places: &HostOrder) -> u64 {
    members_of(h).fold(epoch_of(h).wrapping_mul(ODD[2]) | 1, |sum, key| {
        fold(sum ^ (key_number(key, places) + 1), ODD[0]).wrapping_add(ODD[1])
    })
}

fn hash_pair(key: AgentKey, value: u64, places: &HostOrder) -> u128 {
    let mut hasher = FingerprintHasher::new(6);
    hasher.add_word(key_number(key, places));
    hasher.add_word(value);
    hasher.finish()
}

impl OrderedView<'_> {
    fn database(&self, hasher: &mut FingerprintHasher, database: &DatabaseState) {
        let (cluster, places) = (&database.cluster, self.places);
        hasher.add_word(phase_number(cluster.phase));
        hasher.add_word(cluster.epoch);
        hasher.add_word(cluster.floor);
        hasher.flag(cluster.is_unsettled);
        hasher.flag(cluster.deadline > NOW);
        hasher.add_word(cluster.ended.as_ref().map_or(0, |ended| end_number(ended.cause)));
        hasher.add_word(cluster.split.as_ref().map_or(0, |split| list_number(split.other, places)));
        hasher.sum(cluster.agents.iter().map(|(key, each)| self.agent(*key, each)));
        hasher.sum(cluster.reports.keys().map(|key| hash_pair(*key, 1, places)));
        self.frozen(hasher, cluster);
    }

    fn frozen(&self, hasher: &mut FingerprintHasher, cluster: &Cluster) {
        let places = self.places;
        let Some(frozen) = &cluster.frozen else { return hasher.add_word(0) };
        hasher.add_word(list_number(frozen.proposal_hash, places));
        hasher.flag(is_from_clock_ahead(frozen.at));
        hasher.sum(frozen.acks.keys().map(|key| hash_pair(*key, 1, places)));
        hasher.sum(frozen.probes.iter().map(|(prober, row)| {
            let reached = |probe: &ProbeOutcome| u64::from(*probe == ProbeOutcome::Reached);
            let mut hasher = FingerprintHasher::new(7);
            hasher.add_word(key_number(*prober, places));
            hasher.sum(row.iter().map(|(peer, probe)| hash_pair(*peer, reached(probe), places)));
            hasher.finish()
        }));
    }

    fn agent(&self, key: AgentKey, agent: &Applicant) -> u128 {
        let mut hasher = FingerprintHasher::new(8);
        hasher.add_word(key_number(key, self.places));
        hasher.add_word(match agent.seating {
            Seating::Absent => 0,
            Seating::Seat(seat) => 1 << 8 | u64::from(seat),
            Seating::Standby(order) => 2 << 8 | order,
        });
        for until in [agent.lease_until, agent.backoff_until] {
            hasher.add_word(u64::from(until > NOW) + u64::from(is_from_clock_ahead(until)));
        }
        hasher.add_word(u64::from(agent.failed_lists));
        hasher.add_word(agent.highest_epoch);
        hasher.add_word(agent.release.as_ref().map_or(0, |release| release.epoch));
        if self.relevance.are_boots_relevant {
            hasher.add_word(agent.session.map_or(0, |session| session.boot));
        }
        hasher.finish()
    }

    fn host(&self, hasher: &mut FingerprintHasher, host: &HostState) {
        let places = self.places;
        hasher.flag(host.alive);
        hasher.add_word(u64::from(host.reimage_count));
        if !host.alive && self.relevance.ignores_dead_hosts {
            // Of a dead host, only its last message matters: nothing reads its disk any more.
            if let (Some(journal), true) = (&host.journal, self.relevance.late) {
                let word = self.hash_late_message(journal);
                hasher.add_word(word as u64);
                hasher.add_word((word >> 64) as u64);
            }
            return;
        }
        hasher.add_word(match host.mode {
            AgentMode::Running => 0,
            AgentMode::InspectingDirectory => 1,
            AgentMode::WritingMarker => 2,
            AgentMode::LaunchingNode => 3,
            AgentMode::AwaitingReplacement => 4,
            AgentMode::RefusingDirectory => 5,
            AgentMode::Stopped(exit) => 16 | u64::from(exit),
        });
        hasher.add_word(host.running_list.map_or(0, |h| list_number(h, places)));
        hasher.flag(host.data_lost);
        self.directory(hasher, host);
        match &host.journal {
            None => hasher.add_word(0),
            Some(own) => self.journal(hasher, own),
        }
        match &host.journal_before_change {
            None => hasher.add_word(0),
            Some(None) => hasher.add_word(1),
            Some(Some(before)) => self.journal(hasher, before),
        }
    }

    /// Adds the directory's class and marker to the hash. Agents know a directory only by the class
    /// that the production code derives from its listing.
    fn directory(&self, hasher: &mut FingerprintHasher, host: &HostState) {
        let marker = |whose: Incarnation| {
            u64::from(self.places[(whose.0 >> 8) as usize]) << 8 | (whose.0 & 0xff) as u64 | 1 << 20
        };
        hasher.add_word(match self.relevance.directory(host) {
            DirectoryKind::Blank => 1,
            DirectoryKind::Marked(whose) => 2 | marker(whose) << 3,
            DirectoryKind::Log(whose) => 3 | whose.map_or(0, marker) << 3,
            DirectoryKind::Tombstone => 4,
            DirectoryKind::Foreign(_) => 5,
        });
        hasher.flag(host.directory.marker.is_some());
    }

    fn journal(&self, hasher: &mut FingerprintHasher, journal: &Journal) {
        let places = self.places;
        hasher.add_word(key_number(journal.key, places));
        if self.relevance.are_boots_relevant {
            hasher.add_word(journal.boot);
        }
        hasher.add_word(journal.released_epoch);
        hasher.add_word(journal.highest_epoch());
        hasher.flag(journal.record.is_some());
        for (&epoch, signed_list) in &journal.signed_lists {
            if self.relevance.is_bound_alive(self.system, journal, epoch, signed_list) {
                hasher.add_word(epoch);
                hasher.add_word(list_number(signed_list.proposal_hash, places));
            }
        }
        hasher.add_word(
            journal
                .held_document
                .as_ref()
                .map_or(0, |held| list_number(held.proposal_hash, places)),
        );
        hasher.add_word(match journal.launch_state {
            LaunchState::NotStarted => 0,
            LaunchState::Launching => 1,
            LaunchState::Ran => 2,
        });
        hasher.flag(journal.is_removed);
    }
}

fn phase_number(phase: Phase) -> u64 {
    match phase {
        Phase::Open => 0,
        Phase::Preparing => 1,
        Phase::Committed => 2,
        Phase::Formed => 3,
        Phase::Expired => 4,
        Phase::Abandoned => 5,
        Phase::Retired => 6,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::explore::actions::SystemAction;
    use crate::explore::apply::apply;

    fn after(config: &ExplorationConfig, actions: &[SystemAction]) -> SystemState {
        let mut system = SystemState::new(config);
        for action in actions {
            system = apply(&system, config, action).expect("nothing is violated here");
        }
        system
    }

    #[test]
    fn two_states_that_differ_in_names_only_have_one_fingerprint() {
        let config = ExplorationConfig::sound("symmetry", 2, 4);
        let one =
            after(&config, &[SystemAction::Join(0), SystemAction::Join(1), SystemAction::Join(2)]);
        let other =
            after(&config, &[SystemAction::Join(3), SystemAction::Join(2), SystemAction::Join(0)]);
        assert_ne!(one, other);
        assert_eq!(fingerprint(&one, &config), fingerprint(&other, &config));
    }

    #[test]
    fn two_states_that_differ_in_who_signed_have_two_fingerprints() {
        let config = ExplorationConfig::sound("difference", 2, 2);
        let frozen = after(&config, &[SystemAction::Join(0), SystemAction::Join(1)]);
        let h =
            frozen.database.cluster.frozen.as_ref().expect("two seats are two hosts").proposal_hash;
        let first = apply(&frozen, &config, &SystemAction::ExamineList(0, h)).expect("sound");
        let second = apply(&frozen, &config, &SystemAction::ExamineList(1, h)).expect("sound");
        assert_ne!(fingerprint(&frozen, &config), fingerprint(&first, &config));
        assert_ne!(
            fingerprint(&first, &config),
            fingerprint(&second, &config),
            "seat 1 is not seat 2"
        );
    }
}
