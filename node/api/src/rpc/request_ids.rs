//! Request IDs. They connect an applied entry with the request that waits for its outcome.

use std::sync::atomic::{AtomicU64, Ordering};

use ring::digest::{SHA256, digest};

use node_state::state_machine::RequestId;

/// Generator of request IDs that are unique in the cluster, over all members and processes.
///
/// A process has a member ID and a boot counter. A hash of both selects the process's first ID
/// among 2^64 numbers, and further IDs count up from there. The IDs of two processes overlap only
/// if their first IDs are closer together than the number of requests that one of them makes.
#[derive(Debug)]
pub struct RequestIds {
    first: u64,
    next: AtomicU64,
}

/// Upper limit of a process's requests: a million per second for twelve days.
const MAX_IDS_PER_PROCESS: u64 = 1 << 40;

impl RequestIds {
    /// Makes the generator. `boot` must be different at each start of this member.
    #[must_use]
    pub fn new(member_id: u64, boot: u64) -> Self {
        let mut seed = [0; 16];
        seed[..8].copy_from_slice(&member_id.to_be_bytes());
        seed[8..].copy_from_slice(&boot.to_be_bytes());
        let hash = digest(&SHA256, &seed);
        let first = hash.as_ref().first_chunk().expect("SHA-256 has 32 bytes");
        let first = u64::from_be_bytes(*first);
        Self { first, next: AtomicU64::new(first) }
    }

    /// Returns a function that tests whether this process has made an ID. On average, the test
    /// wrongly accepts one of 2^24 IDs of other processes. That only costs work.
    pub fn own_id_test(&self) -> impl Fn(RequestId) -> bool + Send + use<> {
        let first = self.first;
        move |id| id.0.wrapping_sub(first) < MAX_IDS_PER_PROCESS
    }

    /// Returns the next ID, never the same twice.
    pub fn next(&self) -> RequestId {
        RequestId(self.next.fetch_add(1, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_ids_of_processes_are_far_apart() {
        let mut starts: Vec<u64> = (1..=3)
            .flat_map(|member| (1..=100).map(move |boot| RequestIds::new(member, boot).next().0))
            .collect();
        starts.sort_unstable();
        assert!(starts.windows(2).all(|pair| pair[1] - pair[0] > 1 << 32));
    }

    #[test]
    fn the_own_id_test_accepts_only_this_processs_ids() {
        let (ids, before) = (RequestIds::new(1, 2), RequestIds::new(1, 1));
        let own = ids.own_id_test();
        assert!((0..100).all(|_| own(ids.next())));
        assert!(!own(before.next()));
    }

    #[test]
    fn ids_are_not_repeated() {
        let ids = RequestIds::new(1, 1);
        assert_ne!(ids.next(), ids.next());
    }
}
