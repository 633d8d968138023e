//! Bugs put back on purpose, which the tests must find. Some are of the kinds that caused incidents
//! elsewhere. The others are safety rules that are switched off.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde::Serialize;

use super::child::{ChildCommand, ChildEnd, ChildRunner, EndedChild};
use super::programs::CampaignPrograms;
use super::searches::test_command;
use crate::mutants::list::read_all;

/// Table of incidents and the mutants that put their bugs back.
const INCIDENTS: &str = include_str!("incidents.txt");
/// Time limit in seconds of one run of tests by the program `mutants`.
const MUTANT_SECONDS: &str = "240";

/// Test binaries whose tests switch safety rules off, and expect that a search finds the resulting
/// bug.
const RULE_TESTS: [RuleTests; 2] = [
    RuleTests {
        binary: "explore_regressions",
        filter: "",
        searched_by: "exploration of the bootstrap protocol",
        without_rule: &["every_case_has_its_test"],
    },
    RuleTests {
        binary: "sim",
        filter: "bugs_put_back::",
        searched_by: "simulation of the node",
        without_rule: &[],
    },
];

/// A test binary in which each test switches one safety rule off.
struct RuleTests {
    binary: &'static str,
    /// Prefix of the tests' names.
    filter: &'static str,
    searched_by: &'static str,
    /// Tests of the binary that switch no rule off. Their results say nothing about a bug.
    without_rule: &'static [&'static str],
}

/// Whether the tests found a bug that was put back on purpose.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BugVerdict {
    /// Name of the test or violation that found the bug.
    Found(String),
    Missed,
    /// Reason why it isn't known whether the tests find the bug.
    NoResult(String),
}

/// A bug that was put back on purpose, or that could not be put back, with the result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PutBackBug {
    /// Number of the mutant, or the search whose rule was switched off.
    pub source: String,
    /// Description of the bug.
    pub what: String,
    /// Incident that a bug of this kind has caused, if one is known.
    pub incident: Option<String>,
    pub verdict: BugVerdict,
}

/// Puts each bug back on purpose, one after another, and lets the tests look for it. Stops at
/// `deadline`.
///
/// # Errors
/// If a program can't be started, or the lists can't be read.
pub fn put_back(
    runner: &ChildRunner<'_>,
    programs: &CampaignPrograms,
    deadline: Instant,
) -> Result<Vec<PutBackBug>> {
    let left = || deadline.saturating_duration_since(Instant::now());
    let mut bugs = Vec::new();
    for rules in &RULE_TESTS {
        let filters: &[&str] = if rules.filter.is_empty() { &[] } else { &[rules.filter] };
        let command = test_command(rules.binary, filters, programs)?;
        let ended = run_in(runner, &format!("rules-{}", rules.binary), &command, left())?;
        bugs.extend(rule_verdicts(rules, ended.as_ref()));
    }
    let incidents = read_incidents(&programs.root.join("tests/mutants"))?;
    let numbers: Vec<&str> = incidents.iter().map(|bug| bug.source.as_str()).collect();
    let numbers = numbers.join(",");
    let arguments = ["--only", &numbers, "--jobs", "2", "--seconds", MUTANT_SECONDS];
    let command = ChildCommand {
        program: programs.folder.join("mutants"),
        arguments: arguments.map(str::to_owned).to_vec(),
        directory: programs.root.clone(),
        variables: Vec::new(),
    };
    let ended = run_in(runner, "mutants", &command, left())?;
    bugs.extend(incidents.into_iter().map(|bug| mutant_verdict(bug, ended.as_ref())));
    Ok(bugs)
}

/// Runs a command if there is time left.
fn run_in(
    runner: &ChildRunner<'_>,
    name: &str,
    command: &ChildCommand,
    left: Duration,
) -> Result<Option<EndedChild>> {
    if left.is_zero() { Ok(None) } else { runner.run(name, command, left).map(Some) }
}

/// Reads the table of incidents, with the titles of their mutants.
fn read_incidents(lists: &Path) -> Result<Vec<PutBackBug>> {
    let mutants = read_all(lists)?;
    let lines = INCIDENTS.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| {
            let (number, incident) =
                line.split_once(" | ").with_context(|| format!("no incident: {line}"))?;
            let id: u32 = number.parse().with_context(|| format!("no number: {line}"))?;
            let mutant = mutants.iter().find(|mutant| mutant.id == id);
            let mutant = mutant.with_context(|| format!("there is no mutant {id}"))?;
            Ok(PutBackBug {
                source: number.to_owned(),
                what: mutant.title.clone(),
                incident: Some(incident.to_owned()),
                verdict: BugVerdict::NoResult(String::new()),
            })
        })
        .collect()
}

/// Returns the reason why a run of tests says nothing about a bug.
fn reason_without_result(ended: Option<&EndedChild>) -> String {
    let reason = match ended.map(|ended| ended.end) {
        None | Some(ChildEnd::TimeLimit) => "the time was over",
        Some(ChildEnd::Interrupted) => "the campaign was interrupted",
        Some(ChildEnd::Succeeded | ChildEnd::Failed) => "the run ended without it",
    };
    reason.to_owned()
}

/// Returns the bug with the verdict that the program `mutants` printed.
fn mutant_verdict(bug: PutBackBug, ended: Option<&EndedChild>) -> PutBackBug {
    let stdout = ended.map_or("", |ended| ended.stdout.as_str());
    let said = stdout.lines().find_map(|line| line.strip_prefix(&format!("{} ", bug.source)));
    let verdict = match said {
        Some(said) if said.starts_with("SURVIVED") => BugVerdict::Missed,
        Some(said) => {
            let said = said.strip_suffix(&format!(": {}", bug.what)).unwrap_or(said);
            let said = said.rsplit_once(" (").map_or(said, |(before, _)| before);
            match said.strip_prefix("killed by ") {
                Some(by) => BugVerdict::Found(by.to_owned()),
                None => BugVerdict::NoResult(said.to_owned()),
            }
        }
        None => BugVerdict::NoResult(reason_without_result(ended)),
    };
    PutBackBug { verdict, ..bug }
}

/// Returns one bug for each test of `rules` whose result was printed. If results are missing, adds
/// one entry that stands for all other tests.
fn rule_verdicts(rules: &RuleTests, ended: Option<&EndedChild>) -> Vec<PutBackBug> {
    let bug = |what: &str, verdict: BugVerdict| PutBackBug {
        source: format!("rule of the {}", rules.searched_by),
        what: what.strip_prefix(rules.filter).unwrap_or(what).replace('_', " "),
        incident: None,
        verdict,
    };
    let mut bugs = Vec::new();
    for line in ended.map_or("", |ended| ended.stdout.as_str()).lines() {
        let Some(line) = line.strip_prefix("test ") else { continue };
        let (name, verdict) = match line.rsplit_once(" ... ") {
            Some((name, "ok")) => (name, BugVerdict::Found(rules.searched_by.to_owned())),
            Some((name, "FAILED")) => (name, BugVerdict::Missed),
            _ => continue,
        };
        if !rules.without_rule.contains(&name) {
            bugs.push(bug(name, verdict));
        }
    }
    // If a test binary crashes, the results of some tests are missing.
    let is_complete = ended.is_some_and(|ended| {
        matches!(ended.end, ChildEnd::Succeeded | ChildEnd::Failed)
            && ended.stdout.lines().any(|line| line.starts_with("test result: "))
    });
    if !is_complete || bugs.is_empty() {
        bugs.push(bug("the others", BugVerdict::NoResult(reason_without_result(ended))));
    }
    bugs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(end: ChildEnd, stdout: &str) -> EndedChild {
        EndedChild { end, took: Duration::ZERO, stdout: stdout.into(), stderr: String::new() }
    }

    #[test]
    fn every_incident_names_a_listed_mutant() {
        let lists = Path::new(env!("CARGO_MANIFEST_DIR")).join("mutants");
        assert!(read_incidents(&lists).unwrap().len() > 20);
    }

    #[test]
    fn a_mutants_verdict_is_read_from_its_line() {
        let verdict = |stdout: &str, end| {
            let bug = PutBackBug {
                source: "309".into(),
                what: "one (batch) behind".into(),
                incident: None,
                verdict: BugVerdict::Missed,
            };
            mutant_verdict(bug, Some(&ended(end, stdout))).verdict
        };
        let killed = "30 SURVIVED (1.0 s): x\n\
            309 killed by seed 4: monotone: 1 (2) (3.1 s): one (batch) behind\n";
        let by = BugVerdict::Found("seed 4: monotone: 1 (2)".into());
        assert_eq!(verdict(killed, ChildEnd::Failed), by);
        assert_eq!(verdict("309 SURVIVED (1.0 s): x", ChildEnd::Failed), BugVerdict::Missed);
        let open = BugVerdict::NoResult("OPEN, not done after 240 s".into());
        assert_eq!(
            verdict("309 OPEN, not done after 240 s (3.1 s): one (batch) behind", ChildEnd::Failed),
            open
        );
        let over = BugVerdict::NoResult("the time was over".into());
        assert_eq!(verdict("", ChildEnd::TimeLimit), over);
    }

    #[test]
    fn a_passed_test_of_a_rule_means_that_its_bug_was_found() {
        let [_, rules] = &RULE_TESTS;
        let stdout =
            "test bugs_put_back::a_vote_is_found ... ok\ntest bugs_put_back::b ... FAILED\n";
        let bugs = rule_verdicts(rules, Some(&ended(ChildEnd::Interrupted, stdout)));
        let got: Vec<_> = bugs.iter().map(|bug| (bug.what.as_str(), &bug.verdict)).collect();
        let found = BugVerdict::Found("simulation of the node".into());
        let unknown = BugVerdict::NoResult("the campaign was interrupted".into());
        let wanted =
            [("a vote is found", &found), ("b", &BugVerdict::Missed), ("the others", &unknown)];
        assert_eq!(got, wanted);
    }

    #[test]
    fn bugs_whose_tests_did_not_run_before_a_crash_have_no_result() {
        let [_, rules] = &RULE_TESTS;
        let passed = "test bugs_put_back::a ... ok\n";
        let verdicts = |stdout: &str| {
            let bugs = rule_verdicts(rules, Some(&ended(ChildEnd::Failed, stdout)));
            bugs.into_iter().map(|bug| bug.verdict).collect::<Vec<_>>()
        };
        let found = BugVerdict::Found("simulation of the node".into());
        let unknown = BugVerdict::NoResult("the run ended without it".into());
        assert_eq!(verdicts(passed), [found.clone(), unknown]);
        let all = format!("{passed}\ntest result: FAILED. 1 passed; 0 failed\n");
        assert_eq!(verdicts(&all), [found]);
    }
}
