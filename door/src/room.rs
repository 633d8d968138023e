//! A limited number of slots, shared fairly between networks.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio_util::sync::CancellationToken;

use crate::network;

/// A pool of slots. If all are taken, a new connection evicts the oldest connection of the network
/// that holds the most slots, unless that is its own network.
#[derive(Debug)]
pub(crate) struct Room {
    max: usize,
    each: usize,
    inside: Mutex<Inside>,
}

/// Slots of one network by number, so the oldest is the first.
type Held = BTreeMap<u64, CancellationToken>;

#[derive(Debug, Default)]
struct Inside {
    next: u64,
    taken: usize,
    networks: BTreeMap<IpAddr, Held>,
    /// Networks ordered by number of slots, then by age of the oldest slot. The last one loses a
    /// slot if the pool is full.
    ranks: BTreeSet<(usize, Reverse<u64>, IpAddr)>,
}

/// A slot that a connection holds until the value is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    room: Arc<Room>,
    network: IpAddr,
    number: u64,
    /// Cancelled when the slot is given to another connection.
    pub(crate) lost: CancellationToken,
}

impl Room {
    /// Returns a pool of `max` slots, of which one network gets at most `each`.
    pub(crate) fn new(max: usize, each: usize) -> Arc<Self> {
        Arc::new(Self { max, each, inside: Mutex::default() })
    }

    /// Takes a slot for a connection from `address`. Returns `None` if there is none.
    pub(crate) fn enter(self: &Arc<Self>, address: IpAddr) -> Option<Place> {
        let network = network(address);
        let mut inside = self.lock();
        let own = inside.networks.get(&network).map_or(0, Held::len);
        if own >= self.each || inside.taken >= self.max && !inside.make_room(own) {
            return None;
        }
        let (number, lost) = (inside.next, CancellationToken::new());
        inside.next += 1;
        inside.taken += 1;
        inside.change(network, |held| held.insert(number, lost.clone()));
        drop(inside);
        Some(Place { room: Arc::clone(self), network, number, lost })
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inside {
    /// Takes a slot from the network that holds the most. Returns false unless that is more than
    /// `own`, the number that the newcomer's network holds.
    fn make_room(&mut self, own: usize) -> bool {
        let Some(&(most, Reverse(oldest), network)) = self.ranks.last() else { return false };
        if own >= most {
            return false;
        }
        self.leave(network, oldest);
        true
    }

    fn leave(&mut self, network: IpAddr, number: u64) {
        if let Some(lost) = self.change(network, |held| held.remove(&number)) {
            self.taken -= 1;
            lost.cancel();
        }
    }

    fn change<T>(&mut self, network: IpAddr, act: impl FnOnce(&mut Held) -> T) -> T {
        let rank = |held: &Held| {
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

impl Drop for Place {
    fn drop(&mut self) {
        self.room.lock().leave(self.network, self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn room(max: usize) -> Arc<Room> {
        Room::new(max, usize::MAX)
    }

    fn enter(room: &Arc<Room>, address: &str) -> Place {
        room.enter(ip(address)).expect("a place is free")
    }

    #[test]
    fn a_host_that_takes_every_place_keeps_itself_out_and_nobody_else() {
        let room = room(4);
        let silent: Vec<_> = (0..4).map(|_| enter(&room, "10.0.0.66")).collect();
        assert!(room.enter(ip("10.0.0.66")).is_none());
        let member = enter(&room, "10.0.0.2");
        let other = enter(&room, "10.0.0.3");
        assert!(room.enter(ip("10.0.0.66")).is_none());
        assert_eq!(
            silent.iter().map(|place| place.lost.is_cancelled()).collect::<Vec<_>>(),
            [true, true, false, false]
        );
        assert!(!member.lost.is_cancelled() && !other.lost.is_cancelled());
    }

    #[test]
    fn a_host_gets_so_many_places_and_no_more_even_if_others_are_free() {
        let room = Room::new(10, 2);
        let first = enter(&room, "10.0.0.66");
        let _second = enter(&room, "10.0.0.66");
        assert!(room.enter(ip("10.0.0.66")).is_none());
        let _other = enter(&room, "10.0.0.2");
        drop(first);
        let _again = enter(&room, "10.0.0.66");
    }

    #[test]
    fn a_place_that_was_left_is_free_and_nothing_is_remembered() {
        let room = room(1);
        let first = enter(&room, "10.0.0.1");
        assert!(room.enter(ip("10.0.0.1")).is_none());
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
        assert!(room.enter(ip("2001:db8::9")).is_none());
        assert!(room.enter(ip("2001:db8:0:1::9")).is_some());
        assert!(room.enter(ip("10.0.0.1")).is_some());
    }
}
