//! The demo: it runs the main use case and prints what happens. Each printed claim was checked
//! before; the first one that doesn't hold ends the demo with an error.

mod members;
pub mod printer;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;

use crate::harness::process::is_alive;
use crate::harness::programs::program_path;
use crate::harness::testbed::TestbedOptions;
use crate::harness::{AgentProcess, Etcdctl, Network, TestHost, Testbed, wait_for};
use printer::DemoPrinter;

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

/// Flags that make etcdctl give up early. Without a reachable endpoint, etcdctl waits a second
/// before its next attempt. Starting etcdctl again instead measures an outage more exactly.
const SHORT_RETRY_FLAGS: [&str; 2] = ["--command-timeout=400ms", "--dial-timeout=300ms"];

fn succeeded(output: &std::process::Output) -> bool {
    output.status.success()
}

/// Runs the whole demo.
///
/// # Errors
/// The first step that failed, or claim that didn't hold.
pub fn run(options: &DemoOptions) -> Result<()> {
    let mut printer = DemoPrinter::default();
    let mut testbed = start_discovery(&mut printer, options)?;
    let bundle = create_cluster(&mut printer, &testbed)?;
    let mut agents = form_cluster(&mut printer, &testbed, &bundle)?;
    use_etcdctl(&mut printer, &testbed, &client(&testbed, &agents)?)?;
    lose_the_leader(&mut printer, &testbed, &agents)?;
    members::replace_one(&mut printer, &testbed, &mut agents)?;
    members::join_one(&mut printer, &testbed, &mut agents)?;
    let etcdctl = client(&testbed, &agents)?;
    if options.keep {
        return leave_running(&mut printer, testbed, agents, &etcdctl);
    }
    lose_discovery(&mut printer, &mut testbed, &etcdctl)?;
    members::remove_one(&mut printer, &testbed, &mut agents)?;
    shut_down(&mut printer, &mut agents)?;
    printer.end("All of it was checked.");
    Ok(())
}

fn hosts_of(agents: &[AgentProcess]) -> Vec<&TestHost> {
    agents.iter().map(|agent| &agent.host).collect()
}

/// Returns stock etcdctl with the hosts of these agents as endpoints.
fn client(testbed: &Testbed, agents: &[AgentProcess]) -> Result<Etcdctl> {
    testbed.etcdctl("demo", &hosts_of(agents))
}

fn start_discovery(printer: &mut DemoPrinter, options: &DemoOptions) -> Result<Testbed> {
    printer.chapter("A private discovery service");
    let network = create_network(printer, options);
    let testbed =
        Testbed::start(network, TestbedOptions { serve_args: Vec::new(), ..Default::default() })?;
    printer.command("muster-discovery key new --out owner.pem          # on the admin's machine");
    printer.command("muster-discovery init --owner PUBLIC_KEY --dir keys --url URL");
    printer.command("muster-discovery serve --keys keys --managed-postgres pg --ledger ledger");
    printer.print_checked(&format!("discovery and its own Postgres serve on {}", testbed.url()));
    Ok(testbed)
}

/// Returns network namespaces if they can be created and used here, otherwise loopback addresses.
fn create_network(printer: &DemoPrinter, options: &DemoOptions) -> Network {
    let why = match options.loopback {
        true => "as asked".to_owned(),
        false => match Network::namespaces(HOSTS) {
            Ok(network) => {
                printer.print_step("Each host is a network namespace with an address of its own.");
                return network;
            }
            Err(error) => format!("no network namespaces here: {error:#}"),
        },
    };
    printer.print_step(&format!("Each host is an address of its own on loopback ({why})."));
    Network::loopback(HOSTS)
}

fn create_cluster(printer: &mut DemoPrinter, testbed: &Testbed) -> Result<std::path::PathBuf> {
    printer.chapter("An admin says what shall be");
    testbed.create_cluster("demo", 3, &[])?;
    printer.command("muster-discovery cluster create demo --size 3 --allow-shared-host");
    let bundle = testbed.create_token("demo")?;
    printer.command("muster-discovery token create --cluster demo --out demo.bundle");
    let text = fs_err::read_to_string(&bundle)?;
    let secret = text.rfind("mst_").context("a bundle ends in its token")?;
    printer.print_step(&format!("{}mst_… (the secret stays in this file)", &text[..secret]));
    Ok(bundle)
}

fn form_cluster(
    printer: &mut DemoPrinter,
    testbed: &Testbed,
    bundle: &std::path::Path,
) -> Result<Vec<AgentProcess>> {
    printer.chapter("Three hosts that know nothing but the bundle");
    let mut agents = Vec::new();
    let mut third_started = Instant::now();
    for index in 0..FOUNDERS {
        let mut agent = testbed.agent(index, bundle);
        third_started = Instant::now();
        agent.start()?;
        printer.command(&format!(
            "muster-agent run --data-dir {} --bundle-file demo.bundle     # on {} at {}",
            agent.host.name, agent.host.name, agent.host.address
        ));
        if index + 1 < FOUNDERS {
            agent.wait_for_output("waiting", LIMIT)?;
            let output = agent.output();
            let last = output.lines().rfind(|l| l.contains("waiting")).unwrap_or_default();
            printer.print_step(&format!("{}: {last}", agent.host.name));
        }
        agents.push(agent);
    }
    let etcdctl = client(testbed, &agents)?;
    wait_for("the cluster to take a write", LIMIT, || {
        etcdctl
            .output(&[&["put", "first", "write"], &SHORT_RETRY_FLAGS[..]].concat())
            .ok()
            .filter(succeeded)
    })?;
    let took = third_started.elapsed().as_millis();
    let cluster = testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    printer.print_checked(&format!("first write {took} ms after the third agent was started"));
    for phase in cluster["timeline"].as_array().into_iter().flatten() {
        let event = phase["event"].as_str().unwrap_or_default();
        // Times are relative to the moment at which the list of members was full. Earlier events
        // have no time.
        if let Some(since) = phase["since_full_ms"].as_i64() {
            printer.print_step(&format!("{since:>8} ms  {event}"));
        }
    }
    Ok(agents)
}

fn use_etcdctl(printer: &mut DemoPrinter, testbed: &Testbed, etcdctl: &Etcdctl) -> Result<()> {
    printer.chapter("Stock etcdctl, with a client certificate that nobody had to copy");
    printer.command("muster-discovery cluster credentials demo --out demo-credentials");
    printer.command("etcdctl member list");
    let members = etcdctl.run(&["member", "list", "-w", "table"])?;
    printer.print_step(&members);
    let list = etcdctl.json(&["member", "list"])?;
    ensure!(list["members"].as_array().is_some_and(|m| m.len() == 3), "not three members: {list}");
    printer.command("etcdctl put greeting hello; etcdctl get greeting");
    etcdctl.run(&["put", "greeting", "hello"])?;
    let value = etcdctl.run(&["get", "greeting", "--print-value-only"])?;
    ensure!(value.trim() == "hello", "read {value:?} after writing hello");
    printer.print_checked("three members, and a value read back");
    let mut without_certificate = etcdctl.command(&["get", "greeting", "--command-timeout", "1s"]);
    without_certificate.env_remove("ETCDCTL_CERT").env_remove("ETCDCTL_KEY");
    ensure!(
        !without_certificate.output()?.status.success(),
        "a client without a certificate was let in"
    );
    printer.print_checked("a client without a certificate is refused");
    ensure!(
        fs_err::read_dir(testbed.path("demo-credentials"))?.count() >= 3,
        "the credentials are incomplete"
    );
    Ok(())
}

fn lose_the_leader(
    printer: &mut DemoPrinter,
    testbed: &Testbed,
    agents: &[AgentProcess],
) -> Result<()> {
    printer.chapter("The leader is killed");
    let all = hosts_of(agents);
    let etcdctl = client(testbed, agents)?;
    let leader = wait_for("a leader", LIMIT, || etcdctl.leader(&all))?;
    let old_pid = agents[leader].node_pid().context("the leader's node runs")?;
    agents[leader].kill_node()?;
    let killed = Instant::now();
    printer.command(&format!("kill -9 {old_pid}     # the node on {}", agents[leader].host.name));
    let others: Vec<&TestHost> =
        all.iter().enumerate().filter(|(i, _)| *i != leader).map(|(_, h)| *h).collect();
    let survivors = testbed.etcdctl("demo", &others)?;
    wait_for("a write after the leader's death", LIMIT, || {
        let args = [&["put", "after", "the leader"], &SHORT_RETRY_FLAGS[..]].concat();
        survivors.output(&args).ok().filter(succeeded)
    })?;
    printer.print_checked(&format!(
        "a write succeeded again after {} ms",
        killed.elapsed().as_millis()
    ));
    let new_pid = agents[leader].wait_new_node(old_pid, LIMIT)?;
    let restarted = etcdctl.with_endpoint(all[leader]);
    wait_for("the killed node to catch up", LIMIT, || {
        let read =
            restarted.run(&["get", "after", "--consistency=s", "--print-value-only"]).ok()?;
        (read.trim() == "the leader").then_some(())
    })?;
    printer.print_checked(&format!(
        "its agent started it again (process {new_pid}), and it has caught up"
    ));
    Ok(())
}

fn lose_discovery(
    printer: &mut DemoPrinter,
    testbed: &mut Testbed,
    etcdctl: &Etcdctl,
) -> Result<()> {
    printer.chapter("Discovery and Postgres are gone");
    let postgres = testbed.postmaster_pid()?;
    let discovery = testbed.discovery.as_ref().context("discovery runs")?.id();
    testbed.kill_discovery();
    wait_for("Postgres to end with discovery", LIMIT, || (!is_alive(postgres)).then_some(()))?;
    printer.command(&format!(
        "kill -9 {discovery}     # discovery; its Postgres ({postgres}) ends with it"
    ));
    let before = etcdctl.json(&["put", "without", "discovery"])?;
    let value = etcdctl.run(&["get", "without", "--print-value-only"])?;
    ensure!(value.trim() == "discovery", "read {value:?} while discovery was away");
    ensure!(before["header"]["revision"].as_i64().is_some_and(|r| r > 0), "no revision: {before}");
    printer.print_checked("the cluster still writes and reads: discovery is not on its life line");
    Ok(())
}

fn shut_down(printer: &mut DemoPrinter, agents: &mut [AgentProcess]) -> Result<()> {
    printer.chapter("A clean end");
    for agent in agents.iter_mut() {
        let node = agent.node_pid().context("the node runs")?;
        let code = agent.terminate(LIMIT)?;
        ensure!(code == 0, "the agent on {} ended with {code}", agent.host.name);
        ensure!(!is_alive(node), "the node on {} outlived its agent", agent.host.name);
    }
    printer.print_checked(&format!("{} agents ended with 0, each after its node", agents.len()));
    Ok(())
}

fn leave_running(
    printer: &mut DemoPrinter,
    testbed: Testbed,
    agents: Vec<AgentProcess>,
    etcdctl: &Etcdctl,
) -> Result<()> {
    printer.chapter("Left running (KEEP=1)");
    let credentials = etcdctl.credentials().display().to_string();
    printer.print_step(&format!(
        "export ETCDCTL_API=3 ETCDCTL_CACERT={credentials}/ca.crt ETCDCTL_CERT={credentials}/client.crt \\\n  \
         ETCDCTL_KEY={credentials}/client.key ETCDCTL_ENDPOINTS={}",
        etcdctl.endpoints().join(",")
    ));
    let hub = testbed.network.hub.prefix();
    printer.command(&format!("{hub}etcdctl endpoint status --cluster -w table"));
    let mut pids = vec![testbed.discovery.as_ref().context("discovery runs")?.id()];
    for agent in agents {
        printer.command(&format!(
            "{}{} status --data-dir {}",
            agent.host.prefix(),
            program_path("muster-agent")?.display(),
            agent.data_dir.display()
        ));
        pids.extend(agent.process_id());
        agent.leave_running();
    }
    let (folder, namespaces) = testbed.leave_running();
    let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
    printer.print_step("To end it (agents end their nodes, discovery ends its Postgres):");
    printer.command(&format!("kill {}", pids.join(" ")));
    for namespace in namespaces {
        printer.command(&format!("ip netns del {namespace}"));
    }
    printer.command(&format!("rm -rf {}", folder.display()));
    Ok(())
}
