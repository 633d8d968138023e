//! The set of states that were seen, as fingerprints of 80 bits: 16 say which of 65,536 tables, 64
//! are stored. Tables grow one at a time and by a quarter, so that memory never doubles at once:
//! about 11 bytes for each state.
//!
//! Two states with one fingerprint would be taken for one, and what only the second leads to would
//! be missed. Among n states the chance that this happens anywhere is below n² / 2⁸¹: one in ten
//! million for half a billion states, one in 200 million for a hundred million.

use std::sync::{Mutex, PoisonError};

const TABLES: usize = 1 << 16;
/// A table's first size. All of them together take 4 MiB.
const FIRST: usize = 8;

/// A set of fingerprints that two threads can add to.
#[derive(Debug)]
pub(super) struct Visited {
    tables: Vec<Mutex<Table>>,
}

#[derive(Debug)]
struct Table {
    /// 0 is an empty slot: no fingerprint is 0 in practice, and one would only be seen twice.
    slots: Box<[u64]>,
    used: usize,
}

impl Default for Visited {
    fn default() -> Visited {
        let table = || Mutex::new(Table { slots: Box::new([]), used: 0 });
        Visited { tables: (0..TABLES).map(|_| table()).collect() }
    }
}

impl Visited {
    /// Adds `fingerprint`; false if it was there.
    pub(super) fn insert(&self, fingerprint: u128) -> bool {
        let table = (fingerprint >> 112) as usize % TABLES;
        // A thread that panicked has not left a table half changed in a way that matters here.
        let mut table = self.tables[table].lock().unwrap_or_else(PoisonError::into_inner);
        if (table.used + 1) * 8 > table.slots.len() * 7 {
            table.grow();
        }
        let fresh = table.put(fingerprint as u64);
        table.used += usize::from(fresh);
        fresh
    }
}

impl Table {
    fn put(&mut self, word: u64) -> bool {
        let length = self.slots.len();
        // The high half of the product spreads the words evenly over any length.
        let mut slot = ((u128::from(word) * length as u128) >> 64) as usize;
        loop {
            match self.slots[slot] {
                0 => {
                    self.slots[slot] = word;
                    return true;
                }
                known if known == word => return false,
                _ => slot = if slot + 1 == length { 0 } else { slot + 1 },
            }
        }
    }

    fn grow(&mut self) {
        let larger = (self.slots.len() * 5 / 4).max(FIRST);
        let old = std::mem::replace(&mut self.slots, vec![0; larger].into_boxed_slice());
        for &word in old.iter().filter(|&&word| word != 0) {
            self.put(word);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_is_new_once_however_often_its_table_grows() {
        let visited = Visited::default();
        let fingerprint = |n: u128| (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_d6e8_feb8_6659_fd93);
        assert!((0..2_000_000).all(|n| visited.insert(fingerprint(n))));
        assert!(!(0..2_000_000).any(|n| visited.insert(fingerprint(n))));
    }

    #[test]
    fn two_fingerprints_that_differ_in_their_table_only_are_two() {
        let visited = Visited::default();
        assert!(visited.insert(1 << 112 | 7));
        assert!(visited.insert(2 << 112 | 7));
        assert!(!visited.insert(1 << 112 | 7));
    }
}
