//! `make mutants`: which small bugs do the tests find?

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
use muster_tests::mutants::build::{build, package_name, program};
use muster_tests::mutants::list::{Finder, Mutant, is_chosen, read_all};
use muster_tests::mutants::run::{Bench, Found};
use muster_tests::mutants::tree::{copy, crate_of};

/// Puts small bugs in, one at a time, and says which ones no test finds.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Only these numbers; x stands for any digit (4xx,110).
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Only those in this package.
    #[arg(long)]
    package: Option<String>,
    /// Seconds that one run of tests may take; one that takes longer counts as a find.
    #[arg(long, default_value_t = 240)]
    seconds: u64,
    /// Runs at a time.
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Only list them.
    #[arg(long)]
    list: bool,
    /// Where the mutated copy and its build go; kept, so that the next run builds less.
    #[arg(long, default_value = "target/mutants")]
    scratch: PathBuf,
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let root = std::env::current_dir()?;
    let all = read_all(&root.join("tests/mutants"))
        .context("run it in the workspace's root; the lists are tests/mutants/*.txt")?;
    let mut chosen = Vec::new();
    for mutant in all.iter().filter(|mutant| is_chosen(mutant.id, &arguments.only)) {
        let package = package_name(&root, &crate_of(&root, &mutant.file)?)?;
        if arguments.package.as_ref().is_none_or(|wanted| *wanted == package) {
            chosen.push(mutant.clone());
        }
    }
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
    // All of them are in the build, so that choosing others builds nothing anew.
    copy(&root, &tree, &all)?;
    let mut programs = BTreeSet::new();
    for mutant in &chosen {
        for finder in &mutant.finders {
            programs.insert(program(&tree, mutant, finder)?);
        }
    }
    eprintln!("building {} programs with {} mutants in them", programs.len(), all.len());
    let programs = build(&tree, &scratch.join("build"), &programs)?;
    let limit = Duration::from_secs(arguments.seconds);
    let bench = Bench { scratch: &tree, programs: &programs, limit };
    without(&bench, &chosen)?;
    let results = try_all(&bench, &chosen, arguments.jobs)?;
    Ok(report(&chosen, &results))
}

/// Every finder passes as long as no mutant is switched on: else it would find anything.
fn without(bench: &Bench<'_>, chosen: &[Mutant]) -> Result<()> {
    let mut seen: BTreeSet<(PathBuf, &Finder)> = BTreeSet::new();
    for mutant in chosen {
        for finder in &mutant.finders {
            // That the simulation finds nothing is a test of its own, and a long one.
            let is_sim = matches!(finder, Finder::Sim { .. });
            let package = crate_of(Path::new(bench.scratch), &mutant.file)?;
            if !is_sim && seen.insert((package, finder)) {
                let found = bench.run(mutant, finder, false)?;
                ensure!(found == Found::Nothing, "{finder:?} fails without any mutant: {found:?}");
            }
        }
    }
    Ok(())
}

/// What each mutant was found by; nothing if it survived.
type Results = BTreeMap<u32, Option<Found>>;

fn try_all(bench: &Bench<'_>, chosen: &[Mutant], jobs: usize) -> Result<Results> {
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Results::new()));
    let work = || -> Result<()> {
        while let Some(mutant) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
            let began = Instant::now();
            let mut found = None;
            for finder in &mutant.finders {
                let outcome = bench.run(mutant, finder, true)?;
                if outcome != Found::Nothing {
                    found = Some(outcome);
                    break;
                }
            }
            let how = match &found {
                Some(Found::By(who)) => format!("killed by {who}"),
                Some(_) => "killed: it hangs".to_owned(),
                None => "SURVIVED".to_owned(),
            };
            let took = began.elapsed().as_secs_f64();
            println!("{} {how} ({took:.1} s): {}", mutant.id, mutant.title);
            results.lock().expect("nobody panics with it").insert(mutant.id, found);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs.max(1)).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("a worker returns"))
    })?;
    Ok(results.into_inner().expect("nobody panics with it"))
}

fn report(chosen: &[Mutant], results: &Results) -> ExitCode {
    let survived = |mutant: &&Mutant| results[&mutant.id].is_none();
    let killed = chosen.iter().filter(|mutant| !survived(mutant)).count();
    let (known, new): (Vec<_>, Vec<_>) =
        chosen.iter().filter(survived).partition(|mutant| mutant.survives.is_some());
    println!("{killed} of {} killed, {} survive as known", chosen.len(), known.len());
    for mutant in known {
        let why = mutant.survives.as_deref().unwrap_or_default();
        println!("known: {} {}: {why}", mutant.id, mutant.title);
    }
    for mutant in &new {
        println!("SURVIVED: {} {}: {}", mutant.id, mutant.file.display(), mutant.title);
    }
    if new.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
