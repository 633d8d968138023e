//! The address flags as typed, and the addresses that follow from them. Nothing here uses the
//! network.
//!
//! A member's first addresses are those that its cluster agreed on. Once its node has run, each
//! start can give the member new addresses. An address that a start doesn't give stays unchanged.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use discovery_types::url::{NodeUrl, UrlHost};

use crate::cli;
use crate::exit::ExitError;
use crate::state::addresses::{Addresses, ListenAddresses};

/// Default port on which a node serves the other members.
const PEER_PORT: u16 = 2380;
/// Default port on which a node serves clients.
const CLIENT_PORT: u16 = 2379;

/// The address flags of this start; absent flags are `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AddressFlags {
    /// Host or address for both URLs. If absent, it is the source address of packets to discovery.
    pub advertise: Option<String>,
    /// Port on which this host's node serves the other members.
    pub peer_port: Option<u16>,
    /// Port on which this host's node serves clients.
    pub client_port: Option<u16>,
    /// Complete URL at which the other members reach this host's node.
    pub peer_url: Option<NodeUrl>,
    /// Complete URL at which clients reach this host's node.
    pub client_url: Option<NodeUrl>,
    /// Address to listen on; derived from the advertised address if absent.
    pub listen: Option<IpAddr>,
}

impl AddressFlags {
    /// Parses and checks the address flags as typed.
    pub(crate) fn resolve(typed: &cli::RunArguments) -> Result<Self, ExitError> {
        let url = |flag: &str, text: &Option<String>| {
            let parsed = text.as_deref().map(str::parse::<NodeUrl>).transpose();
            parsed.map_err(|error| {
                ExitError::Usage(format!("{flag} {}: {error}", text.as_deref().unwrap_or_default()))
            })
        };
        if [typed.peer_port, typed.client_port].contains(&Some(0)) {
            return Err(ExitError::Usage(
                "--peer-port and --client-port can't be 0: the others have to know them".to_owned(),
            ));
        }
        let addressing = Self {
            advertise: typed.advertise_address.clone(),
            peer_port: typed.peer_port,
            client_port: typed.client_port,
            peer_url: url("--peer-url", &typed.peer_url)?,
            client_url: url("--client-url", &typed.client_url)?,
            listen: typed.listen_address,
        };
        if addressing.peer_port() == addressing.client_port() {
            return Err(ExitError::Usage("--peer-port and --client-port must differ".to_owned()));
        }
        if let Some(advertise) = &addressing.advertise {
            url_of("--advertise-address", advertise, addressing.peer_port())?;
        }
        Ok(addressing)
    }

    /// Returns whether the flags give both the peer URL and the client URL. If so, it doesn't
    /// matter from which address packets to discovery leave.
    pub(crate) fn is_complete(&self) -> bool {
        self.advertise.is_some() || (self.peer_url.is_some() && self.client_url.is_some())
    }

    /// Whether any flag names an address of this host.
    pub(crate) fn has_address(&self) -> bool {
        let urls = [&self.peer_url, &self.client_url];
        self.advertise.is_some() || self.listen.is_some() || urls.iter().any(|url| url.is_some())
    }

    fn peer_port(&self) -> u16 {
        self.peer_port.unwrap_or(PEER_PORT)
    }

    fn client_port(&self) -> u16 {
        self.client_port.unwrap_or(CLIENT_PORT)
    }

    /// Returns the addresses for a first start. `route` is the address from which packets to
    /// discovery leave. It can be `None` only if [`Self::is_complete`] is true. `own` are this
    /// host's addresses.
    pub(crate) fn addresses(
        &self,
        route: Option<IpAddr>,
        own: &[IpAddr],
    ) -> Result<Addresses, ExitError> {
        let by_default = |port| match (&self.advertise, route) {
            (Some(host), _) => url_of("--advertise-address", host, port),
            (None, Some(address)) => url_of_address("the route to discovery", address, port),
            (None, None) => Err(ExitError::Failed("no address is known for this host".to_owned())),
        };
        let chosen = |url: &Option<NodeUrl>, port| match url {
            Some(url) => Ok(url.clone()),
            None => by_default(port),
        };
        let peer_url = chosen(&self.peer_url, self.peer_port())?;
        let client_url = chosen(&self.client_url, self.client_port())?;
        let listen = ListenAddresses {
            peer: (self.listen_address(&peer_url, own), self.peer_port()).into(),
            client: (self.listen_address(&client_url, own), self.client_port()).into(),
        };
        Ok(Addresses { peer_url, client_url, listen })
    }

    /// Returns the addresses of a member whose addresses so far are `before`. An address changes
    /// only if a flag of this start gives another. `own` are this host's addresses.
    pub(crate) fn apply_to(
        &self,
        before: &Addresses,
        own: &[IpAddr],
    ) -> Result<Addresses, ExitError> {
        let place = |said: &Option<NodeUrl>, port: Option<u16>, url: &NodeUrl, at: SocketAddr| {
            let now = match (said, &self.advertise) {
                (Some(said), _) => said.clone(),
                (None, Some(host)) => {
                    url_of("--advertise-address", host, port.unwrap_or(url.port()))?
                }
                (None, None) => match port {
                    Some(port) => url_of("the address of before", &url.host().to_string(), port)?,
                    None => url.clone(),
                },
            };
            // If the URL's host is unchanged, keep the listen address. The host may be a translated
            // (NAT) address that leads to that listen address.
            let same = now.host() == url.host() && self.listen.is_none();
            let ip = if same { at.ip() } else { self.listen_address(&now, own) };
            Ok::<_, ExitError>((now, SocketAddr::new(ip, port.unwrap_or(at.port()))))
        };
        let Addresses { peer_url, client_url, listen } = before;
        let (peer_url, peer) = place(&self.peer_url, self.peer_port, peer_url, listen.peer)?;
        let (client_url, client) =
            place(&self.client_url, self.client_port, client_url, listen.client)?;
        if peer == client {
            return Err(ExitError::Usage(format!(
                "peers and clients can't both be served at {peer}"
            )));
        }
        Ok(Addresses { peer_url, client_url, listen: ListenAddresses { peer, client } })
    }

    /// Moves each listen address that the host has lost to `route`, the source address of packets
    /// to discovery. Keeps addresses that a flag of this start gives. `None` if nothing changes, or
    /// if `route` is loopback, unspecified or not in `own`.
    pub(crate) fn follow_host(
        &self,
        before: &Addresses,
        own: &[IpAddr],
        route: IpAddr,
    ) -> Option<Addresses> {
        if is_lost(route, own) || route.is_loopback() || route.is_unspecified() {
            return None;
        }
        let is_given = self.advertise.is_some() || self.listen.is_some();
        let place = |said: &Option<NodeUrl>, url: &NodeUrl, at: SocketAddr| {
            if is_given || said.is_some() || !is_lost(at.ip(), own) {
                return Some((url.clone(), at));
            }
            let url = match url.host() {
                UrlHost::Address(address) if *address == at.ip() => {
                    NodeUrl::new(route, url.port()).ok()?
                }
                // Keep the URL: its name or its translated (NAT) address may still lead to this
                // host.
                UrlHost::Address(_) | UrlHost::Dns(_) => url.clone(),
            };
            Some((url, SocketAddr::new(route, at.port())))
        };
        let (peer_url, peer) = place(&self.peer_url, &before.peer_url, before.listen.peer)?;
        let (client_url, client) =
            place(&self.client_url, &before.client_url, before.listen.client)?;
        let now = Addresses { peer_url, client_url, listen: ListenAddresses { peer, client } };
        (now != *before).then_some(now)
    }

    /// Returns the address to listen on: the value of `--listen-address`, if the flag was given.
    /// Otherwise returns the advertised address if this host has it, so that no other address is
    /// open. If the advertised address is a name or a translated (NAT) address, returns the
    /// unspecified address.
    fn listen_address(&self, url: &NodeUrl, own: &[IpAddr]) -> IpAddr {
        match (self.listen, url.host()) {
            (Some(listen), _) => listen,
            (None, UrlHost::Address(address)) if own.contains(address) => *address,
            // Listen on the loopback address even if `own` lacks it. Linux accepts connections on
            // all of 127.0.0.0/8, but lists only one address of it.
            (None, UrlHost::Address(address)) if address.is_loopback() => *address,
            (None, UrlHost::Address(IpAddr::V4(_))) => Ipv4Addr::UNSPECIFIED.into(),
            (None, UrlHost::Address(IpAddr::V6(_)) | UrlHost::Dns(_)) => {
                if own.iter().any(IpAddr::is_ipv6) {
                    Ipv6Addr::UNSPECIFIED.into()
                } else {
                    Ipv4Addr::UNSPECIFIED.into()
                }
            }
        }
    }
}

/// Whether `address` is missing in the host's addresses `own`. Loopback and unspecified addresses
/// are never lost.
pub(crate) fn is_lost(address: IpAddr, own: &[IpAddr]) -> bool {
    !address.is_unspecified() && !address.is_loopback() && !own.contains(&address)
}

/// Parses a client URL from a complete URL, HOST:PORT, or HOST with the default port.
pub(crate) fn client_url(flag: &str, text: &str) -> Result<NodeUrl, ExitError> {
    let has_port = text.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    let is_address = text.parse::<IpAddr>().is_ok();
    let url = match text {
        text if text.contains("://") => text.to_owned(),
        text if has_port && !is_address => format!("https://{text}"),
        text => return url_of(flag, text, CLIENT_PORT),
    };
    url.parse().map_err(|error| ExitError::Usage(format!("{flag} {text}: {error}")))
}

fn url_of(flag: &str, host: &str, port: u16) -> Result<NodeUrl, ExitError> {
    let text = match host.trim_matches(['[', ']']).parse::<IpAddr>() {
        Ok(address) => return url_of_address(flag, address, port),
        Err(_) => format!("https://{host}:{port}"),
    };
    text.parse().map_err(|error| ExitError::Usage(format!("{flag} {host}: {error}")))
}

fn url_of_address(flag: &str, address: IpAddr, port: u16) -> Result<NodeUrl, ExitError> {
    NodeUrl::new(address, port)
        .map_err(|error| ExitError::Usage(format!("{flag} {address}: {error}")))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn addressing(arguments: &[&str]) -> Result<AddressFlags, ExitError> {
        let all = ["muster-agent", "run"].iter().chain(arguments);
        match cli::AgentCli::try_parse_from(all).unwrap().command {
            cli::AgentCommand::Run(run) => AddressFlags::resolve(&run),
            _ => panic!("not run"),
        }
    }

    fn addresses(arguments: &[&str], route: &str, own: &[&str]) -> Addresses {
        let own: Vec<IpAddr> = own.iter().map(|address| address.parse().unwrap()).collect();
        addressing(arguments).unwrap().addresses(Some(route.parse().unwrap()), &own).unwrap()
    }

    #[test]
    fn both_urls_and_the_listen_addresses_follow_from_the_route_to_discovery() {
        let found = addresses(&[], "10.0.0.7", &["10.0.0.7", "127.0.0.1"]);
        assert_eq!(found.peer_url.to_string(), "https://10.0.0.7:2380");
        assert_eq!(found.client_url.to_string(), "https://10.0.0.7:2379");
        assert_eq!(found.listen.peer.to_string(), "10.0.0.7:2380");
        assert_eq!(found.listen.client.to_string(), "10.0.0.7:2379");
    }

    #[test]
    fn a_client_url_can_be_typed_as_a_host_with_or_without_port_or_as_a_whole_url() {
        for (typed, url) in [
            ("10.1.0.1", "https://10.1.0.1:2379"),
            ("10.1.0.1:3379", "https://10.1.0.1:3379"),
            ("db-1.example.org", "https://db-1.example.org:2379"),
            ("db-1.example.org:3379", "https://db-1.example.org:3379"),
            ("fd00::1", "https://[fd00::1]:2379"),
            ("[fd00::1]:3379", "https://[fd00::1]:3379"),
            ("https://10.1.0.1:2379", "https://10.1.0.1:2379"),
        ] {
            assert_eq!(client_url("--x", typed).unwrap().to_string(), url, "{typed}");
        }
        for typed in ["", "http://10.1.0.1:2379", "a b", "10.1.0.1:0", "0.0.0.0"] {
            assert_eq!(client_url("--x", typed).unwrap_err().code(), 2, "{typed}");
        }
    }

    #[test]
    fn an_advertised_address_that_this_host_lacks_means_listening_on_all_addresses() {
        let found = addresses(&["--advertise-address", "192.0.2.1"], "10.0.0.7", &["10.0.0.7"]);
        assert_eq!(found.peer_url.to_string(), "https://192.0.2.1:2380");
        assert_eq!(found.listen.peer.to_string(), "0.0.0.0:2380");
    }

    #[test]
    fn every_loopback_address_counts_as_this_hosts_own() {
        let found = addresses(&["--advertise-address", "127.0.0.12"], "127.0.0.1", &["127.0.0.1"]);
        assert_eq!(found.listen.peer.to_string(), "127.0.0.12:2380");
    }

    #[test]
    fn a_name_is_advertised_as_it_is() {
        let found = addresses(
            &["--advertise-address", "db-1.example.org", "--peer-port", "3380"],
            "10.0.0.7",
            &["10.0.0.7"],
        );
        assert_eq!(found.peer_url.to_string(), "https://db-1.example.org:3380");
        assert_eq!(found.listen.peer.to_string(), "0.0.0.0:3380");
    }

    #[test]
    fn whole_urls_override_ports_and_the_route() {
        let found = addresses(
            &["--peer-url", "https://198.51.100.4:7000", "--listen-address", "10.0.0.7"],
            "10.0.0.7",
            &["10.0.0.7"],
        );
        assert_eq!(found.peer_url.to_string(), "https://198.51.100.4:7000");
        assert_eq!(found.listen.peer.to_string(), "10.0.0.7:2380");
        assert_eq!(found.client_url.to_string(), "https://10.0.0.7:2379");
    }

    /// Returns the addresses after a start with `arguments`, of a member that was at 10.0.0.7 with
    /// the default ports.
    fn addresses_after_start(arguments: &[&str], own: &[&str]) -> Result<[String; 4], ExitError> {
        let before = addresses(&[], "10.0.0.7", &["10.0.0.7"]);
        let own: Vec<IpAddr> = own.iter().map(|address| address.parse().unwrap()).collect();
        let Addresses { peer_url, client_url, listen } =
            addressing(arguments)?.apply_to(&before, &own)?;
        let listen = [listen.peer, listen.client].map(|at| at.to_string());
        Ok([&[peer_url.to_string(), client_url.to_string()], &listen[..]]
            .concat()
            .try_into()
            .unwrap())
    }

    #[test]
    fn a_member_keeps_its_addresses_except_those_that_a_later_start_gives() {
        let [peer, client] = ["https://10.0.0.7:2380", "https://10.0.0.7:2379"];
        let stays = [peer, client, "10.0.0.7:2380", "10.0.0.7:2379"].map(str::to_owned);
        assert_eq!(addresses_after_start(&[], &["10.0.0.9"]).unwrap(), stays, "nothing was said");
        let same = ["--advertise-address", "10.0.0.7"];
        assert_eq!(
            addresses_after_start(&same, &["10.0.0.9"]).unwrap(),
            stays,
            "the same was said"
        );
        let moved =
            addresses_after_start(&["--advertise-address", "10.1.0.7"], &["10.1.0.7"]).unwrap();
        let at = ["https://10.1.0.7:2380", "https://10.1.0.7:2379"];
        assert_eq!(moved, [at[0], at[1], "10.1.0.7:2380", "10.1.0.7:2379"]);
        let port = addresses_after_start(&["--peer-port", "3380"], &["10.0.0.7"]).unwrap();
        assert_eq!(port, ["https://10.0.0.7:3380", client, "10.0.0.7:3380", "10.0.0.7:2379"]);
        let behind =
            addresses_after_start(&["--peer-url", "https://192.0.2.1:7000"], &["10.0.0.7"])
                .unwrap();
        assert_eq!(behind, ["https://192.0.2.1:7000", client, "0.0.0.0:2380", "10.0.0.7:2379"]);
        let listens =
            addresses_after_start(&["--listen-address", "0.0.0.0"], &["10.0.0.7"]).unwrap();
        assert_eq!(listens, [peer, client, "0.0.0.0:2380", "0.0.0.0:2379"]);
        assert_eq!(addresses_after_start(&["--peer-port", "2379"], &[]).unwrap_err().code(), 2);
    }

    #[test]
    fn a_member_follows_its_host_to_another_address_unless_a_flag_gives_one() {
        let before = addresses(&[], "10.0.0.7", &["10.0.0.7"]);
        let own = |list: &[&str]| -> Vec<IpAddr> {
            list.iter().map(|address| address.parse().unwrap()).collect()
        };
        let route: IpAddr = "10.1.0.9".parse().unwrap();
        let follow = |arguments: &[&str], before: &Addresses, list: &[&str], route: IpAddr| {
            addressing(arguments).unwrap().follow_host(before, &own(list), route)
        };
        let moved = follow(&[], &before, &["10.1.0.9"], route).unwrap();
        assert_eq!(moved.peer_url.to_string(), "https://10.1.0.9:2380");
        assert_eq!(moved.client_url.to_string(), "https://10.1.0.9:2379");
        assert_eq!(moved.listen.peer.to_string(), "10.1.0.9:2380");
        assert_eq!(moved.listen.client.to_string(), "10.1.0.9:2379");
        let both = ["10.0.0.7", "10.1.0.9"];
        assert_eq!(follow(&[], &before, &both, route), None, "its address is still there");
        let loopback = "127.0.0.1".parse().unwrap();
        assert_eq!(follow(&[], &before, &["127.0.0.1"], loopback), None, "no network");
        assert_eq!(follow(&[], &before, &["10.2.0.1"], route), None, "the route is of before");
        for flag in ["--advertise-address", "--listen-address"] {
            assert_eq!(follow(&[flag, "10.0.0.7"], &before, &["10.1.0.9"], route), None, "{flag}");
        }
        let named = ["--advertise-address", "db-7.example.org", "--listen-address", "10.0.0.7"];
        let named = addresses(&named, "10.0.0.7", &["10.0.0.7"]);
        let moved = follow(&[], &named, &["10.1.0.9"], route).unwrap();
        assert_eq!(moved.peer_url, named.peer_url, "the name may lead to the new address");
        assert_eq!(moved.listen.peer.to_string(), "10.1.0.9:2380");
    }
}
