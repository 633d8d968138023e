//! Ladder of configurations that `make explore` completes before it explores the full bounds. Each
//! configuration has as many seats and hosts as real clusters, and some of the faults. Together
//! they took about half an hour on two cores. The report of a run lists the completed ones.

use crate::explore::config::{Environment, ExplorationConfig, FaultCounts};
use crate::explore::processes::RestoreMethod;

/// A fault-free run is played from one in this many states.
const FAULT_FREE_INTERVAL: u64 = 256;

/// Returns the ladder's configurations, in the order in which they are explored.
#[must_use]
pub fn ladder() -> Vec<ExplorationConfig> {
    let mut configs = host_configs();
    configs.extend(combined_fault_configs());
    configs.extend(link_clock_and_ledger_configs());
    configs
}

fn host_configs() -> Vec<ExplorationConfig> {
    vec![
        ladder_config("a pause", 3, 5, 3, FaultCounts { pauses: 1, ..FaultCounts::default() }),
        ladder_config(
            "a list that times out",
            3,
            5,
            3,
            FaultCounts { timeouts: 1, ..FaultCounts::default() },
        ),
        ladder_config("a death", 3, 5, 3, FaultCounts { deaths: 1, ..FaultCounts::default() }),
        ladder_config(
            "a kill, a lost directory, an end",
            3,
            5,
            3,
            FaultCounts {
                kills: 1,
                lost_directories: 1,
                cluster_ends: 1,
                ..FaultCounts::default()
            },
        ),
        ladder_config(
            "a re-imaged host",
            3,
            5,
            2,
            FaultCounts { reimages: 1, ..FaultCounts::default() },
        ),
        ladder_config("a restore", 3, 5, 2, FaultCounts { restores: 1, ..FaultCounts::default() }),
    ]
}

fn combined_fault_configs() -> Vec<ExplorationConfig> {
    vec![
        ladder_config(
            "a restore and a pause",
            3,
            3,
            2,
            FaultCounts { restores: 1, pauses: 1, ..FaultCounts::default() },
        ),
        ladder_config(
            "a pause and a list that times out",
            3,
            4,
            2,
            FaultCounts { pauses: 1, timeouts: 1, ..FaultCounts::default() },
        ),
        ladder_config(
            "a restore, a kill, a lost directory",
            2,
            3,
            2,
            FaultCounts { restores: 1, kills: 1, lost_directories: 1, ..FaultCounts::default() },
        ),
        ladder_config(
            "a death, a kill, a lost directory, an end, a pause",
            3,
            4,
            2,
            FaultCounts {
                deaths: 1,
                kills: 1,
                lost_directories: 1,
                cluster_ends: 1,
                pauses: 1,
                ..FaultCounts::default()
            },
        ),
        ExplorationConfig {
            max_total_faults: 2,
            ..ladder_config(
                "any two faults of the full bounds",
                2,
                2,
                3,
                ExplorationConfig::full().faults,
            )
        },
        ExplorationConfig {
            max_total_faults: 2,
            ..ladder_config(
                "any two faults of the full bounds",
                1,
                2,
                3,
                ExplorationConfig::full().faults,
            )
        },
    ]
}

fn link_clock_and_ledger_configs() -> Vec<ExplorationConfig> {
    vec![
        ladder_config("a link down", 3, 5, 2, FaultCounts { links: 1, ..FaultCounts::default() }),
        ladder_config(
            "the clock ahead",
            3,
            4,
            2,
            FaultCounts { clock_jumps: 1, ..FaultCounts::default() },
        ),
        ladder_config(
            "the clock ahead, a link down, a death",
            2,
            3,
            2,
            FaultCounts { clock_jumps: 1, links: 1, deaths: 1, ..FaultCounts::default() },
        ),
        ExplorationConfig {
            restore_methods: BOTH_METHODS,
            ..ladder_config(
                "a restore of either kind",
                3,
                4,
                2,
                FaultCounts { restores: 1, ..FaultCounts::default() },
            )
        },
        ExplorationConfig {
            restore_methods: BOTH_METHODS,
            ..ladder_config(
                "database and ledger set back, a pause, an end",
                1,
                2,
                2,
                FaultCounts {
                    restores: 1,
                    ledger_rollbacks: 1,
                    pauses: 1,
                    cluster_ends: 1,
                    ..FaultCounts::default()
                },
            )
        },
        ladder_config(
            "a restore, a process lost and forgotten, a pause",
            2,
            3,
            2,
            FaultCounts { restores: 1, losses: 1, forgets: 1, pauses: 1, ..FaultCounts::default() },
        ),
        config_without_ledger(
            "a restore without ledger",
            5,
            3,
            FaultCounts { restores: 1, ..FaultCounts::default() },
        ),
        config_without_ledger(
            "a restore without ledger, a re-imaged host",
            4,
            2,
            FaultCounts { restores: 1, reimages: 1, ..FaultCounts::default() },
        ),
    ]
}

const BOTH_METHODS: &[RestoreMethod] = &[RestoreMethod::Dump, RestoreMethod::InPlace];

/// Returns a configuration with three seats and no ledgers, in which only property 3 is checked.
/// Without ledgers that property says: no two lists that share a host both get a majority.
///
/// With two seats nothing could be found, because a majority is both hosts, and no host starts with
/// both lists. With three seats, two hosts can start with the first list, and the third can be in a
/// second list with two other keys. Those are five keys: of five hosts, or of four if one host is
/// re-imaged and so has two keys.
fn config_without_ledger(
    name: &'static str,
    hosts: usize,
    epochs: u64,
    faults: FaultCounts,
) -> ExplorationConfig {
    ExplorationConfig {
        environment: Environment { ledger: false, ..Environment::SOUND },
        expects_ledger: false,
        majorities_only: true,
        fault_free_interval: 0,
        ..ladder_config(name, 3, hosts, epochs, faults)
    }
}

fn ladder_config(
    name: &'static str,
    seats: u8,
    hosts: usize,
    epochs: u64,
    faults: FaultCounts,
) -> ExplorationConfig {
    let late = faults.deaths > 0 || faults.reimages > 0;
    ExplorationConfig {
        epochs,
        faults,
        has_late_messages: late,
        fault_free_interval: FAULT_FREE_INTERVAL,
        ..ExplorationConfig::sound(name, seats, hosts)
    }
}
