//! Starts stock etcd and `muster-node` with configurations from public files. Both must start, or
//! both must refuse, or `docs/differences.md` must explain the difference. A row there that no
//! configuration shows is an error.
//!
//! Each configuration of `cases.txt` is started with flags. If both programs start with it, they
//! are started again with the same settings as environment variables and as a file. Configurations
//! of a single flag are started together. If one of the programs refuses this, each configuration
//! is started alone.

mod cases;
mod differences;
mod start;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use muster_tests::harness::programs::program_path;
use muster_tests::stock_etcd;

use cases::{Case, ConfigSource};
use differences::{Differences, Direction};
use start::{StartOutcome, StartRequest, StartRunner};

/// Exit code for a wrong configuration.
const USAGE_EXIT_CODE: i32 = 2;
/// Message of Go programs about an unknown flag.
const UNKNOWN_FLAG_MESSAGE: &str = "flag provided but not defined";

/// Paths of the programs to compare.
struct ComparedPrograms {
    node: PathBuf,
    etcd: PathBuf,
    /// The previous minor version of etcd, for flags that `etcd` no longer has.
    etcd_before: PathBuf,
}

/// A configuration as flags, variables or a file, and its outcome in both programs.
struct OutcomePair {
    case: Case,
    source: ConfigSource,
    etcd: StartOutcome,
    node: StartOutcome,
}

#[test]
fn a_configuration_that_etcd_starts_with_starts_here() -> Result<()> {
    let work = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (Some(etcd), Some(etcd_before)) = (stock_etcd::newest(work), stock_etcd::previous(work))
    else {
        return Ok(());
    };
    let programs = ComparedPrograms { node: program_path("muster-node")?, etcd, etcd_before };
    let starts = StartRunner::new()?;
    let cases = cases::parse_cases(include_str!("cases.txt"))?;
    let typed = compare_joined(&starts, &programs, cases)?;
    let otherwise = compare_joined(&starts, &programs, in_other_sources(&typed))?;

    let differences = Differences::read(include_str!("../../../docs/differences.md"))?;
    let mut used = BTreeSet::new();
    let mut problems = Vec::new();
    for compared in typed.iter().chain(&otherwise) {
        problems.extend(judge(compared, &differences, &mut used));
    }
    problems.extend(differences.unused(&used));
    ensure!(problems.is_empty(), "{}", problems.join("\n\n"));
    Ok(())
}

/// Returns a description of the problem with a pair of outcomes, if there is one. Adds the number
/// of the row that explains a difference to `used`.
fn judge(
    compared: &OutcomePair,
    differences: &Differences,
    used: &mut BTreeSet<usize>,
) -> Option<String> {
    let OutcomePair { case, source, etcd, node, .. } = compared;
    let direction = match (etcd, node) {
        (StartOutcome::Started, StartOutcome::Started)
        | (StartOutcome::Ended { .. }, StartOutcome::Ended { .. }) => {
            return None;
        }
        (StartOutcome::Started, StartOutcome::Ended { .. }) => Direction::RefusedHere,
        (StartOutcome::Ended { .. }, StartOutcome::Started) => Direction::RefusedByEtcd,
    };
    let shown = case.text();
    let Some(row) = differences.row(direction, &shown) else {
        return Some(format!("by {source:?}: {shown}\netcd: {etcd}\nmuster-node: {node}"));
    };
    used.insert(row);
    match node {
        StartOutcome::Ended { code, .. } if *code != Some(USAGE_EXIT_CODE) => Some(format!(
            "by {source:?}: {shown}\nended otherwise than with {USAGE_EXIT_CODE}: {node}"
        )),
        _ => None,
    }
}

fn compare(
    starts: &StartRunner,
    programs: &ComparedPrograms,
    cases: Vec<(Case, ConfigSource)>,
) -> Result<Vec<OutcomePair>> {
    let start_request = |program: &Path, (case, source): &(Case, ConfigSource)| StartRequest {
        program: program.to_owned(),
        case: case.clone(),
        source: *source,
    };
    let jobs: Vec<StartRequest> = cases
        .iter()
        .flat_map(|case| [start_request(&programs.etcd, case), start_request(&programs.node, case)])
        .collect();
    let mut outcomes = starts.run(jobs)?.into_iter();
    let mut compared = Vec::new();
    for (case, source) in cases {
        let etcd = outcomes.next().context("an outcome of etcd")?;
        let node = outcomes.next().context("an outcome of muster-node")?;
        compared.push(OutcomePair { case, source, etcd, node });
    }
    // If the newest etcd doesn't have a flag, the previous version of etcd is started with it.
    let missing = |compared: &OutcomePair| compared.etcd.says(UNKNOWN_FLAG_MESSAGE);
    let jobs = compared.iter().filter(|compared| missing(compared));
    let before = |compared: &OutcomePair| {
        start_request(&programs.etcd_before, &(compared.case.clone(), compared.source))
    };
    let mut outcomes = starts.run(jobs.map(before).collect())?.into_iter();
    for compared in compared.iter_mut().filter(|compared| missing(compared)) {
        compared.etcd = outcomes.next().context("an outcome of the older etcd")?;
        // The previous version doesn't have the flag either, so the flag is one of etcd 3.5. The
        // unit tests of the flags cover such flags.
        if missing(compared) {
            compared.etcd = StartOutcome::Started;
        }
    }
    Ok(compared)
}

/// Compares as [`compare`] does, but with fewer starts. Configurations with different flags are
/// joined, and each program starts once with all their flags. Unless both programs start, the
/// joined configurations are compared one by one.
fn compare_joined(
    starts: &StartRunner,
    programs: &ComparedPrograms,
    cases: Vec<(Case, ConfigSource)>,
) -> Result<Vec<OutcomePair>> {
    let mut joined: Vec<(Case, ConfigSource)> = Vec::new();
    let mut members: Vec<Vec<(Case, ConfigSource)>> = Vec::new();
    for (case, source) in cases {
        let can_join = |(known, known_source): &mut (Case, ConfigSource)| {
            *known_source == source && known.join(&case)
        };
        match joined.iter_mut().position(can_join) {
            Some(n) => members[n].push((case, source)),
            None => {
                joined.push((case.clone(), source));
                members.push(vec![(case, source)]);
            }
        }
    }
    let mut alone = Vec::new();
    let mut compared = Vec::new();
    for (one, members) in compare(starts, programs, joined)?.into_iter().zip(members) {
        let both_start = (&one.etcd, &one.node) == (&StartOutcome::Started, &StartOutcome::Started);
        if members.len() == 1 {
            compared.push(one);
        } else if both_start {
            compared.extend(members.into_iter().map(|(case, source)| OutcomePair {
                case,
                source,
                etcd: StartOutcome::Started,
                node: StartOutcome::Started,
            }));
        } else {
            alone.extend(members);
        }
    }
    compared.extend(compare(starts, programs, alone)?);
    Ok(compared)
}

/// Returns the configurations that started with flags, in their other two forms: as variables and
/// as a file.
fn in_other_sources(typed: &[OutcomePair]) -> Vec<(Case, ConfigSource)> {
    let both_start = |compared: &&OutcomePair| {
        compared.source == ConfigSource::Flags
            && (&compared.etcd, &compared.node) == (&StartOutcome::Started, &StartOutcome::Started)
    };
    let cases = typed.iter().filter(both_start).map(|compared| &compared.case);
    let otherwise =
        cases.flat_map(|case| [(case, ConfigSource::Environment), (case, ConfigSource::File)]);
    otherwise
        .filter(|(case, source)| case.is_equivalent_in(*source))
        .map(|(case, source)| (case.clone(), source))
        .collect()
}
