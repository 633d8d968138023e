//! The figures, as a table and as JSON.

use std::fmt::Write;
use std::time::Duration;

use serde::Serialize;

use super::{Mode, cluster::Program, load::Round};

/// Everything that one run found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// What was compared.
    pub programs: Vec<Program>,
    /// One line per program, mode and number of clients.
    pub figures: Vec<Figures>,
    /// One line per program.
    pub outages: Vec<Outages>,
}

/// Medians over the rounds of one load.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// The program.
    pub program: String,
    /// `plain` or `mTLS`.
    pub mode: &'static str,
    /// Clients, each with one put in flight.
    pub clients: usize,
    /// Acknowledged puts per second.
    pub puts_per_second: f64,
    /// Median latency.
    pub p50_ms: f64,
    /// 99th percentile of the latency.
    pub p99_ms: f64,
    /// CPU time of the three servers together, for 100,000 puts.
    pub cpu_seconds_per_100k: f64,
    /// Resident memory of the largest and the smallest of the three afterwards.
    pub resident_mib: (f64, f64),
}

impl Figures {
    pub(super) fn of(
        program: &str,
        mode: Mode,
        clients: usize,
        rounds: &[Round],
        resident: Vec<u64>,
    ) -> Self {
        let over = |figure: &dyn Fn(&Round) -> f64| median(rounds.iter().map(figure).collect());
        let mib = |bytes: Option<&u64>| bytes.map_or(0.0, |b| *b as f64 / f64::from(1 << 20));
        Self {
            program: program.to_owned(),
            mode: mode.label(),
            clients,
            puts_per_second: over(&Round::puts_per_second),
            p50_ms: over(&|round| round.percentile(50)),
            p99_ms: over(&|round| round.percentile(99)),
            cpu_seconds_per_100k: over(&Round::cpu_seconds_per_100k),
            resident_mib: (mib(resident.first()), mib(resident.last())),
        }
    }
}

/// Time without writes after `kill -9` of the leader.
#[derive(Clone, Debug, Serialize)]
pub struct Outages {
    /// The program.
    pub program: String,
    /// How often it was tried.
    pub runs: usize,
    /// Median.
    pub median_ms: f64,
    /// The longest.
    pub max_ms: f64,
}

impl Outages {
    pub(super) fn of(program: &str, times: &[Duration]) -> Self {
        let millis: Vec<f64> = times.iter().map(|t| t.as_secs_f64() * 1000.0).collect();
        Self {
            program: program.to_owned(),
            runs: millis.len(),
            max_ms: millis.iter().copied().fold(0.0, f64::max),
            median_ms: median(millis),
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => f64::midpoint(values[n / 2 - 1], values[n / 2]),
    }
}

impl Report {
    /// For people.
    #[must_use]
    pub fn table(&self) -> String {
        let mut out = String::new();
        for program in &self.programs {
            let _ =
                writeln!(out, "{}: {} ({})", program.name, program.version, program.path.display());
        }
        let _ = writeln!(
            out,
            "\n{:<6}{:>8}  {:<12}{:>10}{:>10}{:>10}{:>14}{:>16}",
            "mode",
            "clients",
            "program",
            "puts/s",
            "p50 ms",
            "p99 ms",
            "CPU s/100k",
            "RSS MiB max/min"
        );
        for f in &self.figures {
            let _ = writeln!(
                out,
                "{:<6}{:>8}  {:<12}{:>10.0}{:>10.2}{:>10.2}{:>14.2}{:>10.0}/{:<5.0}",
                f.mode,
                f.clients,
                f.program,
                f.puts_per_second,
                f.p50_ms,
                f.p99_ms,
                f.cpu_seconds_per_100k,
                f.resident_mib.0,
                f.resident_mib.1
            );
        }
        if !self.outages.is_empty() {
            let _ = writeln!(out, "\nno writes after kill -9 of the leader, default time-outs:");
        }
        for o in self.outages.iter().filter(|o| o.runs > 0) {
            let _ = writeln!(
                out,
                "  {:<12} median {:>6.0} ms, longest {:>6.0} ms ({} runs)",
                o.program, o.median_ms, o.max_ms, o.runs
            );
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_one_or_between_the_two_middle_ones() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
    }

    #[test]
    fn outages_are_told_by_median_and_longest() {
        let outages = Outages::of("x", &[3, 1, 2].map(Duration::from_secs));
        assert_eq!((outages.runs, outages.median_ms, outages.max_ms), (3, 2000.0, 3000.0));
    }
}
