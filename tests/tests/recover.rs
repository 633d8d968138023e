//! A majority is lost for good, and an operator makes a new cluster from the remaining data.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::agents::AgentOptions;
use muster_tests::harness::process::{ChildProcess, is_alive, last_lines, send_signal};
use muster_tests::harness::programs::program_path;
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{
    AgentProcess, Etcdctl, Network, TestHost, Testbed, poll_slowly, skip, wait_for, write_script,
};
use muster_tests::stock_etcd;
use rustix::process::Signal;
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);
const PHRASE: &str = "make a new cluster of demo";

fn recover(agent: &AgentProcess, args: &[&str]) -> Result<Output> {
    let mut command = agent.host.command(program_path("muster-agent")?);
    command.arg("recover").args(args).args(["--data-dir", path_text(&agent.data_dir)?]);
    Ok(command.output()?)
}

fn output_text(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&both).into_owned()
}

fn check_refused(output: &Output, code: i32, says: &str) -> Result<()> {
    let text = output_text(output);
    ensure!(output.status.code() == Some(code) && text.contains(says), "{}: {text}", output.status);
    Ok(())
}

/// Starts three agents and forms a cluster. Writes `before` with all three members, and `after`
/// without the third.
fn form_three_members(testbed: &Testbed) -> Result<(Vec<AgentProcess>, Etcdctl)> {
    let bundle = testbed.create_cluster_with_token("demo", 3)?;
    let mut agents = Vec::new();
    for host in 0..3 {
        let mut agent = testbed.agent(host, &bundle);
        agent.start()?;
        agents.push(agent);
    }
    testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let hosts: Vec<&TestHost> = agents.iter().map(|agent| &agent.host).collect();
    let etcdctl = testbed.etcdctl("demo", &hosts)?;
    poll_slowly("a first write", LIMIT, || etcdctl.run(&["put", "k", "before"]).ok())?;
    // The third member stops first, so its log is shorter than the others'.
    let two = etcdctl.with_endpoint(hosts[0]);
    agents[2].terminate(LIMIT)?;
    poll_slowly("a write without the third", LIMIT, || two.run(&["put", "k", "after"]).ok())?;
    Ok((agents, etcdctl))
}

fn cluster_id(of: &Etcdctl) -> Result<Value> {
    Ok(of.json(&["endpoint", "status"])?[0]["Status"]["header"]["cluster_id"].clone())
}

/// Writes the output of `recover examine` on the agent's host to a file.
fn write_examine_report(
    testbed: &Testbed,
    agent: &AgentProcess,
    name: &str,
) -> Result<std::path::PathBuf> {
    let seen = recover(agent, &["examine", "--json"])?;
    ensure!(seen.status.success(), "{}", output_text(&seen));
    let file = testbed.path(name);
    fs_err::write(&file, &seen.stdout)?;
    Ok(file)
}

/// Checks that wrong ways to make a new cluster are refused.
fn check_mistakes_are_refused(
    testbed: &Testbed,
    first: &AgentProcess,
    lost: &AgentProcess,
    of_first: &str,
) -> Result<()> {
    let key = testbed.admin_key();
    let make = ["make", "--key", path_text(&key)?, "--i-accept-data-loss", "--yes", PHRASE];
    let shown = output_text(&recover(lost, &["examine", "--report", of_first])?);
    ensure!(shown.contains("* goes furthest") && shown.contains("what only"), "{shown}");
    check_refused(
        &recover(lost, &[&make[..], &["--report", of_first]].concat())?,
        1,
        "goes further",
    )?;
    check_refused(&recover(first, &make[..3])?, 2, "is lost for good")?;
    let wrong = [&make[..4], &["--yes", "yes"]].concat();
    check_refused(&recover(first, &wrong)?, 2, "it takes exactly")?;
    let stranger = testbed.path("stranger.pem");
    testbed.admin_command(&["key", "new", "--out", path_text(&stranger)?])?;
    let by_stranger = [&["make", "--key", path_text(&stranger)?], &make[3..]].concat();
    check_refused(&recover(first, &by_stranger)?, 2, "no operator's or owner's key")
}

/// Checks that `status` on the remaining host names the missing members, and says what to do.
fn check_status_without_quorum(left: &AgentProcess, missing: &[&AgentProcess]) -> Result<()> {
    let names: Result<Vec<Value>> =
        missing.iter().map(|agent| Ok(agent.status()?["name"].clone())).collect();
    let names = names?;
    let mut last = Value::Null;
    poll_slowly("status to say who is missing", LIMIT, || {
        last = left.status().ok()?;
        let says = last["no_quorum"].as_str()?;
        let all = names.iter().all(|name| name.as_str().is_some_and(|name| says.contains(name)));
        let health = last["node_health"]["says"].as_str()?;
        (all && says.contains("muster-agent recover --help") && health.contains("no leader"))
            .then_some(())
    })
    .with_context(|| format!("{last}"))
}

#[test]
fn a_new_cluster_is_made_from_the_directory_with_the_longest_log() -> Result<()> {
    let mut testbed = Testbed::start(Network::loopback(3), TestbedOptions::default())?;
    let (mut agents, etcdctl) = form_three_members(&testbed)?;
    let mut lost = agents.pop().context("a third agent")?;
    let mut second = agents.pop().context("a second agent")?;
    let mut first = agents.pop().context("a first agent")?;
    let (alone, rest) = (etcdctl.with_endpoint(&first.host), etcdctl.with_endpoint(&second.host));
    let old = cluster_id(&alone)?;
    second.terminate(LIMIT)?;
    check_status_without_quorum(&first, &[&second, &lost])?;

    let key = testbed.admin_key();
    let make =
        ["make", "--key", path_text(&key)?, "--i-accept-data-loss", "--yes", PHRASE, "--json"];
    check_refused(&recover(&first, &make)?, 1, "stop that agent first")?;
    first.terminate(LIMIT)?;
    testbed.kill_discovery();
    let of_first = write_examine_report(&testbed, &first, "first.json")?;
    let of_lost = write_examine_report(&testbed, &lost, "lost.json")?;
    check_mistakes_are_refused(&testbed, &first, &lost, path_text(&of_first)?)?;

    let make = [&make[..], &["--report", path_text(&of_lost)?]].concat();
    let made = || -> Result<Value> {
        let made = recover(&first, &make)?;
        ensure!(made.status.success(), "{}", output_text(&made));
        Ok(serde_json::from_slice::<Value>(&made.stdout)?["made"].clone())
    };
    let (once, again) = (made()?, made()?);
    // The second command repeats the first, as after a kill before the agent has written its
    // journal. It must make the same cluster.
    ensure!(once == again, "{again} is not {once}");

    first.start()?;
    poll_slowly("the new cluster to serve", LIMIT, || alone.run(&["put", "new", "one"]).ok())?;
    let value = || Ok::<_, anyhow::Error>(alone.json(&["get", "k"])?["kvs"][0]["value"].clone());
    ensure!(value()? == "YWZ0ZXI=", "{}", value()?);
    ensure!(cluster_id(&alone)? != old, "it is the old cluster");
    let members = || Ok::<_, anyhow::Error>(alone.json(&["member", "list"])?["members"].clone());
    ensure!(members()?.as_array().map(Vec::len) == Some(1), "{}", members()?);

    // Two members of the old cluster return. They form a quorum of it, and must not mix with the
    // new cluster.
    second.start()?;
    lost.start()?;
    poll_slowly("the old members to serve", LIMIT, || rest.run(&["put", "k", "old"]).ok())?;
    ensure!(members()?.as_array().map(Vec::len) == Some(1), "{}", members()?);
    ensure!(value()? == "YWZ0ZXI=", "{}", value()?);

    // After a restart of its agent, the new member serves again. Then the old member's incarnation
    // marker is put back, as by an old disk image. The agent must not run that member.
    first.terminate(LIMIT)?;
    first.start()?;
    poll_slowly("the new cluster to serve again", LIMIT, || {
        alone.run(&["put", "new", "two"]).ok()
    })?;
    first.terminate(LIMIT)?;
    let was = once["was"]["incarnation"].as_str().context("an incarnation")?;
    fs_err::write(first.node_dir().join("muster-incarnation"), format!("{was}\n"))?;
    first.start()?;
    ensure!(first.exit_code(LIMIT)? == 1, "{}", first.output());
    ensure!(first.node_pid().is_none(), "the old member was started");
    Ok(())
}

/// Returns the options of each agent of a test.
fn options(node: Option<&Path>) -> Result<AgentOptions> {
    let args = match node {
        Some(node) => vec!["--node-binary".to_owned(), path_text(node)?.to_owned()],
        None => Vec::new(),
    };
    Ok(AgentOptions { args, ..AgentOptions::default() })
}

/// Forms a cluster of `size` agents, and returns them.
fn form_cluster(
    testbed: &Testbed,
    size: usize,
    node: Option<&Path>,
) -> Result<(Vec<AgentProcess>, Etcdctl)> {
    let bundle = testbed.create_cluster_with_token("demo", size)?;
    let mut agents = Vec::new();
    for host in 0..size {
        let mut agent = testbed.agent_with(host, &bundle, options(node)?);
        agent.start()?;
        agents.push(agent);
    }
    testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let hosts: Vec<&TestHost> = agents.iter().map(|agent| &agent.host).collect();
    let etcdctl = testbed.etcdctl("demo", &hosts)?;
    poll_slowly("a first write", LIMIT, || etcdctl.run(&["put", "k", "v"]).ok())?;
    Ok((agents, etcdctl))
}

/// Runs `recover make` on this host, with all arguments that it requires.
fn make(testbed: &Testbed, agent: &AgentProcess, more: &[&str]) -> Result<Output> {
    let key = testbed.admin_key();
    let args =
        ["make", "--key", path_text(&key)?, "--i-accept-data-loss", "--yes", PHRASE, "--json"];
    recover(agent, &[&args[..], more].concat())
}

/// Starts an agent with a join ticket on a host that was reset.
fn start_with_ticket(
    testbed: &Testbed,
    host: usize,
    node: Option<&Path>,
    env: &[(&str, &str)],
) -> Result<AgentProcess> {
    let file = testbed.path(&format!("{host}.ticket"));
    let ticket = ["token", "create", "--cluster", "demo", "--kind", "join", "--out"];
    testbed.admin_command(&[&ticket[..], &[path_text(&file)?]].concat())?;
    let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let options = AgentOptions { env: env.collect(), ..options(node)? };
    let mut agent = testbed.agent_with(host, &file, options);
    agent.start()?;
    Ok(agent)
}

fn reset(agent: &AgentProcess) -> Result<()> {
    let mut command = agent.host.command(program_path("muster-agent")?);
    let output =
        command.args(["reset", "--yes", "--data-dir", path_text(&agent.data_dir)?]).output()?;
    ensure!(output.status.success(), "{}", output_text(&output));
    Ok(())
}

fn wait_voters(etcdctl: &Etcdctl, count: usize, newcomer: &AgentProcess) -> Result<()> {
    poll_slowly("the newcomer to vote", LIMIT, || {
        let list = etcdctl.json(&["member", "list"]).ok()?;
        let voter = |member: &Value| member["isLearner"] != true && member["name"].is_string();
        let members = list["members"].as_array()?;
        (members.len() == count && members.iter().all(voter)).then_some(())
    })
    .with_context(|| last_lines(&newcomer.output(), 30))
}

/// Writes until `stop` is true. Returns the numbers of the acknowledged writes.
fn write(etcdctl: &Etcdctl, stop: &AtomicBool, count: &AtomicUsize) -> Vec<u32> {
    let mut acknowledged = Vec::new();
    for n in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let key = format!("n{n:06}");
        let written = etcdctl.output(&["--command-timeout=2s", "put", &key, "x"]);
        if written.is_ok_and(|output| output.status.success()) {
            acknowledged.push(n);
            count.store(acknowledged.len(), Ordering::Relaxed);
        }
    }
    acknowledged
}

/// Loses a majority while a client writes. The third member is stopped, the second's disk is lost,
/// and both nodes are killed. The first member must go on alone with everything that was
/// acknowledged. The other hosts join it one by one.
fn check_lost_majority(node: Option<&Path>) -> Result<()> {
    let testbed = Testbed::start(Network::loopback(3), TestbedOptions::default())?;
    let (mut agents, etcdctl) = form_cluster(&testbed, 3, node)?;
    let mut third = agents.pop().context("a third agent")?;
    let mut second = agents.pop().context("a second agent")?;
    let mut first = agents.pop().context("a first agent")?;
    third.terminate(LIMIT)?;
    let alone = etcdctl.with_endpoint(&first.host);
    poll_slowly("a write without the third", LIMIT, || alone.run(&["put", "k", "after"]).ok())?;
    let (stop, count) = (AtomicBool::new(false), AtomicUsize::new(0));
    let acknowledged = std::thread::scope(|scope| -> Result<Vec<u32>> {
        let writer = scope.spawn(|| write(&alone, &stop, &count));
        let enough = || (count.load(Ordering::Relaxed) > 10).then_some(());
        let written = wait_for("some writes", LIMIT, enough);
        for agent in [&mut first, &mut second] {
            agent.kill();
        }
        let killed = written.and_then(|()| first.kill_node()).and_then(|()| second.kill_node());
        stop.store(true, Ordering::Relaxed);
        killed.map(|()| writer.join().unwrap_or_default())
    })?;
    ensure!(acknowledged.len() > 10, "{acknowledged:?}");
    fs_err::remove_dir_all(second.node_dir())?;

    let binary = match node {
        Some(node) => vec!["--node-binary", path_text(node)?],
        None => Vec::new(),
    };
    let of_first = write_examine_report(&testbed, &first, "first.json")?;
    let by_third = [&binary[..], &["--report", path_text(&of_first)?]].concat();
    check_refused(&make(&testbed, &third, &by_third)?, 1, "goes further: make the cluster there")?;
    let of_third = write_examine_report(&testbed, &third, "third.json")?;
    let made =
        make(&testbed, &first, &[&binary[..], &["--report", path_text(&of_third)?]].concat())?;
    ensure!(made.status.success(), "{}", output_text(&made));
    let made: Value = serde_json::from_slice(&made.stdout)?;
    let again: Value = serde_json::from_slice(&make(&testbed, &first, &binary)?.stdout)?;
    ensure!(made == again, "{again} is not {made}");
    check_refused(&make(&testbed, &third, &by_third)?, 1, "goes further")?;
    let of_first = write_examine_report(&testbed, &first, "made.json")?;
    let later = [&binary[..], &["--report", path_text(&of_first)?]].concat();
    check_refused(&make(&testbed, &third, &later)?, 1, "a new cluster was made already")?;

    first.start()?;
    poll_slowly("the new cluster to serve", LIMIT, || alone.run(&["put", "new", "one"]).ok())
        .with_context(|| last_lines(&first.output(), 30))?;
    let id = made["made"]["is"]["cluster_id"].as_str().context("an id")?;
    ensure!(cluster_id(&alone)? == u64::from_str_radix(id, 16)?, "it is not cluster {id}");
    let keys = alone.run(&["get", "n", "--prefix", "--keys-only"])?;
    for n in &acknowledged {
        ensure!(keys.contains(&format!("n{n:06}")), "write {n} of {} is lost", acknowledged.len());
    }
    for (count, old) in [(2, second), (3, third)] {
        let host = count - 1;
        reset(&old)?;
        drop(old);
        let joined = start_with_ticket(&testbed, host, node, &[])?;
        wait_voters(&alone, count, &joined)?;
        let own = etcdctl.with_endpoint(&joined.host);
        ensure!(own.run(&["get", "new", "--print-value-only"])?.trim() == "one");
        agents.push(joined);
    }
    // The cluster has three members again. So it serves without the first member.
    first.terminate(LIMIT)?;
    let rest = etcdctl.with_endpoint(&agents[0].host);
    poll_slowly("a write without the first", LIMIT, || rest.run(&["put", "k", "last"]).ok())?;
    first.start()?;
    poll_slowly("the first to serve again", LIMIT, || {
        (alone.run(&["get", "k", "--print-value-only"]).ok()?.trim() == "last").then_some(())
    })?;
    agents.push(first);
    Ok(())
}

#[test]
fn a_lost_majority_goes_on_from_one_directory_and_grows_again_by_tickets() -> Result<()> {
    check_lost_majority(None)
}

#[test]
fn a_cluster_of_etcd_3_4_recovers_from_a_lost_majority() -> Result<()> {
    stock_etcd::oldest().map_or(Ok(()), |etcd| check_lost_majority(Some(&etcd)))
}

#[test]
fn a_cluster_of_the_newest_etcd_recovers_from_a_lost_majority() -> Result<()> {
    let work = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (Some(etcd), Some(_)) = (stock_etcd::newest(work), stock_etcd::newest_etcdutl(work)) else {
        return Ok(());
    };
    check_lost_majority(Some(&etcd))
}

#[test]
fn a_newcomer_accepts_only_a_recovery_that_an_operator_signed() -> Result<()> {
    const RECOVERIES: &str = "muster/v1/recoveries";
    let testbed = Testbed::start(Network::loopback(2), TestbedOptions::default())?;
    let (mut agents, etcdctl) = form_cluster(&testbed, 1, None)?;
    agents[0].terminate(LIMIT)?;
    let made = make(&testbed, &agents[0], &[])?;
    ensure!(made.status.success(), "{}", output_text(&made));
    agents[0].start()?;
    // The newcomer crashes right after it was added. The first host's agent is killed too: it would
    // put the signed recovery statements back into the store, and this test forges them.
    let mut newcomer = start_with_ticket(&testbed, 1, None, &[("MUSTER_CRASH_AT", "added")])?;
    newcomer.exit_code(LIMIT)?;
    let signed = etcdctl.run(&["get", RECOVERIES, "--print-value-only"])?;
    agents[0].kill();
    let (start, end) = signed.trim().split_at(signed.trim().len() - 12);
    let forged = format!("{start}{}", end.replace(|c: char| c.is_ascii_alphanumeric(), "A"));
    newcomer.options.env.clear();
    for (value, says) in [(forged.as_str(), "says that it is a recovered one"), ("[]", "")] {
        etcdctl.run(&["put", RECOVERIES, value])?;
        newcomer.start()?;
        if says.is_empty() {
            ensure!(newcomer.exit_code(LIMIT)? == 3, "{}", newcomer.output());
            let printed = newcomer.output();
            ensure!(printed.contains("no recovery statement there leads"), "{printed}");
        } else {
            newcomer.wait_for_output(says, LIMIT)?;
            newcomer.kill();
        }
        ensure!(newcomer.node_pid().is_none(), "a node was started on {value}");
    }
    // The cluster's own agent puts the signed recovery back. The newcomer is started only after
    // that: it would end for good if it read the invalid recovery.
    agents[0].start()?;
    let stored = || etcdctl.run(&["get", RECOVERIES, "--print-value-only"]).ok();
    wait_for("the signed recovery", LIMIT, || stored().filter(|stored| *stored == signed))?;
    newcomer.start()?;
    wait_voters(&etcdctl.with_endpoint(&agents[0].host), 2, &newcomer)?;
    agents.push(newcomer);
    Ok(())
}

/// System calls that rename a file.
const RENAME_CALLS: &str = "rename,renameat,renameat2";

/// Leaves a socket in `work`, if that folder exists. A killed etcd leaves such a socket there if it
/// was applying its log.
fn leave_socket(work: &Path) {
    if work.is_dir() {
        // Binding fails if the killed etcd has left a socket of this name, which serves the test as
        // well.
        let _ = std::os::unix::net::UnixListener::bind(work.join("client:1"));
    }
}

/// Kills `recover make` at the N-th of the system calls `calls`, for each N. Kills it once more
/// before the agent has written its journal. After each kill the command is repeated. The result
/// must be one new cluster with all data.
fn check_recovery_killed_at_each_step(
    node: Option<&Path>,
    calls: &str,
    least: usize,
) -> Result<()> {
    let testbed = Testbed::start(Network::loopback(1), TestbedOptions::default())?;
    let (mut agents, etcdctl) = form_cluster(&testbed, 1, node)?;
    let agent = &mut agents[0];
    let old = cluster_id(&etcdctl)?.as_u64().context("an id")?;
    agent.kill();
    let by_a_running_node = make(&testbed, agent, &[])?;
    check_refused(&by_a_running_node, 1, "a node still runs on this state")?;
    agent.kill_node()?;
    let origin = testbed.path("origin");
    copy(&agent.data_dir, &origin)?;
    let key = testbed.admin_key();
    let binary = node.map(path_text).transpose()?;
    let binary: Vec<&str> = binary.iter().flat_map(|node| ["--node-binary", node]).collect();
    check_wrong_directories(&testbed, agent, &binary)?;
    let (mut olds, mut news, mut step) = (0, 0, 0);
    loop {
        fs_err::remove_dir_all(&agent.data_dir)?;
        copy(&origin, &agent.data_dir)?;
        let mut command = Command::new(if step > 0 { "strace" } else { "env" });
        if step > 0 {
            command.args(["-f", "-qq", "-o", "/dev/null", "-e", &format!("trace={calls}")]);
            command.args(["-e", &format!("inject={calls}:signal=KILL:when={step}")]);
        } else {
            command.arg("MUSTER_CRASH_AT=made");
        }
        command.arg(program_path("muster-agent")?);
        command.args(["recover", "make", "--key", path_text(&key)?]);
        command.args(["--i-accept-data-loss", "--yes", PHRASE, "--json"]).args(&binary);
        command.args(["--data-dir", path_text(&agent.data_dir)?]).stdin(Stdio::null());
        let Ok(output) = command.output() else {
            skip::report_missing_program("strace");
            return Ok(());
        };
        let ended = output.status.success();
        ensure!(step > 0 || !ended, "it was not killed");
        step += 1;
        let seen = recover(agent, &["examine", "--json"])?;
        let seen: Value = serde_json::from_slice(&seen.stdout)?;
        let is_old = seen[0]["sight"]["cluster_id"] == format!("{old:x}");
        if is_old {
            olds += 1
        } else {
            news += 1
        }
        leave_socket(&agent.data_dir.join("node/muster-recovering"));
        let made = make(&testbed, agent, &binary)?;
        ensure!(made.status.success(), "step {step}: {}", output_text(&made));
        let made: Value = serde_json::from_slice(&made.stdout)?;
        let is = made["made"]["is"].clone();
        let after = recover(agent, &["examine", "--json"])?;
        let after: Value = serde_json::from_slice(&after.stdout)?;
        let sight = &after[0]["sight"];
        ensure!(sight["state"] == "whole", "step {step}: {sight}");
        for part in ["cluster_id", "member_id", "incarnation"] {
            ensure!(sight[part] == is[part], "step {step}: {part} of {sight}, and not of {is}");
        }
        let journal = fs_err::read(agent.data_dir.join("agent/journal.json"))?;
        let journal: Value = serde_json::from_slice(&journal)?;
        ensure!(journal["recoveries"].as_array().map(Vec::len) == Some(1), "step {step}");
        if ended {
            break;
        }
    }
    ensure!(olds + news >= least && news > 0, "{olds} times old, {news} times new");
    agent.start()?;
    poll_slowly("the new cluster to serve", LIMIT, || etcdctl.run(&["put", "new", "one"]).ok())?;
    ensure!(etcdctl.run(&["get", "k", "--print-value-only"])?.trim() == "v");
    ensure!(cluster_id(&etcdctl)? != old);
    Ok(())
}

/// Checks that no cluster is made from an empty directory or from a removed member's.
fn check_wrong_directories(testbed: &Testbed, agent: &AgentProcess, binary: &[&str]) -> Result<()> {
    let key = testbed.admin_key();
    let make = |dir: &Path| -> Result<Output> {
        let mut command = agent.host.command(program_path("muster-agent")?);
        command.args(["recover", "make", "--key", path_text(&key)?, "--i-accept-data-loss"]);
        command.args(["--yes", PHRASE, "--data-dir", path_text(dir)?]).args(binary);
        Ok(command.output()?)
    };
    let (nobody, removed) = (testbed.path("nobody"), testbed.path("removed"));
    check_refused(&make(&nobody)?, 1, "no such folder")?;
    fs_err::create_dir(&nobody)?;
    check_refused(&make(&nobody)?, 1, "there is nothing to recover")?;
    copy(&agent.data_dir, &removed)?;
    let tombstone =
        r#"{"version":1,"incarnation":"","member_id":"1","cluster_id":"1","at":"now","by":"log"}"#;
    fs_err::write(removed.join("node/muster-tombstone.json"), tombstone)?;
    check_refused(&make(&removed)?, 1, "is removed")?;
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let status = Command::new("cp").arg("-a").args([from, to]).status()?;
    ensure!(status.success(), "cp: {status}");
    Ok(())
}

/// The programs that a killed command had started must end with it, so that a repeated command is
/// alone with the directory.
#[test]
fn a_killed_recovery_leaves_no_program_behind() -> Result<()> {
    let testbed = Testbed::start(Network::loopback(1), TestbedOptions::default())?;
    let (mut agents, _) = form_cluster(&testbed, 1, None)?;
    let agent = &mut agents[0];
    agent.terminate(LIMIT)?;
    let (fake, pid_file) = (testbed.path("fake-node"), testbed.path("fake-node.pid"));
    let script = format!(
        "#!/bin/sh\n[ \"$2\" != recover ] || {{ echo $$ > {}; exec sleep 600; }}\nexec {} \"$@\"\n",
        pid_file.display(),
        program_path("muster-node")?.display()
    );
    write_script(&fake, &script)?;
    let key = testbed.admin_key();
    let mut command = agent.host.command(program_path("muster-agent")?);
    command.args(["recover", "make", "--key", path_text(&key)?, "--i-accept-data-loss"]);
    command.args(["--yes", PHRASE, "--node-binary", path_text(&fake)?]);
    command.args(["--data-dir", path_text(&agent.data_dir)?]);
    let mut asked = ChildProcess::spawn("recover make", command, &testbed.path("make.log"))?;
    let pid = wait_for("the recovery to be under way", LIMIT, || {
        fs_err::read_to_string(&pid_file).ok()?.trim().parse::<u32>().ok()
    })
    .with_context(|| asked.output())?;
    ensure!(is_alive(pid));
    asked.kill();
    let gone =
        wait_for("the killed command's program to end", LIMIT, || (!is_alive(pid)).then_some(()));
    if gone.is_err() {
        send_signal(pid, Signal::KILL);
    }
    gone?;
    let made = make(&testbed, agent, &[])?;
    ensure!(made.status.success(), "{}", output_text(&made));
    Ok(())
}

#[test]
fn a_recovery_killed_at_each_step_ends_in_one_new_cluster() -> Result<()> {
    check_recovery_killed_at_each_step(None, &format!("fsync,fdatasync,{RENAME_CALLS}"), 10)
}

#[test]
fn a_recovery_of_etcd_killed_at_each_step_ends_in_one_new_cluster() -> Result<()> {
    stock_etcd::oldest()
        .map_or(Ok(()), |etcd| check_recovery_killed_at_each_step(Some(&etcd), RENAME_CALLS, 5))
}
