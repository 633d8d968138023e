//! Limits on how often one address may send requests. They are checked before any costly work.

use std::net::{IpAddr, Ipv6Addr};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use governor::clock::{Clock, DefaultClock};
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use muster_shares::network_of;

/// Maximum number of addresses remembered at once. While the table is full, all addresses share one
/// bucket. So a flood from many addresses slows down all clients, but doesn't use more memory.
const ADDRESSES_MAX: usize = 65_536;
/// Minimum time between two cleanups of a full table.
const TIDY_EVERY: Duration = Duration::from_secs(1);
/// Key of the bucket that all addresses share while the table is full.
const OVERFLOW: IpAddr = IpAddr::V6(Ipv6Addr::UNSPECIFIED);

/// Token-bucket rate limit for each address.
#[derive(Debug)]
pub(crate) struct AddressLimit {
    limiter: DefaultKeyedRateLimiter<IpAddr>,
    clock: DefaultClock,
    started: Instant,
    /// When the full table was last cleaned up, in milliseconds after `started`. 0 means never.
    tidied_ms: AtomicU64,
}

impl AddressLimit {
    /// Allows `rate` requests a second and `burst` at once. Zero counts as one.
    pub(crate) fn new(rate: u32, burst: u32) -> Self {
        let at_least_one = |number| NonZeroU32::new(number).unwrap_or(NonZeroU32::MIN);
        let quota = Quota::per_second(at_least_one(rate)).allow_burst(at_least_one(burst));
        AddressLimit {
            limiter: RateLimiter::keyed(quota),
            clock: DefaultClock::default(),
            started: Instant::now(),
            tidied_ms: AtomicU64::new(0),
        }
    }

    /// Counts one request from `address`. The error is the time that the address has to wait before
    /// its next request.
    pub(crate) fn check(&self, address: IpAddr) -> Result<(), Duration> {
        let mut key = network_of(address);
        if self.limiter.len() >= ADDRESSES_MAX {
            if self.may_tidy() {
                self.limiter.retain_recent();
            }
            if self.limiter.len() >= ADDRESSES_MAX {
                key = OVERFLOW;
            }
        }
        self.limiter.check_key(&key).map_err(|not_until| not_until.wait_time_from(self.clock.now()))
    }

    /// Whether a full table may be cleaned up now. If so, the time is recorded as that of the last
    /// cleanup. A cleanup visits every address, so at most one runs in each [`TIDY_EVERY`], however
    /// many requests ask.
    fn may_tidy(&self) -> bool {
        let now = self.started.elapsed().as_millis() as u64 + 1; // 0 means never.
        let tidy = |last: u64| {
            (last == 0 || now - last.min(now) >= TIDY_EVERY.as_millis() as u64).then_some(now)
        };
        self.tidied_ms.fetch_update(Ordering::AcqRel, Ordering::Acquire, tidy).is_ok()
    }

    /// Forgets addresses that have been quiet long enough to have a full bucket again.
    pub(crate) fn forget_quiet(&self) {
        self.limiter.retain_recent();
        self.limiter.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_used_its_burst_waits_and_others_do_not() {
        let limit = AddressLimit::new(1, 3);
        let (loud, quiet) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        assert!((0..3).all(|_| limit.check(loud).is_ok()));
        assert!(limit.check(loud).is_err_and(|wait| wait <= Duration::from_secs(1)));
        assert!(limit.check(quiet).is_ok());
    }

    #[test]
    fn addresses_of_one_ipv6_network_share_a_bucket() {
        let limit = AddressLimit::new(1, 1);
        assert!(limit.check("fd00::1".parse().unwrap()).is_ok());
        assert!(limit.check("fd00::2".parse().unwrap()).is_err());
        assert!(limit.check("fd00:0:0:1::1".parse().unwrap()).is_ok());
    }

    #[test]
    fn a_full_table_is_not_cleaned_up_twice_in_a_second() {
        let limit = AddressLimit::new(1, 1);
        assert!(limit.may_tidy());
        assert!(!limit.may_tidy(), "not twice at once");
    }
}
