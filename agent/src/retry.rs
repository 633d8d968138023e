//! The retry policy for the discovery service: exponential, jittered, capped.

use std::time::Duration;

use backon::{BackoffBuilder, ConstantBuilder, ExponentialBackoff, ExponentialBuilder};

/// Pause after the first failure.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause before jitter, which adds at most as much again.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Pauses between attempts. A success resets them to the first pause.
#[derive(Debug)]
pub(crate) struct Retry {
    pauses: ExponentialBackoff,
    attempts: u32,
}

impl Default for Retry {
    fn default() -> Self {
        Self { pauses: pauses(), attempts: 0 }
    }
}

impl Retry {
    /// Returns how long to wait before the next attempt.
    pub(crate) fn next_pause(&mut self) -> Duration {
        self.attempts = self.attempts.saturating_add(1);
        self.pauses.next().unwrap_or(LONGEST_PAUSE)
    }

    /// Returns the number of consecutive failures.
    pub(crate) fn attempts(&self) -> u32 {
        self.attempts
    }

    /// Resets the pauses after a success.
    pub(crate) fn reset(&mut self) {
        *self = Self::default();
    }
}

/// Returns `delay` plus a random time of at most `delay`. So hosts that started together don't
/// retry together.
pub(crate) fn jittered(delay: Duration) -> Duration {
    let once = ConstantBuilder::default().with_delay(delay).with_jitter().build().next();
    once.unwrap_or(delay)
}

fn pauses() -> ExponentialBackoff {
    ExponentialBuilder::default()
        .with_min_delay(FIRST_PAUSE)
        .with_max_delay(LONGEST_PAUSE)
        .with_jitter()
        .without_max_times()
        .build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_at_most_twice_the_cap_and_never_end() {
        let mut retry = Retry::default();
        let pauses: Vec<_> = (0..200).map(|_| retry.next_pause()).collect();
        assert!(pauses[0] >= FIRST_PAUSE && pauses[0] <= 2 * FIRST_PAUSE);
        assert!(pauses.iter().all(|pause| *pause <= 2 * LONGEST_PAUSE));
        assert!(pauses[199] >= LONGEST_PAUSE);
        assert_eq!(retry.attempts(), 200);
    }

    #[test]
    fn a_success_starts_from_the_first_pause_again() {
        let mut retry = Retry::default();
        for _ in 0..20 {
            retry.next_pause();
        }
        retry.reset();
        assert!(retry.next_pause() <= 2 * FIRST_PAUSE);
    }
}
