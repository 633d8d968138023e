//! An agent adopts each member of a running etcd cluster, and releases it again, while a client
//! writes.

mod chains;
mod units;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::client::tls_from;
use muster_tests::harness::agents::AgentOptions;
use muster_tests::harness::credentials::Credentials;
use muster_tests::harness::programs::program_path;
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{
    AgentProcess, ChildProcess, Etcdctl, Network, NodeProcess, RetryingWriter, Testbed, poll_slowly,
};
use muster_tests::stock_etcd::{self, oldest};
use rustix::fs::{FlockOperation, flock};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(90);
/// Text of `adopt take-over` when a person has to stop the etcd.
const STOP_ETCD: &str = "stop this host's etcd now";
/// Text of `adopt take-over` when a person has to start the agent.
const START_AGENT: &str = "start the agent now";

fn newest() -> Option<PathBuf> {
    stock_etcd::newest(Path::new(env!("CARGO_TARGET_TMPDIR")))
}

/// Flags about TLS, without the prefix `peer-`. In a configuration file, they are keys of the
/// section for clients or of the one for peers.
const TLS_FLAGS: [&str; 4] = ["cert-file", "key-file", "trusted-ca-file", "client-cert-auth"];

/// Writes the settings of a node to a configuration file, and starts the node with this file alone
/// from then on.
fn move_settings_to_file(node: &mut NodeProcess, file: &Path) -> Result<()> {
    let mut lines = Vec::new();
    let mut sections = [("client-transport-security", vec![]), ("peer-transport-security", vec![])];
    for flag in std::mem::take(&mut node.flags) {
        let flag = flag.trim_start_matches('-');
        let (name, value) = flag.split_once('=').unwrap_or((flag, "true"));
        let own_name = name.strip_prefix("peer-").unwrap_or(name);
        if TLS_FLAGS.contains(&own_name) {
            let (_, section) = &mut sections[usize::from(own_name != name)];
            section.push(format!("  {own_name}: {value}"));
        } else {
            lines.push(format!("{name}: {value}"));
        }
    }
    for (section, keys) in sections {
        lines.push(format!("{section}:"));
        lines.extend(keys);
    }
    // Older etcds have this key in their sample file. It has no flag in newer versions.
    lines.push("discovery-fallback: 'proxy'".to_owned());
    fs_err::write(file, lines.join("\n"))?;
    node.flags = vec![format!("--config-file={}", file.display())];
    Ok(())
}

/// Three etcds with certificates of their own CA, and a discovery service. The first etcd has flags
/// and a variable, the second has a configuration file. The second and the third etcd have their
/// logs outside their data directories.
struct AdoptionTestbed {
    testbed: Testbed,
    etcd: PathBuf,
    etcds: Vec<NodeProcess>,
    agents: Vec<AgentProcess>,
}

impl AdoptionTestbed {
    fn start(etcd: &Path) -> Result<Self> {
        Self::start_on(Network::loopback(4), etcd)
    }

    /// Starts the etcds on the first three hosts of a network.
    fn start_on(network: Network, etcd: &Path) -> Result<Self> {
        let testbed = Testbed::start(network, TestbedOptions::default())?;
        let mut hosts: Vec<String> =
            testbed.network.hosts.iter().map(|host| host.address.to_string()).collect();
        // On loopback, a peer connects from 127.0.0.1. So the certificates must name that address,
        // too.
        hosts.push("127.0.0.1".to_owned());
        let credentials = Credentials::make(&testbed.path("old"), &hosts)?;
        let initial: Vec<String> =
            (1..=3).map(|n| format!("Infra.{n}=https://{}:2380", hosts[n - 1])).collect();
        let mut etcds = Vec::new();
        for n in 1..=3 {
            let host = &testbed.network.hosts[n - 1];
            let mut node = NodeProcess::new(host, &format!("etcd-{n}"), etcd, &testbed.path(""));
            for flag in &mut node.flags {
                *flag = flag.replace("http://", "https://");
            }
            node.flags.extend(credentials.mutual_flags());
            node.flags.push(format!("--initial-cluster={}", initial.join(",")));
            node.flags.push("--quota-backend-bytes=1073741824".to_owned());
            if n > 1 {
                let wal = testbed.path(&format!("wal-{n}"));
                node.flags.push(format!("--wal-dir={}", wal.display()));
            }
            // Give one etcd its name in a file and the others in a variable. The take-over must
            // keep both.
            if n == 2 {
                node.flags.push("--name=Infra.2".to_owned());
                move_settings_to_file(&mut node, &testbed.path("etcd-2.yml"))?;
            } else {
                node.env.push(("ETCD_NAME".to_owned(), format!("Infra.{n}")));
            }
            node.start()?;
            etcds.push(node);
        }
        etcds.iter_mut().try_for_each(|node| node.wait_ready(LIMIT))?;
        Ok(Self { testbed, etcd: etcd.to_owned(), etcds, agents: Vec::new() })
    }

    fn old_folder(&self) -> PathBuf {
        self.testbed.path("old")
    }

    fn endpoints(&self) -> Vec<String> {
        let hosts = self.testbed.network.hosts[..3].iter();
        hosts.map(|host| format!("https://{}:2379", host.address)).collect()
    }

    fn data_dir(&self, index: usize) -> PathBuf {
        self.testbed.path(&format!("host-{}", index + 1))
    }

    /// Lets an owner sign the membership that `adopt survey` finds.
    fn sign(&self) -> Result<Value> {
        let old = self.old_folder();
        let file = |name: &str| old.join(name).display().to_string();
        let output = self
            .testbed
            .network
            .hub
            .command(program_path("muster-agent")?)
            .args(["adopt", "survey", "--endpoints", &self.endpoints().join(",")])
            .args(["--cacert", &file("ca.crt"), "--cert", &file("client.crt")])
            .args(["--key", &file("client.key"), "--peer-cacert", &file("ca.crt")])
            .output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let survey = self.testbed.path("survey.json");
        fs_err::write(&survey, &output.stdout)?;
        let survey = path_text(&survey)?;
        let adopt =
            ["cluster", "adopt", "demo", "--survey", survey, "--allow-shared-host", "--yes"];
        self.testbed.admin_json(&adopt)
    }

    fn bundle(&self, n: usize) -> Result<PathBuf> {
        let (name, file) = (format!("infra-{n}"), self.testbed.path(&format!("{n}.bundle")));
        if !file.exists() {
            let create = ["token", "create", "--cluster", "demo", "--uses", "1", "--name", &name];
            self.testbed.admin_command(&[&create[..], &["--out", path_text(&file)?]].concat())?;
        }
        Ok(file)
    }

    /// Starts a command of the agent of host `index`.
    fn spawn(&self, index: usize, words: &[&str], env: &[(&str, &str)]) -> Result<ChildProcess> {
        let host = &self.testbed.network.hosts[index];
        let mut command = host.command(program_path("muster-agent")?);
        command.args(words).args(["--data-dir", path_text(&self.data_dir(index))?]);
        command.envs(env.iter().copied());
        let name = format!("{}-{}", words.join("-").replace('/', "_"), index + 1);
        let name: String = name.chars().take(40).collect();
        let log = self.testbed.path(&format!("{name}-{}.log", fresh_number()));
        ChildProcess::spawn(&name, command, &log)
    }

    fn enrol_command(&mut self, index: usize, bundle: usize) -> Result<ChildProcess> {
        let pid = self.etcds[index].id()?.to_string();
        let file = self.bundle(bundle)?;
        let words = ["adopt", "enrol", "--pid", &pid, "--bundle-file", path_text(&file)?];
        self.spawn(index, &words, &[])
    }

    /// Enrols the hosts of all members.
    fn enrol(&mut self) -> Result<()> {
        let commands: Result<Vec<_>> = (0..3).map(|i| self.enrol_command(i, i + 1)).collect();
        for mut command in commands? {
            let code = command.exit_code(LIMIT)?;
            ensure!(code == 0, "{code}: {}", command.output());
        }
        for index in 0..3 {
            let options = AgentOptions::default();
            let bundle = self.bundle(index + 1)?;
            self.agents.push(self.testbed.agent_with(index, &bundle, options));
        }
        Ok(())
    }

    fn take_over(&mut self, index: usize) -> Result<()> {
        let mut command = self.spawn(index, &["adopt", "take-over"], &[])?;
        command.wait_for_output(STOP_ETCD, LIMIT)?;
        self.etcds[index].stop(LIMIT)?;
        self.start_agent_when_told(index, command)
    }

    fn start_agent_when_told(&mut self, index: usize, mut command: ChildProcess) -> Result<()> {
        command.wait_for_output(START_AGENT, LIMIT)?;
        self.agents[index].start()?;
        let code = command.exit_code(LIMIT)?;
        let agent = self.agents[index].output();
        ensure!(code == 0, "{code}: {}\n{agent}", command.output());
        Ok(())
    }

    /// Runs a command of the agent of host `index` to its end.
    fn run(&self, index: usize, words: &[&str]) -> Result<(i32, String)> {
        let mut command = self.spawn(index, words, &[])?;
        let code = command.exit_code(LIMIT)?;
        Ok((code, command.output()))
    }

    /// Starts a writer with a client certificate from before the adoption. It trusts the old CA and
    /// the cluster's own CA.
    fn writer(&self) -> Result<RetryingWriter> {
        let folder = self.testbed.path("writer");
        let credentials = self.testbed.path("demo-new");
        let out = path_text(&credentials)?;
        self.testbed.admin_command(&["cluster", "credentials", "demo", "--out", out, "--yes"])?;
        fs_err::create_dir(&folder)?;
        fs_err::copy(credentials.join("ca.crt"), folder.join("ca.crt"))?;
        for name in ["client.crt", "client.key"] {
            fs_err::copy(self.old_folder().join(name), folder.join(name))?;
        }
        Ok(RetryingWriter::start_with_tls(self.endpoints(), Some(tls_from(&folder)?)))
    }

    fn etcdctl(&self, folder: &str) -> Etcdctl {
        Etcdctl::new(self.testbed.network.hub.clone(), self.testbed.path(folder), self.endpoints())
    }

    /// Releases a member, and runs its node with the command that `release` writes down, as a unit
    /// would.
    fn release(&mut self, index: usize) -> Result<NodeProcess> {
        let out = self.testbed.path(&format!("released-{index}"));
        let out_text = path_text(&out)?;
        let mut command = self.spawn(index, &["release", "--out", out_text], &[])?;
        command.wait_for_output("stop the agent now", LIMIT)?;
        self.agents[index].terminate(LIMIT)?;
        command.wait_for_output("start the node now", LIMIT)?;
        let plan: Value = serde_json::from_slice(&fs_err::read(out.join("release.json"))?)?;
        let words = plan["command"].as_array().context("a command")?;
        let words: Vec<String> =
            words.iter().filter_map(|word| Some(word.as_str()?.to_owned())).collect();
        let unit = fs_err::read_to_string(out.join("etcd.service"))?;
        ensure!(unit.contains(&format!("ExecStart={}", words[0])), "{unit}");
        let agent_files = self.data_dir(index).join("agent").display().to_string();
        ensure!(!unit.contains(&agent_files), "a plain unit reads no file of the agent: {unit}");
        let host = &self.testbed.network.hosts[index];
        let name = format!("plain-{index}");
        let mut node = NodeProcess::new(host, &name, Path::new(&words[0]), &self.testbed.path(""));
        node.flags = words[1..].to_vec();
        node.start()?;
        let code = command.exit_code(LIMIT)?;
        ensure!(code == 0, "{code}: {}\n{}", command.output(), node.output());
        Ok(node)
    }
}

/// Watches some data directories, and counts those that no etcd uses. A running etcd holds a lock
/// on its database.
struct DownMemberCounter {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<usize>>,
}

impl DownMemberCounter {
    fn start(directories: Vec<PathBuf>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut most = 0;
            while !stopped.load(Ordering::Relaxed) {
                let mut down = 0;
                for directory in &directories {
                    down += usize::from(!is_in_use(directory)?);
                }
                most = most.max(down);
                std::thread::sleep(Duration::from_millis(10));
            }
            Ok(most)
        });
        Self { stop, thread }
    }

    /// Returns the highest number of members that were down at one time.
    fn stop(self) -> Result<usize> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the thread doesn't panic")
    }
}

fn is_in_use(directory: &Path) -> Result<bool> {
    let file = fs_err::File::open(directory.join("member/snap/db"))?;
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(false),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

fn fresh_number() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn member_ids(etcdctl: &Etcdctl) -> Result<Vec<u64>> {
    let list = etcdctl.json(&["member", "list"])?;
    let members = list["members"].as_array().context("members")?;
    let mut ids: Vec<u64> = members.iter().filter_map(|member| member["ID"].as_u64()).collect();
    ids.sort_unstable();
    Ok(ids)
}

/// Takes all three members over, exchanges their certificates, drops the old CA, lets a member be
/// replaced by a ticket, and releases all members. A client writes all the time.
fn check_whole_way(etcd: &Path) -> Result<()> {
    let mut adoption = AdoptionTestbed::start(etcd)?;
    let before = member_ids(&adoption.etcdctl("old"))?;
    let signed = adoption.sign()?;
    ensure!(signed["state"] == "open", "{signed}");
    let writer = adoption.writer()?;
    check_advice(&adoption, &["seats_free: run `muster-agent adopt enrol`"])?;
    adoption.enrol()?;
    check_advice(&adoption, &["nodes_not_reported: run `muster-agent adopt take-over`"])?;
    let counter = DownMemberCounter::start(
        (1..=3).map(|n| adoption.testbed.path(&format!("etcd-{n}"))).collect(),
    );
    for index in 0..3 {
        let (code, text) = adoption.run(index, &["run"])?;
        ensure!(code == 3 && text.contains("take-over"), "an agent without its etcd: {text}");
    }
    let out = adoption.testbed.path("released-too-early");
    for index in 0..3 {
        adoption.take_over(index)?;
        if index == 2 {
            break;
        }
        for refused in [&["adopt", "certificates"][..], &["release", "--out", path_text(&out)?]] {
            let (code, text) = adoption.run(index, refused)?;
            ensure!(code == 1 && text.contains("infra-3"), "{code}: {text}");
        }
    }
    adoption.testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let down = counter.stop()?;
    ensure!(down == 1, "{down} members were down at one time");
    ensure!(member_ids(&adoption.etcdctl("old"))? == before, "members keep their ids");
    let shown = adoption.testbed.admin_json(&["cluster", "show", "demo"])?;
    let raft = adoption.etcdctl("old").json(&["member", "list"])?["header"]["cluster_id"].as_u64();
    let raft = format!("{:016x}", raft.context("an id")?);
    ensure!(shown["raft_cluster_id"] == raft.as_str(), "{shown}");
    check_settings_are_kept(&adoption)?;
    check_advice(&adoption, &["cas_before_adoption: take over all members; then run"])?;

    for index in 0..3 {
        let (code, text) = adoption.run(index, &["adopt", "certificates"])?;
        ensure!(code == 0, "{code}: {text}");
        if index == 0 {
            let (code, text) = adoption.run(1, &["adopt", "take-over", "--give-back"])?;
            ensure!(code == 2 && text.contains("certificates of Infra.1,"), "{code}: {text}");
        }
    }
    adoption.etcdctl("demo-new").run(&["put", "client", "new"])?;
    writer.stop_and_check(&adoption.endpoints()[0])?;
    let drop_old = ["cluster", "rotate-ca", "demo", "--step", "3", "--yes", "--timeout", "1m"];
    adoption.testbed.admin_command(&drop_old)?;
    check_old_ca_is_dropped(&mut adoption)?;
    check_management(&mut adoption)?;
    check_release(&mut adoption)
}

/// Checks which advice `cluster explain` gives: code and beginning of each line.
fn check_advice(adoption: &AdoptionTestbed, expected: &[&str]) -> Result<()> {
    let shown = adoption.testbed.admin_json(&["cluster", "explain", "demo"])?;
    let reasons = shown["explain"].as_array().context("reasons")?.iter();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let given: Vec<String> = reasons
        .map(|reason| format!("{}: {}", text(&reason["code"]), text(&reason["command"])))
        .collect();
    let fits = given.len() == expected.len()
        && given.iter().zip(expected).all(|(given, expected)| given.starts_with(expected));
    ensure!(fits, "{given:#?}");
    Ok(())
}

fn check_settings_are_kept(adoption: &AdoptionTestbed) -> Result<()> {
    for (index, agent) in adoption.agents.iter().enumerate() {
        let n = index + 1;
        let pid = agent.node_pid().context("the node's process")?;
        let line = fs_err::read(format!("/proc/{pid}/cmdline"))?;
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        let quota = "--quota-backend-bytes=1073741824".to_owned();
        for kept in [format!("--name=Infra.{n}"), quota, format!("etcd-{n}")] {
            ensure!(line.contains(kept.as_str()), "{kept} is not in {line}");
        }
        let wal = adoption.testbed.path(&format!("wal-{n}"));
        ensure!(line.contains(&format!("--wal-dir={}", wal.display())) == (n > 1), "{line}");
        let inner = adoption.testbed.path(&format!("etcd-{n}/member/wal"));
        ensure!(inner.exists() == (n == 1), "{}: the log is in one place", inner.display());
    }
    Ok(())
}

/// Restarts the agents, one after the other, because etcd reads its CAs only when it starts.
fn restart_for_cas(adoption: &mut AdoptionTestbed) -> Result<()> {
    for index in 0..3 {
        poll_slowly("the agent to want a restart", LIMIT, || {
            let status = adoption.agents[index].status().ok()?;
            status["restart_wanted"].is_string().then_some(())
        })?;
        adoption.agents[index].terminate(LIMIT)?;
        adoption.agents[index].start()?;
        let etcdctl = adoption.etcdctl("demo-new");
        poll_slowly("all members to answer", LIMIT, || etcdctl.run(&["endpoint", "health"]).ok())?;
    }
    Ok(())
}

/// Once the old CA is dropped, a client with a certificate of that CA must be refused.
fn check_old_ca_is_dropped(adoption: &mut AdoptionTestbed) -> Result<()> {
    restart_for_cas(adoption)?;
    let old = adoption.etcdctl("writer").output(&["put", "client", "old"])?;
    ensure!(!old.status.success(), "{}", String::from_utf8_lossy(&old.stdout));
    Ok(())
}

/// Starts the agent of a fourth host with a join ticket. `more` are arguments for the ticket.
fn start_newcomer(adoption: &AdoptionTestbed, more: &[&str]) -> Result<AgentProcess> {
    let ticket = adoption.testbed.path("ticket.bundle");
    let create = ["token", "create", "--cluster", "demo", "--kind", "join"];
    let create = [&create[..], more, &["--out", path_text(&ticket)?]].concat();
    adoption.testbed.admin_command(&create)?;
    let args = ["--node-binary", path_text(&adoption.etcd)?, "--name", "fourth"];
    let args = args.map(str::to_owned).to_vec();
    let options = AgentOptions { args, ..AgentOptions::default() };
    let mut agent = adoption.testbed.agent_with(3, &ticket, options);
    agent.start()?;
    Ok(agent)
}

/// Whether the newcomer is a voter, according to the agents' reports.
fn newcomer_votes(adoption: &AdoptionTestbed) -> Result<bool> {
    let shown = adoption.testbed.admin_command(&["cluster", "show", "demo"])?;
    let votes =
        |line: &str| line.contains("fourth") && (line.contains("voter") || line.contains("leader"));
    Ok(shown.lines().any(votes))
}

/// Lets a host take a member's place with a join ticket, as in any managed cluster.
fn check_management(adoption: &mut AdoptionTestbed) -> Result<()> {
    let agent = start_newcomer(adoption, &["--replace", "Infra.3"])?;
    poll_slowly("the newcomer to take the member's place", LIMIT, || {
        let shown = adoption.testbed.admin_command(&["cluster", "show", "demo"]).ok()?;
        (newcomer_votes(adoption).ok()? && !shown.contains("Infra.3 ")).then_some(())
    })
    .with_context(|| agent.output())?;
    let code = adoption.agents[2].exit_code(LIMIT)?;
    ensure!(code == 3, "the removed member's agent ended with {code}");
    adoption.agents.push(agent);
    Ok(())
}

/// Releases all members, one after the other. Their etcds must go on without agents.
fn check_release(adoption: &mut AdoptionTestbed) -> Result<()> {
    let hosts = &adoption.testbed.network.hosts;
    let urls: Vec<String> =
        [0, 1, 3].iter().map(|i| format!("https://{}:2379", hosts[*i].address)).collect();
    let etcdctl = adoption.etcdctl("demo-new");
    // Delete the keys of the earlier writer. Otherwise the check at the end would count them as
    // written by the new writer.
    etcdctl.run(&["del", "w", "--prefix"])?;
    let url = urls[0].clone();
    let tls = tls_from(&adoption.testbed.path("demo-new"))?;
    let writer = RetryingWriter::start_with_tls(urls, Some(tls));
    let mut plain = Vec::new();
    // An agent that gives up releasing its member must hinder neither the release of the other
    // members nor a later release of its own.
    let out = adoption.testbed.path("released-3");
    let words = ["release", "--out", path_text(&out)?, "--patience", "0"];
    let (code, text) = adoption.run(3, &words)?;
    ensure!(code == 1 && text.contains("isn't released"), "{code}: {text}");
    for index in [0, 1, 3] {
        plain.push(adoption.release(index)?);
        let (code, text) = adoption.run(index, &["run"])?;
        ensure!(code == 3 && text.contains("released"), "{code}: {text}");
        poll_slowly("discovery to know of the release", LIMIT, || {
            let shown = adoption.testbed.admin_json(&["cluster", "explain", "demo"]).ok()?;
            let reasons = shown["explain"].as_array()?;
            let released = reasons.iter().filter(|reason| reason["code"] == "member_released");
            (released.count() == plain.len()).then_some(())
        })?;
    }
    ensure!(plain.iter_mut().all(NodeProcess::is_running), "all run without agents");
    writer.stop_and_check(&url)?;
    adoption.testbed.admin_command(&["cluster", "retire", "demo", "--yes"]).map(drop)
}

#[test]
fn etcd_3_4_comes_under_management_and_goes_back() -> Result<()> {
    oldest().map_or(Ok(()), |etcd| check_whole_way(&etcd))
}

#[test]
fn the_newest_etcd_comes_under_management_and_goes_back() -> Result<()> {
    newest().map_or(Ok(()), |etcd| check_whole_way(&etcd))
}

/// Kills a take-over after the etcd has stopped, and another after the journal was written.
/// Discovery is down during both. No other host may restart its member meanwhile. Then a newcomer
/// waits for the third take-over.
#[test]
fn a_take_over_goes_on_after_a_crash_and_without_discovery() -> Result<()> {
    let Some(etcd) = oldest() else { return Ok(()) };
    let mut adoption = AdoptionTestbed::start(&etcd)?;
    adoption.sign()?;
    let writer = adoption.writer()?;
    adoption.enrol()?;
    adoption.testbed.stop_discovery()?;
    for (index, step) in [(0, "etcd-stopped"), (1, "taken-over")] {
        let mut killed =
            adoption.spawn(index, &["adopt", "take-over"], &[("MUSTER_CRASH_AT", step)])?;
        killed.wait_for_output(STOP_ETCD, LIMIT)?;
        adoption.etcds[index].stop(LIMIT)?;
        killed.wait(LIMIT)?;
        let (code, text) = adoption.run(2, &["adopt", "take-over", "--patience", "5"])?;
        ensure!(code == 1 && text.contains("is being restarted"), "{code}: {text}");
        ensure!(adoption.etcds[2].is_running(), "nothing was stopped");
        let again = adoption.spawn(index, &["adopt", "take-over"], &[])?;
        adoption.start_agent_when_told(index, again)?;
    }
    writer.stop_and_check(&adoption.endpoints()[2])?;
    adoption.testbed.start_discovery()?;
    adoption.testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    check_newcomer_waits(&mut adoption)
}

/// Moves the leadership away from the third member, if that member leads. Only the agent of the
/// leader's host carries out intents, and the third host has no agent yet.
fn move_leadership_from_third(adoption: &AdoptionTestbed) -> Result<()> {
    let third = adoption.etcdctl("old").with_endpoint(&adoption.testbed.network.hosts[2]);
    let status = &third.json(&["endpoint", "status"])?[0]["Status"];
    let own = status["header"]["member_id"].as_u64().context("a member id")?;
    if status["leader"].as_u64() != Some(own) {
        return Ok(());
    }
    let other = member_ids(&third)?.into_iter().find(|id| *id != own).context("another member")?;
    third.run(&["move-leader", &format!("{other:x}")]).map(drop)
}

/// Until the last member is taken over, it would refuse a newcomer's certificate. So the newcomer
/// must wait for the take-over.
fn check_newcomer_waits(adoption: &mut AdoptionTestbed) -> Result<()> {
    let newcomer = start_newcomer(adoption, &[])?;
    poll_slowly("the newcomer to wait for the take-over", LIMIT, || {
        // On a busy machine, the third member can become the leader at any time.
        move_leadership_from_third(adoption).ok()?;
        let list = adoption.testbed.admin_json(&["intent", "list", "demo", "--all"]).ok()?;
        let views = list["intents"].as_array()?;
        let mut reasons = views.iter().filter_map(|view| view["waits"]["reason"].as_str());
        let expected = "infra-3 would refuse a newcomer's certificate";
        reasons.any(|reason| reason.contains(expected)).then_some(())
    })
    .with_context(|| newcomer.output())?;
    ensure!(member_ids(&adoption.etcdctl("old"))?.len() == 3, "nobody was added");
    adoption.take_over(2)?;
    poll_slowly("the newcomer to vote", LIMIT, || newcomer_votes(adoption).ok()?.then_some(()))
        .with_context(|| newcomer.output())
}

/// The take-over of a stopped etcd is refused. A take-over that has begun can be undone, so that
/// the etcd runs without an agent again. Later it can be repeated.
#[test]
fn an_unfinished_take_over_can_be_given_back() -> Result<()> {
    let Some(etcd) = oldest() else { return Ok(()) };
    let mut adoption = AdoptionTestbed::start(&etcd)?;
    adoption.sign()?;
    adoption.enrol()?;
    adoption.etcds[0].stop(LIMIT)?;
    poll_slowly("a refusal of the take-over", LIMIT, || {
        let (code, text) = adoption.run(0, &["adopt", "take-over"]).ok()?;
        (code == 1 && text.contains("no etcd runs on")).then_some(())
    })?;
    adoption.etcds[0].start()?;
    adoption.etcds[0].wait_ready(LIMIT)?;
    let mut command = adoption.spawn(0, &["adopt", "take-over"], &[])?;
    command.wait_for_output(STOP_ETCD, LIMIT)?;
    adoption.etcds[0].stop(LIMIT)?;
    command.wait_for_output(START_AGENT, LIMIT)?;
    command.kill();
    let mut back = adoption.spawn(0, &["adopt", "take-over", "--give-back"], &[])?;
    back.wait_for_output("start this host's etcd now as before", LIMIT)?;
    adoption.etcds[0].start()?;
    ensure!(back.exit_code(LIMIT)? == 0, "{}", back.output());
    let (code, text) = adoption.run(0, &["run"])?;
    ensure!(code == 3, "the etcd isn't the agent's: {text}");
    adoption.take_over(0)
}

/// A host that shows the bundle of another member must be refused.
#[test]
fn a_bundle_of_another_member_is_refused() -> Result<()> {
    let Some(etcd) = oldest() else { return Ok(()) };
    let mut adoption = AdoptionTestbed::start(&etcd)?;
    adoption.sign()?;
    let mut enrol = adoption.enrol_command(0, 2)?;
    enrol.wait_for_output("infra-2", LIMIT)?;
    enrol.kill();
    Ok(())
}
