//! `make bench-replacement`: measures how soon a replacement policy makes a cluster whole again.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Parser;
use muster_tests::bench_replacement::{
    MeasuredNode, ReplacementFigures, ReplacementPlan, Successor, run,
};
use muster_tests::stock_etcd;

/// Node programs that can be measured.
const NODES: [&str; 2] = ["muster-node", "etcd"];

/// Measures the time from a virtual machine's death until a replacement policy has made the cluster
/// whole again. The successor is a fresh host or a standby. Needs root, for network namespaces.
#[derive(Debug, Parser)]
#[command(name = "bench-replacement")]
struct BenchReplacementArgs {
    /// Successors to measure: a fresh host that starts at the death, or a standby.
    #[arg(long, value_delimiter = ',', default_values = Successor::NAMES)]
    #[arg(value_parser = Successor::NAMES)]
    successors: Vec<String>,
    /// Node programs to measure.
    #[arg(long, value_delimiter = ',', default_values = NODES, value_parser = NODES)]
    nodes: Vec<String>,
    /// Number of runs with each program and successor, in turns.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// The policy's time until a member counts as dead.
    #[arg(long, default_value = "30s")]
    after: String,
    /// Seconds after a death within which the cluster has to be whole.
    #[arg(long, default_value_t = 600)]
    limit: u64,
    /// The etcd to measure [default: a stock one, built once with go].
    #[arg(long)]
    etcd: Option<PathBuf>,
}

fn main() -> ExitCode {
    match bench() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "bench-replacement: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn bench() -> Result<()> {
    let args = BenchReplacementArgs::parse();
    let say = |text: &str| drop(writeln!(std::io::stderr(), "{text}"));
    let mut nodes = Vec::new();
    for name in &args.nodes {
        let path = match name.as_str() {
            "etcd" => Some(match &args.etcd {
                Some(path) => path.clone(),
                None => build_etcd(&say)?,
            }),
            _ => None,
        };
        nodes.push(MeasuredNode { name: name.clone(), path });
    }
    let plan = ReplacementPlan {
        nodes,
        successors: args.successors.iter().filter_map(|name| Successor::of_name(name)).collect(),
        runs: args.runs.max(1),
        after: args.after,
        limit: Duration::from_secs(args.limit),
    };
    let figures = run(&plan, say)?;
    writeln!(std::io::stdout(), "{}", ReplacementFigures::table(&figures))?;
    Ok(())
}

/// Returns the path of stock etcd in the target directory, built unless it is there.
fn build_etcd(say: &dyn Fn(&str)) -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let work = own.parent().and_then(std::path::Path::parent).context("a target directory")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(stock_etcd::build_newest(work, say))
}
