//! Times and limits of the service. Each can be set, so that tests can be fast.

use crate::values::{Epoch, Millis};

/// Times and limits of formation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormationSettings {
    /// Time for which a silent agent keeps its seat or its place in the queue.
    pub lease: Millis,
    /// Time for which a frozen list of members waits for its acks.
    pub ack_timeout: Millis,
    /// Interval at which clusters that nobody polls are examined.
    pub sweep: Millis,
    /// Length of an agent's first backoff, doubled with each further failed list.
    pub first_backoff: Millis,
    /// Upper limit of a backoff.
    pub max_backoff: Millis,
    /// Time after a retirement in which an owner may undo it, and after an expiry in which an owner
    /// may reopen the cluster.
    pub undo_window: Millis,
    /// Number of keys that one grant admits, per seat of the cluster.
    pub keys_per_seat: u32,
}

/// Largest distance by which an agent's epoch may exceed the highest epoch that the cluster has
/// seen. An honest agent names only epochs that a service has proposed. A hostile agent could
/// otherwise raise the cluster's epoch to the highest possible one, and no list could be frozen
/// again.
pub const MAX_EPOCH_DISTANCE: Epoch = 1_000_000;
/// Highest epoch that anybody may name. Rows and counters have room for even higher epochs.
pub const MAX_EPOCH: Epoch = 1 << 62;

impl FormationSettings {
    /// Documented defaults: a lease of 90 s, 60 s for the acks, and a sweep every 30 s. Backoffs
    /// grow from 2 s to 60 s, a retirement or an expiry can be undone for a week, and each seat
    /// admits three keys.
    pub const DEFAULT: FormationSettings = FormationSettings {
        lease: Millis(90_000),
        ack_timeout: Millis(60_000),
        sweep: Millis(30_000),
        first_backoff: Millis(2_000),
        max_backoff: Millis(60_000),
        undo_window: Millis(7 * 24 * 3_600_000),
        keys_per_seat: 3,
    };

    /// Returns how long the clock must have run evenly before a cluster's deadline is trusted: two
    /// sweeps, a minute by default.
    #[must_use]
    pub fn steady_after(&self) -> Millis {
        Millis(self.sweep.0.saturating_mul(2))
    }

    /// Returns the length of the backoff after `counts` failed lists (1 or more): 2^counts seconds
    /// by default, up to the limit.
    #[must_use]
    pub fn backoff_after(&self, counts: u32) -> Millis {
        let doubled = self.first_backoff.0.saturating_mul(1 << counts.saturating_sub(1).min(16));
        Millis(doubled.min(self.max_backoff.0))
    }
}

impl Default for FormationSettings {
    fn default() -> FormationSettings {
        FormationSettings::DEFAULT
    }
}
