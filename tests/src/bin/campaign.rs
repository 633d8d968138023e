//! `make campaign`: runs all searches for faults in turns, and writes a report.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command line: the result goes to stdout, progress to stderr"
)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, Subcommand, value_parser};
use muster_tests::campaign::child::ChildRunner;
use muster_tests::campaign::guard::run_guarded;
use muster_tests::campaign::plan::{SearchKind, parse_time};
use muster_tests::campaign::process_tree::has_children;
use muster_tests::campaign::programs::CampaignPrograms;
use muster_tests::campaign::report::CampaignReport;
use muster_tests::campaign::run::{CampaignOptions, run};
use muster_tests::campaign::searches::{MAX_FIRST_SEED, SEEDS_PER_RUN};
use rustix::process::{getpid, set_child_subreaper};
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};

/// Programs that a campaign runs, in release builds.
const PROGRAMS: [&str; 4] = ["sim", "explore", "fuzz-etcd", "mutants"];

/// Looks for faults with all searches in turns, puts known bugs back, and writes a report.
#[derive(Parser)]
#[command(
    version,
    disable_help_subcommand = true,
    after_help = "Exit code 0: nothing was found, and each bug put back was found. 1: something \
                  was found, a bug put back was not, a search did no work though this machine can \
                  run it, or the campaign was interrupted. 2: wrong usage, or the campaign could \
                  not begin."
)]
struct CampaignArguments {
    /// Time of the campaign, without builds: 4h, 90m, 45s, 1h30m. If it is at least 30 minutes, a
    /// third of it goes to bugs put back, known bugs that the tests must find.
    #[arg(long, default_value = "4h", value_parser = parse_time)]
    time: Duration,
    /// File for the report.
    #[arg(long, default_value = "target/campaign/REPORT.md")]
    report: PathBuf,
    /// Print the report as JSON, too.
    #[arg(long)]
    json: bool,
    /// First seed [default: taken from the clock, so that each campaign has seeds of its own].
    #[arg(long, value_parser = value_parser!(u64).range(..=MAX_FIRST_SEED))]
    seed: Option<u64>,
    /// Run only these searches.
    #[arg(long, value_delimiter = ',')]
    search: Vec<SearchKind>,
    /// Leave out the bugs put back, known bugs that the tests must find.
    #[arg(long)]
    without_bugs: bool,
    /// Folder of built fuzz targets [default: none, which skips the decoders].
    #[arg(long)]
    fuzz: Option<PathBuf>,
    #[command(subcommand)]
    internal: Option<InternalCommand>,
}

/// Hidden commands with which the campaign starts its programs.
#[derive(Subcommand)]
enum InternalCommand {
    /// Run a program, and end it when the process CAMPAIGN has ended.
    #[command(hide = true)]
    Guard {
        campaign: u32,
        program: PathBuf,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

fn main() -> ExitCode {
    let arguments = CampaignArguments::parse();
    let code = match &arguments.internal {
        Some(InternalCommand::Guard { campaign, program, arguments }) => {
            run_guarded(*campaign, program, arguments).map(ExitCode::from)
        }
        None => run_campaign(&arguments)
            .map(|report| if report.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE }),
    };
    match code {
        Ok(code) => code,
        Err(error) => {
            eprintln!("campaign: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run_campaign(arguments: &CampaignArguments) -> Result<CampaignReport> {
    // A campaign ends all its child processes. So none of them may be somebody else's.
    ensure!(!has_children(), "run it without `exec`: the shell's other jobs are its children now");
    let root = std::env::current_dir()?;
    ensure!(root.join("tests/mutants").is_dir(), "run it in the workspace's root");
    let own = std::env::current_exe()?;
    let folder = own.parent().context("this program lies in a folder")?;
    for program in PROGRAMS {
        let path = folder.join(program);
        ensure!(path.exists(), "{} is not built: run `make release`", path.display());
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let chosen = arguments.search.clone();
    let options = CampaignOptions {
        time: arguments.time,
        // A campaign uses fewer than `SEEDS_PER_RUN` seeds in a second, even in the simulation,
        // which uses the most. So a later campaign begins with a seed that no earlier one has used.
        seed: arguments.seed.unwrap_or(now * SEEDS_PER_RUN),
        searches: if chosen.is_empty() { SearchKind::ALL.to_vec() } else { chosen },
        puts_bugs_back: !arguments.without_bugs,
    };
    let logs = root.join("target/campaign/logs");
    if logs.exists() {
        fs_err::remove_dir_all(&logs)?;
    }
    fs_err::create_dir_all(&logs)?;
    if let Some(parent) = arguments.report.parent() {
        fs_err::create_dir_all(parent)?;
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let interrupted = note_signals(&runtime)?;
    // Orphans (processes whose parents were killed) become children of this process, which then
    // ends them.
    set_child_subreaper(Some(getpid()))?;
    let say = |text: &str| eprintln!("{text}");
    let runner = ChildRunner {
        logs: &logs,
        interrupted: &interrupted,
        adopts_orphans: true,
        guard: Some(&own),
        say: &say,
    };
    let programs = CampaignPrograms::build(&runner, &root, folder, arguments.fuzz.as_deref())?;
    let report = run(&runner, &programs, &options);
    fs_err::write(&arguments.report, report.markdown())?;
    eprintln!("{} See {}.", report.summary(), arguments.report.display());
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    }
    Ok(report)
}

/// Returns a flag that SIGINT and SIGTERM set.
fn note_signals(runtime: &Runtime) -> Result<Arc<AtomicBool>> {
    let interrupted = Arc::new(AtomicBool::new(false));
    let _entered = runtime.enter();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let flag = interrupted.clone();
    runtime.spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        flag.store(true, Ordering::Relaxed);
    });
    Ok(interrupted)
}
