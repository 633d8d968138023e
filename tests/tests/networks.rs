//! Clusters on hosts whose addresses are unusual: IPv6 alone, two interfaces, routers that
//! translate addresses, and names instead of addresses.

use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::agents::AgentOptions;
use muster_tests::harness::process::last_lines;
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{AgentProcess, Etcdctl, Network, TestHost, Testbed, poll_slowly, skip};
use muster_tests::stock_etcd;

const LIMIT: Duration = Duration::from_secs(90);
/// Time limit of a connection in these networks, which lose no packets.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);
/// Number of hosts that form the cluster; the network has one more.
const SIZE: usize = 3;

/// A cluster of three, and a host that may join later.
struct OddNetworkCluster {
    /// Declared before `testbed`, because dropping an agent needs the test bed's folder.
    agents: Vec<AgentProcess>,
    testbed: Testbed,
    args: Vec<Vec<String>>,
}

impl OddNetworkCluster {
    /// Forms a cluster. `args` are the arguments of each host's agent.
    fn form(network: Network, args: Vec<Vec<String>>) -> Result<Self> {
        let testbed = Testbed::start(network, TestbedOptions::default())?;
        let bundle = testbed.create_cluster_with_token("demo", SIZE)?;
        let mut cluster = Self { agents: Vec::new(), testbed, args };
        for host in 0..SIZE {
            cluster.start_agent(host, &bundle)?;
        }
        let formed = cluster.testbed.wait_cluster_state("demo", "formed", LIMIT);
        formed.with_context(|| cluster.logs())?;
        Ok(cluster)
    }

    fn start_agent(&mut self, host: usize, bundle: &Path) -> Result<()> {
        let args = self.args.get(host).cloned().unwrap_or_default();
        let options = AgentOptions { args, ..AgentOptions::default() };
        let mut agent = self.testbed.agent_with(host, bundle, options);
        agent.start()?;
        self.agents.push(agent);
        Ok(())
    }

    /// Lets the fourth host join with a ticket, and waits until it votes. `etcdctl` asks the
    /// present members, and finds the host's member by `peer_url`.
    fn join_fourth(&mut self, etcdctl: &Etcdctl, peer_url: &str) -> Result<()> {
        let ticket = self.testbed.path("fourth.ticket");
        let create = ["token", "create", "--cluster", "demo", "--kind", "join", "--out"];
        self.testbed.admin_command(&[&create[..], &[path_text(&ticket)?]].concat())?;
        self.start_agent(SIZE, &ticket)?;
        poll_slowly("the fourth host to vote", LIMIT, || {
            let list = etcdctl.json(&["member", "list"]).ok()?;
            let mut members = list["members"].as_array()?.iter();
            let own = members.find(|member| member["peerURLs"][0] == peer_url)?;
            (own["isLearner"] != true && own["name"].is_string()).then_some(())
        })
        .with_context(|| self.logs())
    }

    /// Returns `etcdctl` with the endpoints that discovery prints for the present members.
    fn etcdctl(&self) -> Result<Etcdctl> {
        let hosts: Vec<&TestHost> = self.agents.iter().map(|agent| &agent.host).collect();
        self.testbed.etcdctl("demo", &hosts)
    }

    /// Waits until each of these endpoints takes a write. `etcdctl` runs on the machine `from`.
    fn wait_writes(&self, from: &TestHost, endpoints: &[String]) -> Result<()> {
        let credentials = self.etcdctl()?.credentials().clone();
        for endpoint in endpoints {
            let at = vec![endpoint.clone()];
            let etcdctl = Etcdctl::new(from.clone(), credentials.clone(), at);
            let written = poll_slowly(&format!("{endpoint} to take a write"), LIMIT, || {
                etcdctl.run(&["put", "key", "value"]).ok()
            });
            written.with_context(|| self.logs())?;
        }
        Ok(())
    }

    /// Returns the peer URLs of the members, in order.
    fn peer_urls(&self, etcdctl: &Etcdctl) -> Result<Vec<String>> {
        let list = etcdctl.json(&["member", "list"])?;
        let members = list["members"].as_array().context("members")?.iter();
        let url = |member: &serde_json::Value| Some(member["peerURLs"][0].as_str()?.to_owned());
        let mut urls: Vec<String> = members.filter_map(url).collect();
        urls.sort();
        Ok(urls)
    }

    /// Kills all agents and nodes, and starts the agents again.
    fn power_cycle(&mut self) -> Result<()> {
        for agent in &mut self.agents {
            agent.kill();
            agent.kill_node()?;
        }
        self.agents.iter_mut().try_for_each(AgentProcess::start)
    }

    fn logs(&self) -> String {
        let explained = self.testbed.admin_command(&["cluster", "explain", "demo"]);
        let explained = explained.unwrap_or_else(|error| error.to_string());
        let logs = self.agents.iter().map(|agent| last_lines(&agent.output(), 20));
        [vec![explained], logs.collect()].concat().join("\n---\n")
    }
}

/// Returns a network in namespaces. Without namespaces, records that the test is skipped and
/// returns `None`.
fn namespaces(made: Result<Network>) -> Option<Network> {
    let skipped = |error: &anyhow::Error| {
        skip::report_skip(format_args!("no network namespaces here: {error:#}"));
    };
    made.inspect_err(skipped).ok()
}

fn client_urls<'h>(hosts: impl IntoIterator<Item = &'h TestHost>) -> Vec<String> {
    hosts.into_iter().map(|host| format!("https://{}", host.at_port(2379))).collect()
}

fn advertise(address: &str) -> Vec<String> {
    vec!["--advertise-address".to_owned(), address.to_owned()]
}

/// No machine has an IPv4 address beside loopback. The cluster forms, restarts without discovery,
/// follows a host to another address, and admits a fourth host.
#[test]
fn hosts_with_ipv6_alone_form_restart_move_and_join() -> Result<()> {
    let Some(network) = namespaces(Network::ipv6_namespaces(4)) else { return Ok(()) };
    let hub = network.hub.clone();
    let mut cluster = OddNetworkCluster::form(network, Vec::new())?;
    let urls = client_urls(&cluster.testbed.network.hosts[..SIZE]);
    cluster.wait_writes(&hub, &urls)?;
    let shown = cluster.testbed.admin_command(&["cluster", "show", "demo"])?;
    ensure!(shown.contains("https://[fd77::b]:2379"), "{shown}");

    cluster.testbed.stop_discovery()?;
    cluster.power_cycle()?;
    cluster.wait_writes(&hub, &urls)?;
    cluster.testbed.start_discovery()?;

    cluster.agents[0].host = cluster.testbed.network.change_address(0, 0x65)?;
    let moved = cluster.agents[0].host.clone();
    let etcdctl = cluster.etcdctl()?;
    let own = format!("https://{}", moved.at_port(2380));
    poll_slowly("the cluster to record the new address", LIMIT, || {
        cluster.peer_urls(&etcdctl).ok()?.contains(&own).then_some(())
    })
    .with_context(|| cluster.logs())?;
    cluster.wait_writes(&hub, &client_urls([&moved]))?;
    let fourth = format!("https://{}", cluster.testbed.network.hosts[3].at_port(2380));
    cluster.join_fourth(&etcdctl, &fourth)
}

/// Discovery is reached by one interface, and the members reach each other by another one, which
/// `--advertise-address` chooses. The node listens only there, and works without the first
/// interface.
#[test]
fn hosts_with_two_interfaces_use_the_one_that_is_advertised() -> Result<()> {
    let Some(network) = namespaces(Network::namespaces(4)) else { return Ok(()) };
    let second: Vec<IpAddr> = network.add_second_network()?;
    let args = second.iter().map(|address| advertise(&address.to_string())).collect();
    let mut cluster = OddNetworkCluster::form(network, args)?;
    let urls: Vec<String> =
        second.iter().map(|address| format!("https://{address}:2379")).collect();
    // The hub has no route to the second network, so clients run on the hosts.
    let first = cluster.testbed.network.hosts[0].clone();
    let credentials = cluster.testbed.path("demo-credentials");
    let out = path_text(&credentials)?;
    cluster.testbed.admin_command(&["cluster", "credentials", "demo", "--out", out])?;
    cluster.wait_writes(&first, &urls[..SIZE])?;
    let by_second = SocketAddr::from((second[0], 2379));
    let (other, on_first) = (cluster.testbed.network.hosts[1].clone(), first.at_port(2379));
    let connected = std::thread::spawn(move || -> Result<(bool, bool)> {
        other.enter_namespace()?;
        let opens = |at: &SocketAddr| TcpStream::connect_timeout(at, CONNECT_LIMIT).is_ok();
        Ok((opens(&by_second), opens(&on_first)))
    });
    let connected = connected.join().expect("the thread doesn't panic")?;
    ensure!(connected == (true, false), "open on the second and on the first: {connected:?}");

    cluster.testbed.network.set_links(false)?;
    cluster.power_cycle()?;
    cluster.wait_writes(&first, &urls[..SIZE])?;
    cluster.testbed.network.set_links(true)?;
    let ticket = cluster.testbed.path("fourth.ticket");
    let create = ["token", "create", "--cluster", "demo", "--kind", "join", "--out"];
    cluster.testbed.admin_command(&[&create[..], &[path_text(&ticket)?]].concat())?;
    cluster.start_agent(SIZE, &ticket)?;
    let etcdctl = Etcdctl::new(first, credentials, urls[..SIZE].to_vec());
    let own = format!("https://{}:2380", second[SIZE]);
    poll_slowly("the fourth host to be a member by its second address", LIMIT, || {
        cluster.peer_urls(&etcdctl).ok()?.contains(&own).then_some(())
    })
    .with_context(|| cluster.logs())?;
    cluster.wait_writes(&cluster.testbed.network.hosts[1], &urls[SIZE..])
}

/// All hosts have one private address, each behind a router of its own, and reach each other at the
/// routers' addresses only.
fn check_translated_addresses(node: Option<&Path>) -> Result<()> {
    if !Network::can_be_cut() {
        return Ok(());
    }
    let mut network = Network::namespaces(4)?;
    network.put_behind_routers()?;
    let hub = network.hub.clone();
    let node = match node {
        Some(node) => vec!["--node-binary".to_owned(), path_text(node)?.to_owned()],
        None => Vec::new(),
    };
    let public = |host: &TestHost| [advertise(&host.address.to_string()), node.clone()].concat();
    let args = network.hosts.iter().map(public).collect();
    let mut cluster = OddNetworkCluster::form(network, args)?;
    let urls = client_urls(&cluster.testbed.network.hosts);
    cluster.wait_writes(&hub, &urls[..SIZE])?;

    cluster.testbed.stop_discovery()?;
    cluster.power_cycle()?;
    cluster.wait_writes(&hub, &urls[..SIZE])?;
    cluster.testbed.start_discovery()?;
    let fourth = format!("https://{}", cluster.testbed.network.hosts[SIZE].at_port(2380));
    let etcdctl = cluster.etcdctl()?;
    cluster.join_fourth(&etcdctl, &fourth)?;
    // The host keeps its private address, so the agent must not take its member for a moved one.
    let listed = cluster.peer_urls(&etcdctl)?;
    let expected = cluster.testbed.network.hosts.iter();
    let expected: Vec<String> =
        expected.map(|host| format!("https://{}", host.at_port(2380))).collect();
    ensure!(listed == expected, "{listed:?}");
    cluster.wait_writes(&hub, &urls)
}

#[test]
fn hosts_behind_routers_that_translate_addresses_form_restart_and_join() -> Result<()> {
    check_translated_addresses(None)
}

#[test]
fn hosts_with_etcd_3_4_behind_routers_that_translate_addresses_form_restart_and_join() -> Result<()>
{
    stock_etcd::oldest().map_or(Ok(()), |etcd| check_translated_addresses(Some(&etcd)))
}

/// The members' URLs have names. Two hosts of three move to other addresses, one while the other
/// one is down, and their names follow. Nobody tells the cluster, and discovery is down.
fn check_names(node: Option<&Path>) -> Result<()> {
    let Some(mut network) = namespaces(Network::namespaces(4)) else { return Ok(()) };
    if let Err(error) = network.use_names() {
        skip::report_skip(format_args!("no names in namespaces here: {error:#}"));
        return Ok(());
    }
    let hub = network.hub.clone();
    let node = match node {
        Some(node) => vec!["--node-binary".to_owned(), path_text(node)?.to_owned()],
        None => Vec::new(),
    };
    let named = |host: &TestHost| [advertise(&host.dns_name()), node.clone()].concat();
    let args = network.hosts.iter().map(named).collect();
    let names: Vec<String> = network.hosts.iter().map(TestHost::dns_name).collect();
    let mut cluster = OddNetworkCluster::form(network, args)?;
    let urls: Vec<String> = names.iter().map(|name| format!("https://{name}:2379")).collect();
    cluster.wait_writes(&hub, &urls[..SIZE])?;
    let shown = cluster.testbed.admin_command(&["cluster", "show", "demo"])?;
    ensure!(urls[..SIZE].iter().all(|url| shown.contains(url.as_str())), "{shown}");

    cluster.testbed.stop_discovery()?;
    cluster.agents[0].kill();
    cluster.agents[0].kill_node()?;
    for (host, last) in [(0, 101), (1, 102)] {
        cluster.agents[host].host = cluster.testbed.network.change_address(host, last)?;
    }
    cluster.wait_writes(&hub, &urls[1..SIZE])?;
    cluster.agents[0].start()?;
    cluster.wait_writes(&hub, &urls[..SIZE])?;
    cluster.testbed.start_discovery()?;
    let credentials = cluster.etcdctl()?.credentials().clone();
    let etcdctl = Etcdctl::new(hub, credentials, urls.clone());
    cluster.join_fourth(&etcdctl, &format!("https://{}:2380", names[SIZE]))?;
    let expected: Vec<String> = names.iter().map(|name| format!("https://{name}:2380")).collect();
    let listed = cluster.peer_urls(&etcdctl)?;
    ensure!(listed == expected, "{listed:?}");
    etcdctl.run(&["endpoint", "health"]).map(drop)
}

#[test]
fn hosts_with_names_move_without_a_change_of_the_cluster() -> Result<()> {
    check_names(None)
}

#[test]
fn hosts_with_names_and_etcd_3_4_move_without_a_change_of_the_cluster() -> Result<()> {
    stock_etcd::oldest().map_or(Ok(()), |etcd| check_names(Some(&etcd)))
}
