//! How a learner catches up: entries left, rate, time left, and whether it has stalled.

use std::time::Duration;

/// Observations of a learner's progress over time.
#[derive(Debug, Default)]
pub(crate) struct CatchUpProgress {
    /// The first observation: its time, and the number of entries that were left.
    first: Option<(Duration, u64)>,
    /// The observation with the fewest entries left: its time, and that number of entries.
    best: Option<(Duration, u64)>,
}

/// A learner's progress at one observation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CatchUpRate {
    /// Entries that the learner lacks.
    pub behind: u64,
    /// Number of entries per second by which the gap has shrunk since the first observation.
    pub rate: u64,
    /// Time left at this rate; `None` if the rate is zero.
    pub left: Option<Duration>,
}

impl CatchUpProgress {
    /// Records that the learner lacked `behind` entries at `now`, the time since a fixed start.
    pub(crate) fn record(&mut self, now: Duration, behind: u64) -> CatchUpRate {
        let (since, from) = *self.first.get_or_insert((now, behind));
        if self.best.is_none_or(|(_, best)| behind < best) {
            self.best = Some((now, behind));
        }
        let millis = u64::try_from(now.saturating_sub(since).as_millis()).unwrap_or(u64::MAX);
        let nearer = from.saturating_sub(behind);
        let rate = nearer.saturating_mul(1_000).checked_div(millis).unwrap_or(0);
        let left = behind.checked_div(rate).map(Duration::from_secs);
        CatchUpRate { behind, rate, left }
    }

    /// Returns for how long the learner's gap has not shrunk.
    pub(crate) fn stalled_for(&self, now: Duration) -> Duration {
        self.best.map_or(now, |(since, _)| now.saturating_sub(since))
    }
}
