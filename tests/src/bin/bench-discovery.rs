//! `make bench-discovery`: measures what requests cost the discovery service and its Postgres.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Parser;
use muster_tests::bench_discovery::{BenchDiscoveryPlan, run};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Measures the discovery service: CPU time for each kind of request, with few and with many
/// clusters.
#[derive(Debug, Parser)]
#[command(name = "bench-discovery")]
struct BenchDiscoveryArgs {
    /// Numbers of clusters in the database, in ascending order.
    #[arg(long, value_delimiter = ',', default_values_t = [1_000, 100_000, 1_000_000])]
    clusters: Vec<u64>,
    /// Number of registrations to measure, each with a new connection.
    #[arg(long, default_value_t = 2_000)]
    registrations: usize,
    /// Number of clusters of three members to form.
    #[arg(long, default_value_t = 200)]
    formations: usize,
    /// Number of agents' polls that wait for an answer at a time; 0: none.
    #[arg(long, default_value_t = 4_000)]
    parked: usize,
    /// Number of operations that run at a time.
    #[arg(long, default_value_t = 32)]
    concurrency: usize,
    /// Seconds for which each of seven attacks lasts; 0: none.
    #[arg(long, default_value_t = 10)]
    attack_seconds: u64,
    /// The muster-discovery to measure [default: the one beside this program].
    #[arg(long)]
    program: Option<PathBuf>,
    /// Directory for the data, on a real disk.
    #[arg(long, default_value = "/var/tmp")]
    work: PathBuf,
}

fn main() -> ExitCode {
    match bench() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "bench-discovery: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn bench() -> Result<()> {
    let args = BenchDiscoveryArgs::parse();
    let beside = std::env::current_exe()?.with_file_name("muster-discovery");
    let plan = BenchDiscoveryPlan {
        program: args.program.unwrap_or(beside),
        work: args.work,
        clusters: args.clusters,
        registrations: args.registrations,
        formations: args.formations,
        parked: args.parked,
        concurrency: args.concurrency,
        attack_time: Duration::from_secs(args.attack_seconds),
    };
    // Each connection needs a file descriptor in this process and one in the service, which
    // inherits the limit.
    let most = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most })
        .context("raising the limit of open files")?;
    let runtime = tokio::runtime::Runtime::new()?;
    let print = |what: &str| drop(writeln!(std::io::stderr(), "{what}"));
    let report = runtime.block_on(run(&plan, print))?;
    writeln!(std::io::stdout(), "{report}")?;
    Ok(())
}
