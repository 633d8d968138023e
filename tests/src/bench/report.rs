//! Results of a run, as a table and as JSON.

use std::fmt::Write;
use std::time::Duration;

use serde::Serialize;

use super::{
    TransportMode, Work, cluster::ServerProgram, load::LoadResult, services::ServiceFigure,
    writer::WriteMeasurement,
};

/// Results of one run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct BenchReport {
    /// Programs that were measured.
    pub programs: Vec<ServerProgram>,
    /// Loads: one entry for each program, mode and number of clients.
    pub figures: Vec<LoadFigures>,
    /// Outages after the leader's death, one entry for each program.
    pub outages: Vec<Outages>,
    /// Membership changes: one entry for each program and kind of change.
    pub changes: Vec<ChangeFigures>,
    /// Resizes of a cluster under load, one entry for each program.
    pub resizes: Vec<Resize>,
    /// Replacements of a dead member, one entry for each program.
    pub replacements: Vec<Replacement>,
    /// Costs of watches, leases, keys and users, one entry for each program and figure.
    pub services: Vec<ServiceFigure>,
}

/// Medians over the rounds of one load.
#[derive(Clone, Debug, Serialize)]
pub struct LoadFigures {
    /// Name of the program.
    pub program: String,
    /// Transport mode: `plain` or `mTLS`.
    pub mode: &'static str,
    /// Request that the clients repeat: `put`, `serializable` or `linearizable` (ranges).
    pub work: &'static str,
    /// Number of clients, each with one request in flight.
    pub clients: usize,
    /// Number of answered requests per second.
    pub requests_per_second: f64,
    /// Median latency in milliseconds.
    pub p50_ms: f64,
    /// 99th percentile of the latency in milliseconds.
    pub p99_ms: f64,
    /// CPU time of the three servers together for 100,000 requests, in seconds.
    pub cpu_seconds_per_100k: f64,
    /// Number of context switches of the three servers together for one request.
    pub switches_per_request: f64,
    /// Resident memory after the load, of the largest and the smallest of the three servers.
    pub resident_mib: (f64, f64),
}

impl LoadFigures {
    pub(super) fn from_rounds(
        program: &str,
        mode: TransportMode,
        work: Work,
        clients: usize,
        rounds: &[LoadResult],
        resident: Vec<u64>,
    ) -> Self {
        let over =
            |figure: &dyn Fn(&LoadResult) -> f64| median(rounds.iter().map(figure).collect());
        let mib = |bytes: Option<&u64>| bytes.map_or(0.0, |b| *b as f64 / f64::from(1 << 20));
        Self {
            program: program.to_owned(),
            mode: mode.label(),
            work: work.name(),
            clients,
            requests_per_second: over(&LoadResult::per_second),
            p50_ms: over(&|round| round.percentile(50)),
            p99_ms: over(&|round| round.percentile(99)),
            cpu_seconds_per_100k: over(&LoadResult::cpu_seconds_per_100k),
            switches_per_request: over(&LoadResult::switches_per_request),
            resident_mib: (mib(resident.first()), mib(resident.last())),
        }
    }
}

/// Times without a successful write after processes were killed.
#[derive(Clone, Debug, Serialize)]
pub struct Outages {
    /// Name of the program.
    pub program: String,
    /// Description of the event that interrupted the writes, for the report's table.
    pub event: &'static str,
    /// Number of times that the event was caused.
    pub runs: usize,
    /// Median time without a successful write.
    pub median_ms: f64,
    /// Longest time without a successful write.
    pub max_ms: f64,
}

impl Outages {
    pub(super) fn from_times(program: &str, event: &'static str, times: &[Duration]) -> Self {
        let millis: Vec<f64> = times.iter().map(|t| t.as_secs_f64() * 1000.0).collect();
        Self {
            program: program.to_owned(),
            event,
            runs: millis.len(),
            max_ms: millis.iter().copied().fold(0.0, f64::max),
            median_ms: median(millis),
        }
    }
}

/// Writes during one kind of membership change.
#[derive(Clone, Debug, Serialize)]
pub struct ChangeFigures {
    /// Name of the program.
    pub program: String,
    /// Description of the change, for the report's table.
    pub change: &'static str,
    /// Number of times that the change was made.
    pub runs: usize,
    /// Longest time without an acknowledged write in a run: median over the runs.
    pub gap_median_ms: f64,
    /// Longest time without an acknowledged write over all runs.
    pub gap_max_ms: f64,
    /// Longest latency of one write in a run, whatever its result: median over the runs.
    pub wait_median_ms: f64,
    /// Longest latency of one write over all runs.
    pub wait_max_ms: f64,
    /// Number of writes that failed or got no answer within 5 s.
    pub failed: usize,
}

impl ChangeFigures {
    pub(super) fn from_measurements(
        program: &str,
        change: &'static str,
        measurements: &[WriteMeasurement],
    ) -> Self {
        let millis = |select: &dyn Fn(&WriteMeasurement) -> Duration| -> Vec<f64> {
            measurements.iter().map(|writes| select(writes).as_secs_f64() * 1000.0).collect()
        };
        let (gaps, waits) = (millis(&|writes| writes.gap), millis(&|writes| writes.wait));
        Self {
            program: program.to_owned(),
            change,
            runs: measurements.len(),
            gap_max_ms: gaps.iter().copied().fold(0.0, f64::max),
            gap_median_ms: median(gaps),
            wait_max_ms: waits.iter().copied().fold(0.0, f64::max),
            wait_median_ms: median(waits),
            failed: measurements.iter().map(|writes| writes.failed).sum(),
        }
    }
}

/// Growth from three members to five and back to three, under load.
#[derive(Clone, Debug, Serialize)]
pub struct Resize {
    /// Name of the program.
    pub program: String,
    /// Number of clients, each with one put in flight.
    pub clients: usize,
    /// Duration of the whole resize in seconds.
    pub seconds: f64,
    /// Number of acknowledged writes.
    pub writes: usize,
    /// Number of writes that failed or got no answer in time.
    pub failed: usize,
    /// Number of acknowledged writes that took more than a second.
    pub slow: usize,
    /// Longest latency of one write, whatever its result.
    pub longest_ms: f64,
}

/// Replacement of a dead member by a new one.
#[derive(Clone, Debug, Serialize)]
pub struct Replacement {
    /// Name of the program.
    pub program: String,
    /// Amount of data in the cluster in MiB.
    pub data_mib: u64,
    /// Seconds from the start of `member replace` until the new member is a voter and has all data.
    pub seconds: f64,
    /// Peak memory of the leader before and after the replacement.
    pub leader_peak_mib: (u64, u64),
    /// Peak memory of the new member.
    pub joiner_peak_mib: u64,
}

pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => f64::midpoint(values[n / 2 - 1], values[n / 2]),
    }
}

impl BenchReport {
    /// Returns the report as a table.
    #[must_use]
    pub fn table(&self) -> String {
        let mut out = String::new();
        for program in &self.programs {
            let _ =
                writeln!(out, "{}: {} ({})", program.name, program.version, program.path.display());
        }
        self.loads(&mut out);
        self.reconfigurations(&mut out);
        self.services(&mut out);
        out
    }

    fn loads(&self, out: &mut String) {
        if self.figures.is_empty() {
            return;
        }
        let _ = writeln!(
            out,
            "\n{:<6}{:<14}{:>8}  {:<12}{:>10}{:>10}{:>10}{:>12}{:>12}{:>16}",
            "mode",
            "work",
            "clients",
            "program",
            "requests/s",
            "p50 ms",
            "p99 ms",
            "CPU s/100k",
            "switches",
            "RSS MiB max/min"
        );
        for f in &self.figures {
            let _ = writeln!(
                out,
                "{:<6}{:<14}{:>8}  {:<12}{:>10.0}{:>10.2}{:>10.2}{:>12.2}{:>12.2}{:>10.0}/{:<5.0}",
                f.mode,
                f.work,
                f.clients,
                f.program,
                f.requests_per_second,
                f.p50_ms,
                f.p99_ms,
                f.cpu_seconds_per_100k,
                f.switches_per_request,
                f.resident_mib.0,
                f.resident_mib.1
            );
        }
        if !self.outages.is_empty() {
            let _ = writeln!(out, "\ntime without writes, default time-outs:");
        }
        for o in self.outages.iter().filter(|o| o.runs > 0) {
            let _ = writeln!(
                out,
                "  {:<27} {:<12} median {:>6.0} ms, longest {:>6.0} ms ({} runs)",
                o.event, o.program, o.median_ms, o.max_ms, o.runs
            );
        }
    }

    fn services(&self, out: &mut String) {
        let Some(first) = self.programs.first() else { return };
        let select = |program: &str| -> Vec<&ServiceFigure> {
            self.services.iter().filter(|service| service.program == program).collect()
        };
        let columns: Vec<_> = self.programs.iter().map(|program| select(&program.name)).collect();
        let rows = select(&first.name);
        let width = rows.iter().map(|service| service.what.len()).max().unwrap_or(0);
        for (n, service) in rows.into_iter().enumerate() {
            if n == 0 {
                let _ = write!(out, "\n{:<width$}  {:<4}", "at the leader", "");
                self.programs.iter().for_each(|one| _ = write!(out, "{:>14}", one.name));
                let _ = writeln!(out);
            }
            let _ = write!(out, "{:<width$}  {:<4}", service.what, service.unit);
            for column in &columns {
                let value = column.get(n).map_or(f64::NAN, |found| found.value);
                let _ = write!(out, "{value:>14.2}");
            }
            let _ = writeln!(out);
        }
    }

    fn reconfigurations(&self, out: &mut String) {
        if !self.changes.is_empty() {
            let _ = writeln!(
                out,
                "\nplain HTTP, a put every 5 ms at followers while members change, in ms (median, longest)\n{:<20}{:<12}{:>6}{:>18}{:>22}{:>8}",
                "change", "program", "runs", "no write at all", "longest single write", "failed"
            );
        }
        for c in &self.changes {
            let _ = writeln!(
                out,
                "{:<20}{:<12}{:>6}{:>10.0}{:>8.0}{:>14.0}{:>8.0}{:>8}",
                c.change,
                c.program,
                c.runs,
                c.gap_median_ms,
                c.gap_max_ms,
                c.wait_median_ms,
                c.wait_max_ms,
                c.failed
            );
        }
        for r in &self.resizes {
            let _ = writeln!(
                out,
                "\n3 to 5 to 3 members, {} clients: {} in {:.1} s: {} writes, {} failed, {} slower than 1 s, longest {:.0} ms",
                r.clients, r.program, r.seconds, r.writes, r.failed, r.slow, r.longest_ms
            );
        }
        for r in &self.replacements {
            let _ = writeln!(
                out,
                "\na dead member replaced, {} MiB: {} in {:.1} s; peak memory: leader {} MiB before, {} after, joiner {} MiB",
                r.data_mib,
                r.program,
                r.seconds,
                r.leader_peak_mib.0,
                r.leader_peak_mib.1,
                r.joiner_peak_mib
            );
        }
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
    fn outages_are_reported_as_median_and_maximum() {
        let outages = Outages::from_times("x", "y", &[3, 1, 2].map(Duration::from_secs));
        assert_eq!((outages.runs, outages.median_ms, outages.max_ms), (3, 2000.0, 3000.0));
    }
}
