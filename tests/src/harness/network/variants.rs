//! Networks that differ from a plain one: hosts with a second interface, hosts behind a router that
//! translates addresses, and hosts with names.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::{Network, TestHost, run, run_in};

/// Address of each host behind a router. All hosts have this one, each in a network of its own.
const PRIVATE_ADDRESS: &str = "192.168.77.2";
/// Address of the router in the private network of its host.
const ROUTER_ADDRESS: &str = "192.168.77.1";
/// Rules of a router. It passes the node's two ports on to its host, also for connections that the
/// host itself makes to its public address. A connection of the host to others comes from the
/// public address, and a connection to the host keeps its source.
const ROUTER_RULES: &str = "add table ip nat; \
    add chain ip nat arriving { type nat hook prerouting priority -100; }; \
    add rule ip nat arriving ip daddr PUBLIC tcp dport { 2379, 2380 } dnat to PRIVATE; \
    add chain ip nat leaving { type nat hook postrouting priority 100; }; \
    add rule ip nat leaving oifname eth0 masquerade; \
    add rule ip nat leaving ip saddr PRIVATE ip daddr PRIVATE masquerade";

/// Folder in which `ip netns exec` finds files that replace those of `/etc` in a namespace.
pub(super) fn names_folder(namespace: &str) -> PathBuf {
    Path::new("/etc/netns").join(namespace)
}

impl TestHost {
    /// Returns the host's name in the network's hosts files. See [`Network::use_names`].
    pub fn dns_name(&self) -> String {
        format!("{}.muster.test", self.name)
    }
}

impl Network {
    /// Connects all hosts by a second network, without the hub. Returns each host's address there.
    /// Works in namespaces only.
    pub fn add_second_network(&self) -> Result<Vec<IpAddr>> {
        let hub = self.hub.namespace.as_deref().context("loopback hosts have one interface")?;
        run_in(hub, &["link", "add", "br1", "type", "bridge"])?;
        run_in(hub, &["link", "set", "br1", "up"])?;
        let mut addresses = Vec::new();
        for (i, host) in (1..).zip(&self.hosts) {
            let namespace = host.namespace.as_deref().context("a namespace")?;
            let port = format!("q{i}");
            let peer = ["peer", "name", "eth1", "netns", namespace];
            run_in(hub, &[&["link", "add", &port, "type", "veth"][..], &peer].concat())?;
            run_in(hub, &["link", "set", &port, "master", "br1", "up"])?;
            let address = Ipv4Addr::new(10, 78, 0, 10 + i);
            run_in(namespace, &["addr", "add", &format!("{address}/24"), "dev", "eth1"])?;
            run_in(namespace, &["link", "set", "eth1", "up"])?;
            addresses.push(address.into());
        }
        Ok(addresses)
    }

    /// Puts each host behind a router of its own that translates addresses (NAT), as some clouds
    /// do. [`TestHost::address`] remains the public address, which then belongs to the router.
    /// Works in namespaces only, and needs nft.
    pub fn put_behind_routers(&mut self) -> Result<()> {
        for i in 0..self.hosts.len() {
            let public = self.hosts[i].address.to_string();
            let router = self.hosts[i].namespace.clone().context("loopback has no routers")?;
            let inner = format!("{router}-in");
            run("ip", &["netns", "add", &inner])?;
            self.namespaces.push(inner.clone());
            let peer = ["peer", "name", "eth0", "netns", &inner];
            run_in(&router, &[&["link", "add", "lan", "type", "veth"][..], &peer].concat())?;
            run_in(&router, &["addr", "add", &format!("{ROUTER_ADDRESS}/24"), "dev", "lan"])?;
            run_in(&router, &["link", "set", "lan", "up"])?;
            run_in(&inner, &["link", "set", "lo", "up"])?;
            run_in(&inner, &["addr", "add", &format!("{PRIVATE_ADDRESS}/24"), "dev", "eth0"])?;
            run_in(&inner, &["link", "set", "eth0", "up"])?;
            run_in(&inner, &["route", "add", "default", "via", ROUTER_ADDRESS])?;
            let forward = "echo 1 > /proc/sys/net/ipv4/ip_forward";
            run("ip", &["netns", "exec", &router, "sh", "-c", forward])?;
            let rules = ROUTER_RULES.replace("PUBLIC", &public).replace("PRIVATE", PRIVATE_ADDRESS);
            run("ip", &["netns", "exec", &router, "nft", &rules])?;
            self.hosts[i].namespace = Some(inner);
        }
        Ok(())
    }

    /// Gives each machine of the network a name, which all of them can resolve. A later
    /// [`Network::change_address`] changes the name's address, too. Works in namespaces only.
    pub fn use_names(&mut self) -> Result<()> {
        self.has_names = true;
        self.write_names()?;
        // Check that a program in a namespace resolves the names: `ip netns exec` may use another
        // folder on this system.
        let host = self.hosts.first().context("a network without hosts")?;
        let found = host.command("getent").args(["hosts", &self.hub.dns_name()]).output()?;
        ensure!(found.status.success(), "names are not found in a namespace");
        Ok(())
    }

    /// Writes the hosts file of each namespace. Running programs see the file itself and not its
    /// path, so an existing file is overwritten and not replaced.
    pub(super) fn write_names(&self) -> Result<()> {
        let machines = self.hosts.iter().chain([&self.hub]);
        let line = |host: &TestHost| format!("{} {}\n", host.address, host.dns_name());
        let text: String = machines.map(line).chain(["127.0.0.1 localhost\n".to_owned()]).collect();
        for namespace in &self.namespaces {
            let folder = names_folder(namespace);
            fs_err::create_dir_all(&folder)?;
            fs_err::write(folder.join("hosts"), &text)?;
        }
        Ok(())
    }

    /// Disconnects all hosts from the hub, or reconnects them. A second network stays connected.
    /// Works in namespaces only.
    pub fn set_links(&self, up: bool) -> Result<()> {
        (0..self.hosts.len()).try_for_each(|host| self.set_link(host, up))
    }
}
