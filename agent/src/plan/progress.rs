//! How a learner catches up: how far, how fast, how long still, and whether it does at all.

use std::time::Duration;

/// What was seen of a learner, and when.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// The first look, and the best so far with its time.
    first: Option<(Duration, u64)>,
    best: Option<(Duration, u64)>,
}

/// How it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pace {
    /// Entries that it has to fetch.
    pub behind: u64,
    /// Entries that it has come nearer, in a second.
    pub rate: u64,
    /// How long it will take still, if it goes on like this.
    pub left: Option<Duration>,
}

impl Progress {
    /// The learner was found `behind` at `now` (since some beginning).
    pub(crate) fn look(&mut self, now: Duration, behind: u64) -> Pace {
        let (since, from) = *self.first.get_or_insert((now, behind));
        if self.best.is_none_or(|(_, best)| behind < best) {
            self.best = Some((now, behind));
        }
        let millis = u64::try_from(now.saturating_sub(since).as_millis()).unwrap_or(u64::MAX);
        let nearer = from.saturating_sub(behind);
        let rate = nearer.saturating_mul(1_000).checked_div(millis).unwrap_or(0);
        let left = behind.checked_div(rate).map(Duration::from_secs);
        Pace { behind, rate, left }
    }

    /// For how long it has come no nearer.
    pub(crate) fn stalled(&self, now: Duration) -> Duration {
        self.best.map_or(now, |(since, _)| now.saturating_sub(since))
    }
}
