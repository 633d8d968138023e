//! Hosts with their own addresses: network namespaces where they can be created, otherwise
//! loopback.
//!
//! A namespace network consists of a hub namespace with a bridge, and one namespace per host,
//! joined to the bridge by a veth pair. Discovery and the admin run in the hub. The machine's own
//! network is not touched, and everything is deleted with the hub.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use anyhow::{Context, Result, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::skip;

mod variants;

use variants::names_folder;

/// A host. [`TestHost::command`] starts programs on it.
#[derive(Clone, Debug)]
pub struct TestHost {
    pub name: String,
    /// Only address of the host.
    pub address: IpAddr,
    namespace: Option<String>,
}

impl TestHost {
    /// Returns a command that will run on this host.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        match &self.namespace {
            None => Command::new(program),
            Some(namespace) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace]).arg(program);
                command
            }
        }
    }

    /// Moves the calling thread to this host's network namespace, so that its new connections come
    /// from there.
    pub fn enter_namespace(&self) -> Result<()> {
        let Some(namespace) = &self.namespace else { return Ok(()) };
        let file = fs_err::File::open(format!("/run/netns/{namespace}"))?;
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
            .with_context(|| format!("entering {namespace}"))
    }

    /// Returns the text to type before a command so that it runs on this host.
    pub fn prefix(&self) -> String {
        let enter = |namespace: &String| format!("ip netns exec {namespace} ");
        self.namespace.as_ref().map(enter).unwrap_or_default()
    }

    /// Returns the host's address with a port, as URLs contain it: an IPv6 address in brackets.
    pub fn at_port(&self, port: u16) -> SocketAddr {
        (self.address, port).into()
    }

    /// Whether the host is only an address on the loopback interface.
    pub fn is_loopback(&self) -> bool {
        self.namespace.is_none()
    }
}

/// Version of the Internet Protocol in a network of namespaces. No other version is used there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AddressFamily {
    V4,
    V6,
}

impl AddressFamily {
    /// Returns the address in the hosts' network whose last number is `last`.
    fn address(self, last: u8) -> IpAddr {
        match self {
            Self::V4 => Ipv4Addr::new(10, 77, 0, last).into(),
            Self::V6 => Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, last.into()).into(),
        }
    }

    /// Returns the arguments of `ip` that give this address to an interface.
    fn assignment(self, address: IpAddr, interface: &str) -> Vec<String> {
        let prefix = match self {
            Self::V4 => 24,
            Self::V6 => 64,
        };
        let mut words = vec![format!("{address}/{prefix}"), "dev".to_owned(), interface.to_owned()];
        // Without `nodad`, nobody can use an IPv6 address before the kernel has checked that no
        // other host has it (duplicate address detection).
        words.extend((self == Self::V6).then(|| "nodad".to_owned()));
        [vec!["addr".to_owned(), "add".to_owned()], words].concat()
    }
}

/// A set of hosts, and the hub that all of them reach.
#[derive(Debug)]
pub struct Network {
    /// Host of discovery, Postgres and the admin.
    pub hub: TestHost,
    /// Hosts for agents. No configuration names their addresses.
    pub hosts: Vec<TestHost>,
    namespaces: Vec<String>,
    family: AddressFamily,
    /// Whether the names of this network's machines are in a hosts file of each namespace.
    has_names: bool,
}

/// Number of networks that this process has created. Addresses depend on this number, because
/// networks of parallel tests need different addresses.
static CREATED_NETWORKS: AtomicU8 = AtomicU8::new(0);

/// Port on which a process shows that a part of the loopback network is taken. No host of a test
/// has the address.
const CLAIM_PORT: u16 = 1_127;

/// Returns the second number of this process's loopback addresses. Another test binary that runs at
/// the same time has another one: each process listens on an address with its number until it ends.
fn own_loopback_number() -> u8 {
    static CLAIM: OnceLock<(u8, TcpListener)> = OnceLock::new();
    let (number, _) = CLAIM.get_or_init(|| {
        let first = std::process::id();
        // 127.0.0.1 and its neighbours belong to other programs.
        let numbers = (0..250_u32).map(|step| (first.wrapping_add(step) % 250 + 2) as u8);
        let mut claims = numbers.filter_map(|number| {
            let address = Ipv4Addr::new(127, number, 255, 254);
            Some((number, TcpListener::bind((address, CLAIM_PORT)).ok()?))
        });
        claims.next().expect("fewer than 250 test binaries run at a time")
    });
    *number
}

impl Network {
    /// Creates hosts on 127.x.y.z, which needs no privileges on Linux.
    pub fn loopback(hosts: u8) -> Self {
        let (a, b) = (own_loopback_number(), CREATED_NETWORKS.fetch_add(1, Ordering::Relaxed));
        let host = |name: String, last: u8| TestHost {
            name,
            address: IpAddr::V4(Ipv4Addr::new(127, a, b, last)),
            namespace: None,
        };
        Self {
            hub: host("hub".to_owned(), 1),
            hosts: (1..=hosts).map(|i| host(format!("host-{i}"), 10 + i)).collect(),
            namespaces: Vec::new(),
            family: AddressFamily::V4,
            has_names: false,
        }
    }

    /// Whether links between hosts can be cut, which needs network namespaces and nft. If they
    /// can't, reports that the test is skipped.
    pub fn can_be_cut() -> bool {
        if Command::new("nft").arg("--version").output().is_err() {
            skip::report_missing_program("nft");
            return false;
        }
        let tried = Self::namespaces(1).and_then(|network| network.heal());
        if let Err(error) = &tried {
            skip::report_skip(format_args!("no network namespaces with rules here: {error:#}"));
        }
        tried.is_ok()
    }

    /// Creates hosts in network namespaces of their own; needs root.
    pub fn namespaces(hosts: u8) -> Result<Self> {
        Self::namespaces_of(AddressFamily::V4, hosts)
    }

    /// Creates hosts as [`Network::namespaces`] does, which have IPv6 addresses only.
    pub fn ipv6_namespaces(hosts: u8) -> Result<Self> {
        Self::namespaces_of(AddressFamily::V6, hosts)
    }

    fn namespaces_of(family: AddressFamily, hosts: u8) -> Result<Self> {
        let tag = format!(
            "mu{}x{}",
            std::process::id(),
            CREATED_NETWORKS.fetch_add(1, Ordering::Relaxed)
        );
        let hub_name = format!("{tag}-hub");
        let hub = TestHost {
            name: "hub".to_owned(),
            address: family.address(1),
            namespace: Some(hub_name.clone()),
        };
        let mut network = Self {
            hub,
            hosts: Vec::new(),
            namespaces: vec![hub_name.clone()],
            family,
            has_names: false,
        };
        run("ip", &["netns", "add", &hub_name])?;
        run_in(&hub_name, &["link", "set", "lo", "up"])?;
        run_in(&hub_name, &["link", "add", "br0", "type", "bridge"])?;
        network.assign(&hub_name, network.hub.address, "br0")?;
        run_in(&hub_name, &["link", "set", "br0", "up"])?;
        for i in 1..=hosts {
            let name = format!("{tag}-{i}");
            run("ip", &["netns", "add", &name])?;
            network.namespaces.push(name.clone());
            let port = format!("p{i}");
            let peer = ["peer", "name", "eth0", "netns", &name];
            run_in(&hub_name, &[&["link", "add", &port, "type", "veth"][..], &peer].concat())?;
            run_in(&hub_name, &["link", "set", &port, "master", "br0", "up"])?;
            run_in(&name, &["link", "set", "lo", "up"])?;
            let address = family.address(10 + i);
            network.assign(&name, address, "eth0")?;
            run_in(&name, &["link", "set", "eth0", "up"])?;
            // Check that the namespace can be entered: a container may allow only its creation.
            run("ip", &["netns", "exec", &name, "true"])?;
            network.hosts.push(TestHost {
                name: format!("host-{i}"),
                address,
                namespace: Some(name),
            });
        }
        Ok(network)
    }

    /// Disconnects a host from the network, or reconnects it. Works in namespaces only.
    pub fn set_link(&self, host: usize, up: bool) -> Result<()> {
        let hub = self.hub.namespace.as_deref().context("loopback hosts can't be cut off")?;
        run_in(hub, &["link", "set", &format!("p{}", host + 1), if up { "up" } else { "down" }])
    }

    /// Replaces a host's address, as a new DHCP lease does, and returns the host. `last` is the
    /// last number of the new address. Works in namespaces only.
    pub fn change_address(&mut self, host: usize, last: u8) -> Result<TestHost> {
        let address = self.family.address(last);
        let namespace = self.hosts[host].namespace.as_deref();
        let namespace = namespace.context("loopback hosts keep their address")?;
        run_in(namespace, &["addr", "flush", "dev", "eth0"])?;
        self.assign(namespace, address, "eth0")?;
        self.hosts[host].address = address;
        if self.has_names {
            self.write_names()?;
        }
        Ok(self.hosts[host].clone())
    }

    fn assign(&self, namespace: &str, address: IpAddr, interface: &str) -> Result<()> {
        let words = self.family.assignment(address, interface);
        run_in(namespace, &words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Drops all packets from host `from` to host `to`. Works in namespaces only, and needs nft.
    pub fn cut(&self, from: usize, to: usize) -> Result<()> {
        let host = self.hosts[to].namespace.as_deref().context("loopback hosts can't be cut")?;
        let rules = format!(
            "add table inet cut; \
             add chain inet cut input {{ type filter hook input priority 0; }}; \
             add rule inet cut input ip saddr {} drop",
            self.hosts[from].address
        );
        run("ip", &["netns", "exec", host, "nft", &rules])
    }

    /// Drops new TCP connections from host `from` to this port of host `to`. Existing connections
    /// stay, and `to` can still connect to `from`. Works in namespaces only, and needs nft.
    pub fn refuse_connections(&self, from: usize, to: usize, port: u16) -> Result<()> {
        let host = self.hosts[to].namespace.as_deref().context("loopback hosts can't be cut")?;
        let rules = format!(
            "add table inet cut; \
             add chain inet cut input {{ type filter hook input priority 0; }}; \
             add rule inet cut input ip saddr {} tcp dport {port} tcp flags & (syn | ack) == syn drop",
            self.hosts[from].address
        );
        run("ip", &["netns", "exec", host, "nft", &rules])
    }

    /// Resets all TCP connections between two hosts, and refuses new ones, like a firewall that
    /// rejects packets. To each host, the processes of the other host seem to have ended. Works in
    /// namespaces only, and needs nft.
    pub fn reset_connections(&self, one: usize, other: usize) -> Result<()> {
        for (from, to) in [(one, other), (other, one)] {
            let host =
                self.hosts[to].namespace.as_deref().context("loopback hosts can't be cut")?;
            // Let resets themselves through (`rst == 0` excludes them).
            let rules = format!(
                "add table inet cut; \
                 add chain inet cut input {{ type filter hook input priority 0; }}; \
                 add rule inet cut input ip saddr {} tcp flags & rst == 0 reject with tcp reset",
                self.hosts[from].address
            );
            run("ip", &["netns", "exec", host, "nft", &rules])?;
        }
        Ok(())
    }

    /// Undoes every [`Network::cut`], [`Network::refuse_connections`] and
    /// [`Network::reset_connections`].
    pub fn heal(&self) -> Result<()> {
        for host in self.hosts.iter().filter_map(|host| host.namespace.as_deref()) {
            let rules = "add table inet cut; delete table inet cut";
            run("ip", &["netns", "exec", host, "nft", rules])?;
        }
        Ok(())
    }

    /// Leaves the namespaces in place when this value is dropped, and returns their names.
    pub fn keep_namespaces(&mut self) -> Vec<String> {
        std::mem::take(&mut self.namespaces)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for namespace in self.namespaces.iter().rev() {
            let _ = run("ip", &["netns", "del", namespace]);
            if self.has_names {
                let _ = fs_err::remove_dir_all(names_folder(namespace));
            }
        }
    }
}

fn run_in(namespace: &str, args: &[&str]) -> Result<()> {
    run("ip", &[&["-n", namespace], args].concat())
}

fn run(program: &str, args: &[&str]) -> Result<()> {
    let output = Command::new(program)
        .args(args)
        .output()
        .with_context(|| format!("running {program} {}", args.join(" ")))?;
    ensure!(
        output.status.success(),
        "{program} {} failed: {}",
        args.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}
