//! Tests of the built agent with bundles that come through a pipe.

#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

const USAGE: i32 = 2;
const PATIENCE: Duration = Duration::from_secs(60);

fn pipe(dir: &Path) -> PathBuf {
    let path = dir.join("pipe");
    assert!(Command::new("mkfifo").args(["-m", "600"]).arg(&path).status().unwrap().success());
    path
}

fn run(dir: &Path, bundle: &Path) -> Child {
    run_with(dir, bundle, &[])
}

fn run_with(dir: &Path, bundle: &Path, more: &[&str]) -> Child {
    let mut agent = Command::new(env!("CARGO_BIN_EXE_muster-agent"));
    agent.args(["run", "--node-binary", "/bin/true", "--data-dir"]).arg(dir.join("data"));
    agent.arg("--bundle-file").arg(bundle).args(more).stdin(Stdio::null()).stderr(Stdio::piped());
    agent.spawn().unwrap()
}

/// Returns whether the agent handles SIGTERM: bit 14 of the kernel's mask of caught signals.
fn has_sigterm_handler(agent: &Child) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/status", agent.id())).unwrap();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
    u64::from_str_radix(caught.trim(), 16).unwrap() & (1 << 14) != 0
}

#[test]
fn an_agent_that_waits_for_its_bundle_can_be_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let mut agent = run(dir.path(), &pipe(dir.path()));
    let start = Instant::now();
    while !has_sigterm_handler(&agent) {
        assert!(agent.try_wait().unwrap().is_none(), "it ended");
        assert!(start.elapsed() < PATIENCE, "the agent installs no handler of SIGTERM");
        std::thread::sleep(Duration::from_millis(20));
    }
    kill_process(Pid::from_child(&agent), Signal::TERM).unwrap();
    let start = Instant::now();
    let ended = loop {
        if let Some(status) = agent.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > PATIENCE {
            agent.kill().unwrap();
            panic!("SIGTERM doesn't end it");
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(ended.code(), Some(0));
}

#[test]
fn a_bundle_may_come_through_a_pipe() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = pipe(dir.path());
    let agent = run(dir.path(), &pipe);
    std::fs::write(&pipe, "no bundle").unwrap();
    let output = agent.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(USAGE), "{said}");
    assert!(said.contains("the join bundle in"), "{said}");
}

/// Returns the lines that the agent has logged up to one that contains `text`.
fn wait_for_line(agent: &mut Child, text: &str) -> String {
    let mut said = String::new();
    for line in BufReader::new(agent.stderr.as_mut().unwrap()).lines() {
        said.push_str(&line.unwrap());
        if said.contains(text) {
            return said;
        }
        said.push('\n');
    }
    panic!("the agent ended without {text}: {said}");
}

#[test]
fn an_agent_that_waits_for_a_ticket_waits_for_its_file_too() {
    let dir = tempfile::tempdir().unwrap();
    for content in [None, Some(""), Some("muster1 urls=https://a:1")] {
        let bundle = dir.path().join("ticket");
        if let Some(content) = content {
            std::fs::write(&bundle, content).unwrap();
        }
        let mut agent = run_with(dir.path(), &bundle, &["--wait-for-ticket"]);
        let said = wait_for_line(&mut agent, "waits for a join ticket");
        assert!(said.contains("the join bundle in"), "{said}");
        kill_process(Pid::from_child(&agent), Signal::TERM).unwrap();
        assert_eq!(agent.wait().unwrap().code(), Some(0), "{content:?}");
    }
    let missing = dir.path().join("missing");
    let output = run(dir.path(), &missing).wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(USAGE), "without the flag there is nothing to wait for");
}

#[test]
fn a_bundle_that_is_too_long_is_refused_and_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("long");
    std::fs::write(&bundle, "x".repeat(20_000)).unwrap();
    let output = run_with(dir.path(), &bundle, &["--wait-for-ticket"]).wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(USAGE), "{said}");
    assert!(said.contains("longer than 16384 bytes"), "{said}");
}
