//! Checks that each known failure occurs again if the rule that prevents it is switched off, and
//! only then.

#![allow(clippy::print_stdout, reason = "a test's report, shown with --nocapture")]

use muster_tests::explore::{Property, RegressionCase, find_case};

/// Explores a case twice. With the rule on, the search must be complete and find nothing. With the
/// rule off, the search must find the failure. Prints the path to the failure, which `--nocapture`
/// shows.
fn is_stopped_by_its_rule(name: &str) {
    let case = find_case(name);
    let on = case.with_rule();
    if let Some(found) = &on.found {
        panic!("{name} with every rule on:\n{}", found.transcript.join("\n"));
    }
    assert!(on.is_complete(), "{name}: the search was cut short ({:?})", on.cut_short);
    let off = case.without_rule();
    let found = found_again(&case, off.found);
    println!("{name}: {} ({:?} off)", case.description, case.safeguard);
    println!("{}", found.join("\n"));
    println!(
        "on: {} states, {} fault-free runs, {:.1} s; off: {} states, {:.1} s",
        on.states,
        on.fault_free_runs,
        on.time.as_secs_f64(),
        off.states,
        off.time.as_secs_f64()
    );
}

fn found_again(
    case: &RegressionCase,
    found: Option<muster_tests::explore::Counterexample>,
) -> Vec<String> {
    let Some(found) = found else {
        panic!("{}: with {:?} off, nothing was found", case.name, case.safeguard)
    };
    let property: Property = found.violation.property;
    assert!(
        case.violates.contains(&property),
        "{}: expected one of {:?}, found {}",
        case.name,
        case.violates,
        found.violation
    );
    found.transcript
}

macro_rules! cases {
    ($($test:ident: $name:literal,)*) => {
        $(
            #[test]
            fn $test() {
                is_stopped_by_its_rule($name);
            }
        )*

        /// A case without a test would prove nothing.
        #[test]
        fn every_case_has_its_test() {
            let tested = [$($name),*];
            for case in muster_tests::explore::regression_cases() {
                assert!(tested.contains(&case.name), "{} has no test", case.name);
            }
        }
    };
}

cases! {
    r01_two_processes_without_row_lock: "R1",
    r02_restore_of_a_backup_taken_in_open: "R2",
    r03_restore_of_a_backup_taken_in_preparing: "R3",
    rule_one_release_too_few: "one release too few",
    r04_restore_and_a_disjoint_list: "R4",
    r05_size_one_restore_and_another_host: "R5",
    r06_lying_service_with_overlapping_lists: "R6",
    r07_last_ack_after_the_others_died: "R7",
    r07_committed_with_its_majority_dead: "R7 exit",
    r08_kill_between_ran_and_exec: "R8",
    r09_disk_lost_after_exec: "R9",
    r10_lost_and_found: "R10",
    r11_unreachable_host_and_a_standby: "R11",
    r12_host_made_anew_and_its_token: "R12",
    r13_copy_of_a_disk_that_holds_the_document: "R13",
    r14_freeze_above_what_was_signed: "R14",
    r15_commits_answer_lost: "R15",
    r16_dump_loaded_while_the_one_that_delivered_is_down: "R16",
    r16_rows_set_back_under_the_processes: "R16 in place",
    guarantee_forgotten_while_it_runs: "forgotten while it runs",
    limit_rows_younger_than_a_sweep: "rows younger than a sweep",
    r17_ledger_put_back_then_the_database: "R17",
    r17_ledger_and_position_put_back: "R17 with its position",
    r18_one_link_down: "R18",
    r19_held_back_by_a_clock_that_was_ahead: "R19",
    r19_frozen_by_a_clock_that_was_ahead: "R19 frozen",
    rule_hold_above_released: "hold above released",
    rule_one_list_per_epoch: "one list per epoch",
    rule_held_releases_nothing: "held releases nothing",
    guarantee_journal_sync: "journal sync",
    guarantee_ledger_sync: "ledger sync",
    rule_abandon_before_commit: "abandon before commit",
    rule_end_when_settled: "end when settled",
}
