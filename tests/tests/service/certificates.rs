//! Members' certificates: renewed while the cluster runs, or issued by hand without the service.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::formed_cluster::{FormedCluster, LIMIT};
use muster_tests::harness::process::last_lines;
use muster_tests::harness::programs::program_path;
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{AgentProcess, Network, NodeProcess, Testbed, poll_slowly, wait_for};
use muster_tests::stock_etcd;
use serde_json::Value;

/// Lifetime of members' certificates in these tests, in seconds.
const CERTIFICATE_LIFETIME: &str = "12";

fn start_with_short_lived_certificates(hosts: u8, node: Option<&Path>) -> Result<FormedCluster> {
    let options = TestbedOptions {
        serve_env: vec![("MUSTER_MEMBER_LIFE".to_owned(), CERTIFICATE_LIFETIME.to_owned())],
        ..TestbedOptions::default()
    };
    FormedCluster::form(Testbed::start(Network::loopback(hosts), options)?, 3, node)
}

/// Returns the end of validity of the member's certificates, as the agent reports it. The time is
/// in RFC 3339 format, so later times compare greater.
fn certificate_end(agent: &AgentProcess) -> Result<String> {
    let status = agent.status()?;
    Ok(status["certificates_until"].as_str().context("certificates")?.to_owned())
}

fn check_each_serves(running: &FormedCluster) -> Result<()> {
    for host in running.founders() {
        let own = running.etcdctl()?.with_endpoint(host);
        poll_slowly(&format!("{} to serve", host.name), LIMIT, || {
            own.run(&["put", "k", "v"]).ok()
        })?;
    }
    Ok(())
}

fn check_renewal(node: Option<&Path>) -> Result<()> {
    let mut running = start_with_short_lived_certificates(3, node)?;
    let first: Result<Vec<String>> = running.agents.iter().map(certificate_end).collect();
    let first = first?;
    // Sleep for the lifetime of the first certificates, which have then expired.
    std::thread::sleep(Duration::from_secs(CERTIFICATE_LIFETIME.parse()?));
    for (agent, first) in running.agents.iter().zip(&first) {
        wait_for("the certificates to be renewed", LIMIT, || {
            let later = certificate_end(agent).is_ok_and(|until| until > *first);
            (later && agent.output().contains("the certificates are renewed")).then_some(())
        })
        .with_context(|| last_lines(&agent.output(), 25))?;
    }
    check_each_serves(&running)?;
    // Restart nodes and agents, because only connections that begin now must use the new
    // certificates.
    for agent in &mut running.agents {
        let old = agent.node_pid().context("a node")?;
        agent.kill_node()?;
        agent.wait_new_node(old, LIMIT)?;
        agent.kill();
        agent.start()?;
    }
    check_each_serves(&running)
}

#[test]
fn members_go_on_while_their_certificates_are_renewed() -> Result<()> {
    check_renewal(None)
}

#[test]
fn members_that_run_etcd_go_on_while_their_certificates_are_renewed() -> Result<()> {
    stock_etcd::oldest().map_or(Ok(()), |etcd| check_renewal(Some(&etcd)))
}

fn openssl(args: &[&str]) -> Result<()> {
    let output = Command::new("openssl").args(args).output().context("openssl")?;
    ensure!(output.status.success(), "openssl: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Runs `ca issue` for a member, with the key in `csr`. Returns the folder of the issued files.
fn issue(running: &FormedCluster, export: &Path, csr: &Path, member: &Value) -> Result<PathBuf> {
    let id = member["id"].as_str().context("an id")?;
    let peer = member["peer_urls"][0].as_str().context("a peer URL")?;
    let client = peer.replace(":2380", ":2379");
    let out = running.testbed.path(&format!("issued-{id}"));
    let (export, csr) = (path_text(export)?, path_text(csr)?);
    let keys = running.testbed.keys_dir();
    let what = ["ca", "issue", "--export", export, "--keys", path_text(&keys)?, "--csr", csr];
    let whose = ["--member", id, "--peer-url", peer, "--client-url", &client];
    running.testbed.admin_command(&[&what[..], &whose, &["--out", path_text(&out)?]].concat())?;
    Ok(out)
}

fn member_of<'a>(list: &'a Value, agent: &AgentProcess) -> Result<&'a Value> {
    let url = muster_tests::harness::formed_cluster::peer_url(agent);
    let members = list["members"].as_array().context("members")?;
    members.iter().find(|member| member["peer_urls"][0] == url.as_str()).context("a member")
}

/// Runs `ca issue` for the member of `agent`, with that member's own key. `list` is the member
/// list. Copies the issued files that `files` names to the directory from which the agent takes
/// them at its next start.
pub(crate) fn bring_issued_files(
    running: &FormedCluster,
    export: &Path,
    agent: &AgentProcess,
    list: &Value,
    files: &[&str],
) -> Result<()> {
    let tls = agent.data_dir.join("agent/tls");
    let (csr, key) = (agent.data_dir.join("node.csr"), tls.join("node.key"));
    let (key, out) = (path_text(&key)?, path_text(&csr)?);
    openssl(&["req", "-new", "-key", key, "-subj", "/", "-out", out])?;
    let issued = issue(running, export, &csr, member_of(list, agent)?)?;
    for file in files {
        fs_err::copy(issued.join(file), tls.join(file))?;
    }
    Ok(())
}

#[test]
fn without_a_service_a_person_makes_the_certificates_of_old_and_new_members() -> Result<()> {
    let mut running = start_with_short_lived_certificates(4, None)?;
    let export = running.testbed.path("demo.export");
    running.testbed.admin_command(&["cluster", "export", "demo", "--out", path_text(&export)?])?;
    let list = running.run_member_json(&running.agents[0], &["list"])?;
    let etcdctl = running.etcdctl()?;
    running.testbed.kill_discovery();

    // Wait until the certificates have expired, the agents report that, and clients are refused.
    poll_slowly("the certificates to expire", LIMIT, || {
        let late = running.agents.iter().all(|agent| {
            agent.status().is_ok_and(|status| status["certificates_late"].is_string())
        });
        (late && etcdctl.run(&["get", "k"]).is_err()).then_some(())
    })?;
    let over = certificate_end(&running.agents[0])?;
    for agent in &running.agents {
        bring_issued_files(&running, &export, agent, &list, &["peer.crt", "client.crt"])?;
    }
    for agent in &mut running.agents {
        agent.kill();
        agent.start()?;
    }
    check_each_serves(&running)?;
    for agent in &running.agents {
        poll_slowly("the agent to show the new end", LIMIT, || {
            let status = agent.status().ok()?;
            let longer = status["certificates_until"].as_str()? > over.as_str();
            (longer && status["certificates_late"].is_null()).then_some(())
        })?;
    }
    add_host_by_hand(&running, &export)
}

/// Adds a host without discovery and without an agent.
fn add_host_by_hand(running: &FormedCluster, export: &Path) -> Result<()> {
    let host = running.testbed.network.hosts[3].clone();
    let (key, csr) = (running.testbed.path("new.key"), running.testbed.path("new.csr"));
    let curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/"];
    let files = ["-keyout", path_text(&key)?, "-out", path_text(&csr)?];
    openssl(&[&["req", "-new"][..], &curve, &files].concat())?;
    let url = format!("https://{}:2380", host.address);
    let founder = &running.agents[0];
    let added = running.run_member_json(founder, &["add", "db-new", "--peer-urls", &url])?;
    let member = serde_json::json!({ "id": added["member_id"], "peer_urls": [url] });
    let issued = issue(running, export, &csr, &member)?;
    let mut node = NodeProcess::new(
        &host,
        "by-hand",
        &program_path("muster-node")?,
        &running.testbed.path(""),
    );
    let file = |name: &str| issued.join(name).display().to_string();
    let client = format!("https://{}:2379", host.address);
    node.flags = vec![
        format!("--data-dir={}", node.data_dir.display()),
        format!("--listen-peer-urls={url}"),
        format!("--listen-client-urls={client}"),
        format!("--advertise-client-urls={client}"),
        format!("--key-file={}", key.display()),
        format!("--cert-file={}", file("client.crt")),
        format!("--trusted-ca-file={}", file("client-ca.crt")),
        format!("--peer-key-file={}", key.display()),
        format!("--peer-cert-file={}", file("peer.crt")),
        format!("--peer-trusted-ca-file={}", file("peer-ca.crt")),
        "--client-cert-auth".to_owned(),
        "--peer-client-cert-auth".to_owned(),
    ];
    let environment = added["environment"].as_object().context("the new node's environment")?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    node.env = environment.iter().map(|(name, value)| (name.clone(), text(value))).collect();
    node.start()?;
    let id = added["member_id"].as_str().context("an id")?;
    running
        .run_member_json(founder, &["promote", id, "--patience", "90"])
        .with_context(|| node.output())?;
    let own = running.etcdctl()?.with_endpoint(&host);
    poll_slowly("the newcomer to serve", LIMIT, || own.run(&["put", "k", "by hand"]).ok())?;
    ensure!(node.stop(LIMIT)? == 0, "{}", node.output());
    Ok(())
}
