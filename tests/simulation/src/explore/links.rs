//! Links between hosts, each direction separately.

use crate::explore::identities::MAX_HOSTS;

/// The set of links that are down: one bit for each ordered pair of hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Links {
    down: u64,
}

fn bit(from: usize, to: usize) -> u64 {
    1 << (from * MAX_HOSTS + to)
}

impl Links {
    /// Takes the link between two hosts down, in both directions.
    pub fn cut(&mut self, one: usize, other: usize) {
        self.down |= bit(one, other) | bit(other, one);
    }

    /// Takes all links to `host` down. The links from `host` stay up.
    pub fn cut_incoming(&mut self, host: usize) {
        self.down |=
            (0..MAX_HOSTS).filter(|&from| from != host).fold(0, |all, from| all | bit(from, host));
    }

    /// Returns whether probes from `from` arrive at `to`.
    #[must_use]
    pub fn reaches(self, from: usize, to: usize) -> bool {
        self.down & bit(from, to) == 0
    }

    /// Returns whether two hosts reach each other.
    #[must_use]
    pub fn are_connected(self, one: usize, other: usize) -> bool {
        self.reaches(one, other) && self.reaches(other, one)
    }

    /// Returns whether all links from and to `host` are up.
    #[must_use]
    pub fn are_all_up_at(self, host: usize) -> bool {
        (0..MAX_HOSTS).all(|other| self.are_connected(host, other))
    }

    /// Iterates over the pairs whose first host can't reach the second.
    pub fn down(self) -> impl Iterator<Item = (usize, usize)> {
        let pairs = (0..MAX_HOSTS).flat_map(|from| (0..MAX_HOSTS).map(move |to| (from, to)));
        pairs.filter(move |&(from, to)| !self.reaches(from, to))
    }

    /// Returns whether swapping these two hosts leaves the set of links unchanged.
    #[must_use]
    pub fn are_unchanged_by_swap(self, one: usize, other: usize) -> bool {
        let swapped = |host: usize| match host {
            host if host == one => other,
            host if host == other => one,
            host => host,
        };
        self.down().all(|(from, to)| !self.reaches(swapped(from), swapped(to)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_hosts_can_be_swapped_only_if_their_links_are_alike() {
        let mut links = Links::default();
        links.cut(0, 1);
        assert!(!links.reaches(1, 0) && !links.are_connected(0, 1) && links.are_connected(0, 2));
        assert!(links.are_unchanged_by_swap(0, 1));
        assert!(links.are_unchanged_by_swap(2, 3));
        assert!(!links.are_unchanged_by_swap(1, 2));
        links.cut_incoming(2);
        assert!(links.reaches(2, 0) && !links.reaches(0, 2) && links.reaches(1, 3));
        assert!(!links.are_unchanged_by_swap(2, 3));
        assert!(links.are_all_up_at(5) == links.are_connected(5, 2));
    }
}
