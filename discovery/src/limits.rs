//! Limits on how often one address may send requests. They are checked before any costly work.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use governor::clock::{Clock, DefaultClock};
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use muster_shares::network_of;

/// Number of buckets at which the table of buckets is full. An address is known if it has sent a
/// request while the table wasn't full, and another one recently. While the table is full, each
/// known address still gets its own bucket. All other addresses share one. So a flood from many
/// addresses slows down only new clients.
///
/// At most this many addresses are known. A full table can therefore grow by this many buckets, to
/// twice the number, and by the shared bucket.
const ADDRESSES_MAX: usize = 65_536;
/// How long an address stays known after its last request. Agents send several in that time.
const KNOWN_FOR: Duration = Duration::from_mins(10);
/// Minimum time between two cleanups of a full table.
const TIDY_EVERY: Duration = Duration::from_secs(1);
/// Key of the bucket that unknown addresses share while the table is full. A multicast address,
/// because no client has one.
const OVERFLOW: IpAddr = IpAddr::V6(Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0));

/// Token-bucket rate limit for each address.
#[derive(Debug)]
pub(crate) struct AddressLimit {
    limiter: DefaultKeyedRateLimiter<IpAddr>,
    /// Addresses that sent a request while the table wasn't full, and when each sent its last one.
    /// An address is kept longer than its bucket: a cleanup drops the bucket of a client that sends
    /// little.
    known: Mutex<HashMap<IpAddr, Instant>>,
    /// Number of buckets at which the table is full: [`ADDRESSES_MAX`], or fewer in tests.
    max: usize,
    clock: DefaultClock,
    started: Instant,
    /// When the full table was last cleaned up, in milliseconds after `started`. 0 means never.
    tidied_ms: AtomicU64,
}

impl AddressLimit {
    /// Allows `rate` requests a second and `burst` at once. Zero counts as one.
    pub(crate) fn new(rate: u32, burst: u32) -> Self {
        Self::with_max(rate, burst, ADDRESSES_MAX)
    }

    fn with_max(rate: u32, burst: u32, max: usize) -> Self {
        let at_least_one = |number| NonZeroU32::new(number).unwrap_or(NonZeroU32::MIN);
        let quota = Quota::per_second(at_least_one(rate)).allow_burst(at_least_one(burst));
        AddressLimit {
            limiter: RateLimiter::keyed(quota),
            known: Mutex::default(),
            max,
            clock: DefaultClock::default(),
            started: Instant::now(),
            tidied_ms: AtomicU64::new(0),
        }
    }

    /// Counts one request from `address`. The error is the time that the address has to wait before
    /// its next request.
    pub(crate) fn check(&self, address: IpAddr) -> Result<(), Duration> {
        let key = self.bucket_of(network_of(address));
        self.limiter.check_key(&key).map_err(|not_until| not_until.wait_time_from(self.clock.now()))
    }

    /// Returns the key of the bucket that `network` uses now. If the table isn't full, this is its
    /// own bucket, and `network` becomes known if there is room.
    fn bucket_of(&self, network: IpAddr) -> IpAddr {
        if self.is_full() && self.may_tidy() {
            self.limiter.retain_recent();
        }
        let (is_full, now) = (self.is_full(), Instant::now());
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = known.get_mut(&network) {
            *last = now;
            return network;
        }
        if is_full {
            return OVERFLOW;
        }
        if known.len() < self.max {
            known.insert(network, now);
        }
        network
    }

    fn is_full(&self) -> bool {
        self.limiter.len() >= self.max
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

    /// Forgets the bucket of each address that has sent no request for so long that the bucket is
    /// full again. Forgets each known address that has sent no request for [`KNOWN_FOR`].
    pub(crate) fn forget_quiet(&self) {
        self.limiter.retain_recent();
        self.limiter.shrink_to_fit();
        self.forget_quiet_for(KNOWN_FOR);
    }

    fn forget_quiet_for(&self, time: Duration) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, last| last.elapsed() < time);
        known.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Burst of a limit of one request per second. A used-up bucket of this size needs more than a
    /// quarter of an hour to become full again.
    const BURST: u32 = 1_000;

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

    /// Returns the address of host `number`.
    fn host(number: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, number])
    }

    /// Uses up the bucket of a host, so that no cleanup during this test drops the bucket.
    fn use_up(limit: &AddressLimit, host: IpAddr) {
        let burst = NonZeroU32::new(BURST).unwrap();
        limit.limiter.check_key_n(&host, burst).unwrap().unwrap();
    }

    #[test]
    fn a_full_table_leaves_known_addresses_their_buckets_and_gives_all_others_one() {
        let limit = AddressLimit::with_max(1, BURST, 3);
        for number in 1..=3 {
            assert_eq!(limit.bucket_of(host(number)), host(number));
            use_up(&limit, host(number));
        }
        assert_eq!(limit.bucket_of(host(2)), host(2));
        assert_eq!([4, 5].map(|number| limit.bucket_of(host(number))), [OVERFLOW; 2]);
        assert!(limit.check(host(4)).is_ok(), "the shared bucket");
        assert_eq!((limit.limiter.len(), limit.known.lock().unwrap().len()), (4, 3));
    }

    #[test]
    fn an_address_stays_known_without_a_bucket_until_it_has_been_quiet_for_long() {
        let limit = AddressLimit::with_max(1, BURST, 2);
        assert_eq!(limit.bucket_of(host(1)), host(1));
        (8..=9).for_each(|number| use_up(&limit, host(number)));
        assert_eq!([1, 2].map(|number| limit.bucket_of(host(number))), [host(1), OVERFLOW]);
        limit.forget_quiet();
        assert_eq!(limit.bucket_of(host(1)), host(1), "it was here a moment ago");
        limit.forget_quiet_for(Duration::ZERO);
        assert_eq!(limit.bucket_of(host(1)), OVERFLOW);
    }

    #[test]
    fn a_client_on_this_host_does_not_use_the_shared_bucket() {
        assert_ne!(network_of(Ipv6Addr::LOCALHOST.into()), OVERFLOW);
    }

    #[test]
    fn a_full_table_is_not_cleaned_up_twice_in_a_second() {
        let limit = AddressLimit::new(1, 1);
        assert!(limit.may_tidy());
        assert!(!limit.may_tidy(), "not twice at once");
    }
}
