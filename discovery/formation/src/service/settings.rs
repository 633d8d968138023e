//! Times and limits of the service, each an option so that tests are quick.

use crate::values::{Epoch, Millis};

/// Times and limits of formation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Time for which a silent agent keeps its seat or its place in the queue.
    pub lease: Millis,
    /// Time for which a frozen list waits for its acks.
    pub prepare: Millis,
    /// Interval at which clusters that nobody polls are examined.
    pub sweep: Millis,
    /// Length of the first hold-back, doubled with each further count.
    pub hold_back: Millis,
    /// Upper limit of a hold-back.
    pub hold_back_cap: Millis,
    /// Time after a retirement in which an owner may take it back.
    pub unretire: Millis,
    /// Number of keys that one grant admits, per seat of the cluster.
    pub keys_per_seat: u32,
}

/// Largest distance by which an epoch that an agent names may exceed everything that the cluster
/// has seen. An honest agent names only epochs that a service has proposed. A hostile one could
/// otherwise push all the others to the highest epoch, and the cluster could never be frozen again.
pub const EPOCH_DISTANCE: Epoch = 1_000_000;
/// Highest epoch that anybody may name: rows and counters have room for it and the next ones.
pub const EPOCH_MAX: Epoch = 1 << 62;

impl Settings {
    /// Documented defaults: a lease of 90 s, 60 s for the acks, and a sweep every 30 s. Hold-backs
    /// grow from 2 s to 60 s, a retirement can be taken back for a week, and each seat admits three
    /// keys.
    pub const DEFAULT: Settings = Settings {
        lease: Millis(90_000),
        prepare: Millis(60_000),
        sweep: Millis(30_000),
        hold_back: Millis(2_000),
        hold_back_cap: Millis(60_000),
        unretire: Millis(7 * 24 * 3_600_000),
        keys_per_seat: 3,
    };

    /// Returns how long the clock must have run evenly before a cluster's deadline counts: two
    /// sweeps, a minute by default.
    #[must_use]
    pub fn steady_after(&self) -> Millis {
        Millis(self.sweep.0.saturating_mul(2))
    }

    /// Returns how long an agent is held back that has now been counted `counts` times (1 or more):
    /// 2^counts seconds by default, up to the limit.
    #[must_use]
    pub fn held_back(&self, counts: u32) -> Millis {
        let doubled = self.hold_back.0.saturating_mul(1 << counts.saturating_sub(1).min(16));
        Millis(doubled.min(self.hold_back_cap.0))
    }
}

impl Default for Settings {
    fn default() -> Settings {
        Settings::DEFAULT
    }
}
