//! Durations of replacements, and their table.

use std::fmt;
use std::time::Duration;

/// Durations of one replacement's phases, which follow each other. Their sum is the time from the
/// member's death until the cluster is whole again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Phases {
    /// Time from the death until the leader's agent says that the member is unreachable.
    pub noticed: Duration,
    /// Time from the end of `noticed` until the member has been unreachable for the policy's time.
    pub waited: Duration,
    /// Time from the end of `waited` until a quorum of agents has observed the death, and a use of
    /// the policy is counted.
    pub observed: Duration,
    /// Time from the end of `observed` until the newcomer votes and the dead member is removed.
    pub steps: Duration,
}

impl Phases {
    /// Names of the phases, in their order.
    const NAMES: [&'static str; 5] = ["noticed", "waited", "observed", "steps", "total"];

    /// Makes the phases from the times between the death and each phase's end. If no agent has
    /// logged a phase's end, that phase ends together with the next one.
    #[must_use]
    pub fn from_ends(
        noticed: Option<Duration>,
        waited: Option<Duration>,
        begun: Duration,
        whole: Duration,
    ) -> Self {
        let waited = waited.unwrap_or(begun).min(begun);
        let noticed = noticed.unwrap_or(waited).min(waited);
        Self {
            noticed,
            waited: waited - noticed,
            observed: begun - waited,
            steps: whole.saturating_sub(begun),
        }
    }

    /// Returns the time from the member's death until the cluster is whole again.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.noticed + self.waited + self.observed + self.steps
    }

    fn all(&self) -> [Duration; 5] {
        [self.noticed, self.waited, self.observed, self.steps, self.total()]
    }
}

impl fmt::Display for Phases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, time) in Self::NAMES.iter().zip(self.all()) {
            write!(f, "{name} {:.1} s  ", time.as_secs_f64())?;
        }
        Ok(())
    }
}

/// Durations of replacements with one node program and one kind of successor.
#[derive(Clone, Debug)]
pub struct ReplacementFigures {
    /// Name of the node program.
    pub node: String,
    /// Origin of the dead member's successor: `policy` for a fresh host, or `standby`.
    pub successor: &'static str,
    /// Phases of each run.
    pub runs: Vec<Phases>,
}

impl ReplacementFigures {
    /// Returns the table of several measurements, with medians and extremes in seconds.
    #[must_use]
    pub fn table(all: &[Self]) -> String {
        let mut table = format!("{:<14}{:<10}{:>5}", "node", "successor", "runs");
        for name in Phases::NAMES {
            table += &format!("{:>22}", format!("{name} (s)"));
        }
        for figures in all {
            let runs = figures.runs.len();
            table += &format!("\n{:<14}{:<10}{runs:>5}", figures.node, figures.successor);
            for phase in 0..Phases::NAMES.len() {
                let times = figures.runs.iter().map(|run| run.all()[phase].as_secs_f64());
                table += &format!("{:>22}", summary(times.collect()));
            }
        }
        table
    }
}

/// Returns the median, the minimum and the maximum of `times` as text.
fn summary(mut times: Vec<f64>) -> String {
    times.sort_by(f64::total_cmp);
    match times[..] {
        [] => "-".to_owned(),
        [one] => format!("{one:.1}"),
        [min, .., max] => {
            let middle = times.len() / 2;
            let median = match times.len() % 2 {
                0 => f64::midpoint(times[middle - 1], times[middle]),
                _ => times[middle],
            };
            format!("{median:.1} ({min:.1}-{max:.1})")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    #[test]
    fn phases_follow_each_other_and_one_that_nobody_logged_takes_no_time() {
        let of = |noticed, waited| {
            Phases::from_ends(noticed, waited, seconds(48), seconds(57)).all().map(|t| t.as_secs())
        };
        assert_eq!(of(Some(seconds(13)), Some(seconds(43))), [13, 30, 5, 9, 57]);
        assert_eq!(of(Some(seconds(13)), None), [13, 35, 0, 9, 57]);
        assert_eq!(of(None, None), [48, 0, 0, 9, 57]);
    }

    #[test]
    fn a_table_has_medians_and_extremes() {
        let run = |total| Phases::from_ends(None, None, seconds(1), seconds(total));
        let figures = ReplacementFigures {
            node: "muster-node".to_owned(),
            successor: "policy",
            runs: vec![run(60), run(50), run(57), run(58)],
        };
        let table = ReplacementFigures::table(&[figures]);
        assert!(table.lines().count() == 2 && table.ends_with("57.5 (50.0-60.0)"), "{table}");
    }
}
