//! Tests of what is read from the output of the searches' programs.

use std::path::PathBuf;
use std::time::Duration;

use super::*;
use crate::campaign::child::ChildCommand;

fn ended(end: ChildEnd, stdout: &str, stderr: &str) -> EndedChild {
    let (stdout, stderr) = (stdout.to_owned(), stderr.to_owned());
    EndedChild { end, took: Duration::from_secs(60), stdout, stderr }
}

fn work(search: SearchKind, stdout: &str, stderr: &str) -> Vec<(String, u64)> {
    let figures = read_figures(search, &ended(ChildEnd::Succeeded, stdout, stderr));
    figures.work.into_iter().collect()
}

fn finding(search: SearchKind, end: ChildEnd, stdout: &str, stderr: &str) -> CampaignFinding {
    let command = ChildCommand {
        program: PathBuf::new(),
        arguments: Vec::new(),
        directory: PathBuf::new(),
        variables: Vec::new(),
    };
    let run = SearchRun {
        command,
        last_seed: None,
        usual_time: Duration::ZERO,
        limit: Duration::from_secs(90),
        replay: "again".to_owned(),
    };
    let ended = ended(end, stdout, stderr);
    read_finding(search, &run, "0001-run", &ended, &read_figures(search, &ended)).unwrap()
}

#[test]
fn the_simulations_report_gives_its_work_and_its_faults() {
    let stdout = r#"{"histories": 9, "steps": 800, "writes": 7, "reads": 6, "crashes": 5}"#;
    let figures = read_figures(SearchKind::Simulation, &ended(ChildEnd::Succeeded, stdout, ""));
    assert_eq!((figures.work["histories"], figures.work["steps"]), (9, 800));
    assert_eq!((figures.faults["crashes and kills"], figures.faults["torn ends of logs"]), (5, 0));
}

#[test]
fn a_stopped_simulation_has_the_histories_of_its_last_progress() {
    let progress = "500 histories, 90/s\n1000 histories, 91/s\n";
    let histories = [("histories".to_owned(), 1_000)];
    assert_eq!(work(SearchKind::Simulation, "", progress), histories);
}

#[test]
fn work_is_counted_in_the_lines_of_each_program() {
    let walks = r#"{"explored":[],"random":{"walks":3,"steps":40,"restored_after_commit":1}}"#;
    let wanted = [("steps".to_owned(), 40), ("walks".to_owned(), 3)];
    assert_eq!(work(SearchKind::Walks, walks, ""), wanted);
    let requests = "Keys, seed 7: 5000 requests answered alike, 9 of them refusals; x\n\
        Users, seed 8: 20 requests answered alike, 9 of them refusals; 2 starts and stops (3 s)\n";
    assert_eq!(work(SearchKind::Requests, requests, ""), [("requests".to_owned(), 5_020)]);
    let inputs = "#2\tINITED cov: 1\n#512\tpulse cov: 5\nDone 1234 runs in 60 second(s)\n";
    assert_eq!(work(SearchKind::Decoders, "", inputs), [("inputs".to_owned(), 1_234)]);
    let stopped = "#2\tINITED cov: 1\n#512\tpulse cov: 5\n";
    assert_eq!(work(SearchKind::Decoders, "", stopped), [("inputs".to_owned(), 512)]);
    let tests = "test a ... ok\ntest b ... FAILED\ntest c ... ok\n";
    assert_eq!(work(SearchKind::Durability, tests, ""), [("tests".to_owned(), 2)]);
}

#[test]
fn a_history_counts_its_answers_and_faults() {
    let line = "kill: seed 7, 6 faults, 40s, judged in 1s: HistoryReport { answered: 900, \
        refused: 8, denied: 7, unknown: 6, happened: 5, terms: 4 }\n";
    let figures = read_figures(SearchKind::Histories, &ended(ChildEnd::Succeeded, line, ""));
    assert_eq!((figures.work["answers"], figures.work["lost answers"]), (900, 6));
    assert_eq!(figures.faults["kills, pauses and cuts"], 6);
}

#[test]
fn a_part_that_this_machine_can_not_run_is_named() {
    let stderr = "test x ... SKIPPED: no nft (scripts/setup tests installs it)\n";
    let figures = read_figures(SearchKind::Partitions, &ended(ChildEnd::Succeeded, "", stderr));
    let skipped: Vec<String> = figures.skipped.into_iter().collect();
    assert_eq!(skipped, ["no nft (scripts/setup tests installs it)"]);
}

#[test]
fn a_finding_has_the_command_that_repeats_it() {
    let stdout = r#"{"histories": 9, "failure": {"seed": 5, "violation": "monotone: x"}}"#;
    let found = finding(SearchKind::Simulation, ChildEnd::Failed, stdout, "");
    assert_eq!((&*found.what, &*found.replay), ("seed 5: monotone: x", "make sim SEED=5"));
    let stderr = "fuzz-etcd: seed 7, request 33: Put\n  etcd: a\n  muster-node: b\n\
        again: make fuzz-etcd ABOUT=keys SEED=7 N=33\n";
    let found = finding(SearchKind::Requests, ChildEnd::Failed, "", stderr);
    assert!(found.what.starts_with("seed 7, request 33: Put\n"), "{}", found.what);
    assert_eq!(found.replay, "make fuzz-etcd ABOUT=keys SEED=7 N=33");
}

#[test]
fn a_failed_test_is_named_with_its_error() {
    let stdout = "test a ... ok\ntest b ... FAILED\n\n---- b stdout ----\nError: lost\n";
    let found = finding(SearchKind::Durability, ChildEnd::Failed, stdout, "");
    assert_eq!((&*found.what, &*found.replay), ("b: lost", "again"));
}

#[test]
fn a_run_that_hangs_is_a_finding_but_an_interrupted_one_is_not() {
    let found = finding(SearchKind::Partitions, ChildEnd::TimeLimit, "", "");
    assert_eq!(found.what, "not done after 90 s");
    let command = ChildCommand {
        program: PathBuf::new(),
        arguments: Vec::new(),
        directory: PathBuf::new(),
        variables: Vec::new(),
    };
    let run = SearchRun {
        command,
        last_seed: None,
        usual_time: Duration::ZERO,
        limit: Duration::ZERO,
        replay: String::new(),
    };
    let interrupted = ended(ChildEnd::Interrupted, "", "");
    let nothing = RunFigures::default();
    assert_eq!(read_finding(SearchKind::Partitions, &run, "x", &interrupted, &nothing), None);
}

#[test]
fn a_successful_run_without_work_or_a_reason_is_a_finding() {
    let found = finding(SearchKind::Durability, ChildEnd::Succeeded, "running 0 tests\n", "");
    assert_eq!(found.what, "it ended without any work");
}

#[test]
fn a_skipped_test_is_no_work() {
    let stdout = "test a ... ok\ntest b ... ok\n";
    let tests = [("tests".to_owned(), 1)];
    assert_eq!(work(SearchKind::Durability, stdout, "SKIPPED: no strace\n"), tests);
}
