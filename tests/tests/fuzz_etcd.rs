//! A short run that sends the same random requests to stock etcd and to `muster-node`. `make
//! fuzz-etcd` is the long run.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Result;
use muster_tests::fuzz_etcd::{self, FuzzSubject};
use muster_tests::harness::process::is_alive;
use muster_tests::harness::programs::program_path;
use muster_tests::harness::{skip, wait_for};
use muster_tests::stock_etcd;

const SEED: u64 = 1;
const REQUESTS: u64 = 1_000;
const USER_REQUESTS: u64 = 400;
const QUEUE_REQUESTS: u64 = 150;
const CHANGES: u64 = 100;

/// Returns the path of a stock etcd. If there is none, reports that the test is skipped.
async fn etcd() -> Option<PathBuf> {
    // Other tests with a stock etcd use this folder, too. So etcd is built only once.
    let work = Path::new(env!("CARGO_TARGET_TMPDIR"));
    match stock_etcd::build_newest(work, &|_| {}).await {
        Ok(etcd) => Some(etcd),
        Err(error) => {
            skip::report_skip(format_args!("no stock etcd could be built: {error:#}"));
            None
        }
    }
}

async fn check_answers_alike(about: FuzzSubject, requests: u64) -> Result<()> {
    let Some(etcd) = etcd().await else { return Ok(()) };
    let node = program_path("muster-node")?;
    let dir = tempfile::tempdir()?;
    let programs = [etcd.as_path(), node.as_path()];
    let report = fuzz_etcd::run(programs, dir.path(), about, SEED, requests).await?;
    // Each request was answered alike, or its answers have an allowed difference. `allowed` also
    // counts differences in the outcomes of waits, so the sum may exceed the number of requests.
    let listed: u64 = report.allowed.values().sum();
    assert!(report.requests + listed >= requests, "{report:?}");
    assert!((1..requests).contains(&report.refused), "{report:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn muster_node_answers_as_stock_etcd_does() -> Result<()> {
    check_answers_alike(FuzzSubject::Keys, REQUESTS).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn users_have_the_permissions_that_stock_etcd_gives() -> Result<()> {
    check_answers_alike(FuzzSubject::Users, USER_REQUESTS).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_and_elections_work_as_in_stock_etcd() -> Result<()> {
    check_answers_alike(FuzzSubject::Queues, QUEUE_REQUESTS).await
}

/// The cluster has one member, so that no answer depends on timing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_change_as_in_stock_etcd() -> Result<()> {
    let Some(etcd) = etcd().await else { return Ok(()) };
    let node = program_path("muster-node")?;
    let dir = tempfile::tempdir()?;
    let programs = [etcd.as_path(), node.as_path()];
    let report = fuzz_etcd::members::run(programs, dir.path(), SEED, 1, CHANGES).await?;
    assert_eq!(report.requests, CHANGES);
    assert!((1..CHANGES).contains(&report.refused), "{report:?}");
    Ok(())
}

/// Returns the processes that `parent` has started.
fn children(parent: u32) -> Vec<u32> {
    let is_child = |pid: &u32| {
        let stat = fs_err::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let after_name = stat.rsplit(')').next().unwrap_or_default();
        after_name.split_whitespace().nth(1) == Some(&parent.to_string())
    };
    let all = fs_err::read_dir("/proc").into_iter().flatten().flatten();
    all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_child).collect()
}

#[test]
fn a_killed_fuzzer_leaves_no_server_behind() -> Result<()> {
    let node = program_path("muster-node")?;
    let dir = tempfile::tempdir()?;
    // The programs don't matter here, so both are `muster-node`.
    let mut fuzz = Command::new(env!("CARGO_BIN_EXE_fuzz-etcd"))
        .env("TMPDIR", dir.path())
        .arg("--etcd")
        .arg(&node)
        .arg("--muster")
        .arg(&node)
        .args(["--requests", "1000000", "--seed", "1"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    // The fuzzer has four children: two servers, and one watchdog process for each server.
    let limit = Duration::from_secs(60);
    let started = wait_for("the servers to run", limit, || {
        Some(children(fuzz.id())).filter(|all| all.len() == 4)
    });
    fuzz.kill()?;
    fuzz.wait()?;
    let started = started?;
    wait_for("the fuzzer's children to end", Duration::from_secs(60), || {
        started.iter().all(|pid| !is_alive(*pid)).then_some(())
    })
}
