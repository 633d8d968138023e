//! The set of states that were seen, as fingerprints: 16 bytes each, in shards that grow one at a
//! time, so that memory never doubles at once.

use std::sync::{Mutex, PoisonError};

const SHARDS: usize = 256;

/// A set of fingerprints that two threads can add to.
#[derive(Debug)]
pub struct Visited {
    shards: Vec<Mutex<Table>>,
}

#[derive(Debug)]
struct Table {
    /// 0 is an empty slot: no fingerprint is 0 in practice, and one would only be seen twice.
    slots: Vec<u128>,
    used: usize,
}

impl Default for Visited {
    fn default() -> Visited {
        let table = || Mutex::new(Table { slots: vec![0; 64], used: 0 });
        Visited { shards: (0..SHARDS).map(|_| table()).collect() }
    }
}

impl Visited {
    /// Adds `fingerprint`; false if it was there.
    pub fn insert(&self, fingerprint: u128) -> bool {
        let shard = (fingerprint >> 120) as usize % SHARDS;
        // A thread that panicked has not left a table half changed in a way that matters here.
        let mut table = self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner);
        if (table.used + 1) * 5 > table.slots.len() * 4 {
            table.grow();
        }
        let fresh = table.put(fingerprint);
        table.used += usize::from(fresh);
        fresh
    }
}

impl Table {
    fn put(&mut self, fingerprint: u128) -> bool {
        let mask = self.slots.len() - 1;
        let mut slot = fingerprint as usize & mask;
        loop {
            match self.slots[slot] {
                0 => {
                    self.slots[slot] = fingerprint;
                    return true;
                }
                known if known == fingerprint => return false,
                _ => slot = (slot + 1) & mask,
            }
        }
    }

    fn grow(&mut self) {
        let larger = vec![0; self.slots.len() * 2];
        let old = std::mem::replace(&mut self.slots, larger);
        for fingerprint in old.into_iter().filter(|&fingerprint| fingerprint != 0) {
            self.put(fingerprint);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_is_new_once_however_often_the_table_grows() {
        let visited = Visited::default();
        let fingerprint = |n: u128| (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_d6e8_feb8_6659_fd93);
        assert!((0..100_000).all(|n| visited.insert(fingerprint(n))));
        assert!(!(0..100_000).any(|n| visited.insert(fingerprint(n))));
    }
}
