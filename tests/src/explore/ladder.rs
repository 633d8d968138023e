//! What `make explore` exhausts before it turns to the full bounds: configurations of the size that
//! clusters have, each with a part of the faults, chosen by measuring so that all of them together
//! take about half an hour on two cores. A run says of each whether it was exhausted.

use crate::explore::config::{Config, Faults};

/// From one in this many states the road is walked.
const ROADS: u64 = 256;

const NONE: Faults = Faults {
    restores: 0,
    lost_directories: 0,
    remakes: 0,
    deaths: 0,
    kills: 0,
    clones: 0,
    pauses: 0,
    timeouts: 0,
    ends: 0,
    accepts: 0,
    overlaps: 0,
    crashes: 0,
};

/// The rungs, in the order in which they are climbed.
#[must_use]
pub fn ladder() -> Vec<Config> {
    vec![
        rung("a pause", 3, 5, 3, Faults { pauses: 1, ..NONE }),
        rung("a list that times out", 3, 5, 3, Faults { timeouts: 1, ..NONE }),
        rung("a death", 3, 5, 3, Faults { deaths: 1, ..NONE }),
        rung(
            "a kill, a lost directory, an end",
            3,
            5,
            3,
            Faults { kills: 1, lost_directories: 1, ends: 1, ..NONE },
        ),
        rung("a host made anew", 3, 5, 2, Faults { remakes: 1, ..NONE }),
        rung("a restore", 3, 5, 2, Faults { restores: 1, ..NONE }),
        rung("a restore and a pause", 3, 3, 2, Faults { restores: 1, pauses: 1, ..NONE }),
        rung(
            "a pause and a list that times out",
            3,
            4,
            2,
            Faults { pauses: 1, timeouts: 1, ..NONE },
        ),
        rung(
            "a restore, a kill, a lost directory",
            2,
            3,
            2,
            Faults { restores: 1, kills: 1, lost_directories: 1, ..NONE },
        ),
        rung(
            "a death, a kill, a lost directory, an end, a pause",
            3,
            4,
            2,
            Faults { deaths: 1, kills: 1, lost_directories: 1, ends: 1, pauses: 1, ..NONE },
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

fn rung(name: &'static str, seats: u8, hosts: usize, epochs: u64, faults: Faults) -> Config {
    let late = faults.deaths > 0 || faults.remakes > 0;
    Config { epochs, faults, late, roads: ROADS, ..Config::sound(name, seats, hosts) }
}
