//! Runs the simulation with seeds, and checks that it finds bugs that were put back.
//!
//! `SEED=… cargo test --workspace --test sim` replays one history.

#![allow(clippy::print_stdout, reason = "says which seed found a bug, and what a run had in it")]

use muster_tests::sim::{Guards, SimulationOptions, campaign, replay};

/// The simulation allocates for a seventh of its time with the C library's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Number of histories in each test run.
const HISTORIES: u64 = 2_000;
const FIRST_SEED: u64 = 1;

#[test]
fn every_invariant_holds_in_every_history() {
    let options = SimulationOptions::default();
    if let Ok(seed) = std::env::var("SEED") {
        let seed = seed.parse().expect("SEED is a number");
        let outcome = replay(seed, options);
        println!("{outcome:?}");
        outcome.result.expect("an invariant was violated");
        return;
    }
    let found = campaign(FIRST_SEED, HISTORIES, 2, options, |_| ());
    if let Some(outcome) = found.failure {
        panic!("replay with SEED={}: {}", outcome.seed, outcome.result.unwrap_err());
    }
    println!("{:?}", found.total);
    assert_eq!(found.histories, HISTORIES);
    // Histories without any events would prove nothing.
    let total = found.total;
    assert!(total.writes > 5 * HISTORIES && total.reads > 5 * HISTORIES);
    assert!(total.crashes > HISTORIES && total.elections >= 3 * HISTORIES);
    assert!(total.notices > 5 * HISTORIES && total.compactions > HISTORIES);
    assert!(total.snapshots >= HISTORIES && 10 * total.conflicts >= 7 * HISTORIES);
    assert!(total.interrupted_installs >= HISTORIES / 10 && 2 * total.torn >= HISTORIES);
    assert!(total.process_ends > 2 * HISTORIES && total.wrong_process_ends > HISTORIES / 2);
    assert!(total.lost_outcomes > HISTORIES / 20, "writes to leaders that failed");
    assert!(total.disk_failures > HISTORIES / 10 && total.refused > HISTORIES / 10);
    assert!(total.membership_changes > 2 * HISTORIES && total.joined > HISTORIES / 4);
    assert!(total.handed_over > HISTORIES / 20 && total.refused_starts > HISTORIES);
    assert!(total.moves > HISTORIES / 4 && total.stranded <= HISTORIES / 500);
    assert!(total.amnesia > HISTORIES / 100 && total.disowned > HISTORIES / 100);
    assert!(total.shared_turns > HISTORIES && total.full_queues > HISTORIES);
    assert!(total.leases_expired > HISTORIES && total.renewals > HISTORIES);
    assert!(total.lease_checkpoints > HISTORIES && total.outdated_clocks > HISTORIES / 200);
    assert!(total.user_changes > 2 * HISTORIES && total.denied > 10 * HISTORIES);
    assert!(total.tokens_used > 2 * HISTORIES, "tokens that identified their user");
    assert!(total.compared > 10 * HISTORIES, "members whose data was compared");
    assert!(total.lost_bodies > HISTORIES / 10 && total.disk_space_warnings > HISTORIES / 10);
    assert!(total.lists > HISTORIES && total.pages > total.lists + HISTORIES / 4);
    assert!(total.copies_checked > 10 * HISTORIES && total.lists_restarted > HISTORIES / 4);
    assert!(total.updates > 3 * HISTORIES && total.updates_conflicted > HISTORIES / 2);
    assert!(total.races_won > HISTORIES / 2 && total.races_lost > HISTORIES / 2);
    assert!(total.races_compacted > HISTORIES / 10, "compactions by the winner of a race");
}

#[test]
fn a_history_is_a_function_of_its_seed() {
    for seed in 1..=20 {
        let first = replay(seed, SimulationOptions::default());
        assert_eq!(first, replay(seed, SimulationOptions::default()), "seed {seed}");
        assert_ne!(first.result, replay(seed + 1000, SimulationOptions::default()).result);
    }
}

/// Tests with bugs that the simulation must find. The bugs exist only in builds with debug
/// assertions.
#[cfg(debug_assertions)]
mod bugs_put_back {
    use super::*;

    #[track_caller]
    fn is_found(guards: Guards, histories: u64, by: &[&str]) {
        is_found_with(guarded(guards), histories, by);
    }

    fn guarded(guards: Guards) -> SimulationOptions {
        SimulationOptions { guards, ..SimulationOptions::default() }
    }

    #[track_caller]
    fn is_found_with(options: SimulationOptions, histories: u64, by: &[&str]) {
        is_found_from(1, options, histories, by);
    }

    /// Checks that the bug is found in histories with the seeds from `first` on.
    #[track_caller]
    fn is_found_from(first: u64, options: SimulationOptions, histories: u64, by: &[&str]) {
        // These histories are longer than the default, so that a bug has more time to show.
        let options = SimulationOptions { duration: 2_500_000, ..options };
        let found = campaign(first, histories, 2, options, |_| ());
        let outcome = found.failure.expect("the bug was not found");
        let violation = outcome.result.expect_err("it failed");
        println!("found by seed {}: {violation}", outcome.seed);
        assert!(by.contains(&violation.invariant), "found otherwise: {violation}");
    }

    #[test]
    fn a_vote_sent_before_it_is_durable_is_found() {
        let by =
            ["one vote per term", "election safety", "monotone", "leaders have a quorum's votes"];
        is_found(Guards::VOTE_BEFORE_SYNC, 500, &by);
    }

    /// Invariants that may be violated when acknowledged entries are lost in a crash.
    const LOST_ENTRIES: [&str; 15] = [
        "commits are on a quorum's disks",
        "leader completeness",
        "state machine safety",
        "linearizable",
        "acknowledged writes survive",
        "stores equal the model",
        "answers equal the model's",
        "monotone",
        "one vote per term",
        "election safety",
        "members start and run",
        "log matching",
        "promoted learners are in sync",
        "progress after the faults",
        // A member that has lost what it promised looks like an older copy of itself.
        "intact members are accepted as themselves",
    ];

    #[test]
    fn an_entry_acknowledged_before_the_sync_is_found() {
        is_found(Guards::ACK_BEFORE_SYNC, 500, &LOST_ENTRIES);
    }

    #[test]
    fn a_batch_acknowledged_with_the_previous_batch_is_found() {
        is_found(Guards::ACK_NEXT_BATCH, 500, &LOST_ENTRIES);
    }

    #[test]
    fn a_leader_that_counts_itself_before_its_sync_is_found() {
        is_found(Guards::SELF_ACK_BEFORE_SYNC, 500, &LOST_ENTRIES);
    }

    #[test]
    fn a_read_context_used_twice_is_found() {
        // Two reads with one context violate linearizability, or one of them is never answered.
        // About every thousandth history shows this; the one with seed 1,730 does.
        let by = ["linearizable", "progress after the faults"];
        is_found_from(1_725, guarded(Guards::SHARED_READ_CONTEXT), 2_000, &by);
    }

    #[test]
    fn a_failed_sync_that_is_retried_is_found() {
        is_found(Guards::RETRY_FAILED_SYNC, 1_000, &LOST_ENTRIES);
    }

    #[test]
    fn a_torn_tail_that_is_kept_is_found() {
        is_found(Guards::KEEP_TORN_TAIL, 1_000, &LOST_ENTRIES);
    }

    #[test]
    fn two_concurrent_changes_of_members_are_found() {
        is_found(Guards::DOUBLE_CHANGE, 500, &["one change at a time"]);
    }

    #[test]
    fn a_change_before_a_quorum_knows_of_the_last_one_is_found() {
        is_found(Guards::UNSETTLED_CHANGE, 500, &["one change at a time"]);
    }

    #[test]
    fn a_lagging_learner_that_is_promoted_is_found() {
        is_found(Guards::PROMOTE_LAGGING, 1_000, &["promoted learners are in sync"]);
    }

    /// Invariants that are violated when the store and consensus, or two members, have different
    /// member lists.
    const TWO_TABLES: [&str; 3] =
        ["member tables equal the model's", "configuration equals table", "no panic"];

    #[test]
    fn an_update_that_makes_a_voter_of_a_learner_is_found() {
        is_found(Guards::UPDATE_DROPS_LEARNER, 1_000, &TWO_TABLES);
    }

    #[test]
    fn a_removed_id_that_is_used_again_is_found() {
        // The first history that shows this bug has seed 45.
        is_found_from(40, guarded(Guards::REMOVED_ID_AGAIN), 1_000, &TWO_TABLES);
    }

    #[test]
    fn a_wiped_machine_accepted_as_its_old_member_is_found() {
        is_found(Guards::SAME_ID_REIMAGE, 2_000, &["members without their promises never act"]);
    }

    #[test]
    fn an_old_image_that_votes_is_found() {
        is_found(Guards::OLD_IMAGE_VOTES, 2_000, &["members without their promises never act"]);
    }

    /// Without the exchange of member tables, a returning member doesn't know new members, and
    /// tries to reach moved members at their old addresses.
    #[test]
    fn members_that_never_send_their_member_tables_are_found() {
        let options = SimulationOptions { censuses: false, ..SimulationOptions::default() };
        is_found_with(options, 1_000, &["progress after the faults", "every request is answered"]);
    }

    /// A deposed leader that doesn't know of its successor expires a lease that the successor keeps
    /// alive.
    #[test]
    fn a_deposed_leader_that_ends_leases_is_found() {
        // No seed up to 2,000 shows this bug. Seed 2,087 does, so the search begins shortly before
        // it.
        let options = guarded(Guards::DEPOSED_CLOCK_COUNTS);
        is_found_from(2_080, options, 2_000, &["leases don't end early"]);
    }

    #[test]
    fn a_removed_member_that_bootstraps_is_found() {
        is_found(Guards::TOMBSTONE_BOOTSTRAPS, 500, &["removed members never act"]);
    }
}
