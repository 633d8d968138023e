//! The set of visited states, as fingerprints of 80 bits. 16 bits select one of 65,536 tables, and
//! 64 bits are stored. Tables grow one at a time, by a quarter, so memory never doubles at once. A
//! state takes about 11 bytes.
//!
//! Two states with equal fingerprints count as one, and states that only the second leads to would
//! be missed. Among n states the probability of such a collision is below n² / 2⁸¹. That is one in
//! ten million for half a billion states, and one in 200 million for a hundred million.

use std::sync::{Mutex, PoisonError};

const TABLES: usize = 1 << 16;
/// Number of slots in a new table. All tables of this size together take 4 MiB.
const FIRST_TABLE_SLOTS: usize = 8;

/// A concurrent set of fingerprints.
#[derive(Debug)]
pub(super) struct VisitedSet {
    tables: Vec<Mutex<Table>>,
}

#[derive(Debug)]
struct Table {
    /// Low 64 bits of each fingerprint; 0 means an empty slot. A fingerprint whose low 64 bits are
    /// 0 can't be stored, so its state would be visited each time that it is reached. No such state
    /// is expected.
    slots: Box<[u64]>,
    used: usize,
}

impl Default for VisitedSet {
    fn default() -> VisitedSet {
        let table = || Mutex::new(Table { slots: Box::new([]), used: 0 });
        VisitedSet { tables: (0..TABLES).map(|_| table()).collect() }
    }
}

impl VisitedSet {
    /// Adds `fingerprint` to the set. Returns false if the set contained it already.
    pub(super) fn insert(&self, fingerprint: u128) -> bool {
        let table = (fingerprint >> 112) as usize % TABLES;
        // A table stays usable after a panic: a change that was left unfinished can at most lose
        // fingerprints.
        let mut table = self.tables[table].lock().unwrap_or_else(PoisonError::into_inner);
        // At most 7/8 of a table's slots are used, so that every lookup finds an empty slot.
        if (table.used + 1) * 8 > table.slots.len() * 7 {
            table.grow();
        }
        let is_new = table.put(fingerprint as u64);
        table.used += usize::from(is_new);
        is_new
    }
}

impl Table {
    fn put(&mut self, word: u64) -> bool {
        let length = self.slots.len();
        // The slot's index is the high 64 bits of the product. So fingerprints are spread evenly
        // over the table, whatever its length.
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
        let larger = (self.slots.len() * 5 / 4).max(FIRST_TABLE_SLOTS);
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
        let visited = VisitedSet::default();
        let fingerprint = |n: u128| (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_d6e8_feb8_6659_fd93);
        assert!((0..2_000_000).all(|n| visited.insert(fingerprint(n))));
        assert!(!(0..2_000_000).any(|n| visited.insert(fingerprint(n))));
    }

    #[test]
    fn fingerprints_that_differ_only_in_their_table_are_distinct() {
        let visited = VisitedSet::default();
        assert!(visited.insert(1 << 112 | 7));
        assert!(visited.insert(2 << 112 | 7));
        assert!(!visited.insert(1 << 112 | 7));
    }
}
