//! `make explore`: the bootstrap protocol, every interleaving within bounds.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command line: the report goes to stdout, progress to stderr"
)]

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use muster_tests::explore::{
    Config, Faults, HOSTS, Limits, Progress, Report, Walks, World, explore, walk_at_random,
};
use serde_json::json;

/// Explores the production code of both state machines.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The full bounds: 3 seats, 5 hosts, 3 epochs, every fault once, pauses anywhere.
    #[arg(long)]
    full: bool,
    /// Seats of the cluster.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=3))]
    seats: u8,
    /// Hosts.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=6))]
    hosts: u8,
    /// States beyond this epoch are not followed.
    #[arg(long, default_value_t = 2)]
    epochs: u64,
    /// Restores of the database.
    #[arg(long, default_value_t = 0)]
    restores: u8,
    /// Node directories lost.
    #[arg(long, default_value_t = 0)]
    lost_directories: u8,
    /// Hosts made anew.
    #[arg(long, default_value_t = 0)]
    remakes: u8,
    /// Hosts that die.
    #[arg(long, default_value_t = 0)]
    deaths: u8,
    /// Agents killed and started again.
    #[arg(long, default_value_t = 0)]
    kills: u8,
    /// Leases that lapse though their agents live; 255 for no bound.
    #[arg(long, default_value_t = 1)]
    pauses: u8,
    /// Frozen lists that time out; 255 for no bound.
    #[arg(long, default_value_t = 1)]
    timeouts: u8,
    /// Walk the fault-free road from one in this many states; 0 for none.
    #[arg(long, default_value_t = 256)]
    roads: u64,
    /// Stop after this many minutes, and walk at random for a tenth of them.
    #[arg(long, default_value_t = 120)]
    minutes: u64,
    /// Stop at this much resident memory, in MiB.
    #[arg(long, default_value_t = 8192)]
    memory: u64,
    /// Threads.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// The seed of the random walks.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The report as JSON.
    #[arg(long)]
    json: bool,
}

impl Arguments {
    fn config(&self) -> Config {
        if self.full {
            return Config::full();
        }
        let hosts = usize::from(self.hosts).min(HOSTS);
        Config {
            epochs: self.epochs,
            roads: self.roads,
            late: self.remakes > 0 || self.deaths > 0,
            faults: Faults {
                restores: self.restores,
                lost_directories: self.lost_directories,
                remakes: self.remakes,
                deaths: self.deaths,
                kills: self.kills,
                pauses: self.pauses,
                timeouts: self.timeouts,
                ..Faults::default()
            },
            ..Config::sound("command line", self.seats, hosts)
        }
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let config = arguments.config();
    let limits = Limits {
        time: Duration::from_secs(arguments.minutes * 60),
        memory: arguments.memory << 20,
        threads: arguments.threads,
        ..Limits::default()
    };
    eprintln!(
        "exploring: {} seats, {} hosts, {} epochs, 2 processes; {:?}",
        config.seats, config.hosts, config.epochs, config.faults
    );
    let mut report = explore(&config, World::new(&config), &limits, show_progress);
    let mut walks = Walks::default();
    if report.cut_short.is_some() {
        eprintln!(
            "the bounds were not exhausted ({:?}): walking the rest at random",
            report.cut_short
        );
        walks = walk_at_random(&config, arguments.seed, limits.time / 10);
        report.found = walks.found.take();
    }
    if arguments.json {
        print_json(&config, &report, &walks);
    } else {
        print_report(&config, &report, &walks);
    }
    if report.found.is_some() { ExitCode::from(1) } else { ExitCode::SUCCESS }
}

fn show_progress(progress: Progress) {
    let seconds = progress.time.as_secs_f64().max(0.001);
    eprintln!(
        "depth {:3}  states {:11}  frontier {:9}  {:8.0}/s  {:5} MiB  {:5.0} s",
        progress.depth,
        progress.states,
        progress.frontier,
        progress.states as f64 / seconds,
        progress.memory >> 20,
        seconds
    );
}

fn print_report(config: &Config, report: &Report, walks: &Walks) {
    let seconds = report.time.as_secs_f64();
    println!(
        "{}: {} states, {} steps, depth {}, {} roads, {:.0} s ({:.0} states/s), {} MiB",
        config.name,
        report.states,
        report.steps,
        report.depth,
        report.roads,
        seconds,
        report.states as f64 / seconds.max(0.001),
        report.memory >> 20
    );
    println!("{} states were beyond epoch {} and not followed", report.beyond, config.epochs);
    match report.cut_short {
        None if report.found.is_none() => println!("everything within the bounds was seen"),
        None => {}
        Some(why) => println!(
            "NOT everything within the bounds was seen: {why} ran out at depth {}; then {} random \
             walks, {} steps",
            report.depth, walks.walks, walks.steps
        ),
    }
    match &report.found {
        None => println!("all properties hold in all of it"),
        Some(found) => {
            println!("{}", found.transcript.join("\n"));
            println!("VIOLATED {}", found.violation);
        }
    }
}

fn print_json(config: &Config, report: &Report, walks: &Walks) {
    let found = report.found.as_ref().map(
        |found| json!({"violation": found.violation.to_string(), "transcript": found.transcript}),
    );
    let value = json!({
        "name": config.name,
        "seats": config.seats,
        "hosts": config.hosts,
        "epochs": config.epochs,
        "states": report.states,
        "steps": report.steps,
        "beyond": report.beyond,
        "roads": report.roads,
        "depth": report.depth,
        "seconds": report.time.as_secs_f64(),
        "memory_bytes": report.memory,
        "complete": report.is_complete(),
        "cut_short": report.cut_short,
        "random_walks": walks.walks,
        "random_steps": walks.steps,
        "found": found,
    });
    println!("{value}");
}
