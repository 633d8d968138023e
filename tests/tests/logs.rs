//! Log lines as JSON while a cluster forms, changes and has accidents: each line is one
//! object with a time and a level, and its texts are for people.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::agents::AgentOptions;
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{Network, Testbed, poll_slowly};
use muster_tests::stock_etcd;
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(90);
/// Levels of log lines.
const LEVELS: [&str; 5] = ["ERROR", "WARN", "INFO", "DEBUG", "TRACE"];
/// Beginnings of texts that Rust's `Debug` makes of ids and options.
const DEBUG_TEXTS: [&str; 8] =
    ["MemberId(", "ClusterId(", "NodeId(", "Uuid(", "Some(", "Ok(", "Err(", "Instant {"];
/// Number of decimal digits in nearly every 64-bit id, such as a member's.
const ID_DIGITS: std::ops::RangeInclusive<usize> = 17..=20;

/// Returns which part of a text isn't made for people, such as an id in decimal. `None` if there is
/// no such part.
fn fault(text: &str) -> Option<String> {
    if let Some(found) = DEBUG_TEXTS.iter().find(|found| text.contains(*found)) {
        return Some(format!("{found} of Rust"));
    }
    if serde_json::from_str::<Value>(text).is_ok_and(|value| value.is_object()) {
        return Some("an object inside a string".to_owned());
    }
    // Three numbers in brackets are bytes of a key or of an id.
    let bytes = text.split('[').skip(1).any(|rest| {
        let list = rest.split(']').next().unwrap_or_default();
        let numbers = list.split(", ").filter(|part| part.parse::<u8>().is_ok()).count();
        numbers > 2 && numbers == list.split(", ").count()
    });
    if bytes {
        return Some("a list of bytes".to_owned());
    }
    let mut words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '.');
    let id = words
        .find(|word| ID_DIGITS.contains(&word.len()) && word.chars().all(|c| c.is_ascii_digit()));
    id.map(|id| format!("the id {id} in decimal"))
}

/// Returns all texts of a value, with the names of their fields.
fn texts<'v>(name: &'v str, value: &'v Value, found: &mut Vec<(&'v str, &'v str)>) {
    match value {
        Value::String(text) => found.push((name, text)),
        Value::Array(values) => values.iter().for_each(|value| texts(name, value, found)),
        Value::Object(fields) => {
            fields.iter().for_each(|(name, value)| texts(name, value, found));
        }
        _ => {}
    }
}

/// Checks each line of a program's log. `is_etcd` says that the lines of stock etcd are among them,
/// whose texts are etcd's own.
fn check_log(name: &str, log: &str, is_etcd: bool) -> Result<()> {
    for line in log.lines() {
        let context = || format!("{name}: {line}");
        let object: Value = serde_json::from_str(line).with_context(context)?;
        let field = |name: &str| object[name].as_str().unwrap_or_default();
        let time = field("timestamp").parse::<jiff::Timestamp>();
        ensure!(time.is_ok() && field("timestamp").contains('T'), "no time in RFC 3339: {line}");
        ensure!(LEVELS.contains(&field("level")), "no level: {line}");
        ensure!(!field("message").is_empty(), "no message: {line}");
        if is_etcd && field("target") == "node" {
            continue;
        }
        let mut found = Vec::new();
        texts("", &object, &mut found);
        for (field, text) in found {
            if let Some(fault) = fault(text) {
                anyhow::bail!("{name}: {fault} in {field}: {line}");
            }
        }
    }
    ensure!(log.lines().count() > 1, "{name} has logged next to nothing: {log}");
    Ok(())
}

/// A cluster forms, its leader's node is killed, and the service is away for a while. Then a host
/// joins, a member is removed, and a host comes with a useless bundle.
fn check_logs(node: Option<&std::path::Path>) -> Result<()> {
    let json = [("MUSTER_LOG_FORMAT".to_owned(), "json".to_owned())];
    let mut options = TestbedOptions { serve_env: json.to_vec(), ..TestbedOptions::default() };
    options.serve_env.push(("MUSTER_LOG".to_owned(), "info".to_owned()));
    let mut testbed = Testbed::start(Network::loopback(5), options)?;
    let bundle = testbed.create_cluster_with_token("demo", 3)?;
    let args = match node {
        Some(node) => vec!["--node-binary".to_owned(), path_text(node)?.to_owned()],
        None => Vec::new(),
    };
    let agent = |testbed: &Testbed, host: usize, bundle: &std::path::Path| {
        let options =
            AgentOptions { args: args.clone(), env: json.to_vec(), ..AgentOptions::default() };
        testbed.agent_with(host, bundle, options)
    };
    let mut agents = Vec::new();
    for host in 0..3 {
        let mut agent = agent(&testbed, host, &bundle);
        agent.start()?;
        agents.push(agent);
    }
    testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let pid = agents[0].node_pid().context("a node")?;
    agents[0].kill_node()?;
    agents[0].wait_new_node(pid, LIMIT)?;
    testbed.stop_discovery()?;
    agents[1].wait_for_output("can't be reached", LIMIT)?;
    testbed.start_discovery()?;

    let ticket = testbed.path("ticket");
    let create = ["token", "create", "--cluster", "demo", "--kind", "join", "--out"];
    testbed.admin_command(&[&create[..], &[path_text(&ticket)?]].concat())?;
    let mut newcomer = agent(&testbed, 3, &ticket);
    newcomer.start()?;
    poll_slowly("the newcomer to vote", LIMIT, || {
        let shown = testbed.admin_command(&["cluster", "show", "demo"]).ok()?;
        let votes = |line: &&str| line.contains(" voter ") || line.contains(" leader ");
        (shown.lines().filter(votes).count() == 4).then_some(())
    })?;
    agents.push(newcomer);
    let name = agents[2].status()?["name"].as_str().context("a name")?.to_owned();
    poll_slowly("the removal", LIMIT, || {
        testbed.admin_command(&["intent", "remove", "demo", &name, "--yes", "--wait"]).ok()
    })?;
    ensure!(agents[2].exit_code(LIMIT)? == 3, "{}", agents[2].output());
    let mut late = agent(&testbed, 4, &bundle);
    late.start()?;
    ensure!(late.exit_code(LIMIT)? == 3, "{}", late.output());
    agents.push(late);

    testbed.stop_discovery()?;
    for agent in &mut agents {
        if agent.is_running() {
            agent.terminate(LIMIT)?;
        }
    }
    check_log("discovery", &fs_err::read_to_string(testbed.path("discovery.log"))?, false)?;
    agents.iter().try_for_each(|agent| check_log(&agent.host.name, &agent.output(), node.is_some()))
}

#[test]
fn each_line_is_one_object_whose_texts_are_for_people() -> Result<()> {
    check_logs(None)
}

#[test]
fn each_line_is_one_object_where_etcd_3_4_runs() -> Result<()> {
    stock_etcd::oldest().map_or(Ok(()), |etcd| check_logs(Some(&etcd)))
}

#[test]
fn texts_that_are_not_for_people_are_found() {
    for text in [
        "the member MemberId(1942309396711439535) is gone",
        "peer 1942309396711439535 is gone",
        "key=[1, 2, 255, 3]",
        "{\"msg\":\"x\"}",
        "Some(3)",
    ] {
        assert!(fault(text).is_some(), "{text}");
    }
    for text in ["peer 1af4c2d3e4f50617 is gone", "revision 1000000040", "10.0.0.1 [a, b]", "[1]"] {
        assert_eq!(fault(text), None, "{text}");
    }
}
