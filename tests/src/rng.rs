//! Chance that a seed decides, for whatever draws: SplitMix64 (Steele, Lea and Flood 2014).

/// A sequence of numbers, the same for the same seed.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The one of `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Any number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From `low` up to, not including, `high`.
    pub fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.number() % (high - low)
    }

    /// True in `per_mille` of 1000 cases.
    pub fn chance(&mut self, per_mille: u64) -> bool {
        self.number() % 1000 < per_mille
    }

    /// An index below `len`.
    pub fn pick(&mut self, len: usize) -> usize {
        usize::try_from(self.number() % len as u64).expect("below a usize")
    }
}
