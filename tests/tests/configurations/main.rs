//! Starts stock etcd and `muster-node` with configurations from public files. Both must start, or
//! both must refuse, or `docs/differences.md` must explain the difference. A row there that no
//! configuration shows is an error.
//!
//! Each configuration of `cases.txt` is started with flags. Those that start are started again with
//! environment variables and with a file. Configurations of a single flag share a start. If one of
//! the programs refuses that, each of them is started alone.

mod cases;
mod differences;
mod start;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use muster_tests::harness::programs::program;
use muster_tests::stock;

use cases::{Case, Way};
use differences::{Differences, Direction};
use start::{Outcome, Start, Starts};

/// Exit code for a wrong configuration.
const USAGE: i32 = 2;
/// Message of Go programs about an unknown flag.
const NO_FLAG: &str = "flag provided but not defined";

/// Paths of the programs to compare.
struct Programs {
    node: PathBuf,
    etcd: PathBuf,
    /// The previous minor version of etcd, for flags that `etcd` no longer has.
    etcd_before: PathBuf,
}

/// A configuration in one form, and its outcome in both programs.
struct Compared {
    case: Case,
    way: Way,
    etcd: Outcome,
    node: Outcome,
}

#[test]
fn a_configuration_that_etcd_starts_with_starts_here() -> Result<()> {
    let work = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (Some(etcd), Some(etcd_before)) = (stock::newest(work), stock::before(work)) else {
        return Ok(());
    };
    let programs = Programs { node: program("muster-node")?, etcd, etcd_before };
    let starts = Starts::new()?;
    let cases = cases::read(include_str!("cases.txt"))?;
    let typed = compare_joined(&starts, &programs, cases)?;
    let otherwise = compare_joined(&starts, &programs, in_other_ways(&typed))?;

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

/// Returns a description of the problem with a pair of outcomes, if there is one. Adds the row that
/// excuses a difference to `used`.
fn judge(
    compared: &Compared,
    differences: &Differences,
    used: &mut BTreeSet<usize>,
) -> Option<String> {
    let Compared { case, way, etcd, node, .. } = compared;
    let direction = match (etcd, node) {
        (Outcome::Started, Outcome::Started) | (Outcome::Ended { .. }, Outcome::Ended { .. }) => {
            return None;
        }
        (Outcome::Started, Outcome::Ended { .. }) => Direction::RefusedHere,
        (Outcome::Ended { .. }, Outcome::Started) => Direction::RefusedByEtcd,
    };
    let shown = case.text();
    let Some(row) = differences.row(direction, &shown) else {
        return Some(format!("by {way:?}: {shown}\netcd: {etcd}\nmuster-node: {node}"));
    };
    used.insert(row);
    match node {
        Outcome::Ended { code, .. } if *code != Some(USAGE) => {
            Some(format!("by {way:?}: {shown}\nended otherwise than with {USAGE}: {node}"))
        }
        _ => None,
    }
}

fn compare(starts: &Starts, programs: &Programs, cases: Vec<(Case, Way)>) -> Result<Vec<Compared>> {
    let of = |program: &Path, (case, way): &(Case, Way)| Start {
        program: program.to_owned(),
        case: case.clone(),
        way: *way,
    };
    let jobs: Vec<Start> = cases
        .iter()
        .flat_map(|case| [of(&programs.etcd, case), of(&programs.node, case)])
        .collect();
    let mut outcomes = starts.run(jobs)?.into_iter();
    let mut compared = Vec::new();
    for (case, way) in cases {
        let etcd = outcomes.next().context("an outcome of etcd")?;
        let node = outcomes.next().context("an outcome of muster-node")?;
        compared.push(Compared { case, way, etcd, node });
    }
    // Some flags exist only in the previous version of etcd.
    let missing = |compared: &Compared| compared.etcd.says(NO_FLAG);
    let jobs = compared.iter().filter(|compared| missing(compared));
    let before =
        |compared: &Compared| of(&programs.etcd_before, &(compared.case.clone(), compared.way));
    let mut outcomes = starts.run(jobs.map(before).collect())?.into_iter();
    for compared in compared.iter_mut().filter(|compared| missing(compared)) {
        compared.etcd = outcomes.next().context("an outcome of the older etcd")?;
        // The flag is one of etcd 3.5. The unit tests of the flags cover such flags.
        if missing(compared) {
            compared.etcd = Outcome::Started;
        }
    }
    Ok(compared)
}

/// Compares as [`compare`] does, but with shared starts where possible.
fn compare_joined(
    starts: &Starts,
    programs: &Programs,
    cases: Vec<(Case, Way)>,
) -> Result<Vec<Compared>> {
    let mut joined: Vec<(Case, Way)> = Vec::new();
    let mut members: Vec<Vec<(Case, Way)>> = Vec::new();
    for (case, way) in cases {
        let fits = |(known, of): &mut (Case, Way)| *of == way && known.join(&case);
        match joined.iter_mut().position(fits) {
            Some(n) => members[n].push((case, way)),
            None => {
                joined.push((case.clone(), way));
                members.push(vec![(case, way)]);
            }
        }
    }
    let mut alone = Vec::new();
    let mut compared = Vec::new();
    for (one, members) in compare(starts, programs, joined)?.into_iter().zip(members) {
        let both_start = (&one.etcd, &one.node) == (&Outcome::Started, &Outcome::Started);
        if members.len() == 1 {
            compared.push(one);
        } else if both_start {
            compared.extend(members.into_iter().map(|(case, way)| Compared {
                case,
                way,
                etcd: Outcome::Started,
                node: Outcome::Started,
            }));
        } else {
            alone.extend(members);
        }
    }
    compared.extend(compare(starts, programs, alone)?);
    Ok(compared)
}

/// Returns the configurations that started with flags, as variables and as a file.
fn in_other_ways(typed: &[Compared]) -> Vec<(Case, Way)> {
    let both_start = |compared: &&Compared| {
        compared.way == Way::Flags
            && (&compared.etcd, &compared.node) == (&Outcome::Started, &Outcome::Started)
    };
    let cases = typed.iter().filter(both_start).map(|compared| &compared.case);
    let otherwise = cases.flat_map(|case| [(case, Way::Environment), (case, Way::File)]);
    otherwise
        .filter(|(case, way)| case.can_be_told_by(*way))
        .map(|(case, way)| (case.clone(), way))
        .collect()
}
