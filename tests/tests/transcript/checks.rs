//! `etcdctl check` on both programs. The results must be equal except for speed and memory.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::wait_for;
use muster_tests::stock_etcd;
use rustix::process::Signal;

use crate::pair::{ClusterPair, TranscriptCluster};
use crate::running_program::{LIMIT, ProgramOutput, RunningProgram};

/// Number of puts after which the speed check is interrupted. Without that, the check would take a
/// minute.
const PUTS: u64 = 100;
/// Beginnings of the lines with the results of the speed check.
const VERDICTS: [&str; 3] = ["Throughput ", "Slowest request took ", "Stddev "];

#[test]
fn the_checks_of_the_newest_etcdctl_end_without_an_error() -> Result<()> {
    let work = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let Some(etcdctl) = stock_etcd::newest_etcdctl(work) else { return Ok(()) };
    let Some(mut pair) = ClusterPair::start(&etcdctl)? else { return Ok(()) };
    for printed in pair.on_both(run_speed_check)? {
        let verdicts = VERDICTS.iter().all(|verdict| printed.out.contains(verdict));
        ensure!(verdicts && !printed.out.contains("ERROR"), "{printed:?}");
    }
    let [theirs, ours] = pair.on_both(|cluster| run(cluster, "check datascale --load=s"))?;
    for printed in [&theirs, &ours] {
        let passed = printed.out.contains("PASS: Approximate system memory used : ");
        ensure!(passed && printed.code == Some(0), "{printed:?}");
    }
    ensure!(theirs.out.lines().next() == ours.out.lines().next(), "{theirs:?} {ours:?}");
    for left in pair.on_both(|cluster| count_keys(cluster))? {
        ensure!(left == 0, "{left} keys are left");
    }
    Ok(())
}

fn run_speed_check(cluster: &mut TranscriptCluster) -> Result<ProgramOutput> {
    let check = started(cluster, "check perf --load=s --auto-compact --auto-defrag")?;
    let enough = || count_keys(cluster).ok().filter(|&count| count >= PUTS);
    wait_for("keys of the check", LIMIT, enough)?;
    check.signal(Signal::INT);
    check.end()
}

/// Returns the number of keys that checks have written.
fn count_keys(cluster: &TranscriptCluster) -> Result<u64> {
    let printed = run(cluster, "get /etcdctl-check --prefix --count-only -w fields")?.out;
    let count = printed.lines().find_map(|line| line.strip_prefix("\"Count\" : "));
    count.and_then(|count| count.parse().ok()).with_context(|| format!("no count in {printed}"))
}

fn run(cluster: &TranscriptCluster, command: &str) -> Result<ProgramOutput> {
    started(cluster, command)?.end()
}

fn started(cluster: &TranscriptCluster, command: &str) -> Result<RunningProgram> {
    let words: Vec<String> = command.split(' ').map(str::to_owned).collect();
    RunningProgram::start(cluster.command(&words))
}
