//! Ladder of configurations that `make explore` completes before it explores the full bounds. Each
//! has seats and hosts as real clusters do, and a part of the faults. They were chosen by
//! measurement to take about half an hour together on two cores. The report of a run says which of
//! them were completed.

use crate::explore::config::{Config, Environment, Faults};
use crate::explore::processes::Setback;

/// The road is walked from one in this many states.
const ROADS: u64 = 256;

/// Returns the ladder's configurations, in the order in which they are explored.
#[must_use]
pub fn ladder() -> Vec<Config> {
    let mut rungs = hosts_and_people();
    rungs.extend(links_clock_and_ledgers());
    rungs
}

fn hosts_and_people() -> Vec<Config> {
    vec![
        rung("a pause", 3, 5, 3, Faults { pauses: 1, ..Faults::default() }),
        rung("a list that times out", 3, 5, 3, Faults { timeouts: 1, ..Faults::default() }),
        rung("a death", 3, 5, 3, Faults { deaths: 1, ..Faults::default() }),
        rung(
            "a kill, a lost directory, an end",
            3,
            5,
            3,
            Faults { kills: 1, lost_directories: 1, ends: 1, ..Faults::default() },
        ),
        rung("a host made anew", 3, 5, 2, Faults { remakes: 1, ..Faults::default() }),
        rung("a restore", 3, 5, 2, Faults { restores: 1, ..Faults::default() }),
        rung(
            "a restore and a pause",
            3,
            3,
            2,
            Faults { restores: 1, pauses: 1, ..Faults::default() },
        ),
        rung(
            "a pause and a list that times out",
            3,
            4,
            2,
            Faults { pauses: 1, timeouts: 1, ..Faults::default() },
        ),
        rung(
            "a restore, a kill, a lost directory",
            2,
            3,
            2,
            Faults { restores: 1, kills: 1, lost_directories: 1, ..Faults::default() },
        ),
        rung(
            "a death, a kill, a lost directory, an end, a pause",
            3,
            4,
            2,
            Faults {
                deaths: 1,
                kills: 1,
                lost_directories: 1,
                ends: 1,
                pauses: 1,
                ..Faults::default()
            },
        ),
        Config {
            together: 2,
            ..rung("any two faults of the full bounds", 2, 2, 3, Config::full().faults)
        },
        Config {
            together: 2,
            ..rung("any two faults of the full bounds", 1, 2, 3, Config::full().faults)
        },
    ]
}

fn links_clock_and_ledgers() -> Vec<Config> {
    vec![
        rung("a link down", 3, 5, 2, Faults { links: 1, ..Faults::default() }),
        rung("the clock ahead", 3, 4, 2, Faults { clocks: 1, ..Faults::default() }),
        rung(
            "the clock ahead, a link down, a death",
            2,
            3,
            2,
            Faults { clocks: 1, links: 1, deaths: 1, ..Faults::default() },
        ),
        Config {
            setbacks: BOTH,
            ..rung("a restore of either kind", 3, 4, 2, Faults { restores: 1, ..Faults::default() })
        },
        Config {
            setbacks: BOTH,
            ..rung(
                "database and ledger set back, a pause, an end",
                1,
                2,
                2,
                Faults { restores: 1, ledgers: 1, pauses: 1, ends: 1, ..Faults::default() },
            )
        },
        rung(
            "a restore, a process lost and forgotten, a pause",
            2,
            3,
            2,
            Faults { restores: 1, losses: 1, forgets: 1, pauses: 1, ..Faults::default() },
        ),
        without_ledger(
            "a restore without ledger",
            5,
            3,
            Faults { restores: 1, ..Faults::default() },
        ),
        without_ledger(
            "a restore without ledger, a host made anew",
            4,
            2,
            Faults { restores: 1, remakes: 1, ..Faults::default() },
        ),
    ]
}

const BOTH: &[Setback] = &[Setback::Dump, Setback::InPlace];

/// Returns a configuration with three seats and no ledgers.
///
/// Two seats would show nothing: a majority is then both hosts, so two lists that share a host
/// can't both have one. With three seats, two majorities of lists that share a host need five keys.
/// Those are the keys of five hosts, or of four if one is re-imaged.
fn without_ledger(name: &'static str, hosts: usize, epochs: u64, faults: Faults) -> Config {
    Config {
        environment: Environment { ledger: false, ..Environment::SOUND },
        expects_ledger: false,
        majorities_only: true,
        roads: 0,
        ..rung(name, 3, hosts, epochs, faults)
    }
}

fn rung(name: &'static str, seats: u8, hosts: usize, epochs: u64, faults: Faults) -> Config {
    let late = faults.deaths > 0 || faults.remakes > 0;
    Config { epochs, faults, late, roads: ROADS, ..Config::sound(name, seats, hosts) }
}
