//! The service's time is Postgres' time, carried on between queries by the monotonic clock: all
//! replicas and all tokens agree, whatever this host's wall clock says.

use std::sync::{PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime};

use jiff::Timestamp;

/// A clock that was set by the last answer from Postgres.
#[derive(Debug)]
pub struct Clock {
    set: RwLock<Set>,
}

#[derive(Clone, Copy, Debug)]
struct Set {
    micros: i64,
    at: Instant,
}

impl Default for Clock {
    /// By this host's clock, until Postgres has said something.
    fn default() -> Self {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let micros = i64::try_from(since.as_micros()).unwrap_or(i64::MAX);
        Clock { set: RwLock::new(Set { micros, at: Instant::now() }) }
    }
}

impl Clock {
    /// Postgres has just said that it is `micros`.
    pub fn set(&self, micros: i64) {
        let set = Set { micros, at: Instant::now() };
        *self.set.write().unwrap_or_else(PoisonError::into_inner) = set;
    }

    /// Microseconds since 1970.
    pub fn micros(&self) -> i64 {
        let set = *self.set.read().unwrap_or_else(PoisonError::into_inner);
        let since = i64::try_from(set.at.elapsed().as_micros()).unwrap_or(i64::MAX);
        set.micros.saturating_add(since)
    }

    /// Whole seconds since 1970.
    pub fn seconds(&self) -> u64 {
        Duration::from_micros(self.micros().unsigned_abs()).as_secs()
    }

    /// As the `Date` header writes it (RFC 9110, IMF-fixdate).
    pub fn http_date(&self) -> String {
        let time = Timestamp::from_microsecond(self.micros()).unwrap_or(Timestamp::UNIX_EPOCH);
        time.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_goes_on_from_where_it_was_set_and_is_written_as_http_wants_it() {
        let clock = Clock::default();
        clock.set(784_111_777_000_000);
        assert!(clock.micros() >= 784_111_777_000_000);
        assert_eq!(clock.seconds(), 784_111_777);
        assert_eq!(clock.http_date(), "Sun, 06 Nov 1994 08:49:37 GMT");
    }
}
