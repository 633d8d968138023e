//! The service's time: Postgres' time, extrapolated between queries by the monotonic clock. So all
//! replicas use the same time for tokens, whatever the wall clocks of their hosts say.
//!
//! The monotonic clock also shows when Postgres' clock was set:
//!
//! - After a jump forward the clock can be set back again. No deadline is trusted before the clock
//!   has run without a jump for a while.
//! - After a jump backward, deadlines that were stored while the clock was ahead are too late, and
//!   have to be computed again.

use std::sync::{PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime};

use jiff::Timestamp;

/// If Postgres' time differs from the extrapolated time by more than this, Postgres' clock was set.
/// The delay of an answer causes a smaller difference.
const MIN_JUMP: Duration = Duration::from_secs(10);
/// Maximum time between two answers of Postgres. Sweeps query Postgres more often, so a longer gap
/// means an outage, during which agents' reports could not be stored.
const MAX_ANSWER_GAP: Duration = Duration::from_secs(120);

/// Clock that is set by every answer from Postgres.
#[derive(Debug)]
pub(crate) struct Clock {
    set: RwLock<ClockReading>,
}

#[derive(Clone, Copy, Debug)]
struct ClockReading {
    micros: i64,
    at: Instant,
    /// When Postgres' clock was last seen to jump, or when this process started.
    steady_since: Instant,
    /// Start of the current period in which agents could report to this process. A gap in Postgres'
    /// answers or a jump of its clock begins a new period.
    listening_since: Instant,
    /// Whether Postgres' clock was set back and `take_was_set_back` hasn't reported that yet.
    was_set_back: bool,
}

impl ClockReading {
    /// The last reading from Postgres plus the monotonic time since, in microseconds since 1970.
    fn extrapolated(&self) -> i64 {
        let since = i64::try_from(self.at.elapsed().as_micros()).unwrap_or(i64::MAX);
        self.micros.saturating_add(since)
    }
}

impl Default for Clock {
    /// Uses this host's clock until Postgres has answered.
    fn default() -> Self {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let micros = i64::try_from(since.as_micros()).unwrap_or(i64::MAX);
        let now = Instant::now();
        Clock {
            set: RwLock::new(ClockReading {
                micros,
                at: now,
                steady_since: now,
                listening_since: now,
                was_set_back: false,
            }),
        }
    }
}

impl Clock {
    /// Sets the clock to `micros`, the time that Postgres has just reported, and notes a jump.
    pub(crate) fn set(&self, micros: i64) {
        let mut set = self.set.write().unwrap_or_else(PoisonError::into_inner);
        let (now, off) = (Instant::now(), micros.saturating_sub(set.extrapolated()));
        if Duration::from_micros(off.unsigned_abs()) > MIN_JUMP {
            set.steady_since = now;
            set.listening_since = now;
            set.was_set_back |= off < 0;
            tracing::warn!(off_ms = off / 1_000, "the database's clock was set");
        }
        if now.duration_since(set.at) > MAX_ANSWER_GAP {
            set.listening_since = now;
        }
        (set.micros, set.at) = (micros, now);
    }

    /// How long Postgres' clock has agreed with the monotonic clock, as far as this process has
    /// seen.
    pub(crate) fn steady_for(&self) -> Duration {
        self.set.read().unwrap_or_else(PoisonError::into_inner).steady_since.elapsed()
    }

    /// How long agents could report to this process: since its start, since Postgres' clock last
    /// jumped, or since Postgres answered again after an outage.
    pub(crate) fn listening_for(&self) -> Duration {
        self.set.read().unwrap_or_else(PoisonError::into_inner).listening_since.elapsed()
    }

    /// Makes this process look as if agents could report to it for `time`.
    #[cfg(test)]
    pub(crate) fn pretend_listening_for(&self, time: Duration) {
        let since = Instant::now().checked_sub(time).expect("the machine runs for that long");
        self.set.write().unwrap_or_else(PoisonError::into_inner).listening_since = since;
    }

    /// Whether Postgres' clock was set back since the last call. Each jump backward is reported by
    /// one call only, unless [`Clock::restore_was_set_back`] is called.
    pub(crate) fn take_was_set_back(&self) -> bool {
        let mut set = self.set.write().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut set.was_set_back)
    }

    /// Lets the next call of [`Clock::take_was_set_back`] report a jump backward again. A caller
    /// uses this if it could not do everything that the jump requires.
    pub(crate) fn restore_was_set_back(&self) {
        self.set.write().unwrap_or_else(PoisonError::into_inner).was_set_back = true;
    }

    /// Current time in microseconds since 1970.
    pub(crate) fn micros(&self) -> i64 {
        self.set.read().unwrap_or_else(PoisonError::into_inner).extrapolated()
    }

    /// Current time in whole seconds since 1970.
    pub(crate) fn seconds(&self) -> u64 {
        Duration::from_micros(self.micros().unsigned_abs()).as_secs()
    }

    /// Current time as a `Date` header (RFC 9110, IMF-fixdate).
    pub(crate) fn http_date(&self) -> String {
        let time = Timestamp::from_microsecond(self.micros()).unwrap_or(Timestamp::UNIX_EPOCH);
        time.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jump_of_the_databases_clock_is_noticed_in_both_directions() {
        const HOUR: i64 = 3_600_000_000;
        let clock = Clock::default();
        let start = clock.micros();
        std::thread::sleep(Duration::from_millis(20));
        clock.set(start + 1_000_000);
        assert!(clock.steady_for() >= Duration::from_millis(20), "an answer that came late");
        clock.set(start + HOUR);
        assert!(clock.steady_for() < Duration::from_millis(20));
        assert!(!clock.take_was_set_back());
        clock.set(start);
        assert!(clock.take_was_set_back());
        assert!(!clock.take_was_set_back(), "told once");
        clock.restore_was_set_back();
        assert!(clock.take_was_set_back(), "told again");
        clock.set(start - HOUR);
        clock.set(start);
        assert!(clock.take_was_set_back(), "though it was put right before anybody asked");
    }

    #[test]
    fn the_clock_runs_on_from_its_last_reading_and_formats_http_dates() {
        let clock = Clock::default();
        clock.set(784_111_777_000_000);
        assert!(clock.micros() >= 784_111_777_000_000);
        assert_eq!(clock.seconds(), 784_111_777);
        assert_eq!(clock.http_date(), "Sun, 06 Nov 1994 08:49:37 GMT");
    }
}
