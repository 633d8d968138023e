//! `make explore`: explores the interleavings of the bootstrap protocol within bounds.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command line: the report goes to stdout, progress to stderr"
)]

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use formation_explored::{Rule, Rules};
use muster_tests::explore::{
    Environment, ExplorationConfig, ExplorationReport, FaultCounts, MAX_HOSTS, RestoreMethod,
    SearchLimits, SearchProgress, SystemState, WalkReport, explore, ladder, walk_at_random,
};
use serde_json::{Value, json};

/// If the exploration is cut short, random walks get at most the total time divided by this number.
const WALK_TIME_DIVISOR: u32 = 12;
/// The configurations of the ladder (see [`ExploreArguments::full`]) together get at most the total
/// time divided by this number.
const LADDER_TIME_DIVISOR: u32 = 2;

/// Explores the production code of the bootstrap protocol: the service's and the agents' state
/// machines.
#[derive(Parser)]
#[command(version)]
struct ExploreArguments {
    /// Explore the full bounds: 3 seats, 5 hosts, 3 epochs, every fault once, pauses anywhere.
    /// Before them explore the ladder: configurations with a part of the faults, each to be
    /// exhausted.
    #[arg(long)]
    full: bool,
    /// Explore only the ladder, which --full describes.
    #[arg(long)]
    ladder: bool,
    /// Number of seats of the cluster.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=3))]
    seats: u8,
    /// Number of hosts that compete for the seats.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=6))]
    hosts: u8,
    /// Highest epoch whose states are followed.
    #[arg(long, default_value_t = 2)]
    epochs: u64,
    /// Number of restores of the database.
    #[arg(long, default_value_t = 0)]
    restores: u8,
    /// Number of node directories that are lost.
    #[arg(long, default_value_t = 0)]
    lost_directories: u8,
    /// Number of hosts that are re-imaged.
    #[arg(long, default_value_t = 0)]
    remakes: u8,
    /// Number of hosts that die.
    #[arg(long, default_value_t = 0)]
    deaths: u8,
    /// Number of agents that are killed and started again.
    #[arg(long, default_value_t = 0)]
    kills: u8,
    /// Number of leases that lapse though their agents live; 255 for no bound.
    #[arg(long, default_value_t = 1)]
    pauses: u8,
    /// Number of frozen lists that time out; 255 for no bound.
    #[arg(long, default_value_t = 1)]
    timeouts: u8,
    /// Number of times that an operator abandons the cluster or its deadline passes.
    #[arg(long, default_value_t = 0)]
    ends: u8,
    /// Number of changed databases that an owner accepts.
    #[arg(long, default_value_t = 0)]
    accepts: u8,
    /// Number of ledgers that are put back to an older copy.
    #[arg(long, default_value_t = 0)]
    ledgers: u8,
    /// Number of processes that are lost for good, with their ledgers.
    #[arg(long, default_value_t = 0)]
    losses: u8,
    /// Number of processes that an owner says won't come back.
    #[arg(long, default_value_t = 0)]
    forgets: u8,
    /// Also let a restore replace the database's rows while the service's processes run.
    #[arg(long)]
    in_place: bool,
    /// Number of links between two hosts that go down.
    #[arg(long, default_value_t = 0)]
    links: u8,
    /// Number of times that the service's clock is half an hour ahead, and right again.
    #[arg(long, default_value_t = 0)]
    clocks: u8,
    /// Explore without ledgers and check property 3 alone: two lists that share a host never both
    /// get a majority.
    #[arg(long)]
    without_ledger: bool,
    /// Rules to leave out, by their names, to see what they are for.
    #[arg(long, value_parser = rule)]
    without: Vec<Rule>,
    /// Number of faults of all kinds together; 255 for no bound beyond those of each kind.
    #[arg(long, default_value_t = 255)]
    together: u8,
    /// Switch off the reductions that treat states or steps as equal, to compare.
    #[arg(long)]
    unreduced: bool,
    /// Play a fault-free run from one state in this many; 0 for none.
    #[arg(long, default_value_t = 256)]
    roads: u64,
    /// Stop after this many minutes. If the exploration was cut short, the last twelfth of them is
    /// for random walks.
    #[arg(long, default_value_t = 120)]
    minutes: u64,
    /// Only walk at random, for this many seconds, with all faults of the full bounds.
    #[arg(long)]
    walk_seconds: Option<u64>,
    /// Stop at this much resident memory, in MiB.
    #[arg(long, default_value_t = 8192)]
    memory: u64,
    /// Maximum number of states of one depth; beyond it the search goes depth first.
    #[arg(long, default_value_t = 200_000)]
    frontier: usize,
    /// Number of threads to use.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// The seed of the random walks.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
}

impl ExploreArguments {
    /// Returns the configurations to explore, in order.
    fn configs(&self) -> Vec<ExplorationConfig> {
        let configs = if self.full || self.ladder { ladder() } else { vec![self.config()] };
        let full = self.full.then(|| ExplorationConfig {
            max_total_faults: self.together,
            ..ExplorationConfig::full()
        });
        let reduced = |config| ExplorationConfig { reduced: !self.unreduced, ..config };
        configs.into_iter().chain(full).map(reduced).collect()
    }

    fn config(&self) -> ExplorationConfig {
        let hosts = usize::from(self.hosts).min(MAX_HOSTS);
        ExplorationConfig {
            epochs: self.epochs,
            fault_free_interval: self.roads,
            max_total_faults: self.together,
            has_late_messages: self.remakes > 0 || self.deaths > 0,
            faults: FaultCounts {
                restores: self.restores,
                lost_directories: self.lost_directories,
                reimages: self.remakes,
                deaths: self.deaths,
                kills: self.kills,
                pauses: self.pauses,
                timeouts: self.timeouts,
                cluster_ends: self.ends,
                accepts: self.accepts,
                ledger_rollbacks: self.ledgers,
                losses: self.losses,
                forgets: self.forgets,
                links: self.links,
                clock_jumps: self.clocks,
                ..FaultCounts::default()
            },
            rules: self.without.iter().fold(Rules::ALL, |rules, &rule| rules.without(rule)),
            environment: Environment { ledger: !self.without_ledger, ..Environment::SOUND },
            expects_ledger: !self.without_ledger,
            majorities_only: self.without_ledger,
            restore_methods: if self.in_place {
                &[RestoreMethod::Dump, RestoreMethod::InPlace]
            } else {
                &[RestoreMethod::Dump]
            },
            ..ExplorationConfig::sound("command line", self.seats, hosts)
        }
    }
}

fn rule(name: &str) -> Result<Rule, String> {
    let known = || Rule::EACH.map(|rule| format!("{rule:?}")).join(", ");
    let named = Rule::EACH.into_iter().find(|rule| format!("{rule:?}") == name);
    named.ok_or_else(|| format!("there is no such rule; there are {}", known()))
}

/// A configuration, and the result of its exploration.
struct ExploredConfig {
    config: ExplorationConfig,
    report: ExplorationReport,
}

fn main() -> ExitCode {
    let arguments = ExploreArguments::parse();
    if let Some(seconds) = arguments.walk_seconds {
        return walk_only(&arguments, Duration::from_secs(seconds));
    }
    let began = Instant::now();
    let time = Duration::from_secs(arguments.minutes * 60);
    let walking = time / WALK_TIME_DIVISOR;
    let mut explored: Vec<ExploredConfig> = Vec::new();
    let mut walks = WalkReport::default();
    let configs = arguments.configs();
    for (place, config) in configs.iter().enumerate() {
        let is_last = place + 1 == configs.len();
        let until = if is_last { time - walking } else { time / LADDER_TIME_DIVISOR };
        let limits = SearchLimits {
            time: until.saturating_sub(began.elapsed()),
            memory: arguments.memory << 20,
            threads: arguments.threads,
            frontier: arguments.frontier,
            ..SearchLimits::default()
        };
        eprintln!("exploring {}", described(config));
        let report = explore(config, SystemState::new(config), &limits, show_progress);
        let one = ExploredConfig { config: config.clone(), report };
        if !arguments.json {
            print_explored(&one);
        }
        let found = one.report.found.is_some();
        explored.push(one);
        if found {
            break;
        }
    }
    let violated = explored.iter().any(|one| one.report.found.is_some());
    let last = explored.last().filter(|one| one.report.cut_short.is_some() && !violated);
    if let Some(last) = last {
        eprintln!("not exhausted: walking at random");
        let left = time.saturating_sub(began.elapsed()).min(walking);
        walks = walk_at_random(&last.config, arguments.seed, left, arguments.threads);
    }
    if arguments.json {
        print_json(&explored, &walks);
    } else {
        print_closing(&explored, &walks);
    }
    if violated || walks.found.is_some() { ExitCode::from(1) } else { ExitCode::SUCCESS }
}

/// Walks at random without an exploration before it.
fn walk_only(arguments: &ExploreArguments, time: Duration) -> ExitCode {
    let config = ExplorationConfig::full();
    let walks = walk_at_random(&config, arguments.seed, time, arguments.threads);
    if arguments.json {
        print_json(&[], &walks);
    } else {
        print_closing(&[], &walks);
    }
    if walks.found.is_some() { ExitCode::from(1) } else { ExitCode::SUCCESS }
}

fn show_progress(progress: SearchProgress) {
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

/// Describes the bounds and faults of a configuration for the report.
fn described(config: &ExplorationConfig) -> String {
    let faults = &config.faults;
    let kinds = [
        ("restores", faults.restores),
        ("lost directories", faults.lost_directories),
        ("re-imaged hosts", faults.reimages),
        ("deaths", faults.deaths),
        ("kills", faults.kills),
        ("pauses", faults.pauses),
        ("time-outs", faults.timeouts),
        ("ends", faults.cluster_ends),
        ("accepts", faults.accepts),
        ("ledgers put back", faults.ledger_rollbacks),
        ("processes lost", faults.losses),
        ("processes forgotten", faults.forgets),
        ("links down", faults.links),
        ("clocks ahead", faults.clock_jumps),
    ];
    let number = |count: u8| if count == u8::MAX { "any".to_owned() } else { count.to_string() };
    let some = kinds.iter().filter(|(_, count)| *count > 0);
    let faults: Vec<String> =
        some.map(|(kind, count)| format!("{kind}: {}", number(*count))).collect();
    let together = match config.max_total_faults {
        u8::MAX => String::new(),
        together => format!("; {together} of them together"),
    };
    format!(
        "{}: {} seats, {} hosts, {} epochs, 2 processes ({}{together})",
        config.name,
        config.seats,
        config.hosts,
        config.epochs,
        faults.join(", ")
    )
}

fn print_explored(one: &ExploredConfig) {
    let report = &one.report;
    let seconds = report.time.as_secs_f64();
    println!("{}", described(&one.config));
    println!(
        "    {} states, {} steps, depth {}, {} fault-free runs, {} beyond the epochs, {:.0} s ({:.0} \
         states/s), {} MiB",
        report.states,
        report.steps,
        report.longest,
        report.fault_free_runs,
        report.states_beyond_bound,
        seconds,
        report.states as f64 / seconds.max(0.001),
        report.memory >> 20
    );
    match (&report.found, report.cut_short) {
        (Some(found), _) => println!("    VIOLATED {}", found.violation),
        (None, None) => println!("    exhausted: all properties hold in all of it"),
        (None, Some(why)) => println!(
            "    NOT exhausted: {why} ran out; everything within {} steps was seen, and a part of \
             what is beyond; all properties hold in what was seen",
            report.depth
        ),
    }
}

fn print_closing(explored: &[ExploredConfig], walks: &WalkReport) {
    let complete = |one: &&ExploredConfig| one.report.is_complete();
    println!();
    println!("exhausted:");
    for one in explored.iter().filter(complete) {
        println!("    {}: {} states", described(&one.config), one.report.states);
    }
    println!("not exhausted:");
    for one in explored.iter().filter(|one| !one.report.is_complete()) {
        println!(
            "    {}: {} states, all within {} steps, paths up to {}",
            described(&one.config),
            one.report.states,
            one.report.depth,
            one.report.longest
        );
    }
    if walks.walks > 0 {
        println!(
            "random walks beyond that: {} with {} steps ({:.0} each); committed in {}, nodes \
             started in {}, restored after a commit in {}, beyond the first epoch in {}",
            walks.walks,
            walks.steps,
            walks.steps as f64 / walks.walks as f64,
            walks.committed,
            walks.started,
            walks.restored,
            walks.second_epoch
        );
    }
    let found = explored.iter().find_map(|one| one.report.found.as_ref()).or(walks.found.as_ref());
    match found {
        None => println!("all properties hold in everything that was seen"),
        Some(found) => {
            println!("{}", found.transcript.join("\n"));
            println!("VIOLATED {}", found.violation);
        }
    }
}

fn print_json(explored: &[ExploredConfig], walks: &WalkReport) {
    let found = |found: &Option<muster_tests::explore::Counterexample>| {
        found.as_ref().map(|found| {
            json!({"violation": found.violation.to_string(), "transcript": found.transcript})
        })
    };
    let one = |one: &ExploredConfig| {
        let (config, report) = (&one.config, &one.report);
        json!({
            "name": config.name,
            "bounds": described(config),
            "seats": config.seats,
            "hosts": config.hosts,
            "epochs": config.epochs,
            "reduced": config.reduced,
            "states": report.states,
            "steps": report.steps,
            "beyond": report.states_beyond_bound,
            "roads": report.fault_free_runs,
            "all_within_steps": report.depth,
            "longest_path": report.longest,
            "seconds": report.time.as_secs_f64(),
            "memory_bytes": report.memory,
            "exhausted": report.is_complete(),
            "cut_short": report.cut_short,
            "found": found(&report.found),
        })
    };
    let explored: Vec<Value> = explored.iter().map(one).collect();
    let value = json!({
        "explored": explored,
        "random": {
            "walks": walks.walks,
            "steps": walks.steps,
            "committed": walks.committed,
            "started": walks.started,
            "restored_after_commit": walks.restored,
            "beyond_first_epoch": walks.second_epoch,
            "found": found(&walks.found),
        },
    });
    println!("{value}");
}
