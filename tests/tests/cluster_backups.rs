//! Scheduled backups of a cluster, and `muster-agent backup`. Other agents verify and restore the
//! backups that one agent has saved, and continue the schedule.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use muster_tests::client::{self, EtcdClient};
use muster_tests::harness::agents::AgentOptions;
use muster_tests::harness::nodes::client_url;
use muster_tests::harness::programs::program_path;
use muster_tests::harness::s3::{self, S3Gateway, SECRET_KEY, write_access_key};
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{
    AgentProcess, Etcdctl, Network, NodeProcess, RetryingWriter, TestHost, Testbed, poll_slowly,
    skip, wait_for,
};
use muster_tests::stock_etcd;
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(120);
/// Shortest interval between backups.
const EVERY: [&str; 2] = ["--backup-every", "10s"];

/// A key pair of age, whose private key is in a file.
struct AgeKey {
    file: PathBuf,
    recipient: String,
}

impl AgeKey {
    /// Makes a key pair. Without age, records that the test is skipped and returns `None`.
    fn make(file: PathBuf) -> Result<Option<Self>> {
        let run = |args: &[&str]| Command::new("age-keygen").args(args).output();
        if run(&["-o", path_text(&file)?]).is_err() {
            skip::report_missing_program("age-keygen");
            return Ok(None);
        }
        let printed = run(&["-y", path_text(&file)?])?.stdout;
        Ok(Some(Self { file, recipient: String::from_utf8(printed)?.trim().to_owned() }))
    }
}

/// `muster-agent backup` with the flags of a store.
struct BackupTool {
    flags: Vec<String>,
    /// Data directory of the agent on the same host. A folder that doesn't exist stands for a host
    /// without an agent.
    data_dir: PathBuf,
}

impl BackupTool {
    fn new(flags: &[String]) -> Self {
        // Ignore the state of an agent that happens to run on this machine.
        Self { flags: flags.to_vec(), data_dir: "/nonexistent".into() }
    }

    /// Returns the tool on the host of an agent.
    fn on_host_of(&self, agent: &AgentProcess) -> Self {
        Self { flags: self.flags.clone(), data_dir: agent.data_dir.clone() }
    }

    fn output(&self, args: &[&str]) -> Result<Output> {
        let mut command = Command::new(program_path("muster-agent")?);
        command.args(["backup", "--data-dir", path_text(&self.data_dir)?]);
        command.args(args).args(&self.flags);
        command.output().with_context(|| format!("backup {args:?}"))
    }

    fn run(&self, args: &[&str]) -> Result<String> {
        let output = self.output(args)?;
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "backup {args:?}: {} {error}", output.status);
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Runs a command that must fail with this exit code, and returns all of its output.
    fn fail(&self, args: &[&str], code: i32) -> Result<String> {
        let output = self.output(args)?;
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        ensure!(output.status.code() == Some(code), "backup {args:?}: {} {said}", output.status);
        Ok(said)
    }

    fn json(&self, args: &[&str]) -> Result<Value> {
        Ok(serde_json::from_str(&self.run(&[args, &["--json"]].concat())?)?)
    }

    /// Returns the manifests in the store, oldest first.
    fn manifests(&self) -> Result<Vec<Value>> {
        let listed = self.json(&["list"])?;
        let listed = listed.as_array().context("a list")?;
        listed.iter().for_each(|backup| assert!(backup["problem"].is_null(), "{backup}"));
        Ok(listed.iter().map(|backup| backup["manifest"].clone()).collect())
    }

    /// Waits for a backup that `is_wanted` accepts, and returns its manifest.
    fn wait_for(&self, what: &str, is_wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        let mut last = String::new();
        poll_slowly(what, LIMIT, || {
            let manifests = self.manifests();
            last = format!("{manifests:?}");
            manifests.ok()?.into_iter().rev().find(&is_wanted)
        })
        .context(last)
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn directory_flags(folder: &Path) -> Result<Vec<String>> {
    Ok(vec!["--backup-to".to_owned(), path_text(folder)?.to_owned()])
}

fn owned(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// Starts a cluster `demo` of `size` agents with these flags, and writes a key.
fn form(testbed: &Testbed, size: usize, args: &[String]) -> Result<(Vec<AgentProcess>, Etcdctl)> {
    let bundle = testbed.create_cluster_with_token("demo", size)?;
    let mut agents = Vec::new();
    for host in 0..size {
        let options = AgentOptions { args: args.to_vec(), ..AgentOptions::default() };
        let mut agent = testbed.agent_with(host, &bundle, options);
        agent.start()?;
        agents.push(agent);
    }
    testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let hosts: Vec<&TestHost> = agents.iter().map(|agent| &agent.host).collect();
    let etcdctl = testbed.etcdctl("demo", &hosts)?;
    poll_slowly("a first write", LIMIT, || etcdctl.run(&["put", "first", "1"]).ok())?;
    Ok((agents, etcdctl))
}

/// Returns all keys and values at a revision.
fn keys_at(etcdctl: &Etcdctl, revision: &str) -> Result<String> {
    etcdctl.run(&["get", "", "--prefix", "--rev", revision])
}

/// Makes a cluster of one member from a snapshot, and returns its keys and values as etcdctl prints
/// them.
fn keys_of_restored(snapshot: &Path, folder: &Path, host: &TestHost) -> Result<String> {
    let program = program_path("muster-node")?;
    let mut node = NodeProcess::new(host, "restored", &program, folder);
    let peer = format!("http://{}:2380", host.address);
    let mut restore = host.command(&program);
    restore
        .args(["snapshot", "restore", path_text(snapshot)?, "--name", "restored"])
        .args(["--data-dir", path_text(&node.data_dir)?])
        .args(["--initial-cluster", &format!("restored={peer}")])
        .args(["--initial-advertise-peer-urls", &peer]);
    let output = restore.output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    node.flags.extend(owned(&["--name=restored", &format!("--initial-cluster=restored={peer}")]));
    node.start()?;
    node.wait_ready(LIMIT)?;
    let mut get = host.command("etcdctl");
    get.env("ETCDCTL_API", "3").args(["--endpoints", &client_url(host), "get", "", "--prefix"]);
    let output = get.output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

#[test]
fn backups_go_on_under_another_leader_and_each_one_can_be_restored() -> Result<()> {
    let testbed = Testbed::start(Network::loopback(4), TestbedOptions::default())?;
    let Some(key) = AgeKey::make(testbed.path("age-key.txt"))? else { return Ok(()) };
    let store = testbed.path("backups");
    let tool = BackupTool::new(&directory_flags(&store)?);
    let schedule = ["--backup-keep", "3", "--backup-recipient", &key.recipient];
    let args = [tool.flags.clone(), owned(&EVERY), owned(&schedule)].concat();
    let (mut agents, etcdctl) = form(&testbed, 3, &args)?;
    let urls = etcdctl.endpoints().to_vec();
    let tls = client::tls_from(etcdctl.credentials())?;
    let writer = RetryingWriter::start_with_tls(urls.clone(), Some(tls));

    let first = tool.wait_for("the first backup", |_| true)?;
    let folder = store.join(text(&first["cluster"]));
    // Add two files that a cleanup must keep: a foreign file and a recent incomplete file. Add an
    // old backup without a manifest, which the cleanup must remove.
    let old = folder.join("20200101T000000Z-r1-00000001.db.age");
    let others = [folder.join("README"), folder.join("20990101T000000Z-r1-00000001.db.part")];
    for file in others.iter().chain([&old]) {
        fs_err::write(file, "x")?;
    }
    let hosts: Vec<&TestHost> = agents.iter().map(|agent| &agent.host).collect();
    let leader = etcdctl.leader(&hosts).context("a leader")?;
    let mut dead = agents.remove(leader);
    dead.kill_node()?;
    dead.kill();
    let before = first["begun_at"].clone();
    let member = first["member"]["id"].clone();
    let next = tool.wait_for("a backup of another member", |manifest| {
        manifest["member"]["id"] != member && text(&manifest["begun_at"]) > text(&before)
    })?;
    let revision = next["snapshot"]["revision"].to_string();
    let expected = keys_at(&etcdctl, &revision)?;
    poll_slowly("old files to be removed, and no others", LIMIT, || {
        let count = tool.manifests().ok()?.len();
        (!old.exists() && (1..=3).contains(&count)).then_some(())
    })?;
    ensure!(others.iter().all(|file| file.exists()), "somebody else's file is gone");
    let name = text(&next["name"]).to_owned();
    let kept = testbed.path("kept.age");
    fs_err::copy(folder.join(text(&next["stored"]["file"])), &kept)?;

    let identity = ["--identity", path_text(&key.file)?];
    let verified = tool.run(&[&["verify", "--all"], &identity[..]].concat())?;
    ensure!(verified.lines().all(|line| line.starts_with("OK ")), "{verified}");
    let said = tool.fail(&["verify", "newest", "--drill"], 2)?;
    ensure!(said.contains("--identity") && said.contains(&key.recipient), "{said}");
    let drilled = tool.json(&[&["verify", "newest", "--drill"], &identity[..]].concat())?;
    let drilled = &drilled["backups"][0];
    ensure!(drilled["drill"]["keys"] == drilled["keys"] && drilled["keys"].is_u64(), "{drilled}");

    // age's own program decrypts what the agent has encrypted.
    let snapshot = testbed.path("restored.db");
    let decrypted = Command::new("age")
        .args(["--decrypt", "--identity", path_text(&key.file)?, "--output", path_text(&snapshot)?])
        .arg(&kept)
        .output()?;
    ensure!(decrypted.status.success(), "{}", String::from_utf8_lossy(&decrypted.stderr));
    let fourth = testbed.network.hosts[3].clone();
    let found = keys_of_restored(&snapshot, &testbed.path(""), &fourth)?;
    ensure!(found == expected && found.contains("first"), "{name}: {found} and {expected}");

    writer.stop_and_check(&client_of(&agents[0]))?;
    check_status_and_metrics(&agents[0])
}

fn client_of(agent: &AgentProcess) -> String {
    format!("https://{}:2379", agent.host.address)
}

fn check_status_and_metrics(agent: &AgentProcess) -> Result<()> {
    let status = agent.status()?;
    let backup = &status["backup"];
    ensure!(backup["every_seconds"] == 10 && backup["newest"]["name"].is_string(), "{backup}");
    let mut shown = agent.host.command(program_path("muster-agent")?);
    shown.args(["status", "--data-dir", path_text(&agent.data_dir)?]);
    let shown = String::from_utf8(shown.output()?.stdout)?;
    ensure!(shown.contains("\nbackup     ") && shown.contains("is the newest"), "{shown}");
    Ok(())
}

#[test]
fn a_damaged_backup_is_found_and_the_next_best_one_is_named() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let network = Network::loopback(1);
    let program = program_path("muster-node")?;
    let mut node = NodeProcess::new(&network.hosts[0], "single", &program, folder.path());
    let peer = format!("http://{}:2380", network.hosts[0].address);
    node.flags.extend(owned(&["--name=single", &format!("--initial-cluster=single={peer}")]));
    node.start()?;
    node.wait_ready(LIMIT)?;
    let url = client_url(&network.hosts[0]);
    let tool = BackupTool::new(&directory_flags(&folder.path().join("backups"))?);
    let save = |value: &str| -> Result<Value> {
        let mut put = Command::new("etcdctl");
        put.env("ETCDCTL_API", "3").args(["--endpoints", &url, "put", "k", value]);
        ensure!(put.output()?.status.success(), "no put");
        tool.json(&["run", "--endpoints", &url])
    };
    let manifests = [save("1")?, save("2")?, save("3")?];
    let name = |at: usize| text(&manifests[at]["name"]).to_owned();
    let stored = |at: usize, file: &str| {
        let folder = folder.path().join("backups").join(text(&manifests[at]["cluster"]));
        folder.join(file)
    };
    let data = stored(2, text(&manifests[2]["stored"]["file"]));

    // Flip a bit of a stored snapshot. The manifest still has the hash of the intact file.
    let mut bytes = fs_err::read(&data)?;
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs_err::write(&data, &bytes)?;
    let said = tool.fail(&["verify", &name(2)], 1)?;
    ensure!(said.contains("DAMAGED") && said.contains("SHA-256"), "{said}");
    ensure!(said.contains(&format!("{} is good", name(1))), "{said}");
    let target = folder.path().join("never");
    let said = tool.fail(&["restore", &name(2), "--to", path_text(&target)?], 1)?;
    ensure!(!target.exists() && said.contains(&name(2)), "{said}");

    // Write a manifest that names a file outside the store, and after that other wrong manifests.
    // Each is reported, and the other backups stay valid.
    let manifest = stored(1, &format!("{}.json", name(1)));
    let mut changed = manifests[1].clone();
    changed["stored"]["file"] = "../../../etc/passwd".into();
    fs_err::write(&manifest, serde_json::to_vec(&changed)?)?;
    let said = tool.fail(&["verify", "--all"], 1)?;
    ensure!(said.contains(&format!("OK  {}", name(0))), "{said}");
    ensure!(said.contains(&format!("{} is good", name(0))), "{said}");
    fs_err::write(&manifest, serde_json::to_vec(&manifests[2])?)?;
    ensure!(tool.fail(&["verify", &name(1)], 1)?.contains("DAMAGED"), "another's manifest");
    fs_err::write(&manifest, vec![b'x'; 1 << 20])?;
    ensure!(tool.fail(&["verify", &name(1)], 1)?.contains(&name(1)), "a huge manifest");

    // Delete the stored file of a backup. The command names the file, and the intact backup can
    // still be restored.
    fs_err::remove_file(&data)?;
    ensure!(tool.fail(&["verify", &name(2)], 1)?.contains("has no"), "a missing snapshot");
    let said = tool.run(&["restore", &name(0), "--to", path_text(&target)?])?;
    ensure!(said.contains("muster-node snapshot restore"), "{said}");
    let again = tool.fail(&["restore", &name(0), "--to", path_text(&target)?], 2)?;
    ensure!(again.contains("exists already"), "{again}");
    tool.fail(&["verify", "../../etc/passwd"], 2)?;
    Ok(())
}

/// Somebody with write access to the store copies an older backup to a newer name, and changes its
/// manifest to fit. Apart from the signature, the copied backup is valid.
#[test]
fn a_forged_backup_is_refused_by_the_clusters_statements_and_by_its_ca() -> Result<()> {
    let testbed = Testbed::start(Network::loopback(1), TestbedOptions::default())?;
    let store = testbed.path("backups");
    let elsewhere = BackupTool::new(&directory_flags(&store)?);
    let (agents, _etcdctl) = form(&testbed, 1, &[])?;
    let on_host = elsewhere.on_host_of(&agents[0]);
    let older = on_host.json(&["run"])?;
    // A name has the second of the backup. Backups of one second have no order.
    std::thread::sleep(Duration::from_millis(1_100));
    let newer = on_host.json(&["run"])?;
    ensure!(newer["signature"]["signed"].is_string(), "{newer}");
    let export = testbed.path("export.json");
    testbed.admin_command(&["cluster", "export", "demo", "--out", path_text(&export)?])?;
    let ca = agents[0].data_dir.join("agent/tls/peer-ca.crt");
    let trusts = [["--trust", path_text(&export)?], ["--trust", path_text(&ca)?]];
    let by = "signed by the founder of seat 1";
    for trust in &trusts {
        let said = elsewhere.run(&[&["verify", "--all"], &trust[..]].concat())?;
        ensure!(said.lines().count() == 2 && said.lines().all(|l| l.contains(by)), "{said}");
    }
    ensure!(on_host.run(&["verify", "newest"])?.contains(by), "the agent's own statements");
    let said = elsewhere.run(&["verify", "newest"])?;
    ensure!(said.contains("signature not checked"), "{said}");

    let folder = store.join(text(&older["cluster"]));
    let time = text(&newer["name"]).split('-').next().context("a time")?;
    let name = format!("{time}-r{}-ffffffff", older["snapshot"]["revision"]);
    let mut forged = older.clone();
    forged["name"] = name.as_str().into();
    forged["stored"]["file"] = format!("{name}.db").into();
    fs_err::copy(folder.join(text(&older["stored"]["file"])), folder.join(format!("{name}.db")))?;
    let manifest = folder.join(format!("{name}.json"));
    fs_err::write(&manifest, serde_json::to_vec(&forged)?)?;
    ensure!(elsewhere.run(&["verify", &name])?.starts_with("OK "), "it is whole");
    for trust in &trusts {
        let verify = [&["verify", &name], &trust[..], &["--allow-unsigned"]].concat();
        let said = elsewhere.fail(&verify, 1)?;
        ensure!(said.contains("DAMAGED") && said.contains("differs from the one"), "{said}");
        ensure!(said.contains(&format!("{} is good", text(&newer["name"]))), "{said}");
    }
    let target = testbed.path("never.db");
    let restore = ["restore", &name, "--to", path_text(&target)?];
    let said = on_host.fail(&restore, 1)?;
    ensure!(!target.exists() && said.contains(text(&older["name"])), "{said}");

    // A manifest without its signature looks like one of an older version.
    forged.as_object_mut().context("an object")?.remove("signature");
    fs_err::write(&manifest, serde_json::to_vec(&forged)?)?;
    let said = on_host.fail(&restore, 1)?;
    ensure!(!target.exists() && said.contains("--allow-unsigned"), "{said}");
    let said = on_host.run(&[&restore[..], &["--allow-unsigned"]].concat())?;
    ensure!(target.exists() && said.contains("NOT SIGNED"), "{said}");
    Ok(())
}

/// Whether the file has a line of the metric with a value above 0.
fn is_positive(metrics: &str, metric: &str) -> bool {
    let value = metrics.lines().find_map(|line| line.strip_prefix(metric)?.strip_prefix(' '));
    value.and_then(|value| value.parse::<f64>().ok()).is_some_and(|value| value > 0.0)
}

fn read_metrics(at: &str) -> Result<String> {
    use std::io::{Read as _, Write as _};
    let mut stream = std::net::TcpStream::connect(at)?;
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

#[test]
fn stock_etcd_is_backed_up_to_an_s3_compatible_store_that_fails_for_a_while() -> Result<()> {
    let work = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (Some(etcd), Some(gateway)) = (stock_etcd::oldest(), s3::program(work)) else {
        return Ok(());
    };
    let testbed = Testbed::start(Network::loopback(1), TestbedOptions::default())?;
    let mut gateway = S3Gateway::start(&gateway, &testbed.path("s3"))?;
    let flags = gateway.flags()?;
    let tool = BackupTool::new(&flags);
    let metrics = format!("{}:9099", testbed.network.hosts[0].address);
    let node = ["--node-binary", path_text(&etcd)?, "--metrics-listen", &metrics];
    let verify = owned(&["--backup-verify-every", "10s"]);
    let args = [owned(&node), flags.clone(), owned(&EVERY), verify].concat();
    let (agents, etcdctl) = form(&testbed, 1, &args)?;
    put_large_values(&etcdctl, &agents[0])?;
    let large = |manifest: &Value| manifest["stored"]["bytes"].as_u64() > Some(20_000_000);
    let first = tool.wait_for("a backup of several parts", large)?;
    ensure!(
        first["node_version"].as_str().is_some_and(|version| version.starts_with("3.4.")),
        "{first}"
    );

    gateway.kill();
    let agent = &agents[0];
    let failed = "muster_agent_backup_failures_total{reason=\"store\"}";
    poll_slowly("a failure in the metrics", LIMIT, || {
        is_positive(&read_metrics(&metrics).ok()?, failed).then_some(())
    })?;
    let status = agent.status()?;
    ensure!(status["backup"]["last_failure"]["reason"] == "store", "{}", status["backup"]);
    ensure!(agent.node_pid().is_some(), "the node must not care");
    tool.fail(&["list"], 1)?;
    gateway.restart()?;
    let before = text(&first["begun_at"]).to_owned();
    let next = tool.wait_for("a backup after the outage", |manifest| {
        text(&manifest["begun_at"]) > before.as_str() && large(manifest)
    })?;
    let shown = read_metrics(&metrics)?;
    for metric in
        ["newest_timestamp_seconds", "newest_bytes", "published_total", "interval_seconds"]
    {
        ensure!(is_positive(&shown, &format!("muster_agent_backup_{metric}")), "{metric}: {shown}");
    }
    poll_slowly("a verification in the metrics", LIMIT, || {
        let verified = "muster_agent_backup_verification_timestamp_seconds";
        is_positive(&read_metrics(&metrics).ok()?, verified).then_some(())
    })?;
    let name = text(&next["name"]);
    let drill = ["verify", name, "--drill", "--node-binary", path_text(&etcd)?, "--json"];
    let drilled: Value = serde_json::from_str(&tool.run(&drill)?)?;
    ensure!(drilled["backups"][0]["drill"]["program"] == "etcd 3.4", "{drilled}");

    check_wrong_credentials(&testbed, &gateway, &flags)?;
    ensure!(!agent.output().contains(SECRET_KEY), "the agent's log has the secret");
    let object = format!("clusters/{}/{name}.db", text(&next["cluster"]));
    let file = gateway.object(&object);
    let mut bytes = fs_err::read(&file)?;
    bytes.truncate(bytes.len() - 512);
    fs_err::write(&file, bytes)?;
    let said = tool.fail(&["verify", name], 1)?;
    ensure!(said.contains("DAMAGED") && said.contains("is good"), "{said}");
    Ok(())
}

/// Writes enough data for an upload in several parts.
fn put_large_values(etcdctl: &Etcdctl, agent: &AgentProcess) -> Result<()> {
    let tls = client::tls_from(etcdctl.credentials())?;
    let at = SocketAddr::new(agent.host.address, 2379);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut client = EtcdClient::new(at, Some(tls))?;
        for number in 0..20 {
            client.put(format!("large-{number}").as_bytes(), &[b'x'; 1_000_000], LIMIT).await?;
        }
        Ok(())
    })
}

fn check_wrong_credentials(testbed: &Testbed, gateway: &S3Gateway, flags: &[String]) -> Result<()> {
    let wrong = testbed.path("wrong-key");
    write_access_key(&wrong, "another-secret")?;
    let at = flags.iter().position(|flag| flag == "--backup-credentials").context("a flag")?;
    let mut flags = flags.to_vec();
    path_text(&wrong)?.clone_into(&mut flags[at + 1]);
    let said = BackupTool::new(&flags).fail(&["list"], 1)?;
    ensure!(said.contains("403") && !said.contains("another-secret"), "{said}");
    let at = flags.iter().position(|flag| flag == "--backup-ca").context("a flag")?;
    flags.drain(at..at + 2);
    let said = BackupTool::new(&flags).fail(&["list"], 1)?;
    ensure!(said.contains("certificate"), "no CA, and {}: {said}", gateway.url());
    Ok(())
}

#[test]
fn an_agent_that_is_killed_in_a_backup_makes_another_one_and_counts_none_twice() -> Result<()> {
    let testbed = Testbed::start(Network::loopback(1), TestbedOptions::default())?;
    let store = testbed.path("backups");
    let tool = BackupTool::new(&directory_flags(&store)?);
    let bundle = testbed.create_cluster_with_token("demo", 1)?;
    let args = [tool.flags.clone(), owned(&EVERY)].concat();
    let env = vec![("MUSTER_CRASH_AT".to_owned(), "backup-stored".to_owned())];
    let options = AgentOptions { args, env, ..AgentOptions::default() };
    let mut agent = testbed.agent_with(0, &bundle, options);
    agent.start()?;
    wait_for("the agent to be killed", LIMIT, || (!agent.is_running()).then_some(()))?;
    let files = || -> Result<Vec<String>> {
        let clusters = fs_err::read_dir(&store)?.collect::<Result<Vec<_>, _>>()?;
        let folder = clusters.first().context("a folder")?.path();
        let files = fs_err::read_dir(folder)?.collect::<Result<Vec<_>, _>>()?;
        Ok(files.iter().map(|file| file.file_name().to_string_lossy().into_owned()).collect())
    };
    let left = files()?;
    ensure!(left.len() == 1 && left[0].ends_with(".db"), "{left:?}");
    ensure!(tool.manifests()?.is_empty(), "a snapshot without a manifest counts");
    ensure!(tool.fail(&["verify"], 1)?.contains("no backup"), "nothing to verify");
    let spool = agent.data_dir.join("agent/backup-spool");
    ensure!(fs_err::read_dir(spool)?.count() == 0, "a temporary file is left");

    agent.options.env.clear();
    agent.start()?;
    let next = tool.wait_for("a whole backup", |_| true)?;
    tool.run(&["verify", text(&next["name"])])?;
    ensure!(files()?.contains(&left[0]), "another agent could still be writing the leftover");
    Ok(())
}

#[test]
fn the_newest_stock_etcd_is_backed_up_and_restored_on_trial() -> Result<()> {
    let work = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (Some(etcd), Some(_)) = (stock_etcd::newest(work), stock_etcd::newest_etcdutl(work)) else {
        return Ok(());
    };
    let folder = tempfile::tempdir()?;
    let network = Network::loopback(1);
    let mut node = NodeProcess::new(&network.hosts[0], "single", &etcd, folder.path());
    let peer = format!("http://{}:2380", network.hosts[0].address);
    node.flags.extend(owned(&["--name=single", &format!("--initial-cluster=single={peer}")]));
    node.start()?;
    node.wait_ready(LIMIT)?;
    let url = client_url(&network.hosts[0]);
    for key in ["a", "b", "c"] {
        let mut put = Command::new("etcdctl");
        put.env("ETCDCTL_API", "3").args(["--endpoints", &url, "put", key, "v"]);
        ensure!(put.output()?.status.success(), "no put");
    }
    let tool = BackupTool::new(&directory_flags(&folder.path().join("backups"))?);
    let manifest = tool.json(&["run", "--endpoints", &url])?;
    ensure!(manifest["snapshot"]["keys"] == 3, "{manifest}");
    for program in [etcd, program_path("muster-node")?] {
        let drill = ["verify", "--drill", "--node-binary", path_text(&program)?];
        let drilled = tool.json(&drill)?;
        ensure!(drilled["backups"][0]["drill"]["keys"] == 3, "{drilled}");
    }
    Ok(())
}

#[test]
fn a_check_tries_the_store_of_backups() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    let check = |to: &Path| -> Result<Value> {
        let mut command = Command::new(program_path("muster-agent")?);
        command.args(["run", "--check", "--json", "--data-dir", path_text(&data)?]);
        command.args(["--backup-to", path_text(to)?]);
        let document: Value = serde_json::from_slice(&command.output()?.stdout)?;
        let checks = document["checks"].as_array().context("checks")?.clone();
        let found = checks.into_iter().rev().find(|check| check["check"] == "backup");
        found.context("no check of backups")
    };
    let good = folder.path().join("backups");
    ensure!(check(&good)?["result"] == "ok", "a directory that doesn't exist yet");
    ensure!(!good.exists(), "a check changes nothing");
    fs_err::create_dir(&good)?;
    ensure!(check(&good)?["result"] == "ok", "a directory");
    ensure!(fs_err::read_dir(&good)?.count() == 0, "a check leaves nothing");
    let file = folder.path().join("file");
    fs_err::write(&file, "")?;
    let bad = check(&file)?;
    if bad["result"] != "fail" {
        bail!("a file in place of a directory: {bad}");
    }
    Ok(())
}
