//! Rate limit for log lines. Repeated lines within an interval are counted instead of written.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

const MIN_INTERVAL: Duration = Duration::from_secs(5);

/// Rate limit for log lines with `N` different reasons. For each reason, one line may pass per
/// `MIN_INTERVAL`.
#[derive(Debug)]
pub struct LogLimit<const N: usize> {
    slots: Mutex<[(Option<Instant>, u64); N]>,
}

impl<const N: usize> Default for LogLimit<N> {
    fn default() -> Self {
        Self { slots: Mutex::new([(None, 0); N]) }
    }
}

impl<const N: usize> LogLimit<N> {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Returns `Some(n)` if a line for `reason` may be written now, where `n` counts the lines
    /// suppressed before it. Otherwise returns `None`.
    pub fn pass(&self, reason: usize, now: Instant) -> Option<u64> {
        let mut slots = self.slots.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (last, suppressed) = &mut slots[reason];
        if last.is_some_and(|last| now.saturating_duration_since(last) < MIN_INTERVAL) {
            *suppressed += 1;
            return None;
        }
        *last = Some(now);
        Some(std::mem::take(suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suppressed_lines_are_counted_in_the_next_line() {
        let limit = LogLimit::<2>::new();
        let start = Instant::now();
        assert_eq!(limit.pass(0, start), Some(0));
        assert_eq!(limit.pass(0, start), None);
        assert_eq!(limit.pass(0, start + MIN_INTERVAL / 2), None);
        assert_eq!(limit.pass(1, start), Some(0), "another reason has its own line");
        assert_eq!(limit.pass(0, start + MIN_INTERVAL), Some(2));
    }
}
