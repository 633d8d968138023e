//! 128 bits that stand for a state, the same for states that differ only in which host is which.
//!
//! Hosts are put in an order that doesn't depend on their names: by what each of them is and where
//! it stands, and then, among those that are still alike, by whichever order gives the smallest
//! fingerprint. Sets are summed over their members' fingerprints, so they need no order.

use formation_explored::agent::{Journal, Start};
use formation_explored::service::{Agent, Cluster, EndCause, Phase, Place, Probe};
use formation_explored::{Hash, KeyId};

use crate::explore::identity::{HOSTS, epoch_of, host_of, life_of, members_of};
use crate::explore::world::{Database, Host, Mode, NOW, World};

/// Two lanes of multiply-and-fold.
#[derive(Clone, Copy)]
struct Mix {
    one: u64,
    two: u64,
}

const ODD: [u64; 3] = [0x9e37_79b9_7f4a_7c15, 0xd6e8_feb8_6659_fd93, 0xa076_1d64_78bd_642f];

fn fold(a: u64, b: u64) -> u64 {
    let wide = u128::from(a) * u128::from(b);
    (wide >> 64) as u64 ^ wide as u64
}

impl Mix {
    fn new(kind: u64) -> Mix {
        let mut mix = Mix { one: ODD[0], two: ODD[1] };
        mix.word(kind);
        mix
    }

    fn word(&mut self, word: u64) {
        self.one = fold(self.one ^ word, ODD[1]).wrapping_add(ODD[2]);
        self.two = fold(self.two.rotate_left(23) ^ word.wrapping_mul(ODD[2]), ODD[0])
            ^ self.two.rotate_left(41);
    }

    fn flag(&mut self, flag: bool) {
        self.word(u64::from(flag));
    }

    fn sum(&mut self, parts: impl Iterator<Item = u128>) {
        let sum = parts.fold(0_u128, u128::wrapping_add);
        self.word(sum as u64);
        self.word((sum >> 64) as u64);
    }

    fn done(self) -> u128 {
        let one = fold(self.one ^ ODD[2], ODD[0]) ^ self.two;
        let two = fold(self.two ^ ODD[1], ODD[2]).wrapping_add(self.one);
        u128::from(one) << 64 | u128::from(two)
    }
}

/// Host → its place in the common order.
type Order = [u8; HOSTS];

/// The state's fingerprint.
#[must_use]
pub fn fingerprint(world: &World, hosts: usize) -> u128 {
    let blind: Order = [255; HOSTS];
    let mut signs: Vec<(u128, usize)> =
        (0..hosts).map(|at| (sign(world, at, &blind), at)).collect();
    signs.sort_unstable();
    // A second look: who is alike may stand differently to those that aren't.
    let mut known = blind;
    for (place, &(sign, at)) in signs.iter().enumerate() {
        let alone = signs.iter().filter(|(other, _)| *other == sign).count() == 1;
        if alone {
            known[at] = u8::try_from(place).unwrap_or(254);
        }
    }
    if known[..hosts].contains(&255) {
        for (first, at) in &mut signs {
            let second = if known[*at] == 255 { sign(world, *at, &known) } else { 0 };
            *first = (*first & !0xffff_ffff) | (second & 0xffff_ffff);
        }
        signs.sort_unstable();
    }
    smallest(world, &signs)
}

/// The smallest fingerprint over the orders of hosts that look alike, up to 24 of them; beyond
/// that the first order, which loses some symmetry and nothing else.
fn smallest(world: &World, signs: &[(u128, usize)]) -> u128 {
    let mut best = u128::MAX;
    let mut orders = vec![signs.iter().map(|&(_, at)| at).collect::<Vec<usize>>()];
    let mut from = 0;
    while from < signs.len() {
        let alike = signs[from..].iter().take_while(|(sign, _)| *sign == signs[from].0).count();
        let untouched = signs[from..from + alike].iter().all(|&(_, at)| is_untouched(world, at));
        let ways: usize = (1..=alike).product();
        if alike > 1 && !untouched && orders.len() * ways <= 24 {
            orders = orders.iter().flat_map(|order| permuted(order, from, alike)).collect();
        }
        from += alike;
    }
    for order in orders {
        let mut places: Order = [0; HOSTS];
        for (place, &at) in order.iter().enumerate() {
            places[at] = u8::try_from(place).unwrap_or(254);
        }
        best = best.min(whole(world, &order, &places));
    }
    best
}

/// A host that nobody has ever heard of.
fn is_untouched(world: &World, at: usize) -> bool {
    world.hosts[at].journal.is_none() && world.hosts[at].life == 0
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

/// What a host is and where it stands, without its name.
fn sign(world: &World, at: usize, known: &Order) -> u128 {
    let mut mix = Mix::new(1);
    let mut own = *known;
    own[at] = 254;
    host(&mut mix, &world.hosts[at], &own);
    let mine = |key: &KeyId| host_of(*key) == at;
    for database in [Some(&world.database), world.backup.as_ref()].into_iter().flatten() {
        let cluster = &database.cluster;
        mix.sum(
            cluster.agents.iter().filter(|(key, _)| mine(key)).map(|(key, a)| agent(*key, a, &own)),
        );
        if let Some(frozen) = &cluster.frozen {
            mix.word(list(frozen.h, &own));
            mix.word(frozen.acks.keys().filter(|key| mine(key)).count() as u64);
            let red = frozen.probes.values().filter(|row| {
                row.iter().any(|(peer, probe)| mine(peer) && *probe != Probe::Reached)
            });
            mix.word(red.count() as u64);
            mix.word(frozen.probes.keys().filter(|key| mine(key)).count() as u64);
        }
    }
    let said = &world.said;
    mix.sum(
        said.acks
            .iter()
            .filter(|(key, _)| mine(key))
            .map(|(key, h)| pair(*key, list(*h, &own), &own)),
    );
    mix.sum(said.releases.iter().filter(|(key, _)| mine(key)).map(|(key, &e)| pair(*key, e, &own)));
    mix.sum(said.proposals.iter().map(|h| u128::from(list(*h, &own))));
    mix.done()
}

fn whole(world: &World, order: &[usize], places: &Order) -> u128 {
    let mut mix = Mix::new(2);
    database(&mut mix, &world.database, places);
    match &world.backup {
        None => mix.word(0),
        Some(backup) => database(&mut mix, backup, places),
    }
    // Which process is which doesn't matter either.
    mix.sum(world.processes.iter().enumerate().map(|(at, process)| {
        let mut mix = Mix::new(3);
        mix.flag(process.connected);
        mix.flag(world.database.compared[at]);
        mix.sum(process.ledger.iter().map(|h| u128::from(list(*h, places))));
        match &process.read {
            None => mix.word(0),
            Some(read) => database(&mut mix, read, places),
        }
        mix.done()
    }));
    for &at in order {
        host(&mut mix, &world.hosts[at], places);
    }
    let said = &world.said;
    let lists = |set: &std::collections::BTreeSet<Hash>| {
        set.iter().map(|h| u128::from(list(*h, places))).fold(0_u128, u128::wrapping_add)
    };
    mix.word(said.epoch);
    mix.flag(said.abandoned);
    for set in [&said.proposals, &said.committed, &said.documents] {
        mix.sum([lists(set)].into_iter());
    }
    mix.sum(said.acks.iter().map(|(key, h)| pair(*key, list(*h, places), places)));
    mix.sum(said.releases.iter().map(|(key, &epoch)| pair(*key, epoch, places)));
    mix.sum(said.started.iter().map(|(incarnation, h)| {
        let whose = (incarnation.0 >> 8) as usize;
        let mut mix = Mix::new(4);
        mix.word(u64::from(places[whose]));
        mix.word((incarnation.0 & 0xff) as u64);
        mix.word(list(*h, places));
        mix.done()
    }));
    mix.sum(said.past.iter().map(|past| {
        let mut mix = Mix::new(5);
        journal(&mut mix, past, places);
        mix.done()
    }));
    let left = &world.left;
    for count in [
        left.restores,
        left.lost_directories,
        left.remakes,
        left.deaths,
        left.kills,
        left.clones,
        left.pauses,
        left.timeouts,
        left.ends,
        left.accepts,
        left.overlaps,
        left.crashes,
    ] {
        mix.word(u64::from(count));
    }
    mix.done()
}

fn name(key: KeyId, places: &Order) -> u64 {
    u64::from(places[host_of(key)]) << 8 | u64::from(life_of(key))
}

/// A list in 64 bits: epoch, then place and life of each seat.
fn list(h: Hash, places: &Order) -> u64 {
    members_of(h).fold(epoch_of(h).wrapping_mul(ODD[2]) | 1, |sum, key| {
        fold(sum ^ (name(key, places) + 1), ODD[0]).wrapping_add(ODD[1])
    })
}

fn pair(key: KeyId, value: u64, places: &Order) -> u128 {
    let mut mix = Mix::new(6);
    mix.word(name(key, places));
    mix.word(value);
    mix.done()
}

fn database(mix: &mut Mix, database: &Database, places: &Order) {
    let cluster = &database.cluster;
    mix.word(phase(cluster.phase));
    mix.word(cluster.epoch);
    mix.word(cluster.floor);
    mix.flag(cluster.unsettled);
    mix.flag(cluster.deadline > NOW);
    mix.word(cluster.ended.as_ref().map_or(0, |ended| match ended.cause {
        EndCause::Abandon => 1,
        EndCause::DatabaseAccepted => 2,
        EndCause::Deadline => 3,
        EndCause::Retire => 4,
    }));
    mix.word(cluster.split.as_ref().map_or(0, |split| list(split.other, places)));
    mix.sum(cluster.agents.iter().map(|(key, each)| agent(*key, each, places)));
    mix.sum(cluster.reports.keys().map(|key| pair(*key, 1, places)));
    frozen(mix, cluster, places);
}

fn frozen(mix: &mut Mix, cluster: &Cluster, places: &Order) {
    let Some(frozen) = &cluster.frozen else { return mix.word(0) };
    mix.word(list(frozen.h, places));
    mix.sum(frozen.acks.keys().map(|key| pair(*key, 1, places)));
    mix.sum(frozen.probes.iter().map(|(prober, row)| {
        let mut mix = Mix::new(7);
        mix.word(name(*prober, places));
        mix.sum(
            row.iter()
                .map(|(peer, probe)| pair(*peer, u64::from(*probe == Probe::Reached), places)),
        );
        mix.done()
    }));
}

fn agent(key: KeyId, agent: &Agent, places: &Order) -> u128 {
    let mut mix = Mix::new(8);
    mix.word(name(key, places));
    mix.word(match agent.place {
        Place::Absent => 0,
        Place::Seat(seat) => 1 << 8 | u64::from(seat),
        Place::Standby(order) => 2 << 8 | order,
    });
    mix.flag(agent.lease_until > NOW);
    mix.flag(agent.held_until > NOW);
    mix.word(u64::from(agent.counts));
    mix.word(agent.highest_epoch);
    mix.word(agent.session.map_or(0, |session| session.boot));
    mix.word(agent.release.as_ref().map_or(0, |release| release.epoch));
    mix.done()
}

fn host(mix: &mut Mix, host: &Host, places: &Order) {
    mix.flag(host.alive);
    mix.flag(host.reachable);
    mix.word(u64::from(host.life));
    mix.word(match host.mode {
        Mode::Runs => 0,
        Mode::Looks => 1,
        Mode::Marks => 2,
        Mode::Launches => 3,
        Mode::WantsReplacement => 4,
        Mode::Refuses => 5,
        Mode::Stopped(exit) => 16 | u64::from(exit),
    });
    mix.word(host.node.map_or(0, |h| list(h, places)));
    mix.flag(host.data_lost);
    mix.flag(host.directory.log);
    mix.word(host.directory.entries.len() as u64);
    mix.word(host.directory.marker.map_or(0, |whose| {
        u64::from(places[(whose.0 >> 8) as usize]) << 8 | (whose.0 & 0xff) as u64 | 1 << 20
    }));
    match &host.journal {
        None => mix.word(0),
        Some(own) => journal(mix, own, places),
    }
    match &host.unsynced {
        None => mix.word(0),
        Some(None) => mix.word(1),
        Some(Some(before)) => journal(mix, before, places),
    }
}

fn journal(mix: &mut Mix, journal: &Journal, places: &Order) {
    mix.word(name(journal.key, places));
    mix.word(journal.boot);
    mix.word(journal.released);
    mix.flag(journal.record.is_some());
    for (&epoch, bound) in &journal.bound {
        mix.word(epoch);
        mix.word(list(bound.h, places));
    }
    mix.word(journal.held.as_ref().map_or(0, |held| list(held.h, places)));
    mix.word(match journal.start {
        Start::NotYet => 0,
        Start::Launching => 1,
        Start::Ran => 2,
    });
    mix.flag(journal.tombstone);
}

fn phase(phase: Phase) -> u64 {
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
    use crate::explore::actions::Action;
    use crate::explore::apply::apply;
    use crate::explore::config::Config;

    fn after(config: &Config, actions: &[Action]) -> World {
        let mut world = World::new(config);
        for action in actions {
            world = apply(&world, config, action).expect("nothing is violated here");
        }
        world
    }

    #[test]
    fn two_states_that_differ_in_names_only_have_one_fingerprint() {
        let config = Config::sound("symmetry", 2, 4);
        let one = after(&config, &[Action::Join(0), Action::Join(1), Action::Join(2)]);
        let other = after(&config, &[Action::Join(3), Action::Join(2), Action::Join(0)]);
        assert_ne!(one, other);
        assert_eq!(fingerprint(&one, 4), fingerprint(&other, 4));
    }

    #[test]
    fn two_states_that_differ_in_who_signed_have_two_fingerprints() {
        let config = Config::sound("difference", 2, 2);
        let frozen = after(&config, &[Action::Join(0), Action::Join(1)]);
        let h = frozen.database.cluster.frozen.as_ref().expect("two seats are two hosts").h;
        let first = apply(&frozen, &config, &Action::Consider(0, h)).expect("sound");
        let second = apply(&frozen, &config, &Action::Consider(1, h)).expect("sound");
        assert_ne!(fingerprint(&frozen, 2), fingerprint(&first, 2));
        assert_ne!(fingerprint(&first, 2), fingerprint(&second, 2), "seat 1 is not seat 2");
    }
}
