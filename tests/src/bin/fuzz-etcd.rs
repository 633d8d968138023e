//! `make fuzz-etcd`: sends the same random requests to stock etcd and to `muster-node`, and
//! compares answers.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Instant, SystemTime};

use anyhow::{Context, Result};
use clap::Parser;
use muster_tests::fuzz_etcd::{self, FuzzSubject};
use muster_tests::stock_etcd;

/// Number of requests of one run, after which both servers start again with empty data.
const REQUESTS_PER_RUN: u64 = 5_000;
/// Number of requests of one run that changes members. It is small, because the maximum number of
/// members is reached soon.
const CHANGES_PER_RUN: u64 = 100;

/// Sends equal random requests to stock etcd and to muster-node; the first difference ends the run.
#[derive(Debug, Parser)]
#[command(name = "fuzz-etcd")]
struct Args {
    /// Number of requests to send.
    #[arg(long, default_value_t = 20_000)]
    requests: u64,
    /// Seed to replay; all requests are then one run [default: taken from the clock, and the
    /// requests are split into several runs].
    #[arg(long)]
    seed: Option<u64>,
    /// Subject of the requests [default: each subject in turn, one run after another].
    #[arg(long)]
    about: Option<FuzzSubject>,
    /// Change members instead, in clusters that begin with this many members.
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=5))]
    members: Option<u8>,
    /// The muster-node to test [default: the one beside this program].
    #[arg(long)]
    muster: Option<PathBuf>,
    /// The etcd to compare with [default: a stock one, built once with go].
    #[arg(long)]
    etcd: Option<PathBuf>,
}

fn main() -> ExitCode {
    match fuzz(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "fuzz-etcd: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn fuzz(args: &Args) -> Result<()> {
    let own = std::env::current_exe()?;
    let folder = own.parent().context("this program lies in a folder")?;
    let work = folder.parent().context("the folder lies in target")?;
    let muster = args.muster.clone().unwrap_or_else(|| folder.join("muster-node"));
    let mut out = std::io::stdout().lock();
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let say = |text: &str| {
            let _ = writeln!(std::io::stderr(), "{text}");
        };
        let etcd = match &args.etcd {
            Some(path) => path.clone(),
            None => stock_etcd::newest_or_installed(work, &say).await?,
        };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs();
        let mut seed = args.seed.unwrap_or(now);
        let mut left = args.requests;
        let subjects = [FuzzSubject::Keys, FuzzSubject::Users, FuzzSubject::Queues];
        let mut subjects = subjects.into_iter().cycle();
        while left > 0 {
            let most = if args.members.is_some() { CHANGES_PER_RUN } else { REQUESTS_PER_RUN };
            let requests = if args.seed.is_some() { left } else { left.min(most) };
            let dir = tempfile::tempdir()?;
            let start = Instant::now();
            let dir = dir.path();
            let programs = [etcd.as_path(), muster.as_path()];
            let about = args.about.or_else(|| subjects.next()).unwrap_or(FuzzSubject::Keys);
            let (answered, refused, also, allowed) = match args.members {
                Some(members) => {
                    let members = members.into();
                    let it = fuzz_etcd::members::run(programs, dir, seed, members, requests).await?;
                    let also = format!("{} starts and stops", it.moves);
                    (it.requests, it.refused, also, it.allowed)
                }
                None => {
                    let it = fuzz_etcd::run(programs, dir, about, seed, requests).await?;
                    let also = format!("events or answers compared {} times", it.settles);
                    (it.requests, it.refused, also, it.allowed)
                }
            };
            let took = start.elapsed().as_secs_f64();
            writeln!(
                out,
                "{about:?}, seed {seed}: {answered} requests answered alike, {refused} of them refusals; {also} \
                 ({took:.0} s)"
            )?;
            for (why, count) in allowed {
                writeln!(out, "  {count} allowed differences: {why}")?;
            }
            left -= requests;
            seed = seed.wrapping_add(1);
        }
        Ok(())
    })
}
