//! Places for connections that have not said yet who they are.
//!
//! There are so many places and no more. When they are taken, whoever comes next gets the oldest one
//! of the network that holds the most, unless that is its own: so one host that opens connections
//! and says nothing keeps itself out, and no member.

use std::{
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio_util::sync::CancellationToken;

#[derive(Debug)]
pub(super) struct Strangers {
    max: usize,
    /// Oldest first.
    inside: Mutex<Vec<Stranger>>,
}

#[derive(Debug)]
struct Stranger {
    network: u64,
    token: CancellationToken,
}

/// Somebody's place, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    strangers: Arc<Strangers>,
    /// Cancelled when the place is given to another.
    pub(super) lost: CancellationToken,
}

impl Strangers {
    pub(super) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { max, inside: Mutex::default() })
    }

    /// A place for somebody from `address`; `None` if there is none.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr) -> Option<Place> {
        let network = network(address);
        let mut inside = self.lock();
        if inside.len() >= self.max {
            let held = |network: u64| inside.iter().filter(|s| s.network == network).count();
            let most = inside.iter().map(|s| held(s.network)).max()?;
            if held(network) >= most {
                return None;
            }
            let oldest = inside.iter().position(|s| held(s.network) == most)?;
            inside.remove(oldest).token.cancel();
        }
        let lost = CancellationToken::new();
        inside.push(Stranger { network, token: lost.clone() });
        drop(inside);
        Some(Place { strangers: Arc::clone(self), lost })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Stranger>> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Cancelled, so that it finds itself.
        self.lost.cancel();
        self.strangers.lock().retain(|stranger| !stranger.token.is_cancelled());
    }
}

/// An IPv4 address, or the /64 that one host gets of IPv6.
fn network(address: IpAddr) -> u64 {
    match address.to_canonical() {
        IpAddr::V4(v4) => u64::from(v4.to_bits()),
        IpAddr::V6(v6) => (v6.to_bits() >> 64) as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_host_that_takes_every_place_keeps_itself_out_and_nobody_else() {
        let strangers = Strangers::new(4);
        let silent: Vec<_> = (0..4).map(|_| strangers.enter(ip("10.0.0.66")).unwrap()).collect();
        assert!(strangers.enter(ip("10.0.0.66")).is_none());
        let member = strangers.enter(ip("10.0.0.2")).unwrap();
        let other = strangers.enter(ip("10.0.0.3")).unwrap();
        assert!(strangers.enter(ip("10.0.0.66")).is_none());
        assert_eq!(
            silent.iter().map(|place| place.lost.is_cancelled()).collect::<Vec<_>>(),
            [true, true, false, false]
        );
        assert!(!member.lost.is_cancelled() && !other.lost.is_cancelled());
    }

    #[test]
    fn a_place_that_was_left_is_free() {
        let strangers = Strangers::new(1);
        let first = strangers.enter(ip("10.0.0.1")).unwrap();
        assert!(strangers.enter(ip("10.0.0.1")).is_none());
        drop(first);
        assert!(strangers.enter(ip("10.0.0.1")).is_some());
    }

    #[test]
    fn a_host_has_one_share_however_many_addresses_of_its_network_it_uses() {
        let strangers = Strangers::new(3);
        let _silent: Vec<_> =
            (1..4).map(|n| strangers.enter(ip(&format!("2001:db8::{n}"))).unwrap()).collect();
        assert!(strangers.enter(ip("2001:db8::9")).is_none());
        assert!(strangers.enter(ip("2001:db8:0:1::9")).is_some());
        assert!(strangers.enter(ip("10.0.0.1")).is_some());
    }

    #[test]
    fn v4_in_v6_is_the_same_host() {
        assert_eq!(network(ip("::ffff:10.0.0.1")), network(ip("10.0.0.1")));
    }
}
