//! Division of a campaign's time among its searches.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;

/// Divisor of a campaign's time. The quotient is the time in which bugs are put back on purpose.
const BUGS_DIVISOR: u32 = 3;
/// Maximum time for putting bugs back.
const MAX_BUGS_TIME: Duration = Duration::from_secs(90 * 60);
/// Minimum time for putting bugs back. In less time, the programs with those bugs could not even be
/// built.
const MIN_BUGS_TIME: Duration = Duration::from_secs(30 * 60);
/// Time of one round, in which each search has one turn.
const ROUND_TIME: Duration = Duration::from_secs(40 * 60);
/// Maximum time of a campaign, 30 days.
const MAX_TIME: Duration = Duration::from_secs(30 * 24 * 3600);

/// A way to look for faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum SearchKind {
    /// Seeded simulation of the node, with seeds that were never used before.
    Simulation,
    /// Random walks through the states of the bootstrap protocol.
    Walks,
    /// Histories of real member processes, which are killed, paused and cut off from each other.
    Histories,
    /// Partitions between real member processes during changes of the membership.
    Partitions,
    /// Failing disks, and kills of real processes at system calls.
    Durability,
    /// Random requests, the same ones to stock etcd and to `muster-node`.
    Requests,
    /// Fuzzing of the decoders of untrusted bytes, guided by coverage.
    Decoders,
}

impl SearchKind {
    pub const ALL: [Self; 7] = [
        Self::Simulation,
        Self::Walks,
        Self::Histories,
        Self::Partitions,
        Self::Durability,
        Self::Requests,
        Self::Decoders,
    ];

    /// Returns the search's weight. Its share of a round is its weight divided by the sum of all
    /// searches' weights.
    fn weight(self) -> u32 {
        match self {
            Self::Simulation | Self::Histories | Self::Requests => 4,
            Self::Decoders => 3,
            Self::Walks | Self::Durability => 2,
            Self::Partitions => 1,
        }
    }
}

/// Time in which one search runs its commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SearchTurn {
    pub search: SearchKind,
    pub time: Duration,
}

/// Division of a campaign's time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CampaignPlan {
    /// Time for all searches together.
    pub searching: Duration,
    /// Turns of the searches, in order. They are repeated if runs end earlier than planned.
    pub turns: Vec<SearchTurn>,
    /// Time for putting bugs back on purpose. `None` if no bug is put back.
    pub bugs: Option<Duration>,
}

/// Divides the time `budget` among `searches`. A part of the time is kept for putting known bugs
/// back, to see whether the tests find them. If that part would be too short, or `puts_bugs_back`
/// is false, the searches get the whole time.
#[must_use]
pub fn plan(budget: Duration, searches: &[SearchKind], puts_bugs_back: bool) -> CampaignPlan {
    let part = (budget / BUGS_DIVISOR).min(MAX_BUGS_TIME);
    let bugs = (puts_bugs_back && part >= MIN_BUGS_TIME).then_some(part);
    let searching = budget.saturating_sub(bugs.unwrap_or_default());
    let weights: u32 = searches.iter().map(|search| search.weight()).sum();
    let rounds = u32::try_from(searching.as_secs() / ROUND_TIME.as_secs()).unwrap_or(1).max(1);
    let mut turns = Vec::new();
    for _ in 0..rounds {
        for &search in searches {
            let time = searching * search.weight() / (weights * rounds);
            turns.push(SearchTurn { search, time });
        }
    }
    CampaignPlan { searching, turns, bugs }
}

/// Parses a time such as `4h`, `90m`, `45s` or `1h30m`.
///
/// # Errors
/// If the text is no such time, or if it is zero or more than 30 days.
pub fn parse_time(text: &str) -> Result<Duration> {
    let (mut seconds, mut digits) = (0_u64, String::new());
    for sign in text.chars() {
        if sign.is_ascii_digit() {
            digits.push(sign);
            continue;
        }
        let unit = match sign {
            'h' => 3600,
            'm' => 60,
            's' => 1,
            _ => 0,
        };
        ensure!(unit > 0, "`{sign}` is none of the units h, m, s");
        let number: u64 = digits.parse().with_context(|| format!("no number before `{sign}`"))?;
        let more = number.checked_mul(unit).and_then(|more| seconds.checked_add(more));
        seconds = more.context("the time is too long")?;
        digits.clear();
    }
    ensure!(digits.is_empty(), "`{digits}` has no unit: write h, m or s after it");
    let time = Duration::from_secs(seconds);
    ensure!(!time.is_zero() && time <= MAX_TIME, "a campaign takes from 1s to 720h");
    Ok(time)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn four_hours_are_four_rounds_and_a_third_is_for_bugs_put_back() {
        let plan = plan(4 * HOUR, &SearchKind::ALL, true);
        assert_eq!((plan.searching, plan.bugs), (8 * HOUR / 3, Some(4 * HOUR / 3)));
        assert_eq!(plan.turns.len(), 4 * SearchKind::ALL.len());
        let seconds: Vec<u64> = plan.turns.iter().take(7).map(|turn| turn.time.as_secs()).collect();
        assert_eq!(seconds, [480, 240, 480, 120, 240, 480, 360]);
        let sum: Duration = plan.turns.iter().map(|turn| turn.time).sum();
        assert_eq!(sum, plan.searching);
    }

    #[test]
    fn a_short_campaign_has_one_round_and_puts_no_bug_back() {
        let plan = plan(HOUR / 2, &[SearchKind::Walks, SearchKind::Partitions], true);
        assert_eq!((plan.searching, plan.bugs), (HOUR / 2, None));
        let walks = SearchTurn { search: SearchKind::Walks, time: HOUR / 3 };
        let partitions = SearchTurn { search: SearchKind::Partitions, time: HOUR / 6 };
        assert_eq!(plan.turns, [walks, partitions]);
    }

    #[test]
    fn a_day_gives_bugs_put_back_no_more_than_their_maximum() {
        let plan = plan(24 * HOUR, &SearchKind::ALL, true);
        assert_eq!(plan.bugs, Some(MAX_BUGS_TIME));
        assert_eq!(plan.searching, 24 * HOUR - MAX_BUGS_TIME);
    }

    #[test]
    fn all_the_time_is_for_searches_if_no_bug_is_wanted() {
        assert_eq!(plan(4 * HOUR, &SearchKind::ALL, false).searching, 4 * HOUR);
        assert!(plan(4 * HOUR, &[], true).turns.is_empty());
    }

    #[test]
    fn a_time_has_a_unit_after_each_number() {
        let seconds = |text: &str| parse_time(text).unwrap().as_secs();
        assert_eq!((seconds("4h"), seconds("90m"), seconds("45s")), (14_400, 5_400, 45));
        assert_eq!(seconds("1h30m"), 5_400);
        for wrong in ["", "4", "h", "4d", "1h30", "0s", "721h", "9999999999999999h", "-1h"] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
    }
}
