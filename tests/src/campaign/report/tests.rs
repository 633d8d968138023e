//! Tests of the whole text of a report, and of the rules that judge a campaign's result.

use super::*;

fn report() -> CampaignReport {
    let figures = |work: &[(&str, u64)], faults: &[(&str, u64)]| RunFigures {
        work: work.iter().map(|(unit, count)| ((*unit).to_owned(), *count)).collect(),
        faults: faults.iter().map(|(fault, count)| ((*fault).to_owned(), *count)).collect(),
        ..RunFigures::default()
    };
    let simulation = SearchEntry {
        search: SearchKind::Simulation,
        runs: 4,
        seconds: 2_160,
        figures: figures(
            &[("histories", 1_234_567), ("steps", 0)],
            &[("crashes and kills", 7_000)],
        ),
        found: 1,
        missing: None,
    };
    let mut histories = figures(&[("answers", 999)], &[]);
    histories.skipped.insert("no nft".to_owned());
    let histories = SearchEntry {
        search: SearchKind::Histories,
        runs: 1,
        seconds: 59,
        figures: histories,
        found: 0,
        missing: None,
    };
    let decoders = SearchEntry {
        search: SearchKind::Decoders,
        runs: 0,
        seconds: 0,
        figures: figures(&[], &[]),
        found: 0,
        missing: Some("no fuzz target is built".to_owned()),
    };
    let bug = |source: &str, what: &str, incident: Option<&str>, verdict| PutBackBug {
        source: source.to_owned(),
        what: what.to_owned(),
        incident: incident.map(str::to_owned),
        verdict,
    };
    CampaignReport {
        date: "2026-11-28 23:00 UTC".to_owned(),
        tested: TestedCommit {
            commit: "0d1c423e0000".to_owned(),
            processors: 2,
            memory_mib: 15_872,
            kernel: "Linux 6.1.0, x86_64".to_owned(),
        },
        seconds: 14_460,
        interrupted: false,
        seeds: (1_000, 9_000),
        searches: vec![simulation, histories, decoders],
        findings: vec![CampaignFinding {
            search: SearchKind::Simulation,
            what: "seed 5: monotone\nmore".to_owned(),
            replay: "make sim SEED=5".to_owned(),
            run: "0001-simulation".to_owned(),
        }],
        bugs: vec![
            bug("309", "an index | behind", Some("13766: x"), BugVerdict::Found("a::b".into())),
            bug("rule of the x", "a vote", None, BugVerdict::Missed),
            bug("401", "lost events", Some("15271: y"), BugVerdict::NoResult("over".into())),
        ],
    }
}

#[test]
fn the_report_says_what_ran_what_was_found_and_what_is_not_covered() {
    let text = report().markdown();
    let wanted = include_str!("golden.md");
    assert_eq!(text, wanted, "the report is now:\n{text}");
}

#[test]
fn only_a_campaign_without_findings_that_found_each_bug_is_clean() {
    let mut report = report();
    assert!(!report.is_clean());
    let found = "The searches found 1 fault. Searches that did no work: Decoders. Tests found 1 of \
        3 bugs put back.";
    assert_eq!(report.summary(), found);
    report.findings.clear();
    assert!(!report.is_clean());
    report.bugs.truncate(1);
    assert!(report.is_clean());
    report.bugs.clear();
    assert!(report.is_clean());
    let nothing =
        "The searches found nothing. Searches that did no work: Decoders. No bug was put back.";
    assert_eq!(report.summary(), nothing);
}

#[test]
fn a_campaign_that_was_interrupted_or_in_which_a_search_did_no_work_is_not_clean() {
    let clean = || CampaignReport { findings: Vec::new(), bugs: Vec::new(), ..report() };
    assert!(clean().is_clean(), "a search that can't run here is only named");
    assert!(!CampaignReport { interrupted: true, ..clean() }.is_clean());
    let idle = |search: usize| {
        let mut report = clean();
        report.searches[search].figures.work.clear();
        report
    };
    assert!(!idle(0).is_clean());
    let summary = idle(0).summary();
    assert!(summary.contains("Searches that did no work: Simulation, Decoders."), "{summary}");
    assert!(idle(1).is_clean(), "all of its tests were skipped, for a reason");
    let mut none = clean();
    none.searches.retain(|entry| entry.missing.is_some());
    assert!(!none.is_clean());
}

#[test]
fn a_report_without_results_says_so() {
    let report =
        CampaignReport { interrupted: true, findings: Vec::new(), bugs: Vec::new(), ..report() };
    let text = report.markdown();
    assert!(text.contains("The campaign was interrupted."), "{text}");
    assert!(text.contains("## Findings\n\nNone.\n"), "{text}");
    assert!(text.contains("None: the campaign was too short, or none was wanted."), "{text}");
}

#[test]
fn the_json_document_has_the_same_contents() {
    let document = serde_json::to_value(report()).unwrap();
    assert_eq!(document["commit"], "0d1c423e0000");
    assert_eq!(document["searches"][0]["figures"]["work"]["histories"], 1_234_567);
    assert_eq!(document["bugs"][0]["verdict"]["found"], "a::b");
    assert_eq!(document["bugs"][1]["verdict"], "missed");
}

#[test]
fn numbers_and_times_are_easy_to_read() {
    assert_eq!([0, 999, 1_000, 12_345_678].map(number), ["0", "999", "1,000", "12,345,678"]);
    assert_eq!([59, 60, 3_599, 14_460].map(time), ["59 s", "1 min", "59 min", "4 h 1 min"]);
}
