//! A limited number of slots, shared fairly between networks.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio_util::sync::CancellationToken;

use crate::network_of;

/// A pool of slots. If all are taken, a new connection evicts the oldest connection of the network
/// that holds the most slots, unless that is its own network.
#[derive(Debug)]
pub(crate) struct SlotPool {
    max: usize,
    max_slots_per_network: usize,
    state: Mutex<PoolState>,
}

/// Slots of one network by number, so the oldest is the first.
type NetworkSlots = BTreeMap<u64, CancellationToken>;

#[derive(Debug, Default)]
struct PoolState {
    next: u64,
    taken: usize,
    networks: BTreeMap<IpAddr, NetworkSlots>,
    /// Networks ordered by number of slots, then by age of the oldest slot. The last one loses a
    /// slot if the pool is full.
    ranks: BTreeSet<(usize, Reverse<u64>, IpAddr)>,
}

/// A slot that a connection holds until the value is dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    pool: Arc<SlotPool>,
    network: IpAddr,
    number: u64,
    /// Cancelled when the slot is given to another connection.
    pub(crate) evicted: CancellationToken,
}

impl SlotPool {
    /// Returns a pool of `max` slots, of which one network gets at most `each`.
    pub(crate) fn new(max: usize, each: usize) -> Arc<Self> {
        Arc::new(Self { max, max_slots_per_network: each, state: Mutex::default() })
    }

    /// Takes a slot for a connection from `address`. Returns `None` if there is none.
    pub(crate) fn acquire(self: &Arc<Self>, address: IpAddr) -> Option<Slot> {
        let network = network_of(address);
        let mut inside = self.lock();
        let own = inside.networks.get(&network).map_or(0, NetworkSlots::len);
        if own >= self.max_slots_per_network || inside.taken >= self.max && !inside.evict_for(own) {
            return None;
        }
        let (number, lost) = (inside.next, CancellationToken::new());
        inside.next += 1;
        inside.taken += 1;
        inside.update_network(network, |held| held.insert(number, lost.clone()));
        drop(inside);
        Some(Slot { pool: Arc::clone(self), network, number, evicted: lost })
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PoolState {
    /// Takes a slot from the network that holds the most. Returns false unless that is more than
    /// `own`, the number that the newcomer's network holds.
    fn evict_for(&mut self, own: usize) -> bool {
        let Some(&(most, Reverse(oldest), network)) = self.ranks.last() else { return false };
        if own >= most {
            return false;
        }
        self.release(network, oldest);
        true
    }

    fn release(&mut self, network: IpAddr, number: u64) {
        if let Some(lost) = self.update_network(network, |held| held.remove(&number)) {
            self.taken -= 1;
            lost.cancel();
        }
    }

    fn update_network<T>(
        &mut self,
        network: IpAddr,
        act: impl FnOnce(&mut NetworkSlots) -> T,
    ) -> T {
        let rank = |held: &NetworkSlots| {
            held.first_key_value().map(|(oldest, _)| (held.len(), Reverse(*oldest), network))
        };
        let held = self.networks.entry(network).or_default();
        if let Some(before) = rank(held) {
            self.ranks.remove(&before);
        }
        let done = act(held);
        match rank(held) {
            Some(now) => {
                self.ranks.insert(now);
            }
            None => {
                self.networks.remove(&network);
            }
        }
        done
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.pool.lock().release(self.network, self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn room(max: usize) -> Arc<SlotPool> {
        SlotPool::new(max, usize::MAX)
    }

    fn enter(room: &Arc<SlotPool>, address: &str) -> Slot {
        room.acquire(ip(address)).expect("a place is free")
    }

    #[test]
    fn a_host_that_takes_every_place_keeps_itself_out_and_nobody_else() {
        let room = room(4);
        let silent: Vec<_> = (0..4).map(|_| enter(&room, "10.0.0.66")).collect();
        assert!(room.acquire(ip("10.0.0.66")).is_none());
        let member = enter(&room, "10.0.0.2");
        let other = enter(&room, "10.0.0.3");
        assert!(room.acquire(ip("10.0.0.66")).is_none());
        assert_eq!(
            silent.iter().map(|place| place.evicted.is_cancelled()).collect::<Vec<_>>(),
            [true, true, false, false]
        );
        assert!(!member.evicted.is_cancelled() && !other.evicted.is_cancelled());
    }

    #[test]
    fn a_host_gets_so_many_places_and_no_more_even_if_others_are_free() {
        let room = SlotPool::new(10, 2);
        let first = enter(&room, "10.0.0.66");
        let _second = enter(&room, "10.0.0.66");
        assert!(room.acquire(ip("10.0.0.66")).is_none());
        let _other = enter(&room, "10.0.0.2");
        drop(first);
        let _again = enter(&room, "10.0.0.66");
    }

    #[test]
    fn a_place_that_was_left_is_free_and_nothing_is_remembered() {
        let room = room(1);
        let first = enter(&room, "10.0.0.1");
        assert!(room.acquire(ip("10.0.0.1")).is_none());
        drop(first);
        drop(enter(&room, "10.0.0.1"));
        let inside = room.lock();
        assert_eq!((inside.taken, inside.networks.len(), inside.ranks.len()), (0, 0, 0));
    }

    #[test]
    fn a_place_that_was_lost_is_not_given_back_twice() {
        let room = room(2);
        let lost = enter(&room, "10.0.0.66");
        let _kept = enter(&room, "10.0.0.66");
        let _newcomer = enter(&room, "10.0.0.1");
        drop(lost);
        assert_eq!(room.lock().taken, 2);
    }

    #[test]
    fn a_host_has_one_share_however_many_addresses_of_its_network_it_uses() {
        let room = room(3);
        let _silent: Vec<_> = (1..4).map(|n| enter(&room, &format!("2001:db8::{n}"))).collect();
        assert!(room.acquire(ip("2001:db8::9")).is_none());
        assert!(room.acquire(ip("2001:db8:0:1::9")).is_some());
        assert!(room.acquire(ip("10.0.0.1")).is_some());
    }
}
