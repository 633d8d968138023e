//! A discovery service that moves to another URL, or gets another TLS key. The agents find it by an
//! owner's service statement, whether from discovery, from their cluster's store, or from a file.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use discovery_types::digest::Digest;
use discovery_types::jws::Jws;
use discovery_types::key::SigningKey;
use discovery_types::service::{SERVICE_WORD, ServiceStatement};
use muster_tests::harness::formed_cluster::{FormedCluster, LIMIT};
use muster_tests::harness::process::last_lines;
use muster_tests::harness::programs::program_path;
use muster_tests::harness::testbed::path_text;
use muster_tests::harness::{AgentProcess, Network, poll_slowly};
use serde_json::Value;
use uuid::Uuid;

/// Port of the service after its move.
pub(crate) const NEW_PORT: u16 = 8444;
/// Key of the service statement in the cluster's own store.
const SERVICE: &str = "muster/v1/service";
/// Text that an agent logs once for each outage of discovery.
const LOST: &str = "The node and this agent go on";

/// Steps of the tests whose service moves, on a running cluster.
pub(crate) trait ServiceMoves {
    /// Returns the words of the admin's context line.
    fn context(&self) -> Result<String>;
    /// Replaces the admin's context by this line.
    fn use_context(&self, line: &str) -> Result<()>;
    /// Stops the service and starts it at another port, with the same keys, Postgres and ledger.
    fn move_service(&mut self) -> Result<()>;
    /// Announces the service's address to all clusters. Returns the statement's sequence number.
    fn announce(&self, more: &[&str]) -> Result<u64>;
    /// Signs a service statement of this cluster, without sending it.
    fn forge(&self, sequence: u64, key: &SigningKey) -> Result<Jws>;
    /// Runs `context set` on an agent's host with one statement.
    fn set_context(&self, agent: &AgentProcess, jws: &Jws) -> Result<Output>;
    /// Returns the service statement in the cluster's own store.
    fn stored_service(&self) -> Result<String>;
}

impl ServiceMoves for FormedCluster {
    fn context(&self) -> Result<String> {
        let shown = self.testbed.admin_json(&["context", "show"])?;
        Ok(shown["line"].as_str().context("a line")?.to_owned())
    }

    fn use_context(&self, line: &str) -> Result<()> {
        self.testbed.admin_command(&["context", "add", line, "--replace"]).map(drop)
    }

    fn move_service(&mut self) -> Result<()> {
        self.testbed.stop_discovery()?;
        let old = format!(":{}", self.testbed.options.ports[0]);
        self.use_context(&self.context()?.replace(&old, &format!(":{NEW_PORT}")))?;
        self.testbed.options.ports = vec![NEW_PORT];
        self.testbed.start_discovery()
    }

    fn announce(&self, more: &[&str]) -> Result<u64> {
        let all = self.testbed.admin_json(&[&["service", "announce", "--all"], more].concat())?;
        ensure!(all[0]["is_new"] == true, "{all}");
        all[0]["sequence"].as_u64().with_context(|| format!("a number: {all}"))
    }

    fn forge(&self, sequence: u64, key: &SigningKey) -> Result<Jws> {
        let shown = self.testbed.admin_json(&["cluster", "show", "demo"])?;
        let cluster = shown["cluster"].as_str().context("an id")?.parse()?;
        Ok(service_statement(cluster, sequence)?.sign(key))
    }

    fn set_context(&self, agent: &AgentProcess, jws: &Jws) -> Result<Output> {
        let file = self.testbed.path("forged.service");
        fs_err::write(&file, format!("{SERVICE_WORD} {jws}\n"))?;
        context_set(agent, &file)
    }

    fn stored_service(&self) -> Result<String> {
        let stored = self.etcdctl()?.run(&["get", SERVICE, "--print-value-only"])?;
        Ok(stored.trim().to_owned())
    }
}

fn service_statement(cluster: Uuid, sequence: u64) -> Result<ServiceStatement> {
    Ok(ServiceStatement {
        version: 1,
        cluster,
        sequence,
        urls: vec!["https://127.0.0.1:9".parse()?],
        pins: vec![Digest::of(b"a key")],
        issued_at: 1_700_000_000,
    })
}

pub(crate) fn context_set(agent: &AgentProcess, file: &Path) -> Result<Output> {
    let mut command = Command::new(program_path("muster-agent")?);
    command.args(["context", "set", path_text(file)?]);
    command.args(["--data-dir", path_text(&agent.data_dir)?]);
    command.output().context("muster-agent context set")
}

/// Waits until the agent's status fulfils `done`.
fn wait_status(what: &str, agent: &AgentProcess, done: impl Fn(&Value) -> bool) -> Result<()> {
    poll_slowly(&format!("{}: {what}", agent.host.name), LIMIT, || {
        agent.status().ok().filter(&done).map(drop)
    })
    .with_context(|| format!("{:?}\n{}", agent.status(), last_lines(&agent.output(), 30)))
}

pub(crate) fn wait_follows(agent: &AgentProcess, sequence: u64) -> Result<()> {
    wait_status("to follow the announcement", agent, |status| {
        status["service_statement"] == sequence && status["discovery_unreachable"].is_null()
    })
}

pub(crate) fn wait_lost(agent: &AgentProcess) -> Result<()> {
    wait_status("to miss discovery", agent, |status| {
        status["discovery_unreachable"]["since"].is_string()
    })
}

fn count(agent: &AgentProcess, text: &str) -> usize {
    agent.output().matches(text).count()
}

#[test]
fn agents_find_a_service_that_moved_by_one_hosts_file_and_the_clusters_store() -> Result<()> {
    let mut running = FormedCluster::start(Network::loopback(4), 3, None)?;
    running.move_service()?;
    for agent in &running.agents {
        wait_lost(agent)?;
    }
    let etcdctl = running.etcdctl()?;
    etcdctl.run(&["put", "k", "v"]).context("the nodes go on")?;
    // A client that writes to the store can't redirect the agents, because only an owner's
    // signature counts.
    let forged = running.forge(u64::MAX / 2, &SigningKey::generate())?;
    etcdctl.run(&["put", SERVICE, forged.as_str()])?;

    let file = running.testbed.path("demo.service");
    let sequence = running.announce(&["--out", path_text(&file)?])?;
    let told = context_set(&running.agents[0], &file)?;
    ensure!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
    ensure!(String::from_utf8_lossy(&told.stdout).contains("takes it within"), "{told:?}");
    for agent in &running.agents {
        wait_follows(agent, sequence)?;
        ensure!(count(agent, LOST) == 1, "{}", last_lines(&agent.output(), 40));
        ensure!(count(agent, "discovery answers again") == 1, "{}", agent.output());
    }
    let line = fs_err::read_to_string(&file)?;
    ensure!(line.trim().ends_with(&running.stored_service()?), "{line}");

    // A restarted agent finds the service at its new URL at once.
    let agent = &mut running.agents[1];
    agent.kill();
    agent.start()?;
    wait_follows(agent, sequence)?;
    // A bundle that is made after the move contains the new URL. Hosts that join later use such
    // bundles.
    let newcomer = running.newcomer(3, &[])?;
    running.wait_voter(&newcomer, 4)?;
    wait_follows(&newcomer, sequence)
}

#[test]
fn service_statements_without_a_current_owners_signature_are_refused() -> Result<()> {
    let mut running = FormedCluster::start(Network::loopback(1), 1, None)?;
    let (owner, issuer) =
        (SigningKey::load(&running.testbed.admin_key())?, running.testbed.path("ian.pem"));
    let made = running.testbed.admin_command(&["key", "new", "--out", path_text(&issuer)?]);
    made.context("a key")?;
    let public = fs_err::read_to_string(issuer.with_extension("pub"))?;
    let add = ["admin", "add", "ian", public.trim(), "--role", "issuer"];
    running.testbed.admin_command(&add)?;
    running.testbed.admin_command(&["cluster", "restate", "demo"])?;
    let sequence = running.announce(&[])?;
    wait_follows(&running.agents[0], sequence)?;

    let refused = |jws: &Jws, why: &str| -> Result<()> {
        let told = running.set_context(&running.agents[0], jws)?;
        let error = String::from_utf8_lossy(&told.stderr);
        ensure!(told.status.code() == Some(1) && error.contains(why), "{why}: {error}");
        Ok(())
    };
    let (issuer, later) = (SigningKey::load(&issuer)?, sequence + 1);
    refused(&running.forge(later, &SigningKey::generate())?, "may not sign this")?;
    refused(&running.forge(later, &issuer)?, "may not sign this")?;
    refused(&running.forge(sequence - 1, &owner)?, "follows another one with the number")?;
    refused(&running.forge(sequence, &owner)?, "follows another one with the number")?;
    let elsewhere = service_statement(Uuid::now_v7(), later)?.sign(&owner);
    refused(&elsewhere, "no line is of the cluster")?;

    // The running agent also refuses such statements in the store, and writes back the one that it
    // knows.
    let known = running.stored_service()?;
    running.testbed.stop_discovery()?;
    wait_lost(&running.agents[0])?;
    let etcdctl = running.etcdctl()?;
    for forged in [
        service_statement(Uuid::now_v7(), later)?.sign(&owner),
        service_statement(Uuid::now_v7(), later)?.sign(&issuer),
    ] {
        etcdctl.run(&["put", SERVICE, forged.as_str()])?;
        poll_slowly("the stored statement to be put back", LIMIT, || {
            running.stored_service().ok().filter(|stored| *stored == known)
        })
        .with_context(|| last_lines(&running.agents[0].output(), 30))?;
    }
    ensure!(running.agents[0].status()?["service_statement"] == sequence);
    running.testbed.start_discovery()?;
    wait_follows(&running.agents[0], sequence)
}

#[test]
fn announcing_to_all_clusters_goes_on_after_one_that_fails_and_names_it() -> Result<()> {
    let running = FormedCluster::start(Network::loopback(2), 1, None)?;
    let bundle = running.testbed.create_cluster_with_token("other", 1)?;
    let mut other = running.agent(1, &bundle, &[]);
    other.start()?;
    running.testbed.wait_cluster_state("other", "formed", LIMIT)?;
    // Eve is an owner only in the statement of the cluster `demo`.
    let key = running.testbed.path("eve.pem");
    running.testbed.admin_command(&["key", "new", "--out", path_text(&key)?])?;
    let public = fs_err::read_to_string(key.with_extension("pub"))?;
    running.testbed.admin_command(&["admin", "add", "eve", public.trim(), "--role", "owner"])?;
    running.testbed.admin_command(&["cluster", "restate", "demo"])?;

    let file = running.testbed.path("all.service");
    let all = ["service", "announce", "--all", "--out", path_text(&file)?, "--json"];
    let told = running.testbed.admin_output(&[&all[..], &["--key", path_text(&key)?]].concat())?;
    let error = String::from_utf8_lossy(&told.stderr).into_owned();
    ensure!(told.status.code() == Some(1), "{error}");
    ensure!(error.contains("nothing was announced to cluster other: your key"), "{error}");
    let done: Value = serde_json::from_slice(&told.stdout)?;
    ensure!(done[0]["name"] == "demo" && done[1].is_null(), "{done}");
    ensure!(fs_err::read_to_string(&file)?.lines().count() == 1);
    let sequence = done[0]["sequence"].as_u64().context("a number")?;
    wait_follows(&running.agents[0], sequence)?;

    let rest = running.testbed.admin_json(&["service", "announce", "--all"])?;
    let clusters = rest.as_array().context("a list")?;
    let is_new = |name: &str| {
        let found = clusters.iter().find(|cluster| cluster["name"] == name);
        found.map(|found| found["is_new"] == true)
    };
    ensure!((is_new("demo"), is_new("other")) == (Some(false), Some(true)), "{rest}");
    let shown = running.testbed.admin_json(&["service", "show", "other"])?;
    wait_follows(&other, shown["sequence"].as_u64().context("a number")?)
}

/// Makes a TLS key and its certificate in the service's key directory, beside those in use. Returns
/// their paths and the key's pin.
fn make_tls_key(running: &FormedCluster) -> Result<([PathBuf; 2], Digest)> {
    let keys = running.testbed.keys_dir();
    let files = [keys.join("tls.key.new"), keys.join("tls.crt.new")];
    let curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"];
    let output = Command::new("openssl")
        .args(["req", "-x509", "-subj", "/CN=muster-discovery", "-days", "36500"])
        .args(curve)
        .args(["-keyout", path_text(&files[0])?, "-out", path_text(&files[1])?])
        .output()
        .context("openssl")?;
    ensure!(output.status.success(), "openssl: {}", String::from_utf8_lossy(&output.stderr));
    let pem = fs_err::read_to_string(&files[1])?;
    use rustls::pki_types::{CertificateDer, pem::PemObject};
    let certificate = CertificateDer::from_pem_slice(pem.as_bytes())?;
    Ok((files, discovery_types::tls::spki_hash(&certificate)?))
}

#[test]
fn the_service_changes_its_tls_key_while_agents_know_the_old_and_the_new_one() -> Result<()> {
    let mut running = FormedCluster::start(Network::loopback(2), 1, None)?;
    let (files, pin) = make_tls_key(&running)?;
    let old = running.context()?;
    let (before, rest) = old.split_once("pins=").context("pins")?;
    let (old_pin, owners) = rest.split_once(' ').context("owners")?;
    let with_pins = |pins: &str| format!("{before}pins={pins} {owners}");

    let both = with_pins(&format!("{old_pin},{pin}"));
    let sequence = running.announce(&["--to", &both])?;
    wait_follows(&running.agents[0], sequence)?;
    let keys = running.testbed.keys_dir();
    for name in ["tls.key", "tls.crt"] {
        fs_err::copy(keys.join(name), keys.join(format!("{name}.old")))?;
    }
    let replace_with = |files: &[PathBuf; 2]| -> Result<()> {
        fs_err::copy(&files[0], keys.join("tls.key"))?;
        fs_err::copy(&files[1], keys.join("tls.crt"))?;
        Ok(())
    };
    running.testbed.stop_discovery()?;
    wait_lost(&running.agents[0])?;
    replace_with(&files)?;
    running.use_context(&with_pins(&pin.to_string()))?;
    running.testbed.start_discovery()?;
    wait_follows(&running.agents[0], sequence)?;
    let last = running.announce(&[])?;
    wait_follows(&running.agents[0], last)?;
    let newcomer = running.newcomer(1, &[])?;
    running.wait_voter(&newcomer, 2)?;
    wait_follows(&newcomer, last)?;

    // No agent trusts the old key any more, not even at the URL in its bundle.
    running.testbed.stop_discovery()?;
    replace_with(&["tls.key", "tls.crt"].map(|name| keys.join(format!("{name}.old"))))?;
    running.use_context(&old)?;
    running.testbed.start_discovery()?;
    wait_status("to refuse the old key", &running.agents[0], |status| {
        let error = status["discovery_unreachable"]["error"].as_str().unwrap_or_default();
        error.contains("which is not the pinned one")
    })
}
