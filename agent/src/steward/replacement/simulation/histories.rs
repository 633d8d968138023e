//! Histories that the simulation runs, and one that is played step by step.

use super::*;

#[test]
#[allow(clippy::print_stdout, reason = "the extent of the search, for the one who runs it")]
fn no_history_replaces_a_member_against_the_policy() {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let from = number("POLICY_FROM").unwrap_or(0);
    let histories = number("POLICY_HISTORIES").unwrap_or(HISTORIES);
    let (mut begun, mut finished) = (0, 0);
    for seed in from..from + histories {
        match Simulation::new(seed, &[]).run() {
            Ok((began, done)) => (begun, finished) = (begun + began, finished + done),
            Err(violation) => panic!("seed {seed}: {violation}"),
        }
    }
    let steps = histories * TICKS;
    println!(
        "{histories} histories from seed {from}, {steps} steps: {begun} begun, {finished} done"
    );
    // The test means nothing unless enough replacements begin and finish.
    assert!(begun > histories && finished > histories / 2, "{begun} begun, {finished} finished");
}

#[test]
#[allow(clippy::print_stdout, reason = "what was found, for the one who runs it")]
fn without_a_guard_the_simulation_finds_a_violation() {
    for (off, watched) in GUARDS {
        let found = (0..HISTORIES_TO_FIND).find_map(|seed| {
            let simulation = Simulation { watched: Some(watched), ..Simulation::new(seed, off) };
            Some((seed, simulation.run().err()?))
        });
        let Some((seed, violation)) = found else {
            panic!("without {off:?}, nothing violates {watched:?}")
        };
        println!("without {off:?}: seed {seed}, {violation}");
    }
}

/// Makes a quiet cluster whose last voter is dead, with a newcomer that waits.
fn with_a_death(size: usize, node: NodeKind, seed: u64) -> Simulation {
    let mut simulation = Simulation::with(Random(seed), size, node, &[]);
    let newcomer = simulation.add_host();
    simulation.waiting.push((operation_of(newcomer), newcomer));
    let dead = *simulation.voters().last().expect("a voter");
    simulation.hosts.get_mut(&dead).expect("a host").is_alive = false;
    simulation
}

/// Plays the replacement of a dead member until its end. The leader changes after each event whose
/// number `changes` accepts. An event is a decision, or the change that follows from it. Returns
/// the number of events.
fn play_with_leaders(mut simulation: Simulation, changes: impl Fn(u64) -> bool) -> u64 {
    let mut handled = 0;
    for _ in 0..TICKS {
        simulation.now += TICK;
        simulation.note_paths();
        simulation.start_newcomers();
        let able = simulation.electable();
        let is_due = (handled + 1..=simulation.events).any(&changes);
        handled = simulation.events;
        let former = simulation.leader.filter(|leader| able.contains(leader));
        simulation.leader = match former {
            Some(leader) if !is_due => Some(leader),
            _ => {
                let later = able.iter().find(|next| former.is_some_and(|leader| **next > leader));
                later.or(able.first()).copied()
            }
        };
        simulation.run_agents();
        simulation.check_members();
        assert_eq!(simulation.violation, None);
        if simulation.finished > 0 {
            break;
        }
    }
    assert_eq!((simulation.begun.len(), simulation.finished), (1, 1));
    assert_eq!(simulation.members.list.len(), simulation.size);
    simulation.events
}

/// Every replacement of a dead member ends well, wherever leaders change: after any one event,
/// after any two, or after each event.
#[test]
fn a_replacement_ends_well_whenever_the_leader_changes() {
    for node in [NodeKind::Muster, NodeKind::StockEtcd] {
        for (size, seed) in [(3, 1), (3, 2), (5, 3), (5, 4)] {
            let make = || with_a_death(size, node, seed);
            let events = play_with_leaders(make(), |_| false);
            assert!(events >= 10, "too few decisions and changes: {events}");
            play_with_leaders(make(), |_| true);
            for first in 1..=events {
                for second in first..=events {
                    play_with_leaders(make(), |event| event == first || event == second);
                }
            }
        }
    }
}

/// The agent of an early leader removes the dead member for a newcomer that never starts. The next
/// leader's agent gives that newcomer up. The place has to go to the next newcomer each time.
#[test]
fn a_place_stays_vacant_for_the_next_newcomer_however_many_fail() {
    for node in [NodeKind::Muster, NodeKind::StockEtcd] {
        let mut simulation = with_a_death(3, node, 5);
        let mut leaders = simulation.electable().into_iter().cycle();
        for failed in 1..=2 {
            let (_, newcomer) = simulation.waiting[0];
            simulation.hosts.get_mut(&newcomer).expect("a host").is_alive = false;
            simulation.leader = leaders.next();
            for _ in 0..TICKS {
                if simulation.members.of_id(newcomer).is_none() {
                    simulation.run_quietly(1);
                }
            }
            assert!(simulation.members.of_id(newcomer).is_some(), "the newcomer is a learner");
            simulation.leader = leaders.next();
            for _ in 0..TICKS {
                if simulation.uses.0.under_way().is_some() {
                    simulation.run_quietly(1);
                }
            }
            assert_eq!(simulation.violation, None);
            let voters = simulation.voters().len();
            let vacancy = simulation.uses.0.vacancy(voters, simulation.members.cluster_id);
            assert!(voters == 2 && vacancy.is_some(), "{node:?}, {failed} have failed: {voters}");
            let next = simulation.add_host();
            simulation.waiting.push((operation_of(next), next));
        }
    }
}

/// Plays one history: the leader's agent begins the replacement of a member that nobody reaches.
/// While there is no leader for some minutes, the other voter reaches the member again. Then the
/// old leader leads again, and still can't reach the member. Returns whether the member remains,
/// and the violation.
fn play_a_disputed_replacement(off: &'static [Guard]) -> (bool, Option<(Invariant, String)>) {
    let mut simulation = Simulation::with(Random(0), 3, NodeKind::Muster, off);
    let [leader, other, old] = simulation.voters()[..] else { panic!("three voters") };
    let newcomer = simulation.add_host();
    simulation.waiting.push((operation_of(newcomer), newcomer));
    simulation.leader = Some(leader);
    simulation.cut.extend([(leader, old), (other, old)]);
    for _ in 0..200 {
        if simulation.uses.0.under_way().is_none() {
            simulation.run_quietly(1);
        }
    }
    assert_eq!(simulation.uses.0.under_way().map(|each| each.member), Some(old));
    simulation.leader = None;
    simulation.cut.remove(&(other, old));
    simulation.run_quietly(60);
    simulation.leader = Some(leader);
    simulation.run_quietly(60);
    (simulation.members.of_id(old).is_some(), simulation.violation)
}

#[test]
fn a_member_that_only_the_leader_still_misses_is_not_removed() {
    assert_eq!(play_a_disputed_replacement(&[]), (true, None));
    let (remains, violation) = play_a_disputed_replacement(&[Guard::Agreement]);
    assert!(!remains && violation.is_some_and(|(_, found)| found.contains("only 1 of 3 voters")));
}
