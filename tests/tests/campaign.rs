//! The command line of `make campaign`, and the end of its processes when it is killed.

use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use muster_tests::harness::process::is_alive;
use muster_tests::harness::{ChildProcess, wait_for, write_script};

const LIMIT: Duration = Duration::from_secs(60);
/// Stand-in for cargo. It starts another process, writes the ids of both, and runs for ten minutes.
const ENDLESS_CARGO: &str = "#!/bin/sh
setsid sleep 600 &
echo $! $$ >started.new
mv started.new started
sleep 600
";

/// Returns the exit code of the program with these arguments, and what it wrote to standard error.
fn run_campaign(arguments: &[&str]) -> Result<(Option<i32>, String)> {
    let folder = tempfile::tempdir()?;
    let done = Command::new(env!("CARGO_BIN_EXE_campaign"))
        .args(arguments)
        .current_dir(folder.path())
        .output()?;
    Ok((done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned()))
}

#[test]
fn wrong_usage_ends_a_campaign_with_exit_code_2() -> Result<()> {
    for (arguments, says) in [
        (&["--time", "4"][..], "has no unit"),
        (&["--search", "everything"][..], "simulation"),
        (&["--seed", "18446744073709551615"][..], "is not in 0.."),
        (&["--time", "4h"][..], "run it in the workspace's root"),
    ] {
        let (code, said) = run_campaign(arguments)?;
        ensure!(code == Some(2) && said.contains(says), "{arguments:?}: {code:?}, {said}");
    }
    Ok(())
}

#[test]
fn all_that_a_campaign_has_started_ends_when_the_campaign_is_killed() -> Result<()> {
    let folder = tempfile::tempdir()?;
    fs_err::create_dir_all(folder.path().join("tests/mutants"))?;
    let cargo = folder.path().join("cargo");
    write_script(&cargo, ENDLESS_CARGO)?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_campaign"));
    command.args(["--time", "1m"]).current_dir(folder.path()).env("CARGO", &cargo);
    let mut campaign = ChildProcess::spawn("campaign", command, &folder.path().join("log"))?;
    let started = folder.path().join("started");
    let started =
        wait_for("the first build to start", LIMIT, || fs_err::read_to_string(&started).ok());
    campaign.kill();
    for process in started?.split_whitespace() {
        let process: u32 = process.parse()?;
        wait_for("a process of the build to end", LIMIT, || (!is_alive(process)).then_some(()))?;
    }
    Ok(())
}
