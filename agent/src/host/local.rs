//! The machine on which this process runs.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::path::PathBuf;

use discovery_formation::MachineIdentity;

use super::{Host, machine};

/// The real implementation of `Host`.
#[derive(Clone, Debug, Default)]
pub(crate) struct LocalHost {
    /// File with an id of this machine, in place of the system's own ids.
    pub machine_id_file: Option<PathBuf>,
}

impl Host for LocalHost {
    fn facts(&self) -> io::Result<MachineIdentity> {
        machine::read(self.machine_id_file.as_deref())
    }

    fn name(&self) -> String {
        rustix::system::uname().nodename().to_string_lossy().into_owned()
    }

    fn route_to(&self, peer: SocketAddr) -> io::Result<IpAddr> {
        // Connecting a UDP socket sends nothing: the kernel only picks the route.
        let any: SocketAddr = match peer {
            SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
            SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
        };
        let socket = UdpSocket::bind(any)?;
        socket.connect(peer)?;
        Ok(socket.local_addr()?.ip())
    }

    fn addresses(&self) -> Vec<IpAddr> {
        let v4 = std::fs::read_to_string("/proc/net/fib_trie").unwrap_or_default();
        let v6 = std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
        let mut all: Vec<IpAddr> = parse_fib_trie(&v4).into_iter().map(IpAddr::V4).collect();
        all.extend(parse_if_inet6(&v6).into_iter().map(IpAddr::V6));
        all.sort_by_key(|address| (address.is_loopback(), *address));
        all.dedup();
        all
    }

    fn test_bind(&self, at: SocketAddr) -> io::Result<()> {
        TcpListener::bind(at).map(drop)
    }

    fn now(&self) -> jiff::Timestamp {
        jiff::Timestamp::now()
    }
}

/// Parses the local IPv4 addresses in `/proc/net/fib_trie`: each leaf `|-- ADDRESS` that is
/// followed by `/32 host LOCAL`. Leaves out link-local addresses: a host takes such an address
/// while no DHCP server answers, and gives it up later.
fn parse_fib_trie(text: &str) -> Vec<Ipv4Addr> {
    let mut found = Vec::new();
    let mut leaf: Option<Ipv4Addr> = None;
    for line in text.lines() {
        let line = line.trim();
        if let Some(address) = line.strip_prefix("|-- ") {
            leaf = address.parse().ok();
        } else if line.starts_with("/32 host LOCAL")
            && let Some(address) = leaf
            && !address.is_link_local()
            && !found.contains(&address)
        {
            found.push(address);
        }
    }
    found
}

/// Parses the IPv6 addresses in `/proc/net/if_inet6`. Leaves out link-local addresses, because they
/// can't be advertised.
fn parse_if_inet6(text: &str) -> Vec<Ipv6Addr> {
    text.lines()
        .filter_map(|line| line.split_whitespace().next())
        .filter_map(|hex| u128::from_str_radix(hex, 16).ok().filter(|_| hex.len() == 32))
        .map(Ipv6Addr::from)
        .filter(|address| !address.is_unicast_link_local())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_leaves_of_the_route_table_are_this_hosts_addresses() {
        let text = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\n     \
                    +-- 10.0.0.0/24 2 0 2\n        |-- 10.0.0.0\n           /24 link UNICAST\n        \
                    |-- 10.0.0.7\n           /32 host LOCAL\n        |-- 10.0.0.255\n           \
                    /32 link BROADCAST\nLocal:\n        |-- 10.0.0.7\n           /32 host LOCAL\n        \
                    |-- 169.254.7.1\n           /32 host LOCAL\n";
        assert_eq!(parse_fib_trie(text), [Ipv4Addr::new(10, 0, 0, 7)]);
    }

    #[test]
    fn link_local_addresses_are_left_out() {
        let text = "00000000000000000000000000000001 01 80 10 80       lo\n\
                    fe800000000000000000000000000001 02 40 20 80     eth0\n\
                    20010db8000000000000000000000007 02 40 00 80     eth0\njunk\n";
        assert_eq!(
            parse_if_inet6(text),
            [Ipv6Addr::LOCALHOST, "2001:db8::7".parse::<Ipv6Addr>().unwrap()]
        );
    }

    #[test]
    fn the_route_to_this_machine_starts_on_this_machine() {
        let host = LocalHost::default();
        let own = host.route_to("127.0.0.1:9".parse().unwrap()).unwrap();
        assert!(own.is_loopback());
        assert!(host.addresses().contains(&own));
    }

    #[test]
    fn an_address_that_is_listened_on_can_not_be_bound() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = LocalHost::default();
        let at = taken.local_addr().unwrap();
        assert_eq!(host.test_bind(at).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(taken);
        host.test_bind(at).unwrap();
    }
}
