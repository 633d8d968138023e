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
    for off in GUARDS {
        let found = (0..HISTORIES_TO_FIND)
            .find_map(|seed| Some((seed, Simulation::new(seed, off).run().err()?)));
        let Some((seed, violation)) = found else { panic!("nothing happens without {off:?}") };
        println!("without {off:?}: seed {seed}, {violation}");
    }
}

/// Plays one history: the leader's agent begins the replacement of a member that nobody reaches.
/// While there is no leader for some minutes, the other voter reaches the member again. Then the
/// leader is back, which still can't reach it. Returns whether the member remains, and the
/// violation.
fn play_a_disputed_replacement(off: &'static [Guard]) -> (bool, Option<String>) {
    let of_three = |seed| {
        let simulation = Simulation::new(seed, off);
        (simulation.size == 3 && simulation.expires_at == u64::MAX).then_some(simulation)
    };
    let mut simulation = (0..).find_map(of_three).expect("a cluster of three");
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
    assert!(!remains && violation.is_some_and(|found| found.contains("only 1 of 3 voters")));
}
