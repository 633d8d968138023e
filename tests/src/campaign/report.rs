//! Report of a campaign, for readers who have never seen this repository.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

use super::bugs::{BugVerdict, PutBackBug};
use super::machine::TestedCommit;
use super::outcome::{CampaignFinding, RunFigures};
use super::plan::SearchKind;
use super::texts::NOT_COVERED;

/// Result of one search.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SearchEntry {
    pub search: SearchKind,
    /// Number of runs that ended by themselves.
    pub runs: u64,
    /// Time of all runs together.
    pub seconds: u64,
    /// Counters of all runs together.
    pub figures: RunFigures,
    /// Number of findings in all runs.
    pub found: u64,
    /// Reason why the search did not run, if it did not.
    pub missing: Option<String>,
}

/// Everything that a campaign reports.
#[derive(Clone, Debug, Serialize)]
pub struct CampaignReport {
    /// Date and time of the beginning, in UTC.
    pub date: String,
    #[serde(flatten)]
    pub tested: TestedCommit,
    /// Time of the campaign, without builds.
    pub seconds: u64,
    pub interrupted: bool,
    /// First and last seed of all searches.
    pub seeds: (u64, u64),
    pub searches: Vec<SearchEntry>,
    pub findings: Vec<CampaignFinding>,
    /// Bugs that were put back on purpose, with the results. Empty if no bug was to be put back.
    pub bugs: Vec<PutBackBug>,
}

impl CampaignReport {
    /// Whether the campaign went on to its end, its searches found nothing, and each bug put back
    /// was found. Each search must have done work, or have said why this machine can't run it.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        let worked = |entry: &SearchEntry| !entry.figures.is_idle();
        let is_explained = |entry: &SearchEntry| !entry.figures.skipped.is_empty();
        !self.interrupted
            && self.searches.iter().any(worked)
            && self.ran().all(|entry| worked(entry) || is_explained(entry))
            && self.findings.is_empty()
            && self.found_bugs() == self.bugs.len()
    }

    fn found_bugs(&self) -> usize {
        self.bugs.iter().filter(|bug| matches!(bug.verdict, BugVerdict::Found(_))).count()
    }

    /// Returns the result in a few sentences.
    #[must_use]
    pub fn summary(&self) -> String {
        let found = match self.findings.len() {
            0 => "The searches found nothing.".to_owned(),
            1 => "The searches found 1 fault.".to_owned(),
            count => format!("The searches found {count} faults."),
        };
        let bugs = match self.bugs.len() {
            0 => "No bug was put back.".to_owned(),
            all => format!("Tests found {} of {all} bugs put back.", self.found_bugs()),
        };
        let idle = self.searches.iter().filter(|entry| entry.figures.is_idle());
        let idle: Vec<&str> = idle.map(|entry| entry.search.title()).collect();
        let idle = match idle.len() {
            0 => String::new(),
            _ => format!(" Searches that did no work: {}.", idle.join(", ")),
        };
        let interrupted = if self.interrupted { " The campaign was interrupted." } else { "" };
        format!("{found}{idle} {bugs}{interrupted}")
    }

    /// Returns the report as Markdown.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut text = String::from("# Fault campaign\n\n");
        let tested = &self.tested;
        // Writing to a string can't fail.
        let _ = writeln!(text, "{}\n", self.summary());
        let _ = writeln!(text, "| | |\n|---|---|\n| date | {} |", self.date);
        let _ = writeln!(text, "| commit | {} |", tested.commit);
        let gib = tested.memory_mib as f64 / 1024.0;
        let _ = writeln!(
            text,
            "| machine | {} processors, {gib:.1} GiB of memory, {} |",
            tested.processors, tested.kernel
        );
        let _ = writeln!(text, "| time | {} |", time(self.seconds));
        let _ = writeln!(text, "| seeds | {} to {} |", self.seeds.0, self.seeds.1);
        self.write_searches(&mut text);
        self.write_faults(&mut text);
        self.write_findings(&mut text);
        self.write_bugs(&mut text);
        self.write_limits(&mut text);
        text
    }

    fn write_searches(&self, text: &mut String) {
        text.push_str(
            "\n## Searches\n\n| search | time | runs | work | found |\n|---|--:|--:|---|--:|\n",
        );
        for entry in &self.searches {
            let (name, work) = (entry.search.title(), counts(&entry.figures.work));
            let (time, runs, found) = (time(entry.seconds), entry.runs, entry.found);
            let _ = match &entry.missing {
                Some(why) => writeln!(text, "| {name} | – | – | skipped: {why} | – |"),
                None => writeln!(text, "| {name} | {time} | {runs} | {work} | {found} |"),
            };
        }
        text.push('\n');
        for entry in self.ran() {
            let _ = writeln!(text, "- **{}.** {}", entry.search.title(), entry.search.method());
        }
    }

    /// Returns the searches that were not skipped: this machine has the programs that they need.
    fn ran(&self) -> impl Iterator<Item = &SearchEntry> {
        self.searches.iter().filter(|entry| entry.missing.is_none())
    }

    fn write_faults(&self, text: &mut String) {
        text.push_str("\n## Injected faults\n\n");
        for entry in self.ran() {
            let (name, faults) = (entry.search.title(), entry.search.faults());
            let _ = writeln!(text, "- **{name}:** {faults}.");
            for (fault, count) in entry.figures.faults.iter().filter(|(_, count)| **count > 0) {
                let _ = writeln!(text, "  - {} {fault}", number(*count));
            }
        }
    }

    fn write_findings(&self, text: &mut String) {
        text.push_str("\n## Findings\n");
        if self.findings.is_empty() {
            text.push_str("\nNone.\n");
        }
        for (number, finding) in self.findings.iter().enumerate() {
            let (name, run) = (finding.search.title(), &finding.run);
            let _ = writeln!(text, "\n{}. {name}, run `{run}`. To try it again:", number + 1);
            let what = finding.what.replace('\n', "\n   ");
            let _ = writeln!(text, "\n   ```\n   {}\n   ```\n", finding.replay);
            let _ = writeln!(text, "   The program's words:\n\n   ```\n   {what}\n   ```");
        }
    }

    fn write_bugs(&self, text: &mut String) {
        text.push_str("\n## Bugs put back\n\n");
        if self.bugs.is_empty() {
            text.push_str("None: the campaign was too short, or none was wanted.\n");
            return;
        }
        text.push_str(
            "Each bug was switched on alone. A test or a search then had to find it.\n\n\
             | bug | source | kind of incident | result |\n|---|---|---|---|\n",
        );
        for bug in &self.bugs {
            let result = match &bug.verdict {
                BugVerdict::Found(by) => format!("found by {by}"),
                BugVerdict::Missed => "**missed**".to_owned(),
                BugVerdict::NoResult(why) => format!("**no result:** {why}"),
            };
            let incident = bug.incident.as_deref().unwrap_or("–");
            let cells = [bug.what.as_str(), &bug.source, incident, &result].map(cell);
            let _ = writeln!(text, "| {} |", cells.join(" | "));
        }
    }

    fn write_limits(&self, text: &mut String) {
        text.push_str("\n## Not covered\n\n");
        for limit in NOT_COVERED {
            let _ = writeln!(text, "- {limit}");
        }
        for entry in &self.searches {
            let name = entry.search.title();
            let _ = match &entry.missing {
                Some(why) => writeln!(text, "- {name} did not run: {why}."),
                None => writeln!(text, "- {name} can't see: {}.", entry.search.blind_spot()),
            };
            for why in &entry.figures.skipped {
                let _ = writeln!(text, "- {name} skipped a part: {why}.");
            }
        }
    }
}

/// Returns a text that fits into a cell of a table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

/// Returns all counters that are not zero.
pub(super) fn counts(counts: &BTreeMap<String, u64>) -> String {
    let some = counts.iter().filter(|(_, count)| **count > 0);
    let texts: Vec<String> =
        some.map(|(what, count)| format!("{} {what}", number(*count))).collect();
    texts.join(", ")
}

/// Returns a number with commas between thousands.
fn number(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Returns a time in hours, minutes or seconds.
fn time(seconds: u64) -> String {
    match (seconds / 3600, seconds / 60 % 60) {
        (0, 0) => format!("{seconds} s"),
        (0, minutes) => format!("{minutes} min"),
        (hours, minutes) => format!("{hours} h {minutes} min"),
    }
}

#[cfg(test)]
mod tests;
