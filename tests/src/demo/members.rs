//! The chapters of the demo in which the cluster's members change.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::printer::DemoPrinter;
use super::{JOINER, LIMIT, SUBSTITUTE, client, hosts_of, succeeded};
use crate::harness::programs::program_path;
use crate::harness::testbed::path_text;
use crate::harness::{AgentProcess, Etcdctl, TestHost, Testbed, poll_slowly, wait_for};

/// Replaces a host that was lost with its disk by another host.
pub(super) fn replace_one(
    printer: &mut DemoPrinter,
    testbed: &Testbed,
    agents: &mut Vec<AgentProcess>,
) -> Result<()> {
    printer.chapter("A lost machine is replaced");
    let count = agents.len();
    let lost = agents.remove(0);
    let etcdctl = client(testbed, agents)?;
    let name = name_of(&etcdctl, &lost.host)?;
    let pids = (lost.process_id().context("its agent runs")?, lost.node_pid().context("its node")?);
    let (lost_host, data_dir) = (lost.host.clone(), lost.data_dir.clone());
    // Dropping an agent kills it and its node with SIGKILL.
    drop(lost);
    fs_err::remove_dir_all(data_dir)?;
    printer.command(&format!(
        "kill -9 {} {}; rm -rf {}     # all that was on {}",
        pids.0, pids.1, lost_host.name, lost_host.name
    ));
    let (newcomer, took) =
        start_newcomer(printer, testbed, SUBSTITUTE, &["--replace", &name], |host| {
            let is_removed =
                members(&etcdctl).is_ok_and(|listed| find(&listed, &lost_host).is_none());
            is_removed && is_voter(&etcdctl, host, count)
        })?;
    printer.print_checked(&format!(
        "{} votes, {name} is no member any more: {took} ms after the new agent was started",
        newcomer.host.name
    ));
    check_read(&etcdctl, &newcomer.host)?;
    printer
        .print_checked(&format!("asked alone, {} has what was written before", newcomer.host.name));
    let promoter = wait_carried_out(testbed, "replace", agents)?;
    printer.print_checked(&format!(
        "the agent on {promoter} did it: a learner first, promoted once in sync"
    ));
    agents.push(newcomer);
    Ok(())
}

/// Adds a host that has nothing but a join ticket.
pub(super) fn join_one(
    printer: &mut DemoPrinter,
    testbed: &Testbed,
    agents: &mut Vec<AgentProcess>,
) -> Result<()> {
    printer.chapter("A fourth member joins by a ticket");
    let etcdctl = client(testbed, agents)?;
    let count = agents.len() + 1;
    let (newcomer, took) =
        start_newcomer(printer, testbed, JOINER, &[], |host| is_voter(&etcdctl, host, count))?;
    printer.print_checked(&format!(
        "{} votes, {took} ms after its agent was started; there are {count} members",
        newcomer.host.name
    ));
    check_read(&etcdctl, &newcomer.host)?;
    printer
        .print_checked(&format!("asked alone, {} has what was written before", newcomer.host.name));
    let promoter = wait_carried_out(testbed, "join", agents)?;
    printer.print_checked(&format!(
        "the agent on {promoter} did it: a learner first, promoted once in sync"
    ));
    agents.push(newcomer);
    Ok(())
}

/// Removes a member for good through the cluster itself, without discovery.
pub(super) fn remove_one(
    printer: &mut DemoPrinter,
    testbed: &Testbed,
    agents: &mut Vec<AgentProcess>,
) -> Result<()> {
    printer.chapter("One member is removed for good, without discovery");
    let mut removed = agents.remove(0);
    let others = hosts_of(agents);
    let etcdctl = client(testbed, agents)?;
    let name = name_of(&etcdctl, &removed.host)?;
    printer.command(&format!(
        "muster-agent member remove {name} --data-dir {0}     # on {0}, through its own node",
        others[0].name
    ));
    let data_dir = path_text(&agents[0].data_dir)?;
    // As in etcd, a removal is refused until all members have been connected for some seconds.
    wait_for("the cluster to remove a member", LIMIT, || {
        let mut command = others[0].command(program_path("muster-agent").ok()?);
        command
            .args(["member", "remove", &name, "--data-dir", data_dir])
            .output()
            .ok()
            .filter(succeeded)
    })?;
    let code = removed.exit_code(LIMIT)?;
    ensure!(code == 3, "the removed member's agent ended with {code}: {}", removed.output());
    printer.print_checked(&format!(
        "the agent on {} ended with 3, which tells a supervisor not to start it again",
        removed.host.name
    ));
    for _ in 0..3 {
        removed.start()?;
        let code = removed.exit_code(LIMIT)?;
        ensure!(code == 3, "started again, it ended with {code}: {}", removed.output());
        ensure!(removed.node_pid().is_none(), "started again, it has started its node");
    }
    let left = members(&etcdctl)?;
    ensure!(left.len() == others.len(), "members: {left:?}");
    etcdctl.run(&["put", "without", &name])?;
    printer.print_checked(&format!(
        "started three times more it ended with 3 each time; the other {} go on writing",
        others.len()
    ));
    Ok(())
}

/// Creates a ticket, starts an agent with it on host `index`, and waits until `is_done` accepts the
/// host. Returns the agent, and how many milliseconds the join took.
fn start_newcomer(
    printer: &mut DemoPrinter,
    testbed: &Testbed,
    index: usize,
    extra_args: &[&str],
    is_done: impl Fn(&TestHost) -> bool,
) -> Result<(AgentProcess, u128)> {
    let host = &testbed.network.hosts[index];
    let file = format!("{}.ticket", host.name);
    let ticket = testbed.path(&file);
    let arguments =
        [&["token", "create", "--cluster", "demo", "--kind", "join"], extra_args].concat();
    printer.command(&format!("muster-discovery {} --out {file}", arguments.join(" ")));
    let arguments = [&arguments[..], &["--out", path_text(&ticket)?]].concat();
    // Discovery learns the members from their agents' reports, so it may not know a member's name
    // yet.
    poll_slowly("discovery to sign for the ticket", LIMIT, || {
        testbed.admin_output(&arguments).ok().filter(succeeded)
    })?;
    let newcomer = start_agent(printer, testbed, index, &ticket)?;
    let started = Instant::now();
    wait_for(&format!("{} to become a voter", host.name), LIMIT, || is_done(host).then_some(()))
        .with_context(|| newcomer.output())?;
    Ok((newcomer, started.elapsed().as_millis()))
}

fn start_agent(
    printer: &mut DemoPrinter,
    testbed: &Testbed,
    index: usize,
    ticket: &Path,
) -> Result<AgentProcess> {
    let mut newcomer = testbed.agent(index, ticket);
    newcomer.start()?;
    let host = &newcomer.host;
    printer.command(&format!(
        "muster-agent run --data-dir {0} --bundle-file {0}.ticket     # on {0} at {1}",
        host.name, host.address
    ));
    Ok(newcomer)
}

fn members(etcdctl: &Etcdctl) -> Result<Vec<Value>> {
    let list = etcdctl.json(&["member", "list"])?;
    list["members"].as_array().cloned().context("a list of members")
}

fn find<'a>(members: &'a [Value], host: &TestHost) -> Option<&'a Value> {
    let url = format!("https://{}:2380", host.address);
    members.iter().find(|member| member["peerURLs"][0] == url.as_str())
}

fn name_of(etcdctl: &Etcdctl, host: &TestHost) -> Result<String> {
    let members = members(etcdctl)?;
    let name = find(&members, host).and_then(|member| member["name"].as_str());
    name.map(str::to_owned).with_context(|| format!("{} is no member: {members:?}", host.name))
}

/// Whether the cluster has `count` members, all of them voters, and `host` is one of them.
fn is_voter(etcdctl: &Etcdctl, host: &TestHost, count: usize) -> bool {
    let members = members(etcdctl).unwrap_or_default();
    let learner = |member: &Value| member["isLearner"].as_bool().unwrap_or(false);
    members.len() == count && find(&members, host).is_some() && !members.iter().any(learner)
}

/// Checks that the member on `host` itself returns the value that was written before it joined.
fn check_read(etcdctl: &Etcdctl, host: &TestHost) -> Result<()> {
    let value = etcdctl.with_endpoint(host).run(&["get", "greeting", "--print-value-only"])?;
    ensure!(value.trim() == "hello", "read {value:?} from {}", host.name);
    Ok(())
}

/// Waits until discovery reports that the change with this verb is done. Returns the name of the
/// host whose agent promoted the newcomer from learner to voter.
fn wait_carried_out<'a>(
    testbed: &Testbed,
    verb: &str,
    agents: &'a [AgentProcess],
) -> Result<&'a str> {
    let operation = poll_slowly(&format!("the {verb} to be reported"), LIMIT, || {
        let list = testbed.admin_json(&["intent", "list", "demo", "--all"]).ok()?;
        let intents = list["intents"].as_array()?;
        let done = intents.iter().find(|view| view["intent"]["verb"] == verb)?;
        let operation = done["intent"]["operation"].as_str()?.to_owned();
        (done["state"] == "promoted").then_some(operation)
    })?;
    let promoted =
        |line: &str| line.contains("member promote is carried out") && line.contains(&operation);
    let mut promoters = agents.iter().filter(|agent| agent.output().lines().any(promoted));
    let promoter = promoters.next().with_context(|| format!("nobody promoted by {operation}"))?;
    Ok(&promoter.host.name)
}
