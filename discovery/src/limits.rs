//! Limits on what one address, and all addresses together, may ask for. They are checked before any
//! costly work.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use governor::clock::{Clock, DefaultClock};
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use muster_door::network_of;

/// Maximum number of addresses remembered at once. When the table is full, all new addresses share
/// one bucket. A flood from many addresses so slows down newcomers and never costs memory.
const ADDRESSES_MAX: usize = 65_536;
/// Minimum time between two cleanups of a full table.
const TIDY_EVERY: Duration = Duration::from_secs(1);
/// Key of the bucket that is shared by all addresses that found the table full.
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

    /// Counts one request from `address`. An error is the time that the address has to wait.
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

    /// Whether a full table may be cleaned up now. A cleanup visits every address, so at most one
    /// runs in each [`TIDY_EVERY`], however many requests ask.
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

/// Limited number of slots, with a limit per key as well (an agent, an address). Dropping a slot's
/// guard frees it.
#[derive(Clone, Debug)]
pub(crate) struct SlotPool<K: Ord> {
    taken: Arc<Mutex<SlotCounts<K>>>,
    max: usize,
    max_per_key: usize,
}

#[derive(Debug)]
struct SlotCounts<K> {
    total: usize,
    by_key: BTreeMap<K, usize>,
}

/// Guard of one occupied slot. Dropping it frees the slot.
#[derive(Debug)]
pub(crate) struct Slot<K: Ord> {
    taken: Arc<Mutex<SlotCounts<K>>>,
    key: K,
}

impl<K: Ord + Clone> SlotPool<K> {
    /// Makes `max` slots, of which one key may hold at most `each`.
    pub(crate) fn new(max: usize, each: usize) -> Self {
        SlotPool {
            taken: Arc::new(Mutex::new(SlotCounts { total: 0, by_key: BTreeMap::new() })),
            max,
            max_per_key: each,
        }
    }

    /// Takes a slot for `key`. Returns `None` if all slots, or all of this key's, are occupied.
    pub(crate) fn take(&self, key: K) -> Option<Slot<K>> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.total >= self.max
            || taken.by_key.get(&key).is_some_and(|own| *own >= self.max_per_key)
        {
            return None;
        }
        taken.total += 1;
        *taken.by_key.entry(key.clone()).or_default() += 1;
        drop(taken);
        Some(Slot { taken: self.taken.clone(), key })
    }

    /// Number of occupied slots.
    pub(crate) fn taken(&self) -> usize {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).total
    }
}

impl<K: Ord> Drop for Slot<K> {
    fn drop(&mut self) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.total -= 1;
        let own = taken.by_key.get_mut(&self.key).expect("a place is counted until it is dropped");
        *own -= 1;
        if *own == 0 {
            taken.by_key.remove(&self.key);
        }
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
    fn places_run_out_and_come_back() {
        let places = SlotPool::new(1, 1);
        let place = places.take("a");
        assert!(place.is_some() && places.take("b").is_none());
        drop(place);
        assert!(places.take("b").is_some());
    }

    #[test]
    fn nobody_takes_all_the_places() {
        let places = SlotPool::new(10, 2);
        let own = [places.take("loud"), places.take("loud")];
        assert!(own.iter().all(Option::is_some) && places.take("loud").is_none());
        assert!(places.take("quiet").is_some());
        drop(own);
        assert_eq!((places.taken(), places.taken.lock().unwrap().by_key.len()), (0, 0));
    }

    #[test]
    fn a_full_table_is_not_gone_through_for_each_request() {
        let limit = AddressLimit::new(1, 1);
        assert!(limit.may_tidy());
        assert!(!limit.may_tidy(), "not twice at once");
    }
}
