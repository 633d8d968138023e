//! The CAs of a running cluster are replaced, in three steps, while clients write.

use std::path::Path;
use std::process::Output;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::formed_cluster::{FormedCluster, LIMIT};
use muster_tests::harness::process::last_lines;
use muster_tests::harness::testbed::path_text;
use muster_tests::harness::{AgentProcess, Etcdctl, Network, poll_slowly, wait_for};
use muster_tests::stock_etcd;
use serde_json::Value;

use crate::certificates::bring_issued_files;
use crate::restored_service::{back_up, lose_and_restore};

/// Time until the agents have reached a restored service.
const REPORT_LIMIT: Duration = Duration::from_secs(180);

/// Runs `cluster rotate-ca demo` with more arguments, and returns its answer.
fn rotate(running: &FormedCluster, more: &[&str]) -> Result<Value> {
    let args = ["cluster", "rotate-ca", "demo", "--yes"];
    running.testbed.admin_json(&[&args[..], more].concat())
}

/// Runs step 2 of `cluster rotate-ca demo`, which has to fail, since a member is not ready.
fn rotate_too_early(running: &FormedCluster) -> Result<Output> {
    let args = ["cluster", "rotate-ca", "demo", "--step", "2", "--yes", "--timeout", "1s"];
    let output = running.testbed.admin_output(&args)?;
    ensure!(output.status.code() == Some(1), "{output:?}");
    Ok(output)
}

/// Takes the step with this name. A repeated command must not take the next step.
fn expect_step(running: &FormedCluster, step: &str) -> Result<()> {
    let number = match step {
        "begin" => "1",
        "switch" => "2",
        _ => "3",
    };
    for is_first in [true, false] {
        let taken = rotate(running, &["--step", number])?;
        ensure!(taken["step"] == step && taken["taken"] == is_first, "{taken}");
    }
    Ok(())
}

/// Gives a client the present CAs, as an operator does on each client's machine.
fn renew_credentials(running: &FormedCluster, client: &Etcdctl) -> Result<()> {
    let out = path_text(client.credentials())?;
    let args = ["cluster", "credentials", "demo", "--renew", "--yes", "--out", out];
    running.testbed.admin_command(&args).map(drop)
}

/// Returns a client with a copy of the credentials, which later renewals of `client` don't change.
fn copy_of(running: &FormedCluster, client: &Etcdctl, name: &str) -> Result<Etcdctl> {
    let folder = running.testbed.path(name);
    fs_err::create_dir(&folder)?;
    for file in ["ca.crt", "client.crt", "client.key"] {
        fs_err::copy(client.credentials().join(file), folder.join(file))?;
    }
    let host = running.founders()[0].clone();
    Ok(Etcdctl::new(host, folder, client.endpoints().to_vec()))
}

/// Checks that each member accepts writes.
fn check_each_serves(running: &FormedCluster, client: &Etcdctl) -> Result<()> {
    for agent in &running.agents {
        let own = client.with_endpoint(&agent.host);
        poll_slowly(&format!("{} to serve", agent.host.name), LIMIT, || {
            own.run(&["put", "k", "v"]).ok()
        })
        .with_context(|| last_lines(&agent.output(), 25))?;
    }
    Ok(())
}

fn certificates(agent: &AgentProcess) -> Result<String> {
    Ok(fs_err::read_to_string(agent.data_dir.join("agent/tls/peer.crt"))?)
}

fn trusted_bundle(agent: &AgentProcess) -> Result<String> {
    Ok(fs_err::read_to_string(agent.data_dir.join("agent/tls/peer-ca.crt"))?)
}

fn trusted_cas(agent: &AgentProcess) -> Result<usize> {
    Ok(trusted_bundle(agent)?.matches("BEGIN CERTIFICATE").count())
}

fn wait_trusted_cas(running: &FormedCluster, count: usize) -> Result<()> {
    for agent in &running.agents {
        wait_for("the member to follow the statement", LIMIT, || {
            (trusted_cas(agent).ok()? == count).then_some(())
        })
        .with_context(|| last_lines(&agent.output(), 25))?;
    }
    Ok(())
}

/// Restarts the agents one after the other, and with them their nodes.
fn restart_each(running: &mut FormedCluster) -> Result<()> {
    for agent in &mut running.agents {
        let code = agent.terminate(LIMIT)?;
        ensure!(code == 0, "exit code {code}");
        agent.start()?;
        poll_slowly("the node to run again", LIMIT, || {
            (agent.status().ok()?["phase"] == "running").then_some(())
        })?;
    }
    Ok(())
}

fn check_rotation(node: Option<&Path>) -> Result<()> {
    let mut running = FormedCluster::start(Network::loopback(4), 3, node)?;
    let client = running.etcdctl()?;
    let first: Result<Vec<String>> = running.agents.iter().map(certificates).collect();
    let first = first?;
    let old = copy_of(&running, &client, "old-credentials")?;

    expect_step(&running, "begin")?;
    wait_trusted_cas(&running, 2)?;
    if node.is_some() {
        let refused = rotate_too_early(&running)?;
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        ensure!(text.contains("stock etcd has to be restarted"), "{text}");
        let status = running.agents[0].status()?;
        ensure!(status["restart_wanted"].is_string(), "{status}");
        restart_each(&mut running)?;
    }
    renew_credentials(&running, &client)?;
    check_each_serves(&running, &client)?;

    expect_step(&running, "switch")?;
    check_each_serves(&running, &client)?;
    // The third step, `end`, waits until all members have new certificates. So they have them now.
    expect_step(&running, "end")?;
    for (agent, first) in running.agents.iter().zip(&first) {
        ensure!(certificates(agent)? != *first);
    }
    wait_trusted_cas(&running, 1)?;
    if node.is_some() {
        restart_each(&mut running)?;
    }
    renew_credentials(&running, &client)?;
    check_each_serves(&running, &client)?;
    // The client's own certificate is from the old CA. It gets the new CA file, so that it accepts
    // the members. The members must refuse it nevertheless.
    fs_err::copy(client.credentials().join("ca.crt"), old.credentials().join("ca.crt"))?;
    poll_slowly("the members to refuse a certificate of the old CA", LIMIT, || {
        old.run(&["get", "k"]).is_err().then_some(())
    })?;

    let fourth = running.newcomer(3, &[])?;
    running.wait_voter(&fourth, 4)?;
    // After the restarts all connections are new. Everything must work under the new CAs alone.
    restart_each(&mut running)?;
    check_each_serves(&running, &client)
}

#[test]
fn the_cas_of_a_running_cluster_are_replaced() -> Result<()> {
    check_rotation(None)
}

#[test]
fn the_cas_of_a_cluster_of_stock_etcd_are_replaced() -> Result<()> {
    stock_etcd::oldest().map_or(Ok(()), |etcd| check_rotation(Some(&etcd)))
}

#[test]
fn a_replacement_of_the_cas_waits_for_a_member_that_is_away_and_is_taken_back() -> Result<()> {
    let mut running = FormedCluster::start(Network::loopback(3), 3, None)?;
    let client = running.etcdctl()?;
    let first = certificates(&running.agents[0])?;
    let away = running.agents[2].status()?["name"].as_str().context("a name")?.to_owned();
    running.agents[2].terminate(LIMIT)?;
    expect_step(&running, "begin")?;
    let refused = rotate_too_early(&running)?;
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(text.contains(away.as_str()) && text.contains("--force"), "{text}");

    // The other two members go on without the third. It comes back after the others have new
    // certificates.
    let forced = rotate(&running, &["--step", "2", "--force"])?;
    ensure!(forced["step"] == "switch", "{forced}");
    wait_for("the others to have new certificates", LIMIT, || {
        (certificates(&running.agents[0]).ok()? != first).then_some(())
    })?;
    running.agents[2].start()?;
    renew_credentials(&running, &client)?;
    check_each_serves(&running, &client)?;

    let back = rotate(&running, &["--cancel"])?;
    ensure!(back["step"] == "switch", "{back}");
    let repeated = rotate(&running, &["--cancel"])?;
    ensure!(repeated["taken"] == false, "{repeated}");
    let dropped = rotate(&running, &["--cancel", "--step", "1"])?;
    ensure!(dropped["step"] == "end", "{dropped}");
    wait_trusted_cas(&running, 1)?;
    renew_credentials(&running, &client)?;
    check_each_serves(&running, &client)?;
    let nothing = rotate(&running, &["--cancel"])?;
    ensure!(nothing["taken"] == false, "{nothing}");
    Ok(())
}

#[test]
fn a_member_that_missed_a_whole_replacement_comes_back_without_the_service() -> Result<()> {
    let mut running = FormedCluster::start(Network::loopback(3), 3, None)?;
    let client = running.etcdctl()?;
    let list = running.run_member_json(&running.agents[0], &["list"])?;
    running.agents[2].terminate(LIMIT)?;
    let others = &running.agents[..2];
    let first: Result<Vec<String>> = others.iter().map(certificates).collect();
    let first = first?;
    let wait = |what: &str, is_done: &dyn Fn(usize) -> Option<bool>| {
        wait_for(what, LIMIT, || (0..2).all(|other| is_done(other) == Some(true)).then_some(()))
    };
    rotate(&running, &["--step", "1", "--force"])?;
    wait("both CAs to be trusted", &|other| Some(trusted_cas(&others[other]).ok()? == 2))?;
    rotate(&running, &["--step", "2", "--force"])?;
    wait("new certificates", &|other| Some(certificates(&others[other]).ok()? != first[other]))?;
    rotate(&running, &["--step", "3", "--force"])?;
    wait("the new CA alone", &|other| Some(trusted_cas(&others[other]).ok()? == 1))?;
    renew_credentials(&running, &client)?;
    let export = running.testbed.path("demo.export");
    running.testbed.admin_command(&["cluster", "export", "demo", "--out", path_text(&export)?])?;
    running.testbed.kill_discovery();

    let files = ["statements.json", "peer.crt", "client.crt"];
    bring_issued_files(&running, &export, &running.agents[2], &list, &files)?;
    running.agents[2].start()?;
    check_each_serves(&running, &client)
}

#[test]
fn a_service_restored_from_before_a_replacement_gets_the_statements_back_and_replaces_the_cas_again()
-> Result<()> {
    let mut running = FormedCluster::start(Network::loopback(3), 3, None)?;
    let client = running.etcdctl()?;
    let backups = back_up(&running)?;
    for step in ["begin", "switch", "end"] {
        renew_credentials(&running, &client)?;
        expect_step(&running, step)?;
    }
    wait_trusted_cas(&running, 1)?;
    let certificate = certificates(&running.agents[0])?;
    let port = running.testbed.options.ports[0];
    lose_and_restore(&mut running, &backups, port)?;
    // The service's backup has neither the newest statements nor the keys of the new CAs. Agents
    // send it the statements. It must not issue certificates by the old CAs, which nobody trusts
    // any more.
    let out = running.testbed.path("of-a-restored-service");
    let wanted = ["cluster", "credentials", "demo", "--renew", "--yes", "--out", path_text(&out)?];
    poll_slowly("the service to know the newest statements", REPORT_LIMIT, || {
        let output = running.testbed.admin_output(&wanted).ok()?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        text.contains("from before they were replaced").then_some(())
    })
    .with_context(|| last_lines(&running.agents[0].output(), 25))?;

    let begun = rotate(&running, &["--step", "1", "--again"])?;
    ensure!(begun["taken"] == true, "{begun}");
    for step in ["switch", "end"] {
        expect_step(&running, step)?;
    }
    ensure!(certificates(&running.agents[0])? != certificate);
    renew_credentials(&running, &client)?;
    check_each_serves(&running, &client)
}

/// A restored service has lost a statement. Before any agent shows it that statement, an owner
/// signs another one. Each agent sends the service its own branch of the chain, so that a person
/// can repair the split.
#[test]
fn agents_show_a_restored_service_the_statement_that_its_own_one_contradicts() -> Result<()> {
    let mut running = FormedCluster::start(Network::loopback(3), 3, None)?;
    let backups = back_up(&running)?;
    rotate(&running, &["--step", "1"])?;
    wait_trusted_cas(&running, 2)?;
    let (mut names, mut trusted) = (Vec::new(), Vec::new());
    for agent in &mut running.agents {
        trusted.push(trusted_bundle(agent)?);
        names.push(agent.status()?["name"].as_str().context("a name")?.to_owned());
        agent.terminate(LIMIT)?;
    }
    let port = running.testbed.options.ports[0];
    lose_and_restore(&mut running, &backups, port)?;
    let signed = rotate(&running, &["--step", "1"])?;
    ensure!(signed["taken"] == true && signed["seq"] == 1, "{signed}");
    for agent in &mut running.agents {
        agent.start()?;
    }
    poll_slowly("the service to know each agent's branch", REPORT_LIMIT, || {
        let explained = running.testbed.admin_json(&["cluster", "explain", "demo"]).ok()?;
        let lines = explained["explain"].as_array()?;
        let split = lines.iter().find(|line| line["code"] == "statements_split")?;
        let text = split["missing"].as_str()?;
        names.iter().all(|name| text.contains(name.as_str())).then_some(())
    })
    .with_context(|| {
        let explained = running.testbed.admin_command(&["cluster", "explain", "demo"]);
        format!("{explained:?}\n{}", last_lines(&running.agents[0].output(), 25))
    })?;
    // The members still trust the CAs of the statement that they followed before the restore. The
    // contradicting statement changed nothing.
    for (agent, trusted) in running.agents.iter().zip(&trusted) {
        ensure!(trusted_bundle(agent)? == *trusted, "{}", last_lines(&agent.output(), 25));
    }
    Ok(())
}
