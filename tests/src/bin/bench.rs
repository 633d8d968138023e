//! `make bench`: compares `muster-node` with stock etcd.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;
use muster_tests::bench::{
    BenchPlan, ReconfigureParameters, ServicesParameters, TransportMode, Work, run,
};

const WORK: [&str; 3] = [Work::NAMES[0].0, Work::NAMES[1].0, Work::NAMES[2].0];
/// Parts of `--mode services`.
const SERVICE_PARTS: [&str; 5] = ["users", "watchers", "watches", "leases", "keys"];

/// Compares three muster-node members with three stock etcd members: same client, same load, in
/// turns.
#[derive(Debug, Parser)]
#[command(name = "bench")]
struct Args {
    /// Requests to measure: puts, serializable and linearizable ranges of one key.
    #[arg(long, value_delimiter = ',', default_values = WORK, value_parser = WORK)]
    work: Vec<String>,
    /// Numbers of clients, each with one request in flight.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 64, 256])]
    clients: Vec<usize>,
    /// Rounds of each load; figures are their medians.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Seconds that one load lasts.
    #[arg(long, default_value_t = 4.0)]
    seconds: f64,
    /// Maximum number of requests in one load.
    #[arg(long, default_value_t = 200_000)]
    requests: u64,
    /// Bytes of each value.
    #[arg(long, default_value_t = 256)]
    value_bytes: usize,
    /// How often the leader is killed, to measure how long no client can write; 0: never.
    #[arg(long, default_value_t = 20)]
    outages: usize,
    /// Measure only "plain", only "mtls", or "reconfigure" (the cost of membership changes), or
    /// "services" (watches, leases, keys and users).
    #[arg(long, value_parser = ["plain", "mtls", "reconfigure", "services"])]
    mode: Option<String>,
    /// How often each membership change is made, with --mode reconfigure; 0: never.
    #[arg(long, default_value_t = 20)]
    changes: usize,
    /// MiB of data in the cluster whose dead member is replaced, with --mode reconfigure; 0: skip
    /// the replacement.
    #[arg(long, default_value_t = 1024)]
    data_mib: u64,
    /// Services to measure with --mode services.
    #[arg(long, value_delimiter = ',', default_values = SERVICE_PARTS, value_parser = SERVICE_PARTS)]
    about: Vec<String>,
    /// Members of each cluster, with --mode services. A single member has the machine's cores for
    /// itself.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=7))]
    members: u8,
    /// Use a tenth of the watches, leases and keys, with --mode services.
    #[arg(long)]
    small: bool,
    /// Measure this program only.
    #[arg(long, value_parser = ["muster-node", "etcd"])]
    only: Option<String>,
    /// The muster-node to measure [default: the one beside this program].
    #[arg(long)]
    muster: Option<PathBuf>,
    /// The etcd to compare with [default: a stock one, built once with go].
    #[arg(long)]
    etcd: Option<PathBuf>,
    /// Spread the clients over all members instead of putting all at the leader.
    #[arg(long)]
    spread: bool,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    match bench(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn bench(args: &Args) -> Result<()> {
    let own = std::env::current_exe()?;
    let folder = own.parent().context("this program lies in a folder")?;
    let work = folder.parent().context("the folder lies in target")?;
    let plan = BenchPlan {
        muster: args.muster.clone().unwrap_or_else(|| folder.join("muster-node")),
        etcd: args.etcd.clone(),
        work: work.to_owned(),
        only: args.only.clone(),
        clients: args.clients.clone(),
        rounds: args.rounds.max(1),
        time: Duration::from_secs_f64(args.seconds),
        max_requests: args.requests,
        requests: Work::NAMES
            .into_iter()
            .filter(|(name, _)| args.work.iter().any(|wanted| wanted == name))
            .map(|(_, work)| work)
            .collect(),
        value_bytes: args.value_bytes,
        modes: match args.mode.as_deref() {
            Some("plain") => vec![TransportMode::Plain],
            Some(_) => vec![TransportMode::MutualTls],
            None => vec![TransportMode::Plain, TransportMode::MutualTls],
        },
        outages: args.outages,
        spread: args.spread,
        reconfigure: (args.mode.as_deref() == Some("reconfigure")).then(|| ReconfigureParameters {
            changes: args.changes,
            data_mib: args.data_mib,
            agent: folder.join("muster-agent"),
        }),
        services: (args.mode.as_deref() == Some("services")).then(|| {
            let share = if args.small { 10 } else { 1 };
            let about = |what: &str, count: usize| {
                if args.about.iter().any(|wanted| wanted == what) { count } else { 0 }
            };
            ServicesParameters {
                members: args.members.into(),
                auth_rounds: about("users", args.rounds),
                watchers: about("watchers", 10_000 / share),
                events: 50,
                watches: about("watches", 100_000 / share),
                leases: about("leases", 100_000 / share),
                keys: about("keys", 1_000_000 / share),
            }
        }),
    };
    let say = |text: &str| {
        let _ = writeln!(std::io::stderr(), "{text}");
    };
    let runtime = tokio::runtime::Runtime::new()?;
    let report = runtime.block_on(async {
        tokio::select! {
            report = run(&plan, &say) => report,
            _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
        }
    })?;
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &report)?;
        writeln!(out)?;
    } else {
        write!(out, "{}", report.table())?;
    }
    Ok(())
}
