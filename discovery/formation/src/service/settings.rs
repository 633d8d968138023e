//! The service's times and limits, each an option so that tests are quick.

use crate::values::{Epoch, Millis};

/// Times and limits of formation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How long a seat or a place in the queue is held without a word from its agent.
    pub lease: Millis,
    /// How long a frozen list waits for its acks.
    pub prepare: Millis,
    /// How often clusters that nobody polls are looked at.
    pub sweep: Millis,
    /// The first hold-back, doubled with each further count.
    pub hold_back: Millis,
    /// The longest hold-back.
    pub hold_back_cap: Millis,
    /// How long after a retirement an owner may take it back.
    pub unretire: Millis,
    /// Keys that one grant admits, per seat of the cluster.
    pub keys_per_seat: u32,
}

/// How far above everything that a cluster has seen an epoch may be that an agent names. An honest
/// one names none that no service has proposed; a hostile one would otherwise carry all the others
/// to where epochs end, and the cluster could never be frozen again.
pub const EPOCH_DISTANCE: Epoch = 1_000_000;
/// No epoch is above this, whoever names it: rows and counters have room for it and the next ones.
pub const EPOCH_MAX: Epoch = 1 << 62;

impl Settings {
    /// As documented: 90 s, 60 s, 30 s, 2 s doubling to 60 s, a week to take a
    /// retirement back, three keys for each seat.
    pub const DEFAULT: Settings = Settings {
        lease: Millis(90_000),
        prepare: Millis(60_000),
        sweep: Millis(30_000),
        hold_back: Millis(2_000),
        hold_back_cap: Millis(60_000),
        unretire: Millis(7 * 24 * 3_600_000),
        keys_per_seat: 3,
    };

    /// How long the clock must have gone evenly before a cluster's deadline is believed: a minute,
    /// two sweeps.
    #[must_use]
    pub fn steady_after(&self) -> Millis {
        Millis(self.sweep.0.saturating_mul(2))
    }

    /// How long whoever has now been counted `counts` times (1 or more) is held back:
    /// 2^counts seconds by default.
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
