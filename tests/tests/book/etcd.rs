//! The pages about moves between etcd and `muster-node`, and about data directories.

use muster_tests::harness::credentials::Credentials;
use muster_tests::harness::programs::program_path;
use muster_tests::harness::{NodeProcess, TestHost};
use muster_tests::stock_etcd;

use super::*;

/// Names of the target's members on the page.
const NAMES: [&str; 3] = ["one", "two", "three"];

/// Returns members that are not started, with mutual TLS, and their `--initial-cluster`.
fn members(
    hosts: &[TestHost],
    names: &[&str],
    program: &Path,
    (folder, credentials): (&Path, &Credentials),
) -> (Vec<NodeProcess>, String) {
    let each = names.iter().zip(hosts);
    let initial: Vec<String> =
        each.map(|(name, host)| format!("{name}=https://{}", host.at_port(2380))).collect();
    let initial = initial.join(",");
    let make = |(name, host): (&&str, &TestHost)| {
        let mut node = NodeProcess::new(host, &format!("{name}.etcd"), program, folder);
        for flag in &mut node.flags {
            *flag = flag.replace("http://", "https://");
        }
        node.flags.extend(credentials.mutual_flags());
        node.flags.extend([format!("--name={name}"), format!("--initial-cluster={initial}")]);
        node
    };
    (names.iter().zip(hosts).map(make).collect(), initial)
}

/// The page's commands move an etcd of three members to a `muster-node` of three members, each with
/// a CA of its own.
#[test]
fn a_move_and_a_comparison() -> Result<()> {
    let Some(etcd) = stock_etcd::oldest() else { return Ok(()) };
    let (network, folder) = (Network::loopback(6), tempfile::tempdir()?);
    let sections = ["Move", "Compare two clusters"];
    let mut typed = Typist::open("docs/etcd.md", &sections, &folder.path().join("typed"))?;
    typed.machine("", &network.hub, &[]);
    let [old, new] = [&network.hosts[..3], &network.hosts[3..]];
    for (n, (old, new)) in (1..).zip(old.iter().zip(new)) {
        for port in [2379, 2380] {
            typed.replace(&format!("10.0.0.{n}:{port}"), old.at_port(port));
            typed.replace(&format!("10.0.1.{n}:{port}"), new.at_port(port));
        }
    }
    let mut sides = Vec::new();
    for (side, hosts) in [("old", old), ("new", new)] {
        let mut names: Vec<String> = hosts.iter().map(|host| host.address.to_string()).collect();
        names.push("127.0.0.1".to_owned());
        let credentials = Credentials::make(&folder.path().join(side), &names)?;
        for (file, page) in [("ca.crt", "-ca.crt"), ("client.crt", ".crt"), ("client.key", ".key")]
        {
            let from = folder.path().join(side).join(file);
            fs_err::copy(from, typed.path(&format!("{side}{page}")))?;
        }
        sides.push(credentials);
    }
    let node = program_path("muster-node")?;
    let (mut source, _) = members(old, &["a", "b", "c"], &etcd, (folder.path(), &sides[0]));
    let (mut target, initial) = members(new, &NAMES, &node, (&typed.path(""), &sides[1]));
    for node in &mut source {
        node.start()?;
    }
    for node in &mut source {
        node.wait_ready(LIMIT)?;
    }
    let hub = network.hub.clone();
    let etcdctl = |side: &str, host: &TestHost| {
        let endpoint = vec![format!("https://{}", host.at_port(2379))];
        Etcdctl::new(hub.clone(), folder.path().join(side), endpoint)
    };
    for n in 0..20 {
        etcdctl("old", &old[n % 3]).run(&["put", &format!("key-{n}"), "value"])?;
    }
    typed.start("muster-node move moved.db --freeze", &[], "4 target:")?;
    for (name, host) in NAMES.iter().zip(new) {
        let restore = format!(
            "muster-node snapshot restore moved.db --name {name} --data-dir {name}.etcd \
             --initial-cluster {initial} --initial-advertise-peer-urls https://{}",
            host.at_port(2380)
        );
        typed.type_line("", &restore)?;
    }
    target.iter_mut().try_for_each(NodeProcess::start)?;
    let moved = typed.wait_last()?;
    ensure!(moved.contains("read-only"), "{moved}");
    etcdctl("new", &new[0]).run(&["put", "after", "the move"])?;
    // The source takes writes again only after the page's next command.
    let frozen = etcdctl("old", &old[0]);
    ensure!(!frozen.output(&["put", "late", "x"])?.status.success(), "the source takes writes");
    for (variable, file) in [("CACERT", "ca.crt"), ("CERT", "client.crt"), ("KEY", "client.key")] {
        let file = folder.path().join("old").join(file);
        typed.set("", &format!("ETCDCTL_{variable}"), path_text(&file)?)?;
    }
    typed.run("alarm disarm")?;
    frozen.run(&["put", "late", "x"])?;
    let status = frozen.json(&["endpoint", "status"])?;
    let now = status[0]["Status"]["header"]["revision"].as_u64().context("a revision")?;
    typed.run_with("compare --revision", &[("4012", &(now - 1).to_string())])?;
    typed.finish()
}

/// A member is stopped. Its data becomes a new cluster of one member in each of the page's two
/// ways.
#[test]
fn recovery_without_an_agent() -> Result<()> {
    let (network, folder) = (Network::loopback(1), tempfile::tempdir()?);
    let (host, node) = (&network.hosts[0], program_path("muster-node")?);
    let sections = ["Without an agent"];
    let mut typed = Typist::open("docs/other-recovery.md", &sections, folder.path())?;
    typed.machine("", &network.hub, &[]);
    let mut member = NodeProcess::new(host, "DIR", &node, folder.path());
    let peer = format!("http://{}", host.at_port(2380));
    member.flags.extend(["--name=one".to_owned(), format!("--initial-cluster=one={peer}")]);
    member.start()?;
    member.wait_ready(LIMIT)?;
    let put = format!("etcdctl --endpoints http://{} put kept value", host.at_port(2379));
    typed.type_line("", &put)?;
    member.stop(LIMIT)?;
    let status = typed.run("muster-node data status DIR")?;
    ensure!(status.contains("one"), "{status}");
    typed.run("muster-node data recover DIR --i-accept-data-loss")?;
    let flags = member.flags.iter().filter(|flag| flag.contains("-urls=")).cloned();
    let flags = flags.collect::<Vec<_>>().join(" ");
    let with_urls = format!("--force-new-cluster {flags} ");
    let urls = [("--force-new-cluster", with_urls.as_str())];
    typed.start(
        "muster-node --name one --data-dir DIR",
        &urls,
        "ready to serve client requests",
    )?;
    let get = format!("etcdctl --endpoints http://{} get kept", host.at_port(2379));
    ensure!(typed.type_line("", &get)?.contains("value"));
    typed.stop_last()?;
    typed.finish()
}
