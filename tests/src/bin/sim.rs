//! `make sim`: simulates seeded histories of the node's production code.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command line: the report goes to stdout, progress to stderr"
)]

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use muster_tests::sim::{Campaign, SimulationOptions, campaign, replay};
use serde_json::json;

/// The simulation allocates for a seventh of its time with the C library's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Number of histories after which a run with a time limit looks at the clock.
const HISTORIES_PER_LOOK: u64 = 100;

/// Runs seeded histories until one breaks an invariant.
#[derive(Parser)]
#[command(version)]
struct SimArguments {
    /// Number of histories to run.
    #[arg(long, default_value_t = 20_000)]
    histories: u64,
    /// Stop after this many seconds, and report the histories that ran.
    #[arg(long)]
    seconds: Option<u64>,
    /// Seed of the first history.
    #[arg(long, default_value_t = 1)]
    first: u64,
    /// Replay only the history of this seed.
    #[arg(long)]
    seed: Option<u64>,
    /// Number of members [default: the seed chooses among 1, 3 and 5].
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=9))]
    members: Option<u64>,
    /// Virtual milliseconds during which faults occur.
    #[arg(long, default_value_t = 2_000)]
    milliseconds: u64,
    /// Number of threads to use.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Print a JSON document instead of text.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let arguments = SimArguments::parse();
    let options = SimulationOptions {
        members: arguments.members,
        duration: arguments.milliseconds * 1000,
        ..SimulationOptions::default()
    };
    let started = Instant::now();
    let found = match arguments.seed {
        Some(seed) => {
            let outcome = replay(seed, options);
            let total = outcome.result.clone().unwrap_or_default();
            let failure = outcome.result.is_err().then_some(outcome);
            Campaign { histories: 1, total, failure }
        }
        None => run_histories(&arguments, options, started),
    };
    print_report(&found, started, arguments.json);
    if found.failure.is_some() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Runs the histories until all are done, one has failed, or the time is over.
fn run_histories(
    arguments: &SimArguments,
    options: SimulationOptions,
    started: Instant,
) -> Campaign {
    let mut all = Campaign::default();
    let is_over =
        || arguments.seconds.is_some_and(|seconds| started.elapsed().as_secs() >= seconds);
    while all.histories < arguments.histories && all.failure.is_none() && !is_over() {
        let (before, left) = (all.histories, arguments.histories - all.histories);
        let count = arguments.seconds.map_or(left, |_| left.min(HISTORIES_PER_LOOK));
        let progress = |done: u64| {
            let done = before + done;
            if done.is_multiple_of(500) {
                let rate = done as f64 / started.elapsed().as_secs_f64();
                eprintln!("{done} histories, {rate:.0}/s");
            }
        };
        let first = arguments.first + before;
        all = all.merge(campaign(first, count, arguments.threads, options, progress));
    }
    all
}

fn print_report(found: &Campaign, started: Instant, as_json: bool) {
    let seconds = started.elapsed().as_secs_f64();
    let rate = found.histories as f64 / seconds;
    let total = found.total;
    let failure = found.failure.as_ref().map(|outcome| {
        let what = outcome.result.as_ref().err().map(ToString::to_string).unwrap_or_default();
        (outcome.seed, what)
    });
    if as_json {
        let failure = failure.map(|(seed, what)| json!({ "seed": seed, "violation": what }));
        let document = json!({
            "histories": found.histories,
            "seconds": seconds,
            "histories_per_second": rate,
            "steps": total.steps,
            "committed": total.committed,
            "elections": total.elections,
            "writes": total.writes,
            "refused": total.refused,
            "reads": total.reads,
            "crashes": total.crashes,
            "disk_failures": total.disk_failures,
            "amnesia": total.amnesia,
            "membership_changes": total.membership_changes,
            "snapshots": total.snapshots,
            "interrupted_installs": total.interrupted_installs,
            "torn": total.torn,
            "conflicts": total.conflicts,
            "compactions": total.compactions,
            "notices": total.notices,
            "trace": format!("{:016x}", total.trace),
            "failure": failure,
        });
        println!("{document:#}");
        return;
    }
    println!("{} histories in {seconds:.1} s ({rate:.0}/s): {total:?}", found.histories);
    if let Some((seed, what)) = failure {
        println!("seed {seed}: {what}\nreplay: make sim SEED={seed}");
    }
}
