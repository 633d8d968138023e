//! A majority is lost for good, and an operator makes a new cluster of what is left.

use std::process::Output;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::programs::program;
use muster_tests::harness::world::{WorldOptions, path_text};
use muster_tests::harness::{Agent, Etcdctl, Host, Network, World, until};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);
const PHRASE: &str = "make a new cluster of demo";

fn recover(agent: &Agent, args: &[&str]) -> Result<Output> {
    let mut command = agent.host.command(program("muster-agent")?);
    command.arg("recover").args(args).args(["--data-dir", path_text(&agent.data_dir)?]);
    Ok(command.output()?)
}

fn text(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&both).into_owned()
}

fn refused(output: &Output, code: i32, says: &str) -> Result<()> {
    let text = text(output);
    ensure!(output.status.code() == Some(code) && text.contains(says), "{}: {text}", output.status);
    Ok(())
}

/// Three agents of a cluster that wrote `before` together, and `after` without the third.
fn three(world: &World) -> Result<(Vec<Agent>, Etcdctl)> {
    let bundle = world.order("demo", 3)?;
    let mut agents = Vec::new();
    for host in 0..3 {
        let mut agent = world.agent(host, &bundle);
        agent.start()?;
        agents.push(agent);
    }
    world.wait_cluster_state("demo", "formed", LIMIT)?;
    let hosts: Vec<&Host> = agents.iter().map(|agent| &agent.host).collect();
    let etcdctl = world.etcdctl("demo", &hosts)?;
    until("a first write", LIMIT, || etcdctl.run(&["put", "k", "before"]).ok())?;
    // The third goes away first, and so has less than the others.
    let two = etcdctl.only(hosts[0]);
    agents[2].terminate(LIMIT)?;
    until("a write without the third", LIMIT, || two.run(&["put", "k", "after"]).ok())?;
    Ok((agents, etcdctl))
}

fn cluster_id(of: &Etcdctl) -> Result<Value> {
    Ok(of.json(&["endpoint", "status"])?[0]["Status"]["header"]["cluster_id"].clone())
}

/// What an agent's host says of its directory, as a file.
fn report(world: &World, agent: &Agent, name: &str) -> Result<std::path::PathBuf> {
    let seen = recover(agent, &["examine", "--json"])?;
    ensure!(seen.status.success(), "{}", text(&seen));
    let file = world.path(name);
    fs_err::write(&file, &seen.stdout)?;
    Ok(file)
}

/// What is not the way to make a new cluster.
fn mistakes(world: &World, first: &Agent, lost: &Agent, of_first: &str) -> Result<()> {
    let key = world.admin_key();
    let make = ["make", "--key", path_text(&key)?, "--i-accept-data-loss", "--yes", PHRASE];
    let shown = text(&recover(lost, &["examine", "--report", of_first])?);
    ensure!(shown.contains("* goes furthest") && shown.contains("what only"), "{shown}");
    refused(&recover(lost, &[&make[..], &["--report", of_first]].concat())?, 1, "goes further")?;
    refused(&recover(first, &make[..3])?, 2, "is lost for good")?;
    let wrong = [&make[..4], &["--yes", "yes"]].concat();
    refused(&recover(first, &wrong)?, 2, "it takes exactly")?;
    let stranger = world.path("stranger.pem");
    world.admin_command(&["key", "new", "--out", path_text(&stranger)?])?;
    let by_stranger = [&["make", "--key", path_text(&stranger)?], &make[3..]].concat();
    refused(&recover(first, &by_stranger)?, 2, "no operator's or owner's key")
}

#[test]
fn a_new_cluster_is_made_of_the_directory_that_goes_furthest() -> Result<()> {
    let mut world = World::start(Network::loopback(3), WorldOptions::default())?;
    let (mut agents, etcdctl) = three(&world)?;
    let mut lost = agents.pop().context("a third agent")?;
    let mut second = agents.pop().context("a second agent")?;
    let mut first = agents.pop().context("a first agent")?;
    let (alone, rest) = (etcdctl.only(&first.host), etcdctl.only(&second.host));
    let old = cluster_id(&alone)?;
    second.terminate(LIMIT)?;

    let key = world.admin_key();
    let make =
        ["make", "--key", path_text(&key)?, "--i-accept-data-loss", "--yes", PHRASE, "--json"];
    refused(&recover(&first, &make)?, 1, "stop that agent first")?;
    first.terminate(LIMIT)?;
    world.kill_discovery();
    let of_first = report(&world, &first, "first.json")?;
    let of_lost = report(&world, &lost, "lost.json")?;
    mistakes(&world, &first, &lost, path_text(&of_first)?)?;

    let make = [&make[..], &["--report", path_text(&of_lost)?]].concat();
    let made = || -> Result<Value> {
        let made = recover(&first, &make)?;
        ensure!(made.status.success(), "{}", text(&made));
        Ok(serde_json::from_slice::<Value>(&made.stdout)?["made"].clone())
    };
    let (once, again) = (made()?, made()?);
    // Killed before it was journalled, it would be asked again: the same cluster.
    ensure!(once == again, "{again} is not {once}");

    first.start()?;
    until("the new cluster to serve", LIMIT, || alone.run(&["put", "new", "one"]).ok())?;
    let value = || Ok::<_, anyhow::Error>(alone.json(&["get", "k"])?["kvs"][0]["value"].clone());
    ensure!(value()? == "YWZ0ZXI=", "{}", value()?);
    ensure!(cluster_id(&alone)? != old, "it is the old cluster");
    let members = || Ok::<_, anyhow::Error>(alone.json(&["member", "list"])?["members"].clone());
    ensure!(members()?.as_array().map(Vec::len) == Some(1), "{}", members()?);

    // Members of the old cluster come back, and stay among themselves.
    second.start()?;
    lost.start()?;
    until("the old cluster's rest to serve", LIMIT, || rest.run(&["put", "k", "old"]).ok())?;
    ensure!(members()?.as_array().map(Vec::len) == Some(1), "{}", members()?);
    ensure!(value()? == "YWZ0ZXI=", "{}", value()?);

    // A start of the agent again, and the old directory put back: only the new one is this host's.
    first.terminate(LIMIT)?;
    first.start()?;
    until("the new cluster to serve again", LIMIT, || alone.run(&["put", "new", "two"]).ok())?;
    first.terminate(LIMIT)?;
    let was = once["was"]["incarnation"].as_str().context("an incarnation")?;
    fs_err::write(first.node_dir().join("muster-incarnation"), format!("{was}\n"))?;
    first.start()?;
    ensure!(first.exit_code(LIMIT)? == 1, "{}", first.output());
    ensure!(first.node_pid().is_none(), "the old member was started");
    Ok(())
}
