//! Results of runs, read from the output of their programs.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde_json::Value;

use super::child::{ChildEnd, EndedChild};
use super::plan::SearchKind;
use super::searches::SearchRun;

/// Maximum length in characters of a finding's description.
const MAX_FINDING_CHARS: usize = 600;
/// Maximum number of lines of a finding's description.
const MAX_FINDING_LINES: usize = 8;

/// Text before the reason why a test was skipped.
const SKIPPED: &str = "SKIPPED: ";

/// Counters of the simulation's report that say how much it did, with their descriptions.
const SIMULATION_WORK: [(&str, &str); 4] =
    [("histories", "histories"), ("steps", "steps"), ("writes", "writes"), ("reads", "reads")];
/// Counters of the simulation's report about faults, with their descriptions.
const SIMULATION_FAULTS: [(&str, &str); 6] = [
    ("crashes", "crashes and kills"),
    ("disk_failures", "failed or full disks"),
    ("torn", "torn ends of logs"),
    ("interrupted_installs", "interrupted snapshot installations"),
    ("amnesia", "machines that lost promises"),
    ("membership_changes", "membership changes, counted by member"),
];

/// Counters of one run, or of all runs of a search.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RunFigures {
    /// Amount of work, by its unit.
    pub work: BTreeMap<String, u64>,
    /// Number of injected faults, by their description.
    pub faults: BTreeMap<String, u64>,
    /// Reasons why tests could not run on this machine.
    pub skipped: BTreeSet<String>,
}

impl RunFigures {
    /// Adds the numbers of `other` to these.
    pub fn add(&mut self, other: Self) {
        for (unit, count) in other.work {
            *self.work.entry(unit).or_default() += count;
        }
        for (fault, count) in other.faults {
            *self.faults.entry(fault).or_default() += count;
        }
        self.skipped.extend(other.skipped);
    }

    /// Whether no work was counted.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.work.values().all(|count| *count == 0)
    }

    fn count_work(&mut self, unit: &str, count: u64) {
        *self.work.entry(unit.to_owned()).or_default() += count;
    }

    fn count_faults(&mut self, fault: &str, count: u64) {
        *self.faults.entry(fault.to_owned()).or_default() += count;
    }
}

/// A fault of the tested programs, or a run without a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CampaignFinding {
    pub search: SearchKind,
    /// Description of the fault, as printed by the program that found the fault.
    pub what: String,
    /// Command that repeats the run with this finding.
    pub replay: String,
    /// Name of the run, which is also that of its log files.
    pub run: String,
}

/// Reads the counters of a run from its output. If the run was stopped, these are the counters that
/// it had printed before.
#[must_use]
pub fn read_figures(search: SearchKind, ended: &EndedChild) -> RunFigures {
    let mut figures = RunFigures::default();
    let document: Value = serde_json::from_str(&ended.stdout).unwrap_or_default();
    match search {
        SearchKind::Simulation if document.is_object() => {
            for (key, unit) in SIMULATION_WORK {
                figures.count_work(unit, document[key].as_u64().unwrap_or_default());
            }
            for (key, fault) in SIMULATION_FAULTS {
                figures.count_faults(fault, document[key].as_u64().unwrap_or_default());
            }
        }
        SearchKind::Simulation => {
            let last = ended.stderr.lines().rev().find_map(|line| before(line, " histories"));
            figures.count_work("histories", last.unwrap_or_default());
        }
        SearchKind::Walks => {
            let walks = &document["random"];
            figures.count_work("walks", walks["walks"].as_u64().unwrap_or_default());
            figures.count_work("steps", walks["steps"].as_u64().unwrap_or_default());
            let restored = walks["restored_after_commit"].as_u64().unwrap_or_default();
            figures.count_faults("walks with a database restored after a commit", restored);
        }
        SearchKind::Histories => {
            for line in ended.stdout.lines().filter(|line| line.contains("HistoryReport")) {
                figures.count_work("histories", 1);
                for (name, unit) in
                    [("answered", "answers"), ("refused", "refusals"), ("unknown", "lost answers")]
                {
                    figures.count_work(unit, after(line, &format!("{name}: ")).unwrap_or_default());
                }
                figures.count_faults(
                    "kills, pauses and cuts",
                    before(line, " faults").unwrap_or_default(),
                );
            }
        }
        SearchKind::Partitions | SearchKind::Durability => {
            let passed = ended.stdout.lines().filter(|line| line.ends_with(" ... ok")).count();
            // The output shows a skipped test as passed, so skipped tests are subtracted.
            let both = ended.stdout.lines().chain(ended.stderr.lines());
            let skipped = both.filter(|line| line.contains(SKIPPED)).count();
            figures.count_work("tests", passed.saturating_sub(skipped) as u64);
        }
        SearchKind::Requests => {
            for line in ended.stdout.lines() {
                let answered = before(line, " requests answered alike");
                figures.count_work("requests", answered.unwrap_or_default());
                let moves = before(line, " starts and stops").unwrap_or_default();
                figures.count_faults("starts and stops of members", moves);
            }
        }
        SearchKind::Decoders => {
            let number = |line: &str| match line.strip_prefix('#') {
                Some(_) => after(line, "#"),
                None => after(line, "Done "),
            };
            let done = ended.stderr.lines().rev().find_map(number);
            figures.count_work("inputs", done.unwrap_or_default());
        }
    }
    for line in ended.stdout.lines().chain(ended.stderr.lines()) {
        if let Some((_, why)) = line.split_once(SKIPPED) {
            figures.skipped.insert(why.trim().to_owned());
        }
    }
    figures
}

/// Returns the number directly before `text` in a line.
fn before(line: &str, text: &str) -> Option<u64> {
    let (left, _) = line.split_once(text)?;
    left.rsplit(|sign: char| !sign.is_ascii_digit()).next()?.parse().ok()
}

/// Returns the number directly after `text` in a line.
fn after(line: &str, text: &str) -> Option<u64> {
    let (_, right) = line.split_once(text)?;
    right.split(|sign: char| !sign.is_ascii_digit()).next()?.parse().ok()
}

/// Returns what a run has found, if it has found anything. A run that hangs counts as a finding,
/// too. So does a run that did no work and gave no reason, because it may have run no test at all.
#[must_use]
pub fn read_finding(
    search: SearchKind,
    run: &SearchRun,
    name: &str,
    ended: &EndedChild,
    figures: &RunFigures,
) -> Option<CampaignFinding> {
    let (what, replay) = match ended.end {
        ChildEnd::Succeeded if figures.is_idle() && figures.skipped.is_empty() => {
            ("it ended without any work".to_owned(), None)
        }
        ChildEnd::Succeeded | ChildEnd::Interrupted => return None,
        ChildEnd::TimeLimit => (format!("not done after {} s", run.limit.as_secs()), None),
        ChildEnd::Failed => describe_failure(search, ended),
    };
    let lines: Vec<&str> = what.trim().lines().take(MAX_FINDING_LINES).collect();
    let what = lines.join("\n").chars().take(MAX_FINDING_CHARS).collect();
    let replay = replay.unwrap_or_else(|| run.replay.clone());
    Some(CampaignFinding { search, what, replay, run: name.to_owned() })
}

/// Returns the description of a failure, and the command that repeats it if the program knows it.
fn describe_failure(search: SearchKind, ended: &EndedChild) -> (String, Option<String>) {
    let document: Value = serde_json::from_str(&ended.stdout).unwrap_or_default();
    let (stdout, stderr) = (ended.stdout.as_str(), ended.stderr.as_str());
    let line_after = |text: &str, mark: &str| {
        text.lines().find_map(|line| Some(line.split_once(mark)?.1.trim().to_owned()))
    };
    match search {
        SearchKind::Simulation if document["failure"].is_object() => {
            let failure = &document["failure"];
            let seed = failure["seed"].as_u64().unwrap_or_default();
            let what = failure["violation"].as_str().unwrap_or_default();
            (format!("seed {seed}: {what}"), Some(format!("make sim SEED={seed}")))
        }
        SearchKind::Walks if document["random"]["found"].is_object() => {
            let what = document["random"]["found"]["violation"].as_str().unwrap_or_default();
            (what.to_owned(), None)
        }
        SearchKind::Histories | SearchKind::Partitions | SearchKind::Durability => {
            let failed: Vec<&str> = stdout
                .lines()
                .filter_map(|line| line.strip_prefix("test ")?.strip_suffix(" ... FAILED"))
                .collect();
            let both = format!("{stdout}\n{stderr}");
            let why = ["Error: ", "panicked at "].iter().find_map(|mark| both.split_once(mark));
            (format!("{}: {}", failed.join(", "), why.map_or("", |(_, why)| why)), None)
        }
        SearchKind::Requests => {
            let what = stderr.split_once("fuzz-etcd: ").map_or(stderr, |(_, what)| what);
            (what.to_owned(), line_after(stderr, "again: "))
        }
        SearchKind::Decoders => {
            let what = line_after(stderr, "panicked at ").or_else(|| line_after(stderr, "ERROR: "));
            let input = line_after(stderr, "Test unit written to ");
            let what = what.unwrap_or_else(|| "the program ended".to_owned());
            (input.map_or_else(|| what.clone(), |input| format!("{what}\ninput: {input}")), None)
        }
        SearchKind::Simulation | SearchKind::Walks => {
            let last: Vec<&str> = stderr.lines().rev().take(3).collect();
            (format!("ended without a report: {}", last.join(" / ")), None)
        }
    }
}

#[cfg(test)]
mod tests;
