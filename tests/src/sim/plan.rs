//! Which faults a history has, and how many: drawn once from the seed. Each history leaves some
//! out, so that rare combinations are not always drowned by the others.

use super::rng::Rng;

#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub members: u64,
    /// Per mille of messages.
    pub loss: u64,
    pub duplication: u64,
    /// Messages that take up to [`Plan::long_delay`].
    pub late: u64,
    pub long_delay: u64,
    /// Mean virtual microseconds between faults of a kind; 0 for none.
    pub partition_every: u64,
    pub crash_every: u64,
    pub pause_every: u64,
    pub transfer_every: u64,
    /// A disk that fails, or is full, at one of its next operations.
    pub disk_fault_every: u64,
    /// Per mille of disk operations' groups that are slow.
    pub slow_disk: u64,
    /// Clocks differ by up to this many per mille.
    pub drift: u64,
    pub clients: usize,
    pub keys: u64,
    /// Entries between checkpoints.
    pub checkpoint_entries: u64,
    /// Mean virtual microseconds between changes of the members; 0 for none.
    pub membership_every: u64,
}

impl Plan {
    pub fn new(rng: &mut Rng, members: Option<u64>) -> Self {
        let members = members.unwrap_or_else(|| [3, 3, 3, 3, 5, 5, 1][rng.pick(7)]);
        let mut some = |chance, low, high| {
            let drawn = rng.range(low, high);
            if rng.chance(chance) { drawn } else { 0 }
        };
        Self {
            members,
            loss: some(600, 1, 120),
            duplication: some(500, 1, 100),
            late: some(700, 1, 120),
            long_delay: some(1000, 20_000, 600_000),
            partition_every: some(700, 200_000, 900_000),
            crash_every: some(800, 150_000, 800_000),
            pause_every: some(400, 300_000, 1_000_000),
            transfer_every: some(300, 300_000, 1_000_000),
            slow_disk: some(500, 1, 80),
            drift: some(700, 10, 300),
            clients: usize::try_from(some(1000, 2, 6)).expect("small"),
            keys: some(1000, 1, 4),
            checkpoint_entries: some(1000, 4, 60),
            disk_fault_every: some(400, 150_000, 800_000),
            membership_every: some(400, 50_000, 400_000),
        }
    }
}
