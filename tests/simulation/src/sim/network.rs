//! Simulated network: which messages arrive, and when.

use std::collections::BTreeSet;

use super::plan::HistoryPlan;
use crate::rng::Rng;

#[derive(Debug, Default)]
pub(super) struct Network {
    /// Pairs (from, to) between which no message passes.
    cut: BTreeSet<(u64, u64)>,
    /// Machines that are cut off in both directions.
    isolated: BTreeSet<u64>,
}

impl Network {
    pub(super) fn heal(&mut self) {
        self.cut.clear();
    }

    pub(super) fn is_cut(&self, from: u64, to: u64) -> bool {
        let alone = self.isolated.contains(&from) || self.isolated.contains(&to);
        alone || self.cut.contains(&(from, to))
    }

    /// Cuts the links between two groups of members, or a single link. Each cut is drawn to be in
    /// both directions or in one only.
    pub(super) fn partition(&mut self, rng: &mut Rng, members: u64) {
        self.cut.clear();
        let one_way = rng.chance(300);
        if rng.chance(200) {
            let from = rng.range(1, members + 1);
            let to = rng.range(1, members + 1);
            self.cut(from, to, one_way);
            return;
        }
        let side: Vec<bool> = (0..members).map(|_| rng.chance(500)).collect();
        for (from, here) in (1..).zip(&side) {
            for (to, there) in (1..).zip(&side) {
                if *here && !*there {
                    self.cut(from, to, one_way);
                }
            }
        }
    }

    /// Cuts `id` off from all others, in both directions.
    pub(super) fn cut_off(&mut self, id: u64) {
        self.isolated.insert(id);
    }

    /// Returns whether any machine is cut off.
    pub(super) fn has_isolated_machine(&self) -> bool {
        !self.isolated.is_empty()
    }

    /// Ends the isolation of `id`.
    pub(super) fn rejoin(&mut self, id: u64) {
        self.isolated.remove(&id);
    }

    fn cut(&mut self, from: u64, to: u64, one_way: bool) {
        self.cut.insert((from, to));
        if !one_way {
            self.cut.insert((to, from));
        }
    }

    /// Returns the delay of each copy of a message; empty if the message is lost.
    pub(super) fn delays(&self, rng: &mut Rng, plan: &HistoryPlan, from: u64, to: u64) -> Vec<u64> {
        if self.is_cut(from, to) || rng.chance(plan.loss) {
            return Vec::new();
        }
        let copies = 1 + u64::from(rng.chance(plan.duplication));
        (0..copies)
            .map(|_| {
                if rng.chance(plan.late_chance) {
                    rng.range(2_000, plan.long_delay.max(3_000))
                } else {
                    rng.range(200, 2_000)
                }
            })
            .collect()
    }
}
