//! Bounds on what one address, and all of them together, may ask for before anything costly is
//! done for them.

use std::net::{IpAddr, Ipv6Addr};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use governor::clock::{Clock, DefaultClock};
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};

/// Addresses remembered at once. When that many are active, all new ones share one bucket: a
/// flood from many addresses slows newcomers and never costs memory.
const ADDRESSES_MAX: usize = 65_536;
/// A network of this length is one address: whoever has one IPv6 address has 2⁶⁴ of them.
const IPV6_PREFIX: u32 = 64;
/// Stands for all addresses that found the table full.
const OVERFLOW: IpAddr = IpAddr::V6(Ipv6Addr::UNSPECIFIED);

/// Requests per address.
#[derive(Debug)]
pub struct AddressLimit {
    limiter: DefaultKeyedRateLimiter<IpAddr>,
    clock: DefaultClock,
}

impl AddressLimit {
    /// `rate` a second, `burst` at once; zero counts as one.
    pub fn new(rate: u32, burst: u32) -> Self {
        let at_least_one = |number| NonZeroU32::new(number).unwrap_or(NonZeroU32::MIN);
        let quota = Quota::per_second(at_least_one(rate)).allow_burst(at_least_one(burst));
        AddressLimit { limiter: RateLimiter::keyed(quota), clock: DefaultClock::default() }
    }

    /// Takes one request from `address`, or says how long it has to wait.
    pub fn check(&self, address: IpAddr) -> Result<(), Duration> {
        let mut key = network(address);
        if self.limiter.len() >= ADDRESSES_MAX {
            self.limiter.retain_recent();
            if self.limiter.len() >= ADDRESSES_MAX {
                key = OVERFLOW;
            }
        }
        self.limiter.check_key(&key).map_err(|not_until| not_until.wait_time_from(self.clock.now()))
    }

    /// Forgets addresses that have been quiet long enough to have a full bucket again.
    pub fn forget_quiet(&self) {
        self.limiter.retain_recent();
        self.limiter.shrink_to_fit();
    }
}

fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let mask = u128::MAX << (128 - IPV6_PREFIX);
            IpAddr::V6(Ipv6Addr::from(u128::from(address) & mask))
        }
        address @ IpAddr::V4(_) => address,
    }
}

/// A counted number of places; a place is free again when its guard is dropped.
#[derive(Clone, Debug)]
pub struct Places {
    taken: Arc<AtomicUsize>,
    max: usize,
}

/// One taken place.
#[derive(Debug)]
pub struct Place {
    taken: Arc<AtomicUsize>,
}

impl Places {
    /// `max` places.
    pub fn new(max: usize) -> Self {
        Places { taken: Arc::default(), max }
    }

    /// Takes a place, if there is one.
    pub fn take(&self) -> Option<Place> {
        let take = |taken| (taken < self.max).then_some(taken + 1);
        self.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).ok()?;
        Some(Place { taken: self.taken.clone() })
    }

    /// How many are taken.
    pub fn taken(&self) -> usize {
        self.taken.load(Ordering::Acquire)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.taken.fetch_sub(1, Ordering::AcqRel);
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
        let places = Places::new(1);
        let place = places.take();
        assert!(place.is_some() && places.take().is_none());
        drop(place);
        assert!(places.take().is_some());
    }
}
