//! Checks that the reduction of the state space loses nothing. The cases are those in which the
//! reduced and the full state space can both be explored completely. If a rule is left out, both
//! explorations must find a violation of the same property.

#![allow(clippy::print_stdout, reason = "a test's report, shown with --nocapture")]

use formation_explored::{Rule, Rules};
use muster_tests::explore::{
    ExplorationConfig, ExplorationReport, FaultCounts, Property, RestoreMethod, SearchLimits,
    SystemState, explore, regression_cases,
};

/// Explores with or without the reduction. The reduced space has fewer states, so the fault-free
/// run is played from a larger share of them. Otherwise too few runs might be left to detect what
/// the full space shows.
fn explore_with_reduction(config: &ExplorationConfig, reduced: bool) -> ExplorationReport {
    let interval =
        if reduced { config.fault_free_interval.div_ceil(8) } else { config.fault_free_interval };
    let config = ExplorationConfig { reduced, fault_free_interval: interval, ..config.clone() };
    explore(&config, SystemState::new(&config), &SearchLimits::default(), |_| {})
}

fn violated(report: &ExplorationReport) -> Option<Property> {
    assert!(report.cut_short.is_none(), "too large to compare: {:?}", report.cut_short);
    report.found.as_ref().map(|found| found.violation.property)
}

/// Explores with and without the reduction: with every rule on, then with each single rule off.
/// Both explorations must break the same property, or none.
fn check_same_violations(config: &ExplorationConfig) {
    let rules: Vec<(String, Rules)> = std::iter::once(("none".to_owned(), Rules::ALL))
        .chain(Rule::EACH.map(|rule| (format!("{rule:?}"), Rules::ALL.without(rule))))
        .collect();
    let mut fewer = false;
    for (off, rules) in rules {
        let config = ExplorationConfig { rules, ..config.clone() };
        let (with, without) =
            (explore_with_reduction(&config, true), explore_with_reduction(&config, false));
        let (seen, known) = (violated(&with), violated(&without));
        println!(
            "{}, {off} off: {} states instead of {}, {seen:?}",
            config.name, with.states, without.states
        );
        assert_eq!(seen, known, "{}, {off} off", config.name);
        fewer |= with.states < without.states;
    }
    assert!(fewer, "{}: nothing is reduced, so nothing is compared", config.name);
}

#[test]
fn one_seat_faults_of_its_host() {
    check_same_violations(&ExplorationConfig {
        faults: FaultCounts { kills: 2, lost_directories: 1, ..FaultCounts::default() },
        epochs: 1,
        lost_and_found: true,
        ..ExplorationConfig::sound("1 seat, 1 host, kills and a lost directory", 1, 1)
    });
}

#[test]
fn one_seat_restore_and_pause() {
    check_same_violations(&ExplorationConfig {
        faults: FaultCounts { restores: 1, pauses: 1, ..FaultCounts::default() },
        epochs: 1,
        fault_free_interval: 16,
        ..ExplorationConfig::sound("1 seat, 2 hosts, restore and pause", 1, 2)
    });
}

#[test]
fn one_seat_restore_end_and_accept() {
    check_same_violations(&ExplorationConfig {
        faults: FaultCounts { restores: 1, cluster_ends: 1, accepts: 1, ..FaultCounts::default() },
        epochs: 1,
        ..ExplorationConfig::sound("1 seat, 1 host, restore, end, accept", 1, 1)
    });
}

#[test]
fn one_seat_death_and_reimage() {
    check_same_violations(&ExplorationConfig {
        faults: FaultCounts { deaths: 1, reimages: 1, ..FaultCounts::default() },
        has_late_messages: true,
        epochs: 1,
        fault_free_interval: 4,
        ..ExplorationConfig::sound("1 seat, 2 hosts, death and remake", 1, 2)
    });
}

#[test]
fn one_seat_reimage_beyond_the_first_epoch() {
    check_same_violations(&ExplorationConfig {
        faults: FaultCounts { reimages: 1, ..FaultCounts::default() },
        has_late_messages: true,
        epochs: 2,
        ..ExplorationConfig::sound("1 seat, 1 host, remake, two epochs", 1, 1)
    });
}

#[test]
fn two_seats_pause() {
    check_same_violations(&ExplorationConfig {
        faults: FaultCounts { pauses: 1, ..FaultCounts::default() },
        epochs: 2,
        fault_free_interval: 4,
        ..ExplorationConfig::sound("2 seats, 2 hosts, pause", 2, 2)
    });
}

#[test]
fn two_seats_time_out() {
    check_same_violations(&ExplorationConfig {
        faults: FaultCounts { timeouts: 1, ..FaultCounts::default() },
        epochs: 1,
        fault_free_interval: 4,
        ..ExplorationConfig::sound("2 seats, 2 hosts, time-out", 2, 2)
    });
}

#[test]
fn two_seats_restore() {
    check_same_violations(&ExplorationConfig {
        faults: FaultCounts { restores: 1, ..FaultCounts::default() },
        epochs: 1,
        fault_free_interval: 16,
        ..ExplorationConfig::sound("2 seats, 2 hosts, restore", 2, 2)
    });
}

#[test]
fn one_seat_restore_beyond_the_first_epoch() {
    check_same_violations(&ExplorationConfig {
        faults: FaultCounts { restores: 1, timeouts: 1, ..FaultCounts::default() },
        epochs: 2,
        fault_free_interval: 16,
        ..ExplorationConfig::sound("1 seat, 1 host, restore, time-out, two epochs", 1, 1)
    });
}

#[test]
fn two_seats_restore_without_ledger() {
    let mut config = ExplorationConfig {
        faults: FaultCounts { restores: 1, ..FaultCounts::default() },
        epochs: 1,
        expects_ledger: false,
        // Without the rule `RetireIsAnExit` only few states break a property, and a sample of the
        // states can miss them.
        fault_free_interval: 1,
        ..ExplorationConfig::sound("2 seats, 2 hosts, restore without ledger", 2, 2)
    };
    config.environment.ledger = false;
    check_same_violations(&config);
}

#[test]
fn one_seat_database_and_ledger_set_back() {
    check_same_violations(&ExplorationConfig {
        faults: FaultCounts { restores: 1, ledger_rollbacks: 1, ..FaultCounts::default() },
        restore_methods: &[RestoreMethod::InPlace],
        epochs: 1,
        fault_free_interval: 8,
        ..ExplorationConfig::sound("1 seat, 1 host, database and ledger set back", 1, 1)
    });
}

#[test]
fn two_seats_a_link_down() {
    check_same_violations(&ExplorationConfig {
        faults: FaultCounts { links: 1, timeouts: 1, ..FaultCounts::default() },
        epochs: 1,
        fault_free_interval: 4,
        ..ExplorationConfig::sound("2 seats, 3 hosts, a link down", 2, 3)
    });
}

#[test]
fn one_seat_clock_ahead() {
    check_same_violations(&ExplorationConfig {
        faults: FaultCounts { clock_jumps: 1, reimages: 1, ..FaultCounts::default() },
        epochs: 1,
        has_late_messages: true,
        ..ExplorationConfig::sound("1 seat, 1 host, clock ahead, re-imaged", 1, 1)
    });
}

#[test]
fn one_seat_clock_ahead_and_a_restore() {
    check_same_violations(&ExplorationConfig {
        faults: FaultCounts { clock_jumps: 1, restores: 1, ..FaultCounts::default() },
        epochs: 1,
        ..ExplorationConfig::sound("1 seat, 2 hosts, clock ahead, restore", 1, 2)
    });
}

#[test]
fn two_seats_deaths_that_no_transaction_notices() {
    check_same_violations(&ExplorationConfig {
        faults: FaultCounts { deaths: 2, ..FaultCounts::default() },
        quiet_lapses: true,
        epochs: 2,
        ..ExplorationConfig::sound("2 seats, 2 hosts, quiet deaths", 2, 2)
    });
}

/// Every known failure must also be found without the reduction of the state space.
#[test]
fn every_regression_is_found_without_reduction() {
    for case in regression_cases() {
        let case = case.reduced(false);
        let off = case.without_rule();
        let property = violated(&off);
        println!("{}: {} states, {:.1} s", case.name, off.states, off.time.as_secs_f64());
        assert!(
            property.is_some_and(|property| case.violates.contains(&property)),
            "{}: {property:?}",
            case.name
        );
    }
}
