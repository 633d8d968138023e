//! Explores all interleavings within small bounds with every rule on. All seven properties must
//! hold. `make explore` does this within larger bounds.

#![allow(clippy::print_stdout, reason = "a test's report, shown with --nocapture")]

use formation_explored::{Rule, Rules};
use muster_tests::explore::{
    ExplorationConfig, ExplorationReport, FaultCounts, Property, RestoreMethod, SearchLimits,
    SystemState, explore, ladder,
};

fn check_all_properties(config: &ExplorationConfig) {
    let report: ExplorationReport =
        explore(config, SystemState::new(config), &SearchLimits::default(), |_| {});
    if let Some(found) = &report.found {
        panic!("{}:\n{}\n{}", config.name, found.transcript.join("\n"), found.violation);
    }
    assert!(report.is_complete(), "{}: cut short by {:?}", config.name, report.cut_short);
    println!(
        "{}: {} states, {} steps, {} fault-free runs, depth {}, {:.1} s, {:.0} states/s, {} MiB",
        config.name,
        report.states,
        report.steps,
        report.fault_free_runs,
        report.depth,
        report.time.as_secs_f64(),
        report.states as f64 / report.time.as_secs_f64().max(0.001),
        report.memory >> 20
    );
}

#[test]
fn one_seat_every_fault_of_its_host() {
    let faults = FaultCounts {
        kills: 1,
        lost_directories: 1,
        reimages: 1,
        pauses: 1,
        timeouts: 1,
        ..FaultCounts::default()
    };
    check_all_properties(&ExplorationConfig {
        faults,
        epochs: 2,
        has_late_messages: true,
        reports: true,
        fault_free_interval: 8,
        ..ExplorationConfig::sound("1 seat, 1 host, faults of the host", 1, 1)
    });
}

#[test]
fn one_seat_two_hosts_death_and_reimage() {
    let faults = FaultCounts { deaths: 1, reimages: 1, ..FaultCounts::default() };
    check_all_properties(&ExplorationConfig {
        faults,
        has_late_messages: true,
        ..ExplorationConfig::sound("1 seat, 2 hosts, death and remake", 1, 2)
    });
}

#[test]
fn one_seat_two_hosts_restore_accept_and_abandon() {
    let faults = FaultCounts { restores: 1, accepts: 1, cluster_ends: 1, ..FaultCounts::default() };
    check_all_properties(&ExplorationConfig {
        faults,
        epochs: 2,
        fault_free_interval: 8,
        ..ExplorationConfig::sound("1 seat, 2 hosts, restore, accept, abandon", 1, 2)
    });
}

/// The service must decide no other list between a retirement and its undoing. The state space is
/// not reduced, because the reductions are valid only for clusters that stay retired.
#[test]
fn one_seat_two_hosts_retirement_undone_around_a_restore() {
    let faults = FaultCounts { restores: 1, retirements: 2, ..FaultCounts::default() };
    check_all_properties(&ExplorationConfig {
        faults,
        epochs: 2,
        fault_free_interval: 8,
        reports: true,
        reduced: false,
        ..ExplorationConfig::sound("1 seat, 2 hosts, retired and taken back, restore", 1, 2)
    });
}

/// An agent that signed the expired list must sign no other list until enough members have released
/// the expired one, whatever the reopened cluster proposes. An abandoned cluster stays abandoned.
#[test]
fn two_seats_three_hosts_reopened_after_the_deadline() {
    let faults =
        FaultCounts { cluster_ends: 1, reopenings: 1, reimages: 1, ..FaultCounts::default() };
    check_all_properties(&ExplorationConfig {
        faults,
        epochs: 2,
        fault_free_interval: 64,
        ..ExplorationConfig::sound("2 seats, 3 hosts, expired and reopened, reimage", 2, 3)
    });
}

/// A restore of the database, too, must not make an agent sign another list before the expired one
/// is released.
#[test]
fn one_seat_two_hosts_reopened_around_a_restore() {
    let faults =
        FaultCounts { restores: 1, cluster_ends: 2, reopenings: 1, ..FaultCounts::default() };
    check_all_properties(&ExplorationConfig {
        faults,
        epochs: 3,
        fault_free_interval: 8,
        ..ExplorationConfig::sound("1 seat, 2 hosts, expired and reopened, restore", 1, 2)
    });
}

#[test]
fn two_seats_retirement_undone_with_a_kill() {
    let faults = FaultCounts { kills: 1, retirements: 1, ..FaultCounts::default() };
    check_all_properties(&ExplorationConfig {
        faults,
        epochs: 1,
        fault_free_interval: 64,
        reports: true,
        reduced: false,
        ..ExplorationConfig::sound("2 seats, 2 hosts, retired and taken back, kill", 2, 2)
    });
}

#[test]
fn two_seats_kill_and_lost_directory() {
    let faults = FaultCounts { kills: 1, lost_directories: 1, ..FaultCounts::default() };
    check_all_properties(&ExplorationConfig {
        faults,
        reports: true,
        ..ExplorationConfig::sound("2 seats, 2 hosts, kill and lost directory", 2, 2)
    });
}

#[test]
fn two_seats_three_hosts_pause_and_death() {
    let faults = FaultCounts { deaths: 1, pauses: 1, ..FaultCounts::default() };
    check_all_properties(&ExplorationConfig {
        faults,
        epochs: 2,
        fault_free_interval: 32,
        ..ExplorationConfig::sound("2 seats, 3 hosts, pause and death", 2, 3)
    });
}

#[test]
fn two_seats_restore_without_ledger_where_the_lists_share_a_host() {
    let mut config = ExplorationConfig {
        faults: FaultCounts { restores: 1, timeouts: 1, ..FaultCounts::default() },
        epochs: 2,
        expects_ledger: false,
        fault_free_interval: 16,
        ..ExplorationConfig::sound("2 seats, 2 hosts, restore without ledger", 2, 2)
    };
    config.environment.ledger = false;
    check_all_properties(&config);
}

/// With two seats, a majority consists of both hosts, so two lists that share a host can't both
/// have a majority. With three seats and no ledger, rule S6 of the formation (`agent/sign.rs`)
/// prevents two majorities: the shared host must not give both lists a majority. Without rule S6
/// the search from the initial state finds two majorities.
#[test]
fn three_seats_five_hosts_restore_without_ledger() {
    let is_it = |config: &ExplorationConfig| config.name == "a restore without ledger";
    let ladder_config = ladder().into_iter().find(is_it).expect("a rung of the ladder");
    let config = ExplorationConfig { epochs: 2, ..ladder_config };
    check_all_properties(&config);
    let without = ExplorationConfig { rules: Rules::ALL.without(Rule::ReleasesFirst), ..config };
    let report = explore(&without, SystemState::new(&without), &SearchLimits::default(), |_| {});
    let found = report.found.expect("two lists with a majority each");
    println!("without S6: {} states\n{}", report.states, found.transcript.join("\n"));
    assert_eq!(found.violation.property, Property::NoTwoMajorities);
}

#[test]
fn one_seat_two_hosts_database_and_ledger_set_back() {
    let faults =
        FaultCounts { restores: 1, ledger_rollbacks: 1, cluster_ends: 1, ..FaultCounts::default() };
    check_all_properties(&ExplorationConfig {
        faults,
        epochs: 1,
        restore_methods: &[RestoreMethod::Dump, RestoreMethod::InPlace],
        fault_free_interval: 16,
        ..ExplorationConfig::sound("1 seat, 2 hosts, database and ledger set back, an end", 1, 2)
    });
}

#[test]
fn two_seats_three_hosts_rows_set_back_under_the_processes() {
    let faults = FaultCounts { restores: 1, ..FaultCounts::default() };
    check_all_properties(&ExplorationConfig {
        faults,
        epochs: 2,
        restore_methods: &[RestoreMethod::InPlace],
        fault_free_interval: 64,
        ..ExplorationConfig::sound("2 seats, 3 hosts, rows set back under the processes", 2, 3)
    });
}

#[test]
fn two_seats_three_hosts_restore_and_pause() {
    let faults = FaultCounts { restores: 1, pauses: 1, ..FaultCounts::default() };
    check_all_properties(&ExplorationConfig {
        faults,
        epochs: 2,
        fault_free_interval: 128,
        ..ExplorationConfig::sound("2 seats, 3 hosts, restore and pause", 2, 3)
    });
}

#[test]
fn three_seats_three_hosts_restore() {
    let faults = FaultCounts { restores: 1, ..FaultCounts::default() };
    check_all_properties(&ExplorationConfig {
        faults,
        fault_free_interval: 128,
        ..ExplorationConfig::sound("3 seats, 3 hosts, restore", 3, 3)
    });
}

#[test]
fn three_seats_four_hosts_pause_and_time_out() {
    let faults = FaultCounts { pauses: 1, timeouts: 1, ..FaultCounts::default() };
    check_all_properties(&ExplorationConfig {
        faults,
        epochs: 2,
        fault_free_interval: 256,
        ..ExplorationConfig::sound("3 seats, 4 hosts, pause and time-out", 3, 4)
    });
}

#[test]
fn three_seats_four_hosts_every_fault_of_one_host_and_an_end() {
    let faults = FaultCounts {
        deaths: 1,
        kills: 1,
        lost_directories: 1,
        cluster_ends: 1,
        pauses: 1,
        ..FaultCounts::default()
    };
    check_all_properties(&ExplorationConfig {
        faults,
        epochs: 2,
        has_late_messages: true,
        fault_free_interval: 256,
        ..ExplorationConfig::sound("3 seats, 4 hosts, faults of hosts, an end", 3, 4)
    });
}

#[test]
fn three_seats_four_hosts_one_reimaged() {
    let faults = FaultCounts { reimages: 1, ..FaultCounts::default() };
    check_all_properties(&ExplorationConfig {
        faults,
        epochs: 2,
        has_late_messages: true,
        fault_free_interval: 256,
        ..ExplorationConfig::sound("3 seats, 4 hosts, one re-imaged", 3, 4)
    });
}

#[test]
fn three_seats_four_hosts_a_link_down() {
    let faults = FaultCounts { links: 1, ..FaultCounts::default() };
    check_all_properties(&ExplorationConfig {
        faults,
        epochs: 2,
        fault_free_interval: 8,
        ..ExplorationConfig::sound("3 seats, 4 hosts, a link down", 3, 4)
    });
}

#[test]
fn two_seats_three_hosts_clock_ahead_and_a_death() {
    let faults = FaultCounts { clock_jumps: 1, deaths: 1, ..FaultCounts::default() };
    check_all_properties(&ExplorationConfig {
        faults,
        epochs: 2,
        fault_free_interval: 8,
        ..ExplorationConfig::sound("2 seats, 3 hosts, clock ahead, a death", 2, 3)
    });
}

#[test]
fn three_seats_lying_service_with_every_list_of_four_hosts() {
    check_all_properties(&ExplorationConfig {
        service_lies: true,
        expects_ledger: false,
        epochs: 1,
        fault_free_interval: 0,
        ..ExplorationConfig::sound("3 seats, 4 hosts, any lie", 3, 4)
    });
}
