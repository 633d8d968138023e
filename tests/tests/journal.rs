//! The agent's journal must be durable before the agent sends anything that depends on it.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::agents::AgentOptions;
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{AgentProcess, Network, Testbed, poll_slowly, skip};

const LIMIT: Duration = Duration::from_secs(60);
const TRACE_FILTER: &str =
    "trace=openat,write,fsync,fdatasync,rename,renameat,renameat2,sendto,writev";

fn strace() -> bool {
    let there = Command::new("strace").arg("--version").output().is_ok();
    if !there {
        skip::report_missing_program("strace");
    }
    there
}

/// Returns the completed system calls in strace's output, in the order of their ends. If another
/// thread's call interrupts a call, its two lines are joined.
fn calls(trace: &str) -> Vec<(u32, String)> {
    let mut begun: BTreeMap<u32, String> = BTreeMap::new();
    let mut calls = Vec::new();
    for line in trace.lines() {
        let Some((pid, call)) = line.split_once(' ') else { continue };
        let Ok(pid) = pid.parse() else { continue };
        let call = call.trim_start();
        if let Some(first) = call.strip_suffix("<unfinished ...>") {
            begun.insert(pid, first.trim_end().to_owned());
        } else if call.starts_with("<... ") {
            let (_, rest) = call.split_once("resumed>").unwrap_or(("", ""));
            calls.push((pid, begun.remove(&pid).unwrap_or_default() + rest));
        } else {
            calls.push((pid, call.to_owned()));
        }
    }
    calls
}

/// Checks every write of the journal. A temporary file is written and synced, then renamed, then
/// the folder is synced. The writing thread must send nothing before that. Returns the number of
/// writes.
fn check_order(trace: &str) -> Result<usize> {
    let calls = calls(trace);
    let ok = |call: &str| !call.contains("= -1 ");
    let made =
        |call: &str| call.starts_with("openat(") && call.contains("/journal.json.unfinished-");
    let mut times = 0;
    for (at, (pid, _)) in calls.iter().enumerate().filter(|(_, (_, call))| made(call)) {
        let own: Vec<&str> = calls[at..]
            .iter()
            .filter(|(other, _)| other == pid)
            .map(|(_, call)| call.as_str())
            .collect();
        let end = own[1..].iter().position(|call| made(call)).map_or(own.len(), |next| next + 1);
        let own = &own[..end];
        let position = |what: &str, is: &dyn Fn(&str) -> bool| {
            own.iter().position(|call| is(call) && ok(call)).with_context(|| {
                format!("the journal was not {what}:\n{}", own[..own.len().min(20)].join("\n"))
            })
        };
        ensure!(own[0].contains("O_EXCL") && ok(own[0]), "{}", own[0]);
        let aside = |call: &str| call.contains("journal.json.unfinished-");
        let written = position("written", &|call| call.starts_with("write(") && aside(call))?;
        let synced = position("synced", &|call| call.starts_with("fsync(") && aside(call))?;
        let renamed = position("renamed", &|call| {
            call.starts_with("rename") && call.contains("/agent>, \"journal.json\"")
        })?;
        let folder = position("synced with its folder", &|call| {
            call.starts_with("fsync(") && call.contains("/agent>")
        })?;
        ensure!(written < synced && synced < renamed && renamed < folder, "{own:#?}");
        let sent = own[..folder].iter().find(|call| {
            call.starts_with("sendto(") || (call.starts_with("write") && call.contains("socket:"))
        });
        ensure!(sent.is_none(), "sent before the journal was on the disk: {sent:?}");
        times += 1;
    }
    Ok(times)
}

/// Runs an agent that dies at `step`, when a change is durable but not sent yet. Returns the agent
/// and strace's output.
fn dies_at(
    testbed: &Testbed,
    bundle: &std::path::Path,
    step: &str,
) -> Result<(AgentProcess, String)> {
    let trace = testbed.path("trace");
    let through = ["strace", "-f", "-y", "-s", "64", "-e", TRACE_FILTER, "-o", path_text(&trace)?];
    let options = AgentOptions {
        wrapper: through.map(str::to_owned).to_vec(),
        env: vec![("MUSTER_CRASH_AT".to_owned(), step.to_owned())],
        ..AgentOptions::default()
    };
    let mut agent = testbed.agent_with(0, bundle, options);
    agent.start()?;
    agent.exit_code(LIMIT)?;
    Ok((agent, fs_err::read_to_string(&trace)?))
}

fn boot(agent: &AgentProcess) -> Result<u64> {
    let journal = fs_err::read_to_string(agent.data_dir.join("agent/journal.json"))?;
    let journal: serde_json::Value = serde_json::from_str(&journal)?;
    journal["boot"].as_u64().context("a boot counter")
}

#[test]
fn the_journal_is_durable_before_anything_that_depends_on_it_is_sent() -> Result<()> {
    if !strace() {
        return Ok(());
    }
    let testbed = Testbed::start(Network::loopback(1), TestbedOptions::default())?;
    let bundle = testbed.create_cluster_with_token("demo", 1)?;
    let shown =
        |what: &str| testbed.admin_json(&["cluster", "show", "demo"]).map(|v| v[what].clone());

    let (agent, trace) = dies_at(&testbed, &bundle, "redeem")?;
    ensure!(check_order(&trace)? >= 2, "key and record:\n{trace}");
    ensure!(shown("seated")? == 0, "the record was sent first");
    let first = boot(&agent)?;
    drop(agent);

    let (agent, trace) = dies_at(&testbed, &bundle, "ack")?;
    ensure!(check_order(&trace)? >= 2, "this start and what it is bound to:\n{trace}");
    ensure!(shown("state")? == "preparing", "the ack was sent first");
    ensure!(boot(&agent)? == first + 1, "a start without a higher boot counter");
    drop(agent);

    let mut agent = testbed.agent(0, &bundle);
    agent.start()?;
    testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    ensure!(boot(&agent)? == first + 2, "a start without a higher boot counter");
    Ok(())
}

#[test]
fn a_killed_node_that_runs_again_leaves_no_error_in_status() -> Result<()> {
    let testbed = Testbed::start(Network::loopback(1), TestbedOptions::default())?;
    let bundle = testbed.create_cluster_with_token("demo", 1)?;
    let mut agent = testbed.agent(0, &bundle);
    agent.start()?;
    testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let pid = agent.node_pid().context("a node")?;
    agent.kill_node()?;
    agent.wait_new_node(pid, LIMIT)?;
    let status = poll_slowly("the node to run again", LIMIT, || {
        agent.status().ok().filter(|status| status["phase"] == "running")
    })?;
    ensure!(status["last_error"].is_null(), "{status}");
    ensure!(status["node"]["last_death"] == "signal 9", "{status}");
    // No step of a healthy formation may be logged as a problem.
    ensure!(!agent.output().contains("discovery says"), "{}", agent.output());
    Ok(())
}
