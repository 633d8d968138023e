//! The demo: it runs the main use case and prints what happens. Each printed claim was checked
//! before; the first one that doesn't hold ends the demo with an error.

mod members;
pub mod story;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;

use crate::harness::process::is_alive;
use crate::harness::programs::program_path;
use crate::harness::world::TestbedOptions;
use crate::harness::{AgentProcess, Etcdctl, Network, TestHost, Testbed, wait_for};
use story::DemoPrinter;

/// Number of hosts that form the cluster.
const FOUNDERS: usize = 3;
/// Index of the host that replaces a lost one.
const SUBSTITUTE: usize = FOUNDERS;
/// Index of the host that joins later.
const JOINER: usize = SUBSTITUTE + 1;
/// Number of hosts in the demo.
const HOSTS: u8 = 5;
/// Time limit of each step.
const LIMIT: Duration = Duration::from_secs(60);

/// Command line of the demo.
#[derive(Debug, Parser)]
#[command(
    about = "Three hosts with unknown addresses become one secure cluster, whose members then change."
)]
pub struct DemoOptions {
    /// Leave everything running and print the commands to play with.
    #[arg(long)]
    pub keep: bool,
    /// Put the hosts on 127.x.y.z even if network namespaces could be made.
    #[arg(long)]
    pub loopback: bool,
}

/// Flags for short retries. An etcdctl without a reachable endpoint waits a second before its next
/// attempt; restarting one that gives up early measures the time better.
const SHORT_RETRY_FLAGS: [&str; 2] = ["--command-timeout=400ms", "--dial-timeout=300ms"];

fn succeeded(output: &std::process::Output) -> bool {
    output.status.success()
}

/// Runs the whole demo.
///
/// # Errors
/// The first step that failed, or claim that didn't hold.
pub fn run(options: &DemoOptions) -> Result<()> {
    let mut story = DemoPrinter::default();
    let mut world = discovery(&mut story, options)?;
    let bundle = order(&mut story, &world)?;
    let mut agents = form(&mut story, &world, &bundle)?;
    use_etcdctl(&mut story, &world, &client(&world, &agents)?)?;
    lose_the_leader(&mut story, &world, &agents)?;
    members::replace_one(&mut story, &world, &mut agents)?;
    members::join_one(&mut story, &world, &mut agents)?;
    let etcdctl = client(&world, &agents)?;
    if options.keep {
        return keep(&mut story, world, agents, &etcdctl);
    }
    lose_discovery(&mut story, &mut world, &etcdctl)?;
    members::remove_one(&mut story, &world, &mut agents)?;
    shut_down(&mut story, &mut agents)?;
    story.end("All of it was checked.");
    Ok(())
}

fn hosts_of(agents: &[AgentProcess]) -> Vec<&TestHost> {
    agents.iter().map(|agent| &agent.host).collect()
}

/// Returns stock etcdctl with the hosts of these agents as endpoints.
fn client(world: &Testbed, agents: &[AgentProcess]) -> Result<Etcdctl> {
    world.etcdctl("demo", &hosts_of(agents))
}

fn discovery(story: &mut DemoPrinter, options: &DemoOptions) -> Result<Testbed> {
    story.chapter("A private discovery service");
    let network = network(story, options);
    let world =
        Testbed::start(network, TestbedOptions { serve_args: Vec::new(), ..Default::default() })?;
    story.command("muster-discovery key new --out owner.pem          # on the admin's machine");
    story.command("muster-discovery init --owner PUBLIC_KEY --dir keys --url URL");
    story.command("muster-discovery serve --keys keys --managed-postgres pg --ledger ledger");
    story.print_checked(&format!("discovery and its own Postgres serve on {}", world.url()));
    Ok(world)
}

/// Returns network namespaces if they can be created and used here, otherwise loopback addresses.
fn network(story: &DemoPrinter, options: &DemoOptions) -> Network {
    let why = match options.loopback {
        true => "as asked".to_owned(),
        false => match Network::namespaces(HOSTS) {
            Ok(network) => {
                story.say("Each host is a network namespace with an address of its own.");
                return network;
            }
            Err(error) => format!("no network namespaces here: {error:#}"),
        },
    };
    story.say(&format!("Each host is an address of its own on loopback ({why})."));
    Network::loopback(HOSTS)
}

fn order(story: &mut DemoPrinter, world: &Testbed) -> Result<std::path::PathBuf> {
    story.chapter("An admin says what shall be");
    world.create_cluster("demo", 3, &[])?;
    story.command("muster-discovery cluster create demo --size 3 --allow-shared-host");
    let bundle = world.create_token("demo")?;
    story.command("muster-discovery token create --cluster demo --out demo.bundle");
    let text = fs_err::read_to_string(&bundle)?;
    let secret = text.rfind("mst_").context("a bundle ends in its token")?;
    story.say(&format!("{}mst_… (the secret stays in this file)", &text[..secret]));
    Ok(bundle)
}

fn form(
    story: &mut DemoPrinter,
    world: &Testbed,
    bundle: &std::path::Path,
) -> Result<Vec<AgentProcess>> {
    story.chapter("Three hosts that know nothing but the bundle");
    let mut agents = Vec::new();
    let mut third_started = Instant::now();
    for index in 0..FOUNDERS {
        let mut agent = world.agent(index, bundle);
        third_started = Instant::now();
        agent.start()?;
        story.command(&format!(
            "muster-agent run --data-dir {} --bundle-file demo.bundle     # on {} at {}",
            agent.host.name, agent.host.name, agent.host.address
        ));
        if index + 1 < FOUNDERS {
            agent.wait_for_output("waiting", LIMIT)?;
            let output = agent.output();
            let last = output.lines().rfind(|l| l.contains("waiting")).unwrap_or_default();
            story.say(&format!("{}: {last}", agent.host.name));
        }
        agents.push(agent);
    }
    let etcdctl = client(world, &agents)?;
    wait_for("the cluster to take a write", LIMIT, || {
        etcdctl
            .output(&[&["put", "first", "write"], &SHORT_RETRY_FLAGS[..]].concat())
            .ok()
            .filter(succeeded)
    })?;
    let took = third_started.elapsed().as_millis();
    let shown = world.wait_cluster_state("demo", "formed", LIMIT)?;
    story.print_checked(&format!("first write {took} ms after the third agent was started"));
    for phase in shown["timeline"].as_array().into_iter().flatten() {
        let event = phase["event"].as_str().unwrap_or_default();
        // Events before the list was full have no such time.
        if let Some(since) = phase["since_full_ms"].as_i64() {
            story.say(&format!("{since:>8} ms  {event}"));
        }
    }
    Ok(agents)
}

fn use_etcdctl(story: &mut DemoPrinter, world: &Testbed, etcdctl: &Etcdctl) -> Result<()> {
    story.chapter("Stock etcdctl, with a client certificate that nobody had to copy");
    story.command("muster-discovery cluster credentials demo --out demo-credentials");
    story.command("etcdctl member list");
    let members = etcdctl.run(&["member", "list", "-w", "table"])?;
    story.say(&members);
    let list = etcdctl.json(&["member", "list"])?;
    ensure!(list["members"].as_array().is_some_and(|m| m.len() == 3), "not three members: {list}");
    story.command("etcdctl put greeting hello; etcdctl get greeting");
    etcdctl.run(&["put", "greeting", "hello"])?;
    let got = etcdctl.run(&["get", "greeting", "--print-value-only"])?;
    ensure!(got.trim() == "hello", "read {got:?} after writing hello");
    story.print_checked("three members, and a value read back");
    let mut bare = etcdctl.command(&["get", "greeting", "--command-timeout", "1s"]);
    bare.env_remove("ETCDCTL_CERT").env_remove("ETCDCTL_KEY");
    ensure!(!bare.output()?.status.success(), "a client without a certificate was let in");
    story.print_checked("a client without a certificate is refused");
    ensure!(
        fs_err::read_dir(world.path("demo-credentials"))?.count() >= 3,
        "the credentials are incomplete"
    );
    Ok(())
}

fn lose_the_leader(
    story: &mut DemoPrinter,
    world: &Testbed,
    agents: &[AgentProcess],
) -> Result<()> {
    story.chapter("The leader is killed");
    let all = hosts_of(agents);
    let etcdctl = client(world, agents)?;
    let leader = wait_for("a leader", LIMIT, || etcdctl.leader(&all))?;
    let old = agents[leader].node_pid().context("the leader's node runs")?;
    agents[leader].kill_node()?;
    let killed = Instant::now();
    story.command(&format!("kill -9 {old}     # the node on {}", agents[leader].host.name));
    let others: Vec<&TestHost> =
        all.iter().enumerate().filter(|(i, _)| *i != leader).map(|(_, h)| *h).collect();
    let survivors = world.etcdctl("demo", &others)?;
    wait_for("a write after the leader's death", LIMIT, || {
        let args = [&["put", "after", "the leader"], &SHORT_RETRY_FLAGS[..]].concat();
        survivors.output(&args).ok().filter(succeeded)
    })?;
    story.print_checked(&format!(
        "a write succeeded again after {} ms",
        killed.elapsed().as_millis()
    ));
    let new = agents[leader].wait_new_node(old, LIMIT)?;
    let back = etcdctl.with_endpoint(all[leader]);
    wait_for("the killed node to catch up", LIMIT, || {
        let read = back.run(&["get", "after", "--consistency=s", "--print-value-only"]).ok()?;
        (read.trim() == "the leader").then_some(())
    })?;
    story.print_checked(&format!(
        "its agent started it again (process {new}), and it has caught up"
    ));
    Ok(())
}

fn lose_discovery(story: &mut DemoPrinter, world: &mut Testbed, etcdctl: &Etcdctl) -> Result<()> {
    story.chapter("Discovery and Postgres are gone");
    let postgres = world.postmaster_pid()?;
    let discovery = world.discovery.as_ref().context("discovery runs")?.id();
    world.kill_discovery();
    wait_for("Postgres to end with discovery", LIMIT, || (!is_alive(postgres)).then_some(()))?;
    story.command(&format!(
        "kill -9 {discovery}     # discovery; its Postgres ({postgres}) ends with it"
    ));
    let before = etcdctl.json(&["put", "without", "discovery"])?;
    let got = etcdctl.run(&["get", "without", "--print-value-only"])?;
    ensure!(got.trim() == "discovery", "read {got:?} while discovery was away");
    ensure!(before["header"]["revision"].as_i64().is_some_and(|r| r > 0), "no revision: {before}");
    story.print_checked("the cluster still writes and reads: discovery is not on its life line");
    Ok(())
}

fn shut_down(story: &mut DemoPrinter, agents: &mut [AgentProcess]) -> Result<()> {
    story.chapter("A clean end");
    for agent in agents.iter_mut() {
        let node = agent.node_pid().context("the node runs")?;
        let code = agent.terminate(LIMIT)?;
        ensure!(code == 0, "the agent on {} ended with {code}", agent.host.name);
        ensure!(!is_alive(node), "the node on {} outlived its agent", agent.host.name);
    }
    story.print_checked(&format!("{} agents ended with 0, each after its node", agents.len()));
    Ok(())
}

fn keep(
    story: &mut DemoPrinter,
    world: Testbed,
    agents: Vec<AgentProcess>,
    etcdctl: &Etcdctl,
) -> Result<()> {
    story.chapter("Left running (KEEP=1)");
    let credentials = etcdctl.credentials().display().to_string();
    story.say(&format!(
        "export ETCDCTL_API=3 ETCDCTL_CACERT={credentials}/ca.crt ETCDCTL_CERT={credentials}/client.crt \\\n  \
         ETCDCTL_KEY={credentials}/client.key ETCDCTL_ENDPOINTS={}",
        etcdctl.endpoints().join(",")
    ));
    let hub = world.network.hub.prefix();
    story.command(&format!("{hub}etcdctl endpoint status --cluster -w table"));
    let mut pids = vec![world.discovery.as_ref().context("discovery runs")?.id()];
    for agent in agents {
        story.command(&format!(
            "{}{} status --data-dir {}",
            agent.host.prefix(),
            program_path("muster-agent")?.display(),
            agent.data_dir.display()
        ));
        pids.extend(agent.process_id());
        agent.leave_running();
    }
    let (folder, namespaces) = world.leave_running();
    let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
    story.say("To end it (agents end their nodes, discovery ends its Postgres):");
    story.command(&format!("kill {}", pids.join(" ")));
    for namespace in namespaces {
        story.command(&format!("ip netns del {namespace}"));
    }
    story.command(&format!("rm -rf {}", folder.display()));
    Ok(())
}
