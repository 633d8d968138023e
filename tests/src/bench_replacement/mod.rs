//! Measures how long a cluster lacks a member after its virtual machine has died: until a
//! replacement policy has put another host into its place.
//!
//! Each run forms a cluster of three hosts in network namespaces. Then the link of one host goes
//! down, and its processes are killed. Without a standby, a fresh host starts at that moment, as an
//! auto-scaling group would start one a little later. The phases are read from the agents' logs as
//! they grow, and the end from the cluster's list of members.

mod figures;

use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

pub use self::figures::{Phases, ReplacementFigures};
use crate::harness::process::last_lines;
use crate::harness::testbed::{TestbedOptions, path_text};
use crate::harness::{AgentProcess, Etcdctl, Network, TestHost, Testbed, poll_slowly};

/// Number of members of each cluster.
const SIZE: usize = 3;
/// Index of the host that comes into the dead member's place.
const NEWCOMER: usize = 3;
/// Time limit for forming the cluster and for starting a standby.
const FORM_LIMIT: Duration = Duration::from_secs(180);
/// Time for which the cluster runs undisturbed before a member dies.
const QUIET_TIME: Duration = Duration::from_secs(10);
/// Time between two readings of the logs and of the list of members.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Part of the log line that ends the phase [`Phases::noticed`].
const NOTICED: &str = "unreachable";
/// Part of the log line that ends the phase [`Phases::waited`].
const WAITED: &str = "voters' agents have observed for";
/// Part of the log line that ends the phase [`Phases::observed`].
const BEGUN: &str = "by the policy ";

/// Node program of the measured cluster.
#[derive(Clone, Debug)]
pub struct MeasuredNode {
    /// Name of the program in the report.
    pub name: String,
    /// Path of the program; `None` for the `muster-node` beside this program.
    pub path: Option<PathBuf>,
}

/// Origin of the host that takes the dead member's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Successor {
    /// The host starts when the member dies.
    Fresh,
    /// The host has waited as a standby.
    Standby,
}

impl Successor {
    /// Names on the command line and in the report.
    pub const NAMES: [&'static str; 2] = ["policy", "standby"];

    /// Returns the successor with this name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        match name {
            "policy" => Some(Self::Fresh),
            "standby" => Some(Self::Standby),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Fresh => Self::NAMES[0],
            Self::Standby => Self::NAMES[1],
        }
    }
}

/// Parameters of a measurement.
#[derive(Clone, Debug)]
pub struct ReplacementPlan {
    /// Node programs that are measured in turns.
    pub nodes: Vec<MeasuredNode>,
    /// Origins of successors that are measured in turns.
    pub successors: Vec<Successor>,
    /// Number of runs with each program and successor.
    pub runs: usize,
    /// The policy's `--after`, as its option takes it.
    pub after: String,
    /// Time limit from the member's death until the cluster is whole again.
    pub limit: Duration,
}

/// Measures all programs and successors in turns. Calls `say` before each run.
///
/// # Errors
/// Fails if a cluster doesn't form, or isn't whole within the limit. Everything that a run has
/// started is killed in any case.
pub fn run(plan: &ReplacementPlan, say: impl Fn(&str)) -> Result<Vec<ReplacementFigures>> {
    let mut all = Vec::new();
    for node in &plan.nodes {
        for successor in &plan.successors {
            let (node, successor) = (node.name.clone(), successor.name());
            all.push(ReplacementFigures { node, successor, runs: Vec::new() });
        }
    }
    for number in 1..=plan.runs {
        let cases =
            plan.nodes.iter().flat_map(|node| plan.successors.iter().map(move |s| (node, s)));
        for ((node, successor), figures) in cases.zip(&mut all) {
            let name = format!("{} {} run {number} of {}", node.name, successor.name(), plan.runs);
            say(&name);
            let phases = measure(plan, node, *successor).with_context(|| name.clone())?;
            say(&format!("{name}: {phases}"));
            figures.runs.push(phases);
        }
    }
    Ok(all)
}

/// A formed cluster with a replacement policy.
struct PolicyCluster {
    /// Declared before `testbed`, so that agents and nodes are killed before the test bed's folder
    /// is deleted.
    agents: Vec<AgentProcess>,
    testbed: Testbed,
    bundle: PathBuf,
    node: Option<PathBuf>,
}

impl PolicyCluster {
    fn form(plan: &ReplacementPlan, node: &MeasuredNode) -> Result<Self> {
        let network = Network::namespaces(4).context("network namespaces need root")?;
        // The service has its usual time limits here.
        let serve_args = ["--rate", "1000"].map(ToOwned::to_owned).to_vec();
        let options = TestbedOptions { serve_args, ..TestbedOptions::default() };
        let testbed = Testbed::start(network, options)?;
        testbed.create_cluster("demo", SIZE, &[])?;
        let bundle = testbed.path("group.bundle");
        let create = ["policy", "create", "--cluster", "demo", "--replace-dead", "--after"];
        let out = [plan.after.as_str(), "--out", path_text(&bundle)?];
        testbed.admin_json(&[&create[..], &out].concat())?;
        let node = node.path.clone();
        let mut cluster = Self { agents: Vec::new(), testbed, bundle, node };
        for host in 0..SIZE {
            let agent = cluster.start_agent(host)?;
            cluster.agents.push(agent);
        }
        cluster.testbed.wait_cluster_state("demo", "formed", FORM_LIMIT)?;
        Ok(cluster)
    }

    fn start_agent(&self, host: usize) -> Result<AgentProcess> {
        let mut agent = self.testbed.agent(host, &self.bundle);
        if let Some(node) = &self.node {
            agent.options.args =
                ["--node-binary", path_text(node)?].map(ToOwned::to_owned).to_vec();
        }
        agent.start()?;
        Ok(agent)
    }

    fn etcdctl(&self, hosts: &[&TestHost]) -> Result<Etcdctl> {
        self.testbed.etcdctl("demo", hosts)
    }

    /// Returns the index of a founder that doesn't lead.
    fn follower(&self) -> Result<usize> {
        let hosts: Vec<&TestHost> = self.agents.iter().map(|agent| &agent.host).collect();
        let etcdctl = self.etcdctl(&hosts)?;
        let leader = poll_slowly("a leader", FORM_LIMIT, || etcdctl.leader(&hosts))?;
        Ok((leader + 1) % SIZE)
    }
}

/// Measures one death in a new cluster.
fn measure(plan: &ReplacementPlan, node: &MeasuredNode, successor: Successor) -> Result<Phases> {
    let mut cluster = PolicyCluster::form(plan, node)?;
    let mut standby = None;
    if successor == Successor::Standby {
        let mut agent = cluster.start_agent(NEWCOMER)?;
        agent.wait_for_output("waiting for the cluster to add this host", FORM_LIMIT)?;
        standby = Some(agent);
    }
    std::thread::sleep(QUIET_TIME);
    let victim = cluster.follower()?;
    let mut dead = cluster.agents.remove(victim);

    let logs = cluster.agents.iter().map(GrowingLog::of).collect();
    let death = Instant::now();
    cluster.testbed.network.set_link(victim, false)?;
    dead.kill();
    dead.kill_node()?;
    let newcomer = match standby {
        Some(standby) => standby,
        None => cluster.start_agent(NEWCOMER)?,
    };
    let phases = watch(&cluster, logs, (&newcomer, &dead.host), death, plan.limit);
    phases.with_context(|| {
        let each = cluster.agents.iter().chain([&newcomer]);
        let logs = each.map(|agent| last_lines(&agent.output(), 15));
        format!("the agents' logs:\n{}", logs.collect::<Vec<_>>().join("\n---\n"))
    })
}

/// Follows the logs and the members until the newcomer has the dead member's place.
fn watch(
    cluster: &PolicyCluster,
    mut logs: Vec<GrowingLog>,
    (newcomer, dead): (&AgentProcess, &TestHost),
    death: Instant,
    limit: Duration,
) -> Result<Phases> {
    let hosts: Vec<&TestHost> = cluster.agents.iter().map(|agent| &agent.host).collect();
    let etcdctl = cluster.etcdctl(&hosts)?;
    let mut ends = [None; 3];
    while death.elapsed() < limit {
        let new: String = logs.iter_mut().map(GrowingLog::read_new_text).collect::<Result<_>>()?;
        for (end, text) in ends.iter_mut().zip([NOTICED, WAITED, BEGUN]) {
            if end.is_none() && new.contains(text) {
                *end = Some(death.elapsed());
            }
        }
        if is_whole(&etcdctl, newcomer, dead) {
            let whole = death.elapsed();
            etcdctl.run(&["put", "whole", "again"])?;
            let [noticed, waited, begun] = ends;
            let begun = begun.context("no agent has logged that it counted a use")?;
            return Ok(Phases::from_ends(noticed, waited, begun, whole));
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
    bail!("the cluster is not whole after {} s", limit.as_secs())
}

/// An agent's log, and the position up to which it was read.
struct GrowingLog {
    path: PathBuf,
    read: u64,
}

impl GrowingLog {
    /// Skips everything that the agent has logged so far.
    fn of(agent: &AgentProcess) -> Self {
        let path = agent.log().to_owned();
        let read = fs_err::metadata(&path).map(|found| found.len()).unwrap_or_default();
        Self { path, read }
    }

    /// Returns the whole lines that were logged since the last call.
    fn read_new_text(&mut self) -> Result<String> {
        let mut file = fs_err::File::open(&self.path)?;
        file.seek(SeekFrom::Start(self.read))?;
        let mut new = Vec::new();
        file.read_to_end(&mut new)?;
        let whole = new.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        new.truncate(whole);
        self.read += u64::try_from(new.len())?;
        Ok(String::from_utf8_lossy(&new).into_owned())
    }
}

/// Whether the cluster has three started voters, the newcomer among them and the dead member not.
fn is_whole(etcdctl: &Etcdctl, newcomer: &AgentProcess, dead: &TestHost) -> bool {
    let Ok(list) = etcdctl.json(&["member", "list"]) else { return false };
    let Some(members) = list["members"].as_array() else { return false };
    let url = |host: &TestHost| format!("https://{}:2380", host.address);
    let has = |host: &TestHost| members.iter().any(|each| each["peerURLs"][0] == url(host));
    let votes = |each: &serde_json::Value| {
        each["isLearner"] != true && each["name"].as_str().is_some_and(|name| !name.is_empty())
    };
    members.len() == SIZE && members.iter().all(votes) && has(&newcomer.host) && !has(dead)
}
