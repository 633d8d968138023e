//! A limited number of slots, shared fairly between the keys that hold them.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio_util::sync::CancellationToken;

/// A pool of slots, with a maximum for each key, such as a network or an agent. Clones share the
/// slots.
#[derive(Clone, Debug)]
pub struct SlotPool<K: Ord + Clone> {
    max: usize,
    max_per_key: usize,
    state: Arc<Mutex<PoolState<K>>>,
}

/// Slots of one key by number, so the oldest is the first.
type KeySlots = BTreeMap<u64, CancellationToken>;

#[derive(Debug)]
struct PoolState<K> {
    next: u64,
    taken: usize,
    by_key: BTreeMap<K, KeySlots>,
    /// Keys ordered by number of slots, then by age of the oldest slot. If a slot is evicted, the
    /// last key in this order loses it.
    ranks: BTreeSet<(usize, Reverse<u64>, K)>,
}

/// A slot that is held until the value is dropped.
#[derive(Debug)]
pub struct Slot<K: Ord + Clone> {
    pool: Arc<Mutex<PoolState<K>>>,
    key: K,
    number: u64,
    evicted: CancellationToken,
}

impl<K: Ord + Clone> SlotPool<K> {
    /// Makes `max` slots. One key may hold at most `max_per_key` of them.
    #[must_use]
    pub fn new(max: usize, max_per_key: usize) -> Self {
        let state =
            PoolState { next: 0, taken: 0, by_key: BTreeMap::new(), ranks: BTreeSet::new() };
        Self { max, max_per_key, state: Arc::new(Mutex::new(state)) }
    }

    /// Takes a slot for `key`. Returns `None` if no slot is free, or if `key` holds as many slots
    /// as one key may.
    #[must_use]
    pub fn take(&self, key: K) -> Option<Slot<K>> {
        self.take_if(key, |_, _| false)
    }

    /// Takes a slot for `key`. If all slots are taken, the key that holds the most slots loses its
    /// oldest one. Returns `None` if `key` holds as many slots as one key may, or if no key holds
    /// more slots than `key`.
    #[must_use]
    pub fn take_or_evict(&self, key: K) -> Option<Slot<K>> {
        self.take_if(key, PoolState::evict_for)
    }

    /// Returns the number of slots that are taken.
    #[must_use]
    pub fn taken(&self) -> usize {
        lock(&self.state).taken
    }

    /// Takes a slot for `key`. If all slots are taken, calls `make_room`, which may free a slot.
    /// Its argument is the number of slots that `key` holds.
    fn take_if(
        &self,
        key: K,
        make_room: impl FnOnce(&mut PoolState<K>, usize) -> bool,
    ) -> Option<Slot<K>> {
        let mut state = lock(&self.state);
        let own = state.by_key.get(&key).map_or(0, KeySlots::len);
        if own >= self.max_per_key || state.taken >= self.max && !make_room(&mut state, own) {
            return None;
        }
        let (number, evicted) = (state.next, CancellationToken::new());
        state.next += 1;
        state.taken += 1;
        state.update(&key, |held| held.insert(number, evicted.clone()));
        drop(state);
        Some(Slot { pool: Arc::clone(&self.state), key, number, evicted })
    }
}

fn lock<K>(state: &Mutex<PoolState<K>>) -> MutexGuard<'_, PoolState<K>> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<K: Ord + Clone> PoolState<K> {
    /// Evicts the oldest slot of the key that holds the most slots. `own` is the number of slots of
    /// the key that needs another one. Returns false if no key holds more than `own` slots.
    fn evict_for(&mut self, own: usize) -> bool {
        let Some((most, Reverse(oldest), key)) = self.ranks.last().cloned() else { return false };
        if own >= most {
            return false;
        }
        self.release(&key, oldest);
        true
    }

    fn release(&mut self, key: &K, number: u64) {
        if let Some(evicted) = self.update(key, |held| held.remove(&number)) {
            self.taken -= 1;
            evicted.cancel();
        }
    }

    fn update<T>(&mut self, key: &K, act: impl FnOnce(&mut KeySlots) -> T) -> T {
        let rank = |held: &KeySlots| {
            held.first_key_value().map(|(oldest, _)| (held.len(), Reverse(*oldest), key.clone()))
        };
        let held = self.by_key.entry(key.clone()).or_default();
        if let Some(before) = rank(held) {
            self.ranks.remove(&before);
        }
        let done = act(held);
        match rank(held) {
            Some(now) => {
                self.ranks.insert(now);
            }
            None => {
                self.by_key.remove(key);
            }
        }
        done
    }
}

impl<K: Ord + Clone> Slot<K> {
    /// Waits until the slot is given to another key.
    pub(crate) async fn evicted(&self) {
        self.evicted.cancelled().await;
    }
}

impl<K: Ord + Clone> Drop for Slot<K> {
    fn drop(&mut self) {
        lock(&self.pool).release(&self.key, self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use crate::network_of;

    fn network(text: &str) -> IpAddr {
        network_of(text.parse().expect("an address"))
    }

    fn room(max: usize) -> SlotPool<IpAddr> {
        SlotPool::new(max, usize::MAX)
    }

    fn enter(room: &SlotPool<IpAddr>, address: &str) -> Slot<IpAddr> {
        room.take_or_evict(network(address)).expect("a slot is free")
    }

    #[test]
    fn a_host_that_takes_all_slots_keeps_only_itself_out() {
        let room = room(4);
        let silent: Vec<_> = (0..4).map(|_| enter(&room, "10.0.0.66")).collect();
        assert!(room.take_or_evict(network("10.0.0.66")).is_none());
        let member = enter(&room, "10.0.0.2");
        let other = enter(&room, "10.0.0.3");
        assert!(room.take_or_evict(network("10.0.0.66")).is_none());
        assert_eq!(
            silent.iter().map(|place| place.evicted.is_cancelled()).collect::<Vec<_>>(),
            [true, true, false, false]
        );
        assert!(!member.evicted.is_cancelled() && !other.evicted.is_cancelled());
    }

    #[test]
    fn a_host_gets_at_most_its_maximum_even_if_slots_are_free() {
        let room = SlotPool::new(10, 2);
        let first = enter(&room, "10.0.0.66");
        let _second = enter(&room, "10.0.0.66");
        assert!(room.take_or_evict(network("10.0.0.66")).is_none());
        let _other = enter(&room, "10.0.0.2");
        drop(first);
        let _again = enter(&room, "10.0.0.66");
    }

    #[test]
    fn a_dropped_slot_is_free_again_and_leaves_no_state() {
        let room = room(1);
        let first = enter(&room, "10.0.0.1");
        assert!(room.take_or_evict(network("10.0.0.1")).is_none());
        drop(first);
        drop(enter(&room, "10.0.0.1"));
        let state = lock(&room.state);
        assert_eq!((state.taken, state.by_key.len(), state.ranks.len()), (0, 0, 0));
    }

    #[test]
    fn an_evicted_slot_is_not_released_twice() {
        let room = room(2);
        let lost = enter(&room, "10.0.0.66");
        let _kept = enter(&room, "10.0.0.66");
        let _newcomer = enter(&room, "10.0.0.1");
        drop(lost);
        assert_eq!(room.taken(), 2);
    }

    #[test]
    fn addresses_of_one_network_share_the_slots_of_one_host() {
        let room = room(3);
        let _silent: Vec<_> = (1..4).map(|n| enter(&room, &format!("2001:db8::{n}"))).collect();
        assert!(room.take_or_evict(network("2001:db8::9")).is_none());
        assert!(room.take_or_evict(network("2001:db8:0:1::9")).is_some());
        assert!(room.take_or_evict(network("10.0.0.1")).is_some());
    }

    #[test]
    fn a_dropped_slot_can_be_taken_by_another_key() {
        let slots = SlotPool::new(1, 1);
        let slot = slots.take("a");
        assert!(slot.is_some() && slots.take("b").is_none());
        drop(slot);
        assert!(slots.take("b").is_some());
    }

    #[test]
    fn one_key_gets_at_most_its_maximum_of_slots() {
        let slots = SlotPool::new(10, 2);
        let own = [slots.take("loud"), slots.take("loud")];
        assert!(own.iter().all(Option::is_some) && slots.take("loud").is_none());
        assert!(slots.take("quiet").is_some());
        drop(own);
        assert_eq!((slots.taken(), lock(&slots.state).by_key.len()), (0, 0));
    }
}
