//! What was typed for `run`, resolved and checked; nothing here asks the network.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use discovery_types::name::Name;
use discovery_types::url::{Host as UrlHost, NodeUrl};
use serde::{Deserialize, Serialize};

use crate::cli;
use crate::exit::End;
use crate::state::Layout;

/// Flags that identity, transport security or supervision depend on: the agent sets them.
const OWN_FLAGS: &[&str] = &[
    "name",
    "data-dir",
    "wal-dir",
    "listen-peer-urls",
    "listen-client-urls",
    "initial-advertise-peer-urls",
    "advertise-client-urls",
    "initial-cluster",
    "initial-cluster-state",
    "initial-cluster-token",
    "force-new-cluster",
    "discovery",
    "discovery-srv",
    "cert-file",
    "key-file",
    "client-cert-auth",
    "trusted-ca-file",
    "peer-cert-file",
    "peer-key-file",
    "peer-client-cert-auth",
    "peer-trusted-ca-file",
    "auto-tls",
    "peer-auto-tls",
    "muster-document",
    "config-file",
];

/// Where a join bundle comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BundleSource {
    /// A file.
    File(PathBuf),
    /// Standard input.
    Stdin,
}

/// How this host is reached, as far as it was said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Addressing {
    /// The host or address for both URLs; worked out from the route to discovery if absent.
    pub advertise: Option<String>,
    /// The port for the other members.
    pub peer_port: u16,
    /// The port for clients.
    pub client_port: u16,
    /// A whole URL for the other members.
    pub peer_url: Option<NodeUrl>,
    /// A whole URL for clients.
    pub client_url: Option<NodeUrl>,
    /// Where to listen; decided from the advertised address if absent.
    pub listen: Option<IpAddr>,
}

/// Where the node listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listen {
    /// For the other members.
    pub peer: SocketAddr,
    /// For clients.
    pub client: SocketAddr,
}

/// How this host is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Addresses {
    /// For the other members.
    pub peer_url: NodeUrl,
    /// For clients.
    pub client_url: NodeUrl,
    /// Where the node listens.
    pub listen: Listen,
}

/// `run`, resolved.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Where state lies.
    pub layout: Layout,
    /// Where the bundle comes from, if it was said.
    pub bundle: Option<BundleSource>,
    /// The member's name, if it was said.
    pub name: Option<Name>,
    /// How the host is reached.
    pub addressing: Addressing,
    /// Takes the place of the machine's own ids.
    pub machine_id_file: Option<PathBuf>,
    /// The node's program.
    pub node_binary: PathBuf,
    /// More flags for the node.
    pub node_flags: Vec<String>,
    /// Where to serve metrics.
    pub metrics_listen: Option<SocketAddr>,
}

impl Settings {
    /// Resolves what was typed. `own_program` is this program, `search_path` the `PATH`.
    pub(crate) fn resolve(
        typed: cli::Run,
        own_program: &Path,
        search_path: Option<&std::ffi::OsStr>,
    ) -> Result<Self, End> {
        let layout = Layout::new(&typed.data_dir.data_dir)
            .map_err(|error| End::Usage(format!("--data-dir: {error}")))?;
        refuse_own_flags(&typed.node_flags)?;
        if let Some(at) = typed.metrics_listen.filter(|at| !at.ip().is_loopback()) {
            let text = format!("--metrics-listen {at}: only a loopback address is served in clear");
            return Err(End::Usage(text));
        }
        Ok(Self {
            layout,
            bundle: typed.bundle_file.as_ref().map(|file| match file.to_str() {
                Some("-") => BundleSource::Stdin,
                _ => BundleSource::File(file.clone()),
            }),
            name: typed.name.as_deref().map(|name| parse("--name", name)).transpose()?,
            node_binary: node_binary(typed.node_binary.as_deref(), own_program, search_path)?,
            node_flags: typed.node_flags.clone(),
            metrics_listen: typed.metrics_listen,
            machine_id_file: typed.machine_id_file.clone(),
            addressing: Addressing::resolve(&typed)?,
        })
    }
}

fn parse<T: std::str::FromStr>(flag: &str, text: &str) -> Result<T, End>
where
    T::Err: std::fmt::Display,
{
    text.parse().map_err(|error| End::Usage(format!("{flag} {text}: {error}")))
}

fn refuse_own_flags(flags: &[String]) -> Result<(), End> {
    for flag in flags {
        let name = flag.trim_start_matches('-').split('=').next().unwrap_or_default();
        if flag.starts_with('-') && OWN_FLAGS.contains(&name) {
            return Err(End::Usage(format!(
                "-- {flag}: the agent sets --{name} itself, from what the cluster has agreed on"
            )));
        }
    }
    Ok(())
}

pub(crate) fn node_binary(
    typed: Option<&Path>,
    own_program: &Path,
    search_path: Option<&std::ffi::OsStr>,
) -> Result<PathBuf, End> {
    /// The name of our own node.
    const NAME: &str = "muster-node";
    let absolute = |path: &Path| {
        std::path::absolute(path).map_err(|error| End::Usage(format!("--node-binary: {error}")))
    };
    if let Some(typed) = typed {
        let path = absolute(typed)?;
        if path.is_file() {
            return Ok(path);
        }
        return Err(End::Usage(format!("--node-binary {}: no such file", path.display())));
    }
    let beside = own_program.with_file_name(NAME);
    let in_path = search_path.into_iter().flat_map(std::env::split_paths).map(|dir| dir.join(NAME));
    std::iter::once(beside).chain(in_path).find(|path| path.is_file()).map_or_else(
        || {
            Err(End::Usage(format!(
                "no {NAME} beside this program or in PATH: say which with --node-binary"
            )))
        },
        |path| absolute(&path),
    )
}

impl Addressing {
    fn resolve(typed: &cli::Run) -> Result<Self, End> {
        let url = |flag, text: &Option<String>| {
            text.as_deref().map(|text| parse::<NodeUrl>(flag, text)).transpose()
        };
        if typed.peer_port == 0 || typed.client_port == 0 {
            return Err(End::Usage(
                "--peer-port and --client-port can't be 0: the others have to know them".to_owned(),
            ));
        }
        if typed.peer_port == typed.client_port {
            return Err(End::Usage("--peer-port and --client-port must differ".to_owned()));
        }
        let addressing = Self {
            advertise: typed.advertise_address.clone(),
            peer_port: typed.peer_port,
            client_port: typed.client_port,
            peer_url: url("--peer-url", &typed.peer_url)?,
            client_url: url("--client-url", &typed.client_url)?,
            listen: typed.listen_address,
        };
        if let Some(advertise) = &addressing.advertise {
            addressing.url_of("--advertise-address", advertise, addressing.peer_port)?;
        }
        Ok(addressing)
    }

    /// Whether everything was said, so that the route to discovery needn't be asked.
    pub(crate) fn is_complete(&self) -> bool {
        self.advertise.is_some() || (self.peer_url.is_some() && self.client_url.is_some())
    }

    fn url_of(&self, flag: &str, host: &str, port: u16) -> Result<NodeUrl, End> {
        let text = match host.parse::<IpAddr>() {
            Ok(address) => return url_of_address(flag, address, port),
            Err(_) => format!("https://{host}:{port}"),
        };
        text.parse().map_err(|error| End::Usage(format!("{flag} {host}: {error}")))
    }

    /// The addresses, where packets to discovery leave from `route`, and `own` are this host's.
    /// `route` may be absent only if the addressing is complete.
    pub(crate) fn addresses(
        &self,
        route: Option<IpAddr>,
        own: &[IpAddr],
    ) -> Result<Addresses, End> {
        let by_default = |port| match (&self.advertise, route) {
            (Some(host), _) => self.url_of("--advertise-address", host, port),
            (None, Some(address)) => url_of_address("the route to discovery", address, port),
            (None, None) => Err(End::Failed("no address is known for this host".to_owned())),
        };
        let chosen = |url: &Option<NodeUrl>, port| match url {
            Some(url) => Ok(url.clone()),
            None => by_default(port),
        };
        let peer_url = chosen(&self.peer_url, self.peer_port)?;
        let client_url = chosen(&self.client_url, self.client_port)?;
        let listen = Listen {
            peer: (self.listen_on(&peer_url, own), self.peer_port).into(),
            client: (self.listen_on(&client_url, own), self.client_port).into(),
        };
        Ok(Addresses { peer_url, client_url, listen })
    }

    /// The advertised address if it is this host's own (nothing else needs to be open); all of
    /// them behind a translated address or a name.
    fn listen_on(&self, url: &NodeUrl, own: &[IpAddr]) -> IpAddr {
        match (self.listen, url.host()) {
            (Some(listen), _) => listen,
            (None, UrlHost::Address(address)) if own.contains(address) => *address,
            // Linux answers on all of 127.0.0.0/8, and shows one address of it.
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

fn url_of_address(flag: &str, address: IpAddr, port: u16) -> Result<NodeUrl, End> {
    NodeUrl::new(address, port).map_err(|error| End::Usage(format!("{flag} {address}: {error}")))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn typed(arguments: &[&str]) -> cli::Run {
        let all = ["muster-agent", "run", "--node-binary", "/bin/sleep"].iter().chain(arguments);
        match cli::Cli::try_parse_from(all).unwrap().command {
            cli::Command::Run(run) => *run,
            _ => panic!("not run"),
        }
    }

    fn resolve(arguments: &[&str]) -> Result<Settings, End> {
        Settings::resolve(typed(arguments), Path::new("/nowhere/muster-agent"), None)
    }

    fn addresses(arguments: &[&str], route: &str, own: &[&str]) -> Addresses {
        let own: Vec<IpAddr> = own.iter().map(|address| address.parse().unwrap()).collect();
        let route = Some(route.parse().unwrap());
        resolve(arguments).unwrap().addressing.addresses(route, &own).unwrap()
    }

    #[test]
    fn port_0_is_nothing_that_others_could_be_told() {
        for flag in ["--peer-port", "--client-port"] {
            assert!(matches!(resolve(&[flag, "0"]), Err(End::Usage(_))), "{flag}");
        }
    }

    #[test]
    fn the_route_to_discovery_gives_both_urls_and_where_to_listen() {
        let found = addresses(&[], "10.0.0.7", &["10.0.0.7", "127.0.0.1"]);
        assert_eq!(found.peer_url.to_string(), "https://10.0.0.7:2380");
        assert_eq!(found.client_url.to_string(), "https://10.0.0.7:2379");
        assert_eq!(found.listen.peer.to_string(), "10.0.0.7:2380");
        assert_eq!(found.listen.client.to_string(), "10.0.0.7:2379");
    }

    #[test]
    fn an_advertised_address_that_is_not_own_is_listened_for_everywhere() {
        let found = addresses(&["--advertise-address", "192.0.2.1"], "10.0.0.7", &["10.0.0.7"]);
        assert_eq!(found.peer_url.to_string(), "https://192.0.2.1:2380");
        assert_eq!(found.listen.peer.to_string(), "0.0.0.0:2380");
    }

    #[test]
    fn any_loopback_address_is_own() {
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
    fn whole_urls_win_over_ports_and_routes() {
        let found = addresses(
            &["--peer-url", "https://198.51.100.4:7000", "--listen-address", "10.0.0.7"],
            "10.0.0.7",
            &["10.0.0.7"],
        );
        assert_eq!(found.peer_url.to_string(), "https://198.51.100.4:7000");
        assert_eq!(found.listen.peer.to_string(), "10.0.0.7:2380");
        assert_eq!(found.client_url.to_string(), "https://10.0.0.7:2379");
    }

    #[test]
    fn an_unspecified_address_is_refused_before_anything_is_sent() {
        let end = resolve(&["--advertise-address", "0.0.0.0"]).unwrap_err();
        assert_eq!(end.code(), 2);
    }

    #[test]
    fn flags_that_identity_depends_on_are_not_passed_on() {
        for flag in ["--name=x", "-name", "--initial-cluster-token"] {
            let end = resolve(&["--", flag, "x"]).unwrap_err();
            assert_eq!(end.code(), 2, "{flag}");
        }
        let settings = resolve(&["--", "--heartbeat-interval", "50"]).unwrap();
        assert_eq!(settings.node_flags, ["--heartbeat-interval", "50"]);
    }

    #[test]
    fn metrics_stay_on_this_host() {
        assert_eq!(resolve(&["--metrics-listen", "10.0.0.7:9000"]).unwrap_err().code(), 2);
        assert!(resolve(&["--metrics-listen", "127.0.0.1:9000"]).is_ok());
    }

    #[test]
    fn a_missing_node_program_is_told_before_anything_else() {
        let nothing = cli::Run { node_binary: None, ..typed(&[]) };
        let end = Settings::resolve(nothing, Path::new("/nowhere/muster-agent"), None).unwrap_err();
        assert!(end.to_string().contains("--node-binary"), "{end}");
        let wrong = cli::Run { node_binary: Some("/no/such/node".into()), ..typed(&[]) };
        assert_eq!(Settings::resolve(wrong, Path::new("/nowhere"), None).unwrap_err().code(), 2);
    }

    #[test]
    fn the_node_beside_the_agent_is_found_before_the_one_in_the_path() {
        let dir = tempfile::tempdir().unwrap();
        let (beside, elsewhere) = (dir.path().join("a"), dir.path().join("b"));
        for folder in [&beside, &elsewhere] {
            std::fs::create_dir(folder).unwrap();
            std::fs::write(folder.join("muster-node"), "").unwrap();
        }
        let own = beside.join("muster-agent");
        let found = node_binary(None, &own, Some(elsewhere.as_os_str())).unwrap();
        assert_eq!(found, beside.join("muster-node"));
        let found = node_binary(None, Path::new("/nowhere/x"), Some(elsewhere.as_os_str()));
        assert_eq!(found.unwrap(), elsewhere.join("muster-node"));
    }

    #[test]
    fn a_dash_is_standard_input() {
        assert_eq!(resolve(&["--bundle-file", "-"]).unwrap().bundle, Some(BundleSource::Stdin));
    }
}
