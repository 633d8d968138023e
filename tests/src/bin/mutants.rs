//! `make mutants`: reports which small bugs no test finds.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command line: the report goes to stdout, progress to stderr"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use muster_tests::mutants::build::{build, program_of_finder};
use muster_tests::mutants::list::{Finder, Mutant, is_chosen, read_all};
use muster_tests::mutants::run::{FinderResult, MutantRunner};
use muster_tests::mutants::tree::{copy, crate_of};

/// Puts small bugs into the code, one at a time, and prints those that no test finds.
#[derive(Parser)]
#[command(version)]
struct MutantsArguments {
    /// Try only mutants with these numbers; x stands for any digit, and ranges are allowed
    /// (4xx,110,1301-1318).
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Try only the mutants of this list (log stands for tests/mutants/log.txt).
    #[arg(long)]
    file: Option<String>,
    /// Seconds that one run of tests may take; a longer run leaves the mutant's result
    /// inconclusive.
    #[arg(long, default_value_t = 240)]
    seconds: u64,
    /// Number of runs at a time.
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// List the chosen mutants, and try none.
    #[arg(long)]
    list: bool,
    /// Folder for the mutated copy of the workspace and its build. It is kept, so that the next run
    /// builds less.
    #[arg(long, default_value = "target/mutants")]
    scratch: PathBuf,
}

fn main() -> Result<ExitCode> {
    let arguments = MutantsArguments::parse();
    let root = std::env::current_dir()?;
    let all = read_all(&root.join("tests/mutants"))
        .context("run it in the workspace's root; the lists are tests/mutants/*.txt")?;
    let of_file = |mutant: &&Mutant| arguments.file.as_ref().is_none_or(|f| *f == mutant.list);
    let of_number = |mutant: &&Mutant| is_chosen(mutant.id, &arguments.only);
    let chosen: Vec<Mutant> = all.iter().filter(of_file).filter(of_number).cloned().collect();
    ensure!(!chosen.is_empty(), "no mutant is chosen");
    if arguments.list {
        chosen.iter().for_each(|mutant| {
            println!("{} {}: {}", mutant.id, mutant.file.display(), mutant.title);
        });
        return Ok(ExitCode::SUCCESS);
    }
    let scratch = std::path::absolute(&arguments.scratch)?;
    let tree = scratch.join("tree");
    fs_err::create_dir_all(&tree)?;
    // The build contains all mutants, so that choosing others needs no rebuild.
    copy(&root, &tree, &all)?;
    let mut programs = BTreeSet::new();
    for mutant in &chosen {
        for finder in &mutant.finders {
            programs.insert(program_of_finder(&tree, mutant, finder)?);
        }
    }
    eprintln!("building {} programs with {} mutants in them", programs.len(), all.len());
    let programs = build(&tree, &scratch.join("build"), &programs)?;
    let limit = Duration::from_secs(arguments.seconds);
    let bench = MutantRunner { scratch: &tree, programs: &programs, limit };
    let useless = find_useless(&bench, &chosen)?;
    let results = try_all(&bench, &chosen, &useless, arguments.jobs)?;
    Ok(print_report(&chosen, &results))
}

/// A finder (a command that may find a mutant), and the folder of the crate whose tests it runs.
type FinderKey<'a> = (PathBuf, &'a Finder);

fn tests_of<'a>(
    bench: &MutantRunner<'_>,
    mutant: &Mutant,
    finder: &'a Finder,
) -> Result<FinderKey<'a>> {
    Ok((crate_of(Path::new(bench.scratch), &mutant.file)?, finder))
}

/// Returns the finders that fail even without a mutant. They are useless, because they would seem
/// to find every mutant.
fn find_useless<'a>(
    bench: &MutantRunner<'_>,
    chosen: &'a [Mutant],
) -> Result<BTreeMap<FinderKey<'a>, String>> {
    let (mut seen, mut useless) = (BTreeSet::new(), BTreeMap::new());
    for mutant in chosen {
        for finder in &mutant.finders {
            let tests = tests_of(bench, mutant, finder)?;
            // The simulation isn't run without a mutant: that takes long, and another test checks
            // that it finds nothing.
            let is_sim = matches!(finder, Finder::Sim { .. });
            if is_sim || !seen.insert(tests.clone()) {
                continue;
            }
            let found = bench.run(mutant, finder, false)?;
            if found != FinderResult::NotFound {
                eprintln!("without any mutant {finder:?} gives {found:?}");
                useless.insert(tests, format!("without it, too: {found:?}"));
            }
        }
    }
    Ok(useless)
}

/// Result of a mutant.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum MutantVerdict {
    Killed(String),
    Survived,
    /// A finder failed for an unrelated reason, or timed out.
    Inconclusive(String),
    /// No test can find the mutant, so none was run.
    Equivalent(String),
}

impl MutantVerdict {
    fn describe(&self) -> String {
        match self {
            Self::Killed(by) => format!("killed by {by}"),
            Self::Survived => "SURVIVED".to_owned(),
            Self::Inconclusive(why) => format!("OPEN, {why}"),
            Self::Equivalent(why) => format!("equivalent: {why}"),
        }
    }
}

type Results = BTreeMap<u32, MutantVerdict>;

fn try_one(
    bench: &MutantRunner<'_>,
    mutant: &Mutant,
    useless: &BTreeMap<FinderKey<'_>, String>,
) -> Result<MutantVerdict> {
    if let Some(why) = &mutant.equivalent {
        return Ok(MutantVerdict::Equivalent(why.clone()));
    }
    let mut verdict = MutantVerdict::Survived;
    for finder in &mutant.finders {
        let found = match useless.get(&tests_of(bench, mutant, finder)?) {
            Some(why) => FinderResult::Inconclusive(why.clone()),
            None => bench.run(mutant, finder, true)?,
        };
        match found {
            FinderResult::FoundBy(who) => return Ok(MutantVerdict::Killed(who)),
            FinderResult::Inconclusive(why) => verdict = MutantVerdict::Inconclusive(why),
            FinderResult::NotFound => {}
        }
    }
    Ok(verdict)
}

fn try_all(
    bench: &MutantRunner<'_>,
    chosen: &[Mutant],
    useless: &BTreeMap<FinderKey<'_>, String>,
    jobs: usize,
) -> Result<Results> {
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Results::new()));
    let work = || -> Result<()> {
        while let Some(mutant) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
            let began = Instant::now();
            let verdict = try_one(bench, mutant, useless)?;
            let took = began.elapsed().as_secs_f64();
            println!("{} {} ({took:.1} s): {}", mutant.id, verdict.describe(), mutant.title);
            results.lock().expect("no holder panics").insert(mutant.id, verdict);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs.max(1)).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("a worker returns"))
    })?;
    Ok(results.into_inner().expect("no holder panics"))
}

/// Prints how many mutants of each list were found, and then every mutant that was not.
fn print_report(chosen: &[Mutant], results: &Results) -> ExitCode {
    let mut lists: BTreeMap<&str, [usize; 4]> = BTreeMap::new();
    for mutant in chosen {
        let counts = lists.entry(&mutant.list).or_default();
        counts[match results[&mutant.id] {
            MutantVerdict::Killed(_) => 0,
            MutantVerdict::Survived => 1,
            MutantVerdict::Inconclusive(_) => 2,
            MutantVerdict::Equivalent(_) => 3,
        }] += 1;
    }
    println!("\n{:<12}  tried killed survived open equivalent", "list");
    let mut all = [0; 4];
    for (list, counts) in lists {
        print_line(list, counts);
        all.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }
    print_line("all", all);
    for mutant in chosen {
        let verdict = &results[&mutant.id];
        if matches!(verdict, MutantVerdict::Survived | MutantVerdict::Inconclusive(_)) {
            println!(
                "{} {} {}: {}",
                mutant.id,
                verdict.describe(),
                mutant.file.display(),
                mutant.title
            );
        }
    }
    if all[1] + all[2] == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn print_line(list: &str, [killed, survived, open, equivalent]: [usize; 4]) {
    let tried = killed + survived + open;
    println!("{list:<12} {tried:>6} {killed:>6} {survived:>8} {open:>4} {equivalent:>10}");
}
