//! Deterministic pseudo-random numbers from a seed, by SplitMix64 (Steele, Lea and Flood 2014).

/// A pseudo-random sequence; equal seeds give equal sequences.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Starts the sequence of `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next number, which may be any `u64`.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number from `low` (inclusive) to `high` (exclusive).
    pub fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.number() % (high - low)
    }

    /// Returns true with a probability of `per_mille` / 1000.
    pub fn chance(&mut self, per_mille: u64) -> bool {
        self.number() % 1000 < per_mille
    }

    /// Returns a random index below `len`.
    pub fn pick(&mut self, len: usize) -> usize {
        usize::try_from(self.number() % len as u64).expect("below a usize")
    }
}
