//! Decides when to restart a node and when to give up; pure.

use std::time::Duration;

/// A node's death counts as quick if it comes sooner than this after the start.
pub const QUICK_DEATH_TIME: Duration = Duration::from_secs(10);
/// Number of consecutive quick deaths that ends supervision.
pub const MAX_QUICK_DEATHS: u32 = 8;
/// The pause after a death that was not quick, and after the first quick one.
pub const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// The longest pause, before jitter.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The decision after a node's death.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestartDecision {
    /// Start the node again after a pause.
    Restart {
        /// The pause before the start, jitter included.
        after: Duration,
    },
    /// Stop restarting: too many quick deaths in a row.
    GiveUp {
        /// The number of consecutive quick deaths.
        quick_deaths: u32,
    },
}

/// Counts a node's consecutive quick deaths.
#[derive(Clone, Debug, Default)]
pub struct RestartPolicy {
    quick_deaths: u32,
}

impl RestartPolicy {
    /// Decides what to do after the death of a node that had lived for `lived`. `jitter` in 0..=1
    /// spreads the restarts of hosts that fail together.
    pub fn decide_after_death(&mut self, lived: Duration, jitter: f64) -> RestartDecision {
        if lived >= QUICK_DEATH_TIME {
            self.quick_deaths = 0;
        } else {
            self.quick_deaths += 1;
        }
        if self.quick_deaths >= MAX_QUICK_DEATHS {
            return RestartDecision::GiveUp { quick_deaths: self.quick_deaths };
        }
        let doublings = self.quick_deaths.saturating_sub(1);
        let pause = FIRST_PAUSE.saturating_mul(1 << doublings.min(16)).min(LONGEST_PAUSE);
        RestartDecision::Restart { after: pause.mul_f64(0.5 + jitter.clamp(0.0, 1.0) / 2.0) }
    }
}

/// Returns a random number in 0..=1 from the system's generator, or 0.5 if that fails.
pub fn jitter() -> f64 {
    use ring::rand::{SecureRandom, SystemRandom};
    let mut bytes = [0; 4];
    match SystemRandom::new().fill(&mut bytes) {
        Ok(()) => f64::from(u32::from_le_bytes(bytes)) / f64::from(u32::MAX),
        Err(_) => 0.5,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_until_too_many_quick_deaths_end_supervision() {
        let mut policy = RestartPolicy::default();
        let mut pauses = Vec::new();
        let end = loop {
            match policy.decide_after_death(Duration::from_secs(1), 1.0) {
                RestartDecision::Restart { after } => pauses.push(after.as_millis()),
                end @ RestartDecision::GiveUp { .. } => break end,
            }
        };
        assert_eq!(pauses, [200, 400, 800, 1600, 3200, 6400, 12800]);
        assert_eq!(end, RestartDecision::GiveUp { quick_deaths: MAX_QUICK_DEATHS });
    }

    #[test]
    fn a_node_that_lived_long_is_started_again_for_ever() {
        let mut policy = RestartPolicy::default();
        for _ in 0..1_000 {
            let then = policy.decide_after_death(QUICK_DEATH_TIME, 1.0);
            assert_eq!(then, RestartDecision::Restart { after: FIRST_PAUSE });
        }
    }

    #[test]
    fn a_long_life_resets_the_number_of_quick_deaths() {
        let mut policy = RestartPolicy::default();
        for _ in 1..MAX_QUICK_DEATHS {
            policy.decide_after_death(Duration::ZERO, 0.0);
        }
        policy.decide_after_death(QUICK_DEATH_TIME, 0.0);
        assert!(matches!(
            policy.decide_after_death(Duration::ZERO, 0.0),
            RestartDecision::Restart { .. }
        ));
    }

    #[test]
    fn jitter_spreads_a_pause_over_its_upper_half() {
        let low = RestartPolicy::default().decide_after_death(Duration::ZERO, 0.0);
        assert_eq!(low, RestartDecision::Restart { after: FIRST_PAUSE / 2 });
        assert!((0.0..=1.0).contains(&jitter()));
    }
}
